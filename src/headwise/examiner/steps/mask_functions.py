"""Functions that make a mask: the future hidden, padding hidden, or both.

Letters: B batch, T queries, S keys. Patterns are bool [B, T, S], True where a query may see a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..evidence import Asked, Evidence
from ..examine.words import Said, said_about
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
CAUSAL_RIGHT = "query t sees the keys 0 .. t: torch.tril(torch.ones(T, T))"
PAD_RIGHT = "keys that are padding are hidden from every query: (ids != pad)[:, None, None, :]"
T1 = "mask = torch.tril(torch.ones(T, T)).bool()  # True where a query may see a key"
T2 = "mask = (ids != pad)[:, None, None, :]  # [B, 1, 1, S], True where a key may be seen"
ADDED = "mask = torch.full((T, T), float('-inf')).triu(1)  # added to the scores"
FUTURE, PADDED = frozenset({"causal"}), frozenset({"padding"})
EITHER = FUTURE | PADDED


# What a mask may hide


def _sizes(question: Question) -> tuple[int, int]:
    """B and T."""
    if "ids" in question:
        return int(question["ids"].shape[0]), int(question["ids"].shape[1])
    if "lengths" in question:
        return len(question["lengths"]), int(question["size"])
    return 1, int(question["size"])


def _triangle(diagonal: int, flipped: bool = False) -> Answer:
    def pattern(question: Question) -> Tensor:
        B, T = _sizes(question)
        ones = torch.ones(B, T, T, dtype=torch.bool)
        return ones.triu(diagonal) if flipped else ones.tril(diagonal)

    return pattern


def _real(question: Question, shift: int = 0, pad: int | None = None) -> Tensor:
    """bool [B, S], which keys are no padding."""
    if "lengths" in question:
        return torch.arange(int(question["size"])) < question["lengths"][:, None] + shift
    real: Tensor = question["ids"] != (question["pad"] if pad is None else pad)
    if not shift:
        return real
    return torch.arange(real.shape[1]) < real.sum(1)[:, None] + shift


def _keys(real: Callable[[Question], Tensor]) -> Answer:
    return lambda question: real(question)[:, None].expand(-1, _sizes(question)[1], -1)


def _rows(question: Question) -> Tensor:
    return _real(question)[..., None].expand(-1, -1, _sizes(question)[1])


def _and_padding(pattern: Answer) -> Answer:
    return lambda question: pattern(question) & _keys(_real)(question)


def _and_rows(pattern: Answer) -> Answer:
    return lambda question: pattern(question) & _rows(question)


def _everything(question: Question) -> Tensor:
    return torch.ones_like(_triangle(0)(question))


class _Right(NamedTuple):
    """A right mask."""

    hides: frozenset[str]
    pattern: Answer


RIGHT = {
    "no position sees those after it": _Right(FUTURE, _triangle(0)),
    "padding is hidden from every query": _Right(PADDED, _keys(_real)),
    "padding and the future are hidden": _Right(EITHER, _and_padding(_triangle(0))),
    "padding is hidden, and padded queries see nothing": _Right(PADDED, _and_rows(_keys(_real))),
    "padding and the future are hidden, and padded queries see nothing": _Right(
        EITHER, _and_rows(_and_padding(_triangle(0)))
    ),
}

KINDS = {"bool": "True and False", "0 and 1": "0 and 1", "added": "what is added to the scores"}
MARKS = {"bool": "True", "0 and 1": "1", "added": "-inf"}  # what is looked at

# What can be wrong

_fault = faults_of("mask", right=CAUSAL_RIGHT, repair=T1, lines=TRIANGLES, about=FUTURE)
FAULTS = [
    _fault(
        "mask hides the position itself",
        "the diagonal is on the wrong side: no position may see itself, and the first sees nothing",
        "tril(ones, diagonal=-1), or triu(ones) as what is hidden",
        "Print the mask for a length of 3: what may the first position see?",
        "The diagonal is hidden: it should be seen.",
        "What is seen is tril(ones); what is hidden is triu(ones, diagonal=1).",
        "The first query has no key left: its weights are NaN, and with it all that follows.",
        _triangle(-1), _and_padding(_triangle(-1)),
    ),
    _fault(
        "mask shows the next position",
        "one position too many is seen: each may see the one after it",
        "tril(ones, diagonal=1), or triu(ones, diagonal=2) as what is hidden",
        "Print the mask for a length of 3: what may the first position see?",
        "It may see the second: the very token it is to predict.",
        "What is seen is tril(ones); what is hidden is triu(ones, diagonal=1).",
        "The model reads the answer: the loss falls at once, and it has learned nothing.",
        _triangle(1), _and_padding(_triangle(1)),
    ),
    _fault(
        "mask shows the future",
        "the triangle is turned around: each position sees itself and what comes after, not what came before",
        "triu in place of tril",
        "Print the mask for a length of 3: what may the last position see?",
        "The past is hidden, and the future is seen.",
        "Exchange triu and tril.",
        "A model that predicts the next token would be shown it, and nothing of what came before.",
        _triangle(0, flipped=True), _and_padding(_triangle(0, flipped=True)),
        _triangle(1, flipped=True), _and_padding(_triangle(1, flipped=True)),
    ),
    _fault(
        "mask says the opposite of its words",
        "it marks what it says it hides, or the other way round",
        "True and False exchanged",
        "Compare the mask with what its docstring or comment says.",
        "It says that 1 or True means one thing; the numbers mean the other.",
        "Exchange == and !=, or put a ~ in front.",
        "Whoever reads the words and fills where the mask says hides all that should be seen.",
        lines=(r"return", *LINES),
    ),
    _fault(
        "mask added with the signs exchanged",
        "it is added to the scores, and has -inf where a key may be seen, 0 where it is hidden",
        "-inf on and below the diagonal",
        "Add it to scores of 0 and take the softmax: who is seen?",
        "-inf hides. It stands where keys should be seen.",
        "torch.full((T, T), -inf).triu(1): -inf above the diagonal alone.",
        "All that should be seen is hidden; where a row is all -inf, NaN.",
        repair=ADDED,
    ),
    _fault(
        "mask holds NaN",
        "0 times -inf is NaN: the mask has NaN where it should have 0",
        "triu(ones, 1) * -inf",
        "Print the mask.",
        "NaN comes of 0 * inf.",
        "Fill instead of multiplying: torch.full((T, T), -inf).triu(1), or masked_fill.",
        "Every score it is added to becomes NaN.",
        repair=ADDED,
        lines=(r"\*\s*-?\(?-?\s*(float|torch\.inf|math\.inf|np\.inf)|inf.*\*", r"inf"),
    ),
    _fault(
        "mask of 0 and 1 that is to be added",
        "it says that it is added to the scores, and holds 0 and 1: that hides nothing",
        "0 and 1 in place of 0 and -inf",
        "What does adding 1 to a score do?",
        "exp(s + 1) is 2.7 times exp(s): nothing is hidden.",
        "masked_fill the ones with -inf.",
        "Hidden keys get more weight than others, not none.",
        repair="mask = mask.float().masked_fill(mask, float('-inf'))",
        lines=(r"return",),
    ),
    _fault(
        "mask lets padding or the future through",
        "a key counts as seen if it is real OR lies in the past; both must hold",
        "causal | padding",
        "Print the row of the first query: is the future hidden?",
        "Two masks that say what is seen are joined by and; those that say what is hidden by or.",
        "Exchange | and &.",
        "Every real token of the future is seen.",
        lambda question: _triangle(0)(question) | _keys(_real)(question),
        repair="mask = causal & (ids != pad)[:, None, None, :]", right="seen: the past, and no padding",
        about=EITHER,
        lines=(r"\||logical_or|&|logical_and|maximum|minimum|\bor\b|\+|\*", r"return"),
    ),
    _fault(
        "padding mask on the queries",
        "it hides rows, the queries that are padding, in place of columns, the keys",
        "(ids != pad)[:, None, :, None]",
        "Add it to scores [B, H, T, S]: which axis does it change along?",
        "It changes along the queries; keys are the last axis.",
        "The 1s belong before the last axis: [:, None, None, :].",
        "Real queries go on attending to padding, and rows that are all hidden become NaN.",
        _rows, lambda question: _triangle(0)(question) & _rows(question),
        lines=(r"unsqueeze|None|expand|view|reshape|newaxis", r"return"), repair=T2, right=PAD_RIGHT,
        about=PADDED,
    ),
    _fault(
        "padding mask off by one",
        "one key too many or too few is hidden",
        "arange <= lengths, or arange < lengths - 1",
        "For a length of 2: which positions are real?",
        "Positions 0 and 1, those with arange < length.",
        "Exchange <= and <, or >= and >.",
        "One padding token is attended to in every sample, or the last real one is lost.",
        _keys(partial(_real, shift=1)), _keys(partial(_real, shift=-1)),
        repair="mask = torch.arange(S) < lengths[:, None]  # [B, S], True where a key is real",
        right="arange(S) < lengths[:, None]", lines=LINES, about=PADDED,
    ),
    _fault(
        "pad id ignored",
        "it looks for another number than the pad id it is given",
        "ids != 0, whatever pad is",
        "Call it with another pad id.",
        "The result does not change.",
        "Compare with the argument.",
        "Real tokens are hidden and padding is seen, as soon as the pad id is not 0.",
        _keys(partial(_real, pad=0)), _keys(partial(_real, pad=1)),
        repair="mask = (ids != pad)[:, None, None, :]", right=PAD_RIGHT, lines=LINES, about=PADDED,
    ),
    _fault(
        "mask hides nothing",
        "every key may be seen by every query",
        "ones",
        "Print the mask: is anything hidden?",
        "All its entries say the same.",
        "Compare the ids with pad, or take a triangle.",
        "What should be hidden is attended to.",
        _everything,
        lines=(r"return",), about=EITHER,
    ),
]  # fmt: skip


# Asking


def _ids(B: int, T: int, pad: int, seed: int) -> Tensor:
    """Ids, then pad, each row shorter than the one before; 0 among the first where pad is not 0."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (B, T), generator=dice)
    if pad != 0:
        ids[:, 0] = 0
    for row in range(1, B):
        ids[row, max(1, T - 2 * row) :] = pad
    return ids


def _plans(callee: Callee, evidence: Evidence) -> list[Plan]:
    """By the names and annotations of its parameters, the likeliest first."""
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
        evidence.tried.append("its parameters are neither a length, lengths nor token ids")
    if pad is not None:
        roles = [each | {"pad": pad} if "ids" in each else each for each in roles]
    return [Plan(each, _questions(each, _pads(callee, each))) for each in roles]


def _of_one(name: str, is_count: bool, callee: Callee, has_pad: bool) -> list[dict[str, str]]:
    """What one parameter beside the pad id may be."""
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
    """What two parameters beside the pad id may be."""
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
    """The pad ids that it is asked with: the one it keeps; else its default, and another."""
    owner = getattr(callee.body, "__self__", None)
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if PAD.fullmatch(name) and _is_whole(value):
            return [value]
    default = next((each.default for each in callee.parameters if each.name == roles.get("pad")), 0)
    return [default if _is_whole(default) else 0, *([3] if "pad" in roles else [])]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _questions(roles: dict[str, str], pads: list[int]) -> list[tuple[str, Question]]:
    if "ids" in roles:
        asks: list[tuple[str, Question]] = []
        for B, T, pad, seed in ((3, 7, pads[0], 1), (2, 5, pads[-1], 2)):
            ids = _ids(B, T, pad, seed)
            asks.append((f"ids [{B}, {T}], pad {pad}", {"ids": ids, "ids again": ids, "pad": pad}))
        return asks
    if "lengths" in roles:
        some = (torch.tensor([5, 3, 1]), torch.tensor([7, 2]))
        return [(f"lengths {each.tolist()}", {"lengths": each, "size": int(each.max())}) for each in some]
    return [(f"length {T}", {"size": T, "size again": T}) for T in (5, 7, 2)]


def _is_mask(asked: Asked) -> bool:
    return asked.output is not None and _spread(asked) is not None


# Judging


def _marks(mask: Tensor) -> tuple[str, Tensor] | None:
    """What kind of mask it is, and what is marked: True, 1, or what hides when added. None: no mask."""
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
    shape: str  # that it came in


def _spread(asked: Asked) -> _Spread | None:
    """What is marked, for every query and key; None for numbers and shapes that are no mask's."""
    assert asked.output is not None
    B, T = _sizes(asked.given)
    marks = _marks(asked.output)
    if marks is None:
        return None
    kind, marked = marks
    shape, of_ids = list(marked.shape), "ids" in asked.given
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


def _read(evidence: Evidence, answered: list[Asked]) -> list[Reading] | Verdict:
    """What is marked is what may be seen, or what is hidden; what is added hides."""
    crashed = [asked for asked in evidence.asked if asked.output is None]
    if crashed:
        return Verdict(unjudged=f"it works for {answered[0].probe}, and raises for {crashed[0].probe}")
    kind = _kind(answered)
    if kind is None:
        return Verdict(unjudged="its shape or its numbers are not the same kind of mask each time")
    if kind == "NaN":
        return Verdict(faults=[("mask holds NaN", f"for {answered[0].probe} it holds NaN")])
    means = _means(evidence)
    if kind == "0 and 1" and means.added and not re.search(r"(?i)masked_fill|bool", own_text(evidence)):
        detail = "it says it is added to the scores; it holds 0 and 1"
        return Verdict(faults=[("mask of 0 and 1 that is to be added", detail)])
    meant = _meant(evidence)
    right = {words: each.pattern for words, each in RIGHT.items() if meant <= each.hides}
    faults = [fault for fault in FAULTS if _concerns(fault, meant)]
    if kind == "added":
        return [Reading(_seen(answered, False), right, faults)]
    return [
        Reading(_seen(answered, attends), right, faults if means.true_attends in (None, attends) else [])
        for attends in (True, False)
    ]


def _kind(answered: list[Asked]) -> str | None:
    """The kind of all of them; None where one is no mask."""
    kinds = {None if spread is None else spread.kind for spread in map(_spread, answered)}
    if None in kinds:
        return None
    return next(kind for kind in ("NaN", "added", "bool", "0 and 1") if kind in kinds)


def _seen(answered: list[Asked], attends: bool) -> list[Asked]:
    """The masks as patterns of what may be seen; `attends`: whether what is marked is."""
    seen = []
    for asked in answered:
        spread = _spread(asked)
        assert spread is not None
        seen.append(replace(asked, output=spread.marked if attends else ~spread.marked))
    return seen


def _means(evidence: Evidence) -> Said:
    """What its docstring and comments say of the mask."""
    words = words_in(own_text(evidence))
    if not words:
        return Said()
    about = "\n".join(f"mask: {line.strip()}" for line in words.splitlines())  # all of it is about masks
    means = said_about([f'"""{about}"""'], "mask")
    return means if means.in_words else replace(means, true_attends=None)


def _meant(evidence: Evidence) -> frozenset[str]:
    """What its name says it hides."""
    roles = {role for asked in evidence.asked for role in asked.given}
    if not roles & {"ids", "lengths"}:
        return FUTURE
    word = words_of(evidence.name)
    return frozenset(
        hidden for hidden, pattern in (("causal", CAUSAL), ("padding", PADDING)) if pattern.search(word)
    )


def _concerns(fault: StepFault, meant: frozenset[str]) -> bool:
    """Whether a mask that is meant to hide this can have the fault. Any mask may hide nothing on purpose."""
    return bool(fault.about & meant) if meant else fault.key != "mask hides nothing"


def _refine(evidence: Evidence, answered: list[Asked], verdict: Verdict) -> Verdict:
    """In which convention it is right or wrong, and whether its words say so, too."""
    kind, spread = _kind(answered), _spread(answered[0])
    assert kind is not None and spread is not None
    attends = kind != "added" and verdict.reading == 0
    verdict.words, verdict.errors = [f"it gives {KINDS[kind]}, {spread.shape}"], {}
    if verdict.right:
        return _as_its_words(evidence, verdict, kind, attends)
    if kind == "added" and _is_right_turned_around(answered):
        detail = "-inf stands where keys should be seen"
        return verdict.becomes("mask added with the signs exchanged", detail)
    if verdict.faults:
        means = "seen" if attends else "hidden"
        detail = f"with {MARKS[kind]} for what is {means}, it is this in every question"
        verdict.faults = [(verdict.faults[0][0], detail)]
    elif not _meant(evidence):
        verdict.unjudged = "what it is meant to hide cannot be told from its name"
    return verdict


def _is_right_turned_around(answered: list[Asked]) -> bool:
    right = {words: each.pattern for words, each in RIGHT.items()}
    return bool(compare([Reading(_seen(answered, True), right, ())]).right)


def _as_its_words(evidence: Evidence, verdict: Verdict, kind: str, attends: bool) -> Verdict:
    """A right mask: whether what is marked means what its words say."""
    promised = None if kind == "added" else _means(evidence).true_attends
    if promised is not None and promised is not attends:
        means, is_right = ("seen" if each else "hidden" for each in (promised, attends))
        detail = f"it says {MARKS[kind]} means {means}; it is right where {MARKS[kind]} means {is_right}"
        return verdict.becomes("mask says the opposite of its words", detail)
    verdict.words.append(f"{MARKS[kind]} where a key {'may be seen' if attends else 'is hidden'}")
    return verdict


MASK = Step(FAULTS, _plans, _is_mask, _read, _refine, insists=False)
