"""What `benchmarks.everyday` has stored, in words and as tables of docs/benchmarks.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from . import readme, report
from .everyday_cases import GROUPS, LENGTHS, MASKS, WEIGHTS, group_of

WORST = 5  # cells that are named
MARKERS = ("<!-- everyday -->", "<!-- end everyday -->")
NOTHING = "Nothing is measured yet: python -m benchmarks.everyday"
HEADINGS = {
    "calls": "`hw.attention` of 16 tokens: until the call returns",
    "rows": "One row of one head of a kept map",
    "modules": "`hw.MultiHeadAttention`",
    "class": "`hw.nn.MultiheadAttention` in place of torch's class, by how it is told its mask",
    "watch": "Models watched",
}

Record = dict[str, Any]
Report = dict[str, Any]


def table(results: Sequence[Report]) -> str:
    """Everything stored as Markdown: for each machine and commit the groups, then the grid."""
    parts = []
    for stored in results:
        records = [{**record, "run": stored["runs"][record["run"]]} for record in stored["cases"].values()]
        shown = [record for record in records if not record["run"]["quick"]]
        for legend, mine in readme.parted(stored["device"], shown):
            parts.append("\n\n".join([legend, *_groups(mine), *_grid(mine)]))
    return "\n\n".join(parts or ["No results are stored yet."]) + "\n"


def _groups(records: Sequence[Record]) -> list[str]:
    parts = []
    for group, heading in HEADINGS.items():
        mine = [record for record in records if group_of(record["name"]) == group]
        if mine:
            rows = [*readme.HEAD, *(readme.row(record) for record in mine)]
            parts.append(f"### {heading}\n\n" + "\n".join(rows))
    return parts


def _grid(records: Sequence[Record]) -> list[str]:
    """Lengths and masks, without weights / their mean / those of every head: times as fast."""
    mine = [record for record in records if group_of(record["name"]) == "grid"]
    if not mine:
        return []
    times = _times_faster(mine)
    masks = [mask for mask in MASKS if any(f"_{mask}_" in name for name in times)]
    rows = [
        f"| {length:,} | "
        + " | ".join(
            " / ".join(_said(times.get(f"L{length}_{mask}_{asked}")) for asked in WEIGHTS) for mask in masks
        )
        + " |"
        for length in LENGTHS
    ]
    head = ["| tokens | " + " | ".join(masks) + " |", "|---" * (len(masks) + 1) + "|"]
    return ["\n".join(_grid_in_words(mine)), "\n".join([*head, *rows])]


def _said(times: float | None) -> str:
    return "–" if times is None else f"{times:.2f}"


def _times_faster(records: Iterable[Record]) -> dict[str, float]:
    """Cell -> how many times as fast as torch's class."""
    return {
        record["name"].removeprefix("everyday_"): 1 / report.ratio(record["ratio"])
        for record in records
        if record["status"] == "ok"
    }


def _grid_in_words(records: Sequence[Record]) -> list[str]:
    faster = _times_faster(records)
    if not faster:
        return []
    itself = [report.ratio(one["peer_against_itself"]) for one in records if one["status"] == "ok"]
    mean = math.exp(sum(map(math.log, faster.values())) / len(faster))
    worst = sorted(faster, key=lambda name: faster[name])[:WORST]
    return [
        f"{len(faster)} cells of torch's class: geometric mean {mean:.2f} x as fast",
        "worst: " + ", ".join(f"{name} {faster[name]:.2f}" for name in worst),
        f"torch against itself: {min(itself):.2f} to {max(itself):.2f}",
    ]


# In a terminal


def summary(records: Iterable[Record]) -> str:
    """All cases in a line each: ours, the peer, ours / peer, peer / itself, others; the grid in words."""
    told = list(records)
    if not told:
        return NOTHING
    lines = []
    for group in GROUPS:
        mine = [record for record in told if group_of(record["name"]) == group]
        if mine:
            lines += ["", f"{group}: ours / beside it"]
            lines += [_line(record) for record in mine]
            lines += _grid_in_words(mine) if group == "grid" else []
    failed = [record["name"] for record in told if record["status"] != "ok"]
    return "\n".join(lines[1:] + ([f"failed: {', '.join(failed)}"] if failed else []))


def _line(record: Record) -> str:
    first = f"{record['name']:44} "
    if record["status"] != "ok":
        return f"{first}FAILED  {record['reason']}"
    times, peer = record["median_ms"], record["peer"]
    low, high = record["peer_against_itself"]["middle_90"]
    text = (
        f"{first}{report.said(record['ratio']):20} {readme.readable_time(times[record['ours']]):>8}"
        f"  {peer} {readme.readable_time(times[peer])} (itself {low:.2f} to {high:.2f})"
    )
    for name, other in record["ratio_to_others"].items():
        text += f"; {name} {readme.readable_time(times[name])}, {report.said(other)}"
    return text
