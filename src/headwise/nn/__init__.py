"""Modules: attention with its projections, and what belongs to them."""

from .multihead import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
