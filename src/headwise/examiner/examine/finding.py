"""Finding the plan that works: which inputs, in which layout."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor, nn

from .. import recipe
from ..evidence import Problem
from ..recipe import Given, Weights
from .calling import Caller
from .encoding import FULL, PADDING, SAME_FOR_ALL, Way
from .failing import CAUGHT, problem_of
from .planning import plans
from .reacting import NOTHING, inputs_for, reactions
from .subject import Subject
from .wording import input_word

__all__ = ["find_caller", "find_layout"]


def find_caller(subject: Subject) -> tuple[Caller | None, Problem | None]:
    """The first plan and layout that give an output; else what went wrong with the likeliest.

    A function of q, k and v may take them in several layouts and be meant for one: that in which it is right
    comes before those in which it is not.
    """
    first: Problem | None = None
    found: Caller | None = None
    for layout, as_numpy in _layouts(subject):
        own = _for_layout(subject, layout)
        for plan in plans(own):
            caller = Caller(own, replace(plan, layout=layout, as_numpy=as_numpy))
            problem = _try(caller)
            if problem is None:
                caller = _ordered(caller)
                if _has_projections(subject) or _is_right(caller):
                    return caller, None
                found = found or caller
                break  # the next layout
            if first is None or (first.line is None and first.kind != "shape" and problem.line is not None):
                first = problem
    return found, None if found is not None else first


def _is_right(caller: Caller) -> bool:
    """Whether a function without weights of its own is attention as it is called here."""
    E, H = caller.subject.sizes.E, caller.subject.sizes.H
    one, zero = torch.eye(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    try:
        output = caller.call(*inputs).output.detach().double()
        truth = recipe.run(Given(*(x.double() for x in inputs)), Weights(*(one,) * 4, *(zero,) * 4), H).output
    except CAUGHT:
        return False
    return output.shape == truth.shape and torch.allclose(output, truth, atol=1e-6)


def _layouts(subject: Subject) -> list[tuple[str, bool]]:
    """(layout, whether as numpy arrays), the likeliest first."""
    if _has_projections(subject):
        found = ["batch first", "one sequence"]
    else:
        found = ["heads first", "batch first", "heads in the batch", "one sequence"]
        if subject.heads_given:
            found = ["batch first", "heads first", "one sequence"]
    return [(one, False) for one in found] + [(one, True) for one in found if subject.is_function]


def _has_projections(subject: Subject) -> bool:
    if any(tensor.ndim >= 2 for tensor in subject.parameters.values()):
        return True
    body = subject.body
    return isinstance(body, nn.Module) and any(True for _ in body.parameters())


def _for_layout(subject: Subject, layout: str) -> Subject:
    """Without projections and without heads in the layout there is one head."""
    if _has_projections(subject) or layout.startswith("heads") or subject.heads_given:
        return subject
    return replace(subject, sizes=subject.sizes.of_width(subject.sizes.E, 1))


def _try(caller: Caller) -> Problem | None:
    """Call it; where a mask is required and None will not do, with one that shows everything."""
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    try:
        caller.call(*inputs)
        return None
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files, "plain")
    for argument in caller.plan.needs_mask:
        for way in _any_way(argument):
            try:
                caller.call(*inputs, ways=(way,))
            except CAUGHT:
                continue
            caller.ways = (way,)
            return None
    return problem


def _any_way(argument: str) -> list[Way]:
    kinds: list[tuple[str, torch.dtype]] = [
        ("bool", torch.bool),
        ("0 and 1", torch.float64),
        ("added", torch.float64),
    ]
    shapes = [*FULL[:2], *SAME_FOR_ALL[:1], *PADDING[:2], *FULL[2:4]]
    if input_word(argument) == "lengths":
        return [Way(argument, shape, "lengths") for shape in ("[B]", "[B, T]")]
    return [Way(argument, shape, kind, True, number) for shape in shapes for kind, number in kinds]


def _ordered(caller: Caller) -> Caller:
    """Three inputs whose names say nothing, in the order in which the first is as long as the output."""
    slots = caller.plan.slots
    if len(slots) != 3 or any(input_word(name) for name, _ in slots):
        return caller
    inputs = inputs_for(caller, caller.subject.sizes.short, caller.subject.sizes.long)
    for order in permutations(("query", "key", "value")):
        pairs = tuple((name, slot) for (name, _), slot in zip(slots, order, strict=True))
        other = replace(caller, plan=replace(caller.plan, slots=pairs))
        try:
            other.call(*inputs)
        except CAUGHT:
            continue
        return other
    return caller


def _coupled(caller: Caller) -> bool:
    """Whether sample 0 reacts to sample 1."""
    length = caller.subject.sizes.long
    inputs = inputs_for(caller, length, length)
    base = caller.call(*inputs).output.detach()
    moved: list[Tensor] = []
    for one in inputs:
        seen = next((k for k in range(len(moved)) if inputs[k] is one), None)
        if seen is not None:
            moved.append(moved[seen])
            continue
        other = one.clone()
        other[1] += 1.0
        moved.append(other)
    again = caller.call(moved[0], moved[1], moved[2]).output.detach()
    return bool(((again - base)[0].abs() > NOTHING * base.abs().max()).any())


def find_layout(caller: Caller, text: str) -> tuple[Caller, str | None]:
    """Batch first or sequence first; a sentence where it had to be decided."""
    plan, body = caller.plan, caller.subject.body
    if plan.layout == "heads first":
        return _heads_inside(caller), None
    if plan.layout != "batch first":
        return caller, None
    other = replace(caller, plan=replace(plan, layout="sequence first"))
    try:
        mixes = _coupled(caller)
    except CAUGHT:
        return caller, None
    if not mixes:
        return caller, None
    try:
        if _coupled(other):
            return caller, "sample 0 reacts to sample 1: something mixes the sequences of a batch"
    except CAUGHT:
        return caller, None
    meant = getattr(body, "batch_first", None)
    if meant is False:
        return other, "inputs are [T, B, E], length first: batch_first is False"
    says = _layout_words(text)
    inside = (
        [one for one in body.modules() if isinstance(one, nn.MultiheadAttention)] if _is_module(body) else []
    )
    if says == "batch first" or meant is True or (says is None and inside):
        why = "the code names its axes batch first" if says else "nothing in the code says so"
        return caller, f"it computes as if the inputs were [T, B, E], but {why}"
    return other, "inputs are [T, B, E], length first"


def _is_module(body: object) -> bool:
    return isinstance(body, nn.Module)


_BATCH = r"(?:batch\w*|bs|bsz|b|n_?batch\w*)"
_TIME = r"(?:seq\w*|t|l|len\w*|length\w*|time\w*|\w+_len\w*|tgt_len|src_len|n_?seq\w*|q_len|query_len)"


def _layout_words(text: str) -> str | None:
    """What the names of axes in the code and its words say: "batch first", "sequence first", or nothing."""
    low = text.lower()
    batch = len(re.findall(rf"\b{_BATCH}\s*,\s*{_TIME}\s*,", low)) + len(
        re.findall(rf"\b{_BATCH}\s*=\s*\w+\.(?:size\(0\)|shape\[0\])", low)
    )
    time = len(re.findall(rf"\b{_TIME}\s*,\s*{_BATCH}\s*,", low)) + len(
        re.findall(rf"\b{_BATCH}\s*=\s*\w+\.(?:size\(1\)|shape\[1\])", low)
    )
    if batch == time:
        return None
    return "batch first" if batch > time else "sequence first"


def _heads_inside(caller: Caller) -> Caller:
    """[B, T, H, D] where positions do not see each other as [B, H, T, D] but do in this layout."""
    length = caller.subject.sizes.long
    apart = ~torch.eye(length, dtype=torch.bool)
    try:
        inputs = inputs_for(caller, length, length)
        if bool((reactions(caller, inputs, of="value") > NOTHING)[:, apart].any()):
            return caller
        other = replace(caller, plan=replace(caller.plan, layout="heads inside"))
        if bool((reactions(other, inputs, of="value") > NOTHING)[:, apart].any()):
            return other
    except CAUGHT:
        return caller
    return caller
