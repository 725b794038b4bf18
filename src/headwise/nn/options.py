"""Options of a layer besides projections and heads: norms, positions, biases by distance, gates.

    q, k = norm(q), norm(k)                         qk_norm          QKNorm
    q, k = turned by their positions                rope             rotary.py
    s_ij + b_h[bucket(j - p_i)] - slope_h |j - p_i| relative_bias    RelativeBias; alibi
    sigmoid(x W_g) * head                           gate             "head" or "channel"

A gate lets a head output nothing without a sink to attend to: "channel", one number per channel of each
head, as in Qwen3-Next; "head", one per head. Qiu 2025, "Gated Attention for Large Language Models".

The functions below are how `MultiHeadAttention` uses its options; the protocols at the end are what it asks
of `headwise.parallel`.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..arguments import AttentionOptions, text_of
from ..errors import ArgumentError, ShapeError, nearest
from ..map import AttentionMap
from ..mask_rules import can_read, is_traced
from ..masks import Mask
from ..scoring import Alibi, Bias, Relative, alibi, joined
from .rotary import Rope, Settings

if TYPE_CHECKING:
    from .cache import KVCache
    from .cached_call import Memory
    from .multihead import MultiHeadAttention

GATES = ("head", "channel")
NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}

Positions = Tensor | tuple[Tensor, Tensor]


class Inputs(NamedTuple):
    """The arguments of a call of `MultiHeadAttention`; documented at its `forward`."""

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    mask: Mask | Tensor | None = None
    bias: Bias | None = None
    positions: Positions | None = None
    cache: KVCache | Memory | None = None
    lengths: Tensor | Sequence[int] | None = None
    documents: Tensor | None = None


@dataclass(frozen=True, repr=False)
class QKNorm(Settings):
    """Normalise queries and keys after their projections and before rotary positions.

        "rms":    q / sqrt(mean(q²) + eps) · g                  Qwen3, Gemma 3, OLMo 2; Henry 2020
        "layer":  (q - mean(q)) / sqrt(var(q) + eps) · g + b    ViT-22B; Dehghani 2023

    This bounds the scores, which keeps large models from diverging. Gemma stores g - 1: add 1 to its weights
    before loading them.

    Args:
        kind: "rms" or "layer".
        eps: added under the root.
        whole: normalise all heads together, H * D channels, as in OLMo 2; otherwise each head separately,
            with one g for all heads.

    Raises:
        ArgumentError: another kind; eps below 0.
    """

    kind: str = "rms"
    eps: float = 1e-6
    whole: bool = False

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise ArgumentError(
                f"qk_norm must be a known kind: got {self.kind!r}; {nearest(str(self.kind), NORMS)}"
            )
        if not 0 <= self.eps < math.inf:
            raise ArgumentError(f"eps must be 0 or more and finite: got {self.eps}; 1e-6 is usual")

    def make(
        self, heads: int, head_dim: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Module:
        """Return the norm module for queries or keys with this number of heads."""
        width = heads * head_dim if self.whole else head_dim
        return NORMS[self.kind](width, eps=self.eps, device=device, dtype=dtype)


@dataclass(frozen=True, repr=False)
class Buckets(Settings):
    """T5's buckets of distances: small distances have a bucket each, larger ones share buckets.

        n of the buckets are for one direction, e = n / 2 of them for one distance each:
        bucket(d) = d                                                                  d < e
                    min(n - 1, e + floor((n - e) log(d / e) / log(max_distance / e)))  d >= e

    Args:
        count: buckets in all.
        max_distance: all distances of at least this are in the last bucket.
        both_ways: whether half of the buckets are for keys after the query, as in T5's encoder. Otherwise all
            these keys are in the first bucket, as in T5's decoder.

    Raises:
        ArgumentError: too few buckets; an odd number with both_ways; a max_distance that is not above the
            distances with a bucket of their own.

    Raffel 2020, section 2.1; T5, mT5, FLAN-T5, UL2.
    """

    count: int = 32
    max_distance: int = 128
    both_ways: bool = True

    def __post_init__(self) -> None:
        least = 4 if self.both_ways else 2
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < least:
            raise ArgumentError(
                f"count must be a whole number of at least {least}: got {self.count!r}; T5 has 32 buckets"
            )
        if self.both_ways and self.count % 2:
            raise ArgumentError(
                f"count must be even if both_ways=True: got {self.count}; half of the buckets are for keys "
                "after the query"
            )
        exact = self.count // least
        far = self.max_distance
        if isinstance(far, bool) or not isinstance(far, int) or far <= exact:
            raise ArgumentError(
                f"max_distance must be a whole number above {exact}: got {far!r}; shorter distances have a "
                "bucket each, and T5 uses 128"
            )

    def of(self, offsets: Tensor) -> Tensor:
        """Return the bucket of each offset j - p, int64."""
        count, first = self.count, torch.zeros_like(offsets)
        if self.both_ways:
            count //= 2
            first = (offsets > 0).long() * count
            far = offsets.abs()
        else:
            far = (-offsets).clamp(min=0)
        exact = count // 2
        # in float32 as in training: another precision changes the bucket of some distances
        share = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        large = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(far < exact, far, large)

    def by_offset(self, device: torch.device) -> Tensor:
        """Return the buckets of offsets -max_distance to max_distance, int64; farther ones have the last."""

        def make() -> Tensor:
            reach = self.max_distance
            return self.of(torch.arange(-reach, reach + 1, device="cpu")).to(device)

        return self.keep(device, make)


class RelativeBias(nn.Module):
    """A learned number per head and bucket of distance, added to the scores: s_ij + b_h[bucket(j - p_i)].

    All of T5's layers share the first layer's bias: pass the same module to each of them.

    Args:
        num_heads: H.
        buckets: which distances share a number; by default those of T5.

    Raffel 2020, section 2.1 (T5).
    """

    def __init__(
        self,
        num_heads: int,
        buckets: Buckets | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.buckets = num_heads, buckets or Buckets()
        self.weight = nn.Parameter(torch.empty(self.buckets.count, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all biases to 0: no distance is preferred."""
        nn.init.zeros_(self.weight)

    def forward(self) -> Relative:
        """Return a bias for `bias=`, for any lengths; keys beyond max_distance are in the last bucket."""
        return Relative(self.weight[self.buckets.by_offset(self.weight.device)].t())

    def extra_repr(self) -> str:
        """Return the numbers of heads and buckets."""
        return f"{self.num_heads} heads, {self.buckets}"


@dataclass(frozen=True, repr=False)
class Slopes(Settings):
    """ALiBi's slopes, one per head: those of a pruned layer's heads stay as they were. Press 2022."""

    numbers: tuple[float, ...]

    def bias(self, device: torch.device) -> Alibi:
        """Return the slopes for `bias=`."""
        return self.keep(device, lambda: Alibi(torch.tensor(self.numbers, device=device)))


# How a module uses them


def add(
    module: MultiHeadAttention,
    rope: Rope | None,
    has_alibi: bool,
    relative_bias: Buckets | None,
    qk_norm: QKNorm | str | None,
    gate: str | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Check the options of a new module, and make its norms, biases and gate.

    Raises:
        ArgumentError: an unknown option.
        ShapeError: sizes that do not fit the heads.
    """
    H, Hk, D = module.num_heads, module.num_kv_heads, module.head_dim
    if rope is not None:
        if not isinstance(rope, Rope):
            raise ArgumentError(
                f"rope must be a headwise.nn.Rope: got {text_of(rope)}; use rope=Rope(base=1e4)"
            )
        rope.frequencies(D)
    if not isinstance(has_alibi, bool):
        raise ArgumentError(
            f"alibi must be True or False: got {text_of(has_alibi)}; pass slopes of your own "
            "as bias= in each call"
        )
    module.rope, module.alibi = rope, has_alibi
    module._slopes = Slopes(tuple(alibi(H, "cpu").slopes.tolist())) if has_alibi else None
    if not isinstance(relative_bias, Buckets | None):
        raise ArgumentError(
            f"relative_bias must be Buckets or a RelativeBias: got {text_of(relative_bias)}; use "
            "Buckets() for T5's"
        )
    relative = None if relative_bias is None else RelativeBias(H, relative_bias, device, dtype)
    module.relative_bias = relative
    norm = QKNorm(qk_norm) if isinstance(qk_norm, str) else qk_norm
    if not isinstance(norm, QKNorm | None):
        raise ArgumentError(f"qk_norm must be 'rms', 'layer' or a QKNorm: got {text_of(norm)}; try 'rms'")
    module.qk_norm = norm
    module.q_norm = None if norm is None else norm.make(H, D, device, dtype)
    module.k_norm = None if norm is None else norm.make(Hk, D, device, dtype)
    if gate is not None and gate not in GATES:
        raise ArgumentError(f"gate must be a known kind: got {gate!r}; {nearest(str(gate), GATES)}")
    module.gate = gate
    width = {None: 0, "head": H, "channel": H * module.value_dim}[gate]
    linear = undrawn(module.d_model, width, False, device, dtype) if width else None
    module.gate_proj = linear


def undrawn(
    width_in: int, width_out: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Linear:
    """Return an `nn.Linear` with uninitialised weights, so that they can be drawn in the order torch does."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = width_in, width_out
    layer.weight = nn.Parameter(torch.empty(width_out, width_in, device=device, dtype=dtype))
    empty = torch.empty(width_out, device=device, dtype=dtype) if bias else None
    layer.register_parameter("bias", None if empty is None else nn.Parameter(empty))
    return layer


def share(module: MultiHeadAttention, relative_bias: RelativeBias) -> None:
    """Give a module a bias that other layers have, too.

    Raises:
        ShapeError: it has another number of heads.
    """
    if relative_bias.num_heads != module.num_heads:
        raise ShapeError(
            f"relative_bias must have the layer's num_heads: {relative_bias.num_heads}, not "
            f"{module.num_heads}; share it between layers with as many heads"
        )
    module.relative_bias = relative_bias


def normalised(module: MultiHeadAttention, norm: nn.Module | None, x: Tensor) -> Tensor:
    """Apply one of the module's norms to x [B, T, heads * D]; its dtype stays."""
    if norm is None or module.qk_norm is None:
        return x
    grouped = x if module.qk_norm.whole else x.unflatten(-1, (-1, module.head_dim))
    weight = norm.weight  # under autocast of another dtype than x
    normed: Tensor = norm(grouped.to(weight.dtype) if isinstance(weight, Tensor) else grouped)
    return normed.to(x.dtype)


def rotated(
    rope: Rope, q: Tensor, k: Tensor, positions: Positions | None, before: int, itself: bool
) -> tuple[Tensor, Tensor]:
    """Rotate q [B, H, T, D] and k [B, Hk, S, D] by their positions; the last query is beside the last key.

    Args:
        positions: of the tokens; in cross-attention a pair, the queries' and the keys'.
        before: how many tokens came before these keys.
        itself: whether queries and keys are of the same tokens.

    Raises:
        ArgumentError, ShapeError: wrong positions.
    """
    T, S = q.shape[2], k.shape[2]
    if positions is None:
        turns = rope.factors(k, before)
        if itself:
            ours = turns
        elif not is_traced() and S >= T:
            ours = rope.factors(q, before + S - T)
        else:  # of any lengths: the first queries may come before the first key, below 0
            ours = rope.factors(q, torch.arange(before + S - T, before + S, device=q.device))
        return rope.turn(q, ours), rope.turn(k, turns)
    check_pair_or_positions(positions, q, k, itself)
    if isinstance(positions, tuple):
        of_queries, of_keys = positions
        return rope.rotate(q, of_queries.to(q.device)), rope.rotate(k, of_keys.to(q.device))
    turns = rope.factors(q, positions.to(q.device))
    return rope.turn(q, turns), rope.turn(k, turns)


def check_pair_or_positions(positions: object, q: Tensor, k: Tensor, itself: bool) -> None:
    """Raise unless these are positions of q [B, H, T, D], or, as a pair, of q and k."""
    if isinstance(positions, tuple) and len(positions) == 2:
        check_positions(positions[0], q, "positions[0]")
        check_positions(positions[1], k, "positions[1]")
        return
    if not itself:
        raise ArgumentError(
            f"positions must be a pair in cross-attention: got {text_of(positions)}; use "
            "positions=(query_positions, key_positions)"
        )
    check_positions(positions, q, "positions")


def check_positions(positions: object, x: Tensor, name: str) -> None:
    """Raise unless these are positions of x [B, H, T, D]."""
    B, T = x.shape[0], x.shape[2]
    is_integer = (
        isinstance(positions, Tensor) and not positions.is_floating_point() and not positions.is_complex()
    )
    if not isinstance(positions, Tensor) or not is_integer or positions.dtype == torch.bool:
        raise ArgumentError(
            f"{name} must be a tensor of whole numbers: got {text_of(positions)}; use torch.arange({T})"
        )
    # one by one: in a graph for any length a comparison of tuples is False
    fits = positions.ndim in (1, 2) and positions.shape[-1] == T
    if not fits or (positions.ndim == 2 and positions.shape[0] != B and positions.shape[0] != 1):
        raise ShapeError(
            f"{name} must be [T] or [B, T] = {[B, T]}: got {list(positions.shape)}; give one per token"
        )
    if can_read(positions) and bool((positions < 0).any()):
        raise ArgumentError(
            f"{name} must not be negative: got {int(positions.min())}; give padding any position, such as 0"
        )


def added(module: MultiHeadAttention, device: torch.device, bias: Bias | None) -> Bias | None:
    """Return what is added to the scores: the call's bias and the layer's own."""
    if module._slopes is not None:
        bias = joined(bias, module._slopes.bias(device))
    if module.relative_bias is not None:
        bias = joined(bias, module.relative_bias())
    return bias


def attention_options(
    module: MultiHeadAttention, mask: Mask | Tensor | None, bias: Bias | None, device: torch.device
) -> AttentionOptions:
    """Return the options of `attention` in a call of the module: its own, and the call's mask and bias."""
    return AttentionOptions(
        mask, module.causal, module.window, module.scale, module.softcap, added(module, device, bias),
        module.sinks,
    )  # fmt: skip


def gated(module: MultiHeadAttention, heads: Tensor, query: Tensor) -> Tensor:
    """Multiply the outputs of heads [B, H, T, Dv] by their gates."""
    if module.gate_proj is None:
        return heads
    share = module.gate_proj(query).sigmoid().unflatten(-1, (module.num_heads, -1))  # [B, T, H, 1 or Dv]
    return heads * share.transpose(1, 2)


# The first weights


@torch.no_grad()
def draw_weights(module: MultiHeadAttention) -> None:
    """Draw new weights: those that `torch.nn.MultiheadAttention` of the same sizes draws from the same seed.

    The order is torch's: out_proj as every `nn.Linear`, then q, k and v uniformly in the bounds of Glorot
    2010, taken as one matrix where they have the same input and sizes and one by one where not; biases are 0.
    Sinks start at 0: one more key with an average score. A gate is drawn as every `nn.Linear`; norms start at
    1, a bias by distance at 0.
    """
    sizes, out = module.sizes, module.out_proj
    out.reset_parameters()
    three = (module.q_proj, module.k_proj, module.v_proj)
    packed = module._packed
    if sizes.are_torchs and sizes.kdim == sizes.vdim == sizes.d_model:
        drawn: list[Tensor] = [layer.weight for layer in three]
        if packed is not None and packed.holds(three):
            drawn = [packed.weight]  # in one call: on a GPU three calls would draw other numbers
        for weight in drawn:
            _glorot(weight, sizes.d_model, 3 * sizes.d_model)
    else:
        for layer in three:
            _glorot(layer.weight, layer.in_features, layer.out_features)
    for layer in (*three, out):
        if layer.bias is not None:
            layer.bias.zero_()
    if module.sinks is not None:
        module.sinks.zero_()
    for more in (module.gate_proj, module.q_norm, module.k_norm, module.relative_bias):
        draw = getattr(more, "reset_parameters", None)
        if callable(draw):  # of modules that replaced them
            draw()


def _glorot(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(3.0) * math.sqrt(2.0 / (fan_in + fan_out))  # sqrt(6 / ..) rounds otherwise than torch
    nn.init.uniform_(weight, -bound, bound)


def in_use(module: MultiHeadAttention) -> dict[str, str]:
    """Return the options that a module has and torch's class has not, by name, each as the repr shows it."""
    shown = {
        name: f"{name}={getattr(module, name)!r}" for name in ("rope", "qk_norm", "gate")
        if getattr(module, name) is not None
    }  # fmt: skip
    if module.alibi:
        shown["alibi"] = "alibi"
    if module.relative_bias is not None:
        shown["relative_bias"] = "relative_bias"
    return shown


# The interface of a module's sharding over several ranks; `headwise.parallel` implements it


class HeadsOfRank(Protocol):
    """The heads of a layer that are on this rank (`parallel.local_heads.LocalHeads`); str() names them."""

    def agree(self, x: Tensor) -> Tensor:
        """Return the first rank's x, on every rank."""
        ...


class Attended(NamedTuple):
    """The result of a call on this rank."""

    heads: Tensor  # [B, H, T, Dv], before their gates
    weights: AttentionMap  # of the full sequence
    values: Tensor  # [B, Hk, S, Dv]
    query: Tensor  # [B, T, E], with 0 at padding
    real: Tensor | None  # bool [B, T], which tokens are no padding; None: all


class Sharding(Protocol):
    """How a sequence is sharded over ranks."""

    def attend(self, module: MultiHeadAttention, inputs: Inputs) -> Attended:
        """Compute a call of a module for this rank's tokens."""
        ...

    def positions(self, ids: Tensor) -> tuple[Tensor, int]:
        """Return the positions of this rank's tokens ids [B, T], int [T], and the length of the sequence."""
        ...
