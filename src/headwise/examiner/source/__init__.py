"""What can be said of a learner's source without running it."""

from .likely_classes import Candidate, candidates, likeliest, line_of_name, plausible
from .lines import line_of
from .names import Undefined, undefined_names
from .notebooks import source_of
from .repairs import in_their_names

__all__ = [
    "Candidate",
    "Undefined",
    "candidates",
    "in_their_names",
    "likeliest",
    "line_of",
    "line_of_name",
    "plausible",
    "source_of",
    "undefined_names",
]
