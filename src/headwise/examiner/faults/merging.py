"""From heads back to [B, T, E]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import State
from .fault import Fault, Way

RIGHT = "heads.transpose(1, 2).reshape(B, T, d_model)"
REPAIR = "out = out.transpose(1, 2).reshape(B, T, self.d_model)"
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


def _reversed(state: State) -> Tensor:
    return state.heads.flip(1).transpose(1, 2).flatten(2)


(WITHOUT_TRANSPOSE,) = _merged(_without_transpose)
FAULTS = [
    Fault(
        "merge without transpose",
        "heads are joined without transposing back",
        "heads.reshape(B, T, d_model) from [B, H, T, d_k]",
        RIGHT,
        (
            "Look at how the heads become [B, T, d_model] again.",
            "In memory the positions of one head lie together; the channels of one position should.",
            "transpose(1, 2) before the reshape.",
        ),
        "Rows of the result mix positions and heads: outputs of one token land in another one's place.",
        REPAIR,
        "merge",
        (WITHOUT_TRANSPOSE,),
        LINES,
        common=True,
    ),
    Fault(
        "merge with wrong transpose",
        "heads are joined after transposing the wrong dimensions",
        "heads.transpose(2, 3).reshape(B, T, d_model)",
        RIGHT,
        (
            "Look at the two dimensions that are swapped before the heads are joined.",
            "[B, H, T, d_k] has to become [B, T, H, d_k].",
            "Swap dimensions 1 and 2, no others.",
        ),
        "Rows of the result mix positions, heads and channels.",
        REPAIR,
        "merge",
        _merged(_wrong_transpose),
        (r"\.(transpose|permute|swapaxes)\(.*\.(view|reshape|contiguous|flatten)\(", *LINES),
    ),
    Fault(
        "merge interleaved",
        "heads are joined channel by channel: the first channels of all heads, then the second, ..",
        "heads.permute(0, 2, 3, 1).reshape(B, T, d_model)",
        RIGHT,
        (
            "Look at the order of dimensions just before the heads are joined.",
            "Channels come before heads: [B, T, d_k, H].",
            "Join from [B, T, H, d_k]: transpose(1, 2), then reshape.",
        ),
        "Trained from scratch it works as well; with anybody else's weights it computes nonsense.",
        REPAIR,
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
        REPAIR,
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
        REPAIR,
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
        REPAIR,
        "merge",
        (*_merged(lambda state: _of_all(state, state.heads[:, 0])), {"drop": _first_weights}),
        (r"\[\s*:\s*,\s*0", r"\[0\]"),
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
        REPAIR,
        "merge",
        _merged(_reversed),
        (r"flip\(", r"reversed\(", r"::-1"),
    ),
]
