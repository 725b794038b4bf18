"""The first way to build and call the learner's code that gives an output."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from ..evidence import Problem
from .building import Recipe, recipes
from .calling import Caller
from .failing import CAUGHT, files_of, problem_of
from .finding import find_caller
from .sizes import Sizes
from .subject import Subject, apart, has_loose, head_count, settle, signature_of, widths_of
from .surroundings import by_default, seed
from .wording import bare, input_word, role_word, size_word

__all__ = ["Made", "as_given", "by_class"]

Made = tuple[Caller | None, Recipe | None, Problem | None]


def by_class(cls: type, embed_dim: int | None, num_heads: int | None) -> Made:
    """The first way to construct it after which it can be called."""
    files = files_of(cls)
    building: Problem | None = None
    calling: Problem | None = None
    failures = 0
    for recipe in recipes(cls, embed_dim, num_heads):
        try:
            seed(0)
            body = recipe.make()
        except CAUGHT as error:
            building = building or problem_of(error, "build", files)
            continue
        if not callable(body):
            message = f"an instance of {cls.__name__} cannot be called: it has no forward"
            return None, None, Problem("call", "TypeError", message)
        own = _apart(recipe) if has_loose(body) else {}
        for sizes in _sizes_for(body, recipe):
            subject = Subject(body, files, sizes, heads_given=recipe.heads_given, make=recipe.make, apart=own)
            caller, problem = _ready(subject)
            if caller is not None:
                return caller, recipe, None
            calling = calling or problem
        failures += 1
        if failures >= 4:
            break
    return None, None, calling or building


def _apart(recipe: Recipe) -> dict[str, torch.dtype]:
    """Built once more as its author has it, float32 by default: which loose tensors are of another dtype."""
    try:
        with by_default(torch.float32):
            seed(0)
            return apart(recipe.make())
    except CAUGHT:
        return {}


def _sizes_for(body: object, recipe: Recipe) -> list[Sizes]:
    """The sizes it was built for; where the constructor was not told a width, those it may have inside."""
    sizes = recipe.sizes
    heads = head_count(body)
    if not recipe.heads_given and isinstance(body, nn.Module) and any(True for _ in body.parameters()):
        sizes = sizes.of_width(sizes.E, heads or 1)
    found = [sizes]
    if not recipe.width_given:
        found = [sizes.of_width(E, heads or sizes.H) for E in _widths(body)[:6]] or found
    return found + _short(body, found[0])


def _widths(body: object) -> list[int]:
    try:
        return widths_of(body)
    except CAUGHT:
        return []


def _short(body: object, sizes: Sizes) -> list[Sizes]:
    """For code with a triangle of a few positions built in."""
    buffers = body.buffers() if isinstance(body, nn.Module) else ()
    sides = {one.shape[-1] for one in buffers if one.ndim >= 2 and one.shape[-1] == one.shape[-2]}
    return [sizes.shorter(side) for side in sorted(sides) if 3 <= side != sizes.long and side <= 64]


def _ready(subject: Subject) -> tuple[Caller | None, Problem | None]:
    """Called once as it is, so that lazy layers get their shapes; then settled."""
    body = subject.body
    try:
        settle(subject)
    except CAUGHT:
        if isinstance(body, nn.Module):
            body.double().eval()
    caller, problem = find_caller(subject)
    if caller is None:
        return None, problem
    try:
        settle(caller.subject)
    except CAUGHT as error:
        return None, problem_of(error, "build", subject.files)
    return caller, None


def as_given(obj: object, embed_dim: int | None, num_heads: int | None, is_function: bool) -> Made:
    """An instance on a deep copy, or a function with weights of ours for those it takes as arguments."""
    files = files_of(obj)
    if is_function:
        return _function(obj, files, embed_dim, num_heads)
    try:
        body = copy.deepcopy(obj)
    except CAUGHT as error:
        return None, None, problem_of(error, "build", files)
    own = apart(body)
    heads = num_heads or head_count(body)
    widths = [embed_dim] if embed_dim else _widths(body)[:6]
    sizes = [Sizes().of_width(E, heads or 1) for E in widths] or [Sizes()]
    first: Problem | None = None
    for one in [*sizes, *_short(body, sizes[0])]:
        caller, problem = _ready(Subject(body, files, one, heads_given=heads is not None, apart=own))
        if caller is not None:
            return caller, None, None
        first = first or problem
    return None, None, first


def _function(function: object, files: frozenset[str], embed_dim: int | None, num_heads: int | None) -> Made:
    sizes = Sizes().of_width(embed_dim or 24, num_heads or 4)
    every = signature_of(function).parameters.values()
    heads_given = any(size_word(one.name) == "heads" for one in every)
    subject = Subject(function, files, sizes, is_function=True, heads_given=heads_given)
    dice = torch.Generator().manual_seed(20170612)
    for one in every:
        role = _weight_role(one)
        if role is None:
            continue
        times = 3 if role == "qkv" else 1
        vector = "bias" in one.name.lower() or bare(one.name).startswith("b")
        shape = (times * sizes.E,) if vector else (sizes.E, times * sizes.E)
        spread = 0.5 if vector else sizes.E**-0.5
        weight = torch.randn(shape, generator=dice, dtype=torch.float64) * spread
        subject.parameters[one.name] = weight.requires_grad_()
    caller, problem = find_caller(subject)
    return caller, None, problem


def _weight_role(parameter: inspect.Parameter) -> str | None:
    """Which projection an argument of a function is; q, k, v alone are inputs."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or input_word(parameter.name):
        return None
    role = role_word(parameter.name)
    return role if role and (parameter.default is parameter.empty or parameter.default is None) else None
