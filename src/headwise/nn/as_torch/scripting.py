"""torch's own classes on the same parts: for `torch.jit.script`, and for tensors that are not ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

__all__ = ["changing_nothing", "scriptable"]


def scriptable(module: nn.Module, kind: Any) -> Any:
    """torch's own class on the same parts, with its own list of them: scripting replaces children."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


def changing_nothing(module: nn.MultiheadAttention) -> Any:
    """The same attention with an `out_proj` that gives back what it gets, for torch's forward to look at."""
    like = module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight
    weight = torch.eye(module.embed_dim, dtype=like.dtype, device=like.device)
    last = SimpleNamespace(weight=weight, bias=torch.zeros_like(weight[0]))
    twin = object.__new__(type(module))  # its very class: if parametrised, it reads its weights there
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {**module._modules, "out_proj": last}
    return twin
