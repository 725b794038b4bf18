"""Presets: the figures of models people know, how a name is found, the table and the command."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial

import pytest
import torch

import headwise as hw
from headwise.errors import ArgumentError
from headwise.nn.presets import PRESETS, Preset, _key, find, matching
from headwise.show.tables import count, distribution, figures
from transformers_layers import (
    PACKED_SIZES,
    SIZES,
    D,
    E,
    H,
    Layer,
    falcon,
    head_by_head,
    in_order,
    judged,
    rotary,
    t5,
)

every_preset = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)


def shape_of(preset: Preset) -> tuple[int, int, int, int]:
    """E, H, Hk, D by arithmetic of our own, without the module."""
    E, H = preset.d_model, preset.num_heads
    return E, H, preset.num_kv_heads or H, preset.head_dim or E // H


def parameters_of(preset: Preset) -> int:
    """Weights and biases of the four projections, norms and sinks; not a bias that all layers share."""
    E, H, Hk, D = shape_of(preset)
    weights = E * H * D + 2 * E * Hk * D + H * D * E
    biases = (H + 2 * Hk) * D if preset.bias else 0
    last = E if (preset.bias if preset.out_bias is None else preset.out_bias) else 0
    norms = 2 * D if preset.qk_norm else 0  # head by head, without a bias, in all that are here
    return weights + biases + last + norms + (H if preset.sinks else 0)


# The figures


@every_preset
def test_every_preset_is_built_and_counted_as_arithmetic_says(preset: Preset) -> None:
    E, H, Hk, D = shape_of(preset)
    mha = hw.MultiHeadAttention.preset(preset.name, device="meta")
    assert (mha.d_model, mha.num_heads, mha.num_kv_heads, mha.head_dim) == (E, H, Hk, D)
    assert (mha.causal, mha.window, mha.scale, mha.softcap) == (
        preset.causal, preset.window, preset.scale, preset.softcap,
    )  # fmt: skip
    actual = figures(preset)
    assert (actual.d_model, actual.num_heads, actual.num_kv_heads, actual.head_dim) == (E, H, Hk, D)
    shared = preset.relative_bias.count * H if preset.relative_bias else 0
    assert actual.parameters == parameters_of(preset)
    assert actual.parameters + shared == sum(weight.numel() for weight in mha.parameters())
    stacks = 2 if preset.decoder_layers else 1  # each has its own shared bias
    assert actual.attention_layers == preset.layers + 2 * preset.decoder_layers
    assert actual.all_parameters == actual.attention_layers * actual.parameters + stacks * shared
    assert (mha.rope, mha.alibi, mha.qk_norm, mha.gate) == (
        preset.rope, preset.alibi, preset.qk_norm, preset.gate,
    )  # fmt: skip
    generating = preset.decoder_layers or (preset.layers if preset.causal else 0)
    assert actual.cache_bytes == (2 * generating * Hk * 2 * D or None)


@pytest.mark.parametrize(
    ("name", "kib"), [("llama2-7b", 512), ("llama3-8b", 128), ("llama3-70b", 320), ("gemma-2b", 18)]
)
def test_known_caches_have_their_known_size(name: str, kib: int) -> None:
    assert figures(PRESETS[name]).cache_bytes == kib * 1024


def test_an_encoder_decoder_is_counted_with_its_decoder_and_cross_attention() -> None:
    """Only the encoder was counted: 6.3 M parameters and no cache."""
    base = figures(PRESETS["transformer-base"])
    assert (base.attention_layers, base.all_parameters) == (18, 18 * 4 * 512**2)
    assert base.cache_bytes == 2 * 6 * 512 * 2  # keys and values, 6 decoder layers, bfloat16
    pytest.importorskip("transformers")
    from transformers import T5Config, T5Model

    small = PRESETS["t5-small"]
    sizes = {"d_model": 512, "d_kv": 64, "num_heads": 8, "num_layers": 6, "d_ff": 1, "vocab_size": 2}
    with torch.device("meta"):
        t5_small = T5Model(T5Config(**sizes))
    named = t5_small.named_parameters()
    counts = [weight.numel() for name, weight in named if "Attention." in name]
    assert figures(small).all_parameters == sum(counts)
    encoders = [preset.name for preset in PRESETS.values() if figures(preset).cache_bytes is None]
    assert not any(PRESETS[name].decoder_layers for name in encoders)


def test_a_preset_can_be_changed_as_it_is_built() -> None:
    mha = hw.MultiHeadAttention.preset("smollm2-135m", causal=False, dropout=0.1)
    assert (mha.causal, mha.dropout, mha.num_kv_heads) == (False, 0.1, 3)
    output, weights = mha.eval()(torch.randn(1, 5, 576))
    assert output.shape == (1, 5, 576)
    assert weights.shape == (1, 9, 5, 5)


# Names


def test_presets_are_kept_under_their_own_names() -> None:
    assert all(name == preset.name for name, preset in PRESETS.items())
    keys = [key for preset in PRESETS.values() for key in {_key(preset.name), _key(preset.title)}]
    assert len(keys) == len(set(keys))  # no name or title means two models


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("gpt2-small", "gpt2-small"),
        ("GPT-2 Small", "gpt2-small"),
        ("gpt2_small", "gpt2-small"),
        (" Gpt 2 SMALL\n", "gpt2-small"),
        ("ViT-B/16", "vit-b16"),
        ("Llama 3 8B", "llama3-8b"),
        ("Llama-3.1-405B", "llama3-405b"),
        ("llama3-405b", "llama3-405b"),
        ("qwen2_5_7b", "qwen2.5-7b"),
        ("Mistral-7B", "mistral-7b"),
        ("gpt_oss_20b", "gpt-oss-20b"),
    ],
)
def test_names_mean_the_same_however_they_are_written(message: str, name: str) -> None:
    assert find(message) is PRESETS[name]
    assert matching(message) == [PRESETS[name]]


@every_preset
def test_titles_are_names_too(preset: Preset) -> None:
    assert find(preset.title) is find(preset.name.upper()) is preset


def test_an_unknown_name_is_told_with_what_may_be_meant() -> None:
    with pytest.raises(ArgumentError, match=r"got 'bert-bse'; did you mean 'bert-base'\? choose from .*gpt3"):
        find("bert-bse")
    with pytest.raises(
        ArgumentError, match=r"got 'gpt2'; did you mean 'gpt2-xl'\? choose from gpt2-small, gpt2"
    ):
        find("gpt2")
    with pytest.raises(ArgumentError, match=r"preset must be a known name: got 'bogus'; choose from "):
        hw.MultiHeadAttention.preset("bogus")
    for nothing in ("", " ", "---", "日本"):
        with pytest.raises(ArgumentError, match="got '"):
            matching(nothing)


def test_a_part_of_a_name_finds_all_that_contain_it() -> None:
    assert [preset.name for preset in matching("gpt2")] == [
        "gpt2-small",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
    ]
    assert [preset.name for preset in matching("GPT 2 l")] == ["gpt2-large"]
    assert [preset.name for preset in matching("Llama 3.1")] == ["llama3-405b"]  # by its title


# The table and the command


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (7, "7"),
        (999, "999"),
        (1000, "1.00 K"),
        (999_499, "999 K"),
        (999_500, "1.00 M"),
        (9_996_000, "10.0 M"),
        (99_960_000, "100 M"),
        (57_985_000_000, "58.0 B"),
    ],
)
def test_counts_have_three_digits(number: int, words: str) -> None:
    assert count(number) == words


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    from headwise.cli import main

    assert main(["presets", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_command_shows_every_preset_in_80_columns(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    message = say(capsys)
    assert "…" not in message
    assert max(map(len, message.splitlines())) <= 80
    assert [
        line.split()[0] for line in message.splitlines() if "MiB" in line or "KiB" in line or " - " in line
    ] == [*PRESETS]
    (row,) = [line for line in message.splitlines() if "gpt3" in line]
    assert row.split() == "gpt3 12288 96 96 128 604 M 96 58.0 B 4.5 MiB".split()
    (row,) = [line for line in message.splitlines() if " bert-base" in line]
    assert row.split() == "bert-base 768 12 12 64 2.36 M 12 28.3 M -".split()
    assert "hw." not in message


def test_the_command_ends_with_how_common_each_number_of_heads_is(capsys) -> None:
    lines = say(capsys).splitlines()[-3:]
    assert lines == distribution(PRESETS.values())
    heads = Counter(preset.num_heads for preset in PRESETS.values())
    for number in (8, 12, 16, 32, 64):
        assert re.search(rf"\b{number} in {heads[number]}\b", lines[0])
    assert f" of {len(PRESETS)}, " in lines[0] and lines[0].endswith("; median 16")
    assert lines[1].startswith("d_k: 64 in 18 of 36, 128 in 13")


@pytest.mark.parametrize("name", ["llama3-8b", "Llama 3 8B"])
def test_a_single_preset_comes_with_the_python_that_builds_it(capsys, name: str) -> None:
    message = say(capsys, name).splitlines()
    assert message[-3:] == [
        "Llama 3 8B",
        "32 heads of 128 over 8 key/value heads: [B, T, 4096] -> [B, 32, T, 128] -> [B, T, 4096], causal, "
        "rope=Rope(base=500000.0)",
        'hw.MultiHeadAttention.preset("llama3-8b")',
    ]
    assert eval(message[-1].replace(")", ', device="meta")'), {"hw": hw}).num_kv_heads == 8


def test_the_command_speaks_json(capsys) -> None:
    (actual,) = json.loads(say(capsys, "gpt-oss", "--json"))
    assert actual["name"] == "gpt-oss-20b"
    assert (actual["num_heads"], actual["num_kv_heads"], actual["head_dim"], actual["sinks"]) == (
        64,
        8,
        64,
        True,
    )
    assert actual["cache_bytes"] == 48 * 1024
    assert actual["rope"]["base"] == 150_000
    assert (actual["rope"]["scaling"]["kind"], actual["rope"]["scaling"]["truncate"]) == ("Yarn", False)
    (qwen,) = json.loads(say(capsys, "qwen3-8b", "--json"))
    assert qwen["qk_norm"] == {"kind": "rms", "eps": 1e-6, "whole": False}
    assert len(json.loads(say(capsys, "--json"))) == len(PRESETS)


def test_an_unknown_name_is_one_line(capsys) -> None:
    pytest.importorskip("typer")
    from headwise.cli import main

    assert main(["presets", "brt-base"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "headwise: preset must be a known name: got 'brt-base'; did you mean 'bert-base'?"
    )
    assert captured.err.count("\n") == 1


# Against the models' own layers


YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
FULL = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
SMALL_T5 = {"d_model": E, "d_kv": D, "num_heads": H}
EPS = {"rms_norm_eps": 1e-6}
EVERY_HEAD = {"num_kv_heads": H}

LAYERS = [
    Layer("llama", "Llama", SIZES | rotary(), preset="llama2-7b"),
    Layer("llama", "Llama", SIZES | rotary(rope_theta=500_000.0), preset="llama3-8b"),
    Layer("llama", "Llama", SIZES | rotary(rope_theta=500_000.0, **LLAMA3), preset="llama3-405b"),
    Layer("llama", "Llama", SIZES | rotary(rope_theta=100_000.0), preset="smollm2-135m"),
    Layer("mistral", "Mistral", SIZES | rotary() | {"sliding_window": 3}, preset="mistral-7b", window=3),
    Layer("mixtral", "Mixtral", SIZES | rotary(rope_theta=1e6), preset="mixtral-8x7b"),
    Layer("qwen2", "Qwen2", SIZES | FULL | rotary(rope_theta=1e6), preset="qwen2.5-7b"),
    Layer("qwen3", "Qwen3", SIZES | FULL | EPS | rotary(rope_theta=1e6), preset="qwen3-8b"),
    Layer("gemma", "Gemma", SIZES | rotary(), preset="gemma-2b"),
    Layer("gemma2", "Gemma2", SIZES | FULL | rotary() | {"query_pre_attn_scalar": 256}, preset="gemma2-9b"),
    Layer("gpt_oss", "GptOss", SIZES | FULL | rotary(rope_theta=150_000.0, **YARN), preset="gpt-oss-20b"),
    Layer("t5", "T5", SMALL_T5, EVERY_HEAD, preset="t5-base", call=t5, causal=False, turned=False,
          extra={"has_relative_attention_bias": True}),
    Layer("falcon", "Falcon", PACKED_SIZES | rotary(), {"num_kv_heads": 1}, preset="falcon-7b", call=falcon,
          state=in_order),
    Layer("gpt_neox", "GPTNeoX", {"hidden_size": H * 96, "num_attention_heads": H}
          | rotary(partial_rotary_factor=0.25), {"d_model": H * 96}, preset="gpt-neox-20b",
          state=partial(head_by_head, width=96)),
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_a_preset_computes_what_its_models_layer_computes(layer: Layer) -> None:
    pytest.importorskip("transformers")
    judged(layer)
