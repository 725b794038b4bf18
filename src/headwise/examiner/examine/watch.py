"""A call watched: the norms and linear layers at work in it, and the scores on their way into the softmax.

Norms are measured from what went in and what came out: eps, gains and biases, however they are kept.

Letters: B batch, T query_len, S key_len, H num_heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.overrides import TorchFunctionMode

from ..evidence import Role
from ..recipe import Design
from .caller import Caller, inputs_for
from .parameters import Assignment, ParameterSlice, path_role, weights_of
from .projections import NEARLY, Found
from .subject import dropped
from .surroundings import CAUGHT

Three = tuple[Tensor, Tensor, Tensor]
NORMS = frozenset({"layer_norm", "rms_norm"})
PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ bmm baddbmm einsum scaled_dot_product_attention".split())


@dataclass(eq=False)
class Norm:
    """A norm at work."""

    given: Tensor
    made: Tensor
    module: nn.Module | None  # None: a call of torch.nn.functional
    rms: float = 0.0
    eps: float = 0.0
    groups: int = 0  # of channels that are normalised together, along all positions; 0: each token by itself
    gain: Tensor | None = None
    bias: Tensor | None = None

    @property
    def word(self) -> str:
        return "GroupNorm" if self.groups else "RMSNorm" if self.rms else "LayerNorm"

    def numbers(self, prefix: str = "") -> dict[str, float]:
        made = {f"{prefix}rms": self.rms, f"{prefix}eps": self.eps}
        return made | {f"{prefix}groups": float(self.groups)} if self.groups else made

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        tensors = {f"{prefix}gain": self.gain, f"{prefix}bias": self.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(eq=False)
class Ran:
    """What one call was seen to do."""

    output: Tensor
    norms: list[Norm] = field(default_factory=list)
    linear: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # (path, given, made)
    scores: list[Tensor] = field(default_factory=list)  # what went into a softmax, or an exp
    dropped: list[Tensor] = field(default_factory=list)  # what went into dropout
    factors: list[Tensor] = field(default_factory=list)  # what went into products of two tensors


class _Watch(TorchFunctionMode):
    def __init__(self, ran: Ran) -> None:
        super().__init__()
        self.ran = ran

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in {"softmax", "log_softmax", "exp", "exp_", "exp2"} and args:
            self.ran.scores.append(args[0].detach().clone())
        elif name == "scaled_dot_product_attention":
            self.ran.scores.append(_scores(*args, **kwargs))
        if name == "dropout" and args:
            self.ran.dropped.append(args[0].detach().clone())
        if name in PRODUCTS:
            self.ran.factors += [x.detach().clone() for x in args if isinstance(x, Tensor) and x.ndim > 2]
        made = func(*args, **kwargs)
        if name in NORMS and args and isinstance(made, Tensor):
            self.ran.norms.append(Norm(args[0].detach().clone(), made.detach().clone(), None))
        return made


def _scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch's own attention puts into its softmax."""
    query, key = query.detach(), key.detach()
    if query.ndim > 3 and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hides else scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def watch(caller: Caller, inputs: Three) -> Ran:
    """One call, with an eye on its norms, linear layers and softmax."""
    ran = Ran(torch.empty(0))
    body = caller.subject.body
    hooks = []

    def note(path: str) -> Any:
        def noted(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
            if len(args) == 0 or not torch.is_tensor(args[0]) or not torch.is_tensor(made):
                return
            x = args[0].detach().clone()
            if isinstance(module, nn.GroupNorm) and x.ndim > 2:
                ran.norms.append(_of_groups(module, x, made.detach().clone()))
            elif isinstance(module, nn.Linear):
                ran.linear.append((path, x, made.detach().clone()))
            elif x.shape == made.shape:
                ran.norms.append(Norm(x, made.detach().clone(), module))

        return noted

    if isinstance(body, nn.Module):
        for path, module in body.named_modules():
            inner = any(isinstance(child, nn.Linear) for child in module.modules())
            if module is not body and (isinstance(module, nn.Linear) or not inner):
                hooks.append(module.register_forward_hook(note(path)))
    try:
        with torch.no_grad(), _Watch(ran), dropped() as calm:
            ran.output = caller.call(*inputs).output.detach().double()
        ran.dropped += calm
    finally:
        for hook in hooks:
            hook.remove()
    modules = [norm for norm in ran.norms if norm.module is not None]
    ran.norms = [
        norm
        for norm in ran.norms
        if norm.module is not None or not any(same(norm.given, other.given) for other in modules)
    ]
    ran.norms = [norm for norm in ran.norms if norm.groups or _measured(norm)]
    return ran


def _of_groups(module: nn.GroupNorm, x: Tensor, y: Tensor) -> Norm:
    """A norm of groups of channels, whose input has its channels first; seen as [B, T, E]."""
    x, y = x.flatten(2).transpose(1, 2), y.flatten(2).transpose(1, 2)
    gain, bias = (None if x is None else x.detach().double() for x in (module.weight, module.bias))
    return Norm(x, y, module, eps=module.eps, groups=module.num_groups, gain=gain, bias=bias)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, batch first or length first."""
    if a.ndim == 3 == b.ndim and a.shape[0] != b.shape[0]:
        a = a.transpose(0, 1)
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


def _measured(norm: Norm) -> bool:
    """Whether it is a norm of the last axis; its eps, gains and biases are found from what it did."""
    x, y = norm.given.double(), norm.made.double()
    n = x.shape[-1]
    if n < 2 or x.numel() // n < 4 or same(x, y):
        return False
    attributes = vars(norm.module).values() if norm.module is not None else ()
    own_eps = [v for v in attributes if isinstance(v, float) and 0 < v < 1e-2]
    eps = dict.fromkeys([*own_eps, 1e-5, 1e-6, 1e-8, 1e-12, 2**-52, 2**-23])
    best = NEARLY
    for rms in (0.0, 1.0):
        for each in eps:
            plain = layer_norm(x, (n,), eps=each)
            if rms:
                plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + each)
            z, w = plain.reshape(-1, n), y.reshape(-1, n)
            mean, other = (z.mean(0), w.mean(0)) if not rms else (torch.zeros(n), torch.zeros(n))
            gain = ((z - mean) * (w - other)).sum(0) / (z - mean).square().sum(0).clamp_min(1e-30)
            bias = other - gain * mean
            off = float((gain * z + bias - w).abs().max() / w.abs().max().clamp_min(1e-30))
            if off < 0.5 * best:
                best, norm.rms, norm.eps, norm.gain = off, rms, each, gain
                norm.bias = None if rms else bias
    return best < NEARLY


@contextlib.contextmanager
def passed_by(norms: Sequence[Norm]) -> Iterator[None]:
    """As if these norms were not there."""
    hooks = [
        norm.module.register_forward_hook(lambda module, args, made: args[0])
        for norm in norms
        if norm.module is not None
    ]
    functional = [norm.given for norm in norms if norm.module is None]
    try:
        with _Without() if functional else contextlib.nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Without(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in NORMS and args:
            return args[0]
        return func(*args, **(kwargs or {}))


def caught(caller: Caller, inputs: Three) -> tuple[Ran, Tensor | None]:
    """What a call did, and its scores [B, H, T, S] if they are among that."""
    ran = watch(caller, inputs)
    B, T, S, H = len(inputs[0]), inputs[0].shape[1], inputs[1].shape[1], caller.subject.sizes.H
    candidates = [
        scores.double()
        for scores in ran.scores
        if tuple(scores.shape[-2:]) == (T, S) or scores.shape[-1] == S
    ]
    for scores in reversed(candidates):
        if tuple(scores.shape) == (B, H, T, S):
            return ran, scores
        if tuple(scores.shape) == (B, T, H, S):
            return ran, scores.transpose(1, 2)
        if tuple(scores.shape) == (B * H, T, S):
            return ran, scores.unflatten(0, (B, H))
        if tuple(scores.shape) == (H, B, T, S):
            return ran, scores.transpose(0, 1)
        if scores.ndim == 5 and scores.shape[0] == B and scores.numel() == B * H * T * S:  # groups of heads
            return ran, scores.reshape(B, H, T, S)
    if len(candidates) == H and all(tuple(scores.shape) == (B, T, S) for scores in candidates):
        return ran, torch.stack(candidates, 1)
    if len(candidates) == B and all(scores.numel() == H * T * S for scores in candidates):
        return ran, torch.stack([scores.reshape(H, T, S) for scores in candidates])
    return ran, None


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
    first = [layer for layer in ran.linear if any(same(layer[1], x) for x in inputs)]
    chains = []
    for up, up_input, _ in ran.linear:
        for down, _, made in first:
            n, norm = up_input.shape[-1], None
            if up == down or up_input.ndim != made.ndim or n > made.shape[-1]:
                continue
            for candidate in ran.norms:
                if same(candidate.made, up_input):
                    norm = candidate
            fed = up_input if norm is None else norm.given
            if any(same(fed, made[..., i : i + n]) for i in {0, made.shape[-1] - n}):
                chains.append(_Chain(up, down, norm, n == made.shape[-1]))
                break
    return chains


def _gradients(caller: Caller, paths: set[str], inputs: Three) -> dict[str, Tensor]:
    """Of the last position's output, by what each layer made; [B, T, rows]."""
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
    """Which of q, k and v each row of each layer makes."""
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


def find_latent(caller: Caller, ran: Ran, inputs: Three) -> tuple[Found, Design] | str | None:
    """The projections behind the narrow matrices, and these; a sentence where it cannot be judged."""
    body = caller.subject.body
    if not isinstance(body, nn.Module) or caller.plan.layout != "batch first":
        return None
    chains = _chains(ran, inputs)
    if not chains:
        return None
    if any(not chain.whole for chain in chains):
        return DECOUPLED
    downs, ups = {chain.down for chain in chains}, {chain.up: chain for chain in chains}
    order = list(dict.fromkeys(path for path, _, _ in ran.linear))
    last = order[-1]
    open_paths = [path for path in order if path not in downs and path != last]
    try:
        letters = _letters(caller, set(open_paths))
    except CAUGHT:
        return None
    modules: dict[str, Any] = dict(body.named_modules())
    letters_found = {letter for every in letters.values() for letter in every}
    if not set("qkv") <= letters_found:  # positions or heads are mixed up: names are left
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
                _keep(design, ups[path], slot, modules)
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
        f"{names} through {widths} channels inside (latent attention{f', {norm} between' if norm else ''})"
    )
    first = {name: pieces[0] for name, pieces in guess.weights.items()}
    roles = {name: Role(piece.name + piece.where, "calls", path=piece.name) for name, piece in first.items()}
    return Found(made[0], roles, H, False, list(made[1]), guess=guess), design


def _say(design: Design, norm: str) -> None:
    down = {slot: design.tensors.get(f"{slot} down") for slot in SLOTS.values()}
    plural = {"query": "queries", "key": "keys", "value": "values"}
    names = " and ".join(plural[slot] for slot, matrix in down.items() if matrix is not None)
    widths = " and ".join(dict.fromkeys(str(len(matrix)) for matrix in down.values() if matrix is not None))
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
