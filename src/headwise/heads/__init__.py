"""Heads: measures of attention heads, from maps or plain tensors, without a model.

One map:
    measures.py         one head: similarity to known kinds of heads, evenness, distance
    head_distances.py   how much the heads of a layer and of a model differ; heads as points and in groups
Sentences:
    grammar.py          sentences with known relations between words
    roles.py            which head attends from a word to a related word, compared with simple rules
    behaviours.py       what a language model should predict, and the effects of switching off a role's heads
Watched models:
    layer_names.py      names of layers and heads; `ByLayer`, results by layer
    record.py           the record of one call
    joint_measurement.py the short calls of one forward, measured together as one map
    layer.py            all calls of a layer; labels of heads, from scores above thresholds
    collection.py       `Heads`, all layers
    text_changes.py     which heads changed from one text to another
    heads_files.py      files of heads
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
    from .layer import LABELS, Label, label
    from .measures import (
        duplicate_token,
        grid_distance,
        induction,
        induction_stripe,
        locality,
        previous_token,
        retrieval,
        sink,
        sink_rate,
        spread,
        streaming_mass,
        token_mass,
    )

_DISTANCES = ("attention_overlap", "clusters", "jensen_shannon", "layout", "one_number", "similarity")
_HOMES = dict.fromkeys(__all__, ".measures")
_HOMES |= dict.fromkeys(_DISTANCES, ".head_distances")
_HOMES |= dict.fromkeys(("LABELS", "Label", "label"), ".layer")

__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
