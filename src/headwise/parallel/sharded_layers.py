"""The parts of a layer whose heads lie over ranks: linear layers, norms, a bias by distance.

Their parameters are DTensors, so that checkpoints, FSDP2 and optimisers know what lies where; what is
computed goes by this rank's part of them, a plain tensor. Each `Style` is one of `parallelize_module`'s: it
lays a module's parameters over a mesh and gives it the class that computes with them.

    Columns     W [out, in] cut by outputs       q_proj, k_proj, v_proj, gate_proj, up_proj
    Rows        W [out, in] cut by inputs        out_proj, down_proj; sums of ranks, then the bias, once
    SharedRows  whole on every rank, a part used k_proj and v_proj with fewer key heads than ranks
    SharedNorm  whole on every rank              norms of one head, for all heads
    WholeNorm   cut by channels                  norms over all heads together
    ByHead      [buckets, H] cut by heads        a bias by distance
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional

from ..nn import RelativeBias
from ..nn.rank_exchange import Group, entered, left, summed
from ..scoring import Relative

__all__ = ["ByHead", "Columns", "Rows", "SharedNorm", "SharedRows", "WholeNorm", "local_part"]


def local_part(parameter: Tensor) -> Tensor:
    """What of a parameter is on this rank; its gradient goes to the parameter."""
    if isinstance(parameter, DTensor):
        part: Tensor = parameter.to_local()
        return part
    return parameter


class Style(ParallelStyle):
    """Parameters laid over a mesh by name, and a class that computes with this rank's part of them."""

    placements: ClassVar[dict[str, Any]] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(
                parameter.detach(), device_mesh, [self.placements[name]], src_data_rank=self.src_data_rank
            )
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        module.__class__ = self._class_of(module)
        module.__dict__["group"] = _Held(device_mesh.get_group())
        return module

    def _class_of(self, module: nn.Module) -> type[nn.Module]:
        raise NotImplementedError


class _Held:
    """A group of processes, which has no copy, inside a module, which may be copied."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, _: object) -> _Held:
        return self


def _group(module: nn.Module) -> Group:
    return module.__dict__["group"].group


class ColumnLinear(nn.Linear):
    """`nn.Linear` of which this rank computes some outputs; gradients of its input are this rank's alone."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., in] -> [.., out on this rank]"""
        bias = None if self.bias is None else local_part(self.bias)
        return functional.linear(input, local_part(self.weight), bias)


class Columns(Style):
    """Outputs over ranks."""

    placements: ClassVar[dict[str, Any]] = {"weight": Shard(0), "bias": Shard(0)}

    def _class_of(self, module: nn.Module) -> type[nn.Module]:
        return ColumnLinear


class RowLinear(nn.Linear):
    """`nn.Linear` of which this rank has some inputs: the sum over ranks, and the bias once."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., in on this rank] -> [.., out]"""
        output = left(functional.linear(input, local_part(self.weight)), _group(self))
        return output if self.bias is None else output + local_part(self.bias).to(output.dtype)


class Rows(Style):
    """Inputs over ranks."""

    placements: ClassVar[dict[str, Any]] = {"weight": Shard(1), "bias": Replicate()}

    def _class_of(self, module: nn.Module) -> type[nn.Module]:
        return RowLinear


class SharedRowsLinear(nn.Linear):
    """`nn.Linear` that every rank has whole, and uses some outputs of; gradients are those of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., in] -> [.., outputs used on this rank]"""
        group, (first, count) = _group(self), self.__dict__["used"]
        weight = entered(local_part(self.weight), group).narrow(0, first, count)
        bias = None
        if self.bias is not None:
            bias = entered(local_part(self.bias), group).narrow(0, first, count)
        return functional.linear(input, weight, bias)


class SharedRows(Style):
    """The whole layer on every rank, of which each uses `count` outputs from `first` on."""

    placements: ClassVar[dict[str, Any]] = {"weight": Replicate(), "bias": Replicate()}

    def __init__(self, first: int, count: int) -> None:
        self.used = (first, count)

    def _class_of(self, module: nn.Module) -> type[nn.Module]:
        module.__dict__["used"] = self.used
        return SharedRowsLinear


class _SharedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else entered(local_part(self.weight), _group(self))
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class _SharedLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        group = _group(self)
        weight, bias = (
            None if p is None else entered(local_part(p), group) for p in (self.weight, self.bias)
        )
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class SharedNorm(Style):
    """A norm of one head, the same for all: each rank's heads add to its gradient."""

    placements: ClassVar[dict[str, Any]] = {"weight": Replicate(), "bias": Replicate()}

    def _class_of(self, module: nn.Module) -> type[nn.Module]:
        return _SharedRMSNorm if isinstance(module, nn.RMSNorm) else _SharedLayerNorm


class _Whole:
    """What norms over the channels of all heads have in common; see `QKNorm(whole=True)`."""

    @staticmethod
    def mean(module: nn.Module, x: Tensor) -> Tensor:
        """Over the channels of all ranks, [.., 1]; those that several ranks hold count once."""
        copies, width = module.__dict__["copies"], module.__dict__["width"]
        return summed(x.sum(-1, keepdim=True), _group(module)) / (copies * width)

    @staticmethod
    def part(module: nn.Module, parameter: Tensor | None) -> Tensor | None:
        """The parameter's numbers for the channels that are here."""
        if parameter is None:
            return None
        used = module.__dict__["used"]
        if used is None:
            return local_part(parameter)
        return entered(local_part(parameter), _group(module)).narrow(0, *used)


class _WholeRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        normed = wide * torch.rsqrt(_Whole.mean(self, wide.square()) + eps)
        weight = _Whole.part(self, self.weight)
        return (normed if weight is None else normed * weight).to(x.dtype)


class _WholeLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - _Whole.mean(self, wide)
        normed = centred * torch.rsqrt(_Whole.mean(self, centred.square()) + self.eps)
        weight, bias = _Whole.part(self, self.weight), _Whole.part(self, self.bias)
        normed = normed if weight is None else normed * weight
        return (normed if bias is None else normed + bias).to(input.dtype)


class WholeNorm(Style):
    """A norm over the channels of all heads: means are over ranks.

    Args:
        used: of a norm that every rank has whole, as `SharedRows` has it, the channels that are here.
        width: channels of all heads.
        copies: how many ranks hold each of them.
    """

    def __init__(self, width: int, used: tuple[int, int] | None, copies: int) -> None:
        self.width, self.used, self.copies = width, used, copies
        placed = Shard(0) if used is None else Replicate()
        self.placements = {"weight": placed, "bias": placed}  # type: ignore[misc]

    def _class_of(self, module: nn.Module) -> type[nn.Module]:
        module.__dict__.update(width=self.width, used=self.used, copies=self.copies)
        return _WholeRMSNorm if isinstance(module, nn.RMSNorm) else _WholeLayerNorm


class ShardedRelativeBias(RelativeBias):
    """`RelativeBias` of the heads that are on this rank."""

    def forward(self) -> Relative:
        """What `bias=` takes."""
        weight = local_part(self.weight)
        return Relative(weight[self.buckets.by_offset(weight.device)].t())


class ByHead(Style):
    """Heads over ranks."""

    placements: ClassVar[dict[str, Any]] = {"weight": Shard(1)}

    def _class_of(self, module: nn.Module) -> type[nn.Module]:
        return ShardedRelativeBias
