"""Faults of splitting [B, T, E] into heads and of merging the heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import RIGHT as RIGHT_STEPS
from ..recipe import State, Step
from .fault import Fault, Way

RIGHT_MERGE = "heads.transpose(1, 2).reshape(B, T, d_model)"
REPAIR_MERGE = "out = out.transpose(1, 2).reshape(B, T, self.d_model)"
LINES = (
    r"\.(view|reshape|flatten)\(.*(d_model|embed_dim|embed_size|emb_dim|hidden|dim|n_embd|-1|E|C)",
    r"\.(contiguous|flatten)\(",
)


def _merged(merge: Callable[[State], Tensor]) -> tuple[Way, ...]:
    def apply(state: State) -> None:
        state.joined = merge(state)

    return ({"merge": apply},)


def _without_transpose(state: State) -> Tensor:
    B, _, T, _ = state.heads.shape
    return state.heads.reshape(B, T, -1)  # [B, T, E]


def _wrong_transpose(state: State) -> Tensor:
    B, _, T, _ = state.heads.shape
    return state.heads.transpose(2, 3).reshape(B, T, -1)


def _channels_first(state: State) -> Tensor:
    return state.heads.permute(0, 2, 3, 1).flatten(2)  # [B, T, D, H] -> [B, T, E]


def _for_all_heads(state: State, output: Tensor) -> Tensor:
    """Repeat [B, T, D] for every head if the output projection takes [B, T, E]."""
    times = state.weights.o.shape[1] // output.shape[-1]
    return output if times == 1 else output.repeat(1, 1, times)


def _padded(state: State, output: Tensor) -> Tensor:
    """Pad [B, T, D] with zeros to the width of the output projection."""
    return torch.nn.functional.pad(output, (0, state.weights.o.shape[1] - output.shape[-1]))


def _first_weights(state: State) -> None:
    state.p = state.p[:, :1].expand_as(state.p)


def _causal_over_heads(state: State) -> None:
    """Apply a causal mask between heads, as in a function that takes heads for positions."""
    later = torch.ones(state.scaled.shape[-2:], dtype=torch.bool).triu(1)
    state.hidden = state.scaled.masked_fill(later, -torch.inf)


def _padding_over_heads(state: State) -> None:
    """A padding mask [B, T, 1, 1], for scores [B, T, H, H]: hidden positions weigh their heads equally."""
    if state.mask is None:
        state.hidden = state.scaled
        return
    visible = state.mask[:, 0].any(1)  # [B, S]
    state.hidden = state.scaled.masked_fill(~visible[:, :, None, None], -1e9)


def _last_weights(state: State) -> None:
    state.p = state.p[:, -1:].expand_as(state.p)


def _values_of(head: int) -> Step:
    """Use the values of one head for all heads."""

    def apply(state: State) -> None:
        state.v = state.v[:, head].unsqueeze(1).expand_as(state.v)

    return apply


def _reversed(state: State) -> Tensor:
    return state.heads.flip(1).transpose(1, 2).flatten(2)


(WITHOUT_TRANSPOSE,) = _merged(_without_transpose)
MERGING = [
    Fault(
        "merge without transpose",
        "heads are merged without transposing back",
        "heads.reshape(B, T, d_model) from [B, H, T, d_k]",
        RIGHT_MERGE,
        (
            "Look at how the heads are merged into [B, T, d_model].",
            "After the transpose, memory holds all positions of one head next to each other. A reshape "
            "needs all heads of one position next to each other.",
            "Call transpose(1, 2) before the reshape.",
        ),
        "Each row of the result mixes positions and heads: part of one token's output ends up at "
        "another token.",
        REPAIR_MERGE,
        "merge",
        (WITHOUT_TRANSPOSE,),
        LINES,
        common=True,
    ),
    Fault(
        "merge with wrong transpose",
        "heads are merged after transposing the wrong dimensions",
        "heads.transpose(2, 3).reshape(B, T, d_model)",
        RIGHT_MERGE,
        (
            "Look at the two dimensions that are swapped before the heads are merged.",
            "[B, H, T, d_k] has to become [B, T, H, d_k].",
            "Swap dimensions 1 and 2.",
        ),
        "Each row of the result mixes positions, heads and channels.",
        REPAIR_MERGE,
        "merge",
        _merged(_wrong_transpose),
        (r"\.(transpose|permute|swapaxes)\(.*\.(view|reshape|contiguous|flatten)\(", *LINES),
    ),
    Fault(
        "merge interleaved",
        "heads are merged channel by channel: channel 0 of all heads, then channel 1 of all heads, and so on",
        "heads.permute(0, 2, 3, 1).reshape(B, T, d_model)",
        RIGHT_MERGE,
        (
            "Look at the order of dimensions just before the heads are merged.",
            "The channels come before the heads: [B, T, d_k, H].",
            "Merge from [B, T, H, d_k]: transpose(1, 2), then reshape.",
        ),
        "It works if trained from scratch, but weights of any other implementation give wrong results.",
        REPAIR_MERGE,
        "merge",
        _merged(_channels_first),
        (r"\.permute\(", *LINES),
    ),
    Fault(
        "heads averaged",
        "the heads are averaged instead of concatenated",
        "mean of the heads",
        "concatenation of the heads",
        (
            "Look at what happens to the dimension of the heads.",
            "It is removed by a mean, so the heads do not keep separate channels.",
            "Concatenate the heads: transpose(1, 2), then reshape to d_model.",
        ),
        "The results of the heads are mixed into one, so having several heads makes little difference.",
        REPAIR_MERGE,
        "merge",
        (
            *_merged(lambda state: _for_all_heads(state, state.heads.mean(1))),
            *_merged(lambda state: _padded(state, state.heads.mean(1))),
        ),
        (r"\.mean\(\s*(dim\s*=\s*)?1", r"\.mean\(", r"einsum"),
    ),
    Fault(
        "heads summed",
        "the heads are added instead of concatenated",
        "sum of the heads",
        "concatenation of the heads",
        (
            "Look at what happens to the dimension of the heads.",
            "It is removed by a sum, so the heads do not keep separate channels.",
            "Concatenate the heads: transpose(1, 2), then reshape to d_model.",
        ),
        "The results of the heads are mixed into one, so having several heads makes little difference.",
        REPAIR_MERGE,
        "merge",
        (
            *_merged(lambda state: _for_all_heads(state, state.heads.sum(1))),
            *_merged(lambda state: _padded(state, state.heads.sum(1))),
        ),
        (r"\.sum\(\s*(dim\s*=\s*)?1", r"\bsum\(", r"einsum"),
    ),
    Fault(
        "first head for all",
        "the first head's output is used for all heads",
        "concat(head_0, head_0, ..)",
        "concat(head_0, head_1, ..)",
        (
            "Look at which heads reach the output projection.",
            "All parts of the concatenated vector are equal.",
            "Use all heads instead of head 0 only.",
        ),
        "All other heads are computed, but their results are not used.",
        REPAIR_MERGE,
        "merge",
        (*_merged(lambda state: _for_all_heads(state, state.heads[:, 0])), {"drop": _first_weights}),
        (r"\[\s*:\s*,\s*0", r"\[0\]"),
    ),
    Fault(
        "same head for all",
        "one head's keys, values or weights are used for all heads",
        "concat(head_H, head_H, ..)",
        "concat(head_1, head_2, ..)",
        (
            "Which head does each part of the concatenated vector come from?",
            "The same index is used for all heads, or a loop keeps only its last result.",
            "Use each head's own q, k and v.",
        ),
        "Heads that are equal, or whose results are not used, add nothing.",
        REPAIR_MERGE,
        "merge",
        (
            *_merged(lambda state: _for_all_heads(state, state.heads[:, -1])),
            {"drop": _last_weights},
            {"drop": _values_of(0)},
            {"drop": _values_of(-1)},
        ),
        (r"\[\s*:\s*,\s*:?\s*\[?-?[01]\b", r"\[(-1|0)\]", r"\bfor\b"),
        said_by=("no projections", "no q and k projection", "no v projection", "shared projection"),
    ),
    Fault(
        "heads reversed",
        "heads are concatenated in reverse order",
        "concat(head_H, .., head_1)",
        "concat(head_1, .., head_H)",
        (
            "Look at the order in which the heads are concatenated.",
            "The last head comes first.",
            "Concatenate them in the order in which they were split.",
        ),
        "It makes no difference if trained from scratch, but weights of any other implementation give "
        "wrong results.",
        REPAIR_MERGE,
        "merge",
        _merged(_reversed),
        (r"flip\(", r"reversed\(", r"::-1"),
    ),
]


RIGHT = "x.view(B, T, H, d_k).transpose(1, 2)"
REPAIR = "q = q.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, d_k]"
REASON = (
    "A view does not move numbers. Without a transpose, each 'head' holds all channels of a few tokens "
    "instead of some channels of all tokens: heads mix positions, and masks apply to the wrong tokens."
)


def _by_view(state: State) -> None:
    def split(x: Tensor) -> Tensor:
        B, T, E = x.shape
        return x.reshape(B, state.num_heads, T, E // state.num_heads)  # [B, H, T, D], of the wrong numbers

    state.q, state.k, state.v = (split(x) for x in state.projected)


def _positions_as_heads(state: State) -> None:
    state.q, state.k, state.v = (
        x.unflatten(-1, (state.num_heads, -1)) for x in state.projected
    )  # [B, T, H, D]


def _side_by_side(state: State) -> None:
    state.joined = state.heads.flatten(2)  # [B, T, E] from [B, T, H, D]


def _interleaved(state: State) -> None:
    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, state.num_heads)).permute(
            0, 3, 1, 2
        )  # [B, H, T, D]: channel h, h + H, ..

    state.q, state.k, state.v = (split(x) for x in state.projected)


def _groups(weight: Tensor, num_heads: int) -> int:
    """Return the number of different heads of keys or values, each used by consecutive query heads."""
    blocks = weight.unflatten(0, (num_heads, -1))  # [H, D, E]
    return 1 + sum(not bool((blocks[h] == blocks[h - 1]).all()) for h in range(1, num_heads))


def _repeated(letters: str) -> Way:
    """Repeat keys, values or both as k.repeat(..) does."""

    def apply(state: State) -> None:
        RIGHT_STEPS["split"](state)
        H, groups = state.num_heads, _groups(state.weights.k, state.num_heads)
        if not 1 < groups < H or H % groups:
            raise ValueError("the heads do not share keys in groups, so groups have no order")
        order = torch.arange(H) % groups * (H // groups)  # heads 0 1 2 3 get the keys of 0 1 0 1
        state.k = state.k[:, order] if "k" in letters else state.k
        state.v = state.v[:, order] if "v" in letters else state.v

    return {"split": apply}


def _cut(shape: str) -> Way:
    """Reshape the fused [B, T, 3 E] to the axes in `shape`, and separate q, k and v along its "3"."""

    def apply(state: State) -> None:
        fused = torch.cat(state.projected, -1)  # raises where queries and keys differ in number
        B, T, _ = fused.shape
        sizes = {"3": 3, "B": B, "T": T, "H": state.num_heads, "D": state.head_dim}
        parts = fused.reshape([sizes[axis] for axis in shape]).unbind(shape.index("3"))
        left = shape.replace("3", "")
        state.q, state.k, state.v = (x.permute([left.index(axis) for axis in "BHTD"]) for x in parts)

    return {"split": apply}


def _unsplit(state: State) -> None:
    state.q, state.k, state.v = (x[:, None] for x in state.projected)  # [B, 1, T, E]


def _scaled_by_width(state: State) -> None:
    state.scaled = state.scores / state.q.shape[-1] ** 0.5


VIEWS = (
    r"\.(view|reshape)\(\s*\w+\s*,\s*(self\.)?(num_heads|n_heads?|heads|h|H|nhead)\s*,",
    r"\.(view|reshape)\(\s*\w+\s*\*\s*(self\.)?(num_heads|n_heads?|heads|h|H|nhead)",
    r"\.(view|reshape)\(",
)
ONE_HEAD = (r"(matmul|@|bmm).*(transpose|mT|\.T\b)", r"softmax\(")
SPLITTING = [
    Fault(
        "split by view",
        "heads are split by view without a transpose",
        "x.view(B, H, T, d_k)",
        RIGHT,
        (
            "Look at how [B, T, d_model] is split into heads.",
            "The shape is correct, but the numbers are in the wrong places: view does not move numbers.",
            "First view as [B, T, H, d_k], then transpose dimensions 1 and 2.",
        ),
        REASON,
        REPAIR,
        "split",
        ({"split": _by_view},),
        VIEWS,
        common=True,
    ),
    Fault(
        "split and merge by view",
        "heads are split and merged by view: both transposes are missing",
        "x.view(B, H, T, d_k) ... .view(B, T, d_model)",
        RIGHT,
        (
            "Look at how [B, T, d_model] is split into heads, and how the heads are merged.",
            "Both shapes are correct, but view does not move numbers: each 'head' holds a few whole tokens.",
            "To split, view as [B, T, H, d_k], then transpose(1, 2). To merge, transpose(1, 2), then "
            "reshape.",
        ),
        REASON,
        REPAIR,
        "split",
        ({"split": _by_view, **WITHOUT_TRANSPOSE},),
        VIEWS,
    ),
    Fault(
        "fused qkv cut by view",
        "the fused q, k and v are separated by view or reshape without a permute",
        "qkv.reshape(3, B, T, H, d_k) and the like, with qkv [B, T, 3 d_model]",
        "qkv.reshape(B, T, 3, H, d_k).permute(2, 0, 3, 1, 4)",
        (
            "Look at how [B, T, 3 d_model] is separated into q, k and v.",
            "A reshape does not move numbers: in [B, T, 3 d_model] the 3 comes directly before the heads.",
            "First reshape to [B, T, 3, H, d_k], then permute the 3 to the front.",
        ),
        "Queries, keys and values contain parts of each other, and of other positions and samples.",
        "q, k, v = qkv.reshape(B, T, 3, self.num_heads, self.d_k).permute(2, 0, 3, 1, 4)",
        "split",
        tuple(_cut(shape) for shape in ("3BTHD", "3BHTD", "B3HTD", "B3THD", "BHT3D", "BH3TD")),
        (r"\.(view|reshape)\(.*\b3\b", r"qkv.*\.(view|reshape)\(", r"\.(view|reshape)\("),
        mixes_samples=True,
    ),
    Fault(
        "attention across heads",
        "attention is computed between the heads of one position instead of between positions",
        "softmax(q[b, t] k[b, t]^T) v[b, t], an H x H matrix for each position",
        RIGHT,
        (
            "Print the shape of the scores.",
            "The last two dimensions should be query positions and key positions; here both are heads.",
            "Transpose to [B, H, T, d_k] before the product of q and k.",
        ),
        "No position attends to any other position.",
        REPAIR,
        "split",
        (
            {"split": _positions_as_heads, "merge": _side_by_side},
            {"split": _positions_as_heads, "hide": _causal_over_heads, "merge": _side_by_side},
            {"split": _positions_as_heads, "hide": _padding_over_heads, "merge": _side_by_side},
        ),
        (r"\.(view|reshape)\(.*(num_heads|n_heads?|heads|\bh\b|\bH\b)", r"\.(view|reshape|unflatten)\("),
    ),
    Fault(
        "heads interleaved",
        "channels are assigned to heads in turn: head h gets channels h, h + H, h + 2H, ..",
        "x.view(B, T, d_k, H)",
        RIGHT,
        (
            "Look at the order of the last two sizes in the view.",
            "Each head should consist of consecutive channels.",
            "View as [B, T, H, d_k], with the heads before the channels.",
        ),
        "It works if trained from scratch, but weights of any other implementation give wrong results.",
        REPAIR,
        "split",
        ({"split": _interleaved},),
        (r"\.(view|reshape)\(.*(d_k|head_dim|depth|d_head|head_size)\s*,\s*(self\.)?(num_heads|n_heads?|heads|h|H)\b",
         r"\.(view|reshape)\("),
    ),
    Fault(
        "groups repeated in wrong order",
        "the shared keys and values are assigned to the query heads in the wrong order",
        "attention with k.repeat(..): query heads 0, 1, 2, 3 use KV heads 0, 1, 0, 1",
        "attention with k.repeat_interleave(..): query heads 0, 1, 2, 3 use KV heads 0, 0, 1, 1",
        (
            "Which query heads use the same head of keys?",
            "Consecutive query heads should share a head of keys; here the heads of keys are used in turn.",
            "Use repeat_interleave along the heads, or expand a new dimension after that of the groups "
            "and reshape.",
        ),
        "It works if trained from scratch, but with weights of any other implementation heads use the "
        "wrong keys.",
        "k = k.repeat_interleave(self.n_rep, dim=1)  # [B, H, S, d_k]",
        "split",
        (_repeated("kv"), _repeated("v"), _repeated("k")),
        (r"\.repeat\(", r"\.(tile|expand)\(", r"repeat\("),
    ),
    Fault(
        "groups repeated wrong times",
        "shared keys and values are repeated the wrong number of times",
        "k.repeat_interleave(num_kv_heads, ..)",
        "k.repeat_interleave(num_heads // num_kv_heads, ..)",
        (
            "How many times must each head of keys be repeated so that every query head has one?",
            "It is repeated num_kv_heads times, which is correct only if num_heads = num_kv_heads ** 2.",
            "Repeat it num_heads // num_kv_heads times.",
        ),
        "It works for some pairs of head counts, such as 4 and 2, and raises an exception for the others.",
        "k = k.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)",
        lines=(r"repeat_interleave\(", r"\.repeat\(", r"\.expand\("),
    ),
    Fault(
        "single head",
        "there is a single head with all channels: q, k and v are not split into heads",
        "softmax(q k^T / sqrt(d_k)) v over all channels at once",
        RIGHT,
        (
            "Print the shape of the scores. Which dimension are the heads?",
            "The scores have no dimension for the heads.",
            "Split q, k and v into num_heads heads before the product of q and k.",
        ),
        "With one softmax for all channels, each position has only one set of weights over the other "
        "positions.",
        REPAIR,
        "split",
        ({"split": _unsplit},),
        ONE_HEAD,
    ),
    Fault(
        "single head with its own scale",
        "there is a single head with all channels, scaled by sqrt(d_model): q, k and v are not split "
        "into heads",
        "softmax(q k^T / sqrt(d_model)) v over all channels at once",
        RIGHT,
        (
            "Print the shape of the scores. Which dimension are the heads?",
            "The scores have no dimension for the heads. The scale is correct for one head with d_model "
            "channels.",
            "Split q, k and v into num_heads heads before the product of q and k.",
        ),
        "With one softmax for all channels, each position has only one set of weights over the other "
        "positions.",
        REPAIR,
        "split",
        ({"split": _unsplit, "scale": _scaled_by_width},),
        ONE_HEAD,
    ),
]  # fmt: skip
