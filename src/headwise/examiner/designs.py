"""What designs do to the recipe: a norm, a rotation, a bias by position, a residual connection.

A design is something a module has inside on purpose. `examine/recognition.py` finds it by numbers; here it
becomes steps of the recipe, a function of the evidence alone, so that any process can compute with it. What a
fault changes is changed within the design: a wrong scale between two norms is a wrong scale.

    norm before    `before`: LayerNorm or RMSNorm of the inputs
    latent         `before`: a narrow matrix, and a norm where there is one, ahead of the projections
    query-key norm `rotate`: a norm of queries and keys, of each head or of all channels
    unit           `rotate`: queries and keys of length 1
    rope           `rotate`: pairs of channels turned by position
    own scale      `scale`: one that is learnt, or none beside a bias by position
    position bias  `place`: numbers added to the scores by position
    window         `place`: keys out of sight by position
    gate           `merge`: the heads multiplied by a sigmoid of the input
    residual, norm after   `around`

Letters: B batch, T query_len, S key_len, E width, H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize

from .recipe import RIGHT, State, Step

NOT_JUDGED = "not judged"  # the key of a design that headwise has no equal of
EVERY = -(10**6)  # no bound to a window


@dataclass
class Design:
    """Something a module has inside on purpose, said in one sentence, and what it does to the recipe."""

    key: str  # one of the above; others change no number
    words: str  # "a sliding window of 3 keys inside"
    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def steps_of(designs: Sequence[Design]) -> Mapping[str, Step]:
    """The steps of the recipe these designs fill, those of several one after another."""
    made: dict[str, list[Step]] = {}
    for one in designs:
        for name, step in _STEPS.get(one.key, _nothing)(one).items():
            made.setdefault(name, []).append(step)
    return {name: _in_turn(steps) for name, steps in made.items()}


def _in_turn(steps: list[Step]) -> Step:
    def apply(state: State) -> None:
        for step in steps:
            step(state)

    return apply


def _nothing(one: Design) -> dict[str, Step]:
    return {}


def normed(x: Tensor, one: Design, prefix: str = "") -> Tensor:
    """LayerNorm or RMSNorm over the last axis, with what `one` keeps of it."""
    eps, gain, bias = one.numbers[f"{prefix}eps"], one.tensors.get(f"{prefix}gain"), None
    if one.numbers[f"{prefix}rms"]:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    else:
        x = layer_norm(x, x.shape[-1:], eps=eps)
    bias = one.tensors.get(f"{prefix}bias")
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def _norm_before(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        for name in ("query", "key", "value"):
            if one.numbers[name]:
                setattr(state, name, normed(getattr(state, name), one))

    return {"before": apply}


def _latent(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        for name in ("query", "key", "value"):
            down = one.tensors.get(f"{name} down")
            if down is None:
                continue
            x = getattr(state, name) @ down.T
            bias = one.tensors.get(f"{name} down bias")
            x = x if bias is None else x + bias
            setattr(state, name, normed(x, one, f"{name} ") if f"{name} eps" in one.numbers else x)

    return {"before": apply}


def _query_key_norm(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        for name, part in (("q", "query "), ("k", "key ")):
            if f"{part}eps" not in one.numbers:
                continue
            x = getattr(state, name)  # [B, H, T, D]
            if one.numbers["wide"]:
                wide = normed(x.transpose(1, 2).flatten(2), one, part)
                x = wide.unflatten(-1, (state.num_heads, -1)).transpose(1, 2)
            else:
                x = normed(x, one, part)
            setattr(state, name, x)

    return {"rotate": apply}


def _unit(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.q, state.k = normalize(state.q, dim=-1), normalize(state.k, dim=-1)

    return {"rotate": apply}


def turned(x: Tensor, one: Design) -> Tensor:
    """x [B, H, T, D], pairs of its channels turned by position times their frequency."""
    n, first = int(one.numbers["channels"]), int(one.numbers["first"])
    at = torch.arange(x.shape[-2], dtype=torch.float64)
    angle = at[:, None] * one.tensors["frequencies"]  # [T, n / 2]
    a, b = pairs(x[..., first : first + n], bool(one.numbers["neighbours"]))
    cos, sin = angle.cos(), angle.sin()
    a, b = a * cos - b * sin, a * sin + b * cos
    whole = torch.stack([a, b], -1).flatten(-2) if one.numbers["neighbours"] else torch.cat([a, b], -1)
    return torch.cat([x[..., :first], whole, x[..., first + n :]], -1)


def pairs(x: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    """The two channels of every pair: 2i and 2i + 1, or i and i + n / 2."""
    if neighbours:
        return x[..., ::2], x[..., 1::2]
    a, b = x.chunk(2, -1)
    return a, b


def _rope(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.q, state.k = turned(state.q, one), turned(state.k, one)

    return {"rotate": apply}


def _own_scale(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.scaled = state.scores * one.tensors["scale"].reshape(1, -1, 1, 1)

    return {"scale": apply}


def _position_bias(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        T, S = state.scaled.shape[-2:]
        bias = one.tensors.get(f"{T} x {S}")
        if bias is None and "by distance" in one.tensors:
            table = one.tensors["by distance"]  # [H, 2L - 1], from -(L - 1) on
            away = torch.arange(S) - torch.arange(T)[:, None] + table.shape[-1] // 2
            bias = table[:, away.clamp(0, table.shape[-1] - 1)]
        elif bias is None:
            bias = next(iter(one.tensors.values()))[:, :T, :S]
        state.scaled = state.scaled + bias

    return {"place": apply}


def _window(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        T, S = state.scaled.shape[-2:]
        seen = one.tensors.get("seen")
        if seen is None:
            away = torch.arange(S) - torch.arange(T)[:, None]
            seen = (away >= one.numbers["from"]) & (away <= one.numbers["to"])
        state.scaled = state.scaled.masked_fill(~seen[:T, :S].bool(), -torch.inf)

    return {"place": apply}


def _gate(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        RIGHT["merge"](state)
        gate = state.query @ one.tensors["gate"].T
        if "gate bias" in one.tensors:
            gate = gate + one.tensors["gate bias"]
        gate = torch.sigmoid(gate)
        if gate.shape[-1] != state.joined.shape[-1]:  # one per head
            gate = gate.repeat_interleave(state.joined.shape[-1] // gate.shape[-1], -1)
        state.joined = state.joined * gate

    return {"merge": apply}


def _residual(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.output = state.output + (state.query if one.numbers["normed"] else state.given.query)

    return {"around": apply}


def _norm_after(one: Design) -> dict[str, Step]:
    def apply(state: State) -> None:
        state.output = normed(state.output, one)

    return {"around": apply}


_STEPS: dict[str, Callable[[Design], dict[str, Step]]] = {
    "norm before": _norm_before,
    "latent": _latent,
    "query-key norm": _query_key_norm,
    "unit": _unit,
    "rope": _rope,
    "own scale": _own_scale,
    "position bias": _position_bias,
    "window": _window,
    "gate": _gate,
    "residual": _residual,
    "norm after": _norm_after,
}
