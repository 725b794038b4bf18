"""Watched heads as one page: a file that needs nothing else and loads nothing.

What it says is `heads_page_data.page_data`; what draws it is built from `page/` of the repository. All that
users give is text, whatever it looks like. In a notebook the page stands in a frame; where it would be too
large for that, the table of heads alone does, which runs nothing.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError
from ..heads.collection import Heads
from ..heads.labels import MIXED
from .heads_page_data import page_data
from .heads_tables import as_data
from .offline_pages import Blobs, built, filled, framed, policy
from .tables import HEADERS
from .texts import plain

__all__ = ["EXAMPLE", "heads_page", "in_notebook", "page_of", "table_page"]

EXAMPLE = "heads.html"

NOTEBOOK = 4 * 2**20  # letters of a page that a notebook is given
COARSER = 64  # cells a side, of one that would be larger
TALL = 860  # of the frame, in dots of the screen
NUMBERS = ("entropy", "distance", "first", "previous", "itself", "next", "special", "punctuation")


def heads_page(heads: Heads, **options: Any) -> str:
    """The whole page as text; options as of `heads_page_data.page_data`.

    Raises:
        ArgumentError, IndexError, ShapeError: as `headwise.Heads.to_html`.
    """
    return page_of(*page_data(heads, **options))


def page_of(data: dict[str, Any], blobs: Blobs) -> str:
    """The page of such data."""
    template, style, script = built("heads")
    fill = {
        "POLICY": policy(style=style, script=script, images=True, wasm=True),
        "STYLE": style,
        "TITLE": html.escape(plain(data["heading"], 120)),
        "DATA": _as_script(data),
        "BLOBS": blobs.text,
        "SCRIPT": script,
    }
    return filled(template, fill)


ESCAPED = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def _as_script(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in; half characters as the sign that stands for them."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.translate(ESCAPED)


# In a notebook


def in_notebook(heads: Heads) -> str | None:
    """The page in a frame that is kept apart from the notebook; where it would be larger than 4 MB, with
    coarser maps, or the table alone."""
    if not heads:
        return None
    coarser: dict[str, Any] = {"side": COARSER, "finer": []}
    for options in ({}, coarser):
        try:
            page = heads_page(heads, **options)
        except ArgumentError:  # neither maps nor pictures: the table needs none
            break
        if len(page) <= NOTEBOOK:
            return framed(page, "headwise heads", height=TALL, scripts=True)
    return framed(table_page(heads), "headwise heads", height=720)


STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.2rem; }
h1 { font-size: 1.3rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; text-align: left; border-bottom: 1px solid #8884; }
.number { text-align: right; }
"""
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{POLICY}}">
<title>{{HEADING}}</title>
<style>{{STYLE}}</style>
</head>
<body>
<h1>{{HEADING}}</h1>
<p>Entropy is in nats, distance in keys, the others are shares of a head's weight. A dash: no label, or no
query had such a key.</p>
<div role="region" aria-label="Heads in numbers" tabindex="0">
<table><thead><tr>{{HEADER}}</tr></thead>
<tbody>
{{ROWS}}
</tbody></table>
</div>
</body>
</html>
"""
NUMBER = ' class="number"'


def table_page(heads: Heads) -> str:
    """The heads in numbers, a page without a script.

    Raises:
        ArgumentError: nothing was watched.
    """
    data = as_data(heads)
    measured = {name for head in data["heads"] for name in head["numbers"]}
    shown = [name for name in NUMBERS if name in measured]
    header = [_column("head"), _column("label"), _column("score", NUMBER)]
    header += [_column(HEADERS.get(name, name), NUMBER) for name in shown]
    count = len(data["heads"])
    fill = {
        "POLICY": policy(style=STYLE),
        "STYLE": STYLE,
        "HEADING": _safe(f"{data['title'] or 'Model'}: {count} head{'' if count == 1 else 's'}", 200),
        "HEADER": "".join([*header, _column("what it does")]),
        "ROWS": "\n".join(_row(head, shown) for head in data["heads"]),
    }
    return filled(TEMPLATE, fill)


def _safe(text: str, length: int | None = None) -> str:
    """Text for a page: nothing in it is markup, turns round what follows, or is half a character."""
    return html.escape(plain(text, length))


def _column(name: str, kind: str = "") -> str:
    said = name.replace("-\n", "").replace("\n", " ").replace("_", " ")
    return f'<th scope="col"{kind}>{_safe(said)}</th>'


def _row(head: dict[str, Any], shown: Sequence[str]) -> str:
    mixed = head["label"] == MIXED
    name = f"{head['layer']}.{head['head']}"
    cells = [
        f'<th scope="row">{_safe(name)}</th>',
        f"<td>{_safe(head['label'])}</td>",
        f"<td{NUMBER}>{_number(head['score'])}</td>",
    ]
    cells += [f"<td{NUMBER}>{_number(head['numbers'].get(name))}</td>" for name in shown]
    cells.append(f"<td>{'–' if mixed else _safe(head['sentence'])}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
