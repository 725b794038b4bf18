"""`Monitor`: the right numbers at the right steps, training as it was, and nothing left behind."""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from headwise.errors import ArgumentError, AttentionBypassed, HeadsAlarm
from headwise.listeners.ablation import ablate
from headwise.listeners.adapters import attach
from headwise.listeners.measured_step import Alarms, Measuring
from headwise.listeners.monitor import HISTORY, Monitor, trainer_callback
from headwise.listeners.pruning import prune
from headwise.nn import MultiHeadAttention

B, T, H, E, LAYERS, VOCABULARY = 3, 7, 5, 30, 2, 11
EXACT = 1e-10  # of a float64 model


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(E), MultiHeadAttention(E, H, causal=True, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention(self.norm(x))[0]
        return output


class Model(nn.Module):
    """A little language model of causal layers; checkpoint: None, or `use_reentrant`."""

    def __init__(self, dropout: float = 0.0, checkpoint: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, E)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.head = nn.Linear(E, VOCABULARY)
        self.checkpoint = checkpoint

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.checkpoint is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpoint)
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


class Plain(nn.Module):
    """Attention by torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.in_proj = nn.Embedding(VOCABULARY, E), nn.Linear(E, 3 * E)
        self.head = nn.Linear(E, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.in_proj(self.embed(input_ids)).unflatten(-1, (3 * H, E // H)).transpose(1, 2)
        q, k, v = x.chunk(3, dim=1)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return cross_entropy(self.head(y).flatten(0, 1), input_ids.flatten())


class Encoder(nn.Module):
    """torch's own encoder, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, E)
        layer = nn.TransformerEncoderLayer(E, H, 41, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        padding = torch.zeros_like(input_ids, dtype=torch.bool)
        padding[0, 4:] = True
        return (self.encoder(self.embed(input_ids), src_key_padding_mask=padding)[~padding] ** 2).mean()


def made(kind: Any = Model, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    return kind(**options).double().train()


def tokens(batch: int = B, length: int = T, seed: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def train(monitor: Monitor, steps: int, *texts: Tensor) -> list[int]:
    """So many steps, each with a forward a text; the numbers of those that were measured."""
    measured = []
    for _ in range(steps):
        number = monitor.number
        with monitor.step():
            for text in texts or (tokens(),):
                monitor.model(text).backward()
        if monitor.measured:
            measured.append(number)
    return measured


def measured(model: Any, *texts: Tensor, **options: Any) -> Monitor:
    """A monitor after one step, with a forward a text."""
    monitor = Monitor(model, **options)
    train(monitor, 1, *texts)
    return monitor


def traces(model: nn.Module) -> list[str]:
    """What an attached listener would leave on a model."""
    actual = []
    for path, module in model.named_modules():
        hooks = (*module._forward_hooks, *module._forward_pre_hooks)
        actual += [path] * (
            bool(hooks) or "forward" in vars(module) or "_headwise_own_forward" in vars(module)
        )
    return actual


# What is measured


def test_the_numbers_are_those_of_the_weights() -> None:
    model, text = made(), tokens()
    monitor = measured(model, text)
    x = model.embed(text)
    for number, layer in enumerate(model.layers):
        normed = layer.norm(x)
        _, weights = layer.attention(normed)
        p = weights.dense()  # [B, H, T, T]
        entropy = torch.special.entr(p).sum(-1).mean((0, 2))
        q, k = (
            proj(normed).unflatten(-1, (H, E // H)).transpose(1, 2)
            for proj in (layer.attention.q_proj, layer.attention.k_proj)
        )
        logits = (q @ k.mT * (E // H) ** -0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        norms = layer.attention.head_outputs(normed).norm(dim=-1).mean((0, 2))
        for head in range(H):
            at = f"heads/{number}/{head}/"
            assert monitor.latest[at + "entropy"] == pytest.approx(entropy[head].item(), abs=EXACT)
            assert monitor.latest[at + "first"] == pytest.approx(p[:, head, :, 0].mean().item(), abs=EXACT)
            assert monitor.latest[at + "max_logit"] == pytest.approx(logits[:, head].max().item(), abs=EXACT)
            share = (norms[head] / norms.mean()).item()
            assert monitor.latest[at + "output"] == pytest.approx(share, abs=EXACT)
        x = layer(x)


def test_the_summary_is_over_all_heads() -> None:
    monitor = measured(made())

    def every(name: str) -> list[float]:
        return [
            monitor.latest[f"heads/{layer}/{head}/{name}"] for layer in range(LAYERS) for head in range(H)
        ]

    count = LAYERS * H
    assert monitor.summary == {
        "entropy/min": min(every("entropy")),
        "entropy/mean": pytest.approx(sum(every("entropy")) / count),
        "max_logit/max": max(every("max_logit")),
        "first/mean": pytest.approx(sum(every("first")) / count),
        "output/min": min(every("output")),
        "dead": 0.0,
    }


def test_all_are_plain_numbers_ready_for_any_logger() -> None:
    monitor = measured(made(), statistics=("entropy", "max_logit", "first", "previous", "distance"))
    assert {type(value) for value in monitor.latest.values()} == {float}
    assert json.loads(json.dumps(monitor.latest)) == monitor.latest
    assert len(monitor.latest) == LAYERS * H * 6 + LAYERS + len(monitor.summary)
    assert {"previous/mean", "distance/mean"} < set(monitor.summary)


@pytest.mark.parametrize("args", ["entropy", ("entropy",), ["entropy", "entropy"]])
def test_statistics_may_be_chosen(args: Any) -> None:
    monitor = measured(made(), statistics=args, dead=None)
    assert sorted(monitor.summary) == ["entropy/mean", "entropy/min"]
    assert monitor.dead_heads == [] and len(monitor.latest) == LAYERS * H + 2


def test_no_statistics_at_all_still_finds_dead_heads() -> None:
    monitor = measured(made(), statistics=())
    assert sorted(monitor.summary) == ["dead", "output/min"]


def test_several_forwards_in_a_step_count_together() -> None:
    """Of different lengths and batches: every query counts the same."""
    model, texts = made(), (tokens(2, 7, seed=3), tokens(3, 7, seed=4))
    apart, together = measured(model, *texts), measured(model, torch.cat(texts))
    assert apart.latest == pytest.approx(together.latest, abs=EXACT)
    longer = measured(model, texts[0], tokens(1, 5, seed=5))
    first, other = measured(model, texts[0]), measured(model, tokens(1, 5, seed=5))
    for name in ("entropy", "first"):
        key = f"heads/1/2/{name}"
        expected = (14 * first.latest[key] + 5 * other.latest[key]) / 19
        assert longer.latest[key] == pytest.approx(expected, abs=EXACT)
    key = "heads/1/2/max_logit"
    assert longer.latest[key] == max(first.latest[key], other.latest[key])


def test_padding_is_left_out() -> None:
    model, text = made(Encoder), tokens()
    padded = measured(model, text)
    text[0, 4:] = (text[0, 4:] + 1) % VOCABULARY
    other = measured(model, text)
    assert padded.latest == pytest.approx(other.latest, abs=EXACT)


def test_with_dropout_the_weights_before_it_are_measured() -> None:
    dropping, plain = measured(made(dropout=0.5)), measured(made())
    for name in ("entropy", "first", "max_logit"):
        key = f"heads/0/3/{name}"
        assert dropping.latest[key] == pytest.approx(plain.latest[key], abs=EXACT)
    assert dropping.latest["heads/0/3/output"] != pytest.approx(plain.latest["heads/0/3/output"], abs=1e-6)


def test_under_autocast_the_numbers_keep_their_precision() -> None:
    model = made().float()
    exact, cast = measured(model), Monitor(model)
    with cast.step(), torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens())
    loss.backward()
    assert set(cast.latest) == set(exact.latest)
    assert cast.latest == pytest.approx(exact.latest, rel=0.05, abs=0.05)


def test_models_of_several_stacks_go_by_paths() -> None:
    model = nn.Transformer(E, 6, 2, 2, 41, batch_first=True).double()
    monitor = Monitor(model)
    with monitor.step():
        model(*torch.randn(2, B, T, E, dtype=torch.float64))
    assert "heads/decoder.layers.1.multihead_attn/4/entropy" in monitor.latest
    assert sum(name.startswith("layers/") for name in monitor.latest) == 6
    assert set(monitor.to_pandas()["layer"]) > {"encoder.layers.0.self_attn"}


def test_a_layer_keeps_its_name_where_others_are_left_out() -> None:
    """As layerdrop does: the only layer that runs is still layer 1."""
    model = made()
    monitor = measured(model, every=1)
    saved, model.layers = model.layers, nn.ModuleList([nn.Identity(), model.layers[1]])
    train(monitor, 1)
    model.layers = saved
    assert {name.split("/")[1] for name in monitor.latest if name.startswith("heads/")} == {"1"}


def test_numbers_that_are_not_numbers_are_shown() -> None:
    """A minimum or maximum in Python keeps or loses NaN by the order of its arguments."""
    model = made()
    with torch.no_grad():
        model.layers[1].attention.q_proj.weight[6] = math.nan
    monitor = Monitor(model)
    with monitor.step():
        model(tokens())
    assert all(math.isnan(monitor.latest[f"heads/1/1/{name}"]) for name in ("entropy", "max_logit", "first"))
    assert all(math.isnan(monitor.summary[name]) for name in ("entropy/min", "entropy/mean", "max_logit/max"))
    assert not math.isnan(monitor.latest["heads/1/0/entropy"])


# Dead heads


def quieten(attention: MultiHeadAttention, head: int, factor: float) -> None:
    """Multiply all a head says."""
    rows = slice(head * E // H, (head + 1) * E // H)
    with torch.no_grad():
        attention.v_proj.weight[rows] *= factor
        if attention.v_proj.bias is not None:
            attention.v_proj.bias[rows] *= factor


def test_a_head_that_says_nothing_is_dead() -> None:
    model = made()
    quieten(model.layers[0].attention, 3, 0.0)
    quieten(model.layers[1].attention, 0, 1e-4)
    quieten(model.layers[1].attention, 4, 0.0)
    monitor = measured(model)
    assert monitor.dead_heads == [(0, 3), (1, 0), (1, 4)]
    counts = {name: value for name, value in monitor.latest.items() if "dead" in name}
    assert counts == {"dead": 3.0, "layers/0/dead": 1.0, "layers/1/dead": 2.0}
    assert monitor.latest["heads/0/3/output"] == 0.0 and 0 < monitor.latest["heads/1/0/output"] < 1e-3
    model.eval()
    with torch.no_grad():
        saved = model(tokens())
        with ablate(model, monitor.dead_heads):
            assert model(tokens()).item() == pytest.approx(saved.item(), abs=1e-4)


@pytest.mark.parametrize(("dead", "expected"), [(0.01, 0), (0.1, 1), (0.0, 0), (0.99, None)])
def test_the_threshold_is_a_share_of_the_layers_mean(dead: float, expected: int | None) -> None:
    model = made()
    quieten(model.layers[0].attention, 3, 0.05)
    monitor = measured(model, dead=dead)
    share = monitor.latest["heads/0/3/output"]
    assert 0.02 < share < 0.1
    if expected is not None:
        assert monitor.summary["dead"] == expected
    else:
        assert 1 < monitor.summary["dead"] < LAYERS * H  # about half of all heads are below the mean


def test_a_head_that_rests_on_a_key_without_value_is_dead() -> None:
    """An attention sink; with a value there, the head repeats it: alive, and to be seen in `first`."""
    mha = MultiHeadAttention(E, H, bias=False).double()
    with torch.no_grad():
        mha.q_proj.weight[:6], mha.k_proj.weight[:6] = 0.0, 0.0
        mha.q_proj.weight[0, 0], mha.k_proj.weight[0, 1] = 100.0, 100.0
    x = torch.randn(B, T, E, dtype=torch.float64)
    x[..., 0], x[..., 1], x[:, 0, 1] = 1.0, 0.0, 10.0  # every query asks for the first key
    monitor = Monitor(mha, every=1)
    with monitor.step():
        mha(x)
    assert monitor.latest["heads/0/0/first"] > 0.999 and monitor.dead_heads == []
    with torch.no_grad():
        mha.v_proj.weight[:6, :2] = 0.0
    x[:, 0, 2:] = 0.0  # the first key has nothing to say
    with monitor.step():
        mha(x)
    assert monitor.latest["heads/0/0/first"] > 0.999 and monitor.dead_heads == [(0, 0)]


def test_where_a_whole_layer_says_nothing_all_its_heads_are_dead() -> None:
    model = made()
    for head in range(H):
        quieten(model.layers[1].attention, head, 0.0)
    monitor = measured(model)
    assert monitor.summary["dead"] == H and monitor.latest["layers/0/dead"] == 0


class Reversed(nn.Module):
    """Two stages of two layers, the last first."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in reversed(self.stages):
            for layer in reversed(stage):
                x = layer(x)
        return x


def test_dead_heads_are_those_that_prune_takes_out() -> None:
    """Layers were numbered here as they were heard, in `prune` as the model has them.

    Where a model runs its last layer first, the dead head of layer 1 was called one of layer 2 and cut there.
    """
    model = made(Reversed)
    quieten(model.stages[0][1].attention, 3, 0.0)
    monitor = Monitor(model)
    with monitor.step():
        model(torch.randn(B, T, E, dtype=torch.float64))
    assert monitor.dead_heads == [(1, 3)]
    pruned = prune(model, monitor.dead_heads).heads
    assert pruned.paths == ["stages.0.1.attention"] and pruned["stages.0.1.attention"] == [3]


class Twice(nn.Module):
    """One layer, run twice, on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(E, H, bias=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.attention(first)[0] + self.attention(second)[0]


def test_a_head_of_a_shared_layer_is_dead_if_it_is_so_in_every_visit() -> None:
    """Each visit was a layer of its own: `prune` took out heads that say much in the other visit, or
    refused "attention#1"."""
    model = made(Twice)
    quieten(model.attention, 4, 0.0)
    with torch.no_grad():
        model.attention.v_proj.weight[6:12] = 0.0
        model.attention.v_proj.weight[6:12, 0] = 1.0  # the second head repeats the first channel
    first, second = torch.randn(2, B, T, E, dtype=torch.float64)
    second[..., 0] = 0.0
    monitor = Monitor(model)
    with monitor.step():
        model(first, second)
    assert monitor.latest["heads/attention#1/1/output"] == 0.0 < monitor.latest["heads/0/1/output"]
    assert monitor.latest["layers/0/dead"] == 1 and monitor.latest["layers/attention#1/dead"] == 2
    assert monitor.dead_heads == [(0, 4)] and monitor.summary["dead"] == 1
    pruned = prune(model, monitor.dead_heads).heads
    assert pruned.paths == ["attention"] and pruned["attention"] == [4]


def test_a_path_that_is_a_number_stays_a_path() -> None:
    """Layers were read back out of "heads/0/1/output": the path "0" became layer 0, which `prune` refuses in
    a model of several stacks."""
    first, second = MultiHeadAttention(E, H, bias=False), MultiHeadAttention(E, H, bias=False)
    model = nn.Sequential()
    model.add_module("0", first)
    model.add_module("last", second)
    quieten(first, 1, 0.0)
    monitor = Monitor(model.float())
    with monitor.step():
        second(first(torch.randn(B, T, E))[0])
    assert monitor.dead_heads == [("0", 1)]
    assert set(monitor.to_pandas()["layer"]) == {"0", "last"}
    pruned = prune(model, monitor.dead_heads).heads
    assert pruned.paths == ["0"] and pruned["0"] == [1]


# When


def test_the_first_step_is_measured_and_one_in_every_so_many_after_it() -> None:
    monitor = Monitor(made(), every=3)
    assert monitor.latest == {} and monitor.history == [] and not monitor.measured
    assert train(monitor, 8) == [0, 3, 6]
    assert [step for step, _ in monitor.history] == [0, 3, 6]
    assert monitor.history[-1][1] == monitor.latest and monitor.number == 8


def test_training_that_resumes_or_begins_again_is_measured_at_once() -> None:
    monitor = Monitor(made(), every=100)
    monitor.number = 250
    assert train(monitor, 2) == [250]
    monitor.number = 299
    assert train(monitor, 3) == [300]
    monitor.number = 0
    assert train(monitor, 2) == [0]


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = measured(made(), every=1)
    actual = {"layers.0.attention": [{"entropy": 1.0}]}
    for number in range(1, HISTORY + 3):
        monitor._record(number, copy.deepcopy(actual), lambda path: 0)
    assert len(monitor.history) == HISTORY and monitor.history[0][0] == 3


def test_no_step_in_between_has_anything_attached() -> None:
    model = made()
    monitor = Monitor(model, every=2)
    for measured in (True, False, True):
        with monitor.step():
            assert bool(traces(model)) == measured
            model(tokens())
        assert monitor.measured == measured and traces(model) == []


def test_nothing_is_reported_as_measured_before_the_step_ends() -> None:
    monitor = measured(made(), every=1)
    with monitor.step() as inside:
        monitor.model(tokens())
        assert inside is monitor and not monitor.measured


# Training goes on as it was


def gradients(model: nn.Module, loss_of: Any, monitor: Monitor | None) -> dict[str, Tensor]:
    model.zero_grad()
    with nullcontext() if monitor is None else monitor.step():
        loss = loss_of()
    loss.backward()
    actual = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return actual | {"loss": loss.detach()}


@pytest.mark.parametrize("kind", [Model, Plain, Encoder, "gpt2"])
def test_loss_and_gradients_of_a_measured_step_are_the_same(kind: Any) -> None:
    text = tokens()
    model = gpt2().double() if kind == "gpt2" else made(kind)
    monitor = Monitor(model)

    def loss_of() -> Tensor:
        return model(input_ids=text, labels=text).loss if kind == "gpt2" else model(text)

    expected, actual = gradients(model, loss_of, None), gradients(model, loss_of, monitor)
    assert monitor.measured and actual.keys() == expected.keys() and len(actual) > 3
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=EXACT, rtol=0)
    if kind == "gpt2":
        assert len(monitor.latest) == 2 * H * 4 + 2 + 6 and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad:UserWarning")
def test_what_a_checkpoint_runs_again_is_not_counted(reentrant: bool) -> None:
    model, text = made(checkpoint=reentrant), tokens()
    listening = Measuring(("entropy",), True)
    with attach(model, listening):
        model(text).backward()
    counts = {two[1].unique().item() for layer in listening.layers.values() for two in layer.values()}
    assert counts == {B * T}
    checkpointed, plain = Monitor(model), measured(made(), text)
    assert train(checkpointed, 2, text) == [0]
    assert checkpointed.latest == pytest.approx(plain.latest, abs=EXACT)
    assert traces(model) == []


@pytest.mark.parametrize("measures", ["the whole", "what is inside"])
def test_with_distributed_data_parallel_a_rank_measures_its_part(measures: str, tmp_path: Path) -> None:
    from torch import distributed

    if not distributed.is_available():
        pytest.skip("by design: torch was built without torch.distributed")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        inner = made()
        model = nn.parallel.DistributedDataParallel(inner)
        monitor, alone = Monitor(model if measures == "the whole" else inner), Monitor(made())
        with monitor.step():
            model(tokens()).backward()
        train(alone, 1)
        assert monitor.latest == pytest.approx(alone.latest, abs=EXACT)
    finally:
        distributed.destroy_process_group()


# What goes wrong


def test_an_exception_leaves_the_model_clean_and_the_next_step_is_measured() -> None:
    model = made()
    monitor = Monitor(model, every=10)
    model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), monitor.step():
        model(tokens())
    model.head._forward_hooks.clear()
    assert traces(model) == [] and not monitor.measured and monitor.history == []
    assert train(monitor, 2) == [1]


def test_a_step_in_which_the_model_does_not_run_is_not_measured() -> None:
    monitor = Monitor(made(), every=2)
    assert train(monitor, 2) == [0]
    with monitor.step():
        pass
    assert not monitor.measured and train(monitor, 1) == [3]


def test_a_model_that_no_longer_runs_inside_its_steps_is_told_of_once() -> None:
    """As after `model = torch.compile(copy.deepcopy(model))`: the monitor stayed quiet for ever."""
    monitor = Monitor(made(), every=5)
    assert train(monitor, 5) == [0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(7):
            with monitor.step():
                pass
    assert [str(warning.message).partition(";")[0] for warning in caught] == [
        "monitor must see its model run in its steps: Model ran 0 times in 3 steps to be measured since "
        "step 0"
    ]
    assert caught[0].filename == __file__
    assert train(monitor, 1) == [12]


def test_a_model_that_never_runs_inside_a_step_is_an_error() -> None:
    monitor = Monitor(made())
    with (
        pytest.raises(ArgumentError, match="step must run the model: Model ran 0 times"),
        monitor.step(),
    ):
        pass


def test_a_step_that_is_never_entered_says_that_it_measured_nothing() -> None:
    """As `optimizer.step()` is written: nothing was measured, without a word."""
    model = made()
    monitor = Monitor(model)
    with pytest.warns(
        RuntimeWarning, match=r"nothing was measured by monitor\.step\(\).*write with"
    ) as caught:
        monitor.step()
    model(tokens())
    assert len(caught) == 1 and caught[0].filename == __file__ and monitor.history == []
    assert train(monitor, 2) == [0]


def test_a_step_asked_for_what_the_monitor_knows_sends_one_there() -> None:
    monitor = Monitor(made())
    for name in ("summary", "latest", "history"):
        with pytest.raises(
            AttributeError, match=rf"'{name}': it is an attribute of the monitor.*then monitor\.{name}"
        ):
            getattr(monitor.step(), name)
    step = monitor.step()
    with pytest.raises(AttributeError, match=r"step\(\) has no attribute 'summery'$"):
        step.summery  # type: ignore[attr-defined]  # noqa: B018
    with step:
        monitor.model(tokens())
    assert monitor.measured


def test_a_step_may_decorate_a_function_and_every_call_is_one() -> None:
    monitor = Monitor(made(), every=2)

    @monitor.step()  # type: ignore[operator]
    def forward() -> None:
        monitor.model(tokens())

    for _ in range(3):
        forward()
    assert monitor.number == 3 and [step for step, _ in monitor.history] == [0, 2]


def test_a_model_without_attention_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(AttentionBypassed, match="Sequential ran 1 times without any"), Monitor(model).step():
        model(torch.randn(2, 3))


class OwnAttention(nn.Module):
    """Computes its weights itself."""

    num_heads = H

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj(x).unflatten(-1, (H, E // H)).transpose(1, 2)
        return (torch.softmax(q @ q.mT, dim=-1) @ q).transpose(1, 2).flatten(2)


def test_layers_that_compute_their_own_weights_raise_or_are_read_or_left_out() -> None:
    model, x = OwnAttention(), torch.randn(B, T, E)
    with pytest.raises(AttentionBypassed, match="1 layer of OwnAttention"), Monitor(model).step():
        model(x)
    read, skipped = Monitor(model, fallback="eager"), Monitor(model, fallback="skip")
    for monitor in (read, skipped):
        with monitor.step():
            model(x)
        assert monitor.measured
    assert sorted(read.summary) == ["entropy/mean", "entropy/min", "first/mean"]
    assert skipped.latest == {}


@pytest.mark.parametrize("every", [0, -3, 2.5, True, "often"])
def test_every_must_be_a_number_of_steps(every: Any) -> None:
    with pytest.raises(ArgumentError, match=f"every must be a whole number of steps.*got {every!r}"):
        Monitor(made(), every)
    pytest.importorskip("transformers")
    with pytest.raises(ArgumentError, match=f"got {every!r}"):
        trainer_callback(every)


@pytest.mark.parametrize("name", ["entropi", "received", "dead"])
def test_statistics_must_be_known(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"statistics must be row statistics: got '{name}'"):
        Monitor(made(), statistics=("first", name))


@pytest.mark.parametrize("dead", [-0.1, 1.0, math.nan, True])
def test_dead_must_be_a_share(dead: float) -> None:
    with pytest.raises(ArgumentError, match=f"dead must be a share.*got {dead!r}"):
        Monitor(made(), dead=dead)


def test_model_and_fallback_are_checked_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"model must be a torch.nn.Module: got dict"):
        Monitor({})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"fallback must be .* got 'loud'"):
        Monitor(made(), fallback="loud")


# Tables


def test_a_table_has_a_row_a_head_and_measured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monitor = Monitor(made(), every=2)
    with pytest.raises(ArgumentError, match="must have measured a step: 0 were"):
        monitor.to_pandas()
    train(monitor, 3)
    table = monitor.to_pandas()
    assert list(table) == ["step", "layer", "head", "entropy", "max_logit", "first", "output"]
    assert len(table) == 2 * LAYERS * H and set(table["step"]) == {0, 2} and set(table["layer"]) == {0, 1}
    row = table[(table["step"] == 2) & (table["layer"] == 1) & (table["head"] == 3)].iloc[0]
    assert row["entropy"] == monitor.latest["heads/1/3/entropy"]
    assert repr(monitor) == "Monitor(Model, every=2, 2 steps measured)"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        monitor.to_pandas()


# Hugging Face's Trainer


def gpt2(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=E, n_layer=2, n_head=H,
        bos_token_id=0, eos_token_id=0, attn_implementation="sdpa", **(dropout | more),
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(config)


@contextmanager
def trainer(where: Path, callback: Any, model: Any = None, **more: Any) -> Iterator[Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = {
        "output_dir": str(where), "max_steps": 5, "per_device_train_batch_size": 2, "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True,
    }  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens(40)]
    yield transformers.Trainer(
        gpt2() if model is None else model,
        transformers.TrainingArguments(**(settings | more)),
        train_dataset=data,
        callbacks=[callback],
    )


in_trainer = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"
)


@in_trainer
@pytest.mark.parametrize("checkpointing", [False, True])
def test_in_a_trainer_measured_steps_reach_the_logs(checkpointing: bool, tmp_path: Path) -> None:
    callback = trainer_callback(every=2)
    more = {"gradient_accumulation_steps": 3, "gradient_checkpointing": checkpointing}
    with trainer(tmp_path, callback, **more) as trained:
        trained.train()
    assert [step for step, _ in callback.monitor.history] == [0, 2, 4]
    logged = [entry["step"] for entry in trained.state.log_history if "heads/entropy/min" in entry]
    assert logged == [1, 3, 5]  # Trainer counts a step when it is done
    last = [entry for entry in trained.state.log_history if entry["step"] == 5 and "loss" in entry][-1]
    assert last["heads/dead"] == callback.monitor.summary["dead"]
    assert len(callback.monitor.latest) == 2 * H * 4 + 2 + 6
    assert traces(trained.model.transformer.h) == [] and trained.model.config._attn_implementation == "sdpa"


@in_trainer
def test_a_callback_that_joins_comes_before_the_reporters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    calls: list[dict[str, Any]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            calls.append(dict(logs))

    with trainer(tmp_path, Reporter()) as trained:
        monitor = Monitor(trained.model, every=4, statistics="entropy")
        callback = trainer_callback(monitor)
        trained.add_callback(callback)
        assert callback.join(trained) is callback
        assert trained.callback_handler.callbacks.count(callback) == 1
        trained.train()
    assert callback.monitor is monitor and repr(callback) == "MonitorCallback(every=4)"
    assert [i for i, logs in enumerate(calls) if "heads/entropy/mean" in logs] == [0, 4]


@in_trainer
def test_after_an_exception_in_a_trainer_the_callback_can_be_closed(tmp_path: Path) -> None:
    model = gpt2()
    callback = trainer_callback(every=1)
    with trainer(tmp_path, callback, model) as trained:
        trained.compute_loss = lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trained.train()
        assert traces(model) != []
        callback.close()
        assert traces(model) == [] and model.config._attn_implementation == "sdpa"
        callback.close()
        del trained.compute_loss
        trained.train()
    assert [step for step, _ in callback.monitor.history] == [0, 1, 2, 3, 4] and traces(model) == []


@in_trainer
def test_in_a_trainer_an_alarm_reaches_the_logs_and_may_end_the_training(tmp_path: Path) -> None:
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, :E] *= 1e6  # the queries
    calls: list[Any] = []
    callback = trainer_callback(every=2, alarms=Alarms(entropy=None), on_alarm=calls.append)
    with (
        trainer(tmp_path, callback, model) as trained,
        pytest.warns(HeadsAlarm, match="of layer 1 has very large scores"),
    ):
        trained.train()
    assert {(alarm.step, alarm.layer, alarm.kind) for alarm in calls} == {(0, 1, "max_logit")}
    assert callback.monitor.raised == calls
    assert trained.state.log_history[0]["heads/alarms"] == len(calls)

    callback = trainer_callback(every=2, on_alarm=lambda alarm: 1 / 0)
    with (
        trainer(tmp_path, callback, model) as trained,
        pytest.warns(HeadsAlarm),
        pytest.raises(ZeroDivisionError),
    ):
        trained.train()
    assert traces(model) == []


def test_a_monitor_has_its_own_options() -> None:
    with pytest.raises(ArgumentError, match=r"options must not be .*: got dead, fallback and a monitor"):
        trainer_callback(Monitor(made()), dead=0.1, fallback="skip")


def test_without_transformers_the_callback_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.listeners.monitor import _callback_class

    _callback_class.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers accelerate"):
        trainer_callback()
