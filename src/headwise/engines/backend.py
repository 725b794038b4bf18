"""The interface of backends: the call they get, their methods, and what these return.

A new backend is a subclass of `Backend` in a file of its own and an entry in the table, `backends.BACKENDS`.
Callers do not check its class: what is special about a backend is a field here, whose default changes
nothing.

Any backend's backward fits any backend's forward: a softmax's gradient needs the output and the lse of its
rows, whichever backend computed them. A backend without its own backward may use `plain.TILES`.

Row statistics can be collected during the forward. A caller that will need some sets them for a block of code
(`wanted`), or in the call itself (`attention(..., statistics=...)`). Collected statistics are stored in the
map, a value per query; others are measured on use.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .gradients import ScoreGradients
from .kernels import Kernel
from .scores import Scores
from .walk import Anchor

Gradients = tuple[ScoreGradients, Tensor, Tensor | None]  # of q, k and what is added; of v; of sinks

# True: the verdict holds for every call with the same key. False: no plan is made. A function: it is called
# before each reuse.
Holds = bool | Callable[[], bool]

NO_BIAS_GRADIENT = "it computes no gradient of bias, slopes or relative"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention, as backends see it."""

    scores: Scores
    v: Tensor
    dropout: float = 0.0
    plain_because: str | None = None  # why only torch's own differentiable operations can run it
    bias_gradient: bool = False  # a gradient of bias, slopes or relative is wanted
    collect: tuple[str, ...] = ()  # row statistics that will be read
    anchor: Anchor | None = None  # in backward over a part of the keys: the full rows' lse

    @property
    def matrix_because(self) -> str | None:
        """Why the full matrix is needed, by operations torch itself can differentiate; None if it is not."""
        if self.plain_because:
            return self.plain_because
        if self.dropout:
            return f"dropout {self.dropout:g} needs the matrix of weights, which it never computes"
        return None

    @property
    def shape_key(self) -> Hashable:
        """The shapes for which cuDNN makes a plan of its own."""
        q, k, v = self.scores.q, self.scores.k, self.v
        return q.shape, k.shape, v.shape, q.dtype, self.scores.mask.right


class Runner(NamedTuple):
    """The functions of a backend for all calls of one kind, with every choice made beforehand.

    forward: (output, lse, row statistics by `names`) of scores and v.
    backward: from scores, v, output, lse and the output's gradient.
    """

    forward: Callable[[Scores, Tensor], tuple[Tensor, Tensor, Tensor | None]]
    backward: Callable[[Scores, Tensor, Tensor, Tensor, Tensor], Gradients]
    names: tuple[str, ...] = ()


class Backend(ABC):
    """Base class of backends, which run the first pass.

    name: what users call it by.
    devices: the kinds of device it runs on; none: on all.
    is_differentiable: made of torch's own operations on the full matrix, so that torch computes its gradients
        in any mode, and dropout can be applied to the weights. No other backend gets dropout.
    gives_bias_gradient: its backward gives gradients of what is added where the call wants them.
    counts_on: the kinds of device on which `note` is called for every call, whichever backend runs it.
    collects: row statistics that its `forward_and_collect` can return.
    """

    name: str
    devices: tuple[str, ...] = ()
    is_differentiable: bool = False
    gives_bias_gradient: bool = False
    counts_on: tuple[str, ...] = ()
    collects: tuple[str, ...] = ()

    def why_not(self, call: Call) -> str | None:
        """Return None if it can run the call, else the reason in words."""
        if self.devices and call.v.device.type not in self.devices:
            return f"it supports {' and '.join(self.devices)} only; the tensors are on {call.v.device.type}"
        reason = self.cannot(call)
        if reason is not None or self.is_differentiable:
            return reason
        if call.dropout or call.plain_because:
            return call.matrix_because
        return NO_BIAS_GRADIENT if call.bias_gradient and not self.gives_bias_gradient else None

    def cannot(self, call: Call) -> str | None:
        """Return a reason of this backend's own, on a device that it supports; None if there is none."""
        return None

    def reluctance(self, call: Call) -> str | None:
        """Return why `auto` should not choose it although it can run the call; None if there is no reason."""
        return None

    @abstractmethod
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return (output [B, H, T, Dv], lse [B, H, T]); a row that sees nothing has output 0 and lse -inf."""

    def can_collect(self, call: Call) -> bool:
        """Return True if it collects statistics of this call."""
        return bool(self.collects)

    def collected(self, call: Call) -> tuple[str, ...]:
        """Return the requested statistics that it collects."""
        if not call.collect or not self.can_collect(call):
            return ()
        return tuple([name for name in call.collect if name in self.collects])

    def forward_and_collect(self, call: Call, names: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (output, lse, [len(names), B, H, T] values per query of names in `collects`)."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Return the gradients, from the output, the lse and the output's gradient, all of full rows."""

    def verdict_holds(self, call: Call) -> Holds:
        """Return whether its verdict on a call holds for every call of that kind (see `first_pass.plan_key`).

        False, the default: no call that this backend is asked about is planned, even if another one runs it.
        A function is called before each use of a plan and returns whether it still holds; it may count calls.
        """
        return False

    def runner(self, call: Call) -> Runner | None:
        """Return functions that run calls of this kind without `Call`, checks or table; None: use `forward`.

        Kernels of ours are faster if a call of the kind has been run before.
        """
        return None

    def description(self, call: Call) -> str:
        """Return a phrase on how it runs the call."""
        return "in one call"

    def bare(self, q: Tensor, v: Tensor) -> Kernel | None:
        """Return the kernel that takes such heads unpadded and unrepeated; None if there is none.

        It is called for calls it can run, without options, and with no rule but causal squares and padding.
        """
        return None

    def note(self, call: Call) -> None:  # noqa: B027, most have nothing to count
        """Record that a call is being run, by this backend or another."""


# Row statistics collected in forward


ON_THE_WAY = ("entropy", "effective_keys", "confidence", "distance", "max_logit")  # by a row's sums


class _Collecting(threading.local):
    names: tuple[str, ...] = ()  # in every thread from the start: torch.compile guards on its existence


_collecting = _Collecting()


class Collected(NamedTuple):
    """Row statistics of a call, by name: rows of one tensor [n, B, H, T]."""

    names: tuple[str, ...]
    rows: Tensor

    def row(self, name: str) -> Tensor:
        """Return the values of one name, [B, H, T]."""
        return self.rows[self.names.index(name)]

    def map(self, change: Callable[[Tensor], Tensor]) -> Collected:
        """Return the same statistics with `change` applied to the rows."""
        return Collected(self.names, change(self.rows))


class wanted(AbstractContextManager[None]):  # noqa: N801, reads as a verb
    """A context in which calls of this thread collect these row statistics where they can."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __enter__(self) -> None:
        self.before = wanted_now()
        _collecting.names = tuple(dict.fromkeys((*self.before, *self.names)))

    def __exit__(self, *_: object) -> None:
        _collecting.names = self.before


def wanted_now() -> tuple[str, ...]:
    """Return the names that `wanted` has set."""
    return _collecting.names
