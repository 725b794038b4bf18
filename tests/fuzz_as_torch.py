"""`headwise.nn.MultiheadAttention` against torch's class for as long as one likes.

    python tests/fuzz_as_torch.py --cases 20000 --seed 0

Case n is drawn from seed + n: `--seed <seed of a mismatch> --cases 1` is that case again. Exits with 1 if
there was a mismatch.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings

import torch
from rich.console import Console

from as_torch_cases import Case, complaint, draw_case

EVERY = 10.0  # seconds between two lines


def main(arguments: list[str] | None = None) -> int:
    """The number of mismatches, at most 1."""
    parser = argparse.ArgumentParser(description="Compare headwise's class with torch's over random calls.")
    parser.add_argument("--cases", type=int, default=20_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after this long, whatever --cases says")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
    console, wrong = Console(soft_wrap=True, highlight=False), []
    start = said = time.monotonic()
    end = start + 60 * given.minutes if given.minutes else float("inf")
    count = 0
    for seed in range(given.seed, given.seed + given.cases):
        case = draw_case(random.Random(seed).choice, seed)
        found = _complaint(case)
        count += 1
        if found is not None:
            wrong.append(seed)
            console.print(f"seed {seed}: {found}\n  {case}", markup=False)
        now = time.monotonic()
        if now - said > EVERY:
            said = now
            rate = count / (now - start)
            console.print(f"{count} of {given.cases} cases, {len(wrong)} mismatches, {rate:.0f} a second")
        if now > end:
            break
    console.print(f"{count} cases, {len(wrong)} mismatches" + (f": seeds {wrong}" if wrong else ""))
    return int(bool(wrong))


def _complaint(case: Case) -> str | None:
    try:
        return complaint(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
