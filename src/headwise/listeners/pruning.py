"""`prune`: heads taken out for good, and with them their weights.

What was pruned is written down in a Hugging Face model's config; `load_pruned` brings models back from there.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError, needed
from ..heads.layer_names import ByLayer, names_of
from .chosen_heads import ChosenHeads, Heads
from .model_structure import structure_of
from .prunable_families import Family, Prunable, bert_like, gpt2_like, headwise_own, kept_kv_heads, llama_like

__all__ = [
    "FAMILIES",
    "KEY",
    "Pruned",
    "load_pruned",
    "prune",
    "remember",
]


KEY = "headwise_pruned_heads"  # as numbered in the unpruned model; in a config {module path: heads}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def remember(model: nn.Module, path: str, gone: list[int], num_heads: int) -> None:
    """Write down on a layer which heads are gone, and in the config of the Hugging Face model around it.

    The config is written from the layers alone: a new model may have the config of one that was pruned.

    Args:
        gone: as numbered before this pruning.
        num_heads: how many there were before it.
    """
    module = model.get_submodule(path)
    already = set(getattr(module, KEY, ()))
    stayed = [head for head in range(num_heads + len(already)) if head not in already]
    setattr(module, KEY, sorted(already | {stayed[head] for head in gone}))
    owner = _owner(model, path)
    if owner is not None:
        marked = {name: getattr(inner, KEY, None) for name, inner in owner.named_modules()}
        setattr(owner.config, KEY, {name: heads for name, heads in marked.items() if heads})


def _owner(model: nn.Module, path: str) -> Any:
    """The outermost Hugging Face model around a layer; None: there is none."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    parts = path.split(".") if path else []
    around = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1))
    return next((module for module in around if isinstance(module, PreTrainedModel)), None)


def load_pruned(cls_or_model: Any, folder: str | os.PathLike[str], **changes: Any) -> Any:
    """A pruned Hugging Face model from where `save_pretrained` has put it.

    Builds the model from its config, prunes it as the config says, then loads the weights.

    Args:
        cls_or_model: the model's class, or one of the AutoModel classes; or an unpruned model of that shape,
            which is pruned in place.
        folder: holds config.json and the weights as safetensors.
        changes: settings of the config, instead of those saved.

    Returns:
        The model, in evaluation mode, with the dtype of the saved weights.

    Raises:
        ArgumentError: no such folder or files; a config without pruned heads; weights that do not fit;
            changes for a model that is already built.
        PackageMissing: safetensors is not installed.

    Example:
        >>> folder = "smaller-gpt2"
        >>> model = load_pruned(GPT2LMHeadModel, folder)    # doctest: +SKIP
    """

    place = Path(folder)
    if not (place / "config.json").is_file():
        raise ArgumentError(
            f"folder must hold a saved model: no config.json in {str(folder)!r}; use save_pretrained"
        )
    state = _weights(place)
    if isinstance(cls_or_model, nn.Module):
        if changes:
            raise ArgumentError(
                f"changes must go with a class: got {', '.join(changes)} for a model that is built; "
                "change its config"
            )
        model: Any = cls_or_model
        written = json.loads((place / "config.json").read_text("utf-8")).get(KEY)
    else:
        config = _config_class(cls_or_model).from_pretrained(place, **changes)
        written = getattr(config, KEY, None)
        make = getattr(cls_or_model, "from_config", None) or cls_or_model
        model = make(config) if written else None
    if not written:
        raise ArgumentError(
            f"folder must hold a pruned model: the config in {str(folder)!r} has no {KEY}; "
            "use from_pretrained"
        )
    prune(model, written)
    try:
        _load(model, state, folder)
    except ArgumentError:
        # some families save under other names than their own, which their own loader translates back
        built = isinstance(cls_or_model, nn.Module)
        model = None if built else _by_its_own_loader(model, place, written)
        if model is None:
            raise
    return model.eval()


def _by_its_own_loader(model: Any, place: Path, written: Heads) -> nn.Module | None:
    """The model by `from_pretrained` of a class that is born pruned; None: something is missing still."""

    kind = type(model)

    class BornPruned(kind):  # type: ignore[misc, valid-type]
        def __init__(self, config: object, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            prune(self, written)

    BornPruned.__name__ = kind.__name__
    BornPruned.__module__ = kind.__module__  # where the loader looks for the family's names
    loaded, report = BornPruned.from_pretrained(
        place, config=model.config, dtype="auto", local_files_only=True, output_loading_info=True
    )
    if any(report.get(name) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return None
    loaded.__class__ = kind
    return loaded


def _config_class(cls: object) -> Any:
    config_class = getattr(cls, "config_class", None)
    if config_class is None:  # an AutoModel class: the config tells which model it is
        from transformers import AutoConfig

        return AutoConfig
    return config_class


def _weights(place: Path) -> dict[str, Tensor]:
    with needed("safetensors", "load_pruned needs safetensors"):
        from safetensors.torch import load_file
    files = [place / WEIGHTS]
    if (place / INDEX).is_file():
        index = json.loads((place / INDEX).read_text("utf-8"))["weight_map"]
        files = [place / name for name in sorted(set(index.values()))]
    state: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ArgumentError(
                f"folder must hold the weights: no {file.name} in {str(place)!r}; save them again"
            )
        state |= load_file(file)
    return state


def _load(model: Any, state: dict[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Put saved weights in place; those tied to others are saved once."""
    own = model.state_dict()
    for name, value in state.items():
        if name not in own or own[name].shape != value.shape:
            have = f"has shape {list(own[name].shape)}" if name in own else "does not exist"
            raise ArgumentError(
                f"folder must hold weights of this model: {name} is {list(value.shape)} in {str(folder)!r} "
                f"and {have} in {type(model).__name__}; use the class it was saved from"
            )
    missing = model.load_state_dict(state, strict=False, assign=True).missing_keys
    model.tie_weights()
    loaded = {value.data_ptr() for name, value in model.state_dict().items() if name in state}
    absent = [name for name in missing if model.state_dict()[name].data_ptr() not in loaded]
    if absent:
        raise ArgumentError(
            f"folder must hold all weights of this model: {', '.join(absent[:4])} missing in "
            f"{str(folder)!r}; use the class it was saved from, not {type(model).__name__}"
        )


# To add a family, add its function there and an entry here.
FAMILIES: dict[str, Family] = {
    "headwise.MultiHeadAttention": headwise_own,
    "GPT-2": gpt2_like,
    "BERT and its relatives": bert_like,
    "Llama, BART and theirs": llama_like,
}


@dataclass(frozen=True)
class Pruned:
    """What `prune` did; print it."""

    heads: ByLayer[list[int]]  # as they were numbered before
    num_heads: ByLayer[tuple[int, int]]  # before, after
    parameters: tuple[int, int]  # of the whole model: before, after

    def __str__(self) -> str:
        gone = sum(map(len, self.heads.values()))
        before, after = self.parameters
        saved = f"{before:,} -> {after:,} parameters ({(after - before) / max(1, before):+.1%})"
        lines = [f"{_counted(gone, 'head')} pruned in {_counted(len(self.heads), 'layer')}: {saved}."]
        for path in self.heads.paths:
            was, left = self.num_heads[path]
            named = ", ".join(map(str, self.heads[path]))
            lines.append(f"  {path or '(the model)'}: {was} -> {_counted(left, 'head')}, without {named}")
        return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def prune(model: nn.Module, heads: Heads) -> Pruned:
    """Take heads out of a model for good, in place: what is left computes what the model with those heads at
    zero computes, with smaller projections.

    Heads that stay are numbered anew from 0, so pruning again counts them as they are then. Make optimisers
    afterwards: one made before holds the old weights and would train those. The weights that change are new
    parameters, with the old ones' dtype, device and requires_grad, and no gradient. Biases of output
    projections stay.

    Where several query heads share a key/value head, either all of a group go, and the key/value head with
    them, or the same number in each group that stays.

    What was pruned is written down in a Hugging Face model's config, as `headwise_pruned_heads`: after
    `model.save_pretrained(folder)`, `load_pruned(cls, folder)` brings the smaller model back. Any other
    module is built and pruned again, then takes its `state_dict`.

    Args:
        heads: (layer, head) pairs, as in `headwise.ablate`; or a mapping from layers to heads.

    Returns:
        What was done. Nothing is changed unless all of it can be.

    Raises:
        ArgumentError: an unknown layer or head; a single visit of a shared layer; all heads of a layer; part
            of a group; attention of another family; weights that are tied, wrapped or quantised.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha = MultiHeadAttention(d_model=8, num_heads=4)
        >>> print(prune(mha, [(0, 1), (0, 2)]))
        2 heads pruned in 1 layer: 288 -> 148 parameters (-48.6%).
          (the model): 4 -> 2 heads, without 1, 2
        >>> mha(torch.randn(1, 3, 8))[0].shape
        torch.Size([1, 3, 8])

    Michel 2019, section 4; Voita 2019.
    """
    chosen = ChosenHeads(model, heads)
    if chosen.visited:
        raise ArgumentError(
            f"heads must be pruned in every visit of a layer: got {chosen.visited[0]!r}; its weights are "
            "shared, name it without the visit"
        )
    plan: list[tuple[Prunable, list[int], list[int], list[int]]] = []
    for path in chosen.paths:
        layer = _prunable(model, path)
        gone = chosen.at(path, layer.num_heads)
        kept = [head for head in range(layer.num_heads) if head not in gone]
        if gone:
            plan.append((layer, gone, kept, kept_kv_heads(layer, kept)))
    before = _num_parameters(model)
    for layer, gone, kept, kept_kv in plan:
        layer.keep(kept, kept_kv)
        remember(model, layer.path, gone, layer.num_heads)
    names = names_of(structure_of(model).places)
    return Pruned(
        ByLayer({layer.path: gone for layer, gone, _, _ in plan}, names),
        ByLayer({layer.path: (layer.num_heads, len(kept)) for layer, _, kept, _ in plan}, names),
        (before, _num_parameters(model)),
    )


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _prunable(model: nn.Module, path: str) -> Prunable:
    for family in FAMILIES.values():
        layer = family(model, path)
        if layer is not None:
            return layer
    module = model.get_submodule(path)
    if isinstance(module, nn.MultiheadAttention):
        raise ArgumentError(
            f"model must have attention that can be smaller: {path} is torch's {type(module).__name__}, "
            f"whose {module.num_heads} heads always fill embed_dim = {module.embed_dim}; put "
            "headwise.MultiHeadAttention.from_torch(module) in its place, or use headwise.ablate"
        )
    raise ArgumentError(
        f"model must have attention of a known family to be pruned: {path} is {type(module).__name__}; "
        f"known are {', '.join(FAMILIES)}; headwise.ablate switches heads off in any"
    )
