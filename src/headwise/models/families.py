"""Families of Transformers that others have trained: their configs and their names, told in ours.

A family is one entry of `FAMILIES`: a table of their modules' names, and a function that reads their config.
`*` stands for the number of a layer. A field of a config that nobody asks for is refused by its name: what a
model was trained with is never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..nn.options import QKNorm
from ..nn.rotary import Linear, Llama3, Rope, Scaling, Yarn
from .transformer_config import TransformerConfig, Window

__all__ = ["FAMILIES", "Family", "Settings", "family_of"]

# Fields that say nothing about what a model computes: where it came from, tokens, training, other heads.
BESIDE = re.compile(
    r"_\w+|architectures|model_type|transformers_version|transformers\.js_config|torch_dtype|dtype"
    r"|\w+_token_id|id2label|label2id|problem_type|num_labels|classifier_dropout|summary_\w+"
    r"|task_specific_params|initializer_range|use_cache|return_dict|output_hidden_states|output_attentions"
    r"|gradient_checkpointing|chunk_size_feed_forward|pretraining_tp|is_llama_config"
    r"|max_window_layers|n_ctx|reorder_and_upcast_attn"
)
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class Settings:
    """The fields of somebody's config, each asked for once; what is left at the end is refused."""

    def __init__(self, fields: Mapping[str, Any], family: str) -> None:
        self._left, self._family = dict(fields), family

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field; the default of their class where it is not there or None."""
        value = self._left.pop(name, None)
        if value is None and default is None:
            raise self._refusal(name, None, "its config has to say")
        return default if value is None else value

    def may(self, name: str) -> Any:
        """The value of a field that may be None or missing."""
        return self._left.pop(name, None)

    def must(self, **fields: Any) -> None:
        """Refuse anything but these values, where there is one."""
        for name, only in fields.items():
            value = self._left.pop(name, None)
            if value is not None and value != only:
                raise self._refusal(name, value, f"only {only!r} is known here")

    def word(self, name: str, words: Mapping[Any, str], default: Any = None) -> Any:
        """The value of a field in our words."""
        value = self.take(name, default)
        if value not in words:
            raise self._refusal(name, value, f"known are {', '.join(map(str, words))}")
        return words[value]

    def finish(self) -> None:
        """Refuse what nobody asked for."""
        for name, value in self._left.items():
            if value is not None and not BESIDE.fullmatch(name):
                raise self._refusal(name, value, "nothing here is known to do as it says")

    def _refusal(self, name: str, value: object, why: str) -> ArgumentError:
        return ArgumentError(
            f"config must be one that headwise can follow: {name}={value!r} of {self._family} is not, {why}; "
            "use the model as transformers has it"
        )


Read = Callable[[Settings], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """One family: `read` makes arguments of `TransformerConfig` of a config, `names` are their modules'.

    Args:
        classes: of transformers that are understood; and whether they end with an output, True, or without.
        prefix: what stands before names where there is something on top.
        names: their modules and ours; where one of theirs is several of ours, they lie one after another.
        transposed: modules whose weight is [in, out].
        beside: of their tensors, those that are no weights of the model.
    """

    read: Read
    classes: Mapping[str, bool]
    prefix: str
    names: Mapping[str, str | tuple[str, ...]]
    transposed: tuple[str, ...] = ()
    beside: str = ""

    def config(self, fields: Mapping[str, Any], with_output: bool) -> TransformerConfig:
        """Our config for theirs."""
        settings = Settings(fields, fields["model_type"])
        settings.must(is_encoder_decoder=False, add_cross_attention=False, quantization_config=None)
        said = self.read(settings)
        settings.finish()
        return TransformerConfig(**(said if with_output else {**said, "output": None}))


OUTPUT = {True: "tied", False: "own"}

# GPT-2


def _gpt2(s: Settings) -> dict[str, Any]:
    s.must(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    width = s.take("n_embd", 768)
    return {
        "vocab_size": s.take("vocab_size"),
        "d_model": width,
        "num_heads": s.take("n_head", 12),
        "num_layers": s.take("n_layer", 12),
        "d_ff": s.may("n_inner") or 4 * width,
        "max_length": s.take("n_positions", 1024),
        "positions": "learned",
        "activation": s.word("activation_function", ACTIVATIONS, "gelu_new"),
        "norm_eps": s.take("layer_norm_epsilon", 1e-5),
        "dropout": s.take("resid_pdrop", 0.1),
        "embedding_dropout": s.take("embd_pdrop", 0.1),
        "attention_dropout": s.take("attn_pdrop", 0.1),
        "output": s.word("tie_word_embeddings", OUTPUT, True),
    }


GPT2 = Family(
    _gpt2,
    {"GPT2LMHeadModel": True, "GPT2Model": False},
    "transformer.",
    {
        "wte": "embedding.tokens",
        "wpe": "embedding.positions",
        "h.*.ln_1": "decoder.layers.*.attention_norm",
        "h.*.attn.c_attn": (
            "decoder.layers.*.attention.q_proj",
            "decoder.layers.*.attention.k_proj",
            "decoder.layers.*.attention.v_proj",
        ),
        "h.*.attn.c_proj": "decoder.layers.*.attention.out_proj",
        "h.*.ln_2": "decoder.layers.*.feed_forward_norm",
        "h.*.mlp.c_fc": "decoder.layers.*.feed_forward.up_proj",
        "h.*.mlp.c_proj": "decoder.layers.*.feed_forward.down_proj",
        "ln_f": "decoder.norm",
        "lm_head": "output",
    },
    transposed=("h.*.attn.c_attn", "h.*.attn.c_proj", "h.*.mlp.c_fc", "h.*.mlp.c_proj"),
    beside=r"h\.\d+\.attn\.(masked_)?bias",  # the causal mask, which old files hold
)

# BERT


def _bert(s: Settings) -> dict[str, Any]:
    s.must(position_embedding_type="absolute", is_decoder=False, tie_word_embeddings=True)
    return {
        "vocab_size": s.take("vocab_size"),
        "d_model": s.take("hidden_size", 768),
        "num_heads": s.take("num_attention_heads", 12),
        "num_layers": s.take("num_hidden_layers", 12),
        "kind": "encoder",
        "d_ff": s.take("intermediate_size", 3072),
        "max_length": s.take("max_position_embeddings", 512),
        "positions": "learned",
        "token_types": s.take("type_vocab_size", 2),
        "embedding_norm": True,
        "activation": s.word("hidden_act", ACTIVATIONS, "gelu"),
        "norm_eps": s.take("layer_norm_eps", 1e-12),
        "norm_first": False,
        "dropout": s.take("hidden_dropout_prob", 0.1),
        "attention_dropout": s.take("attention_probs_dropout_prob", 0.1),
    }


BERT = Family(
    _bert,
    {"BertModel": False},
    "bert.",
    {
        "embeddings.word_embeddings": "embedding.tokens",
        "embeddings.position_embeddings": "embedding.positions",
        "embeddings.token_type_embeddings": "embedding.types",
        "embeddings.LayerNorm": "embedding.norm",
        "encoder.layer.*.attention.self.query": "encoder.layers.*.attention.q_proj",
        "encoder.layer.*.attention.self.key": "encoder.layers.*.attention.k_proj",
        "encoder.layer.*.attention.self.value": "encoder.layers.*.attention.v_proj",
        "encoder.layer.*.attention.output.dense": "encoder.layers.*.attention.out_proj",
        "encoder.layer.*.attention.output.LayerNorm": "encoder.layers.*.attention_norm",
        "encoder.layer.*.intermediate.dense": "encoder.layers.*.feed_forward.up_proj",
        "encoder.layer.*.output.dense": "encoder.layers.*.feed_forward.down_proj",
        "encoder.layer.*.output.LayerNorm": "encoder.layers.*.feed_forward_norm",
    },
    beside=r"pooler\..*|cls\..*|embeddings\.position_ids",  # what stands on top of the encoder
)

# Llama and its kin


def _llama(s: Settings) -> dict[str, Any]:
    s.must(rope_interleaved=False)
    bias = s.take("attention_bias", False)
    return {**_rotary(s), "qkv_bias": bias, "out_bias": bias, "bias": s.take("mlp_bias", False)}


def _mistral(s: Settings) -> dict[str, Any]:
    return {**_rotary(s), "bias": False, "windows": (s.may("sliding_window"),)}


def _qwen2(s: Settings) -> dict[str, Any]:
    return {**_rotary(s), "bias": False, "qkv_bias": True, "windows": _windows(s)}


def _qwen3(s: Settings) -> dict[str, Any]:
    bias, read = s.take("attention_bias", False), _rotary(s, head_dim=128)
    norm = QKNorm("rms", eps=read["norm_eps"])
    return {
        **read,
        "bias": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": norm,
        "windows": _windows(s),
    }


def _rotary(s: Settings, head_dim: int | None = None) -> dict[str, Any]:
    """What Llama and its kin have in common."""
    return {
        "vocab_size": s.take("vocab_size"),
        "d_model": s.take("hidden_size"),
        "num_heads": s.take("num_attention_heads"),
        "num_layers": s.take("num_hidden_layers"),
        "num_kv_heads": s.may("num_key_value_heads"),
        "head_dim": s.may("head_dim") or head_dim,
        "d_ff": s.take("intermediate_size"),
        "max_length": s.take("max_position_embeddings", 2048),
        "activation": s.word("hidden_act", ACTIVATIONS, "silu"),
        "gated": True,
        "norm": "rms",
        "norm_eps": s.take("rms_norm_eps", 1e-6),
        "rope": _rope(s),
        "output": s.word("tie_word_embeddings", OUTPUT, False),
        "attention_dropout": s.take("attention_dropout", 0.0),
    }


def _windows(s: Settings) -> tuple[Window | None, ...]:
    """Which layers of a Qwen look through a window."""
    size, used, kinds = s.may("sliding_window"), s.may("use_sliding_window"), s.may("layer_types")
    if not used or size is None:
        return (None,)
    if kinds is None:
        raise s._refusal("use_sliding_window", True, "its config has to say layer_types")
    return tuple({"full_attention": None, "sliding_attention": size}[kind] for kind in kinds)


def _rope(s: Settings) -> Rope:
    """rope_theta and rope_scaling, or both in rope_parameters, as it is since transformers 5."""
    base, said = s.may("rope_theta"), s.may("rope_parameters") or s.may("rope_scaling") or {}
    s.must(rope_scaling=None)
    asked = Settings(said, "rope_parameters")
    base = asked.may("rope_theta") or base or 10_000.0
    kind = asked.may("rope_type") or asked.may("type") or "default"
    asked.must(type=kind, partial_rotary_factor=1.0)
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = Linear(asked.take("factor"))
    elif kind == "llama3":
        low, high = asked.take("low_freq_factor"), asked.take("high_freq_factor")
        scaling = Llama3(asked.take("factor"), low, high, asked.take("original_max_position_embeddings"))
    elif kind == "yarn":
        scaling = Yarn(
            asked.take("factor"),
            asked.take("original_max_position_embeddings"),
            asked.take("beta_fast", 32.0),
            asked.take("beta_slow", 1.0),
            asked.take("truncate", True),
            asked.may("attention_factor"),
        )
    elif kind != "default":
        raise asked._refusal("rope_type", kind, "known are default, linear, llama3, yarn")
    asked.finish()
    return Rope(base, scaling=scaling)


LLAMA_NAMES = {
    "embed_tokens": "embedding.tokens",
    "layers.*.input_layernorm": "decoder.layers.*.attention_norm",
    "layers.*.self_attn.q_proj": "decoder.layers.*.attention.q_proj",
    "layers.*.self_attn.k_proj": "decoder.layers.*.attention.k_proj",
    "layers.*.self_attn.v_proj": "decoder.layers.*.attention.v_proj",
    "layers.*.self_attn.o_proj": "decoder.layers.*.attention.out_proj",
    "layers.*.self_attn.q_norm": "decoder.layers.*.attention.q_norm",
    "layers.*.self_attn.k_norm": "decoder.layers.*.attention.k_norm",
    "layers.*.post_attention_layernorm": "decoder.layers.*.feed_forward_norm",
    "layers.*.mlp.gate_proj": "decoder.layers.*.feed_forward.gate_proj",
    "layers.*.mlp.up_proj": "decoder.layers.*.feed_forward.up_proj",
    "layers.*.mlp.down_proj": "decoder.layers.*.feed_forward.down_proj",
    "norm": "decoder.norm",
    "lm_head": "output",
}


def _like_llama(name: str, read: Read) -> Family:
    classes = {f"{name}ForCausalLM": True, f"{name}Model": False}
    return Family(read, classes, "model.", LLAMA_NAMES, beside=r".*rotary_emb\.inv_freq")


FAMILIES: dict[str, Family] = {  # by their config's model_type
    "gpt2": GPT2,
    "bert": BERT,
    "llama": _like_llama("Llama", _llama),
    "mistral": _like_llama("Mistral", _mistral),
    "qwen2": _like_llama("Qwen2", _qwen2),
    "qwen3": _like_llama("Qwen3", _qwen3),
}


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family of a config.

    Raises:
        ArgumentError: one that is not in the table.
    """
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ArgumentError(
            f"model must be of a family that headwise knows: got {kind!r}, known are {', '.join(FAMILIES)}; "
            "use the model as transformers has it"
        )
    return FAMILIES[kind]
