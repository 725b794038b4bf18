"""One call of a `MultiHeadAttention` over what earlier calls left: a `KVCache`, or a `Memory`.

A plain step of one token has a short way (`plain_step`). Every other call is answered, or refused, by
`attend`.

Nothing is added to a cache before the call has been found right: whoever is refused can try again.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..arguments import told, under_autocast
from ..engines import first_pass
from ..engines.scores import Scores
from ..errors import ArgumentError
from ..functional import attention
from ..map import AttentionMap, make
from ..mask_rules import is_traced
from ..masks import NOTHING_HIDDEN, Mask
from ..scoring import Scoring
from . import module_call, options
from .cache import KVCache, attend_in_graph, check_in_graph
from .memory import Memory
from .options import Inputs
from .packed_weights import is_plain_call
from .self_attention import scores_are_plain

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = [
    "attend",
    "check_weights",
    "make_cache",
    "one_token",
    "plain_column",
    "plain_step",
    "without_padding",
]

Attended = tuple[Tensor, AttentionMap, Tensor]  # heads [B, H, T, Dv], their map, values [B, Hk, S, Dv]


def make_cache(module: MultiHeadAttention, batch: int | None, max_length: int | None, ring: bool) -> KVCache:
    """A cache that fits the module; see `MultiHeadAttention.cache`."""
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
            f"ring must be for a module with a window, a number of keys: got window={module.window}; leave "
            "ring out, all tokens are needed"
        )
    return module.window


def _check_cache(module: MultiHeadAttention, cache: KVCache) -> None:
    """Raise unless step by step is the same as all at once for this module, over this cache."""
    if not module.causal and not _looks_back(module.window):
        raise ArgumentError(
            f"cache must be for a causal module: got causal={module.causal}, window={module.window}, where "
            "earlier tokens would have to see later ones; make it with causal=True; for another text's keys "
            "there is mha.remember(key)"
        )
    if cache.ring and cache.max_length is not None and _window_of(module) > cache.max_length:
        raise ArgumentError(
            f"max_length of a ring must hold the module's window: {cache.max_length} < {module.window}; use "
            f"mha.cache(ring=True)"
        )


def _check_traced(cache: KVCache | Memory, lengths: Tensor | Sequence[int] | None) -> None:
    """Raise for what a traced graph would keep as it was in the example: columns of a cache, lengths."""
    name, given = ("lengths", lengths) if isinstance(cache, Memory) else ("cache", cache)
    if given is not None:
        raise ArgumentError(
            f"{name} must not be given beside a tracer (torch.jit.trace, make_fx), which would keep the "
            f"example's: got {told(given)}; use torch.compile with mha.cache(batch, max_length)"
        )


def _looks_back(window: int | tuple[int, int] | None) -> bool:
    """Whether a window hides what comes after the query."""
    return window is not None and (isinstance(window, int) or window[1] == 0)


def attend(module: MultiHeadAttention, inputs: Inputs) -> Attended:
    """As `MultiHeadAttention._attend`, over what the cache holds and what comes in."""
    query, key, value, mask, bias, positions, cache, lengths, _ = inputs
    assert cache is not None
    if is_traced():
        _check_traced(cache, lengths)
    if isinstance(cache, Memory):
        return _look_back(module, inputs, cache)
    if not isinstance(cache, KVCache):
        raise ArgumentError(
            f"cache must be a KVCache or a Memory: got {told(cache)}; make one with mha.cache() or "
            "mha.remember(key)"
        )
    for given, name in ((key, "key"), (value, "value")):
        if given is not None and given is not query:
            raise ArgumentError(
                f"{name} must not be given beside a cache: got {told(given)}; a cache is for self-attention, "
                "mha.remember(key, value) for another text"
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
    if bias is not None:  # the layer's own fits
        columns = cache.columns(T) if counts is None else cache.length + T
        B, H, _, D = q.shape
        Scoring.of(D, bias=chosen.bias).check(B, H, T, columns)
    k, v, kept = cache.extend(k, v, counts, module)
    if kept is not None:
        chosen = chosen._replace(mask=kept if mask is None else mask & kept)
    if T == 1:  # the last query: nothing comes after it, and a window may reach as far as there is anything
        window = chosen.window
        reaches_all = isinstance(window, int) and window >= k.shape[2]
        chosen = chosen._replace(causal=False, window=None if reaches_all else window)
    heads, weights = attention(q, k, v, *chosen, module.dropout if module.training else 0.0)
    return heads, weights, v


def one_token(
    module: MultiHeadAttention, x: Tensor, cache: KVCache | Memory, need_weights: bool
) -> tuple[Tensor, AttentionMap | None] | None:
    """(heads [B, H, 1, D], their map) of a plain step of one token each; None: it is not plain."""
    at = plain_column(module, x, cache)
    return None if at is None else plain_step(module, x, cast("KVCache", cache), at, need_weights)


def plain_column(module: MultiHeadAttention, x: Tensor, cache: object) -> int | None:
    """Where in the cache a plain step of one token each, x [B, 1, E], would go; None: it is not plain."""
    if (
        type(cache) is not KVCache
        or type(x) is not Tensor
        or torch.is_grad_enabled()
        or not cache.is_of(module)
    ):
        return None
    held: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    packed, D, window = held["_packed"], held["head_dim"], held["window"]
    if packed is None or held.get("_sharding") is not None or not held["causal"]:
        return None
    if not scores_are_plain(held) or type(held["scale"]) not in (float, NoneType):
        return None
    shape, weight = x.shape, packed.weight
    if len(shape) != 3 or shape[1] != 1 or not shape[0] or shape[2] != weight.shape[1]:
        return None
    if x.dtype is not weight.dtype:
        return None
    if x.is_cpu is not weight.is_cpu or x.get_device() != weight.get_device() or not is_plain_call(x):
        return None
    at = cache.next_column(shape[0], held["num_kv_heads"], D, D, x)
    if at is None or (window is not None and not (isinstance(window, int) and window > at)):
        return None
    modules = held["_modules"]
    return at if packed.holds((modules["q_proj"], modules["k_proj"], modules["v_proj"])) else None


def plain_step(
    module: MultiHeadAttention,
    x: Tensor,
    cache: KVCache,
    at: int,
    need_weights: bool,
    factors: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, AttentionMap | None]:
    """(heads [B, H, 1, D], their map) of one more token each, which goes where `plain_column` said.

    Args:
        factors: of the module's rope at this position, where they are known.
    """
    held: dict[str, Any] = module.__dict__
    packed, B, D, scale, rope = held["_packed"], x.shape[0], held["head_dim"], held["scale"], held["rope"]
    H, Hk = held["num_heads"], held["num_kv_heads"]
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
    out, lse, _ = first_pass.answer(scores, values)
    return out, make(scores, lse) if need_weights else None


def _look_back(module: MultiHeadAttention, inputs: Inputs, memory: Memory) -> Attended:
    """Cross-attention with keys and values that were made before."""
    query, key, value, mask, bias, positions, _, lengths, _ = inputs
    for given, name in ((key, "key"), (value, "value")):
        if given is not None:
            raise ArgumentError(
                f"{name} must not be given beside a memory: got {told(given)}; it holds keys and values, as "
                "mha(query, cache=memory)"
            )
    module_call.check_query(module, query)
    q = module.q_proj(query)
    module_call.check_projected(q_proj=(q, module.num_heads, module.head_dim))
    if module.qk_norm is not None:
        q = options.normalised_by(module, module.q_norm, q)
    B, T, _ = query.shape
    q = q.reshape(B, T, module.num_heads, module.head_dim).transpose(1, 2)
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


def _rules(mask: Mask | Tensor, q: Tensor, columns: int) -> Mask:
    """The mask of all columns that there will be; padding among the last is so among the queries."""
    B, H, T, _ = q.shape
    rules = module_call.rules_of(mask, B, T, columns, itself=False)
    if rules.keys is not None and rules.queries is None:
        real = rules.keys
        if real.ndim == 1:
            real = torch.arange(columns, device=real.device) < real[:, None]
        rules = replace(rules, queries=real[:, columns - T :])
    return rules.bind(B, H, T, columns)


def _counts(lengths: Tensor | Sequence[int], batch: int, query_len: int) -> list[int] | None:
    """How many tokens of each sequence are real; None: all of them."""
    counts: list[int] = module_call.as_lengths(lengths).tolist()
    module_call.check_lengths(counts, batch, query_len)
    return None if all(count == query_len for count in counts) else counts


def without_padding(x: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
    """x [B, T, E] or [B, H, T, Dv], and 0 where there is no token."""
    counts = torch.as_tensor(lengths, device=x.device)
    real = torch.arange(x.shape[-2], device=x.device) < counts[:, None]  # [B, T]
    return x.masked_fill(~(real if x.ndim == 3 else real[:, None])[..., None], 0)


def check_weights(cache: KVCache | Memory) -> None:
    """Raise where a compiled step over a cache is asked for its map."""
    if isinstance(cache, KVCache):
        check_in_graph(cache, need_weights=True)
