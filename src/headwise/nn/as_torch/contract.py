"""What is kept of torch's class to the letter: its refusals, and itself on the same parts.

What it refuses is refused with its own exceptions, in its own order and words. The checks come in two parts,
because between them torch projects, and a product of wrong sizes raises there. torch's own classes, on the
parameters of ours, are for `torch.jit.script` and for tensors that are not ours.

Letters: N batch, L query_len, S key_len, E embed_dim, H num_heads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .torch_projections import TorchCall

__all__ = ["changing_nothing", "check_inputs", "check_kinds", "check_masks", "check_widths", "scriptable"]

Kind = TypeVar("Kind", bound=nn.Module)


def check_inputs(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """All that is refused before anything is computed."""
    if key_padding_mask is not None or attn_mask is not None:
        check_kinds({"key_padding_mask": key_padding_mask, "attn_mask": attn_mask})
    _check_dimensions(query, key, value, key_padding_mask, attn_mask, module.num_heads)
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "Need attn_mask if specifying the is_causal hint. You may use the Transformer module method "
            "`generate_square_subsequent_mask` to create this mask."
        )
    if query.shape[-1] != module.embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {module.embed_dim}, but got {query.shape[-1]}"
        )
    if module.embed_dim % module.num_heads:
        raise AssertionError(f"embed_dim {module.embed_dim} not divisible by num_heads {module.num_heads}")
    if key is not value:
        _check_sizes(module, key, value)


def check_kinds(masks: dict[str, Tensor | None]) -> None:
    """Bool or floating, and better both of one kind; the padding mask comes first."""
    (_, padding), (other_name, other) = masks.items()
    for name, mask in masks.items():
        if mask is None:
            continue
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise AssertionError(f"only bool and floating types of {name} are supported")
        if mask is padding and other is not None and mask.dtype != other.dtype:
            warnings.warn(
                f"Support for mismatched {name} and {other_name} is deprecated. "
                "Use same type for both instead.",
                stacklevel=5,
            )


def _check_dimensions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
) -> None:
    dims = query.dim()
    if dims not in (2, 3):
        raise AssertionError(
            f"query should be unbatched 2D or batched 3D tensor but received {dims}-D query tensor"
        )
    which = "For batched (3-D) `query`" if dims == 3 else "For unbatched (2-D) `query`"
    if key.dim() != dims or value.dim() != dims:
        raise AssertionError(
            f"{which}, expected `key` and `value` to be {dims}-D"
            f" but found {key.dim()}-D and {value.dim()}-D tensors respectively"
        )
    if key_padding_mask is not None and key_padding_mask.dim() != dims - 1:
        raise AssertionError(
            f"{which}, expected `key_padding_mask` to be `None` or {dims - 1}-D"
            f" but found {key_padding_mask.dim()}-D tensor instead"
        )
    if attn_mask is None:
        return
    if attn_mask.dim() not in (2, 3):
        raise AssertionError(
            f"{which}, expected `attn_mask` to be `None`, 2-D or 3-D"
            f" but found {attn_mask.dim()}-D tensor instead"
        )
    expected = (num_heads, query.shape[0], key.shape[0])
    if dims == 2 and attn_mask.dim() == 3 and tuple(attn_mask.shape) != expected:
        raise AssertionError(f"Expected `attn_mask` shape to be {expected} but got {attn_mask.shape}")


def _check_sizes(module: nn.MultiheadAttention, key: Tensor, value: Tensor) -> None:
    """Whether keys and values belong together; sizes are told with the length first."""
    if module._qkv_same_embed_dim:
        if key.shape != value.shape:
            key_shape, value_shape = (_length_first(module, x) for x in (key, value))
            raise AssertionError(f"key shape {key_shape} does not match value shape {value_shape}")
    elif key.shape[:-1] != value.shape[:-1]:
        key_dims, value_dims = (_length_first(module, x)[:2] for x in (key, value))
        raise AssertionError(f"key's sequence and batch dims {key_dims} do not match value's {value_dims}")


def _length_first(module: nn.MultiheadAttention, x: Tensor) -> torch.Size:
    if x.dim() == 2:
        x = x.unsqueeze(1)
    elif module.batch_first:
        x = x.transpose(0, 1)
    return x.shape


def check_widths(inputs: Sequence[Tensor], weights: Sequence[Tensor | None], bias: Tensor | None) -> None:
    """Inputs of different widths and the weights they meet."""
    for letter, weight in zip("qkv", weights, strict=True):
        if weight is None:
            raise AssertionError(f"use_separate_proj_weight is True but {letter}_proj_weight is None")
    E, names = inputs[0].shape[-1], ("query", "key", "value")
    for name, x, weight in zip(names, inputs, weights, strict=True):
        assert weight is not None
        if tuple(weight.shape) != (E, x.shape[-1]):
            raise AssertionError(
                f"expecting {name} weights shape of {(E, x.shape[-1])}, but got {weight.shape}"
            )
    for name, part in zip(names, () if bias is None else bias.chunk(3), strict=False):
        if tuple(part.shape) != (E,):
            raise AssertionError(f"expecting {name} bias shape of {(E,)}, but got {part.shape}")


def check_masks(call: TorchCall, q: Sequence[int], k: Sequence[int]) -> int:
    """What is refused once q [N, H, L, D] and k [N, H, S, D] are there; how many keys the module appends.

    Args:
        q, k: their shapes.
    """
    module, padding, attn_mask = call.module, call.key_padding_mask, call.attn_mask
    (N, H, _, D), S = q, k[2]
    if attn_mask is not None and not call.mask_fits():
        raise RuntimeError(
            f"The shape of the {attn_mask.dim()}D attn_mask is {attn_mask.shape}, "
            f"but should be {call.mask_shape()}."
        )
    for here, other in (("bias_k", "bias_v"), ("bias_v", "bias_k")):
        if getattr(module, here) is not None and getattr(module, other) is None:
            raise AssertionError(f"{here} is set but {other} is None")
    if k[0] != N:  # what torch's view says of it
        raise RuntimeError(f"shape '[{S}, {N * H}, {D}]' is invalid for input of size {math.prod(k)}")
    appended = (module.bias_k is not None) + bool(module.add_zero_attn)
    if padding is not None:
        rows, columns = padding.shape
        if rows != N:
            raise AssertionError(f"Expected key_padded_mask.shape[0] to be {N}, but got {rows}")
        if columns != S:
            raise AssertionError(
                f"Expected key_padded_mask.shape[1] to be {S + appended}, but got {columns + appended}"
            )
    return appended


def scriptable(module: nn.Module, kind: type[Kind]) -> Kind:
    """torch's own class on the same parts, with its own list of them: scripting replaces children."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


def changing_nothing(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """The same attention with an `out_proj` that gives back what it gets, for torch's forward to look at."""
    like = module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight
    weight = torch.eye(module.embed_dim, dtype=like.dtype, device=like.device)
    last = SimpleNamespace(weight=weight, bias=torch.zeros_like(weight[0]))
    twin = object.__new__(type(module))  # its very class: if parametrised, it reads its weights there
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {**module._modules, "out_proj": last}
    return twin
