"""What a `MultiHeadAttention` is called with, checked; and its mask as rules.

Letters: B batch, T query_len, S key_len, E d_model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..arguments import autocasting
from ..errors import ArgumentError, ShapeError
from ..masks import Mask, as_mask
from .packing import is_untouched

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["check", "rules_of"]


def check(module: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless these are [B, T, d_model], [B, S, kdim] and [B, S, vdim], in the weights' dtype and place.

    Raises:
        ShapeError: dimensions, widths, batches or lengths that do not fit; nothing there.
        ArgumentError: not a tensor; a dtype or device other than the weights'.
    """
    _check_one(query, "query", "[B, T, d_model]", "d_model", module.d_model, module.q_proj)
    if key is query and value is query and module.kdim == module.vdim == module.d_model:
        return
    _check_one(key, "key", "[B, S, kdim]", "kdim", module.kdim, module.k_proj)
    _check_one(value, "value", "[B, S, vdim]", "vdim", module.vdim, module.v_proj)
    if query.shape[0] != key.shape[0]:
        raise ShapeError(
            f"query and key must agree in batch: {query.shape[0]} and {key.shape[0]}; inputs are batch "
            "first, transpose(0, 1) those that are not"
        )
    if key.shape[:2] != value.shape[:2]:
        raise ShapeError(
            f"key and value must agree in batch and length: {list(key.shape[:2])} and "
            f"{list(value.shape[:2])}; there is one value a key"
        )


def _check_one(x: Tensor, name: str, shape: str, width_name: str, width: int, layer: nn.Module) -> None:
    if not isinstance(x, Tensor):
        hint = "; a mask goes in mask=" if isinstance(x, Mask) else "; use torch.as_tensor"
        raise ArgumentError(f"{name} must be a tensor: got {type(x).__name__}{hint}")
    if x.ndim != 3:
        what = f"use {name}[None] for a single sequence" if x.ndim == 2 else "a mask goes in mask="
        raise ShapeError(f"{name} must have 3 dimensions {shape}: got {x.ndim}, {list(x.shape)}; {what}")
    if x.shape[2] != width:
        raise ShapeError(
            f"{name} must be {width_name} wide, {shape}: got {x.shape[2]} for {width_name}={width}, "
            f"{list(x.shape)}; give the module the width of its inputs"
        )
    if not x.numel():
        raise ShapeError(f"{name} must not be empty: got {list(x.shape)} for {shape}; skip the call")
    if torch.compiler.is_compiling() or not is_untouched(layer) or autocasting(x):
        return  # whoever changed the layer knows best what it takes
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if x.dtype != weight.dtype:
        hint = "; a mask goes in mask=" if not x.is_floating_point() else f"; use {name}.to({weight.dtype})"
        raise ArgumentError(f"{name} must have the dtype of the weights: {x.dtype} and {weight.dtype}{hint}")
    if x.device != weight.device:
        raise ArgumentError(
            f"{name} must be on the device of the weights: {x.device} and {weight.device}; "
            f"use {name}.to({str(weight.device)!r})"
        )


def rules_of(mask: Mask | Tensor, batch: int, key_len: int, itself: bool) -> Mask:
    """The mask as rules; padding among the keys of self-attention is padding among its queries.

    Raises:
        MaskError: values or dimensions that are no mask.
    """
    rules = as_mask(mask)
    allowed = rules.allowed
    same = allowed is not None and tuple(allowed.shape[1:]) == (1, 1, key_len)  # for all heads and queries
    if allowed is not None and same and allowed.shape[0] in (1, batch) and rules.keys is None:
        rules = replace(rules, allowed=None, keys=allowed[:, 0, 0].expand(batch, key_len))  # it is padding
    if itself and rules.keys is not None and rules.queries is None:
        rules = replace(rules, queries=rules.keys)
    return rules
