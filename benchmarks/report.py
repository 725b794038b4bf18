"""Results as JSON, one file per device and month: <device>_<yyyymm>.json.

    {"schema": 1, "device": "cpu",
     "runs":  {"2026-01-31T12:00:00Z": {machine, versions, commit, dirty, repeats, ...}},
     "cases": {"window256_L8192": {..., "run": "2026-01-31T12:00:00Z"}}}

A case keeps the number of its repeats, medians, ratios with their spread, the peer against itself, and of its
check the value closest to its limit, but no samples. It is one line of the file, and so is a run.

A run of some cases replaces those and leaves the others; each case says which run it comes from, and runs
nobody refers to any more are dropped.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1

Report = dict[str, Any]


def file_for(folder: Path, device: str, started: str) -> Path:
    """Return the file for the results of a run; `started` is like 2026-01-31T12:00:00Z."""
    return folder / f"{device}_{started[:4]}{started[5:7]}.json"


def load(path: Path) -> Report | None:
    """Return a stored report; None if there is no file.

    Raises:
        ValueError: a file of another schema.
    """
    if not path.exists():
        return None
    report: Report = json.loads(path.read_text("utf-8"))
    if report.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} must have schema {SCHEMA}: got {report.get('schema')!r}; move it away")
    return report


def load_all(folder: Path = RESULTS) -> list[Report]:
    """Return all stored reports, older months first."""
    paths = sorted(folder.glob("*_[0-9][0-9][0-9][0-9][0-9][0-9].json"), key=lambda p: (p.stem[-6:], p.stem))
    return [report for path in paths if (report := load(path)) is not None]


def of_this_cpu(name: str, folder: Path = RESULTS) -> Path:
    """Return the file of a benchmark with its own files, for this kind of CPU."""
    return folder / f"{name}_{platform.machine()}.json"


def of_every_cpu(name: str, folder: Path = RESULTS) -> list[Report]:
    """Return the results of such a benchmark, of every kind of CPU."""
    return [report for path in sorted(folder.glob(f"{name}_*.json")) if (report := load(path)) is not None]


def merge(report: Report | None, run: dict[str, Any], record: dict[str, Any]) -> Report:
    """Return the report with this case, which replaces an older one of its name."""
    old = report or {"runs": {}, "cases": {}}
    cases = {**old["cases"], record["name"]: {**record, "run": run["started"]}}
    runs = {**old["runs"], run["started"]: run}
    used = {case["run"] for case in cases.values()}
    return {
        "schema": SCHEMA,
        "device": record["device"],
        "runs": {name: value for name, value in runs.items() if name in used},
        "cases": cases,
    }


def write(path: Path, report: Report) -> None:
    """Store a report; it is renamed into place, so that the file is never incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(_text(report), "utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _text(report: Report) -> str:
    """Return a report as JSON with a line per run, case or record, for readable diffs."""
    return "{\n" + ",\n".join(f"{_json(name)}: {_lines(value)}" for name, value in report.items()) + "\n}\n"


def _lines(value: Any) -> str:
    """Return JSON with a line per entry of a list or dict of records; everything else on one line."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {_json(entry)}" for entry in value) + "\n]"
    if isinstance(value, dict) and value and all(isinstance(entry, dict) for entry in value.values()):
        entries = (f" {_json(name)}: {_json(entry)}" for name, entry in value.items())
        return "{\n" + ",\n".join(entries) + "\n}"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def add(path: Path, run: dict[str, Any], record: dict[str, Any]) -> Report:
    """Add a case to the file of its month."""
    report = merge(load(path), run, record)
    write(path, report)
    return report


def ratio(stored: dict[str, Any]) -> float:
    """Return a stored ratio: the median within turns, or in older results the ratio of medians."""
    return float(stored["median"] if "median" in stored else stored["of_medians"])


def ratio_text(record: dict[str, Any], digits: int = 2) -> str:
    """Return a ratio as text, with its interval if both times are of one kind."""
    text = f"{ratio(record):.{digits}f}"
    if "median" not in record:
        return text
    low, high = record["median_95"]
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def source(run: dict[str, Any]) -> str:
    """Return the source of a run: the commit, or without git the digest of the sources."""
    commit = f"commit {run['commit'][:10]}" if run["commit"] else f"sources {run['sources']}"
    return commit + (" with changes" if run["dirty"] else "")


def same_source(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return True if two runs measured the same source: hashes may be cut, digests tell changes."""
    commits, changed = [run["commit"] or "" for run in (a, b)], [bool(run["dirty"]) for run in (a, b)]
    if (any(changed) or not all(commits)) and a.get("sources") != b.get("sources"):
        return False
    least = min(map(len, commits))
    return commits[0][:least] == commits[1][:least] and changed[0] == changed[1]


def stored_of(report: Report | None, run: dict[str, Any]) -> set[str]:
    """Return the names of stored cases that measured this source and passed their check."""
    return {
        name
        for name, case in (report or {"cases": {}})["cases"].items()
        if report is not None and case["status"] == "ok" and same_source(report["runs"][case["run"]], run)
    }


def line(record: dict[str, Any]) -> str:
    """Return a case as one line for a terminal."""
    if record["status"] != "ok":
        return f"{record['name']:34} FAILED  {record['reason']}"
    ours, peer = record["ours"], record["peer"]
    times = record["median_ms"]
    text = f"{record['name']:34} {ours} {times[ours]:.3g} ms"
    if peer is not None:
        text += f"   {peer} {times[peer]:.3g} ms   ratio {ratio_text(record['ratio'], 3)}"
        if record["target"] is not None:
            text += f" (target {record['target']:g})"
    low, high = record["peer_against_itself"]["middle_90"]
    text += f"   itself [{low:.3f}, {high:.3f}]"
    for name, other in record["ratio_to_others"].items():
        text += f"\n{'':34}   {name} {times[name]:.3g} ms   ratio {ratio_text(other, 3)}"
    for name, measured in record.get("memory", {}).items():
        size = measured["extra_bytes"]
        text += f"\n{'':34}   memory: {name} {measured['how'] if size is None else f'{size / 2**20:.1f} MiB'}"
    for name, reason in record["unavailable"].items():
        text += f"\n{'':34}   {name}: left out, {reason}"
    return text
