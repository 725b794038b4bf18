"""The memory budget: how large a dense result may be before headwise refuses to make it.

headwise uses quadratic memory only if you ask for a dense matrix. Its size is first compared with a budget:
by default half of the free memory of the tensor's device.

    with headwise.budget.limit("2 GiB"):
        weights.dense()

When headwise reads a mask in CPU memory, it keeps a private copy as long as the mask exists, at most 128 MiB
in all; `headwise.budget.clear_copies()` frees all copies at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from .byte_sizes import parse, readable
from .errors import BudgetExceeded
from .mask_meaning import clear_copies

__all__ = ["bytes_allowed", "check", "clear_copies", "free_bytes", "limit", "parse", "readable"]

SHARE_OF_FREE = 0.5
ALWAYS_FINE = 64 * 2**20  # a result this small is not checked: reading the free memory takes too long
LITTLE = 256  # nor is a 256th of a GPU's memory; torch raises if that is not free

NO_LIMIT = 2**63 - 1

_limit: contextvars.ContextVar[int | None] = contextvars.ContextVar("headwise_budget", default=None)


@contextlib.contextmanager
def limit(size: int | str) -> Iterator[None]:
    """Set the budget inside a `with` block, e.g. `with limit("2 GiB"): ...`."""
    token = _limit.set(parse(size))
    try:
        yield
    finally:
        _limit.reset(token)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a new tensor on this device could use."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return min(_system_free(), _container_free())


def _system_free() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # other systems: all memory


def _container_free() -> int:
    """Return what a Linux control group leaves; a container's limit can be far below the machine's memory."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        if most == "max":
            return NO_LIMIT
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(counters.get("inactive_file", 0))  # file pages the kernel gives up when asked
        return max(0, int(most) - int(used) + reclaimable)
    except OSError:
        return NO_LIMIT


def bytes_allowed(device: torch.device) -> int:
    """Return the current budget: the limit if one is set, otherwise half of the free memory."""
    chosen = _limit.get()
    return chosen if chosen is not None else int(SHARE_OF_FREE * free_bytes(device))


def surely_fits(size: int) -> bool:
    """Return True if `size` bytes are too few to check, and no limit is set."""
    return not torch.compiler.is_compiling() and size <= ALWAYS_FINE and _limit.get() is None


def _is_little(size: int, device: torch.device) -> bool:
    """Return True for a part of a GPU's memory so small that the check, a millisecond, is not worth it."""
    return device.type == "cuda" and _limit.get() is None and size <= gpu_bytes(device) // LITTLE


@functools.cache
def gpu_bytes(device: torch.device) -> int:
    """Return all memory that a GPU has."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def check(size: int, device: torch.device, result: str, instead: str, allowed: int | None = None) -> None:
    """Raise `BudgetExceeded` if `size` bytes are over the budget.

    Args:
        result: the tensor that would be allocated, with its shape; for the message.
        instead: what the caller can do with less memory; for the message.
        allowed: a budget for this call alone.
    """
    if torch.compiler.is_compiling():
        return  # sizes are symbols then, and the limit cannot be traced
    if allowed is None:
        if surely_fits(size) or _is_little(size, device):
            return
        allowed = bytes_allowed(device)
    if size > allowed:
        raise BudgetExceeded(
            f"{result} must fit the memory budget: {readable(size)} > {readable(allowed)}; {instead}, "
            f'or raise the budget: with headwise.budget.limit("{readable(size)}")'
        )
