"""Heads and layers of a model as tables, what their labels mean, and heads as plain data.

The keys of the data are a promise, and "format" says which one. All that is not finite is None, numbers have
six digits.

    format     "headwise heads 1"
    title      of the model, or None
    text       that it read, or None if unknown
    tokens     of each sequence of the last forward, a list of names each; or None
    layers     {layer, path, kind, num_heads, queries, keys}: kind is "self" or "cross", queries and keys are
               the lengths of its last call
    heads      {layer, head, path, label, score, sentence, roles, numbers}: score is the one that earned the
               label, or None; roles is None where none were asked about; numbers are all that was measured
    labels     {label, heads, sentence}: each that occurs, with how many heads have it, most frequent first
    sentences  the meaning of all labels that occur
"""

from __future__ import annotations

import html
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.statistics import ROW_STATISTICS
from ..errors import ArgumentError, nearest
from ..heads.collection import Heads
from ..heads.head_distances import attention_between, one_number
from ..heads.layer import LABELS, MIXED, NOTHING_CLEAR, Head, LayerHeads
from ..heads.layer_names import Layer
from ..heads.record import PATTERNS
from ..heads.roles import Roles
from ..whole_files import place_for, whole_file
from .offline_pages import filled, policy
from .tables import HEADERS, as_number, as_text, empty_table
from .texts import encodable, plain

if TYPE_CHECKING:
    from rich.table import Table

    from .fitted_tables import FittedTable

FORMAT = "headwise heads 1"
DIGITS = 6  # of float32 no more are true
USUAL = (
    "entropy", "effective_keys", "confidence", "distance", "first", "previous", "itself", "next", "induction",
)  # fmt: skip
STAY = (  # in a narrow table the last of these make room first, and then what is not among them
    "entropy", "distance", "first", "previous", "itself", "next", "confidence", "induction", "effective_keys",
)  # fmt: skip
ORDERS = ("label", "layer", "head")
ELSEWHERE = "--json or to_pandas()"

Chosen = Sequence[tuple[Layer, int]]


UNHEARD = 2  # layers that were not heard and are named below a table


class HeadsTable:
    """A table that shows itself wherever it is: printed, in a terminal, in a notebook."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich__(self) -> Table:
        return self.table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=140, color_system=None)
        console.print(self.table)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    __repr__ = __str__


def heads_table(
    heads: Heads,
    *,
    sort: str | None = None,
    descending: bool = True,
    top: int | None = None,
    columns: Sequence[str] | None = None,
    title: str | None = None,
    chosen: Chosen | None = None,
    roles: Roles | None = None,
) -> HeadsTable:
    """Return `headwise.Heads.table`: shares of at least one half are bold.

    The number that heads are sorted by is always among them; heads without it come last.

    Args:
        chosen: heads by (layer, head); None is all of them.
        roles: of the same model, for a column with the relations that each head was found for.
    """
    table = empty_table(title if title is not None else heads.title, elsewhere=ELSEWHERE)
    everyone = sorted_heads(heads, sort, descending=descending, chosen=chosen)
    measured = _measured(everyone)
    shown = [name for name in USUAL if name in measured] if columns is None else list(columns)
    for name in shown:
        if name not in measured:
            raise ArgumentError(f"columns must be measured: got {name!r}; {nearest(name, measured)}")
    if sort in measured and sort not in shown:
        shown.append(sort)
    add_place(table, "layer", heads)
    table.add("head")
    table.add("label (score)", easy=22, least=0)
    if roles is not None:
        table.add("role", least=0, easy=24)
    ranks = shown if columns is not None else [name for name in STAY if name in shown]
    for name in shown:
        rank = 0 if name == sort else 2 + (ranks.index(name) if name in ranks else len(ranks))
        table.add(HEADERS.get(name, name.replace("_", "\n")), name.replace("_", " "), rank=rank)
    for head in everyone[:top]:
        row = [as_number(name, head.values.get(name, math.nan)) for name in shown]
        label = as_text(str(head.label))
        label.stylize("dim" if head.label.name == MIXED else "bold")
        role_cells = [] if roles is None else [as_text("; ".join(roles.of(head.layer, head.head)) or "-")]
        table.add_row(as_text(str(heads[head.path].layer)), str(head.head), label, *role_cells, *row)
    if heads.unheard:
        table.remark = f"Layers without measurements: {'; '.join(map(str, heads.unheard[:UNHEARD]))}"
        table.remark += "; heads.unheard lists all." if len(heads.unheard) > UNHEARD else "."
    return HeadsTable(table)


def add_place(table: FittedTable, header: str, layers: Iterable[int | str]) -> None:
    """Add a column for layers: numbers, or paths that may wrap."""
    if all(isinstance(layer, int) for layer in layers):
        table.add(header)
    else:
        table.add(header, least=10, easy=18)


def sorted_heads(
    heads: Heads, sort: str | None = None, *, descending: bool = True, chosen: Chosen | None = None
) -> list[Head]:
    """Return the heads sorted as in a table; heads without the number come last."""
    everyone = heads.chosen(chosen)
    if sort is None:
        return everyone
    return sorted(everyone, key=_key(sort, heads, _measured(everyone), descending), reverse=descending)


def _measured(heads: Iterable[Head]) -> list[str]:
    return list(dict.fromkeys(name for head in heads for name in head.values))


def places_of(heads: Heads) -> dict[str, int]:
    """Return the number of each layer by path and place: a first visit is "path" and "path#0"."""
    return {name: number for number, layer in enumerate(heads.values()) for name in (layer.path, layer.place)}


def check_sort(sort: str) -> None:
    """Raise `ArgumentError` if no table can be sorted by this name."""
    names = [*ORDERS, *ROW_STATISTICS, *PATTERNS]
    if sort not in names:
        raise ArgumentError(f"sort must be a column: got {sort!r}; {nearest(sort, names)}")


def _key(
    sort: str, heads: Heads, measured: list[str], descending: bool
) -> Callable[[Head], tuple[bool, float] | float]:
    if sort == "label":
        return lambda head: (head.label.name != MIXED, head.label.score or 0.0)
    if sort == "layer":
        order = places_of(heads)
        return lambda head: order[head.path]
    if sort == "head":
        return lambda head: head.head
    if sort not in measured:
        raise ArgumentError(f"sort must be a column: got {sort!r}; {nearest(sort, [*ORDERS, *measured])}")
    last = -math.inf if descending else math.inf

    def of(head: Head) -> float:
        value = head.values.get(sort, math.nan)
        return last if math.isnan(value) else value

    return of


def census(heads: Iterable[Head]) -> list[tuple[str, int, str]]:
    """Return (label, number of heads, meaning) of labels that occur, the most frequent first, mixed last."""
    meanings = {entry.name: entry.meaning for entry in LABELS}
    counts = Counter(head.label.name for head in heads)
    order = sorted(counts.items(), key=lambda counted: (counted[0] == MIXED, -counted[1]))
    return [(name, count, meanings.get(name, NOTHING_CLEAR)) for name, count in order]


SINKS_EXPLAINED = (  # measured in other models; watch(written=True) measures it in this one
    "Why many heads attend to special tokens or to the first token: the weights of a query always sum to 1, "
    "so a head that finds nothing relevant must still attend to something. In many trained models it "
    "attends to tokens whose values contribute little to the output (attention sinks: Clark 2019, Kobayashi "
    "2020, Xiao 2024, Gu 2024)."
)
SINK_LABELS = ("sink", "special-token")
MANY_SINKS = 1 / 3  # the share of heads from which on the explanation is added


def as_sentences(heads: Heads | Iterable[Head], *, chosen: Chosen | None = None) -> list[str]:
    """Return a sentence for each label that occurs, the most frequent first.

    If at least a third of the heads attend mostly to special tokens or the first token, one more sentence
    explains why.

    Example:
        >>> from headwise.heads import Label
        >>> as_sentences([Head(0, 2, "a", Label("previous-token", 0.93), {})])
        ['A previous-token head attends to the token just before the current one.']
    """
    counted = census(heads.chosen(chosen) if isinstance(heads, Heads) else heads)
    sentences = [
        f"{'An' if name[0] in 'aeiou' else 'A'} {name} head {meaning}." for name, _, meaning in counted
    ]
    sinks = sum(count for name, count, _ in counted if name in SINK_LABELS)
    if sinks > 1 and sinks >= MANY_SINKS * sum(count for _, count, _ in counted):
        sentences.append(SINKS_EXPLAINED)
    return sentences


OF_LAYER = ("entropy", "distance", "first")


def layers_table(heads: Heads, *, title: str | None = None, chosen: Chosen | None = None) -> HeadsTable:
    """Return one row per layer: means over its heads, how much they differ, and how many have which label.

    Diversity is the mean Jensen-Shannon divergence between two heads, in nats: 0 where all look alike, 0.69
    (log 2) where no two attend to the same keys. A layer whose maps were not kept has a dash, unless it was
    watched with `diversity=True`.

    Args:
        chosen: heads by (layer, head): numbers are of these, and layers without one are left out. A single
            head of a layer differs from nobody, and has a dash.
    """
    table = empty_table(title if title is not None else heads.title, elsewhere=ELSEWHERE)
    wanted: dict[str, list[Head]] = {}
    for head in heads.chosen(chosen):
        wanted.setdefault(head.path, []).append(head)
    add_place(table, "layer", heads)
    table.add("heads")
    for rank, name in enumerate(OF_LAYER):
        table.add(HEADERS[name], name, rank=2 + rank)
    table.add("diver-\nsity", rank=5)
    table.add("labels", rank=1, least=0, easy=18)
    for layer in heads.values():
        some = wanted.get(layer.place)
        if some is None:
            continue
        numbers = [as_number(name, _mean(some, name)) for name in OF_LAYER]
        numbers.append(as_number("entropy", _diversity(layer, [head.head for head in some])))  # nats, too
        labels = ", ".join(f"{count} {name}" for name, count, _ in census(some))
        table.add_row(as_text(str(layer.layer)), str(len(some)), *numbers, as_text(labels))
    return HeadsTable(table)


def _mean(heads: Sequence[Head], name: str) -> float:
    """Return the mean over the heads that have this number."""
    numbers = [head.values.get(name, math.nan) for head in heads]
    measured = [number for number in numbers if not math.isnan(number)]
    return math.fsum(measured) / len(measured) if measured else math.nan


def _diversity(layer: LayerHeads, some: Sequence[int]) -> float:
    """Return the mean divergence of pairs of these heads of a layer, in nats, or NaN."""
    matrix = attention_between(layer) if len(some) > 1 else None
    return math.nan if matrix is None else float(one_number(matrix[..., some, :][..., some]))


def as_data(
    heads: Heads,
    *,
    chosen: Chosen | None = None,
    text: str | None = None,
    roles: Roles | None = None,
) -> dict[str, Any]:
    """Return everything measured of the chosen heads as lists, dicts, strings and numbers."""
    some = heads.chosen(chosen)
    paths = {head.path for head in some}
    counted, sentences = census(some), as_sentences(some)
    of_label = {name: sentence for (name, _, _), sentence in zip(counted, sentences, strict=False)}
    return {
        "format": FORMAT,
        "title": _text(heads.title),
        "text": _text(text),
        "tokens": None if heads.tokens is None else [[_text(name) for name in row] for row in heads.tokens],
        "layers": [_layer(layer) for layer in heads.values() if layer.place in paths],
        "heads": [_head(head, of_label[head.label.name], roles) for head in some],
        "labels": [{"label": name, "heads": count, "sentence": of_label[name]} for name, count, _ in counted],
        "sentences": sentences,
    }


def _layer(layer: LayerHeads) -> dict[str, Any]:
    _, _, T, S = layer.calls[-1].shape
    about = {"layer": layer.name, "path": layer.place, "kind": layer.kind, "num_heads": len(layer)}
    return about | {"queries": T, "keys": S}


def _head(head: Head, sentence: str, roles: Roles | None) -> dict[str, Any]:
    return {
        "layer": head.layer,
        "head": head.head,
        "path": head.path,
        "label": head.label.name,
        "score": rounded(head.label.score, DIGITS),
        "sentence": sentence,
        "roles": None if roles is None else roles.of(head.layer, head.head),
        "numbers": {name: rounded(value, DIGITS) for name, value in head.values.items()},
    }


def rounded(value: float | None, digits: int) -> float | None:
    """Return a number rounded to `digits` significant digits, or None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _text(text: str | None) -> str | None:
    return None if text is None else encodable(text)


def as_json(data: dict[str, Any]) -> str:
    """Return strict JSON, without NaN, with a line break at the end."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def save_json(data: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Write it, whole or not at all, and return where; raises `ArgumentError` where it cannot be written."""
    place = check_json_path(out)
    with whole_file(place) as half:
        half.write_text(as_json(data), "utf-8", newline="\n")
    return place


def check_json_path(out: str | os.PathLike[str]) -> Path:
    """Return the resolved path, or raise `ArgumentError` as `save_json` does."""
    return place_for(out, (".json",), ".json", "heads.json")


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
<p>Entropy is in nats and distance in tokens; the other numbers are shares of the head's weight, from 0 to 1.
A dash means that the head has no label, or that no query sees a key of the kind that the number is about.</p>
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
IN_PAGE = ("entropy", "distance", "first", "previous", "itself", "next", "special", "punctuation")


def table_page(heads: Heads) -> str:
    """Return the table of heads as a page without a script."""
    data = as_data(heads)
    measured = {name for head in data["heads"] for name in head["numbers"]}
    shown = [name for name in IN_PAGE if name in measured]
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
    """Escape text for a page."""
    return html.escape(plain(text, length))


def _column(name: str, kind: str = "") -> str:
    heading = name.replace("-\n", "").replace("\n", " ").replace("_", " ")
    return f'<th scope="col"{kind}>{_safe(heading)}</th>'


def _row(head: dict[str, Any], shown: Sequence[str]) -> str:
    mixed = head["label"] == MIXED
    name = f"{head['layer']}.{head['head']}"
    numbers = [head["score"], *(head["numbers"].get(name) for name in shown)]
    cells = [f'<th scope="row">{_safe(name)}</th>', f"<td>{_safe(head['label'])}</td>"]
    cells += [f"<td{NUMBER}>{'–' if x is None else f'{x:.2f}'}</td>" for x in numbers]
    cells.append(f"<td>{'–' if mixed else _safe(head['sentence'])}</td>")
    return f"<tr>{''.join(cells)}</tr>"
