"""From weights to the output: mixing values, the last projection, and what some add after it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from ..recipe import RIGHT as RIGHT_STEPS
from ..recipe import State
from .fault import Fault, Way

RIGHT = "output = W_o concat(heads) + b_o"
REPAIR = "return self.W_o(out)"
EINSUM = (r"einsum\(.*(v|V|value)", r"einsum\(")
LINES = (r"return\b", r"(W_o|w_o|out_proj|fc_out|c_proj|proj|fc|unify)\w*\(")


def _output(function: Callable[[State], Tensor]) -> Way:
    def apply(state: State) -> None:
        state.output = function(state)

    return {"finish": apply}


def _afterwards(function: Callable[[State], Tensor]) -> Way:
    def apply(state: State) -> None:
        state.output = function(state)

    return {"after": apply}


def _last(x: Tensor, state: State) -> Tensor:
    return x @ state.weights.o.T + state.weights.o_bias


def _turned_weights(state: State) -> None:
    if state.p.shape[-1] != state.p.shape[-2]:
        raise ValueError("turned weights need as many queries as keys")
    state.heads = state.p.transpose(-2, -1) @ state.v


def _summed_values(state: State) -> None:
    state.heads = state.p.sum(-1, keepdim=True) * state.v.sum(-2, keepdim=True)


def _mixed_values(state: State) -> None:
    state.heads = state.p @ state.v.sum(1, keepdim=True)


def _relu_projected(state: State) -> None:
    RIGHT_STEPS["project"](state)
    q, k, v = state.projected
    state.projected = torch.relu(q), torch.relu(k), torch.relu(v)


def _norm(x: Tensor, eps: float) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=eps)


def _pre_norm(eps: float, which: int) -> Callable[[State], None]:
    def apply(state: State) -> None:
        given = state.inputs[:3]
        state.query, state.key, state.value = (_norm(x, eps) if i < which else x for i, x in enumerate(given))

    return apply


def _add(state: State) -> None:
    state.output = state.output + state.inputs.query


def _sublayer(eps: float) -> tuple[Way, ...]:
    """The norm after the sum, before the attention of its queries, of all its inputs."""
    return (
        _afterwards(lambda state: _norm(state.output + state.inputs.query, eps)),
        {"inputs": _pre_norm(eps, 1), "after": _add},
        {"inputs": _pre_norm(eps, 3), "after": _add},
    )


EPS = (1e-5, 1e-6, 1e-12)
FAULTS = [
    Fault(
        "no output projection",
        "the output projection is missing",
        "concat(heads)",
        RIGHT,
        (
            "Look at what happens to the heads once they are side by side.",
            "The last matrix has no influence on the result.",
            "Return W_o of the joined heads.",
        ),
        "Heads never meet: each keeps to its own channels, and nothing mixes what they found.",
        REPAIR, "finish",
        (_output(lambda state: state.joined), _output(lambda state: state.joined + state.weights.o_bias)),
        LINES, common=True,
    ),
    Fault(
        "output projection twice",
        "the output projection is applied twice",
        "W_o(W_o(concat(heads)))",
        RIGHT,
        (
            "Count the matrices after the heads are joined.",
            "The last projection is called twice.",
            "Call it once.",
        ),
        "Weights of any other implementation give nonsense.",
        REPAIR, "finish", (_output(lambda state: _last(_last(state.joined, state), state)),), LINES,
    ),
    Fault(
        "no out bias used",
        "the bias of the output projection is not used",
        "W_o concat(heads)",
        RIGHT,
        (
            "Which parameters never get a gradient?",
            "The last bias does nothing.",
            "Call the layer instead of multiplying with its weight.",
        ),
        "A model trained elsewhere loses a part of itself when its weights are loaded.",
        REPAIR, "finish", (_output(lambda state: state.joined @ state.weights.o.T),), LINES,
    ),
    Fault(
        "output weight not transposed",
        "the output weight, kept as [out, in], is used without its transpose",
        "concat(heads) @ W_o",
        "concat(heads) @ W_o.T",
        (
            "How does nn.Linear keep its weight, and what does it do with it?",
            "The last matrix is used the other way round; it only fits because it is square.",
            "Use F.linear(x, W), or x @ W.T.",
        ),
        "Weights of any other implementation give nonsense.",
        REPAIR, "finish",
        (_output(lambda state: state.joined @ state.weights.o + state.weights.o_bias),),
        (r"@\s*self\.\w*(out|o)\w*", *LINES),
    ),
    Fault(
        "values summed over positions",
        "two letters stand for the keys: the values are summed up, whatever the weights say",
        "sum of all v, the same for every query",
        "weights v",
        (
            "Read the letters of the product of weights and values: which is the axis of keys in both?",
            "A letter that only one of two tensors has is summed by itself, before anything is multiplied.",
            "Use one letter for the keys: bhqk,bkhd->bqhd.",
        ),
        "Weights of a query sum to 1, so all that is left is the sum of the values: no attention at all.",
        'out = torch.einsum("bhqk,bhkd->bhqd", weights, v)', "weigh", ({"weigh": _summed_values},),
        EINSUM,
    ),
    Fault(
        "values mixed over heads",
        "two letters stand for the heads: every head gets the values of all",
        "weights_h (v_1 + .. + v_H)",
        "weights_h v_h",
        (
            "Read the letters of the product of weights and values: which is the axis of heads in both?",
            "A letter that only one of two tensors has is summed by itself, before anything is multiplied.",
            "Use one letter for the heads: bhqk,bkhd->bqhd.",
        ),
        "Heads look at different places and bring back the same mixture.",
        'out = torch.einsum("bhqk,bhkd->bhqd", weights, v)', "weigh", ({"weigh": _mixed_values},),
        EINSUM,
    ),
    Fault(
        "second output projection",
        "a second matrix follows the output projection",
        "W_2(W_o concat(heads) + b_o) + b_2",
        RIGHT,
        (
            "Count the matrices after the heads are joined.",
            "nn.MultiheadAttention has an output projection of its own; another one follows.",
            "Take out the second: what the module returns is the output already.",
        ),
        "Two matrices in a row are one, with twice the parameters; nobody else's weights fit.",
        "return self.attention(query, key, value)[0]",
        lines=(r"return self\.\w+\(", r"=\s*self\.\w*(o|out|proj|fc)\w*\(", *LINES),
    ),
    Fault(
        "weights transposed before v",
        "the weights are transposed before they meet the values",
        "weights^T v",
        "weights v",
        (
            "Look at the product of weights and values.",
            "A query gets what keys gave away, not what it asked for.",
            "Multiply the weights as they are, [T, S], with v [S, d_k].",
        ),
        "Rows of what is multiplied no longer sum to 1, and a mask hides queries instead of keys.",
        "out = weights @ v", "weigh", ({"weigh": _turned_weights},),
        (r"(weights?|attn\w*|probs?|p|w|a)\.(transpose|mT|permute)", r"(@|matmul|bmm)\(?.*\bv", r"einsum"),
    ),
    Fault(
        "relu added",
        "there is a ReLU that does not belong there",
        "relu(..)",
        RIGHT,
        (
            "Look for an activation function other than the softmax.",
            "Some numbers are never negative.",
            "Take the ReLU out: multi-head attention has none.",
        ),
        "Half of every vector is cut away, and weights of any other implementation give nonsense.",
        REPAIR, "after",
        (_afterwards(lambda state: torch.relu(state.output)),),
        (r"relu\(", r"ReLU\("),
    ),
    Fault(
        "relu on projections",
        "there is a ReLU on q, k and v",
        "relu(W_q query), relu(W_k key), relu(W_v value)",
        RIGHT,
        (
            "Look for an activation function other than the softmax.",
            "Some numbers are never negative.",
            "Take the ReLU out: multi-head attention has none.",
        ),
        "Half of every vector is cut away, and weights of any other implementation give nonsense.",
        REPAIR, "project",
        ({"project": _relu_projected},),
        (r"relu\(", r"ReLU\("),
    ),
    Fault(
        "residual added",
        "the input is added to the output",
        "query + attention",
        RIGHT,
        (
            "Subtract the input from your output and look again.",
            "A residual connection is inside the module.",
            "Leave the addition to the layer around it.",
        ),
        "Whoever adds a residual around this module adds it twice.",
        REPAIR, "after",
        (_afterwards(lambda state: state.output + state.inputs.query),),
        (r"\+=?\s*(residual|query|x|q|identity|shortcut|inputs?)\b", r"return .*\+", *LINES),
    ),
    Fault(
        "layer norm added",
        "there is a LayerNorm inside",
        "LayerNorm(attention)",
        RIGHT,
        (
            "Look at the mean and spread of each row of the output.",
            "Every row has mean 0 and spread 1.",
            "Leave the norm to the layer around it.",
        ),
        "Whoever puts a norm around this module normalises twice.",
        REPAIR, "after",
        tuple(_afterwards(lambda state, eps=eps: _norm(state.output, eps)) for eps in EPS),  # type: ignore[misc]
        (r"(layer_?norm|norm|ln)\w*\(", *LINES),
    ),
    Fault(
        "layer norm before",
        "the inputs go through a LayerNorm first",
        "attention(LayerNorm(query), ..)",
        RIGHT,
        (
            "Multiply the input by 2 and see whether the output moves.",
            "The size of the input has no influence: it is normalised first.",
            "Leave the norm to the layer around it.",
        ),
        "It is a design, not a mistake, as long as nobody puts a second norm before it.",
        REPAIR, "inputs",
        tuple({"inputs": _pre_norm(eps, which)} for eps in EPS for which in (3, 1)),
        (r"(layer_?norm|norm|ln)\w*\(", *LINES),
        design="a LayerNorm of the input",
    ),
    Fault(
        "residual and layer norm",
        "there is a residual connection and a LayerNorm inside: a whole sub-layer",
        "LayerNorm(query + attention), or query + attention(LayerNorm(..))",
        RIGHT,
        (
            "Compare what the module returns with the attention in it.",
            "A residual connection and a norm are inside the module.",
            "Leave both to the layer around it, if that is where you want them.",
        ),
        "It is a design, not a mistake, as long as nobody adds them a second time.",
        REPAIR, "after",
        tuple(way for eps in EPS for way in _sublayer(eps)),
        (r"(layer_?norm|norm|ln)\w*\(", *LINES),
        design="a residual connection and a LayerNorm",
    ),
]  # fmt: skip
