"""The Transformer block.

idea: attention lets words talk, a feed-forward lets each think, and both only add to what is there
minutes: 9
level: data scientist
repairs: no residual around attention; residual from the wrong place; norm missing in the block; feed-forward without activation
"""

# %% [markdown]
# Attention is one half of a Transformer. The other half is a **feed-forward** network: two linear layers with a
# bend between them, four times as wide inside. Around each half go two small things: a **residual**, which adds the
# input to the output, and a **norm**, which brings each vector to the same size. Together they are a block, and a
# model is a stack of blocks:
#
# $$x \leftarrow x + \text{Attention}(\text{Norm}(x)), \qquad x \leftarrow x + \text{FeedForward}(\text{Norm}(x))$$
#
# Attention is the only place where positions exchange something. The feed-forward works on each position by itself:

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
changed[0, 3] += 1.0  # one word becomes another
for name, part in {"attention": lambda x: attention(x)[0], "feed-forward": feed_forward}.items():
    moved = (part(changed) - part(x)).abs().amax(-1)[0] > 1e-12  # [T]: which positions noticed
    print(f"{name:13} positions that notice: {moved.nonzero().flatten().tolist()}")
assert moved.tolist() == [False, False, False, True, False, False]  # of the feed-forward

# %% [markdown]
# ## Where the parameters are
# Attention has four matrices of $d \times d$: $W_Q, W_K, W_V, W_O$. The feed-forward has two of $d \times 4d$. So
# of the $12 d^2$ numbers in a block two thirds are in the feed-forward, and the heads, which give the architecture
# its name, cost nothing: how many there are changes no count.

# %%
width = 512
counts = {}
for heads in (1, 8, 64):
    mha = hw.MultiHeadAttention(width, heads, device="meta")  # shapes without numbers are enough to count
    counts[heads] = sum(p.numel() for p in mha.parameters())
ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
of_ff = sum(p.numel() for p in ff.parameters())
of_norms = 2 * sum(p.numel() for p in nn.LayerNorm(width).parameters())
assert set(counts.values()) == {4 * width**2 + 4 * width}  # matrices and biases, for any number of heads
assert of_ff == 8 * width**2 + 5 * width and of_norms == 4 * width
whole = counts[8] + of_ff + of_norms
for name, count in {"attention": counts[8], "feed-forward": of_ff, "norms": of_norms}.items():
    print(f"{name:13} {count:>9,}  {count / whole:6.1%}")

# %% [markdown]
# ## What the residual does
# With residuals, a stack never replaces what it has: each part writes its contribution on top of it. What comes out
# is the input plus the sum of all that was written. The vector that is passed on and written to is called the
# *residual stream*.

# %%


class Parts(nn.Module):
    """Attention, feed-forward and two norms, to be put together in different ways."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mha = hw.MultiHeadAttention(d, 4)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def attend(self, x):
        return self.mha(x)[0]


def pre_norm(b, x):
    x = x + b.attend(b.norm1(x))
    return x + b.ff(b.norm2(x))


blocks = [Parts(d).double() for _ in range(3)]
stream, written = x, []
for b in blocks:
    written.append(b.attend(b.norm1(stream)))
    written.append(b.ff(b.norm2(stream + written[-1])))
    stream = pre_norm(b, stream)
assert torch.allclose(stream, x + sum(written))
print("input + everything that was written = output, for", len(written), "parts")

# %% [markdown]
# A sum has a convenient derivative: the input reaches the output by a path on which nothing is multiplied, and so
# does the gradient on its way back. Without the residual it must pass through every matrix, and each makes it
# smaller.
#
# Let us measure it, with fresh weights, for stacks of different depth: how much of a gradient at the output arrives
# at the input? And a second thing: how alike have the words of a text become? (The mean cosine between the vectors
# of two positions; 1.0 means they all point the same way.)

# %%
import matplotlib.pyplot as plt

ways = {
    "neither residual nor norm": lambda b, x: b.ff(b.attend(x)),
    "norm alone": lambda b, x: b.ff(b.norm2(b.attend(b.norm1(x)))),
    "post-norm: norm(x + part(x))": lambda b, x: b.norm2((y := b.norm1(x + b.attend(x))) + b.ff(y)),
    "pre-norm: x + part(norm(x))": pre_norm,
}
depths = [1, 2, 4, 8, 16, 24]
torch.manual_seed(0)
blocks = [Parts(d).double() for _ in range(max(depths))]
text = torch.randn(2, 12, d, dtype=torch.float64)  # [B, T, E]
back = torch.randn_like(text)  # a gradient at the output
arrived, alike = {}, {}
for name, way in ways.items():
    y = start = text.clone().requires_grad_()
    for depth, b in enumerate(blocks, 1):
        y = way(b, y)
        if depth not in depths:
            continue
        last = nn.functional.layer_norm(y, [d]) if way is pre_norm else y  # pre-norm ends with one more norm
        (gradient,) = torch.autograd.grad(last, start, back, retain_graph=True)
        arrived[name, depth] = float(gradient.norm() / back.norm())
        unit = nn.functional.normalize(y.detach(), dim=-1)
        cosine = unit @ unit.transpose(-2, -1)  # [B, T, T]
        alike[name, depth] = float((cosine.sum((-2, -1)) - 12).mean() / (12 * 11))

figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
for (name, _), colour in zip(ways.items(), ["#b2182b", "#ef8a62", "#67a9cf", "#2166ac"], strict=True):
    axes[0].plot(depths, [arrived[name, n] for n in depths], "o-", color=colour, label=name)
    axes[1].plot(depths, [alike[name, n] for n in depths], "o-", color=colour)
axes[0].set_yscale("log")
axes[0].set_title("share of a gradient that arrives at the input", fontsize=11)
axes[1].set_title("how alike the words have become (mean cosine)", fontsize=11)
for ax in axes:
    ax.set_xlabel("blocks")
    ax.set_xticks(depths)
axes[0].legend(fontsize=8, loc="lower left")

# %%
for name in ways:
    print(f"{name:30} gradient {arrived[name, 24]:8.1e}   alike {alike[name, 24]:.2f}")
assert arrived["neither residual nor norm", 24] < 1e-20
assert all(0.05 < arrived[name, 24] < 3 for name in list(ways)[1:])
post, pre = (alike[name, 24] for name in list(ways)[2:])
assert alike["norm alone", 24] > 0.99 > post > pre

# %% [markdown]
# - **Neither**: the gradient is gone. The first block would learn nothing.
# - **Norm alone** keeps the gradient from vanishing. So the residual is not there for the gradient only, as one
#   often reads. But look at the right: all words are the same word now. Attention mixes, and mixing again and again
#   ends in one average.
# - **With residuals** the gradient arrives whole, and the words stay apart far longer, since each keeps what it
#   had.
#
# ## Norm before or after?
# The first Transformer had the norm *after* the sum (post-norm): it also cuts through the stream, in every block.
# Most later models have it *before* the part (pre-norm): the stream stays a plain sum, and one more norm stands at
# the very end. At the start of training, with weights as torch draws them and at this size, both bring the gradient
# back equally well, as the left picture shows. That pre-norm is easier to train deep is a finding about training,
# which this cell does not measure; that post-norm blurs words more can be seen here.
#
# A mistake between the two is `x = norm(x)` followed by `x = x + part(x)`: it looks like pre-norm, but what is
# added is the *normed* input. The plain path is cut, and nobody sees it from shapes.

# %% exercise: Block
"""A Transformer block with its norms before the parts."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.widen, self.narrow = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], each position by itself."""
        raise NotImplementedError  # wide, bent, and back

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], pre-norm."""
        raise NotImplementedError  # attention and feed-forward, each with its norm and its residual


# %% solution
"""A Transformer block with its norms before the parts."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.widen, self.narrow = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], each position by itself."""
        return self.narrow(nn.functional.gelu(self.widen(x)))  # [B, T, 4 E] inside

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], pre-norm."""
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.feed_forward(self.norm2(x))


# %%
with torch.device("meta"):
    blocks = {heads: Block(768, heads) for heads in (12, 6)}
for heads, block in blocks.items():
    matrices = {name: p.numel() for name, p in block.named_parameters() if p.ndim == 2}
    of_attention = sum(count for name, count in matrices.items() if name.startswith("attention"))
    print(f"{heads:2} heads: {sum(matrices.values()):,} in matrices, {of_attention:,} of them in attention")

# %% question: A block has d_model = 768 and 12 heads. How many numbers are in its matrices, and how many with 6 heads?
# $12 \cdot 768^2 = 7{,}077{,}888$, of which attention has a third: 2,359,296. With 6 heads exactly as many: heads
# divide the width among themselves, they do not add to it.

# %% question: Somebody stacks attention layers without residuals and sees that all words get nearly the same vector. Why?
# Softmax weights are positive and sum to 1, so each output is an average of values, and averages lie closer
# together than what they are averages of. Layer after layer they move together. A residual adds each word's own
# vector again, so that it cannot be averaged away.

# %% [markdown]
# **Next:** on paper all this is exact; lesson 10 looks at what remains of it in 16 bits, and in training with
# dropout.
