"""Configurations.

idea: five numbers determine all sizes of a model's attention, six if it has an encoder and a decoder
minutes: 8
level: junior
repairs: hard-coded heads; constant scale
"""

# %% [markdown]
# Many courses have a table of famous models: width, heads, width of a head. In this lesson the table is
# computed. headwise contains the published sizes of the attention layers of three dozen models as plain data,
# `headwise.nn.presets`, and can build each: `hw.MultiHeadAttention.preset("llama3-8b")`.
#
# Five numbers are enough: $d_\text{model}$, the number of heads $H$, the number of heads with keys and values
# $H_k$ (lesson 15), the width of a head $d_k$, and the number of layers. A model with an encoder and a decoder
# needs a sixth: it has two numbers of layers. First, the five rows that courses usually show:

# %%
from headwise.nn.presets import PRESETS, find

published = {  # d_model, heads, d_k
    "BERT-Base": (768, 12, 64),
    "BERT-Large": (1024, 16, 64),
    "GPT-2 Small": (768, 12, 64),
    "GPT-2 Large": (1280, 20, 64),
    "GPT-3": (12288, 96, 128),
}


def width_of_a_head(preset) -> int:
    """Return head_dim of the configuration, or d_model / heads if it has none."""
    return preset.head_dim or preset.d_model // preset.num_heads


for title, row in published.items():
    preset = find(title)
    assert row == (preset.d_model, preset.num_heads, width_of_a_head(preset)), title
print("all five rows agree;", len(PRESETS), "models in all")

# %% [markdown]
# The five rows of the courses are right. These models are from 2018 to 2020 and have two properties that many
# newer models do not have: the widths of the heads add up to the width of the model, and there are as many
# heads of keys as of queries. So we add newer models, and two columns that follow from the five numbers:
#
# - the weights of the four projections in all $L$ attention layers:
#   $L \cdot d_\text{model} \cdot d_k \, (2H + 2H_k)$, since $W_Q$ and $W_O$ have $H$ heads, $W_K$ and $W_V$ only
#   $H_k$,
# - the KV cache per generated token: $2 \cdot L \cdot H_k \cdot d_k$ numbers, of 2 bytes in bfloat16. Encoders
#   need none.
#
# The model of 2017 and T5 have two stacks. Each layer of the decoder has two attention layers: one attends to the
# text that is written, the other to the output of the encoder (cross-attention, lesson 8). So with six layers
# in each stack $L = 6 + 2 \cdot 6 = 18$ for the weights. For the cache, $L = 6$, the layers of the decoder. The
# keys and values of cross-attention are stored as well, but per token of the source; they need as many numbers
# per token.

# %%
import torch

import headwise as hw


def sizes(preset) -> dict[str, int]:
    """Return the numbers of the table for a preset."""
    heads, d_k = preset.num_heads, width_of_a_head(preset)
    kv_heads = preset.num_kv_heads or heads
    attention_layers = preset.layers + 2 * preset.decoder_layers
    generating = preset.decoder_layers or (preset.layers if preset.causal else 0)  # layers with a cache
    return {
        "d_model": preset.d_model,
        "heads": heads,
        "kv": kv_heads,
        "d_k": d_k,
        "H x d_k": heads * d_k,
        "weights": attention_layers * preset.d_model * d_k * (2 * heads + 2 * kv_heads),
        "cache": 2 * generating * kv_heads * d_k * 2,
    }


table = {name: sizes(preset) for name, preset in PRESETS.items()}
names = (
    "transformer-base bert-base t5-3b gpt2-small gpt3 falcon-7b llama2-7b llama3-8b "
    "llama3-405b qwen3-0.6b gemma-7b gemma2-27b gpt-oss-20b smollm2-135m"
)
columns = ("d_model", "heads", "kv", "d_k", "H x d_k")
print(" " * 17 + "".join(f"{column:>8}" for column in columns) + "  weights in M  cache/token")
for name in names.split():
    row = table[name]
    cache = f"{row['cache'] / 1024:,.0f} KiB" if row["cache"] else "-"
    numbers = "".join(f"{row[column]:8}" for column in columns)
    print(f"{PRESETS[name].title:17}{numbers}{row['weights'] / 1e6:14,.1f}{cache:>13}")

for name in ("bert-base", "smollm2-135m", "qwen3-0.6b"):  # compare the formula with layers
    layer = hw.MultiHeadAttention.preset(name)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    weights = sum(linear.weight.numel() for linear in projections)
    assert PRESETS[name].layers * weights == table[name]["weights"]

with torch.device("meta"):  # shapes only; and with torch's model of two stacks
    transformer = torch.nn.Transformer(512, 8, 6, 6, batch_first=True)
attention = [module for module in transformer.modules() if isinstance(module, torch.nn.MultiheadAttention)]
assert len(attention) == 18
weights = sum(p.numel() for module in attention for p in module.parameters() if p.ndim == 2)  # no biases
assert weights == table["transformer-base"]["weights"] == 18_874_368

# %% [markdown]
# `headwise presets` in a shell prints all of them, with biases and norms.
#
# ## Is d_model = heads x d_k?
# Textbooks write $d_\text{model} = H \cdot d_k$, and many classes begin with
# `assert d_model % num_heads == 0`. This is a convention, not a requirement. A head projects from
# $d_\text{model}$ to $d_k$, and $W_O$ projects from $H \cdot d_k$ to $d_\text{model}$; these two widths need
# not be related.

# %%
ratio = {PRESETS[name].title: row["H x d_k"] / row["d_model"] for name, row in table.items()}
unequal = {title: number for title, number in ratio.items() if number != 1}
print(f"d_model = heads x d_k holds for {len(ratio) - len(unequal)} of {len(ratio)} models, not for:")
print(", ".join(unequal))

# %% [markdown]
# ## Are 8 heads common?
# The base model of 2017 has eight heads, and so have the examples copied from it. In larger models the number
# of heads grows; the width of a head stays nearly the same:

# %%
from collections import Counter

heads = Counter(row["heads"] for row in table.values())
widths = Counter(row["d_k"] for row in table.values())
print("heads:", heads.most_common(4))
print("d_k:  ", widths.most_common(4))
print("8 heads:", ", ".join(PRESETS[name].title for name, row in table.items() if row["heads"] == 8))
assert heads[8] < heads[12] < heads[16] < heads[32]
assert widths[64] + widths[128] > 0.8 * len(table)

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", width_ratios=[1.4, 1.4, 0.6])
bars = {f"the other {len(ratio) - len(unequal)}": 1.0, **unequal}
axes[0].barh(list(bars), list(bars.values()), color=["tab:gray"] + ["tab:purple"] * len(unequal))
axes[0].axvline(1, color="0.4", linewidth=1, linestyle="--")
axes[0].set(title="heads x d_k / d_model", xlabel="ratio; 1 in textbooks")
for ax, counts, quantity in ((axes[1], heads, "heads"), (axes[2], widths, "d_k")):
    numbers = sorted(counts)
    colors = ["tab:orange" if ax is axes[1] and n == 8 else "tab:purple" for n in numbers]
    ax.bar_label(ax.bar([str(n) for n in numbers], [counts[n] for n in numbers], color=colors))
    ax.set(title=f"models by {quantity}", xlabel=quantity, yticks=[], ylim=(0, max(counts.values()) * 1.12))
figure.suptitle(f"Sizes of the attention layers of {len(table)} models")

# %% [markdown]
# Some models have eight heads (orange), but most do not. The list contains well-known models and is not a
# random sample, so the counts hold only for this list.
#
# To read a configuration, start from $d_k$, which is nearly always 64 or 128: the width then determines the
# number of heads. Very narrow heads give a higher loss. We trained 18 small models that differ only in the number of heads. Those
# with heads of 16 and of 8 channels had a clearly higher loss at the end than those with heads of 32; for 64,
# 128 and 256 channels there was no clear difference. (Narrow heads also had fewer pairs of channels for RoPE.
# All numbers are in "What heads do, measured" in the documentation.)
#
# ## Keys and values
# The second property concerns keys: in the older models there are as many KV heads as query heads.

# %%
cached = {name: row for name, row in table.items() if row["cache"]}
grouped = [name for name, row in cached.items() if row["kv"] < row["heads"]]
print(f"{len(grouped)} of {len(cached)} models with a cache have fewer KV heads than heads")
for name in ("llama2-7b", "falcon-7b"):
    row = table[name]
    tokens = 16 * 2**30 // row["cache"]
    print(f"{PRESETS[name].title}: {row['cache'] // 1024} KiB per token; 16 GiB hold {tokens:,} tokens")
assert table["llama2-7b"]["cache"] == 64 * table["falcon-7b"]["cache"]

# %% [markdown]
# The exercise is a layer that takes its sizes from a configuration, as real code does, including heads that
# do not add up to the width of the model.

# %% exercise: ConfiguredAttention
"""An attention layer whose sizes come from a configuration."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class AttentionConfig(NamedTuple):
    """Sizes of an attention layer; num_heads * head_dim need not be d_model."""

    d_model: int
    num_heads: int
    head_dim: int
    bias: bool = False
    causal: bool = True


SMALL = AttentionConfig(d_model=24, num_heads=4, head_dim=10)


class ConfiguredAttention(nn.Module):
    """Multi-head attention with all sizes from a configuration."""

    def __init__(self, config: AttentionConfig = SMALL) -> None:
        super().__init__()
        self.config = config
        raise NotImplementedError  # q_proj, k_proj, v_proj, out_proj: which widths?

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]."""
        B, T, _ = x.shape
        return x.view(B, T, self.config.num_heads, self.config.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d_model] -> [B, T, d_model]; if config.causal, no token attends to a later one."""
        raise NotImplementedError  # project, split, attend, merge: with which scale?


# %% hint: idea
# All sizes come from the configuration. The heads together need not be as wide as the model: three
# projections lead from the width of the model to that of all heads, the last one leads back. The scale
# belongs to the width of a head.

# %% hint: formula
# $$[T, d_\text{model}] \rightarrow [T, H \cdot d_k] \rightarrow [T, d_\text{model}]$$
#
# $$\text{scores} = \frac{QK^\top}{\sqrt{d_k}}$$
#
# $d_k$ is `head_dim`, which is not always $d_\text{model} / H$. If the layer is causal, scores of later
# tokens are $-\infty$.

# %% hint: code
# `__init__`: the width of all heads is `num_heads` times `head_dim`. `q_proj`, `k_proj` and `v_proj` go
# from `d_model` to it, `out_proj` from it to `d_model`; all with the `bias` of the configuration.
#
# `forward`:
#
# 1. The three projections, each through `self.split`: `[B, H, T, D]`.
# 2. `scores`: `[B, H, T, T]`, divided by the root of `head_dim`.
# 3. If the configuration is causal: minus infinity above the diagonal (`triu(1)` of a table of bools
#    `[T, T]`).
# 4. Softmax over the keys, times the values; swap heads and tokens back, join the last two axes:
#    `[B, T, H * D]`.
# 5. Return `out_proj` of that: `[B, T, d_model]`.

# %% solution
"""An attention layer whose sizes come from a configuration."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class AttentionConfig(NamedTuple):
    """Sizes of an attention layer; num_heads * head_dim need not be d_model."""

    d_model: int
    num_heads: int
    head_dim: int
    bias: bool = False
    causal: bool = True


SMALL = AttentionConfig(d_model=24, num_heads=4, head_dim=10)


class ConfiguredAttention(nn.Module):
    """Multi-head attention with all sizes from a configuration."""

    def __init__(self, config: AttentionConfig = SMALL) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim  # of all heads together
        self.q_proj = nn.Linear(config.d_model, width, bias=config.bias)
        self.k_proj = nn.Linear(config.d_model, width, bias=config.bias)
        self.v_proj = nn.Linear(config.d_model, width, bias=config.bias)
        self.out_proj = nn.Linear(width, config.d_model, bias=config.bias)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]."""
        B, T, _ = x.shape
        return x.view(B, T, self.config.num_heads, self.config.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d_model] -> [B, T, d_model]; if config.causal, no token attends to a later one."""
        T = x.shape[1]
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = q @ k.transpose(-2, -1) / self.config.head_dim**0.5  # [B, H, T, T]
        if self.config.causal:
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)  # [T, T]
            scores = scores.masked_fill(future, float("-inf"))
        heads = scores.softmax(dim=-1) @ v  # [B, H, T, D]
        return self.out_proj(heads.transpose(1, 2).flatten(2))  # [B, T, H * D] -> [B, T, E]


# %% try
output = ConfiguredAttention(SMALL)(torch.randn(2, 5, 24))  # 2 sequences of 5 tokens
print("output:", tuple(output.shape), "expected: (2, 5, 24)")

# %% question: A configuration has d_model 3072, 16 heads, head_dim 256. Is that a mistake, and what are the shapes of W_Q and W_O?
# It is not a mistake: it is Gemma 7B. 16 heads of 256 are 4096 channels, so $W_Q$ projects from 3072 to 4096
# and $W_O$ from 4096 to 3072. Code that computes the width of a head as d_model / heads (192) would be wrong,
# and so would its scale.

# %% question: Llama 2 7B and Falcon 7B have about the same size. Which can hold the longer text in 16 GiB of cache, and why?
# Falcon: 2,097,152 tokens instead of 32,768, 64 times as many (computed above). It has one head of keys and
# values, of 64 channels, for 71 query heads; Llama 2 7B has 32, of 128 channels. The number of weights says
# little about the memory that a text needs.
