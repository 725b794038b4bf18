"""Several linear layers of one input as one matrix product; and whether anybody could notice a shortcut.

The layers stay what they are: `nn.Linear`, each with a weight of its own that hooks, optimisers and other
tools find. Only their memory is shared: their weights lie one after another in one block, so that the block
itself, seen as a single matrix, is the packed weight. Nothing is copied in a call, and there is no second
copy that could go stale: whoever writes to a weight in place has written to the packed one.

    block   [ W_q ]          q_proj.weight = block[:HD]
            [ W_k ]          k_proj.weight = block[HD:HD+HkD]        x @ block.T = [ q | k | v ]
            [ W_v ]          v_proj.weight = block[HD+HkD:]

Whether the weights still lie like that is asked in every call (a weight may have been moved, replaced, hooked
or wrapped); where they do not, each layer is called for itself.

Every other shortcut past a module asks the same questions: is the module as it was made and heard by nobody
(`is_untouched`), are its parameters plain (`parameters_of`), is nothing at work around the call (`ordinary`,
`unseen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Linear, Parameter
from torch.nn.modules import module as torch_module

from ..arguments import autocasting
from ..engines.plain import transforms_are_active

__all__ = [
    "OUT_PROJ",
    "PLAIN",
    "Packed",
    "is_untouched",
    "ordinary",
    "pack",
    "parameters_of",
    "project",
    "unseen",
]

Place = tuple[int, torch.Size, torch.dtype]  # where a parameter is, and what

PLAIN = (Tensor, Parameter)
LINEAR_FORWARD = Linear.forward
MISSING: Any = object()
OUT_PROJ = nn.modules.linear.NonDynamicallyQuantizableLinear  # torch's class has one


def is_untouched(
    layer: object, kind: type[nn.Module] = Linear, forward: Callable[..., object] = LINEAR_FORWARD
) -> bool:
    """Whether nobody could notice that a module was not called: every shortcut past a module asks this.

    It is of this very class (not parametrised, sharded, quantised, wrapped or replaced), and no hook, local
    or global, and no other forward, its own or its class's, hears of a call.
    """
    return type(layer) is kind and kind.forward is forward and _no_global_hooks() and _nothing_on((layer,))


def parameters_of(layer: nn.Module, *names: str) -> list[Tensor | None] | None:
    """Parameters as they lie in a module; None if one is not there or not plain: pruned, sharded, quantised.

    A parameter that the module does without is None in the list.
    """
    held: dict[str, Tensor | None] = layer.__dict__["_parameters"]
    parameters: list[Tensor | None] = []
    for name in names:
        parameter = held.get(name, MISSING)
        if parameter is not None and type(parameter) not in PLAIN:
            return None
        parameters.append(parameter)
    return parameters


def _no_global_hooks() -> bool:
    """No hook that every module has."""
    return not (
        torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    )  # fmt: skip


def _nothing_on(modules: Sequence[nn.Module]) -> bool:
    """No hook on any of these modules, no forward of its own, not even a compiled one."""
    for module in modules:
        held = module.__dict__
        if (
            held["_forward_hooks"] or held["_forward_pre_hooks"]
            or held["_backward_hooks"] or held["_backward_pre_hooks"] or "forward" in held
            or held.get("_compiled_call_impl") is not None
        ):  # fmt: skip
            return False
    return True


class Packed:
    """The blocks behind some layers, and where each layer's parameters were when they were laid out.

    What is asked for is always some of its layers up to the last: q, k and v, or k and v alone.
    """

    __slots__ = ("_memories", "_places", "bias", "sizes", "takes", "weight")

    def __init__(self, layers: Sequence[Linear], weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias  # [N, E], [N]
        self.takes = (weight.shape[1], weight.dtype, weight.device) if weight.is_floating_point() else None
        self.sizes = [len(layer.weight) for layer in layers]
        # of the weight and the bias of each
        self._places = [
            (_place_of(layer.weight), _place_of(layer._parameters.get("bias"))) for layer in layers
        ]
        # No parameter is kept alive, nor referred to weakly, but its memory is: torch swaps no tensors that
        # anybody refers to.
        parameters = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
        self._memories = [StorageWeakRef(parameter.untyped_storage()) for parameter in parameters]

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A deep copy or a pickle holds None in its place: a block belongs to its own parameters."""
        return _nothing, ()

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are its last layers, untouched and with their parameters where they were.

        Once a parameter is gone or has been moved, the block is of no use any more and is let go.
        """
        if Linear.forward is not LINEAR_FORWARD or not _no_global_hooks():
            return False
        if self._lie_here(layers):
            return _nothing_on(layers)
        # gone or elsewhere, and not that others stand in for them for a while
        if any(memory.expired() for memory in self._memories):
            self.weight, self.bias, self.takes, self._places = self.weight.new_empty(0, 0), None, None, []
        return False

    def _lie_here(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the parameters of its last layers are those of these, whatever is hooked to them."""
        places = self._places  # as they are now: another thread may let the block go
        at = len(places) - len(layers)
        if at < 0:
            return False
        for layer in layers:
            if type(layer) is not Linear:
                return False
            parameters: dict[str, Tensor | None] = layer.__dict__["_parameters"]
            weight, bias = parameters.get("weight"), parameters.get("bias", MISSING)
            if type(weight) is not Parameter or not weight.is_contiguous():
                return False
            of_weight, of_bias = places[at]  # compared with `_place_of` each, a call less
            if (weight.data_ptr(), weight.shape, weight.dtype) != of_weight:
                return False
            if bias is not of_bias:  # both may be None
                if type(bias) is not Parameter or not bias.is_contiguous():
                    return False
                if (bias.data_ptr(), bias.shape, bias.dtype) != of_bias:
                    return False
            at += 1
        return True

    def parts(self, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """The weights that lie in the block, then the biases, of all its layers."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for layer in layers:
            held = layer.__dict__["_parameters"]
            weights.append(held["weight"])
            if self.bias is not None:
                biases.append(held["bias"])
        return (*weights, *biases)

    def again(self, layers: Sequence[nn.Module]) -> Packed | None:
        """The same for these layers if their parameters lie where they did, whatever is hooked to them."""
        if len(self._places) != len(layers) or not self._lie_here(layers):
            return None
        return Packed(layers, self.weight, self.bias)  # type: ignore[arg-type]

    def last(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Weight [n, E] and bias [n] of its last layers."""
        if count == len(self.sizes):
            return self.weight, self.bias
        rows = sum(self.sizes[-count:])
        return self.weight[-rows:], None if self.bias is None else self.bias[-rows:]


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
        # memory of another process, or a part of somebody's buffer: it has to stay there
        if (p.is_cpu and p.is_shared()) or p.untyped_storage().nbytes() != p.nbytes:
            return False
        kinds.add((p.dtype, p.device, p.shape[1:]))
        places.add(p.data_ptr())
    return len(kinds) == 1 and len(places) == len(parameters)  # tied ones stay tied


def _lay_out(parameters: Sequence[Parameter]) -> Tensor:
    """Their block. Each keeps a storage of its own, a window on the block's: to save one saves one."""
    block = torch.cat([parameter.data for parameter in parameters])
    memory: Any = block.untyped_storage()
    start = 0
    for parameter in parameters:
        window = memory[start : start + parameter.nbytes]
        parameter.data = block.new_empty(0).set_(window, 0, parameter.shape, block.stride())
        start += parameter.nbytes
    return block


def project(layers: Sequence[nn.Module], packed: Packed | None, x: Tensor) -> Sequence[Tensor]:
    """layer(x) for every layer, by one matrix product where nothing would notice the difference."""
    if packed is None or not ordinary(x) or not packed.holds(layers):
        return [layer(x) for layer in layers]
    (weight, bias), sizes = packed.last(len(layers)), packed.sizes[-len(layers) :]
    if torch.is_grad_enabled():
        weights = [layer._parameters["weight"] for layer in layers]
        biases = [] if bias is None else [layer._parameters["bias"] for layer in layers]
        if any(p.requires_grad for p in (*weights, *biases)):  # type: ignore[union-attr]
            weight, bias = _Join.apply(weight, bias, *weights, *biases)
            joined = nn.functional.linear(x, weight, bias)
            parts: tuple[Tensor, ...] = _Part.apply(joined, sizes, weights if x.requires_grad else [])
            return parts
        if x.requires_grad:
            return [layer(x) for layer in layers]  # for one frozen layer after another torch does no more
    return nn.functional.linear(x, weight, bias).split_with_sizes(sizes, dim=-1)


def ordinary(x: Tensor) -> bool:
    """Whether torch's plain operations are all that is at work: no compiler, tracer, transform, autocast."""
    return (
        type(x) in PLAIN
        and not torch.compiler.is_compiling()
        and not autocasting(x)
        and not transforms_are_active()
    )


def unseen(x: Tensor) -> bool:
    """Whether it is `ordinary` and nobody listens to torch's operations: no function or dispatch mode."""
    return ordinary(x) and not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


class _JoinContext(FunctionCtx):
    sizes: list[int]
    biased: bool


class _Join(torch.autograd.Function):
    """W_1 .. W_n, b_1 .. b_n -> the blocks they lie in, as they are; the way back cuts their gradients up."""

    @staticmethod
    def forward(
        ctx: _JoinContext, weight: Tensor, bias: Tensor | None, *parameters: Parameter
    ) -> tuple[Tensor, Tensor | None]:
        ctx.sizes, ctx.biased = [len(parameter) for parameter in parameters], bias is not None
        ctx.set_materialize_grads(False)
        return weight.detach(), None if bias is None else bias.detach()

    @staticmethod
    def backward(ctx: _JoinContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parts: list[Tensor | None] = []
        sizes = ctx.sizes[: len(ctx.sizes) // 2] if ctx.biased else ctx.sizes
        for grad in grads if ctx.biased else grads[:1]:
            parts += [None] * len(sizes) if grad is None else grad.split(sizes)
        return None, None, *parts


class _PartContext(FunctionCtx):
    weights: Sequence[Parameter]
    versions: list[int]


class _Part(torch.autograd.Function):
    """What the layers made side by side, taken apart.

    The product was of the block, so torch watches that and not the weights in it. This stands where every
    gradient comes by, and looks whether one was written to in place, as torch would.
    """

    @staticmethod
    def forward(
        ctx: _PartContext, joined: Tensor, sizes: list[int], weights: Sequence[Parameter]
    ) -> tuple[Tensor, ...]:
        ctx.weights, ctx.versions = weights, [weight._version for weight in weights]
        return joined.split_with_sizes(sizes, dim=-1)

    @staticmethod
    def backward(ctx: _PartContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for weight, version in zip(ctx.weights, ctx.versions, strict=True):
            if weight._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a projection's weight {list(weight.shape)} is at version {weight._version}; "
                    f"expected version {version} instead"
                )
        return torch.cat(grads, dim=-1), None, None
