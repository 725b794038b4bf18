"""Watched heads as one page: a file that needs nothing else, loads nothing and runs nothing.

What it says is `heads_data.as_data`; what it shows beside that are cells of heads, each a small picture. The
sources of the page lie in `page/`. All that users give is text, whatever it looks like.
"""

from __future__ import annotations

import base64
import html
import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, PackageMissing
from ..heads.collection import Heads
from ..heads.labels import MIXED
from ..heads.layer_names import Layer
from .heads_data import as_data
from .heads_pictures import model_picture
from .offline_pages import filled, framed, policy
from .pictured_heads import cells_of, names_of
from .sheet import LIGHT_TO_DARK, colours
from .tables import HEADERS
from .texts import plain

if TYPE_CHECKING:
    from ..heads.roles import Roles
    from .heatmaps import Cells, Names

__all__ = ["EXAMPLE", "heads_page", "in_notebook"]

EXAMPLE = "heads.html"

CELLS = 96  # a side of a head's picture: beyond, positions share a cell
SHADES = 32  # of colour: more make files larger and nothing clearer
WIDEST, COLOURS = 2400, 200  # dots and colours of the picture of all heads
STRONGEST = 3  # of a head's weights, in words
LONGEST_TEXT = 2000  # characters
NOTEBOOK = 48, 2**20  # heads and letters up to which a notebook shows pictures
NUMBERS = ("entropy", "distance", "first", "previous", "itself", "next", "special", "punctuation")
HOW = (
    "Each square is one head: a row is a token that attends (query), a column one that is attended to (key); "
    "the darker, the more weight."
)


def heads_page(
    heads: Heads,
    *,
    batch: int = 0,
    chosen: Sequence[tuple[Layer, int]] | None = None,
    text: str | None = None,
    roles: Roles | None = None,
    pictures: bool = True,
) -> str:
    """The whole page as text.

    Raises:
        ArgumentError: nothing was watched; an unknown layer or head; a layer without a map or a picture.
        IndexError: no such sequence.
        PackageMissing: matplotlib is not installed, and pictures are wanted.
    """
    data = as_data(heads, chosen=chosen, text=text, roles=roles)
    folder = files(__package__) / "page"
    style = (folder / "heads_page.css").read_text("utf-8").replace("{{COLOURS}}", ", ".join(LIGHT_TO_DARK))
    count = len(data["heads"])
    heading = (
        f"{data['title'] or 'Model'}: what {'its head looks' if count == 1 else f'{count} heads look'} at"
    )
    sections = [("words", "In words", _in_words(data))]
    if pictures:
        sections.append(("all", "All heads", _overview(heads, batch, chosen, text, heading)))
    sections.append(("table", "Heads in numbers", _table(data, linked=pictures)))
    if roles is not None:
        sections.append(("roles", "Roles", _roles(roles)))
    if pictures:
        sections += _layers(heads, batch, data)
    fill = {
        "POLICY": policy(style=style, images=True),
        "STYLE": style,
        "TITLE": _safe(heading, 120),
        "HEADING": _safe(heading, 200),
        "TEXT": _quoted(text),
        "SIZES": _sizes(data),
        "CONTENTS": _contents(sections),
        "MAIN": "\n".join(_section(*section) for section in sections),
    }
    return filled((folder / "heads_page.html").read_text("utf-8"), fill)


def _safe(text: str, length: int | None = None) -> str:
    """Text for a page: nothing in it is markup, turns round what follows, or is half a character."""
    return html.escape(plain(text, length))


# Parts


def _section(name: str, title: str, inside: str) -> str:
    heading = f'<h2 id="{name}-title">{_safe(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{heading}\n{inside}\n</section>'


def _contents(sections: Sequence[tuple[str, str, str]]) -> str:
    links = "".join(f'<li><a href="#{name}">{_safe(title)}</a></li>' for name, title, _ in sections)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _quoted(text: str | None) -> str:
    if text is None:
        return ""
    shown = _safe(" ".join(text.split()), LONGEST_TEXT)
    return f'<blockquote lang="" dir="auto">{shown}</blockquote>'


def _sizes(data: dict[str, Any]) -> str:
    layers, heads = data["layers"], data["heads"]
    lengths = sorted({(layer["queries"], layer["keys"]) for layer in layers})
    said = [
        f"{len(layers)} layer{'' if len(layers) == 1 else 's'}",
        f"{len(heads)} head{'' if len(heads) == 1 else 's'}",
    ]
    if len(lengths) == 1 and lengths[0][0] == lengths[0][1]:
        said.append(f"{lengths[0][0]:,} tokens")
    return ", ".join(said)


def _in_words(data: dict[str, Any]) -> str:
    counts = [f"<b>{label['heads']}</b> × " for label in data["labels"]]
    counts += [""] * (len(data["sentences"]) - len(counts))  # what is said of several labels
    said = (f"<li>{count}{_safe(each)}</li>" for count, each in zip(counts, data["sentences"], strict=True))
    return f'<ul class="labels">{"".join(said)}</ul>'


NUMBER = ' class="number"'
TABLE_SAYS = (
    "One row per head. Entropy is in nats, distance in keys, the others are shares of a head's weight. "
    "A dash: no label, or no query had such a key."
)


def _table(data: dict[str, Any], *, linked: bool) -> str:
    measured = dict.fromkeys(name for head in data["heads"] for name in head["numbers"])
    shown = [name for name in NUMBERS if name in measured]
    with_roles = any(head["roles"] is not None for head in data["heads"])
    header = [_column("head"), _column("label"), _column("score", NUMBER)]
    header += [_column("role")] if with_roles else []
    header += [_column(HEADERS.get(name, name), NUMBER) for name in shown] + [_column("what it does")]
    rows = [_row(head, shown, with_roles, linked) for head in data["heads"]]
    return f'<p class="how">{TABLE_SAYS}</p>\n{_scrolled("table", header, rows)}'


def _column(name: str, kind: str = "") -> str:
    said = name.replace("-\n", "").replace("\n", " ").replace("_", " ")
    return f'<th scope="col"{kind}>{_safe(said)}</th>'


def _scrolled(section: str, header: Sequence[str], rows: Sequence[str]) -> str:
    """A table that may be wider than the page."""
    return (
        f'<div class="scroll" role="region" aria-labelledby="{section}-title" tabindex="0">'
        f"<table><thead><tr>{''.join(header)}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _row(head: dict[str, Any], shown: Sequence[str], with_roles: bool, linked: bool) -> str:
    mixed = head["label"] == MIXED
    cells = [f'<th scope="row">{_link(head) if linked else _safe(_name(head))}</th>']
    cells.append(f'<td class="label{" mixed" if mixed else ""}">{_safe(head["label"])}</td>')
    cells.append(f"<td{NUMBER}>{_number(head['score'])}</td>")
    if with_roles:
        cells.append(f"<td>{_safe(', '.join(head['roles'] or ())) or '–'}</td>")
    cells += [f"<td{NUMBER}>{_number(head['numbers'].get(name))}</td>" for name in shown]
    cells.append(f'<td class="said">{"–" if mixed else _safe(head["sentence"])}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _name(head: dict[str, Any]) -> str:
    return f"{head['layer']}.{head['head']}"


def _link(head: dict[str, Any]) -> str:
    return f'<a href="#{_anchor(head)}">{_safe(_name(head))}</a>'


def _anchor(head: dict[str, Any]) -> str:
    """Where its picture stands: plain letters, whatever the module's path holds, and no two paths alike."""
    path = "".join(char if char.isascii() and char.isalnum() else f"-{ord(char):x}-" for char in head["path"])
    return f"head-{path}-{head['head']}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _roles(roles: Roles) -> str:
    if not roles.found:
        return (
            f"<p>None of {len(roles)} relations between words has a head that finds the related word more "
            "often than every rule that needs no model.</p>"
        )
    titles = ("relation", "head", "share", "95%", "cases", "best rule", "its share")
    rows = [
        f'<tr><th scope="row">{_safe(name)}</th><td>{_safe(f"{role.layer}.{role.head}")}</td>'
        f"<td{NUMBER}>{role.share:.2f}</td><td{NUMBER}>{role.low:.2f}–{role.high:.2f}</td>"
        f"<td{NUMBER}>{role.cases}</td><td>{_safe(role.rule)}</td>"
        f"<td{NUMBER}>{role.rules[role.rule]:.2f}</td></tr>"
        for name, role in roles.found.items()
    ]
    said = (
        f'<p class="how">{len(roles.found)} of {len(roles)} relations between words were found in '
        f"{roles.sentences} sentences: a head finds the related word more often than every rule that needs "
        "no model.</p>"
    )
    header = [
        _column(title, NUMBER if title in ("share", "95%", "cases", "its share") else "") for title in titles
    ]
    return f"{said}\n{_scrolled('roles', header, rows)}"


# Pictures


def _overview(
    heads: Heads, batch: int, chosen: Sequence[tuple[Layer, int]] | None, text: str | None, heading: str
) -> str:
    from PIL import Image  # which matplotlib brings along

    large, small = io.BytesIO(), io.BytesIO()
    figure = model_picture(heads, batch=batch, text=text, chosen=chosen)
    figure.savefig(large, format="png", dpi=min(figure.dpi, WIDEST / figure.get_figwidth()))
    with Image.open(large) as image:  # a table of colours: half the size
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    alt = f"{plain(heading, 120)}: a grid of small heat maps, layers downwards, heads to the right."
    return f'<figure class="overview">{_image(small.getvalue(), alt)}</figure>'


def _layers(heads: Heads, batch: int, data: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """A section per layer: its heads' pictures, each with its label and its largest weights in words."""
    for number, layer in enumerate(data["layers"]):
        pictures, lengths, call = cells_of(heads[layer["path"]], batch, CELLS)
        names = names_of(heads, batch, call)
        shared = pictures.shape[1:] != lengths
        figures = "\n".join(
            _figure(head, pictures[head["head"]], [] if shared else _largest(pictures[head["head"]], names))
            for head in data["heads"]
            if head["path"] == layer["path"]
        )
        how = [HOW] * (number == 0)
        if shared:
            how.append(f"Positions share {pictures.shape[1]} rows and {pictures.shape[2]} columns.")
        said = f'<p class="how">{" ".join(how)}</p>\n' if how else ""
        inside = f'{said}{SCALE if number == 0 else ""}\n<ul class="maps">\n{figures}\n</ul>'
        named = f"Layer {layer['layer']}" if isinstance(layer["layer"], int) else layer["layer"]
        yield f"layer-{number}", named, inside


SCALE = (
    '<p class="scale"><span>weight 0</span><i aria-hidden="true"></i><span>1, by square root</span>'
    '<i class="none" aria-hidden="true"></i><span>none</span></p>'
)


Largest = list[tuple[str, str, float]]  # a query, a key, the weight


def _figure(head: dict[str, Any], cells: Cells, largest: Largest) -> str:
    label = "" if head["label"] == MIXED else f"{head['label']} {_number(head['score'])}"
    said = [f"{query} to {key} {weight:.2f}" for query, key, weight in largest]
    alt = f"Heat map of head {_name(head)}" + (f", {label}" if label else "")
    alt += f". Largest weights: {', '.join(said)}." if said else "."
    caption = f"<b>head {_safe(_name(head))}</b>"
    caption += "".join(f"{_safe(line)}<br>" for line in (label, ", ".join(head["roles"] or ())) if line)
    shown = [
        f"<bdi>{_safe(query)}</bdi> → <bdi>{_safe(key)}</bdi> {weight:.2f}" for query, key, weight in largest
    ]
    caption += f"<small>{'<br>'.join(shown)}</small>"
    inside = f"{_image(_png(cells), alt)}<figcaption>{caption}</figcaption>"
    return f'<li><figure id="{_anchor(head)}">{inside}</figure></li>'


def _largest(cells: Cells, names: Names) -> Largest:
    """The largest weights in words, where tokens are known."""
    queries, keys = names
    if queries is None or keys is None:
        return []
    weights = cells.filled(0.0)
    order = (-weights).ravel().argsort(kind="stable")[:STRONGEST]
    places = [divmod(int(at), len(keys)) for at in order]
    return [
        (plain(queries[row], 12), plain(keys[column], 12), float(weights[row, column]))
        for row, column in places
        if weights[row, column] > 0
    ]


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{_safe(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _png(cells: Cells) -> bytes:
    """Cells as a picture with a table of colours; nothing at all where there is no weight."""
    import numpy

    scale = colours()
    shade = numpy.sqrt(cells.filled(0.0).clip(0, 1)) * (SHADES - 1)
    indices = numpy.where(numpy.ma.getmaskarray(cells), 0, 1 + numpy.rint(shade)).astype(numpy.uint8)
    table = (scale(numpy.linspace(0, 1, SHADES))[:, :3] * 255).round().astype(numpy.uint8)
    rows, columns = indices.shape
    lines = numpy.concatenate([numpy.zeros((rows, 1), numpy.uint8), indices], axis=1).tobytes()
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", b"\0\0\0" + table.tobytes()),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(inside)) + name + inside + struct.pack(">I", zlib.crc32(name + inside))
        for name, inside in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


# Where it goes


def in_notebook(heads: Heads) -> str | None:
    """The page inside a notebook, kept apart from it; of many heads, or without maps, the table alone."""
    if not heads:
        return None
    most, longest = NOTEBOOK
    page = None
    if len(heads.all()) <= most:
        try:
            page = heads_page(heads)
        except (ArgumentError, PackageMissing):  # no maps, no matplotlib: the table needs neither
            page = None
    if page is None or len(page) > longest:
        page = heads_page(heads, pictures=False)
    return framed(page, "headwise heads", height=720)
