"""Cross-attention.

idea: queries come from one text, keys and values from another, and nothing else changes
minutes: 7
level: junior
repairs: self-attention only; value from key; keys and values swapped; queries and keys swapped
"""

# %% [markdown]
# A translator writes an English sentence and looks, for each word, at the French one. The word that is being
# written asks: it makes the **query**. The words of the other text answer: they make the **keys and values**. That
# is cross-attention. The formula is the one of lesson 3; only its inputs come from two places:
#
# | | queries from | keys and values from | scores |
# |---|---|---|---|
# | self-attention | x, `[B, T, E]` | x | `[B, H, T, T]` |
# | cross-attention | x, `[B, T, E]` | memory, `[B, S, E]` | `[B, H, T, S]` |
#
# The other text is called *memory*. It is read as a whole, by an encoder, before the first word is written.
#
# Here with vectors made by hand, one channel for each meaning, so that the map is easy to read:

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
v = torch.eye(4)  # [S=4, Dv=4]: what each French word has to say, told apart
out, weights = hw.attention(q[None, None], k[None, None].float(), v[None, None])  # [B=1, H=1, ..]
print("output", list(out.shape), " weights", list(weights.shape))
weights.plot(query_tokens=english, key_tokens=french)

# %% [markdown]
# Five rows, four columns: the map is not square. "black" looks at *noir* and "cat" at *chat*, although their order
# is the other way round. Two words look at *dort*. No rule says which position belongs to which: the vectors
# decide.
#
# ## Shapes
# Everything with T comes from x, everything with S from the memory. T of the queries survives; S is summed over.
# Hence the output is as long as x, whatever the length of the memory, and the order of the memory plays no part:
# attention looks things up, it does not read along. (Who wants order puts it into the vectors, as positions.)

# %%
mha = hw.MultiHeadAttention(d_model=16, num_heads=4).double()
x = torch.randn(2, 5, 16, dtype=torch.float64)  # [B, T, E]
memory = torch.randn(2, 7, 16, dtype=torch.float64)  # [B, S, E]
out, weights = mha(x, memory, memory)
print("output", list(out.shape), " weights", list(weights.shape))
shuffled = memory[:, torch.randperm(7)]
assert torch.allclose(out, mha(x, shuffled, shuffled)[0])

# %% [markdown]
# ## In a decoder: first itself, then the other text
# A decoder layer has two attentions. In the first, what was written so far looks at itself, and the causal mask of
# lesson 7 hides what is not written yet. In the second, it looks at the memory, and nothing is hidden but padding:
# the French sentence has been there from the start. So a model has two masks, of two shapes, for two texts.

# %%
import matplotlib.pyplot as plt

own, cross = (hw.MultiHeadAttention(d_model=16, num_heads=4).double() for _ in range(2))
real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])[:, None, None, :]  # [B, 1, 1, S]: of the memory

said, own_weights = own(x, mask=hw.Mask.causal())  # [B, H, T, T]
x1 = x + said  # lesson 9 tells why the input is added
said, cross_weights = cross(x1, memory, memory, mask=real)  # [B, H, T, S]
x2 = x1 + said

figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", width_ratios=[5, 7])
told = ["1. masked self-attention, 5 x 5", "2. cross-attention, 5 x 7"]
for ax, title, shown in zip(axes, told, [own_weights[1, 0], cross_weights[1, 0]], strict=True):
    ax.imshow(shown.detach().masked_fill(shown == 0, torch.nan), cmap="Purples", vmin=0, vmax=1)
    ax.set_facecolor("0.9")
    for i, j in shown.nonzero().tolist():
        dark = shown[i, j] > 0.6
        ax.text(
            j,
            i,
            f"{shown[i, j]:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
        )
    ax.set_title(title, fontsize=11)
    ax.set_xticks(range(shown.shape[1]))
    ax.set_yticks(range(5))
axes[0].set_xlabel("key: a word already written")
axes[1].set_xlabel("key: a word of the memory")
axes[0].set_ylabel("query: a word being written")
figure.suptitle(
    "Head 0 of the second sentence; grey: hidden (the future, the padding of the memory)", fontsize=11
)

# %% [markdown]
# The memory does not change while the translation grows. Its keys and values can be made once and used for every
# word:

# %%
kept = cross.remember(memory)  # keys and values of the memory, projected once
with torch.no_grad():
    one_by_one = [cross(x[:, t : t + 1], cache=kept)[0] for t in range(5)]  # five words, each [B, 1, E]
    assert torch.allclose(torch.cat(one_by_one, dim=1), cross(x, memory, memory)[0])

# %% [markdown]
# ## Why exchanged inputs stay unseen
# Some course code has `forward(self, values, keys, query)`, other code `forward(self, query, key, value)`. Call one
# as if it were the other, and nothing may happen at all. Here a module is called with two of its inputs exchanged,
# in four situations, and compared with the right call:

# %%
m5 = memory[:, :5]  # a memory of the same length as x
inputs = {
    "self: (x, x, x)": (x, x, x),
    "cross: (x, m, m), T = S": (x, m5, m5),
    "cross: (x, m, m), T != S": (x, memory, memory),
    "three different, T = S": (x, m5, memory[:, 2:]),
}
found = {}
print(f"{'largest difference':26} {'k and v':>10} {'q and k':>10} {'q and v':>10}")
for name, (a, b, c) in inputs.items():
    right = mha(a, b, c)[0]
    for pair, exchanged in {"kv": (a, c, b), "qk": (b, a, c), "qv": (c, b, a)}.items():
        try:
            found[name, pair] = f"{(mha(*exchanged)[0] - right).abs().max():.2f}"
        except hw.errors.ShapeError:
            found[name, pair] = "raises"
    print(f"{name:26}", *(f"{found[name, pair]:>10}" for pair in ("kv", "qk", "qv")))
assert all(found["self: (x, x, x)", pair] == "0.00" for pair in ("kv", "qk", "qv"))
assert found["cross: (x, m, m), T != S", "kv"] == "0.00"
assert all(float(found["three different, T = S", pair]) > 0.1 for pair in ("kv", "qk", "qv"))

# %% [markdown]
# - In self-attention all three inputs are the same tensor. Exchange what you like: a test on `mha(x, x, x)` sees
#   nothing.
# - In cross-attention keys and values are still one tensor: their exchange stays unseen. One with the queries is
#   seen, and where T and S differ at once, as an error.
# - Only three different inputs show everything. Some models have them: keys with positions added, values without.
#
# So test attention with three different tensors, and let no two sizes be equal. The examiner of headwise does both.
# Course pages often end with `mha(x, x, x)` and a look at the shape, which all these mistakes pass.

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
        """[B, L, E] -> [B, H, L, D], of any text."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        """x [B, T, E], memory [B, S, E], memory_mask bool [B, S] with True = a real word -> [B, T, E]."""
        raise NotImplementedError  # project, score, hide padding of the memory, mix, merge, project


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
        """[B, L, E] -> [B, H, L, D], of any text."""
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


# %%
asked, memory12 = torch.randn(2, 7, 64), torch.randn(2, 12, 64)
eight = hw.MultiHeadAttention(d_model=64, num_heads=8)
print("self ", list(eight(asked, mask=hw.Mask.causal())[1].shape))
print("cross", list(eight(asked, memory12, memory12)[1].shape))

# %% question: Two sentences of 12 words are being translated, 7 words are written, there are 8 heads. Which shapes have the weights of both attentions of a decoder layer?
# Masked self-attention: [2, 8, 7, 7]. Cross-attention: [2, 8, 7, 12]. The queries are the 7 written words both
# times.

# %% question: Why has cross-attention no causal mask, and why has GPT no cross-attention?
# A causal mask hides what is not known yet. The memory is known as a whole before the first word is written, and
# its position 5 is not "later" than word 3 of the other text: positions of two texts cannot be compared. GPT has
# one text only: what it should go by is simply written in front, and self-attention looks back at it.

# %% [markdown]
# **Next:** attention is one half of a Transformer block; lesson 9 adds the other half, and what holds both
# together.
