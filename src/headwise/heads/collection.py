"""`Heads`: what every head of a model did, layer by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch

from ..errors import ArgumentError, nearest, needed
from . import heads_files
from .joint_measurement import DeferredCalls
from .layer import ENTRIES, POSITIONS, Head, LayerHeads, Unheard
from .layer_names import ByLayer, Layer, names_of, path_in_words, stacks
from .record import Marks, Record

if TYPE_CHECKING:
    import numpy
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table
    from torch import Tensor, nn

    from .roles import Roles
    from .text_changes import Changes


class ShownTable(Protocol):
    """A table that can be printed, in a terminal and in a notebook."""

    @property
    def table(self) -> Table: ...

    def __rich__(self) -> Table: ...


class PageSource(Protocol):
    """Something that returns data for a page, such as the result of `headwise.effects`."""

    def to_page(self, heads: Heads, batch: int | None = None) -> dict[str, Any]: ...


class HeadsInTraining(Protocol):
    """Heads at checkpoints of their training, as `headwise.models.Specialisation` holds them."""

    @property
    def statistics(self) -> dict[str, Tensor]: ...

    @property
    def title(self) -> str: ...


class Heads(ByLayer[LayerHeads]):
    """Every head that was watched, by layer: its module path, or its number if there is one stack.

    Attributes:
        unheard: the layers that compute attention, or may compute it, and were not measured. Each is an
            `Unheard`: the module's path, the name of its class, how many softmaxes ran in it, and why its
            weights cannot be read.

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
        self.deferred = DeferredCalls(self)
        super().__init__({})
        self.tokens: list[list[str]] | None = None  # of the last forward, if there is a tokenizer
        self.title: str | None = None
        self.unheard: list[Unheard] = []

    @property
    def _values(self) -> dict[str, LayerHeads]:
        """The layers by path; deferred calls are measured first."""
        self.deferred.settle()
        values: dict[str, LayerHeads] = self.__dict__["_values"]
        return values

    @_values.setter
    def _values(self, values: dict[str, LayerHeads]) -> None:
        self.__dict__["_values"] = values

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, "_values": self._values}
        del state["deferred"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.deferred = DeferredCalls(self)

    # Adding calls

    def add(self, path: str, record: Record, layer: Layer | None = None) -> None:
        """Record one call of a layer.

        Args:
            layer: its name or number. By default layers are numbered in the order in which they are added, if
                all paths are of one stack.
        """
        self.deferred.settle()
        self.take(path, record, layer)

    def take(self, path: str, record: Record, layer: Layer | None = None) -> None:
        """Add one call without measuring deferred calls first."""
        values: dict[str, LayerHeads] = self.__dict__["_values"]
        heads = values.get(path)
        if heads is None:
            heads = values[path] = LayerHeads(path, layer)
            heads._before_reading = self.deferred.settle
            self._names[path] = heads.layer
            base, visit, _ = path.partition("#")
            if visit and base in values:
                values[base].runs_again = True
            if layer is None or visit:
                self._names = names_of(list(values))
                for other, name in self._names.items():
                    values[other].layer = name
        heads.take(record)

    def miss(self, unheard: Unheard) -> None:
        """Record a layer whose attention was not measured in a forward."""
        for index, entry in enumerate(self.unheard):
            if entry.path == unheard.path:
                total, reason = entry.softmaxes + unheard.softmaxes, entry.reason or unheard.reason
                self.unheard[index] = replace(entry, softmaxes=total, reason=reason)
                return
        self.unheard.append(unheard)

    @property
    def stacks(self) -> dict[str, dict[int, str]]:
        """The layers by stack: paths of a stack differ only in numbers."""
        return stacks(self.paths)

    @overload
    def __getitem__(self, layer: Layer) -> LayerHeads: ...

    @overload
    def __getitem__(self, layer: tuple[Layer, int]) -> Head: ...

    def __getitem__(self, layer: Layer | tuple[Layer, int]) -> LayerHeads | Head:
        """Return `LayerHeads` for heads[layer], `Head` for heads[layer, head].

        Raises:
            ArgumentError: no such layer; a number where there are several stacks.
            IndexError: no such head.
        """
        if isinstance(layer, tuple) and len(layer) == 2:
            return self[layer[0]][layer[1]]
        return super().__getitem__(layer)

    def __repr__(self) -> str:
        layers, heads = len(self), sum(len(layer) for layer in self.values())
        text = f"{layers} layer{'' if layers == 1 else 's'}, {heads} head{'' if heads == 1 else 's'}"
        missed = len(self.unheard)
        more = f"; {missed} layer{'' if missed == 1 else 's'} not measured" if missed else ""
        return f"Heads({text}{more})"

    # Reading

    def all(self) -> list[Head]:
        """Return every head, in order of layers.

        Raises:
            ArgumentError: nothing was watched.
        """
        if not self:
            raise ArgumentError("heads must not be empty: 0 layers; run the model inside the watch block")
        return [head for layer in self.values() for head in layer]

    def chosen(self, which: Sequence[tuple[Layer, int]] | None = None) -> list[Head]:
        """Return the heads named by (layer, head), each once, in order of layers; None returns all.

        Raises:
            ArgumentError: nothing was watched; an empty list; no such layer or head; not a pair.

        Example:
            >>> import torch, headwise as hw
            >>> mha = hw.MultiHeadAttention(64, 4)
            >>> with hw.watch(mha) as heads:
            ...     output, _ = mha(torch.randn(2, 7, 64))
            >>> [head.head for head in heads.chosen([(0, -1), (0, 1)])]
            [1, 3]
        """
        all_heads = self.all()
        if which is None:
            return all_heads
        if isinstance(which, (str, bytes)) or not isinstance(which, Sequence) or not which:
            raise ArgumentError(
                f"chosen must be pairs of layer and head: got {which!r}; give [(0, 3)], or None for all"
            )
        wanted = set()
        for pair in which:
            if isinstance(pair, str) or not isinstance(pair, Sequence | Head) or len(pair) != 2:
                raise ArgumentError(f"chosen must be pairs of layer and head: got {pair!r}; give [(0, 3)]")
            name, number = pair
            layer = self[name]
            if type(number) is not int or not -len(layer) <= number < len(layer):
                raise ArgumentError(
                    f"chosen must name heads that {path_in_words(layer.place)} has: got head {number!r} of "
                    f"{len(layer)}; give 0{f' to {len(layer) - 1}' if len(layer) > 1 else ''}"
                )
            wanted.add((layer.place, number % len(layer)))
        return [head for head in all_heads if (head.path, head.head) in wanted]

    def words(self, call: Record, batch: int = 0) -> list[str] | None:
        """Return the tokens of a call's keys (`heads.tokens`); None if it may have read another text.

        The queries of the call are the last tokens of the same text. If token ids are known, a call belongs
        to the text with the same ids, not to one of the same length: an encoder and a decoder, or two
        forwards, may read different texts of the same length.

        Args:
            call: one of a layer's calls.
            batch: which sequence.
        """
        if call.kind != "self" or self.tokens is None or not -len(self.tokens) <= batch < len(self.tokens):
            return None
        tokens, marks = self.tokens[batch], self._marks_of_tokens()
        if len(tokens) != call.shape[3]:
            return None
        if marks is None or marks is call.marks:
            return tokens
        is_same = call.marks is not None and torch.equal(call.marks.ids[batch], marks.ids[batch])
        return tokens if is_same else None

    def _marks_of_tokens(self) -> Marks | None:
        """Return the marks of the text that `tokens` names: the last text with known ids, or None."""
        calls = [call for layer in self.values() for call in layer.calls if call.marks is not None]
        return max(reversed(calls), key=lambda call: call.forward).marks if calls else None

    def find(self, name: str, *, threshold: float | None = None, top: int | None = None) -> list[Head]:
        """Return the heads that have a label, or all heads by a statistic; the largest number first.

        Args:
            name: a label ("induction", "previous-token", ...) or any number measured ("entropy", ...).
            threshold: the smallest score to return. By default it is the label's own threshold, and the label
                also needs enough queries (see `headwise.heads.LABELS`); for a statistic there is no default
                threshold.
            top: the largest number of heads to return.

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
        all_heads = self.all()
        measured = dict.fromkeys(statistic for head in all_heads for statistic in head.values)
        entry, score = ENTRIES.get(name), name
        if entry is not None:
            score = entry.score
        elif name not in measured:
            score = name.replace("-", "_")
        by_label = entry is not None and threshold is None
        least = entry.threshold if entry is not None and threshold is None else threshold
        if score not in measured:
            if entry is not None:
                raise ArgumentError(
                    f"name must be a label that was measured: got {name!r}, whose score {score!r} was not; "
                    "pass input_ids to the model, and for long texts use watch(model, patterns=True)"
                )
            raise ArgumentError(
                f"name must be a label or a statistic that was measured: got {name!r}; "
                f"{nearest(name, [*ENTRIES, *measured])}"
            )
        if top is not None and top < 1:
            raise ArgumentError(f"top must be at least 1: got {top}; None gives all")
        matches = [
            replace(head, score=head.values[score])
            for head in all_heads
            if self._has_score(head, score)
            and (least is None or head.values[score] >= least)
            and not (by_label and score in head.few)
        ]
        matches.sort(key=lambda head: -(head.score or 0.0))
        return matches if top is None else matches[:top]

    def _has_score(self, head: Head, score: str) -> bool:
        """Return True if a head has a score that is not NaN and not of positions in another text."""
        other_text = score in POSITIONS and self[head.path].kind == "cross"
        return not math.isnan(head.values.get(score, math.nan)) and not other_text

    def table(
        self,
        *,
        sort: str | None = None,
        descending: bool = True,
        top: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> ShownTable:
        """Return a table of heads for the terminal (rich): layer, head, label, score and statistics.

        Args:
            sort: a column to sort by; by default in order of layers.
            descending: largest first.
            top: the largest number of rows.
            columns: which numbers.

        Raises:
            ArgumentError: nothing was watched; a column that was not measured.
            PackageMissing: rich is not installed.
        """
        from ..show.heads_tables import heads_table

        return heads_table(self, sort=sort, descending=descending, top=top, columns=columns)

    def plot(
        self,
        layer: Layer | None = None,
        head: int | None = None,
        *,
        batch: int = 0,
        query_tokens: Sequence[str] | None = None,
        key_tokens: Sequence[str] | None = None,
        written: bool = False,
        text: str | None = None,
        chosen: Sequence[tuple[Layer, int]] | None = None,
    ) -> Figure:
        """Draw heads as heat maps, a matplotlib figure: a grid of all heads, one layer, or one head, large.

        Args:
            layer: draw only the heads of this layer; with `head`, only this head.
            batch: which sequence.
            query_tokens: names of the queries instead of `heads.tokens`, for example in cross-attention.
            key_tokens: names of the keys, likewise.
            written: draw weights times the norm of what the head writes for that key (Kobayashi 2020); for a
                layer or a head this is drawn beside the weights. Needs `watch(model, written=True)`.
            text: what the model read, for the title.
            chosen: (layer, head) of the heads in the grid; None draws all.

        Raises:
            ArgumentError: nothing was watched; no such layer or head; a head without its layer; `chosen`
                together with `layer`; neither a map nor a pooled map was kept; written=True without measured
                norms.
            ShapeError: names that do not fit.
            IndexError: no such sequence.
            PackageMissing: matplotlib is not installed.

        Example:
            >>> import torch, headwise as hw
            >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
            >>> with hw.watch(mha) as heads:
            ...     output, _ = mha(torch.randn(2, 7, 64))
            >>> heads.plot().savefig("all.png"); heads.plot(0, 3).savefig("one.png")    # doctest: +SKIP
        """
        from ..show.heads_pictures import head_picture, layer_picture, model_picture

        names = {"query_tokens": query_tokens, "key_tokens": key_tokens}
        if layer is None:
            if head is not None:
                raise ArgumentError(f"head must be given with its layer: got head={head!r}; give layer=, too")
            return model_picture(self, batch=batch, text=text, chosen=chosen, written=written, **names)
        if chosen is not None:
            raise ArgumentError(
                f"chosen must not be combined with layer: got {len(chosen)} heads and layer={layer!r}; "
                "give only one of them"
            )
        if head is None:
            return layer_picture(self, layer, batch=batch, written=written, text=text, **names)
        return head_picture(self, layer, head, batch=batch, written=written, text=text, **names)

    def changes(self, other: Heads, *, batch: int = 0) -> Changes:
        """Return how much each head's weights changed on another text, the largest change first.

        A token of one text and a token of the other are partners if the texts are the same there, or if a run
        of tokens was replaced by a run of the same length ("he" by "she"). A head's distance is a mean of
        Jensen-Shannon divergences, in nats from 0 to log 2: for every query that has a partner, between its
        row and its partner's row. Rows are compared as distributions over the keys that have a partner, with
        all other weight added up in one more entry. In a causal model the rows before the first difference
        are equal and left out of the mean. If tokens are unknown, as in images, equal positions are partners.

        Args:
            other: heads of the same model on the other text.
            batch: which sequence of both batches.

        Raises:
            ArgumentError: nothing was watched; another model; maps that were not kept; no token in common.
            IndexError: no such sequence.

        Example:
            >>> import torch, headwise as hw
            >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
            >>> x = torch.randn(1, 7, 64)
            >>> with hw.watch(mha) as before:
            ...     output, _ = mha(x)
            >>> with hw.watch(mha) as after:
            ...     output, _ = mha(torch.cat([x[:, :6], -x[:, 6:]], dim=1))
            >>> changed = before.changes(after)
            >>> len(changed), changed.all[0].distance > 0
            (4, True)
        """
        from .text_changes import changes

        return changes(self, other, batch=batch)

    def plot_layers(
        self, statistics: Sequence[str] | str = ("entropy", "distance", "first", "previous")
    ) -> Figure:
        """Draw statistics by layer: a dot per head, in the colour of its label, and the mean of the layer.

        Args:
            statistics: the names of measured statistics; each gets a panel.

        Raises:
            ArgumentError: nothing was watched; a number that was not measured.
            PackageMissing: matplotlib is not installed.

        Example:
            >>> import torch, headwise as hw
            >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
            >>> with hw.watch(mha, written=True) as heads:
            ...     output, _ = mha(torch.randn(2, 7, 64))
            >>> len(heads.plot_layers(["first", "written_first"]).axes)
            2
        """
        from ..show.layers_pictures import layers_picture

        return layers_picture(self, statistics)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with a row per head: layer, head, path, label and all measured numbers.

        Raises:
            PackageMissing: pandas is not installed.
        """
        with needed("pandas", "to_pandas needs pandas"):
            import pandas
        rows = [
            {"layer": head.layer, "head": head.head, "path": head.path, "label": head.label.name}
            | {"label_score": head.label.score, **head.values}
            for head in self.all()
        ]
        return pandas.DataFrame(rows)

    def to_json(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        chosen: Sequence[tuple[Layer, int]] | None = None,
        text: str | None = None,
        roles: Roles | None = None,
    ) -> dict[str, Any]:
        """Return everything measured as plain data, and write it to a JSON file if a path is passed.

        While "format" has the same value, the keys stay the same: format, title, text, tokens, layers (layer,
        path, kind, num_heads, queries, keys), heads (layer, head, path, label, score, sentence, roles,
        numbers), labels (label, heads, sentence), sentences. A number that is not finite is None.

        Args:
            chosen: (layer, head) of the heads to include; None: all.
            text: what the model read.
            roles: a result of `headwise.roles`; each head is then shown with its roles.

        Raises:
            ArgumentError: nothing was watched; no such head; a path that does not end in .json or cannot be
                written to.
        """
        from ..show.heads_tables import as_data, check_json_path, save_json

        if path is not None:
            check_json_path(path)
        data = as_data(self, chosen=chosen, text=text, roles=roles)
        if path is not None:
            save_json(data, path)
        return data

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        batch: int | None = None,
        chosen: Sequence[tuple[Layer, int]] | None = None,
        text: str | Sequence[str] | None = None,
        roles: Roles | None = None,
        beside: Heads | Sequence[Heads] = (),
        finer: Sequence[tuple[Layer, int]] | None = None,
        outputs: ByLayer[Tensor] | None = None,
        effects: PageSource | None = None,
        corpus: PageSource | None = None,
        training: HeadsInTraining | None = None,
        alive: tuple[nn.Module, Any, str] | None = None,
        image: Tensor | numpy.ndarray[Any, Any] | None = None,
        patches: tuple[int, int] | None = None,
        query_tokens: Sequence[str] | None = None,
        key_tokens: Sequence[str] | None = None,
    ) -> Path:
        """Return an interactive page of all heads as one HTML file: maps, labels, statistics.

        The page opens from disk and loads nothing. Texts and names are escaped. If writing fails, no partial
        file is left. Weights are stored with an error of at most 1% or 1e-4, whichever is larger. Maps of up
        to 256 queries and keys have every weight. Longer maps have 128 x 128 cells, and fewer cells if all
        maps together would have more than 2^24 cells (about 12 MB). Padding is left out. Steps of generation
        are joined into one map if they were kept (`watch(model, keep=True)`).

        Args:
            batch: which sequence of the last forward; None: all, and the reader of the page chooses one.
            chosen: (layer, head) of the heads to show, also of `beside` if that is the same model; None shows
                all.
            text: what the model read: one text per sequence, then those of `beside`.
            roles: a result of `headwise.roles`; each head is then shown with its roles.
            beside: other heads to compare with, of this model on another text or of another model. If
                `changes` can compare the two, the page shows which heads changed, in at most 8 such
                comparisons.
            finer: (layer, head) of heads that get 512 x 512 cells and their 64 largest weights, if maps are
                pooled. By default the strongest head of each label, at most 8, if maps were kept.
            outputs: the heads' outputs from `headwise.collect` in the same run; shown if maps are not pooled.
            effects: a result of `headwise.effects`: what switching off each head does.
            corpus: a result of `headwise.survey`: heads over many documents; the page is then coloured by it.
            training: a result of `headwise.models.specialisation`: the heads at checkpoints of the training.
            alive: a result of `headwise.models.load`: a model that runs inside the page, on any text that the
                reader types.
            image: the image that the model read in patches, uint8 or floats from 0 to 1, [H, W] or [H, W, 3].
            patches: (rows, columns) of patches in the image; by default a square.
            query_tokens: names of the queries of one sequence, and key_tokens: names of the keys, instead of
                `tokens`; for example in cross-attention.

        Raises:
            ArgumentError: nothing was watched; no such head; neither maps nor pooled maps were kept; a wrong
                number of texts or names; `finer` for a head without a map; an image for several sequences,
                with values outside 0 to 1, or with another number of patches than tokens; a model that the
                page cannot run; `training` or `alive` of a model with other layers or heads; a path that does
                not end in .html or cannot be written to.
            ShapeError: a number of names that fits no layer; outputs of another run; an image of the wrong
                shape.
            IndexError: no such sequence.

        Example:
            >>> import torch, headwise as hw
            >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
            >>> with hw.watch(mha) as heads:
            ...     output, _ = mha(torch.randn(2, 7, 64))
            >>> heads.to_html("heads.html")    # doctest: +SKIP
        """
        from ..show.heads_page import EXAMPLE, heads_page
        from ..show.offline_pages import check_page_path, save_page

        check_page_path(path, EXAMPLE)
        page = heads_page(
            self, batch=batch, chosen=chosen, text=text, roles=roles, beside=beside, finer=finer,
            outputs=outputs, effects=effects, corpus=corpus, training=training, alive=alive, image=image,
            patches=patches, query_tokens=query_tokens, key_tokens=key_tokens,
        )  # fmt: skip
        return save_page(page, path, EXAMPLE)

    def _repr_html_(self) -> str | None:
        from ..show.heads_page import in_notebook

        return in_notebook(self)

    def save(self, path: str | os.PathLike[str], *, maps: bool = True) -> None:
        """Write all heads into one safetensors file; `headwise.load_heads` reads it back.

        Args:
            maps: also save the maps that were kept, as their q and k.

        Raises:
            ArgumentError: nothing was watched; a path that cannot be written to.
            BudgetExceeded: maps made from weights are saved as weights, and these would not fit.
            PackageMissing: safetensors is not installed.
        """
        if not self:
            raise ArgumentError("heads must not be empty: 0 layers; run the model inside the watch block")
        heads_files.save(self, path, maps=maps)


def load_heads(path: str | os.PathLike[str]) -> Heads:
    """Load heads from a file of `Heads.save`, into CPU memory.

    Raises:
        ArgumentError: no such file, or one that `Heads.save` did not write.
        PackageMissing: safetensors is not installed.

    Example:
        >>> import torch, headwise as hw
        >>> mha = hw.MultiHeadAttention(64, 4)
        >>> with hw.watch(mha) as heads:
        ...     output, _ = mha(torch.randn(2, 7, 64))
        >>> heads.save("heads.safetensors"); hw.load_heads("heads.safetensors")  # doctest: +SKIP
        Heads(1 layer, 4 heads)
    """
    heads = Heads()
    heads_files.fill(heads, path)
    return heads
