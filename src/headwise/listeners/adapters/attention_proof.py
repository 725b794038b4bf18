"""Does an attention function compute what headwise computes in its place? Run both once, and compare.

A function may copy a known one and change a factor, a default or a dimension: the names in its code are the
same. So before headwise answers for a function, the function is run on a small call like the one it was made
for (the same options, heads and kinds of tensors; other, fixed numbers), for each kind of call once. The
tensors lie on the CPU, in float64, whatever the model runs in: neither its rounding nor its memory matters,
and no random number is drawn. The module that the function is handed is a copy, and may be written to.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..active import quietly
from .attention_code import AttentionCode

__all__ = ["FunctionCall", "difference", "draw", "kind_of", "run"]

TOLERANCE = 1e-4  # a softmax in float32 is off by 1e-6
SCORES = (0.3, 3.0, 30.0)  # how large scores are, for one query, head and sequence after another
SINKS = "sinks"  # the only tensor of a module that a function may use
ROOM = 5  # by how much tensors are longer than the largest number in the function's code

Function = Callable[..., Any]


class FunctionCall(NamedTuple):
    """The arguments of an attention function: those of a model's call, or of a small one like it."""

    module: nn.Module
    query: Tensor  # [B, H, T, D]
    key: Tensor
    value: Tensor
    mask: Tensor | None
    given: dict[str, Any]


# Kinds of calls


def kind_of(code: AttentionCode, call: FunctionCall) -> Hashable:
    """Return all that may decide what a function computes, but for the numbers in its tensors."""
    module, query, key, value, mask, given = call
    own = module.__dict__
    return (
        type(module),
        module.training,
        _sizes(code, query, key),
        (*query.shape[1::2], *key.shape[1::2], *value.shape[1::2]),
        None if mask is None else (mask.dtype, _spread(mask)),
        tuple([None if name not in own else _plain(own[name]) for name in code.attributes]),
        SINKS in code.mentions and getattr(module, SINKS, None) is None,
        tuple([(name, _option(name, given[name])) for name in given if name in code.mentions]),
        bool(given.get("dropout")),
        _option("scaling", given.get("scaling")),
    )


def _sizes(code: AttentionCode, query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """B, T and S, cut to a few: longer than any number in the code, which may be compared with them."""
    few = code.largest + ROOM
    B, T, S = query.shape[0], query.shape[2], key.shape[2]
    b, t, s = (max(1, min(size, few)) for size in (B, T, S))
    if t == s and T != S:
        return (b, t - 1, s) if T < S else (b, t, s - 1)
    return b, t, s


def _spread(x: Tensor) -> tuple[bool, ...]:
    """In which dimensions a tensor is the same for all."""
    return tuple([size == 1 for size in x.shape])


def _plain(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return Tensor, _spread(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__


def _option(name: str, value: object) -> Hashable:
    """What of an argument is part of the kind; those below are drawn."""
    return value is not None if name in ("dropout", "sliding_window") else _plain(value)


# A small call of that kind


def draw(code: AttentionCode, call: FunctionCall) -> FunctionCall:
    """Return a small call of the same kind, with few and fixed numbers."""
    module, query, key, value, mask, given = call
    b, t, s = _sizes(code, query, key)
    H, D = query.shape[1], query.shape[3]
    small = dict(given)
    for name, option in given.items():
        if name == "dropout":
            small[name] = 0.0
        elif name == "sliding_window" and option is not None:
            small[name] = 2  # a function that hides keys by it is not answered with the mask alone
        elif name == "position_bias" and isinstance(option, Tensor):
            small[name] = 2 * _drawn(_small_shape(option, b, t, s), 5.0)
        elif name == "s_aux" and isinstance(option, Tensor):
            small[name] = 2 * _drawn(tuple(option.shape), 6.0)
        elif name == "scaling" and isinstance(option, Tensor):
            small[name] = torch.full(option.shape, 0.37, dtype=torch.float64, device="cpu")
    scale = small.get("scaling")
    scale = abs(float(scale)) if isinstance(scale, (int, float)) and scale else D**-0.5
    rows = torch.arange(b * H * t, device="cpu") % len(SCORES)
    wanted = torch.tensor(SCORES, dtype=torch.float64, device="cpu")[rows].reshape(b, H, t, 1)
    return FunctionCall(
        _copy_of(module, SINKS in code.mentions),
        _drawn((b, H, t, D), 1.0) * wanted / (0.5 * math.sqrt(D) * scale),
        _drawn((b, key.shape[1], s, D), 2.0),
        _drawn((b, value.shape[1], s, value.shape[3]), 3.0),
        None if mask is None else _drawn_mask(_small_shape(mask, b, t, s), mask.dtype),
        small,
    )


def _drawn(shape: tuple[int, ...], seed: float) -> Tensor:
    """Numbers between -1 and 1, the same for the same seed; torch's random state is not used."""
    n = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return torch.sin(0.618 * n * n + 17 * seed).reshape(shape)


def _small_shape(x: Tensor, b: int, t: int, s: int) -> tuple[int, ...]:
    """Of what is broadcast to [B, H, T, S]."""
    H = x.shape[-3] if x.ndim > 2 else 1
    return tuple(
        [1 if size == 1 else few for size, few in zip(x.shape, (b, H, t, s)[4 - x.ndim :], strict=True)]
    )


def _drawn_mask(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One that hides some keys from each query, never all; one that is added also adds other numbers."""
    numbers = _drawn(shape, 4.0)
    hidden = numbers > 0.2
    rows, keys = (torch.arange(size, device="cpu") for size in (*(1, 1), *shape)[-2:])
    hidden &= rows[:, None] % len(keys) != keys
    if dtype.is_floating_point:
        return torch.where(hidden, torch.finfo(torch.float32).min, numbers)
    return (~hidden).to(dtype)


def _copy_of(module: nn.Module, has_sinks: bool) -> nn.Module:
    """A module with the same attributes and other sinks, for a function that reads or sets them."""
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    sinks = getattr(module, SINKS, None) if has_sinks else None
    if sinks is not None:
        copied.__dict__[SINKS] = 2 * _drawn(tuple(sinks.shape), 7.0)  # before any parameter of that name
    return copied


# Running and comparing


def run(function: Function, call: FunctionCall, **other: Any) -> Any:
    """Return what the function answers; random numbers that it draws are not missed by anybody.

    Raises:
        ValueError: it writes to its inputs. What headwise computes in its place does not.
    """
    given = {"query": call.query, "key": call.key, "value": call.value, "attention_mask": call.mask}
    copies = {name: None if x is None else x.clone() for name, x in given.items()}
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        quietly(),
    ):
        answer = function(call.module, *copies.values(), **(call.given | other))
    for name, x in given.items():
        copy = copies[name]
        if x is not None and copy is not None and not torch.equal(x, copy):
            raise ValueError(f"it writes to its {name} in place")
    return answer


def difference(answer: Any, output: Tensor, weights: Tensor) -> str | None:
    """Return how a function's answer differs from ours, in words; None: by no more than rounding.

    Args:
        output: [B, T, H, D]
        weights: [B, H, T, S]
    """
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"returns a {type(answer).__name__} in place of (output, weights)"
    for name, found, expected in (("output", answer[0], output), ("weights", answer[1], weights)):
        if name == "weights" and found is None:
            continue
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            return f"returns {name} {shape} in place of {list(expected.shape)}"
        distance = float((found.to(expected.dtype) - expected).abs().max())
        if not distance <= TOLERANCE:  # nor if it is NaN
            return f"returns {name} up to {distance:.2g} away from softmax(q k^T scaling + mask) v"
    return None
