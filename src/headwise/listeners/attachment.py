"""Attachments: a model, the listeners attached to it, and which of its modules are running.

A forward pass belongs to the thread it runs in; listeners hear one call at a time. The changes to a model
that make its attention heard are in `adapters/`, whose `attach` creates an `Attachment` and passes it the
changes.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, nn

from .. import byte_sizes
from ..engines.scores import Scores
from ..errors import ArgumentError, AttentionBypassed, AttentionUnheard, outside
from ..heads.layer_names import Layer, names_of
from ..map import AttentionMap
from .active import (
    Bypassed,
    Entered,
    ForwardPass,
    ForwardState,
    LayerCall,
    Listener,
    Noted,
    SplitCall,
    active,
    in_backward,
    innermost,
    local_heads_of,
    quietly,
)
from .model_structure import modules_at, structure_and_modules
from .module_overrides import changing

if TYPE_CHECKING:
    from .adapters.torch_functions import TorchFunctions

NO_SOFTMAX = "no softmax was seen"  # reasons read on after "where"
REPLACED = "the model replaced a layer by another one in the meantime; watch it again"


class LayerHook:
    """Reports every run of one module to one attachment."""

    def __init__(self, attachment: Attachment, path: str, is_place: bool, notes: bool) -> None:
        self.attachment, self.path, self.is_place = attachment, path, is_place
        self.notes = notes  # whether tokens and padding are read from the module's arguments
        self.mode: TorchFunctions | None = None  # listens to torch's functions while this module runs

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        run = self.attachment._running.run or self.attachment.run_or_new()
        entered = Entered(self.path, module)
        try:
            if self.notes:
                run.note(entered, args, kwargs)
            run.entered.append(entered)
            if self.mode is not None:
                self.mode.enter(args, kwargs)
                entered.mode = self.mode
        except BaseException:
            self._leave(run, entered)
            raise

    def leave(
        self, args: tuple[object, ...], kwargs: dict[str, object], returned: bool, output: object
    ) -> None:
        run = self.attachment._running.run
        assert run is not None, "`enter` ran before"
        entered = run.entered[-1]
        if entered.mode is None and entered.was_heard and len(run.entered) > 1:  # the usual case
            run.entered.pop()
            return
        try:
            bypassed = None if entered.mode is None else entered.mode.leave(output, returned)
            if bypassed is None and self.is_place and not entered.was_heard:
                bypassed = Bypassed(0, NO_SOFTMAX)
            if returned and bypassed is not None and not self.attachment.is_over:
                self.attachment.bypass(bypassed._replace(sizes=_sizes(args, kwargs)))
            if returned and len(run.entered) == 1:
                self.attachment.check_forward(run)
        finally:
            self._leave(run, entered)

    def _leave(self, run: ForwardState, entered: Entered) -> None:
        if run.entered and run.entered[-1] is entered:
            run.entered.pop()
        if not run.entered:
            self.attachment.end_forward(run)


class _Running(threading.local):
    run: ForwardState | None = None
    forward: ForwardPass | None = None  # the last forward, of which a checkpoint may run a part again


class Attachment:
    """A model and its listeners. Created by `attach`; ends when its last listener is removed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.structure, self.modules = structure_and_modules(model)
        self.paths, self.places = self.structure.paths, self.structure.places
        self.names = self.structure.once("names", lambda: names_of(self.places))
        self.listeners: dict[ref[Listener], str | None] = {}  # with the fallback of each
        self.listeners_version = 0  # increases with every change of `listeners`
        self.statistics_if_long: tuple[str, ...] = ()  # row statistics that any listener reads of a long call
        self.waits = False  # True if all listeners read short calls after the forward
        config = getattr(model, "config", None)
        parts = {part for path in self.places for part in path.split(".")}
        named = {"encoder", "decoder"} <= parts  # by its names, encoder and decoder read different texts
        self.two_texts = getattr(config, "is_encoder_decoder", False) is True or named
        # Hugging Face configs state it; other models' decoders may read the text of the encoder or another
        # one
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", self.two_texts))
        self.forward = ForwardPass()  # the last that began in any thread
        self.bypassed: dict[str, Bypassed] = {}  # by path, in forwards that are over
        self._warned: set[str] = set()  # paths that a warning named
        self.was_heard = False
        # True if a layer of another model was called inside this one, or a layer ran on an empty batch: then
        # it is no error that no attention was heard
        self.elsewhere = False
        self.is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.is_over = False  # True after `end`: forwards still running in other threads are ignored
        hooked, suspects = self.structure.hooked.items(), self.structure.suspects.items()
        self.hooks = {
            module: LayerHook(self, path, is_place, not is_place) for module, (path, is_place) in hooked
        }
        self.hooks |= {module: LayerHook(self, path, False, False) for module, path in suspects}
        self._running = _Running()
        self._telling = threading.RLock()
        self.undo = ExitStack()  # undoes every change made for this attachment

    # Beginning and ending

    def begin(self, changes: Iterable[Callable[[Attachment], None]]) -> None:
        """Make the changes that let the model be heard. Each adds to `undo`, which `end` closes."""
        active.append(self)  # first, for other threads may run a changed module before the last change
        try:
            for change in changes:
                change(self)
        except BaseException:
            self.listeners.clear()  # their owners need not end it
            self.end()
            raise

    def end(self) -> None:
        self.is_over = True
        if self in active:
            active.remove(self)
        self.undo.close()
        self.hooks.clear()

    def add(self, listener: Listener, fallback: str | None) -> ref[Listener]:
        """Add a listener, which hears calls until it is removed or garbage-collected."""
        reference = ref(listener, lambda dead: changing.later(partial(self._remove_dropped, dead)))
        self.listeners[reference] = fallback
        self._update_requests()
        return reference

    def remove(self, listener: ref[Listener]) -> None:
        self.listeners.pop(listener, None)
        self._update_requests()
        if not self.listeners:
            self.end()

    def _update_requests(self) -> None:
        self.listeners_version += 1
        listeners = [listener for listener, _ in self.live_listeners()]
        names = [name for listener in listeners for name in listener.statistics_if_long]
        self.statistics_if_long = tuple(dict.fromkeys(names))
        self.waits = all(listener.waits for listener in listeners)

    def _remove_dropped(self, listener: ref[Listener]) -> None:
        """Remove a listener that was garbage-collected before it was stopped, with a warning."""
        if listener not in self.listeners:
            return
        self.remove(listener)
        if not sys.is_finalizing():
            warnings.warn(
                f"watching must be stopped: the watcher of {type(self.model).__name__} was dropped without "
                "stop(); keep the object that `start()` was called on and stop it, or use a `with` block",
                RuntimeWarning,
                stacklevel=2,
            )

    def live_listeners(self) -> Iterator[tuple[Listener, str | None]]:
        """Yield the listeners that still exist, each with its fallback."""
        for reference, fallback in list(self.listeners.items()):
            listener = reference()
            if listener is not None:
                yield listener, fallback

    @property
    def fallback(self) -> str | None:
        """The strictest fallback of the listeners, for layers that bypass every hook."""
        fallbacks = [fallback for _, fallback in self.live_listeners()]
        return None if None in fallbacks or not fallbacks else "eager" if "eager" in fallbacks else "skip"

    @property
    def reads_eager(self) -> bool:
        """True if a listener reads weights that layers compute themselves."""
        return any(fallback == "eager" for _, fallback in self.live_listeners())

    def name_of(self, path: str) -> Layer:
        """Return the name of a layer: its number in the model, whichever layers ran, or its path."""
        return self.names.get(path, path)

    # What runs in this thread

    @property
    def run(self) -> ForwardState | None:
        """State of the forward pass in progress in this thread."""
        return self._running.run

    @property
    def current_forward(self) -> ForwardPass:
        """The forward pass in progress in this thread; if there is none, the last that began in any."""
        return self.forward if self.run is None else self.run.forward

    def run_or_new(self) -> ForwardState:
        running = self._running
        if running.run is None:
            running.run = ForwardState(self._new_forward())
        return running.run

    def _new_forward(self) -> ForwardPass:
        if in_backward():  # a checkpoint runs a part of an earlier forward again
            return self._running.forward or self.forward
        with self._telling:
            self.forward = self._running.forward = ForwardPass(self.forward.number + 1)
            return self.forward

    def end_forward(self, run: ForwardState) -> None:
        """Handle the end of the outermost module, whether it returned or raised."""
        self._running.run = None
        if run.bypassed:
            self._report_missed(run.bypassed)
        self._report_end(run.forward)

    def _report_missed(self, bypassed: dict[str, Bypassed]) -> None:
        """Report to listeners which layers were not heard in a forward."""
        kinds = self.kinds_at(bypassed)
        with self._telling:
            for path, new in bypassed.items():
                earlier = self.bypassed.get(path)
                self.bypassed[path] = new if earlier is None else earlier.merged(new)
            for listener, _ in self.live_listeners():
                for path, new in bypassed.items():
                    listener.miss(path, kinds[path], new)

    def kinds_at(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the class names of the modules at these paths."""
        names = {path: type(module).__name__ for module, path in self.paths.items()}
        return {path: names.get(path, "module") for path in paths}

    def _report_end(self, forward: ForwardPass) -> None:
        """Report the end of a forward to listeners."""
        with self._telling, quietly():
            for listener, _ in self.live_listeners():
                listener.after(forward)

    def check_forward(self, run: ForwardState) -> None:
        """Raise `AttentionBypassed` if a module certainly attended unheard in a forward that has returned."""
        paths = self.paths  # a layer that replaced another meanwhile has no hook
        for path, module in zip(self.places, modules_at(self.model, self.places), strict=True):
            if module is not None and module not in paths:  # None: it was removed, which is allowed
                run.bypassed.setdefault(path, Bypassed(0, REPLACED))
        refused = {path: layer for path, layer in run.bypassed.items() if layer.is_certain}
        if refused and self.fallback is None:
            for path in refused:
                del run.bypassed[path]
            self._refuse(refused)

    @property
    def entered(self) -> list[Entered]:
        """The modules running in this thread, the innermost last."""
        return [] if self.run is None else self.run.entered

    @property
    def current_path(self) -> str | None:
        """The path of the innermost module running in this thread."""
        return self.run.entered[-1].path if self.run is not None else None

    @property
    def is_outside(self) -> bool:
        """True if a module of another model runs, called by a module of this one that does not attend."""
        run = self.run
        if run is None or run.entered[-1].path in self.places:
            return False
        module = innermost()
        return module is not None and self.path_of(module) is None

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of a module in the model, or None. A replica has the path of its original."""
        path = self.paths.get(module)
        run = self.run
        if path is None and run is not None and run.entered[-1].module is module:
            return run.entered[-1].path
        return path

    def bypass(self, bypassed: Bypassed) -> None:
        """Record that the innermost module attended, or may have, without being heard."""
        run = self._running.run
        if run is not None and not in_backward():
            path = run.entered[-1].path
            earlier = run.bypassed.get(path)
            run.bypassed[path] = bypassed if earlier is None else earlier.merged(bypassed)

    # Calls

    def tell(
        self, module: nn.Module, kind: str, weights: AttentionMap, value: Tensor | None, output: Tensor | None
    ) -> Tensor | None:
        """Report a call to every listener, if its layer is in this model; return the output they leave."""
        run, path = self._running.run, self.path_of(module)
        if path is None:
            if run is None:
                return output
            if run.entered[-1].path not in self.places:
                self.elsewhere = True
                return output
            path = run.entered[-1].path
        self.was_heard = True
        is_direct = run is None
        run = run or ForwardState(self._new_forward())  # the layer was called directly
        for entered in run.entered:
            entered.was_heard = True
        visit = run.call_counts.get(path, 0)
        run.call_counts[path] = visit + 1
        named = path if not visit else f"{path}#{visit}"
        tokens = run.tokens(self.decodes(path))
        local_heads = local_heads_of(module, path, weights, value) if self.is_distributed else None
        all_heads: Tensor | None = None  # the output of all heads, where a listener changed it
        with self._telling:
            for reference in list(self.listeners):
                listener = reference()
                if listener is None:
                    continue
                if weights.ranks is not None and not listener.hears_shards:
                    raise ArgumentError(
                        "model must not be sharded by sequence, except for headwise.watch: "
                        f"{named or 'the model'} is sharded over {weights.ranks} ranks; use one process"
                    )
                call = LayerCall(named, kind, weights, value, output, run.forward, tokens)
                changed = listener.hear(
                    call if local_heads is None else SplitCall(call, local_heads, all_heads)
                )
                if changed is not None and local_heads is not None:
                    all_heads = changed
                else:
                    output = output if changed is None else changed
        if all_heads is not None and local_heads is not None:
            output = local_heads.part(all_heads)
        if is_direct:
            self._report_end(run.forward)
        return output

    def decodes(self, path: str) -> bool:
        """Return True if a layer is of a decoder beside an encoder."""
        return self.is_encoder_decoder and "decoder" in path.split(".")

    def noted(self, run: ForwardState) -> Noted | None:
        """Return how the only listener deferred the last call; None where calls are not deferred."""
        listening = list(self.listeners)  # a copy, for other threads may change it
        if not self.waits or len(listening) != 1 or self.is_distributed:
            return None
        listener = listening[0]()
        noted = None if listener is None else listener.noted
        return noted if noted is not None and noted.forward is run.forward else None  # else another thread's

    def note(self, run: ForwardState, path: str, noted: Noted, scores: Scores, lse: Tensor | None) -> bool:
        """Defer a call like one that was deferred, in less time than `tell`; False: the group is full."""
        with self._telling:
            if not noted.again(path, scores, lse):
                return False
        for entered in run.entered:
            entered.was_heard = True
        run.call_counts[path] = 1
        return True

    def check(self) -> None:
        """Raise or warn at the end of a block if attention ran unheard, according to the fallbacks."""
        if self.fallback == "skip":
            return
        certain = {path: layer for path, layer in self.bypassed.items() if layer.is_certain}
        if certain and (self.fallback is None or not self.was_heard):
            self.bypassed = {}
            self._refuse(certain)
        new = {path: layer for path, layer in self.bypassed.items() if path not in self._warned}
        if new:
            self._warned |= new.keys()
            warnings.warn(self._warning(new), AttentionUnheard, stacklevel=outside())

    def _refuse(self, bypassed: dict[str, Bypassed]) -> None:
        if self.fallback == "eager":
            raise AttentionBypassed(
                "model must have attention that headwise can read: no weights [B, H, T, S] were seen in "
                f"{self._listed(bypassed)}; leave them out with fallback='skip'"
            )
        readable = {path: layer for path, layer in bypassed.items() if layer.reason is None}
        unreadable = {path: layer for path, layer in bypassed.items() if layer.reason is not None}
        parts, advice = [], "leave these layers out with fallback='skip'"
        if readable:
            verb = "computes its" if len(readable) == 1 else "compute their"
            parts.append(f"{self._listed(readable)} {verb} own weights")
            memory = _memory(next(iter(readable.values())).sizes)
            advice = f"read those with fallback='eager' ({memory}), or {advice}"
        if unreadable:
            parts.append(self._listed(unreadable))
        if readable and unreadable:
            some = f"fallback='eager' reads the first {len(readable)} ({memory})"
            advice = f"{some}, fallback='skip' leaves all of them out"
        raise AttentionBypassed(
            f"model must have attention that headwise can intercept: {', and '.join(parts)}; {advice}"
        )

    def _warning(self, bypassed: dict[str, Bypassed]) -> str:
        count = sum(layer.softmaxes for layer in bypassed.values())
        may_be = "" if all(layer.is_certain for layer in bypassed.values()) else "that may be attention "
        operations = "1 softmax operation" if count == 1 else f"{count} softmax operations"
        subject = f"{operations} {may_be}{'was' if count == 1 else 'were'}" if count else "attention was"
        advice = "fallback='skip' leaves them out without this warning"
        if self.fallback is None and any(layer.reason is None for layer in bypassed.values()):
            advice = f"fallback='eager' reads these as far as it can, {advice}"
        return (
            f"{subject} not intercepted in {type(self.model).__name__}: {self._listed(bypassed)}; only the "
            f"other layers were; {advice}"
        )

    def _listed(self, bypassed: dict[str, Bypassed]) -> str:
        """List layers by whether they can be read, the others by class, with some paths and the reason."""
        kinds, groups = self.kinds_at(bypassed), dict[str, list[str]]()
        for path, layer in bypassed.items():
            groups.setdefault("" if layer.reason is None else kinds[path], []).append(path)
        parts = []
        for paths in groups.values():
            shown = ", ".join(path or "the model itself" for path in paths[:4])
            more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
            named, cause = ", ".join(sorted({kinds[path] for path in paths})), bypassed[paths[0]].reason
            reason = "" if cause is None else f", where {cause}"
            layers = "1 layer" if len(paths) == 1 else f"{len(paths)} layers"
            parts.append(f"{layers} of {named} ({shown}{more}){reason}")
        return ", ".join(parts)


def _sizes(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int, ...]:
    """Return B and T of the input of a module, or () if there is none of at least three dimensions."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim >= 3 and not value.is_nested:
            return tuple(value.shape[:2])
    return ()


def _memory(sizes: tuple[int, ...]) -> str:
    """Return how much memory the weights of a layer take, as text."""
    if len(sizes) < 2:
        return "B x H x T x S numbers per layer, which the model computes anyway"
    B, T = sizes
    size = f"{byte_sizes.readable(B * T * T * 4)} per head and layer in float32"
    return f"B x H x T x S, {size}, computed by the model anyway"
