"""What a report says, in sentences and rows, harmless to print; and how much of it a hint lets through."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

from ...errors import ArgumentError
from ...show.texts import plain
from ..report import Finding, Named, Other, Problem, Report, line_in_words


@dataclass(frozen=True)
class Heading:
    """One line that says it all; `mark` is "right" or "wrong"."""

    mark: str
    text: str


@dataclass(frozen=True)
class Quote:
    """A line of the learner's source."""

    place: str  # "mha.py:41", or "" where it is not known
    line: int | None
    text: str


@dataclass(frozen=True)
class Row:
    """A label and what it stands for; code is set as it was written."""

    label: str
    text: str
    code: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows that stand together."""

    rows: tuple[Row, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Listed:
    """A title and sentences under it, each with its mark: "right", "wrong", "unknown", "item"."""

    title: str
    items: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True)
class Note:
    """A remark, said quietly."""

    text: str


Part = Heading | Quote | Rows | Listed | Note


MARKS = {"right": "✓", "wrong": "✗", "unknown": "?", "item": "·", "": " "}

PLAINER = {  # for encodings that lack them; whatever else is missing becomes \u....
    "✓": "ok", "✗": "x", "·": "-", "→": ">", "│": "|", "↵": "\\n", "⇥": "\\t",
    "\N{REPLACEMENT CHARACTER}": "?",
    "√": "sqrt", "×": "x", "−": "-", "ᵀ": "^T", "…": "...", "≠": "!=", "≤": "<=", "≥": ">=", "≈": "~",
    "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
LONGEST = 1_000  # characters of one line: a message may hold all that a program printed
MOST_LINES = 20


def harmless(text: str) -> str:
    """Line by line without control characters; tabs as spaces, what is far too long cut off.

    Example:
        >>> harmless("a\\x1b[31m\\n\\tb")
        'a�[31m\\n    b'
    """
    lines = str(text)[: 2 * LONGEST * MOST_LINES].strip("\r\n").splitlines()
    shown = [plain(line.expandtabs(4).rstrip(), LONGEST) for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"... and {len(lines) - MOST_LINES} more lines")
    return "\n".join(shown)


def one_line(text: str) -> str:
    """`harmless`, with spaces where lines ended."""
    return " ".join(harmless(text).split())


def fitting(text: str, encoding: str | None) -> str:
    """The text in letters that `encoding` has; None is the narrowest, ascii.

    Example:
        >>> fitting("✗ scores / √24", "ascii"), fitting("✗ scores / √24", "utf-8")
        ('x scores / sqrt24', '✗ scores / √24')
    """
    encoding = encoding or "ascii"
    try:
        text.encode(encoding)
        return text
    except LookupError:
        encoding = "ascii"
    except UnicodeEncodeError:
        pass
    plainer = "".join(char if _has(encoding, char) else PLAINER.get(char, char) for char in text)
    return plainer.encode(encoding, "backslashreplace").decode(encoding)


def _has(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


WHILE = {
    "import": "while the file was imported",
    "build": "while it was being built",
    "call": "while it was being called",
    "backward": "while gradients were computed",
}
RIGHT = 2e-5  # apart by less than this, two numbers are one: `diagnose.NEAR`, without torch
MOST_TRIED, MOST_ALIKE = 6, 3  # of each, that many are told
LETTERS = {"q": "queries", "k": "keys", "v": "values", "o": "output"}


def sentence(text: str) -> str:
    """On one line, with a full stop."""
    text = one_line(text)
    return text if not text or text[-1] in ".!?:" else f"{text}."


def first_sentence(text: str) -> str:
    """Up to the first full stop that is followed by a capital letter: "v1.2" and "e.g. x" are not ends.

    Example:
        >>> first_sentence("line 3: F is not defined. Import it: import torch.nn.functional as F")
        'line 3: F is not defined'
    """
    return re.split(r"[.] (?=[A-Z])", one_line(text), maxsplit=1)[0].rstrip(".")


def listed(title: str, mark: str, texts: Iterable[str]) -> Listed:
    """Sentences under a title, each once."""
    return Listed(title, tuple((mark, each) for each in dict.fromkeys(map(sentence, texts)) if each))


# Numbers


def compared(report: Report) -> list[Row]:
    """How many probes, how far apart at most, and which; where some are wrong, each of those."""
    if not report.errors:
        return []
    counted = f"{len(report.errors)} probe{'s' * (len(report.errors) != 1)} beside {report.beside}"
    right = {one_line(probe): error for probe, error in report.errors.items() if error <= RIGHT}
    wrong = {one_line(probe): error for probe, error in report.errors.items() if not error <= RIGHT}  # or NaN
    worst = max(right.values(), default=0.0)
    apart = "every number the same" if worst == 0 else f"at most {_size(worst)} apart"
    if not wrong:
        return [Row("Compared", f"{counted}, {apart}: {', '.join(right)}")]
    each = ", ".join(f"{probe} {_size(error)}" for probe, error in wrong.items())
    fine = f"; right: {', '.join(right)}" if right else ""
    return [Row("Compared", f"{counted}. Apart, as a share of the largest number: {each}{fine}")]


def _size(error: float) -> str:
    if not math.isfinite(error):
        return "NaN" if math.isnan(error) else "infinitely far"
    return f"{error:.2g}"


# How the code was understood


def what_was_judged(report: Report) -> list[Note]:
    """Of a file: which class or function, on which line; and which others look like attention."""
    if report.line is None:
        return []
    said = [f"Judged: {_at(report)}"]
    said += [f"{_at(one)}: {one.verdict}" for one in report.others if one.verdict]
    left = [_at(one) for one in report.others if not one.verdict]
    said += [f"not judged, for there is a likelier one: {', '.join(left)} (--name NAME)"] if left else []
    return [Note("; ".join(said))]


def _at(one: Report | Other) -> str:
    where = "" if one.line is None else f" ({line_in_words(one.line, one.cell)})"
    return f"{one_line(one.name)}{where}"


def what_it_is(report: Report) -> list[Row]:
    """What it has inside on purpose."""
    if not report.designs:
        return []
    each = [re.sub(r"[;,] within (it|them|that), right$", "", one_line(one)) for one in report.designs]
    return [Row("It is", sentence("attention with " + "; ".join(each)))]


def how_it_was_built(report: Report) -> list[Row]:
    """With which arguments, and what was tried before."""
    built = [Row("I built it with", one_line(report.built), code=True)] if report.built else []
    tried = "\n".join(one_line(each) for each in report.tried[:MOST_TRIED])
    return [*built, *([Row("I tried", tried)] if tried else [])]


def what_to_do(report: Report) -> list[str]:
    """What to pass, on the command line or in Python, as its reader needs."""
    return report.counsel_for_files if report.on_command_line else report.counsel


def not_told_apart(report: Report) -> str:
    """Which others would have computed the same."""
    names = [one_line(each) for each in report.alike[:MOST_ALIKE]]
    more = len(report.alike) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more else "")
    return f"Ambiguous: in these probes it cannot be told from {listed}; the smallest explanation is named."


def how_it_is_called(report: Report) -> list[Row]:
    """The conventions that were found, one a line."""
    words = "\n".join(one_line(each) for each in report.conventions.words)
    return [Row("How it is called", words)] if words else []


def its_weights(report: Report) -> list[Row]:
    """Where the projections were found, and how."""
    found = {word: report.roles[letter] for letter, word in LETTERS.items() if letter in report.roles}
    if not found:
        return []
    each = ", ".join(
        f"{word} {one_line(role.parameter)}{' (kept as [in, out])' if role.transposed else ''}"
        for word, role in found.items()
    )
    ways = " and ".join(dict.fromkeys(one_line(role.how) for role in found.values() if role.how))
    return [Row("Its weights", each + (f"; found by {ways}" if ways else ""))]


def how_it_ran(report: Report) -> str:
    """What was checked, how long it took, what fenced it in: names alone, what each does is in the JSON."""
    where = f" in {place}" if (place := _place(report, None)) else ""
    took = f" in {report.seconds:.1f} s" if report.seconds >= 0.05 else ""
    named = [one_line(each).partition(":") for each in report.protections]
    fenced = "; ".join(f"without protections{colon}{why}" for name, colon, why in named if name == "none")
    if names := ", ".join(name for name, _, _ in named if name != "none"):
        fenced = f"behind these protections: {names}"
    if missing := ", ".join(one_line(each).partition(":")[0] for each in report.missing_protections):
        fenced += f"{'; ' if fenced else ''}this system lacks: {missing}"
    return f"Checked {one_line(report.name)}{where}{took}{', ' if fenced else ''}{fenced}."


def remarks(report: Report) -> list[Part]:
    """What is no fault, and what nobody can tell."""
    unknown = [finding_in_words(each) for each in report.findings if each.verdict == "unknown"]
    return [
        listed("Different, but equal: no fault", "item", report.equal),
        listed("Could not be judged", "unknown", [*report.not_judged, *unknown]),
    ]


# Faults, findings, exceptions


def fault_in_full(report: Report, fault: Named) -> list[Part]:
    """Its line, and all that is known of it."""
    text = " ".join(harmless(fault.text).strip().split("\n"))
    quote = (
        [Quote(_place(report, fault.line, fault.cell), fault.line, text)]
        if text or fault.line is not None
        else []
    )
    known = (
        Row("You compute", harmless(fault.formula), code=True),
        Row("It should be", harmless(fault.right), code=True),
        Row("Number found", "" if fault.number is None else f"{fault.number:.6g}"),
        Row("How we know", sentence(fault.detail)),
        Row("Why it matters", sentence(fault.why)),
        Row("Repair", "" if fault.tried is False else harmless(fault.repair), code=True),
        Row("Tried", "with this line the file passes" if fault.tried else ""),
    )
    return [*quote, Rows(tuple(row for row in known if row.text))]


def _place(report: Report, line: int | None, cell: int | None = None) -> str:
    """As editors and terminals make links of it."""
    if report.path is None:
        return ""
    path = report.path
    with suppress(OSError, ValueError):  # another drive, a folder that is gone, no path at all
        path = min(path, os.path.relpath(path), key=len)
    return one_line(path) + (
        "" if line is None else f":{line}" if cell is None else f", {line_in_words(line, cell)}"
    )


def other_findings(report: Report) -> list[Finding]:
    """What was found wrong beside the numbers and is not told as a fault anyway."""
    told = {fault.key for fault in report.faults}
    return [each for each in report.findings if each.verdict == "wrong" and each.fault not in told]


def finding_in_words(finding: Finding) -> str:
    """What was looked at, and what was seen."""
    line = "" if finding.line is None else f" ({line_in_words(finding.line, finding.cell)})"
    return one_line(finding.name) + line + (f": {one_line(finding.detail)}" if finding.detail else "")


def stops(report: Report, told: int = 4, headline: str = "", exceptions: bool = False) -> Listed:
    """What was raised, once a line of source: 1 tells where, 2 also what, 3 also what it means,
    4 also what to do. What `headline` says is not repeated.
    `exceptions`: without what is told in words, not raised.
    """
    lines_of_faults = {(fault.cell, fault.line) for fault in report.faults if fault.line is not None}
    probes: dict[tuple[object, ...], list[str]] = {}
    firsts: dict[tuple[object, ...], tuple[Problem | None, str]] = {}
    for problem, meaning in zip_longest(report.problems, report.explained):
        place: tuple[object, ...] = (meaning,)
        if problem is not None:
            if problem.stage == "import" and (problem.cell, problem.line) in lines_of_faults:
                continue  # told as that fault
            if exceptions and not problem.kind[:1].isupper():
                continue
            where = problem.message if problem.line is None else (problem.cell, problem.line)
            place = (problem.stage, problem.kind, where)
        firsts.setdefault(place, (problem, meaning or ""))
        probes.setdefault(place, []).extend([problem.probe] if problem and problem.probe else [])
    said: list[tuple[str, str]] = []
    for place, (problem, meaning) in firsts.items():
        if problem is not None:
            said.append(("wrong", sentence(problem_in_words(problem, probes[place], message=told >= 2))))
        meaning, first = one_line(meaning), first_sentence(meaning)
        if headline and first == first_sentence(headline):
            meaning = meaning[len(first) :].lstrip(". ")
        if told >= 3 and meaning and meaning.rstrip(".") not in headline:
            said.append(("item", sentence(meaning if told >= 4 else first)))
    return Listed("What stopped it", tuple(dict.fromkeys(said)))


def problem_in_words(problem: Problem, probes: Sequence[str] = (), message: bool = True) -> str:
    """What was raised, at which line, while what was being done."""
    words = [one_line(problem.kind)]
    if problem.line is not None:
        words.append(f"at {line_in_words(problem.line, problem.cell)}")
    if problem.stage in WHILE:
        words.append(WHILE[problem.stage])
    if probes:
        more = f" and {len(probes) - 3} more" if len(probes) > 3 else ""
        words.append(f"(probe{'s' * (len(probes) > 1)}: {', '.join(map(one_line, probes[:3]))}{more})")
    said = one_line(problem.message)
    return " ".join(words) + (f": {said}" if message and said else "")


LOOKED_AT = "Looked at beside the numbers"
RIGHT_ALREADY = "Where it is right already"
PARTS_AT = "Goes wrong first at"
WATCH_OUT = "Right here, and yet to be watched"


def tell(report: Report, hint: int | None = None) -> list[Part]:
    """The report in parts, harmless to print.

    Args:
        report: the verdict.
        hint: None for all of it, as where it is right or was not judged. 1, 2 or 3: that it is not right yet,
            and the hints up to that one; never the fault's name, formula, line or repair. From the second
            on, where the output is right; with the third, the first tensor that parts from the truth.

    Raises:
        ArgumentError: another hint.
    """
    if hint not in (None, 1, 2, 3):
        raise ArgumentError(f"hint must be 1, 2, 3 or None: got {hint!r}; start with 1")
    if report.ok:
        parts = _right(report)
    elif not report.judged:
        parts = _not_judged(report)
    elif hint is None:
        parts = _wrong(report)
    else:
        parts = _hinted(report, hint)
    parts = [*what_was_judged(report), *parts]
    return [part for part in parts if part or not isinstance(part, Rows | Listed)]


def _right(report: Report) -> list[Part]:
    name, summary = one_line(report.name), one_line(report.summary)
    if not summary:
        summary = f"{name} computes what {report.beside} computes"
    elif name not in summary:
        summary = f"{name}: {summary}"
    fine = ", ".join(one_line(each.name) for each in report.findings if each.verdict == "right")
    also = [Row("Also right", fine)] if fine else []
    return [
        Heading("right", f"{summary.rstrip('.')}. Well done!"),
        Rows(
            (*what_it_is(report), *compared(report), *how_it_is_called(report), *its_weights(report), *also)
        ),
        listed(LOOKED_AT, "wrong", map(finding_in_words, other_findings(report))),
        listed(WATCH_OUT, "item", map(_remark, report.remarks)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _not_judged(report: Report) -> list[Part]:
    name, summary = one_line(report.name), one_line(report.summary)
    why = first_sentence(summary) or "it gave no numbers"
    return [
        Heading("unknown", f"{name} was not judged: neither right nor wrong"),
        Rows(
            (
                Row("Why", sentence(why)),
                *what_it_is(report),
                *how_it_was_built(report),
                *compared(report),
                *how_it_is_called(report),
            )
        ),
        stops(report, headline=f"{summary} {why}", exceptions=True),
        listed("What you can do", "item", what_to_do(report)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _wrong(report: Report) -> list[Part]:
    headline = _headline(report)
    parts: list[Part] = [Heading("wrong", headline)]
    for fault in report.faults:
        if len(report.faults) > 1:
            parts.append(Heading("wrong", _named(fault)))
        parts += fault_in_full(report, fault)
    if report.alike:
        parts.append(Note(not_told_apart(report)))
    first = [] if report.first_wrong is None else [Row(PARTS_AT, one_line(report.first_wrong))]
    weights = [] if report.faults else its_weights(report)  # without a name for it, they may be the reason
    return [
        *parts,
        stops(report, headline=headline),
        listed(LOOKED_AT, "wrong", map(finding_in_words, other_findings(report))),
        listed(RIGHT_ALREADY, "right", report.where_right),
        Rows((*first, *what_it_is(report), *compared(report), *how_it_is_called(report), *weights)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _headline(report: Report) -> str:
    """What a learner reads first, and perhaps alone."""
    name, summary = one_line(report.name), one_line(report.summary)
    if len(report.faults) == 1:
        return _named(report.faults[0])
    if report.faults:
        keys = [one_line(each.key) for each in report.faults]
        if len(set(keys)) < len(keys):
            keys = [one_line(each.title) for each in report.faults]
        return f"{len(keys)} faults: {', and '.join(keys)}"
    if report.explained:  # begins with the line
        return first_sentence(report.explained[0])
    if report.problems:
        said = problem_in_words(report.problems[0])
    elif wrong := other_findings(report):
        said = finding_in_words(wrong[0])
    else:
        said = summary or f"this is not what {report.beside} computes"
    return said if name in said else f"{name}: {said}"


def _remark(named: Named) -> str:
    line = f" ({line_in_words(named.line, named.cell)})" if named.line is not None else ""
    return f"{_named(named)}{line}. Repair: {one_line(named.repair)}"


def _named(fault: Named) -> str:
    return f"{one_line(fault.key)}: {one_line(fault.title)}"


def _hinted(report: Report, hint: int) -> list[Part]:
    stopped, findings = stops(report, hint), other_findings(report)
    if not (report.faults or stopped or findings):
        seen = Note(
            "No mistake with a name fits these numbers, so there is no hint: this is all that was seen."
        )
        return [*_wrong(report), seen]
    verdict = "is not right yet" if "(" in report.beside else f"is not yet the same as {report.beside}"
    if report.problems and not report.errors:
        verdict = "stops before it can be compared"
    elif stopped and not report.faults:
        verdict = "stops in some of the probes"
    parts: list[Part] = [Heading("wrong", f"{one_line(report.name)} {verdict}")]
    several = len(report.faults) > 1
    if several:
        parts.append(Note(f"There are {len(report.faults)} things to find."))
    for number, fault in enumerate(report.faults, 1):
        label = f"{number} of {len(report.faults)}, hint" if several else "Hint"
        rows = [Row(f"{label} {at}", one_line(text)) for at, text in enumerate(fault.hints[:hint], 1)]
        parts.append(Rows(tuple(rows)))
    parts.append(stopped)
    if hint == 1 and findings:
        parts.append(listed(LOOKED_AT, "wrong", ["something there is not right: hint 2 says what"]))
    elif findings:
        words = [finding_in_words(each) if hint == 3 else one_line(each.name) for each in findings]
        parts.append(listed(LOOKED_AT, "wrong", words))
    if hint >= 2:
        parts.append(listed(RIGHT_ALREADY, "right", report.where_right))
    if hint >= 3 and report.first_wrong is not None:
        parts.append(Rows((Row(PARTS_AT, one_line(report.first_wrong)),)))
    return parts
