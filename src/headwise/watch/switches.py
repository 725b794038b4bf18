"""Heads that are switched off and on again between runs, and the loss each time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .batches import Loss, Visit, checked_loss, count_examples, entering
from .calls import Call
from .chosen_heads import base_of
from .listening import outputs_of

__all__ = ["Switches", "check_heard"]


class Switches:
    """Listens to a model and puts zeros in the place of the heads that are off."""

    def __init__(self) -> None:
        self.off: dict[str, list[int]] = {}  # by path
        self.num_heads: dict[str, int] = {}  # of every layer heard so far
        self.examples = 0  # sequences in the last run
        self._visits: list[Visit] = []

    def hear(self, call: Call) -> Tensor | None:
        """Take note of the layer; its output without the heads that are off."""
        output, path = outputs_of(call), base_of(call.path)
        self.num_heads[path] = call.num_heads
        self._visits.append((path, output.shape[0], output.shape[2], None))
        heads = self.off.get(path)
        return output.index_fill(1, torch.tensor(heads, device=output.device), 0) if heads else None

    @torch.no_grad()
    def loss(
        self, model: nn.Module, loss_fn: Loss | None, batch: Any, off: Iterable[tuple[str, int]]
    ) -> float:
        """The loss on a batch with these heads, (path, head), off."""
        self.off = {}
        for path, head in off:
            self.off.setdefault(path, []).append(head)
        self._visits.clear()
        try:
            with entering(model) as given:
                loss = checked_loss(loss_fn, model, batch).item()
            self.examples = count_examples(given, self._visits) if self._visits else 0
            return loss
        finally:
            self.off = {}

    def every_head(self) -> list[tuple[str, int]]:
        """(path, head) of all layers heard so far."""
        return [(path, head) for path, count in self.num_heads.items() for head in range(count)]


def check_heard(model: nn.Module, heard: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` if no layer was heard."""
    if not heard:
        raise ArgumentError(
            f"model must run attention in its loss: none was heard in {type(model).__name__}; is it the "
            "model that loss_fn runs?"
        )
