"""Split and merge.

idea: splitting into heads takes a view and a transpose; a view alone has the right shape and wrong numbers
minutes: 8
level: junior
repairs: heads split by view; heads merged without a transpose
"""

# %% [markdown]
# One head gives each query one set of shares. A word may need several: one for the verb it belongs to, one
# for the word before it. So attention runs with $H$ heads side by side, each with channels of its own. A
# sequence is a row of tokens (words, say), each a vector of width $E = H \cdot D$. It is cut into $H$ pieces
# of width $D$: head 0 gets channels $0$ to $D-1$ of *every* token, head 1 the next $D$, and so on. After
# attention the pieces are put side by side again.
#
# This lesson is about cutting and joining alone. No number is computed, all are only put elsewhere, and it
# can go wrong without an error. So let us use numbers that say where they come from: 13 is token 1, channel
# 3.

# %%
import torch

T, H, D = 3, 2, 4  # tokens, heads, channels of a head
E = H * D
x = 10 * torch.arange(T)[:, None] + torch.arange(E)  # [T=3, E=8]
print(x)

# %% [markdown]
# The right way takes two steps. Read each row of 8 as 2 rows of 4, then bring the axis of heads to the front:

# %%
apart = x.view(T, H, D)  # [T=3, H=2, D=4]
heads = apart.transpose(0, 1)  # [H=2, T=3, D=4]
print(heads)
for h in range(H):
    assert torch.equal(heads[h], x[:, h * D : (h + 1) * D])  # its channels, of every token

# %% [markdown]
# The tempting way asks for the shape one wants, at once. There is no error: 24 numbers fit.

# %%
wrong = x.view(H, T, D)  # [H=2, T=3, D=4]: the same shape
assert wrong.shape == heads.shape and not torch.equal(wrong, heads)

# %% [markdown]
# Where does each number in memory go? Colour is the head that a number belongs to; dark is a later token.

# %%
from matplotlib import pyplot as plt

TINTS = [["#ffe3c2", "#fdb777", "#f28e3c"], ["#e3d3ee", "#bd95d4", "#9560b8"]]  # [head][token]


def draw(ax: plt.Axes, table: torch.Tensor, title: str, row_name: str = "") -> None:
    """A table of numbers 10 * token + channel, each in its colour."""
    for row, numbers in enumerate(table.tolist()):
        for column, number in enumerate(numbers):
            token, channel = divmod(number, 10)
            tint = TINTS[channel // D][token]
            ax.add_patch(plt.Rectangle((column, row), 1, 1, facecolor=tint, edgecolor="white", lw=2))
            ax.text(column + 0.5, row + 0.52, f"{number:02}", ha="center", va="center", color="#1f2430")
        if row_name:
            ax.text(-0.2, row + 0.52, f"{row_name} {row}", ha="right", va="center", size=9, color="#5b6270")
    ax.set(xlim=(0, table.shape[1]), ylim=(table.shape[0], 0), aspect="equal")
    ax.set_title(title, size=10.5)
    ax.axis("off")


figure = plt.figure(figsize=(9.5, 5.2))
rows = figure.add_gridspec(3, 1, height_ratios=[1, 3, 3], hspace=0.3)
draw(
    figure.add_subplot(rows[0]),
    x.reshape(1, -1),
    "Memory: 24 numbers in a row, token after token (13 is token 1, channel 3)",
)
for place, table, name in ((1, heads, "view, then transpose (right)"), (2, wrong, "view alone (wrong)")):
    sides = rows[place].subgridspec(1, H)
    for h in range(H):
        draw(figure.add_subplot(sides[h]), table[h], f"{name}: head {h}", "row")
figure.subplots_adjust(left=0.06, right=0.98, top=0.95, bottom=0.02)

# %% [markdown]
# Split the right way, a head has one colour, and one row for each token. The view alone hands out memory in
# the order in which it lies there: "head 0" is all of token 0, cut in two rows, and half of token 1.
# Attention in it would compare the two halves of one token, and tokens 0 and 2 would never meet. All shapes
# fit, so no error comes.
#
# ## Why a view cannot do it
# A tensor is memory and a rule for walking through it: the **strides**, how far apart in memory two
# neighbours along an axis lie. `view` keeps the order of memory and only puts in other brackets. `transpose`
# exchanges two strides. Neither moves a number: all four tensors below begin at the same address.

# %%
for name, one in (("x", x), ("view", apart), ("view, transpose", heads), ("view alone", wrong)):
    assert one.data_ptr() == x.data_ptr()
    print(f"{name:16} shape {tuple(one.shape)!s:10} strides {one.stride()}")
h, t, d = 1, 2, 3
assert heads[h, t, d] == x.flatten()[4 * h + 8 * t + 1 * d]  # strides (4, 8, 1)
assert wrong[h, t, d] == x.flatten()[12 * h + 4 * t + 1 * d]  # strides (12, 4, 1)

# %% [markdown]
# Strides of the right split read: one head on is 4 numbers on, one token on is 8. No view of this memory has
# a smaller stride in front of a larger one; only a transpose makes that.
#
# ## Merge: the same, backwards
# Transpose first, then join the last two axes. Now there is an error to meet: joined rows have to lie side by
# side in memory, and after a transpose they do not. Attention's output `o` is new memory in the order of
# heads:

# %%
o = heads.clone(memory_format=torch.contiguous_format)  # [H, T, D]: as if attention had written it
try:
    o.transpose(0, 1).view(T, E)
except RuntimeError as error:
    print("RuntimeError:", str(error).split(" (")[0])

merged = o.transpose(0, 1).reshape(T, E)  # [T=3, E=8]: reshape copies where a view cannot
assert torch.equal(merged, x) and merged.data_ptr() != o.data_ptr()
lost = o.reshape(T, E)  # [T=3, E=8]: the transpose forgotten
assert lost.shape == merged.shape and not torch.equal(lost, x)
print(lost)

# %% [markdown]
# `.contiguous().view(..)`, which many courses write, is the same as `.reshape(..)`: a copy in the new order.
# The copy is needed; the mistake is to read the error as "use reshape" and to forget the transpose, as in the
# table just printed: its first row is head 0 of tokens 0 and 1.
#
# With a batch in front, every axis moves on by one: `[B, T, E]` to `[B, H, T, D]`.

# %% exercise: split_heads
"""From one wide vector for each token to H narrow ones."""

from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """x [B, T, E] -> [B, H, T, D]: head h has channels h * D to (h + 1) * D - 1 of every token."""
    raise NotImplementedError  # two steps; B stays in front


# %% solution
"""From one wide vector for each token to H narrow ones."""

from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """x [B, T, E] -> [B, H, T, D]: head h has channels h * D to (h + 1) * D - 1 of every token."""
    B, T, E = x.shape
    apart = x.view(B, T, num_heads, E // num_heads)  # [B, T, H, D]
    heads = apart.transpose(1, 2)  # [B, H, T, D]
    return heads


# %%
assert torch.equal(x.view(T, H, D).transpose(0, 1).transpose(0, 1).reshape(T, E), x)  # the right pair
assert torch.equal(x.view(H, T, D).reshape(T, E), x)  # the wrong pair


def attend(rows: torch.Tensor) -> torch.Tensor:
    """Lesson 3's head, with rows [H, T, D] as queries, keys and values."""
    return (rows @ rows.transpose(-2, -1) / D**0.5).softmax(-1) @ rows


torch.manual_seed(0)
y = torch.randn(T, E)
good = attend(y.view(T, H, D).transpose(0, 1)).transpose(0, 1).reshape(T, E)
bad = attend(y.view(H, T, D)).reshape(T, E)
print("with attention in between, the two pairs differ by up to", round((good - bad).abs().max().item(), 2))
assert not torch.allclose(good, bad, atol=0.1)

# %% question: Split and merge, one after the other, give x again. Does that prove that both are right?
# No. A wrong merge undoes a wrong split, so the round trip holds for both pairs (first lines of the cell
# above). What stands between them tells: attention compares the rows of a head, and in the wrong split those
# are not tokens. Test a split against slices, as above: `heads[h] == x[:, h * D : (h + 1) * D]`.

# %%
B, T, E, H = 2, 5, 24, 4
D = E // H
head, place = divmod(17, D)
x = torch.arange(B * T * E).view(B, T, E)
assert (x.view(B, T, H, D).transpose(1, 2)[:, head, :, place] == x[:, :, 17]).all()
print(f"head {head}, channel {place} of it; x is cut to {[B, H, T, D]}")

# %% question: x [2, 5, 24] is split into 4 heads. What is the new shape, and where does channel 17 go?
# $[2, 4, 5, 6]$: 24 = 4 heads of 6 channels. Channel 17 is 17 = 2 · 6 + 5: head 2 (the third), channel 5 of
# it, for every token. The number of heads has to divide the width, else there is no such cut.

# %% [markdown]
# Next: matrices in front of the split and behind the merge, and the whole module stands.
