"""The dot product and its scale.

idea: a dot product measures how well two vectors agree; divided by sqrt(d), its scale does not depend on d
minutes: 10
level: junior
repairs: no scale; scale by d_k
"""

# %% [markdown]
# In lesson 0, head 5.2 of mini compared the **query** of the last "the" with the **keys** of all tokens, and
# the key of "letter" fitted best. Queries and keys are vectors: a head computes $d$ numbers for each token as
# its query and $d$ others as its key. In mini $d$ is 32. Each of the $d$ places in a vector is called a
# **channel**: channel 0 of a query is its first number. Many texts, and some hints of `headwise learn`, write
# $d_k$ for $d$, the width of a key. The cell runs mini again and takes both from head 5.2.

# %%
import torch

import headwise as hw

model, tokenizer, _ = hw.models.load("mini")
text = "The captain read the letter. Then the captain read the"
ids = tokenizer(text, return_tensors="pt")["input_ids"]
tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
with torch.no_grad(), hw.watch(model, tokenizer=tokenizer, keep=True) as heads:
    model(ids)
layer, *_ = heads[5].map.parts()  # the queries and keys of layer 5, [B, H, T, D]
Q, K = layer.q[0, 2], layer.k[0, 2]  # [T=12, D=32], [S=12, D=32]: head 2, a row for each token
q, letter = Q[11], K[5]  # [D=32] each
print("query of the last 'the':", " ".join(f"{x:5.2f}" for x in q[:8].tolist()), "...")
print("key of 'letter':        ", " ".join(f"{x:5.2f}" for x in letter[:8].tolist()), "...")

# %% [markdown]
# The **dot product** measures how well a key fits a query: multiply the two numbers of each channel and add
# up the products. With two channels, $(2, 1) \cdot (3, -1) = 2 \cdot 3 + 1 \cdot (-1) = 5$. With $d$ channels:
#
# $$q \cdot k = \sum_{i=1}^{d} q_i k_i = |q|\,|k| \cos\theta$$
#
# On the right, $|q|$ and $|k|$ are the lengths of the vectors and $\theta$ is the angle between them. The dot
# product is large if both point in the same direction, 0 at a right angle, and negative if they point in
# opposite directions. We compute it for our query and every key:

# %%
scores = K @ q  # [S=12]: one dot product for each key
lengths = K.norm(dim=-1)  # [S]
cosines = scores / (q.norm() * lengths)  # [S]
print("key         q.k   length  cosine")
for token, score, length, cosine in zip(tokens, scores, lengths, cosines, strict=True):
    print(f"{token:9} {score:5.1f} {length:8.1f} {cosine:7.2f}")
assert torch.allclose(scores[5], (q * letter).sum())
assert scores.argmax() == 5 and cosines.argmax() == 5 and scores.argsort()[-2] == 0 and lengths.argmax() == 0

# %% [markdown]
# "letter" has the largest dot product, 67.1: no other key points so much in the direction of the query (its
# cosine is 0.81). `<|start|>` comes second with 65.3. "The" has the same cosine, 0.59, but only 37.8, because
# its key is shorter: if a key is twice as long, its dot product is twice as large. A model can learn to make a
# key longer so that more queries attend to it.
#
# 32 channels cannot be drawn, but two directions can. In the plot, to the right is the direction of the query;
# upwards is the direction at a right angle to it in which the keys differ most. The colours are dot products
# with the query. They depend only on the horizontal position: the component of the key parallel to $q$. The
# numbers in brackets count the tokens, from 0.

# %%
along = scores / q.norm()  # [S]: the component parallel to q
rest = K - along[:, None] * q / q.norm()  # [S, D]: what is at a right angle to q
across = rest @ torch.linalg.svd(rest - rest.mean(0)).Vh[0]  # [S]: its direction of largest spread
across = across * across[0].sign()  # a direction has two signs; `<|start|>` is above
assert torch.allclose(rest @ q, torch.zeros(12), atol=1e-3)
print(f"the query: {q.norm():.1f} to the right")
for place in (5, 0, 1, 8):
    print(f"{tokens[place]} ({place}): {along[place]:.1f} to the right, {across[place]:.1f} upwards")

# %%
from matplotlib import pyplot as plt

figure, ax = plt.subplots(figsize=(7.6, 4.2))
low, high = across.min().item() - 1.6, across.max().item() + 1.6
ax.contourf([0, 11], [low, high], [[0, 11 * q.norm()]] * 2, levels=12, cmap="Oranges", alpha=0.55)
style = {"arrowstyle": "-|>", "color": "#1f2430"}
ax.annotate("", xy=(q.norm().item(), 0), xytext=(0, 0), arrowprops={**style, "lw": 3})
ax.text(q.norm().item() - 0.1, 0.35, "query", weight="bold", ha="right")
sides = {
    5: ("left", 6, -10),
    7: ("center", 0, 7),
    8: ("right", -6, -3),
    9: ("right", -6, 0),
    11: ("left", 6, -9),
}
for place, (x, y, token) in enumerate(zip(along.tolist(), across.tolist(), tokens, strict=True)):
    ax.annotate("", xy=(x, y), xytext=(0, 0), arrowprops={**style, "color": "#6b1d81", "alpha": 0.5})
    side, right, up = sides.get(place, ("left", 6, -3))  # so that names do not overlap
    ax.annotate(f"{token} ({place})", (x, y), (right, up), textcoords="offset points", ha=side)
ax.set(title="The keys of head 5.2 and its query", xlabel="component parallel to the query")
ax.set(ylabel="component at a right angle", xlim=(0, 11), ylim=(low, high))
figure.colorbar(ax.collections[0], label="q . k")
figure.tight_layout()

# %% [markdown]
# No key is farther to the right than "letter" (6.5), so its dot product is the largest. `<|start|>` is almost
# as far to the right (6.4), but also high up (4.4): its key is longer, and its direction differs more from
# that of the query.
#
# One matrix product computes the dot products of all queries with all keys: entry $(t, s)$ of $QK^\top$ is
# query $t$ times key $s$. With more axes in front, for example the sequences of a batch (we write `[.., T, D]`),
# `Q @ K.transpose(-2, -1)` computes one such matrix for each of them; it swaps only the last two axes of `K`.
#
# From its scores a head computes its weights: it divides them by $\sqrt d$, which the rest of this lesson is
# about, and takes a softmax, which is lesson 2. The last row then has the weights of lesson 0.

# %%
scores = Q @ K.T  # [T=12, S=12]
assert torch.allclose(scores[11, 5], q @ letter) and torch.allclose(Q @ (2 * K).T, 2 * scores)
weights = (scores[11] / 32**0.5).softmax(dim=-1)  # [S]
assert torch.allclose(weights, heads[5].map.dense()[0, 2, 11], atol=1e-5)
print(f"scores {tuple(scores.shape)}; weight of the last 'the' on 'letter': {weights[5]:.0%}")

# %% [markdown]
# ## The spread grows with the width
# A dot product is a sum of $d$ products. Assume that the channels are independent, with mean 0 and variance
# 1, as they roughly are in a newly initialised model. Then each product has mean 0 and variance 1. Variances
# add up, so the sum has variance $d$ and standard deviation $\sqrt d$. Wider vectors have larger scores,
# although their directions do not agree more.
#
# A softmax turns scores into **attention weights**: positive numbers that sum to 1; the larger a score, the
# larger its weight. Lesson 2 has its formula. We measure three things for 500 random queries with 32 random
# keys each, at five widths: the spread of the scores, the largest of the 32 weights, and the gradient that
# reaches the query.


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
# divided by $\sqrt d$, all three are nearly the same at every width: training starts from the same state.
# The three plots draw the columns of the table.
#
# Textbooks say that without the scale "the gradients vanish". The table is more precise. At width 64 the
# median gradient (0.4952) is still larger than at width 4 (0.4289); at width 1,024 it is 0.0013. We also look
# at the queries with small and with large gradients, and at the mean:

# %%
for p in (0.1, 0.9):
    quantiles = " ".join(f"{grad.quantile(p):.4f}" for _, _, grad in plain)
    print(f"{p:.0%} of the gradients, plain, are below: {quantiles}")
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
# The small gradients become 0, the large ones grow (from 0.8194 at width 4 to 4.3780 at width 1,024 at the
# 90% quantile), and the mean does not fall: it is larger at width 1,024 than at width 4. Many queries get
# almost no gradient, and a few, whose largest weight happens to be far from 1, get a very large one. Both
# harm training, and the scale prevents both.

# %% exercise: scaled_scores
"""Scaled dot products of queries and keys."""

from torch import Tensor


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D] -> [.., T, S]: scores whose spread does not depend on D."""
    raise NotImplementedError  # dot products of every query with every key; then the scale


# %% hint: idea
# A score says how well a key fits a query. Which number of this lesson measures that? How does its spread
# change if the vectors become wider? The exercise asks for scores whose spread does not change.

# %% hint: formula
# $$\text{scores} = \frac{QK^\top}{\sqrt{D}}$$
#
# Entry $(t, s)$ is the dot product of query $t$ and key $s$. $D$ is the width of a query, the length of its
# last axis.

# %% hint: code
# 1. Swap the last two axes of the keys: `[.., S, D]` becomes `[.., D, S]`. There may be any number of axes
#    in front, so count axes from the end.
# 2. Multiply the queries `[.., T, D]` by the result, with `@`: `[.., T, S]`.
# 3. Divide by the square root of the width (`** 0.5`) and return the scores.

# %% solution
"""Scaled dot products of queries and keys."""

from torch import Tensor


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D] -> [.., T, S]: scores whose spread does not depend on D."""
    scores = q @ k.transpose(-2, -1)  # [.., T, S]
    return scores / q.shape[-1] ** 0.5


# %% try
q, k = torch.randn(2, 5, 8), torch.randn(2, 7, 8)  # 2 sequences of 5 queries and 7 keys, D = 8
scores = scaled_scores(q, k)
print("scores:", tuple(scores.shape), "expected: (2, 5, 7)")
wide = scaled_scores(torch.randn(1000, 256), torch.randn(1000, 256))
print(f"standard deviation for D = 256: {wide.std():.2f}, expected: about 1")

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
# makes it 1. Dividing by $d$ makes it $1 / \sqrt d$, which shrinks with the width (code below). Then all
# scores are nearly equal, every key gets nearly 1/32, and attention starts as a plain mean of the values.

# %% question: If every score is divided by sqrt(d), can a trained head still put all its weight on one key?
# Yes. The scale is a constant; it sets where training starts, not where it ends. The learned matrices that
# compute queries and keys can grow. And learned vectors need not be independent: if a query and a key agree
# in all channels, their dot product grows as $d$, not as $\sqrt d$, so it still grows after the division
# (last line of the code below the first question).
