"""Tests run one after another where there is a GPU and torch, and no pytest."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable

import torch

__all__ = ["run_all"]


def run_all(tests: Iterable[Callable[[], None]], *heading: object) -> int:
    """Exit status: 0 all passed, 1 not."""
    _say(torch.__version__, torch.cuda.get_device_name(), *heading)
    failed = 0
    for test in tests:
        start = time.perf_counter()
        try:
            test()
            _say(f"passed {test.__name__} ({time.perf_counter() - start:.0f} s)")
        except BaseException as problem:
            if type(problem).__name__ == "Skipped":  # pytest's, where it is there to be imported
                _say("skipped", test.__name__, problem)
                continue
            if not isinstance(problem, Exception):
                raise
            failed += 1
            _say("FAILED", test.__name__)
            traceback.print_exc()
    return int(bool(failed))


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
