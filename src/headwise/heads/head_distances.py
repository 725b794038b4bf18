"""How far apart heads are, in where they look and in what they say; from that, heads as points and in groups.

The distances: each function gives a matrix of every head of a layer against every head, [B, H, H];
`one_number` makes it a number per layer. Weights are read a block of queries at a time, so memory is that of
a few rows of every head.

Points and groups are made of distances [N, N] between N heads, of one layer or of many: e.g. the square root
of `jensen_shannon`, or one minus a cosine.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..engines.scores import own_precision, tile_dtype
from ..errors import ArgumentError, ShapeError
from ..map import AttentionMap
from .measures import weights_in_blocks

__all__ = ["QUERIES", "attention_overlap", "clusters", "jensen_shannon", "layout", "one_number", "similarity"]


QUERIES = 256  # of a sequence that heads are compared by, unless told: their mean hardly moves beyond


@torch.no_grad()
def jensen_shannon(map: AttentionMap, *, smooth: float = 0.0, queries: int | None = None) -> Tensor:
    """How differently two heads look: the mean over queries of JS(p_i^a || p_i^b), in nats.

        JS(p || q) = H((p + q) / 2) - (H(p) + H(q)) / 2,    0: the same weights; log 2: no key in common

    Clark 2019, section 6, takes the sum over queries instead, of weights 0.999 p + 0.001 / S: `smooth=0.001`
    gives that sum divided by the number of queries. The square root is a distance, for `layout` and
    `clusters`. A learned sink is one more key, as in entropy. Queries that count for one head of a pair alone
    are left out.

    Args:
        map: [B, H, T, S]; the cost is H / 2 times that of all its weights.
        smooth: the share of each row that is spread evenly over the real keys before comparing.
        queries: at most this many, evenly spaced among those that count; None: all.

    Returns:
        [B, H, H], symmetric with a diagonal of 0; NaN for a pair without a query to compare.

    Raises:
        ArgumentError: smooth below 0 or not below 1; queries below 1; a map of chosen keys.

    Example:
        >>> weights = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]]])         # three heads
        >>> jensen_shannon(AttentionMap.from_weights(weights))
        tensor([[[0.0000, 0.0000, 0.6931],
                 [0.0000, 0.0000, 0.6931],
                 [0.6931, 0.6931, 0.0000]]])
    """
    if not 0 <= smooth < 1:
        raise ArgumentError(f"smooth must be at least 0 and below 1: got {smooth}; Clark 2019 uses 0.001")
    B, H, _, S = map.shape
    total, number = _room(map, "jensen_shannon"), _room(map, "jensen_shannon")
    real = map.real_keys.to(total.dtype)
    evenly = real / real.sum(-1, keepdim=True)  # [B, S]
    for b, rows, p, counts in _blocks(map, queries):
        p = p * (1 - smooth) + smooth * evenly[b] if smooth else p
        if map.sinks is not None:
            left = (map.sinks.detach()[:, None] - map.lse[b][:, rows]).exp()  # [H, t]
            p = torch.cat([p, left[..., None] * (1 - smooth)], dim=-1)
        entropy = torch.special.entr(p).sum(-1)  # [H, t]
        for head in range(H - 1):
            others = slice(head + 1, H)
            between = torch.special.entr((p[head] + p[others]) / 2).sum(-1)
            apart = between - (entropy[head] + entropy[others]) / 2
            total[b, head, others] += torch.where(counts[head] & counts[others], apart, 0).sum(-1)
        number[b] += _pairs(counts, total.dtype)
    return (total + total.transpose(1, 2)).clamp(min=0) / number


@torch.no_grad()
def attention_overlap(map: AttentionMap, *, queries: int | None = None) -> Tensor:
    """How often two heads look at the same key: the mean over queries of sum_j p_ij^a p_ij^b.

    The element-wise product of Li 2018 (disagreement on attended positions: minus its mean over pairs). 1:
    both look at one key, the same; the diagonal is 1 only for a head that looks at one key a query.

    Args:
        map: [B, H, T, S].
        queries: at most this many, evenly spaced among those that count; None: all.

    Returns:
        [B, H, H], symmetric; NaN for a pair without a query to compare.

    Raises:
        ArgumentError: queries below 1; a map of chosen keys.

    Example:
        >>> weights = torch.tensor([[[[1.0, 0.0]], [[0.5, 0.5]]]])         # two heads
        >>> attention_overlap(AttentionMap.from_weights(weights))
        tensor([[[1.0000, 0.5000],
                 [0.5000, 0.5000]]])
    """
    total, number = _room(map, "attention_overlap"), _room(map, "attention_overlap")
    with own_precision(map.device):
        for b, _, p, counts in _blocks(map, queries):
            flat = torch.where(counts[..., None], p, 0).flatten(1)  # [H, t * S]
            total[b] += flat @ flat.T
            number[b] += _pairs(counts, total.dtype)
    return total / number


def similarity(x: Tensor, counted: Tensor | None = None) -> Tensor:
    """How alike two heads' outputs or values point: the mean over positions of cos(x_t^a, x_t^b).

    1: the same direction everywhere; 0: nothing in common. Li 2018: the disagreement of a layer is minus the
    mean of this over pairs, `-one_number(...)` (theirs counts a head with itself as a pair, too). A vector of
    zeros has cosine 0. Gradients flow: a training loss may use it.

    Args:
        x: [B, H, T, D], outputs of heads before they are joined; or values, [B, Hk, S, D]: query heads of a
            group read the same ones, and are one here.
        counted: bool [B, T], the positions that are no padding; None: all.

    Returns:
        [B, H, H], of values [B, Hk, Hk]; NaN in a sequence of padding alone.

    Raises:
        ShapeError: x without four dimensions; counted that does not fit.
        ArgumentError: x that is not floating point; counted that is not bool.

    Example:
        >>> similarity(torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]], [[3.0, 3.0]]]]))         # three heads
        tensor([[[1.0000, 0.0000, 0.7071],
                 [0.0000, 1.0000, 0.7071],
                 [0.7071, 0.7071, 1.0000]]])
    """
    if x.ndim != 4:
        raise ShapeError(
            f"x must have 4 dimensions [B, H, T, D]: got {x.ndim}, {list(x.shape)}; split channels by head"
        )
    if not x.is_floating_point():
        raise ArgumentError(f"x must be floating point: got {x.dtype}; use x.float()")
    B, H, T, D = x.shape
    with own_precision(x.device):
        x = torch.nn.functional.normalize(x.to(tile_dtype(x.dtype)), dim=-1)
        number: Tensor | int = T
        if counted is not None:
            if counted.dtype != torch.bool:
                raise ArgumentError(f"counted must be bool: got {counted.dtype}; True is a real position")
            if list(counted.shape) != [B, T]:
                raise ShapeError(
                    f"counted must have one bool a position: {list(counted.shape)} for [B, T] = {[B, T]}; "
                    "padding is False"
                )
            x = x * counted[:, None, :, None]
            number = counted.sum(-1)[:, None, None]
        flat = x.flatten(2)  # [B, H, T * D]
        return flat @ flat.transpose(1, 2) / number


def one_number(matrix: Tensor) -> Tensor:
    """A number per layer: the mean over pairs of two different heads; pairs not measured (NaN) are left out.

    Args:
        matrix: [B, H, H], or any [..., H, H].

    Returns:
        [B]; NaN for a single head, which has nobody to differ from.

    Raises:
        ShapeError: not square.

    Example:
        >>> one_number(torch.tensor([[1.0, 0.25], [0.75, 1.0]]))
        tensor(0.5000)
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(
            f"matrix must be square [B, H, H]: got {list(matrix.shape)}; give every head against every head"
        )
    same = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return matrix.masked_fill(same, torch.nan).flatten(-2).nanmean(-1)


def _room(map: AttentionMap, what: str) -> Tensor:
    """A sum for every pair of heads, [B, H, H], of a map that holds whole rows."""
    map.check_whole_rows(what)
    B, H, _, _ = map.shape
    return torch.zeros(B, H, H, dtype=tile_dtype(map.dtype), device=map.device)


def _blocks(map: AttentionMap, queries: int | None) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(sequence, queries [t], their weights [H, t, S], whether each counts [H, t]), block by block."""
    if queries is not None and queries < 1:
        raise ArgumentError(f"queries must be at least 1: got {queries}; None takes all")
    counts = map.counted_queries()
    for b in range(len(map)):
        chosen = counts[b].any(0).nonzero().squeeze(-1).cpu()  # those that count for some head
        if queries is not None and queries < len(chosen):
            steps = torch.arange(queries)  # the middles of as many equal stretches
            chosen = chosen[(2 * steps + 1) * len(chosen) // (2 * queries)]
        for rows, p in weights_in_blocks(map.select(batch=b), chosen):
            yield b, rows, p[0], counts[b][:, rows]


def _pairs(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """How many of these queries count for both heads of a pair, [H, H]."""
    numbers = counts.to(dtype)
    return numbers @ numbers.T


# Points and groups


UNEQUAL = 1e-4  # how far apart, as a share of the largest, the two sides of the diagonal may be


def layout(distances: Tensor) -> Tensor:
    """Points on a plane that are about as far apart as the heads are: classical multidimensional scaling.

        the two largest eigenvectors of -1/2 J D^2 J, J = 1 - 1/N, each times the root of its eigenvalue

    The first axis is the one along which the heads differ most. Always the same picture: in each axis the
    point farthest out is on the positive side. Torgerson 1952; of attention heads: Clark 2019, section 6.

    Args:
        distances: [N, N], symmetric, not negative.

    Returns:
        [N, 2], around 0.

    Raises:
        ShapeError: not square.
        ArgumentError: not finite, negative or not symmetric.

    Example:
        >>> layout(torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
        tensor([[ 1.5000,  0.0000],
                [-1.5000,  0.0000]])
    """
    squares = _checked(distances).square()
    N = len(squares)
    points = torch.zeros(N, 2, dtype=squares.dtype, device=squares.device)
    centred = squares - squares.mean(0) - squares.mean(1, keepdim=True) + squares.mean()
    values, vectors = torch.linalg.eigh(-centred / 2)  # rising
    used = min(2, N)
    axes = vectors[:, -used:].flip(-1) * values[-used:].flip(-1).clamp(min=0).sqrt()  # [N, used]
    # of points equally far out the first decides, also where rounding sets them a little apart
    far = axes.abs() >= axes.abs().amax(0) * (1 - 1e-9)
    sign = axes.gather(0, far.int().argmax(0, keepdim=True)).sign()
    points[:, :used] = axes * sign + 0.0  # no -0.0
    return points.to(distances.dtype if distances.is_floating_point() else torch.float32)


def clusters(distances: Tensor, count: int | None = None, threshold: float | None = None) -> list[int]:
    """Groups of heads that are near each other: the two nearest groups are joined, again and again.

    Groups are as far apart as their heads are on average (average linkage, UPGMA; Sokal and Michener 1958).
    Of pairs equally near the first is joined.

    Args:
        distances: [N, N], symmetric, not negative.
        count: stop when so many groups are left;
        threshold: or when no two are nearer than, or as near as, this.

    Returns:
        The group of each head, numbered 0, 1, ... as they first appear.

    Raises:
        ShapeError: not square.
        ArgumentError: not finite, negative or not symmetric; both or neither of count and threshold; a count
            that is not 1 .. N; a threshold below 0.

    Example:
        >>> away = (torch.tensor([0.0, 5.0, 0.1, 5.2])[:, None] - torch.tensor([0.0, 5.0, 0.1, 5.2])).abs()
        >>> clusters(away, count=2)
        [0, 1, 0, 1]
        >>> clusters(away, threshold=0.15)
        [0, 1, 0, 2]
    """
    away = _checked(distances)
    N = len(away)
    if (count is None) == (threshold is None):
        raise ArgumentError(
            f"clusters takes one of count and threshold: got count={count}, threshold={threshold}; "
            "give how many groups, or how near they may be"
        )
    if count is not None and not 1 <= count <= N:
        raise ArgumentError(f"count must be between 1 and the number of heads: got {count} of {N}; use fewer")
    if threshold is not None and not threshold >= 0:
        raise ArgumentError(f"threshold must not be negative: got {threshold}; 0 joins only what is alike")
    away = away.fill_diagonal_(torch.inf)
    group, sizes = list(range(N)), [1] * N  # each group goes by its first head
    for _ in range(N - (count or 1)):
        near, far = divmod(int(away.argmin()), N)  # near < far: the first of equals, in a symmetric matrix
        if threshold is not None and float(away[near, far]) > threshold:
            break
        joined = (away[near] * sizes[near] + away[far] * sizes[far]) / (sizes[near] + sizes[far])
        away[near], away[:, near] = joined, joined
        away[far], away[:, far] = torch.inf, torch.inf
        away[near, near] = torch.inf
        sizes[near] += sizes[far]
        group = [near if mine == far else mine for mine in group]
    names = {first: number for number, first in enumerate(dict.fromkeys(group))}
    return [names[mine] for mine in group]


def _checked(distances: Tensor) -> Tensor:
    """A copy in float64, its two sides made one."""
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1] or not len(distances):
        raise ShapeError(
            f"distances must be square [N, N]: got {list(distances.shape)}; one sequence's is matrix[b]"
        )
    d = distances.detach().double()
    if not bool(torch.isfinite(d).all()):
        strange = d[~torch.isfinite(d)][0].item()
        raise ArgumentError(
            f"distances must be finite: found {strange}; leave out heads that were not measured"
        )
    if bool((d < 0).any()):
        raise ArgumentError(
            f"distances must not be negative: found {d.min().item():g}; a cosine goes in as 1 - c"
        )
    apart = (d - d.T).abs().max().item()
    if apart > UNEQUAL * d.max().item():
        raise ArgumentError(
            f"distances must be symmetric: [i, j] and [j, i] differ by {apart:g}; use (d + d.T) / 2"
        )
    return (d + d.T) / 2
