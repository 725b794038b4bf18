"""The Transformer block.

idea: attention mixes positions, a feed-forward network processes each alone, and both add to their input
minutes: 9
level: data scientist
repairs: no residual around attention; residual from the wrong place; norm missing in the block; feed-forward without activation
"""

# %% [markdown]
# Attention is one half of a Transformer block. The other half is a **feed-forward** network: two linear
# layers with a nonlinear function between them, four times as wide inside. Two more parts go around each
# half: a **residual** connection adds the input to the output, and a **norm** rescales each vector to the
# same size. A model is a stack of such blocks:
#
# $$x \leftarrow x + \text{Attention}(\text{Norm}(x)), \qquad x \leftarrow x + \text{FeedForward}(\text{Norm}(x))$$
#
# Only attention exchanges information between positions. The feed-forward network processes each position
# separately:

# %%
import torch
from torch import nn

import headwise as hw

torch.manual_seed(0)
d = 32
attention = hw.MultiHeadAttention(d_model=d, num_heads=4).double()
feed_forward = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)).double()

x = torch.randn(1, 6, d, dtype=torch.float64)  # [B, T, E]
changed = x.clone()
changed[0, 3] += 1.0  # one word is replaced
for name, part in {"attention": lambda x: attention(x)[0], "feed-forward": feed_forward}.items():
    affected = (part(changed) - part(x)).abs().amax(-1)[0] > 1e-12  # [T]
    print(f"{name:13} positions whose output changes: {affected.nonzero().flatten().tolist()}")
assert affected.tolist() == [False, False, False, True, False, False]  # of the feed-forward network

# %% [markdown]
# ## Where the parameters are
# Attention has four matrices of $d \times d$: $W_Q, W_K, W_V, W_O$. The feed-forward network has two of
# $d \times 4d$. So two thirds of the $12 d^2$ numbers in the matrices of a block are in the feed-forward
# network. The number of heads changes no count.

# %%
width = 512
counts = {}
for heads in (1, 8, 64):
    mha = hw.MultiHeadAttention(width, heads, device="meta")  # shapes only, no numbers
    counts[heads] = sum(p.numel() for p in mha.parameters())
ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
ff_count = sum(p.numel() for p in ff.parameters())
norm_count = 2 * sum(p.numel() for p in nn.LayerNorm(width).parameters())
assert set(counts.values()) == {4 * width**2 + 4 * width}  # matrices and biases, for any number of heads
assert ff_count == 8 * width**2 + 5 * width and norm_count == 4 * width
total = counts[8] + ff_count + norm_count
for name, count in {"attention": counts[8], "feed-forward": ff_count, "norms": norm_count}.items():
    print(f"{name:13} {count:>9,}  {count / total:6.1%}")

# %% [markdown]
# ## What the residual does
# With residuals, no part of a stack replaces its input: each adds its output to it. The output of the stack
# is its input plus the sum of all contributions. The vector that they are added to is called the *residual
# stream*.

# %%


class Parts(nn.Module):
    """Attention, feed-forward network and two norms, to be combined in different ways."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mha = hw.MultiHeadAttention(d, 4)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def attend(self, x):
        return self.mha(x)[0]


def pre_norm(parts, x):
    x = x + parts.attend(parts.norm1(x))
    return x + parts.ff(parts.norm2(x))


blocks = [Parts(d).double() for _ in range(3)]
stream, contributions = x, []
for block in blocks:
    contributions.append(block.attend(block.norm1(stream)))
    contributions.append(block.ff(block.norm2(stream + contributions[-1])))
    stream = pre_norm(block, stream)
assert torch.allclose(stream, x + sum(contributions))
print("output = input + the contributions of", len(contributions), "parts")

# %% [markdown]
# With residuals, the gradient also reaches the input through the sums alone, without being multiplied by any
# matrix. Without residuals it must pass through every matrix, and each makes it smaller here.
#
# We measure two things for stacks of different depth with newly initialised weights. First, how much of a
# gradient at the output arrives at the input? Second, how similar have the vectors of the words become? (The
# mean cosine between the vectors of two positions; at 1.0 they all point in the same direction.)

# %%
import matplotlib.pyplot as plt

designs = {
    "neither residual nor norm": lambda b, x: b.ff(b.attend(x)),
    "norm alone": lambda b, x: b.ff(b.norm2(b.attend(b.norm1(x)))),
    "post-norm: norm(x + part(x))": lambda b, x: b.norm2((y := b.norm1(x + b.attend(x))) + b.ff(y)),
    "pre-norm: x + part(norm(x))": pre_norm,
}
depths = [1, 2, 4, 8, 16, 24]
torch.manual_seed(0)
blocks = [Parts(d).double() for _ in range(max(depths))]
text = torch.randn(2, 12, d, dtype=torch.float64)  # [B, T, E]
grad_output = torch.randn_like(text)  # a gradient at the output
arrived, similarity = {}, {}
for name, design in designs.items():
    y = start = text.clone().requires_grad_()
    for depth, block in enumerate(blocks, 1):
        y = design(block, y)
        if depth not in depths:
            continue
        output = nn.functional.layer_norm(y, [d]) if design is pre_norm else y  # pre-norm: one more norm
        (gradient,) = torch.autograd.grad(output, start, grad_output, retain_graph=True)
        arrived[name, depth] = float(gradient.norm() / grad_output.norm())
        unit = nn.functional.normalize(y.detach(), dim=-1)
        cosine = unit @ unit.transpose(-2, -1)  # [B, T, T]
        similarity[name, depth] = float((cosine.sum((-2, -1)) - 12).mean() / (12 * 11))

figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
for (name, _), colour in zip(designs.items(), ["#b2182b", "#ef8a62", "#67a9cf", "#2166ac"], strict=True):
    axes[0].plot(depths, [arrived[name, n] for n in depths], "o-", color=colour, label=name)
    axes[1].plot(depths, [similarity[name, n] for n in depths], "o-", color=colour)
axes[0].set_yscale("log")
axes[0].set_title("gradient at the input / gradient at the output", fontsize=11)
axes[1].set_title("similarity of the words (mean cosine)", fontsize=11)
for ax in axes:
    ax.set_xlabel("blocks")
    ax.set_xticks(depths)
axes[0].legend(fontsize=8, loc="lower left")

# %%
for name in designs:
    print(f"{name:30} gradient {arrived[name, 24]:8.1e}   similarity {similarity[name, 24]:.2f}")
assert arrived["neither residual nor norm", 24] < 1e-20
assert all(0.05 < arrived[name, 24] < 3 for name in list(designs)[1:])
post, pre = (similarity[name, 24] for name in list(designs)[2:])
assert similarity["norm alone", 24] > 0.99 > post > pre

# %% [markdown]
# - **Neither**: the gradient has vanished. The first block would learn nothing.
# - **Norm alone** keeps the gradient from vanishing. So the gradient is not the only reason for residuals,
#   although it is often said to be. The right plot shows another: without residuals all words get the same
#   vector, since attention computes means, and repeated means converge to a single one.
# - **With residuals** the gradient arrives, and words stay different over many more blocks, since each block
#   adds to a word's own vector.
#
# ## Norm before or after?
# The first Transformer had the norm *after* the sum (post-norm), so that every block normalises the stream
# itself. Most later models have it *before* the part (pre-norm): the stream remains a plain sum, with one
# more norm at the very end. At the start of training, with torch's initial weights and at this size, the
# gradient arrives equally well in both (left plot). Pre-norm is known to be easier to train at great depth,
# which this cell does not measure. It does show that words become more similar with post-norm.
#
# A common mistake is `x = norm(x)` followed by `x = x + part(x)`. It looks like pre-norm, but it adds the
# part's output to the *normalised* input. The stream then passes through every norm and is no longer a plain
# sum. The shapes are the same.

# %% exercise: Block
"""A Transformer block with pre-norm."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.widen, self.narrow = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], each position separately."""
        raise NotImplementedError  # widen, nonlinear function, narrow

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], pre-norm."""
        raise NotImplementedError  # attention and feed-forward, each with its norm and its residual


# %% hint: idea
# Each half of the block reads a *normalised* vector and adds its output to the vector *before* the norm.
# The feed-forward network needs a nonlinear function between its two linear layers; without it they would
# be a single linear map.

# %% hint: formula
# $$x \leftarrow x + \text{Attention}(\text{Norm}_1(x))$$
#
# $$x \leftarrow x + \text{FeedForward}(\text{Norm}_2(x))$$
#
# $$\text{FeedForward}(x) = \text{narrow}(\text{gelu}(\text{widen}(x)))$$

# %% hint: code
# `feed_forward`: widen to `[B, T, 4 E]`, apply the nonlinear function (`nn.functional.gelu`, for example),
# narrow to `[B, T, E]`.
#
# `forward`:
#
# 1. `h`: the first norm of `x`. `x` itself is still needed.
# 2. The new `x`: `x` plus attention with `h` as query, key and value. `nn.MultiheadAttention` returns a
#    tuple of output and weights; take the output.
# 3. Return `x` plus the feed-forward network of the second norm of `x`.

# %% solution
"""A Transformer block with pre-norm."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.widen, self.narrow = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], each position separately."""
        return self.narrow(nn.functional.gelu(self.widen(x)))  # [B, T, 4 E] inside

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], pre-norm."""
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.feed_forward(self.norm2(x))


# %% try
x = torch.randn(2, 5, 24)  # 2 sequences of 5 tokens
output = Block(d_model=24, num_heads=3)(x)
print("output:", tuple(output.shape), "expected: (2, 5, 24)")

# %%
with torch.device("meta"):
    blocks = {heads: Block(768, heads) for heads in (12, 6)}
for heads, block in blocks.items():
    matrices = {name: p.numel() for name, p in block.named_parameters() if p.ndim == 2}
    in_attention = sum(count for name, count in matrices.items() if name.startswith("attention"))
    print(f"{heads:2} heads: {sum(matrices.values()):,} in matrices, {in_attention:,} of them in attention")

# %% question: A block has d_model = 768 and 12 heads. How many numbers are in its matrices, and how many with 6 heads?
# $12 \cdot 768^2 = 7{,}077{,}888$, of which attention has a third: 2,359,296. With 6 heads the number is the
# same: the heads share the width of 768.

# %% question: Somebody stacks attention layers without residuals, and all words get nearly the same vector. Why?
# Softmax weights are not negative and sum to 1, so each output is a mean of values, and means lie closer
# together than the values themselves. With every layer they get closer. A residual adds each word's own
# vector again, so that the words stay different.
