"""What a Hugging Face attention function computes: read from its code, then checked by running it once.

The names in a function's code limit what it can use: an argument that the code does not mention has no
effect, and one that it uses and headwise does not support is refused. Code that cannot be checked on a few
small tensors is refused as well: values that may change between two calls, and numbers that may be a length
above which the function computes something else.

Names do not tell what is computed with them: a function may be a copy of a known one with another factor,
default or dimension. So before headwise computes in place of a function, it runs the function on a small call
of the same kind (the same options, heads and kinds of tensors; other, fixed numbers), once for each kind of
call. The tensors are on the CPU and in float64, whatever the model uses: neither its rounding nor its memory
matters, and no random number is drawn. The function is passed a copy of the module.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

import dis
import inspect
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ..active import quietly

# The names in the code of functions that compute softmax(scale q k + bias + mask) v, with or without a soft
# cap and sinks. Code with another name may do something that a run on small tensors does not show.
WORDS = frozenset(
    "torch nn F functional matmul transpose softmax dropout training contiguous dtype to type float float32 "
    "repeat_kv num_key_value_groups size shape head_dim tanh sinks reshape expand view unsqueeze cat max "
    "values logsumexp sigmoid getattr hasattr maybe_autocast device "
    "scaled_dot_product_attention is_causal repeat_interleave float64 double math sqrt mT".split()
)
# Arguments that headwise supports; sliding_window repeats the mask, for kernels without a mask.
SUPPORTED = frozenset("scaling dropout softcap position_bias s_aux output_attentions sliding_window".split())
FUSED = "scaled_dot_product_attention"
FILL = -1e4  # a float up to this is a fill value of hidden scores
LARGEST = 64  # number allowed in a function's code: the tensors it is run on are longer

TOLERANCE = 1e-4  # a softmax in float32 is off by 1e-6
SCORES = (0.3, 3.0, 30.0)  # sizes of scores, in turn for queries, heads and sequences
SINKS = "sinks"  # the only tensor of a module that a function may use
ROOM = 5  # by how much tensors are longer than the largest number in the function's code

Function = Callable[..., Any]


class Reading(NamedTuple):
    """How a function treats its arguments."""

    is_fused: bool  # like torch's fused function: False in a mask hides a key, and no mask may mean causal
    gives_weights: bool  # returned with the output


class _Part(NamedTuple):
    """A function when it was read, by a weak reference, for it is the key of a weak dictionary."""

    function: ref[FunctionType]
    code: CodeType
    defaults: tuple[object, ...] | None
    kwdefaults: dict[str, object] | None
    globals: tuple[tuple[str, object], ...]  # values of its global names; functions as weak references


@dataclass(frozen=True, eq=False)
class AttentionCode:
    """What the code of an attention function says about it."""

    name: str
    parameters: tuple[str, ...] = ()  # () if one of the first five is not named
    defaults: Mapping[str, object] = field(default_factory=dict)  # of parameters that headwise supports
    mentions: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()  # of these, arguments that headwise does not support
    attributes: tuple[str, ...] = ()  # names that it may look up in its module
    unknown: tuple[str, ...] = ()  # what it may use that headwise does not support
    largest: int = 1  # number in the code
    is_sdpa: bool = False  # transformers' function around torch's fused one, which is not checked
    parts: tuple[_Part, ...] = ()  # the function, then those it calls by global names
    proofs: dict[Hashable, Reading | str] = field(
        default_factory=dict
    )  # by kind of call; a str: why it is refused

    def why_not(self, arguments: Mapping[str, object]) -> str | None:
        """Return why headwise cannot compute in place of the function, or None."""
        if self.unknown:
            return f"{self.name} uses {', '.join(self.unknown)}"
        for name, value in arguments.items():
            # An argument that the code does not mention has no effect.
            if value is not None and name in self.uses:
                shape = f" {list(value.shape)}" if isinstance(value, Tensor) else ""
                return f"{self.name} is given {name}={type(value).__name__}{shape}"
        return None


_codes: WeakKeyDictionary[FunctionType, AttentionCode] = WeakKeyDictionary()


def read(function: Function) -> AttentionCode:
    """Return what the code of a function says, cached until something in it changes."""
    if not isinstance(function, FunctionType):
        module, name = getattr(function, "__module__", None), type(function).__name__
        name = ".".join(str(part) for part in (module, getattr(function, "__qualname__", name)) if part)
        return AttentionCode(name, unknown=(f"what a {type(function).__name__} may hold",))
    code = _codes.get(function)
    if code is None or not all(map(_is_unchanged, code.parts)):
        code = _codes[function] = _read(function)
    return code


def _is_unchanged(part: _Part) -> bool:
    """Return True if nothing in a function has changed since it was read."""
    function = part.function()
    if function is None or function.__code__ is not part.code or function.__defaults__ is not part.defaults:
        return False
    if function.__kwdefaults__ != part.kwdefaults:
        return False
    for name, value in part.globals:
        if function.__globals__.get(name) is not (value() if type(value) is ref else value):
            return False
    return True


def _read(function: FunctionType) -> AttentionCode:
    """Read the code of a function and of those that it calls."""
    # Of the wrapper, for the signature of a wrapped function is not that of the code that runs
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    functions = [function, *_called_by(function)]
    is_sdpa = _is_sdpa(functions)
    names, mentions = set[str](), set[str]()
    unknown: set[str] = set()
    largest = 1
    for part in functions:
        if part is function or not _is_of_transformers(part):
            part_names, words = _names_and_words(part.__code__)
            names |= part_names
            mentions |= part_names | words | inspect.signature(part, follow_wrapped=False).parameters.keys()
            part_unknown, numbers = _unknown_in(part)
            unknown |= part_unknown
            largest = max(largest, *numbers)
    if "softmax" not in names and FUSED not in names:
        unknown.add("a softmax that is not there")
    are_named = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in list(parameters.values())[:5])
    if not are_named:
        unknown.add("arguments without names")
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name in SUPPORTED | {"is_causal"}
        and isinstance(parameter.default, (bool, int, float))
        and not (name == "dropout" and parameter.default == 0.0)
    }
    return AttentionCode(
        f"{function.__module__}.{function.__qualname__}",
        tuple(parameters) if are_named else (),
        defaults,
        frozenset(mentions),
        frozenset(mentions) - SUPPORTED - ({"is_causal"} if FUSED in names else set()),
        tuple(sorted(name for name in mentions if name.isidentifier())),
        () if is_sdpa else tuple(sorted(unknown)),
        largest,
        is_sdpa,
        tuple(_part(called, holds_globals=is_sdpa or not unknown) for called in functions),
    )


def _unknown_in(function: FunctionType) -> tuple[set[str], list[int]]:
    """Return what a function may use that headwise does not support, and the lengths its numbers may be."""
    code = function.__code__
    names, words = _names_and_words(code)
    unknown = {*(names - WORDS), *code.co_freevars}
    if not names.isdisjoint(("getattr", "hasattr")):
        unknown |= {word for word in words if word.isidentifier() and word not in WORDS | SUPPORTED}
    if any(_depends_on_more_than_a_number(code)):
        unknown.add(
            "a comparison that is not with a number"
        )  # such as with a dtype, or of a length with a size
    numbers = list(_numbers(code.co_consts))
    for name, default in _defaults(function):
        if default is not None and not isinstance(default, (bool, int, float, str)):
            unknown.add(f"{name}={type(default).__name__}")  # its contents may change
        elif name not in SUPPORTED:
            numbers += _numbers((default,))
    unknown |= {f"the number {number:g}" for number in numbers if _length(number) > LARGEST}
    return unknown, [1, *(_length(number) for number in numbers if _length(number) <= LARGEST)]


def _length(number: float) -> int:
    """Return the length from which a number may matter, as in `x[-90:]` and `0.01 * length > 1`."""
    size = abs(number)
    return math.ceil(size if size >= 1 else 1 / size) if math.isfinite(size) else LARGEST + 1


def _defaults(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the parameters of a function that have a default, with it."""
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def _numbers(constants: tuple[object, ...]) -> Iterator[float]:
    """Yield the numbers among the constants of code and of functions inside it, without fill values."""
    for value in constants:
        if isinstance(value, CodeType):
            yield from _numbers(value.co_consts)
        elif isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, (int, float)) and value and not (isinstance(value, float) and value <= FILL):
            yield value


def _depends_on_more_than_a_number(code: CodeType) -> Iterator[bool]:
    """Yield for every comparison whether tensors of other sizes, dtypes or devices may change its result.

    They may not if it compares with a number or None, or tests two sizes for equality, as in a small call.
    """
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        if step.opname in ("COMPARE_OP", "IS_OP", "CONTAINS_OP") and before is not None:
            is_fixed = before.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))
            is_size = before.opname in ("BINARY_SUBSCR", "BINARY_OP") and step.argval in ("==", "!=")
            yield not is_size and not (is_fixed and not isinstance(before.argval, str))
        before = step
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _depends_on_more_than_a_number(value)


def _names_and_words(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names and the strings in a function's code and in functions inside it."""
    names, words = set(code.co_names), set[str]()
    for value in code.co_consts:
        if isinstance(value, CodeType):
            inner = _names_and_words(value)
            names |= inner[0]
            words |= inner[1]
        elif isinstance(value, str):
            words.add(value)
    return frozenset(names), frozenset(words)


# Functions that it calls


def _global_names(code: CodeType) -> list[str]:
    """Return the global names in code and in functions inside it."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    for value in code.co_consts:
        if isinstance(value, CodeType):
            names += _global_names(value)
    return list(dict.fromkeys(names))


def _called_by(function: FunctionType) -> list[FunctionType]:
    """Return the functions that a function calls by global names, and, outside transformers, theirs."""
    functions = [function]
    for caller in functions:
        if caller is function or not _is_of_transformers(caller):
            for name in _global_names(caller.__code__):
                value = caller.__globals__.get(name)
                if isinstance(value, FunctionType) and value not in functions:
                    functions.append(value)
    return functions[1:]


def _part(function: FunctionType, holds_globals: bool) -> _Part:
    """Return the current state of a function, with or without its globals."""
    names = _global_names(function.__code__) if holds_globals else []
    values = [function.__globals__.get(name) for name in names]
    references = tuple(ref(value) if isinstance(value, FunctionType) else value for value in values)
    kwdefaults = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
    return _Part(
        ref(function),
        function.__code__,
        function.__defaults__,
        kwdefaults,
        tuple(zip(names, references, strict=True)),
    )


def _is_sdpa(functions: list[FunctionType]) -> bool:
    """Return True if this is transformers' own function around torch's fused one, with its own helpers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_original = functions[0] is sdpa_attention_forward and all(map(_is_of_transformers, functions))
    return is_original and all(default in (None, 0.0) for _, default in _defaults(functions[0]))


def _is_of_transformers(function: FunctionType) -> bool:
    """Return True if a function is the one that transformers' own file defines under its name."""
    module = sys.modules.get(function.__module__ or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or not module.__name__.startswith("transformers."):
        return False
    # the path may be relative in an application of one file
    same_file = file.endswith(function.__code__.co_filename)
    return same_file and vars(module).get(function.__name__) is function


class FunctionCall(NamedTuple):
    """The arguments of an attention function, in a model's call or in a small call of its kind."""

    module: nn.Module
    query: Tensor  # [B, H, T, D]
    key: Tensor
    value: Tensor
    mask: Tensor | None
    arguments: dict[str, Any]  # all others


# Kinds of calls


def call_key(code: AttentionCode, call: FunctionCall) -> Hashable:
    """Return everything that may decide what a function computes, except the numbers in its tensors."""
    module, query, key, value, mask, arguments = call
    attributes = module.__dict__
    return (
        type(module),
        module.training,
        _small_sizes(code, query, key),
        (*query.shape[1::2], *key.shape[1::2], *value.shape[1::2]),
        None if mask is None else (mask.dtype, _spread(mask)),
        tuple([None if name not in attributes else _plain(attributes[name]) for name in code.attributes]),
        SINKS in code.mentions and getattr(module, SINKS, None) is None,
        tuple([(name, _option(name, arguments[name])) for name in arguments if name in code.mentions]),
        bool(arguments.get("dropout")),
        _option("scaling", arguments.get("scaling")),
    )


def _small_sizes(code: AttentionCode, query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """Return B, T and S of a small call, longer than any number in the code that they are compared to."""
    limit = code.largest + ROOM
    B, T, S = query.shape[0], query.shape[2], key.shape[2]
    b, t, s = (max(1, min(size, limit)) for size in (B, T, S))
    if t == s and T != S:
        return (b, t - 1, s) if T < S else (b, t, s - 1)
    return b, t, s


def _spread(x: Tensor) -> tuple[bool, ...]:
    """Return for each dimension of a tensor whether its size is 1."""
    return tuple([size == 1 for size in x.shape])


def _plain(value: object) -> Hashable:
    """Return the part of a value that may decide what a function computes."""
    if isinstance(value, Tensor):
        return Tensor, _spread(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__


def _option(name: str, value: object) -> Hashable:
    """Return the part of an argument that belongs to the kind of call; the rest is drawn."""
    return value is not None if name in ("dropout", "sliding_window") else _plain(value)


# Small calls


def draw(code: AttentionCode, call: FunctionCall) -> FunctionCall:
    """Return a small call of the same kind, with fixed numbers."""
    module, query, key, value, mask, arguments = call
    b, t, s = _small_sizes(code, query, key)
    H, D = query.shape[1], query.shape[3]
    small = dict(arguments)
    for name, option in arguments.items():
        if name == "dropout":
            small[name] = 0.0
        elif name == "sliding_window" and option is not None:
            small[name] = 2  # so small that a function which hides keys by it is noticed
        elif name == "position_bias" and isinstance(option, Tensor):
            small[name] = 2 * _drawn(_small_shape(option, b, t, s), 5.0)
        elif name == "s_aux" and isinstance(option, Tensor):
            small[name] = 2 * _drawn(tuple(option.shape), 6.0)
        elif name == "scaling" and isinstance(option, Tensor):
            small[name] = torch.full(option.shape, 0.37, dtype=torch.float64, device="cpu")
    scale = small.get("scaling")
    scale = abs(float(scale)) if isinstance(scale, (int, float)) and scale else D**-0.5
    rows = torch.arange(b * H * t, device="cpu") % len(SCORES)
    sizes = torch.tensor(SCORES, dtype=torch.float64, device="cpu")[rows].reshape(b, H, t, 1)
    return FunctionCall(
        _copy_of(module, SINKS in code.mentions),
        _drawn((b, H, t, D), 1.0) * sizes / (0.5 * math.sqrt(D) * scale),
        _drawn((b, key.shape[1], s, D), 2.0),
        _drawn((b, value.shape[1], s, value.shape[3]), 3.0),
        None if mask is None else _drawn_mask(_small_shape(mask, b, t, s), mask.dtype),
        small,
    )


def _drawn(shape: tuple[int, ...], seed: float) -> Tensor:
    """Return numbers between -1 and 1 that depend on the seed only; torch's random state is not used."""
    n = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return torch.sin(0.618 * n * n + 17 * seed).reshape(shape)


def _small_shape(x: Tensor, b: int, t: int, s: int) -> tuple[int, ...]:
    """Return the shape in a small call of a tensor that is broadcast to [B, H, T, S]."""
    H = x.shape[-3] if x.ndim > 2 else 1
    return tuple(
        [1 if size == 1 else small for size, small in zip(x.shape, (b, H, t, s)[4 - x.ndim :], strict=True)]
    )


def _drawn_mask(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a mask that hides some keys from each query, never all; a float mask also adds a bias."""
    numbers = _drawn(shape, 4.0)
    hidden = numbers > 0.2
    rows, keys = (torch.arange(size, device="cpu") for size in (*(1, 1), *shape)[-2:])
    hidden &= rows[:, None] % len(keys) != keys
    if dtype.is_floating_point:
        return torch.where(hidden, torch.finfo(torch.float32).min, numbers)
    return (~hidden).to(dtype)


def _copy_of(module: nn.Module, has_sinks: bool) -> nn.Module:
    """Return a copy of a module with other sinks, for a function that reads or sets attributes."""
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    sinks = getattr(module, SINKS, None) if has_sinks else None
    if sinks is not None:
        copied.__dict__[SINKS] = 2 * _drawn(tuple(sinks.shape), 7.0)  # found before a parameter of that name
    return copied


# Running and comparing


def run(function: Function, call: FunctionCall, **other: Any) -> Any:
    """Return the result of the function, without a change of torch's random state.

    Raises:
        ValueError: the function writes to its inputs, which headwise does not.
    """
    tensors = {"query": call.query, "key": call.key, "value": call.value, "attention_mask": call.mask}
    copies = {name: None if x is None else x.clone() for name, x in tensors.items()}
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        quietly(),
    ):
        result = function(call.module, *copies.values(), **(call.arguments | other))
    for name, x in tensors.items():
        copy = copies[name]
        if x is not None and copy is not None and not torch.equal(x, copy):
            raise ValueError(f"it writes to its {name} in place")
    return result


def difference(result: Any, output: Tensor, weights: Tensor) -> str | None:
    """Return how the result of a function differs from an output [B, T, H, D] and weights [B, H, T, S].

    None if it differs by no more than rounding.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        return f"returns a {type(result).__name__} instead of (output, weights)"
    for name, tensor, expected in (("output", result[0], output), ("weights", result[1], weights)):
        if name == "weights" and tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != expected.shape:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            return f"returns {name} {shape} instead of {list(expected.shape)}"
        distance = float((tensor.to(expected.dtype) - expected).abs().max())
        if not distance <= TOLERANCE:  # also True for NaN
            return f"returns {name} up to {distance:.2g} away from softmax(q k^T scaling + mask) v"
    return None
