"""`explain` and `explain_evidence`: from a module, or from an examination, to an `Explanation`.

Letters: B batch, T query_len, S key_len, E d_model, H num_heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, MaskError, ShapeError
from ...masks import CAUSAL, Mask, mask_of_call
from ...nn import MultiHeadAttention
from .. import recipe
from ..designs import steps_of
from ..evidence import Call, Evidence
from ..recipe import Given, State
from ..report import Named, Report
from .explanation import Explanation, differing
from .known import is_known, own_numbers, own_steps, weights_of
from .page_data import check_size
from .told_steps import fields_of

PROBES = ("causal", "random mask", "padding", "plain", "self")  # the likeliest to show all there is, first


def explain(
    module: nn.Module,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
    batch: int = 0,
) -> Explanation:
    """Every step of multi-head attention in this module's own numbers.

    The steps are computed in float64 with the module's weights; its own weights and output, as it computes
    them without dropout, stand beside them.

    Args:
        module: a `headwise.MultiHeadAttention`, a `torch.nn.MultiheadAttention` or ours that is torch's; or
            any module that `headwise.check` understands: its code is run here to find out how it works.
        query: [B, T, E], or as the module takes it: [T, B, E] without batch_first, [T, E] for one sequence.
        key, value: likewise, with S for T; without them, query; without value, key.
        mask: True = may attend, whatever the module's own masks say: a `headwise.Mask`, or a tensor
            broadcastable to [B, H, T, S], the same for every head.
        causal: hide the keys that come after the query; with T != S the last query sees the last key.
        tokens: T words, or a pair of lists, T words for queries and S for keys.
        batch: which sequence to show first.

    Raises:
        ArgumentError: a class that `headwise.check` does not understand; more numbers than a page can hold.
        ShapeError: inputs or tokens that do not fit.
        MaskError: a mask that does not fit, or differs between heads.

    Example:
        >>> explanation = explain(MultiHeadAttention(8, 2), torch.randn(1, 5, 8), causal=True)
        >>> explanation.steps[6].title
        'Softmax: scores become weights'
        >>> path = explanation.to_html("explain.html")  # doctest: +SKIP
    """
    mine = None
    if not is_known(module) and isinstance(module, nn.Module):
        from .live import understood

        mine = understood(module)
    weights, num_heads = weights_of(module) if mine is None else (mine.weights, mine.num_heads)
    inputs = _batch_first(module, query, key, value, weights.q.shape[1])
    (B, T, E), S = inputs[0].shape, inputs[1].shape[1]
    check_size(B, num_heads, T, S, E)
    if not 0 <= batch < B:
        raise ArgumentError(f"batch must be from 0 to {B - 1}: got {batch}; there are {B} sequences")
    own_mask = _own_mask(module) & mask_of_call(mask, B, T) & (CAUSAL if causal else Mask())
    if mine is not None:
        own_mask = own_mask & (CAUSAL if mine.evidence.conventions.always_causal else Mask())
        given = Given(*inputs, _dense(own_mask, B, num_heads, T, S))
        labels = _labels(tokens, T, S, given.query is given.key)
        return mine.explanation(given, labels, batch)
    given = Given(*inputs, _dense(own_mask, B, num_heads, T, S))
    if isinstance(module, MultiHeadAttention) and module.scale is not None:
        scale = module.scale
    else:
        scale = (weights.q.shape[0] // num_heads) ** -0.5
    state = recipe.run(given, weights, num_heads, own_steps(module, scale))
    itself = given.query is given.key
    query_labels, key_labels = _labels(tokens, T, S, itself)
    weight = next(module.parameters())
    name = type(module).__name__
    notes = [
        f"The steps are computed in float64 with the weights of your {name}; its own weights and output, "
        f"computed in {str(weight.dtype).removeprefix('torch.')}, are compared with them at the softmax "
        "and at the output."
    ]
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first and query.ndim == 3:
        notes.append("Your module takes the sequence first, [T, B, E]; here the batch comes first.")
    if getattr(module, "dropout", 0.0) and module.training:
        notes.append("Your module is in training, where dropout is random; here it is left out.")
    if isinstance(module, MultiHeadAttention) and module.num_kv_heads < num_heads:
        shared = num_heads // module.num_kv_heads
        notes.append(f"{shared} heads share their keys and values; here each head has its own copy of them.")
    return Explanation(
        name, state, own_numbers(module, given), query_labels=query_labels, key_labels=key_labels,
        scale=scale, notes=notes, batch=batch,
    )  # fmt: skip


def _batch_first(
    module: nn.Module, query: Tensor, key: Tensor | None, value: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs as [B, T, E] and [B, S, E], float64; one tensor where they were one."""
    if key is None and value is not None:
        raise ArgumentError("key must be given with value: got value alone; give both or neither")
    key = query if key is None else key
    value = key if value is None else value
    made: dict[int, Tensor] = {}
    sequence_first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be a tensor of floats: got {kind}; embed the tokens first")
        if x.ndim not in (2, 3) or x.shape[-1] != width or not x.numel():
            raise ShapeError(
                f"{name} must be [B, T, {width}] or [T, {width}], not empty: got {list(x.shape)}; "
                "give what the module takes"
            )
        if id(x) not in made:
            batched = x[None] if x.ndim == 2 else x.transpose(0, 1) if sequence_first else x
            made[id(x)] = batched.detach().to("cpu", torch.float64)  # [B, T, E]
    query, key, value = made[id(query)], made[id(key)], made[id(value)]
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        raise ShapeError(
            f"query, key and value must agree in batch, key and value in length: {list(query.shape)}, "
            f"{list(key.shape)}, {list(value.shape)}; there is one value per key"
        )
    return query, key, value


def _own_mask(module: nn.Module) -> Mask:
    """What the module hides by itself."""
    rules = Mask()
    if isinstance(module, MultiHeadAttention):
        if module.causal:
            rules = rules & CAUSAL
        if module.window is not None:
            reach = module.window
            rules = rules & (
                Mask.window(left_right=reach) if isinstance(reach, tuple) else Mask.window(reach)
            )
    return rules


def _dense(mask: Mask, B: int, H: int, T: int, S: int) -> Tensor | None:
    """bool [B, T, S]; None where nothing is hidden."""
    if mask.hides_nothing:
        return None
    full = mask.full(T, S, B, H).cpu()
    if full.shape[1] > 1 and not bool((full == full[:, :1]).all()):
        raise MaskError(
            f"mask must be the same for every head: it differs among {H}; explain one head's at a time"
        )
    return full[:, 0].expand(B, T, S)


def _labels(tokens: Any, T: int, S: int, itself: bool) -> tuple[list[str] | None, list[str] | None]:
    if tokens is None:
        return None, None
    if isinstance(tokens, str):
        raise ArgumentError("tokens must be a list of words: got one string; use tokens=text.split()")
    if all(isinstance(token, str) for token in tokens):
        queries = list(tokens)
        keys = queries if itself else None
    elif len(tokens) == 2:
        queries, keys = list(tokens[0]), list(tokens[1])
    else:
        raise ArgumentError(
            "tokens must be words, or two lists of words, for queries and keys; use str(token)"
        )
    for name, words, length in (("queries", queries, T), ("keys", keys, S)):
        if words is not None and len(words) != length:
            raise ShapeError(
                f"tokens must be one a position: {len(words)} for {length} {name}; give {length}"
            )
    return [str(one) for one in queries], None if keys is None else [str(one) for one in keys]


def explain_evidence(
    evidence: Evidence,
    yours: State | None = None,
    *,
    faults: Sequence[Named] = (),
    probe: str | None = None,
    report: Report | None = None,
) -> Explanation:
    """Every step of one probe of an examination, the learner's numbers beside the expected ones.

    Args:
        evidence: with weights, and at least one call.
        yours: the recipe with the fault that was found, on the inputs of one of the calls.
        faults: what was found, to be told on the page.
        probe: which call, where `yours` does not say.
        report: what `check` says of it, so that both say the same; its faults stand for `faults`.

    Raises:
        ArgumentError: nothing to explain: no weights were found, or no such call was answered.
    """
    call = _call_of(evidence, yours, probe)
    if evidence.weights is None or call is None:
        raise ArgumentError(
            f"evidence must hold weights and an answered call: {evidence.name} has weights: "
            f"{evidence.weights is not None}, calls: {len(evidence.calls)}; run headwise check"
        )
    given = call.given if yours is None else yours.given
    B, T, E = given.query.shape
    check_size(B, evidence.num_heads, T, given.key.shape[1], E)
    expected = (evidence.truth(call) if given is call.given else None) or recipe.run(
        given, evidence.weights, evidence.num_heads, steps_of(evidence.designs)
    )
    found = {} if yours is None else fields_of(yours)
    notes = [
        f"The numbers are those of the probe {call.probe!r}: inputs headwise made up, weights of your own."
    ]
    if call.output is not None:
        if yours is not None:
            notes.append(_proof(yours, call.output))
        found["output"] = call.output
    if call.weights is not None and call.weights.shape == expected.p.shape:
        found["p"] = call.weights
    if yours is None and call.output is not None and bool(differing(expected.output, call.output)[0].any()):
        notes.append(
            "No fault of the library explains your output, so your numbers on the way are not known."
        )
    conventions = evidence.conventions
    if given.mask is not None and conventions.mask_true_attends is not None:
        means = "may attend" if conventions.mask_true_attends else "may not attend"
        notes.append(
            f"In your code's own mask, {conventions.mask_argument or 'mask'}, True (or 1) = {means}."
        )
    faults = faults if report is None else report.faults
    checked = None if report is None or report.ok else report.summary
    return Explanation(evidence.name, expected, found, faults=faults, notes=notes, checked=checked)


def best_call(evidence: Evidence, probe: str | None) -> Call | None:
    """The answered call of this probe, or the one that is likeliest to show all there is."""
    answered = [call for call in evidence.calls if call.output is not None]
    if probe is not None:
        return next((call for call in answered if call.probe == probe), None)
    ranked = [call for name in PROBES for call in answered if call.probe == name]
    return next(iter([*ranked, *answered]), None)


def _call_of(evidence: Evidence, yours: State | None, probe: str | None) -> Call | None:
    for call in evidence.calls if yours is not None else ():
        if (
            yours is not None
            and call.given.query is yours.given.query
            and call.given.mask is yours.given.mask
        ):
            return call
    return best_call(evidence, probe)


def _proof(yours: State, output: Tensor) -> str:
    where, error, _ = differing(yours.output, output)
    if bool(where.any()):
        return f"Your output is off from these steps by up to {error:.0e}: they are only a guess."
    equal = "exactly" if error == 0 else f"to {error:.0e}"
    return f"Your output equals what these steps give, {equal}: they are what your code computes."
