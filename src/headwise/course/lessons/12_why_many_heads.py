"""Why many heads.

idea: heads share one width, so that more heads are narrower heads
minutes: 10
level: junior
repairs: scale by d_model; scale by sqrt H; heads interleaved
"""

# %% [markdown]
# Course pages say: *more heads, richer representations*. Heads are no gift, though: they share the width of
# the model. Of $h$ heads each gets $d_k = d_{model} / h$ channels. Parameters stay the same, heads get
# narrower:

# %%
import torch

import headwise as hw

torch.manual_seed(0)
counts = [1, 2, 4, 8, 16, 32]
sizes = set()
for num_heads in counts:
    mha = hw.MultiHeadAttention(256, num_heads)
    sizes.add(sum(weight.numel() for weight in mha.parameters()))
    print(f"heads: {num_heads:2}, of {mha.head_dim:3} channels each: {max(sizes):,} parameters")
assert len(sizes) == 1

# %% [markdown]
# ## What one head cannot do
# A head has one row of weights for each query. If it looks at two places alike, it gets their mean, and the
# mean does not know what stood where. Two heads look at a place each and keep both:

# %%
blue_red = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # [S=2, Dv=2]: a blue value, then a red one
red_blue = blue_red.flip(0)
one_head = torch.tensor([[0.5, 0.5]])  # [H=1, S]: both places at once
two_heads = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # [H=2, S]: a place each

print("one head: ", (one_head @ blue_red).flatten().tolist(), (one_head @ red_blue).flatten().tolist())
print("two heads:", (two_heads @ blue_red).flatten().tolist(), (two_heads @ red_blue).flatten().tolist())
assert torch.equal(one_head @ blue_red, one_head @ red_blue)
assert not torch.equal(two_heads @ blue_red, two_heads @ red_blue)

# %% [markdown]
# This is why the paper of 2017 has several heads. It is a reason for two, for four. It is none for ever more.
#
# ## What a narrow head cannot do
# The scores of a head are a product of $[T, d_k]$ and $[d_k, T]$: a table of $T \times T$ numbers whose rank
# is $d_k$ at most. (Softmax bends it afterwards; what there was to choose by are still $d_k$ numbers for each
# key.)
#
# And it is less sharp. Below, one of 64 keys is exactly what the query asks for, the others are random, every
# channel is about 1 large. How much weight does the right key get?

# %%
ranks, right_key = [], []
for num_heads in counts:
    d_k = 256 // num_heads
    q, k = torch.randn(2, 300, d_k, dtype=torch.float64)  # [T=300, d_k] each
    ranks.append(int(torch.linalg.matrix_rank(q @ k.T)))
    k = torch.randn(200, 64, d_k)  # [tries, S=64, d_k]
    scores = (k @ k[:, 0, :, None]).squeeze(-1) / d_k**0.5  # [tries, S]: the query is the first key
    right_key.append(float(scores.softmax(-1)[:, 0].mean()))
    print(f"heads: {num_heads:2}, rank {ranks[-1]:3} of 300, weight on the right key {right_key[-1]:.2f}")
assert ranks == [256 // num_heads for num_heads in counts]
assert right_key == sorted(right_key, reverse=True)

# %% [markdown]
# A narrow head can be sharp, too, but it needs larger numbers for it. So there is a trade: more heads keep
# more things apart, narrower heads choose worse. Where is the best place? That must be measured.
#
# ## Six ways to cut one width
# For headwise the same small language model was trained with 1 to 32 heads in each of its 4 layers: width
# 256, 3,934,464 parameters in every case, three seeds, 2,000 steps (`python -m studies.head_counts` in the
# source repository). Mean and standard deviation over seeds. Without one head: how much the loss rises when
# one is switched off, on average. The best induction head: how much of its weight lies where a head that
# copies looks.
#
# | heads | $d_k$ | validation loss | how much heads of a layer differ | without one head | best induction head |
# |---:|---:|---|---|---:|---|
# | 1 | 256 | 2.7953 ± 0.0414 | – | 0.8035 | 0.27 ± 0.05 |
# | 2 | 128 | 2.7752 ± 0.0146 | 0.422 ± 0.031 | 0.9767 | 0.37 ± 0.04 |
# | 4 | 64 | 2.7518 ± 0.0117 | 0.385 ± 0.003 | 0.4125 | 0.44 ± 0.06 |
# | 8 | 32 | 2.7714 ± 0.0224 | 0.418 ± 0.005 | 0.1402 | 0.30 ± 0.04 |
# | 16 | 16 | 2.8389 ± 0.0250 | 0.409 ± 0.006 | 0.0371 | 0.03 ± 0.01 |
# | 32 | 8 | 2.9437 ± 0.0151 | 0.379 ± 0.004 | 0.0150 | 0.02 ± 0.00 |

# %%
from matplotlib import pyplot

losses = [2.7953, 2.7752, 2.7518, 2.7714, 2.8389, 2.9437]  # the table above
spreads = [0.0414, 0.0146, 0.0117, 0.0224, 0.0250, 0.0151]
figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.errorbar(counts, losses, spreads, marker="o", color="#a6306f", capsize=3)
left.set_title("Too many heads are worse", loc="left", fontsize=11)
left.set_ylabel("validation loss, nats per token")
right.plot(counts, right_key, marker="o", color="#b06a00")
right.set_title("Narrow heads are less sharp", loc="left", fontsize=11)
right.set_ylabel("weight on the one right key of 64")
right.set_ylim(0, 1.05)
for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count}\n{256 // count}" for count in counts])
    axes.set_xlabel("heads a layer, and channels of each")
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Read it with care:
#
# - **16 and 32 heads are clearly worse than 8**, seed by seed. **1, 2 and 4 cannot be told apart from 8**:
#   three seeds are few, and the differences are small. Even one head a layer is not clearly worse; four
#   layers still have four.
# - The best head that copies (induction, lesson 13) is strongest with 4 heads; with 16 and 32 it is all but
#   gone. That fits the picture on the right, but does not prove it: narrow heads also have fewer rotary
#   frequencies.
# - It is one width, one learning rate, one amount of training. Large models have more heads because they are
#   *wider*. Here are the models whose sizes headwise knows:

# %%
from collections import Counter

from headwise.nn.presets import PRESETS

widths = Counter(one.head_dim or one.d_model // one.num_heads for one in PRESETS.values())
print(f"of {len(PRESETS)} models:", ", ".join(f"{n} have d_k = {d_k}" for d_k, n in widths.most_common()))
odd = sum((one.head_dim or 0) * one.num_heads not in (0, one.d_model) for one in PRESETS.values())
print(f"{odd} of them have heads that do not add up to their width")
assert min(widths) >= 64 and odd == 6 and len(PRESETS) == 36

# %% [markdown]
# None goes below 64 channels. Width buys heads; heads do not buy width.
#
# ## Do heads differ?
# Diversity is the mean Jensen-Shannon divergence between the weights of two heads of a layer: 0 if they look
# at the same, 0.693 ($\ln 2$) if at nothing in common. mini, the small trained model inside headwise (4
# layers of 8 heads), beside the same model with random weights. From here on 0.5 is head 5 of layer 0, both
# counted from 0.

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
differ, by_chance = hw.diversity(heads), hw.diversity(random_heads)
print(f"trained {differ.number:.2f}, untrained {by_chance.number:.2f}")
assert differ.number > 5 * by_chance.number

# %% [markdown]
# Nobody told the heads to differ. They start out all the same, looking evenly, and training takes them apart.
#
# ## If one head fails, do others compensate?
# Switch heads off and see what the loss on this text does: each head alone, then more and more of them.


# %%
def loss(model, ids):
    logits = model(ids)  # [B, T, vocabulary]
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])


found = hw.robustness(model, [ids], loss, repeats=2, points=[16, 32], progress=False)
print(found)
changes = torch.stack(list(found.single.values())) - found.baseline  # [L=4, H=8]
assert (changes < 0.05).sum() > 16 and changes.max() > 0.3

# %% [markdown]
# (`found.plot()` draws this, with as many points as you like.) Many heads are hardly missed, a few are missed
# a lot. But "hardly missed" may mean two things: the head did nothing, or another one does the same. Two
# heads gone together tell: if they can stand in for one another, both together cost more than each alone,
# added up. All 28 pairs of the first layer, by how much the two differ:


# %%
def rise(*off):
    with torch.no_grad(), hw.ablate(model, [(0, head) for head in off]):
        return float(loss(model, ids)) - found.baseline


alone = found.single[0] - found.baseline  # [H=8]: the first layer
pairs = [(a, b) for a in range(8) for b in range(a)]
apart = [float(differ.attention[0][pair]) for pair in pairs]
both = [rise(a, b) for a, b in pairs]
more = [together - float(alone[a] + alone[b]) for together, (a, b) in zip(both, pairs, strict=True)]

most, second = sorted(range(28), key=lambda n: -more[n])[:2]

figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
axes.scatter(apart, more, color="#a6306f")
axes.axhline(0, color="grey", linewidth=0.8)
for n in (most, second):
    name = "0.{1} and 0.{0}".format(*pairs[n])
    axes.annotate(name, (apart[n], more[n]), (6, -3), textcoords="offset points")
axes.set_xlabel("how much two heads differ, nats")
axes.set_ylabel("loss: both off, minus\neach off alone, added up")
axes.set_title("The two pairs most alike stand in for one another", loc="left", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)
b, a = pairs[most]
print(f"0.{a} off: {alone[a]:+.2f}; 0.{b} off: {alone[b]:+.2f}; both off: {both[most]:+.2f}")
assert {most, second} == set(sorted(range(28), key=lambda n: apart[n])[:2])  # the two pairs most alike
assert both[most] > 2 * float(alone[a] + alone[b])
with torch.no_grad(), hw.ablate(model, [(0, a)]), hw.watch(model) as rest:
    model(ids)
assert torch.equal(rest[0].map.dense(), heads[0].map.dense())  # nobody in the layer looks elsewhere now

# %% [markdown]
# Two pairs stand out, and they are the two that are most alike. So "if one head fails, others compensate" is
# true of twins. And nobody *does* anything to compensate: heads of one layer do not see each other, and none
# of them looks elsewhere when another is gone. There simply were two that do the same.
#
# Twins are rare: where three heads of mini at a time were drawn by chance (`python -m studies.claims`, on a
# longer text), they cost +0.17 together and +0.19 added up. Nothing was made up for.
#
# What does it mean to switch a head off? Its output becomes 0, and so does its term in a sum: that is the
# exercise.

# %% exercise: SummedHeads
"""Multi-head attention as a sum: every head adds its own part to the output."""

import torch
from torch import Tensor, nn


class SummedHeads(nn.Module):
    """Concatenating heads and multiplying by W_O is the same as adding up what each head writes.

    So a head can be seen, weighed or left out by itself: it is one term of a sum.
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

    def written(self, head: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What one head adds to the output: [B, T, d_model]."""
        raise NotImplementedError  # this head's q, k, v; attend; back to the width of the model

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, T, d_model], key and value [B, S, d_model] -> [B, T, d_model]"""
        raise NotImplementedError  # all heads together


# %% solution
"""Multi-head attention as a sum: every head adds its own part to the output."""

import torch
from torch import Tensor, nn


class SummedHeads(nn.Module):
    """Concatenating heads and multiplying by W_O is the same as adding up what each head writes.

    So a head can be seen, weighed or left out by itself: it is one term of a sum.
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

    def written(self, head: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What one head adds to the output: [B, T, d_model]."""
        q = query @ self.W_Q[head]  # [B, T, d_k]
        k = key @ self.W_K[head]  # [B, S, d_k]
        v = value @ self.W_V[head]  # [B, S, d_k]
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5  # [B, T, S]
        return scores.softmax(dim=-1) @ v @ self.W_O[head]  # [B, T, d_model]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, T, d_model], key and value [B, S, d_model] -> [B, T, d_model]"""
        parts = [self.written(head, query, key, value) for head in range(self.num_heads)]
        return torch.stack(parts).sum(dim=0)  # [B, T, d_model]


# %%
eight, sixteen = hw.MultiHeadAttention(512, 8), hw.MultiHeadAttention(512, 16)
kept = hw.MultiHeadAttention(512, 16, head_dim=64)  # 16 heads as wide as those of the 8
for mha in (eight, sixteen, kept):
    each = sum(weight.numel() for weight in mha.q_proj.parameters())
    print(f"{mha.num_heads:2} heads of {mha.head_dim}: {each:,} parameters in the projection of queries")

# %% question: A model of width 512 goes from 8 heads to 16. What becomes of d_k and of the parameters? And what if d_k shall stay 64?
# $d_k$ halves from 64 to 32; every projection keeps its size (262,656 with its bias), since 8 × 64 = 16 × 32
# = 512. If $d_k$ stays 64, the projections of queries, keys and values lead to 16 × 64 = 1024 channels and
# twice the parameters (525,312 each), and $W_o$ leads back from 1024 to 512. Some models do so: 6 of the 36
# in `headwise presets` have heads that do not add up to their width.

# %% question: You switch off each of 32 heads alone, and 20 of them cost next to nothing. May you remove these 20?
# Not on this evidence. Alone says nothing about together: of two heads that do the same, each is missed
# little and both are missed a lot (the picture above). Remove a few, measure, go on from there, as
# `hw.robustness` does.

# %% [markdown]
# The next lesson looks at what the heads do that are missed, and at those that rest.
