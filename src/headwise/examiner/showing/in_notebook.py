"""A report in a notebook: HTML that needs nothing else, in light and in dark."""

from __future__ import annotations

from html import escape

from ..report import Report
from .in_words import tell
from .letters import MARKS
from .parts import Heading, Listed, Note, Part, Quote, Rows

# Text has the page's own colour. A notebook's theme need not be the system's, so for the three marks what
# JupyterLab, VS Code and Colab say of theirs comes last.
LIGHT = "--good:#116329;--bad:#b3261e;--doubt:#7d4e00"
DARK = "--good:#56d364;--bad:#ff8a80;--doubt:#e3b341"
STYLE = f"""
.headwise-report{{{LIGHT};font:14px/1.5 system-ui,sans-serif;max-width:60em;padding:.2em 0}}
@media (prefers-color-scheme:dark){{.headwise-report{{{DARK}}}}}
[data-jp-theme-light="true"] .headwise-report,.vscode-light .headwise-report{{{LIGHT}}}
[data-jp-theme-light="false"] .headwise-report,.vscode-dark .headwise-report,
[theme=dark] .headwise-report{{{DARK}}}
.headwise-report p{{margin:.5em 0}}
.headwise-report .head{{font-weight:600;font-size:1.1em}}
.headwise-report .right{{color:var(--good)}}
.headwise-report .wrong{{color:var(--bad)}}
.headwise-report .unknown{{color:var(--doubt)}}
.headwise-report .soft,.headwise-report dt{{opacity:.7}}
.headwise-report pre,.headwise-report code{{font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;
background:none;color:inherit;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}}
.headwise-report .quote{{border-left:3px solid var(--bad);padding:.2em .8em;margin:.6em 0}}
.headwise-report dl{{display:grid;grid-template-columns:max-content 1fr;gap:.2em 1.2em;margin:.6em 0}}
.headwise-report dt{{font-weight:400}}
.headwise-report dd{{margin:0;white-space:pre-line;overflow-wrap:anywhere}}
.headwise-report ul{{list-style:none;margin:.2em 0 .6em;padding-left:1em}}
.headwise-report .note{{opacity:.7;border-top:1px solid rgba(128,128,128,.4);padding-top:.4em}}
"""


def as_html(report: Report, hint: int | None = None) -> str:
    """The report as one `<div>` with its own style; no script, nothing fetched, every text escaped.

    Raises:
        ArgumentError: a hint other than None, 1, 2, 3.
    """
    parts = "\n".join(map(_drawn, tell(report, hint)))
    # Notebooks read $...$ in HTML as formulas; these classes ask them not to.
    return (
        f'<div class="headwise-report tex2jax_ignore mathjax_ignore"><style>{STYLE}</style>\n{parts}\n</div>'
    )


def _drawn(part: Part) -> str:
    match part:
        case Heading(mark, text):
            return f'<p class="head">{_mark(mark)} {escape(text)}</p>'
        case Quote(place, line, text):
            number = "" if line is None else f'<span class="soft">{line}</span> '
            above = f'<div class="soft">{escape(place)}</div>' if place else ""
            quoted = f'<pre><span class="wrong">→</span> {number}{escape(text)}</pre>'
            return f'<div class="quote">{above}{quoted}</div>'
        case Rows(rows):
            each = (
                f"<dt>{escape(row.label)}</dt>"
                f"<dd>{f'<pre>{escape(row.text)}</pre>' if row.code else escape(row.text)}</dd>"
                for row in rows
            )
            return f"<dl>{''.join(each)}</dl>"
        case Listed(title, items):
            lines = "".join(f"<li>{_mark(mark)} {escape(text)}</li>" for mark, text in items)
            return f"<p>{escape(title)}</p><ul>{lines}</ul>"
        case Note(text):
            return f'<p class="note">{escape(text)}</p>'


def _mark(mark: str) -> str:
    return f'<span class="{escape(mark)}">{MARKS[mark]}</span>'
