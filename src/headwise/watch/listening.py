"""A block in which chosen heads are heard, and perhaps changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AttentionBypassed
from .attachment import Attachment, attach
from .calls import Call
from .chosen_heads import ChosenHeads

__all__ = ["Change", "ChosenListening", "outputs_of"]

# What is done at a call, given the heads chosen there, int [n], and their output [B, H, T, Dv]
Change = Callable[[Call, Tensor, Tensor], Tensor | None]


def outputs_of(call: Call) -> Tensor:
    """The heads' output of a call, [B, H, T, Dv].

    Raises:
        AttentionBypassed: only its weights are to be had.
    """
    if call.output is None:
        raise AttentionBypassed(
            f"heads must have outputs in hand to be used: of {call.path} only the weights "
            f"{list(call.weights.shape)} are heard (fallback='eager'); leave this layer out"
        )
    return call.output


class ChosenListening(AbstractContextManager[Any]):
    """Lets `change` act on the chosen heads for as long as a block lasts.

    It may be entered again, also inside itself, and beside others: each hears what those before it left.
    """

    def __init__(self, model: nn.Module, chosen: ChosenHeads, change: Change, fallback: str | None) -> None:
        self.model, self.chosen, self.change, self.fallback = model, chosen, change, fallback
        attach(model, _Listener(chosen, change), fallback)  # says at once what is wrong with the arguments
        self._entered: list[tuple[AbstractContextManager[Attachment], Attachment]] = []

    def begin(self) -> tuple[Change, Any]:
        """What is done in a block, and what the block is given."""
        return self.change, self

    def __enter__(self) -> Any:
        change, given = self.begin()
        attached = attach(self.model, _Listener(self.chosen, change), self.fallback)
        self._entered.append((attached, attached.__enter__()))
        return given

    def __exit__(self, kind: Any, *rest: Any) -> None:
        attached, attachment = self._entered.pop()
        missed = [path for path in self.chosen.paths if path in attachment.bypassed]
        attached.__exit__(kind, *rest)
        if kind is None and missed:
            raise AttentionBypassed(
                f"heads must be in layers that can be heard: {', '.join(missed)} compute their own weights "
                "and were left out (fallback='skip'); nothing was done to them"
            )


class _Listener:
    def __init__(self, chosen: ChosenHeads, change: Change) -> None:
        self.chosen, self.change = chosen, change

    def hear(self, call: Call) -> Tensor | None:
        heads = self.chosen.at(call.path, call.num_heads)
        if not heads:
            return None
        output = outputs_of(call)
        return self.change(call, torch.tensor(heads, device=output.device), output)
