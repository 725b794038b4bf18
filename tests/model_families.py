"""Tiny models of many Hugging Face families, with random weights, and something to feed them.

One entry a family. Weights are drawn wide enough for attention to be far from uniform: with the usual small
ones, a wrong mask or a lost bias would hardly show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, ANSWER = 2, 11, 5  # sequences; tokens in a text; tokens a decoder answers with
VOCABULARY = 61
PADDED = 3  # how many of the first sequence's tokens are padding
SIDES = ("none", "left", "right")

# The names under which configs keep the same few sizes.
PLAIN = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 40, "max_position_embeddings": 40}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = PLAIN | TOKENS | {"num_key_value_heads": 2}
SEEING = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
          "image_size": 16, "patch_size": 4}  # fmt: skip
BART = TOKENS | {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                 "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
                 "decoder_ffn_dim": 40, "max_position_embeddings": 40,
                 "decoder_start_token_id": 1}  # fmt: skip
GPT = TOKENS | {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
HEARING = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
           "conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
           "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 20,
           "feat_extract_norm": "layer"}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
LATENT = GROUPED | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                    "n_group": 1, "topk_group": 1, "experts_implementation": "eager"}  # fmt: skip
SPARSE = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}  # a query sees its best four keys
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
DELTAS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model to build by the names of its classes in transformers."""

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[str], dict[str, Any]] | None = None  # of a side for padding; None: text
    route: str = "hook"  # or "eager": heard with fallback="eager" only; "partly": in part; "refused"; "none"
    sides: tuple[str, ...] = SIDES
    core: bool = False
    config: str = ""  # where it is not the model's name with Config in place of Model
    judged: bool = True  # whether its eager route means the same as its usual one
    finest: torch.dtype = torch.float64  # that it runs in
    since: tuple[int, int] = (0, 0)  # the transformers that has it, or has it as it is said here

    def __repr__(self) -> str:
        return self.name

    def build(self, dtype: torch.dtype = torch.float32, implementation: str | None = None) -> nn.Module:
        """The model, in eval mode; the same weights every time. One not there yet: skip."""
        import transformers

        not_before(self.since, self.name)
        config = getattr(transformers, self.config or self.model.removesuffix("Model") + "Config")
        settings = {
            name: dict(part) if isinstance(part, dict) else part for name, part in self.settings.items()
        }
        if implementation is not None:
            settings["attn_implementation"] = implementation
        model: nn.Module = getattr(transformers, self.model)(config(**settings))
        _draw_wide(model)
        return model.to(dtype).eval()

    def feed(self, side: str = "none", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """What to call it with."""
        arguments = (self.inputs or text)(side)
        return {
            n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for n, x in arguments.items()
        }


def is_since(since: tuple[int, int]) -> bool:
    """Whether this transformers is as new as that."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) >= since


def not_before(since: tuple[int, int], name: str) -> None:
    """Skip the test of a model that an older transformers does not have, or has otherwise."""
    import transformers

    if not is_since(since):
        import pytest

        pytest.skip(
            f"by design: {name} is otherwise or not at all in transformers {transformers.__version__}"
        )


def _draw_wide(model: nn.Module) -> None:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)
            elif "sink" in name:
                parameter.copy_(noise)
            else:  # a norm's weight, or a bias: not all are filled when a model is built
                parameter.copy_(0.1 * noise + any(part in name for part in ("weight", "gamma", "lambda")))


def _integers(*shape: int, low: int = 3, high: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def padding(side: str, length: int, batch: int = BATCH) -> Tensor:
    """An attention_mask as tokenizers make it."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "left":
        mask[0, :PADDED] = 0
    elif side == "right":
        mask[0, length - PADDED :] = 0
    return mask


def text(side: str, length: int = LENGTH) -> dict[str, Any]:
    ids = _integers(BATCH, length)
    if side == "none":
        return {"input_ids": ids}
    mask = padding(side, length)
    return {"input_ids": ids * mask, "attention_mask": mask}


def text_and_answer(side: str) -> dict[str, Any]:
    answer = {"decoder_input_ids": _integers(BATCH, ANSWER, seed=1)}
    if side != "none":
        answer["decoder_attention_mask"] = padding("right", ANSWER)
    return text(side) | answer


def image(side: str) -> dict[str, Any]:
    return {"pixel_values": _numbers(BATCH, 3, 16, 16)}


def image_and_text(side: str) -> dict[str, Any]:
    return text(side) | image(side)


def sound(side: str) -> dict[str, Any]:
    options: dict[str, Any] = {"input_values": _numbers(BATCH, 60)}
    if side != "none":
        mask = torch.ones(BATCH, 60, dtype=torch.long)
        mask[0, 40:] = 0
        options = {"input_values": options["input_values"] * mask, "attention_mask": mask}
    return options


def speech_and_answer(side: str) -> dict[str, Any]:
    return {"input_features": _numbers(BATCH, 8, 24), "decoder_input_ids": _integers(BATCH, ANSWER, seed=1)}


def text_with_boxes(side: str) -> dict[str, Any]:
    corner = _integers(BATCH, LENGTH, 2, low=0, high=10)
    return text(side) | {"bbox": torch.cat([corner, corner + 3], -1)}


def text_with_image_inside(side: str) -> dict[str, Any]:
    """Sixteen places of the text are the patches of the image."""
    arguments = text(side, LENGTH + 16)
    arguments["input_ids"][arguments["input_ids"] == 60] = 59
    arguments["input_ids"][:, 4 : 4 + 16] = 60
    return arguments | image(side)


def text_with_queries_inside(side: str) -> dict[str, Any]:
    """Four places of the text are what was asked of the image."""
    arguments = text(side)
    arguments["input_ids"][arguments["input_ids"] == 60] = 59
    arguments["input_ids"][:, 3:7] = 60
    return arguments | image(side)


def text_with_patches_inside(side: str) -> dict[str, Any]:
    """Four places of the text are the image, sixteen patches of which four and four are merged."""
    arguments = text(side)
    arguments["input_ids"].clamp_(max=56)
    arguments["input_ids"][:, 3], arguments["input_ids"][:, 8] = 58, 57
    arguments["input_ids"][:, 4:8] = 60
    pixels = _numbers(BATCH * 16, 3 * 2 * 4 * 4)
    kinds = (arguments["input_ids"] == 60).int()
    return arguments | {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
                    "mm_token_type_ids": kinds}  # fmt: skip


def image_and_points(side: str) -> dict[str, Any]:
    return {"pixel_values": _numbers(BATCH, 3, 32, 32), "input_points": _numbers(BATCH, 1, 2, 2).abs() * 8}


FAMILIES = (
    # decoders
    Family("gpt2", "GPT2LMHeadModel", GPT, config="GPT2Config", core=True),
    Family("llama", "LlamaModel", GROUPED, core=True),
    Family("mistral", "MistralModel", GROUPED | {"sliding_window": 4}),
    Family("qwen2", "Qwen2Model", GROUPED),
    Family("qwen2 windows", "Qwen2Model", GROUPED | {"use_sliding_window": True, "sliding_window": 4,
           "max_window_layers": 1}),
    Family("qwen3", "Qwen3Model", GROUPED | {"head_dim": 8}),
    Family("gemma", "GemmaModel", GROUPED | {"head_dim": 8}),
    Family("gemma2", "Gemma2Model", GROUPED | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 7,
           "attn_logit_softcapping": 2.0}, core=True, since=(5, 21)),  # before, sdpa left the cap out
    Family("gemma3 text", "Gemma3TextModel", GROUPED | {"head_dim": 8, "sliding_window": 4,
           "layer_types": ["sliding_attention", "full_attention"]}),
    Family("gpt-oss", "GptOssModel", GROUPED | EXPERTS | {"head_dim": 8, "sliding_window": 4}, core=True),
    Family("llama4 text", "Llama4TextModel", GROUPED | EXPERTS | {"head_dim": 8, "attention_chunk_size": 4,
           "intermediate_size_mlp": 40, "num_hidden_layers": 4}),
    Family("phi", "PhiModel", GROUPED | {"partial_rotary_factor": 0.5}),
    Family("phi3", "Phi3Model", GROUPED),
    Family("cohere", "CohereModel", GROUPED),
    Family("cohere2", "Cohere2Model", GROUPED | {"sliding_window": 4}),
    Family("olmo", "OlmoModel", GROUPED),
    Family("olmo2", "Olmo2Model", GROUPED),
    Family("stablelm", "StableLmModel", GROUPED),
    Family("smollm3", "SmolLM3Model", GROUPED | {"no_rope_layers": [1, 0]}),
    Family("granite", "GraniteModel", GROUPED),
    Family("glm4", "Glm4Model", GROUPED | {"head_dim": 8}),
    Family("starcoder2", "Starcoder2Model", GROUPED),
    Family("nemotron", "NemotronModel", GROUPED),
    Family("mixtral", "MixtralModel", GROUPED | EXPERTS),
    Family("qwen2-moe", "Qwen2MoeModel", GROUPED | EXPERTS | {"moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}),
    Family("qwen3-moe", "Qwen3MoeModel", GROUPED | EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8}),
    Family("deepseek v2", "DeepseekV2Model", LATENT),
    Family("deepseek v3", "DeepseekV3Model", LATENT),
    Family("deepseek v3.2", "DeepseekV32Model", LATENT | SPARSE | {"mlp_layer_types": ["dense", "sparse"]},
           core=True, since=(5, 11)),
    Family("glm-moe-dsa", "GlmMoeDsaModel", LATENT | SPARSE | {"mlp_layer_types": ["dense", "sparse"]}),
    Family("hy v4", "HYV4Model", LATENT | SPARSE | {"num_hidden_layers": 3, "head_dim": 8}),
    Family("minimax", "MiniMaxModel", GROUPED | EXPERTS | HYBRID | {"head_dim": 8, "block_size": 4},
           core=True),
    Family("olmo hybrid", "OlmoHybridModel", GROUPED | HYBRID | DELTAS),
    Family("qwen3-next", "Qwen3NextModel", GROUPED | EXPERTS | HYBRID | DELTAS | {"head_dim": 8,
           "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    Family("gpt-neox", "GPTNeoXModel", PLAIN),
    Family("opt", "OPTModel", TOKENS | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
           "num_attention_heads": 4, "ffn_dim": 40, "max_position_embeddings": 40,
           "word_embed_proj_dim": 32}),
    Family("persimmon", "PersimmonModel", PLAIN),
    Family("xglm", "XGLMModel", TOKENS | {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2,
           "attention_heads": 4, "ffn_dim": 40, "max_position_embeddings": 40}, route="eager",
           finest=torch.float32),
    Family("biogpt", "BioGptModel", PLAIN),
    Family("bloom", "BloomModel", TOKENS | {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2,
           "n_head": 4}, core=True, route="eager"),
    Family("falcon", "FalconModel", PLAIN | TOKENS),
    Family("falcon with alibi", "FalconModel", PLAIN | TOKENS | {"alibi": True}, judged=False),
    Family("falcon eager", "FalconModel", PLAIN | TOKENS | {"attn_implementation": "eager"}, route="eager"),
    Family("gptj", "GPTJModel", GPT | {"rotary_dim": 4}, route="eager"),
    Family("codegen", "CodeGenModel", GPT | {"rotary_dim": 4}, route="eager"),
    Family("gpt-neo", "GPTNeoModel", TOKENS | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2,
           "num_heads": 4, "max_position_embeddings": 40, "window_size": 4,
           "attention_types": [[["global", "local"], 1]]}, route="eager"),
    Family("mpt", "MptModel", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4,
           "max_seq_len": 40}, route="eager", sides=("none", "right")),  # left: NaN, by its own doing
    Family("ctrl", "CTRLModel", GPT | {"dff": 40}),
    Family("openai-gpt", "OpenAIGPTModel", GPT, route="eager"),
    Family("xlnet", "XLNetModel", {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4,
           "d_inner": 40}, route="eager"),
    Family("mamba", "MambaModel", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2},
           route="none", sides=("none",)),
    # encoders
    Family("bert", "BertModel", PLAIN, core=True),
    Family("roberta", "RobertaModel", PLAIN),
    Family("xlm-roberta", "XLMRobertaModel", PLAIN),
    Family("camembert", "CamembertModel", PLAIN),
    Family("electra", "ElectraModel", PLAIN | {"embedding_size": 16}),
    Family("albert", "AlbertModel", PLAIN | {"embedding_size": 16, "num_hidden_layers": 3}),
    Family("distilbert", "DistilBertModel", {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4,
           "hidden_dim": 40, "max_position_embeddings": 40}),
    Family("modernbert", "ModernBertModel", PLAIN | TOKENS | {"local_attention": 6, "sep_token_id": 2,
           "cls_token_id": 1, "num_hidden_layers": 4}),
    Family("ernie", "ErnieModel", PLAIN),
    Family("layoutlm", "LayoutLMModel", PLAIN | {"max_2d_position_embeddings": 20}, text_with_boxes),
    Family("eurobert", "EuroBertModel", GROUPED),
    Family("mpnet", "MPNetModel", PLAIN, route="eager"),
    Family("deberta", "DebertaModel", PLAIN | {"relative_attention": True, "pos_att_type": "c2p|p2c"},
           route="eager"),
    Family("deberta v2", "DebertaV2Model", PLAIN | {"relative_attention": True, "pos_att_type": "c2p|p2c"},
           route="eager"),
    Family("roformer", "RoFormerModel", PLAIN | {"embedding_size": 32}, route="eager"),
    Family("longformer", "LongformerModel", PLAIN | {"attention_window": 4}, route="refused"),
    Family("big bird", "BigBirdModel", PLAIN | {"attention_type": "original_full"}, route="eager"),
    Family("big bird sparse", "BigBirdModel", PLAIN | {"attention_type": "block_sparse", "block_size": 2,
           "num_random_blocks": 1}, lambda side: text(side, 20), route="refused"),
    Family("convbert", "ConvBertModel", PLAIN | {"embedding_size": 32}, route="eager"),
    # encoders and decoders
    Family("t5", "T5Model", TOKENS | {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40,
           "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, text_and_answer, core=True,
           since=(5, 15)),  # before, heard with fallback="eager" only
    Family("umt5", "UMT5Model", TOKENS | {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40,
           "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, text_and_answer),
    Family("bart", "BartModel", BART, text_and_answer),
    Family("mbart", "MBartModel", BART, text_and_answer),
    Family("pegasus", "PegasusModel", BART, text_and_answer),
    Family("marian", "MarianModel", BART, text_and_answer),
    Family("m2m100", "M2M100Model", BART, text_and_answer),
    Family("blenderbot", "BlenderbotModel", BART, text_and_answer),
    Family("led", "LEDModel", BART | {"max_encoder_position_embeddings": 40,
           "max_decoder_position_embeddings": 40, "attention_window": 4}, text_and_answer, route="partly"),
    Family("big bird pegasus", "BigBirdPegasusModel", BART | {"attention_type": "original_full"},
           text_and_answer, route="mixed"),  # its encoder's layers bypass the hook, its decoder's do not
    # vision
    Family("vit", "ViTModel", SEEING, image, sides=("none",), core=True),
    Family("deit", "DeiTModel", SEEING, image, sides=("none",)),
    Family("vit-mae", "ViTMAEModel", SEEING, image, sides=("none",)),
    Family("dinov2", "Dinov2Model", SEEING | {"mlp_ratio": 2}, image, sides=("none",)),
    Family("dinov3", "DINOv3ViTModel", SEEING, image, sides=("none",)),
    Family("siglip vision", "SiglipVisionModel", SEEING, image, sides=("none",)),
    Family("beit", "BeitModel", SEEING | {"use_relative_position_bias": True}, image, sides=("none",),
           since=(5, 9)),
    Family("swin", "SwinModel", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1],
           "num_heads": [2, 4], "window_size": 2}, image, sides=("none",)),
    Family("swin v2", "Swinv2Model", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1],
           "num_heads": [2, 4], "window_size": 2}, image, sides=("none",), route="eager"),
    Family("convnext", "ConvNextModel", {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2}, image,
           sides=("none",), route="none"),
    # several at once
    Family("clip", "CLIPModel", {"text_config": PLAIN | TOKENS, "vision_config": SEEING,
           "projection_dim": 16}, image_and_text, sides=("none", "right")),
    Family("siglip", "SiglipModel", {"text_config": PLAIN | TOKENS | {"projection_size": 32},
           "vision_config": SEEING}, image_and_text, sides=("none", "right")),
    Family("blip", "BlipModel", {"text_config": PLAIN | TOKENS, "vision_config": SEEING,
           "projection_dim": 16}, image_and_text, sides=("none", "right"), route="eager"),
    Family("llava", "LlavaModel", {"text_config": GROUPED | {"model_type": "llama"},
           "vision_config": SEEING | {"model_type": "clip_vision_model"}, "image_token_id": 60,
           "vision_feature_layer": -1},
           text_with_image_inside),
    # without token types its two implementations disagree: one lets an image's prefix see ahead
    Family("paligemma", "PaliGemmaModel", {"text_config": GROUPED | {"model_type": "gemma", "head_dim": 8},
           "vision_config": SEEING | {"model_type": "siglip_vision_model", "projection_dim": 32},
           "image_token_id": 60, "projection_dim": 32}, text_with_image_inside, core=True, judged=False),
    Family("blip-2", "Blip2Model", {"text_config": {"model_type": "opt", "vocab_size": VOCABULARY,
           "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40,
           "max_position_embeddings": 40, "word_embed_proj_dim": 32} | TOKENS, "vision_config": SEEING,
           "qformer_config": PLAIN | {"encoder_hidden_size": 32, "cross_attention_frequency": 1},
           "num_query_tokens": 4, "image_token_id": 60}, text_with_queries_inside, sides=("none", "right")),
    Family("qwen2-vl", "Qwen2VLModel", {"text_config": GROUPED | {"rope_parameters": {"rope_type": "default",
           "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}, "vision_config": {"depth": 2, "embed_dim": 32,
           "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2},
           "image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58,
           "vision_end_token_id": 57}, text_with_patches_inside),
    Family("sam", "SamModel", {"vision_config": {"hidden_size": 16, "output_channels": 8,
           "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 4,
           "window_size": 3, "mlp_dim": 16, "global_attn_indexes": [1], "num_pos_feats": 4},
           "prompt_encoder_config": {"hidden_size": 8,
           "image_size": 32, "patch_size": 4, "mask_input_channels": 4},
           "mask_decoder_config": {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
           "mlp_dim": 16, "iou_head_hidden_dim": 8}},
           image_and_points, sides=("none",)),
    Family("perceiver", "PerceiverModel", {"num_latents": 5, "d_latents": 16, "d_model": 32, "num_blocks": 1,
           "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
           lambda side: {"inputs": _numbers(BATCH, LENGTH, 32)}, sides=("none",), route="eager"),
    # sound
    Family("whisper", "WhisperModel", BART | {"num_mel_bins": 8, "max_source_positions": 12,
           "max_target_positions": 20}, speech_and_answer, sides=("none",)),
    Family("wav2vec2", "Wav2Vec2Model", HEARING, sound, sides=("none", "right")),
    Family("hubert", "HubertModel", HEARING, sound, sides=("none", "right")),
    Family("wavlm", "WavLMModel", HEARING, sound, sides=("none", "right"), route="eager"),
    Family("ast", "ASTModel", SEEING | {"num_mel_bins": 8, "max_length": 16, "frequency_stride": 4,
           "time_stride": 4}, lambda side: {"input_values": _numbers(BATCH, 16, 8)}, sides=("none",)),
)  # fmt: skip
