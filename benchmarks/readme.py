"""README's line of speed and the page of all results, from the stored results and nothing else.

    python -m benchmarks --readme

rewrites what stands between markers: in README.md the line of speed, in docs/benchmarks.md the headline
cases, torch's class and ours in its place (grid.py), and all cases. Tests compare each with the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import report

BEGIN, END = "<!-- benchmark table -->", "<!-- end of table -->"
HEADLINES = ("<!-- headlines -->", "<!-- end headlines -->")
LETTERS = ("B", "H", "Hk", "T", "S", "L", "D", "E", "N", "W")
HEAD = (
    "| | sizes | headwise | beside it | headwise / beside it | beside it / itself | extra memory |",
    "|---|---|---|---|---|---|---|",
)

Report = dict[str, Any]


def table(results: Iterable[Report], everything: bool = False) -> str:
    """The headline cases of every device, newest results first choice, as Markdown.

    Args:
        results: stored reports, older ones first. Runs at tiny sizes are left out.
        everything: all cases, not the headline ones alone.
    """
    parts = []
    for device, records in latest(results).items():
        shown = [record for record in records.values() if everything or record["headline"]]
        for legend_of, mine in parted(device, shown):
            parts.append("\n".join([legend_of, "", *HEAD, *(row(record) for record in mine)]))
    if not parts:
        return "No results are stored yet.\n"
    return "\n\n".join([*parts, EXPLANATION]) + "\n"


def latest(results: Iterable[Report]) -> dict[str, dict[str, dict[str, Any]]]:
    """The newest record of every case, by device; each with the run it comes from in place of its name.

    Args:
        results: stored reports, older ones first. Runs at tiny sizes are left out.
    """
    newest: dict[str, dict[str, dict[str, Any]]] = {}
    for stored in results:
        known = newest.setdefault(stored["device"], {})
        for name, record in stored["cases"].items():
            run = stored["runs"][record["run"]]
            if not run["quick"]:
                known[name] = {**record, "run": run}
    return newest


EXPLANATION = (
    "Times are medians of samples taken in turn. In brackets: where the median of the ratio lies (95%). "
    '"Beside it / itself" is the peer measured against itself in the same run (the middle 90%): '
    "differences smaller than that are noise. Extra memory is the peak of one call beyond its inputs, "
    "headwise first."
)


def parted(device: str, records: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Records by machine, torch and commit, the newest first, each part with its heading."""
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        run = record["run"]
        where = f"**{place(device, run)}**, torch {run['versions']['torch']}"
        known = (key for key in parts if key[0] == where and report.same_source(parts[key][0]["run"], run))
        parts.setdefault(next(known, (where, report.source(run))), []).append(record)
    newest = sorted(parts.items(), key=lambda part: max(_started(part[1])), reverse=True)
    return [(_heading(where, source, _started(mine)), mine) for (where, source), mine in newest]


def _started(records: Iterable[dict[str, Any]]) -> list[str]:
    return [record["run"]["started"] for record in records]


def _heading(where: str, source: str, started: list[str]) -> str:
    days = " to ".join(dict.fromkeys(one[:10] for one in (min(started), max(started))))
    return f"{where}, {source}, {days}:"


def legend(device: str, run: dict[str, Any]) -> str:
    """What a run ran on, in one line."""
    return parted(device, [{"run": run}])[0][0]


def place(device: str, run: dict[str, Any]) -> str:
    """The machine a run ran on."""
    machine = run["machine"]
    return machine["gpu"] if device == "cuda" else f"{machine['cpu']}, {machine['threads']} threads"


def row(record: dict[str, Any]) -> str:
    """A case in one row, every peer named."""
    sizes = " ".join(f"{letter}{record['sizes'][letter]}" for letter in LETTERS if letter in record["sizes"])
    first = f"| {record['description']} | {sizes} {_short(record['dtype'])} "
    if record["status"] != "ok":
        return first + "| failed its check | | | | |"
    times, peer = record["median_ms"], record["peer"]
    beside = ratio = ""
    if peer is not None:
        beside = f"{peer}: {readable_time(times[peer])}"
        number, *interval = report.said(record["ratio"]).split(" ", 1)
        ratio = " ".join([f"**{number}**", *interval])
        for name, other in record["ratio_to_others"].items():
            beside += f"<br>{name}: {readable_time(times[name])}"
            ratio += f"<br>{report.said(other)}"
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
    """Rewrite a table of cases in a page, the headline ones or all; raises as `put`."""
    markers = (BEGIN, END) if everything else HEADLINES
    put(path, table(results, everything), *markers)
