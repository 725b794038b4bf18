"""Greedy tokens one after another, of a model with SmolLM2-135M's sizes and random weights: ours beside
Transformers' `generate`, with the same weights.

Letters: B batch, H num_heads, Hk num_kv_heads, D head_dim, L tokens of the prompt, T new ones, N layers,
I width between, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import headwise as hw

from ..registry import OURS, Case, Prepared, Sizes, Values, register

TRANSFORMERS = "Transformers' generate"


def language_model(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama whose output is its own: tied to random embeddings, it would only repeat its last token."""
    import transformers

    transformers.logging.set_verbosity_error()
    H, Hk, D, N, V = (sizes[letter] for letter in ("H", "Hk", "D", "N", "V"))
    config = transformers.LlamaConfig(
        hidden_size=H * D,
        intermediate_size=sizes["I"],
        num_hidden_layers=N,
        num_attention_heads=H,
        num_key_value_heads=Hk,
        head_dim=D,
        vocab_size=V,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


def generated(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """T tokens after a prompt of L."""
    theirs = language_model(sizes, device, dtype)
    ours = hw.models.load(theirs)
    L, T = sizes["L"], sizes["T"]
    prompt = torch.randint(sizes["V"], (sizes["B"], L)).to(device)

    def by_transformers() -> Tensor:
        said: Tensor = theirs.generate(prompt, max_new_tokens=T, do_sample=False)
        return said[:, L:]

    def part(said: Tensor) -> Values:
        return {"tokens": said.double()}

    def truth() -> Values:
        """Whether each token is the likeliest after those before it: one forward in float64 tells."""
        whole = torch.cat([prompt, by_transformers()], 1)
        logits = copy.deepcopy(theirs).double()(whole, use_cache=False).logits
        return part(logits[:, L - 1 : -1].argmax(-1))

    return Prepared({OURS: lambda: ours.generate(prompt, T), TRANSFORMERS: by_transformers}, truth, part)


SMOLLM2 = {"H": 9, "Hk": 3, "D": 64, "N": 30, "I": 1536, "V": 49152}
TINY = {"H": 4, "Hk": 2, "D": 16, "L": 7, "T": 5, "N": 2, "I": 64, "V": 97}
for B in (1, 8):
    register(
        Case(
            f"generate_smollm2_B{B}",
            f"32 greedy tokens of SmolLM2-135M, batch {B}",
            generated,
            {"B": B, "L": 32, "T": 32, **SMOLLM2},
            tiny=TINY,
            peer=TRANSFORMERS,
            devices=("cpu",),
            target=1 / 1.3,
            most_repeats=12,
            headline=B == 1,
        )
    )
