"""Patterns: how much of a head's weight goes where a known kind of head would put it.

Each function takes an `AttentionMap` and gives a number per head, [B, H], from the log-sum-exp of the keys
concerned (`AttentionMap.mass`): no matrix is made. Padded queries and queries that see nothing are left out,
as in `AttentionMap.statistics`, and so are those for which a score is not defined: a query that may see no
earlier copy of its token, no special token, cannot look at one. A head without any counted query has NaN. No
gradient flows. What others published keeps their formula, and says so.

p_ij is the weight of key j for query i; query i stands at position i + S - T among the keys.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from ..map import AttentionMap
from ..masks import Mask
from .measures import first_keys, mean_over, mean_where_seen

__all__ = [
    "duplicate_token",
    "induction",
    "induction_stripe",
    "previous_token",
    "sink",
    "sink_rate",
    "streaming_mass",
    "token_mass",
]

METHODS = ("mean", "mul", "abs")
NO_TOKEN = torch.iinfo(torch.int64).min  # the label of a key that matches no query


# Where a head of a kind would look: D_ij is 1 there, else 0.


def previous_token(
    map: AttentionMap, method: str = "mean", exclude_bos: bool = False, exclude_current: bool = False
) -> Tensor:
    """How much the head looks at the token before: D_ij = 1 where j = i - 1.

        mean:  mean_i sum_j p_ij D_ij                   the weight on D, over queries that may see a key of it
        mul:   sum_ij p_ij D_ij / sum_ij p_ij           the share of all weight that lies on D
        abs:   1 - L mean_ij |p_ij - D_ij|              1: the weights are D; -1: nothing in common

    with L queries. "mean" is what labels are given by. "mul" and "abs" are over all queries, those without a
    key in D among them, as in TransformerLens (`head_detector.py`), which rounds "abs" to three digits; this
    does not. |p - D| needs no matrix: D is 0 or 1, so a row's sum is total + matches - 2 mass.

    Args:
        map: [B, H, T, S].
        method: "mean", "mul" or "abs".
        exclude_bos: leave out the first real key, in weights and pattern, before anything is summed.
        exclude_current: leave out the query's own position likewise.

    Returns:
        [B, H]; NaN where no query has a key in D, and where there is no weight to take a share of.

    Raises:
        ArgumentError: another method; a map of chosen keys.

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
    """How much the head looks at earlier copies of its token: D_ij = 1 where token_j = token_i and j < i.

    Methods and exclusions are those of `previous_token`. "abs" expects weight on all of D, also where a
    window hides it. The pattern: TransformerLens, `head_detector.py`; the name: Wang 2022.

    Args:
        map: [B, H, T, S].
        tokens: int [B, S] or [S], the token of each key; a query has that of its position.

    Returns:
        [B, H]

    Raises:
        ArgumentError: another method; tokens that are not integers; a map of chosen keys.
        ShapeError: tokens that do not fit the keys; queries that stand outside the keys.

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
    """How much the head looks at what followed earlier copies of its token.

    D_ij = 1 where token_(j-1) = token_i and j - 1 < i: the pattern of `duplicate_token` shifted by one key,
    the first key never. On a text said twice "mean" is `induction_stripe` without its first query, whose
    token had not been said before. The pattern: TransformerLens, `head_detector.py`; the circuit: Olsson
    2022.

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
    """The pattern of earlier copies of a query's token (after = 0), or of what followed them (after = 1)."""
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
    """The score of a pattern; what is excluded must not be in it."""
    if method not in METHODS:
        raise ArgumentError(
            f'method must be "mean", "mul" or "abs": got {method!r}; "mean" is what labels are given by'
        )
    if method == "mean":
        return mean_where_seen(map, pattern)[0]
    on = map.mass(pattern)  # [B, H]
    total = _total(map, exclude_bos, exclude_current)
    if method == "mul":
        return on / total
    matches = mean_over(map.visible(pattern).to(on.dtype), map.counted_queries())
    return 1 - (total + matches - 2 * on)


def _total(map: AttentionMap, exclude_bos: bool, exclude_current: bool) -> Tensor:
    """The mean of what a row sums to without the excluded keys, [B, H]."""
    rest = Mask.padding(~first_keys(map.real_keys, 1)) if exclude_bos else Mask()
    if not exclude_current:
        return map.mass(rest)
    # the two sides of the diagonal, added: one minus the diagonal would lose the digits of a small rest
    return map.mass(rest & Mask(right=-1)) + map.mass(rest & Mask(left=-1))


def _labels(map: AttentionMap, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the keys, [B, S], padding without one, and of the queries, [B, T]; int64."""
    B, _, _, S = map.shape
    tokens = torch.as_tensor(tokens, device=map.device)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ArgumentError(f"tokens must be integers: got {tokens.dtype}; give token ids, [B, S]")
    if list(tokens.shape) not in ([S], [B, S]):
        raise ShapeError(
            f"tokens must have one id a key: {list(tokens.shape)} for [B, S] = {[B, S]}; "
            "a query's token is that of its position"
        )
    at, (first, last) = map.positions, map.ends
    if first < 0 or last >= S:
        raise ShapeError(
            f"tokens must be known for every query: positions {first} to {last} of {S} keys; "
            "this pattern is one of self-attention"
        )
    tokens = tokens.long().expand(B, S)
    return tokens.masked_fill(~map.real_keys, NO_TOKEN), tokens[:, at]


# Single keys and groups of keys.


def induction_stripe(map: AttentionMap, period: int) -> Tensor:
    """The mean weight on the token after the last copy, where the input repeats with a period.

        mean over i >= period - 1 of p_(i, i + 1 - period)

    On random tokens said twice (a sequence of `period` tokens repeated) nothing but induction looks there.
    TransformerLens' demos: the mean of the diagonal at offset 1 - seq_len. In padded batches the diagonal of
    the real tokens.

    Args:
        map: [B, H, T, S].
        period: after how many tokens the input repeats.

    Returns:
        [B, H]

    Raises:
        ArgumentError: a period below 1 or above S; a map of chosen keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> induction_stripe(w, period=2)         # (1/2 + 1/3 + 1/4) / 3
        tensor([[0.3611]])
    """
    S = map.shape[3]
    if not 1 <= period <= S:
        raise ArgumentError(
            f"period must be between 1 and key_len: got {period} of {S}; it is the length of what is repeated"
        )
    back = period - 1
    mass = map.mass(Mask(left=back, right=-back), per="query")  # one key a query
    key = map.positions - back
    there = map.real_keys[:, key.clamp(0, S - 1)] & (key >= 0) & (key < S)  # [B, T]
    return mean_over(mass, map.counted_queries() & there[:, None])


def token_mass(map: AttentionMap, which: Tensor) -> Tensor:
    """The mean weight on some tokens, e.g. special ones or punctuation: mean_i sum of p_ij over chosen j.

    The mean is over the queries that may see one of them. Clark 2019, section 3.2: heads of BERT that rest on
    [SEP], which every query sees.

    Args:
        map: [B, H, T, S].
        which: bool [B, S] or [S], the keys to add up.

    Returns:
        [B, H]; NaN in a sequence that has none of them.

    Raises:
        ArgumentError: `which` is not bool; a map of chosen keys.
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
            f"which must have one bool a key: {list(which.shape)} for [B, S] = {[B, S]}; True is added up"
        )
    return mean_where_seen(map, Mask.padding(which.expand(B, S)))[0]


def sink(map: AttentionMap, key: int = 0) -> Tensor:
    """The mean weight that the queries from key k on put on it: alpha_k = 1/(T - k) sum_(i >= k) p_ik.

    Gu 2024, section 3.1 (there k counts from 1). Padding is not counted: key 0 is the first real key.

    Args:
        map: [B, H, T, S].
        key: which real key, counting from 0.

    Returns:
        [B, H]; NaN in a sequence that has no such key.

    Raises:
        ArgumentError: a key outside 0 .. S - 1; a map of chosen keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> sink(w)         # (1 + 1/2 + 1/3 + 1/4) / 4
        tensor([[0.5208]])
    """
    S = map.shape[3]
    if not 0 <= key < S:
        raise ArgumentError(f"key must lie inside the sequence: got {key} of {S}; 0 is the first real key")
    real = map.real_keys
    chosen = first_keys(real, key + 1) & ~first_keys(real, key)  # [B, S], one True a sequence at most
    mass = map.mass(Mask.padding(chosen), per="query")
    place = torch.where(chosen.any(-1), chosen.int().argmax(-1), S)  # [B]
    from_there = map.positions >= place[:, None]  # [B, T]
    return mean_over(mass, map.counted_queries() & from_there[:, None])


def sink_rate(alpha: Tensor, epsilon: float = 0.3) -> float:
    """The share of heads whose `sink` is above epsilon, over sequences, layers and heads alike.

    Gu 2024, section 3.1, with epsilon = 0.3 on 64 tokens; the number depends on the length.

    Args:
        alpha: any shape, e.g. [B, H], or [layers, B, H] stacked; NaN is left out.

    Returns:
        Between 0 and 1; NaN where nothing was measured.

    Example:
        >>> sink_rate(torch.tensor([[0.9, 0.1, 0.2, 0.31]]))
        0.5
    """
    measured = alpha[~alpha.isnan()]
    return (measured > epsilon).double().mean().item()


def streaming_mass(map: AttentionMap, sink: int = 128, recent: int = 256) -> Tensor:
    """The weight on the first keys and the recent ones: mean_i sum of p_ij over j < sink or i - j < recent.

    The mean is over the queries that may see others, too. Near 1: the head works as well on a cache of the
    two. StreamingLLM, Xiao 2024; DuoAttention, Xiao 2025, whose numbers the defaults are. For causal heads:
    keys after the query count as recent.

    Args:
        map: [B, H, T, S].
        sink: how many of the first real keys.
        recent: how many keys up to the query, its own among them.

    Returns:
        [B, H]; NaN where no query sees any other key.

    Raises:
        ArgumentError: sink below 0 or recent below 1; a map of chosen keys.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> streaming_mass(w, sink=1, recent=2)         # the last query alone has a key between the two
        tensor([[0.7500]])
    """
    if sink < 0 or recent < 1:
        raise ArgumentError(
            f"sink must be at least 0 and recent at least 1: got {sink} and {recent}; they count keys"
        )
    return streaming(map, sink, recent)[0]


def streaming(map: AttentionMap, sink: int, recent: int) -> tuple[Tensor, Tensor]:
    """`streaming_mass`, and over how many queries it is the mean."""
    near, early = Mask(left=recent - 1), first_keys(map.real_keys, sink)
    mass = map.mass(near & Mask.padding(~early), per="query")
    if sink:
        mass = mass + map.mass(Mask.padding(early), per="query")
    others = map.mask & Mask(right=-recent) & Mask.padding(~early)  # neither first nor recent
    counts = map.counted_queries() & (map.visible(others) > 0)
    return mean_over(mass, counts), counts.sum(-1)
