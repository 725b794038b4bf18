"""Requirements of a task, such as mask=true-attends, and what the source says about how to call the code."""

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
    """The reason why a file is not right although its evidence is."""

    words: str
    kind: str = "unproved"
    wrong: bool = False  # True if numbers differ; else the file is not judged


@dataclass
class SourceFacts:
    """What the source of a class or function says about its arguments and its parameters."""

    takes_heads: bool = False
    takes_width: bool = False
    masks: list[str] = field(default_factory=list)  # arguments whose names are those of masks
    three: bool = False  # query, key and value are separate arguments
    has_parameters: bool = False
    attends: bool = False  # a class with a softmax, or whose name contains multi-head

    def another_step(self, evidence: Evidence) -> Refusal | None:
        """Return a refusal if the source is that of a whole attention, but a single step was examined."""
        if not self.attends and not self.three:
            return None
        return Refusal(f"its source is that of attention, but it was examined as a {evidence.step}")

    def missing(self, evidence: Evidence, num_heads: int | None) -> Refusal | None:
        """Return a refusal if the examination did not use an argument that the source has."""
        import torch

        plain = evidence.call("plain")
        if plain is None or plain.output is None:
            return Refusal("it returned no output without a mask")
        query = plain.inputs.query
        if query.ndim != 3 or len(query) < 2 or query.shape[1] < 3 or query.shape[2] < 2:
            return Refusal(f"it was examined with inputs that are too small: {list(query.shape)}")
        if num_heads is not None and evidence.num_heads != num_heads:
            return Refusal(f"it was built with {evidence.num_heads} heads instead of {num_heads}")
        if self.takes_heads and num_heads is None and evidence.num_heads < 2:
            return Refusal("its constructor takes a number of heads, but it was examined with one head")
        if self.three and (
            evidence.conventions.self_only or torch.equal(plain.inputs.key, plain.inputs.value)
        ):
            return Refusal("it takes query, key and value, but it was examined with one input for all three")
        masked = [call for call in evidence.calls if call.probe in ("causal", "padding", "random mask")]
        if self.masks and not any(call.output is not None for call in masked):
            return Refusal(f"it takes {self.masks[0]}, but it was not examined with a mask")
        return None


def facts_of_source(source: str, name: str | None) -> SourceFacts:
    """Return the facts of the class or function of this name; empty ones if the source has none."""
    try:
        with unwarned():
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return SourceFacts()
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    first = (name or "").partition(".")[0]
    if first in classes:
        return _of_class(classes, first)
    functions = [node for node in tree.body if isinstance(node, Function) and node.name == first]
    if not functions:
        return SourceFacts()
    made = SourceFacts()
    _read_call(made, functions[-1])
    _read_sizes(made, functions[-1])
    return made


def _of_class(classes: dict[str, ast.ClassDef], name: str) -> SourceFacts:
    made, class_names = SourceFacts(), [name]
    forward = constructor = None
    for class_name in class_names:  # grows: base classes in the same file are appended
        node = classes[class_name]
        methods = {method.name: method for method in node.body if isinstance(method, Function)}
        forward = forward or methods.get("forward") or methods.get("__call__") or methods.get("call")
        constructor = constructor or methods.get("__init__")
        class_names += [
            base.id
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in classes and base.id not in class_names
        ]
        calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
        names = {
            function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            for function in calls
        }
        made.has_parameters = made.has_parameters or bool(names & MAKERS)
        made.attends = made.attends or bool(names & SOFTMAX or MULTI_HEAD.search(class_name))
    if constructor is not None:
        _read_sizes(made, constructor)
    if forward is not None:
        _read_call(made, forward)
    return made


def _arguments(function: Function) -> list[str]:
    return [
        argument.arg
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]


def _read_sizes(made: SourceFacts, function: Function) -> None:
    words = {size_word(argument) for argument in _arguments(function)}
    made.takes_heads, made.takes_width = "heads" in words, "width" in words


def _read_call(made: SourceFacts, function: Function) -> None:
    arguments = _arguments(function)
    made.masks = [
        argument for argument in arguments if "mask" in argument.lower() and input_word(argument) == "mask"
    ]
    positional = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    needed = positional[: len(positional) - len(function.args.defaults)]
    made.three = {"query", "key", "value"} <= {input_word(argument) for argument in needed}


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
    """A requirement of a task: a subject of `WORDS` and one of its values."""

    subject: str
    value: str

    def __str__(self) -> str:
        return f"{self.subject}={self.value}"


def requirements_of(words: Iterable[str]) -> list[Requirement]:
    """Return the requirements in words such as "mask=true-attends".

    Raises:
        ArgumentError: a word is not one of `WORDS`, or two words contradict each other.
    """
    requirements: dict[str, Requirement] = {}
    for word in words:
        subject, _, value = word.strip().partition("=")
        if subject not in WORDS:
            raise ArgumentError(
                f"require must name a property of the task: got {word!r}; {nearest(subject, WORDS)}"
            )
        if value not in WORDS[subject]:
            raise ArgumentError(
                f"require must have a value of {subject}: got {word!r}; choose from "
                f"{', '.join(f'{subject}={choice}' for choice in WORDS[subject])}"
            )
        if subject in requirements and requirements[subject].value != value:
            raise ArgumentError(
                f"require must have one {subject}: got {requirements[subject]} and {word}; choose one"
            )
        requirements[subject] = Requirement(subject, value)
    return list(requirements.values())


def hold_to(report: Report, required: Sequence[Requirement], path: Path) -> None:
    """Report code that was judged and does not meet the requirements of the task as wrong."""
    if not report.judged or not required or not report.errors:  # without errors it was not called at all
        return
    source_facts = facts_of_source(source_of(path)[0], report.name)
    for requirement in required:
        instead = _instead(requirement, report, source_facts)
        if instead is None:
            continue
        hints = (
            f"Read what the task requires of {requirement.subject}.",
            f"The task requires {requirement}.",
            f"The task requires {requirement}, but {instead}.",
        )
        reason = "it computes attention, but code that calls it as the task describes gets a different result"
        title, repair = f"the task requires {requirement}, but {instead}", f"change it so that {requirement}"
        report.faults.append(Named(KEY, title, instead, str(requirement), hints, reason, repair, instead))
        if report.ok:
            report.ok, report.summary = False, f"{KEY}: {title}"


def _instead(requirement: Requirement, report: Report, source: SourceFacts) -> str | None:
    """Return what the code does instead of the requirement; None if it meets it."""
    call = report.conventions
    if requirement.subject == "mask":
        return _mask(requirement.value, report)
    if requirement.subject == "causal":
        if requirement.value == "always":
            return None if call.always_causal else "it is causal only if a mask is passed"
        return "it is causal even if no mask is passed" if call.always_causal else None
    if requirement.subject == "weights":
        return None if call.returns_weights else "it does not return the weights of each head"
    if requirement.subject == "heads":
        return None if source.takes_heads else "it has no argument for the number of heads"
    if requirement.subject == "d_model":
        return None if source.takes_width else "it has no argument for the width"
    if requirement.subject == "designs":
        return None if not report.designs else f"it contains {report.designs[0]}"
    return None if call.batch_first else "its first dimension is the sequence"


def _mask(required: str, report: Report) -> str | None:
    """Return what the mask argument means instead of `required`; None if it means that."""
    call = report.conventions
    if call.mask_argument is None:
        return "it takes no mask"
    kind = call.mask_kind
    if kind in ("bool", "0 and 1"):
        actual = "true-attends" if call.mask_true_attends else "true-hides"
        description = f"where {call.mask_argument} is True or 1, a key " + (
            "is visible" if call.mask_true_attends else "is hidden"
        )
    else:
        actual = str(kind)
        description = {
            "added": f"{call.mask_argument} is added to the scores",
            "lengths": f"{call.mask_argument} is the number of visible keys",
            "switch": f"{call.mask_argument} only switches its own mask on",
        }.get(actual, f"{call.mask_argument} is {actual}")
    return None if actual == required else description
