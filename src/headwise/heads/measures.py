"""Measures of one head: how much it looks like a known kind of head, how evenly, how near, and what it
copies.

    previous_token .. streaming_mass   the weight on some keys, from their log-sum-exp (`AttentionMap.mass`)
    spread, locality                   compared with a head that attends evenly to every visible key
    grid_distance                      how far a head of a vision Transformer looks, on its grid of patches
    retrieval                          how much of a passage a head copies out of a long context

All but the last take an `AttentionMap` and return a number per head, [B, H]. Padded queries and queries that
see nothing are left out, as in `AttentionMap.statistics`, and so are those for which a score is not defined:
a query that sees no earlier copy of its token cannot look at one. A head without any counted query has NaN.
No T x S matrix is made; where full rows are needed, it is a block at a time. No gradient flows. `retrieval`
takes plain tensors of one sequence and returns [H]. Published measures have the published formula, with its
reference.

p_ij is the weight of key j for query i; query i stands at position i + S - T among the keys.

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

METHODS = ("mean", "mul", "abs")
NO_TOKEN = torch.iinfo(torch.int64).min  # the label of a key that matches no query


# Patterns: D_ij is 1 where a kind of head would look, else 0.


def previous_token(
    map: AttentionMap, method: str = "mean", exclude_bos: bool = False, exclude_current: bool = False
) -> Tensor:
    """Return the weight on the previous token: D_ij = 1 where j = i - 1.

        mean:  mean_i sum_j p_ij D_ij                   the weight on D, over queries that may see a key of it
        mul:   sum_ij p_ij D_ij / sum_ij p_ij           the share of all weight that lies on D
        abs:   1 - L mean_ij |p_ij - D_ij|              1: the weights are D; -1: nothing in common

    with L queries. Labels use "mean". "mul" and "abs" are taken over all queries, also those without a key in
    D, as in TransformerLens (`head_detector.py`), which also rounds "abs" to three digits. |p - D| needs no
    matrix: D is 0 or 1, so the sum of a row is the sum of its weights, plus the number of keys in D, minus
    twice the weight on D.

    Args:
        map: [B, H, T, S].
        method: "mean", "mul" or "abs".
        exclude_bos: leave out the first real key, in weights and pattern, before anything is summed.
        exclude_current: leave out the query's own position in the same way.

    Returns:
        [B, H]; NaN if no query has a key in D, or if the sum of weights is 0.

    Raises:
        ArgumentError: an unknown method; a map of selected keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> previous_token(w)               # (1/2 + 1/3 + 1/4) / 3
        tensor([[0.3611]])
        >>> previous_token(w, "mul")        # (0 + 1/2 + 1/3 + 1/4) / 4
        tensor([[0.2708]])
    """
    keys = map.real_keys
    if exclude_bos:
        keys = keys & ~first_keys(keys, 1)
    before = Mask(left=1, right=-1)
    if exclude_bos or map.mask.keys is not None:
        before = before & Mask.padding(keys)
    return _similarity(map, before, method, exclude_bos, exclude_current)


def duplicate_token(
    map: AttentionMap,
    tokens: Tensor,
    method: str = "mean",
    exclude_bos: bool = False,
    exclude_current: bool = False,
) -> Tensor:
    """Return the weight on earlier copies of the query's token: D_ij = 1 where token_j = token_i and j < i.

    Methods and exclusions are those of `previous_token`. "abs" also compares keys of D that a window hides.
    The pattern: TransformerLens, `head_detector.py`; the name: Wang 2022.

    Args:
        map: [B, H, T, S].
        tokens: int [B, S] or [S], the token of each key. The token of a query is the token at its position.

    Returns:
        [B, H]

    Raises:
        ArgumentError: an unknown method; tokens that are not integers; a map of selected keys.
        ShapeError: a wrong number of tokens; queries whose position is outside the keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> duplicate_token(w, torch.tensor([7, 5, 7, 5]))         # (1/3 + 1/4) / 2: two have a copy
        tensor([[0.2917]])
    """
    pattern = copies(map, tokens, 0, exclude_bos)
    return _similarity(map, pattern, method, exclude_bos, exclude_current)


def induction(
    map: AttentionMap,
    tokens: Tensor,
    method: str = "mean",
    exclude_bos: bool = False,
    exclude_current: bool = False,
) -> Tensor:
    """Return the weight on the tokens that followed earlier copies of the query's token.

    D_ij = 1 where token_(j-1) = token_i and j - 1 < i: the pattern of `duplicate_token` shifted by one key;
    the first key never counts. On a text that is repeated once, "mean" equals `induction_stripe` without its
    first query, whose token has no earlier copy. The pattern: TransformerLens, `head_detector.py`; the
    circuit: Olsson 2022.

    Args, Returns, Raises: as `duplicate_token`.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> induction(w, torch.tensor([7, 5, 7, 5]))         # (1/3 + 1/4) / 2
        tensor([[0.2917]])
    """
    pattern = copies(map, tokens, 1, exclude_bos, exclude_current)
    return _similarity(map, pattern, method, exclude_bos, exclude_current)


def copies(
    map: AttentionMap, tokens: Tensor, after: int, exclude_bos: bool = False, exclude_current: bool = False
) -> Mask:
    """Return the pattern of earlier copies of a query's token (after=0), or of keys after them (after=1)."""
    keys, queries = _labels(map, tokens)
    real = map.real_keys
    if exclude_bos:
        real = real & ~first_keys(real, 1)
    if after:
        keys = torch.cat([torch.full_like(keys[:, :1], NO_TOKEN), keys[:, :-1]], dim=1)  # to the right by one
    keys = keys.masked_fill(~real, NO_TOKEN)
    return Mask.documents(keys, queries) & Mask(right=0 if after and not exclude_current else -1)


def _similarity(
    map: AttentionMap, pattern: Mask, method: str, exclude_bos: bool, exclude_current: bool
) -> Tensor:
    """Return the score of a pattern, which must not contain excluded keys, [B, H]."""
    if method not in METHODS:
        raise ArgumentError(
            f'method must be "mean", "mul" or "abs": got {method!r}; "mean" is the method of labels'
        )
    if method == "mean":
        return mean_where_visible(map, pattern)[0]
    on = map.mass(pattern)  # [B, H]
    total = _total(map, exclude_bos, exclude_current)
    if method == "mul":
        return on / total
    matches = mean_over(map.visible(pattern).to(on.dtype), map.counted_queries())
    return 1 - (total + matches - 2 * on)


def _total(map: AttentionMap, exclude_bos: bool, exclude_current: bool) -> Tensor:
    """Return the mean over rows of the weight on keys that are not excluded, [B, H]."""
    rest = Mask.padding(~first_keys(map.real_keys, 1)) if exclude_bos else Mask()
    if not exclude_current:
        return map.mass(rest)
    # the sum of both sides of the diagonal, for 1 - diagonal would lose the digits of a small rest
    return map.mass(rest & Mask(right=-1)) + map.mass(rest & Mask(left=-1))


def _labels(map: AttentionMap, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of keys, [B, S], with NO_TOKEN at padding, and of queries, [B, T]; int64."""
    B, _, _, S = map.shape
    tokens = torch.as_tensor(tokens, device=map.device)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ArgumentError(f"tokens must be integers: got {tokens.dtype}; give token ids, [B, S]")
    if list(tokens.shape) not in ([S], [B, S]):
        raise ShapeError(
            f"tokens must have one id per key: {list(tokens.shape)} for [B, S] = {[B, S]}; a query's token "
            "is that at its position"
        )
    at, (first, last) = map.positions, map.ends
    if first < 0 or last >= S:
        raise ShapeError(
            f"tokens must include those of every query: positions {first} to {last} for {S} keys; this "
            "pattern is defined for self-attention"
        )
    tokens = tokens.long().expand(B, S)
    return tokens.masked_fill(~map.real_keys, NO_TOKEN), tokens[:, at]


# Single keys and groups of keys.


def induction_stripe(map: AttentionMap, period: int) -> Tensor:
    """Return the mean weight on the token after the previous copy, for an input that repeats with a period.

        mean over i >= period - 1 of p_(i, i + 1 - period)

    If the input is a sequence of `period` random tokens, repeated once, only an induction head attends there.
    TransformerLens' demos compute the same: the mean of the diagonal at offset 1 - seq_len. In padded batches
    the diagonal runs over real tokens.

    Args:
        map: [B, H, T, S].
        period: the number of tokens after which the input repeats.

    Returns:
        [B, H]

    Raises:
        ArgumentError: a period below 1 or above S; a map of selected keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> induction_stripe(w, period=2)         # (1/2 + 1/3 + 1/4) / 3
        tensor([[0.3611]])
    """
    S = map.shape[3]
    if not 1 <= period <= S:
        raise ArgumentError(
            f"period must be between 1 and key_len: got period={period} with key_len={S}; it is the length "
            "of the repeated part"
        )
    back = period - 1
    mass = map.mass(Mask(left=back, right=-back), per="query")  # one key a query
    key = map.positions - back
    is_real = map.real_keys[:, key.clamp(0, S - 1)] & (key >= 0) & (key < S)  # [B, T]
    return mean_over(mass, map.counted_queries() & is_real[:, None])


def token_mass(map: AttentionMap, which: Tensor) -> Tensor:
    """Return the mean weight on some tokens, such as punctuation: mean_i sum of p_ij over chosen j.

    The mean is over the queries that may attend to at least one of them. Clark 2019, section 3.2, measures
    the weight of BERT's heads on [SEP], which every query sees.

    Args:
        map: [B, H, T, S].
        which: bool [B, S] or [S], the keys to add up.

    Returns:
        [B, H]; NaN for a sequence without such a key.

    Raises:
        ArgumentError: `which` is not bool; a map of selected keys.
        ShapeError: `which` does not fit the keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
        >>> token_mass(w, torch.tensor([True, False, False, True]))
        tensor([[0.5000]])
    """
    B, _, _, S = map.shape
    which = torch.as_tensor(which, device=map.device)
    if which.dtype != torch.bool:
        raise ArgumentError(f"which must be bool: got {which.dtype}; e.g. tokens == full_stop")
    if list(which.shape) not in ([S], [B, S]):
        raise ShapeError(
            f"which must have one bool per key: {list(which.shape)} for [B, S] = {[B, S]}; the weights of "
            "keys with True are summed"
        )
    return mean_where_visible(map, Mask.padding(which.expand(B, S)))[0]


def sink(map: AttentionMap, key: int = 0) -> Tensor:
    """Return the mean weight that the queries from key k on put on it: alpha_k = 1/(T - k) sum_(i >= k) p_ik.

    Gu 2024, section 3.1 (there k counts from 1). Padding is not counted: key 0 is the first real key.

    Args:
        map: [B, H, T, S].
        key: which real key, counting from 0.

    Returns:
        [B, H]; NaN for a sequence without such a key.

    Raises:
        ArgumentError: a key outside 0 .. S - 1; a map of selected keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> sink(w)         # (1 + 1/2 + 1/3 + 1/4) / 4
        tensor([[0.5208]])
    """
    S = map.shape[3]
    if not 0 <= key < S:
        raise ArgumentError(
            f"key must lie inside the sequence: got key={key} with key_len={S}; 0 is the first real key"
        )
    real = map.real_keys
    chosen = first_keys(real, key + 1) & ~first_keys(real, key)  # [B, S], one True a sequence at most
    mass = map.mass(Mask.padding(chosen), per="query")
    place = torch.where(chosen.any(-1), chosen.int().argmax(-1), S)  # [B]
    is_later = map.positions >= place[:, None]  # [B, T]
    return mean_over(mass, map.counted_queries() & is_later[:, None])


def sink_rate(alpha: Tensor, epsilon: float = 0.3) -> float:
    """Return the share of scores of `sink` above epsilon, over all sequences, layers and heads.

    Gu 2024, section 3.1, with epsilon = 0.3 on 64 tokens; the number depends on the length.

    Args:
        alpha: any shape, e.g. [B, H], or [layers, B, H] stacked; NaN is left out.

    Returns:
        Between 0 and 1; NaN if all scores are NaN.

    Example:
        >>> sink_rate(torch.tensor([[0.9, 0.1, 0.2, 0.31]]))
        0.5
    """
    measured = alpha[~alpha.isnan()]
    return (measured > epsilon).double().mean().item()


def streaming_mass(map: AttentionMap, sink: int = 128, recent: int = 256) -> Tensor:
    """Return the weight on first and recent keys: mean_i sum of p_ij over j < sink or i - j < recent.

    The mean is over queries that may also attend to other keys. If it is near 1, the head hardly needs the
    other keys, and a cache may drop them. StreamingLLM, Xiao 2024; the defaults are those of DuoAttention,
    Xiao 2025. It is meant for causal heads: keys after the query count as recent.

    Args:
        map: [B, H, T, S].
        sink: how many of the first real keys.
        recent: how many keys up to the query, its own among them.

    Returns:
        [B, H]; NaN if no query may attend to another key.

    Raises:
        ArgumentError: sink below 0 or recent below 1; a map of selected keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> streaming_mass(w, sink=1, recent=2)         # the last query alone has a key between the two
        tensor([[0.7500]])
    """
    if sink < 0 or recent < 1:
        raise ArgumentError(
            f"sink must be at least 0 and recent at least 1: got {sink} and {recent}; they are numbers of "
            "keys"
        )
    return streaming(map, sink, recent)[0]


def streaming(map: AttentionMap, sink: int, recent: int) -> tuple[Tensor, Tensor]:
    """Return `streaming_mass` and the number of queries that it is the mean of."""
    near, early = Mask(left=recent - 1), first_keys(map.real_keys, sink)
    mass = map.mass(near & Mask.padding(~early), per="query")
    if sink:
        mass = mass + map.mass(Mask.padding(early), per="query")
    rest = map.mask & Mask(right=-recent) & Mask.padding(~early)  # neither first nor recent
    counts = map.counted_queries() & (map.visible(rest) > 0)
    return mean_over(mass, counts), counts.sum(-1)


# Comparison with even attention; grids; passages.


def spread(map: AttentionMap, entropy: Tensor | None = None) -> Tensor:
    """Return how even the weights are: mean_i H_i / mean_i log n_i, with n_i visible keys of query i.

    1: uniform attention. Entropy grows with the length (Clark 2019, section 3.3, calls 3.8 nats over 128
    tokens broad); this ratio does not. A learned sink counts as one more key, as in entropy.

    Args:
        map: [B, H, T, S].
        entropy: [B, H], the result of `map.statistics("entropy")`, if it was computed already.

    Returns:
        [B, H]; NaN if no query may attend to more than one key.

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
    """Return how much more weight is near the query than with uniform attention: (m - u) / (1 - u).

    m is the mean weight on keys at most `reach` away, and u is m for uniform attention. 1: all weight is on
    near keys; 0: as much as with uniform attention. In a short text all keys are near, so m alone does not
    show locality.

    Args:
        map: [B, H, T, S].
        reach: the largest distance that counts as near.
        local: [B, H], the result of `map.statistics("local", reach=reach)`, if it was computed already.

    Returns:
        [B, H]; NaN if no query may attend to a key farther away than `reach`.

    Raises:
        ArgumentError: reach below 0; a map of selected keys.

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
    visible = map.visible()  # [B, 1 or H, T]
    beyond = (visible - map.visible(map.mask & near)).to(local.dtype) / visible.clamp(min=1)
    evenly = mean_over(beyond, map.counted_queries())
    return torch.where(evenly > 0, 1 - (1 - local) / evenly, torch.nan)


def grid_distance(map: AttentionMap, height: int, width: int, patch: float = 1.0, prefix: int = 1) -> Tensor:
    """Return the mean attention distance of a vision Transformer's head: mean_i sum_j p_ij |x_i - x_j|.

    x is where a patch lies on the grid, times its size (in pixels, say). The tokens before the patches
    (class, registers) are left out, as queries and as keys; the remaining weights are not rescaled to sum to
    1. Dosovitskiy 2021, appendix D.7; Raghu 2021; the left-out class token as in Keras' "probing ViTs".

    Args:
        map: [B, H, T, S], S = prefix + height * width; a block of rows is made at a time.
        height, width: patches down and across.
        patch: the side of a patch.
        prefix: how many tokens stand before the patches.

    Returns:
        [B, H], in units of `patch`.

    Raises:
        ArgumentError: a size below 1, prefix below 0, a patch not above 0; a map of selected keys.
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
    """Return the share of a needle that the head copies from the context while the model generates it.

    Each step adds 1 / (stop - start) if the head's heaviest key lies in the needle and its token is the
    generated one. Wu 2024, `retrieval_head_detection.py`: there the score is averaged over runs in which the
    model finds the needle (ROUGE-1 recall above 50), and heads with 0.1 or more are retrieval heads.

    Args:
        top_keys: int [steps, H], the heaviest key of the last query at each step (`map.top(1).indices[0, :,
            -1, 0]`), -1 if there is none.
        key_tokens: int [S], the tokens of the context.
        generated: int [steps], the generated tokens.
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
            "top_keys [steps, H], key_tokens [S] and generated [steps] must fit together: got "
            f"{list(top_keys.shape)}, {list(key_tokens.shape)} and {list(generated.shape)}; give one step "
            "per generated token"
        )
    (start, stop), S = needle, len(key_tokens)
    if not 0 <= start < stop <= S:
        raise ArgumentError(
            f"needle must lie in the context: got ({start}, {stop}) of {S} tokens; it is (first, last + 1)"
        )
    inside = (top_keys >= start) & (top_keys < stop)
    copied = key_tokens[top_keys.clamp(0, S - 1)] == generated[:, None]  # [steps, H]
    return (inside & copied).sum(0) / (stop - start)


# Parts of measures, also used by other files


BLOCK = 32 * 2**20  # bytes of weights in memory at a time, where full rows are needed


def weights_in_blocks(map: AttentionMap, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield full rows of queries, in increasing order, a block at a time: (int [t], weights [B, H, t, S]).

    Weights are in float32 at least; a block stays within `BLOCK` bytes and the memory budget, or is one row.
    """
    B, H, T, S = map.shape
    map, dtype = map.detach(), tile_dtype(map.dtype)
    size = min(BLOCK, budget.bytes_allowed(map.device))
    for block in queries.split(max(1, size // (B * H * S * dtype.itemsize))):
        part = map if len(block) == T else map.select(queries=block)
        yield block.to(map.device), part.dense().to(dtype)


def mean_over(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of values [B, 1 or H, T] over the queries that count, [B, H]."""
    return torch.where(counts, values, 0).sum(-1) / counts.sum(-1)


def mean_where_visible(map: AttentionMap, on: Mask) -> tuple[Tensor, Tensor]:
    """Return the mean weight on the keys that `on` allows and the number of queries, [B, H] each.

    The mean is over the queries that see at least one of those keys; NaN if there is none.
    """
    counts = map.counted_queries() & (map.visible(map.mask & on) > 0)
    return mean_over(map.mass(on, per="query"), counts), counts.sum(-1)


def first_keys(real: Tensor, count: int) -> Tensor:
    """Return the first `count` real keys of each sequence, bool [B, S]."""
    return real & (real.cumsum(-1) <= count)
