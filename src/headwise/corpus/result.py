"""`Survey`: the results of a survey by layer and head; `load_survey` reads them from a folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, nearest, needed
from ..heads.collection import Heads, ShownTable
from ..heads.layer import MIXED
from ..heads.layer_names import Layer
from ..heads.roles import Roles
from ..models.pretrained import MOST_TOKENS, Pretrained, read
from ..show.heads_tables import HeadsTable, add_place
from ..show.tables import HEADERS, IN_WORDS, WEIGHTS, as_number, as_text, empty_table
from ..show.texts import plain
from .document_rows import PLACE, STATISTICS, Measure, finite_or_none
from .documents import ENDINGS, Document, Plan, Texts, arrow, table_of
from .shards import Shards, bytes_of, write_atomic
from .summary import FEWEST, OF_TEXT, SHARES, STABLE, HeadSummary, Loss, Mover, Totals, summed

if TYPE_CHECKING:
    import pandas
    import pyarrow

SURVEY, PLAN, ROLES = "survey.json", "corpus.parquet", "roles.json"
OTHER_KINDS = "files of other kinds"
# The columns of each summary beside layer and head, and their types as pyarrow calls them.
TABLES = {
    "heads": {
        "label": "string", "share": "double", "dependence": "double", "verdict": "string",
        "documents": "int64", "roles": "string",
    },
    "statistics": {
        "statistic": "string", "documents": "int64", "mean": "double", "spread": "double",
        **dict.fromkeys(SHARES, "double"), "dependence": "double", "with_length": "double",
    },
    "labels": {"label": "string", "share": "double"},
    "movers": {
        "by": "string", "rank": "int32", "document": "string", "statistic": "string", "value": "double",
        "spreads": "double", **PLACE, "moved": "double", "weight": "double",
    },
}  # fmt: skip


class Survey:
    """What every head of a model did over a corpus: survey[layer, head], or all of them in `heads`.

    Attributes:
        folder: where its files are.
        about: what `survey.json` says: the model, the options, the corpus.
        roles: the roles of the model's heads, if they were measured.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.about: dict[str, Any] = json.loads((self.folder / SURVEY).read_text("utf-8"))
        place = self.folder / ROLES
        self.roles: Roles | None = Roles.from_json(place.read_text("utf-8")) if place.exists() else None
        self.trained: Pretrained | None = None  # the model, if the survey was run by this process
        self._totals: Totals | None = None

    # Results

    @property
    def totals(self) -> Totals:
        """Heads, documents and errors, computed from the shards on first use.

        Raises:
            ArgumentError: no document was read; a file that cannot be read.
        """
        if self._totals is None:
            self._totals = summed(Shards(self.folder))
        if self.roles is not None:
            for head in self._totals.heads:
                head.roles = self.roles.of(head.layer, head.head)
        return self._totals

    @property
    def heads(self) -> list[HeadSummary]:
        """Every head, in order of layers."""
        return self.totals.heads

    @property
    def documents(self) -> int:
        """The number of documents that were read; `totals.failed` could not be."""
        return self.totals.documents

    @property
    def errors(self) -> list[tuple[str, str]]:
        """The first documents that could not be read, and why; all are in `documents-*.parquet`."""
        return self.totals.errors

    @property
    def lost(self) -> list[Loss]:
        """What the numbers do not cover, by kind, with counts, first names and reasons: documents, those
        that a repeated call tries again, files and folders that could not be read, files of other kinds."""
        left_out = self.about["corpus"]["left_out"]
        reason = f"only {', '.join(ENDINGS)} are read"
        loss = Loss(OTHER_KINDS, left_out["count"], [(name, reason) for name in left_out["first"]])
        return [*self.totals.lost, *([loss] if loss.count else [])]

    @property
    def is_complete(self) -> bool:
        """True if every document was measured, or has an error that a repeated call would not try again."""
        shards = Shards(self.folder)
        return len(shards.finished()) >= len(self._plan()) and not shards.to_retry()

    def _plan(self) -> Plan:
        """Return the plan of the corpus."""
        about = self.about["corpus"]
        return Plan.read(self.folder / PLAN, Path(about["root"]), about["block"])

    @property
    def title(self) -> str:
        """The model's title."""
        return str(self.about["model"]["title"])

    def __getitem__(self, place: tuple[Layer, int]) -> HeadSummary:
        """Return the summary of a head for survey[layer, head].

        Raises:
            ArgumentError: not a pair; no such head.
        """
        if not isinstance(place, tuple) or len(place) != 2:
            raise ArgumentError(f"index must be a pair of layer and head: got {place!r}; write survey[0, 3]")
        for head in self.heads:
            if (head.layer, head.head) == place:
                return head
        layers = dict.fromkeys(str(head.layer) for head in self.heads)
        raise ArgumentError(
            f"index must be a head of the survey: got layer {place[0]!r}, head {place[1]!r}; the layers are "
            f"{', '.join(layers)}"
        )

    def __iter__(self) -> Iterator[HeadSummary]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __repr__(self) -> str:
        try:
            documents, heads = self.documents, len(self.heads)
        except ArgumentError:
            return f"Survey({str(self.folder)!r}, no document read)"
        return f"Survey({_counted(documents, 'document')}, {_counted(heads, 'head')})"

    @property
    def stable(self) -> list[HeadSummary]:
        """The heads that do the same in every text, steadiest first."""
        return sorted(
            (head for head in self.heads if head.verdict == "stable"), key=lambda head: head.dependence
        )

    @property
    def of_text(self) -> list[HeadSummary]:
        """The heads that depend on the text, most first."""
        return sorted(
            (head for head in self.heads if head.verdict == "text"), key=lambda head: -head.dependence
        )

    # As tables and files

    def table(
        self, *, sort: str = "dependence", descending: bool = True, top: int | None = None
    ) -> ShownTable:
        """Return a table of heads for the terminal (rich).

        Args:
            sort: "dependence", "share", "layer" or a statistic, by its mean.
            descending: largest first.
            top: at most so many rows.

        Raises:
            ArgumentError: another sort; a top below 1.
            PackageMissing: rich is not installed.
        """
        check_sort(sort)
        if top is not None and top < 1:
            raise ArgumentError(f"top must be at least 1: got {top}; None gives all")
        return _table(self, _sorted(self.heads, sort, descending)[:top], sort)

    def to_pandas(self, table: str = "statistics") -> pandas.DataFrame:
        """Return a summary as a data frame: "heads", "statistics", "labels" or "movers".

        Raises:
            ArgumentError: another table.
            PackageMissing: pandas is not installed.
        """
        if table not in TABLES:
            raise ArgumentError(f"table must be a known name: got {table!r}; {nearest(table, TABLES)}")
        with needed("pandas", "to_pandas needs pandas"):
            import pandas  # noqa: F401
        return self.tables()[table].to_pandas()

    def tables(self) -> dict[str, pyarrow.Table]:
        """Return every summary as a table of pyarrow, as `summary-*.parquet` hold them."""
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        by_number = all(isinstance(head.layer, int) for head in self.heads)
        for head in self.heads:
            place = {"layer": head.layer if by_number else str(head.layer), "head": head.head}
            rows["heads"].append(
                place
                | {"label": head.label, "share": head.share, "dependence": finite_or_none(head.dependence)}
                | {"verdict": head.verdict, "documents": head.documents, "roles": "; ".join(head.roles)}
            )
            rows["labels"] += [
                place | {"label": label, "share": share} for label, share in head.labels.items()
            ]
            for name, numbers in head.statistics.items():
                rest = {
                    "dependence": finite_or_none(numbers.dependence),
                    "with_length": finite_or_none(numbers.with_length),
                }
                row = place | {"statistic": name} | numbers._asdict() | numbers.quantiles | rest
                rows["statistics"].append(row)
            for kind, movers in (("document", head.movers), ("place", head.places)):
                rows["movers"] += [
                    place | {"by": kind, "rank": rank} | mover._asdict() for rank, mover in enumerate(movers)
                ]
        places = {"layer": "int32" if by_number else "string", "head": "int32"}
        return {name: table_of(rows[name], places | columns) for name, columns in TABLES.items()}

    def write(self) -> None:
        """Write `summary-*.parquet` into the folder.

        Raises:
            ArgumentError: no document was read; there is no room.
        """
        for name, table in self.tables().items():
            write_atomic(self.folder / f"summary-{name}.parquet", bytes_of(table))

    # A page

    def document(self, position: int) -> Document:
        """Return a document of the corpus, with its text, if the corpus is still where it was.

        Args:
            position: in the corpus, as in `documents-*.parquet`.

        Raises:
            ArgumentError: no such document; a corpus that is not there any more, or has changed.
        """
        plan = self._plan()
        if not 0 <= position < plan.documents:
            raise ArgumentError(
                f"position must be one of 0 to {plan.documents - 1}: got {position}; see documents-*.parquet"
            )
        block = Texts(plan, self.about["options"]["field"]).block(plan.block_of(position))
        return next(document for document in block if document.position == position)

    def typical(self, trained: Pretrained | None = None) -> tuple[Heads, str]:
        """Return the heads on the most typical document, watched again, and its text.

        Args:
            trained: the model and its tokenizer, as `headwise.models.load` returns them; None: those that
                this result was measured with by `headwise.survey`.

        Raises:
            ArgumentError: there is no typical document; the corpus no longer exists; no model.
        """
        trained = trained or self.trained
        if trained is None:
            raise ArgumentError(
                "trained must be given, since a loaded survey does not contain its model: got None for "
                f"{self.title!r}; pass headwise.models.load(...)"
            )
        position = self.totals.typical
        text = None if position is None else self.document(position).text
        if text is None:
            raise ArgumentError(
                f"survey must have a typical document: found none among {self.documents} documents; add more"
            )
        most = self.about["options"]["max_tokens"] or MOST_TOKENS
        reading = read(text, trained.model, trained.tokenizer, most=most)
        heads = Measure(trained).watched(reading, keep="auto", pooled=128, patterns=True)
        heads.title, heads.tokens = self.title, [reading.tokens]
        return heads, text

    def to_html(self, path: str | os.PathLike[str], trained: Pretrained | None = None) -> Path:
        """Return a page of all heads on the most typical document, with statistics over all documents.

        Args:
            path: the file to write, .html.
            trained: as in `typical`.

        Raises:
            ArgumentError: `path` does not end in .html; as in `typical`.
        """
        heads, text = self.typical(trained)
        heads.to_html(path, text=text, roles=self.roles, corpus=self)
        return Path(path)

    def to_page(self, heads: Heads, batch: int | None = None) -> dict[str, Any]:
        """Return the data of the corpus for a page of these heads, as `CorpusData` of page_data.ts.

        Raises:
            ArgumentError: heads of another model.
        """
        return _corpus_data(self, heads)


def load_survey(folder: str | os.PathLike[str]) -> Survey:
    """Load a survey from its folder, finished or not.

    Raises:
        ArgumentError: there is no survey.
    """
    place = Path(os.path.expanduser(folder))
    if not (place / SURVEY).is_file():
        raise ArgumentError(
            f"folder must contain a survey: {str(folder)!r} has no {SURVEY}; run headwise.survey first"
        )
    arrow()
    try:
        return Survey(place)
    except ValueError as error:
        raise ArgumentError(
            f"folder must contain a survey: {SURVEY} in {str(folder)!r} cannot be read ({error}); run the "
            "survey again"
        ) from error


def _counted(count: int, noun: str) -> str:
    """Return a number of things as text."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# For the terminal


SHOWN = ("entropy", "distance", "first", "previous", "itself", "induction")
ORDERS = ("dependence", "share", "layer")
ELSEWHERE = "summary-*.parquet or to_pandas()"
NAMED = 6  # heads in a sentence


def _table(survey: Survey, heads: list[HeadSummary], sort: str) -> HeadsTable:
    """Return a table with a row per head: label, dependence on the text, means and spreads, first mover."""
    table = empty_table("", elsewhere=ELSEWHERE)
    add_place(table, "layer", (head.layer for head in survey.heads))
    table.add("head")
    table.add("label (share of\ndocuments)", "label", easy=24, least=0)
    table.add("depends\non text", "dependence")
    shown = [*SHOWN, *([sort] if sort in STATISTICS and sort not in SHOWN else [])]
    for at, name in enumerate(shown):
        rank = 0 if name == sort else 3 + at
        table.add(HEADERS.get(name, name.replace("_", "\n")), name.replace("_", " "), rank=rank)
    if survey.roles is not None:
        table.add("role", least=0, easy=20, rank=2)
    table.add("largest deviation", least=12, easy=24, rank=1)
    for head in heads:
        label = as_text(f"{head.label} ({head.share:.2f})")
        label.stylize("dim" if head.label == MIXED else "bold")
        numbers = [as_text(_spread(head, name)) for name in shown]
        roles = [as_text("; ".join(head.roles) or "-")] if survey.roles is not None else []
        by = as_text(head.movers[0].document if head.movers else "-")
        number = as_number("dependence", head.dependence)
        number.plain = "-" if math.isnan(head.dependence) else f"{head.dependence:.2f}"
        table.add_row(as_text(str(head.layer)), str(head.head), label, number, *numbers, *roles, by)
    return HeadsTable(table)


def losses_table(survey: Survey) -> HeadsTable:
    """Return a table of what is not in the numbers: counts by kind, and a row for the first of each."""
    table = empty_table("", elsewhere=ELSEWHERE)
    table.add("count")
    table.add("not read", least=0, easy=22)
    table.add("name", least=20, easy=30)
    table.add("reason", least=20, easy=60)
    for loss in survey.lost:
        more = loss.count - len(loss.first)
        named = [*loss.first, *([(f"and {more:,} more", "")] if more else [])]
        for at, (name, reason) in enumerate(named):
            count, kind = ("", "") if at else (f"{loss.count:,}", _name_of_loss(loss))
            table.add_row(count, kind, as_text(name), as_text(reason))
    return HeadsTable(table)


def _name_of_loss(loss: Loss) -> str:
    """Return the kind of a loss, in the singular for one."""
    return loss.kind if loss.count != 1 else loss.kind.replace("s", "", 1)


def check_sort(sort: str) -> None:
    """Raise `ArgumentError` if no table can be sorted by this name."""
    names = (*ORDERS, *STATISTICS)
    if sort not in names:
        raise ArgumentError(f"sort must be a known name: got {sort!r}; {nearest(sort, names)}")


def _sorted(heads: list[HeadSummary], sort: str, descending: bool) -> list[HeadSummary]:
    """Return heads in the order of a column; NaN comes last."""
    if sort == "layer":
        return heads if descending else heads[::-1]

    def value(head: HeadSummary) -> float:
        return float(getattr(head, sort)) if sort in ORDERS else _statistic(sort, "mean", head)

    sign = -1 if descending else 1
    return sorted(heads, key=lambda head: (math.isnan(value(head)), sign * value(head)))


def _spread(head: HeadSummary, name: str) -> str:
    """Return mean and spread of a statistic as text, or "-"."""
    numbers = head.statistics.get(name)
    if numbers is None:
        return "-"
    digits = 1 if name in ("distance", "effective_keys", "max_logit") else 2
    return f"{numbers.mean:.{digits}f}±{numbers.spread:.{digits}f}"


def sentences(survey: Survey) -> list[str]:
    """Return sentences on what was read and what was found."""
    totals = survey.totals
    lines = [
        f"{survey.title} read {_counted(totals.documents, 'document')}, {_counted(totals.tokens, 'token')}."
    ]
    if totals.cut:
        lines.append(
            f"{_counted(totals.cut, 'document')} longer than the token limit "
            f"{'was' if totals.cut == 1 else 'were'} read only up to it."
        )
    if survey.lost:
        counts = ", ".join(f"{loss.count:,} {_name_of_loss(loss)}" for loss in survey.lost)
        lines.append(f"Not measured: {counts}.")
    if totals.documents < FEWEST:
        lines.append(
            f"At least {FEWEST} documents are needed to tell stable heads from heads that depend on the text."
        )
        return lines
    stable, of_text = survey.stable, survey.of_text
    lines.append(
        f"The same in all texts: {_count(len(stable))} of {len(survey)} (dependence below {STABLE}, and "
        "one label in at "
        f"least 90% of documents){_named(stable)}."
    )
    lines.append(
        f"Depending on the text: {_count(len(of_text))} (dependence {OF_TEXT} or more){_named(of_text)}."
    )
    return lines


def _count(count: int) -> str:
    """Return a number of heads as text."""
    return "no head" if not count else "1 head" if count == 1 else f"{count} heads"


def _named(heads: list[HeadSummary]) -> str:
    """Return the first heads as text."""
    named = ", ".join(f"{head.layer}.{head.head}" for head in heads[:NAMED])
    return f": {named}{', ..' if len(heads) > NAMED else ''}" if heads else ""


# For a page of heads


START = "corpus:dependence"
LONGEST = 160  # letters of a name
WORDS = {
    "stable": "The same in all texts",
    "text": "Depends on the text",
    "between": "Depends somewhat on the text",
    "few": "Too few documents",
}


def _corpus_data(survey: Survey, heads: Heads) -> dict[str, Any]:
    """Return `CorpusData` of page_data.ts for these heads."""
    places = {layer.name: number for number, layer in enumerate(heads.values())}
    sizes = [len(layer) for layer in heads.values()]
    for head in survey.heads:
        if head.layer not in places or head.head >= sizes[places[head.layer]]:
            raise ArgumentError(
                f"corpus must be a survey of the model that was watched: it has layer {head.layer}, head "
                f"{head.head}, which was not watched; pass a survey of this model"
            )
    placed = [(places[head.layer], head) for head in survey.heads]
    totals = survey.totals
    read = _counted(totals.documents, "document")
    lost = ", ".join(f"{loss.count:,} {loss.kind}" for loss in survey.lost)
    return {
        "over": f" over {read}",
        "sentence": f"{survey.title} read {read} ({totals.tokens:,} tokens). The maps and labels above "
        "are those of the "
        "most typical document. Dependence: how much a head's statistics vary between documents, relative "
        "to how "
        "much heads differ from each other. 0 = the same in every document."
        + (f" Not measured: {lost}." if lost else ""),
        "start": START,
        "measures": _measure_data(placed),
        "heads": [_head_data(place, head) for place, head in placed],
    }


def _measure_data(placed: list[tuple[int, HeadSummary]]) -> list[dict[str, Any]]:
    """Return the measures of a page, each with a value for every head."""

    def measure(
        name: str, title: str, group: str, sentence: str, share: bool, value: Callable[[HeadSummary], float]
    ) -> dict[str, Any]:
        values = [[place, head.head, _rounded(value(head))] for place, head in placed]
        return {
            "name": name, "title": title, "group": group, "sentence": sentence, "share": share,
            "values": values,
        }  # fmt: skip

    group_of_all = "Statistics over documents"
    measures = [
        measure(START, "dependence on the text", group_of_all, "how much a head's statistics vary between "
        "documents, relative to differences between heads; 0 = not at all", True,
                lambda head: head.dependence),
        measure("corpus:share", "share of the most frequent label", group_of_all,
                "share of documents in which the head has its most frequent label; from 0 to 1", True,
                lambda head: head.share),
    ]  # fmt: skip
    for kind in ("mean", "spread"):
        for name in STATISTICS:
            if any(name in head.statistics for _, head in placed):
                title, sentence = _title_and_meaning(name)
                share = kind == "mean" and name in WEIGHTS and name != "locality"  # locality may be below 0
                group = f"{'Mean' if kind == 'mean' else 'Standard deviation'} over documents"
                value = partial(_statistic, name, kind)
                measures.append(measure(f"corpus:{kind}:{name}", title, group, sentence, share, value))
    return measures


def _title_and_meaning(statistic: str) -> tuple[str, str]:
    """Return the title of a statistic on a page, and a sentence on what it means."""
    return IN_WORDS.get(statistic, (statistic.replace("_", " "), statistic))


def _statistic(statistic: str, kind: str, head: HeadSummary) -> float:
    """Return the mean or spread of a statistic; NaN if it was not measured."""
    numbers = head.statistics.get(statistic)
    return math.nan if numbers is None else float(getattr(numbers, kind))


def _head_data(place: int, head: HeadSummary) -> dict[str, Any]:
    """Return the data of one head on a page."""
    numbers: list[dict[str, Any]] = []
    for name, summary in head.statistics.items():
        middle = [
            _rounded(summary.quantiles[name_of_quantile]) for name_of_quantile in ("q05", "median", "q95")
        ]
        numbers.append(
            {
                "title": _title_and_meaning(name)[0],
                "mean": _rounded(summary.mean),
                "spread": _rounded(summary.spread),
                "quantiles": middle,
                "dependence": _rounded(summary.dependence),
            }
        )
    return {
        "layer": place,
        "head": head.head,
        "sentence": f"{WORDS[head.verdict]}: {head.label} in {head.share:.0%} of {head.documents:,} "
        f"documents, dependence {head.dependence:.2f}."
        + (f" Role: {plain('; '.join(head.roles), LONGEST)}." if head.roles else ""),
        "labels": [[label, share] for label, share in head.labels.items()],
        "numbers": numbers,
        "movers": [_mover_data(mover, head) for mover in head.movers],
        "places": [_mover_data(mover, head) for mover in head.places],
    }


def _mover_data(mover: Mover, head: HeadSummary) -> dict[str, str]:
    """Return the data of one mover on a page."""
    if mover.statistic is None:
        text = f"{mover.moved:.0%} of this query's weight is on other keys than on average in this document"
    else:
        title = _title_and_meaning(mover.statistic)[0]
        assert mover.spreads is not None and mover.value is not None
        side = "above" if mover.spreads > 0 else "below"
        mean = head.statistics[mover.statistic].mean
        text = (
            f"{title} {mover.value:.2f}, {abs(mover.spreads):.1f} standard deviations {side} this head's "
            f"mean over documents ({mean:.2f})"
        )
    place = ""
    if mover.place is not None:
        place = (
            f"“{plain(mover.token or '', 40)}” (token {mover.place}) gives {mover.weight:.0%} of its "
            "weight to "
            f"“{plain(mover.key_token or '', 40)}” (token {mover.key})"
        )
    return {"document": plain(mover.document, LONGEST), "said": text, "place": place}


def _rounded(value: float) -> float | None:
    """Return a rounded value, or None if it is not finite."""
    return round(value, 5) if math.isfinite(value) else None
