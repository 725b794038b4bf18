"""The arguments of `attention`, checked once: from `AttentionOptions` to `Scores`.

A keyword of another library is refused with the keyword to use here (`refuse`), and an input that cannot be
used with how to convert it. Such messages are made only after a call has failed.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Proxy

from .engines.scores import Scores
from .errors import ArgumentError, MaskError, ShapeError, nearest
from .masks import CAUSAL, Mask, mask_of_call
from .scoring import Bias, Scoring

SHAPES = {"q": "[B, H, T, D]", "k": "[B, Hk, S, D]", "v": "[B, Hk, S, Dv]"}
REQUIRED: Any = ...  # a default, so that a call by other names reaches our error; never a value
HINTS = "wrong"  # the name of the ** parameter that collects keywords of other libraries for an error message
EMBEDDING = "token ids need an embedding first, torch.nn.Embedding(num_ids, d_model)"


# The keywords of other libraries


def our_words(**words: str) -> dict[str, str]:
    """Return advice for keywords whose names differ here: `our_words(dropout="dropout_p attn_drop")`."""
    return {theirs: f"its name is {ours} here" for ours, all_ in words.items() for theirs in all_.split()}


OF_EVERY_CALL = {
    "key_padding_mask": "its True = padding; pass mask=headwise.Mask.padding(~key_padding_mask)",
    "attention_mask": (
        "its 1 = may attend, as in mask=; pass [B, S] as mask=headwise.Mask.padding(attention_mask.bool()), "
        "[B, T, S] as mask=attention_mask[:, None], an additive one as bias="
    ),
    "average_attn_weights": "the weights here are those of each head; their mean is weights.mean_heads()",
}

OF_ATTENTION = {
    **OF_EVERY_CALL,
    **our_words(
        q="query",
        k="key",
        v="value",
        scale="softmax_scale sm_scale",
        window="window_size sliding_window",
        softcap="logits_soft_cap",
        bias="attn_bias",
        dropout="dropout_p dropout_rate",
    ),
    "attn_mask": (
        "in scaled_dot_product_attention True = may attend, as in mask=: pass mask=attn_mask; in "
        "torch.nn.MultiheadAttention True = may NOT: pass mask=~attn_mask; pass a float mask as bias="
    ),
    "is_causal": (
        "its name is causal here; with more keys than queries it aligns the last query with the last key, "
        "and torch's is_causal the first query with the first key"
    ),
    "enable_gqa": "leave it out: k and v may always have fewer heads than q",
    "need_weights": "leave it out: weights are computed only on demand; use output, _ = attention(q, k, v)",
}


def refuse(callee: str, wrong: Mapping[str, object], advice: Mapping[str, str], of: object) -> NoReturn:
    """Raise for keywords that `callee` does not have: with our keyword, or the nearest one of `of`.

    Raises:
        ArgumentError: a keyword of another library.
        TypeError: an unknown keyword.
    """
    for name, value in wrong.items():
        if name in advice:
            raise ArgumentError(f"{name} must not be given to {callee}: got {text_of(value)}; {advice[name]}")
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ours = [
        p.name for p in signature(cast("Callable[..., object]", of)).parameters.values() if p.kind in by_name
    ]
    name = next(iter(wrong))
    raise TypeError(f"{callee} has no argument {name!r}: {nearest(name, [n for n in ours if n != 'self'])}")


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., object])


def with_displayed_signature(function: Function) -> Function:
    """Set the signature that `help` and `inspect.signature` display, and return the function itself.

    It is the signature as users call it: a parameter whose default is `REQUIRED` has no default, and the
    parameter that collects other libraries' keywords is left out. A call is not changed.
    """
    whole = signature(function)
    parameters = [
        parameter.replace(default=Parameter.empty) if parameter.default is REQUIRED else parameter
        for parameter in whole.parameters.values()
        if not (parameter.kind is Parameter.VAR_KEYWORD and parameter.name == HINTS)
    ]
    function.__dict__["__signature__"] = whole.replace(parameters=parameters)
    return function


def answering(
    advice: Mapping[str, str],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator of constructors that explains wrong names or numbers of arguments."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except TypeError:
                try:
                    _check_binding(function, args, kwargs, advice)
                except (ArgumentError, TypeError) as error:
                    raise error from None  # without Python's own error above it
                raise

        return call

    return decorate


def _check_binding(
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    advice: Mapping[str, str],
) -> None:
    """Raise if this constructor does not take these keywords, or not so many positional arguments."""
    callee = function.__qualname__.removesuffix(".__init__")
    parameters = signature(function).parameters.values()
    names = {parameter.name for parameter in parameters}
    if not names.issuperset(kwargs):
        wrong = {name: value for name, value in kwargs.items() if name not in names}
        refuse(callee, wrong, advice, function)
    places = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places):
        others = ", ".join(f"{p.name}=" for p in parameters if p.kind is Parameter.KEYWORD_ONLY)
        raise TypeError(
            f"positional arguments of {callee} must be no more than {' and '.join(places[1:])}: got "
            f"{text_of(args[len(places)])} after them; pass it by keyword, one of {others}"
        )


def text_of(value: object) -> str:
    """Return a value as text for an error message: a tensor by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)


# What cannot be used as a tensor


def not_a_tensor(name: str, x: object) -> ArgumentError | TypeError:
    """Return the error about another type in place of a tensor, with how to convert it."""
    if x is REQUIRED:
        return TypeError(f"{name} must be given: got no value; pass it by position or as {name}=")
    if isinstance(x, Proxy):
        advice = (
            "torch.fx.symbolic_trace can trace a model with a headwise module in it, not the module alone; "
            "for a function use torch.fx.wrap; or use torch.export"
        )
    elif isinstance(x, Mask):
        advice = "pass a mask as mask="
    elif hasattr(x, "last_hidden_state"):
        advice = "pass the tensor in this output of a model, its last_hidden_state"
    elif isinstance(x, Mapping):
        advice = EMBEDDING
    elif isinstance(x, tuple) and x and isinstance(x[0], Tensor):
        advice = "an attention layer returns output and weights: pass only the output, output, _ = mha(x)"
    elif type(x).__module__ == "numpy":
        advice = f"use torch.from_numpy({name})"
    else:
        advice = "use torch.as_tensor"
    return ArgumentError(f"{name} must be a tensor: got {type(x).__name__}; {advice}")


def nested(name: str, x: Tensor, shape: str, tensor: str) -> ArgumentError:
    """Return the error about a nested tensor, and how the nested tensor of that name is padded."""
    return ArgumentError(
        f"{name} must be a dense tensor {shape}: got a nested tensor of {x.size(0)} sequences; pad it, "
        f"{tensor}.to_padded_tensor(0.0) with mask=headwise.Mask.padding([len(y) for y in {tensor}.unbind()])"
    )


# The scores of a call


class AttentionOptions(NamedTuple):
    """The options of a call of `attention`, in the order of its arguments; documented there."""

    mask: Mask | Tensor | None = None
    causal: bool = False
    window: int | tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: Bias | None = None
    sinks: Tensor | None = None


def scores_from(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Scores:
    """Check q, k, v and the options of a call, and return its scores.

    Raises:
        ShapeError: wrong number of dimensions, sizes that disagree or are 0, but for the batch.
        ArgumentError: dtypes or devices that differ; a bad softcap, bias or sinks.
        MaskError: a mask that does not fit, or cannot mean what it seems to mean; causal or window with so
            many more queries than keys that some see none.
    """
    check_tensors(q, k, v)
    return Scores(q, k, *rules_and_scoring(q, (*q.shape[:3], k.shape[2]), options))


def rules_and_scoring(
    q: Tensor, shape: tuple[int, int, int, int], options: AttentionOptions
) -> tuple[Mask, Scoring]:
    """Return the mask and the scoring of a call [B, H, T, S]; q holds all of its queries or some.

    Raises: as `scores_from`.
    """
    B, H, T, S = shape
    mask, causal, window, scale, softcap, bias, sinks = options
    rules = mask_of_call(mask, B, T)
    if causal is not True and causal is not False:
        check_causal(causal)
    if causal:
        rules = CAUSAL if mask is None else rules & CAUSAL
    if window is not None:
        rules = rules & window_rule(window)
    if (causal or window is not None) and not torch.compiler.is_compiling() and T > S:
        _check_sight(T, S, causal, window)  # traced sizes are not compared: a graph is for all lengths
    rules = rules.bind(B, H, T, S)
    scoring = Scoring.of(q.shape[3], scale=scale, softcap=softcap, bias=bias, sinks=sinks)
    if bias is not None or sinks is not None:
        scoring.check(B, H, T, S)
    if scoring.bias is not None and scoring.bias.dtype == torch.float64 and q.dtype != torch.float64:
        scoring = replace(scoring, bias=scoring.bias.float())  # a kernel cannot hold tiles of float64
    if mask is not None or bias is not None or sinks is not None:
        rules, scoring = rules.beside(q.device), scoring.beside(q.device)
        _check_devices(q, rules, scoring)
    return rules, scoring


def window_rule(window: int | tuple[int, int]) -> Mask:
    """Return the rule of the argument `window`: a number of keys, or a pair (before, after)."""
    pair = isinstance(window, (tuple, list))
    if -1 in window if pair else window == -1:  # type: ignore[operator]
        raise MaskError(
            f"window must not be negative: got {window}; if -1 means no limit, leave window out, or give the "
            "sequence length on that side; for (-1, 0) use causal=True"
        )
    return Mask.window(left_right=window) if pair else Mask.window(window)  # type: ignore[arg-type]


def _check_sight(T: int, S: int, causal: bool, window: int | tuple[int, int] | None) -> None:
    """Raise `MaskError` where queries lie so far before the first of fewer keys that they see none."""
    pair = isinstance(window, (tuple, list))
    blind = T - S - (window[1] if isinstance(window, (tuple, list)) and not causal else 0)
    if blind <= 0:
        return
    which = "query 0 sees" if blind == 1 else f"queries 0 to {blind - 1} see"
    name, rule, other = f"window={window}", f"Mask.window({'left_right=' if pair else ''}{window})", ""
    if causal:
        name, rule = "causal=True", "Mask.causal()"
        other = f", or mask=torch.ones({T}, {S}).tril() to align the first query and key, as torch does"
    raise MaskError(
        f"{name} must leave every query a key: {which} none of {S} keys, since the last of {T} queries is "
        f"aligned with the last key; use mask={rule} instead for output 0 in these queries{other}"
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless these are [B, H, T, D], [B, Hk, S, D] and [B, Hk, S, Dv], of one dtype and device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        if x.is_nested:
            raise nested(name, x, SHAPES[name], "x")
        if x.ndim != 4:
            raise ShapeError(
                f"{name} must have 4 dimensions {SHAPES[name]}: got {x.ndim}, {list(x.shape)}; "
                f"{_four_dimensions(name, x)}"
            )
        if not x.is_floating_point():
            raise ArgumentError(
                f"{name} must be floating point: got {x.dtype}; use {name}.float(); {EMBEDDING}"
            )
        if 0 in x.shape and 0 in x.shape[1:]:  # an empty batch has an empty result
            raise ShapeError(
                f"{name} must not be empty: got {list(x.shape)} for {SHAPES[name]}; "
                "skip the call where there is nothing to attend to"
            )
        if x.dtype != q.dtype:
            raise ArgumentError(
                f"{name} must have the dtype of q: {x.dtype} and {q.dtype}; use {name}.to(q.dtype)"
            )
        if x.device != q.device:
            raise ArgumentError(
                f"{name} must be on the device of q: {x.device} and {q.device}; use {name}.to(q.device)"
            )
    _agree("q", "k", "batch", q.shape[0], k.shape[0])
    _agree("q", "k", "head_dim", q.shape[3], k.shape[3])
    _agree("k", "v", "batch", k.shape[0], v.shape[0])
    _agree("k", "v", "num_kv_heads", k.shape[1], v.shape[1])
    _agree("k", "v", "key_len", k.shape[2], v.shape[2])
    H, Hk = q.shape[1], k.shape[1]
    if H % Hk:
        fitting = [n for n in range(1, H + 1) if H % n == 0]
        advice = f"use one of {', '.join(map(str, fitting))} key heads"
        if q.shape[2] % k.shape[2] == 0:
            advice += ", or transpose(1, 2) of q, k and v if they are [B, length, heads, D]"
        raise ShapeError(
            f"num_heads must be a multiple of num_kv_heads: {H} = {H // Hk} * {Hk} + {H % Hk}; {advice}"
        )


def _four_dimensions(name: str, x: Tensor) -> str:
    """Return advice for an input that does not have four dimensions."""
    if x.ndim < 4 and not x.is_floating_point():
        return EMBEDDING
    advice = "add batch and head dimensions of size 1 where they are missing"
    if x.ndim == 3:
        advice += f"; split [B, T, d_model] with {name}.unflatten(-1, (num_heads, -1)).transpose(1, 2)"
    return advice


def _agree(a: str, b: str, dimension: str, size_a: int, size_b: int) -> None:
    if size_a != size_b:
        raise ShapeError(
            f"{a} and {b} must agree in {dimension}: {size_a} and {size_b}; "
            f"shapes are {a} {SHAPES[a]}, {b} {SHAPES[b]}"
        )


def _check_devices(q: Tensor, mask: Mask, scoring: Scoring) -> None:
    for name, value in (*mask.tensors.items(), *scoring.tensors.items()):
        if value.device != q.device:
            kind = ArgumentError if name in scoring.tensors else MaskError
            name = {"keys": "lengths", "queries": "query_lengths", "allowed": "mask"}.get(name, name)
            raise kind(f"{name} must be on the device of q: {value.device} and {q.device}; use .to(q.device)")


def check_causal(causal: object) -> None:
    """Raise `ArgumentError` for a value that is not a bool, most often a mask."""
    single = getattr(causal, "ndim", 0) == 0 and not isinstance(causal, (Mask, str, list, tuple))
    if not single:
        raise ArgumentError(f"causal must be True or False: got {text_of(causal)}; pass a mask as mask=")


def check_dropout(dropout: float) -> None:
    """Raise `ArgumentError` unless 0 <= dropout < 1."""
    if isinstance(dropout, Tensor) or not hasattr(dropout, "__float__") or not 0 <= dropout < 1:
        raise ArgumentError(
            f"dropout must be at least 0 and below 1: got {dropout}; it is the share of weights dropped"
        )


def device_type(x: Tensor) -> str:
    """Return x.device.type; it takes several times as long to read it from the device."""
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type


def autocasting(x: Tensor) -> bool:
    """Return True if autocast is on for the device of x."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = device_type(x)
    return kind != "meta" and torch.is_autocast_enabled(kind)


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in autocast's dtype where autocast is on, as torch's own attention takes them."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # the checks that follow raise
    if not autocasting(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(device_type(tensors[0]))
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
