"""`headwise look`: every head of a trained model on a text, as a picture and in numbers, or on two texts, to
see which heads look elsewhere. `headwise survey`: every head over a corpus, which can be killed and goes on.
`headwise presets`: attention layers of known models in numbers. `headwise doctor`: whether headwise is well
here. `headwise` alone: the help, or which version this is.

`look_answers.py` has what `look` does and says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import PackageMissing, are_here, needed
from .look_answers import LISTED, PICTURE, Wanted, check_packages, compared, looked, print_all, sentence
from .terminal import (
    complete_corpora,
    complete_devices,
    complete_folders,
    complete_models,
    complete_pages,
    complete_pictures,
    complete_presets,
    complete_sorts,
    complete_texts,
    console_of,
    option,
    sign_of_life,
    texts_of,
    uncollected,
)

SENTENCE = "The cat that I saw yesterday ran away"
MODEL = "mini|minilm|NAME|PATH"
MODEL_HELP = (
    "mini is built in, minilm is MiniLM-L6; else a name on the Hugging Face hub, or a folder with a model."
)
PAGE = "heads.html"
LOST, LEFT_OUT = 3, 4  # exit codes
WHERE = "documents-*.parquet names all that could not be read; the same command tries again what may pass."


def look(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="A sentence in quotes, a file with a text, or - for standard input, which is read without "
            "it, too. Of a file and a pipe the last line break is left out. Two texts are compared.",
            show_default=False,
            autocompletion=complete_texts,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar=MODEL, help=MODEL_HELP, autocompletion=complete_models)
    ] = "mini",
    layer: Annotated[
        list[str] | None,
        option(
            "--layer",  # typer 0.27 would take the name from the metavar: --LAYER; the same below
            metavar="LAYER",
            help="These layers alone: 2, 0,2, 0-2, -1 or a module's path.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        option(
            "--head",
            metavar="HEAD",
            help="These heads alone: 3 of every layer that is chosen, or 2.3 for head 3 of layer 2; one head "
            "is drawn large.",
        ),
    ] = None,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles", help="Which heads know grammar: pronouns and what they stand for, and so on."
        ),
    ] = False,
    written: Annotated[
        bool, typer.Option("--written", help="Weigh each token by how much a head would write from it.")
    ] = False,
    out: Annotated[
        Path | None,
        option(
            help=f"The picture to write: .png, .svg or .pdf; {PICTURE} unless --terminal, --html or --json "
            "is given.",
            autocompletion=complete_pictures,
        ),
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Heat maps here in the terminal.")] = False,
    html: Annotated[
        Path | None,
        option(
            help="A page to look around in: every head, offline; with mini, type into it.",
            autocompletion=complete_pages,
        ),
    ] = None,
    as_json: Annotated[
        str | None,
        option(
            "--json",
            metavar="FILE|-",
            help="Write every number as JSON; - prints it, and nothing else.",
            autocompletion=complete_pages,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, option(min=1, help="Read at most so many tokens; without it 4096.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help="By label, layer or a column: entropy, first.",
            show_default="label",
            autocompletion=complete_sorts,
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

        if not (written and sort in WRITTEN):
            check_sort("label" if sort is None else sort)
        choice = HeadChoice.of(wanted.layers, wanted.heads)
        check_packages(wanted)
        (compared if len(wanted.texts) == 2 else looked)(wanted, choice, sign)


def survey(
    model: Annotated[
        str,
        typer.Argument(metavar=MODEL, help=MODEL_HELP, show_default=False, autocompletion=complete_models),
    ],
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="A file or a folder of them: .txt, .text and .md (a file is a document), .jsonl and "
            ".ndjson (a line), .parquet (a row).",
            show_default=False,
            autocompletion=complete_corpora,
        ),
    ],
    out: Annotated[
        Path,
        option(
            help="The folder for its files; with the same one a survey goes on where it stopped.",
            autocompletion=complete_folders,
        ),
    ],
    field: Annotated[str, typer.Option(help="Of JSON and Parquet, where the text is.")] = "text",
    max_tokens: Annotated[
        int | None,
        option(
            min=1,
            help="Read at most so many tokens of each document; without it 4096, or what the model takes.",
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
        typer.Option(
            help="cpu, or cuda: each process its own.", show_default="cpu", autocompletion=complete_devices
        ),
    ] = None,
    block: Annotated[
        int | None,
        option(min=1, help="Documents that are finished as one; without it a 64th of all, 16 to 256."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="here: this process, or those of torchrun; ray: a job of Ray Data.")
    ] = "here",
    workers: Annotated[
        int | None, option(min=1, help="Of ray: how many; without it one per processor.")
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

    are_here(("pyarrow", "numpy", "rich"), "headwise survey needs", 'pip install "headwise[cli,survey]"')
    if engine == "ray":
        are_here(("ray",), "headwise survey --engine ray needs", 'pip install "headwise[ray]"')
    with sign_of_life("Loading torch", at_once=True), uncollected():
        from ..corpus.result import OTHER_KINDS, check_sort, losses_table, sentences
        from ..corpus.survey import survey as surveyed

    check_sort(sort)
    first = int(os.environ.get("RANK", "0")) == 0
    told = surveyed(
        model, corpus, out=out, field=field, max_tokens=max_tokens, roles=roles, threads=threads,
        device=device, block=block, engine=engine, workers=workers,
    )  # fmt: skip
    if not first:
        return 0
    print_all([told.table(sort=sort, top=top), *map(sentence, sentences(told))])
    if top < len(told):
        more = f"{top} of {len(told)} heads; --top {len(told)} shows all, --sort entropy sorts by a number."
        print_all([sentence(more)])
    with sign_of_life("Drawing the page"):
        try:
            told.to_html(out / PAGE)
        except PackageMissing as error:
            print_all([sentence(f"No page: {error}")])
        else:
            print_all([f"Wrote {out / PAGE}"])
    if not told.lost:
        return 0
    print_all([losses_table(told)])
    if {loss.kind for loss in told.lost} == {OTHER_KINDS}:
        return LEFT_OUT
    print_all([sentence(WHERE)])
    return LOST


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
