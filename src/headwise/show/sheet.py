"""The sheet that heat maps are drawn on: whole dots, one scale of colours, names that fit beside them.

Letters: T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import needed
from .colour_maps import weight_colours
from .texts import as_outlines, families, fitted, in_bold, inches, label

if TYPE_CHECKING:
    import numpy
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Colormap, Normalize, PowerNorm
    from matplotlib.figure import Figure

    Cells = numpy.ma.MaskedArray[Any, Any]

NAMED = 60  # tokens that can still be read along an axis
LINED = 24  # tokens with lines between their cells
LONGEST = 12  # characters of a token
FINE, COARSE = 256, 128  # dots per inch, and powers of two: what stands on a dot is on it without rounding
LARGEST = 16e6  # dots of a picture that is fine
LEAST = 2  # dots of a cell's side: a column of one cell is seen, and in half the size still there
SMALLEST, USUAL = 0.085, 0.145  # inches from one token's name to the next
WIDEST = 22  # inches of heat maps side by side with every token's name

INK, FAINT, PALE = "#1f2430", "#5b6270", "#c9ced6"
STEPS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1)


def need_matplotlib() -> None:
    """Raise `PackageMissing` if matplotlib is not installed, before anything is computed for a picture."""
    with needed("matplotlib", "headwise pictures need matplotlib"):
        import matplotlib.figure  # noqa: F401


def new_figure(width: float, height: float, dpi: int = 150, **options: Any) -> Figure:
    """Return a figure of this size in inches, without pyplot; raise `PackageMissing` without matplotlib."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, **options)
    FigureCanvasAgg(figure)
    return figure


def axes_at(figure: Figure, x: float, y: float, wide: float, tall: float) -> Axes:
    """Return axes of this size in inches, with this upper left corner in the figure."""
    width, height = figure.get_size_inches()
    return figure.add_axes((x / width, 1 - (y + tall) / height, wide / width, tall / height))


def write(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    """Write text at a position in inches from the upper left corner of the figure."""
    width, height = figure.get_size_inches()
    figure.text(x / width, 1 - y / height, text, **{"va": "center"} | style)


def weight_scale() -> PowerNorm:
    """Return the scale of weights from 0 to 1, by square root, so that small weights can be distinguished."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=1)


def fine_enough(side: float, dpi: int, most: int) -> int:
    """Return the number of cells that fit into a heat map with two dots each: `most`, or halves of it."""
    while most > 8 and LEAST * most > 1.25 * side * dpi:
        most //= 2
    return most


def sharpness(width: float, height: float) -> int:
    """Return dots per inch for a figure of this size in inches."""
    return FINE if width * height * FINE**2 <= LARGEST else COARSE


def whole(side: float, count: int, dpi: int) -> float:
    """Return about `side` inches, as a whole number of dots for each of `count` cells."""
    return max(LEAST, round(side * dpi / count)) * count / dpi


class Page:
    """A figure measured in inches from its upper left corner; heat maps stand on whole dots.

    grown: how much larger than usual its letters are.
    """

    def __init__(self, width: float, height: float, dpi: int, grown: float = 1.0) -> None:
        self.dpi, self.grown = dpi, grown
        self.width, self.height = self.even(width), self.even(height)
        self.figure = new_figure(self.width, self.height, dpi)
        self.scale = weight_scale()

    def even(self, inches: float) -> float:
        """Round inches to a whole number of dots."""
        return round(inches * self.dpi) / self.dpi

    def axes(self, x: float, y: float, wide: float, tall: float) -> Axes:
        """Return axes with this upper left corner."""
        return axes_at(self.figure, self.even(x), self.even(y), wide, tall)

    def heat(
        self,
        picture: Cells,
        lengths: tuple[int, int],
        corner: tuple[float, float],
        size: tuple[float, float],
        names: tuple[list[str], list[str]],
        tint: str | None,
        *,
        left: bool,
        bottom: bool,
    ) -> Axes:
        """Draw one heat map, framed in its `tint`, with names or numbers at the `left` and `bottom`."""
        T, S = lengths
        ax = self.axes(*corner, *size)
        heat(ax, picture, (-0.5, S - 0.5, T - 0.5, -0.5), self.scale)
        _frame(ax, lengths, size, tint)
        _name_axes(ax, lengths, size, names, left=left, bottom=bottom)
        return ax

    def head(self, title: str, size: float, colour: str = INK) -> None:
        x, y = 0.15 / self.width, 1 - 0.1 / self.height
        self.figure.suptitle(title, x=x, y=y, ha="left", va="top", size=size, **words(colour, title))

    def explain_axes(
        self,
        lengths: tuple[int, int],
        shape: Sequence[int],
        across: tuple[float, float],
        down: tuple[float, float],
    ) -> None:
        """Label the axes of queries and keys beside heat maps."""
        keys, queries = "key (is attended to)", "query (attends)"
        if tuple(shape) != lengths:
            keys += f", {lengths[1]} in {shape[1]} cells"
            queries += f", {lengths[0]} in {shape[0]} cells"
        middle, height = sum(across) / 2 / self.width, 1 - sum(down) / 2 / self.height
        size = fitted(queries, self.height - 0.1, 8 * self.grown, 4.5)[1]
        low = {"y": 0.06 / self.height, "va": "bottom", "size": 8 * self.grown}
        self.figure.supxlabel(keys, x=middle, **low, **words(FAINT))
        half = inches(queries, size) / 2 + 0.03
        height = min(max(height, half / self.height), 1 - half / self.height)
        self.figure.supylabel(queries, x=0.06 / self.width, y=height, ha="left", size=size, **words(FAINT))

    def scale_bar(self, x: float, y: float, tall: float, meaning: str, picture: Cells) -> None:
        from matplotlib.cm import ScalarMappable

        meaning += " (grey: none)" if picture.mask.any() else ""
        mappable = ScalarMappable(self.scale, weight_colours())
        steps = STEPS if tall >= 1.4 * self.grown else STEPS[::2]
        place = self.axes(x + 0.05, y, 0.13 * self.grown, tall)
        bar = self.figure.colorbar(mappable, cax=place, ticks=steps, format="%g")
        text, size = fitted(meaning, self.height - 0.1, 8 * self.grown, 4.5)
        bar.set_label(text, size=size, **words(FAINT))
        half, middle = inches(text, size) / 2, y + tall / 2
        if middle + half > self.height - 0.03 or middle < half + 0.03:  # longer than the bar: inside the page
            inside = min(max(middle, half + 0.03), self.height - half - 0.03)
            bar.ax.yaxis.label.set_y(1 - (inside - y) / tall)
        plain_bar(bar, 7 * self.grown)


def heat(
    ax: Axes,
    picture: Any,
    extent: tuple[float, float, float, float],
    scale: Normalize,
    colour: Colormap | None = None,
) -> None:
    """Draw cells without blending them; extent: left, right, bottom, top."""
    ax.imshow(
        picture,
        cmap=colour or weight_colours(),
        norm=scale,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )


def in_letters(figure: Figure) -> Figure:
    """Return the figure with texts drawn as shapes if a PDF would show wrong letters."""
    from matplotlib.patheffects import Normal
    from matplotlib.text import Text

    if len(families()) > 1:
        for text in figure.findobj(Text):
            if as_outlines(text.get_text()):
                text.set_path_effects([Normal()])
    return figure


def named(names: list[str] | None, length: int, beside: int) -> list[str]:
    """Return the shortened names along an axis, or an empty list if there is no room."""
    if names is None or length > NAMED or length * beside * SMALLEST > WIDEST:
        return []
    return [label(token, LONGEST) for token in names]


def side_of(length: int, beside: int, with_names: bool) -> float:
    """Return the side of one heat map in inches."""
    if with_names:
        return max(1.5, length * min(USUAL, max(SMALLEST, WIDEST / (length * beside))))
    return max(1.5, USUAL * length) if length <= LINED else 2.6


def _points(pitch: float) -> float:
    """Return the font size of names that stand `pitch` inches apart."""
    return min(8.0, 0.82 * 72 * pitch)


def room(names: list[str], pitch: float, length: int | None) -> float:
    """Return the inches that names, or the last position, take beside a map; below it `length` is None."""
    if names:
        return max(inches(name, _points(pitch)) for name in names)
    return 0.12 if length is None else inches(str(length - 1), 7)


def open_frame(ax: Axes, hidden: Sequence[str] = ("top", "right")) -> None:
    """Draw the frame of axes in pale lines, without the `hidden` sides."""
    for side, line in ax.spines.items():
        line.set_visible(side not in hidden)
        line.set_color(PALE)


def faint_axes(ax: Axes, grid: Literal["x", "y"], hidden: Sequence[str] = ("top", "right")) -> None:
    """Style axes of numbers: small, faint labels, pale grid lines of one axis, an open frame."""
    ax.tick_params(labelsize=7.5, labelcolor=FAINT, color=PALE, length=2)
    ax.grid(axis=grid, color="#eef0f3", linewidth=0.8)
    ax.set_axisbelow(True)
    open_frame(ax, hidden)


def plain_bar(bar: Colorbar, size: float) -> None:
    """Style a colour bar: small, faint numbers and no outline."""
    bar.ax.tick_params(length=2, labelsize=size, labelcolor=FAINT, color=FAINT)
    bar.outline.set_visible(False)


def words(colour: str, strong: str = "") -> dict[str, Any]:
    """Return options of text: never markup; `strong` text is bold if the fonts have bold letters."""
    bold = bool(strong) and in_bold(strong)
    weight = {"weight": "bold" if bold else "normal"} if strong else {}
    return {"color": colour, "parse_math": False, "usetex": False, "family": families(bold=bold)} | weight


def _frame(ax: Axes, lengths: tuple[int, int], size: tuple[float, float], tint: str | None) -> None:
    """Draw a frame one point away from the cells, so that it covers none."""
    from matplotlib.patches import Rectangle

    (T, S), (wide, tall) = lengths, size
    thick = 1.4 if tint else 0.5
    away = (1 + thick / 2) / 72
    x, y = away * S / wide, away * T / tall
    outline = Rectangle(
        (-0.5 - x, -0.5 - y), S + 2 * x, T + 2 * y,
        fill=False, edgecolor=tint or PALE, linewidth=thick, clip_on=False,
    )  # fmt: skip
    ax.add_patch(outline)


def _name_axes(
    ax: Axes,
    lengths: tuple[int, int],
    size: tuple[float, float],
    names: tuple[list[str], list[str]],
    *,
    left: bool,
    bottom: bool,
) -> None:
    """Write names or numbers along the outer axes, and draw thin lines between large cells."""
    (T, S), (wide, tall), (down, across) = lengths, size, names
    ax.set_frame_on(False)
    ax.grid(False)
    ax.tick_params(which="both", length=0, labelsize=7, labelcolor=FAINT, pad=4)
    ax.set_xticks([])
    ax.set_yticks([])
    if bottom and across:
        upright: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
        ax.set_xticks(range(S), across, size=_points(wide / S), **upright, **words(FAINT))
    elif bottom:
        at = _marks(S, wide)
        ax.set_xticks(at, [str(place) for place in at], **words(FAINT))
        for place, text in zip(at, ax.get_xticklabels(), strict=True):
            text.set(ha=_side(place, S, wide, ("left", "center", "right")))
    if left and down:
        ax.set_yticks(range(T), down, size=_points(tall / T), **words(FAINT))
    elif left:
        at = _marks(T, tall)
        ax.set_yticks(at, [str(place) for place in at], **words(FAINT))
        for place, text in zip(at, ax.get_yticklabels(), strict=True):
            text.set(va=_side(place, T, tall, ("top", "center", "bottom")))
    if max(T, S) <= LINED:
        ax.set_xticks([x + 0.5 for x in range(S - 1)], minor=True)
        ax.set_yticks([y + 0.5 for y in range(T - 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=0.8)


def _marks(length: int, side: float) -> list[int]:
    """Return round positions for labels along an axis: five at most, as many as fit."""
    most = max(1, min(4, int(side / (2.2 * inches(str(length), 7)))))
    steps = (base * 10**power for power in range(12) for base in (1, 2, 5))
    step = next(step for step in steps if (length - 1) / step <= most)
    return list(range(0, length, step))


def _side(place: int, length: int, side: float, kinds: tuple[str, str, str]) -> str:
    """Return the alignment of a number, so that it stays within the ends of the axis."""
    half = inches(str(place), 7) / 2 * length / side
    if place + 0.5 - half < 0:
        return kinds[0]
    return kinds[2] if place + 0.5 + half > length else kinds[1]
