"""Wholes that hold an attention, at work: Transformer blocks, and functions of q and k alone.

What each part of a block is given and gives is written down; the attention inside is examined as any other.
Weights times v are an attention without projections, so what gives weights is examined as one, too: every
fault of scores, masks and softmax has its name there already.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..evidence import Asked, Evidence, Finding, Problem
from ..examine.build import GUESS
from ..examine.conventions import layout_words
from ..examine.examination import understand_whole
from ..examine.subject import signature_of, widths_of
from ..examine.surroundings import CAUGHT, files_of, problem_of
from ..examine.words import input_word
from ..faults import FAULTS
from ..judging import judge_whole
from ..report import Named, Report
from .counterfactuals import CERTAIN, Callee, apart, first_array, instances, numbers, words_of

FUNCTION = "torch.nn.functional.scaled_dot_product_attention"
HEAD = "one head of torch.nn.MultiheadAttention"
WHOLE = "torch.nn.MultiheadAttention"


class _TimesValues:
    """The learner's weights, or the softmax of their scores, times v: what the ordinary examination calls."""

    def __init__(self, body: Any, are_scores: bool) -> None:
        self.body, self.are_scores = body, are_scores
        self.__name__, self.__code__ = getattr(body, "__name__", "weights"), getattr(body, "__code__", None)
        ours = list(inspect.signature(body).parameters.values())
        value = inspect.Parameter("value", inspect.Parameter.KEYWORD_ONLY)
        last = [one for one in ours if one.kind is one.VAR_KEYWORD]
        self.__signature__ = inspect.Signature([*(one for one in ours if one not in last), value, *last])

    def __call__(self, *args: Any, value: Tensor, **named: Any) -> Tensor:
        made = self.body(*args, **named)
        made = made[0] if isinstance(made, (list, tuple)) else made
        made = made if isinstance(made, Tensor) else first_array(made)
        return (torch.softmax(made, -1) if self.are_scores else made) @ value


def examine_scores(callee: Callee, evidence: Evidence, embed_dim: int | None, num_heads: int | None) -> None:
    """As an attention without projections; first, whether it gives weights or scores."""
    slots = {input_word(one.name): one.name for one in callee.parameters}
    callee.roles = {role: slots[role] for role in ("query", "key")}
    needed = [
        one for one in callee.parameters if one.default is one.empty and one.name not in callee.roles.values()
    ]
    masks = [one.name for one in needed if input_word(one.name) == "mask"]
    callee.fixed |= dict.fromkeys(masks)
    asked: Asked | None = None
    problem: Problem | None = None
    touched: str | None = None
    for shape in ((2, 3), (2,), ()):
        for kind in ((False, torch.float64), (False, torch.float32), (True, torch.float64)):
            callee.numpy, callee.dtype = kind
            question = {"query": numbers(*shape, 5, 7, seed=3), "key": numbers(*shape, 5, 7, seed=4)}
            asked, touched = callee.answer("plain", question)
            problem = problem or asked.problem  # of the likeliest way to call it
            if asked.output is not None:
                break
        if asked is not None and asked.output is not None:
            break
    assert asked is not None
    evidence.asked.append(asked)
    found = asked.output
    query = asked.given["query"]
    assert isinstance(query, Tensor)
    if found is None or found.shape != (*query.shape[:-1], query.shape[-2]):
        if found is None:
            assert problem is not None
            evidence.problems.append(problem)
        else:
            told = list(found.shape)
            evidence.tried.append(
                f"for q and k {list(query.shape)} it gives {told}, neither scores nor weights"
            )
        return
    evidence.step = "scores" if bool((found < 0).any()) else "weights"
    whole = _TimesValues(callee.body, evidence.step == "scores")
    seen, again = understand_whole(whole, evidence.source, evidence.path, None, embed_dim, num_heads)
    words = [each for each in seen.conventions.words if not each.startswith("it has no weights")]
    seen.conventions.words = [re.sub(r", value\b( \(value\))?", "", each) for each in words]
    kept = {
        name: getattr(evidence, name) for name in ("name", "first_line", "step", "asked", "kind", "built")
    }
    vars(evidence).update(vars(seen) | kept | {"again": again})
    if touched is not None:
        name = "input left unmodified"
        others = [one for one in evidence.findings if one.name != name]
        detail = f"{callee.roles[touched]} is another after the call than before it"
        evidence.findings = [*others, Finding(name, "wrong", detail, "input modified")]


def judge(evidence: Evidence) -> Report:
    """As an attention without projections, in the words of the step."""
    step = evidence.step or ""
    report = judge_whole(dataclasses.replace(evidence, step=None))
    if evidence.tried and not evidence.calls:
        report.not_judged += evidence.tried
        report.summary = f"{report.name} was not judged: {evidence.tried[0]}"
    report.roles = {}
    beside = "softmax(q k^T / sqrt(d_k))" if step == "weights" else "q k^T / sqrt(d_k)"
    keys = [one.key for one in report.faults]
    if step == "scores" and keys == ["no scale"] and "scaled" not in words_of(evidence.name):
        report.faults, report.ok, report.first_wrong, report.where_right = [], True, None, []
        report.errors = dict.fromkeys(report.errors, 0.0)
        report.equal.append("it gives q k^T without the scale: divide by sqrt(d_k) before the softmax")
        beside = "q k^T"
        report.summary = f"{report.name} computes what {WHOLE} computes, to the last digit"
    _beside(report, beside)
    return report


def told_as(evidence: Evidence, report: Report) -> Report:
    """A report on a function without projections, or on one head, in words of its own."""
    if evidence.weights is None:
        return report
    if evidence.kind == "function" and not evidence.roles:
        _beside(report, FUNCTION)
        report.conventions.words = [
            each for each in report.conventions.words if not each.startswith("it has no weights")
        ]
    elif _is_head(evidence):
        _beside(report, HEAD)
        _name_scale(evidence, report)
    return report


def _is_head(evidence: Evidence) -> bool:
    assert evidence.weights is not None
    if evidence.kind != "class" or evidence.num_heads != 1:
        return False
    narrow = evidence.weights.v.shape[0] < evidence.embed_dim
    return narrow or bool(
        re.search(r"(?<!multi_)head$|^head|single_?head|one_?head", words_of(evidence.name))
    )


def _name_scale(evidence: Evidence, report: Report) -> None:
    """In one head the width of the model is not that of the head: a scale by it is found as a number."""
    fault, width = FAULTS["scale by d_model"], evidence.embed_dim
    for at, one in enumerate(report.faults):
        near = one.number is not None and abs(one.number - width**-0.5) < 1e-6
        if one.key == "constant scale" and near:
            detail = one.detail + f": that is 1 / sqrt({width}), the width of the input"
            report.faults[at] = Named.of(fault, detail, one.line, one.text)
            report.summary = f"{fault.key}: {fault.title}"


def _beside(report: Report, beside: str) -> None:
    report.beside = beside
    report.summary = report.summary.replace(WHOLE, beside)
    report.summary = report.summary.replace(
        "something other than multi-head attention", f"something other than {beside}"
    )


ATTENDS = re.compile(r"att(entio)?n|mha|multi_?head|^sa\d?$|^ca\d?$|^heads?$|^self_?att")
NORM = re.compile(r"norm|^ln_?\w{0,2}$")


def examine_block(
    obj: Any, evidence: Evidence, arguments: Mapping[str, object] | None, embed_dim: int | None,
    num_heads: int | None,
) -> None:  # fmt: skip
    """Build it, run it, write down what each part is given and gives; examine the attention inside."""
    files, first = files_of(obj), None
    if isinstance(obj, type):
        made = (
            (body, [sizes.E]) for body, sizes in instances(obj, evidence, arguments, embed_dim, num_heads)
        )
    else:
        widths = [embed_dim] if embed_dim else widths_of(obj)[:6]
        made = (one for one in [(copy.deepcopy(obj).double().eval(), widths)])
    for body, widths in itertools.islice(made, 6):
        for E in widths:
            for given, named in _inputs(body, E):
                try:
                    if _watch(body, given, named, evidence):
                        evidence.embed_dim = E
                        _batch(body, given, named, evidence)
                        _inside(body, evidence)
                        return
                except CAUGHT as error:
                    first = first or problem_of(error, "call", files)
    if first is not None:
        first.kind = first.kind if first.kind in CERTAIN else GUESS
        evidence.problems.append(first)
    evidence.tried.append(f"{evidence.name} was called with x [3, 7, width]")


def _batch(body: nn.Module, given: dict[str, Tensor], named: dict[str, object], evidence: Evidence) -> None:
    """Whether its output is finite, and samples of a batch keep to themselves."""

    def output(changed: dict[str, Tensor]) -> Tensor:
        passed = {
            name: next((changed[one] for one in given if value is given[one]), value)
            for name, value in named.items()
        }
        with torch.no_grad():
            return first_array(body(**passed)).detach()

    def reacts(axis: int) -> bool:
        """Whether the second along this axis reacts to the first."""
        moved = {name: x.clone() for name, x in given.items()}
        for x in moved.values():
            x.select(axis, 0).add_(1.0)
        return apart(output(moved).select(axis, 1), base.select(axis, 1)) > 1e-9

    base = output(given)
    if not bool(base.isfinite().all()):
        detail = "it is not finite for ordinary inputs: does a mask inside hide everything from a query?"
        evidence.findings.append(Finding("output", "unknown", detail))
        return
    if reacts(0):
        says = layout_words(evidence.source or "")
        detail = "the second sample reacts to the first"
        if not reacts(1) and says == "batch first":
            evidence.findings.append(Finding("batch", "wrong", detail, "wrong layout"))
        elif not reacts(1):
            evidence.conventions.words.append("its inputs are [T, B, E], length first")
        else:
            evidence.findings.append(Finding("batch", "unknown", detail))


def _inputs(body: nn.Module, E: int) -> Iterator[tuple[dict[str, Tensor], dict[str, object]]]:
    """x, memory, and what goes in by name; masks absent, then open."""
    ours = [
        one
        for one in signature_of(body).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    slots = {one.name: input_word(one.name) for one in ours}
    needed = [one.name for one in ours if one.default is one.empty]
    stream = next((name for name in slots if slots[name] in {"x", "query"}), needed[0] if needed else None)
    if stream is None:
        return
    memory = next((name for name in slots if slots[name] in {"memory", "key"} and name != stream), None)
    if memory is None and len(needed) > 1 and slots[needed[1]] not in {"mask", "lengths"}:
        memory = needed[1]
    given = {"x": numbers(3, 7, E, seed=21)}
    named: dict[str, object] = {stream: given["x"]}
    if memory is not None:
        given["memory"] = numbers(3, 11, E, seed=22)
        named[memory] = given["memory"]
    for kind in ("absent", "four", "three", "two"):
        passed = dict(named)
        for name in needed:
            if name in passed:
                continue
            over = 11 if memory is not None and re.search(r"src|mem|enc|cross", name.lower()) else 7
            shape = {"four": (3, 1, 7, over), "three": (3, 7, over), "two": (7, over)}.get(kind)
            passed[name] = None if shape is None else torch.ones(shape, dtype=torch.bool)
        yield given, passed
        if set(needed) <= set(named):
            break
    if memory is not None:  # the length first, as torch's own has it
        turned = {name: one.transpose(0, 1).contiguous() for name, one in given.items()}
        yield turned, {stream: turned["x"], memory: turned["memory"]}


def _parts(root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(kind, path, module) of norms, attentions, feed-forwards, and linear layers that stand alone."""

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, str, nn.Module]]:
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            kind = _kind(child, name)
            if kind:
                yield kind, here, child
            else:
                yield from walk(child, here)

    yield from walk(root, "")


def _kind(module: nn.Module, name: str) -> str:
    cls = words_of(type(module).__name__)
    if NORM.search(cls) and not any(True for _ in module.children()):
        return "norm"
    owned = any(True for _ in module.parameters())
    inside = [one for one in module.modules() if one is not module]
    norms = any(NORM.search(words_of(type(one).__name__)) for one in inside)
    named = (cls, name.lower())
    if owned and any(ATTENDS.search(one) for one in named) and (not norms or re.search(r"multi_?head", cls)):
        return "" if isinstance(module, nn.ModuleList) and not ATTENDS.search(cls) else "attention"
    if isinstance(module, nn.Linear):
        return "linear"
    attends = any(ATTENDS.search(words_of(type(one).__name__)) for one in inside)
    linear = any(isinstance(one, (nn.Linear, nn.Conv1d)) for one in inside)
    if linear and not norms and not attends and not isinstance(module, nn.ModuleList):
        return "feed-forward"
    return ""


def _watch(body: nn.Module, given: dict[str, Tensor], named: dict[str, object], evidence: Evidence) -> bool:
    """Run it with hooks on every part; True where it gave an output of x's shape."""
    log: list[Asked] = []
    hooks = []

    def hook(kind: str, path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensors = [
                one
                for one in (*args, *kwargs.values())
                if isinstance(one, Tensor) and one.is_floating_point()
            ]
            if not tensors:
                return
            held = {f"in {number}": one.detach().clone() for number, one in enumerate(tensors[:3])}
            log.append(Asked(f"{kind}: {path}", dict(held), first_array(output).clone()))

        return note

    parts = list(_parts(body))
    for kind, path, module in parts:
        hooks.append(module.register_forward_hook(hook(kind, path), with_kwargs=True))
        if kind == "feed-forward":
            for name, one in module.named_modules():
                if isinstance(one, nn.Linear):
                    hooks.append(one.register_forward_hook(hook("inner", f"{path}.{name}"), with_kwargs=True))
    try:
        torch.manual_seed(1)
        output = first_array(body(**_fresh(named)))
    finally:
        for one in hooks:
            one.remove()
    torch.manual_seed(2)
    again = first_array(body(**_fresh(named)))
    if output.shape != given["x"].shape or not any(kind == "attention" for kind, _, _ in parts):
        return False
    if apart(again, output) > 1e-6:
        detail = "in eval, two calls with one input give two outputs"
        evidence.findings.append(Finding("deterministic in eval", "wrong", detail, "dropout in eval"))
    evidence.asked = [Asked("block", dict(given), output), *log]
    unused = [
        path
        for kind, path, _ in parts
        if kind == "norm" and not any(one.probe == f"norm: {path}" for one in log)
    ]
    if unused:
        evidence.tried.append(f"made and never called: {', '.join(unused)}")
    evidence.conventions.words.append("it is called with " + ", ".join(named))
    return True


def _fresh(named: dict[str, object]) -> dict[str, Any]:
    """Copies that need a gradient: torch's own layer then takes the way that has hooks."""
    return {
        name: value.clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in named.items()
    }


def _inside(body: nn.Module, evidence: Evidence) -> None:
    """Each attention of the block by the ordinary way."""
    for kind, path, module in _parts(body):
        if kind != "attention" or isinstance(module, nn.MultiheadAttention):
            continue
        seen, _ = understand_whole(module, evidence.source, evidence.path)
        report = judge_whole(seen)
        name = f"attention inside ({path})"
        if report.ok:
            evidence.findings.append(Finding(name, "right", report.summary))
        elif report.faults:
            for one in report.faults:
                evidence.findings.append(Finding(name, "wrong", one.detail or one.title, one.key, one.line))
        else:
            evidence.findings.append(Finding(name, "unknown", report.summary))
