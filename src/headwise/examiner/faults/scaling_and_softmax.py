"""From queries and keys to weights: the product and its scale, and the softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import State
from .fault import Fault, Way
from .masking import filled

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


def _weights_times(factor: Callable[[State], float]) -> Way:
    """All weights are multiplied by a number after the softmax."""

    def apply(state: State) -> None:
        state.p = state.p * factor(state)

    return {"drop": apply}


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


SCORING = [
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


RIGHT_WEIGHTS = "softmax over the keys: every query's weights sum to 1"
REPAIR_WEIGHTS = "weights = torch.softmax(scores, dim=-1)"


def _weights(function: Callable[[Tensor], Tensor]) -> tuple[Way, ...]:
    def apply(state: State) -> None:
        state.p = function(state.hidden)

    return ({"softmax": apply},)


def _filled(number: float, function: Callable[[Tensor], Tensor]) -> Way:
    """With hidden scores at this number: without an exponential 0 hides them, and where nothing else is left
    along an axis, keys at -1e9 share the weight."""
    return {**filled(number), **_weights(function)[0]}


def _heads_and_keys(s: Tensor) -> Tensor:
    B, H, T, S = s.shape
    together = s.transpose(1, 2).flatten(2)  # [B, T, H S]
    return torch.softmax(together, -1).view(B, T, H, S).transpose(1, 2)


def _over_sum(s: Tensor) -> Tensor:
    s = s.masked_fill(torch.isneginf(s), 0.0)
    return s / s.sum(-1, keepdim=True)


def _across(s: Tensor, of_max: str, of_sum: str) -> Tensor:
    """exp(s - max) / sum with the largest number, or the sum, of row j in column j: a lost keepdim."""
    if s.shape[-2] != s.shape[-1]:
        raise ValueError("a row of numbers does not broadcast over another number of columns")
    if of_max != "none":
        most = s.amax(-1)
        s = s - most.unsqueeze(-1 if of_max == "own" else -2)
    e = s.exp()
    return e / e.sum(-1).unsqueeze(-1 if of_sum == "own" else -2)


SOFTMAX = (r"softmax\(", r"Softmax\(")


def _axis(key: str, axis: int, over: str, sums: str, extra: str, common: bool = False) -> Fault:
    return Fault(
        key,
        f"the softmax runs over {over}, not over the keys",
        f"softmax(scores, dim={axis})",
        RIGHT_WEIGHTS,
        (
            "Look at what the weights sum to, and along which dimension.",
            f"{sums} sum to 1; the weights of one query should.",
            "The keys are the last dimension of the scores: dim=-1.",
        ),
        extra,
        REPAIR_WEIGHTS,
        "softmax",
        (*_weights(lambda s: torch.softmax(s, axis)), _filled(-1e9, lambda s: torch.softmax(s, axis))),
        (rf"softmax\(.*dim\s*=\s*\(?{axis}", rf"softmax\([^)]*,\s*{axis}\s*\)", *SOFTMAX),
        common=common,
        mixes_samples=axis == 0,
    )


WEIGHING = [
    _axis(
        "softmax over queries", -2, "the queries", "The columns, one for each key,",
        "Queries compete for a key instead of keys for a query: a query's weights need not sum to 1, and "
        "what it gets depends on what the others ask. Under a causal mask it lets the future decide.",
        common=True,
    ),
    _axis(
        "softmax over heads", 1, "the heads", "The weights of all heads at one place",
        "Heads compete with each other, and no head's weights sum to 1.",
    ),
    _axis(
        "softmax over batch", 0, "the batch", "The weights of all samples at one place",
        "What one sentence gets depends on which others are in the batch.",
    ),
    Fault(
        "softmax over heads and keys",
        "the softmax runs over heads and keys together",
        "softmax over the H * S numbers of one query",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one head and one query.",
            "Only all heads together sum to 1.",
            "Keep the dimension of heads apart: softmax over the last dimension of [B, H, T, S].",
        ),
        "A head with larger scores takes the weight of the others.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(_heads_and_keys),
        (r"flatten\(.*softmax", r"(view|reshape)\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "softmax over the whole map",
        "the softmax runs over queries and keys together",
        "softmax over the T * S numbers of one head",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query.",
            "Only the whole map of a head sums to 1.",
            "Do not flatten the scores before the softmax; use dim=-1.",
        ),
        "Outputs shrink with the length, and queries compete with each other.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(lambda s: torch.softmax(s.flatten(2), -1).view(s.shape)),
        (r"flatten\(.*softmax", r"(view|reshape)\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "softmax twice",
        "the softmax is taken twice",
        "softmax(softmax(scores))",
        RIGHT_WEIGHTS,
        (
            "Count how often the scores are normalised.",
            "Weights are turned into weights once more.",
            "Take one of the two softmaxes out.",
        ),
        "The second sees numbers between 0 and 1 and makes them nearly equal; hidden keys get weight again.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(lambda s: torch.softmax(torch.softmax(s, -1), -1)),
        (r"softmax\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "sigmoid",
        "a sigmoid stands in place of the softmax",
        "sigmoid(scores) v",
        RIGHT_WEIGHTS,
        (
            "Look at the function between scores and weights.",
            "It looks at each key by itself: weights do not sum to 1.",
            "Use softmax over the last dimension.",
        ),
        "The size of the output depends on how many keys there are.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(torch.sigmoid),
        (r"sigmoid\(", r"Sigmoid\("),
    ),
    Fault(
        "weights scaled after softmax",
        "the weights are multiplied by a number after the softmax and no longer sum to 1",
        "c softmax(q k^T / sqrt(d_k)) v",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query.",
            "The softmax is right, and its weights are then multiplied or divided once more.",
            "Use the weights as the softmax gives them.",
        ),
        "The output is too large or too small by one factor, which may depend on the length or on the heads.",
        "weights = scores.softmax(dim=-1)  # and nothing after it",
        "drop",
        (
            _weights_times(lambda state: state.head_dim**-0.5),
            _weights_times(lambda state: 1 / state.p.shape[-1]),
            _weights_times(lambda state: 1 / state.num_heads),
            _weights_times(lambda state: state.head_dim**0.5),
            _weights_times(lambda state: 1 / state.head_dim),
            _weights_times(lambda state: 0.5),
            _weights_times(lambda state: 2.0),
            _weights_times(lambda state: state.p.shape[-1] ** -0.5),
            _weights_times(lambda state: float(state.num_heads)),
            _weights_times(lambda state: float(state.p.shape[-1])),
        ),
        (r"softmax\(.*\)\s*[/*]", r"(att\w*|w\w*|p\w*)\s*=\s*(att\w*|w\w*|p\w*)\s*[/*]", DIVIDED),
    ),
    Fault(
        "exp without sum",
        "the exponentials are not divided by their sum",
        "exp(scores) v",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query.",
            "The second half of a softmax is missing.",
            "Divide by the sum over the keys, or use softmax.",
        ),
        "Outputs grow without bound, and overflow with larger scores.",
        REPAIR_WEIGHTS,
        "softmax",
        (
            *_weights(torch.exp),
            *_weights(lambda s: torch.exp(s - s.amax(-1, keepdim=True))),
        ),
        (r"\bexp\(",),
    ),
    Fault(
        "no softmax",
        "the scores are used as weights: there is no softmax",
        "(q k^T / sqrt(d_k)) v",
        RIGHT_WEIGHTS,
        (
            "Look at what the values are multiplied with.",
            "Some weights are negative, and they do not sum to 1.",
            "Put a softmax over the last dimension between scores and values.",
        ),
        "This is linear attention without its care: weights are not shares, and masks cannot work.",
        REPAIR_WEIGHTS,
        "softmax",
        (*_weights(lambda s: s), _filled(0.0, lambda s: s)),
        (r"(@|matmul|bmm)\(?.*\bv", r"einsum"),
    ),
    Fault(
        "divide by sum",
        "the scores are divided by their sum, without the exponential",
        "(scores / scores.sum(-1)) v",
        RIGHT_WEIGHTS,
        (
            "Look at how the weights come to sum to 1.",
            "Scores may be negative; their sum may be 0.",
            "Use softmax, which takes the exponential first.",
        ),
        "Weights can be negative or enormous: the sum is often near 0.",
        REPAIR_WEIGHTS,
        "softmax",
        (*_weights(_over_sum), _filled(0.0, _over_sum)),
        (r"/.*\.sum\(", r"\.sum\("),
    ),
    Fault(
        "divided by another row's sum",
        "in the softmax by hand each weight is divided by another query's sum: keepdim is missing",
        "e[i, j] / sum over k of e[j, k], or with the maximum of row j in place of i",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query over the keys.",
            "A sum without keepdim=True is a row: it is laid along the keys, not along the queries.",
            "Keep the summed dimension: e.sum(dim=-1, keepdim=True), and the same for the maximum.",
        ),
        "It runs because there are as many queries as keys: what a query gets depends on what others ask.",
        "weights = e / e.sum(dim=-1, keepdim=True)",
        "softmax",
        (
            *_weights(functools.partial(_across, of_max="none", of_sum="other")),
            *_weights(functools.partial(_across, of_max="own", of_sum="other")),
            *_weights(functools.partial(_across, of_max="other", of_sum="own")),
            *_weights(functools.partial(_across, of_max="other", of_sum="other")),
        ),
        (r"/.*\.sum\((?!.*keepdim)", r"\.sum\((?!.*keepdim)", r"\.(a?max)\((?!.*keepdim)", r"\.sum\("),
    ),
    Fault(
        "log softmax",
        "log_softmax stands in place of softmax",
        "log_softmax(scores) v",
        RIGHT_WEIGHTS,
        (
            "Look at the function between scores and weights.",
            "All weights are negative.",
            "Use softmax, not its logarithm.",
        ),
        "The largest weight goes to the least important key, with a minus sign.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(lambda s: torch.log_softmax(s, -1)),
        (r"log_softmax\(", r"LogSoftmax\("),
    ),
    Fault(
        "softmax overflows",
        "the softmax overflows: the largest score is not subtracted before exp",
        "exp(scores) / exp(scores).sum(-1)",
        "exp(scores - max) / exp(scores - max).sum(-1), which is the same and never overflows",
        (
            "Multiply the input by 1000 and look at the output.",
            "exp of 89 is more than float32 can hold: inf / inf is NaN.",
            "Subtract each row's largest score before exp, or use torch.softmax.",
        ),
        "It works until scores grow, and then training ends in NaN.",
        REPAIR_WEIGHTS,
        lines=(r"\bexp\(", *SOFTMAX),
    ),
]  # fmt: skip
