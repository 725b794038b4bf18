"""Functions that make a mask: causal, padding, or both.

Letters: B batch, T queries, S keys. Patterns are bool [B, T, S], True where a query may attend to a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..evidence import Evidence, StepAnswer
from ..examine.vocabulary import MaskDescription, describe_mask
from .step_engine import (
    Callee,
    Formula,
    Reading,
    Step,
    StepFault,
    StepInputs,
    StepPlan,
    Verdict,
    compare,
    faults_of,
    own_text,
    words_in,
    words_of,
)

SIZE = re.compile(
    r"(?i)n|t|l|s|size|sz|len|length|\w*_?len(gth)?|seq_?size|dim|block_?size|context\w*|num_?tokens|max\w*|seq_?len\w*|steps|timesteps|d|k|q"
)
LENGTHS = re.compile(r"(?i)\w*lengths|\w*lens|valid_?lens?|valid_?lengths?|src_lengths?")
TOKENS = re.compile(
    r"(?i)tokens?|\w*ids?|\w*seq(uences?)?|x|src|tgt|trg|inputs?|inp|source|target|batch|seq_[qk]|text|y|words|sentence|enc\w*|dec\w*"
)
PAD = re.compile(r"(?i)pad\w*|\w*pad(_?(id|idx|index|token|value))?")
MOST = re.compile(r"(?i)max\w*|\w*max_?len\w*|size|seq_?len|length|T|S|L|n")
CAUSAL = re.compile(r"causal|subsequent|look_?ahead|future|tril|triu|autoregress|square|triang")
PADDING = re.compile(r"pad|length|valid|src|source|sequence_mask|key")
TRIANGLES = (r"tril|triu|arange|<=|>=|<|>", r"range\(", r"return")
LINES = (r"[!=]=|<|>|lt\(|ge\(|\.eq\(|\.ne\(|arange", r"return")
CAUSAL_RIGHT = "query t attends to keys 0 to t: torch.tril(torch.ones(T, T))"
PAD_RIGHT = "padding keys are hidden from every query: (ids != pad)[:, None, None, :]"
T1 = "mask = torch.tril(torch.ones(T, T)).bool()  # True where a query may attend to a key"
T2 = "mask = (ids != pad)[:, None, None, :]  # [B, 1, 1, S], True where a key may be attended to"
ADDED = "mask = torch.full((T, T), float('-inf')).triu(1)  # added to the scores"
FUTURE, PADDED = frozenset({"causal"}), frozenset({"padding"})
EITHER = FUTURE | PADDED


# What a mask may hide


def _sizes(inputs: StepInputs) -> tuple[int, int]:
    """Return B and T."""
    if "ids" in inputs:
        return int(inputs["ids"].shape[0]), int(inputs["ids"].shape[1])
    if "lengths" in inputs:
        return len(inputs["lengths"]), int(inputs["size"])
    return 1, int(inputs["size"])


def _triangle(diagonal: int, flipped: bool = False) -> Formula:
    def pattern(inputs: StepInputs) -> Tensor:
        B, T = _sizes(inputs)
        ones = torch.ones(B, T, T, dtype=torch.bool)
        return ones.triu(diagonal) if flipped else ones.tril(diagonal)

    return pattern


def _real(inputs: StepInputs, shift: int = 0, pad: int | None = None) -> Tensor:
    """Return bool [B, S], True for keys that are not padding."""
    if "lengths" in inputs:
        return torch.arange(int(inputs["size"])) < inputs["lengths"][:, None] + shift
    real: Tensor = inputs["ids"] != (inputs["pad"] if pad is None else pad)
    if not shift:
        return real
    return torch.arange(real.shape[1]) < real.sum(1)[:, None] + shift


def _keys(real: Callable[[StepInputs], Tensor]) -> Formula:
    return lambda inputs: real(inputs)[:, None].expand(-1, _sizes(inputs)[1], -1)


def _rows(inputs: StepInputs) -> Tensor:
    return _real(inputs)[..., None].expand(-1, -1, _sizes(inputs)[1])


def _and_padding(pattern: Formula) -> Formula:
    return lambda inputs: pattern(inputs) & _keys(_real)(inputs)


def _and_rows(pattern: Formula) -> Formula:
    return lambda inputs: pattern(inputs) & _rows(inputs)


def _everything(inputs: StepInputs) -> Tensor:
    return torch.ones_like(_triangle(0)(inputs))


class _Right(NamedTuple):
    """A right mask, and what it hides."""

    hides: frozenset[str]
    pattern: Formula


RIGHT = {
    "each position attends to itself and those before it": _Right(FUTURE, _triangle(0)),
    "padding is hidden from every query": _Right(PADDED, _keys(_real)),
    "padding and the future are hidden": _Right(EITHER, _and_padding(_triangle(0))),
    "padding is hidden, and padded queries attend to nothing": _Right(PADDED, _and_rows(_keys(_real))),
    "padding and the future are hidden, and padded queries attend to nothing": _Right(
        EITHER, _and_rows(_and_padding(_triangle(0)))
    ),
}

KINDS = {"bool": "True and False", "0 and 1": "0 and 1", "added": "what is added to the scores"}
MARKS = {"bool": "True", "0 and 1": "1", "added": "-inf"}  # the entries that mark keys

# What can be wrong

_fault = faults_of("mask", right=CAUSAL_RIGHT, repair=T1, lines=TRIANGLES, about=FUTURE)
FAULTS = [
    _fault(
        "mask hides the position itself",
        "the diagonal is hidden: no position may attend to itself, and the first to nothing",
        "tril(ones, diagonal=-1), or triu(ones) as the hidden part",
        "Print the mask for a length of 3: what may the first position attend to?",
        "The diagonal is hidden; it should be visible.",
        "The visible part is tril(ones); the hidden part is triu(ones, diagonal=1).",
        "The first query has no visible key: its weights are NaN, and so is everything computed from them.",
        _triangle(-1), _and_padding(_triangle(-1)),
    ),
    _fault(
        "mask shows the next position",
        "one position too many is visible: each position may attend to the next one",
        "tril(ones, diagonal=1), or triu(ones, diagonal=2) as the hidden part",
        "Print the mask for a length of 3: what may the first position attend to?",
        "It may attend to the second position, the token it has to predict.",
        "The visible part is tril(ones); the hidden part is triu(ones, diagonal=1).",
        "The model can copy the token it has to predict: the loss falls, and nothing useful is learned.",
        _triangle(1), _and_padding(_triangle(1)),
    ),
    _fault(
        "mask shows the future",
        "the triangle is the wrong one: each position attends to itself and later ones, not to earlier ones",
        "triu in place of tril",
        "Print the mask for a length of 3: what may the last position attend to?",
        "The past is hidden, and the future is visible.",
        "Exchange triu and tril.",
        "A model that predicts the next token could read it, and none of the tokens before.",
        _triangle(0, flipped=True), _and_padding(_triangle(0, flipped=True)),
        _triangle(1, flipped=True), _and_padding(_triangle(1, flipped=True)),
    ),
    _fault(
        "mask says the opposite of its words",
        "the mask is the opposite of what its docstring or comment says",
        "True and False exchanged",
        "Compare the mask with what its docstring or comment says.",
        "The text says that 1 or True means one thing; in the mask it means the opposite.",
        "Exchange == and !=, or put a ~ in front.",
        "A caller who relies on the text hides exactly the keys that should be visible.",
        lines=(r"return", *LINES),
    ),
    _fault(
        "mask added with the signs exchanged",
        "it is added to the scores, but has -inf for visible keys and 0 for hidden keys",
        "-inf on and below the diagonal",
        "Add it to scores of 0 and take the softmax: which keys get weight?",
        "-inf hides a key, and it is where keys should be visible.",
        "torch.full((T, T), -inf).triu(1): -inf above the diagonal only.",
        "The keys that should be visible are hidden; a row of -inf alone gives NaN.",
        repair=ADDED,
    ),
    _fault(
        "mask holds NaN",
        "the mask has NaN where it should have 0, because 0 times -inf is NaN",
        "triu(ones, 1) * -inf",
        "Print the mask.",
        "The NaN comes from 0 * inf.",
        "Fill instead of multiplying: torch.full((T, T), -inf).triu(1), or masked_fill.",
        "Every score it is added to becomes NaN.",
        repair=ADDED,
        lines=(r"\*\s*-?\(?-?\s*(float|torch\.inf|math\.inf|np\.inf)|inf.*\*", r"inf"),
    ),
    _fault(
        "mask of 0 and 1 that is to be added",
        "its docstring says that it is added to the scores, but it holds 0 and 1, which hides nothing",
        "0 and 1 in place of 0 and -inf",
        "What does adding 1 to a score do?",
        "exp(s + 1) is 2.7 times exp(s): nothing is hidden.",
        "Replace the ones by -inf with masked_fill.",
        "Hidden keys get more weight than the others instead of none.",
        repair="mask = mask.float().masked_fill(mask, float('-inf'))",
        lines=(r"return",),
    ),
    _fault(
        "mask lets padding or the future through",
        "a key is visible if it is not padding OR not in the future; both conditions must hold",
        "causal | padding",
        "Print the row of the first query: is the future hidden?",
        "Masks of visible keys are combined with and; masks of hidden keys with or.",
        "Exchange | and &.",
        "Every token of the future that is not padding is visible.",
        lambda inputs: _triangle(0)(inputs) | _keys(_real)(inputs),
        repair="mask = causal & (ids != pad)[:, None, None, :]",
        right="visible: keys that are neither in the future nor padding",
        about=EITHER,
        lines=(r"\||logical_or|&|logical_and|maximum|minimum|\bor\b|\+|\*", r"return"),
    ),
    _fault(
        "padding mask on the queries",
        "it hides the rows (padded queries) instead of the columns (padded keys)",
        "(ids != pad)[:, None, :, None]",
        "Add it to scores [B, H, T, S]: along which axis does it vary?",
        "It varies along the queries; keys are the last axis.",
        "Insert the new axes before the last one: [:, None, None, :].",
        "Other queries still attend to padding, and fully hidden rows become NaN.",
        _rows, lambda inputs: _triangle(0)(inputs) & _rows(inputs),
        lines=(r"unsqueeze|None|expand|view|reshape|newaxis", r"return"), repair=T2, right=PAD_RIGHT,
        about=PADDED,
    ),
    _fault(
        "padding mask off by one",
        "one key too many or one too few is hidden",
        "arange <= lengths, or arange < lengths - 1",
        "For a length of 2: which positions are not padding?",
        "Positions 0 and 1, those with arange < length.",
        "Exchange <= and <, or >= and >.",
        "In every sample one padding token is visible, or the last token is hidden.",
        _keys(partial(_real, shift=1)), _keys(partial(_real, shift=-1)),
        repair="mask = torch.arange(S) < lengths[:, None]  # [B, S], True where a key is real",
        right="arange(S) < lengths[:, None]", lines=LINES, about=PADDED,
    ),
    _fault(
        "pad id ignored",
        "it compares with a fixed number instead of the pad id that is passed",
        "ids != 0, whatever pad is",
        "Call it with a different pad id.",
        "The result does not change.",
        "Compare the ids with the argument.",
        "If the pad id is not 0, ordinary tokens are hidden and padding is visible.",
        _keys(partial(_real, pad=0)), _keys(partial(_real, pad=1)),
        repair="mask = (ids != pad)[:, None, None, :]", right=PAD_RIGHT, lines=LINES, about=PADDED,
    ),
    _fault(
        "mask hides nothing",
        "every query may attend to every key",
        "ones",
        "Print the mask: is anything hidden?",
        "All its entries are the same.",
        "Compare the ids with pad, or take a triangle.",
        "Keys that should be hidden get weight.",
        _everything,
        lines=(r"return",), about=EITHER,
    ),
]  # fmt: skip


# Asking


def _ids(B: int, T: int, pad: int, seed: int) -> Tensor:
    """Return token ids padded at the end, each row shorter than the last; with an id 0 where pad is not 0."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (B, T), generator=dice)
    if pad != 0:
        ids[:, 0] = 0
    for row in range(1, B):
        ids[row, max(1, T - 2 * row) :] = pad
    return ids


def _plans(callee: Callee, evidence: Evidence) -> list[StepPlan]:
    """Return plans by the names and annotations of its parameters, the likeliest first."""
    every = [*callee.missing(), *(each for each in callee.parameters if each.default is not each.empty)]
    names = [each.name for each in every if PAD.fullmatch(each.name) and "mask" not in each.name]
    pad = names[0] if names else None
    needed = callee.missing(pad)
    names = [each.name for each in needed]
    counts = [each.annotation in (int, "int") for each in needed]
    if len(names) == 1:
        roles = _of_one(names[0], counts[0], callee, pad is not None)
    elif len(names) == 2:
        roles = _of_two(names, counts, pad is not None)
    else:
        roles = []
    if not roles:
        evidence.tried.append("its parameters are neither a length nor lengths nor token ids")
    if pad is not None:
        roles = [each | {"pad": pad} if "ids" in each else each for each in roles]
    return [StepPlan(each, _probes(each, _pads(callee, each))) for each in roles]


def _of_one(name: str, is_count: bool, callee: Callee, has_pad: bool) -> list[dict[str, str]]:
    """Return the possible roles of one parameter beside the pad id."""
    size, ids, lengths = {"size": name}, {"ids": name}, {"lengths": name}
    unset = [each.name for each in callee.parameters if each.default is None and MOST.fullmatch(each.name)]
    if unset:
        lengths["size"] = unset[0]
    if is_count:
        return [size]
    if LENGTHS.fullmatch(name):
        return [lengths, size, ids]
    if TOKENS.fullmatch(name) or has_pad:
        return [ids, lengths, size]
    return [size, lengths, ids]


def _of_two(names: list[str], counts: list[bool], has_pad: bool) -> list[dict[str, str]]:
    """Return the possible roles of two parameters beside the pad id."""
    first, second = names
    roles = [{"ids": first, "ids again": second}]
    if all(SIZE.fullmatch(name) or is_count for name, is_count in zip(names, counts, strict=True)):
        roles.insert(0, {"size": first, "size again": second})
    if LENGTHS.fullmatch(first):
        roles.insert(0, {"lengths": first, "size": second})
    if not has_pad and not TOKENS.fullmatch(second):
        roles.insert(0, {"ids": first, "pad": second})
    return roles


def _pads(callee: Callee, roles: dict[str, str]) -> list[int]:
    """Return the pad ids to try: the one its object holds; else its default, and 3."""
    owner = getattr(callee.body, "__self__", None)
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if PAD.fullmatch(name) and _is_whole(value):
            return [value]
    default = next((each.default for each in callee.parameters if each.name == roles.get("pad")), 0)
    return [default if _is_whole(default) else 0, *([3] if "pad" in roles else [])]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _probes(roles: dict[str, str], pads: list[int]) -> list[tuple[str, StepInputs]]:
    if "ids" in roles:
        probes: list[tuple[str, StepInputs]] = []
        for B, T, pad, seed in ((3, 7, pads[0], 1), (2, 5, pads[-1], 2)):
            ids = _ids(B, T, pad, seed)
            probes.append((f"ids [{B}, {T}], pad {pad}", {"ids": ids, "ids again": ids, "pad": pad}))
        return probes
    if "lengths" in roles:
        lengths = (torch.tensor([5, 3, 1]), torch.tensor([7, 2]))
        return [(f"lengths {each.tolist()}", {"lengths": each, "size": int(each.max())}) for each in lengths]
    return [(f"length {T}", {"size": T, "size again": T}) for T in (5, 7, 2)]


def _is_mask(answer: StepAnswer) -> bool:
    return answer.output is not None and _spread(answer) is not None


# Judging


def _marks(mask: Tensor) -> tuple[str, Tensor] | None:
    """Return the kind of mask and its marked entries (True, 1 or -inf); None if it is no mask."""
    if mask.dtype is torch.bool:
        return "bool", mask
    if mask.is_complex() or mask.numel() == 0:
        return None
    if bool(mask.isnan().any()):
        return "NaN", mask.isnan()
    if bool(((mask == 0) | (mask == 1)).all()):
        return "0 and 1", mask == 1
    hides = mask <= -1e4
    return ("added", hides) if bool((hides | (mask == 0)).all()) else None


class _Spread(NamedTuple):
    kind: str
    marked: Tensor  # [B, T, S]
    shape: str  # of the mask as returned


def _spread(answer: StepAnswer) -> _Spread | None:
    """Return the marked entries for every query and key; None if its numbers or shape are not a mask's."""
    assert answer.output is not None
    B, T = _sizes(answer.inputs)
    marks = _marks(answer.output)
    if marks is None:
        return None
    kind, marked = marks
    shape, of_ids = list(marked.shape), "ids" in answer.inputs
    if shape == [T, T] and not (of_ids and B == T):
        return _Spread(kind, marked.expand(B, T, T), "[T, S]")
    if shape == [B, T]:
        return _Spread(kind, marked[:, None].expand(B, T, T), "[B, S]")
    if shape == [T, B] and of_ids:
        return _Spread(kind, marked.T[:, None].expand(B, T, T), "[S, B]")
    four = len(shape) == 4 and shape[1] == 1
    marked = marked[:, 0] if four else marked
    if marked.ndim != 3 or marked.shape[1:] == (1, 1):
        return None
    if any(size not in (1, whole) for size, whole in zip(marked.shape, (B, T, T), strict=True)):
        return None
    batch, *axes = ["1" if n == 1 else letter for n, letter in zip(marked.shape, "BTS", strict=True)]
    return _Spread(kind, marked.expand(B, T, T), f"[{', '.join((batch, *['1'] * four, *axes))}]")


def _read(evidence: Evidence, answers: list[StepAnswer]) -> list[Reading] | Verdict:
    """Return readings of the marked entries: as visible keys, and as hidden keys."""
    crashed = [answer for answer in evidence.answers if answer.output is None]
    if crashed:
        return Verdict(unjudged=f"it works for {answers[0].probe}, but not for {crashed[0].probe}")
    kind = _kind(answers)
    if kind is None:
        return Verdict(unjudged="it does not return the same kind of mask each time")
    if kind == "NaN":
        return Verdict(faults=[("mask holds NaN", f"for {answers[0].probe} it holds NaN")])
    means = _means(evidence)
    if kind == "0 and 1" and means.added and not re.search(r"(?i)masked_fill|bool", own_text(evidence)):
        detail = "its docstring or a comment says it is added to the scores; it holds 0 and 1"
        return Verdict(faults=[("mask of 0 and 1 that is to be added", detail)])
    meant = _meant(evidence)
    right = {words: each.pattern for words, each in RIGHT.items() if meant <= each.hides}
    faults = [fault for fault in FAULTS if _concerns(fault, meant)]
    if kind == "added":
        return [Reading(_visible(answers, False), right, faults)]
    return [
        Reading(_visible(answers, attends), right, faults if means.true_attends in (None, attends) else [])
        for attends in (True, False)
    ]


def _kind(answers: list[StepAnswer]) -> str | None:
    """Return the kind of all masks; None if one is not a mask."""
    kinds = {None if spread is None else spread.kind for spread in map(_spread, answers)}
    if None in kinds:
        return None
    return next(kind for kind in ("NaN", "added", "bool", "0 and 1") if kind in kinds)


def _visible(answers: list[StepAnswer], marks_visible: bool) -> list[StepAnswer]:
    """Return the masks as patterns of visible keys. `marks_visible`: whether marked keys are visible."""
    patterns = []
    for answer in answers:
        spread = _spread(answer)
        assert spread is not None
        patterns.append(replace(answer, output=spread.marked if marks_visible else ~spread.marked))
    return patterns


def _means(evidence: Evidence) -> MaskDescription:
    """Return what its docstring and comments say about the mask."""
    words = words_in(own_text(evidence))
    if not words:
        return MaskDescription()
    about = "\n".join(f"mask: {line.strip()}" for line in words.splitlines())  # all of it is about masks
    means = describe_mask([f'"""{about}"""'], "mask")
    return means if means.in_words else replace(means, true_attends=None)


def _meant(evidence: Evidence) -> frozenset[str]:
    """Return what its name says it hides: "causal", "padding", both or nothing."""
    roles = {role for answer in evidence.answers for role in answer.inputs}
    if not roles & {"ids", "lengths"}:
        return FUTURE
    word = words_of(evidence.name)
    return frozenset(
        hidden for hidden, pattern in (("causal", CAUSAL), ("padding", PADDING)) if pattern.search(word)
    )


def _concerns(fault: StepFault, meant: frozenset[str]) -> bool:
    """Return True if a mask meant to hide this can have the fault; others may hide nothing on purpose."""
    return bool(fault.about & meant) if meant else fault.key != "mask hides nothing"


def _refine(evidence: Evidence, answers: list[StepAnswer], verdict: Verdict) -> Verdict:
    """Describe the convention of a right or wrong mask, and compare it with the docstring."""
    kind, spread = _kind(answers), _spread(answers[0])
    assert kind is not None and spread is not None
    attends = kind != "added" and verdict.reading == 0
    verdict.words, verdict.errors = [f"it returns {KINDS[kind]}, {spread.shape}"], {}
    if verdict.right:
        return _as_its_words(evidence, verdict, kind, attends)
    if kind == "added" and _is_right_inverted(answers):
        detail = "-inf is where keys should be visible"
        return verdict.becomes("mask added with the signs exchanged", detail)
    if verdict.faults:
        means = "visible" if attends else "hidden"
        detail = f"if {MARKS[kind]} means {means}, the mask has this mistake for every test input"
        verdict.faults = [(verdict.faults[0][0], detail)]
    elif not _meant(evidence):
        verdict.unjudged = (
            "its name does not say what it is meant to hide; a name such as causal_mask or padding_mask does"
        )
    return verdict


def _is_right_inverted(answers: list[StepAnswer]) -> bool:
    right = {words: each.pattern for words, each in RIGHT.items()}
    return bool(compare([Reading(_visible(answers, True), right, ())]).right)


def _as_its_words(evidence: Evidence, verdict: Verdict, kind: str, attends: bool) -> Verdict:
    """Check a right mask against its docstring: do the marked keys mean what it says?"""
    promised = None if kind == "added" else _means(evidence).true_attends
    if promised is not None and promised is not attends:
        documented, actual = ("visible" if each else "hidden" for each in (promised, attends))
        detail = f"its docstring or a comment says {MARKS[kind]} means {documented}; here it means {actual}"
        return verdict.becomes("mask says the opposite of its words", detail)
    verdict.words.append(f"{MARKS[kind]} where a key {'is visible' if attends else 'is hidden'}")
    return verdict


MASK = Step(FAULTS, _plans, _is_mask, _read, _refine, insists=False)
