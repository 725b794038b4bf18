"""Keys and values kept from call to call: step by step is the same as all at once, whatever the steps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise import Mask, reference
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.nn import Buckets, KVCache, Linear, MultiHeadAttention, QKNorm, Rope, options
from headwise.nn.cached_call import attend_in_graph, check_in_graph
from judge import assert_judged, largest

E, H, HK, D, DV, WINDOW, RING = 11, 6, 2, 4, 3, 5, 7  # of a layer
B, L = 3, 23  # sequences, and their tokens

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "heads": [{}, {"num_kv_heads": HK}, {"num_kv_heads": 1, "value_dim": DV}],
    "window": [{}, {"window": WINDOW}, {"window": (WINDOW, 2)}],
    "scores": [{}, {"softcap": 1.5}, {"sinks": True}, {"scale": 0.7, "sinks": True}],
    "positions": [
        {}, {"rope": Rope()}, {"rope": Rope(interleaved=True, dims=2)}, {"rope": Rope(scaling=Linear(4.0))},
        {"alibi": True}, {"relative_bias": Buckets(8, 13)}, {"alibi": True, "relative_bias": Buckets()},
    ],
    "norm": [{}, {"qk_norm": "rms"}, {"qk_norm": QKNorm("layer", whole=True)}],
    "gate": [{}, {"gate": "head"}, {"gate": "channel"}],
}  # fmt: skip


def layer(dtype: torch.dtype = torch.float64, seed: int = 7, **args: Any) -> MultiHeadAttention:
    """A causal layer whose learned parts are all something."""
    torch.manual_seed(seed)
    mha = MultiHeadAttention(E, H, **{"head_dim": D, "causal": True, "dtype": dtype} | args)
    for parameter in mha.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mha.eval().requires_grad_(False)


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, L, E, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def plainly(mha: MultiHeadAttention, x: Tensor) -> Tensor:
    """All at once, by the equations, in x's dtype."""
    T = x.shape[1]
    q, k, v = mha.q_proj(x), mha.k_proj(x), mha.v_proj(x)
    q, k = options.normalised(mha, mha.q_norm, q), options.normalised(mha, mha.k_norm, k)
    q, k, v = (
        y.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
        for y, heads in ((q, H), (k, mha.num_kv_heads), (v, mha.num_kv_heads))
    )
    if mha.rope is not None:
        q, k = (mha.rope.rotate(y, torch.arange(T)) for y in (q, k))
    mask = Mask.causal()
    if isinstance(mha.window, int):
        mask = mask & Mask.window(mha.window)
    elif mha.window is not None:
        mask = mask & Mask.window(left_right=mha.window)
    bias = options.added(mha, x.device, None)
    if isinstance(bias, tuple):
        offsets = torch.arange(T) - torch.arange(T)[:, None]
        slopes, relative = bias[0].slopes, bias[1].values
        reach = relative.shape[1] // 2
        bias = relative[:, offsets.clamp(-reach, reach) + reach] - slopes[:, None, None] * offsets.abs()
        bias = bias[None].to(x.dtype)
    heads, *_ = reference.attention(
        q, k, v, mask=mask, scale=mha.scale, softcap=mha.softcap, bias=bias, sinks=mha.sinks
    )
    heads = options.gated(mha, heads, x)
    output: Tensor = mha.out_proj(heads.transpose(1, 2).flatten(2))
    return output


def step_by_step(
    mha: MultiHeadAttention, x: Tensor, cache: KVCache, chunks: Sequence[int | Sequence[int]]
) -> Tensor:
    """All tokens, some at a time: so many of each sequence, or of each so many."""
    done, output = [0] * B, torch.full((B, L, E), torch.nan, dtype=x.dtype)
    for chunk in chunks:
        counts = [chunk] * B if isinstance(chunk, int) else list(chunk)
        counts = [min(count, L - start) for count, start in zip(counts, done, strict=True)]
        T = max(*counts, 1)
        arguments = torch.full((B, T, E), 3.0, dtype=x.dtype)  # padding is something, too
        for b in range(B):
            arguments[b, : counts[b]] = x[b, done[b] : done[b] + counts[b]]
        ragged = any(count != T for count in counts)
        actual, weights = mha(arguments, cache=cache, lengths=counts if ragged else None)
        assert weights is not None and weights.shape == (B, H, T, weights.shape[3])
        for b in range(B):
            output[b, done[b] : done[b] + counts[b]] = actual[b, : counts[b]]
            assert not actual[b, counts[b] :].any()
            done[b] += counts[b]
        assert cache.seen == max(done)
    return output


def assert_as_whole(mha: MultiHeadAttention, output: Tensor, x: Tensor) -> None:
    """What came out step by step is as exact as the equations in that dtype, for all tokens that came."""
    truth = plainly(copy.deepcopy(mha).double(), x.double())
    plain, listed = plainly(mha, x), ~output.isnan()
    size = largest(truth) + largest(x.double())
    assert_judged(output[listed], plain[listed], truth[listed], dtype=x.dtype, size=size)


@st.composite
def generations(draw: Any) -> tuple[dict[str, Any], str, list[int | list[int]], torch.dtype]:
    """(a layer's options, a kind of cache, chunks, a dtype)"""
    options: dict[str, Any] = {}
    for choices in OPTIONS.values():
        options |= draw(st.sampled_from(choices))
    kinds = [
        "growing",
        "fixed",
        "reserved",
        *["ring", "reserved ring"] * isinstance(options.get("window"), int),
    ]
    kind = draw(st.sampled_from(kinds))
    chunk = st.one_of(st.just(1), st.integers(1, 11), st.lists(st.integers(0, 9), min_size=B, max_size=B))
    chunks = draw(st.lists(chunk, min_size=3, max_size=9))
    return options, kind, [*chunks, L], draw(st.sampled_from((torch.float64, torch.float32)))


def cache_of(mha: MultiHeadAttention, kind: str) -> KVCache:
    ring = "ring" in kind
    length = None if kind == "growing" else RING if ring else L
    return mha.cache(B if "reserved" in kind else None, length, ring)


def check_generation(case: tuple[dict[str, Any], str, list[int | list[int]], torch.dtype]) -> None:
    arguments, kind, chunks, dtype = case
    mha, x = layer(dtype, **arguments), tokens(dtype)
    with torch.no_grad():
        cache = cache_of(mha, kind)
        assert_as_whole(mha, step_by_step(mha, x, cache, chunks), x)


@settings(max_examples=25)
@given(generations())
def test_step_by_step_is_the_same_as_all_at_once(case: Any) -> None:
    check_generation(case)


@pytest.mark.slow
@settings(max_examples=200)
@given(generations())
def test_step_by_step_is_the_same_as_all_at_once_for_many_layers(case: Any) -> None:
    torch.set_num_threads(1)  # small layers; put back by the fixture of every test
    check_generation(case)


@pytest.mark.parametrize("kind", ["growing", "fixed", "reserved"])
def test_one_token_at_a_time_is_the_same_as_all_at_once(kind: str) -> None:
    mha, x = layer(torch.float32, num_kv_heads=HK, rope=Rope(), gate="head"), tokens(torch.float32)
    cache = cache_of(mha, kind)
    with torch.no_grad():
        assert_as_whole(mha, step_by_step(mha, x, cache, [3, *[1] * (L - 3)]), x)


# What it is


def test_a_cache_tells_what_it_holds() -> None:
    mha, x = layer(num_kv_heads=HK, value_dim=DV), tokens()
    cache = mha.cache(max_length=L)
    assert (cache.length, cache.batch, cache.starts, cache.nbytes) == (0, None, None, 0)
    assert repr(cache) == "KVCache(0 of 23 columns)"
    mha(x[:, :5], cache=cache)
    assert (cache.length, cache.batch, cache.starts) == (5, B, None)
    assert cache.nbytes == B * HK * L * (D + DV) * 8
    assert repr(cache) == "KVCache(5 of 23 columns, batch 3, 2 heads, float64)"
    assert cache.positions(2).tolist() == [5, 6]
    ragged = mha.cache()
    mha(x[:, :5], cache=ragged, lengths=[2, 5, 3])
    assert ragged.length == 5 and ragged.starts is not None and ragged.starts.tolist() == [3, 0, 2]
    assert ragged.positions(2).tolist() == [[2, 3], [5, 6], [3, 4]]
    mha(x[:, :2], cache=ragged, lengths=torch.tensor([2, 0, 1]))  # the longest gets none
    assert ragged.length == 5 and ragged.starts.tolist() == [1, 0, 1]


def test_heads_speak_over_a_cache_too() -> None:
    mha, x = layer(gate="head"), tokens()
    cache, again = mha.cache(), mha.cache()
    truth = mha(x[:, :5], cache=cache, lengths=[5, 2, 4])[0]
    heads = mha.head_outputs(x[:, :5], cache=again, lengths=[5, 2, 4])
    joined = mha.out_proj(heads.transpose(1, 2).flatten(2))
    assert not heads[1, :, 2:].any()
    assert_judged(joined[0], truth[0], truth[0], dtype=x.dtype)


def test_a_growing_cache_takes_new_room_seldom() -> None:
    mha, x = layer(), tokens()
    cache, blocks = mha.cache(), set()
    for i in range(200):
        mha(x[:, i % L : i % L + 1], cache=cache, need_weights=False)
        blocks.add(cache._k.data_ptr())
    assert cache.length == 200 and len(blocks) <= 5


def test_a_ring_counts_positions_on_and_takes_no_more_room() -> None:
    mha, x = layer(window=WINDOW, rope=Rope()), tokens()
    cache = mha.cache(ring=True)
    assert cache.max_length == WINDOW
    mha(x[:, :13], cache=cache)  # longer than the ring
    mha(x[:, 13:14], cache=cache)
    assert (cache.length, cache.seen, cache.positions(1).tolist()) == (WINDOW, 14, [14])
    assert cache._k.shape[2] == WINDOW
    assert repr(cache) == "KVCache(last 5 of 5 columns, batch 3, 6 heads, float64)"


def test_a_ring_of_one_column_is_the_new_token_alone() -> None:
    """Once its map had a second column, which the window hid."""
    mha, x = layer(window=1), tokens()
    cache = mha.cache(ring=True)
    for i in range(3):
        assert mha(x[:, i : i + 1], cache=cache)[1].shape == (B, H, 1, 1)


def test_a_mask_with_a_cache_covers_all_columns() -> None:
    mha, x = layer(), tokens()
    visible = torch.rand(L, L) < 0.6
    visible |= torch.eye(L, dtype=torch.bool)
    whole = mha(x, mask=Mask.dense(visible))[0]
    cache = mha.cache()
    parts = [
        mha(x[:, a:b], cache=cache, mask=Mask.dense(visible[a:b, :b]))[0] for a, b in ((0, 7), (7, 8), (8, L))
    ]
    assert_judged(torch.cat(parts, 1), whole, whole, dtype=torch.float64)

    ids = torch.tensor([0] * 7 + [1] * 16)
    whole = mha(x, mask=Mask.documents(ids))[0]
    cache.reset()
    parts = [mha(x[:, a:b], cache=cache, mask=Mask.documents(ids[:b]))[0] for a, b in ((0, 9), (9, L))]
    assert_judged(torch.cat(parts, 1), whole, whole, dtype=torch.float64)


def test_a_bias_with_a_cache_covers_all_columns() -> None:
    mha, x, bias = layer(relative_bias=Buckets()), tokens(), torch.randn(H, L, L, dtype=torch.float64)
    whole, cache = mha(x, bias=bias)[0], mha.cache()
    parts = [mha(x[:, a:b], cache=cache, bias=bias[:, a:b, :b])[0] for a, b in ((0, 7), (7, 8), (8, L))]
    assert_judged(torch.cat(parts, 1), whole, whole, dtype=torch.float64)


def test_padding_by_a_mask_is_left_out_of_statistics_in_later_steps_too() -> None:
    mha, x, cache = layer(), tokens(), layer().cache()
    real = torch.ones(B, 9, dtype=torch.bool)
    real[0, 7:] = False
    mha(x[:, :5], cache=cache)
    _, weights = mha(x[:, 5:9], cache=cache, mask=Mask.padding(real))
    assert weights.counted_queries().sum((1, 2)).tolist() == [2 * H, 4 * H, 4 * H]


def test_a_call_that_is_refused_adds_nothing() -> None:
    mha, x, cache = layer(), tokens(), layer().cache()
    mha(x[:, :5], cache=cache)
    with pytest.raises(MaskError, match=r"\[1, 1, 2, 3\]"):
        mha(x[:, 5:7], cache=cache, mask=Mask.dense(torch.ones(2, 3)))
    with pytest.raises(MaskError, match="got 3 for 2"):
        mha(x[:, 5:7], cache=cache, lengths=[1, 3, 2])
    for wrong, message in (
        (torch.zeros(H, 2, 5, dtype=x.dtype), "bias must broadcast"),
        ("a", "bias must be"),
    ):
        with pytest.raises((ShapeError, ArgumentError), match=message):
            mha(x[:, 5:7], cache=cache, bias=wrong)
    assert cache.length == 5


def test_a_copy_made_in_inference_mode_goes_on_outside_of_it() -> None:
    mha, x, cache = layer(), tokens(), layer().cache()
    with torch.inference_mode():
        mha(x[:, :5], cache=cache)
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        assert torch.equal(mha(x[:, 5:6], cache=twin)[0], mha(x[:, 5:6], cache=cache)[0])


# Maps


def test_the_map_of_a_step_is_a_map_like_any_other() -> None:
    mha, x = layer(num_kv_heads=HK, rope=Rope(), softcap=2.0), tokens()
    _, whole = mha(x)
    cache = mha.cache()
    mha(x[:, :17], cache=cache)
    for T in (1, 3):
        at = cache.length
        _, weights = mha(x[:, at : at + T], cache=cache)
        rows = whole.select(queries=slice(at, at + T))
        assert_judged(
            weights.dense(), rows.dense()[..., : at + T], rows.dense()[..., : at + T], dtype=x.dtype
        )
        assert weights.positions.tolist() == list(range(at, at + T))
        actual, truth = weights.statistics("entropy", "distance"), rows.statistics("entropy", "distance")
        assert_judged(actual.distance, truth.distance, truth.distance, dtype=x.dtype)


@pytest.mark.parametrize("kind", ["growing", "fixed", "reserved"])
@pytest.mark.parametrize("steps", [1, 2])
def test_maps_of_earlier_steps_hold_while_tokens_are_added(kind: str, steps: int) -> None:
    mha, x = layer(), tokens()
    cache = cache_of(mha, kind)
    with torch.no_grad():
        saved = []
        for i in range(0, 20, steps):
            weights = mha(x[:, i : i + steps], cache=cache)[1]
            saved.append((weights, weights.dense()))
        for weights, before in saved:
            assert torch.equal(weights.dense(), before)


@pytest.mark.parametrize("kind", ["growing", "fixed", "reserved", "ring", "reserved ring"])
def test_a_map_whose_columns_were_written_to_refuses(kind: str) -> None:
    mha, x = layer(window=WINDOW), tokens()
    cache = cache_of(mha, kind)
    with torch.no_grad():
        _, old = mha(x[:, :6], cache=cache)
        before = old.dense()
        if "ring" not in kind:
            cache.crop(4)
        _, new = mha(x[:, 6:9], cache=cache)  # a ring goes round
        after = new.dense()
        for i in range(9, 12):
            mha(x[:, i : i + 1], cache=cache)
    assert torch.equal(new.dense(), after)
    if kind == "reserved ring":  # hands out copies
        assert torch.equal(old.dense(), before)
        return
    with pytest.raises(ArgumentError, match="was written to"):
        old.dense()


@pytest.mark.parametrize("kind", ["fixed", "reserved"])
def test_a_map_of_a_cache_that_was_reset_refuses_once_it_is_used_again(kind: str) -> None:
    mha, x = layer(), tokens()
    cache = cache_of(mha, kind)
    with torch.no_grad():
        _, old = mha(x[:, :6], cache=cache)
        cache.reset()
        _, new = mha(x[:, 6:9], cache=cache)
        assert new.dense().shape == (B, H, 3, 3)
    with pytest.raises(ArgumentError, match="was written to"):
        old.dense()


def test_in_inference_mode_overwritten_rows_are_told_by_their_mass() -> None:
    mha, x = layer(), tokens()
    with torch.inference_mode():
        cache = mha.cache(max_length=L)
        _, old = mha(x[:, :6], cache=cache)
        assert old.dense().isfinite().all()
        cache.crop(1)
        mha(x[:, 6:11], cache=cache)
        with pytest.raises(ArgumentError, match="the weights of a query now sum to"):
            old.dense()
    with torch.no_grad():  # what was made there can be used here
        mha(x[:, 11:12], cache=cache)
        cache.reorder([0, 0, 1])
        mha(x[:, 12:13], cache=cache)


# Changing it


@pytest.mark.parametrize("kind", ["growing", "fixed", "reserved", "ring"])
@pytest.mark.parametrize("counts", [[6, 6, 6], [6, 2, 4]])
@pytest.mark.parametrize("index", [[2, 0, 0], [1, 1, 0, 2, 2]])
def test_reordered_sequences_go_on_as_those_they_came_from(
    kind: str, counts: list[int], index: list[int]
) -> None:
    mha, x = layer(rope=Rope(), window=WINDOW), tokens()
    cache = cache_of(mha, kind)
    mha(x[:, :6], cache=cache, lengths=counts)
    cache.reorder(torch.tensor(index))
    after = torch.stack([x[b, counts[b] : counts[b] + 2] for b in index])
    actual, _ = mha(after, cache=cache)
    for i, b in enumerate(index):
        truth = mha(x[b : b + 1, : counts[b] + 2])[0][:, -2:]
        assert_judged(actual[i : i + 1], truth, truth, dtype=x.dtype)
    assert cache.batch == len(index)


@pytest.mark.parametrize("kind", ["growing", "fixed", "reserved", "ring"])
def test_a_cropped_cache_goes_on_from_there(kind: str) -> None:
    mha, x = layer(rope=Rope(), window=WINDOW), tokens()
    cache = cache_of(mha, kind)
    mha(torch.cat([x[:, :5], x[:, 9:11]], 1), cache=cache)
    cache.crop(5)
    assert cache.length == 5
    actual, truth = mha(x[:, 5:8], cache=cache)[0], mha(x[:, :8])[0][:, 5:]
    assert_judged(actual, truth, truth, dtype=x.dtype)


def test_cropping_takes_the_same_number_of_tokens_from_each_sequence() -> None:
    mha, x = layer(rope=Rope()), tokens()
    cache = mha.cache()
    mha(x[:, :7], cache=cache, lengths=[7, 2, 4])
    cache.crop(4)
    assert cache.starts is not None and cache.starts.tolist() == [0, 4, 3]
    actual = mha(x[:, 7:8], cache=cache)[0]
    for b, saved in enumerate((4, 0, 1)):
        truth = mha(torch.cat([x[b : b + 1, :saved], x[b : b + 1, 7:8]], 1))[0][:, -1:]
        assert_judged(actual[b : b + 1], truth, truth, dtype=x.dtype)


@pytest.mark.parametrize("kind", ["growing", "fixed", "reserved", "ring"])
def test_copies_are_independent_and_files_bring_back_all(kind: str) -> None:
    mha, x = layer(rope=Rope(), window=WINDOW), tokens()
    cache = cache_of(mha, kind)
    mha(x[:, :9], cache=cache, lengths=[9, 3, 5])
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False)]
    truth = mha(x[:, 9:11], cache=cache)[0]
    for other in copies:
        assert other.seen == 9
        assert torch.equal(mha(x[:, 9:11], cache=other)[0], truth)


def test_a_reset_cache_that_was_not_reserved_takes_another_batch() -> None:
    mha, x = layer(), tokens()
    cache = mha.cache(max_length=L)
    mha(x[:, :5], cache=cache)
    cache.reset()
    assert cache.length == 0
    assert mha(x[:1, :5], cache=cache)[0].shape == (1, 5, E)


# Whose it is


def other_modules() -> dict[str, Any]:
    """Ways to come by a module of equal sizes that did not fill the cache."""
    return {"another layer": lambda mha: layer(), "a copy": copy.deepcopy, "a file": saved_and_loaded}


def saved_and_loaded(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("kind", ["growing", "fixed", "reserved"])
@pytest.mark.parametrize("way", ["another layer", "a copy", "a file"])
def test_a_cache_refuses_a_module_that_did_not_fill_it(kind: str, way: str) -> None:
    """Its sizes fit, so it would answer with wrong numbers; what is refused adds nothing."""
    mha, x = layer(), tokens()
    other, cache = other_modules()[way](mha), cache_of(mha, kind)
    mha(x[:, :5], cache=cache)
    for more in (x[:, 5:6], x[:, 5:8]):  # a step by the express lane, and a call
        with pytest.raises(ArgumentError, match="got MultiHeadAttention and a cache of another MultiHead"):
            other(more, cache=cache)
    del other
    assert_as_whole(mha, torch.cat([mha(x[:, :5])[0], mha(x[:, 5:], cache=cache)[0]], 1), x)


def test_a_memory_refuses_a_module_that_did_not_make_it() -> None:
    mha, x = layer(causal=False), tokens()
    memory = mha.remember(x)
    for held in (memory, copy.deepcopy(memory)):
        with pytest.raises(ArgumentError, match="got MultiHeadAttention and a cache of another MultiHead"):
            layer(causal=False)(x[:, :2], cache=held)
        assert torch.equal(mha(x[:, :2], cache=held)[0], mha(x[:, :2], cache=memory)[0])
    del mha
    gc.collect()
    with pytest.raises(ArgumentError, match="and a cache of a deleted module; make one per layer"):
        layer(causal=False)(x[:, :2], cache=memory)


def test_an_emptied_cache_serves_another_module() -> None:
    mha, other, x = layer(), layer(seed=1), tokens()
    truth = other(x)[0]
    for empty in (lambda cache: cache.reset(), lambda cache: cache.crop(0)):
        cache = mha.cache()
        mha(x[:, :5], cache=cache)
        empty(cache)
        torch.testing.assert_close(other(x, cache=cache)[0], truth)
        with pytest.raises(ArgumentError, match="got MultiHeadAttention and a cache of another"):
            mha(x[:, :1], cache=cache)


def test_copies_of_a_cache_are_of_its_module_and_one_from_a_file_of_the_first_that_uses_it() -> None:
    """Copied together with its module, a cache is the copy's; a file does not know modules."""
    mha, x = layer(), tokens()
    cache = mha.cache()
    mha(x[:, :5], cache=cache)
    truth = mha(x[:, 5:8], cache=copy.deepcopy(cache))[0]
    twin, of_twin = copy.deepcopy((mha, cache))
    assert torch.equal(twin(x[:, 5:8], cache=of_twin)[0], truth)
    for held in (copy.deepcopy(cache), of_twin):
        with pytest.raises(ArgumentError, match="got MultiHeadAttention and a cache of another"):
            layer()(x[:, 5:8], cache=held)
    from_file = saved_and_loaded(cache)
    new = saved_and_loaded(mha)
    assert torch.equal(new(x[:, 5:8], cache=from_file)[0], truth)
    with pytest.raises(ArgumentError, match="got MultiHeadAttention and a cache of another"):
        mha(x[:, 8:9], cache=from_file)


def test_a_cache_does_not_keep_its_module_alive() -> None:
    mha = layer()
    cache, reference = mha.cache(), weakref.ref(mha)
    mha(tokens(), cache=cache)
    del mha
    gc.collect()
    assert reference() is None and cache.seen == L


@pytest.mark.slow
def test_a_compiled_step_refuses_another_modules_cache(fresh_compiler: None) -> None:
    mha, other, x = layer(), layer(seed=1), tokens()
    cache = mha.cache(B, L)
    step = torch.compile(
        lambda y, module: module(y, cache=cache, need_weights=False)[0], fullgraph=True, backend="eager"
    )
    with torch.no_grad():
        step(x[:, :1], mha)
        with pytest.raises(Exception, match="cache must be used by the module that filled it"):
            step(x[:, 1:2], other)
        truth = mha(x[:, :2])[0][:, 1:]
        torch.testing.assert_close(step(x[:, 1:2], mha), truth)


# Gradients


def test_gradients_flow_through_a_growing_cache() -> None:
    mha, x = layer(num_kv_heads=HK, rope=Rope()).requires_grad_(), tokens().requires_grad_()
    pull = torch.randn(B, L, E, dtype=x.dtype)
    wanted = torch.autograd.grad((mha(x)[0] * pull).sum(), [x, *mha.parameters()])
    cache = mha.cache()
    parts = [mha(x[:, a:b], cache=cache)[0] for a, b in ((0, 7), (7, 8), (8, L))]
    actual = torch.autograd.grad((torch.cat(parts, 1) * pull).sum(), [x, *mha.parameters()])
    for ours, theirs in zip(actual, wanted, strict=True):
        assert_judged(ours, theirs, theirs, dtype=x.dtype, size=largest(theirs) + 1, times=3)


def test_a_prefix_is_learned_through_later_steps() -> None:
    mha, x = layer(), tokens()
    prefix = x[:, :4].clone().requires_grad_()
    cache = mha.cache()
    mha(prefix, cache=cache)
    cache.crop(3)
    cache.reorder([0, 0, 2])
    loss = mha(x[:, 4:6], cache=cache)[0].square().sum()
    (grad,) = torch.autograd.grad(loss, prefix)
    assert grad[0].abs().sum() > 0 and not grad[1].any() and not grad[:, 3:].any()
    with torch.no_grad():  # and without gradients it goes on as any other
        assert mha(x[:, 6:7], cache=cache)[0].shape == (B, 1, E)


# Memory


@pytest.mark.parametrize(
    "options",
    [{}, {"rope": Rope()}, {"qk_norm": "rms", "num_kv_heads": HK}, {"causal": True, "gate": "head"}],
    ids=["plain", "rope", "norm", "causal"],
)
def test_a_memory_is_cross_attention_with_keys_made_before(options: dict[str, Any]) -> None:
    mha, x = layer(**{"causal": False} | options), tokens()
    text, query, lengths = x[:, :13], x[:, 13:18], torch.tensor([13, 5, 8])
    memory = mha.remember(text, mask=Mask.padding(lengths))
    truth, map_ = mha(query, text, text, mask=Mask.padding(lengths))
    actual, weights = mha(query, cache=memory)
    assert_judged(actual, truth, truth, dtype=x.dtype)
    assert torch.equal(weights.real_keys, map_.real_keys)
    same = mha(query, cache=mha.remember(text, text, mask=map_.real_keys[:, None, None]))[0]
    assert torch.equal(same, actual)
    assert memory.length == 13 and memory.batch == B and repr(memory).startswith("Memory(13 columns, batch 3")
    assert memory.nbytes == B * mha.num_kv_heads * 13 * 2 * D * 8

    memory.reorder([1, 1])
    again = mha(query[:2], cache=memory)[0]
    truth = mha(query[:2], text[[1, 1]], text[[1, 1]], mask=Mask.padding(lengths[[1, 1]]))[0]
    assert_judged(again, truth, truth, dtype=x.dtype)


def test_a_memory_takes_a_mask_and_lengths_of_the_queries() -> None:
    mha, x = layer(causal=False), tokens()
    text, query, visible = x[:, :13], x[:, 13:18], torch.rand(5, 13) < 0.7
    memory = mha.remember(text)
    truth = mha(query, text, text, mask=Mask.dense(visible))[0]
    actual, weights = mha(query, cache=memory, mask=Mask.dense(visible), lengths=[5, 2, 0])
    for b, count in enumerate((5, 2, 0)):
        assert not actual[b, count:].any()
        assert_judged(actual[b, :count], truth[b, :count], truth[b, :count], dtype=x.dtype)
    assert weights.counted_queries().sum((1, 2)).tolist() == [5 * H, 2 * H, 0]


def test_gradients_flow_through_a_memory() -> None:
    mha, text = layer(causal=False), tokens()[:, :5].requires_grad_()
    (grad,) = torch.autograd.grad(mha(tokens()[:, :2], cache=mha.remember(text))[0].sum(), text)
    assert grad.abs().sum() > 0


# Refusals


def test_a_module_that_looks_ahead_has_no_cache() -> None:
    for mha in (layer(causal=False), layer(causal=False, window=(3, 2))):
        with pytest.raises(ArgumentError, match=r"cache must be used with a causal module: got causal=False"):
            mha.cache()
        with pytest.raises(ArgumentError, match=r"causal=False"):
            mha(tokens(), cache=KVCache())
    assert layer(causal=False, window=3).cache().length == 0  # which sees nothing after itself


def test_a_ring_is_for_a_window_that_it_holds() -> None:
    with pytest.raises(
        ArgumentError, match=r"ring must be False unless the module's window is a number.*window=None"
    ):
        layer().cache(ring=True)
    with pytest.raises(ArgumentError, match=r"window=\(5, 0\)"):
        layer(window=(5, 0)).cache(max_length=7, ring=True)
    with pytest.raises(ArgumentError, match="4 < 5"):
        layer(window=5).cache(max_length=4, ring=True)
    with pytest.raises(ArgumentError, match="4 < 5"):
        layer(window=5)(tokens(), cache=KVCache(4, ring=True))
    with pytest.raises(ArgumentError, match="ring must have a max_length: got None"):
        KVCache(ring=True)
    with pytest.raises(ShapeError, match="max_length must be at least 1: got 0"):
        KVCache(0)


@pytest.mark.parametrize("kind", ["fixed", "reserved"])
def test_a_full_cache_says_so(kind: str) -> None:
    mha, x = layer(), tokens()
    cache = cache_of(mha, kind)
    mha(x[:, :20], cache=cache)
    with pytest.raises(
        ShapeError, match=r"max_length must be at least the number of tokens: 20 \+ 4 > 23; make the cache"
    ):
        mha(x[:, :4], cache=cache)
    with pytest.raises(ShapeError, match=r"20 \+ 4 > 23"):
        mha(x[:, :4], cache=cache, lengths=[0, 4, 2])
    mha(x[:, :3], cache=cache)
    with torch.no_grad(), pytest.raises(ShapeError, match=r"23 \+ 1 > 23"):
        mha(x[:, :1], cache=cache)


def test_what_does_not_fit_a_cache_is_told_in_numbers() -> None:
    mha, x = layer(num_kv_heads=HK), tokens()
    cache = mha.cache()
    mha(x[:, :5], cache=cache)
    with pytest.raises(ShapeError, match="must have the batch size of the input: 3, not 2"):
        mha(x[:2, :1], cache=cache)
    with pytest.raises(ShapeError, match="the module's heads: 2 of 4 and 4 channels, not 6 of 4 and 4"):
        layer()(x[:, :1], cache=cache)
    with pytest.raises(ArgumentError, match=r"float64 on cpu, not torch.float32 on cpu"):
        layer(torch.float32, num_kv_heads=HK)(x[:, :1].float(), cache=cache)
    with pytest.raises(ShapeError, match="must have the batch size of the input: 2, not 3"):
        mha(x[:, :1], cache=mha.cache(2, L))
    with pytest.raises(ShapeError, match="lengths must have one number per sequence: 2 for a batch of 3"):
        mha(x[:, :1], cache=cache, lengths=[1, 1])
    with pytest.raises(MaskError, match="lengths must be from 0 to the sequence's length: got -1 for 1"):
        mha(x[:, :1], cache=cache, lengths=[1, -1, 1])
    with pytest.raises(ArgumentError, match=r"index must be whole numbers \[B'\]: got torch.float32"):
        cache.reorder(torch.ones(3))
    with pytest.raises(ArgumentError, match="got 3 of 3; use 0 to 2"):
        cache.reorder([0, 3])
    with pytest.raises(ShapeError, match="length must be between 0 and 5: got 6"):
        cache.crop(6)
    memory = layer(causal=False).remember(x)
    with pytest.raises(ShapeError, match="must have the batch size of the input: 3, not 1"):
        layer(causal=False)(x[:1], cache=memory)
    with pytest.raises(ShapeError, match="6 of 4 channels, not 6 of 5"):
        layer(causal=False, head_dim=5)(x, cache=memory)


def test_what_a_ring_forgot_is_not_brought_back() -> None:
    mha, cache = layer(window=WINDOW), layer(window=WINDOW).cache(ring=True)
    mha(tokens(), cache=cache)
    with pytest.raises(ShapeError, match="length must be 5 for a ring that has dropped tokens: got 3"):
        cache.crop(3)


def test_a_cache_of_fixed_size_refuses_gradients() -> None:
    mha, x = layer().requires_grad_(), tokens()
    with pytest.raises(
        ArgumentError, match="max_length must be None for keys that require gradients: got 23"
    ):
        mha(x, cache=mha.cache(max_length=L))
    with torch.no_grad():
        mha(x, cache=mha.cache(max_length=L))


def test_keys_beside_a_cache_or_a_memory_are_refused() -> None:
    mha, x = layer(), tokens()
    with pytest.raises(ArgumentError, match=r"key must not be given with a cache: got float64 \[3, 23, 11\]"):
        mha(x, x.clone(), x.clone(), cache=mha.cache())
    assert mha(x, x, x, cache=mha.cache())[0].shape == x.shape
    cross = layer(causal=False)
    with pytest.raises(ArgumentError, match=r"key must not be given with a memory.*: got float64 \[3, 23"):
        cross(x, x, x, cache=cross.remember(x))
    with pytest.raises(ArgumentError, match="cache must be a KVCache or a Memory: got 'on'"):
        mha(x, cache="on")
    with pytest.raises(MaskError, match=r"mask must only depend on keys: got Mask\(right=0\)"):
        cross.remember(x, mask=Mask.causal())
    with pytest.raises(ArgumentError, match="positions must only be given to a module with rope="):
        mha(x, cache=mha.cache(), positions=torch.arange(L))
    with pytest.raises(ArgumentError, match="positions must only be given to a module with rope="):
        cross(x, cache=cross.remember(x), positions=torch.arange(L))


# Listening


def test_a_generation_is_watched_step_by_step() -> None:
    mha, x = layer(num_kv_heads=HK), tokens()
    cache = mha.cache()
    model = torch.nn.ModuleDict({"attention": mha})
    with torch.no_grad():
        truth = mha(x[:, :8])[0]
        with hw.watch(model) as heads:
            actual = [mha(x[:, :5], cache=cache, lengths=[5, 5, 5])[0]]
            actual += [mha(x[:, i : i + 1], cache=cache)[0] for i in range(5, 8)]
        with hw.watch(model) as whole:
            mha(x[:, :8])
    assert_judged(torch.cat(actual, 1), truth, truth, dtype=x.dtype)
    assert_judged(heads[0].entropy, whole[0].entropy, whole[0].entropy, dtype=x.dtype)
    assert heads[0].kind == "self"


def test_a_memory_is_heard_as_cross_attention() -> None:
    mha, x = layer(causal=False), tokens()
    memory = mha.remember(x)
    with hw.watch(torch.nn.ModuleDict({"cross": mha})) as heads:
        mha(x[:, :2], cache=memory)
    assert heads[0].kind == "cross"


@pytest.mark.parametrize("method", ["zero", "uniform"])
def test_heads_ablated_in_steps_are_ablated_as_all_at_once(method: str) -> None:
    mha, x = layer(num_kv_heads=HK, gate="head"), tokens()
    model = torch.nn.ModuleDict({"attention": mha})
    with torch.no_grad(), hw.ablate(model, {0: [1, 4]}, method=method):
        truth, cache = mha(x)[0], mha.cache()
        parts = [mha(x[:, a:b], cache=cache)[0] for a, b in ((0, 7), (7, 8), (8, L))]
    assert_judged(torch.cat(parts, 1), truth, truth, dtype=x.dtype)


def test_padding_of_a_ragged_prefill_is_in_no_statistic() -> None:
    mha, x, counts = layer(), tokens(), [5, 2, 4]
    model = torch.nn.ModuleDict({"attention": mha})
    with torch.no_grad():
        with hw.watch(model) as padded:
            mha(x[:, :5], cache=mha.cache(), lengths=counts)
        with hw.watch(model) as alone:
            for b, count in enumerate(counts):
                mha(x[b : b + 1, :count])
    assert_judged(padded[0].entropy, alone[0].entropy, alone[0].entropy, dtype=x.dtype)


# Compiled

COMPILED: dict[str, dict[str, Any]] = {
    "rope, grouped": {"rope": Rope(), "num_kv_heads": HK, "qk_norm": "rms", "gate": "head"},
    "window, relative": {"window": WINDOW, "relative_bias": Buckets(8, 13), "sinks": True, "softcap": 2.0},
    "pair, alibi": {"window": (WINDOW, 2), "alibi": True, "value_dim": DV},
    "ring": {"window": WINDOW, "alibi": True, "rope": Rope()},
}


def compiled_generation(
    options: dict[str, Any], ring: bool, counts: list[int] | None, backend: Any
) -> KVCache:
    """A prefill, ten compiled steps, two tokens without a compiler, one more step: all as at once."""
    mha, x = layer(**options), tokens()
    cache = mha.cache(B, RING if ring else L, ring)
    step = torch.compile(
        lambda y: mha(y, cache=cache, need_weights=False)[0], fullgraph=True, backend=backend, dynamic=False
    )
    output = torch.full((B, L, E), torch.nan, dtype=x.dtype)
    with torch.no_grad():
        done = [9] * B if counts is None else counts
        first = step(x[:, :9]) if counts is None else mha(x[:, :9], cache=cache, lengths=counts)[0]
        for b in range(B):
            output[b, : done[b]] = first[b, : done[b]]
        for size in (*[1] * 10, 2, 1):
            now = torch.stack([x[b, done[b] : done[b] + size] for b in range(B)])
            actual = step(now) if size == 1 else mha(now, cache=cache)[0]
            for b in range(B):
                output[b, done[b] : done[b] + size] = actual[b]
            done = [start + size for start in done]
            assert cache.seen == max(done)
        assert_as_whole(mha, output, x)
    return cache


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.thinned(keep=["ring-ragged"], slow=2)
def test_compiled_steps_are_one_graph_and_the_same_numbers(name: str, ragged: bool, counter: Any) -> None:
    compiled_generation(COMPILED[name], name == "ring", [3, 9, 6] if ragged else None, counter)
    assert counter.frame_count == (1 if ragged else 2)  # a prefill is another shape


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_steps_compiled_by_inductor_are_the_same_numbers(fresh_compiler: None) -> None:
    compiled_generation(COMPILED["rope, grouped"], False, None, "inductor")


def test_what_compiled_steps_cannot_do_is_refused() -> None:
    mha = layer()
    with pytest.raises(ArgumentError, match=r"must have a fixed batch .*max_length=23 and no batch"):
        check_in_graph(mha.cache(max_length=L))
    with pytest.raises(ArgumentError, match=r"need_weights must be False with a cache inside.*got True"):
        check_in_graph(mha.cache(B, L), need_weights=True)
    with pytest.raises(ArgumentError, match=r"mask must not be given.*got Mask\(right=0\)"):
        check_in_graph(mha.cache(B, L), mask=Mask.causal(), bias=None)
    q, k, v = torch.randn(3, B, H, 1, D, dtype=torch.float64)
    with pytest.raises(ShapeError, match="must have the batch size of the input: 2, not 3"):
        attend_in_graph(mha, q, k, v, mha.cache(2, L))
    with pytest.raises(
        ArgumentError, match="max_length must be None for keys that require gradients: got 23"
    ):
        attend_in_graph(mha, q, k.requires_grad_(), v, mha.cache(B, L))
    many = k.detach().expand(-1, -1, L + 1, -1)
    with pytest.raises(ShapeError, match="max_length must be at least the number of tokens: 24 > 23"):
        attend_in_graph(mha, many, many, many, mha.cache(B, L))


@pytest.mark.slow
def test_one_compiled_step_serves_caches_of_any_size(fresh_compiler: None) -> None:
    """The words of an error that is not raised were made in the graph, of a number that changes."""
    mha, x = layer(), tokens()
    step = torch.compile(
        lambda y, cache: mha(y, cache=cache, need_weights=False)[0], fullgraph=True, backend="eager"
    )
    with torch.no_grad():
        whole = mha(x[:, :3])[0]
        for size in (5, 7, 11):
            cache = mha.cache(B, size)
            message = [step(x[:, i : i + 1], cache) for i in range(3)]
            assert_judged(torch.cat(message, 1), whole, whole, dtype=x.dtype)


@pytest.mark.slow
def test_a_compiled_step_past_the_end_raises(fresh_compiler: None) -> None:
    mha, x = layer(), tokens()
    cache = mha.cache(B, 2)
    step = torch.compile(
        lambda y: mha(y, cache=cache, need_weights=False)[0], fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        step(x[:, :1])
        step(x[:, 1:2])
        with pytest.raises(
            RuntimeError, match="max_length must be at least the number of tokens: got one more"
        ):
            step(x[:, 2:3])
    with pytest.raises(ShapeError, match=r"2 \+ 1 > 2"):
        mha(x[:, :1], cache=cache)
