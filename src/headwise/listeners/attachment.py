"""A model and those who listen to it: which of its modules run now, and who is told of a call.

A forward belongs to the thread it runs in; listeners are told of one call at a time. How a model comes to be
heard is told in `adapters/`, whose `attach` makes an `Attachment` and hands it the changes to make.
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

NOTHING_SEEN = "no softmax was seen"  # reasons read on after "where"
REPLACED = "the model has put one layer in the place of another meanwhile: watch it once more"


class LayerHook:
    """Tells one attachment of every run of one module."""

    def __init__(self, attachment: Attachment, path: str, is_place: bool, notes: bool) -> None:
        self.attachment, self.path, self.is_place = attachment, path, is_place
        self.notes = notes  # whether tokens and padding are looked for in what the module is given
        self.mode: TorchFunctions | None = None  # which listens to torch's functions while this module runs

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        run = self.attachment._running.run or self.attachment.run_or_new()
        here = Entered(self.path, module)
        try:
            if self.notes:
                run.note(here, args, kwargs)
            run.entered.append(here)
            if self.mode is not None:
                self.mode.enter(args, kwargs)
                here.mode = self.mode
        except BaseException:
            self._leave(run, here)
            raise

    def leave(
        self, args: tuple[object, ...], kwargs: dict[str, object], came_back: bool, output: object
    ) -> None:
        run = self.attachment._running.run
        assert run is not None, "somebody entered"
        here = run.entered[-1]
        if here.mode is None and here.heard and len(run.entered) > 1:  # nothing else, mostly
            run.entered.pop()
            return
        try:
            bypassed = None if here.mode is None else here.mode.leave(output, came_back)
            if bypassed is None and self.is_place and not here.heard:
                bypassed = Bypassed(0, NOTHING_SEEN)
            if came_back and bypassed is not None and not self.attachment.is_over:
                self.attachment.bypass(bypassed._replace(sizes=_sizes(args, kwargs)))
            if came_back and len(run.entered) == 1:
                self.attachment.check_forward(run)
        finally:
            self._leave(run, here)

    def _leave(self, run: ForwardState, here: Entered) -> None:
        if run.entered and run.entered[-1] is here:
            run.entered.pop()
        if not run.entered:
            self.attachment.left(run)


class _Running(threading.local):
    run: ForwardState | None = None
    forward: ForwardPass | None = None  # the last, which a part of it may be run again of


class Attachment:
    """A model and those who listen to it. Made by `attach`; ends with the last listener."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.structure, self.modules = structure_and_modules(model)
        self.paths, self.places = self.structure.paths, self.structure.places
        self.names = self.structure.once("names", lambda: names_of(self.places))
        self.listeners: dict[ref[Listener], str | None] = {}  # and what each wants of layers that bypass
        self.listeners_version = 0  # how often they have changed
        self.asks_if_long: tuple[str, ...] = ()  # what any of them will ask of a long call
        self.waits = False  # whether none of them looks at a short one before its forward is over
        config = getattr(model, "config", None)
        parts = {part for path in self.places for part in path.split(".")}
        named = {"encoder", "decoder"} <= parts  # each has a text of its own, by its name
        self.two_texts = getattr(config, "is_encoder_decoder", False) is True or named
        # transformers' models say so; of others nobody knows that a decoder reads what its encoder was given
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", self.two_texts))
        self.forward = ForwardPass()  # the last that began, in any thread
        self.bypassed: dict[str, Bypassed] = {}  # in forwards that are over
        self._told_of: set[str] = set()  # the paths of those that somebody was warned of
        self.has_heard = False
        # True if attention of another model was heard inside, or a layer ran on an empty batch: then it is no
        # error if nothing was heard here
        self.elsewhere = False
        self.is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.is_over = False  # what runs on in other threads is heard no more, and has bypassed nobody
        hooked, suspects = self.structure.hooked.items(), self.structure.suspects.items()
        self.hooks = {
            module: LayerHook(self, path, is_place, not is_place) for module, (path, is_place) in hooked
        }
        self.hooks |= {module: LayerHook(self, path, False, False) for module, path in suspects}
        self._running = _Running()
        self._telling = threading.RLock()
        self.undo = ExitStack()  # all that was changed for this attachment

    # Coming and going

    def begin(self, changes: Iterable[Callable[[Attachment], None]]) -> None:
        """Make the changes by which the model is heard; `undo` collects how to undo each, and `end` does."""
        active.append(self)  # first: other threads may run the model meanwhile, and meet a change
        try:
            for change in changes:
                change(self)
        except BaseException:
            self.listeners.clear()  # nobody has to end what did not begin
            self.end()
            raise

    def end(self) -> None:
        self.is_over = True
        if self in active:
            active.remove(self)
        self.undo.close()
        self.hooks.clear()

    def add(self, listener: Listener, fallback: str | None) -> ref[Listener]:
        """Someone who is told for as long as they live, and are not taken away."""
        place = ref(listener, lambda gone: changing.later(partial(self._remove_dropped, gone)))
        self.listeners[place] = fallback
        self._update_wishes()
        return place

    def remove(self, listener: ref[Listener]) -> None:
        self.listeners.pop(listener, None)
        self._update_wishes()
        if not self.listeners:
            self.end()

    def _update_wishes(self) -> None:
        self.listeners_version += 1
        there = [listener for listener, _ in self.heard_by()]
        asks = [name for listener in there for name in listener.asks_if_long]
        self.asks_if_long = tuple(dict.fromkeys(asks))
        self.waits = all(listener.waits for listener in there)

    def _remove_dropped(self, listener: ref[Listener]) -> None:
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
        for place, fallback in list(self.listeners.items()):
            listener = place()
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
    def run(self) -> ForwardState | None:
        """The forward at work."""
        return self._running.run

    @property
    def forward_here(self) -> ForwardPass:
        """The forward at work in this thread; if there is none, the last that began in any."""
        return self.forward if self.run is None else self.run.forward

    def run_or_new(self) -> ForwardState:
        running = self._running
        if running.run is None:
            running.run = ForwardState(self._new_forward())
        return running.run

    def _new_forward(self) -> ForwardPass:
        if in_backward():  # a part of an earlier forward, run again for its gradients
            return self._running.forward or self.forward
        with self._telling:
            self.forward = self._running.forward = ForwardPass(self.forward.number + 1)
            return self.forward

    def left(self, run: ForwardState) -> None:
        """The outermost module has ended, whichever way."""
        self._running.run = None
        if run.bypassed:
            self._report_missed(run.bypassed)
        self._report_end(run.forward)

    def _report_missed(self, bypassed: dict[str, Bypassed]) -> None:
        """Tell listeners what was not heard in a forward."""
        kinds = self.kinds_at(bypassed)
        with self._telling:
            for path, new in bypassed.items():
                known = self.bypassed.get(path)
                self.bypassed[path] = new if known is None else known.and_again(new)
            for listener, _ in self.heard_by():
                for path, new in bypassed.items():
                    listener.miss(path, kinds[path], new)

    def kinds_at(self, paths: Iterable[str]) -> dict[str, str]:
        """The names of the classes of modules, by path."""
        known = {path: type(module).__name__ for module, path in self.paths.items()}
        return {path: known.get(path, "module") for path in paths}

    def _report_end(self, forward: ForwardPass) -> None:
        """Tell listeners that a forward has ended."""
        with self._telling, quietly():
            for listener, _ in self.heard_by():
                listener.after(forward)

    def check_forward(self, run: ForwardState) -> None:
        """The outermost module has returned: raise `AttentionBypassed` for what surely attended unheard."""
        paths = self.paths  # a layer that its model has put in another's place has no hook
        for path, now in zip(self.places, modules_at(self.model, self.places), strict=True):
            if now is not None and now not in paths:  # None: taken out, which is its owner's right
                run.bypassed.setdefault(path, Bypassed(0, REPLACED))
        refused = {path: each for path, each in run.bypassed.items() if each.is_certain}
        if refused and self.fallback is None:
            for path in refused:
                del run.bypassed[path]
            self._refuse(refused)

    @property
    def entered(self) -> list[Entered]:
        """The modules that run now, the innermost last."""
        return [] if self.run is None else self.run.entered

    @property
    def here(self) -> str | None:
        """The path of the innermost module that runs now."""
        return self.run.entered[-1].path if self.run is not None else None

    @property
    def is_outside(self) -> bool:
        """Whether what runs now is of another model, called by a module of this one that does not attend."""
        run = self.run
        if run is None or run.entered[-1].path in self.places:
            return False
        module = innermost()
        return module is not None and self.path_of(module) is None

    def path_of(self, module: nn.Module) -> str | None:
        """Where a module is in the model. A replica is where the module is that it was made of."""
        path = self.paths.get(module)
        run = self.run
        if path is None and run is not None and run.entered[-1].module is module:
            return run.entered[-1].path
        return path

    def bypass(self, bypassed: Bypassed) -> None:
        """The innermost module attends, or may, in a way that nobody hears."""
        run = self._running.run
        if run is not None and not in_backward():
            path = run.entered[-1].path
            known = run.bypassed.get(path)
            run.bypassed[path] = bypassed if known is None else known.and_again(bypassed)

    # What they say

    def tell(
        self, module: nn.Module, kind: str, weights: AttentionMap, value: Tensor | None, output: Tensor | None
    ) -> Tensor | None:
        """Tell every listener of a call, if it is one of this model's; the heads' output as they leave it."""
        run, path = self._running.run, self.path_of(module)
        if path is None:
            if run is None:
                return output
            if run.entered[-1].path not in self.places:
                self.elsewhere = True
                return output
            path = run.entered[-1].path
        self.has_heard = True
        alone = run is None
        run = run or ForwardState(self._new_forward())  # of a layer that was called directly
        for entered in run.entered:
            entered.heard = True
        before = run.told.get(path, 0)
        run.told[path] = before + 1
        named = path if not before else f"{path}#{before}"
        tokens = run.tokens(self.decodes(path))
        here = local_heads_of(module, path, weights, value) if self.is_distributed else None
        said: Tensor | None = None  # of all heads, by somebody who changed it
        with self._telling:
            for place in list(self.listeners):
                listener = place()
                if listener is None:
                    continue
                if weights.ranks is not None and not listener.hears_shards:
                    raise ArgumentError(
                        f"model must not lie over ranks while it is changed or measured by more than watch: "
                        f"{named or 'the model itself'} does, over {weights.ranks}; use one process"
                    )
                call = LayerCall(named, kind, weights, value, output, run.forward, tokens)
                changed = listener.hear(call if here is None else SplitCall(call, here, said))
                if changed is not None and here is not None:
                    said = changed
                else:
                    output = output if changed is None else changed
        if said is not None and here is not None:
            output = here.own(said)
        if alone:
            self._report_end(run.forward)
        return output

    def decodes(self, path: str) -> bool:
        """Return True if a layer is of a decoder beside an encoder."""
        return self.is_encoder_decoder and "decoder" in path.split(".")

    def noted(self, run: ForwardState) -> Noted | None:
        """How the last call was put aside by the only one who listens; None: somebody looks at each."""
        listening = list(self.listeners)  # as they are now: other threads come and go
        if not self.waits or len(listening) != 1 or self.is_distributed:
            return None
        listener = listening[0]()
        noted = None if listener is None else listener.noted
        return noted if noted is not None and noted.forward is run.forward else None  # else another thread's

    def note(self, run: ForwardState, path: str, noted: Noted, scores: Scores, lse: Tensor | None) -> bool:
        """Put aside a call like one that was noted: `tell`, where all that it finds out is known."""
        with self._telling:
            if not noted.again(path, scores, lse):
                return False
        for entered in run.entered:
            entered.heard = True
        run.told[path] = 1
        return True

    def check(self) -> None:
        """At the end of a block: raise or warn if attention ran that nobody could hear, as listeners wish."""
        if self.fallback == "skip":
            return
        certain = {path: each for path, each in self.bypassed.items() if each.is_certain}
        if certain and (self.fallback is None or not self.has_heard):
            self.bypassed = {}
            self._refuse(certain)
        new = {path: each for path, each in self.bypassed.items() if path not in self._told_of}
        if new:
            self._told_of |= new.keys()
            warnings.warn(self._warning(new), AttentionUnheard, stacklevel=outside())

    def _refuse(self, bypassed: dict[str, Bypassed]) -> None:
        if self.fallback == "eager":
            raise AttentionBypassed(
                "model must have attention that can be heard: no weights [B, H, T, S] were seen in "
                f"{self._listed(bypassed)}; leave them out with fallback='skip'"
            )
        readable = {path: each for path, each in bypassed.items() if each.why is None}
        others = {path: each for path, each in bypassed.items() if each.why is not None}
        parts, advice = [], "leave these layers out with fallback='skip'"
        if readable:
            parts.append(f"{self._listed(readable)} compute their own weights")
            memory = _memory(next(iter(readable.values())).sizes)
            advice = f"read those with fallback='eager' ({memory}), or {advice}"
        if others:
            parts.append(self._listed(others))
        if readable and others:
            some = f"fallback='eager' reads the first {len(readable)} ({memory})"
            advice = f"{some}, fallback='skip' leaves all of them out"
        raise AttentionBypassed(
            f"model must send its attention where it can be heard: {', and '.join(parts)}; {advice}"
        )

    def _warning(self, bypassed: dict[str, Bypassed]) -> str:
        count = sum(layer.softmaxes for layer in bypassed.values())
        may_be = "" if all(layer.is_certain for layer in bypassed.values()) else "that may be attention "
        what = f"{count} softmax operations {may_be}were" if count else "attention was"
        advice = "fallback='skip' leaves them out without this warning"
        if self.fallback is None and any(layer.why is None for layer in bypassed.values()):
            advice = f"fallback='eager' reads these as far as it can, {advice}"
        return (
            f"{what} not heard in {type(self.model).__name__}: {self._listed(bypassed)}; the other layers "
            f"were heard, {advice}"
        )

    def _listed(self, bypassed: dict[str, Bypassed]) -> str:
        """Layers with some of their paths; of those that cannot be read by class, and why not the first."""
        kinds, groups = self.kinds_at(bypassed), dict[str, list[str]]()
        for path, each in bypassed.items():
            groups.setdefault("" if each.why is None else kinds[path], []).append(path)
        parts = []
        for paths in groups.values():
            shown = ", ".join(path or "the model itself" for path in paths[:4])
            more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
            named, why = ", ".join(sorted({kinds[path] for path in paths})), bypassed[paths[0]].why
            reason = "" if why is None else f", where {why}"
            parts.append(f"{len(paths)} layers of {named} ({shown}{more}){reason}")
        return ", ".join(parts)


def _sizes(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int, ...]:
    """B and T of the input of a module."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim >= 3 and not value.is_nested:
            return tuple(value.shape[:2])
    return ()


def _memory(sizes: tuple[int, ...]) -> str:
    if len(sizes) < 2:
        return "B x H x T x S numbers per layer, which the model makes anyway"
    B, T = sizes
    size = f"{B * T * T * 4 / 2**20:.3g} MiB per head and layer in float32"
    return f"B x H x T x S, {size}, made by the model anyway"
