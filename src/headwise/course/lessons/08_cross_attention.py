"""Cross-attention.

idea: queries come from one text, keys and values from another; nothing else changes
minutes: 7
level: junior
repairs: self-attention only; value from key; keys and values swapped; queries and keys swapped
"""

# %% [markdown]
# A model that translates French into English writes one English word after the other. For each, it attends to
# the French sentence. The **query** comes from the English text, the **keys and values** from the French
# text. That is cross-attention. The formula is that of lesson 3; only the inputs differ:
#
# | | queries from | keys and values from | scores |
# |---|---|---|---|
# | self-attention | x, `[B, T, E]` | x | `[B, H, T, T]` |
# | cross-attention | x, `[B, T, E]` | memory, `[B, S, E]` | `[B, H, T, S]` |
#
# The other text is called the *memory*. An encoder reads all of it before the first word is written.
#
# In this example the vectors are made by hand, with one channel for each meaning, so that the plot is easy to
# read:

# %%
import torch

import headwise as hw

torch.manual_seed(0)
french, english = ["le", "chat", "noir", "dort"], ["the", "black", "cat", "is", "sleeping"]
meanings = {  # article, cat, black, sleep
    "le": [1, 0, 0, 0], "chat": [0, 1, 0, 0], "noir": [0, 0, 1, 0], "dort": [0, 0, 0, 1],
    "the": [1, 0, 0, 0], "black": [0, 0, 1, 0], "cat": [0, 1, 0, 0], "is": [0, 0, 0, 0.6], "sleeping": [0, 0, 0, 1],
}  # fmt: skip
q = 6 * torch.tensor([meanings[word] for word in english])  # [T=5, D=4]
k = torch.tensor([meanings[word] for word in french])  # [S=4, D=4]
v = torch.eye(4)  # [S=4, Dv=4]: one value per French word, all different
out, weights = hw.attention(q[None, None], k[None, None].float(), v[None, None])  # [B=1, H=1, ..]
print("output", list(out.shape), " weights", list(weights.shape))
weights.plot(query_tokens=english, key_tokens=french)

# %% [markdown]
# The map has five rows and four columns. "black" attends to *noir* and "cat" to *chat*, although their order
# differs. Two words attend to *dort*. The weights depend on the vectors only, not on the positions of the
# words.
#
# ## Shapes
# T is the length of x, S the length of the memory. The sum over keys removes S, so the output is as long as x
# for any length of the memory. The order of the memory does not matter either: the output of attention does
# not depend on the order of the keys. If the order should matter, the model adds positions to the vectors.

# %%
mha = hw.MultiHeadAttention(d_model=16, num_heads=4).double()
x = torch.randn(2, 5, 16, dtype=torch.float64)  # [B, T, E]
memory = torch.randn(2, 7, 16, dtype=torch.float64)  # [B, S, E]
out, weights = mha(x, memory, memory)
print("output", list(out.shape), " weights", list(weights.shape))
shuffled = memory[:, torch.randperm(7)]
assert torch.allclose(out, mha(x, shuffled, shuffled)[0])

# %% [markdown]
# ## Two attentions in a decoder layer
# A decoder layer has two attentions. In the first, the text written so far attends to itself; the causal mask
# of lesson 7 hides what is not written yet. In the second, this text attends to the memory; only padding is
# hidden, since the whole French sentence is known from the start. So a decoder layer needs two masks of
# different shapes.

# %%
import matplotlib.pyplot as plt

self_attention, cross_attention = (hw.MultiHeadAttention(d_model=16, num_heads=4).double() for _ in range(2))
real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])[:, None, None, :]  # [B, 1, 1, S]: of the memory

out, self_weights = self_attention(x, mask=hw.Mask.causal())  # [B, H, T, T]
x1 = x + out  # lesson 9 explains why the input is added
out, cross_weights = cross_attention(x1, memory, memory, mask=real)  # [B, H, T, S]
x2 = x1 + out

figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", width_ratios=[5, 7])
titles = ["1. masked self-attention, 5 x 5", "2. cross-attention, 5 x 7"]
for ax, title, table in zip(axes, titles, [self_weights[1, 0], cross_weights[1, 0]], strict=True):
    ax.imshow(table.detach().masked_fill(table == 0, torch.nan), cmap="Purples", vmin=0, vmax=1)
    ax.set_facecolor("0.9")
    for i, j in table.nonzero().tolist():
        colour = "white" if table[i, j] > 0.6 else "black"
        ax.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", fontsize=8, color=colour)
    ax.set_title(title, fontsize=11)
    ax.set_xticks(range(table.shape[1]))
    ax.set_yticks(range(5))
axes[0].set_xlabel("key: a word already written")
axes[1].set_xlabel("key: a word of the memory")
axes[0].set_ylabel("query: a word being written")
figure.suptitle(
    "Head 0 of the second sentence; grey: hidden (the future, the padding of the memory)", fontsize=11
)

# %% [markdown]
# The memory does not change while the translation grows. Its keys and values can be computed once and used
# for every word:

# %%
cache = cross_attention.remember(memory)  # keys and values of the memory, projected once
with torch.no_grad():
    steps = [cross_attention(x[:, t : t + 1], cache=cache)[0] for t in range(5)]  # five words, [B, 1, E] each
    assert torch.allclose(torch.cat(steps, dim=1), cross_attention(x, memory, memory)[0])

# %% [markdown]
# ## Why exchanged inputs go unnoticed
# Some course code has `forward(self, values, keys, query)`, other code `forward(self, query, key, value)`. If
# the first is called with the arguments in the order of the second, the output may still be right. The next
# cell exchanges two inputs of a module in four situations and compares the output with that of the right
# call:

# %%
short = memory[:, :5]  # a memory of the same length as x
inputs = {
    "self: (x, x, x)": (x, x, x),
    "cross: (x, m, m), T = S": (x, short, short),
    "cross: (x, m, m), T != S": (x, memory, memory),
    "three different, T = S": (x, short, memory[:, 2:]),
}
differences = {}
print(f"{'largest difference':26} {'k and v':>10} {'q and k':>10} {'q and v':>10}")
for name, (a, b, c) in inputs.items():
    right = mha(a, b, c)[0]
    for pair, exchanged in {"kv": (a, c, b), "qk": (b, a, c), "qv": (c, b, a)}.items():
        try:
            differences[name, pair] = f"{(mha(*exchanged)[0] - right).abs().max():.2f}"
        except hw.errors.ShapeError:
            differences[name, pair] = "raises"
    print(f"{name:26}", *(f"{differences[name, pair]:>10}" for pair in ("kv", "qk", "qv")))
assert all(differences["self: (x, x, x)", pair] == "0.00" for pair in ("kv", "qk", "qv"))
assert differences["cross: (x, m, m), T != S", "kv"] == "0.00"
assert all(float(differences["three different, T = S", pair]) > 0.1 for pair in ("kv", "qk", "qv"))

# %% [markdown]
# - In self-attention all three inputs are the same tensor. A test with `mha(x, x, x)` notices no exchange.
# - In cross-attention keys and values are the same tensor, so exchanging these two goes unnoticed. Exchanging
#   queries and keys changes the output, and raises an error if T and S differ.
# - Every exchange changes the output only if all three inputs are different. Some models have such inputs:
#   positions are added to the keys but not to the values.
#
# So test attention with three different tensors and with sizes that are all different, as `headwise check`
# does. Course pages often end with a test that calls `mha(x, x, x)` and checks the shape of the output. Code
# with any of these mistakes passes it.

# %% exercise: CrossAttention
"""Cross-attention: queries from x, keys and values from the memory."""

import torch
from torch import Tensor, nn


class CrossAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v, self.w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        """[B, L, E] -> [B, H, L, D]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        """x [B, T, E], memory [B, S, E], memory_mask bool [B, S] with True = a real word -> [B, T, E]."""
        raise NotImplementedError  # project, score, hide padding of the memory, attend, merge, project


# %% hint: idea
# Queries come from `x`; keys and values both come from the memory. The rest is lesson 5. The mask is about
# words of the memory, that is, about keys: it is the same for all heads and queries.

# %% hint: formula
# $$Q = x W_Q, \qquad K = m W_K, \qquad V = m W_V$$
#
# $$\text{out} = \text{softmax}\left(\frac{QK^\top}{\sqrt{D}}\right) V W_O$$
#
# $m$ is the memory. With $T$ words in $x$ and $S$ in $m$, the scores are $[T, S]$ for each head. The score
# of a padded word of the memory is $-\infty$.

# %% hint: code
# 1. `q` from `x`: `[B, H, T, D]`. `k` and `v` from `memory`: `[B, H, S, D]`. `self.split` splits.
# 2. `scores`, divided by the root of the width of a head: `[B, H, T, S]`.
# 3. If there is a `memory_mask` `[B, S]`: give it two axes in the middle, `[B, 1, 1, S]`, and fill with
#    minus infinity where it is False.
# 4. Softmax over the keys, times the values: `[B, H, T, D]`.
# 5. Swap the axes of heads and words, join the last two axes, and project: `[B, T, E]`.

# %% solution
"""Cross-attention: queries from x, keys and values from the memory."""

import torch
from torch import Tensor, nn


class CrossAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v, self.w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        """[B, L, E] -> [B, H, L, D]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        """x [B, T, E], memory [B, S, E], memory_mask bool [B, S] with True = a real word -> [B, T, E]."""
        q = self.split(self.w_q(x))  # [B, H, T, D]
        k = self.split(self.w_k(memory))  # [B, H, S, D]
        v = self.split(self.w_v(memory))  # [B, H, S, D]
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, T, S]
        if memory_mask is not None:
            scores = scores.masked_fill(~memory_mask[:, None, None, :], float("-inf"))
        heads = scores.softmax(dim=-1) @ v  # [B, H, T, D]
        return self.w_o(heads.transpose(1, 2).flatten(2))  # [B, T, E]


# %% try
x, memory = torch.randn(2, 5, 24), torch.randn(2, 7, 24)  # 2 sequences, T = 5, S = 7
real = torch.ones(2, 7, dtype=torch.bool)
real[0, 4:] = False  # the first memory has 4 real words
output = CrossAttention(d_model=24, num_heads=3)(x, memory, real)
print("output:", tuple(output.shape), "expected: (2, 5, 24)")

# %%
x, memory = torch.randn(2, 7, 64), torch.randn(2, 12, 64)
mha = hw.MultiHeadAttention(d_model=64, num_heads=8)
print("self ", list(mha(x, mask=hw.Mask.causal())[1].shape))
print("cross", list(mha(x, memory, memory)[1].shape))

# %% question: A decoder translates two sentences of 12 words; 7 words are written; there are 8 heads. What are the shapes of the weights of both attentions of a decoder layer?
# Masked self-attention: $[2, 8, 7, 7]$. Cross-attention: $[2, 8, 7, 12]$. The queries are the 7 written words
# in both.

# %% question: Why does cross-attention have no causal mask, and why does GPT have no cross-attention?
# A causal mask hides what is not known yet. The whole memory is known before the first word is written, and
# positions of two texts cannot be compared: position 5 of the memory is not "later" than word 3 of the
# translation. GPT has only one text: the prompt is the start of the text, and self-attention attends back to
# it.
