"""Proposals of which parameters are the projections, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from .assembling import Guess, Piece
from .fingerprints import Print
from .keeping import Kept, alike, path_role, spells, where_of
from .subject import Subject

__all__ = ["by_names", "given"]


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
