"""Measures of a head by itself: how evenly it looks, how near, how far on a grid, what it copies.

    spread, locality   against a head that weighs all it sees alike
    grid_distance      how far a head of a vision Transformer looks, on the grid its tokens were cut from
    retrieval          how much of a passage a head copies out of a long context

All but the last take an `AttentionMap` and give a number per head, [B, H]. Padded queries and queries that
see nothing are left out, as in `AttentionMap.statistics`. No matrix is made; where whole rows are needed, a
block of them at a time. No gradient flows. `retrieval` takes plain tensors of one sequence and gives [H].

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import budget
from ..engines.scores import tile_dtype
from ..errors import ArgumentError, ShapeError
from ..map import AttentionMap
from ..masks import Mask

__all__ = [
    "first_keys",
    "grid_distance",
    "locality",
    "mean_over",
    "mean_where_seen",
    "retrieval",
    "spread",
    "weights_in_blocks",
]


def spread(map: AttentionMap, entropy: Tensor | None = None) -> Tensor:
    """How evenly the head looks at all it may see: mean_i H_i / mean_i log n_i, n_i the keys query i may see.

    1: all alike. Entropy itself grows with the length (Clark 2019, section 3.3, calls 3.8 nats of 128 tokens
    broad), this does not. A learned sink counts as one more key, as in entropy.

    Args:
        map: [B, H, T, S].
        entropy: [B, H], where `map.statistics("entropy")` was measured already.

    Returns:
        [B, H]; NaN where no query has a choice.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> spread(w)
        tensor([[1.]])
    """
    if entropy is None:
        entropy = map.detach().statistics("entropy").entropy
    choices = map.visible() + (map.sinks is not None)
    most = mean_over(choices.clamp(min=1).to(entropy.dtype).log(), map.counted_queries())
    return torch.where(most > 0, entropy / most, torch.nan)  # an entropy of rounding over 0 would be infinite


def locality(map: AttentionMap, reach: int = 8, local: Tensor | None = None) -> Tensor:
    """How much more the head looks near by than evenly: (m - u) / (1 - u).

    m is the mean weight on keys at most `reach` away, u what m would be if each query weighed all it sees
    alike. 1: never farther; 0: no nearer than evenly. In a short text all is near, and m alone says nothing.

    Args:
        map: [B, H, T, S].
        reach: how near counts.
        local: [B, H], where `map.statistics("local", reach=reach)` was measured already.

    Returns:
        [B, H]; NaN where there is nothing farther away to see.

    Raises:
        ArgumentError: reach below 0; a map of chosen keys.

    Example:
        >>> itself = AttentionMap.from_weights(torch.eye(4)[None, None], Mask.causal())
        >>> locality(itself, reach=1)
        tensor([[1.]])
    """
    if reach < 0:
        raise ArgumentError(f"reach must not be negative: got {reach}; 0 is the query's own position")
    near = Mask.window(left_right=(reach, reach))
    if local is None:
        local = map.mass(near)
    seen = map.visible()  # [B, 1 or H, T]
    beyond = (seen - map.visible(map.mask & near)).to(local.dtype) / seen.clamp(min=1)
    evenly = mean_over(beyond, map.counted_queries())
    return torch.where(evenly > 0, 1 - (1 - local) / evenly, torch.nan)


def grid_distance(map: AttentionMap, height: int, width: int, patch: float = 1.0, prefix: int = 1) -> Tensor:
    """The mean attention distance of a vision Transformer's head: mean_i sum_j p_ij |x_i - x_j|.

    x is where a patch lies on the grid, times its size (in pixels, say). The tokens before the patches
    (class, registers) are left out, as queries and as keys, and what remains is not scaled up.
    Dosovitskiy 2021, appendix D.7; Raghu 2021; the left-out class token as in Keras' "probing ViTs".

    Args:
        map: [B, H, T, S], S = prefix + height * width; a block of rows is made at a time.
        height, width: patches down and across.
        patch: the side of a patch.
        prefix: how many tokens stand before the patches.

    Returns:
        [B, H], in units of `patch`.

    Raises:
        ArgumentError: a size below 1, prefix below 0, a patch not above 0; a map of chosen keys.
        ShapeError: the grid does not cover the keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8))
        >>> grid_distance(w, 2, 2, patch=16)         # 16 (0 + 1 + 1 + sqrt 2) / 5
        tensor([[10.9255]])
    """
    if height < 1 or width < 1 or prefix < 0 or not patch > 0:
        raise ArgumentError(
            f"height and width must be at least 1, prefix at least 0, patch above 0: got {height}, {width}, "
            f"{prefix}, {patch}; e.g. 14, 14, 1, 16"
        )
    map.check_whole_rows("grid_distance")
    B, H, T, S = map.shape
    if S != prefix + height * width:
        raise ShapeError(
            f"grid must cover the keys: {prefix} + {height} * {width} = {prefix + height * width} for {S}; "
            "prefix is the number of tokens before the patches"
        )
    at, dtype = map.positions, tile_dtype(map.dtype)
    place = torch.arange(height * width, device=map.device)
    place = torch.stack([place // width, place % width], -1).to(dtype) * patch  # [S - prefix, 2]
    counts = map.counted_queries() & (at >= prefix) & (at < S)
    distance = torch.zeros(B, H, T, dtype=dtype, device=map.device)
    for rows, p in weights_in_blocks(map, torch.arange(T)):  # [B, H, t, S]
        mine = place[(at[rows] - prefix).clamp(0, len(place) - 1)]
        away = (mine[:, None] - place).square().sum(-1).sqrt()  # [t, S - prefix]
        distance[:, :, rows] = (p[..., prefix:] * away).sum(-1)
    return mean_over(distance, counts)


def retrieval(top_keys: Tensor, key_tokens: Tensor, generated: Tensor, needle: tuple[int, int]) -> Tensor:
    """How much of a needle the head copies out of the context while the model says it.

    1 / (stop - start) for each step at which the head's heaviest key lies in the needle and carries the token
    that is generated. Wu 2024, `retrieval_head_detection.py`; there a score is the mean over runs in which
    the model finds the needle (ROUGE-1 recall above 50), and heads of at least 0.1 are retrieval heads.

    Args:
        top_keys: int [steps, H], the heaviest key of the last query at each step (`map.top(1).indices[0, :,
            -1, 0]`), -1 where there is none.
        key_tokens: int [S], the tokens of the context.
        generated: int [steps], the token each step gave.
        needle: (start, stop), where the needle lies in the context.

    Returns:
        [H]

    Raises:
        ShapeError: sizes that disagree.
        ArgumentError: a needle that is empty or outside the context.

    Example:
        >>> top = torch.tensor([[2, 0], [3, 3]])            # two steps, two heads
        >>> retrieval(top, torch.tensor([4, 5, 6, 7]), torch.tensor([6, 7]), needle=(2, 4))
        tensor([1.0000, 0.5000])
    """
    if top_keys.ndim != 2 or generated.shape != top_keys.shape[:1] or key_tokens.ndim != 1:
        raise ShapeError(
            f"top_keys [steps, H], key_tokens [S] and generated [steps] must fit together: got "
            f"{list(top_keys.shape)}, {list(key_tokens.shape)} and {list(generated.shape)}; "
            "give one step a generated token"
        )
    (start, stop), S = needle, len(key_tokens)
    if not 0 <= start < stop <= S:
        raise ArgumentError(
            f"needle must lie in the context: got ({start}, {stop}) of {S} tokens; it is (first, last + 1)"
        )
    inside = (top_keys >= start) & (top_keys < stop)
    copied = key_tokens[top_keys.clamp(0, S - 1)] == generated[:, None]  # [steps, H]
    return (inside & copied).sum(0) / (stop - start)


# What measures are made with, here and in other files


BLOCK = 32 * 2**20  # bytes of weights in memory at a time, where whole rows are needed


def weights_in_blocks(map: AttentionMap, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole rows of chosen queries, a block at a time: (queries int [t], weights [B, H, t, S]).

    Weights are in float32 at least; a block stays within `BLOCK` bytes and the memory budget, or is one row.
    """
    B, H, _, S = map.shape
    map, dtype = map.detach(), tile_dtype(map.dtype)
    room = min(BLOCK, budget.bytes_allowed(map.device))
    for some in queries.split(max(1, room // (B * H * S * dtype.itemsize))):
        yield some.to(map.device), map.select(queries=some).dense().to(dtype)


def mean_over(values: Tensor, counts: Tensor) -> Tensor:
    """[B, H], the mean of [B, 1 or H, T] over the queries that count."""
    return torch.where(counts, values, 0).sum(-1) / counts.sum(-1)


def mean_where_seen(map: AttentionMap, on: Mask) -> tuple[Tensor, Tensor]:
    """The mean weight on the keys that `on` allows, [B, H], and over how many queries it is, [B, H].

    It is over the queries that may see at least one of those keys; NaN where there is none.
    """
    counts = map.counted_queries() & (map.visible(map.mask & on) > 0)
    return mean_over(map.mass(on, per="query"), counts), counts.sum(-1)


def first_keys(real: Tensor, count: int) -> Tensor:
    """The first `count` real keys of each sequence, bool [B, S]."""
    return real & (real.cumsum(-1) <= count)
