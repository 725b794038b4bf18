"""Construct the learner's class, and find the first way to construct and call it that gives an output.

What the examiner made up is recorded: an exception or numbers that may be owed to that are no fault of the
code. Code is examined in float64. Where that raises for its dtypes, its own casts to float32 are left out;
where that fails too, it is examined in float32, as its author runs it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..evidence import Problem
from .call_plan import plans
from .caller import Caller
from .constructor import Choices, Constructor, parameters_of, source_of, words_of
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

# float64; float64 with the code's own casts to float32 left out; float32
_DTYPES = {"double": torch.float64, "calm": torch.float64, "single": torch.float32}
PRECISIONS = tuple(_DTYPES)
MOST_FAILURES = 5
MOST_OF_A_BATCH = 128  # of a file's own
REFUSALS = ("raise ValueError", "raise TypeError", "raise RuntimeError", "raise AssertionError", "assert ")
GUESS = "guess"  # the kind of a problem that may be owed to what the examiner made up


@dataclasses.dataclass(frozen=True)
class Construction:
    """One way to construct a class, in one precision."""

    constructor: Constructor
    precision: str

    def make(self, dropout: float = 0.0, switches: Mapping[str, object] | None = None) -> Any:
        """Construct an instance, with this much dropout and these switches where it takes them."""
        with by_default(_DTYPES[self.precision]):
            return self.constructor.make(dropout, switches)

    def takes(self, word: str) -> bool:
        """Return True if the constructor takes an argument of this kind, or a configuration."""
        return not words_of(self.constructor.cls).isdisjoint((word, "config"))

    @property
    def sizes(self) -> Sizes:
        """The sizes it is constructed with."""
        return self.constructor.sizes


@dataclasses.dataclass(eq=False)
class BuildResult:
    """A caller of the code, or the problem that prevents one."""

    caller: Caller | None = None
    construction: Construction | None = None
    problem: Problem | None = None
    text: str = ""  # as Python
    attempts: list[str] = dataclasses.field(default_factory=list)  # what failed, a sentence each


_ABOUT_DTYPE = re.compile(
    r"dtype|scalar type|\bFloat\b|\bDouble\b|float32|float64|Complex|same type|DoubleTensor|FloatTensor"
)
# Of their exceptions
_MORE_AXES = re.compile(r"not enough values to unpack \(expected [5-9], got 3\)")  # meant for such inputs
_CHANNELS_FIRST = re.compile(r"num_groups|\bchannels\b|[Ee]xpected .*\dD|running_mean")


def about_dtype(problem: Problem | None) -> bool:
    """Return True if an exception is about dtypes that do not go together."""
    return problem is not None and bool(_ABOUT_DTYPE.search(problem.message))


def construction_choices(
    cls: type, embed_dim: int | None, num_heads: int | None, arguments: Mapping[str, object]
) -> Iterator[tuple[Sizes, Choices]]:
    """Yield sizes and choices to construct a class with, the likeliest first.

    Args:
        arguments: values passed by the user, by the names of parameters; they fix sizes, too.
    """
    words = words_of(cls)
    numbers = {size_word(path.rpartition(".")[2]): n for path, n in arguments.items() if type(n) is int}
    embed_dim, num_heads = embed_dim or numbers.get("width"), num_heads or numbers.get("heads")
    usual = [(embed_dim or E, num_heads or H) for E, H in USUAL]
    config = "config" in words
    cases = [(Choices(), 16)]
    if "key heads" in words or config:
        cases.append((Choices(few_keys=False), 16))
    if "head dim" in words:
        cases.append((Choices(per_head=False), 16))
    if "length" in words or config:
        cases.append((Choices(), 7))
    if None in words:
        cases += [(Choices(swapped=True), 16), (Choices(made_up=1), 16)]
    if config or any(is_rotation(parameter.name) for parameter in parameters_of(cls)):
        cases.append((Choices(own_config=False), 16))
    if config:
        cases += [(Choices(own_config=False, made_up=i), 16) for i in (1, 2)]
    cases.append((Choices(defaults=True), 16))
    tried = []
    for (E, H), choice, block in [(usual[0], *case) for case in cases] + [
        (widths, Choices(), 16) for widths in usual[1:]
    ]:
        sizes = dataclasses.replace(Sizes().of_width(E, H), block=numbers.get("length", block))
        sizes = dataclasses.replace(sizes, D=numbers.get("head dim", sizes.D))
        if (sizes, choice) not in tried:
            tried.append((sizes, choice))
            yield sizes, choice


def other_choices(construction: Construction) -> list[tuple[Sizes, Choices]]:
    """Return the same choices with other values for what no name explains."""
    constructor, choice = construction.constructor, construction.constructor.choice
    others = [dataclasses.replace(choice, made_up=choice.made_up + i) for i in (1, 2) if constructor.made_up]
    if not choice.swapped and constructor.sizes_by_place:
        others.append(dataclasses.replace(choice, swapped=True))
    return [(construction.sizes, other) for other in others]


def construct_class(
    cls: type,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    arguments: Mapping[str, object] | None = None,
    choices: Iterable[tuple[Sizes, Choices]] | None = None,
    precisions: tuple[str, ...] = PRECISIONS,
    containers: set[str] | None = None,
) -> BuildResult:
    """Construct a class in the first way after which it can be called.

    Args:
        choices: the ways to try; all of `construction_choices` where None.
        containers: fields of a configuration that turn out to have fields of their own are added.
    """
    files, arguments = files_of(cls), arguments or {}
    parameters, words = parameters_of(cls), words_of(cls)
    own_names = {parameter.name for parameter in parameters}
    passed = {name: value for name, value in arguments.items() if name not in own_names and "." not in name}
    fixed = arguments if "config" in words else {k: v for k, v in arguments.items() if k not in passed}
    needs_rotation = any(is_rotation(x.name) and x.default is x.empty for x in parameters)
    result = BuildResult()
    problems: list[Problem] = []  # while constructing, then while calling
    calling: list[Problem] = []
    containers = set() if containers is None else containers
    if choices is None:
        choices = construction_choices(cls, embed_dim, num_heads, arguments)
    for sizes, choice in choices:
        constructor = Constructor(cls, sizes, choice, fixed, containers=containers)
        is_constructed = False
        for precision in precisions:
            construction = Construction(constructor, precision)
            caller, problem, is_constructed = _attempt(construction, files, passed)
            result.text = result.text or constructor.text
            if caller is not None:
                return BuildResult(caller, construction, None, constructor.text, result.attempts)
            assert problem is not None
            if problem.kind != GUESS and (constructor.made_up or needs_rotation):
                problem = _as_guess(problem)
            (calling if is_constructed else problems).append(problem)
            attempt = f"{constructor.text or cls.__name__}: {_message(problem)}"
            result.attempts += [attempt] if attempt not in result.attempts else []
            if not about_dtype(problem):
                break
        if is_constructed and len(calling) >= MOST_FAILURES:
            break
    failures = calling or problems
    result.problem = next((x for x in failures if x.kind != GUESS), next(iter(failures), None))
    return result


def _message(problem: Problem) -> str:
    return problem.message if problem.kind in {GUESS, "shape"} else f"{problem.kind}: {problem.message}"


def _attempt(
    construction: Construction, files: frozenset[str], passed: Mapping[str, object]
) -> tuple[Caller | None, Problem | None, bool]:
    """Construct and call once; return the caller or the problem, and True if an instance was constructed.

    Args:
        passed: values passed by the user for parameters of forward.
    """
    constructor, precision = construction.constructor, construction.precision
    try:
        seed(0)
        body = construction.make()
    except CAUGHT as error:
        return None, _build_problem(error, files), False
    if not callable(entry_of(body)):
        message = f"an instance of {constructor.cls.__name__} cannot be called: it has no forward"
        return None, Problem("call", "TypeError", message), True
    own_dtypes = _loose_dtypes(constructor) if has_loose(body) else {}
    first: Problem | None = None
    for sizes in _possible_sizes(body, construction):
        subject = Subject(
            body, files, sizes, heads_given=construction.takes("heads"), make=construction.make,
            fresh=constructor.make, loose_dtypes=own_dtypes, calm=precision == "calm",
            dtype=_DTYPES[precision], arguments=passed,
        )  # fmt: skip
        caller, problem = _settled_caller(subject)
        if caller is not None:
            return caller, None, True
        first = first or problem
    return None, first, True


def _build_problem(error: BaseException, files: frozenset[str]) -> Problem:
    """Return the problem of a constructor that raised; a guess if it refused its arguments."""
    problem = problem_of(error, "build", files)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    last = (frames[-1].line or "").strip() if frames else ""
    refused = last.startswith(REFUSALS)
    return _as_guess(problem) if refused or problem.line is None else problem


def _call_problem(problem: Problem | None, subject: Subject) -> Problem | None:
    """Return the problem of a call; a guess where the names of its parameters do not say what to pass."""
    if problem is None or problem.kind == "shape":
        return problem
    call_plans = plans(subject)
    unclear = not call_plans or all(plan.guessed or plan.table for plan in call_plans)
    nothing = "NoneType" in problem.message and any(plan.needs_mask for plan in call_plans)
    unfit = _CHANNELS_FIRST.search(problem.message) is not None and _has_channels_first(subject.body)
    unfit = unfit or _MORE_AXES.search(problem.message) is not None
    lines = [linecache.getline(file, problem.line or 0).strip() for file in subject.files]
    refused = any(line.startswith(REFUSALS) for line in lines)
    is_own = problem.line is not None and not (unclear or nothing or refused or unfit)
    return problem if is_own else _as_guess(problem)


def _has_channels_first(body: object) -> bool:
    """Return True if the code has layers that take channels first: several shapes of inputs may be right."""
    modules = body.modules() if isinstance(body, nn.Module) else ()
    return any(isinstance(module, (*CONVOLUTIONS, nn.GroupNorm, *BATCH_NORMS)) for module in modules)


def _as_guess(problem: Problem) -> Problem:
    return dataclasses.replace(problem, kind=GUESS, message=_message(problem))


def _loose_dtypes(constructor: Constructor) -> dict[str, torch.dtype]:
    """Construct once more in float32, and return which tensors that are no parameters have another dtype."""
    try:
        with by_default(torch.float32):
            seed(0)
            return loose_dtypes(constructor.make())
    except CAUGHT:
        return {}


def _possible_sizes(body: object, construction: Construction) -> list[Sizes]:
    """Return the sizes it was constructed with; without a width argument, those its parameters may have."""
    sizes, heads = construction.sizes, head_count(body)
    if not construction.takes("heads"):
        if isinstance(body, nn.Module) and any(True for _ in body.parameters()):
            by_place = sizes.H in construction.constructor.sizes_by_place
            sizes = sizes.of_width(sizes.E, heads or (sizes.H if by_place else 1))
        elif not isinstance(body, nn.Module) and heads:
            sizes = sizes.of_width(sizes.E, heads)
    candidates = [sizes]
    if not construction.takes("width") or (isinstance(body, nn.Module) and not fits_body(body, sizes)):
        candidates = [sizes.of_width(E, heads or sizes.H) for E in _widths(body)[:6]] or candidates
    batch = globals_of(type(body)).get("batch", 0)
    of_own_batch = [dataclasses.replace(candidates[0], B=batch)] if 1 < batch <= MOST_OF_A_BATCH else []
    return candidates + _shorter_sizes(body, candidates[0]) + of_own_batch


def fits_body(body: nn.Module, sizes: Sizes) -> bool:
    """Return True if any weight has an axis of this width; a default may have made it of another."""
    axes = {n for parameter in body.parameters() if parameter.ndim > 1 for n in parameter.shape}
    return not axes or sizes.E in axes


def _widths(body: object) -> list[int]:
    try:
        return widths_of(body)
    except CAUGHT:
        return []


def _shorter_sizes(body: object, sizes: Sizes) -> list[Sizes]:
    """Return sizes for code with a square buffer, such as a triangle, for a few positions."""
    buffers = body.buffers() if isinstance(body, nn.Module) else ()
    sides = {x.shape[-1] for x in buffers if x.ndim >= 2 and x.shape[-1] == x.shape[-2]}
    return [sizes.shorter(side) for side in sorted(sides) if 3 <= side != sizes.long and side <= 64]


def _settled_caller(subject: Subject) -> tuple[Caller | None, Problem | None]:
    """Find a caller, and settle its parameters again after the first call, which may make lazy layers."""
    body = subject.body
    try:
        settle(subject)
    except CAUGHT:
        if isinstance(body, nn.Module):
            in_precision(body, subject.dtype).eval()
    caller, problem = find_caller(subject)
    if caller is None:
        return None, _call_problem(problem, subject)
    try:
        settle(caller.subject)
    except CAUGHT as error:
        return None, problem_of(error, "build", subject.files)
    return caller, None


def wrap_object(
    obj: object,
    embed_dim: int | None,
    num_heads: int | None,
    is_function: bool,
    arguments: Mapping[str, object] | None = None,
    precisions: tuple[str, ...] = PRECISIONS,
) -> BuildResult:
    """Return a caller of an instance (a deep copy of it), or of a function with weights of the examiner's."""
    files, arguments = files_of(obj), arguments or {}
    if is_function:
        return _wrap_function(obj, files, embed_dim, num_heads, arguments)
    first: Problem | None = None
    for precision in precisions:
        try:
            body = copy.deepcopy(obj)
        except CAUGHT as error:
            return BuildResult(problem=problem_of(error, "build", files))
        own_dtypes = loose_dtypes(body)
        heads = num_heads or head_count(body)
        widths = [embed_dim] if embed_dim else _widths(body)[:6]
        sizes = [Sizes().of_width(E, heads or 1) for E in widths] or [Sizes()]
        for candidate in [*sizes, *_shorter_sizes(body, sizes[0])]:
            subject = Subject(
                body, files, candidate, heads_given=heads is not None, fresh=lambda: copy.deepcopy(obj),
                loose_dtypes=own_dtypes, calm=precision == "calm", dtype=_DTYPES[precision],
                arguments=arguments,
            )  # fmt: skip
            caller, problem = _settled_caller(subject)
            if caller is not None:
                return BuildResult(caller)
            first = first or problem
        if not about_dtype(first):
            break
    return BuildResult(problem=first)


# A function's weights: its arguments, or what lies in a dict or list among them

STYLES = ("square", "out first", "per head", "heads inside")
HOLDERS = frozenset("params param weights weight w theta p parameters state ws paramdict weightdict".split())


def _wrap_function(
    function: Any,
    files: frozenset[str],
    embed_dim: int | None,
    num_heads: int | None,
    arguments: Mapping[str, object],
) -> BuildResult:
    """Return a caller of a function: its weight arguments get random weights in one of several shapes."""
    sizes = Sizes().of_width(embed_dim or 24, num_heads or 4)
    parameters = signature_of(function).parameters.values()
    numbers = {size_word(name): n for name, n in arguments.items() if type(n) is int}
    of_heads = [parameter for parameter in parameters if size_word(parameter.name) == "heads"]
    preset = next((x.default for x in of_heads if type(x.default) is int), None)
    heads = numbers.get("heads") or (preset if preset and sizes.E % preset == 0 else None)
    sizes = sizes.of_width(sizes.E, heads or sizes.H)
    weights, holders = _weights_of(function, list(parameters), arguments)
    if weights and not of_heads:
        heads = globals_heads(function)
        sizes = sizes.of_width(sizes.E, heads or sizes.H)
    first = BuildResult(text=f"{getattr(function, '__name__', 'it')}(...)")
    for style in STYLES if weights else STYLES[:1]:
        subject = Subject(
            function, files, sizes, is_function=True, heads_given=bool(of_heads), holders=holders,
            arguments=arguments,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(20170612)
        for path, role in weights.items():
            name = path.rpartition(".")[2]
            vector = "bias" in name.lower() or bare(name).startswith("b")
            shape = _shape(role, vector, style, sizes)
            spread = 0.5 if vector else sizes.E**-0.5
            weight = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
            subject.parameters[path] = weight.requires_grad_()
        caller, problem = find_caller(subject)
        if caller is not None:
            return BuildResult(caller, None, None, _call_text(caller))
        first.attempts.append(f"weights {style}: {_message(problem) if problem else 'no plan'}")
        first.problem = first.problem or problem
    if first.problem is not None and (weights or _has_unclear_argument(parameters)):
        first.problem = _as_guess(first.problem)  # the shapes of the weights were ours
    return first


def globals_heads(function: Any) -> int | None:
    """Return the number of heads that a function reads from a global of its file, or None."""
    space = getattr(function, "__globals__", {})
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    counts = [space[name] for name in names if size_word(name) == "heads" and type(space.get(name)) is int]
    return counts[0] if counts else None


def _has_unclear_argument(parameters: Any) -> bool:
    """Return True if a required argument has a name that says nothing."""
    return any(
        parameter.default is parameter.empty
        and not input_word(parameter.name)
        and not size_word(parameter.name)
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def _shape(role: str, vector: bool, style: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of a function's weight or bias in one style."""
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
    function: Any, parameters: list[inspect.Parameter], arguments: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the roles of a function's weights by path, and how arguments that hold several hold them."""
    roles: dict[str, str] = {}
    holders: dict[str, str] = {}
    names = {bare(parameter.name) for parameter in parameters}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in arguments:
            continue
        role = _weight_role(parameter)
        name = bare(parameter.name)
        if role is None and name in {"win", "bin"} and name[0] + "out" in names:
            role = "qkv"  # w_in beside w_out
        if role is not None:
            roles[parameter.name] = role
        elif name in HOLDERS and parameter.default is parameter.empty:
            keys, kind = _keys_of(function, parameter.name)
            held = {key: role_word(key) for key in keys}
            if kind and any(held.values()):
                holders[parameter.name] = kind
                roles |= {f"{parameter.name}.{key}": role or "q" for key, role in held.items()}
    return roles, holders


def _keys_of(function: Any, name: str) -> tuple[list[str], str]:
    """Return the names that a function reads from one argument, and how.

    It is "dict" for params["q"], "attributes" for params.q, "list" for q, k, v, o = params, "" for none.
    """
    text = source_of(function)
    for pattern, kind in (
        (rf"\b{name}\[\s*['\"](\w+)['\"]\s*\]", "dict"),
        (rf"\b{name}\.([A-Za-z_]\w*)\b(?!\s*\()", "attributes"),
    ):
        keys = list(dict.fromkeys(re.findall(pattern, text)))
        if keys:
            return keys, kind
    unpacked = re.search(rf"^\s*\(?([\w, ]+,[\w, ]+)\)?\s*=\s*{name}\s*$", text, re.M)
    return (
        ([name.strip() for name in unpacked[1].split(",") if name.strip()], "list") if unpacked else ([], "")
    )


def _call_text(caller: Caller) -> str:
    """Return the call of a function as Python."""
    arguments = [name for name, _ in caller.plan.slots]
    arguments += [f"{path}{list(tensor.shape)}" for path, tensor in caller.subject.parameters.items()]
    arguments += [f"{name}={value!r}" for name, value in caller.plan.constants]
    return f"{getattr(caller.subject.body, '__name__', 'it')}({', '.join(arguments)})"


def _weight_role(parameter: inspect.Parameter) -> str | None:
    """Return which projection an argument of a function is, or None; q, k, v alone are inputs."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or input_word(parameter.name):
        return None
    role = role_word(parameter.name)
    return role if role and (parameter.default is parameter.empty or parameter.default is None) else None
