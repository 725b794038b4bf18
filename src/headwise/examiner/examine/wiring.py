"""Projections that are not four matrices of the module's own.

A wrapper leaves the work to nn.MultiheadAttention, BERT has its output projection in another class, and wrong
code has projections missing, shared, or applied in a row.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..evidence import Finding, Role
from ..recipe import Design, ProbeInputs, Weights, without_modes
from ..source.parsed import tree_of
from .caller import Caller
from .parameters import path_role
from .projections import NEARLY, Projections
from .subject import Subject, attributes_of


def wrapped_torch_attention(body: object) -> Design | None:
    """Return the design of a wrapper: one nn.MultiheadAttention inside, and no other weights but norms."""
    if not isinstance(body, nn.Module) or isinstance(body, nn.MultiheadAttention):
        return None
    inside = [
        (path, module) for path, module in body.named_modules() if isinstance(module, nn.MultiheadAttention)
    ]
    if len(inside) != 1:
        return None
    own = {id(parameter) for parameter in inside[0][1].parameters()}
    beside = [parameter for parameter in body.parameters() if id(parameter) not in own and parameter.ndim > 1]
    if beside:
        return None
    return Design("torch inside", f"nn.MultiheadAttention ({inside[0][0]}), which the class calls")


ELSEWHERE = re.compile(  # a docstring that says where the output projection is
    r"(?is)\b(\w*(?:Self|Attention)Output)\b"
    r"|(?:output|dense|final|last)\W+(?:projection|layer|linear)"
    r"[^.]*?\b(?:outside|elsewhere|lives in|caller|block)\b"
)


def projected_elsewhere(name: str, source: str | None) -> Design | None:
    """Return the design of an output projection that another class of the file applies."""
    tree = tree_of(source or "")
    if tree is None:
        return None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    made = {class_name: _made_in(node) for class_name, node in classes.items()}
    outs = [
        class_name
        for class_name in classes
        if "output" in class_name.lower() and "Linear" in made[class_name].values()
    ]
    for owner, parts in made.items():
        holds = {attribute for attribute, class_name in parts.items() if class_name == name}
        if owner == name or not holds:
            continue
        for attribute, class_name in parts.items():
            if class_name in outs or (class_name == "Linear" and path_role(attribute) == "o"):
                place = class_name if class_name in outs else f"{owner}.{attribute}"
                return _split(place)
    if re.search(r"selfattention", name.lower()) and outs:
        return _split(outs[0])
    match = ELSEWHERE.search(ast.get_docstring(classes[name]) or "") if name in classes else None
    return _split(match[1] or "the code around it") if match else None


def _split(place: str) -> Design:
    words = f"no output projection: {place} contains it, as in BERT, which splits attention into two classes"
    return Design("split", words)


def _made_in(node: ast.ClassDef) -> dict[str, str]:
    """Return self.attribute -> the name of the class it is built from."""
    classes: dict[str, str] = {}
    for child in ast.walk(node):
        if isinstance(child, ast.Assign) and isinstance(child.value, ast.Call):
            called = child.value.func
            class_name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            for target in child.targets:
                if isinstance(target, ast.Attribute):
                    classes[target.attr] = class_name
    return classes


MAX_MATRICES = 6  # more would take long and fit by chance
WORDS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass
class _Matrix:
    """A matrix [out, in] and a bias that may be a projection.

    Attributes:
        names: of its parameter; none for the identity, two for two matrices in a row.
    """

    weight: Tensor
    bias: Tensor
    names: tuple[str, ...] = ()
    path: str = ""  # of the parameter
    start: int | None = None  # the first of its rows there, where it is a part


def _matrices(subject: Subject) -> list[_Matrix]:
    """Return every [E, E] among the parameters, by itself or as a part of a fused one."""
    E, matrices = subject.sizes.E, []
    for name, tensor in subject.parameters.items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            continue
        whole = tensor.detach().double()
        turned = name not in subject.linear and whole.shape[0] == E  # x @ W
        rows = whole.T if turned else whole
        if rows.shape[1] != E or rows.shape[0] % E:
            continue
        beside = subject.parameters.get(name.removesuffix("weight") + "bias") if "weight" in name else None
        fits = beside is not None and beside.numel() == len(rows)
        bias = beside.detach().double() if beside is not None and fits else rows.new_zeros(len(rows))
        parts = len(rows) // E
        for i, (weight, own) in enumerate(zip(rows.chunk(parts), bias.chunk(parts), strict=True)):
            label = name if parts == 1 else f"{name}[{i * E}:{(i + 1) * E}]"
            start = None if parts == 1 else i * E
            matrices.append(_Matrix(weight, own, (label,), path=name, start=start))
            if turned and parts == 1:
                matrices.append(_Matrix(weight.T, own, (label,), path=name))
    return matrices


def _heads(x: Tensor, H: int) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(-3, -2)  # [.., H, T, D]


def find_wiring(
    caller: Caller, projections: Projections, truth: list[tuple[ProbeInputs, Tensor]]
) -> tuple[Projections, list[Finding]]:
    """Return the projections as the code uses them, and what is wrong with that.

    Some may be missing, shared or applied in a row. If that explains nothing, they are returned unchanged.
    """
    own = [matrix for matrix in _matrices(caller.subject) if matrix.weight.shape[0] == matrix.weight.shape[1]]
    E, H = caller.subject.sizes.E, projections.num_heads
    if not truth or projections.proven or not 0 < len(own) <= MAX_MATRICES or E % H:
        return projections, []
    none = _Matrix(torch.eye(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64))
    single = [*own, none]
    double = [
        _Matrix(b.weight @ a.weight, b.weight @ a.bias + b.bias, a.names + b.names, path=a.path)
        for a in own
        for b in own
        if a.names != b.names
    ]
    probe, output = truth[0]
    for scale in ((E // H) ** -0.5, E**-0.5, 1.0, H / E):
        for last in (single, double):
            chosen = _chosen(probe, output, H, scale, single, last)
            if chosen is not None:
                return _describe(projections, chosen, scale == (E // H) ** -0.5)
    return projections, []


@without_modes
def _chosen(
    probe: ProbeInputs, output: Tensor, H: int, scale: float, single: list[_Matrix], last: list[_Matrix]
) -> tuple[_Matrix, _Matrix, _Matrix, _Matrix] | None:
    """Return the q, k, v and o that compute the output of the first sample, with the fewest missing."""
    if not last:
        return None
    weight, bias = (torch.stack([getattr(matrix, name) for matrix in single]) for name in ("weight", "bias"))
    q, k, v = (
        _heads(x[0] @ weight.mT + bias[:, None], H) for x in (probe.query, probe.key, probe.value)
    )  # [I, H, T, D], [J, H, S, D], [K, H, S, D]
    scores = torch.einsum("ihtd,jhsd->ijhts", q, k) * scale
    if probe.mask is not None:
        scores = scores.masked_fill(~probe.mask[0], -torch.inf)
    heads = torch.einsum("ijhts,khsd->ijkthd", scores.softmax(-1), v).flatten(-2)  # [I, J, K, T, E]
    size = float(output[0].abs().max().clamp_min(1e-30))
    best: tuple[int, _Matrix, _Matrix, _Matrix, _Matrix] | None = None
    for matrix in last:
        off = (heads @ matrix.weight.T + matrix.bias - output[0]).abs().amax((-2, -1)) / size  # [I, J, K]
        for i, j, m in (off <= NEARLY).nonzero().tolist():
            four = single[i], single[j], single[m], matrix
            missing = sum(not part.names for part in four)
            if best is None or missing < best[0]:
                best = missing, *four
    return None if best is None else best[1:]


def _describe(
    projections: Projections, chosen: tuple[_Matrix, _Matrix, _Matrix, _Matrix], proven: bool
) -> tuple[Projections, list[Finding]]:
    """Return the projections and the findings of what is missing, shared or doubled, if anything is."""
    q, k, v, o = chosen
    three = dict(zip("qkv", (q, k, v), strict=True))
    missing = [name for name, matrix in three.items() if not matrix.names]
    named = (
        projections.guess is not None
        and projections.guess.complete
        and projections.guess.source in {"names", "given"}
    )
    findings = []
    if missing:
        fault = "no projections" if len(missing) == 3 else "no q and k projection"
        fault = "no v projection" if missing == ["v"] else fault
        words = " and ".join(WORDS[name] for name in missing)
        findings.append(
            Finding("projections", "wrong", f"{words} are not projected: they have no weight matrix", fault)
        )
    held = [matrix.names for matrix in three.values() if matrix.names]
    if len(set(held)) < len(held):
        detail = f"{max(held, key=held.count)[0]} computes more than one of q, k and v"
        findings.append(Finding("projections", "wrong", detail, "shared projection"))
    if len(o.names) == 2:
        detail = f"there are two output projections, {o.names[0]} and then {o.names[1]}"
        findings.append(Finding("output projection", "wrong", detail, "second output projection"))
    if not findings or (named and len(o.names) != 2):  # an unused matrix shows in the numbers
        return projections, []
    if not o.names:
        detail = "the concatenated heads are returned"
        findings.append(Finding("output projection", "wrong", detail, "no output projection"))
    weights = Weights(q.weight, k.weight, v.weight, o.weight, q.bias, k.bias, v.bias, o.bias)
    every = {**three, "o": o}
    roles = {
        name: Role(" and ".join(matrix.names), "gradients", path=matrix.path, start=matrix.start)
        for name, matrix in every.items()
        if matrix.names
    }
    return replace(
        projections, weights=weights, roles=roles, proven=proven, guess=None, tried=[], unjudged=""
    ), findings


def choose_by_fault(
    caller: Caller, projections: Projections, truth: list[tuple[ProbeInputs, Tensor]]
) -> Projections:
    """Return the proposal with which one fault computes the code's output, or `projections` if none does.

    Where the number of heads was not passed, any number that the code keeps may be it.
    """
    from ..diagnosis import one_fault_explains  # imports this package

    if projections.proven or not truth:
        return projections
    E, subject = caller.subject.sizes.E, caller.subject
    head_counts = (
        [] if subject.heads_given else [n for _, n in attributes_of(subject.body) if 1 < n < E and E % n == 0]
    )
    choices: list[Projections] = []
    for choice in projections.choices:
        if not any(_same(choice, other) for other in choices):
            choices.append(choice)
    for heads in dict.fromkeys([projections.num_heads, *head_counts]):
        for other in choices:
            if other.weights is not None and one_fault_explains(other.weights, heads, *truth[0]):
                return replace(other, num_heads=heads, choices=[])
    return projections


def _same(a: Projections, b: Projections) -> bool:
    if a.weights is None or b.weights is None:
        return a.weights is b.weights
    pairs = zip(a.weights, b.weights, strict=True)
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)
