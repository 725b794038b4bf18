"""torch's own class with the same arguments, results and errors, and functions that replace it in a model."""

from .adoption import Adopted, adopt, restore
from .module import MultiheadAttention

__all__ = ["Adopted", "MultiheadAttention", "adopt", "restore"]
