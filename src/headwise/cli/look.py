"""`headwise look`: a picture of heads, and what each does in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

COLUMNS = ("entropy", "effective_keys", "confidence", "distance", "first", "previous", "itself", "next")


def look(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT|FILE", help="A sentence, or a file of up to 1,000 words.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = Path("heads.png"),
) -> None:
    """See heads at work: hand-made heads, not a trained model.

    Writes a heat map of every head and prints what each does in numbers.

    Example: headwise look "to be or not to be" --out heads.png
    """
    from ..show.files import check_path, save
    from ..show.handmade import HANDMADE, SENTENCE, handmade_heads
    from ..show.heatmaps import heatmaps
    from ..show.table import statistics_table
    from .text import text_or_file

    check_path(out)
    words, weights, names = handmade_heads(SENTENCE if text is None else text_or_file(text))
    table = statistics_table(weights.statistics(*COLUMNS), names, title=HANDMADE)
    save(heatmaps(weights, words, titles=names, title=HANDMADE), out)

    from rich.console import Console

    Console().print(table)
    typer.echo(f"Wrote {out}")
