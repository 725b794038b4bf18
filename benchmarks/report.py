"""Results as JSON, one file per device and month: <device>_<yyyymm>.json.

    {"schema": 1, "device": "cpu",
     "runs":  {"2026-01-31T12:00:00Z": {machine, versions, commit, dirty, repeats, ...}},
     "cases": {"window256_L8192": {..., "run": "2026-01-31T12:00:00Z"}}}

A run of some cases replaces those and leaves the others; each case says which run it comes from, and runs
nobody refers to any more are dropped.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

__all__ = [
    "RESULTS",
    "add",
    "file_for",
    "line",
    "load",
    "load_all",
    "merge",
    "of_every_cpu",
    "of_this_cpu",
    "write",
]

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1

Report = dict[str, Any]


def file_for(folder: Path, device: str, started: str) -> Path:
    """Where the results of a run go; `started` as 2026-01-31T12:00:00Z."""
    return folder / f"{device}_{started[:4]}{started[5:7]}.json"


def load(path: Path) -> Report | None:
    """A stored report; None if there is none.

    Raises:
        ValueError: a file of another schema.
    """
    if not path.exists():
        return None
    report: Report = json.loads(path.read_text())
    if report.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} must have schema {SCHEMA}: got {report.get('schema')!r}; move it away")
    return report


def load_all(folder: Path = RESULTS) -> list[Report]:
    """Every stored report, older months first."""
    paths = sorted(folder.glob("*_[0-9][0-9][0-9][0-9][0-9][0-9].json"), key=lambda p: (p.stem[-6:], p.stem))
    return [report for path in paths if (report := load(path)) is not None]


def of_this_cpu(name: str, folder: Path = RESULTS) -> Path:
    """Where the results of a benchmark with files of its own lie, on this kind of CPU."""
    return folder / f"{name}_{platform.machine()}.json"


def of_every_cpu(name: str, folder: Path = RESULTS) -> list[Report]:
    """What such a benchmark has stored, of every kind of CPU."""
    return [report for path in sorted(folder.glob(f"{name}_*.json")) if (report := load(path)) is not None]


def merge(report: Report | None, run: dict[str, Any], record: dict[str, Any]) -> Report:
    """A report with one more case, which replaces an older one of its name."""
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
    """Store a report: under another name first, so that a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def add(path: Path, run: dict[str, Any], record: dict[str, Any]) -> Report:
    """Put one case into the file of its month."""
    report = merge(load(path), run, record)
    write(path, report)
    return report


def line(record: dict[str, Any]) -> str:
    """One case in one line, for a terminal."""
    if record["status"] != "ok":
        return f"{record['name']:34} FAILED  {record['reason']}"
    ours, peer = record["ours"], record["peer"]
    times = record["median_ms"]
    text = f"{record['name']:34} {ours} {times[ours]:.3g} ms"
    if peer is not None:
        low, high = record["ratio"]["median_95"]
        text += f"   {peer} {times[peer]:.3g} ms"
        text += f"   ratio {record['ratio']['of_medians']:.3f} [{low:.3f}, {high:.3f}]"
        if record["target"] is not None:
            text += f" (target {record['target']:g})"
    low, high = record["peer_against_itself"]["middle_90"]
    text += f"   itself [{low:.3f}, {high:.3f}]"
    for name, ratio in record["ratio_to_others"].items():
        text += f"\n{'':34}   {name} {times[name]:.3g} ms   ratio {ratio['of_medians']:.3f}"
    for name, measured in record.get("memory", {}).items():
        size = measured["extra_bytes"]
        text += f"\n{'':34}   memory: {name} {measured['how'] if size is None else f'{size / 2**20:.1f} MiB'}"
    for name, reason in record["unavailable"].items():
        text += f"\n{'':34}   {name}: left out, {reason}"
    return text
