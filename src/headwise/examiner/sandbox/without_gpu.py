"""Code that asks for a GPU, where there is none: what it puts on one lies on the CPU.

What it computes is the same there. `torch.cuda.is_available()` stays False, so code that asks first runs as
its author meant it to run without one.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

KINDS = frozenset(("cuda", "mps", "xpu", "hip"))
SPOKEN_OF = re.compile(r"\b(cuda|mps|xpu)\b|\.to\(\s*\d")
WORDS = "it asks for a GPU, and none is used here: what it puts on one lies on the CPU"


def asks_for_gpu(source: str) -> bool:
    """Whether the source speaks of one: what follows costs time at every call of torch's."""
    return SPOKEN_OF.search(source) is not None


class OnCPU(TorchFunctionMode):
    """Devices that are not here are read as the CPU.

    Attributes:
        met: whether any was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device:  # one that is only spoken of
            return func(*args, **kwargs)
        if name in ("cuda", "xpu") and args and isinstance(args[0], Tensor):
            self.met = True
            return args[0]
        if name == "pin_memory" and args:
            return args[0]
        is_move = name == "to" and len(args) > 1
        if any(map(self._is_away, args)):
            args = tuple(self._here(one) for one in args)
        if is_move and type(args[1]) is int:  # x.to(0) is the first GPU
            self.met, args = True, (args[0], "cpu", *args[2:])
        if self._is_away(kwargs.get("device")) or type(kwargs.get("device")) is int:
            self.met, kwargs = True, {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)

    def _is_away(self, one: object) -> bool:
        if isinstance(one, torch.device):
            return one.type in KINDS
        return type(one) is str and one.partition(":")[0] in KINDS

    def _here(self, one: object) -> object:
        if not self._is_away(one):
            return one
        self.met = True
        return torch.device("cpu")


def quieten() -> None:
    """What asks which GPU it is, or waits for it, gets an answer."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.set_device = lambda device: None
