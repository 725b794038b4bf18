"""Which step a function is, how it is asked, and the verdict; and every fault that has a name."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import faults
from ..evidence import Evidence, Problem
from ..examine.subject import head_count, signature_of, widths_of
from ..examine.surroundings import CAUGHT, files_of
from ..examine.words import input_word
from ..exceptions import explain
from ..faults.fault import Fault
from ..report import Named, Report
from ..source.parsed import text_of, tree_of
from . import arrangements, blocks, mask_functions, own_softmax, wholes
from .counterfactuals import CERTAIN, Callee, Verdict, instances, named, words_of

STEPS = (own_softmax, arrangements, mask_functions, blocks)
FAULTS: dict[str, Fault] = {**faults.FAULTS, **{fault.key: fault for room in STEPS for fault in room.FAULTS}}
assert len(FAULTS) == len(faults.FAULTS) + sum(len(room.FAULTS) for room in STEPS), "two faults of one name"


SPLITS = re.compile(
    r"(split|separate|divide|unmerge|make|create|to|into)_?(to_|into_|in_)?(the_)?(attention_)?heads?$|heads_?split|transpose_for_scores|transpose_qkv|"
    r"(reshape|view|shape)_(for|to|into|as)_(multi_?)?heads?|^_?shape$|reshape_heads|split_into_heads|split_head"
)
MERGES = re.compile(
    r"(merge|combine|concat(enate)?|join|unsplit|collapse|gather|recombine|undo|unshape|fuse|cat)_?(the_|all_|attention_)?heads?|"
    r"heads_?(merge|concat|combine)|transpose_output|reshape_from_heads|un_?shape$"
)
MASKS = re.compile(r"mask|look_?ahead|subsequent")
MAKES = re.compile(
    r"attention$|attend|apply|masked_|softmax|fill|forward|scores?$|weights?$|loss|language|token_mask"
)
BLOCK = re.compile(r"(block|layer)s?(_?\d+)?$|(encoder|decoder|transformer)_?(block|layer|unit)")
FEEDS = re.compile(
    r"(?i)feed_?forward|\bffn?w?\b|ffn|mlp|linear_?[12]\b|fc_?[12]\b|position_?wise|\bgelu|\brelu|\bsilu|nn\.Sequential"
)
ATTENDS = re.compile(r"(?i)att(entio)?n|mha|multi_?head|\bsa\b|\bheads?\b")
ROOMS = {
    "softmax": own_softmax, "split heads": arrangements, "merge heads": arrangements,
    "mask": mask_functions,
}  # fmt: skip
TORCHS = {
    "softmax": "torch.softmax",
    "split heads": "x.view(B, T, H, d_k).transpose(1, 2)",
    "merge heads": "x.transpose(1, 2).reshape(B, T, E)",
    "mask": "the mask that it is meant to be",
    "scaled dot product": "torch's scaled_dot_product_attention",
    "weights": "softmax(q k^T / sqrt(d_k))",
    "scores": "q k^T / sqrt(d_k)",
    "one head": "one head of torch.nn.MultiheadAttention",
    "block": "a Transformer block",
}

PRAISE = {
    "softmax": "{name} computes what torch.softmax computes, {right}",
    "split heads": "{name} splits the width into heads: it gives {right}",
    "merge heads": "{name} puts the heads side by side again: it takes {right}",
    "mask": "{name} makes a right mask: {right}",
}
# role -> what our repairs call it


def step_of(obj: object, name: str, source: str | None = None) -> str | None:
    """Which single step this is by its name and its parameters; None: a whole attention, or nothing known.

    Numbers have the last word: a step that computes something else is told so, or not judged.
    """
    word = words_of(name)
    if isinstance(obj, (type, nn.Module)):
        cls = obj if isinstance(obj, type) else type(obj)
        if re.fullmatch(r"(my_|own_|custom_|stable_|simple_)*soft_?max\w{0,3}", words_of(cls.__name__)):
            return None if cls.__module__.startswith("torch") else "softmax"
        return "block" if _is_block(cls, source) else None
    if not inspect.isroutine(obj):
        return None
    ours = [
        one for one in signature_of(obj).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and one.name not in {"self", "cls"}
    ]  # fmt: skip
    slots = {input_word(one.name) for one in ours}
    if not ours or {"query", "key", "value"} <= slots:
        return None
    if SPLITS.search(word):
        return "split heads"
    if MERGES.search(word):
        return "merge heads"
    if re.search(r"soft_?max", word) and not re.search(
        r"att(entio)?n|cross|loss|regress|train|grad|back|jacob|log_?soft", word
    ):
        return "softmax"
    if MASKS.search(word) and not MAKES.search(word):
        return "mask"
    if {"query", "key"} <= slots and "value" not in slots:
        return "weights"
    return None


def _is_block(cls: type, source: str | None) -> bool:
    if issubclass(cls, nn.Module) and cls.__module__.startswith("torch.nn"):
        return cls.__name__ in {"TransformerEncoderLayer", "TransformerDecoderLayer"}
    if not issubclass(cls, nn.Module) or not BLOCK.search(words_of(cls.__name__)):
        return False
    if re.search(r"att(entio)?n|multi_?head", words_of(cls.__name__)):
        return False
    text = _text_of(cls, source)
    return bool(FEEDS.search(text) and ATTENDS.search(text.partition("\n")[2]))


def _text_of(cls: type, source: str | None) -> str:
    tree = tree_of(source or "")
    if tree is None:
        return ""
    texts = []
    for one in cls.__mro__:
        named = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == one.__name__]
        texts += [ast.get_source_segment(source or "", node) or "" for node in named[-1:]]
    return "\n".join(texts)


# Examining


def examine_step(
    obj: Any,
    step: str,
    evidence: Evidence,
    arguments: Mapping[str, object] | None = None,
    *,
    embed_dim: int | None = None,
    num_heads: int | None = None,
) -> None:
    """Ask it, and write down question and answer; inside `surroundings`.

    Args:
        obj: a function, a method, bound or not; a class or an instance of a block or a softmax.
        step: from `step_of`.
        evidence: what is found goes in here.
        arguments: of the constructor, or of the function, by name.
        embed_dim, num_heads: to build a class with.
    """
    evidence.step = step
    evidence.name = _full_name(obj, evidence.name)
    if step == "block":
        wholes.examine_block(obj, evidence, arguments, embed_dim, num_heads)
        return
    callee = _callee(obj, evidence, arguments, embed_dim, num_heads)
    if callee is None:
        return
    evidence.again = callee
    if step == "weights":
        wholes.examine_scores(callee, evidence, embed_dim, num_heads)
        return
    for one in callee.parameters:
        if one.name in {"device", "dev"} and one.default is one.empty:
            callee.fixed[one.name] = torch.device("cpu")
        if one.name == "dtype" and one.default is one.empty:
            callee.fixed[one.name] = torch.float64
    owned = {one.name for one in callee.parameters}
    callee.fixed |= {name: value for name, value in (arguments or {}).items() if name in owned}
    ROOMS[step].examine(callee, evidence)
    if evidence.asked and all(one.output is None for one in evidence.asked):
        problem = evidence.asked[0].problem
        assert problem is not None
        evidence.problems.append(problem)


def _full_name(obj: Any, name: str) -> str:
    full = str(getattr(obj, "__qualname__", name)).rpartition("<locals>.")[2]
    return full if full.rpartition(".")[2] == name else name


def _callee(
    obj: Any,
    evidence: Evidence,
    arguments: Mapping[str, object] | None,
    embed_dim: int | None,
    num_heads: int | None,
) -> Callee | None:
    """The function, the method of an instance that is built here, or the instance of a class."""
    files = files_of(obj)
    if isinstance(obj, type):
        return _built(obj, None, files, evidence, arguments, embed_dim, num_heads)
    owner, method = owner_of(obj)
    if owner is not None:
        return _built(owner, method, files, evidence, arguments, embed_dim, num_heads)
    if method:
        message = f"{obj.__qualname__} is a method, and its class was not found; pass instance.{method}"
        evidence.problems.append(Problem("build", "method", message))
        return None
    callee = Callee(obj, files)
    held = getattr(obj, "__self__", None)
    if held is not None and not inspect.ismodule(held) and not isinstance(held, type):
        callee.heads = num_heads or head_count(held)
        widths = [embed_dim] if embed_dim else widths_of(held)
        if callee.heads and widths:
            callee.width = next(
                (one for one in widths if one % callee.heads == 0 and one > callee.heads), None
            )
    return callee


def owner_of(obj: Any) -> tuple[type | None, str]:
    """The class of a method that was taken from the class, and its name; ("" for what is no such method)."""
    first = next(iter(signature_of(obj).parameters), "") if inspect.isfunction(obj) else ""
    if first != "self" or "." not in obj.__qualname__:
        return None, ""
    path, _, method = obj.__qualname__.rpartition(".")
    first, *others = path.rpartition("<locals>.")[2].split(".")
    cls = obj.__globals__.get(first)
    for part in others:
        cls = getattr(cls, part, None)
    found = isinstance(cls, type) and inspect.getattr_static(cls, method, None) is obj
    return (cls if found else None), method


def whole_of(obj: Any) -> Any:
    """The class or the module, where its forward was named; of another method, that of a copy; else what
    was named.
    """
    owner, method = owner_of(obj)
    held = getattr(obj, "__self__", None) if inspect.ismethod(obj) else None
    if isinstance(held, nn.Module):
        return held if obj.__name__ in {"forward", "__call__"} else _of_a_copy(obj, held)
    return owner if owner is not None and method in {"forward", "__call__"} else obj


def _of_a_copy(method: Any, module: nn.Module) -> Any:
    """The same method, so that what it changes is not the user's; a whole attention as a forward."""
    try:
        copied = copy.deepcopy(module)
    except CAUGHT:
        return method
    own = getattr(copied, method.__name__)
    if step_of(method, method.__name__) is None and any(one.ndim > 1 for one in copied.parameters()):
        copied.forward = own
        return copied
    copied.double().eval()
    return own


def bound(
    obj: Any,
    evidence: Evidence,
    arguments: Mapping[str, object] | None,
    embed_dim: int | None,
    num_heads: int | None,
) -> Any:
    """A method taken from its class, of an instance that is built here; what is none stays as it is."""
    owner, method = owner_of(obj)
    if owner is None:
        return obj
    callee = _built(owner, method, files_of(obj), evidence, arguments, embed_dim, num_heads)
    return obj if callee is None else callee.body


def _built(
    cls: type, method: str | None, files: frozenset[str], evidence: Evidence,
    arguments: Mapping[str, object] | None, embed_dim: int | None, num_heads: int | None,
) -> Callee | None:  # fmt: skip
    if evidence.step == "softmax" and method is None:  # its constructor is told an axis, if anything
        for make in (cls, lambda: cls(-1)):
            try:
                return Callee(make(), files)
            except CAUGHT as error:
                evidence.tried.append(f"{cls.__name__}: {type(error).__name__}: {error}")
        return None
    for body, sizes in instances(cls, evidence, arguments, embed_dim, num_heads):
        return Callee(getattr(body, method or "forward"), files, width=sizes.E, heads=sizes.H)
    evidence.tried.append(
        f"{cls.__name__} could not be built with sizes of ours, so its {method} was not run"
    )
    return None


# Judging


def judge_step(evidence: Evidence) -> Report:
    """The verdict on a single step, from questions and answers alone."""
    if evidence.step == "block":
        return blocks.judge(evidence)
    if evidence.step in {"weights", "scores", "scaled dot product", "one head"}:
        return wholes.judge(evidence)
    report = Report(evidence.name, ok=False, summary="", path=evidence.path)
    report.conventions, report.findings = evidence.conventions, evidence.findings
    report.problems, report.tried, report.built = (
        list(evidence.problems),
        list(evidence.tried),
        evidence.built,
    )
    report.beside = TORCHS[evidence.step or ""]
    verdict = ROOMS[evidence.step or ""].judge(evidence)
    report.conventions.words = list(dict.fromkeys((*evidence.conventions.words, *verdict.words)))
    report.errors = dict(verdict.errors or {})
    report.explained = [explain(problem, evidence.source) for problem in report.problems]
    _say(report, evidence, verdict)
    return report


def _say(report: Report, evidence: Evidence, verdict: Verdict) -> None:
    step = evidence.step or ""
    if verdict.unjudged or not evidence.asked:
        _say_crashes(report, evidence)
        if report.faults:
            report.summary = f"{report.faults[0].key}: {report.faults[0].title}"
            return
        report.judged = any(one.kind in CERTAIN for one in report.problems)
        why = "; ".join(evidence.tried) or verdict.unjudged or "it could not be run"
        report.summary = report.explained[0] if report.explained else f"{report.name} was not judged: {why}"
        return
    if verdict.fault is not None:
        report.faults.append(named(evidence, verdict.fault, verdict.detail))
        report.alike = [each.key for each in verdict.alike]
    report.remarks = [named(evidence, FAULTS[key], detail) for key, detail in verdict.remarks]
    for finding in report.findings:
        if finding.verdict == "wrong" and finding.fault in FAULTS:
            report.faults.append(named(evidence, FAULTS[finding.fault], finding.detail))
    report.ok = bool(verdict.right) and not report.faults and not report.problems
    if report.ok:
        worst = max(report.errors.values(), default=0.0)
        how = f", to {worst:.0e}" if worst else ""
        report.summary = PRAISE[step].format(name=report.name, right=verdict.right) + how
    elif report.faults:
        report.summary = f"{report.faults[0].key}: {report.faults[0].title}"
    else:
        report.summary = (
            f"{report.name} computes something other than {TORCHS[step]}; no fault we know explains it"
        )


def _say_crashes(report: Report, evidence: Evidence) -> None:
    """Crashes that have a name, whatever was passed."""
    for problem in report.problems:
        for fault in FAULTS.values():
            if any(words in problem.message for words in fault.crash) and not fault.crash_probe:
                detail = f"line {problem.line}: {problem.message}"
                text = text_of(evidence.source or "", problem.line)
                report.faults.append(Named.of(fault, detail, problem.line, text))
