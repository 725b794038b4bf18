"""Cases of common calls by group, the most important first.

    calls     `hw.attention` of next to no work beside SDPA, by rule: until the call returns
    rows      one row of one head, read from an existing map, beside that row in eager torch
    modules   hw.MultiHeadAttention beside SDPA by hand and torch's class
    class     hw.nn.MultiheadAttention beside torch's class, by the mask it is told
    watch     models watched, beside the same unwatched and beside Transformers' eager attention
    grid      torch's class from 16 to 2,048 tokens, every mask, every way to ask for weights

They are on no list: `benchmarks.everyday` times them as felt, and its results have tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from .cases.drop_in import drop_in
from .cases.maps import ROWS, THAT_ROW, kept_row
from .cases.modules import BY_HAND, TORCH, module
from .cases.tiny_calls import RULES, SDPA, SDPA_CAUSAL, called
from .cases.watched_families import generating, watched
from .cases.watched_models import CELLS, UNWATCHED
from .registry import Case, Prepared, Sizes

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
SIZES = {"B": 1, "H": 6, "E": 384}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "square": {"causal": True, "square": True},
    "padded": {"padded": True},
    "both": {"causal": True, "padded": True},
    "scattered": {"scattered": True},
}
WEIGHTS = {"plain": None, "mean": "mean", "heads": "heads"}
TINY = {"B": 2, "H": 2, "L": 21, "E": 32}
WAYS = (("inference", False), ("training", True))


def grid(lengths: Sequence[int] = LENGTHS, sizes: Sizes = SIZES) -> list[Case]:
    """Return cases of torch's class at every length: one sequence, without gradients."""
    return [
        Case(
            f"everyday_L{length}_{mask}_{kind}",
            f"torch's class, {length} tokens, mask: {mask}, weights: {kind}",
            partial(drop_in, weights=WEIGHTS[kind], **MASKS[mask]),
            {**sizes, "L": length},
            tiny={**TINY, "B": 1, "L": 13 + length % 11},
            peer=TORCH,
        )
        for length, mask, kind in product(lengths, MASKS, WEIGHTS)
    ]


def _calls() -> list[Case]:
    return [
        Case(
            f"call_{rule}",
            f"attention of 16 tokens, {words}",
            partial(called, rule=rule),
            {"B": 1, "H": 8, "L": 16, "D": 64},
            tiny={"H": 2, "L": 11, "D": 16},
            peer=SDPA_CAUSAL if rule in ("softcap", "sinks") else SDPA,
        )
        for rule, (words, _) in RULES.items()
    ]


def _rows() -> list[Case]:
    sizes = {"B": 1, "H": 32, "Hk": 8, "D": 128, "head": 11}
    return [
        Case(
            f"row_{rule}_L{length}",
            f"one row of one head, read from an existing map, {rule}",
            partial(kept_row, rule=rule),
            {**sizes, "L": length, "row": length * 3 // 4},
            tiny={"H": 4, "Hk": 2, "D": 16, "L": 29, "head": 3, "row": 23},
            peer=THAT_ROW,
            devices=("cpu", "cuda") if length < 2**16 else ("cuda",),
            target=1.5,
        )
        for length, rule in ((1024, "full"), *product((1024, 8192, 131072), ("causal", "window")))
        if rule in ROWS
    ]


# name -> words, sizes, options
GPT2 = {"H": 12, "E": 768}
MODULES: dict[str, tuple[str, Sizes, dict[str, Any]]] = {
    "gpt2_B8_L1024": ("GPT-2 small, causal", {"B": 8, "L": 1024, **GPT2}, {"causal": True}),
    "gpt2_B1_L128": ("GPT-2 small, causal", {"B": 1, "L": 128, **GPT2}, {"causal": True}),
    "gpt2_B8_L1024_padded": (
        "GPT-2 small, causal, padded", {"B": 8, "L": 1024, **GPT2}, {"causal": True, "padded": True},
    ),
    "bert_B32_L512": ("BERT-base", {"B": 32, "L": 512, **GPT2}, {}),
    "bert_B32_L512_padded": ("BERT-base, padded", {"B": 32, "L": 512, **GPT2}, {"padded": True}),
}  # fmt: skip


def _sizes_of(words: Sizes, training: bool) -> dict[str, Any]:
    """Return the sizes of a device; on a CPU the batch is 1 or 2, because 32 takes seconds."""
    return {
        "sizes": {**words, "B": min(words["B"], 2)},
        "on_cuda": words,
        "tiny": TINY,
        "factor": 3.0 if training else 2.0,
    }


def _both_ways(training: bool) -> str:
    return ", forward and backward" if training else ""


def _modules() -> list[Case]:
    return [
        Case(
            f"module_{name}_{way}",
            f"module, {words}{_both_ways(training)}",
            partial(module, training=training, **options),
            peer=BY_HAND,
            **_sizes_of(sizes, training),
        )
        for (name, (words, sizes, options)), (way, training) in product(MODULES.items(), WAYS)
    ]


# name -> words, options: how a causal model tells torch's class its mask
MASK_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "float": ("torch's float mask, is_causal=True", {"square": True}),
    "float_unhinted": ("torch's float mask, is_causal=False", {"square": True, "hint": False}),
    "bool": ("bool mask, is_causal=True", {}),
    "bool_unhinted": ("bool mask, is_causal=False", {"hint": False}),
    "padded": ("bool mask and padding, is_causal=True", {"padded": True}),
    "float_padded": ("torch's float mask and padding, is_causal=True", {"square": True, "padded": True}),
}


def _class() -> list[Case]:
    shapes = {"gpt2_B8_L1024": MODULES["gpt2_B8_L1024"], "gpt2_B1_L128": MODULES["gpt2_B1_L128"]}
    return [
        Case(
            f"class_{name}_{form}_{way}",
            f"torch's class, {words}, {mask}{_both_ways(training)}",
            partial(drop_in, causal=True, training=training, by_hand=True, **options),
            peer=TORCH,
            **_sizes_of(sizes, training),
        )
        for (name, (words, sizes, _)), (form, (mask, options)), (way, training) in product(
            shapes.items(), MASK_FORMS.items(), WAYS
        )
    ]


LLAMA = {"B": 1, "H": 32, "Hk": 8, "D": 128, "N": 8, "I": 14336, "V": 32000}
GEMMA2 = {"B": 1, "H": 8, "Hk": 4, "D": 256, "E": 2304, "N": 8, "I": 9216, "V": 32000, "W": 4096}
SMALL_LLAMA = {"H": 8, "Hk": 4, "D": 64, "N": 4, "I": 1536, "V": 1000}
TINY_LLAMA = {"B": 1, "H": 4, "Hk": 2, "D": 16, "N": 2, "I": 64, "V": 97}
TINY_MODEL = {"B": 2, "H": 2, "D": 16, "L": 37, "N": 2, "I": 64, "V": 97}
GPT2_MODEL = {"B": 8, "H": 12, "D": 64, "L": 1024, "N": 12, "V": 50304}
BERT_MODEL = {"B": 32, "H": 12, "D": 64, "L": 512, "N": 12, "I": 3072, "V": 30522}


TINY_GEMMA2 = {**TINY_LLAMA, "E": 48, "L": 83, "W": 17}
ON_GPUS: dict[str, Any] = {"devices": ("cuda",)}
# name, words, setup, the rest of a case
WATCHED: list[tuple[str, str, Callable[..., Prepared], dict[str, Any]]] = [
    *(
        (
            f"llama_L{length}", "a Llama-shaped model", partial(watched, family="llama"),
            {
                "sizes": {**LLAMA, **SMALL_LLAMA, "L": length}, "on_cuda": {**LLAMA, "L": length},
                "tiny": {**TINY_LLAMA, "L": 83}, **({} if length == 512 else ON_GPUS),
            },
        )
        for length in (512, 2048, 8192)
    ),
    (
        "gpt2_B8_L1024", "GPT-2 small", partial(watched, family="gpt2"),
        {
            "sizes": {**GPT2_MODEL, "B": 1, "L": 256, "N": 4}, "on_cuda": GPT2_MODEL,
            "tiny": {**TINY_MODEL, "L": 71},
        },
    ),
    (
        "bert_B32_L512", "BERT-base, padded", partial(watched, family="bert", padded=True),
        {"sizes": {**BERT_MODEL, "B": 2, "L": 256, "N": 4}, "on_cuda": BERT_MODEL, "tiny": TINY_MODEL},
    ),
    *(
        (
            f"gemma2_L{length}", "a Gemma-2-shaped model", partial(watched, family="gemma2"),
            {"sizes": {**GEMMA2, "L": length}, "tiny": TINY_GEMMA2, **ON_GPUS},
        )
        for length in (2048, 8192)
    ),
    (
        "generate_T64", "64 greedy tokens of a Llama-shaped model", generating,
        {
            "sizes": {**LLAMA, **SMALL_LLAMA, "L": 64, "T": 64}, "on_cuda": {**LLAMA, "L": 512, "T": 64},
            "tiny": {**TINY_LLAMA, "L": 19, "T": 5}, "most_repeats": 5,
        },
    ),
    (
        "llama_L131072", "a Llama-shaped model", partial(watched, family="llama"),
        {"sizes": {**LLAMA, "L": 131072}, "tiny": {**TINY_LLAMA, "L": 97}, "most_repeats": 3, **ON_GPUS},
    ),
]  # fmt: skip


def _watch() -> list[Case]:
    looks = (("", None, "all row statistics"), ("_pictures", CELLS, f"and {CELLS} x {CELLS} pictures"))
    return [
        Case(
            f"watch_{name}{ending}",
            f"{words} watched: {looked}",
            partial(setup, cells=cells),
            peer=UNWATCHED,
            **more,
        )
        for (name, words, setup, more), (ending, cells, looked) in product(WATCHED, looks)
    ]


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "calls": _calls,
    "rows": _rows,
    "modules": _modules,
    "class": _class,
    "watch": _watch,
    "grid": grid,
}


def every() -> list[Case]:
    """Return all cases, group by group."""
    return [case for made in GROUPS.values() for case in made()]


def group_of(name: str) -> str:
    """Return the group of a case, by its name."""
    first = name.split("_", 1)[0]
    return {"call": "calls", "row": "rows", "module": "modules", "everyday": "grid"}.get(first, first)
