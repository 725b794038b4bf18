"""What is kept of calls: counted right, compared right, and the same after a file.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise import AttentionMap, Heads, Mask
from headwise.engines.statistics import ROW_STATISTICS, counted
from headwise.errors import ArgumentError, BudgetExceeded
from headwise.heads import jensen_shannon, locality, similarity, spread
from headwise.heads.collection import load_heads as load
from headwise.heads.head_distances import attention_between
from headwise.heads.record import OFFSETS, Marks, _counts, reduce
from headwise.scoring import Relative, alibi

B, H, HK, T, D = 2, 4, 2, 11, 8
REAL = torch.arange(T) < torch.tensor([[T], [5]])
ROWS = tuple(ROW_STATISTICS)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def a_map(seed: int = 0, **options: Any) -> AttentionMap:
    return AttentionMap(2 * normal(seed, B, H, T, D), normal(seed + 1, B, HK, T, D), **options)


def one_layer(*records: Any) -> Heads:
    heads = Heads()
    for record in records:
        heads.add("layers.0.attn", record)
    return heads


# Numbers of one call


@pytest.mark.parametrize("reach", [0, 2, 30])
@pytest.mark.parametrize("keep", [True, False])
def test_locality_is_measured_with_the_reach_that_was_asked_for(reach: int, keep: bool) -> None:
    """`local` was measured with the user's reach and held against an even head's with 8, whatever it was."""
    weights = a_map(causal=True)
    record = reduce(weights, names=ROWS, reach=reach, keep=keep, with_patterns=not keep)
    record.measure_patterns()
    torch.testing.assert_close(record.rows["locality"], locality(weights, reach), equal_nan=True)
    assert record.reach == reach


@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize("key_len", [1, 2, 4, 5, 9])
def test_queries_are_counted_without_a_tensor_as_with_one(query_len: int, key_len: int) -> None:
    """With more queries than keys, 10 over 4, each end was taken for one query: `itself` counted 9, not 4."""
    weights = AttentionMap(normal(0, 1, 2, query_len, D), normal(1, 1, 2, key_len, D))
    assert not weights._scores.may_see_nothing  # so that the way without a tensor is taken
    actual = _counts(weights)
    for offset, name in OFFSETS.items():
        expected = counted(name, weights._scores, weights.lse).sum(-1)
        assert torch.equal(actual[offset], expected), (offset, actual[offset], expected)


L = 17
SAID_AGAIN = torch.arange(L)[None] % 7  # ten queries have an earlier copy


def copying(after: int) -> AttentionMap:
    """One head that looks at what is `after` the last copy of its token, as they are in SAID_AGAIN."""
    i, j = torch.arange(L)[:, None], torch.arange(L)
    wanted = torch.where(i < 7, j == 0, j == i - 7 + after)
    return AttentionMap.from_weights(wanted.double()[None, None], Mask.causal())


@pytest.mark.parametrize(("after", "name"), [(0, "duplicate_token"), (1, "induction")])
def test_a_mean_is_of_the_queries_that_have_something_to_look_at(after: int, name: str) -> None:
    """Two calls, in one of which ten queries have an earlier copy, in the other none: the first decides."""
    never = torch.arange(L)[None]
    heads = one_layer(*(reduce(copying(after), marks=Marks(ids), keep=True) for ids in (SAID_AGAIN, never)))
    assert heads[0].statistics[name].item() == pytest.approx(1.0)
    assert [call.counts[name].item() for call in heads[0].calls] == [10, 0]
    assert heads[0].calls[1].rows[name].isnan().all()
    assert heads[0][0].label.name == name.replace("_", "-")


def test_one_word_said_twice_makes_no_induction_head() -> None:
    """In "The cat sat on the mat" a head of MiniLM has 0.70 where induction looks: one query's weight."""
    once = torch.arange(L)[None].clone()
    once[0, 9] = 2  # one query has an earlier copy
    heads = one_layer(reduce(copying(1), marks=Marks(once), keep=True))
    assert heads[0].statistics.induction.item() == pytest.approx(1.0)  # the number is what it is
    assert heads[0][0].label.name != "induction" and heads.find("induction") == []
    assert len(heads.find("induction", threshold=0.4)) == 1
    many = one_layer(*(reduce(copying(1), marks=Marks(once), keep=True) for _ in range(8)))
    assert len(many.find("induction")) == 1 and many[0][0].label.name == "induction"


def test_marks_that_a_text_does_not_have_are_not_measured() -> None:
    """A text without special tokens or punctuation had heads with 0.00 of their weight there."""
    none = torch.zeros(1, L, dtype=torch.bool)
    heads = one_layer(reduce(copying(1), marks=Marks(SAID_AGAIN, none, none), keep=True))
    assert heads[0].statistics.special.isnan().all() and heads[0].statistics.punctuation.isnan().all()
    assert heads.find("special", threshold=0.0) == []


def test_words_that_are_unknown_are_no_copies_of_each_other() -> None:
    same = torch.zeros(1, L, dtype=torch.int64)
    record = reduce(copying(1), marks=Marks(same, unknown=same == 0), with_patterns=True)
    assert record.rows["induction"].isnan().all() and record.rows["duplicate_token"].isnan().all()
    record = reduce(copying(1), marks=Marks(SAID_AGAIN, unknown=SAID_AGAIN == 3), with_patterns=True)
    assert record.counts["induction"].item() == 9  # not the one whose token is 3


def test_streaming_is_measured_where_there_is_something_else_to_see() -> None:
    """The first 384 queries see the first and the recent keys alone: of 401, all but 17 had 1 in any case."""
    zeros = torch.zeros(1, 1, 401, 1)
    record = reduce(AttentionMap(zeros, zeros, causal=True), with_patterns=True)
    assert record.counts["streaming"].item() == 17
    expected = sum(384 / n for n in range(385, 402)) / 17
    assert record.rows["streaming"].item() == pytest.approx(expected, rel=1e-5)


def test_a_head_without_a_choice_has_no_spread() -> None:
    """Entropy that is rounding, say -1e-8, over log 1 = 0 was infinite; the docstring promised NaN."""
    weights = a_map(mask=Mask.window(1))
    assert spread(weights).isnan().all()
    assert spread(weights, torch.full((B, H), -1e-8)).isnan().all()
    assert spread(a_map()).isfinite().all()


@pytest.mark.slow
def test_values_of_padding_are_not_compared() -> None:
    """The mean cosine of values was over all keys: much padding, all alike, made any heads look the same."""
    weights, values = a_map(mask=Mask.padding(REAL, REAL)), normal(2, B, HK, T, D)
    values = torch.where(REAL[:, None, :, None], values, 1.0)
    record = reduce(weights, between=("values", "outputs"), values=values, outputs=normal(3, B, H, T, D))
    expected = torch.cat([similarity(values[:1]), similarity(values[1:, :, :5])])
    torch.testing.assert_close(record.pairs["values"], expected)
    assert record.pairs["values"].shape == (B, HK, HK) and record.pairs["outputs"].shape == (B, H, H)
    assert record.counts["values"].tolist() == [[T] * HK, [5] * HK]
    record.map = weights
    actual = hw.diversity(one_layer(record)).values[0]
    torch.testing.assert_close(actual, (expected * torch.tensor([T, 5])[:, None, None]).sum(0) / (T + 5))


# Comparing


def test_how_many_queries_are_compared_is_obeyed_after_measuring() -> None:
    """After watch(diversity=True), `queries=` was ignored: any number gave what was measured."""
    q, k = normal(0, 1, 3, 300, D), normal(1, 1, 3, 300, D)
    weights = AttentionMap(3 * q, k)
    heads = one_layer(reduce(weights, names=ROWS, between=("attention",), keep=True))
    for queries in (7, 256, None):
        expected = jensen_shannon(weights, queries=queries)[0]
        torch.testing.assert_close(hw.diversity(heads, queries=queries).attention[0], expected)
    smooth = jensen_shannon(weights, smooth=0.1, queries=256)[0]
    torch.testing.assert_close(hw.diversity(heads, smooth=0.1).attention[0], smooth)
    heads[0].calls[0].map = None
    hw.diversity(heads)
    for options, messages in (
        ({"queries": 7}, "smooth=0.0, queries=7: layers.0.attn was measured with smooth=0.0, queries=256"),
        ({"queries": None}, "smooth=0.0, queries=None: layers.0.attn was measured"),
        ({"smooth": 0.1}, "smooth=0.1, queries=256: layers.0.attn was measured"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(f"maps must have been kept for {messages}")):
            hw.diversity(heads, **options)


def test_no_call_is_left_out_of_a_comparison_unsaid() -> None:
    """Of a short text with its map and a long one without, another number of queries can be had of one."""
    long = AttentionMap(normal(0, 1, H, 300, D), normal(1, 1, H, 300, D))
    heads = one_layer(
        reduce(a_map(), names=ROWS, between=("attention",), keep=True),
        reduce(long, names=ROWS, between=("attention",)),
    )
    assert hw.diversity(heads).number > 0
    with pytest.raises(ArgumentError, match=r"maps must have been kept for smooth=.*, queries=7: "):
        hw.diversity(heads, queries=7)


def test_all_queries_of_a_short_text_were_compared_already() -> None:
    """What was measured on all of 11 queries is what any larger number, or None, asks for."""
    heads = one_layer(reduce(a_map(), names=ROWS, between=("attention",)))
    expected = hw.diversity(heads).attention[0]
    for queries in (None, T, 1000):
        assert torch.equal(hw.diversity(heads, queries=queries).attention[0], expected)


def test_a_sequence_of_padding_alone_does_not_count() -> None:
    real = torch.stack([torch.ones(T, dtype=torch.bool), torch.zeros(T, dtype=torch.bool)])
    weights = a_map(mask=Mask.padding(real, real))
    torch.testing.assert_close(hw.diversity(weights).attention[0], jensen_shannon(weights)[0])


@pytest.mark.parametrize("measured", [True, False])
def test_heads_are_compared_by_queries_not_by_sequences(measured: bool) -> None:
    """A sequence of 5 tokens counted as much as one of 11, though all other means are over queries."""
    weights = a_map(mask=Mask.padding(REAL, REAL))
    pairs = jensen_shannon(weights)
    expected = (pairs[0] * T + pairs[1] * 5) / (T + 5)
    record = reduce(weights, names=ROWS, keep=not measured, between=("attention",) * measured)
    heads = one_layer(record)
    torch.testing.assert_close(hw.diversity(heads).attention[0], expected)
    torch.testing.assert_close(hw.diversity(weights).attention[0], expected)
    again = a_map(5)
    heads.add("layers.0.attn", reduce(again, names=ROWS, keep=True))
    both = (expected * (T + 5) + jensen_shannon(again).sum(0) * T) / (3 * T + 5)
    torch.testing.assert_close(hw.diversity(heads).attention[0], both)


@pytest.mark.parametrize("smooth", [0.0, 0.2])
def test_learned_sinks_count_across_layers(smooth: float) -> None:
    """The sink's share was dropped when layers were joined, and with it how much heads leave to it.

    It is one more key, which nothing is spread over; a layer without sinks has none of it.
    """
    sinks = torch.tensor([-2.0, 0.0, 2.0, 5.0])
    maps = [a_map(causal=True, sinks=sinks), a_map(3, causal=True)]
    heads = Heads()
    for number, weights in enumerate(maps):
        heads.add(f"layers.{number}.attn", reduce(weights, names=ROWS, keep=True))
    actual = hw.diversity(heads, across=True, smooth=smooth).distances
    assert actual is not None
    for number, weights in enumerate(maps):
        mine = slice(number * H, (number + 1) * H)
        within = jensen_shannon(weights, smooth=smooth).mean(0).sqrt()
        torch.testing.assert_close(actual[mine, mine], within, rtol=1e-4, atol=1e-4)
    p = torch.cat([torch.nn.functional.pad(maps[1].dense(), (0, 1))[:, :1], with_rest(maps[0])[:, 3:]], 1)
    p[..., :-1] = p[..., :-1] * (1 - smooth) + smooth / T
    p[..., -1] *= 1 - smooth
    expected = jensen_shannon(AttentionMap.from_weights(p.clamp(min=0)))[:, 0, 1].mean().sqrt()
    assert float(actual[H, 3]) == pytest.approx(float(expected), rel=1e-4)


def with_rest(weights: AttentionMap) -> Tensor:
    p = weights.dense()
    return torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)


def test_rows_of_all_heads_stay_within_the_budget() -> None:
    """All layers' rows were joined whatever their size; now it is asked first, and says what else to do."""
    heads = Heads()
    for number in range(2):
        heads.add(f"layers.{number}.attn", reduce(a_map(number), names=ROWS, keep=True))
    message = (
        r"weights of all heads \[2, 8, 11, 12\] must fit the memory budget: 16.5 KiB > 10 KiB; compare the"
    )
    with hw.budget.limit("10 KiB"), pytest.raises(BudgetExceeded, match=message):
        hw.diversity(heads, across=True)


def test_a_layer_that_nothing_was_kept_of_cannot_be_compared() -> None:
    heads = one_layer(reduce(a_map(), names=ROWS))
    assert attention_between(heads[0]) is None
    with pytest.raises(ArgumentError, match=r"layers.0.attn was called with \[2, 4, 11, 11\]; use watch"):
        hw.diversity(heads)


# In a file


def in_heads_first(x: Tensor) -> Tensor:
    """As models make q and k: heads are split from the channels, so that memory runs over them last."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


MAPS: dict[str, Any] = {
    "plain": lambda: a_map(),
    "causal": lambda: a_map(causal=True),
    "window": lambda: a_map(window=(3, 2)),
    "lengths": lambda: a_map(mask=Mask.padding(torch.tensor([T, 5]), torch.tensor([T, 5]))),
    "padding": lambda: a_map(mask=Mask.causal() & Mask.padding(REAL, REAL)),
    "documents": lambda: a_map(mask=Mask.documents(torch.arange(T) // 4)),
    "dense mask": lambda: a_map(mask=Mask.dense(normal(9, 1, H, T, T) > 0)),
    "expanded mask": lambda: a_map(mask=(normal(9, B, 1, T, T) > 0).expand(B, H, T, T)),
    "bias": lambda: a_map(bias=normal(8, 1, H, T, T), scale=0.3),
    "slopes": lambda: a_map(bias=alibi(H), causal=True),
    "relative": lambda: a_map(bias=(Relative(normal(8, H, 5)), alibi(H))),
    "sinks and cap": lambda: a_map(sinks=normal(7, H), softcap=3.0, causal=True),
    "chosen queries": lambda: a_map(causal=True).select(queries=[1, 3, 9], heads=[0, 3]),
    "bfloat16": lambda: AttentionMap(*(normal(i, B, H, T, D).bfloat16() for i in (0, 1)), causal=True),
    "split from channels": lambda: AttentionMap(*(in_heads_first(normal(i, B, H, T, D)) for i in (0, 1))),
    "given": lambda: AttentionMap.from_weights(a_map().dense(), Mask.padding(REAL, REAL)),
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", MAPS)
def test_a_map_in_a_file_is_the_same_map(name: str, tmp_path: Path) -> None:
    """Maps were written as dense weights and came back without their mask: the spread of a causal head that
    weighs 11 keys alike, 1, became 0.66. They are saved as what they are made of, and nothing is lost.
    """
    weights = MAPS[name]()
    names = [each for each in ROWS if name != "given" or each != "max_logit"]
    heads = one_layer(reduce(weights, names=names, keep=True, reach=3))
    heads.save(tmp_path / "heads")
    (call,) = load(tmp_path / "heads")[0].calls
    again, before = call.map, heads[0].calls[0].map
    assert again is not None and before is not None and repr(again) == repr(before)
    assert repr(again.mask) == repr(before.mask) and call.reach == 3
    assert torch.equal(again.lse, before.lse)
    assert torch.equal(again.dense(), before.dense())
    for actual, expected in (
        (spread(again), spread(before)),
        *((again.statistics(each)[each], before.statistics(each)[each]) for each in (*names, "received")),
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert call.rows.keys() == heads[0].calls[0].rows.keys()


def test_chosen_keys_of_a_map_stay_chosen(tmp_path: Path) -> None:
    record = reduce(a_map().select(keys=slice(2, 9, 3)))
    record.map, record._has_patterns = a_map().select(keys=slice(2, 9, 3)), True
    one_layer(record).save(tmp_path / "heads")
    (call,) = load(tmp_path / "heads")[0].calls
    assert call.map is not None and torch.equal(call.map.dense(), record.map.dense())


def test_maps_are_never_left_out_unsaid(tmp_path: Path) -> None:
    """Whenever a limit was set, maps were dropped and nothing was said."""
    heads = one_layer(reduce(a_map(causal=True), names=ROWS, keep=True))
    with hw.budget.limit("1 KiB"):
        heads.save(tmp_path / "heads")
    assert load(tmp_path / "heads")[0].calls[0].map is not None
    heads.save(tmp_path / "small", maps=False)
    without = load(tmp_path / "small")
    assert without[0].calls[0].map is None
    torch.testing.assert_close(without[0].statistics.entropy, heads[0].statistics.entropy, rtol=0, atol=0)


def test_given_weights_are_asked_about(tmp_path: Path) -> None:
    """They alone are a matrix: all of them together must fit, or they are left out on purpose."""
    arguments = AttentionMap.from_weights(a_map().dense())
    record = reduce(arguments, names=("entropy",), keep=True, with_patterns=True)
    heads = one_layer(record, record)
    message = (
        r"weights of 2 maps, the last \[2, 4, 11, 11\], must fit the memory budget: 7.6 KiB > 7 KiB; save w"
    )
    with hw.budget.limit("7 KiB"):
        with pytest.raises(BudgetExceeded, match=message):
            heads.save(tmp_path / "heads")
        heads.save(tmp_path / "heads", maps=False)
    assert load(tmp_path / "heads")[0].calls[1].map is None


def test_what_layers_share_is_saved_once(tmp_path: Path) -> None:
    """A dense mask, or a bias as T5's, is one tensor for all layers: not one copy each in the file."""
    shared, heads = Mask.dense(normal(9, 1, H, 100, 100) > 0), Heads()
    for number in range(6):
        q, k = normal(number, 2, 1, H, 100, D)
        heads.add(f"layers.{number}.attn", reduce(AttentionMap(q, k, mask=shared), keep=True))
    heads.save(tmp_path / "heads")
    every = 6 * 2 * H * 100 * D * 4
    assert (tmp_path / "heads").stat().st_size < every + 2 * shared.tensors["allowed"].nbytes
    again = load(tmp_path / "heads")
    for layer in range(6):
        assert torch.equal(again[layer].map.dense(), heads[layer].map.dense())


def test_log_sum_exps_not_made_yet_are_told_apart(tmp_path: Path) -> None:
    """Tensors are known by where they lie, and memory that is given back is handed out again."""
    heads = Heads()
    for number in range(8):
        heads.add(f"layers.{number}.attn", reduce(a_map(), keep=True))
        record = heads[number].calls[0]
        record.map, record._has_patterns = a_map(number, causal=True), True  # its lse is made when asked for
    heads.save(tmp_path / "heads")
    again = load(tmp_path / "heads")
    for number in range(8):
        assert torch.equal(again[number].map.lse, a_map(number, causal=True).lse)


def test_a_map_whose_keys_were_overwritten_is_not_saved(tmp_path: Path) -> None:
    q, k = normal(0, 2, 1, H, T, D)
    heads = one_layer(reduce(AttentionMap(q, k), names=ROWS, keep=True, with_patterns=True))
    k.zero_()
    with pytest.raises(ArgumentError, match="must not change while their map is in use: one was written to"):
        heads.save(tmp_path / "heads")
    assert not list(tmp_path.iterdir())


def test_files_of_before_are_refused(tmp_path: Path) -> None:
    """Of the first, maps have lost their masks; of the second, scores were means over other queries."""
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "old", {"headwise": '{"format": "headwise-heads-1"}'})
    with pytest.raises(ArgumentError, match="old' is 'headwise-heads-1', not 'headwise-heads-3'; save it"):
        load(tmp_path / "old")


def test_layers_keep_their_names_marks_and_tokens_in_a_file(tmp_path: Path) -> None:
    """What a layer goes by is the model's to say: from these two paths alone, 7 would be a path as well."""
    ids = torch.randint(3, (B, T))
    marks = Marks(ids, ids == 0, ids == 1, ids == 2)
    heads = Heads()
    heads.tokens, heads.title = [["a"] * T] * B, "Toy"
    for layer, path in ((7, "encoder.7.attn"), ("decoder.attn", "decoder.attn")):
        heads.add(path, reduce(a_map(causal=True), names=ROWS, marks=marks, keep=True), layer=layer)
    heads.save(tmp_path / "heads")
    again = load(tmp_path / "heads")
    assert [layer.layer for layer in again.values()] == [7, "decoder.attn"] and again.paths == heads.paths
    assert (again.tokens, again.title) == (heads.tokens, heads.title)
    actual = again["encoder.7.attn"].calls[0].marks
    assert actual is not None
    for name in ("ids", "special", "punctuation", "unknown"):
        assert torch.equal(getattr(actual, name), getattr(marks, name))


def test_a_watched_model_comes_back_whole(tmp_path: Path) -> None:
    """q and k of models are views of one projection; masks are shared by layers."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad(), hw.watch(model, diversity=True) as heads:
        model(torch.randn(B, T, 16), src_key_padding_mask=~REAL)
    heads.save(tmp_path / "heads")
    again = load(tmp_path / "heads")
    assert list(again) == list(heads)
    for first, other in zip(again.values(), heads.values(), strict=True):
        assert repr(first.map) == repr(other.map) and torch.equal(spread(first.map), spread(other.map))
        assert torch.equal(first.map.statistics("entropy").entropy, other.map.statistics("entropy").entropy)
    assert str(again.table()) == str(heads.table())
    assert hw.diversity(again).number == hw.diversity(heads).number


# Pictures


def test_a_picture_without_its_map_leaves_padded_queries_out() -> None:
    """Mass was divided by all queries of a cell: where two of three are padding, a row summed to 0.33."""
    numpy, pictures = pytest.importorskip("numpy"), pytest.importorskip("headwise.show.heatmaps")
    pytest.importorskip("matplotlib")
    lengths = torch.tensor([140, 301])
    q, k = normal(0, 2, 2, 1, 301, 4)
    weights = AttentionMap(q, k, mask=Mask.padding(lengths, query_lengths=lengths))
    drawn = []
    for keep in (True, False):
        heads = one_layer(reduce(weights, names=ROWS, pooled=100, keep=keep))
        drawn.append([pictures.cells_of(heads[0], b, 100)[0].filled(0) for b in (0, 1)])
    for saved, pooled in zip(*drawn, strict=True):
        numpy.testing.assert_allclose(pooled, saved, rtol=1e-5, atol=1e-8)
        sums = pooled.sum(-1)
        assert numpy.all(numpy.isclose(sums, 1, rtol=1e-4) | (sums == 0))
    made = reduce(weights, pooled=100).pooled_queries
    assert made is not None and made.sum(-1).tolist() == [140, 301]
    assert reduce(a_map(), pooled=4).pooled_queries is None


def test_layers_that_run_again_are_sorted_in_their_order() -> None:
    """The first visit goes by "attn#0" where its path is "attn": sorting by layer raised KeyError."""
    heads_table = pytest.importorskip("headwise.show.heads_tables")
    pytest.importorskip("rich")
    heads = Heads()
    for path in ("attn", "attn#1", "attn#2"):
        heads.add(path, reduce(a_map(), names=ROWS, keep=True))
    first = [heads_table.heads_table(heads, sort="layer", descending=each, top=1) for each in (False, True)]
    message = [next(iter(table.table.columns[0].cells)) for table in first]
    assert [str(each) for each in message] == ["0", "2"]
    assert math.isfinite(heads[0].statistics.entropy.sum())


class Words:
    all_special_ids: ClassVar[list[int]] = [0]

    def convert_ids_to_tokens(self, ids: int, /) -> str:
        return f"w{ids}"


def test_words_are_of_the_text_that_a_call_read_and_not_of_one_as_long() -> None:
    """Encoder and cross-attention had the words of the decoder, a text of vectors those of the last one."""
    sizes: Any = {"vocab_size": 61, "d_model": 10, "num_heads": 2, "num_layers": 1}
    source, target = torch.arange(1, 8)[None], torch.arange(11, 18)[None]
    both = hw.models.Transformer(hw.models.TransformerConfig(**sizes, kind="encoder-decoder"))
    with torch.no_grad(), hw.watch(both, tokenizer=Words()) as heads:
        both(source, target)
    messages = {path: heads.words(heads[path].calls[0]) for path in heads.paths}
    spoken = [f"w{token}" for token in range(11, 18)]
    assert list(messages.values()) == [None, spoken, None]
    heads.tokens = [["a", "b"]]
    assert heads.words(heads["decoder.layers.0.attention"].calls[0]) is None  # of another length

    whole = hw.models.Transformer(hw.models.TransformerConfig(**sizes))
    with torch.no_grad(), hw.watch(whole, tokenizer=Words()) as heads:
        whole(source)
        whole(target)
        whole.decoder(torch.randn(1, 7, 10))
    assert [heads.words(call) for call in heads[0].calls] == [None, spoken, None]
    for call in heads[0].calls:
        call.marks = None  # nothing is known of any text: tokens are what a user says they are
    assert [heads.words(call) for call in heads[0].calls] == [spoken] * 3
    assert heads.words(heads[0].calls[0], batch=1) is None
