"""Proposals of which parameters are the projections, without their names: by gradients, by calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .assembling import Guess, Piece
from .calling import Caller
from .failing import CAUGHT
from .fingerprints import Print
from .keeping import Kept, where_of
from .reacting import inputs_for
from .subject import Subject

__all__ = ["by_calls", "by_gradients"]


def by_gradients(subject: Subject, prints: dict[str, Print], caller: Caller) -> Iterator[Guess]:
    """What each row of each parameter does; names are not looked at."""
    kept = Kept(subject, prints)
    guess = Guess("gradients")
    outs = []
    for name in kept.weights:
        seen = prints.get(name)
        if seen is None or not seen.used:
            continue
        if seen.in_axis is None:
            outs.append(name)
            continue
        bias = kept.bias_of(name)
        for role in "qkv":
            rows = torch.tensor(
                [i for i, letters in enumerate(seen.rows) if role in letters], dtype=torch.long
            )
            if not len(rows):
                continue
            whole = len(rows) == len(seen.rows)
            where = "" if whole else where_of(rows)
            guess.weights.setdefault(role, []).append(kept.piece(name, seen.in_axis, rows, where))
            if bias is not None and kept.biases[bias].numel() == len(seen.rows):
                guess.biases.setdefault(role, []).append(kept.bias_piece(bias, rows, where))
    if not any(guess.weights.get(role) for role in "qkv"):
        return
    _loose_biases(kept, guess, caller, outs)
    if _channel_by_channel(kept, prints, subject.sizes.H):
        others = [_turned(guess, subject.sizes.H)]
    else:
        others = [_shared(guess)]
    guesses = [guess, *(one for one in others if one is not None)]
    certain = [name for name in outs if prints[name].out_axis is not None]
    for name in [*reversed(certain), *(one for one in reversed(outs) if one not in certain)]:
        for axis in kept.output_axes(name):
            for one in guesses:
                other = replace(one, weights=dict(one.weights), biases=dict(one.biases))
                other.weights["o"] = [kept.out_piece(name, axis)]
                bias = kept.bias_of(name)
                if bias is not None:
                    other.biases["o"] = [kept.bias_piece(bias)]
                yield other
    if not outs:
        yield from guesses


def _channel_by_channel(kept: Kept, prints: dict[str, Print], H: int) -> bool:
    """Whether the rows of a fused weight change their role every H rows."""
    for name in kept.weights:
        rows = prints[name].rows if name in prints else []
        run = next((i for i, letters in enumerate(rows) if letters != rows[0]), 0)
        if run == H and len(rows) != 3 * H:
            return True
    return False


def _shared(guess: Guess) -> Guess | None:
    """One input, and a weight that makes two or three of q, k and v: it looks like the last of them."""
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


def _turned(guess: Guess, H: int) -> Guess | None:
    """The same where one weight holds its rows channel by channel: [D, q k v, H] instead of [.., H, D]."""
    single = [guess.weights[role] for role in "qkv" if len(guess.weights.get(role, [])) == 1]
    if H == 1 or len(single) != 3 or len({pieces[0].name for pieces in single}) != 1:
        return None

    def turn(pieces: list[Piece]) -> list[Piece]:
        rows = pieces[0].rows
        return [replace(pieces[0], rows=rows.unflatten(0, (-1, H)).transpose(0, 1).flatten(0, 1))]

    if any(len(pieces[0].rows) % H for pieces in single):
        return None
    made = {role: turn(pieces) for role, pieces in guess.weights.items()}
    biases = {role: turn(pieces) if role in "qkv" else pieces for role, pieces in guess.biases.items()}
    return Guess("gradients", made, biases, family="channel by channel")


def _loose_biases(kept: Kept, guess: Guess, caller: Caller, outs: list[str]) -> None:
    """Biases that stand alone: b_o gets the cotangent's sum, b_k nothing, b_q nothing for equal keys."""
    beside = {kept.bias_of(name) for name in kept.weights}
    loose = [name for name in kept.biases if name not in beside]
    if not loose:
        return
    length = kept.subject.sizes.long
    query, key, value = inputs_for(caller, length, length, seed=15)
    flat = key[:, :1].expand_as(key).contiguous()
    try:
        free = caller.call(query, key, value).output
        cotangent = torch.randn(free.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        leaves = [kept.biases[name] for name in loose]
        found = torch.autograd.grad((free * cotangent).sum(), leaves, allow_unused=True)
        same = flat if caller.plan.self_only else query
        still = caller.call(same, flat, flat).output
        equal = torch.autograd.grad((still * cotangent).sum(), leaves, allow_unused=True)
    except CAUGHT:
        return
    total = cotangent.sum((0, 1))
    for name, one, other in zip(loose, found, equal, strict=True):
        if one is None or other is None:
            continue
        if one.shape == total.shape and bool((one - total).abs().max() < 1e-9):
            guess.biases.setdefault("o", []).append(kept.bias_piece(name))
        elif bool(one.abs().max() < 1e-10):
            guess.biases.setdefault("k", []).append(kept.bias_piece(name))
        elif bool(other.abs().max() < 1e-10):
            guess.biases.setdefault("q", []).append(kept.bias_piece(name))
        else:
            guess.biases.setdefault("v", []).append(kept.bias_piece(name))


def by_calls(caller: Caller) -> Iterator[Guess]:
    """nn.Linear by nn.Linear: which input each received, else in the order they ran; the last one is out."""
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
    kept = Kept(subject, {})
    order = list(dict.fromkeys(name for name, _ in ran))
    if len(order) < 3:
        return
    fed: dict[str, str] = {}
    for name, x in ran:
        for role, one in zip("qkv", inputs, strict=True):
            if x.shape == one.shape and torch.equal(x, one):
                fed.setdefault(name, role)
    three = [name for name in order if not caller.plan.self_only and fed.get(name)]
    roles = {fed[name]: name for name in three}
    if set(roles) != set("qkv"):
        roles = dict(zip("qkv", order[:3], strict=True))
    guess = Guess("calls")
    chosen = {**roles, **({"o": order[-1]} if order[-1] not in roles.values() else {})}
    for role, name in chosen.items():
        path = f"{name}.weight"
        if path not in kept.weights:
            return
        guess.weights[role] = [kept.out_piece(path, 0) if role == "o" else kept.piece(path, 1)]
        bias = kept.bias_of(path)
        if bias is not None:
            guess.biases[role] = [kept.bias_piece(bias)]
    yield guess
