"""torch's own class, to the letter, and what puts it in its place."""

from .module import MultiheadAttention

__all__ = ["MultiheadAttention"]
