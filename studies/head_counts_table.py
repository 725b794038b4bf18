"""The numbers of the study of head counts, model by model and over seeds, and their tables.

Spread is the standard deviation over seeds. Differences are taken seed by seed, between models that began
with the same weights and read the same tokens; their intervals are Student's, 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from headwise.heads.layer import MIXED

FRACTIONS = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2}  # of all heads of the model, switched off
COMMON = 8  # heads that others are compared with, where there are such models
MATTERS = 0.01  # of the loss: what a head must cost to count as one that matters, as in hw.Robustness
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 1 to 10 degrees, 95 %

Results = dict[str, Any]
Value = Callable[[Results], float | None]  # of one model; None: not measured


# Numbers of one model


def rise(name: str, over: Callable[[list[float]], float] = fmean) -> Value:
    """Return the increase of the loss without some heads, over all sets that were tried."""

    def value(model: Results) -> float | None:
        losses = model.get("without", {})
        return over(losses[name]) - losses["baseline"] if name in losses else None

    return value


def mattering(model: Results) -> float | None:
    """Return the share of heads without which the loss rises by more than `MATTERS` of it."""
    losses = model.get("without")
    if losses is None:
        return None
    return fmean(loss - losses["baseline"] > MATTERS * losses["baseline"] for loss in losses["one"])


def labelled(model: Results) -> float | None:
    """Return the share of heads with a label other than mixed."""
    labels = model.get("labels")
    return None if not labels else 1 - labels.get(MIXED, 0) / sum(labels.values())


def at(*path: str) -> Value:
    """Return a number at a path in the results of a model."""

    def value(model: Results) -> float | None:
        entry: Any = model
        for name in path:
            entry = entry.get(name) if entry is not None else None
        return entry

    return value


LOSS = at("validation_loss")
BEFORE, AFTER = at("before", "attention"), at("after", "attention")
COLUMNS: dict[str, tuple[Value, int]] = {  # and digits behind the point
    "diversity, untrained": (BEFORE, 3),
    "trained": (AFTER, 3),
    "without one head": (rise("one"), 4),
    "without the worst": (rise("one", max), 3),
    "without 1/8": (rise("1/8"), 3),
    "without 1/4": (rise("1/4"), 3),
    "without 1/2": (rise("1/2"), 3),
    "best induction": (at("induction", "score"), 2),
    "best previous-token": (at("previous", "score"), 2),
}
FURTHER: dict[str, tuple[Value, int]] = {
    "cosine of the outputs of two heads, untrained": (at("before", "outputs"), 3),
    "trained": (at("after", "outputs"), 3),
    f"share of heads without which the loss rises by more than {MATTERS:.0%}": (mattering, 2),
    "share of heads with a label": (labelled, 2),
    "loss on random tokens, first copy": (at("said_twice", "first"), 2),
    "second copy": (at("said_twice", "second"), 2),
}


# Over seeds


def by_heads(results: Results, value: Value) -> dict[int, dict[int, float]]:
    """Return {heads: {seed: number}} for the models that have the number."""
    numbers: dict[int, dict[int, float]] = {}
    for model in results["models"]:
        number = value(model)
        if number is not None:
            numbers.setdefault(model["heads"], {})[model["seed"]] = number
    return dict(sorted(numbers.items()))


def counts_of(results: Results) -> list[int]:
    """Return the head counts with a model."""
    return sorted({model["heads"] for model in results["models"]})


def reference_of(results: Results) -> int:
    """Return the reference count: 8, or the largest if there is no model with 8."""
    counts = counts_of(results)
    return COMMON if COMMON in counts else counts[-1]


def difference(some: dict[int, float], others: dict[int, float]) -> tuple[float, float] | None:
    """Return the mean of some - others over common seeds, and half of its interval: infinite for one seed."""
    seeds = sorted(some.keys() & others.keys())
    if not seeds:
        return None
    gaps = [some[seed] - others[seed] for seed in seeds]
    if len(gaps) == 1:
        return gaps[0], math.inf
    return fmean(gaps), student(len(gaps) - 1) * stdev(gaps) / math.sqrt(len(gaps))


def student(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t.

    Beyond the table Fisher's expansion, right to three digits behind the point.
    """
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    z = 1.959964
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def spread(numbers: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation as text; for one number, only the number."""
    if not numbers:
        return "–"
    mean = f"{fmean(numbers):.{digits}f}"
    return mean if len(numbers) == 1 else f"{mean} ± {stdev(numbers):.{digits}f}"


# Tables


def table(results: Results) -> str:
    """Return a row per head count: the loss, its difference from that of 8 heads, and `COLUMNS`."""
    common = reference_of(results)
    losses = by_heads(results, LOSS)
    start: dict[int, list[str]] = {}
    for count in counts_of(results):
        own = losses.get(count, {})
        gap = difference(own, losses.get(common, {})) if count != common else None
        start[count] = [spread([*own.values()], 4), "–" if gap is None else _gap(*gap)]
    return _table(results, ["validation loss", f"difference from {heads_in_words(common)}"], start, COLUMNS)


def further_table(results: Results) -> str:
    """Return the table of the other measurements."""
    models = {model["heads"]: model for model in results["models"]}
    start = {count: [str(models[count]["head_dim"]), str(models[count]["rope_pairs"])] for count in models}
    return _table(results, ["head_dim", "rotated pairs of channels"], start, FURTHER)


def _table(
    results: Results,
    names: list[str],
    start: dict[int, list[str]],
    columns: dict[str, tuple[Value, int]],
) -> str:
    lines = ["| heads | " + " | ".join([*names, *columns]) + " |"]
    lines.append("|---:|" + "---|" * (len(names) + len(columns)))
    for count in counts_of(results):
        cells = list(start[count])
        for value, digits in columns.values():
            numbers = by_heads(results, value).get(count, {})
            cells.append(spread([*numbers.values()], digits))
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gap(mean: float, half: float) -> str:
    if math.isinf(half):
        return f"{mean:+.4f} (one seed)"
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def listed(counts: Sequence[int]) -> str:
    return (
        f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
        if len(counts) > 1
        else "".join(map(str, counts))
    )


def heads_in_words(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"
