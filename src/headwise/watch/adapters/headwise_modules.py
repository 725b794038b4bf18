"""headwise's own `MultiHeadAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...map import AttentionMap
from ...nn import MultiHeadAttention
from ..attachment import Attachment
from ..holding import Undo
from ..now import announce
from .overriding import override

__all__ = ["install"]


def install(attachment: Attachment) -> Undo:
    """Let every module of ours tell of its calls."""
    return override(
        (module for module in attachment.paths if isinstance(module, MultiHeadAttention)), forward
    )


def forward(
    module: MultiHeadAttention,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    mask: Any = None,
    *,
    bias: Any = None,
    need_weights: bool = True,
    **wrong: Any,
) -> tuple[Tensor, AttentionMap | None]:
    """As `MultiHeadAttention.forward`, with the heads' output announced on its way."""
    if wrong:
        return type(module).forward(module, query, key, value, mask, bias=bias, **wrong)
    heads, weights, v = module._attend(query, key, value, mask, bias)
    kind = "self" if key is None or key is query else "cross"
    heard = announce(module, kind, weights, v, heads)
    assert heard is not None
    output: Tensor = module.out_proj(heard.transpose(1, 2).flatten(2))  # [B, T, H * Dv] -> [B, T, E]
    return output, weights if need_weights else None
