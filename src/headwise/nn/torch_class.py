"""To and from `torch.nn.MultiheadAttention`: what both classes can be, and the weights.

Letters: E d_model (embed_dim there), H num_heads, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["arguments_of", "freeze_alike", "state_of", "torchs_twin"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def arguments_of(theirs: nn.MultiheadAttention) -> dict[str, Any]:
    """What makes a `MultiHeadAttention` of the same shape.

    Raises:
        ArgumentError: not torch's class; keys appended by add_bias_kv or add_zero_attn; another `out_proj`.
    """
    if not isinstance(theirs, nn.MultiheadAttention):
        raise ArgumentError(
            f"module must be a torch.nn.MultiheadAttention: got {type(theirs).__name__}; "
            "another class's weights go in with load_state_dict"
        )
    for name, there in (("add_bias_kv", theirs.bias_k is not None), ("add_zero_attn", theirs.add_zero_attn)):
        if there:
            raise ArgumentError(
                f"module must not append keys: it has {name}=True, for which there is no place here; "
                "keep torch's class"
            )
    last = theirs.out_proj
    if type(last).forward is not nn.Linear.forward or "forward" in last.__dict__:
        raise ArgumentError(
            f"out_proj must be linear: got {type(last).__name__} with a forward of its own, which its weight "
            "does not tell; merge it into one first"
        )
    return {
        "d_model": theirs.embed_dim, "num_heads": theirs.num_heads, "kdim": theirs.kdim, "vdim": theirs.vdim,
        "bias": theirs.in_proj_bias is not None, "out_bias": theirs.out_proj.bias is not None,
        "dropout": theirs.dropout,
    }  # fmt: skip


def state_of(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Copies of its weights under our names, as its forward sees them: pruned and parametrised ones too."""
    packed, bias = theirs.in_proj_weight, theirs.in_proj_bias
    weights = packed.chunk(3) if packed is not None else [getattr(theirs, f"{n}_weight") for n in PROJECTIONS]
    held = {f"{name}.weight": weight for name, weight in zip(PROJECTIONS, weights, strict=True)}
    if bias is not None:
        held |= {f"{name}.bias": part for name, part in zip(PROJECTIONS, bias.chunk(3), strict=True)}
    held["out_proj.weight"] = theirs.out_proj.weight
    if theirs.out_proj.bias is not None:
        held["out_proj.bias"] = theirs.out_proj.bias
    return {name: value.detach().clone() for name, value in held.items()}


def freeze_alike(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    """Let ours learn what torch's class was to learn."""
    packed = theirs.in_proj_weight
    for name in PROJECTIONS:
        layer, weight = getattr(ours, name), getattr(theirs, f"{name}_weight") if packed is None else packed
        layer.weight.requires_grad_(weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(theirs.in_proj_bias.requires_grad)
    for end, parameter in ours.out_proj.named_parameters():
        parameter.requires_grad_(getattr(theirs.out_proj, end).requires_grad)


@torch.no_grad()
def torchs_twin(ours: MultiHeadAttention, batch_first: bool) -> nn.MultiheadAttention:
    """torch's class with copies of these weights.

    Raises:
        ShapeError: sizes torch's class cannot have.
        ArgumentError: an option or a replaced projection it cannot have.
    """
    sizes = ours.sizes
    if not sizes.are_torchs:
        raise ShapeError(
            "sizes must be possible in torch's class, d_model = num_heads * head_dim and no shared keys: "
            f"{sizes.d_model} and {sizes.num_heads} * {sizes.head_dim}, num_kv_heads {sizes.num_kv_heads}, "
            f"value_dim {sizes.value_dim}; it has no place for anything else"
        )
    for name in ("causal", "window", "scale", "softcap", "sinks"):
        value = getattr(ours, name)
        if value is not None and value is not False:
            told = list(value.shape) if isinstance(value, Tensor) else value
            raise ArgumentError(
                f"{name} must be off: got {name}={told}, which torch's class does not keep; masks go into "
                "each call there, made by headwise.foreign_masks.to_torch"
            )
    layers = [getattr(ours, name) for name in (*PROJECTIONS, "out_proj")]
    for layer in layers:
        if type(layer) is not nn.Linear or "forward" in layer.__dict__:
            own = " with a forward of its own" if "forward" in layer.__dict__ else ""
            raise ArgumentError(
                f"projections must be nn.Linear: got {type(layer).__name__}{own}; merge it into one first"
            )
    weight = ours.out_proj.weight
    biased = any(layer.bias is not None for layer in layers)
    twin = nn.MultiheadAttention(
        ours.d_model, ours.num_heads, ours.dropout, biased, kdim=ours.kdim, vdim=ours.vdim,
        batch_first=batch_first, device="meta", dtype=weight.dtype,
    )  # fmt: skip
    twin.to_empty(device=weight.device)  # so that no random numbers are drawn
    _copy_weights(layers, twin)
    return twin.train(ours.training)


def _copy_weights(layers: list[nn.Linear], twin: nn.MultiheadAttention) -> None:
    *three, out = layers
    if twin.in_proj_weight is not None:
        homes = twin.in_proj_weight.split(twin.embed_dim)
        twin.in_proj_weight.requires_grad_(all(layer.weight.requires_grad for layer in three))
    else:
        homes = (twin.q_proj_weight, twin.k_proj_weight, twin.v_proj_weight)
        for home, layer in zip(homes, three, strict=True):
            home.requires_grad_(layer.weight.requires_grad)
    twin.out_proj.weight.requires_grad_(out.weight.requires_grad)
    for home, layer in zip((*homes, twin.out_proj.weight), layers, strict=True):
        home.copy_(layer.weight)
    if twin.in_proj_bias is None:
        return
    learned = [layer.bias is not None and layer.bias.requires_grad for layer in layers]
    twin.in_proj_bias.requires_grad_(all(learned[:3]))
    twin.out_proj.bias.requires_grad_(learned[3])
    biases = (*twin.in_proj_bias.split(twin.embed_dim), twin.out_proj.bias)
    for home, layer in zip(biases, layers, strict=True):
        if layer.bias is None:
            home.zero_()
        else:
            home.copy_(layer.bias)
