"""The layers of a module whose heads are sharded: linear layers, norms, a bias by distance.

Their parameters are DTensors, so that checkpoints, FSDP2 and optimisers know how they are placed; forward
computes with this rank's part of them, a plain tensor. `shard` places a module's parameters on a mesh and
makes it one of these classes:

    class                parameters                         of
    ColumnLinear         W [out, in] sharded by outputs     q_proj, k_proj, v_proj, gate_proj, up_proj
    RowLinear            W [out, in] sharded by inputs      out_proj, down_proj: all-reduce, then the bias
    SharedLinear         replicated, some outputs used      k_proj and v_proj with fewer key heads than ranks
    SHARED_NORMS         replicated                         norms of each head
    WHOLE_NORMS          sharded by channels                norms over all heads together
    ShardedRelativeBias  [buckets, H] sharded by heads      a bias by distance
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
from .local_heads import Group, copy_to_ranks, reduce_from_ranks, sum_over_ranks


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    kind: type[nn.Module],
    weight: Placement,
    bias: Placement | None = None,
    **attributes: Any,
) -> None:
    """Place a module's weight and bias on a mesh, and change its class to `kind`.

    Args:
        bias: the placement of the bias; default: that of the weight.
        attributes: set on the module, for `kind` to use.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = bias if name == "bias" and bias is not None else weight
        placed = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    module.__class__ = kind
    module.__dict__.update(attributes, group=_SharedGroup(mesh.get_group()))


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter as a plain tensor; gradients flow to the parameter."""
    if isinstance(parameter, DTensor):
        part: Tensor = parameter.to_local()
        return part
    return parameter


class _SharedGroup:
    """A process group in a module's dict; copies of the module share it, since it cannot be copied."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, _: object) -> _SharedGroup:
        return self


def _group(module: nn.Module) -> Group:
    """Return the process group of a sharded layer."""
    return module.__dict__["group"].group


def _shared(module: nn.Module, name: str) -> Tensor | None:
    """Return a replicated parameter, or None; its gradient is the sum over ranks."""
    parameter = getattr(module, name)
    return None if parameter is None else copy_to_ranks(local_part(parameter), _group(module))


class ColumnLinear(nn.Linear):
    """`nn.Linear` that computes this rank's outputs; its input's gradient is not summed over ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., in] -> [.., out on this rank]"""
        bias = None if self.bias is None else local_part(self.bias)
        return functional.linear(input, local_part(self.weight), bias)


class RowLinear(nn.Linear):
    """`nn.Linear` that has this rank's inputs: products are summed over ranks, the bias is added once."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., in on this rank] -> [.., out]"""
        output = reduce_from_ranks(functional.linear(input, local_part(self.weight)), _group(self))
        return output if self.bias is None else output + local_part(self.bias).to(output.dtype)


class SharedLinear(nn.Linear):
    """`nn.Linear` with replicated parameters, of which each rank computes some outputs."""

    used: tuple[int, int]  # the first output that is computed, and how many

    def forward(self, input: Tensor) -> Tensor:
        """[.., in] -> [.., outputs used on this rank]"""
        weight, bias = (_shared(self, name) for name in ("weight", "bias"))
        assert weight is not None
        return functional.linear(
            input, weight.narrow(0, *self.used), None if bias is None else bias.narrow(0, *self.used)
        )


class _SharedRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` with a replicated weight."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, _shared(self, "weight"), self.eps)


class _SharedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with replicated parameters."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (_shared(self, name) for name in ("weight", "bias"))
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class _WholeNorm(nn.Module):
    """A norm over the channels of all heads, `QKNorm(whole=True)`; its means are taken over all ranks."""

    width: int  # channels of all heads
    copies: int  # how many ranks hold each channel
    used: tuple[int, int] | None  # of a replicated norm: this rank's first channel, and how many

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean over the channels of all ranks, [.., 1]; copies of a channel count once."""
        return sum_over_ranks(x.sum(-1, keepdim=True), _group(self)) / (self.copies * self.width)

    def _part(self, name: str) -> Tensor | None:
        """Return a parameter's values for the channels of this rank, or None."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        part = local_part(parameter)
        return part if self.used is None else copy_to_ranks(part, _group(self)).narrow(0, *self.used)


class _WholeRMSNorm(nn.RMSNorm, _WholeNorm):
    """`nn.RMSNorm` over the channels of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        normed = wide * torch.rsqrt(self._mean(wide.square()) + eps)
        weight = self._part("weight")
        return (normed if weight is None else normed * weight).to(x.dtype)


class _WholeLayerNorm(nn.LayerNorm, _WholeNorm):
    """`nn.LayerNorm` over the channels of all ranks."""

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
        """Return the bias of this rank's heads, as `bias=` takes it."""
        weight = local_part(self.weight)
        return Relative(weight[self.buckets.by_offset(weight.device)].t())
