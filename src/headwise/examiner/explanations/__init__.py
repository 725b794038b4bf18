"""Every step of multi-head attention in someone's own numbers: one page, or text."""

from .composition import explain, explain_evidence
from .explanation import Explanation
from .from_file import explain_file
from .known import weights_of

__all__ = ["Explanation", "explain", "explain_evidence", "explain_file", "weights_of"]
