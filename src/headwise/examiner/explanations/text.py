"""The steps for the terminal: a table each, what differs in red."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from torch import Tensor

from ...show.tables import empty_table
from ...show.texts import plain
from ..evidence import line_in_words
from .explanation import differing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .explanation import Explanation
    from .told_steps import ExplainedStep, Map

MOST = 12  # rows and columns of a table
STATUS = {
    "same": "Yours equals the expected numbers here.",
    "first": "HERE YOURS PARTS from the expected numbers: everything before is right.",
    "after": "Yours differs here, too, because of an earlier step.",
}


def as_text(explanation: Explanation, batch: int | None, head: int | None, width: int) -> str:
    """All steps without colour; marks are * beside numbers that differ."""
    empty_table()  # raises where rich is missing
    from rich.console import Console

    file = io.StringIO()
    _write(Console(file=file, width=width, color_system=None, highlight=False), explanation, batch, head)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def to_terminal(explanation: Explanation, batch: int | None, head: int | None) -> None:
    """All steps, in colour where the terminal has it."""
    empty_table()
    from rich.console import Console

    _write(Console(highlight=False), explanation, batch, head)


def _write(console: Console, explanation: Explanation, batch: int | None, head: int | None) -> None:
    from rich.text import Text

    batch, head = (
        explanation.batch if batch is None else batch,
        explanation.head if head is None else head,
    )
    state = explanation.expected
    B, H = state.query.shape[0], state.num_heads
    for name, got, size in (("batch", batch, B), ("head", head, H)):
        if not 0 <= got < size:
            raise IndexError(f"{name} must be from 0 to {size - 1}: got {got}; there are {size}")

    def say(text: str, style: str = "") -> None:
        console.print(Text(plain(text), style))

    say(f"{explanation.name}, step by step", "bold")
    say(f"Shown: sequence {batch} of {B}, head {head} of {H}; positions count from 0.", "dim")
    right = explanation.first is None and explanation.checked is None
    say(explanation.verdict, "green" if right else "bold red")
    for fault in explanation.faults:
        say(fault.title, "bold red")
        say(f"  yours:    {fault.formula}")
        say(f"  expected: {fault.right}")
        if fault.line is not None:
            say(f"  {line_in_words(fault.line, fault.cell)}: {fault.text.strip()}")
    for note in explanation.notes:
        say(note, "dim")
    for number, step in enumerate(explanation.steps):
        console.print()
        say(f"{number}. {step.title}", "bold red" if step.status == "first" else "bold")
        say(f"   {step.formula}", "cyan")
        say(f"   {step.words}")
        for shape in step.shapes:
            say(f"   {shape}", "dim")
        if step.key == "mask":
            for words in explanation.masks[batch].words if state.mask is not None else ():
                say(f"   {words}", "magenta")
        if step.status in STATUS:
            say(f"   {STATUS[step.status]}", "bold red" if step.status == "first" else "dim")
        for title, table in _tables(explanation, step, batch, head):
            say(title)
            console.print(table)


def _tables(explanation: Explanation, step: ExplainedStep, batch: int, head: int) -> list[tuple[str, Table]]:
    tables = []
    for flow in step.flows:
        name = flow.result.field
        wanted = _shown(explanation, explanation.fields, name, batch, head)
        theirs = _shown(explanation, explanation.yours, name, batch, head)
        assert wanted is not None
        off = None if theirs is None or name == "weighted" else differing(wanted, theirs)[0]
        title = flow.result.name + (", for query 0" if name == "weighted" else "")
        if theirs is None or off is None or not bool(off.any()):
            tables.append(_table(explanation, flow.result, wanted, None, title))
            continue
        alike = wanted.shape == theirs.shape
        tables.append(_table(explanation, flow.result, wanted, off if alike else None, f"{title}: expected"))
        other = f"{title}: yours" + (
            "" if alike else f", of another shape, {list(explanation.yours[name].shape)}"
        )
        tables.append(_table(explanation, flow.result, theirs, off if alike else None, other))
    return tables


def _shown(
    explanation: Explanation, fields: dict[str, Tensor], name: str, batch: int, head: int
) -> Tensor | None:
    """One matrix of a field, for one sequence and head."""
    if name == "weighted":  # of the first query
        p, v = fields.get("p"), fields.get("v")
        if p is None or v is None or p.ndim != 4 or v.ndim != 4 or p.shape[-1] != v.shape[-2]:
            return None
        return p[batch, head, 0, :, None] * v[batch, head]  # [S, D]
    if name not in fields:
        return None
    x = fields[name]
    x = x[min(batch, x.shape[0] - 1)]
    return x[min(head, x.shape[0] - 1)] if x.ndim == 3 else x


def _table(
    explanation: Explanation, shown: Map, x: Tensor, off: Tensor | None, title: str
) -> tuple[str, Table]:
    from rich.text import Text

    rows, columns = x.shape
    table = empty_table()
    table.add_column("")
    for c in range(min(columns, MOST)):
        table.add_column(Text(_label(explanation, shown.columns, c)), justify="right", no_wrap=True)
    if columns > MOST:
        table.add_column(f"… {columns - MOST} more", style="dim")
    for r in range(min(rows, MOST)):
        cells = []
        for c in range(min(columns, MOST)):
            wrong = off is not None and bool(off[r, c])
            cells.append(Text(_number(float(x[r, c])) + ("*" if wrong else " "), "bold red" if wrong else ""))
        table.add_row(Text(_label(explanation, shown.rows, r)), *cells)
    if rows > MOST:
        table.add_row(Text(f"… {rows - MOST} more", "dim"))
    return f"{title} [{rows}, {columns}]", table


def _label(explanation: Explanation, kind: str, i: int) -> str:
    labels = {"query": explanation.query_labels, "key": explanation.key_labels}.get(kind)
    return f" {i}" if labels is None else " " + plain(labels[i], 8)


def _number(x: float) -> str:
    if math.isinf(x):
        return " −∞" if x < 0 else " ∞"
    text = f"{x: .2f}" if abs(x) < 1e4 else f"{x: .0e}"
    return " 0.00" if text == "-0.00" else text
