"""What a constructor is told: sizes by their names, annotations and defaults obeyed, what no name explains
made up and written down as such.

A configuration that the file itself defines is taken before one of ours. Ours answers to fields whose names
say what they are, at any depth; a field that no name explains does not exist (`getattr(config, "x", None)`
gets its None) until the constructor cannot do without it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .causal_switches import conditions_of, may_change_output, other_values
from .rotations import Rotation, is_rotation, rotations_are_constant
from .subject import Sizes
from .vocabulary import VALUE_DIM, bare, size_word

# Left as the author has them: switches, and numbers that are no sizes
KEPT = frozenset("bias causal layer dtype device epsilon theta scale temperature flag".split())
MOST_FIELDS = 24


@dataclasses.dataclass(frozen=True)
class Choices:
    """Which of the ways to answer a constructor."""

    few_keys: bool = True  # half as many heads of keys and values, where that can be said
    per_head: bool = True  # d_k is the width of one head, not of all
    swapped: bool = False  # what no name explains: heads before width
    defaults: bool = False  # nothing that has a default is set
    own_config: bool = True  # a configuration, or a rotation, that the file defines, where there is one
    made_up: int = 0  # which of the values for what no name explains


class MissingField(AttributeError, KeyError):
    """A field of a configuration whose name says nothing."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return self.path


@dataclasses.dataclass(eq=False)
class ArgumentValues:
    """What one call of a constructor was told."""

    sizes: Sizes
    choice: Choices
    dropout: float
    given: Mapping[str, object]
    allowed: set[str]  # fields that no name explains, and that it cannot do without
    containers: set[str]  # fields that were asked for fields of their own
    switches: Collection[str] = ()  # names under whose condition the future is hidden
    fields: dict[str, object] = dataclasses.field(default_factory=dict)  # by path, as they were asked for
    made_up: dict[str, object] = dataclasses.field(default_factory=dict)
    free: dict[str, object] = dataclasses.field(default_factory=dict)  # width and heads by their places alone
    rotations: list[str] = dataclasses.field(default_factory=list)  # parameters that got one of ours

    def by_name(self, name: str) -> object:
        """What a parameter of this name is given; None where its name says nothing."""
        sizes = self.sizes
        if sizes.value is not None and bare(name) in VALUE_DIM:
            return sizes.value
        return {
            "width": sizes.E,
            "heads": sizes.H,
            "key heads": max(1, sizes.H // (2 if sizes.H <= 4 else 4)) if self.choice.few_keys else sizes.H,
            "head dim": sizes.D if self.choice.per_head else sizes.E,
            "length": sizes.block,
            "dropout": self.dropout,
            "bias": True,
            "batch first": True,
            "batch": sizes.B,
            "causal": False,
            "layer": 1,
            "reduction": 1,  # as many keys as queries
            "vocabulary": 50,
            "epsilon": 1e-5,
            "theta": 10000.0,
            "dtype": torch.float64,
            "device": "cpu",
        }.get(size_word(name) or "")

    def scale(self, name: str) -> float | None:
        """A scale or a temperature: which of the two the code means by it is ours to guess."""
        word = size_word(name)
        if word not in {"scale", "temperature"}:
            return None
        root = self.sizes.D**0.5
        return root if (word == "temperature") == (self.choice.made_up % 2 == 0) else 1 / root


class StandInConfig(dict[str, object]):
    """A configuration that answers to fields whose names say what they are, as attributes or as keys."""

    def __init__(self, told: ArgumentValues, path: str = "config") -> None:
        super().__init__()
        self.__dict__["_told"], self.__dict__["_path"] = told, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        told: ArgumentValues = self.__dict__["_told"]
        path = f"{self.__dict__['_path']}.{name}"
        value = told.given.get(path, told.given.get(name))
        if value is None:
            value = told.by_name(name)
        if value is None and (size_word(name) == "flag" or name in told.switches):
            value = False
        if value is None and "implementation" in name.lower():
            value = "eager"
        if value is None and "position_embedding_type" in name.lower():
            value = "absolute"
        if value is None:
            value = told.scale(name)
            if value is None and path not in told.allowed:
                raise MissingField(path)
            if value is None:
                value = told.sizes.E if path in told.containers else _field_value(name, told)
            told.made_up[path] = value
        if type(value) is int:
            value = _number(
                value, told, path
            )  # a width, unless it is asked for fields: cfg["model"]["heads"]
        told.fields[path] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__[name] = value

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> StandInConfig:
        return self

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except MissingField:
            return False
        return True

    def get(self, name: str, default: object = None) -> Any:
        """As a dict's."""
        try:
            return self[name]
        except MissingField:
            return default

    pop = get


class _NestedNumber(int):
    """A number nobody named, which may be asked for fields of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        told: ArgumentValues = self.__dict__["_told"]
        told.containers.add(self.__dict__["_path"])
        told.made_up.pop(self.__dict__["_path"], None)  # what counts lies deeper
        told.fields.pop(self.__dict__["_path"], None)
        return StandInConfig(told, self.__dict__["_path"])[name]

    def get(self, name: str, default: object = None) -> Any:
        """As a dict's."""
        return StandInConfig(self.__dict__["_told"], self.__dict__["_path"]).get(name, default)


def _field_value(name: str, told: ArgumentValues) -> object:
    """Nothing first; then a number, which is also asked for fields of its own."""
    number = re.match(
        r"(num|n|max|min)_|.*(size|dim|len|length|count|width|depth|ratio|factor)$", name.lower()
    )
    order: list[int | None] = [told.sizes.E, 1, 2] if number else [None, told.sizes.E, 1]
    return order[told.choice.made_up % 3]


def _number(value: int, told: ArgumentValues, path: str) -> _NestedNumber:
    found = _NestedNumber(value)
    found.__dict__.update(_told=told, _path=path)
    return found


def parameters_of(cls: type) -> list[inspect.Parameter]:
    """Of the constructor; of the one above where it hands everything on; of `kwargs["name"]` where it reads
    those.
    """
    named: list[inspect.Parameter] = []
    for owner in cls.__mro__:
        if "__init__" not in vars(owner) or owner is object:
            continue
        try:
            every = list(inspect.signature(owner.__init__).parameters.values())[1:]  # type: ignore[misc]
        except (TypeError, ValueError):
            return named
        named += [one for one in every if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        rest = [one for one in every if one.kind is one.VAR_KEYWORD]
        if not rest or owner is nn.Module:
            break
        read = _keys_read(owner, rest[0].name)
        known = {one.name for one in named}
        kind = inspect.Parameter.KEYWORD_ONLY
        named += [inspect.Parameter(key, kind) for key in read if key not in known]
        if read:
            break
    if not any("__init__" in vars(one) for one in cls.__mro__ if one is not object):
        return []
    return named


def _keys_read(owner: type, name: str) -> list[str]:
    """The keys a constructor reads out of its **kwargs without a default."""
    try:
        text = inspect.getsource(owner.__init__)  # type: ignore[misc]
    except (OSError, TypeError):
        return []
    found = re.findall(rf"\b{name}(?:\[|\.pop\(|\.get\()\s*['\"](\w+)['\"]\s*[\])]", text)
    return list(dict.fromkeys(found))


def annotations_of(function: Any) -> dict[str, Any]:
    """The annotations of a function's parameters, those written as text looked up where that can be done."""
    try:
        return typing.get_type_hints(function)
    except Exception:
        return dict(getattr(function, "__annotations__", {}))


def _bare_types(annotation: object) -> set[object]:
    """int | None -> {int, None}."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return {one for part in typing.get_args(annotation) for one in _bare_types(part)}
    words: dict[object, object] = {
        "int": int, "float": float, "bool": bool, "str": str, "None": None, type(None): None,
        "Optional[int]": int, "Optional[float]": float,
    }  # fmt: skip
    return {words.get(annotation, annotation) if isinstance(annotation, (str, type)) else annotation}


def fits(value: object, annotation: object, default: object = inspect.Parameter.empty) -> bool:
    """Whether a value is of the kind its parameter says it takes: a bool is no int, None is none."""
    said = _bare_types(annotation) & {int, float, bool, str, None}
    if annotation is inspect.Parameter.empty or not said:
        if default is inspect.Parameter.empty or default is None:
            return True
        if isinstance(default, bool) or isinstance(value, bool):
            return isinstance(default, bool) and isinstance(value, bool)
        return not isinstance(default, str) or isinstance(value, str)
    if isinstance(value, bool):
        return bool in said
    if isinstance(value, int):
        return bool(said & {int, float})
    if isinstance(value, float):
        return float in said
    return None in said if value is None else str in said


def made_up(name: str, annotation: object, told: ArgumentValues, free: list[int]) -> object:
    """A value for a required parameter whose name says nothing."""
    said, at = _bare_types(annotation), told.choice.made_up
    if bool in said or (size_word(name) == "flag" and annotation is inspect.Parameter.empty):
        return at % 2 == 1
    if float in said and int not in said:
        return (0.0, 1.0, 0.5)[at % 3]
    if str in said:
        return name
    if isinstance(annotation, type) and issubclass(annotation, (nn.Module, torch.Tensor)):
        raise TypeError(f"{name} wants {annotation.__name__}")
    if free:
        return free.pop(0)
    return (1, told.sizes.E, 2)[at % 3]


@dataclasses.dataclass(eq=False)
class Constructor:
    """One way to construct a class: `make` does it, `text` says it."""

    cls: type
    sizes: Sizes
    choice: Choices = Choices()
    given: Mapping[str, object] = dataclasses.field(default_factory=dict)
    told: ArgumentValues | None = None
    text: str = ""
    allowed: set[str] = dataclasses.field(default_factory=set)
    containers: set[str] = dataclasses.field(default_factory=set)

    def make(self, dropout: float = 0.0, thrown: Mapping[str, object] | None = None) -> Any:
        """Construct it; fields of a configuration that it turns out to need are made up one by one.

        thrown: switches, parameters or fields, that are to have these values.
        """
        while True:
            try:
                return self._once(dropout, thrown or {})
            except MissingField as error:
                if error.path in self.allowed or len(self.allowed) >= MOST_FIELDS:
                    raise
                self.allowed.add(error.path)

    @property
    def made_up(self) -> dict[str, object]:
        """What no name explains, and what it was given."""
        return {} if self.told is None else self.told.made_up

    @property
    def rotations(self) -> list[str]:
        """Parameters that were given a rotation of ours."""
        return [] if self.told is None else self.told.rotations

    @property
    def heads_by_place(self) -> bool:
        """Whether the number of heads went to a parameter whose name says nothing."""
        return self.told is not None and self.sizes.H in self.told.free.values()

    def switches(self) -> Iterator[dict[str, object]]:
        """Parameters and fields of a configuration that may hide the future, each with another value."""
        conditions, every = conditions_of(self.cls), {one.name: one for one in parameters_of(self.cls)}
        config = any(size_word(name) == "config" for name in every)
        for name, compared in conditions.items():
            if not may_change_output(name) or (name not in every and not config):
                continue
            default = every[name].default if name in every else False
            if default is inspect.Parameter.empty:
                default = None if any(isinstance(one, str) for one in compared) else False
            values = other_values(default, compared)
            if name not in every:  # what a field of a configuration is now is not known here
                values = [True, False, *(one for one in compared if isinstance(one, str))]
            for value in values:
                yield {name: value}
        hints = annotations_of(self.cls.__init__)  # type: ignore[misc]
        for one in every.values():
            takes = fits(True, hints.get(one.name, one.annotation), one.default)
            if takes and size_word(one.name) == "causal":
                yield {one.name: True}

    def _once(self, dropout: float, thrown: Mapping[str, object]) -> Any:
        given = {**self.given, **thrown}
        told = ArgumentValues(self.sizes, self.choice, dropout, given, self.allowed, self.containers)
        told.switches = conditions_of(self.cls)
        positional, named = self._arguments(told)
        if not thrown and not dropout:
            self.told = told
        try:
            return self.cls(*positional.values(), **named)
        finally:
            if not thrown and not dropout:
                self.text = _text(self.cls.__name__, positional | named, told)

    def _arguments(self, told: ArgumentValues) -> tuple[dict[str, object], dict[str, object]]:
        every = parameters_of(self.cls)
        hints = annotations_of(self.cls.__init__)  # type: ignore[misc]
        words = {size_word(one.name) for one in every}
        free = [n for word, n in (("width", self.sizes.E), ("heads", self.sizes.H)) if word not in words]
        free = [] if "config" in words else free
        if self.choice.swapped:
            free.reverse()
        positional: dict[str, object] = {}
        named: dict[str, object] = {}
        for one in every:
            annotation = hints.get(one.name, one.annotation)
            found = self._value(one, annotation, told, free)
            if found is None:
                continue
            (positional if one.kind is one.POSITIONAL_ONLY else named)[one.name] = found[0]
        named |= {
            k: v for k, v in self.given.items() if "." not in k and k not in {one.name for one in every}
        }
        own = {one.name for one in every}
        if "config" in words and not any("." in k for k in self.given):
            named = {k: v for k, v in named.items() if k in own}  # the others are fields
        return positional, named

    def _value(
        self, one: inspect.Parameter, annotation: Any, told: ArgumentValues, free: list[int]
    ) -> tuple[object] | None:
        """What one parameter is given; None: nothing, it has a default."""
        required = one.default is one.empty
        if one.name in told.given:
            return (told.given[one.name],)
        if required and _is_config(one.name, annotation, self.cls):
            return (self._config(one.name, annotation, told),)
        if not required and (self.choice.defaults or not may_override(one.default, one.name, annotation)):
            return None
        value = told.by_name(one.name)
        if value is not None and fits(value, annotation, one.default):
            return (value,)
        if not required:
            return None
        if is_rotation(one.name) and not _bare_types(annotation) & {int, float, bool, str}:
            return (self._rotation(one.name, annotation, told),)
        if one.name in told.switches and fits(False, annotation):
            return (False,)
        dice = _dice(one.name, annotation, self.cls)
        if dice is not None:
            return (dice,)
        value = told.scale(one.name) or _window(one.name, self.cls, self.choice.made_up)
        if value is None or (not isinstance(value, tuple) and not fits(value, annotation)):
            left = len(free)
            value = made_up(one.name, annotation, told, free)
            if len(free) < left:
                told.free[one.name] = value
                return (value,)
        told.made_up[one.name] = value
        return (value,)

    def _rotation(self, name: str, annotation: Any, told: ArgumentValues) -> object:
        """Of the class the annotation names, or one the file defines, for one head; else one of ours."""
        head = dataclasses.replace(self.sizes, E=self.sizes.D)
        own = self.choice.own_config and not rotations_are_constant()
        for one in _own_rotations(annotation, self.cls) if own else ():
            with contextlib.suppress(Exception):
                return Constructor(one, head, self.choice).make()
        told.rotations.append(name)
        heads = (self.sizes.H, max(1, self.sizes.H // 2), 1)
        try:
            source = inspect.getsource(self.cls)
        except (OSError, TypeError):
            source = ""
        return Rotation(self.sizes.D, heads, rotations_are_constant(), source=source)

    def _config(self, name: str, annotation: Any, told: ArgumentValues) -> object:
        """Of the class the annotation names, or one the file defines, its sizes set; else one of ours."""
        if self.choice.own_config:
            for one in _own_configs(annotation, self.cls):
                try:
                    return _filled(one, name, told)
                except Exception:  # the next, or one of ours
                    continue
        return StandInConfig(told, name)


DICE = re.compile(r"rng|gen|generator|random_?(state|generator)|prng|np_?random")
OLD_DICE = re.compile(r"rand|randn|randint|random_sample|ranf")  # methods that NumPy's newer generators lack


def _dice(name: str, annotation: Any, cls: type) -> object:
    """A random generator, seeded, of the kind the class asks for numbers; None for any other parameter."""
    if annotation is torch.Generator:
        return torch.Generator().manual_seed(0)
    numpy = sys.modules.get("numpy")
    if not DICE.fullmatch(name.lower()) or _bare_types(annotation) & {int, float, bool, str}:
        return None
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        source = ""
    asked = re.findall(rf"\b{name}\.(\w+)\(", source)
    if not asked or numpy is None:
        return torch.Generator().manual_seed(0) if f"generator={name}" in source else None
    old = any(OLD_DICE.fullmatch(one) for one in asked)
    made: object = numpy.random.RandomState(0) if old else numpy.random.default_rng(0)
    return made


SIDES = (3, 2, 4)  # of a window, one for each choice of what is made up
WINDOW = re.compile(r"win|window|ws|(window|win)_?size")


def _window(name: str, cls: type, choice: int) -> int | tuple[int, int] | None:
    """The side of a window, or both sides where they are asked for one by one; None for another parameter."""
    if not WINDOW.fullmatch(name.lower()):
        return None
    side = SIDES[choice % len(SIDES)]
    with contextlib.suppress(OSError, TypeError):
        if re.search(rf"\b{name}\[[01]\]|[\w.]+, [\w.]+ = {name}\b", inspect.getsource(cls)):
            return side, side
    return side


def may_override(default: object, name: str, annotation: object = inspect.Parameter.empty) -> bool:
    """Sizes and rates of the learner's own choosing are ours to set; switches and None are not."""
    word = size_word(name)
    if word == "batch first":
        return True
    if word == "key heads" and default is None:
        return fits(1, annotation)
    if word in KEPT:
        return False
    return isinstance(default, (int, float)) and not isinstance(default, bool)


def _is_config(name: str, annotation: Any, cls: type) -> bool:
    if size_word(name) == "config" and _bare_types(annotation) & {int, float, bool, str} == set():
        return True
    return isinstance(annotation, type) and (
        dataclasses.is_dataclass(annotation) or annotation.__name__.lower().endswith(("config", "args"))
    )


def _own_rotations(annotation: Any, cls: type) -> list[type]:
    """The class the annotation names, and those of the file that are called so and know no heads."""
    file = vars(sys.modules.get(cls.__module__, types.SimpleNamespace()))
    named = [one for key, one in file.items() if is_rotation(key)]
    return [
        one for one in [annotation, *named]
        if isinstance(one, type) and one.__module__ == cls.__module__
        and not any(size_word(each.name) == "heads" for each in parameters_of(one))
    ]  # fmt: skip


def _own_configs(annotation: Any, cls: type) -> Iterator[Any]:
    """The class the annotation names; else classes and objects of the file that are called configuration."""
    if isinstance(annotation, type) and annotation not in (dict, object, inspect.Parameter.empty):
        yield annotation
        return
    module = sys.modules.get(cls.__module__)
    if module is None:
        return
    for name, thing in vars(module).items():
        if size_word(name.rstrip("0123456789_M")) != "config" or thing is cls or inspect.ismodule(thing):
            continue
        if isinstance(thing, type):
            fits_here = thing.__module__ == module.__name__ and not issubclass(thing, nn.Module)
        else:
            fits_here = isinstance(thing, dict) or (
                not inspect.isroutine(thing) and hasattr(thing, "__dict__")
            )
        if fits_here:
            yield thing


def _filled(config: Any, path: str, told: ArgumentValues) -> object:
    """A configuration of the learner's own, with sizes of ours in place of theirs."""
    if isinstance(config, type):
        named: dict[str, object] = {}
        hints = annotations_of(config)
        for one in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
            required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
            if one.init and required:
                named[one.name] = _set(one.name, hints.get(one.name, one.type), told, f"{path}.{one.name}")
        made: Any = config(**named)
    else:
        made, hints = copy.deepcopy(config), {}
    is_dict = isinstance(made, dict)
    names = list(made) if is_dict else [name for name in dir(made) if not name.startswith("_")]
    changes = {}
    for name in names:
        now = made[name] if is_dict else getattr(made, name)
        value = told.given.get(f"{path}.{name}", told.given.get(name))
        if isinstance(now, dict):
            value = _filled(now, f"{path}.{name}", told)
        elif value is None and isinstance(name, str):
            annotation = hints.get(name, inspect.Parameter.empty)
            may = may_override(now, name, annotation) and not callable(now)
            value = told.by_name(name) if may else None
            value = value if fits(value, annotation, now) else None
        if value is not None:
            changes[name] = value
            if not isinstance(value, dict):
                told.fields[f"{path}.{name}"] = value
    if is_dict:
        made.update(changes)
    elif dataclasses.is_dataclass(made) and not isinstance(made, type):
        fields = {one.name for one in dataclasses.fields(made) if one.init}
        made = dataclasses.replace(made, **{k: v for k, v in changes.items() if k in fields})
    else:
        for name, value in changes.items():
            setattr(made, name, value)
    return made


def _set(name: str, annotation: Any, told: ArgumentValues, path: str) -> object:
    """A required field of a dataclass."""
    value = told.given.get(path, told.given.get(name))
    if value is None:
        value = told.by_name(name)
        value = value if value is not None and fits(value, annotation) else None
    if value is None:
        value = told.scale(name)
        if value is None or not fits(value, annotation):
            value = None if None in _bare_types(annotation) else made_up(name, annotation, told, [])
        told.made_up[path] = value
    told.fields[path] = value
    return value


def _text(name: str, arguments: Mapping[str, object], told: ArgumentValues) -> str:
    """The call as Python: "Attention(config) with config.n_head=4"."""
    said = []
    for key, value in arguments.items():
        is_field = any(path.startswith(f"{key}.") for path in told.fields) or isinstance(value, StandInConfig)
        said.append(key if is_field else f"{key}={_shown(value)}")
    fields = ", ".join(f"{path}={_shown(value)}" for path, value in told.fields.items())
    return f"{name}({', '.join(said)})" + (f" with {fields}" if fields else "")


def _shown(value: object) -> str:
    if isinstance(value, _NestedNumber):
        return str(int(value))
    if isinstance(value, torch.Generator) or type(value).__module__.startswith("numpy.random"):
        return f"{type(value).__name__}(0)"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
