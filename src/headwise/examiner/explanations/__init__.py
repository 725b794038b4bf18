"""Every step of multi-head attention in someone's own numbers: one page, or text."""

from .composition import explain, explain_evidence, explain_file, weights_of
from .explanation import Explanation

__all__ = ["Explanation", "explain", "explain_evidence", "explain_file", "weights_of"]
