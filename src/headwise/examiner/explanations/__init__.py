"""Every step of multi-head attention in someone's own numbers: one page, or text."""

from .explanation import Explanation
from .explanation_builders import explain, explain_evidence, explain_file, weights_of

__all__ = ["Explanation", "explain", "explain_evidence", "explain_file", "weights_of"]
