"""Hugging Face's masks as rules: what a model's mask function says, without the L x L tensor.

Transformers describes a mask by a predicate of (batch, head, query, key) put together from a few known parts.
Those parts are read back here as a `Mask`; a predicate nobody knows is made dense, inside the memory budget.
Positions there are absolute: query i is q_offset + i, key j is kv_offset + j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import WRAPPER_ASSIGNMENTS, cached_property, update_wrapper
from types import CellType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ... import budget
from ...errors import AttentionBypassed
from ...foreign_masks import AS_GOOD_AS_HIDDEN, from_huggingface
from ...masks import Mask
from ..active import expand_padding, with_padding

Predicate = Callable[..., Any]


@dataclass(eq=False)
class CompactMask:
    """What a mask says, as a model's mask function was asked for it.

    All layers of a forward are handed the same: what is worked out for one of them goes for the others, down
    to the very object, by which calls are known to have the same rules.
    """

    batch: int
    query_len: int
    key_len: int
    query_offset: int
    key_offset: int
    predicate: Predicate
    attention_mask: Tensor | None  # bool [B, positions]
    make_dense: Callable[[], Tensor]
    dtype: torch.dtype  # of the dense tensor
    device: torch.device
    _answers: dict[bool, tuple[Mask, None, int]] = field(default_factory=dict)  # by `itself`
    _counting: tuple[Mask, Tensor, int, Mask] | None = None  # rules, which queries are real, both as one

    def answer(self, itself: bool) -> tuple[Mask, None, int]:
        """What `rules_of` says of it, with tensors of its own."""
        if itself not in self._answers:
            rules, _, used = _compact_rules(self, itself)
            self._answers[itself] = rules.bind(self.batch, 1, self.query_len, used), None, used
        return self._answers[itself]

    def counting(self, rules: Mask, real: Tensor) -> Mask:
        """Of these rules those in which only some queries count, bool [B, T]."""
        if real.is_inference():  # nobody knows whether it is still what it was
            return replace(rules.unbound(), queries=real)
        kept = self._counting
        if kept is None or kept[0] is not rules or kept[1] is not real or kept[2] != real._version:
            joined = replace(rules.unbound(), queries=real)
            bound = joined.bind(real.shape[0], 1, self.query_len, self.answer(False)[2])
            kept = self._counting = rules, real, real._version, bound
        return kept[3]

    @cached_property
    def rules(self) -> Mask | None:
        """What the predicate and the padding come to; None: a predicate of unknown parts."""
        seen = _read(self.predicate, self)
        padding = self.keys_padding
        return seen if seen is None or padding is None else seen & Mask.padding(padding)

    @property
    def shift(self) -> int:
        """How far ahead of where `Mask` has them the queries stand: 0 if the last is beside the last key."""
        return self.query_offset - self.key_offset - (self.key_len - self.query_len)

    @cached_property
    def is_causal(self) -> bool:
        """Whether no query sees a key behind it."""
        right = None if self.rules is None else self.rules.right
        return right is not None and right <= self.shift

    @cached_property
    def keys_padding(self) -> Tensor | None:
        """Which keys are real, bool [B, S]; None: all."""
        return self._padding(self.key_offset, self.key_len)

    @cached_property
    def queries_padding(self) -> Tensor | None:
        """Which queries are real if they are among the keys, bool [B, T]; None: all."""
        return self._padding(self.query_offset, self.query_len)

    def _padding(self, start: int, length: int) -> Tensor | None:
        if self.attention_mask is None:
            return None
        part = self.attention_mask[:, start : start + length].bool()
        part = torch.nn.functional.pad(part, (0, length - part.shape[1]))
        return None if bool(part.all()) else part

    @cached_property
    def dense(self) -> Tensor:
        """The tensor [B, 1, T, S] Transformers would have made, if it fits the memory budget."""
        budget.check(self.shape.numel(), self.device, f"dense mask {list(self.shape)}", "use a shorter text")
        return self.make_dense()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.query_len, self.key_len))


class LazyMask(Tensor):
    """A mask whose values are computed when an operation reads them; to a model it is an ordinary tensor.

    Class, shape, dtype and device are there at once. A mask goes unread from a model's mask function to its
    attention function; a model that does something to it on the way gets the numbers, made on the spot.
    """

    make: Callable[[], Tensor]
    compact: CompactMask | None
    numbers: Tensor | None
    version: int | None

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[], Tensor],
        compact: CompactMask | None = None,
    ) -> LazyMask:
        new: Any = Tensor._make_wrapper_subclass
        made: LazyMask = new(cls, shape, dtype=dtype, device=device)
        made.make, made.compact, made.numbers, made.version = make, compact, None, None
        return made

    def made(self) -> Tensor:
        """The tensor it stands for."""
        if self.numbers is None:
            self.numbers = self.make()
            self.version = None if self.numbers.is_inference() else self.numbers._version
        return self.numbers

    @property
    def meaning(self) -> CompactMask | Tensor:
        """What it says in few words; or the numbers, where somebody may have written to them."""
        numbers = self.numbers
        unwritten = numbers is None or (self.version is not None and self.version == numbers._version)
        return self.compact if self.compact is not None and unwritten else self.made()

    @classmethod
    def __torch_function__(
        cls, func: Predicate, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.contiguous or (func is Tensor.to and _stays(*args, **kwargs)):
            return args[0]
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Predicate, types: object, args: object = (), kwargs: object = None
    ) -> object:
        return func(*_made(args), **_made(kwargs or {}))


# What is known of a tensor without its numbers
ABOUT = {
    getattr(Tensor, name).__get__
    for name in "shape dtype device ndim layout requires_grad is_cuda is_nested grad_fn grad".split()
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}


def _made(given: Any) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_map(as_tensor, given)


def _stays(mask: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return True if `mask.to(...)` is the mask itself."""
    if kwargs.get("copy") or "memory_format" in kwargs:
        return False
    try:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):  # like another tensor
        return False
    return device in (None, mask.device) and dtype in (None, mask.dtype)


def as_tensor(value: Any) -> Any:
    """An ordinary tensor in place of one that stands for it; anything else as it is."""
    return value.made() if isinstance(value, LazyMask) else value


class _Asked(Exception):
    """A mask function asks who sees whom: it is going to make a mask."""


def _ask(*_: object) -> NoReturn:
    raise _Asked


def compact_mask(own: Predicate, **call: Any) -> Tensor | None:
    """What a model's own mask function gives for a call, without the tensor; None where it gives none."""
    from transformers import masking_utils

    if own not in (masking_utils.sdpa_mask, masking_utils.eager_mask) or not call.keys() >= ASKED_WITH:
        return own(**call)
    try:
        return own(**(call | {"mask_function": _ask}))  # all that it can say without making one
    except _Asked:
        pass
    call = {name: _as_now(value) for name, value in call.items()}
    q_length, q_offset = call["q_length"], call.get("q_offset", 0)
    if isinstance(q_length, Tensor):  # an older form of the call: positions instead of a length
        q_offset, q_length = int(q_length[0]), len(q_length)
    is_added = own is masking_utils.eager_mask
    compact = CompactMask(
        call["batch_size"],
        q_length,
        call["kv_length"],
        int(q_offset),
        int(call.get("kv_offset", 0)),
        call.get("mask_function", masking_utils.causal_mask_function),
        call.get("attention_mask"),
        lambda: own(**call),
        call.get("dtype", torch.float32) if is_added else torch.bool,
        torch.device(call.get("device", "cpu")),
    )
    return LazyMask.of(compact.shape, compact.dtype, compact.device, lambda: compact.dense, compact)


ASKED_WITH = {"batch_size", "q_length", "kv_length"}


def _as_now(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """What a mask is asked for with, as it is when it is asked for; the mask may be read later.

    A static cache hands over its own count of tokens, and goes on counting. A predicate holds its tensors in
    its closure, alone or by other predicates.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_as_now(part, around) for part in value)
    if not isinstance(value, FunctionType) or not value.__closure__ or value in around:
        return value
    inside = [cell.cell_contents for cell in value.__closure__]
    copies = [_as_now(part, (*around, value)) for part in inside]
    cells = tuple(map(CellType, copies))
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    return update_wrapper(made, value, (*WRAPPER_ASSIGNMENTS, "__kwdefaults__"))


def _read(predicate: Predicate, of: CompactMask) -> Mask | None:
    """A predicate as rules; None: not one of the known ones."""
    code, cells = getattr(predicate, "__code__", None), getattr(predicate, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    inside = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if getattr(predicate, "__module__", "") != "transformers.masking_utils":
        return None
    shift = of.shift
    match getattr(predicate, "__qualname__", ""):
        case "bidirectional_mask_function":
            return Mask()
        case "causal_mask_function":
            return Mask(right=shift)
        case "sliding_window_overlay.<locals>.inner_mask":
            return Mask(left=inside["sliding_window"] - 1 - shift)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return Mask(left=inside["sliding_window"] - shift, right=inside["sliding_window"] + shift)
        case "padding_mask_function.<locals>.inner_mask":
            return Mask.padding(inside["padding_mask"][:, of.key_offset : of.key_offset + of.key_len].bool())
        case "packed_sequence_mask_function.<locals>.inner_mask":
            return _documents(inside["packed_sequence_mask"], of)
        case "chunked_overlay.<locals>.inner_mask":
            return _chunks(inside["chunk_size"], inside["left_padding"], of)
        case "and_masks.<locals>.and_mask":
            parts = [_read(part, of) for part in inside["mask_functions"]]
            joined: Mask | None = Mask()
            for part in parts:
                joined = None if joined is None or part is None else joined & part
            return joined
    return None


def _documents(ids: Tensor, of: CompactMask) -> Mask:
    keys = ids[:, of.key_offset : of.key_offset + of.key_len]
    queries = ids[:, of.query_offset : of.query_offset + of.query_len]
    return Mask.documents(keys, queries)


def _chunks(size: int, left_padding: Tensor, of: CompactMask) -> Mask:
    """Llama 4: a query sees the keys of its own chunk."""
    first, device = left_padding[:, None], left_padding.device
    keys = torch.arange(of.key_offset, of.key_offset + of.key_len, device=device)
    queries = torch.arange(of.query_offset, of.query_offset + of.query_len, device=device)
    return Mask.documents((keys - first) // size, (queries - first) // size)


def rules_of(
    mask: CompactMask | Tensor, query_len: int, key_len: int, itself: bool, batch: int = 1
) -> tuple[Mask, Tensor | None, int]:
    """(rules, bias, keys in use) of what an attention function was handed.

    A mask that is a tensor was made by the model, 4-D: bool, or added to the scores. `itself`: what is
    padding among the keys is so among the queries. A cache may have places that are not in use yet.
    """
    if isinstance(mask, CompactMask):
        if (mask.query_len, mask.key_len) == (query_len, key_len) and mask.rules is not None:
            return mask.answer(itself)
        if mask.key_len < key_len:
            raise AttentionBypassed(
                f"attention_mask must say who sees every key: it has {mask.key_len} of {key_len}, for this "
                "layer adds keys of its own that headwise knows nothing of; use output_attentions=True"
            )
        mask = mask.dense[..., :key_len]
    if mask.is_floating_point():  # -10000 hides as well as the lowest number does: its weight is 0
        mask = mask.masked_fill(mask <= AS_GOOD_AS_HIDDEN, torch.finfo(mask.dtype).min)
    rules, bias = from_huggingface(mask, query_len=query_len)
    if rules.allowed is not None and rules.allowed.shape[1:3] == (1, 1) and rules.allowed.shape[3] == key_len:
        rules = replace(
            rules, allowed=None, keys=expand_padding(rules.allowed[:, 0, 0], batch)
        )  # it is padding
    if itself and query_len == key_len:
        rules = with_padding(rules, batch)
    return rules, bias, key_len


def _compact_rules(mask: CompactMask, itself: bool) -> tuple[Mask, None, int]:
    rules, used = mask.rules, mask.key_len
    assert rules is not None
    empty = -mask.shift
    if mask.is_causal and empty > 0:  # the places behind the last query are hidden from all: without them
        used = mask.key_len - empty  # the last query stands beside the last key again
        rules = _cut(rules, used, empty)
    if itself and mask.queries_padding is not None:
        rules = rules & Mask(queries=mask.queries_padding)
    return rules, None, used


def _cut(rules: Mask, key_len: int, empty: int) -> Mask:
    """The rules for the first key_len keys; positions of queries move back by as many as go."""
    changed: dict[str, Any] = {"right": None if rules.right is None else rules.right + empty}
    if rules.left is not None:
        changed["left"] = rules.left - empty
    if rules.keys is not None:
        changed["keys"] = rules.keys[:, :key_len]
    if rules.key_ids is not None:
        changed["key_ids"] = rules.key_ids[:, :key_len]
    return replace(rules, **changed)
