"""The sizes of a layer, checked once, and the layers of models people know, by name: data, without torch.

Figures are those of the published configurations: with a model's weights, a preset computes what the model's
layer computes. What belongs to training (dropout, how weights are drawn) is left out; what one layer cannot
tell, such as windows in every other layer, stands in `note`.

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim, E d_model.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, SupportsIndex

from ..errors import ArgumentError, ShapeError, nearest

if TYPE_CHECKING:
    from .options import Buckets, QKNorm
    from .rotary import Rope


@dataclass(frozen=True)
class Sizes:
    """E, H, Hk, D, Dv and the widths of what comes in, all whole numbers."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    kdim: int
    vdim: int

    @classmethod
    def of(
        cls,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
    ) -> Sizes:
        """Return sizes with their defaults: D = E / H, Dv = D, Hk = H, kdim = vdim = E.

        Raises:
            ShapeError: not a whole number of at least 1; H that does not divide E; Hk that does not divide H.
        """
        d_model, num_heads = _size("d_model", d_model), _size("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else _size("num_kv_heads", num_kv_heads)
        kdim = d_model if kdim is None else _size("kdim", kdim)
        vdim = d_model if vdim is None else _size("vdim", vdim)
        head_dim = None if head_dim is None else _size("head_dim", head_dim)
        value_dim = None if value_dim is None else _size("value_dim", value_dim)
        if head_dim is None:
            if d_model % num_heads:
                advice = f"use {_near(d_model, num_heads)}, or give head_dim"
                if num_heads % d_model == 0:
                    advice = f"d_model comes first, as MultiHeadAttention({num_heads}, {d_model})"
                raise ShapeError(f"num_heads must divide d_model: {_division(d_model, num_heads)}; {advice}")
            head_dim = d_model // num_heads
        if num_heads % num_kv_heads:
            raise ShapeError(
                f"num_kv_heads must divide num_heads: {_division(num_heads, num_kv_heads)}; "
                f"use {_near(num_heads, num_kv_heads)}"
            )
        return cls(d_model, num_heads, num_kv_heads, head_dim, value_dim or head_dim, kdim, vdim)

    @property
    def query_width(self) -> int:
        """H * D: what q_proj makes."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Hk * D"""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Hk * Dv"""
        return self.num_kv_heads * self.value_dim

    @property
    def concatenated_width(self) -> int:
        """H * Dv: what out_proj takes."""
        return self.num_heads * self.value_dim

    @property
    def are_torchs(self) -> bool:
        """True if `torch.nn.MultiheadAttention` can have these sizes."""
        fills = self.num_heads * self.head_dim == self.d_model
        return fills and self.num_kv_heads == self.num_heads and self.value_dim == self.head_dim


def _size(name: str, size: SupportsIndex) -> int:
    """Return a size of any integer type as an int."""
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if isinstance(size, bool) or number < 1:
        is_integral = isinstance(size, float) and size >= 1 and size.is_integer()
        advice = f"use {size:.0f}; divide with // instead of /" if is_integral else "for example 8"
        raise ShapeError(f"{name} must be a whole number of at least 1: got {size!r}; {advice}")
    return number


def _division(total: int, part: int) -> str:
    return f"{total} = {part} * {total // part} + {total % part}"


def _near(total: int, part: int) -> str:
    """Return the divisors nearest to the one requested, as words."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n < part][-1:]
    above = [n for n in divisors if n > part][:1]
    return " or ".join(map(str, below + above))


def line(
    sizes: Sizes,
    causal: bool,
    options: Mapping[str, object],
    sinks: bool,
    others: Iterable[str],
    dropout: float = 0.0,
) -> str:
    """Return a layer as one line, for its repr; options that are None are left out.

    Example:
        >>> line(Sizes.of(512, 8), True, {"window": 7}, False, ["alibi"])
        '8 heads of 64: [B, T, 512] -> [B, 8, T, 64] -> [B, T, 512], causal, window=7, alibi'
    """
    s = sizes
    heads = f"{s.num_heads} heads of {s.head_dim}"
    if s.num_kv_heads != s.num_heads:
        heads += f" over {s.num_kv_heads} key/value heads"
    parts = [f"{heads}: [B, T, {s.d_model}] -> [B, {s.num_heads}, T, {s.value_dim}] -> [B, T, {s.d_model}]"]
    if s.kdim != s.d_model or s.vdim != s.d_model:
        parts.append(f"keys [B, S, {s.kdim}], values [B, S, {s.vdim}]")
    if causal:
        parts.append("causal")
    parts += [f"{name}={value}" for name, value in options.items() if value is not None]
    if sinks:
        parts.append("sinks")
    parts += others
    if dropout:
        parts.append(f"dropout={dropout}")
    return ", ".join(parts)


# Layers of known models

# The defaults of the settings that presets have, so that presets can be listed without torch.
SETTINGS: dict[str, dict[str, Any]] = {
    "Rope": {"base": 10_000.0, "dims": None, "interleaved": False, "scaling": None},
    "Llama3": {"factor": 8.0, "low": 1.0, "high": 4.0, "original_length": 8192},
    "Yarn": {
        "factor": None, "original_length": None, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
        "attention_factor": None, "mscale": None, "mscale_all_dim": None,
    },
    "Buckets": {"count": 32, "max_distance": 128, "both_ways": True},
    "QKNorm": {"kind": "rms", "eps": 1e-6, "whole": False},
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Written:
    """The settings of a layer as data, such as `Rope(base=500000.0)`, until `settings_of` creates them."""

    kind: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        usual = SETTINGS[self.kind]
        arguments = (f"{name}={value!r}" for name, value in self.arguments if value != usual[name])
        return f"{self.kind}({', '.join(arguments)})"

    @property
    def data(self) -> dict[str, Any]:
        """Return every argument, with its kind, as numbers and words."""
        data = {name: _plain(value) for name, value in (SETTINGS[self.kind] | dict(self.arguments)).items()}
        return data if "kind" in data else {"kind": self.kind, **data}


@cache  # layers of one preset share the tensors that their settings cache
def settings_of(written: Written) -> Any:
    """Create the settings described by `written`."""
    from . import options, rotary

    home = rotary if hasattr(rotary, written.kind) else options
    arguments = {
        name: settings_of(value) if isinstance(value, Written) else value for name, value in written.arguments
    }
    return getattr(home, written.kind)(**arguments)


def _written(kind: str, **arguments: Any) -> Written:
    return Written(kind, tuple(arguments.items()))


@dataclass(frozen=True)
class Preset:
    """One attention layer of a model, and how many of them the model has.

    name, title: as it is typed, and as it is written.
    layers: how many such layers; of an encoder with a decoder, the encoder's.
    decoder_layers: those of the decoder, if there is an encoder as well. Each has two attention layers of the
        same sizes: a causal one, and one that attends to the encoder's output (cross-attention).
    note: what of the real model is not in this layer.
    written: rope, relative_bias and qk_norm as they are written; created on use.
    The others are arguments of `MultiHeadAttention`.
    """

    name: str
    title: str
    layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = True
    out_bias: bool | None = None
    causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    written: Mapping[str, Written] = field(default_factory=dict, hash=False)
    alibi: bool = False
    gate: str | None = None
    note: str = ""
    decoder_layers: int = 0

    @property
    def attention_layers(self) -> int:
        """All attention layers: the encoder's or decoder's, and two for each layer of a second stack."""
        return self.layers + 2 * self.decoder_layers

    @property
    def rope(self) -> Rope | None:
        """Positions turned into queries and keys."""
        return self._option("rope")

    @property
    def relative_bias(self) -> Buckets | None:
        """Which distances have a learned number."""
        return self._option("relative_bias")

    @property
    def qk_norm(self) -> QKNorm | None:
        """How queries and keys are normalised."""
        return self._option("qk_norm")

    def _option(self, option: str) -> Any:
        return settings_of(self.written[option]) if option in self.written else None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `MultiHeadAttention`, each by its name."""
        about = ("name", "title", "layers", "decoder_layers", "note")
        return {name: getattr(self, name) for name in ORDER if name not in about}

    @property
    def data(self) -> dict[str, Any]:
        """Everything as numbers and words, options with their kind: for JSON."""
        return {
            name: _plain(self.written.get(name)) if name in WRITTEN_OPTIONS else getattr(self, name)
            for name in ORDER
        }


WRITTEN_OPTIONS = ("rope", "relative_bias", "qk_norm")
ORDER = (
    "name", "title", "layers", "decoder_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "bias",
    "out_bias", "causal", "window", "scale", "softcap", "sinks", "rope", "alibi", "relative_bias", "qk_norm",
    "gate", "note",
)  # fmt: skip


def _plain(value: Any) -> Any:
    return value.data if isinstance(value, Written) else value


WITH_DECODER = (
    "an encoder layer; {0} attention layers are in the encoder, and in the decoder {0} causal ones and {0} "
    "that attend to the encoder's output"
)
T5_BIAS = (
    "the self-attention layers of a stack share the first one's bias; the decoder's buckets are one-way; "
    "cross-attention has no bias"
)
EVERY_OTHER = "one of the layers that see everything; every other one has a window of {}"


def _decoder(name: str, title: str, layers: int, width: int, heads: int, **options: Any) -> Preset:
    return _preset(name, title, layers, width, heads, causal=True, **options)


def _translator(name: str, title: str, layers: int, width: int, heads: int) -> Preset:
    """Return an encoder-decoder of 2017, with as many layers in each stack."""
    note = WITH_DECODER.format(layers)
    return _preset(name, title, layers, width, heads, bias=False, decoder_layers=layers, note=note)


def _t5(name: str, title: str, layers: int, width: int, heads: int, head_dim: int) -> Preset:
    note = f"{WITH_DECODER.format(layers)}; {T5_BIAS}"
    return _preset(
        name, title, layers, width, heads, head_dim=head_dim, bias=False, scale=1.0,
        relative_bias=_written("Buckets"), decoder_layers=layers, note=note,
    )  # fmt: skip


def _rotary(
    name: str, title: str, layers: int, width: int, heads: int, kv: int, base: float = 1e4, **options: Any
) -> Preset:
    """Return a decoder as most are since Llama: no biases, positions turned into q and k."""
    options = {"bias": False, "rope": _written("Rope", base=base), **options}
    return _decoder(name, title, layers, width, heads, num_kv_heads=kv, **options)


def _preset(name: str, title: str, layers: int, width: int, heads: int, **options: Any) -> Preset:
    written = {option: options.pop(option) for option in WRITTEN_OPTIONS if option in options}
    return Preset(name, title, layers, width, heads, written=written, **options)


QUARTER = _written("Rope", dims=24)  # of each head
NORM = _written("QKNorm", eps=1e-6)
YARN_OF_GPT_OSS = _written("Yarn", factor=32.0, original_length=4096, truncate=False)

# fmt: off
PRESETS = {preset.name: preset for preset in (
    # name, title, layers, d_model, num_heads
    _translator("transformer-base", "Transformer base", 6, 512, 8),
    _translator("transformer-big", "Transformer big", 6, 1024, 16),
    Preset("bert-base", "BERT-Base", 12, 768, 12),
    Preset("bert-large", "BERT-Large", 24, 1024, 16),
    Preset("roberta-base", "RoBERTa-Base", 12, 768, 12),
    Preset("distilbert", "DistilBERT", 6, 768, 12),
    _t5("t5-small", "T5-Small", 6, 512, 8, head_dim=64),
    _t5("t5-base", "T5-Base", 12, 768, 12, head_dim=64),
    _t5("t5-3b", "T5-3B", 24, 1024, 32, head_dim=128),
    Preset("vit-b16", "ViT-B/16", 12, 768, 12),
    Preset("vit-l16", "ViT-L/16", 24, 1024, 16),
    _decoder("clip-b32-text", "CLIP ViT-B/32 text", 12, 512, 8),
    _decoder("gpt2-small", "GPT-2 Small", 12, 768, 12),
    _decoder("gpt2-medium", "GPT-2 Medium", 24, 1024, 16),
    _decoder("gpt2-large", "GPT-2 Large", 36, 1280, 20),
    _decoder("gpt2-xl", "GPT-2 XL", 48, 1600, 25),
    _decoder("gpt3", "GPT-3", 96, 12288, 96, note="every other layer is sparse: a local band"),
    _decoder("gpt-neox-20b", "GPT-NeoX 20B", 44, 6144, 64, rope=QUARTER),
    # name, title, layers, d_model, num_heads, num_kv_heads, base
    _rotary("falcon-7b", "Falcon 7B", 32, 4544, 71, 1),
    _rotary("llama2-7b", "Llama 2 7B", 32, 4096, 32, 32),
    _rotary("llama2-70b", "Llama 2 70B", 80, 8192, 64, 8),
    _rotary("llama3-8b", "Llama 3 8B", 32, 4096, 32, 8, 5e5),
    _rotary("llama3-70b", "Llama 3 70B", 80, 8192, 64, 8, 5e5),
    _rotary("llama3-405b", "Llama 3.1 405B", 126, 16384, 128, 8,
            rope=_written("Rope", base=5e5, scaling=_written("Llama3"))),
    _rotary("mistral-7b", "Mistral 7B v0.1", 32, 4096, 32, 8, window=4096,
            note="since v0.2 no window, and base 1e6"),
    _rotary("mixtral-8x7b", "Mixtral 8x7B", 32, 4096, 32, 8, 1e6),
    _rotary("phi3-mini", "Phi-3 mini", 32, 3072, 32, 32, window=2047,
            note="the 4k model; the 128k one has longer angles (LongRoPE) and no such window"),
    _rotary("qwen2.5-7b", "Qwen2.5 7B", 28, 3584, 28, 4, 1e6, bias=True, out_bias=False),
    _rotary("qwen3-0.6b", "Qwen3 0.6B", 28, 1024, 16, 8, 1e6, head_dim=128, qk_norm=NORM),
    _rotary("qwen3-8b", "Qwen3 8B", 36, 4096, 32, 8, 1e6, head_dim=128, qk_norm=NORM),
    _rotary("gemma-2b", "Gemma 2B", 18, 2048, 8, 1, head_dim=256),
    _rotary("gemma-7b", "Gemma 7B", 28, 3072, 16, 16, head_dim=256),
    _rotary("gemma2-9b", "Gemma 2 9B", 42, 3584, 16, 8, head_dim=256, scale=256**-0.5, softcap=50.0,
            note=EVERY_OTHER.format(4096)),
    _rotary("gemma2-27b", "Gemma 2 27B", 46, 4608, 32, 16, head_dim=128, scale=144**-0.5, softcap=50.0,
            note=EVERY_OTHER.format(4096)),
    _rotary("smollm2-135m", "SmolLM2 135M", 30, 576, 9, 3, 1e5),
    _rotary("gpt-oss-20b", "GPT-OSS 20B", 24, 2880, 64, 8, head_dim=64, bias=True, sinks=True,
            rope=_written("Rope", base=150_000.0, scaling=YARN_OF_GPT_OSS),
            note=EVERY_OTHER.format(128)),
)}
# fmt: on


def find(name: str) -> Preset:
    """Return the preset of this name or title, whatever the case and the separators in it.

    Raises:
        ArgumentError: no preset of that name.

    Example:
        >>> find("GPT-2 Small") is find("gpt2_small") is PRESETS["gpt2-small"]
        True
    """
    key = _key(name)
    for preset in PRESETS.values():
        if key in (_key(preset.name), _key(preset.title)):
            return preset
    likely = [preset.name for preset in _containing(key)] or list(PRESETS)
    raise ArgumentError(f"preset must be a known name: got {name!r}; {nearest(str(name).casefold(), likely)}")


def matching(text: str) -> list[Preset]:
    """Return the preset of exactly this name, else all whose name or title contains the text.

    Raises:
        ArgumentError: there is none.

    Example:
        >>> [preset.name for preset in matching("llama 2")]
        ['llama2-7b', 'llama2-70b']
    """
    try:
        return [find(text)]
    except ArgumentError:
        if some := _containing(_key(text)):
            return some
        raise


def _containing(key: str) -> list[Preset]:
    return [p for p in PRESETS.values() if key and (key in _key(p.name) or key in _key(p.title))]


def _key(name: object) -> str:
    """Return letters and digits alone: "GPT-2 Small", "gpt2_small" and "gpt2-small" are the same name."""
    return re.sub(r"[^a-z0-9]", "", str(name).casefold())
