"""What the learner's code runs in, whatever it is called from: float64 where it names no dtype, on the CPU,
gradients on, no autocast, dice that are put back.

The process may be at other work in other threads, so what is set here is set for this thread alone. torch's
default dtype, `sys.stdout` and the filters of warnings are the process's, and stay as they are.

The learner's exceptions become problems, at the learner's own line.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available
from torch.overrides import TorchFunctionMode

from ..evidence import Problem
from .words import FRAMEWORKS

# Made of nothing, as floats; and of numbers, as floats if those are
FLOATS = frozenset(
    (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace, torch.logspace)
)
OF_NUMBERS = frozenset(
    (
        torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.full, torch.arange,
        torch.range, torch.normal, torch.empty_strided,
    )
)  # fmt: skip
ASKED = frozenset("to type type_as float half bfloat16 double view new_tensor new_full".split())

AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu")  # kinds that may have one


_now = threading.local()


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Float64 and the CPU by default, gradients on; generators of random numbers are as they were afterwards.

    What the code makes along the way is then as exact as what it is given.
    """
    with _dice_kept(), undisturbed(), by_default(torch.float64), _Default():
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The caller's own `torch.autocast`, `torch.device`, `inference_mode` and `no_grad` have no say in it."""
    with torch.inference_mode(False), torch.enable_grad(), _no_autocast(), torch.device("cpu"), _one_thread():
        yield


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """At the sizes of probes threads bring nothing, and where other work keeps cores busy they cost 3.5x."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Off for every kind of device where it is on, and no copies kept of weights that are about to change."""
    on = [kind for kind in AUTOCAST if is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    cached = torch.is_autocast_cache_enabled()
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype, inside `surroundings`."""
    before = getattr(_now, "dtype", None)
    _now.dtype = dtype
    try:
        yield
    finally:
        _now.dtype = before


class _Default(TorchFunctionMode):
    """torch's default dtype, for one thread.

    It has a say where tensors are made of nothing or of Python's numbers, and where whole numbers meet
    fractions. `torch.Tensor(...)` and `torch.get_default_dtype()` pass it by.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, wanted = dict(kwargs or {}), _now.dtype
        if kwargs.get("dtype") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if func in FLOATS:
            return func(*args, **kwargs | {"dtype": wanted})
        made = func(*args, **kwargs)
        if type(made) is not Tensor or made.dtype is wanted or made.dtype is not torch.get_default_dtype():
            return made
        if func in OF_NUMBERS:
            has_own = any(hasattr(one, "dtype") for one in (*args, *kwargs.values()))
            return made if has_own else func(*args, **kwargs | {"dtype": wanted})
        given = [one for one in _flat((args, kwargs)) if isinstance(one, Tensor)]
        if any(one.is_floating_point() or one.is_complex() for one in given) or _asks(func, args):
            return made
        return _again(func, args, kwargs, made, wanted)


def _asks(func: object, args: tuple[object, ...]) -> bool:
    """Whether a call says which dtype it wants."""
    return getattr(func, "__name__", "") in ASKED or any(isinstance(one, torch.dtype) for one in args)


def _again(func: Any, args: Any, kwargs: Any, made: Tensor, wanted: torch.dtype) -> Tensor:
    """The same of whole numbers, with fractions of the wanted dtype."""
    if func in (torch.where, Tensor.where):

        def cast(one: object) -> object:
            return torch.tensor(one, dtype=wanted) if isinstance(one, float) else one
    else:

        def cast(one: object) -> object:
            if isinstance(one, (list, tuple)):
                return type(one)(cast(each) for each in one) if type(one) in (list, tuple) else one
            return one.to(wanted) if isinstance(one, Tensor) else one

    try:
        found = func(*(cast(one) for one in args), **{name: cast(one) for name, one in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError):  # one that wants whole numbers as they are
        return made.to(wanted)
    return found if isinstance(found, Tensor) and found.shape == made.shape else made.to(wanted)


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


# Random numbers


def _generators() -> list[torch.Generator]:
    """torch's own, of the CPU and of each GPU that is in use: one that is not must not come into it."""
    found = [torch.default_generator]
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            found += device.default_generators
    return found


def seed(number: int) -> None:
    """Inside `surroundings`: what the code draws is the same each time, from torch, Python and NumPy."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)
    for one in _generators():  # torch.manual_seed would also seed GPUs that are yet to come into use
        one.manual_seed(number)


@contextlib.contextmanager
def _dice_kept() -> Iterator[None]:
    """The generators that code may draw from: torch's, Python's, NumPy's where it is loaded."""
    states = [(one, one.get_state()) for one in _generators()]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    legacy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        for one, state in states:
            one.set_state(state)
        random.setstate(python)
        if numpy is not None and legacy is not None:
            numpy.random.set_state(legacy)


# A process that is the examination's own


class _Sink(io.TextIOBase):
    """Takes what is printed and keeps none of it."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """No prints and no warnings: of the whole process, so only in one that is ours alone."""
    sink = _Sink()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield


CAUGHT = (Exception, SystemExit)
MOST_SHAPES = 30  # variables of a frame whose shapes are told


class Unreadable(Exception):
    """What came back is not an attention's answer: no tensor, or none of the right shape."""

    def __init__(self, message: str, no_output: bool = False) -> None:
        super().__init__(message)
        self.no_output = no_output


def files_of(obj: object) -> frozenset[str]:
    """The file names that tracebacks call the learner's code by."""
    owner = obj if isinstance(obj, type) or not hasattr(obj, "__class__") else type(obj)
    code = getattr(obj, "__code__", None)
    if isinstance(code, types.CodeType):
        return frozenset({code.co_filename})
    found = set()
    for one in getattr(owner, "__mro__", ()):
        if one.__module__.startswith((*FRAMEWORKS, "builtins")) and one is not owner:
            continue
        for member in vars(one).values():
            function = getattr(member, "__func__", member)
            if isinstance(getattr(function, "__code__", None), types.CodeType):
                found.add(function.__code__.co_filename)
    return frozenset(found)


def problem_of(error: BaseException, stage: str, files: frozenset[str], probe: str | None = None) -> Problem:
    """The exception, with the last line of the learner's on its way."""
    line, shapes = None, dict[str, list[int]]()
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in files:
            line, variables = number, frame.f_locals.items()
            tensors = [(name, x) for name, x in variables if isinstance(x, Tensor) and name.isidentifier()]
            shapes = {name: list(x.shape) for name, x in tensors[:MOST_SHAPES]}
    message = str(error) or type(error).__name__
    kind = "shape" if isinstance(error, Unreadable) else type(error).__name__
    apart = isinstance(error, Unreadable) and error.no_output
    return Problem(stage, kind, message, line, probe, shapes=shapes, no_output=apart)
