"""State dicts of other multi-head attentions under the names used here, while loading.

    lessons      W_q W_k W_v W_o;  q_linear k_linear v_linear out_linear
    torch        in_proj_weight in_proj_bias, or q_proj_weight k_proj_weight v_proj_weight; out_proj
    one layer    qkv, qkv_proj, Wqkv, in_proj, GPT-2's c_attn: rows for q, then k, then v
    others       query key value (BERT); q_lin .. (DistilBERT); wq .. (Llama); q_proj .. o_proj

Packed layers whose rows go head by head (GPT-NeoX's query_key_value) are not guessed at: the shapes would
fit and the numbers would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from torch import Tensor

from .sizes import Sizes

__all__ = ["to_own_names"]

State = MutableMapping[str, Tensor]

OWN = ("q_proj", "k_proj", "v_proj")
SEPARATE = (
    ("W_q", "W_k", "W_v"),
    ("w_q", "w_k", "w_v"),
    ("wq", "wk", "wv"),
    ("q_linear", "k_linear", "v_linear"),
    ("q_lin", "k_lin", "v_lin"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
PACKED = ("qkv", "qkv_proj", "Wqkv", "in_proj")
OUT = ("W_o", "w_o", "wo", "Wo", "o_proj", "out_linear", "out_lin", "to_out", "proj", "dense", "o", "fc_out")


def to_own_names(state: State, prefix: str, sizes: Sizes) -> None:
    """Rename, split and transpose what lies under `prefix`, in place; own names and strangers stay.

    What does not fit stays under its name, so that torch reports it as unexpected.
    """
    rows = [sizes.query_width, sizes.key_width, sizes.value_width]
    _turn_gpt2(state, prefix, sum(rows))
    for end in ("weight", "bias"):
        for theirs in SEPARATE:
            _rename(state, [f"{prefix}{name}.{end}" for name in theirs], prefix, end)
        _rename(state, [f"{prefix}{name}_{end}" for name in OWN], prefix, end)  # torch's, with kdim or vdim
        for name in (f"{prefix}in_proj_{end}", *(f"{prefix}{name}.{end}" for name in PACKED)):
            packed = state.get(name)
            if packed is not None and packed.shape[0] == sum(rows):
                del state[name]
                _put(state, prefix, end, packed.split(rows))
        for name in (f"{prefix}{name}.{end}" for name in OUT):
            if name in state and f"{prefix}out_proj.{end}" not in state:
                state[f"{prefix}out_proj.{end}"] = state.pop(name)


def _rename(state: State, names: list[str], prefix: str, end: str) -> None:
    if all(name in state for name in names):
        _put(state, prefix, end, [state.pop(name) for name in names])


def _put(state: State, prefix: str, end: str, values: Iterable[Tensor]) -> None:
    for name, value in zip(OWN, values, strict=True):
        state[f"{prefix}{name}.{end}"] = value


def _turn_gpt2(state: State, prefix: str, rows: int) -> None:
    """GPT-2's c_attn and c_proj as qkv and o_proj. Some keep them [in, out]: c_attn's shape tells."""
    packed = state.get(f"{prefix}c_attn.weight")
    if packed is None or packed.ndim != 2 or rows not in packed.shape:
        return
    turned = packed.shape[0] != rows
    for theirs, ours in (("c_attn", "qkv"), ("c_proj", "o_proj")):
        for end in ("weight", "bias"):
            value = state.pop(f"{prefix}{theirs}.{end}", None)
            if value is not None:
                state[f"{prefix}{ours}.{end}"] = value.T.contiguous() if turned and end == "weight" else value
