"""Configs of other libraries' models: what a file leaves out is what the family's own config class says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.errors import ArgumentError
from headwise.models import TransformerConfig, load
from headwise.models.families import FAMILIES
from headwise.nn import Linear, Llama3, Rope, Yarn
from small_models import _finished, hugging_face

STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 32}

# Per family: the name of its classes, and a config in which no field that we read has its default.
GPT2 = {"vocab_size": 47, "n_embd": 33, "n_head": 3, "n_layer": 2, "n_inner": 37, "n_positions": 41,
        "activation_function": "relu", "layer_norm_epsilon": 3e-5, "resid_pdrop": 0.3, "embd_pdrop": 0.4,
        "attn_pdrop": 0.5, "tie_word_embeddings": False}  # fmt: skip
BERT = {"vocab_size": 47, "hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": 2,
        "intermediate_size": 37, "max_position_embeddings": 41, "type_vocab_size": 5, "hidden_act": "relu",
        "layer_norm_eps": 3e-5, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.4}  # fmt: skip
KIN = {"vocab_size": 47, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
       "head_dim": 10, "num_hidden_layers": 2, "intermediate_size": 37, "max_position_embeddings": 139,
       "hidden_act": "gelu", "rms_norm_eps": 3e-5, "tie_word_embeddings": True,
       "attention_dropout": 0.3}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
           "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
TURNED = {"rope_type": "yarn", "rope_theta": 5e5, "beta_fast": 23.0, "beta_slow": 3.0, "truncate": False,
          "attention_factor": 1.7, **STRETCHED}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "bert": ("Bert", BERT),
    "llama": ("Llama", KIN | {"attention_bias": True, "mlp_bias": True, "rope_parameters": TURNED}),
    "mistral": ("Mistral", KIN | {"sliding_window": 7}),
    "qwen2": ("Qwen2", KIN | WINDOWS),
    "qwen3": ("Qwen3", KIN | WINDOWS | {"attention_bias": True}),
}


def spelled_out(config: TransformerConfig) -> TransformerConfig:
    """The same config, with fields that follow from others filled in."""
    return replace(
        config,
        head_dim=config.head_dim or config.d_model // config.num_heads,
        num_kv_heads=config.num_kv_heads or config.num_heads,
        windows=tuple(map(config.window_of, range(config.num_layers))),
    )


def read(family: str, fields: dict[str, Any]) -> TransformerConfig | str:
    """What we make of a config, or that we refuse it."""
    try:
        return spelled_out(FAMILIES[family].config({"model_type": family, **fields}, True))
    except (ArgumentError, ValueError):
        return "refused"


def read_by_transformers(family: str, fields: dict[str, Any]) -> TransformerConfig | str:
    """What we make of the config once transformers has filled in every field, or that it refuses it."""
    kind = getattr(hugging_face(), f"{CONFIGS[family][0]}Config")
    try:
        config = kind(**json.loads(json.dumps(fields)))
    except Exception:  # its validators raise a class of their own, KeyError and ValueError
        return "refused"
    return read(family, config.to_dict())


def without_each(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same fields without one of them, and without one of those nested in one, by its name."""
    actual = {name: {k: v for k, v in fields.items() if k != name} for name in fields}
    for name, value in fields.items():
        if isinstance(value, dict):
            actual |= {f"{name}.{part}": fields | {name: less} for part, less in without_each(value).items()}
    return actual


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_a_config_leaves_out_is_what_its_class_says(family: str) -> None:
    """Each of the fields is left out alone, then all of them: what we read is what transformers reads."""
    fields = CONFIGS[family][1]
    assert read(family, fields) == read_by_transformers(family, fields) != "refused"
    for name, rest in without_each(fields).items():
        assert read(family, rest) == read_by_transformers(family, rest), name
    assert read(family, {}) == read_by_transformers(family, {}) != "refused"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configs_tried_have_every_field_that_has_a_default_and_another_value(family: str) -> None:
    """Else the test above would leave one out, or would compare it with itself."""
    name, fields = CONFIGS[family]
    in_class = vars(getattr(hugging_face(), f"{name}Config")())
    defaults = {key: value for key, value in FAMILIES[family].defaults.items() if key in in_class}
    assert defaults.keys() <= fields.keys()
    assert [key for key in defaults if fields[key] == defaults[key]] == []


def a_mistral(place: Path, **settings: Any) -> Any:
    """A small model with random weights, saved with a config that says nothing of what is its default."""
    hf = hugging_face()
    sizes = {name: value for name, value in KIN.items() if isinstance(value, int)}
    model = _finished(hf.MistralForCausalLM(hf.MistralConfig(**sizes, **settings)))
    model.save_pretrained(place)
    (place / "config.json").write_text(json.dumps({"model_type": "mistral", **sizes, **settings}))
    return model


def test_mistral_has_a_window_of_4096_where_its_config_says_nothing(tmp_path: Path) -> None:
    """Without it, the logits of every token beyond the 4,096th would be off."""
    theirs = a_mistral(tmp_path)
    ours = load(tmp_path, ours=True).model
    ids = torch.randint(47, (1, 4127), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        actual, expected = ours(ids)[:, 4000:], theirs(ids, logits_to_keep=127).logits
    assert ours.config.windows == (4096,)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


def test_mistral_has_no_window_where_its_config_says_so(tmp_path: Path) -> None:
    a_mistral(tmp_path, sliding_window=None)
    assert load(tmp_path, ours=True).model.config.windows == (None,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, r"\['full_attention'\] in qwen2 .* one for each of 2 layers"),
        (
            {"layer_types": ["chunked", "chunked"]},
            r"'chunked'\] in qwen2 \(supported are full_attention, sli",
        ),
        ({"use_sliding_window": False}, r"layer_types=.*\(supported are full_attention, one for each of 2"),
    ],
)
def test_layer_types_that_do_not_fit_the_rest_of_the_config_are_refused(changes: Any, message: str) -> None:
    """transformers refuses them, too: in the config, or when the model is called."""
    with pytest.raises(ArgumentError, match=message):
        FAMILIES["qwen2"].config({"model_type": "qwen2", **KIN, **WINDOWS, **changes}, True)


LLAMA = {"vocab_size": 47, "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 2,
         "intermediate_size": 37, "model_type": "llama"}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, Rope(10_000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, Rope(scaling=Linear(4.0))),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    **STRETCHED,
                }
            },
            Rope(scaling=Llama3(4.0, 1.0, 4.0, 32)),
        ),
        ({"rope_parameters": {"rope_type": "yarn", **STRETCHED}}, Rope(scaling=Yarn(4.0, 32))),
    ],
    ids=["default", "old", "linear", "llama3", "yarn"],
)
def test_rotary_positions_are_read_from_old_and_new_configs(fields: Any, rope: Rope) -> None:
    assert FAMILIES["llama"].config(LLAMA | fields, True).rope == rope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' in rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 0.7, **STRETCHED}}, "mscale=0.7"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_interleaved": True}, "rope_interleaved=True in llama"),
    ],
)
def test_rotary_positions_that_we_do_not_have_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FAMILIES["llama"].config(LLAMA | fields, True)
