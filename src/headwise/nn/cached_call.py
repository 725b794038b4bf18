"""One call of a `MultiHeadAttention` over a `KVCache` or a `Memory` that earlier calls filled.

A plain step of one token is computed by `plain_step`, every other call by `attend`.

Nothing is added to a cache before the call has been checked, so a refused call can be made again.

A step inside `torch.compile` is one graph for every step, whatever the cache holds (`attend_in_graph`): where
the step stands is a tensor on the device, new columns are written there, all of the cache's columns are
attended to, and a mask made of that tensor hides those that are not there yet. A ring keeps column c in slot
c % max_length; where a slot's column stands follows from the last one.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..arguments import text_of, under_autocast
from ..engines import first_pass
from ..engines.scores import Scores
from ..errors import ArgumentError, MaskError, ShapeError
from ..functional import attention
from ..map import AttentionMap, make
from ..mask_rules import is_traced
from ..masks import NOTHING_HIDDEN, Mask
from ..scoring import Scoring
from . import module_call, options
from .cache import KVCache, Owned, order_of
from .options import Inputs
from .packed_weights import is_plain_call
from .self_attention import scores_are_plain

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

# without a number: a number that differs between caches cannot be formatted in a graph
FULL = "max_length must be at least the number of tokens: got one more; make the cache larger, or crop it"
Attended = tuple[Tensor, AttentionMap, Tensor]  # heads [B, H, T, Dv], their map, values [B, Hk, S, Dv]


def make_cache(module: MultiHeadAttention, batch: int | None, max_length: int | None, ring: bool) -> KVCache:
    """Return a cache that fits the module; see `MultiHeadAttention.cache`."""
    if ring:
        window = _window_of(module)
        max_length = window if max_length is None else max_length
    cache = KVCache(max_length, ring)
    _check_cache(module, cache)
    cache.belong_to(module)
    if batch is not None and max_length is not None:
        weight = module.k_proj.weight
        assert isinstance(weight, Tensor)
        (sample,) = under_autocast(torch.empty(0, dtype=weight.dtype, device=weight.device))
        sizes = (module.num_kv_heads, module.head_dim, module.value_dim)
        cache.reserve(batch, *sizes, weight.device, sample.dtype)
    return cache


def _window_of(module: MultiHeadAttention) -> int:
    if not isinstance(module.window, int):
        raise ArgumentError(
            f"ring must be False unless the module's window is a number: got window={module.window}; leave "
            "ring out, since all tokens are needed"
        )
    return module.window


def _check_cache(module: MultiHeadAttention, cache: KVCache) -> None:
    """Raise unless this module gives the same results step by step over this cache as in one call."""
    if not module.causal and not _looks_back(module.window):
        raise ArgumentError(
            f"cache must be used with a causal module: got causal={module.causal}, window={module.window}; "
            "make the module with causal=True, or use mha.remember(key) for the keys of cross-attention"
        )
    if cache.ring and cache.max_length is not None and _window_of(module) > cache.max_length:
        raise ArgumentError(
            f"max_length of a ring must be at least the module's window: {cache.max_length} < "
            f"{module.window}; use mha.cache(ring=True)"
        )


def _check_traced(cache: KVCache | Memory, lengths: Tensor | Sequence[int] | None) -> None:
    """Raise for values that a traced graph would keep from its example: columns of a cache, lengths."""
    name, argument = ("lengths", lengths) if isinstance(cache, Memory) else ("cache", cache)
    if argument is not None:
        raise ArgumentError(
            f"{name} must not be given under torch.jit.trace or make_fx, which store the example's values: "
            f"got {text_of(argument)}; use torch.compile with mha.cache(batch, max_length)"
        )


def _looks_back(window: int | tuple[int, int] | None) -> bool:
    """Return True if a window hides keys after the query."""
    return window is not None and (isinstance(window, int) or window[1] == 0)


def attend(module: MultiHeadAttention, inputs: Inputs) -> Attended:
    """Attend as `MultiHeadAttention._attend` does, to the columns of the cache and the new tokens."""
    query, key, value, mask, bias, positions, cache, lengths, _ = inputs
    assert cache is not None
    if is_traced():
        _check_traced(cache, lengths)
    if isinstance(cache, Memory):
        return _look_back(module, inputs, cache)
    if not isinstance(cache, KVCache):
        raise ArgumentError(
            f"cache must be a KVCache or a Memory: got {text_of(cache)}; make one with mha.cache() or "
            "mha.remember(key)"
        )
    for other, name in ((key, "key"), (value, "value")):
        if other is not None and other is not query:
            raise ArgumentError(
                f"{name} must not be given with a cache: got {text_of(other)}; a cache is for "
                "self-attention, use mha.remember(key, value) for cross-attention"
            )
    if not module.causal or cache.ring:
        _check_cache(module, cache)
    module_call.check(module, query, query, query)
    q, k, v = module._project(query, query, query)
    T = q.shape[2]
    in_graph = torch.compiler.is_compiling()
    if in_graph:
        check_in_graph(cache, mask=mask, bias=bias, lengths=lengths)
    if module.rope is not None:
        if positions is None and (in_graph or cache.is_ragged):
            positions = cache.positions(T)
        before = 0 if positions is not None else cache.seen
        q, k = options.rotated(module.rope, q, k, positions, before, itself=True)
    elif positions is not None:
        raise module_call.no_use(positions)
    k, v = under_autocast(k, v)
    if in_graph:
        return attend_in_graph(module, q, k, v, cache)
    counts = None if lengths is None else _counts(lengths, *query.shape[:2])
    if mask is not None:
        mask = _rules(mask, q, cache.columns(T) if counts is None else cache.length + T)
    chosen = options.attention_options(module, mask, bias, q.device)
    if bias is not None:  # the layer's own bias always fits
        columns = cache.columns(T) if counts is None else cache.length + T
        B, H, _, D = q.shape
        Scoring.of(D, bias=chosen.bias).check(B, H, T, columns)
    k, v, padding = cache.extend(k, v, counts, module)
    if padding is not None:
        chosen = chosen._replace(mask=padding if mask is None else mask & padding)
    if T == 1:  # no key comes after the last query, and a window may cover all columns
        window = chosen.window
        reaches_all = isinstance(window, int) and window >= k.shape[2]
        chosen = chosen._replace(causal=False, window=None if reaches_all else window)
    heads, weights = attention(q, k, v, *chosen, module.dropout if module.training else 0.0)
    return heads, weights, v


def one_token(
    module: MultiHeadAttention, x: Tensor, cache: KVCache | Memory, need_weights: bool
) -> tuple[Tensor, AttentionMap | None] | None:
    """Return (heads [B, H, 1, D], their map) of a plain step of one token each; None if it has options."""
    at = plain_column(module, x, cache)
    return None if at is None else plain_step(module, x, cast("KVCache", cache), at, need_weights)


def plain_column(module: MultiHeadAttention, x: Tensor, cache: object) -> int | None:
    """Return the column for a plain step of one token each, x [B, 1, E]; None if the step is not plain."""
    if (
        type(cache) is not KVCache
        or type(x) is not Tensor
        or torch.is_grad_enabled()
        or not cache.is_of(module)
    ):
        return None
    fields: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    packed, D, window = fields["_packed"], fields["head_dim"], fields["window"]
    if packed is None or fields.get("_sharding") is not None or not fields["causal"]:
        return None
    if not scores_are_plain(fields) or type(fields["scale"]) not in (float, NoneType):
        return None
    shape, weight = x.shape, packed.weight
    if len(shape) != 3 or shape[1] != 1 or not shape[0] or shape[2] != weight.shape[1]:
        return None
    if x.dtype is not weight.dtype:
        return None
    if x.is_cpu is not weight.is_cpu or x.get_device() != weight.get_device() or not is_plain_call(x):
        return None
    at = cache.next_column(shape[0], fields["num_kv_heads"], D, D, x)
    if at is None or (window is not None and not (isinstance(window, int) and window > at)):
        return None
    modules = fields["_modules"]
    return at if packed.holds((modules["q_proj"], modules["k_proj"], modules["v_proj"])) else None


def plain_step(
    module: MultiHeadAttention,
    x: Tensor,
    cache: KVCache,
    at: int,
    need_weights: bool,
    factors: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, AttentionMap | None]:
    """Return (heads [B, H, 1, D], their map) of one more token each, written to the column `at`.

    Args:
        factors: the rotary factors of the module at this position, if they have been computed.
    """
    fields: dict[str, Any] = module.__dict__
    packed, B, D, scale, rope = (
        fields["_packed"],
        x.shape[0],
        fields["head_dim"],
        fields["scale"],
        fields["rope"],
    )
    H, Hk = fields["num_heads"], fields["num_kv_heads"]
    joined = torch.nn.functional.linear(x, packed.weight, packed.bias)
    heads = joined.view(B, H + 2 * Hk, 1, D)
    if rope is None:
        q, k, v = heads.split_with_sizes((H, Hk, Hk), 1)
    else:
        turned, v = heads.split_with_sizes((H + Hk, Hk), 1)
        turned = rope.rotate(turned, at) if factors is None else rope.turn(turned, factors)
        q, k = turned.split_with_sizes((H, Hk), 1)
    keys, values = cache.add_column(at, k, v)
    scores = Scores(q, keys, NOTHING_HIDDEN, Scoring(D**-0.5 if scale is None else scale))
    out, lse, _ = first_pass.compute(scores, values)
    return out, make(scores, lse) if need_weights else None


def _rules(mask: Mask | Tensor, q: Tensor, columns: int) -> Mask:
    """Return the mask over all columns; padding among the new ones also applies to the queries."""
    B, H, T, _ = q.shape
    rules = module_call.rules_of(mask, B, T, columns, itself=False)
    if rules.keys is not None and rules.queries is None:
        real = rules.keys
        if real.ndim == 1:
            real = torch.arange(columns, device=real.device) < real[:, None]
        rules = replace(rules, queries=real[:, columns - T :])
    return rules.bind(B, H, T, columns)


def _counts(lengths: Tensor | Sequence[int], batch: int, query_len: int) -> list[int] | None:
    """Return how many tokens of each sequence are real; None if all are."""
    counts: list[int] = module_call.as_lengths(lengths).tolist()
    module_call.check_lengths(counts, batch, query_len)
    return None if all(count == query_len for count in counts) else counts


# A step inside torch.compile


def check_in_graph(cache: KVCache, need_weights: bool = False, **arguments: object) -> None:
    """Raise for arguments that a step inside a graph does not support."""
    if cache._at is None:
        raise ArgumentError(
            f"cache must have a fixed batch and max_length inside torch.compile: got max_length="
            f"{cache.max_length} and no batch; make it with mha.cache(batch, max_length)"
        )
    if need_weights:
        raise ArgumentError(
            "need_weights must be False with a cache inside torch.compile, where a map would include unused "
            "columns: got True; pass need_weights=False, or get maps without torch.compile"
        )
    for name, value in arguments.items():
        if value is not None:
            raise ArgumentError(
                f"{name} must not be given with a cache inside torch.compile: got {text_of(value)}; make "
                "this call without torch.compile"
            )


def attend_in_graph(
    module: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, cache: KVCache
) -> tuple[Tensor, AttentionMap, Tensor]:
    """Extend the cache and attend to it: (heads [B, H, T, Dv], a map of all columns, values)."""
    at, M = cache._at, cache.max_length
    assert at is not None and cache._k is not None and cache._v is not None and M is not None
    keys, values = cache._k, cache._v
    cache.check(k, v, module)
    (B, _, T, _), device = q.shape, q.device
    spots = at + torch.arange(T, device=device)  # columns of the queries
    slots = torch.arange(M, device=device)
    if not cache.ring:
        if T > M:
            raise ShapeError(f"max_length must be at least the number of tokens: {T} > {M}; make it larger")
        torch._assert_async(at + T <= M, FULL)
        keys.index_copy_(2, spots, k)
        values.index_copy_(2, spots, v)
        columns = slots
    elif T == 1:
        keys.index_copy_(2, spots % M, k)
        values.index_copy_(2, spots % M, v)
        columns = spots - (spots - slots) % M
    else:  # the first queries still attend to columns that the last tokens overwrite
        columns = torch.cat((at - 1 - (at - 1 - slots) % M, spots))
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        first = T - min(T, M)  # the first of the tokens that stay in the ring
        cache._k.index_copy_(2, spots[first:] % M, k[:, :, first:])
        cache._v.index_copy_(2, spots[first:] % M, v[:, :, first:])

    ahead = columns - spots[:, None]  # [T, S]
    visible = (ahead <= 0) & (columns >= 0)
    window = module.window
    if window is not None:
        visible = visible & (ahead > -window if isinstance(window, int) else ahead >= -window[0])
    if cache._device_starts is not None:
        visible = visible & (columns >= cache._device_starts[:, None])[:, None]  # [B, T, S]
    if T == 1:
        mask = Mask(keys=visible.reshape(-1, visible.shape[-1]).expand(B, -1))
    else:
        mask = Mask(allowed=visible[:, None] if visible.ndim == 3 else visible[None, None])
    at.add_(T)
    cache._count = None  # only the device knows the count now
    heads, weights = attention(
        q, keys, values, mask, False, None, module.scale, module.softcap, _bias_by_distance(module, q, ahead),
        module.sinks, module.dropout if module.training else 0.0,
    )  # fmt: skip
    return heads, weights, values


def _bias_by_distance(module: MultiHeadAttention, q: Tensor, ahead: Tensor) -> Tensor | None:
    """Return the layer's bias for keys at these distances from their queries, [1, H, T, S]."""
    total: Tensor | None = None
    if module._slopes is not None:
        slopes = module._slopes.bias(q.device).slopes
        slopes = slopes.double() if q.dtype == torch.float64 else slopes
        total = -(slopes[:, None, None] * ahead.abs())[None]
    if module.relative_bias is not None:
        values = module.relative_bias().values  # [H, R]
        reach = values.shape[1] // 2
        relative = values[:, ahead.clamp(-reach, reach) + reach][None]
        total = relative if total is None else total + relative
    return total


# Cross-attention with a memory


class Memory(Owned):
    """The keys and values of cross-attention, projected once: `mha(query, cache=mha.remember(key))`.

    A call with a memory returns what `mha(query, key, value, mask)` returns, and does not change the memory.
    Only the module that made a memory accepts it.
    """

    def __init__(self, k: Tensor, v: Tensor, mask: Mask | None = None) -> None:
        self._k, self._v, self._mask = k, v, mask

    @property
    def length(self) -> int:
        """S, the number of keys."""
        return self._k.shape[2]

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self._k.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory used."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v))

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Replace sequence i by sequence index[i], for beam search; the new batch size is len(index).

        Raises:
            ArgumentError: not a 1-D tensor of whole numbers; a sequence that does not exist.
        """
        chosen = order_of(index, self._k)
        self._k, self._v = self._k.index_select(0, chosen), self._v.index_select(0, chosen)
        if self._mask is not None:
            self._mask = self._mask.select(chosen, slice(None), slice(None))

    def given_to(self, q: Tensor, module: nn.Module) -> tuple[Tensor, Tensor, Mask | None]:
        """Return keys, values and their mask for queries [B, H, T, D] of the module.

        Raises:
            ShapeError: another batch size; other numbers of heads or channels.
            ArgumentError: another module.
        """
        (B, H, _, D), k = q.shape, self._k
        if k.shape[0] != B:
            raise ShapeError(
                f"cache must have the batch size of the input: {k.shape[0]}, not {B}; repeat or drop "
                "sequences with memory.reorder(index)"
            )
        if k.shape[3] != D or H % k.shape[1]:
            raise ShapeError(
                f"cache must have the module's heads: {k.shape[1]} of {k.shape[3]} channels, not {H} of {D}; "
                "make one memory per layer"
            )
        self.belong_to(module)
        return k, self._v, self._mask

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        new = memo[id(self)] = Memory.__new__(Memory)
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo), _owner=self._owner_of_copy(memo))
        return new

    def __repr__(self) -> str:
        (B, Hk, S, _), kind = self._k.shape, str(self._k.dtype).removeprefix("torch.")
        return f"Memory({S} columns, batch {B}, {Hk} heads, {kind})"


def remember(
    module: MultiHeadAttention, key: Tensor, value: Tensor | None, mask: Mask | Tensor | None
) -> Memory:
    """See `MultiHeadAttention.remember`."""
    value = key if value is None else value
    module_call.check_memory(module, key, value)
    k, v = module._keys_and_values(key, value)
    B, S, _ = key.shape
    if module.rope is not None:
        k = module.rope.rotate(k, 0)
    memory = Memory(k, v, None if mask is None else _of_keys(mask, B, module.num_heads, S))
    memory.belong_to(module)
    return memory


def _of_keys(mask: Mask | Tensor, batch: int, num_heads: int, key_len: int) -> Mask:
    """Check that a mask depends on keys alone, and bind it so that it fits any queries."""
    rules = module_call.rules_of(mask, batch, 1, key_len, itself=False)
    other = [name for name in rules.held if name not in ("keys", "allowed")]
    if other:
        raise MaskError(
            f"mask must only depend on keys: got {rules!r}; use Mask.padding(lengths) here, and pass others "
            "in the call: mha(query, mask=mask, cache=memory)"
        )
    bound = rules.bind(batch, num_heads, 1, key_len)
    if bound.allowed is not None:
        bound = replace(bound, allowed=bound.allowed.clone())
    return bound


def _look_back(module: MultiHeadAttention, inputs: Inputs, memory: Memory) -> Attended:
    """Attend to the keys and values of a memory (cross-attention)."""
    query, key, value, mask, bias, positions, _, lengths, _ = inputs
    for other, name in ((key, "key"), (value, "value")):
        if other is not None:
            raise ArgumentError(
                f"{name} must not be given with a memory, which holds keys and values: got {text_of(other)}; "
                "use mha(query, cache=memory)"
            )
    module_call.check_query(module, query)
    q = module._queries(query)
    B, T, _ = query.shape
    k, v, hidden = memory.given_to(q, module)
    S = k.shape[2]
    if module.rope is not None:
        if positions is None:
            positions = torch.arange(S - T, S, device=q.device)
        else:
            options.check_positions(positions, q, "positions")
        assert isinstance(positions, Tensor)
        q = module.rope.rotate(q, positions.to(q.device))
    elif positions is not None:
        raise module_call.no_use(positions)
    if mask is not None:
        mask = module_call.rules_of(mask, B, T, S, itself=False)
    counts = None if lengths is None else _counts(lengths, B, T)
    if counts is not None:
        counted = Mask(queries=torch.tensor(counts, device=q.device))
        mask = counted if mask is None else mask & counted
    if hidden is not None:
        mask = hidden if mask is None else mask & hidden
    chosen = options.attention_options(module, mask, bias, q.device)
    heads, weights = attention(q, k, v, *chosen, module.dropout if module.training else 0.0)
    return heads, weights, v
