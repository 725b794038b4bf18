"""headwise: multi-head attention, head by head. Build it, check it, see inside it, at any length.

import headwise as hw

output, weights = hw.attention(q, k, v, causal=True)   # weights: a map, computed where you look
weights[0, 3]                                          # one head, as a tensor
weights.statistics().entropy                           # every head, without the matrix
"""

from . import budget, errors, scoring
from . import pytrees as _pytrees  # noqa: F401, registers what travels through torch.compile and torch.save
from .functional import attention, why
from .map import AttentionMap
from .masks import Mask

__version__ = "0.1.0"

__all__ = ["AttentionMap", "Mask", "attention", "budget", "errors", "scoring", "why"]
