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

from . import first_use as _first_use
from . import moved_modules as _moved_modules  # noqa: F401, what 0.1 pickled by its old paths

__version__ = "0.2.0"

__all__ = [
    "Alarms",
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
    "check_file",
    "collect",
    "diversity",
    "effects",
    "errors",
    "explain",
    "head_means",
    "heads",
    "importance",
    "load_heads",
    "load_pruned",
    "load_survey",
    "models",
    "nn",
    "parallel",
    "patch",
    "prune",
    "restore",
    "retrieval_scores",
    "robustness",
    "role_effects",
    "roles",
    "scoring",
    "survey",
    "testing",
    "trainer_callback",
    "watch",
    "why",
]

TYPE_CHECKING = False
if TYPE_CHECKING or _first_use.is_whole(__name__):
    from . import private_names as _private_names  # noqa: F401, says what torch lacks before anything uses it

    # isort: split
    from . import pytrees as _pytrees  # noqa: F401, registers what travels through torch.compile and torch.save
    from .engines import operators as _operators  # noqa: F401, and what torch.compile sees of the second pass

    # isort: split
    from . import budget, errors, heads, models, nn, parallel, scoring, testing
    from .corpus.result import load_survey
    from .corpus.survey import survey
    from .examiner.checks import check, check_file
    from .examiner.explanations import explain
    from .functional import attention, why
    from .heads.collection import Heads, load_heads
    from .heads.model_diversity import diversity
    from .listeners.ablation import ablate, head_means
    from .listeners.alarms import Alarms
    from .listeners.capture import watch
    from .listeners.effects import effects
    from .listeners.head_outputs import collect, patch
    from .listeners.importance import importance
    from .listeners.monitor import Monitor
    from .listeners.pruning import load_pruned, prune
    from .listeners.retrieval import retrieval_scores
    from .listeners.robustness import robustness
    from .listeners.role_effects import role_effects
    from .listeners.role_measurement import roles
    from .listeners.trainer_callback import trainer_callback
    from .map import AttentionMap
    from .masks import Mask
    from .nn import MultiHeadAttention, adopt, restore
else:  # all of that, this file again, comes with the first use
    _first_use.load_on_first_use()


def __getattr__(name: str) -> object:
    if name == "MultiheadAttention":
        from .nn.module_call import ONE_LETTER

        raise AttributeError(ONE_LETTER)
    return _first_use.part(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
