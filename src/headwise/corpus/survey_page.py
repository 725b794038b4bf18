"""What a page of heads is told of a survey: "CorpusData" of page_data.ts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..heads.collection import Heads
from ..show.tables import IN_WORDS, WEIGHTS
from ..show.texts import plain
from .document_rows import statistics
from .summary import HeadSummary, Mover

if TYPE_CHECKING:
    from .result import Survey

__all__ = ["page_of"]

START = "corpus:dependence"
LONGEST = 160  # letters of a name
WORDS = {
    "stable": "Stable",
    "text": "Depends on the text",
    "between": "In between",
    "few": "Of few documents",
}


def page_of(survey: Survey, heads: Heads) -> dict[str, Any]:
    """All of it, for these heads.

    Raises:
        ArgumentError: heads of another model.
    """
    places = {layer.name: number for number, layer in enumerate(heads.values())}
    sizes = [len(layer) for layer in heads.values()]
    for head in survey.heads:
        if head.layer not in places or head.head >= sizes[places[head.layer]]:
            raise ArgumentError(
                f"corpus must be a survey of the model that was watched: it has layer {head.layer}, head "
                f"{head.head}, and that was not watched; give this model's"
            )
    known = [(places[head.layer], head) for head in survey.heads]
    totals = survey.totals
    read = f"{totals.documents:,} document{'' if totals.documents == 1 else 's'}"
    lost = "".join(f", {loss.count:,} {loss.kind}" for loss in survey.lost).removeprefix(", ")
    return {
        "over": f" over {read}",
        "sentence": f"{survey.title} read {read}, {totals.tokens:,} tokens; the text above, its maps and "
        "its labels, is the one that is most typical of them. Dependence is how much a head's numbers differ "
        "from document to document, beside how much heads differ: 0 is the same everywhere."
        + (f" Not in these numbers: {lost}." if lost else ""),
        "start": START,
        "measures": _measures(known),
        "heads": [_head(place, head) for place, head in known],
    }


def _measures(known: list[tuple[int, HeadSummary]]) -> list[dict[str, Any]]:
    def told(name: str, title: str, group: str, sentence: str, share: bool, value: Any) -> dict[str, Any]:
        values = [[place, head.head, _finite(value(head))] for place, head in known]
        return {
            "name": name, "title": title, "group": group, "sentence": sentence, "share": share,
            "values": values,
        }  # fmt: skip

    every, of_means, of_spreads = "Over documents", "Mean over documents", "Spread over documents"
    measures = [
        told(START, "dependence on the text", every, "0: it does the same in every document", True,
             lambda head: head.dependence),
        told("corpus:share", "share of its label", every,
             "in how many documents it earns its commonest label", True, lambda head: head.share),
    ]  # fmt: skip
    for name in statistics():
        if not any(name in head.statistics for _, head in known):
            continue
        title, sentence = IN_WORDS.get(name, (name.replace("_", " "), name))
        share = name in WEIGHTS and name != "locality"  # which may be below 0

        def mean(head: HeadSummary, name: str = name) -> float:
            return head.statistics[name].mean if name in head.statistics else math.nan

        def spread(head: HeadSummary, name: str = name) -> float:
            return head.statistics[name].spread if name in head.statistics else math.nan

        measures.append(told(f"corpus:mean:{name}", title, of_means, sentence, share, mean))
        measures.append(told(f"corpus:spread:{name}", title, of_spreads, sentence, False, spread))
    order = (every, of_means, of_spreads)
    return sorted(measures, key=lambda each: order.index(each["group"]))


def _head(place: int, head: HeadSummary) -> dict[str, Any]:
    numbers: list[dict[str, Any]] = []
    for name, said in head.statistics.items():
        title = IN_WORDS.get(name, (name.replace("_", " "), ""))[0]
        middle = [_finite(said.quantiles[each]) for each in ("q05", "median", "q95")]
        numbers.append(
            {
                "title": title,
                "mean": _finite(said.mean),
                "spread": _finite(said.spread),
                "quantiles": middle,
                "dependence": _finite(said.dependence),
            }
        )
    return {
        "layer": place,
        "head": head.head,
        "sentence": f"{WORDS[head.verdict]}: {head.label} in {head.share:.0%} of {head.documents:,} "
        f"documents, dependence {head.dependence:.2f}."
        + (f" Role: {plain('; '.join(head.roles), LONGEST)}." if head.roles else ""),
        "labels": [[label, share] for label, share in head.labels.items()],
        "numbers": numbers,
        "movers": [_mover(mover, head) for mover in head.movers],
        "places": [_mover(mover, head) for mover in head.places],
    }


def _mover(mover: Mover, head: HeadSummary) -> dict[str, str]:
    if mover.statistic is None:
        said = f"looks elsewhere with {mover.moved:.0%} of its weight"
    else:
        title = IN_WORDS.get(mover.statistic, (mover.statistic, ""))[0]
        assert mover.spreads is not None and mover.value is not None
        side = "above" if mover.spreads > 0 else "below"
        mean = head.statistics[mover.statistic].mean
        said = f"{title} {mover.value:.2f}, {abs(mover.spreads):.1f} spreads {side} its mean {mean:.2f}"
    place = ""
    if mover.place is not None:
        place = (
            f"from “{plain(mover.token or '', 40)}” (token {mover.place}) it gives {mover.weight:.0%} to "
            f"“{plain(mover.key_token or '', 40)}” (token {mover.key})"
        )
    return {"document": plain(mover.document, LONGEST), "said": said, "place": place}


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None
