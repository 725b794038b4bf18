"""Softmax and its axis.

idea: softmax turns scores into shares of one whole, and the axis says whose whole it is
minutes: 8
level: junior
without: softmax; log_softmax
repairs: own softmax over the wrong axis; own softmax overflows
"""

# %% [markdown]
# Lesson 1 gave every key a score. To take a little of every key, we need **shares**: none below 0, together
# 1, the larger the better the key fits. Softmax makes them in two steps, exponential and division:
#
# $$w_s = \frac{e^{x_s}}{\sum_r e^{x_r}}$$

# %%
import torch
from matplotlib import pyplot as plt

x = torch.tensor([2.0, 1.0, 0.0, -1.0])  # [S=4]: scores of four keys for one query
powers = x.exp()  # [S]: all positive
shares = powers / powers.sum()  # [S]: all of one whole
assert torch.allclose(shares, torch.softmax(x, dim=0)) and torch.allclose(shares.sum(), torch.tensor(1.0))

figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.9))
for ax, bars, title in zip(axes, (x, powers, shares), ("scores x", "exp(x)", "shares"), strict=True):
    marks = ax.bar(["key 0", "key 1", "key 2", "key 3"], bars, color="#6b1d81")
    ax.bar_label(marks, fmt="%.2f", padding=2)
    ax.axhline(0, color="#1f2430", lw=0.8)
    ax.margins(y=0.15)
    ax.set_title(f"{title}   (sum {bars.sum():.2f})")
figure.tight_layout()

# %% [markdown]
# Two things to keep in mind:
#
# - **Only differences count.** Add 100 to every score: numerator and denominator both grow by the factor
#   $e^{100}$, and nothing changes. One score that is 1 above another has $e$ times its share, whatever the
#   rest may be.
# - **Factors do count.** Scores times 4 are differences times 4: the best takes more. Scores times a quarter:
#   nearly equal shares. That is why the scale of lesson 1 matters.

# %%
exact = x.double()
assert torch.allclose(torch.softmax(exact + 100, 0), torch.softmax(exact, 0))
assert torch.allclose(shares[0] / shares[1], torch.e * torch.ones(()))
for factor in (0.25, 1, 4):
    print(f"{factor:5} x:", " ".join(f"{one:.3f}" for one in torch.softmax(factor * x, dim=0)))

# %% [markdown]
# ## Subtract the maximum
# As written above, the formula breaks: a float32 holds no number as large as $e^{100}$. The cell prints where
# the exponential overflows, in float32 and in float16.

# %%
large = torch.tensor([100.0, 99.0, 98.0])
print("as written:         ", (large.exp() / large.exp().sum()).numpy())  # inf / inf
moved = large - large.max()  # 0, -1, -2
print("maximum subtracted: ", (moved.exp() / moved.exp().sum()).numpy().round(4))
for dtype in (torch.float32, torch.float16):
    limit = torch.finfo(dtype).max
    print(f"{dtype}: largest number {limit:.3g}, its logarithm {torch.tensor(limit).double().log():.2f}")
assert not (large.exp() / large.exp().sum()).isfinite().any()
assert torch.allclose(moved.exp() / moved.exp().sum(), torch.softmax(large, dim=0))

# %% [markdown]
# Since only differences count, we may subtract what we like, and the maximum is the best choice. The largest
# power is then $e^0 = 1$: nothing overflows. The sum is at least 1: we never divide by 0. What underflows to
# 0 was too small to matter. Every softmax worth using does this, torch's too.
#
# A score of $-\infty$ gives a share of exactly 0. That is how a mask will hide a key, some lessons on.

# %%
torch.softmax(torch.tensor([2.0, 1.0, float("-inf")]), dim=0)

# %% [markdown]
# ## Which axis?
# Scores of several queries are a table $[T, S]$: a row for each query, a column for each key. The whole that
# is shared out is *one query's* attention. So each **row** has to sum to 1, and the softmax runs along the
# keys, the last axis: `dim=-1`. Along the queries, `dim=-2`, the shape is the same, every number lies between
# 0 and 1, nothing crashes.

# %%
torch.manual_seed(1)
scores = torch.randn(4, 6) * 1.5  # [T=4, S=6]
by_keys, by_queries = scores.softmax(dim=-1), scores.softmax(dim=-2)  # both [T, S]
assert torch.allclose(by_keys.sum(-1), torch.ones(4)) and torch.allclose(by_queries.sum(-2), torch.ones(6))

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
# What is wrong with the right-hand table shows when values are mixed in these shares. Let every value be the
# number 1: whatever the shares, a mix of ones is 1. And change only the *last* query: what the first one gets
# must stay as it is.

# %%
ones = torch.ones(6, 1)  # [S=6, Dv=1]: every value is 1
print("mix of ones, dim=-1:", [round(one, 2) for one in (by_keys @ ones).flatten().tolist()])
print("mix of ones, dim=-2:", [round(one, 2) for one in (by_queries @ ones).flatten().tolist()])

other = scores.clone()
other[-1] += torch.randn(6)  # another last query
kept = (other.softmax(dim=-1)[0] - by_keys[0]).abs().max()
moved = (other.softmax(dim=-2)[0] - by_queries[0]).abs().max()
print(f"shares of the first query move by at most {kept:.2f} (dim=-1), {moved:.2f} (dim=-2)")
assert torch.allclose(by_keys @ ones, torch.ones(4, 1)) and kept == 0 and moved > 0.05

# %% [markdown]
# Along the wrong axis queries compete for a key, instead of keys for a query. Some queries go away with
# almost nothing, and each answer depends on who else asks: in a model that writes from left to right, later
# words would change what earlier ones get, as the last line shows. Such code runs, has the right shapes, and
# may even train. Only sums tell.
#
# Later there will be a batch, and several heads side by side. Scores are then $[B, H, T, S]$, and the keys
# are still the last axis. `dim=-1` says so for any number of axes; `dim=1` says something else for each.
#
# To write it yourself: `x.amax(dim=dim, keepdim=True)` is the largest number along an axis, and `keepdim=True` leaves
# that axis there with length 1, so that it fits `x` again when you subtract it; `sum` takes the same arguments.

# %% exercise: softmax
"""Shares along one axis, for numbers of any size."""

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x of any shape -> the same shape: shares that sum to 1 along `dim`. Without torch.softmax."""
    raise NotImplementedError  # finite for large numbers too; x itself stays as it is


# %% solution
"""Shares along one axis, for numbers of any size."""

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x of any shape -> the same shape: shares that sum to 1 along `dim`. Without torch.softmax."""
    powers = torch.exp(x - x.amax(dim=dim, keepdim=True))  # the largest is 1
    return powers / powers.sum(dim=dim, keepdim=True)


# %%
ratios = []
for others in ([0.0], [5.0, -3.0], [0.5] * 50):
    w = torch.softmax(torch.tensor([3.0, 1.0, *others], dtype=torch.float64), dim=0)
    ratios.append((w[0] / w[1]).item())
    print(f"shares {w[0]:.4f} and {w[1]:.4f}: {ratios[-1]:.3f} times as large")
assert all(abs(one - 7.389) < 1e-3 for one in ratios)

# %% question: One key scores 3, another 1. How many times as large is the share of the first?
# $e^{3-1} = e^2 \approx 7.39$ times, whatever the other keys score: the sum below the line is the same for
# both and cancels. The shares themselves do depend on the others, as the cell above shows.

# %% question: Scores [B, H, T, S] go through softmax(scores, dim=1). What sums to 1, and does it crash?
# At each pair of a query and a key the shares of all *heads* sum to 1: heads compete with each other, and no
# query's shares need to sum to anything. It does not crash; shapes are the same for every axis. A test of
# shapes cannot find it, a test of sums can: `weights.sum(-1)` should be 1 everywhere.

# %% [markdown]
# Next: scores and shares meet values, and are one head of attention.
