"""Timing: arms in turn, in changing order; medians, ratios, and the peer against itself.

Each turn takes one sample of every arm, and the order changes from turn to turn, so that whatever the machine
does meanwhile falls on all of them alike. A sample is as many calls as it takes to last 5 ms. The peer takes
part twice, as two arms that know nothing of each other: how far their ratio strays from 1 is what this
machine, in this run, can tell apart. On a GPU samples are taken with events, and calls are not waited for
one by one.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import memory
from .registry import Arm, Case, Prepared, Values, around
from .verdicts import Checked, check, closest

AGAIN = "(again)"
LEAST_SAMPLE = 0.005  # seconds
BUSY = 4_000_000  # cycles of a GPU, about two milliseconds
MOST_LOOPS = 2000
WARMUP_CALLS = 4  # the first included; fewer for an arm that takes longer than SLOW
SLOW = 0.5  # seconds

Timer = Callable[[Arm, int], float]  # seconds a call, over so many calls
Turned = Callable[[int, int], None]  # told after each turn: done, of


class CpuTimer:
    """Elapsed seconds per call."""

    def __call__(self, arm: Arm, loops: int) -> float:
        with _without_collection(), around(arm):
            start = time.perf_counter()
            for _ in range(loops):
                arm()
            return (time.perf_counter() - start) / loops


class CudaTimer:
    """Seconds per call between two events on a busy GPU.

    Something is always queued before the first event: a GPU that waits for Python to launch the first kernel
    of a sample would be counted, too. Where launches take longer than the work, later calls wait as they do
    in life.
    """

    def __call__(self, arm: Arm, loops: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with around(arm):
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY)
            start.record()
            for _ in range(loops):
                arm()
            stop.record()
            torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1000 / loops


class FeltTimer:
    """Elapsed seconds from a call until its result is there: one call, then a synchronisation."""

    def __init__(self, device: str) -> None:
        self._wait = torch.cuda.synchronize if device == "cuda" else _nothing

    def __call__(self, arm: Arm, loops: int) -> float:
        with _without_collection(), around(arm):
            self._wait()
            start = time.perf_counter()
            for _ in range(loops):
                arm()
                self._wait()
            return (time.perf_counter() - start) / loops


class HostTimer(FeltTimer):
    """Seconds until a call returns, without the GPU: for calls with little work for it."""

    def __call__(self, arm: Arm, loops: int) -> float:
        with _without_collection(), around(arm):
            self._wait()
            start = time.perf_counter()
            for _ in range(loops):
                arm()
            seconds = time.perf_counter() - start
            self._wait()
            return seconds / loops


def _nothing() -> None:
    pass


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect garbage between samples, not within."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class Ratio:
    """The time of one arm divided by that of another, turn by turn.

    median: of the ratios within one turn.
    middle_90: between these lie nine in ten of them.
    median_95: between these lies their median, with 95% confidence (order statistics).
    """

    median: float
    middle_90: tuple[float, float]
    median_95: tuple[float, float]


def order(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of arms in a turn: shifted by one each turn, reversed every other round.

    Over 2 * len(names) turns every arm stands in every place twice.
    """
    shift = turn % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if turn // len(names) % 2 else turned


def alternate(
    arms: Mapping[str, Arm],
    loops: Mapping[str, int],
    timer: Timer,
    repeats: int,
    turned: Turned = lambda done, of: None,
) -> dict[str, list[float]]:
    """Return seconds per call by arm, with a sample of every arm in each turn."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats):
        for name in order(list(arms), turn):
            samples[name].append(timer(arms[name], loops[name]))
        turned(turn + 1, repeats)
    return samples


def compare(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the ratio of two arms that were sampled in the same turns."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(
        statistics.median(ratios),
        (quantile(ratios, 0.05), quantile(ratios, 0.95)),
        median_interval(ratios),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile for this share, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval for the median, for any distribution; the range of fewer than six values."""
    ordered, n = sorted(values), len(values)
    left_out, below = 0, 1 / 2**n  # the chance that at most `left_out` values lie below the median
    while below + math.comb(n, left_out + 1) / 2**n <= (1 - confidence) / 2:
        left_out += 1
        below += math.comb(n, left_out) / 2**n
    return ordered[left_out], ordered[n - 1 - left_out]


def run_case(
    case: Case,
    device: str,
    repeats: int,
    tiny: bool = False,
    turned: Turned = lambda done, of: None,
    timer: Timer | None = None,
) -> dict[str, Any]:
    """Prepare, check and time a case, and return its record.

    A case that fails its check is not timed: its record says so. An arm beside ours and the peer that cannot
    run here is left out, with the reason.
    """
    timer = timer or (CudaTimer() if device == "cuda" else CpuTimer())
    record = describe(case, device, tiny)
    try:
        wake(device)
        prepared = case.prepare(device, tiny)
        arms, results, record["unavailable"] = _first_calls(case, prepared, device)
        checked = _checked(case, prepared, results, case.dtype_on(device))
        del results
        record["check"] = closest(checked)
        if wrong := [comparison for comparison in checked if not comparison.ok]:
            return record | {"status": "failed", "reason": _in_words(wrong)}
        repeats = min(repeats, case.most_repeats or repeats)
        record |= _timed(case, arms, timer, repeats, turned)
        if case.memory:
            record["memory"] = _memory(case, arms, device, tiny)
    except Exception as problem:  # a case that breaks is a result, too; the others go on
        return record | {"status": "failed", "reason": _first_line(problem)}
    return record | {"status": "ok"}


def wake(device: str) -> None:
    """Make torch load products, attention and gradients, so that no case pays for the loading."""
    if device == "cuda":
        torch.cuda.empty_cache()
    q, k, v = torch.randn(3, 1, 2, 16, 16, device=device).unbind(0)
    q.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v) + torch.softmax(q @ k.mT, dim=-1)
    torch.autograd.grad(out, q, torch.ones_like(out))
    if device == "cuda":
        torch.cuda.synchronize()


def describe(case: Case, device: str, tiny: bool = False) -> dict[str, Any]:
    """Return the fields of a record that are known before the run."""
    return {
        "name": case.name,
        "description": case.description,
        "device": device,
        "sizes": case.sizes_on(device, tiny),
        "dtype": str(case.dtype_on(device)).removeprefix("torch."),
        "ours": case.ours,
        "peer": case.peer,
        "target": case.target,
        "headline": case.headline,
        "notes": list(case.notes),
    }


def _first_calls(
    case: Case, prepared: Prepared, device: str
) -> tuple[dict[str, Arm], dict[str, Any], dict[str, str]]:
    """Call every arm once; return (arms that run, their values, the errors of the others)."""
    arms: dict[str, Arm] = {}
    results: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    for name, arm in prepared.arms.items():
        try:
            with around(arm):
                result = arm()
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:  # why an arm beside the two cannot run is part of the result
            if name in (case.ours, case.peer):
                raise
            unavailable[name] = _first_line(problem)
            continue
        results[name] = prepared.part_of(name, result)
        arms[name] = arm
    return arms, results, unavailable


def _checked(
    case: Case, prepared: Prepared, results: Mapping[str, Values], dtype: torch.dtype
) -> list[Checked]:
    """Compare every arm with its truth."""
    alike = {name: values for name, values in results.items() if name not in prepared.apart}
    peer = case.peer if case.peer in alike else None
    yardstick = prepared.yardstick() if prepared.yardstick else None
    checked = check(prepared.truth(), alike, case.ours, peer, dtype, case.factor, yardstick)
    for name, judged in prepared.apart.items():
        if name in results:
            checked += check(judged.truth(), {name: results[name]}, case.ours, name, dtype)
    return checked


def _timed(case: Case, arms: dict[str, Arm], timer: Timer, repeats: int, turned: Turned) -> dict[str, Any]:
    compared = case.peer or case.ours
    again = f"{compared} {AGAIN}"
    loops = {name: settle(arm, timer) for name, arm in arms.items()}
    both = {**arms, again: arms[compared]}
    samples = alternate(both, {**loops, again: loops[compared]}, timer, repeats, turned)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    record: dict[str, Any] = {
        "repeats": repeats,
        "median_ms": _ms({name: medians[name] for name in arms}),
        "peer_against_itself": asdict(compare(samples[again], samples[compared])),
        "ratio": None,
        "ratio_to_others": {},
    }
    if case.peer is not None:
        record["ratio"] = asdict(compare(samples[case.ours], samples[case.peer]))
        others = [name for name in arms if name not in (case.ours, case.peer)]
        record["ratio_to_others"] = {
            name: asdict(compare(samples[case.ours], samples[name])) for name in others
        }
    return record


def settle(arm: Arm, timer: Timer) -> int:
    """Warm an arm up and return how many of its calls make a sample.

    The first call, made for the check, does not tell: it may have built plans or compiled. One call alone
    tells too much on a GPU, where it waits for its launch; so a whole sample is tried, too.
    """
    had, seconds = 1, 0.0
    while had < WARMUP_CALLS and seconds < SLOW:
        seconds = timer(arm, 1)
        had += 1
    loops = calls_in_a_sample(seconds)
    if loops > 1:
        loops = calls_in_a_sample(timer(arm, loops))
    return loops


def calls_in_a_sample(seconds: float) -> int:
    """Return the number of calls that takes long enough to be timed."""
    return max(1, min(MOST_LOOPS, math.ceil(LEAST_SAMPLE / max(seconds, 1e-9))))


def _memory(case: Case, arms: Mapping[str, Arm], device: str, tiny: bool) -> dict[str, Any]:
    if device == "cuda":
        return {name: memory.on_cuda(arm) for name, arm in arms.items()}
    return {name: memory.in_fresh_process(case.name, name, tiny) for name in arms}


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value * 1000:.4g}") for name, value in seconds.items()}


def _in_words(wrong: Sequence[Checked]) -> str:
    rest = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return "; ".join(str(comparison) for comparison in wrong[:3]) + rest


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:300]}" if lines else type(problem).__name__
