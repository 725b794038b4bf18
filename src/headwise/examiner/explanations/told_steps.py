"""The steps as they are told: title, formula, words, shapes, and which maps are drawn.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim, Dv value_dim, E d_model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..recipe import State
from .mask_sentences import POLARITY, MaskWords

PROJECTED = ("projected_q", "projected_k", "projected_v")
PLAIN = (
    "query",
    "key",
    "value",
    "q",
    "k",
    "v",
    "scores",
    "scaled",
    "hidden",
    "p",
    "heads",
    "joined",
    "output",
)


@dataclass(frozen=True)
class Map:
    """One heat map: a field, and what its rows and columns are.

    Args:
        field: the tensor's name in `ExplainedStep.expected`.
        name: as it is written on the page.
        rows, columns: "query", "key", "channel" (of one head), "width" (heads side by side) or "feature".
        colour: "signed" (around 0), "share" (0 to 1) or "mask".
    """

    field: str
    name: str
    rows: str
    columns: str
    colour: str = "signed"


@dataclass(frozen=True)
class Flow:
    """What goes in, and what comes out."""

    result: Map
    operands: tuple[Map, ...] = ()


@dataclass(eq=False)
class ExplainedStep:
    """One step of multi-head attention with its numbers.

    Attributes:
        expected: the right numbers, by field.
        yours: the module's own, by field, where they are known.
        status: "same", "first" (here they part), "after" (different because of an earlier step) or "unseen".
        error: the largest difference, None where `yours` is unknown.
    """

    key: str
    title: str
    formula: str
    words: str
    shapes: tuple[str, ...]
    flows: tuple[Flow, ...]
    expected: dict[str, Tensor] = field(default_factory=dict, repr=False)
    yours: dict[str, Tensor] = field(default_factory=dict, repr=False)
    status: str = "unseen"
    error: float | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The tensors this step makes."""
        return tuple(flow.result.field for flow in self.flows)


def fields_of(state: State) -> dict[str, Tensor]:
    """A state's tensors by name; steps that left something out leave it out here."""
    found = {name: getattr(state, name, None) for name in PLAIN}
    found |= dict(zip(PROJECTED, getattr(state, "projected", ()), strict=False))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def steps_of(state: State, scale: float, masks: list[MaskWords]) -> list[ExplainedStep]:
    """All steps of one call, without their numbers."""
    B, T, E = state.query.shape
    S, H, D, Dv = state.key.shape[1], state.num_heads, state.q.shape[-1], state.v.shape[-1]
    itself = state.query is state.key and state.key is state.value
    usual = abs(scale * D**0.5 - 1) < 1e-12
    scaling = f"÷ √{D}" if usual else f"× {scale:.6g}"
    masked = state.given.mask is not None
    x = [Map(name, name, rows, "feature") for name, rows in _SIDES]
    projected = [Map(PROJECTED[i], "QKV"[i], rows, "width") for i, (_, rows) in enumerate(_SIDES)]
    weights = [Map(f"w_{name}", f"W_{name}", "width", "feature") for name in "qkv"]
    q, k, v = (Map(name, name, rows, "channel") for name, (_, rows) in zip("qkv", _SIDES, strict=True))
    scores, scaled, hidden = (
        Map(name, name, "query", "key") for name in ("scores", "scaled", "hidden")
    )  # [B, H, T, S] each
    p = Map("p", "weights p", "query", "key", "share")
    heads, joined = Map("heads", "head output", "query", "channel"), Map("joined", "concat", "query", "width")
    pairs, per_head = f"[B, H, T, S] = {[B, H, T, S]}", f"[B, H, T, D] = {[B, H, T, D]}"
    inputs = [Map("query", "x", "query", "feature")] if itself else x
    return [
        ExplainedStep(
            "inputs", "What goes in", "query = key = value = x" if itself else "query, key, value",
            f"Self-attention: {T} tokens, each a row of {E} numbers, serve as queries, as keys and as values."
            if itself else
            f"{T} queries look at {S} keys; each key has a value. Every row is one token's {E} numbers.",
            (f"x: [B, T, E] = {[B, T, E]}",) if itself else (
                f"query: [B, T, E] = {[B, T, E]}", f"key, value: [B, S, E] = {[B, S, E]}",
            ),
            tuple(Flow(one) for one in inputs),
        ),
        ExplainedStep(
            "project", "Project: three views of every token",
            "Q = query · W_qᵀ + b_q      K = key · W_kᵀ + b_k      V = value · W_vᵀ + b_v",
            "Three learned matrices turn a token into what it asks for (Q), what it offers to be found by "
            "(K) and what it hands on (V). Each number is a row of the input times a row of the weight, plus "
            "a bias.",
            (f"Q: [B, T, H·D] = {[B, T, H * D]}", f"K: [B, S, H·D] = {[B, S, H * D]}",
             f"V: [B, S, H·D] = {[B, S, H * Dv]}"),
            tuple(Flow(out, (left, right)) for out, left, right in zip(projected, x, weights, strict=True)),
        ),
        ExplainedStep(
            "split", f"Split into {H} head{'s' * (H > 1)}",
            "view(B, T, H, D).transpose(1, 2):   q[b, h, t, d] = Q[b, t, h·D + d]",
            f"Nothing is computed. Head h takes channels h·{D} to h·{D} + {D - 1} of every token: the "
            "channels are split, never the tokens.",
            (f"Q [B, T, H·D] = {[B, T, H * D]} → q {per_head}", f"k: [B, H, S, D] = {[B, H, S, D]}"),
            tuple(Flow(out, (given,)) for out, given in zip((q, k, v), projected, strict=True)),
        ),
        ExplainedStep(
            "score", "Score: every query against every key",
            "scores[t, s] = Σ_d q[t, d] · k[s, d]        (q · kᵀ)",
            "One dot product for every pair: large where what the query asks for is what the key offers.",
            (f"{per_head} · [B, H, D, S] = {[B, H, D, S]} → {pairs}",), (Flow(scores, (q, k)),),
        ),
        ExplainedStep(
            "scale", f"Scale: {'divide by' if usual else 'multiply by'} {scaling[2:]}",
            f"scaled = scores {scaling}" + (f"        (√D, D = {D} channels per head)" if usual else ""),
            f"A sum of {D} products grows like √{D}. Without this the softmax would be nearly all or "
            "nothing, and its gradient nearly zero. It is the width of a head that counts, not of the model.",
            (pairs,), (Flow(scaled, (scores,)),),
        ),
        ExplainedStep(
            "mask", "Mask: hide what may not be seen" if masked else "Mask: nothing is hidden",
            "hidden[t, s] = scaled[t, s] where query t may see key s, else −∞",
            f"exp(−∞) = 0: a hidden pair gets no weight at all. {POLARITY}" if masked else masks[0].words[0],
            (f"mask: [B, 1, T, S] = {[B, 1, T, S]}, the same for every head", pairs) if masked else (pairs,),
            (Flow(hidden, (scaled, Map("mask", "mask", "query", "key", "mask")) if masked else (scaled,)),),
        ),
        ExplainedStep(
            "softmax", "Softmax: scores become weights",
            "p[t, s] = exp(hidden[t, s]) / Σ_j exp(hidden[t, j])",
            "Along each row, over the keys: weights lie between 0 and 1, and each query's add up to 1.",
            (f"{pairs}, softmax over the last, S",), (Flow(p, (hidden,)),),
        ),
        ExplainedStep(
            "weigh", "Weigh: each value times its weight",
            "weighted[s, d] = p[t, s] · v[s, d]        (for one query t)",
            "For one query: every key's value, made as strong as the query's weight for that key. Its "
            "columns add up to the query's row in the next step.",
            (f"for one query: [S, D] = {[S, Dv]}",),
            (Flow(Map("weighted", "weighted values", "key", "channel"), (p, v)),),
        ),
        ExplainedStep(
            "heads", "Each head's output", "head[t, d] = Σ_s p[t, s] · v[s, d]        (p · v)",
            "A query's answer from this head: the mean of all values, weighted by its weights.",
            (f"{pairs} · [B, H, S, D] = {[B, H, S, Dv]} → [B, H, T, D] = {[B, H, T, Dv]}",),
            (Flow(heads, (p, v)),),
        ),
        ExplainedStep(
            "concat", "Concatenate the heads",
            "transpose(1, 2).reshape(B, T, H·D):   concat[t, h·D + d] = head_h[t, d]",
            f"Nothing is computed. The {H} answers to one query are laid side by side, head 0 first; the "
            "transpose comes before the reshape, or tokens would be mixed.",
            (f"[B, H, T, D] = {[B, H, T, Dv]} → [B, T, H·D] = {[B, T, H * Dv]}",), (Flow(joined, (heads,)),),
        ),
        ExplainedStep(
            "output", "Project once more: the output", "output = concat · W_oᵀ + b_o",
            "The last matrix mixes what the heads found: until here no head knew of another.",
            (f"[B, T, H·D] = {[B, T, H * Dv]} → [B, T, E] = {[B, T, state.weights.o.shape[0]]}",),
            (Flow(Map("output", "output", "query", "feature"),
                  (joined, Map("w_o", "W_o", "feature", "width"))),),
        ),
    ]  # fmt: skip


_SIDES = (("query", "query"), ("key", "key"), ("value", "key"))  # input, and what its rows are
