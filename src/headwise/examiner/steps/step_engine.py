"""The engine of single steps: a learner's function is asked, and its answers are compared.

A `Step` is a table: how such a function is called, which conventions are right, what each fault computes
instead. `ask` makes the calls and writes the answers down. `judge` compares them and names what they are; it
reads numbers only, wherever they were asked. A question is a dict of roles ("x", "heads", "axis"), and a
`Callee` knows which parameter of the learner's takes each.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..evidence import Asked, Evidence, Finding, Role
from ..examine.construction import GUESS, recipes
from ..examine.constructor import Constructor, parameters_of
from ..examine.subject import Sizes, signature_of
from ..examine.surroundings import CAUGHT, Unreadable, files_of, problem_of
from ..examine.surroundings import seed as sow
from ..faults.fault import Fault
from ..source.parsed import tree_of

NEAR = 2e-5  # of the size of the numbers, as in diagnose.py
CERTAIN = {"NameError", "UnboundLocalError"}  # what no input of ours can be the reason of
Question = Mapping[str, Any]
Answer = Callable[[Question], Tensor]


# The table


@dataclass(frozen=True, eq=False)
class StepFault(Fault):
    """A mistake in a single step: another function in place of the right one.

    Args:
        of: which step.
        instead: what is computed instead, one entry for each way to make this mistake.
        about: of a mask: which of "causal" and "padding" it gets wrong.
    """

    of: str = ""
    instead: tuple[Answer, ...] = ()
    about: frozenset[str] = frozenset()


def faults_of(step: str, **shared: Any) -> Callable[..., StepFault]:
    """What makes the faults of one step. `shared` holds what most of them have in common, by field."""

    def fault(
        key: str, title: str, formula: str, first: str, second: str, third: str, why: str, *instead: Answer,
        **own: Any,
    ) -> StepFault:  # fmt: skip
        fields = {**shared, **own, "hints": (first, second, third), "instead": instead, "of": step}
        return StepFault(key, title, formula, why=why, **fields)

    return fault


class Plan(NamedTuple):
    """One way to call a function."""

    roles: dict[str, str]  # role -> parameter
    questions: Sequence[tuple[str, Question]]  # the probe's name, and what is passed


class Reading(NamedTuple):
    """The answers as one convention reads them, and what they are compared with."""

    asked: Sequence[Asked]
    right: Mapping[str, Answer]  # a convention in words -> its answers
    faults: Sequence[StepFault]


@dataclass
class Verdict:
    """What explains a step's answers. Nothing does where `right`, `faults` and `unjudged` are all empty.

    Args:
        right: the convention it follows, in words; "" where it is wrong.
        faults: what it computes instead: the fault's key, and how we know. Remarks are among them.
        alike: keys of other faults whose numbers are the same.
        reading: which of the readings fits.
        words: what the answers say of its conventions, a sentence each.
        errors: question -> largest difference from the right answer.
        unjudged: why nothing can be said; "" where it can.
    """

    right: str = ""
    faults: list[tuple[str, str]] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    reading: int = 0
    words: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    unjudged: str = ""

    def becomes(self, key: str, detail: str) -> Verdict:
        """The same with this fault in place of what it was."""
        return Verdict("", [(key, detail)], words=self.words, errors=self.errors)


@dataclass(frozen=True)
class Step:
    """A kind of step that is a function of tensors and numbers.

    Args:
        faults: what can be wrong, the simplest first.
        plans: the ways to call this function, the likeliest first; none where nothing is known to pass.
        accepts: whether the first answer can be one of this step at all.
        insists: whether it is asked in the first way where no way is accepted.
        read: the answers as they are compared; a verdict where that is not needed.
        refine: what else decides, once they were compared.
    """

    faults: Sequence[StepFault]
    plans: Callable[[Callee, Evidence], list[Plan]]
    accepts: Callable[[Asked], bool]
    read: Callable[[Evidence, list[Asked]], list[Reading] | Verdict]
    refine: Callable[[Evidence, list[Asked], Verdict], Verdict]
    insists: bool = True


# Asking

KINDS = ((False, torch.float64), (False, torch.float32), (True, torch.float64), (True, torch.float32))


def ask(step: Step, callee: Callee, evidence: Evidence) -> None:
    """All questions, in the first way to call it whose first answer is accepted."""
    plans, tried = step.plans(callee, evidence), []
    for plan in plans:
        callee.roles = plan.roles
        first = callee.first_answer([plan.questions[0]], step.accepts)
        if step.accepts(first):
            break
        tried.append(_outcome(plan, first))
    else:
        if not plans or not step.insists:
            evidence.tried += tried
            return
        plan = plans[0]
        callee.roles = plan.roles
        callee.numpy, callee.dtype = KINDS[0]
    for probe, question in plan.questions:
        callee.ask(evidence, probe, question)
    callee.tell(evidence)


def _outcome(plan: Plan, asked: Asked) -> str:
    """What a call gave, for the report."""
    if asked.problem is not None:
        gave = asked.problem.message
    else:
        gave = "nothing" if asked.output is None else f"{asked.output.dtype} {list(asked.output.shape)}"
    return f"called with {', '.join(f'{name} ({role})' for role, name in plan.roles.items())} it gave: {gave}"


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Numbers no two of which are alike."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=dice, dtype=torch.float64)


# Judging


def judge(step: Step, evidence: Evidence) -> Verdict:
    """Which convention the answers follow, or which fault gives them."""
    answered = [asked for asked in evidence.asked if asked.output is not None]
    if not answered:
        return Verdict(unjudged="; ".join(evidence.tried) or "it gave no tensor for any input that was tried")
    readings = step.read(evidence, answered)
    if isinstance(readings, Verdict):
        return readings
    return step.refine(evidence, answered, compare(readings))


def compare(readings: Sequence[Reading]) -> Verdict:
    """The convention in which the answers are right, or the first fault whose numbers they are."""
    first_errors: dict[str, float] = {}
    for number, (asked, right, _) in enumerate(readings):
        fits = {words: difference(asked, answer) for words, answer in right.items()}
        nearest = min(fits, key=fits.__getitem__)
        errors = {each.probe: difference([each], right[nearest]) for each in asked}
        if fits[nearest] <= NEAR:
            return Verdict(nearest, reading=number, errors=errors)
        first_errors = first_errors or errors
    fitting: dict[str, tuple[int, str]] = {}
    for fault in dict.fromkeys(fault for reading in readings for fault in reading.faults):
        for number, reading in enumerate(readings):
            detail = _how_it_fits(fault, reading)
            if detail:
                fitting.setdefault(fault.key, (number, detail))
    if not fitting:
        return Verdict(errors=first_errors)
    key, *others = fitting
    number, detail = fitting[key]
    return Verdict("", [(key, detail)], others, number, errors=first_errors)


def _how_it_fits(fault: StepFault, reading: Reading) -> str:
    """That the answers are what this fault computes, in words; "" where they are not."""
    asked = reading.asked if fault in reading.faults else ()
    fit = min((difference(asked, answer) for answer in fault.instead), default=float("inf"))
    if not asked or fit > NEAR:
        return ""
    many = f"{len(asked)} question{'s' * (len(asked) != 1)}"
    return f"your output equals {fault.formula} to {fit:.0e}, in {many}"


def is_right(asked: Asked, answer: Answer) -> bool:
    """Whether one answer is this."""
    return difference([asked], answer) <= NEAR


def difference(asked: Sequence[Asked], answer: Answer) -> float:
    """How far apart at most the answers are from what this computes; infinite where it computes nothing."""
    worst = 0.0
    for each in asked:
        if each.output is None:
            return float("inf")
        try:
            worst = max(worst, apart(each.output, answer(each.given)))
        except (RuntimeError, IndexError, ValueError, KeyError, TypeError, ZeroDivisionError):
            return float("inf")
    return worst


def apart(output: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the size of the numbers; infinite for another shape or another infinity."""
    if output.shape != wanted.shape:
        return float("inf")
    mine, theirs = wanted.double(), output.double()
    signs = [x.isinf() * x.sign().nan_to_num() for x in (mine, theirs)]
    if not torch.equal(mine.isnan(), theirs.isnan()) or not torch.equal(*signs):
        return float("inf")
    finite = mine.isfinite()
    if not bool(finite.any()):
        return 0.0
    off = (mine - theirs)[finite].abs().max()
    return float(off / mine[finite].abs().max().clamp_min(1e-12))


# What its source says


def words_of(name: str) -> str:
    """splitHeads, SplitHeads and split_heads are split_heads."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).lower()


def own_text(evidence: Evidence) -> str:
    """The source of what was checked, in whole lines, comments too; "" where there is none."""
    nodes: list[ast.AST] = [tree for tree in [tree_of(evidence.source or "")] if tree is not None]
    for name in evidence.name.split("."):
        near = (child for node in nodes for child in ast.iter_child_nodes(node))
        deep = (child for node in nodes for child in ast.walk(node))
        nodes = _of_name(name, near) or _of_name(name, deep)
    if not nodes:
        return ""
    assert isinstance(nodes[-1], ast.stmt)
    return "\n".join((evidence.source or "").splitlines()[nodes[-1].lineno - 1 : nodes[-1].end_lineno])


def _of_name(name: str, nodes: Iterator[ast.AST]) -> list[ast.AST]:
    return [node for node in nodes if getattr(node, "name", None) == name]


def words_in(text: str) -> str:
    """Docstrings and comments."""
    quoted = re.findall(r"\"\"\"(.*?)\"\"\"|'''(.*?)'''|#([^\n]*)", text, flags=re.S)
    return "\n".join(part for parts in quoted for part in parts)


# The learner's code


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
        return named_parameters(self.body)

    def missing(self, *known: str | None) -> list[inspect.Parameter]:
        """Those that must be passed, without those that are known."""
        others = {*known, *self.fixed}
        return [each for each in self.parameters if each.default is each.empty and each.name not in others]

    def ask(self, evidence: Evidence, probe: str, question: Question) -> Asked:
        """One question, kept in the evidence."""
        asked, touched = self.answer(probe, question)
        evidence.asked.append(asked)
        if touched is not None and not any(each.fault == "input modified" for each in evidence.findings):
            evidence.findings.append(self.modified(touched))
        return asked

    def modified(self, role: str) -> Finding:
        """That it wrote into what it was passed."""
        detail = f"{self.roles[role]} is another after the call than before it"
        return Finding("input left unmodified", "wrong", detail, "input modified")

    def first_answer(
        self, questions: Sequence[tuple[str, Question]], accepts: Callable[[Asked], bool]
    ) -> Asked:
        """The first that is accepted, over all questions and kinds of numbers; else the very first."""
        answers = []
        for probe, question in questions:
            for self.numpy, self.dtype in KINDS:
                answers.append(self.answer(probe, question)[0])
                if accepts(answers[-1]):
                    return answers[-1]
        return answers[0]

    def answer(self, probe: str, question: Question) -> tuple[Asked, str | None]:
        """One question, kept nowhere; and which input was changed in place."""
        asked = Asked(probe, {name: _copied(value) for name, value in question.items()})
        passed = {role: self._passed(question[role]) for role in self.roles if role in question}
        before = {role: _copied(value) for role, value in passed.items()}
        named = dict(self.fixed) | {self.roles[role]: value for role, value in passed.items()}
        first = [each.name for each in self.parameters if each.kind is each.POSITIONAL_ONLY]
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
        order = [each.name for each in self.parameters]
        names = sorted(self.roles.items(), key=lambda pair: order.index(pair[1]))
        words = ", ".join(name if name == role else f"{name} ({role})" for role, name in names)
        evidence.conventions.arguments = tuple(role for role, _ in names)
        evidence.conventions.words.append(f"it is called with {words}" + ", NumPy arrays" * self.numpy)


def named_parameters(body: Any) -> list[inspect.Parameter]:
    """All but *args and **kwargs."""
    every = signature_of(body).parameters.values()
    return [each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


class Wanted(NamedTuple):
    """What the caller asked for: arguments of the constructor or the function, and sizes."""

    arguments: Mapping[str, object] | None
    embed_dim: int | None
    num_heads: int | None


def instances(cls: type, evidence: Evidence, wanted: Wanted) -> Iterator[tuple[Any, Sizes]]:
    """Built in every way that works, the likeliest first, and in float64; what went wrong is written down."""
    arguments, failed = dict(wanted.arguments or {}), None
    own = {each.name for each in parameters_of(cls)}
    taken = {name: value for name, value in arguments.items() if name in own or "." in name}
    for sizes, choice in recipes(cls, wanted.embed_dim, wanted.num_heads, arguments):
        maker = Constructor(cls, sizes, choice, taken)
        try:
            sow(0)
            body = maker.make()
            if isinstance(body, nn.Module):
                body.double().eval()
        except CAUGHT as error:
            failed = failed or problem_of(error, "build", files_of(cls))
            words = f"{maker.text or cls.__name__}: {type(error).__name__}: {error}"
            evidence.tried += [words] if words not in evidence.tried else []
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
    if isinstance(value, (list, tuple)) and any(part is not None for part in value):
        parts = [first_array(part) for part in value if part is not None]
        if (stacks or isinstance(value, list)) and len({(*part.shape, part.dtype) for part in parts}) == 1:
            return torch.stack(parts)
        return parts[0]
    raise Unreadable(f"it returned {type(value).__name__}; a tensor was expected")
