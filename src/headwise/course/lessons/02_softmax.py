"""Softmax and its axis.

idea: softmax turns scores into weights that sum to 1; the axis decides which weights are summed
minutes: 8
level: junior
without: softmax; log_softmax
repairs: own softmax over the wrong axis; own softmax overflows
"""

# %% [markdown]
# Lesson 1 gave every key a score. To combine the values of all keys, we need **attention weights**: none
# below 0, with sum 1, and larger for a key that fits better. Softmax computes them in two steps, an
# exponential and a division:
#
# $$w_s = \frac{e^{x_s}}{\sum_r e^{x_r}}$$

# %%
import torch

x = torch.tensor([2.0, 1.0, 0.0, -1.0])  # [S=4]: scores of four keys for one query
powers = x.exp()  # [S]: all positive
weights = powers / powers.sum()  # [S]: sum 1
assert torch.allclose(weights, torch.softmax(x, dim=0)) and torch.allclose(weights.sum(), torch.tensor(1.0))
for name, numbers in (("scores x", x), ("exp(x)", powers), ("weights", weights)):
    columns = " ".join(f"{number:6.2f}" for number in numbers.tolist())
    print(f"{name:9} {columns}   sum {numbers.sum():.2f}")

# %%
from matplotlib import pyplot as plt

figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.9))
for ax, heights, title in zip(axes, (x, powers, weights), ("scores x", "exp(x)", "weights"), strict=True):
    bars = ax.bar(["key 0", "key 1", "key 2", "key 3"], heights.tolist(), color="#6b1d81")
    ax.bar_label(bars, fmt="%.2f", padding=2)
    ax.axhline(0, color="#1f2430", lw=0.8)
    ax.margins(y=0.15)
    ax.set_title(f"{title}   (sum {heights.sum():.2f})")
figure.tight_layout()

# %% [markdown]
# The bars show the three lines that were printed. The scores are 1 apart; each weight is $e$ times the next:
# 0.64 for key 0, then 0.24, 0.09 and 0.03.
#
# Two properties matter:
#
# - **Adding a constant changes nothing.** If every score grows by 100, numerator and denominator both grow by
#   the factor $e^{100}$. Only differences count: a score that is 1 above another gets $e$ times its weight,
#   whatever the other scores are.
# - **Multiplying by a factor changes the weights.** Multiplied by 4, all differences are 4 times as large and
#   the largest weight grows. Multiplied by a quarter, the weights are nearly equal. That is why the scale of
#   lesson 1 matters.

# %%
exact = x.double()
assert torch.allclose(torch.softmax(exact + 100, 0), torch.softmax(exact, 0))
assert torch.allclose(weights[0] / weights[1], torch.e * torch.ones(()))
for factor in (0.25, 1, 4):
    print(f"{factor:5} x:", " ".join(f"{weight:.3f}" for weight in torch.softmax(factor * x, dim=0)))

# %% [markdown]
# ## Subtract the maximum
# The formula as written overflows: float32 cannot represent $e^{100}$. The cell prints the limits of float32
# and float16.

# %%
large = torch.tensor([100.0, 99.0, 98.0])
print("as written:         ", (large.exp() / large.exp().sum()).numpy())  # inf / inf
shifted = large - large.max()  # 0, -1, -2
print("maximum subtracted: ", (shifted.exp() / shifted.exp().sum()).numpy().round(4))
for dtype in (torch.float32, torch.float16):
    limit = torch.finfo(dtype).max
    print(f"{dtype}: largest number {limit:.3g}, its logarithm {torch.tensor(limit).double().log():.2f}")
assert not (large.exp() / large.exp().sum()).isfinite().any()
assert torch.allclose(shifted.exp() / shifted.exp().sum(), torch.softmax(large, dim=0))

# %% [markdown]
# Since only differences count, we may subtract any constant from all scores. We choose the maximum. The
# largest exponential is then $e^0 = 1$, so nothing overflows. The sum is at least 1, so we never divide by 0.
# Exponentials that underflow to 0 would have had a negligible weight. torch's softmax also subtracts the maximum.
#
# A score of $-\infty$ gives a weight of exactly 0. A mask uses this to hide keys (lesson 7).

# %%
torch.softmax(torch.tensor([2.0, 1.0, float("-inf")]), dim=0)

# %% [markdown]
# ## Which axis?
# The scores of several queries form a table $[T, S]$ with a row for each query and a column for each key. The
# weights of *one query* must sum to 1, so each **row** must sum to 1: the softmax runs along the keys, the
# last axis, `dim=-1`. With `dim=-2` it runs along the queries. The shape is the same, every number lies
# between 0 and 1, and there is no error.

# %%
torch.manual_seed(1)
scores = torch.randn(4, 6) * 1.5  # [T=4, S=6]
by_keys, by_queries = scores.softmax(dim=-1), scores.softmax(dim=-2)  # both [T, S]
assert torch.allclose(by_keys.sum(-1), torch.ones(4)) and torch.allclose(by_queries.sum(-2), torch.ones(6))
for name, table in (("dim=-1", by_keys), ("dim=-2", by_queries)):
    sums = [" ".join(f"{total:.2f}" for total in table.sum(dim).tolist()) for dim in (-1, -2)]
    print(f"{name}: weights of query 0", " ".join(f"{weight:.2f}" for weight in table[0].tolist()))
    print(f"        sums of the 4 rows {sums[0]}, of the 6 columns {sums[1]}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6))
for ax, table, title in (
    (axes[0], by_keys, "dim=-1: rows sum to 1 (right)"),
    (axes[1], by_queries, "dim=-2: columns sum to 1 (wrong)"),
):
    ax.imshow(table, cmap="Purples", vmin=0, vmax=1)
    for t in range(4):
        for s in range(6):
            dark = table[t, s] > 0.56
            ax.text(
                s, t, f"{table[t, s]:.2f}", ha="center", va="center", color="white" if dark else "#1f2430"
            )
        ax.text(5.7, t, f"sum {table[t].sum():.2f}", va="center", color="#b3261e")
    for s in range(6):
        ax.text(s, 3.85, f"{table[:, s].sum():.2f}", ha="center", color="#b3261e")
    ax.text(-0.65, 3.85, "sum", ha="right", color="#b3261e")
    ax.set_title(title)
    ax.set_xticks(range(6), [f"key {s}" for s in range(6)])
    ax.set_yticks(range(4), [f"query {t}" for t in range(4)])
    ax.xaxis.tick_top()
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
figure.tight_layout()

# %% [markdown]
# The picture shows both tables with their sums. With `dim=-1` each row sums to 1. With `dim=-2` each column
# sums to 1, and the rows sum to 0.23, 2.07, 0.68 and 3.03.
#
# Two tests show that `dim=-2` is wrong. First, let every value be the number 1: a weighted mean
# of ones must be 1. Second, change only the *last* query: the weights of the first query must not change.

# %%
ones = torch.ones(6, 1)  # [S=6, Dv=1]: every value is 1
print("weighted means of ones, dim=-1:", (by_keys @ ones).flatten().numpy().round(2))
print("weighted means of ones, dim=-2:", (by_queries @ ones).flatten().numpy().round(2))

changed = scores.clone()
changed[-1] += torch.randn(6)  # a different last query
change_by_keys = (changed.softmax(dim=-1)[0] - by_keys[0]).abs().max()
change_by_queries = (changed.softmax(dim=-2)[0] - by_queries[0]).abs().max()
print(f"weights of query 0 change by up to {change_by_keys:.2f} (dim=-1), {change_by_queries:.2f} (dim=-2)")
assert torch.allclose(by_keys @ ones, torch.ones(4, 1)) and change_by_keys == 0 and change_by_queries > 0.05

# %% [markdown]
# Along the wrong axis, queries compete for a key instead of keys for a query. The weights of some
# queries sum to much less than 1 (0.23), those of others to more than 1 (3.03), and they depend on the other
# queries. In a model that generates
# text from left to right, later words would change the results of earlier ones. Such code runs, has the right
# shapes and may even train. Only the sums show the mistake.
#
# With a batch and several heads the scores are $[B, H, T, S]$. The keys are still the last axis: `dim=-1` is
# right for any number of axes before the last; `dim=1` is right only for a table.
#
# For the exercise: `x.amax(dim=dim, keepdim=True)` is the maximum along an axis. `keepdim=True` keeps that
# axis with length 1, so that the result can be subtracted from `x`. `sum` takes the same arguments.

# %% exercise: softmax
"""Softmax along one axis, for numbers of any size."""

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x of any shape -> the same shape: weights that sum to 1 along `dim`. Without torch.softmax."""
    raise NotImplementedError  # finite for large numbers too; do not change x itself


# %% hint: idea
# Exponentials make all numbers positive, and a division by their sum makes the sum 1. But exponentials of
# large numbers overflow. A constant that is added to all scores changes no weight, so first subtract the
# constant that makes the largest score 0.

# %% hint: formula
# $$w_s = \frac{e^{x_s - m}}{\sum_r e^{x_r - m}}, \qquad m = \max_r x_r$$
#
# The maximum and the sum run along `dim` only: with scores `[T, S]` and `dim=-1`, each row has its own.

# %% hint: code
# 1. The maximum of `x` along `dim`, with `keepdim=True`: it has length 1 along `dim`, so that it can be
#    subtracted from `x`.
# 2. The exponentials of the differences, as a new tensor: the shape of `x`.
# 3. Their sum along `dim`, with `keepdim=True`.
# 4. Return the exponentials divided by their sum.

# %% solution
"""Softmax along one axis, for numbers of any size."""

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x of any shape -> the same shape: weights that sum to 1 along `dim`. Without torch.softmax."""
    powers = torch.exp(x - x.amax(dim=dim, keepdim=True))  # the largest is 1
    return powers / powers.sum(dim=dim, keepdim=True)


# %% try
weights = softmax(torch.randn(4, 6))  # 4 queries, 6 keys
print("weights:", tuple(weights.shape), "sums of the rows:", weights.sum(dim=-1).tolist())
print("large scores:", softmax(torch.tensor([1000.0, 999.0, 0.0])).tolist(), "expected: no nan")

# %%
ratios = []
for other_scores in ([0.0], [5.0, -3.0], [0.5] * 50):
    w = torch.softmax(torch.tensor([3.0, 1.0, *other_scores], dtype=torch.float64), dim=0)
    ratios.append((w[0] / w[1]).item())
    print(f"weights {w[0]:.4f} and {w[1]:.4f}: the first is {ratios[-1]:.3f} times as large")
assert all(abs(ratio - 7.389) < 1e-3 for ratio in ratios)

# %% question: One key scores 3, another 1. How many times as large is the weight of the first?
# $e^{3-1} = e^2 \approx 7.39$ times, whatever the other scores are: the denominator is the same for both keys
# and cancels. The weights themselves do depend on the other scores, as the code below shows.

# %% question: Scores [B, H, T, S] go through softmax(scores, dim=1). What sums to 1, and does it crash?
# For each pair of a query and a key, the weights of all *heads* sum to 1: heads compete with each other, and
# the weights of a query no longer sum to 1. It does not crash, since shapes are the same for every axis. A
# test of shapes cannot find the mistake. A test of sums can: `weights.sum(-1)` must be 1 everywhere.
