"""What a Hugging Face attention function computes: read from its code, then proved by running it once.

The names in a function's code bound what it can use: an argument that the code does not mention has no
effect, and one that it uses and headwise does not know is refused. Code that a run on a few small tensors
cannot judge is refused as well: values that may change between two calls, and numbers that may be a length
from which on the function computes something else.

Names do not say what is computed with them: a function may copy a known one and change a factor, a default or
a dimension. So before headwise answers for a function, the function is run on a small call like the one it
was made for (the same options, heads and kinds of tensors; other, fixed numbers), for each kind of call once.
The tensors lie on the CPU, in float64, whatever the model runs in: neither its rounding nor its memory
matters, and no random number is drawn. The module that the function is handed is a copy.

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

# The names in the code of functions that compute softmax(scale q k + bias + mask) v, with a soft cap or a
# sink or without. One that mentions another name may do something that a run on small tensors does not show.
WORDS = frozenset(
    "torch nn F functional matmul transpose softmax dropout training contiguous dtype to type float float32 "
    "repeat_kv num_key_value_groups size shape head_dim tanh sinks reshape expand view unsqueeze cat max "
    "values logsumexp sigmoid getattr hasattr maybe_autocast device "
    "scaled_dot_product_attention is_causal repeat_interleave float64 double math sqrt mT".split()
)
# What we do as well; sliding_window says again what the mask says, for kernels that take no mask.
UNDERSTOOD = frozenset("scaling dropout softcap position_bias s_aux output_attentions sliding_window".split())
FUSED = "scaled_dot_product_attention"
FILL = -1e4  # a float from here down takes the place of hidden scores
LARGEST = 64  # of the numbers in a function's code: the tensors it is run on are longer than any of them

TOLERANCE = 1e-4  # a softmax in float32 is off by 1e-6
SCORES = (0.3, 3.0, 30.0)  # how large scores are, for one query, head and sequence after another
SINKS = "sinks"  # the only tensor of a module that a function may use
ROOM = 5  # by how much tensors are longer than the largest number in the function's code

Function = Callable[..., Any]


class Reading(NamedTuple):
    """How a function treats what it is given."""

    is_fused: bool  # as torch's fused function: False in a mask hides, a missing mask may mean causal
    gives_weights: bool  # beside its output


class _Part(NamedTuple):
    """A function as it was when it was read; only weakly referenced, as the key under which it is kept."""

    function: ref[FunctionType]
    code: CodeType
    defaults: tuple[object, ...] | None
    kwdefaults: dict[str, object] | None
    globals: tuple[tuple[str, object], ...]  # what its global names stand for; functions as weak references


@dataclass(frozen=True, eq=False)
class AttentionCode:
    """What was read in the code of an attention function."""

    name: str
    parameters: tuple[str, ...] = ()  # none where the first five are without names
    defaults: Mapping[str, object] = field(default_factory=dict)  # of parameters that headwise understands
    mentions: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()  # of that, what headwise does not understand if it is an argument
    attributes: tuple[str, ...] = ()  # names it may look up in the module it is called for
    unknown: tuple[str, ...] = ()  # what it may use that headwise does not know
    largest: int = 1  # number in it
    is_sdpa: bool = False  # transformers' own function around torch's fused one, which needs no proof
    parts: tuple[_Part, ...] = ()  # the function itself, then those it calls by their global names
    proofs: dict[Hashable, Reading | str] = field(default_factory=dict)  # kind of call -> or why it is none

    def why_not(self, given: Mapping[str, object]) -> str | None:
        """Return what keeps headwise from answering for the function, in words; None: nothing."""
        if self.unknown:
            return f"{self.name} uses {', '.join(self.unknown)}"
        for name, value in given.items():
            # What its own code does not mention, a function cannot use: there it has no effect, as here.
            if value is not None and name in self.uses:
                shape = f" {list(value.shape)}" if isinstance(value, Tensor) else ""
                return f"{self.name} is given {name}={type(value).__name__}{shape}"
        return None


_known: WeakKeyDictionary[FunctionType, AttentionCode] = WeakKeyDictionary()


def read(function: Function) -> AttentionCode:
    """Return what the function's code says, read once for as long as nothing in it has changed."""
    if not isinstance(function, FunctionType):
        module, name = getattr(function, "__module__", None), type(function).__name__
        name = ".".join(str(part) for part in (module, getattr(function, "__qualname__", name)) if part)
        return AttentionCode(name, unknown=(f"what a {type(function).__name__} may hold",))
    code = _known.get(function)
    if code is None or not all(map(_is_as_it_was, code.parts)):
        code = _known[function] = _read(function)
    return code


def _is_as_it_was(part: _Part) -> bool:
    now = part.function()
    if now is None or now.__code__ is not part.code or now.__defaults__ is not part.defaults:
        return False
    if now.__kwdefaults__ != part.kwdefaults:
        return False
    for name, value in part.globals:
        if now.__globals__.get(name) is not (value() if type(value) is ref else value):
            return False
    return True


def _read(function: FunctionType) -> AttentionCode:
    # Without what it wraps, whose signature is not that of the code that runs
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
            found, numbers = _unknown_in(part)
            unknown |= found
            largest = max(largest, *numbers)
    if "softmax" not in names and FUSED not in names:
        unknown.add("a softmax that is not there")
    are_named = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in list(parameters.values())[:5])
    if not are_named:
        unknown.add("arguments without names")
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name in UNDERSTOOD | {"is_causal"}
        and isinstance(parameter.default, (bool, int, float))
        and not (name == "dropout" and parameter.default == 0.0)
    }
    return AttentionCode(
        f"{function.__module__}.{function.__qualname__}",
        tuple(parameters) if are_named else (),
        defaults,
        frozenset(mentions),
        frozenset(mentions) - UNDERSTOOD - ({"is_causal"} if FUSED in names else set()),
        tuple(sorted(name for name in mentions if name.isidentifier())),
        () if is_sdpa else tuple(sorted(unknown)),
        largest,
        is_sdpa,
        tuple(_part(called, holds_globals=is_sdpa or not unknown) for called in functions),
    )


def _unknown_in(function: FunctionType) -> tuple[set[str], list[int]]:
    """(what a function may use that headwise does not know, lengths that the numbers in it may stand for)"""
    code = function.__code__
    names, words = _names_and_words(code)
    unknown = {*(names - WORDS), *code.co_freevars}
    if not names.isdisjoint(("getattr", "hasattr")):
        unknown |= {word for word in words if word.isidentifier() and word not in WORDS | UNDERSTOOD}
    if any(_depends_on_more_than_a_number(code)):
        unknown.add("a comparison that is not with a number")  # with a dtype, say, or of a length with a size
    numbers = list(_numbers(code.co_consts))
    for name, default in _defaults(function):
        if default is not None and not isinstance(default, (bool, int, float, str)):
            unknown.add(f"{name}={type(default).__name__}")  # its content may change
        elif name not in UNDERSTOOD:
            numbers += _numbers((default,))
    unknown |= {f"the number {number:g}" for number in numbers if _length(number) > LARGEST}
    return unknown, [1, *(_length(number) for number in numbers if _length(number) <= LARGEST)]


def _length(number: float) -> int:
    """The length at which a number may begin to matter: `x[-90:]` and `0.01 * length > 1` know one, too."""
    size = abs(number)
    return math.ceil(size if size >= 1 else 1 / size) if math.isfinite(size) else LARGEST + 1


def _defaults(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def _numbers(constants: tuple[object, ...]) -> Iterator[float]:
    """The numbers among the constants of a function's code, with the functions inside it; no fill values."""
    for value in constants:
        if isinstance(value, CodeType):
            yield from _numbers(value.co_consts)
        elif isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, (int, float)) and value and not (isinstance(value, float) and value <= FILL):
            yield value


def _depends_on_more_than_a_number(code: CodeType) -> Iterator[bool]:
    """Of every comparison, whether tensors of other sizes, dtypes or devices may decide it otherwise.

    Not if it is with a number or None, nor if two sizes are the same or not, as they are in a small call.
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
    """The names in a function's code, and the strings, with the functions inside it."""
    names, words = set(code.co_names), set[str]()
    for value in code.co_consts:
        if isinstance(value, CodeType):
            inner = _names_and_words(value)
            names |= inner[0]
            words |= inner[1]
        elif isinstance(value, str):
            words.add(value)
    return frozenset(names), frozenset(words)


# The functions it calls


def _global_names(code: CodeType) -> list[str]:
    names = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    for value in code.co_consts:
        if isinstance(value, CodeType):
            names += _global_names(value)
    return list(dict.fromkeys(names))


def _called_by(function: FunctionType) -> list[FunctionType]:
    """The functions that a function calls by global names, and those that they call, outside transformers."""
    found = [function]
    for caller in found:
        if caller is function or not _is_of_transformers(caller):
            for name in _global_names(caller.__code__):
                value = caller.__globals__.get(name)
                if isinstance(value, FunctionType) and value not in found:
                    found.append(value)
    return found[1:]


def _part(function: FunctionType, holds_globals: bool) -> _Part:
    names = _global_names(function.__code__) if holds_globals else []
    values = [function.__globals__.get(name) for name in names]
    kept = tuple(ref(value) if isinstance(value, FunctionType) else value for value in values)
    kwdefaults = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
    return _Part(
        ref(function),
        function.__code__,
        function.__defaults__,
        kwdefaults,
        tuple(zip(names, kept, strict=True)),
    )


def _is_sdpa(functions: list[FunctionType]) -> bool:
    """Return True if this is transformers' own function around torch's fused one, with its own helpers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_theirs = functions[0] is sdpa_attention_forward and all(map(_is_of_transformers, functions))
    return is_theirs and all(default in (None, 0.0) for _, default in _defaults(functions[0]))


def _is_of_transformers(function: FunctionType) -> bool:
    """Return True if a function is the one that transformers' own file defines under its name."""
    module = sys.modules.get(function.__module__ or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or not module.__name__.startswith("transformers."):
        return False
    # which may be relative, in an application of one file
    same_file = file.endswith(function.__code__.co_filename)
    return same_file and vars(module).get(function.__name__) is function


class FunctionCall(NamedTuple):
    """The arguments of an attention function: those of a model's call, or of a small one like it."""

    module: nn.Module
    query: Tensor  # [B, H, T, D]
    key: Tensor
    value: Tensor
    mask: Tensor | None
    given: dict[str, Any]


# Kinds of calls


def call_key(code: AttentionCode, call: FunctionCall) -> Hashable:
    """Return all that may decide what a function computes, but for the numbers in its tensors."""
    module, query, key, value, mask, given = call
    own = module.__dict__
    return (
        type(module),
        module.training,
        _small_sizes(code, query, key),
        (*query.shape[1::2], *key.shape[1::2], *value.shape[1::2]),
        None if mask is None else (mask.dtype, _spread(mask)),
        tuple([None if name not in own else _plain(own[name]) for name in code.attributes]),
        SINKS in code.mentions and getattr(module, SINKS, None) is None,
        tuple([(name, _option(name, given[name])) for name in given if name in code.mentions]),
        bool(given.get("dropout")),
        _option("scaling", given.get("scaling")),
    )


def _small_sizes(code: AttentionCode, query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """B, T and S, cut to a few: longer than any number in the code, which may be compared with them."""
    few = code.largest + ROOM
    B, T, S = query.shape[0], query.shape[2], key.shape[2]
    b, t, s = (max(1, min(size, few)) for size in (B, T, S))
    if t == s and T != S:
        return (b, t - 1, s) if T < S else (b, t, s - 1)
    return b, t, s


def _spread(x: Tensor) -> tuple[bool, ...]:
    """In which dimensions a tensor is the same for all."""
    return tuple([size == 1 for size in x.shape])


def _plain(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return Tensor, _spread(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__


def _option(name: str, value: object) -> Hashable:
    """What of an argument is part of the kind; those below are drawn."""
    return value is not None if name in ("dropout", "sliding_window") else _plain(value)


# A small call of that kind


def draw(code: AttentionCode, call: FunctionCall) -> FunctionCall:
    """Return a small call of the same kind, with few and fixed numbers."""
    module, query, key, value, mask, given = call
    b, t, s = _small_sizes(code, query, key)
    H, D = query.shape[1], query.shape[3]
    small = dict(given)
    for name, option in given.items():
        if name == "dropout":
            small[name] = 0.0
        elif name == "sliding_window" and option is not None:
            small[name] = 2  # a function that hides keys by it is not answered with the mask alone
        elif name == "position_bias" and isinstance(option, Tensor):
            small[name] = 2 * _drawn(_small_shape(option, b, t, s), 5.0)
        elif name == "s_aux" and isinstance(option, Tensor):
            small[name] = 2 * _drawn(tuple(option.shape), 6.0)
        elif name == "scaling" and isinstance(option, Tensor):
            small[name] = torch.full(option.shape, 0.37, dtype=torch.float64, device="cpu")
    scale = small.get("scaling")
    scale = abs(float(scale)) if isinstance(scale, (int, float)) and scale else D**-0.5
    rows = torch.arange(b * H * t, device="cpu") % len(SCORES)
    wanted = torch.tensor(SCORES, dtype=torch.float64, device="cpu")[rows].reshape(b, H, t, 1)
    return FunctionCall(
        _copy_of(module, SINKS in code.mentions),
        _drawn((b, H, t, D), 1.0) * wanted / (0.5 * math.sqrt(D) * scale),
        _drawn((b, key.shape[1], s, D), 2.0),
        _drawn((b, value.shape[1], s, value.shape[3]), 3.0),
        None if mask is None else _drawn_mask(_small_shape(mask, b, t, s), mask.dtype),
        small,
    )


def _drawn(shape: tuple[int, ...], seed: float) -> Tensor:
    """Numbers between -1 and 1, the same for the same seed; torch's random state is not used."""
    n = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return torch.sin(0.618 * n * n + 17 * seed).reshape(shape)


def _small_shape(x: Tensor, b: int, t: int, s: int) -> tuple[int, ...]:
    """Of what is broadcast to [B, H, T, S]."""
    H = x.shape[-3] if x.ndim > 2 else 1
    return tuple(
        [1 if size == 1 else few for size, few in zip(x.shape, (b, H, t, s)[4 - x.ndim :], strict=True)]
    )


def _drawn_mask(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One that hides some keys from each query, never all; one that is added also adds other numbers."""
    numbers = _drawn(shape, 4.0)
    hidden = numbers > 0.2
    rows, keys = (torch.arange(size, device="cpu") for size in (*(1, 1), *shape)[-2:])
    hidden &= rows[:, None] % len(keys) != keys
    if dtype.is_floating_point:
        return torch.where(hidden, torch.finfo(torch.float32).min, numbers)
    return (~hidden).to(dtype)


def _copy_of(module: nn.Module, has_sinks: bool) -> nn.Module:
    """A module with the same attributes and other sinks, for a function that reads or sets them."""
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    sinks = getattr(module, SINKS, None) if has_sinks else None
    if sinks is not None:
        copied.__dict__[SINKS] = 2 * _drawn(tuple(sinks.shape), 7.0)  # before any parameter of that name
    return copied


# Running and comparing


def run(function: Function, call: FunctionCall, **other: Any) -> Any:
    """Return what the function answers; random numbers that it draws are not missed by anybody.

    A function that writes to its inputs raises `ValueError`: what headwise computes in its place does not.
    """
    given = {"query": call.query, "key": call.key, "value": call.value, "attention_mask": call.mask}
    copies = {name: None if x is None else x.clone() for name, x in given.items()}
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        quietly(),
    ):
        answer = function(call.module, *copies.values(), **(call.given | other))
    for name, x in given.items():
        copy = copies[name]
        if x is not None and copy is not None and not torch.equal(x, copy):
            raise ValueError(f"it writes to its {name} in place")
    return answer


def difference(answer: Any, output: Tensor, weights: Tensor) -> str | None:
    """Return how a function's answer differs from our output [B, T, H, D] and weights [B, H, T, S], in words;
    None: by no more than rounding."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"returns a {type(answer).__name__} in place of (output, weights)"
    for name, found, expected in (("output", answer[0], output), ("weights", answer[1], weights)):
        if name == "weights" and found is None:
            continue
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            return f"returns {name} {shape} in place of {list(expected.shape)}"
        distance = float((found.to(expected.dtype) - expected).abs().max())
        if not distance <= TOLERANCE:  # nor if it is NaN
            return f"returns {name} up to {distance:.2g} away from softmax(q k^T scaling + mask) v"
    return None
