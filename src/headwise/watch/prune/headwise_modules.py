"""headwise's own `MultiHeadAttention`.

Letters: D head_dim, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...nn import MultiHeadAttention
from .projections import channels, check, cut_parameter, keep_inputs, keep_outputs
from .prunable import Prunable

__all__ = ["of"]


def of(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is ours."""
    module = model.get_submodule(path)
    if not isinstance(module, MultiHeadAttention):
        return None
    check(model, path, [(name, getattr(module, name)) for name in ("q_proj", "k_proj", "v_proj", "out_proj")])

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        D, Dv = module.head_dim, module.value_dim
        keep_outputs(module.q_proj, channels(heads, D))
        keep_outputs(module.k_proj, channels(kv_heads, D))
        keep_outputs(module.v_proj, channels(kv_heads, Dv))
        keep_inputs(module.out_proj, channels(heads, Dv))
        if module.sinks is not None:
            cut_parameter(module, "sinks", 0, channels(heads, 1))
        module.num_heads, module.num_kv_heads = len(heads), len(kv_heads)
        module._pack()

    return Prunable(path, module.num_heads, module.num_kv_heads, keep)
