"""A live module's own weights and answers, once it is known how it works.

The examination looks at a copy whose weights are random numbers, no two alike. Whatever the four projections
were put together from, each of their numbers is found among those, and so is its place in the module.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..recipe import Weights
from .calling import Caller
from .subject import cast_loose

__all__ = ["as_it_is", "own_weights"]


def own_weights(weights: Weights, caller: Caller, module: nn.Module) -> Weights:
    """The projections in float64 as the module has them, where `weights` are those of the examined copy."""
    own: Mapping[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    known = {name: value for name, value in caller.subject.parameters.items() if name in own}
    if not known:
        return weights
    drawn = torch.cat([value.detach().double().flatten() for value in known.values()])
    real = torch.cat([own[name].detach().double().flatten().cpu() for name in known])
    order = drawn.argsort()
    drawn, real = drawn[order], real[order]

    def looked_up(x: Tensor) -> Tensor:
        spots = torch.searchsorted(drawn, x.contiguous()).clamp_(max=len(drawn) - 1)
        return torch.where(drawn[spots] == x, real[spots], x)  # what is in no parameter is 0 or 1

    return Weights(*(looked_up(x.double()) for x in weights))


def as_it_is(caller: Caller, module: nn.Module) -> Caller:
    """The same way to call it, for a copy with its own weights, in float64 and without dropout."""
    body = copy.deepcopy(module).cpu().double().eval()
    cast_loose(body, torch.float64)
    return replace(caller, subject=replace(caller.subject, body=body))
