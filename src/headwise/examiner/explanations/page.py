"""The content of the explain page as JSON, and the same steps as text for a terminal."""

from __future__ import annotations

import base64
import ctypes
import html
import io
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...show.offline_pages import built, filled, policy
from ...show.tables import empty_table
from ...show.texts import plain
from ..report import line_in_words
from .explanation import differing
from .shown_steps import POLARITY, of_key_heads

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .explanation import Explanation
    from .shown_steps import ExplainedStep, Map


LARGEST = 20 * 2**20  # bytes of the numbers of a page
ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
PAIRS = 5  # numbers for every pair of query and key: scores, scaled, hidden, weights, your weights


def check_size(B: int, H: int, T: int, S: int, E: int) -> None:
    """Raise an error if the page would be too large.

    Raises:
        ArgumentError: it would be too large.
    """
    size = _encoded(8 * B * (PAIRS * H * T * S + 6 * (T + S) * E))
    if size > LARGEST:
        raise ArgumentError(
            f"query and key must be short enough for a page of {LARGEST >> 20} MB: batch {B}, {H} heads, "
            f"{T} queries and {S} keys need {size / 2**20:.0f} MB; slice them first, query[:1, :64] "
            "and key[:1, :64]"
        )


def page_json(explanation: Explanation) -> str:
    """Return the data of a page, escaped for a script element."""
    text = json.dumps(_contents(explanation), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate(ESCAPES)


def _contents(explanation: Explanation) -> dict[str, object]:
    state = explanation.expected
    B, T, E = state.inputs.query.shape
    sizes = {
        "B": B, "T": T, "S": state.key.shape[1], "H": state.num_heads, "D": state.q.shape[-1],
        "Dv": state.v.shape[-1], "E": E,
    }  # fmt: skip
    expected = dict(explanation.fields)
    if state.inputs.mask is not None:
        expected["mask"] = state.inputs.mask
    weights = {f"w_{name}": getattr(state.weights, name) for name in "qkvo"}
    weights |= {f"b_{name}": getattr(state.weights, f"{name}_bias") for name in "qkvo"}
    if len(set(explanation.key_heads)) < state.num_heads:
        weights |= {
            name: of_key_heads(weights[name].mT if "w" in name else weights[name], explanation.key_heads)
            for name in ("w_k", "w_v", "b_k", "b_v")
        }
        weights |= {name: weights[name].mT for name in ("w_k", "w_v")}
    yours = explanation.yours
    rest = sum(_bytes(x) for x in [*expected.values(), *yours.values()])
    held = rest + sum(map(_bytes, weights.values())) <= LARGEST
    notes = list(explanation.notes)
    if not held:
        notes.append("The weights are too large for this page, so the sums of the projections are not shown.")
    return {
        "name": explanation.name,
        "sizes": sizes,
        "itself": state.inputs.query is state.inputs.key and state.inputs.key is state.inputs.value,
        "scales": explanation.scales,
        "keyHeads": explanation.key_heads,
        "labels": {"query": explanation.query_labels, "key": explanation.key_labels},
        "polarity": POLARITY,
        "masks": None if state.inputs.mask is None else [asdict(words) for words in explanation.masks],
        "steps": [_step(step) for step in explanation.steps],
        "first": None if explanation.first is None else explanation.steps.index(explanation.first),
        "sample": explanation.batch,
        "head": explanation.head,
        "verdict": explanation.verdict,
        "right": explanation.first is None and explanation.checked is None,
        "faults": [
            {
                "title": fault.title,
                "formula": fault.formula,
                "right": fault.right,
                "line": fault.line,
                "text": fault.text,
            }
            for fault in explanation.faults
        ],
        "notes": notes,
        "allowed": explanation.allowed,
        "expected": _packed(expected | weights if held else expected),
        "yours": _packed(yours),
    }


def _step(step: Any) -> dict[str, Any]:
    plain = {name: getattr(step, name) for name in ("key", "title", "formula", "words", "shapes", "status")}
    return plain | {
        "error": None if step.error is None else f"{step.error:.1e}",
        "flows": [asdict(flow) for flow in step.flows],
    }


def _packed(tensors: dict[str, Tensor]) -> dict[str, object]:
    """Return shape, kind and bytes of each tensor; a tensor that occurs twice refers to the first name."""
    packed: dict[str, object] = {}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if same in first and torch.equal(tensors[first[same]], tensor):
            packed[name] = {"same": first[same]}
            continue
        first.setdefault(same, name)
        kind, numbers = _kind(tensor)
        packed[name] = {
            "shape": list(tensor.shape),
            "kind": kind,
            "base64": base64.b64encode(_memory(numbers.contiguous())).decode(),
        }
    return packed


def _memory(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor, without numpy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _kind(tensor: Tensor) -> tuple[str, Tensor]:
    """Return the numbers as float32 if that is exact, else as float64; a mask as bytes."""
    if tensor.dtype == torch.bool:
        return "u1", tensor.to(torch.uint8)
    narrow = tensor.to(torch.float32)
    exact = torch.equal(narrow.to(tensor.dtype).nan_to_num(0.0), tensor.nan_to_num(0.0))
    return ("f4", narrow) if exact else ("f8", tensor.to(torch.float64))


def _bytes(tensor: Tensor) -> int:
    return _encoded(tensor.numel() * (1 if tensor.dtype == torch.bool else _kind(tensor)[1].element_size()))


def _encoded(size: int) -> int:
    return size * 4 // 3


EXAMPLE = "explain.html"


def page(explanation: Explanation) -> str:
    """Return the page as HTML. Its policy allows its own script only, and loads nothing."""
    template, style, script = built("explain")
    fill = {
        "TITLE": html.escape(plain(explanation.name, 80)),
        "POLICY": policy(style=style, script=script),
        "STYLE": style,
        "DATA": page_json(explanation),
        "SCRIPT": script,
    }
    return filled(template, fill)


MOST = 12  # rows and columns of a table in the terminal
STATUS = {
    "same": "Your numbers equal the expected numbers here.",
    "first": "YOUR NUMBERS FIRST DIFFER HERE: every step before is correct.",
    "after": "Your numbers differ here because of an earlier step.",
}


def as_text(explanation: Explanation, batch: int | None, head: int | None, width: int) -> str:
    """Return all steps without colour, with * beside numbers that differ."""
    empty_table()  # raises where rich is missing
    from rich.console import Console

    file = io.StringIO()
    _write(Console(file=file, width=width, color_system=None, highlight=False), explanation, batch, head)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def to_terminal(explanation: Explanation, batch: int | None, head: int | None) -> None:
    """Print all steps, in colour if the terminal supports it."""
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
    say(f"Sequence {batch} of {B}, head {head} of {H}; positions count from 0.", "dim")
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
        wanted = _shown(explanation.fields, name, batch, head)
        theirs = _shown(explanation.yours, name, batch, head)
        assert wanted is not None
        off = None if theirs is None or name == "weighted" else differing(wanted, theirs)[0]
        title = flow.result.name + (", for query 0" if name == "weighted" else "")
        if theirs is None or off is None or not bool(off.any()):
            tables.append(_table(explanation, flow.result, wanted, None, title))
            continue
        alike = wanted.shape == theirs.shape
        tables.append(_table(explanation, flow.result, wanted, off if alike else None, f"{title}: expected"))
        shape = "" if alike else f", with the wrong shape {list(explanation.yours[name].shape)}"
        tables.append(
            _table(explanation, flow.result, theirs, off if alike else None, f"{title}: yours{shape}")
        )
    return tables


def _shown(fields: dict[str, Tensor], name: str, batch: int, head: int) -> Tensor | None:
    """Return one matrix of a field, for one sequence and head."""
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
