"""The dot product and its scale.

idea: a dot product says how well two vectors agree; divided by the root of the width, on one scale for all
minutes: 8
level: junior
repairs: no scale; scale by d_k
"""

# %% [markdown]
# Attention begins with a question and many possible answers: here is a **query**, there are the **keys**; how
# well does each key fit? Both are vectors of the same width $d$. The fit is a dot product:
#
# $$q \cdot k = \sum_{i=1}^{d} q_i k_i = |q|\,|k| \cos\theta$$
#
# It is large where both point the same way, 0 where they stand at a right angle, negative where they point
# apart.

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
# Drawn, with the score as colour. Points of one score lie on a line across the query: of a key, the dot
# product sees only how far it reaches along $q$, and what lies across $q$ is lost.

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
# Length counts too: a key twice as long fits twice as well (or as badly). That is no accident to be repaired.
# A model can make a key loud by making it long.
#
# Many queries and many keys take one matrix product: cell $(t, s)$ of $QK^\top$ is query $t$ with key $s$. With
# more axes in front (samples of a batch, say; we write `[.., T, D]`), `Q @ K.transpose(-2, -1)` does it for each
# of them: it turns the last two axes and leaves the others alone.

# %%
torch.manual_seed(0)
Q, K = torch.randn(3, 8), torch.randn(5, 8)  # [T=3, D=8] queries, [S=5, D=8] keys
scores = Q @ K.T  # [T=3, S=5]
assert torch.allclose(scores[2, 4], (Q[2] * K[4]).sum(), atol=1e-5)
assert torch.allclose(Q @ (2 * K).T, 2 * scores, atol=1e-5)
scores.shape

# %% [markdown]
# ## The spread grows with the width
# A dot product is a sum of $d$ products. Take channels that are independent, with mean 0 and variance 1, as
# they are (roughly) in a model that has just been made. Each product has mean 0 and variance 1; variances add
# up, so the sum has variance $d$ and standard deviation $\sqrt d$. The wider the vectors, the larger the
# scores, though nothing fits any better.
#
# Does it matter? Scores go through a softmax: $w_s = e^{x_s} / \sum_r e^{x_r}$, shares of all keys that sum
# to 1 (the next lesson is about it). Let us measure: 500 random queries, 32 random keys for each, over five
# widths. We look at the spread of the scores, at the share of the best key, and at what training needs: the
# gradient that reaches the query.


# %%
def measure(width: int, scale: float) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Spread of scores; for each query the share of its best key, and the size of its gradient."""
    torch.manual_seed(width)
    q = torch.randn(500, 1, width, requires_grad=True)
    k, v = torch.randn(500, 32, width), torch.randn(500, 32, 1)
    scores = q @ k.transpose(-2, -1) * scale  # [500, 1, 32]
    shares = scores.softmax(dim=-1)  # [500, 1, 32]
    (shares @ v).sum().backward()  # values mixed in these shares, one number for each query
    gradient = q.grad.norm(dim=-1).flatten()  # [500]
    return scores.std().item(), shares.detach().amax(-1).flatten(), gradient


widths = [4, 16, 64, 256, 1024]
plain = [measure(d, 1.0) for d in widths]
scaled = [measure(d, d**-0.5) for d in widths]
print("           spread of scores     share of best key    gradient, median query")
print("width d    plain    scaled      plain    scaled      plain    scaled")
for d, (std, best, slope), (std_s, best_s, slope_s) in zip(widths, plain, scaled, strict=True):
    shown = f"{std:5.1f} {std_s:9.2f} {best.median():11.2f} {best_s.median():9.2f}"
    print(f"{d:6}    {shown} {slope.median():11.4f} {slope_s.median():9.4f}")
for d, (std, _, _), (std_s, best_s, _) in zip(widths, plain, scaled, strict=True):
    assert abs(std / d**0.5 - 1) < 0.05 and abs(std_s - 1) < 0.05 and best_s.median() < 0.2

# %%
figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.3))
for found, colour, name, mark in (
    (plain, "#e95561", "q.k", "o"),
    (scaled, "#6b1d81", "q.k / sqrt(d)", "s"),
):
    axes[0].loglog(widths, [one[0] for one in found], color=colour, marker=mark, label=name)
    axes[1].semilogx(widths, [one[1].median() for one in found], color=colour, marker=mark)
    low, middle, high = ([one[2].quantile(part).clamp(min=1e-8) for one in found] for part in (0.1, 0.5, 0.9))
    axes[2].loglog(widths, middle, color=colour, marker=mark)
    axes[2].fill_between(widths, low, high, color=colour, alpha=0.2, lw=0)
axes[0].set(title="The spread of scores", ylabel="standard deviation")
axes[0].legend(frameon=False)
axes[1].set(title="The best of 32 keys takes ..", ylabel="share (median)", ylim=(0, 1.05))
axes[2].set(title="What reaches the query", ylabel="gradient: median, 10% to 90%", ylim=(1e-8, 30))
for ax in axes:
    ax.set_xticks(widths, [str(d) for d in widths])
    ax.set_xlabel("width d")
    ax.minorticks_off()
figure.tight_layout()

# %% [markdown]
# Without the scale, the same random vectors give scores that spread as $\sqrt d$. At width 1,024 the best of
# 32 random keys takes nearly everything: the softmax is *saturated*. Shares that are nearly 0 or 1 hardly
# move when scores move, so the median query gets next to no gradient. Divided by $\sqrt d$, all three
# pictures are flat: a model that is made wider starts where the narrow one started.
#
# Textbooks say that without the scale "the gradients vanish". The right panel says a little more. Up to width
# 64 the median gradient is not smaller at all; the band around it is what has grown, in both directions. So
# look at the mean:

# %%
grown = [one[2].mean().item() for one in plain]
even = [one[2].mean().item() for one in scaled]
print("mean gradient, plain: ", " ".join(f"{one:.2f}" for one in grown))
print("mean gradient, scaled:", " ".join(f"{one:.2f}" for one in even))
_, best, slope = plain[-1]  # d = 1024
few = slope.topk(50).indices  # a tenth of the queries
print(f"d = 1024, plain: a tenth of the queries has {slope[few].sum() / slope.sum():.0%} of all gradient;")
print(f"their best keys have a median share of {best[few].median():.2f}, those of all {best.median():.2f}")
assert plain[2][2].median() > scaled[2][2].median()  # at width 64
assert best[few].median() < 0.9 < best.median()
assert grown[-1] > grown[0] and plain[-1][2].median() < 0.02 * scaled[-1][2].median()

# %% [markdown]
# The mean does not fall: it is larger than at width 4. Many queries learn next to nothing, and a few, where
# by chance no key is far ahead, are thrown about. Both are bad for training, and the scale ends both.

# %% exercise: scaled_scores
"""How well each key fits each query."""

from torch import Tensor


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D] -> [.., T, S]: spread as widely at any width D."""
    raise NotImplementedError  # every query with every key; then the scale


# %% solution
"""How well each key fits each query."""

from torch import Tensor


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D] -> [.., T, S]: spread as widely at any width D."""
    scores = q @ k.transpose(-2, -1)  # [.., T, S]
    return scores / q.shape[-1] ** 0.5


# %%
flat = [measure(d, 1 / d) for d in widths]
print("divided by d:      spread", " ".join(f"{one[0]:.2f}" for one in flat))
print(
    "share of the best key    ",
    " ".join(f"{one[1].median():.3f}" for one in flat),
    f"  (1/32 = {1 / 32:.3f})",
)
assert flat[-1][0] < 0.04 and flat[-1][1].median() < 1.2 / 32
copies = [torch.randn(100, d) for d in widths]  # keys that are equal to their queries
same = [one.square().sum(-1).mean().item() / one.shape[-1] ** 0.5 for one in copies]  # q . q / sqrt(d)
print("a key that is the query: ", " ".join(f"{one:.1f}" for one in same))
assert same[-1] > 10 * same[0]

# %% question: Why the root? What happens if scores are divided by d itself?
# The variance grows as $d$, the spread as $\sqrt d$; the root is what makes the spread 1. Divided by $d$, the
# spread is $1 / \sqrt d$: the cell above shows it shrink with the width. All scores are then nearly equal,
# every key gets nearly 1/32, and attention starts as a plain mean that no longer chooses.

# %% question: If every score is divided by sqrt(d), can a trained head still put all its weight on one key?
# Yes. The scale is a constant; it sets where training starts, not where it ends. Queries and keys are made by
# learned matrices. These can grow, and what they make need not be independent: a query and a key that agree
# in all channels have a dot product that grows as $d$, not as $\sqrt d$, so that it grows after the division
# too (the last line of the cell above). Sharp heads are learned, not drawn by chance.

# %% [markdown]
# Next: how scores become shares, and along which axis.
