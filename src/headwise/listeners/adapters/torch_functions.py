"""The last resort: any module that calls torch's `scaled_dot_product_attention`, or a softmax of its own.

A torch-function mode sees every call made while a watched module runs. The fused function is answered by
ours, with all it was given. A softmax inside an attention layer is only looked at; its result, the weights,
which the model has made anyway, is read with fallback="eager" alone. It must be the only such softmax in the
layer and have the rows of what the layer is given or returns (`weights_shape`), or the layer counts as
not heard. So does a module of any other name in which a softmax runs over positions, or a function that
attends.

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
    """Functions of torch and operators of `torch.ops.aten` by name, each with its overloads.

    Of private names the operators alone: torch's compiler, which reads the set, cannot hash every function.
    """
    public = [name for name in names if not name.startswith("_") and hasattr(torch, name)]
    found: set[Function] = {getattr(torch, name) for name in public}
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found |= {packet, *(getattr(packet, overload) for overload in packet.overloads())}
    return frozenset(found)


LOG_SOFTMAX = _operators("log_softmax", "_log_softmax") | {
    functional.log_softmax, Tensor.log_softmax, torch.special.log_softmax,
}  # fmt: skip
SOFTMAX = LOG_SOFTMAX | _operators("softmax", "_softmax", "_safe_softmax") | {
    functional.softmax, functional.softmin, Tensor.softmax, torch.special.softmax,
}  # fmt: skip
FUSED = _operators("scaled_dot_product_attention") | {functional.scaled_dot_product_attention}
KERNELS = _operators(  # the same without its words: they attend, and nothing of it can be heard
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
HEARD = SOFTMAX | FUSED | KERNELS | {functional.multi_head_attention_forward}
OUTSIDE_LAYERS = "a softmax runs in the model's own forward, outside its layers"
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_head", "heads", "nb_heads")


def hear_functions(attachment: Attachment) -> None:
    """Listen to torch's functions while a module runs that none of the other adapters serves."""
    mode = TorchFunctions(attachment)
    for module, hook in attachment.hooks.items():
        if mode.may_call(module, hook.path):
            hook.mode = mode


@dataclass
class _Running:
    """A module that runs now, and what it has done that may be attention."""

    inputs: list[Size]
    softmaxes: int = 0  # over the last dimension
    over_others: int = 0  # over another one
    shape: Size | None = None  # of the last of them
    weights: Tensor | None = None  # its result, copied, where it is the only one and somebody reads it
    is_certain: bool = False  # a module of another name attends all the same
    is_readable: bool = False  # by asking a function for the weights that it makes
    unheard: str | None = None  # a function that attends, and of which nothing can be heard


class TorchFunctions(TorchFunctionMode):
    """Is told when a module begins and ends, and listens to torch's functions in between."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self.attachment = attachment
        self.places = set(attachment.places)
        # path -> the function by which a module attends unheard, of those whose code says so
        self.opaque = attachment.structure.once("opaque calls", self._opaque_calls)
        self._here = threading.local()
        self.were_self: set[str] = set()  # paths of layers that attended to their own text

    def _opaque_calls(self) -> dict[str, str]:
        hooks = self.attachment.hooks.items()
        return {hook.path: name for module, hook in hooks if (name := opaque_call(module)) is not None}

    def may_call(self, module: nn.Module, path: str) -> bool:
        """Whether this module may attend by itself: a place of attention of which no adapter knows more."""
        kind = type(module)
        if kind.__module__.startswith("torch.nn."):
            return False
        if path in self.places:
            names = names_in(kind)
            # `getattr` of the dispatch finds nothing there: Kosmos-2.5 then calls its eager function itself
            return DISPATCHES not in names or ("getattr" in names and "get_interface" not in names)
        return not kind.__module__.startswith("transformers.") or module in self.attachment.structure.suspects

    @property
    def running(self) -> list[_Running]:
        """The modules that run in this thread, the innermost last."""
        modules: list[_Running] | None = getattr(self._here, "running", None)
        if modules is None:
            modules = self._here.running = []
        return modules

    def enter(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        named = [value for name, value in kwargs.items() if "mask" not in name and "bias" not in name]
        self.running.append(_Running(_shapes((*args, *named), 3)))
        if len(self.running) == 1:
            self.__enter__()

    def leave(self, output: object, came_back: bool) -> Bypassed | None:
        """The module returned `output`, or raised; returns what was not heard of its attention."""
        done = self.running.pop()
        if not self.running:
            self.__exit__(None, None, None)
        did = done.softmaxes or done.over_others or done.is_certain or done.unheard is not None
        return self._judge(done, output) if came_back and (did or self.opaque) else None

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func not in HEARD:  # nothing else before this: a compiler reads it for every function of its own
            return func(*args, **(kwargs or {}))
        return self._hear(func, args, kwargs or {})

    @hidden_from_compilers
    def _hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if is_quiet():
            return func(*args, **kwargs)
        if func in FUSED:
            answer = self._fused(*args, **kwargs)
            return func(*args, **kwargs) if answer is None else answer
        if not self.attachment.entered or self.attachment.is_outside:
            return func(*args, **kwargs)
        here = self.running[-1]
        if func is functional.multi_head_attention_forward:
            if self.attachment.reads_eager:
                return self._multi_head(*args, **kwargs)
            here.is_certain = here.is_readable = True
        elif func in KERNELS:
            here.is_certain, here.unheard = True, f"{func.__name__} is called, which gives no weights"
        result = func(*args, **kwargs)
        if func in SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self._note(here, result, dim, func in LOG_SOFTMAX)
        return result

    def _note(self, here: _Running, result: Tensor, dim: int | None, is_log: bool) -> None:
        """Take note of a softmax in a place of attention, or of one that may be over positions elsewhere."""
        if result.ndim < 3 or dim is None:
            return
        entered, is_last = self.attachment.entered[-1], dim % result.ndim == result.ndim - 1
        is_place = entered.path in self.places
        if not is_place and not self._over_positions(result, dim):
            return
        if entered.mode is None:  # a module that another adapter serves, inside the one that is looked into
            if not is_place:
                self.attachment.bypass(Bypassed(1, OUTSIDE_LAYERS, is_certain=False))
            return
        if not is_place:  # a logarithm may be that of an answer's probabilities
            of_transformers = type(entered.module).__module__.startswith("transformers.")
            here.is_certain |= is_last and not is_log and not of_transformers
        if not is_last:
            here.over_others += 1
            return
        here.softmaxes += 1
        here.shape, here.weights = result.shape, None
        if here.softmaxes == 1 and self.attachment.reads_eager:
            weights = result.detach()  # copied: a model may write to its weights, by dropout in place, say
            here.weights = weights.exp() if is_log else weights.clone()

    def _over_positions(self, result: Tensor, dim: int) -> bool:
        """Return True if a softmax may be over positions: as many as there are queries, or as some input has.

        Class probabilities and gates are softmaxes, too.
        """
        if dim % result.ndim < result.ndim - 2:
            return False
        if result.shape[-1] == result.shape[-2]:
            return True
        sizes = {size for module in self.running for shape in module.inputs for size in shape[:-1]}
        return result.ndim == 4 and result.shape[dim] in sizes

    def _judge(self, done: _Running, output: object) -> Bypassed | None:
        """What a module did: its weights are told of if they are read, else what of them was not heard."""
        entered = self.attachment.entered[-1]
        path, is_place = entered.path, entered.path in self.places
        count, why = done.softmaxes + done.over_others, None
        if done.softmaxes == 1 and done.shape is not None:
            returned = _shapes(_parts(output), 2)
            done.is_certain &= not is_elementwise(done.shape, done.inputs, returned)
            shape = weights_shape(done.shape, self._num_heads(), done.inputs, returned)
            if isinstance(shape, str):
                why = shape
            elif done.weights is not None:
                self._tell_read(done.weights.reshape(shape), path)
                return None
        elif done.softmaxes > 1:
            why = f"{done.softmaxes} softmaxes ran in one call, none of which gave all of the weights"
        elif done.over_others:
            why = "the softmax ran over another dimension than the last"
        elif done.unheard is not None:
            count, why = 1, done.unheard
        elif done.is_readable:
            count = 1
        elif path in self.opaque and not entered.was_heard:
            count, why = 1, f"{self.opaque[path]} is called, which gives no weights"
        if not count or (is_place and entered.was_heard):
            return None
        return Bypassed(count, why, done.is_certain or is_place)

    def _tell_read(self, weights: Tensor, path: str) -> None:
        B, _, T, S = weights.shape
        cross = sounds_cross(path) or (T != S and path not in self.were_self)
        if T == S and not cross:
            self.were_self.add(path)
        self._tell(weights, None if cross or T != S else real_queries_now(path, B, T), cross)

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """torch's function behind its module, called by a layer that is not its module."""
        asked = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
        asked.apply_defaults()
        each_head = asked.arguments | {"need_weights": True, "average_attn_weights": False}
        output, weights = functional.multi_head_attention_forward(**each_head)
        assert weights is not None
        hidden = asked.arguments["key_padding_mask"]
        real = None if hidden is None or hidden.dtype != torch.bool else ~hidden
        by_head = weights.detach().clone()
        if weights.ndim == 3:  # without a batch
            by_head, real = by_head[None], None if real is None else real[None]
        if real is not None:  # everyone sees what the function adds to the keys
            real = functional.pad(real, (0, by_head.shape[-1] - real.shape[-1]), value=True)
        self._tell(by_head, real, cross=asked.arguments["query"] is not asked.arguments["key"])
        if not asked.arguments["need_weights"]:
            return output, None
        return output, weights.mean(-3) if asked.arguments["average_attn_weights"] else weights

    def _tell(self, weights: Tensor, real: Tensor | None, cross: bool) -> None:
        B, _, T, S = weights.shape
        queries = real_queries_now(self.attachment.current_path, B, T) if cross else real if T == S else None
        given = AttentionMap.from_weights(weights, Mask(keys=real, queries=queries))
        with quietly():  # to those who listen here: others may not want to read weights
            module = self.attachment.entered[-1].module
            self.attachment.tell(module, "cross" if cross else "self", given, None, None)

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
        """torch's fused function by ours; None: not a call for ours."""
        if query.is_nested or query.ndim < 3:
            self._leave_alone("a nested tensor" if query.is_nested else f"{list(query.shape)}")
            return None
        if not query.numel() or not key.numel() or not value.numel():
            note_empty_call()
            return None
        if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
            query, key, value = _side_by_side(query, key, value)
        if key.shape[-3] != value.shape[-3]:  # groups of their own
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        lead, H = query.shape[:-2], self._num_heads() if query.ndim == 3 else None
        q, k, v = (_four(x, H) for x in (query, key, value))
        B, T, S = q.shape[0], q.shape[2], k.shape[2]
        mask, bias = Mask(right=T - S) if is_causal else Mask(), None
        biases = sys.modules.get("torch.nn.attention.bias")  # importing it imports the compiler: seconds
        if biases is not None and isinstance(attn_mask, biases.CausalBias):  # a mask without its numbers
            upper_left = attn_mask.variant == biases.CausalVariant.UPPER_LEFT
            mask, attn_mask = Mask(right=T - S if upper_left else 0), None
        elif attn_mask is not None and type(attn_mask) not in (Tensor, nn.Parameter):
            self._leave_alone(f"a {type(attn_mask).__name__}")  # whose numbers may not be what it means
            return None
        if attn_mask is not None:
            spread = attn_mask[(None,) * (query.ndim - attn_mask.ndim)]  # as torch broadcasts: from the right
            if query.ndim > 4:
                spread = spread.expand(*lead[:-1], *spread.shape[-3:])
            spread = spread[None] if query.ndim == 3 and spread.shape[0] == 1 else _four(spread, H)
            allowed, bias = (spread, None) if attn_mask.dtype == torch.bool else _parted(attn_mask, spread)
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

    def _leave_alone(self, given: str) -> None:
        """A call of torch's fused function that is not answered by ours, for what it is given."""
        if self.attachment.entered and not self.attachment.is_outside:
            self.running[-1].unheard = f"scaled_dot_product_attention is given {given}"

    def _kind(self, T: int, S: int, is_causal: bool) -> str:
        """Self- or cross-attention, as far as sizes and names tell; one new query goes on with what was."""
        here = self.attachment.current_path or ""
        if sounds_cross(here):
            return "cross"
        if T == S or is_causal:
            self.were_self.add(here)
            return "self"
        return "self" if T == 1 and here in self.were_self else "cross"

    def _num_heads(self) -> int | None:
        here = self.attachment.current_path
        if here is None:
            return None
        module = self.attachment.model.get_submodule(here)
        counts = (getattr(module, name, None) for name in COUNTS)
        return next((count for count in counts if isinstance(count, int)), None)


def _parts(output: object) -> tuple[object, ...]:
    """What a module returned, part by part."""
    if isinstance(output, dict):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _shapes(values: tuple[object, ...], least: int) -> list[Size]:
    """The shapes of tensors of at least so many dimensions."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return [x.shape for x in tensors if x.ndim >= least and not x.is_nested]


def _parted(given: Tensor, spread: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a float mask hides, and what else it adds."""
    hidden = spread <= torch.finfo(spread.dtype).min / 2
    adds = spread.requires_grad or not can_read(given) or fact(given, "adds", _adds)
    return ~hidden, spread.masked_fill(hidden, 0.0) if adds else None


def _adds(mask: Tensor) -> bool:
    """Return True if there is more in a float mask than 0 and what hides."""
    return bool(((mask != 0) & ~(mask <= torch.finfo(mask.dtype).min / 2)).any())  # a NaN adds, too


def _hides(mask: Tensor) -> bool:
    """Return True if a mask, bool or float, hides anything."""
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    return bool(hidden.any())


def _rules(given: Tensor, allowed: Tensor, B: int, S: int) -> Mask:
    """A bool mask; one that is the same for all heads and queries is padding."""
    if can_read(given) and not fact(given, "hides", _hides):
        return Mask()
    if allowed.shape[1:3] == (1, 1) and allowed.shape[3] == S:
        return Mask.padding(allowed[:, 0, 0].expand(B, S))
    return Mask.dense(allowed)


def _side_by_side(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys and values with the same leading dimensions, as torch broadcasts them; heads as they are.

    One head of queries for several of keys is repeated, which torch does as well. Without heads, these are
    the sequences.
    """
    dims = max(x.ndim for x in tensors)
    tensors = tuple(x[(None,) * (dims - x.ndim)] for x in tensors)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    H = max(x.shape[-3] for x in tensors)
    spread = [x.shape[-3] == 1 and (at == 0 or dims == 3) for at, x in enumerate(tensors)]
    heads = (H if alone else x.shape[-3] for x, alone in zip(tensors, spread, strict=True))
    return [x.expand(*lead, n, *x.shape[-2:]) for x, n in zip(tensors, heads, strict=True)]


def _four(x: Tensor, H: int | None) -> Tensor:
    """[..., H, T, D] with as many leading dimensions as there are, as [B, H, T, D].

    H: heads that may lie folded into the batch of a tensor of three dimensions.
    """
    if x.ndim == 3:
        folded = H is not None and H > 0 and x.shape[0] % H == 0
        return x.unflatten(0, (-1, H)) if folded and H is not None else x[:, None]
    return x.flatten(0, -4) if x.ndim > 4 else x


# Whether the result of a softmax is all of a layer's attention weights, told from shapes alone


def weights_shape(
    shape: Size, num_heads: int | None, given: list[Size], returned: list[Size]
) -> tuple[int, int, int, int] | str:
    """[B, H, T, S] of a softmax over the last dimension, or why it cannot be all of a layer's weights.

    It is if there is a row for every position of a tensor that the layer was given, or of one that it
    returned: some layers have fewer queries than keys. Layers that attend inside windows have the windows
    among their sequences.

    Example:
        >>> weights_shape(Size([8, 3, 49, 49]), 3, [Size([2, 14, 14, 32])], [Size([2, 14, 14, 32])])
        (8, 3, 49, 49)
    """
    if is_elementwise(shape, given, returned):
        return f"the softmax gave {list(shape)}, the shape of the layer's input or output: it may be a gate"
    *lead, T, S = shape
    folded = _by_head(lead, num_heads, given)
    if folded is None:
        heads = "H" if num_heads is None else num_heads
        return f"the softmax gave {list(shape)}, which is not [B, {heads}, T, S]"
    B, H = folded
    if any(_has_rows(tensor, B, T) for tensor in given):
        return B, H, T, S
    if any(_has_rows(tensor, B, T) or tuple(tensor[:3]) == (B, H, T) for tensor in returned):
        return B, H, T, S
    windows = {B // tensor[0] for tensor in (*given, *returned) if _has_windows(tensor, B, T)}
    if not windows:
        seen = f"it was given {_shown(given)} and returned {_shown(returned)}"
        return f"the softmax gave {list(shape)}, whose {T} queries are not all positions: {seen}"
    if H in windows - {1} and len(lead) == 2:
        return f"the softmax gave {list(shape)}, in which windows and heads cannot be told apart"
    return B, H, T, S


def is_elementwise(shape: Size, given: list[Size], returned: list[Size]) -> bool:
    """Return True if a softmax has the shape of a layer's first input or output: a gate, or probabilities."""
    return shape in (*given[:1], *returned[:1])


def _by_head(lead: list[int], H: int | None, given: list[Size]) -> tuple[int, int] | None:
    """(sequences, heads) of the leading dimensions of a softmax; None: they are something else."""
    if len(lead) == 2:
        return (lead[0], lead[1]) if H is None or lead[1] == H else None
    if len(lead) == 1 and H is None:  # one head, if there are as many as there are sequences
        return (lead[0], 1) if any(tensor[0] == lead[0] for tensor in given) else None
    if len(lead) == 1:
        return (lead[0] // H, H) if H and lead[0] % H == 0 else None
    return (math.prod(lead[:-1]), H) if H is not None and lead[-1] == H else None


def _positions(tensor: Size) -> list[Size]:
    """What a tensor [B, .., C] or [B, C, ..] may have of positions."""
    return [tensor[1:-1], tensor[2:]]


def _has_rows(tensor: Size, B: int, T: int) -> bool:
    """Return True if a tensor has B sequences of T positions."""
    if tuple(tensor[:2]) == (T, B):
        return True
    return tensor[0] == B and any(sides.numel() == T for sides in _positions(tensor))


def _has_windows(tensor: Size, B: int, T: int) -> bool:
    """Whether a tensor has as many positions as B windows of T hold; none is filled up with padding."""
    if not tensor[0] or B % tensor[0]:
        return False
    return any(B // tensor[0] * T == sides.numel() for sides in _positions(tensor))


def _shown(shapes: Iterable[Size]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "no tensor"
