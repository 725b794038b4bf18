"""What a role is for: the behaviour that should rest on it, with its heads switched off.

For each role that was found, prompts of `headwise.heads.behaviours` are answered by the whole model, by the
model without the role's heads, and by the model without as many other heads of the same layers, some twenty
times.

A head that is off says what it says on average over the behaviour's own prompts (mean ablation): zeros would
be something that the layers after it never see.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.behaviours import behaviours_of
from ..heads.layer_names import Layer
from ..heads.role_verdicts import Place, RoleEffect, RoleEffects
from ..models.batches import tracked
from ..models.pretrained import Tokenizer
from .model_answers import METHOD, Asked, Speaker

__all__ = ["FoundRole", "FoundRoles", "role_effects"]

SURE = 1.96  # standard errors on each side: 95%


class FoundRole(Protocol):
    """What is asked of a role: its heads, best first, as (layer, head, share)."""

    @property
    def heads(self) -> Sequence[Sequence[Any]]: ...


class FoundRoles(Protocol):
    """What is asked of the answer of `headwise.roles`: the roles that were found, by relation."""

    @property
    def found(self) -> Mapping[str, Any]: ...


@torch.no_grad()
def role_effects(
    model: nn.Module,
    tokenizer: Tokenizer,
    roles: FoundRoles,
    *,
    draws: int = 20,
    seed: int = 0,
    progress: bool = True,
) -> RoleEffects:
    """What each role that was found is for: a behaviour stated beforehand, with its heads switched off.

    Beside it stand as many other heads of the same layers, drawn several times: switching off anything may
    lower anything. No effect is a result. Runs every prompt draws + 2 times.

    Args:
        model: a causal language model: of transformers, or a `headwise.models.Transformer` that decodes; in
            eval mode.
        tokenizer: its own.
        roles: what `headwise.roles(model, tokenizer)` found.
        draws: how many; where a layer does not have as many choices, all there are.
        seed: of the draws.
        progress: whether to show a bar, where it takes long.

    Raises:
        ArgumentError: a model that is not causal, says no next token, or is in training mode; fewer than one
            draw.
        AttentionBypassed: a layer whose heads are not in hand.

    Wang 2022 (IOI), section 2, on means; Clark 2019 on roles.
    """
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise ArgumentError(f"draws must be a whole number of at least 1: got {draws!r}; 20 show a spread")
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model must be a torch.nn.Module: got {type(model).__name__}; pass the model itself"
        )
    if not isinstance(getattr(roles, "found", None), Mapping):
        raise ArgumentError(
            f"roles must be what headwise.roles found: got {type(roles).__name__}; give all of its answer"
        )
    if any(module.training for module in model.modules()):
        raise ArgumentError(
            f"model must be in eval mode: {type(model).__name__} is in training; use model.eval()"
        )
    asked = [(name, behaviour) for name in roles.found for behaviour in behaviours_of(name)]
    unasked = [name for name in roles.found if not behaviours_of(name)]
    speaker = Speaker(model)
    tasks: dict[str, Asked] = {}
    rows = []
    for relation, behaviour in tracked(asked, "role effects", progress):
        if behaviour.name not in tasks:
            tasks[behaviour.name] = Asked(speaker, tokenizer, behaviour)
        rows.append(_effect(tasks[behaviour.name], relation, roles.found[relation], draws, seed))
    return RoleEffects(rows, unasked, METHOD)


def _effect(asked: Asked, relation: str, role: FoundRole, draws: int, seed: int) -> RoleEffect:
    """One row."""
    counts = asked.num_heads
    heads: list[Place] = [(layer, int(head)) for layer, head, *_ in role.heads]
    left_on: list[Place] = []
    others: list[list[Place]] = []
    every = True
    if asked.pairs:
        heads, left_on = _switched_off(heads, counts)
        others, every = _draws(heads, counts, draws, random.Random(f"{seed} {relation}"))
    whole, off = asked.margins(), asked.margins(heads)
    drawn = (
        torch.stack([asked.margins(other) for other in others])
        if others
        else whole.new_zeros(0, *whole.shape)
    )
    change = (off - whole).mean(1)  # [pairs]
    by_draw = (drawn - whole).mean(2)  # [draws, pairs]
    margin_low, margin_high = _interval(whole.mean(1))
    low, high = _interval(change)
    more_low, more_high = _interval(change - by_draw.mean(0)) if others else (math.nan, math.nan)
    return RoleEffect(
        relation=relation,
        behaviour=asked.behaviour.name,
        heads=tuple(heads),
        left_on=tuple(left_on),
        pairs=len(whole),
        dropped=asked.dropped,
        margin=_mean(whole),
        margin_low=margin_low,
        margin_high=margin_high,
        accuracy=_accuracy(whole),
        off=_mean(off),
        off_accuracy=_accuracy(off),
        change=_mean(change),
        low=low,
        high=high,
        draws=tuple(by_draw.mean(1).tolist()),
        more_low=more_low,
        more_high=more_high,
        every_draw=every,
    )


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else math.nan


def _accuracy(margins: Tensor) -> float:
    """The share above 0; a tie is half right."""
    return _mean((margins > 0).double() + 0.5 * (margins == 0).double())


def _interval(values: Tensor) -> tuple[float, float]:
    """95%, of the mean of one number per pair: prompts of a pair are not two cases."""
    if len(values) < 2:
        return math.nan, math.nan
    middle, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    return middle - SURE * error, middle + SURE * error


def _switched_off(heads: Sequence[Place], counts: Mapping[Layer, int]) -> tuple[list[Place], list[Place]]:
    """The heads of a role, best first, as long as their layers have as many others; and the rest."""
    off: list[Place] = []
    left: list[Place] = []
    taken = Counter[Layer]()
    for layer, head in dict.fromkeys(heads):
        if layer not in counts or head >= counts[layer]:
            there = (
                f"{len(counts)} layers" if layer not in counts else f"{counts[layer]} heads in layer {layer}"
            )
            raise ArgumentError(
                f"roles must be of this model: head {layer}.{head} was found, and there are {there}; measure "
                "them with headwise.roles(model, tokenizer)"
            )
        room = 2 * (taken[layer] + 1) <= counts[layer]
        taken[layer] += room
        (off if room else left).append((layer, head))
    return off or left[:1], left if off else left[1:]


def _draws(
    heads: Sequence[Place], counts: Mapping[Layer, int], draws: int, draw: random.Random
) -> tuple[list[list[Place]], bool]:
    """As many other heads of the same layers, in so many different ways, or all there are."""
    wanted = Counter(layer for layer, _ in heads)
    others = {layer: [h for h in range(counts[layer]) if (layer, h) not in heads] for layer in wanted}
    if any(len(others[layer]) < count for layer, count in wanted.items()):
        return [], True
    total = math.prod(math.comb(len(others[layer]), count) for layer, count in wanted.items())
    if total <= draws:
        ways = [itertools.combinations(others[layer], count) for layer, count in wanted.items()]
        return [_joined(wanted, way) for way in itertools.product(*ways)], True
    made: dict[tuple[tuple[int, ...], ...], None] = {}
    while len(made) < draws:
        way = tuple(tuple(sorted(draw.sample(others[layer], count))) for layer, count in wanted.items())
        made[way] = None
    return [_joined(wanted, way) for way in made], False


def _joined(layers: Mapping[Layer, int], way: Sequence[Sequence[int]]) -> list[Place]:
    return [(layer, head) for layer, chosen in zip(layers, way, strict=True) for head in chosen]
