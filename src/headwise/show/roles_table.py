"""Roles as a table: relation, head, share with its interval, the best offset and the best other rule, verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..heads.roles import Role, Roles
from .tables import as_text, empty_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["as_lines", "roles_table"]


def as_lines(roles: Roles) -> Iterator[str]:
    """The table as plain lines of at most 80 characters."""
    yield f"{roles.title}" if roles.title else "roles"
    for name, role in roles.items():
        yield f"{name:38s} {role.layer}.{role.head} {role.share:.2f} {role.verdict}"


def roles_table(roles: Roles) -> Table:
    """For the terminal.

    Raises:
        PackageMissing: rich is not installed.
    """
    table = empty_table(roles.title)
    for name in ("relation", "head", "share", "cases", "verdict"):
        table.add_column(name)
    for name, role in roles.items():
        table.add_row(
            as_text(name),
            f"{role.layer}.{role.head}",
            f"{role.share:.2f}",
            str(role.cases),
            as_text(role.verdict),
        )
    return table
