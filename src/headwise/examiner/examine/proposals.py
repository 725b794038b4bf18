"""Proposals of which parameters are the projections: by their names, by gradients, by calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .call import Caller, inputs_for
from .pieces import Guess, Kept, Piece, Print, alike, path_role, spells, where_of
from .subject import Subject
from .surroundings import CAUGHT


def by_names(
    subject: Subject, prints: dict[str, Print], given_roles: dict[str, str] | None = None
) -> Iterator[Guess]:
    """All variants that names leave open, the likeliest first."""
    kept, H = Kept(subject, prints), subject.sizes.H
    roles: dict[str, list[str]] = {}
    for name in kept.weights:
        word = (given_roles or {}).get(name) if given_roles is not None else path_role(name)
        if word:
            roles.setdefault(word, []).append(name)
    bias_roles: dict[str, list[str]] = {}
    for name in kept.biases:
        word = path_role(name)
        if word:
            bias_roles.setdefault(word, []).append(name)
    roles = {word: names for word, names in roles.items() if len(names) == 1 or alike(names)}
    if not {"q", "k", "v", "qkv", "kv", "qk"} & set(roles):
        return
    taken = {name for names in roles.values() for name in names}
    how = "given" if given_roles is not None else "names"
    for outs in _outputs(kept, roles, taken):
        for pieces, biases, order, layout in _inputs(kept, roles, bias_roles, prints, H):
            for axes in product(*(kept.output_axes(name) for name in outs[:1])):
                guess = Guess(how, dict(pieces), dict(biases), order, {"q", "k", "v"} <= set(roles), layout)
                guess.spelled = any(spells(name) for name in roles.get("qkv", []))
                if outs:
                    guess.weights["o"] = [kept.out_piece(name, axes[0]) for name in outs]
                    found = [kept.bias_of(name) for name in outs if kept.bias_of(name)] or bias_roles.get(
                        "o", []
                    )
                    if found:
                        guess.biases["o"] = [kept.bias_piece(name) for name in found if name][:1]
                yield guess


def given(subject: Subject, prints: dict[str, Print], roles: dict[str, str]) -> Iterator[Guess]:
    """As the caller of check says: "q" -> a parameter's path, with or without ".weight"."""
    found = {}
    for role, name in roles.items():
        for path in subject.parameters:
            if path in (name, f"{name}.weight") or re.fullmatch(rf"{re.escape(name)}\.\d+(\.weight)?", path):
                found[path] = role
    yield from by_names(subject, prints, found)


def _outputs(kept: Kept, roles: dict[str, list[str]], taken: set[str]) -> Iterator[list[str]]:
    """Which weights may be the output projection."""
    if "o" in roles:
        yield roles["o"][:1] if len(roles["o"]) == 1 else roles["o"]
        return
    left = [name for name in kept.weights if name not in taken]
    for name in reversed(left):
        yield [name]
    if len(left) != 1:
        yield []


Pieces = dict[str, list[Piece]]
Cut = tuple[Pieces, Pieces, str, str]  # weights, biases, order, layout


def _inputs(
    kept: Kept,
    roles: dict[str, list[str]],
    bias_roles: dict[str, list[str]],
    prints: dict[str, Print],
    H: int,
) -> Iterator[Cut]:
    """q, k and v, fused or each by itself or both."""
    fused = next((word for word in ("qkv", "kv", "qk") if word in roles), None)
    single = [word for word in "qkv" if word in roles and word not in (fused or "")]
    choices: list[list[Cut]] = []
    if fused:
        choices.append(list(_fused(kept, fused, roles[fused][0], bias_roles, prints, H)))
    if single:
        choices.append(list(_singles(kept, single, roles, bias_roles)))
    for chosen in product(*choices):
        weights: Pieces = {}
        biases: Pieces = {}
        for one in chosen:
            weights.update(one[0])
            biases.update(one[1])
        yield weights, biases, chosen[0][2], chosen[0][3]


def _fused(
    kept: Kept, word: str, name: str, bias_roles: dict[str, list[str]], prints: dict[str, Print], H: int
) -> Iterator[Cut]:
    """One weight that holds several, cut in every way it may be."""
    beside = kept.bias_of(name) or next(iter(bias_roles.get(word, [])), None)
    for axis in kept.input_axes(name):
        n = kept.weights[name].numel() // kept.weights[name].shape[axis]
        for layout, rows, order in _cuts(n, word, H, prints.get(name)):
            weights = {role: [kept.piece(name, axis, i, where_of(i))] for role, i in rows.items()}
            if beside is not None and kept.biases[beside].numel() == n:
                biases = {role: [kept.bias_piece(beside, i, where_of(i))] for role, i in rows.items()}
            else:
                own = {role: bias_roles[role] for role in rows if role in bias_roles}
                biases = {role: [kept.bias_piece(one) for one in names] for role, names in own.items()}
            yield weights, biases, order, layout


def _singles(
    kept: Kept, words: list[str], roles: dict[str, list[str]], bias_roles: dict[str, list[str]]
) -> Iterator[Cut]:
    """Each with a weight, or one a head, of its own; orientations that cannot be told are alike for all."""
    every = [kept.input_axes(roles[word][0]) for word in words]
    together = len({len(one) for one in every}) == 1
    for axes in zip(*every, strict=True) if together else product(*every):
        weights: Pieces = {}
        biases: Pieces = {}
        for word, axis in zip(words, axes, strict=True):
            weights[word] = [kept.piece(name, axis) for name in roles[word]]
            beside = [bias for bias in map(kept.bias_of, roles[word]) if bias]
            names = beside or bias_roles.get(word, [])
            if names:
                biases[word] = [kept.bias_piece(name) for name in names]
        yield weights, biases, "", ""


def _cuts(n: int, names: str, H: int, seen: Print | None) -> Iterator[tuple[str, dict[str, Tensor], str]]:
    """(what it is called, rows of each role, order) for a weight that holds several projections."""
    rows = torch.arange(n)
    parts = len(names)
    if n % parts == 0:
        yield "one after another", dict(zip(names, rows.chunk(parts), strict=True)), names
        if H > 1 and n % (parts * H) == 0:
            split = rows.reshape(H, parts, -1)
            yield "head by head", {name: split[:, i].flatten() for i, name in enumerate(names)}, names
    if seen is not None and len(seen.rows) == n and all(one in names and one for one in seen.rows):
        letters = seen.rows
        found = {name: torch.tensor([i for i, one in enumerate(letters) if one == name]) for name in names}
        if all(len(one) for one in found.values()):
            order = "".join(dict.fromkeys(letters))
            yield "as gradients say", found, order
            run = next((i for i, one in enumerate(letters) if one != letters[0]), n)
            D = len(found[names[0]]) // H
            if run == H and run != D and all(len(one) == H * D for one in found.values()):
                turned = {name: one.reshape(D, H).T.flatten() for name, one in found.items()}
                yield "channel by channel", turned, order


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
