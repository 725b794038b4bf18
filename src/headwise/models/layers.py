"""The parts of a Transformer: norms, embedding, feed-forward, a layer, and a stack of layers.

    norm first    x = x + attention(norm(x))          norm after    x = norm(x + attention(x))
                  x = x + feed_forward(norm(x))                     x = norm(x + feed_forward(x))

Letters: B batch, T length, S the memory's length, E d_model, F d_ff, H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import layer_norm, linear, rms_norm

from ..masks import Mask
from ..nn import KVCache, MultiHeadAttention, RelativeBias
from ..nn.cached_call import plain_column, plain_step
from ..nn.packed_weights import Packed, is_unobserved, is_untouched, pack, parameters_of
from .transformer_config import TransformerConfig

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def norm_of(config: TransformerConfig, **made: Any) -> nn.Module:
    """Return the norm a config asks for, over E channels."""
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.d_model, eps=config.norm_eps, **made)


class Embedding(nn.Module):
    """Tokens, their positions and types as vectors: what goes into the first layer."""

    def __init__(self, config: TransformerConfig, **made: Any) -> None:
        super().__init__()
        self.scale, self.dropout = config.embedding_scale, config.embedding_dropout or 0.0
        self.max_length, self.sinusoidal = config.max_length, config.positions == "sinusoidal"

        def table(rows: int | None) -> nn.Embedding | None:
            return nn.Embedding(rows, config.d_model, **made) if rows else None

        self.tokens = nn.Embedding(config.vocab_size, config.d_model, **made)
        self.positions = table(config.max_length if config.positions == "learned" else None)
        self.types = table(config.token_types)
        self.norm = norm_of(config, **made) if config.embedding_norm else None

    def forward(self, ids: Tensor, positions: Tensor | None, types: Tensor | None) -> Tensor:
        """ids [B, T] -> [B, T, E]; positions int [T] or [B, T], types int [B, T]."""
        x = self.tokens(ids)  # [B, T, E]
        if self.scale != 1:
            x = x * self.scale
        if self.positions is not None:
            x = x + self.positions(positions)
        elif self.sinusoidal:
            assert positions is not None
            x = x + sinusoids(positions, x.shape[-1]).to(x.dtype)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        if self.norm is not None:
            x = self.norm(x)
        return functional.dropout(x, self.dropout) if self.dropout and self.training else x


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return sin and cos of p / 10000^(2i / E), alternating, float64 [.., T, E]. Vaswani 2017, 3.5."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    angles = positions[..., None] * 10_000.0**-exponents  # [.., T, E / 2]
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :width]


class FeedForward(nn.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) * up(x)); each token separately.

    gate_proj and up_proj are ordinary `nn.Linear` modules. As long as they are not modified, their weights
    are stored in one tensor, and one matrix product computes both; see `nn/packed_weights.py`.

    Args:
        config: sizes and options.
        made: device and dtype.

    Vaswani 2017, section 3.3; gates: Shazeer 2020.
    """

    gate_proj: nn.Linear | None

    def __init__(self, config: TransformerConfig, **made: Any) -> None:
        super().__init__()
        E, F, made = config.d_model, config.d_ff, {"bias": config.bias, **made}
        self.activation = config.activation
        self.gate_proj = nn.Linear(E, F, **made) if config.gated else None
        self.up_proj = nn.Linear(E, F, **made)
        self.down_proj = nn.Linear(F, E, **made)
        self._packed: Packed | None = None
        self._pack()
        self.register_load_state_dict_post_hook(_pack_again)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]"""
        if self.gate_proj is None:
            hidden = ACTIVATE[self.activation](self.up_proj(x))  # [B, T, F]
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)  # [B, T, F] each
            hidden = ACTIVATE[self.activation](gate) * up
        output: Tensor = self.down_proj(hidden)
        return output

    def extra_repr(self) -> str:
        return self.activation if self.gate_proj is None else f"{self.activation}, gated"

    def _pack(self) -> None:
        """Pack gate and up into one block of memory, as `MultiHeadAttention` does with q, k and v."""
        if self.gate_proj is None:
            return
        both = (self.gate_proj, self.up_proj)
        packed = None if self._packed is None else self._packed.again(both)
        self._packed = pack(both) if packed is None else packed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FeedForward:
        super()._apply(fn, recurse)
        self._pack()
        return self

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if self._packed is None:
            self._pack()


def _pack_again(module: FeedForward, _: object) -> None:
    module._pack()


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, with residuals; every token attends to every token.

    Args:
        config: sizes and options.
        number: the number of the layer in the model, from 0; it selects the window from `config.windows`.
        relative_bias: a relative bias that this layer shares with others.
        made: device and dtype.
    """

    causal = False

    def __init__(
        self,
        config: TransformerConfig,
        number: int = 0,
        relative_bias: RelativeBias | None = None,
        **made: Any,
    ) -> None:
        super().__init__()
        self.norm_first, self.dropout = config.norm_first, config.dropout
        self.attention = MultiHeadAttention(
            **config.attention,
            causal=self.causal,
            window=config.window_of(number),
            rope=config.rope,
            alibi=config.alibi,
            relative_bias=relative_bias or config.relative_bias,
            **made,
        )
        self.attention_norm = norm_of(config, **made)
        self.feed_forward = FeedForward(config, **made)
        self.feed_forward_norm = norm_of(config, **made)

    def forward(self, x: Tensor, **attending: Any) -> Tensor:
        """[B, T, E] -> [B, T, E]; `attending`: arguments of `MultiHeadAttention`, such as mask or cache."""
        return self._transform(self._attend(x, attending))

    def _attend(self, x: Tensor, attending: dict[str, Any]) -> Tensor:
        y = self.attention_norm(x) if self.norm_first else x
        output, _ = self.attention(y, need_weights=False, **attending)
        return self._add(x, output, self.attention_norm)

    def _transform(self, x: Tensor) -> Tensor:
        y = self.feed_forward_norm(x) if self.norm_first else x
        return self._add(x, self.feed_forward(y), self.feed_forward_norm)

    def _add(self, x: Tensor, output: Tensor, norm: nn.Module) -> Tensor:
        """Add the output of a part to the stream."""
        if self.dropout and self.training:
            output = functional.dropout(output, self.dropout)
        x = x + output
        return x if self.norm_first else norm(x)


class DecoderLayer(EncoderLayer):
    """A layer of a decoder: as `EncoderLayer`, but no token attends to later ones.

    In an encoder-decoder it has cross-attention between self-attention and the feed-forward network: queries
    come from the decoder, keys and values from the encoder.
    """

    causal = True
    cross_attention: MultiHeadAttention | None

    def __init__(
        self,
        config: TransformerConfig,
        number: int = 0,
        relative_bias: RelativeBias | None = None,
        **made: Any,
    ) -> None:
        super().__init__(config, number, relative_bias, **made)
        crossing = config.kind == "encoder-decoder"
        self.cross_attention = MultiHeadAttention(**config.attention, **made) if crossing else None
        self.cross_norm = norm_of(config, **made) if crossing else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | Any = None,
        memory_mask: Mask | Tensor | None = None,
        **attending: Any,
    ) -> Tensor:
        """[B, T, E] -> [B, T, E].

        Args:
            memory: the encoder's output, [B, S, E]; or keys and values that were computed from it before.
            memory_mask: which tokens of the source are real.
            attending: arguments of the self-attention, as in `EncoderLayer`.
        """
        x = self._attend(x, attending)
        if memory is not None:
            assert self.cross_attention is not None and self.cross_norm is not None
            y = self.cross_norm(x) if self.norm_first else x
            if isinstance(memory, Tensor):
                output, _ = self.cross_attention(y, memory, memory, memory_mask, need_weights=False)
            else:
                output, _ = self.cross_attention(y, cache=memory, need_weights=False)
            x = self._add(x, output, self.cross_norm)
        return self._transform(x)


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
        if plain is not None and caches is not None:  # a fast path: 17% less time a token on an H200
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


# A fast path for one more token
#
# Its matrix products stream all of a layer's weights through the processor, so that every line of Python
# between two of them starts in a cold cache: of 50 ms a step, in a model of 135 M parameters on two CPU
# cores, 25 were products. `one_token` makes the same operations without calling modules.


FORWARDS: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (DecoderLayer, MultiHeadAttention, FeedForward, nn.RMSNorm, nn.LayerNorm, nn.Linear)
}


class PlainLayer(NamedTuple):
    """The modules of a layer without hooks, and the cache column of the next token."""

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
    """Return all layers if `one_token` can run them for x [B, 1, E], one token each; else None.

    All are looked at before the first product, while this code is warm. Nothing but torch's own operations
    runs until the last, so that what was found stays true.
    """
    if x.shape[1] != 1 or torch.is_grad_enabled() or not is_unobserved(x):
        return None
    plain_steps = []
    for layer, cache in zip(layers, caches, strict=True):
        plain = _plain_layer(layer, x, cache)
        if plain is None:
            return None
        plain_steps.append(plain)
    return plain_steps


def _plain_layer(layer: nn.Module, x: Tensor, cache: KVCache) -> PlainLayer | None:
    if type(layer) is not DecoderLayer or not layer.norm_first or (layer.training and layer.dropout):
        return None
    parts = layer.__dict__["_modules"]  # past nn.Module.__getattr__, which is slow
    attention, feed = parts["attention"], parts["feed_forward"]
    before, between = parts["attention_norm"], parts["feed_forward_norm"]
    if type(attention) is not MultiHeadAttention or type(feed) is not FeedForward:
        return None
    inner, outer = attention.__dict__["_modules"], feed.__dict__["_modules"]
    out, gate, up, down = inner["out_proj"], outer.get("gate_proj"), outer["up_proj"], outer["down_proj"]
    if "cross_attention" in parts or "gate_proj" in inner:
        return None
    packed = None if gate is None else feed.__dict__["_packed"]
    if packed is None:
        if gate is not None or not _is_plain(up):
            return None
    elif not packed.holds((gate, up)):
        return None
    for module in (layer, attention, feed, before, between, out, down):
        if not _is_plain(module):
            return None
    at = plain_column(attention, x, cache)
    if at is None:
        return None
    return PlainLayer(at, before, attention, out, between, ACTIVATE[feed.activation], packed, up, down)


def one_token(layers: Sequence[PlainLayer], x: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """Run one token through all layers, [B, 1, E] -> [B, 1, E]."""
    B, rope, factors = x.shape[0], None, None
    for layer, cache in zip(layers, caches, strict=True):
        attention = layer.attention
        if attention.rope is not None and attention.rope is not rope:  # the same in all layers
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


def _is_plain(module: nn.Module) -> bool:
    """Return True if a module is unchanged, has plain parameters and no hooks."""
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
