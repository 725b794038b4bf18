"""Modules by the paths they had in headwise 0.1: for this version, what is asked of one comes with a warning.

They matter to whatever was pickled whole (`torch.save(model)`) and names its classes by their modules.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType

__all__ = ["MOVED", "Moved"]

# room: old and new name in pairs; with a dot, the new one is in another room
TABLE = {
    "engines": """attend first_pass, churn kernels, entropy second_pass, flat gradients,
        given given_weights, huge_pages scores, parts fused, rounding walk,
        table backends""",
    "heads": """comparing model_diversity, diversity head_distances, evenness measures,
        fetching record, layout head_distances, naming layer_names, needle measures,
        packing heads_files, patches measures, queries measures, saving heads_files""",
    "models": "reading pretrained",
    "nn": """call module_call, describe dimensions, express module_call, initial dimensions,
        misuse module_call, packing packed_weights, sizes dimensions, state_names torch_conversion,
        torch_class torch_conversion""",
    "nn.as_torch": """adopt adoption, answering answers, in_one_step torch_projections, native answers,
        projecting torch_projections, ragged torch_masks, reading torch_masks, rules torch_masks,
        scripting contract, transformer encoder""",
    "show": """files heatmaps, heads_table heads_tables, labels tables, layers_table heads_tables,
        legend heads_tables, table tables""",
    "watch": """ablate ablation, attachment attachment, batches models.batches, calls active, capture capture,
        chosen_heads chosen_heads, holding shared_patches, importance importance,
        listening head_outputs, measuring monitor, monitor monitor, now active, patch head_outputs,
        places model_structure, progress models.batches, prune pruning, retrieval retrieval,
        robustness robustness, structure model_structure, switches ablation, tokens capture,
        trainer_callback trainer_callback""",
    "check": """check checks, diagnose diagnose, evidence evidence, faults faults, judging judging,
        recipe recipe, report report""",
}
ROOMS = {"watch": "listeners", "check": "examiner"}
MOVED = {
    f"headwise.{room}.{old}": f"headwise.{new if '.' in new else f'{ROOMS.get(room, room)}.{new}'}"
    for room, pairs in TABLE.items()
    for old, new in (pair.split() for pair in pairs.split(","))
}


class Moved(ModuleType):
    """A module under its old path."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        new = MOVED[self.__name__]
        value = getattr(import_module(new), name)
        warnings.warn(f"{self.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        return value


for _old in MOVED:
    sys.modules.setdefault(_old, Moved(_old))
