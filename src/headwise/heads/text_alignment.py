"""Which tokens of two texts are partners.

Those are that are the same, in order (longest runs first, as `difflib` finds them), and where a run was
replaced by one of as many tokens: "he" and "she". A token without a partner, as where a word falls into two
pieces in one text and into three in the other, is compared with nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter

from ..errors import ArgumentError

__all__ = ["Alignment", "Text", "align"]


@dataclass(frozen=True, eq=False)
class Text:
    """One sequence of positions, padding included.

    ids: what tokens are told apart by; None: nothing is known of them.
    real: the positions that are no padding.
    special: those of tokens such as [CLS].
    """

    names: tuple[str, ...]
    ids: tuple[Hashable, ...] | None
    real: tuple[int, ...]
    special: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Alignment:
    """The positions of two texts as one line: (first, second), None where the other text has no partner.

    Attributes:
        places: positions; padding has none.
        tokens: what stands there in the first text and in the second, "" where there is nothing.
        changed: whether they differ there.
        by_position: tokens are unknown, and partners are those that stand in the same place.
    """

    places: tuple[tuple[int | None, int | None], ...]
    tokens: tuple[tuple[str, str], ...]
    changed: tuple[bool, ...]
    by_position: bool = False

    @property
    def names(self) -> list[str]:
        """Of each place: "the", "he/she" where the texts differ."""
        return [
            f"{mine}/{theirs}" if differs and mine and theirs else mine or theirs
            for (mine, theirs), differs in zip(self.tokens, self.changed, strict=True)
        ]

    @property
    def shared(self) -> list[int]:
        """The places where both texts have a token."""
        return [at for at, place in enumerate(self.places) if None not in place]

    def own(self, side: int, at: Sequence[int] | None = None) -> list[int]:
        """Positions in the first text (0) or the second (1): of these places, or of those it has alone."""
        if at is not None:
            return [own for number in at if (own := self.places[number][side]) is not None]
        return [own for place in self.places if (own := place[side]) is not None and place[1 - side] is None]

    @property
    def words(self) -> tuple[str, str]:
        """What only the first text says, and only the second: runs of tokens, the same change once."""
        runs: dict[tuple[str, str], None] = {}  # in order, each once
        for differs, run in groupby(zip(self.tokens, self.changed, strict=True), key=itemgetter(1)):
            if differs:
                mine, theirs = zip(*(pair for pair, _ in run), strict=True)
                runs[" ".join(" ".join(mine).split()), " ".join(" ".join(theirs).split())] = None
        before, after = ([run[side] for run in runs if run[side]] for side in (0, 1))
        return ", ".join(before), ", ".join(after)


def align(before: Text, after: Text) -> Alignment:
    """Which positions are partners; the same pairs, whichever text comes first.

    Raises:
        ArgumentError: no token in common but special ones; unknown tokens, not equally many.
    """
    if before.ids is None or after.ids is None:
        return _by_position(before, after)
    ids = [before.ids[at] for at in before.real], [after.ids[at] for at in after.real]
    # difflib minds which text comes first, partners must not
    swapped = (len(ids[0]), list(map(repr, ids[0]))) > (len(ids[1]), list(map(repr, ids[1])))
    first, second = ids[::-1] if swapped else ids
    places: list[tuple[int | None, int | None]] = []
    shared = 0
    for kind, *span in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        a0, a1, b0, b1 = [*span[2:], *span[:2]] if swapped else span
        mine, theirs = before.real[a0:a1], after.real[b0:b1]
        if kind == "equal":
            shared += sum(at not in before.special for at in mine)
        if len(mine) == len(theirs):
            places += zip(mine, theirs, strict=True)
        else:
            places += [(at, None) for at in mine]
            places += [(None, at) for at in theirs]
    if not shared:
        raise ArgumentError(
            f"texts must have a token in common: {_quoted(before)} and {_quoted(after)} have 0, special ones "
            "left out; change a few words, not all of them"
        )
    tokens = tuple(
        ("" if a is None else before.names[a], "" if b is None else after.names[b]) for a, b in places
    )
    changed = tuple(a is None or b is None or before.ids[a] != after.ids[b] for a, b in places)
    return Alignment(tuple(places), tokens, changed)


def _by_position(before: Text, after: Text) -> Alignment:
    if len(before.real) != len(after.real):
        raise ArgumentError(
            f"tokens must be known, or equally many: {len(before.real)} and {len(after.real)} positions of "
            "unknown tokens; give the model input_ids, or set heads.tokens on both"
        )
    tokens = tuple((str(at), str(at)) for at in before.real)
    places = tuple(zip(before.real, after.real, strict=True))
    return Alignment(places, tokens, (False,) * len(tokens), by_position=True)


def _quoted(text: Text) -> str:
    said = " ".join(text.names[at] for at in text.real if at not in text.special)
    return repr(said if len(said) <= 40 else said[:39] + "…")
