"""The probes: what the code is asked, and what it answers.

Sizes are all different; q, k and v are distinct where the code takes three; masks differ from sample to
sample and leave no row empty, but for the probe that is about empty rows.

Running another body, or other numbers, through the plain probe.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..evidence import Evidence, Finding, ProbeCall
from ..recipe import ProbeInputs
from .call_plan import express
from .caller import Caller, inputs_for
from .conventions import padding_mask, random_mask
from .environment import CAUGHT, problem_of
from .subject import Subject, signature_of

Three = tuple[Tensor, Tensor, Tensor]
LOUD = 3e5
LOUD_PROBE = "scores x1e4 with mask"
LOUD_ALONE = "scores x1e4"
SHORT_PROBE = "another length"
LONGER = "longer memory"


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
        yield LONGER, inputs_for(caller, sizes.short, L, seed=101), None
    whole = causal_mask(B, L, L)
    padding = padding_mask(B, L, L)
    if caller.conventions:
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
    elif caller.conventions or causal:
        yield LOUD_PROBE, loud, _few(B, L, causal) if caller.conventions else None
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
            if express(caller.conventions, sample, H) is None:
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
        if bool((other & always).any(-1).all()) and express(
            caller.conventions, other, caller.subject.sizes.H
        ):
            return other
    return None


def probe(caller: Caller, causal: bool, always: Tensor | None = None) -> list[ProbeCall]:
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
        call = ProbeCall(name, ProbeInputs(query, key, value, truth, mask if causal else None))
        try:
            with torch.no_grad():
                answer = caller.call(*inputs, mask, with_weights=bool(caller.weights_switch))
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
        if caller.conventions and express(caller.conventions, mask, caller.subject.sizes.H) is not None:
            return mask
    return None


def cast(inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """In another dtype; what was one tensor stays one."""
    made = {id(one): one.to(dtype) for one in inputs}
    query, key, value = (made[id(one)] for one in inputs)
    return query, key, value


NAME = "cache"
CACHE = re.compile(
    r"(^|_)(past\w*|kv_?caches?|caches?|(k|v|key|value)s?_caches?|prev_kv|past_kv|layer_past)($|_)"
)
FLAG = re.compile(r"(use|return|output|with|keep|update|save)_")
PLACE = re.compile(r"(^|_)(pos|position\w*|offset|start\w*|index|idx|step|len\w*|size|max)($|_)")
SAME_IN_STEPS = 1e-5
NEW = (1, 3)  # tokens that are handed over with the cache


def cached(caller: Caller, evidence: Evidence, right: bool) -> Iterator[Finding]:
    """Prompt and rest against all at once, for one new token and for three."""
    every = list(signature_of(caller.subject.body).parameters.values())
    named = [one for one in every if CACHE.search(one.name.lower())]
    flags = [one.name for one in named if FLAG.match(one.name.lower()) or isinstance(one.default, bool)]
    held = [one for one in named if one.name not in flags and not PLACE.search(one.name.lower())]
    taken = {way.argument for way in caller.conventions} | {name for name, _ in caller.plan.slots}
    held = [one for one in held if one.name not in taken]
    if not held:
        return
    said = " and ".join(one.name for one in held)
    places = [one.name for one in every if PLACE.search(one.name.lower()) and one.name not in taken]
    why = ""
    if not right:
        why = "what it gives without it is not right, or not known to be"
    elif places:
        why = f"it goes with {places[0]}, and I do not know what that counts"
    elif caller.plan.needs_mask:
        why = f"it goes with {caller.plan.needs_mask[0]}, and I do not know how long a mask it wants"
    elif any(one.default is inspect.Parameter.empty for one in held) or caller.plan.as_numpy or len(held) > 2:
        why = "I do not know what to begin with"
    if why:
        yield Finding(said, "unknown", f"not tried: {why}")
        return
    names = tuple(one.name for one in held)
    try:
        with torch.no_grad():
            yield from _compared(caller, evidence, names, dict.fromkeys(flags, True))
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files)
        where = "" if problem.line is None else f" at line {problem.line}"
        detail = f"handed back what came with the output, it raises {problem.kind}{where}: {problem.message}"
        yield Finding(said, "unknown", f"not judged: {detail}")


def _compared(
    caller: Caller, evidence: Evidence, names: tuple[str, ...], flags: dict[str, object]
) -> Iterator[Finding]:
    said = " and ".join(names)
    inputs = plain(caller)
    if caller.plan.layout == "one sequence":  # called sample by sample: a cache is of one
        inputs = _cut(inputs, slice(0, 1), slice(None))
    L = inputs[0].shape[1]
    whole, _ = _ran(caller, inputs, flags)
    for T in NEW:
        _, raw = _ran(caller, _cut(inputs, slice(None), slice(0, L - T)), flags)
        caches = list(_caches(raw, L - T, len(names)))
        if len(caches) != 1:
            what = "nothing" if not caches else "more than one thing"
            detail = f"{what} came back beside the output that could be handed in again"
            yield Finding(said, "unknown", f"not tried: {detail}")
            return
        rest = _cut(inputs, slice(None), slice(L - T, L))
        step, _ = _ran(caller, rest, {**flags, **dict(zip(names, caches[0], strict=True))})
        wanted = whole[:, L - T :]
        off = share_off(step, wanted)
        if off <= SAME_IN_STEPS:
            continue
        how = "one new token" if T == 1 else f"{T} new tokens"
        verb = "gives" if T == 1 else "give"
        apart = (
            f"{how} with the cache of {L - T} {verb} another output than all {L} at once, off by {off:.0e}"
        )
        B = len(rest[0])
        top_left, free = (
            _equals(evidence, step, ProbeInputs(rest[0], *inputs[1:], mask))
            for mask in (causal_mask(B, T, L), None)
        )
        if top_left and not free:
            yield Finding(NAME, "wrong", apart, "causal mask not shifted by the cache")
        elif free and T > 1:
            detail = "several new tokens at once see each other, the later ones too; one at a time is right"
            yield Finding(said, "unknown", detail)
        elif caller.plan.self_only:
            yield Finding(NAME, "wrong", apart, "cache gives something else")
        else:  # it may keep keys and values of a memory, which new tokens do not add to
            yield Finding(said, "unknown", f"not judged: {apart}; what it keeps may be another memory's")
        return
    yield Finding(NAME, "right", "step by step with its cache gives what it gives at once")


def _cut(inputs: Three, samples: slice, positions: slice) -> Three:
    """A part of each; what was one tensor stays one."""
    made = {id(one): one[samples, positions] for one in inputs}
    query, key, value = (made[id(one)] for one in inputs)
    return query, key, value


def _equals(evidence: Evidence, output: Tensor, given: ProbeInputs) -> bool:
    truth = None if evidence.weights is None else evidence.truth(ProbeCall(NAME, given))
    return truth is not None and share_off(output, truth.output) <= SAME_IN_STEPS


def _ran(caller: Caller, inputs: Three, more: Mapping[str, object]) -> tuple[Tensor, object]:
    """The output and all that came back, with these arguments besides."""
    heard: list[object] = []

    def invoke(args: list[object], kwargs: dict[str, object], seed: int = 0) -> object:
        heard.append(Subject.invoke(subject, args, {**kwargs, **more}, seed))
        return heard[-1]

    subject = caller.subject
    watched = replace(caller, subject=copy.copy(subject))
    watched.subject.invoke = invoke  # type: ignore[method-assign]
    output = watched.call(*inputs).output.detach().double().clone()
    return output, heard[-1]


def _caches(raw: object, P: int, arguments: int) -> Iterator[tuple[object, ...]]:
    """What could be handed back, a value for each argument."""
    if isinstance(raw, Mapping):
        raw = list(raw.values())
    elif dataclasses.is_dataclass(raw) and not isinstance(raw, type):
        raw = [getattr(raw, one.name) for one in dataclasses.fields(raw)]
    if not isinstance(raw, (list, tuple)):
        return
    beside = list(raw)
    first = next((i for i, one in enumerate(beside) if isinstance(one, Tensor)), None)
    if first is not None:
        del beside[first]
    if arguments == 2:
        loose = [one for one in beside if isinstance(one, Tensor) and _kept(one, P)]
        pairs = [list(one) for one in beside if _is_pair(one, P) and isinstance(one, (list, tuple))]
        yield from (tuple(pair) for pair in ([loose] if len(loose) == 2 else []) + pairs)
        return
    for one in beside:
        if _is_stacked(one, P) or _is_pair(one, P):
            yield (one,)


def _is_stacked(value: object, P: int) -> bool:
    """Keys and values in one tensor, which no map of weights looks like."""
    if not isinstance(value, Tensor) or not _kept(value, P):
        return False
    shape = tuple(value.shape)
    return (len(shape) == 5 and 2 in shape[:2]) or (
        len(shape) == 4 and shape[0] == 2 and shape[-2:] != (P, P)
    )


def _is_pair(value: object, P: int) -> bool:
    """Keys and values, in a tuple, a list or a dict."""
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(parts, (list, tuple)):
        return False
    tensors = [one for one in parts if isinstance(one, Tensor)]
    return len(parts) == len(tensors) == 2 and all(_kept(one, P) for one in tensors)


def _kept(tensor: Tensor, P: int) -> bool:
    """Something for each position of the prompt."""
    return tensor.is_floating_point() and P in tensor.shape
