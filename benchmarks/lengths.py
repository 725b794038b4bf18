"""The table and the picture of lengths, from the results of `benchmarks.sweep` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .cases.maps import BY_HEAD, DENSE
from .cases.second_pass import CUDNN
from .readme import legend, readable_bytes, readable_time
from .registry import OURS
from .report import ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = (
    f"| tokens | headwise | {CUDNN} | headwise / {CUDNN} | {DENSE} | {BY_HEAD} |",
    "|---:|---|---|---:|---|---|",
)
PICTURE = "![Time and extra memory of one call from a thousand tokens on](lengths.png)"

SHOWN = [4**power for power in range(5, 11)]  # the picture has every length

Report = dict[str, Any]
Points = list[tuple[int, float]]  # tokens, value


# The table


def table(stored: Report) -> str:
    """Return time and extra memory of every arm at every length, as Markdown."""
    rows = [_row(record) for record in stored["records"] if record["sizes"]["L"] in SHOWN]
    legend_line = f"{_sizes(stored)}; {legend([{'run': stored['run']}])}"
    return "\n".join(["### Length", "", legend_line, "", PICTURE, "", *HEAD, *rows, "", _explanation(stored)])


def _sizes(stored: Report) -> str:
    sizes = stored["run"]["sizes"]
    return f"B{sizes['B']} H{sizes['H']} D{sizes['D']}, causal"


def _row(record: Report) -> str:
    tokens = f"| {record['sizes']['L']:,} "
    if record["status"] != "ok":
        return tokens + "| failed its check | | | | |"
    ours, cudnn, dense, by_head = (_cell(record, arm) for arm in (OURS, CUDNN, DENSE, BY_HEAD))
    return f"{tokens}| {ours} | {cudnn} | {ratio(record['ratio']):.2f} | {dense} | {by_head} |"


def _cell(record: Report, arm: str) -> str:
    if arm in record["median_ms"]:
        extra = _extra_bytes(record, arm)
        room = "" if extra is None else f", {readable_bytes(int(extra))}"
        return readable_time(record["median_ms"][arm]) + room
    if arm in record["out_of_memory"]:
        return f"out of memory: {readable_bytes(record['out_of_memory'][arm])}"
    return record["unavailable"].get(arm, "")


def _explanation(stored: Report) -> str:
    cells, first = stored["run"]["sizes"]["cells"], stored["first_call"]
    once, again = (readable_time(1000 * first[f"{which}_seconds"]) for which in ("first", "second"))
    return (
        f"All statistics and a picture of {cells} x {cells} cells of every head, from a map whose lse is "
        "known: median time, and extra memory at the peak of one call. cuDNN's forward computes the output "
        "and is shown for scale. The eager routes make the matrix, of all heads at once or head by head; "
        '"out of memory" is the size it would need. The first call in a process, with nothing compiled, '
        f"took {once} ({first['sizes']['L']:,} tokens), the second {again}."
    )


# The picture

INK, FAINT, GRID = "#1f2430", "#5b6270", "#e4e7ec"
COLOURS = {OURS: "#0072b2", CUDNN: "#5b6270", DENSE: "#d55e00", BY_HEAD: "#d55e00"}  # told apart by everyone
STYLES = {OURS: "-", CUDNN: "-", DENSE: "-", BY_HEAD: (0, (3, 1.5))}
SHORT = {OURS: "headwise", CUDNN: CUDNN, DENSE: "eager", BY_HEAD: "eager, head by head"}
NAMED_BELOW = 2**15  # tokens: there a name has room below a curve that goes all the way

Value = Callable[[Report, str], float | None]


def picture(stored: Report) -> Figure:
    """Draw two panels, time and extra memory over tokens, with logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.1), dpi=200, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    done = [record for record in stored["records"] if record["status"] == "ok"]
    left, right = figure.subplots(1, 2)
    _panel(left, done, _milliseconds, "time of one call", [10.0**power for power in range(-3, 6)], _as_time)
    _panel(
        right, done, _extra_bytes, "extra memory of one call", [16**power for power in range(12)], _as_bytes
    )
    heads, machine = stored["run"]["sizes"]["H"], stored["run"]["machine"]
    where = machine.get("gpu", machine["cpu"])
    words = f"All statistics of {heads} heads and a picture of each, on an {where}"
    figure.suptitle(words, fontsize=11.5, color=INK)
    return figure


def _milliseconds(record: Report, arm: str) -> float | None:
    return record["median_ms"].get(arm)


def _extra_bytes(record: Report, arm: str) -> float | None:
    return record.get("memory", {}).get(arm, {}).get("extra_bytes")


def _panel(
    axes: Axes,
    done: Sequence[Report],
    value: Value,
    title: str,
    marks: Sequence[float],
    words: Callable[..., str],
) -> None:
    curves = {arm: _points(done, value, arm) for arm in SHORT}
    curves = {arm: points for arm, points in curves.items() if points}
    _frame(axes, [record["sizes"]["L"] for record in done], title)
    for arm, points in curves.items():
        tokens, values = zip(*points, strict=True)
        axes.plot(
            tokens, values, color=COLOURS[arm], linestyle=STYLES[arm], marker="o", markersize=3.5, lw=1.8
        )
    everything = [ratio for points in curves.values() for _, ratio in points] or [1.0]
    low, high = min(everything) / 3, max(everything) * 8
    axes.set_ylim(low, high)
    axes.set_yticks([mark for mark in marks if low <= mark <= high], minor=False)
    axes.yaxis.set_major_formatter(lambda number, _: words(number))
    _name_curves(axes, curves)
    _mark_ends(axes, done, curves)


def _points(done: Sequence[Report], value: Value, arm: str) -> Points:
    points = [(record["sizes"]["L"], value(record, arm)) for record in done]
    return [(tokens, max(number, 1e-9)) for tokens, number in points if number is not None]


def _frame(axes: Axes, tokens: Sequence[int], title: str) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.set_xlabel("tokens", fontsize=10, color=FAINT)
    axes.set_xticks(tokens[::2])
    axes.xaxis.set_major_formatter(lambda number, _: _as_tokens(number))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(colors=FAINT, labelsize=9.5, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _name_curves(axes: Axes, curves: dict[str, Points]) -> None:
    """Name the curves in pairs: the upper above its end, to the left; the lower below, to the right."""
    for pair, end in (((OURS, CUDNN), 0), ((DENSE, BY_HEAD), -1)):  # the end at which they differ
        ordered = sorted((arm for arm in pair if arm in curves), key=lambda arm: curves[arm][end][1])
        for arm in ordered:
            points = curves[arm]
            if len(ordered) == 2 and arm == ordered[0]:
                at = _nearest(points, NAMED_BELOW) if arm in (OURS, CUDNN) else points[-1]
                _write(axes, SHORT[arm], at, COLOURS[arm], (9, -4), "left", "top")
            else:
                _write(axes, SHORT[arm], points[-1], COLOURS[arm], (-7, 6), "right", "bottom")


def _mark_ends(axes: Axes, done: Sequence[Report], curves: dict[str, Points]) -> None:
    """Draw a cross where an eager route runs out of memory, and explain the cross."""
    died = [arm for arm in curves if any(arm in record["out_of_memory"] for record in done)]
    for arm in died:
        axes.plot(*curves[arm][-1], marker="X", markersize=10, color=COLOURS[arm], markeredgecolor="white")
    if died:
        corner = axes.get_xlim()[0], axes.get_ylim()[1]
        _write(axes, "\u2716 longer: out of memory", corner, COLOURS[died[0]], (2, -4), "left", "top")


def _nearest(points: Points, tokens: int) -> tuple[int, float]:
    return min(points, key=lambda point: abs(point[0] - tokens))


def _write(
    axes: Axes, text: str, at: tuple[float, float], colour: str, offset: tuple[int, int], ha: str, va: str
) -> None:
    style = {"color": colour, "fontsize": 10, "fontweight": "bold"}
    axes.annotate(text, at, xytext=offset, textcoords="offset points", ha=ha, va=va, **style)


def _as_tokens(number: float) -> str:
    return f"{number / 2**20:.0f}M" if number >= 2**20 else f"{number / 2**10:.0f}k"


def _as_time(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.0f} s"
    return f"{ms:.0f} ms" if ms >= 1 else f"{ms * 1000:.0f} µs"


def _as_bytes(size: float) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size:.0f} B"
