"""Results of `benchmarks.rules`: merging, geometric means, and the table in docs/benchmarks.md.

    {"schema": 1, "device": "cuda", "runs": {..}, "cases": {name: record}, "means": {group: {..}}}

A run of some cells replaces those and leaves the others. The means are made anew whenever a cell is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import readme, report
from .registry import OURS

NOTHING = "Nothing is measured yet: `python -m benchmarks.rules --device cuda`.\n"
HEADINGS = {
    "forward": "Forward",
    "backward": "Forward and backward",
    "decode": "One query, 32 heads over 8 key heads, by number of keys",
    "statistics": "Forward with all row statistics, beside the forward alone",
}
WORDS = {
    "softcap": "soft cap, causal",
    "alibi": "ALiBi, causal",
    "documents": "8 documents, causal",
    "window": "window of 1,024, causal",
    "sinks": "sinks, causal",
    "padding": "padding, causal",
    "dense": "dense mask, 30%",
    "bias": "bias",
    "unhinted": "causal as a tensor",
    "holes": "padding with holes, causal",
    "band": "window of 512 on both sides",
    "bias_gradient": "bias with gradient",
}
EXPLANATION = (
    "Cells are measured again when their kernel changes, so several commits are named. Times are by replays "
    "of CUDA graphs, at that many tokens; ratios are geometric means over 1,024 tokens to those."
)

Record = dict[str, Any]
Report = dict[str, Any]


def file_in(folder: Path, device: str) -> Path:
    """Return the file of these results."""
    return folder / f"rules_{device}.json"


def add(path: Path, run: dict[str, Any], record: Record) -> Report:
    """Add a cell to the file, and update the means of all cells."""
    merged = report.merge(report.load(path), run, record)
    merged["means"] = means(merged["cases"].values())
    report.write(path, merged)
    return merged


def means(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Return geometric means by group: against the fastest peer, each peer, felt, and with a new mask."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["status"] == "ok" and "ratio" in record:
            groups.setdefault(record["group"], []).append(record)
    return {group: _means(mine) for group, mine in groups.items()}


def _means(records: Sequence[Record]) -> dict[str, Any]:
    names = dict.fromkeys(name for record in records for name in record["ratios"])
    return {
        "cells": len(records),
        "ratio": _geometric(record["ratio"] for record in records),
        "felt": _geometric(record["felt_ratio"] for record in records),
        "charged": _geometric(record["charged_ratio"] for record in records),
        "beside": {name: _geometric(record["ratios"].get(name) for record in records) for name in names},
    }


def _geometric(ratios: Iterable[float | None]) -> float | None:
    logarithms = [math.log(ratio) for ratio in ratios if ratio]
    return round(math.exp(sum(logarithms) / len(logarithms)), 4) if logarithms else None


# In a terminal


def line(record: Record) -> str:
    """Return a cell as one line."""
    first = f"{record['name']:36} "
    if record["status"] != "ok":
        return f"{first}FAILED  {record['reason']}"
    if "ratio" not in record:
        return f"{first}first call {record['forward_seconds']:.2f} s, back {record['backward_seconds']:.2f} s"
    ours, peer = record["median_us"][OURS], record["median_us"][record["peer"]]
    charged = record["charged_ratio"]
    return (
        f"{first}{ours:10.1f} {peer:10.1f} {record['ratio']:6.2f} {record['felt_ratio']:6.2f}  "
        f"{record['backend']} / {record['peer']}" + (f", new mask {charged:.2f}" if charged else "")
    )


def summary(records: Sequence[Record]) -> str:
    """Return all cells of a run, and the means of their groups."""
    head = f"{'cell':36} {'ours us':>10} {'peer us':>10} {'ratio':>6} {'felt':>6}"
    lines = [head, *(line(record) for record in records), ""]
    for group, mean in means(records).items():
        beside = ", ".join(f"{name} {_text(ratio)}" for name, ratio in mean["beside"].items())
        lines.append(
            f"{group:36} {mean['cells']:3} cells, ratio {_text(mean['ratio'])}, felt {_text(mean['felt'])}, "
            f"new mask {_text(mean['charged'])}; {beside}"
        )
    return "\n".join(lines)


def _text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


# In the documentation


def table(stored: Report) -> str:
    """Return every rule as Markdown: a table for each way, a row for each rule and head size."""
    records = [
        {**record, "run": stored["runs"][record["run"]]}
        for record in stored["cases"].values()
        if not stored["runs"][record["run"]]["quick"] and record["status"] == "ok"
    ]
    if not records:
        return NOTHING
    parts = [f"### Every rule\n\nbfloat16, {readme.legend(records)} {EXPLANATION}"]
    for way, heading in HEADINGS.items():
        mine = [record for record in records if record["way"] == way]
        if mine:
            parts.append(f"#### {heading}\n\n" + "\n".join(_grid(mine)))
    return "\n\n".join(parts)


def _grid(records: Sequence[Record]) -> list[str]:
    rows: dict[str, list[Record]] = {}
    for record in sorted(records, key=_length):
        rows.setdefault(_row(record), []).append(record)
    lines = ["| | tokens | headwise | fastest peer | ratio |", "|---|---:|---:|---|---:|"]
    for label, mine in sorted(rows.items()):
        time = readme.readable_time(mine[-1]["median_us"][OURS] / 1000)
        ratio = _geometric(record["ratio"] for record in mine)
        lines.append(
            f"| {label} | {_length(mine[-1]):,} | {time} | {mine[-1]['peer']} | **{_text(ratio)}** |"
        )
    return lines


def _row(record: Record) -> str:
    sizes, words = record["sizes"], WORDS.get(record["rule"], record["rule"])
    letters = "".join(
        f" {x}{sizes[x]}" for x in ("B", "H", "D") if (x, sizes[x]) not in (("B", 1), ("H", 16))
    )
    return f"{words},{letters}"


def _length(record: Record) -> int:
    return int(record["sizes"].get("L", record["sizes"].get("S", 0)))
