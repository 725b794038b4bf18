"""Language models of many families, small, with every parameter far from its start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from small_models import hugging_face

V, E = 53, 24
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": E, "num_hidden_layers": 3, "num_attention_heads": 3,
    "intermediate_size": 41,
}  # fmt: skip
GROUPED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
GPT2 = {"vocab_size": V, "n_embd": E, "n_layer": 3, "n_head": 3, "n_positions": 31}
T5 = {"vocab_size": V, "d_model": E, "d_kv": 7, "d_ff": 41, "num_layers": 2, "num_heads": 5}
OPT = {
    "vocab_size": V, "hidden_size": E, "num_hidden_layers": 3, "num_attention_heads": 3, "ffn_dim": 41,
    "max_position_embeddings": 31, "word_embed_proj_dim": E,
}  # fmt: skip
FALCON = {"vocab_size": V, "hidden_size": E, "num_hidden_layers": 3, "num_attention_heads": 3}
MIXED = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 11,
    "shared_expert_intermediate_size": 13, "decoder_sparse_step": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("LMHeadModel", GPT2),
    "Llama": ("ForCausalLM", GROUPED),
    "Qwen3": ("ForCausalLM", GROUPED),
    "Gemma2": ("ForCausalLM", GROUPED | {"query_pre_attn_scalar": 10, "final_logit_softcapping": 3.0}),
    "OPT": ("ForCausalLM", OPT),
    "Phi": ("ForCausalLM", SIZES | {"partial_rotary_factor": 0.5}),
    "Bert": ("ForMaskedLM", SIZES),
    "T5": ("ForConditionalGeneration", T5),
    "Nemotron": ("ForCausalLM", GROUPED),  # a layer norm of weight + 1
    "Cohere": ("ForCausalLM", GROUPED | {"logit_scale": 0.25}),
    "Granite": ("ForCausalLM", GROUPED | {"logits_scaling": 8.0, "residual_multiplier": 0.5}),
    "Falcon": ("ForCausalLM", FALCON),  # writes into the output of its MLP
    "Qwen2Moe": ("ForCausalLM", GROUPED | MIXED),  # a gate beside the shared expert
    "Mixtral": ("ForCausalLM", GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "Olmo": ("ForCausalLM", GROUPED),  # norms without weight
}
POSITIONS = {"Bert": 3}


def spread(model: nn.Module) -> Any:
    """Every parameter far from its start, in float64: no norm has a weight of 1 or a bias of 0."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model.double().eval()


def family(name: str) -> Any:
    hf = hugging_face()
    suffix, sizes = FAMILIES[name]
    config = getattr(hf, f"{name}Config")(**sizes)
    config._experts_implementation = "eager"  # grouped products know no float64
    return spread(getattr(hf, f"{name}{suffix}")(config))


def albert_for_tokens() -> Any:
    """A block that runs three times."""
    hf = hugging_face()
    sizes = SIZES | {"embedding_size": 11, "num_hidden_groups": 1}
    return spread(hf.AlbertForMaskedLM(hf.AlbertConfig(**sizes)))


def inputs_for(name: str, batch: int = 2, length: int = 7) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    inputs = {"input_ids": torch.randint(3, V, (batch, length), generator=random)}
    if name == "T5":
        inputs["decoder_input_ids"] = torch.randint(3, V, (batch, 5), generator=random)
    return inputs
