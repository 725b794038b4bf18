"""Which parameters are the projections: proposed by names, gradients and calls, and checked by numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..evidence import Role
from ..recipe import ProbeInputs, Step, Weights, run
from .caller import Caller, inputs_for
from .environment import CAUGHT
from .parameters import (
    Assignment,
    Fingerprint,
    Fingerprints,
    ParameterLayout,
    ParameterSlice,
    alike,
    is_small,
    path_role,
    role_of,
    spells,
    weights_of,
    where_of,
)
from .subject import Subject, cast_loose


def by_names(
    subject: Subject, prints: Mapping[str, Fingerprint], given_roles: dict[str, str] | None = None
) -> Iterator[Assignment]:
    """Yield the assignments that parameter names allow, the likeliest first."""
    parameters, H = ParameterLayout(subject, prints), subject.sizes.H
    roles: dict[str, list[str]] = {}
    for name in parameters.weights:
        word = (given_roles or {}).get(name) if given_roles is not None else path_role(name)
        if word:
            roles.setdefault(word, []).append(name)
    bias_roles: dict[str, list[str]] = {}
    for name in parameters.biases:
        word = path_role(name)
        if word:
            bias_roles.setdefault(word, []).append(name)
    roles = {word: names for word, names in roles.items() if len(names) == 1 or alike(names)}
    if not {"q", "k", "v", "qkv", "kv", "qk"} & set(roles):
        return
    assigned = {name for names in roles.values() for name in names}
    evidence = "given" if given_roles is not None else "names"
    for outs in _outputs(parameters, roles, assigned):
        for pieces, biases, order, layout in _inputs(parameters, roles, bias_roles, prints, H):
            for axes in product(*(parameters.output_axes(name) for name in outs[:1])):
                guess = Assignment(
                    evidence, dict(pieces), dict(biases), order, {"q", "k", "v"} <= set(roles), layout
                )
                guess.spelled = any(spells(name) for name in roles.get("qkv", []))
                if outs:
                    guess.weights["o"] = [parameters.out_piece(name, axes[0]) for name in outs]
                    bias_names = [
                        parameters.bias_of(name) for name in outs if parameters.bias_of(name)
                    ] or bias_roles.get("o", [])
                    if bias_names:
                        guess.biases["o"] = [parameters.bias_piece(name) for name in bias_names if name][:1]
                yield guess


def by_request(
    subject: Subject, prints: Mapping[str, Fingerprint], roles: dict[str, str]
) -> Iterator[Assignment]:
    """Yield the assignments for the roles that the user passed.

    Args:
        roles: "q", "k", ... -> a parameter's path, with or without ".weight".
    """
    path_roles = {}
    for role, name in roles.items():
        for path in subject.parameters:
            if path in (name, f"{name}.weight") or re.fullmatch(rf"{re.escape(name)}\.\d+(\.weight)?", path):
                path_roles[path] = role
    yield from by_names(subject, prints, path_roles)


def _outputs(
    parameters: ParameterLayout, roles: dict[str, list[str]], assigned: set[str]
) -> Iterator[list[str]]:
    """Yield the weights that may be the output projection, as lists of names; an empty list for none."""
    if "o" in roles:
        yield roles["o"][:1] if len(roles["o"]) == 1 else roles["o"]
        return
    left = [name for name in parameters.weights if name not in assigned]
    for name in reversed(left):
        yield [name]
    if len(left) != 1:
        yield []


Pieces = dict[str, list[ParameterSlice]]
Cut = tuple[Pieces, Pieces, str, str]  # weights, biases, order, layout


def _inputs(
    parameters: ParameterLayout,
    roles: dict[str, list[str]],
    bias_roles: dict[str, list[str]],
    prints: Mapping[str, Fingerprint],
    H: int,
) -> Iterator[Cut]:
    """Yield the slices of q, k and v: of a fused weight, of weights of their own, or of both."""
    fused = next((word for word in ("qkv", "kv", "qk") if word in roles), None)
    single = [word for word in "qkv" if word in roles and word not in (fused or "")]
    choices: list[list[Cut]] = []
    if fused:
        choices.append(list(_fused(parameters, fused, roles[fused][0], bias_roles, prints, H)))
    if single:
        choices.append(list(_singles(parameters, single, roles, bias_roles)))
    for chosen in product(*choices):
        weights: Pieces = {}
        biases: Pieces = {}
        for cut in chosen:
            weights.update(cut[0])
            biases.update(cut[1])
        yield weights, biases, chosen[0][2], chosen[0][3]


def _fused(
    parameters: ParameterLayout,
    word: str,
    name: str,
    bias_roles: dict[str, list[str]],
    prints: Mapping[str, Fingerprint],
    H: int,
) -> Iterator[Cut]:
    """Yield the ways to cut one weight that holds several projections."""
    beside = parameters.bias_of(name) or next(iter(bias_roles.get(word, [])), None)
    for axis in parameters.input_axes(name):
        n = parameters.weights[name].numel() // parameters.weights[name].shape[axis]
        for layout, rows, order in _cuts(n, word, H, prints.get(name)):
            weights = {role: [parameters.piece(name, axis, i, where_of(i))] for role, i in rows.items()}
            if beside is not None and parameters.biases[beside].numel() == n:
                biases = {role: [parameters.bias_piece(beside, i, where_of(i))] for role, i in rows.items()}
            else:
                own = {role: bias_roles[role] for role in rows if role in bias_roles}
                biases = {
                    role: [parameters.bias_piece(bias_name) for bias_name in names]
                    for role, names in own.items()
                }
            yield weights, biases, order, layout


def _singles(
    parameters: ParameterLayout,
    words: list[str],
    roles: dict[str, list[str]],
    bias_roles: dict[str, list[str]],
) -> Iterator[Cut]:
    """Yield the slices of projections that have a weight of their own, or one per head.

    Where the numbers leave open which axis is the input, it is the same axis for all of them.
    """
    every = [parameters.input_axes(roles[word][0]) for word in words]
    together = len({len(axes) for axes in every}) == 1
    for axes in zip(*every, strict=True) if together else product(*every):
        weights: Pieces = {}
        biases: Pieces = {}
        for word, axis in zip(words, axes, strict=True):
            weights[word] = [parameters.piece(name, axis) for name in roles[word]]
            beside = [bias for bias in map(parameters.bias_of, roles[word]) if bias]
            names = beside or bias_roles.get(word, [])
            if names:
                biases[word] = [parameters.bias_piece(name) for name in names]
        yield weights, biases, "", ""


def _cuts(
    n: int, names: str, H: int, fingerprint: Fingerprint | None
) -> Iterator[tuple[str, dict[str, Tensor], str]]:
    """Yield (layout, rows of each role, order of the roles) for a weight that holds several projections."""
    rows = torch.arange(n)
    parts = len(names)
    if n % parts == 0:
        yield "one after another", dict(zip(names, rows.chunk(parts), strict=True)), names
        if H > 1 and n % (parts * H) == 0:
            split = rows.reshape(H, parts, -1)
            yield "head by head", {name: split[:, i].flatten() for i, name in enumerate(names)}, names
    order = (
        ""
        if fingerprint is None or n % parts or len(fingerprint.rows) != n
        else _order_of_parts(fingerprint.rows, parts)
    )
    if order and sorted(order) == sorted(names):
        yield "as gradients say", dict(zip(order, rows.chunk(parts), strict=True)), order
    elif (
        fingerprint is not None
        and len(fingerprint.rows) == n
        and all(role in names and role for role in fingerprint.rows)
    ):
        letters = fingerprint.rows
        role_rows = {
            name: torch.tensor([i for i, role in enumerate(letters) if role == name]) for name in names
        }
        if all(len(indices) for indices in role_rows.values()):
            order = "".join(dict.fromkeys(letters))
            yield "as gradients say", role_rows, order
            run = next((i for i, role in enumerate(letters) if role != letters[0]), n)
            D = len(role_rows[names[0]]) // H
            if run == H and run != D and all(len(indices) == H * D for indices in role_rows.values()):
                turned = {name: indices.reshape(D, H).T.flatten() for name, indices in role_rows.items()}
                yield "channel by channel", turned, order


def _order_of_parts(letters: list[str], parts: int) -> str:
    """Return the role of each part in order, e.g. "kqv", or "" if the gradients do not show it.

    It is for modules without an output projection, where some rows of each part have no gradient.
    """
    size = len(letters) // parts
    part_letters = [set(letters[i * size : (i + 1) * size]) for i in range(parts)]
    if not all("" in each and len(each) == 2 for each in part_letters):
        return ""
    return "".join(letter for each in part_letters for letter in each if letter)


def by_gradients(subject: Subject, prints: Mapping[str, Fingerprint], caller: Caller) -> Iterator[Assignment]:
    """Yield the assignments that gradients show, whatever the parameters are called."""
    parameters = ParameterLayout(subject, prints)
    guess = Assignment("gradients")
    outs = []
    for name in parameters.weights:
        fingerprint = prints.get(name)
        if fingerprint is None or not fingerprint.used:
            continue
        if fingerprint.in_axis is None:
            outs.append(name)
            continue
        bias = parameters.bias_of(name)
        for role in "qkv":
            rows = torch.tensor(
                [i for i, letters in enumerate(fingerprint.rows) if role in letters], dtype=torch.long
            )
            if not len(rows):
                continue
            whole = len(rows) == len(fingerprint.rows)
            where = "" if whole else where_of(rows)
            guess.weights.setdefault(role, []).append(
                parameters.piece(name, fingerprint.in_axis, rows, where)
            )
            if bias is not None and parameters.biases[bias].numel() == len(fingerprint.rows):
                guess.biases.setdefault(role, []).append(parameters.bias_piece(bias, rows, where))
    if not any(guess.weights.get(role) for role in "qkv"):
        return
    _loose_biases(parameters, guess, caller)
    if _channel_by_channel(parameters, prints, subject.sizes.H):
        others = [_turned(guess, subject.sizes.H)]
    else:
        others = [_shared(guess)]
    guesses = [guess, *(variant for variant in others if variant is not None)]
    certain = [name for name in outs if prints[name].out_axis is not None]
    for name in [*reversed(certain), *(name for name in reversed(outs) if name not in certain)]:
        for axis in parameters.output_axes(name):
            for variant in guesses:
                other = replace(variant, weights=dict(variant.weights), biases=dict(variant.biases))
                other.weights["o"] = [parameters.out_piece(name, axis)]
                bias = parameters.bias_of(name)
                if bias is not None:
                    other.biases["o"] = [parameters.bias_piece(bias)]
                yield other
    if not outs:
        yield from guesses


def _channel_by_channel(parameters: ParameterLayout, prints: Mapping[str, Fingerprint], H: int) -> bool:
    """Return True if the rows of a fused weight change their role every H rows."""
    for name in parameters.weights:
        rows = prints[name].rows if name in prints else []
        run = next((i for i, letters in enumerate(rows) if letters != rows[0]), 0)
        if run == H and len(rows) != 3 * H:
            return True
    return False


def _shared(guess: Assignment) -> Assignment | None:
    """Return the assignment in which one weight makes two or three of q, k and v.

    Gradients show such a weight as the last of them only.
    """
    missing = [role for role in "qkv" if not guess.weights.get(role)]
    if not missing or "v" in missing:
        return None
    made = replace(guess, weights=dict(guess.weights), biases=dict(guess.biases), family="shared")
    for role in missing:
        source = next(other for other in ("kqv" if role == "q" else "qkv") if guess.weights.get(other))
        made.weights[role] = guess.weights[source]
        if source in guess.biases:
            made.biases[role] = guess.biases[source]
    return made


def _turned(guess: Assignment, H: int) -> Assignment | None:
    """Return the assignment in which one weight has its rows as [D, q k v, H], or None if it cannot have."""
    single = [guess.weights[role] for role in "qkv" if len(guess.weights.get(role, [])) == 1]
    if H == 1 or len(single) != 3 or len({pieces[0].name for pieces in single}) != 1:
        return None

    def turn(pieces: list[ParameterSlice]) -> list[ParameterSlice]:
        rows = pieces[0].rows
        return [replace(pieces[0], rows=rows.unflatten(0, (-1, H)).transpose(0, 1).flatten(0, 1))]

    if any(len(pieces[0].rows) % H for pieces in single):
        return None
    made = {role: turn(pieces) for role, pieces in guess.weights.items()}
    biases = {role: turn(pieces) if role in "qkv" else pieces for role, pieces in guess.biases.items()}
    return Assignment("gradients", made, biases, family="channel by channel")


def _loose_biases(parameters: ParameterLayout, guess: Assignment, caller: Caller) -> None:
    """Assign the biases that belong to no weight by their gradients.

    The gradient of b_o is the sum of the cotangent, that of b_k is 0, and that of b_q is 0 for equal keys.
    """
    beside = {parameters.bias_of(name) for name in parameters.weights}
    loose = [name for name in parameters.biases if name not in beside]
    if not loose:
        return
    length = parameters.subject.sizes.long
    query, key, value = inputs_for(caller, length, length, seed=15)
    flat = key[:, :1].expand_as(key).contiguous()
    try:
        free = caller.call(query, key, value).output
        cotangent = torch.randn(free.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        leaves = [parameters.biases[name] for name in loose]
        gradients = torch.autograd.grad((free * cotangent).sum(), leaves, allow_unused=True)
        same = flat if caller.plan.self_only else query
        still = caller.call(same, flat, flat).output
        equal = torch.autograd.grad((still * cotangent).sum(), leaves, allow_unused=True)
    except CAUGHT:
        return
    total = cotangent.sum((0, 1))
    for name, gradient, still_gradient in zip(loose, gradients, equal, strict=True):
        if gradient is None or still_gradient is None:
            continue
        if gradient.shape == total.shape and bool((gradient - total).abs().max() < 1e-9):
            guess.biases.setdefault("o", []).append(parameters.bias_piece(name))
        elif bool(gradient.abs().max() < 1e-10):
            guess.biases.setdefault("k", []).append(parameters.bias_piece(name))
        elif bool(still_gradient.abs().max() < 1e-10):
            guess.biases.setdefault("q", []).append(parameters.bias_piece(name))
        else:
            guess.biases.setdefault("v", []).append(parameters.bias_piece(name))


def by_calls(caller: Caller) -> Iterator[Assignment]:
    """Yield the assignment of nn.Linear layers by the input each received, else by their order.

    The last one that ran is the output projection.
    """
    subject = caller.subject
    body = subject.body
    if not isinstance(body, nn.Module):
        return
    names = {id(module): name for name, module in body.named_modules() if isinstance(module, nn.Linear)}
    ran: list[tuple[str, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        ran.append((names[id(module)], args[0].detach()))

    hooks = [m.register_forward_hook(note) for m in body.modules() if isinstance(m, nn.Linear)]
    try:
        inputs = inputs_for(caller, subject.sizes.long, subject.sizes.long, seed=21)
        caller.call(*inputs)
    except CAUGHT:
        return
    finally:
        for hook in hooks:
            hook.remove()
    parameters = ParameterLayout(subject, {})
    order = list(dict.fromkeys(name for name, _ in ran))
    if len(order) < 3:
        return
    fed: dict[str, str] = {}
    for name, x in ran:
        for role, tensor in zip("qkv", inputs, strict=True):
            if x.shape == tensor.shape and torch.equal(x, tensor):
                fed.setdefault(name, role)
    three = [name for name in order if not caller.plan.self_only and fed.get(name)]
    roles = {fed[name]: name for name in three}
    if set(roles) != set("qkv"):
        roles = dict(zip("qkv", order[:3], strict=True))
    guess = Assignment("calls")
    chosen = {**roles, **({"o": order[-1]} if order[-1] not in roles.values() else {})}
    for role, name in chosen.items():
        path = f"{name}.weight"
        if path not in parameters.weights:
            return
        guess.weights[role] = [parameters.out_piece(path, 0) if role == "o" else parameters.piece(path, 1)]
        bias = parameters.bias_of(path)
        if bias is not None:
            guess.biases[role] = [parameters.bias_piece(bias)]
    yield guess


PROVEN = 1e-9
NEARLY = 1e-5  # float32 somewhere inside


@dataclass
class Projections:
    """The projections that were found in a module, and how certain they are."""

    weights: Weights | None
    roles: dict[str, Role]
    num_heads: int
    proven: bool
    words: list[str] = field(default_factory=list)
    guess: Assignment | None = None
    small: bool = False
    hard_coded: int = 0  # the number of heads requested, if the code uses another
    rewired: str = ""  # what gradients show, if it contradicts the names
    tried: list[Weights] = field(default_factory=list)  # all proposals, if none was proven
    choices: list[Projections] = field(default_factory=list)  # likewise, the likeliest first
    elsewhere: bool = False  # the output projection is in another class of the file
    unjudged: str = ""  # a design inside that headwise cannot compute


class Attempt(NamedTuple):
    """An assignment that was tried, and how far the recipe with its weights is from the code."""

    guess: Assignment
    weights: Weights
    words: list[str]
    error: float


def error_of(
    weights: Weights,
    H: int,
    truth: list[tuple[ProbeInputs, Tensor]],
    steps: Mapping[str, Step] | None = None,
) -> float:
    """Return the largest difference between the recipe and the code, relative to the largest output.

    Args:
        truth: (inputs, output of the code) of each call.
        steps: steps of the recipe that designs inside the module replace.
    """
    worst = 0.0
    for inputs, output in truth:
        try:
            expected = run(inputs, weights, H, steps).output
        except (RuntimeError, ValueError, IndexError, TypeError):
            return float("inf")
        if expected.shape != output.shape:
            return float("inf")
        off = (expected - output).abs().max() / output.abs().max().clamp_min(1e-30)
        worst = max(worst, float(off.nan_to_num(torch.inf)))
    return worst


def find_roles(
    caller: Caller,
    truth: list[tuple[ProbeInputs, Tensor]],
    override: dict[str, str] | None,
    steps: Mapping[str, Step] | None = None,
) -> Projections:
    """Return the projections; they are proven if the recipe computes the code's output with them.

    Args:
        truth: (inputs, output of the code) of each call, without a mask but the one the code always makes.
        override: "q", "k", "v", "o" or "qkv" -> the parameter's path.
        steps: steps of the recipe that designs inside the module replace.
    """
    subject = caller.subject
    E, H = subject.sizes.E, subject.sizes.H
    proven = PROVEN if subject.exact else NEARLY
    if not any(tensor.ndim >= 2 for tensor in subject.parameters.values()):
        return _without_projections(caller, truth)
    prints: Mapping[str, Fingerprint] = {} if caller.plan.as_numpy else Fingerprints(caller)

    def guesses() -> Iterator[Assignment]:
        nonlocal prints
        if caller.plan.as_numpy:  # without gradients, a fingerprint takes one call per number
            named = list(by_request(subject, prints, override) if override else by_names(subject, prints))
            yield from named
            if any(guess.complete for guess in named):
                return
            prints = Fingerprints(caller)
        if override:
            yield from by_request(subject, prints, override)
            return
        yield from by_names(subject, prints)
        yield from by_gradients(subject, prints, caller)
        yield from by_calls(caller)

    tried: list[Attempt] = []
    for guess in guesses():
        made = weights_of(guess, E, H)
        if made is None:
            continue
        tried.append(Attempt(guess, *made, error_of(made[0], H, truth, steps)))
        if tried[-1].error <= proven:
            break
    if not tried:
        return Projections(None, {}, H, False)
    best = min(tried, key=lambda attempt: attempt.error)
    if best.error > NEARLY:
        for guess, weights, words, _ in tried:
            for other in _head_counts(weights, H, subject.heads_given):
                if error_of(weights, other, truth, steps) <= proven:
                    projections = _projections_of(guess, weights, words, other, True, E)
                    projections.hard_coded = H if subject.heads_given else 0
                    return projections
    rewired = ""
    if best.error > NEARLY:
        best = _likeliest(tried)
    elif not best.guess.certain and any(attempt.guess.certain for attempt in tried):
        rewired = _wiring(best.guess)
        best = next(attempt for attempt in tried if attempt.guess.certain)
    elif best.guess.family == "shared" and tried[0].guess.source == "names" and tried[0].guess.complete:
        rewired = "one part of the weight computes more than one of q, k and v"
        best = tried[0]
    elif best.guess.spelled and best.guess.order not in ("", "qkv"):
        rewired = f"the fused weight is used in the order {', '.join(best.guess.order)}"
        best = next(attempt for attempt in tried if attempt.guess.family == "one after another")
    choices = []
    if best.error > NEARLY:
        likely = [attempt for attempt in tried if attempt.guess.complete]
        choices = [_projections_of(*attempt[:3], H, False, E) for attempt in [best, *likely]]
    guessed = not best.guess.complete or best.guess.family == "shared"
    if best.error > NEARLY and guessed and best.guess.source not in {"names", "given"}:
        return Projections(None, {}, H, False, choices=choices)
    projections = _projections_of(best.guess, best.weights, best.words, H, best.error <= NEARLY, E)
    projections.rewired = rewired
    projections.tried = [] if projections.proven else [attempt.weights for attempt in tried]
    projections.choices = choices
    return projections


def _head_counts(weights: Weights, H: int, heads_given: bool) -> list[int]:
    """Return other head counts that divide these weights; 1 is one only if the code names no head count."""
    most = range(2 if heads_given else 1, len(weights.q) + 1)
    return [h for h in most if h != H and len(weights.q) % h == 0 and len(weights.v) % h == 0]


def _likeliest(tried: list[Attempt]) -> Attempt:
    """Return the likeliest of the attempts where none is proven.

    Names come before gradients; for a fused weight, gradients decide about its layout.
    """
    first = tried[0]
    if first.guess.source in {"names", "given"} and first.guess.family:
        named = [attempt for attempt in tried if attempt.guess.source == first.guess.source]
        for shown in [attempt for attempt in named if attempt.guess.family == "as gradients say"][:1]:
            q, v = shown.weights.q, shown.weights.v
            return next(a for a in named if torch.equal(a.weights.q, q) and torch.equal(a.weights.v, v))
    complete = [attempt for attempt in tried if attempt.guess.complete]
    return complete[0] if complete else first


def _wiring(guess: Assignment) -> str:
    """Return a sentence saying which weight gradients show as which projection."""
    parts = [f"{name} is {pieces[0].name}" for name, pieces in guess.weights.items() if name != "o"]
    return "by gradients " + ", ".join(parts)


def _projections_of(
    guess: Assignment,
    weights: Weights,
    words: list[str],
    H: int,
    proven: bool,
    E: int,
) -> Projections:
    roles = {name: role_of(pieces, guess.source) for name, pieces in guess.weights.items()}
    roles |= {f"{name}_bias": role_of(pieces, guess.source) for name, pieces in guess.biases.items()}
    projections = Projections(weights, roles, H, proven, list(words), guess, is_small(guess, E, H))
    if guess.order and guess.order != "qkv"[-len(guess.order) :]:
        projections.words.append(f"the fused weight contains {', '.join(guess.order)}, in this order")
    if guess.family == "head by head":
        projections.words.append(
            "the fused weight contains q, k and v of head 0, then those of head 1, and so on"
        )
    if guess.family == "channel by channel":
        projections.words.append(
            "the channels of the heads are interleaved in q, k, v and the output alike, which "
            "only reorders the weights"
        )
    return projections


def _without_projections(caller: Caller, truth: list[tuple[ProbeInputs, Tensor]]) -> Projections:
    """Return identities as projections, for a function of q, k and v without weights."""
    E, H = caller.subject.sizes.E, caller.subject.sizes.H
    eye, zeros = torch.eye(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
    weights = Weights(eye, eye, eye, eye, zeros, zeros, zeros, zeros)
    projections = Projections(weights, {}, H, error_of(weights, H, truth) <= NEARLY)
    projections.words.append("it has no weights: every projection is compared as the identity")
    return projections


def weights_of_module(weights: Weights, caller: Caller, module: nn.Module) -> Weights:
    """Return the projections in float64 with the numbers of `module`, for `weights` of its examined copy."""
    own: Mapping[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    examined = {name: value for name, value in caller.subject.parameters.items() if name in own}
    if not examined:
        return weights
    drawn = torch.cat([value.detach().double().flatten() for value in examined.values()])
    real = torch.cat([own[name].detach().double().flatten().cpu() for name in examined])
    order = drawn.argsort()
    drawn, real = drawn[order], real[order]

    def looked_up(x: Tensor) -> Tensor:
        spots = torch.searchsorted(drawn, x.contiguous()).clamp_(max=len(drawn) - 1)
        return torch.where(drawn[spots] == x, real[spots], x)  # 0 and 1 are in no parameter

    return Weights(*(looked_up(x.double()) for x in weights))


def caller_of_module(caller: Caller, module: nn.Module) -> Caller:
    """Return a caller for a copy of `module` with its own weights, in float64 and without dropout."""
    body = copy.deepcopy(module).cpu().double().eval()
    cast_loose(body, torch.float64)
    own = dict(body.named_parameters()) | dict(body.named_buffers())
    parameters = {name: own.get(name, value) for name, value in caller.subject.parameters.items()}
    return replace(caller, subject=replace(caller.subject, body=body, parameters=parameters))
