"""`Transformer`: tokens in, hidden states or the next token's logits out. Decoder, encoder, or both.

    decoder             ids [B, T] -- embedding --> [B, T, E] -- layers --> [B, T, E] -- output --> [B, T, V]
    encoder             ids [B, T] -- embedding --> [B, T, E] -- layers --> [B, T, E]
    encoder-decoder     ids [B, S] -- embedding -- encoder --> memory [B, S, E]
                        target_ids [B, T] -- embedding -- decoder, looking at memory -- output --> [B, T, V]

Letters: B batch, T length, S the source's length, E d_model, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..arguments import REQUIRED, our_words, refuse, text_of, with_displayed_signature
from ..errors import ArgumentError, MaskError, ShapeError
from ..mask_rules import can_read
from ..masks import Mask
from ..nn import KVCache, MultiHeadAttention
from ..nn.module_call import as_lengths, rules_of
from ..nn.options import Sharding
from . import generation, model_files
from .layers import DecoderLayer, Embedding, EncoderLayer, FeedForward, Stack
from .transformer_config import TransformerConfig

Device = torch.device | str | None
Lengths = Tensor | Sequence[int]

SPREAD = 0.02  # standard deviation of initial weights, as in BERT and GPT-2

OF_A_CALL = {  # keywords of transformers' models
    **our_words(token_types="token_type_ids", positions="position_ids", target_ids="decoder_input_ids"),
    "input_ids": (
        'its name is ids here, and it comes first: model(tokenizer(text, return_tensors="pt")["input_ids"])'
    ),
    "attention_mask": "pass the number of real tokens of each text: lengths=attention_mask.sum(1)",
    "past_key_values": "create cache = model.cache() once, and pass it to every call",
    "labels": "pass the logits to torch.nn.functional.cross_entropy, or train with headwise.models.fit",
    "output_attentions": "call the model inside `with headwise.watch(model) as heads:`",
}


class Transformer(nn.Module):
    """A Transformer built from `headwise.MultiHeadAttention`, with the sizes of a `TransformerConfig`.

    Its parts have plain names: `embedding`, `encoder.layers[i].attention`, `decoder.layers[i].feed_forward`,
    `output`. Functions such as `headwise.watch`, `headwise.ablate` and `headwise.prune` work with it as with
        any model.

    Args:
        config: sizes and choices.

    Example:
        >>> from headwise.nn import Rope
        >>> config = TransformerConfig(vocab_size=61, d_model=32, num_heads=4, num_layers=2, rope=Rope())
        >>> model = Transformer(config)
        >>> ids = torch.randint(61, (3, 7))
        >>> model(ids).shape                                            # what may come next, after each token
        torch.Size([3, 7, 61])
        >>> model.hidden(ids).shape
        torch.Size([3, 7, 32])

    Vaswani 2017.
    """

    encoder: Stack | None
    decoder: Stack | None
    output: nn.Linear | None
    _sharding: Sharding | None = None  # how its sequence is sharded over ranks; see `headwise.parallel`

    def __init__(
        self, config: TransformerConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = Embedding(config, **made)
        encodes, decodes = config.kind != "decoder", config.kind != "encoder"
        self.encoder = Stack(EncoderLayer, config, **made) if encodes else None
        self.decoder = Stack(DecoderLayer, config, **made) if decodes else None
        own = config.output == "own"
        sizes = (config.d_model, config.vocab_size)
        self.output = nn.Linear(*sizes, bias=False, **made) if own else None
        self.reset_parameters()

    @with_displayed_signature
    def forward(
        self,
        ids: Tensor | None = REQUIRED,
        target_ids: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
        cache: ModelCache | None = None,
        last: bool = False,
        **wrong: object,
    ) -> Tensor:
        """Return logits [B, T, V]; for a model without an output, hidden states [B, T, E].

        Args:
            ids: int [B, T]; for an encoder-decoder the source, [B, S], or None if the cache already holds the
                source.
            target_ids: int [B, T], the input of the decoder in an encoder-decoder.
            mask: as in `headwise.MultiHeadAttention`. In an encoder-decoder it may only hide source tokens,
                as [B, 1, 1, S] or `Mask.padding`; they are hidden from encoder and decoder.
            lengths, target_lengths: int [B]; the first lengths[b] ids (target_ids) of sequence b are real.
            positions: int [T] or [B, T], positions of ids, or of target_ids in an encoder-decoder. By default
                0, 1, 2, .., continued from the cache.
            token_types: int [B, T], for a model with token types; by default all 0.
            cache: holds the earlier tokens; the new tokens are added to it. See the method `cache`.
            last: return only the logits of each sequence's last token, [B, 1, V]; generation needs no others.

        Raises:
            ShapeError: ids that are not [B, T]; more tokens than the model has positions.
            ArgumentError: an argument that this kind of model does not take; ids that are not whole numbers;
                keywords of transformers' models.
            MaskError: a mask of the wrong shape or meaning.
        """
        if wrong:
            refuse("Transformer", wrong, OF_A_CALL, Transformer.forward)
        if ids is REQUIRED:
            raise TypeError("ids must be given: got none; call model(ids) with ids int [B, T]")
        if last and self._sharding is not None:
            raise ArgumentError(
                "last must be False if the sequence is sharded over ranks: got True; use "
                "headwise.parallel.join on the output"
            )
        x = self.hidden(
            ids, target_ids, mask=mask, lengths=lengths, target_lengths=target_lengths, positions=positions,
            token_types=token_types, cache=cache,
        )  # fmt: skip
        if last:
            x = _last(x, target_lengths if self.config.kind == "encoder-decoder" else lengths)  # [B, 1, E]
        if self.output is not None:
            logits: Tensor = self.output(x)
            return logits
        return functional.linear(x, self.embedding.tokens.weight) if self.config.output == "tied" else x

    @overload
    def hidden(
        self,
        ids: Tensor | None,
        target_ids: Tensor | None = None,
        *,
        every: Literal[False] = False,
        **reading: Any,
    ) -> Tensor: ...

    @overload
    def hidden(
        self, ids: Tensor | None, target_ids: Tensor | None = None, *, every: Literal[True], **reading: Any
    ) -> list[Tensor]: ...

    def hidden(
        self, ids: Tensor | None, target_ids: Tensor | None = None, *, every: bool = False, **reading: Any
    ) -> Tensor | list[Tensor]:
        """Return hidden states [B, T, E] before the output.

        Args:
            every: return a list of num_layers + 1 tensors instead: the input of each layer, and the output of
                the last norm. In an encoder-decoder these are the decoder's.
            ids, target_ids, reading: as in a call.
        """
        states: list[Tensor] | None = [] if every else None
        x = self._read(ids, target_ids, states, **reading)
        return x if states is None else states

    def encode(
        self,
        ids: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        lengths: Lengths | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the encoder, [B, T, E]; arguments as in a call.

        Raises:
            ArgumentError: the model is a decoder.
        """
        if self.encoder is None:
            raise ArgumentError("encode must be called on a model with an encoder: got a decoder; use hidden")
        return self._run(
            self.encoder, ids, mask=mask, lengths=lengths, positions=positions, token_types=token_types
        )

    def cache(self, batch: int | None = None, max_length: int | None = None) -> ModelCache:
        """Return an empty cache of keys and values: model(ids, cache=cache), then token by token.

        Args:
            batch, max_length: if both are given, memory is allocated at once; otherwise the cache grows.

        Raises:
            ArgumentError: the model is an encoder, which needs no cache.
        """
        if self.decoder is None:
            raise ArgumentError(
                "cache must be called on a model with a decoder: got an encoder; pass all tokens at once"
            )
        layers: Any = self.decoder.layers
        return ModelCache([layer.attention.cache(batch, max_length) for layer in layers])

    generate = generation.generate
    stream = generation.stream
    save = model_files.save

    # On the way to hidden states

    def _read(
        self,
        ids: Tensor | None,
        target_ids: Tensor | None,
        states: list[Tensor] | None,
        *,
        mask: Mask | Tensor | None = None,
        lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """Return hidden states [B, T, E]; of an encoder-decoder, the decoder's."""
        if self.config.kind != "encoder-decoder":
            for name, value in (("target_ids", target_ids), ("target_lengths", target_lengths)):
                if value is not None:
                    raise ArgumentError(
                        f"{name} must only be given to an encoder-decoder: got a {self.config.kind}; use ids"
                    )
            if self.decoder is None and cache is not None:
                raise ArgumentError(
                    "cache must only be given to a model with a decoder: got an encoder; leave it out"
                )
            stack = self.decoder or self.encoder
            assert stack is not None
            return self._run(
                stack, ids, states, mask=mask, lengths=lengths, positions=positions, token_types=token_types,
                cache=cache,
            )  # fmt: skip
        if token_types is not None:
            raise ArgumentError(
                f"token_types must be None for an encoder-decoder: got {text_of(token_types)}; leave them out"
            )
        assert self.decoder is not None
        source = {} if ids is None else self._read_source(ids, mask, lengths, cache)
        if ids is None and (cache is None or cache.memories is None):
            raise ArgumentError("ids must be given until a cache holds the source: got None; pass the source")
        if cache is not None and cache.memories is not None:
            source = {"memories": cache.memories}
        return self._run(
            self.decoder, target_ids, states, lengths=target_lengths, positions=positions, cache=cache,
            **source,
        )  # fmt: skip

    def _run(
        self,
        stack: Stack,
        ids: Tensor | None,
        states: list[Tensor] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        lengths: Lengths | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
        cache: ModelCache | None = None,
        **source: Any,
    ) -> Tensor:
        """Run embedding and layers, [B, T] -> [B, T, E]. Layers get only arguments that are not None."""
        if cache is not None:
            _check_cache(cache, len(stack.layers))
            source["caches"] = cache.layers
        x = self._embed(ids, positions, token_types, cache)
        if mask is not None:
            source["mask"] = mask
        if lengths is not None:
            source["lengths"] = lengths
        if positions is not None and self.config.rope is not None:
            source["positions"] = positions
        hidden: Tensor = stack(x, states, **source)
        return hidden

    def _read_source(
        self, ids: Tensor, mask: Mask | Tensor | None, lengths: Lengths | None, cache: ModelCache | None
    ) -> dict[str, Any]:
        """Run the encoder. Return its output for the decoder's layers, or store it in the cache."""
        padding = self._padding(ids, mask, lengths)
        assert self.encoder is not None and self.decoder is not None
        memory = self._run(self.encoder, ids, mask=padding)  # [B, S, E]
        if cache is None:
            return {"memory": memory, "memory_mask": padding}
        layers: Any = self.decoder.layers
        cache.memories = [layer.cross_attention.remember(memory, mask=padding) for layer in layers]
        return {}

    def _padding(self, ids: Tensor, mask: Mask | Tensor | None, lengths: Lengths | None) -> Mask | None:
        """Return which source tokens are real, for both halves; None: all are."""
        padding = None if lengths is None else Mask.padding(lengths)
        if mask is None:
            return padding
        rules = replace(rules_of(mask, ids.shape[0], ids.shape[1], ids.shape[1], itself=False), queries=None)
        others = [name for name in Mask.FIELDS if getattr(rules, name) is not None]
        if others != ["keys"]:
            raise MaskError(
                f"mask must only hide source tokens in an encoder-decoder: got {', '.join(others)}; use "
                "Mask.padding(lengths), or [B, 1, 1, S]"
            )
        return rules if padding is None else rules & padding

    def _embed(
        self, ids: Tensor | None, positions: Tensor | None, types: Tensor | None, cache: ModelCache | None
    ) -> Tensor:
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            name = "target_ids" if self.config.kind == "encoder-decoder" else "ids"
            actual = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentError(
                f"{name} must be a tensor of whole numbers: got {actual}; use the tokenizer's input_ids"
            )
        if ids.ndim != 2 or not ids.shape[1]:
            raise ShapeError(
                f"ids must be [B, T], not empty: got {list(ids.shape)}; use ids[None] for one text"
            )
        if types is not None and self.embedding.types is None:
            raise ArgumentError(
                "token_types must only be given to a model with types: config.token_types=0; leave them out"
            )
        config, T = self.config, ids.shape[1]
        if config.positions is None:
            if positions is not None and config.rope is None:
                raise ArgumentError(
                    f"positions must be None without rope: got {text_of(positions)}; drop them"
                )
        elif positions is None:
            before, device = 0, ids.device
            if self._sharding is not None:
                positions, length = self._sharding.positions(ids)
            else:
                before = 0 if cache is None or torch.compiler.is_compiling() else cache.length
                length = before + T
                positions = torch.arange(T, device=device) if cache is None else cache.positions(T, device)
            if config.positions == "learned" and config.max_length and length > config.max_length:
                requested = f"{before} + {T}" if self._sharding is None else f"{length} over all ranks"
                raise ShapeError(
                    f"ids must fit the model's max_length: {requested} > {config.max_length}; shorten the "
                    "text, or make the model with a larger max_length"
                )
        embedded: Tensor = self.embedding(ids, positions, types)
        return embedded

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights: embeddings and feed-forward as in GPT-2, attention as in torch.

        With pre-norm, the weights of each branch's last layer are divided by the square root of the number of
        branches; otherwise the residual stream would grow with depth. Radford 2019, section 2.3.
        """
        branches = 0
        for module in self.modules():
            if isinstance(module, EncoderLayer):
                branches += 2 if getattr(module, "cross_attention", None) is None else 3
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=SPREAD)
            elif isinstance(module, FeedForward):
                for layer in module.children():
                    assert isinstance(layer, nn.Linear)
                    nn.init.normal_(layer.weight, std=SPREAD)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
            elif isinstance(module, (MultiHeadAttention, nn.LayerNorm, nn.RMSNorm)):
                module.reset_parameters()
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=SPREAD)
        if self.config.norm_first:
            for module in self.modules():
                if isinstance(module, MultiHeadAttention):
                    module.out_proj.weight.mul_(branches**-0.5)
                elif isinstance(module, FeedForward):
                    module.down_proj.weight.mul_(branches**-0.5)

    def extra_repr(self) -> str:
        config = self.config
        return f"{config.kind} of {config.num_layers} layers, {config.num_heads} heads, {config.d_model} wide"


class ModelCache:
    """A `KVCache` per decoder layer; in an encoder-decoder, also keys and values of the source.

    It is made by `model.cache()`. All layers hold the same tokens, so lengths and positions are the same in
    all layers.
    """

    def __init__(self, layers: Sequence[KVCache]) -> None:
        self.layers = list(layers)
        self.memories: list[Any] | None = None  # `Memory` of every layer's cross-attention

    @property
    def length(self) -> int:
        """The number of tokens in the cache, for the longest sequence."""
        return self.layers[0].length

    @property
    def batch(self) -> int | None:
        """The batch size; None while the cache is empty."""
        return self.layers[0].batch

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of the next `count` tokens: int [T], or [B, T] if lengths differ."""
        return self.layers[0].positions(count, device)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Replace sequence i by sequence index[i], for beam search."""
        for held in (*self.layers, *(self.memories or ())):
            held.reorder(index)

    def crop(self, length: int) -> None:
        """Remove all tokens from this position on; the source stays."""
        for layer in self.layers:
            layer.crop(length)

    def reset(self) -> None:
        """Remove all tokens and the source."""
        for layer in self.layers:
            layer.reset()
        self.memories = None

    def __repr__(self) -> str:
        source = "" if self.memories is None else ", and the source"
        return f"ModelCache({len(self.layers)} layers of {self.layers[0]!r}{source})"


def _check_cache(cache: object, count: int) -> None:
    """Raise unless this is a cache of so many layers, all of which hold the same tokens."""
    if not isinstance(cache, ModelCache):
        raise ArgumentError(f"cache must be a ModelCache: got {text_of(cache)}; make one with model.cache()")
    if len(cache.layers) != count:
        raise ShapeError(
            f"cache must have as many layers as the model: {len(cache.layers)} and {count}; make one with "
            "this model's cache()"
        )
    if torch.compiler.is_compiling():  # counts are on the device then
        return
    first = cache.layers[0]._count
    for layer in cache.layers:
        if layer._count != first:
            lengths = [each.length for each in cache.layers]
            raise ArgumentError(
                f"cache must hold the same tokens in every layer: {max(lengths)} and {min(lengths)}, since a "
                f"step was interrupted; use cache.crop({min(lengths)})"
            )


def _last(x: Tensor, lengths: Lengths | None) -> Tensor:
    """Return the last real token of each sequence, [B, 1, E]."""
    if lengths is None:
        return x[:, -1:]
    counts = as_lengths(lengths)
    if can_read(counts) and bool((counts < 1).any()):
        raise MaskError(
            f"lengths must be at least 1 to use the last tokens: got {int(counts.min())}; leave empty "
            "sequences out"
        )
    ends = counts.to(x.device) - 1  # [B]
    return x[torch.arange(len(x), device=x.device), ends][:, None]
