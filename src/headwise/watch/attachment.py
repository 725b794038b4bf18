"""Attaching listeners to a model: the hooks that tell where a call comes from, and the adapters that hear it.

    model ── hooks: which module runs now ──┐
          └─ adapters: q, k, v, mask ───────┴─> announce(module, ...) ──> every listener's hear(call)

While somebody listens, attention runs on headwise's engines: that is where the log-sum-exp comes from that
makes the second pass possible. Nothing else in the model changes, and all of it is undone at the end.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, AttentionBypassed
from ..heads.naming import Layer, names_of
from ..map import AttentionMap
from .calls import Call, Forward, Listener, in_backward
from .holding import Undo, hold
from .now import active
from .structure import structure_of

__all__ = ["FALLBACKS", "Attachment", "attach"]

FALLBACKS = (None, "eager", "skip")
TOKENS = ("decoder_input_ids", "input_ids", "input", "tokens", "idx", "x")
PADDING = ("decoder_attention_mask", "attention_mask")


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
        self.names = names_of(self.places)
        self.listeners: dict[Listener, str | None] = {}  # and what each wants of layers that bypass
        self._running = threading.local()
        self.two_texts = _has_two_texts(model, self.places)
        self.beside: dict[str, Tensor | None] = {}  # parent -> which queries of its self-attention are real
        self.told: dict[str, int] = {}  # how many calls of a path were told of in this forward
        self.bypassed: dict[str, tuple[int, ...]] = {}
        self.forward = Forward()
        self._undo = ExitStack()

    # Coming and going

    def begin(self) -> None:
        from .adapters import ADAPTERS

        try:
            self._undo.callback(hold("stance", _uncompiled))
            self._hook()
            for adapter in ADAPTERS:
                self._undo.callback(adapter(self))
        except BaseException:
            self._undo.close()
            raise
        active.append(self)

    def end(self) -> None:
        if self in active:
            active.remove(self)
        self.entered.clear()
        self._undo.close()

    @property
    def fallback(self) -> str | None:
        """What is to be done with layers that bypass every hook: the strictest listener's wish."""
        wishes = list(self.listeners.values())
        return None if None in wishes or not wishes else "eager" if "eager" in wishes else "skip"

    @property
    def is_active(self) -> bool:
        """Whether it has begun and not ended."""
        return self in active

    @property
    def reads_eager(self) -> bool:
        """Whether somebody reads weights that layers compute themselves."""
        return "eager" in self.listeners.values()

    def name_of(self, path: str) -> Layer:
        """What the layer of a call goes by: numbered from the model, whatever ran; or its path."""
        return self.names.get(path, path)

    # Who runs now

    @property
    def entered(self) -> list[_Entered]:
        """The modules that run now, in this thread, the innermost last."""
        running: list[_Entered] | None = getattr(self._running, "modules", None)
        if running is None:
            running = self._running.modules = []
        return running

    def _hook(self) -> None:
        for module, (path, is_place) in self.structure.hooked.items():
            self._hook_one(module, path, is_place)

    def _hook_one(self, module: nn.Module, path: str, is_place: bool) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.is_active:
                return  # a copy that was made of the model: it took the hooks along
            if self.entered and self.entered[0].path == path:
                self.entered.clear()  # an interrupt, which no hook is told of, ended the last forward
            if not self.entered:
                self._begin_forward()
            if not is_place:
                self._note(module, args, kwargs)
            self.entered.append(_Entered(path))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self.is_active:
                return
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
            try:
                now = self.model.get_submodule(path)
            except AttributeError:  # taken out, which is its owner's right
                continue
            if now not in self.paths:
                self.bypassed.setdefault(path, ())

    def _begin_forward(self) -> None:
        self.told.clear()
        self.beside.clear()
        if in_backward():  # a part of an earlier forward, run again for its gradients
            return
        self.forward = Forward(self.forward.number + 1)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tokens and padding among the arguments of a module; the outermost that has them is believed."""
        kind: Any = type(module)
        named = dict(zip(_parameters(kind), args, strict=False)) | kwargs
        if args and isinstance(args[0], Tensor):
            named.setdefault("input_ids", args[0])
        for name in TOKENS:
            value = named.get(name)
            if isinstance(value, Tensor) and value.ndim == 2 and not _is_real(value):
                self.forward.tokens.setdefault(name, value)
        for name in PADDING:
            value = named.get(name)
            if isinstance(value, Tensor) and value.ndim == 2:
                self.forward.padding.setdefault(name, value.bool())

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


def _uncompiled() -> Undo:
    """Compiled code would run past the hooks, or be compiled with them in it."""
    stance = torch.compiler.set_stance("force_eager")
    stance.__enter__()
    return lambda: stance.__exit__(None, None, None)


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
        found = next((each for each in active if each.model is self.model), None)
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
