"""Faults between queries and keys and the weights: the product, its scale, and the softmax."""

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
    "If the divisor is too large, all scores are nearly equal: every key gets about the same weight, "
    "and the head returns an average of all values."
)
WHY_LARGE = (
    "Products of q and k grow with d_k. If they are not scaled down, the softmax saturates: one key "
    "gets nearly all the weight, and the gradient is close to 0."
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
    """Multiply all weights by a number after the softmax."""

    def apply(state: State) -> None:
        state.p = state.p * factor(state)

    return {"drop": apply}


def _scored(function: Callable[[State], Tensor]) -> Way:
    def apply(state: State) -> None:
        state.scores = function(state)

    return {"score": apply}


def _transposed(state: State) -> Tensor:
    if state.q.shape[-2] != state.k.shape[-2]:
        raise ValueError("transposed scores need as many queries as keys")
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
            "Look at the code between the product of q and k and the softmax.",
            "The scores are too large: the step that keeps their size independent of d_k is missing.",
            "Divide the scores by sqrt(d_k), where d_k is the number of channels of one head.",
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
            "A score is a sum over the channels of one head. How many channels has one head?",
            "Take the square root of d_k = d_model / num_heads.",
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
            "The standard deviation of a sum of d_k products grows with sqrt(d_k), not with d_k.",
            "Divide by the square root of d_k.",
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
            "Check the sign of the exponent, or whether the line uses * or /.",
            "The scale should make the scores smaller, not larger.",
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
            "The size of a score depends on the number of channels of a head, not on the number of heads.",
            "Use the square root of d_k, the number of channels of one head, instead of num_heads.",
        ),
        "The scale does not depend on d_k: it is correct only if num_heads happens to equal d_k.",
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
            "Print the number the scores are divided by for two sequence lengths.",
            "A score is a sum over channels, not over positions.",
            "Use the square root of d_k, the last dimension of q after the split into heads.",
        ),
        "The same sentence gets different weights in a longer batch, so its result depends on the padding.",
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
        "the weights are divided by sqrt(d_k), or multiplied with it, and the scores are not divided",
        "softmax(q k^T) / sqrt(d_k) v",
        RIGHT,
        (
            "Sum the weights of one query over the keys.",
            "The scale is applied after the softmax, where it only makes all weights smaller.",
            "Divide the scores, before the softmax.",
        ),
        "The weights sum to 1 / sqrt(d_k) instead of 1, and the softmax of the unscaled scores saturates.",
        REPAIR,
        "drop",
        (
            {"scale": _unscaled, "drop": _shrunk},
            {"scale": _unscaled, **_weights_times(lambda state: state.head_dim**0.5)},
            {"scale": _unscaled, **_weights_times(lambda state: _width(state) ** -0.5)},
            {"scale": _unscaled, **_weights_times(lambda state: 1 / state.head_dim)},
        ),
        (r"softmax\(.*\)\s*/", r"softmax\(.*\)\s*\*", DIVIDED),
    ),
    Fault(
        "half in place of the root",
        "an exponent is written 1/2 without brackets: d_k is halved, and no square root is taken",
        "softmax(q k^T / (d_k / 2)) v",
        RIGHT,
        (
            "Print the number the scores are divided by, or multiplied with.",
            "** binds more strongly than /: d_k ** 1/2 is (d_k ** 1) / 2.",
            "Write d_k ** 0.5, or math.sqrt(d_k).",
        ),
        "The scale is proportional to d_k or to 1 / d_k, so the softmax is too sharp or too flat.",
        REPAIR,
        "scale",
        (
            *_scaled(lambda state: 2 / state.head_dim),
            *_scaled(lambda state: state.head_dim / 2),
            *_scaled(lambda state: 1 / (2 * state.head_dim)),
            *_scaled(lambda state: 2 / _width(state)),
            *_scaled(lambda state: _width(state) / 2),
            *_scaled(lambda state: 1 / (2 * _width(state))),
        ),
        (r"\*\*\s*\(?-?\s*1(\.0?)?\s*/\s*2", r"\*\*", DIVIDED),
    ),
    Fault(
        "constant scale",
        "scores are multiplied by a fixed number that is not 1 / sqrt(d_k)",
        "softmax(c q k^T) v",
        RIGHT,
        (
            "Look at the number the scores are multiplied by.",
            "It is a constant and does not depend on the number of channels of a head.",
            "Compute the factor from d_k: 1 / sqrt(d_k).",
        ),
        "A constant is correct for one value of d_k at most; for all others the softmax is too sharp or "
        "too flat.",
        REPAIR,
        "scale",
        fit=_constant,
        lines=(r"scale\s*=\s*[\d.]", r"[*/]\s*\d", DIVIDED),
    ),
    Fault(
        "scores of sums",
        "the einsum uses two letters for the channels: it multiplies sums over channels instead of "
        "summing products",
        "sum(q) * sum(k)",
        "q.k, channel by channel",
        (
            "In the einsum of q and k, which letter is the channel axis of q, and which that of k?",
            "A letter that appears in one input only is summed within that input, before the product.",
            "Use the same letter for the channels of both: bqhd,bkhd->bhqk.",
        ),
        "Each query and each key is reduced to one number, so a score does not depend on their directions.",
        'scores = torch.einsum("bhqd,bhkd->bhqk", q, k)',
        "score",
        (_scored(lambda state: state.q.sum(-1, keepdim=True) * state.k.sum(-1).unsqueeze(-2)),),
        EINSUM,
    ),
    Fault(
        "normalised over another axis",
        "queries and keys are normalised over the heads or the positions instead of the channels of a head",
        "q / |q|, with the length taken over heads or positions",
        "q / |q|, with the length taken over the d_k channels of each head",
        (
            "Print the length of q[0, 0, 0], the query of one head at one position, after the normalisation.",
            "It is not 1: the sum of squares runs over another axis.",
            "Normalise over the last axis of [B, H, T, D], dim=-1.",
        ),
        "The scores are no cosines, and a head depends on the other heads, or a position on later ones.",
        "q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)",
        lines=(r"normalize\(", r"norm\(", r"rsqrt\("),
    ),
    Fault(
        "scores mixed over heads",
        "the einsum uses two letters for the heads: each query is compared with the sum of the keys of "
        "all heads",
        "q_h . (k_1 + .. + k_H)",
        "q_h . k_h",
        (
            "In the einsum of q and k, which letter is the head axis of q, and which that of k?",
            "A letter that appears in one input only is summed within that input, before the product.",
            "Use the same letter for the heads of both: bqhd,bkhd->bhqk.",
        ),
        "All heads use the same summed keys (or queries), so they are not independent of each other.",
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
        "the scores are transposed: rows are keys and columns are queries",
        "softmax(k q^T / sqrt(d_k)) v",
        RIGHT,
        (
            "Which axis of the scores belongs to the queries, and which to the keys?",
            "Each row of the scores belongs to a key, so the softmax over the last axis runs over queries.",
            "Compute q @ k.transpose(-2, -1), or an einsum that ends in ->bhqk, where q stands for queries.",
        ),
        "Keys take the place of queries: a mask hides queries instead of keys, and the code raises an "
        "exception if the numbers of queries and keys differ.",
        REPAIR,
        "score",
        (_scored(_transposed),),
        (rf"=.*{PRODUCT}", r"einsum\("),
    ),
]


RIGHT_WEIGHTS = "softmax over the keys: the weights of each query sum to 1"
REPAIR_WEIGHTS = "weights = torch.softmax(scores, dim=-1)"


def _weights(function: Callable[[Tensor], Tensor]) -> tuple[Way, ...]:
    def apply(state: State) -> None:
        state.p = function(state.hidden)

    return ({"softmax": apply},)


def _filled(number: float, function: Callable[[Tensor], Tensor]) -> Way:
    """Fill the scores of hidden keys with a number before the function.

    Without an exponential 0 hides them, and if all keys along an axis are at -1e9, they share the weight.
    """
    return {**filled(number), **_weights(function)[0]}


def _heads_and_keys(s: Tensor) -> Tensor:
    B, H, T, S = s.shape
    together = s.transpose(1, 2).flatten(2)  # [B, T, H S]
    return torch.softmax(together, -1).view(B, T, H, S).transpose(1, 2)


def _divided_by_sum(s: Tensor) -> Tensor:
    s = s.masked_fill(torch.isneginf(s), 0.0)
    return s / s.sum(-1, keepdim=True)


def _wrongly_normalised(s: Tensor, of_max: str, of_sum: str) -> Tensor:
    """Return exp(s - max) / sum with the maximum or the sum of row j in column j, as without keepdim."""
    if s.shape[-2] != s.shape[-1]:
        raise ValueError("rows and columns must have one length to broadcast")
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
            "Print weights.sum(dim) for each dimension of the weights. For which dim are all sums 1?",
            f"{sums} sum to 1, but the weights of one query over the keys should.",
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
        "softmax over queries", -2, "the queries", "The columns (one for each key)",
        "The weights of one query do not sum to 1, and they depend on the other queries. With a causal "
        "mask, the output of a token depends on later tokens.",
        common=True,
    ),
    _axis(
        "softmax over heads", 1, "the heads", "The weights of all heads for one query and key",
        "The weights of one head depend on the other heads, and no head's weights sum to 1.",
    ),
    _axis(
        "softmax over batch", 0, "the batch", "The weights of all samples for one query and key",
        "The output of one sentence depends on the other sentences in the batch.",
    ),
    Fault(
        "softmax over heads and keys",
        "the softmax runs over heads and keys together",
        "softmax over the H * S scores of one query",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one head and one query.",
            "The weights of one head do not sum to 1; those of all heads together do.",
            "Keep the heads as a separate dimension: softmax over the last dimension of [B, H, T, S].",
        ),
        "A head with larger scores takes weight away from the other heads.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(_heads_and_keys),
        (r"flatten\(.*softmax", r"(view|reshape)\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "softmax over the whole map",
        "the softmax runs over queries and keys together",
        "softmax over the T * S scores of one head",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query over the keys.",
            "The weights of one query do not sum to 1; those of all queries of a head together do.",
            "Do not flatten the scores before the softmax; use dim=-1.",
        ),
        "The outputs become smaller as the sequence grows, and the weights of one query depend on the "
        "others.",
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
            "Count how many times softmax is applied to the scores.",
            "Softmax is applied to weights that are already normalised.",
            "Remove one of the two softmax calls.",
        ),
        "The second softmax gets numbers between 0 and 1 and makes them nearly equal; hidden keys get "
        "weight again.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(lambda s: torch.softmax(torch.softmax(s, -1), -1)),
        (r"softmax\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "sigmoid",
        "a sigmoid is used instead of the softmax",
        "sigmoid(scores) v",
        RIGHT_WEIGHTS,
        (
            "Look at the function between scores and weights.",
            "A sigmoid computes each weight separately: the weights of a query do not sum to 1.",
            "Use softmax over the last dimension.",
        ),
        "The size of the output depends on the number of keys.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(torch.sigmoid),
        (r"sigmoid\(", r"Sigmoid\("),
    ),
    Fault(
        "weights scaled after softmax",
        "the weights are multiplied by a number after the softmax, so they do not sum to 1",
        "c softmax(q k^T / sqrt(d_k)) v",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query over the keys.",
            "The softmax is correct, but its result is multiplied or divided by a number.",
            "Remove that multiplication or division: use the result of the softmax as it is.",
        ),
        "The output is too large or too small by a factor, which may depend on the length or the number "
        "of heads.",
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
        "the exponentials of the scores are not divided by their sum",
        "exp(scores) v",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query over the keys.",
            "A softmax divides the exponentials by their sum; that division is missing.",
            "Divide by the sum over the keys, or use softmax.",
        ),
        "The outputs have no upper bound and overflow for large scores.",
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
            "Look at what the values are multiplied by.",
            "Some weights are negative, and they do not sum to 1.",
            "Put a softmax over the last dimension between scores and values.",
        ),
        "The weights can be negative and do not sum to 1, and a score of -inf for a hidden key gives NaN.",
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
            "Look at how the scores are normalised.",
            "Scores can be negative, and their sum can be close to 0.",
            "Use softmax, which takes exponentials before it divides by the sum.",
        ),
        "The weights can be negative or very large, because the sum is often close to 0.",
        REPAIR_WEIGHTS,
        "softmax",
        (*_weights(_divided_by_sum), _filled(0.0, _divided_by_sum)),
        (r"/.*\.sum\(", r"\.sum\("),
    ),
    Fault(
        "divided by another row's sum",
        "in the hand-written softmax, keepdim=True is missing: each weight is divided by the sum of "
        "another query",
        "e[i, j] / sum over k of e[j, k], or with the maximum of row j in place of i",
        RIGHT_WEIGHTS,
        (
            "Sum the weights of one query over the keys.",
            "A sum without keepdim=True loses the last dimension, and broadcasting lines it up with the "
            "keys instead of the queries.",
            "Keep the dimension: e.sum(dim=-1, keepdim=True), and the same for the maximum.",
        ),
        "It runs only if there are as many queries as keys, and the weights of a query depend on the "
        "other queries.",
        "weights = e / e.sum(dim=-1, keepdim=True)",
        "softmax",
        (
            *_weights(functools.partial(_wrongly_normalised, of_max="none", of_sum="other")),
            *_weights(functools.partial(_wrongly_normalised, of_max="own", of_sum="other")),
            *_weights(functools.partial(_wrongly_normalised, of_max="other", of_sum="own")),
            *_weights(functools.partial(_wrongly_normalised, of_max="other", of_sum="other")),
        ),
        (r"/.*\.sum\((?!.*keepdim)", r"\.sum\((?!.*keepdim)", r"\.(a?max)\((?!.*keepdim)", r"\.sum\("),
    ),
    Fault(
        "log softmax",
        "log_softmax is used instead of softmax",
        "log_softmax(scores) v",
        RIGHT_WEIGHTS,
        (
            "Look at the function between scores and weights.",
            "All weights are negative.",
            "Use softmax instead of log_softmax.",
        ),
        "All weights are negative, and the least important key gets the largest one in absolute value.",
        REPAIR_WEIGHTS,
        "softmax",
        _weights(lambda s: torch.log_softmax(s, -1)),
        (r"log_softmax\(", r"LogSoftmax\("),
    ),
    Fault(
        "softmax overflows",
        "large scores give NaN: the maximum of each row is not subtracted before exp",
        "exp(scores - c) / exp(scores - c).sum(-1), where c is 0 or one number for all rows",
        "exp(scores - m) / exp(scores - m).sum(-1), where m is the maximum of each row",
        (
            "Multiply the input by 1000 and look at the output.",
            "exp(89) is too large for float32 and becomes inf, and inf / inf is NaN. If one maximum is "
            "subtracted from all rows, a row far below it becomes 0 / 0, which is NaN, too.",
            "Subtract the maximum of each row before exp, or use torch.softmax.",
        ),
        "It works while scores are small; once they grow during training, the loss becomes NaN.",
        REPAIR_WEIGHTS,
        lines=(r"\bexp\(", *SOFTMAX),
    ),
]  # fmt: skip
