"""The deck of interview questions: reading it, its content, and the numbers of its answers."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from headwise.course.lesson import LEVELS, Question, computed, deck, lessons, read_questions
from headwise.course.rendering import Shown
from headwise.errors import ArgumentError

OWN = tuple(question for question in deck() if question.check)


def named(question: Question) -> str:
    return f"{question.level}-{question.lesson}-{question.text}"


def numbers_in(text: str) -> set[float]:
    """Return the numbers of a text, such as 1,024 and 0.35, but not the 3 of Qwen3."""
    return {
        float(number.replace(",", "")) for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)", text)
    }


def test_a_question_has_its_lesson_its_answer_and_its_check() -> None:
    first = "# %% question: [7] Why?\n# Because\n# of it.\n# %%\nprint(5)\n"
    second = "# %% question: [2] So?\n# Yes.\n"
    assert read_questions("hard", f'"""Some."""\n{first}{second}') == (
        Question("Why?", "Because\nof it.", "hard", 7, "print(5)"),
        Question("So?", "Yes.", "hard", 2),
    )


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("# %% question: Why?\n# So.\n", r"must be \[lesson\] ..\?: easy.py has 'Why\?'"),
        ("# %% question: [1] Why\n# So.\n", r"easy.py has '\[1\] Why'"),
        ("# %%\nprint(1)\n", r"the only code cell after one: easy.py has 'print\(1\)'"),
        (
            "# %% question: [1] Why?\n# So.\n# %%\n1\n# %%\nprint(2)\n",
            r"the only code cell after one: easy.py has 'print\(2\)'",
        ),
        ("# %% question: [1] Why?\nSo.\n", r"text in comments only: got 'So.'"),
    ],
)
def test_what_is_not_a_question_is_refused(cells: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_questions("easy", f'"""Some."""\n{cells}')


def test_the_files_have_their_questions_and_the_lessons_theirs() -> None:
    of_lessons = {
        cell.about: lesson for lesson in lessons() for cell in lesson.cells if cell.kind == "question"
    }
    assert len(deck()) == len(of_lessons) + 16 + 16 + 12
    for question in deck():
        if question.text in of_lessons:
            number = of_lessons[question.text].number
            level = "easy" if number <= 6 else "medium" if number <= 14 else "hard"
            assert (question.lesson, question.level) == (number, level)
    assert {level: sum(question.level == level for question in OWN) for level in LEVELS} == {
        "easy": 16,
        "medium": 16,
        "hard": 12,
    }
    assert {question.lesson for question in deck()} == set(range(18))


def test_level_and_lesson_choose() -> None:
    assert sum((deck(level) for level in LEVELS), ()) == deck()
    assert all(question.lesson == 7 for question in deck(lesson=7))
    assert {question.level for question in deck(lesson=7)} == set(LEVELS)
    assert deck("easy", 17) == tuple(question for question in deck("easy") if question.lesson == 17)
    assert [question.lesson for question in deck("medium")] == sorted(
        question.lesson for question in deck("medium")
    )


def test_what_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="level must be one of easy, medium, hard: got 'simple'"):
        deck("simple")
    with pytest.raises(ArgumentError, match="lesson must be 0 to 17: got 18"):
        deck(lesson=18)


def test_every_question_is_asked_once_ends_with_a_question_mark_and_is_answered() -> None:
    texts = [question.text for question in deck()]
    assert len(set(texts)) == len(texts)
    for question in deck():
        assert question.text.endswith("?") and "\n" not in question.text
        assert question.answer.strip()
    for question in OWN:
        assert 3 <= sum(bool(line) for line in question.answer.splitlines()) <= 12, question.text


def test_a_check_gives_what_it_prints_and_leaves_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    question = Question(
        "?", "", "easy", 1, "import torch\ntorch.manual_seed(3)\nprint(torch.ones(2).sum().item())"
    )
    assert computed(question) == "2.0\n"
    assert torch.equal(torch.random.get_rng_state(), before)
    assert computed(Question("?", "", "easy", 1)) == ""
    with pytest.raises(AssertionError):
        computed(Question("?", "", "easy", 1, "assert 2 + 2 == 5"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_page_has_every_question_of_a_level_with_its_answer_folded(level: str) -> None:
    pytest.importorskip("mkdocs")
    pages = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "course_pages.py"))
    questions = [question for question in OWN if question.level == level]
    page = pages["as_questions"](level, {question.text: "printed\n" for question in questions})
    assert f"\n{len(questions)} of {len(OWN)} interview questions: " in page
    visible = [line for line in page.splitlines() if line and not line.startswith("    ")]
    assert [line.partition(". ")[2] for line in visible if re.match(r"## \d", line)] == [
        question.text for question in questions
    ]
    assert visible.count('??? question "Answer"') == len(questions)
    folded = [line.removeprefix("    ") for line in page.splitlines()]
    for question in questions:
        assert not set(question.answer.splitlines()) & set(visible) - {""}
        assert set(question.answer.splitlines()) | set(question.check.splitlines()) <= set(folded)
    links = re.findall(r"\]\((\d\d_\w+)\.md", page)
    assert set(links) <= {f"{lesson.number:02}_{lesson.name}" for lesson in lessons()}
    assert len(links) == len(deck(level))


def test_a_page_of_a_lesson_shows_its_live_page_and_folds_its_answers() -> None:
    pytest.importorskip("mkdocs")
    pages = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "course_pages.py"))
    chosen = lessons()[0]
    code = [index for index, cell in enumerate(chosen.cells) if cell.kind == "code"]
    page = pages["as_page"](chosen, dict.fromkeys(code, Shown("printed")))
    (at,) = (index for index, cell in enumerate(chosen.cells) if cell.kind == "page")
    address = f"00_attention-{at}.html#layer=5&amp;head=2&amp;token=11"
    assert page.count(f'<iframe class="live" src="{address}"') == 1 and 'loading="lazy"' in page
    assert "## Exercise" not in page and page.count("??? question") == 2


@pytest.mark.slow
@pytest.mark.parametrize("question", OWN, ids=named)
def test_every_check_runs_alone_and_prints_the_numbers_of_its_answer(question: Question) -> None:
    printed = computed(question)
    assert printed.strip()
    words = re.sub(r"\$[^$]*\$", "", question.answer)  # formulas are definitions, not claims
    stated = {number for number in numbers_in(words) if number > 4}
    computed_numbers = numbers_in(printed) | numbers_in(question.text)
    assert stated <= computed_numbers, f"stated and not computed: {sorted(stated - computed_numbers)}"
