"""The second pass as operators: what torch.compile and torch.export see. Importing this registers them.

    headwise::measure    statistics and a picture
    headwise::top        the heaviest keys
    headwise::weights    dense weights, or their mean over heads, with gradients
    headwise::entropy    the entropy of each query, with gradients

Eager mode calls the same functions directly, and each operator runs the engine eager mode would: kernels on a
GPU, tiles elsewhere. (`headwise::attend` and `headwise::lse` are registered in attend.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import budget
from . import second_pass, statistics, weights
from .first_pass import ANYWHERE, lse_fake, lse_of
from .operator_arguments import save, saved, where_needed
from .scores import DIFFERENTIABLE, FLAT_SCHEMA, Scores, tile_dtype


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.define(f"headwise::{name}", schema)
    torch.library.impl(f"headwise::{name}", ANYWHERE, run)
    torch.library.register_fake(f"headwise::{name}", fake)


def _real(grads: tuple[Tensor | None, ...], inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Gradients as an operator returns them: an empty tensor stands for none."""
    pairs = zip(grads, inputs, strict=False)
    return tuple(
        inputs[0].new_empty(0) if g is None or x is None else g.to(x.dtype).contiguous() for g, x in pairs
    )


def _real_fake(inputs: tuple[Any, ...], bias: bool) -> tuple[Tensor, ...]:
    there = [
        None if x is None or (name in ("bias", "slopes") and not bias) else x
        for name, x in zip(DIFFERENTIABLE, inputs, strict=False)
    ]
    return tuple(inputs[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in there)


GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


# measure


def _measure(*args: Any) -> list[Tensor]:
    *flat, lse, names, per_query, reach, cells = args
    chosen = None if cells is None else (int(cells[0]), int(cells[1]))
    found = statistics.measured(Scores.restore(*flat), lse, tuple(names), per_query, reach, chosen)
    return [_alone(value) for value in found.values()]


def _alone(value: Tensor) -> Tensor:
    """What an operator returns may not share memory: several statistics may be rows of one tensor."""
    shared = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if shared else value.contiguous()


def _measure_fake(*args: Any) -> list[Tensor]:
    *flat, _, names, per_query, _, cells = args
    q, k = flat[:2]
    B, H, T, _ = q.shape
    dtype = tile_dtype(q.dtype)
    of_row = (B, H, T) if per_query else (B, H)
    shapes: list[Any] = [(B, H, k.shape[2]) if name == statistics.RECEIVED else of_row for name in names]
    if cells is not None:
        shapes.append((B, H, *cells))
    return [q.new_empty(shape, dtype=dtype) for shape in shapes]


_register(
    "measure",
    f"({FLAT_SCHEMA}, Tensor lse, str[] names, bool per_query, SymInt reach, SymInt[]? cells) -> Tensor[]",
    _measure,
    _measure_fake,
)


# top


def _top(*args: Any) -> tuple[Tensor, Tensor]:
    *flat, lse, count = args
    return second_pass.top(Scores.restore(*flat), lse, count)


def _top_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, count = args[0], args[-1]
    shape = (*q.shape[:3], count)
    return q.new_empty(shape, dtype=tile_dtype(q.dtype)), q.new_empty(shape, dtype=torch.int64)


_register("top", f"({FLAT_SCHEMA}, Tensor lse, SymInt count) -> (Tensor, Tensor)", _top, _top_fake)


# weights


def _columns(picked: Tensor | None, run: Any) -> Any:
    return slice(*(int(n) for n in run)) if run is not None else picked


def _weights(*args: Any) -> Tensor:
    *flat, lse, picked, run, mean = args
    q, shape = flat[0], _weights_shape(*args)
    size = torch.Size(shape).numel() * q.element_size()
    budget.check(size, q.device, f"dense weights {list(shape)}", "look at a part of them")
    return weights.dense(Scores.restore(*flat), lse, _columns(picked, run), mean).contiguous()


def _weights_shape(*args: Any) -> tuple[int, ...]:
    *flat, _, picked, run, mean = args
    q, k = flat[:2]
    count = k.shape[2]
    if picked is not None:
        count = picked.shape[0]
    elif run is not None:
        start, stop, step = run
        count = max(0, (stop - start + step - (1 if step > 0 else -1)) // step)
    B, H, T, _ = q.shape
    return (B, T, count) if mean else (B, H, T, count)


def _weights_fake(*args: Any) -> Tensor:
    q: Tensor = args[0]
    return q.new_empty(_weights_shape(*args))


def _weights_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *flat, lse, picked, run, mean, bias = args
    scores = Scores.restore(*flat)
    lse = lse_of(scores) if lse is None else lse
    return _real(weights.gradients(scores, lse, _columns(picked, run), mean, grad, bias), tuple(flat[:5]))


def _weights_backward_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _real_fake(args[:5], args[-1])


CHOSEN = "Tensor? lse, Tensor? picked, SymInt[]? run, bool mean"
_register("weights", f"({FLAT_SCHEMA}, {CHOSEN}) -> Tensor", _weights, _weights_fake)
_register(
    "weights_backward",
    f"(Tensor grad, {FLAT_SCHEMA}, {CHOSEN}, bool bias_gradient) -> {GRADIENTS}",
    _weights_backward,
    _weights_backward_fake,
)


# entropy


def _entropy(*args: Any) -> Tensor:
    *flat, lse = args
    return statistics.measured(Scores.restore(*flat), lse, ("entropy",), True, 0)["entropy"].contiguous()


def _entropy_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *flat, lse, bias = args
    return _real(second_pass.gradients(Scores.restore(*flat), lse, grad, bias), tuple(flat[:5]))


def _entropy_backward_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _real_fake(args[:5], args[-1])


_register(
    "entropy", f"({FLAT_SCHEMA}, Tensor lse) -> Tensor", _entropy, lse_fake
)  # a number a query, as lse is
_register(
    "entropy_backward",
    f"(Tensor grad, {FLAT_SCHEMA}, Tensor lse, bool bias_gradient) -> {GRADIENTS}",
    _entropy_backward,
    _entropy_backward_fake,
)


# The way back, for those that have one


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    save(ctx, inputs)


def _back(operator: Any) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        args, _ = saved(ctx)
        needed = ctx.needs_input_grad
        return where_needed(ctx, operator(grad, *args, needed[2] or needed[3]))

    return backward


for _name in ("weights", "entropy"):
    _backward = _back(getattr(torch.ops.headwise, f"{_name}_backward").default)
    torch.library.register_autograd(f"headwise::{_name}", _backward, setup_context=_save)
