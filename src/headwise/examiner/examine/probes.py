"""The probes: inputs and masks for the learner's code, and what it returns for them.

All sizes differ; q, k and v are distinct where the code takes three; masks differ from sample to sample and
leave no row empty, except in the probe about empty rows.
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
from .caller import QKV, Caller, inputs_for, map_inputs
from .conventions import padding_mask, random_mask
from .environment import CAUGHT, problem_of
from .subject import Subject, signature_of

LARGE = 3e5
LOUD_PROBE = "scores x1e4 with mask"
LOUD_ALONE = "scores x1e4"
SHORT_PROBE = "another length"
LONGER = "longer memory"


def causal_mask(B: int, T: int, S: int) -> Tensor:
    """Return the causal mask, bool [B, T, S]."""
    return torch.ones(T, S, dtype=torch.bool).tril().expand(B, T, S).contiguous()


def non_contiguous(x: Tensor) -> Tensor:
    """Return the same numbers in a tensor that is not contiguous."""
    wide = torch.stack([x, torch.zeros_like(x)], -1)
    return wide[..., 0]


def _probes(caller: Caller, causal: bool) -> Iterator[tuple[str, QKV, Tensor | None]]:
    """Yield name, inputs and mask of every probe."""
    sizes, plan = caller.subject.sizes, caller.plan
    B, L = sizes.B, sizes.long
    inputs = plain(caller)
    yield "plain", inputs, None
    if not plan.self_only and not causal:
        yield LONGER, inputs_for(caller, sizes.short, L, seed=101), None
    if caller.conventions:
        masked = inputs_for(caller, seed=102)
        triangle, padding = causal_mask(B, L, L), padding_mask(B, L, L)
        yield "causal", masked, triangle
        yield "padding", masked, padding
        yield "random mask", inputs_for(caller, seed=103), random_mask(B, L, L, causal)
        yield "padding + causal", inputs_for(caller, seed=103), padding & triangle
        empty = random_mask(B, L, L, causal, seed=4)
        empty[1, 2] = False
        yield "empty row", masked, empty
    yield "batch of one", map_inputs(inputs, lambda x: x[2:3]), None
    yield "non-contiguous input", map_inputs(inputs, non_contiguous), None
    if caller.subject.exact:  # in float32 such scores are noise
        mask = _sparse_mask(B, L, causal) if caller.conventions else None
        yield LOUD_PROBE if caller.conventions or causal else LOUD_ALONE, _large_scores(caller), mask
    yield SHORT_PROBE, inputs_for(caller, sizes.short, sizes.short, seed=105), None


def _large_scores(caller: Caller) -> QKV:
    """Return inputs with scores beyond 1e5 of both signs, but close to each other within a row.

    The weights of visible keys stay ordinary; a hidden key that leaks gets them all.
    """
    sizes, plan = caller.subject.sizes, caller.plan
    query, key, value = inputs_for(caller, sizes.long, sizes.long, seed=104)
    if plan.self_only:
        x = LARGE**0.5 * query[:, :1] + 0.1 * query
        return x, x, x
    key = key[:, :1] + 2e-4 * key
    return LARGE * query, key, key if plan.memory_only else value


def _sparse_mask(B: int, L: int, causal: bool) -> Tensor:
    """Return a mask of one or two keys a query, bool [B, L, L]: a hidden key that leaks would win."""
    generator = torch.Generator().manual_seed(9)
    mask = torch.rand(B, L, L, generator=generator) < 0.2
    diagonal = torch.eye(L, dtype=torch.bool)
    return mask | (diagonal if causal else diagonal.roll(1, 0))


def _expressible_mask(caller: Caller, name: str, mask: Tensor) -> Tensor | None:
    """Return the mask of a probe, or one like it, that the arguments of the code can express."""
    B, T, S = mask.shape
    of_one_sample = mask[:1].expand_as(mask).contiguous()
    if name in {"causal", "padding + causal"}:
        candidates = [mask]
    elif name == "padding":
        candidates = [mask, padding_mask(B, T, S, same=True)]
    elif name == "empty row":
        keys = padding_mask(B, T, S)
        keys[1] = False
        candidates = [mask, mask[1:2].expand_as(mask).contiguous(), keys]
    else:
        candidates = [mask, of_one_sample, padding_mask(B, T, S, holes=True)]
    if name == LOUD_PROBE:
        candidates += [causal_mask(B, T, S), padding_mask(B, T, S)]
    return next((candidate for candidate in candidates if can_express(caller, candidate)), None)


def can_express(caller: Caller, mask: Tensor) -> bool:
    """Return True if the arguments of the code can express a mask, bool [B, T, S]."""
    samples = mask.split(1) if caller.plan.layout == "one sequence" else [mask]
    H = caller.subject.sizes.H
    return all(express(caller.conventions, sample, H) is not None for sample in samples)


def _leaves_some(caller: Caller, mask: Tensor, always: Tensor) -> Tensor | None:
    """Return the mask, or one that hides a single key, if every query keeps a key of `always`, [T, S]."""
    B, _, S = mask.shape
    one_hidden = torch.ones_like(mask)
    for b in range(B):
        one_hidden[b, :, (1 + 2 * b) % S] = False
    for candidate in (mask, one_hidden, one_hidden[:1].expand_as(mask).contiguous()):
        leaves_some = bool((candidate & always).any(-1).all())
        if leaves_some and express(caller.conventions, candidate, caller.subject.sizes.H):
            return candidate
    return None


def probe(caller: Caller, causal: bool, always: Tensor | None = None) -> list[ProbeCall]:
    """Call the code with every probe.

    Args:
        always: bool [L, L], which keys each query attends to without a mask.
    """
    calls = []
    for name, inputs, mask in _probes(caller, causal):
        if mask is not None:
            mask = _expressible_mask(caller, name, mask)
            if mask is not None and always is not None and name != "empty row":
                mask = _leaves_some(caller, mask, always)
            if mask is None:
                continue
        calls.append(call_with(caller, name, inputs, mask, causal, bool(caller.weights_switch)))
    return calls


def call_with(
    caller: Caller, name: str, inputs: QKV, mask: Tensor | None, causal: bool, with_weights: bool = False
) -> ProbeCall:
    """Call the code once; return inputs and output, or the problem.

    Args:
        name: of the probe.
        causal: the code applies a causal mask by itself.
    """
    B, T, S = len(inputs[0]), inputs[0].shape[1], inputs[1].shape[1]
    whole_mask = mask
    if causal:
        whole_mask = causal_mask(B, T, S) if mask is None else mask & causal_mask(B, T, S)
    query, key, value = (x.clone() for x in inputs)  # the code may write to its inputs
    call = ProbeCall(name, ProbeInputs(query, key, value, whole_mask, mask if causal else None))
    try:
        with torch.no_grad():
            result = caller.call(*inputs, mask, with_weights=with_weights)
        call.output = result.output.detach().double().clone()
        call.weights = None if result.weights is None else result.weights.detach().double().clone()
    except CAUGHT as error:
        call.problem = problem_of(error, "call", caller.subject.files, name)
    return call


SAME = 1e-9


def share_off(output: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest number that is wanted."""
    if output.shape != wanted.shape:
        return float("inf")
    off = (output.double() - wanted.double()).abs().max() / wanted.abs().max().clamp_min(1e-30)
    return float(off.nan_to_num(torch.inf))


def plain(caller: Caller) -> QKV:
    """Return the inputs of the plain probe."""
    return inputs_for(caller, seed=100)


def run_body(caller: Caller, body: object, seed: int = 0, calm: bool = False) -> Tensor:
    """Return the output of another body for the plain probe."""
    other = replace(caller, subject=replace(caller.subject, body=body, calm=calm))
    with torch.no_grad():
        return other.call(*plain(caller), seed=seed).output.detach()


def some_mask(caller: Caller) -> Tensor | None:
    """Return a mask that the code can express and that leaves no row empty, bool [B, T, S]; else None."""
    B, L = caller.subject.sizes.B, caller.subject.sizes.long
    if caller.plan.layout == "one sequence":
        return None
    for mask in (padding_mask(B, L, L), causal_mask(B, L, L), padding_mask(B, L, L, same=True)):
        if can_express(caller, mask):
            return mask
    return None


def cast(inputs: QKV, dtype: torch.dtype) -> QKV:
    """Return the inputs in another dtype; arguments that are one tensor stay one tensor."""
    return map_inputs(inputs, lambda x: x.to(dtype))


NAME = "cache"
CACHE = re.compile(
    r"(^|_)(past\w*|kv_?caches?|caches?|(k|v|key|value)s?_caches?|prev_kv|past_kv|layer_past)($|_)"
)
FLAG = re.compile(r"(use|return|output|with|keep|update|save)_")
PLACE = re.compile(r"(^|_)(pos|position\w*|offset|start\w*|index|idx|step|len\w*|size|max)($|_)")
SAME_IN_STEPS = 1e-5
NEW = (1, 3)  # tokens that are handed over with the cache


def cached(caller: Caller, evidence: Evidence, right: bool) -> Iterator[Finding]:
    """Compare a call with a cache, for one new token and for three, with one call on all tokens."""
    parameters = signature_of(caller.subject.body).parameters
    named = [name for name in parameters if CACHE.search(name.lower())]
    flags = [n for n in named if FLAG.match(n.lower()) or isinstance(parameters[n].default, bool)]
    used = {convention.argument for convention in caller.conventions} | {
        name for name, _ in caller.plan.slots
    }
    places = [name for name in parameters if PLACE.search(name.lower()) and name not in used]
    names = tuple(name for name in named if name not in used and name not in (*flags, *places))
    if not names:
        return
    title = " and ".join(names)
    reason = ""
    if not right:
        reason = "the output without the cache is wrong, or could not be compared"
    elif places:
        reason = f"it needs {places[0]}, and it is unknown what that argument counts"
    elif caller.plan.needs_mask:
        reason = f"it needs {caller.plan.needs_mask[0]}, and the length of that mask is unknown"
    elif (
        len(names) > 2 or caller.plan.as_numpy
        or any(parameters[name].default is inspect.Parameter.empty for name in names)
    ):  # fmt: skip
        reason = "the value of the cache for the first call is unknown"
    if reason:
        yield Finding(title, "unknown", f"not tried: {reason}")
        return
    try:
        with torch.no_grad():
            yield from _compare_steps(caller, evidence, names, dict.fromkeys(flags, True))
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files)
        where = "" if problem.line is None else f" at line {problem.line}"
        detail = f"called with the cache that it returned, it raises {problem.kind}{where}: {problem.message}"
        yield Finding(title, "unknown", f"not judged: {detail}")


def _compare_steps(
    caller: Caller, evidence: Evidence, names: tuple[str, ...], flags: dict[str, object]
) -> Iterator[Finding]:
    """Call the code on a prompt, then on the new tokens with what came back."""
    name = " and ".join(names)
    inputs = plain(caller)
    if caller.plan.layout == "one sequence":  # called sample by sample: a cache is of one
        inputs = _part(inputs, slice(0, 1), slice(None))
    L = inputs[0].shape[1]
    whole, _ = _call_with(caller, inputs, flags)
    for T in NEW:
        _, raw = _call_with(caller, _part(inputs, slice(None), slice(0, L - T)), flags)
        caches = list(_returned_caches(raw, L - T, len(names)))
        if len(caches) != 1:
            returned = "no value" if not caches else "more than one value"
            detail = f"besides the output it returned {returned} that could be passed to the next call"
            yield Finding(name, "unknown", f"not tried: {detail}")
            return
        rest = _part(inputs, slice(None), slice(L - T, L))
        step, _ = _call_with(caller, rest, {**flags, **dict(zip(names, caches[0], strict=True))})
        wanted = whole[:, L - T :]
        off = share_off(step, wanted)
        if off <= SAME_IN_STEPS:
            continue
        tokens = "one new token" if T == 1 else f"{T} new tokens"
        verb = "gives" if T == 1 else "give"
        difference = (
            f"{tokens} with the cache of {L - T} {verb} an output that differs by {off:.0e} "
            f"from that of all {L} at once"
        )
        B = len(rest[0])
        top_left, whole_context = (
            _matches_recipe(evidence, step, ProbeInputs(rest[0], *inputs[1:], mask))
            for mask in (causal_mask(B, T, L), None)
        )
        if top_left and not whole_context:
            yield Finding(NAME, "wrong", difference, "causal mask not shifted by the cache")
        elif whole_context and T > 1:
            detail = (
                "of several new tokens in one call, earlier ones attend to later ones; one token "
                "per call is right"
            )
            yield Finding(name, "unknown", detail)
        elif caller.plan.self_only:
            yield Finding(NAME, "wrong", difference, "cache gives something else")
        else:  # it may keep keys and values of a memory, which new tokens do not add to
            yield Finding(
                name, "unknown", f"not judged: {difference}; its cache may belong to a different memory"
            )
        return
    yield Finding(NAME, "right", "the outputs step by step with its cache equal those of one call")


def _part(inputs: QKV, samples: slice, positions: slice) -> QKV:
    return map_inputs(inputs, lambda x: x[samples, positions])


def _matches_recipe(evidence: Evidence, output: Tensor, inputs: ProbeInputs) -> bool:
    """Return True if an output is the recipe's for these inputs."""
    truth = None if evidence.weights is None else evidence.truth(ProbeCall(NAME, inputs))
    return truth is not None and share_off(output, truth.output) <= SAME_IN_STEPS


def _call_with(caller: Caller, inputs: QKV, arguments: Mapping[str, object]) -> tuple[Tensor, object]:
    """Return the output and everything the code returned, for a call with more arguments."""
    results: list[object] = []

    def invoke(args: list[object], kwargs: dict[str, object], seed: int = 0) -> object:
        results.append(Subject.invoke(subject, args, {**kwargs, **arguments}, seed))
        return results[-1]

    subject = caller.subject
    listening = replace(caller, subject=copy.copy(subject))
    listening.subject.invoke = invoke  # type: ignore[method-assign]
    output = listening.call(*inputs).output.detach().double().clone()
    return output, results[-1]


def _returned_caches(raw: object, P: int, count: int) -> Iterator[tuple[object, ...]]:
    """Yield what could be passed back as a cache: one value for each argument."""
    if isinstance(raw, Mapping):
        raw = list(raw.values())
    elif dataclasses.is_dataclass(raw) and not isinstance(raw, type):
        raw = [getattr(raw, item.name) for item in dataclasses.fields(raw)]
    if not isinstance(raw, (list, tuple)):
        return
    beside = list(raw)
    first = next((i for i, item in enumerate(beside) if isinstance(item, Tensor)), None)
    if first is not None:
        del beside[first]
    if count == 2:
        loose = [item for item in beside if isinstance(item, Tensor) and _has_positions(item, P)]
        pairs = [list(item) for item in beside if _is_pair(item, P) and isinstance(item, (list, tuple))]
        yield from (tuple(pair) for pair in ([loose] if len(loose) == 2 else []) + pairs)
        return
    for item in beside:
        if _is_stacked(item, P) or _is_pair(item, P):
            yield (item,)


def _is_stacked(value: object, P: int) -> bool:
    """Return True for keys and values in one tensor, which has not the shape of weights."""
    if not isinstance(value, Tensor) or not _has_positions(value, P):
        return False
    shape = tuple(value.shape)
    return (len(shape) == 5 and 2 in shape[:2]) or (
        len(shape) == 4 and shape[0] == 2 and shape[-2:] != (P, P)
    )


def _is_pair(value: object, P: int) -> bool:
    """Return True for keys and values in a tuple, a list or a dict."""
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(parts, (list, tuple)):
        return False
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return len(parts) == len(tensors) == 2 and all(_has_positions(part, P) for part in tensors)


def _has_positions(tensor: Tensor, P: int) -> bool:
    """Return True if one axis of a tensor has the size of the prompt."""
    return tensor.is_floating_point() and P in tensor.shape
