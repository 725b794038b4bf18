"""`Survey`: what a survey came to, by layer and head; back from its folder with `load_survey`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, nearest, needed
from ..heads.collection import Heads, ShownTable
from ..heads.layer_names import Layer
from ..heads.roles import Roles
from ..models.pretrained import MOST_TOKENS, Pretrained, read
from .document_rows import Measure
from .documents import ENDINGS, Document, Plan, Texts, arrow
from .shards import Shards, bytes_of, write_whole
from .summary import SHARES, HeadSummary, Loss, Totals, summed

if TYPE_CHECKING:
    import pandas
    import pyarrow

__all__ = ["OTHERS", "PLAN", "ROLES", "SURVEY", "Survey", "load_survey"]

SURVEY, PLAN, ROLES = "survey.json", "corpus.parquet", "roles.json"
OTHERS = "files of other kinds"
TABLES = ("heads", "statistics", "labels", "movers")


class Survey:
    """What every head of a model did over a corpus: survey[layer, head], or all of them in `heads`.

    Attributes:
        folder: where its files are.
        about: what `survey.json` says: the model, the options, the corpus.
        roles: of the model, where they were measured.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.about: dict[str, Any] = json.loads((self.folder / SURVEY).read_text("utf-8"))
        place = self.folder / ROLES
        self.roles: Roles | None = Roles.from_json(place.read_text("utf-8")) if place.exists() else None
        self.trained: Pretrained | None = None  # what was surveyed, where this was done just now
        self._totals: Totals | None = None

    # What it comes to

    @property
    def totals(self) -> Totals:
        """Heads, documents, errors: worked out from the shards when it is first asked for.

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
        """How many were read; `totals.failed` could not be."""
        return self.totals.documents

    @property
    def errors(self) -> list[tuple[str, str]]:
        """The first documents that could not be read, and why; all are in `documents-*.parquet`."""
        return self.totals.errors

    @property
    def lost(self) -> list[Loss]:
        """What is not in the numbers, counted and with the first names and reasons: documents, those of them
        that the same survey tries again when it is run once more, files and folders that could not be read,
        files of other kinds."""
        others = self.about["corpus"]["left_out"]
        known = f"only {', '.join(ENDINGS)} are read"
        left_out = Loss(OTHERS, others["count"], [(name, known) for name in others["first"]])
        return [*self.totals.lost, *([left_out] if left_out.count else [])]

    @property
    def is_complete(self) -> bool:
        """Whether every document was measured, or recorded with an error that will not pass."""
        about = self.about["corpus"]
        plan = Plan.read(self.folder / PLAN, Path(about["root"]), about["block"])
        shards = Shards(self.folder)
        return len(shards.finished()) >= len(plan) and not shards.to_retry()

    @property
    def title(self) -> str:
        """The model's."""
        return str(self.about["model"]["title"])

    def __getitem__(self, place: tuple[Layer, int]) -> HeadSummary:
        """survey[layer, head].

        Raises:
            ArgumentError: not a pair; no such head.
        """
        if not isinstance(place, tuple) or len(place) != 2:
            raise ArgumentError(
                f"survey must be asked for a layer and a head: got {place!r}; write survey[0, 3]"
            )
        for head in self.heads:
            if (head.layer, head.head) == place:
                return head
        layers = dict.fromkeys(str(head.layer) for head in self.heads)
        raise ArgumentError(
            f"survey must have that head: got layer {place[0]!r}, head {place[1]!r}; layers are "
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
        """A table of heads for the terminal (rich).

        Args:
            sort: "dependence", "share", "layer" or a statistic, by its mean.
            descending: largest first.
            top: at most so many rows.

        Raises:
            ArgumentError: another sort; a top below 1.
            PackageMissing: rich is not installed.
        """
        from .survey_table import survey_table

        return survey_table(self, sort=sort, descending=descending, top=top)

    def to_pandas(self, table: str = "statistics") -> pandas.DataFrame:
        """A summary as a data frame: "heads", "statistics", "labels" or "movers".

        Raises:
            ArgumentError: another table.
            PackageMissing: pandas is not installed.
        """
        if table not in TABLES:
            raise ArgumentError(f"table must be a known one: got {table!r}; {nearest(table, TABLES)}")
        with needed("pandas", "to_pandas needs pandas"):
            import pandas  # noqa: F401
        return self.tables()[table].to_pandas()

    def tables(self) -> dict[str, pyarrow.Table]:
        """Every summary as a table of pyarrow, as `summary-*.parquet` hold them."""
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        for head in self.heads:
            place = {"layer": head.layer, "head": head.head}
            rows["heads"].append(
                place
                | {"label": head.label, "share": head.share, "dependence": _finite(head.dependence)}
                | {"verdict": head.verdict, "documents": head.documents, "roles": "; ".join(head.roles)}
            )
            rows["labels"] += [
                place | {"label": label, "share": share} for label, share in head.labels.items()
            ]
            for name, said in head.statistics.items():
                rows["statistics"].append(
                    place
                    | {
                        "statistic": name,
                        "documents": said.documents,
                        "mean": said.mean,
                        "spread": said.spread,
                    }
                    | said.quantiles
                    | {"dependence": _finite(said.dependence), "with_length": _finite(said.with_length)}
                )
            for kind, movers in (("document", head.movers), ("place", head.places)):
                rows["movers"] += [
                    place | {"by": kind, "rank": rank} | mover._asdict() for rank, mover in enumerate(movers)
                ]
        return {name: _as_table(name, some) for name, some in rows.items()}

    def write(self) -> None:
        """Write `summary-*.parquet` into the folder.

        Raises:
            ArgumentError: no document was read; there is no room.
        """
        for name, table in self.tables().items():
            write_whole(self.folder / f"summary-{name}.parquet", bytes_of(table))

    # A page

    def document(self, position: int) -> Document:
        """A document of the corpus, with its text, if the corpus is still where it was.

        Args:
            position: in the corpus, as in `documents-*.parquet`.

        Raises:
            ArgumentError: no such document; a corpus that is not there any more, or has changed.
        """
        about = self.about["corpus"]
        plan = Plan.read(self.folder / PLAN, Path(about["root"]), about["block"])
        if not 0 <= position < plan.documents:
            raise ArgumentError(
                f"position must be of a document: got {position} of {plan.documents}; they count from 0"
            )
        number = next(at for at, last in enumerate(_ends(plan)) if position < last)
        return next(
            each
            for each in Texts(plan, self.about["options"]["field"]).block(number)
            if each.position == position
        )

    def typical(self, trained: Pretrained | None = None) -> tuple[Heads, str]:
        """The heads of the document that is nearest to all their means, watched anew; and its text.

        Args:
            trained: the model and its tokenizer, as `headwise.models.load` gives them; None: those that were
                surveyed just now.

        Raises:
            ArgumentError: no such document; a corpus that is not there any more; no model.
        """
        trained = trained or self.trained
        if trained is None:
            raise ArgumentError(
                f"trained must be given for a survey that was loaded: got None for {self.title!r}; see "
                "headwise.models.load"
            )
        position = self.totals.typical
        text = None if position is None else self.document(position).text
        if text is None:
            raise ArgumentError(
                f"survey must have a document to show: of {self.documents} none differs; add others"
            )
        most = self.about["options"]["max_tokens"] or MOST_TOKENS
        reading = read(text, trained.model, trained.tokenizer, most=most)
        heads = Measure(trained).watched(reading, keep="auto", pooled=128, patterns=True)
        heads.title, heads.tokens = self.title, [reading.tokens]
        return heads, text

    def to_html(self, path: str | os.PathLike[str], trained: Pretrained | None = None) -> Path:
        """A page: every head of the typical document, coloured by what it does over all of them.

        Args:
            path: where, .html.
            trained: as `typical` takes it.

        Raises:
            ArgumentError: not an .html; as `typical`.
        """
        heads, text = self.typical(trained)
        heads.to_html(path, text=text, roles=self.roles, corpus=self)
        return Path(path)

    def to_page(self, heads: Heads, batch: int | None = None) -> dict[str, Any]:
        """What a page of these heads is told of the corpus, whichever sequence is shown: as `CorpusData` of
        page_data.ts says.

        Raises:
            ArgumentError: heads of another model.
        """
        from .survey_page import page_of

        return page_of(self, heads)


def load_survey(folder: str | os.PathLike[str]) -> Survey:
    """What a survey left in a folder, whether it is finished or not.

    Raises:
        ArgumentError: there is no survey.
    """
    place = Path(os.path.expanduser(folder))
    if not (place / SURVEY).is_file():
        raise ArgumentError(
            f"folder must be a survey's: there is no {SURVEY} in {str(folder)!r}; run one first"
        )
    arrow()
    try:
        return Survey(place)
    except ValueError as error:
        raise ArgumentError(
            f"folder must be a survey's: {SURVEY} in {str(folder)!r} cannot be read ({error}); run it again"
        ) from error


def _ends(plan: Plan) -> Iterator[int]:
    end = 0
    for number in range(len(plan)):
        end += plan.in_block(number)
        yield end


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _as_table(name: str, rows: list[dict[str, Any]]) -> pyarrow.Table:
    pa = arrow()
    small, whole, letters, number = pa.int32(), pa.int64(), pa.string(), pa.float64()
    by_number = all(isinstance(row["layer"], int) for row in rows)
    layer = ("layer", small if by_number else letters)
    kinds: dict[str, list[tuple[str, Any]]] = {
        "heads": [
            ("label", letters), ("share", number), ("dependence", number), ("verdict", letters),
            ("documents", whole), ("roles", letters),
        ],
        "labels": [("label", letters), ("share", number)],
        "statistics": [
            ("statistic", letters), ("documents", whole), ("mean", number), ("spread", number),
            *((each, number) for each in SHARES), ("dependence", number), ("with_length", number),
        ],
        "movers": [
            ("by", letters), ("rank", small), ("document", letters), ("statistic", letters),
            ("value", number), ("spreads", number), ("place", small), ("token", letters), ("moved", number),
            ("key", small), ("key_token", letters), ("weight", number),
        ],
    }  # fmt: skip
    told = rows if by_number else [row | {"layer": str(row["layer"])} for row in rows]
    return pa.Table.from_pylist(told, schema=pa.schema([layer, ("head", small), *kinds[name]]))
