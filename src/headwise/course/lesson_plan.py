"""The plan of a session about a lesson, in Markdown: times, questions with answers, usual mistakes."""

from __future__ import annotations

import re

from ..errors import INSTALLATION, ArgumentError
from .exercises import PLANTS
from .lesson import Lesson, Question, deck, lessons

__all__ = ["LEAST_MINUTES", "SLOT", "plan_text"]

SLOT = 45  # minutes of a session
LEAST_MINUTES = 15
MOST_QUESTIONS = 6


def plan_text(lesson: Lesson, minutes: int = SLOT) -> str:
    """Return the plan of a session about a lesson, in Markdown.

    Args:
        minutes: the length of the session; the times of its parts add up to it.

    Raises:
        ArgumentError: the session is shorter than 15 minutes.
    """
    if minutes < LEAST_MINUTES:
        raise ArgumentError(f"minutes must be at least {LEAST_MINUTES}: got {minutes}; use {SLOT}")
    questions = [question for question in deck() if question.lesson == lesson.number][:MOST_QUESTIONS]
    parts = [
        f"# Lesson plan: {lesson.number}. {lesson.title}",
        f"**Goal.** {lesson.idea[0].upper()}{lesson.idea[1:]}.",
        _facts(lesson, minutes),
        "## Before the session",
        _material(lesson),
        "## Times",
        _times(lesson, minutes, questions),
        "## Questions to ask",
        *[_question(number, question) for number, question in enumerate(questions, 1)],
    ]
    if lesson.repairs:
        parts += [
            "## Usual mistakes",
            "`headwise check` calls these mistakes by the names in bold. Give the first hint before you say "
            "what is wrong.",
            *[_mistake(key) for key in lesson.repairs],
        ]
    if lesson.hints:
        parts += [
            "## Hints for the exercise",
            *[f"{n}. {_indented(text)}" for n, text in enumerate(lesson.hints, 1)],
        ]
    return "\n\n".join(parts) + "\n"


def _facts(lesson: Lesson, minutes: int) -> str:
    numbers = {entry.number: entry for entry in lessons()}
    before = numbers.get(lesson.number - 1)
    after = numbers.get(lesson.number + 1)
    neighbours = f" Before it: {before.number}. {before.title}." if before is not None else ""
    neighbours += f" After it: {after.number}. {after.title}." if after is not None else ""
    return f"{minutes} minutes, for a {lesson.level}; {lesson.minutes} minutes to read alone.{neighbours}"


def _material(lesson: Lesson) -> str:
    n = lesson.number
    lines = [
        f"- Slides: `headwise learn slides {n}`. Open the file in a browser; **s** opens your notes.",
        f"- Handout, a page for each learner: `headwise learn handout {n} --pdf`.",
        f"- Learners install headwise, and can read alone: `headwise learn read {n}`. {INSTALLATION}",
    ]
    if lesson.has_exercise:
        lines.append(
            f"- Try the exercise yourself: `headwise learn start {n}`, then `headwise learn check {n}`."
        )
    return "\n".join(lines)


def _times(lesson: Lesson, minutes: int, questions: list[Question]) -> str:
    """Return a table of the parts of the session; their minutes add up."""
    topics = topics_of(lesson)
    talk = f"Slides: {'; '.join(topics)}" if topics else "Slides"
    name = next((cell.about for cell in lesson.cells if cell.kind == "exercise"), "")
    opening = questions[0].text if questions else lesson.title
    rows = [(2, f"Opening. Ask question 1 and collect guesses, without an answer: {opening}")]
    rows.append((7, talk))
    if lesson.has_exercise:
        rows.append(
            (
                6,
                f"Exercise: all write `{name}`, and `headwise learn check {lesson.number}` until it is right",
            )
        )
    if lesson.repairs:
        rows.append((3, f"Usual mistakes: repair code in pairs ({_repairs(lesson)})"))
    rows.append(
        (
            3 if lesson.has_exercise else 6,
            "Questions below, in pairs, then together; the answer to question 1",
        )
    )
    rows.append((1, "Close: each learner says the goal in their own words"))
    shares = shared_minutes([weight for weight, _ in rows], minutes)
    lines, clock = ["| from | minutes | what |", "|---:|---:|---|"], 0
    for share, (_, activity) in zip(shares, rows, strict=True):
        lines.append(f"| {clock // 60}:{clock % 60:02} | {share} | {_cell(activity)} |")
        clock += share
    return "\n".join([*lines, f"| {clock // 60}:{clock % 60:02} | | End |"])


def shared_minutes(weights: list[int], minutes: int) -> list[int]:
    """Return whole minutes in proportion to the weights, at least 1 each, that add up to `minutes`.

    Example:
        >>> shared_minutes([2, 7, 6, 3, 3, 1], 45)
        [5, 13, 12, 6, 6, 3]
    """
    spare = minutes - len(weights)
    exact = [weight * spare / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    largest = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in largest[: spare - sum(shares)]:
        shares[i] += 1
    return [1 + share for share in shares]


def topics_of(lesson: Lesson) -> list[str]:
    """Return the titles of a lesson's slide cells, or else its headings."""
    stated = [cell.about for cell in lesson.cells if cell.kind == "slide"]
    texts = [cell.text for cell in lesson.cells if cell.kind == "markdown"]
    return stated or [title for text in texts for title in re.findall(r"(?m)^## (.+)$", text)]


def _repairs(lesson: Lesson) -> str:
    commands = [f"`headwise learn repair {repair_number(key)}`" for key in lesson.repairs if key in PLANTS]
    return ", ".join(commands) if commands else "from the list below"


def repair_number(key: str) -> int:
    """Return the number of the repair of a fault in `headwise learn repair`."""
    return [*PLANTS].index(key) + 1


def _question(number: int, question: Question) -> str:
    answer = " ".join(question.answer.split()) if "\n\n" not in question.answer else question.answer
    return f"{number}. **{question.text}** ({question.level})\n\n   Expected: {_indented(answer)}"


def _mistake(key: str) -> str:
    from ..examiner.steps import FAULTS

    fault = FAULTS[key]
    repair = f" Practise: `headwise learn repair {repair_number(key)}`." if key in PLANTS else ""
    return (
        f"- **{key}**: {_plain(fault.title)}. Computed: `{fault.formula}`; right: `{fault.right}`.\n\n"
        f"   First hint: {_plain(fault.hints[0])} Why it matters: {_plain(fault.why)}{repair}"
    )


def _indented(text: str) -> str:
    """Return a text below the number of a list."""
    return "\n".join(f"   {line}" if line else "" for line in text.splitlines()).strip()


def _plain(text: str) -> str:
    """Return a text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_<\[\]])", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
