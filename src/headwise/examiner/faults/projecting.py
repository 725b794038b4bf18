"""Faults of the projections of q, k and v, and of the inputs they are applied to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import RIGHT as RIGHT_STEPS
from ..recipe import State, Weights
from .fault import Fault, Way

RIGHT = "q = W_q query + b_q, k = W_k key + b_k, v = W_v value + b_v"
REPAIR = "q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)"


def _with_weights(change: Callable[[Weights], Weights]) -> Way:
    """Project with changed weights."""

    def apply(state: State) -> None:
        own, state.weights = state.weights, change(state.weights)
        RIGHT_STEPS["project"](state)
        state.weights = own

    return {"project": apply}


def _with_projections(order: str) -> Way:
    """Project q, k and v with the weights and biases of the letters in `order`, e.g. "qqv"."""

    def change(w: Weights) -> Weights:
        layers = {"q": (w.q, w.q_bias), "k": (w.k, w.k_bias), "v": (w.v, w.v_bias)}
        q, k, v = (layers[letter] for letter in order)
        return w._replace(q=q[0], k=k[0], v=v[0], q_bias=q[1], k_bias=k[1], v_bias=v[1])

    return _with_weights(change)


def _weights_of(order: str) -> Way:
    """Project q, k and v with the weights of the letters in `order`, and their own biases."""

    def change(w: Weights) -> Weights:
        q, k, v = (getattr(w, letter) for letter in order)
        return w._replace(q=q, k=k, v=v)

    return _with_weights(change)


def _without_projection(letters: str) -> Way:
    def change(w: Weights) -> Weights:
        identity, zero = torch.eye(w.q.shape[0], w.q.shape[1]).to(w.q), torch.zeros_like(w.q_bias)
        named = dict.fromkeys(letters, identity) | {f"{letter}_bias": zero for letter in letters}
        return w._replace(**named)

    return _with_weights(change)


def _transposed(letters: str) -> Way:
    return _with_weights(lambda w: w._replace(**{letter: getattr(w, letter).T for letter in letters}))


def _without_bias(letters: str) -> Way:
    def change(w: Weights) -> Weights:
        zero = {f"{letter}_bias": torch.zeros_like(getattr(w, f"{letter}_bias")) for letter in letters}
        return w._replace(**zero)

    return _with_weights(change)


def _twice(q_of: str, k_of: str, v_of: str) -> Way:
    """Project each of q, k and v from its own input, "x", or from the projected "q" or "k"."""

    def apply(state: State) -> None:
        w = state.weights
        projected: dict[str, Tensor] = {}
        own = {"q": state.query, "k": state.key, "v": state.value}
        of = {"q": q_of, "k": k_of, "v": v_of}
        for letter in "kqv" if q_of == "k" else "qkv":
            source = own[letter] if of[letter] == "x" else projected[of[letter]]
            projected[letter] = source @ getattr(w, letter).T + getattr(w, f"{letter}_bias")
        state.projected = projected["q"], projected["k"], projected["v"]

    return {"project": apply}


LINES = (r"(W_q|w_q|q_proj|wq|query|qkv|c_attn|in_proj)\w*\(", r"F\.linear\(", r"(@|matmul|einsum)")
CHUNKS = (r"\.(chunk|split|unbind)\(", r"\[\s*[012]\s*\]", r"qkv")
SHARED = tuple(
    way(order)
    for order in ("qqq", "kkk", "vvv", "qkq", "vkv", "qvv")
    for way in (_with_projections, _weights_of)
)
PROJECTING = [
    Fault(
        "shared projection",
        "two or three of queries, keys and values use the same projection",
        "one matrix for two or three of q, k and v",
        RIGHT,
        (
            "Which parameter computes the keys, and which the queries and the values?",
            "A parameter is not used and gets no gradient, because another one is used in its place.",
            "Use W_q for the queries, W_k for the keys and W_v for the values.",
        ),
        "If q and k are equal, the scores are symmetric: the score of token A for B is that of B for A.",
        REPAIR, "project",
        SHARED, LINES,
        said_by=("keys through w_q", "values through w_k"),
    ),
    Fault(
        "keys through w_q",
        "queries and keys use the same projection",
        "k = W_q key",
        RIGHT,
        (
            "Which parameter computes the keys?",
            "One of W_q and W_k is not used and gets no gradient.",
            "Use W_q for the queries and W_k for the keys.",
        ),
        "If q and k are equal, the scores are symmetric: the score of token A for B is that of B for A.",
        REPAIR, "project",
        (_with_projections("qqv"), _with_projections("kkv"), _weights_of("qqv"), _weights_of("kkv")), LINES,
    ),
    Fault(
        "values through w_k",
        "keys and values use the same projection",
        "v = W_k value",
        RIGHT,
        (
            "Which parameter computes the values?",
            "W_v is not used and gets no gradient; W_k is used in its place.",
            "Use W_v for the values.",
        ),
        "A head cannot use different features of a token for the scores and for the output.",
        REPAIR, "project", (_with_projections("qkk"), _weights_of("qkk")), LINES,
    ),
    Fault(
        "no q and k projection",
        "queries and keys are not projected",
        "softmax(query key^T) W_v(value)",
        RIGHT,
        (
            "Which inputs are multiplied by a matrix before the scores are computed?",
            "W_q and W_k have no effect on the output.",
            "Project query and key before they are split into heads.",
        ),
        "Heads compare the raw inputs: they cannot learn which tokens to attend to.",
        REPAIR, "project", tuple(map(_without_projection, ("qk", "q", "k"))), LINES,
    ),
    Fault(
        "no projections",
        "queries, keys and values are not projected: the heads are slices of the input",
        "softmax(query key^T) value, head by head",
        RIGHT,
        (
            "Which inputs are multiplied by a matrix before they are split into heads?",
            "None: each head compares a slice of the channels of the input.",
            "Create W_q, W_k and W_v in __init__ and apply them before the split.",
        ),
        "Each head gets a fixed slice of the input, so the attention weights are not learned.",
        REPAIR, "project", (_without_projection("qkv"),),
        (r"(split|heads?)\w*\(\s*(q|query|x|queries)\b", *LINES),
    ),
    Fault(
        "no v projection",
        "values are not projected",
        "softmax(q k^T) value",
        RIGHT,
        (
            "Is value multiplied by a matrix before it is multiplied by the weights?",
            "W_v has no effect on the output.",
            "Project value before it is split into heads.",
        ),
        "Heads can only pass the inputs on: they cannot learn which part of a token to pass on.",
        REPAIR, "project", (_without_projection("v"),), (r"\bv(alues?)?\s*=", *LINES),
    ),
    Fault(
        "projected twice",
        "keys or values are computed from a projection instead of from the input",
        "W_k or W_v applied to W_q x or W_k x instead of x",
        RIGHT,
        (
            "What is the value of x when the keys are computed?",
            "A projection overwrites its input, so what follows is projected twice.",
            "Assign each result to a variable of its own: q = W_q(x), k = W_k(x), v = W_v(x).",
        ),
        "Queries, keys and values depend on each other's weights and cannot be learned separately.",
        REPAIR, "project",
        tuple(_twice(*of) for of in ("xqq", "xqk", "xxk", "xqx", "xxq", "kxk", "kxx")),
        (
            r"^\s*(x|query|inputs?|hidden\w*|input)\s*=\s*self\.\w+\(\s*\1\s*\)",
            r"\b[kv]\w*\s*=\s*self\.\w+\(\s*[qk]\w*\s*\)", *LINES,
        ),
    ),
    Fault(
        "weight not transposed",
        "a weight of shape [out, in] is used without its transpose",
        "x @ W",
        "x @ W.T",
        (
            "What is the shape of the weight of nn.Linear, and which product does it compute?",
            "The matrix is used without a transpose; the shapes fit only because it is square.",
            "Use F.linear(x, W), or x @ W.T.",
        ),
        "Weights of any other implementation give wrong results, and a matrix that is not square crashes.",
        "q = F.linear(query, self.in_proj_weight[:E], self.in_proj_bias[:E])",
        "project", (_transposed("qkv"), _transposed("q"), _transposed("k"), _transposed("v")),
        (r"@\s*self\.\w*(weight|W)\w*(?!\.T|\.t\(|\.mT|\.transpose)", r"matmul\(", r"einsum\("),
    ),
    Fault(
        "fused order k q v",
        "the fused projection is separated in the order k, q, v",
        "k, q, v = qkv.chunk(3)",
        "q, k, v = qkv.chunk(3)",
        (
            "In which order does the fused weight hold q, k and v?",
            "The first third is used for the keys.",
            "Unpack in the order q, k, v.",
        ),
        "It works if trained from scratch, but weights of any other implementation end up in the wrong "
        "place.",
        "q, k, v = qkv.chunk(3, dim=-1)",
        "project", (_with_projections("kqv"),), CHUNKS,
    ),
    Fault(
        "fused order v k q",
        "the fused projection is not separated in the order q, k, v",
        "v, k, q = qkv.chunk(3)",
        "q, k, v = qkv.chunk(3)",
        (
            "In which order does the fused weight hold q, k and v?",
            "The first third is not used for the queries, or the last not for the values.",
            "Unpack in the order q, k, v.",
        ),
        "It works if trained from scratch, but weights of any other implementation end up in the wrong "
        "place.",
        "q, k, v = qkv.chunk(3, dim=-1)",
        "project", tuple(map(_with_projections, ("vkq", "qvk", "kvq", "vqk"))), CHUNKS,
    ),
    Fault(
        "no in bias used",
        "the biases of the projections of q, k and v are not used",
        "q = W_q query",
        RIGHT,
        (
            "Call backward. Which parameters have no gradient?",
            "The biases of the projections of q, k and v have no effect.",
            "Add the biases, or call the layer instead of multiplying by its weight.",
        ),
        "Weights that were trained with another implementation give different results.",
        REPAIR, "project", (_without_bias("qkv"),), LINES,
    ),
    Fault(
        "no q bias",
        "the bias of the queries is not used",
        "q = W_q query",
        RIGHT,
        (
            "Call backward. Which parameters have no gradient?",
            "One bias has no effect.",
            "Add the bias, or call the layer instead of multiplying by its weight.",
        ),
        "Weights that were trained with another implementation give different results.",
        REPAIR, "project", (_without_bias("q"),), LINES,
        follows=True,
    ),
    Fault(
        "no v bias",
        "the bias of the values is not used",
        "v = W_v value",
        RIGHT,
        (
            "Call backward. Which parameters have no gradient?",
            "One bias has no effect.",
            "Add the bias, or call the layer instead of multiplying by its weight.",
        ),
        "Weights that were trained with another implementation give different results.",
        REPAIR, "project", (_without_bias("v"),), LINES,
    ),
    Fault(
        "bias of another projection",
        "the bias of one projection is added to another",
        "k = W_k key + b_v",
        RIGHT,
        (
            "Compare the name of each bias with the projection it is added to.",
            "A bias of the values belongs to the values; a bias of the keys does not change the weights.",
            "Add each bias to the projection that it is named after.",
        ),
        "A bias of the keys is never trained, and weights of another implementation give different results.",
        "qkv_bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))",
        lines=(r"cat\(.*bias", r"k\w*\s*=.*(b_[vq]|[vq]_bias)", r"v\w*\s*=.*(b_[kq]|[kq]_bias)", r"bias"),
    ),
]  # fmt: skip


RIGHT_INPUTS = "queries from query, keys from key, values from value"
ENTRY = (r"def forward\(", r"(W_q|w_q|q_proj|query)\w*\(", r"zip\(")


def _from_inputs(order: str) -> tuple[Way, ...]:
    """Use the inputs in `order` as query, key and value, e.g. "qvk"."""

    def apply(state: State) -> None:
        named = dict(zip("qkv", state.inputs[:3], strict=True))
        state.query, state.key, state.value = (named[letter] for letter in order)

    return ({"inputs": apply},)


def _swapped_dimensions(state: State) -> None:
    if state.inputs.mask is not None:
        raise ValueError("a mask does not fit if batch and sequence are swapped")
    state.query, state.key, state.value = (x.transpose(0, 1) for x in state.inputs[:3])


def _swapped_back(state: State) -> None:
    state.output = state.output.transpose(0, 1)


REASON = (
    "In self-attention the three inputs are equal and the result is correct; in cross-attention it is wrong."
)
INPUTS = [
    Fault(
        "keys and values swapped",
        "keys are computed from the value input, and values from the key input",
        "softmax(q W_k(value)^T) W_v(key)",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "The scores depend on the value input, and the output on the key input.",
            "Swap key and value, in the signature or where they are projected.",
        ),
        REASON, REPAIR, "inputs", _from_inputs("qvk"), ENTRY,
    ),
    Fault(
        "queries and keys swapped",
        "queries are computed from the key input, and keys from the query input",
        "softmax(key query^T) value",
        RIGHT_INPUTS,
        (
            "Call it with more keys than queries.",
            "The output has one row for each key instead of one for each query.",
            "Swap query and key, in the signature or where they are projected.",
        ),
        REASON, REPAIR, "inputs", _from_inputs("kqv"), ENTRY,
    ),
    Fault(
        "queries and values swapped",
        "queries and values are swapped",
        "softmax(value key^T) query",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "The arguments are passed in the order value, key, query instead of query, key, value, or "
            "the reverse.",
            "Pass the arguments by name, or change their order.",
        ),
        REASON, REPAIR, "inputs", _from_inputs("vkq"), ENTRY,
    ),
    Fault(
        "value from key",
        "values are computed from the key input",
        "softmax(q k^T) W_v(key)",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "The value input has no effect on the output.",
            "Apply the projection of the values to value instead of key.",
        ),
        REASON, REPAIR, "inputs", _from_inputs("qkk"),
        (r"(W_v|w_v|v_proj|value|v)\w*\(\s*(key|k|keys)\b", *ENTRY),
    ),
    Fault(
        "value from query",
        "values are computed from the query input",
        "softmax(q k^T) W_v(query)",
        RIGHT_INPUTS,
        (
            "Call it with a memory that differs from the queries.",
            "The memory determines the weights, but the values, and so the output, do not depend on it.",
            "Apply the projection of the values to value, or to the memory, instead of query.",
        ),
        REASON, REPAIR, "inputs", _from_inputs("qkq"),
        (r"(W_v|w_v|v_proj|to_v|value|v)\w*\(\s*(x|query|q)\b", *ENTRY),
    ),
    Fault(
        "key from value",
        "keys are computed from the value input",
        "softmax(q W_k(value)^T) v",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "The key input has no effect on the output.",
            "Apply the projection of the keys to key instead of value.",
        ),
        REASON, REPAIR, "inputs", _from_inputs("qvv"),
        (r"(W_k|w_k|k_proj|key|k)\w*\(\s*(value|v|values)\b", *ENTRY),
    ),
    Fault(
        "self-attention only",
        "keys and values are computed from the query input",
        "softmax(W_q(query) W_k(query)^T) W_v(query)",
        RIGHT_INPUTS,
        (
            "Call it with a key and a value input that differ from query.",
            "The key and value inputs have no effect on the output.",
            "The three projections are all applied to query: apply that of the keys to key and that of "
            "the values to value.",
        ),
        "Cross-attention ignores its memory: a decoder would not use the output of the encoder.",
        REPAIR, "inputs", _from_inputs("qqq"), ENTRY,
    ),
    Fault(
        "wrong layout",
        "the batch and sequence dimensions are swapped: attention runs over the samples of a batch",
        "attention over dimension 0 of [B, T, E]",
        "attention over dimension 1 of [B, T, E]",
        (
            "Change one sample. Do the outputs of the others change?",
            "Samples attend to each other, and the positions of one sample do not.",
            "Pass batch_first=True, or transpose the input before and the output after the call.",
        ),
        "The output of a sentence depends on the other sentences, and not on its own other words.",
        "self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)",
        "inputs",
        ({"inputs": _swapped_dimensions, "after": _swapped_back},),
        (r"MultiheadAttention\(", r"(transpose|permute)\(\s*0\s*,\s*1", r"(view|reshape)\("),
        mixes_samples=True,
    ),
]  # fmt: skip
