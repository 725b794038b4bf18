"""Heads: what the numbers of a head mean. Maps or plain tensors in, a number a head out; knows no model.

One map:
    patterns.py    how much of the weight goes where a known kind of head would put it
    evenness.py    a head against one that weighs all it sees alike
    patches.py     how far a head of a vision Transformer looks
    needle.py      how much of a passage a head copies out of a long context
    diversity.py   how much the heads of a layer differ
    layout.py      heads as points and in groups
    labels.py      a name for what a head does, from scores above stated thresholds
    queries.py     what these ask of a map: which queries count, which keys are real
All that was watched:
    naming.py      what a layer goes by
    record.py      what is kept of one call
    layer.py       all calls of a layer
    collection.py  `Heads`, all layers
    comparing.py   how much the heads of a model differ
    saving.py      heads in a file
    fetching.py    numbers to main memory, all at once
    packing.py     a map as named tensors and numbers, for a file
"""

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
