"""Run the learner's code, and write down everything the diagnosis needs."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ..evidence import SWITCHED, Conventions, Evidence, Finding, ProbeCall, Problem
from ..recipe import Design, ProbeInputs, State, steps_of
from ..source.parsed import unwarned
from .behaviour import _right, findings, one_length, two_lengths
from .call_plan import MaskConvention
from .caller import Caller, inputs_for
from .causal_switches import conditions_of, instance_switches, may_change_output, other_values
from .construction import GUESS, BuildResult, Construction, about_dtype, as_given, by_class, others
from .constructor import parameters_of
from .conventions import Doubt, find_conventions, find_layout, is_causal, visible_keys
from .environment import CAUGHT, files_of, float64_environment, problem_of
from .generality import other_sizes
from .parameters import origin_of
from .probes import LOUD_ALONE, LOUD_PROBE, causal_mask, probe
from .projections import Projections, error_of, find_roles
from .recognition import long_window, recognise_designs, rotation_over_another_axis
from .rotations import (
    ADDED,
    OBJECT,
    SLOTS,
    STILL,
    STILL_OBJECT,
    TOLD,
    ZEROS,
    constant_rotations,
)
from .subject import Sizes, fields_of, in_precision, signature_of
from .vocabulary import bare, builds_causal_mask, size_word, source_texts
from .wiring import choose_by_fault, find_wiring, projected_elsewhere, wrapped_torch_attention

ASKS = frozenset(
    """needweights outputattention outputattentions returnattention returnattentions returnattentionweights
    returnattn returnattnweights returnscores returnweights""".split()
)
BACKWARDS = re.compile(r"revers|backward|right_to_left|rtl", re.IGNORECASE)  # switches that hide the past
QUIETER = 1 / 300  # from scores of 1e5 and more to some thousands


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
            with_weights = replace(caller, weights_switch=asks).call(*inputs, with_weights=True)
        except CAUGHT:
            return ()
    near = caller.subject.tolerance
    same = torch.allclose(plain.output, with_weights.output, rtol=near, atol=1e-3 * near, equal_nan=True)
    return asks if same and with_weights.weights is not None else ()


def conventions(caller: Caller, causal: bool, returns_weights: bool, said: list[str]) -> Conventions:
    plan = caller.plan
    made = Conventions(
        arguments=(*(slot for _, slot in plan.slots), *("mask" for _ in caller.conventions)),
        self_only=plan.self_only,
        batch_first=plan.layout != "sequence first",
        always_causal=causal,
        returns_weights=returns_weights,
    )
    main: MaskConvention | None = caller.conventions[0] if caller.conventions else None
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
        "channels first": "its inputs are [B, E, T]",
        "image": "its inputs are images, [B, E, height, width]: a sequence is one column of pixels",
        "row by row": "its inputs are [B, rows, T, E]: each row is a sequence of its own",
        "volume": "its inputs are volumes, [B, E, depth, height, width]: a sequence is one line of voxels",
    }
    if plan.layout in layouts:
        words.append(layouts[plan.layout])
    turning = ", ".join(name for name, slot in plan.slots if slot in SLOTS)
    if turning:
        told = ZEROS if plan.table == ADDED else STILL if plan.still else TOLD
        words.append(told.format(names=turning, shape=plan.table))
    for way in caller.conventions:
        if way.kind == "switch":
            words.append(f"{way.argument}={way.on!r} hides the future")
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


def begun(obj: object, source: str | None, path: str | None) -> Evidence:
    """Evidence of this, with nothing in it yet but what it is and where it stands."""
    name = getattr(obj, "__name__", None) or type(obj).__name__
    evidence = Evidence(name, "function" if _is_function(obj) else "class", path, source)
    evidence.first_line = _first_line(obj, name, source)
    return evidence


def understand_whole(
    obj: object,
    source: str | None = None,
    path: str | None = None,
    roles: dict[str, str] | None = None,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    given: Mapping[str, object] | None = None,
    bind: Callable[..., object] | None = None,
) -> tuple[Evidence, Caller | None]:
    """The evidence, and what calls the code, where it could be called.

    Args:
        given: what was asked for by name, as `known` has it.
        bind: makes what is called out of a method that was taken from its class.
    """
    evidence = begun(obj, source, path)
    texts = source_texts(obj, source)  # before anything runs: parsing is not for other threads to see
    is_class, is_function = isinstance(obj, type), _is_function(obj)
    caller = None
    with float64_environment():
        try:
            if bind is not None:
                obj = bind(obj, evidence, given, embed_dim, num_heads)
            asked = _Request(obj, roles, embed_dim, num_heads, is_class, is_function, given or {}, texts)
            caller = _examine(evidence, asked)
        except CAUGHT as error:  # ours or theirs, the report says what there is
            evidence.problems.append(problem_of(error, "call", files_of(obj)))
    return evidence, caller


def _is_function(obj: object) -> bool:
    is_thing = isinstance(obj, (type, nn.Module))
    return inspect.isroutine(obj) or (not is_thing and hasattr(obj, "__code__"))


def _first_line(obj: object, name: str, source: str | None) -> int | None:
    try:
        owner = obj if inspect.isclass(obj) or inspect.isroutine(obj) else type(obj)
        with unwarned():
            return inspect.getsourcelines(owner)[1]
    except (OSError, TypeError):
        pass
    try:
        with unwarned():
            tree = ast.parse(source or "")
    except SyntaxError:
        return None
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if getattr(node, "name", None) == name and hasattr(node, "lineno")
    ]
    return lines[0] if lines else None


def known(obj: object, arguments: Mapping[str, object] | None) -> Mapping[str, object]:
    """What is to be passed, if there are parameters of these names."""
    if not arguments:
        return {}
    known: list[str] = []
    owners = [obj.__init__, getattr(obj, "forward", None)] if isinstance(obj, type) else [obj]  # type: ignore[misc]
    if not isinstance(obj, type) and not inspect.isroutine(obj):
        owners = [getattr(obj, "forward", obj)]
    config = False
    for owner in owners:
        every = list(inspect.signature(owner).parameters.values()) if callable(owner) else []
        if any(one.kind is one.VAR_KEYWORD for one in every):
            return arguments
        known += [one.name for one in every if one.name != "self"]
        config = config or any(size_word(one.name) == "config" for one in every)
    for name in arguments:
        if name not in known and not config:
            owned = getattr(obj, "__name__", type(obj).__name__)
            raise ArgumentError(
                f"arguments must name parameters of {owned}: {name!r}; it has {', '.join(known) or 'none'}"
            )
    return arguments


@dataclass(frozen=True)
class _Request:
    """What is to be examined, and how it was asked for."""

    obj: Any
    roles: dict[str, str] | None
    embed_dim: int | None
    num_heads: int | None
    is_class: bool
    is_function: bool
    given: Mapping[str, object]
    texts: list[str]
    containers: set[str] = field(default_factory=set)

    def build(self, **how: Any) -> BuildResult:
        """Build it; how: `ways`, `manners`."""
        if self.is_class:
            return by_class(
                self.obj, self.embed_dim, self.num_heads, self.given, containers=self.containers, **how
            )
        how.pop("ways", None)
        return as_given(self.obj, self.embed_dim, self.num_heads, self.is_function, self.given, **how)


def _examine(evidence: Evidence, asked: _Request) -> Caller | None:
    """Build and look; and look again where what was seen may be owed to us and not to the code."""
    built = asked.build()
    evidence.built, evidence.tried = built.text, built.tried
    if built.caller is None:
        if built.problem is not None:
            evidence.problems.append(built.problem)
        return None
    caller = _look(evidence, built, asked)
    if _right(evidence):
        return _elsewhere(evidence, built, asked) or caller
    turns = caller.plan.table or _rotations(built.recipe)
    if turns and not any(one.key == "rope" for one in evidence.designs):
        with constant_rotations():
            again = _again(evidence, asked, lambda other: other.weights is not None)
        if again is not None:
            return again
    recipe = built.recipe
    if _otherwise_in_single(caller, recipe, asked) or _dtypes(evidence):
        same = [(recipe.sizes, recipe.constructor.choice)] if recipe and recipe.constructor else None
        again = _again(evidence, asked, lambda other: not _dtypes(other), manners=("single",), ways=same)
        if again is not None:
            return again
    if recipe is None or recipe.constructor is None:
        return caller
    choice = recipe.constructor.choice
    if evidence.weights is None and choice.few_keys:
        ways = [(recipe.sizes, replace(choice, few_keys=False))]
        again = _again(evidence, asked, lambda other: other.weights is not None, ways=ways)
        if again is not None:
            return again
    for way in others(recipe):
        again = _again(evidence, asked, _right, ways=[way])
        if again is not None:
            return again
    if recipe.constructor.made_up and _depends(caller, recipe, asked):
        said = ", ".join(f"{name}={value!r}" for name, value in recipe.constructor.made_up.items())
        message = f"{said} was made up, and the output depends on it"
        evidence.problems = [Problem("build", GUESS, message)]
        evidence.weights, evidence.findings, evidence.calls = None, [], []
    return caller


def _elsewhere(evidence: Evidence, built: BuildResult, asked: _Request) -> Caller | None:
    """Build it again with fewer and with more heads; where it is wrong there, that evidence replaces this."""
    if evidence.designs or asked.given or asked.embed_dim or asked.num_heads or built.caller is None:
        return None
    recipe, made = built.recipe, evidence.conventions
    if asked.is_class:
        if recipe is None or recipe.constructor is None or not (recipe.heads_given and recipe.width_given):
            return None
    elif built.caller.subject.parameters or not isinstance(asked.obj, FunctionType) or asked.obj.__closure__:
        return None  # a method, or a function in another, has sizes of its own

    def differs(other: Evidence) -> bool:
        """Every probe gave other numbers, in the same way; what raises may be owed to our sizes."""
        answered = all(call.output is not None for call in other.calls)
        alike = other.weights is not None and replace(other.conventions, words=[]) == replace(made, words=[])
        fixed = any(one.fault == "hard-coded heads" for one in other.findings)
        return alike and answered and not other.problems and (fixed or not _right(other))

    raised: list[str] = []
    every = other_sizes(recipe)
    if (wrong := _groups_that_raise(asked, recipe, every[-1])) is not None:
        evidence.findings.append(wrong)
        return None
    for sizes in every:
        how: dict[str, Any] = {}
        there = asked
        if recipe is not None and recipe.constructor is not None:
            how = {"ways": [(sizes, recipe.constructor.choice)], "manners": (recipe.manner,)}
        else:
            there = replace(asked, embed_dim=sizes.E, num_heads=sizes.H)
        found: Projections | None = None
        with contextlib.suppress(*CAUGHT):
            again = there.build(**how)
            if again.caller is not None:
                other, _ = find_layout(again.caller, "\n".join(asked.texts))
                found = find_roles(other, _truth(other, made.always_causal), None)
        if found is None:
            raised.append(f"{sizes.H} heads of {sizes.E} channels")
        elif not found.proven or found.hard_coded:
            caller = _again(evidence, there, differs, **how)
            if caller is not None:
                return caller
    if len(raised) == len(every):
        detail = (
            f"with {' and with '.join(raised)} it raises: it was asked with {evidence.num_heads} heads alone"
        )
        evidence.findings.append(Finding("other sizes", "unknown", detail))
    return None


def _groups_that_raise(asked: _Request, recipe: Construction | None, sizes: Sizes) -> Finding | None:
    """A call that raises where groups of query heads that share keys are another size than their number."""
    if recipe is None or recipe.constructor is None or not recipe.constructor.choice.few_keys:
        return None
    fields = recipe.constructor.told.fields if recipe.constructor.told is not None else {}
    names = [one.name for one in parameters_of(recipe.constructor.cls)]
    names += [path.rpartition(".")[2] for path in fields]
    if not any(size_word(name) == "key heads" for name in names):
        return None
    built = asked.build(ways=[(sizes, recipe.constructor.choice)], manners=(recipe.manner,))
    problem = built.problem
    if problem is None or (problem.stage, problem.kind) != ("call", "RuntimeError") or problem.line is None:
        return None
    detail = f"built with {sizes.H} heads over {sizes.H // 4} of keys, it raises: {problem.message}"
    return Finding("other sizes", "wrong", detail, "groups repeated wrong times", problem.line)


def _otherwise_in_single(caller: Caller, recipe: Construction | None, asked: _Request) -> bool:
    """Whether it computes something else in float32, which is its author's precision: then that counts."""
    if asked.is_function or not caller.subject.exact or caller.plan.as_numpy or not _steady(caller):
        return False
    same = [(recipe.sizes, recipe.constructor.choice)] if recipe and recipe.constructor else None
    built = asked.build(manners=("single",), ways=same)
    if built.caller is None:
        return False
    single = replace(built.caller, plan=caller.plan, conventions=caller.conventions)
    with contextlib.suppress(Exception):  # what its constructor drew is drawn otherwise in float32
        drawn = dict(caller.subject.body.named_parameters())  # its buffers are its own: a mask is one
        single.subject.body.load_state_dict(drawn, strict=False)
    inputs = inputs_for(single, caller.subject.sizes.long, caller.subject.sizes.long)
    with torch.no_grad():
        try:
            first, second = (one.call(*inputs).output.double() for one in (caller, single))
        except CAUGHT:
            return False
    return first.shape == second.shape and not torch.allclose(
        first, second, rtol=1e-3, atol=1e-3, equal_nan=True
    )


def _dtypes(evidence: Evidence) -> bool:
    return any(map(about_dtype, [*evidence.problems, *(call.problem for call in evidence.calls)]))


def _again(
    evidence: Evidence, asked: _Request, better: Callable[[Evidence], bool], **how: Any
) -> Caller | None:
    """Built in another way: its evidence in place of the first where it is better."""
    try:
        built = asked.build(**how)
        if built.caller is None:
            return None
        other = Evidence(evidence.name, evidence.kind, evidence.path, evidence.source)
        other.first_line, other.built, other.tried = evidence.first_line, built.text, evidence.tried
        caller = _look(other, built, asked)
    except CAUGHT:
        return None
    if not better(other):
        return None
    vars(evidence).update(vars(other))
    return caller


def _depends(caller: Caller | None, recipe: Construction, asked: _Request) -> bool:
    """Whether another value for what was made up gives another output; where it cannot be built, too."""
    if caller is None:
        return True
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    for way in others(recipe)[:1]:
        built = asked.build(ways=[way], manners=(recipe.manner,))
        if built.caller is None:
            return True
        with torch.no_grad():
            try:
                first, second = (
                    one.call(*inputs).output for one in (caller, replace(built.caller, plan=caller.plan))
                )
            except CAUGHT:
                return True
        if first.shape != second.shape or not torch.allclose(first, second, rtol=1e-6, equal_nan=True):
            return True
    return False


def _look(evidence: Evidence, built: BuildResult, asked: _Request) -> Caller:
    """How it wants to be called, where its projections are, what it answers."""
    caller, recipe, roles = built.caller, built.recipe, asked.roles
    assert caller is not None
    texts = asked.texts
    subject = caller.subject
    written = any(word in text for text in texts for word in ("float32", ".float()"))
    if (written or not _steady(caller)) and not subject.calm:
        subject.calm = True
        try:
            _steady(caller)
        except CAUGHT:  # it cannot be kept from its float32
            subject.calm = False
    caller, sentence = find_layout(caller, "\n".join(texts))
    said = [sentence] if sentence else []
    if rotations := _rotations(recipe):
        still = isinstance(subject.body, nn.Module) and any(
            getattr(one, "still", False) for one in subject.body.modules()
        )
        said.append((STILL_OBJECT if still else OBJECT).format(names=", ".join(rotations)))
    closed = not caller.plan.masks and not caller.plan.switches and not _switched_off(caller.subject.body)
    seen = visible_keys(caller)
    open_ = seen is None or bool(seen.all())  # else it has a pattern, and that is no triangle
    causal = is_causal(caller, seen)
    on = None if causal or not open_ else _switched_on(caller, recipe)
    backwards = any(BACKWARDS.search(name) for name in conditions_of(caller.subject.body))
    off = on is not None or backwards  # as it was built
    causal = causal or (closed and open_ and not off and builds_causal_mask(texts, evidence.name))
    caller.conventions, more = (
        find_conventions(caller, causal, texts, seen)
        if caller.plan.masks or caller.plan.switches
        else ((), [])
    )
    said += more
    caller.weights_switch = asks_for_weights(caller)
    caller.heads_major = _heads_major(caller)
    found = find_roles(caller, _truth(caller, causal), roles)
    if not found.proven:
        L = caller.subject.sizes.long
        hidden = causal_mask(1, L, L)[0] if causal else None
        ours = bool(caller.plan.table or _rotations(recipe))
        found, evidence.designs = recognise_designs(caller, hidden, found, roles, None if ours else texts)
    wired: list[Finding] = []
    if not found.proven and not evidence.designs and not roles and not found.unjudged:
        truth = _truth(caller, causal)
        found, wired = find_wiring(caller, found, truth)
        found = found if wired else choose_by_fault(caller, found, truth)
    if found.num_heads != caller.subject.sizes.H:
        sizes = replace(
            caller.subject.sizes, H=found.num_heads, D=max(1, caller.subject.sizes.E // found.num_heads)
        )
        caller.subject = replace(caller.subject, sizes=sizes)
    evidence.designs += _beside(evidence, caller, found)
    evidence.embed_dim, evidence.num_heads = caller.subject.sizes.E, found.num_heads
    evidence.roles, evidence.weights = found.roles, found.weights
    factors = getattr(found, "factors", None)  # of heads that share a smaller projection
    evidence.origin = origin_of(found.weights, caller.subject.parameters, factors)
    if found.weights is None:
        names = ", ".join(list(caller.subject.parameters)[:8]) or "none"
        message = f"the projections could not be found among its parameters ({names}); pass roles="
        if found.unjudged:
            message = f"{found.unjudged} inside: headwise has no equal of it to compare with"
        evidence.problems.append(Problem("call", "roles", message))
    evidence.beside = _left_over(evidence, list(caller.subject.parameters))
    windows = any(one.key == "window" for one in evidence.designs)
    evidence.calls = probe(caller, causal, seen if windows and not causal else None)
    if on is not None:
        evidence.calls += _asked_causal(caller, on)
    words = {size_word(one.name) for one in parameters_of(type(subject.body))}
    lengths = one_length(evidence, told=subject.is_function or not words.isdisjoint(("length", "config")))
    lengths += two_lengths(caller, evidence, texts[0] if texts else "")
    loud = _without_loud(evidence, caller)
    _share_first_problem(evidence)
    returns = any(call.weights is not None for call in evidence.calls)
    evidence.conventions = conventions(caller, causal, returns, said + found.words)
    evidence.doubts = [one for one in said if isinstance(one, Doubt)]
    evidence.findings = wired + lengths + loud + findings(caller, found, evidence, recipe)
    evidence.findings += [
        Finding("design", "wrong", one.words, one.fault) for one in evidence.designs if one.fault
    ]
    return caller


def _left_over(evidence: Evidence, names: list[str]) -> list[str]:
    """Parameters that no projection is made of; what is numbered stands for all its numbers."""
    used = {re.sub(r"\d+", "0", re.split(r"[\[ ]", one.parameter)[0]) for one in evidence.roles.values()}
    used |= {re.sub(r"weight$", "bias", one) for one in used}
    return [name for name in names if re.sub(r"\d+", "0", name) not in used]


def _heads_major(caller: Caller) -> bool:
    """Whether weights that come as [B * H, T, S] have the heads first: which rows react to another sample."""
    sizes = caller.subject.sizes
    B, H, length = sizes.B, sizes.H, sizes.long
    inputs = inputs_for(caller, length, length)
    if caller.plan.layout == "one sequence" or H == 1:
        return False
    moved = [one.clone() for one in inputs]
    for one in {id(one): one for one in moved}.values():
        one[1] += 1.0
    if caller.plan.self_only:
        moved = [moved[0]] * 3
    elif caller.plan.memory_only:
        moved[2] = moved[1]
    with torch.no_grad():
        try:
            first, second = (
                caller.call(*each, with_weights=bool(caller.weights_switch)).weights
                for each in (inputs, moved)
            )
        except CAUGHT:
            return False
    if first is None or second is None or first.shape != (B, H, length, length):
        return False
    changed = ((first - second).abs().amax((2, 3)) > caller.subject.tolerance).flatten()  # [B * H] as it came
    rows = changed.nonzero().flatten().tolist()
    return bool(rows) and rows == list(range(1, B * H, B))


def _beside(evidence: Evidence, caller: Caller, found: Projections) -> list[Design]:
    """Designs that do nothing to the numbers: where the work, or its last step, is done."""
    wraps = wrapped_torch_attention(caller.subject.body) if found.proven else None
    plain = found.proven and not evidence.designs and not caller.plan.table
    elsewhere = rotation_over_another_axis(caller, found) if plain else None
    lacks = found.guess is not None and not found.guess.weights.get("o")
    split = projected_elsewhere(evidence.name, evidence.source) if lacks else None
    adds_queries = any(
        one.numbers.get("projected") for one in evidence.designs
    )  # then whoever calls it projects
    found.elsewhere = split is not None or adds_queries
    window = long_window(caller) if found.proven else None
    return [one for one in (wraps, split, window, elsewhere) if one is not None]


def _rotations(recipe: Construction | None) -> list[str]:
    return [] if recipe is None or recipe.constructor is None else recipe.constructor.rotations


def _switched_on(caller: Caller, recipe: Construction | None) -> Any:
    """An instance with the switch thrown that hides the future; None where there is no such switch.

    The one that hides something by position; else one that is called causal.
    """
    called, masked = None, bool(caller.plan.masks)
    for body, causal in _thrown(caller.subject.body, recipe):
        if masked and not causal:
            continue  # beside a mask that is handed over only a switch that says causal is asked
        try:
            in_precision(body, caller.subject.dtype).eval()
            body.load_state_dict(dict(caller.subject.body.named_parameters()), strict=False)
        except CAUGHT:
            continue
        called = body if causal and called is None else called
        seen = visible_keys(replace(caller, subject=replace(caller.subject, body=body)))
        if seen is not None and not bool(seen.all()):
            return body
    return called


def _thrown(body: Any, recipe: Construction | None) -> Iterator[tuple[Any, bool]]:
    """Instances with one switch at another value each, and whether its name says causal."""
    if not isinstance(body, nn.Module):
        return
    if recipe is not None and recipe.constructor is not None and recipe.throw is not None:
        own = {one.name for one in parameters_of(type(body)) if size_word(one.name) == "causal"}
        for thrown in recipe.constructor.switches():
            if any(BACKWARDS.search(name) for name in thrown):
                continue
            with contextlib.suppress(*CAUGHT):
                yield recipe.throw(thrown), not own.isdisjoint(thrown)
        return
    for i, (_, name, now, compared) in enumerate(instance_switches(body)):
        for value in other_values(now, compared) if may_change_output(name) else ():
            with contextlib.suppress(*CAUGHT):
                other = copy.deepcopy(body)
                setattr(instance_switches(other)[i][0], name, value)
                yield other, size_word(name) == "causal"


def _asked_causal(caller: Caller, body: Any) -> list[ProbeCall]:
    """The plain probe through an instance that was told to be causal."""
    plan = caller.plan
    every = signature_of(caller.subject.body).parameters
    alone = [
        (name, slot) for name, slot in plan.slots
        if slot != "memory" or name not in every or every[name].default is inspect.Parameter.empty
    ]  # fmt: skip
    if len(alone) < len(plan.slots):  # a memory that may be left out: what is causal is self-attention
        plan = replace(plan, slots=tuple(alone))
    other = replace(caller, plan=plan, subject=replace(caller.subject, body=body))
    call = probe(other, True)[0]
    return [replace(call, probe=SWITCHED if caller.conventions else "causal")]


def _without_loud(evidence: Evidence, caller: Caller) -> list[Finding]:
    """Large scores are for masks that leak; they say nothing about code that is wrong without them."""
    loud = evidence.call(LOUD_PROBE) or evidence.call(LOUD_ALONE)
    if loud is None or evidence.weights is None:
        return []
    others = [call for call in evidence.calls if call is not loud and call.probe != "empty row"]
    open_ = loud.probe == LOUD_ALONE
    masked = [call for call in others if (call.inputs.mask is not None or open_) and call.output is not None]
    truth = [(call.inputs, call.output) for call in masked if call.output is not None]
    leaves = (
        not truth or error_of(evidence.weights, evidence.num_heads, truth, steps_of(evidence.designs)) > 1e-5
    )
    if not leaves and loud.output is not None and bool(loud.output.isfinite().all()):
        if _finite_fill(evidence, loud) and _right_below(evidence, caller, loud):
            evidence.calls.remove(loud)
            detail = "it hides with -1e4 or so: enough for ordinary scores, -inf would do for all"
            return [Finding("hidden scores", "wrong", detail, "finite fill")]
        return []
    evidence.calls.remove(loud)
    if leaves or loud.output is None:
        return []
    detail = "scores beyond 1e5 overflow: subtract each row's largest score before exp, as torch.softmax does"
    return [Finding("large scores", "wrong", detail, "softmax overflows")]


def _finite_fill(evidence: Evidence, loud: ProbeCall) -> bool:
    """Whether -1e4 or so stands in place of hidden scores, or is added to them."""
    assert evidence.weights is not None and loud.output is not None
    designed, truth = steps_of(evidence.designs), [(loud.inputs, loud.output)]
    if loud.inputs.mask is None or error_of(evidence.weights, evidence.num_heads, truth, designed) < 1e-5:
        return False
    for number in (1e4, 1e5):
        for added in (False, True):

            def hide(state: State, number: float = number, added: bool = added) -> None:
                assert state.mask is not None
                low = state.scaled - number if added else torch.full_like(state.scaled, -number)
                state.hidden = torch.where(state.mask, state.scaled, low)

            steps = {**designed, "hide": hide}
            if error_of(evidence.weights, evidence.num_heads, truth, steps) < 1e-5:
                return True
    return False


def _right_below(evidence: Evidence, caller: Caller, loud: ProbeCall) -> bool:
    """Whether it hides what it should where scores are in the thousands."""
    query, key, value, mask = loud.inputs[:4]
    if caller.plan.self_only:
        query = key = value = query * QUIETER**0.5
    elif caller.plan.memory_only:
        query, value = query * QUIETER, key
    else:
        query = query * QUIETER
    assert evidence.weights is not None
    try:
        with torch.no_grad():
            output = (
                caller.call(query, key, value, mask if caller.conventions else None).output.detach().double()
            )
    except CAUGHT:
        return False
    truth = [(ProbeInputs(query, key, value, mask), output)]
    return error_of(evidence.weights, evidence.num_heads, truth, steps_of(evidence.designs)) < 1e-5


def _share_first_problem(evidence: Evidence) -> None:
    """Where no probe gave an output, say so once."""
    crashes = [call.problem for call in evidence.calls if call.problem is not None]
    if crashes and not any(call.output is not None for call in evidence.calls):
        evidence.problems.append(crashes[0])


def _switched_off(body: object) -> bool:
    """Whether a switch for a causal mask is off: an attribute, a field, a name of the file."""
    owners = body.modules() if isinstance(body, nn.Module) else [body]
    kept = [(name, value) for one in owners for name, value in getattr(one, "__dict__", {}).items()]
    kept += [field for _, value in kept if not isinstance(value, nn.Module) for field in fields_of(value)]
    file = sys.modules.get(type(body).__module__)
    of_file = (
        []
        if file is None
        else [vars(file).get(name) for name in conditions_of(body) if may_change_output(name)]
    )
    return False in [value for value in of_file if isinstance(value, bool)] or any(
        value is False and size_word(name) == "causal" for name, value in kept
    )


def _steady(caller: Caller) -> bool:
    """Whether two calls with different seeds agree."""
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    with torch.no_grad():
        first, second = (caller.call(*inputs, seed=seed).output for seed in (1, 2))
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _truth(caller: Caller, causal: bool) -> list[tuple[ProbeInputs, Tensor]]:
    """Calls to prove the projections with."""
    sizes = caller.subject.sizes
    query, key, value = inputs_for(caller, sizes.long, sizes.long, seed=30)
    mask = causal_mask(len(query), sizes.long, sizes.long) if causal else None
    with torch.no_grad():
        try:
            return [
                (
                    ProbeInputs(query, key, value, mask),
                    caller.call(query, key, value).output.detach().double(),
                )
            ]
        except CAUGHT:
            return []
