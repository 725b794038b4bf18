"""A forward in which a model's logits are a linear function of what its layers write.

Layers add to the residual stream. With the outputs of attention and MLPs as they were, and with the scale of
each norm as it was in this forward, the logits are linear in the embedding and in each of these outputs. Here
a forward is run in which they are the inputs of the autograd graph, so that one backward gives the factor of
each; the sum of all products is the logit.

A model is not described: blocks are the modules that hold its attention layers, and of the linear maps inside
a block, those whose gradient is not zero write to the residual stream. The values of the forward stay as they
are, bit for bit.

Letters: B batch, T length, E width.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.layer_names import path_in_words
from ..listeners.model_structure import structure_of
from ..listeners.pruning import is_conv1d

EXPERTS = re.compile(r"Experts$")  # modules that hold their linear maps as tensors
NORM = re.compile(r"Norm$")
Hook = Callable[..., Any]


@dataclass(eq=False)
class ResidualStream:
    """Inputs of the linear function, as one forward made them.

    Attributes:
        embeddings: what enters the first block of each stack, [B, T, E].
        written: outputs of linear maps inside blocks, by (path, run of the module).
        biases: of norms and of linear maps behind the last block, each as large as the output.
        unembedded: the output of the unembedding, or None if the model has no such module.
        unembedding_bias: of that module, [V].
        unknown: norms that are neither a layer norm nor an RMS norm.
    """

    embeddings: list[Tensor] = field(default_factory=list)
    written: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    biases: list[Tensor] = field(default_factory=list)
    unembedded: Tensor | None = None
    unembedding_bias: Tensor | None = None
    unknown: list[str] = field(default_factory=list)


def blocks_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of a model's blocks by stack: the modules that hold its attention layers.

    Raises:
        ArgumentError: an attention layer that is in no numbered block.

    Example:
        >>> from headwise.models import Transformer, TransformerConfig
        >>> blocks_of(Transformer(TransformerConfig(vocab_size=7, d_model=4, num_heads=2, num_layers=2)))
        {'decoder.layers': ['decoder.layers.0', 'decoder.layers.1']}
    """
    stacks: dict[str, list[str]] = {}
    for path in structure_of(model).places:
        parts = path.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            raise ArgumentError(
                f"model must have numbered blocks: its attention is at {path_in_words(path)}; pass the "
                "model that the layer belongs to"
            )
        blocks = stacks.setdefault(".".join(parts[:at]), [])
        block = ".".join(parts[: at + 1])
        if block not in blocks:
            blocks.append(block)
    if not stacks:
        raise ArgumentError(f"model must have attention layers: found 0 in {type(model).__name__}")
    return stacks


@contextmanager
def residual_stream(model: nn.Module) -> Iterator[ResidualStream]:
    """Inside the block, a forward of the model fills what is returned; afterwards the model is as before.

    Parameters need no gradient inside, and get none.

    Raises:
        ArgumentError: no numbered blocks.
    """
    stream = ResidualStream()
    stacks = blocks_of(model)
    blocks = [block for stack in stacks.values() for block in stack]
    last = list(stacks.values())[-1][-1]
    is_behind = False  # whether the last block has run
    entered: set[nn.Module] = set()
    runs: Counter[str] = Counter()
    unembedding = getattr(model, "get_output_embeddings", lambda: None)()

    def leaf(values: Tensor) -> Tensor:
        return values.detach().requires_grad_()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module in entered:  # a block that runs again reads what it wrote
            return None
        entered.add(module)
        place, x = next((name, x) for name, x in named_arguments(args, kwargs) if is_states(x))
        stream.embeddings.append(leaf(x))
        if isinstance(place, str):
            return args, {**kwargs, place: stream.embeddings[-1]}
        return (*args[:place], stream.embeddings[-1], *args[place + 1 :]), kwargs

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal is_behind
        is_behind = True

    def write(path: str) -> Hook:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            values = output[0] if isinstance(output, tuple) else output
            new = stream.written[path, runs[path]] = leaf(values)
            runs[path] += 1
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    def normalise(path: str) -> Hook:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            (x, *_) = args
            if not x.requires_grad:
                return output
            linear = _norm_as_linear(module, x, output)
            if linear is None:
                stream.unknown.append(path)
                return output
            return _with_value(linear + add_bias(module, linear), output)

        return hook

    def add_bias(module: nn.Module, like: Tensor) -> Tensor | float:
        bias = getattr(module, "bias", None)
        if not isinstance(bias, Tensor):
            return 0.0
        stream.biases.append(leaf(bias.detach().to(like.dtype).expand(like.shape).clone()))
        return stream.biases[-1]

    def pass_on(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Behind the last block: biases of linear maps are inputs, activations keep output / input."""
        if not is_behind or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        if isinstance(module, nn.Linear) or is_conv1d(module):
            return _with_value(output + add_bias(module, output), output)
        if not args or args[0].shape != output.shape:
            return output  # such as a selection of positions
        x = args[0]
        return _with_value(x * torch.where(x == 0, 0, output / x).detach(), output)

    def unembed(module: nn.Module, args: Any, output: Tensor) -> None:
        stream.unembedded = output
        stream.unembedding_bias = getattr(module, "bias", None)

    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_, True)
        add = stack.enter_context
        for paths in stacks.values():
            first = model.get_submodule(paths[0])
            add(removed(first.register_forward_pre_hook(enter, with_kwargs=True)))
        add(removed(model.get_submodule(last).register_forward_hook(leave)))
        for path, module in model.named_modules():
            inside = any(path.startswith(f"{block}.") for block in blocks)
            if unembedding is not None and module is unembedding:
                add(removed(module.register_forward_hook(unembed)))
            elif NORM.search(type(module).__name__):
                add(removed(module.register_forward_hook(normalise(path))))
            elif inside and _is_writer(module):
                add(removed(module.register_forward_hook(write(path))))
            elif not inside and not module._modules and not isinstance(module, nn.Dropout | nn.Embedding):
                add(removed(module.register_forward_hook(pass_on)))
        with torch.inference_mode(False), torch.enable_grad():
            yield stream


@contextmanager
def removed(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    """Remove a hook at the end of the block."""
    try:
        yield
    finally:
        handle.remove()


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def is_states(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3


def _is_writer(module: nn.Module) -> bool:
    """Return True for a module whose output may be added to the residual stream."""
    return (
        isinstance(module, nn.Linear | nn.MultiheadAttention)
        or is_conv1d(module)
        or EXPERTS.search(type(module).__name__) is not None
    )


def _with_value(x: Tensor, value: Tensor) -> Tensor:
    """Return the value of one tensor with the gradient of another."""
    return value.detach() + (x - x.detach()).to(value.dtype)


def _norm_as_linear(module: nn.Module, x: Tensor, output: Tensor) -> Tensor | None:
    """Return a norm's output without its bias, linear in x: the scale is a constant. None: unknown norm."""
    wide = torch.promote_types(x.dtype, torch.float32)
    eps = next(
        (e for name in ("eps", "variance_epsilon") if isinstance(e := getattr(module, name, None), float)),
        0.0,
    )
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shift = 0.0 if bias is None else bias.to(wide)
    for centre in (isinstance(module, nn.LayerNorm), not isinstance(module, nn.LayerNorm)):
        y = x.to(wide)
        y = y - y.mean(-1, keepdim=True) if centre else y
        scale = (y.detach().square().mean(-1, keepdim=True) + eps).rsqrt()
        for added in (0.0, 1.0) if isinstance(weight, Tensor) else (0.0,):  # Gemma's weight begins at 0
            factor = scale if weight is None else scale * (weight.to(wide) + added)
            if _is_close(y * factor + shift, output):
                return y * factor
    return None


def _is_close(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding of the second's dtype."""
    eps = torch.finfo(y.dtype).eps
    error = max(2 * eps, 64 * torch.finfo(torch.float32).eps)  # RMS norms are often computed in float32
    x, y = x.detach(), y.detach().to(x.dtype)
    return x.shape == y.shape and bool((x - y).norm() <= error * y.norm())
