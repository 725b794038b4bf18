"""Multi-head attention as a recipe of small steps, any of which can be swapped for a wrong one.

    inputs  before  project  split  rotate  score  scale  place  hide  softmax  drop  weigh  merge  finish
    after  around

`before`, `rotate`, `place` and `around` do nothing here: they are where designs have their say, a norm of the
inputs, a rotation by position, a bias or a window by position, a residual connection (`designs.py`).

Each step reads and writes fields of one `State`; float64 throughout. A fault is another function for one of
the steps: what a learner would have computed with that mistake and their own weights. Nothing here is fast,
and nothing else in headwise computes with it.

`headwise.reference` says the same equations for another reader: whole, with every rule a mask can have, to
judge the engines by. It has no seams where a wrong step would fit, and this has no rules but one dense mask;
tests hold the two to each other, so that neither can be wrong alone.

Letters: B batch, T query_len, S key_len, E width, H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


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


class Given(NamedTuple):
    """What a call is made with."""

    query: Tensor  # [B, T, E]
    key: Tensor  # [B, S, E]
    value: Tensor  # [B, S, E]
    mask: Tensor | None = None  # bool [B, T, S], True = may attend
    handed: Tensor | None = None  # the part of it that was handed over, where the code has a mask of its own


@dataclass(eq=False)
class State:
    """All that is known up to a step."""

    given: Given
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

    @property
    def head_dim(self) -> int:
        return self.weights.q.shape[0] // self.num_heads

    @property
    def mask(self) -> Tensor | None:
        """bool [B, 1, T, S], True = may attend."""
        return None if self.given.mask is None else self.given.mask[:, None]


Step = Callable[[State], None]


def _inputs(state: State) -> None:
    state.query, state.key, state.value = state.given[:3]


def _nothing(state: State) -> None:
    """Where a design has its say."""


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


def _drop(state: State) -> None:
    """Where wrong modules meddle with the weights; the right one does not."""


def _weigh(state: State) -> None:
    state.heads = state.p @ state.v


def _merge(state: State) -> None:
    state.joined = state.heads.transpose(1, 2).flatten(2)  # [B, T, E]


def _finish(state: State) -> None:
    state.output = state.joined @ state.weights.o.T + state.weights.o_bias


def _after(state: State) -> None:
    """Where some add a residual or a norm; the right one does not."""


RIGHT: dict[str, Step] = {
    "inputs": _inputs,
    "before": _nothing,
    "project": _project,
    "split": _split,
    "rotate": _nothing,
    "score": _score,
    "scale": _scale,
    "place": _nothing,
    "hide": _hide,
    "softmax": _softmax,
    "drop": _drop,
    "weigh": _weigh,
    "merge": _merge,
    "finish": _finish,
    "after": _after,
    "around": _nothing,
}


@torch.no_grad()
def run(given: Given, weights: Weights, num_heads: int, wrong: Mapping[str, Step] | None = None) -> State:
    """Every step in turn, those in `wrong` instead of the right ones.

    Raises:
        RuntimeError, ValueError, IndexError: a wrong step that cannot run at these sizes.
    """
    state = State(given, weights, num_heads)
    for name, right in RIGHT.items():
        (right if wrong is None else wrong.get(name, right))(state)
    return state
