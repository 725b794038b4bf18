"""Choosing among the proposals: the one under which the recipe computes what the code computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..evidence import Role
from ..recipe import Given, Weights, run
from .assembling import Guess, is_small, role_of, weights_of
from .calling import Caller
from .fingerprints import Print, fingerprints
from .guessing import by_names, given
from .tracing import by_calls, by_gradients

__all__ = ["Found", "error_of", "find_roles"]

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


def error_of(weights: Weights, H: int, truth: list[tuple[Given, Tensor]]) -> float:
    """The largest difference between recipe and code, as a share of the largest number."""
    worst = 0.0
    for given_, output in truth:
        try:
            expected = run(given_, weights, H).output
        except (RuntimeError, ValueError, IndexError):
            return float("inf")
        if expected.shape != output.shape:
            return float("inf")
        off = (expected - output).abs().max() / output.abs().max().clamp_min(1e-30)
        worst = max(worst, float(off.nan_to_num(torch.inf)))
    return worst


def find_roles(caller: Caller, truth: list[tuple[Given, Tensor]], override: dict[str, str] | None) -> Found:
    """The projections, proved where the code is right.

    Args:
        truth: calls without a mask (or with the one the code always makes), and what came out.
        override: "q", "k", "v", "o" or "qkv" -> the parameter's path.
    """
    subject = caller.subject
    E, H = subject.sizes.E, subject.sizes.H
    if not any(tensor.ndim >= 2 for tensor in subject.parameters.values()):
        return _without_projections(caller, truth)
    prints = fingerprints(caller)

    def guesses() -> Iterator[Guess]:
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
        tried.append((guess, *made, error_of(made[0], H, truth)))
        if tried[-1][3] <= PROVEN:
            break
    if not tried:
        return Found(None, {}, H, False, prints=prints)
    best = min(tried, key=lambda one: one[3])
    if best[3] > NEARLY:
        for guess, weights, words, _ in tried:
            for other in _head_counts(weights, H, subject.heads_given):
                if error_of(weights, other, truth) <= PROVEN:
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
    guessed = not best[0].complete or best[0].family == "shared"
    if best[3] > NEARLY and guessed and best[0].how not in {"names", "given"}:
        return Found(None, {}, H, False, prints=prints)
    found = _found(best[0], best[1], best[2], H, best[3] <= NEARLY, prints, E)
    found.rewired = rewired
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
