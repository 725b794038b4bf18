"""`headwise.nn.MultiheadAttention` against torch's class for as long as one likes.

    python tests/fuzz_as_torch.py --cases 20000 --seed 0
    python tests/fuzz_as_torch.py --of hints         # calls, mistakes, layers, hooks, ...: see DRAWS

Case n is drawn from seed + n: `--seed <seed of a mismatch> --cases 1` is that case again. Exits with 1 if
there was a mismatch.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from as_torch_cases import (
    Choose,
    difference,
    draw_call,
    draw_case,
    draw_fast,
    draw_hint,
    draw_mistakes,
)
from as_torch_hooks import (
    draw_hooked_call,
    draw_hooked_layer,
    hooked_call_difference,
    hooked_layer_difference,
)
from as_torch_layers import draw_fast_layer, draw_layer, layer_difference

EVERY = 10.0  # seconds between two lines
DRAWS: dict[str, tuple[Callable[[Choose, int], Any], Callable[[Any], str | None]]] = {
    "answers": (draw_case, difference),
    "calls": (draw_call, difference),
    "mistakes": (draw_mistakes, difference),
    "hints": (draw_hint, difference),
    "fast calls": (draw_fast, difference),
    "layers": (draw_layer, layer_difference),
    "fast layers": (draw_fast_layer, layer_difference),
    "hooks": (draw_hooked_call, hooked_call_difference),
    "hooks on layers": (draw_hooked_layer, hooked_layer_difference),
}


def main(arguments: list[str] | None = None) -> int:
    """The number of mismatches, at most 1."""
    parser = argparse.ArgumentParser(description="Compare headwise's class with torch's over random calls.")
    parser.add_argument("--cases", type=int, default=20_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: %(default)s)")
    parser.add_argument("--of", choices=DRAWS, default="answers", help="what is drawn (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after this long, whatever --cases says")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for message in ("Support for mismatched", "enable_nested_tensor is True", "The PyTorch API of nested"):
        warnings.filterwarnings("ignore", message)
    draw, differs = DRAWS[options.of]
    console, wrong = Console(soft_wrap=True, highlight=False), []
    start = expected_message = time.monotonic()
    end = start + 60 * options.minutes if options.minutes else float("inf")
    count = 0
    for seed in range(options.seed, options.seed + options.cases):
        case = draw(random.Random(seed).choice, seed)
        actual = _difference(differs, case)
        count += 1
        if actual is not None:
            wrong.append(seed)
            console.print(f"seed {seed}: {actual}\n  {case}", markup=False)
        now = time.monotonic()
        if now - expected_message > EVERY:
            expected_message = now
            rate = count / (now - start)
            console.print(f"{count} of {options.cases} cases, {len(wrong)} mismatches, {rate:.0f} a second")
        if now > end:
            break
    console.print(f"{count} cases, {len(wrong)} mismatches" + (f": seeds {wrong}" if wrong else ""))
    return int(bool(wrong))


def _difference(differs: Callable[[Any], str | None], case: Any) -> str | None:
    try:
        return differs(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
