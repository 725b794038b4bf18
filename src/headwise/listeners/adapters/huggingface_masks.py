"""Hugging Face's masks as rules: what a model's mask function describes, without the L x L tensor.

Transformers describes a mask by a predicate of (batch, head, query, key) made of a few known parts. These are
converted to a `Mask` here; an unknown predicate is made dense, within the memory budget. Positions are
absolute: query i is q_offset + i, key j is kv_offset + j.
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
    """A mask as a model's mask function was called for it.

    All layers of a forward get the same object. Its rules are computed once, and their identity tells that
    calls have the same rules.
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
    _bound: dict[bool, tuple[Mask, None, int]] = field(default_factory=dict)  # by `itself`
    _counting: tuple[Mask, Tensor, int, Mask] | None = (
        None  # rules, real queries and their version, both combined
    )

    def bound_rules(self, itself: bool) -> tuple[Mask, None, int]:
        """Return what `rules_of` does, with copies of the tensors."""
        if itself not in self._bound:
            rules, _, used = _compact_rules(self, itself)
            self._bound[itself] = rules.bind(self.batch, 1, self.query_len, used), None, used
        return self._bound[itself]

    def counting(self, rules: Mask, real: Tensor) -> Mask:
        """Return the rules in which only the real queries count, bool [B, T]."""
        if real.is_inference():  # it has no version, so that changes go unnoticed
            return replace(rules.unbound(), queries=real)
        cached = self._counting
        if cached is None or cached[0] is not rules or cached[1] is not real or cached[2] != real._version:
            joined = replace(rules.unbound(), queries=real)
            bound = joined.bind(real.shape[0], 1, self.query_len, self.bound_rules(False)[2])
            cached = self._counting = rules, real, real._version, bound
        return cached[3]

    @cached_property
    def rules(self) -> Mask | None:
        """The rules of the predicate and the padding; None: the predicate has unknown parts."""
        rules = _rules_of_predicate(self.predicate, self)
        padding = self.keys_padding
        return rules if rules is None or padding is None else rules & Mask.padding(padding)

    @property
    def shift(self) -> int:
        """Offset of queries from where `Mask` places them: 0 if the last query is at the last key."""
        return self.query_offset - self.key_offset - (self.key_len - self.query_len)

    @cached_property
    def is_causal(self) -> bool:
        """True if no query sees a later key."""
        right = None if self.rules is None else self.rules.right
        return right is not None and right <= self.shift

    @cached_property
    def keys_padding(self) -> Tensor | None:
        """Which keys are real, bool [B, S]; None: all."""
        return self._padding(self.key_offset, self.key_len)

    @cached_property
    def queries_padding(self) -> Tensor | None:
        """Which queries are real if they are also the keys, bool [B, T]; None: all."""
        return self._padding(self.query_offset, self.query_len)

    def _padding(self, start: int, length: int) -> Tensor | None:
        """Return which positions from `start` are real, bool [B, length]; None: all."""
        if self.attention_mask is None:
            return None
        part = self.attention_mask[:, start : start + length].bool()
        part = torch.nn.functional.pad(part, (0, length - part.shape[1]))
        return None if bool(part.all()) else part

    @cached_property
    def dense(self) -> Tensor:
        """The tensor [B, 1, T, S] that Transformers would make, if it fits the memory budget."""
        budget.check(self.shape.numel(), self.device, f"dense mask {list(self.shape)}", "use a shorter text")
        return self.make_dense()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.query_len, self.key_len))


class LazyMask(Tensor):
    """A mask whose values are computed when an operation reads them; to a model it is an ordinary tensor.

    Class, shape, dtype and device are known at once. Most models pass a mask unread from their mask function
    to their attention function; in a model that reads it, the values are computed at that moment.
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
        mask: LazyMask = new(cls, shape, dtype=dtype, device=device)
        mask.make, mask.compact, mask.numbers, mask.version = make, compact, None, None
        return mask

    def computed(self) -> Tensor:
        """Return the mask as an ordinary tensor."""
        if self.numbers is None:
            self.numbers = self.make()
            self.version = None if self.numbers.is_inference() else self.numbers._version
        return self.numbers

    @property
    def meaning(self) -> CompactMask | Tensor:
        """The compact mask; or the tensor, if it may have been written to."""
        numbers = self.numbers
        unwritten = numbers is None or (self.version is not None and self.version == numbers._version)
        return self.compact if self.compact is not None and unwritten else self.computed()

    @classmethod
    def __torch_function__(
        cls, func: Predicate, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.contiguous or (func is Tensor.to and _is_no_op(*args, **kwargs)):
            return args[0]
        return func(*_as_tensors(args), **_as_tensors(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Predicate, types: object, args: object = (), kwargs: object = None
    ) -> object:
        return func(*_as_tensors(args), **_as_tensors(kwargs or {}))


# Attributes of a tensor that do not depend on its values
METADATA = {
    getattr(Tensor, name).__get__
    for name in "shape dtype device ndim layout requires_grad is_cuda is_nested grad_fn grad".split()
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}


def _as_tensors(values: Any) -> Any:
    """Return nested arguments with ordinary tensors in place of lazy masks."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map(as_tensor, values)


def _is_no_op(mask: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return True if `mask.to(...)` is the mask itself."""
    if kwargs.get("copy") or "memory_format" in kwargs:
        return False
    try:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):  # like another tensor
        return False
    return device in (None, mask.device) and dtype in (None, mask.dtype)


def as_tensor(value: Any) -> Any:
    """Return a lazy mask as an ordinary tensor; any other value unchanged."""
    return value.computed() if isinstance(value, LazyMask) else value


class _PredicateCalled(Exception):
    """A mask function called the predicate, so that it is about to make a mask."""


def _raise_called(*_: object) -> NoReturn:
    raise _PredicateCalled


def compact_mask(function: Predicate, **call: Any) -> Tensor | None:
    """Return the mask that a model's mask function makes, without its values; None if it makes none."""
    from transformers import masking_utils

    if function not in (masking_utils.sdpa_mask, masking_utils.eager_mask) or not call.keys() >= REQUIRED:
        return function(**call)
    try:
        return function(**(call | {"mask_function": _raise_called}))  # its result if it makes no mask
    except _PredicateCalled:
        pass
    call = {name: _snapshot(value) for name, value in call.items()}
    q_length, q_offset = call["q_length"], call.get("q_offset", 0)
    if isinstance(q_length, Tensor):  # an older form of the call: positions instead of a length
        q_offset, q_length = int(q_length[0]), len(q_length)
    is_added = function is masking_utils.eager_mask
    compact = CompactMask(
        call["batch_size"],
        q_length,
        call["kv_length"],
        int(q_offset),
        int(call.get("kv_offset", 0)),
        call.get("mask_function", masking_utils.causal_mask_function),
        call.get("attention_mask"),
        lambda: function(**call),
        call.get("dtype", torch.float32) if is_added else torch.bool,
        torch.device(call.get("device", "cpu")),
    )
    return LazyMask.of(compact.shape, compact.dtype, compact.device, lambda: compact.dense, compact)


REQUIRED = {"batch_size", "q_length", "kv_length"}


def _snapshot(value: Any, parents: tuple[Any, ...] = ()) -> Any:
    """Return a copy of an argument of a mask function, for the mask may be read later.

    A static cache passes its counter of tokens, which changes later. A predicate has its tensors in its
    closure, directly or in other predicates.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_snapshot(part, parents) for part in value)
    if not isinstance(value, FunctionType) or not value.__closure__ or value in parents:
        return value
    contents = [cell.cell_contents for cell in value.__closure__]
    copies = [_snapshot(part, (*parents, value)) for part in contents]
    cells = tuple(map(CellType, copies))
    copied = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    return update_wrapper(copied, value, (*WRAPPER_ASSIGNMENTS, "__kwdefaults__"))


def _rules_of_predicate(predicate: Predicate, of: CompactMask) -> Mask | None:
    """Return the rules of a predicate; None if it is unknown."""
    code, cells = getattr(predicate, "__code__", None), getattr(predicate, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    contents = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if getattr(predicate, "__module__", "") != "transformers.masking_utils":
        return None
    shift = of.shift
    match getattr(predicate, "__qualname__", ""):
        case "bidirectional_mask_function":
            return Mask()
        case "causal_mask_function":
            return Mask(right=shift)
        case "sliding_window_overlay.<locals>.inner_mask":
            return Mask(left=contents["sliding_window"] - 1 - shift)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return Mask(left=contents["sliding_window"] - shift, right=contents["sliding_window"] + shift)
        case "padding_mask_function.<locals>.inner_mask":
            return Mask.padding(
                contents["padding_mask"][:, of.key_offset : of.key_offset + of.key_len].bool()
            )
        case "packed_sequence_mask_function.<locals>.inner_mask":
            return _documents(contents["packed_sequence_mask"], of)
        case "chunked_overlay.<locals>.inner_mask":
            return _chunks(contents["chunk_size"], contents["left_padding"], of)
        case "and_masks.<locals>.and_mask":
            parts = [_rules_of_predicate(part, of) for part in contents["mask_functions"]]
            joined: Mask | None = Mask()
            for part in parts:
                joined = None if joined is None or part is None else joined & part
            return joined
    return None


def _documents(ids: Tensor, of: CompactMask) -> Mask:
    """Return the rules of packed documents, by the document of each position."""
    keys = ids[:, of.key_offset : of.key_offset + of.key_len]
    queries = ids[:, of.query_offset : of.query_offset + of.query_len]
    return Mask.documents(keys, queries)


def _chunks(size: int, left_padding: Tensor, of: CompactMask) -> Mask:
    """Return the rules of Llama 4, where a query sees the keys of its chunk."""
    first, device = left_padding[:, None], left_padding.device
    keys = torch.arange(of.key_offset, of.key_offset + of.key_len, device=device)
    queries = torch.arange(of.query_offset, of.query_offset + of.query_len, device=device)
    return Mask.documents((keys - first) // size, (queries - first) // size)


def rules_of(
    mask: CompactMask | Tensor, query_len: int, key_len: int, itself: bool, batch: int = 1
) -> tuple[Mask, Tensor | None, int]:
    """Return rules, bias and the number of keys in use of the mask passed to an attention function.

    A mask that is a tensor was made by the model, 4-D: bool, or added to the scores. `itself`: the padding of
    keys is that of queries. A cache may have places that are not in use yet.
    """
    if isinstance(mask, CompactMask):
        if (mask.query_len, mask.key_len) == (query_len, key_len) and mask.rules is not None:
            return mask.bound_rules(itself)
        if mask.key_len < key_len:
            raise AttentionBypassed(
                f"attention_mask must cover every key: it has {mask.key_len} of {key_len}, since this "
                "layer adds keys of its own, which headwise does not know; use output_attentions=True"
            )
        mask = mask.dense[..., :key_len]
    if mask.is_floating_point():  # -10000 hides a key like the lowest number: its weight is 0
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
    """Return what `rules_of` does for a compact mask."""
    rules, used = mask.rules, mask.key_len
    assert rules is not None
    empty = -mask.shift
    if mask.is_causal and empty > 0:  # keys after the last query are hidden from all, and left out
        used = mask.key_len - empty  # the last query is at the last key again
        rules = _cut(rules, used, empty)
    if itself and mask.queries_padding is not None:
        rules = rules & Mask(queries=mask.queries_padding)
    return rules, None, used


def _cut(rules: Mask, key_len: int, empty: int) -> Mask:
    """Return the rules for the first key_len keys; queries move back by the number of keys removed."""
    changed: dict[str, Any] = {"right": None if rules.right is None else rules.right + empty}
    if rules.left is not None:
        changed["left"] = rules.left - empty
    if rules.keys is not None:
        changed["keys"] = rules.keys[:, :key_len]
    if rules.key_ids is not None:
        changed["key_ids"] = rules.key_ids[:, :key_len]
    return replace(rules, **changed)
