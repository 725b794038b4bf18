"""What the code of a Hugging Face attention function says about it, before it is run.

The names in a function's code bound what it can use: an argument that the code does not mention has no
effect, and one that it uses and headwise does not know is refused. Names do not say what is computed with
them, so `attention_proof.py` also runs the function once. Code that a run on a few small tensors cannot judge
is refused here: values that may change between two calls, and numbers that may be a length from which on the
function computes something else.
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

from torch import Tensor

__all__ = ["AttentionCode", "Reading", "read"]

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
    if code is None:
        return _read_anew(function)
    for part in code.parts:
        now = part.function()
        if now is None or now.__code__ is not part.code or now.__defaults__ is not part.defaults:
            return _read_anew(function)
        if now.__kwdefaults__ != part.kwdefaults:
            return _read_anew(function)
        for name, value in part.globals:
            if now.__globals__.get(name) is not (value() if type(value) is ref else value):
                return _read_anew(function)
    return code


def _read_anew(function: FunctionType) -> AttentionCode:
    code = _known[function] = _read(function)
    return code


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
    """Whether this is transformers' own function around torch's fused one, with its own helpers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return (
        functions[0] is sdpa_attention_forward
        and all(map(_is_of_transformers, functions))
        and all(default is None or default == 0.0 for _, default in _defaults(functions[0]))
    )


def _is_of_transformers(function: FunctionType) -> bool:
    """Whether a function is the one that transformers' own file defines under its name."""
    module = sys.modules.get(function.__module__ or "")
    file = getattr(module, "__file__", None)
    return (
        module is not None
        and module.__name__.startswith("transformers.")
        and file is not None
        and file.endswith(
            function.__code__.co_filename
        )  # which may be relative, in an application of one file
        and vars(module).get(function.__name__) is function
    )
