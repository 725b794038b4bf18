"""Direct calls of a compiled kernel's launcher, without Triton 3.6's Python code around it.

On the host of an H200 a launch of the first pass took 31 microseconds. Three descriptors were 6 of them and
the launcher, which is C, 12: it asks each tensor for its address and the driver whether that is a GPU's. With
addresses in place of tensors it takes 8.4. The rest is Python: arguments for hooks that are not set, and a
second search for descriptors among the arguments. Here everything that is the same in every launch is
computed once, and the rest is done by the same functions that Triton calls.

Triton promises none of this, so a launcher is taken apart only if all of it is as in 3.6: its classes, the
arguments it begins with, the variables its functions close over. Any other launcher, one that needs memory of
its own, and every launch while a hook is set are run by Triton.

The caller must hold the tensors until the launch is made, and make sure that they are on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

VERSION = ["3", "6"]
# Grid, stream and function; whether the grid is cooperative, whether launches overlap; memory of its own, of
# the kernel and of a profiler; warps, clusters and shared memory; the arguments of hooks; the two hooks.
FIRST = "iiiKKppOOOOOO"
MAKES_DESCRIPTORS = "wrap_handle_tensordesc.<locals>.inner"
CLOSED_OVER = ("launcher", "tensordesc_indices", "tensordesc_meta")
OF_DESCRIPTORS = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"}

Kinds = Sequence[Any]  # of arguments, as Triton writes them: "*bf16", "i32", "constexpr", tuples of them
Change = Callable[[Any], Any]
address = Tensor.data_ptr


class Parts(NamedTuple):
    """The parts of a launcher."""

    launch: Callable[..., None]  # in C
    kinds: Kinds
    descriptors: list[tuple[int, dict[str, Any]]]  # their indices among the arguments, and the fields of each


def straight(
    compiled: Any, grid: tuple[int, int, int], constants: tuple[Hashable, ...], device: int
) -> Callable[..., None] | None:
    """Return compiled[grid](*args, *constants) as a function of args; None: the launcher is not supported."""
    parts = _parts(compiled)
    if parts is None:
        return None
    x, y, z = grid
    run, ordinary = compiled.run, compiled[grid]
    launch, function, packed = parts.launch, compiled.function, compiled.packed_metadata
    together, overlapping = run.launch_cooperative_grid, run.launch_pdl
    stream_of = driver.active.get_current_stream
    pointers, tuples = _with_addresses(parts.kinds)
    # from the last on, since each is replaced by several arguments
    described = [(at, at + 1, _descriptor_by(fields)) for at, fields in reversed(parts.descriptors)]

    def go(*args: object) -> None:
        runtime = knobs.runtime
        if _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook):
            ordinary(*args, *constants)
            return
        arguments: list[Any] = [*args, *constants]
        for at in pointers:
            arguments[at] = address(arguments[at])
        for at, change in tuples:
            arguments[at] = change(arguments[at])
        for at, end, change in described:
            arguments[at:end] = change(arguments[at])
        launch(
            x, y, z, stream_of(device), function, together, overlapping, None, None, packed, None, None, None,
            *arguments,
        )  # fmt: skip

    return go


def _parts(compiled: Any) -> Parts | None:
    """Return the parts of a kernel's launcher; None if it is not as in Triton 3.6, or needs memory."""
    if triton.__version__.split(".")[:2] != VERSION or type(compiled) is not CompiledKernel:
        return None
    try:
        from triton.backends.nvidia import driver as nvidia

        run, kinds = compiled.run, list(compiled.src.signature.values())
        if nvidia._BASE_ARGS_FORMAT != FIRST or type(run) is not nvidia.CudaLauncher:
            return None
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        places = _beginning(kinds, "tensordesc")
        if not places:
            return Parts(run.launch, kinds, []) if _is_in_c(run.launch) else None
        launch, indices, meta = _closed_over(run.launch, nvidia.__name__)
        if not _is_in_c(launch) or sorted(indices) != places:
            return None
        described, host_types = [], nvidia.TMA_DTYPE_DEVICE_TO_HOST
        for at, fields in zip(places, meta, strict=True):
            if fields.keys() != OF_DESCRIPTORS or fields["fp4_padded"]:
                return None
            described.append((at, {**fields, "elem_type": host_types[fields["elem_type"]]}))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):  # missing, or not as in 3.6
        return None
    return Parts(launch, kinds, described)


def _closed_over(launch: Any, module: str) -> list[Any]:
    """Return the variables that the function that makes descriptors closes over: `CLOSED_OVER`.

    Raises:
        TypeError: it is another function.
    """
    is_function = type(launch) is FunctionType and launch.__module__ == module
    if (
        not is_function
        or launch.__qualname__ != MAKES_DESCRIPTORS
        or launch.__code__.co_freevars != CLOSED_OVER
    ):
        raise TypeError(launch)
    return [cell.cell_contents for cell in launch.__closure__]


def _beginning(kinds: Kinds, word: str) -> list[int]:
    """Return the indices of the kinds that begin with a word."""
    return [i for i, kind in enumerate(kinds) if isinstance(kind, str) and kind.startswith(word)]


def _is_in_c(launch: object) -> bool:
    return type(launch) is BuiltinFunctionType and launch.__name__ == "launch"


def _is_set(hook: Any) -> bool:
    """Return True if a hook has to be called: a chain of hooks may be empty."""
    return hook is not None and (type(hook) is not knobs.HookChain or bool(hook.calls))


def _with_addresses(kinds: Kinds) -> tuple[list[int], list[tuple[int, Change]]]:
    """Return the indices of tensors, and of tuples with tensors in them along with how these change."""
    pointers = _beginning(kinds, "*")
    inside = [(i, _tuple_by(kind)) for i, kind in enumerate(kinds) if isinstance(kind, tuple)]
    return pointers, [(i, change) for i, change in inside if change is not None]


def _tuple_by(kinds: Kinds) -> Change | None:
    """Return a function that replaces a tuple's tensors by addresses; None if there are none in it."""
    pointers, tuples = _with_addresses(kinds)
    if not pointers and not tuples:
        return None

    def change(values: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = list(values)
        for at in pointers:
            parts[at] = address(parts[at])
        for at, of_tuple in tuples:
            parts[at] = of_tuple(parts[at])
        return tuple(parts)

    return change


def _descriptor_by(fields: dict[str, Any]) -> Change:
    """Return a function that gives a descriptor's launch arguments: the copy engine's, shape and strides."""
    fill, swizzle, size = driver.active.utils.fill_tma_descriptor, fields["swizzle"], fields["elem_size"]
    dtype, block = fields["elem_type"], fields["block_size"]

    def change(x: Any) -> tuple[Any, ...]:
        shape, strides, beyond = x.shape, x.strides, 1 if x.padding == "nan" else 0
        return fill(address(x.base), swizzle, size, dtype, block, shape, strides, beyond), *shape, *strides

    return change
