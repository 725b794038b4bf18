"""Mass: how much of its weight each query puts on chosen keys; and how many keys there are to choose from.

    m_i = sum of p_ij over the keys j that `on` allows = exp(lse of the scores under both masks - lse)

so a rule about keys costs one more light pass over q and k, on a GPU by kernels, and no weights at all.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..mask_rules import can_read
from ..masks import Mask
from .first_pass import lse_of
from .given_weights import GivenWeights
from .scores import Scores, Tiled, blocks, own_precision
from .statistics import of_head
from .walk import check_mass, check_some, is_rough, walk

__all__ = ["bound_to", "mass", "visible"]

ROWS = 64  # queries at a time, where a dense mask is counted


@torch.no_grad()
def mass(scores: Scores | GivenWeights, lse: Tensor, on: Mask, per_query: bool = False) -> Tensor:
    """The weight on the keys that `on` allows: [B, H], the mean over counted queries, or [B, H, T].

    A learned sink is no key: it is in lse, never in the mass. No gradient flows.

    Raises:
        MaskError: `on` does not fit [B, H, T, S].
    """
    on = bound_to(on, scores)
    joined = scores.mask & on
    with own_precision(scores.device):
        if isinstance(scores, GivenWeights):
            values = _of_given(scores, on)
        elif can_read(lse) and is_rough(lse):
            values = _walked(scores, lse, on)
        else:
            values = _of_scores(scores, lse, on, joined)
    if per_query:
        return values
    # counted as `local` is: every query that is real and sees something, wherever it stands
    return of_head("local", values, replace(scores, mask=joined), lse)


def bound_to(on: Mask, scores: Tiled) -> Mask:
    """`on` for these queries: what is kept per query spelled out, for chosen queries by where they stand."""
    on = on.to(scores.device)
    if scores.positions is not None:
        on = on.placed(scores.positions)
    return on.bind(*scores.shape)


def _of_scores(scores: Scores, lse: Tensor, on: Mask, joined: Mask) -> Tensor:
    sees_nothing = torch.isneginf(lse)
    if on.hides_nothing and scores.sinks is None:
        return torch.ones_like(lse).masked_fill(sees_nothing, 0)  # a row's weights sum to 1: no pass needed
    check_some(scores, lse)
    bare = replace(scores.scoring, sinks=None)
    there = lse_of(replace(scores.detach(), mask=joined, scoring=bare))
    # a row that sees nothing has -inf on both sides; rounding may take a whole row past 1
    return (there - lse).exp().masked_fill(sees_nothing, 0).clamp(max=1)


def _walked(scores: Scores, lse: Tensor, on: Mask) -> Tensor:
    """The same by the weights themselves, where a difference of two lse would be too rough."""
    values = torch.zeros_like(lse)
    for block in walk(scores, lse):
        mine = on.select(block.piece.batch, block.piece.heads, slice(None))
        mass = torch.zeros_like(block.lse)
        for tile in block.tiles():
            allowed = mine.tile(block.at, block.rows, tile.columns, scores.shape[3])
            values[block.where] += (tile.p if allowed is None else tile.p * allowed).sum(-1)
            mass += tile.p.sum(-1)
        check_mass(block.scores, block.rows, block.lse, block.with_sink(mass))
    return values


def _of_given(scores: GivenWeights, on: Mask) -> Tensor:
    """Their own mask is not asked: what someone gave is there, whatever the mask says."""
    B, H, T, S = scores.shape
    values = torch.empty(B, H, T, dtype=scores.dtype, device=scores.device)
    chosen = replace(scores.detach(), mask=on)
    for piece in scores.pieces():
        mine = chosen.piece(piece)
        for rows in blocks(0, T, max(1, piece.rows * piece.columns // S)):
            p = mine.weights[:, :, rows].to(scores.dtype)  # [B, H, t, S]
            allowed = mine.mask.tile(mine.at(rows), rows, slice(0, S), S)
            kept = p if allowed is None else p.masked_fill(~allowed, 0)
            values[piece.batch, piece.heads, rows] = kept.sum(-1)
    return values


def visible(scores: Tiled, mask: Mask | None = None) -> Tensor:
    """How many keys a mask shows each query, int [B, 1 or H, T]; by default the scores' own.

    Scores are not asked, so a key hidden by an endless bias counts. Linear in T and S
    but for dense masks.
    """
    mask = scores.mask if mask is None else bound_to(mask, scores)
    (B, _, T, S), device = scores.shape, scores.device
    at = scores.at(slice(0, T))
    if not mask.is_countable:
        counts = [_counted(mask, at, rows, S) for rows in blocks(0, T, ROWS)]
        return torch.cat(counts, dim=-1).expand(B, -1, T)
    keys, queries = (torch.zeros(B, n, dtype=torch.int64, device=device) for n in (S, T))
    if mask.key_ids is not None and mask.query_ids is not None:
        batch = max(mask.key_ids.shape[0], mask.query_ids.shape[0])  # either may be one for all
        both = (ids.expand(batch, -1, -1) for ids in (mask.key_ids, mask.query_ids))
        labels = torch.cat(tuple(both), dim=1)  # [B or 1, S + T, N]
        ranks = torch.unique(labels.flatten(0, 1), dim=0, return_inverse=True)[1].view(labels.shape[:2])
        keys, queries = (rank.expand(B, -1) for rank in (ranks[:, :S], ranks[:, S:]))
    # sorted by label, then by place: a query's keys stand together, in order
    spots = torch.arange(S, device=device)
    order = keys * S + spots
    if mask.keys is not None:
        real = mask.keys if mask.keys.ndim == 2 else spots < mask.keys[:, None]
        order = order.masked_fill(~real, -1)
    order = order.sort(-1).values  # [B, S]
    first = torch.zeros_like(at) if mask.left is None else (at - mask.left).clamp(0, S)
    beyond = torch.full_like(at, S) if mask.right is None else (at + mask.right + 1).clamp(0, S)
    start, stop = (torch.searchsorted(order, queries * S + end) for end in (first, beyond))  # [B, T]
    return (stop - start).clamp(min=0)[:, None]


def _counted(mask: Mask, at: Tensor, rows: slice, S: int) -> Tensor:
    """The same of a block of queries, [B or 1, H or 1, t], where each key must be looked at."""
    tile = mask.tile(at[rows], rows, slice(0, S), S)
    assert tile is not None, "a mask without rules is countable"
    tile = tile[(None,) * (4 - tile.ndim)]
    return tile.expand(*tile.shape[:2], rows.stop - rows.start, S).sum(-1)
