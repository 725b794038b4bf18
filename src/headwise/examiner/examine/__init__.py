"""Running the learner's code: how it is built and called, where its weights are, what it answers."""

from .examining import examine

__all__ = ["examine"]
