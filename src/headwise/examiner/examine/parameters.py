"""Which parameter is which, from gradients alone: no names, any layout.

The features are cut into four quarters A, B, C, Z. Queries live on A, keys on B, values on C, nothing on Z. A
weight that multiplies an input has gradient 0 along Z: that is its input axis, which tells [out, in] from
[in, out]; row by row, A, B or C tells whether it makes queries, keys or values. The cotangent is 0 on the
output's quarter A: that axis of W_o is its output.

Where one input is all three, the last token lives on A and the others on B, and only the last output is
asked: queries see A alone. When all tokens are equal the weights of the attention do not depend on q and k:
their rows get no gradient, those of v do.

From parameters as they are kept to the four projections as nn.Linear holds them.

How the learner's code keeps its parameters: which are weights, which axis meets the input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..evidence import Role
from ..recipe import Weights
from .caller import Caller, inputs_for
from .environment import CAUGHT
from .subject import Subject
from .vocabulary import bare, role_word


@dataclass(eq=False)
class Fingerprint:
    """What gradients say about one parameter."""

    used: bool = False
    in_axis: int | None = None  # along which it meets an input
    out_axis: int | None = None  # along which it makes the output
    rows: list[str] = field(
        default_factory=list
    )  # "q", "k", "v", several letters, or "" for each row [.., E]


def _gradients(
    caller: Caller, inputs: tuple[Tensor, Tensor, Tensor], cotangent: Tensor, mask: Tensor | None = None
) -> dict[str, Tensor]:
    parameters = {k: p for k, p in caller.subject.parameters.items() if p.requires_grad}
    if caller.plan.as_numpy:
        return _differences(caller, parameters, inputs, cotangent)
    output = caller.call(*inputs, mask).output
    if not output.requires_grad or not parameters:
        return {}
    found = torch.autograd.grad((output * cotangent).sum(), list(parameters.values()), allow_unused=True)
    return {name: one for name, one in zip(parameters, found, strict=True) if one is not None}


def _differences(
    caller: Caller, parameters: dict[str, Tensor], inputs: tuple[Tensor, Tensor, Tensor], cotangent: Tensor
) -> dict[str, Tensor]:
    """What gradients would be where there are none: each number moved a little. Zeros are exact zeros."""
    step, found = 1e-4, {}
    with torch.no_grad():
        base = (caller.call(*inputs).output * cotangent).sum()
        for name, parameter in parameters.items():
            flat, moved = parameter.view(-1), torch.zeros(parameter.numel(), dtype=torch.float64)
            for i in range(len(flat)):
                was = flat[i].clone()
                flat[i] += step
                moved[i] = ((caller.call(*inputs).output * cotangent).sum() - base) / step
                flat[i] = was
            found[name] = moved.view_as(parameter)
    return found


def _on(x: Tensor, quarter: int, quarters: int = 4) -> Tensor:
    """Zero but on one quarter of the features."""
    step = x.shape[-1] // quarters
    kept = torch.zeros_like(x)
    kept[..., quarter * step : (quarter + 1) * step] = x[..., quarter * step : (quarter + 1) * step]
    return kept


def fingerprints(caller: Caller) -> dict[str, Fingerprint]:
    """For every parameter; empty where gradients cannot be had."""
    try:
        return _fingerprints(caller)
    except CAUGHT:
        return {}


def _fingerprints(caller: Caller) -> dict[str, Fingerprint]:
    sizes, plan, zero = caller.subject.sizes, caller.plan, caller.subject.gradient_tolerance
    T = S = sizes.long
    query, key, value = inputs_for(caller, T, S, seed=11)
    width = caller.call(query, key, value).output.shape[-1]
    cotangent = torch.randn(
        sizes.B, T, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    cotangent[..., : width // 4] = 0
    equal: dict[str, Tensor] = {}
    spread: dict[str, Tensor] = {}
    if plan.self_only:
        x = _on(query, 1)
        x[:, -1] = _on(query, 0)[:, -1]
        query = key = value = x
        cotangent[:, :-1] = 0
    elif plan.memory_only:
        query, key = _on(query, 0), _on(key, 1)
        value = key
    else:
        query, key, value = _on(query, 0), _on(key, 1), _on(value, 2)
    apart = _gradients(caller, (query, key, value), cotangent)
    if plan.self_only or plan.memory_only:
        flat = [one[:, :1].expand_as(one).contiguous() for one in inputs_for(caller, T, S, seed=12)]
        if plan.self_only:
            flat = [flat[0]] * 3
        equal = _gradients(caller, (flat[0], flat[1], flat[1]), cotangent)
    else:
        dense = inputs_for(caller, T, S, seed=13)
        spread = _gradients(caller, (query, key, dense[2]), cotangent)
    found = {}
    largest = max((float(one.abs().max()) for one in equal.values()), default=1.0)
    for name, parameter in caller.subject.parameters.items():
        gradient = apart.get(name)
        if gradient is None or not bool((gradient != 0).any()):
            found[name] = Fingerprint(used=name in equal and bool((equal[name].abs() > zero * largest).any()))
            continue
        print_ = Fingerprint(used=True)
        if parameter.ndim >= 2:
            _axes(print_, gradient, spread.get(name), sizes.E, width, zero)
            if print_.in_axis is not None:
                still = equal.get(name)
                print_.rows = _rows(
                    gradient, print_.in_axis, sizes.E, still, largest, zero, plan.self_only, plan.memory_only
                )
        found[name] = print_
    return found


def _axes(
    print_: Fingerprint, gradient: Tensor, spread: Tensor | None, E: int, width: int, zero: float
) -> None:
    inward = [axis for axis in reversed(range(gradient.ndim)) if len(_live(gradient, axis, zero)) == E]
    inward = [axis for axis in inward if not bool(_live(gradient, axis, zero)[3 * (E // 4) :].any())]
    if (
        len(inward) > 1 and spread is not None
    ):  # values that are not projected lend their pattern to other axes
        inward = [
            axis for axis in inward if not bool(_live(spread, axis, zero)[3 * (E // 4) :].any())
        ] or inward
    print_.in_axis = inward[0] if inward else None
    for axis in reversed(range(gradient.ndim)):
        live = _live(gradient, axis, zero)
        if axis != print_.in_axis and len(live) == width and not bool(live[: width // 4].any()):
            print_.out_axis = axis


def _live(gradient: Tensor, axis: int, zero: float) -> Tensor:
    """Where along an axis there is any gradient, bool [size of the axis]."""
    others = [a for a in range(gradient.ndim) if a != axis]
    return gradient.abs().amax(others) > zero * float(gradient.abs().max())


def _rows(
    gradient: Tensor,
    axis: int,
    E: int,
    still: Tensor | None,
    largest: float,
    zero: float,
    self_only: bool,
    memory_only: bool,
) -> list[str]:
    """What each row, the input axis moved last and the others flattened, makes."""
    step = E // 4
    rows = gradient.movedim(axis, -1).reshape(-1, E).abs()
    size = float(rows.max())
    live = torch.stack([rows[:, i * step : (i + 1) * step].amax(1) > zero * size for i in range(3)], 1)
    if not self_only and not memory_only:
        return ["".join(role for role, on in zip("qkv", row, strict=True) if on) for row in live.tolist()]
    moving = torch.zeros(len(rows), dtype=torch.bool)
    if still is not None:
        moving = still.movedim(axis, -1).reshape(-1, E).abs().amax(1) > 1e2 * zero * largest
    said = []
    for (a, b, _), v in zip(live.tolist(), moving.tolist(), strict=True):
        if not a and not b:
            said.append("")
        elif v:
            said.append("v")
        else:
            said.append("k" if b else "q")
    return said


@dataclass(eq=False)
class ParameterSlice:
    """Part of a parameter: which rows of it, once it is [out, in]; of a bias, [n, 1]."""

    name: str
    rows: Tensor
    where: str = ""  # "[0:24]" of a larger one
    transposed: bool = False
    start: int | None = None  # the first row, of a run of them


@dataclass(eq=False)
class Assignment:
    """A proposal: pieces for each projection and bias, which together make the weights."""

    how: str  # "names", "calls", "gradients", "given"
    weights: dict[str, list[ParameterSlice]] = field(default_factory=dict)  # q, k, v, o
    biases: dict[str, list[ParameterSlice]] = field(default_factory=dict)
    order: str = ""  # of a fused weight
    certain: bool = False  # q, k and v have names of their own
    family: str = ""  # how a fused weight is cut
    spelled: bool = False  # its name says in which order
    narrow: bool = False  # behind narrower matrices: its inputs are not of the width

    @property
    def complete(self) -> bool:
        """Whether q, k and v were all found."""
        return all(self.weights.get(name) for name in "qkv")


def rows_of(tensor: Tensor, in_axis: int) -> Tensor:
    """[out, in] of a parameter of any number of axes."""
    flat = tensor.detach().movedim(in_axis, -1)
    return flat.reshape(-1, flat.shape[-1])


def out_rows(tensor: Tensor, out_axis: int) -> Tensor:
    """The same for an output projection, whose inputs are heads and channels: [out, H * D]."""
    flat = tensor.detach().movedim(out_axis, 0)
    return flat.reshape(flat.shape[0], -1)


def join(pieces: Sequence[ParameterSlice]) -> Tensor:
    """One below the other."""
    return torch.cat([one.rows for one in pieces])


def _join_out(pieces: Sequence[ParameterSlice], width: int) -> Tensor:
    """Of an output projection: side by side where each head has its own, [E, D]."""
    beside = len(pieces) > 1 and sum(one.rows.shape[1] for one in pieces) == width
    return torch.cat([one.rows for one in pieces], dim=1) if beside else join(pieces)


def role_of(pieces: Sequence[ParameterSlice], how: str) -> Role:
    """Where it was found, in words."""
    first = pieces[0]
    more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    start = first.start if len(pieces) == 1 else None
    return Role(f"{first.name}{first.where}{more}", how, first.transposed, first.name, start)


def is_small(guess: Assignment, E: int, H: int) -> bool:
    """Whether its projections are [D, D], one for all heads."""
    q = guess.weights.get("q") or guess.weights.get("v")
    return bool(q) and H > 1 and join(q or []).shape[1] * H == E and len(join(q or [])) * H == E


def weights_of(guess: Assignment, E: int, H: int) -> tuple[Weights, list[str]] | None:
    """The weights a guess amounts to, and sentences about them; None where the sizes make no sense.

    Missing projections are the identity, missing biases zeros.
    """
    words: list[str] = []
    weight: dict[str, Tensor] = {}
    bias: dict[str, Tensor] = {}
    for name in "qkv":
        pieces, biases = guess.weights.get(name), guess.biases.get(name)
        rows = join(pieces).double() if pieces else torch.eye(E, dtype=torch.float64)
        more = join(biases).flatten().double() if biases else torch.zeros(len(rows), dtype=torch.float64)
        if H > 1 and rows.shape[1] * H == E and len(rows) * H == E:  # one small projection for every head
            rows = torch.kron(torch.eye(H, dtype=rows.dtype), rows)
            more = more.repeat(H)
        if (rows.shape[1] != E and not guess.narrow) or len(more) != len(rows):
            return None
        weight[name], bias[name] = rows, more
    if len(weight["q"]) % H:
        return None
    D = len(weight["q"]) // H
    for name in "kv":
        n = len(weight[name])
        if n < len(weight["q"]) and n % D == 0 and H % (n // D) == 0:
            times = H // (n // D)
            weight[name] = weight[name].unflatten(0, (n // D, D)).repeat_interleave(times, 0).flatten(0, 1)
            bias[name] = bias[name].unflatten(0, (n // D, D)).repeat_interleave(times, 0).flatten()
            words = [f"{n // D} heads of keys and values serve {H} of queries (grouped-query attention)"]
    if len(weight["k"]) != len(weight["q"]) or len(weight["v"]) % H:
        return None
    pieces, biases = guess.weights.get("o"), guess.biases.get("o")
    out = _join_out(pieces, len(weight["v"])) if pieces else torch.eye(len(weight["v"]), dtype=torch.float64)
    o_bias = join(biases).flatten() if biases else torch.zeros(len(out), dtype=torch.float64)
    whole = out.shape[1] in (len(weight["v"]), len(weight["v"]) // H)  # the second where heads are averaged
    if not whole or len(o_bias) != len(out):
        return None
    made = (*(weight[name] for name in "qkv"), out, *(bias[name] for name in "qkv"), o_bias)
    return Weights(*(one.detach().double().clone().contiguous() for one in made)), words


def path_role(path: str) -> str | None:
    """Which projection a parameter's path names, from its last part to its first."""
    parts = path.split(".")
    if bare(parts[-1]) in {"weight", "bias", "kernel", "weightorig"}:
        parts.pop()
    for part in reversed(parts):
        if not part.isdigit():
            found = role_word(part)
            if found:
                return found
    return None


def _is_bias(path: str, tensor: Tensor) -> bool:
    last = path.split(".")[-1].lower()
    return tensor.ndim == 1 or "bias" in last or re.fullmatch(r"b_?[a-z]{1,3}", last) is not None


def _split(subject: Subject) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, biases) by path, without what belongs to a normalisation and single numbers."""
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for name, tensor in subject.parameters.items():
        if name in subject.norms or tensor.numel() < 2:
            continue
        (biases if _is_bias(name, tensor) else weights)[name] = tensor
    return weights, biases


def alike(names: list[str]) -> bool:
    """Whether paths differ in numbers alone: one a head."""
    return len({re.sub(r"\d+", "#", name) for name in names}) == 1


def spells(path: str) -> bool:
    """Whether a fused weight's name says that it holds q, k, v in this order; torch's in_proj does."""
    return any(word in bare(path) for word in ("qkv", "querykeyvalue", "inproj"))


class ParameterLayout:
    """How each parameter is kept, as far as it can be told."""

    def __init__(self, subject: Subject, prints: dict[str, Fingerprint]) -> None:
        self.subject, self.prints = subject, prints
        self.weights, self.biases = _split(subject)
        self.E = subject.sizes.E

    def input_axes(self, name: str) -> list[int]:
        """Along which axis a weight meets the input, the likeliest first."""
        tensor = self.weights[name]
        if name in self.subject.linear:
            return [1]
        if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
            right = [axis for axis in (1, 0) if tensor.shape[axis] == self.E]
            if len(right) == 1:
                return right
        seen = self.prints.get(name)
        if seen is not None and seen.in_axis is not None:
            return [seen.in_axis]
        axes = [axis for axis in range(tensor.ndim) if tensor.shape[axis] == self.E]
        return axes or [1]

    def output_axes(self, name: str) -> list[int]:
        """Along which axis an output projection makes the output."""
        tensor = self.weights[name]
        if name in self.subject.linear:
            return [0]
        seen = self.prints.get(name)
        if seen is not None and seen.out_axis is not None:
            return [seen.out_axis]
        return [axis for axis in reversed(range(tensor.ndim)) if tensor.shape[axis] == self.E] or [
            tensor.ndim - 1
        ]

    def bias_of(self, name: str) -> str | None:
        """The bias kept beside a weight."""
        beside = re.sub(r"weight$", "bias", name)
        return beside if beside != name and beside in self.biases else None

    def piece(self, name: str, axis: int, rows: Tensor | None = None, where: str = "") -> ParameterSlice:
        """Rows of an input projection."""
        whole = rows_of(self.weights[name], axis)
        run = rows is not None and where != "" and bool((rows.diff() == 1).all())
        start = int(rows[0]) if rows is not None and run else None
        kept = whole if rows is None else whole[rows]
        wide = [i for i, n in enumerate(self.weights[name].shape) if n > 1]  # a convolution ends in axes of 1
        return ParameterSlice(name, kept, where, bool(wide) and axis != wide[-1], start)

    def out_piece(self, name: str, axis: int) -> ParameterSlice:
        """An output projection."""
        return ParameterSlice(name, out_rows(self.weights[name], axis), "", axis != 0)

    def bias_piece(self, name: str, rows: Tensor | None = None, where: str = "") -> ParameterSlice:
        """A bias, or rows of it."""
        whole = self.biases[name].detach().reshape(-1, 1)
        return ParameterSlice(name, whole if rows is None else whole[rows], where)


def where_of(rows: Tensor) -> str:
    """[0:24], or [0:6] and so on."""
    jumps = (rows[1:] - rows[:-1] != 1).nonzero().flatten()
    first = f"[{int(rows[0])}:{int(rows[int(jumps[0])]) + 1 if len(jumps) else int(rows[-1]) + 1}]"
    return first if not len(jumps) else f"{first} and so on"


ZERO, ONE = -1, -2


@torch.no_grad()
def origin_of(
    weights: Weights | None,
    parameters: Mapping[str, Tensor],
    factors: Mapping[str, Sequence[Tensor]] | None = None,
) -> dict[str, list[Tensor]]:
    """By the names of `Weights`: indices into all parameters in order, flat; without those not found there.

    Args:
        factors: projections that are products of two or more, the first applied first.
    """
    if weights is None:
        return {}
    held = [value.detach().double().flatten().cpu() for value in parameters.values()]
    drawn = torch.cat(held) if held else torch.empty(0, dtype=torch.float64)
    ordered, order = drawn.sort()
    found = {}
    for name, whole in weights._asdict().items():
        parts = [_places(one.double(), ordered, order) for one in (factors or {}).get(name, (whole,))]
        known = [one for one in parts if one is not None]
        if len(known) == len(parts):
            found[name] = known
    return found


def _places(numbers: Tensor, ordered: Tensor, order: Tensor) -> Tensor | None:
    """Zeros and ones are those of identities and of biases that are not there."""
    places = torch.where(numbers == 0, ZERO, ONE)
    rest = (numbers != 0) & (numbers != 1)
    if not bool(rest.any()):
        return places
    if not len(ordered):
        return None
    spots = torch.searchsorted(ordered, numbers[rest].contiguous()).clamp_(max=len(ordered) - 1)
    if not torch.equal(ordered[spots], numbers[rest]):
        return None
    places[rest] = order[spots]
    return places
