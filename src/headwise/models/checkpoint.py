"""Trained weights in a `Transformer` of ours: from a model of transformers, or from the files of one.

Weights are copied. Each of theirs must have its place in our model and each of ours must come from somewhere,
or the first that does not is named. The model is built without memory (on "meta") and given theirs, so that
nothing is drawn at random on the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, needed
from .families import Family, family_of
from .own_files import Undrawn
from .transformer import Transformer
from .transformer_config import TransformerConfig

__all__ = ["from_folder", "from_transformers"]

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
INDEX = "model.safetensors.index.json"


def from_transformers(model: nn.Module) -> Transformer:
    """The same model built of headwise's parts, with copies of the weights; in training mode if it is.

    Raises:
        ArgumentError: a model or a config that headwise cannot follow; a weight without a place.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ArgumentError(
            f"model must be a folder, a name or a model of transformers: got {type(model).__name__}; a model "
            "that is loaded goes to headwise.watch as it is"
        )
    fields = config.to_dict()  # type: ignore[union-attr]
    family, name = family_of(fields), type(model).__name__
    if name not in family.classes:
        raise ArgumentError(
            f"model must be one of {', '.join(family.classes)}: got {name}; load what it is built on"
        )
    fields.pop("quantization_config", None)  # of the files it came from: its weights speak for themselves
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    new = _filled(family.config(fields, family.classes[name]), family, state)
    return new.train(model.training)


def from_folder(folder: Path) -> Transformer:
    """The model in a folder with config.json and safetensors, in eval mode. transformers is not asked.

    Raises:
        ArgumentError: a family or a config that headwise cannot follow; a weight without a place; files that
            are not there.
    """
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    family = family_of(fields)
    known = [name for name in fields.get("architectures") or () if name in family.classes]
    with_output = any(family.classes.values()) if not known else family.classes[known[0]]
    return _filled(family.config(fields, with_output), family, dict(_tensors(folder))).eval()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's files: of those the index names, else of model.safetensors, else of all."""
    with needed("safetensors", "weights in files need safetensors"):
        from safetensors import SafetensorError, safe_open
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files = sorted({folder / name for name in listed.values()})
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no dict
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ArgumentError(
                f"model must have all its files: {file.name!r} cannot be read ({error}); fetch it again"
            ) from error


def _filled(config: TransformerConfig, family: Family, theirs: Mapping[str, Tensor]) -> Transformer:
    """Our model with their weights."""
    with Undrawn():
        model = Transformer(config, device="meta")
    state: dict[str, Tensor] = {}
    trained: dict[str, bool] = {}
    for name, tensor in theirs.items():
        for ours, part in _told(family, name, tensor):
            state[ours], trained[ours] = part, tensor.requires_grad
    if config.output == "tied" and "output.weight" in state:
        _check_tied(state.pop("output.weight"), state.get("embedding.tokens.weight"))
    _check_places(model, state)
    model.load_state_dict({name: x.detach().clone() for name, x in state.items()}, assign=True)
    if any(trained.values()):  # of a model in files none is, and all of ours may be trained
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    return model


def _told(family: Family, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """One tensor of theirs as those of ours that it is; none of what stands beside the model."""
    bare = name.removeprefix(family.prefix)
    if family.beside and re.fullmatch(family.beside, bare):
        return
    module, _, kind = bare.rpartition(".")
    kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)  # what the first BERTs called them
    pattern, numbers = NUMBER.sub("*", module), NUMBER.findall(module)
    places = family.names.get(pattern)
    if places is None or kind not in ("weight", "bias"):
        raise ArgumentError(
            f"weights must all have a place: {name!r} {list(tensor.shape)} has none in this family; use the "
            "model as transformers has it"
        )
    if pattern in family.transposed and kind == "weight":
        tensor = tensor.t()
    places = (places,) if isinstance(places, str) else places
    parts = tensor.chunk(len(places)) if len(places) > 1 else (tensor,)
    for place, part in zip(places, parts, strict=True):
        yield f"{place.replace('*', ''.join(numbers))}.{kind}", part


def _check_tied(output: Tensor, tokens: Tensor | None) -> None:
    if tokens is not None and output is not tokens and not torch.equal(output, tokens):
        raise ArgumentError(
            "output must be the embedding where a config ties them: lm_head has other numbers; set "
            "tie_word_embeddings=False in the config"
        )


def _check_places(model: Transformer, state: Mapping[str, Any]) -> None:
    """Raise unless every weight of ours is there, of its shape, in one dtype."""
    wanted = dict(model.named_parameters())
    missing = [name for name in wanted if name not in state]
    if missing:
        raise ArgumentError(
            f"model must have all its weights: {len(missing)} of {len(wanted)} are not there, such as what "
            f"becomes {missing[0]!r}; are these the weights of another model?"
        )
    for name, tensor in state.items():
        if name not in wanted:
            raise ArgumentError(
                f"weights must all have a place: what would be {name!r} {list(tensor.shape)} has none by "
                "this config; are these the weights of another model?"
            )
        if tensor.shape != wanted[name].shape:
            raise ArgumentError(
                f"weights must fit the config: what becomes {name!r} is {list(tensor.shape)} for "
                f"{list(wanted[name].shape)}; are these the weights of another model?"
            )
        if not tensor.is_floating_point():
            raise ArgumentError(
                f"weights must be floating point: what becomes {name!r} is {tensor.dtype}; quantised models "
                "stay with transformers"
            )
