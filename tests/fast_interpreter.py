"""Triton's interpreter at a fraction of its time: what it makes anew at every operation is made once.

Its numbers and its rules of types stay as they are. Without this, nine tenths of a kernel's time go into the
descriptions of its values: the type of a block, its shape as a tuple of constants, its name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

SCALARS = (bool, int, float)
PLAIN = {"int1", "int32", "int64", "fp16", "fp32", "fp64"}  # numpy's own kinds: bfloat16 is kept as its bits
ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the faster ways in the place of the interpreter's own, for one test."""
    semantic = interpreter.TritonSemantic
    check, promote = semantic.binary_op_type_checking_impl, semantic.computation_type_impl
    broadcast, numpy_dtype = semantic.broadcast_impl_value, interpreter._get_np_dtype
    blocks: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}
    shapes: dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]] = {}
    promoted: dict[tuple[str, bool, str, bool, bool], tl.dtype] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    none = tl.tuple([]), tl.constexpr(1)

    def block_of(element: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
        expected = blocks.get((element.name, shape))
        if expected is None:
            expected = blocks[element.name, shape] = tl.block_type(element, list(shape))
        return expected

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = none
            return
        shape = tuple(type.shape.values)
        if shape not in shapes:
            shapes[shape] = tl.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))
        self.shape, self.numel = shapes[shape]

    def unwrap(x: Any) -> Any:
        if isinstance(x, tl.constexpr):
            return x.value
        if isinstance(x, (tl.tensor, *SCALARS)):
            return x
        return slow_unwrap(x)

    slow_unwrap = core._unwrap_if_constexpr

    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        left: bool = False,
        right: bool = False,
        typed: bool = True,
        division: bool = False,
    ) -> Any:
        if not division and isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            a, b = lhs.dtype, rhs.dtype
            if a.name == b.name and not a.is_ptr():
                return broadcast_values(self, lhs, rhs)
        return check(self, lhs, rhs, left, right, typed, division)

    def promotion(
        self: Any, a: tl.dtype, a_scalar: bool, b: tl.dtype, b_scalar: bool, division: bool
    ) -> tl.dtype:
        kind = a.name, a_scalar, b.name, b_scalar, division
        if kind not in promoted:
            promoted[kind] = promote(self, a, a_scalar, b, b_scalar, division)
        return promoted[kind]

    def broadcast_values(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        a, b = lhs.type, rhs.type
        if not (a.is_block() and b.is_block()):
            return (lhs, rhs) if not (a.is_block() or b.is_block()) else broadcast(self, lhs, rhs)
        mine, theirs = a.shape.values, b.shape.values
        return (lhs, rhs) if mine == theirs else broadcast(self, lhs, rhs)

    def dtype_of(x: tl.dtype) -> np.dtype[Any]:
        name = x.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(x.scalar)
        return dtypes[name]

    def number(x: Any, kind: str) -> Any:
        """A number beside a tensor of this kind, in its dtype; None: let the interpreter decide."""
        if kind == "fp32" and isinstance(x, (int, float)):
            return np.float32(x)
        return np.int32(x) if kind == "int32" and type(x) is int and -(2**31) <= x < 2**31 else None

    def elementwise(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        """An operator on two tensors of one dtype, or on one and a number, as numpy has it."""
        is_turned = name[2:-2].startswith("r")
        word = name[3:-2] if is_turned else name[2:-2]
        compares = word in COMPARISONS
        ufunc = COMPARISONS[word] if compares else ARITHMETIC[word]

        def call(self: tl.tensor, other: Any) -> Any:
            kind, x = self.dtype.name, self.handle.data
            if kind not in PLAIN or (kind == "int1" and word not in ("and", "or")):
                return slow(self, other)
            is_block = self.type.is_block()
            if isinstance(other, tl.tensor):
                y, other_block = other.handle.data, other.type.is_block()
                if other.dtype.name != kind or (is_block and other_block and x.ndim != y.ndim):
                    return slow(self, other)
                is_block = is_block or other_block
            else:
                y = number(unwrap(other), kind)
                if y is None:
                    return slow(self, other)
            data = ufunc(y, x) if is_turned else ufunc(x, y)
            dtype = tl.int1 if compares else self.dtype
            return tl.tensor(
                interpreter.TensorHandle(data, dtype), block_of(dtype, data.shape) if is_block else dtype
            )

        return call

    @functools.cache
    def members(package: Any) -> list[tuple[str, Callable[..., Any]]]:
        actual = inspect.getmembers(package, core.is_builtin)
        ways = {name: bound(getattr(member, "__wrapped__", member)) for name, member in actual}
        if package is tl.tensor:
            for word in (*ARITHMETIC, *COMPARISONS):
                for name in (f"__{word}__", f"__r{word}__"):
                    if name in ways:
                        ways[name] = elementwise(name, ways[name])
        return list(ways.items())

    def bound(member: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **named)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in members(package):
            scope.set_attr(package, name, member)

    monkeypatch.setattr(tl.tensor, "__init__", init_tensor)
    monkeypatch.setattr(
        tl.block_type, "with_element_ty", lambda self, x: block_of(x, tuple(self.shape.values))
    )
    monkeypatch.setattr(tl.block_type, "to_ir", lambda self, builder: self)
    monkeypatch.setattr(core, "_unwrap_if_constexpr", unwrap)
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", checked)
    monkeypatch.setattr(semantic, "computation_type_impl", promotion)
    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast_values)
    monkeypatch.setattr(interpreter, "_get_np_dtype", dtype_of)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
