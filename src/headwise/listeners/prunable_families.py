"""The families of attention that can be pruned: which weights belong to which head.

    headwise_own    headwise's own `MultiHeadAttention`
    bert_like       query, key and value in one module, the output projection beside it or in it: BERT,
                    RoBERTa, ELECTRA, CamemBERT, XLM-RoBERTa, ViT of that form, ... ; ALBERT; DistilBERT
    llama_like      q_proj, k_proj, v_proj and o_proj, out_proj or dense, keys and values perhaps shared by
                    groups of heads: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, SmolLM, gpt-oss, ... ; BART,
                    OPT, Whisper, CLIP, ... ; Phi
    gpt2_like       q, k and v side by side in one `Conv1D`; in cross-attention q apart

Each says how many heads a layer has and how to keep some of them: rows and columns of its projections'
weights are taken out, everything else about them stays. `nn.Linear` keeps its weight as [out, in], Hugging
Face's `Conv1D` as [in, out].

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn import MultiHeadAttention
from ..nn.options import Slopes

__all__ = [
    "Family",
    "Names",
    "Prunable",
    "bert_like",
    "channels",
    "check",
    "cut_parameter",
    "gpt2_like",
    "headwise_own",
    "is_conv1d",
    "keep_inputs",
    "keep_outputs",
    "kept_kv_heads",
    "llama_like",
    "prunable",
]


@dataclass(frozen=True)
class Prunable:
    """A layer whose heads can be taken out.

    Letters: H num_heads, Hk num_kv_heads.
    """

    path: str
    num_heads: int
    num_kv_heads: int
    keep: Callable[[Sequence[int], Sequence[int]], None]  # (heads, key/value heads) that stay


# A family looks at the layer at a path of a model; None: not one of its own.
Family = Callable[[nn.Module, str], Prunable | None]


# Cutting projections


def kept_kv_heads(layer: Prunable, kept: Sequence[int]) -> list[int]:
    """The key/value heads that some query heads need.

    Query heads come in groups of H / Hk that share a key/value head. Groups may go as a whole; those that
    stay must keep the same number of query heads each.

    Raises:
        ArgumentError: no head stays; groups of different sizes would be left.
    """
    path, H, Hk = layer.path, layer.num_heads, layer.num_kv_heads
    if not kept:
        raise ArgumentError(
            f"heads must leave one in every layer: all {H} of {path} would go; keep one, or take the whole "
            "layer out of the model"
        )
    group = H // Hk
    left = [sum(head // group == kv_head for head in kept) for kv_head in range(Hk)]
    if len({count for count in left if count}) > 1:
        most = max(left)
        short = [kv_head for kv_head, count in enumerate(left) if 0 < count < most]
        raise ArgumentError(
            f"heads must leave groups of one size: in {path} the {Hk} key/value heads would serve "
            f"{', '.join(map(str, left))} of {group} query heads each; prune as many in every group, or all "
            f"of group {' and '.join(_span(kv_head, group) for kv_head in short)}"
        )
    return [kv_head for kv_head, count in enumerate(left) if count]


def _span(kv_head: int, group: int) -> str:
    return f"{kv_head} (heads {kv_head * group} to {(kv_head + 1) * group - 1})"


def is_conv1d(layer: object) -> bool:
    """Whether this is Hugging Face's `Conv1D`, told by its name: transformers need not be installed."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def channels(heads: Iterable[int], width: int, start: int = 0) -> Tensor:
    """The channels of some heads that lie one after another from `start`, int [n * width].

    Example:
        >>> channels([0, 2], 3).tolist()
        [0, 1, 2, 6, 7, 8]
    """
    numbers = [start + head * width + i for head in heads for i in range(width)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def check(model: nn.Module, path: str, layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Whether these projections can be cut.

    Args:
        layers: names inside the attention layer at `path`, and the projections.

    Raises:
        ArgumentError: a projection of another class; a weight that is wrapped, or that others use, too.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for end, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{end}")
    for name, layer in layers:
        if type(layer) is not nn.Linear and not is_conv1d(layer):
            raise ArgumentError(
                f"model must have plain projections to be pruned: {path}.{name} is "
                f"{type(layer).__name__}; merge or unwrap what was put around nn.Linear first"
            )
        for end in ("weight", "bias"):
            parameter = layer._parameters.get(end)
            if parameter is None and end == "bias":
                continue
            if type(parameter) is not nn.Parameter:
                raise ArgumentError(
                    f"model must have plain weights to be pruned: {path}.{name}.{end} is "
                    f"{type(parameter).__name__}; take masks and quantisation off first"
                )
            if len(owners[id(parameter)]) > 1:
                raise ArgumentError(
                    f"model must not share the weights that are pruned: {path}.{name}.{end} is one with "
                    f"{', '.join(owners[id(parameter)])}; give each a copy first"
                )


def keep_outputs(layer: nn.Module, kept: Tensor) -> None:
    """Only these channels come out."""
    dim, name = (1, "nf") if is_conv1d(layer) else (0, "out_features")
    cut_parameter(layer, "weight", dim, kept)
    if layer._parameters.get("bias") is not None:
        cut_parameter(layer, "bias", 0, kept)
    setattr(layer, name, len(kept))


def keep_inputs(layer: nn.Module, kept: Tensor) -> None:
    """Only these channels go in; the bias stays."""
    dim, name = (0, "nx") if is_conv1d(layer) else (1, "in_features")
    cut_parameter(layer, "weight", dim, kept)
    setattr(layer, name, len(kept))


def cut_parameter(layer: nn.Module, name: str, dim: int, kept: Tensor) -> None:
    """A new, smaller parameter in the place of one.

    A new one, because a parameter that changes its shape breaks the next backward pass if anything still
    holds the graph of the last.
    """
    old = layer._parameters[name]
    assert old is not None
    new = old.detach().index_select(dim, kept.to(old.device))
    setattr(layer, name, nn.Parameter(new, requires_grad=old.requires_grad))


# A layer of projections with names


COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")  # H
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")  # Hk
GROUPS = ("num_key_value_groups",)  # H / Hk
WIDTHS = ("all_head_size", "inner_dim")  # H * D
OF_INPUTS = ("embed_dim", "hidden_size", "dim", "d_model")  # the model's width, often H * D as well

A_BIAS_OF_HEADS = re.compile(r"position_bias|relative\w*bias|rel_pos|alibi|slopes")


@dataclass(frozen=True)
class Names:
    """What a family calls its parts."""

    q: str
    k: str
    v: str
    out: str
    head_dim: str
    apart: tuple[str, ...] = ()  # other modules in the layer, that know no heads


def prunable(
    model: nn.Module, path: str, module: nn.Module, names: Names, out: nn.Module | None = None
) -> Prunable:
    """The layer, if it is as it seems.

    Args:
        out: the output projection where it lies outside the module.

    Raises:
        ArgumentError: something in it depends on heads in a way that is not known.
    """
    q, k, v = (getattr(module, name) for name in (names.q, names.k, names.v))
    out = getattr(module, names.out) if out is None else out
    check(model, path, ((names.q, q), (names.k, k), (names.v, v), (names.out, out)))
    D = int(getattr(module, names.head_dim))
    H, Hk = q.out_features // D, k.out_features // D
    if H * D != q.out_features or Hk * D != k.out_features or not Hk or H % Hk or v.out_features % Hk:
        raise _strange(path, module, f"{q.out_features}, {k.out_features} and {v.out_features} channels")
    Dv = v.out_features // Hk
    if out.in_features != H * Dv:
        raise _strange(path, module, f"{H} heads of {Dv} and {out.in_features} channels into {names.out}")
    _check_the_rest(model, path, module, names, H, D)

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        keep_outputs(q, channels(heads, D))
        keep_outputs(k, channels(kv_heads, D))
        keep_outputs(v, channels(kv_heads, Dv))
        keep_inputs(out, channels(heads, Dv))
        if "sinks" in module._parameters:
            cut_parameter(module, "sinks", 0, channels(heads, 1))
        _count_anew(module, (H, Hk, H * D), (len(heads), len(kv_heads), len(heads) * D))

    return Prunable(path, H, Hk, keep)


def _count_anew(module: nn.Module, old: tuple[int, int, int], new: tuple[int, int, int]) -> None:
    """Numbers of heads and the widths that follow, wherever the module remembers them."""
    for attributes, before, after in (
        (COUNTS, old[0], new[0]),
        (KV_COUNTS, old[1], new[1]),
        (GROUPS, old[0] // old[1], new[0] // new[1]),
        (WIDTHS, old[2], new[2]),
    ):
        for name in attributes:
            if getattr(module, name, None) == before:
                setattr(module, name, after)


def _check_the_rest(model: nn.Module, path: str, module: nn.Module, names: Names, H: int, D: int) -> None:
    """Other parameters and buffers, biases that come from elsewhere, and what forward counts on."""
    own = (names.q, names.k, names.v, names.out, *names.apart)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        first = name.partition(".")[0]
        of_each_head_alike = "norm" in first.lower() and tuple(value.shape) == (D,)
        of_positions = name.endswith("inv_freq")
        known = first in own or of_each_head_alike or of_positions
        if not known and (name != "sinks" or tuple(value.shape) != (H,)):
            raise _strange(path, module, f"{name} {list(value.shape)}")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if A_BIAS_OF_HEADS.search(name):
            raise _strange(path, module, f"scores to which {name} {list(value.shape)} adds")
    forward = inspect.unwrap(type(module).forward).__code__
    foreign = [
        name for name in (*COUNTS, *KV_COUNTS) if name in forward.co_names and not hasattr(module, name)
    ]
    foreign += [name for name in OF_INPUTS if name in forward.co_names and getattr(module, name, 0) == H * D]
    foreign += [name for name in OF_INPUTS if name in forward.co_varnames]  # to shape the output by
    foreign += [name for name in forward.co_names if "kv_shared" in name or "shared_kv" in name]
    if foreign:
        raise _strange(path, module, f"a forward that reads {', '.join(sorted(set(foreign)))}")


def _strange(path: str, module: nn.Module, what: str) -> ArgumentError:
    return ArgumentError(
        f"model must have attention whose heads are known to be apart: {path} ({type(module).__name__}) has "
        f"{what}; switch its heads off with headwise.ablate instead"
    )


# The families


def headwise_own(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is ours."""
    module = model.get_submodule(path)
    if not isinstance(module, MultiHeadAttention):
        return None
    if module.local_heads is not None:
        raise ArgumentError(
            f"model must have all heads in one process to be pruned: {path or 'the model itself'} has "
            f"{module.local_heads}; prune first, shard then, or switch heads off with headwise.ablate"
        )
    names = ["q_proj", "k_proj", "v_proj", "out_proj", *([] if module.gate_proj is None else ["gate_proj"])]
    check(model, path, [(name, getattr(module, name)) for name in names])
    _check_options(model, path, module)

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        D, Dv = module.head_dim, module.value_dim
        keep_outputs(module.q_proj, channels(heads, D))
        keep_outputs(module.k_proj, channels(kv_heads, D))
        keep_outputs(module.v_proj, channels(kv_heads, Dv))
        keep_inputs(module.out_proj, channels(heads, Dv))
        if module.sinks is not None:
            cut_parameter(module, "sinks", 0, channels(heads, 1))
        if module.gate_proj is not None:
            keep_outputs(module.gate_proj, channels(heads, 1 if module.gate == "head" else Dv))
        if module.relative_bias is not None:
            cut_parameter(module.relative_bias, "weight", 1, channels(heads, 1))
            module.relative_bias.num_heads = len(heads)
        if module._slopes is not None:
            module._slopes = Slopes(tuple(module._slopes.numbers[head] for head in heads))
        module.num_heads, module.num_kv_heads = len(heads), len(kv_heads)
        module._pack()

    return Prunable(path, module.num_heads, module.num_kv_heads, keep)


def _check_options(model: nn.Module, path: str, module: MultiHeadAttention) -> None:
    """What of a module's options cannot be cut.

    Raises:
        ArgumentError: norms over all heads together; a bias that other layers use, too.
    """
    if module.qk_norm is not None and module.qk_norm.whole:
        raise ArgumentError(
            f"model must have norms head by head to be pruned: {path} has {module.qk_norm}, over "
            "all heads together, which would change with any of them; use headwise.ablate"
        )
    bias = module.relative_bias
    if bias is None:
        return
    users = [name for name, other in model.named_modules(remove_duplicate=False) if other is bias]
    if len(users) > 1:
        raise ArgumentError(
            f"model must not share the weights that are pruned: {users[0]} is one with "
            f"{', '.join(users[1:])}; give each layer a copy first"
        )


BERT = Names("query", "key", "value", "output.dense", "attention_head_size")
ALBERT = Names("query", "key", "value", "dense", "attention_head_size", apart=("LayerNorm",))
DISTILBERT = Names("q_lin", "k_lin", "v_lin", "out_lin", "attention_head_size")


def bert_like(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is of this family."""
    module = model.get_submodule(path)
    if not type(module).__module__.startswith("transformers."):
        return None  # strangers may call theirs the same
    for names in (ALBERT, DISTILBERT):
        if all(hasattr(module, name) for name in (names.q, names.k, names.v, names.out, names.head_dim)):
            return prunable(model, path, module, names)
    if not path or not all(hasattr(module, name) for name in (BERT.q, BERT.k, BERT.v, BERT.head_dim)):
        return None
    around = model.get_submodule(path.rpartition(".")[0])
    out = getattr(getattr(around, "output", None), "dense", None)
    return None if out is None else prunable(model, path, module, BERT, out)


LLAMA = Names("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
BART = Names("q_proj", "k_proj", "v_proj", "out_proj", "head_dim")
PHI = Names("q_proj", "k_proj", "v_proj", "dense", "head_dim")


def llama_like(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is of this family."""
    module = model.get_submodule(path)
    if not type(module).__module__.startswith("transformers."):
        return None  # strangers may call theirs the same
    for names in (LLAMA, BART, PHI):
        if all(hasattr(module, name) for name in (names.q, names.k, names.v, names.out, names.head_dim)):
            return prunable(model, path, module, names)
    return None


def gpt2_like(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is of this family."""
    module: Any = model.get_submodule(path)
    known = all(hasattr(module, name) for name in ("c_attn", "c_proj", "num_heads", "head_dim", "split_size"))
    if not known or not is_conv1d(module.c_attn):
        return None
    H, D = module.num_heads, module.head_dim
    names = ["c_attn", "c_proj", *(["q_attn"] if hasattr(module, "q_attn") else [])]
    check(model, path, [(name, getattr(module, name)) for name in names])

    def keep(heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        parts = module.c_attn.nf // (H * D)  # q, k and v, or k and v
        keep_outputs(module.c_attn, torch.cat([channels(heads, D, part * H * D) for part in range(parts)]))
        if "q_attn" in names:
            keep_outputs(module.q_attn, channels(heads, D))
        keep_inputs(module.c_proj, channels(heads, D))
        module.num_heads, module.split_size = len(heads), len(heads) * D

    return Prunable(path, H, H, keep)
