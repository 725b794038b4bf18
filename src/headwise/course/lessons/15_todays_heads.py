"""Today's heads.

idea: grouped keys, turned positions, windows and a cache change what a head keeps, not what a head is
minutes: 10
level: data scientist
repairs: groups repeated in wrong order; causal mask not shifted by the cache
"""

# %% [markdown]
# The layer of 2017 is still the layer of today: project, split, attend, join, project. What changed is around
# it, because models now write long texts, one token at a time, and must remember all that came before.
#
# | change | what it changes | what it saves |
# |---|---|---|
# | grouped heads | several heads of queries share one head of keys and values | parameters, and memory per token |
# | RoPE | queries and keys are turned by their positions | a table of positions, and its end |
# | sliding window | a query sees itself and the few tokens before it | pairs, and memory beyond the window |
# | KV cache | keys and values of earlier tokens are kept | nearly all of the work of each step |
#
# Each is one argument of `hw.MultiHeadAttention`. Below, each is switched on, and what it saves is counted.
#
# ## Grouped and multi-query heads
#
# With $H$ heads of queries and $H_k$ heads of keys and values, $H / H_k$ heads ask their own questions about
# the same keys. $H_k = H$ is the paper's layer, $H_k = 1$ is called multi-query, everything between
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
    print(f"KV heads {num_kv_heads}: {parameters:9,} parameters, {per_token:5,} bytes kept per token")

# %% [markdown]
# The cache shrinks with $H_k$. Parameters shrink less: $W_Q$ and $W_O$ stay as they are. And the $T \times T$
# weights do not shrink at all: there is still one map per head of queries.
#
# Is it the same computation? Yes: as if every head of keys were copied for each head of its group. Neighbours
# share: heads 0, 1, 2, 3 use the first head of keys, heads 4, 5, 6, 7 the second.

# %%
q = torch.randn(1, 8, 5, 64)  # [B, H, T, D]
k, v = torch.randn(2, 1, 2, 5, 64)  # [B, Hk, S, D] each
grouped, weights = hw.attention(q, k, v)
copied, _ = hw.attention(q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1))  # [B, H, T, D]
wrong, _ = hw.attention(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1))  # 0, 1, 0, 1, ..: other groups
assert torch.allclose(grouped, copied, atol=1e-6)
assert not torch.allclose(grouped, wrong, atol=1e-2)
print("one map per head of queries:", tuple(weights.shape))

# %% [markdown]
# ## RoPE: positions inside the dot product
#
# Attention by itself does not know the order of words: shuffle the tokens, and the outputs are shuffled,
# nothing more. RoPE turns each pair of channels of a query by an angle that grows with its position, and each
# key likewise. Turned by the same angle, a product does not change, so what remains in $q_i \cdot k_j$ is the
# distance $i - j$. It has no parameters, and no table that ends at a longest text.

# %%
plain = hw.MultiHeadAttention(64, 4).eval()
turned = hw.MultiHeadAttention(64, 4, rope=hw.nn.Rope(base=10_000.0)).eval()
tokens, order = torch.randn(1, 12, 64), torch.randperm(12)
with torch.no_grad():
    assert torch.allclose(plain(tokens[:, order])[0], plain(tokens)[0][:, order], atol=1e-5)  # blind to order
    assert not torch.allclose(turned(tokens[:, order])[0], turned(tokens)[0][:, order], atol=1e-2)

    here, far_on = turned(tokens)[0], turned(tokens, positions=torch.arange(12) + 1000)[0]
    assert torch.allclose(here, far_on, atol=1e-5)  # distances are the same, and so is the output
print("parameters with and without:", *(sum(p.numel() for p in m.parameters()) for m in (turned, plain)))

# %% [markdown]
# ## A sliding window
#
# `window=4` lets a query see itself and the three tokens before it. To see all three changes at once, take
# the dullest text there is: the same token sixteen times, with a query equal to its key. Only its place can
# tell one from another.

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
for ax, (name, one) in zip(axes, maps.items(), strict=True):
    seen = one[0, 0].where(one[0, 0] > 0, torch.nan)  # what is hidden stays white
    image = ax.imshow(seen, cmap="magma", vmin=0, vmax=0.5)
    ax.set(title=name, xlabel="key")
axes[0].set_ylabel("query")
figure.colorbar(image, ax=axes, label="weight (white: hidden)", extend="max", shrink=0.85)
figure.suptitle("One token, said sixteen times: what each change does to its weights")
band = torch.stack(
    [maps["causal, RoPE, window of 4"][0, 0][i, i - 3 : i + 1] for i in range(3, 16)]
)  # [13, 4]
assert torch.allclose(band, band[:1].expand_as(band), atol=1e-6)  # by distance alone: every row is the same

# %% [markdown]
# Without positions every earlier token has the same share: 1 of 1, then halves, thirds, quarters. With RoPE
# near tokens get more, and how much more depends on the distance alone. (A trained head can turn this into
# "look three back": the preference for the near comes from query and key being equal here.) With the window
# what lies further back is cut off, and every full row is the row above, moved by one.
#
# A window does not mean that a model forgets: what a token saw, the next layer sees in that token. Three
# layers of window 4 reach 3 times 3 tokens back. Gradients tell exactly which inputs an output hangs on:

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
# ## The KV cache: step by step equals all at once
#
# To write a text, a model runs once per token. In a causal layer an earlier token never sees a later one, so
# its key and value never change: compute them once and keep them. A new token then brings one row of queries,
# keys and values, and looks back at all that is kept.

# %%
mha = hw.MultiHeadAttention(64, 8, num_kv_heads=2, causal=True, rope=hw.nn.Rope(), window=6).eval()
x = torch.randn(2, 20, 64)
projected = []
mha.k_proj.register_forward_hook(lambda module, given, made: projected.append(made.shape[1]))  # tokens a call

with torch.no_grad():
    again = [mha(x[:, : i + 1])[0][:, -1:] for i in range(20)]  # no cache: the whole text, every time
    without = sum(projected)
    projected.clear()
    cache = mha.cache()
    steps = [mha(token, cache=cache)[0] for token in x.split(1, dim=1)]  # 20 times [B, 1, E]
    with_cache = sum(projected)
    whole = mha(x)[0]

assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-5)  # the same numbers, token by token
assert torch.allclose(torch.cat(again, dim=1), whole, atol=1e-5)
print(f"tokens projected for a text of 20: {without} without a cache, {with_cache} with it; {cache}")

# %% [markdown]
# Work is saved, memory is spent: the cache grows by one column per token, in every layer. Where there is a
# window, only the last columns can be seen, so a ring of that many is enough, for a text of any length:

# %%
with torch.no_grad():
    ring = mha.cache(ring=True)
    steps = [mha(token, cache=ring)[0] for token in x.split(1, dim=1)]
assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-5)
print(ring, f"{ring.nbytes:,} bytes")

# %% [markdown]
# Course pages stop at 2017: as many heads of keys as of queries, and one call for the whole text. That is
# right for BERT and for learning. For a model that writes, what has to be kept per token decides how long a
# text and how many users fit. For a real one, Llama 3 8B with a text of 131,072 tokens:

# %%
from headwise.nn.presets import find

llama, text_length, bytes_each = find("llama3-8b"), 131_072, 2  # bfloat16
head_dim = llama.d_model // llama.num_heads
for kv_heads in (llama.num_heads, llama.num_kv_heads, 1):
    per_token = 2 * llama.layers * kv_heads * head_dim * bytes_each  # keys and values, in all layers
    size = per_token * text_length
    print(
        f"KV heads {kv_heads:2}: {per_token / 2**10:3.0f} KiB a token, {size / 2**30:2.0f} GiB for this text"
    )

# %% exercise: GroupedQueryAttention
"""Grouped-query attention: heads of queries share heads of keys and values."""

import torch
from torch import Tensor, nn


class GroupedQueryAttention(nn.Module):
    """num_heads heads of queries over num_kv_heads heads of keys and values."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        if d_model % num_heads or num_heads % num_kv_heads:
            raise ValueError("num_heads must divide d_model, and num_kv_heads must divide num_heads")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        raise NotImplementedError  # q_proj, k_proj, v_proj, out_proj: which of them are narrower?

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d_model] -> [B, T, d_model]: every token sees every token."""
        raise NotImplementedError  # project, split, give each head of queries its keys and values, attend, join


# %% solution
"""Grouped-query attention: heads of queries share heads of keys and values."""

import torch
from torch import Tensor, nn


class GroupedQueryAttention(nn.Module):
    """num_heads heads of queries over num_kv_heads heads of keys and values."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        if d_model % num_heads or num_heads % num_kv_heads:
            raise ValueError("num_heads must divide d_model, and num_kv_heads must divide num_heads")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        self.q_proj = nn.Linear(d_model, num_heads * self.head_dim)
        self.k_proj = nn.Linear(d_model, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(d_model, num_kv_heads * self.head_dim)
        self.out_proj = nn.Linear(num_heads * self.head_dim, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d_model] -> [B, T, d_model]: every token sees every token."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)  # [B, H, T, D]
        k = self.k_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)  # [B, Hk, T, D]
        v = self.v_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)  # [B, Hk, T, D]
        shared_by = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(shared_by, dim=1), v.repeat_interleave(shared_by, dim=1)  # [B, H, T, D]
        weights = (q @ k.transpose(-2, -1) / self.head_dim**0.5).softmax(dim=-1)  # [B, H, T, T]
        heads = weights @ v  # [B, H, T, D]
        return self.out_proj(heads.transpose(1, 2).reshape(B, T, -1))  # [B, T, E]


# %% [markdown]
# It takes headwise's weights as they are, since the names are the same:

# %%
ours = hw.MultiHeadAttention(64, 8, num_kv_heads=2).eval()
yours = GroupedQueryAttention(64, 8, 2)
yours.load_state_dict(ours.state_dict())
with torch.no_grad():
    assert torch.allclose(yours(x), ours(x)[0], atol=1e-5)

# %% question: Llama 3 8B keeps 8 heads of keys and values where it has 32 heads. What does that save at 131,072 tokens?
# Three quarters of the cache: 16 GiB instead of 64 GiB for one text in bfloat16, as the cell above computes:
# 2 (keys and values) times 32 layers times 8 heads times 128 channels times 2 bytes is 128 KiB a token. It
# does not save the work of attention: 32 heads still compute 32 rows of weights per token.

# %% question: A key was turned by RoPE when it came and has been in the cache since. Why need it not be turned again as the text grows?
# It was turned by its own position, which does not change. Each new query is turned by its own position, and
# the product of the two depends on the difference alone: the distance comes out right for every later query.
# That is also why scalings of RoPE whose angles change with the length of the text do not go well with a
# cache.

# %% [markdown]
# The next lesson reads the tables of real models with these words: how many heads, how many of them with keys
# of their own, and how wide.
