"""The examiner's mutation score: `make check-score`. Every planted fault must be caught and named as itself.

Exit code 0: all singles are, every pair is named by its own faults, and no right module fails.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

import planted
from headwise.examiner import check
from headwise.examiner.report import Report
from planted import pairs, right, unstyled

# Planted under a name of their own, or with the same numbers as others: numbers cannot tell those apart.
ALSO_CALLED = {"causal mask forgotten": {"mask ignored"}, "fill too small": {"finite fill"}}
for _same in planted.SAME_NUMBERS:
    for _key in _same:
        ALSO_CALLED.setdefault(_key, set()).update(_same)
SIZES = {"d_model": 24, "num_heads": 4}


class Verdict(NamedTuple):
    """One module, and whether the examiner said what it should."""

    title: str
    ok: bool
    summary: str
    seconds: float


def judge_single(subject: planted.Planted) -> Verdict:
    """A module with one planted fault, or with something that only looks like one."""
    report, seconds = _checked(subject.make, **SIZES)
    names = [named.key for named in (*report.faults, *report.remarks)]
    if subject.fault in planted.NO_FAULT:
        ok = report.ok
    elif subject.fault in ("residual and layer norm", "layer norm before"):
        ok = report.ok and any("LayerNorm" in words for words in (*report.equal, *report.designs))
    else:
        ok = len(names) == 1 and names[0] in {subject.fault} | ALSO_CALLED.get(subject.fault, set())
    return Verdict(f"{subject.style}: {subject.fault}", ok, _summary(report), seconds)


def judge_unstyled(subject: tuple[str, type, str]) -> Verdict:
    """A module with a fault beside the equations: named by all it has, and by nothing else."""
    fault, make, note = subject
    report, seconds = _checked(make, **SIZES)
    names = {named.key for named in (*report.faults, *report.remarks)}
    return Verdict(f"{fault}: {note}", names == set(fault.split(" + ")), _summary(report), seconds)


def judge_pair(pair: pairs.Pair) -> Verdict:
    """A module with two: named as the pair or as one of them."""
    report, seconds = _checked(pair.make, **SIZES)
    names = {named.key for named in report.faults}
    both = names == {"split and merge by view"} and set(pair.faults) == {
        "split by view",
        "merge without transpose",
    }
    return Verdict(
        " and ".join(pair.faults),
        (bool(names) and names <= set(pair.faults)) or both,
        _summary(report),
        seconds,
    )


def judge_right(subject: right.Right) -> Verdict:
    """A right module passes."""
    report, seconds = _checked(subject.make if subject.style == "function" else subject.build())
    return Verdict(f"right: {subject.style}", report.ok, _summary(report), seconds)


def _checked(obj: object, **sizes: int) -> tuple[Report, float]:
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check(obj, **sizes)
    return report, time.perf_counter() - start


def _summary(report: Report) -> str:
    return ", ".join(named.key for named in report.faults) or report.summary


def _score(name: str, verdicts: Iterable[Verdict]) -> bool:
    actual = list(verdicts)
    good = sum(verdict.ok for verdict in actual)
    slowest = max(actual, key=lambda verdict: verdict.seconds)
    sys.stdout.write(
        f"{name}: {good} of {len(actual)} ({100 * good / len(actual):.1f}%), "
        f"slowest {slowest.seconds:.1f} s ({slowest.title})\n"
    )
    for verdict in actual:
        if not verdict.ok:
            sys.stdout.write(f"  {verdict.title} -> {verdict.summary}\n")
    sys.stdout.flush()
    return good == len(actual)


def main() -> int:
    """Print the scores; 1 where one is below 100%."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--style", help="only this style of planted module")
    style = parser.parse_args().style
    torch.set_num_threads(1)
    singles = [mutant for mutant in planted.PLANTED if style in (None, mutant.style)]
    scores = [_score("single faults named as themselves", map(judge_single, singles))]
    if style is None:
        scores.append(_score("faults beside the equations", map(judge_unstyled, unstyled.UNSTYLED)))
        scores.append(_score("right modules passed", map(judge_right, right.RIGHT)))
        scores.append(_score("pairs named by their own", map(judge_pair, pairs.PAIRS)))
    return int(not all(scores))


if __name__ == "__main__":
    sys.exit(main())
