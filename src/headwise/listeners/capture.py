"""`watch`: what every head of a model does, measured while the model runs, and which tokens it read."""

from __future__ import annotations

import threading
import unicodedata
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..arguments import answering
from ..engines.statistics import RECEIVED, ROW_STATISTICS, STATISTICS
from ..errors import ArgumentError, nearest
from ..heads.collection import Heads
from ..heads.joint_measurement import is_short
from ..heads.layer import Unheard
from ..heads.layer_names import Layer
from ..heads.record import POOLED_QUERIES, Marks, Record, reduce, settle
from ..map import AttentionMap
from ..parallel.local_heads import LocalHeads
from .active import Bypassed, ForwardPass, LayerCall, Listener, Noted, SplitCall, in_backward
from .adapters import attach
from .attachment import Attachment
from .chosen_heads import check_any
from .head_outputs import written_norms

SHORT = 2048  # keys up to which maps are stored by default


class watch(AbstractContextManager[Heads]):  # noqa: N801, a verb: with watch(model)
    """Watch every attention head of a model while it runs.

        with hw.watch(model) as heads:
            model(**inputs)
        heads.table()

    It works with Hugging Face models, `torch.nn.Transformer*`, `torch.nn.MultiheadAttention`, headwise's own
    modules, vision Transformers of timm and torchvision, and all code that calls torch's
    `scaled_dot_product_attention`. An attention layer of another kind raises `AttentionBypassed` with its
    name, and so does a Hugging Face layer with a custom attention function that computes something else (the
    function is run once on small tensors to find out). A layer is measured if headwise can intercept its
    attention and read its weights. If some layers were measured, and another module that may compute
    attention was not, there is a warning, `errors.AttentionUnheard`, and the module is listed in
    `heads.unheard`.

    Inside the block attention runs on headwise's engines, fused and without the T x S matrix (short calls on
    a GPU, and calls with dropout but neither soft cap nor sinks, run on torch's own function); results are
    the same up to rounding. A compiled model runs uncompiled inside the block. A compiled function that calls
    the model stays compiled, but runs the model outside its graph, and raises if it was compiled with
    fullgraph=True. Forwards may run in several threads. Copying or saving the model inside the block gives
    the original, unwatched model. Every forward is measured: long calls at once, short calls together at the
    end of the forward, or when they are first read. For every head, headwise stores its statistics, a pooled
    map, and for texts of up to 2,048 keys the map itself (q and k). After the block, also after an exception,
    the model is exactly as before. Any number of forwards may run in a block, for example prefill and steps
    of generation; means are over all their queries without padding. With activation checkpointing, the
    recomputed forward is not counted again; call backward inside the block. A query that may attend to no
    key, for example at padding, has output 0 inside the block.

    Args:
        model: the model; all modules inside it are watched.
        keep: keep maps: True, False, or "auto", those of at most 2,048 keys and more than one query.
        statistics: names of statistics (see `headwise.AttentionMap.statistics`); None: all row statistics;
            (): none. "received", the weight that each key gets, takes another pass: name it here, or read it
            from a map that was kept.
        pooled: the number of rows and of columns of every head's pooled map; None: no pooled maps.
        patterns: measure patterns during the forward: induction, duplicate tokens, special tokens,
            punctuation, spread, locality, and the weight on the first 128 and last 256 keys. None: later,
            from maps that were kept, when they are first read.
        diversity: also compare heads with each other, on at most 256 queries: see `headwise.diversity`.
        written: also measure what heads write: for every key the norm of its value times the head's part of
            the output projection (`Record.written_norms`), and the share of it that comes from the first key
            and from special tokens (`written_first`, `written_special`), to compare with the weight on them
            (`first`, `special`). Kobayashi 2020. Steps of generation are left out, unless keep=True. For
            ablated heads it is what they would write without the ablation.
        tokenizer: the model's tokenizer, for special tokens, punctuation, and the words in pictures.
        reach: the largest distance that counts as `local`.
        fallback: for layers that compute their own weights: None raises, "eager" reads these weights (the
            model computes them anyway: B x H x T x S numbers per layer) and warns of layers whose weights
            cannot be read, "skip" leaves all these layers out. Layers that are left out are in
            `heads.unheard`.

    Raises:
        ArgumentError: not a module; an unknown statistic, keep, pooled or fallback; inside the block, with
            written=True: a layer whose output projection is unknown, gated heads, or weights without values.
        AttentionBypassed: inside the block: the attention of a layer, or of all layers, was not intercepted.

    Example:
        >>> import torch, headwise as hw
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> with hw.watch(model) as heads:
        ...     output = model(torch.randn(2, 7, 64))
        >>> heads[1].statistics.entropy.shape, heads[1].map.shape
        (torch.Size([4]), torch.Size([2, 4, 7, 7]))
    """

    @answering({})
    def __init__(
        self,
        model: nn.Module,
        *,
        keep: bool | str = "auto",
        statistics: Iterable[str] | str | None = None,
        pooled: int | None = 128,
        patterns: bool | None = None,
        diversity: bool = False,
        written: bool = False,
        tokenizer: Tokenizer | None = None,
        reach: int = 8,
        fallback: str | None = None,
    ) -> None:
        if not isinstance(keep, bool) and keep != "auto":
            raise ArgumentError(f"keep must be True, False or 'auto': got {keep!r}; 'auto' keeps short maps")
        if pooled is not None and (not isinstance(pooled, int) or isinstance(pooled, bool) or pooled < 1):
            raise ArgumentError(
                f"pooled must be a number of cells or None: got {pooled!r}; 128 makes a good picture"
            )
        if reach < 0:
            raise ArgumentError(f"reach must not be negative: got {reach}; 0 is the query's own position")
        names = (statistics,) if isinstance(statistics, str) else statistics
        self.names = tuple(ROW_STATISTICS if names is None else names)
        for name in self.names:
            if name not in STATISTICS:
                raise ArgumentError(
                    f"statistics must be known names: got {name!r}; {nearest(name, STATISTICS)}"
                )
        self.model, self.fallback = model, fallback
        self._listener = _Listener(
            keep=keep, names=self.names, pooled=pooled, patterns=bool(patterns), reach=reach,
            between=("attention", "outputs", "values") if diversity else (),
            tokens=Tokens(model, tokenizer), writer=model if written else None,
        )  # fmt: skip
        self.heads = self._listener.heads
        self._attached = ExitStack()
        self._attachment: Attachment | None = None
        self._depth = self._before = 0
        self._lock = threading.Lock()
        attach(model, self._listener, fallback)  # checks its arguments now; attaching itself waits for `with`

    if not TYPE_CHECKING:  # explains what to use instead to callers who use the block as the heads

        def __getattr__(self, name: str) -> NoReturn:
            message = f"watch has no attribute {name!r}"
            if hasattr(Heads, name):
                message += (
                    ": it is an attribute of heads; write with headwise.watch(model) as heads, and read "
                    f"heads.{name}"
                )
            raise AttributeError(message)

        def __getitem__(self, layer: Layer) -> NoReturn:
            raise ArgumentError(
                f"watch must be entered before its heads are read: got watch(model)[{layer!r}]; write with "
                f"headwise.watch(model) as heads, run the model in it, and read heads[{layer!r}]"
            )

    # Beginning and ending

    def start(self) -> Heads:
        """Start watching without a `with` block; `stop` ends it.

        Keep the object this is called on: if it is deleted, watching ends with a warning.
        """
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                try:
                    attached = attach(self.model, self._listener, self.fallback)
                    self._attachment = self._attached.enter_context(attached)
                except BaseException:
                    self._depth = 0
                    raise
                self._before = self._attachment.forward.number
                self.heads.deferred.layers = self._attachment.names
        return self.heads

    def stop(self) -> Heads:
        """Stop watching and restore the model.

        Raises:
            AttentionBypassed: the model ran, and no attention was intercepted.
        """
        self.__exit__(None, None, None)
        return self.heads

    def __enter__(self) -> Heads:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._depth = max(0, self._depth - 1)
            attachment = self._attachment
            if self._depth or attachment is None:
                return
            self._attachment = None
            try:
                self._attached.__exit__(kind, error, trace)
            finally:
                settle(call for layer in self.heads.values() for call in layer.calls)
        if kind is None:
            ran = attachment.forward.number - self._before
            check_any(self.model, ran, self.heads, self.fallback, attachment.elsewhere)


@dataclass(eq=False)
class _Listener(Listener):
    """The listener of a `watch`, which is a separate object so that a dropped `watch` is noticed."""

    hears_shards = True

    keep: bool | str
    names: tuple[str, ...]
    pooled: int | None
    patterns: bool
    reach: int
    between: tuple[str, ...]
    tokens: Tokens
    writer: nn.Module | None  # the model, if what its heads write is measured

    def __post_init__(self) -> None:
        no_second_pass = self.pooled is None and RECEIVED not in self.names and not self.between
        self.statistics_if_long = _row_statistics(self.names) if no_second_pass else ()
        self.waits = self.writer is None and not self.patterns and not self.between
        self._without_scores = tuple(name for name in self.names if name != "max_logit")
        self.heads = Heads()
        self._read: dict[str, Tensor] | None = None  # tokens of the last call
        self._read_as: tuple[str, torch.Size] | None = None  # kind and sizes of the last call
        self._marks: Marks | None = None  # marks of the last call
        self._named: Marks | None = None  # the last marks whose tokens were named

    def hear(self, call: LayerCall) -> None:
        """Measure a call, or defer it to be measured with others; store nothing that grows with T x S."""
        self.noted = None
        if in_backward():
            return
        split = (
            None  # a call of heads over ranks, each of which measures its heads; not if heads are compared
        )
        if isinstance(call, SplitCall) and self.writer is None and not self.between:
            local = call.local_call.weights
            if not is_short(local.shape, local.device.type == "cpu"):
                split, call = call, call.local_call
        B, H, T, S = shape = call.weights.shape
        if call.weights.ranks is not None and (self.between or self.writer is not None):
            raise ArgumentError(
                f"{'diversity' if self.between else 'written'} must be False if the sequence is sharded "
                f"over ranks: got True with {call.weights.ranks} ranks; measure it in one process"
            )
        # A call without values has weights only, and no scores.
        names, pooled = self.names if call.value is not None else self._without_scores, self.pooled
        # A step of generation keeps numbers only: maps would take memory quadratic in the length.
        decoding = T == 1 and S > 1
        keep = self.keep is True or (self.keep == "auto" and S <= SHORT and not decoding)
        marks = None
        if not decoding:
            if call.tokens is not self._read or (call.kind, shape) != self._read_as:
                self._read, self._read_as = call.tokens, (call.kind, shape)
                self._marks = self.tokens.marks(call)
            marks = self._marks
        if marks is not None and marks is not self._named:
            self._named, self.heads.tokens = marks, self.tokens.names(marks.ids)
        norms = None
        if self.writer is not None and (keep or not decoding):
            norms = written_norms(self.writer, call)
        if decoding and not keep:
            names, pooled = _row_statistics(names), None
        deferred = self.heads.deferred
        if split is None and not self.patterns and norms is None and (decoding or not self.between):
            record = Record((B, H, T, S), call.kind, call.forward.number, marks=marks, reach=self.reach)
            group = deferred.note(call.forward, call.path, record, call.weights, names, pooled, keep)
            if group is not None:
                again = partial(deferred.note_again, group, record, keep)
                self.noted = Noted(call.kind, call.forward, group, again)
                return
        record = reduce(
            call.weights,
            kind=call.kind,
            forward=call.forward.number,
            names=names,
            pooled=pooled,
            reach=self.reach,
            marks=marks,
            with_patterns=self.patterns,
            between=() if decoding else self.between,
            outputs=call.output,
            values=call.value,
            norms=norms,
            keep=keep and split is None,
        )
        if split is not None:
            record = _gathered_record(record, split.local_heads, split.weights.detach() if keep else None)
        deferred.add(call.path, record)

    def miss(self, path: str, kind: str, bypassed: Bypassed) -> None:
        self.heads.miss(Unheard(path, kind, bypassed.softmaxes, bypassed.reason))

    def after(self, forward: ForwardPass) -> None:
        """Measure the calls that were deferred in a forward that is over, or has raised."""
        self._read = self._marks = self.noted = None
        self.heads.deferred.measure(forward)


def _gathered_record(record: Record, local_heads: LocalHeads, weights: AttentionMap | None) -> Record:
    """Return the record of all heads from that of each rank's; weights: the map of all heads, if stored."""
    B, _, T, S = record.shape
    gathered = replace(record, shape=(B, local_heads.total, T, S), map=weights)
    gathered.rows = {name: local_heads.gather(value) for name, value in record.rows.items()}
    gathered.counts = {name: local_heads.gather(value) for name, value in record.counts.items()}
    gathered.large = {
        name: value if name == POOLED_QUERIES else local_heads.gather(value)
        for name, value in record.large.items()
    }
    return gathered


@lru_cache
def _row_statistics(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the names that are row statistics."""
    return tuple(name for name in names if name in ROW_STATISTICS)


# Tokens


FEW_SPECIAL = 4
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


class Tokenizer(Protocol):
    """The interface of a tokenizer; it may also have `unk_token_id` and ids of other roles."""

    @property
    def all_special_ids(self) -> Iterable[int]: ...

    def convert_ids_to_tokens(self, ids: int, /) -> object: ...


class Tokens:
    """Names and kinds of token ids, from a tokenizer or else from the model's config."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self.unknown = _unknown_id(tokenizer)
        # ids that are not text, such as start, end and padding; an unknown word is text
        config = getattr(model, "config", None)
        special = _roles(config) if tokenizer is None else set(tokenizer.all_special_ids) - {self.unknown}
        self.special: list[int] = sorted(special)
        self._named = self._name if tokenizer is None else lru_cache(maxsize=2**16)(self._name)
        self._marks: WeakKeyDictionary[ForwardPass, dict[str, tuple[Tensor, Marks]]] = WeakKeyDictionary()
        self._special_ids: dict[torch.device, Tensor] = {}  # `special` as a tensor

    def marks(self, call: LayerCall) -> Marks | None:
        """Return the marks of the tokens of a call's keys, or None.

        The queries and keys must be one text that was an argument of a module around the layer. The ids are
        copied, once per forward.
        """
        B, _, T, S = call.weights.shape
        local_shape = (B, call.weights.own_keys)  # of a sequence over ranks, this rank's part
        matches = [(name, ids) for name, ids in call.tokens.items() if tuple(ids.shape) == local_shape]
        if call.kind != "self" or T != S or not matches:
            return None
        name, local_ids = matches[0]
        cached = self._marks.setdefault(call.forward, {})
        if name in cached and cached[name][0] is local_ids:
            return cached[name][1]
        ids = call.weights.whole_text(local_ids)
        special = self._is_special(ids) if self.special else None
        punctuation = None
        if self.tokenizer is not None:
            flags = [[is_punctuation(self._named(token)) for token in row] for row in ids.tolist()]
            punctuation = torch.tensor(flags, device=ids.device)
            if special is not None:
                punctuation &= ~special
        unknown = None if self.unknown is None else ids.long() == self.unknown
        marks = Marks(ids.clone(), special, punctuation, unknown)  # a copy, for the caller may change the ids
        cached[name] = local_ids, marks
        return marks

    def _is_special(self, ids: Tensor) -> Tensor:
        """Return which tokens are special, bool like `ids`.

        A few special ids are compared one by one. Copying them to a GPU synchronizes, so more are copied
        once.
        """
        if (
            len(self.special) > FEW_SPECIAL or ids.dtype != torch.int64
        ):  # a special id may overflow a smaller dtype
            if ids.device not in self._special_ids:
                self._special_ids[ids.device] = torch.tensor(self.special, device=ids.device)
            return torch.isin(ids, self._special_ids[ids.device])
        first, *rest = self.special
        is_special = ids == first
        for special in rest:
            is_special |= ids == special
        return is_special

    def names(self, ids: Tensor) -> list[list[str]] | None:
        """Return tokens as text, or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return [[self._named(token) for token in row] for row in ids.tolist()]

    def _name(self, token: int) -> str:
        assert self.tokenizer is not None, "only with a tokenizer"
        return str(self.tokenizer.convert_ids_to_tokens(token))


def _unknown_id(tokenizer: Tokenizer | None) -> int | None:
    """Return the id of unknown words; None if the tokenizer has none, or uses it for another role as well.

    GPT-2's unknown id is also its end of text, and a tokenizer of bytes knows every word.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    return None if unknown in _roles(tokenizer) else unknown


def _roles(source: object) -> set[int]:
    """Return the ids that a tokenizer or config names for a role."""
    ids: set[int] = set()
    for name in SPECIAL:
        value = getattr(source, name, None)
        ids.update([x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int)])
    return ids


def is_punctuation(token: str) -> bool:
    """Return True if a token, as a tokenizer names it, is nothing but marks such as full stops and commas."""
    bare = token.strip("ĠĊ▁# \t\n")
    return bool(bare) and all(unicodedata.category(letter)[0] == "P" for letter in bare)
