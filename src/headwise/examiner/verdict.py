"""The verdict on a whole attention: evidence and diagnosis become a `Report`.

An exception counts against the code only if a line of the code raised it with inputs it is made for: not if
headwise guessed the arguments, if a package or a device is missing, or if the sandbox was the reason.
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
from .examine.conventions import OWN_MASK
from .examine.environment import neutral_torch_state
from .examine.findings import MASKS_WITH_SWITCHES
from .exceptions import explain
from .faults import FAULTS
from .faults.fault import Fault
from .report import Named, Report, largest_difference
from .source.likely_classes import candidates
from .source.lines import line_of, own_code, says_weights
from .source.names import settings_under_main
from .source.parsed import Place, methods_of, text_of, tree_of
from .source.promises import promises_output_projection
from .source.repairs import in_learners_names

# Problems with arguments, projections, outputs or configuration fields that headwise guessed.
GUESSED = {"guess", "roles", "shape", "MissingField"}
BLAMED_LIMITS = {"timeout", "exit", "segfault", "crash"}  # limits that the code itself ran into
SYSTEM = re.compile(
    r"No module named|not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|CUDA is not available"
    r"|Torch not compiled|MPS"
)
INPUTS = frozenset({"query", "key", "value"})
UNDEFINED = re.compile(r"name '(\w+)' is not defined")
NO_FORWARD = re.compile(r"missing the required \"forward\"")


def is_theirs(problem: Problem, evidence: Evidence) -> bool:
    """Return True if the code itself is the reason for the problem."""
    if problem.stage == "limits":
        return problem.kind in BLAMED_LIMITS
    if NO_FORWARD.search(problem.message):
        return True
    if problem.kind == "shape" and problem.no_output and evidence.kind == "class":
        return True
    if (name := UNDEFINED.match(problem.message)) and name[1] in settings_under_main(evidence.source or ""):
        return False  # running the file defines it
    if problem.stage == "import" and problem.kind == "FileNotFoundError":
        return False  # its data is elsewhere
    if problem.kind in GUESSED or SYSTEM.search(problem.message) or problem.line is None:
        return False
    if problem.kind == "AttributeError" and setter_of(problem, evidence.source or "") is not None:
        return False  # the code expects a call of that method first
    return not (problem.stage in ("build", "call") and _is_refusal(problem, evidence.source))


SETS_UP = re.compile(r"^_?(re)?(set_?up|reset|start|begin|prepare|alloc|init(?!__)|build|make|clear|new)")


def setter_of(problem: Problem, source: str) -> str | None:
    """Return the method that assigns the missing attribute and that nothing in the class calls."""
    missing = re.search(r"'(\w+)' object has no attribute '(\w+)'", problem.message)
    owner = None if missing is None else Place(source, problem.line).definition(missing[1])
    if missing is None or not isinstance(owner, ast.ClassDef):
        return None
    called = {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute)}
    for name, method in methods_of(owner).items():
        stores = {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        if missing[2] in stores and name not in called and SETS_UP.search(name) is not None:
            return name
    return None


def _is_refusal(problem: Problem, source: str | None) -> bool:
    """Return True if an assert or raise of the code itself raised the problem."""
    return re.match(r"(assert|raise)\b", text_of(source or "", problem.line)) is not None


def advise(report: Report, evidence: Evidence) -> None:
    """Add to the report what to pass, in Python and on the command line."""
    for words, for_files in _advice(report, evidence):
        report.counsel.append(words)
        report.counsel_for_files.append(for_files)


def _advice(report: Report, evidence: Evidence) -> list[tuple[str, str]]:
    problem = next((each for each in report.problems if not is_theirs(each, evidence)), None)
    file = "FILE" if evidence.path is None else Path(evidence.path).name
    command = f"headwise check {file}:{evidence.name}"
    advice: list[tuple[str, str]] = []
    if problem is None or problem.stage == "limits" or problem.kind == "NotImplementedError":
        return advice
    if package := re.search(r"No module named '(\w+)", problem.message):
        both = f"install the missing package beside headwise: pip install {package[1]}"
        return [(both, both)]
    if SYSTEM.search(problem.message):
        both = "use the device of the input, x.device, instead of .cuda() or a fixed device"
        return [(both, both)]
    if problem.kind == "roles":
        advice.append(
            (
                'name the parameters of the projections: roles={"q": NAME, "k": NAME, "v": NAME, "o": NAME}',
                f"name the parameters of the projections: {command} --role q=NAME --role k=NAME --role v=NAME"
                " --role o=NAME",
            )
        )
    elif needed := _needed(evidence):
        advice.append(
            (
                f"pass its arguments: arguments={{{', '.join(f'{name!r}: ...' for name in needed)}}}",
                f"pass its arguments: {command} {' '.join(f'--arg {name}=VALUE' for name in needed)}"
                f" (VALUE is a Python literal: --arg {needed[0]}=64)",
            )
        )
    advice.append(
        (
            "try other sizes: d_model=32, num_heads=4",
            f"try other sizes: {command} --d-model 32 --heads 4",
        )
    )
    others = [each.name for each in candidates(evidence.source or "") if each.name != evidence.name][:4]
    if others:
        advice.append(
            (
                f"check a different class or function of the file: {', '.join(others)}",
                f"check a different class or function of the file: headwise check {file}:{others[0]}"
                + (f" (or {', '.join(others[1:])})" if others[1:] else ""),
            )
        )
    return advice


def _needed(evidence: Evidence) -> list[str]:
    """Return the names of the constructor's parameters without a default."""
    tree = tree_of(evidence.source or "")
    for node in () if tree is None else tree.body:
        if isinstance(node, ast.ClassDef) and node.name == evidence.name:
            constructor = methods_of(node).get("__init__")
            break
    else:
        return []
    if constructor is None:
        return []
    spec = constructor.args
    names = [parameter.arg for parameter in (*spec.posonlyargs, *spec.args)]
    required = names[: len(names) - len(spec.defaults)]
    keywords = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    required += [parameter.arg for parameter, default in keywords if default is None]
    return [name for name in required if name not in ("self", "cls")]


TORCHS = "torch.nn.MultiheadAttention"
NOTHING_MIXES = "no output projection"  # a fault where the source promises one, else a remark
CONCATENATED = "the concatenated heads are returned"
INSIDE = "torch inside"  # the key of the design that is torch's own class
# Words in code that does something beside plain attention, which no design describes.
MORE = re.compile(
    r"\b(\w*multiplier\w*|layer_?scale\w*|(apply_)?(rope|rotary\w*|alibi|relative_position\w*|rel_pos\w*|pos(ition)?_bias|sinusoid\w*|gate\w*|gating"
    r"|normalize|cosine\w*|talking\w*|landmark\w*|kernel\w*|feature_map|elu|conv\w*|cache\w*|landmarks|top_?k"
    r"|local\w*|window\w*|dilat\w*|sparse\w*|pool\w*|softmax_?(1|one)|relu\w*|squared_relu|entmax\w*|sigmoid\w*"
    r"|log_?n|mup|prefix\w*|train_len\w*|temperature|temp))\b",
    re.IGNORECASE,
)
# The same for code that depends on lengths beyond those of most probes.
REACH = re.compile(
    r"\b(\w*radius|\w*span|\w*chunk_?(size|len)?|\w*context_?(len\w*|size|window)|local_context|\w*block_?(size|len)"
    r"|train_\w*len\w*|\w*dist(ances?)?|clamp\w*|clip|\w*stride)\b",
    re.IGNORECASE,
)
TEMPERATURE = re.compile(  # a constructor argument for the scale
    r"def __init__\([^)]*?\b(temperature|temp|softmax_scale|scale_factor|attn_scale)\b\s*"
    r"(?::[^,=)]*)?=\s*[\d.]",
    re.S,
)
BY_CHOICE = {  # faults with the numbers of a design, and the words that show the design
    "weights scaled after softmax": re.compile(r"\w*multiplier\w*|\w*gain\b|layer_?scale|\.mean\(", re.I),
    "masks joined with or": re.compile(r"\w*prefix\w*|\w*global\w*", re.I),
}
TINY = re.compile(r"-\s*1e-\d+|-\s*10(\.0?)?\s*\*\*\s*-\s*\d+")  # a mistyped fill
EXCLUSIVE = re.compile(r"precedence|overrid|mutually|\beither\b[^.\n]*mask|ignored (if|when)|instead", re.I)
UNMASKED = re.compile(r"(not |un)support|(without|no|takes no|ignores?) (a |the )?mask", re.I)
POSITIONS = re.compile(r"(apply_)?(rope|rotary\w*|alibi|relative_position\w*|rel_pos\w*)", re.IGNORECASE)


@neutral_torch_state()
def judge_whole(evidence: Evidence, diagnosis: Diagnosis | None = None) -> Report:
    """Return the report on a whole attention. `diagnosis` is passed where it has been made already."""
    report = Report(evidence.name, ok=False, summary="", path=evidence.path)
    report.conventions, report.roles, report.findings = (
        evidence.conventions,
        evidence.roles,
        evidence.findings,
    )
    report.built, report.tried = evidence.built, list(evidence.tried)
    report.designs = [design.words for design in evidence.designs if not design.fault]
    report.problems = _unique(
        [*evidence.problems, *(call.problem for call in evidence.calls if call.problem)]
    )
    report.explained = [explain(problem, evidence.source) for problem in report.problems]
    if evidence.weights is None or not any(call.output is not None for call in evidence.calls):
        diagnosis = None
    else:
        diagnosis = diagnose(evidence) if diagnosis is None else diagnosis
        report.errors = diagnosis.errors
        _report_numbers(report, evidence, diagnosis)
        _report_weights(report, evidence)
        _report_order(report, evidence)
    _report_crashes(report, evidence)
    _report_findings(report, evidence)
    _decide(report, evidence, diagnosis)
    _report_limits(report, evidence)
    report.conventions = replace(evidence.conventions, words=_words(report, evidence))
    for named in (*report.faults, *report.remarks):
        if evidence.source is not None:
            named.repair = in_learners_names(named.repair, evidence, named.line, FAULTS.get(named.key))
    return report


def _unique(problems: list[Problem]) -> list[Problem]:
    """Return each problem once; one that stopped every probe is recorded with each of them."""
    return list({id(problem): problem for problem in problems}.values())


# Faults


def _named(fault: Fault, detail: str, evidence: Evidence, line: int | None = None) -> Named:
    """Return the fault with its texts and the learner's line."""
    if line is None and evidence.source is not None:
        place = line_of(fault, evidence.source, evidence.first_line)
        if place is not None:
            return Named.of(fault, detail, place[0], text_of(evidence.source, place[0]) or place[1])
    return Named.of(fault, detail, line, text_of(evidence.source or "", line))


def _report_numbers(report: Report, evidence: Evidence, diagnosis: Diagnosis) -> None:
    if diagnosis.faults:
        inside = diagnosis.faults[0].fault.design if len(diagnosis.faults) == 1 else ""
        if inside:
            report.designs.append(inside)
            diagnosis.faults = ()
            report.errors = diagnosis.errors = dict.fromkeys(diagnosis.errors, diagnosis.fit)
            return
        own = TEMPERATURE.search(own_code(evidence.source or "", evidence.first_line))
        if own is not None and any(made.fault.step == "scale" for made in diagnosis.faults):
            report.not_judged.append(f"the scale: the constructor takes it as an argument ({own[1]})")
            diagnosis.faults = None
            return
        if EXCLUSIVE.search(evidence.source or "") and any(
            made.fault.key == "one mask replaces another" for made in diagnosis.faults
        ):
            report.not_judged.append("two masks at once: the source speaks of one in place of the other")
            diagnosis.faults = None
            return
        for made in diagnosis.faults:
            choice = BY_CHOICE.get(made.fault.key)
            word = choice and choice.search(own_code(evidence.source or "", evidence.first_line))
            if word:
                report.not_judged.append(
                    f"{made.fault.title}: the code contains {word[0]}, so this may be intended"
                )
                diagnosis.faults = None
                return
        report.faults = [_computed(made, evidence, diagnosis.fit) for made in diagnosis.faults]
        report.alike = [" and ".join(made.fault.key for made in others) for others in diagnosis.alike]
        difference_at = first_difference(evidence, diagnosis.faults)
        if difference_at is not None:
            report.first_wrong = f"{difference_at[1]} (test input: {difference_at[0]})"
    elif diagnosis.faults is None:
        report.first_wrong = first_by_weights(evidence)
        if diagnosis.partly:
            names = " and ".join(made.fault.key for made in diagnosis.partly)
            report.not_judged.append(
                f"without a mask the output is that of the mistake '{names}'; with a mask it is not explained"
            )
    if diagnosis.faults != ():
        report.where_right = where_right(evidence)


def _computed(made: Made, evidence: Evidence, fit: float) -> Named:
    fault = made.fault
    detail = f"your output equals {fault.formula} ({largest_difference(fit)})"
    if fault.key == "hard-coded heads":
        detail = f"it was built with {evidence.num_heads} heads and computes with {made.number:g}"
    elif made.number is not None:
        assert evidence.weights is not None
        scale = (evidence.weights.q.shape[0] // evidence.num_heads) ** -0.5
        detail += f", with the number {made.number:g} instead of {scale:.4g}"
        size = abs(made.number) ** -2
        if fault.key == "constant scale" and abs(size - round(size)) < 1e-3 * size and size > 1:
            detail += f"; it is right for heads of {size:.0f} channels only"
    named = _named(fault, detail, evidence)
    if fault.needs_mask and (tiny := TINY.search(own_code(evidence.source or "", evidence.first_line))):
        named.detail += f"; {tiny[0]} is nearly 0, a large negative number such as -1e9 hides"
    named.number = made.number
    return named


def _report_weights(report: Report, evidence: Evidence) -> None:
    """Add a fault if it returns weights other than those of its output, which is right."""
    own = evidence.conventions.always_causal
    batches = [call for call in evidence.calls if call.output is not None and len(call.output) > 1]
    if batches and all(call.weights is None or _by_position_alone(call.weights) for call in batches):
        return  # a bias, not weights; without a batch axis it fits a batch of one only
    for call, truth in beside_truth(evidence):
        mask = call.inputs.mask
        if report.faults or call.weights is None or (mask is not None and not own):
            continue
        if call.weights.shape != truth.p.shape or difference(call.output, truth.output) > NEAR:
            continue  # if the output is not explained, its weights are unknown
        visible = (
            torch.ones_like(truth.p, dtype=torch.bool) if mask is None else mask[:, None].expand_as(truth.p)
        )
        off = difference(call.weights[visible], truth.p[visible])
        if off <= NEAR:
            continue
        scores = {"scaled scores": truth.scaled, "bare scores": truth.scores}
        which = next(
            (
                words
                for words, tensor in scores.items()
                if difference(call.weights[visible], tensor[visible]) <= NEAR
            ),
            "",
        )
        if mask is not None and not which:
            continue  # the findings cover weights with a mask
        called = says_weights(evidence.source or "", evidence.first_line)
        if not which and not called and difference(call.weights.sum(-1), truth.p.sum(-1)) > NEAR:
            continue  # not weights: a bias by position, for example
        if which and not called:
            if "scores returned" not in {remark.key for remark in report.remarks}:
                detail = f"it returns the {which} with the output, not the weights"
                report.remarks.append(_named(FAULTS["scores returned"], detail, evidence))
            continue
        detail = (
            f"the returned tensor is the {which}, before the softmax"
            if which
            else f"the returned weights differ from those of the output by up to {off:.2g}"
        )
        report.faults.append(_named(FAULTS["other weights returned"], detail, evidence))


def _by_position_alone(returned: torch.Tensor) -> bool:
    """Return True if it is the same for every sample and no row sums to 1: a bias or a mask, not weights."""
    alike = torch.equal(returned, returned[:1].expand_as(returned))
    return alike and not bool(torch.isclose(returned.sum(-1), torch.ones((), dtype=returned.dtype)).any())


def _report_order(report: Report, evidence: Evidence) -> None:
    """Add a fault if a fused projection named qkv (or in_proj) is split in a different order."""
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
    detail = f"{roles[0].path} is split in the order {', '.join(order)}"
    report.faults.append(_named(FAULTS[key], detail, evidence))


def _report_crashes(report: Report, evidence: Evidence) -> None:
    """Add exceptions that are known faults, each once, if the code itself is the reason."""
    for problem in report.problems:
        for fault in FAULTS.values():
            ends_so = any(words in problem.message for words in fault.crash)
            if not ends_so or not (problem.probe or "").startswith(fault.crash_probe):
                continue
            if fault.key not in {named.key for named in report.faults} and is_theirs(problem, evidence):
                detail = f"line {problem.line}: {problem.message}"
                report.faults.append(_named(fault, detail, evidence, problem.line))


# What a pair of channels (a, b) becomes, by the number of the design that is not that of a rotation.
FORMULAS_OF_PAIRS = {
    "cosines for sines": "(a cos - b cos, a cos + b cos)",
    "first sign": "(a cos + b sin, a sin + b cos)",
    "second sign": "(a cos - b sin, -a sin + b cos)",
}


def _formula_of_pairs(fault: Fault, evidence: Evidence) -> str:
    """Return what the wrong rotation of this fault computes; "" for any other fault."""
    numbers = [name for design in evidence.designs if design.fault == fault.key for name in design.numbers]
    return next((FORMULAS_OF_PAIRS[name] for name in numbers if name in FORMULAS_OF_PAIRS), "")


def _report_findings(report: Report, evidence: Evidence) -> None:
    """Add findings that are known faults, unless they follow from a fault that is already reported."""
    for finding in evidence.findings:
        fault = FAULTS.get(finding.fault or "")
        if finding.verdict == "unknown":
            report.not_judged.append(f"{finding.name}: {finding.detail}")
        own = own_code(evidence.source or "", evidence.first_line)
        more = MORE.search(own) or REACH.search(own)
        if finding.fault == "wrong at other lengths" and finding.verdict == "wrong" and more is not None:
            finding.verdict = "unknown"  # it may be a window wider than the other probes
            report.not_judged.append(
                f"{finding.name}: {finding.detail}; the code contains {more[0]}, so this may be intended"
            )
        text = evidence.source or ""
        if finding.name == MASKS_WITH_SWITCHES and (EXCLUSIVE.search(text) or UNMASKED.search(text)):
            finding.verdict = "unknown"
            report.not_judged.append(f"{finding.name}: {finding.detail}; the source speaks of that")
        if finding.verdict == "wrong" and fault is None and report.faults:
            finding.verdict = "consequence"
        if finding.verdict != "wrong" or fault is None:
            continue
        if fault.names_parts and not _concerns_projections(finding, evidence):
            finding.verdict = "unknown"
            report.not_judged.append(
                f"{finding.name}: {finding.detail}; no weight of a projection is known to be affected"
            )
        elif (fault.follows or fault.remark) and (report.faults or report.problems):
            finding.verdict = "consequence"
        elif fault.key == NOTHING_MIXES and not promises_output_projection(
            evidence.source or "", evidence.first_line
        ):
            remark = _named(fault, finding.detail, evidence, finding.line)
            report.remarks.append(replace(remark, title=CONCATENATED))
            finding.verdict = "remark"
        elif {fault.key, *fault.said_by} & {named.key for named in (*report.faults, *report.remarks)}:
            finding.verdict = "remark" if fault.remark else "consequence"  # reported already
        else:
            named = _named(fault, finding.detail, evidence, finding.line)
            named.formula = _formula_of_pairs(fault, evidence) or named.formula
            if fault.alone:
                report.faults = []  # for a module of this shape they explain nothing
            (report.remarks if fault.remark else report.faults).append(named)
            finding.verdict = "remark" if fault.remark else finding.verdict


def _concerns_projections(finding: Finding, evidence: Evidence) -> bool:
    """Return True if it is about an input or about a parameter of a projection."""
    theirs = {name for role in evidence.roles.values() for name in (role.path, role.parameter)}
    return not theirs or bool({*finding.parts} & (theirs | INPUTS | {*evidence.conventions.arguments}))


# The verdict


def _decide(report: Report, evidence: Evidence, diagnosis: Diagnosis | None) -> None:
    wrong = [finding for finding in report.findings if finding.verdict == "wrong"]
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
        theirs = [problem for problem in report.problems if is_theirs(problem, evidence)]
        report.summary = report.explained[report.problems.index(theirs[0])]
    else:
        report.summary = (
            f"{report.name} does not compute multi-head attention, and no known mistake explains its output"
        )


def _doubt(report: Report, evidence: Evidence, diagnosis: Diagnosis | None) -> str | None:
    """Return why it was not judged, in one sentence; None if it is proved to be wrong."""
    own = evidence.conventions.always_causal  # then a causal mask is the code's own, and none was passed
    masked = {
        call.probe
        for call in evidence.calls
        if (mask := call.inputs.mask) is not None
        and not (own and bool((mask == torch.ones_like(mask).tril()).all()))
    }
    if any(is_theirs(problem, evidence) and problem.probe not in masked for problem in report.problems):
        return None
    if report.problems:
        return report.explained[0].replace("; pass roles=", "")
    if diagnosis is None or not diagnosis.errors:
        return f"{report.name} returned no output that could be compared"
    plain = max((off for probe, off in diagnosis.errors.items() if probe not in masked), default=0.0)
    if plain <= NEAR:
        argument = evidence.conventions.mask_argument or "a mask"
        return (
            f"{report.name} is right without a mask, but headwise could not find out what {argument} means: "
            "no known meaning or mistake gives the output with it"
        )
    made = None if evidence.weights is None else len(evidence.weights.o)
    widths = {call.output.shape[-1] for call in evidence.calls if call.output is not None}
    if made is not None and widths and widths != {made}:
        return f"{report.name} returns {max(widths)} channels, but its output projection seems to have {made}"
    more = MORE.search(own_code(evidence.source or "", evidence.first_line))
    if more is not None and POSITIONS.fullmatch(more[0]):
        return f"{report.name} has a position encoding that headwise does not know ({more[0]})"
    if more is not None or evidence.beside:
        extra = more[0] if more is not None else ", ".join(evidence.beside[:3])
        return (
            f"{report.name} contains {extra}, which headwise does not know; perhaps for this reason its "
            "output differs from that of multi-head attention"
        )
    return None


def _praise(report: Report, evidence: Evidence) -> str:
    worst = max(report.errors.values(), default=0.0)
    fit = largest_difference(worst)
    if any(design.key == INSIDE for design in evidence.designs):
        return f"{report.name} uses torch's own class, and the code around it is correct ({fit})"
    if report.designs:
        return f"{report.name} is a correct variant of multi-head attention ({fit})"
    if any(remark.key == NOTHING_MIXES for remark in report.remarks):
        return f"{report.name} computes multi-head attention without an output projection ({fit})"
    return f"{report.name} computes the same as {TORCHS} ({fit})"


# Limits and conventions


def _report_limits(report: Report, evidence: Evidence) -> None:
    conventions = evidence.conventions
    if evidence.weights is None or not report.judged:
        return
    if conventions.self_only:
        report.not_judged.append(
            "swapped projections: queries, keys and values all come from the same input, so exchanging two "
            "projections changes the names of the weights, but not what the code can compute"
        )
    if conventions.mask_argument is None and not conventions.always_causal:
        report.not_judged.append("masks: it takes no mask")
    if report.ok and (row := empty_row(evidence)) is not None:
        report.equal.append(f"for a query whose keys are all hidden, {row}")


def _words(report: Report, evidence: Evidence) -> list[str]:
    """Return the words on its conventions, without those that the verdict settles or contradicts."""
    if not report.judged:
        return evidence.conventions.words
    words = [sentence for sentence in evidence.conventions.words if sentence not in evidence.doubts]
    if report.faults and not evidence.conventions.always_causal:
        words = [sentence for sentence in words if OWN_MASK not in sentence]  # an effect of the fault
    about_masks = any(
        named.key in FAULTS and (FAULTS[named.key].needs_mask or "mask" in named.key)
        for named in report.faults
    )
    if about_masks:  # what was passed, not what the code does
        pattern = re.compile(r" is ((?:bool|0 and 1).*: (?:True|1) where)")
        words = [pattern.sub(r" was given as \1", sentence) for sentence in words]
    return words
