"""All heads at once.

idea: a loop over heads and one wide product give the same numbers; the loop needs many small products
minutes: 8
level: data scientist
repairs: heads in a list; attention across heads
"""

# %% [markdown]
# The formula of lesson 5 names the heads one after the other, $\text{head}_1, \dots, \text{head}_H$. Read
# literally, it is a loop: one small module for each head, their outputs concatenated. Many first
# implementations look like this:

# %%
import torch
from torch import Tensor, nn


class Head(nn.Module):
    """One head: [B, T, E] -> [B, T, D]."""

    def __init__(self, d_model: int, d_k: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_model, d_k, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)  # [B, T, D] each
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1) @ v  # [B, T, D]


class LoopOverHeads(nn.Module):
    """[B, T, E] -> [B, T, E], one head after the other."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model, d_model // num_heads) for _ in range(num_heads))
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


module = nn.Module()
module.heads = [Head(8, 4)]  # a plain list instead of nn.ModuleList:
assert not list(module.parameters())  # its parameters are not registered and would not be trained

# %% [markdown]
# `LoopOverHeads` is right. To replace the loop, stack the heads' matrices: $H$ matrices `[D, E]` make one
# `[E, E]`. One product with it computes the channels of all heads side by side, and lesson 4's split
# separates them.


# %%
def wide_matrices(loop: LoopOverHeads) -> list[Tensor]:
    """W_q, W_k, W_v of all heads: [E, E] each, the rows of head 0, then those of head 1, .."""
    return [torch.cat([getattr(head, name).weight for head in loop.heads]) for name in ("q", "k", "v")]


def at_once(x: Tensor, matrices: list[Tensor], W_o: Tensor, H: int) -> Tensor:
    """Lesson 5 in three lines: [B, T, E] -> [B, T, E]."""
    q, k, v = (nn.functional.linear(x, W).unflatten(-1, (H, -1)).transpose(1, 2) for W in matrices)
    o = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1) @ v  # [B, H, T, D]
    return nn.functional.linear(o.transpose(1, 2).flatten(2), W_o)  # [B, T, E]


torch.manual_seed(0)
x = torch.randn(2, 10, 96, dtype=torch.float64)  # [B, T, E]
for H in (1, 2, 3, 8, 32):
    loop = LoopOverHeads(96, H).double()
    assert torch.allclose(loop(x), at_once(x, wide_matrices(loop), loop.out.weight, H), rtol=0, atol=1e-12)
print("the same numbers, for 1, 2, 3, 8 and 32 heads")

# %% [markdown]
# ## What is different: the number of products
# We count the matrix products, and the multiplications of numbers in them, while they run. torch calls the
# method `__torch_function__` of a `TorchFunctionMode` instead of each of its functions; ours calls the
# function and counts it.

# %%
from torch.overrides import TorchFunctionMode


class Products(TorchFunctionMode):
    """Counts matrix products and the multiplications in them."""

    calls = multiplications = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__ in ("linear", "matmul"):
            self.calls += 1
            self.multiplications += out.numel() * args[0].shape[-1]  # each number is one dot product
        return out


counts = [1, 2, 4, 8, 16]
x = torch.randn(1, 32, 128)  # [B, T, E]
calls = []
print("heads   products: loop, at once   multiplications: loop, at once")
for H in counts:
    loop = LoopOverHeads(128, H)
    matrices = wide_matrices(loop)
    with Products() as looped:
        loop(x)
    with Products() as wide:
        at_once(x, matrices, loop.out.weight, H)
    calls.append((looped.calls, wide.calls))
    print(f"{H:5} {looped.calls:15} {wide.calls:9} {looped.multiplications:21,} {wide.multiplications:9,}")
    assert looped.multiplications == wide.multiplications  # the same work ..
    assert looped.calls == 5 * H + 1 and wide.calls == 6  # .. in more, smaller products

# %% [markdown]
# Both ways need the same number of multiplications, for any number of heads: with twice as many heads, each
# is half as wide. But the loop needs $5H + 1$ products, and computing all heads at once always needs 6. Each
# product has a fixed cost: Python calls it, torch checks shapes, allocates memory and chooses a kernel. For
# small products this is most of the cost.
#
# ## What is different: the time
# The next cell divides the time of the loop by the time of computing all heads at once, for three sequence
# lengths: medians of alternating runs on one thread of the machine that ran this page. Another machine gives
# other numbers.

# %%
import os
import statistics
import time

from matplotlib import pyplot as plt

clock = time.perf_counter if os.name == "nt" else time.process_time  # excludes other programs
threads = torch.get_num_threads()
torch.set_num_threads(1)


def seconds(run, *args) -> float:
    start = clock()
    run(*args)
    return clock() - start


ratios = {}
with torch.no_grad():
    for T, repeats in ((16, 15), (64, 15), (512, 3)):
        x = torch.randn(1, T, 128)
        for H in counts:
            loop = LoopOverHeads(128, H)
            matrices = wide_matrices(loop)
            pairs = [
                (seconds(loop, x), seconds(at_once, x, matrices, loop.out.weight, H)) for _ in range(repeats)
            ]
            looped, wide = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratios.setdefault(T, []).append(looped / wide)
torch.set_num_threads(threads)
for T, row in ratios.items():
    print(f"T = {T:3}:", "  ".join(f"{H} heads {ratio:.2f}" for H, ratio in zip(counts, row, strict=True)))

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6))
axes[0].plot(counts, [looped for looped, _ in calls], "o-", color="#e95561", label="loop over heads")
axes[0].plot(counts, [wide for _, wide in calls], "s-", color="#6b1d81", label="all at once")
axes[0].set(title="Matrix products in one forward pass", ylabel="products")
axes[0].legend(frameon=False)
for (T, row), colour, marker in zip(ratios.items(), ("#6b1d81", "#c2549a", "#fd9467"), "osD", strict=True):
    axes[1].plot(counts, row, marker=marker, color=colour, label=f"{T} tokens")
axes[1].axhline(1, color="#5b6270", lw=1, ls="dashed")
axes[1].set(title="Time of the loop / time of all at once", ylabel="ratio", ylim=(0, None))
axes[1].legend(frameon=False)
for ax in axes:
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(H) for H in counts])
    ax.set_xlabel("heads")
figure.tight_layout()

# %% [markdown]
# The left plot draws the products that were counted: the line of the loop rises from 6 to 81, the other stays
# at
# 6. The right plot draws the ratios of times that the last cell printed.
#
# With one head, both ways compute the same six products. With many heads and few tokens, each product of the
# loop is tiny, and its fixed cost dominates. With longer sequences there is more to compute in each product,
# and the fixed cost matters less.
#
# At 512 tokens the ratio may fall below 1, which means that the loop is *faster*. Computing all heads at once
# writes all scores before the softmax reads them: 16 heads of 512 · 512 numbers are 16 MiB, and torch often
# has to ask the operating system for a block of that size in each pass. The loop uses the same 1 MiB again
# for every head. So computing all heads at once needs fewer calls, but more memory.
#
# Courses often say that heads run "in parallel". Here one thread did all the work and no two heads ran at the
# same time; on one thread, only the fixed cost of the calls is saved. A GPU or several threads also compute
# one large product faster than many small ones. With a loop this is not possible: each of its products
# contains a single head.
#
# ## An axis for the heads
# A third way needs no split and merge. Store the matrices with an axis for the heads, $W^Q$ as `[H, E, D]`,
# and compute one product with it. `torch.einsum` computes such products. Each axis of the inputs gets a
# letter; the letters behind the arrow are the axes of the result, and **letters that are missing from the
# result are summed**: `"te,ed->td"` is the product of two matrices. In `"bte,hed->bhtd"` the letter e is
# summed. If the last matrix is stored as `[H, D, E]`, one product sums over heads and channels, like the sum
# of lesson 5.

# %%
loop = LoopOverHeads(128, 8)
w_q = torch.stack([head.q.weight.T for head in loop.heads])  # [H=8, E=128, D=16]
x = torch.randn(2, 10, 128)  # [B, T, E]
q = torch.einsum("bte,hed->bhtd", x, w_q)  # [B, H, T, D]: no view, no transpose
split = nn.functional.linear(x, wide_matrices(loop)[0]).unflatten(-1, (8, 16)).transpose(1, 2)  # [B, H, T, D]
assert torch.allclose(q, split, atol=1e-5)

# %% exercise: AllHeads
"""Multi-head attention without a loop over heads."""

import torch
from torch import Tensor, nn


class Head(nn.Module):
    """One head: [B, T, E] -> [B, T, D]."""

    def __init__(self, d_model: int, d_k: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_model, d_k, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)  # [B, T, D] each
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1) @ v  # [B, T, D]


class LoopOverHeads(nn.Module):
    """[B, T, E] -> [B, T, E], one head after the other. This class is right; do not change it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model, d_model // num_heads) for _ in range(num_heads))
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


class AllHeads(nn.Module):
    """The same without a loop: each parameter has an axis for the heads."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        d_k = d_model // num_heads
        self.w_q = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_k = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_v = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_o = nn.Parameter(torch.randn(num_heads, d_k, d_model) / d_model**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]."""
        raise NotImplementedError  # q, k and v of all heads; their weights; the sum over heads


# %% hint: idea
# Each parameter has an axis for the heads, so a product with it computes all heads: it sums over the width
# of the model and leaves the axis of the heads in place. The last product sums over heads and channels.
# This equals concatenating the heads and multiplying by one matrix.

# %% hint: formula
# $$q_{bhtd} = \sum_e x_{bte} W^Q_{hed}, \qquad \text{out}_{bte} = \sum_{h, d} \text{head}_{bhtd} W^O_{hde}$$
#
# Keys and values are computed as queries are. Between the two formulas, each head is
# $\text{softmax}(q k^\top / \sqrt{D}) v$.

# %% hint: code
# 1. `q`, `k` and `v`: three times `torch.einsum`, with `x` as `[B, T, E]` and a parameter `[H, E, D]`; each
#    result is `[B, H, T, D]`. A letter that is missing from the result is summed.
# 2. `weights`: softmax of the scaled scores over the keys, `[B, H, T, T]`.
# 3. `heads`: weights times values, `[B, H, T, D]`.
# 4. Return one `einsum` of the heads and `w_o`, `[H, D, E]`, with the result `[B, T, E]`.

# %% solution
"""Multi-head attention without a loop over heads."""

import torch
from torch import Tensor, nn


class AllHeads(nn.Module):
    """The same without a loop: each parameter has an axis for the heads."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        d_k = d_model // num_heads
        self.w_q = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_k = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_v = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_o = nn.Parameter(torch.randn(num_heads, d_k, d_model) / d_model**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]."""
        q = torch.einsum("bte,hed->bhtd", x, self.w_q)  # [B, H, T, D]
        k = torch.einsum("bte,hed->bhtd", x, self.w_k)  # [B, H, T, D]
        v = torch.einsum("bte,hed->bhtd", x, self.w_v)  # [B, H, T, D]
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1)  # [B, H, T, T]
        heads = weights @ v  # [B, H, T, D]
        return torch.einsum("bhtd,hde->bte", heads, self.w_o)  # [B, T, E]


# %% try
x = torch.randn(2, 10, 24)  # 2 sequences of 10 tokens, E = 24
output = AllHeads(d_model=24, num_heads=3)(x)
print("output:", tuple(output.shape), "expected: (2, 10, 24)")

# %% question: Both ways need the same number of multiplications. Why is the loop slower with many heads and few tokens?
# Every product has a fixed cost besides its multiplications: the call from Python, checks, memory, the choice
# of a kernel. The loop has this cost $5H + 1$ times, and computing all heads at once 6 times. With few tokens
# the product of one head is so small that the fixed cost is most of its time. With many tokens, the
# multiplications are most of it.

# %%
H, T = 32, 4096
all_heads, one_head = H * T * T * 4, T * T * 4  # bytes of float32 scores
assert 16 * 512 * 512 * 4 == 16 * 2**20  # 16 heads, 512 tokens: the end of the third line of the plot
print(f"scores of all heads: {all_heads / 2**30:.0f} GiB; of one head: {one_head / 2**20:.0f} MiB")
assert (all_heads, one_head) == (2 * 2**30, 64 * 2**20)

# %% question: With 32 heads and 4,096 tokens, does a loop over heads have any advantage?
# Yes, it needs less memory if scores are stored. Computing all heads at once stores the scores of all heads:
# 2 GiB in float32 for one sequence. The loop stores those of one head at a time, 64 MiB, unless they are kept
# for gradients. Fused kernels, and headwise's map of weights, need even less: they compute all heads in one
# call, tile by tile, and never store the whole table of scores.
