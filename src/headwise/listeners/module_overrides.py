"""Overrides of a model's modules while it is watched: another forward, other attributes.

    module(...) ──> the wrapping forward ──> every hook: enter ──> the module's forward, or a replacement
                                                                     └──> every hook: leave

The hooks of `torch.nn.Module` do not suffice: copies and pickles of the module would contain them, and code
compiled before the block does not call them. A subclass per module would show in `type(module)`. An override
is an entry of the module's `__dict__`, so that no other module in the process changes. Each of these cases
has a test in tests/listeners/test_watch_state.py or test_watch_traps.py:

    copies and files made inside a block        pickle and copy read `__reduce_ex__` from the module's dict
    a class that defines `__deepcopy__`         `__deepcopy__` in the dict removes the overrides of the copy
    code compiled before the block              its guard on the forward fails here, and holds again later
    code compiled inside the block              compilers skip this code (`hidden_from_compilers`)
    `nn.DataParallel`                           a pre-hook binds the forward of a replica to the replica
    a wrapper that keeps the wrapping forward   it calls the original once the block is over

Each change adds how to undo it to an attachment's `ExitStack`. Changes are made with the lock `changing`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .attachment import Attachment, LayerHook

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # other versions of torch: `torch.compiler` does the same, but takes seconds to import
    _FrameAction = None  # type: ignore[assignment, misc]

FORWARD, WRAPPED, COMPILED = "forward", "_old_forward", "_compiled_call_impl"
UNCOMPILED = "_torchdynamo_orig_callable"  # attribute of a compiled function: the original function
REDUCE, DEEPCOPY, HOOKS = "__reduce_ex__", "__deepcopy__", "_forward_pre_hooks"
REASON = "headwise listens to this model, which runs uncompiled meanwhile; compile without fullgraph=True"

_thread = threading.local()


def _missing() -> None:
    """Placeholder for a missing attribute."""


ForwardFunction = Callable[..., object]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


# One change at a time


class _Changing(AbstractContextManager[None]):
    """A lock for all changes, in all threads.

    Garbage collection may end a listener at any moment, also during a change, where waiting for the lock may
    deadlock. What is to be undone then goes into a queue (`later`).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._queue: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                while self._queue:
                    self._queue.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()
        if self._queue:  # added between the last check and the release
            self._run_queue()

    def later(self, undo: Callable[[], None]) -> None:
        """Call `undo` as soon as no change is being made: now, or at the end of that change."""
        self._queue.append(undo)
        self._run_queue()

    def _run_queue(self) -> None:
        """Run what is in the queue, unless a change is being made."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._depth:  # else this thread is making a change
                    with self:
                        pass
            finally:
                self._lock.release()


changing = _Changing()


class _Shared:
    """A change that several attachments need."""

    def __init__(self, owner: object, undo: ExitStack) -> None:
        self.owner, self.undo, self.users = owner, undo, 0

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            del _shared[id(self.owner)]
            self.undo.close()


_shared: dict[int, _Shared] = {}  # by the id of the owner, which `_Shared` keeps alive


def share(undo: ExitStack, owner: object, change: Callable[[ExitStack], None]) -> None:
    """Make a change to `owner` unless another attachment has; the last attachment undoes it."""
    shared = _shared.get(id(owner))
    if shared is None:
        with ExitStack() as created:
            change(created)
            shared = _shared[id(owner)] = _Shared(owner, created.pop_all())
    shared.users += 1
    undo.callback(shared.release)


# All overrides of one module


class _Override:
    """An overridden attribute: its value, the original, and how many attachments need the override."""

    def __init__(self, value: object, original: object) -> None:
        self.value, self.original, self.users = value, original, 0


class _ModuleOverrides:
    """The overrides of one module, stored in the module's dict as `__reduce_ex__`."""

    __slots__ = ("_module", "_rebind", "attributes", "hooks", "replacements")

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.attributes: dict[str, _Override] = {}
        self.hooks: tuple[LayerHook, ...] = ()  # called for every run of the module
        self.replacements: tuple[ForwardFunction, ...] = ()  # of the module's forward; the first one runs
        self._rebind: RemovableHandle | None = None

    def override(self, name: str, value: object) -> None:
        """Set an attribute; while several attachments need it, the first value stays."""
        module = self._module()
        assert module is not None
        if name not in self.attributes:
            values = module.__dict__
            self.attributes[name] = _Override(value, values.get(name, _missing))
            values[name] = value
            if REDUCE not in values:
                values[REDUCE] = self
                if hasattr(type(module), DEEPCOPY):
                    self.override(DEEPCOPY, self.deepcopy)
        self.attributes[name].users += 1

    def restore(self, name: str) -> None:
        """Restore the original once no attachment needs the override."""
        module, override = self._module(), self.attributes[name]
        override.users -= 1
        if override.users:
            return
        del self.attributes[name]
        if module is None:
            return
        values = module.__dict__
        if values.get(name, _missing) is override.value:  # otherwise the user has set it, and it stays
            _set_or_delete(values, name, override.original)
        if self.attributes.keys() == {DEEPCOPY}:
            self.restore(DEEPCOPY)
        elif not self.attributes and values.get(REDUCE) is self:
            del values[REDUCE]

    def wrap_forward(self) -> None:
        """Put a wrapping forward into the module, or count another user of it."""
        module = self._module()
        assert module is not None
        if FORWARD not in self.attributes:
            self._rebind = module.register_forward_pre_hook(_rebind_replica, prepend=True)
            values, original = module.__dict__, _original_forward(module)
            if original is not values.get(
                FORWARD, _missing
            ):  # an earlier wrapping forward that was set again
                _set_or_delete(values, FORWARD, original)
            kind: type[nn.Module] = type(module)
            wrapping = _wrap_class(kind) if original is _missing else _wrap_instance(module, original)
            self.override(FORWARD, MethodType(wrapping, module))
        else:
            self.attributes[FORWARD].users += 1

    def unwrap_forward(self) -> None:
        self.restore(FORWARD)
        if FORWARD not in self.attributes and self._rebind is not None:
            self._rebind.remove()

    def remove_replacement(self, forward: ForwardFunction) -> None:
        rest = list(self.replacements)
        rest.remove(forward)
        self.replacements = tuple(rest)
        self.unwrap_forward()

    # Copies and files

    def __call__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Return what pickle and copy read of the module: its state without the overrides."""
        module = self._module()
        assert module is not None, "called on the module"
        reduced = type(module).__reduce_ex__(module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        state = reduced[2]
        if isinstance(state, dict):
            state = self._without(state)
        elif isinstance(state, tuple) and state and isinstance(state[0], dict):  # (__dict__, __slots__)
            state = (self._without(state[0]), *state[1:])
        return (*reduced[:2], state, *reduced[3:])

    def _without(self, state: dict[str, object]) -> dict[str, object]:
        """Return a module's dict without the overrides."""
        rest = {name: value for name, value in state.items() if value is not self}
        for name, override in self.attributes.items():
            if name in rest and rest[name] is override.value:
                _set_or_delete(rest, name, override.original)
        hooks = rest.get(HOOKS)
        if isinstance(hooks, dict) and any(hook is _rebind_replica for hook in hooks.values()):
            rest[HOOKS] = type(hooks)(
                (key, hook) for key, hook in hooks.items() if hook is not _rebind_replica
            )
        return rest

    def deepcopy(self, memo: dict[int, object]) -> object:
        """Return the deep copy that `__deepcopy__` of the class makes, without the overrides in it."""
        module = self._module()
        assert module is not None, "called on the module"
        copied: object = type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
        if isinstance(copied, nn.Module) and copied is not module:
            overridden = {id(override.value): override.value for override in self.attributes.values()}
            values = copied.__dict__
            for name, override in self.attributes.items():
                value = values.get(name, _missing)
                bound = getattr(override.value, "__func__", _missing)  # a bound method is copied
                if id(value) in overridden or getattr(value, "__func__", None) is bound:
                    original = override.original
                    restored = original if original is _missing else copy.deepcopy(original, memo)
                    _set_or_delete(values, name, restored)
            values.pop(REDUCE, None)
            for key in [key for key, hook in values.get(HOOKS, {}).items() if hook is _rebind_replica]:
                del values[HOOKS][key]
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> _ModuleOverrides:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    """Stand for the overrides in a file of a class that pickles its dict."""


def _set_or_delete(values: dict[str, object], name: str, value: object) -> None:
    """Set an entry of a module's dict, or delete it if the value is `_missing`."""
    if value is _missing:
        del values[name]
    else:
        values[name] = value


def _overrides_in(module: nn.Module) -> _ModuleOverrides | None:
    """Return the overrides in a module's dict, or None."""
    overrides = module.__dict__.get(REDUCE)
    return overrides if isinstance(overrides, _ModuleOverrides) else None


def _overrides_of(module: nn.Module) -> _ModuleOverrides:
    """Return the overrides of a module, or new ones; those of a copied dict are another module's."""
    overrides = _overrides_in(module)
    return overrides if overrides is not None and overrides._module() is module else _ModuleOverrides(module)


# Making changes


def override_attribute(undo: ExitStack, module: nn.Module, name: str, value: object) -> None:
    """Set an attribute of a module until `undo` is closed."""
    overrides = _overrides_of(module)
    overrides.override(name, value)
    undo.callback(overrides.restore, name)


def original_attribute(module: nn.Module, name: str) -> Any:
    """Return an attribute in a module's dict as it would be without an override; None: it has none."""
    overrides, value = _overrides_in(module), module.__dict__.get(name, _missing)
    if overrides is not None and name in overrides.attributes:
        value = overrides.attributes[name].original
    return None if value is _missing else value


def add_hooks(attachment: Attachment) -> None:
    """Call the hooks of an attachment when their modules run."""
    added: list[tuple[_ModuleOverrides, LayerHook]] = []

    def remove() -> None:
        for overrides, hook in reversed(added):
            overrides.hooks = tuple([other for other in overrides.hooks if other is not hook])
            overrides.unwrap_forward()

    attachment.undo.callback(remove)
    for module, hook in attachment.hooks.items():
        overrides = _overrides_of(module)
        overrides.wrap_forward()
        overrides.hooks += (hook,)
        added.append((overrides, hook))


def override_forward(undo: ExitStack, modules: Iterable[nn.Module], forward: ForwardFunction) -> None:
    """Let `forward(module, ...)` run in place of each module's forward until `undo` is closed.

    A module with a forward in its dict is left unchanged. Where a placement library (device_map) has wrapped
    the forward of a module, the wrapped forward is replaced.
    """
    for module in modules:
        if WRAPPED in module.__dict__:
            override_attribute(undo, module, WRAPPED, MethodType(forward, module))
        elif _runs_forward_of_class(module):
            _replace_forward(undo, module, forward)


def _replace_forward(undo: ExitStack, module: nn.Module, forward: ForwardFunction) -> None:
    """Let `forward(module, ...)` run in place of the module's forward until `undo` is closed."""
    overrides = _overrides_of(module)
    overrides.wrap_forward()
    overrides.replacements += (forward,)
    undo.callback(overrides.remove_replacement, forward)


def uncompile(attachment: Attachment) -> None:
    """Let compiled modules run uncompiled, for compiled code ignores the overrides inside it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nothing has been compiled in this process
        return
    for module in attachment.modules:
        if type(module) is dynamo.OptimizedModule:
            _replace_forward(attachment.undo, module, _run_uncompiled)
        elif module.__dict__.get(COMPILED) is not None:
            override_attribute(attachment.undo, module, COMPILED, None)


def _run_uncompiled(module: Any, *args: object, **kwargs: object) -> object:
    return module._orig_mod(*args, **kwargs)


# The wrapping forward


def hidden_from_compilers(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Mark a function so that no compiler looks into it, nor into what it calls."""
    if _FrameAction is None:
        return torch.compiler.disable(function, reason=REASON)
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(cast(FunctionType, function).__code__, skip)  # for calls from compiled code
    marks = cast(FunctionType, function).__dict__
    marks["_torchdynamo_disable"], marks["_torchdynamo_disable_msg"] = (
        True,
        REASON,
    )  # for code that is being compiled
    return function


class _WrappingForward:
    """A forward that calls the hooks and the original forward, which it replaces.

    A user's wrapper in the module's dict may keep it after the block has ended. From then on it calls only
    the original.
    """

    __slots__ = ("_function", "_module", "_original", "_takes_module")

    def __init__(
        self, original: ForwardFunction, takes_module: bool, module: nn.Module | None = None
    ) -> None:
        self._original, self._takes_module = original, takes_module  # _missing: the forward of the class
        self._module = None if module is None else ref(module)  # None: for all modules of a class

    def as_function(self, like: ForwardFunction) -> FunctionType:
        """Return the wrapping forward as a function with the name and signature of `like`."""

        def forward(module: nn.Module, /, *args: object, **kwargs: object) -> object:
            replica = _replica_of(module)
            module = module if replica is None else replica
            overrides = _overrides_in(module)
            override = None if overrides is None else overrides.attributes.get(FORWARD)
            target: ForwardFunction = type(module).forward if self._original is _missing else self._original
            in_use = None if override is None else getattr(override.value, "__func__", None)
            if overrides is None or in_use is not self._function():
                self._check_copy(module)  # the block is over
                return target(module, *args, **kwargs) if self._takes_module else target(*args, **kwargs)
            if overrides.replacements:
                target = functools.partial(overrides.replacements[0], module)
            else:
                target = _uncompiled(target)
                target = MethodType(target, module) if self._takes_module else target
            return _run_with_hooks(overrides.hooks, target, module, args, kwargs)

        functools.update_wrapper(forward, like)
        function = cast(FunctionType, hidden_from_compilers(forward))
        function.__dict__["_wrapping"], self._function = self, ref(function)
        return function

    def is_behind(self, function: object) -> bool:
        """Return True if this made the function. `functools.wraps` copies its attributes to others."""
        return self._function() is function

    def original(self, module: nn.Module) -> ForwardFunction:
        """Return the forward that was in the module's dict."""
        if self._takes_module and self._original is not _missing:
            return MethodType(self._original, module)
        return self._original

    def _check_copy(self, module: nn.Module) -> None:
        """Raise `ArgumentError` for a copied module whose original forward is bound to the first one."""
        copied = not self._takes_module and self._module is not None and self._module() is not module
        if copied and not isinstance(self._original, FunctionType):
            raise ArgumentError(
                "forward must not be wrapped inside a headwise block if the module is then copied: this "
                f"{type(module).__name__} is a copy of a module whose {type(self._original).__name__} was "
                "wrapped there; remove the wrapper, copy the module, and wrap the copy"
            )


def _run_with_hooks(
    hooks: tuple[LayerHook, ...],
    forward: ForwardFunction,
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run a module's forward between `enter` and `leave` of every hook, also if one of them raises."""
    entered, returned, output = 0, False, None
    try:
        for hook in hooks:
            hook.enter(module, args, kwargs)
            entered += 1
        output = forward(*args, **kwargs)
        returned = True
        return output
    finally:
        error = None
        for hook in reversed(hooks[:entered]):
            try:
                hook.leave(args, kwargs, returned, output)
            except BaseException as raised:  # the other hooks are still left
                error, returned = raised, False
        if error is not None:
            try:
                raise error
            finally:
                error = None  # the error refers to this frame


_wrapping_classes: WeakKeyDictionary[type[nn.Module], FunctionType] = WeakKeyDictionary()


def _wrap_class(kind: type[nn.Module]) -> FunctionType:
    """Return the wrapping forward of a class, one for all modules: compiled code has guards on it."""
    function = _wrapping_classes.get(kind)
    if function is None:
        function = _wrapping_classes[kind] = _WrappingForward(_missing, True).as_function(kind.forward)
    return function


def _wrap_instance(module: nn.Module, forward: ForwardFunction) -> FunctionType:
    """Return the wrapping forward of one module, for a bound forward in its dict."""
    unbound = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else forward
    function = _WrappingForward(unbound, unbound is not forward, module).as_function(forward)
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return function
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self_parameter, *signature.parameters.values()]
    annotation = signature.return_annotation
    function.__dict__["__signature__"] = inspect.Signature(parameters, return_annotation=annotation)
    return function


def _wrapping_behind(forward: object) -> _WrappingForward | None:
    """Return the wrapping forward that a bound method is, or None."""
    if not isinstance(forward, MethodType):
        return None
    wrapping = getattr(forward.__func__, "_wrapping", None)
    is_ours = isinstance(wrapping, _WrappingForward) and wrapping.is_behind(forward.__func__)
    return cast(_WrappingForward, wrapping) if is_ours else None


def _original_forward(module: nn.Module) -> ForwardFunction:
    """Return the forward in a module's dict without wrapping forwards that were left there."""
    forward: ForwardFunction = module.__dict__.get(FORWARD, _missing)
    while (wrapping := _wrapping_behind(forward)) is not None and getattr(
        forward, "__self__", None
    ) is module:
        forward = wrapping.original(module)
    return forward


def _uncompiled(forward: ForwardFunction) -> ForwardFunction:
    """Return the original of a compiled function, or the function itself."""
    return getattr(forward, UNCOMPILED, forward)


def _runs_forward_of_class(module: nn.Module) -> bool:
    """Return True if the forward of a module, without overrides, is that of its class."""
    overrides = _overrides_in(module)
    override = None if overrides is None else overrides.attributes.get(FORWARD)
    forward = _original_forward(module) if override is None else cast(ForwardFunction, override.original)
    return forward is _missing or getattr(_uncompiled(forward), "__func__", None) is type(module).forward


# Replicas, as `nn.DataParallel` makes them: shallow copies, whose forward is bound to the first module


def _rebind_replica(module: nn.Module, _: object) -> None:
    """Bind a replica's forward to the replica; for the current run torch has already looked it up."""
    method = module.__dict__.get(FORWARD)
    if not isinstance(method, MethodType) or method.__self__ is module or _wrapping_behind(method) is None:
        return
    if method.__self__.__dict__.get(REDUCE) is module.__dict__.get(REDUCE):
        module.__dict__[FORWARD] = MethodType(method.__func__, module)
        _thread.replica = ref(module)


def _replica_of(module: nn.Module) -> nn.Module | None:
    """Return the replica that is about to run in this thread with the forward of `module`, or None."""
    reference = getattr(_thread, "replica", None)
    if reference is None:
        return None
    _thread.replica = None
    replica: nn.Module | None = reference()
    is_replica = replica is not None and replica.__dict__.get(REDUCE) is module.__dict__.get(REDUCE)
    return replica if is_replica else None
