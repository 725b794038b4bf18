"""The slides of a lesson: one HTML file that opens from disk and loads nothing.

Slides are derived from the cells of the lesson:

- a heading begins new slides, which are counted; a paragraph becomes a point, its first short sentences and
  those that define a term in bold, and is in full in the speaker's notes; formulas, lists and tables are
  shown; a sentence about something on another slide ("the code below") is in the notes only,
- code is shown with what it prints, without its `assert` lines, on several slides if it has more than 18
  lines; a picture has its own slide, and long code that only draws is left out,
- a page cell becomes a slide with the live page of mini,
- at the end: the exercise; the questions, whose answers appear with the next key; the usual mistakes, last
  because they are the answers if learners look for mistakes in code.

A slide cell states a slide instead. It stands for the text above it and for the code below it; of that code
only these lines of the cell show anything: `[code]`, `[output]`, `[picture]` (`[picture 2]`: the second). A
code block shows lines of that code. Text below a line `---` is not shown: it begins the speaker's notes.

    # %% slide: A head is a soft lookup
    # - A dictionary returns the value whose key *equals* the query.
    # - A head returns a weighted mean of **all** values.
    #
    # [picture]
    #
    # ---
    # Ask first what a dictionary does with a key that it does not have.
"""

from __future__ import annotations

import ast
import base64
import io
import math
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .exercises import PLANTS
from .html_text import Block, blocks, code_html, inline_html, markdown_html, sentences
from .lesson import Cell, Lesson
from .rendering import Shown, run_lesson

if TYPE_CHECKING:
    from ..show.offline_pages import Built

__all__ = [
    "PICTURE_DPI",
    "Slide",
    "deck_html",
    "key_points",
    "signature_of",
    "slides_html",
    "slides_of",
    "task_of",
]

LARGEST = (
    25_000_000  # characters of a file with a live page; above, the slide has the command that writes one
)
PICTURE_DPI = 160
LIVE_TEXT = "The cat sat on the mat. The cat sat on the"

# A slide is 1280 x 720 pixels. Its text is in system fonts, whose widths differ: sizes are chosen by generous
# estimates, and a test measures every slide in a browser.
CODE_LINES = 18  # on one slide
CODE_SIZES = (26, 24, 22, 20, 18, 17, 16)  # classes of slides.css
WIDE, TALL = 1150, 556  # of the body, below a title of one line
LINE = 1.36  # height of a line of code
LETTER = 0.605  # width of a letter of code
POINTS = 5  # on one slide
POINT_LENGTH = 150  # letters of a good point
TITLE_LENGTH = 52  # letters of a title of one line
CODE_LENGTH = 76  # letters of a line of code whose comment stays beside it
_THING = r"(?:cell|code|line|lines|plot|bars|table|tables|picture|prose|formula|formulas)"
_POINTER = re.compile(  # to something that is on another slide
    rf"\b(?:next|following|above|last) {_THING}\b|\b{_THING} (?:above|below)\b"
    r"|\b(?:computed|measured|printed|shown) (?:above|below)\b|\b(?:above|below)(?=[).,;:]|$)"
    rf"|\b(?:[Tt]he|[Tt]his) {_THING} (?:shows?|prints?|says?|is|are|has|have)\b"
    r"|\bof the table\b|\bboth tables\b|\blines that were printed\b"
)
_ASIDE = re.compile(  # part of a sentence that points to another slide
    rf" \([^()]*\b(?:above|below)\)|,? as the {_THING}(?: above| below)? (?:shows|computes|prints|says)\b"
)
_REFERRING = re.compile(r"(?:It|Its|They|Their|This|These|That|Those|Such|So|Both|Then)\b")


@dataclass
class Slide:
    """One slide: its title as Markdown, its body and notes as HTML; `kind` is a class of slides.css."""

    title: str
    body: str
    notes: str = ""
    kind: str = ""


def slides_html(lesson: Lesson) -> str:
    """Run the lesson and return its slides as one HTML page."""
    return deck_html(lesson, run_lesson(lesson, PICTURE_DPI))


def deck_html(lesson: Lesson, shown: dict[int, Shown]) -> str:
    """Return the slides of a lesson that was run as one HTML page.

    Args:
        shown: the result of `run_lesson`.
    """
    from ..show.offline_pages import built, filled, policy

    page, live = built("slides"), _live_page(lesson)
    if live is not None and len(live) > LARGEST:
        live = None
    slides = slides_of(lesson, shown, live)
    inner: Built | None = built("heads") if live is not None else None
    allowed = policy(style=page.style, script=page.script, images=True, wasm=inner is not None, inner=inner)
    fill = {
        "POLICY": allowed,
        "TITLE": escape(f"{lesson.number}. {lesson.title}"),
        "STYLE": page.style,
        "SLIDES": "\n".join(_section(slide, lesson) for slide in slides),
        "SCRIPT": page.script,
    }
    return filled(page.template, fill)


def _section(slide: Slide, lesson: Lesson) -> str:
    if slide.kind == "first":
        head, below = "", ""
    else:
        head = f"<h2>{inline_html(slide.title)}</h2>"
        below = f'<div class="below">{escape(f"{lesson.number}. {lesson.title}")}</div>'
    body = slide.body if slide.kind == "first" else f'<div class="body">{slide.body}</div>'
    return (
        f'<section><div class="slide {slide.kind}">{head}{body}{below}</div>'
        f'<aside class="notes">{slide.notes}</aside></section>'
    )


# From cells to slides


def slides_of(lesson: Lesson, shown: dict[int, Shown], live: str | None = None) -> list[Slide]:
    """Return the slides of a lesson that was run.

    Args:
        shown: the result of `run_lesson`.
        live: the live page, for the lesson's first page cell.
    """
    deck = _Deck(lesson, shown, live)
    cells = _before_the_solution(lesson)
    for index, cell in cells:
        above = lesson.cells[index - 1].kind if index else ""
        below = lesson.cells[index + 1].kind if index + 1 < len(lesson.cells) else ""
        if cell.kind == "markdown":
            deck.add_text(cell, below)
        elif cell.kind == "slide":
            deck.add_stated(index, cell)
        elif cell.kind == "code" and above != "slide":
            deck.add_code(index, cell)
        elif cell.kind == "page":
            deck.add_page(cell)
    deck.add_end()
    _count_titles(deck.slides)
    return [_first(lesson), *deck.slides]


def _count_titles(slides: list[Slide]) -> None:
    """Number the slides that have the same title: " (2 of 3)"."""
    totals, numbers = Counter(slide.title for slide in slides), Counter[str]()
    for slide in slides:
        title = slide.title
        if totals[title] > 1:
            numbers[title] += 1
            slide.title = f"{title} ({numbers[title]} of {totals[title]})"


def _before_the_solution(lesson: Lesson) -> list[tuple[int, Cell]]:
    """Return the cells up to the solution: text and code below it use what the learner is to write."""
    cells = list(enumerate(lesson.cells))
    end = next((index for index, cell in cells if cell.kind == "solution"), len(cells))
    return cells[:end]


def _first(lesson: Lesson) -> Slide:
    idea = f"{lesson.idea[0].upper()}{lesson.idea[1:]}."
    body = (
        f"<h1>{escape(lesson.title)}</h1>"
        f'<p class="idea">{inline_html(idea)}</p>'
        f'<p class="for">Lesson {lesson.number} of the headwise course · '
        f"<code>headwise learn read {lesson.number}</code></p>"
    )
    notes = markdown_html(
        f"**Goal.** {idea}\n\nThe times of a session are in the lesson plan (`headwise learn plan "
        f"{lesson.number}`). The handout is a page of A4 (`headwise learn handout {lesson.number}`).\n\n"
        "**Keys.** Arrows or space: change the slide. **s**: this window. **o**: all slides. **f**: the full "
        "screen. **b**: a black screen. To print the slides, print the page in the browser."
    )
    return Slide(lesson.title, body, notes, "first")


@dataclass
class _Deck:
    """Slides as they are made; `title` is that of the slides to come, `lead` a point above the next code."""

    lesson: Lesson
    shown: dict[int, Shown]
    live: str | None
    slides: list[Slide] = field(default_factory=list)
    title: str = ""
    lead: str = ""
    lead_notes: str = ""
    last_notes: str = ""  # of the slide before, for code without a text above it

    def __post_init__(self) -> None:
        self.title = self.lesson.title

    def add_text(self, cell: Cell, below: str) -> None:
        """Add the slides of a text, unless slide cells below it stand for it."""
        topics = _topics(cell.text)
        if below == "slide":
            self.lead_notes = cell.text
            self.title = next((title for title, _ in reversed(topics) if title), self.title)
            return
        for number, (title, parts) in enumerate(topics):
            self.title = title or self.title
            is_last = number == len(topics) - 1
            text = "\n\n".join(
                part.text if part.kind != "code" else f"```\n{part.text}\n```" for part in parts
            )
            if is_last and below == "code" and len(parts) == 1 and parts[0].kind == "paragraph":
                self.lead, self.lead_notes = _point(parts[0].text), text
            elif parts:
                shown = [_part(part) for part in parts if not _points_elsewhere(part)]
                if shown:
                    self.last_notes = markdown_html(text)
                    self._add_parts(shown, self.last_notes)
                elif self.slides:
                    self.slides[-1].notes += markdown_html(text)

    def _add_parts(self, parts: Sequence[_Part], notes: str) -> None:
        """Add slides with these parts, as many on each as there is room for."""
        groups: list[list[_Part]] = [[]]
        for part in (piece for whole in parts for piece in whole.pieces()):
            used = sum(other.height for other in groups[-1])
            points = sum(other.is_point for other in groups[-1])
            if groups[-1] and (used + part.height > self.room or (part.is_point and points >= POINTS)):
                groups.append([])
            groups[-1].append(part)
        self.slides += [Slide(self.title, _joined(group), notes) for group in groups]

    @property
    def room(self) -> float:
        """The height of the body below the title."""
        return TALL - 48 * (len(self.title) + len(" (10 of 12)") > TITLE_LENGTH)

    def add_code(self, index: int, cell: Cell) -> None:
        """Add the slides of a code cell: its code, what it prints, its pictures."""
        shown = self.shown.get(index, Shown())
        printed, lead = shown.printed.rstrip(), self.lead
        notes = self.last_notes = markdown_html(self.lead_notes) or self.last_notes
        self.lead = self.lead_notes = ""
        only_draws = bool(shown.pictures) and not printed.strip()
        if only_draws and cell.text.count("\n") > 6:
            command = f"headwise learn notebook {self.lesson.number}"
            notes += markdown_html(f"The code of this picture is in the notebook: `{command}`.")
        else:
            above = f"<p>{inline_html(lead)}</p>" if lead else ""
            self._add_listing(cell.text, printed, above, _text_height(lead) if lead else 0, notes)
            lead = ""
        for picture in shown.pictures:
            above = f"<p>{inline_html(lead)}</p>" if lead else ""
            self.slides.append(Slide(self.title, above + _picture(picture, self.title), notes))
            lead = ""

    def _add_listing(self, code: str, printed: str, above: str, above_height: float, notes: str) -> None:
        parts = _pieces_of_code(narrow_code(without_checks(code)))
        for number, part in enumerate(parts):
            first, last = number == 0, number == len(parts) - 1
            lead, used = (above, above_height) if first else ("", 0)
            if lead and _code_size(part, "", self.room - used) is None:  # the lead gets its own slide
                self.slides.append(Slide(self.title, lead, notes))
                lead, used = "", 0
            output = printed if last else ""
            size = _code_size(part, output, self.room - used)
            if size is None and output:  # what is printed gets its own slide
                size, output = _code_size(part, "", self.room - used), ""
            body = f"{lead}{_listing(part, size or CODE_SIZES[-1])}"
            if output:
                body += _printed(output, size or CODE_SIZES[-1])
            self.slides.append(Slide(self.title, body, notes))
            if last and printed and not output:
                size = _code_size("", printed, self.room) or CODE_SIZES[-1]
                self.slides.append(Slide(self.title, _printed(printed, size), notes))

    def add_page(self, cell: Cell) -> None:
        """Add the live page, or the command that writes it."""
        text, _, view = cell.about.partition("#")
        if self.live is None:
            self.slides.append(_page_command(text, view))
            return
        self.slides.append(_live_slide(self.live, view))
        self.live = None  # once in a file: it is large

    def add_stated(self, index: int, cell: Cell) -> None:
        """Add the slide that a slide cell states."""
        below = next(
            (i for i in range(index, len(self.lesson.cells)) if self.lesson.cells[i].kind != "slide"), 0
        )
        is_code = self.lesson.cells[below].kind == "code"
        shown = self.shown.get(below) if is_code else Shown()
        text, _, spoken = cell.text.partition("\n---\n")
        self.title = cell.about
        is_first = self.lesson.cells[index - 1].kind != "slide"
        notes = markdown_html(spoken)
        if is_first or not spoken:
            notes += markdown_html(self.lead_notes)
        notes = self.last_notes = notes or self.last_notes
        if is_code and below == index + 1:
            self.lead_notes = ""
        code = self.lesson.cells[below].text if is_code else ""
        self.slides.append(Slide(cell.about, _stated_body(text, code, shown, cell.about, self.room), notes))

    def add_end(self) -> None:
        """Add the live page if no cell has shown it, the exercise, the questions and the usual mistakes."""
        lesson = self.lesson
        if self.live is not None:
            self.slides.append(_live_slide(self.live, ""))
        exercise = next((cell for cell in lesson.cells if cell.kind == "exercise"), None)
        if exercise is not None:
            self.slides += _exercise(lesson, exercise)
        self.slides += [_question(cell) for cell in lesson.cells if cell.kind == "question"]
        if lesson.repairs:
            self.slides.append(_mistakes(lesson))


def _topics(text: str) -> list[tuple[str, list[Block]]]:
    """Return the headings of a text, "" before the first, each with the blocks below it."""
    topics: list[tuple[str, list[Block]]] = [("", [])]
    for block in blocks(text):
        if block.kind == "heading":
            topics.append((block.text, []))
        else:
            topics[-1][1].append(block)
    return [topic for topic in topics if topic[0] or topic[1]]


# Parts of a slide


@dataclass(frozen=True)
class _Part:
    """A part of a body: HTML and its height. A list and a table can be divided between their items."""

    html: str
    height: float
    is_point: bool = False
    items: tuple[_Part, ...] = ()

    def pieces(self) -> Iterable[_Part]:
        return self.items or (self,)


def _part(block: Block) -> _Part:
    """Return what a slide shows of a block."""
    if block.kind == "formula":
        return _Part(_formula(block.text), 120)
    if block.kind == "list":
        points = [_point(item) for item in block.items]
        if block.is_numbered:
            return _Part("", 0, items=tuple(_bullet(text, n) for n, text in enumerate(points, 1)))
        return _Part("", 0, items=tuple(_bullet(text) for text in points))
    if block.kind == "table":
        return _table(block.items)
    if block.kind == "quote":
        return _Part(markdown_html(block.text), _text_height(block.text) + 10)
    if block.kind == "code":
        size = _code_size(block.text, "", TALL) or CODE_SIZES[-1]
        return _Part(_listing(block.text, size), _code_height(block.text, size))
    return _bullet(_point(block.text))


def _formula(text: str) -> str:
    """Return a formula of its own line; a wide one is smaller."""
    visible = re.sub(r"\\(?:text|left|right|quad|qquad|frac|sqrt|[,;!])|[{}$_^\s]", "", text)
    return f'<div class="formula{" wide" * (len(visible) > 45)}">{markdown_html(text)}</div>'


def key_points(lesson: Lesson) -> list[str]:
    """Return the points of a lesson in Markdown: those of its slide cells, or else of its texts."""
    cells = [cell for _, cell in _before_the_solution(lesson)]
    stated = [cell.text.partition("\n---\n")[0] for cell in cells if cell.kind == "slide"]
    texts = stated or [cell.text for cell in cells if cell.kind == "markdown"]
    points: list[str] = []
    for block in (block for text in texts for block in blocks(text)):
        if block.kind == "list":
            points += [" ".join(item.split()) for item in block.items] if stated else map(_point, block.items)
        elif block.kind == "paragraph" and not stated:
            points.append(_point(block.text))
    return [point for point in points if 30 < len(point) <= POINT_LENGTH + 20 and point[-1] == "."]


def _bullet(text: str, number: int | None = None) -> _Part:
    item = f"<li>{inline_html(text)}</li>"
    page = f"<ul>{item}</ul>" if number is None else f'<ol start="{number}">{item}</ol>'
    return _Part(page, _text_height(text), True)


def _table(lines: Sequence[str]) -> _Part:
    """Return a table, in pieces of a slide each."""
    head, body = "\n".join(lines[:2]), lines[2:]
    is_long = max(map(len, lines)) > 120 or len(body) > 8
    letters, row = (92, 25) if is_long else (92, 31)
    heights = [17 + row * max(1, math.ceil(len(line) / letters)) for line in lines]
    pieces: list[_Part] = []
    rows: list[str] = []
    height = top = heights[0] + 10
    for line, tall in zip(body, heights[2:], strict=True):
        if rows and height + tall > TALL - 20:
            pieces.append(_Part(_table_html(head, rows, is_long), height))
            rows, height = [], top
        rows.append(line)
        height += tall
    return _Part("", 0, items=(*pieces, _Part(_table_html(head, rows, is_long), height)))


def _table_html(head: str, rows: Sequence[str], is_long: bool) -> str:
    page = markdown_html("\n".join([head, *rows]))
    return page.replace("<table>", '<table class="small">') if is_long else page


def _joined(parts: Sequence[_Part]) -> str:
    """Return the HTML of parts; neighbouring points are one list."""
    page = "".join(part.html for part in parts)
    return re.sub(r'</ol><ol start="\d+">', "", page.replace("</ul><ul>", ""))


def _sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph, without asides that point to another slide."""
    return [_ASIDE.sub("", part) for part in sentences(paragraph)]


def _points_elsewhere(block: Block) -> bool:
    """Return True if every sentence of a paragraph is about something on another slide."""
    parts = _sentences(block.text)
    return block.kind == "paragraph" and all(_POINTER.search(part) and "**" not in part for part in parts)


def _point(paragraph: str) -> str:
    """Return what a slide shows of a paragraph: its first short sentence, and those after it that fit.

    If sentences have a term in bold, it is these, which define the term, and the neighbours that fit.
    """
    parts = _sentences(paragraph)
    useful = [
        part for part in parts if "**" in part or not (part.startswith("(") or _POINTER.search(part))
    ] or parts
    chosen = {number for number, part in enumerate(useful) if "**" in part}
    for number in sorted(chosen):  # "It is a **head**" needs the sentence before
        if number and _REFERRING.match(useful[number]):
            chosen.add(number - 1)
    if not chosen:
        chosen = {next((number for number, part in enumerate(useful) if len(part) <= POINT_LENGTH), 0)}
    length = sum(len(useful[number]) for number in chosen)
    for number in range(min(chosen) + 1, len(useful)):
        if number in chosen:
            continue
        length += len(useful[number])
        if length > POINT_LENGTH or useful[number].endswith(":"):
            break
        chosen.add(number)
    point = " ".join(useful[number] for number in sorted(chosen))
    return point[:-1] + "." if point[-1] in ":," else point


def _text_height(text: str) -> float:
    """Return the height of a point of 28 pixels."""
    visible = re.sub(r"\\[a-z]+|[{}$*`_^]", "", text)
    return 40 * max(1, math.ceil(len(visible) / 78)) + 18


def _code_size(code: str, printed: str, room: float) -> int | None:
    """Return the largest size in which code and what it prints fit, without breaking lines of code."""
    for size in CODE_SIZES:
        longest = max(map(len, code.splitlines()), default=0)
        height = _code_height(code, size) + _code_height(printed, size)
        if longest * size * LETTER <= WIDE - 44 and height <= room:
            return size
    return None


def _code_height(code: str, size: int) -> float:
    if not code:
        return 0
    letters = (WIDE - 44) / (size * LETTER)
    lines = sum(max(1, math.ceil(len(line) / letters)) for line in code.splitlines())
    return lines * size * LINE + 30 + 18


def _pieces_of_code(code: str) -> list[str]:
    """Return code in pieces of at most CODE_LINES lines, divided between statements where possible."""
    lines = code.splitlines()
    if len(lines) <= CODE_LINES:
        return [code]
    least = math.ceil(len(lines) / CODE_LINES)
    goal = math.ceil(len(lines) / least)
    depths = _cuts(code)
    pieces, first = [], 0
    while len(lines) - first > CODE_LINES:
        window = range(first + 3, first + CODE_LINES + 1)
        # the best cut: outside of statements, at a blank line, near the goal
        cut = min(window, key=lambda at: (depths.get(at, 9), abs(at - first - goal)))
        pieces.append("\n".join(lines[first:cut]).strip("\n"))
        first = cut
    pieces.append("\n".join(lines[first:]).strip("\n"))
    return [piece for piece in pieces if piece.strip()]


def _cuts(code: str) -> dict[int, int]:
    """Return the lines before which code can be cut, each with its depth: 0 between top-level statements."""
    depths: dict[int, int] = {}

    def visit(body: Iterable[ast.stmt], depth: int) -> None:
        for statement in body:
            decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
            line = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
            depths.setdefault(line, depth)
            visit(getattr(statement, "body", []), depth + 1)

    lines = code.splitlines()
    visit(ast.parse(code).body, 0)
    for line in sorted(depths):  # comments above a statement stay with it
        first = line
        while first > 0 and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        if first != line:
            depths[first] = depths.pop(line)
    return depths


def without_checks(code: str) -> str:
    """Return code without its `assert` statements between other statements: the lesson's checks of itself."""
    lines = code.splitlines()
    checks = [node for node in ast.parse(code).body if isinstance(node, ast.Assert)]
    hidden = {line for node in checks for line in range(node.lineno - 1, node.end_lineno or node.lineno)}
    return "\n".join(line for number, line in enumerate(lines) if number not in hidden).strip("\n")


def narrow_code(code: str) -> str:
    """Return code in which the comments of long lines are above them, so that it can be shown larger.

    Example:
        >>> print(narrow_code("x = 1  # one\\n" + "y = " + "1 + " * 20 + "1  # a sum"))
        x = 1  # one
        # a sum
        y = 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1
    """
    lines = code.splitlines()
    for token in reversed([*tokenize.generate_tokens(io.StringIO(code).readline)]):
        line, column = token.start[0] - 1, token.start[1]
        before = lines[line][:column] if token.type == tokenize.COMMENT else ""
        if before.strip() and len(lines[line]) > CODE_LENGTH:
            indent = before[: len(before) - len(before.lstrip())]
            lines[line : line + 1] = [indent + token.string, before.rstrip()]
    return "\n".join(lines)


def _listing(code: str, size: int) -> str:
    return f'<pre class="code s{size}">{code_html(code)}</pre>'


def _printed(printed: str, size: int) -> str:
    return f'<pre class="output s{size}">{escape(printed)}</pre>'


def _picture(picture: bytes, title: str) -> str:
    data = base64.b64encode(picture).decode()
    alt = escape(f"Plot: {title}", quote=True)
    return f'<div class="picture"><img src="data:image/png;base64,{data}" alt="{alt}"></div>'


# Slides of a kind


def _stated_body(text: str, code: str, shown: Shown | None, title: str, room: float) -> str:
    """Return the body of a stated slide: Markdown, and what its lines in brackets ask for.

    Args:
        code: the cell below; `shown`: what it shows, None if it was not run.
    """
    parts = re.split(r"(?m)^(\[(?:code|output|picture(?: \d+)?)\])$", text)
    has_picture = any(part.startswith("[picture") for part in parts)
    words = [part for part in parts if part.strip() and not re.fullmatch(r"\[.*\]", part)]
    listings = [_excerpt(block) for part in words for block in blocks(part) if block.kind == "code"]
    printed = shown.printed.rstrip() if shown is not None else ""
    code = narrow_code(without_checks(code))
    listings += [code] if "[code]" in parts else []
    rest = sum(_stated_height(block) for part in words for block in blocks(part))
    size = _code_size(
        "\n".join(listings), printed if "[output]" in parts else "", room - rest - 14 * len(listings)
    )
    size = size or CODE_SIZES[-1]
    pictures: list[str] = []
    body = ""
    for part in parts:
        if part == "[code]":
            body += _listing(code, size)
        elif part == "[output]":
            body += _printed(printed, size)
        elif part.startswith("[picture"):
            number = int(part.strip("[]").partition(" ")[2] or 1)
            if shown is not None and number > len(shown.pictures):
                raise ArgumentError(
                    f"slide must show a picture of the code below it: {title!r} shows number {number} of "
                    f"{len(shown.pictures)}; draw it in that cell"
                )
            pictures += [_picture(shown.pictures[number - 1], title)] if shown is not None else []
        else:
            for block in blocks(part):
                if block.kind == "code":
                    body += _listing(_excerpt(block), size)
                else:
                    is_formula = block.kind == "formula"
                    body += _formula(block.text) if is_formula else markdown_html(block.text)
    if has_picture and body:
        return f'<div class="beside"><div>{body}</div><div>{"".join(pictures)}</div></div>'
    return body + "".join(pictures)


def _excerpt(block: Block) -> str:
    return narrow_code(textwrap.dedent(block.text))


def _stated_height(block: Block) -> float:
    if block.kind == "code":
        return 0
    if block.kind == "list":
        return sum(_text_height(item) for item in block.items)
    if block.kind == "table":
        return 46 * (len(block.items) - 1)
    return 110 if block.kind == "formula" else _text_height(block.text)


def _question(cell: Cell) -> Slide:
    """Return a slide with a question, and the beginning of its answer for the next key."""
    brief: list[str] = []
    for sentence in _sentences(cell.text):
        if brief and (len(" ".join([*brief, sentence])) > 300 or sentence.endswith(":")):
            break
        if not brief or not _POINTER.search(sentence):
            brief.append(sentence)
    question, answer = inline_html(cell.about), inline_html(" ".join(brief))
    body = f'<p class="asked">{question}</p><div class="answer fragment">{answer}</div>'
    return Slide(
        "Question", body, f"{markdown_html('**Expected answer.**')}{markdown_html(cell.text)}", "question"
    )


def _mistakes(lesson: Lesson) -> Slide:
    """Return a slide with mistakes that the examiner names in exercises of this lesson."""
    from ..examiner.steps import FAULTS

    faults = [FAULTS[key] for key in lesson.repairs][:4]
    rows = [
        f"<tr><td>{escape(fault.title)}</td><td><code>{escape(fault.formula)}</code></td>"
        f"<td><code>{escape(fault.right)}</code></td></tr>"
        for fault in faults
    ]
    head = "<tr><th>what goes wrong</th><th>what is computed</th><th>what is right</th></tr>"
    notes = "\n".join(
        f"- **{fault.key}**: {_plain(fault.hints[0])} {_plain(fault.why)}" + _repair_command(fault.key)
        for fault in faults
    )
    body = f'<table class="mistakes"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    return Slide("Usual mistakes", body, markdown_html(notes))


def _plain(text: str) -> str:
    """Return a text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_<\[\]$|])", r"\\\1", text)


def _repair_command(key: str) -> str:
    return f" To repair: `headwise learn repair {[*PLANTS].index(key) + 1}`." if key in PLANTS else ""


def _exercise(lesson: Lesson, cell: Cell) -> list[Slide]:
    """Return the slide of the exercise: task, code to start from, commands; two slides for long code."""
    title, task = f"Exercise: write `{cell.about}`", task_of(cell)
    code = narrow_code(signature_of(cell))
    if code.count("\n") >= CODE_LINES:
        code = narrow_code(signature_of(cell, only_open=True))
    commands = (
        f"headwise learn start {lesson.number}    # writes {lesson.file_name}\n"
        f"headwise learn check {lesson.number}    # is it right?\n"
        f"headwise learn hint {lesson.number}     # three hints, one after another"
    )
    solution = next((other.text for other in lesson.cells if other.kind == "solution"), "")
    notes = markdown_html(f"A right solution, for you:\n\n```python\n{solution}\n```")
    above = f"<p>{inline_html(task)}</p>"
    room = TALL - _text_height(task)
    for command_size, height in ((22, 150), (18, 105)):
        below = f'<pre class="output s{command_size} commands">{code_html(commands)}</pre>'
        size = _code_size(code, "", room - height)
        if size is not None:
            return [Slide(title, above + _listing(code, size) + below, notes, "exercise")]
    size = _code_size(code, "", room) or CODE_SIZES[-1]
    return [
        Slide(title, above + _listing(code, size), notes, "exercise"),
        Slide(title, above + below, notes, "exercise"),
    ]


def task_of(cell: Cell) -> str:
    """Return the task of an exercise in Markdown: the docstring of its file, and a function's own."""
    module = ast.parse(cell.text)
    texts = [ast.get_docstring(module) or ""]
    texts += [ast.get_docstring(node) or "" for node in module.body if isinstance(node, ast.FunctionDef)]
    return " ".join(_plain(text.partition("\n")[0]) for text in texts if text)


def signature_of(cell: Cell, only_open: bool = False) -> str:
    """Return the code of an exercise without imports and long docstrings, "..." for its open places.

    Args:
        only_open: leave out functions and methods that are written already.
    """
    module = ast.parse(cell.text)
    lines = cell.text.splitlines()
    hidden: set[int] = set()

    def hide(node: ast.stmt) -> None:
        hidden.update(range(node.lineno - 1, node.end_lineno or node.lineno))

    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            hide(node)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            is_function = isinstance(node, ast.FunctionDef)
            if only_open and isinstance(node, ast.FunctionDef) and "NotImplemented" not in ast.unparse(node):
                hide(node)
            if ast.get_docstring(node):
                text = node.body[0]
                is_short = text.lineno == text.end_lineno and len(lines[text.lineno - 1]) <= CODE_LENGTH
                if not (is_function and node not in module.body and is_short):
                    hide(text)
    shown = "\n".join(line for number, line in enumerate(lines) if number not in hidden)
    shown = re.sub(r"raise NotImplementedError(?=\s*(#|$))", "...", shown, flags=re.MULTILINE)
    return re.sub(r"\n\s*\n+", "\n", shown).strip("\n")


# The live page


def _live_page(lesson: Lesson) -> str | None:
    """Return the live page of mini, if the lesson has a page cell or loads mini."""
    pages = [cell.about.partition("#")[0] for cell in lesson.cells if cell.kind == "page"]
    loads = any('load("mini")' in cell.text for cell in lesson.cells if cell.kind == "code")
    if not pages and not loads:
        return None
    import torch

    from ..listeners.capture import watch
    from ..models.pretrained import MINI, load

    text = pages[0] if pages else LIVE_TEXT
    trained = load(MINI)
    ids = trained.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad(), watch(trained.model) as heads:
        trained.model(ids)
    with TemporaryDirectory() as folder:
        return heads.to_html(Path(folder) / "heads.html", text=text, alive=trained).read_text("utf-8")


def _live_slide(page: str, view: str) -> Slide:
    frame = (
        '<div class="frame"><iframe title="The heads of mini, live" sandbox="allow-scripts" '
        f'data-page="{escape(page)}"></iframe></div>'
        '<p class="on-paper">The live page of mini is in the file of these slides; open it in a browser.</p>'
    )
    opened = f" Open this view: `{view}`." if view else ""
    notes = markdown_html(
        "Type a sentence, click a head, switch a head off. The model runs in this page, without a network. "
        "While the page has the focus, keys go to it: change the slide with the arrows in the corner, or in "
        f"this window.{opened}"
    )
    return Slide("Try it: the heads of a trained model", frame, notes, "live")


def _page_command(text: str, view: str) -> Slide:
    quoted = text.replace('"', '\\"')
    command = f'headwise look "{quoted}" --html heads.html'
    opened = f" Open `heads.html#{view}`." if view else ""
    notes = markdown_html(f"Write the page before the session and show it in the browser.{opened}")
    return Slide("Try it: the heads of a trained model", _listing(command, 22), notes)
