"""A block in which chosen heads are heard, and perhaps changed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, AttentionBypassed
from .attachment import Attachment, attach
from .calls import Call
from .chosen_heads import ChosenHeads

__all__ = ["Change", "ChosenListening", "check_any", "outputs_of"]

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


def check_any(
    model: nn.Module, ran: int, heard: Collection[Any], fallback: str | None, elsewhere: bool = False
) -> None:
    """Raise where a model ran and nothing was heard, unless that was allowed.

    Args:
        ran: how many times.
        heard: the layers.
        elsewhere: whether it called another model, to which somebody listens as well; or a layer ran on
            nothing.

    Raises:
        AttentionBypassed: nothing was.
    """
    if ran and not heard and not elsewhere and fallback != "skip":
        raise AttentionBypassed(
            f"model must have attention that can be heard: {type(model).__name__} ran {ran} times "
            "and none was; is there softmax attention in it?"
        )


class ChosenListening(AbstractContextManager[Any]):
    """Lets `change` act on the chosen heads for as long as a block lasts.

    It may be entered again, also inside itself, and beside others: each hears what those before it left.
    """

    def __init__(self, model: nn.Module, chosen: ChosenHeads, change: Change, fallback: str | None) -> None:
        self.model, self.chosen, self.change, self.fallback = model, chosen, change, fallback
        attach(model, _Listener(chosen, change), fallback)  # says at once what is wrong with the arguments
        self._entered: list[_Block] = []

    def begin(self) -> tuple[Change, Any]:
        """What is done in a block, and what the block is given."""
        return self.change, self

    def __enter__(self) -> Any:
        change, given = self.begin()
        listener = _Listener(self.chosen, change)
        attached = attach(self.model, listener, self.fallback)
        attachment = attached.__enter__()
        self._entered.append(_Block(attached, attachment, listener, attachment.forward.number))
        return given

    def __exit__(self, kind: Any, *rest: Any) -> None:
        block = self._entered.pop()
        missed = [path for path in self.chosen.paths if path in block.attachment.bypassed]
        ran = block.attachment.forward.number - block.before
        block.attached.__exit__(kind, *rest)
        if kind is not None:
            return
        if missed:
            raise AttentionBypassed(
                f"heads must be in layers that can be heard: {', '.join(missed)} compute their own weights "
                "and were left out (fallback='skip'); nothing was done to them"
            )
        if self.chosen.everything:
            check_any(self.model, ran, block.listener.heard, self.fallback, block.attachment.elsewhere)
        silent = self.chosen.absent(block.listener.heard) if ran else []
        absent = [path or "the model itself" for path in silent]
        if absent:
            raise ArgumentError(
                f"heads must be in layers that run: the model ran {ran} times and {', '.join(absent)} never "
                "attended; nothing was done to them, leave them out"
            )


class _Block(NamedTuple):
    """One time that a block was entered."""

    attached: AbstractContextManager[Attachment]
    attachment: Attachment
    listener: _Listener
    before: int  # how many times the model had run


class _Listener:
    def __init__(self, chosen: ChosenHeads, change: Change) -> None:
        self.chosen, self.change = chosen, change
        self.heard: set[str] = set()  # paths, with visits

    def hear(self, call: Call) -> Tensor | None:
        self.heard.add(call.path)
        heads = self.chosen.at(call.path, call.num_heads)
        if not heads:
            return None
        output = outputs_of(call)
        return self.change(call, torch.tensor(heads, device=output.device), output)
