"""Why many heads.

idea: all heads share one width, so with more heads each head is narrower
minutes: 10
level: junior
repairs: scale by d_model; scale by sqrt H; heads interleaved
"""

# %% [markdown]
# Courses say: *more heads, richer representations*. But heads share the width of the model: each of $h$ heads
# gets $d_k = d_{model} / h$ channels. With more heads the number of parameters stays the same and each head
# is narrower:

# %% slide: "More heads, richer representations"
# - All heads share the width of the model: $d_k = d_{model} / h$.
# - With more heads, the number of parameters stays the same and **each head is narrower**.
#
# [output]
#
# ---
# Ask the group first: with twice as many heads, are there more parameters? Most say yes.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
counts = [1, 2, 4, 8, 16, 32]
sizes = set()
for num_heads in counts:
    mha = hw.MultiHeadAttention(256, num_heads)
    sizes.add(sum(weight.numel() for weight in mha.parameters()))
    print(f"{num_heads:2} heads of {mha.head_dim:3} channels: {max(sizes):,} parameters")
assert len(sizes) == 1

# %% [markdown]
# ## What one head cannot do
# A head has one row of weights for each query. If it attends equally to two positions, its output is the mean
# of their values, which does not depend on their order. Two heads can attend to one position each and keep
# both values apart:

# %% slide: One head mixes two values; two heads keep them apart
# ```
# blue_red = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # [S=2, Dv=2]: a blue value, then a red one
# red_blue = blue_red.flip(0)
# one_head = torch.tensor([[0.5, 0.5]])  # [H=1, S]: both positions
# two_heads = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # [H=2, S]: one position each
# ```
#
# [output]
#
# - A mean does not depend on the order. This is the reason for several heads in the paper of 2017.
# - It is a reason for two or four heads, not for more and more.

# %%
blue_red = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # [S=2, Dv=2]: a blue value, then a red one
red_blue = blue_red.flip(0)
one_head = torch.tensor([[0.5, 0.5]])  # [H=1, S]: both positions
two_heads = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # [H=2, S]: one position each

print("one head: ", (one_head @ blue_red).flatten().tolist(), (one_head @ red_blue).flatten().tolist())
print("two heads:", (two_heads @ blue_red).flatten().tolist(), (two_heads @ red_blue).flatten().tolist())
assert torch.equal(one_head @ blue_red, one_head @ red_blue)
assert not torch.equal(two_heads @ blue_red, two_heads @ red_blue)

# %% [markdown]
# This is the reason that the paper of 2017 ("Attention is all you need") gives for several heads. It is a
# reason for a few heads, such as two or four, but not for more and more heads.
#
# ## What a narrow head cannot do
# The scores of a head are a product of $[T, d_k]$ and $[d_k, T]$: a table of $T \times T$ numbers whose rank
# is $d_k$ at most. (The softmax changes the rank, but each key still has only $d_k$ numbers by which it can
# be selected.)
#
# A narrow head is also less sharp. In the cell below, one of 64 random keys is equal to the query, and all
# channels have standard deviation 1. How much weight does the right key get?

# %% slide: A narrow head is less sharp
# - The scores of a head are $[T, d_k]$ times $[d_k, T]$: a table whose rank is $d_k$ at most.
# - One of 64 random keys is equal to the query. How much weight does it get?
#
# [output]
#
# - A narrow head can be as sharp, but needs larger queries and keys.
#
# ---
# Let the group guess the weight of the right key with 32 heads before you show this slide.

# %%
ranks, right_key = [], []
for num_heads in counts:
    d_k = 256 // num_heads
    q, k = torch.randn(2, 300, d_k, dtype=torch.float64)  # [T=300, d_k] each
    ranks.append(int(torch.linalg.matrix_rank(q @ k.T)))
    k = torch.randn(200, 64, d_k)  # [trials, S=64, d_k]
    scores = (k @ k[:, 0, :, None]).squeeze(-1) / d_k**0.5  # [trials, S]: the query equals the first key
    right_key.append(float(scores.softmax(-1)[:, 0].mean()))
    print(f"{num_heads:2} heads: rank {ranks[-1]:3} of 300, weight of the right key {right_key[-1]:.2f}")
assert ranks == [256 // num_heads for num_heads in counts]
assert right_key == sorted(right_key, reverse=True)

# %% [markdown]
# A narrow head can be as sharp, but needs larger queries and keys. So with more heads, a layer can attend to
# more positions separately, but each head selects a position less sharply. Which number of heads is best must
# be measured.
#
# ## One width, six numbers of heads
# We trained the same small language model with 1 to 32 heads in each of its 4 layers: width 256, 3,934,464
# parameters in every case, three seeds, 2,000 steps (`python -m studies.head_counts` in the source
# repository). The table shows means and standard deviations over the seeds. "Without one head" is how much
# the loss rises, on average, when one head is switched off. "Best induction head" is the largest induction
# score of a head: the weight it gives to the token that an induction head attends to (lesson 13).
#
# | heads | $d_k$ | validation loss | how much heads of a layer differ | without one head | best induction head |
# |---:|---:|---|---|---:|---|
# | 1 | 256 | 2.7953 ± 0.0414 | – | 0.8035 | 0.27 ± 0.05 |
# | 2 | 128 | 2.7752 ± 0.0146 | 0.422 ± 0.031 | 0.9767 | 0.37 ± 0.04 |
# | 4 | 64 | 2.7518 ± 0.0117 | 0.385 ± 0.003 | 0.4125 | 0.44 ± 0.06 |
# | 8 | 32 | 2.7714 ± 0.0224 | 0.418 ± 0.005 | 0.1402 | 0.30 ± 0.04 |
# | 16 | 16 | 2.8389 ± 0.0250 | 0.409 ± 0.006 | 0.0371 | 0.03 ± 0.01 |
# | 32 | 8 | 2.9437 ± 0.0151 | 0.379 ± 0.004 | 0.0150 | 0.02 ± 0.00 |

# %% slide: One width, six numbers of heads: which is best?
# | heads | $d_k$ | validation loss | without one head | best induction head |
# |---:|---:|---|---:|---|
# | 1 | 256 | 2.7953 ± 0.0414 | 0.8035 | 0.27 ± 0.05 |
# | 2 | 128 | 2.7752 ± 0.0146 | 0.9767 | 0.37 ± 0.04 |
# | 4 | 64 | 2.7518 ± 0.0117 | 0.4125 | 0.44 ± 0.06 |
# | 8 | 32 | 2.7714 ± 0.0224 | 0.1402 | 0.30 ± 0.04 |
# | 16 | 16 | 2.8389 ± 0.0250 | 0.0371 | 0.03 ± 0.01 |
# | 32 | 8 | 2.9437 ± 0.0151 | 0.0150 | 0.02 ± 0.00 |
#
# The same small language model, trained 18 times: 3,934,464 parameters in every case, three seeds.
#
# ---
# "Without one head" is how much the loss rises, on average, when one head is switched off.

# %% slide: 16 and 32 heads are worse than 8
# [picture]
#
# ---
# Left: lower is better. Right: the cell before, as a curve. The two agree, but there may be another reason:
# narrow
# heads also have fewer rotary frequencies.

# %%
from matplotlib import pyplot

losses = [2.7953, 2.7752, 2.7518, 2.7714, 2.8389, 2.9437]  # the table above
deviations = [0.0414, 0.0146, 0.0117, 0.0224, 0.0250, 0.0151]
figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.errorbar(counts, losses, deviations, marker="o", color="#a6306f", capsize=3)
left.set_title("Validation loss", loc="left", fontsize=11)
left.set_ylabel("nats per token")
right.plot(counts, right_key, marker="o", color="#b06a00")
right.set_title("Sharpness of random heads", loc="left", fontsize=11)
right.set_ylabel("weight of the right key, of 64")
right.set_ylim(0, 1.05)
for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count}\n{256 // count}" for count in counts])
    axes.set_xlabel("heads per layer, and channels of each")
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# What the table shows, and what it does not:
#
# - **16 and 32 heads are clearly worse than 8**, compared seed by seed. **For 1, 2 and 4 heads there is no
#   clear difference from 8**: there are only three seeds, and the differences are small. Even one head per
#   layer is not clearly worse; such a model still has four heads, one in each layer.
# - The largest induction score is that of models with 4 heads per layer; with 16 and 32 heads it is almost 0.
#   This agrees with the right plot (narrow heads are less sharp), but there may be another reason: narrow
#   heads also have fewer rotary frequencies.
# - The measurement used one width, one learning rate and one number of steps. Large models have more heads
#   because they are *wider*. The next cell counts the head widths of the models whose sizes headwise knows:

# %% slide: What this measurement does not show
# - For 1, 2 and 4 heads there is **no clear difference** from 8: three seeds, small differences.
# - One width, one learning rate, one number of steps.
# - Large models have more heads because they are **wider**:
#
# [output]
#
# ---
# Ask: how many heads has the model that you use, and how wide is each? In this list, no model has heads
# narrower than
# 64 channels.

# %%
from collections import Counter

from headwise.nn.presets import PRESETS

presets = PRESETS.values()
widths = Counter(preset.head_dim or preset.d_model // preset.num_heads for preset in presets)
print(f"of {len(PRESETS)} models:", ", ".join(f"{n} have d_k = {d_k}" for d_k, n in widths.most_common()))
unequal = sum((preset.head_dim or 0) * preset.num_heads not in (0, preset.d_model) for preset in presets)
print(f"in {unequal} of them the widths of the heads do not add up to the width of the model")
assert min(widths) >= 64 and unequal == 6 and len(PRESETS) == 36

# %% [markdown]
# No model in this list has heads narrower than 64 channels. In a wider model, more heads of this width fit.
#
# ## Do heads differ?
# We measure the diversity of two heads of a layer as the mean Jensen-Shannon divergence between their
# weights: 0 if the weights are equal, 0.693 ($\ln 2$) if the heads attend to no position in common. We
# compare mini, the small trained model inside headwise (8 layers of 7 heads), with the same model with random
# weights. From here on, layer.head names a head: `5.3` is head 3 of layer 5, both counted
# from 0.

# %% slide: Training makes heads differ
# - Divergence of two heads of a layer: 0 if their weights are equal, 0.693 ($\ln 2$) if they attend to no
#   position
#   in common.
# - mini, the small model inside headwise, before and after training:
#
# [output]
#
# - Nothing in the loss requires heads to differ.
#
# ---
# The divergence is the mean Jensen-Shannon divergence between the weights of the two heads.

# %%
model, tokenizer, _ = hw.models.load("mini")
text = (
    "The old farmer walked down to the river before the sun came up. He carried a small lamp and a basket of "
    "bread, because his sister had told him that the boats would be late. When the first boat came, a tall "
    "woman stood in it and called his name."
)
ids = tokenizer(text, return_tensors="pt")["input_ids"]  # [B=1, T]
untrained = hw.models.Transformer(model.config).eval()
with torch.no_grad(), hw.watch(model) as heads, hw.watch(untrained) as random_heads:
    model(ids), untrained(ids)
trained_diversity, random_diversity = hw.diversity(heads), hw.diversity(random_heads)
print(f"trained {trained_diversity.number:.2f}, untrained {random_diversity.number:.2f}")
assert trained_diversity.number > 5 * random_diversity.number

# %% [markdown]
# The loss does not require heads to differ. With random weights all attend almost uniformly; after training
# they differ.
#
# ## If one head fails, do others compensate?
# We switch heads off and measure the loss on this text: each head alone, then more and more of them.


# %% slide: If one head fails, do others compensate?
# [output]
#
# - Switched off alone, most heads change the loss very little.
# - Two possible reasons: the head does nothing useful here, **or another head does the same**.
# - So switch off two at once: does the loss rise by more than the sum of the two?
#
# ---
# Stop here and let the group say how to tell the two reasons apart. The last point is the answer.


# %%
def loss(model, ids):
    logits = model(ids)  # [B, T, vocabulary]
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])


robustness = hw.robustness(model, [ids], loss, repeats=2, points=[28, 56], progress=False)
print(robustness)
changes = torch.stack(list(robustness.single.values())) - robustness.baseline  # [L=8, H=7]
assert (changes < 0.05).sum() > 45 and 0.1 < changes.max() < 0.11

# %% [markdown]
# (`robustness.plot()` draws this.) Most heads raise the loss by less than 0.05 nats, none by more than 0.11. A
# small change can have two reasons: the head does nothing useful here, or another head does the same. To
# distinguish them, we switch off two heads at once. If one can replace the other, the loss rises more with both
# off than the sum of the two single rises.
#
# We take a text that needs particular heads: random tokens, and then the same tokens again. The second copy can
# only be predicted by copying. For all 21 pairs of heads of layer 5, the plot shows the rise with both off
# minus the sum of the two single rises, against how much the two heads differ.


# %% slide: Switch off two heads at once
# - Random tokens, then the same tokens again: the second copy can only be predicted by **copying**.
# - All 21 pairs of heads of layer 5: how much does the loss rise with both off, minus the two single rises?
#
# [output]
#
# - So 5.2 and 5.5 replace each other: with both off, the loss rises by twice the sum and more.

# %% slide: The two most similar heads replace each other
# [picture]
#
# ---
# Each point is a pair. One pair stands out, and it is the most similar pair: both heads copy (lesson 13).
#
# No head of the layer *changes* to compensate: heads of a layer do not depend on each other, and the weights
# of the others stay the same. Heads of later layers may change; the text of the lesson has the measurement.
# On a longer text, six random heads off changed the loss by +0.053; the sum of their single changes
# is +0.047. So
# on average heads replaced one another only a little.

# %%
P = 32  # length of the part that is repeated
torch.manual_seed(1)
tokens = 300 + torch.randperm(7892)[: 3 * P].view(3, P)  # [B=3, P]: no token occurs twice
repeated = torch.cat([tokens, tokens], dim=1)  # [B=3, T=64]
with torch.no_grad(), hw.watch(model) as repeated_heads:
    model(repeated)
diversity = hw.diversity(repeated_heads)


def copy_loss(*heads_off):
    """Return the loss on the second copy with these heads of layer 5 switched off."""
    with torch.no_grad(), hw.ablate(model, [(5, head) for head in heads_off]):
        logits = model(repeated)[:, P - 1 : -1]  # [B, P, vocabulary]
    return float(torch.nn.functional.cross_entropy(logits.mT, repeated[:, P:]))


intact = copy_loss()
single = [copy_loss(head) - intact for head in range(7)]
pairs = [(a, b) for a in range(7) for b in range(a)]
divergences = [float(diversity.attention[5][pair]) for pair in pairs]
rises = [copy_loss(a, b) - intact for a, b in pairs]
excess = [both - (single[a] + single[b]) for both, (a, b) in zip(rises, pairs, strict=True)]

most = max(range(21), key=lambda n: excess[n])

figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
axes.scatter(divergences, excess, color="#a6306f")
axes.axhline(0, color="grey", linewidth=0.8)
b, a = pairs[most]
axes.annotate(f"5.{a} and 5.{b}", (divergences[most], excess[most]), (6, -3), textcoords="offset points")
axes.set_xlabel("divergence of the two heads, nats")
axes.set_ylabel("rise of the loss: both off,\nminus the two single rises")
axes.set_title("The two most similar heads can replace one another", loc="left", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)
print(f"5.{a} off: {single[a]:+.2f}; 5.{b} off: {single[b]:+.2f}; both off: {rises[most]:+.2f}")
assert most == min(range(21), key=lambda n: divergences[n])  # the most similar pair
assert rises[most] > 2 * (single[a] + single[b]) and sorted(excess)[-2] < 0.1
with torch.no_grad(), hw.ablate(model, [(5, a)]), hw.watch(model) as other_heads:
    model(repeated)
assert torch.equal(other_heads[5].map.dense(), repeated_heads[5].map.dense())  # no head of the layer changes

# %% [markdown]
# One pair stands out, and it is the most similar pair: both heads copy (lesson 13). So "if one head fails,
# others compensate" is true for two heads that do the same. But no head of the layer *changes* to compensate:
# heads of one layer do not depend on each other, and the other heads' weights stay the same when one is off
# (last line of the cell).
#
# Such pairs are rare. In `python -m studies.claims`, on a longer text, switching off six heads of mini, chosen
# at random, changed the loss by +0.053 nats per token (mean of 10 draws); the sum of their six single changes
# is +0.047. So on average heads replaced one another only a little.
#
# Heads of *later* layers do depend on the head that is off, since they read what it wrote. Could they
# compensate? Wang 2022 found such *backup heads* in GPT-2 small: when the heads that copy a name are off,
# others take over a part. `python -m studies.backup_heads` switches off the heads that copy most, on
# repeated random tokens. The *direct effect* of a head is what it adds to the logit of the right token
# without passing through later layers. The table shows how much of it is lost, and how much the direct
# effects of all heads of later layers, and of the feed-forward networks, change as a result. A positive
# number would compensate. All are means over five draws of tokens.
#
# | model | off | direct effect | later heads | the same, other heads off | feed-forward | logit |
# |---|---|---:|---:|---|---:|---:|
# | mini | 5.2 | -4.22 | -0.68 | +0.02 to +0.16 | -2.18 | -7.08 |
# | mini | 5.5 | -2.19 | +0.12 | +0.02 to +0.16 | -0.74 | -2.81 |
# | SmolLM2-135M | 23.2 | -0.74 | +0.07 | -0.06 to +0.03 | -0.53 | -1.20 |
# | SmolLM2-135M | 23.1 | -0.35 | +0.15 | -0.06 to +0.03 | -0.16 | -0.37 |
# | SmolLM2-135M | 23.2, 23.7, 23.1 | -1.63 | -0.26 | -0.10 to +0.06 | -1.42 | -3.32 |
#
# In mini no later head takes over. Later heads even lose when 5.2 is off, since they need what it wrote;
# when 5.5 is off, they gain no more than when other heads of the layer are off. In SmolLM2, with 23.1 off,
# later heads replace 0.42 of its direct effect, in each draw more than with any other head of the layer
# off. It is mostly head 24.4, which lowers the logit of the right token, and lowers it less when 23.1 is
# missing. But with all three copying heads off, the later heads lose, and the feed-forward networks lose in
# every row, so that the logit falls by at least as much as the direct effect. So compensation across layers
# exists, for single heads and in part. It does not make a head superfluous.
#
# The output of the layer is a sum with one term per head. Switching a head off sets its term to 0. The
# exercise writes attention as that sum.

# %% slide: The output of a layer is a sum over its heads
# $$\text{output} = \sum_{i=1}^{h} \text{head}_i\, W^O_i$$
#
# - Switching a head off sets its term to 0. The other terms do not change.
# - So each head can be measured, scaled or left out separately.
# - "If one head fails, others compensate": true for heads that do the same; across layers only in part.

# %% exercise: SummedHeads
"""Multi-head attention as a sum of the contributions of its heads."""

import torch
from torch import Tensor, nn


class SummedHeads(nn.Module):
    """Concatenating heads and multiplying by W_O is the same as adding the contributions of all heads.

    So each head can be measured, scaled or left out separately: it is one term of a sum.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        small = d_model**-0.5
        self.W_Q = nn.Parameter(small * torch.randn(num_heads, d_model, self.d_k))  # a matrix for each head
        self.W_K = nn.Parameter(small * torch.randn(num_heads, d_model, self.d_k))
        self.W_V = nn.Parameter(small * torch.randn(num_heads, d_model, self.d_k))
        self.W_O = nn.Parameter(small * torch.randn(num_heads, self.d_k, d_model))

    def contribution(self, head: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What one head adds to the output: [B, T, d_model]."""
        raise NotImplementedError  # q, k, v of this head; attend; project to d_model

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, T, d_model], key and value [B, S, d_model] -> [B, T, d_model]"""
        raise NotImplementedError  # all heads together


# %% hint: idea
# Concatenating all heads and multiplying by $W_O$ is a sum: each head's output is multiplied by its own
# rows of $W_O$, and the results are added. So compute for one head what it adds, and add that up over the
# heads.

# %% hint: formula
# $$\text{out} = \sum_{h=1}^{H} \text{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}}\right) V_h W^O_h$$
#
# $Q_h = \text{query} \cdot W^Q_h$, and likewise for keys and values. The scale belongs to a head: $d_k$,
# not $d_{model}$.

# %% hint: code
# `contribution`:
#
# 1. Multiply query, key and value by this head's matrices, such as `self.W_Q[head]`: `[B, T, d_k]`,
#    `[B, S, d_k]` and `[B, S, d_k]`.
# 2. `scores`: `[B, T, S]`, scaled; their softmax over the keys.
# 3. Return weights times values `[B, T, d_k]`, times this head's `W_O`: `[B, T, d_model]`.
#
# `forward`: return the sum of the contributions of heads 0 to `num_heads - 1`.

# %% solution
"""Multi-head attention as a sum of the contributions of its heads."""

import torch
from torch import Tensor, nn


class SummedHeads(nn.Module):
    """Concatenating heads and multiplying by W_O is the same as adding the contributions of all heads.

    So each head can be measured, scaled or left out separately: it is one term of a sum.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        small = d_model**-0.5
        self.W_Q = nn.Parameter(small * torch.randn(num_heads, d_model, self.d_k))  # a matrix for each head
        self.W_K = nn.Parameter(small * torch.randn(num_heads, d_model, self.d_k))
        self.W_V = nn.Parameter(small * torch.randn(num_heads, d_model, self.d_k))
        self.W_O = nn.Parameter(small * torch.randn(num_heads, self.d_k, d_model))

    def contribution(self, head: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What one head adds to the output: [B, T, d_model]."""
        q = query @ self.W_Q[head]  # [B, T, d_k]
        k = key @ self.W_K[head]  # [B, S, d_k]
        v = value @ self.W_V[head]  # [B, S, d_k]
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5  # [B, T, S]
        return scores.softmax(dim=-1) @ v @ self.W_O[head]  # [B, T, d_model]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, T, d_model], key and value [B, S, d_model] -> [B, T, d_model]"""
        parts = [self.contribution(head, query, key, value) for head in range(self.num_heads)]
        return torch.stack(parts).sum(dim=0)  # [B, T, d_model]


# %% try
module = SummedHeads(d_model=24, num_heads=3)
query, key = torch.randn(2, 5, 24), torch.randn(2, 7, 24)  # 2 sequences, T = 5, S = 7
output = module(query, key, key)
print("output:", tuple(output.shape), "expected: (2, 5, 24)")
print("head 0:", tuple(module.contribution(0, query, key, key).shape), "expected: (2, 5, 24)")

# %%
eight, sixteen = hw.MultiHeadAttention(512, 8), hw.MultiHeadAttention(512, 16)
wide = hw.MultiHeadAttention(512, 16, head_dim=64)  # 16 heads of the same width as the 8
for mha in (eight, sixteen, wide):
    parameters = sum(weight.numel() for weight in mha.q_proj.parameters())
    print(
        f"{mha.num_heads:2} heads of {mha.head_dim}: {parameters:,} parameters in the projection of queries"
    )

# %% question: A model of width 512 changes from 8 heads to 16. How do d_k and the number of parameters change? What if d_k stays 64?
# $d_k$ halves from 64 to 32. Every projection keeps its size (262,656 with its bias), since 8 × 64 = 16 × 32
# = 512. If $d_k$ stays 64, the projections of queries, keys and values have 16 × 64 = 1024 output channels
# and twice the parameters (525,312 each), and $W_o$ maps 1024 channels back to 512. Some models are built in
# this way: in 6 of the 36 in `headwise presets`, the widths of all heads do not add up to the width of the
# model.

# %% question: You switch off each of 32 heads alone, and for 20 of them the loss hardly changes. May you remove these 20?
# Not on this evidence. How much the loss rises when one head is off does not tell how much it rises when
# several are off: if two heads do the same, it rises little with one of them off and much with both off (the
# plot above).
# Remove a few, measure, and continue from there, as `hw.robustness` does.
