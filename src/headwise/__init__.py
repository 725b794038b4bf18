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

import sys

from .lazy_names import lazy_attributes

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
    "attribution",
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
    "live",
    "load_heads",
    "load_pruned",
    "load_survey",
    "logit_lens",
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
if TYPE_CHECKING:
    from . import budget, errors, heads, models, nn, parallel, scoring, testing
    from .circuits.attribution import attribution
    from .circuits.lens import logit_lens
    from .corpus.result import load_survey
    from .corpus.survey import survey
    from .examiner.checks import check, check_file
    from .examiner.explanations import explain
    from .functional import attention, why
    from .heads.collection import Heads, load_heads
    from .heads.head_distances import diversity
    from .listeners.ablation import ablate, head_means
    from .listeners.capture import watch
    from .listeners.effects import effects, role_effects
    from .listeners.head_outputs import collect, patch
    from .listeners.importance import importance, robustness
    from .listeners.measured_step import Alarms
    from .listeners.monitor import Monitor, trainer_callback
    from .listeners.pruning import load_pruned, prune
    from .listeners.role_measurement import retrieval_scores, roles
    from .map import AttentionMap
    from .masks import Mask
    from .nn.as_torch.adoption import adopt, restore
    from .nn.multihead import MultiHeadAttention
    from .server.notebook_view import live

# Where each public name is defined; public names that are not here are modules.
_HOMES = {
    "Alarms": ".listeners.measured_step",
    "AttentionMap": ".map",
    "Heads": ".heads.collection",
    "Mask": ".masks",
    "Monitor": ".listeners.monitor",
    "MultiHeadAttention": ".nn.multihead",
    "ablate": ".listeners.ablation",
    "adopt": ".nn.as_torch.adoption",
    "attention": ".functional",
    "attribution": ".circuits.attribution",
    "check": ".examiner.checks",
    "check_file": ".examiner.checks",
    "collect": ".listeners.head_outputs",
    "diversity": ".heads.head_distances",
    "effects": ".listeners.effects",
    "explain": ".examiner.explanations",
    "head_means": ".listeners.ablation",
    "importance": ".listeners.importance",
    "live": ".server.notebook_view",
    "load_heads": ".heads.collection",
    "load_pruned": ".listeners.pruning",
    "load_survey": ".corpus.result",
    "logit_lens": ".circuits.lens",
    "patch": ".listeners.head_outputs",
    "prune": ".listeners.pruning",
    "restore": ".nn.as_torch.adoption",
    "retrieval_scores": ".listeners.role_measurement",
    "robustness": ".listeners.importance",
    "role_effects": ".listeners.effects",
    "roles": ".listeners.role_measurement",
    "survey": ".corpus.survey",
    "trainer_callback": ".listeners.monitor",
    "watch": ".listeners.capture",
    "why": ".functional",
}


_get, __dir__ = lazy_attributes(__name__, _HOMES)


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that `import headwise` loads no torch."""
    if name == "MultiheadAttention":
        from .nn.module_call import ONE_LETTER

        raise AttributeError(ONE_LETTER)
    return _get(name)


if sys.modules.get("torch") is not None:
    # torch.load and torch.compile know maps and operators once their modules are imported; the examiner, a
    # quarter of the time of importing all, defines none.
    for _name in __all__:
        if not _HOMES.get(_name, "").startswith(".examiner"):
            __getattr__(_name)
