"""A Llama-shaped model with random weights: pruned to half its heads, beside whole.

Letters: B batch, H num_heads, Hk num_kv_heads, D head_dim, L tokens, N layers, I width between, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

from ..registry import OURS, Case, Pinned, Prepared, Sizes, Values, register

UNWATCHED, SWITCHED_OFF = "unwatched", "heads at zero"
CHECKED = 64  # tokens: in a causal model the first ones do not know how long the text is
CELLS = 128


def llama_config(sizes: Sizes, **others: Any) -> Any:
    """Return a Llama config of these sizes; `others` are further fields."""
    import transformers

    transformers.logging.set_verbosity_error()
    H, Hk, D, N, V = (sizes[letter] for letter in ("H", "Hk", "D", "N", "V"))
    return transformers.LlamaConfig(
        hidden_size=H * D,
        intermediate_size=sizes["I"],
        num_hidden_layers=N,
        num_attention_heads=H,
        num_key_value_heads=Hk,
        head_dim=D,
        vocab_size=V,
        **others,
    )


def llama(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model with the attention that Transformers chooses."""
    import transformers

    config = llama_config(sizes, max_position_embeddings=2**18)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return transformers.LlamaModel(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def _run(model: nn.Module, tokens: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden


def _exact(model: nn.Module, tokens: Tensor) -> Tensor:
    return _run(copy.deepcopy(model).double(), tokens[:, :CHECKED])


def pruned(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the model without every other group of heads with one where their part of o_proj is 0."""
    whole = llama(sizes, device, dtype)
    tokens = torch.randint(sizes["V"], (sizes["B"], sizes["L"])).to(device)
    group, D = sizes["H"] // sizes["Hk"], sizes["D"]
    gone = [head for head in range(sizes["H"]) if head // group % 2]
    smaller = copy.deepcopy(whole)
    report = hw.prune(smaller, [(layer, head) for layer in range(sizes["N"]) for head in gone])
    assert report.parameters[1] < report.parameters[0]
    for layer in whole.layers:
        for head in gone:
            layer.self_attn.o_proj.weight[:, head * D : (head + 1) * D] = 0

    def part(hidden: Tensor) -> Values:
        return {"first tokens": hidden[:, :CHECKED]}

    arms = {OURS: lambda: _run(smaller, tokens), SWITCHED_OFF: lambda: _run(whole, tokens)}
    pinned = {name: Pinned(arm, torch.inference_mode) for name, arm in arms.items()}
    return Prepared(pinned, lambda: part(_exact(whole, tokens)), part)


TINY = {"B": 1, "H": 4, "Hk": 2, "D": 16, "L": 83, "N": 2, "I": 64, "V": 97}
LARGE = {"H": 32, "Hk": 8, "D": 128, "N": 4, "I": 14336, "V": 32000}
SMALL = {"B": 1, "H": 8, "Hk": 4, "D": 64, "L": 512, "N": 4, "I": 1536, "V": 1000}

register(
    Case(
        "prune_half_the_heads",
        "a Llama-shaped model without every other group of heads, beside the same heads at zero",
        pruned,
        SMALL,
        tiny=TINY,
        on_cuda={**LARGE, "L": 4096},
        peer=SWITCHED_OFF,
        target=1.0,
    )
)
