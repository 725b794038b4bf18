"""Running a learner's file in a process of its own, fenced in."""

from ... import first_use as _first_use

__all__ = ["Outcome", "Unfenced", "protections_here", "run_file"]

TYPE_CHECKING = False
if TYPE_CHECKING or _first_use.is_whole(__name__):
    from .outcome import Outcome
    from .run import Unfenced, protections_here, run_file


def __getattr__(name: str) -> object:
    return _first_use.part(__name__, name, __all__)
