"""What each parameter of forward is given: from names, else from how many there are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .sizes import Sizes
from .subject import Subject, signature_of
from .wording import input_word, size_word

__all__ = ["Plan", "plans"]

INPUTS = ("query", "key", "value", "x", "memory")


@dataclass(frozen=True)
class Plan:
    """What each parameter of forward is given."""

    slots: tuple[tuple[str, str], ...]  # (parameter, one of INPUTS or "batch" or "query_len")
    constants: tuple[tuple[str, object], ...] = ()
    masks: tuple[str, ...] = ()  # parameters that take a mask, those of certain name first
    needs_mask: tuple[str, ...] = ()  # of these, the ones without a default
    switches: tuple[str, ...] = ()  # causal=False: True would make it causal
    positional: bool = False  # *inputs, or nothing has a name
    layout: str = "batch first"
    as_numpy: bool = False

    @property
    def self_only(self) -> bool:
        return not {"key", "value", "memory"} & {slot for _, slot in self.slots}

    @property
    def memory_only(self) -> bool:
        """Keys and values come from one argument."""
        return not self.self_only and "value" not in {slot for _, slot in self.slots}


def plans(subject: Subject) -> list[Plan]:
    """The plans the names of forward's parameters suggest, the likeliest first."""
    signature = signature_of(subject.body)
    found: list[tuple[str, str]] = []  # (parameter, slot)
    masks: list[str] = []
    needs: list[str] = []
    constants: list[tuple[str, object]] = []
    unknown: list[str] = []
    switches: list[str] = []
    optional: set[str] = set()
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD:
            continue
        if one.kind is one.VAR_POSITIONAL:
            if not found and not unknown:
                return [
                    _positional("query key value"),
                    _positional("x"),
                    _positional("query key value", True),
                ]
            continue
        if one.name in subject.parameters and subject.is_function:
            continue
        required = one.default is one.empty
        slot = input_word(one.name)
        plain = one.annotation in (int, bool, float, "int", "bool", "float") or isinstance(
            one.default, (bool, int)
        )
        if one.default is False and (slot == "mask" or size_word(one.name) == "causal"):
            switches.append(one.name)
        elif slot in INPUTS and not (plain and not required):
            found.append((one.name, slot))
            optional |= set() if required else {one.name}
        elif slot in {"mask", "lengths"} and not (plain and required):
            masks.append(one.name)
            needs += [one.name] if required else []
        elif one.name == "average_attn_weights":
            constants.append((one.name, False))
        elif required:
            value = _constant(one, subject.sizes)
            if value is None:
                unknown.append(one.name)
            elif isinstance(value, str):
                found.append((one.name, value))
            else:
                constants.append((one.name, value))
    base = Plan((), tuple(constants), tuple(masks), tuple(needs), tuple(switches))
    return list(_shapes(base, found, unknown, optional))


def _positional(words: str, with_mask: bool = False) -> Plan:
    slots = tuple((f"{i}", slot) for i, slot in enumerate(words.split()))
    return Plan(slots, masks=("3",) if with_mask else (), positional=True)


def _constant(parameter: inspect.Parameter, sizes: Sizes) -> object:
    """A value for a required parameter that takes no tensor; a slot's name where it depends on the call."""
    word = size_word(parameter.name)
    value = {
        "heads": sizes.H,
        "key heads": sizes.H,
        "head dim": sizes.D,
        "dropout": 0.0,
        "causal": False,
        "flag": False,
        "batch": "batch",
        "width": sizes.E,
    }.get(word or "")
    if word == "length":
        return "query_len"
    if value is not None and word == "width" and len(parameter.name) == 1:
        return None
    if value is None and parameter.annotation in (bool, "bool"):
        return False
    return value


def _shapes(
    base: Plan, found: list[tuple[str, str]], unknown: list[str], optional: set[str]
) -> Iterator[Plan]:
    """Plans from what the names say, then from how many there are."""
    slots = {slot for _, slot in found}
    sizes = [(name, slot) for name, slot in found if slot not in INPUTS]
    inputs = [(name, slot) for name, slot in found if slot in INPUTS]

    def plan(pairs: list[tuple[str, str]], mask: str | None = None) -> Plan:
        masks = base.masks if mask is None else (mask, *base.masks)
        needs = base.needs_mask if mask is None else (mask, *base.needs_mask)
        return replace(base, slots=tuple(pairs + sizes), masks=masks, needs_mask=needs)

    if not unknown:
        inputs = _untangled(inputs)
        slots = {slot for _, slot in inputs}
        if {"x", "memory"} <= slots or {"query", "memory"} <= slots:
            yield plan(inputs)
            yield plan([pair for pair in inputs if pair[1] != "memory"])
            return
        if inputs:
            yield plan(inputs)
        some = [pair for pair in inputs if pair[0] not in optional]
        if some and len(some) < len(inputs):
            yield plan(some)
        if {"query", "key", "value"} <= slots and "x" in slots:
            yield plan([pair for pair in inputs if pair[1] == "x"])
        return
    names = [name for name, _ in inputs] + unknown if not inputs else unknown
    if not inputs:
        if len(names) == 1:
            yield plan([(names[0], "x")])
        if len(names) == 2:
            yield plan([(names[0], "x"), (names[1], "memory")])
            yield plan([(names[0], "x")], names[1])
        if len(names) >= 3:
            three = list(zip(names, ("query", "key", "value"), strict=False))
            if len(names) == 3:
                yield plan(three)
            else:
                yield plan(three, names[3])
            if len(names) == 3:
                yield plan([(names[0], "x"), (names[1], "memory")], names[2])
        return
    missing = [slot for slot in ("query", "key", "value") if slot not in slots]
    if slots <= {"query", "key", "value"} and len(unknown) == len(missing):
        yield plan([*inputs, *zip(unknown, missing, strict=True)])
    if len(unknown) == 1:
        yield plan([*inputs, (unknown[0], "memory")])
        yield plan(inputs, unknown[0])
    if len(unknown) == 2:
        yield plan([*inputs, (unknown[0], "memory")], unknown[1])
        yield plan([(inputs[0][0], "query"), (unknown[0], "key"), (unknown[1], "value")])


def _untangled(inputs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names that say query and x, or key without value, in the sense they have beside each other."""
    slots = [slot for _, slot in inputs]
    if "x" in slots and "query" not in slots and "key" in slots and "value" in slots:
        return [(name, "query" if slot == "x" else slot) for name, slot in inputs]
    if "x" in slots and "query" in slots and "key" not in slots:  # query and source: x is what is attended to
        return [(name, "memory" if slot == "x" else slot) for name, slot in inputs]
    if "key" in slots and "value" not in slots:
        return [(name, "memory" if slot == "key" else slot) for name, slot in inputs]
    if slots.count("x") == 2:
        first = slots.index("x")
        return [
            (name, "memory" if slot == "x" and i > first else slot) for i, (name, slot) in enumerate(inputs)
        ]
    if slots == ["query"]:
        return [(inputs[0][0], "x")]
    if slots == ["memory"]:
        return [(inputs[0][0], "x")]
    return inputs
