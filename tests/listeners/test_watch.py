"""`hw.watch`: what is kept, over which queries means go, what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, BudgetExceeded

B, T, E, H = 2, 11, 24, 3


class Model(nn.Module):
    """Two layers, one stack; ids in, numbers out."""

    def __init__(self, layers: int = 2, causal: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, E)
        made = (hw.MultiHeadAttention(E, H, causal=causal, **options) for _ in range(layers))
        self.layers = nn.ModuleList(made)

    def forward(self, input_ids: Tensor, mask: Any = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x, mask=mask)[0]
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 53, (B, T), generator=torch.Generator().manual_seed(1))


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def states_of(model: nn.Module) -> list[set[str]]:
    return [set(module.__dict__) for module in model.modules()]


# What is measured


def test_numbers_of_a_layer_are_those_of_its_map(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as heads:
        model(ids)
    x = model.embed(ids)
    _, weights = model.layers[0](x)
    expected = weights.statistics(pooled=128)
    (call,) = heads[0].calls
    assert set(call.statistics) >= set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(call.statistics[name], value)
    torch.testing.assert_close(heads[0].statistics.entropy, expected.entropy.mean(0))
    torch.testing.assert_close(heads[0].statistics.max_logit, expected.max_logit.amax(0))
    assert heads[0].map.shape == (B, H, T, T) and heads[0].pooled.shape == (B, H, T, T)


def test_means_are_over_all_counted_queries_of_all_calls(model: Model, ids: Tensor) -> None:
    """A query weighs the same whatever call or sequence it is in."""
    with hw.watch(model) as heads:
        model(ids, mask=hw.Mask.padding([T, 3]))
        model(ids[:, :5])
    for name in ("entropy", "previous", "next", "distance"):
        rows: list[Tensor] = []
        for call in heads[1].calls:
            values = call.map.statistics(name, per="query")[name]
            counted = call.map.mask.counted(call.shape[2])
            offset = {"previous": -1, "next": 1}.get(name)
            for b in range(B):
                keep = torch.ones(call.shape[2], dtype=torch.bool) if counted is None else counted[b].clone()
                spots = torch.arange(call.shape[2]) + (offset or 0)
                keep &= (spots >= 0) & (spots < call.shape[3])
                rows.append(values[b][:, keep])
        torch.testing.assert_close(heads[1].statistics[name], torch.cat(rows, -1).mean(-1))


def test_only_what_is_asked_for_is_measured(model: Model, ids: Tensor) -> None:
    with hw.watch(model, statistics=("entropy", "received"), pooled=None, keep=False) as heads:
        model(ids)
    assert set(heads[0].calls[0].statistics) == {"entropy", "received"}
    with pytest.raises(ArgumentError, match=r"pooled maps must have been computed: none in layers\.0"):
        _ = heads[0].pooled
    with pytest.raises(
        ArgumentError, match=r"heads must have maps: layers\.0 kept none, .* \[2, 3, 11, 11\]"
    ):
        _ = heads[0].map
    with hw.watch(model, statistics=(), pooled=7, keep=False) as heads:
        model(ids)
    assert not heads[0].calls[0].rows and heads[0].pooled.shape == (B, H, 7, 7)


def test_patterns_are_measured_in_the_forward_or_later_alike(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as later:
        model(ids)
    with hw.watch(model, patterns=True, keep=False) as at_once:
        model(ids)
    names = {"induction", "duplicate_token", "spread", "locality"}
    assert names <= set(later[0].statistics) and names <= set(at_once[0].statistics)
    for name in names:
        torch.testing.assert_close(later[0].statistics[name], at_once[0].statistics[name], equal_nan=True)
    same = ids[:, :, None] == ids[:, None, :]
    earlier = same & torch.ones(T, T, dtype=torch.bool).tril(-1)
    weight = (later[0].map.dense() * earlier[:, None]).sum(-1).transpose(0, 1)  # [H, B, T]
    torch.testing.assert_close(later[0].statistics.duplicate_token, weight[:, earlier.any(-1)].mean(-1))


class Words:
    """As much of a tokenizer as is asked: 50 begins a text, 51 is a word it does not know."""

    all_special_ids = (50, 51)
    cls_token_id, unk_token_id = 50, 51

    def convert_ids_to_tokens(self, token: int) -> str:
        return {50: "[CLS]", 51: "[UNK]"}.get(token, "word")


def test_an_unknown_word_is_text(model: Model) -> None:
    """[UNK] is among a tokenizer's special ids: of text in emoji every head was "special-token (1.00)"."""
    ids = torch.full((1, T), 51)
    ids[0, 0] = 50
    with hw.watch(model, tokenizer=Words()) as heads:
        model(ids)
    torch.testing.assert_close(heads[0].statistics.special, heads[0].map.dense()[0, :, :, 0].mean(-1))
    assert heads[0].statistics.induction.isnan().all() and heads[0].statistics.duplicate_token.isnan().all()
    assert heads.tokens == [["[CLS]"] + ["[UNK]"] * (T - 1)]


def test_an_unknown_word_that_is_also_the_end_of_text_is_special(model: Model) -> None:
    """GPT-2 has one token for the start, the end and the unknown, and its bytes leave nothing unknown."""

    class Bytes(Words):
        bos_token_id = eos_token_id = 51

    ids = torch.full((1, T), 51)
    with hw.watch(model, tokenizer=Bytes()) as heads:
        model(ids)
    torch.testing.assert_close(heads[0].statistics.special, torch.ones(H, dtype=torch.float64))
    assert not heads[0].statistics.induction.isnan().any()


def test_long_maps_are_not_kept_unless_asked(
    model: Model, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.modules["headwise.listeners.capture"], "SHORT", T - 1)
    with hw.watch(model) as heads:
        model(ids)
    assert heads[0].calls[0].map is None
    with pytest.raises(
        ArgumentError, match=r"must be a label that was measured: got 'induction', .*patterns=True"
    ):
        heads.find("induction")
    with hw.watch(model, keep=True) as heads:
        model(ids)
    assert heads[0].calls[0].map is not None
    with hw.watch(model, keep=False) as heads:
        model(ids[:, :3])
    assert heads[0].calls[0].map is None


@pytest.mark.slow
def test_nothing_quadratic_is_made(ids: Tensor) -> None:
    """4,096 tokens watched with 24 MiB for anything dense: a matrix of one head alone would take 64."""
    torch.manual_seed(0)
    model = Model(layers=1)
    long = torch.randint(0, 53, (1, 4096))
    with hw.budget.limit("24 MiB"), torch.no_grad(), hw.watch(model, patterns=True) as heads:
        model(long)
    assert heads[0].pooled.shape == (1, H, 128, 128)
    weights = model.layers[0](model.embed(long))[1].select(queries=[3000])
    saved = torch.zeros(4096, dtype=torch.bool)
    saved[:128] = saved[3000 - 255 :] = True
    assert 0.05 < heads[0].statistics.streaming.min() < 0.5  # nearly even heads: 384 keys of up to 4,096
    assert weights.dense()[..., saved].sum(-1).max() < 0.5
    torch.testing.assert_close(heads[0].pooled.sum((-1, -2)), torch.full((1, H), 4096.0), rtol=1e-4, atol=0)
    with hw.budget.limit("24 MiB"), pytest.raises(BudgetExceeded):
        model.layers[0](model.embed(long))[1].dense()


# Beginning and ending


def test_so_it_is_after_an_exception(model: Model, ids: Tensor) -> None:
    before, states = model(ids), states_of(model)

    def fail() -> None:
        with hw.watch(model):
            model(ids)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(hw.errors.MaskError), hw.watch(model):
        model(ids, mask=torch.ones(3, 5, dtype=torch.bool))
    assert hooks_of(model) == 0 and states_of(model) == states
    assert torch.equal(model(ids), before)


def test_a_watch_can_be_started_stopped_and_entered_again(model: Model, ids: Tensor) -> None:
    watching = hw.watch(model)
    heads = watching.start()
    model(ids)
    assert watching.stop() is heads
    model(ids)  # not watched
    with watching as again:
        model(ids)
        with watching:
            model(ids)
        model(ids)
    assert again is heads and len(heads[0].calls) == 4 and hooks_of(model) == 0
    watching.stop()  # once too often is no harm


def test_two_watches_of_one_model_hear_the_same(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as outer:
        model(ids)
        with hw.watch(model) as inner, hw.watch(model.layers[1]) as part:
            model(ids)
    assert len(outer[0].calls) == 2 and len(inner[0].calls) == 1
    assert torch.equal(part[0].calls[0].statistics.entropy, inner[1].calls[0].statistics.entropy)
    assert hooks_of(model) == 0


def test_watching_keeps_no_model_alive(ids: Tensor) -> None:
    model = Model()
    with hw.watch(model, keep=False) as heads:
        model(ids)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None and len(heads) == 2


def test_a_model_without_attention_is_an_error_not_an_empty_answer() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())

    def run() -> None:
        with hw.watch(model):
            model(torch.randn(2, 3))
            model(torch.randn(2, 3))

    with pytest.raises(hw.errors.AttentionBypassed, match="Sequential ran 2 times without any"):
        run()
    with hw.watch(model) as heads:
        pass  # it did not run: nothing to complain of
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        heads.table()


# Asking


def test_heads_are_found_by_number_and_by_path(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as heads:
        model(ids)
    assert list(heads) == [0, 1] and len(heads) == 2 and heads.paths == ["layers.0", "layers.1"]
    assert heads[1] is heads["layers.1"] is heads[-1]
    assert 1 in heads and "layers.1" in heads and 2 not in heads
    assert heads[1, 2].head == 2 and tuple(heads[1, 2]) == (1, 2)
    with pytest.raises(ArgumentError, match=r"layer must be one of 0 to 1: got 2"):
        heads[2]
    with pytest.raises(ArgumentError, match=r"layer must be an attention layer: got 'layers\.7'"):
        heads["layers.7"]
    with pytest.raises(IndexError, match=r"head must be between 0 and 2: got 3 in layers\.0"):
        heads[0, 3]


def test_where_there_are_several_stacks_numbers_are_refused(ids: Tensor) -> None:
    model = nn.Transformer(E, 4, 2, 2, 32, batch_first=True)
    with hw.watch(model) as heads:
        model(torch.randn(B, T, E), torch.randn(B, 5, E))
    assert len(heads) == 6 and len(heads.stacks) == 3
    assert heads["decoder.layers.1.multihead_attn"].kind == "cross"
    with pytest.raises(ArgumentError, match=r"several stacks: got 0 for encoder\.layers\.\*\.self_attn"):
        heads[0]


def test_find_sorts_and_cuts(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as heads:
        model(ids)
    actual = heads.find("entropy")
    assert [h.score for h in actual] == sorted((h.score for h in actual), reverse=True) and len(
        actual
    ) == 2 * H
    assert heads.find("entropy", top=1) == actual[:1]
    middle = actual[2].score
    assert heads.find("entropy", threshold=middle) == actual[:3]
    assert heads.find("previous-token", threshold=0.0)[0].score == heads.find("previous", top=1)[0].score
    with pytest.raises(ArgumentError, match="got 'entropi'; did you mean 'entropy'"):
        heads.find("entropi")


def test_the_table_sorts_cuts_and_names_what_it_does_not_know(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as heads:
        model(ids)
    text = str(heads.table(sort="entropy", top=2, columns=("entropy", "first")))
    rows = [line.split() for line in text.splitlines() if line.strip() and line.split()[0].isdigit()]
    expected = heads.find("entropy", top=2)
    assert [(int(row[0]), int(row[1])) for row in rows] == [(h.layer, h.head) for h in expected]
    assert str(heads.table()).count("\n") > 2 * H
    with pytest.raises(ArgumentError, match="sort must be a column: got 'nonsense'"):
        heads.table(sort="nonsense")
    with pytest.raises(ArgumentError, match="columns must be measured: got 'nonsense'"):
        heads.table(columns=("nonsense",))


def test_pandas_gets_a_row_a_head(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as heads:
        model(ids)
    frame = heads.to_pandas()
    assert len(frame) == 2 * H and list(frame["head"]) == [*range(H)] * 2
    assert frame["entropy"].tolist() == [h.values["entropy"] for h in heads.all()]


def test_saved_heads_come_back(model: Model, ids: Tensor, tmp_path: Path) -> None:
    with hw.watch(model, diversity=True) as heads:
        model(ids, mask=hw.Mask.padding([T, 7]))
        model(ids[:, :5])
    file = tmp_path / "heads.safetensors"
    heads.save(file)
    again = hw.load_heads(file)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.safetensors"]
    assert again.paths == heads.paths and len(again[0].calls) == 2
    for layer in (0, 1):
        assert set(again[layer].statistics) == set(heads[layer].statistics)
        for name, value in heads[layer].statistics.items():
            torch.testing.assert_close(again[layer].statistics[name], value, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(again[layer].map.dense(), heads[layer].map.dense())
        assert torch.equal(again[layer].pooled, heads[layer].pooled)
    assert str(hw.diversity(again)) == str(hw.diversity(heads))
    assert str(again.table()) == str(heads.table())


def test_files_that_are_none_of_ours_are_refused(tmp_path: Path, model: Model, ids: Tensor) -> None:
    from safetensors.torch import save_file

    with pytest.raises(ArgumentError, match=r"there is no .*nothing\.safetensors"):
        hw.load_heads(tmp_path / "nothing.safetensors")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ArgumentError, match=r"path must be a safetensors file: .*text"):
        hw.load_heads(tmp_path / "text")
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"path must be a file written by heads\.save: .*other' is None"):
        hw.load_heads(tmp_path / "other")
    with hw.watch(model) as heads:
        model(ids)
    with pytest.raises(ArgumentError, match="path must be writable"):
        heads.save(tmp_path / "missing" / "heads.safetensors")
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        hw.Heads().save(tmp_path / "empty")


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "yes"}, "keep must be True, False or 'auto': got 'yes'"),
        ({"pooled": 0}, "pooled must be a number of cells or None: got 0"),
        ({"pooled": True}, "pooled must be a number of cells or None: got True"),
        ({"reach": -1}, "reach must not be negative: got -1"),
        ({"statistics": "entropi"}, "statistics must be known names: got 'entropi'; did you mean 'entropy'"),
        ({"fallback": "slow"}, "fallback must be None, 'eager' or 'skip': got 'slow'"),
    ],
)
def test_wrong_options_are_named(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        hw.watch(model, **options)


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(ArgumentError, match=r"model must be a torch\.nn\.Module: got str"):
        hw.watch("bert-base-uncased")  # type: ignore[arg-type]


# Diversity


def test_diversity_of_watched_heads_is_that_of_their_maps(model: Model, ids: Tensor) -> None:
    with hw.watch(model, diversity=True) as measured:
        model(ids)
    with hw.watch(model) as saved:
        model(ids)
    actual, expected = hw.diversity(measured), hw.diversity(saved)
    for layer in (0, 1):
        torch.testing.assert_close(actual.attention[layer], expected.attention[layer])
        assert actual.outputs[layer].shape == actual.values[layer].shape == (H, H)
    assert actual.number == pytest.approx(sum(expected.by_layer.values()) / 2)
    assert "layer 1: " in str(actual) and "outputs' cosine" in str(actual)


def test_heads_of_all_layers_can_be_laid_out_together(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as heads:
        model(ids)
    across = hw.diversity(heads, across=True)
    assert across.layout().shape == (2 * H, 2) and len(across.clusters(3)) == 2 * H
    assert across.heads[H] == (1, 0)
    within = hw.diversity(heads[1])
    torch.testing.assert_close(across.distances[H:, H:], within.distances, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="measured across layers: it was within each of 2 layers"):
        hw.diversity(heads).layout()


def test_diversity_says_what_it_needs(model: Model, ids: Tensor) -> None:
    with hw.watch(model, keep=False) as heads:
        model(ids)
    with pytest.raises(ArgumentError, match=r"maps must have been kept, or diversity measured: layers\.0"):
        hw.diversity(heads)
    with pytest.raises(hw.errors.ShapeError, match=r"weights must be \[B, H, T, S\]: got \[3, 5\]"):
        hw.diversity(torch.ones(3, 5))
    with pytest.raises(ArgumentError, match="heads must be watched heads, a map or weights: got list"):
        hw.diversity([])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        hw.diversity(hw.Heads())
    two = nn.Transformer(E, 4, 1, 1, 32, batch_first=True)
    with hw.watch(two) as heads:
        two(torch.randn(B, T, E), torch.randn(B, 5, E))
    with pytest.raises(ArgumentError, match="layers must have the same lengths to be compared"):
        hw.diversity(heads, across=True)


# Placement


def test_a_model_that_is_spread_over_devices_is_heard(ids: Tensor) -> None:
    """accelerate replaces the forward of every module: its own is then the one inside."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 4, 32, batch_first=True), 2).eval()
    x = torch.randn(B, T, E)
    with torch.no_grad(), hw.watch(model) as expected:
        before = model(x)
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu")
    accelerate.hooks.add_hook_to_module(model, hook)
    for layer in model.layers:
        accelerate.hooks.add_hook_to_module(layer.self_attn, hook)
    states = states_of(model)
    with torch.no_grad(), hw.watch(model) as heads:
        inside = model(x)
    assert states_of(model) == states and torch.equal(inside, before)
    assert torch.equal(heads[1].statistics.entropy, expected[1].statistics.entropy)


class Shared(nn.Module):
    """One layer, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = hw.MultiHeadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.attend(x)[0]
        return x


def test_a_layer_that_runs_again_is_several_layers() -> None:
    """Shared weights, as in ALBERT: three layers to look at, and each can be switched off alone."""
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(B, T, E)
    with hw.watch(model) as heads:
        model(x)
        model(x)
    assert heads.paths == ["attend", "attend#1", "attend#2"] and list(heads) == [0, 1, 2]
    assert [len(heads[layer].calls) for layer in heads] == [2, 2, 2]
    assert [heads[layer, 1].path for layer in heads] == ["attend#0", "attend#1", "attend#2"]
    without = []
    for chosen in ([heads[0, 1]], [heads[2, 1]], [("attend", 1)]):
        with hw.ablate(model, chosen):
            without.append(model(x))
    assert not torch.allclose(without[0], without[1]) and not torch.allclose(without[0], without[2])


# Found in review


class TwoLevels(nn.Module):
    """Stages of blocks, run from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(hw.MultiHeadAttention(E, H) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in reversed(self.stages):
            for block in stage:
                x = x + block(x)[0]
        return x


def test_layer_numbers_are_the_models_whatever_ran_first() -> None:
    """Numbered in the order heard, layer 0 was another one for `watch` than for `ablate`."""
    torch.manual_seed(0)
    model, x = TwoLevels(), torch.randn(B, T, E)
    with hw.watch(model) as heads:
        model(x)
    assert heads.paths[0] == "stages.1.0" and heads[0].path == "stages.0.0" and heads[2].path == "stages.1.0"
    with hw.ablate(model, [heads[2, 1]]):
        actual = model(x)
    with hw.ablate(model, [("stages.1.0", 1)]):
        assert torch.equal(model(x), actual)


def test_watches_may_end_in_any_order(model: Model, ids: Tensor) -> None:
    """The first to end took the compiler's stance with it, the last put back what was not there before."""
    from torch._dynamo.eval_frame import _stance

    before = _stance.stance
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 4, 32, batch_first=True), 1)
    nested, states = encoder.use_nested_tensor, states_of(encoder)
    first, second = hw.watch(encoder), hw.watch(encoder.layers[0])
    third = hw.watch(model)
    first.start(), second.start(), third.start()
    first.stop()
    with torch.no_grad():
        encoder.eval()(torch.randn(B, T, E))
    model(ids)
    second.stop(), third.stop()
    from torch._dynamo import eval_frame

    assert eval_frame._stance.stance == before and encoder.use_nested_tensor is nested
    assert len(second.heads) == 1 and len(third.heads) == 2 and not len(first.heads)
    assert states_of(encoder) == states and hooks_of(encoder) == hooks_of(model) == 0


def test_tokens_written_over_later_do_not_change_what_was_seen(model: Model, ids: Tensor) -> None:
    with hw.watch(model) as heads:
        model(ids)
    with hw.watch(model, patterns=True) as at_once:
        model(ids)
    ids.random_(0, 53)
    assert torch.equal(heads[0].statistics.induction, at_once[0].statistics.induction)


class Folded(nn.Module):
    """Heads folded into the batch, as bmm-minded code has them; or a cache that grows by one query."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv = H, nn.Linear(E, 3 * E)

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        whole = x if past is None else torch.cat([past, x], 1)
        q, k, v = (
            part.unflatten(-1, (H, -1)).transpose(1, 2).flatten(0, 1) for part in self.qkv(whole).chunk(3, -1)
        )
        q = q[:, -x.shape[1] :]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return y.unflatten(0, (-1, H)).transpose(1, 2).flatten(2), whole


def test_heads_folded_into_the_batch_are_heads() -> None:
    model, x = Folded(), torch.randn(B, T, E)
    before, _ = model(x)
    with hw.watch(model) as heads:
        inside, _ = model(x)
    torch.testing.assert_close(inside, before)
    assert heads[0].map.shape == (B, H, T, T)


def test_one_new_query_goes_on_with_self_attention() -> None:
    """A step with a cache made a whole layer cross-attention, and its labels vanished."""
    model, x = Folded(), torch.randn(B, T, E)
    with hw.watch(model) as heads:
        _, past = model(x)
        model(torch.randn(B, 1, E), past)
    assert [call.kind for call in heads[0].calls] == ["self", "self"]
    assert [call.shape[2:] for call in heads[0].calls] == [(T, T), (1, T + 1)]


def test_what_is_not_there_is_said_plainly(model: Model, ids: Tensor) -> None:
    with hw.watch(model, keep=False) as heads:
        model(ids)
    assert heads.get(99) is None and -1 in heads and 7 not in heads
    with pytest.raises(AttributeError, match=r"induction was not measured in layers\.0; use .*patterns=True"):
        _ = heads[0].induction
    with pytest.raises(ArgumentError, match="top must be at least 1: got -1"):
        heads.find("entropy", top=-1)
    with pytest.raises(ArgumentError, match="keep must be True, False or 'auto': got 1"):
        hw.watch(model, keep=1)
    assert len({heads[0, 1], heads[0, 1], heads[1, 1]}) == 2
