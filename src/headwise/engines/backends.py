"""The table of backends: who is asked to run the first pass, in which order, and why not in words.

`auto` takes the first that can. A backend asked for by name runs or says why not; nothing steps in for it.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import ArgumentError, BackendUnavailable, nearest
from .backend import Backend, Call
from .fused import Fused
from .kernels import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, CUDNN, Kernel
from .own_kernels import Decode, OwnKernels
from .plain import PLAIN, TILES

BACKENDS: tuple[Backend, ...] = (
    Decode(),
    OwnKernels(),
    Fused("cudnn", CUDNN),
    Fused("flash", CPU_FLASH, CUDA_FLASH),
    Fused("efficient", CUDA_EFFICIENT),
    TILES,
    PLAIN,
)


# What torch, and whoever builds on it, calls ours; `SDPBackend.MATH` as well
TORCHS = {
    "math": "plain",
    "eager": "plain",
    "flash_attention": "flash",
    "mem_efficient": "efficient",
    "efficient_attention": "efficient",
    "cudnn_attention": "cudnn",
    "sdpa": "auto",
}


def backend_named(name: str) -> Backend:
    """The backend of this name.

    Raises:
        ArgumentError: no such backend.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    what = nearest(str(name), ["auto", *(b.name for b in BACKENDS)])
    torchs = TORCHS.get(str(name).rpartition(".")[2].lower())
    if torchs is not None:
        what = f"torch's {name} is {torchs!r} here"
    raise ArgumentError(f"backend must be auto or a known name: got {name!r}; {what}")


def verdicts(call: Call) -> dict[str, str | None]:
    """Every backend's answer: None if it can run the call and would, else why not."""
    return {backend.name: _why_not_of_itself(backend, call) for backend in BACKENDS}


def _why_not_of_itself(backend: Backend, call: Call) -> str | None:
    """Why it does not run a call without being asked by name; None: it does."""
    reason = backend.why_not(call)
    return backend.reluctance(call) if reason is None else reason


def takes(backend: Backend, call: Call) -> bool:
    """Whether it runs a call without being asked by name."""
    return _why_not_of_itself(backend, call) is None


def choose(call: Call, name: str = "auto") -> Backend:
    """The backend that runs this call.

    Raises:
        ArgumentError: no backend of that name.
        BackendUnavailable: the backend named cannot run the call.
    """
    if name == "auto":
        for backend in BACKENDS:
            if _why_not_of_itself(backend, call) is None:
                return backend
    backend = backend_named(name)
    reason = backend.why_not(call)
    if reason is not None:
        others = [other for other, why_not in verdicts(call).items() if why_not is None]
        raise BackendUnavailable(
            f'backend="{name}" cannot run this call: {reason}. Others that can: {", ".join(others)}; '
            'use backend="auto" to let headwise choose'
        )
    return backend


def bare_kernel(call: Call, q: Tensor, v: Tensor) -> Kernel | None:
    """The kernel of the first backend that takes the call without padding channels or repeating key heads.

    Where a step around it takes longer than attention, a kernel without help is worth more than a faster one.
    """
    for backend in BACKENDS:
        if _why_not_of_itself(backend, call) is None:
            kernel = backend.bare(q, v)
            if kernel is not None:
                return kernel
    return None


def note(call: Call) -> None:
    """Tell the backends that count calls on this device (`counts_on`), whichever backend runs the call."""
    device = call.v.device.type
    for backend in BACKENDS:
        if device in backend.counts_on:
            backend.note(call)
