"""Numbers from where they were made to main memory, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["fetched"]


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors in main memory, each in its shape; a GPU is waited for once, not once a tensor.

    Example:
        >>> fetched([torch.ones(2), torch.zeros(1, 2)])
        [tensor([1., 1.]), tensor([[0., 0.]])]
    """
    found = list(tensors)
    kinds = dict.fromkeys((x.device, x.dtype) for x in tensors if not x.is_cpu)
    for kind in kinds:
        here = [at for at, x in enumerate(tensors) if (x.device, x.dtype) == kind]
        together = torch.cat([tensors[at].flatten() for at in here]).cpu()
        for at, part in zip(here, together.split([tensors[at].numel() for at in here]), strict=True):
            found[at] = part.view(tensors[at].shape)
    return found
