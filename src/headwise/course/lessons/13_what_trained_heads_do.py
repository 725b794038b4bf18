"""What trained heads do.

idea: measured scores give a few heads a name; a head that attends to the first token may be doing nothing
minutes: 10
level: data scientist
repairs: causal shows the next; causal flipped; causal only in training
"""

# %% [markdown]
# No head is told what to do. What do the 56 heads of mini (8 layers of 7) do after training? The next cell
# runs mini on a text that is not in its training data. headwise gives a head a label if a measured score is
# above a threshold (`headwise.heads.LABELS`). *previous-token*, for example, means that at least half of the
# weight is on the token just before.

# %%
import math
from collections import Counter

import torch

import headwise as hw

model, tokenizer, _ = hw.models.load("mini")
text = (
    "The old farmer walked down to the river before the sun came up. He carried a small lamp and a basket of "
    "bread, because his sister had told him that the boats would be late. When the first boat came, a tall "
    "woman stood in it and called his name. She had seen the lamp from far away."
)
ids = tokenizer(text, return_tensors="pt")["input_ids"]  # [B=1, T]
with torch.no_grad(), hw.watch(model, tokenizer=tokenizer, written=True) as heads:
    model(ids)
labels = Counter(head.label.name for head in heads.all())
print(labels)
assert labels["mixed"] > 28 and labels["sink"] == 3 and labels["previous-token"] == 2
heads.plot()

# %% [markdown]
# Some heads attend almost evenly to all tokens, some to nearby tokens, three to the first token, and two to the
# token before (1.4 and 3.4: layer and head, both counted from 0). Most are *mixed*: they do a little of several
# things, so no name would be right. No label says "syntax" or "meaning".
#
# ## Heads that copy
# We give mini random tokens, and then the same tokens again. The first copy cannot be predicted. The second
# can only be predicted by copying. A head that copies must attend to *the token that followed the earlier
# occurrence of the current token*. In the plot of its weights, these form a stripe.

# %%
torch.manual_seed(1)
P = 32  # length of the part that is repeated
tokens = 300 + torch.randperm(7892)[: 3 * P].view(3, P)  # [B=3, P]: no token occurs twice
repeated = torch.cat([tokens, tokens], dim=1)  # [B=3, T=64]
with torch.no_grad(), hw.watch(model) as repeated_heads:
    model(repeated)
for head in repeated_heads.find("induction"):
    print(f"{head.layer}.{head.head} induction: {head.score:.2f} of its weight on the stripe")
previous = [(head.layer, head.head) for head in repeated_heads.find("previous-token")]
print("previous-token heads:", previous)
assert [(head.layer, head.head) for head in repeated_heads.find("induction")] == [(5, 2), (5, 5), (6, 5)]
assert set(previous) == {(1, 4), (1, 5), (3, 3), (3, 4)}

# %%
from matplotlib import pyplot

future = torch.ones(2 * P, 2 * P).triu(1).bool()
figure, panels = pyplot.subplots(1, 2, figsize=(9, 4.3), layout="constrained")
titles = {"3.4 attends to the token before": (3, 4), "5.2 attends to the token that followed": (5, 2)}
for axes, (title, (layer, head)) in zip(panels, titles.items(), strict=True):
    weights = repeated_heads[layer].map.dense()[0, head].masked_fill(future, float("nan"))  # [T, T]
    axes.set_facecolor("#e8ebf0")
    axes.imshow(weights**0.5, cmap="PuRd", vmin=0, vmax=1)
    axes.axhline(P - 0.5, color="grey", linewidth=0.8, linestyle=":")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("key; darker: more weight")
panels[0].set_ylabel("query; below the line: second copy")

# %% [markdown]
# Do the predictions depend on these heads? We switch them off and measure the loss on the second copy. For
# comparison, we switch off as many other heads of the same layers.


# %%
def losses(off=()):
    """Return the mean loss on the first and on the second copy."""
    with torch.no_grad(), hw.ablate(model, off):
        logits = model(repeated)  # [B, T, vocabulary]
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].mT, repeated[:, 1:], reduction="none"
    )  # [B, T - 1]
    return float(loss[:, : P - 1].mean()), float(loss[:, P:].mean())


def stripe(off=()):
    """Return how much weight head 5.2 has on the stripe."""
    with torch.no_grad(), hw.ablate(model, off), hw.watch(model) as watched:
        model(repeated)
    return float(hw.heads.induction_stripe(watched[5].map, P)[:, 2].mean())


groups = {
    "none": [],
    "induction 5.2, 5.5, 6.5": [(5, 2), (5, 5), (6, 5)],
    "others 5.1, 5.3, 6.2": [(5, 1), (5, 3), (6, 2)],
    "previous-token 1.4, 1.5, 3.3, 3.4": previous,
    "others 1.2, 1.3, 3.1, 3.6": [(1, 2), (1, 3), (3, 1), (3, 6)],
}
results = {name: losses(off) for name, off in groups.items()}
for name, (first, second) in results.items():
    print(f"off: {name:33} loss {first:5.2f} on the first copy, {second:5.2f} on the second")
intact, without = stripe(), stripe(previous)
print(f"weight of 5.2 on the stripe: {intact:.2f}; without the previous-token heads: {without:.2f}")

chance = math.log(8192)  # the loss if all 8,192 tokens have the same probability
with torch.no_grad():
    log_p = model(repeated)[:, : P - 1].log_softmax(-1)  # [B, P - 1, vocabulary], on the first copy
expected = float(-log_p.mean())  # the mean loss over all tokens that could be drawn
probable = int((log_p.exp() > 1 / 8192).sum(-1).float().mean())  # tokens with more than their even share
print(f"equal probabilities: {chance:.2f}; mini, mean over all tokens: {expected:.2f}")
print(f"tokens to which mini gives more than 1/8192: {probable:,} of 8,192, on average")
assert round(chance, 2) == 9.01 < expected and abs(expected - results["none"][0]) < 0.5
assert results["induction 5.2, 5.5, 6.5"][1] > results["none"][1] + 3 > results["others 5.1, 5.3, 6.2"][1] + 2
without_previous, without_others = (results[name][1] for name in list(groups)[-2:])
assert without_previous > results["none"][1] + 3 > without_others + 2
assert without < 0.3 * intact

# %% [markdown]
# Why is the loss on the first copy larger than that of equal probabilities, $\ln 8192 = 9.01$? Random tokens
# cannot be predicted, so no model can have a mean loss clearly below 9.01 on them. mini has a larger loss because
# it expects text: it gives a few hundred tokens more than 1/8192 each, and the others far less. A random token is
# nearly always one of the others. So the loss on the first copy measures how unequal the probabilities are where
# nothing can be predicted; only the second copy shows whether a model copies.
#
# Without the three induction heads mini hardly copies; without three other heads it still copies. Without the
# *previous-token* heads, the induction heads no longer find the right token. The source repository measures
# this on longer sequences (`python -m studies.probes`): there the loss on the second copy rises from 0.06 to
# 9.75 without the previous-token heads. When four random other heads of the same layers are off instead, the
# mean is 0.06 over 20 draws, and no draw reaches 9.75. Both kinds work together, across layers:
#
# 1. A previous-token head writes into each token which token came before it.
# 2. A head of a later layer searches for that: its query is the current token, its keys contain the token
#    before each position. So it attends to the token that followed the last occurrence of the current token.
#
# The heads in layers 5 and 6 need the results of heads in layers 1 and 3. This is the best known circuit of
# language models, here in a model of under seven million parameters.
#
# ## How the heads developed
# headwise contains measurements of sixteen checkpoints of mini's training:

# %%
life = hw.models.specialisation()
for name, threshold in (("previous", 0.5), ("induction_stripe", 0.4)):
    event = life.when(name, threshold)
    print(f"{name} >= {threshold}: first at step {event.step:,}, head {event.layer}.{event.head}")
assert life.when("previous", 0.5).step < life.when("induction_stripe", 0.4).step

figure, axes = pyplot.subplots(figsize=(7.5, 3.4), layout="constrained")
for layer, head in previous:
    axes.plot(life.steps, life.scores("previous")[:, layer, head], color="#1c2c9b")
for layer, head in ((5, 2), (5, 5), (6, 5)):
    axes.plot(life.steps, life.scores("induction_stripe")[:, layer, head], color="#11863f")
axes.annotate("previous-token: 1.4, 1.5, 3.3, 3.4", (240, 0.6), color="#1c2c9b", ha="right")
axes.annotate("induction: 5.2, 5.5, 6.5", (800, 0.25), color="#11863f")
axes.set_xscale("symlog", linthresh=50)
axes.set_xlim(0, 3000)
axes.set_xticks([0, 50, 250, 1000, 3000], ["0", "50", "250", "1,000", "3,000"])
axes.set_xlabel("training steps")
axes.set_ylabel("score of the head")
axes.set_title("Previous-token heads develop before induction heads", loc="left", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)

assert len(life.steps) == 16
first_labels, last_labels = (Counter(label for layer in life.labels[n] for label in layer) for n in (0, -1))
assert first_labels["broad"] == 56 and last_labels[None] > 28  # None: no label

# %% [markdown]
# Previous-token heads develop first. Induction heads follow, since they need them. (`life.plot()` draws every
# head, and how many heads have which label: all begin as *broad*, and at the end most have no label.)
#
# ## Heads that do nothing
# In the prose above, head 5.2 has a different label: *sink*. Most of its weight is on the first token, which
# says nothing about most words. The same head copies repeated tokens. It puts more weight on the first
# token in the first copy, where there is nothing to copy yet, than in the second copy.

# %%
first_key = repeated_heads[5].map.dense()[:, 2, :, 0]  # [B, T]: weight of head 5.2 on the first key
first_copy, second_copy = float(first_key[:, 1:P].mean()), float(first_key[:, P:].mean())
print(
    f"weight of 5.2 on the first token: {first_copy:.2f} in the first copy, {second_copy:.2f} in the second"
)

prose = next(head for head in heads.all() if (head.layer, head.head) == (5, 2))
weight, written = prose.values["first"], prose.values["written_first"]
print(f"in the prose: {weight:.2f} of its weight, {written:.2f} of its output are from the first token")


def prose_loss(off=()):
    with torch.no_grad(), hw.ablate(model, off):
        logits = model(ids)  # [B=1, T, vocabulary]
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))


rise_prose, rise_copy = prose_loss([(5, 2)]) - prose_loss(), losses([(5, 2)])[1] - results["none"][1]
print(f"5.2 off: the loss rises by {rise_prose:.2f} in the prose, by {rise_copy:.2f} on the second copy")
assert prose.label.name == "sink" and first_copy > 3 * second_copy
assert written < 0.75 * weight < 0.75 and rise_copy > 0.5 > 20 * abs(rise_prose)

# %% [markdown]
# A row of weights always sums to 1: softmax cannot express "nothing". So a head that finds nothing needs a
# key that does no harm. The first token is such a key: it is visible to every query, and here its value is
# small. Its part of the output is smaller than its part of the weight, and switching the head off costs almost
# nothing. **Such a sink is a head with nothing to do in this text.** In another text, the predictions may
# depend on the same head.
#
# Sinks are common in larger models. On a text like this one 61 of the 270 heads of SmolLM2-135M are sinks,
# more than all other labels together. MiniLM-L6, which is not causal, has special tokens, [CLS] and [SEP]: 3
# of its 72 heads put most of their weight there (`python -m studies.claims`). But the weights alone do not
# show that a head does nothing. To see it, measure its contribution to the output, and the loss without the
# head.

# %% [markdown]
# In the exercise you write the layer in which these heads are. Afterwards your class loads the weights of a
# layer of mini, and you look for its previous-token heads.

# %% exercise: CausalSelfAttention
"""Self-attention as in mini: it can load the weights of mini's layers, and no token attends to a later one."""

import torch
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """x [B, T, d_model] -> [B, T, d_model]; the parameters have the same names as in mini."""

    def __init__(self, d_model: int, num_heads: int, rotated: int = 8) -> None:
        super().__init__()
        self.num_heads, self.rotated = num_heads, rotated
        self.d_k = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, d_model] -> [B, H, T, d_k]"""
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, d_k]

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first channels of queries or keys by their positions (RoPE, lesson 15), [B, H, T, d_k]."""
        half = min(self.rotated, self.d_k) // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)  # [half]
        angles = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)[:, None] * frequencies  # [T, half]
        a, b, rest = x.split([half, half, self.d_k - 2 * half], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """Each position attends to itself and to earlier positions."""
        raise NotImplementedError  # rotate queries and keys; hide the future, softmax, values, merge, project


# %% hint: idea
# A causal head hides the future: a token attends to itself and to earlier tokens. Hide the scores of later
# tokens *before* the softmax, so that the weights of the others still sum to 1. This does not depend on
# whether the module is in training.

# %% hint: formula
# $$s_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_k}} \text{ if } j \leq i, \text{ otherwise } -\infty$$
#
# The first token attends to itself alone, the last to all tokens.

# %% hint: code
# 1. `q`, `k` and `v`: the three projections of `x`, each through `self.split`: `[B, H, T, d_k]`. Then
#    `self.rotate` for `q` and `k`, not for `v`.
# 2. `scores`: `[B, H, T, T]`, scaled.
# 3. A table of bools `[T, T]`, True on and below the diagonal (`tril`), on the device of `x`.
# 4. Minus infinity where the table is False; then the softmax over the keys.
# 5. Weights times values; swap heads and tokens back, join the last two axes, and project:
#    `[B, T, d_model]`.

# %% solution
"""Self-attention as in mini: it can load the weights of mini's layers, and no token attends to a later one."""

import torch
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """x [B, T, d_model] -> [B, T, d_model]; the parameters have the same names as in mini."""

    def __init__(self, d_model: int, num_heads: int, rotated: int = 8) -> None:
        super().__init__()
        self.num_heads, self.rotated = num_heads, rotated
        self.d_k = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, d_model] -> [B, H, T, d_k]"""
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, d_k]

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first channels of queries or keys by their positions (RoPE, lesson 15), [B, H, T, d_k]."""
        half = min(self.rotated, self.d_k) // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)  # [half]
        angles = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)[:, None] * frequencies  # [T, half]
        a, b, rest = x.split([half, half, self.d_k - 2 * half], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """Each position attends to itself and to earlier positions."""
        B, T, d_model = x.shape
        q, k = self.rotate(self.split(self.q_proj(x))), self.rotate(self.split(self.k_proj(x)))
        v = self.split(self.v_proj(x))  # [B, H, T, d_k], as q and k
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5  # [B, H, T, T]
        past = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()  # [T, T]: row t attends to 0 .. t
        weights = scores.masked_fill(~past, float("-inf")).softmax(dim=-1)  # [B, H, T, T]
        merged = (weights @ v).transpose(1, 2).reshape(B, T, d_model)  # [B, T, d_model]
        return self.out_proj(merged)


# %% try
x = torch.randn(2, 5, 24)  # 2 sequences of 5 tokens
changed = x.clone()
changed[:, -1] += 1  # another last token
module = CausalSelfAttention(d_model=24, num_heads=3)
print("output:", tuple(module(x).shape), "expected: (2, 5, 24)")
difference = (module(changed) - module(x)).abs().amax(dim=(0, 2))
print("change at each position:", difference.tolist(), "expected: 0 before the last")

# %% [markdown]
# Your class computes what layer 3 of mini computes, and two of its heads attend to the token before:

# %%
trained = model.decoder.layers[3].attention
yours = CausalSelfAttention(d_model=224, num_heads=7)
yours.load_state_dict(trained.state_dict())
inputs = []
handle = trained.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
with torch.no_grad():
    model(repeated)
    handle.remove()
    (x,) = inputs  # [B=3, T=64, 224], what layer 3 reads
    assert torch.allclose(yours(x), trained(x)[0], atol=1e-4)
    q, k = (yours.rotate(yours.split(projection(x))) for projection in (yours.q_proj, yours.k_proj))
scores = (q @ k.transpose(-2, -1) / 32**0.5).masked_fill(future, float("-inf"))  # [B, H=7, T, T]
before = scores.softmax(dim=-1).diagonal(-1, -2, -1).mean(dim=(0, 2))  # [H]: weight on the token before
print("weight on the token before, by head:", [round(weight, 2) for weight in before.tolist()])
assert [head for head in range(7) if before[head] > 0.5] == [3, 4]

# %% question: Why can a model with a single layer have no induction head?
# An induction head must find a token by *the token before it*. In the first layer, the keys contain only each
# token itself and its position. Another head must first write into each token which token came before it, and
# only a later layer can read that. So it takes two layers, with a previous-token head in the earlier one.

# %% question: A head puts two thirds of its weight on the first token. Is it useless, and how would you find out?
# The weights alone cannot say. Measure its contribution to the output (in mini's 5.2, the first token has a
# smaller part of the output than of the weight). Above all, switch the head off on *several
# kinds* of text: without 5.2 the loss hardly rises in prose, but rises strongly where tokens are repeated.
# And check whether its label changes from text to text.
