"""Today's heads.

idea: grouped keys, rotary positions, windows and a cache change parts of the layer; its five steps stay the same
minutes: 10
level: data scientist
repairs: groups repeated in wrong order; causal mask not shifted by the cache
"""

# %% [markdown]
# The layer of 2017 is still in use: project, split, attend, merge, project. Four changes have been made
# since, because models now write long texts, one token at a time, and need all earlier tokens for each new
# one.
#
# | change | what it changes | what it saves |
# |---|---|---|
# | grouped heads | several query heads share one head of keys and values | parameters, and memory per token |
# | RoPE | queries and keys are rotated by their positions | the parameters of a table of positions |
# | sliding window | a query attends to itself and the few tokens before it | pairs of a query and a key, and the memory of tokens outside the window |
# | KV cache | keys and values of earlier tokens are stored | nearly all of the work of each step |
#
# Each is one argument of `hw.MultiHeadAttention`. This lesson switches each on and counts what it saves.
#
# ## Grouped and multi-query heads
# With $H$ heads of queries and $H_k$ heads of keys and values, $H / H_k$ query heads use the same keys and
# values. $H_k = H$ is the layer of 2017, $H_k = 1$ is called multi-query, everything in between
# grouped-query.

# %%
import torch

import headwise as hw

torch.manual_seed(0)
d_model, heads, length = 512, 8, 256
x = torch.randn(1, length, d_model)
for num_kv_heads in (8, 2, 1):
    mha = hw.MultiHeadAttention(d_model, heads, num_kv_heads=num_kv_heads, causal=True, bias=False).eval()
    cache = mha.cache(batch=1, max_length=length)
    with torch.no_grad():
        mha(x, cache=cache)
    parameters = sum(p.numel() for p in mha.parameters())
    per_token = cache.nbytes // length  # keys and values, float32
    assert per_token == 2 * num_kv_heads * mha.head_dim * 4
    print(f"KV heads {num_kv_heads}: {parameters:9,} parameters, {per_token:5,} bytes stored per token")

# %% [markdown]
# The cache shrinks with $H_k$. The parameters shrink less, since $W_Q$ and $W_O$ stay the same. The
# $T \times T$ weights do not shrink: there is still one map for each query head.
#
# The result is the same as with a copy of the keys and values for each query head of a group. Neighbouring
# heads form a group: heads 0, 1, 2, 3 use the first head of keys, heads 4, 5, 6, 7 the second.

# %%
q = torch.randn(1, 8, 5, 64)  # [B, H, T, D]
k, v = torch.randn(2, 1, 2, 5, 64)  # [B, Hk, S, D] each
grouped, weights = hw.attention(q, k, v)
copied, _ = hw.attention(q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1))  # [B, H, T, D]
wrong, _ = hw.attention(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1))  # 0, 1, 0, 1, ..: wrong groups
assert torch.allclose(grouped, copied, atol=1e-6)
assert not torch.allclose(grouped, wrong, atol=1e-2)
print("one map per query head:", tuple(weights.shape))

# %% [markdown]
# ## RoPE: positions inside the dot product
# Attention itself does not depend on the order of the tokens: if they are shuffled, the outputs are shuffled
# in the same way. RoPE rotates each pair of channels of a query by an angle that grows with its position, and
# each key likewise. Rotating both by the same angle does not change their dot product, so $q_i \cdot k_j$
# depends on the positions only through the distance $i - j$. RoPE has no parameters, and every position can be
# computed: nothing in it limits the length of a text.

# %%
plain = hw.MultiHeadAttention(64, 4).eval()
rotary = hw.MultiHeadAttention(64, 4, rope=hw.nn.Rope(base=10_000.0)).eval()
tokens, order = torch.randn(1, 12, 64), torch.randperm(12)
with torch.no_grad():
    assert torch.allclose(plain(tokens[:, order])[0], plain(tokens)[0][:, order], atol=1e-5)  # ignores order
    assert not torch.allclose(rotary(tokens[:, order])[0], rotary(tokens)[0][:, order], atol=1e-2)

    output, shifted = rotary(tokens)[0], rotary(tokens, positions=torch.arange(12) + 1000)[0]
    assert torch.allclose(output, shifted, atol=1e-5)  # the same distances, the same output
print("parameters with and without RoPE:", *(sum(p.numel() for p in m.parameters()) for m in (rotary, plain)))

# %% [markdown]
# That a model *can* read a longer text than those in its training does not mean that it reads it well. At a
# distance that did not occur in training, the angles between queries and keys are new to the heads. mini has
# RoPE and was trained on texts of 512 tokens. We repeat random tokens once: to predict the second copy, head
# 5.2 must attend to the token that followed the first occurrence (lesson 13).

# %%
mini, _, _ = hw.models.load("mini")
torch.manual_seed(0)
results = {}
for period in (50, 100, 200, 250, 400, 600):
    random_tokens = 300 + torch.randint(7892, (2, period))
    ids = torch.cat([torch.zeros(2, 1, dtype=torch.long), random_tokens, random_tokens], dim=1)  # 0: start
    with torch.no_grad(), hw.watch(mini, patterns=False, statistics=()) as watched:
        logits = mini(ids)  # [B=2, T, vocabulary]
    second = slice(period + 1, -1)  # the queries whose next token is in the second copy
    copying = float(torch.nn.functional.cross_entropy(logits[:, second].mT, ids[:, period + 2 :]))
    right = float(hw.heads.induction_stripe(watched[5].map, period)[:, 2].mean())
    results[period] = copying, right
    print(
        f"{ids.shape[1]:5} tokens: loss on the second copy {copying:.2f}, weight of 5.2 on the right token {right:.2f}"
    )
assert all(copying < 0.15 and right > 0.85 for p, (copying, right) in results.items() if 2 * p < 512)
assert all(copying > 1.5 and right < 0.7 for p, (copying, right) in results.items() if 2 * p > 512)

# %% [markdown]
# Up to 512 tokens mini copies at every distance. Beyond, the head attends less and less to the right token, and
# the loss rises. The length in training limits a model with RoPE, too. Press 2021 ("Train Short, Test Long")
# measured the same for larger models, and proposed ALiBi, a bias that falls with the distance, instead. RoPE can
# be stretched: with smaller angles, the new distances lie between those of the training (Chen 2023, position
# interpolation; YaRN, Peng 2023). In most cases the model is then trained a little more at the new length.
# `hw.nn.Llama3` and `hw.nn.Yarn` are two such scalings.

# %% [markdown]
# ## A sliding window
# `window=4` lets a query attend to itself and the three tokens before it. To compare the causal mask, RoPE and
# the window, the next cell uses the same token sixteen times, with queries equal to keys. The tokens differ in
# their positions only.

# %%
import matplotlib.pyplot as plt

same = torch.ones(1, 1, 16, 32) * 0.8  # [B, H, T, D]: sixteen equal tokens
rope = hw.nn.Rope()
q = k = rope.rotate(same, 0)
maps = {
    "causal": hw.attention(same, same, same, causal=True)[1],
    "causal, RoPE": hw.attention(q, k, same, causal=True)[1],
    "causal, RoPE, window of 4": hw.attention(q, k, same, causal=True, window=4)[1],
}
figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.5), sharey=True, layout="constrained")
for ax, (name, weights) in zip(axes, maps.items(), strict=True):
    table = weights[0, 0].where(weights[0, 0] > 0, torch.nan)  # hidden: white
    image = ax.imshow(table, cmap="magma", vmin=0, vmax=0.5)
    ax.set(title=name, xlabel="key")
axes[0].set_ylabel("query")
figure.colorbar(image, ax=axes, label="weight (white: hidden)", extend="max", shrink=0.85)
figure.suptitle("The same token sixteen times: its weights with each change")
windowed = maps["causal, RoPE, window of 4"][0, 0]
band = torch.stack([windowed[i, i - 3 : i + 1] for i in range(3, 16)])  # [13, 4]
assert torch.allclose(band, band[:1].expand_as(band), atol=1e-6)  # every row is the same

# %% [markdown]
# Without positions all visible tokens have the same weight: 1 in the first row, 1/2 in the second, 1/3 in the
# third. With RoPE nearer tokens get more, depending on the distance alone. (They get more because queries and
# keys are equal here. A trained head can also learn to attend to the token three back.) With the window,
# tokens further back are hidden. From the fifth row on, every row equals the row above, shifted by one.
#
# With a window, a model can still use tokens further back: each layer reads what the layer before has written
# into the tokens. Three layers with a window of 4 reach 3 times 3 tokens back. Gradients show exactly on
# which inputs an output depends:

# %%
layers = [hw.MultiHeadAttention(64, 4, causal=True, window=4) for _ in range(3)]
x = torch.randn(1, 16, 64, requires_grad=True)
y = x
for layer in layers:
    y = layer(y)[0]
y[0, -1].sum().backward()
reached = (x.grad[0].abs().sum(-1) > 0).int().tolist()
print(reached)
assert sum(reached) == 3 * (4 - 1) + 1

# %% [markdown]
# ## The KV cache: the same outputs, token by token
# To write a text, a model runs once per token. In a causal layer, an earlier token never attends to a later
# one, so its key and value never change. They can be computed once and stored. Each new token then needs one
# row of queries, keys and values, and attends to all stored keys.

# %%
mha = hw.MultiHeadAttention(64, 8, num_kv_heads=2, causal=True, rope=hw.nn.Rope(), window=6).eval()
x = torch.randn(2, 20, 64)
projected = []
mha.k_proj.register_forward_hook(lambda module, args, out: projected.append(out.shape[1]))  # tokens per call

with torch.no_grad():
    repeated = [mha(x[:, : i + 1])[0][:, -1:] for i in range(20)]  # no cache: the whole text every time
    without = sum(projected)
    projected.clear()
    cache = mha.cache()
    steps = [mha(token, cache=cache)[0] for token in x.split(1, dim=1)]  # 20 times [B, 1, E]
    with_cache = sum(projected)
    expected = mha(x)[0]

assert torch.allclose(torch.cat(steps, dim=1), expected, atol=1e-5)  # the same numbers, token by token
assert torch.allclose(torch.cat(repeated, dim=1), expected, atol=1e-5)
print(f"tokens projected for a text of 20: {without} without a cache, {with_cache} with it; {cache}")

# %% [markdown]
# The cache saves work and needs memory: in every layer it grows by one column per token. With a window, only
# the last columns are visible. A ring buffer of that many columns is enough for a text of any length:

# %%
with torch.no_grad():
    ring = mha.cache(ring=True)
    steps = [mha(token, cache=ring)[0] for token in x.split(1, dim=1)]
assert torch.allclose(torch.cat(steps, dim=1), expected, atol=1e-5)
print(ring, f"{ring.nbytes:,} bytes")

# %% [markdown]
# Courses often stop at the layer of 2017, with as many heads of keys as of queries, and one call for the
# whole text. That is right for BERT and for training. For a model that writes, the memory per token limits
# the length of a text and the number of texts that can be written at the same time. The next cell computes it
# for Llama 3 8B and a text of 131,072 tokens:

# %%
from headwise.nn.presets import find

llama, text_length, bytes_each = find("llama3-8b"), 131_072, 2  # bfloat16
head_dim = llama.d_model // llama.num_heads
for kv_heads in (llama.num_heads, llama.num_kv_heads, 1):
    per_token = 2 * llama.layers * kv_heads * head_dim * bytes_each  # keys and values, in all layers
    size = per_token * text_length
    print(
        f"KV heads {kv_heads:2}: {per_token / 2**10:3.0f} KiB per token, {size / 2**30:2.0f} GiB for the text"
    )

# %% exercise: GroupedQueryAttention
"""Grouped-query attention: several query heads share a head of keys and values."""

import torch
from torch import Tensor, nn


class GroupedQueryAttention(nn.Module):
    """num_heads query heads with num_kv_heads heads of keys and values."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        if d_model % num_heads or num_heads % num_kv_heads:
            raise ValueError(f"{num_kv_heads=} must divide {num_heads=}, which must divide {d_model=}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        raise NotImplementedError  # q_proj, k_proj, v_proj, out_proj: which of them are narrower?

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d_model] -> [B, T, d_model]: every token attends to every token."""
        raise NotImplementedError  # project, split, repeat keys and values, attend, merge


# %% hint: idea
# Several neighbouring query heads share a head of keys and values. So the projections of keys and values
# are narrower. Afterwards each of their heads is repeated for its group, and the rest is the layer of
# lesson 5.

# %% hint: formula
# $$\text{head}_h = \text{softmax}\left(\frac{Q_h K_g^\top}{\sqrt{D}}\right) V_g$$
#
# $g$ is $h$ divided by the size of a group, $H / H_k$, and rounded down: with $H = 4$ and $H_k = 2$, heads
# 0 and 1 use keys 0, heads 2 and 3 use keys 1.

# %% hint: code
# `__init__`: `q_proj` and `out_proj` have the width of `num_heads` heads on the side of the heads, `k_proj`
# and `v_proj` that of `num_kv_heads` heads.
#
# `forward`:
#
# 1. Project and split with the right number of heads: `q` is `[B, H, T, D]`, `k` and `v` are
#    `[B, Hk, T, D]`.
# 2. Repeat each head of `k` and `v` for its group, in the order 0, 0, 1, 1 and not 0, 1, 0, 1
#    (`repeat_interleave`): `[B, H, T, D]`.
# 3. `weights`: softmax of the scaled scores, `[B, H, T, T]`.
# 4. Weights times values; swap heads and tokens back, join the last two axes, and project: `[B, T, E]`.

# %% solution
"""Grouped-query attention: several query heads share a head of keys and values."""

import torch
from torch import Tensor, nn


class GroupedQueryAttention(nn.Module):
    """num_heads query heads with num_kv_heads heads of keys and values."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        if d_model % num_heads or num_heads % num_kv_heads:
            raise ValueError(f"{num_kv_heads=} must divide {num_heads=}, which must divide {d_model=}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        self.q_proj = nn.Linear(d_model, num_heads * self.head_dim)
        self.k_proj = nn.Linear(d_model, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(d_model, num_kv_heads * self.head_dim)
        self.out_proj = nn.Linear(num_heads * self.head_dim, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d_model] -> [B, T, d_model]: every token attends to every token."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)  # [B, H, T, D]
        k = self.k_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)  # [B, Hk, T, D]
        v = self.v_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)  # [B, Hk, T, D]
        group_size = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)  # [B, H, T, D]
        weights = (q @ k.transpose(-2, -1) / self.head_dim**0.5).softmax(dim=-1)  # [B, H, T, T]
        heads = weights @ v  # [B, H, T, D]
        return self.out_proj(heads.transpose(1, 2).reshape(B, T, -1))  # [B, T, E]


# %% try
output = GroupedQueryAttention(d_model=24, num_heads=6, num_kv_heads=2)(torch.randn(2, 5, 24))
print("output:", tuple(output.shape), "expected: (2, 5, 24)")

# %% [markdown]
# The state dict of headwise's module fits, since the names are the same:

# %%
ours = hw.MultiHeadAttention(64, 8, num_kv_heads=2).eval()
yours = GroupedQueryAttention(64, 8, 2)
yours.load_state_dict(ours.state_dict())
with torch.no_grad():
    assert torch.allclose(yours(x), ours(x)[0], atol=1e-5)

# %% question: Llama 3 8B has 32 query heads and 8 heads of keys and values. What does that save at 131,072 tokens?
# Three quarters of the cache: 16 GiB instead of 64 GiB for one text in bfloat16, as the cell above computes.
# 2 (keys and values) times 32 layers times 8 heads times 128 channels times 2 bytes is 128 KiB per token. It
# does not save the work of attention: 32 heads still compute 32 rows of weights per token.

# %% question: RoPE rotates a key once, before it enters the cache. Why does it not need to be rotated again as the text grows?
# It was rotated by its own position, which does not change. Each new query is rotated by its own position,
# and the dot product of the two depends on the difference alone, so the distance is right for every later
# query. This is also why a cache cannot be used with scalings of RoPE whose angles change with the length of
# the text.
