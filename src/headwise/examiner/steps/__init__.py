"""Single steps of attention, each examined by itself: softmax, a split into heads, a mask, a block.

step_engine         calls a function and compares its answers
softmax_and_heads, mask_functions   the tables: how each is called, what is right, what each fault computes
blocks_and_scores   Transformer blocks, and functions of q and k
"""

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
from ..examine.environment import CAUGHT, files_of
from ..examine.subject import head_count, signature_of, widths_of
from ..examine.vocabulary import input_word
from ..exceptions import explain
from ..faults.fault import Fault
from ..report import Named, Report, largest_difference
from ..source.lines import line_of
from ..source.parsed import readable, segment, text_of, tree_of
from . import blocks_and_scores, mask_functions, softmax_and_heads
from .step_engine import (
    CERTAIN,
    Callee,
    Verdict,
    Wanted,
    ask,
    instances,
    judge,
    named_parameters,
    own_text,
    words_of,
)

FAULT_GROUPS = {
    "A softmax written by the learner": softmax_and_heads.SOFTMAX.faults,
    "Splitting the width into heads, and merging the heads again": [
        *softmax_and_heads.SPLITTING.faults, *softmax_and_heads.MERGING.faults,
    ],
    "Functions that make a mask: causal, padding, or both": mask_functions.MASK.faults,
    "Transformer blocks": blocks_and_scores.FAULTS,
}  # fmt: skip
OWN = [fault for group in FAULT_GROUPS.values() for fault in group]
FAULTS: dict[str, Fault] = {**faults.FAULTS, **{fault.key: fault for fault in OWN}}
assert len(FAULTS) == len(faults.FAULTS) + len(OWN), "two faults of one name"

STEPS = {
    "softmax": softmax_and_heads.SOFTMAX,
    "split heads": softmax_and_heads.SPLITTING,
    "merge heads": softmax_and_heads.MERGING,
    "mask": mask_functions.MASK,
}
BESIDE = {  # what it is compared with
    "softmax": "torch.softmax",
    "split heads": "x.view(B, T, H, d_k).transpose(1, 2)",
    "merge heads": "x.transpose(1, 2).reshape(B, T, E)",
    "mask": "the mask that it is meant to be",
    "block": "a Transformer block",
}
PRAISE = {
    "softmax": "{name} computes the same as torch.softmax, {right}",
    "split heads": "{name} splits the width into heads correctly: it returns {right}",
    "merge heads": "{name} merges the heads correctly: it takes {right}",
    "mask": "{name} makes a correct mask: {right}",
    "block": "{name} is a correct Transformer block: {right}",
}
LIMITS = {"block": ["masks: the masks of a block are not tested; check its attention class by itself"]}

# Which step it is

SPLITS = re.compile(
    r"(split|separate|divide|unmerge|make|create|to|into)_?(to_|into_|in_)?(the_)?(attention_)?heads?$|heads_?split|transpose_for_scores|transpose_qkv|"
    r"(reshape|view|shape)_(for|to|into|as)_(multi_?)?heads?|^_?shape$|reshape_heads|split_into_heads|split_head"
)
MERGES = re.compile(
    r"(merge|combine|concat(enate)?|join|unsplit|collapse|gather|recombine|undo|unshape|fuse|cat)_?(the_|all_|attention_)?heads?|"
    r"heads_?(merge|concat|combine)|transpose_output|reshape_from_heads|un_?shape$"
)
SOFTMAX = re.compile(r"soft_?max")
TAKES = re.compile(r"att(entio)?n|cross|loss|regress|train|grad|back|jacob|log_?soft")
SOFTMAX_CLASS = re.compile(r"(my_|own_|custom_|stable_|simple_)*soft_?max\w{0,3}")
MASKS = re.compile(r"mask|look_?ahead|subsequent")
MAKES = re.compile(
    r"attention$|attend|apply|masked_|softmax|fill|forward|scores?$|weights?$|loss|language|token_mask"
)
BLOCK = re.compile(r"(block|layer)s?(_?\d+)?$|(encoder|decoder|transformer)_?(block|layer|unit)")
FEEDS = re.compile(
    r"(?i)feed_?forward|\bffn?w?\b|ffn|mlp|linear_?[12]\b|fc_?[12]\b|position_?wise|\bgelu|\brelu|\bsilu|nn\.Sequential"
)
ATTENDS = re.compile(r"(?i)att(entio)?n|mha|multi_?head|\bsa\b|\bheads?\b")


def step_of(obj: object, name: str, source: str | None = None) -> str | None:
    """Return which single step this is, by its name and parameters; None for a whole attention.

    The name is only a guess: whether it computes this step is decided by its numbers.
    """
    if isinstance(obj, (type, nn.Module)):
        cls = obj if isinstance(obj, type) else type(obj)
        if SOFTMAX_CLASS.fullmatch(words_of(cls.__name__)):
            return None if cls.__module__.startswith("torch") else "softmax"
        return "block" if _is_block(cls, source) else None
    if not inspect.isroutine(obj):
        return None
    slots = {input_word(each.name) for each in named_parameters(obj) if each.name not in {"self", "cls"}}
    if not slots or {"query", "key", "value"} <= slots:
        return None
    word = words_of(name)
    if SPLITS.search(word):
        return "split heads"
    if MERGES.search(word):
        return "merge heads"
    if SOFTMAX.search(word) and not TAKES.search(word):
        return "softmax"
    if MASKS.search(word) and not MAKES.search(word):
        return "mask"
    return "weights" if {"query", "key"} <= slots else None


def _is_block(cls: type, source: str | None) -> bool:
    name = words_of(cls.__name__)
    if issubclass(cls, nn.Module) and cls.__module__.startswith("torch.nn"):
        return cls.__name__ in {"TransformerEncoderLayer", "TransformerDecoderLayer"}
    if not issubclass(cls, nn.Module) or not BLOCK.search(name):
        return False
    if re.search(r"att(entio)?n|multi_?head", name):
        return False
    text = _text_of(cls, source)
    return bool(FEEDS.search(text) and ATTENDS.search(text.partition("\n")[2]))


def _text_of(cls: type, source: str | None) -> str:
    """Return the source of a class and of its parents in the same file."""
    text, tree = readable(source or "") or "", tree_of(source or "")
    body = [] if tree is None else tree.body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    parents = [classes[each.__name__] for each in cls.__mro__ if each.__name__ in classes]
    return "\n".join(segment(text, node) for node in parents)


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
    """Call the step and record the answers; to be called inside `float64_environment`.

    Args:
        obj: a function, a method, bound or not; a class or an instance of a block or a softmax.
        step: from `step_of`.
        evidence: is filled.
        arguments: of the constructor, or of the function, by name.
        embed_dim, num_heads: to build a class with.
    """
    wanted = Wanted(arguments, embed_dim, num_heads)
    evidence.step, evidence.name = step, _full_name(obj, evidence.name)
    if step == "block":
        blocks_and_scores.examine_block(obj, evidence, wanted)
        return
    callee = _callee(obj, evidence, wanted)
    if callee is None:
        return
    evidence.again = callee
    if step == "weights":
        blocks_and_scores.examine_scores(callee, evidence, wanted)
        return
    for each in callee.missing():
        if each.name in {"device", "dev", "dtype"}:
            callee.fixed[each.name] = torch.float64 if each.name == "dtype" else torch.device("cpu")
    owned = {each.name for each in callee.parameters}
    callee.fixed |= {name: value for name, value in (arguments or {}).items() if name in owned}
    ask(STEPS[step], callee, evidence)
    if evidence.answers and all(answer.output is None for answer in evidence.answers):
        problem = evidence.answers[0].problem
        assert problem is not None
        evidence.problems.append(problem)


def _full_name(obj: Any, name: str) -> str:
    full = str(getattr(obj, "__qualname__", name)).rpartition("<locals>.")[2]
    return full if full.rpartition(".")[2] == name else name


def _callee(obj: Any, evidence: Evidence, wanted: Wanted) -> Callee | None:
    """Return the function, or the method or instance of a class that is built here."""
    if isinstance(obj, type):
        return (
            _own_softmax(obj, evidence)
            if evidence.step == "softmax"
            else _built(obj, "forward", evidence, wanted)
        )
    owner, method = owner_of(obj)
    if owner is not None:
        return _built(owner, method, evidence, wanted)
    if method:
        message = f"the class of the method {obj.__qualname__} was not found; pass instance.{method}"
        evidence.problems.append(Problem("build", "method", message))
        return None
    callee = Callee(obj, files_of(obj))
    held = getattr(obj, "__self__", None)
    if held is not None and not inspect.ismodule(held) and not isinstance(held, type):
        callee.heads = heads = wanted.num_heads or head_count(held)
        widths = [wanted.embed_dim] if wanted.embed_dim else widths_of(held)
        if heads:
            callee.width = next((width for width in widths if width % heads == 0 and width > heads), None)
    return callee


def owner_of(obj: Any) -> tuple[type | None, str]:
    """Return the class of an unbound method (None if not found) and its name ("" for other objects)."""
    first = next(iter(signature_of(obj).parameters), "") if inspect.isfunction(obj) else ""
    if first != "self" or "." not in obj.__qualname__:
        return None, ""
    path, _, method = obj.__qualname__.rpartition(".")
    first, *inner = path.rpartition("<locals>.")[2].split(".")
    cls = obj.__globals__.get(first)
    for part in inner:
        cls = getattr(cls, part, None)
    is_theirs = isinstance(cls, type) and inspect.getattr_static(cls, method, None) is obj
    return (cls if is_theirs else None), method


def whole_of(obj: Any) -> Any:
    """Return the class or module if obj is its forward; for other methods of a module, that of a copy."""
    owner, method = owner_of(obj)
    held = getattr(obj, "__self__", None) if inspect.ismethod(obj) else None
    if isinstance(held, nn.Module):
        return held if obj.__name__ in {"forward", "__call__"} else _of_a_copy(obj, held)
    return owner if owner is not None and method in {"forward", "__call__"} else obj


def _of_a_copy(method: Any, module: nn.Module) -> Any:
    """Return the method of a copy of the module, so that the user's module is not changed."""
    try:
        copied = copy.deepcopy(module)
    except CAUGHT:
        return method
    own = getattr(copied, method.__name__)
    if step_of(method, method.__name__) is None and any(
        parameter.ndim > 1 for parameter in copied.parameters()
    ):
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
    """Return an unbound method as a method of an instance that is built here; other objects unchanged."""
    owner, method = owner_of(obj)
    if owner is None:
        return obj
    callee = _built(owner, method, evidence, Wanted(arguments, embed_dim, num_heads))
    return obj if callee is None else callee.body


def _own_softmax(cls: type, evidence: Evidence) -> Callee | None:
    """Return an instance of a softmax class, built without arguments or with an axis."""
    for arguments in ((), (-1,)):
        try:
            return Callee(cls(*arguments), files_of(cls))
        except CAUGHT as error:
            evidence.tried.append(f"{cls.__name__}: {type(error).__name__}: {error}")
    return None


def _built(cls: type, method: str, evidence: Evidence, wanted: Wanted) -> Callee | None:
    for body, sizes in instances(cls, evidence, wanted):
        return Callee(getattr(body, method), files_of(cls), width=sizes.E, heads=sizes.H)
    evidence.tried.append(f"{cls.__name__} could not be built with the sizes tried, so {method} was not run")
    return None


# Judging


def judge_step(evidence: Evidence) -> Report:
    """Return the report on a single step, from its answers alone."""
    step = evidence.step or ""
    if step in {"weights", "scores"}:
        return blocks_and_scores.judge_scores(evidence)
    verdict = blocks_and_scores.judge_block(evidence) if step == "block" else judge(STEPS[step], evidence)
    report = Report(
        evidence.name, ok=False, summary="", path=evidence.path, conventions=evidence.conventions,
        findings=evidence.findings, problems=list(evidence.problems), tried=list(evidence.tried),
        built=evidence.built, beside=BESIDE[step], errors=verdict.errors,
    )  # fmt: skip
    report.conventions.words = list(dict.fromkeys((*evidence.conventions.words, *verdict.words)))
    report.explained = [explain(problem, evidence.source) for problem in report.problems]
    if not evidence.answers or (verdict.unjudged and step != "block"):
        _report_unjudged(report, evidence, verdict)
    else:
        _report_faults(report, evidence, verdict)
        _decide(report, evidence, verdict)
    return report


def _report_unjudged(report: Report, evidence: Evidence, verdict: Verdict) -> None:
    """Fill the report of a step that could not be called, or whose answers cannot be judged."""
    if evidence.step != "block":
        _report_crashes(report, evidence)
    report.judged = bool(report.faults) or any(each.kind in CERTAIN for each in report.problems)
    if report.faults:
        report.summary = f"{report.faults[0].key}: {report.faults[0].title}"
    elif report.explained:
        report.summary = report.explained[0]
    else:
        report.summary = f"{report.name} was not judged: {verdict.unjudged}"


def _report_crashes(report: Report, evidence: Evidence) -> None:
    """Add crashes that are known faults, whatever was passed."""
    for problem in report.problems:
        for fault in FAULTS.values():
            if any(words in problem.message for words in fault.crash) and not fault.crash_probe:
                detail = f"line {problem.line}: {problem.message}"
                text = text_of(evidence.source or "", problem.line)
                report.faults.append(Named.of(fault, detail, problem.line, text))


def _report_faults(report: Report, evidence: Evidence, verdict: Verdict) -> None:
    """Add the faults that explain the numbers, and those among the findings."""
    report.alike = verdict.alike
    for key, detail in verdict.faults:
        _add(report, _named(evidence, FAULTS[key], detail))
    for finding in evidence.findings:
        if finding.verdict == "unknown":
            report.not_judged.append(f"{finding.name}: {finding.detail}")
        elif finding.verdict == "wrong" and finding.fault in FAULTS:
            where = f"{finding.name}: " if evidence.step == "block" else ""
            named = _named(evidence, FAULTS[finding.fault], where + finding.detail)
            if finding.line is not None:
                named.line, named.text = finding.line, text_of(evidence.source or "", finding.line)
            _add(report, named)


def _add(report: Report, named: Named) -> None:
    (report.remarks if FAULTS[named.key].remark else report.faults).append(named)


def _decide(report: Report, evidence: Evidence, verdict: Verdict) -> None:
    """Set the verdict and its summary."""
    step = evidence.step or ""
    unknown = [finding.detail for finding in evidence.findings if finding.verdict == "unknown"]
    doubts = [verdict.unjudged, *unknown] if verdict.unjudged else unknown
    report.not_judged += [verdict.unjudged] if verdict.unjudged else []
    report.not_judged += LIMITS.get(step, [])
    report.ok = bool(verdict.right) and not (report.faults or report.problems or doubts)
    report.judged = report.ok or bool(report.faults) or not doubts
    if report.ok:
        worst = max(report.errors.values(), default=0.0)
        fit = f" ({largest_difference(worst)})" if worst else ""
        report.summary = PRAISE[step].format(name=report.name, right=verdict.right) + fit
    elif report.faults:
        more = f", and {len(report.faults) - 1} more" if len(report.faults) > 1 else ""
        report.summary = f"{report.faults[0].key}: {report.faults[0].title}{more}"
    elif doubts:
        report.summary = f"{report.name} was not judged: {doubts[0]}"
    else:
        report.summary = (
            f"{report.name} does not compute {BESIDE[step]}, and no known mistake explains its output"
        )


# Repairs in the learner's names

REPAIR_NAMES = {  # role -> its name in our repairs
    "x": "x", "heads": "num_heads", "axis": "dim", "size": "T", "ids": "ids", "pad": "pad",
    "lengths": "lengths",
}  # fmt: skip


def _named(evidence: Evidence, fault: Fault, detail: str) -> Named:
    """Return a fault with the learner's line, where it is certain, and the repair in the learner's names."""
    line = None
    if evidence.source is not None:
        line = line_of(fault, evidence.source, evidence.first_line)
    named = Named.of(fault, detail, *(line or (None, "")))
    named.repair = _in_names(named.repair, evidence)
    return named


def _in_names(repair: str, evidence: Evidence) -> str:
    """Return the repair with the learner's parameter names, or names of `self`, in place of ours."""
    theirs = {
        name: evidence.roles[role].parameter for role, name in REPAIR_NAMES.items() if role in evidence.roles
    }
    if evidence.step == "softmax":
        theirs.setdefault("dim", "-1")
    attribute = re.search(r"self\.\w*heads?\b", own_text(evidence))
    if evidence.step == "split heads" and attribute is not None:
        theirs.setdefault("num_heads", attribute[0])
    lines = []
    for line in repair.splitlines():
        code, mark, comment = line.partition("  #")
        code = re.sub(r"(?<![\w.])\w+\b(?!\s*=[^=])", lambda word: theirs.get(word[0], word[0]), code)
        lines.append(code + mark + comment)
    return "\n".join(lines)
