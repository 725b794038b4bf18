"""A map's parts as a pytree: a list of tensors and a context of plain values that can be compared and stored.

`map.py` registers `AttentionMap` with these two functions, so that a map passes through torch.compile,
torch.export and tree_map as the tensors inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .engines.given_weights import GivenWeights
from .engines.scores import DIFFERENTIABLE, MASK_NUMBERS, MASK_TENSORS, Scores
from .indexing import Index

__all__ = ["flatten", "unflatten"]

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


def flatten(
    scores: Scores | GivenWeights, lse: Tensor | None, columns: Index | None
) -> tuple[list[Tensor], Context]:
    """Split a map's parts (`AttentionMap.parts`) into its tensors and what puts them together again."""
    parts = {"lse": lse, **scores.parts()}
    there = {name: parts[name] for name in TENSORS if parts.get(name) is not None}
    numbers = None if "weights" in parts else (parts["scale"], parts["softcap"])
    rules = tuple([parts[name] for name in MASK_NUMBERS])
    return list(there.values()), (tuple(there), numbers, rules, _plain(columns))  # type: ignore[arg-type, return-value]


def unflatten(
    values: Iterable[Tensor], context: Context
) -> tuple[Scores | GivenWeights, Tensor | None, Index | None]:
    """Return the parts that `flatten` split, with the given tensors in place of theirs."""
    names, numbers, rules, chosen = context
    parts: dict[str, Any] = dict(zip(names, values, strict=True))  # anything: trees of sizes, of nothing
    parts |= zip(MASK_NUMBERS, rules, strict=True)
    columns: Index | None = None
    if chosen is not None:
        kind, plain = chosen
        columns = slice(*plain) if kind == "slice" else torch.tensor(plain, dtype=torch.int64, device="cpu")
    if numbers is None:
        return GivenWeights.from_parts(parts), parts.get("lse"), columns
    parts |= zip(("scale", "softcap"), numbers, strict=True)
    return Scores.from_parts(parts), parts.get("lse"), columns
