"""Attaching listeners to a model: the hooks that tell where a call comes from, and the adapters that hear it.

    model ── posts: which module runs now ──┐
          └─ adapters: q, k, v, mask ───────┴─> announce(module, ...) ──> every listener's hear(call)

While somebody listens, attention runs on headwise's engines: that is where the log-sum-exp comes from that
makes the second pass possible. Nothing else in the model changes, nothing outside of it does, and all of it
is undone at the end. A forward belongs to the thread it runs in; listeners are told of one call at a time.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, AttentionBypassed
from ..foreign_masks import AS_GOOD_AS_HIDDEN
from ..heads.layer_names import Layer, names_of
from ..map import AttentionMap
from .active import Call, Forward, Listener, active, in_backward, innermost
from .model_structure import structure_of
from .shared_patches import turns

__all__ = ["FALLBACKS", "Attachment", "Run", "attach"]

FALLBACKS = (None, "eager", "skip")
TOKENS = ("decoder_input_ids", "input_ids", "input", "tokens", "idx", "x")
PADDING = ("decoder_attention_mask", "attention_mask")

_order = itertools.count()


class _Entered:
    """A module that is running now."""

    __slots__ = ("heard", "module", "order", "padding", "path", "shapes", "tokens")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.heard = path, module, False
        self.order = next(_order)  # among the modules of all models
        self.tokens: dict[str, Tensor] = {}  # that it was given, by argument name: int [B, T]
        self.padding: dict[str, Tensor] = {}  # likewise: bool [B, S], True = real
        self.shapes: list[torch.Size] = []  # of the numbers that it was given

    def given(self, what: dict[str, Tensor], decodes: bool) -> dict[str, Tensor]:
        """Of what it was given, what is of the decoder's text, or what is not: all that a decoder has is."""
        if decodes and "decoder" in self.path.split("."):
            return what
        return {name: each for name, each in what.items() if name.startswith("decoder_") == decodes}

    def may_read(self, text: Tensor) -> bool:
        """Whether it was given nothing, or something that can have been made of [B, T] tokens."""
        B, T = text.shape
        return not self.shapes or any(
            tuple(shape[:2]) in ((B, T), (T, B)) or shape[0] == B * T for shape in self.shapes
        )


class Run:
    """One forward at work, in one thread: from the first of its model's modules to that module's return."""

    __slots__ = ("beside", "bypassed", "entered", "forward", "told")

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.entered: list[_Entered] = []  # the modules that run now, the innermost last
        self.beside: dict[str, Tensor | None] = {}  # parent -> which queries of its self-attention are real
        self.told: dict[str, int] = {}  # how many calls of a path were told of
        self.bypassed: dict[str, tuple[int, ...]] = {}

    def note(self, here: _Entered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tokens and padding among the arguments of a module: of the layers inside it, while it runs."""
        kind: Any = type(here.module)
        named = dict(zip(_parameters(kind), args, strict=False)) | kwargs
        here.shapes = [
            value.shape
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
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
        for inside, each in enumerate(reversed(self.entered)):
            found = each.given(each.tokens, decodes)
            if found:
                return {name: ids for name, ids in found.items() if self._is_read(ids, inside)}
        return {}

    def padding(self, decodes: bool) -> Tensor | None:
        """Likewise, which tokens are real; nothing is known of a text that it was not given with."""
        for inside, each in enumerate(reversed(self.entered)):
            found = next(iter(each.given(each.padding, decodes).values()), None)
            if found is not None:
                return found if self._is_read(found, inside) else None
            text = each.given(each.tokens, decodes)
            outer = [ids for one in self.entered[: -1 - inside] for ids in one.tokens.values()]
            if text and outer and not any(ids is other for ids in text.values() for other in outer):
                return None
        return None

    def _is_read(self, text: Tensor, inside: int) -> bool:
        """Whether what all of the innermost modules were given can come from this text: no image does."""
        return all(each.may_read(text) for each in self.entered[len(self.entered) - inside :])


class _Post:
    """One attachment at one module."""

    __slots__ = ("attachment", "is_place", "mode", "path")

    def __init__(self, attachment: Attachment, path: str, is_place: bool) -> None:
        self.attachment, self.path, self.is_place = attachment, path, is_place
        self.mode: Any = None  # which listens to torch's functions while this module runs

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = self.attachment.run_or_new()
        here = _Entered(self.path, module)
        if not self.is_place:
            run.note(here, args, kwargs)
        run.entered.append(here)
        if self.mode is not None:
            self.mode.enter(args, kwargs)

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = self.attachment.run
        assert run is not None, "somebody entered"
        if self.is_place and not run.entered[-1].heard:
            run.bypassed.setdefault(self.path, _sizes(args, kwargs))
        if len(run.entered) == 1:
            self.attachment.came_back(run)

    def leave(self) -> None:
        if self.mode is not None:
            self.mode.leave()
        self.attachment.leave()


class _Running(threading.local):
    run: Run | None = None
    forward: Forward | None = None  # the last, which a part of it may be run again of


class Attachment:
    """A model and those who listen to it. Made by `attach`; ends with the last listener."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.structure = structure_of(model)
        self.paths, self.places = self.structure.paths, self.structure.places
        self.names = names_of(self.places)
        self.listeners: dict[ref[Listener], str | None] = {}  # and what each wants of layers that bypass
        self.two_texts = _has_two_texts(model, self.places)
        self.is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.forward = Forward()  # the last that began, in any thread
        self.bypassed: dict[str, tuple[int, ...]] = {}  # in forwards that are over; nobody was told of these
        self.elsewhere = (
            False  # whether another model's attention was heard inside, or a layer ran on nothing
        )
        self.posts: dict[nn.Module, _Post] = {}
        self._running = _Running()
        self._telling = threading.RLock()
        self._undo = ExitStack()

    # Coming and going

    def begin(self) -> None:
        from .adapters import ADAPTERS
        from .adapters.loans import station, uncompile

        try:
            for module, (path, is_place) in self.structure.hooked.items():
                post = self.posts[module] = _Post(self, path, is_place)
                self._undo.callback(station(module, post))
            self._undo.callback(uncompile(self.paths))
            for adapter in ADAPTERS:
                self._undo.callback(adapter(self))
        except BaseException:
            self._undo.close()
            raise
        active.append(self)

    def end(self) -> None:
        if self in active:
            active.remove(self)
        self._undo.close()
        self.posts.clear()

    def add(self, listener: Listener, fallback: str | None) -> ref[Listener]:
        """Someone who is told for as long as they live, and are not taken away."""
        found = ref(listener, lambda gone: turns.later(partial(self._drop, gone)))
        self.listeners[found] = fallback
        return found

    def remove(self, listener: ref[Listener]) -> None:
        self.listeners.pop(listener, None)
        if not self.listeners:
            self.end()

    def _drop(self, listener: ref[Listener]) -> None:
        """A listener that nobody can ask any more: nobody could have ended this, either."""
        if listener not in self.listeners:
            return
        self.remove(listener)
        if not sys.is_finalizing():
            warnings.warn(
                f"watching must be ended: what watched {type(self.model).__name__} was dropped, and hears it "
                "no more; keep what `start()` was called on and call its `stop()`, or use a `with` block",
                RuntimeWarning,
                stacklevel=2,
            )

    def heard_by(self) -> Iterator[tuple[Listener, str | None]]:
        """The listeners, and what each wants of layers that bypass."""
        for found, fallback in list(self.listeners.items()):
            listener = found()
            if listener is not None:
                yield listener, fallback

    @property
    def fallback(self) -> str | None:
        """What is to be done with layers that bypass every hook: the strictest listener's wish."""
        wishes = [fallback for _, fallback in self.heard_by()]
        return None if None in wishes or not wishes else "eager" if "eager" in wishes else "skip"

    @property
    def reads_eager(self) -> bool:
        """Whether somebody reads weights that layers compute themselves."""
        return any(fallback == "eager" for _, fallback in self.heard_by())

    def name_of(self, path: str) -> Layer:
        """What the layer of a call goes by: numbered from the model, whatever ran; or its path."""
        return self.names.get(path, path)

    # Who runs now, in this thread

    @property
    def run(self) -> Run | None:
        """The forward at work."""
        return self._running.run

    def run_or_new(self) -> Run:
        running = self._running
        if running.run is None:
            running.run = Run(self._new_forward())
        return running.run

    def _new_forward(self) -> Forward:
        if in_backward():  # a part of an earlier forward, run again for its gradients
            return self._running.forward or self.forward
        with self._telling:
            self.forward = self._running.forward = Forward(self.forward.number + 1)
            return self.forward

    def leave(self) -> None:
        run = self._running.run
        assert run is not None, "somebody entered"
        run.entered.pop()
        if not run.entered:
            self._running.run = None
            if run.bypassed:  # it raised before anybody was told
                with self._telling:
                    self.bypassed |= run.bypassed

    def came_back(self, run: Run) -> None:
        """The outermost module did.

        Raises:
            AttentionBypassed: attention ran that nobody could hear, unless that was allowed.
        """
        for path in self.places:  # a layer that its model has put in another's place has no post
            try:
                now = self.model.get_submodule(path)
            except AttributeError:  # taken out, which is its owner's right
                continue
            if now not in self.paths:
                run.bypassed.setdefault(path, ())
        if run.bypassed and self.fallback != "skip":
            bypassed, run.bypassed = run.bypassed, {}
            self._refuse(bypassed)

    @property
    def entered(self) -> list[_Entered]:
        """The modules that run now, the innermost last."""
        return [] if self.run is None else self.run.entered

    @property
    def here(self) -> str | None:
        """The path of the innermost module that runs now."""
        return self.run.entered[-1].path if self.run is not None else None

    @property
    def is_outside(self) -> bool:
        """Whether what runs now is of another model, which a module of this one has called.

        What an attention layer calls is that layer's, whatever it is.
        """
        run = self.run
        if run is None or run.entered[-1].path in self.places:
            return False
        module = innermost()
        return module is not None and self.path_of(module) is None

    def path_of(self, module: nn.Module) -> str | None:
        """Where a module is in the model. A replica is where the module is that it was made of."""
        found = self.paths.get(module)
        run = self.run
        if found is None and run is not None and run.entered[-1].module is module:
            return run.entered[-1].path
        return found

    def bypass(self) -> None:
        """The innermost module attends in a way that nobody can hear."""
        if self.run is not None:
            self.run.bypassed.setdefault(self.run.entered[-1].path, ())

    # What they say

    def tell(
        self, module: nn.Module, kind: str, weights: AttentionMap, value: Tensor | None, output: Tensor | None
    ) -> Tensor | None:
        """Tell every listener of a call, if it is one of this model's; the heads' output as they leave it."""
        run, path = self.run, self.path_of(module)
        if path is None:
            if run is None:
                return output
            if run.entered[-1].path not in self.places:
                self.elsewhere = True
                return output
            path = run.entered[-1].path
        run = Run(self._new_forward()) if run is None else run  # of a layer whose forward is called directly
        for each in run.entered:
            each.heard = True
        before = run.told.get(path, 0)
        run.told[path] = before + 1
        named = path if not before else f"{path}#{before}"
        tokens = run.tokens(self.is_encoder_decoder and "decoder" in path.split("."))
        with self._telling:
            for listener, _ in self.heard_by():
                changed = listener.hear(Call(named, kind, weights, value, output, run.forward, tokens))
                output = output if changed is None else changed
        return output

    def check(self) -> None:
        """At the end: raise if attention ran that nobody could hear, unless that was allowed.

        Raises:
            AttentionBypassed: with the layers and what they would need.
        """
        if self.bypassed and self.fallback != "skip":
            bypassed, self.bypassed = self.bypassed, {}
            self._refuse(bypassed)

    def _refuse(self, paths: dict[str, tuple[int, ...]]) -> None:
        kinds = sorted({type(module).__name__ for module, path in self.paths.items() if path in paths})
        shown = ", ".join(path or "the model itself" for path in list(paths)[:4]) + (
            f" and {len(paths) - 4} more" if len(paths) > 4 else ""
        )
        if self.fallback == "eager":
            raise AttentionBypassed(
                f"model must have attention that can be heard: no weights [B, H, T, S] were seen in "
                f"{len(paths)} layers of {', '.join(kinds)} ({shown}); leave them out with fallback='skip'"
            )
        sizes = next(iter(paths.values()))
        raise AttentionBypassed(
            f"model must send its attention where it can be heard: {len(paths)} layers of {', '.join(kinds)} "
            f"({shown}) compute their own weights; read those with fallback='eager' ({_memory(sizes)}), or "
            "leave these layers out with fallback='skip'"
        )


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


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """B and T of the input of a module."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim >= 3:
            return tuple(value.shape[:2])
    return ()


def _memory(sizes: tuple[int, ...]) -> str:
    if len(sizes) < 2:
        return "B x H x T x S numbers a layer, which the model makes anyway"
    B, T = sizes
    size = f"{B * T * T * 4 / 2**20:.3g} MiB a head and layer in float32"
    return f"B x H x T x S, {size}, made by the model anyway"


def attach(
    model: nn.Module, listener: Listener, fallback: str | None = None
) -> AbstractContextManager[Attachment]:
    """Let `listener` hear every attention call of `model` inside a `with` block.

    Args:
        fallback: for layers that bypass every hook: None raises, naming them; "eager" reads the weights they
            compute; "skip" leaves them out.

    Raises:
        ArgumentError: not a module; an unknown fallback.
        AttentionBypassed: in the model's forward, or at the end.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model must be a torch.nn.Module: got {type(model).__name__}; pass the model itself"
        )
    if fallback not in FALLBACKS:
        raise ArgumentError(
            f"fallback must be None, 'eager' or 'skip': got {fallback!r}; None names the layers"
        )
    return _Attached(model, listener, fallback)


class _Block(NamedTuple):
    """One time that an attachment was entered."""

    attachment: Attachment
    place: ref[Listener]


class _Attached(AbstractContextManager[Attachment]):
    """Keeps the listener: an attachment itself does not."""

    def __init__(self, model: nn.Module, listener: Listener, fallback: str | None) -> None:
        self.model, self.listener, self.fallback = model, listener, fallback

    def __enter__(self) -> Attachment:
        with turns:
            found = next((each for each in active if each.model is self.model), None)
            attachment = Attachment(self.model) if found is None else found
            self._block = _Block(attachment, attachment.add(self.listener, self.fallback))
            if found is None:
                attachment.begin()
        return attachment

    def __exit__(self, kind: Any, *rest: Any) -> None:
        attachment, place = self._block
        try:
            if kind is None and attachment.run is None:
                attachment.check()
        finally:
            with turns:
                attachment.remove(place)


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """The names of what a module's forward takes, in order."""
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _has_two_texts(model: nn.Module, places: list[str]) -> bool:
    """Whether decoder and encoder each have a text of their own."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True:
        return True
    parts = [set(path.split(".")) for path in places]
    return any("encoder" in each for each in parts) and any("decoder" in each for each in parts)
