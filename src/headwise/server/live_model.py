"""A model that is run again for each text of a page, and the readings that the page looks at.

`LiveModel.answer` runs in one thread. A reading keeps q and k of its layers; a map is computed when the page
asks for it. Readings are kept until a number or the memory limit is reached, the last one in any case.

Letters: T query_len, H num_heads, D channels of a head, V words or classes.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from .. import budget
from ..engines.scores import Scores
from ..errors import ArgumentError, HeadwiseError
from ..heads.collection import Heads
from ..heads.joint_measurement import MOST_WEIGHTS, joined_maps
from ..heads.layer_names import path_in_words
from ..heads.record import NORMS
from ..listeners.ablation import scaled_heads
from ..listeners.active import LayerCall, Listener
from ..listeners.adapters import attach
from ..listeners.capture import watch
from ..listeners.effects import check_eval_mode
from ..listeners.head_outputs import written_norms
from ..listeners.model_outputs import CallShape
from ..show.heads_page import heads_data, layers_data
from ..show.offline_pages import LEADING, as_bytes, image_data, levels, levels_of_heads
from ..show.page_readings import (
    EXACT,
    Reading,
    Texts,
    View,
    call_sizes,
    cells_of,
    distances_of,
    flips,
    outputs_of_queries,
    readings_of,
    region_cells,
    strongest_pairs,
    written_cells,
)
from .model_inputs import ImageInput, ModelInput, Prepared, TextInput
from .predictions import Predictor
from .protocol import Changes, Distances, Maps, OfHead, Progress, Read, Refusal, Reply, Request

KEPT_READINGS = 12
KEPT_CLIENTS = 1000
REGION = 512  # cells a side
ALL_ON = 3  # predictions shown of the model with all heads on
SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class StoredReading:
    """One text or image that the model has read.

    Attributes:
        heads: as `headwise.watch` measured them.
        layers: the view of each layer of the page; None: it did not run.
        parts: what else a layer computed, by path.
        factors: of heads whose output was scaled, by (layer, head).
        ids: token ids.
        size: bytes of q, k and outputs.
        note: what was not measured.
    """

    heads: Heads
    reading: Reading
    layers: list[View | None]
    parts: dict[str, LayerParts]
    factors: dict[tuple[int, int], float]
    ids: list[int]
    size: int
    note: str


@dataclass(frozen=True, eq=False)
class LayerParts:
    """What is kept of a call of a layer beside its map.

    Attributes:
        norms: what heads write per key, ||v W_O||, [1, H, S]; None: the projection is unknown.
        output: of the heads before W_O, [1, H, T, D], of a short text.
    """

    norms: Tensor | None
    output: Tensor | None


class LiveModel:
    """Runs a model for a page, keeps its last readings, and answers the page's requests.

    Args:
        model: any that `headwise.watch` can watch, in eval mode.
        tokenizer: the model's tokenizer, or a function that turns an image (PIL) into the model's inputs, as
            an image processor of transformers does.
        title: what the page calls the model.
        example: the text that is read first.
        max_tokens: longer texts are cut.
        memory: bytes for readings; None: the memory budget.
        seconds: the time limit of one reading.

    Raises:
        ArgumentError: a model in training mode; a tokenizer that is neither; the model cannot read the
            example.
        AttentionBypassed: no attention of the model can be intercepted.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        title: str,
        *,
        example: str | None = None,
        max_tokens: int = 4096,
        memory: int | None = None,
        seconds: float = SECONDS,
    ) -> None:
        if not seconds > 0:
            raise ArgumentError(f"seconds must be greater than 0: got {seconds}; 60 is usual")
        check_eval_mode(model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ArgumentError(
                f"model must be an encoder or a decoder: got {type(model).__name__}, which is both; return "
                "model.get_encoder()"
            )
        self.model, self.title, self.seconds = model, title, seconds
        self.input: ModelInput = (
            TextInput(model, tokenizer, max_tokens, example)
            if hasattr(tokenizer, "convert_ids_to_tokens")
            else ImageInput(model, tokenizer)
        )
        self.predictor = Predictor(model, self.input)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.memory = budget.bytes_allowed(self.device) if memory is None else memory
        self._names = (f"{secrets.token_hex(8)}.{number}" for number in count())  # never used again
        self._stored: OrderedDict[str, StoredReading] = OrderedDict()
        self._newest: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._lock = threading.Lock()
        self._progress: tuple[str, int] = ("", 0)
        self._bytes_per_token = 0.0
        self._paths: list[str] = []
        self.layers: list[dict[str, Any]] = []
        self.first = self._read(Read("", 0, text=self.input.example), lambda: False).header
        self.first_heads = self._stored[self.first["reading"]].heads
        self.first_reading = self._stored[self.first["reading"]].reading

    @property
    def last_heads(self) -> Heads:
        """Return the heads of the last reading."""
        return self._last.heads

    # Requests

    def arrive(self, request: Request) -> Reply | None:
        """Note a request when it arrives, from any thread; return its reply if it needs no model."""
        with self._lock:
            if isinstance(request, Read):
                place = request.client, request.slot
                self._newest[place] = max(request.number, self._newest.pop(place, 0))
                while len(self._newest) > KEPT_CLIENTS:
                    self._newest.popitem(last=False)
            elif isinstance(request, Progress):
                client, done = self._progress
                mine = client == request.client
                return Reply({"done": done if mine else 0, "of": len(self.layers) if mine else 0})
        return None

    def answer(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Reply:
        """Return the reply to a request.

        Args:
            cancelled: True once nobody waits for the reply any more; a forward then ends at its next layer.

        Raises:
            Refusal: with what the page shows.
        """
        try:
            if isinstance(request, Read):
                return self._read(request, cancelled)
            if isinstance(request, Maps):
                return self._maps(self._reading(request.reading), request.heads, request.measure)
            if isinstance(request, OfHead):
                return self._of_head(request)
            if isinstance(request, Distances):
                stored = self._reading(request.reading)
                view, path = self._layer(stored, request.layer)
                outputs = self._outputs(stored, view, path)
                return Reply(distances_of(view, stored.reading.heads[path], outputs))
            if isinstance(request, Changes):
                return self._changes(*map(self._reading, request.readings))
            return self.arrive(request) or Reply({})
        except HeadwiseError as error:
            raise Refusal("refused", str(error)) from error
        except torch.OutOfMemoryError as error:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise Refusal(
                "failed",
                f"{self.device} ran out of memory; shorten the text",
            ) from error
        except Refusal:
            raise
        except Exception as error:  # of the user's model
            reason = str(error).strip().partition("\n")[0]
            raise Refusal("failed", f"the model failed: {type(error).__name__}: {reason:.500}") from error

    # Reading

    def _read(self, request: Read, cancelled: Callable[[], bool]) -> Reply:
        began = perf_counter()
        check_eval_mode(self.model)  # a notebook may have changed it
        prepared = self.input.prepare(request)
        self._check_memory(prepared)
        factors = {(self._place_of(layer), head): factor for (layer, head), factor in request.factors.items()}
        stop = _Stop(self, request, cancelled, monotonic() + self.seconds)
        before: Tensor | None = None
        if factors:  # measured each time: the weights may have changed since
            stop.keeps = False
            with torch.no_grad(), self._running(request, stop), attach(self.model, stop, "eager"):
                output = self.model(**prepared.inputs)
            stop.keeps = True
            before = self.predictor.shares(prepared, output, stop.calls)
        with torch.no_grad(), self._running(request, stop):
            stored, output = self._measured(request, prepared, factors, stop)
        shares = self.predictor.shares(prepared, output, stop.calls)
        name = next(self._names)
        self._keep(name, stored)
        tokens = prepared.tokens or max(view.lengths[1] for view in stored.layers if view is not None)
        texts: Texts = {}
        maps_sent = [place for place in request.maps if _has_exact_map(stored, *place)]
        maps = self._maps(stored, maps_sent, "weights")
        return Reply(
            {
                "reading": name,
                "text": self.predictor.whole_text(request.text, prepared),
                "tokens": tokens,
                "prompt": prepared.prompt or tokens,
                "all_tokens": prepared.all_tokens or tokens,
                "heads": self._heads_data(stored.reading),
                "calls": [
                    None if view is None else self._call_data(stored, view, path, prepared, texts)
                    for view, path in zip(stored.layers, self._paths, strict=True)
                ],
                "image": self._image(prepared, stored),
                "texts": [list(names) for names in texts],
                "predictions": self.predictor.predictions(prepared, shares, before),
                "before": None
                if before is None
                else self.predictor.predictions(prepared, before, None, most=ALL_ON),
                "note": stored.note,
                "problem": self.predictor.problem,
                "maps": [
                    {"layer": layer, "head": head} | size
                    for (layer, head), size in zip(maps_sent, maps.header["maps"], strict=True)
                ],
                "milliseconds": round(1000 * (perf_counter() - began), 1),
            },
            maps.array or None,
        )

    def _heads_data(self, reading: Reading) -> list[dict[str, Any]]:
        """Return the heads' numbers; layers are counted as on the first text, also where some did not run."""
        own = [self._paths.index(path) for path in reading.heads.paths]
        return [row | {"layer": own[row["layer"]]} for row in heads_data(reading)]

    @contextmanager
    def _running(self, request: Read, stop: _Stop) -> Iterator[None]:
        """Report progress while the model runs, and end it where nobody waits any more."""
        stop.calls, stop.parts, stop.done = [], {}, 0
        with self._lock:
            self._progress = request.client, 0
        try:
            yield
        finally:
            with self._lock:
                self._progress = "", 0

    def _measured(
        self, request: Read, prepared: Prepared, factors: Mapping[tuple[str, int], float], stop: _Stop
    ) -> tuple[StoredReading, object]:
        """Run the model once, watched; return what is kept, and the model's output."""
        with ExitStack() as stack:
            stack.enter_context(scaled_heads(self.model, factors) if factors else nullcontext())
            stack.enter_context(attach(self.model, stop, "eager"))  # hears the outputs as they were changed
            heads = stack.enter_context(
                watch(
                    self.model,
                    tokenizer=self.input.tokenizer,
                    keep=True,
                    fallback="eager",
                )
            )
            output = self.model(**prepared.inputs)
        heads.title = self.title
        if prepared.names is not None:
            heads.tokens = [prepared.names]
        self._check_layers(heads)
        note = self._measure_patterns(heads, stop)
        (reading,) = readings_of(heads, 0)
        if not self._paths:
            self._paths, self.layers = list(reading.heads.paths), layers_data(reading)
        by_path = dict(zip(reading.heads.paths, reading.layers, strict=True))
        layers = [by_path.get(path) for path in self._paths]
        size = _bytes_of(heads, stop.parts)
        if prepared.tokens:
            self._bytes_per_token = max(self._bytes_per_token, size / prepared.tokens)
        stored = StoredReading(heads, reading, layers, stop.parts, request.factors, prepared.ids, size, note)
        return stored, output

    def _check_layers(self, heads: Heads) -> None:
        """Raise `ArgumentError` for layers that attend in windows, or that the page does not have."""
        for path, layer in zip(heads.paths, heads.values(), strict=True):
            batch = layer.calls[-1].shape[0]
            if batch != 1:
                raise ArgumentError(
                    f"model must attend over the whole input: {path_in_words(path)} attends in {batch} "
                    "windows; use headwise.watch, and heads.to_html(batch=0) for one of them"
                )
            if self._paths and path not in self._paths:
                raise ArgumentError(
                    f"text must run the layers of the first text: {path_in_words(path)} did not run there; "
                    "start with this text"
                )

    def _measure_patterns(self, heads: Heads, stop: _Stop) -> str:
        """Measure induction and other patterns, short calls together; return a note on what is left out."""
        records = [record for layer in heads.values() for record in layer.calls]
        for joined in joined_maps(records, MOST_WEIGHTS):
            joined.measure_patterns()
        note = ""
        for record in records:
            _, H, T, S = record.shape
            if self.device.type == "cpu" and H * T * S > MOST_WEIGHTS:  # seconds a layer
                record.take_patterns({}, {})
                most = int((MOST_WEIGHTS / H) ** 0.5)
                note = f"On a CPU, induction and other patterns are measured for up to {most:,} tokens."
            stop.check()
            record.measure_patterns()
        return note

    def _check_memory(self, prepared: Prepared) -> None:
        """Raise `ArgumentError` if q and k of a text would not fit the memory limit."""
        needed = int(prepared.tokens * self._bytes_per_token)
        if needed > self.memory:
            raise ArgumentError(
                f"text must fit the memory for readings: {prepared.tokens:,} tokens need "
                f"{budget.readable(needed)} > {budget.readable(self.memory)}; shorten the text, or start "
                f'with memory="{budget.readable(needed)}"'
            )

    def _keep(self, name: str, stored: StoredReading) -> None:
        """Keep a reading, and as many of those before as fit; two in any case, to compare them."""
        self._stored[name] = self._last = stored
        while len(self._stored) > 2 and (
            len(self._stored) > KEPT_READINGS
            or sum(reading.size for reading in self._stored.values()) > self.memory
        ):
            self._stored.popitem(last=False)

    def _path_of(self, layer: int) -> str:
        if layer >= len(self._paths):
            raise ArgumentError(f"layer must be one of {len(self._paths)}: got {layer}; count layers from 0")
        return self._paths[layer]

    def _place_of(self, layer: int) -> str:
        """Return the path that means this layer alone: of one that runs again, "path#0" is its first run."""
        self._path_of(layer)
        return str(self.layers[layer]["path"])

    # Parts of a reading

    def _call_data(
        self, stored: StoredReading, view: View, path: str, prepared: Prepared, texts: Texts
    ) -> dict[str, Any]:
        steps = None
        if (prepared.tokens, prepared.tokens) == view.lengths and prepared.prompt < prepared.tokens:
            steps = list(range(prepared.prompt, prepared.tokens + 1))  # the model wrote the last tokens
        exact = view.is_exact(EXACT)
        has_map = view.calls[-1].map is not None
        return call_sizes(view, EXACT, texts) | {
            "steps": steps,
            "has_written": has_map and path in stored.parts and stored.parts[path].norms is not None,
            "has_output": exact and path in stored.parts and stored.parts[path].output is not None,
            "has_regions": not exact and has_map and len(view.calls) == 1,
        }

    def _image(self, prepared: Prepared, stored: StoredReading) -> dict[str, Any] | None:
        """Return the image as the model read it, if its patches can be placed among the tokens."""
        if prepared.pixels is None:
            return None
        tokens = max((view.lengths[1] for view in stored.layers if view is not None), default=0)
        patches = patches_of(prepared.pixels.shape[0], prepared.pixels.shape[1], tokens)
        return None if patches is None else image_data(prepared.pixels, patches, 1, tokens)

    def _reading(self, name: str) -> StoredReading:
        stored = self._stored.get(name)
        if stored is None:
            raise Refusal("gone", "this text is no longer kept; it is read again")
        self._stored.move_to_end(name)
        return stored

    def _layer(self, stored: StoredReading, layer: int) -> tuple[View, str]:
        path = self._path_of(layer)
        view = stored.layers[layer]
        if view is None:
            raise ArgumentError(f"layer must have run on this text: layer {layer} did not; choose another")
        return view, path

    def _maps(self, stored: StoredReading, heads: Sequence[tuple[int, int]], measure: str) -> Reply:
        """Return the cells of heads in order; those of a layer are computed together."""
        by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            by_layer.setdefault(layer, []).append(head)
        arrays: dict[tuple[int, int], tuple[tuple[int, int], bytes]] = {}
        for layer, some in by_layer.items():
            view, path = self._layer(stored, layer)
            for head in some:
                _check_head(view, layer, head)
            size = view.size(EXACT)
            if measure == "written":
                cells = self._written(stored, view, path, layer, some, size)
            else:
                cells = cells_of(view, some, *size)
            shape = (cells.shape[1], cells.shape[2])
            own = zip(some, levels_of_heads(cells), strict=True)
            arrays |= {(layer, head): (shape, array) for head, array in own}
        maps = [arrays[place] for place in heads]
        sizes = [{"rows": rows, "columns": columns, "bytes": len(array)} for (rows, columns), array in maps]
        return Reply({"maps": sizes}, b"".join(array for _, array in maps))

    def _written(
        self,
        stored: StoredReading,
        view: View,
        path: str,
        layer: int,
        heads: list[int],
        size: tuple[int, int],
    ) -> Tensor:
        """Return weights times norms of what heads write, [h, rows, columns]."""
        parts = stored.parts.get(path)
        if parts is None or parts.norms is None:
            raise ArgumentError(
                f"measure must be weights for layer {layer}: got 'written'; its output projection is unknown"
            )
        record = view.calls[-1]
        if record.written_norms is None:
            norms = parts.norms.clone()
            for (changed, head), factor in stored.factors.items():
                if changed == layer:
                    norms[:, head] *= abs(factor)
            record.large[NORMS] = norms
        written = written_cells(view, heads, *size)
        if written is None:
            raise ArgumentError(f"norms must be finite: those of layer {layer} are not; choose weights")
        return written

    def _of_head(self, request: OfHead) -> Reply:
        stored, head = self._reading(request.reading), request.head
        view, path = self._layer(stored, request.layer)
        _check_head(view, request.layer, head)
        if request.part == "pairs":
            return Reply({"pairs": strongest_pairs(view, head)[: request.most]})
        if request.part == "output":
            outputs = self._outputs(stored, view, path)
            if outputs is None:
                raise ArgumentError(
                    f"output must be of at most {EXACT} tokens: this text has {view.lengths[0]}; shorten it"
                )
            own = outputs[head]
            return Reply({"rows": own.shape[0], "columns": own.shape[1]}, as_bytes(own.half()))
        cells = self._region(view, request)
        return Reply({"rows": cells.shape[0], "columns": cells.shape[1]}, levels(cells))

    def _region(self, view: View, request: OfHead) -> Tensor:
        """Return the cells of a part of a map; ranges end where the text ends."""
        if view.calls[0].map is None or len(view.calls) > 1:
            raise ArgumentError(
                f"region must be of a map that was kept: layer {request.layer} kept none; shorten the text"
            )
        ranges: list[slice] = []
        for name, (start, end), length in zip(
            ("queries", "keys"), (request.queries, request.keys), view.lengths, strict=True
        ):
            if start >= length:
                raise ArgumentError(
                    f"{name} must begin within {length} positions: got {start}; reload the page"
                )
            ranges.append(slice(start, min(end, length)))
        queries, keys = ranges
        return region_cells(view, request.head, queries, keys, REGION)

    def _outputs(self, stored: StoredReading, view: View, path: str) -> Tensor | None:
        """Return the outputs of a layer's heads, [H, T, D], or None if they were not kept."""
        parts = stored.parts.get(path)
        if parts is None or parts.output is None or not view.is_exact(EXACT):
            return None
        return outputs_of_queries(view, stored.reading.heads[path], parts.output)

    def _changes(self, before: StoredReading, after: StoredReading) -> Reply:
        """Return two readings compared token by token, or why they are not."""
        compared = flips([[before.reading], [after.reading]], EXACT)
        if compared:
            keys = ("words", "layers", "heads")
            return Reply({"flip": {key: compared[0][key] for key in keys}, "reason": ""})
        is_long = max(len(before.ids), len(after.ids)) > EXACT
        reason = "same" if before.ids == after.ids else "long" if is_long else "different"
        return Reply({"flip": None, "reason": reason})


class _Stop(Listener):
    """Counts the layers that have run, and ends a forward that nobody waits for or that takes too long."""

    def __init__(
        self, live: LiveModel, request: Read, cancelled: Callable[[], bool], deadline: float
    ) -> None:
        self.live, self.request, self.cancelled, self.deadline = live, request, cancelled, deadline
        self.calls: list[CallShape] = []
        self.parts: dict[str, LayerParts] = {}
        self.done = 0
        self.keeps = True  # False: norms and outputs of this forward are not needed

    def check(self) -> None:
        """Raise `Refusal` if nobody waits for the reading any more, or its time is over."""
        live, request = self.live, self.request
        with live._lock:
            newest = live._newest.get((request.client, request.slot), 0)
        if newest > request.number or self.cancelled():
            raise Refusal("superseded", "a newer text is read")
        if monotonic() > self.deadline:
            raise Refusal(
                "refused",
                f"a reading must take at most {live.seconds:g} seconds: {self.done} of {len(live.layers)} "
                "layers were done; shorten the text, or start with a larger time limit",
            )

    def hear(self, call: LayerCall) -> None:
        with self.live._lock:
            self.done += 1
            self.live._progress = self.request.client, min(self.done, max(1, len(self.live.layers)))
        self.check()
        B, _, T, _ = call.weights.shape
        self.calls.append((call.kind, B, T, call.weights.mask.counted(T)))
        if not self.keeps:
            return
        try:
            norms = written_norms(self.live.model, call)
        except ArgumentError:  # gated heads, or a projection that is not known
            norms = None
        short = call.output is not None and T <= EXACT
        output = call.output.detach().clone() if call.output is not None and short else None
        self.parts[call.path] = LayerParts(norms, output)


def _has_exact_map(stored: StoredReading, layer: int, head: int) -> bool:
    view = stored.layers[layer] if layer < len(stored.layers) else None
    return view is not None and head in view.heads and view.is_exact(EXACT)


def _check_head(view: View, layer: int, head: int) -> None:
    if head not in view.heads:
        raise ArgumentError(
            f"head must be one of the {len(view.heads)} of layer {layer}: got {head}; count heads from 0"
        )


def patches_of(height: int, width: int, tokens: int) -> tuple[int, int] | None:
    """Return rows and columns of square patches of an image, with few tokens before them; None: none fit.

    Example:
        >>> patches_of(224, 224, 197), patches_of(16, 64, 17), patches_of(30, 50, 12)
        ((14, 14), (2, 8), None)
    """
    for first in range(LEADING + 1):
        for rows in range(1, tokens - first + 1):
            columns = (tokens - first) // rows
            fits = rows * columns == tokens - first and height % rows == 0 and width % columns == 0
            if fits and height // rows == width // columns:
                return rows, columns
    return None


def _bytes_of(heads: Heads, parts: Mapping[str, LayerParts]) -> int:
    """Return the bytes of what a reading keeps: tensors of its maps, norms, and outputs of heads."""
    tensors = [x for part in parts.values() for x in (part.norms, part.output)]
    for layer in heads.values():
        for record in layer.calls:
            if record.map is None:
                continue
            scores, lse, _ = record.map.parts()
            tensors += [scores.q, scores.k] if isinstance(scores, Scores) else [scores.weights]
            tensors += [lse, record.map.bias, record.map.relative, record.map.mask.allowed]
    storages = (x.untyped_storage() for x in tensors if x is not None)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
