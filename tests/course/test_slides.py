"""What a teacher gets: the slides of a lesson, its plan and its handout."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from browser import Browser, Page, chromium_path
from headwise.cli import main
from headwise.course import handout, slides
from headwise.course.exercises import PLANTS
from headwise.course.handout import browser_path, page_html, write_pdf
from headwise.course.html_text import blocks, markdown_html, sentences
from headwise.course.lesson import Lesson, lesson, lessons, read_lesson
from headwise.course.lesson_plan import LEAST_MINUTES, plan_text
from headwise.course.rendering import Shown, notebook, run_lesson
from headwise.course.slides import CODE_LINES, Slide, deck_html, key_points, slides_of, without_checks
from headwise.errors import ArgumentError, PackageMissing
from headwise.examiner.steps import FAULTS

pytest.importorskip("matplotlib")
pytest.importorskip("latex2mathml")
every_lesson = pytest.mark.parametrize("chosen", lessons(), ids=lambda chosen: chosen.name)
HEAD = '"""A title.\n\nidea: an idea\nminutes: 5\nlevel: junior\n"""\n'
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def own(*cells: str) -> Lesson:
    """Return a lesson of these cells."""
    return read_lesson(
        "01_own.py", HEAD + "".join(f"# %% {cell}\n".replace("%% \n", "%%\n") for cell in cells)
    )


def deck_of(*cells: str, shown: dict[int, Shown] | None = None) -> list[Slide]:
    return slides_of(own(*cells), shown or {})


def visible(page: str) -> str:
    """Return the text of HTML."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page)).strip()


# From cells to slides


def test_a_heading_begins_a_slide_and_a_paragraph_is_a_point_with_its_text_in_the_notes() -> None:
    text = "[markdown]\n# First. Then more.\n#\n# ## Second part\n# - an item\n# - another"
    first, opening, second = deck_of(text)
    assert (first.kind, first.title, opening.title, second.title) == (
        "first",
        "A title",
        "A title",
        "Second part",
    )
    assert visible(opening.body) == "First. Then more." and "Then more" in opening.notes
    assert second.body == "<ul><li>an item</li><li>another</li></ul>"


def test_a_long_paragraph_is_a_short_point() -> None:
    paragraph = f"The point is short. {'It goes on and on. ' * 20}"
    _, slide = deck_of(f"[markdown]\n# {paragraph}")
    assert visible(slide.body).startswith("The point is short.") and len(visible(slide.body)) <= 160
    assert len(visible(slide.notes)) >= len(paragraph) - 2


def test_code_is_shown_with_what_it_prints_and_without_the_lessons_checks() -> None:
    _, slide = deck_of("\nx = 1\nassert x\nprint(x)", shown={0: Shown("1 < 2\n")})
    assert "assert" not in slide.body and '<pre class="output s26">1 &lt; 2</pre>' in slide.body


def test_a_point_stands_above_the_code_below_it() -> None:
    _, slide = deck_of("[markdown]\n# What is x?\n#\n# ## Sums\n# A sum of two numbers:", "\nx = 1 + 1")[1:]
    assert slide.body.startswith("<p>A sum of two numbers.</p><pre") and slide.title == "Sums"


def test_long_code_is_divided_between_statements() -> None:
    code = "\n\n".join(f"def f{i}():\n    y = {i}\n\n    return y" for i in range(9))
    deck = deck_of(f"\n{code}")[1:]
    pieces = [visible(slide.body) for slide in deck]
    assert [slide.title for slide in deck] == [f"A title ({n} of 3)" for n in (1, 2, 3)]
    assert all(piece.startswith("def f") for piece in pieces)
    assert all(len(piece.splitlines()) <= CODE_LINES for piece in slides._pieces_of_code(code))
    assert re.sub(r"\s", "", "".join(slides._pieces_of_code(code))) == re.sub(r"\s", "", code)


def test_a_picture_has_a_slide_and_long_code_that_only_draws_has_none() -> None:
    drawing = "\n" + "\n".join(f"draw({i})" for i in range(9))
    (slide,) = deck_of(drawing, shown={0: Shown("", [PIXEL])})[1:]
    assert "<img" in slide.body and "draw" not in slide.body and "headwise learn notebook 1" in slide.notes
    code, picture = deck_of("\ndraw()", shown={0: Shown("", [PIXEL])})[1:]
    assert "draw" in code.body and "<img" in picture.body


def test_a_stated_slide_stands_for_the_text_above_and_the_code_below_it() -> None:
    text = "[markdown]\n# The whole text."
    stated = "slide: A head is a lookup\n# - A point.\n#\n# [output]\n#\n# ---\n# Ask something."
    (slide,) = deck_of(text, stated, "\nx = 1", shown={2: Shown("printed\n")})[1:]
    assert slide.title == "A head is a lookup" and "printed" in slide.body and "x = 1" not in slide.body
    assert visible(slide.notes) == "Ask something.The whole text."
    first, second = deck_of(text, stated, "slide: Two\n# [code]", "\nx = 1", shown={3: Shown("printed")})[1:]
    assert "printed" in first.body and visible(second.body) == "x = 1" and "whole" in second.notes


@every_lesson
def test_no_slide_before_the_exercise_names_its_mistakes(chosen: Lesson) -> None:
    kinds = [slide.title.partition(":")[0].partition(" (")[0] for slide in slides_of(chosen, {})]
    if chosen.repairs:
        assert kinds.index("Usual mistakes") == len(kinds) - 1
    if chosen.has_exercise:
        assert kinds.index("Exercise") < kinds.index("Question")


def test_slides_of_one_head_have_no_code_that_fails_with_a_batch() -> None:
    """The slides showed `k.T` and claimed that it works for many heads; `.T` reverses all axes."""
    bodies = [visible(slide.body) for slide in slides_of(lesson(3), {})]
    assert not any("k.T " in body for body in bodies)
    assert any("q @ k.transpose(-2, -1)" in body for body in bodies)
    assert any("v = torch.tensor(" in body and "k = torch.tensor(" in body for body in bodies)


def test_the_slides_of_lesson_0_have_no_code_and_nothing_that_code_prints() -> None:
    """They are for people who cannot read code: its derived slides had the output of cells without them."""
    chosen = lesson(0)
    shown = {i: Shown("printed", [PIXEL]) for i, cell in enumerate(chosen.cells) if cell.kind == "code"}
    deck = slides_of(chosen, shown)
    code = [slide.title for slide in deck if "<pre" in slide.body]
    assert all(title.startswith("Try it") for title in code)
    titles = [slide.title for slide in deck]
    assert titles[1] == "Guess the next word" and "letter</strong>" not in deck[1].body
    assert "Without head 3.4: 15%" in titles and sum(slide.body.count("<img") for slide in deck) == 1


@every_lesson
def test_no_two_slides_have_the_same_title(chosen: Lesson) -> None:
    titles = [slide.title for slide in slides_of(chosen, {})[1:]]
    assert len(set(titles)) == len(titles)


def test_slides_of_a_heading_are_counted() -> None:
    deck = deck_of("[markdown]\n# ## Sums\n# Why?", "\nx = 1", "[markdown]\n# It is 1.")[1:]
    assert [slide.title for slide in deck] == ["Sums (1 of 2)", "Sums (2 of 2)"]


def test_a_short_point_keeps_the_sentence_that_defines_a_term() -> None:
    """A point was the first short sentence, and the definition behind it was in the notes only."""
    text = f"A word helps. {'It goes on. ' * 20}A model counts. It is called a **{'big ' * 9}head**. It ends."
    (slide,) = deck_of(f"[markdown]\n# {text}")[1:]
    assert visible(slide.body).startswith("A model counts. It is called a big")
    assert "It goes on" not in visible(slide.body) and "It goes on" in slide.notes


def test_a_point_does_not_refer_to_another_slide() -> None:
    """Points had "the bars show the lines that were printed", far from bars and lines."""
    text = "[markdown]\n# The bars show it all. A mean (code below) is a sum, as the table above says."
    code, last = deck_of("\nx = 1", "[markdown]\n# The table above has x.", text)[1:]
    assert "The table above has x" in code.notes and visible(last.body) == "A mean is a sum."
    assert "The bars show" in last.notes
    (slide,) = deck_of("question: Why?\n# So, as the code below shows. A test:")[1:]
    assert "So.</div>" in slide.body


@every_lesson
def test_code_in_a_slide_cell_is_code_of_the_cell_below_it(chosen: Lesson) -> None:
    for index, cell in enumerate(chosen.cells):
        below = next((other for other in chosen.cells[index:] if other.kind != "slide"), None)
        code = below.text.splitlines() if below is not None and below.kind == "code" else []
        own_code = (
            [block.text for block in blocks(cell.text) if block.kind == "code"]
            if cell.kind == "slide"
            else []
        )
        lines = [line.strip() for text in own_code for line in text.splitlines()]
        assert set(lines) <= {line.strip() for line in code}, cell.about


def test_slide_cells_are_neither_in_the_notebook_nor_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    titles = [cell.about for cell in lesson(3).cells if cell.kind == "slide"]
    assert main(["learn", "read", "3", "--no-run"]) == 0
    output = capsys.readouterr().out
    assert titles and not [title for title in titles if title in notebook(lesson(3)) or title in output]


def test_an_answer_is_shown_with_the_next_key_and_is_whole_in_the_notes() -> None:
    (slide,) = deck_of("question: Why?\n# Because. " + "It is so. " * 60)[1:]
    assert 'class="answer fragment"' in slide.body and len(visible(slide.body)) < 330 < len(
        visible(slide.notes)
    )


def test_the_deck_ends_with_the_exercise_then_questions_then_mistakes() -> None:
    chosen = lesson(3)
    *_, exercise, first, second, mistakes = slides_of(chosen, {})
    assert first.title.startswith("Question") and second.title.startswith("Question")
    assert all(FAULTS[key].title in mistakes.body and key in mistakes.notes for key in chosen.repairs)
    assert "headwise learn start 3" in visible(exercise.body) and "def attend" in visible(exercise.body)
    assert "weights @ v" not in visible(exercise.body) and "weights @ v" in visible(exercise.notes)


def test_a_lesson_without_an_exercise_has_slides_a_plan_and_a_handout() -> None:
    chosen = own("[markdown]\n# A text of some length, which says something.", "question: Why?\n# Because.")
    assert [slide.title for slide in slides_of(chosen, {})] == ["A title", "A title", "Question"]
    assert "Exercise" not in page_html(chosen, {}) and "Exercise" not in plan_text(lesson(0))


@every_lesson
def test_every_slide_has_notes_and_no_wall_of_text(chosen: Lesson) -> None:
    for slide in slides_of(chosen, {}):
        assert visible(slide.notes), slide.title
        words = re.sub(r"<pre.*?</pre>|<table.*?</table>|<math.*?</math>", "", slide.body, flags=re.DOTALL)
        assert len(visible(words)) <= 800, (slide.title, visible(words))
    assert key_points(chosen)


PLANNED = {  # lesson -> the slides that docs/learn/teaching.md names by their numbers, and their titles
    0: {9: "Most rows rest on the first token", 10: "Try it", 11: "Why", 12: "Where", 13: "Without head 3.4"},
    1: {14: "The spread grows with the width"},
    2: {2: "Softmax and its axis (1", 4: "Softmax and its axis (3"},
    3: {2: "A head answers", 6: "No weight is 0", 7: "Exercise", 10: "Usual mistakes"},
    4: {5: "Split and merge", 11: "Merge", 12: "Exercise", 15: "Usual mistakes"},
    5: {2: "Four learned", 12: "From five steps", 13: "Exercise", 16: "Usual mistakes"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # torch in matplotlib
@pytest.mark.parametrize("number", PLANNED)
def test_the_numbers_of_slides_in_the_plans_of_the_page_for_teachers_are_right(number: int) -> None:
    chosen = lesson(number)
    live = "<p>A live page" if number < 2 else None
    deck = slides_of(chosen, run_lesson(chosen), live)
    titles = {place: deck[place - 1].title for place in PLANNED[number]}
    assert all(titles[place].startswith(title) for place, title in PLANNED[number].items()), titles
    assert number not in (1, 2) or "<img" in deck[max(PLANNED[number]) - 1].body


SCRIPT = "<script>alert(1)</script>"


def test_what_a_lesson_says_is_never_markup_of_the_page() -> None:
    cells = (
        f"[markdown]\n# Text {SCRIPT} and [a link](javascript:alert(1)).\n#\n# ## Title {SCRIPT}\n#\n"
        f"# | {SCRIPT} |\n# |--:|\n# | a |",
        f"\nprint('{SCRIPT}')",
        f"slide: {SCRIPT}\n# {SCRIPT} and $a < b \\text{{{SCRIPT}}}$\n#\n# ---\n# {SCRIPT}",
        f"question: Is {SCRIPT} a question?\n# {SCRIPT}",
        f"exercise: f\ndef f():\n    '{SCRIPT}'\n    raise NotImplementedError  # {SCRIPT}",
    )
    chosen = own(*cells)
    shown = {1: Shown(f"{SCRIPT}\n")}
    page = deck_html(chosen, shown)
    assert page.count("<script>") == 1 and SCRIPT not in page and 'href="javascript' not in page
    assert SCRIPT not in page_html(chosen, shown) and "<script" not in page_html(chosen, shown)
    body = page.partition("<body>")[2]
    assert not re.search(r"<[^>]*\sstyle=", body.partition("<script>")[0])  # the policy forbids them


def test_a_deck_is_offline_and_keeps_the_licence_of_reveal() -> None:
    page = deck_html(lesson(3), {})
    assert (
        "default-src 'none'" in page and "Hakim El Hattab" in page and "Permission is hereby granted" in page
    )
    assert not re.search(r'(?:src|href)="(?!data:)', page.partition("<script>")[0])
    assert page.count("</script>") == 1


def test_a_live_page_that_is_too_large_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = own("page: The cat sat#layer=5")
    monkeypatch.setattr(slides, "_live_page", lambda _: "x" * 1000)
    assert '<iframe title="The heads of mini, live" sandbox="allow-scripts"' in deck_html(chosen, {})
    monkeypatch.setattr(slides, "LARGEST", 999)
    page = deck_html(chosen, {})
    assert "data-page=" not in page and "--html heads.html" in visible(page.partition("<script>")[0])


# Texts


def test_sentences_end_where_a_reader_would_say_so() -> None:
    assert sentences("It is 0.5, e.g. here. `a. B` is code: see. (A. B.) End") == [
        "It is 0.5, e.g. here.", "`a. B` is code: see.", "(A. B.) End",
    ]  # fmt: skip


def test_formulas_become_mathml_except_in_code() -> None:
    page = markdown_html(r"The scale $\sqrt{d}$, and `$x$`, cost $5.")
    assert page.count("<math") == 1 and "<msqrt>" in page and "<code>$x$</code>" in page
    page = markdown_html(r"$a < b$ and $\text{&lt;b> <i>}$")
    assert "<mo>&lt;</mo>" in page and "<mtext>&amp;lt;b&gt;" in page and "<i>" not in page


def test_without_checks_leaves_asserts_inside_of_functions() -> None:
    assert without_checks("def f(x):\n    assert x\nassert f\nf(1)") == "def f(x):\n    assert x\nf(1)"


# The plan


@every_lesson
@pytest.mark.parametrize("minutes", [LEAST_MINUTES, 45, 90])
def test_the_times_of_a_plan_add_up(chosen: Lesson, minutes: int) -> None:
    rows = re.findall(r"(?m)^\| (\d+):(\d\d) \| ?(\d*) \| .+ \|$", plan_text(chosen, minutes))
    clock = [60 * int(hours) + int(rest) for hours, rest, _ in rows]
    shares = [int(share) for _, _, share in rows[:-1]]
    assert sum(shares) == minutes == clock[-1] and min(shares) >= 1
    assert clock == [sum(shares[:n]) for n in range(len(rows))]


@every_lesson
def test_a_plan_has_questions_with_answers_and_mistakes_with_hints(chosen: Lesson) -> None:
    plan = plan_text(chosen)
    for cell in chosen.cells:
        if cell.kind == "question":
            assert f"**{cell.about}**" in plan and " ".join(cell.text.split())[:60] in " ".join(plan.split())
    assert plan.count("Expected: ") >= 2
    for key in chosen.repairs:
        assert f"**{key}**" in plan and f"`{FAULTS[key].formula}`" in plan
        assert key not in PLANTS or f"headwise learn repair {[*PLANTS].index(key) + 1}`" in plan


def test_a_session_that_is_too_short_is_refused() -> None:
    with pytest.raises(ArgumentError, match="minutes must be at least 15: got 5; use 45"):
        plan_text(lesson(3), 5)


# The verbs


def test_the_verbs_write_new_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, name in (("slides", "slides.html"), ("plan", "plan.md"), ("handout", "handout.html")):
        path = tmp_path / f"03_one_head_{name}"
        assert main(["learn", verb, "3", "--folder", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"Wrote {path}\n" and path.stat().st_size > 1000
        path.write_text("own", "utf-8")
        assert main(["learn", verb, "3", "--folder", str(tmp_path)]) == 0
        message = f"{path} exists already and was not changed; --force rewrites it\n"
        assert capsys.readouterr().out == message and path.read_text("utf-8") == "own"
    assert main(["learn", "plan", "99", "--folder", str(tmp_path)]) == 2
    assert "lesson must be 0 to 17: got 99" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("verb", "name"), [("slides", "slides.html"), ("plan", "plan.md"), ("handout", "handout.html")]
)
def test_force_rewrites_a_file(
    verb: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"03_one_head_{name}"
    for before in (None, "own"):
        if before is not None:
            path.write_text(before, "utf-8")
        assert main(["learn", verb, "3", "--force", "--folder", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"Wrote {path}\n" and path.stat().st_size > 1000
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # and no part of a file


def test_force_rewrites_a_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handout, "browser_path", lambda: "")
    monkeypatch.setattr(handout, "write_pdf", lambda page, path: path.write_text("new", "utf-8"))
    path = tmp_path / "03_one_head_handout.pdf"
    path.write_text("own", "utf-8")
    for options, text in (([], "own"), (["--force"], "new")):
        command = ["learn", "handout", "3", "--pdf", "--folder", str(tmp_path), *options]
        assert main(command) == 0 and path.read_text("utf-8") == text


def test_without_a_browser_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(handout.VARIABLE, raising=False)
    with pytest.raises(
        PackageMissing, match=r"pdf must be written by a browser: none of chromium, .*; install Ch"
    ):
        browser_path()
    monkeypatch.setenv(handout.VARIABLE, "/no/such")
    assert main(["learn", "handout", "3", "--pdf", "--folder", str(tmp_path)]) == 1
    assert "HEADWISE_BROWSER='/no/such' cannot be run; install" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_browser_that_writes_nothing_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = tmp_path / "idle"
    idle.write_text("#!/bin/sh\nexit 7\n")
    idle.chmod(0o755)
    monkeypatch.setenv(handout.VARIABLE, str(idle))
    with pytest.raises(ArgumentError, match=r"wrote none \(exit code 7\); leave out --pdf"):
        write_pdf("<p>", tmp_path / "new" / "handout.pdf")
    assert not list((tmp_path / "new").iterdir())


# In a browser

MAKE = """
import sys
from pathlib import Path

import torch

from headwise.course.handout import page_html
from headwise.course import slides
from headwise.course.lesson import lesson
from headwise.course.rendering import run_lesson

torch.set_num_threads(1)
slides._live_page = lambda chosen: "<p>A live page" if 'load("mini")' in str(chosen.cells) else None
folder = Path(sys.argv[1])
for number in map(int, sys.argv[2:]):
    shown = run_lesson(lesson(number))
    (folder / f"{number}.html").write_text(slides.deck_html(lesson(number), shown), "utf-8")
    (folder / f"handout-{number}.html").write_text(page_html(lesson(number), shown), "utf-8")
"""
OVERFLOWING = """(() => {
  const faults = [];
  document.querySelectorAll(".reveal .slides > section").forEach((section, index) => {
    const before = section.style.display;
    section.style.display = "block";
    const slide = section.querySelector(".slide");
    const say = (what) => faults.push(`${index + 1}, ${slide.textContent.slice(0, 50)}: ${what}`);
    const [width, height] = [slide.scrollWidth, slide.scrollHeight];
    if (height > 720 || width > 1280) say(`${width} x ${height}`);
    for (const box of slide.querySelectorAll(".body, .body pre, .beside > div")) {
      if (box.scrollHeight > box.clientHeight + 1 || box.scrollWidth > box.clientWidth + 1)
        say(`${box.className}: ${box.scrollWidth} x ${box.scrollHeight}`);
    }
    if (!section.querySelector("aside.notes")?.textContent.trim()) say("no notes");
    section.style.display = before;
  });
  return faults;
})()"""


@pytest.fixture
def browser() -> Browser:
    if chromium_path() is None:
        pytest.skip("no browser here: install Chromium, or name one in HEADWISE_BROWSER")
    return Browser()


def ready(browser: Browser, path: Path) -> Page:
    page = browser.open(path, size=(1280, 720))
    page.wait("document.querySelector('.reveal.ready')")
    return page


def printed_pages(page: Page) -> int:
    answer = page.ask("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
    return pages_of(base64.b64decode(answer["data"]))


def pages_of(pdf: bytes) -> int:
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_deck_fits_its_slides_and_every_handout_a_page(browser: Browser, tmp_path: Path) -> None:
    """No slide is larger than its area, nothing is requested, the console is silent.

    The live page is a short text here; the test below opens one.
    """
    numbers = [str(entry.number) for entry in lessons()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path), *numbers[half::2]], env=environment)
        for half in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    faults: dict[str, list[str]] = {}
    with browser:
        for number in numbers:
            path = tmp_path / f"{number}.html"
            page = ready(browser, path)
            faults[number] = page.evaluate(OVERFLOWING) + page.complaints
            faults[number] += [url for url in page.requested if url != path.as_uri() and url[:5] != "data:"]
            faults[number] += ["few slides"] * (page.count("section") < 8)
            page.close()
            page = browser.open(tmp_path / f"handout-{number}.html", size=(794, 1123))
            page.ask("Emulation.setEmulatedMedia", media="print")
            heights = page.evaluate(
                "(m => [m.scrollHeight - m.clientHeight, m.scrollWidth - m.clientWidth])"
                "(document.querySelector('main'))"
            )
            lines = page.evaluate("[...document.querySelectorAll('.lines')].map(e => e.clientHeight)")
            faults[number] += [f"handout: too large by {heights}"] * (max(heights) > 0)
            faults[number] += [f"handout: too little room to write: {lines}"] * (min(lines) < 50)
            faults[number] += [f"handout: {printed_pages(page)} pages"] * (printed_pages(page) != 1)
            faults[number] += page.complaints
            page.close()
    assert {number: entries for number, entries in faults.items() if entries} == {}


@pytest.mark.slow
def test_the_notes_open_from_disk_and_the_deck_prints_a_slide_on_each_page(
    browser: Browser, tmp_path: Path
) -> None:
    chosen = lesson(3)
    path = tmp_path / "deck.html"
    path.write_text(deck_html(chosen, run_lesson(chosen)), "utf-8")
    with browser:
        page = ready(browser, path)
        before = {target["targetId"] for target in browser.ask("Target.getTargets")["targetInfos"]}
        page.press("ArrowRight", 39)
        page.press("s", 83)
        (target,) = [
            target["targetId"]
            for target in browser.ask("Target.getTargets")["targetInfos"]
            if target["targetId"] not in before
        ]
        session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        notes = Page(browser, session, target)
        for domain in ("Runtime", "Log"):
            notes.ask(f"{domain}.enable")
        second = slides_of(chosen, {})[1]
        assert notes.text("#title") == second.title and "It raises" in notes.text("#notes")
        assert second.title in notes.text("#now") and re.fullmatch(r"00:0\d", notes.text("#time"))
        notes.press("ArrowRight", 39)  # from the window of the notes
        third = slides_of(chosen, {})[2].title
        assert page.text("section.present h2") == third == notes.text("#title")
        page.press("ArrowLeft", 37)  # and from the slides
        assert notes.text("#title") == second.title
        assert notes.complaints == [] and page.complaints == []
        assert printed_pages(page) == page.count(".slides > section")


@pytest.mark.slow
def test_the_live_page_runs_in_its_frame(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "deck.html"
    path.write_text(deck_html(own("page: The cat sat on the mat#layer=5"), {}), "utf-8")
    assert path.stat().st_size <= 25_000_000
    with browser:
        page = ready(browser, path)
        assert page.count("iframe[srcdoc]") == 0  # it starts with its slide
        page.press("ArrowRight", 39)
        page.wait("document.querySelector('iframe[srcdoc]')")
        end = time.monotonic() + 30
        while "read in" not in (text := json.dumps(frame_text(browser, page))):
            assert time.monotonic() < end, (text[:300], page.complaints)
            time.sleep(0.1)
        assert page.complaints == []


TEXT = "document.body === null ? '' : document.body.innerText"


def frame_text(browser: Browser, page: Page) -> str:
    """Return the text of the live page: in a process of its own, or in that of the deck."""
    frames = [
        target for target in browser.ask("Target.getTargets")["targetInfos"] if target["type"] == "iframe"
    ]
    if frames:
        return str(browser.inside(page).evaluate(TEXT))
    (child,) = page.ask("Page.getFrameTree")["frameTree"]["childFrames"]
    world = page.ask("Page.createIsolatedWorld", frameId=child["frame"]["id"])["executionContextId"]
    answer = page.ask("Runtime.evaluate", expression=TEXT, contextId=world, returnByValue=True)
    return str(answer["result"].get("value"))


@pytest.mark.slow
def test_the_handout_is_a_pdf_of_one_page(browser: Browser, tmp_path: Path) -> None:
    assert main(["learn", "handout", "3", "--pdf", "--folder", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.pdf")
    pdf = path.read_bytes()
    assert pages_of(pdf) == 1 and re.search(rb"/MediaBox ?\[0 0 59[45][.\d]* 84[12]", pdf)
