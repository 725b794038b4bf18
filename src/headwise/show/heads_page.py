"""The page of watched heads: one HTML file that works offline.

It holds plain data and packed arrays; `page/src/heads/page_data.ts` documents every field. Its code is built
from `page/` of the repository. All texts of users are escaped. A notebook shows the page in a frame, or, if
it would be too large, only the table of heads, without scripts.

A source is one `Heads`, a reading is one sequence that it read, without padding. Maps of up to `EXACT`
positions a side have a cell per query and key; longer maps are pooled to 128 x 128 cells. All maps together
have at most `MOST_CELLS` cells, about 12 MB; else maps of more than 128, 64 or 32 positions are pooled, too.

Letters: T query_len, S key_len, C checkpoints.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engines.statistics import ROW_STATISTICS, Statistics
from ..errors import ArgumentError, ShapeError
from ..heads.collection import Heads, PageSource
from ..heads.layer import LABELS, MIXED, NOTHING_CLEAR
from ..heads.layer_names import Layer, path_in_words
from ..heads.roles import Roles, rule_in_words
from ..listeners.capture import Tokens, is_punctuation
from ..models.byte_pairs import BytePairs
from ..models.pretrained import Pretrained
from ..models.transformer import Transformer
from ..models.transformer_config import TransformerConfig
from .heads_tables import rounded, table_page
from .heatmaps import OF_LABEL, layer_name
from .offline_pages import Blobs, as_bytes, built, filled, framed, image_data, policy
from .page_readings import (
    DIGITS,
    EXACT,
    Finer,
    Reading,
    Texts,
    View,
    call_data,
    check_finer,
    flips,
    maps_in,
    readings_of,
    row_of,
    side_within,
    strongest_of_labels,
)
from .tables import IN_WORDS, WEIGHTS
from .texts import encodable, plain

if TYPE_CHECKING:
    from ..listeners.effects import Effects
    from ..listeners.head_outputs import HeadOutputs
    from ..models.specialised_heads import Specialisation

EXAMPLE = "heads.html"
FORMAT = "headwise page 1"
MOST_CELLS = 2**24
LONGEST_TEXT = 2000  # characters
OF_NO_LABEL = "#6b6f76"
NOUNS = {"possessed": "possessed noun", "reflexive": "reflexive pronoun", "preposition's noun": "noun"}
NOTEBOOK = 4 * 2**20  # letters of a page that a notebook is given
COARSER = 64  # cells a side, of one that would be larger
NEAR = 8  # positions away, in the definitions of `local` and `locality`
TALL = 860  # of the frame, in dots of the screen


def heads_page(heads: Heads, **options: Any) -> str:
    """Return the page as text; the options are those of `page_data`."""
    return page_of(*page_data(heads, **options))


def page_of(data: dict[str, Any], blobs: Blobs) -> str:
    """Return the page that holds this data."""
    template, style, script = built("heads")
    fill = {
        "POLICY": policy(style=style, script=script, images=True, wasm=True, ask=_asks(data)),
        "STYLE": style,
        "TITLE": html.escape(plain(data["heading"], 120)),
        "DATA": _as_script(data),
        "BLOBS": blobs.text,
        "SCRIPT": script,
    }
    return filled(template, fill)


def _asks(data: Mapping[str, Any]) -> bool:
    """Return True if the page asks the server that it came from."""
    return data["served"] is not None and data["served"]["transport"] == "http"


ESCAPED = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def _as_script(data: dict[str, Any]) -> str:
    """Return JSON that cannot end its script element; lone surrogates are replaced."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return encodable(text).translate(ESCAPED)


def page_data(
    heads: Heads,
    *,
    batch: int | None = None,
    chosen: Sequence[tuple[Layer, int]] | None = None,
    text: str | Sequence[str] | None = None,
    roles: Roles | None = None,
    beside: Heads | Sequence[Heads] = (),
    finer: Sequence[tuple[Layer, int]] | None = None,
    outputs: HeadOutputs | None = None,
    effects: Effects | None = None,
    corpus: PageSource | None = None,
    training: Specialisation | None = None,
    alive: Pretrained | None = None,
    image: Any = None,
    patches: tuple[int, int] | None = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    side: int = EXACT,
) -> tuple[dict[str, Any], Blobs]:
    """Return the data of the page and its packed arrays; see `headwise.Heads.to_html`.

    side: maps of more positions are pooled, as in a notebook.
    """
    others = [beside] if isinstance(beside, Heads) else list(beside)
    for other in others:
        if not isinstance(other, Heads):
            raise ArgumentError(
                f"beside must be Heads, or a list of them: got {type(other).__name__}; watch a model first"
            )
    if training is not None:
        _, L, H = training.shape
        _check_model("training", heads, [H] * L)
    wanted = check_finer(heads, finer)
    sources = [readings_of(heads, batch, chosen, (query_tokens, key_tokens))]
    sources += [readings_of(other, None, chosen if _alike(heads, other) else None) for other in others]
    tokens = max((len(view.keys) for view in sources[0][0].layers if view is not None), default=0)
    picture = image_data(image, patches, len(sources[0]), tokens)
    read_texts = _texts_of(text, [len(readings) for readings in sources])
    views = [view for readings in sources for each in readings for view in each.layers if view is not None]
    side = side_within(views, side, MOST_CELLS)
    blobs = Blobs()
    texts: Texts = {}
    page_sources: list[dict[str, Any]] = []
    for number, readings in enumerate(sources):
        own = number == 0
        mine: list[dict[str, Any]] = []
        for each in readings:
            if wanted is None:
                zoomed = strongest_of_labels(each, side) if not mine else []
            else:  # of another model, or the same on another text: those that it kept maps of
                zoomed = wanted if own else [head for head in wanted if head[0] in maps_in(each)]
            name = f"text {len(mine) + 1}" if len(readings) > 1 else ""
            calls = _calls(each, zoomed, outputs if own else None, side, blobs, texts)
            about = {"name": name, "text": next(read_texts), "heads": heads_data(each), "calls": calls}
            mine.append(about | {"image": picture if own else None})
        page_sources.append(
            {
                "title": plain(readings[0].heads.title or "Model", 120),
                "layers": layers_data(readings[0]),
                "roles": _roles(roles, readings[0]) if own and roles is not None else None,
                "readings": mine,
            }
        )
    count = len(page_sources[0]["readings"][0]["heads"])
    subject = "its head attends" if count == 1 else f"{count} heads attend"
    compared = flips(sources, side)
    over = None if corpus is None else _of_shown(corpus.to_page(heads), sources[0][0])
    data = {
        "format": FORMAT,
        "version": str(sys.modules[__name__.partition(".")[0]].__version__),
        "heading": f"{page_sources[0]['title']}: what {subject} to{'' if over is None else over.pop('over')}",
        "start": start_data(sources, compared),
        "sources": page_sources,
        "texts": [list(names) for names in texts],
        "labels": labels_data(),
        "statistics": statistics_data(page_sources, training, reaches_of(views, alive is not None)),
        "flips": compared,
        "effects": None if effects is None else _of_shown(effects.to_page(heads, batch), sources[0][0]),
        "corpus": over,
        "training": None if training is None else _training(training),
        "alive": None if alive is None else _alive(alive, heads, text, blobs),
        "served": None,
    }
    return data, blobs


def served_page(served: Mapping[str, Any], reading: Reading, heads: list[dict[str, Any]]) -> str:
    """Return the page of a model that Python runs for it: no map is in it, each is asked for.

    Args:
        served: `ServedData` of page_data.ts.
        reading: the first text; `heads` is its `heads_data`.
    """
    views = [view for view in reading.layers if view is not None]
    data = {
        "format": FORMAT,
        "version": str(sys.modules[__name__.partition(".")[0]].__version__),
        "heading": f"{plain(str(served['title']), 120)}: what {len(heads)} heads attend to",
        "start": start_data([[reading]], []),
        "sources": [],
        "texts": [],
        "labels": labels_data(),
        "statistics": statistics_data([{"readings": [{"heads": heads}]}], None, reaches_of(views, False)),
        "flips": [],
        "effects": None,
        "corpus": None,
        "training": None,
        "alive": None,
        "served": dict(served),
    }
    return page_of(data, Blobs())


def start_data(sources: list[list[Reading]], compared: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the head that the page shows first, unless its address names another.

    Two texts: their comparison, and the head that moved most. Else the head with the strongest label.
    """
    if compared and compared[0]["heads"] and sum(map(len, sources)) == 2:
        most = compared[0]["heads"][0]
        return {"layer": most["layer"], "head": most["head"], "comparison": True}
    reading = sources[0][0]
    strongest = max(reading.shown, key=lambda head: head.label.strength)
    return {"layer": reading.places[strongest.path], "head": strongest.head, "comparison": False}


def _check_model(argument: str, heads: Heads, counts: list[int]) -> None:
    """Raise `ArgumentError` unless the counts of heads per layer are those of the watched model."""
    watched = [len(layer) for layer in heads.values()]
    if watched and watched != counts:
        raise ArgumentError(
            f"{argument} must belong to the watched model: {argument} has {len(counts)} layers of "
            f"{counts[0] if counts else 0} heads, the watched model {len(watched)} layers of "
            f"{', '.join(map(str, dict.fromkeys(watched)))}; pass that of this model, and watch all layers"
        )


def _alike(heads: Heads, other: Heads) -> bool:
    """Return True if both have the same layers with as many heads."""
    mine, theirs = (dict(zip(each.paths, map(len, each.values()), strict=True)) for each in (heads, other))
    return mine == theirs


def _texts_of(text: str | Sequence[str] | None, counts: list[int]) -> Iterator[str | None]:
    """Return the text of each reading, None where it is unknown."""
    if text is None or isinstance(text, str):
        texts = [] if text is None else [text]
        if texts and counts[0] > 1:
            raise ArgumentError(
                f"text must have one entry per sequence: got 1 text for {counts[0]} sequences; pass a list, "
                "or batch="
            )
    else:
        texts = list(text)
        if len(texts) not in (counts[0], sum(counts)):
            besides = f" ({sum(counts)} including those of beside=)" * (len(counts) > 1)
            raise ArgumentError(
                f"text must have one entry per sequence: got {len(texts)} texts for {counts[0]} "
                f"sequences{besides}; pass one for each"
            )
    shown: list[str | None] = [plain(" ".join(each.split()), LONGEST_TEXT) for each in texts]
    return iter(shown + [None] * (sum(counts) - len(shown)))


def layers_data(reading: Reading) -> list[dict[str, Any]]:
    return [
        {
            "name": plain(layer_name(layer), 120),
            "path": layer.place,
            "kind": layer.kind,
            "num_heads": len(layer),
        }
        for layer in reading.heads.values()
    ]


def heads_data(reading: Reading) -> list[dict[str, Any]]:
    places = reading.places
    return [
        {
            "layer": places[head.path],
            "head": head.head,
            "label": head.label.name,
            "score": rounded(head.label.score, DIGITS),
            "numbers": {name: rounded(value, DIGITS) for name, value in head.values.items()},
        }
        for head in reading.shown
    ]


def _calls(
    reading: Reading,
    finer: Finer,
    outputs: HeadOutputs | None,
    side: int,
    blobs: Blobs,
    texts: Texts,
) -> list[dict[str, Any] | None]:
    calls: list[dict[str, Any] | None] = []
    for layer, view in zip(reading.heads.values(), reading.layers, strict=True):
        if view is None:
            calls.append(None)
            continue
        some = [head for path, head in finer if path == layer.place]
        layer_outputs = None
        if outputs is not None and layer.path in outputs.paths:
            layer_outputs = outputs[layer.path]
            if reading.batch >= len(layer_outputs):
                raise ShapeError(
                    f"outputs must come from the watched run: got {len(layer_outputs)} sequences in "
                    f"{path_in_words(layer.path)} to show sequence {reading.batch}; enter watch and "
                    "collect in the same `with` block"
                )
            layer_outputs = layer_outputs[row_of(reading.batch, reading.sequences, len(layer_outputs))][None]
        calls.append(call_data(view, layer, side, blobs, texts, finer=some, outputs=layer_outputs))
    return calls


def _of_shown(data: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Keep only the entries of heads that are shown."""
    shown = reading.numbers
    filtered = data | {"heads": [each for each in data["heads"] if (each["layer"], each["head"]) in shown]}
    if "measures" in data:
        filtered["measures"] = [
            each | {"values": [value for value in each["values"] if (value[0], value[1]) in shown]}
            for each in data["measures"]
        ]
    return filtered


def _roles(roles: Roles, reading: Reading) -> dict[str, list[dict[str, Any]]]:
    by_head: dict[str, list[dict[str, Any]]] = {}
    places = reading.places
    names = {head.layer: places[head.path] for head in reading.shown}
    for name, role in roles.found.items():
        for layer, head, share in role.heads:
            if layer not in names:
                continue
            best = (layer, head) == (role.layer, role.head)
            entry = {
                "name": plain(name, 120),
                "share": rounded(share, DIGITS),
                "low": rounded(role.low, DIGITS) if best else None,
                "high": rounded(role.high, DIGITS) if best else None,
                "cases": role.cases,
                "rule": plain(rule_in_words(role.rule), 120),
                "rule_share": rounded(role.rules[role.rule], DIGITS),
                "offset": plain(rule_in_words(role.offset), 120),
                "offset_share": rounded(role.rules[role.offset], DIGITS),
                "sentence": plain(_sentence(name), 400),
            }
            by_head.setdefault(f"{names[layer]}.{head}", []).append(entry)
    return by_head


def _sentence(name: str) -> str:
    """Return the relation of a role as a sentence about a head."""
    near = name.replace("far subject", "subject")
    source, _, target = (NOUNS.get(part, part) for part in near.partition(" > "))
    a = "an" if source.startswith(tuple("aeiou")) else "a"
    words = f"from {a} {source} to its {target}" if target else f"to the {source}"
    return f"attends {words}{'' if near == name else ' when other words are between them'}"


def labels_data() -> list[dict[str, Any]]:
    entries = [
        {
            "name": entry.name,
            "colour": OF_LABEL[entry.name],
            "score": entry.score,
            "threshold": entry.threshold,
            "queries": entry.queries,
            "general": entry.general,
            "sentence": entry.meaning,
        }
        for entry in LABELS
    ]
    none = {"score": "", "threshold": 0.0, "queries": 1, "general": True, "sentence": NOTHING_CLEAR}
    return [*entries, {"name": MIXED, "colour": OF_NO_LABEL} | none]


def reaches_of(views: list[View], alive: bool) -> str:
    """Return the largest distances that counted as near, "8" or "4 or 8"; the page itself counts 8."""
    reaches = {record.reach for view in views for record in view.calls} | ({NEAR} if alive else set())
    return " or ".join(map(str, sorted(reaches or {NEAR})))


def statistics_data(
    sources: list[dict[str, Any]], training: Specialisation | None, reaches: str
) -> list[dict[str, Any]]:
    """Return title and definition of every statistic of the heads, and of what was measured in training."""
    readings = [reading for source in sources for reading in source["readings"]]
    measured = dict.fromkeys(
        name for reading in readings for head in reading["heads"] for name in head["numbers"]
    )
    if training is not None:
        measured |= dict.fromkeys([*training.statistics, *training.roles])
    order = [*(name for name in IN_WORDS if name in measured), *(n for n in measured if n not in IN_WORDS)]
    return [
        {
            "name": name,
            "title": title,
            "sentence": sentence.replace(f"{NEAR} positions", f"{reaches} positions"),
            "share": name in WEIGHTS or " > " in name,
        }
        for name in order
        for title, sentence in [IN_WORDS.get(name) or _own_words(name)]
    ]


def _own_words(name: str) -> tuple[str, str]:
    """Return title and definition of a role, or of a statistic that is not in IN_WORDS."""
    if " > " in name:
        return name, f"Share of cases in which the head {_sentence(name)}. From 0 to 1."
    sentence = Statistics.formula(name).partition("\n")[0] if name in ROW_STATISTICS else name
    return name.replace("_", " "), sentence


def _training(training: Specialisation) -> dict[str, Any]:
    numbers = training.statistics | training.roles
    return {
        "title": plain(training.title, 120),
        "steps": [int(step) for step in training.steps.tolist()],
        "tokens": [int(count) for count in training.tokens.tolist()],
        "losses": [rounded(loss, 4) for loss in training.losses.tolist()],
        "validation": [rounded(loss, 4) for loss in training.validation.tolist()],
        "statistics": {
            name: [[[rounded(x, 4) for x in layer] for layer in checkpoint] for checkpoint in value.tolist()]
            for name, value in numbers.items()
        },
        "labels": [[list(layer) for layer in checkpoint] for checkpoint in training.labels],
    }


def _alive(alive: Pretrained, heads: Heads, text: str | Sequence[str] | None, blobs: Blobs) -> dict[str, Any]:
    first = text if text is None or isinstance(text, str) else next(iter(text), None)
    data = alive_data(alive, blobs.pack, FIRST_TEXT if first is None else first)
    _check_model("alive", heads, [data["config"]["num_heads"]] * data["config"]["num_layers"])
    return data


def in_notebook(heads: Heads) -> str | None:
    """Return the page in a sandboxed frame for a notebook; if it would be larger than 4 MB, with
    coarser maps, or the table alone."""
    if not heads:
        return None
    coarser: dict[str, Any] = {"side": COARSER, "finer": []}
    for options in ({}, coarser):
        try:
            page = heads_page(heads, **options)
        except ArgumentError:  # neither maps nor pictures: the table needs none
            break
        if len(page) <= NOTEBOOK:
            return framed(page, "headwise heads", height=TALL, scripts=True)
    return framed(table_page(heads), "headwise heads", height=720)


# A model that the page runs itself: `AliveData` of `page/src/heads/page_data.ts`
#
# The forward of the page (`page/src/heads/alive/forward.ts`) is that of one kind of decoder, and its
# tokenizer byte-level byte pairs. Whatever another model has beside that is refused here by its name: a page
# that left it out would show another model's heads.


FIRST_TEXT = "The nurse said that he left because he was tired, and the nurse slept"
PANEL = 8  # channels that the page's kernel makes at a time

# ByteLevel's words (Radford 2019), for JavaScript: \s is another set of letters there.
PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)

SUPPORTED: Mapping[str, object] = {  # what the page's forward takes for granted
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


def alive_data(pretrained: Pretrained, pack: Pack, example: str = FIRST_TEXT) -> dict[str, Any]:
    """Return what a page needs to run a model: `AliveData`. Raise `ArgumentError` if the page cannot run it.

    Args:
        pack: keeps bytes and says where: a `Blob`.
        example: the text that the page reads first.
    """
    model, tokenizer, title = pretrained
    if not isinstance(model, Transformer):
        raise ArgumentError(
            f"alive= must be a headwise.models.Transformer: got {type(model).__name__}; use the built-in "
            'model, load("mini"), or a decoder of the same kind'
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


def _check_config(config: TransformerConfig) -> None:
    for each in fields(config):
        if each.name in BY_ITSELF or each.name in IN_TRAINING:
            continue
        value, supported = getattr(config, each.name), SUPPORTED[each.name]
        if each.name == "num_kv_heads" and value == config.num_heads:
            continue
        if each.name == "head_dim" and value is not None and value * config.num_heads == config.d_model:
            continue
        if value != supported:
            raise _cannot(each.name, value, f"{each.name}={supported!r}")
    rope = config.rope
    if rope is None or rope.interleaved or rope.scaling is not None:
        raise _cannot("rope", rope, "Rope(base, dims), neither interleaved nor scaled")
    heads = config.num_heads
    if config.d_model % (PANEL * heads):
        raise _cannot("d_model", config.d_model, f"multiples of {PANEL * heads} ({PANEL} x {heads} heads)")
    if config.d_ff % PANEL:
        raise _cannot("d_ff", config.d_ff, f"a multiple of {PANEL}")
    if config.max_length is None:
        raise _cannot("max_length", None, "a number of tokens, such as 512")


def _cannot(name: str, value: object, supported: str) -> ArgumentError:
    return ArgumentError(
        f"alive= must be a model that the page can run: it has {name}={value!r}, and the page supports "
        f"{supported}; omit alive=, and pass effects= of headwise.effects"
    )


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the page, tensor) in the order in which the page unpacks them."""
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
                f"alive= must have the shapes of its config: {name} has shape {shape} instead of {expected}; "
                "pass a model without pruned or added parameters"
            )
    for name, (theirs, _) in wanted.items():
        yield theirs, held[name]


def _halves(name: str, x: Tensor) -> bytes:
    """Return float16 bytes, all low bytes before all high ones: they compress 7% better."""
    x = x.detach().cpu()
    half = x.half()
    strange = ~(half.to(x.dtype) == x)
    if bool(strange.any()):
        raise ArgumentError(
            f"alive= must have weights exact in float16: {int(strange.sum())} in {name} are not, such as "
            f"{x[strange][0].item():.9g}; round them with model.half().float(), and watch that model"
        )
    return as_bytes(half.contiguous().flatten().view(torch.uint8).unflatten(0, (-1, 2)).T)


def _vocabulary(tokenizer: object, config: TransformerConfig) -> dict[str, Any]:
    """Return the tokens by id, the merges in order, and the start token."""
    if not isinstance(tokenizer, BytePairs):
        raise ArgumentError(
            f"alive= must have a headwise.models.BytePairs tokenizer: got {type(tokenizer).__name__}; "
            "convert it with BytePairs.of(tokenizer)"
        )
    settings = json.loads(tokenizer.to_json())
    model, cut, added = settings["model"], settings["pre_tokenizer"] or {}, settings["added_tokens"]
    start = tokenizer.bos_token_id
    facts = {
        "model": (model["type"], "BPE"),
        "dropout": (model.get("dropout"), None),
        "unk_token": (model.get("unk_token"), None),
        "continuing_subword_prefix": (model.get("continuing_subword_prefix") or None, None),
        "end_of_word_suffix": (model.get("end_of_word_suffix") or None, None),
        "byte_fallback": (model.get("byte_fallback", False), False),
        "ignore_merges": (model.get("ignore_merges", False), False),
        "normalizer": ((settings["normalizer"] or {}).get("type"), None),
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
    for name, (value, supported) in facts.items():
        if value != supported:
            raise ArgumentError(
                f"alive= must have a tokenizer that the page can run: its {name} is {value!r}, and the page "
                f"supports {supported!r}; omit alive="
            )
    entries = model["vocab"] | {token["content"]: token["id"] for token in added}
    by_number = {number: entry for entry, number in entries.items()}
    tokens = [by_number.get(number, "") for number in range(len(tokenizer))]
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "merges": pairs, "start": start}
