"""Which projection each parameter makes, and in which of its axes and rows: by gradients, and by names.

Gradients need no names and work for any layout. The features are divided into quarters A, B, C, Z. Queries
are nonzero on A, keys on B, values on C, nothing on Z. A weight that multiplies an input has gradient 0 along
Z: that is its input axis, which distinguishes [out, in] from [in, out]. Row by row, A, B or C shows whether
it makes queries, keys or values. The gradient of the output is 0 on the quarter A: that axis of W_o is its
output axis.

Where one input is all three, the last token is nonzero on A and the others on B, and only the last output
counts: queries depend on A alone. If all tokens are equal, the attention weights do not depend on q and k:
their rows get no gradient, those of v do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..evidence import Role
from ..recipe import Weights
from .caller import QKV, Caller, inputs_for, map_inputs
from .environment import CAUGHT
from .subject import Subject
from .vocabulary import bare, role_word


@dataclass(eq=False)
class Fingerprint:
    """What gradients show about one parameter."""

    used: bool = False
    in_axis: int | None = None  # along which it meets an input
    out_axis: int | None = None  # along which it makes the output
    rows: list[str] = field(
        default_factory=list
    )  # "q", "k", "v", several letters, or "" for each row [.., E]


def _gradients(caller: Caller, inputs: QKV, cotangent: Tensor) -> dict[str, Tensor]:
    """Return the gradient of each parameter that has one."""
    parameters = {k: p for k, p in caller.subject.parameters.items() if p.requires_grad}
    if caller.plan.as_numpy:
        return _differences(caller, parameters, inputs, cotangent)
    output = caller.call(*inputs).output
    if not output.requires_grad or not parameters:
        return {}
    gradients = torch.autograd.grad((output * cotangent).sum(), list(parameters.values()), allow_unused=True)
    return {
        name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    }


def _differences(
    caller: Caller, parameters: dict[str, Tensor], inputs: QKV, cotangent: Tensor
) -> dict[str, Tensor]:
    """Return difference quotients for code without gradients, one call per number; zeros are exact."""
    step, gradients = 1e-4, {}
    with torch.no_grad():
        base = (caller.call(*inputs).output * cotangent).sum()
        for name, parameter in parameters.items():
            flat, moved = parameter.view(-1), torch.zeros(parameter.numel(), dtype=torch.float64)
            for i in range(len(flat)):
                was = flat[i].clone()
                flat[i] += step
                moved[i] = ((caller.call(*inputs).output * cotangent).sum() - base) / step
                flat[i] = was
            gradients[name] = moved.view_as(parameter)
    return gradients


def _on_quarter(x: Tensor, quarter: int, quarters: int = 4) -> Tensor:
    """Return a copy that is zero except on one quarter of the features."""
    step = x.shape[-1] // quarters
    part = torch.zeros_like(x)
    part[..., quarter * step : (quarter + 1) * step] = x[..., quarter * step : (quarter + 1) * step]
    return part


class Fingerprints(Mapping[str, Fingerprint]):
    """The fingerprint of every parameter, measured at first use; empty where gradients cannot be had."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    @cached_property
    def measured(self) -> dict[str, Fingerprint]:
        """The fingerprints by the path of the parameter."""
        try:
            return _fingerprints(self.caller)
        except CAUGHT:
            return {}

    def __getitem__(self, path: str) -> Fingerprint:
        return self.measured[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.measured)

    def __len__(self) -> int:
        return len(self.measured)


def _fingerprints(caller: Caller) -> dict[str, Fingerprint]:
    """Measure the fingerprint of every parameter."""
    sizes, plan, zero = caller.subject.sizes, caller.plan, caller.subject.gradient_tolerance
    query, key, value = inputs_for(caller, seed=11)
    width = caller.call(query, key, value).output.shape[-1]
    generator = torch.Generator().manual_seed(5)
    cotangent = torch.randn(sizes.B, sizes.long, width, generator=generator, dtype=torch.float64)
    cotangent[..., : width // 4] = 0
    if plan.self_only:
        x = _on_quarter(query, 1)
        x[:, -1] = _on_quarter(query, 0)[:, -1]
        query = key = value = x
        cotangent[:, :-1] = 0
    elif plan.memory_only:
        query, key = _on_quarter(query, 0), _on_quarter(key, 1)
        value = key
    else:
        query, key, value = _on_quarter(query, 0), _on_quarter(key, 1), _on_quarter(value, 2)
    gradients = _gradients(caller, (query, key, value), cotangent)
    of_equal_tokens: dict[str, Tensor] = {}
    of_all_values: dict[str, Tensor] = {}
    if plan.self_only or plan.memory_only:
        equal_tokens = map_inputs(inputs_for(caller, seed=12), lambda x: x[:, :1].expand_as(x).contiguous())
        of_equal_tokens = _gradients(caller, equal_tokens, cotangent)
    else:
        of_all_values = _gradients(caller, (query, key, inputs_for(caller, seed=13)[2]), cotangent)
    measured = {}
    threshold = zero * max((float(x.abs().max()) for x in of_equal_tokens.values()), default=1.0)
    for name, parameter in caller.subject.parameters.items():
        gradient, of_equal = gradients.get(name), of_equal_tokens.get(name)
        if gradient is None or not bool((gradient != 0).any()):
            measured[name] = Fingerprint(of_equal is not None and bool((of_equal.abs() > threshold).any()))
            continue
        fingerprint = measured[name] = Fingerprint(used=True)
        if parameter.ndim < 2:
            continue
        _find_axes(fingerprint, gradient, of_all_values.get(name), sizes.E, width, zero)
        if (axis := fingerprint.in_axis) is not None:
            rows = gradient.movedim(axis, -1).reshape(-1, sizes.E).abs()
            makes_values = torch.zeros(len(rows), dtype=torch.bool)
            if of_equal is not None:
                still = of_equal.movedim(axis, -1).reshape(-1, sizes.E).abs()
                makes_values = still.amax(1) > 1e2 * threshold
            one_input = plan.self_only or plan.memory_only
            fingerprint.rows = _roles_of_rows(rows, makes_values if one_input else None, zero)
    return measured


def _find_axes(
    fingerprint: Fingerprint, gradient: Tensor, of_all_values: Tensor | None, E: int, width: int, zero: float
) -> None:
    """Find the axis along which a parameter meets an input, and the one along which it makes the output."""

    def avoids_last_quarter(gradient: Tensor, axis: int) -> bool:
        return not bool(_nonzero_along(gradient, axis, zero)[3 * (E // 4) :].any())

    axes = list(reversed(range(gradient.ndim)))
    inward = [
        axis for axis in axes
        if len(_nonzero_along(gradient, axis, zero)) == E and avoids_last_quarter(gradient, axis)
    ]  # fmt: skip
    if len(inward) > 1 and of_all_values is not None:
        # values that are not projected lend their pattern to other axes
        inward = [axis for axis in inward if avoids_last_quarter(of_all_values, axis)] or inward
    fingerprint.in_axis = inward[0] if inward else None
    for axis in axes:
        nonzero = _nonzero_along(gradient, axis, zero)
        if axis != fingerprint.in_axis and len(nonzero) == width and not bool(nonzero[: width // 4].any()):
            fingerprint.out_axis = axis


def _nonzero_along(gradient: Tensor, axis: int, zero: float) -> Tensor:
    """Return where along an axis there is any gradient, bool [size of the axis]."""
    others = [a for a in range(gradient.ndim) if a != axis]
    return gradient.abs().amax(others) > zero * float(gradient.abs().max())


def _roles_of_rows(rows: Tensor, makes_values: Tensor | None, zero: float) -> list[str]:
    """Return what each row of a weight makes: "q", "k", "v", several of them, or "".

    Args:
        rows: magnitudes of gradients, the input axis last: [n, E].
        makes_values: bool [n], where one input is more than one of query, key and value.
    """
    step = rows.shape[1] // 4
    threshold = zero * float(rows.max())
    live = torch.stack([rows[:, i * step : (i + 1) * step].amax(1) > threshold for i in range(3)], 1).tolist()
    if makes_values is None:
        return ["".join(role for role, on in zip("qkv", row, strict=True) if on) for row in live]
    return [
        ("v" if is_value else "k" if on_keys else "q") if on_queries or on_keys else ""
        for (on_queries, on_keys, _), is_value in zip(live, makes_values.tolist(), strict=True)
    ]


@dataclass(eq=False)
class ParameterSlice:
    """Rows of a parameter as [out, in]; of a bias as [n, 1]."""

    name: str
    rows: Tensor
    where: str = ""  # "[0:24]" of a larger one
    transposed: bool = False
    start: int | None = None  # the first row, of a run of them


@dataclass(eq=False)
class Assignment:
    """A proposal of which slices of parameters make each projection and bias."""

    source: str  # "names", "calls", "gradients", "given"
    weights: dict[str, list[ParameterSlice]] = field(default_factory=dict)  # q, k, v, o
    biases: dict[str, list[ParameterSlice]] = field(default_factory=dict)
    order: str = ""  # of a fused weight
    certain: bool = False  # q, k and v have names of their own
    family: str = ""  # how a fused weight is cut
    spelled: bool = False  # its name says in which order
    narrow: bool = False  # behind narrower matrices: its inputs are not of the width

    @property
    def complete(self) -> bool:
        """True if q, k and v all have a slice."""
        return all(self.weights.get(name) for name in "qkv")


def rows_of(tensor: Tensor, in_axis: int) -> Tensor:
    """Return a parameter of any number of axes as [out, in]."""
    flat = tensor.detach().movedim(in_axis, -1)
    return flat.reshape(-1, flat.shape[-1])


def out_rows(tensor: Tensor, out_axis: int) -> Tensor:
    """Return an output projection, whose inputs are heads and channels, as [out, H * D]."""
    flat = tensor.detach().movedim(out_axis, 0)
    return flat.reshape(flat.shape[0], -1)


def join(pieces: Sequence[ParameterSlice]) -> Tensor:
    """Return the rows of several slices, one below the other."""
    return torch.cat([piece.rows for piece in pieces])


def _join_out(pieces: Sequence[ParameterSlice], width: int) -> Tensor:
    """Return the rows of an output projection; slices of the single heads, [E, D], stand side by side."""
    beside = len(pieces) > 1 and sum(piece.rows.shape[1] for piece in pieces) == width
    return torch.cat([piece.rows for piece in pieces], dim=1) if beside else join(pieces)


def role_of(pieces: Sequence[ParameterSlice], source: str) -> Role:
    """Return which parameter a projection is, in words and by path."""
    first = pieces[0]
    more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    start = first.start if len(pieces) == 1 else None
    return Role(f"{first.name}{first.where}{more}", source, first.transposed, first.name, start)


def is_small(guess: Assignment, E: int, H: int) -> bool:
    """Return True if the projections are [D, D], one for all heads."""
    q = guess.weights.get("q") or guess.weights.get("v")
    return bool(q) and H > 1 and join(q or []).shape[1] * H == E and len(join(q or [])) * H == E


def weights_of(guess: Assignment, E: int, H: int) -> tuple[Weights, list[str]] | None:
    """Return the weights of an assignment, and sentences about them; None if the sizes do not fit.

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
            words = [
                f"{H} query heads share {n // D} key/value head{'s' * (n // D > 1)} (grouped-query attention)"
            ]
    if len(weight["k"]) != len(weight["q"]) or len(weight["v"]) % H:
        return None
    pieces, biases = guess.weights.get("o"), guess.biases.get("o")
    out = _join_out(pieces, len(weight["v"])) if pieces else torch.eye(len(weight["v"]), dtype=torch.float64)
    o_bias = join(biases).flatten() if biases else torch.zeros(len(out), dtype=torch.float64)
    whole = out.shape[1] in (len(weight["v"]), len(weight["v"]) // H)  # the second where heads are averaged
    if not whole or len(o_bias) != len(out):
        return None
    made = (*(weight[name] for name in "qkv"), out, *(bias[name] for name in "qkv"), o_bias)
    return Weights(*(x.detach().double().clone().contiguous() for x in made)), words


def path_role(path: str) -> str | None:
    """Return which projection a parameter's path names, from its last part to its first."""
    parts = path.split(".")
    if bare(parts[-1]) in {"weight", "bias", "kernel", "weightorig"}:
        parts.pop()
    for part in reversed(parts):
        if not part.isdigit():
            role = role_word(part)
            if role:
                return role
    return None


def _is_bias(path: str, tensor: Tensor) -> bool:
    last = path.split(".")[-1].lower()
    return tensor.ndim == 1 or "bias" in last or re.fullmatch(r"b_?[a-z]{1,3}", last) is not None


def _split(subject: Subject) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and biases by path, without those of normalisations and single numbers."""
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for name, tensor in subject.parameters.items():
        if name in subject.norms or tensor.numel() < 2:
            continue
        (biases if _is_bias(name, tensor) else weights)[name] = tensor
    return weights, biases


def alike(names: list[str]) -> bool:
    """Return True if paths differ in numbers alone: one for each head."""
    return len({re.sub(r"\d+", "#", name) for name in names}) == 1


def spells(path: str) -> bool:
    """Return True if a fused weight's name says that it holds q, k, v in this order."""
    return any(word in bare(path) for word in ("qkv", "querykeyvalue", "inproj"))


class ParameterLayout:
    """The axes and rows in which each parameter holds projections, as far as they are known."""

    def __init__(self, subject: Subject, prints: Mapping[str, Fingerprint]) -> None:
        self.subject, self.prints = subject, prints
        self.weights, self.biases = _split(subject)
        self.E = subject.sizes.E

    def input_axes(self, name: str) -> list[int]:
        """Return the axes along which a weight may meet the input, the likeliest first."""
        tensor = self.weights[name]
        if name in self.subject.linear:
            return [1]
        if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
            right = [axis for axis in (1, 0) if tensor.shape[axis] == self.E]
            if len(right) == 1:
                return right
        fingerprint = self.prints.get(name)
        if fingerprint is not None and fingerprint.in_axis is not None:
            return [fingerprint.in_axis]
        axes = [axis for axis in range(tensor.ndim) if tensor.shape[axis] == self.E]
        return axes or [1]

    def output_axes(self, name: str) -> list[int]:
        """Return the axes along which an output projection may make the output, the likeliest first."""
        tensor = self.weights[name]
        if name in self.subject.linear:
            return [0]
        fingerprint = self.prints.get(name)
        if fingerprint is not None and fingerprint.out_axis is not None:
            return [fingerprint.out_axis]
        return [axis for axis in reversed(range(tensor.ndim)) if tensor.shape[axis] == self.E] or [
            tensor.ndim - 1
        ]

    def bias_of(self, name: str) -> str | None:
        """Return the path of the bias beside a weight, or None."""
        beside = re.sub(r"weight$", "bias", name)
        return beside if beside != name and beside in self.biases else None

    def piece(self, name: str, axis: int, rows: Tensor | None = None, where: str = "") -> ParameterSlice:
        """Return rows of an input projection."""
        whole = rows_of(self.weights[name], axis)
        run = rows is not None and where != "" and bool((rows.diff() == 1).all())
        start = int(rows[0]) if rows is not None and run else None
        part = whole if rows is None else whole[rows]
        wide = [i for i, n in enumerate(self.weights[name].shape) if n > 1]  # a convolution ends in axes of 1
        return ParameterSlice(name, part, where, bool(wide) and axis != wide[-1], start)

    def out_piece(self, name: str, axis: int) -> ParameterSlice:
        """Return an output projection."""
        return ParameterSlice(name, out_rows(self.weights[name], axis), "", axis != 0)

    def bias_piece(self, name: str, rows: Tensor | None = None, where: str = "") -> ParameterSlice:
        """Return a bias, or rows of it."""
        whole = self.biases[name].detach().reshape(-1, 1)
        return ParameterSlice(name, whole if rows is None else whole[rows], where)


def where_of(rows: Tensor) -> str:
    """Return rows as text: "[0:24]", or "[0:6] and so on"."""
    jumps = (rows[1:] - rows[:-1] != 1).nonzero().flatten()
    first = f"[{int(rows[0])}:{int(rows[int(jumps[0])]) + 1 if len(jumps) else int(rows[-1]) + 1}]"
    return first if not len(jumps) else f"{first} and so on"


CONSTANT_ZERO, CONSTANT_ONE = -1, -2


@torch.no_grad()
def origin_of(
    weights: Weights | None,
    parameters: Mapping[str, Tensor],
    factors: Mapping[str, Sequence[Tensor]] | None = None,
) -> dict[str, list[Tensor]]:
    """Return where each number of the weights comes from: indices into all parameters, flat and in order.

    Keys are the names of `Weights`; those with numbers that no parameter has are left out. CONSTANT_ZERO and
    CONSTANT_ONE stand for the numbers of identities and of missing biases.

    Args:
        factors: projections that are products of two or more, the first applied first.
    """
    if weights is None:
        return {}
    held = [value.detach().double().flatten().cpu() for value in parameters.values()]
    drawn = torch.cat(held) if held else torch.empty(0, dtype=torch.float64)
    ordered, order = drawn.sort()
    origin = {}
    for name, whole in weights._asdict().items():
        parts = [_places(x.double(), ordered, order) for x in (factors or {}).get(name, (whole,))]
        located = [x for x in parts if x is not None]
        if len(located) == len(parts):
            origin[name] = located
    return origin


def _places(numbers: Tensor, ordered: Tensor, order: Tensor) -> Tensor | None:
    """Return the index of each number in the parameters; None if a number is in none of them."""
    places = torch.where(numbers == 0, CONSTANT_ZERO, CONSTANT_ONE)
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
