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

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from ..arguments import autocasting

__all__ = ["Packed", "ordinary", "pack", "project"]


class Packed:
    """Some layers whose parameters lie side by side, and the blocks behind them."""

    __slots__ = ("_places", "bias", "sizes", "weight")

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        self.weight = _block(weights)  # [N, E]
        self.bias = None if biases[0] is None else _block(biases)  # [N]
        self.sizes = [len(weight) for weight in weights]
        self._places = [
            (
                layer,
                layer.weight,
                layer.weight.data_ptr(),
                layer.weight.shape,
                layer.bias,
                0 if layer.bias is None else layer.bias.data_ptr(),
            )
            for layer in layers
        ]

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are the same layers, with their parameters where they were and no hooks on them."""
        if (
            torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
            or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
        ):  # fmt: skip
            return False
        for layer, (known, weight, weight_at, shape, bias, bias_at) in zip(layers, self._places, strict=True):
            if layer is not known:
                return False
            held = layer.__dict__
            if (
                held["_forward_hooks"] or held["_forward_pre_hooks"]
                or held["_backward_hooks"] or held["_backward_pre_hooks"] or "forward" in held
            ):  # fmt: skip
                return False
            parameters = held["_parameters"]
            if parameters.get("weight") is not weight or parameters.get("bias") is not bias:
                return False
            if weight.data_ptr() != weight_at or weight.shape != shape or not weight.is_contiguous():
                return False
            if weight.dtype is not self.weight.dtype or (bias is not None and bias.data_ptr() != bias_at):
                return False
        return self.weight.data_ptr() == self._places[0][2]  # else its memory was given back

    def __call__(self, x: Tensor) -> Tensor:
        """All of layer(x) side by side, [.., N], without a way back."""
        return nn.functional.linear(x, self.weight, self.bias)


def pack(layers: Sequence[nn.Module]) -> Packed | None:
    """Lay the parameters of these layers one after another; they stay the same objects.

    None, and nothing is changed, if that cannot be done: layers that are not plain `nn.Linear`, differ in
    dtype, device or input width, are tied, have no memory (meta) or share it with other processes.
    """
    if not all(type(layer) is nn.Linear for layer in layers):
        return None
    weights: list[Any] = [layer._parameters.get("weight") for layer in layers]
    biases: list[Any] = [layer._parameters.get("bias") for layer in layers]
    bare = all(bias is None for bias in biases)
    if not _can_move(weights) or not (bare or _can_move(biases)):
        return None
    with torch.no_grad():
        for group in (weights,) if bare else (weights, biases):
            if not _side_by_side(group):
                block = torch.cat([each.data for each in group])
                for each, part in zip(group, block.split([len(each) for each in group]), strict=True):
                    each.data = part
        return Packed(layers)  # type: ignore[arg-type]


def project(layers: Sequence[nn.Module], packed: Packed | None, x: Tensor) -> Sequence[Tensor]:
    """layer(x) for every layer, by one matrix product where nothing would notice the difference."""
    if packed is None or not ordinary(x) or not packed.holds(layers):
        return [layer(x) for layer in layers]
    if torch.is_grad_enabled():
        parameters = [layer.weight for layer in layers]
        if packed.bias is not None:
            parameters += [layer.bias for layer in layers]
        if x.requires_grad or any(each.requires_grad for each in parameters):
            found: tuple[Tensor, ...] = _Project.apply(x, packed, *parameters)
            return found
    return packed(x).split_with_sizes(packed.sizes, dim=-1)


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


def _can_move(parameters: Sequence[Any]) -> bool:
    first = parameters[0]
    for each in parameters:
        if type(each) is not nn.Parameter or each.is_meta or (each.is_cpu and each.is_shared()):
            return False
        if each.dtype != first.dtype or each.device != first.device or each.shape[1:] != first.shape[1:]:
            return False
    return len({each.data_ptr() for each in parameters}) == len(parameters)  # tied ones stay tied


def _side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in the same memory."""
    end = tensors[0].data_ptr()
    for each in tensors:
        if each.data_ptr() != end or not each.is_contiguous():
            return False
        end += each.nbytes
    memory = tensors[0].untyped_storage()
    return end <= memory.data_ptr() + memory.nbytes()


def _block(tensors: Sequence[Tensor]) -> Tensor:
    """What lies side by side, as one tensor without a history."""
    first = tensors[0].detach()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


class _Project(torch.autograd.Function):
    """x, W_1 .. W_n, b_1 .. b_n -> x W_1^T + b_1, .., x W_n^T + b_n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *parameters[: len(packed.sizes)])
        ctx.set_materialize_grads(False)
        return packed(x).split_with_sizes(packed.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad
        sizes = [len(weight) for weight in weights]
        given = [x.new_zeros(*x.shape[:-1], n) if g is None else g for g, n in zip(grads, sizes, strict=True)]
        grad = torch.cat(given, dim=-1)  # [.., N]
        # A derivative of this derivative needs each weight in the graph; a hook on saved tensors may have
        # brought back copies.
        apart = torch.is_grad_enabled() or not _side_by_side(weights)
        dx = grad @ (torch.cat(weights) if apart else _block(weights)) if needs_x else None
        found: list[Tensor | None] = [None] * len(needed)
        rows = grad.reshape(-1, sum(sizes))  # [M, N]; flatten has no rule for gradients in batches
        if any(needed[: len(weights)]):
            found[: len(weights)] = (rows.T @ x.flatten(0, -2)).split(sizes)
        if any(needed[len(weights) :]):
            found[len(weights) :] = rows.sum(0).split(sizes)
        return dx, None, *(g if wanted else None for g, wanted in zip(found, needed, strict=True))
