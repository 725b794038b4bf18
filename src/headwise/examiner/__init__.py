"""The examiner: whether code is multi-head attention, and which mistake it makes if not."""

from ..lazy_names import lazy_attributes

__all__ = ["Named", "Report", "check", "check_file", "check_files"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checks import check, check_file
    from .marking.submissions import check_files
    from .report import Named, Report

_HOMES = {
    "Named": ".report",
    "Report": ".report",
    "check": ".checks",
    "check_file": ".checks",
    "check_files": ".marking.submissions",
}


__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
