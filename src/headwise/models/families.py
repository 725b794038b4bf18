"""Families of Transformers that others have trained: their configs, names and weights in our `Transformer`.

A family is one entry of `FAMILIES`: a table of their config's fields with the defaults of its class; a
function for what is not said by one field; and a table of their modules' names, where `*` stands for the
number of a layer. A field that is not read raises an error with its name, and so does a weight
without a counterpart in the other model. Weights are copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, needed
from ..nn.options import QKNorm
from ..nn.rotary import Linear, Llama3, Rope, Scaling, Yarn
from .model_files import Undrawn
from .transformer import Transformer
from .transformer_config import TransformerConfig, Window

# Fields that say nothing about what a model computes: where it came from, tokens, training, other heads.
BESIDE = re.compile(
    r"_\w+|architectures|model_type|transformers_version|transformers\.js_config|torch_dtype|dtype"
    r"|\w+_token_id|id2label|label2id|problem_type|num_labels|classifier_dropout|summary_\w+"
    r"|task_specific_params|initializer_range|use_cache|return_dict|output_hidden_states|output_attentions"
    r"|gradient_checkpointing|chunk_size_feed_forward|pretraining_tp|is_llama_config"
    r"|max_window_layers|n_ctx|reorder_and_upcast_attn"
)
WORDS: dict[str, dict[Any, str]] = {  # our fields -> their values -> our values
    "activation": {
        "relu": "relu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "silu": "silu",
        "swish": "silu",
    },
    "output": {True: "tied", False: "own"},
}
MAY_BE_NONE = ("n_inner", "num_key_value_heads", "head_dim")  # their fields


Values = dict[str, Any]


class Settings:
    """The fields of a config, each read once; fields that were not read raise an error at the end.

    Args:
        fields: as the file has them. None is a value: no window, for example.
        family: what they belong to, for messages.
        defaults: of fields that are not there.
    """

    def __init__(self, fields: Mapping[str, Any], family: str, defaults: Mapping[str, Any]) -> None:
        self._left, self._family, self._defaults = dict(fields), family, defaults

    def read(self, fields: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        """Return the values of a table of fields by headwise's names."""
        read: dict[str, Any] = {}
        for ours, (theirs, _) in fields.items():
            value = self.may(theirs) if theirs in MAY_BE_NONE else self.take(theirs)
            if ours in WORDS and value not in WORDS[ours]:
                raise self._refusal(theirs, value, f"supported are {', '.join(map(str, WORDS[ours]))}")
            read[ours] = WORDS[ours][value] if ours in WORDS else value
        return read

    def take(self, name: str) -> Any:
        """Return the value of a required field."""
        value = self.may(name)
        if value is None:
            raise self._refusal(name, None, "this field is required")
        return value

    def may(self, name: str) -> Any:
        """Return the value of a field that may be None."""
        return self._left.pop(name, self._defaults.get(name))

    def must(self, **fields: Any) -> None:
        """Raise for fields that are present with another value."""
        for name, only in fields.items():
            value = self._left.pop(name, None)
            if value is not None and value != only:
                raise self._refusal(name, value, f"only {only!r} is supported")

    def finish(self) -> None:
        """Raise for fields that were not read."""
        for name, value in self._left.items():
            if value is not None and not BESIDE.fullmatch(name):
                raise self._refusal(name, value, "this field is unknown")

    def _refusal(self, name: str, value: object, reason: str) -> ArgumentError:
        return ArgumentError(
            f"config must be supported by headwise: got {name}={value!r} in {self._family} ({reason}); use "
            "the model of transformers"
        )


Rest = Callable[[Settings, Values], Values]


@dataclass(frozen=True)
class Family:
    """One family of models: how its config and its modules are named, and what that is here."""

    fields: Mapping[str, tuple[str, Any]]  # ours -> theirs, and the default of their config class
    rest: Rest  # what is given beside them, as arguments of `TransformerConfig`
    others: Mapping[str, Any]  # defaults of the fields that `rest` reads
    classes: Mapping[str, bool]  # of transformers; whether they end with an output
    prefix: str  # what stands before names where there is something on top
    names: Mapping[str, str | tuple[str, ...]]  # their modules -> ours; several lie one after another
    transposed: tuple[str, ...] = ()  # modules whose weight is [in, out]
    beside: str = ""  # their tensors that are no weights of the model

    def config(self, fields: Mapping[str, Any], with_output: bool) -> TransformerConfig:
        """Return headwise's config for a config of the family."""
        settings = Settings(fields, fields["model_type"], self.defaults)
        settings.must(is_encoder_decoder=False, add_cross_attention=False, quantization_config=None)
        read = settings.read(self.fields)
        read |= self.rest(settings, read)
        settings.finish()
        return TransformerConfig(**(read if with_output else {**read, "output": None}))

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of the fields that a config leaves out."""
        return {**dict(self.fields.values()), **self.others}


def _gpt2(s: Settings, read: Values) -> Values:
    s.must(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return {"positions": "learned", "d_ff": read["d_ff"] or 4 * read["d_model"]}


GPT2 = Family(
    {
        "vocab_size": ("vocab_size", 50257),
        "d_model": ("n_embd", 768),
        "num_heads": ("n_head", 12),
        "num_layers": ("n_layer", 12),
        "d_ff": ("n_inner", None),
        "max_length": ("n_positions", 1024),
        "activation": ("activation_function", "gelu_new"),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "dropout": ("resid_pdrop", 0.1),
        "embedding_dropout": ("embd_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
        "output": ("tie_word_embeddings", True),
    },
    _gpt2,
    {},
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


def _bert(s: Settings, read: Values) -> Values:
    s.must(position_embedding_type="absolute", is_decoder=False, tie_word_embeddings=True)
    return {"kind": "encoder", "positions": "learned", "embedding_norm": True, "norm_first": False}


BERT = Family(
    {
        "vocab_size": ("vocab_size", 30522),
        "d_model": ("hidden_size", 768),
        "num_heads": ("num_attention_heads", 12),
        "num_layers": ("num_hidden_layers", 12),
        "d_ff": ("intermediate_size", 3072),
        "max_length": ("max_position_embeddings", 512),
        "token_types": ("type_vocab_size", 2),
        "activation": ("hidden_act", "gelu"),
        "norm_eps": ("layer_norm_eps", 1e-12),
        "dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    },
    _bert,
    {},
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


def _llama(s: Settings, read: Values) -> Values:
    s.must(rope_interleaved=False)
    bias = s.take("attention_bias")
    return {**_rotary(s, read), "qkv_bias": bias, "out_bias": bias, "bias": s.take("mlp_bias")}


def _mistral(s: Settings, read: Values) -> Values:
    return {**_rotary(s, read), "bias": False, "windows": (s.may("sliding_window"),)}


def _qwen2(s: Settings, read: Values) -> Values:
    windows = _windows(s, read["num_layers"])
    return {**_rotary(s, read), "bias": False, "qkv_bias": True, "windows": windows}


def _qwen3(s: Settings, read: Values) -> Values:
    bias = s.take("attention_bias")
    norm = QKNorm("rms", eps=read["norm_eps"])
    return {**_qwen2(s, read), "qkv_bias": bias, "out_bias": bias, "qk_norm": norm}


def _rotary(s: Settings, read: Values) -> Values:
    return {"gated": True, "norm": "rms", "rope": _rope(s, read["max_length"])}


def _windows(s: Settings, num_layers: int) -> tuple[Window | None, ...]:
    """Return the window of each layer of a Qwen."""
    is_used, size = s.take("use_sliding_window"), s.may("sliding_window")
    size = size if is_used else None
    kinds, full_layers = s.may("layer_types"), s.take("max_window_layers")
    if kinds is None:
        return tuple(None if layer < full_layers else size for layer in range(num_layers))
    sizes: dict[str, Window | None] = {"full_attention": None}
    if size is not None:
        sizes["sliding_attention"] = size
    if len(kinds) != num_layers or not sizes.keys() >= set(kinds):
        supported = f"supported are {', '.join(sizes)}, one for each of {num_layers} layers"
        raise s._refusal("layer_types", kinds, supported)
    return tuple(sizes[kind] for kind in kinds)


def _rope(s: Settings, max_length: int) -> Rope:
    """Return the `Rope` of rope_theta and rope_scaling, or of rope_parameters since transformers 5."""
    base, parameters = s.take("rope_theta"), s.may("rope_parameters") or s.may("rope_scaling") or {}
    s.must(rope_scaling=None)
    defaults = {"rope_theta": base, "original_max_position_embeddings": max_length, **ROPE_DEFAULTS}
    rope = Settings(parameters, "rope_parameters", defaults)
    base, kind = rope.take("rope_theta"), rope.may("rope_type") or rope.may("type") or "default"
    rope.must(type=kind, partial_rotary_factor=1.0)
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = Linear(rope.take("factor"))
    elif kind == "llama3":
        low, high = rope.take("low_freq_factor"), rope.take("high_freq_factor")
        scaling = Llama3(rope.take("factor"), low, high, rope.take("original_max_position_embeddings"))
    elif kind == "yarn":
        scaling = Yarn(
            rope.take("factor"),
            rope.take("original_max_position_embeddings"),
            rope.take("beta_fast"),
            rope.take("beta_slow"),
            rope.take("truncate"),
            rope.may("attention_factor"),
        )
    elif kind != "default":
        raise rope._refusal("rope_type", kind, "supported are default, linear, llama3, yarn")
    rope.finish()
    return Rope(base, scaling=scaling)


ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
LLAMA_FIELDS = {
    "vocab_size": ("vocab_size", 32000),
    "d_model": ("hidden_size", 4096),
    "num_heads": ("num_attention_heads", 32),
    "num_layers": ("num_hidden_layers", 32),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "d_ff": ("intermediate_size", 11008),
    "max_length": ("max_position_embeddings", 2048),
    "activation": ("hidden_act", "silu"),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "output": ("tie_word_embeddings", False),
    "attention_dropout": ("attention_dropout", 0.0),
}
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


WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


def _like_llama(name: str, rest: Rest, others: Mapping[str, Any], **defaults: Any) -> Family:
    """Return a family with Llama's fields and names; `defaults` replace those of its class."""
    fields = LLAMA_FIELDS | {ours: (LLAMA_FIELDS[ours][0], value) for ours, value in defaults.items()}
    classes = {f"{name}ForCausalLM": True, f"{name}Model": False}
    others = {"rope_theta": 10_000.0, **others}
    return Family(fields, rest, others, classes, "model.", LLAMA_NAMES, beside=r".*rotary_emb\.inv_freq")


QWEN = {"vocab_size": 151936, "num_kv_heads": 32, "d_ff": 22016, "max_length": 32768}
FAMILIES: dict[str, Family] = {  # by their config's model_type
    "gpt2": GPT2,
    "bert": BERT,
    "llama": _like_llama("Llama", _llama, {"attention_bias": False, "mlp_bias": False}),
    "mistral": _like_llama(
        "Mistral", _mistral, {"sliding_window": 4096}, num_kv_heads=8, d_ff=14336, max_length=131072
    ),
    "qwen2": _like_llama("Qwen2", _qwen2, WINDOWS, **QWEN),
    "qwen3": _like_llama("Qwen3", _qwen3, WINDOWS | {"attention_bias": False}, **QWEN, head_dim=128),
}


def family_of(fields: Mapping[str, Any]) -> Family:
    """Return the family of a config."""
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ArgumentError(
            f"model must be of a supported family: got {kind!r}, not one of {', '.join(FAMILIES)}; use the "
            "model of transformers"
        )
    return FAMILIES[kind]


# Weights


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
INDEX = "model.safetensors.index.json"


def from_transformers(model: nn.Module) -> Transformer:
    """Return the same model built of headwise's parts, with copies of the weights, in the same mode."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ArgumentError(
            f"model must be a folder, a name or a model of transformers: got {type(model).__name__}; pass "
            "other models to headwise.watch"
        )
    fields = config.to_dict()  # type: ignore[union-attr]
    family, name = family_of(fields), type(model).__name__
    if name not in family.classes:
        raise ArgumentError(
            f"model must be one of {', '.join(family.classes)}: got {name}; pass its base model"
        )
    fields.pop("quantization_config", None)  # about the original files; weights are checked by dtype
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    new = _filled(family.config(fields, family.classes[name]), family, state)
    return new.train(model.training)


def from_folder(folder: Path) -> Transformer:
    """Return the model of a folder with config.json and safetensors, in eval mode, without transformers."""
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    family = family_of(fields)
    class_names = [name for name in fields.get("architectures") or () if name in family.classes]
    with_output = any(family.classes.values()) if not class_names else family.classes[class_names[0]]
    return _filled(family.config(fields, with_output), family, dict(_tensors(folder))).eval()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the files in the index, else of model.safetensors, else of all files."""
    with needed("safetensors", "weights in files need safetensors"):
        from safetensors import SafetensorError, safe_open
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files = sorted({folder / name for name in listed.values()})
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no dict
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ArgumentError(
                f"model must have readable files: {file.name!r} is not ({error}); download it again"
            ) from error


def _filled(config: TransformerConfig, family: Family, theirs: Mapping[str, Tensor]) -> Transformer:
    with Undrawn():
        model = Transformer(config, device="meta")
    state: dict[str, Tensor] = {}
    trained: dict[str, bool] = {}
    for name, tensor in theirs.items():
        for ours, part in _placed(family, name, tensor):
            state[ours], trained[ours] = part, tensor.requires_grad
    if config.output == "tied" and "output.weight" in state:
        output, tokens = state.pop("output.weight"), state.get("embedding.tokens.weight")
        if tokens is not None and output is not tokens and not torch.equal(output, tokens):
            raise ArgumentError(
                "lm_head must equal the embedding if tie_word_embeddings=True: got other numbers; set "
                "tie_word_embeddings=False in the config"
            )
    _check_places(model, state)
    model.load_state_dict({name: x.detach().clone() for name, x in state.items()}, assign=True)
    if any(trained.values()):  # tensors of files never require gradients; then all parameters stay trainable
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    return model


def _placed(family: Family, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each of our weights that this tensor contains."""
    bare = name.removeprefix(family.prefix)
    if family.beside and re.fullmatch(family.beside, bare):
        return
    module, _, kind = bare.rpartition(".")
    kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)  # names in the first BERT files
    pattern, number = NUMBER.sub("*", module), "".join(NUMBER.findall(module))
    places = family.names.get(pattern)
    if places is None or kind not in ("weight", "bias"):
        raise ArgumentError(
            f"weights must belong to the family of the config: got {name!r} {list(tensor.shape)}; load the "
            "model with transformers"
        )
    if pattern in family.transposed and kind == "weight":
        tensor = tensor.t()
    places = (places,) if isinstance(places, str) else places
    parts = tensor.chunk(len(places)) if len(places) > 1 else (tensor,)
    for place, part in zip(places, parts, strict=True):
        yield f"{place.replace('*', number)}.{kind}", part


def _check_places(model: Transformer, state: Mapping[str, Any]) -> None:
    """Raise unless every weight of ours is there, of its shape, in one dtype."""
    wanted = dict(model.named_parameters())
    missing = [name for name in wanted if name not in state]
    if missing:
        raise ArgumentError(
            f"model must have all its weights: {len(missing)} of {len(wanted)} are missing, such as "
            f"{missing[0]!r}; use weights and config of the same model"
        )
    for name, tensor in state.items():
        if name not in wanted:
            raise ArgumentError(
                f"weights must fit the config: it has no {name!r} {list(tensor.shape)}; use weights and "
                "config of the same model"
            )
        if tensor.shape != wanted[name].shape:
            raise ArgumentError(
                f"weights must fit the config: {name!r} is {list(tensor.shape)}, not "
                f"{list(wanted[name].shape)}; use weights and config of the same model"
            )
        if not tensor.is_floating_point():
            raise ArgumentError(
                f"weights must be floating point: {name!r} is {tensor.dtype}; load quantised models with "
                "transformers"
            )
