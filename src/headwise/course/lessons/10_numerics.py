"""Attention in 16 bits.

idea: numbers of 16 bits overflow and round; four rules keep attention accurate
minutes: 9
level: data scientist
repairs: dropout in eval; softmax overflows
"""

# %% [markdown]
# Models are trained and run in 16 bits: they need half the memory, and GPUs have special units for them.
# There are two formats of 16 bits:

# %%
import torch
import torch.nn.functional as F

import headwise as hw

torch.manual_seed(0)
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    info = torch.finfo(dtype)
    print(f"{dtype!s:15} largest {info.max:8.1e}   step above 1: {info.eps:.1e}")

# %% [markdown]
# float16 has a small range: numbers beyond 65504 become infinity. bfloat16 has the range of float32, but only
# two to three digits. To measure the error of a result, we compute it again in **float64**, from the same
# rounded inputs, and compare. headwise's tests do the same.
#
# ## Scores overflow
# In the next cell one channel of all queries and keys has a large value, 300. It adds the same number,
# $300 \cdot 300$, to all scores of a row, so it should change *no weight at all* (lesson 2).

# %%
D = 64
q, k = torch.randn(2, 8, D, dtype=torch.float64).unbind(0)  # [T, D], [S, D]
q, k = q.bfloat16().double(), k.bfloat16().double()  # numbers that both formats of 16 bits can represent
q[:, 0], k[:, 0] = 300.0, 300.0
truth = (q @ k.T / D**0.5).softmax(-1)  # [T, S], in float64
without = (q[:, 1:] @ k[:, 1:].T / D**0.5).softmax(-1)  # without the large channel
assert torch.allclose(truth, without)

q16, k16 = q.half(), k.half()
scores = {
    "float16, then scaled": q16 @ k16.T / D**0.5,
    "float16, q scaled before": (q16 / D**0.5) @ k16.T,
    "bfloat16, then scaled": q.bfloat16() @ k.bfloat16().T / D**0.5,
    "float16 in, float32 scores": q16.float() @ k16.float().T / D**0.5,
}
errors = {name: float((s.softmax(-1).double() - truth).abs().max()) for name, s in scores.items()}
for name, s in scores.items():
    print(f"{name:27} largest score {float(s.max()):9.1f}   largest error of a weight {errors[name]:.4f}")
_, weights = hw.attention(q16[None, None], k16[None, None], k16[None, None])  # [B=1, H=1, ..], all in float16
errors["headwise"] = float((weights[0, 0].double() - truth).abs().max())
print(f"{'headwise, float16':51}   largest error of a weight {errors['headwise']:.4f}")
assert scores["float16, then scaled"].softmax(-1).isnan().all()
assert errors["float16, q scaled before"] > 0.01 > errors["float16 in, float32 scores"]
assert errors["headwise"] < 0.01

# %% [markdown]
# - If we divide *after* the product, all scores are infinite and all weights NaN: $\infty - \infty$ is not a
#   number.
# - If we divide q *before* the product, nothing overflows, but the weights are wrong: near 11,000, the
#   numbers of float16 are 8 apart, and the small differences that matter are rounded away.
# - With the same inputs, scores in float32 are right. Fused kernels do this: inputs in 16 bits, scores in 32
#   bits.
#
# ## Subtract the maximum
# Exponentials overflow in float32, too: $e^{89}$ is infinite. Subtracting a number from all scores of a row
# does not change the softmax. The largest score is subtracted, so that the largest term is $e^0 = 1$ and
# nothing overflows:
#
# $$\frac{e^{s_j}}{\sum_i e^{s_i}} = \frac{e^{s_j - m}}{\sum_i e^{s_i - m}}, \qquad m = \max_i s_i$$

# %%
s = torch.tensor([88.0, 89.0, 90.0])
naive = s.exp() / s.exp().sum()
stable = (s - s.max()).exp() / (s - s.max()).exp().sum()
print("naive  ", naive.tolist())
print("stable ", [round(w, 4) for w in stable.tolist()])
assert naive.isnan().any() and torch.allclose(stable.double(), s.double().softmax(-1))

# %% [markdown]
# ## What to fill hidden scores with
# Course code often fills hidden scores with `-1e9`. float16 has no such number, and torch raises an error.
# `float("-inf")` exists in every format. Its disadvantage is the empty row of lesson 7.

# %%
scores = torch.zeros(2, 2, dtype=torch.float16)
hidden = torch.tensor([[False, True], [False, False]])
try:
    scores.masked_fill(hidden, -1e9)
except RuntimeError as error:
    print("-1e9:", error)
print("-inf:", scores.masked_fill(hidden, -torch.inf).softmax(-1).tolist())
print("-1e4 hides the key:", scores.masked_fill(hidden, -1e4).softmax(-1)[0].tolist())
low_scores = torch.tensor([-1.5e4, 0.0], dtype=torch.float16)  # a row whose visible score is very low
weights = low_scores.masked_fill(hidden[0], -1e4).softmax(-1)
print("-1e4 does not hide it:", weights.tolist())
assert weights[1] == 1  # the hidden key has all the weight

# %% [markdown]
# Smaller numbers such as `-1e4` fit, but hide a key only if all visible scores are well above them.
#
# ## Sums: accumulate in float32
# A float16 sum of ones stops growing at 2048: above 2048 the numbers are 2 apart, so 2048 + 1 is rounded to
# 2048. Softmax and the weighted mean of values are sums over all keys. The next cell computes attention as a
# kernel does, one key after the other, with running sums in 16 bits and in float32. The inputs are the same
# 16-bit numbers.

# %%
total = torch.tensor(1.0, dtype=torch.float16)
for _ in range(3000):
    total = total + 1
print("1 added 3000 times to 1, in float16:", float(total))
assert total == 2048


def attend(s, v, sum_dtype):
    """s [T, S], v [S, D] -> [T, D], with running sums of dtype `sum_dtype`."""
    e = (s - s.amax(-1, keepdim=True)).exp().to(sum_dtype)  # [T, S]
    total = torch.zeros(len(s), 1, dtype=sum_dtype)
    weighted = torch.zeros(len(s), v.shape[1], dtype=sum_dtype)
    for j in range(len(v)):
        total = total + e[:, j : j + 1]
        weighted = weighted + e[:, j : j + 1] * v[j].to(sum_dtype)
    return weighted / total


runs = {
    "bfloat16 throughout": (torch.bfloat16, torch.bfloat16),
    "float16 throughout": (torch.float16, torch.float16),
    "bfloat16, sums in float32": (torch.bfloat16, torch.float32),
    "float16, sums in float32": (torch.float16, torch.float32),
}
lengths = [16, 64, 256, 1024, 4096]
errors = {name: [] for name in runs}
for S in lengths:
    scores, values = torch.randn(4, S), 1 + torch.randn(S, 16)  # [T, S], [S, D]
    for name, (dtype, sum_dtype) in runs.items():
        s, v = scores.to(dtype), values.to(dtype)
        truth = s.double().softmax(-1) @ v.double()  # [T, D], from the same rounded inputs
        errors[name].append(float((attend(s, v, sum_dtype).double() - truth).norm() / truth.norm()))

# %%
import matplotlib.pyplot as plt

figure, ax = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
for (name, line), style in zip(errors.items(), ["o-", "s-", "o--", "s--"], strict=True):
    ax.loglog(lengths, line, style, color="#b2182b" if "throughout" in name else "#2166ac", label=name)
ax.set_xticks(lengths, [str(S) for S in lengths])
ax.set_xlabel("keys")
ax.set_ylabel("relative error of the output")
ax.set_title("Error of attention with running sums in 16 and 32 bits", fontsize=11)
ax.legend(fontsize=8)
for dtype in ("float16", "bfloat16"):
    assert errors[f"{dtype} throughout"][-1] > 1000 * errors[f"{dtype}, sums in float32"][-1]

# %% [markdown]
# With sums in 16 bits (red) the error grows with the length. With sums in float32 (blue) only the rounding
# errors of single terms remain; over many terms they average out, and the error even falls. At 4,096 keys the
# factor between the two is over a thousand.
#
# ## Dropout
# In training, *dropout* sets each weight to 0 with probability p and divides the others by $1 - p$. The mean
# over many draws stays the same. In one draw, a row need not sum to 1, and a weight can be larger than 1.
# Dropout comes after the softmax; the weights are not normalised again.

# %%
p = 0.3
weights = torch.tensor([0.85, 0.1, 0.05])
draws = F.dropout(weights.expand(20_000, 3), p)  # [draws, S]
print("one draw:", [round(w, 2) for w in draws[0].tolist()], " sum", round(float(draws[0].sum()), 2))
print("mean of all:", [round(w, 2) for w in draws.mean(0).tolist()])
assert draws.max() > 1 and torch.allclose(draws.mean(0), weights, atol=0.02)

figure, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
sums, counts = draws.sum(-1).round(decimals=2).unique(return_counts=True)
ax.bar(sums, counts / len(draws), width=0.03, color="#67a9cf")
ax.axvline(1, color="0.4", linestyle=":")
ax.text(1.01, 0.32, "without dropout", color="0.4", fontsize=9)
ax.set_xlabel("sum of the weights 0.85, 0.10, 0.05 in one draw")
ax.set_ylabel("fraction of draws")
ax.set_title("With dropout 0.3 a row does not sum to 1", fontsize=11)

# %% [markdown]
# In evaluation dropout must be off: the same input must give the same output. A module `nn.Dropout` is
# switched off by `.eval()`. *Functions* are not: `F.dropout(w, 0.1)` and `F.scaled_dot_product_attention(..,
# dropout_p=0.1)` always drop weights, in evaluation as well.

# %%
x = torch.randn(1, 4, 6, 16)  # [B, H, T, D]
first, second = (F.scaled_dot_product_attention(x, x, x, dropout_p=0.1) for _ in range(2))
assert not torch.equal(first, second)  # dropout although nothing is trained

mha = hw.MultiHeadAttention(d_model=16, num_heads=4, dropout=0.1)
y = torch.randn(1, 6, 16)
output, weights = mha(y)
assert torch.allclose(
    weights.sum(-1), torch.ones(1, 4, 6), atol=1e-5
)  # the map has the weights before dropout
assert not torch.equal(output, mha(y)[0])  # two draws
mha.eval()
assert torch.equal(mha(y)[0], mha(y)[0])
print("training: two runs differ; evaluation: two runs agree")

# %% exercise: SteadyAttention
"""Multi-head attention that is accurate in 16 bits, with dropout of its weights."""

import torch
from torch import Tensor, nn


class SteadyAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v, self.w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        """[B, L, E] -> [B, H, L, D]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, H, T, D], k, v [B, H, S, D], mask bool [B, 1, T, S], True = may attend -> [B, H, T, D]."""
        raise NotImplementedError  # scores in at least float32, mask, softmax, dropout, values

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """query [B, T, E], key and value [B, S, E] -> [B, T, E]."""
        q, k, v = self.split(self.w_q(query)), self.split(self.w_k(key)), self.split(self.w_v(value))
        return self.w_o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


# %% hint: idea
# In 16 bits, scores overflow and sums are rounded. So compute scores and softmax in at least float32, and
# convert the weights to the values' format only for the last product. Dropout comes after the softmax, and
# as a module, so that `.eval()` switches it off.

# %% hint: formula
# $$w = \text{dropout}\left(\text{softmax}\left(\frac{q k^\top}{\sqrt{D}}\right)\right)$$
#
# $q$ and $k$ are converted *before* their product, since the product overflows. Scores of hidden keys are
# $-\infty$. The output is $w v$.

# %% hint: code
# 1. The wide dtype: float32, or float64 if the inputs are float64 (`torch.promote_types`).
# 2. `scores`: the product of `q` and `k` after both were converted, divided by the root of the width:
#    `[B, H, T, S]`.
# 3. If there is a mask: minus infinity where it is False.
# 4. `weights`: the softmax over the keys, then `self.dropout`.
# 5. Return the weights in the dtype of `v`, times `v`: `[B, H, T, D]`.

# %% solution
"""Multi-head attention that is accurate in 16 bits, with dropout of its weights."""

import torch
from torch import Tensor, nn


class SteadyAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v, self.w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        """[B, L, E] -> [B, H, L, D]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, H, T, D], k, v [B, H, S, D], mask bool [B, 1, T, S], True = may attend -> [B, H, T, D]."""
        wide = torch.promote_types(q.dtype, torch.float32)  # float32, or float64 for inputs in float64
        scores = q.to(wide) @ k.to(wide).transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, T, S]
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = self.dropout(scores.softmax(dim=-1))  # softmax subtracts the maximum itself
        return weights.to(v.dtype) @ v

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """query [B, T, E], key and value [B, S, E] -> [B, T, E]."""
        q, k, v = self.split(self.w_q(query)), self.split(self.w_k(key)), self.split(self.w_v(value))
        return self.w_o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


# %% try
module = SteadyAttention(d_model=24, num_heads=3).bfloat16()
x = torch.randn(2, 5, 24, dtype=torch.bfloat16)  # 2 sequences of 5 tokens
output = module(x, x, x)
print("output:", tuple(output.shape), output.dtype, "expected: (2, 5, 24) torch.bfloat16")

# %%
gap = torch.finfo(torch.bfloat16).eps
print(f"bfloat16: gap up to {gap:.1%}, one rounding up to {gap / 2:.1%}")

# %% question: A result in bfloat16 differs from the one in float32 by 0.4 %. Is there a bug?
# The difference alone cannot tell. bfloat16 numbers are up to 0.8 % apart, so one rounding can cause 0.4 %.
# Compute the true result in float64 *from the inputs as rounded to bfloat16*. Compare its difference from
# your result with its difference from plain code in bfloat16. An error of the same size is rounding. An error
# that is ten times larger, or grows with the length, is a bug.

# %% question: In training, somebody normalises the weights again after dropout, so that rows sum to 1. What changes?
# The mean over many draws is no longer right. If the large weight of a row is dropped, the small ones are
# scaled up to replace it; if all are dropped, the result is 0/0. $1 - p$, by contrast, does not depend on the
# draw: the mean of each weight stays the same, which is why evaluation can simply switch dropout off.
