"""A softmax of the learner's own."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..evidence import Asked, Evidence
from .counterfactuals import (
    Answer,
    Callee,
    Question,
    StepFault,
    Verdict,
    explanation,
    numbers,
    own_text,
    words_in,
)

STEP = "softmax"
AXES = ("axis", "dim", "d", "dimension", "dims", "axes")
RIGHT = "exp(x - max(x)) / sum(exp(x - max(x))), over the last axis"
REPAIR = "e = torch.exp(x - x.amax(dim, keepdim=True))\nreturn e / e.sum(dim, keepdim=True)"
AXIS_LINES = (r"\.?(sum|max|amax|softmax)\(.*(axis|dim)\s*=\s*[-\w]+", r"\.?(sum|amax|max)\(", r"/")
EXP_LINES = (r"\bexp\(", r"return")


def _axis(question: Question) -> int:
    return int(question.get("axis", -1))


def _over(axis: int) -> Answer:
    return lambda question: torch.softmax(question["x"], axis)


def _first(question: Question) -> Tensor:
    x: Tensor = question["x"]
    return torch.softmax(x, 0 if x.ndim < 3 else 1)


def _shifted(question: Question) -> Tensor:
    x: Tensor = question["x"]
    return x - x.amax(_axis(question), keepdim=True)


def _all(question: Question) -> Tensor:
    x: Tensor = question["x"]
    return torch.softmax(x.flatten(), 0).reshape(x.shape)


def _normed(made: Tensor, question: Question) -> Tensor:
    return made / made.sum(_axis(question), keepdim=True)


def _fault(
    key: str, title: str, formula: str, hints: tuple[str, str, str], why: str,
    *instead: Answer, lines: tuple[str, ...] = AXIS_LINES, repair: str = REPAIR, right: str = RIGHT,
    remark: bool = False,
) -> StepFault:  # fmt: skip
    return StepFault(
        key, title, formula, right, hints, why, repair, lines=lines, of=STEP, instead=instead, remark=remark
    )


FAULTS = [
    _fault(
        "own softmax over the wrong axis",
        "it normalises over another axis than the last, so that the rows do not sum to 1",
        "exp(x) / sum(exp(x)), over another axis",
        (
            "Sum the result over its last axis: is every sum 1?",
            "The sums that are 1 are those over another axis.",
            "Take the maximum and the sum over dim=-1, with keepdim=True.",
        ),
        "Scores are [.., queries, keys]: each query shares out 1 among its keys, which are the last axis.",
        _over(0), _over(1), _over(-2), _first,
    ),
    _fault(
        "own softmax ignores its axis",
        "the argument for the axis changes nothing",
        "softmax over the same axis whatever axis is asked for",
        (
            "Call it with another axis and compare.",
            "The result is the same whatever axis is given.",
            "Pass the argument on to max and to sum.",
        ),
        "Whoever asks for another axis gets numbers that do not sum to 1 over it.",
        _over(-1), _over(0), _over(1), _first,
    ),
    _fault(
        "own softmax over everything",
        "it divides by the sum over all numbers, so that the whole matrix sums to 1 and not each row",
        "exp(x) / sum over all axes of exp(x)",
        (
            "What is the sum of one row of the result?",
            "The whole matrix sums to 1; a row should.",
            "Give sum an axis, the last one, and keepdim=True.",
        ),
        "Every query gets a share of one common 1: the more queries, the smaller all outputs.",
        _all,
        lines=(r"\.?sum\(\s*\w*\s*\)", r"sum\("),
    ),
    _fault(
        "own softmax not normalised",
        "the exponentials are not divided by their sum",
        "exp(x), or exp(x - max(x))",
        (
            "Sum one row of the result: is it 1?",
            "The numbers are exponentials, and nothing divides them.",
            "Divide by e.sum(dim=-1, keepdim=True).",
        ),
        "Outputs grow with the number of keys and with the size of the scores.",
        lambda q: torch.exp(q["x"]),
        lambda q: torch.exp(_shifted(q)),
        lambda q: torch.exp(q["x"] - q["x"].max()),
        lambda q: torch.exp(q["x"]) / torch.exp(q["x"]).amax(_axis(q), keepdim=True),
        lambda q: torch.exp(q["x"]) / q["x"].shape[_axis(q)],
        lambda q: torch.exp(_shifted(q)) / torch.exp(q["x"]).sum(_axis(q), keepdim=True),
        lambda q: torch.exp(q["x"]) / torch.exp(_shifted(q)).sum(_axis(q), keepdim=True),
        lines=EXP_LINES,
    ),
    _fault(
        "own softmax is a log-softmax",
        "it gives the logarithm of the softmax",
        "x - log(sum(exp(x)))",
        (
            "Can a share be negative?",
            "The numbers are logarithms: exp of them sums to 1.",
            "Return exp(x) / sum(exp(x)), without log.",
        ),
        "Weights below 0 turn values around instead of averaging them.",
        lambda q: torch.log_softmax(q["x"], _axis(q)),
        lines=(r"log",),
    ),
    _fault(
        "own softmax of the negative",
        "it takes exp of -x: the largest score gets the smallest share",
        "exp(-x) / sum(exp(-x))",
        (
            "Which position gets the largest share?",
            "The order is turned around: the largest score gets the least.",
            "Look for a minus: exp(max - x), or exp(-x).",
        ),
        "Each query would attend most to what fits it least.",
        lambda q: torch.softmax(-q["x"], _axis(q)),
        lines=(r"exp\(\s*-", r"\bmax\w*\s*-|max\([^)]*\)[^-]*-\s*\w+", r"exp\("),
        repair="e = torch.exp(x - x.amax(dim, keepdim=True))",
    ),
    _fault(
        "own softmax without exp",
        "numbers are divided by their sum, without exp",
        "x / sum(x)",
        (
            "What happens to a negative score?",
            "The shares are in proportion to the scores themselves.",
            "Take exp first, then divide by the sum.",
        ),
        "Scores may be negative and their sum may be 0: shares below 0, beyond 1, or NaN.",
        lambda q: _normed(q["x"], q),
        lambda q: _normed(_shifted(q), q),
        lambda q: _normed(q["x"].abs(), q),
        lambda q: _normed(q["x"].relu(), q),
        lines=(r"/\s*\S*sum", r"/"),
    ),
    _fault(
        "own softmax with another base",
        "powers of another number than e, or of something other than x",
        "2^x / sum(2^x), 10^x, exp(x^2), exp(|x|)",
        (
            "For x = [0, 1]: how many times larger is the second share?",
            "It should be e = 2.718 times as large.",
            "Use torch.exp, of x itself.",
        ),
        "The softmax is then that of other scores: too flat or too sharp, or blind to the sign.",
        lambda q: torch.softmax(q["x"] * 0.6931471805599453, _axis(q)),
        lambda q: torch.softmax(q["x"] * 2.302585092994046, _axis(q)),
        lambda q: torch.softmax(q["x"].square(), _axis(q)),
        lambda q: torch.softmax(q["x"].abs(), _axis(q)),
        lambda q: torch.softmax(q["x"].exp(), _axis(q)),
        lambda q: torch.softmax(torch.softmax(q["x"], _axis(q)), _axis(q)),
        lambda q: torch.softmax(q["x"] / q["x"].amax(_axis(q), keepdim=True), _axis(q)),
        lines=(r"\*\*|pow|exp2|exp\(", r"return"),
    ),
    _fault(
        "own softmax is a sigmoid",
        "each number is squashed by itself: the row does not sum to 1",
        "1 / (1 + exp(-x))",
        (
            "Does one share depend on the other scores?",
            "Each number is made of its own score alone.",
            "Divide exp(x) by the sum over the row.",
        ),
        "Without a common sum nothing is shared out: all keys can be attended to at once.",
        lambda q: torch.sigmoid(q["x"]),
        lambda q: torch.exp(q["x"]) / (1 + torch.exp(q["x"]).sum(_axis(q), keepdim=True)),
        lines=(r"sigmoid|1\s*\+", r"/"),
    ),
    _fault(
        "own softmax overflows",
        "exp is taken of the scores as they are: large ones become infinite, and the result NaN",
        "exp(x) / sum(exp(x)) without subtracting the maximum",
        (
            "Try it with scores around 1000.",
            "exp(1000) is infinite, and infinite divided by infinite is NaN.",
            "Subtract each row's maximum before exp: the result is the same, and nothing overflows.",
        ),
        "In float32 it breaks at 89, in float16 at 12: numbers that scores do reach.",
        lines=EXP_LINES,
    ),
    _fault(
        "own softmax subtracts one maximum for all",
        "one maximum is subtracted from every row: rows far below it become 0 / 0",
        "exp(x - max of everything)",
        (
            "Try rows that are far apart: one around 0, one around 2000.",
            "The lower row's exponentials are all 0, and so is their sum.",
            "Take the maximum over the last axis, with keepdim=True.",
        ),
        "Right numbers as long as the rows are near each other; NaN where they are not.",
        lines=(r"\bmax\(\s*\w*\s*\)", r"max\("),
        remark=True,
    ),
]  # fmt: skip
BY_KEY = {fault.key: fault for fault in FAULTS}
COMPUTED = [fault for fault in FAULTS if fault.instead]
PLAIN = ("matrix", "scores", "vector", "axis 0", "axis 1", "hidden")


def examine(callee: Callee, evidence: Evidence) -> None:
    """The questions, where it takes one tensor and perhaps an axis."""
    ours = callee.parameters
    callee.roles = {"x": ours[0].name}
    axis = next((one.name for one in ours[1:] if one.name.lower() in AXES), None)
    needed = [
        one.name
        for one in ours[1:]
        if one.default is one.empty and one.name != axis and one.name not in callee.fixed
    ]
    if needed:
        evidence.tried.append(f"{', '.join(needed)}: what to pass for it is not known")
        return
    if axis is not None:
        callee.roles["axis"] = axis
    for kind in (
        (False, torch.float64),
        (False, torch.float32),
        (True, torch.float64),
        (True, torch.float32),
    ):
        callee.numpy, callee.dtype = kind
        if callee.answer("matrix", {"x": numbers(5, 7), "axis": -1})[0].problem is None:
            break
    else:
        callee.numpy, callee.dtype = False, torch.float64
    asks = [
        ("matrix", numbers(5, 7), -1),
        ("scores", numbers(2, 3, 5, 7, seed=2), -1),
        ("vector", numbers(7), -1),
    ]
    if axis is not None:
        asks += [("axis 0", numbers(5, 7, seed=3), 0), ("axis 1", numbers(2, 3, 5, seed=4), 1)]
    hidden = numbers(5, 7, seed=5)
    hidden[1, 2:4], hidden[4, 6] = -torch.inf, -torch.inf
    far = numbers(3, 5, seed=7)
    far[1] += 2000
    asks += [
        ("hidden", hidden, -1),
        ("large scores", numbers(3, 5, seed=6) + 1000, -1),
        ("far rows", far, -1),
    ]
    for probe, x, along in asks:
        callee.ask(evidence, probe, {"x": x, "axis": along})
    callee.tell(evidence)


def _right(question: Question) -> Tensor:
    return torch.softmax(question["x"], _axis(question))


def judge(evidence: Evidence) -> Verdict:
    """Which softmax it is."""
    asked = {one.probe: one for one in evidence.asked}
    matrix = asked.get("matrix")
    if matrix is None or matrix.output is None:
        vector = asked.get("vector")
        if vector is None or vector.output is None:
            return Verdict(unjudged="it could not be called with a tensor alone")
        matrix = vector
    has_axis = "axis" in evidence.roles
    stopped = [one for one in evidence.asked if one.problem is not None]
    if has_axis and stopped:  # who takes an axis is asked for more than one
        problem = stopped[0].problem
        assert problem is not None
        return Verdict(unjudged=f"with a {stopped[0].probe} it stops: {problem.kind}: {problem.message}")
    plain = [asked[name] for name in PLAIN if name in asked and asked[name].output is not None]
    finite = [one for one in plain if one.probe != "hidden"]
    verdict = explanation(
        finite,
        {"over the last axis" if not has_axis else "over the axis it is told": _right},
        _faults(has_axis),
    )
    if verdict.right is None or verdict.fault is not None:
        narrow = _narrow(asked, evidence, has_axis)
        return narrow if narrow is not None else verdict
    return _stress(verdict, asked)


def _faults(has_axis: bool) -> list[StepFault]:
    left_out = "own softmax over the wrong axis" if has_axis else "own softmax ignores its axis"
    first = [one for one in COMPUTED if one.key != left_out]
    return first


def _narrow(asked: dict[str, Asked], evidence: Evidence, has_axis: bool) -> Verdict | None:
    """Right for a matrix or a vector, which is all it was written for."""
    right = [
        one
        for one in asked.values()
        if one.probe in PLAIN and one.output is not None and explanation([one], {"": _right}, []).right == ""
    ]
    names = {one.probe for one in right}
    said = re.search(
        r"(?i)vector|\b1-?d\b|one[- ]dimensional|columns?\b|(axis|dim)\s*(0|1)\b",
        words_in(own_text(evidence)),
    )
    if "matrix" in names and not has_axis:
        verdict = explanation(right, {"over the last axis of a matrix": _right}, [])
        verdict.words = [
            "it is right for matrices [T, S]; with more axes, [B, H, T, S], it normalises over another"
        ]
        return _stress(verdict, asked)
    if "vector" in names and said is not None and not has_axis:
        verdict = explanation([asked["vector"]], {"of one vector": _right}, [])
        verdict.words = ["it is right for one vector, as it says; rows of a matrix it does not keep apart"]
        return verdict
    return None


def _stress(verdict: Verdict, asked: dict[str, Asked]) -> Verdict:
    """Right so far: whether large scores, rows far apart and -inf are, too."""
    large, far, hidden = (asked.get(name) for name in ("large scores", "far rows", "hidden"))
    for one in (large, hidden):
        if one is None or one.output is None:
            continue
        off = explanation([one], {"": _right}, [])
        assert verdict.errors is not None
        verdict.errors = {**verdict.errors, **(off.errors or {})}
        if off.right == "":
            continue
        if one is large and not bool(one.output.isfinite().all()):
            detail = (
                "with scores around 1000 it gives NaN or infinity; torch.softmax gives shares that sum to 1"
            )
            return Verdict(
                "", BY_KEY["own softmax overflows"], detail=detail, errors=verdict.errors, words=verdict.words
            )
        if one is hidden and bool(one.output.isnan().any()):
            verdict.words = [
                *verdict.words,
                "with -inf among the scores it gives NaN: hide keys with a large negative number, or mend it",
            ]
    if far is not None and far.output is not None and not bool(far.output.isfinite().all()):
        verdict.remarks = [
            ("own softmax subtracts one maximum for all", "a row 2000 below another becomes NaN")
        ]
    return verdict
