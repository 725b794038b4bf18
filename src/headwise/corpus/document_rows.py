"""Measurement of one document: a row for the document, and a row for each head.

A document is read alone, from its beginning, up to the limits of the model and `max_tokens`. Its rows do not
depend on other documents or processes.

    moved     how far a query's weights are from the head's mean over the document, 0 to 1: half the summed
              differences of five shares of weight, which go to the first key, to the key before the query, to
              the query itself, to the next key, and to all others
    place     the query with the largest `moved`, of those that see at least 8 keys
    key       the key that gets most of that query's weight; `weight`: how much

Letters: H heads, T query_len, S key_len, C kinds of keys.
"""

from __future__ import annotations

import gc
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engines.statistics import ROW_STATISTICS
from ..errors import ArgumentError, AttentionBypassed, PackageMissing, VersionUnsupported
from ..heads.joint_measurement import JoinedMaps, joined_maps
from ..heads.record import PATTERNS
from ..listeners.capture import SHORT, watch
from ..models.pretrained import MOST_TOKENS, Pretrained, read
from .documents import FOR_GOOD, RETRY, Document, first_line, shown

if TYPE_CHECKING:
    from ..heads.collection import Heads
    from ..models.pretrained import Reading

# Columns of the two tables, and their types as pyarrow calls them.
DOCUMENT = {
    "document": "string", "path": "string", "number": "int64", "position": "int64", "characters": "int64",
    "tokens": "int64", "found": "int64", "digest": "string", "error": "string", "failure": "string",
}  # fmt: skip
PLACE = {
    "place": "int32", "token": "string", "moved": "float", "key": "int32", "key_token": "string",
    "weight": "float",
}  # fmt: skip
STATISTICS = (*ROW_STATISTICS, *PATTERNS)  # every number of a head
HEAD = {
    "document": "string", "position": "int64", "layer": "int32", "head": "int32", "label": "string",
    "score": "float", **dict.fromkeys(STATISTICS, "float"), **PLACE,
}  # fmt: skip
FEWEST_KEYS = 8  # that a query must see to be a place
LONGEST_ERROR = 500  # letters
# Messages of RuntimeErrors of torch for failures of memory and devices.
PASSING = re.compile(
    r"out of memory|can't allocate memory|not enough memory|\b(CUDA|HIP|XPU|MPS|cuDNN|cuBLAS) error|"
    r"(CUDNN|CUBLAS)_STATUS"
)
GENERAL_ERRORS = (AttentionBypassed, PackageMissing, VersionUnsupported)  # every document would raise them


@dataclass(frozen=True)
class Options:
    """The options that change the numbers of a survey."""

    field: str
    max_tokens: int | None
    threads: int


@dataclass
class Rows:
    """Rows of the two tables of a block, as dictionaries."""

    documents: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def _with_onednn() -> Iterator[None]:
    """Enable oneDNN inside the context.

    torch disables it for the rest of a process after a product in half precision that it does not support,
    and products are then rounded differently.
    """
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.enabled or torch.backends.flags_frozen()
    if not before:
        mkldnn.enabled = True
    try:
        yield
    finally:
        if not before:
            mkldnn.enabled = False


class Measure:
    """Measures documents one by one.

    Args:
        trained: a model in eval mode, and its tokenizer.
        max_tokens: the largest number of tokens of a document; None: 4,096, or the model's limit.
    """

    def __init__(self, trained: Pretrained, *, max_tokens: int | None = None) -> None:
        self.trained, self.most = trained, max_tokens or MOST_TOKENS
        first = next(trained.model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device

    def add(self, document: Document, rows: Rows) -> None:
        """Measure a document and add its rows; an error with it is recorded in its row.

        A failure that may pass is tried a second time, with memory freed and one layer at a time, which
        changes no number. If it fails again, its row says so (`failure`).

        Raises:
            ArgumentError: a device that does not work any more.
            AttentionBypassed, PackageMissing, VersionUnsupported: errors that every document would raise.
        """
        row: dict[str, Any] = dict.fromkeys(DOCUMENT)
        row |= {
            "document": shown(document.name),
            "path": shown(document.path),
            "number": document.number,
            "position": document.position,
        }
        rows.documents.append(row)
        if document.text is None:
            row |= {"error": _shortened(document.error or "it has no text"), "failure": document.failure}
            return
        raw = document.text.encode("utf-8", "surrogatepass")
        row["characters"] = len(document.text)
        row["digest"] = hashlib.blake2b(raw, digest_size=16).hexdigest()
        for sparing in (False, True):
            try:
                with _with_onednn():
                    reading = read(document.text, self.trained.model, self.trained.tokenizer, most=self.most)
                    mine = self._heads(row, reading, self.watched(reading), sparing=sparing)
            except GENERAL_ERRORS:
                raise
            except Exception as error:
                row |= {"error": _shortened(_describe(error)), "failure": failure_of(error)}
            else:
                row |= {"tokens": len(reading.tokens), "found": reading.total, "error": None, "failure": None}
                rows.heads += mine
                return
            if row["failure"] != RETRY:
                return
            # not inside `except`, since the error keeps local variables alive
            self._free_memory(row)

    def _free_memory(self, row: Mapping[str, Any]) -> None:
        """Free memory on the device, and check that it still works."""
        gc.collect()
        if self.device.type == "cpu":
            return
        try:
            torch.accelerator.empty_cache()
            torch.zeros(1, device=self.device).add_(1).cpu()
        except torch.OutOfMemoryError:
            return  # other processes use the memory; the device works
        except RuntimeError as error:
            raise ArgumentError(
                f"device must keep working: {self.device} failed at document {row['document']!r} "
                f"({_describe(error)}); finished documents are saved; run the same command again"
            ) from error

    def watched(self, reading: Reading, **options: Any) -> Heads:
        """Run the model on a document and return what its heads did."""
        inputs = {name: value.to(self.device) for name, value in reading.inputs.items()}
        is_long = len(reading.tokens) > SHORT
        defaults: dict[str, Any] = {"keep": not is_long, "pooled": None, "patterns": is_long}
        with (
            torch.no_grad(),
            watch(
                self.trained.model, tokenizer=self.trained.tokenizer, fallback="eager", **(defaults | options)
            ) as heads,
        ):
            self.trained.model(**inputs)
        return heads

    def _heads(
        self, row: Mapping[str, Any], reading: Reading, heads: Heads, *, sparing: bool = False
    ) -> list[dict[str, Any]]:
        """Return the rows of all heads of a document; `sparing`: with less memory."""
        places: dict[int, list[dict[str, Any]]] = {}  # by id of the record
        calls = [call for layer in heads.values() for call in layer.calls]
        singles = chain.from_iterable(joined_maps([call]) for call in calls)
        for joined in singles if sparing else joined_maps(calls):
            joined.measure_patterns()
            places |= places_of(joined, reading.tokens)
        rows = []
        for layer in heads.values():
            layer_places = places.get(id(layer.calls[-1])) if len(layer.calls) == 1 else None
            for head in layer:
                numbers = {name: finite_or_none(head.values.get(name)) for name in STATISTICS}
                place = layer_places[head.head] if layer_places is not None else dict.fromkeys(PLACE)
                rows.append(
                    {"document": row["document"], "position": row["position"], "layer": head.layer}
                    | {"head": head.head, "label": head.label.name, "score": finite_or_none(head.label.score)}
                    | numbers
                    | place
                )
        return rows


def finite_or_none(value: float | None) -> float | None:
    """Return None for NaN: readers of Parquet leave None out of means, but not NaN."""
    return None if value is None or not math.isfinite(value) else value


def places_of(joined: JoinedMaps, tokens: list[str]) -> dict[int, list[dict[str, Any]]]:
    """Return the place of every head of these calls, by the call's id; {} for cross-attention."""
    first = joined.records[0]
    assert first.map is not None
    _, H, T, S = joined.weights.shape
    if first.kind != "self" or T != S or len(tokens) != S:
        return {}
    is_candidate = (first.map.visible()[0].amin(0) >= FEWEST_KEYS).cpu()  # [T]
    is_candidate[:2] = False  # without a key before, or with the first key before
    rows = is_candidate.nonzero()[:, 0]
    if not len(rows):
        return {}
    weights = joined.weights[0].cpu()  # [H, T, S]
    moved = _moved(weights, rows).numpy()  # [H, t]
    places: list[dict[str, Any]] = []
    for head in range(H):
        at = int(rows[int(moved[head].argmax())])
        row = weights[head, at].numpy()
        key, moved_most = int(row.argmax()), float(moved[head].max())
        if not math.isfinite(moved_most):
            places.append(dict.fromkeys(PLACE))
            continue
        place = (at, shown(tokens[at]), moved_most, key, shown(tokens[key]), float(row[key]))
        places.append(dict(zip(PLACE, place, strict=True)))
    heads = iter(places)
    return {id(call): [next(heads) for _ in range(call.shape[1])] for call in joined.records}


def _moved(weights: Tensor, rows: Tensor) -> Tensor:
    """Return how much the weights of each query differ from the mean over these queries, [H, t]."""
    after = torch.cat([weights.diagonal(1, 1, 2), weights.new_zeros(len(weights), 1)], 1)
    before = torch.cat([weights.new_zeros(len(weights), 1), weights.diagonal(-1, 1, 2)], 1)
    kinds = torch.stack([weights[:, :, 0], before, weights.diagonal(0, 1, 2), after], -1)  # [H, T, C]
    kinds = kinds[:, rows].double()
    kinds = torch.cat([kinds, 1 - kinds.sum(-1, keepdim=True)], -1)
    return (kinds - kinds.mean(1, keepdim=True)).abs().sum(-1) / 2


def failure_of(error: Exception) -> str:
    """Return RETRY for a failure of memory, a device or a disk, which may pass; else FOR_GOOD."""
    passes = isinstance(error, MemoryError | OSError) or (
        isinstance(error, RuntimeError) and PASSING.search(str(error)) is not None
    )
    return RETRY if passes else FOR_GOOD


def _describe(error: BaseException) -> str:
    """Return an error as one line of text."""
    line = first_line(error)
    return line if isinstance(error, ArgumentError) else f"{type(error).__name__}: {line}"


def _shortened(error: str) -> str:
    """Return the beginning of an error message, with printable characters."""
    return shown(error)[:LONGEST_ERROR]


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """Return a hash of a model's class, config, weights and buffers, and of its tokenizer."""
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(f"{type(model).__module__}.{type(model).__qualname__} {_settings(model)}".encode())
    tensors: Iterable[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, value in tensors:
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        data = value.detach().cpu().contiguous()
        hashed.update(data.flatten().view(torch.uint8).numpy().data if data.numel() else b"")
    hashed.update(_vocabulary(tokenizer).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def _settings(model: nn.Module) -> str:
    """Return the settings of a config that change results: not folders, names and versions."""
    config = getattr(model, "config", None)
    if config is None:
        return ""
    if not hasattr(config, "to_dict"):
        return repr(config)
    settings: Mapping[str, object] = config.to_dict()
    excluded = ("transformers_version", "name_or_path")  # private settings are excluded, too
    names = [name for name in settings if not name.startswith("_") and name not in excluded]
    return repr(sorted((name, repr(settings[name])) for name in names))


def _vocabulary(tokenizer: Any) -> str:
    """Return a tokenizer as JSON if it is of the library tokenizers; else its ids of a test sentence."""
    if hasattr(tokenizer, "to_json"):
        return str(tokenizer.to_json())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    text = "The cat's 1,024 naïve words – 猫, emoji 😀 and\nlines."
    return repr((type(tokenizer).__qualname__, list(tokenizer(text)["input_ids"])))
