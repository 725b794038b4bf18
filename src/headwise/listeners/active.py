"""What is heard when an attention layer runs, who listens, and what runs now.

What is heard when an attention layer runs, and who listens.

What runs now: who is attached, what they must not hear, what the forward at work knows of padding.

Who is attached is known to all threads; what runs is each thread's own.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..map import AttentionMap

if TYPE_CHECKING:
    from .attachment import Attachment, Run

__all__ = [
    "Call",
    "Forward",
    "Listener",
    "active",
    "announce",
    "beside",
    "in_backward",
    "innermost",
    "is_quiet",
    "nothing_to_hear",
    "padding_now",
    "path_of",
    "quietly",
]


@dataclass(eq=False)
class Forward:
    """One run of a model, from its first hooked module to that module's return; in one thread."""

    number: int = 0
    padding: dict[Any, Tensor | None] = field(default_factory=dict)  # what layers were told, to run again
    masked: list[Any] = field(default_factory=list)  # configs whose models made their masks of the padding


@dataclass(frozen=True, eq=False)
class Call:
    """One attention layer at work, once.

    Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim.
    """

    path: str  # the module's, in the model listened to
    kind: str  # "self" or "cross"
    weights: AttentionMap  # [B, H, T, S], before dropout
    value: Tensor | None  # [B, Hk, S, Dv]; None where only weights are to be had
    output: Tensor | None  # [B, H, T, Dv], each head before they are joined; None likewise
    forward: Forward
    tokens: dict[str, Tensor] = field(default_factory=dict)  # given around it, by argument name: int [B, T]

    @property
    def num_heads(self) -> int:
        return self.weights.shape[1]


class Listener(Protocol):
    """Someone who is told of every call while attached to a model."""

    def hear(self, call: Call) -> Tensor | None:
        """Take note; a tensor takes the place of the heads' output, [B, H, T, Dv]."""
        ...


def in_backward() -> bool:
    """Whether this is a forward run again for its gradients (checkpointing), which was heard before."""
    return torch._C._current_graph_task_id() != -1


active: list[Attachment] = []  # in the order in which they were attached
_here = threading.local()


def running() -> list[tuple[Attachment, Run]]:
    """The models that run in this thread, the one whose module was entered last first."""
    found = [(each, run) for each in tuple(active) if (run := each.run) is not None]
    return found if len(found) < 2 else sorted(found, key=lambda pair: -pair[1].entered[-1].order)


def innermost() -> nn.Module | None:
    """The module that runs now in this thread, of all that are listened to."""
    found = running()
    return found[0][1].entered[-1].module if found else None


def announce(
    module: nn.Module | None,
    kind: str,
    weights: AttentionMap,
    value: Tensor | None,
    output: Tensor | None,
) -> Tensor | None:
    """An attention layer ran: tell whoever listens to a model it is part of.

    Args:
        module: the layer; None: whichever module runs now.

    Returns:
        The heads' output, [B, H, T, Dv], as the listeners leave it.

    Raises:
        ArgumentError: under `torch.vmap`, where there is no number to measure.
    """
    module = innermost() if module is None else module
    if module is None:
        return output
    if output is not None and torch._C._functorch.is_batchedtensor(output):
        raise ArgumentError(
            f"model must not run under torch.vmap while it is listened to: {list(output.shape)} is one of "
            "many at once; give it the whole batch"
        )
    with quietly():
        for attachment in tuple(active):
            output = attachment.tell(module, kind, weights, value, output)
    return output


class quietly(AbstractContextManager[None]):  # noqa: N801, reads as a verb
    """Our own work, in which no attention is to be heard."""

    def __enter__(self) -> None:
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *_: Any) -> None:
        _here.depth -= 1


def is_quiet() -> bool:
    return getattr(_here, "depth", 0) > 0


def path_of(module: nn.Module) -> str | None:
    """Where a module is in a model that is listened to."""
    found = (each.path_of(module) for each in tuple(active))
    return next((path for path in found if path is not None), None)


def padding_now(path: str | None, batch: int, length: int) -> Tensor | None:
    """Which queries of a layer are real, bool [B, length], as the arguments of this forward say."""
    for attachment, run in running():
        decodes = attachment.two_texts and "decoder" in (path or "").split(".")
        told, key = run.forward.padding, (path, batch, length)
        if key not in told or not in_backward():  # what is run again for its gradients begins further in
            found = run.padding(decodes)
            told[key] = found if found is not None and tuple(found.shape) == (batch, length) else None
        if told[key] is not None:
            return told[key]
    return None


def beside(module: nn.Module, queries: Tensor | None, sizes: tuple[int, ...] | None = None) -> Tensor | None:
    """Which queries are real, from self-attention to the cross-attention beside it in the same layer.

    Args:
        queries: what self-attention knows; noted if no sizes are given.
        sizes: [B, T] of the cross-attention that asks.
    """
    for attachment, run in running():
        path = attachment.path_of(module)
        if path is not None:
            parent = path.rpartition(".")[0]
            if sizes is None:
                run.beside[parent] = queries
            else:
                found = run.beside.get(parent)
                if found is not None and tuple(found.shape) == sizes:
                    return found
    return None


def nothing_to_hear() -> None:
    """A layer ran on nothing: there is no attention to tell of, and none was missed."""
    for attachment, run in running():
        attachment.elsewhere = True
        for each in run.entered:
            each.heard = True
