"""Weights of other classes: torch's `MultiheadAttention`, both ways, and state dicts under other names.

While a state dict is loaded, what lies under the names of other multi-head attentions goes under ours:

    lessons      W_q W_k W_v W_o;  q_linear k_linear v_linear out_linear
    torch        in_proj_weight in_proj_bias, or q_proj_weight k_proj_weight v_proj_weight; out_proj
    one layer    qkv (timm), Wqkv (MPT, ModernBERT), in_proj, GPT-2's c_attn [in, out]: q, then k, then v
    others       query key value, self.query .. output.dense (BERT); q_lin .. (DistilBERT); wq .. (Llama);
                 q_proj .. o_proj; to_q .. to_out
    T5's bias    relative_attention_bias

A state dict has names and shapes, no more. Rows of a packed layer are taken for all of q, then k, then v only
where these leave no other reading: with the rows head by head (q, k, v of the first head, of the second, ..)
every shape would fit and every number be wrong. Refused, with what to do about it, are

    c_attn [out, in] with a bias    in order in nanoGPT, head by head in GPT-BigCode without multi-query
    in_proj beside q_bias, v_bias   head by head in DeBERTa
    query_key_value                 head by head in GPT-NeoX and BLOOM, by groups in Falcon, in order in GLM
    qkv_proj wqkv W_pack att_proj   in order in Phi-3, by groups in InternLM2, in four parts in CodeGen

Letters: E d_model (embed_dim there), H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError
from .options import in_use
from .presets import Sizes

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention


# torch's class


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def arguments_of(theirs: nn.MultiheadAttention) -> dict[str, Any]:
    """Return the arguments of a `MultiHeadAttention` of the same shape.

    Raises:
        ArgumentError: not torch's class; keys appended by add_bias_kv or add_zero_attn; another `out_proj`.
    """
    if not isinstance(theirs, nn.MultiheadAttention):
        raise ArgumentError(
            f"module must be a torch.nn.MultiheadAttention: got {type(theirs).__name__}; "
            "for weights of other classes use load_state_dict"
        )
    for name, present in (
        ("add_bias_kv", theirs.bias_k is not None),
        ("add_zero_attn", theirs.add_zero_attn),
    ):
        if present:
            raise ArgumentError(
                f"module must not append keys: got {name}=True, which MultiHeadAttention lacks; "
                "keep torch's class"
            )
    last = theirs.out_proj
    if type(last).forward is not nn.Linear.forward or "forward" in last.__dict__:
        raise ArgumentError(
            f"out_proj must be a plain nn.Linear: got {type(last).__name__} with a forward of its own; merge "
            "its changes into an nn.Linear first"
        )
    return {
        "d_model": theirs.embed_dim, "num_heads": theirs.num_heads, "kdim": theirs.kdim, "vdim": theirs.vdim,
        "bias": theirs.in_proj_bias is not None, "out_bias": theirs.out_proj.bias is not None,
        "dropout": theirs.dropout,
    }  # fmt: skip


def state_of(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Return copies of its weights under our names, as its forward uses them (pruned, parametrised)."""
    packed, bias = theirs.in_proj_weight, theirs.in_proj_bias
    weights = packed.chunk(3) if packed is not None else [getattr(theirs, f"{n}_weight") for n in PROJECTIONS]
    state = {f"{name}.weight": weight for name, weight in zip(PROJECTIONS, weights, strict=True)}
    if bias is not None:
        state |= {f"{name}.bias": part for name, part in zip(PROJECTIONS, bias.chunk(3), strict=True)}
    state["out_proj.weight"] = theirs.out_proj.weight
    if theirs.out_proj.bias is not None:
        state["out_proj.bias"] = theirs.out_proj.bias
    return {name: value.detach().clone() for name, value in state.items()}


def freeze_alike(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    """Copy `requires_grad` of torch's parameters to ours."""
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
    """Return torch's class with copies of these weights.

    Raises:
        ShapeError: sizes torch's class cannot have.
        ArgumentError: an option or a replaced projection it cannot have.
    """
    sizes = ours.sizes
    if not sizes.are_torchs:
        raise ShapeError(
            "sizes must be possible in torch's class, d_model = num_heads * head_dim and no shared keys: "
            f"{sizes.d_model} and {sizes.num_heads} * {sizes.head_dim}, num_kv_heads {sizes.num_kv_heads}, "
            f"value_dim {sizes.value_dim}; keep headwise's class"
        )
    for name in ("causal", "window", "scale", "softcap", "sinks"):
        value = getattr(ours, name)
        if value is not None and value is not False:
            shown = list(value.shape) if isinstance(value, Tensor) else value
            raise ArgumentError(
                f"{name} must be off: got {name}={shown}, which torch's class does not have; pass masks in "
                "each call there, made by headwise.foreign_masks.to_torch"
            )
    for name, shown in in_use(ours).items():
        raise ArgumentError(f"{name} must be off: got {shown}, which torch's class lacks; keep headwise's")
    layers = [getattr(ours, name) for name in (*PROJECTIONS, "out_proj")]
    for layer in layers:
        if type(layer) is not nn.Linear or "forward" in layer.__dict__:
            suffix = " with a forward of its own" if "forward" in layer.__dict__ else ""
            raise ArgumentError(
                f"projections must be nn.Linear: got {type(layer).__name__}{suffix}; merge it into one first"
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
    """Copy weights and biases, and whether they learn; a missing bias is 0, a packed one learns if all do."""
    *three, out = layers
    sources: dict[str, list[Tensor | None]] = {
        "in_proj_weight": [layer.weight for layer in three],
        "in_proj_bias": [layer.bias for layer in three],
        "out_proj.weight": [out.weight],
        "out_proj.bias": [out.bias],
    }
    for name, layer in zip(PROJECTIONS, three, strict=True):
        sources[f"{name}_weight"] = [layer.weight]
    for name, target in twin.named_parameters():
        parts = sources[name]
        target.copy_(torch.cat([target.new_zeros(twin.embed_dim) if p is None else p for p in parts]))
        target.requires_grad_(all(p is not None and p.requires_grad for p in parts))


# State dicts under other names


State = MutableMapping[str, Tensor]

SEPARATE = (
    ("W_q", "W_k", "W_v"),
    ("w_q", "w_k", "w_v"),
    ("wq", "wk", "wv"),
    ("q_linear", "k_linear", "v_linear"),
    ("q_lin", "k_lin", "v_lin"),
    ("query", "key", "value"),
    ("self.query", "self.key", "self.value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
PACKED = ("qkv", "Wqkv", "in_proj")
UNDECIDED = ("query_key_value", "qkv_proj", "wqkv", "W_pack", "att_proj")
OUT = (
    "W_o", "w_o", "wo", "Wo", "o_proj", "out_linear", "out_lin", "to_out", "to_out.0", "proj", "dense",
    "output.dense", "o", "fc_out",
)  # fmt: skip


def to_own_names(
    state: State, prefix: str, sizes: Sizes, children: Collection[str] = (), *, copy: bool = False
) -> list[str]:
    """Rename, split and transpose the tensors under `prefix`, in place; unknown names stay.

    Nothing is renamed if our own name is there already, nor is a name that a child of the module has. What
    does not fit keeps its name, so that torch reports it as unexpected.

    Args:
        copy: give each part of a packed weight its own memory.

    Returns:
        For each packed layer whose order of rows is not known, what to do about it.
    """
    rows = [sizes.query_width, sizes.key_width, sizes.value_width]
    refused = [
        name
        for name in (*UNDECIDED, "c_attn", "in_proj")
        if name not in children and not _is_decided(state, prefix, name, sizes, sum(rows))
    ]
    if "c_attn" not in refused:
        _turn_gpt2(state, prefix, sum(rows))
    for end in ("weight", "bias"):
        if not any(f"{prefix}{name}.{end}" in state for name in PROJECTIONS):
            parts = _take_out(state, prefix, end, rows, {*refused}.union(children))
            for name, value in zip(PROJECTIONS, parts, strict=False):
                state[f"{prefix}{name}.{end}"] = value.clone() if copy else value
        for name in OUT:
            theirs, ours = f"{prefix}{name}.{end}", f"{prefix}out_proj.{end}"
            if theirs in state and ours not in state and _top(name) not in children:
                state[ours] = state.pop(theirs)
    theirs, ours = f"{prefix}relative_attention_bias.weight", f"{prefix}relative_bias.weight"
    if "relative_bias" in children and theirs in state and ours not in state:
        state[ours] = state.pop(theirs)
    if f"{prefix}{PROJECTIONS[0]}.weight" in state:
        return []  # there was another
    return [_what_to_do(state, prefix, name, sizes) for name in refused]


def _is_decided(state: State, prefix: str, name: str, sizes: Sizes, rows: int) -> bool:
    """Return True unless a packed layer of this name fits whose rows may not be q's, then k's, then v's."""
    weight = state.get(f"{prefix}{name}.weight")
    if weight is None or weight.ndim != 2 or rows not in weight.shape:
        return True  # there is no such layer, or it does not fit
    if name == "c_attn":
        if weight.shape[0] != rows:
            return True  # GPT-2's own, [in, out]
        square = weight.shape[1] == rows  # then it may be either
        return not square and (sizes.num_kv_heads == 1 or f"{prefix}c_attn.bias" not in state)
    return name == "in_proj" and not any(f"{prefix}{x}_bias" in state for x in "qv")


def _what_to_do(state: State, prefix: str, name: str, sizes: Sizes) -> str:
    shape, D = list(state[f"{prefix}{name}.weight"].shape), sizes.head_dim
    parts = [D * sizes.num_heads // sizes.num_kv_heads, D, sizes.value_dim]
    return (
        f"{prefix}{name}.weight must be known to hold all of q, then k, then v: {shape} may as well be q, k "
        "and v head by head, names and shapes do not tell; name it in_proj_weight if its model's code has "
        "them in order, or, if head by head, torch.cat([x.flatten(0, 1) for x in "
        f"weight.unflatten(0, ({sizes.num_kv_heads}, -1)).split({parts}, 1)]); its bias likewise, and the "
        "last projection is out_proj"
    )


def _take_out(
    state: State, prefix: str, end: str, rows: list[int], children: Collection[str]
) -> Sequence[Tensor]:
    """Remove and return the weights or biases of q, k and v under the first naming found; () if none is."""
    separate = [
        [f"{prefix}{name}.{end}" for name in names] for names in SEPARATE if _top(names[0]) not in children
    ]
    separate.append([f"{prefix}{name}_{end}" for name in PROJECTIONS])  # torch's, with kdim or vdim
    for names in separate:
        if all(name in state for name in names):
            return [state.pop(name) for name in names]
    packed = [f"{prefix}{name}.{end}" for name in PACKED if _top(name) not in children]
    for name in (f"{prefix}in_proj_{end}", *packed):
        if name in state and state[name].shape[0] == sum(rows):
            return state.pop(name).split(rows)
    return ()


def _top(name: str) -> str:
    return name.partition(".")[0]


def _turn_gpt2(state: State, prefix: str, rows: int) -> None:
    """Rename GPT-2's c_attn and c_proj to qkv and o_proj, transposed if c_attn's shape is [in, out]."""
    packed = state.get(f"{prefix}c_attn.weight")
    if packed is None or packed.ndim != 2 or rows not in packed.shape:
        return
    turned = packed.shape[0] != rows
    for theirs, ours in (("c_attn", "qkv"), ("c_proj", "o_proj")):
        for end in ("weight", "bias"):
            value = state.pop(f"{prefix}{theirs}.{end}", None)
            if value is not None:
                state[f"{prefix}{ours}.{end}"] = value.T.contiguous() if turned and end == "weight" else value
