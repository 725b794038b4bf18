"""Latent attention: projections whose input is first brought to fewer channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..evidence import Role
from ..recipe import Design
from .call_record import CallRecord, Norm, equal_tensors
from .caller import QKV, Caller, inputs_for
from .environment import CAUGHT
from .parameters import Assignment, ParameterSlice, path_role, weights_of
from .projections import Projections

DECOUPLED = "latent attention with a decoupled rotary part"
SLOTS = {"q": "query", "k": "key", "v": "value"}


@dataclass(eq=False)
class _Chain:
    """Two linear layers in a row, the first of which is narrow."""

    up: str
    down: str
    norm: Norm | None
    whole: bool = True  # False: the second reads a part of the channels of the first


def _chains(record: CallRecord, inputs: QKV) -> list[_Chain]:
    """Return the pairs of linear layers where the second reads what the first made of the input."""
    first = [layer for layer in record.linear if any(equal_tensors(layer[1], x) for x in inputs)]
    chains = []
    for up, up_input, _ in record.linear:
        for down, _, made in first:
            n, norm = up_input.shape[-1], None
            if up == down or up_input.ndim != made.ndim or n > made.shape[-1]:
                continue
            for candidate in record.norms:
                if equal_tensors(candidate.output, up_input):
                    norm = candidate
            fed = up_input if norm is None else norm.input
            if any(equal_tensors(fed, made[..., i : i + n]) for i in {0, made.shape[-1] - n}):
                chains.append(_Chain(up, down, norm, n == made.shape[-1]))
                break
    return chains


def _gradients(caller: Caller, paths: set[str], inputs: QKV) -> dict[str, Tensor]:
    """Return the gradients [B, T, rows] of the output at the last position by the output of each layer."""
    outputs: dict[str, Tensor] = {}

    def note(path: str) -> Any:
        def noted(module: nn.Module, args: Any, made: Tensor) -> None:
            outputs[path] = made

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
    made = torch.autograd.grad((output * cotangent).sum(), list(outputs.values()), allow_unused=True)
    return {
        path: gradient
        for path, gradient in zip(outputs, made, strict=True)
        if gradient is not None and gradient.ndim == 3
    }


def _letters(caller: Caller, paths: set[str]) -> dict[str, list[str]]:
    """Return which of q, k and v each row of each layer computes, "" for none."""
    L = caller.subject.sizes.long
    free = inputs_for(caller, L, L, seed=17)
    flat = free[1][:, :1].expand_as(free[1]).contiguous()
    level = (flat if caller.plan.self_only else free[0], flat, flat)
    moving, still = _gradients(caller, paths, free), _gradients(caller, paths, level)
    letters: dict[str, list[str]] = {}
    for path, gradient in moving.items():
        size = float(gradient.abs().max())
        other = still.get(path, torch.zeros_like(gradient)).abs().amax((0, 1)) > 1e-11 * size
        early = gradient[:, :-1].abs().amax((0, 1)) > 1e-11 * size
        used = gradient.abs().amax((0, 1)) > 1e-11 * size
        rows = zip(used.tolist(), early.tolist(), other.tolist(), strict=True)
        letters[path] = ["" if not a else "q" if not e else "v" if v else "k" for a, e, v in rows]
    return letters


def find_latent(caller: Caller, record: CallRecord, inputs: QKV) -> tuple[Projections, Design] | str | None:
    """Return the projections behind the narrow layers and the design that these are.

    It is None for no latent attention, and a string naming a design that cannot be judged.
    """
    body = caller.subject.body
    if not isinstance(body, nn.Module) or caller.plan.layout != "batch first":
        return None
    chains = _chains(record, inputs)
    if not chains:
        return None
    if any(not chain.whole for chain in chains):
        return DECOUPLED
    downs, ups = {chain.down for chain in chains}, {chain.up: chain for chain in chains}
    order = list(dict.fromkeys(path for path, _, _ in record.linear))
    last = order[-1]
    open_paths = [path for path in order if path not in downs and path != last]
    try:
        letters = _letters(caller, set(open_paths))
    except CAUGHT:
        return None
    modules: dict[str, Any] = dict(body.named_modules())
    letters_found = {letter for every in letters.values() for letter in every}
    if not set("qkv") <= letters_found:  # positions or heads are mixed up: go by names
        named = {path: path_role(path) or "" for path in open_paths}
        letters = {path: [word] * len(modules[path].weight) for path, word in named.items() if len(word) == 1}
    guess = Assignment("calls", narrow=True)
    design = Design("latent", "", {}, {})
    for path in open_paths:
        weight, bias = modules[path].weight.detach(), modules[path].bias
        for role, slot in SLOTS.items():
            rows = torch.tensor([i for i, letter in enumerate(letters.get(path, [])) if letter == role])
            if not len(rows):
                continue
            whole = "" if len(rows) == len(weight) else f"[{int(rows[0])}:] and so on"
            guess.weights.setdefault(role, []).append(ParameterSlice(f"{path}.weight", weight[rows], whole))
            if bias is not None:
                own = ParameterSlice(f"{path}.bias", bias.detach()[rows, None], whole)
                guess.biases.setdefault(role, []).append(own)
            if path in ups:
                _add_chain(design, ups[path], slot, modules)
    guess.weights["o"] = [ParameterSlice(f"{last}.weight", modules[last].weight.detach())]
    if modules[last].bias is not None:
        guess.biases["o"] = [ParameterSlice(f"{last}.bias", modules[last].bias.detach()[:, None])]
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
    widths = " and ".join(dict.fromkeys(str(len(matrix)) for matrix in narrow.values()))
    norm = next((chain.norm.word for chain in chains if chain.norm is not None), "")
    design.words = (
        f"{names} through {widths} channels (latent attention{f', {norm} between' if norm else ''})"
    )
    first = {name: pieces[0] for name, pieces in guess.weights.items()}
    roles = {name: Role(piece.name + piece.where, "calls", path=piece.name) for name, piece in first.items()}
    return Projections(made[0], roles, H, False, list(made[1]), guess=guess), design


def _add_chain(design: Design, chain: _Chain, slot: str, modules: dict[str, Any]) -> None:
    """Add the narrow layer of a chain, and the norm behind it, to the design."""
    down = modules[chain.down]
    design.tensors[f"{slot} down"] = down.weight.detach().double().clone()
    if down.bias is not None:
        design.tensors[f"{slot} down bias"] = down.bias.detach().double().clone()
    if chain.norm is not None:
        design.numbers |= chain.norm.numbers(f"{slot} ")
        design.tensors |= chain.norm.tensors(f"{slot} ")
