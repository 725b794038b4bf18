"""Both passes as operators for torch.compile and torch.export. Importing this module registers them.

    headwise::attend     output and lse, with gradients
    headwise::lse        the log-sum-exp of each query
    headwise::measure    statistics and a picture
    headwise::top        the heaviest keys
    headwise::weights    dense weights, or their mean over heads, with gradients
    headwise::entropy    the entropy of each query, with gradients

Eager mode calls the same functions directly, and each operator runs the same engine as eager mode: kernels on
a GPU, tiles elsewhere. The backend of `attend` is chosen when the operator runs, with real sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import budget
from ..indexing import Index
from . import backends, second_pass, weights
from .backend import Call
from .first_pass import lse_of
from .gradients import Context, needs_added
from .scores import ADDED, DIFFERENTIABLE, FLAT, FLAT_SCHEMA, Scores, own_precision
from .second_pass import Measurement
from .statistics import RECEIVED

ANYWHERE = "CompositeExplicitAutograd"
Result = TypeVar("Result")
Leaves = tuple[Tensor | None, ...]  # in the order of DIFFERENTIABLE


def _register(
    name: str, before: str, after: str, result: str, run: Callable[..., object], fake: Callable[..., object]
) -> None:
    """Register an operator whose arguments hold scores in their flat form; `run` and `fake` take `Scores`."""
    torch.library.define(f"headwise::{name}", f"({before}{FLAT_SCHEMA}{after}) -> {result}")
    place = before.count(",")
    torch.library.impl(f"headwise::{name}", ANYWHERE, _with_scores(run, place))
    torch.library.register_fake(f"headwise::{name}", _with_scores(fake, place))


def _with_scores(run: Callable[..., Result], place: int) -> Callable[..., Result]:
    """Return the function with scores as flat arguments from `place` on."""
    beyond = place + len(FLAT)

    def flat(*args: Any) -> Result:
        return run(*args[:place], Scores.restore(*args[place:beyond]), *args[beyond:])

    return flat


def _real(grads: Leaves, scores: Scores) -> tuple[Tensor, ...]:
    """Return gradients as an operator does: an empty tensor stands for None."""
    pairs = zip(grads, scores.leaves, strict=True)
    return tuple(
        scores.q.new_empty(0) if g is None or x is None else g.to(x.dtype).contiguous() for g, x in pairs
    )


def _real_fake(scores: Scores, bias: bool) -> tuple[Tensor, ...]:
    leaves = [
        None if name in ADDED and not bias else x
        for name, x in zip(DIFFERENTIABLE, scores.leaves, strict=True)
    ]
    return tuple(scores.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in leaves)


def _row_fake(scores: Scores, *rest: object) -> Tensor:
    """Return an empty tensor with a number per query, [B, H, T]."""
    return scores.q.new_empty(scores.shape[:3], dtype=scores.dtype)


def _tensors(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


GRADIENTS = _tensors(len(DIFFERENTIABLE))


# attend and lse


def _attend(v: Tensor, scores: Scores, bias_gradient: bool, backend: str) -> tuple[Tensor, Tensor]:
    # sizes, and a named backend's verdict on them, are known only here
    call = Call(scores, v, bias_gradient=bias_gradient)
    chosen = backends.choose(call, backend)
    backends.note(call)
    with own_precision(v.device):
        out, lse = chosen.forward(call)
    return out.contiguous(), lse.contiguous()


def _attend_fake(v: Tensor, scores: Scores, bias_gradient: bool, backend: str) -> tuple[Tensor, Tensor]:
    out = scores.q.new_empty(*scores.shape[:3], v.shape[-1], dtype=v.dtype)
    return out, _row_fake(scores)


def _attend_backward(
    grad: Tensor, out: Tensor, lse: Tensor, v: Tensor, scores: Scores, bias_gradient: bool, backend: str
) -> tuple[Tensor, ...]:
    call = Call(scores, v, bias_gradient=bias_gradient)
    # any backend's backward fits any forward, so "auto" may choose another one here
    chosen = backends.choose(call) if backend == "auto" else backends.backend_named(backend)
    with own_precision(v.device):
        back, dv, sinks = chosen.backward(call, out, lse, grad)
    grads = back.q, back.k, back.bias, back.slopes, sinks, back.relative
    return dv.to(v.dtype).contiguous(), *_real(grads, scores)


def _attend_backward_fake(
    grad: Tensor, out: Tensor, lse: Tensor, v: Tensor, scores: Scores, bias_gradient: bool, backend: str
) -> tuple[Tensor, ...]:
    return v.new_empty(v.shape), *_real_fake(scores, bias_gradient)


def _lse(scores: Scores) -> Tensor:
    return lse_of(scores).contiguous()


BACKEND = ", bool bias_gradient, str backend"
_register("attend", "Tensor v, ", BACKEND, "(Tensor, Tensor)", _attend, _attend_fake)
_register(
    "attend_backward",
    "Tensor grad, Tensor out, Tensor lse, Tensor v, ",
    BACKEND,
    _tensors(1 + len(DIFFERENTIABLE)),
    _attend_backward,
    _attend_backward_fake,
)
_register("lse", "", "", "Tensor", _lse, _row_fake)


# measure


Names = Sequence[str]
Cells = Sequence[int] | None


def _measure(
    scores: Scores, lse: Tensor, names: Names, per_query: bool, reach: int, cells: Cells
) -> list[Tensor]:
    chosen = None if cells is None else (int(cells[0]), int(cells[1]))
    values = second_pass.measured(scores, lse, Measurement(tuple(names), per_query, reach, chosen))
    return [_alone(value) for value in values.values()]


def _alone(value: Tensor) -> Tensor:
    """Return the value in memory of its own, as operators must: statistics may be rows of one tensor."""
    shared = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if shared else value.contiguous()


def _measure_fake(
    scores: Scores, lse: Tensor, names: Names, per_query: bool, reach: int, cells: Cells
) -> list[Tensor]:
    B, H, T, S = scores.shape
    of_row = (B, H, T) if per_query else (B, H)
    shapes: list[tuple[int, ...]] = [(B, H, S) if name == RECEIVED else of_row for name in names]
    if cells is not None:
        shapes.append((B, H, *cells))
    return [scores.q.new_empty(shape, dtype=scores.dtype) for shape in shapes]


_register(
    "measure",
    "",
    ", Tensor lse, str[] names, bool per_query, SymInt reach, SymInt[]? cells",
    "Tensor[]",
    _measure,
    _measure_fake,
)


# top


def _top(scores: Scores, lse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return second_pass.top(scores, lse, count)


def _top_fake(scores: Scores, lse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    q, shape = scores.q, (*scores.shape[:3], count)
    return q.new_empty(shape, dtype=scores.dtype), q.new_empty(shape, dtype=torch.int64)


_register("top", "", ", Tensor lse, SymInt count", "(Tensor, Tensor)", _top, _top_fake)


# weights


Picked = Tensor | None  # indices of keys; or a slice's three numbers; None twice: all
Run = Sequence[int] | None


def _columns(picked: Picked, run: Run) -> Index | None:
    return slice(*(int(n) for n in run)) if run is not None else picked


def _weights(scores: Scores, lse: Tensor | None, picked: Picked, run: Run, mean: bool) -> Tensor:
    q, shape = scores.q, _weights_shape(scores, picked, run, mean)
    size = torch.Size(shape).numel() * q.element_size()
    budget.check(size, q.device, f"dense weights {list(shape)}", "read a part of them")
    return weights.dense(scores, lse, _columns(picked, run), mean).contiguous()


def _weights_shape(scores: Scores, picked: Picked, run: Run, mean: bool) -> tuple[int, ...]:
    B, H, T, count = scores.shape
    if picked is not None:
        count = picked.shape[0]
    elif run is not None:
        start, stop, step = run
        count = max(0, (stop - start + step - (1 if step > 0 else -1)) // step)
    return (B, T, count) if mean else (B, H, T, count)


def _weights_fake(scores: Scores, lse: Tensor | None, picked: Picked, run: Run, mean: bool) -> Tensor:
    return scores.q.new_empty(_weights_shape(scores, picked, run, mean))


def _weights_backward(
    grad: Tensor, scores: Scores, lse: Tensor | None, picked: Picked, run: Run, mean: bool, bias: bool
) -> tuple[Tensor, ...]:
    lse = lse_of(scores) if lse is None else lse
    return _real(weights.gradients(scores, lse, _columns(picked, run), mean, grad, bias), scores)


def _weights_backward_fake(
    grad: Tensor, scores: Scores, lse: Tensor | None, picked: Picked, run: Run, mean: bool, bias: bool
) -> tuple[Tensor, ...]:
    return _real_fake(scores, bias)


CHOSEN = ", Tensor? lse, Tensor? picked, SymInt[]? run, bool mean"
_register("weights", "", CHOSEN, "Tensor", _weights, _weights_fake)
_register(
    "weights_backward",
    "Tensor grad, ",
    f"{CHOSEN}, bool bias_gradient",
    GRADIENTS,
    _weights_backward,
    _weights_backward_fake,
)


# entropy


def _entropy(scores: Scores, lse: Tensor) -> Tensor:
    return second_pass.measured(scores, lse, Measurement(("entropy",), per_query=True))[
        "entropy"
    ].contiguous()


def _entropy_backward(grad: Tensor, scores: Scores, lse: Tensor, bias: bool) -> tuple[Tensor, ...]:
    return _real(weights.entropy_gradients(scores, lse, grad, bias), scores)


def _entropy_backward_fake(grad: Tensor, scores: Scores, lse: Tensor, bias: bool) -> tuple[Tensor, ...]:
    return _real_fake(scores, bias)


_register("entropy", "", ", Tensor lse", "Tensor", _entropy, _row_fake)
_register(
    "entropy_backward",
    "Tensor grad, ",
    ", Tensor lse, bool bias_gradient",
    GRADIENTS,
    _entropy_backward,
    _entropy_backward_fake,
)


# Gradients of the operators that have them


def _save_inputs(ctx: Context, inputs: tuple[object, ...], *more: Tensor) -> None:
    """Save an operator's arguments, and more, for its backward."""
    ctx.tensors_at = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), *more)


def _saved(ctx: Context) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Return (the arguments, the other saved tensors)."""
    saved, count = ctx.saved_tensors, len(ctx.tensors_at)  # checkpointing allows one read
    args = list(ctx.others)
    for i, tensor in zip(ctx.tensors_at, saved[:count], strict=True):
        args[i] = tensor
    return args, saved[count:]


def _where_needed(ctx: Context, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return one gradient per argument: None where it is not needed."""
    needed = ctx.needs_input_grad
    count = len(grads)  # a list: a generator would be entered once for every argument
    return tuple([grads[i] if i < count and needed[i] else None for i in range(len(needed))])


def _save(ctx: Context, inputs: tuple[object, ...], output: object) -> None:
    _save_inputs(ctx, inputs)


def _save_with_output(ctx: Context, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    _save_inputs(ctx, inputs, *output)
    ctx.set_materialize_grads(False)


def _back(operator: Callable[..., Leaves]) -> Callable[[Context, Tensor], Leaves]:
    def backward(ctx: Context, grad: Tensor) -> Leaves:
        args, _ = _saved(ctx)
        needed = ctx.needs_input_grad
        return _where_needed(ctx, operator(grad, *args, needs_added(needed)))

    return backward


def _back_of_attend(ctx: Context, grad: Tensor | None, _: object) -> Leaves:
    args, (out, lse) = _saved(ctx)
    if grad is None:
        return (None,) * len(args)
    return _where_needed(ctx, torch.ops.headwise.attend_backward.default(grad, out, lse, *args))


for _name in ("weights", "entropy"):
    _backward = _back(getattr(torch.ops.headwise, f"{_name}_backward").default)
    torch.library.register_autograd(f"headwise::{_name}", _backward, setup_context=_save)
torch.library.register_autograd("headwise::attend", _back_of_attend, setup_context=_save_with_output)
