"""Latent attention: queries, or keys and values, through a narrow matrix first, often with a norm behind it.

What the narrow matrix makes is taken as the input of the projections: a norm in between is no part of a
matrix. Which row of a layer makes what is told by gradients of its output, where only the last position is
asked: queries get one at the last position alone; where all positions are alike, keys get none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..designs import Design
from ..evidence import Role
from .call import Caller, inputs_for
from .pieces import Guess, Piece, path_role, weights_of
from .projections import Found
from .surroundings import CAUGHT
from .watch import Norm, Ran, Three, same

DECOUPLED = "latent attention with a decoupled rotary part"
SLOTS = {"q": "query", "k": "key", "v": "value"}


@dataclass(eq=False)
class _Chain:
    """A layer that is fed by a narrow one."""

    up: str
    down: str
    norm: Norm | None
    whole: bool = True  # False: by a part of what the narrow one makes
    letters: list[str] = field(default_factory=list)


def _chains(ran: Ran, inputs: Three) -> list[_Chain]:
    first = [one for one in ran.linear if any(same(one[1], x) for x in inputs)]
    found = []
    for up, given, _ in ran.linear:
        for down, _, made in first:
            n, norm = given.shape[-1], None
            if up == down or given.ndim != made.ndim or n > made.shape[-1]:
                continue
            for one in ran.norms:
                if same(one.made, given):
                    norm = one
            fed = given if norm is None else norm.given
            if any(same(fed, made[..., i : i + n]) for i in {0, made.shape[-1] - n}):
                found.append(_Chain(up, down, norm, n == made.shape[-1]))
                break
    return found


def _gradients(caller: Caller, paths: set[str], inputs: Three) -> dict[str, Tensor]:
    """Of the last position's output, by what each layer made; [B, T, rows]."""
    kept: dict[str, Tensor] = {}

    def note(path: str) -> Any:
        def noted(module: nn.Module, args: Any, made: Tensor) -> None:
            kept[path] = made

        return noted

    modules = dict(caller.subject.body.named_modules())
    hooks = [modules[path].register_forward_hook(note(path)) for path in paths]
    try:
        output = caller.call(*inputs).output
    finally:
        for hook in hooks:
            hook.remove()
    dice = torch.Generator().manual_seed(7)
    cotangent = torch.zeros_like(output)
    cotangent[:, -1] = torch.randn(output[:, -1].shape, generator=dice, dtype=torch.float64)
    made = torch.autograd.grad((output * cotangent).sum(), list(kept.values()), allow_unused=True)
    return {path: one for path, one in zip(kept, made, strict=True) if one is not None and one.ndim == 3}


def _letters(caller: Caller, paths: set[str]) -> dict[str, list[str]]:
    """Which of q, k and v each row of each layer makes."""
    L = caller.subject.sizes.long
    free = inputs_for(caller, L, L, seed=17)
    flat = free[1][:, :1].expand_as(free[1]).contiguous()
    level = (flat if caller.plan.self_only else free[0], flat, flat)
    moving, still = _gradients(caller, paths, free), _gradients(caller, paths, level)
    found: dict[str, list[str]] = {}
    for path, one in moving.items():
        size = float(one.abs().max())
        other = still.get(path, torch.zeros_like(one)).abs().amax((0, 1)) > 1e-11 * size
        early = one[:, :-1].abs().amax((0, 1)) > 1e-11 * size
        any_ = one.abs().amax((0, 1)) > 1e-11 * size
        rows = zip(any_.tolist(), early.tolist(), other.tolist(), strict=True)
        found[path] = ["" if not a else "q" if not e else "v" if v else "k" for a, e, v in rows]
    return found


def find_latent(caller: Caller, ran: Ran, inputs: Three) -> tuple[Found, Design] | str | None:
    """The projections behind the narrow matrices, and these; a sentence where it cannot be judged."""
    body = caller.subject.body
    if not isinstance(body, nn.Module) or caller.plan.layout != "batch first":
        return None
    chains = _chains(ran, inputs)
    if not chains:
        return None
    if any(not one.whole for one in chains):
        return DECOUPLED
    downs, ups = {one.down for one in chains}, {one.up: one for one in chains}
    order = list(dict.fromkeys(path for path, _, _ in ran.linear))
    last = order[-1]
    asked = [path for path in order if path not in downs and path != last]
    try:
        letters = _letters(caller, set(asked))
    except CAUGHT:
        return None
    modules: dict[str, Any] = dict(body.named_modules())
    said = {one for every in letters.values() for one in every}
    if not set("qkv") <= said:  # positions or heads are mixed up: names are left
        named = {path: path_role(path) or "" for path in asked}
        letters = {path: [word] * len(modules[path].weight) for path, word in named.items() if len(word) == 1}
    guess = Guess("calls", narrow=True)
    design = Design("latent", "", {}, {})
    for path in asked:
        weight, bias = modules[path].weight.detach(), modules[path].bias
        for role, slot in SLOTS.items():
            rows = torch.tensor([i for i, one in enumerate(letters.get(path, [])) if one == role])
            if not len(rows):
                continue
            whole = "" if len(rows) == len(weight) else f"[{int(rows[0])}:] and so on"
            guess.weights.setdefault(role, []).append(Piece(f"{path}.weight", weight[rows], whole))
            if bias is not None:
                own = Piece(f"{path}.bias", bias.detach()[rows, None], whole)
                guess.biases.setdefault(role, []).append(own)
            if path in ups:
                _keep(design, ups[path], slot, modules)
    guess.weights["o"] = [Piece(f"{last}.weight", modules[last].weight.detach())]
    if modules[last].bias is not None:
        guess.biases["o"] = [Piece(f"{last}.bias", modules[last].bias.detach()[:, None])]
    H = caller.subject.sizes.H
    made = weights_of(guess, caller.subject.sizes.E, H) if guess.complete else None
    if made is None or not design.tensors:
        return None
    narrow = {
        name: design.tensors[f"{slot} down"]
        for name, slot in SLOTS.items()
        if f"{slot} down" in design.tensors
    }
    which = {"q": "queries", "k": "keys", "v": "values"}
    names = " and ".join(which[name] for name in narrow)
    widths = " and ".join(dict.fromkeys(str(len(one)) for one in narrow.values()))
    norm = next((one.norm.word for one in chains if one.norm is not None), "")
    design.words = (
        f"{names} through {widths} channels inside (latent attention{f', {norm} between' if norm else ''})"
    )
    roles = {name: Role(pieces[0].name + pieces[0].where, "calls") for name, pieces in guess.weights.items()}
    return Found(made[0], roles, H, False, list(made[1]), guess=guess), design


def _say(design: Design, norm: str) -> None:
    down = {slot: design.tensors.get(f"{slot} down") for slot in SLOTS.values()}
    plural = {"query": "queries", "key": "keys", "value": "values"}
    names = " and ".join(plural[slot] for slot, one in down.items() if one is not None)
    widths = " and ".join(dict.fromkeys(str(len(one)) for one in down.values() if one is not None))
    between = f", {norm} between" if norm else ""
    design.words = f"{names} through {widths} channels inside (latent attention{between})"


def _keep(design: Design, chain: _Chain, slot: str, modules: dict[str, Any]) -> None:
    down = modules[chain.down]
    design.tensors[f"{slot} down"] = down.weight.detach().double().clone()
    if down.bias is not None:
        design.tensors[f"{slot} down bias"] = down.bias.detach().double().clone()
    if chain.norm is not None:
        design.numbers |= chain.norm.numbers(f"{slot} ")
        design.tensors |= chain.norm.tensors(f"{slot} ")
