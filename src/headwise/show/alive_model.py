"""A model that a page runs itself: `AliveData` of `page/src/heads/page_data.ts`.

The forward of the page (`page/src/heads/alive/forward.ts`) is that of one kind of decoder, and its tokenizer
byte-level byte pairs. Whatever another model has beside that is refused here by its name: a page that left it
out would show another model's heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..listeners.capture import Tokens, is_punctuation
from ..models.byte_pairs import BytePairs
from ..models.pretrained import Pretrained
from ..models.transformer import Transformer
from ..models.transformer_config import TransformerConfig
from .offline_pages import as_bytes

__all__ = ["EXAMPLE", "alive_data"]

EXAMPLE = "The nurse said that he left because he was tired, and the nurse slept"
PANEL = 8  # channels that the page's kernel makes at a time

# ByteLevel's words (Radford 2019), for JavaScript: \s is another set of letters there.
PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)

KNOWN: Mapping[str, object] = {  # what the page's forward takes for granted
    "kind": "decoder", "positions": None, "token_types": 0, "embedding_scale": 1.0, "embedding_norm": False,
    "activation": "gelu", "gated": False, "norm": "rms", "norm_first": True, "final_norm": True,
    "output": "tied", "bias": False, "qkv_bias": False, "out_bias": False, "num_kv_heads": None,
    "head_dim": None, "scale": None, "softcap": None, "sinks": False, "alibi": False, "relative_bias": None,
    "qk_norm": None, "gate": None, "windows": (None,),
}  # fmt: skip
SIZES = ("vocab_size", "d_model", "num_heads", "num_layers", "d_ff", "max_length", "norm_eps")
BY_ITSELF = ("rope", *SIZES)
IN_TRAINING = ("dropout", "embedding_dropout", "attention_dropout")

NAMES = {  # of a layer's weights: here, and in the page
    "attention_norm": "attention_norm", "attention.q_proj": "query", "attention.k_proj": "key",
    "attention.v_proj": "value", "attention.out_proj": "out", "feed_forward_norm": "feed_forward_norm",
    "feed_forward.up_proj": "up", "feed_forward.down_proj": "down",
}  # fmt: skip

Pack = Callable[[bytes], Any]


def alive_data(pretrained: Pretrained, pack: Pack, example: str = EXAMPLE) -> dict[str, Any]:
    """What a page needs to run a model, `AliveData`; `ArgumentError` where the page cannot compute it.

    Args:
        pack: keeps bytes and says where: a `Blob`.
        example: the text that the page reads first.
    """
    model, tokenizer, title = pretrained
    if not isinstance(model, Transformer):
        raise ArgumentError(
            f"alive must be a headwise.models.Transformer: got {type(model).__name__}; the page runs the "
            'built-in model, load("mini"), and decoders made like it'
        )
    config = model.config
    _check_config(config)
    rope = config.rope
    assert rope is not None, "checked"
    sizes = {name: getattr(config, name) for name in SIZES}
    turned = {"rope_base": rope.base, "rope_dims": rope.turned(config.d_model // config.num_heads)}
    words = _vocabulary(tokenizer, config)
    tensors = {name: {"shape": list(x.shape), "data": pack(_halves(name, x))} for name, x in _tensors(model)}
    special = Tokens(model, tokenizer).special
    ordinary = (number for number in range(len(words["tokens"])) if number not in special)
    marks = [number for number in ordinary if is_punctuation(str(tokenizer.convert_ids_to_tokens(number)))]
    return {
        "title": title,
        "config": sizes | turned,
        "tensors": tensors,
        "tokenizer": words | {"pattern": PATTERN, "special": special, "punctuation": marks},
        "example": example,
    }


# The model


def _check_config(config: TransformerConfig) -> None:
    for each in fields(config):
        if each.name in BY_ITSELF or each.name in IN_TRAINING:
            continue
        value, known = getattr(config, each.name), KNOWN[each.name]
        if each.name == "num_kv_heads" and value == config.num_heads:
            continue
        if each.name == "head_dim" and value is not None and value * config.num_heads == config.d_model:
            continue
        if value != known:
            raise _cannot(each.name, value, f"{each.name}={known!r}")
    rope = config.rope
    if rope is None or rope.interleaved or rope.scaling is not None:
        raise _cannot("rope", rope, "Rope(base, dims), neither interleaved nor scaled")
    heads = config.num_heads
    if config.d_model % (PANEL * heads):
        raise _cannot("d_model", config.d_model, f"a multiple of {PANEL} for each of {heads} heads")
    if config.d_ff % PANEL:
        raise _cannot("d_ff", config.d_ff, f"a multiple of {PANEL}")
    if config.max_length is None:
        raise _cannot("max_length", None, "a number of tokens, such as 512")


def _cannot(name: str, value: object, known: str) -> ArgumentError:
    return ArgumentError(
        f"alive must be a model that the page can compute: it has {name}={value!r}, and the page knows "
        f"{known}; leave alive out, and measure beforehand with effects="
    )


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """By the page's names, in the order in which it unpacks them."""
    config = model.config
    E, F = config.d_model, config.d_ff
    shapes = {"up": [F, E], "down": [E, F], "attention_norm": [E], "feed_forward_norm": [E]}
    wanted = {
        f"decoder.layers.{layer}.{ours}.weight": (f"layers.{layer}.{theirs}", shapes.get(theirs, [E, E]))
        for layer in range(config.num_layers)
        for ours, theirs in NAMES.items()
    }
    wanted |= {
        "embedding.tokens.weight": ("embedding", [config.vocab_size, E]),
        "decoder.norm.weight": ("norm", [E]),
    }
    held = model.state_dict()
    for name in [*held, *wanted]:
        shape = list(held[name].shape) if name in held else None
        expected = wanted.get(name, (name, None))[1]
        if shape != expected:
            raise ArgumentError(
                f"alive must be a model as its config says: {name} is {shape}, and should be {expected}; "
                "give the model as it was before anything was pruned or added"
            )
    for name, (theirs, _) in wanted.items():
        yield theirs, held[name]


def _halves(name: str, x: Tensor) -> bytes:
    """float16, all low bytes before all high ones: zlib makes 7% less of them."""
    x = x.detach().cpu()
    half = x.half()
    strange = ~(half.to(x.dtype) == x)
    if bool(strange.any()):
        raise ArgumentError(
            f"alive must have weights that float16 holds: {name} has {x[strange][0].item():.9g}, and "
            f"{int(strange.sum())} more like it; round them first, model.half().float(), and watch that model"
        )
    return as_bytes(half.contiguous().flatten().view(torch.uint8).unflatten(0, (-1, 2)).T)


# The tokenizer


def _vocabulary(tokenizer: object, config: TransformerConfig) -> dict[str, Any]:
    """Tokens by number, merges in order, and the token that is put in front."""
    if not isinstance(tokenizer, BytePairs):
        raise ArgumentError(
            f"alive must have a tokenizer of headwise: got {type(tokenizer).__name__}; see "
            "headwise.models.BytePairs.of(tokenizer)"
        )
    told = json.loads(tokenizer.to_json())
    model, cut, added = told["model"], told["pre_tokenizer"] or {}, told["added_tokens"]
    start = tokenizer.bos_token_id
    facts = {
        "model": (model["type"], "BPE"),
        "dropout": (model.get("dropout"), None),
        "unk_token": (model.get("unk_token"), None),
        "continuing_subword_prefix": (model.get("continuing_subword_prefix") or None, None),
        "end_of_word_suffix": (model.get("end_of_word_suffix") or None, None),
        "byte_fallback": (model.get("byte_fallback", False), False),
        "ignore_merges": (model.get("ignore_merges", False), False),
        "normalizer": ((told["normalizer"] or {}).get("type"), None),
        "pre_tokenizer": (cut.get("type"), "ByteLevel"),
        "add_prefix_space": (cut.get("add_prefix_space"), False),
        "use_regex": (cut.get("use_regex", True), True),
        "start token": (start is not None, True),
        "end token": (tokenizer.eos_token_id, None),
        "vocab_size": (len(tokenizer), config.vocab_size),
    }
    for token in added:
        wide = any(token[name] for name in ("single_word", "lstrip", "rstrip")) or not token["special"]
        facts[f"added token {token['content']!r}"] = ("of another kind" if wide else "special", "special")
    for name, (value, known) in facts.items():
        if value != known:
            raise ArgumentError(
                f"alive must have a tokenizer that the page can compute: its {name} is {value!r}, and the "
                f"page knows {known!r}; leave alive out"
            )
    entries = model["vocab"] | {token["content"]: token["id"] for token in added}
    by_number = {number: entry for entry, number in entries.items()}
    tokens = [by_number.get(number, "") for number in range(len(tokenizer))]
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "merges": pairs, "start": start}
