"""Modules whose forward is overridden: headwise's and torch's classes and torch's encoder; and timm's layers.

`torch.nn.MultiheadAttention`, adopted or not, has q, k and v inside one function, and torch's encoder layer
does not call the class on its native path. The hooks of watched modules turn that path off, the nested
tensors of the encoder are turned off as well (its output at padding is still 0), and the class gets a forward
that announces its heads. timm's attention layers have two paths in one forward: the fused one is selected and
heard (`torch_functions.py`).

Letters: B batch, T query_len, S key_len, E embed_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...arguments import REQUIRED
from ...engines.backend import wanted
from ...foreign_masks import from_torch
from ...map import AttentionMap
from ...mask_meaning import fact
from ...mask_rules import can_read
from ...masks import Mask
from ...nn import KVCache, Memory, MultiHeadAttention, ragged
from ...nn.as_torch.adoption import TransformerEncoder, writes_zero_at_padding
from ...nn.as_torch.module import MultiheadAttention
from ...nn.as_torch.torch_arguments import content_of
from ...nn.as_torch.torch_call import TorchCall
from ...nn.options import Inputs, Positions
from ...scoring import Bias
from ..active import announce, note_empty_call, note_query_padding, noted_query_padding, requested_statistics
from ..attachment import Attachment
from ..module_overrides import original_attribute, override_attribute, override_forward
from .attended import attended

# headwise's modules


def hear_headwise(attachment: Attachment) -> None:
    """Let every attention module of headwise announce its calls."""
    modules = attachment.structure.of_kind((MultiHeadAttention,))
    override_forward(attachment.undo, modules, headwise_forward)


def headwise_forward(
    module: MultiHeadAttention,
    query: Tensor = REQUIRED,
    key: Tensor | None = None,
    value: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    *,
    bias: Bias | None = None,
    positions: Positions | None = None,
    cache: KVCache | Memory | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    documents: Tensor | None = None,
    need_weights: bool = True,
    **wrong: Any,
) -> tuple[Tensor, AttentionMap | None]:
    """Do what `MultiHeadAttention.forward` does, and announce the heads' output."""
    if wrong:
        return type(module).forward(
            module, query, key, value, mask, bias=bias, positions=positions, cache=cache, lengths=lengths,
            documents=documents, need_weights=need_weights, **wrong,
        )  # fmt: skip
    inputs = Inputs(query, key, value, mask, bias, positions, cache, lengths, documents)
    if module._sharding is not None:
        return _sharded(module, need_weights, inputs)
    real, inputs = None, module._received(inputs)
    if documents is not None or (lengths is not None and cache is None):
        ragged.check_alone(inputs)
        inputs, real = ragged.as_mask(module, inputs)
    query, key, lengths = inputs.query, inputs.key, inputs.lengths
    with wanted(_requested_statistics(module, query, key)):
        heads, weights, v = module._attend(inputs)
    if not heads.shape[0]:
        note_empty_call()
        return module._handed_on(module._finish(heads, query, lengths)), weights if need_weights else None
    itself = (key is None or key is query) and not isinstance(cache, Memory)
    changed = announce(module, "self" if itself else "cross", weights, v, heads)
    assert changed is not None
    output = ragged.without_padding(module._finish(changed, query, lengths), real)
    return module._handed_on(output), weights if need_weights else None


def _sharded(module: MultiHeadAttention, need_weights: bool, inputs: Inputs) -> Any:
    """Do the same for a module whose sequence is sharded over ranks."""
    assert module._sharding is not None
    result = module._sharding.attend(module, inputs)
    itself = inputs.key is None or inputs.key is inputs.query
    heads = announce(module, "self" if itself else "cross", result.weights, result.values, result.heads)
    assert heads is not None
    output = ragged.without_padding(module._finish(heads, result.query), result.real)
    return output, result.weights if need_weights else None


def _requested_statistics(module: MultiHeadAttention, query: Tensor, key: Tensor | None) -> tuple[str, ...]:
    """Return the row statistics that listeners read of a call, by its length without the cache."""
    keys = query if key is None else key
    if not isinstance(query, Tensor) or not isinstance(keys, Tensor) or query.ndim < 2 or keys.ndim < 2:
        return ()  # the forward raises for it
    shape = (query.shape[:-2].numel(), module.num_heads, query.shape[-2], keys.shape[-2])
    return requested_statistics(shape, query.is_cpu)[0]


# torch's modules


CLASSES = (
    nn.MultiheadAttention,
    MultiheadAttention,
)  # not their subclasses, which may compute something else
ENCODERS = (nn.TransformerEncoder, TransformerEncoder)
NESTED = "use_nested_tensor"  # attribute, for torch's native path only


def hear_torch(attachment: Attachment) -> None:
    """Let every module of torch's attention class announce its calls."""
    encoders = attachment.structure.of_kind((nn.TransformerEncoder,))
    modules = attachment.structure.of_kind(CLASSES)
    undo = attachment.undo
    for module in encoders:
        if NESTED in module.__dict__:
            override_attribute(undo, module, NESTED, False)
    override_forward(undo, [module for module in encoders if type(module) in ENCODERS], encode)
    override_forward(undo, [module for module in modules if type(module) in CLASSES], torch_forward)


def encode(
    module: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Do what torch's encoder does, including 0 at padding, without a nested tensor."""
    padding = src_key_padding_mask
    uses_nested: bool = original_attribute(module, NESTED)
    is_padding_only = mask is None and not is_causal
    if (
        padding is None
        or not is_padding_only
        or not writes_zero_at_padding(module, src, padding, uses_nested)
    ):
        return type(module).forward(module, src, mask, padding, is_causal)
    x = src
    for layer in module.layers:
        x = layer(x, src_mask=None, is_causal=False, src_key_padding_mask=padding)
    x = x.masked_fill((padding if padding.dtype == torch.bool else padding != 0).unsqueeze(-1), 0)
    return x if module.norm is None else module.norm(x)


def torch_forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what torch's forward does, and announce the heads' output."""
    if not query.numel() or not key.numel():
        note_empty_call()
        return type(module).forward(module, query, key, value, *args, **named)
    call = TorchCall(module, query, key, value, *args, **named)
    q, k, v = call.heads()
    (B, _, T, _), itself = q.shape, query is key
    mask, bias = _rules(call, q, k)
    if itself and mask.keys is not None:
        mask = replace(mask, queries=mask.keys[:, :T])
    if itself:
        note_query_padding(module, mask.queries)
    else:
        mask = replace(mask, queries=noted_query_padding(module, B, T))
    kind = "self" if itself else "cross"
    heads, attention_map = attended(module, kind, q, k, v, mask=mask, bias=bias, dropout=call.dropout)
    weights = None
    if call.need_weights:
        weights = attention_map.mean_heads() if call.average else attention_map.dense()
    return call.finish(heads, weights)


def _rules(call: TorchCall, q: Tensor, k: Tensor) -> tuple[Mask, Tensor | None]:
    """Return mask and bias of a call of torch's class; values are read on a CPU only, except padding's."""
    (B, H, T, _), S, more = q.shape, k.shape[2], call.appended or 0
    padding, attn_mask = call.key_padding_mask, call.attn_mask
    if padding is not None and padding.is_floating_point():
        # also read on a GPU, so that padding is not counted in means
        hidden = fact(padding, "as bool", _as_bool) if can_read(padding) else _as_bool(padding)
        padding = padding if hidden is None else hidden
    content = None if attn_mask is None or attn_mask.dim() != 2 else content_of(attn_mask)
    causal = not more and T == S and content is not None and content.causal
    if more:  # every query sees the keys that the module adds
        attn_mask, padding = (None if x is None else pad(x, (0, more)) for x in (attn_mask, padding))
    elif causal:
        attn_mask = None
    mask, bias = from_torch(attn_mask, padding, num_heads=H, query_len=T, key_len=S, batch=B)
    return (mask & Mask.causal() if causal else mask), bias


def _as_bool(padding: Tensor) -> Tensor | None:
    """Return a float mask of 0 and -inf, as torch's encoder makes, as bool; None for any other mask."""
    hidden = padding == -torch.inf
    return None if bool(padding.masked_fill(hidden, 0).any()) else hidden


# timm


FLAG = "fused_attn"


def hear_timm(attachment: Attachment) -> None:
    """Select the fused path in every layer that has the flag."""
    for module in attachment.modules:
        if FLAG in module.__dict__:
            override_attribute(attachment.undo, module, FLAG, True)
