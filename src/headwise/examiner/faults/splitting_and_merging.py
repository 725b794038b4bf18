"""From [B, T, E] to heads, and back to [B, T, E]."""

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


def _of_all(state: State, one: Tensor) -> Tensor:
    """[B, T, D] as the last projection takes it: as it is, or for every head."""
    times = state.weights.o.shape[1] // one.shape[-1]
    return one if times == 1 else one.repeat(1, 1, times)


def _padded(state: State, one: Tensor) -> Tensor:
    """[B, T, D] followed by zeros."""
    return torch.nn.functional.pad(one, (0, state.weights.o.shape[1] - one.shape[-1]))


def _first_weights(state: State) -> None:
    state.p = state.p[:, :1].expand_as(state.p)


def _last_weights(state: State) -> None:
    state.p = state.p[:, -1:].expand_as(state.p)


def _values_of(head: int) -> Step:
    """Every head mixes the values of this one."""

    def apply(state: State) -> None:
        state.v = state.v[:, head].unsqueeze(1).expand_as(state.v)

    return apply


def _reversed(state: State) -> Tensor:
    return state.heads.flip(1).transpose(1, 2).flatten(2)


(WITHOUT_TRANSPOSE,) = _merged(_without_transpose)
MERGING = [
    Fault(
        "merge without transpose",
        "heads are joined without transposing back",
        "heads.reshape(B, T, d_model) from [B, H, T, d_k]",
        RIGHT_MERGE,
        (
            "Look at how the heads become [B, T, d_model] again.",
            "In memory the positions of one head lie together; the channels of one position should.",
            "transpose(1, 2) before the reshape.",
        ),
        "Rows of the result mix positions and heads: outputs of one token land in another one's place.",
        REPAIR_MERGE,
        "merge",
        (WITHOUT_TRANSPOSE,),
        LINES,
        common=True,
    ),
    Fault(
        "merge with wrong transpose",
        "heads are joined after transposing the wrong dimensions",
        "heads.transpose(2, 3).reshape(B, T, d_model)",
        RIGHT_MERGE,
        (
            "Look at the two dimensions that are swapped before the heads are joined.",
            "[B, H, T, d_k] has to become [B, T, H, d_k].",
            "Swap dimensions 1 and 2, no others.",
        ),
        "Rows of the result mix positions, heads and channels.",
        REPAIR_MERGE,
        "merge",
        _merged(_wrong_transpose),
        (r"\.(transpose|permute|swapaxes)\(.*\.(view|reshape|contiguous|flatten)\(", *LINES),
    ),
    Fault(
        "merge interleaved",
        "heads are joined channel by channel: the first channels of all heads, then the second, ..",
        "heads.permute(0, 2, 3, 1).reshape(B, T, d_model)",
        RIGHT_MERGE,
        (
            "Look at the order of dimensions just before the heads are joined.",
            "Channels come before heads: [B, T, d_k, H].",
            "Join from [B, T, H, d_k]: transpose(1, 2), then reshape.",
        ),
        "Trained from scratch it works as well; with anybody else's weights it computes nonsense.",
        REPAIR_MERGE,
        "merge",
        _merged(_channels_first),
        (r"\.permute\(", *LINES),
    ),
    Fault(
        "heads averaged",
        "the heads are averaged instead of laid side by side",
        "mean of the heads",
        "concat of the heads",
        (
            "Look at what becomes of the dimension of heads.",
            "It disappears in a mean; every head's own channels are lost.",
            "Lay the heads side by side: transpose(1, 2), then reshape to d_model.",
        ),
        "What one head found is blurred with what the others did: that heads differ is why there are many.",
        REPAIR_MERGE,
        "merge",
        (
            *_merged(lambda state: _of_all(state, state.heads.mean(1))),
            *_merged(lambda state: _padded(state, state.heads.mean(1))),
        ),
        (r"\.mean\(\s*(dim\s*=\s*)?1", r"\.mean\(", r"einsum"),
    ),
    Fault(
        "heads summed",
        "the heads are added instead of laid side by side",
        "sum of the heads",
        "concat of the heads",
        (
            "Look at what becomes of the dimension of heads.",
            "It disappears in a sum; every head's own channels are lost.",
            "Lay the heads side by side: transpose(1, 2), then reshape to d_model.",
        ),
        "What one head found is blurred with what the others did: that heads differ is why there are many.",
        REPAIR_MERGE,
        "merge",
        (
            *_merged(lambda state: _of_all(state, state.heads.sum(1))),
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
            "Look at which heads reach the last projection.",
            "All parts of the joined vector are the same.",
            "Index or loop over all heads, not over head 0.",
        ),
        "All heads but one are computed and thrown away.",
        REPAIR_MERGE,
        "merge",
        (*_merged(lambda state: _of_all(state, state.heads[:, 0])), {"drop": _first_weights}),
        (r"\[\s*:\s*,\s*0", r"\[0\]"),
    ),
    Fault(
        "same head for all",
        "one head's keys, values or weights are used for all heads",
        "concat(head_H, head_H, ..)",
        "concat(head_1, head_2, ..)",
        (
            "Which head does each part of the joined vector come from?",
            "An index stays the same for all heads, or a loop keeps only its last result.",
            "Index or loop over all heads, in q, k and v alike.",
        ),
        "Heads that are computed alike, or thrown away, add nothing to the one that is left.",
        REPAIR_MERGE,
        "merge",
        (
            *_merged(lambda state: _of_all(state, state.heads[:, -1])),
            {"drop": _last_weights},
            {"drop": _values_of(0)},
            {"drop": _values_of(-1)},
        ),
        (r"\[\s*:\s*,\s*:?\s*\[?-?[01]\b", r"\[(-1|0)\]", r"\bfor\b"),
        said_by=("no projections", "no q and k projection", "no v projection", "shared projection"),
    ),
    Fault(
        "heads reversed",
        "heads are joined in reverse order",
        "concat(head_H, .., head_1)",
        "concat(head_1, .., head_H)",
        (
            "Look at the order in which heads are joined.",
            "The last head comes first.",
            "Join them in the order they were split.",
        ),
        "Trained from scratch it makes no difference; with anybody else's weights it computes nonsense.",
        REPAIR_MERGE,
        "merge",
        _merged(_reversed),
        (r"flip\(", r"reversed\(", r"::-1"),
    ),
]


RIGHT = "x.view(B, T, H, d_k).transpose(1, 2)"
REPAIR = "q = q.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, d_k]"
WHY = (
    "A view only renames memory. Read as [B, H, T, d_k] without a transpose, one 'head' is a slice of a few "
    "tokens with all their channels: heads mix positions, and the mask no longer means what it says."
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
    """How many heads of keys, or values, there are, each for a run of query heads."""
    blocks = weight.unflatten(0, (num_heads, -1))  # [H, D, E]
    return 1 + sum(not bool((blocks[h] == blocks[h - 1]).all()) for h in range(1, num_heads))


def _dealt_out(letters: str) -> Way:
    """Keys, values or both in the order of k.repeat(..)."""

    def apply(state: State) -> None:
        RIGHT_STEPS["split"](state)
        H, groups = state.num_heads, _groups(state.weights.k, state.num_heads)
        if not 1 < groups < H or H % groups:
            raise ValueError(
                "every head has keys of its own, or all share them: there is no order to mistake"
            )
        turns = torch.arange(H) % groups * (H // groups)  # heads 0 1 2 3 get the keys of 0 1 0 1
        state.k = state.k[:, turns] if "k" in letters else state.k
        state.v = state.v[:, turns] if "v" in letters else state.v

    return {"split": apply}


def _cut(shape: str) -> Way:
    """The fused [B, T, 3 E] read as these sizes, "3" among them, and cut along it; nothing is moved."""

    def apply(state: State) -> None:
        fused = torch.cat(state.projected, -1)  # raises where queries and keys differ in number
        B, T, _ = fused.shape
        sizes = {"3": 3, "B": B, "T": T, "H": state.num_heads, "D": state.head_dim}
        parts = fused.reshape([sizes[one] for one in shape]).unbind(shape.index("3"))
        left = shape.replace("3", "")
        state.q, state.k, state.v = (x.permute([left.index(one) for one in "BHTD"]) for x in parts)

    return {"split": apply}


def _one(state: State) -> None:
    state.q, state.k, state.v = (x[:, None] for x in state.projected)  # [B, 1, T, E]


def _one_scale(state: State) -> None:
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
        "heads are split with view alone: the transpose is missing",
        "x.view(B, H, T, d_k)",
        RIGHT,
        (
            "Look at how [B, T, d_model] becomes heads.",
            "The shape is right, the numbers in it are not: view never moves anything.",
            "View as [B, T, H, d_k] first, then transpose dimensions 1 and 2.",
        ),
        WHY,
        REPAIR,
        "split",
        ({"split": _by_view},),
        VIEWS,
        common=True,
    ),
    Fault(
        "split and merge by view",
        "heads are split and joined with view alone: both transposes are missing",
        "x.view(B, H, T, d_k) ... .view(B, T, d_model)",
        RIGHT,
        (
            "Look at how [B, T, d_model] becomes heads, and at the way back.",
            "Both shapes are right, but view never moves a number: each 'head' is a run of tokens.",
            "View as [B, T, H, d_k], then transpose(1, 2); on the way back transpose(1, 2), then reshape.",
        ),
        WHY,
        REPAIR,
        "split",
        ({"split": _by_view, **WITHOUT_TRANSPOSE},),
        VIEWS,
    ),
    Fault(
        "fused qkv cut by view",
        "the fused q, k and v are taken apart with view or reshape alone: the permute is missing",
        "qkv.reshape(3, B, T, H, d_k) and the like, with qkv [B, T, 3 d_model]",
        "qkv.reshape(B, T, 3, H, d_k).permute(2, 0, 3, 1, 4)",
        (
            "Look at how [B, T, 3 d_model] becomes q, k and v.",
            "A reshape never moves a number: the 3 lies next to the heads, and nowhere else.",
            "Reshape to [B, T, 3, H, d_k] first, then permute the 3 to the front.",
        ),
        "Queries, keys and values are cut out of each other's numbers: positions, and samples, are mixed up.",
        "q, k, v = qkv.reshape(B, T, 3, self.num_heads, self.d_k).permute(2, 0, 3, 1, 4)",
        "split",
        tuple(_cut(shape) for shape in ("3BTHD", "3BHTD", "B3HTD", "B3THD", "BHT3D", "BH3TD")),
        (r"\.(view|reshape)\(.*\b3\b", r"qkv.*\.(view|reshape)\(", r"\.(view|reshape)\("),
        mixes_samples=True,
    ),
    Fault(
        "attention across heads",
        "attention runs over the heads of one position, not over positions",
        "softmax(q[b, t] k[b, t]^T) v[b, t], an H x H matrix for every position",
        RIGHT,
        (
            "Print the shape of the scores.",
            "The last two dimensions should be query and key positions; here both are heads.",
            "Transpose to [B, H, T, d_k] before the product of q and k.",
        ),
        "No position ever sees another one: the module is an expensive feed-forward layer.",
        REPAIR,
        "split",
        ({"split": _positions_as_heads, "merge": _side_by_side},),
        (r"\.(view|reshape)\(.*(num_heads|n_heads?|heads|\bh\b|\bH\b)", r"\.(view|reshape|unflatten)\("),
    ),
    Fault(
        "heads interleaved",
        "channels are dealt out to heads one by one: head h gets channels h, h + H, h + 2H, ..",
        "x.view(B, T, d_k, H)",
        RIGHT,
        (
            "Look at the order of the last two sizes in the view.",
            "A head should be a run of neighbouring channels.",
            "View as [B, T, H, d_k], heads before channels.",
        ),
        "Trained from scratch it works as well; with anybody else's weights it computes nonsense.",
        REPAIR,
        "split",
        ({"split": _interleaved},),
        (r"\.(view|reshape)\(.*(d_k|head_dim|depth|d_head|head_size)\s*,\s*(self\.)?(num_heads|n_heads?|heads|h|H)\b",
         r"\.(view|reshape)\("),
    ),
    Fault(
        "groups repeated in wrong order",
        "the shared keys and values are dealt out to the query heads in the wrong order",
        "k.repeat(..): heads 0, 1, 2, 3 use the keys 0, 1, 0, 1",
        "k.repeat_interleave(..): heads 0, 1, 2, 3 use the keys 0, 0, 1, 1",
        (
            "Which query heads share one head of keys?",
            "Neighbouring query heads belong to one group; here they are dealt out like cards.",
            "Use repeat_interleave along the heads, or expand behind the groups and reshape.",
        ),
        "Trained from scratch it works as well; with anybody else's weights heads use the wrong keys.",
        "k = k.repeat_interleave(self.n_rep, dim=1)  # [B, H, S, d_k]",
        "split",
        (_dealt_out("kv"), _dealt_out("v"), _dealt_out("k")),
        (r"\.repeat\(", r"\.(tile|expand)\(", r"repeat\("),
    ),
    Fault(
        "groups repeated wrong times",
        "shared keys and values are repeated a wrong number of times",
        "k.repeat_interleave(num_kv_heads, ..)",
        "k.repeat_interleave(num_heads // num_kv_heads, ..)",
        (
            "How often must each shared head be repeated, so that every query head has one?",
            "It is repeated num_kv_heads times, which is right for 4 heads over 2 and for few others.",
            "Repeat it num_heads // num_kv_heads times.",
        ),
        "It works for one pair of head counts and raises for the others.",
        "k = k.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)",
        lines=(r"repeat_interleave\(", r"\.repeat\(", r"\.expand\("),
    ),
    Fault(
        "single head",
        "there is one head as wide as the model: it is never split",
        "softmax(q k^T / sqrt(d_k)) v over all channels at once",
        RIGHT,
        (
            "Count the heads: what is the shape of the scores?",
            "The scores have no dimension for heads.",
            "Split q, k and v into num_heads before the product.",
        ),
        "One softmax for all channels: a position can look at one thing at a time.",
        REPAIR,
        "split",
        ({"split": _one},),
        ONE_HEAD,
    ),
    Fault(
        "single head with its own scale",
        "there is one head as wide as the model, scaled by its own width: it is never split",
        "softmax(q k^T / sqrt(d_model)) v over all channels at once",
        RIGHT,
        (
            "Count the heads: what is the shape of the scores?",
            "The scores have no dimension for heads; the scale is right for one wide head.",
            "Split q, k and v into num_heads before the product.",
        ),
        "One softmax for all channels: a position can look at one thing at a time.",
        REPAIR,
        "split",
        ({"split": _one, "scale": _one_scale},),
        ONE_HEAD,
    ),
]  # fmt: skip
