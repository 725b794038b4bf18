"""Backends: who can run the first pass, in which order they are asked, and why not in words.

A guard against plans built over and over: cuDNN plans each new shape, which can take 400 ms.

A run over fixed shapes pays once and is fastest. A run whose shapes keep changing (packed batches, growing
contexts) pays at every step; there torch's flash kernel, which needs no plan, is several times faster.

The table of who can run what: an ordered tuple of backends, each with a reason in words why not.

`auto` takes the first that can. A backend asked for by name runs or says why not; nothing steps in for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ArgumentError, BackendUnavailable, nearest
from . import fused, kernels
from .kernels import Kernel
from .scores import Scores

__all__ = ["BACKENDS", "Backend", "Call", "ShapeChurn", "backend_named", "choose", "takes_cudnn", "verdicts"]


class ShapeChurn:
    """Counts how many of the recent calls came with a shape not seen before.

    Example:
        >>> churn = ShapeChurn(window=8, most=3)
        >>> for length in (5, 5, 5, 6, 7):
        ...     churn.note(length)
        >>> churn.reason(5) is None  # planned already
        True
        >>> print(churn.reason(8))
        3 of the last 5 calls had a shape not seen before, and it plans each one anew
    """

    def __init__(self, window: int = 64, most: int = 16, remembered: int = 4096) -> None:
        self.window, self.most, self.remembered = window, most, remembered
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._fresh: list[bool] = []

    def note(self, shape: Hashable) -> None:
        """A call with this shape is being run."""
        self._fresh.append(shape not in self._seen)
        del self._fresh[: -self.window]
        self._seen[shape] = None
        self._seen.move_to_end(shape)
        while len(self._seen) > self.remembered:
            self._seen.popitem(last=False)

    def reason(self, shape: Hashable) -> str | None:
        """Why a call with this shape had better go elsewhere; None if it is welcome."""
        fresh = sum(self._fresh)
        if shape in self._seen or fresh < self.most:
            return None
        return (
            f"{fresh} of the last {len(self._fresh)} calls had a shape not seen before, "
            "and it plans each one anew"
        )


cudnn_churn = ShapeChurn()


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention, as the table sees it."""

    scores: Scores
    v: Tensor
    dropout: float = 0.0
    plain_because: str | None = None  # why only torch's own differentiable operations will do
    bias_gradient: bool = False  # a gradient of bias or slopes is wanted

    @property
    def shape_key(self) -> Hashable:
        """What cuDNN plans for."""
        q, k, v = self.scores.q, self.scores.k, self.v
        return q.shape, k.shape, v.shape, q.dtype, self.scores.mask.right


@dataclass(frozen=True)
class Backend:
    """A way to run the first pass.

    supports: None if it can run the call, else the reason in words.
    kernels: the fused kernels behind it by device; none for those in plain torch.
    """

    name: str
    supports: Callable[[Call], str | None]
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def kernel_for(self, device: torch.device) -> Kernel:
        """The fused kernel it uses on this device."""
        return self.kernels[device.type]


def _fused(name: str, *choices: Kernel) -> Backend:
    """A backend of one fused kernel a device."""
    by_device = {kernel.device: kernel for kernel in choices}

    def supports(call: Call) -> str | None:
        kernel = by_device.get(call.v.device.type)
        if kernel is None:
            return f"it runs on {' and '.join(by_device)}, the tensors are on {call.v.device.type}"
        return _cannot(kernel, call)

    return Backend(name, supports, by_device)


def _needs_matrix(call: Call) -> str | None:
    if call.plain_because:
        return call.plain_because
    if call.dropout:
        return f"dropout {call.dropout:g} falls on the weights, which it never has"
    return None


def _cannot(kernel: Kernel, call: Call) -> str | None:
    scores, scoring = call.scores, call.scores.scoring
    q = scores.q
    if q.dtype not in kernel.dtypes:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        return f"it takes {takes}, not {str(q.dtype).removeprefix('torch.')}"
    if reason := _needs_matrix(call):
        return reason
    if scoring.softcap is not None:
        return f"it has no soft cap (softcap={scoring.softcap:g})"
    if not scoring.scale > 0:  # it scales what it has hidden: -inf times 0 or less is no longer hidden
        return f"it takes a scale above 0, not {scoring.scale:g}"
    widest = max(q.shape[-1], call.v.shape[-1])
    if kernel.max_head_dim is not None and widest > kernel.max_head_dim:
        return f"head_dim {widest} is over its {kernel.max_head_dim}"
    if call.bias_gradient:
        return "it gives no gradient to bias or slopes"
    if kernel.device == "cpu":
        return None
    if not kernel.takes_added and (
        fused.adds(scores) or min(scores.mask.left or 0, scores.mask.right or 0) < 0
    ):
        return "it takes no mask beyond a band, and no bias"
    if kernel is kernels.CUDNN and not fused.in_one_call(scores):
        return "it cannot take this call whole, and would plan each part anew"
    return _cuda_says_no(kernel, call)


def _cuda_says_no(kernel: Kernel, call: Call) -> str | None:
    cuda = torch.backends.cuda
    switches = {
        "cudnn": cuda.cudnn_sdp_enabled,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
    }
    compiling = torch.compiler.is_compiling()  # which cannot trace the switches
    if not compiling and not switches[kernel.name]():
        return "it is switched off in torch.backends.cuda"
    if kernel is kernels.CUDA_FLASH and torch.cuda.get_device_capability(call.v.device) < (8, 0):
        return "it needs compute capability 8.0 or later"
    if kernel is kernels.CUDNN:
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms were asked for, and it promises none"
        if call.scores.k.shape[2] == 1:
            return "it does not take a single key"
        if not compiling:
            return cudnn_churn.reason(call.shape_key)
    return None


def takes_cudnn() -> bool:
    """Whether nobody has spoken against cuDNN, whatever the call."""
    return torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()


def _anything(call: Call) -> str | None:
    return None


BACKENDS = (
    _fused("cudnn", kernels.CUDNN),
    _fused("flash", kernels.CPU_FLASH, kernels.CUDA_FLASH),
    _fused("efficient", kernels.CUDA_EFFICIENT),
    Backend("tiles", _needs_matrix),
    Backend("plain", _anything),
)


def backend_named(name: str) -> Backend:
    """The backend of this name.

    Raises:
        ArgumentError: no such backend.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ArgumentError(
        f"backend must be auto or a known name: got {name!r}; "
        f"{nearest(str(name), ['auto', *(b.name for b in BACKENDS)])}"
    )


def verdicts(call: Call) -> dict[str, str | None]:
    """Every backend's answer: None if it can run the call, else why not."""
    return {backend.name: backend.supports(call) for backend in BACKENDS}


def choose(call: Call, name: str = "auto") -> Backend:
    """The backend that runs this call.

    Raises:
        ArgumentError: no backend of that name.
        BackendUnavailable: the backend named cannot run the call.
    """
    if name == "auto":
        for backend in BACKENDS:
            if backend.supports(call) is None:
                return backend
    backend = backend_named(name)
    reason = backend.supports(call)
    if reason is not None:
        others = [other for other, why_not in verdicts(call).items() if why_not is None]
        raise BackendUnavailable(
            f'backend="{name}" cannot run this call: {reason}. Others that can: {", ".join(others)}; '
            'use backend="auto" to let headwise choose'
        )
    return backend
