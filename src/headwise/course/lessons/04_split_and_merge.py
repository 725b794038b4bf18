"""Split and merge.

idea: splitting into heads takes a view and a transpose; a view alone has the right shape and wrong numbers
minutes: 8
level: junior
repairs: heads split by view; heads merged without a transpose
"""

# %% [markdown]
# One head gives each query one set of weights. A word may need several: one for the verb it belongs to, one
# for the word before it. So attention runs with $H$ heads, each with its own channels. A sequence is a row of
# tokens (words, for example), each a vector of width $E = H \cdot D$. Splitting cuts these vectors into $H$
# pieces of width $D$: head 0 gets channels $0$ to $D-1$ of *every* token, head 1 the next $D$, and so on.
# After attention, merging puts the pieces side by side again.
#
# This lesson is about splitting and merging alone. They compute nothing and only rearrange indices, and
# mistakes raise no error. To make them visible, each number encodes its position: 13 is token 1, channel 3.

# %%
import torch

T, H, D = 3, 2, 4  # tokens, heads, channels of a head
E = H * D
x = 10 * torch.arange(T)[:, None] + torch.arange(E)  # [T=3, E=8]
print(x)

# %% [markdown]
# The right way takes two steps: reshape each row of 8 into 2 rows of 4, then move the axis of heads to the
# front.

# %%
per_token = x.view(T, H, D)  # [T=3, H=2, D=4]
heads = per_token.transpose(0, 1)  # [H=2, T=3, D=4]
print(heads)
for h in range(H):
    assert torch.equal(heads[h], x[:, h * D : (h + 1) * D])  # channels of head h, every token

# %% [markdown]
# A single view to the final shape raises no error, since both shapes have 24 numbers.

# %%
wrong = x.view(H, T, D)  # [H=2, T=3, D=4]: the same shape
assert wrong.shape == heads.shape and not torch.equal(wrong, heads)
print(wrong)

# %% [markdown]
# The plot shows where each number in memory goes. The colour is the head that a number belongs to; later
# tokens are darker.

# %%
from matplotlib import pyplot as plt

TINTS = [["#ffe3c2", "#fdb777", "#f28e3c"], ["#e3d3ee", "#bd95d4", "#9560b8"]]  # [head][token]


def draw(ax: plt.Axes, table: torch.Tensor, title: str, row_name: str = "") -> None:
    """Draw a table of numbers 10 * token + channel, coloured by head and token."""
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
for row, table, name in ((1, heads, "view, then transpose (right)"), (2, wrong, "view alone (wrong)")):
    columns = rows[row].subgridspec(1, H)
    for h in range(H):
        draw(figure.add_subplot(columns[h]), table[h], f"{name}: head {h}", "row")
figure.subplots_adjust(left=0.06, right=0.98, top=0.95, bottom=0.02)

# %% [markdown]
# With the right split, head 0 has the numbers 0 to 3, 10 to 13 and 20 to 23: channels 0 to 3 of each token,
# in one colour, and one row for each token. The view alone takes the numbers in the order of memory: "head 0"
# has 0 to 7 and 10 to 13, which is all of token 0, cut into two rows, and half of token 1. Attention within
# it would compare the two halves of one token, and would never compare tokens 0 and 2. All shapes fit, so
# there is no error.
#
# ## Why a view cannot do it
# A tensor is a block of memory together with **strides**: how far apart in memory two neighbours along an
# axis are. `view` keeps the order of the numbers in memory and only groups them differently. `transpose`
# exchanges two strides. Neither moves a number: the four tensors below start at the same address.

# %%
for name, tensor in (("x", x), ("view", per_token), ("view, transpose", heads), ("view alone", wrong)):
    assert tensor.data_ptr() == x.data_ptr()
    print(f"{name:16} shape {tuple(tensor.shape)!s:10} strides {tensor.stride()}")
h, t, d = 1, 2, 3
assert heads[h, t, d] == x.flatten()[4 * h + 8 * t + 1 * d]  # strides (4, 8, 1)
assert wrong[h, t, d] == x.flatten()[12 * h + 4 * t + 1 * d]  # strides (12, 4, 1)

# %% [markdown]
# In the right split, the stride of the axis of heads is 4, and that of the axis of tokens is 8. `view` of a
# contiguous tensor (its numbers lie in memory without gaps, in the order of its rows) always gives strides
# that decrease from the first axis to the last. Only a transpose puts a smaller stride in front of a larger
# one.
#
# ## Merge: the same steps in reverse
# Transpose first, then join the last two axes. Here an error can occur: to join two axes with `view`, their
# rows must be adjacent in memory, and after a transpose they are not. The output `o` of attention is new
# memory in the order of heads:

# %%
o = heads.clone(memory_format=torch.contiguous_format)  # [H, T, D]: new memory, as attention returns it
try:
    o.transpose(0, 1).view(T, E)
except RuntimeError as error:
    print("RuntimeError:", str(error).split(" (")[0])

merged = o.transpose(0, 1).reshape(T, E)  # [T=3, E=8]: reshape copies where a view cannot
assert torch.equal(merged, x) and merged.data_ptr() != o.data_ptr()
mixed_up = o.reshape(T, E)  # [T=3, E=8]: the transpose forgotten
assert mixed_up.shape == merged.shape and not torch.equal(mixed_up, x)
print(mixed_up)

# %% [markdown]
# `.contiguous().view(..)`, common in courses, does the same as `.reshape(..)`: it copies the numbers into the
# new order. The copy is necessary. The common mistake is to read the error as "use reshape" and to forget the
# transpose. Without the transpose, `reshape` gives the table just printed: its first row is head 0 of tokens
# 0 and 1.
#
# With a batch in front, every axis moves by one: `[B, T, E]` becomes `[B, H, T, D]`.

# %% exercise: split_heads
"""Split the vector of each token into heads."""

from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """x [B, T, E] -> [B, H, T, D]: head h has channels h * D to (h + 1) * D - 1 of every token."""
    raise NotImplementedError  # two steps; B stays the first axis


# %% hint: idea
# The channels of each token are cut into neighbouring pieces, a piece for each head, and no number may leave
# its token. A single view to the final shape would mix tokens. Which axis can be split without mixing them?

# %% hint: formula
# $$\text{out}[b, h, t, d] = x[b, t, h \cdot D + d], \qquad D = E / H$$

# %% hint: code
# 1. Read `B`, `T` and `E` from the shape of `x`. The width of a head is `E` divided by the number of heads,
#    as a whole number.
# 2. A view with four axes in which tokens are still in front of heads: `[B, T, H, D]`.
# 3. Swap the axes of tokens and heads: `[B, H, T, D]`.

# %% solution
"""Split the vector of each token into heads."""

from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """x [B, T, E] -> [B, H, T, D]: head h has channels h * D to (h + 1) * D - 1 of every token."""
    B, T, E = x.shape
    per_token = x.view(B, T, num_heads, E // num_heads)  # [B, T, H, D]
    return per_token.transpose(1, 2)  # [B, H, T, D]


# %% try
x = torch.arange(2 * 3 * 8).view(2, 3, 8)  # 2 sequences of 3 tokens, E = 8
heads = split_heads(x, num_heads=2)
print("heads:", tuple(heads.shape), "expected: (2, 2, 3, 4)")
print("head 1 of the first sequence:", heads[0, 1].tolist())
print("expected, channels 4 to 7:   ", x[0, :, 4:].tolist())

# %%
assert torch.equal(x.view(T, H, D).transpose(0, 1).transpose(0, 1).reshape(T, E), x)  # the right pair
assert torch.equal(x.view(H, T, D).reshape(T, E), x)  # the wrong pair


def attend(rows: torch.Tensor) -> torch.Tensor:
    """The head of lesson 3, with rows [H, T, D] as queries, keys and values."""
    return (rows @ rows.transpose(-2, -1) / D**0.5).softmax(-1) @ rows


torch.manual_seed(0)
y = torch.randn(T, E)
good = attend(y.view(T, H, D).transpose(0, 1)).transpose(0, 1).reshape(T, E)
bad = attend(y.view(H, T, D)).reshape(T, E)
print("with attention in between, the two pairs differ by up to", round((good - bad).abs().max().item(), 2))
assert not torch.allclose(good, bad, atol=0.1)

# %% question: Split followed by merge gives x again. Does that prove that both are right?
# No. A wrong merge undoes a wrong split, so the round trip works for both pairs (first lines of the code
# below). The difference is attention in between: it compares the rows of a head, and after the wrong split
# these are not tokens. Compare a split with slices instead: `heads[h] == x[:, h * D : (h + 1) * D]`.

# %%
B, T, E, H = 2, 5, 24, 4
D = E // H
head, channel = divmod(17, D)
x = torch.arange(B * T * E).view(B, T, E)
assert (x.view(B, T, H, D).transpose(1, 2)[:, head, :, channel] == x[:, :, 17]).all()
print(f"channel 17 is channel {channel} of head {head}; x is split to {[B, H, T, D]}")

# %% question: x [2, 5, 24] is split into 4 heads. What is the new shape, and where does channel 17 go?
# $[2, 4, 5, 6]$: 24 channels are 4 heads of 6. Since 17 = 2 · 6 + 5, channel 17 of every token becomes
# channel 5 of head 2 (the third). The number of heads must divide the width.
