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
# The cell below is the party of lesson 0 in numbers. Two guests ask, a music lover and a sports fan. Each of
# four other guests has a topic as key, and recommends an evening, the value: the hour at which it begins and
# its price. The cell computes the first two steps.

# %% slide: A head answers even if no key is equal
# - A Python dictionary returns the value whose key **equals** the query.
# - In attention a key is almost never equal to the query.
# - So a head returns a **weighted mean of all values**: the better a key fits, the larger the weight of its
#   value.
#
# $$\text{head}(Q, K, V) = \text{softmax}\left(\frac{QK^\top}{\sqrt{d}}\right) V$$
#
# ---
# Begin with a question: what does a Python dictionary do with a key that it does not have? It raises a
# KeyError. A
# head never does: it always returns a mixture.
#
# Read the formula from the inside to the outside: scores, weights, mean.

# %% slide: A party: two guests ask, four can answer
# - **Query**: what a guest wants to hear about. **Key**: the topic of another guest.
# - **Value**: the evening that this guest recommends: the hour at which it begins, and its price.
#
# ```
# topics = {
#     "jazz": [1.0, 0.0, 0.1],
#     "blues": [0.9, 0.1, 0.2],
#     "football": [0.0, 1.0, 0.0],
#     "chess": [0.1, 0.5, 1.0],
# }
# k = torch.tensor(list(topics.values()))  # [S=4, D=3]: one key per guest
# v = torch.tensor([[21.0, 20.0], [22.0, 15.0], [18.0, 40.0], [19.0, 5.0]])  # [S=4, Dv=2]: hour, price
# q = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])  # [T=2, D=3]: a music lover, a sports fan
# ```
#
# ---
# The three numbers of a key are music, sports, and something else. Ask before the next slide: which guest
# gets the
# largest weight from the music lover, and which the second largest? (Jazz, then blues.) Does the chess
# player get 0?

# %% slide: Two lines compute the weights
# ```
# scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # [T, S]
# weights = scores.softmax(dim=-1)  # [T, S]: each row sums to 1
# ```
#
# [output]
#
# - `k.transpose(-2, -1)` swaps the last two axes of the keys: $[S, D]$ becomes $[D, S]$.
# - A row for each query, a column for each key. The softmax runs over the keys, so each row sums to 1.
#
# ---
# Point at the rows: music lover, sports fan. The columns: jazz, blues, football, chess.

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
v = torch.tensor([[21.0, 20.0], [22.0, 15.0], [18.0, 40.0], [19.0, 5.0]])  # [S=4, Dv=2]: hour, price
q = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])  # [T=2, D=3]: a music lover, a sports fan

scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # [T, S]
weights = scores.softmax(dim=-1)  # [T, S]: each row sums to 1
print(weights)
print("rows sum to", [round(total, 4) for total in weights.sum(-1).tolist()])

# %% [markdown]
# The third step: each guest who asks gets a mean of the four evenings, in proportion to the weights. That is
# a product of the weights and the values:

# %% slide: The third step: a mean of the values
# ```
# output = weights @ v  # [T=2, Dv=2]: a mean of the rows of v for each query
# ```
#
# [output]
#
# - A value here is a row of `v`: the hour at which an evening begins, and its price.
# - Each guest gets a **mean** of the four evenings, in proportion to the weights.
#
# ---
# Ask: is this an evening that somebody recommends? No, it is a mixture of all four.

# %%
output = weights @ v  # [T=2, Dv=2]: a mean of the rows of v for each query
print("values (hour, price):", v.tolist())
by_hand = sum(weights[0, s] * v[s] for s in range(4))  # 0: the music lover
assert torch.allclose(output[0], by_hand)
for name, (hour, price) in zip(("music lover", "sports fan"), output.tolist(), strict=True):
    print(f"{name:11}: hour {hour:.1f}, price {price:.1f}")

# %% [markdown]
# The music lover gets hour 20.7 and price 18.6. Nobody recommends this evening; it is a mean of all four.
# Jazz (21, 20) and blues (22, 15) have the largest weights in it; football, the most expensive evening, has
# 12%. For the sports fan football has 45%, so the hour is earlier and the price higher: 19.3 and 24.4.
#
# No weight is 0: even the chess player gets some weight from the music lover. This makes attention trainable:
# every weight changes a little if a key changes a little, so the gradient shows in which direction to change
# the keys.
#
# The same code works with more axes in front, for the sequences of a batch or for heads (`[.., T, D]`): `@`
# multiplies the last two axes, and `k.transpose(-2, -1)` swaps them. `k.T` would reverse all axes: that is
# the same for two axes, but not for more.
#
# headwise computes the same. The next cell does so for one head and plots its weights:

# %% slide: No weight is 0, so every key can learn
# - Even the chess player gets some weight from the music lover.
# - If a key changes a little, every weight changes a little: the **gradient** shows in which direction to
#   change the keys.
# - The same three lines work with more axes in front, for a batch or for heads: `q` is $[.., T, D]$, `k`
#   $[.., S, D]$.
#
# [picture]
#
# ---
# Compare with "take the best key": its gradient is 0 almost everywhere. That is the first question at the
# end.
#
# Why not `k.T`? It reverses all axes. For a table of keys that is the same; with a batch or heads in front it
# is not, and `q @ k.T` fails. `k.transpose(-2, -1)` swaps the last two axes only.

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


# %% hint: idea
# For each query, a head returns a weighted mean of all values. The lesson computes it in three steps. Which
# of them have you written already, in lessons 1 and 2?

# %% hint: formula
# $$\text{head}(Q, K, V) = \text{softmax}\left(\frac{QK^\top}{\sqrt{D}}\right) V$$
#
# The softmax runs over the keys: the weights of a query must sum to 1.

# %% hint: code
# Three lines:
#
# 1. `scores`: queries times transposed keys, divided by the root of the width of a key: `[.., T, S]`.
# 2. `weights`: the softmax of the scores along the axis of the keys, the last: `[.., T, S]`.
# 3. Return the weights times the values: `[.., T, S]` times `[.., S, Dv]` is `[.., T, Dv]`.

# %% solution
"""One head of attention."""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [.., T, D], k [.., S, D], v [.., S, Dv] -> [.., T, Dv]: for each query a mean of the values."""
    scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # [.., T, S]
    weights = scores.softmax(dim=-1)  # [.., T, S]: over the keys
    return weights @ v


# %% try
q, k, v = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 3)  # 2 sequences, T = 5, S = 7
print("output:", tuple(attend(q, k, v).shape), "expected: (2, 5, 3)")
ones = attend(q, k, torch.ones(2, 7, 1))  # every value is 1, so every mean is 1
print("means of ones:", [round(mean, 2) for mean in ones.flatten().tolist()])

# %% question: Why does attention compute a weighted mean of the values, and not simply take the value of the best key?
# Taking the best value is a step function: if a key changes a little, the output either stays the same or
# switches to another value. Its gradient is zero almost everywhere, so nothing could be learned. Softmax is
# the smooth version of "take the best": every weight has a gradient. If all scores are multiplied by a large
# number, the weight of the best key is almost 1.

# %% question: A head has T = 5 queries and S = 7 keys of width 16, values of width 32. What are the shapes of scores and output?
# Scores $[5, 7]$: one number for every pair of a query and a key. Output $[5, 32]$: one weighted mean of
# values for every query. The width of the keys (16) disappears in the dot product; it only has to equal that
# of the queries.
