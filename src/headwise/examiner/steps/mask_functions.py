"""Functions that make a mask: the future hidden, padding hidden, or both.

Letters: B batch, T queries, S keys. Patterns are bool [B, T, S], True where a query may see a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..evidence import Asked, Evidence
from ..examine.words import said_about
from .counterfactuals import Callee, Question, StepFault, Verdict, own_text, words_in, words_of

STEP = "mask"
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


def _fault(
    key: str, title: str, formula: str, hints: tuple[str, str, str], why: str, repair: str = T1,
    right: str = CAUSAL_RIGHT, lines: tuple[str, ...] = TRIANGLES,
) -> StepFault:  # fmt: skip
    return StepFault(key, title, formula, right, hints, why, repair, lines=lines, of=STEP)


FAULTS = [
    _fault(
        "mask hides the position itself",
        "the diagonal is on the wrong side: no position may see itself, and the first sees nothing",
        "tril(ones, diagonal=-1), or triu(ones) as what is hidden",
        (
            "Print the mask for a length of 3: what may the first position see?",
            "The diagonal is hidden: it should be seen.",
            "What is seen is tril(ones); what is hidden is triu(ones, diagonal=1).",
        ),
        "The first query has no key left: its weights are NaN, and with it all that follows.",
    ),
    _fault(
        "mask shows the next position",
        "one position too many is seen: each may see the one after it",
        "tril(ones, diagonal=1), or triu(ones, diagonal=2) as what is hidden",
        (
            "Print the mask for a length of 3: what may the first position see?",
            "It may see the second: the very token it is to predict.",
            "What is seen is tril(ones); what is hidden is triu(ones, diagonal=1).",
        ),
        "The model reads the answer: the loss falls at once, and it has learned nothing.",
    ),
    _fault(
        "mask shows the future",
        "the triangle is turned around: each position sees itself and what comes after, not what came before",
        "triu in place of tril",
        (
            "Print the mask for a length of 3: what may the last position see?",
            "The past is hidden, and the future is seen.",
            "Exchange triu and tril.",
        ),
        "A model that predicts the next token would be shown it, and nothing of what came before.",
    ),
    _fault(
        "mask says the opposite of its words",
        "it marks what it says it hides, or the other way round",
        "True and False exchanged",
        (
            "Compare the mask with what its docstring or comment says.",
            "It says that 1 or True means one thing; the numbers mean the other.",
            "Exchange == and !=, or put a ~ in front.",
        ),
        "Whoever reads the words and fills where the mask says hides all that should be seen.",
        lines=(r"return", *LINES),
    ),
    _fault(
        "mask added with the signs exchanged",
        "it is added to the scores, and has -inf where a key may be seen, 0 where it is hidden",
        "-inf on and below the diagonal",
        (
            "Add it to scores of 0 and take the softmax: who is seen?",
            "-inf hides. It stands where keys should be seen.",
            "torch.full((T, T), -inf).triu(1): -inf above the diagonal alone.",
        ),
        "All that should be seen is hidden; where a row is all -inf, NaN.",
        "mask = torch.full((T, T), float('-inf')).triu(1)  # added to the scores",
    ),
    _fault(
        "mask holds NaN",
        "0 times -inf is NaN: the mask has NaN where it should have 0",
        "triu(ones, 1) * -inf",
        (
            "Print the mask.",
            "NaN comes of 0 * inf.",
            "Fill instead of multiplying: torch.full((T, T), -inf).triu(1), or masked_fill.",
        ),
        "Every score it is added to becomes NaN.",
        "mask = torch.full((T, T), float('-inf')).triu(1)  # added to the scores",
        lines=(r"\*\s*-?\(?-?\s*(float|torch\.inf|math\.inf|np\.inf)|inf.*\*", r"inf"),
    ),
    _fault(
        "mask of 0 and 1 that is to be added",
        "it says that it is added to the scores, and holds 0 and 1: that hides nothing",
        "0 and 1 in place of 0 and -inf",
        (
            "What does adding 1 to a score do?",
            "exp(s + 1) is 2.7 times exp(s): nothing is hidden.",
            "masked_fill the ones with -inf.",
        ),
        "Hidden keys get more weight than others, not none.",
        "mask = mask.float().masked_fill(mask, float('-inf'))",
        lines=(r"return",),
    ),
    _fault(
        "mask lets padding or the future through",
        "a key counts as seen if it is real OR lies in the past; both must hold",
        "causal | padding",
        (
            "Print the row of the first query: is the future hidden?",
            "Two masks that say what is seen are joined by and; those that say what is hidden by or.",
            "Exchange | and &.",
        ),
        "Every real token of the future is seen.",
        "mask = causal & (ids != pad)[:, None, None, :]",
        "seen: the past, and no padding",
        (r"\||logical_or|&|logical_and|maximum|minimum|\bor\b|\+|\*", r"return"),
    ),
    _fault(
        "padding mask on the queries",
        "it hides rows, the queries that are padding, in place of columns, the keys",
        "(ids != pad)[:, None, :, None]",
        (
            "Add it to scores [B, H, T, S]: which axis does it change along?",
            "It changes along the queries; keys are the last axis.",
            "The 1s belong before the last axis: [:, None, None, :].",
        ),
        "Real queries go on attending to padding, and rows that are all hidden become NaN.",
        T2, PAD_RIGHT, (r"unsqueeze|None|expand|view|reshape|newaxis", r"return"),
    ),
    _fault(
        "padding mask off by one",
        "one key too many or too few is hidden",
        "arange <= lengths, or arange < lengths - 1",
        (
            "For a length of 2: which positions are real?",
            "Positions 0 and 1, those with arange < length.",
            "Exchange <= and <, or >= and >.",
        ),
        "One padding token is attended to in every sample, or the last real one is lost.",
        "mask = torch.arange(S) < lengths[:, None]  # [B, S], True where a key is real",
        "arange(S) < lengths[:, None]", LINES,
    ),
    _fault(
        "pad id ignored",
        "it looks for another number than the pad id it is given",
        "ids != 0, whatever pad is",
        (
            "Call it with another pad id.",
            "The result does not change.",
            "Compare with the argument.",
        ),
        "Real tokens are hidden and padding is seen, as soon as the pad id is not 0.",
        "mask = (ids != pad)[:, None, None, :]", PAD_RIGHT, LINES,
    ),
    _fault(
        "mask hides nothing",
        "every key may be seen by every query",
        "ones",
        (
            "Print the mask: is anything hidden?",
            "All its entries say the same.",
            "Compare the ids with pad, or take a triangle.",
        ),
        "What should be hidden is attended to.",
        lines=(r"return",),
    ),
]  # fmt: skip
KINDS = {"bool": "True and False", "0 and 1": "0 and 1", "added": "what is added to the scores"}
BY_KEY = {fault.key: fault for fault in FAULTS}


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


class _Plan(NamedTuple):
    """What the parameters are taken for; role -> parameter."""

    roles: dict[str, str]
    kind: str  # "size", "tokens", "lengths", "pair"


def _plans(callee: Callee) -> list[_Plan]:
    """By their names and annotations, the likeliest first."""
    needed = [one for one in callee.parameters if one.default is one.empty and one.name not in callee.fixed]
    optional = [one for one in callee.parameters if one.default is not one.empty]
    pad = next(
        (one.name for one in (*needed, *optional) if PAD.fullmatch(one.name) and "mask" not in one.name), None
    )
    rest = [one for one in needed if one.name != pad]
    names = [one.name for one in rest]
    whole = [one.annotation in (int, "int") for one in rest]
    found: list[_Plan] = []
    pads = {} if pad is None else {"pad": pad}
    if len(rest) == 1:
        lengths, tokens = LENGTHS.fullmatch(names[0]), TOKENS.fullmatch(names[0])
        most = next((one.name for one in optional if MOST.fullmatch(one.name) and one.default is None), None)
        as_lengths = _Plan({"lengths": names[0]} | ({} if most is None else {"size": most}), "lengths")
        as_tokens, as_size = _Plan({"ids": names[0]} | pads, "tokens"), _Plan({"size": names[0]}, "size")
        if whole[0]:
            return [as_size]
        first = (
            [as_lengths]
            if lengths
            else [as_tokens, as_lengths]
            if tokens or pads
            else [as_size, as_lengths, as_tokens]
        )
        found = [*first, *(one for one in (as_size, as_tokens) if one not in first)]
    elif len(rest) == 2:
        if LENGTHS.fullmatch(names[0]):
            found.append(_Plan({"lengths": names[0], "size": names[1]}, "lengths"))
        if all(SIZE.fullmatch(one) or is_int for one, is_int in zip(names, whole, strict=True)):
            found.append(_Plan({"size": names[0], "size again": names[1]}, "size"))
        found.append(_Plan({"ids": names[0], "ids again": names[1]} | pads, "pair"))
        if pad is None and not any(TOKENS.fullmatch(one) for one in names[1:]):
            found.insert(0, _Plan({"ids": names[0], "pad": names[1]}, "tokens"))
    return found


def _questions(kind: str, pads: list[int]) -> list[tuple[str, dict[str, Any]]]:
    if kind == "size":
        return [(f"length {T}", {"size": T, "size again": T}) for T in (5, 7, 2)]
    if kind == "lengths":
        some = (torch.tensor([5, 3, 1]), torch.tensor([7, 2]))
        return [(f"lengths {one.tolist()}", {"lengths": one, "size": int(one.max())}) for one in some]
    asks = []
    for B, T, pad, seed in ((3, 7, pads[0], 1), (2, 5, pads[-1], 2)):
        ids = _ids(B, T, pad, seed)
        asks.append((f"ids [{B}, {T}], pad {pad}", {"ids": ids, "ids again": ids, "pad": pad}))
    return asks


def examine(callee: Callee, evidence: Evidence) -> None:
    """The first way to call it that gives something like a mask; then all questions in that way."""
    for plan in _plans(callee):
        pad = next((one.default for one in callee.parameters if one.name == plan.roles.get("pad")), 0)
        set_pad = isinstance(pad, int) and not isinstance(pad, bool)
        kept = _kept_pad(callee)
        pads = [kept] if kept is not None else [pad if set_pad else 0, *([3] if "pad" in plan.roles else [])]
        questions = _questions(plan.kind, pads)
        for numpy in (False, True):
            callee.roles, callee.numpy = plan.roles, numpy
            first, _ = callee.answer(*questions[0])
            if first.output is not None and _marks(first.output) is not None and _spread(first) is not None:
                for probe, question in questions:
                    callee.ask(evidence, probe, question)
                callee.tell(evidence)
                return
        shape = "nothing" if first.output is None else f"{first.output.dtype} {list(first.output.shape)}"
        words = ", ".join(f"{name} ({role})" for role, name in plan.roles.items())
        why = first.problem.message if first.problem is not None else shape
        evidence.tried.append(f"called with {words} it gave: {why}")
    if not evidence.tried:
        evidence.tried.append("its parameters are neither a length, lengths nor token ids")


def _kept_pad(callee: Callee) -> int | None:
    """A pad id that the instance keeps."""
    owner = getattr(callee.body, "__self__", None)
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if PAD.fullmatch(name) and isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


# Judging


class _Marks(NamedTuple):
    kind: str  # "bool", "0 and 1", "added", "NaN"
    marked: Tensor  # True, 1, or what hides when added


def _marks(mask: Tensor) -> _Marks | None:
    """What kind of mask it is; None: none."""
    if mask.dtype is torch.bool:
        return _Marks("bool", mask)
    if mask.is_complex() or mask.numel() == 0:
        return None
    if bool(mask.isnan().any()):
        return _Marks("NaN", mask.isnan())
    if bool(((mask == 0) | (mask == 1)).all()):
        return _Marks("0 and 1", mask == 1)
    hides = mask <= -1e4
    return _Marks("added", hides) if bool((hides | (mask == 0)).all()) else None


def _spread(asked: Asked) -> tuple[Tensor, str] | None:
    """What is marked as [B, T, S], and the shape it came in; None for shapes that are no mask's."""
    assert asked.output is not None
    made = _marks(asked.output)
    B, T = _sizes(asked.given)
    if made is None:
        return None
    marked = made.marked
    shape = list(marked.shape)
    if shape == [T, T] and not ("ids" in asked.given and B == T):
        return marked[None].expand(B, T, T), "[T, S]"
    if len(shape) == 4 and shape[1] == 1:
        marked, four = marked[:, 0], "1, "
    elif len(shape) == 3:
        four = ""
    elif shape == [B, T]:
        return marked[:, None].expand(B, T, T), "[B, S]"
    elif shape == [T, B] and T != B and "ids" in asked.given:
        return marked.T[:, None].expand(B, T, T), "[S, B]"
    else:
        return None
    if marked.shape[0] not in (1, B) or marked.shape[1] not in (1, T) or marked.shape[2] not in (1, T):
        return None
    if marked.shape[1:] == (1, 1):
        return None
    names = ["1" if n == 1 else letter for n, letter in zip(marked.shape, "BTS", strict=True)]
    told = f"[{names[0]}, {four}{names[1]}, {names[2]}]"
    return marked.expand(B, T, T), told


def _sizes(given: Question) -> tuple[int, int]:
    if "ids" in given:
        return int(given["ids"].shape[0]), int(given["ids"].shape[1])
    if "lengths" in given:
        return len(given["lengths"]), int(given["size"])
    return 1, int(given["size"])


Pattern = Callable[[Question], Tensor]  # bool [B, T, S]: what may be seen


def _triangle(diagonal: int, flipped: bool = False) -> Pattern:
    def pattern(given: Question) -> Tensor:
        B, T = _sizes(given)
        ones = torch.ones(B, T, T, dtype=torch.bool)
        return ones.triu(diagonal) if flipped else ones.tril(diagonal)

    return pattern


def _real(given: Question, shift: int = 0, pad: int | None = None) -> Tensor:
    """bool [B, S], which keys are no padding."""
    if "lengths" in given:
        return torch.arange(int(given["size"])) < given["lengths"][:, None] + shift
    real = given["ids"] != (given["pad"] if pad is None else pad)
    if not shift:
        return real
    return torch.arange(real.shape[1]) < real.sum(1)[:, None] + shift


def _keys(real: Callable[[Question], Tensor]) -> Pattern:
    return lambda given: real(given)[:, None].expand(-1, _sizes(given)[1], -1)


def _rows(given: Question) -> Tensor:
    return _real(given)[..., None].expand(-1, -1, _sizes(given)[1])


def _both(given: Question) -> Tensor:
    return _triangle(0)(given) & _keys(_real)(given)


def _everything(given: Question) -> Tensor:
    return torch.ones_like(_triangle(0)(given))


RIGHT: dict[str, Pattern] = {
    "no position sees those after it": _triangle(0),
    "padding is hidden from every query": _keys(_real),
    "padding and the future are hidden": _both,
    "padding is hidden, and padded queries see nothing": lambda given: _keys(_real)(given) & _rows(given),
    "padding and the future are hidden, and padded queries see nothing": lambda given: (
        _both(given) & _rows(given)
    ),
}
WRONG: list[tuple[str, Pattern]] = [
    ("mask hides the position itself", _triangle(-1)),
    ("mask shows the next position", _triangle(1)),
    ("mask shows the future", _triangle(0, flipped=True)),
    ("mask shows the future", _triangle(1, flipped=True)),
    ("mask lets padding or the future through", lambda given: _triangle(0)(given) | _keys(_real)(given)),
    ("padding mask on the queries", _rows),
    ("padding mask on the queries", lambda given: _triangle(0)(given) & _rows(given)),
    ("padding mask off by one", _keys(lambda given: _real(given, 1))),
    ("padding mask off by one", _keys(lambda given: _real(given, -1))),
    ("pad id ignored", _keys(lambda given: _real(given, 0, 0))),
    ("pad id ignored", _keys(lambda given: _real(given, 0, 1))),
    ("mask hides the position itself", lambda given: _triangle(-1)(given) & _keys(_real)(given)),
    ("mask shows the next position", lambda given: _triangle(1)(given) & _keys(_real)(given)),
    ("mask shows the future", lambda given: _triangle(0, flipped=True)(given) & _keys(_real)(given)),
    ("mask shows the future", lambda given: _triangle(1, flipped=True)(given) & _keys(_real)(given)),
    ("mask hides nothing", _everything),
]


def _holds(pattern: Pattern, seen: list[tuple[Question, Tensor]]) -> bool:
    try:
        return all(torch.equal(pattern(given), one) for given, one in seen)
    except (RuntimeError, KeyError, IndexError, TypeError):
        return False


def judge(evidence: Evidence) -> Verdict:
    """Which mask it is, and in which convention."""
    answered = [one for one in evidence.asked if one.output is not None]
    if not answered:
        return Verdict(unjudged="; ".join(evidence.tried) or "it gave no mask")
    crashed = [one for one in evidence.asked if one.output is None]
    if crashed:
        return Verdict(unjudged=f"it works for {answered[0].probe}, and raises for {crashed[0].probe}")
    made = [_marks(one.output) for one in answered if one.output is not None]
    spread = [_spread(one) for one in answered]
    if any(one is None for one in (*made, *spread)):
        return Verdict(unjudged="its shape or its numbers are not the same kind of mask each time")
    kinds = {one.kind for one in made if one is not None}
    if "NaN" in kinds:
        return Verdict("", BY_KEY["mask holds NaN"], detail=f"for {answered[0].probe} it holds NaN")
    kind = "added" if "added" in kinds else kinds.pop()
    marked: list[tuple[Question, Tensor]] = [
        (one.given, pair[0]) for one, pair in zip(answered, spread, strict=True) if pair is not None
    ]
    shapes = [pair[1] for pair in spread if pair is not None]
    text = own_text(evidence)
    about = "\n".join(
        f"mask: {line.strip()}" for line in words_in(text).splitlines()
    )  # all of it is about masks
    said = said_about([f'"""{about}"""'], "mask") if about else None
    words = [f"it gives {KINDS[kind]}, {shapes[0]}"]
    if kind == "added":
        return _judged(marked, [False], words, kind, None, evidence)
    told = said.true_attends if said is not None and said.in_words else None
    if (
        said is not None
        and said.added
        and not bool(re.search(r"(?i)masked_fill|bool", text))
        and kind == "0 and 1"
    ):
        return Verdict(
            "",
            BY_KEY["mask of 0 and 1 that is to be added"],
            detail="it says it is added to the scores; it holds 0 and 1",
        )
    return _judged(marked, [True, False], words, kind, told, evidence)


def _judged(
    marked: list[tuple[Question, Tensor]], polarities: list[bool], words: list[str], kind: str,
    told: bool | None, evidence: Evidence,
) -> Verdict:  # fmt: skip
    one = "True" if kind == "bool" else "1" if kind == "0 and 1" else "-inf"
    meant = _meant(evidence)
    for attends in polarities:
        seen = [(given, each if attends else ~each) for given, each in marked]
        for sentence, pattern in RIGHT.items():
            if not _holds(pattern, seen) or not _fits(meant, sentence):
                continue
            if told is not None and told is not attends:
                means, is_right = ("seen" if each else "hidden" for each in (told, attends))
                detail = f"it says {one} means {means}; it is right where {one} means {is_right}"
                return Verdict("", BY_KEY["mask says the opposite of its words"], detail=detail, words=words)
            does = "may be seen" if attends else "is hidden"
            return Verdict(sentence, words=[*words, f"{one} where a key {does}"], errors={})
    found: list[tuple[str, bool]] = []
    for attends in polarities if told is None else [told]:
        seen = [(given, each if attends else ~each) for given, each in marked]
        found += [(key, attends) for key, pattern in WRONG if _holds(pattern, seen) and _concerns(key, meant)]
    if kind == "added" and not found:
        back = [(given, each) for given, each in marked]
        if any(_holds(pattern, back) for pattern in RIGHT.values()):
            return Verdict(
                "",
                BY_KEY["mask added with the signs exchanged"],
                detail="-inf stands where keys should be seen",
                words=words,
            )
    keys = list(dict.fromkeys(key for key, _ in found))
    if (
        kind == "added"
        and "mask shows the future" in keys
        and _holds(_triangle(0), [(g, m) for g, m in marked])
    ):
        keys = ["mask added with the signs exchanged"]
    if not keys:
        return Verdict(
            None,
            words=words,
            unjudged="" if meant else "what it is meant to hide cannot be told from its name",
        )
    keys.sort(key=lambda key: [each.key for each in FAULTS].index(key))
    first, *others = keys
    means = "seen" if dict(found).get(first, False) else "hidden"
    detail = f"with {one} for what is {means}, it is this in every question"
    return Verdict("", BY_KEY[first], [BY_KEY[key] for key in others], detail=detail, words=words)


def _meant(evidence: Evidence) -> str:
    """What its name says it hides: "causal", "padding", "both" or ""."""
    word = words_of(evidence.name)
    asks = {role for one in evidence.asked for role in one.given}
    causal, padding = bool(CAUSAL.search(word)), bool(PADDING.search(word))
    if "ids" not in asks and "lengths" not in asks:
        return "causal"
    if causal and padding:
        return "both"
    return "causal" if causal else "padding" if padding else ""


def _fits(meant: str, sentence: str) -> bool:
    """Whether a right mask is the one that its name promises."""
    if meant == "causal":
        return "after" in sentence or "future" in sentence
    if meant == "padding":
        return "padding" in sentence
    return meant != "both" or "and the future" in sentence


def _concerns(key: str, meant: str) -> bool:
    if key == "mask hides nothing":
        return bool(meant)
    if meant == "causal":
        return not key.startswith("pad")
    if meant == "padding":
        return key.startswith("pad") or "padding" in key
    return True
