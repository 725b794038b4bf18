"""A survey as a table for the terminal: which heads are stable, which depend on the text, what moves them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import ArgumentError, nearest
from ..heads.labels import MIXED
from ..show.heads_tables import HeadsTable
from ..show.tables import HEADERS, as_number, as_text, empty_table
from .document_rows import statistics
from .summary import FEWEST, OF_TEXT, STABLE, HeadSummary, Loss

if TYPE_CHECKING:
    from .result import Survey

__all__ = ["check_sort", "losses_table", "sentences", "survey_table"]

SHOWN = ("entropy", "distance", "first", "previous", "itself", "induction")
ORDERS = ("dependence", "share", "layer")
ELSEWHERE = "summary-*.parquet and to_pandas() have every number"
NAMED = 6  # heads in a sentence


def survey_table(survey: Survey, *, sort: str, descending: bool, top: int | None) -> HeadsTable:
    """One row per head: its label and in how many documents, how much it depends on the text, means and
    spreads, the document that moves it most.

    Raises:
        ArgumentError: an unknown sort; a top below 1.
        PackageMissing: rich is not installed.
    """
    check_sort(sort)
    if top is not None and top < 1:
        raise ArgumentError(f"top must be at least 1: got {top}; None gives all")
    table = empty_table("", elsewhere=ELSEWHERE)
    by_number = all(isinstance(head.layer, int) for head in survey.heads)
    if by_number:
        table.add("layer")
    else:
        table.add("layer", least=10, easy=18)
    table.add("head")
    table.add("label (share of\ndocuments)", "label", easy=24, least=0)
    table.add("depends\non text", "dependence")
    shown = [*SHOWN, *([sort] if sort in statistics() and sort not in SHOWN else [])]
    for at, name in enumerate(shown):
        rank = 0 if name == sort else 3 + at
        table.add(HEADERS.get(name, name.replace("_", "\n")), name.replace("_", " "), rank=rank)
    if survey.roles is not None:
        table.add("role", least=0, easy=20, rank=2)
    table.add("moved most by", least=12, easy=24, rank=1)
    for head in _sorted(survey.heads, sort, descending)[:top]:
        label = as_text(f"{head.label} ({head.share:.2f})")
        label.stylize("dim" if head.label == MIXED else "bold")
        numbers = [as_text(_spread(head, name)) for name in shown]
        roles = [as_text("; ".join(head.roles) or "-")] if survey.roles is not None else []
        by = as_text(head.movers[0].document if head.movers else "-")
        number = as_number("dependence", head.dependence)
        number.plain = "-" if math.isnan(head.dependence) else f"{head.dependence:.2f}"
        table.add_row(as_text(str(head.layer)), str(head.head), label, number, *numbers, *roles, by)
    return HeadsTable(table)


def losses_table(survey: Survey) -> HeadsTable:
    """What is not in the numbers: how many of each kind, and a row for each of the first of them.

    Raises:
        PackageMissing: rich is not installed.
    """
    table = empty_table("", elsewhere=ELSEWHERE)
    table.add("count")
    table.add("not read", least=0, easy=22)
    table.add("name", least=20, easy=30)
    table.add("reason", least=20, easy=60)
    for loss in survey.lost:
        more = loss.count - len(loss.first)
        named = [*loss.first, *([(f"and {more:,} more", "")] if more else [])]
        for at, (name, reason) in enumerate(named):
            count, kind = ("", "") if at else (f"{loss.count:,}", _kind(loss))
            table.add_row(count, kind, as_text(name), as_text(reason))
    return HeadsTable(table)


def _kind(loss: Loss) -> str:
    return loss.kind if loss.count != 1 else loss.kind.replace("s", "", 1)


def check_sort(sort: str) -> None:
    """Whether a table can be sorted so.

    Raises:
        ArgumentError: it cannot.
    """
    known = (*ORDERS, *statistics())
    if sort not in known:
        raise ArgumentError(f"sort must be a known name: got {sort!r}; {nearest(sort, known)}")


def _sorted(heads: list[HeadSummary], sort: str, descending: bool) -> list[HeadSummary]:
    if sort == "layer":
        return heads if descending else heads[::-1]

    def value(head: HeadSummary) -> float:
        if sort in ("dependence", "share"):
            return float(getattr(head, sort))
        there = head.statistics.get(sort)
        return math.nan if there is None else there.mean

    sign = -1 if descending else 1
    return sorted(heads, key=lambda head: (math.isnan(value(head)), sign * value(head)))


def _spread(head: HeadSummary, name: str) -> str:
    """Mean and spread."""
    there = head.statistics.get(name)
    if there is None:
        return "-"
    digits = 1 if name in ("distance", "effective_keys", "max_logit") else 2
    return f"{there.mean:.{digits}f}±{there.spread:.{digits}f}"


def sentences(survey: Survey) -> list[str]:
    """What was read, and what came of it, in words."""
    totals = survey.totals
    said = [
        f"{survey.title} read {_counted(totals.documents, 'document')}, {_counted(totals.tokens, 'token')}."
    ]
    if totals.cut:
        said.append(
            f"Of {_counted(totals.cut, 'document')} the end was left out: more tokens than are read of one."
        )
    if survey.lost:
        counts = ", ".join(f"{loss.count:,} {_kind(loss)}" for loss in survey.lost)
        said.append(f"Not in these numbers: {counts}.")
    if totals.documents < FEWEST:
        said.append(
            f"That is too few to tell stable heads from those that depend on the text: {FEWEST} are needed."
        )
        return said
    stable, of_text = survey.stable, survey.of_text
    said.append(
        f"Stable, whatever the text: {_are(len(stable))} of {len(survey)} (dependence below {STABLE}, the "
        f"same label in nine of ten documents){_listed(stable)}."
    )
    said.append(
        f"Depending on the text: {_are(len(of_text))} (dependence {OF_TEXT} or more){_listed(of_text)}."
    )
    return said


def _are(count: int) -> str:
    return "no head" if not count else "1 head" if count == 1 else f"{count} heads"


def _listed(heads: list[HeadSummary]) -> str:
    named = ", ".join(f"{head.layer}.{head.head}" for head in heads[:NAMED])
    return f": {named}{', ..' if len(heads) > NAMED else ''}" if heads else ""


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
