"""headwise: multi-head attention, head by head. Build it, check it, see inside it, at any length.

import headwise as hw

mha = hw.MultiHeadAttention(d_model=512, num_heads=8)
output, weights = mha(x)                               # weights: a map, computed where you look
weights[0, 3]                                          # one head, as a tensor
weights.statistics().entropy                           # every head, without the matrix

with hw.watch(model) as heads:                         # any model's heads, as it runs
    model(**inputs)
heads.table()
"""

from . import budget, errors, heads, nn, scoring, testing
from . import pytrees as _pytrees  # noqa: F401, registers what travels through torch.compile and torch.save
from .check import check  # the function takes the place of the package of that name, which stays importable
from .check.explain import explain
from .engines import operators as _operators  # noqa: F401, registers what torch.compile sees of the second pass
from .functional import attention, why
from .heads.collection import Heads
from .heads.comparing import diversity
from .heads.saving import load as load_heads
from .map import AttentionMap
from .masks import Mask
from .nn import MultiHeadAttention, adopt, restore
from .watch.ablate import ablate, head_means
from .watch.capture import watch  # likewise
from .watch.importance import importance
from .watch.monitor import Monitor
from .watch.patch import collect, patch
from .watch.prune import load_pruned, prune
from .watch.retrieval import retrieval_scores
from .watch.robustness import robustness
from .watch.trainer_callback import trainer_callback

__version__ = "0.2.0"

__all__ = [
    "AttentionMap",
    "Heads",
    "Mask",
    "Monitor",
    "MultiHeadAttention",
    "ablate",
    "adopt",
    "attention",
    "budget",
    "check",
    "collect",
    "diversity",
    "errors",
    "explain",
    "head_means",
    "heads",
    "importance",
    "load_heads",
    "load_pruned",
    "nn",
    "patch",
    "prune",
    "restore",
    "retrieval_scores",
    "robustness",
    "scoring",
    "testing",
    "trainer_callback",
    "watch",
    "why",
]


def __getattr__(name: str) -> object:
    if name == "MultiheadAttention":
        from .nn.misuse import ONE_LETTER

        raise AttributeError(ONE_LETTER)
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")
