"""Losses without the heads of a kind, beside losses without as many others of the same layers.

Letters: B sequences, P period (tokens that are said twice), H heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headwise as hw

DRAWS = 20
METHODS = ("zero", "mean")

Place = tuple[int, int]  # layer, head
Facts = dict[str, Any]  # what JSON holds


@dataclass(frozen=True, eq=False)
class Probe:
    """Sequences that repeat their first half.

    batches: int [B, start + 2 P] each; start: 1 where a start token stands in front, else 0.
    """

    name: str
    batches: tuple[Tensor, ...]
    start: int

    def period(self, ids: Tensor) -> int:
        """Return P of a batch."""
        return (ids.shape[1] - self.start) // 2


def stripe(map: hw.AttentionMap, period: int) -> Tensor:
    """Return `headwise.heads.induction_stripe`, the mean over sequences, [H]."""
    return hw.heads.induction_stripe(map, period).mean(0)


@torch.no_grad()
def losses_of(model: nn.Module, probe: Probe) -> tuple[float, float]:
    """Return nats per token of the first and of the second repetition, without its first token."""
    sums, count = [0.0, 0.0], 0
    for ids in probe.batches:
        output = model(ids)
        logits = output if isinstance(output, Tensor) else output.logits
        P, count = probe.period(ids), count + len(ids) * (probe.period(ids) - 1)
        for half in (0, 1):
            begin = probe.start + half * P
            predicted, wanted = logits[:, begin : begin + P - 1], ids[:, begin + 1 : begin + P]
            sums[half] += float(
                cross_entropy(predicted.flatten(0, 1).double(), wanted.flatten(), reduction="sum")
            )
    return sums[0] / count, sums[1] / count


@torch.no_grad()
def stripe_of(model: nn.Module, probe: Probe, heads: Sequence[Place]) -> float:
    """Return the mean stripe of some heads."""
    total, count = 0.0, 0
    for ids in probe.batches:
        with hw.watch(model, statistics=(), pooled=None, keep=True) as watched:
            model(ids)
        period = probe.period(ids)
        total += sum(float(stripe(watched[layer].map, period)[head]) for layer, head in heads) * len(ids)
        count += len(ids) * len(heads)
    return total / count


def others(
    chosen: Sequence[Place], out: set[Place], num_heads: int, draws: int, seed: int
) -> list[list[Place]]:
    """Return sets of as many other heads in each layer: `draws` different sets, or all.

    Args:
        out: heads that are in none of them.
    """
    per_layer: dict[int, int] = {}
    for layer, _ in chosen:
        per_layer[layer] = per_layer.get(layer, 0) + 1
    pools = {layer: [(layer, h) for h in range(num_heads) if (layer, h) not in out] for layer in per_layer}
    there_are = math.prod(math.comb(len(pools[layer]), count) for layer, count in per_layer.items())
    if there_are <= draws:
        ways = [list(itertools.combinations(pools[layer], count)) for layer, count in per_layer.items()]
        return [list(itertools.chain(*way)) for way in itertools.product(*ways)]
    random = torch.Generator().manual_seed(seed)
    sets: dict[tuple[Place, ...], None] = {}
    while len(sets) < draws:
        picked: list[Place] = []
        for layer, count in per_layer.items():
            order = torch.randperm(len(pools[layer]), generator=random)[:count].tolist()
            picked += [pools[layer][i] for i in order]
        sets[tuple(sorted(picked))] = None
    return [list(each) for each in sets]


def spread_of(numbers: Sequence[float], beside: float, worse: int = 1) -> Facts:
    """Return the mean of draws, their 95% interval, and the number of draws with as much effect as the heads.

    worse: 1 where more is worse, as of a loss; -1 where less is.
    """
    if not numbers:
        return {"draws": 0, "mean": None, "low": None, "high": None, "as_much": None, "each": []}
    values = torch.tensor(numbers, dtype=torch.float64)
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    as_much = int((values * worse >= beside * worse).sum())
    each = [round(number, 4) for number in numbers]
    mean = float(values.mean())
    return {"draws": len(each), "mean": mean, "low": low, "high": high, "as_much": as_much, "each": each}


def ablations(
    model: nn.Module,
    probes: Sequence[Probe],
    kinds: dict[str, list[Place]],
    num_heads: int,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Iterator[Facts]:
    """Return a row per kind, method and probe: the loss without heads of the kind, and without others.

    Of kinds other than "induction" also where the induction heads then look.

    Args:
        kinds: the heads of each kind, "induction" among them.
    """
    out = {place for heads in kinds.values() for place in heads}
    whole = {probe.name: _numbers(model, probe, kinds["induction"]) for probe in probes}
    for kind, chosen in kinds.items():
        beside = others(chosen, out, num_heads, draws, seed)
        watched = [] if kind == "induction" else kinds["induction"]  # what they look at, they look at before
        for method, probe in itertools.product(METHODS, probes):

            def without(
                heads: list[Place], method: str = method, probe: Probe = probe, watched: list[Place] = watched
            ) -> Numbers:
                with hw.ablate(model, heads, method):
                    return _numbers(model, probe, watched)

            before, less, drawn = whole[probe.name], without(chosen), [without(heads) for heads in beside]
            row: Facts = {
                "kind": kind,
                "heads": [list(place) for place in chosen],
                "method": method,
                "probe": probe.name,
                "first": {"loss": before.first, "without": less.first},
                "loss": before.second,
                "without": less.second,
                "others": spread_of([each.second for each in drawn], less.second),
            }
            if watched:
                stripes = spread_of([each.stripe for each in drawn], less.stripe, worse=-1)
                row["stripe"] = {"whole": before.stripe, "without": less.stripe, "others": stripes}
            yield row


class Numbers(NamedTuple):
    """Losses of both repetitions, and the mean stripe of heads; NaN if none are watched."""

    first: float
    second: float
    stripe: float


def _numbers(model: nn.Module, probe: Probe, watched: Sequence[Place]) -> Numbers:
    return Numbers(*losses_of(model, probe), stripe_of(model, probe, watched) if watched else math.nan)
