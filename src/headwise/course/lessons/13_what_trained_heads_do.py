"""What trained heads do.

idea: a few heads earn a name by what is measured of them, and one that looks at the first token may rest
minutes: 10
level: data scientist
repairs: causal shows the next; causal flipped; causal only in training
"""

# %% [markdown]
# Nobody tells a head what to do. What did the 32 heads of mini, 4 layers of 8, make of that? Here mini reads
# a text that it never saw. A label is given for a measured score above a stated threshold
# (`headwise.heads.LABELS`), for example *previous-token*: half of the weight and more lies on the token just
# before.

# %%
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
assert labels["mixed"] > 16 and labels["self"] == labels["previous-token"] == 2 and labels["punctuation"] == 1
heads.plot()

# %% [markdown]
# Some look evenly at everything, two at the token itself, one at punctuation, some near by, two at the token
# before (1.5 and 2.1: layer and head, both counted from 0). Most are *mixed*: they do a little of several
# things, and no name would be honest. Nothing here says "syntax" or "meaning".
#
# ## Heads that copy
# Give mini random tokens, and then the same tokens again. The first time nothing can be guessed. The second
# time all there is to do is to copy, and whoever copies must look at *what followed when this token was said
# before*: a stripe.

# %%
torch.manual_seed(1)
P = 32  # tokens that are said twice
said = 300 + torch.randperm(2772)[: 3 * P].view(3, P)  # [B=3, P]: no token twice
twice = torch.cat([said, said], dim=1)  # [B=3, T=64]
with torch.no_grad(), hw.watch(model) as copying:
    model(twice)
for head in copying.find("induction"):
    print(f"{head.layer}.{head.head} induction: {head.score:.2f} of its weight on the stripe")
before = [(head.layer, head.head) for head in copying.find("previous-token")]
print("previous-token heads:", before)
assert [(head.layer, head.head) for head in copying.find("induction")] == [(3, 0), (3, 6)]
assert set(before) == {(1, 5), (2, 1)}

# %%
from matplotlib import pyplot

future = torch.ones(2 * P, 2 * P).triu(1).bool()
figure, panels = pyplot.subplots(1, 2, figsize=(9, 4.3), layout="constrained")
shown = {"2.1 looks at the token before": (2, 1), "3.0 looks at what followed last time": (3, 0)}
for axes, (title, (layer, head)) in zip(panels, shown.items(), strict=True):
    weights = copying[layer].map.dense()[0, head].masked_fill(future, float("nan"))  # [T, T]
    axes.set_facecolor("#e8ebf0")
    axes.imshow(weights**0.5, cmap="PuRd", vmin=0, vmax=1)
    axes.axhline(P - 0.5, color="grey", linewidth=0.8, linestyle=":")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("key (is looked at); darker: more weight")
panels[0].set_ylabel("query (looks); below the line: said again")

# %% [markdown]
# Is this what the heads are *for*? Switch them off and see what is lost where something is said again. Beside
# them two heads of the same layers that are of no such kind.


# %%
def losses(off=()):
    with torch.no_grad(), hw.ablate(model, off):
        logits = model(twice)  # [B, T, vocabulary]
    each = torch.nn.functional.cross_entropy(logits[:, :-1].mT, twice[:, 1:], reduction="none")  # [B, T - 1]
    return float(each[:, : P - 1].mean()), float(each[:, P:].mean())


def stripe(off=()):
    with torch.no_grad(), hw.ablate(model, off), hw.watch(model) as seen:
        model(twice)
    return float(hw.heads.induction_stripe(seen[3].map, P)[:, 0].mean())


kinds = {
    "none": [],
    "induction 3.0, 3.6": [(3, 0), (3, 6)],
    "two others 3.1, 3.3": [(3, 1), (3, 3)],
    "previous-token 1.5, 2.1": before,
    "two others 1.6, 2.7": [(1, 6), (2, 7)],
}
lost = {name: losses(off) for name, off in kinds.items()}
for name, (first, again) in lost.items():
    print(f"off: {name:24} loss {first:5.2f} the first time, {again:5.2f} again")
whole, without = stripe(), stripe(before)
print(f"the stripe of 3.0: {whole:.2f}, without the previous-token heads {without:.2f}")
assert lost["induction 3.0, 3.6"][1] > lost["none"][1] + 3 > lost["two others 3.1, 3.3"][1] + 2
assert lost["previous-token 1.5, 2.1"][1] > lost["none"][1] + 3 > lost["two others 1.6, 2.7"][1] + 2
assert without < 0.3 * whole

# %% [markdown]
# Without the two induction heads copying is all but gone; without two others it is not. And without the
# *previous-token* heads the induction heads no longer find their place. The source repository has longer
# probes (`python -m studies.probes`): there the loss rises from 8.08 to 12.67 without the previous-token
# heads; with two others of their layers off it is 8.13 on average, and none of 20 draws is as bad. The two
# kinds work together, over layers:
#
# 1. a previous-token head writes into each token which token stood before it;
# 2. a later head asks: *before whom did I stand last time?* Its query is the token, its keys are those notes.
#
# A head of layer 3 can only ask this because a head of layer 1 or 2 has answered. It is the best known
# circuit of language models, and here it is, in four million parameters.
#
# ## How it came about
# Twenty checkpoints of mini's training were kept and measured:

# %%
life = hw.models.specialisation()
for name, least in (("previous", 0.5), ("induction_stripe", 0.4)):
    when = life.when(name, least)
    print(f"{name} of {least} and more: first at step {when.step:,}, head {when.layer}.{when.head}")
assert life.when("previous", 0.5).step < life.when("induction_stripe", 0.4).step

figure, axes = pyplot.subplots(figsize=(7.5, 3.4), layout="constrained")
for layer, head in before:
    axes.plot(life.steps, life.scores("previous")[:, layer, head], color="#1c2c9b")
for head in (0, 6):
    axes.plot(life.steps, life.scores("induction_stripe")[:, 3, head], color="#11863f")
axes.annotate("previous-token: 1.5, 2.1", (240, 0.8), color="#1c2c9b", ha="right")
axes.annotate("induction: 3.0, 3.6", (1900, 0.25), color="#11863f")
axes.set_xscale("symlog", linthresh=50)
axes.set_xlim(0, 8000)
axes.set_xticks([0, 50, 250, 1000, 8000], ["0", "50", "250", "1,000", "8,000"])
axes.set_xlabel("steps of training")
axes.set_ylabel("weight where their kind looks")
axes.set_title("First the heads that look next door, then those that copy", loc="left", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)

assert len(life.steps) == 20
at_first, at_last = (Counter(label for layer in life.labels[n] for label in layer) for n in (0, -1))
assert at_first["broad"] == 32 and at_last[None] > 16  # None: no label was earned

# %% [markdown]
# Heads that look next door come first; heads that copy come after, since they need the others. (`life.plot()`
# draws every head, and how many have which label: all begin *broad*, and most never get another name.)
#
# ## Heads that rest
# In the prose above 3.0 has another label: *sink*. Most of its weight lies on the first token, which tells
# nothing about most words. The same head copies, as we have just seen. Where does it look if there is nothing
# to copy? The picture of 3.0 tells already: above the line, a dark first column.

# %%
first = copying[3].map.dense()[:, 0, :, 0]  # [B, T]: what head 3.0 gives to the first key
resting, busy = float(first[:, 1:P].mean()), float(first[:, P:].mean())
print(f"3.0 on the first token: {resting:.2f} while there is nothing to copy, {busy:.2f} where there is")

prose = next(head for head in heads.all() if (head.layer, head.head) == (3, 0))
weight, written = prose.values["first"], prose.values["written_first"]
print(
    f"in the prose: {weight:.2f} of its weight lies there, {written:.2f} of what it writes comes from there"
)


def prose_loss(off=()):
    with torch.no_grad(), hw.ablate(model, off):
        logits = model(ids)  # [B=1, T, vocabulary]
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))


idle, copies = prose_loss([(3, 0)]) - prose_loss(), losses([(3, 0)])[1] - lost["none"][1]
print(f"3.0 off: the loss rises by {idle:.2f} in the prose, by {copies:.2f} where something is said again")
assert prose.label.name == "sink" and resting > 3 * busy
assert written < 0.5 * weight < 0.5 and copies > 20 * idle

# %% [markdown]
# A row of weights sums to 1, whether there is something to look for or not: softmax cannot say "nothing". So
# a head that finds nothing needs a place to look at that does no harm. The first token is such a place,
# everybody can see it, and here its value is small: much weight, little written, next to nothing lost without
# it. **This sink is a head at rest**, and a head that rests in one text may be the one that all hangs on in
# the next.
#
# In larger models it is common. On a text like this one 61 of the 270 heads of SmolLM2-135M are sinks, more
# than have all other labels together. MiniLM-L6, which reads both ways, has special tokens, [CLS] and [SEP]:
# 3 of its 72 heads rest most of their weight there (`python -m studies.claims`). But weight alone does not
# tell who rests: what a head writes and what is lost without it do.

# %% exercise: CausalSelfAttention
"""Self-attention as in mini: no token sees a later one."""

import torch
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """x [B, T, d_model] -> [B, T, d_model]"""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, d_model] -> [B, H, T, d_k]"""
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, d_k]

    def forward(self, x: Tensor) -> Tensor:
        """Each position mixes itself and what came before."""
        raise NotImplementedError  # scores, hide the future, softmax, mix, join, project


# %% solution
"""Self-attention as in mini: no token sees a later one."""

import torch
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """x [B, T, d_model] -> [B, T, d_model]"""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, d_model] -> [B, H, T, d_k]"""
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, d_k]

    def forward(self, x: Tensor) -> Tensor:
        """Each position mixes itself and what came before."""
        B, T, d_model = x.shape
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5  # [B, H, T, T]
        past = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()  # [T, T]: row t sees 0 to t
        weights = scores.masked_fill(~past, float("-inf")).softmax(dim=-1)  # [B, H, T, T]
        joined = (weights @ v).transpose(1, 2).reshape(B, T, d_model)  # [B, T, d_model]
        return self.W_o(joined)


# %% question: Why can a model with a single layer have no induction head?
# The head must find a token by *what stood before it*, and the keys of the first layer are made of the token
# itself and its place alone. Some head must first have written into each token who stood before it; only a
# later layer can read that. So it takes two layers, and a previous-token head in the earlier one.

# %% question: A head puts two thirds of its weight on the first token. Is it useless, and how would you find out?
# Not from the weights. Ask what it writes (in mini's 3.0 the first token has most of the weight, and less
# than half of what is written), and above all switch it off on *several kinds* of text: 3.0 is hardly missed
# in prose and is the one that counts as soon as something is said twice. And look whether its label changes
# from text to text.

# %% [markdown]
# The next lesson takes the sentences that course pages say about heads, one by one, and holds each against
# numbers.
