"""What a head writes per key: the norm of v_j W_O, were it to look at key j alone.

A head adds sum_j p_ij f(x_j) to its layer's output, with f(x_j) = (x_j W_V + b_V) W_O of its own rows of W_O;
the output projection's bias belongs to no head. Where ||f(x_j)|| is small, weight on key j does little.
Kobayashi 2020, "Attention is not only a weight", section 3.

W_O is found by what is known of a family. Where anything may stand between the heads and their projection, a
gate or a norm, the layer is refused by name. What comes after the projection, such as the norm behind the
residual sum, is no part of f, as in the paper.

Letters: B batch, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim, E the width of what is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..engines.given_weights import GivenWeights
from ..engines.scores import own_precision, tile_dtype
from ..errors import ArgumentError
from ..nn import MultiHeadAttention
from ..nn.as_torch.module import MultiheadAttention
from .active import Call
from .chosen_heads import base_of
from .model_structure import names_in
from .module_hooks import class_of
from .prunable_families import ALBERT, BART, BERT, DISTILBERT, LLAMA, PHI, is_conv1d

__all__ = ["OutputProjection", "output_projection", "written", "written_norms"]

BLOCK = 32 * 2**20  # bytes of what is written in memory at a time

# What W_O is called inside a layer. Pruning knows the first; gpt2_like; T5; ModernBERT; timm and others.
PROJECTIONS = (
    *dict.fromkeys(names.out for names in (LLAMA, BART, PHI, ALBERT, DISTILBERT)),
    *("c_proj", "o", "Wo", "proj", "projection"),
)
HOMES = ("transformers.", "timm.")  # strangers may call theirs the same, and join heads otherwise
# What makes queries, keys, values and scores, or does nothing to numbers outside of training.
BEFORE = re.compile(
    r"(q|k|v|qk|kv|qkv|query|key|value|query_key_value|c_attn|in_proj|Wq|Wk|Wv|Wqkv)(_\w+)?$"
    r"|rel(ative)?_(pos|att)\w*|rotary\w*|sinks|indexer|logit_scale|\w*drop(out)?$"
)
AFTER = {*ALBERT.apart, "LayerScale"}
GATES = {"sigmoid", "silu", "gate", "gate_proj"}  # a mention of one of these, and a head may be gated


class OutputProjection:
    """W_O, head by head, as it is now."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_heads: int) -> None:
        self.weight = weight.detach().unflatten(0, (num_heads, -1))  # [H, Dv, E]
        self.bias = None if bias is None else bias.detach()  # [E]


def output_projection(model: nn.Module, path: str, num_heads: int, value_dim: int) -> OutputProjection:
    """The projection that the heads of a layer go through as they are, one after another.

    Args:
        path: of the layer, perhaps with its visit.

    Raises:
        ArgumentError: it is not known, or something may stand between.
    """
    place = base_of(path)
    module = model.get_submodule(place)
    if isinstance(module, MultiHeadAttention):
        name, reason = "out_proj", _why_not_ours(module)
    elif class_of(module) in (nn.MultiheadAttention, MultiheadAttention):
        name, reason = "out_proj", None
    elif class_of(module).__module__.startswith(HOMES):
        name, reason = _of_family(model, place, module)
    else:
        name, reason = "", "is of no family that is known"
    if reason is None:
        home = model.get_submodule(place.rpartition(".")[0]) if name == BERT.out else module
        out = home.get_submodule(name)
        split = getattr(module, "local_heads", None) is not None
        width, reason = num_heads * value_dim, _why_not_plain(name, out, split)
        if reason is None:
            whole: Any = out.weight.full_tensor() if split else out.weight  # type: ignore[union-attr, operator]
            weight: Tensor = whole if is_conv1d(out) else whole.T
            if weight.shape[0] == width:
                bias: Any = out.bias
                if split and bias is not None:
                    bias = bias.full_tensor()
                return OutputProjection(weight, bias, num_heads)
            reason = f"has {num_heads} heads of {value_dim} and {weight.shape[0]} channels into {name}"
    raise ArgumentError(
        f"written must know what heads go through: {place or 'the model itself'} ({type(module).__name__}) "
        f"{reason}; look at its weights alone, watch(model)"
    )


def _why_not_ours(module: MultiHeadAttention) -> str | None:
    if module.gate_proj is not None:
        return f"has gate={module.gate!r}, so that what a head writes depends on the query as well"
    if type(module)._finish is not MultiHeadAttention._finish:
        return "joins its heads in a way of its own"
    return None


def _of_family(model: nn.Module, place: str, module: nn.Module) -> tuple[str, str | None]:
    """The projection's name, and what speaks against it."""
    names = [name for name in PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)]
    around = model.get_submodule(place.rpartition(".")[0]) if place else None
    if not names and isinstance(getattr(getattr(around, "output", None), "dense", None), nn.Module):
        names = [BERT.out]
    if len(names) != 1:
        return "", f"has {' and '.join(names) or 'no output projection by any name that is known'}"
    strange = [name for name in _parts(module) if name not in names and not _is_apart(module, name)]
    strange += sorted(GATES & names_in(class_of(module)))
    if strange:
        return "", f"has {', '.join(strange)}, which may stand between its heads and {names[0]}"
    return names[0], None


def _parts(module: nn.Module) -> Iterable[str]:
    return (*module._modules, *module._parameters)


def _is_apart(module: nn.Module, name: str) -> bool:
    part = getattr(module, name)
    return part is None or isinstance(part, nn.Identity) or name in AFTER or bool(BEFORE.match(name))


def _why_not_plain(name: str, out: nn.Module, split: bool = False) -> str | None:
    """What speaks against a projection being what its weight says; split: over processes, as we split it."""
    families_own = isinstance(out, nn.Linear) and type(out).__module__.startswith("transformers.models.")
    plain = type(out) in (nn.Linear, NonDynamicallyQuantizableLinear) or families_own or is_conv1d(out)
    if not plain and not split:
        return f"has {name} of {type(out).__name__}, not nn.Linear: merge or unwrap it first"
    if type(out._parameters.get("weight")) is not nn.Parameter and not split:
        return f"has {name}.weight of {type(out.weight).__name__}: take masks and quantisation off first"
    if "forward" in vars(out) and "_old_forward" not in vars(out):  # accelerate's moves weights, and no more
        return f"has {name} with a forward of its own, which may write something else: take it off first"
    hooks = len(out._forward_pre_hooks) + len(out._forward_hooks)
    if hooks:
        return (
            f"has {name} with {hooks} forward hook{'s' * (hooks > 1)}, which may change it: take it off first"
        )
    return None


def written(heads: Tensor, projection: OutputProjection) -> Tensor:
    """What each head adds to its layer's output, [B, H, T, E], of heads [B, H, T, Dv]; without the bias."""
    with torch.no_grad(), own_precision(heads.device):
        dtype = tile_dtype(heads.dtype)
        return heads.detach().to(dtype) @ projection.weight.to(heads.device, dtype)


def written_norms(model: nn.Module, call: Call) -> Tensor:
    """||v_j W_O|| of every head and key of a call, [B, H, S], in float32 at least.

    The product itself is made, in blocks of keys: v G v with G = W_O W_O^T would be less work, and may come
    out below 0 by rounding where a norm is small.

    Raises:
        ArgumentError: the values or the projection are not to be had.
    """
    if call.value is None or isinstance(call.weights.parts()[0], GivenWeights):
        raise ArgumentError(
            f"written must have values in hand: of {call.path} only the weights {list(call.weights.shape)} "
            "are heard (fallback='eager'); look at those alone, watch(model, fallback='eager')"
        )
    v = call.value.detach()
    (B, Hk, S, Dv), H = v.shape, call.num_heads
    dtype = tile_dtype(v.dtype)
    with torch.no_grad(), own_precision(v.device):
        weight = output_projection(model, call.path, H, Dv).weight.to(v.device, dtype)
        by_group = weight.unflatten(0, (Hk, -1))  # [Hk, G, Dv, E]
        norms = torch.empty(B, H, S, dtype=dtype, device=v.device)
        step = max(1, BLOCK // (B * H * weight.shape[2] * dtype.itemsize))
        for start in range(0, S, step):
            some = v[:, :, None, start : start + step].to(dtype)  # [B, Hk, 1, s, Dv]
            norms[:, :, start : start + step] = (some @ by_group).norm(dim=-1).flatten(1, 2)
    return norms
