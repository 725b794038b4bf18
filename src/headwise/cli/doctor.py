"""`headwise doctor`: whether headwise is well on this machine."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Tell whether headwise is well on this machine: versions, devices, backends, checks.

    Exit code 0 if every check passes, 1 otherwise. Nothing is fetched or written.
    """
    from ..doctor import examine

    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError as error:
        hint = 'headwise doctor prints with rich; install with: pip install "headwise[cli]"'
        raise ImportError(hint, name="rich") from error

    lines = examine()
    table = Table.grid(padding=(0, 2))
    for line in lines:
        said = Text(line.value) if line.problem is None else Text(f"{line.value}: {line.problem}", "bold red")
        table.add_row(Text(line.name), said)
    Console().print(table)
    troubles = sum(not line.ok for line in lines)
    typer.echo(f"{troubles} of {len(lines)} lines have a problem." if troubles else "headwise is well.")
    raise typer.Exit(1 if troubles else 0)
