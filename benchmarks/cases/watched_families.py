"""Models of several families with random weights, watched: beside the same unwatched, and beside the eager
attention of Transformers with `output_attentions=True`, which is how weights are looked at without headwise.

All arms have the same weights. Before anything is timed, the entropies of a short text are held against those
of the eager weights in float64, and what the model says against float64, too.

Letters: B batch, H num_heads, Hk num_kv_heads, D head_dim, L tokens, T new ones, N layers, I width between,
V vocabulary, W window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

from ..registry import OURS, Arm, Case, Pinned, Prepared, Sizes, Values, register
from ..verdicts import check
from .generated_tokens import judged_tokens
from .watched_models import CELLS, CHECKED, LARGE, SMALL, TINY, UNWATCHED, llama_config

EAGER = "eager, output_attentions"
ON_A_CPU = 2**31  # bytes the eager route may take there
SHARE = 0.75  # of a GPU's free memory, likewise
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Family:
    """A family of models: its class, its config by sizes, and True if it is causal."""

    model: str
    config: Callable[..., Any]
    causal: bool = True

    def build(
        self, sizes: Sizes, device: torch.device, dtype: torch.dtype, weights: nn.Module | None = None
    ) -> Any:
        """Return the model with the attention that Transformers chooses; with `weights`, the eager one."""
        import transformers

        transformers.logging.set_verbosity_error()
        chosen = {} if weights is None else {"attn_implementation": "eager"}
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model = getattr(transformers, self.model)(self.config(sizes, **chosen))
        finally:
            torch.set_default_dtype(before)
        if weights is not None:
            model.load_state_dict(weights.state_dict(), assign=True)
        return model.eval().requires_grad_(False)


def _gpt2(sizes: Sizes, **others: Any) -> Any:
    import transformers

    width = sizes["H"] * sizes["D"]
    named: dict[str, Any] = {
        "n_embd": width,
        "n_layer": sizes["N"],
        "n_head": sizes["H"],
        "n_positions": sizes["L"],
    }
    return transformers.GPT2Config(vocab_size=sizes["V"], **named, **NO_TOKENS, **others)


def _bert(sizes: Sizes, **others: Any) -> Any:
    import transformers

    return transformers.BertConfig(
        hidden_size=sizes["H"] * sizes["D"], num_hidden_layers=sizes["N"], num_attention_heads=sizes["H"],
        intermediate_size=sizes["I"], max_position_embeddings=sizes["L"], vocab_size=sizes["V"], **others,
    )  # fmt: skip


def _gemma2(sizes: Sizes, **others: Any) -> Any:
    import transformers

    return transformers.Gemma2Config(
        hidden_size=sizes["E"], num_hidden_layers=sizes["N"], num_attention_heads=sizes["H"],
        num_key_value_heads=sizes["Hk"], head_dim=sizes["D"], query_pre_attn_scalar=sizes["D"],
        intermediate_size=sizes["I"], sliding_window=sizes["W"], vocab_size=sizes["V"],
        **NO_TOKENS, **others,
    )  # fmt: skip


def _llama(sizes: Sizes, **others: Any) -> Any:
    return llama_config(
        sizes, max_position_embeddings=2**18, tie_word_embeddings=False, **NO_TOKENS, **others
    )


FAMILIES = {
    "llama": Family("LlamaModel", _llama),
    "llama_head": Family("LlamaForCausalLM", _llama),
    "gpt2": Family("GPT2Model", _gpt2),
    "bert": Family("BertModel", _bert, causal=False),
    "gemma2": Family("Gemma2Model", _gemma2),
}


def eager_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """Return the peak bytes of the eager route: weights of all layers, and 3 x one layer in float32."""
    keys = sizes["L"] + sizes.get("T", 0)
    return int(sizes["B"] * sizes["H"] * keys**2 * (sizes["N"] * dtype.itemsize + 12))


def eager_fits(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the eager route fits into memory."""
    most = SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ON_A_CPU
    return eager_bytes(sizes, dtype) < most


def watched(
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    family: str,
    cells: int | None = None,
    padded: bool = False,
) -> Prepared:
    """Compare a forward in `hw.watch`: statistics of every head and, with `cells`, pooled maps.

    padded: sequences from a quarter of the length to all of it.
    """
    made = FAMILIES[family]
    model = made.build(sizes, device, dtype)
    eager = made.build(sizes, device, dtype, model)
    B, L = sizes["B"], sizes["L"]
    tokens = torch.randint(sizes["V"], (B, L)).to(device)
    extra_inputs: dict[str, Tensor] = {}
    if padded:
        lengths = torch.linspace(L, L / 4, B).round().long()
        extra_inputs["attention_mask"] = (torch.arange(L) < lengths[:, None]).long().to(device)
    cache = {"use_cache": False} if made.causal else {}
    _entropies_are_right(model, eager, tokens, cache, dtype)

    def run(model: nn.Module, **more: Any) -> Tensor:
        hidden: Tensor = model(input_ids=tokens, **extra_inputs, **cache, **more).last_hidden_state
        return hidden

    def ours() -> Tensor:
        with hw.watch(model, pooled=cells) as heads:
            hidden = run(model)
        assert len(heads) == sizes["N"]
        return hidden

    def part(hidden: Tensor) -> Values:
        # the first tokens of a causal model do not know the others; else the first sequence, which is whole
        return {"first": hidden[:, :CHECKED] if made.causal else hidden[:1]}

    def truth() -> Values:
        some = tokens[:, :CHECKED] if made.causal else tokens[:1]
        exact = copy.deepcopy(model).double()(input_ids=some, **cache).last_hidden_state
        return {"first": exact}

    arms: dict[str, Arm] = {OURS: ours, UNWATCHED: lambda: run(model)}
    if eager_fits(sizes, device, dtype):
        arms[EAGER] = lambda: run(eager, output_attentions=True)
    return Prepared(_inferring(arms), _inferred(truth), part)


def generating(sizes: Sizes, device: torch.device, dtype: torch.dtype, cells: int | None = None) -> Prepared:
    """Compare T greedy tokens after a prompt of L, with every forward watched."""
    made = FAMILIES["llama_head"]
    model = made.build(sizes, device, dtype)
    eager = made.build(sizes, device, dtype, model)
    prompt = torch.randint(sizes["V"], (sizes["B"], sizes["L"])).to(device)
    settings: dict[str, Any] = {"max_new_tokens": sizes["T"], "do_sample": False}
    _entropies_are_right(model, eager, prompt, {"use_cache": False}, dtype)

    def run() -> Tensor:
        ids: Tensor = model.generate(prompt, **settings)
        return ids[:, sizes["L"] :]

    def ours() -> Tensor:
        with hw.watch(model, pooled=cells) as heads:
            ids = run()
        assert len(heads) == sizes["N"]
        return ids

    def looked() -> Tensor:
        generated = eager.generate(prompt, **settings, output_attentions=True, return_dict_in_generate=True)
        ids: Tensor = generated.sequences[:, sizes["L"] :]
        return ids

    judge = copy.deepcopy(model).double()
    truth, part = judged_tokens(judge, prompt, sizes["T"])
    return Prepared(_inferring({OURS: ours, UNWATCHED: run, EAGER: looked}), _inferred(truth), part)


def _inferring(arms: dict[str, Arm]) -> dict[str, Arm]:
    return {name: Pinned(arm, torch.inference_mode) for name, arm in arms.items()}


def _inferred(truth: Callable[[], Values]) -> Callable[[], Values]:
    def inside() -> Values:
        with torch.inference_mode():
            return truth()

    return inside


@torch.inference_mode()
def _entropies_are_right(
    model: nn.Module, eager: nn.Module, tokens: Tensor, cache: dict[str, Any], dtype: torch.dtype
) -> None:
    """Those that `watch` finds in a short text beside those of the eager weights; raises if they differ."""
    some = tokens[:1, :CHECKED]

    def of_eager(model: nn.Module) -> Values:
        weights = model(input_ids=some, output_attentions=True, **cache).attentions
        p = torch.stack([layer_weights.double() for layer_weights in weights])  # [N, 1, H, L, L]
        return {"entropy": -torch.special.xlogy(p, p).sum(-1).mean((1, 3))}

    with hw.watch(model) as heads:
        model(input_ids=some, **cache)
    entropies = torch.stack([heads[layer].entropy for layer in range(len(heads))]).to(some.device)
    truth = of_eager(copy.deepcopy(eager).double())
    results = {OURS: {"entropy": entropies}, EAGER: of_eager(eager)}
    wrong = [comparison for comparison in check(truth, results, OURS, EAGER, dtype) if not comparison.ok]
    if wrong:
        raise ValueError("; ".join(str(comparison) for comparison in wrong))


for tokens, target, most in ((2048, 1.4, None), (131072, 1.7, 6)):
    register(
        Case(
            f"watch_llama_{tokens}",
            f"a forward of a Llama-shaped model watched: all row statistics, {CELLS} x {CELLS} pictures",
            partial(watched, family="llama", cells=CELLS),
            {**SMALL, "L": tokens} if tokens > SMALL["L"] else SMALL,
            tiny=TINY,
            on_cuda={**LARGE, "L": tokens},
            devices=("cuda",) if tokens > 4096 else ("cpu", "cuda"),
            peer=UNWATCHED,
            target=target,
            memory=True,
            most_repeats=most,
            headline=True,
            notes=(
                f"the eager route would hold {tokens**2 * 2 * LARGE['H'] / 2**30:,.2f} GiB of weights a "
                "layer, in bfloat16 on a GPU",
            ),
        )
    )
