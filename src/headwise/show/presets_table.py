"""Presets as a table for the terminal, every figure counted on the module itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from ..budget import readable
from ..nn.multihead import MultiHeadAttention
from ..nn.presets import Preset
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
    """Build the layer without memory (on the meta device) and count.

    Example:
        >>> from headwise.nn.presets import find
        >>> figures(find("bert-base")).parameters  # 4 * (768 * 768 + 768)
        2362368
    """
    layer = MultiHeadAttention(**preset.options, device="meta")
    shared = 0 if layer.relative_bias is None else layer.relative_bias.weight.numel()  # by all layers
    parameters = sum(weight.numel() for weight in layer.parameters()) - shared
    cached = BF16_BYTES * preset.layers * layer.num_kv_heads * (layer.head_dim + layer.value_dim)
    return Figures(
        layer.d_model,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        parameters,
        preset.layers,
        preset.layers * parameters + shared,
        cached if preset.causal else None,
    )


def described(preset: Preset) -> str:
    """The layer's shapes and options in one line.

    Example:
        >>> from headwise.nn.presets import find
        >>> described(find("gpt2-small"))
        '12 heads of 64: [B, T, 768] -> [B, 12, T, 64] -> [B, T, 768], causal'
    """
    return MultiHeadAttention(**preset.options, device="meta").extra_repr()


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
