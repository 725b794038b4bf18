"""The environment in which a submission's code runs, whatever the caller has set.

New floats are float64 unless the code names a dtype, new tensors are on the CPU, gradients are on, autocast
is off, and random generators have their state restored afterwards. All of this is set for the current thread
alone, since others may be at work. torch's default dtype, `sys.stdout` and the warning filters belong to the
whole process and are not changed.

Exceptions of the submission become a `Problem` with the last line of the submission that they passed.
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
from .vocabulary import FRAMEWORKS

# Functions that make floats of the default dtype out of nothing
FLOAT_FACTORIES = frozenset(
    (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace, torch.logspace)
)
# Functions that make them out of Python numbers, if those are floats
NUMBER_FACTORIES = frozenset(
    (
        torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.full, torch.arange,
        torch.range, torch.normal, torch.empty_strided,
    )
)  # fmt: skip
# Functions whose name or first argument decides the dtype of the result
DTYPE_FUNCTIONS = frozenset("to type type_as float half bfloat16 double view new_tensor new_full".split())

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu")

_thread = threading.local()


@contextlib.contextmanager
def float64_environment() -> Iterator[None]:
    """Make float64 and the CPU the default, turn gradients on, and restore random generators afterwards.

    Tensors that the code makes on its way are then as exact as its inputs.
    """
    with _restored_generators(), neutral_torch_state(), by_default(torch.float64), _DefaultDtype():
        yield


@contextlib.contextmanager
def neutral_torch_state() -> Iterator[None]:
    """Suspend the caller's `torch.autocast`, `torch.device`, `inference_mode` and `no_grad`."""
    with torch.inference_mode(False), torch.enable_grad(), _no_autocast(), _on_cpu(), _one_thread():
        yield


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    """Return a context in which tensors are made on the CPU.

    `torch.device` as a context intercepts every call of torch: it is left out where the CPU is the default.
    """
    is_default = torch.empty(()).device.type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one CPU thread: small tensors gain nothing from more, and on busy cores they cost 3.5x."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Turn autocast off on every device, and its cache, since weights are about to change."""
    enabled = [
        device
        for device in AUTOCAST_DEVICES
        if is_autocast_available(device) and torch.is_autocast_enabled(device)
    ]
    caches = torch.is_autocast_cache_enabled()
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)
        torch.set_autocast_cache_enabled(caches)


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default dtype of this thread, inside `float64_environment`."""
    before = getattr(_thread, "dtype", None)
    _thread.dtype = dtype
    try:
        yield
    finally:
        _thread.dtype = before


class _DefaultDtype(TorchFunctionMode):
    """torch's default dtype, for one thread.

    It applies where tensors are made of nothing or of Python numbers, and where integers meet fractions.
    `torch.Tensor(...)` and `torch.get_default_dtype()` are not affected.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Thousands of calls in one check come through here: what most of them need comes first
        kwargs, wanted = kwargs or {}, _thread.dtype
        if func in FLOAT_FACTORIES and kwargs.get("dtype") is None and kwargs.get("out") is None:
            return func(*args, **kwargs | {"dtype": wanted})
        result = func(*args, **kwargs)
        if type(result) is not Tensor or (dtype := result.dtype) is wanted:
            return result
        if dtype is not torch.get_default_dtype():
            return result
        if kwargs.get("dtype") is not None or kwargs.get("out") is not None:
            return result
        if func in NUMBER_FACTORIES:
            has_own = any(hasattr(value, "dtype") for value in (*args, *kwargs.values()))
            return result if has_own else func(*args, **kwargs | {"dtype": wanted})
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_floating_point() or x.is_complex() for x in tensors) or _names_dtype(func, args):
            return result
        return _in_dtype(func, args, kwargs, result, wanted)


def _names_dtype(func: object, args: tuple[object, ...]) -> bool:
    """Return True if a call says which dtype its result has."""
    return getattr(func, "__name__", "") in DTYPE_FUNCTIONS or any(isinstance(x, torch.dtype) for x in args)


def _in_dtype(func: Any, args: Any, kwargs: Any, result: Tensor, wanted: torch.dtype) -> Tensor:
    """Return the result of a call on integers, computed again with fractions of the wanted dtype."""
    if func in (torch.where, Tensor.where):

        def cast(value: object) -> object:
            return torch.tensor(value, dtype=wanted) if isinstance(value, float) else value
    else:

        def cast(value: object) -> object:
            if isinstance(value, (list, tuple)):
                return type(value)(map(cast, value)) if type(value) in (list, tuple) else value
            return value.to(wanted) if isinstance(value, Tensor) else value

    try:
        exact = func(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError):  # the function needs integers
        return result.to(wanted)
    return exact if isinstance(exact, Tensor) and exact.shape == result.shape else result.to(wanted)


def _leaves(value: object) -> Iterator[object]:
    """Yield what lists, tuples and dicts hold, at any depth."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


# Random numbers


def _generators() -> list[torch.Generator]:
    """Return torch's generators of the CPU and of each GPU in use, without initialising any other."""
    generators = [torch.default_generator]
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            generators += device.default_generators
    return generators


def seed(number: int) -> None:
    """Seed the generators of torch, Python and NumPy, inside `float64_environment`."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)
    for generator in _generators():  # torch.manual_seed would also seed GPUs that are not in use yet
        generator.manual_seed(number)


@contextlib.contextmanager
def _restored_generators() -> Iterator[None]:
    """Restore the state of the generators of torch, Python and, where it is loaded, NumPy."""
    states = [(generator, generator.get_state()) for generator in _generators()]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    legacy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None and legacy is not None:
            numpy.random.set_state(legacy)


class _Sink(io.TextIOBase):
    """A stream that discards what is written to it."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Discard prints and warnings of the whole process, so only for a process that runs nothing else."""
    sink = _Sink()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield


# Exceptions

CAUGHT = (Exception, SystemExit)
MAX_SHAPES = 30  # variables of a frame whose shapes are reported


class Unreadable(Exception):
    """What the code returned is not an attention's output: no tensor, or none of the right shape."""

    def __init__(self, message: str, no_output: bool = False) -> None:
        super().__init__(message)
        self.no_output = no_output


def files_of(obj: object) -> frozenset[str]:
    """Return the file names by which tracebacks name the code of this object."""
    owner = obj if isinstance(obj, type) or not hasattr(obj, "__class__") else type(obj)
    code = getattr(obj, "__code__", None)
    if isinstance(code, types.CodeType):
        return frozenset({code.co_filename})
    files = set()
    for cls in getattr(owner, "__mro__", ()):
        if cls.__module__.startswith((*FRAMEWORKS, "builtins")) and cls is not owner:
            continue
        for member in vars(cls).values():
            function = getattr(member, "__func__", member)
            if isinstance(getattr(function, "__code__", None), types.CodeType):
                files.add(function.__code__.co_filename)
    return frozenset(files)


def problem_of(error: BaseException, stage: str, files: frozenset[str], probe: str | None = None) -> Problem:
    """Return the problem that an exception is, with the last line that it passed in these files."""
    line, shapes = None, dict[str, list[int]]()
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in files:
            line, variables = number, frame.f_locals.items()
            tensors = [(name, x) for name, x in variables if isinstance(x, Tensor) and name.isidentifier()]
            shapes = {name: list(x.shape) for name, x in tensors[:MAX_SHAPES]}
    message = str(error) or type(error).__name__
    kind = "shape" if isinstance(error, Unreadable) else type(error).__name__
    no_output = isinstance(error, Unreadable) and error.no_output
    return Problem(stage, kind, message, line, probe, shapes=shapes, no_output=no_output)
