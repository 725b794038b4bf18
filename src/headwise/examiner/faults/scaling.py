"""The product of q and k, and its scale."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..recipe import State
from .fault import Fault, Way

RIGHT = "softmax(q k^T / sqrt(d_k)) v"
WHY_SMALL = (
    "Scores that are divided by too much are nearly equal: every key gets about the same weight, and a head "
    "averages instead of choosing."
)
WHY_LARGE = (
    "q.k grows with d_k. Without the right scale the softmax saturates: one key takes all, and hardly any "
    "gradient gets through."
)
REPAIR = "scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)"
DIVIDED = r"(/|\*)\s*(\(|math\.sqrt|torch\.sqrt|np\.sqrt|self\.scale|scale|[\w.]+\s*\*\*)"
PRODUCT = r"(@|matmul|bmm|einsum)"
EINSUM = (r"einsum\(.*(q|Q|quer).*(k|K|key)", r"einsum\(")


def _scaled(factor: Callable[[State], float]) -> tuple[Way, ...]:
    def apply(state: State) -> None:
        state.scaled = state.scores * factor(state)

    return ({"scale": apply},)


def _constant(number: float) -> Way:
    def apply(state: State) -> None:
        state.scaled = state.scores * number

    return {"scale": apply}


def _unscaled(state: State) -> None:
    state.scaled = state.scores


def _shrunk(state: State) -> None:
    state.p = state.p / state.head_dim**0.5


def _scored(function: Callable[[State], Tensor]) -> Way:
    def apply(state: State) -> None:
        state.scores = function(state)

    return {"score": apply}


def _turned(state: State) -> Tensor:
    if state.q.shape[-2] != state.k.shape[-2]:
        raise ValueError("turned scores need as many queries as keys")
    return state.k @ state.q.transpose(-2, -1)


def _width(state: State) -> int:
    return state.weights.q.shape[0]


FAULTS = [
    Fault(
        "no scale",
        "scores are not divided by sqrt(d_k)",
        "softmax(q k^T) v",
        RIGHT,
        (
            "Look at what happens between q.k and the softmax.",
            "The scores are too large: something that keeps them at a steady size is missing.",
            "Divide the scores by the square root of the channels of one head.",
        ),
        WHY_LARGE,
        REPAIR,
        "scale",
        _scaled(lambda state: 1.0),
        (rf"=.*{PRODUCT}.*(transpose|mT|\.T\b|permute|->)", r"einsum\(.*(q|Q).*(k|K)", r"softmax\("),
        common=True,
    ),
    Fault(
        "scale by d_model",
        "scores are divided by the square root of d_model, not of d_k",
        "softmax(q k^T / sqrt(d_model)) v",
        RIGHT,
        (
            "Look at the number the scores are divided by.",
            "A score is a sum over the channels of one head. How many are those?",
            "Use d_k = d_model / num_heads under the square root.",
        ),
        WHY_SMALL,
        REPAIR,
        "scale",
        _scaled(lambda state: _width(state) ** -0.5),
        (
            r"sqrt\(\s*(self\.)?(d_model|embed_dim|emb_dim|embed_size|hidden_size|hidden_dim|dim|n_embd|d_out|d|E|D)\b",
            r"(d_model|embed_dim|embed_size|emb_dim|hidden_size|hidden_dim|dim|n_embd|E)\s*\)?\s*\*\*\s*\(?-?\s*(0\.5|1)",
            DIVIDED,
        ),
        common=True,
    ),
    Fault(
        "scale by d_k",
        "scores are divided by d_k itself, not by its square root",
        "softmax(q k^T / d_k) v",
        RIGHT,
        (
            "Look at the number the scores are divided by.",
            "The spread of a sum of d_k products grows like a root, not like d_k.",
            "Put a square root around d_k.",
        ),
        WHY_SMALL,
        REPAIR,
        "scale",
        _scaled(lambda state: 1 / state.head_dim),
        (r"/\s*(self\.)?(d_k|dk|head_dim|d_head|head_size|depth|d)\b(?!\s*\*\*)", DIVIDED),
    ),
    Fault(
        "multiply by sqrt d_k",
        "scores are multiplied by sqrt(d_k) instead of divided",
        "softmax(q k^T * sqrt(d_k)) v",
        RIGHT,
        (
            "Look at the sign of the exponent, or at * and /.",
            "The scores should get smaller by the scale, not larger.",
            "Divide by sqrt(d_k), or multiply by d_k ** -0.5.",
        ),
        WHY_LARGE,
        REPAIR,
        "scale",
        _scaled(lambda state: state.head_dim**0.5),
        (r"\*\s*(math\.|torch\.|np\.)?sqrt", r"\*\s*\(?.*\*\*\s*0\.5", DIVIDED),
    ),
    Fault(
        "scale by sqrt H",
        "scores are divided by the square root of the number of heads",
        "softmax(q k^T / sqrt(num_heads)) v",
        RIGHT,
        (
            "Look at the number the scores are divided by.",
            "How many heads there are does not change the size of a score; how wide they are does.",
            "Use d_k, the channels of one head, under the root, not num_heads.",
        ),
        "The scale no longer follows the width of a head: right by luck for one model, wrong for the next.",
        REPAIR,
        "scale",
        _scaled(lambda state: state.num_heads**-0.5),
        (
            r"sqrt\(\s*(self\.)?(num_heads|n_heads?|heads|h|H)\b",
            r"(num_heads|n_heads?|heads)\s*\*\*",
            DIVIDED,
        ),
    ),
    Fault(
        "scale by sqrt T",
        "scores are divided by the square root of the length of the sequence",
        "softmax(q k^T / sqrt(length)) v",
        RIGHT,
        (
            "Look at the number the scores are divided by; print it for two lengths.",
            "A score is a sum over channels, not over positions.",
            "Use d_k, the last dimension of q after the split, under the root.",
        ),
        "The same sentence gets other weights in a longer batch: what a head does would depend on padding.",
        REPAIR,
        "scale",
        (
            *_scaled(lambda state: state.k.shape[-2] ** -0.5),
            *_scaled(lambda state: state.q.shape[-2] ** -0.5),
        ),
        (r"sqrt\(.*(size\(\s*-?[12]\s*\)|shape\[\s*-?[12]\s*\]|seq|len|T\b|L\b)", DIVIDED),
    ),
    Fault(
        "scale after softmax",
        "the weights are divided by sqrt(d_k), not the scores",
        "softmax(q k^T) / sqrt(d_k) v",
        RIGHT,
        (
            "Sum the weights of one query.",
            "The scale comes after the softmax, where it only shrinks.",
            "Divide the scores, before the softmax.",
        ),
        "Weights sum to 1 / sqrt(d_k), and the softmax has saturated before the scale came.",
        REPAIR,
        "drop",
        ({"scale": _unscaled, "drop": _shrunk},),
        (r"softmax\(.*\)\s*/", r"softmax\(.*\)\s*\*", DIVIDED),
    ),
    Fault(
        "constant scale",
        "scores are multiplied by a fixed number that is not 1 / sqrt(d_k)",
        "softmax(c q k^T) v",
        RIGHT,
        (
            "Look at the number the scores are multiplied with.",
            "It does not follow from the width of a head.",
            "Compute it from d_k: 1 / sqrt(d_k).",
        ),
        "It fits one width of head at most; for every other the softmax is too sharp or too flat.",
        REPAIR,
        "scale",
        fit=_constant,
        lines=(r"scale\s*=\s*[\d.]", r"[*/]\s*\d", DIVIDED),
    ),
    Fault(
        "scores of sums",
        "two letters stand for the channels: sums are multiplied in place of channels",
        "sum(q) * sum(k)",
        "q.k, channel by channel",
        (
            "Read the letters of the product of q and k: which is the axis of channels in both?",
            "A letter that only one of two tensors has is summed by itself, before anything is multiplied.",
            "Use one letter for the channels: bqhd,bkhd->bhqk.",
        ),
        "A query is one number and a key is one number: heads can no longer tell directions apart.",
        'scores = torch.einsum("bhqd,bhkd->bhqk", q, k)',
        "score",
        (_scored(lambda state: state.q.sum(-1, keepdim=True) * state.k.sum(-1).unsqueeze(-2)),),
        EINSUM,
    ),
    Fault(
        "scores mixed over heads",
        "two letters stand for the heads: each query meets the keys of all heads at once",
        "q_h . (k_1 + .. + k_H)",
        "q_h . k_h",
        (
            "Read the letters of the product of q and k: which is the axis of heads in both?",
            "A letter that only one of two tensors has is summed by itself, before anything is multiplied.",
            "Use one letter for the heads: bqhd,bkhd->bhqk.",
        ),
        "Heads share one set of keys, or of queries: they are no longer independent of each other.",
        'scores = torch.einsum("bhqd,bhkd->bhqk", q, k)',
        "score",
        (
            _scored(lambda state: state.q @ state.k.sum(1, keepdim=True).transpose(-2, -1)),
            _scored(lambda state: state.q.sum(1, keepdim=True) @ state.k.transpose(-2, -1)),
        ),
        EINSUM,
    ),
    Fault(
        "scores transposed",
        "queries and keys change places in the scores: rows are keys, columns are queries",
        "softmax(k q^T) v",
        RIGHT,
        (
            "Which axis of the scores are the queries, which the keys?",
            "Each row belongs to a key here, and the softmax runs over queries.",
            "q @ k.transpose(-2, -1), or ->bhqk with q for the queries.",
        ),
        "Keys ask and queries answer; a mask hides the wrong way round, and with S != T it crashes.",
        REPAIR,
        "score",
        (_scored(_turned),),
        (rf"=.*{PRODUCT}", r"einsum\("),
    ),
]
