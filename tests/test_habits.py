"""What people bring along from torch, Keras, Hugging Face, numpy and course notes, and what they are told.

The list was written before the code was read: a call as somebody would write it, and either it works as they
mean it (`test_habits_taken.py`), or the answer names what they gave and what to write instead.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim, E d_model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

import headwise as hw
from habits import B, D, E, H, S, Stack, T, ablated, attend, call, early, jagged, make, mha, nest, watched, x
from headwise.errors import ArgumentError, AttentionBypassed, MaskError, ShapeError

Habit = Callable[[], object]
# A call, the error where it is no ArgumentError, and words of its message with " .. " between them
Habits = dict[str, tuple[Habit, str] | tuple[Habit, type[Exception], str]]

BOOLS, IDS = torch.ones(T, T, dtype=torch.bool).tril(), torch.arange(B * T).view(B, T)
TOKENS = {"input_ids": IDS, "attention_mask": torch.ones(B, T)}
EMBEDDED = "token ids need an embedding first, torch.nn.Embedding"

ATTENTION: Habits = {
    "is_causal": (lambda: attend(is_causal=True), "is_causal .. got True .. causal here .. last query"),
    "attn_mask": (lambda: attend(attn_mask=BOOLS), "bool [5, 5] .. mask=attn_mask .. mask=~attn_mask"),
    "enable_gqa": (lambda: attend(enable_gqa=True), "enable_gqa .. leave it out .. fewer heads"),
    "query, key, value": (
        lambda: hw.attention(query=x(B, H, T, D), key=x(), value=x()),
        "query .. [2, 3, 5, 11] .. q here",
    ),
    "need_weights": (lambda: attend(need_weights=False), "got False .. leave it out .. output, _ ="),
    "attention_mask": (
        lambda: attend(attention_mask=IDS),
        "int64 [2, 5] .. 1 = may attend .. Mask.padding(attention_mask.bool())",
    ),
    "key_padding_mask": (
        lambda: attend(key_padding_mask=IDS > 3),
        "bool [2, 5] .. True = padding .. Mask.padding(~",
    ),
    "of why, too": (lambda: hw.why(*(x(B, H, T, D),) * 3, is_causal=1), "given to why .. got 1 .. causal"),
    "nothing": (lambda: hw.attention(), TypeError, "q must be given .. got no value .. q="),
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
        f"torch.int64 .. q.float() .. {EMBEDDED}",
    ),
    "an array": (lambda: attend(*(np.ones((B, H, T, D)),) * 3), "got ndarray .. torch.from_numpy(q)"),
    "length before heads": (
        lambda: attend(x(B, T, H, D), x(B, S, H, D), x(B, S, H, D)),
        ShapeError,
        "5 = 0 * 7 + 5 .. transpose(1, 2) .. [B, length, heads, D]",
    ),
    "jagged": (
        lambda: attend(*(jagged().unflatten(-1, (H, D)).transpose(1, 2),) * 3),
        "a dense tensor .. got a nested tensor of 2 .. to_padded_tensor(0.0) .. Mask.padding(",
    ),
    "nested": (
        lambda: attend(*(nest(x(H, 3, D), x(H, T, D)),) * 3),
        "a dense tensor .. got a nested tensor of 2 .. to_padded_tensor(0.0)",
    ),
    "window=-1": (
        lambda: attend(window=-1),
        MaskError,
        "window must not be negative .. got -1 .. leave window out",
    ),
    "window=(-1, 0)": (
        lambda: attend(window=(-1, 0)),
        MaskError,
        "got (-1, 0) .. for (-1, 0) use causal=True",
    ),
    "a mask by name": (
        lambda: attend(mask="causal"),
        MaskError,
        "got 'causal' .. headwise.Mask.causal() .. causal=True",
    ),
    "a yes in mask's place": (
        lambda: attend(mask=True),
        MaskError,
        "got True .. headwise.Mask.causal() .. causal=True .. None hides nothing",
    ),
    "a mask in causal's place": (lambda: attend(causal=BOOLS), "got bool [5, 5] .. mask="),
    "a Mask in causal's place": (lambda: attend(causal=hw.Mask.causal()), "Mask(right=0) .. mask="),
    "a scale by name": (lambda: attend(scale="sqrt"), "scale .. got 'sqrt' .. leave it out"),
    "dropout=True": (lambda: attend(dropout=True), "got True .. share of weights"),
    "backend='math'": (lambda: attend(backend="math"), "got 'math' .. use 'plain' for torch's math"),
    "torch's own enum": (
        lambda: attend(backend=SDPBackend.EFFICIENT_ATTENTION),
        "EFFICIENT_ATTENTION .. use 'efficient' for",
    ),
}

MAKING: Habits = {
    "embed_dim": (lambda: make(embed_dim=E, num_heads=H), "embed_dim .. got 33 .. d_model here"),
    "key_dim": (lambda: make(num_heads=H, key_dim=D), "got 11 .. head_dim here .. d_model"),
    "hidden_size": (lambda: make(hidden_size=E, num_attention_heads=H), "got 33 .. d_model here"),
    "d_k": (lambda: mha(d_k=D), "got 11 .. head_dim here"),
    "qkv_bias": (lambda: mha(qkv_bias=False), "got False .. bias here"),
    "batch_first": (lambda: mha(batch_first=False), "got False .. transpose"),
    "add_zero_attn": (lambda: mha(add_zero_attn=True), "headwise.nn.MultiheadAttention"),
    "dropout third": (lambda: make(E, H, 0.1), TypeError, "d_model and num_heads .. got 0.1 .. dropout="),
    "a misspelt one": (lambda: mha(droput=0.1), TypeError, "no argument 'droput' .. 'dropout'?"),
    "num_heads forgotten": (lambda: make(E), TypeError, "num_heads"),
    "a mask for causal": (lambda: mha(causal=BOOLS), "bool [5, 5] .. mask="),
    "sizes swapped": (lambda: make(8, 512), ShapeError, "8 = 512 * 0 + 8 .. MultiHeadAttention(512, 8)"),
    "sizes that do not divide": (lambda: make(512, 10), ShapeError, "512 = 10 * 51 + 2 .. use 8 or 16"),
    "a size by /": (lambda: make(66 / 2, H), ShapeError, "got 33.0 .. use 33; divide with //"),
    "dropout in per cent": (lambda: mha(dropout=10), "got 10 .. share of weights"),
    "a preset's first name": (lambda: hw.MultiHeadAttention.preset("llama3"), "'llama3' .. 'llama3-8b'?"),
    "from_torch of ours": (lambda: hw.MultiHeadAttention.from_torch(mha()), "load_state_dict"),  # type: ignore[arg-type]
    "adopt a class": (lambda: hw.adopt(nn.Transformer), "the class Transformer .. the model itself"),  # type: ignore[arg-type]
    "d_model of torch's class": (
        lambda: hw.nn.MultiheadAttention(d_model=E, num_heads=H),  # type: ignore[call-arg]
        TypeError,
        "MultiheadAttention has no argument 'd_model' .. embed_dim",
    ),
    "restore a tensor": (lambda: hw.restore(x()), "got Tensor .. the model itself"),  # type: ignore[arg-type]
}

CALLING: Habits = {
    "attn_mask of a call": (lambda: call(attn_mask=BOOLS), "bool [5, 5] .. may NOT .. ~attn_mask"),
    "attention_mask of a call": (lambda: call(attention_mask=IDS), "int64 [2, 5] .. Mask.padding("),
    "average_attn_weights": (lambda: call(average_attn_weights=True), "mean_heads()"),
    "return_attention_scores": (lambda: call(return_attention_scores=True), "output, weights = mha(x)"),
    "training": (lambda: call(training=True), "got True .. mha.train()"),
    "hidden_states": (lambda: mha()(hidden_states=x()), "float32 [2, 5, 33] .. query here"),
    "ids of tokens": (lambda: call(IDS), ShapeError, f"got 2, [2, 5] .. {EMBEDDED}"),
    "what a tokenizer gives": (lambda: call(TOKENS), f"got dict .. {EMBEDDED}"),
    "that by keywords": (lambda: mha()(**TOKENS), f"input_ids .. int64 [2, 5] .. {EMBEDDED}"),
    "what a layer gives": (lambda: call(call()), "got tuple .. output, _ = mha(x)"),
    "an array of numpy's": (lambda: call(x().numpy()), "got ndarray .. torch.from_numpy(query)"),
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
    "a key alone": (lambda: call(x(), x(B, S, E)), "float32 [2, 7, 33] .. mha(query, memory, memory)"),
    "a mask as the key": (lambda: call(x(), BOOLS), "bool [5, 5] .. mha(x, mask=m)"),
    "value before key": (lambda: call(x(), x(B, S, E), x()), ShapeError, "[2, 7] and [2, 5]"),
    "one memory for all": (
        lambda: call(x(), x(1, S, E), x(1, S, E)),
        ShapeError,
        "2 and 1 .. key.expand(2, -1, -1)",
    ),
    "float64": (lambda: call(x().double()), "torch.float64 .. query.to(torch.float32)"),
    "on meta": (lambda: call(x().to("meta")), "meta and cpu .. query.to('cpu')"),
    "a jagged batch": (
        lambda: call(jagged()),
        "nested tensor of 2 .. query.to_padded_tensor(0.0) .. Mask.padding([len(y) for y in query.unbind()])",
    ),
}

LOOKING: Habits = {
    "a map of torch's words": (
        lambda: hw.AttentionMap(x(B, H, T, D), x(B, H, S, D), is_causal=True),  # type: ignore[call-arg]
        "is_causal .. given to AttentionMap: got True .. causal here",
    ),
    "a map of values": (
        lambda: hw.AttentionMap(*(x(B, H, T, D),) * 3),  # type: ignore[misc]
        TypeError,
        "q and k .. got float32 [2, 3, 5, 11] .. mask=",
    ),
    "the output's diversity": (lambda: hw.diversity(x()), ShapeError, "[B, H, T, S]: got [2, 5, 33]"),
    "watch without with": (lambda: hw.watch(Stack())[0], "watch(model)[0] .. as heads .. heads[0]"),  # type: ignore[index]
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
    "a tensor to watch": (lambda: hw.watch(x()), "got Tensor .. the model itself"),  # type: ignore[arg-type]
    "no attention at all": (lambda: watched(nn.Linear(E, E)), AttentionBypassed, "Linear ran 1 times"),
    "heads before a forward": (early, "got 0 .. run the model inside"),
    "a layer beyond": (lambda: watched()[99], "0 to 1: got 99"),
    "a layer's wrong name": (lambda: watched()["layer0"], "'layer0' .. layers.0, layers.1"),
    "a label misspelt": (lambda: watched().find("inductive"), "'inductive' .. 'induction'?"),
    "a column misspelt": (lambda: watched().table(sort="entropi"), "'entropi' .. 'entropy'?"),
    "heads without layers": (lambda: ablated([0, 1]), "(layer, head) pairs .. got 0 .. [(5, 3)"),
    "heads by a word": (lambda: ablated("all"), "(layer, head) pairs .. got 'all'"),
    "a head that is not there": (lambda: ablated({0: [99]}), "0 to 2: got 99"),
    "a head from the end": (lambda: ablated({0: [-1]}), "at least 0: got -1"),
    "a way that is not there": (lambda: ablated({0: [0]}, "mask"), "'mask' .. zero, mean, uniform"),
    "every head pruned": (lambda: hw.prune(Stack(), {0: [0, 1, 2]}), "all 3 of layers.0 .. keep one"),
    "a loss of torch's": (
        lambda: hw.importance(Stack(), [(x(), x())], nn.MSELoss()),
        "MSELoss .. lambda model, batch: loss(model(batch[0]), batch[1])",
    ),
    "a share of heads": (
        lambda: hw.robustness(Stack(), [x()], lambda model, batch: model(batch).sum(), points=0.5),  # type: ignore[arg-type]
        "points .. got 0.5 .. [round(share * num_heads)]",
    ),
    "a step without with": (
        lambda: hw.Monitor(Stack(), every=1).step().summary,  # type: ignore[attr-defined]
        AttributeError,
        "'summary' .. write with monitor.step(): model(x), then monitor.summary",
    ),
    "a monitor of no steps": (lambda: hw.Monitor(Stack(), every=0), "at least 1: got 0"),
    "a tensor to check": (lambda: hw.check(x()), "got float32 [2, 5, 33] .. the class itself"),
    "a model to load": (lambda: hw.models.load(Stack()), "got Stack .. headwise.watch"),  # type: ignore[arg-type]
    "no such folder": (lambda: hw.models.load("./no/model"), "'./no/model' .. check the name"),
    "no such file": (lambda: hw.check_file("nowhere.py"), "nowhere.py .. check the path"),
    "no such heads": (lambda: hw.load_heads("nowhere.safetensors"), "'nowhere.saf .. heads.save"),
    "no folder to save in": (lambda: watched().save("no/heads.safetensors"), "no/heads .. another folder"),
}

HABITS = ATTENTION | MAKING | CALLING | LOOKING


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_answered_with_what_to_write(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    habit, *kinds, message = HABITS[name]
    kind = kinds[0] if kinds else ArgumentError
    with pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, message.split(" .. ")))):
        habit()


def test_the_list_is_as_long_as_it_says_and_no_name_hides_another() -> None:
    assert len(HABITS) == len(ATTENTION) + len(MAKING) + len(CALLING) + len(LOOKING) >= 90


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chekc", "mha.py"], "No such command 'chekc'. Did you mean 'check'?"),
        (["mha.py"], "headwise check 'mha.py'"),
        (["The cat sat"], "headwise look 'The cat sat'"),
        (["check"], "Missing argument 'FILE[:NAME]|FOLDER'; see headwise check --help"),
        (["check", "nowhere.py"], "there is no 'nowhere.py'; check the name"),
        (["check", "mha.py", "--hints", "1"], "--hints (Possible options: --hint)"),
        (["presets", "llama9"], "got 'llama9'; did you mean 'llama3-8b'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistyped_command_is_answered_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    from headwise.cli import main

    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ") and not captured.out
