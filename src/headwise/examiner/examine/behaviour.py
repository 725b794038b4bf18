"""What is looked at beside the numbers: randomness, gradients, inputs left alone, saving, half precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..evidence import Call, Finding
from ..recipe import run
from .building import Recipe
from .calling import Caller
from .comparing import SAME, plain, run_body, share_off, some_mask
from .failing import CAUGHT, problem_of
from .precision import dtype_kept, half
from .projection_roles import Found
from .structure import alone, apart, biases, projections
from .subject import Subject, settle
from .surroundings import seed

__all__ = ["findings"]


def findings(caller: Caller, found: Found, calls: list[Call], recipe: Recipe | None) -> list[Finding]:
    """All of them; none raises."""
    looks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _deterministic(caller, recipe),
        lambda: _training(caller),
        lambda: _inputs_kept(caller),
        lambda: _gradients(caller, found, right),
        lambda: _state(caller),
        lambda: half(caller, right),
        lambda: dtype_kept(caller),
        lambda: alone(calls),
        lambda: apart(calls),
        lambda: biases(caller, found),
        lambda: projections(caller, found),
    ]
    right = _right(found, calls)
    said: list[Finding] = []
    for look in looks:
        try:
            said += look()
        except CAUGHT as error:
            problem = problem_of(error, "call", caller.subject.files)
            name = "one of the looks beside the numbers"
            said.append(Finding(name, "unknown", f"{problem.kind}: {problem.message}", None, problem.line))
    return said


def _right(found: Found, calls: list[Call]) -> bool:
    """Whether every probe gave what the recipe gives; rows that may see nothing have no right answer."""
    if found.weights is None:
        return False
    for call in calls:
        if call.output is None:
            return False
        truth = run(call.given, found.weights, found.num_heads).output
        if call.output.shape != truth.shape:
            return False
        seen = (
            torch.ones(truth.shape[:2], dtype=torch.bool)
            if call.given.mask is None
            else call.given.mask.any(-1)
        )
        if not share_off(call.output[seen], truth[seen]) <= 1e-5:
            return False
    return True


def _deterministic(caller: Caller, recipe: Recipe | None) -> Iterator[Finding]:
    """Two runs in eval; once more with half of everything dropped, where the constructor can be told so."""
    name, subject = "deterministic in eval", caller.subject
    if not torch.equal(run_body(caller, subject.body, 1), run_body(caller, subject.body, 2)):
        calm = torch.equal(
            run_body(caller, subject.body, 1, calm=True), run_body(caller, subject.body, 2, calm=True)
        )
        if calm:
            yield Finding(
                name, "wrong", "two runs in eval differ: dropout is active there, too", "dropout in eval"
            )
        else:
            yield Finding(name, "wrong", "two runs in eval differ, and not for dropout", "not deterministic")
        return
    if recipe is not None and recipe.dropout is not None:
        try:
            body = recipe.dropout(0.5)
            body.double().eval()
            first, second = run_body(caller, body, 1), run_body(caller, body, 2)
        except CAUGHT:
            yield Finding(name, "right", "two runs in eval are equal")
            return
        if not torch.equal(first, second):
            yield Finding(name, "wrong", "built with dropout=0.5, two runs in eval differ", "dropout in eval")
            return
    yield Finding(name, "right", "two runs in eval are equal")


def _training(caller: Caller) -> Iterator[Finding]:
    """Without dropout, training computes what evaluation does."""
    name, body = "train equals eval without dropout", caller.subject.body
    if not isinstance(body, nn.Module):
        return
    other = copy.deepcopy(body)
    for module in other.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in vars(module).items():
            if "drop" in key.lower() and isinstance(value, float):
                setattr(module, key, 0.0)
    other.train()
    try:
        off = share_off(
            run_body(caller, other, calm=caller.subject.calm),
            run_body(caller, body, calm=caller.subject.calm),
        )
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files)
        yield Finding(
            name, "wrong", f"in training it raises {problem.kind}: {problem.message}", None, problem.line
        )
        return
    if off <= SAME:
        yield Finding(name, "right", "with dropout at 0, train() and eval() give the same output")
    else:
        yield Finding(
            name, "wrong", f"with dropout at 0, train() and eval() differ by {off:.0e} of the output"
        )


def _inputs_kept(caller: Caller) -> Iterator[Finding]:
    """Neither inputs nor masks are written to."""
    name = "input left unmodified"
    inputs = plain(caller)
    before = [one.clone() for one in inputs]
    with torch.no_grad():
        caller.call(*inputs)
    names = ("the query", "the key", "the value")
    if caller.plan.self_only:
        names = ("the input",) * 3
    changed = [
        what for what, one, was in zip(names, inputs, before, strict=True) if not torch.equal(one, was)
    ]
    if changed:
        yield Finding(name, "wrong", f"{changed[0]} is changed in place", "input modified")
    else:
        yield Finding(name, "right", "the inputs are as they were")
    yield from _masks_kept(caller)


def _masks_kept(caller: Caller) -> Iterator[Finding]:
    mask = some_mask(caller)
    if mask is None:
        return
    said: dict[str, Any] = {}

    def listen(args: list[object], kwargs: dict[str, object], seed: int = 0) -> object:
        said.update({k: (v, v.clone()) for k, v in kwargs.items() if k in names and torch.is_tensor(v)})
        return Subject.invoke(caller.subject, args, kwargs, seed)

    names = {way.argument for way in caller.ways}
    watched = replace(caller, subject=copy.copy(caller.subject))
    watched.subject.invoke = listen  # type: ignore[method-assign]
    with torch.no_grad():
        watched.call(*plain(caller), mask)
    for key, (after, was) in said.items():
        if not torch.equal(after, was):
            yield Finding(
                "mask left unmodified",
                "wrong",
                f"{key} is changed in place: the next call gets another",
                "mask modified",
            )
            return
    if said:
        yield Finding("mask left unmodified", "right", "the mask is as it was")


def _gradients(caller: Caller, found: Found, right: bool) -> Iterator[Finding]:
    """They reach every input and every parameter that counts."""
    name, subject = "gradients", caller.subject
    if caller.plan.as_numpy:
        return
    inputs = plain(caller)
    leaves: dict[int, Tensor] = {id(one): one.clone().requires_grad_() for one in inputs}
    query, key, value = (leaves[id(one)] for one in inputs)
    parameters = {k: p for k, p in subject.parameters.items() if p.is_floating_point()}
    for one in parameters.values():
        one.grad = None
    try:
        output = caller.call(query, key, value).output
        dice = torch.Generator().manual_seed(8)
        (output * torch.randn(output.shape, generator=dice, dtype=output.dtype)).sum().backward()
    except CAUGHT as error:
        problem = problem_of(error, "backward", subject.files)
        detail = f"backward raises {problem.kind}: {problem.message}"
        yield Finding(name, "wrong", detail, "gradients blocked", problem.line)
        return
    words = {"query": query, "key": key, "value": value}
    if caller.plan.self_only:
        words = {"input": query}
    elif caller.plan.memory_only:
        words = {"query": query, "memory": key}
    dead = [f"the {word}" for word, one in words.items() if one.grad is None or not bool(one.grad.any())]
    keys = {piece.name for piece in (found.guess.biases.get("k", []) if found.guess else [])}
    keys |= {k for k in parameters if "k" in k.lower() and parameters[k].ndim == 1}
    lost = [k for k, p in parameters.items() if (p.grad is None or not bool(p.grad.any())) and k not in keys]
    for one in parameters.values():
        one.grad = None
    if dead or lost:
        which = ", ".join(dead + lost[:6])
        fault = "gradients blocked" if right else None  # else a symptom of what is wrong with the numbers
        yield Finding(name, "wrong", f"no gradient reaches {which}", fault)
    else:
        yield Finding(name, "right", "gradients reach every input and every parameter")


def _state(caller: Caller) -> Iterator[Finding]:
    """A fresh instance with this one's state dict computes the same."""
    name, subject = "state dict complete", caller.subject
    if not isinstance(subject.body, nn.Module):
        return
    if subject.unregistered:
        which = ", ".join(subject.unregistered[:4])
        fault = "heads in a list" if any(c.isdigit() for c in which) else "state dict incomplete"
        yield Finding(name, "wrong", f"state_dict() and parameters() know nothing of {which}", fault)
        return
    if subject.make is None:
        yield Finding(name, "right", "every weight found is in state_dict()")
        return
    try:
        seed(4)  # another than the first was made with
        other = subject.make()
        fresh = replace(subject, body=other)
        with torch.no_grad():
            run_body(caller, other.double().eval())  # lazy layers get their shapes
        settle(fresh)
        other.load_state_dict(subject.body.state_dict())
        off = share_off(
            run_body(caller, other, calm=subject.calm), run_body(caller, subject.body, calm=subject.calm)
        )
    except CAUGHT as error:
        problem = problem_of(error, "build", subject.files)
        yield Finding(name, "unknown", f"{problem.kind}: {problem.message}", None, problem.line)
        return
    if off <= SAME:
        yield Finding(name, "right", "a fresh instance that loads the state dict gives the same output")
    else:
        detail = f"a fresh instance that loads the state dict differs by {off:.0e} of the output"
        yield Finding(name, "wrong", detail, "state dict incomplete")
