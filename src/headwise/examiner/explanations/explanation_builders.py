"""Explanations of a module, of the evidence of an examination, and of a file.

The weights of headwise's and torch's classes are read directly; other modules are examined first.

Letters: B batch, T query_len, S key_len, E d_model, H num_heads, Hk num_kv_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ...errors import ArgumentError, MaskError, ShapeError
from ...masks import CAUSAL, Mask, mask_of_call
from ...nn import MultiHeadAttention
from ...nn.options import in_use
from .. import recipe
from ..diagnosis import diagnose
from ..dispatch import judge, understand
from ..evidence import Evidence, ProbeCall
from ..examine.caller import Caller
from ..examine.environment import CAUGHT, float64_environment, neutral_torch_state
from ..examine.projections import caller_of_module, weights_of_module
from ..examine.recognition import measure_designs
from ..recipe import Design, ProbeInputs, State, Step, Weights, steps_of
from ..report import Named, Report, largest_difference
from .explanation import Explanation, differing
from .page import check_size
from .shown_steps import fields_of

if TYPE_CHECKING:
    from ..diagnosis import Made


def is_known(module: object) -> bool:
    """Return True if `weights_of` knows this class."""
    return isinstance(module, MultiHeadAttention | nn.MultiheadAttention)


def weights_of(module: nn.Module) -> tuple[Weights, int]:
    """Return the four projections in float64, and num_heads.

    Shared keys and values are repeated, so that every head has its own rows: [Hk * D, E] -> [H * D, E].

    Raises:
        ArgumentError: an unknown class, an option without a step in the recipe, or a replaced projection.
        ShapeError: the keys or values have a width other than that of the queries.
    """
    if isinstance(module, MultiHeadAttention):
        return _of_ours(module)
    if isinstance(module, nn.MultiheadAttention):
        return _of_torchs(module)
    raise ArgumentError(
        f"module must be headwise's or torch's multi-head attention: got {type(module).__name__}; "
        "for your own class, use headwise explain FILE, which finds the weights"
    )


def _of_ours(module: MultiHeadAttention) -> tuple[Weights, int]:
    _check_widths(module.d_model, module.kdim, module.vdim)
    unknown = [name for name in ("softcap", "sinks") if getattr(module, name) is not None]
    for name in (*unknown, *in_use(module)):
        raise ArgumentError(f"module must not use {name}: no step can show it; explain the module without it")
    layers = [module.q_proj, module.k_proj, module.v_proj, module.out_proj]
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise ArgumentError(
                f"projections must be nn.Linear: got {type(layer).__name__}; replace it by one nn.Linear"
            )
    q, k, v, o = (layer.weight for layer in layers)
    q_bias, k_bias, v_bias, o_bias = (
        layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias
        for layer in layers
    )
    shared = module.num_heads // module.num_kv_heads

    def for_every_head(x: Tensor, width: int) -> Tensor:
        rows = x.unflatten(0, (module.num_kv_heads, width))  # [Hk, D, ...]
        return rows.repeat_interleave(shared, 0).flatten(0, 1)  # [H * D, ...]

    D, Dv = module.head_dim, module.value_dim
    held = (
        q, for_every_head(k, D), for_every_head(v, Dv), o,
        q_bias, for_every_head(k_bias, D), for_every_head(v_bias, Dv), o_bias,
    )  # fmt: skip
    return Weights(*map(_as_numbers, held)), module.num_heads


def _of_torchs(module: nn.MultiheadAttention) -> tuple[Weights, int]:
    _check_widths(module.embed_dim, module.kdim, module.vdim)
    options = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
    for name, is_used in options.items():
        if is_used:
            raise ArgumentError(
                f"module must not append keys: got {name}=True, which no step can show; build it without"
            )
    weight, bias, out = module.in_proj_weight, module.in_proj_bias, module.out_proj
    nothing = weight.new_zeros(3 * module.embed_dim) if bias is None else bias
    o_bias = weight.new_zeros(module.embed_dim) if out.bias is None else out.bias
    held = (*weight.chunk(3), out.weight, *nothing.chunk(3), o_bias)
    return Weights(*map(_as_numbers, held)), module.num_heads


def _check_widths(width: int, kdim: int, vdim: int) -> None:
    if not width == kdim == vdim:
        raise ShapeError(
            f"kdim and vdim must equal the width of the queries: got {kdim} and {vdim} for {width}; "
            "explain a module without them"
        )


def _as_numbers(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def own_steps(module: nn.Module, scale: float) -> dict[str, Step]:
    """Return the steps that differ from the recipe: the scale, and the weights of a query without keys."""
    steps: dict[str, Step] = {}
    if isinstance(module, MultiHeadAttention) and module.scale is not None:

        def scaled(state: Any) -> None:
            state.scaled = state.scores * scale

        steps["scale"] = scaled
    if isinstance(module, MultiHeadAttention) or getattr(module, "empty_rows", "nan") == "zero":

        def zero_without_keys(state: Any) -> None:
            visible = (state.hidden > -torch.inf).any(-1, keepdim=True)
            state.p = torch.softmax(state.hidden, -1).masked_fill(~visible, 0.0)

        steps["softmax"] = zero_without_keys
    return steps


@torch.no_grad()
def own_numbers(module: nn.Module, inputs: ProbeInputs) -> dict[str, Tensor]:
    """Return the weights `p` [B, H, T, S] and the `output` of the module, in its dtype and without dropout.

    Args:
        module: headwise's or torch's multi-head attention.
        inputs: batch first, float64; they are cast to the dtype of the module.
    """
    weight = next(module.parameters())
    query, key, value = (x.to(weight.device, weight.dtype) for x in inputs[:3])
    if inputs.key is inputs.query and inputs.value is inputs.query:
        key = value = query
    mask = None if inputs.mask is None else inputs.mask.to(weight.device)  # [B, T, S]
    training, module.training = module.training, False  # no dropout; the mode of submodules is not changed
    try:
        if isinstance(module, MultiHeadAttention):
            output, weights = module(query, key, value, None if mask is None else mask[:, None])
            p = weights.dense()
        else:
            assert isinstance(module, nn.MultiheadAttention)
            hidden = None if mask is None else ~mask.repeat_interleave(module.num_heads, 0)  # [B * H, T, S]
            q, k, v = (x if module.batch_first else x.transpose(0, 1) for x in (query, key, value))
            output, p = module(q, k, v, attn_mask=hidden, average_attn_weights=False)
            output = output if module.batch_first else output.transpose(0, 1)
    finally:
        module.training = training
    return {"p": p.detach().cpu(), "output": output.detach().cpu()}


UNEXPLAINED = "No known mistake explains your output, so your intermediate numbers are unknown."
PROBES = ("causal", "random mask", "padding", "plain", "self")  # the most informative first


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
    """Show every step of multi-head attention with the numbers of a module.

    The steps are computed in float64 with the module's weights, and compared with the attention weights and
    the output that the module computes without dropout. A norm, a rotation or a bias by position, a residual
    connection and other variants have a step of their own.

    Args:
        module: a `headwise.MultiHeadAttention`, a `torch.nn.MultiheadAttention`, a
            `headwise.nn.MultiheadAttention`, or any that `headwise.check` understands. It runs in-process.
        query: [B, T, E], or another shape that the module takes: [T, B, E] without batch_first, [T, E] for
            one sequence.
        key, value: as query, with S in place of T. key defaults to query, value to key.
        mask: a `headwise.Mask`, or a tensor broadcastable to [B, H, T, S], the same for every head. True =
            may attend, also if the module itself uses the opposite convention.
        causal: hide the keys after the query; if T != S the last query is aligned with the last key.
        tokens: a list of T words, or a pair of lists: T words for queries and S words for keys.
        batch: the sequence to show first.

    Raises:
        ArgumentError: `headwise.check` does not understand the class, or a page cannot hold the numbers.
        ShapeError: inputs or tokens do not fit.
        MaskError: the mask does not fit, or differs between heads.

    Example:
        >>> explanation = explain(MultiHeadAttention(8, 2), torch.randn(1, 5, 8), causal=True)
        >>> explanation.steps[6].title
        'Softmax: scores become weights'
        >>> path = explanation.to_html("explain.html")  # doctest: +SKIP
    """
    mine = None
    if not is_known(module) and isinstance(module, nn.Module):
        widths = [x.shape[-1] for x in (query, key, value) if isinstance(x, Tensor) and x.ndim]
        if len(set(widths)) > 1:
            raise ShapeError(
                f"query, key and value must have one width to be explained: {', '.join(map(str, widths))}; "
                "build the module with equal widths"
            )
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
    call_inputs = ProbeInputs(*inputs, _dense(own_mask, B, num_heads, T, S))
    query_labels, key_labels = _labels(tokens, T, S, call_inputs.query is call_inputs.key)
    if mine is not None:
        return mine.explanation(call_inputs, (query_labels, key_labels), batch)
    if isinstance(module, MultiHeadAttention) and module.scale is not None:
        scale = module.scale
    else:
        scale = (weights.q.shape[0] // num_heads) ** -0.5
    state = recipe.run(call_inputs, weights, num_heads, own_steps(module, scale))
    weight = next(module.parameters())
    name = type(module).__name__
    dtype = str(weight.dtype).removeprefix("torch.")
    notes = [
        f"The steps are computed in float64 with the weights of your {name}. Its attention weights and its "
        f"output, in {dtype}, are compared with the softmax and the output."
    ]
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first and query.ndim == 3:
        notes.append("Your module takes the sequence first, [T, B, E]; the page shows the batch first.")
    if getattr(module, "dropout", 0.0) and module.training:
        notes.append("Your module is in training mode; dropout is left out on this page.")
    if isinstance(module, MultiHeadAttention) and module.num_kv_heads < num_heads:
        shared = num_heads // module.num_kv_heads
        notes.append(f"Every {shared} heads share their keys and values.")
    return Explanation(
        name, state, own_numbers(module, call_inputs), query_labels=query_labels, key_labels=key_labels,
        scale=scale, notes=notes, batch=batch,
    )  # fmt: skip


def _batch_first(
    module: nn.Module, query: Tensor, key: Tensor | None, value: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs as [B, T, E] and [B, S, E] in float64; equal inputs stay one tensor."""
    if key is None and value is not None:
        raise ArgumentError("key must be passed with value: got value alone; pass both or neither")
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
                "pass inputs of that shape"
            )
        if id(x) not in made:
            batched = x[None] if x.ndim == 2 else x.transpose(0, 1) if sequence_first else x
            made[id(x)] = batched.detach().to("cpu", torch.float64)  # [B, T, E]
    query, key, value = made[id(query)], made[id(key)], made[id(value)]
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        raise ShapeError(
            f"query, key and value must agree in batch, key and value in length: got {list(query.shape)}, "
            f"{list(key.shape)}, {list(value.shape)}; pass one value per key"
        )
    return query, key, value


def _own_mask(module: nn.Module) -> Mask:
    """Return the mask that the module applies by itself."""
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
    """Return the mask as bool [B, T, S]; None if nothing is hidden."""
    if mask.hides_nothing:
        return None
    full = mask.full(T, S, B, H).cpu()
    if full.shape[1] > 1 and not bool((full == full[:, :1]).all()):
        raise MaskError(
            f"mask must be the same for every head: it differs among {H} heads; use that of one head"
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
        kinds = ", ".join(dict.fromkeys(type(token).__name__ for token in tokens))
        raise ArgumentError(
            f"tokens must be words, or two lists of words: got {len(tokens)} of {kinds}; use str(token)"
        )
    for name, words, length in (("queries", queries, T), ("keys", keys, S)):
        if words is not None and len(words) != length:
            raise ShapeError(
                f"tokens must have one word per position: got {len(words)} for {length} {name}; pass {length}"
            )
    return [str(token) for token in queries], None if keys is None else [str(token) for token in keys]


def explain_evidence(
    evidence: Evidence,
    yours: State | None = None,
    *,
    faults: Sequence[Named] = (),
    probe: str | None = None,
    report: Report | None = None,
) -> Explanation:
    """Explain one call of an examination: the learner's numbers and the expected ones.

    Args:
        evidence: evidence with weights and at least one call.
        yours: the recipe with the learner's faults, on the inputs of one of the calls.
        faults: the faults to show.
        probe: the call to show, if `yours` is None.
        report: the report of `check`; its faults replace `faults`.

    Raises:
        ArgumentError: no weights were found, or there is no such call with an output.
    """
    call = _call_of(evidence, yours, probe)
    if evidence.weights is None or call is None:
        raise ArgumentError(
            f"evidence must have weights and a call with an output: {evidence.name} has "
            f"{'no ' * (evidence.weights is None)}weights, {len(evidence.calls)} calls; run headwise check"
        )
    probe_inputs = call.inputs if yours is None else yours.inputs
    B, T, E = probe_inputs.query.shape
    check_size(B, evidence.num_heads, T, probe_inputs.key.shape[1], E)
    expected = (evidence.truth(call) if probe_inputs is call.inputs else None) or recipe.run(
        probe_inputs, evidence.weights, evidence.num_heads, steps_of(evidence.designs)
    )
    theirs = {} if yours is None else fields_of(yours)
    notes = [f"The numbers are those of the test input {call.probe!r}: headwise's inputs, and your weights."]
    if call.output is not None:
        if yours is not None:
            notes.append(_proof(yours, call.output))
        theirs["output"] = call.output
    if call.weights is not None and call.weights.shape == expected.p.shape:
        theirs["p"] = call.weights
    if yours is None and call.output is not None and bool(differing(expected.output, call.output)[0].any()):
        notes.append(UNEXPLAINED)
    conventions = evidence.conventions
    if probe_inputs.mask is not None and conventions.mask_true_attends is not None:
        means = "may attend" if conventions.mask_true_attends else "may not attend"
        notes.append(
            f"In the mask of your code, {conventions.mask_argument or 'mask'}, True (or 1) = {means}."
        )
    faults = faults if report is None else report.faults
    checked = None if report is None or report.ok else report.summary
    return Explanation(evidence.name, expected, theirs, faults=faults, notes=notes, checked=checked)


def best_call(evidence: Evidence, probe: str | None) -> ProbeCall | None:
    """Return the call of this probe with an output, or the most informative call."""
    answered = [call for call in evidence.calls if call.output is not None]
    if probe is not None:
        return next((call for call in answered if call.probe == probe), None)
    ranked = [call for name in PROBES for call in answered if call.probe == name]
    return next(iter([*ranked, *answered]), None)


def _call_of(evidence: Evidence, yours: State | None, probe: str | None) -> ProbeCall | None:
    for call in evidence.calls if yours is not None else ():
        if (
            yours is not None
            and call.inputs.query is yours.inputs.query
            and call.inputs.mask is yours.inputs.mask
        ):
            return call
    return best_call(evidence, probe)


def _proof(yours: State, output: Tensor) -> str:
    where, error, _ = differing(yours.output, output)
    if bool(where.any()):
        return f"Your output differs from these steps by up to {error:.0e}, so they are only a guess."
    return f"Your code computes these steps: they give your output ({largest_difference(error)})."


class Understood:
    """A module that is neither headwise's nor torch's, with the evidence of its examination."""

    def __init__(self, module: nn.Module, evidence: Evidence, caller: Caller) -> None:
        assert evidence.weights is not None
        self.evidence, self.module, self._caller = evidence, module, caller_of_module(caller, module)
        self.weights: Weights = weights_of_module(evidence.weights, caller, module)
        self.num_heads = evidence.num_heads

    def _designs(self, inputs: ProbeInputs) -> list[Design]:
        """Return its designs, with the numbers of this module for inputs of this length.

        Raises:
            ArgumentError: they cannot be measured.
        """
        expected = [design for design in self.evidence.designs if steps_of([design])]
        windows = [design for design in expected if _is_band(design)]  # without numbers of the module
        if len(windows) == len(expected):
            return windows
        caller, T, S = self._caller, inputs.query.shape[1], inputs.key.shape[1]
        causal = None
        if self.evidence.conventions.always_causal:
            causal = torch.ones(caller.subject.sizes.long, caller.subject.sizes.long).tril().bool()
        with float64_environment():
            try:
                measured_designs = measure_designs(caller, causal, self.weights, self.num_heads, T, S) or []
            except CAUGHT:
                measured_designs = []
        designs = [design for design in measured_designs if not _is_band(design)]
        if [design.key for design in designs] != [design.key for design in expected if not _is_band(design)]:
            words = "; ".join(design.words for design in self.evidence.designs)
            raise ArgumentError(
                f"module must have measurable variants: {words} of {type(self.module).__name__} could not be "
                f"measured for {T} queries and {S} keys; use headwise explain FILE"
            )
        return [*designs, *windows]

    @neutral_torch_state()
    def explanation(
        self, inputs: ProbeInputs, labels: tuple[list[str] | None, list[str] | None], batch: int
    ) -> Explanation:
        """Return the explanation of every step on these inputs."""
        designs = self._designs(inputs)
        expected = recipe.run(inputs, self.weights, self.num_heads, steps_of(designs))
        diagnosis = diagnose(self.evidence)
        faults = diagnosis.faults  # before `judge`, which takes some of them as a design
        report = judge(self.evidence, diagnosis)
        yours = {}
        if faults:
            wrong = dict(steps_of(designs))
            wrong |= {name: step for made in faults for name, step in made.steps.items()}
            yours = fields_of(recipe.run(inputs, self.weights, self.num_heads, wrong))
        name = type(self.module).__name__
        notes = [f"The steps are computed in float64 with the weights of your {name}."]
        if faults is None:
            notes.append(UNEXPLAINED)
        mask = None if self.evidence.conventions.always_causal else inputs.mask
        with float64_environment(), torch.no_grad():
            try:
                yours["output"] = self._caller.call(inputs.query, inputs.key, inputs.value, mask).output
            except CAUGHT as error:
                notes.append(f"Your module raised an exception for these inputs: {error}")
        return Explanation(
            name, expected, yours, query_labels=labels[0], key_labels=labels[1], faults=report.faults,
            notes=notes, batch=batch, checked=None if report.ok else report.summary,
        )  # fmt: skip


def _is_band(design: Design) -> bool:
    """Return True for a window that depends on the distance alone."""
    return design.key == "window" and "from" in design.numbers


def understood(module: nn.Module) -> Understood:
    """Return the module with the evidence of its examination.

    Raises:
        ArgumentError: `check` does not understand the module.
    """
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise ArgumentError(
            f"module must be initialised: {type(module).__name__} has lazy parameters; call it once"
        )
    evidence, caller = understand(module)
    if caller is None or evidence.weights is None:
        reason = next((problem.message for problem in evidence.problems), "it returned no output")
        raise ArgumentError(
            f"module must be attention that headwise.check can judge: {type(module).__name__}: {reason}; run "
            "headwise.check on it"
        )
    return Understood(module, evidence, caller)


SECONDS, MEMORY = 60.0, 4 * 2**30  # limits of a file


def explain_file(path: Path, name: str | None = None, *, trust: bool = False) -> Explanation:
    """Explain every step in the numbers of the code in a file, with its fault, if it has one.

    Args:
        path: the file.
        name: the class or function; None for the one that looks most like multi-head attention.
        trust: run the file even if this system has no sandbox.

    Raises:
        ArgumentError: there is no such file or name, no sandbox, or nothing that can be explained.
    """
    from ..diagnosis import diagnose
    from ..dispatch import judge
    from ..marking.judge import before_running
    from ..sandbox.run import run_file
    from ..source.likely_classes import likeliest, number_by_cell, source_of

    source, cells = source_of(path)
    report = before_running(path, name, source, cells)
    if report is not None:
        raise ArgumentError(
            f"file must run to be explained: {path.name}: {report.summary}; run headwise check on it"
        )
    chosen = likeliest(path, source) if name is None else name
    outcome = run_file(path.resolve(), chosen, seconds=SECONDS, memory=MEMORY, trust=trust, options={})
    evidence = outcome.evidence
    if evidence is not None and evidence.step is not None:
        raise ArgumentError(
            f"name must be a complete attention: {chosen} is only one step ({evidence.step}); run "
            f"headwise check {path.name}:{chosen}"
        )
    if (
        evidence is None
        or evidence.weights is None
        or not any(call.output is not None for call in evidence.calls)
    ):
        problems = [outcome.problem, *(evidence.problems if evidence is not None else [])]
        messages = [problem.message for problem in problems if problem is not None]
        reason = messages[0] if messages else "it returned no output"
        raise ArgumentError(
            f"name must be code that runs and has weights: {chosen}: {reason}; run headwise check {path.name}"
        )
    evidence.source, evidence.path = source, str(path)
    diagnosis = diagnose(evidence)
    theirs = _theirs(evidence, diagnosis.faults)  # before `judge`, which takes some of them as a design
    report = judge(evidence, diagnosis)
    number_by_cell(report, cells)
    return explain_evidence(evidence, theirs, report=report)


def _theirs(evidence: Evidence, faults: tuple[Made, ...] | None) -> State | None:
    """Return the recipe with these faults, on the first probe whose numbers differ."""
    from ..diagnosis import first_difference

    assert evidence.weights is not None
    if faults is None:
        return None
    place = first_difference(evidence, faults)
    call = best_call(evidence, None if place is None else place[0])
    assert call is not None, "explain_file checked this"
    wrong = {**steps_of(evidence.designs)}
    wrong |= {name: step for made in faults for name, step in made.steps.items()}
    return recipe.run(call.inputs, evidence.weights, evidence.num_heads, wrong)
