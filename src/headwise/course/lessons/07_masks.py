"""Masks.

idea: a mask takes keys out before the softmax, so that the shares of all others still sum to 1
minutes: 9
level: junior
repairs: mask inverted; mask after softmax; causal hides itself; mask on queries; fill with zero
"""

# %% [markdown]
# Until now every query could look at every key. Two kinds of keys must not be seen:
#
# - **the future**: a model that predicts the next word is trained on all positions of a text at once. Position 3
#   must not see position 4, which is the answer. Hiding all later keys is called a *causal* mask.
# - **padding**: texts of a batch have different lengths. Short ones are filled up, and the filling means nothing.
#
# A hidden key gets the score $-\infty$, *before* the softmax. Since $e^{-\infty} = 0$, its share is exactly 0, and
# the keys that are left share the whole:
#
# $$\text{softmax}\left(\frac{QK^\top}{\sqrt{d}} + M\right) V, \qquad M_{ij} = 0 \text{ (may attend) or } -\infty
# \text{ (hidden)}$$

# %%
import torch

torch.manual_seed(0)
words = ["I", "saw", "her", "duck"]
T = len(words)
scores = torch.randn(T, T)  # [T, S]: as lesson 3 makes them
causal = torch.ones(T, T, dtype=torch.bool).tril()  # True = may attend: row 2 sees the keys 0, 1 and 2
weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)  # [T, S]
print(causal.int())
print("rows sum to", [round(total, 4) for total in weights.sum(-1).tolist()])

# %% [markdown]
# ## Before the softmax, not after
# Why not take the softmax first and then set the hidden shares to 0? Because the hidden keys were counted: they
# took their part of the sum. The rows do not sum to 1 any more, and what is missing is exactly what the future had.

# %%
import matplotlib.pyplot as plt

after = scores.softmax(-1) * causal  # [T, S]: too late

figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
told = ["no mask", "mask before the softmax", "mask after the softmax"]
for ax, title, shown in zip(axes, told, [scores.softmax(-1), weights, after], strict=True):
    seen = torch.ones_like(causal) if title == "no mask" else causal
    ax.imshow(shown.masked_fill(~seen, torch.nan), cmap="Purples", vmin=0, vmax=1)
    ax.set_facecolor("0.9")  # hidden: grey
    for i, j in seen.nonzero().tolist():
        dark = shown[i, j] > 0.6
        ax.text(j, i, f"{shown[i, j]:.2f}", ha="center", va="center", color="white" if dark else "black")
    ax.set_title(title, fontsize=11)
    ax.set_xticks(range(T), words)
    sums = shown.sum(-1).tolist()
    ax.set_yticks(range(T), [f"{word}  (sum {row:.2f})" for word, row in zip(words, sums, strict=True)])
figure.suptitle("Weights of each query (row) on each key; grey: hidden", fontsize=12)

# %% [markdown]
# And it is worse than a wrong sum: the future leaks. Change nothing but the score of a hidden key, and the shares
# of the keys that may be seen change. With the mask before the softmax they do not.

# %%
louder = scores.clone()
louder[0, 3] += 5.0  # "I" and "duck": a pair that is hidden

before_again = louder.masked_fill(~causal, -torch.inf).softmax(-1)
after_again = louder.softmax(-1) * causal
assert torch.equal(weights, before_again)
print(f"mask before: I on I, {weights[0, 0]:.3f} -> {before_again[0, 0]:.3f}")
print(f"mask after:  I on I, {after[0, 0]:.3f} -> {after_again[0, 0]:.3f}")
assert after_again[0, 0] < after[0, 0]

# %% [markdown]
# A whole model keeps this promise through all its layers. `mini`, the model inside headwise, reads two texts that
# differ in the last word only. Everything it computed before that word is the same, and the weights of a head show
# why: nothing above the diagonal.

# %%
import headwise as hw

mini, tokenizer, _ = hw.models.load("mini")
texts = ("He left the old house", "He left the old man")
one, other = (tokenizer(text, return_tensors="pt")["input_ids"] for text in texts)  # [B=1, T]
with torch.no_grad():
    same = (mini(one) - mini(other)).abs().amax(-1)[0]  # [T]: the largest difference at each position
print("differences by position:", [f"{x:.1e}" for x in same.tolist()])
assert same[:-1].max() < 1e-4 and same[-1] > 1
with hw.watch(mini, tokenizer=tokenizer) as heads:
    mini(one)
heads.plot(0, 2)

# %% [markdown]
# ## Padding
# Two sentences, three and five words long. The mask of keys is `[B, S]`; with two dimensions of size 1 it reads
# `[B, 1, 1, S]` and fits every head and every query. It goes over the *keys*: a padded query may compute what it
# likes, nobody looks at it, and the loss leaves it out.
#
# The test of a padding mask: write nonsense into the padding, and no real position may notice.

# %%
ids = torch.tensor([[7, 4, 9, 0, 0], [3, 8, 4, 6, 2]])  # [B, S]: numbers of words; 0 fills up
real = (ids != 0)[:, None, None, :]  # [B, 1, 1, S], True = a word
print(real[:, 0, 0].int())

mha = hw.MultiHeadAttention(d_model=16, num_heads=4).double()
x = torch.randn(2, 5, 16, dtype=torch.float64)
nonsense = x.clone()
nonsense[0, 3:] = 100.0  # the padding of the first sentence
assert torch.allclose(mha(x, mask=real)[0][0, :3], mha(nonsense, mask=real)[0][0, :3])
assert not torch.allclose(mha(x)[0][0, :3], mha(nonsense)[0][0, :3])  # without a mask it is noticed

both = hw.Mask.causal() & hw.Mask.padding([3, 5])  # headwise keeps rules; no matrix is made
assert torch.equal(both.full(5, 5, batch=2), real & torch.ones(5, 5, dtype=torch.bool).tril())
print(both)

# %% [markdown]
# ## What does True mean?
# A common mistake with masks has no wrong line in it, only a wrong convention:
#
# | where | hidden is |
# |---|---|
# | headwise | `False`, or 0 |
# | most tutorials: `scores.masked_fill(mask == 0, ..)` | 0, or `False` |
# | `F.scaled_dot_product_attention(attn_mask=..)` | `False` |
# | `nn.MultiheadAttention(attn_mask=.., key_padding_mask=..)` | **`True`** |
#
# So two functions of the same library read the same tensor in opposite ways, and neither can know what you meant.
# With a causal mask the wrong way round, each word sees only what comes *after* it. Shapes fit, and rows sum to 1,
# all but the last, for which nothing is left.

# %%
import torch.nn.functional as F

theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
mask = torch.ones(5, 5, dtype=torch.bool).tril()  # True = may attend
_, as_given = theirs(x, x, x, attn_mask=mask)
_, turned = theirs(x, x, x, attn_mask=~mask)
print("row 1, mask as given:", [round(w, 2) for w in as_given[0, 1].tolist()])
print("row 1, mask turned:  ", [round(w, 2) for w in turned[0, 1].tolist()])
assert as_given[0, 1, :2].sum() == 0 and turned[0, 1, 2:].sum() == 0
assert torch.allclose(as_given[0, :4].sum(-1), torch.ones(4).double()) and as_given[0, 4].isnan().all()

q, k, v = x[:, None], x[:, None], x[:, None]  # [B, H=1, T, D]: one head is enough here
assert torch.allclose(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), hw.attention(q, k, v, mask)[0])
try:
    hw.attention(q, k, v, ~mask)  # a causal mask the other way round is surely a mistake
except hw.errors.MaskError as error:
    print("headwise:", error)

# %% [markdown]
# ## A query that may see nothing
# A row without any key: a sentence of length 0 in a batch, or the last row of the mask that was the wrong way
# round. The softmax of nothing is not defined, and three answers are in use. All three, on one mask whose second
# row is empty:

# %%
hole = torch.ones(3, 3, dtype=torch.bool).tril()
hole[1] = False
three = torch.randn(1, 1, 3, 8)  # [B, H, T, D]
s = three @ three.transpose(-2, -1) / 8**0.5  # [B, H, T, S]
answers = {
    "-inf: NaN": s.masked_fill(~hole, -torch.inf).softmax(-1)[0, 0],
    "-1e9: uniform": s.masked_fill(~hole, -1e9).softmax(-1)[0, 0],
    "headwise: 0": hw.attention(three, three, three, hole)[1][0, 0],
}
for name, rows in answers.items():
    print(f"{name:14}", [round(w, 2) for w in rows[1].tolist()])
assert answers["-inf: NaN"][1].isnan().all()
assert torch.allclose(answers["-1e9: uniform"][1], torch.tensor(1 / 3))
assert (answers["headwise: 0"][1] == 0).all()

# %% [markdown]
# - $-\infty$ gives $0/0$. The NaN is loud, but it spreads: the next layer multiplies it with everything.
# - $-10^9$ is quiet. All scores of the row are equally bad, so all keys get an equal share: the query looks at
#   exactly what it must not see, and no number looks wrong.
# - 0 says what is true: nothing was seen, so nothing comes out. headwise gives output 0 and gradient 0 for such a
#   row.
#
# Course code often has one of the first two, and both are fine as long as no row is empty. How far does one NaN
# get?

# %%
layer = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
empty = torch.tensor([[True] * 5, [False] * 5])  # the first sentence is all padding; here True = hidden
first, _ = layer(x, x, x, key_padding_mask=empty)
first.sum().backward()
print("NaN in the output of each sentence:", first.isnan().any(-1).any(-1).tolist())
print("NaN in the gradient of the weights all share:", bool(layer.in_proj_weight.grad.isnan().any()))
assert layer.in_proj_weight.grad.isnan().any()

ours = hw.MultiHeadAttention.from_torch(layer)  # the same weights
ours(x, mask=~empty[:, None, None, :])[0].sum().backward()  # turned: True = may attend
print("and in headwise:", any(bool(weight.grad.isnan().any()) for weight in ours.parameters()))
assert not any(weight.grad.isnan().any() for weight in ours.parameters())

# %% exercise: padding_mask
"""A padding mask from lengths."""

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, max_len: int) -> Tensor:
    """lengths [B] -> bool [B, 1, 1, max_len], True where a key may be seen: the first lengths[b] of each."""
    raise NotImplementedError  # which positions are real, then two dimensions for heads and queries


# %% solution
"""A padding mask from lengths."""

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, max_len: int) -> Tensor:
    """lengths [B] -> bool [B, 1, 1, max_len], True where a key may be seen: the first lengths[b] of each."""
    positions = torch.arange(max_len, device=lengths.device)  # [S]
    real = positions < lengths[:, None]  # [B, S]: position 0 is the first, so length 3 means 0, 1 and 2
    return real[:, None, None, :]  # [B, 1, 1, S]


# %%
at_end = hw.Mask.causal().full(5, 5)[0, 0, :3]  # [3, S]: what the real queries of the first sentence may see
assert not at_end[:, 3:].any()  # no padding among it, and nobody hid any

# %% question: A model reads left to right and padding stands at the end. Does it still need a padding mask in attention?
# For its real positions, no: padding comes after them, so the causal mask hides it already. It is still needed
# where padding stands at the *front*, as it often does in generation, where there is no causal mask (an encoder,
# cross-attention), and the loss must leave padded positions out in any case.

# %% question: A colleague fills hidden scores with 0 instead of -inf, "since 0 means nothing". What happens?
# $e^0 = 1$, so a hidden key counts like a key with score 0: about as much as an average one, and more than every
# key with a negative score. Such a mask hides nothing: it only puts a made-up score in the place of the true one.

# %% [markdown]
# **Next:** queries of one text look into another text, where a causal mask has no place and padding is that of the
# *other* text.
