"""Constructing a class whatever its constructor calls its sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .sizes import USUAL, Sizes
from .wording import size_word

__all__ = ["AnyConfig", "Recipe", "recipes"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to construct a class."""

    make: Callable[[], object]
    sizes: Sizes
    heads_given: bool  # the constructor was told how many heads
    width_given: bool
    dropout: Callable[[float], Any] | None = (
        None  # the same with this much dropout, where it can be asked for
    )
    causal: Callable[[], Any] | None = None  # the same with its causal switch on


class AnyConfig:
    """A configuration that answers to any sensible field, as attribute or as key."""

    def __init__(self, sizes: Sizes, dropout: float = 0.0, guess: bool = False) -> None:
        self.__dict__["_of"] = (sizes, dropout, guess)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        sizes, dropout, guess = self.__dict__["_of"]
        value = _value(size_word(name), sizes, dropout, per_head=True)
        if value is not None:
            return value
        word = name.lower()
        if size_word(name) == "flag":
            return False
        if "implementation" in word:
            return "eager"
        if "position_embedding_type" in word:
            return "absolute"
        if guess:
            return sizes.E
        raise AttributeError(name)

    def __getitem__(self, name: str) -> object:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def get(self, name: str, default: object = None) -> object:
        """As a dict's."""
        return getattr(self, name, default)


def _value(word: str | None, sizes: Sizes, dropout: float, per_head: bool) -> object:
    """What a parameter of this meaning is given; None where there is nothing to say."""
    return {
        "width": sizes.E,
        "heads": sizes.H,
        "key heads": sizes.H,
        "head dim": sizes.D if per_head else sizes.E,
        "length": sizes.block,
        "dropout": dropout,
        "bias": True,
        "batch first": True,
        "batch": sizes.B,
        "causal": False,
        "layer": 1,
        "vocabulary": 50,
        "epsilon": 1e-5,
        "theta": 10000.0,
        "temperature": sizes.D**0.5,
        "scale": sizes.D**-0.5,
        "dtype": torch.float64,
        "device": "cpu",
    }.get(word or "")


def _config(annotation: object, sizes: Sizes, dropout: float, guess: bool) -> object:
    """An object of the class the annotation names, its sizes set; or one that answers to anything."""
    if not isinstance(annotation, type) or annotation in (dict, object, inspect.Parameter.empty):
        return AnyConfig(sizes, dropout, guess)
    try:
        if dataclasses.is_dataclass(annotation):
            named = {}
            for one in dataclasses.fields(annotation):
                value = _value(size_word(one.name), sizes, dropout, per_head=True)
                required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
                if one.init and value is not None and (required or _may_override(one.default, one.name)):
                    named[one.name] = value
            return annotation(**named)
        made = annotation()
        for name in dir(made):
            value = _value(size_word(name), sizes, dropout, per_head=True)
            if not name.startswith("_") and value is not None and _may_override(getattr(made, name), name):
                setattr(made, name, value)
    except Exception:
        return AnyConfig(sizes, dropout, guess)
    return made


def _may_override(default: object, name: str) -> bool:
    """Sizes and rates of the learner's own choosing are ours to set; switches and None are not."""
    if size_word(name) in {"batch first"}:
        return True
    if size_word(name) in {
        "bias",
        "causal",
        "layer",
        "dtype",
        "device",
        "epsilon",
        "theta",
        "batch",
        "scale",
    }:
        return False
    return isinstance(default, (int, float)) and not isinstance(default, bool)


def _arguments(
    signature: inspect.Signature, sizes: Sizes, dropout: float, variant: str, switch: bool = False
) -> tuple[list[object], dict[str, object]]:
    """What to call the constructor with. variant: "", "wide keys", "swapped", "defaults", "guess"."""
    positional: list[object] = []
    named: dict[str, object] = {}
    unknown = [sizes.E, sizes.H]
    if variant == "swapped":
        unknown.reverse()
    for one in signature.parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        word = size_word(one.name)
        required = one.default is one.empty
        if switch and word == "causal":
            value: object = True
        elif word == "config" and required:
            value = _config(one.annotation, sizes, dropout, variant == "guess")
        elif not required and (variant == "defaults" or not _may_override(one.default, one.name)):
            continue
        else:
            value = _value(word, sizes, dropout, per_head=variant != "wide keys")
        if value is None and required:
            value = _guess(one, unknown, sizes)
        if value is None and not required:
            continue
        if one.kind is one.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[one.name] = value
    return positional, named


def _guess(parameter: inspect.Parameter, unknown: list[int], sizes: Sizes) -> object:
    """A value for a parameter whose name says nothing."""
    annotation = str(getattr(parameter.annotation, "__name__", parameter.annotation))
    if size_word(parameter.name) == "flag" or annotation == "bool":
        return False
    if annotation == "float":
        return 0.0
    if annotation == "str":
        return ""
    return unknown.pop(0) if unknown else sizes.E


def recipes(cls: type, embed_dim: int | None, num_heads: int | None) -> Iterator[Recipe]:
    """Ways to construct it, the likeliest first."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    words = {size_word(one.name) for one in signature.parameters.values()}
    config = "config" in words
    heads_given, width_given = config or "heads" in words, config or "width" in words
    usual = [(embed_dim or E, num_heads or H) for E, H in USUAL]
    tried: set[tuple[int, int, str, int]] = set()

    def one(E: int, H: int, variant: str, block: int = 16) -> Iterator[Recipe]:
        if (E, H, variant, block) in tried:
            return
        tried.add((E, H, variant, block))
        sizes = dataclasses.replace(Sizes().of_width(E, H), block=block)

        def make(dropout: float = 0.0, switch: bool = False) -> object:
            positional, named = _arguments(signature, sizes, dropout, variant, switch)
            return cls(*positional, **named)

        yield Recipe(
            make, sizes, heads_given, width_given,
            make if "dropout" in words or config else None,
            (lambda: make(switch=True)) if "causal" in words else None,
        )  # fmt: skip

    yield from one(*usual[0], "")
    if "head dim" in words:
        yield from one(*usual[0], "wide keys")
    if "length" in words or config:
        yield from one(*usual[0], "", 7)
    if None in words:
        yield from one(*usual[0], "swapped")
    if config:
        yield from one(*usual[0], "guess")
    yield from one(*usual[0], "defaults")
    for E, H in usual[1:]:
        yield from one(E, H, "")
