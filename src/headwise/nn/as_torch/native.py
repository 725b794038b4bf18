"""torch's native operator, for the calls it is best at: without gradients, small on a CPU or bare on a GPU.

At a few tokens the products take less time than the steps between them, and the operator takes all of them in
C++; on a GPU it goes to the same kernels as we do. Of what it is known to get wrong nothing is let through:
rows that see nothing, odd numbers of heads, odd widths of heads in half precision. It takes the weight of
`out_proj` and does not call it, so it is used only where nobody could notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..packing import OUT_PROJ, is_untouched, parameters_of, unseen
from .answering import FEW

if TYPE_CHECKING:
    from .module import MultiheadAttention

__all__ = ["leaves_some", "native"]


def native(
    module: MultiheadAttention, x: Tensor, key_padding_mask: Tensor | None, need_weights: bool, average: bool
) -> tuple[Tensor, Tensor | None] | None:
    """(output, weights) of self-attention; None: not a call for the operator."""
    held: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    if not held["batch_first"] or not held["_qkv_same_embed_dim"] or held["add_zero_attn"]:
        return None
    if x.dim() != 3 or held["num_heads"] % 2 or (held["training"] and held["dropout"]):
        return None
    N, L, E = x.shape
    if E != held["embed_dim"] or not x.numel() or not unseen(x):
        return None
    if not torch.backends.mha.get_fastpath_enabled():
        return None
    if x.is_cpu:
        if N * L * L * held["num_heads"] > FEW:
            return None
    elif not x.is_cuda or need_weights or key_padding_mask is not None or held["head_dim"] % 8:
        return None
    out_proj = held["_modules"]["out_proj"]
    if module.bias_k is not None or module.bias_v is not None or not is_untouched(out_proj, OUT_PROJ):
        return None
    mine = parameters_of(module, "in_proj_weight", "in_proj_bias")
    theirs = parameters_of(out_proj, "weight", "bias")
    if mine is None or theirs is None:
        return None
    tensors: Any = (x, *mine, *theirs)
    if any(t is None or t.dtype is not x.dtype or t.device != x.device for t in tensors):
        return None
    if tuple(theirs[0].shape) != (E, E):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    if key_padding_mask is not None and not leaves_some(key_padding_mask, N, L):
        return None
    rest: Any = key_padding_mask, need_weights, average, None if key_padding_mask is None else 1
    found: tuple[Tensor, Tensor | None] = torch._native_multi_head_attention(
        x, x, x, E, held["num_heads"], *tensors[1:], *rest
    )
    return found


def leaves_some(padding: Tensor, N: int, L: int) -> bool:
    """Whether every sequence has a key that is none."""
    if padding.dtype != torch.bool or not padding.is_cpu or tuple(padding.shape) != (N, L):
        return False
    return not bool(padding.all(1).any())
