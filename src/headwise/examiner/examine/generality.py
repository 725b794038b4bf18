"""Whether right code is also right at other sizes, after other calls, and with values of another width.

Right numbers at one set of sizes can come from a constant that happens to fit it. Only code that was right
so far is examined; an exception at sizes that nobody promised is no fault.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..evidence import Evidence, Finding
from ..recipe import ProbeInputs, Weights, run
from .caller import Caller, inputs_for
from .construction import Construction
from .conventions import likely_conventions, padding_mask
from .environment import CAUGHT, seed
from .probes import call_with, can_express, causal_mask, plain, share_off, some_mask
from .recognition import describe_position_rule
from .subject import Sizes, with_parameters_of

LONG_PROBE = "many positions"
FEW, MANY = 3, 29  # positions: fewer and more than any other probe has
DRAWN = (17, MANY + 1)  # of questions whose numbers nobody can know before: no more than was tried
NEAR = 1e-5
# (width, heads, batch, longest, shorter): no two of a row alike, and none of them as in the other probes
FEWER_HEADS = ((40, 2, 5, 11, 9), (32, 2, 5, 11, 9))
MORE_HEADS = ((80, 8, 5, 13, 11), (96, 8, 5, 11, 7))
WIDER_VALUES = 3  # channels more than a query's


def other_sizes(construction: Construction | None) -> list[Sizes]:
    """Return sizes with fewer and with more heads, of random widths, which a constant fits only by chance."""
    generator = random.SystemRandom()
    usual = Sizes() if construction is None else construction.sizes
    candidates = []
    for rows in (FEWER_HEADS, MORE_HEADS):
        width, heads, batch, longest, shorter = generator.choice(rows)
        sizes = usual.of_width(width, heads)
        candidates.append(replace(sizes, B=batch, long=longest, short=shorter, value=sizes.D + WIDER_VALUES))
    return candidates


def other_lengths(caller: Caller, evidence: Evidence) -> Iterator[Finding]:
    """Compare calls with few and with many positions with the recipe; one of them becomes evidence."""
    if evidence.designs or caller.plan.layout in ("image", "volume") or caller.subject.sizes.E == MANY:
        return
    name = f"sequence lengths {FEW} to {MANY}"
    cases: list[tuple[int, Tensor | None]] = [(FEW, None), (MANY, None)]
    cases += [(MANY, mask) for mask in _masks(caller)]
    for length, mask in cases:
        inputs = inputs_for(caller, length, length, seed=108)
        call = call_with(caller, LONG_PROBE, inputs, mask, evidence.conventions.always_causal)
        if call.output is None:
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
                usual = caller.subject.sizes.long
                detail = (
                    f"with {length} positions, your code has {inside}; with {usual} positions it does not, "
                    "so headwise cannot judge whether it is intended"
                )
                yield Finding(name, "unknown", detail)
                return
            with_mask = "" if mask is None else " with a mask"
            detail = (
                f"right for {caller.subject.sizes.long} positions; for {length}{with_mask}, the output "
                f"differs by {off:.0e}"
            )
            yield Finding(name, "wrong", detail, "wrong at other lengths")
            return
        if mask is None and length == MANY:
            evidence.calls.append(call)
    yield Finding(name, "right", f"the output is right for {FEW} and for {MANY} positions")


def _masks(caller: Caller) -> list[Tensor]:
    """Return a mask for many positions that the code can express, bool [B, T, S], if there is one."""
    if caller.plan.layout == "one sequence":
        return []
    B = caller.subject.sizes.B
    choices = (
        causal_mask(B, MANY, MANY),
        padding_mask(B, MANY, MANY),
        padding_mask(B, MANY, MANY, same=True),
    )
    return [mask for mask in choices if can_express(caller, mask)][:1]


def fresh_caller(caller: Caller) -> Caller | None:
    """Return a caller of a new instance with the same parameters and its own buffers, such as masks.

    None if it cannot be constructed, or its parameters have other shapes: some sizes are random.
    """
    subject = caller.subject
    if subject.make is None or not isinstance(subject.body, nn.Module):
        return None
    weights = dict(subject.body.named_parameters())
    try:
        seed(0)
        body = subject.make().eval()
        if {k: p.shape for k, p in body.named_parameters()} != {k: p.shape for k, p in weights.items()}:
            return None
        with_parameters_of(subject, body)
    except CAUGHT:
        return None
    return replace(caller, subject=replace(subject, body=body, calm=True))


def state_kept(caller: Caller, same: float) -> str:
    """Return how an earlier call with other inputs changes the output of an instance; "" if it does not."""
    sizes = caller.subject.sizes
    few, many = sizes.short, sizes.long
    cases: list[tuple[str, list[tuple[int, Tensor | None]], tuple[int, Tensor | None]]] = []
    by_mask = _masked_caller(caller)
    if by_mask is not None:
        caller, mask = by_mask
        other = mask.flip(0)
        other = torch.ones_like(mask) if torch.equal(other, mask) else other
        cases.append(("another mask the same call", [(many, other)], (many, mask)))
    cases.append((f"{few} positions, one with {many}", [(few, None), (many, None)], (many, None)))
    for words, first_calls, last_call in cases:
        after, outputs = f"after a call with {words}", list[Tensor]()
        for earlier_calls in ([], first_calls):
            new_caller = fresh_caller(caller)
            if new_caller is None:
                return ""
            try:
                for call in earlier_calls:
                    _output(new_caller, *call, seed=112)
            except CAUGHT:
                break
            try:
                outputs.append(_output(new_caller, *last_call).nan_to_num())
            except CAUGHT as error:
                if outputs:
                    return f"{after}, the same call raises {type(error).__name__}"
                break
        if len(outputs) == 2 and (off := share_off(outputs[1], outputs[0])) > same:
            return f"{after}, the output differs by {off:.0e}"
    return ""


@torch.no_grad()
def _output(caller: Caller, length: int, mask: Tensor | None, seed: int = 109) -> Tensor:
    """Return the output for new inputs of this length, because the code may write to its inputs."""
    return caller.call(*inputs_for(caller, length, length, seed), mask).output.detach()


def _masked_caller(caller: Caller) -> tuple[Caller, Tensor] | None:
    """Return a caller and a mask that it can express, bool [B, T, S]; None if there is none.

    Where the convention of the mask was not found, it is the first in which the code runs.
    """
    mask = some_mask(caller)
    if mask is not None or caller.conventions:
        return None if mask is None else (caller, mask)
    for convention in [
        convention for argument in caller.plan.masks for convention in likely_conventions(argument)
    ]:
        candidate = replace(caller, conventions=(convention,))
        mask, new_caller = some_mask(candidate), fresh_caller(candidate)
        try:
            if mask is not None and new_caller is not None:
                _output(new_caller, caller.subject.sizes.long, mask)
                return candidate, mask
        except CAUGHT:
            continue
    return None


def seeds_kept(caller: Caller) -> Iterator[Finding]:
    """Find code that sets a seed: random numbers after a call must depend on the seed set before it."""
    drawn: list[tuple[float, ...]] = []
    numpy = sys.modules.get("numpy")
    for number in (11, 12):
        with torch.no_grad():
            caller.call(*plain(caller), seed=number)
        after = [float(torch.rand(1, dtype=torch.float64)), random.random()]
        drawn.append((*after, *([] if numpy is None else [float(numpy.random.rand())])))
    libraries = [
        library
        for library, first, second in zip(("torch", "Python", "NumPy"), *drawn, strict=False)
        if first == second
    ]
    if libraries:
        detail = (
            f"forward sets the random seed: after a call, {libraries[0]} draws the same numbers, "
            "whatever seed was set before"
        )
        yield Finding("random numbers left alone", "wrong", detail, "seed set in forward")


def wider_values(caller: Caller, evidence: Evidence) -> Iterator[Finding]:
    """Compare a function of q, k and v with the recipe where values have more channels than keys."""
    subject, plan, weights = caller.subject, caller.plan, evidence.weights
    if not subject.is_function or subject.parameters or plan.self_only or plan.memory_only or weights is None:
        return
    if evidence.designs or not any(slot == "value" for _, slot in plan.slots):
        return
    name, sizes = "values of another size", subject.sizes
    width = sizes.E + WIDER_VALUES * sizes.H
    query, key, _ = inputs_for(caller, seed=110)
    generator = torch.Generator().manual_seed(111)
    value = torch.randn(sizes.B, sizes.long, width, generator=generator).double()
    identity, zero = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    wide = Weights(weights.q, weights.k, identity, identity, weights.q_bias, weights.k_bias, zero, zero)
    mask = causal_mask(len(query), sizes.long, sizes.long) if evidence.conventions.always_causal else None
    truth = run(ProbeInputs(query, key, value, mask), wide, evidence.num_heads).output
    channels = f"keys of {sizes.D} channels and values of {width // sizes.H}"
    try:
        with torch.no_grad():
            output = caller.output(query, key, value)
    except CAUGHT as error:
        detail = f"{channels} raise {type(error).__name__}"
        yield Finding(name, "wrong", detail, "values as wide as keys only")
        return
    off = share_off(output, truth)
    if off <= NEAR:
        yield Finding(name, "right", f"the output is right with {channels}")
    else:
        difference = (
            f"wrong by {off:.0e}" if output.shape == truth.shape else f"of shape {list(output.shape)}"
        )
        yield Finding(name, "wrong", f"with {channels} the output is {difference}", "wrong with wider values")
