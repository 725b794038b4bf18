"""The last resort: any module that calls torch's `scaled_dot_product_attention`, or a softmax of its own.

A torch-function mode sees every call made while a watched module runs. The fused function is answered by
ours, with all it was given. A softmax inside an attention layer is only looked at, and only with
fallback="eager": its result are the weights, which the model has made anyway.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...map import AttentionMap
from ...masks import Mask
from ..attachment import Attachment, Undo, announce, eager_is_wanted, is_quiet, padding_now
from ..places import DISPATCHES, names_in
from .attending import attended

__all__ = ["install"]

SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_head", "heads", "nb_heads")


def install(attachment: Attachment) -> Undo:
    """Listen to torch's functions while a module runs that none of the other adapters serves."""
    mode = _Functions(attachment)
    handles = []
    for module, path in attachment.paths.items():
        if mode.may_call(module, path):
            handles.append(module.register_forward_pre_hook(mode.enter))
            handles.append(module.register_forward_hook(mode.leave, always_call=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        mode.leave_all()

    return undo


class _Functions(TorchFunctionMode):
    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self.attachment, self.depth = attachment, 0
        self.places = set(attachment.places)

    def may_call(self, module: nn.Module, path: str) -> bool:
        """Whether this module may attend by itself: a place of attention of which no adapter knows more."""
        kind = type(module)
        if kind.__module__.startswith("torch.nn."):
            return False
        if path in self.places:
            return DISPATCHES not in names_in(kind)
        return not kind.__module__.startswith("transformers.")

    def enter(self, *_: Any) -> None:
        self.depth += 1
        if self.depth == 1:
            self.__enter__()

    def leave(self, *_: Any) -> None:
        if self.depth == 1:
            self.__exit__(None, None, None)
        self.depth = max(0, self.depth - 1)

    def leave_all(self) -> None:
        """After an exception that ran past the hooks."""
        if self.depth:
            self.depth = 1
            self.leave()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_quiet():
            return func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            found = _fused(*args, **kwargs)
            return func(*args, **kwargs) if found is None else found
        result = func(*args, **kwargs)
        if func in SOFTMAX and self.attachment.here in self.places and eager_is_wanted():
            self._look(result, args, kwargs)
        return result

    def _look(self, weights: Any, args: Any, kwargs: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        weights = _by_head(weights, dim, self._num_heads())
        if weights is None:
            return
        B, _, T, S = weights.shape
        real = padding_now("attention_mask", B, T) if T == S else None
        mask = None if real is None else Mask(queries=real)
        announce(None, "self", AttentionMap.from_weights(weights.detach(), mask), None, None)

    def _num_heads(self) -> int | None:
        here = self.attachment.here
        if here is None:
            return None
        module = self.attachment.model.get_submodule(here)
        found = (getattr(module, name, None) for name in COUNTS)
        return next((count for count in found if isinstance(count, int)), None)


def _by_head(weights: Any, dim: int | None, H: int | None) -> Tensor | None:
    """A softmax's result as [B, H, T, S]; None: it does not look like weights."""
    if not isinstance(weights, Tensor) or dim not in (-1, weights.ndim - 1):
        return None
    if weights.ndim == 4 and (H is None or weights.shape[1] == H):
        return weights
    if weights.ndim == 3 and H is not None and weights.shape[0] % H == 0:
        return weights.unflatten(0, (-1, H))  # [B * H, T, S] -> [B, H, T, S]
    return None


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """torch's fused function by ours; None: not a call for ours."""
    if query.is_nested or query.ndim < 3 or not query.numel() or not key.numel():
        return None
    lead = query.shape[:-2]
    q, k, v = (_four(x) for x in (query, key, value))
    B, H, T, S = *q.shape[:3], k.shape[2]
    mask, bias = Mask(right=T - S) if is_causal else Mask(), None
    if attn_mask is not None:
        spread = attn_mask.expand(*lead, T, S) if attn_mask.ndim > 4 else attn_mask
        spread = _four(spread) if spread.ndim > 2 else spread[None, None]
        if attn_mask.dtype == torch.bool:
            mask = mask & _rules(spread, B, T, S)
        else:
            bias = spread
    if mask.queries is None and T == S:
        mask = replace(mask, queries=padding_now("attention_mask", B, T))
    kind = "self" if T == S or is_causal else "cross"
    output, _ = attended(
        None, kind, q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p
    )
    return output.reshape(*lead, T, value.shape[-1])


def _rules(allowed: Tensor, B: int, T: int, S: int) -> Mask:
    """A bool mask; one that is the same for all heads and queries is padding."""
    if allowed.shape[1:3] == (1, 1) and allowed.shape[3] == S:
        real = allowed[:, 0, 0].expand(B, S)
        return Mask.padding(real, real if T == S else None)
    return Mask.dense(allowed)


def _four(x: Tensor) -> Tensor:
    """[..., H, T, D] with as many leading dimensions as there are, as [B, H, T, D]."""
    if x.ndim == 3:
        return x[:, None]
    return x.flatten(0, -4) if x.ndim > 4 else x
