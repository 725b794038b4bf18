"""The parts of a layer whose heads lie over ranks: linear layers, norms, a bias by distance.

Their parameters are DTensors, so that checkpoints, FSDP2 and optimisers know what lies where; what is
computed goes by this rank's part of them, a plain tensor. `shard` lays a module's parameters over a mesh and
gives it one of these classes, which computes with them:

    ColumnLinear  W [out, in] cut by outputs       q_proj, k_proj, v_proj, gate_proj, up_proj
    RowLinear     W [out, in] cut by inputs        out_proj, down_proj; sums of ranks, then the bias, once
    SharedLinear  whole on every rank, a part used k_proj and v_proj with fewer key heads than ranks
    SHARED_NORMS  whole on every rank              norms of one head, for all heads
    WHOLE_NORMS   cut by channels                  norms over all heads together
    ShardedRelativeBias  [buckets, H] cut by heads
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.nn import functional

from ..nn import RelativeBias
from ..scoring import Relative
from .local_heads import Group, entered, left, summed

__all__ = [
    "SHARED_NORMS",
    "WHOLE_NORMS",
    "ColumnLinear",
    "RowLinear",
    "ShardedRelativeBias",
    "SharedLinear",
    "local_part",
    "shard",
]


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    kind: type[nn.Module],
    weight: Placement,
    bias: Placement | None = None,
    **attributes: Any,
) -> None:
    """Lay a module's weight and bias over a mesh, and make the module one of `kind`, in place.

    Args:
        bias: as the weight, if left out.
        attributes: what else `kind` needs to know.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = bias if name == "bias" and bias is not None else weight
        placed = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    module.__class__ = kind
    module.__dict__.update(attributes, group=_Held(mesh.get_group()))


def local_part(parameter: Tensor) -> Tensor:
    """What of a parameter is on this rank; its gradient goes to the parameter."""
    if isinstance(parameter, DTensor):
        part: Tensor = parameter.to_local()
        return part
    return parameter


class _Held:
    """A group of processes, which has no copy, inside a module, which may be copied."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, _: object) -> _Held:
        return self


def _group(module: nn.Module) -> Group:
    return module.__dict__["group"].group


def _shared(module: nn.Module, name: str) -> Tensor | None:
    """A parameter that every rank has whole; its gradient is the sum over ranks."""
    parameter = getattr(module, name)
    return None if parameter is None else entered(local_part(parameter), _group(module))


class ColumnLinear(nn.Linear):
    """`nn.Linear` of which this rank computes some outputs; gradients of its input are this rank's alone."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., in] -> [.., out on this rank]"""
        bias = None if self.bias is None else local_part(self.bias)
        return functional.linear(input, local_part(self.weight), bias)


class RowLinear(nn.Linear):
    """`nn.Linear` of which this rank has some inputs: the sum over ranks, and the bias once."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., in on this rank] -> [.., out]"""
        output = left(functional.linear(input, local_part(self.weight)), _group(self))
        return output if self.bias is None else output + local_part(self.bias).to(output.dtype)


class SharedLinear(nn.Linear):
    """`nn.Linear` that every rank has whole; it uses the outputs `used`, (first, count) of them."""

    used: tuple[int, int]

    def forward(self, input: Tensor) -> Tensor:
        """[.., in] -> [.., outputs used on this rank]"""
        weight, bias = (_shared(self, name) for name in ("weight", "bias"))
        assert weight is not None
        return functional.linear(
            input, weight.narrow(0, *self.used), None if bias is None else bias.narrow(0, *self.used)
        )


class _SharedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, _shared(self, "weight"), self.eps)


class _SharedLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (_shared(self, name) for name in ("weight", "bias"))
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class _WholeNorm(nn.Module):
    """A norm over the channels of all heads, `QKNorm(whole=True)`: means are over ranks."""

    width: int  # channels of all heads
    copies: int  # how many ranks hold each of them
    used: tuple[int, int] | None  # of a norm that every rank has whole, the channels that are here

    def _mean(self, x: Tensor) -> Tensor:
        """Over the channels of all ranks, [.., 1]; those that several ranks hold count once."""
        return summed(x.sum(-1, keepdim=True), _group(self)) / (self.copies * self.width)

    def _part(self, name: str) -> Tensor | None:
        """A parameter's numbers for the channels that are here."""
        parameter = getattr(self, name)
        if parameter is None or self.used is None:
            return None if parameter is None else local_part(parameter)
        return entered(local_part(parameter), _group(self)).narrow(0, *self.used)


class _WholeRMSNorm(nn.RMSNorm, _WholeNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        normed = wide * torch.rsqrt(self._mean(wide.square()) + eps)
        weight = self._part("weight")
        return (normed if weight is None else normed * weight).to(x.dtype)


class _WholeLayerNorm(nn.LayerNorm, _WholeNorm):
    def forward(self, input: Tensor) -> Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - self._mean(wide)
        normed = centred * torch.rsqrt(self._mean(centred.square()) + self.eps)
        weight, bias = self._part("weight"), self._part("bias")
        normed = normed if weight is None else normed * weight
        return (normed if bias is None else normed + bias).to(input.dtype)


SHARED_NORMS: dict[type, type[nn.Module]] = {nn.RMSNorm: _SharedRMSNorm, nn.LayerNorm: _SharedLayerNorm}
WHOLE_NORMS: dict[type, type[nn.Module]] = {nn.RMSNorm: _WholeRMSNorm, nn.LayerNorm: _WholeLayerNorm}


class ShardedRelativeBias(RelativeBias):
    """`RelativeBias` of the heads that are on this rank."""

    def forward(self) -> Relative:
        """What `bias=` takes."""
        weight = local_part(self.weight)
        return Relative(weight[self.buckets.by_offset(weight.device)].t())
