"""Hard questions."""

# %% question: [3] Write down the backward pass of one head. What of the forward does it need to keep?
# With $S = QK^\top / \sqrt{D}$, $P = \text{softmax}(S)$, $O = PV$ and the gradient $dO$ that arrives:
#
# - $dV = P^\top dO$ and $dP = dO \, V^\top$
# - $dS = P \circ (dP - r)$ with $r_i = \sum_j P_{ij} \, dP_{ij}$, one number per query
# - $dQ = dS \, K / \sqrt{D}$ and $dK = dS^\top Q / \sqrt{D}$
#
# And $r_i = dO_i \cdot O_i$, so it needs no matrix. $P$ need not be kept either: with
# $L_i = \log \sum_j e^{S_{ij}}$ it is $e^{S_{ij} - L_i}$, tile by tile. Inputs, output and one number per
# query are enough.

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
    p = (q @ k.T / D**0.5 - lse).exp()  # made again from one number per query
    r = (d_out * output).sum(-1, keepdim=True)  # [T, 1]
    assert torch.allclose(r, (p * (d_out @ v.T)).sum(-1, keepdim=True))
    d_s = p * (d_out @ v.T - r)
    ours = (d_s @ k / D**0.5, d_s.T @ q / D**0.5, p.T @ d_out)
error = max((a - b).abs().max().item() for a, b in zip(ours, (q.grad, k.grad, v.grad), strict=True))
print(f"largest difference from autograd: {error:.0e}")
assert error < 1e-12

# %% question: [7] One new query, 5 keys in the cache, is_causal=True in scaled_dot_product_attention: what happens?
# torch aligns the triangle with the upper left corner: query 0 stands at position 0 and sees key 0 only. The
# output is the first value, whatever the query asks. What was meant is the lower right corner: the new query
# is the last token and sees all 5 keys. For $T = S$ the two are the same, which is why training never shows
# it.
#
# With one query, leave the mask out. For a block of $T$ new queries over $S$ keys allow key $j$ to query $i$
# where $j \le i + S - T$. headwise always aligns the last query with the last key.

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

# %% question: [9] What becomes of the tokens in a deep stack of attention layers without residuals and feed-forward layers?
# They become one and the same vector. Every layer replaces each token by a weighted mean over tokens, and
# means of means come closer and closer: what tells tokens apart shrinks with every layer, in theory faster
# than exponentially (Dong et al., "Attention is not all you need").
#
# Residual connections keep a way on which a token stays itself, and feed-forward layers can pull tokens apart
# again. In a stack of random layers, 3 of them leave less than a ten-thousandth of what tells tokens apart,
# each layer taking a larger part than the one before; with residuals nearly all of it is still there.

# %%
from itertools import pairwise

import torch

import headwise as hw

torch.manual_seed(0)
layers = [hw.MultiHeadAttention(64, 4, bias=False).double() for _ in range(3)]
x = torch.randn(1, 32, 64, dtype=torch.float64)


def apart(x: torch.Tensor) -> float:
    """How much of the tokens is not their common mean."""
    return ((x - x.mean(1, keepdim=True)).norm() / x.norm()).item()


alone = with_residual = x
shares = [apart(x)]
with torch.no_grad():
    for layer in layers:
        alone = layer(alone)[0]
        alone = alone / alone.norm() * x.norm()  # the size is not the point
        with_residual = with_residual + layer(with_residual)[0]
        shares.append(apart(alone))
print("apart, layer by layer:", [f"{share:.1g}" for share in shares])
print(f"with residuals after {len(layers)}: {apart(with_residual):.2f}")
kept = [after / before for before, after in pairwise(shares)]
assert kept[0] > kept[1] > kept[2] and shares[-1] < 1e-4 and apart(with_residual) > 0.9

# %% question: [10] How is softmax computed block by block without ever having the whole row, and what does FlashAttention gain by it?
# Keep three things per query: the largest score so far $m$, the sum $l = \sum e^{s - m}$, and the output so
# far $o = \sum e^{s - m} v$. A new block may bring a larger $m'$: multiply $l$ and $o$ by $e^{m - m'}$, then
# add the block. At the end $o / l$ is exact, not an approximation.
#
# So the matrix of scores never goes to memory; it lives tile by tile in the fast memory of the chip. For 32
# heads of 16,384 tokens in 2 bytes that matrix has 16 GiB. The arithmetic is no less, in the backward pass
# even more, because weights are computed again; it is faster because reading and writing was what took the
# time.

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
# What a narrow head loses is choice: not every pattern of who looks at whom can be made of so few numbers per
# token. Twice as many heads of half the width are more patterns, each of a simpler kind. It is a trade, not a
# gain.

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
# An induction head continues what it has seen: after "A B .. A" it says B. In the first layer a
# previous-token head writes into every token which token came before it. In the second layer the query is "I
# am A", and the key that fits is "before me came A": that is the B after the earlier A. Its value says "I am
# B".
#
# One layer is not enough because the key of B would have to know about its neighbour before anything was
# exchanged: in the first layer a key is made of its own token and position alone. This is composition: the
# second layer's keys are made of what a head of the first has written.

# %%
import torch

tokens = torch.tensor([3, 1, 4, 0, 5, 2, 4])  # .. 4 0 .. 4 -> ?
T, vocabulary = len(tokens), 6
who = torch.eye(vocabulary)[tokens]  # [T, vocabulary]
where = torch.eye(T)  # [T, T]
hidden = torch.ones(T, T).triu(1).bool()


def head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (50 * q @ k.T).masked_fill(hidden, float("-inf")).softmax(-1) @ v


before = head(where.roll(1, 0), where, who)  # first layer: asks for position i - 1, takes its token
before[0] = 0.0  # the first token has nobody before it
says = head(who, before, who)  # second layer: "I am A" meets "before me came A"
print("after 4 comes", says[-1].argmax().item(), f"with weight {says[-1].max():.2f}")
assert says[-1].argmax() == 0 and says[-1].max() > 0.99
alone = head(who, who, who)  # one layer: A finds the earlier A, and itself
assert alone[-1].argmax() == 4

# %% question: [14] Many heads of trained models can be cut out. How is that done exactly, what does it save, and what must be tested?
# Cutting out a head is the same as multiplying its output by 0: its rows of $W_Q$, $W_K$ and $W_V$ and its
# columns of $W_O$ (as `nn.Linear` keeps them) are deleted, and the smaller layer computes exactly that. With
# $E = 512$ and heads of 64 this saves 131,072 weights and 192 biases a head.
#
# Which heads? One backward pass gives $|\partial \text{loss} / \partial g_h|$ for a factor $g_h = 1$ on each
# head, a first guess. Test them together: heads that are harmless one by one may stand in for each other. And
# that a head can go after training does not mean that training could have done without it.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
E, H, D, cut = 512, 8, 64, 3
whole = hw.MultiHeadAttention(E, H).double()
small = hw.MultiHeadAttention(E, H - 1, head_dim=D).double()
kept = torch.tensor([c for c in range(E) if c // D != cut])  # channels of the other heads
x = torch.randn(1, 4, E, dtype=torch.float64)
with torch.no_grad():
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(small, name).weight.copy_(getattr(whole, name).weight[kept])
        getattr(small, name).bias.copy_(getattr(whole, name).bias[kept])
    small.out_proj.weight.copy_(whole.out_proj.weight[:, kept])
    small.out_proj.bias.copy_(whole.out_proj.bias)
    heads = whole.head_outputs(x)  # [B, H, T, D]
    heads[:, cut] = 0.0
    zeroed = whole.out_proj(heads.transpose(1, 2).flatten(2))  # [B, T, E]
    assert torch.allclose(small(x)[0], zeroed)
saved = {n: sum(p.numel() for p in m.parameters() if p.ndim == n) for n in (1, 2) for m in (whole,)}
left = {n: sum(p.numel() for p in small.parameters() if p.ndim == n) for n in (1, 2)}
print(f"a head of {D}: {saved[2] - left[2]:,} weights and {saved[1] - left[1]} biases")
assert saved[2] - left[2] == 4 * E * D == 131_072 and saved[1] - left[1] == 3 * D == 192

# %% question: [15] Why do many trained heads put most of their weight on the first token, and what breaks if a window drops it?
# Softmax must share out 1; "nothing here for me" is not among the answers. So a head parks its weight on a
# token whose value adds little. In a causal model the first token is the one that every query can see: an
# attention sink.
#
# If a sliding window drops it, its weight goes to the others, whose values are not small. With a score of 5
# beside 8 keys of score 0, the sink holds 0.95 of the weight; without it the other 8 count 19.6 times as
# much. Remedies: keep the first tokens in the window, or give each head a learned score without a value,
# which takes the sink's place.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
scores = torch.tensor([5.0] + [0.0] * 8, dtype=torch.float64)
values = torch.cat([torch.zeros(1, 4), torch.randn(8, 4)]).double()  # the sink hands over nothing
weights = scores.softmax(-1)
with_sink, without = weights @ values, scores[1:].softmax(-1) @ values[1:]
factor = (without.norm() / with_sink.norm()).item()
print(f"{len(scores) - 1} keys and a sink of score {scores[0]:.0f}, which holds {weights[0]:.2f}")
print(f"without it the others count {factor:.1f} times as much")
assert abs(factor - 1 / (1 - weights[0].item())) < 1e-9
q, k = torch.zeros(1, 1, 1, 2).double(), torch.zeros(1, 1, 8, 2).double()  # all scores 0
learned, _ = hw.attention(q, k, values[1:][None, None], sinks=torch.tensor([5.0], dtype=torch.float64))
assert torch.allclose(learned[0, 0, 0], with_sink)

# %% question: [15] How do RoPE and ALiBi make scores depend on distance alone, and in what do they differ?
# RoPE turns pairs of channels of queries and keys by an angle proportional to the position. A product of two
# turned vectors depends on the difference of their angles: $R_m^\top R_n = R_{n-m}$. So what is similar still
# counts, seen through the distance. Values are not turned, lengths do not change, nothing is learned. Angles
# that training never saw are why longer texts need scaling (NTK, YaRN).
#
# ALiBi subtracts slope × distance from the score, whatever query and key say. Each head has a slope of its
# own, with 8 heads from 1/2 down to 1/256: near-sighted and far-sighted heads. Far keys only fade, which lets
# it run on texts longer than those of training, though hardly any weight arrives from very far.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
q, k = torch.randn(2, 16, dtype=torch.float64)
angles = 10_000 ** (-torch.arange(8, dtype=torch.float64) / 8)  # one pace for each pair of channels


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    pairs = torch.view_as_complex(x.view(8, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), position * angles)).flatten()


near, far = turned(q, 9) @ turned(k, 4), turned(q, 1009) @ turned(k, 1004)  # both 5 apart
assert torch.allclose(near, far) and not torch.allclose(near, turned(q, 9) @ turned(k, 3))
assert torch.allclose(turned(q, 9).norm(), q.norm())
mha = hw.MultiHeadAttention(32, 4, rope=hw.nn.Rope()).double()
x = torch.randn(1, 6, 32, dtype=torch.float64)
assert torch.allclose(mha(x)[0], mha(x, positions=torch.arange(6) + 1000)[0])
slopes = hw.scoring.alibi(8).slopes.tolist()
print(f"distance 5: {near:.6f} near the start, {far:.6f} a thousand tokens later")
print("slopes of 8 heads: 1 /", [round(1 / slope) for slope in slopes])
assert slopes[0] == 1 / 2 and slopes[-1] == 1 / 256

# %% question: [15] A layer with 128 heads of 128 caches one latent of 512 and 64 rotary channels per token: what is saved, and are keys ever made?
# Ordinary heads would cache $2 \cdot 128 \cdot 128$ = 32,768 numbers a token, this one 576: 57 times less.
# Each head still has keys and values of its own, as linear maps of the shared latent $c$.
#
# In generation they are never made. The score is $q^\top (W_K c) = (W_K^\top q)^\top c$, so $W_K$ moves over
# to the query and the head scores the latents themselves; in the same way $W_V$ moves behind the mix. Rotary
# positions would stand between $q$ and $W_K$, different for each distance, and forbid this: so they have
# channels apart, shared by all heads. It reads its cache like a single key/value head, with the freedom of
# many.

# %%
import torch

ordinary, latent = 2 * 128 * 128, 512 + 64
print(f"{ordinary:,} numbers a token, or {latent}: {ordinary / latent:.0f} times less")
assert (ordinary, latent, round(ordinary / latent)) == (32_768, 576, 57)
torch.manual_seed(0)
H, S, D, C = 4, 10, 8, 12  # heads, tokens, head width, latent width
q = torch.randn(H, 1, D, dtype=torch.float64)  # one new query for each head
c = torch.randn(S, C, dtype=torch.float64)  # all that is cached
w_k, w_v = torch.randn(2, H, C, D, dtype=torch.float64)
made = (q @ (c @ w_k).transpose(-2, -1) / D**0.5).softmax(-1) @ (c @ w_v)  # [H, 1, D]
moved = (q @ w_k.transpose(-2, -1) @ c.T / D**0.5).softmax(-1) @ c @ w_v  # [H, 1, D], no keys or values
assert torch.allclose(made, moved)

# %% question: [16] d_model = 1024, 16 heads, 8 key/value heads, head_dim = 128: what is unusual, and how many weights has the layer?
# The heads together are wider than the model: $16 \cdot 128 = 2048$, where $d_{model} / h$ would be 64
# channels a head. $W_Q$ maps 1024 to 2048, $W_K$ and $W_V$ map 1024 to 1024 (8 heads of 128), $W_O$ maps 2048
# back to 1024: 6,291,456 weights, against 4,194,304 for ordinary heads. Qwen3 0.6B is like this; it also has
# 256 numbers to normalise queries and keys.
#
# So never compute the head width as `d_model // num_heads` when you read somebody's configuration: ask for
# it.

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
# A new token reads all cached keys and values: $2 H_k D S$ numbers a layer. Each number takes part in one
# multiplication and one addition per query head that shares it: $4 H D S$ operations. With 2 bytes a number
# this is $H / H_k$ operations per byte: 1 for Llama 2 7B, 4 for Llama 3 8B, 71 for Falcon 7B with a single
# key/value head. Processors can do far more than a few per byte they read, so they wait.
#
# A larger batch does not help: each sequence has a cache of its own (the weights of projections, in contrast,
# are read once for all). What helps is fewer key/value heads, fewer bytes per number, or a window.

# %%
import headwise as hw


def operations_per_byte(name: str, tokens: int) -> float:
    p = hw.nn.presets.find(name)
    head_dim = p.head_dim or p.d_model // p.num_heads
    operations = 2 * 2 * p.num_heads * head_dim * tokens  # scores, and mixing
    read = 2 * p.num_kv_heads * head_dim * tokens * 2  # bytes of keys and values
    return operations / read


found = {name: operations_per_byte(name, 4096) for name in ("llama2-7b", "llama3-8b", "falcon-7b")}
print("operations per byte:", found)
assert list(found.values()) == [1, 4, 71]
assert operations_per_byte("llama3-8b", 100_000) == found["llama3-8b"]  # whatever the length
