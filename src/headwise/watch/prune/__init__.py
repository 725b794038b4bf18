"""Taking heads out for good, one file a family of models."""

from .pruning import Pruned, prune
from .saving import load_pruned

__all__ = ["Pruned", "load_pruned", "prune"]
