"""What people bring along from torch, Keras, Hugging Face, numpy and course notes, and what they are told.

The list was written before the code was read: a call as somebody would write it, and either it works as they
mean it, or the answer names what they gave and what to write instead. Masks, and monitors, importance and
robustness, have their own such tests beside them.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim, E d_model.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import headwise as hw
from headwise.errors import ArgumentError, AttentionBypassed, MaskError, ShapeError

B, H, T, S, D = 2, 3, 5, 7, 11
E = H * D


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (B, T, E))


def attend(*tensors: Any, **named: Any) -> Any:
    return hw.attention(*(tensors or (x(B, H, T, D),) * 3), **named)


def mha(**options: Any) -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(E, H, **options)


def make(*sizes: Any, **named: Any) -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(*sizes, **named)


def call(*inputs: Any, **named: Any) -> Any:
    return mha()(*(inputs or (x(),)), **named)


def nest(*tensors: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor(list(tensors), layout=layout)


def jagged() -> Tensor:
    return nest(x(3, E), x(T, E), layout=torch.jagged)


class Stack(nn.Module):
    """Two layers of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mha(), mha()])

    def forward(self, y: Tensor) -> Tensor:
        for layer in self.layers:
            y = y + layer(y)[0]
        return y


def early() -> object:
    with hw.watch(Stack()) as heads:
        return heads[0]


def watched(model: nn.Module | None = None) -> hw.Heads:
    model = Stack() if model is None else model
    with hw.watch(model) as heads:
        model(x())
    return heads


def ablated(heads: Any, *method: str) -> None:
    model = Stack()
    with hw.ablate(model, heads, *method):
        model(x())


# A call, the error, and words of its message with " .. " between them
Habits = dict[str, tuple[Callable[[], object], type[Exception], str]]

BOOLS, IDS = torch.ones(T, T, dtype=torch.bool).tril(), torch.arange(B * T).view(B, T)
TOKENS = {"input_ids": IDS, "attention_mask": torch.ones(B, T)}
EMBEDDED = "through an embedding first, torch.nn.Embedding"

ATTENTION: Habits = {
    "is_causal": (
        lambda: attend(is_causal=True),
        ArgumentError,
        "is_causal .. got True .. causal here .. last query",
    ),
    "attn_mask": (
        lambda: attend(attn_mask=BOOLS),
        ArgumentError,
        "bool [5, 5] .. mask=attn_mask .. mask=~attn_mask",
    ),
    "dropout_p": (lambda: attend(dropout_p=0.1), ArgumentError, "dropout_p .. got 0.1 .. dropout here"),
    "enable_gqa": (
        lambda: attend(enable_gqa=True),
        ArgumentError,
        "enable_gqa .. leave it out .. fewer heads",
    ),
    "query, key, value": (
        lambda: hw.attention(query=x(B, H, T, D), key=x(), value=x()),
        ArgumentError,
        "query .. [2, 3, 5, 11] .. q here",
    ),
    "need_weights": (
        lambda: attend(need_weights=False),
        ArgumentError,
        "got False .. leave it out .. output, _ =",
    ),
    "attention_mask": (
        lambda: attend(attention_mask=IDS),
        ArgumentError,
        "int64 [2, 5] .. 1 = may attend .. Mask.padding(attention_mask.bool())",
    ),
    "key_padding_mask": (
        lambda: attend(key_padding_mask=IDS > 3),
        ArgumentError,
        "bool [2, 5] .. True = padding .. Mask.padding(~",
    ),
    "softmax_scale": (lambda: attend(softmax_scale=1.0), ArgumentError, "got 1.0 .. its name is scale here"),
    "a keyword of nobody's": (
        lambda: attend(windows=3),
        TypeError,
        "attention has no argument 'windows' .. 'window'?",
    ),
    "of why, too": (
        lambda: hw.why(*(x(B, H, T, D),) * 3, is_causal=1),
        ArgumentError,
        "given to why .. got 1 .. causal",
    ),
    "nothing": (lambda: hw.attention(), TypeError, "q must be given .. got nothing .. q="),
    "no v": (lambda: hw.attention(x(B, H, T, D), x(B, H, T, D)), TypeError, "v must be given .. v="),
    "three dimensions": (
        lambda: attend(x(), x(), x()),
        ShapeError,
        "got 3, [2, 5, 33] .. unflatten(-1, (num_heads, -1))",
    ),
    "two dimensions": (lambda: attend(*x(3, T, D)), ShapeError, "got 2, [5, 11] .. dimensions of size 1"),
    "ids": (lambda: attend(IDS, IDS, IDS), ShapeError, f"got 2, [2, 5] .. {EMBEDDED}"),
    "integers": (
        lambda: attend(*(torch.ones(B, H, T, D, dtype=torch.long),) * 3),
        ArgumentError,
        f"torch.int64 .. q.float() .. {EMBEDDED}",
    ),
    "an array": (
        lambda: attend(*(np.ones((B, H, T, D)),) * 3),
        ArgumentError,
        "got ndarray .. torch.from_numpy(q)",
    ),
    "a list": (lambda: attend([[1.0]], [[1.0]], [[1.0]]), ArgumentError, "got list .. torch.as_tensor"),
    "length before heads": (
        lambda: attend(x(B, T, H, D), x(B, S, H, D), x(B, S, H, D)),
        ShapeError,
        "5 = 0 * 7 + 5 .. transpose(1, 2) .. [B, length, heads, D]",
    ),
    "lengths of k and v": (
        lambda: attend(x(B, H, T, D), x(B, H, S, D), x(B, H, T, D)),
        ShapeError,
        "k and v .. key_len: 7 and 5",
    ),
    "jagged": (
        lambda: attend(*(jagged().unflatten(-1, (H, D)).transpose(1, 2),) * 3),
        ArgumentError,
        "one dense tensor .. got 2 nested .. to_padded_tensor(0.0) .. Mask.padding(",
    ),
    "nested": (
        lambda: attend(*(nest(x(H, 3, D), x(H, T, D)),) * 3),
        ArgumentError,
        "one dense tensor .. got 2 nested .. to_padded_tensor(0.0)",
    ),
    "window=-1": (
        lambda: attend(window=-1),
        MaskError,
        "window must not be negative .. got -1 .. leave window out",
    ),
    "window=(-1, 0)": (lambda: attend(window=(-1, 0)), MaskError, "got (-1, 0) .. (-1, 0) is causal=True"),
    "an additive mask": (
        lambda: attend(mask=torch.full((T, T), -torch.inf).triu(1)),
        MaskError,
        "found -inf .. bias=",
    ),
    "a mask in causal's place": (lambda: attend(causal=BOOLS), ArgumentError, "got bool [5, 5] .. mask="),
    "a Mask in causal's place": (
        lambda: attend(causal=hw.Mask.causal()),
        ArgumentError,
        "Mask(right=0) .. mask=",
    ),
    "half and float": (
        lambda: attend(x(B, H, T, D).half(), x(B, H, T, D), x(B, H, T, D)),
        ArgumentError,
        "float32 and torch.float16 .. k.to(",
    ),
    "another device": (
        lambda: attend(x(B, H, T, D), x(B, H, T, D).to("meta"), x(B, H, T, D)),
        ArgumentError,
        "meta and cpu .. k.to(q.device)",
    ),
    "dropout=True": (lambda: attend(dropout=True), ArgumentError, "got True .. share of weights"),
    "backend='math'": (lambda: attend(backend="math"), ArgumentError, "got 'math' .. is 'plain' here"),
    "torch's own enum": (
        lambda: attend(backend=SDPBackend.EFFICIENT_ATTENTION),
        ArgumentError,
        "EFFICIENT_ATTENTION .. is 'efficient' here",
    ),
}

MAKING: Habits = {
    "embed_dim": (
        lambda: make(embed_dim=E, num_heads=H),
        ArgumentError,
        "embed_dim .. got 33 .. d_model here",
    ),
    "n_heads": (lambda: make(d_model=E, n_heads=H), ArgumentError, "n_heads .. got 3 .. num_heads here"),
    "key_dim": (lambda: make(num_heads=H, key_dim=D), ArgumentError, "got 11 .. head_dim here .. d_model"),
    "hidden_size": (
        lambda: make(hidden_size=E, num_attention_heads=H),
        ArgumentError,
        "got 33 .. d_model here",
    ),
    "dim and heads": (lambda: make(E, heads=H, dim_head=D), ArgumentError, "heads .. num_heads here"),
    "num_key_value_heads": (lambda: mha(num_key_value_heads=1), ArgumentError, "got 1 .. num_kv_heads here"),
    "d_k": (lambda: mha(d_k=D), ArgumentError, "got 11 .. head_dim here"),
    "attn_drop": (lambda: mha(attn_drop=0.5), ArgumentError, "got 0.5 .. dropout here"),
    "qkv_bias": (lambda: mha(qkv_bias=False), ArgumentError, "got False .. bias here"),
    "is_causal of a layer": (lambda: mha(is_causal=True), ArgumentError, "got True .. causal here"),
    "batch_first": (lambda: mha(batch_first=False), ArgumentError, "got False .. transpose"),
    "add_zero_attn": (lambda: mha(add_zero_attn=True), ArgumentError, "headwise.nn.MultiheadAttention"),
    "dropout third": (lambda: make(E, H, 0.1), TypeError, "d_model and num_heads .. got 0.1 .. dropout="),
    "a misspelt one": (lambda: mha(droput=0.1), TypeError, "no argument 'droput' .. 'dropout'?"),
    "num_heads forgotten": (lambda: make(E), TypeError, "num_heads"),
    "a mask for causal": (lambda: mha(causal=BOOLS), ArgumentError, "bool [5, 5] .. mask="),
    "sizes swapped": (lambda: make(8, 512), ShapeError, "8 = 512 * 0 + 8 .. MultiHeadAttention(512, 8)"),
    "sizes that do not divide": (lambda: make(512, 10), ShapeError, "512 = 10 * 51 + 2 .. use 8 or 16"),
    "a size by /": (lambda: make(66 / 2, H), ShapeError, "got 33.0 .. use 33, by //"),
    "dropout in per cent": (lambda: mha(dropout=10), ArgumentError, "got 10 .. share of weights"),
    "a preset's first name": (
        lambda: hw.MultiHeadAttention.preset("llama3"),
        ArgumentError,
        "'llama3' .. 'llama3-8b'?",
    ),
    "from_torch of ours": (lambda: hw.MultiHeadAttention.from_torch(mha()), ArgumentError, "load_state_dict"),  # type: ignore[arg-type]
    "adopt a class": (
        lambda: hw.adopt(nn.Transformer),
        ArgumentError,
        "the class Transformer .. the model itself",
    ),  # type: ignore[arg-type]
    "d_model of torch's class": (
        lambda: hw.nn.MultiheadAttention(d_model=E, num_heads=H),  # type: ignore[call-arg]
        TypeError,
        "MultiheadAttention has no argument 'd_model' .. embed_dim",
    ),
    "restore a tensor": (lambda: hw.restore(x()), ArgumentError, "got Tensor .. the model itself"),  # type: ignore[arg-type]
}

CALLING: Habits = {
    "attn_mask of a call": (
        lambda: call(attn_mask=BOOLS),
        ArgumentError,
        "bool [5, 5] .. may NOT .. ~attn_mask",
    ),
    "attention_mask of a call": (
        lambda: call(attention_mask=IDS),
        ArgumentError,
        "int64 [2, 5] .. Mask.padding(",
    ),
    "causal of a call": (lambda: call(causal=True), ArgumentError, "got True .. Mask.causal()"),
    "average_attn_weights": (lambda: call(average_attn_weights=True), ArgumentError, "mean_heads()"),
    "return_attention_scores": (
        lambda: call(return_attention_scores=True),
        ArgumentError,
        "output, weights = mha(x)",
    ),
    "output_attentions": (lambda: call(output_attentions=True), ArgumentError, "output, weights = mha(x)"),
    "training": (lambda: call(training=True), ArgumentError, "got True .. mha.train()"),
    "hidden_states": (lambda: mha()(hidden_states=x()), ArgumentError, "float32 [2, 5, 33] .. query here"),
    "nothing to attend with": (lambda: mha()(), TypeError, "query must be given .. query="),
    "ids of tokens": (lambda: call(IDS), ShapeError, f"got 2, [2, 5] .. {EMBEDDED}"),
    "integer channels": (lambda: call(x().long()), ArgumentError, "torch.int64 .. query.to(torch.float32)"),
    "what a tokenizer gives": (lambda: call(TOKENS), ArgumentError, f"got dict .. {EMBEDDED}"),
    "that by keywords": (lambda: mha()(**TOKENS), ArgumentError, f"input_ids .. int64 [2, 5] .. {EMBEDDED}"),
    "what a layer gives": (lambda: call(call()), ArgumentError, "got tuple .. output, _ = mha(x)"),
    "an array of numpy's": (
        lambda: call(x().numpy()),
        ArgumentError,
        "got ndarray .. torch.from_numpy(query)",
    ),
    "a list of lists": (lambda: call(x().tolist()), ArgumentError, "got list .. torch.as_tensor"),
    "no batch": (lambda: call(x(T, E)), ShapeError, "got 2, [5, 33] .. query[None]"),
    "heads that are split": (
        lambda: call(x(B, H, T, D)),
        ShapeError,
        "got 4, [2, 3, 5, 11] .. transpose(1, 2).flatten(2) .. headwise.attention",
    ),
    "heads split after length": (
        lambda: call(x(B, T, H, D)),
        ShapeError,
        "got 4, [2, 5, 3, 11] .. query.flatten(2) .. headwise.attention",
    ),
    "an image": (
        lambda: call(x(B, E, T, S)),
        ShapeError,
        "got 4, [2, 33, 5, 7] .. flatten(2).transpose(1, 2)",
    ),
    "another width": (lambda: call(x(B, T, 13)), ShapeError, "got 13 for d_model=33"),
    "a key alone": (
        lambda: call(x(), x(B, S, E)),
        ArgumentError,
        "float32 [2, 7, 33] .. mha(query, memory, memory)",
    ),
    "a mask as the key": (lambda: call(x(), BOOLS), ArgumentError, "bool [5, 5] .. mha(x, mask=m)"),
    "value before key": (lambda: call(x(), x(B, S, E), x()), ShapeError, "[2, 7] and [2, 5]"),
    "one memory for all": (
        lambda: call(x(), x(1, S, E), x(1, S, E)),
        ShapeError,
        "2 and 1 .. key.expand(2, -1, -1)",
    ),
    "float64": (lambda: call(x().double()), ArgumentError, "torch.float64 .. query.to(torch.float32)"),
    "on meta": (lambda: call(x().to("meta")), ArgumentError, "meta and cpu .. query.to('cpu')"),
    "a jagged batch": (
        lambda: call(jagged()),
        ArgumentError,
        "got 2 nested .. query.to_padded_tensor(0.0) .. Mask.padding([len(y) for y in query.unbind()])",
    ),
}

LOOKING: Habits = {
    "a map of torch's words": (
        lambda: hw.AttentionMap(x(B, H, T, D), x(B, H, S, D), is_causal=True),  # type: ignore[call-arg]
        ArgumentError,
        "is_causal .. given to AttentionMap: got True .. causal here",
    ),
    "a map of values": (
        lambda: hw.AttentionMap(*(x(B, H, T, D),) * 3),  # type: ignore[misc]
        TypeError,
        "q and k .. got float32 [2, 3, 5, 11] .. mask=",
    ),
    "a head beyond": (lambda: attend()[1][0, 99], IndexError, "got 99 for size 3 .. use 0 to 2"),
    "a statistic misspelt": (
        lambda: attend()[1].statistics("entropies"),
        ArgumentError,
        "'entropies' .. 'entropy'?",
    ),
    "per layer": (
        lambda: attend()[1].statistics(per="layer"),
        ArgumentError,
        '"head" or "query" .. layer',
    ),
    "the output's diversity": (lambda: hw.diversity(x()), ShapeError, "[B, H, T, S]: got [2, 5, 33]"),
    "watch without with": (
        lambda: hw.watch(Stack())[0],
        ArgumentError,
        "watch(model)[0] .. as heads .. heads[0]",
    ),  # type: ignore[index]
    "a table of the block": (
        lambda: hw.watch(Stack()).table,
        AttributeError,
        "'table' .. as heads .. heads.table",
    ),  # type: ignore[attr-defined]
    "what no block has": (
        lambda: hw.watch(Stack()).tables,
        AttributeError,
        "watch has no attribute 'tables'",
    ),  # type: ignore[attr-defined]
    "an option without a name": (
        lambda: hw.watch(Stack(), "all"),
        TypeError,
        "more than model .. got 'all' .. keep=",
    ),  # type: ignore[misc]
    "a tensor to watch": (lambda: hw.watch(x()), ArgumentError, "got Tensor .. the model itself"),  # type: ignore[arg-type]
    "no attention at all": (lambda: watched(nn.Linear(E, E)), AttentionBypassed, "Linear ran 1 times"),
    "heads before a forward": (early, ArgumentError, "got 0 .. run the model inside"),
    "a layer beyond": (lambda: watched()[99], ArgumentError, "0 to 1: got 99"),
    "a layer's wrong name": (lambda: watched()["layer0"], ArgumentError, "'layer0' .. layers.0, layers.1"),
    "a label misspelt": (lambda: watched().find("inductive"), ArgumentError, "'inductive' .. 'induction'?"),
    "a column misspelt": (lambda: watched().table(sort="entropi"), ArgumentError, "'entropi' .. 'entropy'?"),
    "heads without layers": (
        lambda: ablated([0, 1]),
        ArgumentError,
        "(layer, head) pairs .. got 0 .. [(5, 3)",
    ),
    "heads by a word": (lambda: ablated("all"), ArgumentError, "(layer, head) pairs .. got 'all'"),
    "a head that is not there": (lambda: ablated({0: [99]}), ArgumentError, "0 to 2: got 99"),
    "a head from the end": (lambda: ablated({0: [-1]}), ArgumentError, "at least 0: got -1"),
    "a way that is not there": (
        lambda: ablated({0: [0]}, "mask"),
        ArgumentError,
        "'mask' .. zero, mean, uniform",
    ),
    "every head pruned": (
        lambda: hw.prune(Stack(), {0: [0, 1, 2]}),
        ArgumentError,
        "all 3 of layers.0 .. keep one",
    ),
    "a tensor to check": (lambda: hw.check(x()), ArgumentError, "got float32 [2, 5, 33] .. the class itself"),
    "a model to load": (lambda: hw.models.load(Stack()), ArgumentError, "got Stack .. headwise.watch"),  # type: ignore[arg-type]
    "no such folder": (lambda: hw.models.load("./no/model"), ArgumentError, "'./no/model' .. check the name"),
    "no such file": (lambda: hw.check_file("nowhere.py"), ArgumentError, "nowhere.py .. check the path"),
    "no such heads": (
        lambda: hw.load_heads("nowhere.safetensors"),
        ArgumentError,
        "'nowhere.saf .. heads.save",
    ),
    "no folder to save in": (
        lambda: watched().save("no/heads.safetensors"),
        ArgumentError,
        "no/heads .. another place",
    ),
}

HABITS = ATTENTION | MAKING | CALLING | LOOKING


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_answered_with_what_to_write(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    habit, kind, says = HABITS[name]
    with pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, says.split(" .. ")))):
        habit()


def test_the_list_is_as_long_as_it_says_and_no_name_hides_another() -> None:
    assert len(HABITS) == len(ATTENTION) + len(MAKING) + len(CALLING) + len(LOOKING) >= 90


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chekc", "mha.py"], "No such command 'chekc'. Did you mean 'check'?"),
        (["mha.py"], "headwise check 'mha.py'"),
        (["The cat sat"], "headwise look 'The cat sat'"),
        (["check"], "Missing argument 'FILE[:NAME]'; see headwise --help"),
        (["check", "nowhere.py"], "there is no 'nowhere.py'; check the name"),
        (["check", "mha.py", "--hints", "1"], "--hints (Possible options: --hint)"),
        (["presets", "llama9"], "got 'llama9'; did you mean 'llama3-8b'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistyped_command_is_answered_in_a_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    from headwise.cli import main

    assert main(arguments) == 2
    said = capsys.readouterr()
    assert says in said.err.replace("\n", " ") and not said.out


# What works as it is meant


@pytest.mark.parametrize("causal", [0, 1, None, np.True_, torch.tensor(True)], ids=repr)
def test_any_yes_or_no_is_taken_for_causal(causal: Any) -> None:
    q = x(B, H, T, D)
    assert torch.equal(hw.attention(q, q, q, causal=causal)[0], hw.attention(q, q, q, causal=bool(causal))[0])


def test_the_answers_for_padding_and_nested_batches_are_right() -> None:
    """What the message tells to write is written here, and is what was meant."""
    layer, batch = mha(), jagged()
    padded, lengths = batch.to_padded_tensor(0.0), [len(y) for y in batch.unbind()]
    output = layer(padded, mask=hw.Mask.padding(lengths))[0]
    for given, y, length in zip(batch.unbind(), output, lengths, strict=True):
        torch.testing.assert_close(y[:length], layer(given[None])[0][0])
    attention_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    torch.testing.assert_close(layer(padded, mask=hw.Mask.padding(attention_mask.bool()))[0], output)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout": 0.5},
    "sinks": {"sinks": torch.ones(H, requires_grad=True)},
    "bias": {"bias": torch.ones(T, S, requires_grad=True)},
    "padding": {"mask": hw.Mask.padding(torch.ones(0, S, dtype=torch.bool))},
}


@pytest.mark.parametrize("backend", ["auto", "tiles", "plain"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_empty_batch_has_an_empty_answer_and_gradients(options: dict[str, Any], backend: str) -> None:
    q, k, v = x(0, H, T, D), x(0, 1, S, D), x(0, 1, S, 13)
    tensors = [y.requires_grad_() for y in (q, k, v)]
    output, weights = hw.attention(q, k, v, backend=backend, **options)
    assert output.shape == (0, H, T, 13) and weights.shape == weights.dense().shape == (0, H, T, S)
    assert weights.lse.shape == (0, H, T)
    learned = [y for y in options.values() if isinstance(y, Tensor)]
    grads = torch.autograd.grad(output.sum(), tensors + learned)
    assert all(
        not grad.any() and grad.shape == y.shape for grad, y in zip(grads, tensors + learned, strict=True)
    )
    with pytest.raises(ShapeError, match=r"statistics must have something to look at.*\[0, 3, 5, 7\]"):
        weights.statistics()


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
def test_a_module_on_an_empty_batch_does_what_torchs_does(gradients: bool) -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    ours, empty = hw.MultiHeadAttention.from_torch(theirs), x(0, T, E)
    with torch.set_grad_enabled(gradients):
        output, weights = ours(empty)
        expected, matrix = theirs(empty, empty, empty, average_attn_weights=False)
        assert output.shape == expected.shape and weights.shape == matrix.shape
        assert ours(empty, x(0, S, E), x(0, S, E))[0].shape == (0, T, E)
    if gradients:
        output.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())
    with hw.watch(ours) as heads:
        ours(empty)
    assert not heads


def test_an_empty_batch_does_not_take_a_backend_nobody_has() -> None:
    with pytest.raises(ArgumentError, match="got 'flsh'; did you mean 'flash'"):
        attend(*(x(0, H, T, D),) * 3, backend="flsh")


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
def test_a_projection_may_be_swapped_for_another(name: str, gradients: bool) -> None:
    layer, other, given = mha(), nn.Linear(E, E), x()
    layer(given)
    expected = mha()
    expected.load_state_dict(layer.state_dict())
    expected.get_submodule(name).load_state_dict(other.state_dict())
    projection = layer.get_submodule(name)
    torch.utils.swap_tensors(projection.weight, other.weight)
    torch.utils.swap_tensors(projection.bias, other.bias)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(layer(given)[0], expected(given)[0])
        del other  # and the memory that was ours
        torch.testing.assert_close(layer(given)[0], expected(given)[0])


@pytest.mark.parametrize("made", [hw.ablate, hw.collect], ids=lambda made: made.__name__)
def test_a_block_that_was_never_entered_says_that_it_did_nothing(made: Callable[..., object]) -> None:
    block = made(Stack(), {0: [1]})
    with pytest.warns(RuntimeWarning, match=r"nothing was done to heads of layers.0.*write with headwise"):
        del block
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ablated({0: [1]})
        gc.collect()
