"""Which parameter is which, from gradients alone: no names, any layout.

The features are cut into four quarters A, B, C, Z. Queries live on A, keys on B, values on C, nothing on Z. A
weight that multiplies an input has gradient 0 along Z: that is its input axis, which tells [out, in] from
[in, out]; row by row, A, B or C tells whether it makes queries, keys or values. The cotangent is 0 on the
output's quarter A: that axis of W_o is its output.

Where one input is all three, the last token lives on A and the others on B, and only the last output is
asked: queries see A alone. When all tokens are equal the weights of the attention do not depend on q and k:
their rows get no gradient, those of v do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .calling import Caller
from .failing import CAUGHT
from .reacting import inputs_for

__all__ = ["Print", "fingerprints"]

ZERO = 1e-13


@dataclass(eq=False)
class Print:
    """What gradients say about one parameter."""

    used: bool = False
    in_axis: int | None = None  # along which it meets an input
    out_axis: int | None = None  # along which it makes the output
    rows: list[str] = field(
        default_factory=list
    )  # "q", "k", "v", several letters, or "" for each row [.., E]


def _gradients(
    caller: Caller, inputs: tuple[Tensor, Tensor, Tensor], cotangent: Tensor, mask: Tensor | None = None
) -> dict[str, Tensor]:
    parameters = {k: p for k, p in caller.subject.parameters.items() if p.requires_grad}
    output = caller.call(*inputs, mask).output
    if not output.requires_grad or not parameters:
        return {}
    found = torch.autograd.grad((output * cotangent).sum(), list(parameters.values()), allow_unused=True)
    return {name: one for name, one in zip(parameters, found, strict=True) if one is not None}


def _on(x: Tensor, quarter: int, quarters: int = 4) -> Tensor:
    """Zero but on one quarter of the features."""
    step = x.shape[-1] // quarters
    kept = torch.zeros_like(x)
    kept[..., quarter * step : (quarter + 1) * step] = x[..., quarter * step : (quarter + 1) * step]
    return kept


def fingerprints(caller: Caller) -> dict[str, Print]:
    """For every parameter; empty where gradients cannot be had."""
    try:
        return _fingerprints(caller)
    except CAUGHT:
        return {}


def _fingerprints(caller: Caller) -> dict[str, Print]:
    sizes, plan = caller.subject.sizes, caller.plan
    T = S = sizes.long
    query, key, value = inputs_for(caller, T, S, seed=11)
    width = caller.call(query, key, value).output.shape[-1]
    cotangent = torch.randn(
        sizes.B, T, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    cotangent[..., : width // 4] = 0
    equal: dict[str, Tensor] = {}
    spread: dict[str, Tensor] = {}
    if plan.self_only:
        x = _on(query, 1)
        x[:, -1] = _on(query, 0)[:, -1]
        query = key = value = x
        cotangent[:, :-1] = 0
    elif plan.memory_only:
        query, key = _on(query, 0), _on(key, 1)
        value = key
    else:
        query, key, value = _on(query, 0), _on(key, 1), _on(value, 2)
    apart = _gradients(caller, (query, key, value), cotangent)
    if plan.self_only or plan.memory_only:
        flat = [one[:, :1].expand_as(one).contiguous() for one in inputs_for(caller, T, S, seed=12)]
        if plan.self_only:
            flat = [flat[0]] * 3
        equal = _gradients(caller, (flat[0], flat[1], flat[1]), cotangent)
    else:
        dense = inputs_for(caller, T, S, seed=13)
        spread = _gradients(caller, (query, key, dense[2]), cotangent)
    found = {}
    largest = max((float(one.abs().max()) for one in equal.values()), default=1.0)
    for name, parameter in caller.subject.parameters.items():
        gradient = apart.get(name)
        if gradient is None or not bool((gradient != 0).any()):
            found[name] = Print(used=name in equal and bool((equal[name].abs() > ZERO * largest).any()))
            continue
        print_ = Print(used=True)
        if parameter.ndim >= 2:
            _axes(print_, gradient, spread.get(name), sizes.E, width)
            if print_.in_axis is not None:
                still = equal.get(name)
                print_.rows = _rows(
                    gradient, print_.in_axis, sizes.E, still, largest, plan.self_only, plan.memory_only
                )
        found[name] = print_
    return found


def _axes(print_: Print, gradient: Tensor, spread: Tensor | None, E: int, width: int) -> None:
    inward = [axis for axis in reversed(range(gradient.ndim)) if len(_live(gradient, axis)) == E]
    inward = [axis for axis in inward if not bool(_live(gradient, axis)[3 * (E // 4) :].any())]
    if (
        len(inward) > 1 and spread is not None
    ):  # values that are not projected lend their pattern to other axes
        inward = [axis for axis in inward if not bool(_live(spread, axis)[3 * (E // 4) :].any())] or inward
    print_.in_axis = inward[0] if inward else None
    for axis in reversed(range(gradient.ndim)):
        live = _live(gradient, axis)
        if axis != print_.in_axis and len(live) == width and not bool(live[: width // 4].any()):
            print_.out_axis = axis


def _live(gradient: Tensor, axis: int) -> Tensor:
    """Where along an axis there is any gradient, bool [size of the axis]."""
    others = [a for a in range(gradient.ndim) if a != axis]
    return gradient.abs().amax(others) > ZERO * float(gradient.abs().max())


def _rows(
    gradient: Tensor,
    axis: int,
    E: int,
    still: Tensor | None,
    largest: float,
    self_only: bool,
    memory_only: bool,
) -> list[str]:
    """What each row, the input axis moved last and the others flattened, makes."""
    step = E // 4
    rows = gradient.movedim(axis, -1).reshape(-1, E).abs()
    size = float(rows.max())
    live = torch.stack([rows[:, i * step : (i + 1) * step].amax(1) > ZERO * size for i in range(3)], 1)
    if not self_only and not memory_only:
        return ["".join(role for role, on in zip("qkv", row, strict=True) if on) for row in live.tolist()]
    moving = torch.zeros(len(rows), dtype=torch.bool)
    if still is not None:
        moving = still.movedim(axis, -1).reshape(-1, E).abs().amax(1) > 1e-11 * largest
    said = []
    for (a, b, _), v in zip(live.tolist(), moving.tolist(), strict=True):
        if not a and not b:
            said.append("")
        elif v:
            said.append("v")
        else:
            said.append("k" if b else "q")
    return said
