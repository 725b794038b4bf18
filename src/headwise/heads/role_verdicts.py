"""What came of switching off the heads of a role: numbers, a verdict in a sentence, a table.

margin     log P(right answer) - log P(wrong answer), in nats, mean over prompts; 0: the model cannot tell
accuracy   the share of prompts with a margin above 0
change     margin without the heads - margin of the whole model
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, overload

from ..errors import ArgumentError, needed
from .layer_names import Layer

if TYPE_CHECKING:
    import pandas

__all__ = ["Place", "RoleEffect", "RoleEffects"]

WIDTH = 80  # columns of a terminal
FEWEST = 8  # pairs of prompts that say anything
LEAST = 0.05  # of the margin: a change that is smaller is none, however sure

Place = tuple[Layer, int]  # layer, head


@dataclass(frozen=True)
class RoleEffect:
    """One behaviour with the heads of one role on and off; numbers as said above.

    Attributes:
        relation, behaviour: which role, and what was asked.
        heads: (layer, head) of those switched off.
        left_on: heads of the role that stayed on: half of a layer's heads at most is switched off.
        pairs: pairs of prompts that were asked.
        dropped: pairs that were not, since the tokenizer cuts their two answers into unlike numbers of
            tokens, or an answer not apart from its prompt.
        margin, accuracy: of the whole model.
        margin_low, margin_high: the 95% interval of its margin.
        off, off_accuracy: without the heads.
        change, low, high: of the margin, with its 95% interval, paired over the pairs of prompts.
        draws: the change by each draw of as many other heads of the same layers.
        more_low, more_high: the 95% interval of change - mean change of the draws, paired likewise.
        every_draw: whether those are all the draws there are.
    """

    relation: str
    behaviour: str
    heads: tuple[Place, ...]
    left_on: tuple[Place, ...]
    pairs: int
    dropped: int
    margin: float
    margin_low: float
    margin_high: float
    accuracy: float
    off: float
    off_accuracy: float
    change: float
    low: float
    high: float
    draws: tuple[float, ...]
    more_low: float
    more_high: float
    every_draw: bool

    @property
    def as_much(self) -> int:
        """How many of the draws lower the margin at least as much."""
        return sum(change <= self.change for change in self.draws)

    @property
    def kind(self) -> str:
        """The verdict in a word or two.

        "too few prompts", "not able" (the whole model does not behave so), "no effect" (the interval of the
        change holds 0, or the change is less than a twentieth of the margin), "raised", "no others" (the
        layers have none to compare with), "no more than others" (a draw does as much, or the interval of the
        difference from the draws holds 0), or "effect".
        """
        if self.pairs < FEWEST:
            return "too few prompts"
        if not self.margin_low > 0:
            return "not able"
        if not (self.low > 0 or self.high < 0) or abs(self.change) < LEAST * self.margin:
            return "no effect"
        if self.change > 0:
            return "raised"
        if not self.draws:
            return "no others"
        return "no more than others" if self.as_much or not self.more_high < 0 else "effect"

    @property
    def verdict(self) -> str:
        """One sentence."""
        heads = _named(self.heads)
        numbers = f"from {self.margin:.2f} to {self.off:.2f} nats (accuracy {self.accuracy:.2f} to "
        numbers += f"{self.off_accuracy:.2f})"
        count = len(self.draws)
        draws = f"the {count} other choices" if self.every_draw else f"{count} draws"
        if self.kind == "too few prompts":
            return f"{self.pairs} pairs are left of this tokenizer's, too few to say anything."
        if self.kind == "not able":
            return (
                f"The whole model does not do this ({self.margin:.2f} nats, {self.margin_low:.2f} to "
                f"{self.margin_high:.2f}; accuracy {self.accuracy:.2f}): there is nothing to lose."
            )
        if self.kind == "no effect":
            interval = f"{self.low:+.2f} to {self.high:+.2f}"
            return f"No effect: without {heads} it goes {numbers}, a change of {interval}."
        if self.kind == "raised":
            return f"Switching off {heads} raises it {numbers}; {self.as_much} of {draws} stay below that."
        lowers = f"Switching off {heads} lowers it {numbers}"
        if self.kind == "no others":
            return f"{lowers}; the layer has no others to compare with, so nobody knows whose effect it is."
        if self.kind == "no more than others":
            some = f"{self.as_much} of {draws} do as much" if self.as_much else f"so do {draws}, on average"
            return f"{lowers}; {some}: no effect of its own."
        return f"{lowers}; none of {draws} does as much."


class RoleEffects(Sequence[RoleEffect]):
    """What `role_effects` found, a row for each role and behaviour; print it.

    Attributes:
        unasked: roles that were found, and for which there is no behaviour in the table.
        method: how heads were switched off.
    """

    def __init__(self, rows: Sequence[RoleEffect], unasked: Sequence[str], method: str) -> None:
        self.rows, self.unasked, self.method = tuple(rows), tuple(unasked), method

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> RoleEffect: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RoleEffect, ...]: ...

    def __getitem__(self, index: int | slice) -> RoleEffect | tuple[RoleEffect, ...]:
        return self.rows[index]

    def __repr__(self) -> str:
        kinds = Counter(row.kind for row in self.rows)
        return f"RoleEffects({', '.join(f'{kind}: {count}' for kind, count in kinds.items()) or 'none'})"

    def __str__(self) -> str:
        """A table of at most 80 columns, then each row's sentence."""
        if not self.rows and not self.unasked:
            return "No role was found, so there are no heads to switch off."
        lines = []
        if self.rows:
            width = max(len(row.behaviour) for row in self.rows)
            lines.append(
                f"{'behaviour':{width}} {'margin':>6} {'off':>6} {'change, 95%':>20} {'draws':>12} as much"
            )
            for row in self.rows:
                change = f"{row.change:+.2f} {row.low:+.2f} {row.high:+.2f}"
                draws = f"{min(row.draws):+.2f} {max(row.draws):+.2f}" if row.draws else "-"
                much = f"{row.as_much}/{len(row.draws)}"
                lines.append(
                    f"{row.behaviour:{width}} {row.margin:6.2f} {row.off:6.2f} {change:>20} {draws:>12} "
                    f"{much:>7}"
                )
        for row in self.rows:
            said = f"{row.relation}, {row.behaviour} ({2 * row.pairs} prompts): {row.verdict}"
            lines += ["", *textwrap.wrap(said, WIDTH)]
        notes = (
            [f"Nothing was asked for {', '.join(self.unasked)}: no behaviour is known."]
            if self.unasked
            else []
        )
        dropped = sum(row.dropped for row in self.rows)
        if dropped:
            notes.append(f"{dropped} pairs were left out: their answers are unlike numbers of tokens.")
        on = [f"{_named(row.left_on)} ({row.relation})" for row in self.rows if row.left_on]
        if on:
            notes.append(f"Left on, since half of a layer's heads were off: {', '.join(dict.fromkeys(on))}.")
        if self.rows:
            notes.append(f"Heads that are off say their {self.method} over the behaviour's prompts.")
        return "\n".join([*lines, "", *textwrap.wrap(" ".join(notes), WIDTH)]).strip()

    def to_json(self) -> str:
        """All of it as text, null where there is no number; `from_json` reads it back."""
        rows = [_without_nan(asdict(row)) | {"kind": row.kind, "verdict": row.verdict} for row in self.rows]
        return json.dumps({"method": self.method, "unasked": self.unasked, "effects": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> RoleEffects:
        """As `to_json` wrote it.

        Raises:
            ArgumentError: something else.
        """
        try:
            data = json.loads(text)
            rows = []
            for row in data["effects"]:
                values = {
                    name: math.nan if row[name] is None else row[name] for name in RoleEffect.__annotations__
                }
                values |= {name: tuple(map(tuple, row[name])) for name in ("heads", "left_on")}
                rows.append(RoleEffect(**values | {"draws": tuple(row["draws"])}))
            return cls(rows, data["unasked"], data["method"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArgumentError(
                f"text must be of RoleEffects.to_json: {type(error).__name__}: {error}; measure them again"
            ) from error

    def to_pandas(self) -> pandas.DataFrame:
        """A row per role and behaviour.

        Raises:
            PackageMissing: pandas is not installed.
        """
        with needed("pandas", "to_pandas needs pandas"):
            import pandas
        return pandas.DataFrame(
            [
                asdict(row) | {"as_much": row.as_much, "kind": row.kind, "verdict": row.verdict}
                for row in self.rows
            ]
        )


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in values.items()}


def _named(heads: Sequence[Place]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)
