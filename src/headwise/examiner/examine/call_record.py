"""Records of one call: its norms and linear layers, and the scores that go into the softmax.

Eps, gains and biases of norms are fitted to their input and output, so that any implementation is recognised.

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

from .caller import QKV, Caller
from .projections import NEARLY
from .subject import recorded_dropout

NORMS = frozenset({"layer_norm", "rms_norm"})
PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ bmm baddbmm einsum scaled_dot_product_attention".split())


@dataclass(eq=False)
class Norm:
    """A norm, with its input and output in one call."""

    input: Tensor
    output: Tensor
    module: nn.Module | None  # None: a call of torch.nn.functional
    rms: float = 0.0
    eps: float = 0.0
    groups: int = 0  # of channels, normalised along all positions; 0: each token is normalised by itself
    gain: Tensor | None = None
    bias: Tensor | None = None

    @property
    def word(self) -> str:
        return "GroupNorm" if self.groups else "RMSNorm" if self.rms else "LayerNorm"

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """Return its numbers, as a `Design` has them."""
        made = {f"{prefix}rms": self.rms, f"{prefix}eps": self.eps}
        return made | {f"{prefix}groups": float(self.groups)} if self.groups else made

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return its tensors, as a `Design` has them."""
        tensors = {f"{prefix}gain": self.gain, f"{prefix}bias": self.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(eq=False)
class CallRecord:
    """The operations of one call that designs are recognised by."""

    output: Tensor
    norms: list[Norm] = field(default_factory=list)
    linear: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # (path, input, output)
    scores: list[Tensor] = field(default_factory=list)  # inputs of softmax and exp
    dropped: list[Tensor] = field(default_factory=list)  # inputs of dropout
    factors: list[Tensor] = field(default_factory=list)  # factors of products of two tensors


class _Watch(TorchFunctionMode):
    def __init__(self, record: CallRecord) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in {"softmax", "log_softmax", "exp", "exp_", "exp2"} and args:
            self.record.scores.append(args[0].detach().clone())
        elif name == "scaled_dot_product_attention":
            self.record.scores.append(_scores(*args, **kwargs))
        if name == "dropout" and args:
            self.record.dropped.append(args[0].detach().clone())
        if name in PRODUCTS:
            self.record.factors += [x.detach().clone() for x in args if isinstance(x, Tensor) and x.ndim > 2]
        made = func(*args, **kwargs)
        if name in NORMS and args and isinstance(made, Tensor):
            self.record.norms.append(Norm(args[0].detach().clone(), made.detach().clone(), None))
        return made


def _scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return the scores of `scaled_dot_product_attention`."""
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


def record_call(caller: Caller, inputs: QKV) -> CallRecord:
    """Call the code once, and record its norms, linear layers and softmax."""
    record = CallRecord(torch.empty(0))
    body = caller.subject.body
    hooks = []

    def note(path: str) -> Any:
        def noted(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
            if len(args) == 0 or not torch.is_tensor(args[0]) or not torch.is_tensor(made):
                return
            x = args[0].detach().clone()
            if isinstance(module, nn.GroupNorm) and x.ndim > 2:
                record.norms.append(_of_groups(module, x, made.detach().clone()))
            elif isinstance(module, nn.Linear):
                record.linear.append((path, x, made.detach().clone()))
            elif x.shape == made.shape:
                record.norms.append(Norm(x, made.detach().clone(), module))

        return noted

    if isinstance(body, nn.Module):
        for path, module in body.named_modules():
            inner = any(isinstance(child, nn.Linear) for child in module.modules())
            if module is not body and (isinstance(module, nn.Linear) or not inner):
                hooks.append(module.register_forward_hook(note(path)))
    try:
        with torch.no_grad(), _Watch(record), recorded_dropout() as undropped:
            record.output = caller.call(*inputs).output.detach().double()
        record.dropped += undropped
    finally:
        for hook in hooks:
            hook.remove()
    modules = [norm for norm in record.norms if norm.module is not None]
    record.norms = [
        norm
        for norm in record.norms
        if norm.module is not None or not any(equal_tensors(norm.input, other.input) for other in modules)
    ]
    record.norms = [norm for norm in record.norms if norm.groups or _fit_norm(norm)]
    return record


def _of_groups(module: nn.GroupNorm, x: Tensor, y: Tensor) -> Norm:
    """Return the record of a GroupNorm, with its input [B, E, T] as [B, T, E]."""
    x, y = x.flatten(2).transpose(1, 2), y.flatten(2).transpose(1, 2)
    gain, bias = (None if x is None else x.detach().double() for x in (module.weight, module.bias))
    return Norm(x, y, module, eps=module.eps, groups=module.num_groups, gain=gain, bias=bias)


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have equal values, each batch first or length first."""
    if a.ndim == 3 == b.ndim and a.shape[0] != b.shape[0]:
        a = a.transpose(0, 1)
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


def _fit_norm(norm: Norm) -> bool:
    """Fit eps, gain and bias of a norm over the last axis; return False if it is no such norm."""
    x, y = norm.input.double(), norm.output.double()
    n = x.shape[-1]
    if n < 2 or x.numel() // n < 4 or equal_tensors(x, y):
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
def bypassed_norms(norms: Sequence[Norm]) -> Iterator[None]:
    """Replace these norms by the identity."""
    hooks = [
        norm.module.register_forward_hook(lambda module, args, made: args[0])
        for norm in norms
        if norm.module is not None
    ]
    functional = [norm.input for norm in norms if norm.module is None]
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


def record_scores(caller: Caller, inputs: QKV) -> tuple[CallRecord, Tensor | None]:
    """Return the record of a call, and its scores [B, H, T, S], or None if they were not found."""
    record = record_call(caller, inputs)
    B, T, S, H = len(inputs[0]), inputs[0].shape[1], inputs[1].shape[1], caller.subject.sizes.H
    candidates = [
        scores.double()
        for scores in record.scores
        if tuple(scores.shape[-2:]) == (T, S) or scores.shape[-1] == S
    ]
    for scores in reversed(candidates):
        if tuple(scores.shape) == (B, H, T, S):
            return record, scores
        if tuple(scores.shape) == (B, T, H, S):
            return record, scores.transpose(1, 2)
        if tuple(scores.shape) == (B * H, T, S):
            return record, scores.unflatten(0, (B, H))
        if tuple(scores.shape) == (H, B, T, S):
            return record, scores.transpose(0, 1)
        if scores.ndim == 5 and scores.shape[0] == B and scores.numel() == B * H * T * S:  # groups of heads
            return record, scores.reshape(B, H, T, S)
    if len(candidates) == H and all(tuple(scores.shape) == (B, T, S) for scores in candidates):
        return record, torch.stack(candidates, 1)
    if len(candidates) == B and all(scores.numel() == H * T * S for scores in candidates):
        return record, torch.stack([scores.reshape(H, T, S) for scores in candidates])
    return record, None
