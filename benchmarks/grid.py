"""README's table of torch's class and ours in its place, from the stored results and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .cases.drop_in import ASKED, MODELS
from .readme import legend

__all__ = ["MARKERS", "table"]

MARKERS = ("<!-- drop-in -->", "<!-- end drop-in -->")
MODES = ("inference", "training")
NOTHING = "Not measured yet: `python -m benchmarks --only 'drop_in*'`.\n"

Report = dict[str, Any]


def table(results: Iterable[Report]) -> str:
    """How many times as fast as torch's class, by model and question, for every device; as Markdown."""
    latest: dict[str, dict[str, Any]] = {}  # device -> case -> record
    runs: dict[str, dict[str, Any]] = {}
    for report in results:
        found = {
            name: record
            for name, record in report["cases"].items()
            if name.startswith("drop_in_") and not report["runs"][record["run"]]["quick"]
        }
        latest.setdefault(report["device"], {}).update(found)
        runs |= {f"{report['device']} {name}": run for name, run in report["runs"].items()}
    parts = []
    for device, records in latest.items():
        if records:
            used = sorted({record["run"] for record in records.values()})
            legends = dict.fromkeys(legend(device, runs[f"{device} {name}"]) for name in used)
            parts.append("\n".join([*legends, "", *_grid(records)]))
    return "\n\n".join([*parts, EXPLANATION]) + "\n" if parts else NOTHING


EXPLANATION = (
    "How many times as fast as `torch.nn.MultiheadAttention` asked the same: inference / forward and "
    "backward. A failed check or a missing cell is a dash; [docs/benchmarks.md](docs/benchmarks.md) has the "
    "times, and torch's class measured against itself."
)


def _grid(records: dict[str, Any]) -> list[str]:
    lines = [
        f"| | sizes | {' | '.join(words for words, _ in ASKED.values())} |",
        "|---|---|" + "---|" * len(ASKED),
    ]
    for model, (words, *_) in MODELS.items():
        mine = [records[name] for name in records if name.startswith(f"drop_in_{model}_")]
        if mine:
            sizes = " ".join(f"{letter}{mine[0]['sizes'][letter]}" for letter in "BHLE")
            cells = [_cell(records, f"drop_in_{model}_{way}") for way in ASKED]
            lines.append(f"| {words} | {sizes} | {' | '.join(cells)} |")
    means = [_mean(records, mode) for mode in MODES]
    return [*lines, "", f"Geometric mean {means[0]} / {means[1]}."]


def _cell(records: dict[str, Any], start: str) -> str:
    return " / ".join(_times(records.get(f"{start}_{mode}")) for mode in MODES)


def _times(record: Any) -> str:
    return "-" if record is None or record["status"] != "ok" else f"{1 / record['ratio']['of_medians']:.2f}"


def _mean(records: dict[str, Any], mode: str) -> str:
    logs = [
        -math.log(record["ratio"]["of_medians"])
        for name, record in records.items()
        if name.endswith(mode) and record["status"] == "ok"
    ]
    return f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else "-"
