"""Which input goes where, before anything is computed."""

from __future__ import annotations

from ..recipe import State
from .fault import Fault, Way

RIGHT = "queries from query, keys from key, values from value"
REPAIR = "q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)"
LINES = (r"def forward\(", r"(W_q|w_q|q_proj|query)\w*\(", r"zip\(")


def _way(order: str) -> tuple[Way, ...]:
    """order: which inputs become query, key and value, e.g. "qvk"."""

    def apply(state: State) -> None:
        named = dict(zip("qkv", state.given[:3], strict=True))
        state.query, state.key, state.value = (named[letter] for letter in order)

    return ({"inputs": apply},)


def _turned(state: State) -> None:
    if state.given.mask is not None:
        raise ValueError("a mask does not fit a batch that was taken for a sequence")
    state.query, state.key, state.value = (x.transpose(0, 1) for x in state.given[:3])


def _back(state: State) -> None:
    state.output = state.output.transpose(0, 1)


WHY = "In self-attention the three inputs are one and it does not show; cross-attention is silently wrong."
FAULTS = [
    Fault(
        "keys and values swapped",
        "keys and values are swapped",
        "softmax(q W_k(value)^T) W_v(key)",
        RIGHT,
        (
            "Call it with three different inputs.",
            "Where attention looks is decided by the values, and what it brings back are the keys.",
            "Swap key and value, in the signature or where they are projected.",
        ),
        WHY, REPAIR, "inputs", _way("qvk"), LINES,
    ),
    Fault(
        "queries and keys swapped",
        "queries and keys are swapped",
        "softmax(key query^T) value",
        RIGHT,
        (
            "Call it with a memory longer than the queries.",
            "The keys ask and the queries answer.",
            "Swap query and key, in the signature or where they are projected.",
        ),
        WHY, REPAIR, "inputs", _way("kqv"), LINES,
    ),
    Fault(
        "queries and values swapped",
        "queries and values are swapped",
        "softmax(value key^T) query",
        RIGHT,
        (
            "Call it with three different inputs.",
            "The order (values, keys, query) was meant where (query, key, value) came, or vice versa.",
            "Name the arguments in the call, or change their order.",
        ),
        WHY, REPAIR, "inputs", _way("vkq"), LINES,
    ),
    Fault(
        "value from key",
        "values are made from the key input",
        "softmax(q k^T) W_v(key)",
        RIGHT,
        (
            "Call it with three different inputs.",
            "The value input has no influence.",
            "Project value, not key, with the last of the three.",
        ),
        WHY, REPAIR, "inputs", _way("qkk"), (r"(W_v|w_v|v_proj|value|v)\w*\(\s*(key|k|keys)\b", *LINES),
    ),
    Fault(
        "key from value",
        "keys are made from the value input",
        "softmax(q W_k(value)^T) v",
        RIGHT,
        (
            "Call it with three different inputs.",
            "The key input has no influence.",
            "Project key, not value, with the second of the three.",
        ),
        WHY, REPAIR, "inputs", _way("qvv"), (r"(W_k|w_k|k_proj|key|k)\w*\(\s*(value|v|values)\b", *LINES),
    ),
    Fault(
        "self-attention only",
        "keys and values are made from the query input",
        "softmax(W_q(query) W_k(query)^T) W_v(query)",
        RIGHT,
        (
            "Call it with a memory that differs from the queries.",
            "Key and value inputs have no influence.",
            "Project key and value where query is projected three times.",
        ),
        "Cross-attention that never looks at its memory: a decoder that ignores the encoder.",
        REPAIR, "inputs", _way("qqq"), LINES,
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
        ({"inputs": _turned, "after": _back},),
        (r"MultiheadAttention\(", r"(transpose|permute)\(\s*0\s*,\s*1", r"(view|reshape)\("),
        mixes_samples=True,
    ),
]  # fmt: skip
