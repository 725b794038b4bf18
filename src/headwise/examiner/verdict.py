"""What is the learner's doing, and what to do where nothing could be judged.

A crash is the learner's where it happened at a line of theirs, in their own terms: not where headwise made up
the arguments, where a package or a device is missing, or where a fence was in the way.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import torch

from .diagnosis import (
    NEAR,
    Diagnosis,
    Made,
    beside_truth,
    diagnose,
    difference,
    empty_row,
    first_by_weights,
    first_difference,
    where_right,
)
from .evidence import Evidence, Finding, Problem
from .examine.environment import neutral_torch_state
from .exceptions import explain
from .faults import FAULTS
from .faults.fault import Fault
from .report import Named, Report
from .source.likely_classes import candidates
from .source.lines import line_of, own_code, says_weights
from .source.names import settings_under_main
from .source.parsed import Place, methods_of, text_of, tree_of
from .source.promises import promises_output_projection
from .source.repairs import in_learners_names

# arguments we made up; what we could not find, or not read; a field of a configuration we made up
OURS = {"guess", "roles", "shape", "MissingField"}
THEIRS = {
    "timeout",
    "exit",
    "segfault",
    "crash",
}  # of the limits: an endless loop, an end of their own making
HERE = re.compile(
    r"No module named|not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|CUDA is not available"
    r"|Torch not compiled|MPS"
)
INPUTS = frozenset({"query", "key", "value"})
UNDEFINED = re.compile(r"name '(\w+)' is not defined")
NO_FORWARD = re.compile(r"missing the required \"forward\"")
SIZES = re.compile(r"heads|width|d_model|embed|dim|divisible", re.IGNORECASE)


def is_theirs(problem: Problem, evidence: Evidence) -> bool:
    """Whether the code itself is to blame, whatever it had been called with."""
    if problem.stage == "limits":
        return problem.kind in THEIRS
    if NO_FORWARD.search(problem.message):
        return True
    if problem.kind == "shape" and problem.no_output and evidence.kind == "class":
        return True
    if (name := UNDEFINED.match(problem.message)) and name[1] in settings_under_main(evidence.source or ""):
        return False  # whoever runs the file has it
    if problem.kind in OURS or HERE.search(problem.message) or problem.line is None:
        return False
    if problem.kind == "AttributeError" and setter_of(problem, evidence.source or "") is not None:
        return False  # whoever uses it calls that method first
    return not (problem.stage in ("build", "call") and _is_refusal(problem, evidence.source))


SETS_UP = re.compile(r"^_?(re)?(set_?up|reset|start|begin|prepare|alloc|init(?!__)|build|make|clear|new)")


def setter_of(problem: Problem, source: str) -> str | None:
    """A method that assigns the missing attribute, and that nothing in the class calls."""
    found = re.search(r"'(\w+)' object has no attribute '(\w+)'", problem.message)
    owner = None if found is None else Place(source, problem.line).definition(found[1])
    if found is None or not isinstance(owner, ast.ClassDef):
        return None
    called = {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute)}
    for name, method in methods_of(owner).items():
        stores = {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        if found[2] in stores and name not in called and SETS_UP.search(name) is not None:
            return name
    return None


def _is_refusal(problem: Problem, source: str | None) -> bool:
    """Whether a check of the code's own did not like what it was given."""
    return re.match(r"(assert|raise)\b", text_of(source or "", problem.line)) is not None


def advise(report: Report, evidence: Evidence) -> None:
    """What to pass, in Python and on the command line."""
    for words, for_files in _advice(report, evidence):
        report.counsel.append(words)
        report.counsel_for_files.append(for_files)


def _advice(report: Report, evidence: Evidence) -> list[tuple[str, str]]:
    problem = next((one for one in report.problems if not is_theirs(one, evidence)), None)
    file = "FILE" if evidence.path is None else Path(evidence.path).name
    command = f"headwise check {file}:{evidence.name}"
    said: list[tuple[str, str]] = []
    if problem is None or problem.stage == "limits" or problem.kind == "NotImplementedError":
        return said
    if package := re.search(r"No module named '(\w+)", problem.message):
        both = f"install what it imports, where headwise runs: pip install {package[1]}"
        return [(both, both)]
    if HERE.search(problem.message):
        both = "let the code run where its inputs are: x.device in place of .cuda() or a fixed device"
        return [(both, both)]
    if problem.kind == "roles":
        said.append(
            (
                'say which parameter is which: roles={"q": NAME, "k": NAME, "v": NAME, "o": NAME}',
                f"say which parameter is which: {command} --role q=NAME --role k=NAME --role v=NAME "
                "--role o=NAME",
            )
        )
    elif needed := _needed(evidence):
        example = needed[0]
        said.append(
            (
                f"say what to build it with: arguments={{{', '.join(f'{one!r}: ...' for one in needed)}}}",
                f"say what to build it with: {command} {' '.join(f'--arg {one}=VALUE' for one in needed)}"
                + (f" (a number, a word in quotes, True, None: --arg {example}=64)" if example else ""),
            )
        )
    said.append(
        (
            "where other sizes suit it: d_model=32, num_heads=4",
            f"where other sizes suit it: {command} --d-model 32 --heads 4",
        )
    )
    others = [one.name for one in candidates(evidence.source or "") if one.name != evidence.name][:4]
    if others:
        said.append(
            (
                f"where another class or function was meant, check that: {', '.join(others)}",
                f"where another class or function was meant: headwise check {file}:{others[0]}"
                + (f" (there are also {', '.join(others[1:])})" if others[1:] else ""),
            )
        )
    return said


def _needed(evidence: Evidence) -> list[str]:
    """The constructor's parameters without a default."""
    tree = tree_of(evidence.source or "")
    owners = [one for one in (tree.body if tree is not None else ()) if isinstance(one, ast.ClassDef)]
    own = [methods_of(one).get("__init__") for one in owners if one.name == evidence.name]
    if not own or own[0] is None:
        return []
    spec = own[0].args
    every = [one.arg for one in (*spec.posonlyargs, *spec.args)]
    required = every[: len(every) - len(spec.defaults)]
    keywords = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    required += [one.arg for one, default in keywords if default is None]
    return [one for one in required if one not in ("self", "cls")]


TORCHS = "torch.nn.MultiheadAttention"
NOTHING_MIXES = "no output projection"  # a fault where the source promises one, else a remark
CONCATENATED = "there is no output projection: the heads are concatenated and returned"
INSIDE = "torch inside"  # the key of the design that is torch's own class
# what code says that does something beside attention on purpose, and that no number of ours speaks of
MORE = re.compile(
    r"\b(\w*multiplier\w*|layer_?scale\w*|(apply_)?(rope|rotary\w*|alibi|relative_position\w*|rel_pos\w*|pos(ition)?_bias|sinusoid\w*|gate\w*|gating"
    r"|normalize|cosine\w*|talking\w*|landmark\w*|kernel\w*|feature_map|elu|conv\w*|cache\w*|landmarks|top_?k"
    r"|local\w*|window\w*|dilat\w*|sparse\w*|pool\w*|softmax_?(1|one)|relu\w*|squared_relu|entmax\w*|sigmoid\w*"
    r"|log_?n|mup|prefix\w*|train_len\w*|temperature|temp))\b",
    re.IGNORECASE,
)
# The same of lengths beyond those that the other probes have.
REACH = re.compile(
    r"\b(\w*radius|\w*span|\w*chunk_?(size|len)?|\w*context_?(len\w*|size|window)|local_context|\w*block_?(size|len)"
    r"|train_\w*len\w*|\w*dist(ances?)?|clamp\w*|clip|\w*stride)\b",
    re.IGNORECASE,
)
TEMPERATURE = re.compile(  # a number for the scale that whoever builds it chooses
    r"def __init__\([^)]*?\b(temperature|temp|softmax_scale|scale_factor|attn_scale)\b\s*"
    r"(?::[^,=)]*)?=\s*[\d.]",
    re.S,
)
BY_CHOICE = {  # faults that have the numbers of a design, and words that tell of it
    "weights scaled after softmax": re.compile(r"\w*multiplier\w*|\w*gain\b|layer_?scale|\.mean\(", re.I),
    "masks joined with or": re.compile(r"\w*prefix\w*|\w*global\w*", re.I),
}
POSITIONS = re.compile(r"(apply_)?(rope|rotary\w*|alibi|relative_position\w*|rel_pos\w*)", re.IGNORECASE)


@neutral_torch_state()
def judge_whole(evidence: Evidence, diagnosis: Diagnosis | None = None) -> Report:
    """The verdict; `diagnosis`: where it has been made already."""
    report = Report(evidence.name, ok=False, summary="", path=evidence.path)
    report.conventions, report.roles, report.findings = (
        evidence.conventions,
        evidence.roles,
        evidence.findings,
    )
    report.built, report.tried = evidence.built, list(evidence.tried)
    report.designs = [one.words for one in evidence.designs if not one.fault]
    report.problems = _once([*evidence.problems, *(call.problem for call in evidence.calls if call.problem)])
    report.explained = [explain(problem, evidence.source) for problem in report.problems]
    if evidence.weights is None or not any(call.output is not None for call in evidence.calls):
        diagnosis = None
    else:
        diagnosis = diagnose(evidence) if diagnosis is None else diagnosis
        report.errors = diagnosis.errors
        _say_numbers(report, evidence, diagnosis)
        _say_weights(report, evidence)
        _say_order(report, evidence)
    _say_crashes(report, evidence)
    _say_findings(report, evidence)
    _decide(report, evidence, diagnosis)
    _say_limits(report, evidence)
    report.conventions = replace(evidence.conventions, words=_words(report, evidence))
    for named in (*report.faults, *report.remarks):
        if evidence.source is not None:
            named.repair = in_learners_names(named.repair, evidence, named.line, FAULTS.get(named.key))
    return report


def _once(problems: list[Problem]) -> list[Problem]:
    """Each but once: what stopped every probe is kept as the first of them, too."""
    return [one for i, one in enumerate(problems) if not any(one is other for other in problems[:i])]


# Faults


def _named(fault: Fault, detail: str, evidence: Evidence, line: int | None = None) -> Named:
    """What the library says of it, with the learner's line."""
    if line is None and evidence.source is not None:
        found = line_of(fault, evidence.source, evidence.first_line)
        if found is not None:
            return Named.of(fault, detail, found[0], text_of(evidence.source, found[0]) or found[1])
    return Named.of(fault, detail, line, text_of(evidence.source or "", line))


def _say_numbers(report: Report, evidence: Evidence, diagnosis: Diagnosis) -> None:
    if diagnosis.faults:
        inside = diagnosis.faults[0].fault.design if len(diagnosis.faults) == 1 else ""
        if inside:
            report.designs.append(f"{inside} inside")
            diagnosis.faults = ()
            report.errors = diagnosis.errors = dict.fromkeys(diagnosis.errors, diagnosis.fit)
            return
        own = TEMPERATURE.search(own_code(evidence.source or "", evidence.first_line))
        if own is not None and any(made.fault.step == "scale" for made in diagnosis.faults):
            report.not_judged.append(f"the scale: it has a number of its own for it ({own[1]}), by choice")
            diagnosis.faults = None
            return
        for made in diagnosis.faults:
            choice = BY_CHOICE.get(made.fault.key)
            found = choice and choice.search(own_code(evidence.source or "", evidence.first_line))
            if found:
                report.not_judged.append(f"{made.fault.title}: there is {found[0]} in it, by choice perhaps")
                diagnosis.faults = None
                return
        report.faults = [_computed(made, evidence, diagnosis.fit) for made in diagnosis.faults]
        report.alike = [" and ".join(made.fault.key for made in others) for others in diagnosis.alike]
        parted = first_difference(evidence, diagnosis.faults)
        if parted is not None:
            report.first_wrong = f"{parted[1]} (probe: {parted[0]})"
    elif diagnosis.faults is None:
        report.first_wrong = first_by_weights(evidence)
        if diagnosis.partly:
            names = " and ".join(made.fault.key for made in diagnosis.partly)
            report.not_judged.append(
                f"without a mask it computes what '{names}' would; with one, something else"
            )
    if diagnosis.faults != ():
        report.where_right = where_right(evidence)


def _computed(made: Made, evidence: Evidence, fit: float) -> Named:
    fault = made.fault
    detail = f"your output equals {fault.formula} to {fit:.0e}"
    if fault.key == "hard-coded heads":
        detail = f"it has {made.number:g} heads whatever it was told; it was told {evidence.num_heads}"
    elif made.number is not None:
        assert evidence.weights is not None
        scale = (evidence.weights.q.shape[0] // evidence.num_heads) ** -0.5
        detail += f", with {made.number:g} in place of {scale:.4g}"
    named = _named(fault, detail, evidence)
    named.number = made.number
    return named


def _say_weights(report: Report, evidence: Evidence) -> None:
    """Weights that are returned and are not those the right output was made with."""
    own = evidence.conventions.always_causal
    batches = [call for call in evidence.calls if call.output is not None and len(call.output) > 1]
    if batches and all(call.weights is None or _by_position_alone(call.weights) for call in batches):
        return  # a bias; one without an axis of samples fits a batch of one alone
    for call, truth in beside_truth(evidence):
        mask = call.inputs.mask
        if report.faults or call.weights is None or (mask is not None and not own):
            continue
        if call.weights.shape != truth.p.shape or difference(call.output, truth.output) > NEAR:
            continue  # of an output that nothing explains, the weights are not known either
        seen = (
            torch.ones_like(truth.p, dtype=torch.bool) if mask is None else mask[:, None].expand_as(truth.p)
        )
        off = difference(call.weights[seen], truth.p[seen])
        if off <= NEAR:
            continue
        scores = {"scaled scores": truth.scaled, "bare scores": truth.scores}
        which = next(
            (words for words, one in scores.items() if difference(call.weights[seen], one[seen]) <= NEAR), ""
        )
        if mask is not None and not which:
            continue  # of weights under a mask the findings speak
        called = says_weights(evidence.source or "", evidence.first_line)
        if not which and not called and difference(call.weights.sum(-1), truth.p.sum(-1)) > NEAR:
            continue  # a bias by position, say: nothing of it looks like weights
        if which and not called:
            if "scores returned" not in {one.key for one in report.remarks}:
                detail = f"it returns the {which} beside the output, not the weights"
                report.remarks.append(_named(FAULTS["scores returned"], detail, evidence))
            continue
        detail = f"they are the {which}, before the softmax" if which else f"they are off by {off:.2g}"
        report.faults.append(_named(FAULTS["other weights returned"], detail, evidence))


def _by_position_alone(returned: torch.Tensor) -> bool:
    """Whether it is the same for every sample and no row sums to 1: a bias or a mask, and no weights."""
    alike = torch.equal(returned, returned[:1].expand_as(returned))
    return alike and not bool(torch.isclose(returned.sum(-1), torch.ones((), dtype=returned.dtype)).any())


def _say_order(report: Report, evidence: Evidence) -> None:
    """A fused projection that is called qkv, or is torch's, and is taken apart in another order."""
    if report.faults:
        return
    roles = [evidence.roles[letter] for letter in "qkv" if letter in evidence.roles]
    rows = {letter: role.start for letter, role in zip("qkv", roles, strict=False) if role.start is not None}
    if len(rows) < 3 or not all(re.search(r"qkv|in_proj", role.path.lower()) for role in roles):
        return
    order = "".join(sorted(rows, key=rows.__getitem__))
    if order == "qkv":
        return
    key = "fused order k q v" if order == "kqv" else "fused order v k q"
    detail = f"{roles[0].path} holds {', '.join(order)} in this order"
    report.faults.append(_named(FAULTS[key], detail, evidence))


def _say_crashes(report: Report, evidence: Evidence) -> None:
    """Crashes that have a name are faults; each once, and never those that may be our doing."""
    for problem in report.problems:
        for fault in FAULTS.values():
            ends_so = any(words in problem.message for words in fault.crash)
            if not ends_so or not (problem.probe or "").startswith(fault.crash_probe):
                continue
            if fault.key not in {one.key for one in report.faults} and is_theirs(problem, evidence):
                detail = f"line {problem.line}: {problem.message}"
                report.faults.append(_named(fault, detail, evidence, problem.line))


def _say_findings(report: Report, evidence: Evidence) -> None:
    """Findings that are wrong and have a name are faults, unless a fault found before brings them along."""
    for finding in evidence.findings:
        fault = FAULTS.get(finding.fault or "")
        if finding.verdict == "unknown":
            report.not_judged.append(f"{finding.name}: {finding.detail}")
        own = own_code(evidence.source or "", evidence.first_line)
        more = MORE.search(own) or REACH.search(own)
        if finding.fault == "wrong at other lengths" and finding.verdict == "wrong" and more is not None:
            finding.verdict = "unknown"  # a window that is wider than the other probes, say
            report.not_judged.append(f"{finding.name}: {finding.detail}; there is more in it ({more[0]})")
        if finding.verdict == "wrong" and fault is None and report.faults:
            finding.verdict = "consequence"
        if finding.verdict != "wrong" or fault is None:
            continue
        if fault.names_parts and not _concerns_projections(finding, evidence):
            finding.verdict = "unknown"
            report.not_judged.append(f"{finding.name}: {finding.detail}; the output does not depend on it")
        elif (fault.follows or fault.remark) and (report.faults or report.problems):
            finding.verdict = "consequence"
        elif fault.key == NOTHING_MIXES and not promises_output_projection(
            evidence.source or "", evidence.first_line
        ):
            remark = _named(fault, finding.detail, evidence, finding.line)
            report.remarks.append(replace(remark, title=CONCATENATED))
            finding.verdict = "remark"
        elif {fault.key, *fault.said_by} & {one.key for one in (*report.faults, *report.remarks)}:
            finding.verdict = "remark" if fault.remark else "consequence"  # told already
        else:
            named = _named(fault, finding.detail, evidence, finding.line)
            if fault.alone:
                report.faults = []  # the numbers of a module of another shape explain nothing
            (report.remarks if fault.remark else report.faults).append(named)
            finding.verdict = "remark" if fault.remark else finding.verdict


def _concerns_projections(finding: Finding, evidence: Evidence) -> bool:
    """Whether it is about an input or about a parameter that a projection was made of."""
    theirs = {name for role in evidence.roles.values() for name in (role.path, role.parameter)}
    return not theirs or bool({*finding.parts} & (theirs | INPUTS | {*evidence.conventions.arguments}))


# The verdict


def _decide(report: Report, evidence: Evidence, diagnosis: Diagnosis | None) -> None:
    wrong = [one for one in report.findings if one.verdict == "wrong"]
    if diagnosis is not None and diagnosis.errors and diagnosis.faults == ():
        report.ok = not (report.faults or report.problems or wrong)
    doubt = None if report.ok or report.faults or wrong else _doubt(report, evidence, diagnosis)
    if doubt is not None:
        report.judged, report.summary = False, doubt
        advise(report, evidence)
    elif report.ok:
        report.summary = _praise(report, evidence)
    elif report.faults:
        first, *others = report.faults
        more = f", and {len(others)} more" if others else ""
        report.summary = f"{first.key}: {first.title}{more}"
    elif wrong:
        report.summary = wrong[0].detail
    elif report.problems:
        theirs = [one for one in report.problems if is_theirs(one, evidence)]
        report.summary = report.explained[report.problems.index(theirs[0])]
    else:
        report.summary = (
            f"{report.name} computes something other than multi-head attention; no fault we know explains it"
        )


def _doubt(report: Report, evidence: Evidence, diagnosis: Diagnosis | None) -> str | None:
    """Why nothing is proved, in one sentence; None where it is proved to be wrong."""
    own = evidence.conventions.always_causal  # then a causal mask is the code's, and nothing of ours went in
    masked = {
        call.probe
        for call in evidence.calls
        if (mask := call.inputs.mask) is not None
        and not (own and bool((mask == torch.ones_like(mask).tril()).all()))
    }
    theirs = [one for one in report.problems if is_theirs(one, evidence) and one.probe not in masked]
    if theirs:
        return None
    if report.problems:
        return report.explained[0].replace("; pass roles=", "")
    if diagnosis is None or not diagnosis.errors:
        return f"{report.name} gave no numbers that have one right answer"
    plain = max((off for probe, off in diagnosis.errors.items() if probe not in masked), default=0.0)
    if plain <= NEAR:
        argument = evidence.conventions.mask_argument or "a mask"
        return (
            f"without a mask {report.name} is right; what {argument} means I could not find out: with it, "
            "the numbers are others, and no mistake I know gives them"
        )
    made = None if evidence.weights is None else len(evidence.weights.o)
    widths = {call.output.shape[-1] for call in evidence.calls if call.output is not None}
    if made is not None and widths and widths != {made}:
        return (
            f"the projections that were found make {made} channels, and {report.name} returns {max(widths)}"
        )
    more = MORE.search(own_code(evidence.source or "", evidence.first_line))
    if more is not None and POSITIONS.fullmatch(more[0]):
        return f"there is a position encoding inside ({more[0]}) that headwise does not know"
    if more is not None or evidence.beside:
        what = more[0] if more is not None else ", ".join(evidence.beside[:3])
        return (
            f"{report.name} computes something other than plain multi-head attention; there is more in it "
            f"({what}), and I cannot tell whether that is why"
        )
    return None


def _praise(report: Report, evidence: Evidence) -> str:
    worst = max(report.errors.values(), default=0.0)
    how = f"to {worst:.0e}" if worst else "to the last digit"
    if any(one.key == INSIDE for one in evidence.designs):
        return f"torch's own class does the work in {report.name}; what you wrote around it is right, {how}"
    if report.designs:
        return f"{report.name} is right within its design, {how}"
    if any(one.key == NOTHING_MIXES for one in report.remarks):
        return f"{report.name} computes multi-head attention without an output projection, {how}"
    return f"{report.name} computes what {TORCHS} computes, {how}"


# What is said beside it


def _say_limits(report: Report, evidence: Evidence) -> None:
    conventions = evidence.conventions
    if evidence.weights is None or not report.judged:
        return
    if conventions.self_only:
        report.not_judged.append(
            "queries, keys and values come from one input: whether two are swapped makes no difference here"
        )
    if conventions.mask_argument is None and not conventions.always_causal:
        report.not_judged.append("masks: it takes none")
    if report.ok and (row := empty_row(evidence)) is not None:
        report.equal.append(f"a query that may see nothing gets {row}")


def _words(report: Report, evidence: Evidence) -> list[str]:
    """How it is called, without what the verdict has answered since, or would contradict."""
    if not report.judged:
        return evidence.conventions.words
    kept = [one for one in evidence.conventions.words if one not in evidence.doubts]
    about_masks = any(
        one.key in FAULTS and (FAULTS[one.key].needs_mask or "mask" in one.key) for one in report.faults
    )
    if about_masks:  # what was asked for, not what it does
        kept = [
            re.sub(r" is ((?:bool|0 and 1).*: (?:True|1) where)", r" was given as \1", one) for one in kept
        ]
    return kept
