"""From scores to weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import State
from .fault import Fault, Way
from .masking import filled

RIGHT = "softmax over the keys: every query's weights sum to 1"
REPAIR = "weights = torch.softmax(scores, dim=-1)"


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
        RIGHT,
        (
            "Look at what the weights sum to, and along which dimension.",
            f"{sums} sum to 1; the weights of one query should.",
            "The keys are the last dimension of the scores: dim=-1.",
        ),
        extra,
        REPAIR,
        "softmax",
        (*_weights(lambda s: torch.softmax(s, axis)), _filled(-1e9, lambda s: torch.softmax(s, axis))),
        (rf"softmax\(.*dim\s*=\s*\(?{axis}", rf"softmax\([^)]*,\s*{axis}\s*\)", *SOFTMAX),
        common=common,
        mixes_samples=axis == 0,
    )


FAULTS = [
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
        RIGHT,
        (
            "Sum the weights of one head and one query.",
            "Only all heads together sum to 1.",
            "Keep the dimension of heads apart: softmax over the last dimension of [B, H, T, S].",
        ),
        "A head with larger scores takes the weight of the others.",
        REPAIR,
        "softmax",
        _weights(_heads_and_keys),
        (r"flatten\(.*softmax", r"(view|reshape)\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "softmax over the whole map",
        "the softmax runs over queries and keys together",
        "softmax over the T * S numbers of one head",
        RIGHT,
        (
            "Sum the weights of one query.",
            "Only the whole map of a head sums to 1.",
            "Do not flatten the scores before the softmax; use dim=-1.",
        ),
        "Outputs shrink with the length, and queries compete with each other.",
        REPAIR,
        "softmax",
        _weights(lambda s: torch.softmax(s.flatten(2), -1).view(s.shape)),
        (r"flatten\(.*softmax", r"(view|reshape)\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "softmax twice",
        "the softmax is taken twice",
        "softmax(softmax(scores))",
        RIGHT,
        (
            "Count how often the scores are normalised.",
            "Weights are turned into weights once more.",
            "Take one of the two softmaxes out.",
        ),
        "The second sees numbers between 0 and 1 and makes them nearly equal; hidden keys get weight again.",
        REPAIR,
        "softmax",
        _weights(lambda s: torch.softmax(torch.softmax(s, -1), -1)),
        (r"softmax\(.*softmax", *SOFTMAX),
    ),
    Fault(
        "sigmoid",
        "a sigmoid stands in place of the softmax",
        "sigmoid(scores) v",
        RIGHT,
        (
            "Look at the function between scores and weights.",
            "It looks at each key by itself: weights do not sum to 1.",
            "Use softmax over the last dimension.",
        ),
        "The size of the output depends on how many keys there are.",
        REPAIR,
        "softmax",
        _weights(torch.sigmoid),
        (r"sigmoid\(", r"Sigmoid\("),
    ),
    Fault(
        "exp without sum",
        "the exponentials are not divided by their sum",
        "exp(scores) v",
        RIGHT,
        (
            "Sum the weights of one query.",
            "The second half of a softmax is missing.",
            "Divide by the sum over the keys, or use softmax.",
        ),
        "Outputs grow without bound, and overflow with larger scores.",
        REPAIR,
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
        RIGHT,
        (
            "Look at what the values are multiplied with.",
            "Some weights are negative, and they do not sum to 1.",
            "Put a softmax over the last dimension between scores and values.",
        ),
        "This is linear attention without its care: weights are not shares, and masks cannot work.",
        REPAIR,
        "softmax",
        (*_weights(lambda s: s), _filled(0.0, lambda s: s)),
        (r"(@|matmul|bmm)\(?.*\bv", r"einsum"),
    ),
    Fault(
        "divide by sum",
        "the scores are divided by their sum, without the exponential",
        "(scores / scores.sum(-1)) v",
        RIGHT,
        (
            "Look at how the weights come to sum to 1.",
            "Scores may be negative; their sum may be 0.",
            "Use softmax, which takes the exponential first.",
        ),
        "Weights can be negative or enormous: the sum is often near 0.",
        REPAIR,
        "softmax",
        (*_weights(_over_sum), _filled(0.0, _over_sum)),
        (r"/.*\.sum\(", r"\.sum\("),
    ),
    Fault(
        "divided by another row's sum",
        "in the softmax by hand each weight is divided by another query's sum: keepdim is missing",
        "e[i, j] / sum over k of e[j, k], or with the maximum of row j in place of i",
        RIGHT,
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
        RIGHT,
        (
            "Look at the function between scores and weights.",
            "All weights are negative.",
            "Use softmax, not its logarithm.",
        ),
        "The largest weight goes to the least important key, with a minus sign.",
        REPAIR,
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
        REPAIR,
        lines=(r"\bexp\(", *SOFTMAX),
    ),
]  # fmt: skip
