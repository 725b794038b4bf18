"""`examine`: run the learner's code, and write down everything the diagnosis needs."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..evidence import Call, Evidence, Finding, Problem
from ..recipe import Given
from ..source.parsed import unwarned
from .behaviour import findings
from .building import Recipe
from .calling import Caller
from .describing import asks_for_weights, conventions
from .failing import CAUGHT, files_of, problem_of
from .finding import find_layout
from .making import as_given, by_class
from .mask_probes import find_ways, is_causal
from .mask_words import meant_causal, texts_of
from .probing import LOUD_PROBE, causal_mask, probe
from .projection_roles import error_of, find_roles
from .reacting import inputs_for
from .surroundings import surroundings
from .wording import size_word

__all__ = ["examine", "understand"]


def examine(
    obj: object,
    *,
    source: str | None = None,
    path: str | None = None,
    roles: dict[str, str] | None = None,
    embed_dim: int | None = None,
    num_heads: int | None = None,
) -> Evidence:
    """Build it, find how it wants to be called and where its projections are, and ask it the probes.

    Nothing the code raises is raised here: it becomes a `Problem`. Instances are examined on a deep copy.

    Args:
        obj: a class, an instance or a function.
        source: the text of the file it stands in.
        path: of that file.
        roles: "q", "k", "v", "o" -> the parameter's path, where it cannot be found.
        embed_dim: the width to build a class with.
        num_heads: the number of heads to build a class with.
    """
    return understand(obj, source, path, roles, embed_dim, num_heads)[0]


def understand(
    obj: object,
    source: str | None = None,
    path: str | None = None,
    roles: dict[str, str] | None = None,
    embed_dim: int | None = None,
    num_heads: int | None = None,
) -> tuple[Evidence, Caller | None]:
    """The evidence, and what calls the code, where it could be called."""
    is_class = isinstance(obj, type)
    is_function = inspect.isroutine(obj) or (
        not is_class and not isinstance(obj, nn.Module) and hasattr(obj, "__code__")
    )
    name = getattr(obj, "__name__", None) or type(obj).__name__
    evidence = Evidence(name, "function" if is_function else "class", path, source)
    evidence.first_line = _first_line(obj, name, source)
    caller = None
    with surroundings():
        try:
            caller = _examine(evidence, obj, roles, embed_dim, num_heads, is_class, is_function)
        except CAUGHT as error:  # ours or theirs, the report says what there is
            evidence.problems.append(problem_of(error, "call", files_of(obj)))
    return evidence, caller


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


def _examine(
    evidence: Evidence,
    obj: Any,
    roles: dict[str, str] | None,
    embed_dim: int | None,
    num_heads: int | None,
    is_class: bool,
    is_function: bool,
) -> Caller | None:
    texts = texts_of(obj, evidence.source)
    built = (
        by_class(obj, embed_dim, num_heads) if is_class else as_given(obj, embed_dim, num_heads, is_function)
    )
    caller, recipe, problem = built
    if caller is None:
        if problem is not None:
            evidence.problems.append(problem)
        return None
    subject = caller.subject
    if any(word in text for text in texts for word in ("float32", ".float()")):
        subject.calm = True
    if not _steady(caller):
        subject.calm = True
    caller, sentence = find_layout(caller, "\n".join(texts))
    said = [sentence] if sentence else []
    closed = not caller.plan.masks and not caller.plan.switches and not _switched_off(caller.subject.body)
    causal = is_causal(caller) or (closed and meant_causal(texts, evidence.name))
    caller.ways, more = (
        find_ways(caller, causal, texts) if caller.plan.masks or caller.plan.switches else ((), [])
    )
    said += more
    caller.asks = asks_for_weights(caller)
    found = find_roles(caller, _truth(caller, causal), roles)
    if found.num_heads != caller.subject.sizes.H:
        sizes = replace(
            caller.subject.sizes, H=found.num_heads, D=max(1, caller.subject.sizes.E // found.num_heads)
        )
        caller.subject = replace(caller.subject, sizes=sizes)
    evidence.embed_dim, evidence.num_heads = caller.subject.sizes.E, found.num_heads
    evidence.roles, evidence.weights = found.roles, found.weights
    if found.weights is None:
        names = ", ".join(list(caller.subject.parameters)[:8]) or "none"
        message = f"the projections could not be found among its parameters ({names}); pass roles="
        evidence.problems.append(Problem("call", "roles", message))
    evidence.calls = probe(caller, causal)
    if recipe is not None and recipe.causal is not None and not causal and not caller.ways:
        evidence.calls += _switched_on(caller, recipe)
    loud = _without_loud(evidence)
    _share_first_problem(evidence)
    returns = any(call.weights is not None for call in evidence.calls)
    evidence.conventions = conventions(caller, causal, returns, said + found.words)
    evidence.findings = loud + findings(caller, found, evidence.calls, recipe)
    return caller


def _switched_on(caller: Caller, recipe: Recipe) -> list[Call]:
    """The plain probe through an instance whose constructor was told to be causal."""
    try:
        assert recipe.causal is not None
        body = recipe.causal()
        body.double().eval().load_state_dict(caller.subject.body.state_dict(), strict=False)
    except CAUGHT:
        return []
    other = replace(caller, subject=replace(caller.subject, body=body))
    call = probe(other, True)[0]
    return [replace(call, probe="causal")]


def _without_loud(evidence: Evidence) -> list[Finding]:
    """Large scores are for masks that leak; they say nothing about code that is wrong without them."""
    loud = evidence.call(LOUD_PROBE)
    if loud is None or evidence.weights is None:
        return []
    others = [call for call in evidence.calls if call is not loud and call.probe != "empty row"]
    masked = [call for call in others if call.given.mask is not None and call.output is not None]
    truth = [(call.given, call.output) for call in masked if call.output is not None]
    leaves = not truth or error_of(evidence.weights, evidence.num_heads, truth) > 1e-5
    if not leaves and loud.output is not None and bool(loud.output.isfinite().all()):
        return []
    evidence.calls.remove(loud)
    if leaves or loud.output is None:
        return []
    detail = "scores beyond 1e5 overflow: subtract each row's largest score before exp, as torch.softmax does"
    return [Finding("large scores", "unknown", detail)]


def _share_first_problem(evidence: Evidence) -> None:
    """Where no probe gave an output, say so once."""
    crashes = [call.problem for call in evidence.calls if call.problem is not None]
    if crashes and not any(call.output is not None for call in evidence.calls):
        evidence.problems.append(crashes[0])


def _switched_off(body: object) -> bool:
    """Whether it keeps a switch for a causal mask, and that is off."""
    owners = body.modules() if isinstance(body, nn.Module) else [body]
    kept = [(name, value) for one in owners for name, value in getattr(one, "__dict__", {}).items()]
    return any(value is False and size_word(name) == "causal" for name, value in kept)


def _steady(caller: Caller) -> bool:
    """Whether two calls with different seeds agree."""
    inputs = inputs_for(caller, caller.subject.sizes.long, caller.subject.sizes.long)
    with torch.no_grad():
        first, second = (caller.call(*inputs, seed=seed).output for seed in (1, 2))
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _truth(caller: Caller, causal: bool) -> list[tuple[Given, Tensor]]:
    """Calls to prove the projections with."""
    sizes = caller.subject.sizes
    query, key, value = inputs_for(caller, sizes.long, sizes.long, seed=30)
    mask = causal_mask(len(query), sizes.long, sizes.long) if causal else None
    with torch.no_grad():
        try:
            return [(Given(query, key, value, mask), caller.call(query, key, value).output.detach().double())]
        except CAUGHT:
            return []
