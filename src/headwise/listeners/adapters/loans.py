"""What a module is lent for a while: another forward, other attributes.

    module(...) ──> forward, lent ──> every post: enter ──> the module's own forward, or one in its place
                                                                └──> every post: after, leave

All of it lies in the module's own dict and nowhere else, so no other module in the process is touched. Copies
and files that are made meanwhile are of the module without it: pickle and copy ask an object, by the name
`__reduce_ex__`, what it is made of, and the answer lies in the dict as well.

Compiled code has a guard that a module's forward is the one of its class: it steps aside for what is lent,
and fits again afterwards. No compiler looks into what is lent, nor into anything that is called there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any, ParamSpec, Protocol, SupportsIndex, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import ArgumentError
from ..shared_patches import Undo, turns, undo_all

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except (
    ImportError
):  # a torch that says this in another way: with the whole compiler, which takes seconds to import
    _FrameAction = None  # type: ignore[assignment, misc]

__all__ = ["Post", "lend", "override", "station", "uncompile", "unseen", "without_loan"]

FORWARD, WRAPPED, COMPILED = "forward", "_old_forward", "_compiled_call_impl"
WRITTEN = "_torchdynamo_orig_callable"  # where a compiled function has the one it was made of
REDUCE, DEEPCOPY, HOOKS = "__reduce_ex__", "__deepcopy__", "_forward_pre_hooks"
WHY = "headwise listens to this model, which runs uncompiled meanwhile; compile without fullgraph=True"

_here = threading.local()


def _missing() -> None:
    """Stands for an attribute that is not there."""


Forward = Callable[..., object]
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Post(Protocol):
    """Someone who is told of every run of a module."""

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None: ...

    def leave(
        self, args: tuple[object, ...], kwargs: dict[str, object], came_back: bool, output: object
    ) -> None:
        """The run is over; else it raised. Whatever this raises, the module has been left."""


class _Attribute:
    """One that is lent: its value, what it was before, and to how many."""

    __slots__ = ("before", "count", "value")

    def __init__(self, value: object, before: object) -> None:
        self.value, self.before, self.count = value, before, 0


class _Loan:
    """All that one module is lent; the answer to what it is made of without that."""

    __slots__ = ("_hook", "_module", "attributes", "instead", "posts")

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.attributes: dict[str, _Attribute] = {}
        self.posts: tuple[Post, ...] = ()
        self.instead: tuple[Forward, ...] = ()  # of the module's own forward: the first
        self._hook: RemovableHandle | None = None

    # Lending; only inside `turns`

    def give(self, name: str, value: object) -> None:
        module = self._module()
        assert module is not None
        if name not in self.attributes:
            own = module.__dict__
            self.attributes[name] = _Attribute(value, own.get(name, _missing))
            own[name] = value
            if REDUCE not in own:
                own[REDUCE] = self
                if hasattr(type(module), DEEPCOPY):
                    self.give(DEEPCOPY, self.deepcopy)
        self.attributes[name].count += 1

    def take_back(self, name: str) -> None:
        module, lent = self._module(), self.attributes[name]
        lent.count -= 1
        if lent.count:
            return
        del self.attributes[name]
        if module is None:
            return
        own = module.__dict__
        if own.get(name, _missing) is lent.value:  # else somebody put something else there, and it is theirs
            if lent.before is _missing:
                del own[name]
            else:
                own[name] = lent.before
        if self.attributes.keys() == {DEEPCOPY}:
            self.take_back(DEEPCOPY)
        elif not self.attributes and own.get(REDUCE) is self:
            del own[REDUCE]

    def give_forward(self) -> None:
        module = self._module()
        assert module is not None
        if FORWARD not in self.attributes:
            self._hook = module.register_forward_pre_hook(_called, prepend=True)
            own, before = module.__dict__, _before(module)
            if before is not own.get(FORWARD, _missing):  # lent once, and put back by somebody later
                del own[FORWARD]
                if before is not _missing:
                    own[FORWARD] = before
            lent = _lent_forward(type(module)) if before is _missing else _lent_in_place_of(module, before)
            self.give(FORWARD, MethodType(lent, module))
        else:
            self.attributes[FORWARD].count += 1

    def take_back_forward(self) -> None:
        self.take_back(FORWARD)
        if FORWARD not in self.attributes and self._hook is not None:
            self._hook.remove()

    # While it lasts

    def __call__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """What pickle and copy are told: the module without what it was lent."""
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
        for name, lent in self.attributes.items():
            if name in rest and rest[name] is lent.value:
                if lent.before is _missing:
                    del rest[name]
                else:
                    rest[name] = lent.before
        hooks = rest.get(HOOKS)
        if isinstance(hooks, dict) and any(hook is _called for hook in hooks.values()):
            rest[HOOKS] = type(hooks)((key, hook) for key, hook in hooks.items() if hook is not _called)
        return rest

    def deepcopy(self, memo: dict[int, object]) -> object:
        """For a class that makes deep copies its own way, which may take along what is in the dict."""
        module = self._module()
        assert module is not None, "asked through the module"
        made: object = type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
        if isinstance(made, nn.Module) and made is not module:
            same = {id(lent.value): lent.value for lent in self.attributes.values()}
            own = made.__dict__
            for name, lent in self.attributes.items():
                value = own.get(name, _missing)
                bound = getattr(lent.value, "__func__", _missing)  # of methods there are copies
                if id(value) in same or getattr(value, "__func__", None) is bound:
                    own.pop(name)
                    if lent.before is not _missing:
                        own[name] = copy.deepcopy(lent.before, memo)
            own.pop(REDUCE, None)
            for key in [key for key, hook in own.get(HOOKS, {}).items() if hook is _called]:
                del own[HOOKS][key]
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> _Loan:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    """What is saved in place of a loan, where a class writes down its own dict."""


def _loan_to(module: nn.Module) -> _Loan:
    loan = module.__dict__.get(REDUCE)
    return loan if isinstance(loan, _Loan) and loan._module() is module else _Loan(module)


def lend(module: nn.Module, name: str, value: object) -> Undo:
    """Give a module an attribute for a while; the first value lent under a name stays until the last ends."""
    with turns:
        loan = _loan_to(module)
        loan.give(name, value)
    return _once(functools.partial(loan.take_back, name))


def without_loan(module: nn.Module, name: str) -> Any:
    """An attribute of a module as it would be if it were not lent; None: it has none."""
    loan, value = module.__dict__.get(REDUCE), module.__dict__.get(name, _missing)
    if isinstance(loan, _Loan) and name in loan.attributes:
        value = loan.attributes[name].before
    return None if value is _missing else value


def station(posts: Iterable[tuple[nn.Module, Post]]) -> Undo:
    """Tell each post of every run of its module."""
    stationed: list[tuple[_Loan, Post]] = []

    def undo() -> None:
        for loan, post in reversed(stationed):
            loan.posts = tuple([other for other in loan.posts if other is not post])
            loan.take_back_forward()

    go = _once(undo)
    try:
        with turns:
            for module, post in posts:
                loan = _loan_to(module)
                loan.give_forward()
                loan.posts += (post,)
                stationed.append((loan, post))
    except BaseException:
        go()
        raise
    return go


def override(modules: Iterable[nn.Module], forward: Forward) -> Undo:
    """Let `forward(module, ...)` run in place of each module's own; one with its own forward is left alone.

    Where a placement library has wrapped the forward of a module (device_map), what it wrapped is replaced.
    """
    undos = []
    for module in modules:
        if WRAPPED in module.__dict__:
            undos.append(lend(module, WRAPPED, MethodType(forward, module)))
        elif _is_of_its_class(module):
            undos.append(_replace(module, forward))
    return undo_all(undos)


def uncompile(modules: Iterable[nn.Module]) -> Undo:
    """Let compiled modules run as they were written: a compiled one would run past what is lent inside it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nothing has been compiled in this process
        return undo_all([])
    undos, optimized = [], dynamo.OptimizedModule
    for module in modules:
        if type(module) is optimized:
            undos.append(_replace(module, _original))
        elif module.__dict__.get(COMPILED) is not None:
            undos.append(lend(module, COMPILED, None))
    return undo_all(undos)


def _original(module: Any, *args: object, **kwargs: object) -> object:
    return module._orig_mod(*args, **kwargs)


def _replace(module: nn.Module, forward: Forward) -> Undo:
    with turns:
        loan = _loan_to(module)
        loan.give_forward()
        loan.instead = (*loan.instead, forward)

    def undo() -> None:
        rest = list(loan.instead)
        rest.remove(forward)
        loan.instead = tuple(rest)
        loan.take_back_forward()

    return _once(undo)


def _once(undo: Undo) -> Undo:
    gone = False

    def let_go() -> None:
        nonlocal gone
        with turns:
            if not gone:
                gone = True
                undo()

    return let_go


# The forward that is lent


def unseen(
    function: Callable[Given, Answer], like: Forward | None = None, why: str = WHY
) -> Callable[Given, Answer]:
    """A function into which no compiler looks, nor into what it calls; to be called as another one is."""

    def alone(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        return function(*args, **kwargs)

    return _out_of_sight(alone, function if like is None else like, why)


def _out_of_sight(alone: Callable[Given, Answer], like: Forward, why: str = WHY) -> Callable[Given, Answer]:
    """The same function, hidden from compilers, with another one's name and signature."""
    functools.update_wrapper(alone, like)
    if _FrameAction is None:
        return torch.compiler.disable(alone, reason=why)
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(alone.__code__, skip)  # where it is run by compiled code
    alone._torchdynamo_disable = True  # type: ignore[attr-defined]  # and where it would be made part of it
    alone._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return alone


class _StandIn:
    """Runs a module among its posts, and remembers which forward it stands in for.

    Somebody may keep what was lent beyond its time, inside a forward of their own that lies in the module's
    dict by now: from then on it is the forward it stood in for, and nothing else.
    """

    __slots__ = ("_binds", "_module", "_own", "_seen")

    def __init__(self, own: Forward, binds: bool, module: nn.Module | None = None) -> None:
        self._own, self._binds = own, binds  # _missing: the class's; whether it takes the module first
        self._module = None if module is None else ref(module)  # whose alone it is

    def as_function(self, like: Forward) -> FunctionType:
        def lent(module: nn.Module, /, *args: object, **kwargs: object) -> object:
            taken = getattr(_here, "replica", None)
            if taken is not None:
                _here.replica = None
                replica = taken()
                if replica is not None and replica.__dict__.get(REDUCE) is module.__dict__.get(REDUCE):
                    module = replica
            loan = module.__dict__.get(REDUCE)
            now = loan.attributes.get(FORWARD) if isinstance(loan, _Loan) else None
            own: Forward = type(module).forward if self._own is _missing else self._own
            if now is None or getattr(now.value, "__func__", None) is not self._seen():
                self._check_copy(module)  # kept by somebody beyond its time
                return own(module, *args, **kwargs) if self._binds else own(*args, **kwargs)
            assert isinstance(loan, _Loan), "which lends it"
            instead, posts, entered, came_back = loan.instead, loan.posts, 0, False
            output: object = None
            if instead:
                own = functools.partial(instead[0], module)
            else:
                own = getattr(own, WRITTEN, own)
                own = MethodType(own, module) if self._binds else own
            try:
                for post in posts:
                    post.enter(module, args, kwargs)
                    entered += 1
                output = own(*args, **kwargs)
                came_back = True
                return output
            finally:
                error = None
                for post in reversed(posts[:entered]):
                    try:
                        post.leave(args, kwargs, came_back, output)
                    except BaseException as raised:  # the others are to be told as well
                        error, came_back = raised, False
                if error is not None:
                    try:
                        raise error
                    finally:
                        error = None  # which knows this frame

        function = cast(FunctionType, _out_of_sight(lent, like))
        function.__dict__["_stand_in"], self._seen = self, ref(function)
        return function

    def is_behind(self, function: object) -> bool:
        """Not behind one that was made to look like it: `functools.wraps` copies what a function carries."""
        return self._seen() is function

    def before(self, module: nn.Module) -> Forward:
        """What was in the module's dict."""
        return MethodType(self._own, module) if self._binds and self._own is not _missing else self._own

    def _check_copy(self, module: nn.Module) -> None:
        """A copy of a module has this very function, not a copy of what it stands in for.

        Raises:
            ArgumentError: that would have been copied as well.
        """
        copied = not self._binds and self._module is not None and self._module() is not module
        if copied and not isinstance(self._own, FunctionType):
            raise ArgumentError(
                f"forward must be wrapped outside a block to be copied: this {type(module).__name__} is a "
                f"copy of one whose {type(self._own).__name__} was wrapped while headwise listened; take the "
                "wrapper off, copy, and wrap the copy"
            )


def _lent_forward(kind: type[nn.Module]) -> FunctionType:
    """One function a class, with its signature; the same each time, as compiled code looks at which it is."""
    lent = _forwards.get(kind)
    if lent is None:
        lent = _forwards[kind] = _StandIn(_missing, True).as_function(kind.forward)
    return lent


_forwards: WeakKeyDictionary[type[nn.Module], FunctionType] = WeakKeyDictionary()


def _lent_in_place_of(module: nn.Module, own: Forward) -> FunctionType:
    """The same for one module that has a forward of its own in its dict, which is bound already."""
    unbound = own.__func__ if isinstance(own, MethodType) and own.__self__ is module else own
    function = _StandIn(unbound, unbound is not own, module).as_function(own)
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):
        return function
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    taken = list(signature.parameters.values())
    function.__dict__["__signature__"] = inspect.Signature(
        [itself, *taken], return_annotation=signature.return_annotation
    )
    return function


def _called(module: nn.Module, _: object) -> None:
    """Before every run: a shallow copy of a module, as `nn.DataParallel` makes them, has the other's forward.

    It gets its own for the next time; for this one torch has looked it up already.
    """
    method = module.__dict__.get(FORWARD)
    if not isinstance(method, MethodType) or method.__self__ is module or _stand_in(method) is None:
        return
    if method.__self__.__dict__.get(REDUCE) is module.__dict__.get(REDUCE):
        module.__dict__[FORWARD] = MethodType(method.__func__, module)
        _here.replica = ref(module)


def _stand_in(forward: object) -> _StandIn | None:
    """What is behind a forward that is lent, or was."""
    if not isinstance(forward, MethodType):
        return None
    stand_in = getattr(forward.__func__, "_stand_in", None)
    return stand_in if isinstance(stand_in, _StandIn) and stand_in.is_behind(forward.__func__) else None


def _before(module: nn.Module) -> Forward:
    """The forward in a module's dict, or what was there before one was lent that has stayed there."""
    own: Forward = module.__dict__.get(FORWARD, _missing)
    while (stand_in := _stand_in(own)) is not None and getattr(own, "__self__", None) is module:
        own = stand_in.before(module)
    return own


def _written(forward: Forward) -> Forward:
    """The function behind a compiled one."""
    return getattr(forward, WRITTEN, forward)


def _is_of_its_class(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class."""
    loan = module.__dict__.get(REDUCE)
    lent = loan.attributes.get(FORWARD) if isinstance(loan, _Loan) else None
    own = _before(module) if lent is None else cast(Forward, lent.before)
    return own is _missing or getattr(_written(own), "__func__", None) is type(module).forward
