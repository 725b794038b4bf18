"""The line in a `MultiHeadAttention`'s repr: the shapes on the way, and what is not as usual."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["of"]


def of(module: MultiHeadAttention) -> str:
    """For example `8 heads of 64: [B, T, 512] -> [B, 8, T, 64] -> [B, T, 512], causal`."""
    s = module.sizes
    heads = f"{s.num_heads} heads of {s.head_dim}"
    if s.num_kv_heads != s.num_heads:
        heads += f" over {s.num_kv_heads} key/value heads"
    parts = [f"{heads}: [B, T, {s.d_model}] -> [B, {s.num_heads}, T, {s.value_dim}] -> [B, T, {s.d_model}]"]
    if s.kdim != s.d_model or s.vdim != s.d_model:
        parts.append(f"keys [B, S, {s.kdim}], values [B, S, {s.vdim}]")
    if module.causal:
        parts.append("causal")
    options = {name: getattr(module, name) for name in ("window", "scale", "softcap")}
    parts += [f"{name}={value}" for name, value in options.items() if value is not None]
    if module.sinks is not None:
        parts.append("sinks")
    if module.dropout:
        parts.append(f"dropout={module.dropout}")
    return ", ".join(parts)
