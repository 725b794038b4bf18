"""Common calls, timed until the result is there: tiny calls, rows of maps, modules, watched models.

    python -m benchmarks.everyday                                 all for this CPU
    python -m benchmarks.everyday --device cuda --seconds 540     on a GPU; none begins after nine minutes
    python -m benchmarks.everyday --device cuda --missing         those that this commit has not stored yet
    python -m benchmarks.everyday --only 'watch*,row*'            some, put into the same file
    python -m benchmarks.everyday --list                          their names, most important first
    python -m benchmarks.everyday --show                          what is stored, in words

docs/benchmarks.md shows what is stored: `python -m benchmarks --readme`. The cases: everyday_cases.py.

Each is checked against float64 first, then timed in turn beside its peer, which is timed against itself, too:
one call, then the GPU is waited for (of tiny calls: until they return). The file is written anew after each
case; what `--seconds` leaves undone is said at the end, and what is stored of it stays.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import everyday_table, machine, progress, report, runner
from .everyday_cases import LENGTHS, every, group_of
from .registry import Case

TURNS, QUICK_TURNS = 12, 2

Report = dict[str, Any]


def choose(pattern: str | None, device: str, longest: int = LENGTHS[-1]) -> list[Case]:
    """Return the cases of a device that match the patterns (separated by commas), up to length `longest`."""
    patterns = (pattern or "*").split(",")
    return [
        case
        for case in every()
        if device in case.devices
        and any(fnmatch.fnmatchcase(case.name, name_pattern) for name_pattern in patterns)
        and (group_of(case.name) != "grid" or case.sizes["L"] <= longest)
    ]


def run(
    chosen: Sequence[Case],
    device: str = "cpu",
    turns: int = TURNS,
    out: Path | None = None,
    commit: str | None = None,
    until: float = float("inf"),
    tiny: bool = False,
) -> list[Report]:
    """Measure some cases, each stored as soon as it is done; none begins after `until`, a monotonic time."""
    about = {**machine.describe(device, commit), "turns": turns, "quick": tiny, "skipped": []}
    records: list[Report] = []
    with progress.best() as shown:
        for number, case in enumerate(chosen, 1):
            if time.monotonic() > until:
                about["skipped"] = [left.name for left in chosen[number - 1 :]]
                print(f"out of time, skipped: {', '.join(about['skipped'])}", file=sys.stderr)
                break
            shown.case(case.name, number, len(chosen))
            begun = time.monotonic()
            records.append(_measured(case, device, turns, tiny, shown.turn))
            records[-1]["seconds"] = round(time.monotonic() - begun, 1)
            shown.say(report.line(records[-1]))
            if out is not None:
                report.add(file_in(out, device), about, records[-1])
    if out is not None and records and about["skipped"]:
        report.add(file_in(out, device), about, records[-1])
    return records


def _measured(case: Case, device: str, turns: int, tiny: bool, turned: runner.Turned) -> Report:
    timer = runner.HostTimer(device) if group_of(case.name) == "calls" else runner.FeltTimer(device)
    # memory on a CPU is measured in a process of its own, which knows the cases of the list alone
    record = runner.run_case(replace(case, memory=False), device, turns, tiny, turned, timer)
    gc.collect()  # a model is a ring of references: without this two of them would be on the GPU
    return record


def file_in(folder: Path, device: str = "cpu") -> Path:
    """Return the file of results of this device, or of this kind of CPU."""
    return report.of_this_cpu("everyday", folder) if device == "cpu" else folder / f"everyday_{device}.json"


def arguments() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.everyday",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="PATTERN", help="cases with matching names, e.g. 'watch*,row*'")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of results (benchmarks/results)")
    parser.add_argument(
        "--longest", metavar="TOKENS", type=int, default=LENGTHS[-1], help="longest length (2048)"
    )
    parser.add_argument("--turns", metavar="N", type=int, default=TURNS, help=f"turns per case ({TURNS})")
    parser.add_argument("--seconds", metavar="N", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--missing", action="store_true", help="skip cases stored at this commit")
    parser.add_argument("--commit", metavar="HASH", help="the commit, if there is no git")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few turns; stored only with --out")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument("--show", action="store_true", help="show stored results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0: all passed; 1: a case failed; 2: wrong arguments; 130: Ctrl-C."""
    begun = time.monotonic()
    parser = arguments()
    options = parser.parse_args(argv)
    device, folder = options.device, options.out or report.RESULTS
    if options.show:
        stored = report.load(file_in(folder, device))
        if stored is None:
            parser.error(f"--show needs results of this machine: {folder} has none; run without --show")
        print(everyday_table.summary(stored["cases"].values()))
        return 0
    chosen = choose(options.only, device, options.longest)
    if options.list:
        print("\n".join(f"{case.name:44} {case.description}" for case in chosen))
        return 0
    if options.longest < LENGTHS[0]:
        parser.error(f"--longest must be at least {LENGTHS[0]}: got {options.longest}")
    if not chosen:
        parser.error(f"no case for {device} fits {options.only!r}; --list names them all")
    if options.turns < 1:
        parser.error(f"--turns must be at least 1: got {options.turns}")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU: torch finds none; use --device cpu")
    if options.missing:
        about = machine.describe(device, options.commit)
        stored_names = report.stored_of(report.load(file_in(folder, device)), about)
        chosen = [case for case in chosen if case.name not in stored_names]
    turns = min(options.turns, QUICK_TURNS) if options.quick else options.turns
    out = options.out or (None if options.quick else report.RESULTS)
    try:
        records = run(chosen, device, turns, out, options.commit, begun + options.seconds, options.quick)
    except KeyboardInterrupt:
        print("stopped; cases that were done are stored", file=sys.stderr)
        return 130
    print(everyday_table.summary(records))
    return 1 if any(record["status"] != "ok" for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
