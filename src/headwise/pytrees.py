"""How a map travels: through torch.compile, torch.export and tree_map as the tensors inside it, and through
torch.save, after which torch.load(weights_only=True) knows these plain classes. Importing this registers it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from .engines.scores import GivenWeights, Scores
from .engines.second_pass import Top
from .engines.statistics import Statistics
from .map import AttentionMap, make
from .masks import Mask
from .scoring import Alibi, Scoring

_FIELDS = ("left", "right", "keys", "queries", "key_ids", "query_ids", "allowed")


def _plain(columns: Any) -> tuple[str, tuple[Any, ...]] | None:
    """The chosen keys as plain numbers, which can be compared and written down."""
    if columns is None:
        return None
    if isinstance(columns, slice):
        return "slice", (columns.start, columns.stop, columns.step)
    return "keys", tuple(columns.tolist())


def _flatten(w: AttentionMap) -> tuple[list[Any], Any]:
    scores = w._scores
    mask = [getattr(scores.mask, name) for name in _FIELDS]
    shared = [w._lse, scores.positions, *mask[2:]]
    if isinstance(scores, GivenWeights):
        return [scores.weights, *shared], (None, None, tuple(mask[:2]), _plain(w._columns))
    scoring = scores.scoring
    tensors = [scores.q, scores.k, scoring.bias, scoring.slopes, scoring.sinks]
    return [*tensors, *shared], (scoring.scale, scoring.softcap, tuple(mask[:2]), _plain(w._columns))


def _unflatten(values: Any, context: Any) -> AttentionMap:
    scale, softcap, band, columns = context
    if columns is not None and columns[0] == "keys":
        columns = torch.tensor(columns[1], dtype=torch.int64, device="cpu")
    elif columns is not None:
        columns = slice(*columns[1])
    values = list(values)
    lse, positions, *tensors = values[-7:]
    mask = Mask(*band, *tensors)
    if scale is None:
        return make(GivenWeights(values[0], mask, positions), lse, columns)
    q, k, bias, slopes, sinks = values[:5]
    return make(Scores(q, k, mask, Scoring(scale, softcap, bias, slopes, sinks), positions), lse, columns)


pytree.register_pytree_node(AttentionMap, _flatten, _unflatten, serialized_type_name="headwise.AttentionMap")
torch.serialization.add_safe_globals(
    [AttentionMap, Alibi, Mask, Scoring, Scores, GivenWeights, Statistics, Top, make]
)
