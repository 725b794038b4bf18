"""Gradients cut to a length, also where some parameters lie over several processes and others do not.

torch's `clip_grad_norm_` takes parameters that are all of one kind. Of a model whose heads are sharded, some
are DTensors of one mesh or another, and some are plain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients down so that together they are no longer than max_norm, as torch's function does.

    Args:
        parameters: with gradients; plain tensors and DTensors of any mesh beside each other.
        max_norm: the most.
        norm_type: of the length; inf: the largest number.
        error_if_nonfinite: raise where the length is no finite number.

    Returns:
        The length as it was, a plain tensor, the same on every rank.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    alike: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alike.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms: list[Any] = [
        get_total_norm([p.grad for p in some if p.grad is not None], norm_type, error_if_nonfinite)
        for some in alike.values()
    ]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total: Tensor = norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type, error_if_nonfinite)
    for some in alike.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total
