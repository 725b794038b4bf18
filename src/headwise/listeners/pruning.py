"""`prune` removes heads and their weights; `load_pruned` loads pruned models.

A family defines which weights of a layer belong to which head:

    headwise_layer  headwise's `MultiHeadAttention`
    gpt2_like       q, k and v side by side in one `Conv1D`; in cross-attention q apart
    BERT, ...       query, key and value in one module, the output projection beside it or in it: BERT,
                    RoBERTa, ELECTRA, CamemBERT, XLM-RoBERTa, ViT of that form, ... ; ALBERT; DistilBERT
    LLAMA, ...      q_proj, k_proj, v_proj and o_proj, out_proj or dense, keys and values perhaps shared by
                    groups of heads: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, SmolLM, gpt-oss, ... ; BART,
                    OPT, Whisper, CLIP, ... ; Phi

`nn.Linear` keeps its weight as [out, in], Hugging Face's `Conv1D` as [in, out].

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, needed
from ..heads.layer_names import ByLayer, path_in_words
from ..nn import MultiHeadAttention
from ..nn.options import Slopes
from .chosen_heads import ChosenHeads, Heads, layer_names

KEY = "headwise_pruned_heads"  # as numbered in the unpruned model; in a config {module path: heads}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Pruned:
    """What `prune` did; print it."""

    heads: ByLayer[list[int]]  # numbered as before pruning
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


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def prune(model: nn.Module, heads: Heads) -> Pruned:
    """Remove heads from a model permanently, in place: outputs are those with the heads at zero.

    The projections become smaller. The remaining heads are numbered from 0 again; use the new numbers if you
    prune again. Make optimisers afterwards: an optimiser made before would train the old weights. Projections
    get new parameters with the same dtype, device and requires_grad, and without a gradient. Biases of output
    projections do not change.

    If query heads share key/value heads, prune whole groups, whose key/value heads are then removed, too; or
    prune the same number of query heads in every group.

    The config of a Hugging Face model stores the pruned heads as `headwise_pruned_heads`: after
    `model.save_pretrained(folder)`, `load_pruned(cls, folder)` loads the smaller model. To load any other
    module, build it, prune it in the same way, and load its `state_dict`.

    Args:
        heads: (layer, head) pairs, as in `headwise.ablate`; or a mapping from layers to heads.

    Returns:
        A report of what was pruned. If some of it cannot be pruned, the call raises and changes nothing.

    Raises:
        ArgumentError: an unknown layer or head; a single run of a layer that runs several times; all heads of
            a layer; part of a group; an attention class that `prune` does not support; weights that are
            tied, wrapped or quantised.

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
            f"heads must be pruned in every run of a layer: got {chosen.visited[0]!r}; all runs share its "
            "weights, so leave out the number of the run"
        )
    plan: list[tuple[Prunable, list[int], list[int]]] = []
    removed: dict[str, list[int]] = {}
    counts: dict[str, tuple[int, int]] = {}
    for path in chosen.paths:
        layer = _prunable(model, path)
        pruned_heads = chosen.at(path, layer.num_heads)
        remaining = [head for head in range(layer.num_heads) if head not in pruned_heads]
        if pruned_heads:
            plan.append((layer, remaining, _remaining_kv_heads(layer, remaining)))
            removed[path], counts[path] = pruned_heads, (layer.num_heads, len(remaining))
    before = sum(parameter.numel() for parameter in model.parameters())
    for layer, remaining, remaining_kv in plan:
        layer.keep(remaining, remaining_kv)
        _record_pruned(model, layer.path, removed[layer.path], layer.num_heads)
    after = sum(parameter.numel() for parameter in model.parameters())
    names = layer_names(model)
    return Pruned(ByLayer(removed, names), ByLayer(counts, names), (before, after))


def _prunable(model: nn.Module, path: str) -> Prunable:
    """Return the layer at a path for pruning; raise `ArgumentError` if no family knows it."""
    for family in FAMILIES.values():
        layer = family(model, path)
        if layer is not None:
            return layer
    module = model.get_submodule(path)
    if isinstance(module, nn.MultiheadAttention):
        raise ArgumentError(
            f"model must have attention that can be made smaller: {path_in_words(path)} is torch's "
            f"{type(module).__name__}, whose {module.num_heads} heads always make up embed_dim = "
            f"{module.embed_dim}; replace it by headwise.MultiHeadAttention.from_torch(module), or use "
            "headwise.ablate"
        )
    raise ArgumentError(
        f"model must have attention of a known family to be pruned: {path_in_words(path)} is "
        f"{type(module).__name__}; supported are {', '.join(FAMILIES)}; headwise.ablate switches heads off "
        "in any model"
    )


def _record_pruned(model: nn.Module, path: str, new: list[int], num_heads: int) -> None:
    """Record the pruned heads on a layer, and in the config of the Hugging Face model around it.

    The config is written from the layers only, for a new model may have the config of a pruned one.
    """
    module = model.get_submodule(path)
    earlier = set(getattr(module, KEY, ()))
    numbers = [head for head in range(num_heads + len(earlier)) if head not in earlier]
    setattr(module, KEY, sorted(earlier | {numbers[head] for head in new}))
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    parts = path.split(".") if path else []
    for depth in range(len(parts) + 1):  # the outermost such model
        owner = model.get_submodule(".".join(parts[:depth]))
        if isinstance(owner, PreTrainedModel):
            marked = {name: getattr(inner, KEY, None) for name, inner in owner.named_modules()}
            setattr(owner.config, KEY, {name: heads for name, heads in marked.items() if heads})
            return


# Saved models


def load_pruned(cls_or_model: Any, folder: str | os.PathLike[str], **changes: Any) -> Any:
    """Load a pruned Hugging Face model that `save_pretrained` wrote.

    Builds the model from its config, prunes it as the config says, then loads the weights.

    Args:
        cls_or_model: the model's class, or an AutoModel class; or an unpruned model with the same config,
            which is pruned in place.
        folder: holds config.json and the weights as safetensors.
        changes: settings of the config that replace the saved ones.

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
    directory = Path(folder)
    if not (directory / "config.json").is_file():
        raise ArgumentError(
            f"folder must hold a saved model: no config.json in {str(folder)!r}; use save_pretrained"
        )
    state = _weights(directory)
    if isinstance(cls_or_model, nn.Module):
        if changes:
            raise ArgumentError(
                f"keyword arguments must be given only with a class: got {', '.join(changes)} with a model "
                "that is built already; change its config before you build it"
            )
        model: Any = cls_or_model
        written = json.loads((directory / "config.json").read_text("utf-8")).get(KEY)
    else:
        from transformers import AutoConfig  # an AutoModel class has no config class

        config_class = getattr(cls_or_model, "config_class", None) or AutoConfig
        config = config_class.from_pretrained(directory, **changes)
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
        # some families save under other names, which `from_pretrained` translates back
        model = None if isinstance(cls_or_model, nn.Module) else _from_pretrained(model, directory, written)
        if model is None:
            raise
    return model.eval()


def _from_pretrained(model: Any, folder: Path, written: Heads) -> nn.Module | None:
    """Return the model by `from_pretrained` of a class that prunes itself; None if weights are missing."""
    kind = type(model)

    class PrunedClass(kind):  # type: ignore[misc, valid-type]
        def __init__(self, config: object, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            prune(self, written)

    PrunedClass.__name__ = kind.__name__
    PrunedClass.__module__ = kind.__module__  # the loader looks up the family by it
    loaded, report = PrunedClass.from_pretrained(
        folder, config=model.config, dtype="auto", local_files_only=True, output_loading_info=True
    )
    if any(report.get(name) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return None
    loaded.__class__ = kind
    return loaded


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the saved weights in a folder."""
    with needed("safetensors", "load_pruned needs safetensors"):
        from safetensors.torch import load_file
    files = [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(index.values()))]
    state: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ArgumentError(
                f"folder must hold the weights: no {file.name} in {str(folder)!r}; save them again"
            )
        state |= load_file(file)
    return state


def _load(model: Any, state: dict[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Load saved weights; tied weights are saved once."""
    current = model.state_dict()
    for name, value in state.items():
        if name not in current or current[name].shape != value.shape:
            actual = f"has shape {list(current[name].shape)}" if name in current else "does not exist"
            raise ArgumentError(
                f"folder must hold weights of this model: {name} is {list(value.shape)} in {str(folder)!r} "
                f"and {actual} in {type(model).__name__}; use the class it was saved from"
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


# Description of a layer


@dataclass(frozen=True)
class Prunable:
    """A layer whose heads can be taken out."""

    path: str
    num_heads: int
    num_kv_heads: int
    keep: Callable[[Sequence[int], Sequence[int]], None]  # (heads, key/value heads) that stay


@dataclass(frozen=True)
class Names:
    """The names of a family's attributes."""

    q: str
    k: str
    v: str
    out: str  # with a dot: in the module around the layer
    head_dim: str
    apart: tuple[str, ...] = ()  # other modules of the layer, which do not depend on heads


BERT = Names("query", "key", "value", "output.dense", "attention_head_size")
ALBERT = Names("query", "key", "value", "dense", "attention_head_size", apart=("LayerNorm",))
DISTILBERT = Names("q_lin", "k_lin", "v_lin", "out_lin", "attention_head_size")
LLAMA = Names("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
BART = Names("q_proj", "k_proj", "v_proj", "out_proj", "head_dim")
PHI = Names("q_proj", "k_proj", "v_proj", "dense", "head_dim")


# Cutting projections


def _remaining_kv_heads(layer: Prunable, remaining: Sequence[int]) -> list[int]:
    """Return the key/value heads that stay.

    Raises:
        ArgumentError: no head stays, or groups of different sizes would.
    """
    path, H, Hk = layer.path, layer.num_heads, layer.num_kv_heads
    if not remaining:
        raise ArgumentError(
            f"heads must leave one in every layer: all {H} of {path or 'the model itself'} would be "
            "removed; keep one, or remove the whole layer from the model"
        )
    group = H // Hk
    counts = [sum(head // group == kv_head for head in remaining) for kv_head in range(Hk)]
    if len({count for count in counts if count}) > 1:
        most = max(counts)
        part = " and ".join(
            f"{kv_head} (heads {kv_head * group} to {(kv_head + 1) * group - 1})"
            for kv_head, count in enumerate(counts)
            if 0 < count < most
        )
        raise ArgumentError(
            f"heads must leave groups of one size: in {path_in_words(path)} the {Hk} key/value heads would "
            f"serve {', '.join(map(str, counts))} of {group} query heads each; prune the same number in "
            f"every group, or all of group {part}"
        )
    return [kv_head for kv_head, count in enumerate(counts) if count]


def is_conv1d(layer: object) -> bool:
    """Return True for Hugging Face's `Conv1D`, by its name, for transformers may not be installed."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _channels(heads: Iterable[int], width: int) -> Tensor:
    """Return the channels of heads of `width` each, int [n * width]: 0 1 2 6 7 8 for heads 0 and 2 of 3."""
    numbers = [head * width + i for head in heads for i in range(width)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _check(model: nn.Module, path: str, layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise `ArgumentError` unless these projections, by their names inside the layer, can be cut."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for end, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{end}")
    for name, layer in layers:
        if type(layer) is not nn.Linear and not is_conv1d(layer):
            raise ArgumentError(
                f"model must have plain projections to be pruned: {path}.{name} is {type(layer).__name__}; "
                "merge or remove the wrapper of nn.Linear first"
            )
        for end in ("weight", "bias"):
            parameter = layer._parameters.get(end)
            if parameter is None and end == "bias":
                continue
            if type(parameter) is not nn.Parameter:
                raise ArgumentError(
                    f"model must have plain weights to be pruned: {path}.{name}.{end} is "
                    f"{type(parameter).__name__}; remove masks and quantisation first"
                )
            if len(owners[id(parameter)]) > 1:
                raise ArgumentError(
                    f"model must not share the weights that are pruned: {path}.{name}.{end} is shared with "
                    f"{', '.join(owners[id(parameter)])}; give each a copy first"
                )


def _keep_outputs(layer: nn.Module, channels: Tensor) -> None:
    """Keep only these output channels of a projection."""
    dim, name = (1, "nf") if is_conv1d(layer) else (0, "out_features")
    _cut_parameter(layer, "weight", dim, channels)
    if layer._parameters.get("bias") is not None:
        _cut_parameter(layer, "bias", 0, channels)
    setattr(layer, name, len(channels))


def _keep_inputs(layer: nn.Module, channels: Tensor) -> None:
    """Keep only these input channels of a projection; its bias stays."""
    dim, name = (0, "nx") if is_conv1d(layer) else (1, "in_features")
    _cut_parameter(layer, "weight", dim, channels)
    setattr(layer, name, len(channels))


def _cut_parameter(layer: nn.Module, name: str, dim: int, channels: Tensor) -> None:
    """Replace a parameter by some of its channels.

    A new parameter is made: one whose shape changes breaks the next backward if its last graph is alive.
    """
    old = layer._parameters[name]
    assert old is not None
    new = old.detach().index_select(dim, channels.to(old.device))
    setattr(layer, name, nn.Parameter(new, requires_grad=old.requires_grad))


# The families


COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")  # H
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")  # Hk
GROUPS = ("num_key_value_groups",)  # H / Hk
WIDTHS = ("all_head_size", "inner_dim")  # H * D
INPUT_WIDTHS = ("embed_dim", "hidden_size", "dim", "d_model")  # the model's width, often H * D as well

HEAD_BIAS = re.compile(r"position_bias|relative\w*bias|rel_pos|alibi|slopes")


def headwise_layer(model: nn.Module, path: str) -> Prunable | None:
    """Return the layer at `path` if it is headwise's, else None."""
    module = model.get_submodule(path)
    if not isinstance(module, MultiHeadAttention):
        return None
    if module.local_heads is not None:
        raise ArgumentError(
            f"model must have all heads in one process to be pruned: {path or 'the model itself'} has "
            f"{module.local_heads}; prune before sharding, or switch heads off with headwise.ablate"
        )
    names = ["q_proj", "k_proj", "v_proj", "out_proj", *([] if module.gate_proj is None else ["gate_proj"])]
    _check(model, path, [(name, getattr(module, name)) for name in names])
    if module.qk_norm is not None and module.qk_norm.whole:
        raise ArgumentError(
            f"model must have norms per head to be pruned: {path_in_words(path)} has {module.qk_norm} over "
            "all heads together, which changes if a head is removed; use headwise.ablate"
        )
    bias = module.relative_bias
    users = [name for name, other in model.named_modules(remove_duplicate=False) if other is bias]
    if len(users) > 1:
        raise ArgumentError(
            f"model must not share the weights that are pruned: {users[0]} is shared with "
            f"{', '.join(users[1:])}; give each layer a copy first"
        )

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        D, Dv = module.head_dim, module.value_dim
        _keep_outputs(module.q_proj, _channels(heads, D))
        _keep_outputs(module.k_proj, _channels(kv_heads, D))
        _keep_outputs(module.v_proj, _channels(kv_heads, Dv))
        _keep_inputs(module.out_proj, _channels(heads, Dv))
        if module.sinks is not None:
            _cut_parameter(module, "sinks", 0, _channels(heads, 1))
        if module.gate_proj is not None:
            _keep_outputs(module.gate_proj, _channels(heads, 1 if module.gate == "head" else Dv))
        if module.relative_bias is not None:
            _cut_parameter(module.relative_bias, "weight", 1, _channels(heads, 1))
            module.relative_bias.num_heads = len(heads)
        if module._slopes is not None:
            module._slopes = Slopes(tuple(module._slopes.numbers[head] for head in heads))
        module.num_heads, module.num_kv_heads = len(heads), len(kv_heads)
        module._pack()

    return Prunable(path, module.num_heads, module.num_kv_heads, keep)


def _by_names(choices: Sequence[Names], model: nn.Module, path: str) -> Prunable | None:
    """Return the layer at `path` if it has projections of these names, else None.

    Raises:
        ArgumentError: something else in the layer may depend on its heads.
    """
    module = model.get_submodule(path)
    if not type(module).__module__.startswith("transformers."):
        return None  # in other code these names may mean something else
    parent = model.get_submodule(path.rpartition(".")[0]) if path else None
    for names in choices:
        owner = parent if "." in names.out else module
        out: Any = reduce(lambda part, name: getattr(part, name, None), names.out.split("."), owner)
        has_names = all(hasattr(module, name) for name in (names.q, names.k, names.v, names.head_dim))
        if has_names and out is not None:
            break
    else:
        return None
    q, k, v = (getattr(module, name) for name in (names.q, names.k, names.v))
    _check(model, path, ((names.q, q), (names.k, k), (names.v, v), (names.out, out)))
    D = int(getattr(module, names.head_dim))
    H, Hk = q.out_features // D, k.out_features // D
    if H * D != q.out_features or Hk * D != k.out_features or not Hk or H % Hk or v.out_features % Hk:
        raise _unsupported(path, module, f"{q.out_features}, {k.out_features} and {v.out_features} channels")
    Dv = v.out_features // Hk
    if out.in_features != H * Dv:
        raise _unsupported(path, module, f"{H} heads of {Dv} and {out.in_features} channels into {names.out}")
    _check_dependencies(model, path, module, names, H, D)

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        _keep_outputs(q, _channels(heads, D))
        _keep_outputs(k, _channels(kv_heads, D))
        _keep_outputs(v, _channels(kv_heads, Dv))
        _keep_inputs(out, _channels(heads, Dv))
        if "sinks" in module._parameters:
            _cut_parameter(module, "sinks", 0, _channels(heads, 1))
        count, kv_count = len(heads), len(kv_heads)
        counts = ((COUNTS, H, count), (KV_COUNTS, Hk, kv_count), (WIDTHS, H * D, count * D))
        for attributes, before, after in (*counts, (GROUPS, H // Hk, count // kv_count)):
            for name in attributes:  # every attribute that has the old number
                if getattr(module, name, None) == before:
                    setattr(module, name, after)

    return Prunable(path, H, Hk, keep)


def _check_dependencies(model: nn.Module, path: str, module: nn.Module, names: Names, H: int, D: int) -> None:
    """Raise `ArgumentError` if other parameters, other biases, or the forward depend on the heads."""
    parts = (names.q, names.k, names.v, names.out, *names.apart)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        first = name.partition(".")[0]
        is_shared_norm = "norm" in first.lower() and tuple(value.shape) == (D,)
        is_rotary = name.endswith("inv_freq")
        is_supported = first in parts or is_shared_norm or is_rotary
        if not is_supported and (name != "sinks" or tuple(value.shape) != (H,)):
            raise _unsupported(path, module, f"{name} {list(value.shape)}")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if HEAD_BIAS.search(name):
            raise _unsupported(path, module, f"{name} {list(value.shape)}, which is added to the scores")
    forward = inspect.unwrap(type(module).forward).__code__
    read = forward.co_names
    foreign = [name for name in (*COUNTS, *KV_COUNTS) if name in read and not hasattr(module, name)]
    foreign += [name for name in INPUT_WIDTHS if name in read and getattr(module, name, 0) == H * D]
    foreign += [name for name in INPUT_WIDTHS if name in forward.co_varnames]  # to shape the output
    foreign += [name for name in read if "kv_shared" in name or "shared_kv" in name]
    if foreign:
        raise _unsupported(path, module, f"a forward that reads {', '.join(sorted(set(foreign)))}")


def _unsupported(path: str, module: nn.Module, feature: str) -> ArgumentError:
    """Return the error for a layer that has something that may depend on its heads."""
    return ArgumentError(
        f"model must have attention whose heads are known to be independent: {path} "
        f"({type(module).__name__}) has {feature}; switch its heads off with headwise.ablate instead"
    )


def gpt2_like(model: nn.Module, path: str) -> Prunable | None:
    """Return the layer at `path` if it is GPT-2's or like it, else None."""
    module: Any = model.get_submodule(path)
    has_names = all(
        hasattr(module, name) for name in ("c_attn", "c_proj", "num_heads", "head_dim", "split_size")
    )
    if not has_names or not is_conv1d(module.c_attn):
        return None
    H, D = module.num_heads, module.head_dim
    names = ["c_attn", "c_proj", *(["q_attn"] if hasattr(module, "q_attn") else [])]
    _check(model, path, [(name, getattr(module, name)) for name in names])

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        parts = module.c_attn.nf // (H * D)  # q, k and v, or k and v
        in_parts = [part * H + head for part in range(parts) for head in heads]
        _keep_outputs(module.c_attn, _channels(in_parts, D))
        if "q_attn" in names:
            _keep_outputs(module.q_attn, _channels(heads, D))
        _keep_inputs(module.c_proj, _channels(heads, D))
        module.num_heads, module.split_size = len(heads), len(heads) * D

    return Prunable(path, H, H, keep)


# To add a family, add its function or its names above and an entry here.
FAMILIES: dict[str, Callable[[nn.Module, str], Prunable | None]] = {
    "headwise.MultiHeadAttention": headwise_layer,
    "GPT-2": gpt2_like,
    "BERT and its relatives": partial(_by_names, (ALBERT, DISTILBERT, BERT)),
    "Llama, BART and theirs": partial(_by_names, (LLAMA, BART, PHI)),
}
