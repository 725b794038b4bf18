"""What is to be built and called how, as a file or its requirements say; and what is held against them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ArgumentError, nearest
from ..examine.vocabulary import input_word, size_word
from ..report import Named, Report
from ..source.likely_classes import source_of
from ..source.parsed import unwarned

if TYPE_CHECKING:
    from ..evidence import Evidence

MAKERS = frozenset(("Linear", "Parameter", "Conv1d", "LazyLinear", "Embedding"))
SOFTMAX = frozenset(("softmax", "softmax_", "Softmax", "scaled_dot_product_attention"))
MULTI_HEAD = re.compile(r"multi_?head|mha", re.IGNORECASE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Refusal:
    """Why a file is not right although its evidence is."""

    words: str
    kind: str = "unproved"
    wrong: bool = False  # numbers were shown to differ; else it is not judged


@dataclass
class Conditions:
    """Of one class or function."""

    takes_heads: bool = False
    takes_width: bool = False
    masks: list[str] = field(default_factory=list)  # arguments that are called masks
    three: bool = False  # queries, keys and values are asked for one by one
    has_parameters: bool = False
    attends: bool = False  # a class with a softmax of its own, or called multi-head

    def another_step(self, evidence: Evidence) -> Refusal | None:
        """Attention as a whole, by its source, that says it is a single step."""
        if not self.attends and not self.three:
            return None
        return Refusal(f"it is attention by its source, and was examined as a {evidence.step}")

    def missing(self, evidence: Evidence, num_heads: int | None) -> Refusal | None:
        """What was not asked although the source takes it."""
        import torch

        plain = evidence.call("plain")
        if plain is None or plain.output is None:
            return Refusal("it gave no numbers without a mask")
        query = plain.inputs.query
        if query.ndim != 3 or len(query) < 2 or query.shape[1] < 3 or query.shape[2] < 2:
            return Refusal(f"it was asked with too little: {list(query.shape)}")
        if num_heads is not None and evidence.num_heads != num_heads:
            return Refusal(f"it was to be built with {num_heads} heads, and was with {evidence.num_heads}")
        if self.takes_heads and num_heads is None and evidence.num_heads < 2:
            return Refusal("its constructor takes a number of heads, and it was examined with one")
        if self.three and (
            evidence.conventions.self_only or torch.equal(plain.inputs.key, plain.inputs.value)
        ):
            return Refusal("it takes queries, keys and values, and was examined with one for all")
        masked = [call for call in evidence.calls if call.probe in ("causal", "padding", "random mask")]
        if self.masks and not any(call.output is not None for call in masked):
            return Refusal(f"it takes {self.masks[0]}, and was not examined with a mask")
        return None


def conditions_of(source: str, name: str | None) -> Conditions:
    """Of the class or function of this name; of none where the source has none."""
    try:
        with unwarned():
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Conditions()
    classes = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}
    first = (name or "").partition(".")[0]
    if first in classes:
        return _of_class(classes, first)
    functions = [one for one in tree.body if isinstance(one, Function) and one.name == first]
    if not functions:
        return Conditions()
    made = Conditions()
    _read_call(made, functions[-1])
    _read_sizes(made, functions[-1])
    return made


def _of_class(classes: dict[str, ast.ClassDef], name: str) -> Conditions:
    made, seen = Conditions(), [name]
    forward = constructor = None
    for each in seen:  # grows by the bases beside it
        node = classes[each]
        methods = {one.name: one for one in node.body if isinstance(one, Function)}
        forward = forward or methods.get("forward") or methods.get("__call__") or methods.get("call")
        constructor = constructor or methods.get("__init__")
        seen += [
            base.id
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in classes and base.id not in seen
        ]
        calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
        names = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}
        made.has_parameters = made.has_parameters or bool(names & MAKERS)
        made.attends = made.attends or bool(names & SOFTMAX or MULTI_HEAD.search(each))
    if constructor is not None:
        _read_sizes(made, constructor)
    if forward is not None:
        _read_call(made, forward)
    return made


def _arguments(function: Function) -> list[str]:
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _read_sizes(made: Conditions, function: Function) -> None:
    words = {size_word(one) for one in _arguments(function)}
    made.takes_heads, made.takes_width = "heads" in words, "width" in words


def _read_call(made: Conditions, function: Function) -> None:
    given = _arguments(function)
    made.masks = [one for one in given if "mask" in one.lower() and input_word(one) == "mask"]
    positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    needed = positional[: len(positional) - len(function.args.defaults)]
    made.three = {"query", "key", "value"} <= {input_word(one) for one in needed}


KEY = "not as the task says"
WORDS: dict[str, tuple[str, ...]] = {
    "mask": ("true-attends", "true-hides", "added", "lengths"),
    "causal": ("always", "argument"),
    "weights": ("returned",),
    "heads": ("argument",),
    "d_model": ("argument",),
    "batch": ("first",),
    "designs": ("none",),
}


@dataclass(frozen=True)
class Requirement:
    """One of `WORDS`."""

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}={self.how}"


def requirements_of(words: Iterable[str]) -> list[Requirement]:
    """From "mask=true-attends" and the like.

    Raises:
        ArgumentError: a word that is none of `WORDS`; one thing required twice.
    """
    found: dict[str, Requirement] = {}
    for word in words:
        what, _, how = word.strip().partition("=")
        if what not in WORDS:
            raise ArgumentError(
                f"require must name something of a task: got {word!r}; {nearest(what, WORDS)}"
            )
        if how not in WORDS[what]:
            raise ArgumentError(
                f"require must say how {what} is to be: got {word!r}; choose from "
                f"{', '.join(f'{what}={each}' for each in WORDS[what])}"
            )
        if what in found and found[what].how != how:
            raise ArgumentError(f"require must say one thing of {what}: got {found[what]} and {word}; choose")
        found[what] = Requirement(what, how)
    return list(found.values())


def hold_to(report: Report, required: Sequence[Requirement], path: Path) -> None:
    """What was judged and is not as the task says is wrong, and says so."""
    if not report.judged or not required or not report.errors:  # no numbers: it was not called at all
        return
    conditions = conditions_of(source_of(path)[0], report.name)
    missed = [(one, _instead(one, report, conditions)) for one in required]
    for one, instead in missed:
        if instead is None:
            continue
        hints = (
            f"read what the task says about {one.what}",
            f"the task says {one}",
            f"the task says {one}; {instead}",
        )
        why = "it computes attention, and code that calls it as the task says gets something else"
        title, repair = f"the task says {one}; {instead}", f"change it so that {one}"
        report.faults.append(Named(KEY, title, instead, str(one), hints, why, repair, instead))
        if report.ok:
            report.ok, report.summary = False, f"{KEY}: {one}; {instead}"


def _instead(one: Requirement, report: Report, source: Conditions) -> str | None:
    """How it is instead; None where it is as required."""
    call = report.conventions
    if one.what == "mask":
        return _mask(one.how, report)
    if one.what == "causal":
        if one.how == "always":
            return None if call.always_causal else "it sees the future unless it is told not to"
        return "it hides the future whether it is told to or not" if call.always_causal else None
    if one.what == "weights":
        return None if call.returns_weights else "it returns no weights per head"
    if one.what == "heads":
        return None if source.takes_heads else "no argument says how many heads"
    if one.what == "d_model":
        return None if source.takes_width else "no argument says how wide it is"
    if one.what == "designs":
        return None if not report.designs else f"it has something inside: {report.designs[0]}"
    return None if call.batch_first else "it takes the sequence first"


def _mask(how: str, report: Report) -> str | None:
    call = report.conventions
    if call.mask_argument is None:
        return "it takes no mask"
    kind = call.mask_kind
    if kind in ("bool", "0 and 1"):
        found = "true-attends" if call.mask_true_attends else "true-hides"
        told = f"where {call.mask_argument} is True or 1, a key " + (
            "may be seen" if call.mask_true_attends else "is hidden"
        )
    else:
        found = str(kind)
        told = {
            "added": f"{call.mask_argument} is added to the scores",
            "lengths": f"{call.mask_argument} is a number of keys",
            "switch": f"{call.mask_argument} only switches a mask on",
        }.get(found, f"{call.mask_argument} is {found}")
    return None if found == how else told
