"""All mask rules on a GPU beside FlexAttention and SDPA: time, time felt, first calls.

    python -m benchmarks.rules --device cuda                       everything; results/rules_cuda.json
    python -m benchmarks.rules --device cuda --only 'forward*'     some cells, put into the same file
    python -m benchmarks.rules --device cuda --warm 8              eight processes compile first, side by side
    python -m benchmarks.rules --device cuda --missing             those that this commit has not stored yet
    python -m benchmarks.rules --list                              names of the cells, most important first

A cell is checked before it is timed: a smaller twin against float64, whose error may be twice that of plain
torch in the same dtype (for gradients three times), and at full size every peer must agree with ours. Ours is
`hw.attention` as everyone calls it. A ratio is ours over the fastest peer. The file is written anew after
each cell; what `--seconds` leaves undone is said at the end, and what is stored of it stays.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from . import flex, machine, report, rule_table
from .rule_cell import FIRST_SIZES, TURNS, Cell, again, first_calls, measure

LENGTHS, PLAIN_LENGTHS = (1024, 4096, 8192, 32768), (4096, 8192, 16384, 32768)
LONGEST_BACK = 8192  # forward and backward
LONGEST_DENSE = 8192  # whatever holds a number for every query and key
FIRST = ("softcap", "alibi", "documents", "dense", "bias", "sinks", "padding")
QUICK_TURNS = 2
WARMING = 240.0  # seconds, at most

Record = dict[str, Any]


def cells() -> list[Cell]:
    """Return all cells, the most important first."""
    every_cell: list[Cell] = []
    for rule, D, L in product(flex.RULES, (128, 64), sorted({*LENGTHS, *PLAIN_LENGTHS})):
        if L not in (PLAIN_LENGTHS if rule in ("causal", "full") else LENGTHS):
            continue
        sizes = {"H": 16, "D": D, "L": L}
        if rule != "bias_gradient" and (L <= LONGEST_DENSE or rule not in ("dense", "unhinted", "bias")):
            every_cell.append(Cell("forward", rule, sizes))
        if L <= LONGEST_BACK:
            every_cell.append(Cell("backward", rule, sizes))
    for rule, S in product(("full", "softcap"), (4096, 131072)):
        every_cell.append(Cell("decode", rule, {"H": 32, "Hk": 8, "D": 128, "T": 1, "S": S}))
    for H, L, D in ((8, 131072, 128), (32, 16384, 64), (32, 16384, 128), (32, 2048, 128)):
        every_cell.append(Cell("statistics", "causal", {"H": H, "D": D, "L": L}))
    every_cell += [Cell("first", rule, FIRST_SIZES) for rule in FIRST]
    return sorted(every_cell, key=lambda cell: cell.tier)


def tiny(chosen: Sequence[Cell]) -> list[Cell]:
    """Return each mode and rule once, at tiny sizes."""
    small = {"H": 4, "Hk": 2, "D": 16, "L": 128, "T": 1, "S": 128}
    once = {(cell.way, cell.rule): cell for cell in chosen}
    return [Cell(*key, {x: small[x] for x in cell.sizes}) for key, cell in once.items()]


# Many cells


def run(
    chosen: Sequence[Cell],
    device: str,
    out: Path | None = None,
    turns: int = TURNS,
    until: float = float("inf"),
    commit: str | None = None,
) -> list[Record]:
    """Measure some cells, each stored as soon as it is done; none begins after `until`, a monotonic time."""
    about: Record = {**machine.describe(device, commit), "quick": turns < TURNS, "skipped": []}
    path = None if out is None else rule_table.file_in(out, device)
    records: list[Record] = []
    for number, cell in enumerate(chosen, 1):
        if time.monotonic() > until:
            about["skipped"] = [left.name for left in chosen[number - 1 :]]
            print(f"out of time, skipped: {', '.join(about['skipped'])}", file=sys.stderr)
            break
        print(f"[{number}/{len(chosen)}] {cell.name}", file=sys.stderr, flush=True)
        records.append(measure(cell, device, turns))
        print(rule_table.line(records[-1]), flush=True)
        if path is not None:
            rule_table.add(path, about, records[-1])
    if path is not None and records and about["skipped"]:
        rule_table.add(path, about, records[-1])
    return records


def warm(
    chosen: Sequence[Cell], device: str, processes: int, child_options: Sequence[str], most: float
) -> None:
    """Compile the kernels of cells in several processes, into caches that this one reads."""
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    children = [
        subprocess.Popen(
            [*again(device), *child_options, "--share", str(number), str(processes)],
            env=env, cwd=machine.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for number in range(min(processes, len(chosen)))
    ]  # fmt: skip
    end = time.monotonic() + most
    for child in children:
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


def choose(pattern: str | None, quick: bool) -> list[Cell]:
    """Return the cells that match the patterns, which are separated by commas."""
    patterns = (pattern or "*").split(",")
    fitting = [
        cell for cell in cells() if any(fnmatch.fnmatch(cell.name, name_pattern) for name_pattern in patterns)
    ]
    return tiny(fitting) if quick else fitting


def arguments() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--only", metavar="PATTERN", help="cells with matching names, e.g. 'forward_softcap*,first*'"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of results (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few turns; stored only with --out")
    parser.add_argument("--seconds", metavar="N", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--missing", action="store_true", help="skip cases stored at this commit")
    parser.add_argument("--warm", metavar="N", type=int, default=0, help="processes that compile first")
    parser.add_argument("--commit", metavar="HASH", help="the commit, if there is no git")
    parser.add_argument("--list", action="store_true", help="names of the cells")
    parser.add_argument("--first", choices=FIRST, help=argparse.SUPPRESS)  # what a child does
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)  # likewise: number, of
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0: all passed; 1: a cell failed; 2: wrong arguments; 130: Ctrl-C."""
    begun = time.monotonic()
    parser = arguments()
    options = parser.parse_args(argv)
    device, results = options.device, options.out or report.RESULTS
    chosen = choose(options.only, options.quick)
    if options.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    if not chosen:
        parser.error(f"no cell fits {options.only!r}; --list names them all")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU: torch finds none; use --device cpu")
    if options.first:
        print(json.dumps(first_calls(options.first, device)))
        return 0
    if options.share:
        number, of = options.share
        for cell in chosen[number::of]:
            measure(cell, device, timed=False)
        return 0
    if options.missing:
        stored_names = report.stored_of(
            report.load(rule_table.file_in(results, device)), machine.describe(device, options.commit)
        )
        chosen = [cell for cell in chosen if cell.name not in stored_names]
    try:
        if options.warm:
            child_options = [
                "--only",
                ",".join(cell.name for cell in chosen) or "*",
                *(["--quick"] if options.quick else []),
            ]
            warm(chosen, device, options.warm, child_options, min(WARMING, options.seconds / 2))
        out = options.out or (None if options.quick else report.RESULTS)
        turns = QUICK_TURNS if options.quick else TURNS
        records = run(chosen, device, out, turns, begun + options.seconds, options.commit)
    except KeyboardInterrupt:
        print("stopped; cells that were done are stored", file=sys.stderr)
        return 130
    print(rule_table.summary(records))
    failed = [record["name"] for record in records if record["status"] != "ok"]
    if failed:
        print(f"{len(failed)} of {len(records)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
