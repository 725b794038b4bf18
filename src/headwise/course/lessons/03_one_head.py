"""One head.

idea: a head is a soft lookup: its output is a weighted mean of all values
minutes: 8
level: junior
repairs: softmax over queries; keys and values swapped
"""

# %% [markdown]
# A Python dictionary returns the value whose key *equals* what you ask for. In attention, a key is almost
# never equal to the query. So attention returns a weighted mean of all values. The better a key fits the
# query, the larger the weight of its value:
#
# 1. scores: how well each key fits the query, a dot product divided by $\sqrt{d}$ (lesson 1),
# 2. weights that sum to 1: softmax (lesson 2),
# 3. the weighted mean of the values.
#
# $$\text{head}(Q, K, V) = \text{softmax}\left(\frac{QK^\top}{\sqrt{d}}\right) V$$
#
# An example: the query is what a guest at a party wants to hear about. The key of every other guest is a
# topic, the value is what that guest says about it. The result is a mixture of what all guests say, in which
# guests whose topic fits have the largest weights.

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
v = torch.eye(4)  # [S=4, Dv=4]: one value per guest, all different
q = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])  # [T=2, D=3]: a music lover, a sports fan

scores = q @ k.T / k.shape[-1] ** 0.5  # [T, S]
weights = scores.softmax(dim=-1)  # [T, S]: each row sums to 1
print(weights)
print("rows sum to", [round(total, 4) for total in weights.sum(-1).tolist()])

# %% [markdown]
# No weight is 0: even the chess player gets some weight from the music lover. This makes attention trainable:
# every weight changes a little if a key changes a little, so the gradient shows in which direction to change
# the keys.
#
# The same code works with more axes in front, for the sequences of a batch or for heads (`[.., T, D]`): `@`
# multiplies the last two axes, and `k.transpose(-2, -1)` swaps them.
#
# headwise computes the same. The next cell does so for one head and plots its weights:

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
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv]: for each query a mean of the values."""
    raise NotImplementedError  # scores, weights, output: three lines


# %% solution
"""One head of attention."""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv]: for each query a mean of the values."""
    scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # [.., T, S]
    weights = scores.softmax(dim=-1)  # [.., T, S]: over the keys
    return weights @ v


# %% question: Why does attention compute a weighted mean of the values, and not simply take the value of the best key?
# Taking the best value is a step function: if a key changes a little, the output either stays the same or
# switches to another value. Its gradient is zero almost everywhere, so nothing could be learned. Softmax is
# the smooth version of "take the best": every weight has a gradient. If all scores are multiplied by a large
# number, the weight of the best key is almost 1.

# %% question: A head has T = 5 queries and S = 7 keys of width 16, values of width 32. What are the shapes of scores and output?
# Scores $[5, 7]$: one number for every pair of a query and a key. Output $[5, 32]$: one weighted mean of
# values for every query. The width of the keys (16) disappears in the dot product; it only has to equal that
# of the queries.
