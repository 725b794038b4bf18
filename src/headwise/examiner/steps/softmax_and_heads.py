"""Single steps that map one tensor to another: a softmax, the split into heads, and their merge.

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

from ..evidence import Evidence, StepAnswer
from ..examine.vocabulary import size_word
from .step_engine import (
    UNKNOWN,
    Callee,
    Formula,
    Reading,
    Step,
    StepFault,
    StepInputs,
    StepPlan,
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


def _axis(inputs: StepInputs) -> int:
    return int(inputs.get("axis", -1))


def _softmax_of(inputs: StepInputs) -> Tensor:
    return torch.softmax(inputs["x"], _axis(inputs))


def _over(axis: int) -> Formula:
    return lambda inputs: torch.softmax(inputs["x"], axis)


def _first(inputs: StepInputs) -> Tensor:
    x: Tensor = inputs["x"]
    return torch.softmax(x, 0 if x.ndim < 3 else 1)


def _shifted(inputs: StepInputs) -> Tensor:
    x: Tensor = inputs["x"]
    return x - x.amax(_axis(inputs), keepdim=True)


def _all(inputs: StepInputs) -> Tensor:
    x: Tensor = inputs["x"]
    return torch.softmax(x.flatten(), 0).reshape(x.shape)


def _normed(made: Tensor, inputs: StepInputs) -> Tensor:
    return made / made.sum(_axis(inputs), keepdim=True)


_softmax = faults_of("softmax", right=SOFTMAX_RIGHT, repair=SOFTMAX_REPAIR, lines=AXIS_LINES)
OF_SOFTMAX = [
    _softmax(
        "own softmax over the wrong axis",
        "it normalises over an axis other than the last, so the rows do not sum to 1",
        "exp(x) / sum(exp(x)), over an axis other than the last",
        "Sum the result over its last axis: is every sum 1?",
        "The result sums to 1 over a different axis.",
        "Take the maximum and the sum over dim=-1, with keepdim=True.",
        "Scores are [.., queries, keys]: the weights of each query sum to 1 over its keys, the last axis.",
        _over(0), _over(1), _over(-2), _first,
    ),
    _softmax(
        "own softmax ignores its axis",
        "the argument for the axis has no effect",
        "softmax over the same axis, whatever axis is passed",
        "Call it with two different axes and compare the results.",
        "The result is the same for every axis.",
        "Pass the argument on to max and to sum.",
        "A caller who passes a different axis gets numbers that do not sum to 1 over it.",
        _over(-1), _over(0), _over(1), _first,
    ),
    _softmax(
        "own softmax over everything",
        "it divides by the sum of all numbers, so the whole matrix sums to 1 instead of each row",
        "exp(x) / sum over all axes of exp(x)",
        "What is the sum of one row of the result?",
        "The whole matrix sums to 1; each row should.",
        "Call sum with dim=-1 and keepdim=True.",
        "The weights of all queries together sum to 1: the more queries, the smaller every output.",
        _all,
        lines=(r"\.?sum\(\s*\w*\s*\)", r"sum\("),
    ),
    _softmax(
        "own softmax not normalised",
        "the exponentials are not divided by their sum",
        "exp(x), or exp(x - max(x))",
        "Sum one row of the result: is it 1?",
        "The exponentials are never divided by their sum.",
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
        "it returns the logarithm of the softmax",
        "x - log(sum(exp(x)))",
        "Can an attention weight be negative?",
        "The numbers are logarithms: their exponentials sum to 1.",
        "Return exp(x) / sum(exp(x)), without log.",
        "Negative weights subtract values instead of averaging them.",
        lambda q: torch.log_softmax(q["x"], _axis(q)),
        lines=(r"log",),
    ),
    _softmax(
        "own softmax of the negative",
        "it computes exp(-x): the largest score gets the smallest weight",
        "exp(-x) / sum(exp(-x))",
        "Which position gets the largest weight?",
        "The order is reversed: the largest score gets the smallest weight.",
        "Look for a wrong minus sign: exp(max - x), or exp(-x).",
        "Each query attends most to the keys with the lowest scores.",
        lambda q: torch.softmax(-q["x"], _axis(q)),
        lines=(r"exp\(\s*-", r"\bmax\w*\s*-|max\([^)]*\)[^-]*-\s*\w+", r"exp\("),
        repair="e = torch.exp(x - x.amax(dim, keepdim=True))",
    ),
    _softmax(
        "own softmax without exp",
        "numbers are divided by their sum, without exp",
        "x / sum(x)",
        "What happens to a negative score?",
        "The weights are proportional to the scores, not to their exponentials.",
        "Take exp first, then divide by the sum.",
        "Scores may be negative and their sum may be 0: weights can be below 0, above 1, or NaN.",
        lambda q: _normed(q["x"], q),
        lambda q: _normed(_shifted(q), q),
        lambda q: _normed(q["x"].abs(), q),
        lambda q: _normed(q["x"].relu(), q),
        lines=(r"/\s*\S*sum", r"/"),
    ),
    _softmax(
        "own softmax with another base",
        "it does not compute exp(x), but a power of another base or the exponential of another number",
        "2^x / sum(2^x), 10^x, exp(x^2), exp(|x|)",
        "For x = [0, 1]: what is the ratio of the second weight to the first?",
        "The ratio should be e = 2.718.",
        "Use torch.exp, of x itself.",
        "The result is the softmax of different scores: too flat, too sharp, or independent of the sign.",
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
        "each weight depends on its own score alone, so the rows do not sum to 1",
        "1 / (1 + exp(-x))",
        "Does one weight depend on the other scores?",
        "Each weight is computed from its own score alone.",
        "Divide exp(x) by the sum over the row.",
        "The keys do not compete: the weights of a query can all be large, or all be small.",
        lambda q: torch.sigmoid(q["x"]),
        lambda q: torch.exp(q["x"]) / (1 + torch.exp(q["x"]).sum(_axis(q), keepdim=True)),
        lines=(r"sigmoid|1\s*\+", r"/"),
    ),
    _softmax(
        "own softmax overflows",
        "the maximum is not subtracted before exp, so large scores overflow and the result is NaN",
        "exp(x) / sum(exp(x)) without subtracting the maximum",
        "Try it with scores around 1000.",
        "exp(1000) is infinite, and infinity divided by infinity is NaN.",
        "Subtract the maximum of each row before exp: the result is the same, and nothing overflows.",
        "It overflows for scores above 88 in float32, and above 11 in float16; scores do get that large.",
        lines=EXP_LINES,
    ),
    _softmax(
        "own softmax subtracts one maximum for all",
        "one maximum is subtracted from every row, so rows far below it become 0 / 0 = NaN",
        "exp(x - x.max())",
        "Try two rows of very different size: one around 0, one around 2000.",
        "The exponentials of the lower row are all 0, and so is their sum.",
        "Take the maximum over the last axis, with keepdim=True.",
        "The result is right while the rows are of similar size, and NaN where they are not.",
        lines=(r"\bmax\(\s*\w*\s*\)", r"max\("),
        remark=True,
    ),
]  # fmt: skip


def _softmax_plans(callee: Callee, evidence: Evidence) -> list[StepPlan]:
    """Return plans with one tensor, and with an axis if the function takes one."""
    scores, *others = [each.name for each in callee.parameters]
    axis = next((name for name in others if name.lower() in AXES), None)
    unknown = [each.name for each in callee.missing(scores, axis)]
    if unknown:
        evidence.tried.append(UNKNOWN.format(", ".join(unknown)))
        return []
    if axis is None:
        return [StepPlan({"x": scores}, _softmax_probes())]
    along = [("axis 0", {"x": numbers(5, 7, seed=3), "axis": 0})]
    along += [("axis 1", {"x": numbers(2, 3, 5, seed=4), "axis": 1})]
    return [StepPlan({"x": scores, "axis": axis}, [*_softmax_probes(), *along])]


def _softmax_probes() -> list[tuple[str, StepInputs]]:
    """Return ordinary scores, then masked ones, large ones, and rows of very different size."""
    hidden, large, far = numbers(5, 7, seed=5), numbers(3, 5, seed=6) + 1000, numbers(3, 5, seed=7)
    hidden[1, 2:4], hidden[4, 6] = -torch.inf, -torch.inf
    far[1] += 2000
    scores = {
        "matrix": numbers(5, 7), "scores": numbers(2, 3, 5, 7, seed=2), "vector": numbers(7),
        "hidden": hidden, "large scores": large, "far rows": far,
    }  # fmt: skip
    return [(probe, {"x": x, "axis": -1}) for probe, x in scores.items()]


def _read_softmax(evidence: Evidence, answers: list[StepAnswer]) -> list[Reading] | Verdict:
    """Return the answers to the ordinary probes; the possible faults depend on whether it takes an axis."""
    if not {"matrix", "vector"} & {answer.probe for answer in answers}:
        return Verdict(unjudged="it could not be called with one tensor alone")
    takes_axis = "axis" in evidence.roles
    for answer in evidence.answers:
        if takes_axis and answer.problem is not None:  # two axes are tried
            reason = f"{answer.problem.kind}: {answer.problem.message}"
            return Verdict(unjudged=f"for the test input {answer.probe!r} it raises {reason}")
    left_out = "own softmax over the wrong axis" if takes_axis else "own softmax ignores its axis"
    right = {"over the axis it is given" if takes_axis else "over the last axis": _softmax_of}
    ordinary = [answer for answer in answers if answer.probe in ORDINARY]
    return [Reading(ordinary, right, [fault for fault in OF_SOFTMAX if fault.key != left_out])]


def _refine_softmax(evidence: Evidence, answers: list[StepAnswer], verdict: Verdict) -> Verdict:
    """Check large scores; if wrong, check whether it is right for matrices or vectors alone."""
    by_probe = {answer.probe: answer for answer in answers}
    if verdict.right:
        return _stressed(verdict, by_probe)
    if "axis" in evidence.roles:
        return verdict
    right = [
        answer
        for answer in answers
        if answer.probe in (*ORDINARY, "hidden") and is_right(answer, _softmax_of)
    ]
    names = {each.probe for each in right}
    if "matrix" in names:
        verdict = compare([Reading(right, {"over the last axis of a matrix": _softmax_of}, ())])
        verdict.words.append(
            "it is right for matrices [T, S]; for [B, H, T, S] it normalises over an axis other than the last"
        )
        return _stressed(verdict, by_probe)
    if "vector" in names and NARROW.search(words_in(own_text(evidence))):
        verdict = compare([Reading([by_probe["vector"]], {"of one vector": _softmax_of}, ())])
        verdict.words.append(
            "it is right for one vector, as its docstring says; for a matrix it mixes the rows"
        )
    return verdict


def _stressed(verdict: Verdict, answers: Mapping[str, StepAnswer]) -> Verdict:
    """Check large scores, rows of very different size and -inf, where ordinary scores are right."""
    outputs = {probe: answer.output for probe, answer in answers.items() if answer.output is not None}
    if "large scores" in outputs:
        verdict.errors["large scores"] = difference([answers["large scores"]], _softmax_of)
        if not bool(outputs["large scores"].isfinite().all()):
            detail = "for scores around 1000 it returns NaN or infinity; torch.softmax does not"
            return verdict.becomes("own softmax overflows", detail)
    if "hidden" in outputs:
        verdict.errors["hidden"] = difference([answers["hidden"]], _softmax_of)
        if bool(outputs["hidden"].isnan().any()):
            verdict.words.append(
                "for scores of -inf it returns NaN: mask with a large negative number, or handle -inf"
            )
    if "far rows" in outputs and not bool(outputs["far rows"].isfinite().all()):
        detail = "a row that is 2000 below another row becomes NaN"
        verdict.faults.append(("own softmax subtracts one maximum for all", detail))
    return verdict


SOFTMAX = Step(
    OF_SOFTMAX, _softmax_plans, lambda answer: answer.output is not None, _read_softmax, _refine_softmax
)

# Splitting and merging

SPLIT, MERGE = "split heads", "merge heads"
VIEWS = (
    r"\.(view|reshape)\(\s*[\w.\[\]() -]+,\s*(self\.)?(num_heads|n_heads?|heads|h|H|nhead)\s*,",
    r"\.(view|reshape)\(|rearrange\(",
)
MOVES = (r"\.(transpose|permute|swapaxes|movedim)\(|rearrange\(|einsum\(", r"\.(view|reshape)\(", r"return")


def _moved(view: str, made: str, viewed: str = "") -> Formula:
    """Return the formula that views x as the axes `view` and permutes them to `made` ("bh" is one axis).

    An axis of `made` that is not in `view` holds copies. Letters: e is the width, 1 an axis of size one. For
    one sequence there is no b.

    Args:
        view: the axes of the input, in memory order.
        made: the axes of the result.
        viewed: the axes that the result is viewed as in the end; "" for `made`.
    """

    def formula(inputs: StepInputs) -> Tensor:
        names = {"b": "batch", "t": "length", "h": "heads", "d": "head dim", "e": "width"}
        sizes = {"1": 1, **{letter: int(inputs[name]) for letter, name in names.items()}}
        absent = "b" if inputs["alone"] else ""
        axes = [axis for axis in view.split() if axis != absent]
        order = [axis for axis in made if axis not in f" 1{absent}"]
        copies = [axis for axis in order if axis not in axes]
        x = inputs["x"].reshape([sizes[axis] for axis in axes])
        x = x.expand([sizes[axis] for axis in (*copies, *axes)])
        x = x.permute([[*copies, *axes].index(axis) for axis in order])
        parts = [part.replace("b", "") if absent else part for part in (viewed or made).split()]
        return x.reshape([math.prod(sizes[axis] for axis in part) for part in parts if part])

    return formula


SPLITS = {
    "[B, H, T, D]": _moved("b t h d", "b h t d"),
    "[B, T, H, D]": _moved("b t h d", "b t h d"),
    "[B * H, T, D]": _moved("b t h d", "bh t d"),
    "[H * B, T, D]": _moved("b t h d", "hb t d"),
    "[H, B, T, D]": _moved("b t h d", "h b t d"),
    "[B, H, D, T], for keys that are already transposed": _moved("b t h d", "b h d t"),
    "[B * H, D, T], for keys that are already transposed": _moved("b t h d", "bh d t"),
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
    " A merge with the same mistake in reverse undoes it, so testing split followed by merge proves nothing."
)


_split = faults_of(SPLIT, right=SPLIT_RIGHT, repair=SPLIT_REPAIR, lines=VIEWS)
OF_SPLIT = [
    _split(
        "heads split by view",
        "the width is split with a view alone: each head gets all channels of a few positions, instead of "
        "a few channels of all positions",
        "x.view(B, H, T, d_k)",
        "Fill x with the number of the position, and print one head.",
        "A view keeps the memory order: the first head gets the first positions.",
        "View as [B, T, H, d_k] first, then transpose(1, 2).",
        "Each head attends within a block of T / H positions, cut into pieces, instead of all T positions."
        + UNDONE,
        _moved("b h t d", "b h t d"), _moved("b h t d", "bh t d"), _moved("b h t d", "b t h d"),
        _moved("b h t d", "h b t d"), _moved("h b t d", "h b t d"),
    ),
    _split(
        "heads and their widths exchanged",
        "the view has the width of a head before the number of heads: there are d_k heads of width H",
        "x.view(B, T, d_k, H).transpose(1, 2)",
        "Read the shape of the result: how many heads does it have?",
        "H and d_k are exchanged.",
        "x.view(B, T, num_heads, d_k): the number of heads first.",
        "There are d_k heads of width H, and each has the wrong channels." + UNDONE,
        _moved("b t d h", "b d t h"), _moved("b t d h", "b t d h"), _moved("b t d h", "bd t h"),
    ),
    _split(
        "channels dealt out in turn",
        "head h gets every H-th channel instead of d_k adjacent channels",
        "x.view(B, T, d_k, H).permute(0, 3, 1, 2)",
        "Fill x with the number of the channel, and print one head.",
        "Its channels are h, h + H, h + 2H, ..., instead of adjacent ones.",
        "View as [B, T, H, d_k]: the number of heads comes before the width of a head.",
        "In a trained model the channels of a head are adjacent; here each head gets channels of all heads."
        + UNDONE,
        *(_moved("b t d h", made) for made in ("b h t d", "b t h d", "h b t d", "bh t d", "hb t d")),
    ),
    _split(
        "not split",
        "the width is not split: there is one head as wide as the model",
        "x[:, None], or x itself",
        "Print the shape of the result: which axis is the number of heads?",
        "All channels are still in one head.",
        "View as [B, T, H, d_k], then transpose(1, 2).",
        "There is one set of attention weights for all channels, instead of one for each head.",
        _moved("b t e", "b 1 t e"), _moved("b t e", "b t e"), _moved("b t e", "b t 1 e"),
        lines=(*VIEWS, r"unsqueeze|None|return"),
    ),
    _split(
        "every head gets everything",
        "each head gets a copy of all channels instead of its own",
        "x[:, None].expand(B, H, T, E)",
        "How wide is one head? It should be E / H.",
        "All heads hold the same numbers.",
        "View as [B, T, H, d_k] instead of using repeat or expand.",
        "All heads have the same attention weights.",
        *(_moved("b t e", made) for made in ("b h t e", "b t h e", "hb t e", "bh t e")),
        lines=(r"expand|repeat|stack",),
    ),
    _split(
        "heads split, axes in the wrong order",
        "the width is split correctly, but the axes of the result are in the wrong order",
        "x.view(B, T, H, d_k).transpose(..) with the wrong axes",
        "Write down what each axis of the result is.",
        "The result should be [B, H, T, d_k]: batch, heads, positions, channels.",
        "Use transpose(1, 2) after the view, and nothing else.",
        "q @ k^T then sums over an axis other than the channels of a head." + UNDONE,
        *(_moved("b t h d", " ".join(order)) for order in permutations("bthd")),
        _moved("b t h d", "bt h d"), _moved("b t h d", "b th d"),
        lines=MOVES,
    ),
    _split(
        "number of heads ignored",
        "it always splits into the same number of heads, whatever number is passed",
        "x.view(B, T, c, E // c) with a fixed c",
        "Call it with a different number of heads and print the shape.",
        "The number of heads is hard-coded.",
        "Use the argument in the view.",
        "It is right for models with one number of heads only.",
        lines=VIEWS,
    ),
    _split(
        "split for one size only",
        "it works for one batch size or one length only",
        "x.view(3, 7, ..) with fixed sizes",
        "Call it with a different length, and with a batch of one.",
        "A size in the view is hard-coded, or stored when the module was built.",
        "Read B and T from x.shape.",
        "Sequences differ in length, and the last batch is often smaller.",
        lines=VIEWS,
    ),
    _split(
        "split for its callers in the wrong layout",
        "the layout of the result is not the one that the docstring or a comment says",
        "x.view(B, T, H, d_k) without the transpose",
        "Compare the shape of the result with what the docstring or comment says.",
        "The axes of heads and positions are exchanged.",
        "Add .transpose(1, 2).",
        "Code that relies on the documented shape lets heads attend to heads instead of positions.",
        lines=(r"return", *VIEWS),
    ),
]  # fmt: skip

_merge = faults_of(MERGE, right=MERGE_RIGHT, repair=MERGE_REPAIR, lines=VIEWS)
OF_MERGE = [
    _merge(
        "heads merged without a transpose",
        "the heads are merged with a reshape alone, without a transpose before it",
        "x.reshape(B, T, H * d_k) of x [B, H, T, d_k]",
        "Fill x with the number of the head, and print one position of the result.",
        "One position of the result holds several positions of one head.",
        "Use transpose(1, 2) first, then reshape.",
        "Positions and heads are mixed before the output projection." + UNDONE,
        _moved("b t e", "b t e"),
    ),
    _merge(
        "heads merged interleaved",
        "the channels of the heads are interleaved instead of concatenated",
        "x.permute(0, 2, 3, 1).reshape(B, T, E)",
        "Fill x with the number of the head, and print one position of the result.",
        "It is 0, 1, 2, 0, 1, 2 instead of 0, 0, 0, 1, 1, 1.",
        "The axis of heads comes before the channels: permute(0, 2, 1, 3).",
        "The output projection of a trained model expects one head after the other." + UNDONE,
        _moved("b h t d", "b t dh"), _moved("b h t d", "b h dt"),
        lines=MOVES,
    ),
    _merge(
        "heads merged in the wrong order",
        "the wrong axes are joined, or in the wrong order",
        "x.permute(..).reshape(B, T, E) with the wrong axes",
        "Write down what each axis is before the reshape.",
        "It must be [B, T, H, d_k]: the last two become the width.",
        "Use transpose(1, 2), and nothing else, before the reshape.",
        "The row of a position holds numbers of other positions or other samples.",
        *(_moved("b h t d", " ".join(order), "b t e") for order in OTHER_ORDERS),
        _moved("b h t d", "b hd t"), _moved("h b t d", "b h t d", "b t e"),
        lines=MOVES,
    ),
    _merge(
        "heads stacked along the sequence",
        "the heads are concatenated along the positions instead of the channels",
        "x.reshape(B, H * T, d_k)",
        "Print the shape of the result: how long is the sequence?",
        "It is H times as long, and as wide as one head.",
        "The heads are concatenated along the last axis: [B, T, H * d_k].",
        "The output projection takes the full width of the model.",
        _moved("b h t d", "b ht d"), _moved("b h t d", "b th d"),
    ),
    _merge(
        "heads added together",
        "the heads are summed or averaged, or only one is kept, instead of concatenating them",
        "x.sum(1), x.mean(1) or x[:, 0]",
        "How wide is the result? It should be H * d_k.",
        "It is as wide as one head.",
        "transpose(1, 2), then reshape to [B, T, H * d_k].",
        "The output projection can no longer weight each head on its own.",
        lambda q: q["x"].sum(1), lambda q: q["x"].mean(1), lambda q: q["x"][:, 0], lambda q: q["x"][:, -1],
        lines=(r"\.(sum|mean)\(|\[:,", r"return"),
    ),
    _merge(
        "merge for one size only",
        "it works for one batch size or one length only",
        "x.reshape(3, 7, ..) with fixed sizes",
        "Call it with a different length, and with a batch of one.",
        "A size in the view is hard-coded, or stored when the module was built.",
        "Read B, H, T and d_k from x.shape.",
        "Sequences differ in length, and the last batch is often smaller.",
    ),
]  # fmt: skip
# B, T, H, D: first sizes of one width that many numbers of heads divide, then another width
SIZES = ((2, 5, 3, 8), (3, 11, 4, 6), (1, 7, 6, 4), (5, 2, 8, 3), (2, 7, 3, 5))
BATCHES = ((3, 7), (2, 5), (1, 11), (5, 2))  # B, T, where the heads are known
WIDTHS = (24, 12, 16, 8, 32, 64, 128, 256, 512, 768, 1024, 6, 4, 20, 30)
SHAPES = {  # of the input; without b it is one sequence
    SPLIT: ("b t e", "t e"),
    MERGE: ("b h t d", "bh t d", "h t d"),
}
SIZE_NAMES = {
    **dict.fromkeys(("B", "b", "N", "bsz", "batch_size"), "batch"),
    **dict.fromkeys(("T", "t", "L", "S", "seq", "n"), "length"),
    **dict.fromkeys(("D", "d"), "head dim"),
}


def _plans(step: str, callee: Callee, evidence: Evidence) -> list[StepPlan]:
    """Return a plan for each layout, with probes of several sizes."""
    callee.stacks = step == SPLIT
    roles = _roles(callee, evidence)
    if roles is None:
        return []
    callee.roles, sizes = roles, _sizes(callee)
    if step == SPLIT and "heads" not in roles and callee.heads is None:
        sizes = _built_in_sizes(callee)
    if not sizes:
        evidence.tried.append("it takes no number of heads, and splits no width from 4 to 1024")
        return []
    evidence.embed_dim, evidence.num_heads = sizes[0][2] * sizes[0][3], sizes[0][2]
    knows_heads = len(roles) > 1 or callee.heads is not None  # else heads in the batch cannot be told apart
    return [
        StepPlan(roles, [_probe(shape, *each, seed=i + 11) for i, each in enumerate(sizes)])
        for shape in SHAPES[step]
        if knows_heads or shape != "bh t d"
    ]


def _probe(shape: str, B: int, T: int, H: int, D: int, seed: int) -> tuple[str, StepInputs]:
    letters = {"b": B, "t": T, "h": H, "d": D, "e": H * D}
    x = numbers(*(math.prod(letters[axis] for axis in part) for part in shape.split()), seed=seed)
    sizes = {"heads": H, "head dim": D, "batch": B, "length": T, "width": H * D}
    return f"B={B}, T={T}, H={H}, d_k={D}", {"x": x, **sizes, "alone": "b" not in shape}


def _roles(callee: Callee, evidence: Evidence) -> dict[str, str] | None:
    """Return the parameters of the tensor and the sizes, by role; None if a parameter is not understood."""
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
        evidence.tried.append(UNKNOWN.format(", ".join(unknown)))
        return None
    return roles | dict(zip(left, unknown, strict=False))


def _sizes(callee: Callee) -> list[tuple[int, int, int, int]]:
    if callee.heads is None or callee.width is None:
        return list(SIZES)
    H, D = callee.heads, callee.width // callee.heads
    return [(B, T, H, D) for B, T in BATCHES if D]


def _built_in_sizes(callee: Callee) -> list[tuple[int, int, int, int]]:
    """Return probe sizes for a function with a hard-coded number of heads, read from its outputs."""
    for E in WIDTHS:
        inputs = {"x": numbers(3, 7, E), "batch": 3, "length": 7, "width": E}
        output = callee.answer("", inputs)[0].output
        if output is None or output.ndim not in (3, 4) or output.numel() != 3 * 7 * E:
            continue
        for size in output.shape:
            if E % size or size in (3, 7, E, 1) or E // size not in output.shape or size * size == E:
                continue
            pair = [each for each in output.shape if each in (size, E // size)]
            heads = pair[0] if len(pair) == 2 else min(pair)
            return [(B, T, heads, E // heads) for B, T in BATCHES]
    return []


def _right(step: str, answer: StepAnswer) -> Mapping[str, Formula]:
    """Return the layouts that are right for the input of this answer."""
    x = answer.inputs["x"]
    assert isinstance(x, Tensor)
    if step == SPLIT:
        return SPLITS_ALONE if answer.inputs["alone"] else SPLITS
    if answer.inputs["alone"]:
        return MERGES_ALONE
    return MERGES if x.ndim == 4 else MERGES_OF_BATCH


def _read(step: str, evidence: Evidence, answers: list[StepAnswer]) -> list[Reading] | Verdict:
    return [Reading(answers, _right(step, answers[0]), OF_SPLIT if step == SPLIT else OF_MERGE)]


def _refine(step: str, evidence: Evidence, answers: list[StepAnswer], verdict: Verdict) -> Verdict:
    """Check for a hard-coded number of heads or size, and compare the layout with the docstring."""
    if step == SPLIT and "heads" in evidence.roles and not verdict.right and not verdict.faults:
        for heads in range(2, 13):
            if _splits_into(heads, answers):
                detail = f"it has {heads} heads, whatever number is passed"
                return verdict.becomes("number of heads ignored", detail)
    verdict = _of_one_size(step, evidence, answers, verdict)
    if verdict.right and step == MERGE:
        verdict.words.append(f"it takes {verdict.right} and returns [B, T, E]")
    return _as_promised(evidence, verdict) if verdict.right and step == SPLIT else verdict


def _splits_into(heads: int, answers: list[StepAnswer]) -> bool:
    """Return True if the answers are right for this number of heads instead of the number passed."""
    as_if = [
        replace(
            answer, inputs={**answer.inputs, "heads": heads, "head dim": int(answer.inputs["width"]) // heads}
        )
        for answer in answers
        if int(answer.inputs["width"]) % heads == 0
    ]
    return len(as_if) > 1 and bool(compare([Reading(as_if, SPLITS, ())]).right)


def _of_one_size(step: str, evidence: Evidence, answers: list[StepAnswer], verdict: Verdict) -> Verdict:
    """Name the fault if it is right for some sizes only."""
    if verdict.faults or (verdict.right and len(answers) == len(evidence.answers)):
        return verdict
    right = _right(step, answers[0])
    fine = [answer for answer in answers if any(is_right(answer, formula) for formula in right.values())]
    if not fine or not compare([Reading(fine, right, ())]).right:
        return verdict
    failed = next(answer for answer in evidence.answers if answer not in fine)
    does = "its output is wrong" if failed.problem is None else f"it raises {failed.problem.message}"
    key = "split for one size only" if step == SPLIT else "merge for one size only"
    return verdict.becomes(key, f"it is right for {fine[0].probe}; for {failed.probe} {does}")


def _as_promised(evidence: Evidence, verdict: Verdict) -> Verdict:
    """Name the fault if the layout is not the one that the docstring or a comment says."""
    promised = _promised_layout(own_text(evidence))
    if promised in LAYOUTS and verdict.right in LAYOUTS and promised != verdict.right:
        detail = f"the docstring or a comment says {promised}; it returns {verdict.right}"
        return verdict.becomes("split for its callers in the wrong layout", detail)
    verdict.words.append(f"it returns {verdict.right}")
    return verdict


LETTERS = (
    ("H", r"(num|n|nb)?_?(attention_?|attn_?)?heads?|h|nh"),
    ("D", r"(d|dim)_?(k|v|q|head|h)?|head_?(dim|size|width)|(dim_?)?depth|dk|hd|size_per_head|hs"),
    ("T", r"(seq(uence)?|tgt|src|q|query)?_?(len(gth)?|size)?|t|l|n|s|tokens|positions|time(steps)?"),
    ("B", r"b|n|bs|bsz|batch(_?size)?|\.\.\."),
)


def _promised_layout(text: str) -> str:
    """Return the axes that docstring or comments say are returned, as "[B, H, T, D]"; "" if they say none."""
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
    """Return True for a commented line that assigns a variable that is not returned."""
    made = re.match(r"\s*(\w+)\s*=[^=]", line)
    return made is not None and made[1] not in returned and "#" in line


def _heads_step(step: str, faults: list[StepFault], accepts: Callable[[StepAnswer], bool]) -> Step:
    return Step(faults, partial(_plans, step), accepts, partial(_read, step), partial(_refine, step))


SPLITTING = _heads_step(SPLIT, OF_SPLIT, lambda answer: answer.output is not None)
MERGING = _heads_step(MERGE, OF_MERGE, lambda answer: answer.output is not None and answer.output.numel() > 0)
