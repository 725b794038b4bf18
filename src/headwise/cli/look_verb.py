"""`headwise look`: every head of a trained model on a text, as a picture and in numbers; or on two texts, to
see which heads look elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .completion import model_names, pages, pictures, sorts
from .completion import texts as text_files
from .look_request import LISTED, PICTURE, Wanted, check_packages

__all__ = ["look"]

SENTENCE = "The cat that I saw yesterday ran away"


def look(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="A sentence in quotes, a file with a text, or - for standard input, which is read without "
            "it, too. Of a file and a pipe the last line break is left out. Two texts are compared.",
            show_default=False,
            autocompletion=text_files,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="mini|minilm|NAME|PATH",
            help="mini is built in, minilm is MiniLM-L6; else a name on the Hugging Face hub, or a folder "
            "with a model.",
            autocompletion=model_names,
        ),
    ] = "mini",
    layer: Annotated[
        list[str] | None,
        typer.Option(
            "--layer",  # typer 0.27 would take the name from the metavar: --LAYER; the same below
            metavar="LAYER",
            help="These layers alone: 2, 0,2, 0-2, -1 or a module's path.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            metavar="HEAD",
            help="These heads alone: 3 of every layer that is chosen, or 2.3 for head 3 of layer 2; one head "
            "is drawn large.",
            show_default=False,
        ),
    ] = None,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles", help="Which heads know grammar: pronouns and what they stand for, and so on."
        ),
    ] = False,
    written: Annotated[
        bool,
        typer.Option("--written", help="Weigh each token by how much a head would write from it."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"The picture to write: .png, .svg or .pdf; {PICTURE} unless --terminal, --html or --json "
            "is given.",
            show_default=False,
            autocompletion=pictures,
        ),
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Heat maps here in the terminal.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="A page to look around in: every head, offline; with mini, type into it.",
            show_default=False,
            autocompletion=pages,
        ),
    ] = None,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            help="Write every number as JSON; - prints it, and nothing else.",
            show_default=False,
            autocompletion=pages,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Read at most so many tokens; without it 4096.", show_default=False),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help="By label, layer or a column: entropy, first.", show_default="label", autocompletion=sorts
        ),
    ] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many heads to list, and to draw in the terminal.", show_default=str(LISTED)
        ),
    ] = None,
) -> None:
    """See what every attention head of a trained model looks at.

    Draws all heads, prints the strongest ones and every layer in numbers, and says in words what the labels
    mean. Labels are measured: a head has one only where its score is above a stated threshold. The network is
    used for a NAME on the hub alone.

    \b
    Examples:
      headwise look "The cat sat on the mat because the cat was tired"
      cat story.txt | headwise look --layer 0-1 --out story.svg
      headwise look "The nurse said he left" "The nurse said she left"
      headwise look "The cat sat on the mat" --head 2.3 --terminal
      headwise look "The nurse said he left" "The nurse said she left" --html heads.html

    \b
    The first prints
      mini reads "The cat sat on the mat because the cat was tired"
                                        entropy distance first previous
       layer head label (score)            nats     keys   key      key itself
           2    6 local (0.99)             0.91      1.2  0.12     0.44   0.26
           2    3 local (0.99)             0.83      1.6  0.19     0.40   0.21
           2    1 previous-token (0.98)    0.10      1.0  0.13     0.98   0.07
      ...
      A previous-token head looks at the word just before each word.
      ...
      Wrote heads.png

    Exit code 0: done; 1: a package is missing; 2: a mistake, in one line; 130: Ctrl-C.
    """
    from .terminal import sign_of_life, texts_of, uncollected

    wanted = Wanted(
        texts_of(texts, SENTENCE), model, layer or (), head or (), roles, written, out, terminal, html,
        as_json, max_tokens, sort, ascending, top,
    )  # fmt: skip
    wanted.check(texts or ())
    with sign_of_life("Loading torch", at_once=True) as sign:
        with uncollected():
            from ..heads.layer_names import HeadChoice
            from ..heads.record import WRITTEN
            from ..show.heads_tables import check_sort
            from .look_answers import compared, looked

        if not (written and sort in WRITTEN):
            check_sort("label" if sort is None else sort)
        choice = HeadChoice.of(wanted.layers, wanted.heads)
        check_packages(wanted)
        (compared if len(wanted.texts) == 2 else looked)(wanted, choice, sign)
