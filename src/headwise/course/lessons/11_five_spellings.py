"""Five spellings.

idea: loops, einsum, a fused projection, torch's kernel and headwise are one function, and float64 proves it
minutes: 8
level: data scientist
repairs: fused order k q v; fused qkv cut by view; weight not transposed; weights transposed before v
"""

# %% [markdown]
# The same multi-head attention looks different in every code base. Whoever reads papers' code must see through the
# spelling. Here are five, all with one set of weights: `wq`, `wk`, `wv`, `wo`, each `[E, E]`, as `nn.Linear` keeps
# them (`[out, in]`: the product is `x @ w.T`).
#
# ## 1. Loops over everything
# No tensors, only numbers: for each sequence, head, query and key. Nobody would run it, but nothing is hidden in
# it. It shows what a head is: a range of channels.

# %%
import math

import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw

torch.manual_seed(0)
B, T, E, H = 2, 12, 32, 4
D = E // H
ours = hw.MultiHeadAttention(d_model=E, num_heads=H, bias=False).double()
weights = [m.weight.detach() for m in (ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj)]  # each [E, E]
x = torch.randn(B, T, E, dtype=torch.float64)


def product(rows, w):
    """rows @ w.T, of lists."""
    return [[sum(a * b for a, b in zip(row, line, strict=True)) for line in w] for row in rows]


def loops(x, wq, wk, wv, wo):
    """[B, T, E] -> [B, T, E], number by number."""
    outputs = []
    for rows in x.tolist():
        q, k, v = (product(rows, w.tolist()) for w in (wq, wk, wv))  # each a list of T rows of E numbers
        heads = [[0.0] * E for _ in rows]
        for h in range(H):
            channels = range(h * D, (h + 1) * D)
            for t in range(T):
                scores = [sum(q[t][c] * k[s][c] for c in channels) / math.sqrt(D) for s in range(T)]
                shares = [math.exp(score - max(scores)) for score in scores]
                for c in channels:
                    heads[t][c] = sum(e * v[s][c] for s, e in enumerate(shares)) / sum(shares)
        outputs.append(product(heads, wo.tolist()))
    return torch.tensor(outputs, dtype=x.dtype)


truth = loops(x, *weights)
print(list(truth.shape))

# %% [markdown]
# ## 2. One fused projection
# Three products with the same `x` are one product with a matrix three times as tall. Many models keep it so, under
# names like `qkv`, `c_attn` or `in_proj`. Then q, k and v must be cut apart again, and the cut is part of the
# weights' meaning: `[3, H, D]` (all q, then all k, then all v) or `[H, 3, D]` (head by head). Both have the same
# shape.

# %%


def fused(x, wq, wk, wv, wo):
    """[B, T, E] -> [B, T, E], with one product for q, k and v."""
    qkv = x @ torch.cat([wq, wk, wv]).T  # [B, T, 3 E]
    q, k, v = qkv.view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, T, S]
    heads = scores.softmax(-1) @ v  # [B, H, T, D]
    return heads.transpose(1, 2).flatten(2) @ wo.T


qkv = x @ torch.cat(weights[:3]).T  # [B, T, 3 E]
right = qkv.view(B, T, 3, H, D)[:, :, 0]  # queries, [B, T, H, D]
other = qkv.view(B, T, H, 3, D)[:, :, :, 0]  # the other cut: the same shape, other numbers
assert right.shape == other.shape and not torch.allclose(right, other)
turned = torch.cat(weights[:3]).view(3, H, D, E).transpose(0, 1).flatten(0, 2)  # the rows, put head by head
assert torch.allclose(right, (x @ turned.T).view(B, T, H, 3, D)[:, :, :, 0])  # now the other cut is right
assert torch.allclose(fused(x, *weights), truth)

# %% [markdown]
# ## 3. torch's kernel
# `F.scaled_dot_product_attention` does scale, softmax and mix in one step. Where it can, it never writes down all
# weights at once, which is why it needs little memory for long texts, and why it cannot give you the weights.
#
# ## 4. headwise
# Uses the same kernels and keeps one more number for each query, from which any weight can be computed when it is
# looked at.

# %%


def kernel(x, wq, wk, wv, wo):
    """[B, T, E] -> [B, T, E], with torch's fused attention."""
    q, k, v = ((x @ w.T).unflatten(-1, (H, -1)).transpose(1, 2) for w in (wq, wk, wv))  # each [B, H, T, D]
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ wo.T


assert torch.allclose(kernel(x, *weights), truth)
assert torch.allclose(ours(x)[0], truth)
print("weights of one query, computed now:", [round(w, 2) for w in ours(x)[1][0, 0, 5].tolist()])

# %% [markdown]
# ## 5. einsum: yours to write
# `torch.einsum` takes a formula of letters. Each letter is an axis; a letter that is missing on the right is summed
# over. That is the whole rule:
#
# | formula | meaning |
# |---|---|
# | `td,sd->ts` | dot products of rows of two matrices: $QK^\top$ |
# | `bte,ed->btd` | a linear layer on every position |
# | `bhtd->bthd` | a transpose |
#
# With it there is no split and no merge: give each head its own slice of the weights, `W_Q` of shape `[H, E, D]`,
# and the head is just one more letter. Here for the scores of all heads:

# %%
wq, wk, wv, wo = weights
W_Q, W_K = (w.view(H, D, E).transpose(1, 2) for w in (wq, wk))  # each [H, E, D]
q, k = (torch.einsum("bte,hed->bhtd", x, w) for w in (W_Q, W_K))  # each [B, H, T, D]
scores = torch.einsum("bhtd,bhsd->bhts", q, k)  # [B, H, T, S]: d is summed over
assert torch.allclose((scores / D**0.5).softmax(-1), ours(x)[1].dense())

# %% exercise: EinsumAttention
"""Multi-head attention in einsum: every head has its own slice of the weights."""

import torch
from torch import Tensor, nn


class EinsumAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        head_dim = d_model // num_heads
        self.W_Q = nn.Parameter(torch.randn(num_heads, d_model, head_dim) / d_model**0.5)  # [H, E, D]
        self.W_K = nn.Parameter(torch.randn(num_heads, d_model, head_dim) / d_model**0.5)  # [H, E, D]
        self.W_V = nn.Parameter(torch.randn(num_heads, d_model, head_dim) / d_model**0.5)  # [H, E, D]
        self.W_O = nn.Parameter(torch.randn(num_heads, head_dim, d_model) / d_model**0.5)  # [H, D, E]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], self-attention without view, reshape or transpose."""
        raise NotImplementedError  # q, k, v; weights; what the heads say, summed by W_O over heads and channels


# %% solution
"""Multi-head attention in einsum: every head has its own slice of the weights."""

import torch
from torch import Tensor, nn


class EinsumAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        head_dim = d_model // num_heads
        self.W_Q = nn.Parameter(torch.randn(num_heads, d_model, head_dim) / d_model**0.5)  # [H, E, D]
        self.W_K = nn.Parameter(torch.randn(num_heads, d_model, head_dim) / d_model**0.5)  # [H, E, D]
        self.W_V = nn.Parameter(torch.randn(num_heads, d_model, head_dim) / d_model**0.5)  # [H, E, D]
        self.W_O = nn.Parameter(torch.randn(num_heads, head_dim, d_model) / d_model**0.5)  # [H, D, E]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E], self-attention without view, reshape or transpose."""
        q = torch.einsum("bte,hed->bhtd", x, self.W_Q)
        k = torch.einsum("bse,hed->bhsd", x, self.W_K)
        v = torch.einsum("bse,hed->bhsd", x, self.W_V)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
        heads = torch.einsum("bhts,bhsd->bhtd", scores.softmax(dim=-1), v)
        return torch.einsum("bhtd,hde->bte", heads, self.W_O)  # h and d are summed: concatenation and W_O


# %% [markdown]
# ## The proof
# One set of weights, one input, float64, every pair compared: outputs, and gradients where there are any. Rounding
# in float64 is about $10^{-16}$; a wrong spelling differs in the first digits.

# %%


def in_einsum(wq, wk, wv, wo):
    """An EinsumAttention that holds these weights."""
    module = EinsumAttention(len(wq), H).to(wq.dtype)
    with torch.no_grad():
        for mine, w in zip((module.W_Q, module.W_K, module.W_V), (wq, wk, wv), strict=True):
            mine.copy_(w.view(H, -1, w.shape[1]).transpose(1, 2))  # [E, E] -> [H, D, E] -> [H, E, D]
        module.W_O.copy_(wo.T.unflatten(0, (H, -1)))  # [E, E] -> [H, D, E]
    return module


def spellings(mha):
    """The five by name, each a function of x, with the weights of `mha`."""
    w = [m.weight.detach() for m in (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj)]
    return {
        "loops": lambda x: loops(x, *w),
        "einsum": in_einsum(*w),
        "fused qkv": lambda x: fused(x, *w),
        "torch's kernel": lambda x: kernel(x, *w),
        "headwise": lambda x: mha(x)[0],
    }


five = spellings(ours)
outputs = {name: way(x).detach() for name, way in five.items()}
print(f"{'largest difference':15}", *(f"{name:>15}" for name in five))
for name, one in outputs.items():
    print(f"{name:18}", *(f"{float((one - another).abs().max()):15.0e}" for another in outputs.values()))
assert all(torch.allclose(one, truth, rtol=0, atol=1e-14) for one in outputs.values())

start = x.clone().requires_grad_()
slopes = [torch.autograd.grad(five[name](start).square().sum(), start)[0] for name in list(five)[1:]]
assert all(torch.allclose(slope, slopes[0], rtol=0, atol=1e-13) for slope in slopes)

# %% [markdown]
# ## The clock
# Equal numbers, different times. Each bar is a ratio: the median of several runs, divided by that of torch's kernel
# in the same size, on the machine that ran this page. The loops are timed in the small size only.

# %%
import time
from statistics import median

import matplotlib.pyplot as plt


def seconds(way, x, repeats):
    way(x)  # once before, not counted
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        way(x)
        taken.append(time.perf_counter() - began)
    return median(taken)


ratios = {}
with torch.no_grad():
    for width, length in ((32, 12), (128, 256)):
        ways = spellings(hw.MultiHeadAttention(d_model=width, num_heads=H, bias=False))
        z = torch.randn(2, length, width)  # float32
        taken = {
            name: seconds(way, z, 3 if name == "loops" else 15)
            for name, way in ways.items()
            if name != "loops" or width == 32
        }
        ratios[f"{length} words, width {width}"] = {
            name: t / taken["torch's kernel"] for name, t in taken.items()
        }

figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
for place, (size, found) in enumerate(ratios.items()):
    rows = [list(five).index(name) + 0.38 * place for name in found]
    lengths = [
        ratio - 1 for ratio in found.values()
    ]  # bars begin at 1: to the right slower, to the left faster
    ax.barh(rows, lengths, left=1, height=0.36, color=["#67a9cf", "#2166ac"][place], label=size)
    for row, ratio in zip(rows, found.values(), strict=True):
        told = f"{ratio:.0f}" if ratio > 10 else f"{ratio:.1f}"
        ax.text(max(ratio, 1) * 1.06, row, told, va="center", fontsize=8)
ax.set_xscale("log")
ax.set_xlim(0.4, 3 * max(ratios["12 words, width 32"].values()))
ax.set_xticks([0.5, 1, 2, 5, 10, 100], ["0.5", "1", "2", "5", "10", "100"])
ax.set_yticks([row + 0.19 for row in range(5)], list(five))
ax.invert_yaxis()
ax.axvline(1, color="0.4", linewidth=1)
ax.set_xlabel("time, as a multiple of torch's kernel")
ax.set_title("One function, five spellings: how long they take", fontsize=11)
ax.legend(fontsize=8, loc="center right")
small = ratios["12 words, width 32"]
assert small["loops"] > 5 * max(ratio for name, ratio in small.items() if name != "loops")

# %% [markdown]
# One thing holds on every machine: the loops come last, by far. The order of the others depends on sizes and
# machine, so measure yours before you rewrite code for speed, and prove it equal after.

# %%
q2, k5 = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 5, 8)  # T = 2 new words, S = 5 words in all
v5 = torch.eye(5)[None, None]  # with such values the output is the weights
by_torch = F.scaled_dot_product_attention(q2, k5, v5, is_causal=True)
by_headwise, _ = hw.attention(q2, k5, v5, causal=True)
for name, out in {"torch": by_torch, "headwise": by_headwise}.items():
    print(f"{name:9} keys seen by the two queries: {(out[0, 0] > 0).sum(-1).tolist()}")

# %% question: Two new words look at five, both calls say "causal". Why does torch's kernel let the last word see 2 keys and headwise 5?
# Causal means "no later key", and with T = 2 and S = 5 it must be said which query stands beside which key. torch's
# `is_causal` puts the *first* query beside the first key, headwise the *last* beside the last, as generation needs
# it: the new words come at the end. With T = S both are the same, so a test with equal lengths never sees it.

# %% question: In float32 the five outputs differ in the last digits. Which one is right?
# None exactly: they add the same numbers in different orders, and each order rounds differently. That is why the
# proof is done in float64, where the differences shrink with the rounding, to about $10^{-16}$. A mistake does not
# shrink: it is as large in float64 as in float32.

# %% [markdown]
# **Next:** whatever the spelling, there were always several heads; lesson 12 asks why not one wide one.
