"""The verbs that only tell.

headwise presets              the attention layers of models people know, in numbers
headwise doctor               whether headwise is well on this machine
headwise, headwise --version  what there is to do, and which version this is
"""

from __future__ import annotations

from typing import Annotated

import typer

from .terminal import complete_presets, console_of


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A preset, or a part of its name: gpt2.",
            show_default=False,
            autocompletion=complete_presets,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the attention layers of models people know.

    Heads, parameters and cache, counted over attention layers alone. A single preset comes with the line of
    Python that builds it, all of them with how common each number of heads is.

    Example: headwise presets llama3-8b
    """
    from ..nn.presets import PRESETS, matching
    from ..show.tables import described, distribution, figures, presets_table

    chosen = list(PRESETS.values()) if name is None else matching(name)
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([preset.data | asdict(figures(preset)) for preset in chosen], indent=2))
        return
    table = presets_table(chosen)

    from rich.text import Text

    console = console_of("presets")
    console.print(table)
    if name is None:
        console.print(Text("\n".join(distribution(chosen))))  # wrapped at words: no number is torn apart
    if len(chosen) == 1:
        (preset,) = chosen
        typer.echo(preset.title + (f" ({preset.note})" if preset.note else ""))
        typer.echo(described(preset))
        typer.echo(f'hw.MultiHeadAttention.preset("{preset.name}")')


def doctor() -> None:
    """Tell whether headwise is well on this machine.

    Versions, devices, backends, checks. Exit code 0 if every check passes, 1 otherwise. Nothing is fetched or
    written.
    """
    from ..doctor import examine
    from ..errors import needed

    with needed("rich", "headwise doctor prints with rich"):
        from rich.console import Console
        from rich.text import Text

    from ..show.tables import table_class

    lines = examine()
    table = table_class()(box=None, show_header=False)
    table.add("name", least=0)
    table.add("found", least=20, easy=20)
    for line in lines:
        said = Text(line.value) if line.problem is None else Text(f"{line.value}: {line.problem}", "bold red")
        table.add_row(Text(line.name), said)
    Console().print(table)
    troubles = sum(not line.ok for line in lines)
    typer.echo(f"{troubles} of {len(lines)} lines have a problem." if troubles else "headwise is well.")
    raise typer.Exit(1 if troubles else 0)


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
