"""Attaching listeners to a model: the hooks that tell where a call comes from, and the adapters that hear it.

    model ── hooks: which module runs now ──┐
          └─ adapters: q, k, v, mask ───────┴─> announce(module, ...) ──> every listener's hear(call)

While somebody listens, attention runs on headwise's engines: that is where the log-sum-exp comes from that
makes the second pass possible. Nothing else in the model changes, and all of it is undone at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, AttentionBypassed
from ..map import AttentionMap
from .calls import Call, Forward, Listener
from .structure import structure_of

__all__ = [
    "FALLBACKS",
    "Attachment",
    "Undo",
    "announce",
    "attach",
    "eager_is_wanted",
    "is_quiet",
    "padding_now",
    "path_of",
    "quietly",
]

FALLBACKS = (None, "eager", "skip")
TOKENS = ("decoder_input_ids", "input_ids", "input", "tokens", "idx", "x")
PADDING = ("decoder_attention_mask", "attention_mask")

Undo = Callable[[], None]  # what an adapter leaves behind: how to take itself out again

_active: list[Attachment] = []  # in the order in which they were attached
_now = threading.local()


class _Entered:
    """A module that is running now."""

    __slots__ = ("heard", "path")

    def __init__(self, path: str) -> None:
        self.path, self.heard = path, False


class Attachment:
    """A model and those who listen to it. Made by `attach`; ends with the last listener."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.structure = structure_of(model)
        self.paths, self.places = self.structure.paths, self.structure.places
        self.listeners: dict[Listener, str | None] = {}  # and what each wants of layers that bypass
        self.entered: list[_Entered] = []
        self.told: dict[str, int] = {}  # how many calls of a path were told of in this forward
        self.bypassed: dict[str, tuple[int, ...]] = {}
        self.forward = Forward()
        self._undo = ExitStack()

    # Coming and going

    def begin(self) -> None:
        from .adapters import ADAPTERS

        try:
            # Compiled code would run past the hooks, or be compiled with them in it.
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))
            self._hook()
            for adapter in ADAPTERS:
                self._undo.callback(adapter(self))
        except BaseException:
            self._undo.close()
            raise
        _active.append(self)

    def end(self) -> None:
        if self in _active:
            _active.remove(self)
        self.entered.clear()
        self._undo.close()

    @property
    def fallback(self) -> str | None:
        """What is to be done with layers that bypass every hook: the strictest listener's wish."""
        wishes = list(self.listeners.values())
        return None if None in wishes or not wishes else "eager" if "eager" in wishes else "skip"

    # Who runs now

    def _hook(self) -> None:
        for module, (path, is_place) in self.structure.hooked.items():
            self._hook_one(module, path, is_place)

    def _hook_one(self, module: nn.Module, path: str, is_place: bool) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.entered:
                self._begin_forward(module, args, kwargs)
            self.entered.append(_Entered(path))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if is_place and self.entered and self.entered[-1].path == path and not self.entered[-1].heard:
                self.bypassed.setdefault(path, _sizes(args, kwargs))
            if len(self.entered) == 1:
                self._find_replaced()
                if self.bypassed:
                    self.entered.clear()
                    self.check()

        def left(*_: Any) -> None:
            if self.entered and self.entered[-1].path == path:
                self.entered.pop()

        for handle in (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
            module.register_forward_hook(left, always_call=True),
        ):
            self._undo.callback(handle.remove)

    def _find_replaced(self) -> None:
        """A layer that its model has put in another's place carries no hooks."""
        for path in self.places:
            if self.model.get_submodule(path) not in self.paths:
                self.bypassed.setdefault(path, ())

    def _begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.told.clear()
        self.forward = Forward(self.forward.number + 1)
        named = dict(kwargs)
        if args and isinstance(args[0], Tensor) and "input_ids" not in named:
            named["input_ids"] = args[0]
        for name in TOKENS:
            value = named.get(name)
            if isinstance(value, Tensor) and value.ndim == 2 and not _is_real(value):
                self.forward.tokens[name] = value
        for name in PADDING:
            value = named.get(name)
            if isinstance(value, Tensor) and value.ndim == 2:
                self.forward.padding[name] = value.bool()

    @property
    def here(self) -> str | None:
        """The path of the innermost module that runs now."""
        return self.entered[-1].path if self.entered else None

    # What they say

    def tell(
        self,
        module: nn.Module | None,
        kind: str,
        weights: AttentionMap,
        value: Tensor | None,
        output: Tensor | None,
    ) -> Tensor | None:
        """Tell every listener of a call; the heads' output as they leave it."""
        path = self.here if module is None else self.paths.get(module, self.here)
        if path is None:
            return output
        for each in self.entered:
            each.heard = True
        before = self.told.get(path, 0)
        self.told[path] = before + 1
        named = path if not before else f"{path}#{before}"
        for listener in list(self.listeners):
            changed = listener.hear(Call(named, kind, weights, value, output, self.forward))
            output = output if changed is None else changed
        return output

    def check(self) -> None:
        """Raise if attention ran that nobody could hear, unless that was allowed.

        Raises:
            AttentionBypassed: with the layers and what they would need.
        """
        if not self.bypassed or self.fallback == "skip":
            return
        paths, self.bypassed = dict(self.bypassed), {}
        kinds = sorted({type(module).__name__ for module, path in self.paths.items() if path in paths})
        shown = ", ".join(list(paths)[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
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


class _Attached(AbstractContextManager[Attachment]):
    def __init__(self, model: nn.Module, listener: Listener, fallback: str | None) -> None:
        self.model, self.listener, self.fallback = model, listener, fallback

    def __enter__(self) -> Attachment:
        found = next((each for each in _active if each.model is self.model), None)
        self.attachment = Attachment(self.model) if found is None else found
        self.attachment.listeners[self.listener] = self.fallback
        if found is None:
            self.attachment.begin()
        return self.attachment

    def __exit__(self, kind: Any, *rest: Any) -> None:
        attachment = self.attachment
        try:
            if kind is None and not attachment.entered:
                attachment.check()
        finally:
            attachment.listeners.pop(self.listener, None)
            if not attachment.listeners:
                attachment.end()


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
    """
    with quietly():
        for attachment in tuple(_active):
            if module is None or module in attachment.paths or attachment.entered:
                output = attachment.tell(module, kind, weights, value, output)
    return output


class quietly(AbstractContextManager[None]):  # noqa: N801, reads as a verb
    """Our own work, in which no attention is to be heard."""

    def __enter__(self) -> None:
        _now.depth = getattr(_now, "depth", 0) + 1

    def __exit__(self, *_: Any) -> None:
        _now.depth -= 1


def is_quiet() -> bool:
    return getattr(_now, "depth", 0) > 0


def eager_is_wanted() -> bool:
    """Whether some listener reads weights that a model computes itself."""
    return any("eager" in attachment.listeners.values() for attachment in _active)


def path_of(module: nn.Module) -> str | None:
    """Where a module is in a model that is listened to."""
    return next((each.paths[module] for each in _active if module in each.paths), None)


def padding_now(name: str, batch: int, length: int) -> Tensor | None:
    """Which positions are real, bool [B, length], as an argument of the forward that runs now says."""
    for attachment in _active:
        found = attachment.forward.padding.get(name) if attachment.entered else None
        if found is not None and tuple(found.shape) == (batch, length):
            return found
    return None
