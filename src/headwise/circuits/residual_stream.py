"""A forward in which a model's logits are a linear function of what its layers write.

Layers add to the residual stream. With the outputs of attention and MLPs as they were, and with the scale of
each norm as it was in this forward, the logits are linear in the embedding and in each of these outputs. Here
a forward is run in which they are the inputs of the autograd graph, so that one backward gives the factor of
each; the sum of all products is the logit.

A model is not described: blocks are the numbered modules beside those that hold its attention layers; of the
linear maps inside a block, those whose gradient is not zero write to the residual stream. Gates and routers
inside a block are constants. The values of the forward stay as they are, bit for bit.

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
GATE = re.compile(r"(^|\.)(\w*gate|router)$")
NORM = re.compile(r"Norm")
EPSILONS = (1e-5, 1e-6)  # of norms that do not say theirs
Hook = Callable[..., Any]


@dataclass(eq=False)
class ResidualStream:
    """Inputs of the linear function, as one forward made them.

    Attributes:
        embeddings: what enters the first block of each stack, [B, T, E].
        written: outputs of linear maps inside blocks, by (path, run of the module).
        biases: of norms and of linear maps outside blocks, as large as the output; of the unembedding
            [B, 1, V].
        unembedded: the output of the unembedding, or None if the model has no such module.
        unknown: norms that are neither a layer norm nor an RMS norm.
    """

    embeddings: list[Tensor] = field(default_factory=list)
    written: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    biases: list[Tensor] = field(default_factory=list)
    unembedded: Tensor | None = None
    unknown: list[str] = field(default_factory=list)


def blocks_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of a model's blocks by stack: all numbered modules of a stack that holds attention.

    Raises:
        ArgumentError: an attention layer that is in no numbered block.

    Example:
        >>> from headwise.models import Transformer, TransformerConfig
        >>> blocks_of(Transformer(TransformerConfig(vocab_size=7, d_model=4, num_heads=2, num_layers=2)))
        {'decoder.layers': ['decoder.layers.0', 'decoder.layers.1']}
    """
    stacks: dict[str, list[str]] = {}
    for path in structure_of(model).places:
        stack = stack_of(path)
        if stack is None:
            raise ArgumentError(
                f"model must have numbered blocks: its attention is at {path_in_words(path)}; pass the "
                "model that the layer belongs to"
            )
        if stack not in stacks:
            numbers = [name for name, _ in model.get_submodule(stack).named_children() if name.isdigit()]
            stacks[stack] = [f"{stack}.{number}".lstrip(".") for number in numbers]
    if not stacks:
        raise ArgumentError(f"model must have attention layers: found 0 in {type(model).__name__}")
    return stacks


def stack_of(path: str) -> str | None:
    """Return the path of the stack that a module is in, None if it is in none.

    Example:
        >>> stack_of("model.layers.3.self_attn"), stack_of("0.attn"), stack_of("attn")
        ('model.layers', '', None)
    """
    parts = path.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else ".".join(parts[:at])


def unembedding_of(model: nn.Module) -> nn.Module | None:
    """Return the module that makes logits of a model's last states, None if the model names none."""
    module: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return module


@contextmanager
def residual_stream(model: nn.Module) -> Iterator[ResidualStream]:
    """Inside the block, a forward of the model fills what is returned; afterwards the model is as before.

    Parameters need no gradient inside, and get none.

    Raises:
        ArgumentError: no numbered blocks; a model that was made in inference mode.
    """
    stream = ResidualStream()
    blocks = [block for stack in blocks_of(model).values() for block in stack]
    runs: Counter[str] = Counter()
    unembedding = unembedding_of(model)
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ArgumentError(
            f"model must be made outside of torch.inference_mode: {type(model).__name__} has inference "
            "tensors; build or load it outside"
        )

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = [(name, x) for name, x in named_arguments(args, kwargs) if is_states(x)]
        if not states:
            raise ArgumentError(
                f"model must pass states [B, T, E] to its blocks: {type(module).__name__} gets none; use "
                "headwise.effects"
            )
        place, x = states[0]
        if x.requires_grad:  # what another block wrote
            return None
        stream.embeddings.append(_leaf(x))
        new = stream.embeddings[-1].clone()  # a model may write into it
        if isinstance(place, str):
            return args, {**kwargs, place: new}
        return (*args[:place], new, *args[place + 1 :]), kwargs

    def write(path: str) -> Hook:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            values = output[0] if isinstance(output, tuple) else output
            leaf = stream.written[path, runs[path]] = _leaf(values)
            runs[path] += 1
            return (leaf.clone(), *output[1:]) if isinstance(output, tuple) else leaf.clone()

        return hook

    def normalise(path: str) -> Hook:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x = next((x for _, x in named_arguments(args, kwargs)), None)
            if not (isinstance(x, Tensor) and isinstance(output, Tensor) and x.requires_grad):
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
        stream.biases.append(bias.detach().to(like.dtype).expand(like.shape).clone().requires_grad_())
        return stream.biases[-1]

    def pass_on(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Outside blocks, biases of linear maps are inputs, and activations keep output / input."""
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        if isinstance(module, nn.Linear) or is_conv1d(module):
            return _with_value(output + add_bias(module, output), output)
        (x,) = args if len(args) == 1 else (None,)
        if not _is_activation(module) or not isinstance(x, Tensor) or x.shape != output.shape:
            return output  # a linear module, or the parts will not sum to the logit
        return _with_value(x * torch.where(x == 0, 0, output / x).detach(), output)

    def unembed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        like = output[:, :1] if output.ndim == 3 else output
        stream.unembedded = _with_value(output + add_bias(module, like), output)
        return stream.unembedded

    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_, True)
        add = stack.enter_context
        for block in blocks:
            module = model.get_submodule(block)
            add(removed(module.register_forward_pre_hook(enter, with_kwargs=True)))
        for path, module in model.named_modules():
            inside = any(path.startswith(f"{block}.") for block in blocks)
            if unembedding is not None and module is unembedding:
                add(removed(module.register_forward_hook(unembed)))
            elif _is_norm(module):
                add(removed(module.register_forward_hook(normalise(path), with_kwargs=True)))
            elif inside and _is_writer(module):
                is_constant = GATE.search(path) is not None or getattr(module, "out_features", 0) == 1
                add(removed(module.register_forward_hook(_constant if is_constant else write(path))))
            elif not inside and not module._modules:
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
    """Yield each argument of a call with its position or name."""
    yield from enumerate(args)
    yield from kwargs.items()


def is_states(x: object) -> bool:
    """Return True for a tensor that may be the residual stream."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3


def _leaf(values: Tensor) -> Tensor:
    own = values.clone() if values.is_inference() else values.detach()
    return own.requires_grad_()


def _constant(module: nn.Module, args: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output


def _is_norm(module: nn.Module) -> bool:
    by_name = NORM.search(type(module).__name__) is not None and not module._modules
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or by_name


def _is_writer(module: nn.Module) -> bool:
    """Return True for a module whose output may be added to the residual stream."""
    return (
        isinstance(module, nn.Linear | nn.MultiheadAttention)
        or is_conv1d(module)
        or EXPERTS.search(type(module).__name__) is not None
    )


def _is_activation(module: nn.Module) -> bool:
    """Return True for a function of each number alone."""
    kind = type(module)
    is_of_torch = kind.__module__ == nn.GELU.__module__ and "Softm" not in kind.__name__
    return (is_of_torch and kind.__name__ != "GLU") or kind.__module__ == "transformers.activations"


def _with_value(x: Tensor, value: Tensor) -> Tensor:
    """Return the value of one tensor with the gradient of another."""
    return value.detach() + (x - x.detach()).to(value.dtype)


def _norm_as_linear(module: nn.Module, x: Tensor, output: Tensor) -> Tensor | None:
    """Return a norm's output without its bias, linear in x: the scale is a constant. None: unknown norm."""
    wide = torch.promote_types(x.dtype, torch.float32)
    stated = [
        e for name in ("eps", "variance_epsilon") if isinstance(e := getattr(module, name, None), float)
    ]
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    shift = bias.to(wide) if isinstance(bias, Tensor) else 0.0
    if isinstance(weight, Tensor) and weight.shape != x.shape[-1:]:
        return None
    is_layer_norm = isinstance(module, nn.LayerNorm)
    for centre in (is_layer_norm, not is_layer_norm):
        y = x.to(wide)
        y = y - y.mean(-1, keepdim=True) if centre else y
        for eps in stated[:1] or EPSILONS:
            scale = (y.detach().square().mean(-1, keepdim=True) + eps).rsqrt()
            for added in (0.0, 1.0) if isinstance(weight, Tensor) else (0.0,):  # 1 in Gemma and Nemotron
                factor = scale * (weight.to(wide) + added) if isinstance(weight, Tensor) else scale
                if _is_close(y * factor + shift, output):
                    return y * factor
    return None


def _is_close(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding of the second's dtype."""
    eps = torch.finfo(y.dtype).eps
    error = max(2 * eps, 64 * torch.finfo(torch.float32).eps)  # RMS norms are often computed in float32
    x, y = x.detach(), y.detach().to(x.dtype)
    return x.shape == y.shape and bool((x - y).norm() <= error * y.norm())
