"""Heads: what the numbers of a head mean. Maps or plain tensors in, a number a head out; knows no model.

patterns.py    how much of the weight goes where a known kind of head would put it
diversity.py   how much the heads of a layer differ
layout.py      heads as points and in groups
labels.py      a name for what a head does, from scores above stated thresholds
"""

from .diversity import attention_overlap, disagreement, jensen_shannon, one_number
from .labels import LABELS, Label, label
from .layout import clusters, layout  # the function takes the place of the room, which stays importable
from .patterns import (
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

__all__ = [
    "LABELS",
    "Label",
    "attention_overlap",
    "clusters",
    "disagreement",
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
    "sink",
    "sink_rate",
    "spread",
    "streaming_mass",
    "token_mass",
]
