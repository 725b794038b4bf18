"""Texts and code of lessons as HTML that needs no network: formulas as MathML, code with colours.

Everything that is not Markdown is escaped: no text of a lesson becomes an element or a script.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import needed
from .rendering import FORMULA

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

__all__ = ["Block", "blocks", "code_html", "inline_html", "markdown_html", "mathml", "sentences"]

BlockKind = Literal["heading", "paragraph", "quote", "formula", "list", "table", "code"]
_KINDS: dict[str, BlockKind] = {
    "heading_open": "heading",
    "paragraph_open": "paragraph",
    "blockquote_open": "quote",
    "bullet_list_open": "list",
    "ordered_list_open": "list",
    "table_open": "table",
    "fence": "code",
}
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\([\w./#:-]+\)")
_SENTENCE_END = re.compile(r"(?<=[.!?:])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)\s+(?=[A-Z0-9`*$\"“(])")
_MARK = "\ue000{}\ue001"  # private characters: they are in no lesson
_COVERED = {"<": "\ue002", ">": "\ue003", "&": "\ue004"}


@dataclass(frozen=True)
class Block:
    """A part of a Markdown text; `items` are those of a list, and the lines of a table."""

    kind: BlockKind
    text: str
    items: tuple[str, ...] = ()
    is_numbered: bool = False


def blocks(text: str) -> list[Block]:
    """Return the blocks of a Markdown text, in order."""
    lines = text.splitlines()
    parts: list[Block] = []
    for token in _parser().parse(text):
        if token.map is None or token.level != 0 or token.type not in _KINDS:
            continue
        first, end = token.map
        kind, source = _KINDS[token.type], "\n".join(lines[first:end]).strip()
        if kind == "heading":
            parts.append(Block(kind, source.lstrip("# ")))
        elif kind == "code":
            parts.append(Block(kind, token.content.rstrip()))
        elif kind == "list":
            parts.append(Block(kind, source, _items(source), token.type.startswith("ordered")))
        elif kind == "table":
            parts.append(Block(kind, source, tuple(source.splitlines())))
        elif source.startswith("$$") and source.endswith("$$"):
            parts.append(Block("formula", source))
        else:
            parts.append(Block(kind, " ".join(source.split())))
    return parts


def _items(source: str) -> tuple[str, ...]:
    """Return the items of a list without their marks, each on a line."""
    parts = re.split(r"(?m)^(?:[-*+]|\d+[.)])\s+", source)
    return tuple(" ".join(part.split()) for part in parts if part.strip())


def sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph. Formulas and code are not divided.

    Example:
        >>> sentences("A head attends, e.g. to `a. B`. It returns a mean.")
        ['A head attends, e.g. to `a. B`.', 'It returns a mean.']
    """
    hidden: list[str] = []

    def hide(match: re.Match[str]) -> str:
        hidden.append(match[0])
        return _MARK.format(len(hidden) - 1)

    covered = re.sub(r"`[^`]*`|\$[^$]+\$", hide, " ".join(text.split()))
    ends = re.compile(_SENTENCE_END.pattern.replace('"“(]', '"“(\ue000]'))
    parts = ends.split(covered)
    shown = [re.sub("\ue000(\\d+)\ue001", lambda match: hidden[int(match[1])], part) for part in parts]
    joined: list[str] = []
    for part in shown:  # a bold or bracketed text that was cut is joined again
        if joined and (joined[-1].count("**") % 2 or joined[-1].count("(") > joined[-1].count(")")):
            joined[-1] += f" {part}"
        else:
            joined.append(part)
    return joined


def markdown_html(text: str) -> str:
    """Return a Markdown text as HTML; links become their texts, since a page of one file has no others."""
    formulas: list[str] = []

    def hide(match: re.Match[str]) -> str:
        formulas.append(mathml(match))
        return _MARK.format(len(formulas) - 1)

    parts = _CODE.split(text)
    covered = "".join(
        part if index % 2 else FORMULA.sub(hide, _LINK.sub(r"\1", part)) for index, part in enumerate(parts)
    )
    page = re.sub(
        r' style="text-align:(\w+)"', r' class="\1"', _parser().render(covered)
    )  # pages forbid styles
    return re.sub("\ue000(\\d+)\ue001", lambda match: formulas[int(match[1])], page).strip()


def inline_html(text: str) -> str:
    """Return one line of Markdown as HTML, without a paragraph around it."""
    return markdown_html(text).removeprefix("<p>").removesuffix("</p>")


def code_html(code: str, language: str = "python") -> str:
    """Return code as the inside of a `pre` element, with classes for colours."""
    if language != "python":
        return html.escape(code)
    with needed("rich", "the colours of code need pygments, which comes with rich"):
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer
    return highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n")


def _parser() -> MarkdownIt:
    with needed("rich", "the texts of lessons need markdown-it-py, which comes with rich"):
        from markdown_it import MarkdownIt

    def highlighted(code: str, language: str, _: str) -> str:
        return code_html(code.rstrip("\n"), language)

    parser = MarkdownIt("commonmark", {"html": False, "highlight": highlighted}).enable("table")
    parser.disable("image")
    return parser


def mathml(match: re.Match[str]) -> str:
    """Return a formula that `FORMULA` matched as MathML; its text is escaped."""
    with needed("latex2mathml", "the formulas of slides and handouts need latex2mathml"):
        from latex2mathml.converter import convert

    formula = " ".join((match[1] or match[2]).split())
    for sign, cover in _COVERED.items():  # the converter does not escape them in \text
        formula = formula.replace(sign, cover)
    page = convert(formula, display="block" if match[1] else "inline")
    for sign, cover in _COVERED.items():
        page = page.replace(f"<mi>{cover}</mi>", f"<mo>{html.escape(sign)}</mo>")
        page = page.replace(cover, html.escape(sign))
    return page
