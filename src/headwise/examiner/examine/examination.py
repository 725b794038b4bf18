"""Run the learner's code, and record everything that the diagnosis needs as evidence."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ..evidence import SWITCHED, Conventions, Evidence, Finding, ProbeCall, Problem
from ..recipe import Design, ProbeInputs, State, Step, steps_of
from ..source.parsed import find_source, tree_of
from .caller import Caller, inputs_for, map_inputs, shift_second_sample
from .causal_switches import conditions_of, instance_switches, may_change_output, other_values
from .construction import (
    GUESS,
    PRECISIONS,
    BuildResult,
    Construction,
    about_dtype,
    construct_class,
    other_choices,
    wrap_object,
)  # fmt: skip
from .constructor import Choices, parameters_of, words_of
from .conventions import Doubt, find_conventions, find_layout, is_causal, visible_keys
from .environment import CAUGHT, files_of, float64_environment, problem_of
from .findings import findings, is_right, one_length, two_lengths
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
    TABLES_PASSED,
    ZEROS,
    constant_rotations,
)
from .subject import Sizes, fields_of, signature_of, with_parameters_of
from .vocabulary import bare, builds_causal_mask, size_word, source_texts
from .wiring import choose_by_fault, find_wiring, projected_elsewhere, wrapped_torch_attention

WEIGHT_SWITCHES = frozenset(
    """needweights outputattention outputattentions returnattention returnattentions returnattentionweights
    returnattn returnattnweights returnscores returnweights""".split()
)
BACKWARDS = re.compile(r"revers|backward|right_to_left|rtl", re.IGNORECASE)  # switches that hide the past
QUIETER = 1 / 300  # from scores of 1e5 and more to some thousands


def find_weights_switch(caller: Caller) -> tuple[tuple[str, object], ...]:
    """Return the argument that makes the code return its weights, if the output stays the same with it."""
    parameters = signature_of(caller.subject.body).parameters.values()
    names = [x.name for x in parameters if bare(x.name) in WEIGHT_SWITCHES and x.default is False]
    if not names:
        return ()
    switch = ((names[0], True),)
    inputs = inputs_for(caller)
    with torch.no_grad():
        try:
            plain = caller.call(*inputs)
            with_weights = replace(caller, weights_switch=switch).call(*inputs, with_weights=True)
        except CAUGHT:
            return ()
    near = caller.subject.tolerance
    same = torch.allclose(plain.output, with_weights.output, rtol=near, atol=1e-3 * near, equal_nan=True)
    return switch if same and with_weights.weights is not None else ()


def describe_conventions(
    caller: Caller, causal: bool, returns_weights: bool, sentences: list[str]
) -> Conventions:
    """Return how the code is called, as facts and as sentences; `sentences` are appended."""
    plan, main = caller.plan, caller.conventions[0] if caller.conventions else None
    conventions = Conventions(
        arguments=(*(slot for _, slot in plan.slots), *("mask" for _ in caller.conventions)),
        self_only=plan.self_only,
        batch_first=plan.layout != "sequence first",
        always_causal=causal,
        returns_weights=returns_weights,
    )
    if main is not None:
        conventions.mask_argument, conventions.mask_kind = main.argument, main.kind
        conventions.mask_shape = main.shape or None
        conventions.mask_true_attends = main.true_attends if main.kind in {"bool", "0 and 1"} else None
    conventions.words = _call_sentences(caller, causal) + sentences
    return conventions


LAYOUTS = {
    "one sequence": "it takes one sequence at a time, [T, E]",
    "heads first": "its inputs are [B, H, T, D]",
    "heads inside": "its inputs are [B, T, H, D]",
    "heads in the batch": "its inputs are [B * H, T, D]",
    "channels first": "its inputs are [B, E, T]",
    "image": "its inputs are images, [B, E, height, width]; the tokens are the pixels of one column",
    "row by row": "its inputs are [B, rows, T, E]: each row is a sequence of its own",
    "window by window": "its inputs are [B, rows, columns, T, E]: each window is a sequence of its own",
    "volume": "its inputs are volumes, [B, E, depth, height, width]; the tokens are the voxels of one line",
}


def _call_sentences(caller: Caller, causal: bool) -> list[str]:
    """Return sentences that say how the code is called."""
    plan = caller.plan
    zeros = "cos and sin" if plan.table == ADDED else None  # the slot that is passed a tensor of zeros
    words = ((name, "zeros" if slot == zeros else slot) for name, slot in plan.slots)
    names = ", ".join(f"{name} ({slot})" if name != slot else name for name, slot in words)
    sentences = [f"it is called with {names}"]
    if plan.layout in LAYOUTS:
        sentences.append(LAYOUTS[plan.layout])
    rotations = ", ".join(name for name, slot in plan.slots if slot in SLOTS)
    if rotations:
        template = ZEROS if plan.table == ADDED else STILL if plan.still else TABLES_PASSED
        sentences.append(template.format(names=rotations, shape=plan.table))
    for convention in caller.conventions:
        argument, kind, shape = convention.argument, convention.kind, convention.shape
        if kind == "switch":
            sentences.append(f"{argument}={convention.on!r} hides later keys from each query")
        elif kind == "lengths":
            sentences.append(f"{argument} is the number of visible keys, {shape}")
        elif kind == "added":
            sentences.append(
                f"{argument} is added to the scores, {shape}: 0 for a visible key, -inf for a hidden key"
            )
        else:
            true, effect = (
                "True" if kind == "bool" else "1",
                "is visible" if convention.true_attends else "is hidden",
            )
            sentences.append(f"{argument} is {kind}, {shape}: {true} where a key {effect}")
    if causal:
        sentences.append("it is always causal: no query attends to later keys")
    return sentences


def new_evidence(obj: object, source: str | None, path: str | None) -> Evidence:
    """Return evidence that holds only the name, kind and place of the code."""
    name = getattr(obj, "__name__", None) or type(obj).__name__
    evidence = Evidence(name, "function" if _is_function(obj) else "class", path, source)
    evidence.first_line = _first_line(obj, name, source)
    return evidence


def examine_attention(
    obj: object,
    source: str | None = None,
    path: str | None = None,
    roles: dict[str, str] | None = None,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    arguments: Mapping[str, object] | None = None,
    bind: Callable[..., object] | None = None,
) -> tuple[Evidence, Caller | None]:
    """Examine code that computes attention; return the evidence and a caller, None where it cannot be called.

    Args:
        arguments: values that the user passed by name, after `checked_arguments`.
        bind: returns what is called for a method that was taken from its class.
    """
    evidence = new_evidence(obj, source, path)
    texts = source_texts(obj, source)  # before anything runs: parsing is not for other threads to see
    is_class, is_function = isinstance(obj, type), _is_function(obj)
    caller = None
    with float64_environment():
        try:
            if bind is not None:
                obj = bind(obj, evidence, arguments, embed_dim, num_heads)
            request = _Request(
                obj, roles, embed_dim, num_heads, is_class, is_function, arguments or {}, texts
            )
            caller = _examine(evidence, request)
        except CAUGHT as error:  # ours or theirs, the report says what there is
            evidence.problems.append(problem_of(error, "call", files_of(obj)))
    return evidence, caller


def _is_function(obj: object) -> bool:
    is_module = isinstance(obj, (type, nn.Module))
    return inspect.isroutine(obj) or (not is_module and hasattr(obj, "__code__"))


def _first_line(obj: object, name: str, source: str | None) -> int | None:
    """Return the first line of the code in its file, or None."""
    try:
        owner = obj if inspect.isclass(obj) or inspect.isroutine(obj) else type(obj)
        return find_source(inspect.unwrap(owner))[1] + 1
    except (OSError, TypeError):
        pass
    tree = tree_of(source or "")
    if tree is None:
        return None
    nodes = (node for node in ast.walk(tree) if getattr(node, "name", None) == name)
    return next((node.lineno for node in nodes if hasattr(node, "lineno")), None)


def checked_arguments(obj: object, arguments: Mapping[str, object] | None) -> Mapping[str, object]:
    """Return the arguments that the user passed by name.

    Raises:
        ArgumentError: the code has no parameter of such a name.
    """
    if not arguments:
        return {}
    owners = [getattr(obj, "forward", obj)]
    if isinstance(obj, type):
        owners = [obj.__init__, getattr(obj, "forward", None)]  # type: ignore[misc]
    elif inspect.isroutine(obj):
        owners = [obj]
    parameters = [
        x for owner in owners if callable(owner) for x in inspect.signature(owner).parameters.values()
    ]
    names = [parameter.name for parameter in parameters if parameter.name != "self"]
    takes_any = any(x.kind is x.VAR_KEYWORD or size_word(x.name) == "config" for x in parameters)
    for name in arguments:
        if name not in names and not takes_any:
            owner_name = getattr(obj, "__name__", type(obj).__name__)
            names_text = ", ".join(names) or "none"
            raise ArgumentError(
                f"arguments must name parameters of {owner_name}: got {name!r}; choose from {names_text}"
            )
    return arguments


@dataclass(frozen=True)
class _Request:
    """The object to examine, and what the user passed about it."""

    obj: Any
    roles: dict[str, str] | None
    embed_dim: int | None
    num_heads: int | None
    is_class: bool
    is_function: bool
    arguments: Mapping[str, object]
    texts: list[str]
    containers: set[str] = field(default_factory=set)

    def build(
        self,
        choices: list[tuple[Sizes, Choices]] | None = None,
        precisions: tuple[str, ...] = PRECISIONS,
    ) -> BuildResult:
        """Construct a class with one of these choices, or wrap an instance or a function."""
        sizes = self.embed_dim, self.num_heads
        if self.is_class:
            return construct_class(self.obj, *sizes, self.arguments, choices, precisions, self.containers)
        return wrap_object(self.obj, *sizes, self.is_function, self.arguments, precisions)


def _examine(evidence: Evidence, request: _Request) -> Caller | None:
    """Build the code and gather evidence; in other ways while differences may be due to the examiner."""
    built = request.build()
    evidence.built, evidence.tried = built.text, built.attempts
    if built.caller is None:
        if built.problem is not None:
            evidence.problems.append(built.problem)
        return None
    caller, construction = _gather_evidence(evidence, built, request), built.construction
    if is_right(evidence):
        return _examine_other_sizes(evidence, built, request) or caller
    uses_rotation = caller.plan.table or _stand_in_rotations(construction)
    if uses_rotation and not any(design.key == "rope" for design in evidence.designs):
        with constant_rotations():
            again = _examine_again(evidence, request, _has_weights)
        if again is not None:
            return again
    if _differs_in_float32(caller, construction, request) or _has_dtype_problem(evidence):
        again = _examine_again(
            evidence,
            request,
            lambda other: not _has_dtype_problem(other),
            _same_choice(construction),
            ("single",),
        )
        if again is not None:
            return again
    if construction is None:
        return caller
    choice, made_up = construction.constructor.choice, construction.constructor.made_up
    if evidence.weights is None and choice.few_keys:
        choices = [(construction.sizes, replace(choice, few_keys=False))]
        again = _examine_again(evidence, request, _has_weights, choices)
        if again is not None:
            return again
    for other in other_choices(construction):
        again = _examine_again(evidence, request, is_right, [other])
        if again is not None:
            return again
    if made_up and _depends_on_made_up(caller, construction, request):
        values = ", ".join(f"{name}={value!r}" for name, value in made_up.items())
        several = len(made_up) > 1
        message = (
            f"the check does not know which value{'s' * several} {', '.join(made_up)} should have; "
            f"it chose {values}, and the output depends on {'these values' if several else 'this value'}"
        )
        evidence.problems = [Problem("build", GUESS, message)]
        evidence.weights, evidence.findings, evidence.calls = None, [], []
    return caller


def _has_weights(evidence: Evidence) -> bool:
    return evidence.weights is not None


def _same_choice(construction: Construction | None) -> list[tuple[Sizes, Choices]] | None:
    return None if construction is None else [(construction.sizes, construction.constructor.choice)]


def _examine_other_sizes(evidence: Evidence, built: BuildResult, request: _Request) -> Caller | None:
    """Examine right code with fewer and more heads; evidence that it is wrong there replaces this."""
    construction, caller, own = built.construction, built.caller, evidence.conventions
    if evidence.designs or request.arguments or request.embed_dim or request.num_heads or caller is None:
        return None
    if request.is_class:
        if construction is None or not (construction.takes("heads") and construction.takes("width")):
            return None
    elif caller.subject.parameters or not isinstance(request.obj, FunctionType) or request.obj.__closure__:
        return None  # a method, or a function in another, has sizes of its own

    def is_wrong(other: Evidence) -> bool:
        """Return True if every probe ran, called in the same way, and numbers are wrong."""
        ran = not other.problems and all(call.output is not None for call in other.calls)
        alike = other.weights is not None and replace(other.conventions, words=[]) == replace(own, words=[])
        fixed = any(finding.fault == "hard-coded heads" for finding in other.findings)
        return alike and ran and (fixed or not is_right(other))

    raised: list[str] = []
    candidates = other_sizes(construction)
    if (finding := _groups_that_raise(request, construction, candidates[-1])) is not None:
        evidence.findings.append(finding)
        return None
    for sizes in candidates:
        choices, precisions, resized = None, PRECISIONS, request
        if construction is not None:
            choices, precisions = [(sizes, construction.constructor.choice)], (construction.precision,)
        else:
            resized = replace(request, embed_dim=sizes.E, num_heads=sizes.H)
        projections: Projections | None = None
        with contextlib.suppress(*CAUGHT):
            again = resized.build(choices, precisions).caller
            if again is not None:
                again, _ = find_layout(again, "\n".join(request.texts))
                projections = find_roles(again, _reference_calls(again, own.always_causal), None)
        if projections is None:
            raised.append(f"{sizes.H} heads of {sizes.E} channels")
        elif not projections.proven or projections.hard_coded:
            caller = _examine_again(evidence, resized, is_wrong, choices, precisions)
            if caller is not None:
                return caller
    if len(raised) == len(candidates):
        detail = (
            f"built with {' and with '.join(raised)}, it raises an exception, so only "
            f"{evidence.num_heads} heads were examined"
        )
        evidence.findings.append(Finding("other sizes", "unknown", detail))
    return None


def _groups_that_raise(request: _Request, construction: Construction | None, sizes: Sizes) -> Finding | None:
    """Find code that raises where the size of a group of query heads is not the number of groups."""
    if construction is None or not construction.constructor.choice.few_keys:
        return None
    constructor = construction.constructor
    fields = constructor.values.fields if constructor.values is not None else {}
    words = words_of(constructor.cls) | {size_word(path.rpartition(".")[2]) for path in fields}
    if "key heads" not in words:
        return None
    problem = request.build([(sizes, constructor.choice)], (construction.precision,)).problem
    if problem is None or (problem.stage, problem.kind) != ("call", "RuntimeError") or problem.line is None:
        return None
    detail = (
        f"built with {sizes.H} query heads and {sizes.H // 4} key/value heads, it raises: {problem.message}"
    )
    return Finding("other sizes", "wrong", detail, "groups repeated wrong times", problem.line)


def _differs_in_float32(caller: Caller, construction: Construction | None, request: _Request) -> bool:
    """Return True if the code computes something else in float32, the precision of its author."""
    if (
        request.is_function
        or not caller.subject.exact
        or caller.plan.as_numpy
        or not _is_deterministic(caller)
    ):
        return False
    single = request.build(_same_choice(construction), ("single",)).caller
    if single is None:
        return False
    single = replace(single, plan=caller.plan, conventions=caller.conventions)
    with contextlib.suppress(Exception):  # random parameters differ in float32; buffers (masks) are kept
        drawn = dict(caller.subject.body.named_parameters())
        single.subject.body.load_state_dict(drawn, strict=False)
    outputs = _outputs(caller, single)
    if outputs is None or outputs[0].shape != outputs[1].shape:
        return False
    return not _are_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)


def _outputs(*callers: Caller) -> list[Tensor] | None:
    """Return the output of each caller for the inputs of the last; None where one raises."""
    inputs = inputs_for(callers[-1])
    with torch.no_grad():
        try:
            return [caller.output(*inputs) for caller in callers]
        except CAUGHT:
            return None


def _are_close(a: Tensor, b: Tensor, rtol: float, atol: float = 1e-8) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _has_dtype_problem(evidence: Evidence) -> bool:
    return any(map(about_dtype, [*evidence.problems, *(call.problem for call in evidence.calls)]))


def _examine_again(
    evidence: Evidence,
    request: _Request,
    is_better: Callable[[Evidence], bool],
    choices: list[tuple[Sizes, Choices]] | None = None,
    precisions: tuple[str, ...] = PRECISIONS,
) -> Caller | None:
    """Build the code in another way, and replace the evidence if the new one is better."""
    try:
        built = request.build(choices, precisions)
        if built.caller is None:
            return None
        other = Evidence(evidence.name, evidence.kind, evidence.path, evidence.source)
        other.first_line, other.built, other.tried = evidence.first_line, built.text, evidence.tried
        caller = _gather_evidence(other, built, request)
    except CAUGHT:
        return None
    if not is_better(other):
        return None
    vars(evidence).update(vars(other))
    return caller


def _depends_on_made_up(caller: Caller, construction: Construction, request: _Request) -> bool:
    """Return True if another made-up value changes the output, or cannot be used at all."""
    for choice in other_choices(construction)[:1]:
        other = request.build([choice], (construction.precision,)).caller
        outputs = None if other is None else _outputs(replace(other, plan=caller.plan), caller)
        if outputs is None or not _are_close(outputs[0], outputs[1], rtol=1e-6):
            return True
    return False


def _gather_evidence(evidence: Evidence, built: BuildResult, request: _Request) -> Caller:
    """Find how the code is called and where its projections are, then call it with every probe."""
    assert built.caller is not None
    construction, texts, subject = built.construction, request.texts, built.caller.subject
    _leave_out_casts(built.caller, texts)
    caller, sentence = find_layout(built.caller, "\n".join(texts))
    sentences = [sentence] if sentence else []
    if rotations := _stand_in_rotations(construction):
        modules = subject.body.modules() if isinstance(subject.body, nn.Module) else ()
        rotations_are_constant = any(getattr(module, "still", False) for module in modules)
        sentences.append(
            (STILL_OBJECT if rotations_are_constant else OBJECT).format(names=", ".join(rotations))
        )
    pattern = visible_keys(caller)
    causal, causal_body = _causality(caller, construction, pattern, texts, evidence.name)
    if caller.plan.masks or caller.plan.switches:
        caller.conventions, more = find_conventions(caller, causal, texts, pattern)
        sentences += more
    else:
        caller.conventions = ()
    caller.weights_switch = find_weights_switch(caller)
    caller.heads_major = _has_heads_first(caller)
    projections, wiring = _find_projections(evidence, caller, causal, request, bool(rotations))
    H = projections.num_heads
    if H != caller.subject.sizes.H:
        sizes = replace(caller.subject.sizes, H=H, D=max(1, caller.subject.sizes.E // H))
        caller.subject = replace(caller.subject, sizes=sizes)
    evidence.designs += _designs_without_effect(evidence, caller, projections)
    _record_projections(evidence, caller, projections)
    windows = [design for design in evidence.designs if design.key == "window"]
    if pattern is not None and any(design.numbers.get("without itself") for design in windows):
        pattern = pattern & ~torch.eye(len(pattern), dtype=torch.bool)
    evidence.calls = probe(caller, causal, pattern if windows and not causal else None)
    if causal_body is not None:
        evidence.calls.append(_causal_call(caller, causal_body))
    takes_length = not words_of(type(subject.body)).isdisjoint(("length", "config"))
    lengths = one_length(evidence, subject.is_function or takes_length)
    lengths += two_lengths(caller, evidence, texts[0] if texts else "")
    large_scores = _judge_large_scores(evidence, caller)
    crashes = [call.problem for call in evidence.calls if call.problem is not None]
    if crashes and not any(call.output is not None for call in evidence.calls):
        evidence.problems.append(crashes[0])  # reported once for all probes
    returns_weights = any(call.weights is not None for call in evidence.calls)
    sentences += projections.words
    evidence.conventions = describe_conventions(caller, causal, returns_weights, sentences)
    evidence.doubts = [sentence for sentence in sentences if isinstance(sentence, Doubt)]
    evidence.findings = wiring + lengths + large_scores
    evidence.findings += findings(caller, projections, evidence, construction)
    evidence.findings += [
        Finding("design", "wrong", f"your output equals that of attention with {design.words}", design.fault)
        for design in evidence.designs
        if design.fault
    ]
    return caller


def _leave_out_casts(caller: Caller, texts: list[str]) -> None:
    """Leave out dropout and casts to float32, for code that casts or is random in evaluation."""
    subject = caller.subject
    casts = any(word in text for text in texts for word in ("float32", ".float()"))
    if (casts or not _is_deterministic(caller)) and not subject.calm:
        subject.calm = True
        try:
            _is_deterministic(caller)
        except CAUGHT:  # it does not run without its casts
            subject.calm = False


def _causality(
    caller: Caller, construction: Construction | None, pattern: Tensor | None, texts: list[str], name: str
) -> tuple[bool, Any]:
    """Return True if the code is always causal, and an instance that a switch made causal, or None.

    Code that can be causal in no other way, and says that it is, counts as causal even if it hides nothing.
    """
    if is_causal(caller, pattern):
        return True, None
    if pattern is not None and not bool(pattern.all()):
        return False, None  # a pattern, and no triangle
    body = _causal_instance(caller, construction)
    takes_mask = caller.plan.masks or caller.plan.switches or _has_switch_off(caller.subject.body)
    backwards = any(BACKWARDS.search(name) for name in conditions_of(caller.subject.body))
    return not takes_mask and body is None and not backwards and builds_causal_mask(texts, name), body


def _find_projections(
    evidence: Evidence, caller: Caller, causal: bool, request: _Request, has_rotation: bool
) -> tuple[Projections, list[Finding]]:
    """Find the projections; where plain attention does not explain the numbers, designs and wrong wiring."""
    truth = _reference_calls(caller, causal)
    projections = find_roles(caller, truth, request.roles)
    wiring: list[Finding] = []
    if not projections.proven:
        L = caller.subject.sizes.long
        hidden = causal_mask(1, L, L)[0] if causal else None
        texts = None if caller.plan.table or has_rotation else request.texts
        projections, evidence.designs = recognise_designs(caller, hidden, projections, request.roles, texts)
    if not projections.proven and not evidence.designs and not request.roles and not projections.unjudged:
        projections, wiring = find_wiring(caller, projections, truth)
        if not wiring:
            projections = choose_by_fault(caller, projections, truth)
    return projections, wiring


def _record_projections(evidence: Evidence, caller: Caller, projections: Projections) -> None:
    """Write weights, roles and the parameters that no projection uses into the evidence."""
    evidence.embed_dim, evidence.num_heads = caller.subject.sizes.E, projections.num_heads
    evidence.roles, evidence.weights = projections.roles, projections.weights
    parameters = caller.subject.parameters
    factors = getattr(projections, "factors", None)  # of heads that share a smaller projection
    evidence.origin = origin_of(projections.weights, parameters, factors)
    if projections.weights is None:
        names = ", ".join(list(parameters)[:8]) or "none"
        message = f"the projections could not be found among its parameters ({names}); pass roles="
        if projections.unjudged:
            message = f"it contains {projections.unjudged}, which headwise has nothing to compare with"
        evidence.problems.append(Problem("call", "roles", message))

    def unnumbered(name: str) -> str:
        return re.sub(r"\d+", "0", name)

    used = {unnumbered(re.split(r"[\[ ]", role.parameter)[0]) for role in evidence.roles.values()}
    used |= {re.sub(r"weight$", "bias", name) for name in used}
    evidence.beside = [name for name in parameters if unnumbered(name) not in used]


def _has_heads_first(caller: Caller) -> bool:
    """Return True if weights come as [H * B, T, S]: by which rows react to another sample 1."""
    B, H, L = caller.subject.sizes.B, caller.subject.sizes.H, caller.subject.sizes.long
    if caller.plan.layout == "one sequence" or H == 1:
        return False
    inputs = inputs_for(caller)
    with torch.no_grad():
        try:
            first, second = (
                caller.call(*each, with_weights=bool(caller.weights_switch)).weights
                for each in (inputs, map_inputs(inputs, shift_second_sample))
            )
        except CAUGHT:
            return False
    if first is None or second is None or first.shape != (B, H, L, L):
        return False
    changed = ((first - second).abs().amax((2, 3)) > caller.subject.tolerance).flatten()  # [B * H] as it came
    rows = changed.nonzero().flatten().tolist()
    return bool(rows) and rows == list(range(1, B * H, B))


def _designs_without_effect(evidence: Evidence, caller: Caller, projections: Projections) -> list[Design]:
    """Return designs that leave the numbers as they are, such as an output projection done elsewhere."""
    wraps = wrapped_torch_attention(caller.subject.body) if projections.proven else None
    plain = projections.proven and not evidence.designs and not caller.plan.table
    other_axis = rotation_over_another_axis(caller, projections) if plain else None
    lacks_output = projections.guess is not None and not projections.guess.weights.get("o")
    split = projected_elsewhere(evidence.name, evidence.source) if lacks_output else None
    # whoever calls code that adds queries projects its output
    adds_queries = any(design.numbers.get("projected") for design in evidence.designs)
    projections.elsewhere = split is not None or adds_queries
    window = long_window(caller) if projections.proven else None
    return [design for design in (wraps, split, window, other_axis) if design is not None]


def _stand_in_rotations(construction: Construction | None) -> list[str]:
    return [] if construction is None else construction.constructor.rotations


def _causal_instance(caller: Caller, construction: Construction | None) -> Any:
    """Return an instance with a switch set that hides the future; None if there is no such switch.

    A switch that hides something by position comes before one that is only named causal.
    """
    named_causal = None
    for body, causal in _switched_instances(caller.subject.body, construction):
        if caller.plan.masks and not causal:
            continue  # beside a mask argument, only a switch that is named causal counts
        try:
            with_parameters_of(caller.subject, body).eval()
        except CAUGHT:
            continue
        named_causal = body if causal and named_causal is None else named_causal
        pattern = visible_keys(replace(caller, subject=replace(caller.subject, body=body)))
        if pattern is not None and not bool(pattern.all()):
            return body
    return named_causal


def _switched_instances(body: Any, construction: Construction | None) -> Iterator[tuple[Any, bool]]:
    """Yield instances with one switch at another value each, and True if the switch is named causal."""
    if not isinstance(body, nn.Module):
        return
    if construction is not None:
        names = {parameter.name for parameter in parameters_of(type(body))}
        causal_names = {name for name in names if size_word(name) == "causal"}
        for switches in construction.constructor.switches():
            if any(BACKWARDS.search(name) for name in switches):
                continue
            with contextlib.suppress(*CAUGHT):
                yield construction.make(switches=switches), not causal_names.isdisjoint(switches)
        return
    for i, (_, name, now, compared) in enumerate(instance_switches(body)):
        for value in other_values(now, compared) if may_change_output(name) else ():
            with contextlib.suppress(*CAUGHT):
                other = copy.deepcopy(body)
                setattr(instance_switches(other)[i][0], name, value)
                yield other, size_word(name) == "causal"


def _causal_call(caller: Caller, body: Any) -> ProbeCall:
    """Call an instance that a switch made causal with the plain probe."""
    plan = caller.plan
    parameters = signature_of(caller.subject.body).parameters
    required = tuple(
        (name, slot) for name, slot in plan.slots
        if slot != "memory" or name not in parameters or parameters[name].default is inspect.Parameter.empty
    )  # fmt: skip
    # where a memory may be left out, what is causal is self-attention
    other = replace(caller, plan=replace(plan, slots=required), subject=replace(caller.subject, body=body))
    return replace(probe(other, True)[0], probe=SWITCHED if caller.conventions else "causal")


def _judge_large_scores(evidence: Evidence, caller: Caller) -> list[Finding]:
    """Judge the probe of large scores, and remove it from the evidence unless it says something about a mask.

    It is for masks that leak. It says nothing about code that is wrong without it.
    """
    loud = evidence.call(LOUD_PROBE) or evidence.call(LOUD_ALONE)
    if loud is None or evidence.weights is None:
        return []
    truth = [
        (call.inputs, call.output) for call in evidence.calls
        if call is not loud and call.probe != "empty row" and call.output is not None
        and (call.inputs.mask is not None or loud.probe == LOUD_ALONE)
    ]  # fmt: skip
    is_wrong = not truth or _error(evidence, truth) > 1e-5
    if not is_wrong and loud.output is not None and bool(loud.output.isfinite().all()):
        if _has_finite_fill(evidence, loud) and _is_right_below(evidence, caller, loud):
            evidence.calls.remove(loud)
            detail = (
                "the scores of hidden keys are set to about -1e4, which is low enough for "
                "ordinary scores only; use -inf"
            )
            return [Finding("hidden scores", "wrong", detail, "finite fill")]
        return []
    evidence.calls.remove(loud)
    if is_wrong or loud.output is None:
        return []
    detail = "scores beyond 1e5 give NaN; subtract the maximum of each row before exp, as torch.softmax does"
    return [Finding("large scores", "wrong", detail, "softmax overflows")]


def _error(
    evidence: Evidence, truth: list[tuple[ProbeInputs, Tensor]], steps: Mapping[str, Step] | None = None
) -> float:
    """Return the largest error of these outputs beside the recipe's; `steps` replace some of its steps."""
    assert evidence.weights is not None
    steps = {**steps_of(evidence.designs), **(steps or {})}
    return error_of(evidence.weights, evidence.num_heads, truth, steps)


def _has_finite_fill(evidence: Evidence, loud: ProbeCall) -> bool:
    """Return True if hidden scores are set to -1e4 or so, or if that is added to them."""
    assert loud.output is not None
    truth = [(loud.inputs, loud.output)]
    if loud.inputs.mask is None or _error(evidence, truth) < 1e-5:
        return False
    for number, is_added in product((1e4, 1e5), (False, True)):

        def hide(state: State, number: float = number, is_added: bool = is_added) -> None:
            assert state.mask is not None
            low = state.scaled - number if is_added else torch.full_like(state.scaled, -number)
            state.hidden = torch.where(state.mask, state.scaled, low)

        if _error(evidence, truth, {"hide": hide}) < 1e-5:
            return True
    return False


def _is_right_below(evidence: Evidence, caller: Caller, loud: ProbeCall) -> bool:
    """Return True if the code hides what it should where scores are in the thousands."""
    query, key, value, mask = loud.inputs[:4]
    if caller.plan.self_only:
        query = key = value = query * QUIETER**0.5
    elif caller.plan.memory_only:
        query, value = query * QUIETER, key
    else:
        query = query * QUIETER
    try:
        with torch.no_grad():
            output = caller.output(query, key, value, mask if caller.conventions else None)
    except CAUGHT:
        return False
    return _error(evidence, [(ProbeInputs(query, key, value, mask), output)]) < 1e-5


def _has_switch_off(body: object) -> bool:
    """Return True if a switch for a causal mask is off: an attribute, a field, or a name of the file."""
    owners = body.modules() if isinstance(body, nn.Module) else [body]
    attributes = [(name, value) for owner in owners for name, value in getattr(owner, "__dict__", {}).items()]
    attributes += [x for _, value in attributes if not isinstance(value, nn.Module) for x in fields_of(value)]
    if any(value is False and size_word(name) == "causal" for name, value in attributes):
        return True
    file = sys.modules.get(type(body).__module__)
    names = [] if file is None else [name for name in conditions_of(body) if may_change_output(name)]
    return any(vars(file).get(name) is False for name in names)


def _is_deterministic(caller: Caller) -> bool:
    """Return True if two calls with different seeds agree."""
    inputs = inputs_for(caller)
    with torch.no_grad():
        first, second = (caller.call(*inputs, seed=seed).output for seed in (1, 2))
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _reference_calls(caller: Caller, causal: bool) -> list[tuple[ProbeInputs, Tensor]]:
    """Return inputs and output of one call, to prove projections with; nothing where it raises."""
    L = caller.subject.sizes.long
    query, key, value = inputs_for(caller, seed=30)
    mask = causal_mask(len(query), L, L) if causal else None
    with torch.no_grad():
        try:
            return [(ProbeInputs(query, key, value, mask), caller.output(query, key, value))]
        except CAUGHT:
            return []
