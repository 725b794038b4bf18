"""Calling the learner's code with batch-first tensors, whatever it wants them to be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .answering import Answer, read
from .encoding import Way, express
from .failing import Unreadable
from .planning import Plan
from .subject import Subject, signature_of

__all__ = ["Caller"]


@dataclass(eq=False)
class Caller:
    """Calls the code by a plan, batch first in and out."""

    subject: Subject
    plan: Plan
    ways: tuple[Way, ...] = ()
    asks: tuple[tuple[str, object], ...] = ()  # what makes it return its weights

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        ways: tuple[Way, ...] | None = None,
        seed: int = 0,
        asks: bool = False,
    ) -> Answer:
        """One call.

        Args:
            query: [B, T, E].
            key, value: [B, S, E].
            mask: bool [B, T, S], True = may attend.

        Raises:
            Unreadable: what came back is no attention's output, or the mask cannot be said.
            Exception: whatever the learner's code raises.
        """
        ways = self.ways if ways is None else ways
        if self.plan.layout == "one sequence":
            answers = []
            for b in range(len(query)):
                one = slice(b, b + 1)
                shown = None if mask is None else mask[one]
                answers.append(self._once(query[one], key[one], value[one], shown, ways, seed, asks))
            weights = [one.weights for one in answers if one.weights is not None]
            joined = torch.cat(weights) if len(weights) == len(answers) else None
            return Answer(torch.cat([one.output for one in answers]), joined)
        return self._once(query, key, value, mask, ways, seed, asks)

    def _once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        ways: tuple[Way, ...],
        seed: int,
        asks: bool,
    ) -> Answer:
        B, T, S, H = len(query), query.shape[1], key.shape[1], self.subject.sizes.H
        given = {"query": query, "x": query, "key": key, "memory": key, "value": value}
        named: dict[str, object] = {}
        for name, slot in self.plan.slots:
            named[name] = (
                {"batch": B, "query_len": T}[slot] if slot not in given else self._laid_out(given[slot])
            )
        named.update(self.plan.constants)
        named.update(self.subject.parameters if self.subject.is_function else {})
        named.update(self.asks if asks else ())
        named.update(dict.fromkeys(self.plan.needs_mask))
        needs = set(self.plan.needs_mask) & {way.argument for way in ways}
        if mask is None and needs:
            mask = torch.ones(B, T, S, dtype=torch.bool)
        if mask is not None:
            said = express(ways, mask, H)
            if said is None:
                raise Unreadable("it has no argument that could say this mask")
            half = query.dtype
            named.update(
                {
                    k: v.to(half) if torch.is_tensor(v) and v.is_floating_point() else v
                    for k, v in said.items()
                }
            )
        if self.plan.as_numpy:
            named = {k: v.detach().numpy() if torch.is_tensor(v) else v for k, v in named.items()}
        args = list(named.values()) if self.plan.positional else []
        for name in self._nameless:
            if name in named and not self.plan.positional:
                args.append(named.pop(name))
        raw = self.subject.invoke(args, {} if self.plan.positional else named, seed)
        return read(raw, self.plan.layout, B, T, S, H)

    @cached_property
    def _nameless(self) -> list[str]:
        """Parameters that can only be passed by position."""
        every = signature_of(self.subject.body).parameters.values()
        return [one.name for one in every if one.kind is one.POSITIONAL_ONLY]

    def _laid_out(self, x: Tensor) -> Tensor:
        layout, H = self.plan.layout, self.subject.sizes.H
        if layout == "one sequence":
            return x[0]
        if layout == "sequence first":
            return x.transpose(0, 1).contiguous() if x.is_contiguous() else x.transpose(0, 1)
        if layout.startswith("heads"):
            split = x.unflatten(-1, (H, -1))  # [B, T, H, D]
            if layout == "heads inside":
                return split
            split = split.transpose(1, 2).contiguous()  # [B, H, T, D]
            return split.flatten(0, 1) if layout == "heads in the batch" else split
        return x
