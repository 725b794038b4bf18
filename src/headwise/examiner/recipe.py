"""Multi-head attention as a recipe of small steps, any of which can be swapped for a wrong one.

    inputs  before  project  split  rotate  score  scale  place  hide  softmax  drop  weigh  merge  finish
    after  around

`before`, `rotate`, `place` and `around` do nothing in plain attention. Designs fill them: a norm of the
inputs, a rotation by position, a bias or a window by position, a residual connection (`steps_of`).

Each step reads and writes fields of one `State`, in float64. A fault is another function for one of the
steps: what code with that mistake computes with the learner's weights. Nothing here is fast, and only the
examiner uses it.

`headwise.reference` computes the same equations as one function, with every rule a mask can have, to test the
engines. It has no steps that could be replaced, and this has one dense mask only; tests compare the two.

Letters: B batch, T query_len, S key_len, E width, H num_heads, D head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import group_norm, layer_norm, normalize

P = ParamSpec("P")
R = TypeVar("R")


def without_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without gradients and without torch's function modes, which double the time."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return wrapped


class Weights(NamedTuple):
    """The four projections as nn.Linear holds them, [out, in]; biases that are absent are zeros."""

    q: Tensor  # [E, E]
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor  # [E]
    k_bias: Tensor
    v_bias: Tensor
    o_bias: Tensor


class ProbeInputs(NamedTuple):
    """The inputs of a call."""

    query: Tensor  # [B, T, E]
    key: Tensor  # [B, S, E]
    value: Tensor  # [B, S, E]
    mask: Tensor | None = None  # bool [B, T, S], True = may attend
    handed: Tensor | None = None  # the part passed to the code, where the code also has a mask of its own


@dataclass(eq=False)
class State:
    """The tensors computed up to a step."""

    inputs: ProbeInputs
    weights: Weights
    num_heads: int
    query: Tensor = field(init=False)  # [B, T, E] and [B, S, E], as they enter the projections
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)
    projected: tuple[Tensor, Tensor, Tensor] = field(init=False)  # each [B, T or S, E]
    q: Tensor = field(init=False)  # [B, H, T, D]
    k: Tensor = field(init=False)  # [B, H, S, D]
    v: Tensor = field(init=False)
    scores: Tensor = field(init=False)  # [B, H, T, S], q.k
    scaled: Tensor = field(init=False)  # [B, H, T, S]
    hidden: Tensor = field(init=False)  # [B, H, T, S], -inf where the mask hides
    p: Tensor = field(init=False)  # [B, H, T, S], the weights
    heads: Tensor = field(init=False)  # [B, H, T, D]
    joined: Tensor = field(init=False)  # [B, T, E]
    output: Tensor = field(init=False)  # [B, T, E]
    changes: list[Change] = field(default_factory=list)  # by designs, in order; copies of a state share it

    @property
    def head_dim(self) -> int:
        return self.weights.q.shape[0] // self.num_heads

    @property
    def mask(self) -> Tensor | None:
        """bool [B, 1, T, S], True = may attend."""
        return None if self.inputs.mask is None else self.inputs.mask[:, None]


Step = Callable[[State], None]
CHANGED = ("query", "key", "value", "q", "k", "scaled", "p", "joined", "output")  # fields designs may change


def _inputs(state: State) -> None:
    state.query, state.key, state.value = state.inputs[:3]


def _unchanged(state: State) -> None:
    """Do nothing; designs and faults replace this step."""


def _project(state: State) -> None:
    w = state.weights
    state.projected = (
        state.query @ w.q.T + w.q_bias,
        state.key @ w.k.T + w.k_bias,
        state.value @ w.v.T + w.v_bias,
    )


def _split(state: State) -> None:
    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (state.num_heads, -1)).transpose(1, 2)  # [B, H, T, D]

    state.q, state.k, state.v = (split(x) for x in state.projected)


def _score(state: State) -> None:
    state.scores = state.q @ state.k.transpose(-2, -1)


def _scale(state: State) -> None:
    state.scaled = state.scores / state.head_dim**0.5


def _hide(state: State) -> None:
    state.hidden = state.scaled
    if state.mask is not None:
        state.hidden = state.scaled.masked_fill(~state.mask, -torch.inf)


def _softmax(state: State) -> None:
    state.p = torch.softmax(state.hidden, -1)


def _weigh(state: State) -> None:
    state.heads = state.p @ state.v


def _merge(state: State) -> None:
    state.joined = state.heads.transpose(1, 2).flatten(2)  # [B, T, E]


def _finish(state: State) -> None:
    state.output = state.joined @ state.weights.o.T + state.weights.o_bias


RIGHT: dict[str, Step] = {
    "inputs": _inputs,
    "before": _unchanged,
    "project": _project,
    "split": _split,
    "rotate": _unchanged,
    "score": _score,
    "scale": _scale,
    "place": _unchanged,
    "hide": _hide,
    "softmax": _softmax,
    "drop": _unchanged,
    "weigh": _weigh,
    "merge": _merge,
    "finish": _finish,
    "after": _unchanged,
    "around": _unchanged,
}


@without_modes
def run(
    inputs: ProbeInputs, weights: Weights, num_heads: int, wrong: Mapping[str, Step] | None = None
) -> State:
    """Run all steps in order, those in `wrong` instead of the right ones, and return the final state.

    Raises:
        RuntimeError, ValueError, IndexError: a wrong step that cannot run at these sizes.
    """
    state = State(inputs, weights, num_heads)
    for name, right in RIGHT.items():
        (right if wrong is None else wrong.get(name, right))(state)
    return state


EVERY = -(10**6)  # the lower bound of a window without one


@dataclass
class Design:
    """A deliberate variant inside a module: its name, a description, and the numbers it computes with."""

    key: str  # a key of `_STEPS`, or the name of a variant that changes no number
    words: str  # "a sliding window of 3 keys inside"
    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fault: str = ""  # the key of a fault, for a design that is implemented wrongly


class Change(NamedTuple):
    """A change by a design: the fields before it."""

    design: Design
    before: dict[str, Tensor]


def steps_of(designs: Sequence[Design]) -> Mapping[str, Step]:
    """Return the steps of the recipe that these designs fill, several designs of one step in order."""
    made: dict[str, list[tuple[Design, Step]]] = {}
    for design in designs:
        for name, step in _STEPS.get(design.key, _nothing)(design).items():
            made.setdefault(name, []).append((design, step))
    return {name: _in_turn(name, steps) for name, steps in made.items()}


def _in_turn(name: str, steps: list[tuple[Design, Step]]) -> Step:
    def apply(state: State) -> None:
        for design, step in steps:
            before = {field: getattr(state, field, None) for field in CHANGED}
            step(state)
            changed = {
                field: was
                for field, was in before.items()
                if was is not None and getattr(state, field) is not was
            }
            if changed or name == "scale":
                state.changes = [*state.changes, Change(design, changed)]

    return apply


def _nothing(design: Design) -> dict[str, Step]:
    return {}


def normed(x: Tensor, design: Design, prefix: str = "") -> Tensor:
    """LayerNorm or RMSNorm over the last axis, or GroupNorm of x [B, T, E], with what `one` keeps of it."""
    eps, gain, bias = design.numbers[f"{prefix}eps"], design.tensors.get(f"{prefix}gain"), None
    if groups := design.numbers.get(f"{prefix}groups"):
        x = group_norm(x.transpose(1, 2), int(groups), eps=eps).transpose(1, 2)
    elif design.numbers[f"{prefix}rms"]:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    else:
        x = layer_norm(x, x.shape[-1:], eps=eps)
    bias = design.tensors.get(f"{prefix}bias")
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def _norm_before(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        for name in ("query", "key", "value"):
            if design.numbers[name]:
                setattr(state, name, normed(getattr(state, name), design))

    return {"before": apply}


def _latent(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        for name in ("query", "key", "value"):
            down = design.tensors.get(f"{name} down")
            if down is None:
                continue
            x = getattr(state, name) @ down.T
            bias = design.tensors.get(f"{name} down bias")
            x = x if bias is None else x + bias
            setattr(state, name, normed(x, design, f"{name} ") if f"{name} eps" in design.numbers else x)

    return {"before": apply}


def _query_key_norm(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        for name, part in (("q", "query "), ("k", "key ")):
            if f"{part}eps" not in design.numbers:
                continue
            x = getattr(state, name)  # [B, H, T, D]
            if design.numbers["wide"]:
                wide = normed(x.transpose(1, 2).flatten(2), design, part)
                x = wide.unflatten(-1, (state.num_heads, -1)).transpose(1, 2)
            else:
                x = normed(x, design, part)
            setattr(state, name, x)

    return {"rotate": apply}


def _unit(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        axis = int(design.numbers.get("axis", -1))
        state.q, state.k = normalize(state.q, dim=axis), normalize(state.k, dim=axis)

    return {"rotate": apply}


def turned(x: Tensor, design: Design) -> Tensor:
    """Return x [B, H, T, D] with pairs of its channels rotated by position times their frequency."""
    n, first = int(design.numbers["channels"]), int(design.numbers["first"])
    at = torch.arange(x.shape[-2], dtype=torch.float64)
    angle = at[:, None] * design.tensors["frequencies"]  # [T, n / 2]
    if design.numbers.get("mixed"):
        return _turned_with_mixed_pairs(x, angle, bool(design.numbers["neighbours"]))
    a, b = pairs(x[..., first : first + n], bool(design.numbers["neighbours"]))
    cos, sin = angle.cos(), angle.sin()
    if design.numbers.get("cosines for sines"):
        sin = cos
    first_sign, second_sign = design.numbers.get("first sign", -1.0), design.numbers.get("second sign", 1.0)
    a, b = a * cos + first_sign * b * sin, second_sign * a * sin + b * cos
    whole = torch.stack([a, b], -1).flatten(-2) if design.numbers["neighbours"] else torch.cat([a, b], -1)
    return torch.cat([x[..., :first], whole, x[..., first + n :]], -1)


def _turned_with_mixed_pairs(x: Tensor, angle: Tensor, neighbours: bool) -> Tensor:
    """Return x [B, H, T, D] rotated with pairs of one layout and angles [T, D / 2] of the other."""
    a, b = pairs(x, neighbours)
    if neighbours:
        partner, laid_out = torch.stack([-b, a], -1).flatten(-2), torch.cat([angle, angle], -1)
    else:
        partner, laid_out = torch.cat([-b, a], -1), angle.repeat_interleave(2, -1)
    return x * laid_out.cos() + partner * laid_out.sin()


def pairs(x: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Return the two channels of every pair: 2i and 2i + 1, or i and i + n / 2."""
    if neighbours:
        return x[..., ::2], x[..., 1::2]
    a, b = x.chunk(2, -1)
    return a, b


def _rope(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        for name in ("q", "k", "v"):
            if design.numbers.get(name, name != "v"):
                setattr(state, name, turned(getattr(state, name), design))

    return {"rotate": apply}


def own_scale(design: Design, keys: int) -> Tensor:
    """Return the scale of each head, [H] or [1], for this many keys."""
    return design.tensors["scale"] * (math.log(keys) if design.numbers.get("by log") else 1.0)


def _own_scale(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.scaled = state.scores * own_scale(design, state.scores.shape[-1]).reshape(1, -1, 1, 1)

    return {"scale": apply}


def _position_bias(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        T, S = state.scaled.shape[-2:]
        bias = design.tensors.get(f"{T} x {S}")
        if bias is None and "by distance" in design.tensors:
            table = design.tensors["by distance"]  # [H, 2L - 1], from -(L - 1) on
            away = torch.arange(S) - torch.arange(T)[:, None] + table.shape[-1] // 2
            bias = table[:, away.clamp(0, table.shape[-1] - 1)]
        elif bias is None:
            bias = next(iter(design.tensors.values()))[:, :T, :S]
        state.scaled = state.scaled + bias

    return {"place": apply}


def _talking_heads(design: Design) -> dict[str, Step]:
    def before(state: State) -> None:
        state.scaled = mixed(state.scaled, design, "before")

    def after(state: State) -> None:
        state.p = mixed(state.p, design, "after")

    steps: dict[str, Step] = {"place": before} if "before" in design.tensors else {}
    return steps | {"drop": after} if "after" in design.tensors else steps


def mixed(x: Tensor, design: Design, where: str) -> Tensor:
    """Return x [B, H, T, S] with each head a sum of all heads, "before" or "after" the softmax."""
    x = torch.einsum("gh,bhts->bgts", design.tensors[where], x)
    bias = design.tensors.get(f"{where} bias")
    return x if bias is None else x + bias[:, None, None]


def _gate(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.joined = state.joined * opened(state.query, design)
        _finish(state)

    return {"finish": apply}


def opened(query: Tensor, design: Design) -> Tensor:
    """Return the gate's factor for each channel, [B, T, H D], from the query [B, T, E]."""
    shares = query @ design.tensors["gate"].T
    bias = design.tensors.get("gate bias")
    shares = torch.sigmoid(shares if bias is None else shares + bias)
    return shares.repeat_interleave(int(design.numbers["each"]), -1)


def _window(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        T, S = state.scaled.shape[-2:]
        visible = design.tensors.get("seen")
        if visible is None:
            away = torch.arange(S) - torch.arange(T)[:, None]
            visible = (away >= design.numbers["from"]) & (away <= design.numbers["to"])
            visible &= (away != 0) | (design.numbers.get("without itself", 0.0) == 0)
        state.scaled = state.scaled.masked_fill(~visible[:T, :S].bool(), -torch.inf)

    return {"place": apply}


def _residual(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        if design.numbers.get("projected"):
            state.output = state.output + state.projected[0]
        else:
            state.output = state.output + (state.query if design.numbers["normed"] else state.inputs.query)

    return {"around": apply}


def _norm_after(design: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.output = normed(state.output, design)

    return {"around": apply}


_STEPS: dict[str, Callable[[Design], dict[str, Step]]] = {
    "norm before": _norm_before,
    "latent": _latent,
    "query-key norm": _query_key_norm,
    "unit": _unit,
    "rope": _rope,
    "own scale": _own_scale,
    "position bias": _position_bias,
    "talking heads": _talking_heads,
    "gate": _gate,
    "window": _window,
    "residual": _residual,
    "norm after": _norm_after,
}
