"""Easy questions."""

# %% question: [1] Why are scores divided by the square root of d_k, and why not by that of d_model?
# A dot product of $d_k$ independent terms of variance 1 has variance $d_k$: with $d_k = 64$ its standard
# deviation is 8. With scores that large, the softmax puts almost all weight on one key and has hardly any
# gradient. After division by $\sqrt{d_k}$ the scores have standard deviation 1 for any width of the head.
#
# The dot product is a sum over the channels of one head, so its width counts. Dividing by
# $\sqrt{d_{model}} = \sqrt{512}$ would leave a standard deviation of 0.35: attention would be too uniform,
# without any error message.

# %%
import torch

torch.manual_seed(0)
q, k = torch.randn(2, 50_000, 64)  # pairs of a query and a key, d_k = 64
scores = (q * k).sum(-1)
raw, right, wrong = scores.std(), (scores / 64**0.5).std(), (scores / 512**0.5).std()
print(f"standard deviation: raw {raw:.1f}, divided by sqrt(64) {right:.1f}, by sqrt(512) {wrong:.2f}")
assert abs(raw - 8) < 0.1 and abs(right - 1) < 0.01 and abs(wrong - 8**-0.5) < 0.01

# %% question: [2] Over which axis of the scores does the softmax run, and how do you notice the wrong one?
# Over the keys, the last axis of `[B, H, T, S]`: the weights of each query over the keys sum to 1. With
# `dim=-2` the columns sum to 1 instead of the rows.
#
# Shapes stay the same and training still runs, so there is no error. Two tests find the mistake: rows must
# sum to 1, and with one key only, every query must get that key's value unchanged.

# %%
import torch

torch.manual_seed(0)
scores = torch.randn(2, 3, 5, 7)  # [B, H, T, S]
right, wrong = scores.softmax(-1), scores.softmax(-2)
assert torch.allclose(right.sum(-1), torch.ones(2, 3, 5)) and torch.allclose(
    wrong.sum(-2), torch.ones(2, 3, 7)
)
print("rows sum to", [round(x, 2) for x in right[0, 0].sum(-1).tolist()])
print("wrong axis:", [round(x, 2) for x in wrong[0, 0].sum(-1).tolist()])
one_key, value = torch.randn(5, 1), torch.randn(1, 4)  # [T, S=1], [S=1, Dv]
assert torch.equal(one_key.softmax(-1) @ value, value.expand(5, 4))
assert not torch.allclose(one_key.softmax(-2) @ value, value.expand(5, 4))

# %% question: [3] What are query, key and value, and why are there three matrices for the same input?
# The query is what a position looks for, the key what it can be found by, the value what it passes on when it
# is found. In self-attention all three are linear maps of the same vectors.
#
# If queries and keys came from one matrix, scores would be symmetric: a noun would fit its pronoun exactly as
# well as the pronoun fits the noun. Relations in text are not symmetric. And with a separate value, a word
# can be found by one property (it is a noun) and pass on another (which noun).

# %%
import torch

torch.manual_seed(0)
x = torch.randn(6, 16)  # [T, E]
w_q, w_k = torch.randn(2, 16, 8)  # [E, D]
shared = (x @ w_q) @ (x @ w_q).T  # [T, T]
own = (x @ w_q) @ (x @ w_k).T  # [T, T]
assert torch.allclose(shared, shared.T) and not torch.allclose(own, own.T)
print("one matrix for both: symmetric", torch.allclose(shared, shared.T))
print("two matrices: symmetric", torch.allclose(own, own.T))

# %% question: [4] 2 sequences of 10 tokens, d_model = 512, 8 heads: which shapes do the queries have on the way to separate heads?
# `[2, 10, 512]` from the projection, `view` makes it `[2, 10, 8, 64]`, `transpose(1, 2)` makes it
# `[2, 8, 10, 64]`. A head is a slice of 64 neighbouring channels; the transpose puts heads beside the batch,
# so that the last two axes are positions and channels, as matrix products need them.
#
# Nothing is copied: both steps only change how the same memory is read. The merge is `transpose(1, 2)` and
# `reshape`. It does copy, since the output of the heads is stored head by head; `view` would raise an error.

# %%
import torch

q = torch.randn(2, 10, 512)
split = q.view(2, 10, 8, 64)  # [B, T, H, D]
heads = split.transpose(1, 2)  # [B, H, T, D]
print(list(q.shape), "->", list(split.shape), "->", list(heads.shape))
assert heads.shape == (2, 8, 10, 64) and heads.data_ptr() == q.data_ptr()
assert torch.equal(heads[:, 3], q[:, :, 3 * 64 : 4 * 64])  # head 3: its slice of channels
attended = torch.eye(10) @ heads  # [B, H, T, D]: new memory, like attention's output
back = attended.transpose(1, 2).reshape(2, 10, 512)
assert torch.equal(back, q) and back.data_ptr() != attended.data_ptr()
try:
    attended.transpose(1, 2).view(2, 10, 512)
except RuntimeError:
    print("view instead of reshape on the way back: an error")
else:
    raise AssertionError

# %% question: [5] How many parameters has multi-head attention with d_model = 512 and 8 heads, and how many with 16 heads?
# 1,050,624 in both cases: four matrices of $512 \times 512$ and four biases of 512. The heads are slices of
# these matrices; with more heads the slices are narrower.
#
# This assumes the convention $d_k = d_{model} / h$. Another head width, or fewer heads for keys and values
# (grouped heads), changes the count.

# %%
import torch

import headwise as hw


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


eight, sixteen = hw.MultiHeadAttention(512, 8), hw.MultiHeadAttention(512, 16)
print(f"8 heads: {parameters(eight):,}, 16 heads: {parameters(sixteen):,}")
assert parameters(eight) == parameters(sixteen) == 4 * 512 * 512 + 4 * 512 == 1_050_624
assert parameters(torch.nn.MultiheadAttention(512, 8)) == parameters(eight)
assert parameters(hw.MultiHeadAttention(512, 8, num_kv_heads=2)) < parameters(eight)

# %% question: [5] Why does multi-head attention end with W_O, when the heads are already concatenated?
# Concatenation only puts heads side by side: each head would stay in its own channels. With $W_O$ every head
# contributes to every channel of the model.
#
# If $W_O$ is split into one block of rows per head, the output is a sum over heads,
# $\text{Concat}(\text{head}_1, .., \text{head}_h) W_O = \sum_i \text{head}_i W_O^{(i)}$. Each head adds its
# own term, independently of the others.

# %%
import torch

torch.manual_seed(0)
heads = torch.randn(4, 10, 8, dtype=torch.float64)  # [H, T, D]
w_o = torch.randn(32, 32, dtype=torch.float64)  # [H * D, E]
joined = heads.transpose(0, 1).reshape(10, 32) @ w_o  # [T, E]
parts = heads @ w_o.view(4, 8, 32)  # [H, T, E]: each head times its own rows
assert torch.allclose(joined, parts.sum(0))
assert (parts[0] != 0).all()  # the first head contributes to every channel
print("largest difference between product and sum over heads:", f"{(joined - parts.sum(0)).abs().max():.0e}")

# %% question: [6] Are the heads of a layer computed one after another?
# No. No head needs the result of another, and all have the same shape, so heads are one more axis of the
# tensors, beside the batch: `q @ k.transpose(-2, -1)` with `[B, H, T, D]` and `[B, H, D, S]` is one batched
# product.
#
# A loop over heads computes the same numbers, in many small steps instead of a few large ones. Layers are
# different: each needs the output of the one before.

# %%
import torch

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)  # each [B, H, T, D]
at_once = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v  # [B, H, T, D]
loop = [(q[:, h] @ k[:, h].transpose(-2, -1) / 8**0.5).softmax(-1) @ v[:, h] for h in range(4)]
assert torch.allclose(at_once, torch.stack(loop, dim=1))
print("loop and batch agree:", torch.allclose(at_once, torch.stack(loop, dim=1)))

# %% question: [7] What does a causal mask hide, what does a padding mask hide, and what are their shapes?
# The causal mask hides, from each query, the keys after it. It depends on positions only, so one `[T, S]` is
# enough for all sequences. With 4 tokens 10 of 16 pairs stay visible.
#
# The padding mask hides the padded keys of each sequence from all its queries. It differs between sequences:
# `[B, 1, 1, S]`. A decoder in training needs both, combined with "and": with 2 real tokens of 4, padded at
# the end, 7 pairs stay visible.

# %%
import torch

import headwise as hw

causal = torch.ones(4, 4).tril().bool()  # [T, S], True = may attend
padding = (torch.arange(4) < torch.tensor([[4], [2]]))[:, None, None]  # [B, 1, 1, S]
both = causal & padding  # [B, 1, T, S]
print(f"causal leaves {causal.sum()} of {causal.numel()} pairs; with padding:", both.sum((1, 2, 3)).tolist())
assert both.sum((1, 2, 3)).tolist() == [10, 7]
assert torch.equal((hw.Mask.causal() & hw.Mask.padding([4, 2])).full(4, 4, batch=2).expand_as(both), both)

# %% question: [7] Why is a hidden score set to minus infinity before the softmax, and not its weight to zero after it?
# The softmax has then already divided by a sum that includes the hidden key. With scores 1, 2, 3 and the last
# key hidden, setting its weight to zero leaves weights that sum to 0.33. With minus infinity before the
# softmax, $e^{-\infty} = 0$, and the other weights sum to 1: 0.27 and 0.73. (Setting the weight to zero and
# dividing by the sum gives the same.)
#
# A score of 0 hides nothing: $e^0 = 1$, and the hidden key keeps 0.09.

# %%
import torch

scores, hidden = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([False, False, True])
before = scores.masked_fill(hidden, float("-inf")).softmax(-1)
after = scores.softmax(-1).masked_fill(hidden, 0.0)
zero = scores.masked_fill(hidden, 0.0).softmax(-1)
print("before:", [round(w, 2) for w in before.tolist()])
print(f"after: sum {after.sum():.2f}; score 0: the hidden key has {zero[-1]:.2f}")
assert torch.allclose(before, after / after.sum()) and before[-1] == 0 and zero[-1] > 0.05

# %% question: [8] A decoder of 7 tokens attends to an encoder's 12; d_model = 512, 8 heads. What are the shapes of weights and output?
# Weights `[B, 8, 7, 12]`, output `[B, 7, 512]`. Queries come from the decoder, keys and values from the
# encoder: there is one output for every query, and the sum over keys removes the length of the encoder's
# text.
#
# A causal mask is wrong here, since all of the encoder's text is known before the first word is written. Its
# padding must still be hidden.

# %%
import torch

import headwise as hw

mha = hw.MultiHeadAttention(512, 8)
decoder, encoder = torch.randn(2, 7, 512), torch.randn(2, 12, 512)
output, weights = mha(decoder, encoder, encoder)
print("weights", list(weights.shape), "output", list(output.shape))
assert weights.shape == (2, 8, 7, 12) and output.shape == (2, 7, 512)

# %% question: [9] Which part of a Transformer block carries information from one token to another?
# Only attention. The feed-forward network, the normalisation and the residual connections process each token
# separately, with the same function at every position.
#
# So if one token changes, a feed-forward layer changes that position's output and no other; attention may
# change all of them.

# %%
import torch
from torch import nn

import headwise as hw

torch.manual_seed(0)
x = torch.randn(1, 6, 32)
changed = x.clone()
changed[0, 3] = torch.randn(32)
feed_forward = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
attention = hw.MultiHeadAttention(32, 4)


def moved(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return (before - after).abs().amax(-1)[0].gt(1e-6).nonzero().flatten().tolist()


alone, attended = moved(feed_forward(x), feed_forward(changed)), moved(attention(x)[0], attention(changed)[0])
print("feed-forward changes positions", alone, "and attention", attended)
assert alone == [3] and attended == [0, 1, 2, 3, 4, 5]

# %% question: [12] Why several heads, and not one head of the full width?
# A head has one set of weights per query. To combine two positions it must average their values, and the
# average does not depend on their order: with weights of one half each, swapping the two values changes
# nothing.
#
# Two heads can attend to one position each and keep their values in separate channels, which $W_O$ can treat
# differently. The number of parameters stays the same, but each head is narrower.

# %%
import torch

values = torch.tensor([[1.0, 2.0], [5.0, -3.0]])  # [S=2, Dv=2]: the values of two tokens
swapped = values.flip(0)
one_head = torch.tensor([0.5, 0.5])
two_heads = torch.eye(2)  # [H=2, S=2]: each head attends to one token
print("one head:", (one_head @ values).tolist(), "swapped:", (one_head @ swapped).tolist())
print(
    "two heads:",
    (two_heads @ values).flatten().tolist(),
    "swapped:",
    (two_heads @ swapped).flatten().tolist(),
)
assert torch.equal(one_head @ values, one_head @ swapped)
assert not torch.equal(two_heads @ values, two_heads @ swapped)

# %% question: [13] What does a heat map of attention weights show, and what does it not show?
# It shows how much weight each query gives to each key: there is a row per query and a column per key, and
# every row sums to 1.
#
# It does not show the values. A key with weight 0.9 contributes nothing if its value is zero, and $W_O$ may
# ignore the output of a head. Nor does it show that the model needs the head: to find out, change the head
# and measure the effect on the model.

# %%
import torch

weights = torch.tensor([0.9, 0.1])
values = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
parts = (weights[:, None] * values).norm(dim=-1)
share = parts / parts.sum()
print("weights", [round(w, 1) for w in weights.tolist()], "share of the output", share.tolist())
assert share.tolist() == [0.0, 1.0]

# %% question: [15] What does a KV cache store during generation, and why not the queries?
# It stores the keys and values of all earlier tokens, in every layer. With a causal mask they never change,
# since earlier tokens do not attend to later ones. A query is used only at its own step.
#
# Without a cache every step projects the whole text so far: for 100 tokens that is 5,050 tokens projected
# instead of 100. The result is the same.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
mha = hw.MultiHeadAttention(32, 4, causal=True).double().eval()
x = torch.randn(1, 100, 32, dtype=torch.float64)
with torch.no_grad():
    whole, _ = mha(x)
    cache = mha.cache()
    steps = [mha(token, cache=cache)[0] for token in x.split(1, dim=1)]
assert torch.allclose(torch.cat(steps, dim=1), whole)
without = sum(range(1, 101))
print(f"tokens projected for 100: {without:,} without a cache, {len(steps)} with one")
assert without == 5050 and len(steps) == 100

# %% question: [16] d_model is 768: how wide is each of 12 heads, and why do 10 heads not work?
# 64 channels each, as in BERT-Base and GPT-2 Small. By the usual convention the heads divide the width of the
# model, so their number must divide it: $768 = 10 \cdot 76 + 8$, and 8 channels would belong to no head.
#
# The convention is not necessary. $W_O$ can map any number of channels back to the width of the model, so 10
# heads of 64 do work.

# %%
import headwise as hw

for name in ("bert-base", "gpt2-small"):
    preset = hw.nn.presets.find(name)
    assert (preset.d_model, preset.num_heads) == (768, 12)
print(f"12 heads: {768 // 12} channels each; 10 heads: {768 // 10} each and {768 % 10} left over")
assert 768 // 12 == 64 and divmod(768, 10) == (76, 8)
try:
    hw.MultiHeadAttention(768, 10)
except hw.errors.ShapeError as error:
    print(error)
else:
    raise AssertionError
assert hw.MultiHeadAttention(768, 10, head_dim=64).out_proj.weight.shape == (768, 640)

# %% question: [17] A text becomes twice as long: how much more arithmetic and memory does attention take?
# The four projections take twice as much: their work is per token. Scores and weighted means take four times
# as much: their work is per pair. The matrix of weights, if it is stored, also takes four times as much: with
# 8 heads in 4 bytes, 32 MiB for 1,024 tokens and 128 MiB for 2,048.
#
# Fused kernels never store that matrix; their memory only doubles. The arithmetic stays quadratic.


# %%
def work(tokens: int, width: int) -> tuple[int, int]:
    """Multiplications and additions of the projections, and of scores and mixing."""
    return 4 * 2 * tokens * width**2, 2 * 2 * tokens**2 * width


def weights_mib(tokens: int, heads: int) -> float:
    return heads * tokens**2 * 4 / 2**20


(projections, pairs), (projections_2, pairs_2) = work(1024, 512), work(2048, 512)
print("projections:", projections_2 / projections, "pairs:", pairs_2 / pairs)
print(f"8 heads: {weights_mib(1024, 8):.0f} MiB for 1,024 tokens, {weights_mib(2048, 8):.0f} MiB for 2,048")
assert projections_2 == 2 * projections and pairs_2 == 4 * pairs
assert weights_mib(1024, 8) == 32 and weights_mib(2048, 8) == 128
