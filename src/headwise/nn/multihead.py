"""`MultiHeadAttention`: project, split into heads, attend, concatenate, project.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim, E d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import REQUIRED, answering, refuse, with_displayed_signature
from ..functional import attention
from ..map import AttentionMap
from ..masks import Mask
from ..scoring import Bias
from . import cached_call, module_call, options, presets, ragged, torch_conversion
from .cache import KVCache
from .cached_call import Memory, remember
from .options import Buckets, HeadsOfRank, Inputs, Positions, QKNorm, RelativeBias, Sharding, Slopes
from .packed_weights import PLAIN_TYPES, Packed, pack
from .presets import Sizes
from .rotary import Rope
from .self_attention import plain_self_attention


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, .., head_H) W_O,  head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Everything is batch first, and in a mask True (or 1) = may attend.

        x  [B, T, E] -- q_proj --> q [B, H,  T, D]  --+
                     -- k_proj --> k [B, Hk, S, D]  --+-- each head attends --> [B, H, T, Dv]
                     -- v_proj --> v [B, Hk, S, Dv] --+        concatenated --> [B, T, H * Dv]
                                                                -- out_proj --> [B, T, E]

    The four projections are ordinary `nn.Linear` modules: hook, wrap, prune or replace them. As long as they
    are untouched, projections with the same input run as one matrix product in calls without options. With
    the same seed, the initial weights equal those of `torch.nn.MultiheadAttention`.

    Args:
        d_model: E, the width of queries and output.
        num_heads: H.
        num_kv_heads: Hk, a divisor of H: H / Hk heads share keys and values (1: multi-query). Default H.
        head_dim: D, channels per head. Default E / H.
        value_dim: Dv, channels of a head's values. Default D.
        kdim, vdim: in cross-attention, the widths of the inputs `key` and `value`. Default E.
        bias: whether q_proj, k_proj and v_proj have a bias.
        out_bias: whether out_proj has a bias. Default as `bias`.
        dropout: the share of weights dropped in training.
        causal: hide the keys after the query; with T != S the last query is aligned with the last key.
        window: the number of keys each query may attend to, its own included; or a pair (before, after).
        scale: the factor of the scores. Default 1 / sqrt(D).
        softcap: limit scores to (-softcap, softcap), see `headwise.attention`.
        sinks: whether each head has a learned sink: the score of one more column of the softmax, which has no
            value.
        rope: rotary position embedding of queries and keys; see `Rope`.
        alibi: scores fall with distance, by a slope per head; see `headwise.scoring.alibi`.
        relative_bias: a learned number per head and distance, added to the scores; see `RelativeBias`. If a
            `RelativeBias` is passed, layers can share it, as all layers of T5 share the first layer's.
        qk_norm: normalise queries and keys: "rms" or "layer", head by head, or a `QKNorm`.
        gate: multiply each head's output by sigmoid(x W_g): "head", one number per head, or "channel", one
            per channel.

    Raises:
        ShapeError: sizes that do not divide, or are not whole numbers of at least 1.
        ArgumentError: dropout or softcap out of range; an argument of torch's class.
        MaskError: a window below 1.

    Example:
        >>> mha = MultiHeadAttention(d_model=512, num_heads=8)
        >>> x = torch.randn(2, 10, 512)
        >>> output, weights = mha(x)
        >>> output.shape, weights.shape
        (torch.Size([2, 10, 512]), torch.Size([2, 8, 10, 10]))
        >>> weights[0, 3].sum(-1).allclose(torch.ones(10))        # one head, as a tensor
        True
        >>> mha
        MultiHeadAttention(
          8 heads of 64: [B, T, 512] -> [B, 8, T, 64] -> [B, T, 512]
          (q_proj): Linear(in_features=512, out_features=512, bias=True)
          (k_proj): Linear(in_features=512, out_features=512, bias=True)
          (v_proj): Linear(in_features=512, out_features=512, bias=True)
          (out_proj): Linear(in_features=512, out_features=512, bias=True)
        )

    Vaswani 2017, section 3.2.2; grouped heads: Ainslie 2023.
    """

    rope: Rope | None
    alibi: bool
    relative_bias: RelativeBias | None
    qk_norm: QKNorm | None
    gate: str | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    gate_proj: nn.Linear | None
    _slopes: Slopes | None
    local_heads: HeadsOfRank | None = None  # if heads are sharded over processes; None: all heads are here
    _sharding: Sharding | None = None  # of its sequence over ranks; see `headwise.parallel`

    @answering(module_call.OF_THE_CONSTRUCTOR)
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        rope: Rope | None = None,
        alibi: bool = False,
        relative_bias: Buckets | RelativeBias | None = None,
        qk_norm: QKNorm | str | None = None,
        gate: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = Sizes.of(d_model, num_heads, num_kv_heads, head_dim, value_dim, kdim, vdim)
        module_call.check_options(dropout, window, scale, softcap, sizes.head_dim, causal)
        self.d_model, self.kdim, self.vdim = sizes.d_model, sizes.kdim, sizes.vdim
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.head_dim, self.value_dim = sizes.head_dim, sizes.value_dim
        self.dropout, self.causal, self.window = dropout, causal, window
        self.scale, self.softcap = scale, softcap

        self.q_proj = options.undrawn(sizes.d_model, sizes.query_width, bias, device, dtype)
        self.k_proj = options.undrawn(sizes.kdim, sizes.key_width, bias, device, dtype)
        self.v_proj = options.undrawn(sizes.vdim, sizes.value_width, bias, device, dtype)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = options.undrawn(sizes.concatenated_width, sizes.d_model, out_bias, device, dtype)
        sink_scores = torch.empty(sizes.num_heads, device=device, dtype=dtype) if sinks else None
        self.sinks = None if sink_scores is None else nn.Parameter(sink_scores)
        bias_settings = None if isinstance(relative_bias, RelativeBias) else relative_bias
        options.add(self, rope, alibi, bias_settings, qk_norm, gate, device, dtype)
        self._packed: Packed | None = None  # of q, k and v; see packed_weights.py
        self._pack()
        self.reset_parameters()
        if isinstance(relative_bias, RelativeBias):
            options.share(self, relative_bias)  # shared: keep the values that other layers have learned
        self.register_load_state_dict_post_hook(_pack_again)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> MultiHeadAttention:
        """Return an attention layer with the sizes of a known model; `headwise presets` lists them.

        Args:
            name: for example "bert-base", "gpt2-small", "llama3-8b".
            changes: arguments of the constructor that replace the preset's or are added to them.

        Raises:
            ArgumentError: no preset of that name.

        Example:
            >>> MultiHeadAttention.preset("gpt2-small").head_dim
            64
        """
        return cls(**{**presets.find(name).options, **changes})

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """Return the same attention with copies of the weights of torch's class.

        In the new module inputs are batch first, even if `batch_first` was False, and True in a mask means
        may attend.

        Raises:
            ArgumentError: not torch's class, or one with add_bias_kv or add_zero_attn.

        Example:
            >>> theirs = torch.nn.MultiheadAttention(512, 8, batch_first=True)
            >>> ours = MultiHeadAttention.from_torch(theirs)
            >>> x = torch.randn(2, 10, 512)
            >>> torch.allclose(ours(x)[0], theirs(x, x, x)[0], atol=1e-6)
            True
        """
        new = cls(**torch_conversion.arguments_of(module), device="meta")  # draws no random numbers there
        new.load_state_dict(torch_conversion.state_of(module), assign=True)
        torch_conversion.freeze_alike(module, new)
        return new.train(module.training)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """Return a `torch.nn.MultiheadAttention` with copies of these weights.

        Raises:
            ShapeError: grouped heads, or widths that torch's class cannot have.
            ArgumentError: an option other than dropout, since torch's class has none of them; a projection
                that is not `nn.Linear`.
        """
        return torch_conversion.torchs_twin(self, batch_first)

    @property
    def sizes(self) -> Sizes:
        """All sizes, and the widths that follow from them."""
        return Sizes(
            self.d_model,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.value_dim,
            self.kdim,
            self.vdim,
        )

    @with_displayed_signature
    def forward(
        self,
        query: Tensor = REQUIRED,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Bias | None = None,
        positions: Positions | None = None,
        cache: KVCache | Memory | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        documents: Tensor | None = None,
        need_weights: bool = True,
        **wrong: object,
    ) -> tuple[Tensor, AttentionMap | None]:
        """Compute self-attention, mha(x), or cross-attention, mha(query, key, value).

        Args:
            query: [B, T, d_model]
            key: [B, S, kdim]. Default query.
            value: [B, S, vdim]; must be passed if and only if key is.
            mask: a `headwise.Mask`, or a tensor broadcastable to [B, H, T, S], bool or 0 and 1; True or 1 =
                may attend. Padding is [B, 1, 1, S] or `Mask.padding(lengths)`. In self-attention a padded
                token is padded both as a key and as a query: means and statistics leave it out. A tensor
                whose values suggest another meaning, such as torch's masks, raises; `Mask.dense(tensor)` does
                not.
            bias: added to the scores, broadcastable to [B, H, T, S]; or `headwise.scoring.alibi(num_heads)`,
                `headwise.scoring.Relative(values)`, or a tuple of those. If the layer has a bias of its own,
                both are added.
            positions: positions of the tokens, int [T] or [B, T], for `rope`; in cross-attention a pair (of
                queries, of keys). By default 0, 1, 2, .., continued from the cache; in cross-attention the
                last query is aligned with the last key. Masks and biases do not use them: they count tokens.
            cache: a `KVCache` with keys and values of earlier calls; those of this call are added to it. A
                mask or bias then has a column for each earlier and each new token. Or a `Memory` from
                `remember`.
            lengths: int [B]; the first lengths[b] tokens of sequence b are real. Nothing is computed for
                padding: its output and its rows of the map are 0, and statistics leave it out. Otherwise the
                same as mask=Mask.padding(lengths). A list or a CPU tensor avoids a synchronization with the
                GPU. With a cache, each sequence continues from its own end.
            documents: int [T] or [B, T], the id of each token's text, for texts packed one after another:
                each text is a run of equal ids and attends only to itself. The same as
                mask=Mask.documents(ids), but pairs of different texts are not computed, and positions of
                `rope` start again in each text.
            need_weights: False returns None instead of the map. The map costs nothing until it is read.

        Returns:
            output [B, T, d_model], and an `AttentionMap` [B, H, T, S], before dropout, or None.

        Raises:
            ShapeError: not three dimensions; widths or batch sizes that disagree; an empty sequence.
            ArgumentError: a dtype other than that of the weights; a key without a value; arguments of torch's
                class.
            MaskError: a mask of the wrong shape or meaning.
        """
        inputs = Inputs(query, key, value, mask, bias, positions, cache, lengths, documents)
        if type(query) not in PLAIN_TYPES:
            node: tuple[Tensor, AttentionMap | None] | None = module_call.fx_node(self, *inputs, need_weights)
            if node is not None:
                return node
        if wrong:
            refuse("MultiHeadAttention", wrong, module_call.OF_A_CALL, MultiHeadAttention.forward)
        if self._sharding is not None:
            done = self._sharding.attend(self, inputs)
            output = ragged.without_padding(self._finish(done.heads, done.query), done.real)
            return output, done.weights if need_weights else None
        if documents is not None or (lengths is not None and cache is None):
            return ragged.forward(self, inputs, need_weights)
        if isinstance(cache, KVCache) and need_weights and torch.compiler.is_compiling():
            cached_call.check_in_graph(cache, need_weights=True)
        if key is value is bias is positions is lengths is None:
            # Self-attention without options and one token over a cache have shorter paths (None: they do not
            # apply). They take 0.78 to 0.98 of the time of a call, 0.76 to 0.90 of that of a token.
            if cache is None:
                result = plain_self_attention(self, query, mask, need_weights)
                if result is not None:
                    return result
            elif mask is None:
                step = cached_call.one_token(self, query, cache, need_weights)
                if step is not None:
                    return self._finish(step[0], query), step[1]
        heads, weights, _ = self._attend(inputs)
        return self._finish(heads, query, lengths), weights if need_weights else None

    @with_displayed_signature
    def head_outputs(
        self,
        query: Tensor = REQUIRED,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Bias | None = None,
        positions: Positions | None = None,
        cache: KVCache | Memory | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        documents: Tensor | None = None,
        **wrong: object,
    ) -> Tensor:
        """Return the output of each head before concatenation and W_O, [B, H, T, Dv]; arguments as in a call.

        Example:
            >>> mha, x = MultiHeadAttention(512, 8), torch.randn(2, 10, 512)
            >>> heads = mha.head_outputs(x)
            >>> heads.shape
            torch.Size([2, 8, 10, 64])
            >>> torch.allclose(mha.out_proj(heads.transpose(1, 2).flatten(2)), mha(x)[0], atol=1e-6)
            True
        """
        if wrong:
            refuse("MultiHeadAttention", wrong, module_call.OF_A_CALL, MultiHeadAttention.head_outputs)
        inputs = Inputs(query, key, value, mask, bias, positions, cache, lengths, documents)
        if self._sharding is not None:
            done = self._sharding.attend(self, inputs)
            heads = options.gated(self, done.heads, done.query)
            return ragged.without_padding(heads, None if done.real is None else done.real[:, None])
        if documents is not None or (lengths is not None and cache is None):
            return ragged.head_outputs(self, inputs)
        heads = self._attend(inputs)[0]
        heads = options.gated(self, heads, query)
        if lengths is None:
            return heads
        return ragged.without_padding(heads, ragged.real_tokens(lengths, heads)[:, None])

    def cache(self, batch: int | None = None, max_length: int | None = None, ring: bool = False) -> KVCache:
        """Return an empty cache for this module: `mha(x, cache=cache)` adds x to it and attends to all of it.

        Args:
            batch: B. With batch and max_length, memory is allocated at once; steps inside `torch.compile`
                need this.
            max_length: the largest number of columns. Default: the cache grows.
            ring: keep only the last max_length tokens (by default as many as the window), for a module with a
                window.

        Raises:
            ArgumentError: a module that is not causal; a ring without a window, or shorter than it.
        """
        return cached_call.make_cache(self, batch, max_length, ring)

    def remember(self, key: Tensor, value: Tensor | None = None, mask: Mask | Tensor | None = None) -> Memory:
        """Return keys and values of cross-attention, projected once, for `mha(query, cache=memory)`.

        Args:
            key: [B, S, kdim]
            value: [B, S, vdim]. Default key.
            mask: which keys are real, `Mask.padding(lengths)` or bool [B, 1, 1, S].

        Raises:
            ShapeError, ArgumentError: as in a call.
            MaskError: a mask that is not the same for all queries.

        Example:
            >>> mha, text = MultiHeadAttention(64, 4), torch.randn(2, 9, 64)
            >>> memory, query = mha.remember(text), torch.randn(2, 3, 64)
            >>> torch.allclose(mha(query, cache=memory)[0], mha(query, text, text)[0], atol=1e-6)
            True
        """
        return remember(self, key, value, mask)

    def _attend(self, inputs: Inputs) -> tuple[Tensor, AttentionMap, Tensor]:
        """Return (heads [B, H, T, Dv] before their gates, their map, values [B, Hk, S, Dv])."""
        if inputs.cache is not None:
            return cached_call.attend(self, inputs)
        query, key, value, mask, bias, positions, *_ = inputs
        if key is None and value is None:
            key = value = query
        elif key is None or value is None:
            raise module_call.lone(key, value)
        module_call.check(self, query, key, value)
        q, k, v = self._project(query, key, value)
        if self.rope is not None:
            q, k = options.rotated(self.rope, q, k, positions, 0, itself=key is query)
        elif positions is not None:
            raise module_call.no_use(positions)
        if mask is not None:
            B, T, _ = query.shape
            mask = module_call.rules_of(mask, B, T, key.shape[1], itself=key is query)
        chosen = options.attention_options(self, mask, bias, q.device)
        heads, weights = attention(q, k, v, *chosen, self.dropout if self.training else 0.0)
        return heads, weights, v

    def _received(self, inputs: Inputs) -> Inputs:
        """Return the inputs for the heads of this rank; without sharded heads they are unchanged."""
        return inputs

    def _handed_on(self, output: Tensor) -> Tensor:
        """Return the output in the layout that the caller of the module expects."""
        return output

    def _finish(self, heads: Tensor, query: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
        """Compute [B, T, E] from heads [B, H, T, Dv], with 0 where there is no token."""
        if self.gate_proj is not None:
            heads = options.gated(self, heads, query)
        output: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        if lengths is None:
            return output
        return ragged.without_padding(output, ragged.real_tokens(lengths, output))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, T, D], k [B, Hk, S, D], v [B, Hk, S, Dv]."""
        return self._queries(query), *self._keys_and_values(key, value)

    def _queries(self, query: Tensor) -> Tensor:
        """Return q [B, H, T, D]."""
        q, H, D = self.q_proj(query), self.num_heads, self.head_dim
        if q.shape[-1] != H * D or type(q) not in PLAIN_TYPES:
            module_call.check_projected("q_proj", q, H, D)
        B, T, _ = q.shape
        return options.normalised(self, self.q_norm, q).reshape(B, T, H, D).transpose(1, 2)

    def _keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return k [B, Hk, S, D], v [B, Hk, S, Dv]."""
        k, v, Hk, D = self.k_proj(key), self.v_proj(value), self.num_kv_heads, self.head_dim
        if k.shape[-1] != Hk * D or type(k) not in PLAIN_TYPES:
            module_call.check_projected("k_proj", k, Hk, D)
        B, S, _ = k.shape
        k = options.normalised(self, self.k_norm, k).reshape(B, S, Hk, D)
        return k.transpose(1, 2), v.reshape(B, S, Hk, self.value_dim).transpose(1, 2)

    def reset_parameters(self) -> None:
        """Initialise all parameters again; the projections are drawn as in torch's class."""
        options.draw_weights(self)

    def extra_repr(self) -> str:
        """Return the shapes of a call, and the options that differ from their defaults."""
        used = {name: getattr(self, name) for name in ("window", "scale", "softcap")}
        others = options.in_use(self).values()
        return presets.line(self.sizes, self.causal, used, self.sinks is not None, others, self.dropout)

    def _pack(self) -> None:
        """Move the weights of projections that may share an input into one block of memory."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if not self.kdim == self.vdim == self.d_model:
            return
        packed = None if self._packed is None else self._packed.again(layers)
        self._packed = pack(layers) if packed is None else packed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MultiHeadAttention:
        super()._apply(fn, recurse)  # moved or cast, so that each weight has memory of its own
        self._pack()
        return self

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if self._packed is None:  # a deep copy or unpickled; a shallow copy shares the block
            self._pack()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        assigned = bool(args[0].get("assign_to_params_buffers")) if args else False
        refused = torch_conversion.to_own_names(state_dict, prefix, self.sizes, self._modules, copy=assigned)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if refused:
            args[-1].extend(refused)  # torch raises with these messages, strict or not


def _pack_again(module: MultiHeadAttention, _: object) -> None:
    """Pack the weights again after load_state_dict, which with assign=True replaces the parameters."""
    module._pack()
