"""Modules: attention with its projections, and what belongs to them."""

from . import misuse
from .multihead import MultiHeadAttention

__all__ = ["MultiHeadAttention"]


def __getattr__(name: str) -> object:
    if name == "MultiheadAttention":
        raise AttributeError(misuse.ONE_LETTER)
    raise AttributeError(f"module 'headwise.nn' has no attribute {name!r}")
