"""Alarms of `Monitor`: rung by heads that were made ill, by none that is well, and once."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Mask
from headwise.errors import ArgumentError, HeadsAlarm, HeadwiseError
from headwise.listeners.measured_step import BACK, Alarm, Alarms, AlarmState
from headwise.listeners.monitor import Monitor
from headwise.nn import MultiHeadAttention
from small_models import hooks_on
from trained import minilm

B, T, H, E, LAYERS = 2, 17, 5, 30, 2
EXACT = 1e-10  # of a float64 model


class Stack(nn.Module):
    """Layers of attention, one after another, that give the entropy of their heads as well."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(E, H, **options) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        entropy = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            output, weights = layer(x)
            x = x + output
            entropy = entropy + weights.statistics("entropy").entropy.mean() / LAYERS
        return x, entropy


def made(**options: Any) -> Any:
    torch.manual_seed(1)
    return Stack(**options).double()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def look(monitor: Monitor, x: Tensor | None = None) -> list[str]:
    """One step, and the warnings of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monitor.step():
            monitor.model(numbers(B, T, E) if x is None else x)
    assert all(warning.category is HeadsAlarm and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def sharpen(model: Any, factor: float, layer: int = 0) -> None:
    """Multiply the scores of a layer."""
    with torch.no_grad():
        model.layers[layer].q_proj.weight *= factor
        model.layers[layer].q_proj.bias *= factor


def sharp() -> Any:
    """A model whose first layer's scores are out of bounds."""
    model = made()
    sharpen(model, 1e5)
    return model


# What is measured


def shares(weights: Tensor, allowed: Tensor, counted: Tensor) -> Tensor:
    """[H]: entropy summed over queries that count, over that of even attention; weights [B, H, T, S]."""
    even = allowed.sum(-1).clamp(min=1).double().log()  # [B, H, T]
    entropy = torch.special.entr(weights).sum(-1)
    return (entropy * counted).sum((0, 2)) / (even * counted).sum((0, 2))


RULES = {
    "full": Mask(),
    "causal": Mask.causal(),
    "window": Mask.window(5),
    "padding": Mask.padding([11, 17], query_lengths=[11, 17]),
    "documents": Mask.documents(torch.arange(T) // 7) & Mask.causal(),
    "dense": Mask.dense(numbers(B, H, T, T, seed=3) > 0),
}


@pytest.mark.parametrize("name", RULES)
def test_the_share_is_of_what_even_attention_to_the_same_keys_has(name: str) -> None:
    mask, mha, x = RULES[name], made(num_kv_heads=1).layers[0], numbers(B, T, E)
    monitor = Monitor(mha, alarms=Alarms())
    with monitor.step():
        _, weights = mha(x, mask=mask)
    p, counted = weights.dense(), weights.counted_queries("entropy")
    expected = shares(p, p > 0, counted)
    for head in range(H):
        measured = monitor.latest[f"heads/0/{head}/entropy_share"]
        assert measured == pytest.approx(expected[head].item(), abs=EXACT)
    assert monitor.latest["layers/0/entropy_share"] == pytest.approx(expected.median().item(), abs=EXACT)
    assert monitor.summary["entropy_share/mean"] == pytest.approx(expected.mean().item(), abs=EXACT)
    assert 0.5 < expected.min() and expected.max() < 1


def test_keys_that_a_bias_hides_are_not_seen() -> None:
    mha, x = made().layers[0], numbers(B, T, E)
    bias = numbers(1, H, T, T, seed=5)
    bias[..., 7:] = torch.finfo(torch.float64).min
    monitor = Monitor(mha, alarms=Alarms())
    with monitor.step():
        _, weights = mha(x, bias=bias)
    p = weights.dense()
    expected = shares(p, (bias > -1).expand_as(p) | (p > 0), torch.ones(B, H, T))
    for head in range(H):
        measured = monitor.latest[f"heads/0/{head}/entropy_share"]
        assert measured == pytest.approx(expected[head].item(), abs=EXACT)


def test_a_sink_counts_as_one_more_key() -> None:
    """Even attention to keys and sink has all the entropy there is."""
    mha = MultiHeadAttention(E, H, sinks=True).double()
    with torch.no_grad():
        mha.q_proj.weight.zero_()
        mha.q_proj.bias.zero_()
        mha.sinks.zero_()
    monitor = Monitor(mha, alarms=Alarms())
    with monitor.step():
        mha(numbers(B, T, E))
    assert monitor.latest["heads/0/3/entropy_share"] == pytest.approx(1.0, abs=EXACT)


def test_what_alarms_look_at_is_measured_beside_what_was_asked_for() -> None:
    monitor = Monitor(made(), statistics="first", alarms=Alarms(entropy=None))
    look(monitor)
    assert sorted(monitor.summary) == ["alarms", "dead", "first/mean", "max_logit/max", "output/min"]


# Heads that are ill


def collapse(model: Any, monitor: Monitor, most: int = 41) -> list[float]:
    """Training that lowers entropy until the heads of layer 0 have next to none; their share by step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    steps: list[float] = []
    while not steps or steps[-1] > 0.005:
        optimizer.zero_grad()
        with monitor.step():
            _, entropy = model(numbers(B, T, E))
        entropy.backward()
        optimizer.step()
        steps.append(monitor.latest["layers/0/entropy_share"])
        assert len(steps) < most, steps
    return steps


def test_training_into_a_collapse_rings_once_and_again_after_it_was_well() -> None:
    """Entropy is trained down to nothing; back at the weights of before, once more."""
    model = made()
    before = copy.deepcopy(model.state_dict())
    calls: list[Alarm] = []
    monitor = Monitor(model, every=1, alarms=Alarms(max_logit=None), on_alarm=calls.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = collapse(model, monitor)
        model.load_state_dict(before)
        assert collapse(model, monitor) == steps
    of_layer = [alarm for alarm in calls if alarm.layer == 0]
    first = next(step for step, share in enumerate(steps) if share < 0.02)
    assert of_layer == [
        Alarm(step, 0, None, "entropy", steps[first], 0.02) for step in (first, first + len(steps))
    ]
    assert steps[0] > 0.5 and len(steps) - first > 1  # it stayed so, and was told of once
    assert monitor.raised == calls and {alarm.kind for alarm in calls} == {"entropy"}
    assert all(warning.category is HeadsAlarm for warning in caught) and 2 <= len(caught) <= len(calls)


def test_scores_that_grow_ring_head_by_head_in_one_warning() -> None:
    model = made()
    monitor = Monitor(model, every=1, alarms=Alarms(entropy=None, max_logit=100))
    assert look(monitor) == []
    sharpen(model, 1e4)
    (message,) = look(monitor)
    values = [monitor.latest[f"heads/0/{head}/max_logit"] for head in range(H)]
    worst = max(range(H), key=values.__getitem__)
    assert min(values) > 100
    assert message == (
        f"head {worst} of layer 0 has very large scores: its largest logit is {values[worst]:.4g} (threshold "
        "100), at step 1; lower the learning rate, normalise queries and keys, or cap them with softcap"
        f"; {H - 1} more heads: see monitor.raised"
    )
    assert {(alarm.layer, alarm.head) for alarm in monitor.raised} == {(0, head) for head in range(H)}
    assert monitor.summary["alarms"] == H
    assert look(monitor) == [] and len(monitor.raised) == H
    sharpen(model, 1e-4)
    assert look(monitor) == [] and monitor.summary["alarms"] == 0
    sharpen(model, 1e4)
    assert len(look(monitor)) == 1 and len(monitor.raised) == 2 * H


@pytest.mark.parametrize("weight", ["v_proj", "nearly"])
def test_a_head_that_dies_rings(weight: str) -> None:
    model = made(bias=False)
    monitor = Monitor(model, every=1, alarms=Alarms())
    assert look(monitor) == []
    with torch.no_grad():
        model.layers[1].v_proj.weight[6:12] *= 0 if weight == "v_proj" else 1e-4
    (message,) = look(monitor)
    value = monitor.latest["heads/1/1/output"]
    assert message == (
        f"head 1 of layer 1 has almost no output: its norm is {value:.3g} times the layer's mean norm "
        "(threshold 0.01), at step 1; check its part of W_V, or remove it with headwise.prune"
    )
    assert monitor.raised == [Alarm(1, 1, 1, "dead", value, 0.01)]
    assert [(alarm.layer, alarm.head) for alarm in monitor.raised] == monitor.dead_heads


def test_a_single_sharp_head_is_no_collapse_and_more_than_half_are() -> None:
    for count in range(H + 1):
        model = made()
        with torch.no_grad():
            model.layers[0].q_proj.weight[: count * E // H] *= 1e4
        message = look(Monitor(model, alarms=Alarms(max_logit=None, dead=False)))
        assert len(message) == (count > H // 2)
        assert not message or message[0].startswith("attention in layer 0 has collapsed: more than half of")


def test_numbers_that_are_none_are_past_any_threshold() -> None:
    model = made()
    with torch.no_grad():
        model.layers[1].q_proj.weight[6] = math.nan
    monitor = Monitor(model, alarms=Alarms())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monitor.step():
            model.layers[1](numbers(B, T, E))
    assert [str(warning.message).partition(",")[0] for warning in caught] == [
        "attention in layer 1 has collapsed: more than half of its heads have at most nan of the largest "
        "entropy (threshold 0.02)",
        "head 1 of layer 1 has very large scores: its largest logit is nan (threshold 250)",
    ]


# Heads that are well


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"num_kv_heads": 1}, {"num_heads": 1}])
def test_healthy_training_raises_nothing(options: dict[str, Any]) -> None:
    """Any warning is an error here."""
    torch.manual_seed(1)
    heads = options.pop("num_heads", H)
    model = nn.Sequential(nn.Linear(E, E), MultiHeadAttention(E, heads, **options))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = Monitor(model, every=1, alarms=Alarms(), on_alarm=pytest.fail)
    x = torch.randn(7, T, E)
    losses = []
    for _ in range(41):
        optimizer.zero_grad()
        with monitor.step():
            loss = (model[1](model[0](x))[0] - x.roll(1, 1)).square().mean()  # repeat the token before
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0] and monitor.summary["alarms"] == 0


@pytest.mark.parametrize("length", [1, 2])
def test_queries_of_one_key_have_no_entropy_to_lose(length: int) -> None:
    model = made(causal=True)
    monitor = Monitor(model, alarms=Alarms(), on_alarm=pytest.fail)
    with monitor.step():
        model(numbers(B, length, E))
    lowest = monitor.summary["entropy/min"]
    rounded = torch.finfo(torch.float64).eps  # an l_i is not the score of the one key to the last bit
    assert abs(lowest) <= rounded if length == 1 else lowest > rounded
    assert ("layers/0/entropy_share" in monitor.latest) == (length == 2)


@pytest.mark.parametrize(
    "text", [["yes"], ["the"], ["The cat sat on the mat because it was tired.", "yes"], [__doc__ * 20]]
)
def test_a_trained_model_raises_nothing(text: list[str]) -> None:
    """One of its heads is as sharp as can be: it looks at the next token, and that is its work."""
    pytest.importorskip("transformers")
    loaded = minilm()
    batch = loaded.tokenizer(text, return_tensors="pt", padding=True, truncation=True, max_length=211)
    monitor = Monitor(loaded.model, alarms=Alarms(), on_alarm=pytest.fail)
    with torch.no_grad(), monitor.step():
        loaded.model(**batch)
    assert monitor.summary["max_logit/max"] < 100 and monitor.summary["output/min"] > 0.1
    layers = [monitor.latest[f"layers/{layer}/entropy_share"] for layer in range(6)]
    heads = [value for name, value in monitor.latest.items() if name.endswith("/entropy_share")]
    assert min(layers) > 0.05 and min(heads) < min(layers) / 2


def test_weights_of_others_are_looked_at_for_entropy_alone() -> None:
    class Own(nn.Module):
        num_heads = H

        def __init__(self) -> None:
            super().__init__()
            self.proj, self.factor = nn.Linear(E, E), 1.0

        def forward(self, x: Tensor) -> Tensor:
            q = self.proj(x).unflatten(-1, (H, -1)).transpose(1, 2)
            return (torch.softmax(self.factor * q @ q.mT, dim=-1) @ q).transpose(1, 2).flatten(2)

    model = Own()
    monitor = Monitor(model, every=1, alarms=Alarms(), fallback="eager")
    assert look(monitor, torch.randn(B, T, E)) == []
    model.factor = 50.0
    (message,) = look(monitor, torch.randn(B, T, E))
    assert message.startswith("attention in the model has collapsed")


# Once


def test_a_number_that_dances_on_its_threshold_rings_once() -> None:
    state = AlarmState(Alarms(entropy=0.5, max_logit=100), 0.01)

    def rung(kind: str, *values: float) -> list[int]:
        return [step for step, value in enumerate(values) if state.hear(step, {kind: [(0, 1, value)]})]

    assert rung("max_logit", 99, 101, 99, 101, 100 / BACK + 1, 101, 100 / BACK - 1, 101) == [1, 7]
    assert rung("entropy", 0.51, 0.49, 0.51, 0.49, 0.5 * BACK - 0.01, 0.4, 0.5 * BACK + 0.01, 0.4) == [1, 7]
    assert rung("dead", 0.02, 0.01, 0.011, 0.0, 0.012, 0.0, 0.013, 0.0) == [1, 7]
    assert rung("max_logit", 1.0, math.nan, math.nan, 1.0, math.inf) == [1, 4]


def test_a_training_that_begins_again_rings_again() -> None:
    monitor = Monitor(sharp(), every=1, alarms=Alarms(entropy=None))
    assert len(look(monitor)) == 1 and look(monitor) == []
    monitor.number = 0
    assert len(look(monitor)) == 1


# What a callback does


def test_what_a_callback_raises_is_not_swallowed() -> None:
    class Stop(Exception):
        pass

    def stop(alarm: Alarm) -> None:
        raise Stop(alarm)

    model = sharp()
    monitor = Monitor(model, every=1, alarms=Alarms(entropy=None), on_alarm=stop)
    with (
        pytest.warns(HeadsAlarm, match="largest logit is"),
        pytest.raises(Stop, match="of layer 0 has very large scores"),
        monitor.step(),
    ):
        model(numbers(B, T, E))
    assert monitor.measured and len(monitor.raised) == H and hooks_on(model) == 0
    assert look(monitor) == []  # it was told


def test_a_warning_that_is_an_error_stops_the_training() -> None:
    model = sharp()
    monitor = Monitor(model, alarms=Alarms(entropy=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadsAlarm)
        with pytest.raises(HeadwiseError, match="has very large scores"), monitor.step():
            model(numbers(B, T, E))
    assert monitor.measured and hooks_on(model) == 0


def test_a_callback_alone_means_the_usual_alarms() -> None:
    assert Monitor(made(), on_alarm=print).alarms == Alarms()
    assert Monitor(made(), on_alarm=print, dead=None).alarms == Alarms(dead=False)
    assert Monitor(made()).alarms is None


# What is refused


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"entropy": 0.0}, "entropy must be a share .* got 0.0"),
        ({"entropy": 1}, "entropy must be a share .* got 1"),
        ({"entropy": math.nan}, "entropy must be a share .* got nan"),
        ({"entropy": "low"}, "entropy must be a share .* got 'low'"),
        ({"max_logit": 0}, "max_logit must be above 0: got 0"),
        ({"max_logit": True}, "max_logit must be above 0: got True"),
        ({"dead": 0.01}, "dead must be True or False: got 0.01"),
        ({"entropy": None, "max_logit": None, "dead": False}, "got None for entropy and max_logit"),
    ],
)
def test_thresholds_have_their_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Alarms(**options)


def test_a_monitor_says_which_alarms_it_cannot_take() -> None:
    model: Any = made()
    with pytest.raises(ArgumentError, match=r"alarms must be headwise.Alarms: got True"):
        Monitor(model, alarms=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"on_alarm must be a function of an alarm: got 5"):
        Monitor(model, on_alarm=5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"got dead=None with Alarms\(dead=True\)"):
        Monitor(model, dead=None, alarms=Alarms())
