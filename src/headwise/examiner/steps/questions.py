"""Asking one function: which parameter takes what, what goes in, what comes out.

A question is a dict of roles ("x", "heads", "axis"); `Callee` knows which parameter of the learner's takes
each. What is asked and answered is all that the judgement reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
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
from .counterfactuals import Question

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
