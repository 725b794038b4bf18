"""All other modules: those that call torch's `scaled_dot_product_attention`, or compute a softmax.

A torch-function mode sees every call made while a watched module runs. The fused function is replaced by
headwise's, with the same arguments. A softmax inside an attention layer is only recorded; its result, the
weights, which the model computes anyway, is read with fallback="eager" only. It must be the only such softmax
in the layer and have a row for each position of the layer's input or output (`weights_shape`), or the layer
counts as not heard. So does a module of any other name that computes a softmax over positions, or calls an
opaque function that attends.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...map import AttentionMap
from ...mask_meaning import fact
from ...mask_rules import can_read
from ...masks import Mask
from ..active import Bypassed, is_quiet, note_empty_call, quietly, real_queries_now, with_padding
from ..attachment import Attachment
from ..model_structure import DISPATCHES, names_in, opaque_call, sounds_cross
from ..module_overrides import hidden_from_compilers
from .attended import attended

Function = Callable[..., Any]


def _operators(*names: str) -> frozenset[Function]:
    """Return functions of torch and operators of `torch.ops.aten` by name, each with its overloads.

    Private names give operators only, for torch's compiler reads the set and cannot hash every function.
    """
    public = [name for name in names if not name.startswith("_") and hasattr(torch, name)]
    functions: set[Function] = {getattr(torch, name) for name in public}
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            functions |= {packet, *(getattr(packet, overload) for overload in packet.overloads())}
    return frozenset(functions)


LOG_SOFTMAX = _operators("log_softmax", "_log_softmax") | {
    functional.log_softmax, Tensor.log_softmax, torch.special.log_softmax,
}  # fmt: skip
SOFTMAX = LOG_SOFTMAX | _operators("softmax", "_softmax", "_safe_softmax") | {
    functional.softmax, functional.softmin, Tensor.softmax, torch.special.softmax,
}  # fmt: skip
FUSED = _operators("scaled_dot_product_attention") | {functional.scaled_dot_product_attention}
KERNELS = _operators(  # operators that attend, of which no weights can be read
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_native_multi_head_attention",
)
LISTENED = SOFTMAX | FUSED | KERNELS | {functional.multi_head_attention_forward}
OUTSIDE_LAYERS = "a softmax runs in the model's own forward, outside its layers"
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_head", "heads", "nb_heads")


def hear_functions(attachment: Attachment) -> None:
    """Listen to torch's functions while a module runs that no other adapter supports."""
    mode = TorchFunctions(attachment)
    for module, hook in attachment.hooks.items():
        if mode.may_call(module, hook.path):
            hook.mode = mode


@dataclass
class _RunningModule:
    """A module that is running, and its calls that may be attention."""

    inputs: list[Size]
    softmaxes: int = 0  # over the last dimension
    over_other_dims: int = 0  # over another dimension
    shape: Size | None = None  # of the last softmax
    weights: Tensor | None = None  # a copy of its result, if it is the only one and is read
    is_certain: bool = False  # True if a module that is not named attention attends
    is_readable: bool = False  # by a function that can return its weights
    unheard: str | None = None  # why a function that attends cannot be heard


class TorchFunctions(TorchFunctionMode):
    """Listens to torch's functions between the begin and the end of modules."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self.attachment = attachment
        self.places = set(attachment.places)
        # path -> the opaque function that a module's code names
        self.opaque = attachment.structure.once("opaque calls", self._opaque_calls)
        self._thread = threading.local()
        self.were_self: set[str] = set()  # paths of layers that did self-attention

    def _opaque_calls(self) -> dict[str, str]:
        """Return the opaque function that each module names, by path."""
        hooks = self.attachment.hooks.items()
        return {hook.path: name for module, hook in hooks if (name := opaque_call(module)) is not None}

    def may_call(self, module: nn.Module, path: str) -> bool:
        """Return True if a module may attend, and no other adapter supports it."""
        kind = type(module)
        if kind.__module__.startswith("torch.nn."):
            return False
        if path in self.places:
            names = names_in(kind)
            # Kosmos-2.5 reads the dispatch by `getattr`, finds nothing and calls its eager function itself
            return DISPATCHES not in names or ("getattr" in names and "get_interface" not in names)
        return not kind.__module__.startswith("transformers.") or module in self.attachment.structure.suspects

    @property
    def running(self) -> list[_RunningModule]:
        """The modules that run in this thread, the innermost last."""
        modules: list[_RunningModule] | None = getattr(self._thread, "running", None)
        if modules is None:
            modules = self._thread.running = []
        return modules

    def enter(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        named = [value for name, value in kwargs.items() if "mask" not in name and "bias" not in name]
        self.running.append(_RunningModule(_shapes((*args, *named), 3)))
        if len(self.running) == 1:
            self.__enter__()

    def leave(self, output: object, returned: bool) -> Bypassed | None:
        """Handle the end of a module; return its attention that was not heard, or None."""
        done = self.running.pop()
        if not self.running:
            self.__exit__(None, None, None)
        may_attend = done.softmaxes or done.over_other_dims or done.is_certain or done.unheard is not None
        return self._judge(done, output) if returned and (may_attend or self.opaque) else None

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func not in LISTENED:  # first, for a compiler reads this for every function
            return func(*args, **(kwargs or {}))
        return self._hear(func, args, kwargs or {})

    @hidden_from_compilers
    def _hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Call a function that may be attention, and record or replace it."""
        if is_quiet():
            return func(*args, **kwargs)
        if func in FUSED:
            output = self._fused(*args, **kwargs)
            return func(*args, **kwargs) if output is None else output
        if not self.attachment.entered or self.attachment.is_outside:
            return func(*args, **kwargs)
        running = self.running[-1]
        if func is functional.multi_head_attention_forward:
            if self.attachment.reads_eager:
                return self._multi_head(*args, **kwargs)
            running.is_certain = running.is_readable = True
        elif func in KERNELS:
            running.is_certain, running.unheard = True, f"{func.__name__} is called, which gives no weights"
        result = func(*args, **kwargs)
        if func in SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self._note(running, result, dim, func in LOG_SOFTMAX)
        return result

    def _note(self, running: _RunningModule, result: Tensor, dim: int | None, is_log: bool) -> None:
        """Record a softmax in an attention layer, or one elsewhere that may be over positions."""
        if result.ndim < 3 or dim is None:
            return
        entered, is_last = self.attachment.entered[-1], dim % result.ndim == result.ndim - 1
        is_place = entered.path in self.places
        if not is_place and not self._over_positions(result, dim):
            return
        if entered.mode is None:  # a module of another adapter, inside the one that is listened to
            if not is_place:
                self.attachment.bypass(Bypassed(1, OUTSIDE_LAYERS, is_certain=False))
            return
        if not is_place:  # a log-softmax may be of class probabilities
            of_transformers = type(entered.module).__module__.startswith("transformers.")
            running.is_certain |= is_last and not is_log and not of_transformers
        if not is_last:
            running.over_other_dims += 1
            return
        running.softmaxes += 1
        running.shape, running.weights = result.shape, None
        if running.softmaxes == 1 and self.attachment.reads_eager:
            weights = (
                result.detach()
            )  # a copy, for a model may write to its weights, as dropout in place does
            running.weights = weights.exp() if is_log else weights.clone()

    def _over_positions(self, result: Tensor, dim: int) -> bool:
        """Return True if a softmax may be over positions: as many as queries, or as an input has.

        Class probabilities and gates are softmaxes, too.
        """
        if dim % result.ndim < result.ndim - 2:
            return False
        if result.shape[-1] == result.shape[-2]:
            return True
        sizes = {size for module in self.running for shape in module.inputs for size in shape[:-1]}
        return result.ndim == 4 and result.shape[dim] in sizes

    def _judge(self, done: _RunningModule, output: object) -> Bypassed | None:
        """Announce the weights of a module if they are read; else return its attention that was not heard."""
        entered = self.attachment.entered[-1]
        path, is_place = entered.path, entered.path in self.places
        count, reason = done.softmaxes + done.over_other_dims, None
        if done.softmaxes == 1 and done.shape is not None:
            returned = _shapes(_parts(output), 2)
            done.is_certain &= not is_elementwise(done.shape, done.inputs, returned)
            shape = weights_shape(done.shape, self._num_heads(), done.inputs, returned)
            if isinstance(shape, str):
                reason = shape
            elif done.weights is not None:
                self._announce_read(done.weights.reshape(shape), path)
                return None
        elif done.softmaxes > 1:
            reason = f"{done.softmaxes} softmaxes ran in one call, none of which gave all of the weights"
        elif done.over_other_dims:
            reason = "the softmax ran over another dimension than the last"
        elif done.unheard is not None:
            count, reason = 1, done.unheard
        elif done.is_readable:
            count = 1
        elif path in self.opaque and not entered.was_heard:
            count, reason = 1, f"{self.opaque[path]} is called, which gives no weights"
        if not count or (is_place and entered.was_heard):
            return None
        return Bypassed(count, reason, done.is_certain or is_place)

    def _announce_read(self, weights: Tensor, path: str) -> None:
        """Announce the weights that a layer computed."""
        B, _, T, S = weights.shape
        cross = sounds_cross(path) or (T != S and path not in self.were_self)
        if T == S and not cross:
            self.were_self.add(path)
        self._announce(weights, None if cross or T != S else real_queries_now(path, B, T), cross)

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run torch's function of its attention class, called by another layer, and announce its weights."""
        bound = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments | {"need_weights": True, "average_attn_weights": False}
        output, weights = functional.multi_head_attention_forward(**options)
        assert weights is not None
        hidden = bound.arguments["key_padding_mask"]
        real = None if hidden is None or hidden.dtype != torch.bool else ~hidden
        by_head = weights.detach().clone()
        if weights.ndim == 3:  # without a batch
            by_head, real = by_head[None], None if real is None else real[None]
        if real is not None:  # every query sees the keys that the function adds
            real = functional.pad(real, (0, by_head.shape[-1] - real.shape[-1]), value=True)
        self._announce(by_head, real, cross=bound.arguments["query"] is not bound.arguments["key"])
        if not bound.arguments["need_weights"]:
            return output, None
        return output, weights.mean(-3) if bound.arguments["average_attn_weights"] else weights

    def _announce(self, weights: Tensor, real: Tensor | None, cross: bool) -> None:
        """Announce weights to the listeners of this attachment."""
        B, _, T, S = weights.shape
        queries = real_queries_now(self.attachment.current_path, B, T) if cross else real if T == S else None
        attention_map = AttentionMap.from_weights(weights, Mask(keys=real, queries=queries))
        with quietly():  # only here, for listeners of other attachments may not read weights
            module = self.attachment.entered[-1].module
            self.attachment.tell(module, "cross" if cross else "self", attention_map, None, None)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Compute torch's fused function on headwise's engines; None if the call is not supported."""
        if query.is_nested or query.ndim < 3:
            self._note_unheard("a nested tensor" if query.is_nested else f"{list(query.shape)}")
            return None
        if not query.numel() or not key.numel() or not value.numel():
            note_empty_call()
            return None
        if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
            query, key, value = _broadcast(query, key, value)
        if key.shape[-3] != value.shape[-3]:  # keys and values have different groups
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        lead, H = query.shape[:-2], self._num_heads() if query.ndim == 3 else None
        q, k, v = (_as_4d(x, H) for x in (query, key, value))
        B, T, S = q.shape[0], q.shape[2], k.shape[2]
        mask, bias = Mask(right=T - S) if is_causal else Mask(), None
        biases = sys.modules.get("torch.nn.attention.bias")  # importing it takes seconds
        if biases is not None and isinstance(attn_mask, biases.CausalBias):  # a mask without values
            upper_left = attn_mask.variant == biases.CausalVariant.UPPER_LEFT
            mask, attn_mask = Mask(right=T - S if upper_left else 0), None
        elif attn_mask is not None and type(attn_mask) not in (Tensor, nn.Parameter):
            self._note_unheard(f"a {type(attn_mask).__name__}")  # whose values may not be its meaning
            return None
        if attn_mask is not None:
            spread = attn_mask[
                (None,) * (query.ndim - attn_mask.ndim)
            ]  # broadcast from the right, as torch does
            if query.ndim > 4:
                spread = spread.expand(*lead[:-1], *spread.shape[-3:])
            spread = spread[None] if query.ndim == 3 and spread.shape[0] == 1 else _as_4d(spread, H)
            allowed, bias = (
                (spread, None) if attn_mask.dtype == torch.bool else _split_float_mask(attn_mask, spread)
            )
            mask = mask & _rules(attn_mask, allowed, B, S)
        kind = self._kind(T, S, is_causal)
        if kind == "self" and T == S:
            mask = with_padding(mask, B)
            if mask.queries is None:
                mask = replace(mask, queries=real_queries_now(self.attachment.current_path, B, T))
        elif kind == "cross":
            mask = replace(mask, queries=real_queries_now(self.attachment.current_path, B, T))
        output, _ = attended(None, kind, q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p)
        return output.reshape(*lead, T, value.shape[-1])

    def _note_unheard(self, reason: str) -> None:
        """Record a call of torch's fused function that headwise does not support, and why."""
        if self.attachment.entered and not self.attachment.is_outside:
            self.running[-1].unheard = f"scaled_dot_product_attention is given {reason}"

    def _kind(self, T: int, S: int, is_causal: bool) -> str:
        """Return "self" or "cross" by sizes and names; for a single query, the kind of earlier calls."""
        path = self.attachment.current_path or ""
        if sounds_cross(path):
            return "cross"
        if T == S or is_causal:
            self.were_self.add(path)
            return "self"
        return "self" if T == 1 and path in self.were_self else "cross"

    def _num_heads(self) -> int | None:
        """Return the number of heads that the running module has as an attribute, or None."""
        path = self.attachment.current_path
        if path is None:
            return None
        module = self.attachment.model.get_submodule(path)
        counts = (getattr(module, name, None) for name in COUNTS)
        return next((count for count in counts if isinstance(count, int)), None)


def _parts(output: object) -> tuple[object, ...]:
    """Return the parts of a module's output."""
    if isinstance(output, dict):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _shapes(values: tuple[object, ...], least: int) -> list[Size]:
    """Return the shapes of the tensors with at least `least` dimensions."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return [x.shape for x in tensors if x.ndim >= least and not x.is_nested]


def _split_float_mask(mask: Tensor, spread: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split a float mask into the keys it allows and the bias it adds, or None."""
    hidden = spread <= torch.finfo(spread.dtype).min / 2
    has_bias = spread.requires_grad or not can_read(mask) or fact(mask, "adds", _has_bias)
    return ~hidden, spread.masked_fill(hidden, 0.0) if has_bias else None


def _has_bias(mask: Tensor) -> bool:
    """Return True if a float mask has values other than 0 and those that hide."""
    return bool(((mask != 0) & ~(mask <= torch.finfo(mask.dtype).min / 2)).any())  # NaN is such a value


def _hides(mask: Tensor) -> bool:
    """Return True if a mask, bool or float, hides anything."""
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    return bool(hidden.any())


def _rules(mask: Tensor, allowed: Tensor, B: int, S: int) -> Mask:
    """Return a bool mask as rules; a mask that is the same for all heads and queries is padding."""
    if can_read(mask) and not fact(mask, "hides", _hides):
        return Mask()
    if allowed.shape[1:3] == (1, 1) and allowed.shape[3] == S:
        return Mask.padding(allowed[:, 0, 0].expand(B, S))
    return Mask.dense(allowed)


def _broadcast(*tensors: Tensor) -> list[Tensor]:
    """Return queries, keys and values with the same leading dimensions, as torch broadcasts them.

    Numbers of heads stay, except that a single query head is repeated for several key heads, as in torch.
    Tensors without heads have sequences in that dimension.
    """
    dims = max(x.ndim for x in tensors)
    tensors = tuple(x[(None,) * (dims - x.ndim)] for x in tensors)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    H = max(x.shape[-3] for x in tensors)
    repeats = [x.shape[-3] == 1 and (index == 0 or dims == 3) for index, x in enumerate(tensors)]
    heads = (H if is_repeated else x.shape[-3] for x, is_repeated in zip(tensors, repeats, strict=True))
    return [x.expand(*lead, n, *x.shape[-2:]) for x, n in zip(tensors, heads, strict=True)]


def _as_4d(x: Tensor, H: int | None) -> Tensor:
    """Return a tensor [..., H, T, D] as [B, H, T, D].

    H: number of heads that may be folded into the batch of a tensor of three dimensions.
    """
    if x.ndim == 3:
        folded = H is not None and H > 0 and x.shape[0] % H == 0
        return x.unflatten(0, (-1, H)) if folded and H is not None else x[:, None]
    return x.flatten(0, -4) if x.ndim > 4 else x


# Whether the result of a softmax is all of a layer's attention weights, by shapes only


def weights_shape(
    shape: Size, num_heads: int | None, inputs: list[Size], returned: list[Size]
) -> tuple[int, int, int, int] | str:
    """Return [B, H, T, S] of a softmax over the last dimension, or why it cannot be all of a layer's weights.

    It is all of them if there is a row for every position of an input or an output of the layer; some layers
    have fewer queries than keys. In layers that attend within windows, each window is a sequence.

    Example:
        >>> weights_shape(Size([8, 3, 49, 49]), 3, [Size([2, 14, 14, 32])], [Size([2, 14, 14, 32])])
        (8, 3, 49, 49)
    """
    if is_elementwise(shape, inputs, returned):
        return f"the softmax gave {list(shape)}, the shape of the layer's input or output: it may be a gate"
    *lead, T, S = shape
    folded = _by_head(lead, num_heads, inputs)
    if folded is None:
        heads = "H" if num_heads is None else num_heads
        return f"the softmax gave {list(shape)}, which is not [B, {heads}, T, S]"
    B, H = folded
    if any(_has_rows(tensor, B, T) for tensor in inputs):
        return B, H, T, S
    if any(_has_rows(tensor, B, T) or tuple(tensor[:3]) == (B, H, T) for tensor in returned):
        return B, H, T, S
    windows = {B // tensor[0] for tensor in (*inputs, *returned) if _has_windows(tensor, B, T)}
    if not windows:
        shapes = f"it was given {_shown(inputs)} and returned {_shown(returned)}"
        return f"the softmax gave {list(shape)}, whose {T} queries are not all positions: {shapes}"
    if H in windows - {1} and len(lead) == 2:
        return f"the softmax gave {list(shape)}, in which windows and heads cannot be told apart"
    return B, H, T, S


def is_elementwise(shape: Size, inputs: list[Size], returned: list[Size]) -> bool:
    """Return True if a softmax has the shape of a layer's first input or output: a gate, or probabilities."""
    return shape in (*inputs[:1], *returned[:1])


def _by_head(lead: list[int], H: int | None, inputs: list[Size]) -> tuple[int, int] | None:
    """Return (sequences, heads) from the leading dimensions of a softmax; None if they are neither."""
    if len(lead) == 2:
        return (lead[0], lead[1]) if H is None or lead[1] == H else None
    if len(lead) == 1 and H is None:  # one head, if there are as many as there are sequences
        return (lead[0], 1) if any(tensor[0] == lead[0] for tensor in inputs) else None
    if len(lead) == 1:
        return (lead[0] // H, H) if H and lead[0] % H == 0 else None
    return (math.prod(lead[:-1]), H) if H is not None and lead[-1] == H else None


def _positions(tensor: Size) -> list[Size]:
    """Return the sizes of what may be positions in a tensor [B, .., C] or [B, C, ..]."""
    return [tensor[1:-1], tensor[2:]]


def _has_rows(tensor: Size, B: int, T: int) -> bool:
    """Return True if a tensor has B sequences of T positions."""
    if tuple(tensor[:2]) == (T, B):
        return True
    return tensor[0] == B and any(sides.numel() == T for sides in _positions(tensor))


def _has_windows(tensor: Size, B: int, T: int) -> bool:
    """Return True if a tensor has as many positions as B windows of T, without padding."""
    if not tensor[0] or B % tensor[0]:
        return False
    return any(B // tensor[0] * T == sides.numel() for sides in _positions(tensor))


def _shown(shapes: Iterable[Size]) -> str:
    """Return shapes as text."""
    return ", ".join(str(list(shape)) for shape in shapes) or "no tensor"
