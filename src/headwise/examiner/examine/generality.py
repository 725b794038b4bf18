"""What must hold at other sizes than those of the probes: lengths, widths, values of another size.

Right numbers at one set of sizes can come from a constant that happens to fit it. Only code that was right
so far is asked here; what raises at sizes that nobody promised is not accused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..evidence import Evidence, Finding, ProbeCall
from ..recipe import ProbeInputs, Weights, run
from .call_plan import express
from .caller import Caller, inputs_for
from .construction import Construction
from .conventions import likely_conventions, padding_mask
from .environment import CAUGHT, seed
from .probes import causal_mask, plain, share_off, some_mask
from .recognition import describe_position_rule
from .subject import Sizes, in_precision

LONG_PROBE = "many positions"
FEW, MANY = 3, 29  # positions: fewer and more than any other probe has
DRAWN = (17, MANY + 1)  # of questions whose numbers nobody can know before: no more than was tried
NEAR = 1e-5
# (width, heads, batch, longest, shorter): no two of a row alike, and none of them as in the other probes
FEWER_HEADS = ((40, 2, 5, 11, 9), (32, 2, 5, 11, 9))
MORE_HEADS = ((80, 8, 5, 13, 11), (96, 8, 5, 11, 7))
WIDER_VALUES = 3  # channels more than a query's


def other_sizes(construction: Construction | None) -> list[Sizes]:
    """Fewer heads and more; widths drawn anew: a constant fits these by chance only."""
    drawn = random.SystemRandom()
    usual = Sizes() if construction is None else construction.sizes
    found = []
    for rows in (FEWER_HEADS, MORE_HEADS):
        width, heads, batch, longest, shorter = drawn.choice(rows)
        sizes = usual.of_width(width, heads)
        found.append(replace(sizes, B=batch, long=longest, short=shorter, value=sizes.D + WIDER_VALUES))
    return found


def other_lengths(caller: Caller, evidence: Evidence) -> Iterator[Finding]:
    """Three positions, then many; each as the recipe has it. Many become one more call of the evidence."""
    if evidence.designs or caller.plan.layout in ("image", "volume") or caller.subject.sizes.E == MANY:
        return
    name = f"lengths of {FEW} to {MANY}"
    asked: list[tuple[int, Tensor | None]] = [(FEW, None), (MANY, None)]
    asked += [(MANY, mask) for mask in _masks(caller)]
    for length, mask in asked:
        inputs = inputs_for(caller, length, length, seed=108)
        query, key, value = (one.clone() for one in inputs)
        hidden = causal_mask(len(query), length, length) if evidence.conventions.always_causal else None
        both = mask if hidden is None else hidden if mask is None else mask & hidden
        call = ProbeCall(
            LONG_PROBE, ProbeInputs(query, key, value, both, mask if hidden is not None else None)
        )
        try:
            with torch.no_grad():
                call.output = caller.call(*inputs, mask).output.detach().double()
        except CAUGHT:
            return  # it may be built for so many positions and no more
        truth = evidence.truth(call)
        if truth is None:
            return
        off = share_off(call.output, truth.output)
        if off > NEAR:
            assert evidence.weights is not None
            inside = ""
            if mask is None:
                inside = describe_position_rule(caller, evidence.weights, evidence.num_heads, inputs)
            if inside:  # it begins farther away than the other probes reach: a choice, and no fault
                yield Finding(name, "unknown", f"at {length} positions there is {inside}")
                return
            with_mask = "" if mask is None else " with a mask"
            detail = (
                f"right at {caller.subject.sizes.long} positions, and off by {off:.0e} at {length}{with_mask}"
            )
            yield Finding(name, "wrong", detail, "wrong at other lengths")
            return
        if mask is None and length == MANY:
            evidence.calls.append(call)
    yield Finding(name, "right", f"right at {FEW} positions and at {MANY}")


def _masks(caller: Caller) -> list[Tensor]:
    """One mask for many positions that its arguments can say, if there is one."""
    B = caller.subject.sizes.B
    if caller.plan.layout == "one sequence":
        return []
    choices = (
        causal_mask(B, MANY, MANY),
        padding_mask(B, MANY, MANY),
        padding_mask(B, MANY, MANY, same=True),
    )
    said = [
        one
        for one in choices
        if caller.conventions and express(caller.conventions, one, caller.subject.sizes.H)
    ]
    return said[:1]


def twin(caller: Caller) -> Caller | None:
    """A fresh instance with the same parameters; its buffers, masks among them, are as it made them itself.

    None where it cannot be made, or its parameters have other shapes: some are drawn.
    """
    subject = caller.subject
    if subject.make is None or not isinstance(subject.body, nn.Module):
        return None
    weights = dict(subject.body.named_parameters())
    try:
        seed(0)
        body = in_precision(subject.make(), subject.dtype).eval()
        if {k: p.shape for k, p in body.named_parameters()} != {k: p.shape for k, p in weights.items()}:
            return None
        body.load_state_dict(weights, strict=False)
    except CAUGHT:
        return None
    return replace(caller, subject=replace(subject, body=body, calm=True))


def state_kept(caller: Caller, same: float) -> str:
    """How an instance that was asked something else before answers otherwise; "" where it does not."""
    sizes = caller.subject.sizes
    few, many = sizes.short, sizes.long
    questions: list[tuple[str, tuple[int, Tensor | None], tuple[int, Tensor | None]]] = []
    by_mask = _masked_twin(caller)
    if by_mask is not None:
        caller, mask = by_mask
        other = mask.flip(0)
        other = torch.ones_like(mask) if torch.equal(other, mask) else other
        questions.append(("another mask the same call", (many, other), (many, mask)))
    questions.append((f"{few} positions, one with {many}", (few, None), (many, None)))
    for words, before, asked in questions:
        after, outputs = f"after a call with {words}", list[Tensor]()
        for first in (None, before):
            one = twin(caller)
            if one is None:
                return ""
            try:
                _ = None if first is None else _answer(one, *first)
            except CAUGHT:
                break
            try:
                outputs.append(_answer(one, *asked).nan_to_num())
            except CAUGHT as error:
                if outputs:
                    return f"{after} raises {type(error).__name__}"
                break
        if len(outputs) == 2 and (off := share_off(outputs[1], outputs[0])) > same:
            return f"{after} gives another output, off by {off:.0e}"
    return ""


@torch.no_grad()
def _answer(caller: Caller, length: int, mask: Tensor | None) -> Tensor:
    """To inputs that are drawn anew: it may write to those it was given."""
    return caller.call(*inputs_for(caller, length, length, seed=109), mask).output.detach()


def _masked_twin(caller: Caller) -> tuple[Caller, Tensor] | None:
    """A mask that can be said, bool [B, T, S]; in the first way that runs, where none was understood."""
    mask = some_mask(caller)
    if mask is not None or caller.conventions:
        return None if mask is None else (caller, mask)
    for way in [way for argument in caller.plan.masks for way in likely_conventions(argument)]:
        told = replace(caller, conventions=(way,))
        mask, one = some_mask(told), twin(told)
        try:
            if mask is not None and one is not None:
                _answer(one, caller.subject.sizes.long, mask)
                return told, mask
        except CAUGHT:
            continue
    return None


def seeds_kept(caller: Caller) -> Iterator[Finding]:
    """Random numbers drawn after a call depend on the seed set before it."""
    drawn: list[tuple[float, ...]] = []
    numpy = sys.modules.get("numpy")
    for number in (11, 12):
        with torch.no_grad():
            caller.call(*plain(caller), seed=number)
        after = [float(torch.rand(1, dtype=torch.float64)), random.random()]
        drawn.append((*after, *([] if numpy is None else [float(numpy.random.rand())])))
    whose = [
        what for what, one, other in zip(("torch", "Python", "NumPy"), *drawn, strict=False) if one == other
    ]
    if whose:
        detail = f"whatever seed was set before a call, {whose[0]} draws the same numbers after it"
        yield Finding("random numbers left alone", "wrong", detail, "seed set in forward")


def wider_values(caller: Caller, evidence: Evidence) -> Iterator[Finding]:
    """A function of q, k and v: values may have other channels than queries and keys."""
    subject, plan, weights = caller.subject, caller.plan, evidence.weights
    if not subject.is_function or subject.parameters or plan.self_only or plan.memory_only or weights is None:
        return
    if evidence.designs or not any(slot == "value" for _, slot in plan.slots):
        return
    name, sizes = "values of another size", subject.sizes
    width = sizes.E + WIDER_VALUES * sizes.H
    query, key, _ = inputs_for(caller, sizes.long, sizes.long, seed=110)
    dice = torch.Generator().manual_seed(111)
    value = torch.randn(sizes.B, sizes.long, width, generator=dice).double()
    one, none = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    wide = Weights(weights.q, weights.k, one, one, weights.q_bias, weights.k_bias, none, none)
    mask = causal_mask(len(query), sizes.long, sizes.long) if evidence.conventions.always_causal else None
    truth = run(ProbeInputs(query, key, value, mask), wide, evidence.num_heads).output
    channels = f"keys of {sizes.D} channels and values of {width // sizes.H}"
    try:
        with torch.no_grad():
            output = caller.call(query, key, value).output.detach().double()
    except CAUGHT as error:
        detail = f"{channels} raise {type(error).__name__}"
        yield Finding(name, "wrong", detail, "values as wide as keys only")
        return
    off = share_off(output, truth)
    if off <= NEAR:
        yield Finding(name, "right", f"right with {channels}")
    else:
        how = f"off by {off:.0e}" if output.shape == truth.shape else f"of shape {list(output.shape)}"
        yield Finding(name, "wrong", f"with {channels} the output is {how}", "wrong with wider values")
