"""Layers one after another; and the shortest way of one more token through them.

A token at a time is read from a cache in a few matrix products that each stream all of a layer's weights
through the processor, so that every line of Python between two of them starts in a cold cache: in a model of
135 million parameters on two CPU cores a step took 50 ms by way of every module's call, and 25 of them were
products. `one_token` makes the same operations without the calls between them, where nobody could notice.

Letters: B batch, T length, E d_model, F d_ff, H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, rms_norm

from ..nn import KVCache, MultiHeadAttention
from ..nn.cached_call import plain_column, plain_step
from ..nn.packed_weights import Packed, is_untouched, parameters_of, unseen
from .layers import ACTIVATE, DecoderLayer, EncoderLayer, FeedForward, norm_of
from .transformer_config import TransformerConfig

__all__ = ["Stack"]


class Stack(nn.Module):
    """Layers one after another, and a last norm: an encoder, or a decoder."""

    def __init__(self, kind: type[EncoderLayer], config: TransformerConfig, **made: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number in range(config.num_layers):
            first: Any = self.layers[0] if number else None
            shared = None if first is None else first.attention.relative_bias
            self.layers.append(kind(config, number, shared, **made))
        self.norm = norm_of(config, **made) if config.final_norm else None

    def forward(
        self,
        x: Tensor,
        states: list[Tensor] | None = None,
        *,
        caches: Sequence[KVCache] | None = None,
        memories: Sequence[Any] | None = None,
        **attending: Any,
    ) -> Tensor:
        """[B, T, E] -> [B, T, E].

        Args:
            states: a list to which what comes into each layer is added, and what comes out of the stack.
            caches, memories: of each layer.
            attending: what all layers are given.
        """
        plain = None
        if caches is not None and memories is None and states is None and not attending:
            plain = plain_layers(self.layers, x, caches)
        if plain is not None and caches is not None:
            x = one_token(plain, x, caches)
        else:
            for number, layer in enumerate(self.layers):
                if states is not None:
                    states.append(x)
                if caches is not None:
                    attending["cache"] = caches[number]
                if memories is not None:
                    attending["memory"] = memories[number]
                x = layer(x, **attending)
        if self.norm is not None:
            x = self.norm(x)
        if states is not None:
            states.append(x)
        return x


# The shortest way


FORWARDS: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (DecoderLayer, MultiHeadAttention, FeedForward, nn.RMSNorm, nn.LayerNorm, nn.Linear)
}


class PlainLayer(NamedTuple):
    """The modules of a layer that nobody listens to, and where in its cache the next token goes."""

    at: int
    attention_norm: nn.Module
    attention: MultiHeadAttention
    out_proj: nn.Module
    feed_forward_norm: nn.Module
    activate: Callable[[Tensor], Tensor]
    gate_and_up: Packed | None
    up_proj: nn.Module
    down_proj: nn.Module


def plain_layers(layers: nn.ModuleList, x: Tensor, caches: Sequence[KVCache]) -> list[PlainLayer] | None:
    """All layers, if one token each, x [B, 1, E], can go the shortest way through them; else None.

    All are looked at before the first product, while this code is warm. Nothing but torch's own operations
    runs until the last, so that what was found stays true.
    """
    if x.shape[1] != 1 or torch.is_grad_enabled() or not unseen(x):
        return None
    found = []
    for layer, cache in zip(layers, caches, strict=True):
        plain = _plain(layer, x, cache)
        if plain is None:
            return None
        found.append(plain)
    return found


def _plain(layer: nn.Module, x: Tensor, cache: KVCache) -> PlainLayer | None:
    if type(layer) is not DecoderLayer or not layer.norm_first or (layer.training and layer.dropout):
        return None
    parts = layer.__dict__["_modules"]  # past nn.Module.__getattr__, which is slow
    attention, feed = parts["attention"], parts["feed_forward"]
    before, between = parts["attention_norm"], parts["feed_forward_norm"]
    inner, outer = attention.__dict__["_modules"], feed.__dict__["_modules"]
    out, gate, up, down = inner["out_proj"], outer.get("gate_proj"), outer["up_proj"], outer["down_proj"]
    if "cross_attention" in parts or "gate_proj" in inner:
        return None
    packed = None if gate is None else feed.__dict__["_packed"]
    if packed is None:
        if gate is not None or not _nobody_at(up):
            return None
    elif not packed.holds((gate, up)):
        return None
    for module in (layer, attention, feed, before, between, out, down):
        if not _nobody_at(module):
            return None
    at = plain_column(attention, x, cache)
    if at is None:
        return None
    return PlainLayer(at, before, attention, out, between, ACTIVATE[feed.activation], packed, up, down)


def one_token(layers: Sequence[PlainLayer], x: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """[B, 1, E] -> [B, 1, E]: as the layers would, one after another."""
    B, rope, factors = x.shape[0], None, None
    for layer, cache in zip(layers, caches, strict=True):
        attention = layer.attention
        if attention.rope is not None and attention.rope is not rope:  # one and the same in all layers
            rope = attention.rope
            factors = rope.factors(x.new_empty(1, 1, 1, attention.head_dim), layer.at)  # [1, D] each
        y = _normed(layer.attention_norm, x)
        heads, _ = plain_step(attention, y, cache, layer.at, False, factors)  # [B, H, 1, D]
        x = x + _linear(layer.out_proj, heads.reshape(B, 1, -1))  # [B, 1, H * D] -> [B, 1, E]
        y, both = _normed(layer.feed_forward_norm, x), layer.gate_and_up
        if both is None:
            hidden = layer.activate(_linear(layer.up_proj, y))  # [B, 1, F]
        else:
            gate, up = linear(y, both.weight, both.bias).chunk(2, -1)  # [B, 1, F] each
            hidden = layer.activate(gate) * up
        x = x + _linear(layer.down_proj, hidden)
    return x


def _nobody_at(module: nn.Module) -> bool:
    """Whether a module is as it was made, with plain parameters, and nobody hears of its calls."""
    kind, parameters = type(module), module.__dict__["_parameters"]
    forward = FORWARDS.get(kind)
    if forward is None or not is_untouched(module, kind, forward):
        return False
    return not parameters or parameters_of(module, *parameters) is not None


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    held = norm.__dict__
    weights, shape, eps = held["_parameters"], held["normalized_shape"], held["eps"]
    if type(norm) is nn.RMSNorm:
        return rms_norm(x, shape, weights["weight"], eps)
    return layer_norm(x, shape, weights["weight"], weights["bias"], eps)


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    weights = layer.__dict__["_parameters"]
    return linear(x, weights["weight"], weights["bias"])
