"""GPU time of arms in turn, by replays of CUDA graphs or by events, and the time until a result.

A graph holds as many calls as last half a millisecond, so launches from Python are not in it. Where one of
the arms cannot be captured, all are timed by events.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from .registry import Arm, around
from .runner import CpuTimer, alternate

Sample = Callable[[], float]  # seconds a call

IN_A_GRAPH = 0.0005  # seconds of calls
IN_A_TURN = 0.002
MOST_CALLS = 50
WARM_MS, TIMED_MS = 2, 10  # of one turn by events


class Replays:
    """Calls of an arm in a CUDA graph."""

    def __init__(self, arm: Arm) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with around(arm), torch.cuda.stream(aside):
            for _ in range(3):
                arm()
            aside.synchronize()
            seconds = between_events(arm)
            self.calls = _enough(IN_A_GRAPH, seconds)
            self.replays = _enough(IN_A_TURN, seconds * self.calls)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local"):
                for _ in range(self.calls):
                    arm()
        torch.cuda.synchronize()
        self.graph.replay()

    def __call__(self) -> float:
        return between_events(self.graph.replay, self.replays) / self.calls


def between_events(call: Callable[[], object], times: int = 1) -> float:
    """Return the seconds per call on the GPU."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000 / times


def _enough(wanted: float, seconds: float) -> int:
    return max(1, min(MOST_CALLS, math.ceil(wanted / max(seconds, 1e-9))))


def by_events(arm: Arm) -> Sample:
    """Return the seconds per call as Triton does: the median of calls, each with an empty cache."""

    def sample() -> float:
        from triton.testing import do_bench

        with around(arm):
            return float(do_bench(arm, warmup=WARM_MS, rep=TIMED_MS, return_mode="median")) / 1000

    return sample


def samples_of(arms: Mapping[str, Arm], device: str, capture: bool) -> tuple[dict[str, Sample], str]:
    """Return how every arm is timed, one way for all, and its description."""
    if device != "cuda":
        timer = CpuTimer()
        return {name: lambda arm=arm: timer(arm, 1) for name, arm in arms.items()}, "clock"  # type: ignore[misc]
    method = "events"
    if capture:
        try:
            return {name: Replays(arm) for name, arm in arms.items()}, "graphs"
        except Exception as problem:  # a call that waits for the GPU cannot be captured
            torch.cuda.synchronize()
            method = f"events: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}"
    return {name: by_events(arm) for name, arm in arms.items()}, method


def in_turn(samples: Mapping[str, Sample], turns: int) -> dict[str, list[float]]:
    """Return seconds per call by arm, with a sample of every arm in each turn, in changing order."""
    return alternate(samples, dict.fromkeys(samples, 1), lambda sample, _: float(sample()), turns)


def medians(samples: Mapping[str, Sample], turns: int) -> dict[str, float]:
    """Return the median microseconds per call, with arms in turn and in changing order."""
    timed = in_turn(samples, turns)
    return {name: round(1e6 * statistics.median(values), 2) for name, values in timed.items()}


def felt(arms: Mapping[str, Arm], device: str, times: int) -> dict[str, float]:
    """Return the microseconds from a call until its result is there."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def sample(arm: Arm) -> float:
        with around(arm):
            wait()
            start = time.perf_counter()
            arm()
            wait()
            return time.perf_counter() - start

    return medians({name: lambda arm=arm: sample(arm) for name, arm in arms.items()}, times)  # type: ignore[misc]
