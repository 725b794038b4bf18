"""How a map travels: through torch.compile, torch.export and tree_map as the tensors inside it, and through
torch.save, after which torch.load(weights_only=True) knows these plain classes. Importing this registers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .engines.given_weights import GivenWeights
from .engines.scores import DIFFERENTIABLE, MASK_NUMBERS, MASK_TENSORS, Scores
from .engines.second_pass import Top
from .engines.statistics import Statistics
from .indexing import Index
from .map import AttentionMap, make
from .masks import BoundMask, Mask
from .scoring import Alibi, Relative, Scoring

# The tensors a map may hold, in order; the context tells which of them are there.
TENSORS = ("lse", "positions", *MASK_TENSORS, "weights", *DIFFERENTIABLE)

Chosen = tuple[str, Sequence[int | None]] | None  # keys as plain numbers: can be compared and written down
Context = tuple[Sequence[str], Sequence[float | None] | None, Sequence[int | None], Chosen]


def _plain(columns: Index | None) -> Chosen:
    if columns is None:
        return None
    if isinstance(columns, slice):
        return "slice", (columns.start, columns.stop, columns.step)
    return "keys", tuple(columns.tolist())


def _flatten(w: AttentionMap) -> tuple[list[Tensor], Context]:
    scores, lse, columns = w.parts()
    parts = {"lse": lse, **scores.parts()}
    there = {name: parts[name] for name in TENSORS if parts.get(name) is not None}
    numbers = None if "weights" in parts else (parts["scale"], parts["softcap"])
    rules = tuple([parts[name] for name in MASK_NUMBERS])
    return list(there.values()), (tuple(there), numbers, rules, _plain(columns))  # type: ignore[arg-type, return-value]


def _unflatten(values: Iterable[Tensor], context: Context) -> AttentionMap:
    names, numbers, rules, chosen = context
    parts: dict[str, Any] = dict(zip(names, values, strict=True))  # anything: trees of sizes, of nothing
    parts |= zip(MASK_NUMBERS, rules, strict=True)
    columns: Index | None = None
    if chosen is not None:
        kind, plain = chosen
        columns = slice(*plain) if kind == "slice" else torch.tensor(plain, dtype=torch.int64, device="cpu")
    if numbers is None:
        return make(GivenWeights.from_parts(parts), parts.get("lse"), columns)
    parts |= zip(("scale", "softcap"), numbers, strict=True)
    return make(Scores.from_parts(parts), parts.get("lse"), columns)


pytree.register_pytree_node(AttentionMap, _flatten, _unflatten, serialized_type_name="headwise.AttentionMap")
pytree.register_pytree_node(
    Statistics,
    lambda stats: (list(stats.values()), tuple(stats)),
    lambda values, names: Statistics(dict(zip(names, values, strict=True))),
    serialized_type_name="headwise.Statistics",
)
torch.serialization.add_safe_globals(
    [AttentionMap, Alibi, Relative, BoundMask, Mask, Scoring, Scores, GivenWeights, Statistics, Top, make]
)
