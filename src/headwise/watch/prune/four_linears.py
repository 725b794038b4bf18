"""Attention of four projections, whatever they are called: what the families of Hugging Face have in common.

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ...errors import ArgumentError
from .projections import channels, check, cut_parameter, keep_inputs, keep_outputs
from .prunable import Prunable

__all__ = ["Names", "prunable"]

COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")  # H
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")  # Hk
GROUPS = ("num_key_value_groups",)  # H / Hk
WIDTHS = ("all_head_size", "inner_dim")  # H * D
OF_INPUTS = ("embed_dim", "hidden_size", "dim", "d_model")  # the model's width, often H * D as well

A_BIAS_OF_HEADS = re.compile(r"position_bias|relative\w*bias|rel_pos|alibi|slopes")


@dataclass(frozen=True)
class Names:
    """What a family calls its parts."""

    q: str
    k: str
    v: str
    out: str
    head_dim: str
    apart: tuple[str, ...] = ()  # other modules in the layer, that know no heads


def prunable(
    model: nn.Module, path: str, module: nn.Module, names: Names, out: nn.Module | None = None
) -> Prunable:
    """The layer, if it is as it seems.

    Args:
        out: the output projection where it lies outside the module.

    Raises:
        ArgumentError: something in it depends on heads in a way that is not known.
    """
    q, k, v = (getattr(module, name) for name in (names.q, names.k, names.v))
    out = getattr(module, names.out) if out is None else out
    check(model, path, ((names.q, q), (names.k, k), (names.v, v), (names.out, out)))
    D = int(getattr(module, names.head_dim))
    H, Hk = q.out_features // D, k.out_features // D
    if H * D != q.out_features or Hk * D != k.out_features or not Hk or H % Hk or v.out_features % Hk:
        raise _strange(path, module, f"{q.out_features}, {k.out_features} and {v.out_features} channels")
    Dv = v.out_features // Hk
    if out.in_features != H * Dv:
        raise _strange(path, module, f"{H} heads of {Dv} and {out.in_features} channels into {names.out}")
    _check_the_rest(model, path, module, names, H, D)

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        keep_outputs(q, channels(heads, D))
        keep_outputs(k, channels(kv_heads, D))
        keep_outputs(v, channels(kv_heads, Dv))
        keep_inputs(out, channels(heads, Dv))
        if "sinks" in module._parameters:
            cut_parameter(module, "sinks", 0, channels(heads, 1))
        _count_anew(module, (H, Hk, H * D), (len(heads), len(kv_heads), len(heads) * D))

    return Prunable(path, H, Hk, keep)


def _count_anew(module: nn.Module, old: tuple[int, int, int], new: tuple[int, int, int]) -> None:
    """Numbers of heads and the widths that follow, wherever the module remembers them."""
    for attributes, before, after in (
        (COUNTS, old[0], new[0]),
        (KV_COUNTS, old[1], new[1]),
        (GROUPS, old[0] // old[1], new[0] // new[1]),
        (WIDTHS, old[2], new[2]),
    ):
        for name in attributes:
            if getattr(module, name, None) == before:
                setattr(module, name, after)


def _check_the_rest(model: nn.Module, path: str, module: nn.Module, names: Names, H: int, D: int) -> None:
    """Other parameters and buffers, biases that come from elsewhere, and what forward counts on."""
    own = (names.q, names.k, names.v, names.out, *names.apart)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        first = name.partition(".")[0]
        of_each_head_alike = "norm" in first.lower() and tuple(value.shape) == (D,)
        of_positions = name.endswith("inv_freq")
        known = first in own or of_each_head_alike or of_positions
        if not known and (name != "sinks" or tuple(value.shape) != (H,)):
            raise _strange(path, module, f"{name} {list(value.shape)}")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if A_BIAS_OF_HEADS.search(name):
            raise _strange(path, module, f"scores to which {name} {list(value.shape)} adds")
    forward = inspect.unwrap(type(module).forward).__code__
    foreign = [
        name for name in (*COUNTS, *KV_COUNTS) if name in forward.co_names and not hasattr(module, name)
    ]
    foreign += [name for name in OF_INPUTS if name in forward.co_names and getattr(module, name, 0) == H * D]
    foreign += [name for name in OF_INPUTS if name in forward.co_varnames]  # to shape the output by
    foreign += [name for name in forward.co_names if "kv_shared" in name or "shared_kv" in name]
    if foreign:
        raise _strange(path, module, f"a forward that reads {', '.join(sorted(set(foreign)))}")


def _strange(path: str, module: nn.Module, what: str) -> ArgumentError:
    return ArgumentError(
        f"model must have attention whose heads are known to be apart: {path} ({type(module).__name__}) has "
        f"{what}; switch its heads off with headwise.ablate instead"
    )
