"""How a map travels: through torch.compile, torch.export and tree_map as the tensors inside it, and through
torch.save, after which torch.load(weights_only=True) knows these plain classes. Importing this registers it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from .engines.given_weights import GivenWeights
from .engines.scores import Scores
from .engines.second_pass import Top
from .engines.statistics import Statistics
from .map import AttentionMap, make
from .masks import BoundMask, Mask
from .scoring import Alibi, Scoring

# What a map may hold, in order; the context tells which of it is there.
OF_MASK = ("keys", "queries", "key_ids", "query_ids", "allowed")
OF_SCORING = ("bias", "slopes", "sinks")


def _plain(columns: Any) -> tuple[str, tuple[Any, ...]] | None:
    """The chosen keys as plain numbers, which can be compared and written down."""
    if columns is None:
        return None
    if isinstance(columns, slice):
        return "slice", (columns.start, columns.stop, columns.step)
    return "keys", tuple(columns.tolist())


def _flatten(w: AttentionMap) -> tuple[list[Any], Any]:
    scores, mask = w._scores, w._scores.mask
    held: dict[str, Any] = {"lse": w._lse, "positions": scores.positions}
    held |= {name: getattr(mask, name) for name in OF_MASK}
    if isinstance(scores, GivenWeights):
        held["weights"] = scores.weights
        numbers = None
    else:
        scoring = scores.scoring
        held |= {"q": scores.q, "k": scores.k} | {name: getattr(scoring, name) for name in OF_SCORING}
        numbers = (scoring.scale, scoring.softcap)
    there = {name: value for name, value in held.items() if value is not None}
    return list(there.values()), (tuple(there), numbers, (mask.left, mask.right), _plain(w._columns))


def _unflatten(values: Any, context: Any) -> AttentionMap:
    names, numbers, band, chosen = context
    held = dict(zip(names, values, strict=True))
    columns: Any = None
    if chosen is not None:
        kind, plain = chosen
        columns = slice(*plain) if kind == "slice" else torch.tensor(plain, dtype=torch.int64, device="cpu")
    mask = BoundMask(*band, *(held.get(name) for name in OF_MASK))
    positions, lse = held.get("positions"), held.get("lse")
    if numbers is None:
        return make(GivenWeights(held["weights"], mask, positions), lse, columns)
    scoring = Scoring(*numbers, *(held.get(name) for name in OF_SCORING))
    return make(Scores(held["q"], held["k"], mask, scoring, positions), lse, columns)


pytree.register_pytree_node(AttentionMap, _flatten, _unflatten, serialized_type_name="headwise.AttentionMap")
pytree.register_pytree_node(
    Statistics,
    lambda stats: (list(stats.values()), tuple(stats)),
    lambda values, names: Statistics(dict(zip(names, values, strict=True))),
    serialized_type_name="headwise.Statistics",
)
torch.serialization.add_safe_globals(
    [AttentionMap, Alibi, BoundMask, Mask, Scoring, Scores, GivenWeights, Statistics, Top, make]
)
