"""Multi-head attention.

idea: project, split, attend, merge, project: five steps that give the same numbers as torch's module
minutes: 10
level: junior
repairs: no output projection; scale by d_model; split by view
"""

# %% [markdown]
# Lessons 1 to 4 have built scores, weights, one head, split and merge. Four learned matrices complete
# multi-head attention:
#
# $$\text{MultiHead}(Q, K, V) = \text{Concat}(\text{head}_1, \dots, \text{head}_H)\, W^O$$
#
# $$\text{head}_i = \text{softmax}\left(\frac{Q W^Q_i \, (K W^K_i)^\top}{\sqrt{d_k}}\right) V W^V_i$$
#
# Here $E$ is the width of a token's vector, and $d_k = E / H$ the width of one head (`D` in the code).
# Formulas count heads from 1 to $H$; code and this text count them from 0.
#
# Why matrices? Without them, head 0 could use only channels 0 to $d_k - 1$ of the input. With them, each
# channel of each head is a learned combination of *all* channels. There are three for the input, since a
# token has three roles: what it searches for ($W^Q$), what it is found by ($W^K$) and what it passes on
# ($W^V$). One matrix for each head is the same as one wide matrix whose output is split:
# $W^Q = [W^Q_1 \dots W^Q_H]$.
#
# ## Compare with torch
# To check our code, we copy the weights of `torch.nn.MultiheadAttention` and compare the outputs, in float64,
# where rounding errors are far smaller than any mistake. Two details: torch initialises its biases to 0,
# which would hide a forgotten bias, so we fill them with random numbers; and inputs `[B, T, E]` need
# `batch_first=True`.

# %% slide: Four learned matrices complete multi-head attention
# - Lessons 1 to 4 have built scores, weights, one head, split and merge.
# - New: three matrices before the heads, and one after them.
#
# $$\text{head}_i = \text{softmax}\left(\frac{Q W^Q_i \, (K W^K_i)^\top}{\sqrt{d_k}}\right) V W^V_i$$
#
# $$\text{MultiHead}(Q, K, V) = \text{Concat}(\text{head}_1, \dots, \text{head}_H)\, W^O$$
#
# ---
# Cover the second formula and ask: what is still missing, if each head gives its own result?

# %% slide: A token has three roles, so there are three matrices
# | matrix | what it makes of a token |
# |---|---|
# | $W^Q$ | the query: what the token searches for |
# | $W^K$ | the key: what the token is found by |
# | $W^V$ | the value: what the token passes on |
# | $W^O$ | after the heads: mixes their results |
#
# - Each channel of each head is a learned combination of **all** channels of the input.
# - A matrix for each head is the same as one wide matrix whose output is split.
#
# ---
# Without matrices, head 0 could use only the first channels of the input: whatever happens to be there.

# %% slide: We compare with torch, number by number
# ```
# B, T, S, E, H = 2, 5, 7, 12, 3  # sequences, queries, keys, width, heads: all different
# D = E // H  # 4: width of a head
# reference = torch.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
# torch.nn.init.normal_(reference.in_proj_bias)
# torch.nn.init.normal_(reference.out_proj.bias)
# ```
#
# - **float64**: rounding errors are far smaller than any mistake.
# - **All sizes differ**: a swapped axis raises an error.
# - **Biases are random**: torch starts them at 0, which would hide a forgotten bias.
#
# ---
# This is how to test any reimplementation: same weights, a reference, sizes that all differ. Code for
# attention with a
# mistake usually runs, has the right shape, and trains.

# %%
import torch

torch.manual_seed(0)
B, T, S, E, H = 2, 5, 7, 12, 3  # sequences, queries, keys, width, heads: all different
D = E // H  # 4: width of a head
reference = torch.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
torch.nn.init.normal_(reference.in_proj_bias)
torch.nn.init.normal_(reference.out_proj.bias)

query = torch.randn(B, T, E, dtype=torch.float64)
key, value = torch.randn(2, B, S, E, dtype=torch.float64)  # [B, S, E] each
with torch.no_grad():
    expected, expected_weights = reference(query, key, value, average_attn_weights=False)
    W_q, W_k, W_v = reference.in_proj_weight.chunk(3)  # [E, E] each
    b_q, b_k, b_v = reference.in_proj_bias.chunk(3)  # [E] each
    W_o, b_o = reference.out_proj.weight, reference.out_proj.bias
expected.shape, expected_weights.shape

# %% [markdown]
# The five steps follow. torch stores the weight of a linear layer transposed, hence `.T`. `@` multiplies
# matrices in the last two axes, for every sequence and every head.

# %% slide: Steps 1 and 2: project, split
# ```
#     # 1. project
#     q = query @ W_q.T + b_q  # [B, T, E]
#     k = key @ W_k.T + b_k  # [B, S, E]
#     v = value @ W_v.T + b_v  # [B, S, E]
#     # 2. split
#     q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]
#     k = k.view(B, S, H, D).transpose(1, 2)  # [B, H, S, D]
#     v = v.view(B, S, H, D).transpose(1, 2)  # [B, H, S, D]
# ```
#
# - torch stores the weight of a linear layer transposed, hence `.T`.
#
# ---
# Say the shape of every line aloud before you show the next. Lesson 4 shows why the split needs the
# transpose.

# %% slide: Steps 3 to 5: attend, merge, project
# ```
#     # 3. attend, in each head separately
#     weights = (q @ k.transpose(-2, -1) / D**0.5).softmax(dim=-1)  # [B, H, T, S]
#     o = weights @ v  # [B, H, T, D]
#     # 4. merge
#     merged = o.transpose(1, 2).reshape(B, T, E)  # [B, T, E]
#     # 5. project
#     output = merged @ W_o.T + b_o  # [B, T, E]
# ```
#
# [output]
#
# ---
# The difference is 0, or about 1e-16 where another machine adds in another order.

# %%
with torch.no_grad():
    # 1. project
    q = query @ W_q.T + b_q  # [B, T, E]
    k = key @ W_k.T + b_k  # [B, S, E]
    v = value @ W_v.T + b_v  # [B, S, E]
    # 2. split
    q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]
    k = k.view(B, S, H, D).transpose(1, 2)  # [B, H, S, D]
    v = v.view(B, S, H, D).transpose(1, 2)  # [B, H, S, D]
    # 3. attend, in each head separately
    weights = (q @ k.transpose(-2, -1) / D**0.5).softmax(dim=-1)  # [B, H, T, S]
    o = weights @ v  # [B, H, T, D]
    # 4. merge
    merged = o.transpose(1, 2).reshape(B, T, E)  # [B, T, E]
    # 5. project
    output = merged @ W_o.T + b_o  # [B, T, E]

assert torch.allclose(output, expected, rtol=0, atol=1e-12)
assert torch.allclose(weights, expected_weights, rtol=0, atol=1e-12)
print(f"output differs from torch's by at most {(output - expected).abs().max():.0e}")

# %% [markdown]
# The scale is $\sqrt{d_k}$, the root of the width of *one head*, since that is the width of the vectors in
# each dot product. The weights are $[B, H, T, S]$: a table for each head. The plot shows those of the first
# sequence. The matrices are random; lesson 13 shows what trained heads do.

# %% slide: A table of weights for each head
# - The weights are $[B, H, T, S]$: a row for each query, a column for each key.
# - The scale is $\sqrt{d_k}$, the width of **one head**: the width of the vectors in each dot product.
# - The matrices are random here. Lesson 13 shows trained heads.
#
# [picture]

# %%
import headwise as hw

hw.AttentionMap.from_weights(weights).plot(
    query_tokens=[f"query {t}" for t in range(T)], key_tokens=[f"key {s}" for s in range(S)]
)

# %% [markdown]
# By default, torch's module returns different weights: `[B, T, S]`, the **mean over heads**. They do not show
# what each head attends to. `average_attn_weights=False` returns the weights of each head.

# %% slide: torch returns the mean over heads, unless you ask
# ```
#     _, mean = reference(query, key, value)
# ```
#
# - By default the weights are `[B, T, S]`: a **mean over heads**, which no head has.
# - `average_attn_weights=False` returns the weights of each head.
#
# ---
# Whoever plots the default plots no head at all.

# %%
with torch.no_grad():
    _, mean = reference(query, key, value)
assert mean.shape == (B, T, S) and torch.allclose(mean, weights.mean(dim=1))

# %% [markdown]
# ## What the last matrix does
# After the merge, every head has its own channels: in `merged`, channels 0 to 3 depend on head 0 alone. $W^O$
# mixes them. torch stores it transposed: `W_o.T` in the code is $W^O$. If $W^O$ is cut into $H$ pieces of $D$
# rows, concatenating and multiplying is a sum over heads:
#
# $$\text{Concat}(\text{head}_1, \dots, \text{head}_H)\, W^O = \sum_{i=1}^{H} \text{head}_i\, W^O_i$$
#
# Each head adds its contribution to all $E$ output channels. To show it, we set one head after the other to
# zero and measure how much each channel changes.

# %% slide: The last matrix adds up what the heads write
# - After the merge, each head has its own channels: channels 0 to 3 depend on head 0 alone.
# - Cut $W^O$ into $H$ pieces of $D$ rows. Then concatenating and multiplying is a **sum over heads**:
#
# $$\text{Concat}(\text{head}_1, \dots, \text{head}_H)\, W^O = \sum_{i=1}^{H} \text{head}_i\, W^O_i$$
#
# ---
# To show it, we set one head after the other to zero and measure how much each channel changes. The next
# slide has
# the result.

# %%
pieces = W_o.detach().T.view(H, D, E)  # [H, D, E]: the rows of W^O that belong to each head
contributions = o @ pieces  # [B, H, T, E]: of each head
assert torch.allclose(contributions.sum(dim=1) + b_o.detach(), output, rtol=0, atol=1e-12)

before, after = torch.zeros(H, E), torch.zeros(H, E)
for h in range(H):
    ablated = o.clone()
    ablated[:, h] = 0
    ablated = ablated.transpose(1, 2).reshape(B, T, E)  # [B, T, E]
    before[h] = (ablated - merged).abs().mean((0, 1))
    after[h] = (ablated @ W_o.T + b_o - output).detach().abs().mean((0, 1))
    changed = [int((change[h] > 0).sum()) for change in (before, after)]
    print(f"head {h} off: {changed[0]} of {E} channels change before W_o, {changed[1]} after it,", end=" ")
    print(f"by {after[h].min():.2f} to {after[h].max():.2f} on average")

# %% slide: After the last matrix, every head reaches every channel
# [picture]
#
# ---
# A row is a head that is switched off, a column is a channel. Above: before the last matrix. Below: after
# it.

# %%
from matplotlib import pyplot as plt

figure, axes = plt.subplots(2, 1, figsize=(7.2, 4.4))
for ax, change, title in (
    (axes[0], before, "Before W_o: a head changes its own channels"),
    (axes[1], after, "After W_o: every head changes every channel"),
):
    image = ax.imshow(change, cmap="Purples", vmin=0, aspect="auto")
    ax.set(title=title, yticks=range(H), xticks=range(E), xlabel="output channel")
    ax.set_yticklabels([f"head {h} off" for h in range(H)])
    figure.colorbar(image, ax=ax, label="mean change")
assert (before > 0).sum() == E and (after > 0).all()
figure.tight_layout()

# %% [markdown]
# The picture shows the same for each channel. Before $W^O$, head 0 changes channels 0 to 3 only, head 1
# channels 4 to 7 and head 2 channels 8 to 11. After $W^O$, every head changes all 12 channels.
#
# ## A mask
# A mask says which query may attend to which key: `True` = may attend. Where it is False, the score becomes
# $-\infty$ before the softmax, and the weight exactly 0 (lesson 2). In torch's module `True` means the
# opposite, so we pass `~mask`.

# %% slide: A mask hides keys before the softmax
# - `True` means: this query may attend to this key.
# - Where it is False, the score becomes $-\infty$ and the weight exactly 0.
# - In torch's module `True` means the **opposite**, so we pass `~mask`. A wrong mask raises no error.
#
# ```
#     scores = (q @ k.transpose(-2, -1) / D**0.5).masked_fill(~mask, float("-inf"))  # [B, H, T, S]
# ```
#
# ---
# Ask: what would happen if the weights were set to 0 after the softmax? They would not sum to 1.

# %%
mask = torch.rand(T, S) > 0.4  # [T, S]: the same for every sequence and head
mask[:, 0] = True  # every query may attend to at least one key
with torch.no_grad():
    scores = (q @ k.transpose(-2, -1) / D**0.5).masked_fill(~mask, float("-inf"))  # [B, H, T, S]
    masked = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, T, E) @ W_o.T + b_o  # [B, T, E]
    assert torch.allclose(masked, reference(query, key, value, attn_mask=~mask)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(masked, reference(query, key, value, attn_mask=mask)[0])  # no error

# %% [markdown]
# The exercise asks for the same as an `nn.Module`: the layers are made in `__init__`, `forward` computes. A
# projection with weight and bias is `nn.Linear(d_model, d_model)`. Assigned to an attribute
# (`self.W_q = ..`), it is registered as part of the module, and `self.W_q(query)` applies it.
# `headwise check` compares your module with torch's, with the same weights, and names the mistake if there is
# one.

# %% slide: From five steps to a module
# - `__init__` makes the layers: a projection with weight and bias is `nn.Linear(d_model, d_model)`.
# - Assigned to an attribute (`self.W_q = ..`), a layer is registered as part of the module.
# - `forward` computes the five steps, with a mask.
# - `headwise check` compares your module with torch's, with the same weights, and **names the mistake**.

# %% exercise: MultiHeadAttention
"""Multi-head attention."""

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Concat(head_1, .., head_H) W_o with head_i = softmax(q_i k_i^T / sqrt(d_k)) v_i."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"num_heads must divide d_model: got {num_heads} and {d_model}")
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        raise NotImplementedError  # four linear layers: W_q, W_k, W_v, W_o

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, T, E] and weights [B, H, T, S].

        Args:
            query: [B, T, E]
            key: [B, S, E]
            value: [B, S, E]
            mask: bool, broadcastable to [B, H, T, S]; True = may attend.
        """
        raise NotImplementedError  # project, split, attend, merge, project


# %% hint: idea
# The layer has five steps: project, split, attend, merge, project. Lesson 4 splits and merges, lesson 3
# attends. What is new are the four linear layers and the mask, which hides keys before the softmax.

# %% hint: formula
# $$\text{head}_h = \text{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}}\right) V_h$$
#
# $$\text{out} = \text{Concat}(\text{head}_1, \ldots, \text{head}_H) W_O$$
#
# $Q_h$ is the part of $\text{query} \cdot W_Q$ that belongs to head $h$; $K_h$ and $V_h$ are parts of
# $\text{key} \cdot W_K$ and $\text{value} \cdot W_V$. Scores of hidden keys are $-\infty$.

# %% hint: code
# `__init__`: four `nn.Linear`, each from `d_model` to `d_model`.
#
# `forward`:
#
# 1. Project and split each input: `q` is `[B, H, T, D]`, `k` and `v` are `[B, H, S, D]`.
# 2. `scores`, with the scale of a head of width `d_k`: `[B, H, T, S]`.
# 3. If there is a mask: `masked_fill` with minus infinity where the mask is False.
# 4. `weights`: the softmax over the keys.
# 5. Weights times values `[B, H, T, D]`; then swap heads and tokens back, and join the last two axes:
#    `[B, T, E]`.
# 6. Return the last projection of that, and the weights.

# %% solution
"""Multi-head attention."""

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Concat(head_1, .., head_H) W_o with head_i = softmax(q_i k_i^T / sqrt(d_k)) v_i."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"num_heads must divide d_model: got {num_heads} and {d_model}")
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, H, T, D]."""
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.d_k).transpose(1, 2)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, T, E] and weights [B, H, T, S].

        Args:
            query: [B, T, E]
            key: [B, S, E]
            value: [B, S, E]
            mask: bool, broadcastable to [B, H, T, S]; True = may attend.
        """
        q = self.split_heads(self.W_q(query))  # [B, H, T, D]
        k = self.split_heads(self.W_k(key))  # [B, H, S, D]
        v = self.split_heads(self.W_v(value))  # [B, H, S, D]
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5  # [B, H, T, S]
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(dim=-1)  # [B, H, T, S]
        merged = (weights @ v).transpose(1, 2).flatten(2)  # [B, T, E]
        return self.W_o(merged), weights


# %% try
module = MultiHeadAttention(d_model=12, num_heads=3)
query, key = torch.randn(2, 5, 12), torch.randn(2, 7, 12)  # 2 sequences, T = 5, S = 7
output, weights = module(query, key, key)
print("output:", tuple(output.shape), "expected: (2, 5, 12)")
print("weights:", tuple(weights.shape), "expected: (2, 3, 5, 7)")
mask = torch.ones(5, 7, dtype=torch.bool)
mask[:, -1] = False  # no query may attend to the last key
print("weights on the hidden key:", module(query, key, key, mask)[1][..., -1].unique().tolist())

# %% [markdown]
# With torch's weights copied into it, the class of the solution gives torch's numbers, with and without a
# mask:

# %%
ours = MultiHeadAttention(E, H).double()
names = ("W_q", "W_k", "W_v", "W_o")
with torch.no_grad():
    for name, weight, bias in zip(names, (W_q, W_k, W_v, W_o), (b_q, b_k, b_v, b_o), strict=True):
        getattr(ours, name).weight.copy_(weight)
        getattr(ours, name).bias.copy_(bias)
    assert torch.allclose(ours(query, key, value)[0], expected, rtol=0, atol=1e-12)
    assert torch.allclose(ours(query, key, value, mask)[0], masked, rtol=0, atol=1e-12)
    print(f"largest difference {(ours(query, key, value)[0] - expected).abs().max():.0e}, ", end="")
    print(f"with the mask {(ours(query, key, value, mask)[0] - masked).abs().max():.0e}")

# %%
order = [2, 0, 1]
reordered = o[:, order]  # [B, H, T, D]: the outputs of the heads, in another order
with torch.no_grad():
    too = (reordered @ pieces[order]).sum(dim=1) + b_o  # [B, T, E]: the pieces of W^O in the same order
    alone = reordered.transpose(1, 2).reshape(B, T, E) @ W_o.T + b_o  # [B, T, E]: W^O as it was
    assert torch.allclose(too, output, rtol=0, atol=1e-12) and not torch.allclose(alone, output, atol=0.1)
    print(f"W^O reordered, too: the output changes by at most {(too - output).abs().max():.0e}")
    print(f"W^O as it was: by up to {(alone - output).abs().max():.1f}")

# %% question: The heads of a layer are put in another order, with their pieces of all four matrices. What changes?
# Only the order of the tables of weights. The output is a sum over heads, and a sum does not depend on the
# order, as the code below shows. So the number of a head has no meaning of its own: two models that were
# trained from different random numbers need not have the same kind of head at the same place. If the pieces
# of
# $W^O$ are not reordered with the heads, each head is multiplied by the piece of another, and the output is
# wrong, without an error.

# %% question: In float32 your module differs from torch's by 1e-7. Is that a mistake or rounding?
# The number alone does not tell, but it shrinks in float64 if it is rounding. Compare with both modules and
# the inputs in float64: rounding errors are then about $10^{-16}$ times as large as the numbers, and what a
# mistake changes stays as large as before. Use sizes that all differ and biases that are not 0, so that no
# mistake is hidden.
