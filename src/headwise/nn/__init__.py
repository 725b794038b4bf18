"""Modules: attention with its projections, and what belongs to them."""

from .as_torch import MultiheadAttention, adopt, restore
from .multihead import MultiHeadAttention

__all__ = ["MultiHeadAttention", "MultiheadAttention", "adopt", "restore"]
