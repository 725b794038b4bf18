"""Several linear layers of one input as one matrix product, and the checks that such a shortcut is unnoticed.

The layers stay what they are: `nn.Linear`, each with a weight of its own that hooks, optimisers and other
tools find. Only their memory is shared: their weights lie one after another in one block, so that the block
itself, seen as a single matrix, is the packed weight. Nothing is copied in a call, and there is no second
copy that could go stale: whoever writes to a weight in place has written to the packed one.

    block   [ W_q ]          q_proj.weight = block[:HD]
            [ W_k ]          k_proj.weight = block[HD:HD+HkD]        x @ block.T = [ q | k | v ]
            [ W_v ]          v_proj.weight = block[HD+HkD:]

Every call checks whether the weights are still in the block (a weight may have been moved, replaced, hooked
or wrapped); where they are not, each layer is called separately.

Every other shortcut past a module makes the same checks: the module is unchanged and has no hooks
(`is_untouched`); its parameters are plain (`parameters_of`); no compiler, transform or mode is active around
the call (`is_plain_call`, `is_unobserved`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Linear, Parameter
from torch.nn.modules import module as torch_module

from ..arguments import autocasting
from ..engines.plain import transforms_are_active

Place = tuple[int, torch.Size, torch.dtype]  # address, shape and dtype of a parameter

PLAIN_TYPES = (Tensor, Parameter)
LINEAR_FORWARD = Linear.forward
MISSING: Any = object()
OUT_PROJ = nn.modules.linear.NonDynamicallyQuantizableLinear  # torch's class has one


def is_untouched(
    layer: object, kind: type[nn.Module] = Linear, forward: Callable[..., object] = LINEAR_FORWARD
) -> bool:
    """Return True if a shortcut may skip the call of a module, because no other code can notice.

    The module is of this very class (not parametrised, sharded, quantised, wrapped or replaced), has no hook,
    local or global, and neither it nor its class has another forward.
    """
    return type(layer) is kind and kind.forward is forward and _no_global_hooks() and _nothing_on((layer,))


def parameters_of(layer: nn.Module, *names: str) -> list[Tensor | None] | None:
    """Return the parameters of a module; None if one is missing or not plain: pruned, sharded, quantised.

    A parameter that the module does without is None in the list.
    """
    parameters_by_name: dict[str, Tensor | None] = layer.__dict__["_parameters"]
    parameters: list[Tensor | None] = []
    for name in names:
        parameter = parameters_by_name.get(name, MISSING)
        if parameter is not None and type(parameter) not in PLAIN_TYPES:
            return None
        parameters.append(parameter)
    return parameters


def _no_global_hooks() -> bool:
    """Return True if no hook applies to all modules."""
    return not (
        torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    )  # fmt: skip


def _nothing_on(modules: Sequence[nn.Module]) -> bool:
    """Return True if none of these modules has a hook, a forward of its own or a compiled call."""
    for module in modules:
        fields = module.__dict__
        if (
            fields["_forward_hooks"] or fields["_forward_pre_hooks"]
            or fields["_backward_hooks"] or fields["_backward_pre_hooks"] or "forward" in fields
            or fields.get("_compiled_call_impl") is not None
        ):  # fmt: skip
            return False
    return True


class Packed:
    """The blocks behind some layers, and the addresses of the layers' parameters in them."""

    __slots__ = ("_memories", "_places", "bias", "takes", "weight")

    def __init__(self, layers: Sequence[Linear], weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias  # [N, E], [N]
        self.takes = (weight.shape[1], weight.dtype, weight.device) if weight.is_floating_point() else None
        # of the weight and the bias of each layer
        self._places = [
            (_place_of(layer.weight), _place_of(layer._parameters.get("bias"))) for layer in layers
        ]
        # The parameters are referred to by their storages alone, weakly, since torch swaps no tensor that has
        # a reference, weak or not.
        parameters = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
        self._memories = [StorageWeakRef(parameter.untyped_storage()) for parameter in parameters]

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make a deep copy or a pickle hold None instead: a block belongs to its own parameters."""
        return _nothing, ()

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Return True if these are the block's layers, untouched and with their parameters where they were.

        The block is released once the memory of a parameter is freed, because it was deleted or moved.
        """
        if Linear.forward is not LINEAR_FORWARD or not _no_global_hooks():
            return False
        if self._are_in_place(layers):
            return _nothing_on(layers)
        # released only if a parameter is gone, not if others replace it for a while
        if any(memory.expired() for memory in self._memories):
            self.weight, self.bias, self.takes, self._places = self.weight.new_empty(0, 0), None, None, []
        return False

    def _are_in_place(self, layers: Sequence[nn.Module]) -> bool:
        """Return True if the block's parameters are those of these layers, whether hooked or not."""
        places = self._places  # a local reference: another thread may release the block
        if len(places) != len(layers):
            return False
        for layer, (of_weight, of_bias) in zip(layers, places, strict=True):
            if type(layer) is not Linear:
                return False
            parameters: dict[str, Tensor | None] = layer.__dict__["_parameters"]
            weight, bias = parameters.get("weight"), parameters.get("bias", MISSING)
            if type(weight) is not Parameter or not weight.is_contiguous():
                return False
            if (weight.data_ptr(), weight.shape, weight.dtype) != of_weight:
                return False
            if bias is not of_bias:  # both may be None
                if type(bias) is not Parameter or not bias.is_contiguous():
                    return False
                if (bias.data_ptr(), bias.shape, bias.dtype) != of_bias:
                    return False
        return True

    def parts(self, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """Return the weights of all layers in the block, then their biases."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for layer in layers:
            parameters_by_name = layer.__dict__["_parameters"]
            weights.append(parameters_by_name["weight"])
            if self.bias is not None:
                biases.append(parameters_by_name["bias"])
        return (*weights, *biases)

    def again(self, layers: Sequence[nn.Module]) -> Packed | None:
        """Return these weights for `layers` if their parameters have not moved; hooks are ignored."""
        if not self._are_in_place(layers):
            return None
        return Packed(layers, self.weight, self.bias)  # type: ignore[arg-type]


def _place_of(parameter: Tensor | None) -> Place | None:
    return None if parameter is None else (parameter.data_ptr(), parameter.shape, parameter.dtype)


def _nothing() -> None:
    return None


def pack(layers: Sequence[nn.Module]) -> Packed | None:
    """Lay the parameters of these layers one after another; they stay the same objects.

    None, and nothing is changed, if that cannot be done: layers that are not plain `nn.Linear`, differ in
    dtype, device or input width, are tied to each other, have no memory (meta) or share it with others.
    """
    if not all(type(layer) is Linear for layer in layers):
        return None
    weights = [layer._parameters.get("weight") for layer in layers]
    biases = [layer._parameters.get("bias") for layer in layers]
    bare = all(bias is None for bias in biases)
    if not _can_move(weights) or not (bare or _can_move(biases)):
        return None
    with torch.no_grad():
        return Packed(layers, _lay_out(weights), None if bare else _lay_out(biases))  # type: ignore[arg-type]


def _can_move(parameters: Sequence[Tensor | None]) -> TypeGuard[Sequence[Parameter]]:
    kinds, places = set(), set()
    for p in parameters:
        if type(p) is not Parameter or p.device.type not in ("cpu", "cuda") or p.is_inference():
            return False
        # memory shared with another process or buffer must not move
        if (p.is_cpu and p.is_shared()) or p.untyped_storage().nbytes() != p.nbytes:
            return False
        kinds.add((p.dtype, p.device, p.shape[1:]))
        places.add(p.data_ptr())
    return len(kinds) == 1 and len(places) == len(parameters)  # tied ones stay tied


def _lay_out(parameters: Sequence[Parameter]) -> Tensor:
    """Move the parameters to one block, each with a storage of its own: saving one saves no other."""
    block = torch.cat([parameter.data for parameter in parameters])
    memory: Any = block.untyped_storage()
    start = 0
    for parameter in parameters:
        window = memory[start : start + parameter.nbytes]
        parameter.data = block.new_empty(0).set_(window, 0, parameter.shape, block.stride())
        start += parameter.nbytes
    return block


def is_plain_call(x: Tensor) -> bool:
    """Return True if there is no compiler, tracer, transform or autocast around the call."""
    return (
        type(x) in PLAIN_TYPES
        and not torch.compiler.is_compiling()
        and not autocasting(x)
        and not transforms_are_active()
    )


def is_unobserved(x: Tensor) -> bool:
    """Return True if it is a plain call and no function or dispatch mode sees torch's operations."""
    return is_plain_call(x) and not (
        torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    )
