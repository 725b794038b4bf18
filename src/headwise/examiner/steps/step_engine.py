"""The engine that checks single steps: it calls the learner's function and compares the answers.

A `Step` says how such a function is called, which conventions are right, and what each fault computes
instead. `ask` makes the calls and records the answers. `judge` compares them with the conventions and the
faults; it reads only numbers, so it can judge answers from another process. The inputs of a call are a dict
by role ("x", "heads", "axis"), and a `Callee` knows which parameter takes which role.
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

from ..evidence import Evidence, Finding, Role, StepAnswer
from ..examine.construction import GUESS, construction_choices
from ..examine.constructor import Constructor, parameters_of
from ..examine.environment import CAUGHT, Unreadable, files_of, problem_of
from ..examine.environment import seed as sow
from ..examine.subject import Sizes, signature_of
from ..faults.fault import Fault
from ..report import largest_difference
from ..source.parsed import tree_of

NEAR = 2e-5  # relative to the largest number, as in diagnosis.py
CERTAIN = {"NameError", "UnboundLocalError"}  # errors that cannot come from the inputs we chose
UNKNOWN = "headwise does not know what to pass for {}"
StepInputs = Mapping[str, Any]
Formula = Callable[[StepInputs], Tensor]  # what a convention or a fault computes


# The table


@dataclass(frozen=True, eq=False)
class StepFault(Fault):
    """A mistake in a single step: another function in place of the right formula.

    Args:
        of: which step.
        instead: what is computed instead, one entry for each way to make this mistake.
        about: for a mask: which of "causal" and "padding" it gets wrong.
    """

    of: str = ""
    instead: tuple[Formula, ...] = ()
    about: frozenset[str] = frozenset()


def faults_of(step: str, **shared: Any) -> Callable[..., StepFault]:
    """Return a function that makes faults of one step. `shared` holds the fields they have in common."""

    def fault(
        key: str, title: str, formula: str, first: str, second: str, third: str, consequence: str,
        *instead: Formula, **own: Any,
    ) -> StepFault:  # fmt: skip
        fields = {**shared, **own, "hints": (first, second, third), "instead": instead, "of": step}
        return StepFault(key, title, formula, why=consequence, **fields)

    return fault


class StepPlan(NamedTuple):
    """One way to call a function."""

    roles: dict[str, str]  # role -> parameter
    probes: Sequence[tuple[str, StepInputs]]  # the name of each probe, and its inputs


class Reading(NamedTuple):
    """The answers as one convention reads them, and what they are compared with."""

    answers: Sequence[StepAnswer]
    right: Mapping[str, Formula]  # a convention in words -> its formula
    faults: Sequence[StepFault]


@dataclass
class Verdict:
    """What explains the answers of a step. If `right`, `faults` and `unjudged` are empty, nothing does.

    Args:
        right: the convention it follows, in words; "" where it is wrong.
        faults: (key, evidence) of each fault or remark.
        alike: keys of other faults that give the same numbers.
        reading: the index of the reading that fits.
        words: sentences about its conventions.
        errors: probe -> largest difference from the right answer.
        unjudged: why it could not be judged; "" where it could.
    """

    right: str = ""
    faults: list[tuple[str, str]] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    reading: int = 0
    words: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    unjudged: str = ""

    def becomes(self, key: str, detail: str) -> Verdict:
        """Return a verdict with this fault alone, and the same words and errors."""
        return Verdict("", [(key, detail)], words=self.words, errors=self.errors)


@dataclass(frozen=True)
class Step:
    """A kind of step: a function of tensors and numbers.

    Args:
        faults: what can be wrong, the simplest first.
        plans: returns the ways to call this function, the likeliest first.
        accepts: returns True if an answer can be one of this step at all.
        insists: whether the first plan is used where no plan is accepted.
        read: returns the readings to compare, or a verdict that needs no comparison.
        refine: returns the final verdict, after the comparison.
    """

    faults: Sequence[StepFault]
    plans: Callable[[Callee, Evidence], list[StepPlan]]
    accepts: Callable[[StepAnswer], bool]
    read: Callable[[Evidence, list[StepAnswer]], list[Reading] | Verdict]
    refine: Callable[[Evidence, list[StepAnswer], Verdict], Verdict]
    insists: bool = True


# Asking

KINDS = ((False, torch.float64), (False, torch.float32), (True, torch.float64), (True, torch.float32))


def ask(step: Step, callee: Callee, evidence: Evidence) -> None:
    """Run all probes of the first plan whose first answer is accepted."""
    plans, tried = step.plans(callee, evidence), []
    for plan in plans:
        callee.roles = plan.roles
        first = callee.first_answer([plan.probes[0]], step.accepts)
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
    for probe, inputs in plan.probes:
        callee.ask(evidence, probe, inputs)
    callee.record_roles(evidence)


def _outcome(plan: StepPlan, answer: StepAnswer) -> str:
    """Return a sentence on what a call gave, for the report."""
    arguments = ", ".join(f"{name} ({role})" for role, name in plan.roles.items())
    if answer.problem is not None:
        return f"the call with {arguments} raised: {answer.problem.message}"
    assert answer.output is not None
    return f"the call with {arguments} returned {answer.output.dtype} {list(answer.output.shape)}"


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Return random float64 numbers of this shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Judging


def judge(step: Step, evidence: Evidence) -> Verdict:
    """Return the convention that the answers follow, or the fault that gives them."""
    answers = [answer for answer in evidence.answers if answer.output is not None]
    if not answers:
        return Verdict(unjudged="; ".join(evidence.tried) or "it returned no tensor for any input tried")
    readings = step.read(evidence, answers)
    if isinstance(readings, Verdict):
        return readings
    return step.refine(evidence, answers, compare(readings))


def compare(readings: Sequence[Reading]) -> Verdict:
    """Return the convention in which the answers are right, or the first fault that gives them."""
    first_errors: dict[str, float] = {}
    for number, (answers, right, _) in enumerate(readings):
        fits = {words: difference(answers, formula) for words, formula in right.items()}
        nearest = min(fits, key=fits.__getitem__)
        errors = {each.probe: difference([each], right[nearest]) for each in answers}
        if fits[nearest] <= NEAR:
            return Verdict(nearest, reading=number, errors=errors)
        first_errors = first_errors or errors
    fitting: dict[str, tuple[int, str]] = {}
    for fault in dict.fromkeys(fault for reading in readings for fault in reading.faults):
        for number, reading in enumerate(readings):
            if detail := _fit_in_words(fault, reading):
                fitting.setdefault(fault.key, (number, detail))
    if not fitting:
        return Verdict(errors=first_errors)
    key, *others = fitting
    number, detail = fitting[key]
    return Verdict("", [(key, detail)], others, number, errors=first_errors)


def _fit_in_words(fault: StepFault, reading: Reading) -> str:
    """Return a sentence that the answers are what this fault computes; "" if they are not."""
    answers = reading.answers if fault in reading.faults else ()
    fit = min((difference(answers, formula) for formula in fault.instead), default=float("inf"))
    if not answers or fit > NEAR:
        return ""
    tests = f"{len(answers)} test input{'s' * (len(answers) != 1)}"
    return f"your output equals {fault.formula} ({largest_difference(fit)}, {tests})"


def is_right(answer: StepAnswer, formula: Formula) -> bool:
    """Return True if the answer is what the formula computes."""
    return difference([answer], formula) <= NEAR


def difference(answers: Sequence[StepAnswer], formula: Formula) -> float:
    """Return the largest difference of the answers from the formula; infinity if it cannot be computed."""
    worst = 0.0
    for answer in answers:
        if answer.output is None:
            return float("inf")
        try:
            worst = max(worst, apart(answer.output, formula(answer.inputs)))
        except (RuntimeError, IndexError, ValueError, KeyError, TypeError, ZeroDivisionError):
            return float("inf")
    return worst


def apart(output: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number; infinity for another shape."""
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
    """Return the name in snake case: splitHeads and SplitHeads become split_heads."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).lower()


def own_text(evidence: Evidence) -> str:
    """Return the source lines of the checked code, with comments; "" if there is no source."""
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
    """Return the docstrings and comments in a text."""
    quoted = re.findall(r"\"\"\"(.*?)\"\"\"|'''(.*?)'''|#([^\n]*)", text, flags=re.S)
    return "\n".join(part for parts in quoted for part in parts)


# The learner's code


@dataclass
class Callee:
    """A function, a bound method or a module, and what each of its parameters takes."""

    body: Any
    files: frozenset[str]
    roles: dict[str, str] = field(default_factory=dict)  # role -> parameter
    fixed: dict[str, object] = field(default_factory=dict)  # parameter -> a value that is always the same
    numpy: bool = False
    dtype: torch.dtype = torch.float64
    stacks: bool = False  # whether several tensors of one shape are stacked to one output
    width: int | None = None  # where the constructor or the code fixes it
    heads: int | None = None

    @property
    def parameters(self) -> list[inspect.Parameter]:
        return named_parameters(self.body)

    def missing(self, *passed: str | None) -> list[inspect.Parameter]:
        """Return the parameters without a default that are neither fixed nor among `passed`."""
        filled = {*passed, *self.fixed}
        return [each for each in self.parameters if each.default is each.empty and each.name not in filled]

    def ask(self, evidence: Evidence, probe: str, inputs: StepInputs) -> StepAnswer:
        """Make one call and record it in the evidence."""
        answer, touched = self.answer(probe, inputs)
        evidence.answers.append(answer)
        if touched is not None and not any(each.fault == "input modified" for each in evidence.findings):
            evidence.findings.append(self.modified(touched))
        return answer

    def modified(self, role: str) -> Finding:
        """Return the finding that the code changes its input in place."""
        detail = f"{self.roles[role]} is changed in place by the call"
        return Finding("input left unmodified", "wrong", detail, "input modified")

    def first_answer(
        self, probes: Sequence[tuple[str, StepInputs]], accepts: Callable[[StepAnswer], bool]
    ) -> StepAnswer:
        """Return the first accepted answer over all probes and kinds of numbers; else the very first."""
        answers = []
        for probe, inputs in probes:
            for self.numpy, self.dtype in KINDS:
                answers.append(self.answer(probe, inputs)[0])
                if accepts(answers[-1]):
                    return answers[-1]
        return answers[0]

    def answer(self, probe: str, inputs: StepInputs) -> tuple[StepAnswer, str | None]:
        """Return the answer to one call without recording it, and the role that was changed in place."""
        answer = StepAnswer(probe, {name: _copied(value) for name, value in inputs.items()})
        passed = {role: self._passed(inputs[role]) for role in self.roles if role in inputs}
        before = {role: _copied(value) for role, value in passed.items()}
        named = dict(self.fixed) | {self.roles[role]: value for role, value in passed.items()}
        first = [each.name for each in self.parameters if each.kind is each.POSITIONAL_ONLY]
        args = [named.pop(name) for name in first if name in named]
        sow(0)
        try:
            with torch.no_grad():
                answer.output = first_array(self.body(*args, **named), self.stacks)
        except CAUGHT as error:
            answer.problem = problem_of(error, "call", self.files, probe)
        changed = [role for role, value in passed.items() if not _same(value, before[role])]
        return answer, changed[0] if changed else None

    def _passed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        held = value.to(self.dtype) if value.is_floating_point() else value
        return held.numpy().copy() if self.numpy else held.clone()

    def record_roles(self, evidence: Evidence) -> None:
        """Record which parameter takes what."""
        evidence.roles = {role: Role(name, "names") for role, name in self.roles.items()}
        order = [each.name for each in self.parameters]
        names = sorted(self.roles.items(), key=lambda pair: order.index(pair[1]))
        words = ", ".join(name if name == role else f"{name} ({role})" for role, name in names)
        evidence.conventions.arguments = tuple(role for role, _ in names)
        evidence.conventions.words.append(f"it is called with {words}" + ", NumPy arrays" * self.numpy)


def named_parameters(body: Any) -> list[inspect.Parameter]:
    """Return all parameters but *args and **kwargs."""
    every = signature_of(body).parameters.values()
    return [each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


class Wanted(NamedTuple):
    """The arguments and sizes that the user asked for."""

    arguments: Mapping[str, object] | None
    embed_dim: int | None
    num_heads: int | None


def instances(cls: type, evidence: Evidence, wanted: Wanted) -> Iterator[tuple[Any, Sizes]]:
    """Yield instances built in every way that works, the likeliest first; failures are recorded."""
    arguments, failed = dict(wanted.arguments or {}), None
    own = {each.name for each in parameters_of(cls)}
    constructor_arguments = {name: value for name, value in arguments.items() if name in own or "." in name}
    for sizes, choice in construction_choices(cls, wanted.embed_dim, wanted.num_heads, arguments):
        maker = Constructor(cls, sizes, choice, constructor_arguments)
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
    """Return the output as a tensor: itself, the first of several, an array or a list of numbers.

    Raises:
        Unreadable: the output holds no tensor.
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
    raise Unreadable(f"it returned {type(value).__name__} instead of a tensor")
