"""Where each number of the projections comes from, so that another process can put in numbers of its own.

The examined module's weights are random numbers, no two alike: whatever a projection was put together from,
each of its numbers is found among the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..recipe import Weights

ZERO, ONE = -1, -2


@torch.no_grad()
def origin_of(
    weights: Weights | None,
    parameters: Mapping[str, Tensor],
    factors: Mapping[str, Sequence[Tensor]] | None = None,
) -> dict[str, list[Tensor]]:
    """By the names of `Weights`: indices into all parameters in order, flat; without those not found there.

    Args:
        factors: projections that are products of two or more, the first applied first.
    """
    if weights is None:
        return {}
    held = [value.detach().double().flatten().cpu() for value in parameters.values()]
    drawn = torch.cat(held) if held else torch.empty(0, dtype=torch.float64)
    ordered, order = drawn.sort()
    found = {}
    for name, whole in weights._asdict().items():
        parts = [_places(one.double(), ordered, order) for one in (factors or {}).get(name, (whole,))]
        known = [one for one in parts if one is not None]
        if len(known) == len(parts):
            found[name] = known
    return found


def _places(numbers: Tensor, ordered: Tensor, order: Tensor) -> Tensor | None:
    """Zeros and ones are those of identities and of biases that are not there."""
    places = torch.where(numbers == 0, ZERO, ONE)
    rest = (numbers != 0) & (numbers != 1)
    if not bool(rest.any()):
        return places
    if not len(ordered):
        return None
    spots = torch.searchsorted(ordered, numbers[rest].contiguous()).clamp_(max=len(ordered) - 1)
    if not torch.equal(ordered[spots], numbers[rest]):
        return None
    places[rest] = order[spots]
    return places
