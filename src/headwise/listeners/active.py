"""Calls of attention layers, the listeners that hear them, and the state of the forward pass in progress.

The list of attachments is shared by all threads. The state of a forward pass belongs to the thread it runs
in: the modules that are running, and the tokens and padding among their arguments. A layer whose heads are
sharded over several processes is heard on each of them with all its heads.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engines.scores import Scores
from ..errors import ArgumentError
from ..foreign_masks import AS_GOOD_AS_HIDDEN
from ..heads.joint_measurement import SHORT, SHORT_ON_CPU, Group
from ..heads.layer_names import path_in_words
from ..map import AttentionMap
from ..mask_meaning import fact
from ..mask_rules import can_read
from ..masks import Mask
from ..parallel.local_heads import LocalHeads

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .adapters.torch_functions import TorchFunctions
    from .attachment import Attachment

OF_DECODER = ("decoder_input_ids", "target_ids", "decoder_attention_mask")  # beside those of an encoder
TOKENS = ("decoder_input_ids", "target_ids", "input_ids", "ids", "input", "tokens", "idx", "x")
PADDING = ("decoder_attention_mask", "attention_mask")

_order = itertools.count()


@dataclass(eq=False)
class ForwardPass:
    """One forward pass of a model. Records refer to it, also when the pass is over."""

    number: int = 0
    # the padding that layers used, for a checkpoint that runs them again
    padding: dict[tuple[str | None, int, int], Tensor | None] = field(default_factory=dict)
    # configs whose mask functions were called with the padding
    masked: list[object] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of an attention layer.

    Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim.
    """

    path: str  # of the module, in the model that is watched
    kind: str  # "self" or "cross"
    weights: AttentionMap  # [B, H, T, S], before dropout
    value: Tensor | None  # [B, Hk, S, Dv]; None where only weights are available
    output: Tensor | None  # [B, H, T, Dv], before the heads are joined; None likewise
    forward: ForwardPass
    tokens: dict[str, Tensor] = field(
        default_factory=dict
    )  # arguments of modules around it, by name: int [B, T]

    @property
    def num_heads(self) -> int:
        return self.weights.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """The number of key/value heads; the number of heads where there are no values."""
        return self.num_heads if self.value is None else self.value.shape[1]


class SplitCall(LayerCall):
    """The call of all heads of a layer whose heads are sharded over processes.

    `local_call` is the call of the heads of this rank.

        rank 0  heads 0 1 ──┐                                   ┌── heads 0 1 ──> out_proj
        rank 1  heads 2 3 ──┴─ gathered ──> listeners, alike ───┴── heads 2 3 ──> out_proj

    Listeners do the same on every rank, so that gradients are those of all heads. A tensor is gathered when a
    listener reads it, and must then be read on every rank.
    """

    def __init__(self, local_call: LayerCall, local_heads: LocalHeads, output: Tensor | None = None) -> None:
        fields = {name: getattr(local_call, name) for name in ("path", "kind", "forward", "tokens")}
        self.__dict__.update(fields, local_call=local_call, local_heads=local_heads)
        if output is not None:  # changed by another listener
            self.__dict__["output"] = output

    local_call: LayerCall
    local_heads: LocalHeads

    @cached_property
    def weights(self) -> AttentionMap:
        """[B, H, T, S] of all heads"""
        return self.local_heads.gather_map(self.local_call.weights)

    @cached_property
    def value(self) -> Tensor | None:
        """[B, Hk, S, Dv] of all heads"""
        return None if self.local_call.value is None else self.local_heads.gather_kv(self.local_call.value)

    @cached_property
    def output(self) -> Tensor | None:
        """[B, H, T, Dv] of all heads"""
        return None if self.local_call.output is None else self.local_heads.gather(self.local_call.output)


class Listener:
    """Hears every call of a model while it is attached to it."""

    # Row statistics that it reads of a long call, if it needs nothing that takes a second pass: they are
    # collected in the first pass where possible
    statistics_if_long: tuple[str, ...] = ()
    waits = False  # True if it reads short calls only after their forward pass, from copies
    noted: Noted | None = None  # the last call it deferred, for calls that differ only in tensors
    # True if it supports calls whose sequence is sharded over ranks: their map covers the full sequence,
    # their values and outputs only this rank's part
    hears_shards = False

    def hear(self, call: LayerCall) -> Tensor | None:
        """Handle a call. A tensor that is returned replaces the heads' output, [B, H, T, Dv]."""
        raise NotImplementedError

    def after(self, forward: ForwardPass) -> None:
        """Handle the end of a forward pass, also of one that raised."""

    def miss(self, path: str, kind: str, bypassed: Bypassed) -> None:
        """Handle a layer that attended, or may have, without being heard; its forward pass is over."""


class Noted(NamedTuple):
    """A call that a listener deferred, and how to defer another like it."""

    kind: str
    forward: ForwardPass
    group: Group  # of calls that are measured together, while there is room
    # Defers another call of the same forward, by path, scores and lse; False: the group is full
    again: Callable[[str, Scores, Tensor | None], bool]


def in_backward() -> bool:
    """Return True if a checkpoint is running a forward again for its gradients; it was heard before."""
    return torch._C._current_graph_task_id() != -1


# A forward pass and the arguments of its modules


class Bypassed(NamedTuple):
    """A module that attended, or may have attended, without being heard."""

    softmaxes: int  # how many ran in it
    reason: str | None  # why fallback="eager" cannot read its weights; None: it can
    is_certain: bool = True  # False: it may not be attention, so the model is not refused for it
    sizes: tuple[int, ...] = ()  # B and T of its input, where they are known

    def merged(self, other: Bypassed) -> Bypassed:
        """Return the sum of this and the same module in a later forward."""
        softmaxes, is_certain = self.softmaxes + other.softmaxes, self.is_certain or other.is_certain
        return Bypassed(softmaxes, self.reason or other.reason, is_certain, self.sizes or other.sizes)


class Entered:
    """A module that is running now."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.was_heard = path, module, False
        self.mode: TorchFunctions | None = None  # listens to torch's functions while it runs
        self.is_noted = False  # True once its arguments were read for tokens and padding
        self.read: dict[bool, dict[str, Tensor]] = {}  # tokens that layers inside it read, by `decodes`
        self.order = next(_order)  # among the modules of all models
        self.tokens: dict[str, Tensor] = {}  # among its arguments, by name: int [B, T]
        self.padding: dict[str, Tensor] = {}  # among its arguments, by name: bool [B, S], True = real
        self.shapes: list[torch.Size] = []  # of its floating-point arguments

    def select(self, texts: dict[str, Tensor], decodes: bool) -> dict[str, Tensor]:
        """Return those of its texts that belong to the decoder, or those that do not.

        Every text of a decoder module belongs to the decoder.
        """
        if decodes and "decoder" in self.path.split("."):
            return texts
        return {name: value for name, value in texts.items() if (name in OF_DECODER) == decodes}

    def may_read(self, text: Tensor) -> bool:
        """Return True if its floating-point arguments may come from [B, T] tokens, or if it has none."""
        B, T = text.shape
        return not self.shapes or any(
            tuple(shape[:2]) in ((B, T), (T, B)) or shape[0] == B * T for shape in self.shapes
        )


class ForwardState:
    """State of the forward pass in progress in one thread."""

    def __init__(self, forward: ForwardPass) -> None:
        self.forward = forward
        self.entered: list[Entered] = []  # the modules that run now, the innermost last
        self.query_padding: dict[str, Tensor | None] = {}  # of self-attention, by its parent: what is real
        self.call_counts: dict[str, int] = {}  # calls heard so far, by path
        self.call_plans: list[Any] = []  # of calls that later layers may repeat; see attended.py
        self.bypassed: dict[str, Bypassed] = {}

    def note(self, entered: Entered, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Read tokens and padding from the arguments of a module, for the layers inside it."""
        entered.is_noted = True
        kind: type = type(entered.module)
        named = dict(zip(_parameters(kind), args, strict=False)) | kwargs
        entered.shapes = [
            value.shape
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim > 1
            and not value.is_nested
        ]
        # The first argument of an inner module that also takes numbers may be positions
        if args and isinstance(args[0], Tensor) and not (self.entered and entered.shapes):
            named.setdefault("input_ids", args[0])
        for name in TOKENS:
            value = named.get(name)
            if not isinstance(value, Tensor) or value.ndim != 2 or value.dtype == torch.bool:
                continue
            if not value.is_floating_point() and not value.is_complex():
                entered.tokens.setdefault(name, value)
        for name in PADDING:
            value = named.get(name)
            if isinstance(value, Tensor) and value.ndim == 2:
                real = _as_padding(entered.module, value)
                if real is not None:
                    entered.padding.setdefault(name, real)

    def tokens(self, decodes: bool) -> dict[str, Tensor]:
        """Return the token ids of the layer that is running, from the innermost module that was passed any.

        decodes: the layer belongs to the decoder of a model whose encoder reads another text.
        """
        for entered in reversed(self.entered):
            if entered.is_noted:
                read = entered.read.get(decodes)
                if read is None:  # the same for all layers inside this module
                    read = entered.read[decodes] = self._tokens(decodes)
                return read
        return {}

    def _tokens(self, decodes: bool) -> dict[str, Tensor]:
        """Return what `tokens` does, from the arguments of the modules."""
        for inside, entered in enumerate(reversed(self.entered)):
            tokens = entered.select(entered.tokens, decodes)
            if tokens:
                return {name: ids for name, ids in tokens.items() if self._is_read(ids, inside)}
        return {}

    def padding(self, decodes: bool) -> Tensor | None:
        """Return which tokens of the running layer are real, as `tokens`; None where that is not known.

        Padding that was passed with another text does not apply.
        """
        for inside, entered in enumerate(reversed(self.entered)):
            real = next(iter(entered.select(entered.padding, decodes).values()), None)
            if real is not None:
                return real if self._is_read(real, inside) else None
            text = entered.select(entered.tokens, decodes)
            outer = [ids for around in self.entered[: -1 - inside] for ids in around.tokens.values()]
            if text and outer and not any(ids is other for ids in text.values() for other in outer):
                return None
        return None

    def _is_read(self, text: Tensor, inside: int) -> bool:
        """Return True if the arguments of all innermost modules may come from this text, unlike an image."""
        return all(entered.may_read(text) for entered in self.entered[len(self.entered) - inside :])


def _as_padding(module: nn.Module, value: Tensor) -> Tensor | None:
    """Return which positions an `attention_mask` [B, S] marks as real, bool; None if it is another mask."""
    if not type(module).__module__.startswith("transformers.") and value.shape[0] == value.shape[1]:
        return None  # it may be a [T, T] mask of queries and keys
    if not value.is_floating_point():
        return value.bool()
    hidden = value <= AS_GOOD_AS_HIDDEN
    if bool(((value != 0) & (value != 1) & ~hidden).any()):
        return None  # a bias
    if bool(hidden.any()):
        return ~hidden
    return value.bool() if bool(value.any()) else None  # zeros alone are a bias that hides nothing


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a class's forward, in order."""
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


# Everything that is running


class _Silence(threading.local):
    depth = 0  # above 0: headwise's own attention runs, which is not heard


active: list[Attachment] = []  # in the order in which they were attached
silence = _Silence()


def running() -> list[tuple[Attachment, ForwardState]]:
    """Return the models running in this thread, the one whose module was entered last first."""
    at_work = [(attachment, run) for attachment in tuple(active) if (run := attachment.run) is not None]
    return at_work if len(at_work) < 2 else sorted(at_work, key=lambda pair: -pair[1].entered[-1].order)


def innermost() -> nn.Module | None:
    """Return the innermost module running in this thread, of all watched models."""
    at_work = running()
    return at_work[0][1].entered[-1].module if at_work else None


def announce(
    module: nn.Module | None,
    kind: str,
    weights: AttentionMap,
    value: Tensor | None,
    output: Tensor | None,
) -> Tensor | None:
    """Report the call of an attention layer to the listeners of every model that contains it.

    `module` is the layer; None means the innermost module that is running. Returns the heads' output,
    [B, H, T, Dv], as the listeners leave it.
    """
    module = innermost() if module is None else module
    if module is None:
        return output
    if output is not None and torch._C._functorch.is_batchedtensor(output):
        raise ArgumentError(
            f"model must not run under torch.vmap while it is watched: {list(output.shape)} is one "
            "example of many; pass the whole batch"
        )
    silence.depth += 1  # `quietly` inlined: this runs for every layer
    try:
        for attachment in tuple(active):
            output = attachment.tell(module, kind, weights, value, output)
    finally:
        silence.depth -= 1
    return output


def requested_statistics(shape: tuple[int, ...], on_cpu: bool) -> tuple[tuple[str, ...], bool]:
    """Return the row statistics that listeners read of a call [B, H, T, S], and whether all of them wait.

    Pooled maps are left out, for they take a second pass. The second value is True if no listener reads the
    call before its forward pass is over.
    """
    if math.prod(shape) <= (SHORT_ON_CPU if on_cpu else SHORT):
        for attachment in tuple(active):
            if not attachment.waits:
                return (), False
        return (), True
    names: dict[str, None] = {}
    for attachment in tuple(active):
        names |= dict.fromkeys(attachment.statistics_if_long)
    return tuple(names), False


class quietly(AbstractContextManager[None]):  # noqa: N801, reads as a verb
    """Context in which no attention is heard, for headwise's own work."""

    def __enter__(self) -> None:
        silence.depth += 1

    def __exit__(self, *_: object) -> None:
        silence.depth -= 1


def is_quiet() -> bool:
    return silence.depth > 0


def path_of(module: nn.Module) -> str | None:
    """Return the path of a module in a watched model, or None."""
    for attachment in tuple(active):
        path = attachment.path_of(module)
        if path is not None:
            return path
    return None


def note_empty_call() -> None:
    """Record the call of a layer on an empty batch: there is no attention to hear, and none was missed."""
    for attachment, run in running():
        attachment.elsewhere = True
        for entered in run.entered:
            entered.was_heard = True


# Which queries and keys are real


def real_queries_now(path: str | None, batch: int, length: int) -> Tensor | None:
    """Return which queries of a layer are real, bool [B, length], from the arguments of this forward."""
    for attachment, run in running():
        decodes = attachment.two_texts and "decoder" in (path or "").split(".")
        cached, key = run.forward.padding, (path, batch, length)
        if (
            key not in cached or not in_backward()
        ):  # a checkpoint runs a part again, without the arguments around it
            real = run.padding(decodes)
            cached[key] = real if real is not None and tuple(real.shape) == (batch, length) else None
        if cached[key] is not None:
            return cached[key]
    return None


def note_query_padding(module: nn.Module, queries: Tensor | None) -> None:
    """Store which queries of a self-attention are real, for the cross-attention in the same layer."""
    for attachment, run in running():
        path = attachment.path_of(module)
        if path is not None:
            run.query_padding[path.rpartition(".")[0]] = queries


def noted_query_padding(module: nn.Module, batch: int, length: int) -> Tensor | None:
    """Return which queries of a cross-attention are real, bool [batch, length], as self-attention stored."""
    for attachment, run in running():
        path = attachment.path_of(module)
        real = None if path is None else run.query_padding.get(path.rpartition(".")[0])
        if real is not None and tuple(real.shape) == (batch, length):
            return real
    return None


def with_padding(mask: Mask, batch: int) -> Mask:
    """Return the mask of a self-attention with padding: keys that no query sees, and their queries."""
    if mask.queries is not None:
        return mask
    if mask.keys is not None:
        return replace(mask, queries=mask.keys)
    if mask.allowed is None or mask.allowed.shape[2] == 1:
        return mask
    readable = can_read(mask.allowed)
    visible = fact(mask.allowed, "visible keys", _visible_keys) if readable else _visible_keys(mask.allowed)
    if visible is None:
        return mask
    visible = expand_padding(visible, batch)
    return replace(mask, keys=visible, queries=visible)


def expand_padding(real: Tensor, batch: int) -> Tensor:
    """Return which positions are real, [batch, S], from one row for all sequences or one row each."""
    return real.expand(batch, -1) if real.shape[0] == 1 else real


def _visible_keys(allowed: Tensor) -> Tensor | None:
    """Return which keys any query sees, bool [B or 1, S]; None if all are, where values can be read."""
    visible = allowed.any(2).any(1)
    return None if can_read(allowed) and bool(visible.all()) else visible


# Calls of layers whose heads are sharded over processes


def local_heads_of(
    module: nn.Module, path: str, weights: AttentionMap, value: Tensor | None
) -> LocalHeads | None:
    """Return which heads of a layer this call covers; None: all of them.

    A layer of headwise knows which heads it has. A layer of Hugging Face is sharded by its model's `tp_plan`
    if it has fewer heads than its config says; a layer that is sharded in another way is refused by name.
    """
    local_heads: LocalHeads | None = getattr(module, "local_heads", None)
    if local_heads is None:
        if "torch.distributed.tensor" not in sys.modules:
            return None
        parameter = _sharded_parameter(module)
        if parameter is None:
            return None
        local_heads = _local_heads_of_plan(module, path, parameter[0], parameter[1], weights.shape[1], value)
    if local_heads is None or local_heads.group.size() == 1:
        return None
    if weights.ranks is not None:
        raise ArgumentError(
            f"model must be sharded either by heads or by sequence to be watched: {path_in_words(path)} has "
            f"both, {local_heads} and a sequence over {weights.ranks} ranks; use only one of them"
        )
    if not isinstance(weights.as_made[0], Scores):
        raise ArgumentError(
            f"fallback must not be 'eager' if heads are sharded over processes: in {path_in_words(path)} "
            f"only the weights of {local_heads} are available; leave it out, or use fallback='skip'"
        )
    return local_heads


def _sharded_parameter(module: nn.Module) -> tuple[str, DTensor] | None:
    """Return the name and value of a parameter of the layer that is sharded over processes, or None."""
    from torch.distributed.tensor import DTensor

    for path, owner in module.named_modules():
        gathers = any(base.__name__ == "FSDPModule" for base in type(owner).__mro__)
        for name, parameter in owner.named_parameters(path, recurse=False):
            if not isinstance(parameter, DTensor) or (gathers and parameter.device_mesh.ndim == 1):
                continue  # fully_shard gathers a layer's parameters before it runs
            if any(placement.is_shard() for placement in parameter.placements):
                return name, parameter
    return None


def _local_heads_of_plan(
    module: nn.Module, path: str, name: str, parameter: DTensor, heads: int, value: Tensor | None
) -> LocalHeads | None:
    """Return the local heads of a Hugging Face layer sharded by its `tp_plan`; None: it gathers them."""
    config: Any = getattr(module, "config", None)
    total = getattr(config, "num_attention_heads", None)
    ranks = parameter.device_mesh.size()
    layer = f"{path or 'the model itself'} ({type(module).__name__}) has {heads} heads here, and its {name} "
    over = f"is sharded over {ranks} processes"
    if not isinstance(total, int) or parameter.device_mesh.ndim != 1:
        raise ArgumentError(
            f"heads must be sharded in a known way to be watched: {layer}{over}; shard them with "
            "headwise.parallel.shard_heads, or watch the model before it is sharded"
        )
    if heads == total:
        return None  # gathered by its plan before it attends
    kv_heads = heads if value is None else value.shape[1]
    kv_total = getattr(config, "num_key_value_heads", None) or total
    if heads * ranks != total or kv_heads * ranks != kv_total:
        raise ArgumentError(
            f"heads must be distributed evenly over processes: {layer}{over}, with {kv_heads} of "
            f"{kv_total} key heads, and its config says {total} heads; use a number of processes that "
            "divides both"
        )
    group = parameter.device_mesh.get_group()
    return LocalHeads(torch.distributed.get_rank(group) * heads, heads, total, kv_heads, kv_total, group)
