"""Choosing among the proposals: the one under which the recipe computes what the code computed.

A live module's own weights and answers, once it is known how it works.

The examination looks at a copy whose weights are random numbers, no two alike. Whatever the four projections
were put together from, each of their numbers is found among those, and so is its place in the module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..evidence import Role
from ..recipe import Given, Step, Weights, run
from .call import Caller
from .pieces import Guess, Print, fingerprints, is_small, role_of, weights_of
from .proposals import by_calls, by_gradients, by_names, given
from .subject import cast_loose

PROVEN = 1e-9
NEARLY = 1e-5  # float32 somewhere inside


@dataclass
class Found:
    """The projections."""

    weights: Weights | None
    roles: dict[str, Role]
    num_heads: int
    proven: bool
    words: list[str] = field(default_factory=list)
    prints: dict[str, Print] = field(default_factory=dict)
    guess: Guess | None = None
    small: bool = False
    hard_coded: int = 0  # how many heads were asked for, where it uses another number
    rewired: str = ""  # what gradients say where names say otherwise
    tried: list[Weights] = field(default_factory=list)  # every proposal, where none was proven
    choices: list[Found] = field(default_factory=list)  # the same, each as if it had been chosen
    elsewhere: bool = False  # the output projection is in another class of the file
    unjudged: str = ""  # what is inside that headwise has no equal of


def error_of(
    weights: Weights,
    H: int,
    truth: list[tuple[Given, Tensor]],
    steps: Mapping[str, Step] | None = None,
) -> float:
    """The largest difference between recipe and code, as a share of the largest number.

    steps: of the designs inside.
    """
    worst = 0.0
    for given_, output in truth:
        try:
            expected = run(given_, weights, H, steps).output
        except (RuntimeError, ValueError, IndexError, TypeError):
            return float("inf")
        if expected.shape != output.shape:
            return float("inf")
        off = (expected - output).abs().max() / output.abs().max().clamp_min(1e-30)
        worst = max(worst, float(off.nan_to_num(torch.inf)))
    return worst


def find_roles(
    caller: Caller,
    truth: list[tuple[Given, Tensor]],
    override: dict[str, str] | None,
    steps: Mapping[str, Step] | None = None,
) -> Found:
    """The projections, proved where the code is right.

    Args:
        truth: calls without a mask (or with the one the code always makes), and what came out.
        override: "q", "k", "v", "o" or "qkv" -> the parameter's path.
        steps: of the designs it has inside.
    """
    subject = caller.subject
    E, H = subject.sizes.E, subject.sizes.H
    proven = PROVEN if subject.exact else NEARLY
    if not any(tensor.ndim >= 2 for tensor in subject.parameters.values()):
        return _without_projections(caller, truth)
    prints = {} if caller.plan.as_numpy else fingerprints(caller)

    def guesses() -> Iterator[Guess]:
        nonlocal prints
        if caller.plan.as_numpy:  # without gradients, prints take a call for each number
            named = list(given(subject, prints, override) if override else by_names(subject, prints))
            yield from named
            if any(guess.complete for guess in named):
                return
            prints = fingerprints(caller)
        if override:
            yield from given(subject, prints, override)
            return
        yield from by_names(subject, prints)
        yield from by_gradients(subject, prints, caller)
        yield from by_calls(caller)

    tried: list[tuple[Guess, Weights, list[str], float]] = []
    for guess in guesses():
        made = weights_of(guess, E, H)
        if made is None:
            continue
        tried.append((guess, *made, error_of(made[0], H, truth, steps)))
        if tried[-1][3] <= proven:
            break
    if not tried:
        return Found(None, {}, H, False, prints=prints)
    best = min(tried, key=lambda one: one[3])
    if best[3] > NEARLY:
        for guess, weights, words, _ in tried:
            for other in _head_counts(weights, H, subject.heads_given):
                if error_of(weights, other, truth, steps) <= proven:
                    found = _found(guess, weights, words, other, True, prints, E)
                    found.hard_coded = H if subject.heads_given else 0
                    return found
    rewired = ""
    if best[3] > NEARLY:
        best = _likeliest(tried, prints)
    elif not best[0].certain and any(one[0].certain for one in tried):
        rewired = _wiring(best[0])
        best = next(one for one in tried if one[0].certain)
    elif best[0].family == "shared" and tried[0][0].how == "names" and tried[0][0].complete:
        rewired = "one part of the weight makes more than one of q, k and v"
        best = tried[0]
    elif best[0].spelled and best[0].order not in ("", "qkv"):
        rewired = f"the fused weight is used in the order {', '.join(best[0].order)}"
        best = next(one for one in tried if one[0].family == "one after another")
    choices = []
    if best[3] > NEARLY:
        likely = [one for one in tried if one[0].complete]
        choices = [_found(*one[:3], H, False, prints, E) for one in [best, *likely]]
    guessed = not best[0].complete or best[0].family == "shared"
    if best[3] > NEARLY and guessed and best[0].how not in {"names", "given"}:
        return Found(None, {}, H, False, prints=prints, choices=choices)
    found = _found(best[0], best[1], best[2], H, best[3] <= NEARLY, prints, E)
    found.rewired = rewired
    found.tried = [] if found.proven else [one[1] for one in tried]
    found.choices = choices
    return found


def _head_counts(weights: Weights, H: int, given_: bool) -> list[int]:
    """Other numbers of heads these weights can be cut into; 1 only where nothing was said about heads."""
    most = range(2 if given_ else 1, len(weights.q) + 1)
    return [h for h in most if h != H and len(weights.q) % h == 0 and len(weights.v) % h == 0]


def _likeliest(
    tried: list[tuple[Guess, Weights, list[str], float]], prints: dict[str, Print]
) -> tuple[Guess, Weights, list[str], float]:
    """Where nothing is proven: names before gradients; of a fused weight, the layout the gradients show."""
    first = tried[0]
    if first[0].how in {"names", "given"} and first[0].family:
        layouts = [one for one in tried if one[0].how == first[0].how and one[0].family == "as gradients say"]
        if layouts:
            shown = layouts[0]
            for one in tried:
                if (
                    one[0].how == first[0].how
                    and torch.equal(one[1].q, shown[1].q)
                    and torch.equal(one[1].v, shown[1].v)
                ):
                    return one
    complete = [one for one in tried if one[0].complete]
    return complete[0] if complete else first


def _wiring(guess: Guess) -> str:
    """What feeds what, as gradients show it."""
    parts = [f"{name} is {pieces[0].name}" for name, pieces in guess.weights.items() if name != "o"]
    return "by gradients " + ", ".join(parts)


def _found(
    guess: Guess, weights: Weights, words: list[str], H: int, proven: bool, prints: dict[str, Print], E: int
) -> Found:
    roles = {name: role_of(pieces, guess.how) for name, pieces in guess.weights.items()}
    roles |= {f"{name}_bias": role_of(pieces, guess.how) for name, pieces in guess.biases.items()}
    found = Found(weights, roles, H, proven, list(words), prints, guess, is_small(guess, E, H))
    if guess.order and guess.order != "qkv"[-len(guess.order) :]:
        found.words.append(f"the fused weight holds {', '.join(guess.order)} in this order")
    if guess.family == "head by head":
        found.words.append("the fused weight holds q, k and v head by head")
    if guess.family == "channel by channel":
        found.words.append("heads are interleaved channel by channel, consistently: equal after reordering")
    return found


def _without_projections(caller: Caller, truth: list[tuple[Given, Tensor]]) -> Found:
    """A function of q, k and v: every projection is the identity."""
    E, H = caller.subject.sizes.E, caller.subject.sizes.H
    eye, zeros = torch.eye(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
    weights = Weights(eye, eye, eye, eye, zeros, zeros, zeros, zeros)
    found = Found(weights, {}, H, error_of(weights, H, truth) <= NEARLY)
    found.words.append("it has no weights of its own: every projection is taken as the identity")
    return found


def own_weights(weights: Weights, caller: Caller, module: nn.Module) -> Weights:
    """The projections in float64 as the module has them, where `weights` are those of the examined copy."""
    own: Mapping[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    known = {name: value for name, value in caller.subject.parameters.items() if name in own}
    if not known:
        return weights
    drawn = torch.cat([value.detach().double().flatten() for value in known.values()])
    real = torch.cat([own[name].detach().double().flatten().cpu() for name in known])
    order = drawn.argsort()
    drawn, real = drawn[order], real[order]

    def looked_up(x: Tensor) -> Tensor:
        spots = torch.searchsorted(drawn, x.contiguous()).clamp_(max=len(drawn) - 1)
        return torch.where(drawn[spots] == x, real[spots], x)  # what is in no parameter is 0 or 1

    return Weights(*(looked_up(x.double()) for x in weights))


def as_it_is(caller: Caller, module: nn.Module) -> Caller:
    """The same way to call it, for a copy with its own weights, in float64 and without dropout."""
    body = copy.deepcopy(module).cpu().double().eval()
    cast_loose(body, torch.float64)
    return replace(caller, subject=replace(caller.subject, body=body))
