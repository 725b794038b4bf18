"""How a model is changed while somebody listens, and changed back.

A module that is listened to gets another class for a while, a subclass of its own made for it alone, as
`torch.nn.utils.parametrize` and `fully_shard` do it:

    module(...) ──> every hook: enter ──> the class's own __call__ ──> forward, or one in its place
                                                       every hook: leave <──┘

Afterwards the module has its own class back; its dictionary was never changed. torch's own hooks would not
do: copies and files made meanwhile would hold them, and code that was compiled before does not look at hooks.
It looks at a module's class, and runs the module by itself if that is another one.

Few changes are of another kind: a flag (timm's `fused_attn`), a compiled forward in a module's dictionary, a
name in a config, a lookup of Transformers. Each is undone by the `ExitStack` of whoever asked for it; one
that several ask for is made for the first and undone after the last (`shared`).
"""

from __future__ import annotations

import copyreg
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, ClassVar, ParamSpec, Protocol, SupportsIndex, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except (
    ImportError
):  # a torch that says this in another way: with the whole compiler, which takes seconds to import
    _FrameAction = None  # type: ignore[assignment, misc]

__all__ = [
    "ModuleHook", "Undo", "add_hook", "changing", "class_of", "replace_forward", "set_attribute", "shared",
    "uncompile", "undo_dropped", "unseen", "without_changes",
]  # fmt: skip

FORWARD, WRAPPED, COMPILED = "forward", "_old_forward", "_compiled_call_impl"
CHANGES = "_headwise_changes"
WRITTEN = "_torchdynamo_orig_callable"  # where a compiled function has the one it was made of
WHY = "headwise listens to this model, which runs uncompiled meanwhile; compile without fullgraph=True"
NEW: Any = copyreg.__newobj__  # type: ignore[attr-defined]  # how objects of most classes are made again
MISSING: Any = object()

Undo = Callable[[], None]
Forward = Callable[..., Any]
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


# One change at a time

_lock, _depth = threading.RLock(), 0
_dropped: deque[Undo] = deque()
_shared: dict[Hashable, tuple[Undo, list[ExitStack]]] = {}  # what is changed -> how to undo it, for whom


@contextmanager
def changing() -> Iterator[None]:
    """Change models or change them back: one thread at a time."""
    global _depth
    with _lock:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
    _undo_waiting()


def undo_dropped(undo: Undo) -> None:
    """Undo what nobody holds any more: at once, or after a change in which the garbage was collected."""
    _dropped.append(undo)
    _undo_waiting()


def _undo_waiting() -> None:
    if _dropped and _lock.acquire(blocking=False):  # else whoever has it comes here as well
        try:
            while _dropped and not _depth:
                undo = _dropped.popleft()
                with changing():
                    undo()
        finally:
            _lock.release()


def shared(undo: ExitStack, what: Hashable, change: Callable[[], Undo]) -> None:
    """Make a change unless it is made already. It is undone with the last of those who asked for it."""
    if what not in _shared:
        _shared[what] = change(), []
    undo_change, holders = _shared[what]
    holders.append(undo)

    def let_go() -> None:
        holders.remove(undo)
        if not holders:
            del _shared[what]
            undo_change()

    undo.callback(let_go)


# The class of a module that is listened to


class ModuleHook(Protocol):
    """Is told of every call of a module."""

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None: ...

    def leave(
        self, args: tuple[object, ...], kwargs: dict[str, object], returned: bool, output: object
    ) -> None:
        """The call has returned, or raised. Whatever this raises, the module has been left."""


class _Changes:
    """What is changed on one module."""

    __slots__ = ("attributes", "forward", "hooks", "kind")

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind  # the module's own class
        self.hooks: tuple[ModuleHook, ...] = ()
        self.forward: Forward | None = None  # in place of the class's
        self.attributes: dict[str, tuple[object, object]] = {}  # name -> value now, value before

    def put_back(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a module's dictionary, as it is without the changes."""
        state = dict(state)
        for name, (now, before) in self.attributes.items():
            if state.get(name, MISSING) is now:
                _set(state, name, before)
        return state


class _ListenedTo(nn.Module):
    """The first base of the class of a module that is listened to; the second is its own class."""

    _headwise_changes: ClassVar[_Changes]

    def __init_subclass__(cls) -> None:
        """Do nothing: a class that keeps a list of its subclasses should not have these in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, _ListenedTo):
            return _call(self, self._headwise_changes.hooks, args, kwargs)
        return type(self).__call__(self, *args, **kwargs)  # kept beyond the block, by a compiler, say

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Tell pickle and copy of the module as it is without the changes."""
        made, changes = super().__reduce_ex__(protocol), self._headwise_changes
        if isinstance(made, str):
            return made
        function, args, *rest = made
        args = tuple(changes.kind if part is type(self) else part for part in args)
        if function is type(self):
            function = changes.kind
        elif function is NEW:
            function = changes.kind.__new__  # the same, without pickle's look at the object's class
        if rest and isinstance(rest[0], dict):
            rest[0] = changes.put_back(rest[0])
        elif rest and isinstance(rest[0], tuple) and isinstance(rest[0][0], dict):  # beside slots
            rest[0] = (changes.put_back(rest[0][0]), *rest[0][1:])
        return (function, args, *rest)


def _call(
    module: _ListenedTo, hooks: tuple[ModuleHook, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    if not hooks:
        return super(_ListenedTo, module).__call__(*args, **kwargs)
    hook = hooks[0]
    hook.enter(module, args, kwargs)
    try:
        output = _call(module, hooks[1:], args, kwargs)
    except BaseException:
        hook.leave(args, kwargs, False, None)
        raise
    hook.leave(args, kwargs, True, output)
    return output


def _deepcopy(self: _ListenedTo, memo: dict[int, object]) -> object:
    """For a class that makes deep copies its own way: a copy that has taken this class gets its own back."""
    changes = self._headwise_changes
    made: Any = changes.kind.__deepcopy__(self, memo)  # type: ignore[attr-defined]
    if type(made) is type(self) and made is not self:
        state = changes.put_back(made.__dict__)
        object.__setattr__(made, "__class__", changes.kind)
        made.__dict__.clear()
        made.__dict__.update(state)
    return made


_classes: WeakKeyDictionary[nn.Module, type[_ListenedTo]] = WeakKeyDictionary()


def class_of(module: nn.Module) -> Any:  # a type, whose attributes and hash mypy does not know
    """Return a module's own class, also while it is listened to."""
    kind = type(module)
    changes = vars(kind).get(CHANGES)
    return kind if changes is None else changes.kind


def _changes_of(undo: ExitStack, module: nn.Module) -> _Changes:
    """Give a module its other class: the same each time, for compiled code is compiled anew for a new one."""
    kind = class_of(module)
    made = _classes.get(module)
    if made is None or made._headwise_changes.kind is not kind:
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        more: dict[str, object] = {CHANGES: _Changes(kind)}
        if hasattr(kind, "__deepcopy__"):
            more["__deepcopy__"] = _deepcopy
        metaclass: Any = type(kind)  # a class that was made inside an earlier block may be ours already
        bases = (kind,) if issubclass(kind, _ListenedTo) else (_ListenedTo, kind)
        made = metaclass(kind.__name__, bases, named | more)
        _classes[module] = made
    listened_to = made

    def change() -> Undo:
        object.__setattr__(module, "__class__", listened_to)  # a compiled module would hand it on

        def change_back() -> None:
            if type(module) is listened_to:  # else somebody has made a class of it, which goes on without us
                object.__setattr__(module, "__class__", kind)

        return change_back

    shared(undo, ("class", module), change)
    return listened_to._headwise_changes


def add_hook(undo: ExitStack, module: nn.Module, hook: ModuleHook) -> None:
    """Tell `hook` of every call of a module."""
    changes = _changes_of(undo, module)
    changes.hooks += (hook,)

    def remove() -> None:
        changes.hooks = tuple([other for other in changes.hooks if other is not hook])

    undo.callback(remove)


def replace_forward(undo: ExitStack, modules: Iterable[nn.Module], forward: Forward) -> None:
    """Let `forward(module, ...)` run in place of each module's own; one with its own forward is left alone.

    Where a placement library has wrapped the forward of a module (device_map), what it wrapped is replaced.
    """
    for module in modules:
        if WRAPPED in module.__dict__:
            set_attribute(undo, module, WRAPPED, MethodType(forward, module))
        else:
            changes = _changes_of(undo, module)
            kind: Any = type(module)
            if FORWARD not in vars(kind):
                kind.forward = _replaced_forward(changes)
            shared(undo, ("forward", module), functools.partial(_replace_forward, changes, forward))


def _replaced_forward(changes: _Changes) -> Forward:
    """Somebody may keep it beyond the block, in a wrapper: then it is the forward of the class again."""

    @functools.wraps(changes.kind.forward)
    def forward(module: nn.Module, *args: object, **kwargs: object) -> object:
        return (changes.forward or changes.kind.forward)(module, *args, **kwargs)

    return forward


def _replace_forward(changes: _Changes, forward: Forward) -> Undo:
    changes.forward = forward

    def put_back() -> None:
        changes.forward = None

    return put_back


# Attributes of a module


def set_attribute(undo: ExitStack, module: nn.Module, name: str, value: object) -> None:
    """Set an attribute of a module, or, with `MISSING`, remove it; of several values the first stays."""
    changes = _changes_of(undo, module)

    def change() -> Undo:
        own = module.__dict__
        before = own.get(name, MISSING)
        changes.attributes[name] = value, before
        _set(own, name, value)

        def put_back() -> None:
            del changes.attributes[name]
            if own.get(name, MISSING) is value:  # else somebody has set it meanwhile, and it is theirs
                _set(own, name, before)

        return put_back

    shared(undo, ("attribute", module, name), change)


def _set(own: dict[str, Any], name: str, value: object) -> None:
    if value is MISSING:
        own.pop(name, None)
    else:
        own[name] = value


def without_changes(module: nn.Module, name: str) -> Any:
    """Return an attribute as it is in the module's dictionary while nobody listens; None: it is not there."""
    changes = vars(type(module)).get(CHANGES)
    return (module.__dict__ if changes is None else changes.put_back(module.__dict__)).get(name)


# Compiled code


def uncompile(undo: ExitStack, modules: Iterable[nn.Module]) -> None:
    """Let compiled modules run as they were written: a compiled one would run past what is changed inside."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for module in modules:
        own = module.__dict__
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            set_attribute(undo, module, FORWARD, MethodType(_original, module))
            continue
        if own.get(COMPILED) is not None:
            set_attribute(undo, module, COMPILED, None)
        forward = own.get(FORWARD)
        if forward is not None and WRAPPED not in own:
            written = getattr(forward, WRITTEN, forward)
            bound_to, function = getattr(written, "__self__", None), getattr(written, "__func__", None)
            if bound_to is module and function in (class_of(module).forward, type(module).forward):
                set_attribute(undo, module, FORWARD, MISSING)  # its class's own, which may be replaced
            elif written is not forward:
                set_attribute(undo, module, FORWARD, written)


def _original(module: Any, *args: object, **kwargs: object) -> object:
    return module._orig_mod(*args, **kwargs)


def unseen(function: Callable[Given, Answer], why: str = WHY) -> Callable[Given, Answer]:
    """Let no compiler look into a function, nor into what it calls."""
    if _FrameAction is None:
        return torch.compiler.disable(function, reason=why)
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)  # where it is run by compiled code
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # or made part of it
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return function


_call = unseen(_call)
