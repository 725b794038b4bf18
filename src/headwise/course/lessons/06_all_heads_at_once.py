"""All heads at once.

idea: a loop over heads and one wide product give the same numbers; the loop asks for them in small pieces
minutes: 8
level: data scientist
repairs: heads in a list; attention across heads
"""

# %% [markdown]
# The formula of lesson 5 speaks of $\text{head}_1, \dots, \text{head}_H$, one after the other. Read
# literally, it is a loop: a small module for each head, their outputs concatenated. Many first
# implementations look like this one.

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
    """[B, T, E] -> [B, T, E]: head by head."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model, d_model // num_heads) for _ in range(num_heads))
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


forgotten = nn.Module()
forgotten.heads = [Head(8, 4)]  # a plain list instead of nn.ModuleList:
assert not list(forgotten.parameters())  # torch does not see its parameters, and would not train them

# %% [markdown]
# It is right. To get rid of the loop, put the heads' matrices on top of each other: `[D, E]`, $H$ times, is
# `[E, E]`. One product with it makes the channels of all heads, side by side, and lesson 4's split hands them
# out.


# %%
def wide_matrices(loop: LoopOverHeads) -> list[Tensor]:
    """W_q, W_k, W_v of all heads: [E, E] each, the rows of head 0, then those of head 1, .."""
    return [torch.cat([getattr(head, name).weight for head in loop.heads]) for name in ("q", "k", "v")]


def at_once(x: Tensor, matrices: list[Tensor], W_o: Tensor, H: int) -> Tensor:
    """Lesson 5 in short: [B, T, E] -> [B, T, E]."""
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
# ## What is different: counted
# Not the work. Let torch tell us each matrix product while it runs: how many there are, and how many
# multiplications of numbers they take together.

# %%
from torch.overrides import TorchFunctionMode


class Products(TorchFunctionMode):
    """Counts matrix products, and the multiplications in them."""

    calls = multiplications = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__ in ("linear", "matmul"):
            self.calls += 1
            self.multiplications += out.numel() * args[0].shape[-1]  # each number is a dot product this long
        return out


counts = [1, 2, 4, 8, 16]
x = torch.randn(1, 32, 128)  # [B, T, E]
calls = []
print("heads   products: loop, at once   multiplications: loop, at once")
for H in counts:
    loop = LoopOverHeads(128, H)
    matrices = wide_matrices(loop)
    with Products() as one:
        loop(x)
    with Products() as other:
        at_once(x, matrices, loop.out.weight, H)
    calls.append((one.calls, other.calls))
    print(f"{H:5} {one.calls:15} {other.calls:9} {one.multiplications:21,} {other.multiplications:9,}")
    assert one.multiplications == other.multiplications  # the same work ..
    assert one.calls == 5 * H + 1 and other.calls == 6  # .. in more, smaller pieces

# %% [markdown]
# Neither way nor head count changes the number of multiplications: twice the heads are half as wide. But the
# loop asks for them in $5H + 1$ products, the other way always in 6. Each product has a price that does not
# depend on its size: Python has to call it, torch has to check shapes, find memory and choose a kernel. Small
# products pay mostly that.
#
# ## And timed
# Time of the loop divided by time of all at once: medians of alternating runs on one thread, for three
# lengths. These are measurements, of the machine that ran this page; yours will show others.

# %%
import os
import statistics
import time

from matplotlib import pyplot as plt

clock = time.perf_counter if os.name == "nt" else time.process_time  # other programs' time does not count
threads = torch.get_num_threads()
torch.set_num_threads(1)


def seconds(run, *given) -> float:
    start = clock()
    run(*given)
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
            one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios.setdefault(T, []).append(one / other)
torch.set_num_threads(threads)
for T, found in ratios.items():
    print(f"T = {T:3}:", "  ".join(f"{H} heads {ratio:.2f}" for H, ratio in zip(counts, found, strict=True)))

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6))
axes[0].plot(counts, [one for one, _ in calls], "o-", color="#e95561", label="loop over heads")
axes[0].plot(counts, [other for _, other in calls], "s-", color="#6b1d81", label="all at once")
axes[0].set(title="Matrix products in one forward pass", ylabel="products")
axes[0].legend(frameon=False)
for (T, found), colour, mark in zip(ratios.items(), ("#6b1d81", "#c2549a", "#fd9467"), "osD", strict=True):
    axes[1].plot(counts, found, marker=mark, color=colour, label=f"{T} tokens")
axes[1].axhline(1, color="#5b6270", lw=1, ls="dashed")
axes[1].set(title="Time: the loop, as a multiple of all at once", ylabel="times as long", ylim=(0, None))
axes[1].legend(frameon=False)
for ax in axes:
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(H) for H in counts])
    ax.set_xlabel("heads")
figure.tight_layout()

# %% [markdown]
# With one head there is nothing to gain. With many heads and few tokens each product of the loop is tiny, and
# the price of asking dominates. The longer the sequence, the more there is to compute in each product, and
# the less it matters how often one asks.
#
# At 512 tokens look twice: the line may well fall below 1, which means that the loop is *faster*. All heads
# at once write all their scores before the softmax reads them: 16 heads of 512 · 512 numbers are 16 MiB, and
# blocks of that size are often fetched from the system anew in each pass. The loop uses one head's 1 MiB
# again and again. "At once" saves calls, and spends memory.
#
# Course pages often say that heads run "in parallel", all at the same time. Here one thread did all the work,
# and no two heads ran at the same time: what is won on such a machine is the number of calls. Parallel
# hardware can do more with one large call than with many small ones, and a loop denies it the chance, since
# it hands out the next head only when the one before has been called.
#
# ## An axis for the heads
# There is a third way to write it, without cutting and joining. Keep an axis for the heads in the matrices
# themselves, $W^Q$ as `[H, E, D]`, and let one product run over it. And the last matrix, as `[H, D, E]`,
# makes the sum over heads of lesson 5: head and channel are summed over in one go.

# %%
loop = LoopOverHeads(128, 8)
w_q = torch.stack([head.q.weight.T for head in loop.heads])  # [H=8, E=128, D=16]
x = torch.randn(2, 10, 128)  # [B, T, E]
q = torch.einsum("bte,hed->bhtd", x, w_q)  # [B, H, T, D]: no view, no transpose
split = nn.functional.linear(x, wide_matrices(loop)[0]).unflatten(-1, (8, 16)).transpose(1, 2)  # [B, H, T, D]
assert torch.allclose(q, split, atol=1e-5)

# %% exercise: AllHeads
"""From a loop over heads to none."""

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
    """[B, T, E] -> [B, T, E]: head by head. It is right, and stays as it is."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model, d_model // num_heads) for _ in range(num_heads))
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


class AllHeads(nn.Module):
    """The same with an axis for the heads in each parameter, and no loop."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        d_k = d_model // num_heads
        self.w_q = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_k = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_v = nn.Parameter(torch.randn(num_heads, d_model, d_k) / d_model**0.5)
        self.w_o = nn.Parameter(torch.randn(num_heads, d_k, d_model) / d_model**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]."""
        raise NotImplementedError  # q, k and v of all heads; their shares; the sum over heads


# %% solution
"""From a loop over heads to none."""

import torch
from torch import Tensor, nn


class AllHeads(nn.Module):
    """The same with an axis for the heads in each parameter, and no loop."""

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


# %% question: Both ways multiply as much. Why is the loop slower with many heads and few tokens?
# Every product has a fixed price besides its multiplications: the call from Python, checks, memory, the
# choice of a kernel. The loop pays it $5H + 1$ times, all heads at once 6 times. With few tokens a product of
# one head is so small that this price is most of its time; with many tokens it is not.

# %%
H, T = 32, 4096
once, one = H * T * T * 4, T * T * 4  # bytes of float32 scores
assert 16 * 512 * 512 * 4 == 16 * 2**20  # the longest line of the picture
print(f"scores of all heads: {once / 2**30:.0f} GiB; of one head: {one / 2**20:.0f} MiB")
assert (once, one) == (2 * 2**30, 64 * 2**20)

# %% question: With 32 heads and 4,096 tokens, is there anything that a loop over heads is better at?
# Memory, where scores are stored. All at once makes the scores of all heads: 2 GiB in float32 for one
# sequence. The loop holds those of one head at a time, 64 MiB, as long as no gradient asks to keep them.
# Fused kernels, and headwise's map of weights, go further: all heads in one call, worked through tile by
# tile, and the whole table of scores is never stored.

# %% [markdown]
# Next: who may attend to whom, and how masks go wrong.
