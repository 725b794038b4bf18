"""Kernels launched past Triton's own way: the launcher is handed the same, or Triton's way is taken.

What stands for Triton 3.6 here is written by hand after its driver: a launcher in C that takes what it is
given, a function around it that makes descriptors, a compiled kernel that asks hooks and stream in each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="by design: triton is made for Linux alone")

import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from headwise.engines.gpu import launches, straight_launch
from headwise.engines.gpu.straight_launch import straight

GRID, DEVICE = (7, 3, 2), 1
HOST_TYPES = {8: 10, 9: 8, 10: 9}


class Definition(ctypes.Structure):
    """Of a function in C."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


REFERENCES: list[object] = []  # what functions in C are made of


def in_c(launched: list[Any], name: bytes = b"launch") -> Any:
    """A function in C that notes what it was given."""

    def noted(_: object, args: tuple[Any, ...]) -> None:
        launched.append(args)

    called = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object)(noted)
    definition = Definition(name, ctypes.cast(called, ctypes.c_void_p), 1, None)
    REFERENCES.extend((called, definition))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return make(ctypes.addressof(definition), launched, None)


def make_tensordesc_arg(arg: Any, metadata: dict[str, Any]) -> list[Any]:
    made = driver.active.utils.fill_tma_descriptor(
        arg.base.data_ptr(),
        metadata["swizzle"],
        metadata["elem_size"],
        HOST_TYPES.get(metadata["elem_type"], metadata["elem_type"]),
        metadata["block_size"],
        arg.shape,
        arg.strides,
        1 if arg.padding == "nan" else 0,
    )
    return [made, *arg.shape, *arg.strides]


def wrap_handle_tensordesc(launcher: Any, signature: dict[str, Any], tensordesc_meta: Any) -> Any:
    tensordesc_indices = {
        i for i, kind in enumerate(signature.values()) if str(kind).startswith("tensordesc")
    }
    if not tensordesc_indices:
        return launcher

    def inner(*args: Any) -> Any:
        final_args = list(args[:13])
        number = 0
        for i, arg in enumerate(args[13:]):
            if i in tensordesc_indices:
                final_args.extend(make_tensordesc_arg(arg, tensordesc_meta[number]))
                number += 1
            else:
                final_args.append(arg)
        return launcher(*final_args)

    inner.__module__ = nvidia.__name__
    return inner


class CudaLauncher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, launch: Any) -> None:
        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launch(
            x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *args
        )


class CompiledKernel:
    function, packed_metadata = 4711, (4, 1, 8192)

    def __init__(self, run: Any, signature: dict[str, Any]) -> None:
        self.run, self.src = run, SimpleNamespace(signature=signature)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def runner(*args: Any) -> None:
            enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            stream = driver.active.get_current_stream(DEVICE)
            self.run(*grid, stream, self.function, self.packed_metadata, {}, enter, leave, *args)

        return runner


class Some(NamedTuple):
    scale: float
    bias: Tensor | None
    inner: tuple[Tensor, int]


SIGNATURE: dict[str, Any] = {
    "Q": "tensordesc<bf16[1, 1, 16, 8]>",
    "Q1": "constexpr",
    "steps": ("i32", "constexpr", "i64"),
    "K": "tensordesc<fp32[1, 16]>",
    "OUT": "*bf16",
    "ROWS": "constexpr",
    "tables": ("constexpr", "*i64"),
    "rules": Some("fp32", "*fp32", ("*i8", "i32")),  # type: ignore[arg-type]
    "numbers": ("i32", "i32"),
    "T": "i32",
    "setup": "constexpr",
}
META = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 16, 8], "fp4_padded": False},
    {"swizzle": 1, "elem_size": 4, "elem_type": 7, "block_size": [1, 16], "fp4_padded": False},
]
CONSTANTS = (("setup", 3),)


def arguments(seed: int) -> tuple[Any, ...]:
    q = torch.full((1, 2, 16, 8), seed, dtype=torch.bfloat16)
    k = torch.full((5, 16), float(seed))
    bias, labels, inside = torch.ones(3), torch.arange(seed), torch.ones(5, dtype=torch.int8)
    return (
        TensorDescriptor(q, [*q.shape], [*q.stride()], [1, 1, 16, 8]), None, (256, 1, seed),
        TensorDescriptor(k, [*k.shape], [*k.stride()], [1, 16], "nan"), q, None, (None, labels),
        Some(0.5, bias, (inside, seed)), (3, 4), seed,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton 3.6, as far as a launch can tell."""
    active_device = SimpleNamespace(stream=11)
    active_device.get_current_stream = lambda device: 100 * device + active_device.stream
    active_device.utils = SimpleNamespace(
        fill_tma_descriptor=lambda *arguments: ("map", *map(repr, arguments))
    )
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(driver, "_active", active_device)
    monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOO", raising=False)
    monkeypatch.setattr(
        nvidia, "TMA_DTYPE_DEVICE_TO_HOST", {i: HOST_TYPES.get(i, i) for i in range(16)}, raising=False
    )
    monkeypatch.setattr(nvidia, "CudaLauncher", CudaLauncher)
    monkeypatch.setattr(straight_launch, "CompiledKernel", CompiledKernel)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, name, knobs.HookChain())
    return active_device


@pytest.fixture
def launched() -> list[Any]:
    return []


def compiled(launched: list[Any], signature: dict[str, Any] = SIGNATURE, meta: Any = META) -> CompiledKernel:
    return CompiledKernel(
        CudaLauncher(wrap_handle_tensordesc(in_c(launched), signature, meta)), dict(signature)
    )


def as_read(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a launcher in C makes of its arguments: addresses of tensors, and nothing of empty hooks."""
    *first, message, enter, leave = args[:13]
    assert message in (None, {}) and not getattr(enter, "calls", None) and not getattr(leave, "calls", None)

    def read(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(read, x))
        return x.data_ptr() if isinstance(x, Tensor) else x

    return (*first, *map(read, args[13:]))


def test_the_launcher_is_handed_what_tritons_own_way_hands_to_it(
    launched: list[Any], active: SimpleNamespace
) -> None:
    kernel = compiled(launched)
    assert type(kernel.run.launch) is not BuiltinFunctionType
    go = straight(kernel, GRID, CONSTANTS, DEVICE)
    assert go is not None
    for seed, stream in ((3, 11), (16, 13)):
        args, active.stream = arguments(seed), stream
        kernel[GRID](*args, *CONSTANTS)
        go(*args)
        theirs, mine = launched[-2:]
        assert len(mine) == len(theirs) == 13 + len(SIGNATURE) + 8 + 4
        assert as_read(mine) == as_read(theirs)
        assert mine[:5] == (*GRID, 100 * DEVICE + stream, 4711)
        assert not any(isinstance(x, Tensor) for x in mine)


def test_a_kernel_without_descriptors_is_launched_alike(launched: list[Any]) -> None:
    plain = {"X": "*fp32", "pair": ("i32", "*i64"), "T": "i32"}
    kernel, (x, ids) = compiled(launched, plain, None), (torch.ones(3), torch.arange(2))
    go = straight(kernel, GRID, (), DEVICE)
    assert go is not None
    kernel[GRID](x, (5, ids), 3)
    go(x, (5, ids), 3)
    assert as_read(launched[1]) == as_read(launched[0])
    assert launched[1][13:] == (x.data_ptr(), (5, ids.data_ptr()), 3)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_while_a_hook_is_set_tritons_own_way_is_taken(name: str, launched: list[Any]) -> None:
    go, args = straight(compiled(launched), GRID, CONSTANTS, DEVICE), arguments(3)
    assert go is not None
    hooks, message = getattr(knobs.runtime, name), print
    hooks.add(message)
    go(*args)
    assert launched[-1][11 if name == "launch_enter_hook" else 12] is hooks
    assert any(x is args[4] for x in launched[-1])
    hooks.remove(message)
    go(*args)
    assert launched[-1][10:13] == (None, None, None)
    setattr(knobs.runtime, name, message)
    go(*args)
    assert message in launched[-1][11:13]
    setattr(knobs.runtime, name, None)
    go(*args)
    assert launched[-1][10:13] == (None, None, None) and len(launched) == 4


class Other(CudaLauncher):
    """A launcher of another class."""


def described(launched: list[Any], meta: Any, name: bytes = b"launch") -> Any:
    """A launcher that makes descriptors by what it knows of them."""
    return wrap_handle_tensordesc(in_c(launched, name), SIGNATURE, meta)


Changed = Callable[[CompiledKernel, list[Any], pytest.MonkeyPatch], object]
UNKNOWN: dict[str, Changed] = {
    "version": lambda kernel, _, patch: patch.setattr(triton, "__version__", "3.7.1"),
    "arguments": lambda kernel, _, patch: patch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOO"),
    "no arguments": lambda kernel, _, patch: patch.delattr(nvidia, "_BASE_ARGS_FORMAT"),
    "launcher": lambda kernel, _, patch: setattr(kernel, "run", Other(kernel.run.launch)),
    "scratch": lambda kernel, _, patch: setattr(kernel.run, "global_scratch_size", 64),
    "profile": lambda kernel, _, patch: setattr(kernel.run, "profile_scratch_size", 64),
    "no scratch": lambda kernel, _, patch: patch.delattr(CudaLauncher, "global_scratch_size"),
    "elsewhere": lambda kernel, _, patch: setattr(kernel.run.launch, "__module__", "elsewhere"),
    "signature": lambda kernel, _, patch: kernel.src.signature.pop("Q"),
}
LAUNCHERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "wrapped": lambda launch, _: lambda *args: launch(*args),
    "in C": lambda _, launched: described(launched, META, b"start"),
    "no descriptors": lambda _, launched: in_c(launched),
    "nothing known": lambda _, launched: described(launched, [None, None]),
    "more known": lambda _, launched: described(launched, [{**META[0], "more": 1}, META[1]]),
    "four bits": lambda _, launched: described(launched, [{**META[0], "fp4_padded": True}, META[1]]),
}


@pytest.mark.parametrize("name", [*UNKNOWN, *LAUNCHERS])
def test_a_launcher_that_is_not_known_is_left_alone(
    name: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = compiled(launched)
    assert straight(kernel, GRID, CONSTANTS, DEVICE) is not None
    if name in UNKNOWN:
        UNKNOWN[name](kernel, launched, monkeypatch)
    else:
        kernel.run.launch = LAUNCHERS[name](kernel.run.launch, launched)
    assert straight(kernel, GRID, CONSTANTS, DEVICE) is None


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_a_launch_that_is_ready_goes_either_way(
    version: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    bound: list[torch.device] = []
    monkeypatch.setattr(launches, "bind_thread", bound.append)
    kernel, args = compiled(launched), arguments(3)
    function = SimpleNamespace(__name__="some_kernel")
    key = ("some_kernel", DEVICE, 4, 0, CONSTANTS, "kinds")
    monkeypatch.setitem(launches.COMPILED, key, kernel)
    go = launches.ready(function, GRID, CONSTANTS, "kinds", torch.device("cuda", DEVICE))
    assert go is not None
    go(*args)
    assert bound == [torch.device("cuda", DEVICE)]
    kernel[GRID](*args, *CONSTANTS)
    assert as_read(launched[0]) == as_read(launched[1])
    assert (launched[0][10] is None) == (version == "3.6.0")
    assert launches.ready(function, GRID, (), "kinds", torch.device("cuda", DEVICE)) is None


def test_torch_launches_something_in_a_thread_before_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: requests.append((sizes, device)))
    device = torch.device("cuda", DEVICE)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):
                pool.submit(launches.bind_thread, device).result()
    assert requests == [((1,), device)] * 2
