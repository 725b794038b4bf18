"""A report as headings, rows and sentences that are safe to print; with a hint, only what the hint allows."""

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
from ..report import Finding, Named, Other, Problem, Report, largest_difference, line_in_words


@dataclass(frozen=True)
class Heading:
    """The verdict in one line; `mark` is "right", "wrong" or "unknown"."""

    mark: str
    text: str


@dataclass(frozen=True)
class Quote:
    """A line of the learner's source."""

    place: str  # "mha.py:41", or "" if it is unknown
    line: int | None
    text: str


@dataclass(frozen=True)
class Row:
    """A label and its text; code is shown unchanged."""

    label: str
    text: str
    code: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows that are shown as one table."""

    rows: tuple[Row, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Listed:
    """A title and a list of (mark, sentence); a mark is "right", "wrong", "unknown" or "item"."""

    title: str
    items: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True)
class Note:
    """A remark in small print."""

    text: str


Part = Heading | Quote | Rows | Listed | Note


MARKS = {"right": "✓", "wrong": "✗", "unknown": "?", "item": "·", "": " "}

PLAINER = {  # replacements for encodings without these characters; others become \u....
    "✓": "ok", "✗": "x", "·": "-", "→": ">", "│": "|", "↵": "\\n", "⇥": "\\t",
    "\N{REPLACEMENT CHARACTER}": "?",
    "√": "sqrt", "×": "x", "−": "-", "ᵀ": "^T", "…": "...", "≠": "!=", "≤": "<=", "≥": ">=", "≈": "~",
    "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
LONGEST = 1_000  # characters of one line: a message may hold all the output of a program
MOST_LINES = 20


def harmless(text: str) -> str:
    """Return the text without control characters, with tabs as spaces, and cut off if it is too long.

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
    """Return `harmless(text)` on one line."""
    return " ".join(harmless(text).split())


def fitting(text: str, encoding: str | None) -> str:
    """Return the text in characters that `encoding` has; None is ascii.

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
    "import": "during import",
    "build": "during construction",
    "call": "during the call",
    "backward": "in the backward pass",
}
RIGHT = 2e-5  # numbers that differ by less are equal; `diagnosis.NEAR`, without importing torch
MOST_TRIED, MOST_ALIKE = 6, 3  # how many of each are listed
LETTERS = {"q": "queries", "k": "keys", "v": "values", "o": "output"}


def sentence(text: str) -> str:
    """Return the text on one line, with a full stop."""
    text = one_line(text)
    return text if not text or text[-1] in ".!?:" else f"{text}."


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop before a capital letter: "v1.2" and "e.g. x" are no ends.

    Example:
        >>> first_sentence("line 3: F is not defined. Import it: import torch.nn.functional as F")
        'line 3: F is not defined'
    """
    return re.split(r"[.] (?=[A-Z])", one_line(text), maxsplit=1)[0].rstrip(".")


def listed(title: str, mark: str, texts: Iterable[str]) -> Listed:
    """Return a list of sentences under a title, each sentence once."""
    return Listed(title, tuple((mark, each) for each in dict.fromkeys(map(sentence, texts)) if each))


# Numbers


UNCHANGED = (
    "These test inputs do not reveal the mistake: on them your outputs equal those of the reference. The "
    "reference uses the weights as your code applies them, and the identity for a projection that your code "
    "does not have"
)
WITH_MISTAKE = "The formula that they are compared with contains the mistake, too"


def _is_design_wrong(report: Report) -> bool:
    """Return True if a wrong design, such as a wrong rotation, is part of what the code was compared with."""
    return any(each.name == "design" and each.verdict == "wrong" for each in report.findings)


def compared(report: Report) -> list[Row]:
    """Return the largest difference over all test inputs, or that of each wrong one."""
    if not report.errors:
        return []
    tests = f"with {report.beside} on {len(report.errors)} test input{'s' * (len(report.errors) != 1)}"
    right = {one_line(probe): error for probe, error in report.errors.items() if error <= RIGHT}
    wrong = {one_line(probe): error for probe, error in report.errors.items() if not error <= RIGHT}  # or NaN
    if not wrong:
        fit = largest_difference(max(right.values()))
        separator = "; " if any("," in probe for probe in right) else ", "  # probes of steps hold sizes
        text = f"{tests}, {fit}: {separator.join(right)}"
        if report.judged and not report.ok:
            text += f". {WITH_MISTAKE if _is_design_wrong(report) else UNCHANGED}"
        return [Row("Compared", text)]
    each = ", ".join(f"{probe} {_size(error)}" for probe, error in wrong.items())
    fine = f". Equal: {', '.join(right)}" if right else ""
    title = f"{tests}. Largest difference relative to the largest expected value"
    return [Row("Compared", f"{title}: {each}{fine}")]


def _size(error: float) -> str:
    if not math.isfinite(error):
        return "NaN" if math.isnan(error) else "infinite"
    return f"{error:.2g}"


# How the code was understood


def what_was_judged(report: Report) -> list[Note]:
    """Return which classes or functions of a file were judged, and which were not."""
    if report.line is None:
        return []
    judged = [f"{_at(other)}: {other.verdict}" for other in report.others if other.verdict]
    skipped = [_at(other) for other in report.others if not other.verdict]
    text = f"Judged: {_at(report)}."
    if judged:
        text += f" Also judged: {', '.join(judged)}."
    if skipped:
        choice = report.others[[not other.verdict for other in report.others].index(True)].name
        text += f" Not judged: {', '.join(skipped)}. To judge one, pass its name: --name {one_line(choice)}."
    return [Note(text)]


def _at(code: Report | Other) -> str:
    where = "" if code.line is None else f" ({line_in_words(code.line, code.cell)})"
    return f"{one_line(code.name)}{where}"


def what_it_is(report: Report) -> list[Row]:
    """Return the variants of attention that were recognised."""
    if not report.designs:
        return []
    designs = [re.sub(r"[;,] within (it|them|that), right$", "", one_line(each)) for each in report.designs]
    return [Row("Variant", sentence("attention with " + "; ".join(designs)))]


def how_it_was_built(report: Report) -> list[Row]:
    """Return how it was built, and the attempts that failed."""
    built = [Row("Built with", one_line(report.built), code=True)] if report.built else []
    tried = "\n".join(one_line(each) for each in report.tried[:MOST_TRIED])
    return [*built, *([Row("Tried", tried)] if tried else [])]


def what_to_do(report: Report) -> list[str]:
    """Return what to pass, on the command line or in Python."""
    return report.counsel_for_files if report.on_command_line else report.counsel


def not_told_apart(report: Report) -> str:
    """Return a sentence on the other explanations that compute the same."""
    names = [one_line(each) for each in report.alike[:MOST_ALIKE]]
    more = len(report.alike) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more else "")
    return f"Ambiguous: these mistakes would give the same output: {listed}. The simplest one is reported."


def how_it_is_called(report: Report) -> list[Row]:
    """Return how the code is called, one convention a line."""
    words = list(map(one_line, report.conventions.words))
    masks = [each for each in words if each.endswith(("where a key is visible", "where a key is hidden"))]
    others = [each for each in words if each not in masks]
    return [Row(label, "\n".join(each)) for label, each in (("Mask", masks), ("Interface", others)) if each]


def its_weights(report: Report) -> list[Row]:
    """Return the parameters of the projections, and how they were identified."""
    roles = {word: report.roles[letter] for letter, word in LETTERS.items() if letter in report.roles}
    if not roles:
        return []
    each = ", ".join(
        f"{word} {one_line(role.parameter)}{' (stored as [in, out])' if role.transposed else ''}"
        for word, role in roles.items()
    )
    ways = " and ".join(dict.fromkeys(one_line(role.how) for role in roles.values() if role.how))
    return [Row("Projections", each + (f"; identified by {ways}" if ways else ""))]


def how_it_ran(report: Report) -> str:
    """Return what was checked, how long it took, and the protections in plain words."""
    where = f" in {place}" if (place := _place(report, None)) else ""
    took = f" in {report.seconds:.1f} s" if report.seconds >= 0.05 else ""
    named = [one_line(each).partition(":") for each in report.protections]
    protection = "; ".join(
        f"without protections{colon}{text}" for name, colon, text in named if name == "none"
    )
    if names := ", ".join(_protection(name) for name, _, _ in named if name != "none"):
        protection = f"with restrictions: {names}"
    if missing := ", ".join(one_line(each).partition(":")[0] for each in report.missing_protections):
        protection += f"{'; ' if protection else ''}not available on this system: {missing}"
    return f"Checked {one_line(report.name)}{where}{took}{', ' if protection else ''}{protection}."


PROTECTIONS = {  # name -> what it means for the code that was checked
    "user namespace": "no privileges",
    "network namespace": "no network",
    "process namespace": "no access to other processes",
    "root folder of its own": "no access to other folders",
    "limits": "limited time and memory",
}


def _protection(name: str) -> str:
    """Return what a protection means; that of Landlock with its version."""
    if version := re.fullmatch(r"Landlock (\d+)", name):
        return f"no access to other files (Landlock {version[1]})"
    return PROTECTIONS.get(name, name)


def remarks(report: Report) -> list[Part]:
    """Return the lists of harmless differences and of what could not be judged."""
    unknown = [
        finding_in_words(each)
        for each in report.findings
        if each.verdict == "unknown"
        and not any(text.startswith(f"{each.name}: {each.detail}") for text in report.not_judged)
    ]
    return [
        listed("Differences that are not mistakes", "item", report.equal),
        listed("Could not be judged", "unknown", [*report.not_judged, *unknown]),
    ]


# Faults, findings, exceptions


def fault_in_full(report: Report, fault: Named) -> list[Part]:
    """Return the learner's line and everything known about a fault."""
    text = " ".join(harmless(fault.text).strip().split("\n"))
    quote = (
        [Quote(_place(report, fault.line, fault.cell), fault.line, text)]
        if text or fault.line is not None
        else []
    )
    rows = (
        Row("You compute", harmless(fault.formula), code=True),
        Row("It should be", harmless(fault.right), code=True),
        Row("Your number", "" if fault.number is None else f"{fault.number:.6g}"),
        Row("Evidence", sentence(fault.detail)),
        Row("Why it matters", sentence(fault.why)),
        Row("Repair", "" if fault.tried is False else harmless(fault.repair), code=True),
        Row("Tested", "with this repair the file passes the check" if fault.tried else ""),
    )
    return [*quote, Rows(tuple(row for row in rows if row.text))]


def _place(report: Report, line: int | None, cell: int | None = None) -> str:
    """Return "file:line", which editors and terminals turn into a link."""
    if report.path is None:
        return ""
    path = report.path
    with suppress(OSError, ValueError):  # another drive, a folder that is gone, no path at all
        path = min(path, os.path.relpath(path), key=len)
    return one_line(path) + (
        "" if line is None else f":{line}" if cell is None else f", {line_in_words(line, cell)}"
    )


def other_findings(report: Report) -> list[Finding]:
    """Return the wrong findings that are not reported as faults."""
    reported = {fault.key for fault in report.faults}
    return [each for each in report.findings if each.verdict == "wrong" and each.fault not in reported]


def finding_in_words(finding: Finding) -> str:
    """Return the name and the detail of a finding."""
    line = "" if finding.line is None else f" ({line_in_words(finding.line, finding.cell)})"
    return one_line(finding.name) + line + (f": {one_line(finding.detail)}" if finding.detail else "")


def stops(report: Report, level: int = 4, headline: str = "", exceptions: bool = False) -> Listed:
    """Return the exceptions, each line of source once.

    Args:
        report: the verdict.
        level: 1 shows where it was raised, 2 also the message, 3 also its meaning, 4 also what to do.
        headline: what it says is not repeated.
        exceptions: leave out problems that were not raised as exceptions.
    """
    lines_of_faults = {(fault.cell, fault.line) for fault in report.faults if fault.line is not None}
    probes: dict[tuple[object, ...], list[str]] = {}
    firsts: dict[tuple[object, ...], tuple[Problem | None, str]] = {}
    for problem, meaning in zip_longest(report.problems, report.explained):
        place: tuple[object, ...] = (meaning,)
        if problem is not None:
            if problem.stage == "import" and (problem.cell, problem.line) in lines_of_faults:
                continue  # reported as that fault
            if exceptions and not problem.kind[:1].isupper():
                continue
            where = problem.message if problem.line is None else (problem.cell, problem.line)
            place = (problem.stage, problem.kind, where)
        firsts.setdefault(place, (problem, meaning or ""))
        probes.setdefault(place, []).extend([problem.probe] if problem and problem.probe else [])
    items: list[tuple[str, str]] = []
    for place, (problem, meaning) in firsts.items():
        if problem is not None:
            items.append(("wrong", sentence(problem_in_words(problem, probes[place], message=level >= 2))))
        meaning, first = one_line(meaning), first_sentence(meaning)
        if headline and first == first_sentence(headline):
            meaning = meaning[len(first) :].lstrip(". ")
        if level >= 3 and meaning and meaning.rstrip(".") not in headline:
            items.append(("item", sentence(meaning if level >= 4 else first)))
    return Listed("Exceptions", tuple(dict.fromkeys(items)))


def problem_in_words(problem: Problem, probes: Sequence[str] = (), message: bool = True) -> str:
    """Return what was raised, at which line, during which stage."""
    words = [one_line(problem.kind)]
    if problem.line is not None:
        words.append(f"at {line_in_words(problem.line, problem.cell)}")
    if problem.stage in WHILE:
        words.append(WHILE[problem.stage])
    if probes:
        more = f" and {len(probes) - 3} more" if len(probes) > 3 else ""
        words.append(f"(test input{'s' * (len(probes) > 1)}: {', '.join(map(one_line, probes[:3]))}{more})")
    text = one_line(problem.message)
    return " ".join(words) + (f": {text}" if message and text else "")


OTHER_CHECKS = "Other checks that failed"
RIGHT_ALREADY = "Already correct"
FIRST_DIFFERENCE = "First difference"
WARNINGS = "Warnings"


def report_parts(report: Report, hint: int | None = None) -> list[Part]:
    """Return the report in parts that are safe to print.

    Args:
        report: the verdict.
        hint: None for the full report. 1, 2 or 3 for hints up to this one where the code is wrong, without
            the name, formula, line or repair of the fault. Hint 2 also shows where the output is right, and
            hint 3 the first tensor that differs.

    Raises:
        ArgumentError: hint is something else.
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
        summary = f"{name} computes the same as {report.beside}"
    elif name not in summary:
        summary = f"{name}: {summary}"
    fine = "; ".join(
        one_line(each.detail or each.name) for each in report.findings if each.verdict == "right"
    )
    also = [Row("Also right", fine)] if fine else []
    return [
        Heading("right", f"{summary.rstrip('.')}. Well done!"),
        Rows(
            (*what_it_is(report), *compared(report), *how_it_is_called(report), *its_weights(report), *also)
        ),
        listed(OTHER_CHECKS, "wrong", map(finding_in_words, other_findings(report))),
        listed(WARNINGS, "item", map(_remark, report.remarks)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _not_judged(report: Report) -> list[Part]:
    name, summary = one_line(report.name), one_line(report.summary)
    reason = first_sentence(summary) or "it returned no output"
    return [
        Heading("unknown", f"{name} was not judged"),
        Rows(
            (
                Row("Why", sentence(reason)),
                *what_it_is(report),
                *how_it_was_built(report),
                *compared(report),
                *how_it_is_called(report),
            )
        ),
        stops(report, headline=f"{summary} {reason}", exceptions=True),
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
    first = [] if report.first_wrong is None else [Row(FIRST_DIFFERENCE, one_line(report.first_wrong))]
    weights = (
        [] if report.faults else its_weights(report)
    )  # if no fault is named, wrongly identified projections may be the reason
    return [
        *parts,
        stops(report, headline=headline),
        listed(OTHER_CHECKS, "wrong", map(finding_in_words, other_findings(report))),
        listed(RIGHT_ALREADY, "right", report.where_right),
        Rows((*first, *what_it_is(report), *compared(report), *how_it_is_called(report), *weights)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _headline(report: Report) -> str:
    """Return the first line of a wrong report."""
    name, summary = one_line(report.name), one_line(report.summary)
    if len(report.faults) == 1:
        return _named(report.faults[0])
    if report.faults:
        keys = [one_line(each.key) for each in report.faults]
        if len(set(keys)) < len(keys):
            keys = [one_line(each.title) for each in report.faults]
        return f"{len(keys)} mistakes: {', and '.join(keys)}"
    if report.explained:  # begins with the line
        return first_sentence(report.explained[0])
    if report.problems:
        headline = problem_in_words(report.problems[0])
    elif wrong := other_findings(report):
        headline = finding_in_words(wrong[0])
    else:
        headline = summary or f"the output differs from that of {report.beside}"
    return headline if name in headline else f"{name}: {headline}"


def _remark(named: Named) -> str:
    line = f" ({line_in_words(named.line, named.cell)})" if named.line is not None else ""
    return f"{one_line(named.key)}{line}: {one_line(named.title)}. Repair: {one_line(named.repair)}"


def _named(fault: Named) -> str:
    return f"{one_line(fault.key)}: {one_line(fault.title)}"


def _hinted(report: Report, hint: int) -> list[Part]:
    stopped, findings = stops(report, hint), other_findings(report)
    if not (report.faults or stopped or findings):
        note = "No known mistake explains the output, so there are no hints. This is the full report."
        return [*_wrong(report), Note(note)]
    verdict = "is not right yet"
    if "(" not in report.beside:
        verdict = f"does not yet compute the same as {report.beside}"
    if report.problems and not report.errors:
        verdict = "raises an exception"
    elif stopped and not report.faults:
        verdict = "raises an exception for some test inputs"
    parts: list[Part] = [Heading("wrong", f"{one_line(report.name)} {verdict}")]
    several = len(report.faults) > 1
    if several:
        parts.append(Note(f"There are {len(report.faults)} mistakes to find."))
    for number, fault in enumerate(report.faults, 1):
        label = f"Mistake {number}, hint" if several else "Hint"
        rows = [Row(f"{label} {at}", one_line(text)) for at, text in enumerate(fault.hints[:hint], 1)]
        parts.append(Rows(tuple(rows)))
    parts.append(stopped)
    if hint == 1 and findings:
        parts.append(listed(OTHER_CHECKS, "wrong", ["hint 2 says which check failed"]))
    elif findings:
        words = [finding_in_words(each) if hint == 3 else one_line(each.name) for each in findings]
        parts.append(listed(OTHER_CHECKS, "wrong", words))
    if hint >= 2:
        parts.append(listed(RIGHT_ALREADY, "right", report.where_right))
    if hint >= 3 and report.first_wrong is not None:
        parts.append(Rows((Row(FIRST_DIFFERENCE, one_line(report.first_wrong)),)))
    return parts
