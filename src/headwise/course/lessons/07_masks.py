"""Masks.

idea: a mask removes keys before the softmax, so that the weights of the other keys still sum to 1
minutes: 9
level: junior
repairs: mask inverted; mask after softmax; causal hides itself; mask on queries; fill with zero
"""

# %% [markdown]
# So far every query could attend to every key. Two kinds of keys must be hidden:
#
# - **the future**: a model that predicts the next word is trained on all positions of a text at once.
#   Position 3 must not attend to position 4, which is the answer. A *causal* mask hides all later keys.
# - **padding**: texts of a batch have different lengths. Short ones are filled up with meaningless tokens.
#
# A hidden key gets the score $-\infty$, *before* the softmax. Since $e^{-\infty} = 0$, its weight is exactly
# 0, and the weights of the other keys sum to 1:
#
# $$\text{softmax}\left(\frac{QK^\top}{\sqrt{d}} + M\right) V, \qquad M_{ij} = 0 \text{ (may attend) or } -\infty
# \text{ (hidden)}$$

# %%
import torch

torch.manual_seed(0)
words = ["I", "saw", "her", "duck"]
T = len(words)
scores = torch.randn(T, T)  # [T, S]: as in lesson 3
causal = torch.ones(T, T, dtype=torch.bool).tril()  # True = may attend: row 2 to keys 0, 1 and 2
weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)  # [T, S]
print(causal.int())
print("rows sum to", [round(total, 4) for total in weights.sum(-1).tolist()])

# %% [markdown]
# ## Before the softmax, not after
# Why not compute the softmax first and then set the hidden weights to 0? Because the hidden keys are in the
# sum that the softmax divides by. The rows no longer sum to 1: what is missing is the weight of the hidden
# keys.

# %%
import matplotlib.pyplot as plt

after = scores.softmax(-1) * causal  # [T, S]: mask after the softmax, wrong

figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
titles = ["no mask", "mask before the softmax", "mask after the softmax"]
for ax, title, table in zip(axes, titles, [scores.softmax(-1), weights, after], strict=True):
    visible = torch.ones_like(causal) if title == "no mask" else causal
    ax.imshow(table.masked_fill(~visible, torch.nan), cmap="Purples", vmin=0, vmax=1)
    ax.set_facecolor("0.9")  # hidden: grey
    for i, j in visible.nonzero().tolist():
        dark = table[i, j] > 0.6
        ax.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", color="white" if dark else "black")
    ax.set_title(title, fontsize=11)
    ax.set_xticks(range(T), words)
    sums = table.sum(-1).tolist()
    ax.set_yticks(range(T), [f"{word}  (sum {row:.2f})" for word, row in zip(words, sums, strict=True)])
figure.suptitle("Weights of each query (row) on each key; grey: hidden", fontsize=12)

# %% [markdown]
# The output then also depends on later tokens: if only the score of a hidden key changes, the weights of the
# visible keys change. With the mask before the softmax they do not.

# %%
changed = scores.clone()
changed[0, 3] += 5.0  # query "I", key "duck": a hidden pair

changed_before = changed.masked_fill(~causal, -torch.inf).softmax(-1)
changed_after = changed.softmax(-1) * causal
assert torch.equal(weights, changed_before)
print(f"mask before the softmax: weight of I on I, {weights[0, 0]:.3f} -> {changed_before[0, 0]:.3f}")
print(f"mask after the softmax:  weight of I on I, {after[0, 0]:.3f} -> {changed_after[0, 0]:.3f}")
assert changed_after[0, 0] < after[0, 0]

# %% [markdown]
# The same holds for a whole model and all its layers. `mini`, the model inside headwise, reads two texts that
# differ in the last word only. Everything it computes before that word is equal. The weights of a head show
# why: all weights above the diagonal are 0.

# %%
import headwise as hw

mini, tokenizer, _ = hw.models.load("mini")
texts = ("He left the old house", "He left the old man")
house, man = (tokenizer(text, return_tensors="pt")["input_ids"] for text in texts)  # [B=1, T]
with torch.no_grad():
    differences = (mini(house) - mini(man)).abs().amax(-1)[0]  # [T]: the largest at each position
print("differences by position:", [f"{x:.1e}" for x in differences.tolist()])
assert differences[:-1].max() < 1e-4 and differences[-1] > 1
with hw.watch(mini, tokenizer=tokenizer) as heads:
    mini(house)
heads.plot(0, 2)

# %% [markdown]
# ## Padding
# The next example has two sentences, of three and five words. Its mask of keys is `[B, S]`; with two
# dimensions of size 1 it becomes `[B, 1, 1, S]` and applies to every head and every query. It hides padded
# *keys*. The outputs of padded queries do not matter: no real position attends to them, and the loss ignores
# them.
#
# To test a padding mask, write nonsense into the padding: the outputs of real positions must not change.

# %%
ids = torch.tensor([[7, 4, 9, 0, 0], [3, 8, 4, 6, 2]])  # [B, S]: token ids; 0 is padding
real = (ids != 0)[:, None, None, :]  # [B, 1, 1, S], True = a word
print(real[:, 0, 0].int())

mha = hw.MultiHeadAttention(d_model=16, num_heads=4).double()
x = torch.randn(2, 5, 16, dtype=torch.float64)
nonsense = x.clone()
nonsense[0, 3:] = 100.0  # the padding of the first sentence
assert torch.allclose(mha(x, mask=real)[0][0, :3], mha(nonsense, mask=real)[0][0, :3])
assert not torch.allclose(mha(x)[0][0, :3], mha(nonsense)[0][0, :3])  # without a mask, outputs change

both = hw.Mask.causal() & hw.Mask.padding([3, 5])  # a mask defined by rules; no [T, S] tensor
assert torch.equal(both.full(5, 5, batch=2), real & torch.ones(5, 5, dtype=torch.bool).tril())
print(both)

# %% [markdown]
# ## What does True mean?
# A common mistake with masks is to mix up two conventions:
#
# | where | hidden is |
# |---|---|
# | headwise | `False`, or 0 |
# | most tutorials: `scores.masked_fill(mask == 0, ..)` | 0, or `False` |
# | `F.scaled_dot_product_attention(attn_mask=..)` | `False` |
# | `nn.MultiheadAttention(attn_mask=.., key_padding_mask=..)` | **`True`** |
#
# Two functions of the same library read the same tensor in opposite ways. With an inverted causal mask each
# word attends only to what comes *after* it. The shapes fit, and all rows sum to 1 except the last, which has
# no key.

# %%
import torch.nn.functional as F

torch_mha = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
mask = torch.ones(5, 5, dtype=torch.bool).tril()  # True = may attend
_, inverted = torch_mha(x, x, x, attn_mask=mask)
_, right = torch_mha(x, x, x, attn_mask=~mask)
print("row 1, attn_mask=mask: ", [round(w, 2) for w in inverted[0, 1].tolist()])
print("row 1, attn_mask=~mask:", [round(w, 2) for w in right[0, 1].tolist()])
assert inverted[0, 1, :2].sum() == 0 and right[0, 1, 2:].sum() == 0
assert torch.allclose(inverted[0, :4].sum(-1), torch.ones(4).double()) and inverted[0, 4].isnan().all()

q, k, v = x[:, None], x[:, None], x[:, None]  # [B, H=1, T, D]: one head
assert torch.allclose(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), hw.attention(q, k, v, mask)[0])
try:
    hw.attention(q, k, v, ~mask)  # headwise refuses an inverted causal mask
except hw.errors.MaskError as error:
    print("headwise:", error)

# %% [markdown]
# ## A query without any key
# A row of the mask can have no visible key, for example for a sentence of length 0 in a batch, or in the last
# row of the inverted mask above. The softmax of no numbers is undefined, and three conventions are in use.
# The cell shows them for a mask whose second row has no visible key:

# %%
mask = torch.ones(3, 3, dtype=torch.bool).tril()
mask[1] = False
y = torch.randn(1, 1, 3, 8)  # [B, H, T, D]
scores = y @ y.transpose(-2, -1) / 8**0.5  # [B, H, T, S]
conventions = {
    "-inf: NaN": scores.masked_fill(~mask, -torch.inf).softmax(-1)[0, 0],
    "-1e9: uniform": scores.masked_fill(~mask, -1e9).softmax(-1)[0, 0],
    "headwise: 0": hw.attention(y, y, y, mask)[1][0, 0],
}
for name, weights in conventions.items():
    print(f"{name:14}", [round(w, 2) for w in weights[1].tolist()])
assert conventions["-inf: NaN"][1].isnan().all()
assert torch.allclose(conventions["-1e9: uniform"][1], torch.tensor(1 / 3))
assert (conventions["headwise: 0"][1] == 0).all()

# %% [markdown]
# - $-\infty$ gives $0/0$. The NaN is easy to notice, but it spreads to all later results.
# - With $-10^9$, all scores of the row are equal, so all keys get the same weight: the query attends to all
#   keys, although all are hidden. No number looks wrong.
# - 0 is headwise's convention: output 0 and gradient 0 for such a row.
#
# Course code often uses one of the first two. Both work as long as no row is empty. The next cell shows how
# far one NaN spreads:

# %%
layer = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
empty = torch.tensor([[True] * 5, [False] * 5])  # True = hidden: the first sentence is all padding
output, _ = layer(x, x, x, key_padding_mask=empty)
output.sum().backward()
print("NaN in the output of each sentence:", output.isnan().any(-1).any(-1).tolist())
print("NaN in the gradient of in_proj_weight:", bool(layer.in_proj_weight.grad.isnan().any()))
assert layer.in_proj_weight.grad.isnan().any()

ours = hw.MultiHeadAttention.from_torch(layer)  # the same weights
ours(x, mask=~empty[:, None, None, :])[0].sum().backward()  # True = may attend
print("NaN in a gradient of headwise:", any(bool(w.grad.isnan().any()) for w in ours.parameters()))
assert not any(w.grad.isnan().any() for w in ours.parameters())

# %% exercise: padding_mask
"""A padding mask from lengths."""

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, max_len: int) -> Tensor:
    """lengths [B] -> bool [B, 1, 1, max_len], True for the first lengths[b] keys of sequence b."""
    raise NotImplementedError  # which positions are real; then two dimensions, for heads and queries


# %% hint: idea
# A key is real if its position is below the length of its sequence. Compare all positions with all lengths
# at once: a row of positions and a column of lengths broadcast to a table. Then add axes for heads and
# queries, since padding hides the same keys from all of them.

# %% hint: formula
# $$\text{mask}[b, 0, 0, s] \text{ is True if } s < \text{lengths}[b], \qquad s = 0, \ldots, S - 1$$

# %% hint: code
# 1. The positions 0 to `max_len - 1`, on the device of `lengths` (`torch.arange`): `[S]`.
# 2. The lengths as a column: `[B, 1]`.
# 3. The comparison of the two, a table of bools: `[B, S]`.
# 4. Return it with two axes of length 1 in the middle: `[B, 1, 1, S]`.

# %% solution
"""A padding mask from lengths."""

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, max_len: int) -> Tensor:
    """lengths [B] -> bool [B, 1, 1, max_len], True for the first lengths[b] keys of sequence b."""
    positions = torch.arange(max_len, device=lengths.device)  # [S]
    real = positions < lengths[:, None]  # [B, S]: length 3 means positions 0, 1 and 2
    return real[:, None, None, :]  # [B, 1, 1, S]


# %% try
mask = padding_mask(torch.tensor([3, 5]), max_len=5)  # 2 sequences, of 3 and of 5 tokens
print("mask:", tuple(mask.shape), "expected: (2, 1, 1, 5)")
print(mask[:, 0, 0].tolist())

# %%
visible = hw.Mask.causal().full(5, 5)[0, 0, :3]  # [3, S]: keys of the real queries of the first sentence
assert not visible[:, 3:].any()  # the causal mask hides the padding at the end

# %% question: A causal model gets padding at the end. Does it still need a padding mask in attention?
# For its real positions, no: padding comes after them, so the causal mask already hides it. A padding mask is
# needed where padding is at the *front*, as often in generation, and where there is no causal mask (an
# encoder, cross-attention). The loss must ignore padded positions in any case.

# %% question: A colleague fills hidden scores with 0 instead of -inf, "since 0 means nothing". What happens?
# $e^0 = 1$, so a hidden key counts like a key with score 0: about as much as an average key, and more than
# every key with a negative score. Such a mask hides nothing. It only replaces the true score by 0.
