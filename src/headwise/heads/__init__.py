"""Heads: what the numbers of a head mean. Maps or plain tensors in, numbers per head out; knows no model.

One map:
    patterns.py         how much of the weight goes where a known kind of head would put it
    measures.py         a head by itself: how evenly it looks, how far on a grid, what it copies
    head_distances.py   how much the heads of a layer differ; heads as points and in groups
    labels.py           a name for what a head does, from scores above stated thresholds
Sentences:
    grammar.py          sentences in which it is known which word belongs to which
    roles.py            which head looks from a word to that one, beside rules that need no model
    behaviours.py       what a language model should say next, as prompts and answers
    role_verdicts.py    what came of switching off the heads of a role
All that was watched:
    layer_names.py      what a layer goes by; `ByLayer`, results by layer
    head_choices.py     layers and heads as people write them: "0-2", "2.3"
    record.py           what is kept of one call
    layer.py            all calls of a layer
    collection.py       `Heads`, all layers
    model_diversity.py  how much the heads of a model differ
    text_alignment.py   which tokens of two texts are partners
    text_changes.py     which heads changed from one text to another
    heads_files.py      heads in a file
"""

from ..lazy_names import lazy_attributes

__all__ = [
    "LABELS",
    "Label",
    "attention_overlap",
    "clusters",
    "duplicate_token",
    "grid_distance",
    "induction",
    "induction_stripe",
    "jensen_shannon",
    "label",
    "layout",
    "locality",
    "one_number",
    "previous_token",
    "retrieval",
    "similarity",
    "sink",
    "sink_rate",
    "spread",
    "streaming_mass",
    "token_mass",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .head_distances import attention_overlap, clusters, jensen_shannon, layout, one_number, similarity
    from .labels import LABELS, Label, label
    from .measures import grid_distance, locality, retrieval, spread
    from .patterns import (
        duplicate_token,
        induction,
        induction_stripe,
        previous_token,
        sink,
        sink_rate,
        streaming_mass,
        token_mass,
    )

_HOMES = {
    "LABELS": ".labels",
    "Label": ".labels",
    "attention_overlap": ".head_distances",
    "clusters": ".head_distances",
    "duplicate_token": ".patterns",
    "grid_distance": ".measures",
    "induction": ".patterns",
    "induction_stripe": ".patterns",
    "jensen_shannon": ".head_distances",
    "label": ".labels",
    "layout": ".head_distances",
    "locality": ".measures",
    "one_number": ".head_distances",
    "previous_token": ".patterns",
    "retrieval": ".measures",
    "similarity": ".head_distances",
    "sink": ".patterns",
    "sink_rate": ".patterns",
    "spread": ".measures",
    "streaming_mass": ".patterns",
    "token_mass": ".patterns",
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
