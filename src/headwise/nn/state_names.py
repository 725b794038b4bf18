"""State dicts of other multi-head attentions under the names used here, while loading.

    lessons      W_q W_k W_v W_o;  q_linear k_linear v_linear out_linear
    torch        in_proj_weight in_proj_bias, or q_proj_weight k_proj_weight v_proj_weight; out_proj
    one layer    qkv, Wqkv, in_proj, GPT-2's c_attn: rows for q, then k, then v
    others       query key value, self.query .. output.dense (BERT); q_lin .. (DistilBERT); wq .. (Llama);
                 q_proj .. o_proj; to_q .. to_out

Packed layers whose rows go otherwise (GPT-NeoX's query_key_value, head by head; CodeGen's qkv_proj) are not
guessed at: the shapes would fit and the numbers would be wrong.
"""

from __future__ import annotations

from collections.abc import Container, MutableMapping, Sequence

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
    ("self.query", "self.key", "self.value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
PACKED = ("qkv", "Wqkv", "in_proj")
OUT = (
    "W_o", "w_o", "wo", "Wo", "o_proj", "out_linear", "out_lin", "to_out", "to_out.0", "proj", "dense",
    "output.dense", "o", "fc_out",
)  # fmt: skip


def to_own_names(
    state: State, prefix: str, sizes: Sizes, children: Container[str] = (), *, copy: bool = False
) -> None:
    """Rename, split and transpose what lies under `prefix`, in place; strangers stay.

    Nothing is renamed beside own names that are there already, nor a name that a child of the module has.
    What does not fit stays under its name, so that torch reports it as unexpected.

    Args:
        copy: whether the parts of a packed weight get memory of their own.
    """
    rows = [sizes.query_width, sizes.key_width, sizes.value_width]
    _turn_gpt2(state, prefix, sum(rows))
    for end in ("weight", "bias"):
        if not any(f"{prefix}{name}.{end}" in state for name in OWN):
            parts = _take_out(state, prefix, end, rows, children)
            for name, value in zip(OWN, parts, strict=False):
                state[f"{prefix}{name}.{end}"] = value.clone() if copy else value
        for name in OUT:
            found = f"{prefix}{name}.{end}"
            if found in state and f"{prefix}out_proj.{end}" not in state and _top(name) not in children:
                state[f"{prefix}out_proj.{end}"] = state.pop(found)


def _take_out(
    state: State, prefix: str, end: str, rows: list[int], children: Container[str]
) -> Sequence[Tensor]:
    """The weights or biases of q, k and v under the first naming that is there; none if none is."""
    separate = [
        [f"{prefix}{name}.{end}" for name in names] for names in SEPARATE if _top(names[0]) not in children
    ]
    separate.append([f"{prefix}{name}_{end}" for name in OWN])  # torch's, with kdim or vdim
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
