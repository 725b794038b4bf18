"""GPT-2: q, k and v side by side in one `Conv1D`; in cross-attention q apart.

Letters: H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .projections import channels, check, is_conv1d, keep_inputs, keep_outputs
from .prunable import Prunable

__all__ = ["of"]


def of(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is of this family."""
    module: Any = model.get_submodule(path)
    known = all(hasattr(module, name) for name in ("c_attn", "c_proj", "num_heads", "head_dim", "split_size"))
    if not known or not is_conv1d(module.c_attn):
        return None
    H, D = module.num_heads, module.head_dim
    names = ["c_attn", "c_proj", *(["q_attn"] if hasattr(module, "q_attn") else [])]
    check(model, path, [(name, getattr(module, name)) for name in names])

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        parts = module.c_attn.nf // (H * D)  # q, k and v, or k and v
        keep_outputs(module.c_attn, torch.cat([channels(heads, D, part * H * D) for part in range(parts)]))
        if "q_attn" in names:
            keep_outputs(module.q_attn, channels(heads, D))
        keep_inputs(module.c_proj, channels(heads, D))
        module.num_heads, module.split_size = len(heads), len(heads) * D

    return Prunable(path, H, H, keep)
