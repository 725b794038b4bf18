"""Choose the arguments of a constructor: by the names, annotations and defaults of its parameters.

What no name explains is made up and recorded as such. A configuration that the file itself defines comes
before a stand-in. A stand-in has the fields whose names say what they are, at any depth; other fields do not
exist (`getattr(config, "x", None)` is None) until the constructor fails without them.
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

from ..source.parsed import source_of_definition
from .causal_switches import conditions_of, may_change_output, other_values
from .rotations import Rotation, is_rotation, rotations_are_constant
from .subject import Sizes
from .vocabulary import VALUE_DIM, bare, size_word

# Left as the author has them: switches, and numbers that are no sizes
NOT_SIZES = frozenset("bias causal layer dtype device epsilon theta scale temperature flag".split())
MOST_FIELDS = 24
PLAIN = {int, float, bool, str}  # types of numbers, switches and words


@dataclasses.dataclass(frozen=True)
class Choices:
    """One combination of the choices that the arguments of a constructor leave open."""

    few_keys: bool = True  # half as many key/value heads, if there is an argument
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
    """The values that one call of a constructor gets, by name, and which of them were made up."""

    sizes: Sizes
    choice: Choices
    dropout: float
    arguments: Mapping[str, object]
    allowed: set[str]  # fields that no name explains, and that it cannot do without
    containers: set[str]  # fields that turned out to have fields of their own
    switches: Collection[str] = ()  # flags that hide later keys
    fields: dict[str, object] = dataclasses.field(default_factory=dict)  # by path, in the order of use
    made_up: dict[str, object] = dataclasses.field(default_factory=dict)
    by_place: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # width and heads, by their places alone
    rotations: list[str] = dataclasses.field(default_factory=list)  # parameters that got a stand-in

    def passed(self, path: str) -> object:
        """Return what the user passed for a field, by its path or its last part; None for nothing."""
        return self.arguments.get(path, self.arguments.get(path.rpartition(".")[2]))

    def by_name(self, name: str) -> object:
        """Return the value for a parameter of this name; None if its name says nothing."""
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
        """Return a scale or temperature; which of the two the code means is open, so `made_up` chooses."""
        word = size_word(name)
        if word not in {"scale", "temperature"}:
            return None
        root = self.sizes.D**0.5
        return root if (word == "temperature") == (self.choice.made_up % 2 == 0) else 1 / root


class StandInConfig(dict[str, object]):
    """A configuration with the fields whose names say what they are, as attributes and as keys."""

    def __init__(self, values: ArgumentValues, path: str = "config") -> None:
        super().__init__()
        self.__dict__["_values"], self.__dict__["_path"] = values, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        values: ArgumentValues = self.__dict__["_values"]
        path = f"{self.__dict__['_path']}.{name}"
        value = values.passed(path)
        if value is None:
            value = values.by_name(name)
        if value is None and (size_word(name) == "flag" or name in values.switches):
            value = False
        if value is None and "implementation" in name.lower():
            value = "eager"
        if value is None and "position_embedding_type" in name.lower():
            value = "absolute"
        if value is None:
            value = values.scale(name)
            if value is None and path not in values.allowed:
                raise MissingField(path)
            if value is None:
                value = values.sizes.E if path in values.containers else _field_value(name, values)
            values.made_up[path] = value
        if type(value) is int:
            value = _number(
                value, values, path
            )  # a width, unless it is asked for fields: cfg["model"]["heads"]
        values.fields[path] = value
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
        """Return a field, or the default, as a dict does."""
        try:
            return self[name]
        except MissingField:
            return default

    pop = get


class _NestedNumber(int):
    """The value of a field that no name explains; it becomes a configuration when its own fields are read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        values: ArgumentValues = self.__dict__["_values"]
        values.containers.add(self.__dict__["_path"])
        values.made_up.pop(self.__dict__["_path"], None)  # what counts lies deeper
        values.fields.pop(self.__dict__["_path"], None)
        return StandInConfig(values, self.__dict__["_path"])[name]

    def get(self, name: str, default: object = None) -> Any:
        """Return a field, or the default, as a dict does."""
        return StandInConfig(self.__dict__["_values"], self.__dict__["_path"]).get(name, default)


def _field_value(name: str, values: ArgumentValues) -> object:
    """Return a value for a field that no name explains: None, or a number if its name says that it is one."""
    number = re.match(
        r"(num|n|max|min)_|.*(size|dim|len|length|count|width|depth|ratio|factor)$", name.lower()
    )
    order: list[int | None] = [values.sizes.E, 1, 2] if number else [None, values.sizes.E, 1]
    return order[values.choice.made_up % 3]


def _number(value: int, values: ArgumentValues, path: str) -> _NestedNumber:
    number = _NestedNumber(value)
    number.__dict__.update(_values=values, _path=path)
    return number


def parameters_of(cls: type) -> list[inspect.Parameter]:
    """Return the parameters of a constructor, with those it passes on to its base class.

    Of a constructor with **kwargs, these are the names that it reads from them.
    """
    named: list[inspect.Parameter] = []
    for owner in cls.__mro__:
        if "__init__" not in vars(owner) or owner is object:
            continue
        try:
            parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]  # type: ignore[misc]
        except (TypeError, ValueError):
            return named
        named += [
            parameter
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        rest = [parameter for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        if not rest or owner is nn.Module:
            break
        read = _keys_read(owner, rest[0].name)
        names = {parameter.name for parameter in named}
        kind = inspect.Parameter.KEYWORD_ONLY
        named += [inspect.Parameter(key, kind) for key in read if key not in names]
        if read:
            break
    if not any("__init__" in vars(owner) for owner in cls.__mro__ if owner is not object):
        return []
    return named


def source_of(code: Any) -> str:
    """Return the source of a class or function, "" where there is none."""
    try:
        return source_of_definition(code)
    except (OSError, TypeError):
        return ""


def words_of(cls: type) -> set[str | None]:
    """Return what the constructor's parameters are about, by their names: "width", "heads"; None: unknown."""
    return {size_word(parameter.name) for parameter in parameters_of(cls)}


def _keys_read(owner: type, name: str) -> list[str]:
    """Return the keys that a constructor reads from its **kwargs without a default."""
    text = source_of(owner.__init__)  # type: ignore[misc]
    keys = re.findall(rf"\b{name}(?:\[|\.pop\(|\.get\()\s*['\"](\w+)['\"]\s*[\])]", text)
    return list(dict.fromkeys(keys))


def annotations_of(function: Any) -> dict[str, Any]:
    """Return the annotations of a function's parameters; those written as text are resolved if possible."""
    try:
        return typing.get_type_hints(function)
    except Exception:
        return dict(getattr(function, "__annotations__", {}))


def _bare_types(annotation: object) -> set[object]:
    """Return the types of an annotation, without Optional and Union: int | None -> {int, None}."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return {bare_type for part in typing.get_args(annotation) for bare_type in _bare_types(part)}
    words: dict[object, object] = {
        "int": int, "float": float, "bool": bool, "str": str, "None": None, type(None): None,
        "Optional[int]": int, "Optional[float]": float,
    }  # fmt: skip
    return {words.get(annotation, annotation) if isinstance(annotation, (str, type)) else annotation}


def fits(value: object, annotation: object, default: object = inspect.Parameter.empty) -> bool:
    """Return True if a value is of the type of a parameter; a bool is no int, None fits only None."""
    types = _bare_types(annotation) & (PLAIN | {None})
    if annotation is inspect.Parameter.empty or not types:
        if default is inspect.Parameter.empty or default is None:
            return True
        if isinstance(default, bool) or isinstance(value, bool):
            return isinstance(default, bool) and isinstance(value, bool)
        return not isinstance(default, str) or isinstance(value, str)
    if isinstance(value, bool):
        return bool in types
    if isinstance(value, int):
        return bool(types & {int, float})
    if isinstance(value, float):
        return float in types
    return None in types if value is None else str in types


def made_up(name: str, annotation: object, values: ArgumentValues, free: list[int]) -> object:
    """Return a value for a required parameter whose name says nothing."""
    types, choice = _bare_types(annotation), values.choice.made_up
    if bool in types or (size_word(name) == "flag" and annotation is inspect.Parameter.empty):
        return choice % 2 == 1
    if float in types and int not in types:
        return (0.0, 1.0, 0.5)[choice % 3]
    if str in types:
        return name
    if isinstance(annotation, type) and issubclass(annotation, (nn.Module, torch.Tensor)):
        raise TypeError(f"{name} must be {annotation.__name__}, which the check cannot choose")
    if free:
        return free.pop(0)
    return (1, values.sizes.E, 2)[choice % 3]


@dataclasses.dataclass(eq=False)
class Constructor:
    """One way to construct a class: `make` constructs it, `text` is the call as Python."""

    cls: type
    sizes: Sizes
    choice: Choices = Choices()
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    values: ArgumentValues | None = None
    text: str = ""
    allowed: set[str] = dataclasses.field(default_factory=set)
    containers: set[str] = dataclasses.field(default_factory=set)

    def make(self, dropout: float = 0.0, switches: Mapping[str, object] | None = None) -> Any:
        """Construct an instance; fields that a configuration turns out to need are made up one after another.

        Args:
            switches: values of parameters or fields that are set in this instance alone.
        """
        while True:
            try:
                return self._construct(dropout, switches or {})
            except MissingField as error:
                if error.path in self.allowed or len(self.allowed) >= MOST_FIELDS:
                    raise
                self.allowed.add(error.path)

    @property
    def made_up(self) -> dict[str, object]:
        """Values made up for parameters and fields that no name explains."""
        return {} if self.values is None else self.values.made_up

    @property
    def rotations(self) -> list[str]:
        """Parameters that got a stand-in for a rotation."""
        return [] if self.values is None else self.values.rotations

    @property
    def sizes_by_place(self) -> list[int]:
        """Width and number of heads, where they went to parameters whose names say nothing."""
        return [] if self.values is None else list(self.values.by_place.values())

    def switches(self) -> Iterator[dict[str, object]]:
        """Yield parameters and fields that may hide the future, each with another value than its default."""
        parameters = {parameter.name: parameter for parameter in parameters_of(self.cls)}
        for name, compared in conditions_of(self.cls).items():
            if not may_change_output(name) or (name not in parameters and "config" not in words_of(self.cls)):
                continue
            texts = [value for value in compared if isinstance(value, str)]
            if name in parameters:
                default = parameters[name].default
                if default is inspect.Parameter.empty:
                    default = None if texts else False
                values = other_values(default, compared)
            else:
                values = [True, False, *texts]  # the default of a configuration's field is not known
            for value in values:
                yield {name: value}
        hints = annotations_of(self.cls.__init__)  # type: ignore[misc]
        for name, parameter in parameters.items():
            takes = fits(True, hints.get(name, parameter.annotation), parameter.default)
            if takes and size_word(name) == "causal":
                yield {name: True}

    def _construct(self, dropout: float, switches: Mapping[str, object]) -> Any:
        arguments = {**self.arguments, **switches}
        values = ArgumentValues(self.sizes, self.choice, dropout, arguments, self.allowed, self.containers)
        values.switches = conditions_of(self.cls)
        positional, named = self._arguments(values)
        is_usual = not switches and not dropout
        if is_usual:
            self.values = values
        try:
            return self.cls(*positional.values(), **named)
        finally:
            if is_usual:
                self.text = _text(self.cls.__name__, positional | named, values)

    def _arguments(self, values: ArgumentValues) -> tuple[dict[str, object], dict[str, object]]:
        """Return the positional arguments and those by name."""
        parameters, words = parameters_of(self.cls), words_of(self.cls)
        hints = annotations_of(self.cls.__init__)  # type: ignore[misc]
        free = [n for word, n in (("width", self.sizes.E), ("heads", self.sizes.H)) if word not in words]
        free = [] if "config" in words else free
        if self.choice.swapped:
            free.reverse()
        positional: dict[str, object] = {}
        named: dict[str, object] = {}
        for parameter in parameters:
            value = self._value(parameter, hints.get(parameter.name, parameter.annotation), values, free)
            if value is not None:
                is_positional = parameter.kind is parameter.POSITIONAL_ONLY
                (positional if is_positional else named)[parameter.name] = value[0]
        if "config" not in words or any("." in name for name in self.arguments):  # else they are fields
            own_names = {parameter.name for parameter in parameters}
            named |= {k: v for k, v in self.arguments.items() if "." not in k and k not in own_names}
        return positional, named

    def _value(
        self, parameter: inspect.Parameter, annotation: Any, values: ArgumentValues, free: list[int]
    ) -> tuple[object] | None:
        """Return the value of one parameter in a tuple; None if its default is used."""
        name, default = parameter.name, parameter.default
        required = default is parameter.empty
        if name in values.arguments:
            return (values.arguments[name],)
        if required and _is_config(name, annotation, self.cls):
            return (self._configuration(name, annotation, values),)
        if not required and (self.choice.defaults or not may_override(default, name, annotation)):
            return None
        value = values.by_name(name)
        if value is not None and fits(value, annotation, default):
            return (value,)
        if not required:
            return None
        if is_rotation(name) and not _bare_types(annotation) & PLAIN:
            return (self._rotation(name, annotation, values),)
        if name in values.switches and fits(False, annotation):
            return (False,)
        generator = _generator(name, annotation, self.cls)
        if generator is not None:
            return (generator,)
        value = values.scale(name) or _window(name, self.cls, self.choice.made_up)
        if value is None or (not isinstance(value, tuple) and not fits(value, annotation)):
            left = list(free)
            value = made_up(name, annotation, values, free)
            if len(free) < len(left):
                values.by_place[name] = left[0]
                return (value,)
        values.made_up[name] = value
        return (value,)

    def _rotation(self, name: str, annotation: Any, values: ArgumentValues) -> object:
        """Return a rotation for one head: the annotated class, one that the file defines, or a stand-in."""
        head = dataclasses.replace(self.sizes, E=self.sizes.D)
        if self.choice.own_config and not rotations_are_constant():
            for rotation in _own_rotations(annotation, self.cls):
                with contextlib.suppress(Exception):
                    return Constructor(rotation, head, self.choice).make()
        values.rotations.append(name)
        heads = (self.sizes.H, max(1, self.sizes.H // 2), 1)
        return Rotation(self.sizes.D, heads, rotations_are_constant(), source=source_of(self.cls))

    def _configuration(self, name: str, annotation: Any, values: ArgumentValues) -> object:
        """Return a configuration: of the annotated class, of one that the file defines, or a stand-in."""
        if self.choice.own_config:
            for config in _own_configs(annotation, self.cls):
                try:
                    return _with_sizes(config, name, values)
                except Exception:  # the next, or one of ours
                    continue
        return StandInConfig(values, name)


GENERATOR = re.compile(r"rng|gen|generator|random_?(state|generator)|prng|np_?random")
OLD_GENERATOR = re.compile(
    r"rand|randn|randint|random_sample|ranf"
)  # methods that NumPy's newer generators lack


def _generator(name: str, annotation: Any, cls: type) -> object:
    """Return a seeded random generator of the kind that the class uses; None for any other parameter."""
    if annotation is torch.Generator:
        return torch.Generator().manual_seed(0)
    numpy = sys.modules.get("numpy")
    if not GENERATOR.fullmatch(name.lower()) or _bare_types(annotation) & PLAIN:
        return None
    source = source_of(cls)
    methods = re.findall(rf"\b{name}\.(\w+)\(", source)
    if not methods or numpy is None:
        return torch.Generator().manual_seed(0) if f"generator={name}" in source else None
    is_old = any(OLD_GENERATOR.fullmatch(method) for method in methods)
    generator: object = numpy.random.RandomState(0) if is_old else numpy.random.default_rng(0)
    return generator


SIDES = (3, 2, 4)  # of a window, one for each choice of what is made up
WINDOW = re.compile(r"win|window|ws|(window|win)_?size")


def _window(name: str, cls: type, choice: int) -> int | tuple[int, int] | None:
    """Return the side of a window, or a pair if the class reads two; None for any other parameter."""
    if not WINDOW.fullmatch(name.lower()):
        return None
    side = SIDES[choice % len(SIDES)]
    takes_pair = re.search(rf"\b{name}\[[01]\]|[\w.]+, [\w.]+ = {name}\b", source_of(cls))
    return (side, side) if takes_pair else side


def may_override(default: object, name: str, annotation: object = inspect.Parameter.empty) -> bool:
    """Return True for sizes and rates, which may be changed; False for switches and None."""
    word = size_word(name)
    if word == "batch first":
        return True
    if word == "key heads" and default is None:
        return fits(1, annotation)
    if word in NOT_SIZES:
        return False
    return isinstance(default, (int, float)) and not isinstance(default, bool)


def _is_config(name: str, annotation: Any, cls: type) -> bool:
    """Return True if a parameter takes a configuration, by its name or annotation."""
    if size_word(name) == "config" and _bare_types(annotation) & PLAIN == set():
        return True
    return isinstance(annotation, type) and (
        dataclasses.is_dataclass(annotation) or annotation.__name__.lower().endswith(("config", "args"))
    )


def _own_rotations(annotation: Any, cls: type) -> list[type]:
    """Return the annotated class and rotations that the file defines, without those that take heads."""
    file = vars(sys.modules.get(cls.__module__, types.SimpleNamespace()))
    named = [value for key, value in file.items() if is_rotation(key)]
    return [
        value for value in [annotation, *named]
        if isinstance(value, type) and value.__module__ == cls.__module__
        and not any(size_word(each.name) == "heads" for each in parameters_of(value))
    ]  # fmt: skip


def _own_configs(annotation: Any, cls: type) -> Iterator[Any]:
    """Yield the annotated class; else classes and objects of the file that are named configuration."""
    if isinstance(annotation, type) and annotation not in (dict, object, inspect.Parameter.empty):
        yield annotation
        return
    module = sys.modules.get(cls.__module__)
    if module is None:
        return
    for name, value in vars(module).items():
        if size_word(name.rstrip("0123456789_M")) != "config" or value is cls or inspect.ismodule(value):
            continue
        if isinstance(value, type):
            is_config = value.__module__ == module.__name__ and not issubclass(value, nn.Module)
        else:
            is_config = isinstance(value, dict) or (
                not inspect.isroutine(value) and hasattr(value, "__dict__")
            )
        if is_config:
            yield value


def _with_sizes(config: Any, path: str, values: ArgumentValues) -> object:
    """Return a configuration of the learner's own with the sizes of this examination."""
    if isinstance(config, type):
        named: dict[str, object] = {}
        hints = annotations_of(config)
        for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if field.init and required:
                annotation = hints.get(field.name, field.type)
                named[field.name] = _field_argument(annotation, values, f"{path}.{field.name}")
        filled: Any = config(**named)
    else:
        filled, hints = copy.deepcopy(config), {}
    is_dict = isinstance(filled, dict)
    names = list(filled) if is_dict else [name for name in dir(filled) if not name.startswith("_")]
    changes = {}
    for name in names:
        now = filled[name] if is_dict else getattr(filled, name)
        value = values.passed(f"{path}.{name}")
        if isinstance(now, dict):
            value = _with_sizes(now, f"{path}.{name}", values)
        elif value is None and isinstance(name, str):
            annotation = hints.get(name, inspect.Parameter.empty)
            is_free = may_override(now, name, annotation) and not callable(now)
            value = values.by_name(name) if is_free else None
            value = value if fits(value, annotation, now) else None
        if value is not None:
            changes[name] = value
            if not isinstance(value, dict):
                values.fields[f"{path}.{name}"] = value
    if is_dict:
        filled.update(changes)
    elif dataclasses.is_dataclass(filled) and not isinstance(filled, type):
        fields = {field.name for field in dataclasses.fields(filled) if field.init}
        filled = dataclasses.replace(filled, **{k: v for k, v in changes.items() if k in fields})
    else:
        for name, value in changes.items():
            setattr(filled, name, value)
    return filled


def _field_argument(annotation: Any, values: ArgumentValues, path: str) -> object:
    """Return a value for a required field of a dataclass."""
    name = path.rpartition(".")[2]
    value = values.passed(path)
    if value is None:
        value = values.by_name(name)
        value = value if value is not None and fits(value, annotation) else None
    if value is None:
        value = values.scale(name)
        if value is None or not fits(value, annotation):
            value = None if None in _bare_types(annotation) else made_up(name, annotation, values, [])
        values.made_up[path] = value
    values.fields[path] = value
    return value


def _text(name: str, arguments: Mapping[str, object], values: ArgumentValues) -> str:
    """Return the call as Python: "Attention(config) with config.n_head=4"."""
    parts = []
    for key, value in arguments.items():
        has_fields = any(path.startswith(f"{key}.") for path in values.fields)
        is_field = has_fields or isinstance(value, StandInConfig)
        parts.append(key if is_field else f"{key}={_literal(value)}")
    fields = ", ".join(f"{path}={_literal(value)}" for path, value in values.fields.items())
    return f"{name}({', '.join(parts)})" + (f" with {fields}" if fields else "")


def _literal(value: object) -> str:
    """Return a value as Python."""
    if isinstance(value, _NestedNumber):
        return str(int(value))
    if isinstance(value, torch.Generator) or type(value).__module__.startswith("numpy.random"):
        return f"{type(value).__name__}(0)"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
