"""Greedy tokens one after another, of models with random weights: ours beside Transformers' `generate`, with
the same weights; and a step's attention alone, beside torch's own.

Letters: B batch, H num_heads, Hk num_kv_heads, D head_dim, L tokens of the prompt, T new ones, S keys, N
layers, I width between, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw

from ..registry import OURS, Arm, Case, Pinned, Prepared, Sizes, Values, register
from .attention import PINS, SDPA
from .watched_models import llama_config

TRANSFORMERS = "Transformers' generate"


def language_model(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama with untied output weights: tied to random embeddings, it repeats its last token."""
    import transformers

    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = llama_config(sizes, max_position_embeddings=8192, tie_word_embeddings=False, **no_tokens)
    return transformers.LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


def generated(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, options: dict[str, Any], compile: bool = False
) -> Prepared:
    """T tokens after a prompt of L; judged by how much less likely than the likeliest each is, in float64.

    options: of Transformers' `generate`.
    """
    theirs = language_model(sizes, device, dtype)
    ours, judge = hw.models.load(theirs), copy.deepcopy(theirs).double()
    L, T = sizes["L"], sizes["T"]
    prompt = torch.randint(sizes["V"], (sizes["B"], L)).to(device)

    def by_transformers() -> Tensor:
        ids: Tensor = theirs.generate(prompt, max_new_tokens=T, do_sample=False, **options)
        return ids[:, L:]

    truth, part = judged_tokens(judge, prompt, T)
    compile = compile and device.type == "cuda"  # a small case on a CPU is only looked at
    arms = {OURS: lambda: ours.generate(prompt, T, compile=compile), TRANSFORMERS: by_transformers}
    return Prepared(arms, truth, part)


def judged_tokens(
    judge: Any, prompt: Tensor, T: int
) -> tuple[Callable[[], Values], Callable[[Tensor], Values]]:
    """(truth, part) of T tokens after a prompt: how much less likely than the likeliest each is."""
    L = prompt.shape[1]
    largest = judge(prompt, use_cache=False).logits.abs().max()

    def part(result: Tensor) -> Values:
        logits = judge(torch.cat([prompt, result], 1), use_cache=False).logits[:, L - 1 : -1]  # [B, T, V]
        short = (
            logits.amax(-1) - logits.gather(-1, result[..., None])[..., 0]
        )  # of the likeliest; 0 where it is
        return {"logit": largest - short}

    return lambda: {"logit": largest.expand(prompt.shape[0], T)}, part


SMOLLM2 = {"H": 9, "Hk": 3, "D": 64, "N": 30, "I": 1536, "V": 49152}
LLAMA = {"H": 16, "Hk": 4, "D": 64, "N": 16, "I": 2816, "V": 32000}
TINY = {"H": 4, "Hk": 2, "D": 16, "L": 7, "T": 5, "N": 2, "I": 64, "V": 97}
for B in (1, 8):
    register(
        Case(
            f"generate_smollm2_B{B}",
            f"32 greedy tokens of SmolLM2-135M, batch {B}",
            partial(generated, options={}),
            {"B": B, "L": 32, "T": 32, **SMOLLM2},
            tiny=TINY,
            peer=TRANSFORMERS,
            devices=("cpu",),
            target=1 / 1.3,
            most_repeats=12,
            headline=B == 1,
        )
    )
STATIC = {"cache_implementation": "static"}
for name, variant, options, target in (
    ("eager", "a static cache", {**STATIC, "disable_compile": True}, 1 / 1.2),
    ("compiled", "a static cache, compiled", STATIC, 1.0),
):
    register(
        Case(
            f"cuda_generate_{name}",
            f"64 greedy tokens of a small Llama, {variant}",
            partial(generated, options=options, compile=name == "compiled"),
            {"B": 1, "L": 64, "T": 64, **LLAMA},
            tiny=TINY,
            peer=TRANSFORMERS,
            devices=("cuda",),
            target=target,
            most_repeats=12,
            headline=name == "eager",
        )
    )


# One step of attention


def step(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare one query per sequence over a full cache of fixed size."""
    B, H, Hk, S, D = (sizes[letter] for letter in ("B", "H", "Hk", "S", "D"))
    cache = hw.nn.KVCache(S).reserve(B, Hk, D, D, device, dtype)
    q = torch.randn(B, H, 1, D, device=device, dtype=dtype)
    keys, values, _ = cache.extend(*torch.randn(2, B, Hk, S, D, device=device, dtype=dtype))
    theirs: Callable[[], Tensor] = lambda: sdpa(q, keys, values, enable_gqa=True)  # noqa: E731
    arms: dict[str, Arm] = {OURS: lambda: hw.attention(q, keys, values, causal=True)[0], SDPA: theirs}
    if device.type == "cuda":
        arms |= {
            name: Pinned(theirs, partial(sdpa_kernel, PINS[name])) for name in ("SDPA cudnn", "SDPA flash")
        }

    def truth() -> Values:
        rows = q.double().reshape(B, Hk, -1, D)
        weights = (rows @ keys.double().transpose(2, 3) * D**-0.5).softmax(-1)
        return {"output": (weights @ values.double()).reshape(B, H, 1, D)}

    return Prepared(arms, truth, lambda output: {"output": output})


for B, S in ((1, 4096), (64, 4096), (1, 131072)):
    register(
        Case(
            f"cuda_decode_B{B}_S{S}",
            f"one query over {S} keys, 32 heads over 8, batch {B}",
            step,
            {"B": B, "H": 32, "Hk": 8, "S": S, "D": 128},
            tiny={"B": 2, "H": 4, "Hk": 2, "S": 37, "D": 16},
            peer=SDPA,
            devices=("cuda",),
            target=1.1,
            headline=B == 64,
        )
    )
register(
    Case(
        "decode_S4096",
        "one query over 4096 keys, 32 heads over 8",
        step,
        {"B": 1, "H": 32, "Hk": 8, "S": 4096, "D": 128},
        tiny={"B": 2, "H": 4, "Hk": 2, "S": 37, "D": 16},
        peer=SDPA,
        devices=("cpu",),
        target=1.05,
    )
)
