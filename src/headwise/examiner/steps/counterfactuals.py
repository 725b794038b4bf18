"""One step of attention: asked of the learner's function, and which mistake explains the answers.

A question is a dict of roles ("x", "heads", "axis"); `Callee` knows which parameter of the learner's takes
each. The judgement reads numbers only: questions and answers, wherever they were asked.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..evidence import Asked, Evidence, Finding, Role
from ..examine.build import GUESS, recipes
from ..examine.constructor import Constructor, parameters_of
from ..examine.subject import Sizes, signature_of
from ..examine.surroundings import CAUGHT, Unreadable, files_of, problem_of
from ..examine.surroundings import seed as sow
from ..faults.fault import Fault
from ..report import Named
from ..source.lines import line_of
from ..source.parsed import tree_of

NEAR = 2e-5  # of the size of the numbers, as in diagnose.py
Question = Mapping[str, Any]
Answer = Callable[[Question], Tensor]


@dataclass(frozen=True, eq=False)
class StepFault(Fault):
    """A mistake in a single step: another function in place of the right one.

    Args:
        of: which step.
        instead: what is computed instead, one entry for each way to make this mistake.
    """

    of: str = ""
    instead: tuple[Answer, ...] = ()


@dataclass
class Verdict:
    """What explains a step's answers.

    Args:
        right: the convention that it follows, in words; "" where it is wrong, None where nothing explains it.
        fault: what it computes instead.
        alike: other faults whose numbers are the same.
        fit: how far apart the numbers are.
        detail: how we know.
        words: what was found of its conventions, a sentence each.
        errors: question -> largest difference from the right answer.
        remarks: faults that are told and are no reason to fail; (key, detail).
        unjudged: why nothing can be said; "" where it can.
    """

    right: str | None = None
    fault: Fault | None = None
    alike: Sequence[Fault] = ()
    fit: float = 0.0
    detail: str = ""
    words: Sequence[str] = ()
    errors: Mapping[str, float] | None = None
    remarks: Sequence[tuple[str, str]] = ()
    unjudged: str = ""


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the size of the numbers; infinite for another shape or another infinity."""
    if found.shape != wanted.shape:
        return float("inf")
    mine, theirs = wanted.double(), found.double()
    signs = [one.isinf() * one.sign().nan_to_num() for one in (mine, theirs)]
    if not torch.equal(mine.isnan(), theirs.isnan()) or not torch.equal(*signs):
        return float("inf")
    finite = mine.isfinite()
    if not bool(finite.any()):
        return 0.0
    off = (mine - theirs)[finite].abs().max()
    return float(off / mine[finite].abs().max().clamp_min(1e-12))


def explained(asked: Iterable[Asked], answer: Answer) -> float:
    """How far apart at most the answers are from what this computes; infinite where it computes nothing."""
    worst = 0.0
    for one in asked:
        if one.output is None:
            return float("inf")
        try:
            worst = max(worst, apart(one.output, answer(one.given)))
        except (RuntimeError, IndexError, ValueError, KeyError, TypeError, ZeroDivisionError):
            return float("inf")
    return worst


def explanation(asked: Sequence[Asked], right: Mapping[str, Answer], faults: Sequence[StepFault]) -> Verdict:
    """The convention in which the answers are right, or the first fault whose numbers they are."""
    fits = {words: explained(asked, answer) for words, answer in right.items()}
    nearest = min(fits, key=fits.__getitem__)
    errors = {one.probe: explained([one], right[nearest]) for one in asked}
    if fits[nearest] <= NEAR:
        return Verdict(nearest, fit=fits[nearest], errors=errors)
    named: dict[str, tuple[StepFault, float]] = {}
    for fault in faults:
        fit = min((explained(asked, answer) for answer in fault.instead), default=float("inf"))
        if fit <= NEAR:
            named[fault.key] = (fault, fit)
    if not named:
        return Verdict(None, errors=errors)
    (first, fit), *others = named.values()
    detail = (
        f"your output equals {first.formula} to {fit:.0e}, in {len(asked)} question{'s' * (len(asked) != 1)}"
    )
    return Verdict("", first, [one for one, _ in others], fit, detail, errors=errors)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Numbers no two of which are alike."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=dice, dtype=torch.float64)


def words_of(name: str) -> str:
    """splitHeads, SplitHeads and split_heads are split_heads."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).lower()


def own_text(evidence: Evidence) -> str:
    """The source of what was checked; "" where there is none."""
    tree = tree_of(evidence.source or "")
    if tree is None:
        return ""
    nodes: list[ast.AST] = [tree]
    for part in evidence.name.split("."):
        near = [
            one for node in nodes for one in ast.iter_child_nodes(node) if getattr(one, "name", None) == part
        ]
        nodes = near or [
            one for node in nodes for one in ast.walk(node) if getattr(one, "name", None) == part
        ]
    if not nodes:
        return ""
    node = nodes[-1]
    assert isinstance(node, ast.stmt) and node.end_lineno is not None
    lines = (evidence.source or "").splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines)  # whole lines: a comment behind the last one is a word of it, too


def words_in(text: str) -> str:
    """Docstrings and comments."""
    quoted = re.findall(r"\"\"\"(.*?)\"\"\"|'''(.*?)'''|#([^\n]*)", text, flags=re.S)
    return "\n".join(part for parts in quoted for part in parts)


OURS = {
    "x": "x",
    "heads": "num_heads",
    "axis": "dim",
    "size": "T",
    "ids": "ids",
    "pad": "pad",
    "lengths": "lengths",
}


def named(evidence: Evidence, fault: Any, detail: str) -> Named:
    """A fault, at the learner's line where there is no doubt, and the repair in the learner's names."""
    found = None
    if evidence.source is not None:
        found = line_of(fault, evidence.source, evidence.first_line)
    made = Named.of(fault, detail, *(found or (None, "")))
    made.repair = _in_names(made.repair, evidence)
    return made


def _in_names(repair: str, evidence: Evidence) -> str:
    """Our names for what goes in become the learner's: of their parameters, or of what `self` keeps."""
    theirs = {ours: evidence.roles[role].parameter for role, ours in OURS.items() if role in evidence.roles}
    if evidence.step == "softmax":
        theirs.setdefault("dim", "-1")
    kept = re.search(r"self\.\w*heads?\b", own_text(evidence))
    if evidence.step == "split heads" and "num_heads" not in theirs and kept is not None:
        theirs["num_heads"] = kept[0]
    code = [line.partition("  #") for line in repair.splitlines()]
    return "\n".join(
        re.sub(r"(?<![\w.])\w+\b(?!\s*=[^=])", lambda word: theirs.get(word[0], word[0]), line) + mark + rest
        for line, mark, rest in code
    )


CERTAIN = {"NameError", "UnboundLocalError"}  # what no input of ours can be the reason of


@dataclass
class Callee:
    """A function, a bound method or a module, and what each of its parameters takes."""

    body: Any
    files: frozenset[str]
    roles: dict[str, str] = field(default_factory=dict)  # role -> parameter
    fixed: dict[str, object] = field(default_factory=dict)  # parameter -> a value that is no question
    numpy: bool = False
    dtype: torch.dtype = torch.float64
    stacks: bool = False  # several tensors of one shape are one answer
    width: int | None = None  # where the constructor was told, or the code insists
    heads: int | None = None

    @property
    def parameters(self) -> list[inspect.Parameter]:
        return [
            one
            for one in signature_of(self.body).parameters.values()
            if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]

    def ask(self, evidence: Evidence, probe: str, question: Question) -> Asked:
        """One question, kept in the evidence."""
        asked, touched = self.answer(probe, question)
        evidence.asked.append(asked)
        if touched is not None and not any(one.fault == "input modified" for one in evidence.findings):
            detail = f"{self.roles[touched]} is another after the call than before it"
            evidence.findings.append(Finding("input left unmodified", "wrong", detail, "input modified"))
        return asked

    def answer(self, probe: str, question: Question) -> tuple[Asked, str | None]:
        """One question, kept nowhere; and which input was changed in place."""
        asked = Asked(probe, {name: _copied(value) for name, value in question.items()})
        passed = {role: self._passed(question[role]) for role in self.roles if role in question}
        before = {role: _copied(value) for role, value in passed.items()}
        named = dict(self.fixed) | {self.roles[role]: value for role, value in passed.items()}
        first = [one.name for one in self.parameters if one.kind is one.POSITIONAL_ONLY]
        args = [named.pop(name) for name in first if name in named]
        sow(0)
        try:
            with torch.no_grad():
                asked.output = first_array(self.body(*args, **named), self.stacks)
        except CAUGHT as error:
            asked.problem = problem_of(error, "call", self.files, probe)
        changed = [role for role, value in passed.items() if not _same(value, before[role])]
        return asked, changed[0] if changed else None

    def _passed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        held = value.to(self.dtype) if value.is_floating_point() else value
        return held.numpy().copy() if self.numpy else held.clone()

    def tell(self, evidence: Evidence) -> None:
        """Which parameter takes what, for the evidence and for the report."""
        evidence.roles = {role: Role(name, "names") for role, name in self.roles.items()}
        order = [one.name for one in self.parameters]
        names = sorted(self.roles.items(), key=lambda pair: order.index(pair[1]))
        words = ", ".join(name if name == role else f"{name} ({role})" for role, name in names)
        evidence.conventions.arguments = tuple(role for role, _ in names)
        evidence.conventions.words.append(f"it is called with {words}" + ", NumPy arrays" * self.numpy)


def instances(
    cls: type,
    evidence: Evidence,
    arguments: Mapping[str, object] | None,
    embed_dim: int | None,
    num_heads: int | None,
) -> Iterator[tuple[Any, Sizes]]:
    """Built in every way that works, the likeliest first, and in float64; what went wrong is written down."""
    given, failed = dict(arguments or {}), None
    own = {one.name for one in parameters_of(cls)}
    for sizes, choice in recipes(cls, embed_dim, num_heads, given):
        maker = Constructor(cls, sizes, choice, {k: v for k, v in given.items() if k in own or "." in k})
        try:
            sow(0)
            body = maker.make()
            if isinstance(body, nn.Module):
                body.double().eval()
        except CAUGHT as error:
            failed = failed or problem_of(error, "build", files_of(cls))
            said = f"{maker.text or cls.__name__}: {type(error).__name__}: {error}"
            evidence.tried += [said] if said not in evidence.tried else []
            continue
        evidence.built = maker.text
        yield body, sizes
    if failed is not None:
        failed.kind = failed.kind if failed.kind in CERTAIN else GUESS
        evidence.problems.append(failed)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value).__module__ == "numpy" else value


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor):
        return torch.equal(value.nan_to_num(7.0), before.nan_to_num(7.0))
    if type(value).__module__ == "numpy":
        return bool(((value == before) | (value != value)).all())
    return True


def first_array(value: Any, stacks: bool = False) -> Tensor:
    """The answer as a tensor: itself, the first of several, an array, a list of numbers.

    Raises:
        Unreadable: there is none in it.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return torch.as_tensor(value.copy() if value.shape else float(value))
    if isinstance(value, (bool, int, float)):
        return torch.as_tensor(value)
    if isinstance(value, (list, tuple)) and any(one is not None for one in value):
        parts = [first_array(one) for one in value if one is not None]
        if (stacks or isinstance(value, list)) and len({(*one.shape, one.dtype) for one in parts}) == 1:
            return torch.stack(parts)
        return parts[0]
    raise Unreadable(f"it returned {type(value).__name__}; a tensor was expected")
