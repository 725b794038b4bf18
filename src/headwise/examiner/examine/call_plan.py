"""What each parameter of forward is given: inputs, sizes, and a mask in the learner's own convention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .causal_switches import conditions_of, may_change_output, other_values
from .constructor import annotations_of, fits
from .rotations import SLOTS, TABLES, rotation_word, rotations_are_constant
from .subject import Sizes, Subject, entry_of, signature_of
from .vocabulary import bare, input_word, size_word

FULL = (
    "[B, 1, T, S]",
    "[B, T, S]",
    "[B*H, T, S]",
    "[B, H, T, S]",
    "[T, S, B]",
    "[T, S, B, 1]",
    "[H*B, T, S]",
)
SAME_FOR_ALL = ("[T, S]", "[1, 1, T, S]", "[1, T, S]")
LENGTHS = ("[B]", "[B, T]", "[B] as a list", "[B, T] as lists")
PADDING = ("[B, S]", "[B, 1, 1, S]", "[B, 1, S]", "[S]", "[S, B]")


@dataclass(frozen=True)
class MaskConvention:
    """How one argument takes a mask."""

    argument: str
    shape: str  # one of the above; "[B]" and "[B, T]" for lengths; "" for a switch
    kind: str = "bool"  # "bool", "0 and 1", "added", "lengths", "switch"
    true_attends: bool = True
    number: torch.dtype = torch.float64  # of the 0 and 1, or what is added
    hidden: float = -torch.inf  # what is added where it hides
    on: bool | str = True  # what throws a switch
    whole: bool = False  # it is taken in place of the code's own causal mask, so it hides the future as well


def _shaped(mask: Tensor, shape: str, num_heads: int) -> Tensor | None:
    """bool [B, T, S] in this shape; None where the shape cannot say it."""
    B, T, S = mask.shape
    if shape in SAME_FOR_ALL or shape == "[S]":
        if not bool((mask == mask[:1]).all()):
            return None
        mask = mask[:1]
    if shape in PADDING:
        if not bool((mask == mask[:, :1]).all()):
            return None
        mask = mask[:, :1]
    return {
        "[B, 1, T, S]": lambda: mask[:, None],
        "[B, T, S]": lambda: mask,
        "[B, H, T, S]": lambda: mask[:, None].expand(B, num_heads, T, S).contiguous(),
        "[H*B, T, S]": lambda: mask.repeat(num_heads, 1, 1),
        "[B*H, T, S]": lambda: mask.repeat_interleave(num_heads, 0),
        "[T, S, B]": lambda: mask.permute(1, 2, 0).contiguous(),
        "[T, S, B, 1]": lambda: mask.permute(1, 2, 0).contiguous()[..., None],
        "[T, S]": lambda: mask[0],
        "[1, 1, T, S]": lambda: mask[:, None],
        "[1, T, S]": lambda: mask,
        "[B, S]": lambda: mask[:, 0],
        "[S, B]": lambda: mask[:, 0].T.contiguous(),
        "[B, 1, 1, S]": lambda: mask[:, None],
        "[B, 1, S]": lambda: mask,
        "[S]": lambda: mask[0, 0],
    }[shape]()


def _lengths(mask: Tensor, shape: str) -> Tensor | None:
    """How many keys from the first each query may see; None for a mask with holes."""
    seen = mask.sum(-1)  # [B, T]
    prefix = torch.arange(mask.shape[-1]) < seen[..., None]  # [B, T, S]
    if not torch.equal(prefix, mask):
        return None
    if "T" not in shape:
        return seen[:, 0] if bool((seen == seen[:, :1]).all()) else None
    return seen


def encode(way: MaskConvention, mask: Tensor, num_heads: int) -> object:
    """A mask, bool [B, T, S], as this argument wants it; None where it cannot say it."""
    if way.kind == "switch":
        causal = torch.ones(mask.shape[1:], dtype=torch.bool).tril()
        if bool(mask.all()):
            return not way.on if isinstance(way.on, bool) else None
        return way.on if torch.equal(mask, causal.expand_as(mask)) else None
    if way.kind == "lengths":
        counts = _lengths(mask, way.shape)
        return counts.tolist() if counts is not None and "list" in way.shape else counts
    if way.whole:
        mask = mask & torch.ones(mask.shape[1:], dtype=torch.bool).tril()
    shaped = _shaped(mask, way.shape, num_heads)
    if shaped is None:
        return None
    if way.kind == "added":
        return torch.zeros(shaped.shape, dtype=way.number).masked_fill(~shaped, way.hidden)
    shaped = shaped if way.true_attends else ~shaped
    return shaped.clone() if way.kind == "bool" else shaped.to(way.number)


def express(ways: tuple[MaskConvention, ...], mask: Tensor, num_heads: int) -> dict[str, object] | None:
    """The arguments that say this mask; None where they cannot.

    A mask that is padding goes through the argument for padding where there is one; padding and a triangle
    through both, a switch before a mask of pairs.
    """
    keys = mask.any(1, keepdim=True).expand_as(mask)
    triangle = torch.ones(mask.shape[1:], dtype=torch.bool).tril().expand_as(mask)
    switches = [way for way in ways if way.kind == "switch"]
    if switches and not bool(keys.all()) and torch.equal(keys & triangle, mask):
        for way in sorted(ways, key=lambda one: one.shape not in PADDING):
            value = encode(way, keys, num_heads) if way.kind != "switch" else None
            if value is not None:
                return {way.argument: value, switches[0].argument: switches[0].on}
    ways = tuple(way for way in ways if way.kind != "switch") + tuple(switches)
    for way in sorted(ways, key=lambda one: one.shape not in PADDING):
        value = encode(way, mask, num_heads)
        if value is not None:
            return {way.argument: value}
    if len(ways) > 1:
        every = mask.any(0, keepdim=True).expand_as(mask)
        if torch.equal(every & keys, mask):
            padding, full = sorted(ways, key=lambda one: one.shape not in PADDING)[:2]
            pair = encode(padding, keys, num_heads), encode(full, every, num_heads)
            if pair[0] is not None and pair[1] is not None:
                return {padding.argument: pair[0], full.argument: pair[1]}
    return None


INPUTS = ("query", "key", "value", "x", "memory")
COUNTS = ("batch", "query_len", "key_len", "height", "one", "grid")  # numbers that depend on the call


@dataclass(frozen=True)
class CallPlan:
    """What each parameter of forward is given."""

    slots: tuple[tuple[str, str], ...]  # (parameter, one of INPUTS or of COUNTS)
    constants: tuple[tuple[str, object], ...] = ()
    masks: tuple[str, ...] = ()  # parameters that take a mask, those of certain name first
    needs_mask: tuple[str, ...] = ()  # of these, the ones without a default
    switches: tuple[tuple[str, bool | str], ...] = ()  # (parameter, what makes it causal)
    positional: bool = False  # *inputs, or nothing has a name
    layout: str = "batch first"
    as_numpy: bool = False
    guessed: tuple[str, ...] = ()  # parameters whose names say nothing: what they are given is ours
    table: str = ""  # the shape of cos and sin, where it takes them
    still: bool = False  # they turn nothing

    @property
    def self_only(self) -> bool:
        return not {"key", "value", "memory"} & {slot for _, slot in self.slots}

    @property
    def memory_only(self) -> bool:
        """Keys and values come from one argument."""
        return not self.self_only and "value" not in {slot for _, slot in self.slots}


def plans(subject: Subject) -> list[CallPlan]:
    """The plans the names of forward's parameters suggest, the likeliest first; annotations are obeyed."""
    signature = signature_of(subject.body)
    target = getattr(subject.body, "forward", entry_of(subject.body))
    hints = annotations_of(target)
    found: list[tuple[str, str]] = []  # (parameter, slot)
    masks: list[str] = []
    needs: list[str] = []
    constants: list[tuple[str, object]] = []
    unknown: list[str] = []
    guessed: list[str] = []
    switches: list[tuple[str, bool | str]] = []
    optional: set[str] = set()
    image = _image(list(signature.parameters.values()))
    given, conditions = subject.arguments, conditions_of(subject.body)
    for one in signature.parameters.values():
        if one.name in given:
            constants.append((one.name, given[one.name]))
            continue
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
        if one.name in subject.weight_arguments and subject.is_function:
            continue
        required = one.default is one.empty
        slot, annotation = input_word(one.name), hints.get(one.name, one.annotation)
        plain = annotation in (int, bool, float, str, "int", "bool", "float", "str") or isinstance(
            one.default, (bool, int, str)
        )
        if one.name in image:
            if required:
                found.append((one.name, image[one.name]))
        elif required and not plain and rotation_word(one.name) is not None:
            found.append((one.name, rotation_word(one.name) or ""))
        elif one.default is False and (slot == "mask" or size_word(one.name) == "causal"):
            switches.append((one.name, True))
        elif (on := _switch(one, annotation, conditions)) is not None:
            switches.append((one.name, on))
            constants += [(one.name, not on)] if required else []
        elif slot in INPUTS and not plain:
            found.append((one.name, slot))
            optional |= set() if required else {one.name}
        elif slot in {"mask", "lengths"} and not plain:
            masks.append(one.name)
            needs += [one.name] if required else []
        elif one.name == "average_attn_weights":
            constants.append((one.name, False))
        elif required:
            value, sure = _constant(one, annotation, subject.sizes)
            guessed += [] if sure else [one.name]
            if value is None:
                unknown.append(one.name)
            elif isinstance(value, str) and value in COUNTS:
                found.append((one.name, value))
            else:
                constants.append((one.name, value))
    base = CallPlan((), tuple(constants), tuple(masks), tuple(needs), tuple(switches), guessed=tuple(guessed))
    made = list(_shapes(base, found, unknown, optional))
    if "m" in map(bare, needs):  # a mask, or what is attended to
        others = [replace(one, masks=tuple(n for n in one.masks if bare(n) != "m")) for one in made]
        short = [name for name in needs if bare(name) == "m"]
        made += [
            replace(one, slots=(*one.slots, (short[0], "memory")), needs_mask=tuple(set(needs) - set(short)))
            for one in others
        ]
    if any(slot in SLOTS for _, slot in found):
        made = [replace(one, table=shape, still=rotations_are_constant()) for shape in TABLES for one in made]
    return made


def _switch(
    one: inspect.Parameter, annotation: object, conditions: Mapping[str, list[object]]
) -> bool | str | None:
    """What makes it causal, where the source asks this parameter before it hides the future; else None."""
    if one.name not in conditions or not may_change_output(one.name):
        return None
    if one.default is one.empty:
        return True if annotation in (bool, "bool") else None
    if not isinstance(one.default, (bool, str)):
        return None
    values = other_values(one.default, conditions[one.name])
    return next((value for value in values if isinstance(value, (bool, str))), None)


def _image(every: list[inspect.Parameter]) -> dict[str, str]:
    """H and W of a vision block: the sequence is an image of so many rows, one column wide."""
    names = {one.name.lower(): one.name for one in every}
    for pair in (("h", "w"), ("height", "width"), ("hh", "ww"), ("rows", "cols")):
        if all(word in names for word in pair):
            return {names[pair[0]]: "height", names[pair[1]]: "one"}
    words = {"hw", "hwshape", "resolution", "inputresolution", "spatialshape", "gridsize", "grid", "imgsize"}
    return {one.name: "grid" for one in every if bare(one.name) in words}


def _positional(words: str, with_mask: bool = False) -> CallPlan:
    slots = tuple((f"{i}", slot) for i, slot in enumerate(words.split()))
    return CallPlan(slots, masks=("3",) if with_mask else (), positional=True)


def _constant(parameter: inspect.Parameter, annotation: object, sizes: Sizes) -> tuple[object, bool]:
    """(a value for a required parameter that takes no tensor, or a count's name; whether its own says so).

    (None, False): it may be a tensor.
    """
    word = size_word(parameter.name)
    if word == "length":
        key = bare(parameter.name).startswith(("k", "s", "mem", "src"))
        return "key_len" if key else "query_len", True
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
    if word == "width" and len(parameter.name) == 1 and annotation not in (int, "int"):
        value = None
    if isinstance(value, str) or (value is not None and fits(value, annotation)):
        return value, True
    if annotation in (bool, "bool"):
        return False, False
    if annotation in (float, "float"):
        return 1.0, False
    if annotation in (str, "str"):
        return "", False
    if annotation in (int, "int"):
        name = bare(parameter.name)
        if name in {"b", "bsz", "nb"}:
            return "batch", True
        length = name in {"t", "l", "n", "s"} or name.endswith(("len", "length"))
        return "query_len" if length else 1, length
    return None, False


def _shapes(
    base: CallPlan, found: list[tuple[str, str]], unknown: list[str], optional: set[str]
) -> Iterator[CallPlan]:
    """Plans from what the names say, then from how many there are."""
    slots = {slot for _, slot in found}
    sizes = [(name, slot) for name, slot in found if slot not in INPUTS]
    inputs = [(name, slot) for name, slot in found if slot in INPUTS]

    def plan(pairs: list[tuple[str, str]], mask: str | None = None) -> CallPlan:
        masks = base.masks if mask is None else (mask, *base.masks)
        needs = base.needs_mask if mask is None else (mask, *base.needs_mask)
        guessed = (*base.guessed, *unknown)
        return replace(base, slots=tuple(pairs + sizes), masks=masks, needs_mask=needs, guessed=guessed)

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
