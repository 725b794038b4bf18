"""Several linear layers of one input as one matrix product.

The layers stay what they are: `nn.Linear`, each with a weight of its own that hooks, optimisers and other
tools find. Only their memory is shared: their weights lie one after another in one block, so that the block
itself, seen as a single matrix, is the packed weight. Nothing is copied in a call, and there is no second
copy that could go stale: whoever writes to a weight in place has written to the packed one.

    block   [ W_q ]          q_proj.weight = block[:HD]
            [ W_k ]          k_proj.weight = block[HD:HD+HkD]        x @ block.T = [ q | k | v ]
            [ W_v ]          v_proj.weight = block[HD+HkD:]

Whether the weights still lie like that is asked in every call (a weight may have been moved, replaced, hooked
or wrapped); where they do not, each layer is called for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from ..arguments import autocasting

__all__ = ["Packed", "ordinary", "pack", "project"]


class _Place:
    """A layer, and where its parameters were when they were laid out; it keeps none of them alive."""

    __slots__ = ("bias", "bias_at", "dtype", "layer", "shape", "weight", "weight_at")

    def __init__(self, layer: nn.Linear) -> None:
        weight, bias = layer.weight, layer._parameters["bias"]
        self.layer, self.weight, self.bias = ref(layer), ref(weight), None if bias is None else ref(bias)
        self.weight_at, self.shape, self.dtype = weight.data_ptr(), weight.shape, weight.dtype
        self.bias_at = 0 if bias is None else bias.data_ptr()

    def is_of(self, weight: Any, bias: Any) -> bool:
        """Whether these are the same parameters, unmoved."""
        own = self.weight()
        if own is None or weight is not own or own.data_ptr() != self.weight_at:
            return False
        if own.shape != self.shape or own.dtype is not self.dtype or not own.is_contiguous():
            return False
        if self.bias is None:
            return bias is None
        own = self.bias()
        return own is not None and bias is own and own.data_ptr() == self.bias_at

    def is_left(self) -> bool:
        """Whether the parameters are gone, or elsewhere; not if others only stand in for them for a while."""
        weight, bias = self.weight(), None if self.bias is None else self.bias()
        return not self.is_of(weight, bias)


class Packed:
    """The blocks behind some layers, and where each layer's parameters were when they were laid out.

    What is asked for is always some of its layers up to the last: q, k and v, or k and v alone.
    """

    __slots__ = ("_places", "bias", "sizes", "weight")

    def __init__(self, layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias  # [N, E], [N]
        self.sizes = [len(layer.weight) for layer in layers]
        self._places = [_Place(layer) for layer in layers]

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are its last layers, with their parameters where they were and no hooks on them.

        Once a parameter is gone or has been moved, the block is of no use any more and is let go.
        """
        if (
            torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
            or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
        ):  # fmt: skip
            return False
        places = self._places[-len(layers) :]
        if len(places) != len(layers):
            return False
        for layer, place in zip(layers, places, strict=True):
            held = layer.__dict__
            if (
                layer is not place.layer() or type(layer) is not nn.Linear or "forward" in held
                or held["_forward_hooks"] or held["_forward_pre_hooks"]
                or held["_backward_hooks"] or held["_backward_pre_hooks"]
            ):  # fmt: skip
                return self._or_let_go()
            parameters = held["_parameters"]
            if not place.is_of(parameters.get("weight"), parameters.get("bias")):
                return self._or_let_go()
        return True

    def _or_let_go(self) -> bool:
        """False; and unless all parameters are still there, forget them."""
        if any(place.is_left() for place in self._places):
            self.weight, self.bias, self._places = self.weight.new_empty(0, 0), None, []
        return False

    def last(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Weight [n, E] and bias [n] of its last layers."""
        if count == len(self.sizes):
            return self.weight, self.bias
        rows = sum(self.sizes[-count:])
        return self.weight[-rows:], None if self.bias is None else self.bias[-rows:]


def pack(layers: Sequence[nn.Module]) -> Packed | None:
    """Lay the parameters of these layers one after another; they stay the same objects.

    None, and nothing is changed, if that cannot be done: layers that are not plain `nn.Linear`, differ in
    dtype, device or input width, are tied to each other, have no memory (meta) or share it with others.
    """
    if not all(type(layer) is nn.Linear for layer in layers):
        return None
    weights: list[Any] = [layer._parameters.get("weight") for layer in layers]
    biases: list[Any] = [layer._parameters.get("bias") for layer in layers]
    bare = all(bias is None for bias in biases)
    if not _can_move(weights) or not (bare or _can_move(biases)):
        return None
    with torch.no_grad():
        return Packed(layers, _lay_out(weights), None if bare else _lay_out(biases))  # type: ignore[arg-type]


def _can_move(parameters: Sequence[Any]) -> bool:
    first = parameters[0]
    for each in parameters:
        if type(each) is not nn.Parameter or each.device.type not in ("cpu", "cuda"):
            return False
        if each.is_cpu and each.is_shared():
            return False
        if each.dtype != first.dtype or each.device != first.device or each.shape[1:] != first.shape[1:]:
            return False
    return len({each.data_ptr() for each in parameters}) == len(parameters)  # tied ones stay tied


def _lay_out(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Their block. Each keeps a storage of its own, a window on the block's: to save one saves one."""
    block = torch.cat([each.data for each in parameters])
    memory: Any = block.untyped_storage()
    start = 0
    for each in parameters:
        window = memory[start : start + each.nbytes]
        each.data = block.new_empty(0).set_(window, 0, each.shape, block.stride())
        start += each.nbytes
    return block


def project(layers: Sequence[nn.Module], packed: Packed | None, x: Tensor) -> Sequence[Tensor]:
    """layer(x) for every layer, by one matrix product where nothing would notice the difference."""
    if packed is None or not ordinary(x) or not packed.holds(layers):
        return [layer(x) for layer in layers]
    weight, bias = packed.last(len(layers))
    if torch.is_grad_enabled():
        parameters = [layer._parameters["weight"] for layer in layers]
        if bias is not None:
            parameters += [layer._parameters["bias"] for layer in layers]
        learned = [each is not None and each.requires_grad for each in parameters]
        if any(learned):
            weight, bias = _Join.apply(weight, bias, *parameters)
        elif x.requires_grad:  # torch then notices a frozen weight that is written to before the way back
            return [layer(x) for layer in layers]
    return nn.functional.linear(x, weight, bias).split_with_sizes(packed.sizes[-len(layers) :], dim=-1)


def ordinary(x: Tensor) -> bool:
    """Whether torch's plain operations are all that is at work: no compiler, no transform, no autocast."""
    return (
        (type(x) is Tensor or type(x) is nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # torch.jit.trace would keep the block as a constant
        and not autocasting(x)
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


class _Join(torch.autograd.Function):
    """W_1 .. W_n, b_1 .. b_n -> the blocks they lie in, as they are; the way back cuts their gradients up."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, *parameters: nn.Parameter
    ) -> tuple[Tensor, Tensor | None]:
        ctx.parameters, ctx.versions = parameters, [each._version for each in parameters]
        ctx.set_materialize_grads(False)
        return weight.detach(), None if bias is None else bias.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        for each, version in zip(ctx.parameters, ctx.versions, strict=True):
            if each._version != version:  # what torch would have seen had it saved the parameter itself
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a projection's parameter {list(each.shape)} is at version {each._version}; "
                    f"expected version {version} instead"
                )
        sizes = [len(each) for each in ctx.parameters]
        count = sum(each.ndim == 2 for each in ctx.parameters)
        found: list[Tensor | None] = []
        for grad, rows in zip(grads, (sizes[:count], sizes[count:]), strict=True):
            found += [None] * len(rows) if grad is None else grad.split(rows)
        return None, None, *found
