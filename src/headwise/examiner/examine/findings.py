"""Checks beside the numbers: randomness, gradients, inputs left unchanged, saving, half precision, missing
biases, shared weights, a batch of one.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..evidence import Evidence, Finding, ProbeCall
from ..faults.masking import BEFORE_MIXING
from ..recipe import ProbeInputs, run, steps_of
from .call_record import record_call
from .caller import Caller, inputs_for, map_inputs
from .construction import Construction
from .constructor import parameters_of
from .conventions import padding_mask
from .environment import CAUGHT, by_default, problem_of, seed
from .generality import other_lengths, seeds_kept, state_kept, wider_values
from .parameters import path_role
from .probes import (
    LONGER,
    SAME,
    SHORT_PROBE,
    cached,
    call_with,
    can_express,
    cast,
    causal_mask,
    plain,
    run_body,
    share_off,
    some_mask,
)
from .projections import Projections
from .recognition import FAR
from .subject import (
    Subject,
    batch_of,
    cast_loose,
    in_precision,
    reset_method,
    settle,
    signature_of,
    with_parameters_of,
)
from .vocabulary import role_word, size_word

FIXED = re.compile(r"def __init__\([^)]*\b(seq_len\w*|n\w*_patches|n\w*_tokens|window_size|resolution)\b")


def findings(
    caller: Caller, projections: Projections, evidence: Evidence, construction: Construction | None
) -> list[Finding]:
    """Return the findings of all checks; a check that raises is a finding, too."""
    right, same = is_right(evidence), _same(caller)
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _made_in_forward(caller),
        lambda: _independent_calls(caller),
        lambda: _deterministic(caller, construction),
        lambda: _training(caller, evidence),
        lambda: _rescaled_dropout(caller, evidence, construction) if right else iter(()),
        lambda: _inputs_unchanged(caller),
        lambda: _dropout_before_softmax(caller),
        lambda: _same_head_in_a_list(caller),
        lambda: _gradients(caller, projections, evidence, right),
        lambda: _state_dict(caller),
        lambda: half_precision(caller, right),
        lambda: output_dtype(caller),
        lambda: batch_of_one(evidence, same, batch_of(caller.subject.body)),
        lambda: non_contiguous_input(evidence, same),
        lambda: _returned_weights(evidence),
        lambda: _switches_drop_masks(caller, construction) if right else iter(()),
        lambda: _hidden_before_mixing(caller, evidence) if right else iter(()),
        lambda: biases(projections, right),
        lambda: missing_projections(caller, projections, evidence),
        lambda: cached(caller, evidence, right),
        lambda: seeds_kept(caller),
        lambda: other_lengths(caller, evidence) if right else iter(()),
        lambda: wider_values(caller, evidence) if right else iter(()),
    ]
    results: list[Finding] = []
    for check in checks:
        try:
            results += check()
        except CAUGHT as error:
            problem = problem_of(error, "call", caller.subject.files)
            name = "a check beside the numbers"
            results.append(Finding(name, "unknown", f"{problem.kind}: {problem.message}", None, problem.line))
    return results


def is_right(evidence: Evidence) -> bool:
    """Return True if every probe gave the recipe's output; rows that may attend to nothing do not count."""
    if evidence.weights is None:
        return False
    for call in evidence.calls:
        state = evidence.truth(call)
        if call.output is None or state is None or call.output.shape != state.output.shape:
            return False
        truth, mask = state.output, call.inputs.mask
        has_keys = torch.ones(truth.shape[:2], dtype=torch.bool) if mask is None else mask.any(-1)
        if not share_off(call.output[has_keys], truth[has_keys]) <= 1e-5:
            return False
    return True


class _WeightDrawCounter(TorchFunctionMode):
    """Counts parameters that are filled with random numbers: layers that are being made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        drawn = getattr(func, "__name__", "").endswith(("uniform_", "normal_"))
        filled = args[0] if args else (kwargs or {}).get("tensor")  # torch.nn.init names it
        self.count += drawn and isinstance(filled, nn.Parameter)
        return func(*args, **(kwargs or {}))


def _made_in_forward(caller: Caller) -> Iterator[Finding]:
    """Find layers that are made in every call."""
    if not isinstance(caller.subject.body, nn.Module):
        return
    run_body(caller, caller.subject.body)  # lazy layers are made by the first call
    with _WeightDrawCounter() as drawn:
        run_body(caller, caller.subject.body)
    if drawn.count:
        detail = f"every call creates {drawn.count} new weights, which are never trained"
        yield Finding("layers made once", "wrong", detail, "layers made in forward")


def _independent_calls(caller: Caller) -> Iterator[Finding]:
    """Find outputs that depend on earlier calls, with one seed for all calls."""
    name = "calls are independent"
    clear = reset_method(caller.subject.body)
    if clear is not None:
        yield Finding(name, "right", f"it keeps state on purpose; {clear}() was called before each call")
        return
    try:
        body = copy.deepcopy(caller.subject.body)
    except CAUGHT:  # it stores a tensor with its graph: calls of new instances show what that does
        if difference := state_kept(caller, _same(caller)):
            yield Finding(name, "wrong", difference, "state kept between calls")
        return
    other = replace(caller, subject=replace(caller.subject, body=body, calm=True))
    before = run_body(other, body, calm=True)
    with torch.no_grad():
        B = batch_of(body) or 1
        other.call(*inputs_for(caller, seed=107, B=B))
        try:
            after = run_body(other, body, calm=True)
        except CAUGHT as error:
            problem = problem_of(error, "call", caller.subject.files)
            detail = f"after a call with a different batch, the first input raises {problem.kind}"
            yield Finding(name, "wrong", detail, "state kept between calls")
            return
        later = run_body(other, body, calm=True)
    off = max(share_off(x.nan_to_num(), before.nan_to_num()) for x in (after, later))
    if off <= SAME and bool((after.isnan() == before.isnan()).all()):
        if difference := state_kept(caller, _same(caller)):
            yield Finding(name, "wrong", difference, "state kept between calls")
        else:
            yield Finding(name, "right", "earlier calls do not change the output")
    else:
        detail = f"the outputs for x before and after a call with another input differ by {off:.2g}"
        yield Finding(name, "wrong", detail, "state kept between calls")


def _returned_weights(evidence: Evidence) -> Iterator[Finding]:
    """Find returned weights that are those before the mask, where the values were mixed with masked ones."""
    for call in evidence.calls:
        mask = call.inputs.mask
        if call.weights is None or call.output is None or mask is None or call.probe == "empty row":
            continue
        truth = None if evidence.weights is None else evidence.truth(call)
        if truth is None or truth.p.shape != call.weights.shape or bool(mask.all()):
            continue
        right = share_off(call.weights, truth.p) <= 1e-5
        if right or share_off(call.output, truth.output) > 1e-5:
            continue
        if share_off(call.weights, truth.scaled.softmax(-1)) <= 1e-5:
            most = float(call.weights[~mask[:, None].expand_as(call.weights)].max())
            detail = (
                f"test input {call.probe}: in the returned weights, a hidden key has a weight of {most:.2g}"
            )
            yield Finding("weights returned", "wrong", detail, "unmasked weights returned")
            return


def _deterministic(caller: Caller, construction: Construction | None) -> Iterator[Finding]:
    """Find outputs that differ between two calls in eval, also with dropout of 0.5 where that can be set."""
    name, subject = "deterministic in eval", caller.subject
    if not _equal(run_body(caller, subject.body, 1), run_body(caller, subject.body, 2)):
        calm = _equal(
            run_body(caller, subject.body, 1, calm=True), run_body(caller, subject.body, 2, calm=True)
        )
        if calm:
            yield Finding(
                name,
                "wrong",
                "two calls in evaluation mode give different outputs: dropout is active",
                "dropout in eval",
            )
        else:
            yield Finding(
                name,
                "wrong",
                "two calls in evaluation mode give different outputs, and dropout is not the reason",
                "not deterministic",
            )
        return
    if construction is not None and construction.takes("dropout"):
        try:
            body = construction.make(0.5)
            in_precision(body, subject.dtype).eval()
            first, second = run_body(caller, body, 1), run_body(caller, body, 2)
        except CAUGHT:
            yield Finding(name, "right", "two calls in evaluation mode give the same output")
            return
        if not _equal(first, second):
            yield Finding(
                name,
                "wrong",
                "built with dropout=0.5, two calls in evaluation mode give different outputs",
                "dropout in eval",
            )
            return
    yield Finding(name, "right", "two calls in evaluation mode give the same output")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two outputs are equal, with NaN in the same places."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _training(caller: Caller, evidence: Evidence) -> Iterator[Finding]:
    """Find outputs that differ between training without dropout and evaluation."""
    name, body = "train equals eval without dropout", caller.subject.body
    if not isinstance(body, nn.Module):
        return
    other = copy.deepcopy(body)
    for module in other.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in vars(module).items():
            if "drop" in key.lower() and isinstance(value, float):
                setattr(module, key, 0.0)
    other.train()
    try:
        off = share_off(
            run_body(caller, other, calm=caller.subject.calm),
            run_body(caller, body, calm=caller.subject.calm),
        )
    except CAUGHT as error:
        problem = problem_of(error, "call", caller.subject.files)
        yield Finding(
            name, "wrong", f"in training it raises {problem.kind}: {problem.message}", None, problem.line
        )
        return
    if off > _same(caller) and not _equal(run_body(caller, other, 1), run_body(caller, other, 2)):
        measured = [_share_in_training(caller, evidence, other, body, x) for x in (FEW_CALLS, MANY_CALLS)]
        if all(share + 5 * spread < 0.98 for share, spread in measured):
            detail = SMALLER.format(measured[1][0])
            yield Finding("dropout is rescaled", "wrong", detail, "dropout not rescaled")
        detail = "in training random numbers change the output, and no argument switches that off"
        yield Finding(name, "unknown", detail)
        return
    once = _causal_once(caller, other, evidence) if off > _same(caller) else ""
    if off <= _same(caller):
        yield Finding(name, "right", "with dropout=0, training and evaluation mode give the same output")
    elif once:
        where = {
            "training": "later keys are hidden in training mode, but not in evaluation mode",
            "evaluation": "later keys are hidden in evaluation mode, but not in training mode",
        }
        yield Finding(name, "wrong", where[once], f"causal only in {once}")
    else:
        yield Finding(
            name,
            "wrong",
            f"with dropout=0, the outputs in training and in evaluation mode differ by {off:.0e}",
        )


def _causal_once(caller: Caller, training: nn.Module, evidence: Evidence) -> str:
    """Return "training" or "evaluation" if the future is hidden in that mode alone, else ""."""
    if evidence.weights is None:
        return ""
    inputs, calm = plain(caller), caller.subject.calm
    B, T, S = len(inputs[0]), inputs[0].shape[1], inputs[1].shape[1]
    hidden, unmasked = (
        evidence.truth(ProbeCall("", ProbeInputs(*inputs, mask))) for mask in (causal_mask(B, T, S), None)
    )
    if hidden is None or unmasked is None:
        return ""
    outputs = run_body(caller, training, calm=calm), run_body(caller, caller.subject.body, calm=calm)
    for word, (masked_output, other) in (("training", outputs), ("evaluation", outputs[::-1])):
        if share_off(masked_output, hidden.output) <= 1e-5 and share_off(other, unmasked.output) <= 1e-5:
            return word
    return ""


def _rescaled_dropout(
    caller: Caller, evidence: Evidence, construction: Construction | None
) -> Iterator[Finding]:
    """Find dropout that makes the outputs in training smaller on average, by 1 - p or its square."""
    if construction is None or not construction.takes("dropout") or caller.plan.as_numpy:
        return
    share = 1.0
    for p, calls in ((0.5, FEW_CALLS), (0.25, MANY_CALLS)):
        body = construction.make(p)
        if not isinstance(body, nn.Module):
            return
        body = with_parameters_of(caller.subject, body)
        share, spread = _share_in_training(caller, evidence, body, copy.deepcopy(body).eval(), calls)
        if min(abs(share - (1 - p)), abs(share - (1 - p) ** 2)) > 0.02 + 4 * spread or share > 0.9:
            return  # dropout of the inputs may change the mean by any number
    yield Finding("dropout is rescaled", "wrong", SMALLER.format(share), "dropout not rescaled")


FEW_CALLS, MANY_CALLS = range(6), range(6, 30)  # seeds
SMALLER = "in training the output is {:.2f} times that in evaluation, on average"


def _share_in_training(
    caller: Caller, evidence: Evidence, training: nn.Module, evaluation: nn.Module, seeds: range
) -> tuple[float, float]:
    """Return the mean of outputs in training as a share of the output in evaluation, and its standard error.

    All positions are equal, so that each head returns its value times the sum of the weights. Weights that
    are dropped before the softmax, on purpose, leave that sum at 1. It is 1 as well where nothing is known.
    """
    if evidence.weights is None or any(
        design.key in ("residual", "norm after") for design in evidence.designs
    ):
        return 1.0, 0.0
    inputs = map_inputs(plain(caller), lambda x: x[:, :1].expand_as(x).contiguous())
    bias = evidence.weights.o_bias

    def output(body: nn.Module, seed: int) -> Tensor:
        other = replace(caller, subject=replace(caller.subject, body=body, calm=False))
        with torch.no_grad():
            return (other.call(*inputs, seed=seed).output - bias).flatten()

    wanted = output(evaluation, 0)
    if not torch.equal(wanted, output(evaluation, 1)):
        return 1.0, 0.0  # it is random in evaluation, too
    shares = torch.stack([output(training.train(), seed) @ wanted for seed in seeds]) / (wanted @ wanted)
    return float(shares.mean()), float(shares.std()) / len(shares) ** 0.5


MASKS_WITH_SWITCHES = "masks with switches"
OTHER_WAYS = re.compile(r"flash|sdpa|fused|fast|efficient|xformers|triton|kernel|optimi[sz]ed|native", re.I)


def _switches_drop_masks(caller: Caller, construction: Construction | None) -> Iterator[Finding]:
    """Find switches with which padding changes nothing, although it does without them.

    They make the code causal, or choose another way to compute the same.
    """
    B, L = caller.subject.sizes.B, caller.subject.sizes.long
    for convention in caller.conventions:
        one_mask = replace(caller, conventions=(convention,))
        masks = (padding_mask(B, L, L), padding_mask(B, L, L, same=True))
        mask = next((mask for mask in masks if can_express(one_mask, mask)), None)
        others = [] if mask is None else list(_switched(one_mask, construction))
        if mask is None or convention.kind == "switch" or not others:
            continue
        free, masked = _free_and_masked(one_mask, mask)
        for name, value, switched in others if share_off(masked, free) > 1e-3 else ():
            is_causal = size_word(name) == "causal"
            try:
                own_free, own_masked = _free_and_masked(switched, mask)
            except CAUGHT:
                continue
            if share_off(own_masked, own_free) <= SAME and (is_causal or share_off(own_free, free) <= 1e-5):
                detail = f"with {name}={value}, {convention.argument} changes nothing"
                dropped = "one mask replaces another" if is_causal else "mask ignored"
                yield Finding(MASKS_WITH_SWITCHES, "wrong", detail, dropped)
                return


def _switched(caller: Caller, construction: Construction | None) -> Iterator[tuple[str, bool, Caller]]:
    """Yield (name, value, caller) with a switch of the constructor, forward or a module turned over."""

    def may_switch(name: str, value: object) -> bool:
        chosen = size_word(name) == "causal" or OTHER_WAYS.search(name) is not None
        return chosen and isinstance(value, bool) and name not in caller.subject.arguments

    body, names = caller.subject.body, {name for name, _ in caller.plan.switches}  # those are probed
    for parameter in () if construction is None else parameters_of(construction.constructor.cls):
        if construction is None or not may_switch(parameter.name, parameter.default):
            continue
        names.add(parameter.name)
        with contextlib.suppress(*CAUGHT):
            other = construction.make(switches={parameter.name: not parameter.default})
            other = with_parameters_of(caller.subject, other).eval()
            switched = replace(caller, subject=replace(caller.subject, body=other))
            yield parameter.name, not parameter.default, switched
    for parameter in signature_of(body).parameters.values():
        if parameter.name not in names and may_switch(parameter.name, parameter.default):
            constants = (*caller.plan.constants, (parameter.name, not parameter.default))
            switched = replace(caller, plan=replace(caller.plan, constants=constants))
            yield parameter.name, not parameter.default, switched
    for path, module in body.named_modules() if isinstance(body, nn.Module) else ():
        for name, value in list(vars(module).items()):
            if name not in names and may_switch(name, value):
                other = copy.deepcopy(body)
                setattr(other.get_submodule(path), name, not value)
                yield name, not value, replace(caller, subject=replace(caller.subject, body=other))


@torch.no_grad()
def _free_and_masked(caller: Caller, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of the plain probe without and with a mask."""
    return caller.call(*plain(caller)).output, caller.call(*plain(caller), mask).output


def _hidden_before_mixing(caller: Caller, evidence: Evidence) -> Iterator[Finding]:
    """Find masks that are applied before the scores of all heads are mixed, with the matrix negated.

    With a matrix whose rows have positive sums, the hidden scores stay low.
    """
    mixer = next((x.tensors["before"] for x in evidence.designs if "before" in x.tensors), None)
    if mixer is None or not bool((mixer.sum(1) > 0).any()) or not isinstance(caller.subject.body, nn.Module):
        return  # without such a row the negated matrix hides as well as the right order does
    body = copy.deepcopy(caller.subject.body)
    mask = some_mask(caller)
    for parameter in body.parameters():
        own = parameter.detach().double().squeeze()
        if own.shape == mixer.shape and any(torch.equal(own, x) for x in (mixer, mixer.T)):
            parameter.data.neg_()
    designs = [replace(x, tensors={**x.tensors, "before": -mixer}) if "before" in x.tensors else x
               for x in evidence.designs]  # fmt: skip
    negated = replace(caller, subject=replace(caller.subject, body=body))
    call = call_with(negated, "negated", plain(caller), mask, evidence.conventions.always_causal)
    if call.output is None or call.inputs.mask is None or evidence.weights is None:
        return
    wrong = run(call.inputs, evidence.weights, evidence.num_heads, {**steps_of(designs), **BEFORE_MIXING})
    if share_off(call.output, wrong.output) <= 1e-6:
        detail = "with a matrix of the opposite sign, hidden keys get the weights"
        yield Finding("mask and mixed heads", "wrong", detail, "mask before heads are mixed")


def _dropout_before_softmax(caller: Caller) -> Iterator[Finding]:
    """Find dropout that is applied to scores instead of weights."""
    if caller.plan.as_numpy:
        return
    ran = record_call(caller, plain(caller))
    for x in ran.dropped:
        for each in ran.scores:
            visible = each.isfinite() & (each > -FAR)
            if x.ndim > 2 and x.shape == each.shape and _scaled_alike(x[visible], each[visible]):
                detail = (
                    "dropout is applied to the scores: a dropped score is 0, and the softmax gives it weight"
                )
                yield Finding("dropout", "wrong", detail, "dropout before softmax")
                return


def _scaled_alike(x: Tensor, y: Tensor) -> bool:
    """Return True if y is x times one positive number."""
    if not x.numel() or not bool(x.any()):
        return False
    at = x.abs().argmax()
    factor = y[at] / x[at]
    return bool(factor > 0) and torch.allclose(x * factor, y, rtol=1e-6, atol=1e-9)


def _same_head_in_a_list(caller: Caller) -> Iterator[Finding]:
    """Find lists of heads that hold one module several times."""
    body = caller.subject.body
    for path, module in body.named_modules() if isinstance(body, nn.Module) else ():
        if not isinstance(module, nn.ModuleList) or len(module) != caller.subject.sizes.H:
            continue
        if not {"q", "k", "v"} <= {path_role(name) for name, _ in module.named_parameters()}:
            continue  # a norm, or keys that all heads share on purpose
        if (
            len(module) > 1
            and len({id(head) for head in module}) == 1
            and any(True for _ in module.parameters())
        ):
            detail = (
                f"{path} contains the same module {len(module)} times, so all heads have the same weights"
            )
            yield Finding("heads of their own", "wrong", detail, "same head for all")
            return


def _inputs_unchanged(caller: Caller) -> Iterator[Finding]:
    """Find inputs and masks that a call writes to."""
    name = "input left unmodified"
    written = _written_to(caller, None)
    changed = [slot for argument, slot in caller.plan.slots if argument in written]
    if changed:
        argument = "input" if caller.plan.self_only else changed[0].replace("memory", "key")
        yield Finding(name, "wrong", f"the {argument} is changed in place", "input modified")
    else:
        yield Finding(name, "right", "a call does not change its inputs")
    mask = some_mask(caller)
    if mask is None:
        return
    name, arguments = "mask left unmodified", {way.argument for way in caller.conventions}
    masks = sorted(arguments & _written_to(caller, mask))
    if masks:
        detail = f"{masks[0]} is changed in place: the next call gets the changed mask"
        yield Finding(name, "wrong", detail, "mask modified")
    else:
        yield Finding(name, "right", "a call does not change its mask")


def _written_to(caller: Caller, mask: Tensor | None) -> set[str]:
    """Return the arguments whose tensors a call changes."""
    handed: list[tuple[str, Tensor, Tensor]] = []
    names = [argument for argument, _ in caller.plan.slots]

    def listen(args: list[object], kwargs: dict[str, object], seed: int = 0) -> object:
        every = [*zip(names, args, strict=False), *kwargs.items()]
        handed.extend((name, x, x.clone()) for name, x in every if torch.is_tensor(x))
        return Subject.invoke(caller.subject, args, kwargs, seed)

    watched = replace(caller, subject=copy.copy(caller.subject))
    watched.subject.invoke = listen  # type: ignore[method-assign]
    with torch.no_grad():
        watched.call(*plain(caller), mask)
    return {name for name, after, before in handed if not _equal(after, before)}


def _gradients(
    caller: Caller, projections: Projections, evidence: Evidence, right: bool
) -> Iterator[Finding]:
    """Find inputs and parameters that no gradient reaches."""
    name, subject = "gradients", caller.subject
    if caller.plan.as_numpy:
        return
    query, key, value = map_inputs(plain(caller), lambda x: x.clone().requires_grad_())
    parameters = {k: p for k, p in subject.parameters.items() if p.is_floating_point()}
    leaves = {id(x): x for x in (query, key, value, *parameters.values()) if x.requires_grad}
    try:
        output = caller.call(query, key, value).output
        generator = torch.Generator().manual_seed(8)
        loss = (output * torch.randn(output.shape, generator=generator, dtype=output.dtype)).sum()
        with _unhooked(parameters.values()):
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    except CAUGHT as error:
        problem = problem_of(error, "backward", subject.files)
        detail = f"backward raises {problem.kind}: {problem.message}"
        if "does not require grad" in problem.message:  # it may be for inference alone
            yield Finding(name, "unknown", "it runs without gradients: nothing in it can be trained")
        else:
            parts = [*parameters, "query", "key", "value"]
            yield Finding(name, "wrong", detail, "gradients blocked", problem.line, parts=parts)
        return
    words = {"query": query, "key": key, "value": value}
    if caller.plan.self_only:
        words = {"input": query}
    elif caller.plan.memory_only:
        words = {"query": query, "memory": key}
    grads = {key: grad for key, grad in zip(leaves, gradients, strict=True) if grad is not None}

    def is_dead(x: Tensor) -> bool:
        return id(x) not in grads or not bool(grads[id(x)].any())

    dead = [f"the {word}" for word, x in words.items() if is_dead(x)]
    guess = projections.guess
    keys = {piece.name for piece in (guess.biases.get("k", []) if guess else [])}
    keys |= {k for k in parameters if "k" in k.lower() and parameters[k].ndim == 1}
    lost = [k for k, p in parameters.items() if is_dead(p) and k not in keys | subject.frozen]
    lost += _slices_lost(caller, evidence, lost, grads)
    unused = _heads_unused(caller, evidence, grads) if right and not (dead or lost) else []
    if unused:
        yield Finding(name, "wrong", f"no output depends on {', '.join(unused)}", "same head for all")
    elif dead or lost:
        which = ", ".join(dead + lost[:6])
        fault = "gradients blocked" if right else None  # else a symptom of what is wrong with the numbers
        parts = [*(word for word, x in words.items() if is_dead(x)), *lost]
        yield Finding(name, "wrong", f"no gradient reaches {which}", fault, parts=parts)
    else:
        yield Finding(name, "right", "gradients reach every input and every parameter")


@contextlib.contextmanager
def _unhooked(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Remove the hooks of parameters meanwhile; they may freeze rows on purpose."""
    hooks = [(parameter, parameter._backward_hooks) for parameter in parameters]
    try:
        for parameter, _ in hooks:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hook in hooks:
            parameter._backward_hooks = hook


def _slices_lost(caller: Caller, evidence: Evidence, lost: list[str], grads: dict[int, Tensor]) -> list[str]:
    """Return projections, each a part of a parameter, that get no gradient although another part does."""
    parameters = caller.subject.parameters.values()
    if not parameters:
        return []
    flat_grads = torch.cat(
        [grads[id(p)].cpu().flatten() if id(p) in grads else torch.zeros(p.numel()) for p in parameters]
    )
    return [
        role.parameter
        for name in "qkvo"
        if (role := evidence.roles.get(name)) is not None and role.path not in {*lost, *caller.subject.frozen}
        for places in evidence.origin.get(name, [])
        if bool((places >= 0).any()) and not bool(flat_grads[places[places >= 0]].any())
    ]


def _heads_unused(caller: Caller, evidence: Evidence, grads: dict[int, Tensor]) -> list[str]:
    """Return parts of the weights of q, k and v, at least as large as a head, that no output depends on."""
    sizes, unused = caller.subject.sizes, []
    if not {"q", "k", "v"} <= evidence.roles.keys():
        return []
    names = {
        re.split(r"[\[ ]", evidence.roles[role].parameter)[0] for role in "qkv" if role in evidence.roles
    }
    for name, parameter in caller.subject.parameters.items():
        grad = grads.get(id(parameter))
        if name not in names or grad is None or grad.ndim < 2:
            continue
        for axis, count in enumerate(grad.shape):
            dead = int((grad.movedim(axis, 0).flatten(1) == 0).all(1).sum())
            if dead * (grad.numel() // count) >= sizes.E * sizes.D:
                unused.append(f"{dead} of {count} rows of {name}")
                break
    return unused


def _state_dict(caller: Caller) -> Iterator[Finding]:
    """Find code whose new instance, with this one's state dict, computes something else."""
    name, subject = "state dict complete", caller.subject
    if not isinstance(subject.body, nn.Module):
        return
    if subject.unregistered:
        which = ", ".join(subject.unregistered[:4])
        layers = any(c.isdigit() for c in which) or ".weight" in which  # a plain tensor has no such name
        fault = "heads in a list" if layers else "state dict incomplete"
        detail = f"state_dict() and parameters() do not contain {which}"
        yield Finding(name, "wrong", detail, fault, parts=list(subject.unregistered))
        return
    if subject.make is None:
        yield Finding(name, "right", "state_dict() contains every weight")
        return
    try:
        seed(4)  # another than the first was made with
        other = subject.make()
        fresh = replace(subject, body=other)
        with torch.no_grad():
            run_body(caller, in_precision(other, subject.dtype).eval())  # lazy layers get their shapes
        settle(fresh)
        own = other.state_dict()  # what the calls before made longer is no part of what was learned
        state = {k: x for k, x in subject.body.state_dict().items() if k in own and own[k].shape == x.shape}
        other.load_state_dict(state, strict=False)
        off = share_off(
            run_body(caller, other, calm=subject.calm), run_body(caller, subject.body, calm=subject.calm)
        )
    except CAUGHT as error:
        problem = problem_of(error, "build", subject.files)
        yield Finding(name, "unknown", f"{problem.kind}: {problem.message}", None, problem.line)
        return
    if off <= _same(caller):
        yield Finding(name, "right", "a new instance with the same state dict gives the same output")
    else:
        detail = f"the output of a new instance with the same state dict differs by {off:.2g}"
        yield Finding(name, "wrong", detail, "state dict incomplete")


def _in(dtype: torch.dtype, caller: Caller) -> object:
    """Return a copy of the code in another precision, with tensors that `Module.to` does not convert."""
    other = in_precision(copy.deepcopy(caller.subject.body), dtype)
    cast_loose(other, dtype, caller.subject.loose_dtypes)
    return other


def half_precision(caller: Caller, right: bool) -> Iterator[Finding]:
    """Find code that raises, overflows or is far off in bfloat16 or float16."""
    body = caller.subject.body
    if caller.plan.as_numpy or caller.subject.unregistered:
        return
    mask = some_mask(caller)
    inputs = plain(caller)
    with torch.no_grad():
        exact = caller.call(*inputs, mask).output.detach()
    for dtype, name, near in ((torch.bfloat16, "bfloat16", 0.1), (torch.float16, "float16", 0.02)):
        other = _in(dtype, caller) if isinstance(body, nn.Module) else body
        weights = {k: p.detach().to(dtype) for k, p in caller.subject.parameters.items()}
        small = replace(caller, subject=replace(caller.subject, body=other, parameters=weights, calm=False))
        query, key, value = cast(inputs, dtype)
        try:
            with torch.no_grad(), by_default(torch.float32):
                output = small.call(query, key, value, mask).output.detach()
        except Warning as error:  # a filter makes errors of them: nothing is known of the code itself
            yield Finding(name, "unknown", f"a warning was raised as an error: {type(error).__name__}")
            continue
        except CAUGHT as error:
            problem = problem_of(error, "call", caller.subject.files)
            overflow = "overflow" in problem.message
            detail = f"raises {problem.kind}: {problem.message}"
            fault = "overflow in half" if overflow else "wrong in half precision"
            yield Finding(name, "wrong", detail, fault, problem.line)
            continue
        if not right:
            continue
        off = share_off(output, exact)
        if not bool(output.isfinite().all()):
            yield Finding(name, "wrong", "the output is not finite", "wrong in half precision")
        elif off > near:
            yield Finding(
                name, "wrong", f"the output is off by {off:.0%} of its size", "wrong in half precision"
            )
        else:
            yield Finding(name, "right", f"in {name} the output differs by {off:.1%} from that in float64")


def output_dtype(caller: Caller) -> Iterator[Finding]:
    """Find outputs of another dtype than the input, in the precision of the code's own parameters.

    A new instance is called that the examiner has not converted, so that its float64 is no reason.
    """
    subject = caller.subject
    if not isinstance(subject.body, nn.Module) or caller.plan.as_numpy or subject.unregistered:
        return
    if subject.fresh is None:
        return
    name, own = "output dtype", torch.float32
    try:
        with torch.no_grad(), by_default(torch.float32):
            seed(0)
            other = subject.fresh().eval()
            own = next(
                (parameter.dtype for parameter in other.parameters() if parameter.is_floating_point()), own
            )
            small = replace(caller, subject=replace(subject, body=other, calm=False, dtype=torch.float32))
            output = small.call(*cast(plain(caller), own)).output
    except CAUGHT as error:
        problem = problem_of(error, "call", subject.files)
        detail = f"in {_dtype_name(own)} it raises {problem.message}"
        yield Finding(name, "wrong", detail, None, problem.line)
        return
    if output.dtype == own:
        yield Finding(name, "right", f"inputs in {_dtype_name(own)} give an output in {_dtype_name(own)}")
    else:
        detail = f"inputs in {_dtype_name(own)} give an output in {_dtype_name(output.dtype)}"
        yield Finding(name, "wrong", detail)


def _same(caller: Caller) -> float:
    """Return the largest difference of two outputs that count as the same."""
    return SAME if caller.subject.exact else caller.subject.tolerance


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def batch_of_one(evidence: Evidence, same: float, fixed: int | None) -> Iterator[Finding]:
    """Find a sequence whose output depends on the batch; `fixed`: the batch size that the file sets."""
    name = "batch of one"
    plain, single = evidence.call("plain"), evidence.call(name)
    if plain is None or single is None or plain.output is None:
        return
    if single.problem is not None and fixed:
        evidence.calls.remove(single)
        detail = f"a batch of one raises {single.problem.kind}: it is meant for batches of {fixed}"
        yield Finding(name, "unknown", detail, None, single.problem.line)
    elif single.problem is not None:
        yield Finding(
            name, "wrong", f"a batch of one raises {single.problem.kind}", None, single.problem.line
        )
    elif single.output is not None:
        off = share_off(single.output, plain.output[2:3])
        if off <= max(same, 1e-7):
            yield Finding(name, "right", "the output of a sequence alone equals its output in a batch")
        else:
            yield Finding(name, "wrong", "the output of a sequence alone differs from its output in a batch")


def non_contiguous_input(evidence: Evidence, same: float) -> Iterator[Finding]:
    """Find outputs that depend on the strides of the inputs."""
    name = "non-contiguous input"
    plain, strided = evidence.call("plain"), evidence.call(name)
    if plain is None or strided is None or plain.output is None:
        return
    if strided.problem is not None:
        fault = "view after transpose" if "view" in strided.problem.message else None
        yield Finding(
            name,
            "wrong",
            f"raises {strided.problem.kind}: {strided.problem.message}",
            fault,
            strided.problem.line,
        )
    elif strided.output is not None:
        right = share_off(strided.output, plain.output) <= same
        detail = f"inputs with other strides give {'the same' if right else 'a different'} output"
        yield Finding(name, "right" if right else "wrong", detail)


def one_length(evidence: Evidence, takes_length: bool = True) -> list[Finding]:
    """Find code that raises at another length than it was built for, and remove such calls from the evidence.

    A constructor that takes the length, and not the longest one, may be meant for one length.

    Args:
        takes_length: True if the length is an argument.
    """
    plain_, other = evidence.call("plain"), evidence.call(SHORT_PROBE)
    if other is None or other.problem is None:
        return []
    if plain_ is None or plain_.output is None:  # it crashes anyway
        evidence.calls.remove(other)
        return []
    short = other.inputs.query.shape[1]
    evidence.calls = [
        call for call in evidence.calls if call.problem is None or call.inputs.query.shape[1] != short
    ]
    words = (
        f"inputs of {short} positions raise {other.problem.kind}, inputs of "
        f"{plain_.inputs.query.shape[1]} do not"
    )
    if not takes_length or FIXED.search(evidence.source or ""):
        words += ": it may be meant for one length"
        return [Finding("other lengths", "unknown", words, None, other.problem.line)]
    return [Finding("other lengths", "wrong", words, "one length only", other.problem.line)]


CROSS = re.compile(
    r"cross|encoder|decoder|memory|\b(src|tgt|source|target|kv|key|k|len|seq_?len)_?(len|length|seq\w*|k|kv|key)\b",
    re.IGNORECASE,
)


def two_lengths(caller: Caller, evidence: Evidence, text: str) -> list[Finding]:
    """Find code that raises with more keys than queries, and remove the call if no other length is promised.

    A word about another sequence promises one, and so does an argument for one or for a mask, or a line that
    reads the length of the keys. Two feature maps that are fused may be meant for one grid.

    Args:
        text: the source of the class or function.
    """
    call, same = evidence.call(LONGER), evidence.call("plain")
    if call is None or call.problem is None or same is None or same.output is None or not text:
        return []
    names = "|".join(re.escape(name) for name, slot in caller.plan.slots if slot in ("key", "value"))
    read = re.search(rf"\b({names})\s*\.\s*(shape|size)\b|\blen\(({names})\)", text)
    mentions_two = CROSS.search(evidence.source or text) is not None  # also where the file uses it
    two_maps = caller.plan.layout in ("image", "volume") and len({slot for _, slot in caller.plan.slots}) > 1
    if not two_maps and (caller.plan.memory_only or caller.conventions or read is not None or mentions_two):
        return []
    evidence.calls.remove(call)
    words = f"more keys than queries raise {call.problem.kind}; the code may be meant for equal numbers"
    return [Finding("keys of another length", "unknown", words, None, call.problem.line)]


def biases(projections: Projections, right: bool) -> Iterator[Finding]:
    """Find biases that some projections have and others lack; that of the key has no effect."""
    guess = projections.guess
    if guess is None or not guess.complete:
        return
    for name in "kv":
        path = projections.roles[f"{name}_bias"].path if f"{name}_bias" in projections.roles else ""
        own = role_word(path.rpartition(".")[2])
        if right and own in tuple("qkv") and own != name:
            words = {"k": "keys, where a bias has no effect", "v": "values"}[name]
            detail = f"{path} is added to the {words}"
            yield Finding("biases", "wrong", detail, "bias of another projection")
            return
    if guess.source not in {"names", "given"}:
        return
    lacking = [name for name in "qkv" if not guess.biases.get(name)]
    if lacking == ["k"]:
        detail = (
            "the key projection has no bias; a key bias adds the same number to all scores of "
            "a query, which the softmax ignores"
        )
        yield Finding("key bias", "right", detail, "no key bias")
    elif len(lacking) < 3:
        for name in lacking:
            if name != "k":
                word = {"q": "query", "v": "value"}[name]
                detail = f"the {word} projection has no bias, but another projection has one"
                yield Finding(f"{word} bias", "wrong", detail, f"no {name} bias")


def missing_projections(caller: Caller, projections: Projections, evidence: Evidence) -> Iterator[Finding]:
    """Find projections that are missing, small or shared, where numbers prove the others."""
    guess, sizes = projections.guess, caller.subject.sizes
    if guess is None or projections.weights is None:
        return
    proven = projections.proven or _one_fault(projections, evidence)
    if projections.small:
        detail = (
            f"one projection of shape [{sizes.D}, {sizes.D}] is used for all {projections.num_heads} heads"
        )
        yield Finding("projection size", "wrong", detail, "same projection for every head")
    missing = [name for name in "qkv" if not guess.weights.get(name)]
    if missing and proven:
        fault = "no v projection" if missing == ["v"] else "no q and k projection"
        yield Finding("projections", "wrong", f"no projection for {', '.join(missing)} was found", fault)
    places = [(p.name, p.where) for name in "qkv" for p in guess.weights.get(name, [])[:1]]
    if len(places) == 3 and len(set(places)) < 3 and proven:
        detail = "one weight computes more than one of q, k and v"
        yield Finding("projections", "wrong", detail, "shared projection")
    if not guess.weights.get("o") and proven and projections.num_heads > 1 and not projections.elsewhere:
        detail = "the concatenated heads are returned"
        yield Finding("output projection", "wrong", detail, "no output projection")
    if projections.hard_coded:
        detail = f"it was built with {projections.hard_coded} heads, and uses {projections.num_heads}"
        yield Finding("number of heads", "wrong", detail, "hard-coded heads")
    if projections.rewired:
        yield Finding(
            "wiring",
            "unknown",
            f"the names of the parameters do not agree with the gradients: {projections.rewired}",
        )


def _one_fault(projections: Projections, evidence: Evidence) -> bool:
    """Return True if these projections and one fault compute the code's output."""
    from ..diagnosis import one_fault_explains  # imported here: it imports this package

    call = evidence.call("plain")
    if call is None or call.output is None or projections.weights is None:
        return False
    return one_fault_explains(projections.weights, projections.num_heads, call.inputs, call.output)
