"""Hard questions."""

# %% question: [3] Write down the backward pass of one head. What must the forward pass store for it?
# With $S = QK^\top / \sqrt{D}$, $P = \text{softmax}(S)$, $O = PV$ and the gradient $dO$ that arrives:
#
# - $dV = P^\top dO$ and $dP = dO \, V^\top$
# - $dS = P \circ (dP - r)$ with $r_i = \sum_j P_{ij} \, dP_{ij}$, one number per query
# - $dQ = dS \, K / \sqrt{D}$ and $dK = dS^\top Q / \sqrt{D}$
#
# $r_i$ equals $dO_i \cdot O_i$, so it needs no matrix. $P$ need not be stored either: with
# $L_i = \log \sum_j e^{S_{ij}}$ it is $e^{S_{ij} - L_i}$, computed tile by tile. The inputs, the output and
# one number per query are enough.

# %%
import torch

torch.manual_seed(0)
T, S, D = 5, 7, 8
q, k, v = (torch.randn(n, D, dtype=torch.float64, requires_grad=True) for n in (T, S, S))
scores = q @ k.T / D**0.5  # [T, S]
lse = scores.logsumexp(-1, keepdim=True)  # [T, 1]
output = scores.softmax(-1) @ v
d_out = torch.randn_like(output)
(output * d_out).sum().backward()
with torch.no_grad():
    p = (q @ k.T / D**0.5 - lse).exp()  # recomputed from one number per query
    r = (d_out * output).sum(-1, keepdim=True)  # [T, 1]
    assert torch.allclose(r, (p * (d_out @ v.T)).sum(-1, keepdim=True))
    d_s = p * (d_out @ v.T - r)
    ours = (d_s @ k / D**0.5, d_s.T @ q / D**0.5, p.T @ d_out)
error = max((a - b).abs().max().item() for a, b in zip(ours, (q.grad, k.grad, v.grad), strict=True))
print(f"largest difference from autograd: {error:.0e}")
assert error < 1e-12

# %% question: [7] One new query, 5 keys in the cache, is_causal=True in scaled_dot_product_attention: what happens?
# torch aligns the triangle with the upper left corner: query 0 is at position 0 and attends to key 0 only.
# The output is the first value, whatever the query is. Generation needs the lower right corner: the new query
# is the last token and attends to all 5 keys. For $T = S$ the two are the same, which is why the difference
# does not show in training.
#
# With one query, leave the mask out. For a block of $T$ new queries and $S$ keys, query $i$ may attend to key
# $j$ if $j \le i + S - T$. headwise always aligns the last query with the last key.

# %%
import torch
import torch.nn.functional as F

import headwise as hw

torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
upper_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
meant = F.scaled_dot_product_attention(q, k, v)
assert torch.allclose(upper_left, v[:, :, :1]) and not torch.allclose(meant, v[:, :, :1])
assert torch.allclose(hw.attention(q, k, v, causal=True)[0], meant, atol=1e-6)
three = torch.randn(1, 2, 3, 8)  # three new queries over five keys
lower_right = torch.ones(3, 5).tril(diagonal=5 - 3).bool()
by_mask = F.scaled_dot_product_attention(three, k, v, attn_mask=lower_right)
assert torch.allclose(hw.attention(three, k, v, causal=True)[0], by_mask, atol=1e-6)
print(f"of {lower_right.shape[1]} keys three new queries see", lower_right.sum(-1).tolist())
print("is_causal=True gives the first value:", torch.allclose(upper_left, v[:, :, :1]))

# %% question: [9] What happens to the tokens in a deep stack of attention layers without residuals and feed-forward layers?
# They converge to the same vector. Every layer replaces each token by a weighted mean over tokens, and
# repeated means come closer and closer: the differences between tokens shrink with every layer, in theory
# faster than exponentially (Dong et al., "Attention is not all you need").
#
# Residual connections preserve each token's own vector, and feed-forward layers can make tokens more
# different again. In a stack of 3 random layers, less than a ten-thousandth of the differences is left, and
# each layer removes a larger part than the one before; with residuals nearly all of the differences are left.

# %%
from itertools import pairwise

import torch

import headwise as hw

torch.manual_seed(0)
layers = [hw.MultiHeadAttention(64, 4, bias=False).double() for _ in range(3)]
x = torch.randn(1, 32, 64, dtype=torch.float64)


def apart(x: torch.Tensor) -> float:
    """Return the norm of the tokens without their mean, relative to the norm of the tokens."""
    return ((x - x.mean(1, keepdim=True)).norm() / x.norm()).item()


alone = with_residual = x
shares = [apart(x)]
with torch.no_grad():
    for layer in layers:
        alone = layer(alone)[0]
        alone = alone / alone.norm() * x.norm()  # rescaled: only the differences matter
        with_residual = with_residual + layer(with_residual)[0]
        shares.append(apart(alone))
print("apart, layer by layer:", [f"{share:.1g}" for share in shares])
print(f"with residuals after {len(layers)}: {apart(with_residual):.2f}")
ratios = [after / before for before, after in pairwise(shares)]
assert ratios[0] > ratios[1] > ratios[2] and shares[-1] < 1e-4 and apart(with_residual) > 0.9

# %% question: [10] How is softmax computed block by block without storing the whole row, and why does this make FlashAttention faster?
# Store three things per query: the largest score so far $m$, the sum $l = \sum e^{s - m}$, and the output so
# far $o = \sum e^{s - m} v$. A new block may bring a larger $m'$: multiply $l$ and $o$ by $e^{m - m'}$, then
# add the block. At the end $o / l$ is exact, not an approximation.
#
# So the matrix of scores is never written to the GPU's main memory; each tile stays in the fast memory of the
# chip. For 32 heads of 16,384 tokens in 2 bytes that matrix has 16 GiB. The number of operations is not
# smaller, and in the backward pass it is larger, because weights are computed again. It is faster because
# reading and writing the matrix takes most of the time of ordinary attention.

# %%
import torch

torch.manual_seed(0)
q, k, v = (torch.randn(n, 16, dtype=torch.float64) for n in (6, 40, 40))  # T = 6, S = 40
m, l, o = torch.full((6, 1), float("-inf")).double(), torch.zeros(6, 1).double(), torch.zeros(6, 16).double()
for keys, values in zip(k.split(7), v.split(7), strict=True):
    s = q @ keys.T / 16**0.5  # [T, 7]: one block
    larger = torch.maximum(m, s.amax(-1, keepdim=True))
    p, old = (s - larger).exp(), (m - larger).exp()
    m, l, o = larger, l * old + p.sum(-1, keepdim=True), o * old + p @ values
error = (o / l - (q @ k.T / 16**0.5).softmax(-1) @ v).abs().max().item()
print(f"largest difference from the whole softmax: {error:.0e}")
gib = 32 * 16384**2 * 2 / 2**30
print(f"32 heads of 16,384 tokens, 2 bytes each: {gib:.0f} GiB")
assert error < 1e-12 and gib == 16

# %% question: [12] Which rank can the scores of a head have, and what does a head lose by being narrow?
# At most $D$, the width of the head, however long the text: scores are $X W_Q W_K^\top X^\top$, and the two
# matrices matter only as their product, of rank $D$ at most. (So $W_Q A$ and $W_K A^{-\top}$ are the same
# head, for every invertible $A$.) Softmax is not linear, so the weights may have full rank: with 64 tokens
# and a head of width 8, scores have rank 8 and weights rank 64.
#
# A narrow head can represent fewer patterns: not every matrix of scores can be computed from so few numbers
# per token. Twice as many heads of half the width give more patterns, but simpler ones. So more heads are a
# trade-off.

# %%
import torch

torch.manual_seed(0)
T, E, D = 64, 64, 8
x = torch.randn(T, E, dtype=torch.float64)
w_q, w_k = torch.randn(2, E, D, dtype=torch.float64) / E**0.5
scores = (x @ w_q) @ (x @ w_k).T / D**0.5  # [T, T]
weights = scores.softmax(-1)
ranks = torch.linalg.matrix_rank(scores).item(), torch.linalg.matrix_rank(weights).item()
print(f"{T} tokens, width {D}: rank of scores {ranks[0]}, of weights {ranks[1]}")
assert ranks == (8, 64)
a = torch.randn(D, D, dtype=torch.float64)
assert torch.allclose((x @ w_q @ a) @ (x @ w_k @ torch.linalg.inv(a).T).T / D**0.5, scores)

# %% question: [13] How do two layers make an induction head, and why is one layer not enough?
# An induction head continues repeated text: after "A B .. A" it predicts B. In the first layer a
# previous-token head writes into every token which token came before it. In the second layer the query means
# "I am A", and the matching key means "the token before me was A": that is the B after the earlier A. Its
# value means "I am B".
#
# One layer is not enough because the key of B would have to contain the token before it: in the first layer,
# a key is computed from its own token and position alone. This is called composition: the keys of the second
# layer are computed from the output of a head of the first.

# %%
import torch

tokens = torch.tensor([3, 1, 4, 0, 5, 2, 4])  # .. 4 0 .. 4 -> ?
T, vocabulary = len(tokens), 6
token = torch.eye(vocabulary)[tokens]  # [T, vocabulary]
position = torch.eye(T)  # [T, T]
hidden = torch.ones(T, T).triu(1).bool()


def head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (50 * q @ k.T).masked_fill(hidden, float("-inf")).softmax(-1) @ v


before = head(position.roll(1, 0), position, token)  # first layer: query for position i - 1, value: its token
before[0] = 0.0  # the first token has nobody before it
output = head(token, before, token)  # second layer: "I am A" matches "the token before me was A"
print("after 4 comes", output[-1].argmax().item(), f"with weight {output[-1].max():.2f}")
assert output[-1].argmax() == 0 and output[-1].max() > 0.99
alone = head(token, token, token)  # one layer: A matches the earlier A and itself
assert alone[-1].argmax() == 4

# %% question: [14] Many heads of trained models can be removed. How is a head removed exactly, what does it save, and what must be tested?
# Cutting out a head is the same as multiplying its output by 0: its rows of $W_Q$, $W_K$ and $W_V$ and its
# columns of $W_O$ (as `nn.Linear` stores them) are deleted, and the smaller layer computes exactly that. With
# $E = 512$ and heads of 64 this saves 131,072 weights and 192 biases a head.
#
# Which heads? One backward pass gives $|\partial \text{loss} / \partial g_h|$ for a factor $g_h = 1$ on each
# head, a first estimate. Test the selected heads together: heads that can each be removed alone may replace
# each other. And a head that can be removed after training may still have been necessary during training.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
E, H, D, cut = 512, 8, 64, 3
whole = hw.MultiHeadAttention(E, H).double()
small = hw.MultiHeadAttention(E, H - 1, head_dim=D).double()
channels = torch.tensor([c for c in range(E) if c // D != cut])  # channels of the other heads
x = torch.randn(1, 4, E, dtype=torch.float64)
with torch.no_grad():
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(small, name).weight.copy_(getattr(whole, name).weight[channels])
        getattr(small, name).bias.copy_(getattr(whole, name).bias[channels])
    small.out_proj.weight.copy_(whole.out_proj.weight[:, channels])
    small.out_proj.bias.copy_(whole.out_proj.bias)
    heads = whole.head_outputs(x)  # [B, H, T, D]
    heads[:, cut] = 0.0
    zeroed = whole.out_proj(heads.transpose(1, 2).flatten(2))  # [B, T, E]
    assert torch.allclose(small(x)[0], zeroed)
saved = {n: sum(p.numel() for p in m.parameters() if p.ndim == n) for n in (1, 2) for m in (whole,)}
left = {n: sum(p.numel() for p in small.parameters() if p.ndim == n) for n in (1, 2)}
print(f"a head of {D}: {saved[2] - left[2]:,} weights and {saved[1] - left[1]} biases")
assert saved[2] - left[2] == 4 * E * D == 131_072 and saved[1] - left[1] == 3 * D == 192

# %% question: [15] Why do many trained heads put most of their weight on the first token, and what breaks if a window hides it?
# The weights of a softmax always sum to 1: a head cannot attend to nothing. If no key fits, it puts its
# weight on a token whose value adds little. In a causal model that is often the first token, since every
# query can attend to it: an attention sink.
#
# If a sliding window hides it, its weight goes to the other keys, whose values are not small. With a score of
# 5 next to 8 keys of score 0, the sink has 0.95 of the weight; without it the output of the other 8 is 19.6
# times as large. Remedies: keep the first tokens in the window, or give each head a learned score without a
# value, which replaces the sink.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
scores = torch.tensor([5.0] + [0.0] * 8, dtype=torch.float64)
values = torch.cat([torch.zeros(1, 4), torch.randn(8, 4)]).double()  # the value of the sink is 0
weights = scores.softmax(-1)
with_sink, without = weights @ values, scores[1:].softmax(-1) @ values[1:]
factor = (without.norm() / with_sink.norm()).item()
print(f"{len(scores) - 1} keys and a sink of score {scores[0]:.0f}, which holds {weights[0]:.2f}")
print(f"without it the others count {factor:.1f} times as much")
assert abs(factor - 1 / (1 - weights[0].item())) < 1e-9
q, k = torch.zeros(1, 1, 1, 2).double(), torch.zeros(1, 1, 8, 2).double()  # all scores 0
learned, _ = hw.attention(q, k, values[1:][None, None], sinks=torch.tensor([5.0], dtype=torch.float64))
assert torch.allclose(learned[0, 0, 0], with_sink)

# %% question: [15] How do RoPE and ALiBi make scores depend on positions only through their distance, and how do they differ?
# RoPE rotates pairs of channels of queries and keys by an angle proportional to the position. The dot product
# of two rotated vectors depends on the difference of their angles: $R_m^\top R_n = R_{n-m}$. So a score
# depends on the query, on the key and on their distance. Values are not rotated, lengths of vectors do not
# change, nothing is learned. Longer texts than in training have new angles and need scaling (NTK, YaRN).
#
# ALiBi subtracts slope × distance from the score, whatever query and key are. Each head has its own slope,
# with 8 heads from 1/2 down to 1/256, so heads have different ranges. ALiBi also works for texts longer than
# in training, but very distant keys get hardly any weight.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
q, k = torch.randn(2, 16, dtype=torch.float64)
angles = 10_000 ** (-torch.arange(8, dtype=torch.float64) / 8)  # one speed for each pair of channels


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    pairs = torch.view_as_complex(x.view(8, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), position * angles)).flatten()


near, far = rotated(q, 9) @ rotated(k, 4), rotated(q, 1009) @ rotated(k, 1004)  # both 5 apart
assert torch.allclose(near, far) and not torch.allclose(near, rotated(q, 9) @ rotated(k, 3))
assert torch.allclose(rotated(q, 9).norm(), q.norm())
mha = hw.MultiHeadAttention(32, 4, rope=hw.nn.Rope()).double()
x = torch.randn(1, 6, 32, dtype=torch.float64)
assert torch.allclose(mha(x)[0], mha(x, positions=torch.arange(6) + 1000)[0])
slopes = hw.scoring.alibi(8).slopes.tolist()
print(f"distance 5: {near:.6f} near the start, {far:.6f} a thousand tokens later")
print("slopes of 8 heads: 1 /", [round(1 / slope) for slope in slopes])
assert slopes[0] == 1 / 2 and slopes[-1] == 1 / 256

# %% question: [15] A layer with 128 heads of 128 caches one latent of 512 and 64 rotary channels per token: what is saved, and are keys ever computed?
# Ordinary heads would cache $2 \cdot 128 \cdot 128$ = 32,768 numbers per token, and this layer caches 512 +
# 64 = 576: 57 times less. Each head still has its own keys and values, as linear maps of the shared latent
# $c$.
#
# During generation these keys and values are never computed. The score is
# $q^\top (W_K c) = (W_K^\top q)^\top c$, so $W_K$ can be applied to the query, and the scores are computed from
# the latents; in the same way $W_V$ can be applied after the weighted mean. A rotation between $q$ and $W_K$ would differ for each
# distance and make this impossible, so rotary positions have separate channels, shared by all heads. The
# layer reads its cache like a single key/value head, but its heads have different keys and values.

# %%
import torch

ordinary, latent = 2 * 128 * 128, 512 + 64
print(f"{ordinary:,} numbers per token, or {latent}: {ordinary / latent:.0f} times less")
assert (ordinary, latent, round(ordinary / latent)) == (32_768, 576, 57)
torch.manual_seed(0)
H, S, D, C = 4, 10, 8, 12  # heads, tokens, head width, latent width
q = torch.randn(H, 1, D, dtype=torch.float64)  # one new query for each head
c = torch.randn(S, C, dtype=torch.float64)  # all that is cached
w_k, w_v = torch.randn(2, H, C, D, dtype=torch.float64)
made = (q @ (c @ w_k).transpose(-2, -1) / D**0.5).softmax(-1) @ (c @ w_v)  # [H, 1, D]
moved = (q @ w_k.transpose(-2, -1) @ c.T / D**0.5).softmax(-1) @ c @ w_v  # [H, 1, D], no keys or values
assert torch.allclose(made, moved)

# %% question: [16] d_model = 1024, 16 heads, 8 key/value heads, head_dim = 128: what is unusual, and how many weights does the layer have?
# The heads together are wider than the model: $16 \cdot 128 = 2048$, where $d_{model} / h$ would be 64
# channels a head. $W_Q$ maps 1024 to 2048, $W_K$ and $W_V$ map 1024 to 1024 (8 heads of 128), $W_O$ maps 2048
# back to 1024: 6,291,456 weights, against 4,194,304 for ordinary heads. Qwen3 0.6B is like this; it also has
# 256 numbers to normalise queries and keys.
#
# So do not compute the head width as `d_model // num_heads` when you read a configuration: use its
# `head_dim`.

# %%
import headwise as hw

p = hw.nn.presets.find("qwen3-0.6b")
assert (p.d_model, p.num_heads, p.num_kv_heads, p.head_dim) == (1024, 16, 8, 128)
layer = hw.MultiHeadAttention.preset("qwen3-0.6b", device="meta")
weights = sum(w.numel() for w in layer.parameters() if w.ndim == 2)
others = sum(w.numel() for w in layer.parameters() if w.ndim == 1)
print(f"heads together {p.num_heads * p.head_dim}, usual width {p.d_model // p.num_heads}")
print(f"{weights:,} weights and {others} numbers of norms; ordinary heads: {4 * p.d_model**2:,} weights")
assert weights == 2 * 1024 * 2048 + 2 * 1024 * 1024 == 6_291_456 and others == 256
assert 4 * p.d_model**2 == 4_194_304 and layer.out_proj.weight.shape == (1024, 2048)

# %% question: [17] Why is attention during generation bound by memory and not by arithmetic, and what do grouped heads change?
# A new token reads all cached keys and values: $2 H_k D S$ numbers per layer. For each number there is one
# multiplication and one addition per query head that shares it: $4 H D S$ operations in all. With 2 bytes per
# number this is $H / H_k$ operations per byte: 1 for Llama 2 7B, 4 for Llama 3 8B, 71 for Falcon 7B with a
# single key/value head. A GPU can do hundreds of operations in the time in which it reads one byte, so it
# waits for memory.
#
# A larger batch does not help, since each sequence has its own cache (the weights of the projections, in
# contrast, are read once for all sequences). Fewer key/value heads, fewer bytes per number, or a window do
# help.

# %%
import headwise as hw


def operations_per_byte(name: str, tokens: int) -> float:
    p = hw.nn.presets.find(name)
    head_dim = p.head_dim or p.d_model // p.num_heads
    operations = 2 * 2 * p.num_heads * head_dim * tokens  # scores, and mixing
    read = 2 * p.num_kv_heads * head_dim * tokens * 2  # bytes of keys and values
    return operations / read


ratios = {name: operations_per_byte(name, 4096) for name in ("llama2-7b", "llama3-8b", "falcon-7b")}
print("operations per byte:", ratios)
assert list(ratios.values()) == [1, 4, 71]
assert operations_per_byte("llama3-8b", 100_000) == ratios["llama3-8b"]  # whatever the length
