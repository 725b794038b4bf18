"""The cost of a head.

idea: the cost of projections grows with the length of a text, that of weights with its square
minutes: 9
level: data scientist
repairs: softmax over the whole map; divided by another row's sum
"""

# %% [markdown]
# Courses say that "all heads compute simultaneously", as if heads cost nothing. Each head costs work
# (multiplications and additions, FLOPs), memory and time. Let there be $H$ heads of width $d$ and $T$ tokens,
# with $d_\text{model} = H d$. A product of a $[n, m]$ and an $[m, p]$ matrix counts as $2nmp$ FLOPs:
#
# | step | FLOPs, all heads | numbers computed |
# |---|---|---|
# | four projections | $8 \, T \, d_\text{model}^2$ | $4 \, T \, d_\text{model}$ |
# | scores $QK^\top$ | $2 \, T^2 d_\text{model}$ | $H \, T^2$ |
# | weights times $V$ | $2 \, T^2 d_\text{model}$ | $T \, d_\text{model}$ |
#
# Each head accounts for $1/H$ of each row of the table. With $d_\text{model}$ fixed, the FLOPs do not depend
# on the number of heads. The numbers computed do: each head has its own $T^2$ weights.
#
# To check these formulas, the next cell counts while torch computes:

# %%
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import headwise as hw

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, nn.functional.linear)


class Meter(TorchFunctionMode):
    """Counts FLOPs of matrix products, and the numbers in the largest result."""

    flops, largest = 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.flops += 2 * out.numel() * args[0].shape[-1]
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as in textbooks, with the whole matrix."""
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1)  # [B, H, T, T]
    return weights @ v  # [B, H, T, D]


torch.manual_seed(0)
d_model, num_heads = 128, 4
mha = hw.MultiHeadAttention(d_model, num_heads, bias=False).eval().requires_grad_(False)
projections = (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj)
for T in (64, 256, 1024):
    x = torch.randn(1, T, d_model)
    q = x.view(1, T, num_heads, -1).transpose(1, 2)  # [B, H, T, D]
    with Meter() as projecting:
        for projection in projections:
            projection(x)
    with Meter() as attending:
        attend(q, q, q)
    assert projecting.flops == 8 * T * d_model**2 and attending.flops == 4 * T**2 * d_model
    assert attending.largest == num_heads * T**2
    print(
        f"T = {T:4}: MFLOPs of projections {projecting.flops / 1e6:5.1f}, of attention {attending.flops / 1e6:5.1f}"
    )

narrow = x.view(1, T, 16, -1).transpose(1, 2)  # [B, H, T, D]: 16 heads instead of 4
with Meter() as more_heads:
    attend(narrow, narrow, narrow)
assert more_heads.flops == attending.flops and more_heads.largest == 4 * attending.largest

# %% [markdown]
# ## The length at which the weights start to cost more
# The projections and the part that grows with $T^2$ need equal work if
# $8 T d_\text{model}^2 = 4 T^2 d_\text{model}$, that is at $T = 2 d_\text{model}$. With fewer heads of keys
# ($H_k$, lesson 15) projections cost less, and the two are equal at $T = d_\text{model} (1 + H_k / H)$. In a
# causal layer, a kernel that skips hidden pairs does half of the quadratic work, so the length is twice as
# large. For real models:

# %%
from headwise.nn.presets import find

for name in ("bert-base", "gpt2-small", "llama2-7b", "llama3-8b", "gpt3"):
    preset = find(name)
    length = round(preset.d_model * (1 + (preset.num_kv_heads or preset.num_heads) / preset.num_heads))
    print(f"{preset.title:11} {length:6,} tokens" + (f", causal {2 * length:6,}" if preset.causal else ""))
    if name == "llama3-8b":
        assert (length, 2 * length) == (5120, 10240)

# %% [markdown]
# This compares the quadratic part with the projections of attention only. A layer also has a feed-forward
# network, whose work grows with $T$ only. In Llama 3 8B it has three matrices of 4,096 x 14,336, so it costs
# $6 \, T \, d_\text{model} \, d_\text{ff}$ FLOPs. With it, the length is larger:

# %%
preset, d_ff = find("llama3-8b"), 14_336  # d_ff as published; presets have the sizes of attention only
assert preset.num_kv_heads is not None
per_token = 4 * preset.d_model**2 * (1 + preset.num_kv_heads / preset.num_heads) + 6 * preset.d_model * d_ff
length = round(per_token / (4 * preset.d_model))
print(f"{preset.title}, with feed-forward: {length:,} tokens, causal {2 * length:,}")
assert (length, 2 * length) == (26_624, 53_248)
for tokens in (1024, 8192, 131_072):
    quadratic = 2 * tokens * preset.d_model  # FLOPs per token, hidden pairs skipped
    print(f"{tokens:7,} tokens, causal: the quadratic part is {quadratic / (quadratic + per_token):.0%}")
assert round(100 * quadratic / (quadratic + per_token)) == 71

# %% [markdown]
# For a sentence or a page, the quadratic part is small. In a book of 131,072 tokens, it is 71% of the FLOPs
# of a causal layer of Llama 3 8B, and the projections and the feed-forward network are the rest.
#
# Is the same true of time? The next cell measures medians of repeated runs on the machine that ran this page:

# %%
import time
from statistics import median

import matplotlib.pyplot as plt


def seconds(call, repeats: int = 5) -> float:
    call()  # warm up
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


lengths = [64, 128, 256, 512, 1024]
measured = {"four projections": [], "attention, with the matrix": [], "attention, headwise": []}
for T in lengths:
    x = torch.randn(1, T, d_model)
    q = x.view(1, T, num_heads, -1).transpose(1, 2).contiguous()  # [B, H, T, D]
    measured["four projections"].append(seconds(lambda x=x: [projection(x) for projection in projections]))
    measured["attention, with the matrix"].append(seconds(lambda q=q: attend(q, q, q)))
    measured["attention, headwise"].append(seconds(lambda q=q: hw.attention(q, q, q)))

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained")
left.plot(
    lengths, [8 * T * d_model**2 / 1e6 for T in lengths], "o-", color="tab:blue", label="four projections"
)
left.plot(lengths, [4 * T**2 * d_model / 1e6 for T in lengths], "o-", color="tab:red", label="attention")
left.axvline(2 * d_model, color="0.5", linestyle="--", linewidth=1)
left.annotate(f"2 d_model = {2 * d_model}", (2 * d_model * 1.06, 4.2), color="0.35")
left.set(ylabel="million FLOPs", title="work")
unit = measured["four projections"][0]
for (name, times), color in zip(measured.items(), ("tab:blue", "tab:red", "tab:purple"), strict=True):
    right.plot(lengths, [t / unit for t in times], "o-", color=color, label=name)
right.set(ylabel="time / projections of 64 tokens", title="time on this machine")
for ax in (left, right):
    ax.set(xscale="log", yscale="log", xlabel="tokens")
    ax.set_xticks(lengths, [str(T) for T in lengths])
    ax.minorticks_off()
    ax.legend()
figure.suptitle(f"Cost of one layer of {num_heads} heads, d_model = {d_model}")
for name, times in measured.items():
    print(f"{name}: {lengths[-1]} tokens take {times[-1] / times[-2]:.1f} times as long as {lengths[-2]}")

# %% [markdown]
# FLOPs are exact, times depend on the machine: small products do not use all units of the processor, and a
# matrix larger than the processor's cache is slow to write and read. So the matrix can cost more time than
# its FLOPs suggest, and a kernel that never writes it can be faster with the same number of FLOPs.
#
# ## Memory: 131,072 tokens
# The weights are the largest tensor that a layer can compute. For one sequence, 32 heads, in bfloat16:

# %%
T, heads, width = 131_072, 32, 4096
matrix, output = heads * T**2 * 2, T * width * 2  # bytes
print(f"weights [1, {heads}, {T:,}, {T:,}]: {matrix / 2**30:,.0f} GiB per layer")
print(f"output of that layer: {output / 2**30:.0f} GiB")
assert matrix == 1024 * output

# %% [markdown]
# For one layer, the weights are 1,024 times as large as its output, too large for the memory of any GPU. One
# row of weights needs only its query and the keys, so headwise returns a map that computes the rows you ask
# for. The next cell makes a map of two heads over 131,072 tokens on this machine:

# %%
q, k = torch.randn(2, 1, 2, T, 16)  # [B, H, T, D] each
weights = hw.AttentionMap(q, k)  # nothing is computed yet
row = weights[0, 1, 70_000]  # [T]: the weights of one query of one head
print(weights, "one row sums to", round(row.sum().item(), 4))
try:
    weights.dense()
except hw.errors.BudgetExceeded as error:
    print("the whole matrix:", str(error).split(";")[0])

# %% [markdown]
# On a GPU (NVIDIA H200; "Benchmarks" in the documentation), statistics of all 32 heads over 16,384 tokens
# took 26 MiB and 6.27 ms; with the matrix they took 80 GiB and 200 ms.
#
# ## What a pruned head saves
# Pruning a head removes its rows of $W_Q$, $W_K$, $W_V$ and its columns of $W_O$, its share of the work, and
# its keys and values in the cache. The next cell prunes two heads of mini, the small model inside headwise:

# %%
model, _, _ = hw.models.load("mini")


def cache_bytes() -> list[int]:
    """Return the bytes of keys and values that each layer stores per token."""
    return [layer.attention.cache(batch=1, max_length=100).nbytes // 100 for layer in model.decoder.layers]


parameters, cache = sum(p.numel() for p in model.parameters()), cache_bytes()
print(hw.prune(model, [(1, 0), (2, 3)]))
saved = parameters - sum(p.numel() for p in model.parameters())
assert saved == 2 * 4 * 224 * 32  # heads, matrices, d_model, width of a head
assert round(100 * saved / parameters, 1) == 0.9
print("bytes of cache per token, by layer:", cache, "->", cache_bytes())

# %% [markdown]
# Two of 56 heads are 4% of the heads and 0.9% of the parameters: embeddings and feed-forward networks stay as
# they are. Where heads share keys and values, pruning a query head saves no cache unless its whole group is
# pruned.
#
# Which head is pruned matters. In mini, 48 of 56 heads were switched off one at a time. For 44 of them the
# loss (3.79 nats) rises by at most 0.038, for the worst by 0.075 ("What heads do, measured" in the
# documentation). "If one fails, others compensate" is true of many heads, not of all.
#
# The exercise saves memory by computing a few queries at a time. Each row of weights is independent of the
# others, so the result is the same and needs only a small part of the matrix.

# %% exercise: attend_in_chunks
"""Attention for a few queries at a time."""

import torch
from torch import Tensor


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 2) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv].

    Stores the weights of at most `chunk` queries at a time.
    """
    raise NotImplementedError  # for each chunk of queries: scores, weights, output; then concatenate


# %% hint: idea
# A row of weights needs its own query and all keys, but no other query. So the rows can be computed a few
# at a time, and each chunk of weights is dropped before the next. Cut the queries only: the softmax needs
# all keys.

# %% hint: formula
# $$\text{out}_t = \sum_s w_{ts} v_s, \qquad w_t = \text{softmax}\left(\frac{q_t K^\top}{\sqrt{D}}\right)$$
#
# Row $t$ of the output contains query $t$ and no other.

# %% hint: code
# 1. Cut the queries along their axis `T`, the last but one, into pieces of `chunk` (`Tensor.split`); the
#    last piece may be shorter.
# 2. For each piece: `scores` `[.., chunk, S]`, softmax over the keys, times the values: `[.., chunk, Dv]`.
#    Append it to a list.
# 3. Return the pieces of the list, concatenated along the same axis: `[.., T, Dv]`.

# %% solution
"""Attention for a few queries at a time."""

import torch
from torch import Tensor


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 2) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv].

    Stores the weights of at most `chunk` queries at a time.
    """
    parts = []
    for queries in q.split(chunk, dim=-2):  # [.., chunk, D]; the last may be shorter
        scores = queries @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # [.., chunk, S]
        parts.append(scores.softmax(dim=-1) @ v)  # [.., chunk, Dv]
    return torch.cat(parts, dim=-2)  # [.., T, Dv]


# %% try
q, k, v = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 3)  # 2 sequences, T = 5, S = 7
print("output:", tuple(attend_in_chunks(q, k, v).shape), "expected: (2, 5, 3)")

# %% [markdown]
# Chunks need less memory, but the same work:

# %%
q, k, v = torch.randn(3, 1, 4, 1000, 64)  # [B, H, T, D] each
with Meter() as textbook:
    expected = attend(q, k, v)
with Meter() as in_chunks:
    output = attend_in_chunks(q, k, v, chunk=16)
assert torch.allclose(output, expected, atol=1e-5)
assert in_chunks.flops == textbook.flops
assert in_chunks.largest == output.numel()  # the weights are smaller than the output
print(f"largest result: {textbook.largest:,} numbers; in chunks {in_chunks.largest:,}, the output itself")

# %% question: At what length does a layer of Llama 3 8B start to do more work for its weights than for its projections?
# From 5,120 tokens on, if every key is visible: $d_\text{model} (1 + H_k / H) = 4096 \cdot (1 + 8/32)$. Llama
# 3 8B is causal, so a kernel that skips hidden pairs does half of that work, and the length is 10,240 tokens
# (computed above). With the feed-forward network counted on the side of the projections, the lengths are
# 26,624 and 53,248 tokens. For shorter texts, leaving out pairs can save less than half of the layer's work.

# %% question: Attention in chunks never stores the T x T matrix. Is its cost linear in the length?
# Its memory is linear: chunk times T numbers at a time, and even fewer if the keys are cut into chunks, too.
# Its work is not linear: every query is still compared with every key, $4 T^2 d_\text{model}$ FLOPs as
# before. Only leaving out pairs, with a window for example, makes the work linear, and that computes a
# different function.

# %% [markdown]
# You now know what a head is, what it does, and what it costs. To look at the heads of your own model:
# `headwise look "a sentence" --model NAME`.
