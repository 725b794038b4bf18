"""The examiner: whether code is multi-head attention, and which mistake it makes if not."""

from .. import first_use as _first_use

__all__ = ["Named", "Report", "check", "check_file", "check_files"]

TYPE_CHECKING = False
if TYPE_CHECKING or _first_use.is_whole(__name__):
    from .checks import check, check_file
    from .desk.submissions import check_files
    from .report import Named, Report


def __getattr__(name: str) -> object:
    return _first_use.part(__name__, name, __all__)
