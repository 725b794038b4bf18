"""`headwise presets`: the attention layers of models people know, in numbers."""

from __future__ import annotations

from typing import Annotated

import typer


def presets(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A preset, or a part of its name: gpt2.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the attention layers of models people know: heads, parameters, cache.

    Counts are of attention layers alone. A single preset comes with the line of Python that builds it.

    Example: headwise presets llama3-8b
    """
    from ..nn.presets import PRESETS, matching
    from ..show.presets_table import figures, presets_table

    chosen = list(PRESETS.values()) if name is None else matching(name)
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(preset) | asdict(figures(preset)) for preset in chosen], indent=2))
        return
    table = presets_table(chosen)

    from rich.console import Console

    Console().print(table)
    if len(chosen) == 1:
        (preset,) = chosen
        typer.echo(
            preset.title + (f" (not in a plain attention layer: {preset.note})" if preset.note else "")
        )
        typer.echo(f'hw.MultiHeadAttention.preset("{preset.name}")')
