"""Presets as a table for the terminal, every figure counted by the sizes of its layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from ..byte_sizes import readable
from ..nn.presets import Preset, Sizes, line
from .tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Figures", "described", "distribution", "figures", "presets_table"]

BF16_BYTES = 2
COLUMNS = {  # header -> rank: 0 is always there, of the others the smaller stays longer
    "d_model": 0,
    "heads": 0,
    "KV\nheads": 2,
    "d_k": 1,
    "parameters\na layer": 3,
    "layers": 5,
    "in all\nlayers": 6,
    "KV cache\na token": 4,
}


@dataclass(frozen=True)
class Figures:
    """What a preset's layer has, counted; and what all its layers have together.

    parameters: without a bias that all layers share, which counts once in all_parameters.
    cache_bytes: keys and values of one token in all layers, in bfloat16; None in encoders, which keep none.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    parameters: int
    layers: int
    all_parameters: int
    cache_bytes: int | None


def figures(preset: Preset) -> Figures:
    """Count, without building anything: weights, biases, norms and sinks.

    Example:
        >>> from headwise.nn.presets import find
        >>> figures(find("bert-base")).parameters  # 4 * (768 * 768 + 768)
        2362368
    """
    s = _sizes(preset)
    into_heads = s.query_width + s.key_width + s.value_width
    parameters = s.d_model * (into_heads + s.concatenated_width)
    parameters += into_heads if preset.bias else 0
    parameters += s.d_model if (preset.bias if preset.out_bias is None else preset.out_bias) else 0
    parameters += s.num_heads if preset.sinks else 0
    if "qk_norm" in preset.written:
        norm = preset.written["qk_norm"].data
        channels = s.query_width + s.key_width if norm["whole"] else 2 * s.head_dim
        parameters += channels * (2 if norm["kind"] == "layer" else 1)  # with a bias
    shared = 0  # by all layers
    if "relative_bias" in preset.written:
        shared = preset.written["relative_bias"].data["count"] * s.num_heads
    cached = BF16_BYTES * preset.layers * s.num_kv_heads * (s.head_dim + s.value_dim)
    return Figures(
        s.d_model,
        s.num_heads,
        s.num_kv_heads,
        s.head_dim,
        parameters,
        preset.layers,
        preset.layers * parameters + shared,
        cached if preset.causal else None,
    )


def described(preset: Preset) -> str:
    """The layer's shapes and options in one line, as its repr has it.

    Example:
        >>> from headwise.nn.presets import find
        >>> described(find("gpt2-small"))
        '12 heads of 64: [B, T, 768] -> [B, 12, T, 64] -> [B, T, 768], causal'
    """
    options = {name: getattr(preset, name) for name in ("window", "scale", "softcap")}
    others = [f"{name}={preset.written[name]}" for name in ("rope", "qk_norm") if name in preset.written]
    others += [f"gate={preset.gate!r}"] if preset.gate else []
    others += ["alibi"] if preset.alibi else []
    others += ["relative_bias"] if "relative_bias" in preset.written else []
    return line(_sizes(preset), preset.causal, options, preset.sinks, others)


def _sizes(preset: Preset) -> Sizes:
    return Sizes.of(preset.d_model, preset.num_heads, preset.num_kv_heads, preset.head_dim)


def presets_table(presets: Iterable[Preset]) -> Table:
    """One row per preset, at any width. Counts are of attention layers alone, not of the whole model.

    Raises:
        PackageMissing: rich is not installed.
    """
    table = empty_table(elsewhere="--json has every number")
    table.add("name", least=0)
    for header, rank in COLUMNS.items():
        table.add(header, rank=rank)
    for preset in presets:
        numbers = figures(preset)
        table.add_row(
            preset.name,
            str(numbers.d_model),
            str(numbers.num_heads),
            str(numbers.num_kv_heads),
            str(numbers.head_dim),
            count(numbers.parameters),
            str(numbers.layers),
            count(numbers.all_parameters),
            "-" if numbers.cache_bytes is None else readable(numbers.cache_bytes),
        )
    return table


def distribution(presets: Iterable[Preset]) -> list[str]:
    """How many of these layers have how many heads, and of what size: a line each, most common first.

    Example:
        >>> from headwise.nn.presets import matching
        >>> for line in distribution(matching("llama")):
        ...     print(line)
        heads: 32 in 2 of 5, 64 in 2, others in 1; median 64
        d_k: 128 in 5 of 5
        fewer KV heads than heads in 4 of 5: 8 in 4
    """
    layers = [figures(preset) for preset in presets]
    heads, total = [layer.num_heads for layer in layers], len(layers)
    grouped = [layer.num_kv_heads for layer in layers if layer.num_kv_heads < layer.num_heads]
    lines = [
        f"heads: {_common(heads, total)}; median {median_low(heads)}",
        f"d_k: {_common([layer.head_dim for layer in layers], total)}",
        f"fewer KV heads than heads in {len(grouped)} of {total}",
    ]
    if grouped:
        lines[-1] += f": {_common(grouped)}"
    return lines


def _common(numbers: Sequence[int], total: int | None = None) -> str:
    """Each number that stands there more than once, and how often, the others together; or each, if none."""
    ranked = sorted(Counter(numbers).items(), key=lambda item: (-item[1], item[0]))
    shown = [(number, times) for number, times in ranked if times > 1] or ranked
    words = [f"{number} in {times}" for number, times in shown]
    if len(shown) < len(ranked):
        words.append(f"others in {len(ranked) - len(shown)}")
    if total is not None:
        words[0] += f" of {total}"
    return ", ".join(words)


def count(number: int) -> str:
    """Three digits and a unit.

    Example:
        >>> count(2_362_368), count(603_979_776), count(999_999), count(999)
        ('2.36 M', '604 M', '1.00 M', '999')
    """
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= 0.9995 * unit:  # what rounds to 1000 of the unit below is 1.00 of this one
            return f"{number / unit:#.3g}".rstrip(".") + f" {letter}"
    return str(number)
