"""Constructing the learner's class, and the first way to build and call it that gives an output.

What the examiner made up is written down: where an exception, or the numbers, may be owed to that, it is a
guess of ours that failed and not the learner's code. Code is examined in float64; what raises for its dtype
there is tried with its steps down to float32 left out, then in float32 throughout, as its author runs it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..evidence import Problem
from .call_plan import plans
from .caller import Caller
from .constructor import Choices, Constructor, parameters_of
from .conventions import find_caller
from .environment import CAUGHT, by_default, files_of, problem_of, seed
from .rotations import is_rotation
from .subject import (
    BATCH_NORMS,
    CONVOLUTIONS,
    USUAL,
    Sizes,
    Subject,
    entry_of,
    globals_of,
    has_loose,
    head_count,
    in_precision,
    loose_dtypes,
    settle,
    signature_of,
    widths_of,
)  # fmt: skip
from .vocabulary import bare, input_word, role_word, size_word

MANNERS = ("double", "calm", "single")
MOST_FAILURES = 5
MOST_OF_A_BATCH = 128  # of a file's own
REFUSALS = ("raise ValueError", "raise TypeError", "raise RuntimeError", "raise AssertionError", "assert ")
GUESS = "guess"  # the kind of a problem that may be owed to what the examiner made up


@dataclasses.dataclass(frozen=True)
class Construction:
    """One way to construct a class."""

    make: Callable[[], Any]
    sizes: Sizes
    heads_given: bool  # the constructor was told how many heads
    width_given: bool
    dropout: Callable[[float], Any] | None = (
        None  # the same with this much dropout, where it can be asked for
    )
    throw: Callable[[Mapping[str, object]], Any] | None = None  # the same with these switches
    constructor: Constructor | None = None
    manner: str = "double"


@dataclasses.dataclass(eq=False)
class BuildResult:
    """What came of it: what calls the code, or why there is nothing to call."""

    caller: Caller | None = None
    recipe: Construction | None = None
    problem: Problem | None = None
    text: str = ""  # as Python
    tried: list[str] = dataclasses.field(default_factory=list)  # what was tried in vain, a sentence each


_DTYPE = re.compile(
    r"dtype|scalar type|\bFloat\b|\bDouble\b|float32|float64|Complex|same type|DoubleTensor|FloatTensor"
)


_CHANNELS_FIRST = re.compile(r"num_groups|\bchannels\b|[Ee]xpected .*\dD|running_mean")  # of their exceptions


def about_dtype(problem: Problem | None) -> bool:
    """Whether an exception is about dtypes that do not go together."""
    return problem is not None and bool(_DTYPE.search(problem.message))


def recipes(
    cls: type, embed_dim: int | None, num_heads: int | None, given: Mapping[str, object]
) -> Iterator[tuple[Sizes, Choices]]:
    """Ways to construct it, the likeliest first."""
    every = parameters_of(cls)
    words = {size_word(one.name) for one in every}
    config, turns = "config" in words, any(is_rotation(one.name) for one in every)
    said = {size_word(path.rpartition(".")[2]): n for path, n in given.items() if type(n) is int}
    embed_dim, num_heads = embed_dim or said.get("width"), num_heads or said.get("heads")
    usual = [(embed_dim or E, num_heads or H) for E, H in USUAL]
    tried: set[tuple[int, int, Choices, int]] = set()

    def one(E: int, H: int, choice: Choices, block: int = 16) -> Iterator[tuple[Sizes, Choices]]:
        block = said.get("length", block)
        if (E, H, choice, block) not in tried:
            tried.add((E, H, choice, block))
            sizes = dataclasses.replace(Sizes().of_width(E, H), block=block)
            yield (
                (sizes if "head dim" not in said else dataclasses.replace(sizes, D=said["head dim"])),
                choice,
            )

    first = usual[0]
    yield from one(*first, Choices())
    if "key heads" in words or config:
        yield from one(*first, Choices(few_keys=False))
    if "head dim" in words:
        yield from one(*first, Choices(per_head=False))
    if "length" in words or config:
        yield from one(*first, Choices(), 7)
    if None in words:
        yield from one(*first, Choices(swapped=True))
        yield from one(*first, Choices(made_up=1))
    if config or turns:
        yield from one(*first, Choices(own_config=False))
    if config:
        yield from (pair for i in (1, 2) for pair in one(*first, Choices(own_config=False, made_up=i)))
    yield from one(*first, Choices(defaults=True))
    for E, H in usual[1:]:
        yield from one(E, H, Choices())


def others(recipe: Construction) -> list[tuple[Sizes, Choices]]:
    """The same with other values for what no name explains."""
    made = recipe.constructor
    if made is None or made.told is None:
        return []
    choice = made.choice
    found = [dataclasses.replace(choice, made_up=choice.made_up + i) for i in (1, 2) if made.made_up]
    if not choice.swapped and made.told.free:
        found.append(dataclasses.replace(choice, swapped=True))
    return [(recipe.sizes, one) for one in found]


def by_class(
    cls: type,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    given: Mapping[str, object] | None = None,
    ways: list[tuple[Sizes, Choices]] | None = None,
    manners: tuple[str, ...] = MANNERS,
    containers: set[str] | None = None,
) -> BuildResult:
    """The first way to construct it after which it can be called; `ways`: only these.

    containers: fields of a configuration that turned out to have fields of their own, added to.
    """
    containers = set() if containers is None else containers
    files, given = files_of(cls), given or {}
    own = {one.name for one in parameters_of(cls)}
    called = {name: value for name, value in given.items() if name not in own and "." not in name}
    built = BuildResult()
    problems: list[Problem] = []  # while building, then while calling
    calling: list[Problem] = []
    for sizes, choice in recipes(cls, embed_dim, num_heads, given) if ways is None else ways:
        constructor = Constructor(
            cls, sizes, choice, {k: v for k, v in given.items() if k in own or "." in k}
        )
        constructor.containers = containers
        if _takes_config(cls):
            constructor.given = given
        made = False
        for manner in manners:
            caller, problem, made = _attempt(constructor, files, manner, called)
            built.text = built.text or constructor.text
            if caller is not None:
                recipe = _recipe(constructor, manner)
                return BuildResult(caller, recipe, None, constructor.text, built.tried)
            assert problem is not None
            turns = any(is_rotation(one.name) and one.default is one.empty for one in parameters_of(cls))
            if problem.kind != GUESS and (constructor.made_up or turns):
                problem = _as_guess(problem)
            (calling if made else problems).append(problem)
            said = f"{constructor.text or cls.__name__}: {_told(problem)}"
            built.tried += [said] if said not in built.tried else []
            if not about_dtype(problem):
                break
        if made and len(calling) >= MOST_FAILURES:
            break
    found = calling or problems
    sure = [one for one in found if one.kind != GUESS]
    built.problem = sure[0] if sure else next(iter(found), None)
    return built


def _takes_config(cls: type) -> bool:
    return any(size_word(one.name) == "config" for one in parameters_of(cls))


def _told(problem: Problem) -> str:
    return problem.message if problem.kind in {GUESS, "shape"} else f"{problem.kind}: {problem.message}"


def _recipe(constructor: Constructor, manner: str) -> Construction:
    words = {size_word(one.name) for one in parameters_of(constructor.cls)}
    config = "config" in words

    def make(dropout: float = 0.0, thrown: Mapping[str, object] | None = None) -> Any:
        with by_default(torch.float32 if manner == "single" else torch.float64):
            return constructor.make(dropout, thrown)

    return Construction(
        make, constructor.sizes, config or "heads" in words, config or "width" in words,
        make if "dropout" in words or config else None,
        lambda thrown: make(thrown=thrown),
        constructor, manner,
    )  # fmt: skip


def _attempt(
    constructor: Constructor, files: frozenset[str], manner: str, called: Mapping[str, object]
) -> tuple[Caller | None, Problem | None, bool]:
    """(what calls it, or what went wrong; whether it could be built)."""
    dtype = torch.float32 if manner == "single" else torch.float64
    try:
        with by_default(dtype):
            seed(0)
            body = constructor.make()
    except CAUGHT as error:
        return None, _blamed(error, "build", files), False
    if not callable(entry_of(body)):
        message = f"an instance of {constructor.cls.__name__} cannot be called: it has no forward"
        return None, Problem("call", "TypeError", message), True
    recipe = _recipe(constructor, manner)
    own = _apart(recipe) if has_loose(body) else {}
    first: Problem | None = None
    for sizes in _sizes_for(body, recipe):
        subject = Subject(
            body, files, sizes, heads_given=recipe.heads_given, make=recipe.make, fresh=constructor.make,
            loose_dtypes=own, calm=manner == "calm", dtype=dtype, arguments=called,
        )  # fmt: skip
        caller, problem = _ready(subject)
        if caller is not None:
            return caller, None, True
        first = first or problem
    return None, first, True


def _blamed(error: BaseException, stage: str, files: frozenset[str]) -> Problem:
    """A problem; a guess of ours where the code refused what it was given, or could not be called at all."""
    problem = problem_of(error, stage, files)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename in files]
    last = (frames[-1].line or "").strip() if frames else ""
    refused = last.startswith(REFUSALS)
    return _as_guess(problem) if refused or problem.line is None else problem


def _own_or_guess(problem: Problem | None, subject: Subject) -> Problem | None:
    """The same for a call: a guess where names said nothing, None was passed, or it refused its inputs."""
    if problem is None or problem.kind == "shape":
        return problem
    every = plans(subject)
    unclear = not every or all(plan.guessed or plan.table for plan in every)
    nothing = "NoneType" in problem.message and any(plan.needs_mask for plan in every)
    unfit = _CHANNELS_FIRST.search(problem.message) is not None and _has_channels_first(subject.body)
    lines = [linecache.getline(file, problem.line or 0).strip() for file in subject.files]
    refused = any(line.startswith(REFUSALS) for line in lines)
    sure = problem.line is not None and not (unclear or nothing or refused or unfit)
    return problem if sure else _as_guess(problem)


def _has_channels_first(body: object) -> bool:
    """Whether it has layers that take channels first: which of several shapes they want is ours to find."""
    modules = body.modules() if isinstance(body, nn.Module) else ()
    return any(isinstance(one, (*CONVOLUTIONS, nn.GroupNorm, *BATCH_NORMS)) for one in modules)


def _as_guess(problem: Problem) -> Problem:
    return dataclasses.replace(problem, kind=GUESS, message=_told(problem))


def _apart(recipe: Construction) -> dict[str, torch.dtype]:
    """Built once more as its author has it, float32 by default: which loose tensors are of another dtype."""
    try:
        with by_default(torch.float32):
            seed(0)
            assert recipe.constructor is not None
            return loose_dtypes(recipe.constructor.make())
    except CAUGHT:
        return {}


def _sizes_for(body: object, recipe: Construction) -> list[Sizes]:
    """The sizes it was built for; where the constructor was not told a width, those it may have inside."""
    sizes = recipe.sizes
    heads = head_count(body)
    if not recipe.heads_given and isinstance(body, nn.Module) and any(True for _ in body.parameters()):
        by_place = recipe.constructor is not None and recipe.constructor.heads_by_place
        sizes = sizes.of_width(sizes.E, heads or (sizes.H if by_place else 1))
    elif not isinstance(body, nn.Module) and not recipe.heads_given and heads:
        sizes = sizes.of_width(sizes.E, heads)
    found = [sizes]
    if not recipe.width_given or (isinstance(body, nn.Module) and not fits_body(body, sizes)):
        found = [sizes.of_width(E, heads or sizes.H) for E in _widths(body)[:6]] or found
    batch = globals_of(type(body)).get("batch", 0)
    own = [dataclasses.replace(found[0], B=batch)] if 1 < batch <= MOST_OF_A_BATCH else []
    return found + _short(body, found[0]) + own


def fits_body(body: nn.Module, sizes: Sizes) -> bool:
    """Whether any of its weights has an axis of this width: a default may have made it of another."""
    axes = {n for one in body.parameters() if one.ndim > 1 for n in one.shape}
    return not axes or sizes.E in axes


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
            in_precision(body, subject.dtype).eval()
    caller, problem = find_caller(subject)
    if caller is None:
        return None, _own_or_guess(problem, subject)
    try:
        settle(caller.subject)
    except CAUGHT as error:
        return None, problem_of(error, "build", subject.files)
    return caller, None


def as_given(
    obj: object,
    embed_dim: int | None,
    num_heads: int | None,
    is_function: bool,
    given: Mapping[str, object] | None = None,
    manners: tuple[str, ...] = MANNERS,
) -> BuildResult:
    """An instance on a deep copy, or a function with weights of ours for those it takes as arguments."""
    files, given = files_of(obj), given or {}
    if is_function:
        return _function(obj, files, embed_dim, num_heads, given)
    first: Problem | None = None
    for manner in manners:
        try:
            body = copy.deepcopy(obj)
        except CAUGHT as error:
            return BuildResult(problem=problem_of(error, "build", files))
        own = loose_dtypes(body)
        heads = num_heads or head_count(body)
        widths = [embed_dim] if embed_dim else _widths(body)[:6]
        sizes = [Sizes().of_width(E, heads or 1) for E in widths] or [Sizes()]
        dtype = torch.float32 if manner == "single" else torch.float64
        for one in [*sizes, *_short(body, sizes[0])]:
            subject = Subject(
                body, files, one, heads_given=heads is not None, loose_dtypes=own, calm=manner == "calm",
                dtype=dtype, fresh=lambda: copy.deepcopy(obj), arguments=given,
            )  # fmt: skip
            caller, problem = _ready(subject)
            if caller is not None:
                return BuildResult(caller)
            first = first or problem
        if not about_dtype(first):
            break
    return BuildResult(problem=first)


# A function's weights: its arguments, or what lies in a dict or list among them

STYLES = ("square", "out first", "per head", "heads inside")
HOLDERS = frozenset("params param weights weight w theta p parameters state ws paramdict weightdict".split())


def _function(
    function: Any,
    files: frozenset[str],
    embed_dim: int | None,
    num_heads: int | None,
    given: Mapping[str, object],
) -> BuildResult:
    sizes = Sizes().of_width(embed_dim or 24, num_heads or 4)
    every = signature_of(function).parameters.values()
    said = {size_word(name): n for name, n in given.items() if type(n) is int}
    preset = [one.default for one in every if size_word(one.name) == "heads" and type(one.default) is int]
    heads = said.get("heads") or (preset[0] if preset and sizes.E % preset[0] == 0 else None)
    sizes = sizes.of_width(sizes.E, heads or sizes.H)
    heads_given = any(size_word(one.name) == "heads" for one in every)
    weights, holders = _weights_of(function, list(every), given)
    if weights and not heads_given:
        heads = globals_heads(function)
        sizes = sizes.of_width(sizes.E, heads or sizes.H)
    first = BuildResult(text=f"{getattr(function, '__name__', 'it')}(...)")
    for style in STYLES if weights else STYLES[:1]:
        subject = Subject(
            function,
            files,
            sizes,
            is_function=True,
            heads_given=heads_given,
            holders=holders,
            arguments=given,
        )
        dice = torch.Generator().manual_seed(20170612)
        for path, role in weights.items():
            name = path.rpartition(".")[2]
            vector = "bias" in name.lower() or bare(name).startswith("b")
            shape = _shape(role, vector, style, sizes)
            spread = 0.5 if vector else sizes.E**-0.5
            weight = torch.randn(shape, generator=dice, dtype=torch.float64) * spread
            subject.parameters[path] = weight.requires_grad_()
        caller, problem = find_caller(subject)
        if caller is not None:
            return BuildResult(caller, None, None, _call_text(caller))
        first.tried.append(f"weights {style}: {_told(problem) if problem else 'no plan'}")
        first.problem = first.problem or problem
    if first.problem is not None and (weights or _unclear(every)):
        first.problem = _as_guess(first.problem)  # the shapes of the weights were ours
    return first


def globals_heads(function: Any) -> int | None:
    """The number of heads a function reads out of its file."""
    space = getattr(function, "__globals__", {})
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    found = [space[name] for name in names if size_word(name) == "heads" and type(space.get(name)) is int]
    return found[0] if found else None


def _unclear(every: Any) -> bool:
    """Whether a required argument has a name that says nothing."""
    return any(
        one.default is one.empty and not input_word(one.name) and not size_word(one.name)
        for one in every
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    )


def _shape(role: str, vector: bool, style: str, sizes: Sizes) -> tuple[int, ...]:
    E, H, D = sizes.E, sizes.H, sizes.D
    times = len(role) if role in {"qkv", "kv", "qk"} else 1
    if vector:
        return (times * E,) if style in STYLES[:2] or times > 1 or role == "o" else (H, D)
    if style == "square":
        return E, times * E
    if style == "out first":
        return times * E, E
    if style == "per head":
        return (H, D, E) if role == "o" else (H, E, D * times)
    return (H, D, E) if role == "o" else (E, H, D * times)


def _weights_of(
    function: Any, every: list[inspect.Parameter], given: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, str]]:
    """(weights by path -> role; arguments that hold several -> how)."""
    found: dict[str, str] = {}
    holders: dict[str, str] = {}
    names = {bare(one.name) for one in every}
    for one in every:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or one.name in given:
            continue
        role = _weight_role(one)
        if role is None and bare(one.name) in {"win", "bin"} and bare(one.name)[0] + "out" in names:
            role = "qkv"  # w_in beside w_out
        if role is not None:
            found[one.name] = role
        elif bare(one.name) in HOLDERS and one.default is one.empty:
            keys, kind = _keys_of(function, one.name)
            roles = {key: role_word(key) for key in keys}
            if kind and any(roles.values()):
                holders[one.name] = kind
                found |= {f"{one.name}.{key}": role or "q" for key, role in roles.items()}
    return found, holders


def _keys_of(function: Any, name: str) -> tuple[list[str], str]:
    """What a function reads out of one argument: params["q"], params.q, or q, k, v, o = params."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        return [], ""
    for pattern, kind in (
        (rf"\b{name}\[\s*['\"](\w+)['\"]\s*\]", "dict"),
        (rf"\b{name}\.([A-Za-z_]\w*)\b(?!\s*\()", "attributes"),
    ):
        keys = list(dict.fromkeys(re.findall(pattern, text)))
        if keys:
            return keys, kind
    unpacked = re.search(rf"^\s*\(?([\w, ]+,[\w, ]+)\)?\s*=\s*{name}\s*$", text, re.M)
    return ([one.strip() for one in unpacked[1].split(",") if one.strip()], "list") if unpacked else ([], "")


def _call_text(caller: Caller) -> str:
    """A function's call as Python."""
    said = [name for name, _ in caller.plan.slots]
    said += [f"{path}{list(one.shape)}" for path, one in caller.subject.parameters.items()]
    said += [f"{name}={value!r}" for name, value in caller.plan.constants]
    return f"{getattr(caller.subject.body, '__name__', 'it')}({', '.join(said)})"


def _weight_role(parameter: inspect.Parameter) -> str | None:
    """Which projection an argument of a function is; q, k, v alone are inputs."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or input_word(parameter.name):
        return None
    role = role_word(parameter.name)
    return role if role and (parameter.default is parameter.empty or parameter.default is None) else None
