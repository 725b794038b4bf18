"""Time and extra memory of the statistics of a map, for a thousand to a million tokens.

    python -m benchmarks.sweep --device cuda     every length; results/sweep_cuda.json
    python -m benchmarks.sweep --plot            docs/lengths.png and the table in docs/benchmarks.md from it

Each length is a case like the others, checked before it is timed: all statistics and a picture, from a map
that has its log-sum-exp, beside cuDNN's forward and beside the matrix in eager torch, of all heads at once
and head by head, as long as that fits. The file is written anew after each length.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.show.heatmaps import save

from . import lengths, machine, page, peers, progress, report, runner, truths
from . import problem as problems
from .cases.maps import BY_HEAD, DENSE
from .cases.second_pass import CUDNN, Look, beside_cudnn, statistics_of
from .problem import Problem
from .registry import Arm, Case, Prepared, Sizes, Values

LENGTHS = tuple(2**power for power in range(10, 21))
SIZES = {"B": 1, "H": 8, "D": 128, "cells": 128}
FIRST_LENGTH = 4096  # of the first call in the process
MOST_BYTES = 100 * 2**30  # what the eager routes may hold; beyond it they are not even tried
WHOLE_HEAD = 131072  # tokens up to which float64 goes through a head in seconds
TURNS = 5  # fewer beyond WHOLE_HEAD, where a call takes up to several seconds

Report = dict[str, Any]


def at_length(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Return a case: all statistics beside cuDNN's forward and the eager routes that fit."""
    cells = sizes["cells"]
    problem = problems.make(sizes, device, dtype, problems.causal)
    look = statistics_of(problem, cells=cells)
    if sizes["L"] > WHOLE_HEAD:
        look = _judged_in_part(problem, look, cells)
    prepared = beside_cudnn(problem, look)
    fit = [name for name, size in needed(sizes, dtype).items() if size <= MOST_BYTES]
    if not fit:
        return prepared
    q, k, _ = problem.qkv
    hidden = ~problem.mask()
    eager: dict[str, Arm] = {
        DENSE: lambda: peers.dense_statistics(q, k, hidden, cells),
        BY_HEAD: lambda: peers.head_by_head(q, k, hidden, cells),
    }
    return replace(prepared, arms={**prepared.arms, **{name: eager[name] for name in fit}})


def needed(sizes: Sizes, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes that the eager routes need, by arithmetic."""
    B, H, L = sizes["B"], sizes["H"], sizes["L"]
    matrices = {DENSE: B * H, BY_HEAD: B}
    return {name: peers.bytes_of_statistics(count, L, dtype) for name, count in matrices.items()}


def _judged_in_part(problem: Problem, look: Look, cells: int) -> Look:
    """The same look, judged by the last head's last row of cells, and by no head having lost weight."""
    B, H, T, _ = problem.q.shape
    last = [H - 1]

    def truth(dtype: torch.dtype) -> Values:
        row = truths.pooled(problem, cells, last, dtype, range(cells - 1, cells))
        all_queries = torch.full((B, H), float(T), dtype=dtype, device=problem.q.device)
        return {"last row of cells": row, "in the picture": all_queries, "received": all_queries}

    def part(result: dict[str, Tensor]) -> Values:
        picture, received = result["pooled"], result["received"]
        return {
            "last row of cells": picture[:, last, -1:],
            "in the picture": picture.sum((-2, -1)),
            "received": received.sum(-1),
        }

    return replace(look, truth=truth, part=part)


def case_of(length: int, sizes: Sizes, device: str) -> Case:
    """Return the case of a length. It is not registered: these results have a table of their own."""
    turns = max(1, TURNS * WHOLE_HEAD // max(length, WHOLE_HEAD))
    name, words = f"length_{length}", "lse known: all statistics and a picture"
    sizes = {**sizes, "L": length}
    # memory on a CPU is measured in a process of its own, which knows the cases of the list alone
    return Case(name, words, at_length, sizes, {}, CUDNN, memory=device == "cuda", most_repeats=turns)


def first_calls(device: str, sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """Return the seconds of the first call, which compiles kernels, and of the second.

    What libraries load at their first use (cuBLAS, cuDNN) is left out: attention has run by then.
    """
    runner.wake(device)
    problem = problems.make(sizes, torch.device(device), dtype, problems.causal)
    weights = hw.attention(*problem.qkv, causal=True)[1]
    with _nothing_compiled_yet():
        first, second = (
            _seconds(lambda: weights.statistics(pooled=sizes["cells"]), device) for _ in range(2)
        )
    return {"sizes": dict(sizes), "first_seconds": first, "second_seconds": second}


def _seconds(call: Callable[[], object], device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


@contextmanager
def _nothing_compiled_yet() -> Iterator[None]:
    """Use an empty cache folder for Triton, so that the first call compiles its kernels."""
    variable = "TRITON_CACHE_DIR"
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory() as empty:
        os.environ[variable] = empty
        try:
            yield
        finally:
            del os.environ[variable]
            if before is not None:
                os.environ[variable] = before


def run(
    device: str,
    chosen: Sequence[int] = LENGTHS,
    out: Path | None = None,
    commit: str | None = None,
    sizes: Sizes = SIZES,
) -> Report:
    """Measure some lengths; what was found, stored after each of them if `out` is given."""
    dtype = case_of(FIRST_LENGTH, sizes, device).dtype_on(device)
    stored: Report = {
        "schema": report.SCHEMA,
        "device": device,
        "run": {**machine.describe(device, commit), "sizes": dict(sizes)},
        "first_call": first_calls(device, {**sizes, "L": min(FIRST_LENGTH, max(chosen))}, dtype),
        "records": [],
    }
    with progress.best() as shown:
        for number, length in enumerate(chosen, 1):
            case = case_of(length, sizes, device)
            shown.case(case.name, number, len(chosen))
            record = runner.run_case(case, device, TURNS, turned=shown.turn)
            shown.say(report.line(record))
            stored["records"].append({**record, **_out_of_memory(record, needed(case.sizes, dtype))})
            if out is not None:
                report.write(file_in(out, device), stored)
    return stored


def _out_of_memory(record: Report, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the eager routes that did not fit, with the bytes that they need."""
    tried = {name for name, reason in record.get("unavailable", {}).items() if "OutOfMemory" in reason}
    return {"out_of_memory": {name: n for name, n in sizes.items() if n > MOST_BYTES or name in tried}}


def file_in(folder: Path, device: str) -> Path:
    """Return the file of these results."""
    return folder / f"sweep_{device}.json"


def draw(stored: Report, docs: Path, results: Path) -> None:
    """Write the picture and the page of the documentation from stored results."""
    page.write(results, docs / "benchmarks.md")
    save(lengths.picture(stored), docs / "lengths.png")


def arguments() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", metavar="DIR", type=Path, default=report.RESULTS, help="folder of results")
    parser.add_argument(
        "--longest", metavar="TOKENS", type=int, default=LENGTHS[-1], help="longest length (1048576)"
    )
    parser.add_argument("--commit", metavar="HASH", help="the commit, if there is no git")
    parser.add_argument("--plot", action="store_true", help="write picture and table from stored results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0: all passed; 1: a length failed; 2: wrong arguments; 130: Ctrl-C."""
    parser = arguments()
    options = parser.parse_args(argv)
    if options.plot:
        stored = report.load(file_in(options.out, options.device))
        if stored is None:
            parser.error(f"--plot needs results: {options.out} has none; run without --plot")
        draw(stored, machine.ROOT / "docs", options.out)
        return 0
    chosen = [length for length in LENGTHS if length <= options.longest]
    if not chosen:
        parser.error(f"--longest must be at least {LENGTHS[0]}: got {options.longest}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU: torch finds none; use --device cpu")
    try:
        measured = run(options.device, chosen, options.out, options.commit)
    except KeyboardInterrupt:
        print("stopped; lengths that were done are stored", file=sys.stderr)
        return 130
    failed = [record["name"] for record in measured["records"] if record["status"] != "ok"]
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
