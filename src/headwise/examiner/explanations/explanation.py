"""`Explanation`: the expected numbers of every step, those of a module, and their first difference."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..recipe import State, own_scale
from ..report import Named
from .shown_steps import (
    PROJECTED,
    ExplainedStep,
    are_shared,
    fields_of,
    in_words,
    key_heads,
    of_key_heads,
    steps_of,
)

# Differences up to this, relative to the largest expected number, are ignored.
CLOSE = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def differing(expected: Tensor, yours: Tensor) -> tuple[Tensor, float, float]:
    """Return which numbers differ (bool, the shape of `expected`), the largest difference, and the tolerance.

    If the shapes differ, all numbers differ by infinity. NaN equals NaN.
    """
    finite = expected[expected.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 1.0
    allowed = CLOSE.get(yours.dtype, 1e-7) * max(1e-3, size)
    if yours.shape != expected.shape:
        return torch.ones_like(expected, dtype=torch.bool), float("inf"), allowed
    yours = yours.to(expected.dtype)
    equal = (expected == yours) | (expected.isnan() & yours.isnan())
    off = (expected - yours).abs().masked_fill(equal, 0.0).nan_to_num(torch.inf, posinf=torch.inf)
    return off > allowed, float(off.max()) if off.numel() else 0.0, allowed


class Explanation:
    """Every step of one call of multi-head attention, in numbers.

    Args:
        name: the name of the module.
        expected: the state of the right recipe on these inputs with these weights.
        yours: the numbers of the module: a state, or some tensors by field ("p", "output").
        query_labels, key_labels: a word for each token; None shows numbers.
        scale: the factor of the scores; None is 1 / sqrt(head_dim).
        faults: the faults of the module.
        notes: sentences to show.
        batch: the sequence shown first, if nothing differs.
        checked: the summary of `check`, if the module is not right.

    Attributes:
        steps: the steps, as `ExplainedStep`.
        first: the first step where `yours` differs; None if it does not, or is unknown.
    """

    def __init__(
        self,
        name: str,
        expected: State,
        yours: State | Mapping[str, Tensor] | None = None,
        *,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        scale: float | None = None,
        faults: Sequence[Named] = (),
        notes: Sequence[str] = (),
        batch: int = 0,
        checked: str | None = None,
    ) -> None:
        self.checked = checked
        self.name, self.expected, self.faults, self.notes = name, expected, tuple(faults), list(notes)
        self.query_labels = None if query_labels is None else list(query_labels)
        self.key_labels = None if key_labels is None else list(key_labels)
        H = expected.num_heads
        designs = [change.design for change in expected.changes]
        keys = expected.scores.shape[-1]
        own = [own_scale(design, keys) for design in designs if design.key == "own scale"]
        self.scales = tuple(own[0].expand(H).tolist()) if own and scale is None else ()
        self.scales = self.scales or (expected.head_dim**-0.5 if scale is None else scale,) * H
        self.scale = self.scales[0]
        self.yours = fields_of(yours) if isinstance(yours, State) else dict(yours or {})
        self.fields = fields_of(expected)
        self.key_heads = self._shared(key_heads(expected.weights, H))
        B = expected.query.shape[0]
        self.masks = [in_words(expected.inputs.mask, b) for b in range(B)]
        self.steps: tuple[ExplainedStep, ...] = tuple(
            steps_of(expected, self.scales, self.masks, self.key_heads)
        )
        self.allowed: dict[str, float] = {}  # by field: differences up to this are none
        self.first: ExplainedStep | None = None
        self.batch, self.head = batch, 0
        for step in self.steps:
            self._compare(step)

    def _shared(self, uses: tuple[int, ...]) -> tuple[int, ...]:
        """Store keys and values that heads share once, and return the key/value head of each head."""
        every = [
            fields[name] for fields in (self.fields, self.yours) for name in PROJECTED[1:] if name in fields
        ]
        if len(set(uses)) == len(uses) or not all(are_shared(tensor, uses) for tensor in every):
            return tuple(range(len(uses)))
        for fields in (self.fields, self.yours):
            fields |= {name: of_key_heads(fields[name], uses) for name in PROJECTED[1:] if name in fields}
        return uses

    def _compare(self, step: ExplainedStep) -> None:
        if step.key == "weigh":  # not stored for every query: it differs if its operands do
            operands = {part.status for part in self.steps if part.key in ("split", "softmax")}
            step.status = "unseen"
            if {"p", "v"} <= set(self.yours):
                step.status = "after" if {"first", "after"} & operands else "same"
            return
        step.expected = {name: self.fields[name] for name in step.fields}
        step.yours = {name: self.yours[name] for name in step.fields if name in self.yours}
        wrong = False
        for name, yours in step.yours.items():
            where, error, self.allowed[name] = differing(self.fields[name], yours)
            step.error = max(error, step.error or 0.0)
            if not bool(where.any()):
                continue
            wrong = True
            if self.first is None:  # show the first difference first
                place = where.nonzero()[0].tolist()
                self.batch = place[0]
                self.head = place[1] if where.ndim == 4 else 0
                self.first = step
        if step.yours:
            step.status = "same" if not wrong else "first" if self.first is step else "after"

    @property
    def verdict(self) -> str:
        """The result of the comparison in a sentence or two, consistent with `check`."""
        comparison = self._compared()
        if self.first is not None or self.checked is None:
            return comparison
        checked = self.checked.rstrip(".")
        return (
            f"headwise check reports: {checked}. This mistake does not change the numbers on "
            f"this page: {comparison}"
        )

    def _compared(self) -> str:
        number = {step.key: i for i, step in enumerate(self.steps)}
        if self.first is None:
            compared = [step for step in self.steps if step.error is not None]
            if not compared:
                return "These are the expected numbers. There are no numbers of yours to compare them with."
            error = max(step.error or 0.0 for step in compared)
            equal = "exactly" if error == 0 else f"to {error:.0e}"
            if len(compared) > 2:
                which = "Every step" if self.checked is None else "Every step that is shown"
                return f"{which} of {self.name} equals the expected numbers, {equal}."
            which = "The weights and the output" if len(compared) == 2 else "The output"
            return f"{which} of {self.name} equal{'s' * (len(compared) == 1)} the expected numbers, {equal}."
        step = self.first
        text = f"{self.name} differs from the expected numbers at step {number[step.key]}, {step.title!r}"
        unseen = any(earlier.status == "unseen" for earlier in self.steps[: number[step.key]])
        return text + ("; your numbers of the steps before are unknown." if unseen else ".")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the explanation as one self-contained page, and return its path.

        Raises:
            ArgumentError: the path does not end in .html, or cannot be written.
        """
        from ...show.offline_pages import save_page
        from .page import EXAMPLE, page

        return save_page(page(self), path, EXAMPLE)

    def _repr_html_(self) -> str:
        from ...show.offline_pages import framed
        from .page import page

        return framed(page(self), "headwise explain", height=760, scripts=True)

    def text(self, batch: int | None = None, head: int | None = None, width: int = 110) -> str:
        """Return all steps as text, for one sequence and one head.

        Raises:
            PackageMissing: rich is not installed.
            IndexError: no such sequence or head.
        """
        from .page import as_text

        return as_text(self, batch, head, width)

    def print(self, batch: int | None = None, head: int | None = None) -> None:
        """Print all steps on the terminal, in colour."""
        from .page import to_terminal

        to_terminal(self, batch, head)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        B, T, _ = self.expected.query.shape
        S, H = self.expected.key.shape[1], self.expected.num_heads
        return f"Explanation(B={B}, T={T}, S={S}, H={H}: {self.verdict})"
