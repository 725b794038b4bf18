"""Medium questions."""

# %% question: [1] What happens to the gradient of attention when the scores become very large?
# The Jacobian of the softmax is $\text{diag}(p) - p p^\top$. When one weight is near 1 and the others near 0,
# every entry of it is near 0: queries and keys get almost no gradient, whatever the loss is, and the head
# hardly learns. For 16 random scores of standard deviation 1, the norm of the Jacobian is 0.31 (median of
# many draws); for scores 10 times as large it is 0.06, for 100 times as large less than a millionth.
#
# This is what dividing by $\sqrt{d_k}$ prevents at the start of training, and what normalised queries and
# keys prevent later on.

# %%
import torch

torch.manual_seed(0)
scores = torch.randn(1000, 16, dtype=torch.float64)  # 1000 rows of 16 keys


def jacobian_norm(scores: torch.Tensor) -> float:
    p = scores.softmax(-1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]  # [rows, S, S]
    return jacobian.flatten(1).norm(dim=-1).median().item()


norms = {factor: jacobian_norm(factor * scores) for factor in (1, 10, 100)}
print(f"{scores.shape[1]} keys, median norm of the Jacobian: {norms[1]:.2f}")
print(f"scores 10 times as large: {norms[10]:.2f}, 100 times: {norms[100]:.0e}")
assert norms[1] > norms[10] > norms[100] and norms[100] < 1e-6

# %% question: [2] Why is the largest score subtracted before the exponential, and why is the result the same?
# In float32 the exponential overflows above 88.7: $e^{100}$ is infinite, and infinite divided by infinite is
# NaN. After subtracting the largest score $m$, the largest exponent is 0, so the sum lies between 1 and the
# number of keys: there is no overflow and no division by zero. Exponentials that underflow to 0 have a
# negligible weight.
#
# The result is the same because the factor $e^{-m}$ is in the numerator and in every term of the sum. For the
# same reason any number that is equal for all keys of a query cancels.

# %%
import math

import torch

limit = math.log(torch.finfo(torch.float32).max)
print(f"exp overflows above {limit:.1f}")
scores = torch.tensor([100.0, 99.0, 20.0])
naive = scores.exp() / scores.exp().sum()
shifted = (scores - scores.max()).exp()
print("naive:", naive.tolist(), "shifted:", [round(w, 3) for w in (shifted / shifted.sum()).tolist()])
assert naive.isnan().any() and scores.exp()[0].isinf()
assert torch.allclose(shifted / shifted.sum(), scores.softmax(-1))
assert 1 <= shifted.sum() <= 3

# %% question: [4] Somebody splits heads with x.view(B, H, T, D) and no transpose, and it runs. What is wrong?
# Memory holds token after token, each with all its channels. `view` moves nothing; it only groups the same
# sequence of numbers differently. With 8 tokens and 4 heads, the first head gets all channels of tokens 0 and
# 1, cut into pieces that it treats as positions. It never attends to the other tokens.
#
# The shapes are right and the loss may even fall, but a causal mask hides the wrong things. The right split
# is `view(B, T, H, D).transpose(1, 2)`.

# %%
import torch

B, T, H, D = 1, 8, 4, 16
x = (
    torch.arange(T)[None, :, None].expand(B, T, H * D).contiguous()
)  # every channel is the number of its token
wrong = x.view(B, H, T, D)
right = x.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]
print(f"{T} tokens, {H} heads; view alone: the first head has tokens", wrong[0, 0].unique().tolist())
print("with transpose:", right[0, 0].unique().tolist())
assert wrong.shape == right.shape and wrong[0, 0].unique().tolist() == [0, 1]
assert right[0, 0].unique().tolist() == list(range(8))

# %% question: [5] One of the biases of multi-head attention never changes the output. Which one, and why?
# The bias of the keys. It adds $q_i \cdot b_k$ to the scores of query $i$, the same number for every key, and
# softmax does not change when the same number is added to all scores. Its gradient is zero. The bias of the
# queries adds $b_q \cdot k_j$, which differs from key to key, and does matter.
#
# The bias of the values has an effect, but is not needed: weights sum to 1, so it adds the constant
# $b_v W_O$, which could be part of the output's bias. With rotary positions (applied after the bias) or
# learned sinks, $b_k$ does change the output.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
mha = hw.MultiHeadAttention(32, 4).double()
x = torch.randn(2, 6, 32, dtype=torch.float64)
before = mha(x)[0]
before.square().sum().backward()
gradients = {name: getattr(mha, name).bias.grad.abs().max().item() for name in ("q_proj", "k_proj", "v_proj")}
assert gradients["k_proj"] < 1e-12 < gradients["q_proj"] and gradients["v_proj"] > 1e-12
with torch.no_grad():
    mha.k_proj.bias += torch.randn(32)
    moved_by_k = (mha(x)[0] - before).abs().max().item()
    mha.q_proj.bias += torch.randn(32)
    moved_by_q = (mha(x)[0] - before).abs().max().item()
    mha.q_proj.bias.zero_()
    plain = mha(x)[0]
    mha.v_proj.bias += (b_v := torch.randn(32, dtype=torch.float64))
    assert torch.allclose(mha(x)[0], plain + b_v @ mha.out_proj.weight.T)
print(f"the output moves by {moved_by_k:.0e} with the keys' bias, by {moved_by_q:.2f} with the queries'")
assert moved_by_k < 1e-12 < moved_by_q
for options in ({"rope": hw.nn.Rope()}, {"sinks": True}):
    other = hw.MultiHeadAttention(32, 4, **options).double()
    with torch.no_grad():
        before = other(x)[0]
        other.k_proj.bias += torch.randn(32)
        assert not torch.allclose(other(x)[0], before)

# %% question: [7] A query may attend to no key at all: what is the output with -inf, with -1e9, and from torch's fused attention?
# With minus infinity: NaN, since softmax divides 0 by 0; one such row makes the gradient of every weight NaN.
# With a large negative number: all scores are equal, so the output is the plain mean of exactly those values
# that must be hidden. From `scaled_dot_product_attention` with a boolean mask: 0, and the same from headwise.
#
# This happens with padding at the front and a causal mask, and with empty texts in a batch. Zero is the
# safest result: NaN breaks the training, and nobody notices the mean of hidden values.

# %%
import torch
import torch.nn.functional as F

import headwise as hw

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 4, 8)  # each [B, H, T, D]
allowed = torch.ones(4, 4).tril().bool()
allowed[0] = False  # the first query has no visible key
scores = q @ k.transpose(-2, -1) / 8**0.5
infinite = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
large = scores.masked_fill(~allowed, -1e9).softmax(-1) @ v
fused = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
ours, _ = hw.attention(q, k, v, hw.Mask.dense(allowed))
assert infinite[0, 0, 0].isnan().all() and torch.allclose(large[0, 0, 0], v[0, 0].mean(0))
assert (fused[0, 0, 0] == 0).all() and (ours[0, 0, 0] == 0).all()
print(
    "-inf: NaN; -1e9: the mean of all values; scaled_dot_product_attention:",
    fused[0, 0, 0].abs().max().item(),
)
q.requires_grad_()
lost = (q @ k.transpose(-2, -1)).masked_fill(~allowed, float("-inf")).softmax(-1) @ v
weight = torch.ones(8, requires_grad=True)
(lost * weight).sum().backward()
assert weight.grad.isnan().all()

# %% question: [7] How do you test that a causal layer does not attend to the future?
# By gradients: the gradient of output $t$ with respect to any input after $t$ must be exactly zero, not just
# small. With 6 tokens, 15 of the 36 pairs of an output and an input must have a gradient of zero. Or change
# the last token: all outputs but the last must stay the same.
#
# Also test that output $t$ depends on token $t$ and all tokens before it; otherwise the mask is off by one in
# the other direction. In training, a leak shows as a loss that is too low while generation is bad.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
mha = hw.MultiHeadAttention(16, 4, causal=True).double()
x = torch.randn(1, 6, 16, dtype=torch.float64)
jacobian = torch.autograd.functional.jacobian(lambda x: mha(x)[0], x)  # [1, T, E, 1, T, E]
depends = jacobian.squeeze(3).squeeze(0).norm(dim=(1, 3))  # [T, T]: output t on input s
print(f"{len(depends)} tokens: {(depends == 0).sum()} of {depends.numel()} pairs without any gradient")
assert torch.equal(depends != 0, torch.ones(6, 6).tril().bool())

# %% question: [8] An encoder-decoder writes word by word: which part of its cross-attention is computed only once?
# Keys and values: they come from the encoder's output, which does not change while the decoder writes. Each
# step computes only one query, its scores, the weighted mean, and $W_O$.
#
# For 20 words over a source of 12 tokens that is 12 tokens projected to keys and values instead of 240.
# Unlike the cache of self-attention, this one does not grow.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
cross = hw.MultiHeadAttention(32, 4).double().eval()
source, words = torch.randn(1, 12, 32, dtype=torch.float64), torch.randn(1, 20, 32, dtype=torch.float64)
with torch.no_grad():
    memory = cross.remember(source)
    steps = [cross(word, cache=memory)[0] for word in words.split(1, dim=1)]
    anew = [cross(word, source, source)[0] for word in words.split(1, dim=1)]
assert torch.allclose(torch.cat(steps, 1), torch.cat(anew, 1))
print(
    words.shape[1],
    "words; tokens projected to keys and values:",
    source.shape[1],
    "instead of",
    source.shape[1] * words.shape[1],
)
assert source.shape[1] * words.shape[1] == 240

# %% question: [9] What happens to the output if the input tokens are shuffled, without positions and without a mask?
# It is shuffled in the same way, and otherwise unchanged: attention is permutation equivariant. With a
# permutation $P$, scores become $P S P^\top$; softmax works row by row and does not depend on the order of
# the keys; the values are shuffled with the keys.
#
# So attention alone cannot distinguish "dog bites man" from "man bites dog". Order comes from positions:
# added to the input, applied to queries and keys as rotations (RoPE), or subtracted from scores (ALiBi). A
# causal mask breaks the symmetry, too.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
mha = hw.MultiHeadAttention(32, 4).double()
x, order = torch.randn(1, 7, 32, dtype=torch.float64), torch.randperm(7)
plain = torch.allclose(mha(x[:, order])[0], mha(x)[0][:, order])
causal = hw.Mask.causal()
masked = torch.allclose(mha(x[:, order], mask=causal)[0], mha(x, mask=causal)[0][:, order])
print("shuffling in = shuffling out:", plain, "- with a causal mask:", masked)
assert plain and not masked

# %% question: [9] Which fraction of the weights of a Transformer block belongs to attention?
# A third, in the classic block: four matrices of $E \times E$ in attention, two of $E \times 4E$ in the
# feed-forward network, so attention has $4E^2$ of $12E^2$ weights. With $E = 512$ these are 1,048,576 of
# 3,145,728. The number of heads does not matter.
#
# Grouped heads make attention's fraction smaller; a gated feed-forward network has three matrices instead of
# two.

# %%
import torch

block = torch.nn.TransformerEncoderLayer(d_model=512, nhead=8, dim_feedforward=2048, batch_first=True)
matrices = {name: p.numel() for name, p in block.named_parameters() if p.ndim == 2}
attention = sum(n for name, n in matrices.items() if name.startswith("self_attn"))
print(f"{attention:,} of {sum(matrices.values()):,}")
assert attention == 4 * 512**2 == 1_048_576 and sum(matrices.values()) == 12 * 512**2 == 3 * attention

# %% question: [10] What goes wrong with -1e9 as the score of hidden keys in float16, and what do you use instead?
# The largest number of float16 is 65,504. `masked_fill(mask, -1e9)` raises an error; added as a tensor, -1e9
# becomes minus infinity, with NaN for a query without visible keys.
#
# `torch.finfo(dtype).min` fits every dtype, but two such masks added overflow to minus infinity again. It is
# best to keep masks boolean, combine them with "and", and let the kernel apply them: then no number has to be
# chosen.

# %%
import torch

half = torch.finfo(torch.float16)
scores, hidden = torch.zeros(3, dtype=torch.float16), torch.tensor([True, False, False])
print(f"largest float16: {half.max:,.0f}")
try:
    scores.masked_fill(hidden, -1e9)
except RuntimeError as error:
    print(error)
else:
    raise AssertionError
assert half.max == 65504 and torch.tensor(-1e9).half().isinf()
lowest = torch.full((3,), half.min, dtype=torch.float16)
assert (lowest + lowest).isinf().all() and (lowest + lowest).softmax(-1).isnan().all()
assert not lowest.softmax(-1).isnan().any()

# %% question: [10] Why is softmax computed in float32 where everything else is bfloat16?
# bfloat16 has 8 significant bits. A running sum stops growing as soon as the next term is smaller than its
# rounding: adding 1 repeatedly stops at 256, since 257 cannot be represented. Sums over thousands of keys
# would be far too small.
#
# Scores suffer, too: around 100 the numbers of bfloat16 are 0.5 apart, and $e^{0.5} = 1.65$, so rounding a
# score changes its weight by a large factor. Fused kernels therefore multiply in bfloat16 and add, take
# exponentials and divide in float32.

# %%
import math

import torch

total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(1000):
    total = total + 1
print("1000 times 1, added up in bfloat16:", total.item())
bits = round(1 - math.log2(torch.finfo(torch.bfloat16).eps))
print(bits, "significant bits; 257 becomes", torch.tensor(257.0).bfloat16().item())
near = torch.tensor([100.0, 100.2, 100.3, 100.5]).bfloat16()
print(
    f"around 100: {near.unique().tolist()}, {near.unique().diff().item()} apart; e^0.5 = {math.exp(0.5):.2f}"
)
assert total == 256 and bits == 8 and near.unique().tolist() == [100.0, 100.5]

# %% question: [11] What does True in a boolean mask mean to nn.MultiheadAttention, and to scaled_dot_product_attention?
# To `nn.MultiheadAttention` (`attn_mask`, `key_padding_mask`): hidden. To `F.scaled_dot_product_attention`:
# may attend. These are two functions of one library, and each accepts the other's mask without an error. Many
# tutorials write 0 for hidden, which is the second meaning. In headwise True means may attend, and headwise
# refuses a causal mask with the opposite meaning.
#
# Test a mask by its effect: hide one key and change its token; then no output may change.

# %%
import torch
import torch.nn.functional as F

import headwise as hw

torch.manual_seed(0)
theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True).double()
x = torch.randn(1, 5, 16, dtype=torch.float64)
hidden = torch.ones(5, 5).triu(1).bool()  # True above the diagonal: the future
expected, _ = theirs(x, x, x, attn_mask=hidden)


def by_hand(mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        F.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).view(1, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    )
    return theirs.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


print(
    "the same mask:",
    torch.allclose(by_hand(hidden), expected),
    "- its opposite:",
    torch.allclose(by_hand(~hidden), expected),
)
assert torch.allclose(by_hand(~hidden), expected) and not torch.allclose(by_hand(hidden), expected)
try:
    hw.MultiHeadAttention.from_torch(theirs)(x, mask=hidden)
except hw.errors.MaskError as error:
    print("headwise:", error)
else:
    raise AssertionError

# %% question: [13] What is a previous-token head, and how do you measure whether a head is one?
# A head in which each token attends to the one just before it. The measure is the mean weight of the pairs
# $(i, i - 1)$, over texts that were not selected for this head.
#
# The number needs a comparison. Uniform causal attention over 16 tokens already gives 0.16, because the first
# queries have few keys; a head with random weights is a second comparison. Only a score far above both
# justifies the name. Most heads of trained models get no name.

# %%
import torch

import headwise as hw

T = 16
positions = torch.eye(T)[None, None]  # [1, 1, T, D=T]: each key is its position, one-hot
asks = 60 * positions.roll(1, dims=-2)  # query i asks for position i - 1
asks[..., 0, :] = 0.0  # the first has nobody before it
made = hw.AttentionMap(asks, positions, mask=hw.Mask.causal())
even = hw.AttentionMap(torch.zeros_like(asks), positions, mask=hw.Mask.causal())
score, chance = made.statistics().previous.item(), even.statistics().previous.item()
print(f"{T} tokens; made for it: {score:.2f}, even attention: {chance:.2f}")
assert score > 0.99
assert abs(chance - sum(1 / (i + 1) for i in range(1, T)) / (T - 1)) < 1e-6

# %% question: [14] A head attends from nearly every verb to its subject. Does the model use it for that?
# The weights alone do not show it. First, compare with rules that need no model: "the nearest noun before" is
# often right, too. Second, weights do not show what a head contributes to the output, nor whether later
# layers use it: if its block of $W_O$ is zero, the sharpest pattern has no effect.
#
# Then intervene. State beforehand which behaviour should get worse, switch the head off (to zero, or to its
# mean), and compare with switching off other heads of the same layer. Only an intervention shows that the
# model uses the head.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
mha = hw.MultiHeadAttention(32, 4).double()
x = torch.randn(1, 9, 32, dtype=torch.float64)
with torch.no_grad():
    mha.q_proj.weight[:8] *= 20  # the first head has sharp weights ..
    mha.out_proj.weight[:, :8] = 0.0  # .. but no effect on the output
    output, weights = mha(x)
    mha.v_proj.weight[:8] = 0.0  # switched off
    mha.v_proj.bias[:8] = 0.0
    effect = (mha(x)[0] - output).abs().max().item()
entropy = weights.statistics().entropy[0]
print("entropy of the four heads:", [round(e, 2) for e in entropy.tolist()], "- effect of the first:", effect)
assert entropy[0] < entropy[1:].min() and effect == 0.0

# %% question: [15] How large is the KV cache of Llama 3 8B for 8,192 tokens in bfloat16, and how large without grouped heads?
# 1 GiB: keys and values (2) × 32 layers × 8 key/value heads × 128 channels × 8,192 tokens × 2 bytes, or 128
# KiB per token. With keys and values for each of its 32 heads it would be 4 GiB. Every sequence of a batch
# needs the same again, which often limits how many users a GPU serves.
#
# Grouped heads compute the same as ordinary heads of which every 4 have the same keys and values.

# %%
import torch

import headwise as hw

p = hw.nn.presets.find("llama3-8b")
head_dim = p.d_model // p.num_heads
per_token = 2 * p.layers * p.num_kv_heads * head_dim * 2  # bytes
kib = per_token // 2**10
print(f"{p.layers} layers, {p.num_kv_heads} of {p.num_heads} heads of {head_dim}: {kib} KiB per token")
grouped, full = per_token * 8192 / 2**30, per_token * p.num_heads // p.num_kv_heads * 8192 / 2**30
print(f"{grouped:.0f} GiB for 8,192 tokens, {full:.0f} GiB without grouping")
assert (grouped, full) == (1, 4) and per_token == 128 * 2**10 and p.num_heads // p.num_kv_heads == 4
torch.manual_seed(0)
q, k, v = (
    torch.randn(1, 8, 5, 16),
    torch.randn(1, 2, 5, 16),
    torch.randn(1, 2, 5, 16),
)  # 8 heads, 2 for k and v
repeated = hw.attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))[0]
assert torch.allclose(hw.attention(q, k, v)[0], repeated, atol=1e-6)

# %% question: [17] At which sequence length do scores and weighted means cost as much arithmetic as the four projections?
# At $T = 2E$. Counting a multiplication and an addition as 2, projections take $8 T E^2$; scores and weighted
# means take $2 T^2 E$ each, together $4 T^2 E$. With $E = 4096$ that is at 8,192 tokens; below it the
# quadratic part is the smaller one. The number of heads cancels out: $H$ heads of width $E / H$.
#
# With the feed-forward network ($16 T E^2$) added to the projections, it is $T = 6E$, or 24,576 tokens. A
# kernel that skips the hidden half of a causal mask doubles these lengths.

# %%
import torch


def cost(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of a @ b: for each number of the result as many multiplications and additions as a has columns."""
    return 2 * (a @ b).numel() * a.shape[-1]


def counted(T: int, E: int, H: int) -> tuple[int, int, int]:
    """The projections, scores and mixing, the feed-forward network."""
    x, w, wide = torch.zeros(T, E), torch.zeros(E, E), torch.zeros(E, 4 * E)
    q = torch.zeros(H, T, E // H)  # keys and values have the same shape
    scores = q @ q.transpose(-2, -1)  # [H, T, T]
    return (
        4 * cost(x, w),
        cost(q, q.transpose(-2, -1)) + cost(scores, q),
        cost(x, wide) + cost(x @ wide, wide.T),
    )


for heads in (1, 4):
    projections, pairs, feed_forward = counted(24, 32, heads)
    assert (projections, pairs, feed_forward) == (8 * 24 * 32**2, 4 * 24**2 * 32, 16 * 24 * 32**2)
E = 4096
for T, others in ((2 * E, 8 * E**2), (6 * E, (8 + 16) * E**2)):  # others: per token
    assert 4 * T**2 * E == others * T
print(f"E = {E}: equal at {2 * E:,} tokens; with the feed-forward network at {6 * E:,}")
