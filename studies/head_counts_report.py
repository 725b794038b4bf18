"""Report of the study of head counts, from its JSON: sentences, a page and a picture.

Every sentence is worked out from the numbers. A difference is clear where its interval leaves out 0.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.lengths import FAINT, GRID, INK

from headwise.heads import LABELS
from headwise.nn.presets import PRESETS
from headwise.show.tables import distribution

from .head_counts_table import (
    AFTER,
    BEFORE,
    LOSS,
    Results,
    Value,
    at,
    by_heads,
    counts_of,
    difference,
    further_table,
    heads_in_words,
    listed,
    reference_of,
    rise,
    spread,
    table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THRESHOLDS = {entry.name: entry.threshold for entry in LABELS}


# Sentences


def sentences(results: Results) -> list[str]:
    """Return sentences on the results, whatever they are."""
    remarks = [
        _ranked(results, LOSS, "Validation loss", "nats per token", 4),
        _ranked(results, rise("1/4"), "Rise of the loss with a quarter of all heads switched off", "nats", 3),
        _ranked(results, rise("one"), "Mean rise of the loss with one head switched off", "nats", 4),
        _ranked(results, AFTER, "Diversity of the trained heads of a layer", "nats", 3),
        _trained(results),
        _formed(results, "induction", at("induction", "score"), "on repeated random tokens"),
        _formed(results, "previous-token", at("previous", "score"), "on validation text"),
    ]
    return [*filter(None, remarks), *_caveats(results)]


def _ranked(results: Results, value: Value, subject: str, unit: str, digits: int) -> str | None:
    """Return sentences on the best and worst counts, and on those that clearly differ from the reference."""
    numbers = by_heads(results, value)
    if len(numbers) < 2:
        return None
    ranked = sorted(numbers, key=lambda count: fmean(numbers[count].values()))
    ends = [
        f"{spread([*numbers[count].values()], digits)} ({heads_in_words(count)})"
        for count in (ranked[0], ranked[-1])
    ]
    words = f"{subject}: from {ends[0]} to {ends[1]} {unit}."
    common = reference_of(results)
    if common not in numbers:
        return words
    gaps = {count: difference(numbers[count], numbers[common]) for count in numbers if count != common}
    lower, higher, same = _sorted(gaps)
    parts = [f"clearly lower with {lower}"] * bool(lower) + [f"clearly higher with {higher}"] * bool(higher)
    parts += [f"not clearly different with {same}"] * bool(same)
    return f"{words} Compared with {heads_in_words(common)} it is {', '.join(parts)}." if parts else words


def _trained(results: Results) -> str | None:
    before, after = by_heads(results, BEFORE), by_heads(results, AFTER)
    gaps = {count: difference(after[count], before[count]) for count in after if count in before}
    less, more, same = _sorted(gaps)
    parts = [f"clearly more with {more}"] * bool(more) + [f"clearly less with {less}"] * bool(less)
    parts += [f"not clearly differently with {same}"] * bool(same)
    return (
        f"After training, the weights of the heads of a layer differ {', '.join(parts)}." if parts else None
    )


def _sorted(gaps: dict[int, tuple[float, float] | None]) -> tuple[str, str, str]:
    """Return in words the counts whose gap is clearly below 0, clearly above 0, or neither."""
    measured = {count: gap for count, gap in gaps.items() if gap is not None}
    below = [count for count, (mean, half) in measured.items() if mean + half < 0]
    above = [count for count, (mean, half) in measured.items() if mean - half > 0]
    rest = [count for count in measured if count not in below and count not in above]
    return listed(below), listed(above), listed(rest)


def _formed(results: Results, name: str, value: Value, where: str) -> str | None:
    numbers, least = by_heads(results, value), THRESHOLDS[name]
    if not numbers:
        return None
    each = [
        f"{sum(score >= least for score in scores.values())} of {len(scores)} with {heads_in_words(count)}"
        for count, scores in numbers.items()
    ]
    return f"Models with a head whose {name} score is {least} or more {where}: {', '.join(each)}."


def _caveats(results: Results) -> list[str]:
    """Return the limits of the comparison, and sentences on unequal conditions."""
    settings, models = results["settings"], results["models"]
    counts, seeds = counts_of(results), {model["seed"] for model in models}
    remarks = [
        f"One learning rate ({settings['lr']:g}, mini's) for all models, not tuned; {settings['steps']} "
        f"steps of {settings['batch'] * settings['length']:,} tokens."
    ]
    remarks += results.get("remarks", [])
    weights = {
        seed: {model["initial_weights"] for model in models if model["seed"] == seed} for seed in seeds
    }
    parameters = {model["parameters"] for model in models}
    if len(parameters) == 1 and all(len(some) == 1 for some in weights.values()):
        remarks.append(
            f"Every model has {parameters.pop():,} parameters, and models of one seed start with the same "
            "weights."
        )
    else:
        remarks.append(
            "The models are not equal: the number of parameters or the initial weights of one seed differ."
        )
    pairs = {model["heads"]: model["rope_pairs"] for model in models}
    if None not in pairs.values() and len(counts) > 1:
        few, many = counts[0], counts[-1]
        remarks.append(
            f"RoPE rotates pairs of channels, each with its own frequency: {pairs[few]} frequencies with "
            f"{heads_in_words(few)}, {pairs[many]} with {heads_in_words(many)}. More heads have fewer "
            "frequencies."
        )
    if counts[0] == 1:
        remarks.append(
            "With 1 head per layer, switching it off removes all attention of that layer, there is no "
            "diversity within a layer, and an eighth of all heads may be less than one."
        )
    if len(counts) > 2:
        remarks.append(
            f"{len(counts) - 1} comparisons at 95 % each: without any true difference, one in twenty is "
            "clear by chance."
        )
    if len(seeds) == 1:
        remarks.append("There is only one seed, so the spread is unknown.")
    return remarks


# All of it


def markdown(results: Results) -> str:
    """Return the page of the documentation."""
    if not results["models"]:
        return "\n".join(["No model was trained.", *_missing(results)]) + "\n"
    machine, settings = results["run"]["machine"], results["settings"]
    where = machine.get("gpu", machine["cpu"])
    lines = [
        f"{len(results['models'])} models, {len({m['seed'] for m in results['models']})} seeds, on {where} "
        f"({results['run']['versions']['torch']}). Mean ± standard deviation over seeds; losses in nats per "
        f'token. "Without": rise of the loss with one head, or that fraction of all heads, switched off '
        f"({settings['draws']} draws, or all possible ones).",
        "",
        table(results),
        "",
        *(f"- {each}" for each in sentences(results)),
        "",
        further_table(results),
        "",
        f"The attention layers of {len(PRESETS)} well-known models (`headwise presets`). "
        '"32 in 8" means that 8 models have 32 heads per layer:',
        "",
        *(f"- {line}" for line in distribution(PRESETS.values())),
    ]
    return "\n".join([*lines, *_missing(results)]) + "\n"


def _missing(results: Results) -> list[str]:
    lines = [
        f"- {heads_in_words(each['heads'])}, seed {each['seed']}: {each['why']}"
        for each in results["missing"]
    ]
    lines += [
        f"- {heads_in_words(model['heads'])}, seed {model['seed']}, {part}: {problem}"
        for model in results["models"]
        for part, problem in model["problems"].items()
    ]
    return ["", "Missing:", "", *lines] if lines else []


def report(results: Results, place: Path | None = None) -> str:
    """Return the text that the command prints; with a path, write the picture to it."""
    if place is not None and results["models"]:
        picture(results).savefig(place)
    return markdown(results)


# The picture

COLOURS = ("#0072b2", "#d55e00", "#5b6270")  # told apart by everyone


def picture(results: Results) -> Figure:
    """Draw four panels over heads per layer: loss, loss without heads, diversity, kinds of heads."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=200, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).flatten()
    _panel(panels[0], results, "validation loss, nats per token", {"": LOSS})
    off = {"half of all heads": rise("1/2"), "a quarter": rise("1/4"), "one head": rise("one")}
    _panel(panels[1], results, "rise of the loss with heads switched off", off, logarithmic=True)
    _panel(
        panels[2], results, "how much heads of a layer differ, nats", {"trained": AFTER, "untrained": BEFORE}
    )
    kinds = {"previous token": at("previous", "score"), "induction": at("induction", "score")}
    _panel(panels[3], results, "best head of a kind: its weight there", kinds)
    for axes, top in ((panels[2], None), (panels[3], 1.02)):
        axes.set_ylim(0, top)
    seeds = len({model["seed"] for model in results["models"]})
    model = results["models"][0]
    counts, size = counts_of(results), f"{model['parameters'] / 1e6:.1f} M parameters"
    words = f"The same {size} in {counts[0]} to {counts[-1]} heads a layer; a dot is one of {seeds} seeds"
    figure.suptitle(words, fontsize=11.5, color=INK)
    return figure


def _panel(
    axes: Axes, results: Results, title: str, curves: dict[str, Value], logarithmic: bool = False
) -> None:
    """Draw means joined by lines, and every seed as a dot."""
    from matplotlib.ticker import NullLocator

    counts, every = counts_of(results), list[float]()
    for (name, value), colour in zip(curves.items(), COLOURS, strict=False):
        by_count = by_heads(results, value)
        if not by_count:
            continue
        for count, numbers in by_count.items():
            axes.plot([count] * len(numbers), [*numbers.values()], "o", color=colour, ms=3, alpha=0.45)
            every += numbers.values()
        means = [fmean(numbers.values()) for numbers in by_count.values()]
        axes.plot([*by_count], means, "-", color=colour, lw=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
    if logarithmic and every and min(every) > 0:  # a loss may also fall
        axes.set_yscale("log")
        marks = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5)]
        axes.set_yticks([mark for mark in marks if min(every) / 1.3 <= mark <= max(every) * 1.3])
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.set_xlabel("heads per layer", fontsize=10, color=FAINT)
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(lambda number, _: f"{number:.0f}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    if any(curves):
        axes.legend(frameon=False, fontsize=9.5, labelcolor="linecolor", handlelength=1.2)
    axes.tick_params(colors=FAINT, labelsize=9.5, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
