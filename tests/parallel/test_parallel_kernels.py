"""A sequence over ranks on kernels of our own: every rectangle by triton, in its interpreter.

There is one process here: ranks are played one after another, and what would be sent is handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Mask
from headwise.arguments import AttentionOptions, rules_and_scoring
from headwise.engines import backends
from headwise.engines.backend import Backend, Call
from headwise.parallel import ring_attention
from headwise.parallel.ring_attention import Shard
from headwise.parallel.sequence import Layout
from interpreted_kernels import interpreted, launched, mended, poisoned  # noqa: F401, used by their names
from judge import Case, assert_judged, sizes
from second_pass_cases import masks, normal, numbers, options

B, H, Hk, T, D = 2, 4, 2, 23, 8
RANKS = 2


class Played:
    """A ring of which all ranks are here."""

    size = RANKS

    def __init__(self, rank: int, keys: list[list[Tensor]]) -> None:
        self.rank, self._keys = rank, keys

    def blocks(self, *mine: Tensor, sizes: list[int]) -> Iterator[tuple[int, list[Tensor]]]:
        """As of a ring."""
        for step in range(self.size):
            owner = (self.rank - step) % self.size
            yield owner, [x.clone() for x in self._keys[owner]]


def played(case: Case, pull: Tensor) -> dict[str, Tensor]:
    """The output and gradients of a call over ranks, put together."""
    q, k, v = case.q, case.k, case.v
    S = k.shape[2]
    rules = rules_and_scoring(q, (B, H, q.shape[2], S), AttentionOptions(case.mask, **case.options))
    queries, keys = Layout(q.shape[2], RANKS), Layout(S, RANKS)
    parts = [[x[:, :, keys.positions(rank)] for x in (k, v)] for rank in range(RANKS)]
    actual = {name: torch.zeros(x.shape) for name, x in {"output": pull, "q": q, "k": k, "v": v}.items()}
    for rank in range(RANKS):
        at = queries.positions(rank)
        ring: Any = Played(rank, parts)
        shard = Shard(ring, q[:, :, at], parts[rank][0], *rules, queries, keys)
        merged = ring_attention._forward(shard, parts[rank][1])
        output = merged.output(q.dtype)
        rows = ring_attention._Rows(output, merged.lse, *merged.anchor, pull[:, :, at])
        room = {"q": torch.zeros(shard.q.shape)}
        for owner, (theirs, values) in enumerate(parts):
            packed = torch.zeros(theirs.numel() + values.numel())
            ring_attention._backward_of_block(shard, rows, owner, theirs, values, packed, room)
            for name, share in zip(("k", "v"), ring_attention._unpacked(packed, theirs, values), strict=True):
                actual[name][:, :, keys.positions(owner)] += share
        actual["output"][:, :, at], actual["q"][:, :, at] = output, room["q"]
    return actual


def cases() -> dict[str, Case]:
    bare = numbers(B, H, Hk, T, T, D)
    actual = {
        name: Case(bare.q, bare.k, bare.v, mask)
        for name, mask in masks(B, H, T, T, window=11, band=(7, 5), document=9).items()
    }
    for name, more in options(H, T, T).items():
        actual[name] = Case(bare.q, bare.k, bare.v, Mask.causal(), more)
    more = {"bias": options(H, T, T)["relative"]["bias"], "softcap": 3.0}
    actual["relative, band, soft cap"] = Case(bare.q, bare.k, bare.v, Mask.window(left_right=(7, 5)), more)
    return actual


CHOSEN = ["window", "documents", "dense", "left padding", "alibi", "relative, band, soft cap"]


@pytest.mark.thinned(keep=["window"])
@pytest.mark.parametrize("name", CHOSEN)
def test_rectangles_run_on_kernels_and_come_to_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    choose = backends.choose

    def noted(call: Call, wanted: str = "auto") -> Backend:
        chosen = choose(call, wanted)
        used.append(chosen.name)
        return chosen

    monkeypatch.setattr(backends, "choose", noted)
    low = cases()[name].to(torch.float32)
    pull = normal(11, B, H, T, D)
    actual = played(low, pull.float())
    assert set(used) == {"triton"}
    plain, truth = low.with_gradients(), low.to(torch.float64).with_gradients()
    outputs = []
    for arm in (plain, truth):
        outputs.append(arm.reference()[0])
        outputs[-1].backward(pull.to(outputs[-1]))
    size = sizes(low, pull)
    assert_judged(actual["output"], *outputs, dtype=torch.float32, size=size["output"], name="output")
    for leaf in ("q", "k", "v"):
        theirs, true = plain.leaves()[leaf].grad, truth.leaves()[leaf].grad
        assert theirs is not None and true is not None
        assert_judged(actual[leaf], theirs, true, dtype=torch.float32, size=size[leaf], times=3, name=leaf)
