"""The verbs `look`, `survey`, `presets` and `doctor`, and `headwise` without a verb: arguments, options and
help.

`look_command.py` runs `look`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import PackageMissing, are_here, install_command, needed
from .look_command import (
    LISTED,
    PICTURE,
    LookOptions,
    check_packages,
    print_all,
    sentence,
    show_changes,
    show_heads,
)
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
    progress_line,
    texts_of,
    uncollected,
)

SENTENCE = "The cat that I saw yesterday ran away"
MODEL = "mini|minilm|NAME|PATH"
MODEL_HELP = (
    "mini (built in), minilm (all-MiniLM-L6-v2), a name on the Hugging Face hub, or a folder with a model."
)
PAGE = "heads.html"
LOST, LEFT_OUT = 3, 4  # exit codes
WHERE = (
    "documents-*.parquet lists every document that was not measured, with its error. Run the same command "
    "again to retry errors that may be temporary."
)


def look(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="A sentence in quotes, a text file, or - for standard input (also read if no text is "
            "given and "
            "input is piped). The line break at the end of a file or pipe is dropped. Two texts are "
            "compared.",
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
            help="Show only these layers: 2, 0,2, 0-2, -1 or a module path.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        option(
            "--head",
            metavar="HEAD",
            help="Show only these heads: 3 means head 3 of every chosen layer, 2.3 head 3 of layer 2. A "
            "single head is drawn large.",
        ),
    ] = None,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles",
            help="Also measure which heads attend from a word to a related word (pronoun to antecedent ...).",
        ),
    ] = False,
    written: Annotated[
        bool,
        typer.Option("--written", help="Show the norm of each token's contribution to the output."),
    ] = False,
    out: Annotated[
        Path | None,
        option(
            help=f"Write the picture to this file: .png, .svg or .pdf. Default: {PICTURE}, unless "
            "--terminal, --html or --json is given.",
            autocompletion=complete_pictures,
        ),
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Draw heat maps in the terminal.")] = False,
    html: Annotated[
        Path | None,
        option(
            help="Write an interactive page of every head (one file, works offline). With mini, you can "
            "type in it.",
            autocompletion=complete_pages,
        ),
    ] = None,
    as_json: Annotated[
        str | None,
        option(
            "--json",
            metavar="FILE|-",
            help="Write every number as JSON to this file; - prints only the JSON.",
            autocompletion=complete_pages,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, option(min=1, help="Read at most this many tokens. Default: 4096.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help="Sort heads by label, layer, head or a statistic, such as entropy.",
            show_default="label",
            autocompletion=complete_sorts,
        ),
    ] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Sort from smallest to largest.")] = False,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, help="List (and draw in the terminal) this many heads.", show_default=str(LISTED)
        ),
    ] = None,
) -> None:
    """Show what every attention head of a trained model attends to.

    Draws a heat map of every head, prints a table of heads and a table of layers, and explains the labels. A
    head has a label only if a measured score is above the threshold of that label. Nothing is downloaded
    unless --model is a name on the hub.

    \b
    Examples:
      headwise look "The cat sat on the mat because the cat was tired"
      cat story.txt | headwise look --layer 0-1 --out story.svg
      headwise look "The nurse said he left" "The nurse said she left"
      headwise look "The cat sat on the mat" --head 2.3 --terminal
      headwise look "The nurse said he left" "The nurse said she left" --html heads.html

    \b
    The first command prints
      mini reads "The cat sat on the mat because the cat was tired"
                                        entropy distance first previous
       layer head label (score)            nats     keys   key      key itself
           2    6 local (0.99)             0.91      1.2  0.12     0.44   0.26
           2    3 local (0.99)             0.83      1.6  0.19     0.40   0.21
           2    1 previous-token (0.98)    0.10      1.0  0.13     0.98   0.07
      ...
      A previous-token head attends to the token just before the current one.
      ...
      Wrote heads.png

    Exit codes: 0: done; 1: a package is missing; 2: wrong arguments, explained in one line; 130: Ctrl-C.
    """
    options = LookOptions(
        texts_of(texts, SENTENCE), model, layer or (), head or (), roles, written, out, terminal, html,
        as_json, max_tokens, sort, ascending, top,
    )  # fmt: skip
    options.check(texts or ())
    with progress_line("Loading torch", at_once=True) as progress:
        with uncollected():
            from ..heads.layer_names import HeadChoice
            from ..heads.record import WRITTEN
            from ..show.heads_tables import check_sort

        if not (written and sort in WRITTEN):
            check_sort("label" if sort is None else sort)
        choice = HeadChoice.of(options.layers, options.heads)
        check_packages(options)
        (show_changes if len(options.texts) == 2 else show_heads)(options, choice, progress)


def survey(
    model: Annotated[
        str,
        typer.Argument(metavar=MODEL, help=MODEL_HELP, show_default=False, autocompletion=complete_models),
    ],
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="A file, or a folder of files. A document is a .txt, .text or .md file, a line of a "
            ".jsonl or .ndjson file, or a row of a .parquet file.",
            show_default=False,
            autocompletion=complete_corpora,
        ),
    ],
    out: Annotated[
        Path,
        option(
            help="Write the results to this folder. With the same folder, an interrupted survey continues.",
            autocompletion=complete_folders,
        ),
    ],
    field: Annotated[
        str, typer.Option(help="The field or column of JSON and Parquet files that holds the text.")
    ] = "text",
    max_tokens: Annotated[
        int | None,
        option(
            min=1,
            help="Read at most this many tokens of each document. Default: 4096, or the longest input of "
            "the model.",
        ),
    ] = None,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles/--no-roles",
            help="Also measure, once per model, which heads attend to grammatically related words.",
        ),
    ] = True,
    threads: Annotated[
        int,
        typer.Option(min=1, help="Threads per process. Results are bit-identical only for the same number."),
    ] = 1,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda. With cuda each process uses its own GPU.",
            show_default="cpu",
            autocompletion=complete_devices,
        ),
    ] = None,
    block: Annotated[
        int | None,
        option(
            min=1,
            help="Documents per block, the unit that is saved. Default: 1/64 of the corpus, from 16 to 256.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="here: run in this process, or in those of torchrun. ray: run as a Ray Data job."),
    ] = "here",
    workers: Annotated[
        int | None, option(min=1, help="Number of ray workers. Default: one per processor.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            help="Sort the table by dependence, share, layer or the mean of a statistic, such as entropy."
        ),
    ] = "dependence",
    top: Annotated[int, typer.Option(min=1, help="List this many heads.")] = LISTED,
) -> int:
    """Measure every head of a model over a corpus.

    The model reads each document separately, from its beginning, and every head is measured. The results are
    Parquet files in the folder --out: measures-*.parquet has a row per document, layer and head,
    documents-*.parquet a row per document, and summary-*.parquet a row per layer and head. If the survey is
    interrupted, the same command continues it. A document that cannot be read is recorded with its error and
    counted at the end; the same command retries errors of memory or disk. At the end a table is printed, and
    the page heads.html is written.

    \b
    Examples:
      headwise survey mini corpus/ --out survey
      headwise survey minilm mail.jsonl --field body --out survey
      torchrun --nproc-per-node 8 -m headwise survey mini corpus/ --out survey
      duckdb -c "select layer, head, avg(entropy) from 'survey/measures-*.parquet' group by all"

    Exit codes: 0: the whole corpus was measured; 3: some documents could not be measured; 4: only files of
    unsupported types were left out; 1: a package is missing; 2: wrong arguments or no disk space, explained
    in one line; 130: Ctrl-C.
    """
    are_here(("pyarrow", "numpy", "rich"), "headwise survey needs", install_command("cli", "survey"))
    if engine == "ray":
        are_here(("ray",), "headwise survey --engine ray needs", install_command("ray"))
    with progress_line("Loading torch", at_once=True), uncollected():
        from ..corpus.result import OTHER_KINDS, check_sort, losses_table, sentences
        from ..corpus.survey import survey as surveyed

    check_sort(sort)
    first = int(os.environ.get("RANK", "0")) == 0
    result = surveyed(
        model, corpus, out=out, field=field, max_tokens=max_tokens, roles=roles, threads=threads,
        device=device, block=block, engine=engine, workers=workers,
    )  # fmt: skip
    if not first:
        return 0
    print_all([result.table(sort=sort, top=top), *map(sentence, sentences(result))])
    if top < len(result):
        more = (
            f"Showing {top} of {len(result)} heads; --top {len(result)} shows all, --sort entropy "
            "sorts by that statistic."
        )
        print_all([sentence(more)])
    with progress_line("Drawing the page"):
        try:
            result.to_html(out / PAGE)
        except PackageMissing as error:
            print_all([sentence(f"The page was not written: {error}")])
        else:
            print_all([f"Wrote {out / PAGE}"])
    if not result.lost:
        return 0
    print_all([losses_table(result)])
    if {loss.kind for loss in result.lost} == {OTHER_KINDS}:
        return LEFT_OUT
    print_all([sentence(WHERE)])
    return LOST


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A preset, or part of its name, such as gpt2.",
            show_default=False,
            autocompletion=complete_presets,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the attention layers of well-known models.

    Lists heads, parameters and cache size, counted over the attention layers only. For a single preset, also
    prints the line of Python that builds it; for all presets, how common each number of heads is.

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
    """Check the installation on this machine.

    Lists versions, devices and backends, and runs a small test on each device. Downloads and writes nothing.
    Exit codes: 0: every check passed; 1: otherwise.
    """
    from ..doctor import examine

    with needed("rich", "headwise doctor needs rich"):
        from rich.console import Console
        from rich.text import Text

    from ..show.tables import table_class

    lines = examine()
    table = table_class()(box=None, show_header=False)
    table.add("name", least=0)
    table.add("found", least=20, easy=20)
    for line in lines:
        value = Text(line.value) if line.ok else Text(f"{line.value}: {line.problem}", "bold red")
        table.add_row(Text(line.name), value)
    Console().print(table)
    troubles = sum(not line.ok for line in lines)
    typer.echo(f"{troubles} of {len(lines)} checks failed." if troubles else "All checks passed.")
    raise typer.Exit(1 if troubles else 0)


def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
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
