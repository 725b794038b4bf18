"""Configurations.

idea: five numbers say how large a model's attention is, and all its other sizes follow from them
minutes: 8
level: junior
repairs: hard-coded heads; constant scale
"""

# %% [markdown]
# Every course has a table of famous models: width, heads, width of a head. Such tables are easy to copy and
# hard to check, so here is one that is computed. headwise keeps the published sizes of the attention layers
# of three dozen models as plain data, `headwise.nn.presets`, and can build each of them:
# `hw.MultiHeadAttention.preset("llama3-8b")`.
#
# Five numbers are enough: $d_\text{model}$, the number of heads $H$, of heads with keys and values $H_k$
# (lesson 15), the width of a head $d_k$, and the number of layers. First, the five rows that course pages
# usually show:

# %%
from headwise.nn.presets import PRESETS, find

told = {  # as course pages have it: d_model, heads, d_k
    "BERT-Base": (768, 12, 64),
    "BERT-Large": (1024, 16, 64),
    "GPT-2 Small": (768, 12, 64),
    "GPT-2 Large": (1280, 20, 64),
    "GPT-3": (12288, 96, 128),
}


def width_of_a_head(preset) -> int:
    """As the configuration says, or, where it says nothing, d_model / heads."""
    return preset.head_dim or preset.d_model // preset.num_heads


for title, row in told.items():
    one = find(title)
    assert row == (one.d_model, one.num_heads, width_of_a_head(one)), title
print("five of five rows as published;", len(PRESETS), "models in all")

# %% [markdown]
# Those rows are right. They are also all from 2018 to 2020, and all alike in two ways that newer models are
# not. So the same table, continued, with what follows from the five numbers:
#
# - weights of the four projections, in all layers: $L \cdot d_\text{model} \cdot d_k \, (2H + 2H_k)$, for
#   $W_Q$ and $W_O$ are $H$ heads wide, $W_K$ and $W_V$ only $H_k$,
# - what a model that writes has to keep for each token of a text: $2 \cdot L \cdot H_k \cdot d_k$ numbers, of
#   2 bytes in bfloat16. Encoders write nothing and keep nothing.

# %%
import headwise as hw


def sizes(preset) -> dict[str, int]:
    """What the table shows of a preset, computed."""
    heads, d_k = preset.num_heads, width_of_a_head(preset)
    kv_heads = preset.num_kv_heads or heads
    return {
        "d_model": preset.d_model,
        "heads": heads,
        "kv": kv_heads,
        "d_k": d_k,
        "H x d_k": heads * d_k,
        "weights": preset.layers * preset.d_model * d_k * (2 * heads + 2 * kv_heads),
        "cache": 2 * preset.layers * kv_heads * d_k * 2 if preset.causal else 0,
    }


table = {name: sizes(preset) for name, preset in PRESETS.items()}
shown = (
    "transformer-base bert-base t5-3b gpt2-small gpt3 falcon-7b llama2-7b llama3-8b "
    "llama3-405b qwen3-0.6b gemma-7b gemma2-27b gpt-oss-20b smollm2-135m"
)
columns = ("d_model", "heads", "kv", "d_k", "H x d_k")
print(" " * 17 + "".join(f"{column:>8}" for column in columns) + "  weights in M  cache a token")
for name in shown.split():
    row = table[name]
    kept = f"{row['cache'] / 1024:,.0f} KiB" if row["cache"] else "-"
    numbers = "".join(f"{row[column]:8}" for column in columns)
    print(f"{PRESETS[name].title:17}{numbers}{row['weights'] / 1e6:14,.1f}{kept:>15}")

for name in ("bert-base", "smollm2-135m", "qwen3-0.6b"):  # the formula, and layers that are really built
    layer = hw.MultiHeadAttention.preset(name)
    four = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    assert PRESETS[name].layers * sum(one.weight.numel() for one in four) == table[name]["weights"]

# %% [markdown]
# `headwise presets` in a shell prints all of them, biases and norms included.
#
# ## Is d_model = heads x d_k?
#
# Textbooks write $d_\text{model} = H \cdot d_k$ as if it were a law, and many classes begin with
# `assert d_model % num_heads == 0`. It is a habit. A head projects from $d_\text{model}$ to $d_k$, and $W_O$
# back from $H \cdot d_k$ to $d_\text{model}$; any two numbers will do.

# %%
ratio = {PRESETS[name].title: row["H x d_k"] / row["d_model"] for name, row in table.items()}
others = {title: number for title, number in ratio.items() if number != 1}
print(f"holds for {len(ratio) - len(others)} of {len(ratio)}; not for:", ", ".join(others))

# %% [markdown]
# ## Is 8 heads common?
#
# Eight is the number of the paper's base model, and of the examples that were copied from it. What stays
# nearly the same while models grow is not the number of heads but the width of one:

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
bars = {f"the other {len(ratio) - len(others)}": 1.0, **others}
axes[0].barh(list(bars), list(bars.values()), color=["tab:gray"] + ["tab:purple"] * len(others))
axes[0].axvline(1, color="0.4", linewidth=1, linestyle="--")
axes[0].set(title="heads x d_k, as a multiple of d_model", xlabel="1: as textbooks have it")
for ax, counts, what in ((axes[1], heads, "heads"), (axes[2], widths, "d_k")):
    found = sorted(counts)
    colors = ["tab:orange" if ax is axes[1] and n == 8 else "tab:purple" for n in found]
    ax.bar_label(ax.bar([str(n) for n in found], [counts[n] for n in found], color=colors))
    ax.set(title=f"models by {what}", xlabel=what, yticks=[], ylim=(0, max(counts.values()) * 1.12))
figure.suptitle(f"What textbooks say of configurations, counted in {len(table)} models")

# %% [markdown]
# Eight heads (orange) are found, but they are not the rule. A list of models that people know is no census,
# so the counts say this and no more.
#
# So a configuration is often read best from behind: choose $d_k$, 64 or 128, and the width gives the heads.
# Very narrow heads do cost something. Of 18 small models that we trained, alike but for the number of heads,
# those with heads of 16 and of 8 channels ended clearly worse than those with heads of 32; heads of 64, 128
# and 256 channels could not be told apart from these. (Narrow heads there also had fewer pairs of channels
# for RoPE to turn. "What heads do, measured" in the documentation has all numbers.)
#
# ## Keys and values
#
# The second habit that newer models gave up: as many heads of keys as of queries.

# %%
causal = {name: row for name, row in table.items() if row["cache"]}
grouped = [name for name, row in causal.items() if row["kv"] < row["heads"]]
print(f"{len(grouped)} of {len(causal)} causal models have fewer KV heads than heads")
for one in ("llama2-7b", "falcon-7b"):
    row = table[one]
    fits = 16 * 2**30 // row["cache"]
    print(f"{PRESETS[one].title}: {row['cache'] // 1024} KiB a token; 16 GiB hold {fits:,} tokens")
assert table["llama2-7b"]["cache"] == 64 * table["falcon-7b"]["cache"]

# %% [markdown]
# The exercise: a layer that takes its numbers from a configuration, as all real code does, and believes the
# configuration where it says that heads are wider than the textbook has it.

# %% exercise: ConfiguredAttention
"""An attention layer whose sizes come from a configuration."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class AttentionConfig(NamedTuple):
    """One attention layer in numbers; num_heads * head_dim need not be d_model."""

    d_model: int
    num_heads: int
    head_dim: int
    bias: bool = False
    causal: bool = True


SMALL = AttentionConfig(d_model=24, num_heads=4, head_dim=10)


class ConfiguredAttention(nn.Module):
    """Multi-head attention without a number of its own."""

    def __init__(self, config: AttentionConfig = SMALL) -> None:
        super().__init__()
        self.config = config
        raise NotImplementedError  # q_proj, k_proj, v_proj, out_proj: from which width to which?

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]."""
        B, T, _ = x.shape
        return x.view(B, T, self.config.num_heads, self.config.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d_model] -> [B, T, d_model]; where config.causal, no token sees a later one."""
        raise NotImplementedError  # project, split, attend, join: with which scale?


# %% solution
"""An attention layer whose sizes come from a configuration."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class AttentionConfig(NamedTuple):
    """One attention layer in numbers; num_heads * head_dim need not be d_model."""

    d_model: int
    num_heads: int
    head_dim: int
    bias: bool = False
    causal: bool = True


SMALL = AttentionConfig(d_model=24, num_heads=4, head_dim=10)


class ConfiguredAttention(nn.Module):
    """Multi-head attention without a number of its own."""

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
        """x [B, T, d_model] -> [B, T, d_model]; where config.causal, no token sees a later one."""
        T = x.shape[1]
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = q @ k.transpose(-2, -1) / self.config.head_dim**0.5  # [B, H, T, T]
        if self.config.causal:
            later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)  # [T, T]
            scores = scores.masked_fill(later, float("-inf"))
        heads = scores.softmax(dim=-1) @ v  # [B, H, T, D]
        return self.out_proj(heads.transpose(1, 2).flatten(2))  # [B, T, H * D] -> [B, T, E]


# %% question: A configuration says d_model 3072, 16 heads, head_dim 256. Is that a mistake, and which shapes have W_Q and W_O?
# No mistake: it is Gemma 7B. 16 heads of 256 are 4096 channels, so $W_Q$ takes 3072 to 4096 and $W_O$ 4096
# back to 3072. Only code that computes the width of a head as d_model / heads (192) would be wrong here, and
# its scale with it.

# %% question: Llama 2 7B and Falcon 7B are models of about one size. Which can hold the longer text in 16 GiB of cache, and why?
# Falcon: 2,097,152 tokens beside 32,768, 64 times as many (computed above). It has one head of keys and
# values for 71 heads of queries, of 64 channels; Llama 2 7B has 32, of 128. Sizes of weights say little about
# what a text costs.

# %% [markdown]
# The next lesson puts work and time beside these sizes: what one head costs.
