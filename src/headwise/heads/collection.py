"""`Heads`: what every head of a model did, layer by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, nearest
from .labels import LABELS
from .layer import POSITIONS, Head, LayerHeads
from .layer_names import Layer, names_of, resolve, stacks
from .record import Record

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["Heads"]


class Heads(Mapping[Layer, LayerHeads]):
    """Every head that was watched, by layer: a module's path, or its number where there is one stack.

    Example:
        >>> import torch, headwise as hw
        >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
        >>> with hw.watch(mha) as heads:
        ...     output, _ = mha(torch.randn(2, 7, 64))
        >>> heads
        Heads(1 layer, 4 heads)
        >>> heads[0].statistics.entropy.shape
        torch.Size([4])
        >>> heads[0].calls[0].statistics.entropy.shape    # a sequence
        torch.Size([2, 4])
    """

    def __init__(self) -> None:
        self._layers: dict[str, LayerHeads] = {}
        self.tokens: list[list[str]] | None = None  # of the last forward, where a tokenizer was given
        self.title: str | None = None

    # What is in it

    def add(self, path: str, record: Record, layer: Layer | None = None) -> None:
        """Take note of one call of a layer.

        Args:
            layer: what it goes by; by default its number among the paths added, where they are one stack.
        """
        known = self._layers.get(path)
        if known is None:
            known = self._layers[path] = LayerHeads(path, layer)
            base, again, _ = path.partition("#")
            if again and base in self._layers:
                self._layers[base].runs_again = True
            if layer is None or again:
                for each, name in names_of(list(self._layers)).items():
                    self._layers[each].layer = name
        known.calls.append(record)

    @property
    def paths(self) -> list[str]:
        """The layers' module paths, in the order in which they first ran."""
        return list(self._layers)

    @property
    def stacks(self) -> dict[str, dict[int, str]]:
        """The layers by stack: paths that differ in numbers only."""
        return stacks(self.paths)

    def __getitem__(self, layer: Any) -> Any:
        """heads[layer]: `LayerHeads`; heads[layer, head]: `Head`.

        Raises:
            ArgumentError: no such layer; a number where there are several stacks.
            IndexError: no such head.
        """
        if isinstance(layer, tuple) and len(layer) == 2:
            return self[layer[0]][layer[1]]
        if not isinstance(layer, str) and not isinstance(layer, bool):
            for each in self._layers.values():
                if each.layer == layer:
                    return each
        return self._layers[resolve(layer, self.paths)]

    def get(self, layer: Layer, default: Any = None) -> Any:
        """heads[layer], or the default where there is no such layer."""
        try:
            return self[layer]
        except (ArgumentError, IndexError):
            return default

    def __iter__(self) -> Iterator[Layer]:
        return (layer.layer for layer in self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, layer: object) -> bool:
        try:
            self[layer]
        except (ArgumentError, IndexError):
            return False
        return True

    def __repr__(self) -> str:
        layers, heads = len(self), sum(len(layer) for layer in self.values())
        return f"Heads({layers} layer{'' if layers == 1 else 's'}, {heads} head{'' if heads == 1 else 's'})"

    # Asking

    def all(self) -> list[Head]:
        """Every head, in order of layers.

        Raises:
            ArgumentError: nothing was watched.
        """
        if not self:
            raise ArgumentError("heads must not be empty: 0 layers; run the model inside the watch block")
        return [head for layer in self._layers.values() for head in layer]

    def find(self, what: str, *, threshold: float | None = None, top: int | None = None) -> list[Head]:
        """The heads that do something, most first.

        Args:
            what: a label ("induction", "previous-token", ...) or any number measured ("entropy", ...).
            threshold: the least score; by default the label's, which also asks for enough queries to tell (as
                `headwise.heads.LABELS` says), and none for a number.
            top: at most so many.

        Raises:
            ArgumentError: an unknown name; a score that was not measured.

        Example:
            >>> import torch, headwise as hw
            >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
            >>> with hw.watch(mha) as heads:
            ...     output, _ = mha(torch.randn(2, 7, 64))
            >>> [head.head for head in heads.find("entropy", top=4)].count(0)
            1
        """
        everyone = self.all()
        known = {entry.name: entry for entry in LABELS}
        measured = dict.fromkeys(name for head in everyone for name in head.values)
        score, least = what, threshold
        if what in known:
            score = known[what].score
            least = known[what].threshold if threshold is None else threshold
        elif what not in measured and what.replace("-", "_") in measured:
            score = what.replace("-", "_")
        if score not in measured:
            if what in known:
                raise ArgumentError(
                    f"{what!r} must have been measured: {score} was not; patterns of tokens need input_ids, "
                    "and for long texts watch(model, patterns=True)"
                )
            raise ArgumentError(
                f"what must be a label or something measured: got {what!r}; "
                f"{nearest(what, [*known, *measured])}"
            )
        if top is not None and top < 1:
            raise ArgumentError(f"top must be at least 1: got {top}; None gives all")
        found = [
            replace(head, score=head.values[score])
            for head in everyone
            if self._has(head, score)
            and (least is None or head.values[score] >= least)
            and not (what in known and threshold is None and score in head.few)
        ]
        found.sort(key=lambda head: -(head.score or 0.0))
        return found if top is None else found[:top]

    def _has(self, head: Head, score: str) -> bool:
        """Whether a head has a score that says something: one that is a number, and not of another text."""
        other_text = score in POSITIONS and self[head.path].kind == "cross"
        return not math.isnan(head.values.get(score, math.nan)) and not other_text

    def table(
        self,
        *,
        sort: str | None = None,
        descending: bool = True,
        top: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Any:
        """A table of heads for the terminal (rich): where, label and score, numbers.

        Args:
            sort: a column to sort by; by default in order of layers.
            descending: largest first.
            top: at most so many rows.
            columns: which numbers.

        Raises:
            ArgumentError: nothing was watched; a column that was not measured.
            ImportError: rich is not installed.
        """
        from ..show.heads_tables import heads_table

        return heads_table(self, sort=sort, descending=descending, top=top, columns=columns)

    def plot(self, layer: Layer | None = None, *, batch: int = 0) -> Figure:
        """The heads of one layer, by default the last, as a figure: its map, or its pooled picture."""
        from ..show.heads_pictures import layer_picture

        return layer_picture(self, self.paths[-1] if layer is None and self else layer or 0, batch=batch)

    def to_pandas(self) -> pandas.DataFrame:
        """A row a head: layer, head, path, label, and every number measured.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ImportError(
                "to_pandas needs pandas; install with: pip install pandas", name="pandas"
            ) from error
        return pandas.DataFrame(
            [
                {
                    "layer": head.layer,
                    "head": head.head,
                    "path": head.path,
                    "label": head.label.name,
                    "label_score": head.label.score,
                    **head.values,
                }
                for head in self.all()
            ]
        )

    def save(self, path: str | os.PathLike[str], *, maps: bool = True) -> None:
        """Write all of it into one safetensors file; `headwise.load_heads` reads it back.

        Args:
            maps: with the maps that were kept: their q and k.

        Raises:
            ArgumentError: nothing was watched; a place that cannot be written to.
            ImportError: safetensors is not installed.
        """
        from .heads_files import save

        save(self, path, maps=maps)
