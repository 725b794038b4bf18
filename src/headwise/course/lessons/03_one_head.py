"""One head.

idea: a head is a lookup that takes a little of everything it finds
minutes: 8
level: junior
repairs: softmax over queries; keys and values swapped
"""

# %% [markdown]
# A dictionary gives back the value whose key *equals* what you ask for. Attention has no such luck: no key equals
# the question. So it takes a little of every value, the more the better its key fits:
#
# 1. how well does each key fit the query: a dot product, divided by $\sqrt{d}$ (lesson 1),
# 2. as shares that sum to 1: softmax (lesson 2),
# 3. the values, mixed in these shares.
#
# $$\text{head}(Q, K, V) = \text{softmax}\left(\frac{QK^\top}{\sqrt{d}}\right) V$$
#
# Think of a party. You are the query: you came to hear about something. Every guest wears a badge with a topic
# (the key) and has a story to tell (the value). You listen to everybody a little, and most to those whose topic
# is yours.

# %%
import torch

torch.manual_seed(0)
topics = {
    "jazz": [1.0, 0.0, 0.1],
    "blues": [0.9, 0.1, 0.2],
    "football": [0.0, 1.0, 0.0],
    "chess": [0.1, 0.5, 1.0],
}
k = torch.tensor(list(topics.values()))  # [S=4, D=3]: one key per guest
v = torch.eye(4)  # [S=4, Dv=4]: one story per guest, told apart
q = torch.tensor(
    [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
)  # [T=2, D=3]: somebody who likes music, somebody who likes sport

scores = q @ k.T / k.shape[-1] ** 0.5  # [T, S]
weights = scores.softmax(dim=-1)  # [T, S]: each row sums to 1
print(weights)
print("rows sum to", [round(total, 4) for total in weights.sum(-1).tolist()])

# %% [markdown]
# Nobody is left out: even the chess player gets a share of the music lover's ear. That is what makes attention
# trainable: every share changes a little when a key changes a little, so a gradient can say which way to go.
#
# Nothing changes when there are more axes in front, for samples of a batch or for heads: `@` multiplies the last two
# axes, and `k.transpose(-2, -1)` turns them, whatever stands before. We write `[.., T, D]` for that.
#
# The same through headwise, for one head, with its picture:

# %%
import headwise as hw

out, heads = hw.attention(q[None, None], k[None, None], v[None, None])  # [B=1, H=1, T, Dv]
assert torch.allclose(out[0, 0], weights @ v, atol=1e-6)
heads.plot(query_tokens=["music lover", "sports fan"], key_tokens=list(topics))

# %% exercise: attend
"""One head of attention."""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv]: for each query a mix of the values."""
    raise NotImplementedError  # scores, shares, mix: three lines


# %% solution
"""One head of attention."""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv]: for each query a mix of the values."""
    scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # [.., T, S]
    weights = scores.softmax(dim=-1)  # [.., T, S]: over the keys
    return weights @ v


# %% question: Why does attention mix values in shares, and not simply take the value of the best key?
# Taking the best is a step: a key may get a little better and nothing changes, until suddenly everything does. Its
# gradient is zero almost everywhere, so nothing could be learned. Softmax is the smooth version of "take the best":
# every share has a slope. Scaled up, scores make it as sharp as one likes.

# %% question: A head has T = 5 queries and S = 7 keys of width 16, values of width 32. Which shapes have scores and output?
# Scores [5, 7]: one number for every pair. Output [5, 32]: one mix of values for every query. The width of keys (16)
# is gone after the dot product; it only has to be that of the queries.
