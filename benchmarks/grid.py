"""Torch's class and ours in its place, as a table and in README's line of speed, from the stored results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .cases.drop_in import ASKED, MODELS
from .readme import latest, parted, place, readable_bytes, readable_time
from .report import ratio

MARKERS = ("<!-- drop-in -->", "<!-- end drop-in -->")
SPEED = ("<!-- speed -->", "<!-- end speed -->")
STATISTICS = "cuda_statistics_L16384"  # the case in README's line
MODES = ("inference", "training")
NOTHING = "Not measured yet: `python -m benchmarks --only 'drop_in*'`.\n"

Report = dict[str, Any]


def table(results: Iterable[Report]) -> str:
    """How many times as fast as torch's class, by model and question, for every device; as Markdown."""
    parts = []
    for device, records in _drop_in(results).items():
        for legend, mine in parted(device, records.values()):
            parts.append("\n".join([legend, "", *_grid({record["name"]: record for record in mine})]))
    return "\n\n".join([*parts, EXPLANATION]) + "\n" if parts else NOTHING


def speed(results: Iterable[Report]) -> str:
    """README's line: what is gained on each device, and what a look at every head costs; as Markdown."""
    stored = list(results)
    gains = []
    for device, records in _drop_in(stored).items():
        parts = ({record["name"]: record for record in mine} for _, mine in parted(device, records.values()))
        usual = next((found for part in parts if (found := _usual(part))), None)
        if usual is not None:
            inference, training = (_mean(usual, mode) for mode in MODES)
            where = place(device, next(iter(usual.values()))["run"])
            gains.append(f"{inference} / {training} times as fast on {where}")
    said = []
    if gains:
        said.append(
            "In place of `torch.nn.MultiheadAttention` as it is usually asked (no weights; causal by torch's "
            "float mask, with the hint), inference / forward and backward (geometric means): "
            f"{'; '.join(gains)}."
        )
    look = latest(stored).get("cuda", {}).get(STATISTICS)
    if look is not None and look["status"] == "ok":
        sizes, (ours, dense) = look["sizes"], (_cost(look, look[arm]) for arm in ("ours", "peer"))
        heads = f"{sizes['H']} heads over {sizes['L']:,} tokens"
        where = place("cuda", look["run"])
        said.append(f"All statistics of {heads}, on {where}: {ours} where the matrix takes {dense}.")
    return " ".join(said) + "\n" if said else NOTHING


def _usual(records: dict[str, Any]) -> dict[str, Any] | None:
    """Of one commit's records those of the usual question; None where some are missing."""
    names = [
        f"drop_in_{model}_{'float' if causal else 'plain'}_{mode}"
        for model, (*_, causal) in MODELS.items()
        for mode in MODES
    ]
    return {name: records[name] for name in names} if all(name in records for name in names) else None


def _cost(record: dict[str, Any], arm: str) -> str:
    size = record.get("memory", {}).get(arm, {}).get("extra_bytes")
    time = readable_time(record["median_ms"][arm])
    return time if size is None else f"{time} and {readable_bytes(size)}"


def _drop_in(results: Iterable[Report]) -> dict[str, dict[str, Any]]:
    """The records of these cases, by device, where there are any."""
    known = {
        device: {name: record for name, record in records.items() if name.startswith("drop_in_")}
        for device, records in latest(results).items()
    }
    return {device: records for device, records in known.items() if records}


EXPLANATION = (
    "How many times as fast as `torch.nn.MultiheadAttention` asked the same: inference / forward and "
    "backward. A failed check or a missing cell is a dash; [Cases](#cases) has the times, and torch's class "
    "measured against itself."
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
    return "-" if record is None or record["status"] != "ok" else f"{1 / ratio(record['ratio']):.2f}"


def _mean(records: dict[str, Any], mode: str) -> str:
    logs = [
        -math.log(ratio(record["ratio"]))
        for name, record in records.items()
        if name.endswith(mode) and record["status"] == "ok"
    ]
    return f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else "-"
