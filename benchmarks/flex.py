"""Mask rules for headwise, for compiled FlexAttention and for SDPA.

A rule is made for tensors of some size: the options of `hw.attention`, and the same as the two functions that
FlexAttention takes, one for who sees whom and one for the score. `peers` makes the calls that stand beside
ours. Parameters go in by closure. Where there is no GPU the peer is the rule in plain torch.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim; i and j count queries and keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw
from headwise import reference

CAP = 20.0
WINDOW, REACH = 1024, 512
DOCUMENTS = 8
SHARE = 0.3  # of a dense mask
REAL = 0.7  # of the keys of a padding with holes
FLEX, APPROXIMATE, BY_EXP2 = "FlexAttention", "FlexAttention, tanh.approx", "FlexAttention, tanh by exp2"
DENSE, PLAIN = "SDPA, attn_mask", "plain torch"

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Mod = Callable[..., Tensor]
Options = Mapping[str, Any]  # of hw.attention


@dataclass(frozen=True)
class SizedRule:
    """A mask rule for tensors of one size.

    options: what `hw.attention` is told.
    visible: FlexAttention's mask_mod; None: everything.
    scores: FlexAttention's score_mod, by the peer's name; several are alternatives, the first that runs.
    added: what SDPA takes as attn_mask, where it has such a peer.
    changing: the tensor that is another for every batch; None where a mask outlives batches.
    again: the options made of such a tensor.
    """

    options: Options
    visible: Mod | None = None
    scores: tuple[dict[str, Mod | None], ...] = ({FLEX: None},)
    added: Tensor | None = None
    changing: Tensor | None = None
    again: Callable[[Tensor], Options] = lambda changed: {}
    by_sequence: bool = False
    is_plain: bool = False


@dataclass(frozen=True)
class Peer:
    """A call to compare with ours, and the context it runs in."""

    name: str
    call: Call
    context: Callable[[], AbstractContextManager[Any]] | None = None


# The rules


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return FlexAttention's causal mask."""
    return i >= j


def softcap(q: Tensor) -> SizedRule:
    """Return softcapping; the peers are FlexAttention with torch's tanh and with an approximate one."""

    def bent(tanh: Callable[[Tensor], Tensor]) -> Mod:
        return lambda s, b, h, i, j: tanh(s / CAP) * CAP

    rough: dict[str, Mod | None] = {BY_EXP2: bent(tanh_by_exp2)}
    if q.is_cuda:
        rough = {APPROXIMATE: bent(tanh_of_the_gpu()), **rough}
    return SizedRule({"causal": q.shape[2] > 1, "softcap": CAP}, causal, ({FLEX: bent(torch.tanh)}, rough))


def tanh_by_exp2(x: Tensor) -> Tensor:
    """Return tanh, by one exp2 and one division."""
    return 1 - 2 / (1 + torch.exp2(x * 2.8853900817779268))  # 2 log2(e)


@cache
def tanh_of_the_gpu() -> Callable[[Tensor], Tensor]:
    """Return the GPU's tanh as an operator that inductor compiles to one instruction."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    tanh = torch.library.custom_op(
        "headwise_benchmarks::rough_tanh", torch.tanh, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    tanh.register_fake(torch.empty_like)
    tanh.register_vmap(lambda info, dims, x: (tanh(x), dims[0]))
    tanh.register_autograd(
        lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].square()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    lowering = partial(ops.inline_asm_elementwise, asm="tanh.approx.f32 $0, $1;", constraints="=f,f")
    register_lowering(torch.ops.headwise_benchmarks.rough_tanh)(make_pointwise(lowering))
    return torch.ops.headwise_benchmarks.rough_tanh


def alibi(q: Tensor) -> SizedRule:
    """Return ALiBi, with one slope per head."""
    bias = hw.scoring.alibi(q.shape[1], q.device)
    slopes = bias.slopes
    return SizedRule(
        {"causal": True, "bias": bias},
        causal,
        ({FLEX: lambda s, b, h, i, j: s - slopes[h] * (i - j)},),
    )


def documents(q: Tensor) -> SizedRule:
    """Return a mask of eight documents of different lengths in one sequence."""
    L = q.shape[2]
    cuts = torch.randperm(L - 1, device=q.device)[: DOCUMENTS - 1] + 1
    ids = torch.zeros(L, dtype=torch.int32, device=q.device).index_fill_(0, cuts, 1).cumsum(0).int()

    return _changing(ids, hw.Mask.documents, lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), False)


def padding(q: Tensor) -> SizedRule:
    """Return padding by lengths."""
    B, _, L, _ = q.shape
    lengths = torch.tensor([L - b * L // B for b in range(B)], device=q.device)

    return _changing(lengths, hw.Mask.padding, lambda b, h, i, j: (i >= j) & (j < lengths[b]), True)


def holes(q: Tensor) -> SizedRule:
    """Return padding with scattered real keys."""
    B, _, L, _ = q.shape
    real = torch.rand(B, L, device=q.device) < REAL
    real[:, 0] = True  # so that every query sees a key

    return _changing(real, hw.Mask.padding, lambda b, h, i, j: (i >= j) & real[b, j], True)


def _changing(
    tensor: Tensor, make: Callable[[Tensor], hw.Mask], visible: Mod, by_sequence: bool
) -> SizedRule:
    def options(changed: Tensor) -> Options:
        return {"causal": True, "mask": make(changed)}

    return SizedRule(options(tensor), visible, changing=tensor, again=options, by_sequence=by_sequence)


def dense(q: Tensor) -> SizedRule:
    """Return a random bool mask, one for all heads."""
    L = q.shape[2]
    allowed = torch.rand(L, L, device=q.device) < SHARE
    allowed.fill_diagonal_(True)
    return _of_tensor(allowed)


def unhinted(q: Tensor) -> SizedRule:
    """Return a causal mask as a bool tensor, without is_causal."""
    L = q.shape[2]
    return _of_tensor(torch.ones(L, L, dtype=torch.bool, device=q.device).tril_())


def _of_tensor(allowed: Tensor) -> SizedRule:
    whole = allowed[None, None]
    return SizedRule(
        {"mask": whole},
        lambda b, h, i, j: allowed[i, j],
        added=whole,
        changing=whole,
        again=lambda changed: {"mask": changed},
    )


def bias(q: Tensor, gradient: bool = False) -> SizedRule:
    """Return a bias for every head, query and key."""
    B, H, L, _ = q.shape
    values = torch.randn(1, H, L, L, device=q.device, dtype=q.dtype).requires_grad_(gradient)
    return SizedRule(
        {"bias": values}, None, ({FLEX: lambda s, b, h, i, j: s + values[0, h, i, j]},), added=values
    )


def sinks(q: Tensor) -> SizedRule:
    """Return learned sinks: one more column of the softmax, without a value."""
    values = torch.randn(q.shape[1], device=q.device)
    return SizedRule({"causal": True, "sinks": values}, causal)


def window(q: Tensor) -> SizedRule:
    """Return a causal window."""
    return SizedRule({"window": WINDOW}, lambda b, h, i, j: (i >= j) & (i - j < WINDOW))


def band(q: Tensor) -> SizedRule:
    """Return a window on both sides of the query."""
    return SizedRule({"window": (REACH, REACH)}, lambda b, h, i, j: (i - j <= REACH) & (j - i <= REACH))


RULES: dict[str, Callable[[Tensor], SizedRule]] = {
    "softcap": softcap,
    "alibi": alibi,
    "documents": documents,
    "window": window,
    "sinks": sinks,
    "padding": padding,
    "dense": dense,
    "bias": bias,
    "unhinted": unhinted,
    "holes": holes,
    "band": band,
    "bias_gradient": partial(bias, gradient=True),
    "causal": lambda q: SizedRule({"causal": True}, is_plain=True),
    "full": lambda q: SizedRule({}, is_plain=True),
}


def sequences(rule: str) -> int:
    """Return the batch size: padding needs several sequences."""
    return 4 if rule in ("padding", "holes") else 1


def plain(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Return the call in plain torch: in float64 the truth, in its own dtype the scale of errors."""
    rest = {name: value for name, value in options.items() if name not in ("causal", "window", "statistics")}
    hidden, size = rest.pop("mask", None), options.get("window")
    mask = hw.Mask() if hidden is None else hw.Mask.dense(hidden) if isinstance(hidden, Tensor) else hidden
    if options.get("causal"):
        mask &= hw.Mask.causal()
    if size is not None:
        mask &= hw.Mask.window(size) if isinstance(size, int) else hw.Mask.window(left_right=size)
    return reference.attention(q, k, v, mask=mask, **rest)[0]


# The peers


@dataclass
class Flex:
    """FlexAttention compiled for one rule, with its block mask, which is compiled if batches change it."""

    rule: SizedRule
    score: Mod | None
    q: Tensor
    k: Tensor
    block: Any = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        attend: Any = flex_attention
        sinks: Any = self.rule.options.get("sinks")

        def with_sinks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            out, aux = attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
            return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(out.dtype)

        changes = self.rule.changing is not None
        self.run: Any = torch.compile(attend if sinks is None else with_sinks, dynamic=False)
        self.make = torch.compile(create_block_mask, dynamic=False) if changes else create_block_mask
        self.grouped = self.q.shape[1] != self.k.shape[1]
        for name in ("first", "second"):
            start = time.perf_counter()
            self.block = self.masked()
            if self.q.is_cuda:
                torch.cuda.synchronize()
            self.seconds[name] = time.perf_counter() - start

    def masked(self) -> Any:
        """Return the block mask; None if everything is visible, as for a single query."""
        (B, _, T, _), S = self.q.shape, self.k.shape[2]
        if self.rule.visible is None or T == 1:
            return None
        return self.make(
            self.rule.visible, B if self.rule.by_sequence else None, None, T, S, device=self.q.device
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.run(q, k, v, score_mod=self.score, block_mask=self.block, enable_gqa=self.grouped)

    def remade(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Create the block mask, then call."""
        self.block = self.masked()
        return self(q, k, v)


Builds = dict[str, Callable[[], Peer]]


def peers(rule: SizedRule, q: Tensor, k: Tensor) -> list[Builds]:
    """Return the peers by name, as functions that make them; of several in one dict, the first that runs."""
    if rule.is_plain:
        return [{kernel[0]: partial(Peer, *kernel)} for kernel in _fused(rule, q, k)]
    if not q.is_cuda:
        return [{PLAIN: lambda: Peer(PLAIN, lambda q, k, v: plain(q, k, v, rule.options))}]

    def flex(name: str, score: Mod | None) -> Peer:
        return Peer(name, Flex(rule, score, q, k))

    alternatives: list[Builds] = [
        {name: partial(flex, name, score) for name, score in variants.items()} for variants in rule.scores
    ]
    if rule.added is not None:
        alternatives.append({DENSE: lambda: Peer(DENSE, partial(sdpa, attn_mask=rule.added))})
    return alternatives


def _fused(rule: SizedRule, q: Tensor, k: Tensor) -> list[tuple[Any, ...]]:
    """Return (name, call, context) of SDPA's fastest kernels; torch chooses for one query and on a CPU."""
    call = partial(sdpa, is_causal=rule.options.get("causal", False), enable_gqa=q.shape[1] != k.shape[1])
    if not q.is_cuda or q.shape[2] == 1:
        return [("SDPA", call)]
    kinds = {"SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA, flash": SDPBackend.FLASH_ATTENTION}
    return [(name, call, partial(sdpa_kernel, kind)) for name, kind in kinds.items()]
