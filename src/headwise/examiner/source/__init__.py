"""What can be said of a learner's source without running it."""

from .likely_classes import Candidate, candidates
from .lines import line_of
from .names import Undefined, undefined_names

__all__ = ["Candidate", "Undefined", "candidates", "line_of", "undefined_names"]
