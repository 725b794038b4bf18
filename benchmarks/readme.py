"""The line on speed in README, and legends, times, sizes and markers of docs/benchmarks.md.

`python -m benchmarks --readme` writes both from the stored results; page.py puts the page together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from . import report

SPEED = ("<!-- speed -->", "<!-- end speed -->")
STATISTICS = "cuda_statistics_L16384"  # the case in README's line
LETTERS = ("B", "H", "Hk", "L", "D")
NOTHING = "Not measured yet: `python -m benchmarks --device cuda`.\n"

Record = dict[str, Any]
Report = dict[str, Any]


def speed(results: Iterable[Report]) -> str:
    """Return README's line as Markdown: time and memory of all statistics, beside the whole matrix."""
    record = next((case for case in complete("cuda", results) if case["name"] == STATISTICS), None)
    if record is None:
        return NOTHING
    sizes, (ours, dense) = record["sizes"], (_cost(record, record[arm]) for arm in ("ours", "peer"))
    heads = f"{sizes['H']} heads over {sizes['L']:,} tokens"
    return (
        f"Computing all statistics of {heads} on {place('cuda', record['run'])} takes {ours}; computing them "
        f"from the full matrix takes {dense}.\n"
    )


def _cost(record: Record, arm: str) -> str:
    size = record.get("memory", {}).get(arm, {}).get("extra_bytes")
    time = readable_time(record["median_ms"][arm])
    return time if size is None else f"{time} and {readable_bytes(size)}"


def statistics_table(results: Iterable[Report]) -> str:
    """Return the GPU's headline cases of one commit as a Markdown table; "" if there are none."""
    records = [record for record in complete("cuda", results) if record["headline"]]
    if not records:
        return ""
    head = ["| | sizes | headwise | peer | ratio | extra memory |", "|---|---|---|---|---:|---|"]
    rows = [_statistics_row(record) for record in records]
    return "\n".join([f"### All heads at once\n\n{legend(records)}\n", *head, *rows])


def _statistics_row(record: Record) -> str:
    ours, theirs = (readable_time(record["median_ms"][record[arm]]) for arm in ("ours", "peer"))
    cells = [record["description"], _sizes(record), ours, f"{record['peer']}: {theirs}"]
    return f"| {' | '.join(cells)} | **{report.ratio(record['ratio']):.2f}** | {_memory(record)} |"


def complete(device: str, results: Iterable[Report]) -> list[Record]:
    """Return the records of the most complete run of a device: one machine, one torch, one commit.

    That is the commit with the most cases that passed their check, and of those the newest. Runs at tiny
    sizes are left out. Each record has its run in place of the run's name.
    """
    parts: list[list[Record]] = []
    for stored in results:
        if stored["device"] == device:
            for record in stored["cases"].values():
                run = stored["runs"][record["run"]]
                if record["status"] == "ok" and not run["quick"]:
                    part = next((part for part in parts if _together(device, part[0]["run"], run)), None)
                    if part is None:
                        parts.append(part := [])
                    part.append({**record, "run": run})
    return max(parts, key=lambda part: (len(part), _days(part)[-1]), default=[])


def _together(device: str, a: Record, b: Record) -> bool:
    same_place = place(device, a) == place(device, b) and a["versions"]["torch"] == b["versions"]["torch"]
    return same_place and report.same_source(a, b)


def legend(records: Sequence[Record]) -> str:
    """Return torch, commits and days of some records in one line; one commit, but for the rules."""
    runs = [record["run"] for record in records]
    distinct: list[Record] = []
    for run in runs:
        if not any(report.same_source(run, earlier) for earlier in distinct):
            distinct.append(run)
    sources = ", ".join(report.source(run) for run in distinct)
    first, last = _days(records)[0], _days(records)[-1]
    days = first if first == last else f"{first} to {last}"
    return f"torch {runs[0]['versions']['torch']}, {sources}, {days}."


def _days(records: Iterable[Record]) -> list[str]:
    return sorted(record["run"]["started"][:10] for record in records)


def place(device: str, run: dict[str, Any]) -> str:
    """Return the name of the machine a run ran on."""
    machine = run["machine"]
    return str(machine["gpu"]) if device == "cuda" else f"{machine['cpu']}, {machine['threads']} threads"


def against_itself(records: Iterable[Record]) -> str:
    """Return how far the peer is from itself in the median row: differences below that are noise."""
    spreads = [record["peer_against_itself"]["middle_90"] for record in records]
    low, high = (median(spread[end] for spread in spreads) for end in (0, 1))
    return f"Peer / itself: {low:.2f}–{high:.2f}."


def _sizes(record: Record) -> str:
    return " ".join(f"{letter}{record['sizes'][letter]}" for letter in LETTERS if letter in record["sizes"])


def _memory(record: Record) -> str:
    measured = record.get("memory", {})
    names = [name for name in (record["ours"], record["peer"]) if name in measured]
    sizes = [measured[name]["extra_bytes"] for name in names]
    return ", ".join("not measured" if size is None else readable_bytes(size) for size in sizes)


def readable_time(ms: float) -> str:
    """Return a time with three digits and a unit."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.3g} ms" if ms >= 1 else f"{ms * 1000:.3g} µs"


def readable_bytes(size: int) -> str:
    """Return a number of bytes with a unit."""
    if size >= 2**40:
        return f"{size / 2**40:.1f} TiB"
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else "under 1 MiB"


def table_in(text: str, begin: str, end: str) -> str | None:
    """Return the text between two markers of a page; None if there are no markers."""
    _, opening, rest = text.partition(begin)
    inside, closing, _ = rest.partition(end)
    return inside.strip("\n") + "\n" if opening and closing else None


def put(path: Path, inside: str, begin: str, end: str) -> None:
    """Rewrite the text between two markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    text = path.read_text("utf-8")
    if table_in(text, begin, end) is None:
        raise ValueError(f"{path.name} must contain the markers {begin} and {end}: one is missing; add both")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(f"{before}{begin}\n{inside}{end}{after}", "utf-8")
    unfinished.replace(path)
