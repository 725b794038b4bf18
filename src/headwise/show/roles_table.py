"""Roles as tables: what was found, and what was not with the rule that stands in the way."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..heads.roles import MARGIN, OFFSET, Role, Roles
from .heads_tables import HeadsTable
from .tables import as_text, empty_table
from .texts import plain

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["as_lines", "roles_table"]

WIDE = 80
LONGEST = 5  # of a head's name that has its place in the line: 25.14
NOT_FOUND = "not found: "  # which a column of its own says
RULES = {"before": "before", "after": "after", "the first": "first", "the last": "last"}


def as_lines(roles: Roles) -> Iterator[str]:
    """The table as plain lines of at most 80 characters.

    In three parts: found; not found; not found, since a rule is always right. The last column is the best
    rule that goes by classes: the nearest word of the related one's class (before, after, or on either
    side), the first of all, the last.
    """
    read = f"{roles.sentences} sentences"
    said = f"{roles.title or 'roles'}: {len(roles.found)} of {len(roles)} relations found in {read}"
    yield from textwrap.wrap(plain(said), WIDE)
    if roles.left_out:
        yield f"({roles.left_out} more left out, with words that the tokenizer does not know)"
    parts: tuple[tuple[str, Mapping[str, Role]], ...] = (
        (f"Found: better than every rule by {MARGIN} and more, and by more than chance", roles.found),
        ("Not found", {name: role for name, role in roles.items() if _may_be(role)}),
        (
            "Not found: a rule is always right",
            {name: role for name, role in roles.items() if not role.found and not _may_be(role)},
        ),
    )
    names = max(map(len, roles), default=0)
    for heading, some in parts:
        if some:
            yield ""
            yield heading
            yield f"{'relation':{names}} {'head':>{LONGEST}} share {'95%':9} cases offset rule"
            for name, role in some.items():
                yield from _lines(plain(name), role, names)
    if roles.unasked:
        yield ""
        by_reason: dict[str, list[str]] = {}
        for name, reason in roles.unasked.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, some_names in by_reason.items():
            yield from textwrap.wrap(f"Not asked, {reason}: {', '.join(map(plain, some_names))}", WIDE)


def _may_be(role: Role) -> bool:
    return not role.found and role.rules[role.rule] < 1


def _lines(name: str, role: Role, names: int) -> Iterator[str]:
    head = f"{role.layer}.{role.head}"
    fits = len(head) <= LONGEST
    rule, best = _by_class(role)
    numbers = (
        f"{role.share:5.2f} {role.low:.2f}-{role.high:.2f} {role.cases:5d} {role.rules[role.offset]:6.2f}"
    )
    yield f"{name:{names}} {head if fits else '':>{LONGEST}} {numbers} {best:.2f} {rule}"
    if not fits:
        yield from textwrap.wrap(f"head {role.head} of {plain(str(role.layer))}", WIDE, initial_indent="  ")


def _by_class(role: Role) -> tuple[str, float]:
    """The best rule that goes by classes of words, in one word, and its share."""
    others = {rule: share for rule, share in role.rules.items() if not rule.endswith(OFFSET)}
    best = max(others, key=others.__getitem__)
    short = next(
        (word for part, word in RULES.items() if best.startswith(part) or best.endswith(part)), "near"
    )
    return short, others[best]


def roles_table(roles: Roles) -> HeadsTable:
    """For the terminal; numbers are whole at any width, words are wrapped, what has no room is left out.

    Raises:
        PackageMissing: rich is not installed.
    """
    table = empty_table(roles.title, elsewhere="print(roles) and to_json() have every number")
    table.add("relation", least=0, easy=24)
    if all(isinstance(role.layer, int) for role in roles.values()):
        table.add("head")
    else:
        table.add("head", least=10, easy=18)  # paths
    table.add("share")
    table.add("95%", rank=1)
    table.add("cases", rank=3)
    table.add("best\noffset", rank=2)
    table.add("found")
    table.add("why", "why", rank=4, least=0, easy=24)
    for name, role in roles.items():
        table.add_row(
            as_text(name), as_text(f"{role.layer}.{role.head}"), f"{role.share:.2f}",
            f"{role.low:.2f}-{role.high:.2f}", str(role.cases), f"{role.rules[role.offset]:.2f}",
            as_text("yes" if role.found else "no"), _verdict(role), style="bold" if role.found else "",
        )  # fmt: skip
    for name, reason in roles.unasked.items():
        table.add_row(as_text(name), "", "", "", "", "", "", as_text(f"not asked, {reason}"))
    return HeadsTable(table)


def _verdict(role: Role) -> Text:
    rule, best = _by_class(role)
    return as_text(f"best rule: {rule} {best:.2f}" if role.found else role.verdict.removeprefix(NOT_FOUND))
