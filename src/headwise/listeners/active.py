"""What is heard when an attention layer runs, who listens, and what runs now.

Who is attached is known to all threads; what runs is each thread's own: a forward, the modules it is in, and
what those were given of tokens and padding.
"""

from __future__ import annotations

import inspect
import itertools
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..engines.scores import Scores
from ..errors import ArgumentError
from ..foreign_masks import AS_GOOD_AS_HIDDEN
from ..heads.together import SHORT, SHORT_ON_CPU, Group
from ..map import AttentionMap

if TYPE_CHECKING:
    from .attachment import Attachment


OF_DECODER = ("decoder_input_ids", "target_ids", "decoder_attention_mask")  # beside those of an encoder
TOKENS = ("decoder_input_ids", "target_ids", "input_ids", "ids", "input", "tokens", "idx", "x")
PADDING = ("decoder_attention_mask", "attention_mask")

_order = itertools.count()


@dataclass(eq=False)
class Forward:
    """Identity of one forward pass of a model, from its first hooked module to that module's return.

    It outlives the pass: what was measured refers to it.
    """

    number: int = 0
    # what layers were told of padding, for a checkpoint that runs them again
    padding: dict[tuple[str | None, int, int], Tensor | None] = field(default_factory=dict)
    # configs whose mask functions were called with the padding
    masked: list[object] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention layer at work, once.

    Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim.
    """

    path: str  # the module's, in the model listened to
    kind: str  # "self" or "cross"
    weights: AttentionMap  # [B, H, T, S], before dropout
    value: Tensor | None  # [B, Hk, S, Dv]; None where only weights are to be had
    output: Tensor | None  # [B, H, T, Dv], each head before they are joined; None likewise
    forward: Forward
    tokens: dict[str, Tensor] = field(default_factory=dict)  # given around it, by argument name: int [B, T]

    @property
    def num_heads(self) -> int:
        return self.weights.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """As many as heads, where values are not to be had."""
        return self.num_heads if self.value is None else self.value.shape[1]


class Listener(Protocol):
    """Someone who is told of every call while attached to a model.

    One that will ask the map of a long call for row statistics, and for nothing that takes a walk over the
    weights, may name them in `asks_if_long`: they are collected on the way where that can be. One that
    `waits` looks at no short call before its forward is over (`after(forward)` tells), and then at copies;
    in `noted` it leaves how the last call was put aside, for those that differ in their tensors alone.
    One that has a method `miss(path, kind, bypassed)` is told after each forward what was not heard in it.
    `hears_shards` is True of one that knows calls whose sequence lies over ranks: their map is of the whole,
    their values and outputs are this rank's.
    """

    def hear(self, call: Call) -> Tensor | None:
        """Take note; a tensor takes the place of the heads' output, [B, H, T, Dv]."""
        ...


class Noted(NamedTuple):
    """How a call was put aside by one that waits."""

    kind: str
    forward: Forward
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


class Mode(Protocol):
    """Someone who is told when a module begins and ends, and listens to torch's functions in between."""

    def enter(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None: ...

    def leave(self, output: object, came_back: bool) -> Bypassed | None:
        """The module returned `output`, or raised; returns what was not heard of its attention."""


class Entered:
    """A module that is running now."""

    __slots__ = (
        "heard",
        "is_noted",
        "mode",
        "module",
        "order",
        "padding",
        "path",
        "read",
        "shapes",
        "tokens",
    )

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.heard = path, module, False
        self.mode: Mode | None = None  # which listens to torch's functions meanwhile
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

    __slots__ = ("alike", "bypassed", "entered", "forward", "query_padding", "told")

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.entered: list[Entered] = []  # the modules that run now, the innermost last
        self.query_padding: dict[str, Tensor | None] = {}  # of self-attention, by its parent: what is real
        self.told: dict[str, int] = {}  # how many calls of a path were told of
        self.alike: list[Any] = []  # how layers were answered, for those like them; see layers_alike.py
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
            if isinstance(value, Tensor) and value.ndim == 2 and not _is_real(value):
                here.tokens.setdefault(name, value)
        for name in PADDING:
            value = named.get(name)
            if isinstance(value, Tensor) and value.ndim == 2:
                real = _as_padding(here.module, value)
                if real is not None:
                    here.padding.setdefault(name, real)

    def tokens(self, decodes: bool) -> dict[str, Tensor]:
        """The ids that the innermost module around the layer at work was given, of those that were given any.

        Args:
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


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex() or value.dtype == torch.bool


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

    Args:
        module: the layer; None: whichever module runs now.

    Returns:
        The heads' output, [B, H, T, Dv], as the listeners leave it.

    Raises:
        ArgumentError: under `torch.vmap`, where there is no number to measure.
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


def padding_now(path: str | None, batch: int, length: int) -> Tensor | None:
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


def note_empty_call() -> None:
    """A layer ran on nothing: there is no attention to tell of, and none was missed."""
    for attachment, run in running():
        attachment.elsewhere = True
        for entered in run.entered:
            entered.heard = True
