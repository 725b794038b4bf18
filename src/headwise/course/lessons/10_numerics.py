"""Numbers that run out.

idea: the formula is exact, numbers of 16 bits are not, and four habits keep attention right in them
minutes: 9
level: data scientist
repairs: dropout in eval; softmax overflows
"""

# %% [markdown]
# Models are trained and run in 16 bits: half the memory, and GPUs have units of their own for it. There are two
# such kinds of number, and each gives up something else:

# %%
import torch
import torch.nn.functional as F

import headwise as hw

torch.manual_seed(0)
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    kind = torch.finfo(dtype)
    print(f"{dtype!s:15} largest {kind.max:8.1e}   step above 1: {kind.eps:.1e}")

# %% [markdown]
# float16 has a small range: beyond 65504 comes infinity. bfloat16 has the range of float32, but only two to three
# digits. How do we know how wrong a result is? We compute it once more in **float64**, from the same rounded
# inputs, and compare. float64 is the judge in all of headwise's tests, too.
#
# ## Scores overflow
# One channel of all queries and keys has a large value, 300. It adds the same number, $300 \cdot 300$, to all
# scores of a row, and softmax does not care about that: it should change *no weight at all*.

# %%
D = 64
q, k = torch.randn(2, 8, D, dtype=torch.float64).unbind(0)  # [T, D], [S, D]
q, k = q.bfloat16().double(), k.bfloat16().double()  # as both kinds of 16 bits can hold them
q[:, 0], k[:, 0] = 300.0, 300.0
truth = (q @ k.T / D**0.5).softmax(-1)  # [T, S], by float64
without = (q[:, 1:] @ k[:, 1:].T / D**0.5).softmax(-1)  # as if the large channel were not there
assert torch.allclose(truth, without)

h, g = q.half(), k.half()
ways = {
    "float16, then scaled": h @ g.T / D**0.5,
    "float16, q scaled before": (h / D**0.5) @ g.T,
    "bfloat16, then scaled": q.bfloat16() @ k.bfloat16().T / D**0.5,
    "float16 in, float32 scores": h.float() @ g.float().T / D**0.5,
}
errors = {name: float((s.softmax(-1).double() - truth).abs().max()) for name, s in ways.items()}
for name, s in ways.items():
    print(f"{name:27} largest score {float(s.max()):9.1f}   error of a weight {errors[name]:.4f}")
_, seen = hw.attention(h[None, None], g[None, None], g[None, None])  # [B=1, H=1, ..], all in float16
errors["headwise"] = float((seen[0, 0].double() - truth).abs().max())
print(f"{'headwise, float16':51}   error of a weight {errors['headwise']:.4f}")
assert ways["float16, then scaled"].softmax(-1).isnan().all()
assert errors["float16, q scaled before"] > 0.01 > errors["float16 in, float32 scores"]
assert errors["headwise"] < 0.01

# %% [markdown]
# - Divided *after* the product, all scores are infinite and all weights NaN: $\infty - \infty$ is no number.
# - Divided *before*, nothing overflows. It looks healed, and the weights are wrong: near 11,000 the numbers of
#   float16 are 8 apart, and the small differences that should decide fall between them.
# - The same inputs with scores in float32 are right. That is what fused kernels do: 16 bits in, 32 bits inside.
#
# ## Subtract the maximum
# Even float32 ends soon where an exponential is taken: $e^{89}$ is infinite. Softmax does not change when a number
# is subtracted from all scores of a row. Taken is the largest, so that the largest term is $e^0 = 1$ and nothing
# can overflow:
#
# $$\frac{e^{s_j}}{\sum_i e^{s_i}} = \frac{e^{s_j - m}}{\sum_i e^{s_i - m}}, \qquad m = \max_i s_i$$

# %%
s = torch.tensor([88.0, 89.0, 90.0])
naive = s.exp() / s.exp().sum()
careful = (s - s.max()).exp() / (s - s.max()).exp().sum()
print("naive  ", naive.tolist())
print("careful", [round(w, 4) for w in careful.tolist()])
assert naive.isnan().any() and torch.allclose(careful.double(), s.double().softmax(-1))

# %% [markdown]
# ## What to fill hidden scores with
# Course code often fills with `-1e9`. In float16 there is no such number, and torch refuses. `float("-inf")` exists
# in every kind of float. Its price is the empty row of lesson 7.

# %%
half = torch.zeros(2, 2, dtype=torch.float16)
hidden = torch.tensor([[False, True], [False, False]])
try:
    half.masked_fill(hidden, -1e9)
except RuntimeError as error:
    print("-1e9:", error)
print("-inf:", half.masked_fill(hidden, -torch.inf).softmax(-1).tolist())
print("-1e4 hides:", half.masked_fill(hidden, -1e4).softmax(-1)[0].tolist())
loud = torch.tensor([-1.5e4, 0.0], dtype=torch.float16)  # a row whose visible score is very low
leak = loud.masked_fill(hidden[0], -1e4).softmax(-1)
print("-1e4 leaks:", leak.tolist())
assert leak[1] == 1  # the hidden key has all the weight

# %% [markdown]
# Smaller numbers such as `-1e4` fit, and hide only as long as all true scores are well above them.
#
# ## Sums: accumulate in float32
# A sum in float16 stops growing. At 2048 numbers are 2 apart, so 2048 + 1 is 2048 again, as often as you like.
# Softmax and the mix of values are sums over all keys. Here is attention as a kernel computes it, one key after the
# other, once with running sums in 16 bits and once in float32. The inputs are the same 16-bit numbers both times.

# %%
one = total = torch.tensor(1.0, dtype=torch.float16)
for _ in range(3000):
    total = total + one
print("1 added 3000 times to 1, in float16:", float(total))
assert total == 2048


def attend(s, v, sums):
    """s [T, S], v [S, D] -> [T, D], with running sums of a given dtype."""
    e = (s - s.amax(-1, keepdim=True)).exp().to(sums)  # [T, S]
    total, mix = torch.zeros(len(s), 1, dtype=sums), torch.zeros(len(s), v.shape[1], dtype=sums)
    for j in range(len(v)):
        total = total + e[:, j : j + 1]
        mix = mix + e[:, j : j + 1] * v[j].to(sums)
    return mix / total


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
    for name, (dtype, sums) in runs.items():
        s, v = scores.to(dtype), values.to(dtype)
        judge = s.double().softmax(-1) @ v.double()  # [T, D], of the same rounded inputs
        errors[name].append(float((attend(s, v, sums).double() - judge).norm() / judge.norm()))

# %%
import matplotlib.pyplot as plt

figure, ax = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
for (name, line), style in zip(errors.items(), ["o-", "s-", "o--", "s--"], strict=True):
    ax.loglog(lengths, line, style, color="#b2182b" if "throughout" in name else "#2166ac", label=name)
ax.set_xticks(lengths, [str(S) for S in lengths])
ax.set_xlabel("keys")
ax.set_ylabel("error of the output, by float64")
ax.set_title("The longer the text, the more a 16-bit sum loses", fontsize=11)
ax.legend(fontsize=8)
for kind in ("float16", "bfloat16"):
    assert errors[f"{kind} throughout"][-1] > 1000 * errors[f"{kind}, sums in float32"][-1]

# %% [markdown]
# Red grows with the length, blue even falls: with sums in float32 only the roundings of the single terms are left,
# and of many terms these average out. The same 16-bit inputs, the same formula, and a factor of thousands.
#
# ## Dropout: numbers that run out on purpose
# In training, *dropout* sets each weight to 0 with probability p, and divides the others by $1 - p$. In the mean
# over many draws nothing changes; in one draw a row need not sum to 1, and a single weight can be larger than 1. It
# is done after the softmax, and nothing is renormalised.

# %%
p = 0.3
weights = torch.tensor([0.85, 0.1, 0.05])
draws = F.dropout(weights.expand(20_000, 3), p)  # [draws, S]
print("one draw:", [round(w, 2) for w in draws[0].tolist()], " sum", round(float(draws[0].sum()), 2))
print("mean of all:", [round(w, 2) for w in draws.mean(0).tolist()])
assert draws.max() > 1 and torch.allclose(draws.mean(0), weights, atol=0.02)

figure, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
sums, often = draws.sum(-1).round(decimals=2).unique(return_counts=True)
ax.bar(sums, often / len(draws), width=0.03, color="#67a9cf")
ax.axvline(1, color="0.4", linestyle=":")
ax.text(1.01, 0.32, "without dropout", color="0.4", fontsize=9)
ax.set_xlabel("sum of the weights 0.85, 0.10, 0.05 in one draw")
ax.set_ylabel("share of draws")
ax.set_title("With dropout 0.3 a row does not sum to 1", fontsize=11)

# %% [markdown]
# In evaluation dropout must be off: same input, same output. `nn.Dropout` made in `__init__` knows about `.eval()`.
# The *functions* do not, unless they are told: `F.dropout(w, 0.1)` drops always, and so does
# `F.scaled_dot_product_attention(.., dropout_p=0.1)`.

# %%
x = torch.randn(1, 4, 6, 16)  # [B, H, T, D]
once, again = (F.scaled_dot_product_attention(x, x, x, dropout_p=0.1) for _ in range(2))
assert not torch.equal(once, again)  # nobody is training here

mha = hw.MultiHeadAttention(d_model=16, num_heads=4, dropout=0.1)
y = torch.randn(1, 6, 16)
trained, seen = mha(y)
assert torch.allclose(seen.sum(-1), torch.ones(1, 4, 6), atol=1e-5)  # the map shows weights before dropout
assert not torch.equal(trained, mha(y)[0])  # two draws
mha.eval()
assert torch.equal(mha(y)[0], mha(y)[0])
print("training: two runs differ; evaluation: two runs agree")

# %% exercise: SteadyAttention
"""Multi-head attention that holds in 16 bits, with dropout on its weights."""

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
        raise NotImplementedError  # scores in at least float32, hidden ones out, shares, dropout, back, mix

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """query [B, T, E], key and value [B, S, E] -> [B, T, E]."""
        q, k, v = self.split(self.w_q(query)), self.split(self.w_k(key)), self.split(self.w_v(value))
        return self.w_o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


# %% solution
"""Multi-head attention that holds in 16 bits, with dropout on its weights."""

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
        wide = torch.promote_types(q.dtype, torch.float32)  # float32, or float64 if that came in
        scores = q.to(wide) @ k.to(wide).transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, T, S]
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = self.dropout(scores.softmax(dim=-1))  # softmax subtracts the maximum itself
        return weights.to(v.dtype) @ v

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """query [B, T, E], key and value [B, S, E] -> [B, T, E]."""
        q, k, v = self.split(self.w_q(query)), self.split(self.w_k(key)), self.split(self.w_v(value))
        return self.w_o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


# %%
gap = torch.finfo(torch.bfloat16).eps
print(f"bfloat16: gap up to {gap:.1%}, one rounding up to {gap / 2:.1%}")

# %% question: A result in bfloat16 differs from the one in float32 by 0.4 %. Is there a bug?
# That alone cannot tell. bfloat16 numbers are up to 0.8 % apart, so one rounding is worth up to 0.4 %. Compute the
# truth in float64 *from the inputs as bfloat16 has them*, and compare two errors: yours, and that of plain code in
# the same dtype. An error of the same size is rounding; one that is ten times larger, or grows with the length, is
# a bug.

# %% question: In training somebody renormalises the weights after dropout, so that rows sum to 1 again. What changes?
# Then dropout is no longer neutral in the mean. If the large weight of a row is dropped, the small ones are blown
# up to fill its place, and if all are dropped it is 0/0. Dividing by $1 - p$ is a fixed number that does not depend
# on the draw: in the mean each weight is what it was, which is why evaluation can simply switch dropout off.

# %% [markdown]
# **Next:** with float64 as the judge, lesson 11 writes the same attention in five ways and proves them equal.
