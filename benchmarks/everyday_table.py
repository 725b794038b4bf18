"""Results of `benchmarks.everyday` in words and as tables of docs/benchmarks.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from . import readme, report
from .cases.modules import BY_HAND, TORCH
from .everyday_cases import GROUPS, group_of

WORST = 5  # cells that are named
NOTHING = "Nothing is measured yet: python -m benchmarks.everyday"


class Table(NamedTuple):
    """A group of cases as a table; `second` heads the columns of the cases whose names have that ending."""

    heading: str
    peers: tuple[str, ...]  # the first is the one of the ratio
    second: str = ""
    ending: str = ""


TABLES = {
    "calls": Table("`hw.attention` of 16 tokens, until the call returns", ("SDPA",)),
    "rows": Table("One row of one head, read from an existing map", ("eager, that row",)),
    "modules": Table("`hw.MultiHeadAttention`", (BY_HAND, TORCH), "training", "_training"),
    "class": Table(
        "`hw.nn.MultiheadAttention` in place of torch's class, by its mask: GPT-2 small, causal",
        (TORCH,), "training", "_training",
    ),
    "watch": Table(
        "Models watched: all row statistics", ("unwatched", "eager"), "and 128 x 128 pictures", "_pictures"
    ),
}  # fmt: skip
OF_THE_TABLE = (
    "attention of 16 tokens, |one row of one head, read from an existing map, |module, "
    "|torch's class, GPT-2 small, causal, |torch's | model| watched: all row statistics|a (?=[A-Z])"
)

Record = dict[str, Any]
Report = dict[str, Any]


def tables(records: Sequence[Record]) -> list[str]:
    """Return the Markdown of one machine and commit: a legend, a table for each group, the grid in words."""
    parts = [f"Everyday calls: {readme.legend(records)}"]
    for group, table in TABLES.items():
        mine = [record for record in records if group_of(record["name"]) == group]
        if mine:
            lines = "\n".join(_rows(mine, table))
            parts.append(f"### {table.heading}\n\n{lines}\n\n{readme.against_itself(mine)}")
    grid = _grid_in_words([record for record in records if group_of(record["name"]) == "grid"])
    return [*parts, "; ".join(grid) + "."] if grid else parts


def _rows(records: Sequence[Record], table: Table) -> list[str]:
    """Return a row for each case: times of ours and of each peer, ours / first peer; then its second."""
    columns = ["headwise", *table.peers, "ratio", *([table.second, "ratio"] if table.ending else [])]
    lines = [f"| | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    by_name = {record["name"]: record for record in records}
    for name, record in by_name.items():
        if table.ending and name.endswith(table.ending):
            continue
        cells = _cells(record, table.peers)
        if table.ending:
            cells += _cells(by_name[name.removesuffix("_inference") + table.ending], ())
        lines.append(f"| {_label(record)} | {' | '.join(cells)} |")
    return lines


def _label(record: Record) -> str:
    """Return the words of a case that its table does not say already, and the sizes that differ."""
    sizes, words = record["sizes"], re.sub(OF_THE_TABLE, "", record["description"])
    return words if record["name"].startswith("call_") else f"{words}, B{sizes['B']} L{sizes['L']}"


def _cells(record: Record, peers: Sequence[str]) -> list[str]:
    """Return the median times of ours and of the peers, and the ratio of ours to the first peer."""
    times = record["median_ms"]
    theirs = [next((time for arm, time in times.items() if arm.startswith(peer)), None) for peer in peers]
    cells = [readme.readable_time(times[record["ours"]])]
    cells += ["–" if time is None else readme.readable_time(time) for time in theirs]
    return [*cells, f"**{report.ratio(record['ratio']):.2f}**"]


def _times_faster(records: Iterable[Record]) -> dict[str, float]:
    """Return the speed relative to torch's class, by cell."""
    return {
        record["name"].removeprefix("everyday_"): 1 / report.ratio(record["ratio"])
        for record in records
        if record["status"] == "ok"
    }


def _grid_in_words(records: Sequence[Record]) -> list[str]:
    faster = _times_faster(records)
    if not faster:
        return []
    itself = [report.ratio(record["peer_against_itself"]) for record in records if record["status"] == "ok"]
    mean = math.exp(sum(map(math.log, faster.values())) / len(faster))
    worst = sorted(faster, key=lambda name: faster[name])[:WORST]
    return [
        f"{len(faster)} cells of torch's class: geometric mean {mean:.2f} x as fast",
        "worst: " + ", ".join(f"{name} {faster[name]:.2f}" for name in worst),
        f"torch against itself: {min(itself):.2f} to {max(itself):.2f}",
    ]


# In a terminal


def summary(records: Iterable[Record]) -> str:
    """Return a line per case (ours, the peer, ours / peer, peer / itself, others), and the grid in words."""
    listed = list(records)
    if not listed:
        return NOTHING
    lines = []
    for group in GROUPS:
        mine = [record for record in listed if group_of(record["name"]) == group]
        if mine:
            lines += ["", f"{group}: ours / beside it"]
            lines += [_line(record) for record in mine]
            lines += _grid_in_words(mine) if group == "grid" else []
    failed = [record["name"] for record in listed if record["status"] != "ok"]
    return "\n".join(lines[1:] + ([f"failed: {', '.join(failed)}"] if failed else []))


def _line(record: Record) -> str:
    first = f"{record['name']:44} "
    if record["status"] != "ok":
        return f"{first}FAILED  {record['reason']}"
    times, peer = record["median_ms"], record["peer"]
    low, high = record["peer_against_itself"]["middle_90"]
    text = (
        f"{first}{report.ratio_text(record['ratio']):20} {readme.readable_time(times[record['ours']]):>8}"
        f"  {peer} {readme.readable_time(times[peer])} (itself {low:.2f} to {high:.2f})"
    )
    for name, other in record["ratio_to_others"].items():
        text += f"; {name} {readme.readable_time(times[name])}, {report.ratio_text(other)}"
    return text
