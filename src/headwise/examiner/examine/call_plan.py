"""Plan what each parameter of forward gets: inputs, sizes, and a mask in the learner's own convention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

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


def _in_shape(mask: Tensor, shape: str, num_heads: int) -> Tensor | None:
    """Return a mask, bool [B, T, S], in another shape; None if that shape cannot hold it."""
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


def _key_counts(mask: Tensor, shape: str) -> Tensor | None:
    """Return how many of the first keys each query may attend to; None for any other mask."""
    counts = mask.sum(-1)  # [B, T]
    prefix = torch.arange(mask.shape[-1]) < counts[..., None]  # [B, T, S]
    if not torch.equal(prefix, mask):
        return None
    if "T" not in shape:
        return counts[:, 0] if bool((counts == counts[:, :1]).all()) else None
    return counts


def _encode(convention: MaskConvention, mask: Tensor, num_heads: int) -> object:
    """Return a mask, bool [B, T, S], as one argument takes it; None if it cannot express the mask."""
    if convention.kind == "switch":
        causal = torch.ones(mask.shape[1:], dtype=torch.bool).tril()
        if bool(mask.all()):
            return not convention.on if isinstance(convention.on, bool) else None
        return convention.on if torch.equal(mask, causal.expand_as(mask)) else None
    if convention.kind == "lengths":
        counts = _key_counts(mask, convention.shape)
        return counts.tolist() if counts is not None and "list" in convention.shape else counts
    if convention.whole:
        mask = mask & torch.ones(mask.shape[1:], dtype=torch.bool).tril()
    shaped = _in_shape(mask, convention.shape, num_heads)
    if shaped is None:
        return None
    if convention.kind == "added":
        return torch.zeros(shaped.shape, dtype=convention.number).masked_fill(~shaped, convention.hidden)
    shaped = shaped if convention.true_attends else ~shaped
    return shaped.clone() if convention.kind == "bool" else shaped.to(convention.number)


def express(
    conventions: tuple[MaskConvention, ...], mask: Tensor, num_heads: int
) -> dict[str, object] | None:
    """Return the arguments that express a mask, bool [B, T, S]; None if there are none.

    A padding mask goes to the argument for padding if there is one, padding and a triangle to both. A switch
    comes before a mask of pairs.
    """
    keys = mask.any(1, keepdim=True).expand_as(mask)
    triangle = torch.ones(mask.shape[1:], dtype=torch.bool).tril().expand_as(mask)
    switches = [convention for convention in conventions if convention.kind == "switch"]
    masks = [convention for convention in conventions if convention.kind != "switch"]
    masks.sort(key=lambda convention: convention.shape not in PADDING)
    if switches and not bool(keys.all()) and torch.equal(keys & triangle, mask):
        for convention in masks:
            value = _encode(convention, keys, num_heads)
            if value is not None:
                return {convention.argument: value, switches[0].argument: switches[0].on}
    is_square = mask.shape[1] == mask.shape[2] > 1
    if is_square and not bool(keys.all()) and torch.equal(keys & triangle, mask):
        of_keys = [convention for convention in masks if convention.shape in PADDING]
        of_pairs = [
            convention
            for convention in masks
            if convention.shape not in PADDING and convention.kind != "lengths"
        ]
        if of_keys and of_pairs and of_keys[0].argument != of_pairs[0].argument:
            both = _encode(of_keys[0], keys, num_heads), _encode(of_pairs[0], triangle, num_heads)
            if both[0] is not None and both[1] is not None:
                return {of_keys[0].argument: both[0], of_pairs[0].argument: both[1]}
    for convention in [*masks, *switches]:
        value = _encode(convention, mask, num_heads)
        if value is not None:
            return {convention.argument: value}
    queries = mask.any(0, keepdim=True).expand_as(mask)
    if len(masks) > 1 and torch.equal(queries & keys, mask):
        padding, full = masks[:2]
        values = _encode(padding, keys, num_heads), _encode(full, queries, num_heads)
        if values[0] is not None and values[1] is not None:
            return {padding.argument: values[0], full.argument: values[1]}
    return None


PLAIN_ANNOTATIONS = (int, bool, float, str, "int", "bool", "float", "str")
INPUTS = ("query", "key", "value", "x", "memory")
COUNTS = ("batch", "query_len", "key_len", "height", "one", "grid")  # numbers that depend on the call


@dataclass(frozen=True)
class CallPlan:
    """What each parameter of forward gets."""

    slots: tuple[tuple[str, str], ...]  # (parameter, one of INPUTS or of COUNTS)
    constants: tuple[tuple[str, object], ...] = ()
    masks: tuple[str, ...] = ()  # parameters that take a mask, those of certain name first
    needs_mask: tuple[str, ...] = ()  # of these, the ones without a default
    switches: tuple[tuple[str, bool | str], ...] = ()  # (parameter, what makes it causal)
    positional: bool = False  # forward takes *inputs
    layout: str = "batch first"
    as_numpy: bool = False
    guessed: tuple[str, ...] = ()  # parameters whose names say nothing
    table: str = ""  # the shape of cos and sin, where it takes them
    still: bool = False  # cos and sin turn nothing

    @property
    def self_only(self) -> bool:
        """True where queries, keys and values come from one argument."""
        return not {"key", "value", "memory"} & {slot for _, slot in self.slots}

    @property
    def memory_only(self) -> bool:
        """True where keys and values, but not queries, come from one argument."""
        return not self.self_only and "value" not in {slot for _, slot in self.slots}


def plans(subject: Subject) -> list[CallPlan]:
    """Return the plans that names and annotations of forward's parameters suggest, the likeliest first."""
    signature = signature_of(subject.body)
    target = getattr(subject.body, "forward", entry_of(subject.body))
    hints = annotations_of(target)
    slots: list[tuple[str, str]] = []  # (parameter, slot)
    masks: list[str] = []
    needs: list[str] = []
    constants: list[tuple[str, object]] = []
    unknown: list[str] = []
    guessed: list[str] = []
    switches: list[tuple[str, bool | str]] = []
    optional: set[str] = set()
    image = _image_sizes(list(signature.parameters.values()))
    arguments, conditions = subject.arguments, conditions_of(subject.body)
    for name, parameter in signature.parameters.items():
        default = parameter.default
        if name in arguments:
            constants.append((name, arguments[name]))
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            if not slots and not unknown:
                three = tuple((f"{i}", slot) for i, slot in enumerate(("query", "key", "value")))
                plan = CallPlan(three, positional=True)
                return [plan, replace(plan, slots=(("0", "x"),)), replace(plan, masks=("3",))]
            continue
        if name in subject.weight_arguments and subject.is_function:
            continue
        required = default is parameter.empty
        slot, annotation = input_word(name), hints.get(name, parameter.annotation)
        plain = annotation in PLAIN_ANNOTATIONS or isinstance(default, (bool, int, str))
        if name in image:
            if required:
                slots.append((name, image[name]))
        elif required and not plain and rotation_word(name) is not None:
            slots.append((name, rotation_word(name) or ""))
        elif default is False and (slot == "mask" or size_word(name) == "causal"):
            switches.append((name, True))
        elif (on := _causal_value(parameter, annotation, conditions)) is not None:
            switches.append((name, on))
            constants += [(name, not on)] if required else []
        elif slot in INPUTS and not plain:
            slots.append((name, slot))
            optional |= set() if required else {name}
        elif slot in {"mask", "lengths"} and not plain:
            masks.append(name)
            needs += [name] if required else []
        elif name == "average_attn_weights":
            constants.append((name, False))
        elif required:
            value, is_named = _constant(parameter, annotation, subject.sizes)
            guessed += [] if is_named else [name]
            if value is None:
                unknown.append(name)
            elif isinstance(value, str) and value in COUNTS:
                slots.append((name, value))
            else:
                constants.append((name, value))
    base = CallPlan((), tuple(constants), tuple(masks), tuple(needs), tuple(switches), guessed=tuple(guessed))
    if _crosses_by_switch(subject.body):
        slots = [pair for pair in slots if pair[1] != "memory" or pair[0] not in optional]
    call_plans = list(_possible_plans(base, slots, unknown, optional))
    if "m" in map(bare, needs):  # it may be a mask, or a memory
        name = next(name for name in needs if bare(name) == "m")
        others = tuple({name for name in needs if bare(name) != "m"})
        call_plans += [
            replace(
                plan, slots=(*plan.slots, (name, "memory")), needs_mask=others,
                masks=tuple(name for name in plan.masks if bare(name) != "m"),
            )
            for plan in call_plans
        ]  # fmt: skip
    if any(slot in SLOTS for _, slot in slots):
        call_plans = [
            replace(plan, table=shape, still=rotations_are_constant())
            for shape in TABLES
            for plan in call_plans
        ]
    return call_plans


def _crosses_by_switch(body: object) -> bool:
    """Return True if a switch that is off says whether a memory is attended to."""
    modules = body.modules() if isinstance(body, nn.Module) else ()
    return any(
        value is False and "cross" in name.lower()
        for module in modules
        for name, value in vars(module).items()
    )


def _causal_value(
    parameter: inspect.Parameter, annotation: object, conditions: Mapping[str, list[object]]
) -> bool | str | None:
    """Return the value of a switch that makes the code causal; None if the source does not show one."""
    if parameter.name not in conditions or not may_change_output(parameter.name):
        return None
    if parameter.default is parameter.empty:
        return True if annotation in (bool, "bool") else None
    if not isinstance(parameter.default, (bool, str)):
        return None
    values = other_values(parameter.default, conditions[parameter.name])
    return next((value for value in values if isinstance(value, (bool, str))), None)


def _image_sizes(parameters: list[inspect.Parameter]) -> dict[str, str]:
    """Return the parameters for the height and width of an image: T rows, one column."""
    names = {parameter.name.lower(): parameter.name for parameter in parameters}
    for pair in (("h", "w"), ("height", "width"), ("hh", "ww"), ("rows", "cols")):
        if all(word in names for word in pair):
            return {names[pair[0]]: "height", names[pair[1]]: "one"}
    words = {"hw", "hwshape", "resolution", "inputresolution", "spatialshape", "gridsize", "grid", "imgsize"}
    return {parameter.name: "grid" for parameter in parameters if bare(parameter.name) in words}


def _constant(parameter: inspect.Parameter, annotation: object, sizes: Sizes) -> tuple[object, bool]:
    """Return a value for a required parameter that takes no tensor, and True if its name says so.

    The value may be the name of a count. (None, False): the parameter may take a tensor.
    """
    word, name = size_word(parameter.name), bare(parameter.name)
    if word == "length":
        return "key_len" if name.startswith(("k", "s", "mem", "src")) else "query_len", True
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
    if annotation in (int, "int"):
        if name in {"b", "bsz", "nb"}:
            return "batch", True
        is_length = name in {"t", "l", "n", "s"} or name.endswith(("len", "length"))
        return "query_len" if is_length else 1, is_length
    constants = {bool: False, "bool": False, float: 1.0, "float": 1.0, str: "", "str": ""}
    return next((value for key, value in constants.items() if annotation == key), None), False


def _possible_plans(
    base: CallPlan, pairs: list[tuple[str, str]], unknown: list[str], optional: set[str]
) -> Iterator[CallPlan]:
    """Yield plans by what the names say, then by the number of inputs whose names say nothing."""
    slots = {slot for _, slot in pairs}
    sizes = [(name, slot) for name, slot in pairs if slot not in INPUTS]
    inputs = [(name, slot) for name, slot in pairs if slot in INPUTS]

    def plan(pairs: list[tuple[str, str]], mask: str | None = None) -> CallPlan:
        masks = base.masks if mask is None else (mask, *base.masks)
        needs = base.needs_mask if mask is None else (mask, *base.needs_mask)
        guessed = (*base.guessed, *unknown)
        return replace(base, slots=tuple(pairs + sizes), masks=masks, needs_mask=needs, guessed=guessed)

    if not unknown:
        inputs = _with_consistent_slots(inputs)
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


def _with_consistent_slots(inputs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the inputs with slots that go together: x beside a query is a memory, and so on."""
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
