"""What the parameters and the probes side by side tell: missing biases, shared weights, a batch of one."""

from __future__ import annotations

from collections.abc import Iterator

from ..evidence import Call, Finding
from .calling import Caller
from .comparing import SAME, share_off
from .projection_roles import Found

__all__ = ["alone", "apart", "biases", "projections"]


def alone(calls: list[Call]) -> Iterator[Finding]:
    """A batch of one is the batch's own row."""
    name, plain, one = "batch of one", _call(calls, "plain"), _call(calls, "batch of one")
    if plain is None or one is None or plain.output is None:
        return
    if one.problem is not None:
        yield Finding(name, "wrong", f"a batch of one raises {one.problem.kind}", None, one.problem.line)
    elif one.output is not None:
        off = share_off(one.output, plain.output[2:3])
        if off <= 1e-7:
            yield Finding(name, "right", "alone, a sequence gives what it gives in a batch")
        else:
            yield Finding(name, "wrong", "a sequence gives something else alone than in a batch")


def apart(calls: list[Call]) -> Iterator[Finding]:
    """Strides do not matter."""
    name, plain, one = "non-contiguous input", _call(calls, "plain"), _call(calls, "non-contiguous input")
    if plain is None or one is None or plain.output is None:
        return
    if one.problem is not None:
        fault = "view after transpose" if "view" in one.problem.message else None
        yield Finding(
            name, "wrong", f"raises {one.problem.kind}: {one.problem.message}", fault, one.problem.line
        )
    elif one.output is not None:
        right = share_off(one.output, plain.output) <= SAME
        said = "gives the same output" if right else "gives another output"
        yield Finding(name, "right" if right else "wrong", said)


def biases(caller: Caller, found: Found) -> Iterator[Finding]:
    """Biases that some projections have and others lack; the key's has no effect."""
    if found.guess is None or not found.guess.complete or found.guess.how not in {"names", "given"}:
        return
    has = {name: bool(found.guess.biases.get(name)) for name in "qkv"}
    if all(has.values()) or not any(has.values()):
        return
    lacking = [name for name in "qkv" if not has[name]]
    words = {"q": "query", "k": "key", "v": "value"}
    if lacking == ["k"]:
        detail = "the key projection has no bias; softmax would not see it, so nothing is lost"
        yield Finding("key bias", "right", detail, "no key bias")
        return
    for name in (one for one in lacking if one != "k"):
        detail = f"the {words[name]} projection has no bias, others have one"
        yield Finding(f"{words[name]} bias", "wrong", detail, f"no {name} bias")


def projections(caller: Caller, found: Found) -> Iterator[Finding]:
    """Projections that are missing, small or shared."""
    guess, sizes = found.guess, caller.subject.sizes
    if guess is None or found.weights is None:
        return
    if found.small:
        detail = f"the projections are [{sizes.D}, {sizes.D}], one for all {found.num_heads} heads"
        yield Finding("projection size", "wrong", detail, "same projection for every head")
    missing = [name for name in "qkv" if not guess.weights.get(name)]
    if missing and found.proven:
        fault = "no v projection" if missing == ["v"] else "no q and k projection"
        yield Finding("projections", "wrong", f"no projection for {', '.join(missing)} was found", fault)
    places = [(p.name, p.where) for name in "qkv" for p in guess.weights.get(name, [])[:1]]
    if len(places) == 3 and len(set(places)) < 3 and found.proven:
        detail = "one weight makes more than one of q, k and v"
        yield Finding("projections", "wrong", detail, "shared projection")
    if not guess.weights.get("o") and found.num_heads > 1:
        detail = "there is no output projection: the heads' outputs are returned side by side"
        yield Finding("output projection", "wrong", detail, "no output projection")
    if found.hard_coded:
        detail = f"{found.hard_coded} heads were asked for, and it uses {found.num_heads}"
        yield Finding("number of heads", "wrong", detail, "hard-coded heads")
    if found.rewired:
        yield Finding("wiring", "unknown", f"names and gradients disagree: {found.rewired}")


def _call(calls: list[Call], name: str) -> Call | None:
    return next((one for one in calls if one.probe == name), None)
