"""From evidence to a report: what is right, what is wrong, where, and what to say about it."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from . import recipe
from .diagnose import INFORMATION, NEAR, Diagnosis, Made, diagnose, difference, first_difference
from .evidence import Call, Evidence, Finding
from .examine.surroundings import undisturbed
from .exceptions import explain
from .faults import FAULTS
from .report import Named, Report
from .source import line_of

__all__ = ["judge"]

POSITIONS = re.compile(r"\b(apply_)?(rope|rotary\w*|alibi|relative_position\w*|rel_pos\w*)\b", re.IGNORECASE)
CONSEQUENCES = {  # what other faults bring with them
    "gradients blocked", "wrong in half precision", "not deterministic", "state dict incomplete", "no q bias",
}  # fmt: skip
REMARKS = {"overflow in half", "wrong in half precision"}  # no reason to fail what is right otherwise
NAMED_PARTS = {"gradients blocked", "state dict incomplete"}  # which name parameters, used or not
DESIGN = {  # what many modules have inside on purpose
    "residual and layer norm": "a residual connection and a LayerNorm",
    "layer norm before": "a LayerNorm of the input",
}


@undisturbed()
def judge(evidence: Evidence, diagnosis: Diagnosis | None = None) -> Report:
    """The verdict; `diagnosis`: where it has been made already."""
    report = Report(evidence.name, ok=False, summary="", path=evidence.path)
    report.conventions, report.roles = evidence.conventions, evidence.roles
    report.findings, report.problems = evidence.findings, evidence.problems
    crashes = [call.problem for call in evidence.calls if call.problem is not None]
    report.problems = [*evidence.problems, *crashes]
    report.explained = [explain(problem, evidence.source) for problem in report.problems]
    if evidence.weights is None or not any(call.output is not None for call in evidence.calls):
        _say_crashes(report, evidence)
        _say_findings(report, evidence)
        report.summary = _unjudged(report)
        return report
    diagnosis = diagnose(evidence) if diagnosis is None else diagnosis
    report.errors = diagnosis.errors
    _say_numbers(report, evidence, diagnosis)
    _say_weights(report, evidence)
    _say_order(report, evidence)
    _say_crashes(report, evidence)
    _say_findings(report, evidence)
    _say_limits(report, evidence, diagnosis)
    wrong = [one for one in report.findings if one.verdict == "wrong"]
    judged = bool(diagnosis.errors)  # a probe that has one right answer
    report.ok = judged and diagnosis.faults == () and not (report.faults or report.problems or wrong)
    report.summary = _summary(report, diagnosis)
    return report


CRASHES = (
    ("view size is not compatible", "view after transpose"),
    ("without overflow", "overflow in half"),
    ("is not defined", "undefined name"),
    ("must match the size of tensor", "padding mask broadcast"),
    ("broadcast", "padding mask broadcast"),
)


def _say_crashes(report: Report, evidence: Evidence) -> None:
    """Crashes that have a name are faults; each once."""
    for problem in report.problems:
        for words, key in CRASHES:
            if key == "padding mask broadcast" and not (problem.probe or "").startswith("padding"):
                continue
            if words in problem.message and key not in {one.key for one in report.faults}:
                named = Named.of(FAULTS[key], f"line {problem.line}: {problem.message}", problem.line)
                named.text = _text(evidence.source, problem.line)
                report.faults.append(named)


def _text(source: str | None, line: int | None) -> str:
    lines = (source or "").splitlines()
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""


def _unjudged(report: Report) -> str:
    if report.faults:
        return f"{report.faults[0].key}: {report.faults[0].title}"
    if report.explained:
        return report.explained[0]
    return f"{report.name} could not be judged: it gave no numbers"


def _say_numbers(report: Report, evidence: Evidence, diagnosis: Diagnosis) -> None:
    if diagnosis.faults:
        inside = DESIGN.get(diagnosis.faults[0].fault.key) if len(diagnosis.faults) == 1 else None
        if inside is not None:
            report.equal.append(f"there is {inside} inside: the attention between is right")
            diagnosis.faults = ()
            report.errors = diagnosis.errors = dict.fromkeys(diagnosis.errors, diagnosis.fit)
            return
        report.faults = [_named(made, evidence, diagnosis.fit) for made in diagnosis.faults]
        for others in diagnosis.alike[:3]:
            names = " and ".join(made.fault.key for made in others)
            report.not_judged.append(f"in these probes it cannot be told from: {names}")
        parted = first_difference(evidence, diagnosis.faults)
        if parted is not None:
            report.first_wrong = f"{parted[1]} (probe: {parted[0]})"
    elif diagnosis.faults is None:
        report.first_wrong = _from_weights(evidence)
        encoding = POSITIONS.search(evidence.source or "")
        if encoding is not None:
            report.not_judged.append(
                f"a position encoding inside ({encoding[0]}): headwise compares attention without one"
            )
        if diagnosis.partly:
            names = " and ".join(made.fault.key for made in diagnosis.partly)
            report.not_judged.append(
                f"without a mask it computes what '{names}' would; with one, something else"
            )
    if diagnosis.faults != ():
        report.where_right = _where_right(evidence)


def _named(made: Made, evidence: Evidence, fit: float) -> Named:
    fault = made.fault
    detail = f"your output equals {fault.formula} to {fit:.0e}"
    if fault.key == "hard-coded heads":
        detail = f"it has {made.number:g} heads whatever it was told; it was told {evidence.num_heads}"
    elif made.number is not None:
        detail += f", with {made.number:g} in place of {_scale(evidence):.4g}"
    named = Named.of(fault, detail)
    named.number = made.number
    _put_line(named, evidence)
    return named


def _scale(evidence: Evidence) -> float:
    """What scores should be multiplied by."""
    assert evidence.weights is not None
    return float((evidence.weights.q.shape[0] // evidence.num_heads) ** -0.5)


def _put_line(named: Named, evidence: Evidence) -> None:
    fault = FAULTS.get(named.key)
    if fault is None or evidence.source is None or named.line is not None:
        return
    found = line_of(fault, evidence.source, evidence.first_line, None)
    if found is not None:
        named.line, named.text = found[0], _text(evidence.source, found[0]) or found[1]


def _say_findings(report: Report, evidence: Evidence) -> None:
    """Findings that are wrong and have a name are faults, unless a fault found before brings them along."""
    for finding in evidence.findings:
        fault = FAULTS.get(finding.fault or "")
        if finding.verdict == "unknown":
            report.not_judged.append(f"{finding.name}: {finding.detail}")
        if finding.verdict == "wrong" and fault is None and report.faults:
            finding.verdict = "consequence"
        if finding.verdict != "wrong" or fault is None:
            continue
        if fault.key in NAMED_PARTS and not _concerns_projections(finding, evidence):
            finding.verdict = "unknown"
            report.not_judged.append(f"{finding.name}: {finding.detail}; the output does not depend on it")
            continue
        if fault.key in CONSEQUENCES | REMARKS and (report.faults or report.problems):
            finding.verdict = "unknown"
            continue
        if any(one.key == fault.key for one in (*report.faults, *report.remarks)):
            finding.verdict = "remark" if fault.key in REMARKS else finding.verdict  # told already
            continue
        named = Named.of(fault, finding.detail, finding.line)
        _put_line(named, evidence)
        if fault.key == "same projection for every head":
            report.faults = []  # the numbers of a module of another shape explain nothing
        (report.remarks if fault.key in REMARKS else report.faults).append(named)
        if fault.key in REMARKS:
            finding.verdict = "remark"


def _say_weights(report: Report, evidence: Evidence) -> None:
    """Weights that are returned and are not those the right output was made with."""
    assert evidence.weights is not None
    for call in evidence.calls:
        if report.faults or call.weights is None or call.given.mask is not None or call.probe in INFORMATION:
            continue
        truth = recipe.run(call.given, evidence.weights, evidence.num_heads)
        if call.weights.shape == truth.p.shape and difference(call.weights, truth.p) > NEAR:
            fault = FAULTS["other weights returned"]
            report.faults.append(Named.of(fault, f"they are off by {difference(call.weights, truth.p):.2g}"))
            _put_line(report.faults[-1], evidence)


def _concerns_projections(finding: Finding, evidence: Evidence) -> bool:
    """Whether it speaks of an input or of a parameter that a projection was made of."""
    named = set(re.findall(r"[A-Za-z_][\w.]*", finding.detail.partition(" reaches ")[2] or finding.detail))
    parts = {re.split(r"[\[ ]", role.parameter)[0] for role in evidence.roles.values()}
    inputs = {
        "query",
        "key",
        "value",
        "queries",
        "keys",
        "values",
        "q",
        "k",
        "v",
        "x",
        *evidence.conventions.arguments,
    }
    return not parts or bool(named & (parts | inputs)) or any(each in finding.detail for each in parts)


def _say_order(report: Report, evidence: Evidence) -> None:
    """A fused projection that is called qkv, or is torch's, and is taken apart in another order."""
    if report.faults:
        return
    rows = {}
    for letter in "qkv":
        role = evidence.roles.get(letter)
        found = None if role is None else re.fullmatch(r"(.*)\[(\d+):\d+\]", role.parameter)
        if found is None or not re.search(r"qkv|in_proj", found[1].lower()):
            return
        rows[letter] = int(found[2])
    order = "".join(sorted(rows, key=rows.__getitem__))
    if order == "qkv":
        return
    key = "fused order k q v" if order == "kqv" else "fused order v k q"
    detail = f"{evidence.roles['q'].parameter.split('[')[0]} holds {', '.join(order)} in this order"
    named = Named.of(FAULTS[key], detail)
    _put_line(named, evidence)
    report.faults.append(named)


def _say_limits(report: Report, evidence: Evidence, diagnosis: Diagnosis) -> None:
    conventions = evidence.conventions
    if conventions.self_only:
        report.not_judged.append(
            "queries, keys and values come from one input: whether two are swapped makes no difference here"
        )
    if conventions.mask_argument is None and not conventions.always_causal:
        report.not_judged.append("masks: it takes none")
    call = evidence.call("empty row")
    if call is not None and call.output is not None and diagnosis.faults == ():
        report.equal.append(f"a query that may see nothing gets {_empty_row(call)}")


def _empty_row(call: Call) -> str:
    assert call.output is not None and call.given.mask is not None
    empty = ~call.given.mask.any(-1)  # [B, T]
    rows = call.output[empty]
    if bool(rows.isnan().all()):
        return "NaN, as a softmax over -inf alone does"
    if bool((rows == rows[:1]).all()) and bool((rows == 0).all()):
        return "0"
    return "finite numbers: a large negative number in place of -inf makes its weights uniform, or they are 0"


def _where_right(evidence: Evidence) -> list[str]:
    """Which positions and samples of a wrong probe are right all the same."""
    assert evidence.weights is not None
    said = []
    for call in evidence.calls:
        if call.output is None or call.probe in INFORMATION:
            continue
        try:
            truth = recipe.run(call.given, evidence.weights, evidence.num_heads)
        except (RuntimeError, TypeError, ValueError):  # projections of another shape
            return []
        if difference(call.output, truth.output) <= NEAR or call.output.shape != truth.output.shape:
            continue
        off = (call.output.double() - truth.output).abs().nan_to_num(torch.inf)  # [B, T, E]
        size = float(truth.output.nan_to_num(0).abs().max())
        right = off <= NEAR * size
        positions, samples = _numbers(right.all(2).all(0)), _numbers(right.all(2).all(1))
        B, T, _ = right.shape
        if 0 < len(positions) < T:
            said.append(f"probe {call.probe}: right at position{_list(positions)} of {T}")
        elif 0 < len(samples) < B:
            said.append(f"probe {call.probe}: right for sample{_list(samples)} of {B}")
        if call.weights is not None and call.weights.shape == truth.p.shape:
            heads = _numbers(_close(call.weights, truth.p).all(3).all(2).all(0))
            if 0 < len(heads) < evidence.num_heads:
                said.append(f"probe {call.probe}: the weights of head{_list(heads)} are right")
            elif len(heads) == evidence.num_heads:
                said.append(f"probe {call.probe}: all weights are right, so it goes wrong after the softmax")
    return list(dict.fromkeys(said))


def _close(found: Tensor, wanted: Tensor) -> Tensor:
    return (found.double() - wanted).abs() <= NEAR


def _numbers(yes: Tensor) -> list[int]:
    return [int(i) for i in yes.nonzero().flatten()]


def _list(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f" {numbers[0]} alone"
    return "s " + ", ".join(map(str, numbers))


def _from_weights(evidence: Evidence) -> str | None:
    """Without a diagnosis: whether the weights the code returned are right tells on which side to look."""
    assert evidence.weights is not None
    for call in evidence.calls:
        if call.weights is None or call.probe in INFORMATION:
            continue
        try:
            truth = recipe.run(call.given, evidence.weights, evidence.num_heads)
        except (RuntimeError, TypeError, ValueError):
            return None
        if call.weights.shape != truth.p.shape:
            continue
        if difference(call.weights, truth.p) > NEAR:
            return f"the weights (probe: {call.probe})"
        return f"after the weights, which are right (probe: {call.probe})"
    return None


def _summary(report: Report, diagnosis: Diagnosis) -> str:
    if report.ok:
        worst = max(diagnosis.errors.values(), default=0.0)
        how = f"to {worst:.0e}" if worst else "to the last digit"
        return f"{report.name} computes what torch.nn.MultiheadAttention computes, {how}"
    if report.faults:
        first, *others = report.faults
        more = f", and {len(others)} more" if others else ""
        return f"{first.key}: {first.title}{more}"
    if report.problems:
        return report.explained[0]
    wrong: list[Finding] = [one for one in report.findings if one.verdict == "wrong"]
    if wrong and diagnosis.faults == ():
        return wrong[0].detail
    return f"{report.name} computes something other than multi-head attention; no fault we know explains it"
