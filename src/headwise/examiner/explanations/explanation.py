"""A mask in words: what it hides from whom, and which way round it is to be read.

Letters: B batch, T query_len, S key_len.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..recipe import State
from ..report import Named

POLARITY = (
    "Here True (or 1) means: may attend. Boolean masks of torch.nn.MultiheadAttention say the opposite, "
    "True = may not attend."
)


@dataclass(frozen=True)
class MaskWords:
    """One sample's mask."""

    words: tuple[str, ...]
    later: int | None = None  # keys after query + later are hidden, because they come later
    padding: tuple[int, ...] = ()  # keys hidden from every query


def in_words(mask: Tensor | None, sample: int) -> MaskWords:
    """What the mask of one sample hides.

    Args:
        mask: bool [B, T, S], True = may attend; None hides nothing.

    Example:
        >>> in_words(torch.ones(1, 3, 3).tril().bool(), 0).words[0]
        'Causal: a query may see the keys up to its own place; those that come later are hidden.'
    """
    if mask is None:
        return MaskWords(("There is no mask: every query may see every key.",))
    seen = mask[sample]  # [T, S]
    T, S = seen.shape
    if bool(seen.all()):
        return MaskWords(("The mask hides nothing: every query may see every key.",))
    padding = tuple(int(s) for s in (~seen).all(0).nonzero().flatten())
    later = _later(seen, padding)
    words, known = [], torch.zeros(T, S, dtype=torch.bool)
    if later is not None:
        known |= _beyond(T, S, later)
        place = "its own place" if later == 0 else f"place query {later:+d}"
        words.append(f"Causal: a query may see the keys up to {place}; those that come later are hidden.")
    if padding:
        known[:, list(padding)] = True
        words.append(f"{_numbered('Key', padding)} hidden from every query, as padding is.")
    others = int((~seen & ~known).sum())
    if others:
        more, many = "more " if words else "", others > 1
        pairs = f"{others} {more}pair{'s' * many} of query and key {'are' if many else 'is'} hidden"
        words.append(f"{pairs} by the mask.")
    empty = tuple(int(t) for t in (~seen).all(1).nonzero().flatten())
    if empty:
        words.append(f"{_numbered('Query', empty)} left with no key to see.")
    words.append(f"In all, {int((~seen).sum())} of {T * S} pairs are hidden.")
    return MaskWords(tuple(words), later, padding)


def _later(seen: Tensor, padding: tuple[int, ...]) -> int | None:
    """The offset of a causal mask: the last query beside the last key, or the first beside the first."""
    T, S = seen.shape
    real = torch.ones(S, dtype=torch.bool)
    real[list(padding)] = False
    for offset in dict.fromkeys((S - T, 0)):
        beyond = _beyond(T, S, offset)
        edge = _beyond(T, S, offset - 1) & ~beyond
        if bool((beyond & real).any()) and not bool((seen & beyond).any()) and bool((seen & edge).any()):
            return offset
    return None


def _beyond(T: int, S: int, offset: int) -> Tensor:
    return torch.arange(S) > torch.arange(T)[:, None] + offset  # [T, S]


def _numbered(word: str, numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"{word} {numbers[0]} is"
    plural = "Queries" if word == "Query" else f"{word}s"
    if len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{plural} {numbers[0]} to {numbers[-1]} are"
    return f"{plural} {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} are"


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


# How far apart numbers may be, as a share of the largest expected one, before they count as different.
CLOSE = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def differing(expected: Tensor, yours: Tensor) -> tuple[Tensor, float, float]:
    """Which numbers differ (bool, in the shape of `expected`), how much at most, and how much does not count.

    Other shapes: all of them, by infinity. NaN is equal to NaN.
    """
    finite = expected[expected.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 1.0
    allowed = CLOSE.get(yours.dtype, 1e-7) * max(1e-3, size)
    if yours.shape != expected.shape:
        return torch.ones_like(expected, dtype=torch.bool), float("inf"), allowed
    yours = yours.to(expected.dtype)
    equal = (expected == yours) | (expected.isnan() & yours.isnan())
    off = (expected - yours).abs().masked_fill(equal, 0.0).nan_to_num(torch.inf, posinf=torch.inf)
    return off > allowed, float(off.max()) if off.numel() else 0.0, allowed


class Explanation:
    """Every step of one call of multi-head attention, in its own numbers.

    Args:
        name: whose numbers they are.
        expected: the right recipe on these inputs with these weights.
        yours: what the module made of them: a state for every step, or some tensors by field ("p", "output").
        query_labels, key_labels: a word a token; numbers where there are none.
        scale: what the scores are multiplied by; 1 / sqrt(head_dim) unless told.
        faults: what is known to be wrong with it.
        notes: sentences to show with it.
        batch: which sequence is shown first, where nothing differs.
        checked: what `check` said of it, where that was not that it is right.

    Attributes:
        steps: an `ExplainedStep` each.
        first: the first step where yours parts from the expected; None where it does not, or is not known.
    """

    def __init__(
        self,
        name: str,
        expected: State,
        yours: State | Mapping[str, Tensor] | None = None,
        *,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        scale: float | None = None,
        faults: Sequence[Named] = (),
        notes: Sequence[str] = (),
        batch: int = 0,
        checked: str | None = None,
    ) -> None:
        self.checked = checked
        self.name, self.expected, self.faults, self.notes = name, expected, tuple(faults), list(notes)
        self.query_labels = None if query_labels is None else list(query_labels)
        self.key_labels = None if key_labels is None else list(key_labels)
        self.scale = expected.head_dim**-0.5 if scale is None else scale
        self.yours = fields_of(yours) if isinstance(yours, State) else dict(yours or {})
        self.fields = fields_of(expected)
        B = expected.query.shape[0]
        self.masks = [in_words(expected.given.mask, b) for b in range(B)]
        self.steps: tuple[ExplainedStep, ...] = tuple(steps_of(expected, self.scale, self.masks))
        self.allowed: dict[str, float] = {}  # by field: differences up to this are none
        self.first: ExplainedStep | None = None
        self.batch, self.head = batch, 0
        for step in self.steps:
            self._compare(step)

    def _compare(self, step: ExplainedStep) -> None:
        if step.key == "weigh":  # not kept for every query: it differs where what it is made of does
            before = [one.status for one in self.steps if one.key in ("split", "softmax")]
            seen = {"p", "v"} <= set(self.yours)
            step.status = "unseen" if not seen else "after" if {"first", "after"} & set(before) else "same"
            return
        step.expected = {name: self.fields[name] for name in step.fields}
        step.yours = {name: self.yours[name] for name in step.fields if name in self.yours}
        wrong = False
        for name, yours in step.yours.items():
            where, error, self.allowed[name] = differing(self.fields[name], yours)
            step.error = max(error, step.error or 0.0)
            if not bool(where.any()):
                continue
            wrong = True
            if self.first is None:  # begin where there is something to see
                place = where.nonzero()[0].tolist()
                self.batch = place[0]
                self.head = place[1] if where.ndim == 4 else 0
                self.first = step
        if step.yours:
            step.status = "same" if not wrong else "first" if self.first is step else "after"

    @property
    def verdict(self) -> str:
        """What came of the comparison, in a sentence or two; never more than `check` says."""
        said = self._compared()
        if self.first is not None or self.checked is None:
            return said
        checked = self.checked.rstrip(".")
        return f"In these numbers nothing differs, and yet headwise check says: {checked}. {said}"

    def _compared(self) -> str:
        number = {step.key: i for i, step in enumerate(self.steps)}
        if self.first is None:
            known = [step for step in self.steps if step.error is not None]
            if not known:
                return "These are the expected numbers; there is nothing to compare them with."
            error = max(step.error or 0.0 for step in known)
            equal = "exactly" if error == 0 else f"to {error:.0e}"
            if len(known) > 2:
                which = "Every step" if self.checked is None else "Every step that is shown"
                return f"{which} of {self.name} equals the expected numbers, {equal}."
            which = "The weights and the output" if len(known) == 2 else "The output"
            return f"{which} of {self.name} equal{'s' * (len(known) == 1)} the expected numbers, {equal}."
        step = self.first
        text = f"{self.name} parts from the expected numbers at step {number[step.key]}, {step.title!r}"
        unseen = [one for one in self.steps[: number[step.key]] if one.status == "unseen"]
        return text + ("; the steps before it could not be seen." if unseen else ".")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that needs nothing else: all of it or, where anything goes wrong, nothing.

        Raises:
            ArgumentError: not .html; no such folder, or one that cannot be written to.
        """
        from ...show.offline_pages import save_page
        from .page import EXAMPLE, page

        return save_page(page(self), path, EXAMPLE)

    def _repr_html_(self) -> str:
        from ...show.offline_pages import framed
        from .page import page

        return framed(page(self), "headwise explain", height=760, scripts=True)

    def text(self, batch: int | None = None, head: int | None = None, width: int = 110) -> str:
        """All steps as text, for one sequence and one head.

        Raises:
            PackageMissing: rich is not installed.
            IndexError: no such sequence or head.
        """
        from .page import as_text

        return as_text(self, batch, head, width)

    def print(self, batch: int | None = None, head: int | None = None) -> None:
        """The same on the terminal, in colour."""
        from .page import to_terminal

        to_terminal(self, batch, head)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        B, T, _ = self.expected.query.shape
        S, H = self.expected.key.shape[1], self.expected.num_heads
        return f"Explanation(B={B}, T={T}, S={S}, H={H}: {self.verdict})"
