"""Running a learner's file in a process of its own, fenced in."""

from .outcome import Outcome
from .run import protections_here, run_file

__all__ = ["Outcome", "protections_here", "run_file"]
