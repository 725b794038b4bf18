"""Steps that make one tensor of another: a softmax, the split into heads, and their merge.

Letters: B batch, T length, E width, H num_heads, D head_dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from ..evidence import Asked, Evidence
from ..examine.words import size_word
from .step_engine import (
    Answer,
    Callee,
    Plan,
    Question,
    Reading,
    Step,
    StepFault,
    Verdict,
    compare,
    difference,
    faults_of,
    is_right,
    numbers,
    own_text,
    words_in,
)

# Softmax

AXES = ("axis", "dim", "d", "dimension", "dims", "axes")
SOFTMAX_RIGHT = "exp(x - max(x)) / sum(exp(x - max(x))), over the last axis"
SOFTMAX_REPAIR = "e = torch.exp(x - x.amax(dim, keepdim=True))\nreturn e / e.sum(dim, keepdim=True)"
AXIS_LINES = (r"\.?(sum|max|amax|softmax)\(.*(axis|dim)\s*=\s*[-\w]+", r"\.?(sum|amax|max)\(", r"/")
EXP_LINES = (r"\bexp\(", r"return")
ORDINARY = ("matrix", "scores", "vector", "axis 0", "axis 1")
NARROW = re.compile(r"(?i)vector|\b1-?d\b|one[- ]dimensional|columns?\b|(axis|dim)\s*(0|1)\b")


def _axis(question: Question) -> int:
    return int(question.get("axis", -1))


def _softmax_of(question: Question) -> Tensor:
    return torch.softmax(question["x"], _axis(question))


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


_softmax = faults_of("softmax", right=SOFTMAX_RIGHT, repair=SOFTMAX_REPAIR, lines=AXIS_LINES)
OF_SOFTMAX = [
    _softmax(
        "own softmax over the wrong axis",
        "it normalises over another axis than the last, so that the rows do not sum to 1",
        "exp(x) / sum(exp(x)), over another axis",
        "Sum the result over its last axis: is every sum 1?",
        "The sums that are 1 are those over another axis.",
        "Take the maximum and the sum over dim=-1, with keepdim=True.",
        "Scores are [.., queries, keys]: each query shares out 1 among its keys, which are the last axis.",
        _over(0), _over(1), _over(-2), _first,
    ),
    _softmax(
        "own softmax ignores its axis",
        "the argument for the axis changes nothing",
        "softmax over the same axis whatever axis is asked for",
        "Call it with another axis and compare.",
        "The result is the same whatever axis is given.",
        "Pass the argument on to max and to sum.",
        "Whoever asks for another axis gets numbers that do not sum to 1 over it.",
        _over(-1), _over(0), _over(1), _first,
    ),
    _softmax(
        "own softmax over everything",
        "it divides by the sum over all numbers, so that the whole matrix sums to 1 and not each row",
        "exp(x) / sum over all axes of exp(x)",
        "What is the sum of one row of the result?",
        "The whole matrix sums to 1; a row should.",
        "Give sum an axis, the last one, and keepdim=True.",
        "Every query gets a share of one common 1: the more queries, the smaller all outputs.",
        _all,
        lines=(r"\.?sum\(\s*\w*\s*\)", r"sum\("),
    ),
    _softmax(
        "own softmax not normalised",
        "the exponentials are not divided by their sum",
        "exp(x), or exp(x - max(x))",
        "Sum one row of the result: is it 1?",
        "The numbers are exponentials, and nothing divides them.",
        "Divide by e.sum(dim=-1, keepdim=True).",
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
    _softmax(
        "own softmax is a log-softmax",
        "it gives the logarithm of the softmax",
        "x - log(sum(exp(x)))",
        "Can a share be negative?",
        "The numbers are logarithms: exp of them sums to 1.",
        "Return exp(x) / sum(exp(x)), without log.",
        "Weights below 0 turn values around instead of averaging them.",
        lambda q: torch.log_softmax(q["x"], _axis(q)),
        lines=(r"log",),
    ),
    _softmax(
        "own softmax of the negative",
        "it takes exp of -x: the largest score gets the smallest share",
        "exp(-x) / sum(exp(-x))",
        "Which position gets the largest share?",
        "The order is turned around: the largest score gets the least.",
        "Look for a minus: exp(max - x), or exp(-x).",
        "Each query would attend most to what fits it least.",
        lambda q: torch.softmax(-q["x"], _axis(q)),
        lines=(r"exp\(\s*-", r"\bmax\w*\s*-|max\([^)]*\)[^-]*-\s*\w+", r"exp\("),
        repair="e = torch.exp(x - x.amax(dim, keepdim=True))",
    ),
    _softmax(
        "own softmax without exp",
        "numbers are divided by their sum, without exp",
        "x / sum(x)",
        "What happens to a negative score?",
        "The shares are in proportion to the scores themselves.",
        "Take exp first, then divide by the sum.",
        "Scores may be negative and their sum may be 0: shares below 0, beyond 1, or NaN.",
        lambda q: _normed(q["x"], q),
        lambda q: _normed(_shifted(q), q),
        lambda q: _normed(q["x"].abs(), q),
        lambda q: _normed(q["x"].relu(), q),
        lines=(r"/\s*\S*sum", r"/"),
    ),
    _softmax(
        "own softmax with another base",
        "powers of another number than e, or of something other than x",
        "2^x / sum(2^x), 10^x, exp(x^2), exp(|x|)",
        "For x = [0, 1]: how many times larger is the second share?",
        "It should be e = 2.718 times as large.",
        "Use torch.exp, of x itself.",
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
    _softmax(
        "own softmax is a sigmoid",
        "each number is squashed by itself: the row does not sum to 1",
        "1 / (1 + exp(-x))",
        "Does one share depend on the other scores?",
        "Each number is made of its own score alone.",
        "Divide exp(x) by the sum over the row.",
        "Without a common sum nothing is shared out: all keys can be attended to at once.",
        lambda q: torch.sigmoid(q["x"]),
        lambda q: torch.exp(q["x"]) / (1 + torch.exp(q["x"]).sum(_axis(q), keepdim=True)),
        lines=(r"sigmoid|1\s*\+", r"/"),
    ),
    _softmax(
        "own softmax overflows",
        "exp is taken of the scores as they are: large ones become infinite, and the result NaN",
        "exp(x) / sum(exp(x)) without subtracting the maximum",
        "Try it with scores around 1000.",
        "exp(1000) is infinite, and infinite divided by infinite is NaN.",
        "Subtract each row's maximum before exp: the result is the same, and nothing overflows.",
        "In float32 it breaks at 89, in float16 at 12: numbers that scores do reach.",
        lines=EXP_LINES,
    ),
    _softmax(
        "own softmax subtracts one maximum for all",
        "one maximum is subtracted from every row: rows far below it become 0 / 0",
        "exp(x - max of everything)",
        "Try rows that are far apart: one around 0, one around 2000.",
        "The lower row's exponentials are all 0, and so is their sum.",
        "Take the maximum over the last axis, with keepdim=True.",
        "Right numbers as long as the rows are near each other; NaN where they are not.",
        lines=(r"\bmax\(\s*\w*\s*\)", r"max\("),
        remark=True,
    ),
]  # fmt: skip


def _softmax_plans(callee: Callee, evidence: Evidence) -> list[Plan]:
    """With one tensor, and with an axis where it takes one."""
    scores, *others = [each.name for each in callee.parameters]
    axis = next((name for name in others if name.lower() in AXES), None)
    unknown = [each.name for each in callee.missing(scores, axis)]
    if unknown:
        evidence.tried.append(f"{', '.join(unknown)}: what to pass for it is not known")
        return []
    if axis is None:
        return [Plan({"x": scores}, _scores_to_share())]
    along = [("axis 0", {"x": numbers(5, 7, seed=3), "axis": 0})]
    along += [("axis 1", {"x": numbers(2, 3, 5, seed=4), "axis": 1})]
    return [Plan({"x": scores, "axis": axis}, [*_scores_to_share(), *along])]


def _scores_to_share() -> list[tuple[str, Question]]:
    """Ordinary scores, then hidden ones, large ones, and rows that are far apart."""
    hidden, large, far = numbers(5, 7, seed=5), numbers(3, 5, seed=6) + 1000, numbers(3, 5, seed=7)
    hidden[1, 2:4], hidden[4, 6] = -torch.inf, -torch.inf
    far[1] += 2000
    scores = {
        "matrix": numbers(5, 7), "scores": numbers(2, 3, 5, 7, seed=2), "vector": numbers(7),
        "hidden": hidden, "large scores": large, "far rows": far,
    }  # fmt: skip
    return [(probe, {"x": x, "axis": -1}) for probe, x in scores.items()]


def _read_softmax(evidence: Evidence, answered: list[Asked]) -> list[Reading] | Verdict:
    """The ordinary questions. Which axis is wrong depends on whether it takes one."""
    if not {"matrix", "vector"} & {asked.probe for asked in answered}:
        return Verdict(unjudged="it could not be called with a tensor alone")
    takes_axis = "axis" in evidence.roles
    for asked in evidence.asked:
        if takes_axis and asked.problem is not None:  # who takes an axis is asked for more than one
            why = f"{asked.problem.kind}: {asked.problem.message}"
            return Verdict(unjudged=f"with a {asked.probe} it stops: {why}")
    left_out = "own softmax over the wrong axis" if takes_axis else "own softmax ignores its axis"
    right = {"over the axis it is told" if takes_axis else "over the last axis": _softmax_of}
    ordinary = [asked for asked in answered if asked.probe in ORDINARY]
    return [Reading(ordinary, right, [fault for fault in OF_SOFTMAX if fault.key != left_out])]


def _refine_softmax(evidence: Evidence, answered: list[Asked], verdict: Verdict) -> Verdict:
    """Whether it is right for matrices or vectors alone, and whether it holds for large scores."""
    asked = {each.probe: each for each in answered}
    if verdict.right:
        return _stressed(verdict, asked)
    if "axis" in evidence.roles:
        return verdict
    right = [
        each for name, each in asked.items() if name in (*ORDINARY, "hidden") and is_right(each, _softmax_of)
    ]
    names = {each.probe for each in right}
    if "matrix" in names:
        verdict = compare([Reading(right, {"over the last axis of a matrix": _softmax_of}, ())])
        verdict.words.append(
            "it is right for matrices [T, S]; with more axes, [B, H, T, S], it normalises over another"
        )
        return _stressed(verdict, asked)
    if "vector" in names and NARROW.search(words_in(own_text(evidence))):
        verdict = compare([Reading([asked["vector"]], {"of one vector": _softmax_of}, ())])
        verdict.words.append(
            "it is right for one vector, as it says; rows of a matrix it does not keep apart"
        )
    return verdict


def _stressed(verdict: Verdict, asked: Mapping[str, Asked]) -> Verdict:
    """Right so far: whether large scores, rows far apart and -inf are, too."""
    outputs = {probe: each.output for probe, each in asked.items() if each.output is not None}
    if "large scores" in outputs:
        verdict.errors["large scores"] = difference([asked["large scores"]], _softmax_of)
        if not bool(outputs["large scores"].isfinite().all()):
            detail = (
                "with scores around 1000 it gives NaN or infinity; torch.softmax gives shares that sum to 1"
            )
            return verdict.becomes("own softmax overflows", detail)
    if "hidden" in outputs:
        verdict.errors["hidden"] = difference([asked["hidden"]], _softmax_of)
        if bool(outputs["hidden"].isnan().any()):
            verdict.words.append(
                "with -inf among the scores it gives NaN: hide keys with a large negative number, or mend it"
            )
    if "far rows" in outputs and not bool(outputs["far rows"].isfinite().all()):
        detail = "a row 2000 below another becomes NaN"
        verdict.faults.append(("own softmax subtracts one maximum for all", detail))
    return verdict


SOFTMAX = Step(
    OF_SOFTMAX, _softmax_plans, lambda asked: asked.output is not None, _read_softmax, _refine_softmax
)

# Splitting and merging

SPLIT, MERGE = "split heads", "merge heads"
VIEWS = (
    r"\.(view|reshape)\(\s*[\w.\[\]() -]+,\s*(self\.)?(num_heads|n_heads?|heads|h|H|nhead)\s*,",
    r"\.(view|reshape)\(|rearrange\(",
)
MOVES = (r"\.(transpose|permute|swapaxes|movedim)\(|rearrange\(|einsum\(", r"\.(view|reshape)\(", r"return")


def _moved(view: str, made: str, viewed: str = "") -> Answer:
    """Numbers that are read as the axes `view` and put in the order `made`, "bh t d": two axes become one.

    An axis that is made and not read holds copies. Letters: e is the width, 1 an axis of one. For one
    sequence there is no b.

    Args:
        view: the axes of what goes in, as it lies in memory.
        made: the axes of the result.
        viewed: what the result is viewed as in the end; "": as it was made.
    """

    def answer(question: Question) -> Tensor:
        names = {"b": "batch", "t": "length", "h": "heads", "d": "head dim", "e": "width"}
        sizes = {"1": 1, **{letter: int(question[name]) for letter, name in names.items()}}
        absent = "b" if question["alone"] else ""
        axes = [axis for axis in view.split() if axis != absent]
        order = [axis for axis in made if axis not in f" 1{absent}"]
        copies = [axis for axis in order if axis not in axes]
        x = question["x"].reshape([sizes[axis] for axis in axes])
        x = x.expand([sizes[axis] for axis in (*copies, *axes)])
        x = x.permute([[*copies, *axes].index(axis) for axis in order])
        parts = [part.replace("b", "") if absent else part for part in (viewed or made).split()]
        return x.reshape([math.prod(sizes[axis] for axis in part) for part in parts if part])

    return answer


SPLITS = {
    "[B, H, T, D]": _moved("b t h d", "b h t d"),
    "[B, T, H, D]": _moved("b t h d", "b t h d"),
    "[B * H, T, D]": _moved("b t h d", "bh t d"),
    "[H * B, T, D]": _moved("b t h d", "hb t d"),
    "[H, B, T, D]": _moved("b t h d", "h b t d"),
    "[B, H, D, T], for keys that are multiplied from the right": _moved("b t h d", "b h d t"),
    "[B * H, D, T], for keys that are multiplied from the right": _moved("b t h d", "bh d t"),
    "[B, H, T, D] of an input [T, B, E]": _moved("b t h d", "t h b d"),
    "[B * H, T, D] of an input [T, B, E]": _moved("b t h d", "th b d"),
}
SPLITS_ALONE = {"[H, T, D]": _moved("b t h d", "b h t d"), "[T, H, D]": _moved("b t h d", "b t h d")}
MERGES = {"[B, H, T, D]": _moved("b h t d", "b t hd"), "[B, T, H, D]": _moved("b h t d", "b h td")}
MERGES_OF_BATCH = {"[B * H, T, D]": _moved("b h t d", "b t hd"), "[H * B, T, D]": _moved("h b t d", "b t hd")}
MERGES_ALONE = {"[H, T, D]": _moved("b h t d", "b t hd"), "[T, H, D]": _moved("b h t d", "b h td")}
OTHER_ORDERS = [order for order in permutations("bhtd") if "".join(order) not in {"bhtd", "bthd", "btdh"}]
LAYOUTS = ("[B, H, T, D]", "[B, T, H, D]", "[H, B, T, D]")  # what a docstring may promise
SPLIT_RIGHT = "x.view(B, T, H, d_k).transpose(1, 2)"
SPLIT_REPAIR = "return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # [B, T, E] to [B, H, T, d_k]"
MERGE_RIGHT = "x.transpose(1, 2).reshape(B, T, H * d_k)"
MERGE_REPAIR = "return x.transpose(1, 2).flatten(2)  # [B, H, T, d_k] to [B, T, E]"
UNDONE = (
    " A merge that makes the same mistake backwards undoes it: a round trip that gives x again "
    "proves nothing."
)


_split = faults_of(SPLIT, right=SPLIT_RIGHT, repair=SPLIT_REPAIR, lines=VIEWS)
OF_SPLIT = [
    _split(
        "heads split by view",
        "the width is split by a view alone: a head gets a few whole positions, not a few channels of all",
        "x.view(B, H, T, d_k)",
        "Fill x with the number of the position, and look at one head.",
        "A view never moves a number: read on in memory, the first head is the first positions.",
        "View as [B, T, H, d_k] first, then transpose(1, 2).",
        "Each head sees T / H positions in pieces and calls them T: attention compares the wrong things."
        + UNDONE,
        _moved("b h t d", "b h t d"), _moved("b h t d", "bh t d"), _moved("b h t d", "b t h d"),
        _moved("b h t d", "h b t d"), _moved("h b t d", "h b t d"),
    ),
    _split(
        "heads and their widths exchanged",
        "the view names the head's width before the number of heads: there are d_k heads of width H",
        "x.view(B, T, d_k, H).transpose(1, 2)",
        "Read the shape of the result: how many heads does it have?",
        "H and d_k stand in each other's place.",
        "x.view(B, T, num_heads, d_k): the number of heads first.",
        "As many heads as a head should be wide, each of the wrong channels." + UNDONE,
        _moved("b t d h", "b d t h"), _moved("b t d h", "b t d h"), _moved("b t d h", "bd t h"),
    ),
    _split(
        "channels dealt out in turn",
        "head h takes every H-th channel instead of d_k channels that lie beside each other",
        "x.view(B, T, d_k, H).permute(0, 3, 1, 2)",
        "Fill x with the number of the channel, and look at one head.",
        "Its channels are h, h + H, h + 2H: dealt out like cards.",
        "View as [B, T, H, d_k]: the number of heads stands before the width of one.",
        "The projections of a trained model lie head by head: dealt out in turn, each head gets some of all."
        + UNDONE,
        *(_moved("b t d h", made) for made in ("b h t d", "b t h d", "h b t d", "bh t d", "hb t d")),
    ),
    _split(
        "not split",
        "there is one head as wide as the model: the width is not split",
        "x[:, None], or x itself",
        "Read the shape of the result: where is the number of heads?",
        "All channels are still in one head.",
        "View as [B, T, H, d_k], then transpose(1, 2).",
        "One softmax for all channels: a position can look at one thing at a time.",
        _moved("b t e", "b 1 t e"), _moved("b t e", "b t e"), _moved("b t e", "b t 1 e"),
        lines=(*VIEWS, r"unsqueeze|None|return"),
    ),
    _split(
        "every head gets everything",
        "each head is given all channels: nothing is split, only copied",
        "x[:, None].expand(B, H, T, E)",
        "How wide is one head? It should be E / H.",
        "All heads hold the same numbers.",
        "View as [B, T, H, d_k] in place of repeat or expand.",
        "Heads that are all the same attend to the same.",
        *(_moved("b t e", made) for made in ("b h t e", "b t h e", "hb t e", "bh t e")),
        lines=(r"expand|repeat|stack",),
    ),
    _split(
        "heads split, axes in the wrong order",
        "the split is right, and then axes change places that should not",
        "x.view(B, T, H, d_k).transpose(..) with the wrong axes",
        "Write down what each axis of the result is.",
        "Heads stand beside the batch, and each is positions times channels: [B, H, T, d_k].",
        "transpose(1, 2) after the view, nothing else.",
        "q @ k^T then multiplies along another axis than the head's width." + UNDONE,
        *(_moved("b t h d", " ".join(order)) for order in permutations("bthd")),
        _moved("b t h d", "bt h d"), _moved("b t h d", "b th d"),
        lines=MOVES,
    ),
    _split(
        "number of heads ignored",
        "it splits into the same number of heads whatever number it is told",
        "x.view(B, T, c, E // c) with a fixed c",
        "Call it with another number of heads and read the shape.",
        "The number of heads is written into the code.",
        "Use the argument in the view.",
        "It fits one model at most.",
        lines=VIEWS,
    ),
    _split(
        "split for one size only",
        "it works for one batch or one length, and raises for others",
        "x.view(3, 7, ..) with fixed sizes",
        "Call it with another length, and with a batch of one.",
        "A size is written into the view, or kept from when the module was built.",
        "Read B and T from x.shape.",
        "Sequences differ in length, the last batch is smaller.",
        lines=VIEWS,
    ),
    _split(
        "split for its callers in the wrong layout",
        "it says it returns one layout, and returns another",
        "x.view(B, T, H, d_k) without the transpose",
        "Compare the shape of the result with what the docstring or comment says.",
        "The heads are behind the positions; they are said to be in front.",
        "Add .transpose(1, 2).",
        "Whoever calls it counts on the shape that it says: positions would attend across heads.",
        lines=(r"return", *VIEWS),
    ),
]  # fmt: skip

_merge = faults_of(MERGE, right=MERGE_RIGHT, repair=MERGE_REPAIR, lines=VIEWS)
OF_MERGE = [
    _merge(
        "heads merged without a transpose",
        "the heads are viewed as one width without bringing the positions first",
        "x.reshape(B, T, H * d_k) of x [B, H, T, d_k]",
        "Fill x with the number of the head, and look at one position of the result.",
        "One position of the result holds several positions of one head.",
        "transpose(1, 2) first, then reshape.",
        "Positions and heads are mixed before the output projection." + UNDONE,
        _moved("b t e", "b t e"),
    ),
    _merge(
        "heads merged interleaved",
        "channels are put together in turn, one of each head, instead of head after head",
        "x.permute(0, 2, 3, 1).reshape(B, T, E)",
        "Fill x with the number of the head, and look at one position of the result.",
        "It reads 0, 1, 2, 0, 1, 2 instead of 0, 0, 0, 1, 1, 1.",
        "The heads come before the width of one: permute(0, 2, 1, 3).",
        "The output projection of a trained model expects head after head." + UNDONE,
        _moved("b h t d", "b t dh"), _moved("b h t d", "b h dt"),
        lines=MOVES,
    ),
    _merge(
        "heads merged in the wrong order",
        "the right axes are joined, in the wrong order, or the wrong ones",
        "x.permute(..).reshape(B, T, E) with the wrong axes",
        "Write down what each axis is before the reshape.",
        "It must be [B, T, H, d_k]: the last two become the width.",
        "transpose(1, 2) and nothing else before the reshape.",
        "Numbers of other positions, or of other samples, end up in a position's row.",
        *(_moved("b h t d", " ".join(order), "b t e") for order in OTHER_ORDERS),
        _moved("b h t d", "b hd t"), _moved("h b t d", "b h t d", "b t e"),
        lines=MOVES,
    ),
    _merge(
        "heads stacked along the sequence",
        "the heads follow each other as positions; the width stays that of one head",
        "x.reshape(B, H * T, d_k)",
        "Read the shape of the result: how long is the sequence?",
        "It is H times as long, and as wide as one head.",
        "The heads belong beside each other: [B, T, H * d_k].",
        "The output projection takes the full width of the model.",
        _moved("b h t d", "b ht d"), _moved("b h t d", "b th d"),
    ),
    _merge(
        "heads added together",
        "the heads are summed, averaged, or all but one dropped, instead of standing side by side",
        "x.sum(1), x.mean(1) or x[:, 0]",
        "How wide is the result? It should be H * d_k.",
        "It is as wide as one head.",
        "transpose(1, 2), then reshape to [B, T, H * d_k].",
        "What each head found is no longer told apart.",
        lambda q: q["x"].sum(1), lambda q: q["x"].mean(1), lambda q: q["x"][:, 0], lambda q: q["x"][:, -1],
        lines=(r"\.(sum|mean)\(|\[:,", r"return"),
    ),
    _merge(
        "merge for one size only",
        "it works for one batch or one length, and raises for others",
        "x.reshape(3, 7, ..) with fixed sizes",
        "Call it with another length, and with a batch of one.",
        "A size is written into the view, or kept from when the module was built.",
        "Read B, H, T and d_k from x.shape.",
        "Sequences differ in length, the last batch is smaller.",
    ),
]  # fmt: skip
# B, T, H, D: of one width first, which many numbers of heads divide, then of another
SIZES = ((2, 5, 3, 8), (3, 11, 4, 6), (1, 7, 6, 4), (5, 2, 8, 3), (2, 7, 3, 5))
BATCHES = ((3, 7), (2, 5), (1, 11), (5, 2))  # B, T, where the heads are known
WIDTHS = (24, 12, 16, 8, 32, 64, 128, 256, 512, 768, 1024, 6, 4, 20, 30)
SHAPES = {  # of what is passed; without b it is one sequence
    SPLIT: ("b t e", "t e"),
    MERGE: ("b h t d", "bh t d", "h t d"),
}
SIZE_NAMES = {
    **dict.fromkeys(("B", "b", "N", "bsz", "batch_size"), "batch"),
    **dict.fromkeys(("T", "t", "L", "S", "seq", "n"), "length"),
    **dict.fromkeys(("D", "d"), "head dim"),
}


def _plans(step: str, callee: Callee, evidence: Evidence) -> list[Plan]:
    """In each layout, with several sizes."""
    callee.stacks = step == SPLIT
    roles = _roles(callee, evidence)
    if roles is None:
        return []
    callee.roles, sizes = roles, _sizes(callee)
    if step == SPLIT and "heads" not in roles and callee.heads is None:
        sizes = _built_in_sizes(callee)
    if not sizes:
        evidence.tried.append("it takes no number of heads, and no width of 1 to 1024 was split by it")
        return []
    evidence.embed_dim, evidence.num_heads = sizes[0][2] * sizes[0][3], sizes[0][2]
    knows_heads = len(roles) > 1 or callee.heads is not None  # who does not cannot find them in a batch
    return [
        Plan(roles, [_question(shape, *each, seed=i + 11) for i, each in enumerate(sizes)])
        for shape in SHAPES[step]
        if knows_heads or shape != "bh t d"
    ]


def _question(shape: str, B: int, T: int, H: int, D: int, seed: int) -> tuple[str, Question]:
    letters = {"b": B, "t": T, "h": H, "d": D, "e": H * D}
    x = numbers(*(math.prod(letters[axis] for axis in part) for part in shape.split()), seed=seed)
    sizes = {"heads": H, "head dim": D, "batch": B, "length": T, "width": H * D}
    return f"B={B}, T={T}, H={H}, d_k={D}", {"x": x, **sizes, "alone": "b" not in shape}


def _roles(callee: Callee, evidence: Evidence) -> dict[str, str] | None:
    """Which parameter takes the tensor, and which the sizes; None where one takes nothing we know."""
    if not callee.parameters:
        return None
    first, *others = callee.parameters
    roles, unknown = {"x": first.name}, []
    for each in others:
        role = SIZE_NAMES.get(each.name, size_word(each.name))
        if each.default is not each.empty and role != "heads":
            continue
        if role in roles or role not in {"heads", "head dim", "batch", "length", "width"}:
            unknown.append(each.name)
        else:
            roles[role] = each.name
    left = [role for role in ("heads", "head dim") if role not in roles]
    if len(unknown) > len(left) or (callee.heads is not None and unknown):
        evidence.tried.append(f"{', '.join(unknown)}: what to pass for it is not known")
        return None
    return roles | dict(zip(left, unknown, strict=False))


def _sizes(callee: Callee) -> list[tuple[int, int, int, int]]:
    if callee.heads is None or callee.width is None:
        return list(SIZES)
    H, D = callee.heads, callee.width // callee.heads
    return [(B, T, H, D) for B, T in BATCHES if D]


def _built_in_sizes(callee: Callee) -> list[tuple[int, int, int, int]]:
    """The width and the number of heads that a function has built in, read from what it gives."""
    for E in WIDTHS:
        question = {"x": numbers(3, 7, E), "batch": 3, "length": 7, "width": E}
        output = callee.answer("", question)[0].output
        if output is None or output.ndim not in (3, 4) or output.numel() != 3 * 7 * E:
            continue
        for size in output.shape:
            if E % size or size in (3, 7, E, 1) or E // size not in output.shape or size * size == E:
                continue
            pair = [each for each in output.shape if each in (size, E // size)]
            heads = pair[0] if len(pair) == 2 else min(pair)
            return [(B, T, heads, E // heads) for B, T in BATCHES]
    return []


def _right(step: str, asked: Asked) -> Mapping[str, Answer]:
    """The layouts that are right for what it was asked with."""
    x = asked.given["x"]
    assert isinstance(x, Tensor)
    if step == SPLIT:
        return SPLITS_ALONE if asked.given["alone"] else SPLITS
    if asked.given["alone"]:
        return MERGES_ALONE
    return MERGES if x.ndim == 4 else MERGES_OF_BATCH


def _read(step: str, evidence: Evidence, answered: list[Asked]) -> list[Reading] | Verdict:
    return [Reading(answered, _right(step, answered[0]), OF_SPLIT if step == SPLIT else OF_MERGE)]


def _refine(step: str, evidence: Evidence, answered: list[Asked], verdict: Verdict) -> Verdict:
    """Whether it has a number of heads or a size built in, and gives the layout that it promises."""
    if step == SPLIT and "heads" in evidence.roles and not verdict.right and not verdict.faults:
        for heads in range(2, 13):
            if _splits_into(heads, answered):
                detail = f"it has {heads} heads whatever it is told"
                return verdict.becomes("number of heads ignored", detail)
    verdict = _of_one_size(step, evidence, answered, verdict)
    if verdict.right and step == MERGE:
        verdict.words.append(f"it takes {verdict.right}, and gives [B, T, E]")
    return _as_promised(evidence, verdict) if verdict.right and step == SPLIT else verdict


def _splits_into(heads: int, answered: list[Asked]) -> bool:
    """Whether the answers are right for this number of heads, whatever was asked for."""
    as_if = [
        replace(asked, given={**asked.given, "heads": heads, "head dim": int(asked.given["width"]) // heads})
        for asked in answered
        if int(asked.given["width"]) % heads == 0
    ]
    return len(as_if) > 1 and bool(compare([Reading(as_if, SPLITS, ())]).right)


def _of_one_size(step: str, evidence: Evidence, answered: list[Asked], verdict: Verdict) -> Verdict:
    """Right for some sizes: those it was written for."""
    if verdict.faults or (verdict.right and len(answered) == len(evidence.asked)):
        return verdict
    right = _right(step, answered[0])
    fine = [asked for asked in answered if any(is_right(asked, answer) for answer in right.values())]
    if not fine or not compare([Reading(fine, right, ())]).right:
        return verdict
    other = next(asked for asked in evidence.asked if asked not in fine)
    does = "it gives other numbers" if other.problem is None else f"it raises {other.problem.message}"
    key = "split for one size only" if step == SPLIT else "merge for one size only"
    return verdict.becomes(key, f"right for {fine[0].probe}; for {other.probe} {does}")


def _as_promised(evidence: Evidence, verdict: Verdict) -> Verdict:
    """Right in a layout: whether it is the one that its own words promise."""
    promised = _promised_layout(own_text(evidence))
    if promised in LAYOUTS and verdict.right in LAYOUTS and promised != verdict.right:
        detail = f"it says {promised}; it gives {verdict.right}"
        return verdict.becomes("split for its callers in the wrong layout", detail)
    verdict.words.append(f"it gives {verdict.right}")
    return verdict


LETTERS = (
    ("H", r"(num|n|nb)?_?(attention_?|attn_?)?heads?|h|nh"),
    ("D", r"(d|dim)_?(k|v|q|head|h)?|head_?(dim|size|width)|(dim_?)?depth|dk|hd|size_per_head|hs"),
    ("T", r"(seq(uence)?|tgt|src|q|query)?_?(len(gth)?|size)?|t|l|n|s|tokens|positions|time(steps)?"),
    ("B", r"b|n|bs|bsz|batch(_?size)?|\.\.\."),
)


def _promised_layout(text: str) -> str:
    """The four axes that its words say are returned, "[B, H, T, D]"; "" where they say none."""
    layout = ""
    returned = set(re.findall(r"(?m)^\s*return\s+(\w+)\s*(?:#.*)?$", text))
    lines = [line for line in text.splitlines() if not _is_on_the_way(line, returned)]
    for inside in re.findall(r"[\[(]([^\[\]()]*)[\])]", words_in("\n".join(lines)).lower()):
        axes = [part.strip() for part in re.split(r"[,x×]\s+|,", inside)]
        letters = [
            next((name for name, pattern in LETTERS if re.fullmatch(pattern, axis)), "?") for axis in axes
        ]
        if len(letters) == 4 and letters[0] in "BT" and sorted(["B", *letters[1:]]) == ["B", "D", "H", "T"]:
            layout = f"[B, {', '.join(letters[1:])}]"
    return layout


def _is_on_the_way(line: str, returned: set[str]) -> bool:
    """Whether it is commented, and makes something that is not returned: that promises nothing."""
    made = re.match(r"\s*(\w+)\s*=[^=]", line)
    return made is not None and made[1] not in returned and "#" in line


def _heads_step(step: str, faults: list[StepFault], accepts: Callable[[Asked], bool]) -> Step:
    return Step(faults, partial(_plans, step), accepts, partial(_read, step), partial(_refine, step))


SPLITTING = _heads_step(SPLIT, OF_SPLIT, lambda asked: asked.output is not None)
MERGING = _heads_step(MERGE, OF_MERGE, lambda asked: asked.output is not None and asked.output.numel() > 0)
