"""Overrides of a model's modules while somebody listens: another forward, other attributes.

    module(...) ──> the wrapping forward ──> every hook: enter ──> the module's own forward, or a replacement
                                                                     └──> every hook: leave

`torch.nn.Module`'s own hooks do not suffice: copies and pickles of the module would take them along, and code
compiled before the block does not look at them. A subclass per module shows in `type(module)`. An override
lies in the module's own dict, so no other module in the process is touched. Which case needs which
trick, each with a test in tests/listeners/test_watch_state.py or test_watch_traps.py:

    copies and files made inside a block        pickle and copy ask the module's dict for `__reduce_ex__`
    a class with a `__deepcopy__` of its own    `__deepcopy__` in the dict takes the overrides out again
    code compiled before the block              its guard on the forward fails here, and holds again later
    code compiled inside the block              no compiler looks in here (`hidden_from_compilers`)
    `nn.DataParallel`                           a pre-hook binds the forward of a replica to the replica
    a wrapper that keeps our forward            ours calls the original once the block is over

What undoes a change goes into an attachment's `ExitStack`. Changes are made while `changing` is held.
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
except ImportError:  # another torch: `torch.compiler` does it, whose import takes seconds
    _FrameAction = None  # type: ignore[assignment, misc]

FORWARD, WRAPPED, COMPILED = "forward", "_old_forward", "_compiled_call_impl"
WRITTEN = "_torchdynamo_orig_callable"  # where a compiled function has the one it was made of
REDUCE, DEEPCOPY, HOOKS = "__reduce_ex__", "__deepcopy__", "_forward_pre_hooks"
WHY = "headwise listens to this model, which runs uncompiled meanwhile; compile without fullgraph=True"

_here = threading.local()


def _missing() -> None:
    """Stands for an attribute that is not there."""


ForwardFunction = Callable[..., object]
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


# One change at a time


class _Changing(AbstractContextManager[None]):
    """A lock for all changes, in all threads.

    A listener may also end in garbage collection, which comes at any moment, also in the middle of a change,
    where waiting for a lock may deadlock: what it has to undo then goes into a queue (`later`).
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
        if self._queue:  # came between the last look and the release
            self._work_off()

    def later(self, undo: Callable[[], None]) -> None:
        """Call `undo` as soon as no change is being made: now, or at the end of that change."""
        self._queue.append(undo)
        self._work_off()

    def _work_off(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if not self._depth:  # else this thread is in the middle of a change
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


_shared: dict[int, _Shared] = {}  # by the id of the owner, which is kept


def share(undo: ExitStack, owner: object, change: Callable[[ExitStack], None]) -> None:
    """Make a change to `owner` unless another attachment has made it; the last of them undoes it."""
    shared = _shared.get(id(owner))
    if shared is None:
        with ExitStack() as made:
            change(made)
            shared = _shared[id(owner)] = _Shared(owner, made.pop_all())
    shared.users += 1
    undo.callback(shared.release)


# All overrides of one module


class _Override:
    """One attribute: the value it has now, the original, and how many attachments need it."""

    def __init__(self, value: object, original: object) -> None:
        self.value, self.original, self.users = value, original, 0


class _ModuleOverrides:
    """What is overridden in one module. It lies in the module's dict as `__reduce_ex__`."""

    __slots__ = ("_module", "_rebind", "attributes", "hooks", "replacements")

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.attributes: dict[str, _Override] = {}
        self.hooks: tuple[LayerHook, ...] = ()  # told of every run of the module
        self.replacements: tuple[ForwardFunction, ...] = ()  # of the module's own forward: the first one runs
        self._rebind: RemovableHandle | None = None

    def override(self, name: str, value: object) -> None:
        """Set an attribute; while several need it, the first value stays."""
        module = self._module()
        assert module is not None
        if name not in self.attributes:
            own = module.__dict__
            self.attributes[name] = _Override(value, own.get(name, _missing))
            own[name] = value
            if REDUCE not in own:
                own[REDUCE] = self
                if hasattr(type(module), DEEPCOPY):
                    self.override(DEEPCOPY, self.deepcopy)
        self.attributes[name].users += 1

    def restore(self, name: str) -> None:
        """Put the original back once nobody needs the override."""
        module, override = self._module(), self.attributes[name]
        override.users -= 1
        if override.users:
            return
        del self.attributes[name]
        if module is None:
            return
        own = module.__dict__
        if own.get(name, _missing) is override.value:  # else somebody has set it meanwhile, and it is theirs
            _set_or_delete(own, name, override.original)
        if self.attributes.keys() == {DEEPCOPY}:
            self.restore(DEEPCOPY)
        elif not self.attributes and own.get(REDUCE) is self:
            del own[REDUCE]

    def wrap_forward(self) -> None:
        module = self._module()
        assert module is not None
        if FORWARD not in self.attributes:
            self._rebind = module.register_forward_pre_hook(_rebind_replica, prepend=True)
            own, original = module.__dict__, _original_forward(module)
            if original is not own.get(FORWARD, _missing):  # an earlier wrapper, put back by somebody later
                _set_or_delete(own, FORWARD, original)
            kind: type[nn.Module] = type(module)
            wrapping = _wrap_class(kind) if original is _missing else _wrap_own(module, original)
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
        """Tell pickle and copy what the module is made of: all that it has without the overrides."""
        module = self._module()
        assert module is not None, "asked through the module"
        made = type(module).__reduce_ex__(module, protocol)
        if not isinstance(made, tuple) or len(made) < 3:
            return made
        state = made[2]
        if isinstance(state, dict):
            state = self._without(state)
        elif isinstance(state, tuple) and state and isinstance(state[0], dict):  # beside slots
            state = (self._without(state[0]), *state[1:])
        return (*made[:2], state, *made[3:])

    def _without(self, state: dict[str, object]) -> dict[str, object]:
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
        """For a class that makes deep copies its own way, which may take along what is in the dict."""
        module = self._module()
        assert module is not None, "asked through the module"
        made: object = type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
        if isinstance(made, nn.Module) and made is not module:
            same = {id(override.value): override.value for override in self.attributes.values()}
            own = made.__dict__
            for name, override in self.attributes.items():
                value = own.get(name, _missing)
                bound = getattr(override.value, "__func__", _missing)  # of methods there are copies
                if id(value) in same or getattr(value, "__func__", None) is bound:
                    original = override.original
                    kept = original if original is _missing else copy.deepcopy(original, memo)
                    _set_or_delete(own, name, kept)
            own.pop(REDUCE, None)
            for key in [key for key, hook in own.get(HOOKS, {}).items() if hook is _rebind_replica]:
                del own[HOOKS][key]
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> _ModuleOverrides:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    """What is saved in place of the overrides, where a class pickles its own dict."""


def _set_or_delete(own: dict[str, object], name: str, value: object) -> None:
    if value is _missing:
        del own[name]
    else:
        own[name] = value


def _overrides_in(module: nn.Module) -> _ModuleOverrides | None:
    found = module.__dict__.get(REDUCE)
    return found if isinstance(found, _ModuleOverrides) else None


def _overrides_of(module: nn.Module) -> _ModuleOverrides:
    found = _overrides_in(module)
    return found if found is not None and found._module() is module else _ModuleOverrides(module)


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
    """Let every module that may attend, or around one that does, tell its hook when it runs."""
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
    """Let `forward(module, ...)` run in place of each module's own until `undo` is closed.

    A module with a forward of its own in its dict is left alone. Where a placement library has wrapped the
    forward of a module (device_map), what it wrapped is replaced.
    """
    for module in modules:
        if WRAPPED in module.__dict__:
            override_attribute(undo, module, WRAPPED, MethodType(forward, module))
        elif _runs_forward_of_class(module):
            _replace_forward(undo, module, forward)


def _replace_forward(undo: ExitStack, module: nn.Module, forward: ForwardFunction) -> None:
    overrides = _overrides_of(module)
    overrides.wrap_forward()
    overrides.replacements += (forward,)
    undo.callback(overrides.remove_replacement, forward)


def uncompile(attachment: Attachment) -> None:
    """Let compiled modules run as they were written: compiled code would run past the overrides inside it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nothing has been compiled in this process
        return
    for module in attachment.modules:
        if type(module) is dynamo.OptimizedModule:
            _replace_forward(attachment.undo, module, _run_as_written)
        elif module.__dict__.get(COMPILED) is not None:
            override_attribute(attachment.undo, module, COMPILED, None)


def _run_as_written(module: Any, *args: object, **kwargs: object) -> object:
    return module._orig_mod(*args, **kwargs)


# The wrapping forward


def hidden_from_compilers(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Mark a function so that no compiler looks into it, nor into what it calls."""
    if _FrameAction is None:
        return torch.compiler.disable(function, reason=WHY)
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(cast(FunctionType, function).__code__, skip)  # where compiled code calls it
    marks = cast(FunctionType, function).__dict__
    marks["_torchdynamo_disable"], marks["_torchdynamo_disable_msg"] = True, WHY  # while code is compiled
    return function


class _WrappingForward:
    """A forward that tells the hooks and runs the module, and that knows the original it has replaced.

    Somebody may keep it for longer than the block lasts, inside a forward of their own that lies in the
    module's dict by now: from then on it calls the original, and does nothing else.
    """

    __slots__ = ("_function", "_module", "_original", "_takes_module")

    def __init__(
        self, original: ForwardFunction, takes_module: bool, module: nn.Module | None = None
    ) -> None:
        self._original, self._takes_module = original, takes_module  # _missing: the forward of the class
        self._module = None if module is None else ref(module)  # None: for all modules of a class

    def as_function(self, like: ForwardFunction) -> FunctionType:
        def forward(module: nn.Module, /, *args: object, **kwargs: object) -> object:
            replica = _replica_of(module)
            module = module if replica is None else replica
            overrides = _overrides_in(module)
            now = None if overrides is None else overrides.attributes.get(FORWARD)
            own: ForwardFunction = type(module).forward if self._original is _missing else self._original
            in_use = None if now is None else getattr(now.value, "__func__", None)
            if overrides is None or in_use is not self._function():
                self._check_copy(module)  # the block is over
                return own(module, *args, **kwargs) if self._takes_module else own(*args, **kwargs)
            if overrides.replacements:
                own = functools.partial(overrides.replacements[0], module)
            else:
                own = _written(own)
                own = MethodType(own, module) if self._takes_module else own
            return _run_among(overrides.hooks, own, module, args, kwargs)

        functools.update_wrapper(forward, like)
        function = cast(FunctionType, hidden_from_compilers(forward))
        function.__dict__["_wrapping"], self._function = self, ref(function)
        return function

    def is_behind(self, function: object) -> bool:
        """Return False for a function made to look like ours: `functools.wraps` copies what it carries."""
        return self._function() is function

    def original(self, module: nn.Module) -> ForwardFunction:
        """Return what was in the module's dict."""
        if self._takes_module and self._original is not _missing:
            return MethodType(self._original, module)
        return self._original

    def _check_copy(self, module: nn.Module) -> None:
        """Refuse a copy of a module that has this very function, where the original should be a copy, too."""
        copied = not self._takes_module and self._module is not None and self._module() is not module
        if copied and not isinstance(self._original, FunctionType):
            raise ArgumentError(
                f"forward must be wrapped outside a block to be copied: this {type(module).__name__} is a "
                f"copy of one whose {type(self._original).__name__} was wrapped while headwise listened; "
                "take the wrapper off, copy, and wrap the copy"
            )


def _run_among(
    hooks: tuple[LayerHook, ...],
    own: ForwardFunction,
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run a module's forward; every hook that was entered is left, whoever raises."""
    entered, came_back, output = 0, False, None
    try:
        for hook in hooks:
            hook.enter(module, args, kwargs)
            entered += 1
        output = own(*args, **kwargs)
        came_back = True
        return output
    finally:
        error = None
        for hook in reversed(hooks[:entered]):
            try:
                hook.leave(args, kwargs, came_back, output)
            except BaseException as raised:  # the others are to be told as well
                error, came_back = raised, False
        if error is not None:
            try:
                raise error
            finally:
                error = None  # which knows this frame


_wrapping_classes: WeakKeyDictionary[type[nn.Module], FunctionType] = WeakKeyDictionary()


def _wrap_class(kind: type[nn.Module]) -> FunctionType:
    """One function for a class, with its signature; compiled code has guards on which function it is."""
    function = _wrapping_classes.get(kind)
    if function is None:
        function = _wrapping_classes[kind] = _WrappingForward(_missing, True).as_function(kind.forward)
    return function


def _wrap_own(module: nn.Module, own: ForwardFunction) -> FunctionType:
    """The same for one module that has a forward of its own in its dict, bound already."""
    unbound = own.__func__ if isinstance(own, MethodType) and own.__self__ is module else own
    function = _WrappingForward(unbound, unbound is not own, module).as_function(own)
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):
        return function
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *signature.parameters.values()]
    returned = signature.return_annotation
    function.__dict__["__signature__"] = inspect.Signature(parameters, return_annotation=returned)
    return function


def _wrapping_behind(forward: object) -> _WrappingForward | None:
    if not isinstance(forward, MethodType):
        return None
    wrapping = getattr(forward.__func__, "_wrapping", None)
    known = isinstance(wrapping, _WrappingForward) and wrapping.is_behind(forward.__func__)
    return cast(_WrappingForward, wrapping) if known else None


def _original_forward(module: nn.Module) -> ForwardFunction:
    """The forward in a module's dict, without wrapping forwards of ours that have stayed there."""
    own: ForwardFunction = module.__dict__.get(FORWARD, _missing)
    while (wrapping := _wrapping_behind(own)) is not None and getattr(own, "__self__", None) is module:
        own = wrapping.original(module)
    return own


def _written(forward: ForwardFunction) -> ForwardFunction:
    """The function behind a compiled one."""
    return getattr(forward, WRITTEN, forward)


def _runs_forward_of_class(module: nn.Module) -> bool:
    overrides = _overrides_in(module)
    override = None if overrides is None else overrides.attributes.get(FORWARD)
    own = _original_forward(module) if override is None else cast(ForwardFunction, override.original)
    return own is _missing or getattr(_written(own), "__func__", None) is type(module).forward


# Replicas, as `nn.DataParallel` makes them: shallow copies, whose forward is bound to the first module


def _rebind_replica(module: nn.Module, _: object) -> None:
    """Before every run: bind a replica's forward to itself; torch has looked it up already for this one."""
    method = module.__dict__.get(FORWARD)
    if not isinstance(method, MethodType) or method.__self__ is module or _wrapping_behind(method) is None:
        return
    if method.__self__.__dict__.get(REDUCE) is module.__dict__.get(REDUCE):
        module.__dict__[FORWARD] = MethodType(method.__func__, module)
        _here.replica = ref(module)


def _replica_of(module: nn.Module) -> nn.Module | None:
    """The replica that is about to run in this thread with the forward of `module`."""
    weak = getattr(_here, "replica", None)
    if weak is None:
        return None
    _here.replica = None
    replica: nn.Module | None = weak()
    same = replica is not None and replica.__dict__.get(REDUCE) is module.__dict__.get(REDUCE)
    return replica if same else None
