"""Two readings of one model as a page holds them: which positions are partners, and which heads moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..heads.text_changes import Alignment
from .page_calls import is_exact, rounded
from .page_readings import Reading
from .texts import plain

__all__ = ["flips"]

MOST_FLIPS = 8


def flips(sources: list[list[Reading]], side: int) -> Iterator[dict[str, Any]]:
    """The first reading and each other of the same model that it can be compared with, token by token."""
    everyone = [((s, r), each) for s, some in enumerate(sources) for r, each in enumerate(some)]
    (first, before), *others = everyone
    made = 0
    for place, after in others:
        if made == MOST_FLIPS:
            return
        if not (_comparable(before, side) and _comparable(after, side)):
            continue
        try:
            flip = _flip(before, after)
        except ArgumentError:  # another model, or texts that have nothing in common: there is no flip
            continue
        if flip is not None:
            made += 1
            yield {"before": first, "after": place} | flip


def _comparable(reading: Reading, side: int) -> bool:
    shown = [view for view in reading.layers if view is not None]
    return all(
        len(view.calls) == 1 and view.calls[0].map is not None and is_exact(view, side) for view in shown
    )


def _flip(before: Reading, after: Reading) -> dict[str, Any] | None:
    changes = before.heads.changes(after.heads)
    layers = []
    differs = False
    for path, mine, theirs in zip(changes.layers, before.layers, after.layers, strict=True):
        compared = changes.layers[path]
        differs |= any(any(each.changed) or each.by_position for each in (compared.queries, compared.keys))
        both = None
        if mine is not None and theirs is not None:
            both = {
                "queries": _line(compared.queries, mine.queries, theirs.queries),
                "keys": _line(compared.keys, mine.keys, theirs.keys),
            }
        layers.append(both)
    if not differs:
        return None
    numbers = before.places
    shown = {(numbers[head.path], head.head) for head in before.shown}
    heads = []
    for change in changes:
        layer = numbers[change.path]
        if (layer, change.head) not in shown:
            continue
        places = None
        mine, theirs = before.layers[layer], after.layers[layer]
        if change.places is not None and mine is not None and theirs is not None:
            at = _at(mine.queries, change.places[0]), _at(theirs.queries, change.places[1])
            places = None if None in at else at
        heads.append(
            {
                "layer": layer,
                "head": change.head,
                "distance": rounded(change.distance),
                "largest": rounded(change.largest),
                "token": plain(change.token, 60),
                "places": places,
            }
        )
    words = tuple(plain(each, 120) for each in changes.text.words)
    return {"words": words, "layers": layers, "heads": heads}


def _line(alignment: Alignment, before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """Both texts as one; positions are counted without padding."""
    own = [{at: number for number, at in enumerate(real.tolist())} for real in (before, after)]
    return [
        {
            "before": None if mine is None else own[0].get(mine),
            "after": None if theirs is None else own[1].get(theirs),
            "name": plain(name, 60),
            "changed": changed,
        }
        for (mine, theirs), name, changed in zip(
            alignment.places, alignment.names, alignment.changed, strict=True
        )
    ]


def _at(real: Tensor, place: int) -> int | None:
    found = (real == place).nonzero().flatten().tolist()
    return found[0] if found else None
