"""Whether the kernels of this package can take a request, and why not in words. Imports no triton."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...mask_rules import TRACED, is_traced
from ..scores import Scores, Tiled
from .launches import interpreted

if TYPE_CHECKING:
    from .request import Prepared

__all__ = ["cannot", "no_compiler", "prepared"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
FARTHEST = 2**24  # whole numbers that float32 holds


def cannot(scores: Tiled) -> str | None:
    """None if the kernels can take it, else the reason."""
    if not isinstance(scores, Scores):
        return "these weights were given, not computed: there is no q and k to go back to"
    q = scores.q
    if q.device.type != "cuda" and not interpreted():
        return f"it runs on cuda, the tensors are on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {str(q.dtype).removeprefix('torch.')}"
    if not q.shape[0]:
        return "there is nothing in this batch"
    if q.shape[-1] > LARGEST_HEAD:
        return f"it takes head_dim up to {LARGEST_HEAD}, not {q.shape[-1]}"
    if scores.scoring.slopes is not None and scores.shape[3] > FARTHEST:
        return f"it counts distances up to {FARTHEST} exactly, and there are {scores.shape[3]} keys"
    if is_traced():
        return TRACED
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) is active, which only plain operations pass"
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
    """Why Triton cannot build what launches its kernels; None: it can."""
    if os.environ.get("CC") or any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return None
    return "triton needs a C compiler, and there is none: install gcc, or set CC"


def prepared(scores: Tiled, lse: Tensor) -> Prepared:
    """What kernels take; only where `cannot` says nothing."""
    from .request import Prepared

    assert isinstance(scores, Scores)
    return Prepared(scores, lse)
