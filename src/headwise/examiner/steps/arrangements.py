"""Splitting the width into heads, and merging the heads again: numbers are only put elsewhere.

Letters: B batch, T length, E width, H num_heads, D head_dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import permutations

import torch
from torch import Tensor

from ..evidence import Asked, Evidence
from ..examine.words import size_word
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

SPLIT, MERGE = "split heads", "merge heads"
VIEWS = (
    r"\.(view|reshape)\(\s*[\w.\[\]() -]+,\s*(self\.)?(num_heads|n_heads?|heads|h|H|nhead)\s*,",
    r"\.(view|reshape)\(|rearrange\(",
)
MOVES = (r"\.(transpose|permute|swapaxes|movedim)\(|rearrange\(|einsum\(", r"\.(view|reshape)\(", r"return")


def _apart(question: Question) -> Tensor:
    """[B, T, H, D], the channels of one head beside each other."""
    return question["x"].unflatten(-1, (int(question["heads"]), -1))


def _strided(question: Question) -> Tensor:
    """[B, T, H, D], head h made of the channels h, h + H, h + 2H."""
    return question["x"].unflatten(-1, (-1, int(question["heads"]))).transpose(-1, -2)


def _sized(question: Question) -> tuple[int, int, int, int]:
    B, T, E = question["x"].shape
    H = int(question["heads"])
    return B, T, H, E // H


def _moved(*order: int, of: Callable[[Question], Tensor] = _apart) -> Answer:
    return lambda question: of(question).permute(order)


def _alone(answer: Answer, *, last: Callable[[Tensor], Tensor] = lambda out: out) -> Answer:
    """The same for one sequence, [T, E]: without the axis for the batch."""
    return lambda question: last(answer({**question, "x": question["x"][None]}))


def _sequence_first(answer: Answer) -> Answer:
    return lambda question: answer({**question, "x": question["x"].transpose(0, 1)})


SPLITS: dict[str, Answer] = {
    "[B, H, T, D]": _moved(0, 2, 1, 3),
    "[B, T, H, D]": _apart,
    "[B * H, T, D]": lambda q: _moved(0, 2, 1, 3)(q).flatten(0, 1),
    "[H * B, T, D]": lambda q: _moved(2, 0, 1, 3)(q).flatten(0, 1),
    "[H, B, T, D]": _moved(2, 0, 1, 3),
    "[B, H, D, T], for keys that are multiplied from the right": _moved(0, 2, 3, 1),
    "[B * H, D, T], for keys that are multiplied from the right": lambda q: _moved(0, 2, 3, 1)(q).flatten(
        0, 1
    ),
    "[B, H, T, D] of an input [T, B, E]": _sequence_first(_moved(0, 2, 1, 3)),
    "[B * H, T, D] of an input [T, B, E]": _sequence_first(lambda q: _moved(0, 2, 1, 3)(q).flatten(0, 1)),
}
ALONE: dict[str, Answer] = {
    "[H, T, D]": _alone(_moved(0, 2, 1, 3), last=lambda out: out[0]),
    "[T, H, D]": _alone(_apart, last=lambda out: out[0]),
}
BY_LETTERS = {  # what a docstring may ask for
    "BHTD": "[B, H, T, D]", "BTHD": "[B, T, H, D]", "HBTD": "[H, B, T, D]",
}  # fmt: skip
OTHER_ORDERS = [
    order
    for order in permutations(range(4))
    if order not in {(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 2, 3, 1)}
]
SPLIT_RIGHT = "x.view(B, T, H, d_k).transpose(1, 2)"
SPLIT_REPAIR = "return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # [B, T, E] to [B, H, T, d_k]"
MERGE_RIGHT = "x.transpose(1, 2).reshape(B, T, H * d_k)"
MERGE_REPAIR = "return x.transpose(1, 2).flatten(2)  # [B, H, T, d_k] to [B, T, E]"
UNDONE = (
    " A merge that makes the same mistake backwards undoes it: a round trip that gives x again "
    "proves nothing."
)


def _viewed(question: Question) -> Tensor:
    B, T, H, D = _sized(question)
    return question["x"].reshape(B, H, T, D)


def _flat_view(question: Question) -> Tensor:
    B, T, H, D = _sized(question)
    return question["x"].reshape(B * H, T, D)


def _split(
    key: str, title: str, formula: str, hints: tuple[str, str, str], why: str, *instead: Answer,
    lines: tuple[str, ...] = VIEWS,
) -> StepFault:  # fmt: skip
    return StepFault(
        key, title, formula, SPLIT_RIGHT, hints, why, SPLIT_REPAIR, lines=lines, of=SPLIT, instead=instead
    )


OF_SPLIT = [
    _split(
        "heads split by view",
        "the width is split by a view alone: a head gets a few whole positions, not a few channels of all",
        "x.view(B, H, T, d_k)",
        (
            "Fill x with the number of the position, and look at one head.",
            "A view never moves a number: read on in memory, the first head is the first positions.",
            "View as [B, T, H, d_k] first, then transpose(1, 2).",
        ),
        "Each head sees T / H positions in pieces and calls them T: attention compares the wrong things."
        + UNDONE,
        _viewed, _flat_view,
        lambda q: _viewed(q).transpose(1, 2),
        lambda q: _flat_view(q).unflatten(0, (-1, int(q["heads"]))).transpose(0, 1),
        lambda q: q["x"].reshape(q["heads"], q["x"].shape[0], q["x"].shape[1], -1),
        lambda q: _flat_view(q).unflatten(0, (-1, q["x"].shape[0])),
    ),
    _split(
        "heads and their widths exchanged",
        "the view names the head's width before the number of heads: there are d_k heads of width H",
        "x.view(B, T, d_k, H).transpose(1, 2)",
        (
            "Read the shape of the result: how many heads does it have?",
            "H and d_k stand in each other's place.",
            "x.view(B, T, num_heads, d_k): the number of heads first.",
        ),
        "As many heads as a head should be wide, each of the wrong channels." + UNDONE,
        lambda q: q["x"].unflatten(-1, (-1, int(q["heads"]))).transpose(1, 2),
        lambda q: q["x"].unflatten(-1, (-1, int(q["heads"]))),
        lambda q: q["x"].unflatten(-1, (-1, int(q["heads"]))).transpose(1, 2).flatten(0, 1),
    ),
    _split(
        "channels dealt out in turn",
        "head h takes every H-th channel instead of d_k channels that lie beside each other",
        "x.view(B, T, d_k, H).permute(0, 3, 1, 2)",
        (
            "Fill x with the number of the channel, and look at one head.",
            "Its channels are h, h + H, h + 2H: dealt out like cards.",
            "View as [B, T, H, d_k]: the number of heads stands before the width of one.",
        ),
        "The projections of a trained model lie head by head: dealt out in turn, each head gets some of all."
        + UNDONE,
        _moved(0, 2, 1, 3, of=_strided), _strided, _moved(2, 0, 1, 3, of=_strided),
        lambda q: _moved(0, 2, 1, 3, of=_strided)(q).flatten(0, 1),
        lambda q: _moved(2, 0, 1, 3, of=_strided)(q).flatten(0, 1),
    ),
    _split(
        "not split",
        "there is one head as wide as the model: the width is not split",
        "x[:, None], or x itself",
        (
            "Read the shape of the result: where is the number of heads?",
            "All channels are still in one head.",
            "View as [B, T, H, d_k], then transpose(1, 2).",
        ),
        "One softmax for all channels: a position can look at one thing at a time.",
        lambda q: q["x"][:, None], lambda q: q["x"], lambda q: q["x"][:, :, None],
        lines=(*VIEWS, r"unsqueeze|None|return"),
    ),
    _split(
        "every head gets everything",
        "each head is given all channels: nothing is split, only copied",
        "x[:, None].expand(B, H, T, E)",
        (
            "How wide is one head? It should be E / H.",
            "All heads hold the same numbers.",
            "View as [B, T, H, d_k] in place of repeat or expand.",
        ),
        "Heads that are all the same attend to the same.",
        lambda q: q["x"][:, None].expand(-1, int(q["heads"]), -1, -1),
        lambda q: q["x"][:, :, None].expand(-1, -1, int(q["heads"]), -1),
        lambda q: q["x"].repeat(int(q["heads"]), 1, 1),
        lambda q: q["x"].repeat_interleave(int(q["heads"]), 0),
        lines=(r"expand|repeat|stack",),
    ),
    _split(
        "heads split, axes in the wrong order",
        "the split is right, and then axes change places that should not",
        "x.view(B, T, H, d_k).transpose(..) with the wrong axes",
        (
            "Write down what each axis of the result is.",
            "Heads stand beside the batch, and each is positions times channels: [B, H, T, d_k].",
            "transpose(1, 2) after the view, nothing else.",
        ),
        "q @ k^T then multiplies along another axis than the head's width." + UNDONE,
        *(_moved(*order) for order in OTHER_ORDERS),
        lambda q: _moved(1, 2, 0, 3)(q).flatten(0, 1),
        lambda q: _apart(q).flatten(0, 1),
        lambda q: _apart(q).flatten(1, 2),
        lines=MOVES,
    ),
    _split(
        "number of heads ignored",
        "it splits into the same number of heads whatever number it is told",
        "x.view(B, T, c, E // c) with a fixed c",
        (
            "Call it with another number of heads and read the shape.",
            "The number of heads is written into the code.",
            "Use the argument in the view.",
        ),
        "It fits one model at most.",
        lines=VIEWS,
    ),
    _split(
        "split for one size only",
        "it works for one batch or one length, and raises for others",
        "x.view(3, 7, ..) with fixed sizes",
        (
            "Call it with another length, and with a batch of one.",
            "A size is written into the view, or kept from when the module was built.",
            "Read B and T from x.shape.",
        ),
        "Sequences differ in length, the last batch is smaller.",
        lines=VIEWS,
    ),
    _split(
        "split for its callers in the wrong layout",
        "it says it returns one layout, and returns another",
        "x.view(B, T, H, d_k) without the transpose",
        (
            "Compare the shape of the result with what the docstring or comment says.",
            "The heads are behind the positions; they are said to be in front.",
            "Add .transpose(1, 2).",
        ),
        "Whoever calls it counts on the shape that it says: positions would attend across heads.",
        lines=(r"return", *VIEWS),
    ),
]  # fmt: skip


# Merging: x is [B, H, T, D]


def _merged(question: Question) -> Tensor:
    return question["x"].transpose(-3, -2).flatten(-2)


def _from_batch(heads_first: bool) -> Answer:
    def answer(question: Question) -> Tensor:
        x, H = question["x"], int(question["heads"])
        parts = x.unflatten(0, (H, -1)).transpose(0, 1) if heads_first else x.unflatten(0, (-1, H))
        return parts.transpose(1, 2).flatten(2)

    return answer


MERGES: dict[str, dict[str, Answer]] = {
    "heads first": {"[B, H, T, D]": _merged, "[B, T, H, D]": lambda q: q["x"].flatten(2)},
    "heads in the batch": {"[B * H, T, D]": _from_batch(False), "[H * B, T, D]": _from_batch(True)},
    "one sequence": {"[H, T, D]": _merged, "[T, H, D]": lambda q: q["x"].flatten(1)},
}


def _merge(
    key: str, title: str, formula: str, hints: tuple[str, str, str], why: str, *instead: Answer,
    lines: tuple[str, ...] = VIEWS,
) -> StepFault:  # fmt: skip
    return StepFault(
        key, title, formula, MERGE_RIGHT, hints, why, MERGE_REPAIR, lines=lines, of=MERGE, instead=instead
    )


def _joined_view(question: Question) -> Tensor:
    B, H, T, D = question["x"].shape
    return question["x"].reshape(B, T, H * D)


def _joined_batch(question: Question) -> Tensor:
    H, (BH, T, D) = int(question["heads"]), question["x"].shape
    return question["x"].reshape(BH // H, T, H * D)


def _reordered(order: tuple[int, ...]) -> Answer:
    return lambda q: q["x"].permute(order).reshape(q["x"].shape[0], q["x"].shape[2], -1)


OF_MERGE = [
    _merge(
        "heads merged without a transpose",
        "the heads are viewed as one width without bringing the positions first",
        "x.reshape(B, T, H * d_k) of x [B, H, T, d_k]",
        (
            "Fill x with the number of the head, and look at one position of the result.",
            "One position of the result holds several positions of one head.",
            "transpose(1, 2) first, then reshape.",
        ),
        "Positions and heads are mixed before the output projection." + UNDONE,
        _joined_view, _joined_batch,
    ),
    _merge(
        "heads merged interleaved",
        "channels are put together in turn, one of each head, instead of head after head",
        "x.permute(0, 2, 3, 1).reshape(B, T, E)",
        (
            "Fill x with the number of the head, and look at one position of the result.",
            "It reads 0, 1, 2, 0, 1, 2 instead of 0, 0, 0, 1, 1, 1.",
            "The heads come before the width of one: permute(0, 2, 1, 3).",
        ),
        "The output projection of a trained model expects head after head." + UNDONE,
        lambda q: q["x"].permute(0, 2, 3, 1).flatten(2),
        lambda q: q["x"].permute(0, 1, 3, 2).flatten(2),
        lambda q: q["x"].unflatten(0, (-1, int(q["heads"]))).permute(0, 2, 3, 1).flatten(2),
        lines=MOVES,
    ),
    _merge(
        "heads merged in the wrong order",
        "the right axes are joined, in the wrong order, or the wrong ones",
        "x.permute(..).reshape(B, T, E) with the wrong axes",
        (
            "Write down what each axis is before the reshape.",
            "It must be [B, T, H, d_k]: the last two become the width.",
            "transpose(1, 2) and nothing else before the reshape.",
        ),
        "Numbers of other positions, or of other samples, end up in a position's row.",
        *(
            _reordered(order) for order in permutations(range(4))
            if order not in {(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1)}
        ),
        lambda q: q["x"].transpose(1, 2).flatten(2).transpose(1, 2),
        lambda q: q["x"].transpose(2, 3).flatten(1, 2),
        lambda q: _joined_view({"x": q["x"].unflatten(0, (int(q["heads"]), -1)).transpose(0, 1)}),
        lines=MOVES,
    ),
    _merge(
        "heads stacked along the sequence",
        "the heads follow each other as positions; the width stays that of one head",
        "x.reshape(B, H * T, d_k)",
        (
            "Read the shape of the result: how long is the sequence?",
            "It is H times as long, and as wide as one head.",
            "The heads belong beside each other: [B, T, H * d_k].",
        ),
        "The output projection takes the full width of the model.",
        lambda q: q["x"].flatten(1, 2), lambda q: q["x"].transpose(1, 2).flatten(1, 2),
    ),
    _merge(
        "heads added together",
        "the heads are summed, averaged, or all but one dropped, instead of standing side by side",
        "x.sum(1), x.mean(1) or x[:, 0]",
        (
            "How wide is the result? It should be H * d_k.",
            "It is as wide as one head.",
            "transpose(1, 2), then reshape to [B, T, H * d_k].",
        ),
        "What each head found is no longer told apart.",
        lambda q: q["x"].sum(1), lambda q: q["x"].mean(1), lambda q: q["x"][:, 0], lambda q: q["x"][:, -1],
        lines=(r"\.(sum|mean)\(|\[:,", r"return"),
    ),
    _merge(
        "merge for one size only",
        "it works for one batch or one length, and raises for others",
        "x.reshape(3, 7, ..) with fixed sizes",
        (
            "Call it with another length, and with a batch of one.",
            "A size is written into the view, or kept from when the module was built.",
            "Read B, H, T and d_k from x.shape.",
        ),
        "Sequences differ in length, the last batch is smaller.",
    ),
]  # fmt: skip
FAULTS = [*OF_SPLIT, *OF_MERGE]
BY_KEY = {fault.key: fault for fault in FAULTS}
# B, T, H, D: of one width first, which many numbers of heads divide, then of another
SIZES = ((2, 5, 3, 8), (3, 11, 4, 6), (1, 7, 6, 4), (5, 2, 8, 3), (2, 7, 3, 5))


# Asking


def _sizes(callee: Callee) -> list[tuple[int, int, int, int]]:
    if callee.heads is None or callee.width is None:
        return list(SIZES)
    H, D = callee.heads, callee.width // callee.heads
    return [(B, T, H, D) for B, T in ((3, 7), (2, 5), (1, 11), (5, 2)) if D]


def _bind(callee: Callee, evidence: Evidence) -> bool:
    """Which parameter takes the tensor, and which the sizes."""
    callee.roles, ours = {"x": callee.parameters[0].name}, callee.parameters[1:]
    unknown = []
    for one in ours:
        word = {
            "heads": "heads", "head dim": "head dim", "batch": "batch", "length": "length", "width": "width",
        }.get(size_word(one.name) or "")  # fmt: skip
        if one.name in {"B", "b", "N", "bsz", "batch_size"}:
            word = "batch"
        elif one.name in {"T", "t", "L", "S", "seq", "n"} and word is None:
            word = "length"
        elif one.name in {"D", "d"}:
            word = "head dim"
        if one.default is not one.empty and word != "heads":
            continue
        if word is None or word in callee.roles:
            unknown.append(one.name)
        else:
            callee.roles[word] = one.name
    left = [role for role in ("heads", "head dim") if role not in callee.roles]
    if len(unknown) > len(left) or (callee.heads is not None and unknown):
        evidence.tried.append(f"{', '.join(unknown)}: what to pass for it is not known")
        return False
    callee.roles |= dict(zip(left, unknown, strict=False))
    return True


def examine(callee: Callee, evidence: Evidence) -> None:
    """The same with several sizes."""
    callee.stacks = evidence.step == SPLIT
    if not callee.parameters or not _bind(callee, evidence):
        return
    sizes = _sizes(callee)
    if "heads" not in callee.roles and callee.heads is None and evidence.step == SPLIT:
        found = _fixed(callee)
        if found is None:
            evidence.tried.append("it takes no number of heads, and no width of 1 to 1024 was split by it")
            return
        sizes = found
    for layout in ("heads first", "heads in the batch", "one sequence"):
        for kind in ((False, torch.float64), (False, torch.float32), (True, torch.float64)):
            callee.numpy, callee.dtype = kind
            question = _question(evidence.step, sizes[0], layout)
            if question is not None and _works(callee, question, evidence.step):
                break
        else:
            continue
        break
    else:
        callee.numpy, callee.dtype, layout = False, torch.float64, "heads first"
    for number, one in enumerate(sizes):
        question = _question(evidence.step, one, layout, number)
        if question is not None:
            callee.ask(evidence, f"B={one[0]}, T={one[1]}, H={one[2]}, d_k={one[3]}", question)
    callee.tell(evidence)
    evidence.embed_dim, evidence.num_heads = sizes[0][2] * sizes[0][3], sizes[0][2]


def _works(callee: Callee, question: Question, step: str | None) -> bool:
    found = callee.answer("", question)[0].output
    return found is not None and (step == SPLIT or found.numel() > 0)


def _question(
    step: str | None, sizes: tuple[int, int, int, int], layout: str, seed: int = 0
) -> Question | None:
    B, T, H, D = sizes
    given = {"heads": H, "head dim": D, "batch": B, "length": T, "width": H * D}
    shapes = {
        (SPLIT, "heads first"): (B, T, H * D), (SPLIT, "one sequence"): (T, H * D),
        (MERGE, "heads first"): (B, H, T, D), (MERGE, "heads in the batch"): (B * H, T, D),
        (MERGE, "one sequence"): (H, T, D),
    }  # fmt: skip
    shape = shapes.get((step or "", layout))
    return None if shape is None else {"x": numbers(*shape, seed=seed + 11), **given}


def _fixed(callee: Callee) -> list[tuple[int, int, int, int]] | None:
    """The width and the number of heads that a function has built in: read from what it gives."""
    for E in (24, 12, 16, 8, 32, 64, 128, 256, 512, 768, 1024, 6, 4, 20, 30):
        question = {"x": numbers(3, 7, E), "batch": 3, "length": 7, "width": E}
        found = callee.answer("", question)[0].output
        if found is None or found.ndim not in (3, 4) or found.numel() != 3 * 7 * E:
            continue
        for H in [one for one in found.shape if E % one == 0 and one not in (3, 7, E, 1)]:
            if E // H in found.shape and H != E // H:
                heads = min(H, E // H) if found.ndim == 4 else E // found.shape[-1]
                order = [one for one in found.shape if one in (H, E // H)]
                heads = order[0] if len(order) == 2 else heads
                return [(B, T, heads, E // heads) for B, T in ((3, 7), (2, 5), (1, 11), (5, 2))]
    return None


# Judging


def judge(evidence: Evidence) -> Verdict:
    """Which arrangement it is."""
    answered = [one for one in evidence.asked if one.output is not None]
    crashed = any(one.output is None for one in evidence.asked)
    if not answered:
        return Verdict(unjudged="it gave no tensor for any input that was tried")
    right: Mapping[str, Answer]
    if evidence.step == SPLIT:
        right, faults = (ALONE if answered[0].given["x"].ndim == 2 else SPLITS), OF_SPLIT  # type: ignore[union-attr]
    else:
        right, faults = _merges(answered[0]), OF_MERGE
    verdict = explanation(answered, right, faults)
    if verdict.right is None and evidence.step == SPLIT and "heads" in evidence.roles:
        verdict = _heads_ignored(answered, verdict)
    if verdict.right is None or (verdict.right and crashed):
        return _one_size(evidence, right, verdict)
    if verdict.right:
        does = (
            f"it gives {verdict.right}"
            if evidence.step == SPLIT
            else f"it takes {verdict.right}, and gives [B, T, E]"
        )
        verdict.words = [does]
        return _as_said(evidence, verdict) if evidence.step == SPLIT else verdict
    return verdict


def _one_size(evidence: Evidence, right: Mapping[str, Answer], verdict: Verdict) -> Verdict:
    """Right for some sizes: those it was written for."""
    fine = [one for one in evidence.asked if one.output is not None and explanation([one], right, []).right]
    if not fine or not explanation(fine, right, []).right:
        return verdict
    other = next(one for one in evidence.asked if one not in fine)
    does = "it gives other numbers" if other.problem is None else f"it raises {other.problem.message}"
    key = "split for one size only" if evidence.step == SPLIT else "merge for one size only"
    return Verdict(
        "", BY_KEY[key], detail=f"right for {fine[0].probe}; for {other.probe} {does}", errors=verdict.errors
    )


def _merges(asked: Asked) -> Mapping[str, Answer]:
    x = asked.given["x"]
    assert isinstance(x, torch.Tensor)
    if x.ndim == 4:
        return MERGES["heads first"]
    alone = x.shape[0] == asked.given["heads"]
    return MERGES["one sequence" if alone else "heads in the batch"]


def _heads_ignored(answered: list[Asked], verdict: Verdict) -> Verdict:
    """Whether it is right for some other number of heads, the same in every question."""
    for c in range(2, 13):
        told = [
            Asked(one.probe, {**one.given, "heads": c}, one.output)
            for one in answered
            if one.given["x"].shape[-1] % c == 0  # type: ignore[union-attr]
        ]
        if (
            len(told) > 1
            and explanation(answered, SPLITS, []).right is None
            and explanation(told, SPLITS, []).right
        ):
            detail = f"it has {c} heads whatever it is told"
            return Verdict("", BY_KEY["number of heads ignored"], detail=detail, errors=verdict.errors)
    return verdict


LETTERS = (
    ("H", r"(num|n|nb)?_?(attention_?|attn_?)?heads?|h|nh"),
    ("D", r"(d|dim)_?(k|v|q|head|h)?|head_?(dim|size|width)|(dim_?)?depth|dk|hd|size_per_head|hs"),
    ("T", r"(seq(uence)?|tgt|src|q|query)?_?(len(gth)?|size)?|t|l|n|s|tokens|positions|time(steps)?"),
    ("B", r"b|n|bs|bsz|batch(_?size)?|\.\.\."),
)


def _said(text: str) -> str | None:
    """The order of four axes that its words say of what is returned, "BHTD"; None without one."""
    found = None
    returned = set(re.findall(r"(?m)^\s*return\s+(\w+)\s*(?:#.*)?$", text))
    lines = text.splitlines()
    on_the_way = [  # comments on what is made before, which promise nothing
        line
        for line in lines
        if (made := re.match(r"\s*(\w+)\s*=[^=]", line)) and made[1] not in returned and "#" in line
    ]
    promised = "\n".join(line for line in lines if line not in on_the_way)
    for inside in re.findall(r"[\[(]([^\[\]()]*)[\])]", words_in(promised).lower()):
        parts = [part.strip() for part in re.split(r"[,x×]\s+|,", inside)]
        letters = [
            next((name for name, pattern in LETTERS if re.fullmatch(pattern, part)), "?") for part in parts
        ]
        if len(letters) == 4 and letters[0] in "BT" and sorted(["B", *letters[1:]]) == ["B", "D", "H", "T"]:
            found = "B" + "".join(letters[1:])
    return found


def _as_said(evidence: Evidence, verdict: Verdict) -> Verdict:
    """Right in a layout: whether it is the one that its own words promise."""
    promised = BY_LETTERS.get(_said(own_text(evidence)) or "")
    given = verdict.right or ""
    if promised is None or given == promised or given not in BY_LETTERS.values():
        return verdict
    detail = f"it says {promised}; it gives {given}"
    fault = BY_KEY["split for its callers in the wrong layout"]
    return Verdict("", fault, detail=detail, errors=verdict.errors)
