"""Step by step with a cache of keys and values: the prompt first, the rest with what came back.

Only where the convention is plain: an argument called so, and one thing beside the output that holds keys and
values. Whatever is raised here may be our doing, and is said, not accused.

Letters: B batch, T new tokens, S keys, P length of the prompt.
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

from ..evidence import Call, Evidence, Finding
from ..recipe import Given
from .call import Caller
from .probes import causal_mask, plain, share_off
from .subject import Subject, signature_of
from .surroundings import CAUGHT, problem_of

NAME = "cache"
CACHE = re.compile(
    r"(^|_)(past\w*|kv_?caches?|caches?|(k|v|key|value)s?_caches?|prev_kv|past_kv|layer_past)($|_)"
)
FLAG = re.compile(r"(use|return|output|with|keep|update|save)_")
PLACE = re.compile(r"(^|_)(pos|position\w*|offset|start\w*|index|idx|step|len\w*|size|max)($|_)")
SAME = 1e-5
NEW = (1, 3)  # tokens that are handed over with the cache


def cached(caller: Caller, evidence: Evidence, right: bool) -> Iterator[Finding]:
    """Prompt and rest against all at once, for one new token and for three."""
    every = list(signature_of(caller.subject.body).parameters.values())
    named = [one for one in every if CACHE.search(one.name.lower())]
    flags = [one.name for one in named if FLAG.match(one.name.lower()) or isinstance(one.default, bool)]
    held = [one for one in named if one.name not in flags and not PLACE.search(one.name.lower())]
    taken = {way.argument for way in caller.ways} | {name for name, _ in caller.plan.slots}
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
        if off <= SAME:
            continue
        how = "one new token" if T == 1 else f"{T} new tokens"
        verb = "gives" if T == 1 else "give"
        apart = (
            f"{how} with the cache of {L - T} {verb} another output than all {L} at once, off by {off:.0e}"
        )
        B = len(rest[0])
        top_left, free = (
            _equals(evidence, step, Given(rest[0], *inputs[1:], mask))
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


Three = tuple[Tensor, Tensor, Tensor]


def _cut(inputs: Three, samples: slice, positions: slice) -> Three:
    """A part of each; what was one tensor stays one."""
    made = {id(one): one[samples, positions] for one in inputs}
    query, key, value = (made[id(one)] for one in inputs)
    return query, key, value


def _equals(evidence: Evidence, output: Tensor, given: Given) -> bool:
    truth = None if evidence.weights is None else evidence.truth(Call(NAME, given))
    return truth is not None and share_off(output, truth.output) <= SAME


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
