"""Hugging Face Transformers: the attention function and the mask function are registered, then selected.

Models that dispatch through `ALL_ATTENTION_FUNCTIONS` hand over q, k and v after positions and cache, with
every rule of their softmax: scale, soft cap, sinks, position bias. The names are global to the process, so
one function serves all models and knows a layer by its module.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...masks import Mask
from ..attachment import Attachment
from ..holding import Undo, hold, undo_all
from ..now import padding_now, path_of
from ..places import DISPATCHES, names_in, sounds_cross
from .attending import attended
from .huggingface_masks import CompactMask, compact_mask, own_implementation, rules_of

__all__ = ["install"]

NAME = "headwise"


def install(attachment: Attachment) -> Undo:
    """Select our functions in every config that a dispatching layer reads."""
    configs = attachment.structure.once(NAME, lambda: _configs(attachment.model))
    return undo_all([hold((NAME, id(config)), partial(_select, config)) for config in configs])


class _Selected(str):
    """Our name in a config. A copy or a file of the config has in its place what it says otherwise."""

    own: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ()) if self.own is None else (str, (self.own,))


def _select(config: Any) -> Undo:
    _register()
    own_implementation[id(config)] = config._attn_implementation
    selected = _Selected(NAME)
    selected.own = config._attn_implementation
    config._attn_implementation_internal = selected

    def undo() -> None:
        config._attn_implementation_internal = own_implementation.pop(id(config))

    return undo


def _configs(model: nn.Module) -> list[Any]:
    """The configs that layers which dispatch, and the models around them, read the implementation from."""
    if "transformers" not in sys.modules:
        return []
    found: dict[int, Any] = {}
    for module in model.modules():
        is_one = DISPATCHES in names_in(type(module))
        if is_one or any(DISPATCHES in names_in(type(inner)) for inner in _below_a_model(module)):
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                found[id(config)] = config
    return list(found.values())


def _below_a_model(module: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    return list(module.modules()) if isinstance(module, PreTrainedModel) else []


def _register() -> None:
    """For good: a copy made of a model while it is watched has our name in its config, and must go on."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, compact_mask)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What is registered in `AttentionInterface`.

    Args:
        query: [B, H, T, D]
        key, value: [B, Hk, S, D], not repeated.

    Returns:
        [B, T, H, D], and the weights only where output_attentions asks for them.
    """
    T, S = query.shape[2], key.shape[2]
    cross = _is_cross(module, T, S, attention_mask, is_causal)
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if own_implementation.get(id(getattr(module, "config", None))) == "eager":
            causal = False  # there, no mask hides nothing; elsewhere it leaves the matter to the layer
        rules, bias, used = Mask(right=T - S) if causal and T > 1 else Mask(), None, S
    else:
        rules, bias, used = rules_of(attention_mask, T, S, not cross, query.shape[0])
    if used < S or _is_written_to(key):  # what is filled of a cache; a copy, for the cache goes on changing
        key, value = key[:, :, :used].clone(), value[:, :, :used].clone()
        position_bias = None if position_bias is None else position_bias[..., :used]
    if cross and rules.queries is None:
        rules = replace(rules, queries=padding_now(path_of(module), query.shape[0], T))
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    output, weights = attended(
        module,
        "cross" if cross else "self",
        query, key.to(query.dtype), value.to(query.dtype),
        mask=rules, bias=bias, scale=_number(scaling), softcap=softcap,
        sinks=None if s_aux is None else s_aux.to(query.dtype).flatten(), dropout=dropout,
    )  # fmt: skip
    joined = output.transpose(1, 2).contiguous()  # [B, T, H, D]
    return joined, weights.dense() if others.get("output_attentions") else None


def _is_written_to(key: Tensor) -> bool:
    """Whether keys lie in a buffer that is filled in place, as far as one can know."""
    return key.is_inference() or key._version > 0


def _number(scaling: Any) -> float | None:
    return float(scaling) if isinstance(scaling, Tensor) and not scaling.requires_grad else scaling


def _is_cross(module: nn.Module, T: int, S: int, mask: Any, is_causal: bool | None) -> bool:
    """Whether keys come from elsewhere, as far as a layer lets one know."""
    if getattr(module, "is_cross_attention", False) is True:
        return True
    if sounds_cross(path_of(module)):
        return True
    causal = (
        mask.is_causal if isinstance(mask, CompactMask) else is_causal or getattr(module, "is_causal", False)
    )
    return T not in (1, S) and not causal
