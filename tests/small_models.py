"""Very small models with random weights, in float64 and evaluation mode; sizes are primes where they can."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.nn import MultiHeadAttention

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY, BATCH, LENGTH = 47, 3, 7
SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 23,
}


def hugging_face() -> Any:
    """transformers, with nothing to say."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _finished(model: Any) -> Any:
    """Weights wide enough for heads to differ."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            wide = parameter.ndim > 1
            parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5 if wide else parameter + 0.2 * noise)
    return model.double().eval()


def gpt2(**settings: Any) -> Any:
    """2 layers of 3 heads of 11."""
    hf = hugging_face()
    sizes = {"n_embd": 33, "n_head": 3, "n_layer": 2, "vocab_size": VOCABULARY, "n_positions": 23}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return _finished(hf.GPT2LMHeadModel(hf.GPT2Config(**(sizes | ends | settings))))


def bert(**settings: Any) -> Any:
    """2 layers of 5 heads of 7, and a class for every sequence."""
    hf = hugging_face()
    sizes = SIZES | {"hidden_size": 35, "num_attention_heads": 5, "num_labels": 3}
    return _finished(hf.BertForSequenceClassification(hf.BertConfig(**(sizes | settings))))


def llama(**settings: Any) -> Any:
    """2 layers of 6 heads of 8, over 3 key/value heads."""
    hf = hugging_face()
    sizes = SIZES | {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return _finished(hf.LlamaForCausalLM(hf.LlamaConfig(**(sizes | ends | settings))))


def albert() -> Any:
    """1 layer of 5 heads of 7, run 3 times."""
    hf = hugging_face()
    sizes = SIZES | {
        "hidden_size": 35,
        "num_attention_heads": 5,
        "embedding_size": 11,
        "num_hidden_layers": 3,
    }
    return _finished(hf.AlbertModel(hf.AlbertConfig(**sizes)))


def torch_encoder() -> nn.TransformerEncoder:
    """2 of torch's own layers of 4 heads of 5."""
    layer = nn.TransformerEncoderLayer(20, 4, dim_feedforward=13, dropout=0.0, batch_first=True)
    return _finished(nn.TransformerEncoder(layer, 2))


class Stack(nn.Module):
    """Layers of ours, one after another."""

    def __init__(self, *layers: MultiHeadAttention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=mask)[0]
        return x


def ours(**options: Any) -> Stack:
    """2 layers of 4 heads of 5, values of 7, in 13 channels, over 2 key/value heads."""
    options = {"num_kv_heads": 2, "head_dim": 5, "value_dim": 7} | options
    return _finished(Stack(*(MultiHeadAttention(13, 4, **options) for _ in range(2))))


def hooks_on(model: nn.Module) -> int:
    """How many hooks and other forwards there are in a model."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = sum(len(getattr(module, table)) for module in model.modules() for table in tables)
    return hooks + sum("forward" in module.__dict__ for module in model.modules())
