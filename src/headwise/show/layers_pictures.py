"""Numbers of heads, layer by layer: statistics as a picture, roles as a picture and as tables.

Letters: L layers, H heads in the largest of them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, nearest
from ..heads.collection import Heads
from ..heads.layer import LABELS, MIXED, Head
from ..heads.roles import MARGIN, Role, Roles
from .colour_maps import weight_colours
from .heads_tables import HeadsTable, add_place
from .heatmaps import OF_LABEL
from .sheet import (
    FAINT,
    INK,
    PALE,
    axes_at,
    faint_axes,
    need_matplotlib,
    new_figure,
    plain_bar,
    words,
    write,
)
from .tables import as_text, empty_table
from .texts import fitted, in_bold, inches, label, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

UNLABELLED = "#a4abb8"
SMALL, LEADING = 8.5, 0.19  # points of what is said above, inches from line to line
WIDE = 0.62  # of a layer's room, that its heads share
MEANINGS = {
    "entropy": "entropy (nats): 0 = one key, higher = more keys",
    "effective_keys": "effective keys: exp(entropy)",
    "confidence": "confidence: largest weight of a query",
    "distance": "distance: mean distance from query to key",
    "first": "first: weight on the first key",
    "previous": "previous: weight on the key before",
    "itself": "itself: weight on the query's own key",
    "next": "next: weight on the key after",
    "local": "local: weight on near keys",
    "max_logit": "max logit: largest score before softmax",
    "induction": "induction: weight on the token after an earlier copy",
    "duplicate_token": "duplicate token: weight on earlier copies",
    "special": "special: weight on special tokens",
    "punctuation": "punctuation: weight on punctuation",
    "written_first": "contribution of the first key to the output, as a share",
    "written_special": "contribution of special tokens to the output, as a share",
}
NOT_SHARES = ("entropy", "effective_keys", "distance", "max_logit")

# Roles
FOUND_COLOUR, MISSED_COLOUR = "#ab337c", "#a4abb8"
ROW = 0.235  # inches of a relation
LINE_WIDTH = 80  # characters
LONGEST = 5  # of a head's name that has its place in the line: 25.14
NOT_FOUND = "not found: "  # another column says this
BOTH_RULES = (
    "offset: the best fixed offset. rule: the best rule that uses classes of words (nearest before, after or "
    "on either side, first, last); the grammar provides the classes. A role must beat both."
)
RULES = {"before": "before", "after": "after", "the first": "first", "the last": "last"}


def layers_picture(heads: Heads, statistics: Sequence[str] | str) -> Figure:
    """Draw `headwise.Heads.plot_layers`: a panel per statistic, layers and their heads from left to right.

    A dot is a head, in the colour of its label; the line goes through the layers' means. The largest of a
    panel is named, layer.head.
    """
    names = [statistics] if isinstance(statistics, str) else list(statistics)
    everyone = heads.all()
    measured = dict.fromkeys(name for head in everyone for name in head.values)
    for name in names:
        if name not in measured:
            raise ArgumentError(
                f"statistics must be measured: got {name!r}; {nearest(name, measured)}; "
                "measure it with watch(model, statistics=...)"
            )
    if not names:
        raise ArgumentError("statistics must not be empty: got 0 names; try ['entropy']")
    need_matplotlib()
    columns = min(len(names), 2 if len(names) in (2, 4) else 3)
    rows = math.ceil(len(names) / columns)
    wide = min(7.0, max(3.9, 0.62 * len(heads)))
    legend = _legend(everyone, columns * wide)
    top = 0.81 + LEADING * len(legend)
    figure = new_figure(columns * wide + 0.4, rows * 2.65 + top + 0.05)
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.62 / width, right=1 - 0.2 / width, top=1 - top / height, bottom=0.55 / height,
        wspace=0.5 / wide, hspace=0.3,
    )  # fmt: skip
    stacks = {
        stack: {number: list(heads[path]) for number, path in members.items()}
        for stack, members in heads.stacks.items()
    }
    for number, name in enumerate(names):
        ax = figure.add_subplot(rows, columns, number + 1)
        _panel(ax, name, stacks)
        _layers(ax, stacks, wide, bottom=number + columns >= len(names))
    _headline(figure, heads, legend)
    return figure


Stacks = Mapping[str, Mapping[int, Sequence[Head]]]  # a stack's name -> layers by number -> their heads


def _panel(ax: Axes, name: str, stacks: Stacks) -> None:
    means, best = [], (-math.inf, 0.0, "", INK)
    dots: list[tuple[bool, float, float, str]] = []
    numbered = [(number, group) for stack in stacks.values() for number, group in stack.items()]
    for at, (number, group) in enumerate(numbered):
        values = [head.values.get(name, math.nan) for head in group]
        finite = [value for value in values if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
        for head, value in zip(group, values, strict=True):
            if not math.isfinite(value):
                continue
            x = at + WIDE * ((head.head + 0.5) / len(group) - 0.5)
            labelled = head.label.name != MIXED
            colour = OF_LABEL.get(head.label.name, FAINT) if labelled else UNLABELLED
            dots.append((labelled, x, value, colour))
            best = max(best, (value, x, f"head {number}.{head.head}", colour if labelled else FAINT))
    dots.sort(key=lambda dot: dot[0])  # those with a label over the others
    _, x_of, y_of, colours = zip(*dots, strict=True) if dots else ((), (), (), ())
    ax.scatter(x_of, y_of, 20, c=list(colours), linewidth=0.4, edgecolor="white", zorder=2)
    start = 0
    for stack in stacks.values():
        own = range(start, start := start + len(stack))
        ax.plot(own, means[own.start : own.stop], color=INK, linewidth=1.4, zorder=1, solid_capstyle="round")
    value, x, where, colour = best
    if where:
        late = x > (len(numbered) - 1) / 2
        ax.annotate(
            where, (x, value), (-5 if late else 5, 3), "data", "offset points", size=7.5,
            ha="right" if late else "left", annotation_clip=False, **words(colour, where),
        )  # fmt: skip
    ax.set_title(MEANINGS.get(name, name.replace("_", " ")), loc="left", size=9, pad=7, **words(INK))
    if name not in NOT_SHARES and all(0 <= value <= 1 for value in y_of):
        ax.set_ylim(-0.03, 1.05)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    else:
        low, high = min(0.0, *y_of, 0.0), max(0.0, *y_of, 0.0)
        ax.set_ylim(low - 0.03 * (high - low), high + 0.1 * (high - low) or 1)


def _layers(ax: Axes, stacks: Stacks, wide: float, *, bottom: bool) -> None:
    """Write the layers below the axis; separate and name stacks where there are several."""
    numbers = [number for stack in stacks.values() for number in stack]
    ax.set_xlim(-0.6, len(numbers) - 0.4)
    step = math.ceil(len(numbers) / 24)
    ticks = [at for at, number in enumerate(numbers) if number % step == 0]
    ax.set_xticks(ticks, [str(numbers[at]) for at in ticks])
    faint_axes(ax, "y")
    if len(stacks) == 1 and bottom:
        ax.set_xlabel("layer", size=8, labelpad=3, **words(FAINT))
    start = 0
    for name, stack in stacks.items() if len(stacks) > 1 else ():
        if start:
            ax.axvline(start - 0.5, color=PALE, linewidth=0.8, linestyle=":")
        if bottom:
            room = 0.85 * wide * len(stack) / len(numbers)
            shown, size = fitted(label(name.replace(".*", ""), 60), room, 7.5, 5)
            middle = (start + (len(stack) - 1) / 2, 0)
            ax.annotate(
                shown, middle, (0, -20), ("data", "axes fraction"), "offset points", size=size, ha="center",
                va="top", annotation_clip=False, **words(FAINT),
            )  # fmt: skip
        start += len(stack)


def _headline(figure: Figure, heads: Heads, legend: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Write the title and the legend."""
    title = f"{heads.title or 'Model'}: its {sum(map(len, heads.values()))} heads, layer by layer"
    shown, size = fitted(label(title, 120), figure.get_figwidth() - 0.4, 12, 8, bold=True)
    write(figure, 0.2, 0.26, shown, size=size, **words(INK, shown))
    for number, line in enumerate(legend):
        x, y = 0.2, 0.52 + LEADING * number
        for text, colour in line:
            write(figure, x, y, text, size=SMALL, **words(colour))
            x += inches(text, SMALL) + 0.15


def _legend(everyone: Sequence[Head], room: float) -> list[list[tuple[str, str]]]:
    """Return lines of (text, colour), each at most `room` inches wide."""
    labels = {head.label.name for head in everyone}
    names = [entry.name for entry in LABELS if entry.name in labels]
    entries = [("Each dot is a head; the line is the mean of a layer.", FAINT)]
    entries += [(f"●  {name}", OF_LABEL.get(name, FAINT)) for name in names]
    entries += [(f"●  {MIXED}, no label", UNLABELLED)] if MIXED in labels else []
    lines: list[list[tuple[str, str]]] = [[]]
    for each in entries:
        if lines[-1] and sum(inches(text, SMALL) + 0.15 for text, _ in (*lines[-1], each)) > room + 0.15:
            lines.append([])
        lines[-1].append(each)
    return lines


def roles_picture(roles: Roles) -> Figure:
    """Draw `headwise.Roles.plot`. Left, relations in rows and heads in columns: how often a head is right.

    Right, the best head of each relation (a dot, with its 95% interval) against the best rule that
    understands nothing (a diamond). Those that are found are coloured, and outlined on the left.
    """
    if not roles:
        raise ArgumentError(
            f"roles must have a measured relation: 0 of {len(roles.unasked)} were measured; pass more "
            "sentences to headwise.roles"
        )
    need_matplotlib()
    order = sorted(roles.values(), key=lambda role: (not role.found, role.rules[role.rule] == 1, -role.share))
    L, H = len(roles.layers), max(scores.shape[1] for scores in roles.scores.values())
    names = 0.3 + max(inches(label(role.name, 40), 8.5, bold=role.found) for role in order)
    map_wide, dots_wide, rules_wide = min(max(0.085 * L * H, 3.2), 7.5), 3.3, 2.5
    width, tall = names + map_wide + 0.55 + dots_wide + rules_wide, ROW * len(order)
    figure = new_figure(width, 1.2 + tall + 0.62)
    left = axes_at(figure, names, 1.2, map_wide, tall)
    right = axes_at(figure, names + map_wide + 0.55, 1.2, dots_wide, tall)
    _roles_map(figure, left, roles, order, L, H)
    _dots(right, order)
    title = f"{roles.title or 'Model'}: {len(roles.found)} of {len(roles)} relations found"
    shown, size = fitted(label(title, 160), width - 0.4, 13, 9, bold=True)
    write(figure, 0.2, 0.27, shown, size=size, **words(INK, shown))
    guide = (
        "Each row is a relation between two words. An outlined head attends to the right word more often "
        f"than every simple rule is right, by at least {MARGIN}, on sentences that were not used to choose "
        "the head."
    )
    write(figure, 0.2, 0.53, guide, size=8.5, **words(FAINT))
    titles = (
        "share of cases in which a head attends most to the right word",
        "the best head and the best simple rule",
    )
    for ax, heading in zip((left, right), titles, strict=True):
        ax.set_title(heading, loc="left", size=9, pad=17, **words(INK, heading))
    return figure


def _roles_map(figure: Figure, ax: Axes, roles: Roles, order: Sequence[Role], L: int, H: int) -> None:
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    rows = []
    for role in order:
        padded = [[*row, *([math.nan] * (H - len(row)))] for row in roles.scores[role.name].tolist()]
        rows.append([share for row in padded for share in row])
    image = ax.imshow(
        rows, cmap=weight_colours(), norm=Normalize(0, 1), aspect="auto", interpolation="nearest"
    )
    ax.set_frame_on(False)
    ax.set_yticks(range(len(order)), [label(role.name, 40) for role in order], size=8.5, **words(FAINT))
    for text, role in zip(ax.get_yticklabels(), order, strict=True):
        text.set_color(INK if role.found else FAINT)
        text.set_fontweight("bold" if role.found and in_bold(text.get_text()) else "normal")
    middles = [H * at + (H - 1) / 2 for at in range(L)]
    ax.set_xticks(middles, [_layer_name(layer, L) for layer in roles.layers])
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=7.5, labelcolor=FAINT, pad=2)
    ax.tick_params(axis="y", labelsize=8.5, pad=4)
    for at in range(1, L):
        ax.axvline(H * at - 0.5, color="white", linewidth=2.2)
        ax.axvline(H * at - 0.5, color=PALE, linewidth=0.6)
    for at in range(1, len(order)):
        ax.axhline(at - 0.5, color="white", linewidth=0.8)
    for row, role in enumerate(order):
        for layer, head, _ in role.heads:
            x = H * roles.layers.index(layer) + head
            style: dict[str, Any] = {"edgecolor": INK, "linewidth": 1.5, "clip_on": False, "zorder": 4}
            ax.add_patch(Rectangle((x - 0.5, row - 0.5), 1, 1, fill=False, **style))
    _scale_below(figure, ax, image)


def _layer_name(layer: int | str, layers: int) -> str:
    if isinstance(layer, int):
        return f"layer {layer}" if layers <= 8 else str(layer)
    return label(layer.rpartition(".")[2] if layers > 3 else layer, 14)


def _scale_below(figure: Figure, ax: Axes, image: AxesImage) -> None:
    place, inch = ax.get_position(), 1 / figure.get_figheight()
    room = figure.add_axes((place.x0, place.y0 - 0.2 * inch, min(0.6 * place.width, 0.25), 0.09 * inch))
    ticks = [0, 0.25, 0.5, 0.75, 1]
    bar = figure.colorbar(image, cax=room, orientation="horizontal", ticks=ticks, format="%g")
    plain_bar(bar, 7)
    bar.ax.tick_params(pad=1)
    bar.ax.annotate(
        "share of cases", (1, 0.5), (8, 0), "axes fraction", "offset points", size=7.5, va="center",
        **words(FAINT),
    )  # fmt: skip


def _dots(ax: Axes, order: Sequence[Role]) -> None:
    """Draw a line from rule to head per role, the head's name beside it, the rule at the far right."""
    for row, role in enumerate(order):
        colour, best = FOUND_COLOUR if role.found else MISSED_COLOUR, role.rules[role.rule]
        ax.plot([best, role.share], [row, row], color=colour, linewidth=1.1, alpha=0.6, zorder=1)
        interval: dict[str, Any] = {"linewidth": 3.6, "alpha": 0.3, "zorder": 1, "solid_capstyle": "butt"}
        ax.plot([role.low, role.high], [row, row], color=colour, **interval)
        ax.scatter([best], [row], 26, marker="D", facecolor="white", edgecolor=FAINT, linewidth=1, zorder=2)
        ax.scatter([role.share], [row], 34, color=colour, edgecolor="white", linewidth=0.6, zorder=3)
        ahead = role.share >= best
        end = max(role.high, best, role.share) if ahead else min(role.low, best, role.share)
        where = f"{role.layer}.{role.head}" if isinstance(role.layer, int) else f"head {role.head}"
        ax.annotate(
            where, (end, row), (5 if ahead else -5, 0), "data", "offset points", size=7.5,
            va="center", ha="left" if ahead else "right", annotation_clip=False,
            **(words(colour, where) if role.found else words(FAINT)),
        )  # fmt: skip
        ax.annotate(
            label(f"{best:.2f}  {role.rule}", 44), (1.13, row), size=7.5, va="center",
            annotation_clip=False, **words(FAINT),
        )  # fmt: skip
    ax.annotate(
        "◇ best rule", (1.13, 1), (0, 17), ("data", "axes fraction"), "offset points", size=8,
        annotation_clip=False, **words(FAINT),
    )  # fmt: skip
    ax.set_xlim(-0.02, 1.09)
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.set_yticks([])
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    faint_axes(ax, "x", hidden=("top", "right", "left"))
    ax.set_xlabel("share of cases; bar: 95% confidence interval", size=8, labelpad=2, **words(FAINT))


def as_lines(roles: Roles) -> Iterator[str]:
    """Yield the table as plain lines of at most 80 characters.

    In three parts: found; not found; not found, since a rule is always right. The last column is the best
    rule that uses classes of words: the nearest word of the related one's class (before, after, or on either
    side), the first of all, the last.
    """
    read = f"{roles.sentences} sentences"
    summary = f"{roles.title or 'roles'}: {len(roles.found)} of {len(roles)} relations found in {read}"
    yield from textwrap.wrap(plain(summary), LINE_WIDTH)
    if roles.left_out:
        yield f"({roles.left_out} more sentences left out: the tokenizer does not know some of their words)"
    missed = {name: role for name, role in roles.items() if not role.found}
    trivial = {name: role for name, role in missed.items() if role.rules[role.rule] >= 1}
    parts: tuple[tuple[str, Mapping[str, Role]], ...] = (
        (f"Found: better than every simple rule by {MARGIN} or more, and by more than chance", roles.found),
        ("Not found", {name: role for name, role in missed.items() if name not in trivial}),
        ("Not found: a simple rule is always right", trivial),
    )
    names = max(map(len, roles), default=0)
    for heading, some in parts:
        if some:
            yield ""
            yield heading
            yield f"{'relation':{names}} {'head':>{LONGEST}} share {'95%':9} cases offset rule"
            for name, role in some.items():
                yield from _role_lines(plain(name), role, names)
    if roles:
        yield ""
        yield from textwrap.wrap(BOTH_RULES, LINE_WIDTH)
    if roles.unasked:
        yield ""
        by_reason: dict[str, list[str]] = {}
        for name, reason in roles.unasked.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, some_names in by_reason.items():
            yield from textwrap.wrap(
                f"Not measured, {reason}: {', '.join(map(plain, some_names))}", LINE_WIDTH
            )


def _role_lines(name: str, role: Role, names: int) -> Iterator[str]:
    head = f"{role.layer}.{role.head}"
    fits = len(head) <= LONGEST
    rule, best = _short(role.class_rule), role.rules[role.class_rule]
    offset = role.rules[role.offset]
    numbers = f"{role.share:5.2f} {role.low:.2f}-{role.high:.2f} {role.cases:5d} {offset:6.2f}"
    yield f"{name:{names}} {head if fits else '':>{LONGEST}} {numbers} {best:.2f} {rule}"
    if not fits:
        where = f"head {role.head} of {plain(str(role.layer))}"
        yield from textwrap.wrap(where, LINE_WIDTH, initial_indent="  ")


def _short(rule: str) -> str:
    """Return a rule that uses classes of words, in one word."""
    short = (word for part, word in RULES.items() if rule.startswith(part) or rule.endswith(part))
    return next(short, "near")


def roles_table(roles: Roles) -> HeadsTable:
    """Return `headwise.Roles.table`: numbers are never cut; columns without room are left out."""
    table = empty_table(roles.title, elsewhere="print(roles) or to_json()")
    table.add("relation", least=0, easy=24)
    add_place(table, "head", (role.layer for role in roles.values()))
    table.add("share")
    table.add("95%", rank=1)
    table.add("cases", rank=3)
    table.add("best\noffset", rank=2)
    table.add("class\nrule", rank=2)
    table.add("found")
    table.add("why", "why", rank=4, least=0, easy=24)
    for name, role in roles.items():
        classes = f"best class rule: {_short(role.class_rule)}"
        detail = classes if role.found else role.verdict.removeprefix(NOT_FOUND).partition("; ")[0]
        table.add_row(
            as_text(name), as_text(f"{role.layer}.{role.head}"), f"{role.share:.2f}",
            f"{role.low:.2f}-{role.high:.2f}", str(role.cases), f"{role.rules[role.offset]:.2f}",
            f"{role.rules[role.class_rule]:.2f}",
            as_text("yes" if role.found else "no"), as_text(detail), style="bold" if role.found else "",
        )  # fmt: skip
    for name, reason in roles.unasked.items():
        table.add_row(as_text(name), *[""] * 7, as_text(f"not measured, {reason}"))
    return HeadsTable(table)
