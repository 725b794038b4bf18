"""Faults between the weights and the output: the product with the values and the output projection."""

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


def _transposed_weights(state: State) -> None:
    if state.p.shape[-1] != state.p.shape[-2]:
        raise ValueError("transposed weights need as many queries as keys")
    state.heads = state.p.transpose(-2, -1) @ state.v


def _summed_values(state: State) -> None:
    state.heads = state.p.sum(-1, keepdim=True) * state.v.sum(-2, keepdim=True)


def _own_value(state: State) -> None:
    if state.p.shape[-1] != state.p.shape[-2]:
        raise ValueError("one value per query needs as many queries as keys")
    state.heads = state.p.sum(-1, keepdim=True) * state.v


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
        inputs = state.inputs[:3]
        state.query, state.key, state.value = (
            _norm(x, eps) if i < which else x for i, x in enumerate(inputs)
        )

    return apply


def _add(state: State) -> None:
    state.output = state.output + state.inputs.query


def _sublayer(eps: float) -> tuple[Way, ...]:
    """Return a sublayer with the norm after the sum, of the queries only, and of all inputs."""
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
            "Look at what happens to the heads after they are concatenated.",
            "The output projection W_o has no effect on the output.",
            "Apply W_o to the concatenated heads.",
        ),
        "Each head writes to its own channels of the output, and the results of different heads are not "
        "combined.",
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
            "Count the projections after the heads are concatenated.",
            "The output projection is called twice.",
            "Call the output projection once.",
        ),
        "Weights of any other implementation give wrong results.",
        REPAIR, "finish", (_output(lambda state: _last(_last(state.joined, state), state)),), LINES,
    ),
    Fault(
        "no out bias used",
        "the bias of the output projection is not used",
        "W_o concat(heads)",
        RIGHT,
        (
            "Call backward. Which parameters have no gradient?",
            "The bias of the output projection has no effect.",
            "Add the bias, or call the layer instead of multiplying by its weight.",
        ),
        "Weights that were trained with another implementation give different results.",
        REPAIR, "finish", (_output(lambda state: state.joined @ state.weights.o.T),), LINES,
    ),
    Fault(
        "output weight not transposed",
        "the output weight, of shape [out, in], is used without its transpose",
        "concat(heads) @ W_o",
        "concat(heads) @ W_o.T",
        (
            "What is the shape of the weight of nn.Linear, and which product does it compute?",
            "The matrix is used without a transpose; the shapes fit only because it is square.",
            "Use F.linear(x, W), or x @ W.T.",
        ),
        "Weights of any other implementation give wrong results.",
        REPAIR, "finish",
        (_output(lambda state: state.joined @ state.weights.o + state.weights.o_bias),),
        (r"@\s*self\.\w*(out|o)\w*", *LINES),
    ),
    Fault(
        "values summed over positions",
        "the einsum uses two letters for the keys: the values are summed without weights",
        "the sum of all v, the same for every query",
        "weights v",
        (
            "In the einsum of weights and values, which letter is the key axis of the weights, and "
            "which that of the values?",
            "A letter that appears in one input only is summed within that input, before the product.",
            "Use the same letter for the keys of both: bhqk,bkhd->bqhd.",
        ),
        "The weights of a query sum to 1, so the output is the sum of all values, whatever the weights are.",
        'out = torch.einsum("bhqk,bhkd->bhqd", weights, v)', "weigh", ({"weigh": _summed_values},),
        EINSUM,
    ),
    Fault(
        "own value only",
        "the einsum uses the letter of the queries for the values: each query gets its own value",
        "v_i, whatever the weights are",
        "sum_j weights_ij v_j",
        (
            "In the einsum of weights and values, which letter is the key axis of the weights, and "
            "which axis of the values has it?",
            "The weights are summed over the keys, which gives 1, and multiplied by the value of the query's "
            "own position.",
            "Use the letter of the keys for the values: bhqk,bkhd->bqhd.",
        ),
        "The positions do not exchange anything: the output at a position depends on that position only.",
        'out = torch.einsum("bhqk,bkhd->bqhd", weights, v)', "weigh", ({"weigh": _own_value},),
        EINSUM,
    ),
    Fault(
        "values mixed over heads",
        "the einsum uses two letters for the heads: every head gets the sum of the values of all heads",
        "weights_h (v_1 + .. + v_H)",
        "weights_h v_h",
        (
            "In the einsum of weights and values, which letter is the head axis of the weights, and "
            "which that of the values?",
            "A letter that appears in one input only is summed within that input, before the product.",
            "Use the same letter for the heads of both: bhqk,bkhd->bqhd.",
        ),
        "Heads have different weights but the same values.",
        'out = torch.einsum("bhqk,bhkd->bhqd", weights, v)', "weigh", ({"weigh": _mixed_values},),
        EINSUM,
    ),
    Fault(
        "second output projection",
        "a second matrix follows the output projection",
        "W_2(W_o concat(heads) + b_o) + b_2",
        RIGHT,
        (
            "Count the projections after the heads are concatenated.",
            "nn.MultiheadAttention already applies an output projection, and another layer follows.",
            "Remove the second projection, and return the output of nn.MultiheadAttention.",
        ),
        "Two linear layers in a row represent nothing that one cannot, and weights of other implementations "
        "cannot be loaded.",
        "return self.attention(query, key, value)[0]",
        lines=(r"return self\.\w+\(", r"=\s*self\.\w*(o|out|proj|fc)\w*\(", *LINES),
    ),
    Fault(
        "weights transposed before v",
        "the weights are transposed before they are multiplied by the values",
        "weights^T v",
        "weights v",
        (
            "Look at the product of weights and values.",
            "The output of position i is weighted by column i of the weights instead of row i.",
            "Multiply the weights [T, S] by v [S, d_k], without a transpose.",
        ),
        "The rows of the transposed weights do not sum to 1, and a mask hides queries instead of keys.",
        "out = weights @ v", "weigh", ({"weigh": _transposed_weights},),
        (r"(weights?|attn\w*|probs?|p|w|a)\.(transpose|mT|permute)", r"(@|matmul|bmm)\(?.*\bv", r"einsum"),
    ),
    Fault(
        "relu added",
        "a ReLU is applied to the output",
        "relu(..)",
        RIGHT,
        (
            "Look for an activation function other than the softmax.",
            "Some values that should be negative are 0.",
            "Remove the ReLU: multi-head attention has none.",
        ),
        "All negative values are lost, and parameters of any other implementation give wrong results.",
        REPAIR, "after",
        (_afterwards(lambda state: torch.relu(state.output)),),
        (r"relu\(", r"ReLU\("),
    ),
    Fault(
        "relu on projections",
        "a ReLU is applied to q, k and v",
        "relu(W_q query), relu(W_k key), relu(W_v value)",
        RIGHT,
        (
            "Look for an activation function other than the softmax.",
            "Some values that should be negative are 0.",
            "Remove the ReLU: multi-head attention has none.",
        ),
        "All negative values are lost, and parameters of any other implementation give wrong results.",
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
            "Subtract the input from your output, and compare again.",
            "The module contains a residual connection.",
            "Remove the addition: it belongs to the layer that contains this module.",
        ),
        "A layer that adds the residual connection itself adds it twice.",
        REPAIR, "after",
        (_afterwards(lambda state: state.output + state.inputs.query),),
        (r"\+=?\s*(residual|query|x|q|identity|shortcut|inputs?)\b", r"return .*\+", *LINES),
    ),
    Fault(
        "layer norm added",
        "a LayerNorm is applied to the output",
        "LayerNorm(attention)",
        RIGHT,
        (
            "Look at the mean and the standard deviation of each row of the output.",
            "Every row has mean 0 and standard deviation 1.",
            "Remove the LayerNorm: it belongs to the layer that contains this module.",
        ),
        "A layer that normalises the output itself normalises twice.",
        REPAIR, "after",
        tuple(_afterwards(lambda state, eps=eps: _norm(state.output, eps)) for eps in EPS),  # type: ignore[misc]
        (r"(layer_?norm|norm|ln)\w*\(", *LINES),
    ),
    Fault(
        "layer norm before",
        "a LayerNorm is applied to the inputs",
        "attention(LayerNorm(query), ..)",
        RIGHT,
        (
            "Multiply the input by 2. Does the output change?",
            "The output does not change, because the input is normalised first.",
            "Remove the LayerNorm: it belongs to the layer that contains this module.",
        ),
        "It is a design and not a mistake, unless the layer that contains this module normalises its "
        "input, too.",
        REPAIR, "inputs",
        tuple({"inputs": _pre_norm(eps, which)} for eps in EPS for which in (3, 1)),
        (r"(layer_?norm|norm|ln)\w*\(", *LINES),
        design="a LayerNorm of the input",
    ),
    Fault(
        "residual and layer norm",
        "the module contains a residual connection and a LayerNorm: it is a whole sublayer",
        "LayerNorm(query + attention), or query + attention(LayerNorm(..))",
        RIGHT,
        (
            "Compare the output of the module with that of the attention in it.",
            "The module contains a residual connection and a LayerNorm.",
            "Remove both if the layer that contains this module adds them.",
        ),
        "It is a design and not a mistake, unless the layer that contains this module adds them, too.",
        REPAIR, "after",
        tuple(way for eps in EPS for way in _sublayer(eps)),
        (r"(layer_?norm|norm|ln)\w*\(", *LINES),
        design="a residual connection and a LayerNorm",
    ),
]  # fmt: skip
