"""Measurements of a model of the study of head counts, with the same texts and draws for all models.

Validation loss; how much heads differ; labels, the best previous-token and the best induction head; the loss
with heads switched off. A measurement that fails is told of, and costs no other.
"""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.models import Transformer, TransformerConfig
from headwise.nn import Rope

from . import head_counts_models
from .head_counts_table import FRACTIONS

Job = tuple[int, int]  # heads a layer, seed
Report = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The settings of all models; they are stored in the results."""

    heads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 1500
    batch: int = head_counts_models.BATCH
    length: int = head_counts_models.LENGTH
    lr: float = head_counts_models.LR  # of the optimizer
    warmup: int = head_counts_models.WARMUP
    schedule: str = "cosine"
    clip: float = 1.0
    draws: int = 20  # sets of heads switched off, of each size; all sets where there are no more
    windows: int = 64  # of validation text, on which heads are switched off
    watched: int = 8  # of these, on which heads are compared and labelled
    period: int = 128  # random tokens, said twice
    repeated: int = 8  # such sequences
    trial: bool = False  # a tiny model on random tokens

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs, seed by seed, so that a run without enough time lacks whole seeds."""
        return [(heads, seed) for seed in self.seeds for heads in self.heads]

    def config(self, heads: int) -> TransformerConfig:
        """Return the config of the model with this number of heads per layer.

        All channels are turned by position, unlike those of `config`: with 32 heads a quarter of them is
        a single pair, and such heads cannot tell where anything is.
        """
        config = replace(head_counts_models.config(heads), rope=Rope())
        if self.trial:
            config = replace(config, vocab_size=61, d_model=16, num_layers=2, d_ff=0, head_dim=None)
        return config


TRIAL = Plan(
    heads=(1, 2), seeds=(0, 1), steps=3, batch=5, length=23, warmup=2, draws=3, windows=3, watched=2,
    period=11, repeated=2, trial=True,
)  # fmt: skip


# Measurements


@contextmanager
def attempted(report: Report, name: str) -> Iterator[None]:
    """Record the error of a measurement that fails, and go on with the others."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report["problems"][name] = in_words(error)


def in_words(error: BaseException) -> str:
    """Return the error as one line, without places in files."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def next_token_loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """Return the loss in nats per token of [B, length + 1]."""
    logits = model(batch[:, :-1]).flatten(0, 1)
    return cross_entropy(logits.float(), batch[:, 1:].flatten())


class Probes:
    """The texts for the measurements of all models."""

    def __init__(self, plan: Plan, validation: Tensor, vocab_size: int, device: str) -> None:
        starts = torch.linspace(0, len(validation) - plan.length - 1, plan.windows).long().tolist()
        text = torch.stack([validation[start : start + plan.length + 1] for start in starts])
        self.text = text.long().to(device)  # [windows, length + 1]
        spread = torch.linspace(0, plan.windows - 1, plan.watched).long()
        self.watched = self.text[spread, :-1]
        drawn = torch.Generator().manual_seed(0)
        once = torch.randint(1, vocab_size, (plan.repeated, plan.period), generator=drawn)  # 0 begins a text
        self.repeated = torch.cat([once, once], dim=1).to(device)  # [repeated, 2 period]


@torch.no_grad()
def measured(model: Transformer, plan: Plan, validation: Tensor, probes: Probes, report: Report) -> Report:
    """Return all numbers of the table for a trained model; errors go to "problems"."""
    began = time.monotonic()
    model.eval()
    measurements: Report = {}
    with attempted(report, "validation_loss"):
        measurements["validation_loss"] = _number(
            head_counts_models.validation_loss(model, validation, plan.length)
        )
    with attempted(report, "after"):
        measurements["after"] = diversity_of(model, probes)
    with attempted(report, "labels"):
        measurements |= _labels(model, probes)
    with attempted(report, "induction"):
        measurements |= _repetition(model, plan, probes)
    with attempted(report, "without"):
        measurements["without"] = _robustness(model, plan, probes)
    measurements["measured_in"] = round(time.monotonic() - began, 2)
    return measurements


@torch.no_grad()
def diversity_of(model: Transformer, probes: Probes) -> Report:
    """Return the mean difference of heads over pairs and layers; None with one head per layer.

    attention: Jensen-Shannon divergence of what they look at, nats, 0 to 0.69; outputs: cosine of what they
    say, whose negative is the disagreement of Li 2018.
    """
    with hw.watch(model, keep=False, statistics=(), pooled=None, diversity=True) as heads:
        model(probes.watched)
    diversity = hw.diversity(heads)
    cosines = [float(hw.heads.one_number(matrix[None])) for matrix in diversity.outputs.values()]
    return {
        "attention": _number(diversity.number),
        "outputs": _number(sum(cosines) / len(cosines)),
        "attention_by_layer": [_number(each) for each in diversity.by_layer.values()],
    }


def _labels(model: Transformer, probes: Probes) -> Report:
    """Return the number of heads by label on validation text, and the best previous-token head."""
    with hw.watch(model, pooled=None, patterns=True) as heads:
        model(probes.watched)
    everyone = heads.all()
    best = max(everyone, key=lambda head: head.values["previous"])
    return {
        "labels": dict(Counter(head.label.name for head in everyone)),
        "previous": {"layer": best.layer, "head": best.head, "score": _number(best.values["previous"])},
    }


def _repetition(model: Transformer, plan: Plan, probes: Probes) -> Report:
    """Return the best induction head on repeated random tokens, and the losses of both repetitions."""
    with hw.watch(model, keep=True, statistics=(), pooled=None) as heads:
        logits = model(probes.repeated)
    stripes = torch.stack(
        [hw.heads.induction_stripe(layer.map, plan.period).mean(0).cpu() for layer in heads.values()]
    )  # [layers, H]
    layer, head = divmod(int(stripes.argmax()), stripes.shape[1])
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), probes.repeated[:, 1:], reduction="none").mean(0)
    first, second = losses[: plan.period - 1], losses[plan.period :]  # what is between could not be foreseen
    return {
        "induction": {"layer": layer, "head": head, "score": _number(float(stripes.max()))},
        "said_twice": {"first": _number(float(first.mean())), "second": _number(float(second.mean()))},
    }


def _robustness(model: Transformer, plan: Plan, probes: Probes) -> Report:
    """Return the loss with all heads, without each one, and without fractions of heads (outputs 0)."""
    layers, heads = model.config.num_layers, model.config.num_heads
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    losses: Report = {
        "baseline": _number(float(next_token_loss(model, probes.text))),
        "one": without(model, probes.text, [[head] for head in every]),
    }
    for name, share in FRACTIONS.items():
        count = len(every) * share
        if count == int(count):  # an eighth of four heads is none
            losses[name] = without(model, probes.text, sets_of(every, int(count), plan.draws))
    return losses


def without(model: Transformer, text: Tensor, sets: Iterable[list[tuple[int, int]]]) -> list[float]:
    """Return the loss without each set of heads."""
    losses = []
    for some in sets:
        with hw.ablate(model, some):
            losses.append(round(float(next_token_loss(model, text)), 5))
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(f"the loss without {some} is {losses[-1]}")
    return losses


def sets_of(heads: list[tuple[int, int]], count: int, draws: int) -> list[list[tuple[int, int]]]:
    """Return different sets of so many heads: all, or a random sample that is the same every time."""
    if math.comb(len(heads), count) <= draws:
        return [list(some) for some in itertools.combinations(heads, count)]
    random, drawn = torch.Generator().manual_seed(0), dict[tuple[int, ...], None]()
    while len(drawn) < draws:
        some = torch.randperm(len(heads), generator=random)[:count].sort().values
        drawn[tuple(some.tolist())] = None
    return [[heads[place] for place in some] for some in drawn]


def _number(value: float) -> float | None:
    """Return a number for JSON: five decimals, None if not finite."""
    return round(value, 5) if math.isfinite(value) else None
