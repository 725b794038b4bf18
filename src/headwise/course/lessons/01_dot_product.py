"""The dot product and its scale.

idea: a dot product measures how well two vectors agree; divided by sqrt(d), its scale does not depend on d
minutes: 8
level: junior
repairs: no scale; scale by d_k
"""

# %% [markdown]
# Attention compares a **query** with several **keys**. All are vectors of the same width $d$. The dot product
# measures how well a key fits the query:
#
# $$q \cdot k = \sum_{i=1}^{d} q_i k_i = |q|\,|k| \cos\theta$$
#
# It is large if both vectors point in the same direction, 0 at a right angle, and negative if they point in
# opposite directions.

# %%
import torch

q = torch.tensor([2.0, 1.0])  # [D=2]: the query
keys = {"along": [1.0, 0.9], "beside": [1.5, -0.5], "across": [-0.8, 1.6], "against": [-1.4, -0.9]}
k = torch.tensor(list(keys.values()))  # [S=4, D=2]: one key a row

scores = k @ q  # [S]: one dot product for each key
angles = scores / (q.norm() * k.norm(dim=-1))  # [S]: the cosine
for name, score, cosine in zip(keys, scores, angles, strict=True):
    print(f"{name:8} q.k = {score:5.2f}   cosine = {cosine:5.2f}")
assert abs(scores[2]) < 1e-6  # at a right angle

# %% [markdown]
# The colours of the plot are dot products with the query. All points with the same dot product lie on a line
# at a right angle to the query: the dot product depends only on the component of the key parallel to $q$.

# %%
from matplotlib import pyplot as plt

figure, ax = plt.subplots(figsize=(5.4, 4.4))
side = torch.linspace(-2.4, 2.4, 97)
plane = side[None, :] * q[0] + side[:, None] * q[1]  # [97, 97]: q . (x, y) at every point
colours = ax.contourf(side, side, plane, levels=12, cmap="PuOr_r", vmin=-8, vmax=8)
ax.contour(side, side, plane, levels=[0], colors="#1f2430", linewidths=1, linestyles="dashed")
ax.annotate("", xy=q.tolist(), xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "lw": 3, "color": "#1f2430"})
ax.text(2.0, 1.18, "query", weight="bold", ha="center")
for (name, (x, y)), score in zip(keys.items(), scores, strict=True):
    ax.annotate("", xy=(x, y), xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "lw": 1.6, "color": "#6b1d81"})
    ax.text(x, y + (0.12 if y > 0 else -0.26), f"{name} {score:.1f}", ha="center", color="#1f2430")
ax.set(
    title="Four keys, and their dot product with the query",
    aspect="equal",
    xlabel="channel 0",
    ylabel="channel 1",
)
figure.colorbar(colours, label="q . k")
figure.tight_layout()

# %% [markdown]
# The length of a key matters, too: if it doubles, the score doubles. A model can learn to make a key longer
# so that its scores grow.
#
# One matrix product computes all dot products: entry $(t, s)$ of $QK^\top$ is query $t$ times key $s$. With
# more axes in front, for example the sequences of a batch (we write `[.., T, D]`), `Q @ K.transpose(-2, -1)`
# computes one such matrix for each of them; it swaps only the last two axes of `K`.

# %%
torch.manual_seed(0)
Q, K = torch.randn(3, 8), torch.randn(5, 8)  # [T=3, D=8] queries, [S=5, D=8] keys
scores = Q @ K.T  # [T=3, S=5]
assert torch.allclose(scores[2, 4], (Q[2] * K[4]).sum(), atol=1e-5)
assert torch.allclose(Q @ (2 * K).T, 2 * scores, atol=1e-5)
scores.shape

# %% [markdown]
# ## The spread grows with the width
# A dot product is a sum of $d$ products. Assume that the channels are independent, with mean 0 and variance
# 1, as they roughly are in a newly initialised model. Then each product has mean 0 and variance 1. Variances
# add up, so the sum has variance $d$ and standard deviation $\sqrt d$. Wider vectors have larger scores,
# although their directions do not agree more.
#
# A softmax, $w_s = e^{x_s} / \sum_r e^{x_r}$, turns scores into **attention weights** that sum to 1 (lesson
# 2). We measure three things for 500 random queries with 32 random keys each, at five widths: the spread of
# the scores, the largest of the 32 weights, and the gradient that reaches the query.


# %%
def measure(width: int, scale: float) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Standard deviation of the scores; for each query, its largest weight and gradient norm."""
    torch.manual_seed(width)
    q = torch.randn(500, 1, width, requires_grad=True)
    k, v = torch.randn(500, 32, width), torch.randn(500, 32, 1)
    scores = q @ k.transpose(-2, -1) * scale  # [500, 1, 32]
    weights = scores.softmax(dim=-1)  # [500, 1, 32]
    (weights @ v).sum().backward()  # weighted means of the values: one number for each query
    gradient = q.grad.norm(dim=-1).flatten()  # [500]
    return scores.std().item(), weights.detach().amax(-1).flatten(), gradient


widths = [4, 16, 64, 256, 1024]
plain = [measure(d, 1.0) for d in widths]
scaled = [measure(d, d**-0.5) for d in widths]
print("           std of scores        largest weight       gradient, median query")
print("width d    plain    scaled      plain    scaled      plain    scaled")
for d, (std, largest, grad), (std_s, largest_s, grad_s) in zip(widths, plain, scaled, strict=True):
    columns = f"{std:5.1f} {std_s:9.2f} {largest.median():11.2f} {largest_s.median():9.2f}"
    print(f"{d:6}    {columns} {grad.median():11.4f} {grad_s.median():9.4f}")
for d, (std, _, _), (std_s, largest_s, _) in zip(widths, plain, scaled, strict=True):
    assert abs(std / d**0.5 - 1) < 0.05 and abs(std_s - 1) < 0.05 and largest_s.median() < 0.2

# %%
figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.3))
for results, colour, name, marker in (
    (plain, "#e95561", "q.k", "o"),
    (scaled, "#6b1d81", "q.k / sqrt(d)", "s"),
):
    stds, largest, gradients = zip(*results, strict=True)
    low, middle, high = ([grad.quantile(p).clamp(min=1e-8) for grad in gradients] for p in (0.1, 0.5, 0.9))
    axes[0].loglog(widths, stds, color=colour, marker=marker, label=name)
    axes[1].semilogx(widths, [weight.median() for weight in largest], color=colour, marker=marker)
    axes[2].loglog(widths, middle, color=colour, marker=marker)
    axes[2].fill_between(widths, low, high, color=colour, alpha=0.2, lw=0)
axes[0].set(title="Spread of the scores", ylabel="standard deviation")
axes[0].legend(frameon=False)
axes[1].set(title="Largest of 32 weights", ylabel="weight (median)", ylim=(0, 1.05))
axes[2].set(title="Gradient of the query", ylabel="norm: median, 10% to 90%", ylim=(1e-8, 30))
for ax in axes:
    ax.set_xticks(widths, [str(d) for d in widths])
    ax.set_xlabel("width d")
    ax.minorticks_off()
figure.tight_layout()

# %% [markdown]
# Without the scale, the scores of these random vectors have a standard deviation of $\sqrt d$. At width 1,024
# one of 32 random keys gets nearly all the weight: the softmax is *saturated*. Weights near 0 or 1 hardly
# change when scores change, so the median of the gradient over the 500 queries is almost 0. If the scores are
# divided by $\sqrt d$, all three curves are flat: training starts from the same state at every width.
#
# Textbooks say that without the scale "the gradients vanish". The plot on the right is more precise. Up to width 64
# the median gradient does not fall at all; the range between the 10% and the 90% quantile grows in both
# directions. So we also compute the mean:

# %%
means = [grad.mean().item() for _, _, grad in plain]
means_scaled = [grad.mean().item() for _, _, grad in scaled]
print("mean gradient, plain: ", " ".join(f"{mean:.2f}" for mean in means))
print("mean gradient, scaled:", " ".join(f"{mean:.2f}" for mean in means_scaled))
_, largest, grad = plain[-1]  # d = 1024
steepest = grad.topk(50).indices  # the tenth of the queries with the largest gradients
share = grad[steepest].sum() / grad.sum()
print(f"d = 1024, plain: 10% of the queries account for {share:.0%} of the sum of the gradients;")
print(f"median largest weight: {largest[steepest].median():.2f}; of all queries: {largest.median():.2f}")
assert plain[2][2].median() > scaled[2][2].median()  # at width 64
assert largest[steepest].median() < 0.9 < largest.median()
assert means[-1] > means[0] and plain[-1][2].median() < 0.02 * scaled[-1][2].median()

# %% [markdown]
# The mean does not fall: it is larger at width 1,024 than at width 4. Many queries get almost no gradient,
# and a few, whose largest weight happens to be far from 1, get a very large one. Both harm training, and the
# scale prevents both.

# %% exercise: scaled_scores
"""Scaled dot products of queries and keys."""

from torch import Tensor


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D] -> [.., T, S]: scores whose spread does not depend on D."""
    raise NotImplementedError  # dot products of every query with every key; then the scale


# %% solution
"""Scaled dot products of queries and keys."""

from torch import Tensor


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D] -> [.., T, S]: scores whose spread does not depend on D."""
    scores = q @ k.transpose(-2, -1)  # [.., T, S]
    return scores / q.shape[-1] ** 0.5


# %%
stds, largest, _ = zip(*(measure(d, 1 / d) for d in widths), strict=True)
medians = [weight.median().item() for weight in largest]
print("divided by d: std of scores", " ".join(f"{std:.2f}" for std in stds))
print("median of largest weights  ", " ".join(f"{w:.3f}" for w in medians), f"  (1/32 = {1 / 32:.3f})")
assert stds[-1] < 0.04 and medians[-1] < 1.2 / 32
queries = [torch.randn(100, d) for d in widths]
own_scores = [q.square().sum(-1).mean().item() / q.shape[-1] ** 0.5 for q in queries]  # q . q / sqrt(d)
print("score of a query with itself, / sqrt(d):", " ".join(f"{score:.1f}" for score in own_scores))
assert own_scores[-1] > 10 * own_scores[0]

# %% question: Why the root? What happens if scores are divided by d itself?
# The variance of the scores grows as $d$ and their standard deviation as $\sqrt d$, so dividing by $\sqrt d$
# makes it 1. Dividing by $d$ makes it $1 / \sqrt d$, which shrinks with the width (cell above). Then all
# scores are nearly equal, every key gets nearly 1/32, and attention starts as a plain mean of the values.

# %% question: If every score is divided by sqrt(d), can a trained head still put all its weight on one key?
# Yes. The scale is a constant; it sets where training starts, not where it ends. The learned matrices that
# compute queries and keys can grow. And learned vectors need not be independent: if a query and a key agree
# in all channels, their dot product grows as $d$, not as $\sqrt d$, so it still grows after the division
# (last line of the cell above).
