"""Checks of requests for kernels, block sizes, and launches. Imports no triton.

Block sizes are a small measured table instead of minutes of autotuning at the first call: on an H200 (compute
capability 9.0); docs/log/gpu-kernels.md has the runners-up. Older GPUs have less shared memory and take
`CAREFUL`.

Compiled kernels are looked up here, by what Triton would compile anew for (`specialization`): Triton's own
dispatch reads every argument in every call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mask_rules import TRACED, is_traced
from ..scores import Scores, Tiled

Kernel = Any  # what triton.jit makes of a function, or the compiled one: called as kernel[grid](...)
Arguments = tuple[object, ...]  # tensors, descriptors, numbers, tuples of them

INTERPRET = False  # set by tests, with TRITON_INTERPRET=1 in the environment before triton is imported
# Numbers a kernel is not compiled anew for.
NOT_SPECIAL = ("H", "shift", "left", "right", "b0", "blocks")


def interpreted() -> bool:
    """Return True if Triton runs kernels in Python, on a CPU, as the tests do."""
    return INTERPRET


# Whether kernels can take a request


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
FARTHEST = 2**24  # whole numbers that float32 holds


def cannot(scores: Tiled) -> str | None:
    """Return None if the kernels can take the request, else the reason."""
    if not isinstance(scores, Scores):
        return "the map was made from weights, without q and k"
    q = scores.q
    if q.device.type != "cuda" and not interpreted():
        return f"it supports cuda only; the tensors are on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {str(q.dtype).removeprefix('torch.')}"
    if not q.shape[0]:
        return "the batch is empty"
    if q.shape[-1] > LARGEST_HEAD:
        return f"it takes head_dim up to {LARGEST_HEAD}, not {q.shape[-1]}"
    if scores.scoring.slopes is not None and scores.shape[3] > FARTHEST:
        return f"it takes slopes with up to {FARTHEST} keys, not {scores.shape[3]}"
    if is_traced():
        return TRACED
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) is active, which only plain operations support"
    return _missing(q.device.index) if q.device.type == "cuda" else None


@functools.cache
def _missing(device: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "it needs triton, which is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs a GPU of compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    return no_compiler()


def no_compiler() -> str | None:
    """Return why Triton cannot build launchers for its kernels; None if it can."""
    if os.environ.get("CC") or any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return None
    return "triton needs a C compiler, and found none: install gcc, or set CC"


# Block sizes


class Blocks(NamedTuple):
    """Rows and columns of a tile, warps a program, stages of the software pipeline."""

    M: int
    N: int
    warps: int
    stages: int
    registers: int = 0  # most a thread may have; 0: as many as the compiler likes


# kind -> for 16-bit inputs with head_dim up to 64, up to 128, up to 256
HOPPER: dict[str, tuple[Blocks, Blocks, Blocks]] = {
    "rows": (Blocks(128, 128, 8, 2), Blocks(128, 128, 8, 2, 128), Blocks(128, 64, 4, 3)),
    "received": (Blocks(128, 128, 4, 2), Blocks(128, 128, 4, 2, 208), Blocks(128, 128, 4, 2)),
    # a tile of bias lies in shared memory beside those of q and k: beyond 128 channels there is room for half
    "received_bias": (Blocks(128, 128, 4, 2), Blocks(128, 128, 4, 2, 208), Blocks(64, 128, 4, 2)),
    "mean": (Blocks(128, 64, 8, 3, 128), Blocks(128, 64, 8, 3, 128), Blocks(64, 64, 4, 2)),
    "dense": (Blocks(128, 128, 4, 2), Blocks(128, 128, 4, 2), Blocks(64, 64, 4, 2)),
    "picture": (Blocks(128, 128, 4, 2), Blocks(128, 128, 4, 2), Blocks(64, 64, 4, 2)),
    "top": (Blocks(64, 128, 4, 2), Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 2)),
    "near": (Blocks(64, 16, 4, 4), Blocks(64, 16, 4, 4), Blocks(64, 16, 4, 4)),
    "lse": (Blocks(128, 128, 8, 2), Blocks(128, 128, 4, 2), Blocks(128, 64, 4, 3)),
    "back_q": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1)),
    "back_k": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1)),
    # the first pass: where nothing is asked of a tile, where something is, where tiles come from lists
    "attend": (Blocks(64, 128, 4, 3), Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 2)),
    "attend_rules": (Blocks(64, 128, 4, 3), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2)),
    "attend_listed": (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    "attend_bias": (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    "few": (Blocks(16, 128, 4, 3), Blocks(16, 128, 4, 3), Blocks(16, 64, 4, 3)),
    "attend_dq": (Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 1)),
    "attend_dq_listed": (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 1)),
    "attend_dkv": (Blocks(64, 64, 4, 3), Blocks(64, 32, 4, 3), Blocks(64, 32, 8, 1)),
    "attend_dkv_listed": (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 8, 1)),
    "attend_dbias": (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 1)),
}
CAREFUL = Blocks(64, 64, 4, 2)  # float32, whose tiles take twice the room; and older GPUs
VERY_CAREFUL = Blocks(32, 32, 4, 1)  # the same with long heads
FIRST_PASS = frozenset(kind for kind in HOPPER if kind.startswith("attend") or kind == "few")
WHOLE = Blocks(64, 32, 4, 1)  # the first pass in float32, whose products take three times the registers
FEW_QUERIES = 64  # over which the keys of a first pass may be cut into parts
FEW_ROWS = Blocks(16, 128, 4, 2)  # a handful of queries: the keys are what there is to load
SHORT, SHORT_ROWS = 1024, Blocks(128, 64, 4, 3)  # up to so many keys of short heads: dense weights
INTERPRETED = Blocks(16, 16, 1, 1)


def blocks_for(kind: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Return the blocks a kernel uses."""
    if interpreted():
        return INTERPRETED
    size = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2
    if dtype == torch.float32 and kind in FIRST_PASS:
        return WHOLE
    if dtype == torch.float32 or not takes_descriptors(device.index):
        return VERY_CAREFUL if size == 2 else CAREFUL
    return HOPPER[kind][size]


@functools.cache
def takes_descriptors(device: int | None) -> bool:
    """Return True if the GPU has the copy engine that tensor descriptors use."""
    return interpreted() or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the least number of programs that run at the same time."""
    return 4 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


NUMBERS = itertools.count()
THREADS = threading.local()  # has `bound` where a thread has launched something
COMPILED: dict[Hashable, Kernel] = {}  # by kernel and its specialization


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    args: Arguments,
    constants: tuple[Hashable, ...],
    kinds: Hashable,
    device: torch.device,
    warps: int = 4,
    registers: int = 0,
) -> None:
    """Run kernel[grid](*args, *constants) without Triton's dispatch, which reads every argument each time.

    Args:
        constants: what the kernel is compiled for.
        kinds: the properties of the arguments that determine the compiled kernel; see `specialization`.
        registers: most a thread may have, 0: as many as the compiler likes.
    """
    with on_device(device):
        if interpreted():
            kernel[grid](*args, *constants, num_warps=warps)
            return
        bind_thread(device)
        key = (kernel.__name__, device.index, warps, registers, constants, kinds)
        compiled = COMPILED.get(key)
        if compiled is None:
            limit = {"maxnreg": registers} if registers else {}
            COMPILED[key] = kernel[grid](*args, *constants, num_warps=warps, enable_fp_fusion=True, **limit)
        else:
            compiled[grid](*args, *constants)


def ready(
    kernel: Kernel,
    grid: tuple[int, int, int],
    constants: tuple[Hashable, ...],
    kinds: Hashable,
    device: torch.device,
    warps: int = 4,
    registers: int = 0,
) -> Callable[..., None] | None:
    """Return `launch` of a kernel that has been compiled as a function of its arguments; else None."""
    if interpreted():
        return lambda *args: kernel[grid](*args, *constants, num_warps=warps)
    compiled = COMPILED.get((kernel.__name__, device.index, warps, registers, constants, kinds))
    if compiled is None:
        return None
    from .straight_launch import straight  # with triton, which is there by now

    index, current_device = device.index, torch.cuda.current_device
    run = straight(compiled, grid, constants, index) or _usual(compiled[grid], constants)

    def go(*args: object) -> None:
        bind_thread(device)
        if current_device() == index:
            run(*args)
        else:
            with torch.cuda.device(device):
                run(*args)

    return go


def _usual(run: Callable[..., None], constants: Arguments) -> Callable[..., None]:
    return lambda *args: run(*args, *constants)


@contextlib.contextmanager
def compiled_beside(
    kernel: Kernel,
    grid: tuple[int, int, int],
    args: Arguments,
    constants: tuple[Hashable, ...],
    kinds: Hashable,
    device: torch.device,
    warps: int = 4,
    registers: int = 0,
) -> Iterator[None]:
    """Compile a kernel that will be launched next in another thread during the context.

    Two kernels in sequence are compiled in the time of one: compilers release Python's lock. An error here
    occurs again at the launch, and is raised there.
    """
    if interpreted() or (kernel.__name__, device.index, warps, registers, constants, kinds) in COMPILED:
        yield
        return

    def compile_it() -> None:
        limit = {"maxnreg": registers} if registers else {}
        with contextlib.suppress(Exception), on_device(device):
            kernel.warmup(*args, *constants, grid=grid, num_warps=warps, enable_fp_fusion=True, **limit)

    beside = threading.Thread(target=compile_it)
    beside.start()
    try:
        yield
    finally:
        beside.join()


def specialization(x: object) -> Hashable:
    """Return what Triton compiles anew for: types, None, multiples of 16, ones, numbers beyond 32 bits."""
    if isinstance(x, tuple):
        return tuple([specialization(part) for part in x])
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    if isinstance(x, int):
        return x == 1, x & 15 == 0, x >= 2**31
    return x is None


@functools.lru_cache(maxsize=1024)
def number_of(kind: Hashable) -> int:
    """Return a number for each kind: a key that is fast to look up."""
    return next(NUMBERS)


def bind_thread(device: torch.device) -> None:
    """Let torch launch something in a thread before Triton does.

    Triton asks the driver for descriptors before it launches, and the driver refuses ("invalid device
    context") in a thread that has not used the GPU: one of autograd's whose first work is a backward of ours.
    """
    if not hasattr(THREADS, "bound"):
        torch.zeros(1, device=device)
        THREADS.bound = True


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the tensors' device is current, as Triton's launches need."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
