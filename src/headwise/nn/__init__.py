"""Modules: attention with its projections, and what belongs to them."""

from .as_torch import MultiheadAttention
from .multihead import MultiHeadAttention

__all__ = ["MultiHeadAttention", "MultiheadAttention"]
