"""The cost of a head.

idea: projections grow with the length of a text and weights with its square, so find where the two cross
minutes: 9
level: data scientist
repairs: softmax over the whole map; divided by another row's sum
"""

# %% [markdown]
# "All heads compute simultaneously", course pages say, and it sounds as if heads were free. They run side by
# side, but each has its price, in three currencies: work (multiplications and additions, FLOPs), memory, and
# time. For $H$ heads of width $d$ over $T$ tokens, with $d_\text{model} = H d$ and a product of a $[n, m]$
# and an $[m, p]$ matrix counted as $2nmp$:
#
# | step | FLOPs, all heads | numbers made |
# |---|---|---|
# | four projections | $8 \, T \, d_\text{model}^2$ | $4 \, T \, d_\text{model}$ |
# | scores $QK^\top$ | $2 \, T^2 d_\text{model}$ | $H \, T^2$ |
# | mix, weights times $V$ | $2 \, T^2 d_\text{model}$ | $T \, d_\text{model}$ |
#
# One head costs one $H$th of each row. Note what is not there: with $d_\text{model}$ fixed, more heads are no
# more FLOPs. They are more maps.
#
# Formulas are easily written. So here is a meter that watches torch at work, and counts:

# %%
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import headwise as hw

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, nn.functional.linear)


class Meter(TorchFunctionMode):
    """FLOPs of matrix products, and the most numbers in any one result."""

    flops, largest = 0, 0

    def __torch_function__(self, function, types, given=(), options=None):
        made = function(*given, **(options or {}))
        if function in PRODUCTS:
            self.flops += 2 * made.numel() * given[0].shape[-1]
        if isinstance(made, Tensor):
            self.largest = max(self.largest, made.numel())
        return made


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook's way, with the whole matrix."""
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1)  # [B, H, T, T]
    return weights @ v  # [B, H, T, D]


torch.manual_seed(0)
d_model, num_heads = 128, 4
mha = hw.MultiHeadAttention(d_model, num_heads, bias=False).eval().requires_grad_(False)
four = (mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj)
for T in (64, 256, 1024):
    x = torch.randn(1, T, d_model)
    q = x.view(1, T, num_heads, -1).transpose(1, 2)  # [B, H, T, D]
    with Meter() as projecting:
        for one in four:
            one(x)
    with Meter() as attending:
        attend(q, q, q)
    assert projecting.flops == 8 * T * d_model**2 and attending.flops == 4 * T**2 * d_model
    assert attending.largest == num_heads * T**2
    print(
        f"T = {T:4}: projections {projecting.flops / 1e6:5.1f} MFLOPs, attending {attending.flops / 1e6:5.1f}"
    )

narrow = x.view(1, T, 16, -1).transpose(1, 2)  # [B, H, T, D]: 16 heads instead of 4
with Meter() as more_heads:
    attend(narrow, narrow, narrow)
assert more_heads.flops == attending.flops and more_heads.largest == 4 * attending.largest

# %% [markdown]
# ## Where the square takes over
#
# Both parts are equal at $8 T d_\text{model}^2 = 4 T^2 d_\text{model}$, that is at $T = 2 d_\text{model}$.
# With fewer heads of keys ($H_k$, lesson 15) projections are cheaper, and it comes earlier: at
# $T = d_\text{model} (1 + H_k / H)$. A causal layer whose kernel leaves out what is hidden does half of the
# square, and it comes at twice that length. For real models:

# %%
from headwise.nn.presets import find

for name in ("bert-base", "gpt2-small", "llama2-7b", "llama3-8b", "gpt3"):
    one = find(name)
    crossing = round(one.d_model * (1 + (one.num_kv_heads or one.num_heads) / one.num_heads))
    print(f"{one.title:11} {crossing:6,} tokens" + (f", causal {2 * crossing:6,}" if one.causal else ""))
    if name == "llama3-8b":
        assert (crossing, 2 * crossing) == (5120, 10240)

# %% [markdown]
# So for a sentence or a page the famous square does not matter: projections are what is paid for (and the
# feed-forward network, which is not even in this count). For a book it is nearly all that the layer pays for.
#
# Is it so in time, too? Medians of repeated runs, as multiples of the shortest projections:

# %%
import time
from statistics import median

import matplotlib.pyplot as plt


def seconds(call, repeats: int = 5) -> float:
    call()  # the first is slower
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)


lengths = [64, 128, 256, 512, 1024]
measured = {"four projections": [], "attending, with the matrix": [], "attending, headwise": []}
for T in lengths:
    x = torch.randn(1, T, d_model)
    q = x.view(1, T, num_heads, -1).transpose(1, 2).contiguous()  # [B, H, T, D]
    measured["four projections"].append(seconds(lambda x=x: [one(x) for one in four]))
    measured["attending, with the matrix"].append(seconds(lambda q=q: attend(q, q, q)))
    measured["attending, headwise"].append(seconds(lambda q=q: hw.attention(q, q, q)))

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained")
left.plot(
    lengths, [8 * T * d_model**2 / 1e6 for T in lengths], "o-", color="tab:blue", label="four projections"
)
left.plot(lengths, [4 * T**2 * d_model / 1e6 for T in lengths], "o-", color="tab:red", label="attending")
left.axvline(2 * d_model, color="0.5", linestyle="--", linewidth=1)
left.annotate(f"2 d_model = {2 * d_model}", (2 * d_model * 1.06, 4.2), color="0.35")
left.set(ylabel="million FLOPs", title="work, counted")
unit = measured["four projections"][0]
for (name, taken), color in zip(measured.items(), ("tab:blue", "tab:red", "tab:purple"), strict=True):
    right.plot(lengths, [one / unit for one in taken], "o-", color=color, label=name)
right.set(ylabel="times the shortest projections", title="time, measured here")
for ax in (left, right):
    ax.set(xscale="log", yscale="log", xlabel="tokens")
    ax.set_xticks(lengths, [str(T) for T in lengths])
    ax.minorticks_off()
    ax.legend()
figure.suptitle(f"One layer of {num_heads} heads, d_model = {d_model}: twice the tokens, what it costs")
for name, taken in measured.items():
    print(f"{name}: from {lengths[-2]} to {lengths[-1]} tokens {taken[-1] / taken[-2]:.1f} times as long")

# %% [markdown]
# Work is counted exactly, time is not: small products do not fill a machine, and a matrix that does not fit
# the processor's cache is slow to write and to read again. So the matrix can cost more than its FLOPs say,
# and a kernel that never writes it can be faster although it computes the same.
#
# ## Memory: 131,072 tokens
#
# Weights are the largest thing a layer can make. For one sequence, 32 heads, in bfloat16:

# %%
T, heads, width = 131_072, 32, 4096
matrix, output = heads * T**2 * 2, T * width * 2  # bytes
print(f"weights [1, {heads}, {T:,}, {T:,}]: {matrix / 2**30:,.0f} GiB a layer")
print(f"output of that layer: {output / 2**30:.0f} GiB")
assert matrix == 1024 * output

# %% [markdown]
# A thousand times its own result, for one layer. Nobody stores that. A row of weights needs only its query
# and the keys, so headwise makes a map that computes what you look at. Here are two heads over 131,072
# tokens, on this machine:

# %%
q, k = torch.randn(2, 1, 2, T, 16)  # [B, H, T, D] each
weights = hw.AttentionMap(q, k)  # nothing is computed yet
row = weights[0, 1, 70_000]  # [T]: what one query of one head looks at
print(weights, "one row sums to", round(row.sum().item(), 4))
try:
    weights.dense()
except hw.errors.BudgetExceeded as error:
    print("the whole:", str(error).split(";")[0])

# %% [markdown]
# On a GPU the same holds for all of it: statistics of 32 heads over 16,384 tokens took 26 MiB beside the 80
# GiB of the matrix, and 6.27 ms beside 200 ms (NVIDIA H200; the documentation's "Benchmarks").
#
# ## What a pruned head saves
#
# A head that is taken out takes its rows of $W_Q$, $W_K$, $W_V$ and its columns of $W_O$ along, its share of
# the work, and its keys and values in the cache. In mini, the small model inside headwise:

# %%
model, _, _ = hw.models.load("mini")


def kept_by_layer() -> list[int]:
    """Bytes of keys and values that each layer keeps per token."""
    return [layer.attention.cache(batch=1, max_length=100).nbytes // 100 for layer in model.decoder.layers]


before, kept = sum(p.numel() for p in model.parameters()), kept_by_layer()
print(hw.prune(model, [(1, 0), (2, 3)]))
saved = before - sum(p.numel() for p in model.parameters())
assert saved == 2 * 4 * 256 * 32  # heads, matrices, d_model, width of a head
assert round(100 * saved / before, 1) == 1.7
print("bytes kept per token, by layer:", kept, "->", kept_by_layer())

# %% [markdown]
# Two of 32 heads are 6% of the heads and 1.7% of the parameters: embeddings and feed-forward networks stay as
# they are. And where heads share keys and values, a head of queries saves nothing of the cache, unless its
# whole group goes.
#
# Which head goes matters more than how many. In mini 22 of 32 heads, each switched off alone, raise the loss by
# at most 0.035 nats (it is 3.50); the worst raises it by 0.57 ("What heads do, measured" in the documentation).
# "If one fails, others compensate" holds for many heads and not for all.
#
# The exercise is the oldest of all savings: not all queries at once. Every row of weights stands alone, so a
# few queries at a time give the same result, with a small part of the matrix.

# %% exercise: attend_in_chunks
"""Attention for a few queries at a time."""

import torch
from torch import Tensor


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 2) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv].

    Never more than the weights of `chunk` queries at a time.
    """
    raise NotImplementedError  # for each few queries: scores, shares, mix; then all of them, one after another


# %% solution
"""Attention for a few queries at a time."""

import torch
from torch import Tensor


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 2) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv].

    Never more than the weights of `chunk` queries at a time.
    """
    parts = []
    for few in q.split(chunk, dim=-2):  # [.., chunk, D], the last one may be shorter
        scores = few @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # [.., chunk, S]
        parts.append(scores.softmax(dim=-1) @ v)  # [.., chunk, Dv]
    return torch.cat(parts, dim=-2)  # [.., T, Dv]


# %% [markdown]
# The meter sees the difference, in memory and not in work:

# %%
q, k, v = torch.randn(3, 1, 4, 1000, 64)  # [B, H, T, D] each
with Meter() as whole:
    expected = attend(q, k, v)
with Meter() as in_chunks:
    found = attend_in_chunks(q, k, v, chunk=16)
assert torch.allclose(found, expected, atol=1e-5)
assert in_chunks.flops == whole.flops
assert in_chunks.largest == found.numel()  # the output itself: weights are smaller now
print(f"largest result: {whole.largest:,} numbers; in chunks {in_chunks.largest:,}, the output itself")

# %% question: From which length on does a layer of Llama 3 8B do more work for its weights than for its projections?
# From 5,120 tokens on where every key is seen: $d_\text{model} (1 + H_k / H) = 4096 \cdot (1 + 8/32)$. It is
# causal, so a kernel that skips what is hidden does half, and the crossing is at 10,240 tokens (computed
# above). Below that, making attention faster by leaving out pairs can save less than half of the layer's
# work.

# %% question: Attention in chunks never makes the T x T matrix. Is its cost linear in the length, then?
# Its memory is: chunk times T numbers at a time, and with chunks of keys as well not even that. Its work is
# not: every query still meets every key, $4 T^2 d_\text{model}$ FLOPs as before. Only what leaves out pairs,
# a window for example, makes the work linear, and that is another function of the inputs.

# %% [markdown]
# You now know what a head is, what it does, and what it costs: look at those of a model of your own, with
# `headwise look "a sentence" --model NAME`.
