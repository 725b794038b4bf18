"""Five implementations.

idea: loops, einsum, a fused projection, torch's kernel and headwise compute the same function
minutes: 8
level: data scientist
repairs: fused order k q v; fused qkv cut by view; weight not transposed; weights transposed before v
"""

# %% [markdown]
# Multi-head attention looks different in every code base. This lesson writes it in five ways, all with the
# same weights: `wq`, `wk`, `wv`, `wo`, each `[E, E]`, stored as in `nn.Linear` (`[out, in]`: the product is
# `x @ w.T`).
#
# ## 1. Loops over everything
# The first implementation computes one number after the other, for each sequence, head, query and key. It is
# far too slow to use, but every step is visible. A head is a range of channels.

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
    """Return rows @ w.T, for lists."""
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in w] for row in rows]


def loops(x, wq, wk, wv, wo):
    """[B, T, E] -> [B, T, E], one number at a time."""
    outputs = []
    for rows in x.tolist():
        q, k, v = (product(rows, w.tolist()) for w in (wq, wk, wv))  # each a list of T rows of E numbers
        heads = [[0.0] * E for _ in rows]
        for h in range(H):
            channels = range(h * D, (h + 1) * D)
            for t in range(T):
                scores = [sum(q[t][c] * k[s][c] for c in channels) / math.sqrt(D) for s in range(T)]
                powers = [math.exp(score - max(scores)) for score in scores]
                for c in channels:
                    heads[t][c] = sum(p * v[s][c] for s, p in enumerate(powers)) / sum(powers)
        outputs.append(product(heads, wo.tolist()))
    return torch.tensor(outputs, dtype=x.dtype)


truth = loops(x, *weights)
print(list(truth.shape))

# %% [markdown]
# ## 2. One fused projection
# Three products with the same `x` equal one product with a matrix three times as tall. Many models store
# their weights in this way, under names like `qkv`, `c_attn` or `in_proj`. Then q, k and v must be split
# again, and the order of the split depends on how the weights are stored: `[3, H, D]` (all q, then all k,
# then all v) or `[H, 3, D]` (head by head). Both orders have the same number of rows, so the wrong one raises
# no error.

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
wrong = qkv.view(B, T, H, 3, D)[:, :, :, 0]  # the other order: same shape, different numbers
assert right.shape == wrong.shape and not torch.allclose(right, wrong)
by_head = torch.cat(weights[:3]).view(3, H, D, E).transpose(0, 1).flatten(0, 2)  # rows stored head by head
assert torch.allclose(right, (x @ by_head.T).view(B, T, H, 3, D)[:, :, :, 0])  # now the other order is right
assert torch.allclose(fused(x, *weights), truth)

# %% [markdown]
# ## 3. torch's kernel
# `F.scaled_dot_product_attention` computes scale, softmax and weighted mean in one step. Where possible, it
# never stores all weights at once. That is why it needs little memory for long texts, and why it cannot
# return the weights.
#
# ## 4. headwise
# headwise uses the same kernels and stores one more number for each query, from which any weight can be
# computed when it is needed.

# %%


def kernel(x, wq, wk, wv, wo):
    """[B, T, E] -> [B, T, E], with torch's fused attention."""
    q, k, v = ((x @ w.T).unflatten(-1, (H, -1)).transpose(1, 2) for w in (wq, wk, wv))  # each [B, H, T, D]
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ wo.T


assert torch.allclose(kernel(x, *weights), truth)
assert torch.allclose(ours(x)[0], truth)
print("weights of one query, computed on request:", [round(w, 2) for w in ours(x)[1][0, 0, 5].tolist()])

# %% [markdown]
# ## 5. einsum, the exercise
# `torch.einsum` takes a formula of letters. Each letter is an axis; a letter that is missing on the right is
# summed over:
#
# | formula | meaning |
# |---|---|
# | `td,sd->ts` | dot products of rows of two matrices: $QK^\top$ |
# | `bte,ed->btd` | a linear layer on every position |
# | `bhtd->bthd` | a transpose |
#
# With einsum, no split and no merge are needed: each head has its own slice of the weights (`W_Q` has the
# shape `[H, E, D]`), and the axis of heads is one more letter. The next cell computes the scores of all heads
# in this way:

# %%
wq, wk, wv, wo = weights
W_Q, W_K = (w.view(H, D, E).transpose(1, 2) for w in (wq, wk))  # each [H, E, D]
q, k = (torch.einsum("bte,hed->bhtd", x, w) for w in (W_Q, W_K))  # each [B, H, T, D]
scores = torch.einsum("bhtd,bhsd->bhts", q, k)  # [B, H, T, S]: d is summed over
assert torch.allclose((scores / D**0.5).softmax(-1), ours(x)[1].dense())

# %% exercise: EinsumAttention
"""Multi-head attention with einsum: every head has its own slice of the weights."""

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
        raise NotImplementedError  # q, k, v; weights; heads; W_O sums over heads and channels


# %% hint: idea
# `einsum` names each axis by a letter. A letter that is missing from the result is summed, all others stay,
# in the order that you write. So each step of attention is one `einsum`, and no axis has to be moved: write
# down the letters of the inputs and of the result.

# %% hint: formula
# $$q_{bhtd} = \sum_e x_{bte} W^Q_{hed}, \qquad s_{bhts} = \frac{\sum_d q_{bhtd} k_{bhsd}}{\sqrt{D}}$$
#
# $$\text{head}_{bhtd} = \sum_s w_{bhts} v_{bhsd}$$
#
# $$\text{out}_{bte} = \sum_{h, d} \text{head}_{bhtd} W^O_{hde}$$
#
# $w$ is the softmax of $s$ over the keys. Keys and values are computed as queries are, with the letter $s$
# for the position.

# %% hint: code
# 1. `q`: `x` and `W_Q`, summed over `e`: `[b, h, t, d]`. `k` and `v` in the same way: `[b, h, s, d]`.
# 2. `scores`: `q` and `k`, summed over `d`: `[b, h, t, s]`; divide by the root of the width of a head.
# 3. The softmax along the last axis, then a product with `v`, summed over `s`: `[b, h, t, d]`.
# 4. Return the product of the heads and `W_O`, summed over `h` and `d`: `[b, t, e]`.

# %% solution
"""Multi-head attention with einsum: every head has its own slice of the weights."""

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


# %% try
output = EinsumAttention(d_model=24, num_heads=3)(torch.randn(2, 5, 24))  # 2 sequences of 5 tokens
print("output:", tuple(output.shape), "expected: (2, 5, 24)")

# %% [markdown]
# ## Comparison in float64
# We compare every pair, with the same weights and the same input in float64: outputs, and gradients for all
# but the loops. Rounding in float64 is about $10^{-16}$; a wrong implementation differs in the first digits.

# %%


def in_einsum(wq, wk, wv, wo):
    """Return an EinsumAttention with these weights."""
    module = EinsumAttention(len(wq), H).to(wq.dtype)
    with torch.no_grad():
        for parameter, w in zip((module.W_Q, module.W_K, module.W_V), (wq, wk, wv), strict=True):
            parameter.copy_(w.view(H, -1, w.shape[1]).transpose(1, 2))  # [E, E] -> [H, D, E] -> [H, E, D]
        module.W_O.copy_(wo.T.unflatten(0, (H, -1)))  # [E, E] -> [H, D, E]
    return module


def implementations(mha):
    """Return the five implementations by name, as functions of x, with the weights of `mha`."""
    w = [m.weight.detach() for m in (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj)]
    return {
        "loops": lambda x: loops(x, *w),
        "einsum": in_einsum(*w),
        "fused qkv": lambda x: fused(x, *w),
        "torch's kernel": lambda x: kernel(x, *w),
        "headwise": lambda x: mha(x)[0],
    }


functions = implementations(ours)
outputs = {name: function(x).detach() for name, function in functions.items()}
print(f"{'largest difference':15}", *(f"{name:>15}" for name in functions))
for name, a in outputs.items():
    print(f"{name:18}", *(f"{float((a - b).abs().max()):15.0e}" for b in outputs.values()))
assert all(torch.allclose(output, truth, rtol=0, atol=1e-14) for output in outputs.values())

start = x.clone().requires_grad_()
gradients = [
    torch.autograd.grad(function(start).square().sum(), start)[0]
    for name, function in functions.items()
    if name != "loops"
]
assert all(torch.allclose(gradient, gradients[0], rtol=0, atol=1e-13) for gradient in gradients)

# %% [markdown]
# ## Time
# The five give equal numbers, but take different times. Each bar is a ratio: the shortest of several runs,
# divided by that of torch's kernel at the same size, on the machine that ran this page. The shortest run is
# the one that other programs disturbed least. The loops run at the small size only.

# %%
import time

import matplotlib.pyplot as plt


def seconds(function, x, repeats):
    function(x)  # warm up
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(x)
        times.append(time.perf_counter() - start)
    return min(times)


ratios = {}
with torch.no_grad():
    for width, length in ((32, 12), (128, 256)):
        timed = implementations(hw.MultiHeadAttention(d_model=width, num_heads=H, bias=False))
        z = torch.randn(2, length, width)  # float32
        times = {
            name: seconds(function, z, 3 if name == "loops" else 15)
            for name, function in timed.items()
            if name != "loops" or width == 32
        }
        ratios[f"{length} words, width {width}"] = {
            name: t / times["torch's kernel"] for name, t in times.items()
        }

figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
for i, (size, by_name) in enumerate(ratios.items()):
    rows = [list(functions).index(name) + 0.38 * i for name in by_name]
    lengths = [ratio - 1 for ratio in by_name.values()]  # bars start at 1: slower to the right
    ax.barh(rows, lengths, left=1, height=0.36, color=["#67a9cf", "#2166ac"][i], label=size)
    for row, ratio in zip(rows, by_name.values(), strict=True):
        text = f"{ratio:.0f}" if ratio > 10 else f"{ratio:.1f}"
        ax.text(max(ratio, 1) * 1.06, row, text, va="center", fontsize=8)
ax.set_xscale("log")
ax.set_xlim(0.4, 3 * max(ratios["12 words, width 32"].values()))
ax.set_xticks([0.5, 1, 2, 5, 10, 100], ["0.5", "1", "2", "5", "10", "100"])
ax.set_yticks([row + 0.19 for row in range(5)], list(functions))
ax.invert_yaxis()
ax.axvline(1, color="0.4", linewidth=1)
ax.set_xlabel("time / time of torch's kernel")
ax.set_title("Time of five implementations of the same function", fontsize=11)
ax.legend(fontsize=8, loc="center right")
small = ratios["12 words, width 32"]
assert small["loops"] > 5 * max(ratio for name, ratio in small.items() if name != "loops")

# %% [markdown]
# On every machine the loops are the slowest, by far. The order of the others depends on the sizes and the
# machine: measure before you rewrite code for speed, and compare in float64 afterwards.

# %%
q2, k5 = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 5, 8)  # T = 2 new words, S = 5 words in all
v5 = torch.eye(5)[None, None]  # with these values the output equals the weights
by_torch = F.scaled_dot_product_attention(q2, k5, v5, is_causal=True)
by_headwise, _ = hw.attention(q2, k5, v5, causal=True)
for name, out in {"torch": by_torch, "headwise": by_headwise}.items():
    print(f"{name:9} keys visible to the two queries: {(out[0, 0] > 0).sum(-1).tolist()}")

# %% question: Two new words attend to five, and both calls are causal. Why can the last word attend to 2 keys in torch's kernel and to 5 in headwise?
# Causal means "no later key". With T = 2 and S = 5, one must also say which query is at the position of which
# key. torch's `is_causal` aligns the *first* query with the first key, headwise the *last* query with the
# last key, which generation needs, since new words come at the end. With T = S both are the same, so a test
# with equal lengths does not show the difference.

# %% question: In float32 the five outputs differ in the last digits. Which one is right?
# None of them exactly: they add the same numbers in different orders, and each order rounds differently. That
# is why we compare in float64, where such differences shrink to about $10^{-16}$. The difference caused by a
# mistake is as large in float64 as in float32.
