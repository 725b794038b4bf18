"""Recognition of designs by their numbers: norms, residual connections, rotations, position biases, gates.

Norms around the attention are recorded in one call and then replaced by the identity; the rest is examined as
plain attention. A residual connection is what comes out when the output projection is zero.

Designs inside the attention show in the scores before the softmax. These are c q.k + b: their differences
from sample to sample give c, the rest is a bias by position, and keys far below the others are hidden. If q.k
does not explain them, pairs of channels may be rotated by position: neighbouring positions give the angles.

Letters: B batch, T query_len, S key_len, E width, H num_heads, D head_dim, L one length for both.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import recipe
from ..faults import FAULTS
from ..recipe import (
    EVERY,
    Design,
    ProbeInputs,
    State,
    Weights,
    normed,
    pairs,
    steps_of,
    turned,
    without_modes,
)
from .call_record import CallRecord, Norm, bypassed_norms, equal_tensors, record_call, record_scores
from .caller import QKV, Caller, inputs_for
from .constructor import source_of
from .environment import CAUGHT
from .latent import find_latent
from .projections import NEARLY, Projections, error_of, find_roles
from .subject import attributes_of

FAVOURED = "; it gives larger scores to keys that are farther away"
QUERIES_ADDED = "a residual connection: the projected queries are added to the output of the heads"
FAR = 1e3  # a score this much below the others is hidden


def recognise_designs(
    caller: Caller,
    causal: Tensor | None,
    projections: Projections,
    roles: dict[str, str] | None,
    texts: Sequence[str] | None = None,
) -> tuple[Projections, list[Design]]:
    """Return the projections, found again with the designs inside the module, and these designs.

    Args:
        causal: bool [L, L], the mask that the code always applies, if any.
        texts: the source, whose numbers may be the base of a wrong rotation; None if the code was called with
            a rotation of ours, so that it has none of its own.
    """
    L = caller.subject.sizes.long
    inputs = inputs_for(caller, L, L, seed=30)
    try:
        record = record_call(caller, inputs)
    except CAUGHT:
        return projections, []
    latent = find_latent(caller, record, inputs)
    if isinstance(latent, str):
        return replace(projections, weights=None, unjudged=latent), []
    before = [norm for norm in record.norms if any(equal_tensors(norm.input, x) for x in inputs)]
    after = [norm for norm in record.norms if norm not in before]
    after = [norm for norm in after if equal_tensors(norm.output, record.output)][-1:]
    mask = None if causal is None else causal.expand(len(inputs[0]), L, L)
    if latent is not None:
        return _behind_latent(caller, *latent, record, ProbeInputs(*inputs, mask))
    with bypassed_norms([*before, *after]):
        try:
            bare = caller.call(*inputs).output.detach().double()
        except CAUGHT:
            return projections, []

        def look_again(designs: Sequence[Design] = ()) -> Projections:
            """Return the projections that explain the rest of the output, with these designs inside."""
            return find_roles(caller, [(ProbeInputs(*inputs, mask), bare)], roles, steps_of(designs))

        try:
            inner = look_again()
            silent = _silenced(caller, inner, inputs)
        except CAUGHT:
            return projections, []
        added = silent is not None and equal_tensors(silent, inputs[0])
        if added:
            bare = bare - inputs[0]
            inner = look_again()
        queries = None if added or inner.proven else _queries_added(caller, inner, inputs)
        if queries is not None:
            bare = bare - queries
            inner = look_again()
        inside: list[Design] = []
        if not inner.proven and inner.weights is not None:
            inside = _designs_inside(caller, inner, inputs, causal is not None)
            if inside:
                inner = look_again(inside)
                if not inner.proven:
                    inner, inside = _with_rotated_values(inner, inside, look_again)
            elif texts is not None:
                inside = _wrong_rotation(caller, inner, inputs, texts)
                inner = look_again(inside) if inside else inner
        if not inner.proven and not inside and inner.weights is not None:
            inside = _talking_heads(caller, inner, inputs)
            inner = look_again(inside) if inside else inner
        if not inner.proven and inner.weights is not None:
            for gate in _gates(caller, inner, inputs, record):
                gated = look_again([*inside, gate])
                if gated.proven:
                    inner, inside = gated, [*inside, gate]
                    break
    shell = _designs_around(before, after, added, inputs)
    _far_keys_favoured(caller, inner, inside)
    designs = [*(design for design in shell if design.key == "norm before"), *inside]
    designs += [design for design in shell if design.key != "norm before"]
    if queries is not None:
        designs.append(Design("residual", QUERIES_ADDED, {"normed": 0.0, "projected": 1.0}))
    if not designs or inner.weights is None:
        return projections, []
    for design in designs:
        if design.key == "residual" and before and queries is None:
            _set_residual_kind(design, designs, _silenced(caller, inner, inputs), inputs[0])
    off = error_of(
        inner.weights, inner.num_heads, [(ProbeInputs(*inputs, mask), record.output)], steps_of(designs)
    )
    return replace(inner, proven=off <= NEARLY), designs


def _behind_latent(
    caller: Caller, projections: Projections, latent: Design, record: CallRecord, probe: ProbeInputs
) -> tuple[Projections, list[Design]]:
    """Return the projections and designs behind the narrow layers of latent attention."""
    inputs = probe[:3]
    designs = [latent, *_designs_inside(caller, projections, inputs, probe.mask is not None, [latent])]
    assert projections.weights is not None
    off = error_of(projections.weights, projections.num_heads, [(probe, record.output)], steps_of(designs))
    return replace(projections, proven=off <= NEARLY), designs


def _queries_added(caller: Caller, inner: Projections, inputs: QKV) -> Tensor | None:
    """Return the projected queries if they are the output when the values are zero, else None."""
    if inner.weights is None or inner.guess is None or inner.guess.weights.get("o"):
        return None
    values = {piece.name for piece in inner.guess.weights.get("v", [])}
    if any(piece.name in values for role in "qk" for piece in inner.guess.weights.get(role, [])):
        return None  # with fused weights the queries would be zero as well
    queries = _state(inner.weights, inner.num_heads, inputs).projected[0]
    silent = _silenced(caller, inner, inputs, "v")
    return queries if silent is not None and equal_tensors(silent, queries) else None


def _silenced(caller: Caller, inner: Projections, inputs: QKV, role: str = "o") -> Tensor | None:
    """Return the output when one projection is zero, or None if it has no parameters."""
    guess = inner.guess
    names = {
        piece.name
        for kind in ((guess.weights, guess.biases) if guess is not None else ())
        for piece in kind.get(role, [])
    }
    if not names:
        return None
    parameters = [caller.subject.parameters[name] for name in names]
    values = [tensor.detach().clone() for tensor in parameters]
    try:
        with torch.no_grad():
            for tensor in parameters:
                tensor.zero_()
            return caller.call(*inputs).output.detach().double().clone()
    finally:
        with torch.no_grad():
            for tensor, value in zip(parameters, values, strict=True):
                tensor.copy_(value)


def measure_designs(
    caller: Caller, causal: Tensor | None, weights: Weights, H: int, T: int, S: int
) -> list[Design] | None:
    """Return the designs with the numbers of this module, for T queries and S keys; None if not found.

    Args:
        causal: bool [L, L], the mask that the code always applies, if any.
        weights: the projections.
    """
    L = caller.subject.sizes.long
    with torch.no_grad():
        inputs = inputs_for(caller, L, L, seed=30)
        probe = ProbeInputs(*inputs, None if causal is None else causal.expand(len(inputs[0]), L, L))
        truth = [(probe, caller.call(*inputs).output.detach().double())]
    projections, designs = recognise_designs(caller, causal, find_roles(caller, truth, None), None)
    if not designs or projections.weights is None:
        return None
    placed = [design for design in designs if design.key == "position bias" or "seen" in design.tensors]
    if placed:
        inputs = inputs_for(caller, T, S, seed=33)
        scores = record_scores(caller, inputs)[1]
        state = _state(weights, H, inputs, [design for design in designs if design not in placed])
        fitted = None if scores is None else fit(scores, state.q @ state.k.mT)
        if fitted is None:
            return None
        for design in placed:
            key, value = ("seen", fitted.visible) if "seen" in design.tensors else (f"{T} x {S}", fitted.bias)
            design.tensors[key] = value
    return designs


def _designs_around(before: list[Norm], after: list[Norm], added: bool, inputs: QKV) -> list[Design]:
    """Return the designs of norms and the residual connection around the attention.

    A residual connection or a norm of the output is a design only beside another of them.
    """
    made: list[Design] = []
    if before:
        slots = {
            name: float(any(equal_tensors(norm.input, x) for norm in before))
            for name, x in zip(("query", "key", "value"), inputs, strict=True)
        }
        for norm in before[:1]:
            which = "the input" if all(slots.values()) else _slot_names(slots)
            words = f"a {norm.word} of {which}"
            made.append(Design("norm before", words, {**norm.numbers(), **slots}, norm.tensors()))
        for norm in before[1:]:  # a norm of its own for keys and values
            own = {
                name: float(equal_tensors(norm.input, x) and not equal_tensors(before[0].input, x))
                for name, x in zip(("query", "key", "value"), inputs, strict=True)
            }
            if any(own.values()):
                for name, on in own.items():
                    made[0].numbers[name] = 0.0 if on else made[0].numbers[name]
                words = f"a {norm.word} of {_slot_names(own)}"
                made.append(Design("norm before", words, {**norm.numbers(), **own}, norm.tensors()))
    if added and (before or after):
        made.append(Design("residual", "a residual connection: the input is added", {"normed": 0.0}))
    if after and (before or added):
        norm = after[0]
        made.append(Design("norm after", f"a {norm.word} of the output", norm.numbers(), norm.tensors()))
    return made


def _slot_names(slots: dict[str, float]) -> str:
    return "the " + " and the ".join(name for name, on in slots.items() if on)


def _set_residual_kind(residual: Design, designs: list[Design], silent: Tensor | None, query: Tensor) -> None:
    """Set whether the input is added as it is or after the norm, by the output without attention."""
    first = next(each for each in designs if each.key == "norm before")
    behind = normed(query, first) if first.numbers["query"] else query
    for each in designs:
        behind = normed(behind, each) if each.key == "norm after" else behind
    if silent is not None and equal_tensors(silent, behind) and not equal_tensors(query, behind):
        residual.numbers["normed"], residual.words = (
            1.0,
            "a residual connection: the normalised input is added",
        )


@dataclass(eq=False)
class Fit:
    """Scores that are scale q.k + bias where they are visible."""

    scale: Tensor  # [H]
    bias: Tensor  # [H, T, S], up to a number per row
    visible: Tensor  # bool [T, S]


@without_modes
def fit(scores: Tensor, products: Tensor) -> Fit | None:
    """Fit scores [B, H, T, S] as scale q.k + bias; return None if they are not of that form."""
    if scores.shape != products.shape or scores.shape[0] < 2:
        return None
    top = scores.nan_to_num(-torch.inf).amax(-1, keepdim=True)
    hidden = ~scores.isfinite() | (scores < top - FAR)
    visible = ~hidden[0, 0]
    if not torch.equal(hidden, hidden[:1, :1].expand_as(hidden)) or not bool(visible.any(-1).all()):
        return None
    count = visible.sum(-1, keepdim=True)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(visible, x, 0.0)
        return torch.where(visible, x - x.sum(-1, keepdim=True) / count, 0.0)

    c, s = centred(scores), centred(products)
    dc, ds = c - c.mean(0), s - s.mean(0)
    scale = (dc * ds).sum((0, 2, 3)) / ds.square().sum((0, 2, 3)).clamp_min(1e-30)  # [H]
    off = (dc - scale[:, None, None] * ds).abs().max() / dc.abs().max().clamp_min(1e-30)
    if not float(off) <= NEARLY:
        return None
    bias = (c - scale[:, None, None] * s).mean(0)
    if float(bias.abs().max()) <= NEARLY * float(c.abs().max()):
        return Fit(scale, torch.zeros_like(bias), visible)
    whole = torch.where(visible, scores - scale[:, None, None] * products, 0.0)
    if float((whole - whole[:1]).abs().max()) <= NEARLY * float(
        c.abs().max()
    ):  # no row maximum was subtracted
        bias = whole.mean(0)
    return Fit(scale, bias, visible)


def _state(weights: Weights, H: int, inputs: QKV, steps: Sequence[Design] = ()) -> State:
    return recipe.run(ProbeInputs(*inputs), weights, H, steps_of(steps))


def _designs_inside(
    caller: Caller, inner: Projections, inputs: QKV, causal: bool, outer: Sequence[Design] = ()
) -> list[Design]:
    """Return the designs between the projections and the softmax.

    Args:
        outer: designs before the projections.
    """
    try:
        record, scores = record_scores(caller, inputs)
    except CAUGHT:
        return []
    if scores is None:
        return []
    H = inner.num_heads
    unique: list[Weights] = []
    for candidate in [inner.weights, *inner.tried]:
        if candidate is not None and not any(
            torch.equal(candidate.q, w.q) and torch.equal(candidate.k, w.k) for w in unique
        ):
            unique.append(candidate)
    for weights in unique[:8]:
        try:
            state = _state(weights, H, inputs, outer)
        except (RuntimeError, ValueError, IndexError):
            continue
        q, k = state.q, state.k
        norm = _query_key_norm(record, state)
        if norm is not None:
            state = _state(weights, H, inputs, [*outer, norm])
            q, k = state.q, state.k
        first = [norm] if norm is not None else []
        fitted = fit(scores, q @ k.mT)
        if fitted is not None:
            return first + _position_designs(caller, weights, H, fitted, causal, [*outer, *first])
        rope = _rope(scores, q, k)
        if rope is not None:
            fitted = fit(scores, turned(q, rope) @ turned(k, rope).mT)
            if fitted is not None:
                first = [*first, rope]
                return first + _position_designs(caller, weights, H, fitted, causal, [*outer, *first])
        for axis, words in UNITS.items():
            fitted = fit(scores, normalize(q, dim=axis) @ normalize(k, dim=axis).mT)
            if fitted is None:
                continue
            fault = "" if axis == -1 else "normalised over another axis"
            unit = Design("unit", words, {"axis": float(axis)}, fault=fault)
            scale = Design("own scale", "a scale other than 1 / sqrt(d_k)", {}, {"scale": fitted.scale})
            return [
                unit,
                scale,
                *_position_designs(
                    caller, weights, H, replace(fitted, scale=fitted.scale * 0), causal, [*outer, unit]
                ),
            ]
    return []


UNITS = {  # axes of [B, H, T, D]
    -1: "queries and keys of length 1 (cosine attention)",
    -3: "queries and keys normalised over the heads",
    -2: "queries and keys normalised over the positions",
}


def _query_key_norm(record: CallRecord, state: State) -> Design | None:
    """Return the QK-norm: norms whose input was the queries or keys, split into heads or not."""
    made = Design("query-key norm", "", {"wide": 0.0})
    word = ""
    for name, x, wide in (("query", state.q, state.projected[0]), ("key", state.k, state.projected[1])):
        for norm in record.norms:
            split = norm.input.ndim == 4 and any(equal_tensors(norm.input, y) for y in (x, x.transpose(1, 2)))
            if split or (norm.input.shape == wide.shape and equal_tensors(norm.input, wide)):
                made.numbers |= {**norm.numbers(f"{name} "), "wide": float(not split)}
                made.tensors |= norm.tensors(f"{name} ")
                word = norm.word
    if not word:
        return None
    which = [name for name, key in (("queries", "query eps"), ("keys", "key eps")) if key in made.numbers]
    made.words = f"a {word} of {' and '.join(which)} (QK-norm)"
    return made


def _rope(scores: Tensor, q: Tensor, k: Tensor) -> Design | None:
    """Return the rotation of channel pairs by position, fitted to the scores of neighbouring positions."""
    D = q.shape[-1]
    parts = [D] + [
        n for n in dict.fromkeys((D // 2, D // 4, 3 * D // 4, *range(2, min(D, 12), 2))) if 0 < n < D
    ]
    own = (q * k).sum(-1)[..., 1:]  # [B, H, L - 1]
    wanted = (scores.diagonal(-1, -2, -1) - scores.diagonal(0, -2, -1)[..., 1:]).flatten()
    look = wanted.isfinite() & (wanted.abs() < FAR)
    for n in (n for n in parts if n % 2 == 0):
        for first in dict.fromkeys((0, D - n)):
            for neighbours in (0.0, 1.0):
                later, earlier = q[..., 1:, :], k[..., :-1, :]
                turn = slice(first, first + n)
                a, b = pairs(later[..., turn], bool(neighbours))
                c, d = pairs(earlier[..., turn], bool(neighbours))
                rest = (later * earlier).sum(-1) - (later[..., turn] * earlier[..., turn]).sum(-1) - own
                columns = torch.cat([a * c + b * d, a * d - b * c, rest[..., None]], -1).flatten(0, -2)[look]
                if len(columns) < columns.shape[-1]:
                    continue
                answer = torch.linalg.lstsq(columns, wanted[look][:, None]).solution[:, 0]
                off = (columns @ answer - wanted[look]).abs().max() / wanted[look].abs().max()
                if not float(off) <= NEARLY:
                    continue
                theta = torch.atan2(answer[n // 2 : n], answer[: n // 2])
                if float(theta.abs().max()) < 1e-6:
                    continue
                live = (theta.abs() > 1e-9).nonzero().flatten()
                if neighbours:  # leave out pairs at either end that are not rotated
                    first, theta = first + 2 * int(live[0]), theta[int(live[0]) : int(live[-1]) + 1]
                    n = 2 * len(theta)
                numbers = {"channels": float(n), "first": float(first), "neighbours": neighbours}
                made = Design("rope", "", numbers, {"frequencies": theta})
                made.words = _rope_words(theta, n, D, first, bool(neighbours))
                return made
    return None


def _with_rotated_values(
    inner: Projections, inside: list[Design], look_again: Callable[[Sequence[Design]], Projections]
) -> tuple[Projections, list[Design]]:
    """Return the designs with a rotation of the values as well, if that explains the output."""
    turning = [
        replace(design, numbers={**design.numbers, "v": 1.0}) for design in inside if design.key == "rope"
    ]
    if not turning:
        return inner, inside
    turning[0].fault, turning[0].words = "rotation of values", f"{turning[0].words}, of the values as well"
    designs = [turning[0] if design.key == "rope" else design for design in inside]
    again = look_again(designs)
    return (again, designs) if again.proven else (inner, inside)


def _talking_heads(caller: Caller, inner: Projections, inputs: QKV) -> list[Design]:
    """Return talking heads: a matrix [H, H] that mixes the scores or the weights of all heads."""
    try:
        record, scores = record_scores(caller, inputs)
        assert inner.weights is not None
        state = _state(inner.weights, inner.num_heads, inputs)
    except CAUGHT:
        return []
    mixers = _mixers(caller, inner.num_heads)
    if scores is None or not mixers:
        return []
    made = Design("talking heads", "")
    products = state.q @ state.k.mT
    if fit(scores, products) is None:
        before = [
            mixer
            for mixer in mixers
            if _is_uniform(fit(scores, torch.einsum("gh,bhts->bgts", mixer[0], products)))
        ]
        if not before:
            return []
        _keep_mixer(made, "before", before[0])
    p = scores.softmax(-1)
    factors = [factor.double() for factor in record.factors if factor.shape == p.shape]
    for mixer in mixers:
        after = Design("talking heads", "")
        _keep_mixer(after, "after", mixer)
        if any(equal_tensors(factor, recipe.mixed(p, after, "after")) for factor in factors):
            made.tensors |= after.tensors
            break
    which = [words for key, words in (("before", "scores"), ("after", "weights")) if key in made.tensors]
    made.words = f"talking heads: a matrix mixes the {' and the '.join(which)} of all heads"
    return [made] if which else []


Mixer = tuple[Tensor, Tensor | None]  # [H, H] and a bias [H]


def _mixers(caller: Caller, H: int) -> list[Mixer]:
    """Return the parameters [H, H] that could mix heads, and their transposes, with and without bias."""
    own = {name: tensor.detach().double() for name, tensor in caller.subject.parameters.items()}
    mixers: list[Mixer] = []
    for name, weight in own.items():
        if H < 2 or weight.numel() != H * H or weight.squeeze().shape != (H, H):
            continue
        bias = own.get(re.sub(r"weight$", "bias", name)) if name.endswith("weight") else None
        for matrix in (weight.squeeze(), weight.squeeze().T):
            mixers += [(matrix, bias.flatten())] if bias is not None and bias.numel() == H else []
            mixers.append((matrix, None))
    return mixers


def _is_uniform(fitted: Fit | None) -> bool:
    """Return True if the fit has one scale for all heads."""
    return fitted is not None and torch.allclose(fitted.scale, fitted.scale[:1], rtol=1e-4)


def _keep_mixer(made: Design, where: str, mixer: Mixer) -> None:
    made.tensors[where] = mixer[0].clone()
    if mixer[1] is not None:
        made.tensors[f"{where} bias"] = mixer[1].clone()


def _gates(caller: Caller, inner: Projections, inputs: QKV, record: CallRecord) -> Iterator[Design]:
    """Yield layers that read the queries and are no projection, each as a gate of the heads' output."""
    used = {role.path for role in inner.roles.values()}
    own, H = caller.subject.parameters, inner.num_heads
    assert inner.weights is not None
    width = len(inner.weights.v)
    for path, fed, _ in record.linear:
        weight, bias = own.get(f"{path}.weight"), own.get(f"{path}.bias")
        if weight is None or weight.ndim != 2 or len(weight) not in (width, H) or f"{path}.weight" in used:
            continue
        if fed.numel() != inputs[0].numel() or not equal_tensors(fed.reshape(inputs[0].shape), inputs[0]):
            continue
        tensors = {"gate": weight.detach().double().clone()}
        if bias is not None:
            tensors["gate bias"] = bias.detach().double().clone()
        each = width // len(weight)
        of = "channel" if each == 1 else "head"
        words = f"a gate: each {of} of the output is multiplied by a number computed from the query"
        yield Design("gate", words, {"each": float(each)}, tensors)


BASES = (1e4, 5e5, 1e6, 1e3, 1e2)  # of rotations, the usual one first
NUMBER = re.compile(r"(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e\d+)?(?![\w.])")


def _wrong_rotation(caller: Caller, inner: Projections, inputs: QKV, texts: Sequence[str]) -> list[Design]:
    """Return a wrong rotation by position, or a rotation of keys shared by the wrong groups."""
    try:
        scores = record_scores(caller, inputs)[1]
    except CAUGHT:
        return []
    if scores is None or inner.weights is None:
        return []
    H, weights = inner.num_heads, inner.weights
    try:
        state = _state(weights, H, inputs)
    except (RuntimeError, ValueError, IndexError):
        return []
    if state.q.shape[-1] % 2:
        return []
    written = [float(number.replace("_", "")) for text in texts for number in NUMBER.findall(text)]
    made = _rotation_of(scores, state, [*BASES, *(number for number in written if number > 50)])
    if made is not None:
        return [made]
    for way in FAULTS["groups repeated in wrong order"].ways:
        try:
            state = recipe.run(ProbeInputs(*inputs), weights, H, way)
        except (RuntimeError, ValueError, IndexError):  # keys are not shared by groups of heads
            break
        rope = _rope(scores, state.q, state.k)
        if rope is not None and fit(scores, turned(state.q, rope) @ turned(state.k, rope).mT) is not None:
            return [rope]
    return []


@without_modes
def _rotation_of(scores: Tensor, state: State, bases: Sequence[float]) -> Design | None:
    """Return the wrong rotation with one of these bases that fits the scores."""
    D = state.q.shape[-1]
    for base in dict.fromkeys(bases):
        frequencies = base ** (torch.arange(D // 2, dtype=torch.float64) * -2 / D)
        for neighbours in (0.0, 1.0):
            numbers = {"channels": float(D), "first": 0.0, "neighbours": neighbours}
            for fault, words, changed in WRONG_ROTATIONS:
                made = Design("rope", "", {**numbers, **changed}, {"frequencies": frequencies}, fault)
                q = turned(state.q, made) if made.numbers.get("q", 1.0) else state.q
                k = turned(state.k, made) if made.numbers.get("k", 1.0) else state.k
                if fit(scores, q @ k.mT) is not None:
                    made.words = f"{_rope_words(frequencies, D, D, 0, bool(neighbours))}, {words}"
                    return made
    return None


def rotation_over_another_axis(caller: Caller, projections: Projections) -> Design | None:
    """Return a rotation of queries by the number of the head or sample, which changes no score.

    Args:
        projections: those proven without any design.
    """
    L = caller.subject.sizes.long
    inputs = inputs_for(caller, L, L, seed=33)
    try:
        record = record_call(caller, inputs)
    except CAUGHT:
        return None
    if projections.weights is None or projections.num_heads < 2:
        return None
    q = _state(projections.weights, projections.num_heads, inputs).q  # [B, H, T, D]
    B, H, T, D = q.shape
    for factor in record.factors:
        for x in (factor, factor.transpose(1, 2)):
            x = x.unflatten(0, (B, H)) if x.shape == (B * H, T, D) else x
            if x.shape != q.shape or equal_tensors(x, q):
                continue
            for scale in (1.0, D**-0.5, D**-0.25):
                for which, still, others in (
                    ("head", (x[:, 0], q[:, 0]), (x[:, 1:], q[:, 1:])),
                    ("sample", (x[0], q[0]), (x[1:], q[1:])),
                ):
                    lengths = [turned_part.double().norm(dim=-1) for turned_part in others]
                    if (
                        equal_tensors(still[0], still[1] * scale)
                        and equal_tensors(lengths[0], lengths[1] * scale)
                        and not equal_tensors(others[0], others[1] * scale)
                    ):
                        words = f"a rotation by the index of the {which} instead of by position"
                        return Design("rotation", words, fault="rotation over another axis")
    return None


WRONG_ROTATIONS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("rotation on one side", "of the queries alone", {"k": 0.0}),
    ("rotation on one side", "of the keys alone", {"q": 0.0}),
    ("rotation with mixed pairs", "with the angles laid out for other pairs", {"mixed": 1.0}),
    ("rotation that stretches", "with the cosines in place of the sines", {"cosines for sines": 1.0}),
    ("rotation that stretches", "without the minus sign", {"first sign": 1.0}),
    ("rotation that stretches", "with two minus signs", {"second sign": -1.0}),
)


def _rope_words(theta: Tensor, n: int, D: int, first: int, neighbours: bool) -> str:
    pairing = "neighbours" if neighbours else "halves"
    part = "" if n == D else f", {n} of {D} channels of each head, from channel {first} on"
    base = ""
    if n > 2 and float(theta[0].abs()) > 0.99:
        number = float(theta[1].abs()) ** (-n / 2)
        usual = torch.arange(n // 2, dtype=torch.float64) * -2 / n
        if torch.allclose(theta.abs(), number**usual, rtol=1e-3):
            base = f", base {float(f'{number:.4g}'):g}"
    return f"a rotation by position (RoPE, pairs of {pairing}{base}{part})"


def _position_designs(
    caller: Caller, weights: Weights, H: int, fitted: Fit, causal: bool, first: list[Design]
) -> list[Design]:
    """Return the designs of the fitted bias, its window, and the scale of 1 that T5 has beside its bias."""
    made: list[Design] = []
    if not causal and not bool(fitted.visible.all()):
        window = _window(fitted.visible) or _without_itself(caller, fitted.visible)
        if window is not None:
            made.append(window)
    elif causal and not bool(fitted.visible.tril().any()):
        return []
    bias = fitted.bias
    if not bool(bias.any()):
        return made + _log_scale(caller, weights, H, fitted, first)
    if _two_levels(bias, fitted.visible):
        return made
    L = bias.shape[-1]
    tensors = {f"{L} x {L}": bias}
    if not caller.plan.self_only:
        short = caller.subject.sizes.short
        inputs = inputs_for(caller, short, L, seed=31)
        with contextlib.suppress(*CAUGHT):
            scores = record_scores(caller, inputs)[1]
            state = _state(weights, H, inputs, first)
            other = None if scores is None else fit(scores, state.q @ state.k.mT)
            if other is not None:
                tensors[f"{short} x {L}"] = other.bias
    table, words = _relative_bias(bias, fitted.visible)
    if table is not None:
        tensors["by distance"] = table
    numbers = {"far": 1.0} if FAVOURED in words else {}
    made.append(Design("position bias", words, numbers, tensors))
    if torch.allclose(fitted.scale, torch.ones_like(fitted.scale), atol=1e-4):
        words = "scores without the factor 1 / sqrt(d_k), as in T5"
        made.append(Design("own scale", words, {}, {"scale": torch.ones(H, dtype=torch.float64)}))
    return made


def _log_scale(
    caller: Caller, weights: Weights, H: int, fitted: Fit, first: Sequence[Design]
) -> list[Design]:
    """Return a scale that is proportional to the logarithm of the number of keys, at two lengths."""
    long, short = caller.subject.sizes.long, caller.subject.sizes.short
    inputs = inputs_for(caller, short, short, seed=31)
    try:
        scores = record_scores(caller, inputs)[1]
    except CAUGHT:
        return []
    state = _state(weights, H, inputs, first)
    other = None if scores is None else fit(scores, state.q @ state.k.mT)
    scale = fitted.scale / math.log(long)
    if other is None or not torch.allclose(scale, other.scale / math.log(short), rtol=1e-5, atol=0):
        return []
    words = "a scale that grows with the logarithm of the number of keys"
    return [Design("own scale", words, {"by log": 1.0}, {"scale": scale})]


def describe_position_rule(caller: Caller, weights: Weights, H: int, inputs: QKV) -> str:
    """Return a description of a bias or window by distance beside scaled q.k, or "" for anything else."""
    try:
        scores = record_scores(caller, inputs)[1]
        state = _state(weights, H, inputs)
    except CAUGHT:
        return ""
    fitted = None if scores is None else fit(scores, state.q @ state.k.mT)
    right = torch.full((H,), state.q.shape[-1] ** -0.5, dtype=torch.float64)
    if fitted is None or not torch.allclose(fitted.scale.double(), right, rtol=1e-4):
        return ""
    L = len(fitted.visible)
    away = torch.arange(L) - torch.arange(L)[:, None]
    if not torch.equal(
        fitted.visible, (away >= away[fitted.visible].min()) & (away <= away[fitted.visible].max())
    ):
        return ""
    if bool(fitted.bias.any()):
        table, words = _relative_bias(fitted.bias, fitted.visible)
        return words if table is not None else ""
    window = _window(fitted.visible)
    return "" if window is None else window.words


def _two_levels(bias: Tensor, visible: Tensor) -> bool:
    """Return True if the bias is a triangle of two numbers, such as 0 and -5: a wrong causal mask."""
    if not bool(visible.all()) or not torch.allclose(bias, bias[:1].expand_as(bias), atol=1e-6):
        return False
    lower = torch.ones_like(visible).tril()
    steps = bias[0].diff(dim=-1)  # along a row, level but for one step
    jump = steps.abs() > 1e-6 * float(bias.abs().max())
    at = lower[:, :-1] & ~lower[:, 1:]
    return torch.equal(jump, at)


def _far_keys_favoured(caller: Caller, inner: Projections, inside: list[Design]) -> None:
    """Mark ALiBi with the wrong sign as a fault, if no parameter but the projections is learned."""
    guess = inner.guess
    pieces = [] if guess is None else [*guess.weights.values(), *guess.biases.values()]
    projected = {piece.name for every in pieces for piece in every}
    learned = {name for name, x in caller.subject.parameters.items() if x.requires_grad}
    if learned - projected - caller.subject.norms - caller.subject.frozen:
        return
    for design in inside:
        if design.key == "position bias" and design.numbers.get("far"):
            design.fault = "far keys favoured"


def _relative_bias(bias: Tensor, visible: Tensor) -> tuple[Tensor | None, str]:
    """Return the bias by s - t, [H, 2L - 1], or None if it depends on more, and a description of it."""
    L = bias.shape[-1]
    steps = bias.diff(dim=-1)  # [H, L, L - 1]: without the constant of each row
    both_visible = visible[:, :-1] & visible[:, 1:]
    size = float(bias.abs().max())
    table = torch.zeros(len(bias), 2 * L - 1, dtype=bias.dtype)
    rows = []
    for away in range(-(L - 1), L - 1):
        line, look = steps.diagonal(away, -2, -1), both_visible.diagonal(away)
        if not bool(look.any()):
            rows.append(torch.zeros(len(bias), dtype=bias.dtype))
            continue
        line = line[:, look]
        if float((line - line[:, :1]).abs().max()) > NEARLY * size:
            return None, "a bias by position"
        rows.append(line[:, 0])
    slopes = torch.stack(rows, 1)  # [H, 2L - 2]
    table[:, 1:] = slopes.cumsum(1)
    past = slopes[:, : L - 1]
    future = slopes[:, L - 1 :]
    level = float((past - past[:, :1]).abs().max()) <= NEARLY * size
    mirrored = (
        float((future + past[:, :1]).abs().max()) <= NEARLY * size
        or float((future - past[:, :1]).abs().max()) <= NEARLY * size
        or float(future.abs().max()) <= NEARLY * size
    )
    if level and mirrored and float(past.abs().max()) > NEARLY * size:
        numbers = ", ".join(f"{float(slope):.3g}" for slope in past[:4, 0])
        more = ", ..." if len(past) > 4 else ""
        far = FAVOURED if float(past.mean()) < 0 else ""
        return table, f"a bias linear in the distance (ALiBi, slopes {numbers}{more}{far})"
    return table, "a bias by distance (s - t)"


def _window(visible: Tensor) -> Design | None:
    """Return the window of visible keys, if it is a band or each query sees its own key."""
    L = len(visible)
    away = torch.arange(L) - torch.arange(L)[:, None]
    low, high = int(away[visible].min()), int(away[visible].max())
    if torch.equal(visible, (away >= low) & (away <= high)):
        if low > 0 or high < 0 or (low == 1 - L and high in (-1, 0, 1)):
            return None  # a causal mask, right or wrong
        return _band(EVERY if low == 1 - L else low, -EVERY if high == L - 1 else high)
    if not bool(visible.diagonal().all()):
        return None
    return Design(
        "window",
        "a fixed pattern: the keys that are visible to a query depend on its position",
        {},
        {"seen": visible},
    )


ITSELF = re.compile(
    r"exclude_?self|(no|without|mask|hide|skip)_?self\b|self_?mask|diag|itself|\bothers?\b", re.I
)


def _without_itself(caller: Caller, visible: Tensor) -> Design | None:
    """Return the pattern in which no query sees its own key, where the source names that."""
    eye = torch.eye(len(visible), dtype=torch.bool)
    if not torch.equal(visible, ~eye) or not ITSELF.search(source_of(type(caller.subject.body))):
        return None
    numbers = {"from": float(EVERY), "to": float(-EVERY), "without itself": 1.0}
    return Design("window", "a fixed pattern inside: each query sees every key but its own", numbers)


def _band(low: int, high: int) -> Design:
    """Return the window of keys from `low` to `high`, counted from the query's own position."""
    size = f"of {high - low + 1} keys" if -EVERY not in (high, -low) else "open on one side"
    if high == 0:
        words = f"a sliding window {size}: a query's own and {-low} before it"
    elif high == -low:
        words = f"a sliding window {size}: {high} on either side of a query"
    else:
        words = f"a sliding window {size}: those at distances from {low} to {high}"
    return Design("window", words, {"from": float(low), "to": float(high)})


def long_window(caller: Caller) -> Design | None:
    """Return a window longer than the probes, found by one longer call, if an attribute names its size."""
    L = caller.subject.sizes.long
    named = dict(attributes_of(caller.subject.body))
    sizes = [n for name, n in named.items() if "window" in name.lower() and L < n <= 2048]
    if not sizes:
        return None
    length = 2 * sizes[0] + 3
    x = inputs_for(caller, length, length, seed=32, B=1)
    moved = (
        [tensor.clone() for tensor in x[:1]] if caller.plan.self_only else [tensor.clone() for tensor in x]
    )
    middle = length // 2
    for tensor in moved if caller.plan.self_only else moved[1:]:
        tensor[:, middle] += 1.0
    try:
        with torch.no_grad():
            base = caller.call(*x).output
            query, key, value = moved * 3 if caller.plan.self_only else moved
            change = (caller.call(query, key, value).output - base).abs().amax((0, 2))
    except CAUGHT:
        return None
    moved_queries = (change > 1e-9 * float(base.abs().max())).nonzero().flatten()
    before, after = (
        middle - int(moved_queries.min()),
        int(moved_queries.max()) - middle,
    )  # queries that see the key
    if before >= middle and after >= length - middle - 1:
        return None
    low, high = (-after if after < length - middle - 1 else EVERY), (before if before < middle else -EVERY)
    return _band(low, high) if len(moved_queries) == before + after + 1 else None
