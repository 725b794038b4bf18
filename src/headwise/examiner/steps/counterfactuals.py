"""What a single step may compute instead of the right thing, and which of it explains the answers.

Only numbers are read here: questions and answers, wherever they were asked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..evidence import Asked, Evidence
from ..faults.fault import Fault
from ..report import Named
from ..source import line_of

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
    from ..source.parsed import tree_of

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
