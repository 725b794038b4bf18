"""Layout: heads as points and in groups, from how far apart they are.

Distances [N, N] between N heads, of one layer or of many: e.g. the square root of `jensen_shannon`, or one
minus a cosine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError

__all__ = ["clusters", "layout"]

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
