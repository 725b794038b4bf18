"""What is heard when an attention layer runs, who listens, and what runs now.

Who is attached is known to all threads; what runs is each thread's own: a forward, the modules it is in, and
what those were given of tokens and padding. A layer whose heads lie over several
processes is heard on each of them with all its heads.
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
from ..heads.together import SHORT, SHORT_ON_CPU, Group
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
    """One forward pass of a model. What was measured refers to it, also when the pass is over."""

    number: int = 0
    # what layers were told of padding, for a checkpoint that runs them again
    padding: dict[tuple[str | None, int, int], Tensor | None] = field(default_factory=dict)
    # configs whose mask functions were called with the padding
    masked: list[object] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One attention layer at work, once.

    Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim.
    """

    path: str  # the module's, in the model listened to
    kind: str  # "self" or "cross"
    weights: AttentionMap  # [B, H, T, S], before dropout
    value: Tensor | None  # [B, Hk, S, Dv]; None where only weights are to be had
    output: Tensor | None  # [B, H, T, Dv], each head before they are joined; None likewise
    forward: ForwardPass
    tokens: dict[str, Tensor] = field(default_factory=dict)  # given around it, by argument name: int [B, T]

    @property
    def num_heads(self) -> int:
        return self.weights.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """As many as heads, where values are not to be had."""
        return self.num_heads if self.value is None else self.value.shape[1]


class SplitCall(LayerCall):
    """A call of some heads of a layer, heard as the call of all of them; `own` is what is here.

        rank 0  heads 0 1 ──┐                                   ┌── heads 0 1 ──> out_proj
        rank 1  heads 2 3 ──┴─ gathered ──> listeners, alike ───┴── heads 2 3 ──> out_proj

    What listeners do between the two is the same on every rank, so that gradients are those of all heads.
    Nothing is gathered that nobody asks for; who asks does so on every rank.
    """

    def __init__(self, own: LayerCall, here: LocalHeads, output: Tensor | None = None) -> None:
        known = {"own": own, "here": here, "path": own.path, "kind": own.kind, "forward": own.forward}
        self.__dict__.update(known, tokens=own.tokens)
        if output is not None:  # as another listener left it
            self.__dict__["output"] = output

    own: LayerCall
    here: LocalHeads

    @cached_property
    def weights(self) -> AttentionMap:
        """[B, H, T, S] of all heads"""
        return self.here.whole_map(self.own.weights)

    @cached_property
    def value(self) -> Tensor | None:
        """[B, Hk, S, Dv] of all heads"""
        return None if self.own.value is None else self.here.whole_kv(self.own.value)

    @cached_property
    def output(self) -> Tensor | None:
        """[B, H, T, Dv] of all heads"""
        return None if self.own.output is None else self.here.whole(self.own.output)


class Listener:
    """Someone who is told of every call while attached to a model."""

    # Row statistics that it will ask of a long call, where it asks for nothing that takes a walk over the
    # weights: they are collected on the way where that can be
    asks_if_long: tuple[str, ...] = ()
    waits = False  # whether it looks at no short call before its forward is over, and then at copies
    noted: Noted | None = None  # how it put the last call aside, for others that differ in tensors alone
    # Whether it knows calls whose sequence lies over ranks: their map is of the whole, values and outputs are
    # this rank's
    hears_shards = False

    def hear(self, call: LayerCall) -> Tensor | None:
        """Take note; a tensor takes the place of the heads' output, [B, H, T, Dv]."""
        raise NotImplementedError

    def after(self, forward: ForwardPass) -> None:
        """A forward is over, or has raised."""

    def miss(self, path: str, kind: str, bypassed: Bypassed) -> None:
        """In a forward that is over, a layer of this class attended, or may have, and was not heard."""


class Noted(NamedTuple):
    """How a call was put aside by one that waits."""

    kind: str
    forward: ForwardPass
    group: Group  # with those it is to be measured with, while there is room
    # Another of the same forward, which differs in its place, its scores and lse; False: no more are taken
    again: Callable[[str, Scores, Tensor | None], bool]


def in_backward() -> bool:
    """Whether this is a forward run again for its gradients (checkpointing), which was heard before."""
    return torch._C._current_graph_task_id() != -1


# One forward, and what its modules were given


class Bypassed(NamedTuple):
    """A module that attended in a way that nobody heard, or that may have."""

    softmaxes: int  # that ran in it
    why: str | None  # fallback="eager" cannot read its weights; None: it can
    is_certain: bool = True  # else it may be something else than attention, which is no reason to refuse it
    sizes: tuple[int, ...] = ()  # B and T of its input, where they are known

    def and_again(self, other: Bypassed) -> Bypassed:
        """The same module in a later forward."""
        softmaxes, is_certain = self.softmaxes + other.softmaxes, self.is_certain or other.is_certain
        return Bypassed(softmaxes, self.why or other.why, is_certain, self.sizes or other.sizes)


class Entered:
    """A module that is running now."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.heard = path, module, False
        self.mode: TorchFunctions | None = None  # which listens to torch's functions meanwhile
        self.is_noted = False  # else it is as if only the modules around it had been given anything
        self.read: dict[bool, dict[str, Tensor]] = {}  # the tokens that layers inside it read, once known
        self.order = next(_order)  # among the modules of all models
        self.tokens: dict[str, Tensor] = {}  # that it was given, by argument name: int [B, T]
        self.padding: dict[str, Tensor] = {}  # likewise: bool [B, S], True = real
        self.shapes: list[torch.Size] = []  # of the numbers that it was given

    def given(self, what: dict[str, Tensor], decodes: bool) -> dict[str, Tensor]:
        """Of what it was given, what is of the decoder's text, or what is not: all that a decoder has is."""
        if decodes and "decoder" in self.path.split("."):
            return what
        return {name: value for name, value in what.items() if (name in OF_DECODER) == decodes}

    def may_read(self, text: Tensor) -> bool:
        """Return True if it was given nothing, or something that can have been made of [B, T] tokens."""
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
        self.told: dict[str, int] = {}  # how many calls of a path were told of
        self.alike: list[Any] = []  # how layers were answered, for those like them; see attended.py
        self.bypassed: dict[str, Bypassed] = {}

    def note(self, here: Entered, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Tokens and padding among the arguments of a module: of the layers inside it, while it runs."""
        here.is_noted = True
        kind: type = type(here.module)
        named = dict(zip(_parameters(kind), args, strict=False)) | kwargs
        here.shapes = [
            value.shape
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim > 1
            and not value.is_nested
        ]
        # Beside numbers, what an inner module takes first are positions, say
        if args and isinstance(args[0], Tensor) and not (self.entered and here.shapes):
            named.setdefault("input_ids", args[0])
        for name in TOKENS:
            value = named.get(name)
            if not isinstance(value, Tensor) or value.ndim != 2 or value.dtype == torch.bool:
                continue
            if not value.is_floating_point() and not value.is_complex():
                here.tokens.setdefault(name, value)
        for name in PADDING:
            value = named.get(name)
            if isinstance(value, Tensor) and value.ndim == 2:
                real = _as_padding(here.module, value)
                if real is not None:
                    here.padding.setdefault(name, real)

    def tokens(self, decodes: bool) -> dict[str, Tensor]:
        """The ids that the innermost module around the layer at work was given, of those that were given any.

        decodes: the layer is of a decoder beside an encoder, each with a text of its own.
        """
        for entered in reversed(self.entered):
            if entered.is_noted:
                read = entered.read.get(decodes)
                if read is None:  # the same for all layers inside: what is around them does not change
                    read = entered.read[decodes] = self._tokens(decodes)
                return read
        return {}

    def _tokens(self, decodes: bool) -> dict[str, Tensor]:
        for inside, entered in enumerate(reversed(self.entered)):
            given = entered.given(entered.tokens, decodes)
            if given:
                return {name: ids for name, ids in given.items() if self._is_read(ids, inside)}
        return {}

    def padding(self, decodes: bool) -> Tensor | None:
        """Likewise, which tokens are real; nothing is known of a text that it was not given with."""
        for inside, entered in enumerate(reversed(self.entered)):
            real = next(iter(entered.given(entered.padding, decodes).values()), None)
            if real is not None:
                return real if self._is_read(real, inside) else None
            text = entered.given(entered.tokens, decodes)
            outer = [ids for around in self.entered[: -1 - inside] for ids in around.tokens.values()]
            if text and outer and not any(ids is other for ids in text.values() for other in outer):
                return None
        return None

    def _is_read(self, text: Tensor, inside: int) -> bool:
        """Whether what all of the innermost modules were given can come from this text: no image does."""
        return all(entered.may_read(text) for entered in self.entered[len(self.entered) - inside :])


def _as_padding(module: nn.Module, value: Tensor) -> Tensor | None:
    """Which positions an `attention_mask` [B, S] calls real, bool; None: it says nothing of the kind."""
    if not type(module).__module__.startswith("transformers.") and value.shape[0] == value.shape[1]:
        return None  # it may as well be who attends to whom, [T, T]
    if not value.is_floating_point():
        return value.bool()
    hidden = value <= AS_GOOD_AS_HIDDEN
    if bool(((value != 0) & (value != 1) & ~hidden).any()):
        return None  # numbers that are added
    if bool(hidden.any()):
        return ~hidden
    return value.bool() if bool(value.any()) else None  # zeros alone are added, and hide nothing


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """The names of what a module's forward takes, in order."""
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


# All that runs now


class _Silence(threading.local):
    depth = 0  # of our own work, in which no attention is to be heard


active: list[Attachment] = []  # in the order in which they were attached
silence = _Silence()


def running() -> list[tuple[Attachment, ForwardState]]:
    """The models that run in this thread, the one whose module was entered last first."""
    at_work = [(attachment, run) for attachment in tuple(active) if (run := attachment.run) is not None]
    return at_work if len(at_work) < 2 else sorted(at_work, key=lambda pair: -pair[1].entered[-1].order)


def innermost() -> nn.Module | None:
    """The module that runs now in this thread, of all that are listened to."""
    at_work = running()
    return at_work[0][1].entered[-1].module if at_work else None


def announce(
    module: nn.Module | None,
    kind: str,
    weights: AttentionMap,
    value: Tensor | None,
    output: Tensor | None,
) -> Tensor | None:
    """An attention layer ran: tell whoever listens to a model it is part of.

    `module` is the layer; None: whichever module runs now. Returns the heads' output, [B, H, T, Dv], as the
    listeners leave it.
    """
    module = innermost() if module is None else module
    if module is None:
        return output
    if output is not None and torch._C._functorch.is_batchedtensor(output):
        raise ArgumentError(
            f"model must not run under torch.vmap while it is listened to: {list(output.shape)} is one of "
            "many at once; give it the whole batch"
        )
    silence.depth += 1  # quietly: this is on every layer's way
    try:
        for attachment in tuple(active):
            output = attachment.tell(module, kind, weights, value, output)
    finally:
        silence.depth -= 1
    return output


def statistics_asked_for(shape: tuple[int, ...], on_cpu: bool) -> tuple[tuple[str, ...], bool]:
    """(row statistics that someone will ask of a call [B, H, T, S], no picture, which takes a walk anyway;
    whether everybody waits for the forward to be over)."""
    if math.prod(shape) <= (SHORT_ON_CPU if on_cpu else SHORT):
        for attachment in tuple(active):
            if not attachment.waits:
                return (), False
        return (), True
    names: dict[str, None] = {}
    for attachment in tuple(active):
        names |= dict.fromkeys(attachment.asks_if_long)
    return tuple(names), False


class quietly(AbstractContextManager[None]):  # noqa: N801, reads as a verb
    """Our own work, in which no attention is to be heard."""

    def __enter__(self) -> None:
        silence.depth += 1

    def __exit__(self, *_: object) -> None:
        silence.depth -= 1


def is_quiet() -> bool:
    return silence.depth > 0


def path_of(module: nn.Module) -> str | None:
    """Where a module is in a model that is listened to."""
    for attachment in tuple(active):
        path = attachment.path_of(module)
        if path is not None:
            return path
    return None


def note_empty_call() -> None:
    """A layer ran on nothing: there is no attention to tell of, and none was missed."""
    for attachment, run in running():
        attachment.elsewhere = True
        for entered in run.entered:
            entered.heard = True


# Which queries and keys are real


def real_queries_now(path: str | None, batch: int, length: int) -> Tensor | None:
    """Which queries of a layer are real, bool [B, length], as the arguments of this forward say."""
    for attachment, run in running():
        decodes = attachment.two_texts and "decoder" in (path or "").split(".")
        told, key = run.forward.padding, (path, batch, length)
        if key not in told or not in_backward():  # what is run again for its gradients begins further in
            real = run.padding(decodes)
            told[key] = real if real is not None and tuple(real.shape) == (batch, length) else None
        if told[key] is not None:
            return told[key]
    return None


def note_query_padding(module: nn.Module, queries: Tensor | None) -> None:
    """Remember which queries of a self-attention are real, for the cross-attention beside it in the layer."""
    for attachment, run in running():
        path = attachment.path_of(module)
        if path is not None:
            run.query_padding[path.rpartition(".")[0]] = queries


def noted_query_padding(module: nn.Module, batch: int, length: int) -> Tensor | None:
    """Return which queries of a cross-attention are real, bool [batch, length], as self-attention noted."""
    for attachment, run in running():
        path = attachment.path_of(module)
        real = None if path is None else run.query_padding.get(path.rpartition(".")[0])
        if real is not None and tuple(real.shape) == (batch, length):
            return real
    return None


def with_padding(mask: Mask, batch: int) -> Mask:
    """In self-attention, a key that no query may see is padding, and so is the query in its place."""
    if mask.queries is not None:
        return mask
    if mask.keys is not None:
        return replace(mask, queries=mask.keys)
    if mask.allowed is None or mask.allowed.shape[2] == 1:
        return mask
    known = can_read(mask.allowed)
    seen = fact(mask.allowed, "seen by some", _seen_by_some) if known else _seen_by_some(mask.allowed)
    if seen is None:
        return mask
    seen = for_each(seen, batch)
    return replace(mask, keys=seen, queries=seen)


def for_each(real: Tensor, batch: int) -> Tensor:
    """Which positions are real, [B, S], from one row for all or one per sequence."""
    return real.expand(batch, -1) if real.shape[0] == 1 else real


def _seen_by_some(allowed: Tensor) -> Tensor | None:
    """Which keys some query may see, bool [B or 1, S]; None: all of them, where that can be read."""
    seen = allowed.any(2).any(1)
    return None if can_read(allowed) and bool(seen.all()) else seen


# Calls of layers whose heads lie over several processes


def local_heads_of(
    module: nn.Module, path: str, weights: AttentionMap, value: Tensor | None
) -> LocalHeads | None:
    """Which heads of a layer this call is of; None: all of them.

    A layer of ours knows which heads it has. One of Hugging Face is known to be sharded by its own `tp_plan`
    where it has fewer heads than its config says; one that somebody else has sharded is refused by name.
    """
    here: LocalHeads | None = getattr(module, "local_heads", None)
    if here is None:
        if "torch.distributed.tensor" not in sys.modules:
            return None
        parameter = _over_ranks(module)
        if parameter is None:
            return None
        here = _of_plan(module, path, parameter[0], parameter[1], weights.shape[1], value)
    if here is None or here.group.size() == 1:
        return None
    if weights.ranks is not None:
        raise ArgumentError(
            f"model must lie over ranks by heads or by sequence to be listened to: {path} does both, "
            f"{here} and a sequence over {weights.ranks} ranks; watch it with one of the two"
        )
    if not isinstance(weights.as_made[0], Scores):
        raise ArgumentError(
            f"fallback must not be 'eager' where heads lie over several processes: of {path} only the "
            f"weights of {here} are to be had; leave it out, or fallback='skip'"
        )
    return here


def _over_ranks(module: nn.Module) -> tuple[str, DTensor] | None:
    """A parameter of the layer that lies over several processes, and is cut."""
    from torch.distributed.tensor import DTensor

    for path, owner in module.named_modules():
        gathers = any(base.__name__ == "FSDPModule" for base in type(owner).__mro__)
        for name, parameter in owner.named_parameters(path, recurse=False):
            if not isinstance(parameter, DTensor) or (gathers and parameter.device_mesh.ndim == 1):
                continue  # fully_shard makes a layer whole before it runs
            if any(place.is_shard() for place in parameter.placements):
                return name, parameter
    return None


def _of_plan(
    module: nn.Module, path: str, name: str, parameter: DTensor, heads: int, value: Tensor | None
) -> LocalHeads | None:
    """Of a layer of Hugging Face that its own `tp_plan` has sharded."""
    config: Any = getattr(module, "config", None)
    total = getattr(config, "num_attention_heads", None)
    ranks = parameter.device_mesh.size()
    what = f"{path or 'the model itself'} ({type(module).__name__}) has {heads} heads here, and its {name} "
    over = f"lies over {ranks} processes"
    if not isinstance(total, int) or parameter.device_mesh.ndim != 1:
        raise ArgumentError(
            f"heads must be known to be all there: {what}{over}; shard it with "
            "headwise.parallel.shard_heads, or listen to it before it is sharded"
        )
    if heads == total:
        return None  # gathered by its plan before it attends
    kv_heads = heads if value is None else value.shape[1]
    kv_total = getattr(config, "num_key_value_heads", None) or total
    if heads * ranks != total or kv_heads * ranks != kv_total:
        raise ArgumentError(
            f"heads must lie evenly over processes: {what}{over}, with {kv_heads} of {kv_total} key heads, "
            f"and its config says {total} heads; use a number of processes that divides both"
        )
    group = parameter.device_mesh.get_group()
    return LocalHeads(torch.distributed.get_rank(group) * heads, heads, total, kv_heads, kv_total, group)
