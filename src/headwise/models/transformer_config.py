"""What a `Transformer` is made of: one frozen record, checked when it is made.

Fields about attention have the names of `headwise.MultiHeadAttention`. Every layer has the same values,
except `windows`, which repeat over the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arguments import check_dropout, window_rule
from ..errors import ArgumentError, ShapeError, nearest
from ..nn.options import GATES, Buckets, QKNorm
from ..nn.presets import Sizes
from ..nn.rotary import Rope
from ..scoring import Scoring

WORDS = {  # fields -> allowed values
    "kind": ("decoder", "encoder", "encoder-decoder"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "norm": ("layer", "rms"),
    "positions": ("learned", "sinusoidal", None),
    "output": ("tied", "own", None),
    "gate": (*GATES, None),
}

FOLLOWS = {  # fields -> the field that gives their default
    "final_norm": "norm_first",
    "qkv_bias": "bias",
    "out_bias": "bias",
    "embedding_dropout": "dropout",
    "attention_dropout": "dropout",
}

OF_ATTENTION = (  # fields that `MultiHeadAttention` has under the same name
    "d_model", "num_heads", "num_kv_heads", "head_dim", "out_bias", "scale", "softcap", "sinks", "qk_norm",
    "gate",
)  # fmt: skip

Window = int | tuple[int, int]


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and choices of a `Transformer`.

    Args:
        vocab_size: V, the number of tokens in the vocabulary.
        d_model: E, the width of the residual stream.
        num_heads: H, heads per layer.
        num_layers: the number of layers; in an encoder-decoder, of each half.
        kind: "decoder" (GPT, Llama: causal, predicts the next token), "encoder" (BERT: every token attends to
            all) or "encoder-decoder" (Vaswani 2017, T5: a decoder that also attends to an encoder).
        d_ff: the inner width of the feed-forward network. Default 4 E; for a gated one two thirds of 4 E,
            rounded up to a multiple of 8, since it has three matrices instead of two.
        max_length: the number of positions; required for learned positions.
        positions: "learned", "sinusoidal" (Vaswani 2017), or None: attention adds positions (`rope`, `alibi`,
            `relative_bias`), or there are none.
        token_types: the number of token types, which have an embedding of their own; 2 in BERT.
        embedding_scale: token embeddings are multiplied by this; sqrt(E) in Vaswani 2017.
        embedding_norm: whether the input of the first layer is normalised, as in BERT.
        activation: the nonlinear function of the feed-forward network: "relu", "gelu", "gelu_tanh" or "silu".
        gated: whether the feed-forward network is down(act(gate(x)) * up(x)), as in Llama; otherwise
            down(act(up(x))). Shazeer 2020.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        norm_eps: eps of the norms.
        norm_first: pre-norm, x + f(norm(x)), as in GPT-2 and most later models; otherwise post-norm, norm(x +
            f(x)), as in Vaswani 2017 and BERT.
        final_norm: whether there is a norm after the last layer. Default as `norm_first`.
        output: the output layer: "tied" (its weights are the token embedding), "own" (separate weights), or
            None: the model returns hidden states. For an encoder it is always None.
        bias: whether linear layers have a bias.
        qkv_bias, out_bias: whether the projections of q, k and v, and the output projection, have a bias.
            Default `bias`.
        dropout: the dropout rate of embeddings, and of what each branch adds to the residual stream.
        embedding_dropout, attention_dropout: the dropout rates of embeddings and of attention weights.
            Default `dropout`.
        num_kv_heads, head_dim, scale, softcap, sinks, rope, alibi, qk_norm, gate: as in
            `headwise.MultiHeadAttention`; rope and alibi are not used in cross-attention, where positions of
            the two texts are unrelated.
        relative_bias: as in `headwise.MultiHeadAttention`; all layers of a half share one, as in T5.
        windows: the window of each layer; a shorter tuple is repeated, so (128, None) is a window of 128 in
            every other layer.

    Raises:
        ShapeError: sizes that do not divide, or are not whole numbers of at least 1.
        ArgumentError: an option with a value that is not listed above; learned positions without max_length.

    Example:
        >>> config = TransformerConfig(vocab_size=256, d_model=64, num_heads=4, num_layers=2, rope=Rope())
        >>> config.kind, config.d_ff
        ('decoder', 256)
    """

    vocab_size: int
    d_model: int
    num_heads: int
    num_layers: int
    kind: str = "decoder"
    d_ff: int = 0
    max_length: int | None = None
    positions: str | None = None
    token_types: int = 0
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    activation: str = "gelu"
    gated: bool = False
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_first: bool = True
    final_norm: bool | None = None
    output: str | None = "tied"
    bias: bool = True
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    dropout: float = 0.0
    embedding_dropout: float | None = None
    attention_dropout: float | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    rope: Rope | None = None
    alibi: bool = False
    relative_bias: Buckets | None = None
    qk_norm: QKNorm | str | None = None
    gate: str | None = None
    windows: tuple[Window | None, ...] = (None,)

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            value = getattr(self, name)
            if value not in words:
                choices = nearest(str(value), [word for word in words if word is not None])
                raise ArgumentError(f"{name} must be a known choice: got {value!r}; {choices}")
        sizes = Sizes.of(self.d_model, self.num_heads, self.num_kv_heads, self.head_dim)
        wide = 4 * sizes.d_model
        if self.gated:
            wide = -(-wide * 2 // 3 // 8) * 8
        self._fill("d_ff", self.d_ff or wide)
        for name, like in FOLLOWS.items():
            if getattr(self, name) is None:
                self._fill(name, getattr(self, like))
        for name in ("embedding_dropout", "attention_dropout", "dropout"):
            check_dropout(getattr(self, name))
        if self.kind == "encoder":
            self._fill("output", None)
        for name in ("vocab_size", "num_layers", "d_ff"):
            _check_size(name, getattr(self, name))
        Scoring.of(sizes.head_dim, scale=self.scale, softcap=self.softcap)
        if self.rope is not None:
            self.rope.turned(sizes.head_dim)
        self._check_windows()
        self._check_positions()

    def _fill(self, name: str, value: object) -> None:
        """Set a default that depends on other fields."""
        object.__setattr__(self, name, value)

    def _check_windows(self) -> None:
        if not isinstance(self.windows, tuple) or not self.windows:
            raise ArgumentError(
                f"windows must be a tuple of one entry or more: got {self.windows!r}; for example (128, None)"
            )
        for window in self.windows:
            if window is not None:
                window_rule(window)

    def _check_positions(self) -> None:
        if self.max_length is not None:
            _check_size("max_length", self.max_length)
        if self.positions == "learned" and self.max_length is None:
            raise ArgumentError(
                "max_length must be given with positions='learned': got None; for example 512"
            )
        if self.alibi and self.relative_bias is not None:
            raise ArgumentError(
                f"alibi must be False with relative_bias: got True and {self.relative_bias}; use one"
            )

    def window_of(self, layer: int) -> Window | None:
        """Return the window of a layer, counted from 0."""
        return self.windows[layer % len(self.windows)]

    @property
    def attention(self) -> dict[str, Any]:
        """What self-attention and cross-attention have in common: arguments of `MultiHeadAttention`."""
        own = {name: getattr(self, name) for name in OF_ATTENTION}
        return own | {"bias": self.qkv_bias, "dropout": self.attention_dropout}


def _check_size(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ShapeError(f"{name} must be a whole number of at least 1: got {size!r}; for example 8")
