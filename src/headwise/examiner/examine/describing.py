"""How the code wants to be called, as a record and in sentences."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..evidence import Conventions
from .calling import Caller
from .encoding import Way
from .failing import CAUGHT
from .reacting import inputs_for
from .subject import signature_of
from .wording import bare

__all__ = ["asks_for_weights", "conventions"]

ASKS = frozenset(
    """needweights outputattention outputattentions returnattention returnattentions returnattentionweights
    returnattn returnattnweights returnscores returnweights""".split()
)


def asks_for_weights(caller: Caller) -> tuple[tuple[str, object], ...]:
    """A switch that makes it return the weights, if the output stays what it was."""
    every = signature_of(caller.subject.body).parameters.values()
    names = [one.name for one in every if bare(one.name) in ASKS and one.default is False]
    if not names:
        return ()
    asks = ((names[0], True),)
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    with torch.no_grad():
        try:
            plain = caller.call(*inputs)
            with_weights = replace(caller, asks=asks).call(*inputs, asks=True)
        except CAUGHT:
            return ()
    same = torch.allclose(plain.output, with_weights.output, rtol=1e-9, atol=1e-12, equal_nan=True)
    return asks if same and with_weights.weights is not None else ()


def conventions(caller: Caller, causal: bool, returns_weights: bool, said: list[str]) -> Conventions:
    plan = caller.plan
    made = Conventions(
        arguments=(*(slot for _, slot in plan.slots), *("mask" for _ in caller.ways)),
        self_only=plan.self_only,
        batch_first=plan.layout != "sequence first",
        always_causal=causal,
        returns_weights=returns_weights,
    )
    main: Way | None = caller.ways[0] if caller.ways else None
    if main is not None:
        made.mask_argument, made.mask_kind, made.mask_shape = main.argument, main.kind, main.shape or None
        made.mask_true_attends = main.true_attends if main.kind in {"bool", "0 and 1"} else None
    made.words = _words(caller, causal) + said
    return made


def _words(caller: Caller, causal: bool) -> list[str]:
    plan, words = caller.plan, []
    names = ", ".join(f"{name} ({slot})" if name != slot else name for name, slot in plan.slots)
    words.append(f"it is called with {names}")
    layouts = {
        "one sequence": "it takes one sequence at a time, [T, E]",
        "heads first": "its inputs are [B, H, T, D]",
        "heads inside": "its inputs are [B, T, H, D]",
        "heads in the batch": "its inputs are [B * H, T, D]",
    }
    if plan.layout in layouts:
        words.append(layouts[plan.layout])
    for way in caller.ways:
        if way.kind == "switch":
            words.append(f"{way.argument}=True hides the future")
        elif way.kind == "lengths":
            words.append(f"{way.argument} says how many keys may be seen, {way.shape}")
        elif way.kind == "added":
            words.append(
                f"{way.argument} is added to the scores, {way.shape}: 0 where a key may be seen, else -inf"
            )
        else:
            one = "True" if way.kind == "bool" else "1"
            does = "may be seen" if way.true_attends else "is hidden"
            words.append(f"{way.argument} is {way.kind}, {way.shape}: {one} where a key {does}")
    if causal:
        words.append("it is always causal: no position sees those after it")
    return words
