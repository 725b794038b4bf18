"""`python -m benchmarks`: run cases, list them, or write what README and docs/benchmarks.md say of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import __doc__ as about
from . import machine, page, progress, readme, report
from .cases import choose
from .registry import Case
from .runner import run_case

LEAST_PUBLISHED = 30
QUICK_REPEATS = 4


def arguments() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PATTERN", help="cases with matching names, e.g. 'window*'")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of results (benchmarks/results)")
    parser.add_argument("--part", metavar="N/M", help="the N-th of M parts, e.g. 2/3")
    parser.add_argument("--seconds", metavar="N", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--missing", action="store_true", help="skip cases stored at this commit")
    parser.add_argument("--repeats", metavar="N", type=int, default=LEAST_PUBLISHED, help="turns (30)")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads (torch's own choice)")
    parser.add_argument("--commit", metavar="HASH", help="the commit, if there is no git")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few turns; stored only with --out")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument("--readme", action="store_true", help="write README's line and docs/benchmarks.md")
    return parser


def part_of(cases: Sequence[Case], part: str) -> list[Case]:
    """Return the cases of one part: "2/3" is the second third, every third case, to spread similar ones.

    Raises:
        ValueError: not two numbers, or no such part.
    """
    number, _, of = part.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ValueError(f"--part must be N/M with N from 1 to M: got {part}; 2/3 is the second third")
    return list(cases[int(number) - 1 :: int(of)])


def run(
    cases: Sequence[Case],
    device: str,
    repeats: int,
    quick: bool,
    out: Path | None,
    commit: str | None = None,
    until: float = float("inf"),
) -> list[dict[str, Any]]:
    """Run cases one after another, store each as soon as it is done, and return their records.

    until: a monotonic time after which none begins; those left are named.
    """
    started = {**machine.describe(device, commit), "repeats": repeats, "quick": quick}
    path = None if out is None else report.file_for(out, device, started["started"])
    records = []
    with progress.best() as shown:
        for number, case in enumerate(cases, 1):
            if time.monotonic() > until:
                left = ", ".join(case.name for case in cases[number - 1 :])
                print(f"out of time, skipped: {left}", file=sys.stderr)
                break
            shown.case(case.name, number, len(cases))
            begun = time.monotonic()
            record = run_case(case, device, repeats, quick, shown.turn)
            record["seconds"] = round(time.monotonic() - begun, 1)
            shown.say(report.line(record))
            records.append(record)
            if path is not None:
                report.add(path, started, record)
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0: all passed; 1: a case failed; 2: wrong arguments; 130: Ctrl-C."""
    begun = time.monotonic()
    parser = arguments()
    options = parser.parse_args(argv)
    if options.readme:
        return _write_readme(options.out or report.RESULTS)
    cases = choose(options.only, options.device)
    if options.list:
        for case in choose(options.only):
            print(f"{case.name:34} {'+'.join(case.devices):9} {case.description}")
        return 0
    if not cases:
        parser.error(f"no case for {options.device} fits {options.only!r}; --list names them all")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1: got {options.repeats}; leave it out for the default")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU: torch finds none; use --device cpu")
    if options.part is not None:
        try:
            cases = part_of(cases, options.part)
        except ValueError as problem:
            parser.error(str(problem))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    repeats = min(options.repeats, QUICK_REPEATS) if options.quick else options.repeats
    out = options.out or (None if options.quick else report.RESULTS)
    if repeats < LEAST_PUBLISHED and not options.quick:
        print(
            f"{repeats} turns are fewer than the {LEAST_PUBLISHED} a published result needs", file=sys.stderr
        )
    if options.missing:
        cases = _missing(cases, options.device, options.out or report.RESULTS, options.commit)
    until = begun + options.seconds
    try:
        records = run(cases, options.device, repeats, options.quick, out, options.commit, until)
    except KeyboardInterrupt:
        print("stopped" + ("" if out is None else "; cases that were done are stored"), file=sys.stderr)
        return 130
    failed = [record["name"] for record in records if record["status"] != "ok"]
    if failed:
        print(f"{len(failed)} of {len(records)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _missing(cases: Sequence[Case], device: str, folder: Path, commit: str | None) -> list[Case]:
    """Return the cases without a stored, correct result of the present source."""
    about = machine.describe(device, commit)
    stored_names = report.stored_of(report.load(report.file_for(folder, device, about["started"])), about)
    return [case for case in cases if case.name not in stored_names]


def _write_readme(results: Path) -> int:
    try:
        readme.put(machine.ROOT / "README.md", readme.speed(report.load_all(results)), *readme.SPEED)
        page.write(results)
    except (OSError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
