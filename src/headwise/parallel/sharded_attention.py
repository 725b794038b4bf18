"""Attention of which each rank has some heads, and a feed-forward of which each has some channels.

    x, the same on every rank ──> q, k, v of the heads here ──> they attend ──> their part of out_proj
                                                                                 └─ sum over ranks ──> output

A module becomes one of these in place: only its class changes, and what it holds of each head.

Letters: B batch, T query_len, S key_len, E d_model, H num_heads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ..arguments import REQUIRED
from ..errors import ArgumentError
from ..foreign_masks import from_torch
from ..map import AttentionMap
from ..masks import Mask
from ..models.layers import FeedForward
from ..nn import Memory, MultiHeadAttention
from ..nn.as_torch.torch_masks import content_of
from ..nn.local_heads import LocalHeads
from ..nn.module_call import Given
from ..nn.rank_exchange import entered, gathered, left
from ..scoring import Bias
from .sharded_layers import local_part

__all__ = ["ShardedAttention", "ShardedFeedForward", "ShardedTorchAttention"]

_here = threading.local()  # draws: the module whose call draws random numbers of this rank's own


class ShardedAttention(MultiHeadAttention):
    """`MultiHeadAttention` whose heads lie over ranks: `local_heads` says which are here.

    `num_heads` and `num_kv_heads` are those on this rank, and so are a returned map, `head_outputs` and what
    a cache holds. Masks and biases of a call are of all heads. Inputs are the same on every rank, plain
    tensors or DTensors; so is the output. `sinks` are those of the heads here.
    """

    local_heads: LocalHeads
    mesh: DeviceMesh
    layout: Placement | None  # of the output, as a DTensor; None: a plain tensor

    @property
    def sinks(self) -> Tensor | None:  # type: ignore[override]
        """Those of the heads that are here; the parameter is among `named_parameters`."""
        held = self._parameters.get("sinks")
        return None if held is None else local_part(held)

    def forward(
        self,
        query: Tensor = REQUIRED,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Bias | None = None,
        **more: Any,
    ) -> tuple[Tensor, AttentionMap | None]:
        """As `MultiHeadAttention.forward`, of this rank's heads: (the output of all, the map of these)."""
        query, key, value, mask, bias = self._received(query, key, value, mask, bias)
        with self._own_numbers(query):
            output, weights = super().forward(query, key, value, mask, bias=bias, **more)
        return self._handed_on(output), weights

    def head_outputs(
        self,
        query: Tensor = REQUIRED,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Bias | None = None,
        **more: Any,
    ) -> Tensor:
        """What each head on this rank says, [B, heads here, T, Dv]."""
        query, key, value, mask, bias = self._received(query, key, value, mask, bias)
        with self._own_numbers(query):
            return super().head_outputs(query, key, value, mask, bias=bias, **more)

    def remember(self, key: Tensor, value: Tensor | None = None, mask: Mask | Tensor | None = None) -> Memory:
        """As `MultiHeadAttention.remember`, of this rank's heads."""
        value = None if value is None or value is key else self._enter(value)
        key = self._enter(key)
        return super().remember(key, value, self.local_heads.mask(mask, len(key), 1))

    def reset_parameters(self) -> None:
        """Not here: each rank would draw numbers of its own.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"reset_parameters must be called before heads are sharded: {self.local_heads} are here; draw "
            "weights in one process, and load them with torch.distributed.checkpoint.state_dict"
        )

    def extra_repr(self) -> str:
        """The shapes on the way, and which heads are here."""
        return f"{self.local_heads}; {super().extra_repr()}"

    def _received(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | Tensor | None,
        bias: Bias | None,
    ) -> Given:
        given: dict[int, Any] = {}  # one tensor given twice stays one: attention to itself is known by that
        for x in (query, key, value):
            if isinstance(x, Tensor) and id(x) not in given:
                given[id(x)] = self._enter(x)
        query, key, value = given.get(id(query), query), given.get(id(key), key), given.get(id(value), value)
        if isinstance(query, Tensor) and query.ndim == 3:
            mask = self.local_heads.mask(mask, query.shape[0], query.shape[1])
        return query, key, value, mask, self.local_heads.bias(bias)

    def _enter(self, x: Tensor) -> Tensor:
        return entered(whole_and_plain(x), self.local_heads.group)

    def _handed_on(self, output: Tensor) -> Tensor:
        return laid_out(output, self.mesh, self.layout)

    def _attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, AttentionMap, Tensor]:
        with self._own_numbers(args[0] if args else kwargs["query"]):
            return super()._attend(*args, **kwargs)

    @contextmanager
    def _own_numbers(self, x: object) -> Iterator[None]:
        """Dropout of random numbers of this rank's own; afterwards all ranks draw on as if there were none.

        Ranks that draw alike would drop the same weights of different heads.
        """
        drops = self.training and self.dropout and isinstance(x, Tensor) and not torch.compiler.is_compiling()
        if not drops or getattr(_here, "draws", None) is self:  # inside a call they are its own already
            yield
            return
        assert isinstance(x, Tensor)
        seed = int(torch.randint(2**62, ())) + self.local_heads.first  # the same draw on every rank
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.default_generator.manual_seed(seed)
            if x.is_cuda:
                torch.cuda.default_generators[x.device.index].manual_seed(seed)
            before, _here.draws = getattr(_here, "draws", None), self
            try:
                yield
            finally:
                _here.draws = before


class ShardedFeedForward(FeedForward):
    """`FeedForward` of which each rank has some channels in between."""

    mesh: DeviceMesh
    layout: Placement | None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]"""
        output = super().forward(entered(whole_and_plain(x), self.mesh.get_group()))
        return laid_out(output, self.mesh, self.layout)


def whole_and_plain(x: Tensor) -> Tensor:
    """A DTensor as what every rank has of it once it is whole; others as they are."""
    if not isinstance(x, DTensor):
        return x
    plain: Tensor = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
    return plain


def laid_out(output: Tensor, mesh: DeviceMesh, layout: Placement | None) -> Tensor:
    """What is the same on every rank, as a DTensor if it is asked for."""
    if layout is None:
        return output
    placed: Tensor = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
    return placed.redistribute(placements=[layout])  # type: ignore[attr-defined]


# torch's class


class ShardedTorchAttention(nn.Module):
    """`torch.nn.MultiheadAttention`, its arguments, its masks (True = may *not* attend), heads over ranks.

    What it was made of is in `attention`. Weights it gives are of all heads, before dropout; a query that may
    see nothing attends to nothing.
    """

    attention: ShardedAttention
    batch_first: bool
    # What torch's encoder asks of its attention before it takes a native path, which this has not.
    in_proj_weight = in_proj_bias = None
    _qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch: (output, weights or None)."""
        if is_causal and attn_mask is None:
            raise ArgumentError(
                "is_causal must come with attn_mask, of which it is a hint: got is_causal=True alone; give "
                "torch.nn.Transformer.generate_square_subsequent_mask(length)"
            )
        alone, itself = query.ndim == 2, key is query and value is query
        three = [query] if itself else [query, key, value]
        if alone:
            three = [x[None] for x in three]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            three = [x.transpose(0, 1) for x in three]
        q, k, v = three * 3 if itself else three
        mask, bias = self._rules(q, k, key_padding_mask, attn_mask)
        output, seen = self.attention(q, k, v, mask, bias=bias, need_weights=need_weights)
        weights = None if seen is None else self._weights(seen, average_attn_weights)
        if alone:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _rules(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Mask, Tensor | None]:
        (B, T, _), S = q.shape, k.shape[1]
        if padding is not None and padding.is_floating_point():  # as torch's encoder makes them of bool
            hidden = padding == -torch.inf
            padding = padding if bool(padding.masked_fill(hidden, 0).any()) else hidden
        causal = False
        if attn_mask is not None and attn_mask.ndim == 2 and T == S:
            content = content_of(attn_mask)
            causal = content is not None and content.causal
        heads = self.attention.local_heads.total
        given = None if causal else attn_mask
        mask, bias = from_torch(given, padding, num_heads=heads, query_len=T, key_len=S, batch=B)
        return (mask & Mask.causal() if causal else mask), bias

    def _weights(self, seen: AttentionMap, average: bool) -> Tensor:
        group = self.attention.local_heads.group
        if average:
            return left(seen.mean_heads(), group) / group.size()
        return gathered(seen.dense(), 1, group)
