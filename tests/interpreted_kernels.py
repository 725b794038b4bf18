"""Triton's interpreter as the tests use it: kernels on a CPU, tiles of 16 x 16, room for results full of NaN.

Fixtures: a test module makes them its own by their names. Without triton, or with a GPU, it is skipped.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.engines import gpu
from headwise.engines.gpu import launches

pytest.importorskip("triton", reason="by design: triton is made for Linux alone")
if torch.cuda.is_available():
    pytest.skip("by design: with a GPU, the tests named for cuda", allow_module_level=True)

import numpy as np
from triton.runtime import interpreter

import fast_interpreter
from headwise.engines.gpu import request as request_room
from headwise.engines.plans import PLANS


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go to the kernels; nothing was planned before."""
    PLANS.clear()
    monkeypatch.setattr(launches, "INTERPRET", True)


@pytest.fixture
def unhurried() -> None:
    """A test that asks for this makes the interpreter faster itself."""


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, four times faster, silent as a GPU, and right about bfloat16.

    It prepares its language anew at each call of a helper, where once a launch will do; it looks for overflow
    in every sum of whole numbers; it warns of log(0), wherever that is thrown away; it cuts numbers off where
    bfloat16 rounds, and multiplies its bits as if they were numbers.
    """
    if "unhurried" not in request.fixturenames:
        fast_interpreter.quicken(monkeypatch)
    done: set[str] = set()
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def prepare_once(fn: Callable[..., Any]) -> Any:
        if fn.__module__ in done:
            return interpreter._LangPatchScope()
        done.add(fn.__module__)
        return prepare(fn)

    def launch_afresh(self: Any, *args: Any, **named: Any) -> Any:
        done.clear()
        with np.errstate(all="ignore"):
            return launch(self, *args, **named)

    def as_floats(x: Any) -> Any:
        if x.dtype.scalar.name != "bf16":
            return x
        floats = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(floats, interpreter.tl.float32)

    def cast_rounded(self: Any, x: Any, dtype: Any) -> Any:
        x = as_floats(x)
        if dtype.scalar.name != "bf16":
            return cast(self, x, dtype)
        rounded = torch.from_numpy(x.data.astype(np.float32)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), dtype.scalar)

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, as_floats(a), as_floats(b), *rest)

    unsuspecting = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", unsuspecting)
    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)
    monkeypatch.setattr(builder, "cast_impl", cast_rounded)
    monkeypatch.setattr(builder, "create_dot", dot_of_floats)


class Poisonous:
    """torch, but for room for results: that is full of NaN, or of -7."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **named: Any) -> Tensor:
        return self._poisoned(torch.empty(*args, **named))

    def empty_like(self, *args: Any, **named: Any) -> Tensor:
        return self._poisoned(torch.empty_like(*args, **named))

    def _poisoned(self, room: Tensor) -> Tensor:
        return room.fill_(math.nan if room.is_floating_point() else -7 if room.dtype.is_signed else 249)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is seen."""
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        if hasattr(importlib.import_module(module.name), "torch"):
            monkeypatch.setattr(f"{module.name}.torch", Poisonous())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, by name; nothing was planned before."""
    names: list[str] = []
    launch, again = request_room.Launch.__call__, request_room.Launch.again

    def noted(self: request_room.Launch, *args: Any) -> None:
        names.append(self.kernel.__name__)
        launch(self, *args)

    def noted_again(self: request_room.Launch, q: Tensor, k: Tensor) -> Callable[..., None] | None:
        run = again(self, q, k)

        def noted_run(*args: Any) -> None:
            names.append(self.kernel.__name__)
            assert run is not None
            run(*args)

        return None if run is None else noted_run

    monkeypatch.setattr(request_room.Launch, "__call__", noted)
    monkeypatch.setattr(request_room.Launch, "again", noted_again)
    PLANS.clear()
    return names
