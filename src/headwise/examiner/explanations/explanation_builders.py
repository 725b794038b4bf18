"""The classes whose weights we know where to find: headwise's own, torch's, and ours that is torch's.

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
from ..report import Named, Report
from .explanation import Explanation, differing
from .page import check_size
from .shown_steps import fields_of

if TYPE_CHECKING:
    from ..diagnosis import Made


def is_known(module: object) -> bool:
    """Whether `weights_of` knows this class."""
    return isinstance(module, MultiHeadAttention | nn.MultiheadAttention)


def weights_of(module: nn.Module) -> tuple[Weights, int]:
    """The four projections in float64, and num_heads.

    Heads that share keys and values get a copy each, so that every head has its own rows:
    [Hk * D, E] -> [H * D, E].

    Raises:
        ArgumentError: another class; an option that has no step in the recipe; a replaced projection.
        ShapeError: keys or values of another width than the queries.
    """
    if isinstance(module, MultiHeadAttention):
        return _of_ours(module)
    if isinstance(module, nn.MultiheadAttention):
        return _of_torchs(module)
    raise ArgumentError(
        f"module must be headwise's or torch's multi-head attention: got {type(module).__name__}; "
        "for a class of your own, headwise explain FILE finds the weights"
    )


def _of_ours(module: MultiHeadAttention) -> tuple[Weights, int]:
    _check_widths(module.d_model, module.kdim, module.vdim)
    unknown = [name for name in ("softcap", "sinks") if getattr(module, name) is not None]
    for name in (*unknown, *in_use(module)):
        raise ArgumentError(f"module must not use {name}: its steps are not drawn yet; explain it without")
    layers = [module.q_proj, module.k_proj, module.v_proj, module.out_proj]
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise ArgumentError(
                f"projections must be nn.Linear: got {type(layer).__name__}; merge it into one first"
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
    for name, there in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if there:
            raise ArgumentError(
                f"module must not append keys: it has {name}=True, which has no step; explain one without"
            )
    weight, bias, out = module.in_proj_weight, module.in_proj_bias, module.out_proj
    nothing = weight.new_zeros(3 * module.embed_dim) if bias is None else bias
    o_bias = weight.new_zeros(module.embed_dim) if out.bias is None else out.bias
    held = (*weight.chunk(3), out.weight, *nothing.chunk(3), o_bias)
    return Weights(*map(_as_numbers, held)), module.num_heads


def _check_widths(width: int, kdim: int, vdim: int) -> None:
    if not width == kdim == vdim:
        raise ShapeError(
            f"module must take queries, keys and values of one width: {width}, kdim={kdim}, vdim={vdim}; "
            "explain one without kdim and vdim"
        )


def _as_numbers(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def own_steps(module: nn.Module, scale: float) -> dict[str, Step]:
    """Where this module's rules are not the recipe's: its scale, and what a query that sees nothing gets."""
    steps: dict[str, Step] = {}
    if isinstance(module, MultiHeadAttention) and module.scale is not None:

        def scaled(state: Any) -> None:
            state.scaled = state.scores * scale

        steps["scale"] = scaled
    if isinstance(module, MultiHeadAttention) or getattr(module, "empty_rows", "nan") == "zero":

        def nothing_where_nothing_is_seen(state: Any) -> None:
            seen = (state.hidden > -torch.inf).any(-1, keepdim=True)
            state.p = torch.softmax(state.hidden, -1).masked_fill(~seen, 0.0)

        steps["softmax"] = nothing_where_nothing_is_seen
    return steps


@torch.no_grad()
def own_numbers(module: nn.Module, given: ProbeInputs) -> dict[str, Tensor]:
    """What the module itself says, in its own dtype and as if in evaluation: `p` [B, H, T, S], `output`.

    Args:
        given: batch first, float64; cast to the module's dtype here.
    """
    weight = next(module.parameters())
    query, key, value = (x.to(weight.device, weight.dtype) for x in given[:3])
    if given.key is given.query and given.value is given.query:
        key = value = query
    mask = None if given.mask is None else given.mask.to(weight.device)  # [B, T, S]
    training, module.training = module.training, False  # no dropout; its parts keep their own mode
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
    """Compute every step of multi-head attention in this module's own numbers.

    The steps are computed in float64 with the module's weights and shown beside the module's own weights and
    output without dropout. A norm, a rotation or bias by position and a residual connection are steps of
    their own.

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
        given = ProbeInputs(*inputs, _dense(own_mask, B, num_heads, T, S))
        labels = _labels(tokens, T, S, given.query is given.key)
        return mine.explanation(given, labels, batch)
    given = ProbeInputs(*inputs, _dense(own_mask, B, num_heads, T, S))
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
        notes.append(f"{shared} heads share their keys and values.")
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
    given = call.inputs if yours is None else yours.inputs
    B, T, E = given.query.shape
    check_size(B, evidence.num_heads, T, given.key.shape[1], E)
    expected = (evidence.truth(call) if given is call.inputs else None) or recipe.run(
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


def best_call(evidence: Evidence, probe: str | None) -> ProbeCall | None:
    """The answered call of this probe, or the one that is likeliest to show all there is."""
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
        return f"Your output is off from these steps by up to {error:.0e}: they are only a guess."
    equal = "exactly" if error == 0 else f"to {error:.0e}"
    return f"Your output equals what these steps give, {equal}: they are what your code computes."


class Understood:
    """A module that is neither headwise's nor torch's, and what it computes."""

    def __init__(self, module: nn.Module, evidence: Evidence, caller: Caller) -> None:
        assert evidence.weights is not None
        self.evidence, self.module, self._caller = evidence, module, caller_of_module(caller, module)
        self.weights: Weights = weights_of_module(evidence.weights, caller, module)
        self.num_heads = evidence.num_heads

    def _designs(self, given: ProbeInputs) -> list[Design]:
        """What is inside on purpose, with the numbers that this module has, for inputs of this length.

        Raises:
            ArgumentError: they cannot be measured.
        """
        there = [one for one in self.evidence.designs if steps_of([one])]
        windows = [one for one in there if _is_band(one)]  # they hold no number of the module's
        if len(windows) == len(there):
            return windows
        caller, T, S = self._caller, given.query.shape[1], given.key.shape[1]
        causal = None
        if self.evidence.conventions.always_causal:
            causal = torch.ones(caller.subject.sizes.long, caller.subject.sizes.long).tril().bool()
        with float64_environment():
            try:
                found = measure_designs(caller, causal, self.weights, self.num_heads, T, S) or []
            except CAUGHT:
                found = []
        designs = [one for one in found if not _is_band(one)]
        if [one.key for one in designs] != [one.key for one in there if not _is_band(one)]:
            name, what = type(self.module).__name__, "; ".join(one.words for one in self.evidence.designs)
            raise ArgumentError(
                f"module must have designs whose numbers can be measured: {name} has {what}, and for {T} "
                f"queries and {S} keys they were not found; headwise explain FILE shows it"
            )
        return [*designs, *windows]

    @neutral_torch_state()
    def explanation(
        self, given: ProbeInputs, labels: tuple[list[str] | None, list[str] | None], batch: int
    ) -> Explanation:
        """Every step on these inputs, the module's own numbers beside the expected ones."""
        designs = self._designs(given)
        expected = recipe.run(given, self.weights, self.num_heads, steps_of(designs))
        diagnosis = diagnose(self.evidence)
        faults = diagnosis.faults  # before the judgement, for which some are a design
        report = judge(self.evidence, diagnosis)
        yours = {}
        if faults:
            wrong = dict(steps_of(designs))
            wrong |= {name: step for made in faults for name, step in made.steps.items()}
            yours = fields_of(recipe.run(given, self.weights, self.num_heads, wrong))
        name = type(self.module).__name__
        notes = [f"The steps are computed in float64 with the weights of your {name}."]
        if faults is None:
            notes.append(
                "No fault of the library explains your output, so your numbers on the way are not known."
            )
        mask = None if self.evidence.conventions.always_causal else given.mask
        with float64_environment(), torch.no_grad():
            try:
                yours["output"] = self._caller.call(given.query, given.key, given.value, mask).output
            except CAUGHT as error:
                notes.append(f"Your module could not be called with these inputs: {error}")
        return Explanation(
            name, expected, yours, query_labels=labels[0], key_labels=labels[1], faults=report.faults,
            notes=notes, batch=batch, checked=None if report.ok else report.summary,
        )  # fmt: skip


def _is_band(one: Design) -> bool:
    """A window by distance alone, whatever it is computed from."""
    return one.key == "window" and "from" in one.numbers


def understood(module: nn.Module) -> Understood:
    """How it works.

    Raises:
        ArgumentError: that could not be found out.
    """
    if any(isinstance(one, UninitializedParameter) for one in module.parameters()):
        raise ArgumentError(
            f"module must have its weights: {type(module).__name__}'s wait for a first call; call it once"
        )
    evidence, caller = understand(module)
    if caller is None or evidence.weights is None:
        why = next((one.message for one in evidence.problems), "it gave no numbers")
        raise ArgumentError(
            f"module must be one that headwise.check understands: {type(module).__name__} is not: {why}; "
            "see what headwise.check says of it"
        )
    return Understood(module, evidence, caller)


SECONDS, MEMORY = 60.0, 4 * 2**30  # the most it may take


def explain_file(path: Path, name: str | None = None, *, trust: bool = False) -> Explanation:
    """Every step in the numbers of a learner's code, with the fault that was found in it, if any.

    Args:
        name: which class or function; None: the one that looks most like multi-head attention.
        trust: run it even where the system offers no fences.

    Raises:
        ArgumentError: no such file or name; no fences and no trust; nothing that could be explained.
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
            f"file must run to be explained: {report.summary}; see headwise check {path.name}"
        )
    chosen = likeliest(path, source) if name is None else name
    outcome = run_file(path.resolve(), chosen, seconds=SECONDS, memory=MEMORY, trust=trust, options={})
    evidence = outcome.evidence
    if evidence is not None and evidence.step is not None:
        raise ArgumentError(
            f"name must be a whole attention to be explained: {chosen} is one step of it ({evidence.step}); "
            f"see headwise check {path.name}:{chosen}"
        )
    if (
        evidence is None
        or evidence.weights is None
        or not any(call.output is not None for call in evidence.calls)
    ):
        problems = [outcome.problem, *(evidence.problems if evidence is not None else [])]
        why = next((one.message for one in problems if one is not None), "it gave no numbers")
        raise ArgumentError(
            f"{chosen} must run and have weights to be explained: {why}; see headwise check {path.name}"
        )
    evidence.source, evidence.path = source, str(path)
    diagnosis = diagnose(evidence)
    theirs = _theirs(evidence, diagnosis.faults)  # before the judgement, for which some are a design
    report = judge(evidence, diagnosis)
    number_by_cell(report, cells)
    return explain_evidence(evidence, theirs, report=report)


def _theirs(evidence: Evidence, faults: tuple[Made, ...] | None) -> State | None:
    """The recipe with the fault that explains the learner's numbers, on the first probe where it shows."""
    from ..diagnosis import first_difference

    assert evidence.weights is not None
    if faults is None:
        return None
    parted = first_difference(evidence, faults)
    call = best_call(evidence, None if parted is None else parted[0])
    assert call is not None, "the caller looked for one"
    wrong = {**steps_of(evidence.designs)}
    wrong |= {name: step for made in faults for name, step in made.steps.items()}
    return recipe.run(call.inputs, evidence.weights, evidence.num_heads, wrong)
