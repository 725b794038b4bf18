"""torch's own class, to the letter, and what puts it in its place."""

from .adoption import Adopted, adopt, restore
from .module import MultiheadAttention

__all__ = ["Adopted", "MultiheadAttention", "adopt", "restore"]
