"""The examiner: whether code is multi-head attention, and which mistake it makes if not."""

from importlib import import_module

__all__ = ["Named", "Report", "check", "check_file", "check_files"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checks import check, check_file
    from .desk.submissions import check_files
    from .report import Named, Report

_HOMES = {
    "Named": ".report",
    "Report": ".report",
    "check": ".checks",
    "check_file": ".checks",
    "check_files": ".desk.submissions",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for (PEP 562): torch is imported while the sandbox starts."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
