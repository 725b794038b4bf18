"""Cutting a request into parts a fused kernel can take.

A part is a rectangle of the score matrix: some queries, some keys, causal or not, with or without a tensor
added. What a kernel can take whole is one part. Causal attention over a longer past (T < S) is two, the past
in full and the square on the diagonal. Windows, documents and ALiBi go by blocks of queries, each block with
the keys it can see at all and its own slice of the mask, so that no T x S mask ever exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .kernels import CAUSAL, FULL, Band
from .scores import Scores, blocks

__all__ = ["Part", "cut", "how"]


@dataclass(frozen=True)
class Limits:
    """What suits a device: elements of a mask made whole, queries a block."""

    added: int
    most_rows: int
    fewest_rows: int


CPU = Limits(added=2**22, most_rows=256, fewest_rows=8)  # 16 MiB in float32
GPU = Limits(added=2**26, most_rows=4096, fewest_rows=256)  # 128 MiB in half precision: launches cost more


@dataclass(frozen=True)
class Part:
    """Queries `rows` against keys `columns`; `added` says whether mask or bias must be added.

    A band other than FULL is the kernel's to draw; CAUSAL on a square is all most of them can.
    """

    rows: slice
    columns: slice
    band: Band = FULL
    added: bool = False

    def is_whole(self, scores: Scores) -> bool:
        """Whether this part is the whole request."""
        _, _, T, S = scores.shape
        return self.rows == slice(0, T) and self.columns == slice(0, S)

    def mask_and_bias(self, scores: Scores, dtype: torch.dtype) -> Tensor | None:
        """What the kernel must add to the scaled product in this part, beyond `causal`."""
        if not self.added:
            return None
        if self.band != FULL:  # the kernel draws the band itself
            scores = replace(scores, mask=replace(scores.mask, left=None, right=None))
        added = scores.additive(self.rows, self.columns, dtype)
        if added is None or added.shape[-1] == 1 or added.stride(-1) == 1:
            return added
        return added.contiguous()  # kernels on a GPU read rows; T5's bias, for one, lies head by head


def adds(scores: Scores) -> bool:
    """Whether a mask or bias must be added to the product, beyond a band."""
    mask, scoring = scores.mask, scores.scoring
    return not (
        mask.keys is None
        and mask.key_ids is None
        and mask.allowed is None
        and scoring.bias is None
        and scoring.slopes is None
    )


def band_of(scores: Scores) -> Band:
    """The band left and right of the query, without bounds that hide nothing."""
    mask = scores.mask
    _, _, T, S = scores.shape
    left = None if mask.left is None or mask.left >= S - 1 else mask.left
    right = None if mask.right is None or mask.right >= T - 1 else mask.right
    return left, right


def in_one_call(scores: Scores) -> bool:
    """Whether a kernel that draws only causal squares takes the request whole."""
    band, (_, _, T, S) = band_of(scores), scores.shape
    whole = band == FULL or (band == CAUSAL and T == S)
    return whole and (not adds(scores) or _small(scores))


def cut(scores: Scores, any_band: bool = False) -> list[Part]:
    """The parts of a request, in order. Parts that share queries follow each other.

    any_band: the kernel draws any band, aligned with the last key, by itself.
    """
    _, _, T, S = scores.shape
    band, added = band_of(scores), adds(scores)
    if any_band and not added and min(band[0] or 0, band[1] or 0) >= 0:
        return [Part(slice(0, T), slice(0, S), band)]
    if band not in (FULL, CAUSAL) or (added and not _small(scores)):
        return _by_rows(scores)
    if band == FULL:
        return [Part(slice(0, T), slice(0, S), FULL, added)]
    past = S - T
    if past < 0:  # the first queries stand before the first key
        return [Part(slice(-past, T), slice(0, S), CAUSAL, added)]
    square = Part(slice(0, T), slice(past, S), CAUSAL, added)
    return [Part(slice(0, T), slice(0, past), FULL, added), square] if past else [square]


def _limits(scores: Scores) -> Limits:
    return CPU if scores.device.type == "cpu" else GPU


def _small(scores: Scores) -> bool:
    """Whether mask and bias may be added whole: already so in memory, or small."""
    mask, scoring, limits = scores.mask, scores.scoring, _limits(scores)
    if mask.key_ids is not None and scores.shape[2] > limits.most_rows:
        return False  # by blocks, most of the other documents' keys are never touched
    if scoring.slopes is None and mask.keys is None and mask.key_ids is None and mask.allowed is None:
        return True
    return math.prod(_added_shape(scores)) <= limits.added


def _added_shape(scores: Scores) -> list[int]:
    """The shape mask and bias take when made one tensor."""
    mask, scoring = scores.mask, scores.scoring
    B, H, T, S = scores.shape
    shapes = [tensor.shape for tensor in (mask.allowed, scoring.bias) if tensor is not None]
    if mask.keys is not None:
        shapes.append(torch.Size((B, 1, 1, S)))
    if mask.key_ids is not None:
        shapes.append(torch.Size((mask.key_ids.shape[0], 1, T, S)))
    if scoring.slopes is not None:
        shapes.append(torch.Size((1, H, T, S)))
    return [max(sizes, default=1) for sizes in zip(*shapes, strict=True)]


def _by_rows(scores: Scores) -> list[Part]:
    _, _, T, _ = scores.shape
    parts = []
    for rows in blocks(0, T, _rows(scores)):
        start, stop = scores.span(rows)
        if start < stop:
            parts.append(Part(rows, slice(start, stop), added=True))
    return parts


def _rows(scores: Scores) -> int:
    """Queries a block: few enough that the block's mask stays small, enough to be worth a call."""
    _, _, T, S = scores.shape
    mask = scores.mask
    batch_and_heads = math.prod(_added_shape(scores)[:2])
    reach, limits = S, _limits(scores)
    if mask.left is not None and mask.right is not None:
        reach = min(S, mask.left + mask.right + 1 + limits.most_rows)
    elif mask.key_ids is not None:
        spans = [scores.span(rows) for rows in blocks(0, T, limits.most_rows)]
        reach = max(stop - start for start, stop in spans)
    fits = limits.added // max(1, batch_and_heads * reach)
    return min(T, max(limits.fewest_rows, min(limits.most_rows, fits)))


def how(parts: list[Part]) -> str:
    """One phrase on how a request was cut."""
    if not parts:
        return "with nothing to do: no query sees any key"
    if len(parts) == 1:
        return "in one call"
    if len(parts) == 2 and parts[0].rows == parts[1].rows:
        return "in two calls, the past and the diagonal"
    return f"in {len(parts)} blocks of queries, each with its slice of the mask"
