"""The last resort: any module that calls torch's `scaled_dot_product_attention`, or a softmax of its own.

A torch-function mode sees every call made while a watched module runs. The fused function is answered by
ours, with all it was given. A softmax inside an attention layer is only looked at, and only with
fallback="eager": its result are the weights, which the model has made anyway. It must have a row for every
position of the layer's input and be the only such softmax in the layer, or the layer counts as not heard.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...facts import fact
from ...map import AttentionMap
from ...mask_rules import can_read
from ...masks import Mask
from ..active import announce, is_quiet, nothing_to_hear, padding_now
from ..attachment import Attachment
from ..model_structure import DISPATCHES, names_in, sounds_cross
from ..shared_patches import Undo
from .attended import attended, with_padding
from .loans import unseen

__all__ = ["hear_functions"]

Function = Callable[..., Any]

SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
HEARD = frozenset(
    (functional.scaled_dot_product_attention, functional.multi_head_attention_forward, *SOFTMAX)
)
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_head", "heads", "nb_heads")


def hear_functions(attachment: Attachment) -> Undo:
    """Listen to torch's functions while a module runs that none of the other adapters serves."""
    mode = _Functions(attachment)
    for module, post in attachment.posts.items():
        if mode.may_call(module, post.path):
            post.mode = mode
    return lambda: None


@dataclass
class _Running:
    """A module that runs now."""

    inputs: list[torch.Size]
    softmaxes: int = 0

    def was_given_rows_of(self, weights: Tensor) -> bool:
        """Whether there is a row for every position of what the module was given."""
        B, _, T, _ = weights.shape
        return any(
            shape[:2] == (T, B) or (shape[0] == B and T in (shape[1:-1].numel(), shape[2:].numel()))
            for shape in self.inputs
        )


class _Functions(TorchFunctionMode):
    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self.attachment = attachment
        self.places = set(attachment.places)
        self._here = threading.local()
        self.were_self: set[str] = set()  # paths of layers that attended to their own text

    def may_call(self, module: nn.Module, path: str) -> bool:
        """Whether this module may attend by itself: a place of attention of which no adapter knows more."""
        kind = type(module)
        if kind.__module__.startswith("torch.nn."):
            return False
        if path in self.places:
            return DISPATCHES not in names_in(kind)
        return not kind.__module__.startswith("transformers.")

    @property
    def running(self) -> list[_Running]:
        """The modules that run in this thread, the innermost last."""
        modules: list[_Running] | None = getattr(self._here, "running", None)
        if modules is None:
            modules = self._here.running = []
        return modules

    def enter(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        given = [x.shape for x in tensors if x.ndim > 2 and not x.is_nested]
        self.running.append(_Running(given))
        if len(self.running) == 1:
            self.__enter__()

    def leave(self) -> None:
        self.running.pop()
        if not self.running:
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func not in HEARD:  # nothing else before this: a compiler reads it for every function of its own
            return func(*args, **(kwargs or {}))
        return self._hear(func, args, kwargs or {})

    @unseen
    def _hear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if is_quiet():
            return func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            answer = self._fused(*args, **kwargs)
            return func(*args, **kwargs) if answer is None else answer
        eager, place = self.attachment.reads_eager, self.attachment.here in self.places
        if func is functional.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs) if eager and place else func(*args, **kwargs)
        result = func(*args, **kwargs)
        if result.ndim > 2 and self.attachment.entered and not self.attachment.is_outside:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            looks_like_weights = self._over_positions(result)
            if dim in (-1, result.ndim - 1) and (place or looks_like_weights):
                if eager:
                    self._look(result)
                elif not place:  # attention in a module of another name: it is not to be missed
                    self.attachment.bypass()
        return result

    def _over_positions(self, result: Tensor) -> bool:
        """Whether a softmax may be over positions: as many as there are queries, or as some input has.

        Class probabilities and gates are softmaxes, too.
        """
        if result.shape[-1] == result.shape[-2]:
            return True
        sizes = {size for module in self.running for shape in module.inputs for size in shape[:-1]}
        return result.ndim == 4 and result.shape[-1] in sizes

    def _look(self, weights: Tensor) -> None:
        running = self.running[-1]
        running.softmaxes += 1
        if running.softmaxes > 1:  # one part of the attention among several: none of them is the weights
            self.attachment.bypass()
            return
        by_head = _by_head(weights, self._num_heads())
        if by_head is not None and running.was_given_rows_of(by_head):
            B, _, T, S = by_head.shape
            cross = sounds_cross(self.attachment.here)
            self._tell(by_head, None if cross or T != S else padding_now(self.attachment.here, B, T), cross)
        elif self.attachment.here not in self.places:
            self.attachment.bypass()

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """torch's function behind its module, called by a layer that is not its module."""
        asked = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
        asked.apply_defaults()
        each_head = asked.arguments | {"need_weights": True, "average_attn_weights": False}
        output, weights = functional.multi_head_attention_forward(**each_head)
        assert weights is not None
        hidden = asked.arguments["key_padding_mask"]
        real = None if hidden is None or hidden.dtype != torch.bool else ~hidden
        if weights.ndim == 4:
            self._tell(weights, real, cross=asked.arguments["query"] is not asked.arguments["key"])
        if not asked.arguments["need_weights"]:
            return output, None
        return output, weights.mean(-3) if asked.arguments["average_attn_weights"] else weights

    def _tell(self, weights: Tensor, real: Tensor | None, cross: bool) -> None:
        B, _, T, S = weights.shape
        queries = padding_now(self.attachment.here, B, T) if cross else real if T == S else None
        given = AttentionMap.from_weights(weights.detach(), Mask(keys=real, queries=queries))
        announce(None, "cross" if cross else "self", given, None, None)

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
            return None
        if not query.numel() or not key.numel() or not value.numel():
            nothing_to_hear()
            return None
        key, value = (_beside(query, x) for x in (key, value))
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
            return None  # of another kind, whose numbers may not be what it means
        if attn_mask is not None:
            spread = attn_mask[(None,) * (query.ndim - attn_mask.ndim)]  # as torch broadcasts: from the right
            if query.ndim > 4:
                spread = spread.expand(*lead[:-1], *spread.shape[-3:])
            spread = spread[None] if query.ndim == 3 and spread.shape[0] == 1 else _four(spread, H)
            allowed, bias = (spread, None) if attn_mask.dtype == torch.bool else _parted(attn_mask, spread)
            mask = mask & _rules(attn_mask, allowed, B, T, S)
        kind = self._kind(T, S, is_causal)
        if kind == "self" and T == S:
            mask = with_padding(mask, B)
            if mask.queries is None:
                mask = replace(mask, queries=padding_now(self.attachment.here, B, T))
        elif kind == "cross":
            mask = replace(mask, queries=padding_now(self.attachment.here, B, T))
        output, _ = attended(None, kind, q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p)
        return output.reshape(*lead, T, value.shape[-1])

    def _kind(self, T: int, S: int, is_causal: bool) -> str:
        """Self- or cross-attention, as far as sizes and names tell; one new query goes on with what was."""
        here = self.attachment.here or ""
        if sounds_cross(here):
            return "cross"
        if T == S or is_causal:
            self.were_self.add(here)
            return "self"
        return "self" if T == 1 and here in self.were_self else "cross"

    def _num_heads(self) -> int | None:
        here = self.attachment.here
        if here is None:
            return None
        module = self.attachment.model.get_submodule(here)
        counts = (getattr(module, name, None) for name in COUNTS)
        return next((count for count in counts if isinstance(count, int)), None)


def _by_head(weights: Tensor, H: int | None) -> Tensor | None:
    """A softmax's result as [B, H, T, S]; None: it does not look like weights."""
    if weights.ndim == 4 and (H is None or weights.shape[1] == H):
        return weights
    if weights.ndim == 3 and H is not None and weights.shape[0] % H == 0:
        return weights.unflatten(0, (-1, H))  # [B * H, T, S] -> [B, H, T, S]
    return None


def _parted(given: Tensor, spread: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a float mask hides, and what else it adds."""
    hidden = spread <= torch.finfo(spread.dtype).min / 2
    adds = spread.requires_grad or not can_read(given) or fact(given, "adds", _adds)
    return ~hidden, spread.masked_fill(hidden, 0.0) if adds else None


def _adds(mask: Tensor) -> bool:
    """Whether there is more in a float mask than 0 and what hides."""
    return bool(((mask != 0) & ~(mask <= torch.finfo(mask.dtype).min / 2)).any())  # a NaN adds, too


def _hides(mask: Tensor) -> bool:
    """Whether a mask, bool or float, hides anything."""
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    return bool(hidden.any())


def _rules(given: Tensor, allowed: Tensor, B: int, T: int, S: int) -> Mask:
    """A bool mask; one that is the same for all heads and queries is padding."""
    if can_read(given) and not fact(given, "hides", _hides):
        return Mask()
    if allowed.shape[1:3] == (1, 1) and allowed.shape[3] == S:
        return Mask.padding(allowed[:, 0, 0].expand(B, S))
    return Mask.dense(allowed)


def _beside(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values with the queries' leading dimensions, as torch broadcasts them; heads as they are."""
    x = x[(None,) * (query.ndim - x.ndim)]
    lead = query.shape[:-3]
    return x if x.shape[:-3] == lead else x.expand(*lead, *x.shape[-3:])


def _four(x: Tensor, H: int | None) -> Tensor:
    """[..., H, T, D] with as many leading dimensions as there are, as [B, H, T, D].

    H: heads that may lie folded into the batch of a tensor of three dimensions.
    """
    if x.ndim == 3:
        folded = H is not None and H > 0 and x.shape[0] % H == 0
        return x.unflatten(0, (-1, H)) if folded and H is not None else x[:, None]
    return x.flatten(0, -4) if x.ndim > 4 else x
