"""Multi-head attention.

idea: project, split, attend, merge, project: five lines that equal torch's module to the last digits
minutes: 10
level: junior
repairs: no output projection; scale by d_model; split by view
"""

# %% [markdown]
# Every part is there: scores (lesson 1), shares (2), one head (3), cutting and joining (4). What is missing
# is four matrices, and then the whole stands:
#
# $$\text{MultiHead}(Q, K, V) = \text{Concat}(\text{head}_1, \dots, \text{head}_H)\, W^O$$
#
# $$\text{head}_i = \text{softmax}\left(\frac{Q W^Q_i \, (K W^K_i)^\top}{\sqrt{d_k}}\right) V W^V_i$$
#
# Why matrices? Without them, head 0 could only ever look at channels 0 to $d_k - 1$ of what comes in. With
# them, each channel of each head is a learned mix of *all* channels. And there are three, since what a token
# asks for ($W^Q$), what it is found by ($W^K$) and what it hands over ($W^V$) are three different things. A
# matrix for each head is the same as one wide matrix that is cut afterwards: $W^Q = [W^Q_1 \dots W^Q_H]$.
#
# ## Against torch
# How do we know that ours is right? We take `torch.nn.MultiheadAttention`, copy its weights, and compare
# numbers, in float64, where rounding is far below any mistake. Two small traps: torch's biases begin at 0,
# which would hide a forgotten bias, so we fill them; and `batch_first=True` is needed for inputs `[B, T, E]`.

# %%
import torch

torch.manual_seed(0)
B, T, S, E, H = 2, 5, 7, 12, 3  # sequences, queries, keys, width, heads: all different
D = E // H  # 4: width of a head
judge = torch.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
torch.nn.init.normal_(judge.in_proj_bias)
torch.nn.init.normal_(judge.out_proj.bias)

query = torch.randn(B, T, E, dtype=torch.float64)
key, value = torch.randn(2, B, S, E, dtype=torch.float64)  # [B, S, E] each
with torch.no_grad():
    expected, expected_weights = judge(query, key, value, average_attn_weights=False)
    W_q, W_k, W_v = judge.in_proj_weight.chunk(3)  # [E, E] each
    b_q, b_k, b_v = judge.in_proj_bias.chunk(3)  # [E] each
    W_o, b_o = judge.out_proj.weight, judge.out_proj.bias
expected.shape, expected_weights.shape

# %% [markdown]
# The five steps. A linear layer of torch multiplies by its weight transposed, hence `.T`; and `@` multiplies
# matrices in the last two axes, for every sequence and every head in the axes before.

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
    # 3. attend, every head for itself
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
# The scale is the root of $d_k$, the width of *one head*: that is how long the vectors are that are
# multiplied. And the weights are $[B, H, T, S]$: a table for each head. Here are those of the first sequence,
# of random matrices still; what trained heads look at is a later lesson.

# %%
import headwise as hw

hw.AttentionMap.from_weights(weights).plot(
    query_tokens=[f"query {t}" for t in range(T)], key_tokens=[f"key {s}" for s in range(S)]
)

# %% [markdown]
# Called as most course pages call it, torch's module returns something else: `weights` of shape `[B, T, S]`,
# the **mean over heads**. It cannot be told from them which head looked where; ask for
# `average_attn_weights=False`.

# %%
with torch.no_grad():
    _, mean = judge(query, key, value)
assert mean.shape == (B, T, S) and torch.allclose(mean, weights.mean(dim=1))

# %% [markdown]
# ## What the last matrix does
# After the merge every head has its own channels: in `merged`, channels 0 to 3 know head 0 and nothing else.
# $W^O$ mixes them. Cut it into $H$ pieces of $D$ rows, and concatenating and multiplying turns out to be a
# plain sum:
#
# $$\text{Concat}(\text{head}_1, \dots, \text{head}_H)\, W^O = \sum_{i=1}^{H} \text{head}_i\, W^O_i$$
#
# Each head writes into all $E$ channels, and what they write is added up. To see it, switch heads off, one at
# a time, and measure how far each output channel moves.

# %%
pieces = W_o.detach().T.view(H, D, E)  # [H, D, E]: W_o_i, one for each head
written = o @ pieces  # [B, H, T, E]: what each head writes
assert torch.allclose(written.sum(dim=1) + b_o.detach(), output, rtol=0, atol=1e-12)

before, after = torch.zeros(H, E), torch.zeros(H, E)
for h in range(H):
    off = o.clone()
    off[:, h] = 0
    off = off.transpose(1, 2).reshape(B, T, E)  # [B, T, E]
    before[h] = (off - merged).abs().mean((0, 1))
    after[h] = (off @ W_o.T + b_o - output).detach().abs().mean((0, 1))

# %%
from matplotlib import pyplot as plt

figure, axes = plt.subplots(2, 1, figsize=(7.2, 4.4))
for ax, moved, title in (
    (axes[0], before, "Before W_o: a head reaches its own channels"),
    (axes[1], after, "After W_o: every head reaches every channel"),
):
    picture = ax.imshow(moved, cmap="Purples", vmin=0, aspect="auto")
    ax.set(title=title, yticks=range(H), xticks=range(E), xlabel="output channel")
    ax.set_yticklabels([f"head {h} off" for h in range(H)])
    figure.colorbar(picture, ax=ax, label="mean change")
assert (before > 0).sum() == E and (after > 0).all()
figure.tight_layout()

# %% [markdown]
# ## A mask
# A mask says which query may see which key: `True` = may attend. Where it says no, the score becomes
# $-\infty$ before the softmax, and the share exactly 0 (lesson 2). Torch's module means the opposite by
# `True`, so it gets `~may`.

# %%
may = torch.rand(T, S) > 0.4  # [T, S]: for every sequence and head
may[:, 0] = True  # every query sees something
with torch.no_grad():
    scores = (q @ k.transpose(-2, -1) / D**0.5).masked_fill(~may, float("-inf"))  # [B, H, T, S]
    masked = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, T, E) @ W_o.T + b_o  # [B, T, E]
    assert torch.allclose(masked, judge(query, key, value, attn_mask=~may)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(masked, judge(query, key, value, attn_mask=may)[0])  # no error, other numbers

# %% [markdown]
# Now as a module: a class that derives from `nn.Module`, makes its layers in `__init__` and computes in `forward`. A
# projection with weights and bias is `nn.Linear(d_model, d_model)`; kept as an attribute (`self.W_q = ..`) it is
# found by optimisers, and called as a function: `self.W_q(query)`. `headwise check` compares yours with torch's, its weights copied, and names the mistake if
# there is one.

# %% exercise: MultiHeadAttention
"""Multi-head attention, whole."""

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


# %% solution
"""Multi-head attention, whole."""

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


# %% [markdown]
# The class with torch's weights in it gives torch's numbers, with a mask and without:

# %%
ours = MultiHeadAttention(E, H).double()
names = ("W_q", "W_k", "W_v", "W_o")
with torch.no_grad():
    for name, weight, bias in zip(names, (W_q, W_k, W_v, W_o), (b_q, b_k, b_v, b_o), strict=True):
        getattr(ours, name).weight.copy_(weight)
        getattr(ours, name).bias.copy_(bias)
    assert torch.allclose(ours(query, key, value)[0], expected, rtol=0, atol=1e-12)
    assert torch.allclose(ours(query, key, value, may)[0], masked, rtol=0, atol=1e-12)

for heads in (1, 8, 16):
    module = MultiHeadAttention(512, heads)
    print(
        f"{heads:2} heads of width {module.d_k:3}: {sum(p.numel() for p in module.parameters()):,} parameters"
    )
    assert sum(p.numel() for p in module.parameters()) == 4 * (512 * 512 + 512)

# %% question: How many parameters has multi-head attention of width 512 with 8 heads, and how many with 16?
# The same number, 1,050,624: four matrices of 512 · 512 and four biases of 512. Twice the heads are heads
# half as wide. So "more heads, richer representations" is half the story: there are more tables of shares,
# each made from fewer channels. In our own measurement ("Why many heads?" on the page "What heads do,
# measured": small Transformers of width 256, alike but for the head count), 16 and 32 heads a layer ended
# with a clearly higher loss than 8; 1, 2 and 4 could not be told apart from 8.

# %% question: Concatenation already joins the heads. What would be lost without W_o?
# Heads would stay in their own channels: output channels 0 to 3 would know head 0 alone, as the upper picture
# shows, and a head could not choose where to write. With $W^O$ every head writes into all channels, two heads
# can write into the same one, and their contributions are added.

# %% [markdown]
# Next: why all heads are computed at once, and what a loop over heads costs.
