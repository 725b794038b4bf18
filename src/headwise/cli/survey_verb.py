"""`headwise survey`: every head of a trained model over a corpus, which can be killed and goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .completion import corpora, devices, folders, model_names

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["survey"]

LISTED = 20
PAGE = "heads.html"
LOST, LEFT_OUT = 3, 4  # exit codes
WHERE = "documents-*.parquet names all that could not be read; the same command tries again what may pass."


def survey(
    model: Annotated[
        str,
        typer.Argument(
            metavar="mini|minilm|NAME|PATH",
            help="mini is built in, minilm is MiniLM-L6; else a name on the Hugging Face hub, or a folder "
            "with a model.",
            show_default=False,
            autocompletion=model_names,
        ),
    ],
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="A file or a folder of them: .txt, .text and .md (a file is a document), .jsonl and "
            ".ndjson (a line), .parquet (a row).",
            show_default=False,
            autocompletion=corpora,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The folder for its files; with the same one a survey goes on where it stopped.",
            show_default=False,
            autocompletion=folders,
        ),
    ],
    field: Annotated[str, typer.Option(help="Of JSON and Parquet, where the text is.")] = "text",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Read at most so many tokens of each document; without it 4096, or what the model takes.",
            show_default=False,
        ),
    ] = None,
    roles: Annotated[
        bool, typer.Option("--roles/--no-roles", help="Once per model, which heads know grammar.")
    ] = True,
    threads: Annotated[
        int, typer.Option(min=1, help="Of each process; numbers are the same only with as many.")
    ] = 1,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, or cuda: each process its own.", show_default="cpu", autocompletion=devices),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Documents that are finished as one; without it a 64th of all, 16 to 256.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="here: this process, or those of torchrun; ray: a job of Ray Data.")
    ] = "here",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Of ray: how many; without it one per processor.", show_default=False),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="The table: by dependence, share, layer, or a number's mean: entropy.")
    ] = "dependence",
    top: Annotated[int, typer.Option(min=1, help="How many heads the table lists.")] = LISTED,
) -> int:
    """See what every head of a model does over a corpus.

    Every document is read by itself, from its beginning, and every head of it is measured. Numbers go into
    Parquet files in the folder of --out: measures-*.parquet has a row per document, layer and head,
    documents-*.parquet a row per document, summary-*.parquet what they come to. Killed at any moment, the
    same command goes on where it stopped. A document, file or folder that cannot be read is recorded with its
    error, and counted and named at the end. What failed for want of memory or of a disk is tried again, by
    the same command, too. At the end stand a table, and heads.html, a page.

    \b
    Examples:
      headwise survey mini corpus/ --out survey
      headwise survey minilm mail.jsonl --field body --out survey
      torchrun --nproc-per-node 8 -m headwise survey mini corpus/ --out survey
      duckdb -c "select layer, head, avg(entropy) from 'survey/measures-*.parquet' group by all"

    Exit code 0: all of the corpus was measured; 3: some could not be read or measured; 4: files of other
    kinds were left out, and all else was measured; 1: a package is missing; 2: a mistake, or no room, in one
    line; 130: Ctrl-C.
    """
    from ..errors import PackageMissing, are_here
    from .terminal import sign_of_life, uncollected

    are_here(("pyarrow", "numpy", "rich"), "headwise survey needs", 'pip install "headwise[cli,survey]"')
    if engine == "ray":
        are_here(("ray",), "headwise survey --engine ray needs", 'pip install "headwise[ray]"')
    with sign_of_life("Loading torch", at_once=True), uncollected():
        from ..corpus.result import OTHERS, check_sort, losses_table, sentences
        from ..corpus.survey import survey as surveyed
    from .look_answers import print_all

    check_sort(sort)
    first = int(os.environ.get("RANK", "0")) == 0
    told = surveyed(
        model, corpus, out=out, field=field, max_tokens=max_tokens, roles=roles, threads=threads,
        device=device, block=block, engine=engine, workers=workers,
    )  # fmt: skip
    if not first:
        return 0
    print_all([told.table(sort=sort, top=top), *map(_line, sentences(told))])
    if top < len(told):
        more = f"{top} of {len(told)} heads; --top {len(told)} shows all, --sort entropy sorts by a number."
        print_all([_line(more)])
    with sign_of_life("Drawing the page"):
        try:
            told.to_html(out / PAGE)
        except PackageMissing as error:
            print_all([_line(f"No page: {error}")])
        else:
            print_all([f"Wrote {out / PAGE}"])
    if not told.lost:
        return 0
    print_all([losses_table(told)])
    if {loss.kind for loss in told.lost} == {OTHERS}:
        return LEFT_OUT
    print_all([_line(WHERE)])
    return LOST


def _line(said: str) -> Text:
    """A sentence, broken between words."""
    from rich.text import Text

    from ..show.texts import plain

    return Text(plain(said))
