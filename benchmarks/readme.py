"""README's table and the page of all results, from the stored results and nothing else.

    python -m benchmarks --readme

rewrites what stands between the two markers in README.md (the headline cases) and docs/benchmarks.md (all of
them); a test compares both with the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "BEGIN",
    "END",
    "legend",
    "put",
    "readable_bytes",
    "readable_time",
    "readme_table",
    "table_in",
    "update",
]

BEGIN, END = "<!-- benchmark table -->", "<!-- end of table -->"
LETTERS = ("B", "H", "Hk", "T", "S", "L", "D", "E", "W")
HEAD = (
    "| | sizes | headwise | beside it | headwise / beside it | beside it / itself | extra memory |",
    "|---|---|---|---|---|---|---|",
)

Report = dict[str, Any]


def readme_table(results: Iterable[Report], everything: bool = False) -> str:
    """The headline cases of every device, newest results first choice, as Markdown.

    Args:
        results: stored reports, older ones first. Runs at tiny sizes are left out.
        everything: all cases, not the headline ones alone.
    """
    latest: dict[str, dict[str, dict[str, Any]]] = {}  # device -> case -> record
    runs: dict[str, dict[str, Any]] = {}
    for report in results:
        shown = {
            name: record
            for name, record in report["cases"].items()
            if (everything or record["headline"]) and not report["runs"][record["run"]]["quick"]
        }
        latest.setdefault(report["device"], {}).update(shown)
        runs |= {f"{report['device']} {name}": run for name, run in report["runs"].items()}
    parts = []
    for device, records in latest.items():
        if not records:
            continue
        used = sorted({record["run"] for record in records.values()})
        legends = [legend(device, runs[f"{device} {name}"]) for name in used]
        rows = [_row(record) for record in records.values()]
        parts.append("\n".join([*dict.fromkeys(legends), "", *HEAD, *rows]))
    if not parts:
        return "No results are stored yet.\n"
    return "\n\n".join([*parts, EXPLANATION]) + "\n"


EXPLANATION = (
    "Times are medians of samples taken in turn. In brackets: where the median of the ratio lies (95%). "
    '"Beside it / itself" is the peer measured against itself in the same run (the middle 90%): '
    "differences smaller than that are noise. Extra memory is the peak of one call beyond its inputs, "
    "headwise first."
)


def legend(device: str, run: dict[str, Any]) -> str:
    """What a run ran on, in one line."""
    machine, versions = run["machine"], run["versions"]
    where = machine["gpu"] if device == "cuda" else f"{machine['cpu']}, {machine['threads']} threads"
    commit = f"commit {run['commit'][:10]}" if run["commit"] else f"sources {run['sources']}"
    changed = " with changes" if run["dirty"] else ""
    return f"**{where}**, torch {versions['torch']}, {commit}{changed}, {run['started'][:10]}:"


def _row(record: dict[str, Any]) -> str:
    sizes = " ".join(f"{letter}{record['sizes'][letter]}" for letter in LETTERS if letter in record["sizes"])
    first = f"| {record['description']} | {sizes} {_short(record['dtype'])} "
    if record["status"] != "ok":
        return first + "| failed its check | | | | |"
    times, peer = record["median_ms"], record["peer"]
    beside = ratio = ""
    if peer is not None:
        beside = f"{peer}: {readable_time(times[peer])}"
        low, high = record["ratio"]["median_95"]
        ratio = f"**{record['ratio']['of_medians']:.2f}** [{low:.2f}, {high:.2f}]"
    elif record["notes"]:
        beside = record["notes"][0]
    low, high = record["peer_against_itself"]["middle_90"]
    itself, ours = f"{low:.2f} to {high:.2f}", readable_time(times[record["ours"]])
    return f"{first}| {ours} | {beside} | {ratio} | {itself} | {_memory(record)} |"


def _memory(record: dict[str, Any]) -> str:
    measured = record.get("memory", {})
    names = [name for name in (record["ours"], record["peer"]) if name in measured]
    sizes = [measured[name]["extra_bytes"] for name in names]
    return ", ".join("not measured" if size is None else readable_bytes(size) for size in sizes)


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)


def readable_time(ms: float) -> str:
    """Three digits and a unit."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.3g} ms" if ms >= 1 else f"{ms * 1000:.3g} µs"


def readable_bytes(size: int) -> str:
    """A size as people say it."""
    if size >= 2**40:
        return f"{size / 2**40:.1f} TiB"
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else "under 1 MiB"


def table_in(text: str, begin: str = BEGIN, end: str = END) -> str | None:
    """What stands between two markers of a page; None if there are no markers."""
    _, found, rest = text.partition(begin)
    inside, closed, _ = rest.partition(end)
    return inside.strip("\n") + "\n" if found and closed else None


def put(path: Path, inside: str, begin: str = BEGIN, end: str = END) -> None:
    """Rewrite what stands between two markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    text = path.read_text("utf-8")
    if table_in(text, begin, end) is None:
        raise ValueError(f"{path.name} must hold the markers {begin} and {end}: it does not; add both")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(f"{before}{begin}\n{inside}{end}{after}", "utf-8")
    unfinished.replace(path)


def update(path: Path, results: Iterable[Report], everything: bool = False) -> None:
    """Rewrite the table of cases in a page; raises as `put`."""
    put(path, readme_table(results, everything))
