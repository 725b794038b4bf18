"""Watched heads as plain data: what goes into a JSON file, and what a page of heads is made of.

The keys are a promise, and "format" says which one. All that is not finite is None, numbers have six digits.

    format     "headwise heads 1"
    title      of the model, or None
    text       that it read, or None where nobody said
    tokens     of each sequence of the last forward, a list of names each; or None
    layers     {layer, path, kind, num_heads, queries, keys}: kind is "self" or "cross", queries and keys are
               the lengths of its last call
    heads      {layer, head, path, label, score, sentence, roles, numbers}: score is the one that earned the
               label, or None; roles is None where none were asked about; numbers are all that was measured
    labels     {label, heads, sentence}: each that occurs, with how many heads have it, most frequent first
    sentences  what there is to say of all labels that occur
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..heads.collection import Heads
from ..heads.layer import Head
from ..heads.layer_names import Layer
from ..whole_files import place_for, whole_file
from .heads_tables import as_sentences, census

if TYPE_CHECKING:
    from ..heads.roles import Roles

__all__ = ["FORMAT", "as_data", "as_json", "check_json_path", "save_json"]

FORMAT = "headwise heads 1"
DIGITS = 6  # of float32 no more are true


def as_data(
    heads: Heads,
    *,
    chosen: Sequence[tuple[Layer, int]] | None = None,
    text: str | None = None,
    roles: Roles | None = None,
) -> dict[str, Any]:
    """Everything measured of the heads that were chosen, as lists, dicts, texts and numbers.

    Raises:
        ArgumentError: nothing was watched; an unknown layer or head.
    """
    some = heads.chosen(chosen)
    there = {head.path for head in some}
    layers = [layer for layer in heads.values() if layer.place in there]
    counted = census(some)
    sentences = as_sentences(some)
    of_label = {name: sentence for (name, _, _), sentence in zip(counted, sentences, strict=False)}
    return {
        "format": FORMAT,
        "title": _text(heads.title),
        "text": _text(text),
        "tokens": None if heads.tokens is None else [[_text(name) for name in row] for row in heads.tokens],
        "layers": [
            {
                "layer": layer.name,
                "path": layer.place,
                "kind": layer.kind,
                "num_heads": len(layer),
                "queries": layer.calls[-1].shape[2],
                "keys": layer.calls[-1].shape[3],
            }
            for layer in layers
        ],
        "heads": [_head(head, of_label[head.label.name], roles) for head in some],
        "labels": [{"label": name, "heads": count, "sentence": of_label[name]} for name, count, _ in counted],
        "sentences": sentences,
    }


def _head(head: Head, sentence: str, roles: Roles | None) -> dict[str, Any]:
    return {
        "layer": head.layer,
        "head": head.head,
        "path": head.path,
        "label": head.label.name,
        "score": _number(head.label.score),
        "sentence": sentence,
        "roles": None if roles is None else roles.of(head.layer, head.head),
        "numbers": {name: _number(value) for name, value in head.values.items()},
    }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _text(text: str | None) -> str | None:
    """Half characters, which no file in UTF-8 can hold, as the sign that stands for them."""
    return None if text is None else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# As text


def as_json(data: dict[str, Any]) -> str:
    """The data as strict JSON: no NaN, and a line at the end."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def save_json(data: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Write it: all of it or, where anything goes wrong, nothing. Returns where.

    Raises:
        ArgumentError: not a .json; no such folder; a folder that cannot be written to.
    """
    place = check_json_path(out)
    with whole_file(place) as half:
        half.write_text(as_json(data), "utf-8", newline="\n")
    return place


def check_json_path(out: str | os.PathLike[str]) -> Path:
    """Where it may be written, links followed; raises `ArgumentError` as `save_json` does."""
    return place_for(out, (".json",), ".json", "heads.json")
