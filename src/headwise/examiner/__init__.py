"""The examiner: whether code is multi-head attention, and which mistake it makes if not."""

from .checks import check, check_file
from .report import Named, Report

__all__ = ["Named", "Report", "check", "check_file"]
