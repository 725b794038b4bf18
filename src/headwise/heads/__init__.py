"""Heads: what the numbers of a head mean. Maps or plain tensors in, numbers per head out; knows no model.

One map:
    measures.py         a head by itself: how much it looks as a known kind of head does, how evenly, how near
    head_distances.py   how much heads differ, of a layer and of a model; heads as points and in groups
Sentences:
    grammar.py          sentences in which it is known which word belongs to which
    roles.py            which head looks from a word to that one, beside rules that need no model
    behaviours.py       what a language model should say next, and what came of switching off a role's heads
All that was watched:
    layer_names.py      what layers and heads go by; `ByLayer`, results by layer
    record.py           what is kept of one call
    together.py         the short calls of one forward, measured as the heads of one map
    layer.py            all calls of a layer; labels, names for what heads do, from scores above thresholds
    collection.py       `Heads`, all layers
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
