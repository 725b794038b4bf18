"""The steps of one call: the mask in words, the maps of every step, and a step for every design.

A design changes fields that an earlier step made. Every value of a field is shown: `q` as the scores use it,
and `q@0` as it was split, before a norm or a rotation.

Letters: B batch, T query_len, S key_len, E d_model, H num_heads, Hk different heads of keys and values,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..recipe import Change, Design, State, Weights

POLARITY = (
    "Here True (or 1) means: may attend. Boolean masks of torch.nn.MultiheadAttention say the opposite, "
    "True = may not attend."
)


@dataclass(frozen=True)
class MaskWords:
    """The mask of one sample."""

    words: tuple[str, ...]
    later: int | None = None  # keys after query + later are hidden as future keys
    padding: tuple[int, ...] = ()  # keys hidden from every query


def in_words(mask: Tensor | None, sample: int) -> MaskWords:
    """Return what the mask of one sample hides, in words.

    Args:
        mask: bool [B, T, S], True = may attend; None hides nothing.

    Example:
        >>> in_words(torch.ones(1, 3, 3).tril().bool(), 0).words[0]
        'Causal: a query attends to the keys up to its own position; later keys are hidden.'
    """
    if mask is None:
        return MaskWords(("There is no mask: every query attends to every key.",))
    visible = mask[sample]  # [T, S]
    T, S = visible.shape
    if bool(visible.all()):
        return MaskWords(("The mask hides nothing: every query attends to every key.",))
    padding = tuple(int(s) for s in (~visible).all(0).nonzero().flatten())
    later = _later(visible, padding)
    words, described = [], torch.zeros(T, S, dtype=torch.bool)
    if later is not None:
        described |= _beyond(T, S, later)
        place = "its own position" if later == 0 else f"position query {later:+d}"
        words.append(f"Causal: a query attends to the keys up to {place}; later keys are hidden.")
    if padding:
        described[:, list(padding)] = True
        words.append(f"{_numbered('Key', padding)} hidden from every query, like padding.")
    others = int((~visible & ~described).sum())
    if others:
        more, many = "more " if words else "", others > 1
        pairs = f"{others} {more}pair{'s' * many} of query and key {'are' if many else 'is'} hidden"
        words.append(f"{pairs} by the mask.")
    empty = tuple(int(t) for t in (~visible).all(1).nonzero().flatten())
    if empty:
        words.append(f"{_numbered('Query', empty)} left without a visible key.")
    words.append(f"In all, {int((~visible).sum())} of {T * S} pairs are hidden.")
    return MaskWords(tuple(words), later, padding)


def _later(visible: Tensor, padding: tuple[int, ...]) -> int | None:
    """Return the offset of a causal mask (last or first query and key aligned); None if not causal."""
    T, S = visible.shape
    real = torch.ones(S, dtype=torch.bool)
    real[list(padding)] = False
    for offset in dict.fromkeys((S - T, 0)):
        beyond = _beyond(T, S, offset)
        edge = _beyond(T, S, offset - 1) & ~beyond
        hides_later = bool((beyond & real).any()) and not bool((visible & beyond).any())
        if hides_later and bool((visible & edge).any()):
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
    """One heat map: a field, and the meaning of its rows and columns.

    Args:
        field: the tensor's name in `ExplainedStep.expected`.
        name: the name on the page.
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
    """The operands and the result of a computation."""

    result: Map
    operands: tuple[Map, ...] = ()


@dataclass(eq=False)
class ExplainedStep:
    """One step of multi-head attention with its numbers.

    Attributes:
        expected: the right numbers, by field.
        yours: the numbers of the module, by field, where they are known.
        status: "same", "first" (the first difference), "after" (after the first difference) or "unseen".
        error: the largest difference; None if `yours` is unknown.
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
        """The tensors that this step computes."""
        return tuple(flow.result.field for flow in self.flows)


def fields_of(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state by name, without those that were not computed."""
    values = {name: getattr(state, name, None) for name in PLAIN}
    values |= dict(zip(PROJECTED, getattr(state, "projected", ()), strict=False))
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for name, earlier in _earlier(state).items():
        tensors |= {f"{name}@{at}": value for at, value in enumerate(earlier)}
        for at, (change, value) in enumerate(zip(_changes(state, name), earlier, strict=True)):
            if change.design.key == "position bias":
                later = (*earlier, tensors[name])[at + 1]
                tensors[f"bias@{at}"] = (later - value).nan_to_num(0.0)  # NaN: hidden before and after
    return tensors


def _changes(state: State, name: str) -> list[Change]:
    return [change for change in state.changes if name in change.before]


def _earlier(state: State) -> dict[str, list[Tensor]]:
    """Return the values of each field before each design that changed it."""
    names = dict.fromkeys(name for change in state.changes for name in change.before)
    return {name: [change.before[name] for change in _changes(state, name)] for name in names}


# Heads that share keys and values


def key_heads(weights: Weights, num_heads: int) -> tuple[int, ...]:
    """Return which key/value head each query head uses: 0, 0, 1, 1 if two heads share each."""
    held = (weights.k, weights.k_bias[:, None], weights.v, weights.v_bias[:, None])
    if any(len(tensor) % num_heads for tensor in held):
        return tuple(range(num_heads))
    heads = torch.cat([tensor.unflatten(0, (num_heads, -1)).flatten(1) for tensor in held], 1)  # [H, ...]
    different: list[Tensor] = []
    uses = []
    for head in heads:
        same = next((at for at, tensor in enumerate(different) if torch.equal(tensor, head)), len(different))
        different += [head] if same == len(different) else []
        uses.append(same)
    return tuple(uses)


def of_key_heads(x: Tensor, uses: Sequence[int]) -> Tensor:
    """Return each different head once: [..., H * D] -> [..., Hk * D]."""
    first = torch.tensor([uses.index(head) for head in range(max(uses) + 1)])
    return x.unflatten(-1, (len(uses), -1)).index_select(-2, first).flatten(-2)


def are_shared(x: Tensor, uses: Sequence[int]) -> bool:
    """Return True if heads with the same key/value head have the same numbers."""
    if x.shape[-1] % len(uses):
        return False
    heads = x.unflatten(-1, (len(uses), -1))
    return all(
        torch.equal(heads[..., at, :], heads[..., uses.index(head), :]) for at, head in enumerate(uses)
    )


# The steps


class Drawn(NamedTuple):
    """The key, title and formula of the step of a design."""

    key: str
    title: str
    formula: str


NORM = "{0} = ({1} − mean) ÷ √(variance + ε) · gain + bias, along the channels of each token"
RMS = "{0} = {1} ÷ √(mean of squares + ε) · gain, along the channels of each token"
GROUPS = "{0} = ({1} − mean) ÷ √(variance + ε) · gain + bias, along the tokens and the channels of each group"
DESIGNS = {
    "norm before": Drawn("norm", "Normalise the inputs", NORM),
    "latent": Drawn("narrow", "Project to fewer channels", "{0} = {1} · W_downᵀ + b_down"),
    "query-key norm": Drawn("qk-norm", "Normalise queries and keys", NORM),
    "unit": Drawn("unit", "Queries and keys of length 1", "{0} = {1} ÷ |{1}|"),
    "rope": Drawn(
        "rotate",
        "Rotate queries and keys by position",
        "at position t each pair of channels (a, b) becomes (a·cos tθ − b·sin tθ, a·sin tθ + b·cos tθ)",
    ),
    "position bias": Drawn("bias", "Add a bias by position", "{0}[t, s] = {1}[t, s] + bias[t, s]"),
    "talking heads": Drawn(
        "mix-heads", "Mix the heads", "each head of {0} = a sum of all heads of {1}, by a matrix"
    ),
    "gate": Drawn(
        "gate",
        "Gate: multiply each channel by a factor from 0 to 1",
        "{0} = {1} · sigmoid(query · W_gateᵀ + b_gate)",
    ),
    "window": Drawn("window", "Hide by position", "{0}[t, s] = {1}[t, s] inside the window, else −∞"),
    "residual": Drawn("residual", "Residual connection: add the input", "{0} = {1} + {2}"),
    "norm after": Drawn("norm-after", "Normalise the output", NORM),
}
MAPS = {  # of fields that designs change: name on the page, rows, columns
    "query": ("query", "query", "feature"),
    "key": ("key", "key", "feature"),
    "value": ("value", "key", "feature"),
    "q": ("q", "query", "channel"),
    "k": ("k", "key", "channel"),
    "scaled": ("scaled", "query", "key"),
    "p": ("weights p", "query", "key"),
    "joined": ("concat", "query", "width"),
    "output": ("output", "query", "feature"),
}
AFTER = {  # the step that makes such a field
    "query": "inputs", "key": "inputs", "value": "inputs", "q": "split", "k": "split", "scaled": "scale",
    "p": "softmax", "joined": "concat", "output": "output",
}  # fmt: skip


class _Maps:
    """The map of each field that designs change, before and after each of them."""

    def __init__(self, state: State) -> None:
        self.state, self.earlier = state, _earlier(state)

    def at(self, field: str, stage: int) -> Map:
        """Return the map after this many designs."""
        name, rows, columns = MAPS[field]
        last = stage == len(self.earlier.get(field, ()))
        return Map(field if last else f"{field}@{stage}", name + "′" * stage, rows, columns)

    def first(self, field: str) -> Map:
        """Return the map before any design."""
        return self.at(field, 0)

    def last(self, field: str) -> Map:
        """Return the map after all designs."""
        return self.at(field, len(self.earlier.get(field, ())))


def _of_design(change: Change, maps: _Maps, itself: bool) -> ExplainedStep:
    """Return the step of a design."""
    state, design = maps.state, change.design
    drawn = DESIGNS[design.key]
    fields = list(change.before)
    if itself and {"query", "key", "value"} <= change.before.keys():
        fields = ["query"]
    flows = []
    for name in fields:
        stage = next(at for at, each in enumerate(_changes(state, name)) if each is change)
        operands = [maps.at(name, stage)]
        if design.key == "position bias":
            operands.append(Map(f"bias@{stage}", "bias", "query", "key"))
            flows.append(Flow(operands[-1]))
        if design.key == "residual":
            if design.numbers.get("projected"):
                operands.append(Map(PROJECTED[0], "Q", "query", "width"))
            else:
                operands.append(maps.last("query") if design.numbers["normed"] else maps.first("query"))
        flows.append(Flow(maps.at(name, stage + 1), tuple(operands)))
    formula = RMS if drawn.formula is NORM and _is_rms(design) else drawn.formula
    formula = GROUPS if design.numbers.get("groups") else formula
    first = flows[-1] if len(fields) == 1 else flows[0]
    shape = list(fields_of(state)[first.result.field].shape)
    return ExplainedStep(
        drawn.key, drawn.title,
        formula.format(first.result.name, *(each.name for each in first.operands)),
        f"This module has {design.words}.", (f"{first.result.name}: {shape}",), tuple(flows),
    )  # fmt: skip


def _is_rms(design: Design) -> bool:
    return any(bool(number) for name, number in design.numbers.items() if name.endswith("rms"))


def steps_of(
    state: State, scales: Sequence[float], masks: list[MaskWords], uses: Sequence[int]
) -> list[ExplainedStep]:
    """Return all steps of one call, without their numbers.

    Args:
        state: the state of the call.
        scales: the factor of the scores of each head.
        masks: the mask of each sample in words.
        uses: the key/value head of each query head.
    """
    maps = _Maps(state)
    itself = state.inputs.query is state.inputs.key and state.inputs.key is state.inputs.value
    steps: list[ExplainedStep] = []
    for step in _plain_steps(state, scales, masks, uses, maps, itself):
        steps.append(step)
        steps += [
            _of_design(change, maps, itself)
            for change in state.changes
            if change.before and AFTER[next(iter(change.before))] == step.key
        ]
    for at, step in enumerate(steps):  # keys are unique even with two norms
        before = sum(earlier.key.partition("-and-")[0] == step.key for earlier in steps[:at])
        step.key += f"-and-{before + 1}" if before else ""
    return steps


def _plain_steps(
    state: State,
    scales: Sequence[float],
    masks: list[MaskWords],
    uses: Sequence[int],
    maps: _Maps,
    itself: bool,
) -> list[ExplainedStep]:
    B, T, E = state.inputs.query.shape
    S, H, D, Dv = state.key.shape[1], state.num_heads, state.q.shape[-1], state.v.shape[-1]
    Hk = max(uses) + 1
    scaling = _scaling(state, scales, D)
    masked = state.inputs.mask is not None
    windowed = any(change.design.key == "window" for change in state.changes)
    x = [maps.last(name) for name, _ in _SIDES]
    projected = [Map(PROJECTED[i], "QKV"[i], rows, "width") for i, (_, rows) in enumerate(_SIDES)]
    weights = [Map(f"w_{name}", f"W_{name}", "width", "feature") for name in "qkv"]
    q, k, v = maps.last("q"), maps.last("k"), Map("v", "v", "key", "channel")
    scores, hidden = (Map(name, name, "query", "key") for name in ("scores", "hidden"))  # [B, H, T, S] each
    scaled = maps.last("scaled")
    shares = replace(maps.first("p"), colour="share")  # each row adds up to 1, before heads are mixed
    p = maps.last("p") if maps.last("p") != maps.first("p") else shares
    heads, joined = Map("heads", "head output", "query", "channel"), maps.last("joined")
    pairs, per_head = f"[B, H, T, S] = {[B, H, T, S]}", f"[B, H, T, D] = {[B, H, T, D]}"
    inputs = [maps.first(name) for name, _ in _SIDES]
    inputs = [replace(inputs[0], name="x")] if itself else inputs
    shared = "" if Hk == H else f", which share {Hk} of keys and values"
    n_k, use = "H" if Hk == H else "Hk", ", ".join(map(str, uses))
    return [
        ExplainedStep(
            "inputs", "Inputs", "query = key = value = x" if itself else "query, key, value",
            f"Self-attention: {T} tokens, each a row of {E} numbers, are queries, keys and values."
            if itself else
            f"{T} queries attend to {S} keys; each key has a value. Each row is one token, with {E} numbers.",
            (f"x: [B, T, E] = {[B, T, E]}",) if itself else (
                f"query: [B, T, E] = {[B, T, E]}", f"key, value: [B, S, E] = {[B, S, E]}",
            ),
            tuple(Flow(each) for each in inputs),
        ),
        ExplainedStep(
            "project", "Project to queries, keys and values",
            "      ".join(f"{Q} = {x[i].name} · W_{Q.lower()}ᵀ + b_{Q.lower()}" for i, Q in enumerate("QKV")),
            "Three learned matrices map each token to a query (Q), a key (K) and a value (V). Each number is "
            "the dot product of a row of the input with a row of the weight, plus a bias.",
            (f"Q: [B, T, H·D] = {[B, T, H * D]}", f"K: [B, S, {n_k}·D] = {[B, S, Hk * D]}",
             f"V: [B, S, {n_k}·D] = {[B, S, Hk * Dv]}"),
            tuple(Flow(out, (left, right)) for out, left, right in zip(projected, x, weights, strict=True)),
        ),
        ExplainedStep(
            "split", f"Split into {H} head{'s' * (H > 1)}{shared}",
            "view(B, T, H, D).transpose(1, 2):   q[b, h, t, d] = Q[b, t, h·D + d]",
            f"Nothing is computed. Head h takes the channels h·{D} to h·{D} + {D - 1} of every token: the "
            "channels are split, not the tokens."
            + (f" K and V have {Hk} heads; heads 0 to {H - 1} use those numbered {use}." if shared else ""),
            (f"Q [B, T, H·D] = {[B, T, H * D]} → q {per_head}",
             (f"K [B, S, Hk·D] = {[B, S, Hk * D]} → k " if shared else "k: ")
             + f"[B, H, S, D] = {[B, H, S, D]}"),
            tuple(
                Flow(out, (operand,))
                for out, operand in zip((maps.first("q"), maps.first("k"), v), projected, strict=True)
            ),
        ),
        ExplainedStep(
            "score", "Score: every query against every key",
            f"scores[t, s] = Σ_d {q.name}[t, d] · {k.name}[s, d]        ({q.name} · {k.name}ᵀ)",
            "The dot product of each query with each key: a key with a larger score gets more weight.",
            (f"{per_head} · [B, H, D, S] = {[B, H, D, S]} → {pairs}",), (Flow(scores, (q, k)),),
        ),
        ExplainedStep(
            "scale", scaling.title, scaling.formula, scaling.words, (pairs,),
            (Flow(maps.first("scaled"), (scores,)),),
        ),
        ExplainedStep(
            "mask", "Mask: hide keys" if masked else
            f"Mask: nothing {'more ' * windowed}is hidden",
            f"hidden[t, s] = {scaled.name}[t, s] where query t may attend to key s, else −∞",
            f"exp(−∞) = 0, so a hidden pair gets weight 0. {POLARITY}" if masked else
            "There is no mask except the window." if windowed else masks[0].words[0],
            (f"mask: [B, 1, T, S] = {[B, 1, T, S]}, the same for every head", pairs) if masked else (pairs,),
            (Flow(hidden, (scaled, Map("mask", "mask", "query", "key", "mask")) if masked else (scaled,)),),
        ),
        ExplainedStep(
            "softmax", "Softmax: scores become weights",
            "p[t, s] = exp(hidden[t, s]) / Σ_j exp(hidden[t, j])",
            "Over the keys of each row: the weights are between 0 and 1, and those of a query sum to 1.",
            (f"{pairs}, softmax over the last, S",), (Flow(shares, (hidden,)),),
        ),
        ExplainedStep(
            "weigh", "Weigh: each value times its weight",
            "weighted[s, d] = p[t, s] · v[s, d]        (for one query t)",
            "For one query: the value of each key times the query's weight for that key. The sum of its rows "
            "is the query's row in the next step.",
            (f"for one query: [S, D] = {[S, Dv]}",),
            (Flow(Map("weighted", "weighted values", "key", "channel"), (p, v)),),
        ),
        ExplainedStep(
            "heads", "Each head's output", "head[t, d] = Σ_s p[t, s] · v[s, d]        (p · v)",
            "The output of this head for each query: the mean of all values, weighted by its weights.",
            (f"{pairs} · [B, H, S, D] = {[B, H, S, Dv]} → [B, H, T, D] = {[B, H, T, Dv]}",),
            (Flow(heads, (p, v)),),
        ),
        ExplainedStep(
            "concat", "Concatenate the heads",
            "transpose(1, 2).reshape(B, T, H·D):   concat[t, h·D + d] = head_h[t, d]",
            f"Nothing is computed. The outputs of the {H} heads for a query are concatenated, head 0 first. "
            "The transpose comes before the reshape; otherwise tokens would be mixed.",
            (f"[B, H, T, D] = {[B, H, T, Dv]} → [B, T, H·D] = {[B, T, H * Dv]}",),
            (Flow(maps.first("joined"), (heads,)),),
        ),
        ExplainedStep(
            "output", "Output projection", "output = concat · W_oᵀ + b_o",
            "The last matrix mixes the outputs of the heads, which are independent up to this step.",
            (f"[B, T, H·D] = {[B, T, H * Dv]} → [B, T, E] = {[B, T, state.weights.o.shape[0]]}",),
            (Flow(maps.first("output"), (joined, Map("w_o", "W_o", "feature", "width"))),),
        ),
    ]  # fmt: skip


_SIDES = (("query", "query"), ("key", "key"), ("value", "key"))  # input, and what its rows are


class _Scaling(NamedTuple):
    title: str
    formula: str
    words: str


def _scaling(state: State, scales: Sequence[float], D: int) -> _Scaling:
    usual = all(abs(scale * D**0.5 - 1) < 1e-12 for scale in scales)
    if usual:
        return _Scaling(
            f"Scale: divide by √{D}",
            f"scaled = scores ÷ √{D}        (√D, D = {D} channels per head)",
            f"A sum of {D} products is about √{D} times as large as one product. Without the division "
            "the softmax would put nearly all weight on one key, and its gradient would be nearly zero. D is "
            "the width of a head, not of the model.",
        )
    numbers = [f"{scale:.6g}" for scale in scales]
    by, title = f"× {numbers[0]}", f"Scale: multiply by {numbers[0]}"
    if len(set(numbers)) > 1:
        by, title = "× scale[h]", "Scale: a different number for each head"
    elif numbers[0] == "1":
        title = "Scale: none"
    own = [change.design.words for change in state.changes if change.design.key == "own scale"]
    words = f"This module has {own[0]}." if own else (
        f"Most modules divide by √{D}, the root of the width of a head. This one has a different scale."
    )  # fmt: skip
    if len(set(numbers)) > 1:
        words += f" Heads 0 to {len(numbers) - 1}: {', '.join(numbers)}."
    return _Scaling(title, f"scaled = scores {by}", words)
