"""`headwise` alone, and `headwise --version`."""

from __future__ import annotations

from typing import Annotated

import typer


def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Multi-head attention, head by head: build it, check it, see inside it, at any length."""
    if version:
        from .. import __version__

        typer.echo(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit
