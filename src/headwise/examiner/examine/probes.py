"""The probes: what the code is asked, and what it answers.

Sizes are all different; q, k and v are distinct where the code takes three; masks differ from sample to
sample and leave no row empty, but for the probe that is about empty rows.

Running another body, or other numbers, through the plain probe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..evidence import Call
from ..recipe import Given
from .call import Caller, inputs_for
from .conventions import padding_mask, random_mask
from .plan import express
from .surroundings import CAUGHT, problem_of

Three = tuple[Tensor, Tensor, Tensor]
LOUD = 3e5
LOUD_PROBE = "scores x1e4 with mask"
LOUD_ALONE = "scores x1e4"
SHORT_PROBE = "another length"


def causal_mask(B: int, T: int, S: int) -> Tensor:
    """bool [B, T, S]: the past and itself."""
    return torch.ones(T, S, dtype=torch.bool).tril().expand(B, T, S).contiguous()


def apart(x: Tensor) -> Tensor:
    """The same numbers, every other one in memory."""
    wide = torch.stack([x, torch.zeros_like(x)], -1)
    return wide[..., 0]


def _same(inputs: Three, make: object) -> Three:
    """One function over the three; what was one tensor stays one."""
    made: dict[int, Tensor] = {}
    for one in inputs:
        if id(one) not in made:
            made[id(one)] = make(one)  # type: ignore[operator]
    query, key, value = (made[id(one)] for one in inputs)
    return query, key, value


def _asked(caller: Caller, causal: bool) -> Iterator[tuple[str, Three, Tensor | None]]:
    """(name, inputs, mask to hand over)."""
    sizes, plan = caller.subject.sizes, caller.plan
    B, L = sizes.B, sizes.long
    inputs = inputs_for(caller, L, L, seed=100)
    yield "plain", inputs, None
    if not plan.self_only and not causal:
        yield "longer memory", inputs_for(caller, sizes.short, L, seed=101), None
    whole = causal_mask(B, L, L)
    padding = padding_mask(B, L, L)
    if caller.ways:
        masked = inputs_for(caller, L, L, seed=102)
        yield "causal", masked, whole
        yield "padding", masked, padding
        for name, mask in (
            ("random mask", random_mask(B, L, L, causal)),
            ("padding causal", padding & whole),
        ):
            yield name, inputs_for(caller, L, L, seed=103), mask
        empty = random_mask(B, L, L, causal, seed=4)
        empty[1, 2] = False
        yield "empty row", masked, empty
    yield "batch of one", _same(inputs, lambda x: x[2:3]), None
    yield "non-contiguous input", _same(inputs, apart), None
    loud = _loud(caller)
    if not caller.subject.exact:
        pass  # in float32 such scores are noise
    elif caller.ways or causal:
        yield LOUD_PROBE, loud, _few(B, L, causal) if caller.ways else None
    else:
        yield LOUD_ALONE, loud, None
    short = inputs_for(caller, sizes.short, sizes.short, seed=105)
    yield SHORT_PROBE, short, None


def _loud(caller: Caller) -> Three:
    """Scores beyond 1e5, of both signs, but near each other within a row: only what leaks shows."""
    sizes, plan = caller.subject.sizes, caller.plan
    query, key, value = inputs_for(caller, sizes.long, sizes.long, seed=104)
    if plan.self_only:
        x = LOUD**0.5 * query[:, :1] + 0.1 * query
        return x, x, x
    key = key[:, :1] + 2e-4 * key
    return LOUD * query, key, key if plan.memory_only else value


def _few(B: int, L: int, causal: bool) -> Tensor:
    """bool [B, L, L]: one or two keys a query, so that what is hidden would win if it leaked."""
    dice = torch.Generator().manual_seed(9)
    mask = torch.rand(B, L, L, generator=dice) < 0.2
    return (
        mask | torch.eye(L, dtype=torch.bool) if causal else mask | torch.eye(L, dtype=torch.bool).roll(1, 0)
    )


def _sayable(caller: Caller, name: str, mask: Tensor, causal: bool) -> Tensor | None:
    """The mask, or one like it that the code's arguments can say."""
    B, T, S = mask.shape
    H = caller.subject.sizes.H
    keys = padding_mask(B, T, S, holes=True)
    if name == "empty row":
        keys = padding_mask(B, T, S)
        keys[1] = False
    choices = [mask, mask[:1].expand_as(mask).contiguous(), keys]
    if name == "padding":
        choices = [mask, padding_mask(B, T, S, same=True)]
    elif name in {"causal", "padding causal"}:
        choices = [mask]
    elif name == "empty row":
        same = mask.clone()
        same[:] = mask[1]
        choices[1] = same
    elif name == LOUD_PROBE:
        choices += [causal_mask(B, T, S), padding_mask(B, T, S)]
    for one in choices:
        for sample in one.split(1) if caller.plan.layout == "one sequence" else [one]:
            if express(caller.ways, sample, H) is None:
                break
        else:
            return one
    return None


def _leaves_some(caller: Caller, mask: Tensor, always: Tensor) -> Tensor | None:
    """The mask, or one that hides a single key, so that no query loses all it sees by itself, [T, S]."""
    B, _, S = mask.shape
    one = torch.ones_like(mask)
    for b in range(B):
        one[b, :, (1 + 2 * b) % S] = False
    for other in (mask, one, one[:1].expand_as(one).contiguous()):
        if bool((other & always).any(-1).all()) and express(caller.ways, other, caller.subject.sizes.H):
            return other
    return None


def probe(caller: Caller, causal: bool, always: Tensor | None = None) -> list[Call]:
    """Every probe the code can be asked; `always`: what it sees by itself, bool [L, L]."""
    calls = []
    for name, inputs, mask in _asked(caller, causal):
        if mask is not None:
            mask = _sayable(caller, name, mask, causal)
            if mask is not None and always is not None and name != "empty row":
                mask = _leaves_some(caller, mask, always)
            if mask is None:
                continue
        B, T, S = len(inputs[0]), inputs[0].shape[1], inputs[1].shape[1]
        truth = mask
        if causal:
            truth = causal_mask(B, T, S) if mask is None else mask & causal_mask(B, T, S)
        query, key, value = (one.clone() for one in inputs)
        call = Call(name, Given(query, key, value, truth, mask if causal else None))
        try:
            with torch.no_grad():
                answer = caller.call(*inputs, mask, asks=bool(caller.asks))
            call.output = answer.output.detach().double().clone()
            call.weights = None if answer.weights is None else answer.weights.detach().double().clone()
        except CAUGHT as error:
            call.problem = problem_of(error, "call", caller.subject.files, name)
        calls.append(call)
    return calls


SAME = 1e-9


def share_off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference as a share of the largest number."""
    if found.shape != wanted.shape:
        return float("inf")
    off = (found.double() - wanted.double()).abs().max() / wanted.abs().max().clamp_min(1e-30)
    return float(off.nan_to_num(torch.inf))


def plain(caller: Caller) -> tuple[Tensor, Tensor, Tensor]:
    length = caller.subject.sizes.long
    return inputs_for(caller, length, length, seed=100)


def run_body(caller: Caller, body: object, seed: int = 0, calm: bool = False) -> Tensor:
    """The plain probe through another body."""
    other = replace(caller, subject=replace(caller.subject, body=body, calm=calm))
    with torch.no_grad():
        return other.call(*plain(caller), seed=seed).output.detach()


def some_mask(caller: Caller) -> Tensor | None:
    """bool [B, T, S] that can be said and leaves no row empty."""
    B, L = caller.subject.sizes.B, caller.subject.sizes.long
    if caller.plan.layout == "one sequence":
        return None
    for mask in (padding_mask(B, L, L), causal_mask(B, L, L), padding_mask(B, L, L, same=True)):
        if caller.ways and express(caller.ways, mask, caller.subject.sizes.H) is not None:
            return mask
    return None


def cast(inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """In another dtype; what was one tensor stays one."""
    made = {id(one): one.to(dtype) for one in inputs}
    query, key, value = (made[id(one)] for one in inputs)
    return query, key, value
