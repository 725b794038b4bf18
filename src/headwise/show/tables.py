"""Tables and progress bars in the terminal, with rich; titles and definitions of statistics; presets."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from time import monotonic
from typing import TYPE_CHECKING

from ..byte_sizes import readable
from ..errors import needed
from .texts import plain

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

    from ..nn.presets import Preset, Sizes
    from .fitted_tables import FittedTable

HEADERS = {  # name -> what stands above its column: the name, and what the numbers are
    "entropy": "entropy\nnats",
    "effective_keys": "effective\nkeys",
    "confidence": "confi-\ndence",
    "distance": "distance\nkeys",
    "first": "first\nkey",
    "previous": "previous\nkey",
    "itself": "itself",
    "next": "next\nkey",
    "local": "local",
    "max_logit": "max\nlogit",
    "induction": "induc-\ntion",
    "punctuation": "punctu-\nation",
}
WEIGHTS = {  # shares of 1
    "confidence", "first", "previous", "itself", "next", "local", "induction", "duplicate_token", "special",
    "punctuation", "spread", "locality", "streaming", "written_first", "written_special", "induction_stripe",
    "previous_token",
}  # fmt: skip
STRONG = 0.5  # shares from here on are bold
IN_WORDS = {  # name -> its title on a page, and its definition: what it is computed from, range, meaning
    "entropy": ("entropy (nats)", "Entropy of a query's weights, averaged over queries. 0 = all weight on "
    "one key, log n = even over n keys."),
    "effective_keys": ("effective keys", "exp(entropy of a query), averaged over queries. A query with "
    "this many equally weighted keys has the same entropy. At least 1."),
    "confidence": ("confidence", "Largest weight of a query, averaged over queries. From 0 to 1; 1 = all "
    "weight on one key."),
    "distance": (
        "distance (keys)", "Distance from query to key in positions, averaged by weight. 0 = the query's own "
        "key; higher = farther."
    ),
    "first": ("first key", "Weight on the first key, averaged over queries. From 0 to 1; high = an "
    "attention sink."),
    "previous": ("previous key", "Weight on the key just before the query, averaged over queries. From "
    "0 to 1."),
    "itself": ("own key", "Weight on the query's own key, averaged over queries. From 0 to 1."),
    "next": ("next key", "Weight on the key just after the query, averaged over queries. From 0 to 1."),
    "local": ("local", "Weight on keys at most 8 positions away, averaged over queries. "
    "From 0 to 1."),
    "max_logit": ("max logit", "Largest score before the softmax, over all queries and keys. Very high "
    "values make training unstable."),
    "induction": (
        "induction",
        "Weight on the token after an earlier copy of the query's token, averaged over queries with such "
        "a copy. From 0 to 1; high = the head continues repetitions.",
    ),
    "duplicate_token": (
        "duplicate token",
        "Weight on earlier copies of the query's token, averaged over queries with such a copy. From 0 to 1.",
    ),
    "induction_stripe": (
        "induction, random tokens",
        "On random tokens repeated once: weight on the token after the earlier copy, averaged over "
        "queries. From 0 to 1; 0.4 or more = an induction head.",
    ),
    "previous_token": (
        "previous token, random tokens",
        "On random tokens repeated once: weight on the token just before the query, averaged over "
        "queries. From 0 to 1.",
    ),
    "special": ("special tokens", "Weight on special tokens, such as [CLS], averaged over queries. From 0 "
    "to 1."),
    "punctuation": ("punctuation", "Weight on punctuation, averaged over queries. From 0 to 1."),
    "spread": ("spread", "Entropy divided by the largest possible entropy. From 0 to 1; 1 = the same "
    "weight for every visible key."),
    "locality": ("locality", "1 − a / b: a is the weight on keys more than 8 positions away, b is that "
    "weight under uniform attention. 1 = all weight within 8 positions, 0 = a uniform head, below 0 = more "
    "weight far away."),
    "streaming": (
        "streaming",
        "Weight on the first 128 and the latest 256 keys, averaged over the queries that can also see other "
        "keys. From 0 to 1; near 1 = the head needs no other keys.",
    ),
    "written_first": (
        "contribution of the first key",
        "Norm of what the first key contributes to the head's output (weight × ‖v W_O‖), divided by the sum "
        "of these norms over all keys. From 0 to 1.",
    ),
    "written_special": (
        "contribution of special tokens",
        "Sum of the norms of what special tokens contribute to the head's output (weight × ‖v W_O‖), "
        "divided by the sum of these norms over all tokens. From 0 to 1.",
    ),
}  # fmt: skip


def empty_table(title: str | None = None, *, elsewhere: str | None = None) -> FittedTable:
    """Return an empty table that fits any width and cuts no number.

    Args:
        elsewhere: what shows all numbers, for the line that says which columns are not shown.
    """
    table = table_class()
    from rich.box import SIMPLE_HEAD

    shown = None if title is None else as_text(title)
    made = table(box=SIMPLE_HEAD, pad_edge=False, padding=0, title=shown, title_justify="left")
    made.elsewhere = elsewhere
    return made


def table_class() -> type[FittedTable]:
    """Return the table class, a subclass of rich's."""
    with needed("rich", "headwise tables need rich"):
        import rich.table  # noqa: F401 - fitted_tables may be here without it

        from .fitted_tables import FittedTable
    return FittedTable


def as_text(text: str) -> Text:
    """Return a name as Text, without markup or escape codes."""
    from rich.text import Text

    return Text(plain(text))


def as_number(name: str, value: float) -> Text:
    """Return a number as text; shares of at least one half are bold."""
    from rich.text import Text

    if math.isnan(value):  # no query had such a key
        return Text("-", style="dim")
    if name in WEIGHTS:
        return Text(f"{value:.2f}", style="bold" if value >= STRONG else "")
    return Text(f"{value:.2f}" if name == "entropy" else f"{value:.1f}")


LINES = 30.0  # seconds between two


class Bar:
    """Things that are done, of how many, how fast, and how long it will take.

    with Bar("Surveying", "documents") as bar:
        bar.tell(1, 2000)
    """

    def __init__(self, words: str, things: str) -> None:
        self.words, self.things = words, things
        self._bar: Progress | None = None
        self._before: int | None = None  # done when it began
        self._began = self._reported = monotonic()

    def tell(self, done: int, total: int) -> None:
        now = monotonic()
        if self._before is None:
            self._before, self._began = done, now
            self._bar = _drawn(self.words, self.things, done, total)
        rate = (done - self._before) / max(now - self._began, 1e-9)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, rate=f"{rate:,.3g} {self.things}/s")
        elif now - self._reported > LINES and rate:
            self._reported = now
            left = _time((total - done) / rate)
            progress = f"{done:,} of {total:,} {self.things}, {rate:,.3g} a second, {left} left"
            sys.stderr.write(f"{self.words}: {progress}\n")
            sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    Example:
        >>> _time(3725)
        '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _drawn(words: str, things: str, done: int, total: int) -> Progress | None:
    """Start a progress bar; None without a terminal or without rich."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(words, total=total, completed=done, rate=f"0 {things}/s")
    bar.start()
    return bar


BF16_BYTES = 2
COLUMNS = {  # header -> rank: 0 is always there, of the others the smaller stays longer
    "d_model": 0,
    "heads": 0,
    "KV\nheads": 2,
    "d_k": 1,
    "parameters\na layer": 3,
    "attention\nlayers": 5,
    "in all\nlayers": 6,
    "KV cache\na token": 4,
}


@dataclass(frozen=True)
class Figures:
    """What a preset's layer has, counted; and what all its layers have together.

    parameters: of a layer, without a bias that layers share, which counts once per stack in all_parameters.
    attention_layers: in an encoder-decoder those of the encoder, and two in each layer of the decoder.
    cache_bytes: keys and values of one generated token in all layers, in bfloat16; None in encoders, which
        store none. A decoder with cross-attention stores as much again for each token of the source.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    parameters: int
    attention_layers: int
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
    shared = 0  # by the self-attention layers of a stack
    if "relative_bias" in preset.written:
        stacks = 2 if preset.decoder_layers else 1
        shared = stacks * preset.written["relative_bias"].data["count"] * s.num_heads
    generating = preset.decoder_layers or (preset.layers if preset.causal else 0)
    cached = BF16_BYTES * generating * s.num_kv_heads * (s.head_dim + s.value_dim)
    return Figures(
        s.d_model,
        s.num_heads,
        s.num_kv_heads,
        s.head_dim,
        parameters,
        preset.attention_layers,
        preset.attention_layers * parameters + shared,
        cached or None,
    )


def described(preset: Preset) -> str:
    """Return the layer's shapes and options in one line, as its repr has it.

    Example:
        >>> from headwise.nn.presets import find
        >>> described(find("gpt2-small"))
        '12 heads of 64: [B, T, 768] -> [B, 12, T, 64] -> [B, T, 768], causal'
    """
    from ..nn.presets import line

    options = {name: getattr(preset, name) for name in ("window", "scale", "softcap")}
    others = [f"{name}={preset.written[name]}" for name in ("rope", "qk_norm") if name in preset.written]
    others += [f"gate={preset.gate!r}"] if preset.gate else []
    others += ["alibi"] if preset.alibi else []
    others += ["relative_bias"] if "relative_bias" in preset.written else []
    return line(_sizes(preset), preset.causal, options, preset.sinks, others)


def _sizes(preset: Preset) -> Sizes:
    from ..nn.presets import Sizes

    return Sizes.of(preset.d_model, preset.num_heads, preset.num_kv_heads, preset.head_dim)


def presets_table(presets: Iterable[Preset]) -> Table:
    """Return a table with a row per preset. Counts are of attention layers only, of all stacks."""
    table = empty_table(elsewhere="--json")
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
            str(numbers.attention_layers),
            count(numbers.all_parameters),
            "-" if numbers.cache_bytes is None else readable(numbers.cache_bytes),
        )
    return table


def distribution(presets: Iterable[Preset]) -> list[str]:
    """Return how many of these layers have how many heads, and of what size: a line each, most common first.

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
    """List each number that occurs more than once, with its count; the others together."""
    ranked = sorted(Counter(numbers).items(), key=lambda item: (-item[1], item[0]))
    shown = [(number, times) for number, times in ranked if times > 1] or ranked
    words = [f"{number} in {times}" for number, times in shown]
    if len(shown) < len(ranked):
        words.append(f"others in {len(ranked) - len(shown)}")
    if total is not None:
        words[0] += f" of {total}"
    return ", ".join(words)


def count(number: int) -> str:
    """Return a number with three digits and a unit.

    Example:
        >>> count(2_362_368), count(603_979_776), count(999_999), count(999)
        ('2.36 M', '604 M', '1.00 M', '999')
    """
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= 0.9995 * unit:  # what rounds to 1000 of the unit below is 1.00 of this one
            return f"{number / unit:#.3g}".rstrip(".") + f" {letter}"
    return str(number)
