"""Functions of q and k alone, and what the report calls a function of q, k and v, or one head.

Weights times v are an attention without projections, so these are examined as one: every fault of scores,
masks and softmax has its name there already.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import torch
from torch import Tensor

from ..evidence import Asked, Evidence, Finding, Problem
from ..faults import FAULTS
from ..report import Named, Report
from .counterfactuals import numbers, words_of
from .questions import Callee, first_array

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


def examine(callee: Callee, evidence: Evidence, embed_dim: int | None, num_heads: int | None) -> None:
    """As an attention without projections; first, whether it gives weights or scores."""
    from ..examine.examination import understand_whole
    from ..examine.words import input_word

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
    from ..judging import judge_whole

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
