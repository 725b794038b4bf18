"""The projections of q, k and v, and which input goes into which."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..recipe import RIGHT as RIGHT_STEPS
from ..recipe import State, Weights
from .fault import Fault, Way

RIGHT = "q = W_q query + b_q, k = W_k key + b_k, v = W_v value + b_v"
REPAIR = "q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)"


def _with(change: Callable[[Weights], Weights]) -> Way:
    """Other weights than the learner's names promise."""

    def apply(state: State) -> None:
        own, state.weights = state.weights, change(state.weights)
        RIGHT_STEPS["project"](state)
        state.weights = own

    return {"project": apply}


def _using(order: str) -> Way:
    """order: whose weights q, k and v are made with, e.g. "qqv"."""

    def change(w: Weights) -> Weights:
        held = {"q": (w.q, w.q_bias), "k": (w.k, w.k_bias), "v": (w.v, w.v_bias)}
        q, k, v = (held[letter] for letter in order)
        return w._replace(q=q[0], k=k[0], v=v[0], q_bias=q[1], k_bias=k[1], v_bias=v[1])

    return _with(change)


def _weights_of(order: str) -> Way:
    """The same with each bias where it belongs."""

    def change(w: Weights) -> Weights:
        q, k, v = (getattr(w, letter) for letter in order)
        return w._replace(q=q, k=k, v=v)

    return _with(change)


def _none(letters: str) -> Way:
    def change(w: Weights) -> Weights:
        one, zero = torch.eye(w.q.shape[0], w.q.shape[1]).to(w.q), torch.zeros_like(w.q_bias)
        named = dict.fromkeys(letters, one) | {f"{letter}_bias": zero for letter in letters}
        return w._replace(**named)

    return _with(change)


def _turned(letters: str) -> Way:
    return _with(lambda w: w._replace(**{letter: getattr(w, letter).T for letter in letters}))


def _bare(letters: str) -> Way:
    def change(w: Weights) -> Weights:
        zero = {f"{letter}_bias": torch.zeros_like(getattr(w, f"{letter}_bias")) for letter in letters}
        return w._replace(**zero)

    return _with(change)


def _twice(q_of: str, k_of: str, v_of: str) -> Way:
    """Each made of its own input, "x", or of what another has become: "q" or "k"."""

    def apply(state: State) -> None:
        w = state.weights
        made: dict[str, Tensor] = {}
        own = {"q": state.query, "k": state.key, "v": state.value}
        of = {"q": q_of, "k": k_of, "v": v_of}
        for letter in "kqv" if q_of == "k" else "qkv":
            source = own[letter] if of[letter] == "x" else made[of[letter]]
            made[letter] = source @ getattr(w, letter).T + getattr(w, f"{letter}_bias")
        state.projected = made["q"], made["k"], made["v"]

    return {"project": apply}


LINES = (r"(W_q|w_q|q_proj|wq|query|qkv|c_attn|in_proj)\w*\(", r"F\.linear\(", r"(@|matmul|einsum)")
CHUNKS = (r"\.(chunk|split|unbind)\(", r"\[\s*[012]\s*\]", r"qkv")
SHARED = ("qqq", "kkk", "vvv", "qkq", "vkv", "qvv")
PROJECTING = [
    Fault(
        "shared projection",
        "queries, keys and values do not each have a projection of their own",
        "one matrix used for two or three of q, k and v",
        RIGHT,
        (
            "Which parameter makes the keys, and which the queries?",
            "Some parameter never gets a gradient, because another one does its work.",
            "Use W_q for queries, W_k for keys, W_v for values.",
        ),
        "With q and k alike, scores are symmetric: if A looks at B, B looks at A just as much.",
        REPAIR, "project",
        tuple(way(order) for order in SHARED for way in (_using, _weights_of)), LINES,
        said_by=("keys through w_q", "values through w_k"),
    ),
    Fault(
        "keys through w_q",
        "queries and keys are made with the same projection",
        "k = W_q key",
        RIGHT,
        (
            "Which parameter makes the keys?",
            "One of W_q and W_k never gets a gradient, because the other one does its work.",
            "Use W_q for queries and W_k for keys.",
        ),
        "With q and k alike, scores are symmetric: if A looks at B, B looks at A just as much.",
        REPAIR, "project", (_using("qqv"), _using("kkv"), _weights_of("qqv"), _weights_of("kkv")), LINES,
    ),
    Fault(
        "values through w_k",
        "keys and values are made with the same projection",
        "v = W_k value",
        RIGHT,
        (
            "Which parameter makes the values?",
            "W_v never gets a gradient, because W_k does its work.",
            "Use W_v for values.",
        ),
        "What is looked for and what is handed on are the same thing.",
        REPAIR, "project", (_using("qkk"), _weights_of("qkk")), LINES,
    ),
    Fault(
        "no q and k projection",
        "queries and keys are not projected",
        "softmax(query key^T) W_v(value)",
        RIGHT,
        (
            "Which inputs go through a matrix before the scores?",
            "W_q and W_k have no influence on the result.",
            "Project query and key before they are split.",
        ),
        "Heads compare raw embeddings: they cannot learn what to look for.",
        REPAIR, "project", (_none("qk"), _none("q"), _none("k")), LINES,
    ),
    Fault(
        "no projections",
        "queries, keys and values are not projected: heads are slices of the input",
        "softmax(query key^T) value, head by head",
        RIGHT,
        (
            "Which inputs go through a matrix before they are split?",
            "There is none for queries, for keys, for values: only what is cut out of the input is compared.",
            "Make W_q, W_k and W_v in __init__ and apply them before the split.",
        ),
        "Heads see fixed slices of the embedding: where they look, and what they say, is never learned.",
        REPAIR, "project", (_none("qkv"),),
        (r"(split|heads?)\w*\(\s*(q|query|x|queries)\b", *LINES),
    ),
    Fault(
        "no v projection",
        "values are not projected",
        "softmax(q k^T) value",
        RIGHT,
        (
            "Which inputs go through a matrix before they are mixed?",
            "W_v has no influence on the result.",
            "Project value before it is split.",
        ),
        "Heads can only hand on what is there, not choose what to say of it.",
        REPAIR, "project", (_none("v"),), (r"\bv(alues?)?\s*=", *LINES),
    ),
    Fault(
        "projected twice",
        "keys or values are made of what was projected already, and not of the input",
        "W_k or W_v applied to W_q x, or to W_k x, in place of x",
        RIGHT,
        (
            "What is in x when the keys are made?",
            "A projection overwrites its own input: what comes after it is projected twice.",
            "Give each result a name of its own: q = W_q(x), k = W_k(x), v = W_v(x).",
        ),
        "Queries, keys and values are tied to each other: none can be learned by itself.",
        REPAIR, "project",
        tuple(_twice(*of) for of in ("xqq", "xqk", "xxk", "xqx", "xxq", "kxk", "kxx")),
        (
            r"^\s*(x|query|inputs?|hidden\w*|input)\s*=\s*self\.\w+\(\s*\1\s*\)",
            r"\b[kv]\w*\s*=\s*self\.\w+\(\s*[qk]\w*\s*\)", *LINES,
        ),
    ),
    Fault(
        "weight not transposed",
        "a weight kept as [out, in] is used without its transpose",
        "x @ W",
        "x @ W.T",
        (
            "How does nn.Linear keep its weight, and what does it do with it?",
            "The matrix is used the other way round; it only fits because it is square.",
            "Use F.linear(x, W), or x @ W.T.",
        ),
        "Weights of any other implementation give nonsense, and a model of another width crashes.",
        "q = F.linear(query, self.in_proj_weight[:E], self.in_proj_bias[:E])",
        "project", (_turned("qkv"), _turned("q"), _turned("k"), _turned("v")),
        (r"@\s*self\.\w*(weight|W)\w*(?!\.T|\.t\(|\.mT|\.transpose)", r"matmul\(", r"einsum\("),
    ),
    Fault(
        "fused order k q v",
        "the fused projection is taken apart in the order k, q, v",
        "k, q, v = qkv.chunk(3)",
        "q, k, v = qkv.chunk(3)",
        (
            "In which order do q, k and v lie in the fused weight?",
            "The first third is used for keys.",
            "Unpack as q, k, v.",
        ),
        "It trains as well; weights of any other implementation end up in the wrong place.",
        "q, k, v = qkv.chunk(3, dim=-1)",
        "project", (_using("kqv"),), CHUNKS,
    ),
    Fault(
        "fused order v k q",
        "the fused projection is taken apart in the order v, k, q",
        "v, k, q = qkv.chunk(3)",
        "q, k, v = qkv.chunk(3)",
        (
            "In which order do q, k and v lie in the fused weight?",
            "The first third is used for values.",
            "Unpack as q, k, v.",
        ),
        "It trains as well; weights of any other implementation end up in the wrong place.",
        "q, k, v = qkv.chunk(3, dim=-1)",
        "project", (_using("vkq"), _using("qvk"), _using("kvq"), _using("vqk")), CHUNKS,
    ),
    Fault(
        "no in bias used",
        "the biases of the projections of q, k and v are not used",
        "q = W_q query",
        RIGHT,
        (
            "Which parameters never get a gradient?",
            "The biases of the first projections do nothing.",
            "Add them, or call the layer instead of multiplying with its weight.",
        ),
        "A model trained elsewhere loses a part of itself when its weights are loaded.",
        REPAIR, "project", (_bare("qkv"),), LINES,
    ),
    Fault(
        "no q bias",
        "the bias of the queries is not used",
        "q = W_q query",
        RIGHT,
        (
            "Which parameters never get a gradient?",
            "One bias does nothing.",
            "Add it, or call the layer instead of multiplying with its weight.",
        ),
        "A model trained elsewhere loses a part of itself when its weights are loaded.",
        REPAIR, "project", (_bare("q"),), LINES,
        follows=True,
    ),
    Fault(
        "no v bias",
        "the bias of the values is not used",
        "v = W_v value",
        RIGHT,
        (
            "Which parameters never get a gradient?",
            "One bias does nothing.",
            "Add it, or call the layer instead of multiplying with its weight.",
        ),
        "A model trained elsewhere loses a part of itself when its weights are loaded.",
        REPAIR, "project", (_bare("v"),), LINES,
    ),
]  # fmt: skip


RIGHT_INPUTS = "queries from query, keys from key, values from value"
ENTRY = (r"def forward\(", r"(W_q|w_q|q_proj|query)\w*\(", r"zip\(")


def _way(order: str) -> tuple[Way, ...]:
    """order: which inputs become query, key and value, e.g. "qvk"."""

    def apply(state: State) -> None:
        named = dict(zip("qkv", state.inputs[:3], strict=True))
        state.query, state.key, state.value = (named[letter] for letter in order)

    return ({"inputs": apply},)


def _turned_about(state: State) -> None:
    if state.inputs.mask is not None:
        raise ValueError("a mask does not fit a batch that was taken for a sequence")
    state.query, state.key, state.value = (x.transpose(0, 1) for x in state.inputs[:3])


def _back(state: State) -> None:
    state.output = state.output.transpose(0, 1)


WHY = "In self-attention the three inputs are one and it does not show; cross-attention is silently wrong."
INPUTS = [
    Fault(
        "keys and values swapped",
        "keys and values are swapped",
        "softmax(q W_k(value)^T) W_v(key)",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "Where attention looks is decided by the values, and what it brings back are the keys.",
            "Swap key and value, in the signature or where they are projected.",
        ),
        WHY, REPAIR, "inputs", _way("qvk"), ENTRY,
    ),
    Fault(
        "queries and keys swapped",
        "queries and keys are swapped",
        "softmax(key query^T) value",
        RIGHT_INPUTS,
        (
            "Call it with a memory longer than the queries.",
            "The keys ask and the queries answer.",
            "Swap query and key, in the signature or where they are projected.",
        ),
        WHY, REPAIR, "inputs", _way("kqv"), ENTRY,
    ),
    Fault(
        "queries and values swapped",
        "queries and values are swapped",
        "softmax(value key^T) query",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "The order (values, keys, query) was meant where (query, key, value) came, or vice versa.",
            "Name the arguments in the call, or change their order.",
        ),
        WHY, REPAIR, "inputs", _way("vkq"), ENTRY,
    ),
    Fault(
        "value from key",
        "values are made from the key input",
        "softmax(q k^T) W_v(key)",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "The value input has no influence.",
            "Project value, not key, with the last of the three.",
        ),
        WHY, REPAIR, "inputs", _way("qkk"), (r"(W_v|w_v|v_proj|value|v)\w*\(\s*(key|k|keys)\b", *ENTRY),
    ),
    Fault(
        "key from value",
        "keys are made from the value input",
        "softmax(q W_k(value)^T) v",
        RIGHT_INPUTS,
        (
            "Call it with three different inputs.",
            "The key input has no influence.",
            "Project key, not value, with the second of the three.",
        ),
        WHY, REPAIR, "inputs", _way("qvv"), (r"(W_k|w_k|k_proj|key|k)\w*\(\s*(value|v|values)\b", *ENTRY),
    ),
    Fault(
        "self-attention only",
        "keys and values are made from the query input",
        "softmax(W_q(query) W_k(query)^T) W_v(query)",
        RIGHT_INPUTS,
        (
            "Call it with a memory that differs from the queries.",
            "Key and value inputs have no influence.",
            "Project key and value where query is projected three times.",
        ),
        "Cross-attention that never looks at its memory: a decoder that ignores the encoder.",
        REPAIR, "inputs", _way("qqq"), ENTRY,
    ),
    Fault(
        "wrong layout",
        "batch and length are mixed up: attention runs over the samples of a batch",
        "attention over dimension 0 of [B, T, E]",
        "attention over dimension 1 of [B, T, E]",
        (
            "Change one sample and see whether the others move.",
            "Samples attend to each other; positions of one sample do not.",
            "Say batch_first=True, or transpose the input before and the output after.",
        ),
        "Sentences leak into each other, and word order means nothing.",
        "self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)",
        "inputs",
        ({"inputs": _turned_about, "after": _back},),
        (r"MultiheadAttention\(", r"(transpose|permute)\(\s*0\s*,\s*1", r"(view|reshape)\("),
        mixes_samples=True,
    ),
]  # fmt: skip
