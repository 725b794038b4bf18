"""torch's class and ours at everyday sizes, one sequence at a time: every mask, every way to ask for weights.

    python -m benchmarks.everyday                the grid for this CPU; results/everyday_<kind of CPU>.json
    python -m benchmarks.everyday --show         what is stored, in words

docs/benchmarks.md shows what is stored of every kind of CPU: `python -m benchmarks --readme`.

Each cell is a case like the others: checked against float64, timed in turn beside torch's class, which is
timed against itself, too. Said at the end: the geometric mean of how many times faster ours is, the worst
cells, and how far torch is from itself. The file is written anew after each cell.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from . import machine, progress, readme, report, runner
from .cases.drop_in import drop_in
from .cases.modules import TORCH
from .registry import Case, Sizes

__all__ = ["LENGTHS", "MASKS", "WEIGHTS", "cells", "load_all", "main", "run", "summary", "table"]

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
SIZES = {"B": 1, "H": 6, "E": 384}
MASKS: dict[str, dict[str, bool]] = {
    "none": {},
    "causal": {"causal": True},
    "padded": {"padded": True},
    "both": {"causal": True, "padded": True},
    "scattered": {"scattered": True},
}
WEIGHTS = {"plain": None, "mean": "mean", "heads": "heads"}
TURNS = 12
WORST = 5  # cells that are named
MARKERS = ("<!-- everyday -->", "<!-- end everyday -->")

Report = dict[str, Any]


def cells(lengths: Sequence[int] = LENGTHS, sizes: Sizes = SIZES) -> list[Case]:
    """The cells, on no list: these results have a table of their own."""
    return [
        Case(
            f"everyday_L{length}_{mask}_{asked}",
            f"torch's class, {length} tokens, mask: {mask}, weights: {asked}",
            partial(drop_in, weights=WEIGHTS[asked], **MASKS[mask]),
            {**sizes, "L": length},
            tiny={},
            peer=TORCH,
            devices=("cpu",),
        )
        for length, mask, asked in product(lengths, MASKS, WEIGHTS)
    ]


def run(
    chosen: Sequence[Case], turns: int = TURNS, out: Path | None = None, commit: str | None = None
) -> Report:
    """Measure some cells; what came of it, stored after each of them if `out` is given."""
    stored: Report = {
        "schema": report.SCHEMA,
        "device": "cpu",
        "run": {**machine.describe("cpu", commit), "turns": turns},
        "records": [],
    }
    with progress.best() as shown:
        for number, case in enumerate(chosen, 1):
            shown.case(case.name, number, len(chosen))
            record = runner.run_case(case, "cpu", turns, turned=shown.turn)
            shown.say(report.line(record))
            stored["records"].append(record)
            if out is not None:
                report.write(file_in(out), stored)
    return stored


def file_in(folder: Path) -> Path:
    """Where the results of this kind of CPU lie."""
    return report.of_this_cpu("everyday", folder)


def load_all(folder: Path = report.RESULTS) -> list[Report]:
    """What is stored, of every kind of CPU."""
    return report.of_every_cpu("everyday", folder)


def table(results: Sequence[Report]) -> str:
    """The grids as Markdown: lengths and masks, without weights / their mean / those of every head."""
    parts = []
    for stored in results:
        times = _times_faster(stored)
        rows = [
            f"| {length:,} | "
            + " | ".join(
                " / ".join(_said(times.get(f"L{length}_{mask}_{asked}")) for asked in WEIGHTS)
                for mask in MASKS
            )
            + " |"
            for length in LENGTHS
        ]
        head = ["| tokens | " + " | ".join(MASKS) + " |", "|---" * (len(MASKS) + 1) + "|"]
        said = summary(stored).splitlines()[-3:]
        parts.append("\n".join([*readme.legends("cpu", [stored]), *said, "", *head, *rows]))
    return "\n\n".join(parts or ["No results are stored yet."]) + "\n"


def _said(times: float | None) -> str:
    return "–" if times is None else f"{times:.2f}"


def _times_faster(stored: Report) -> dict[str, float]:
    """Cell -> how many times as fast as torch's class."""
    return {
        record["name"].removeprefix("everyday_"): 1 / record["ratio"]["of_medians"]
        for record in stored["records"]
        if record["status"] == "ok"
    }


def summary(stored: Report) -> str:
    """The grid in words: times faster than torch's class."""
    faster = _times_faster(stored)
    if not faster:
        return "Nothing is measured yet: python -m benchmarks.everyday"
    done = [record for record in stored["records"] if record["status"] == "ok"]
    itself = [record["peer_against_itself"]["of_medians"] for record in done]
    mean = math.exp(sum(map(math.log, faster.values())) / len(faster))
    worst = sorted(faster, key=lambda name: faster[name])[:WORST]
    lines = [f"{name:24} {value:5.2f} x" for name, value in faster.items()]
    return "\n".join(
        [
            *lines,
            f"{len(faster)} cells, {stored['run']['machine']['cpu']}: geometric mean {mean:.2f} x as fast",
            "worst: " + ", ".join(f"{name} {faster[name]:.2f}" for name in worst),
            f"torch against itself: {min(itself):.2f} to {max(itself):.2f}",
        ]
    )


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.everyday",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="DIR", type=Path, default=report.RESULTS, help="where results lie")
    parser.add_argument(
        "--longest", metavar="TOKENS", type=int, default=LENGTHS[-1], help="stop there (2048)"
    )
    parser.add_argument("--turns", metavar="N", type=int, default=TURNS, help=f"turns of each cell ({TURNS})")
    parser.add_argument("--commit", metavar="HASH", help="the commit, where git cannot tell")
    parser.add_argument("--show", action="store_true", help="say what is stored")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 all well, 1 a cell failed, 2 wrong use, 130 stopped by Ctrl-C."""
    parser = arguments()
    options = parser.parse_args(given)
    if options.show:
        stored = report.load(file_in(options.out))
        if stored is None:
            parser.error(
                f"no results of this kind of CPU lie in {options.out}; measure first: without --show"
            )
        print(summary(stored))
        return 0
    lengths = [length for length in LENGTHS if length <= options.longest]
    if not lengths:
        parser.error(f"--longest must be at least {LENGTHS[0]}: got {options.longest}")
    if options.turns < 1:
        parser.error(f"--turns must be at least 1: got {options.turns}")
    try:
        stored = run(cells(lengths), options.turns, options.out, options.commit)
    except KeyboardInterrupt:
        print("stopped; cells that were done are stored", file=sys.stderr)
        return 130
    print(summary(stored))
    return 1 if any(record["status"] != "ok" for record in stored["records"]) else 0


if __name__ == "__main__":
    sys.exit(main())
