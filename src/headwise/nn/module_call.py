"""The arguments of a `MultiHeadAttention` and of its calls: their checks, and the mask as rules.

One letter parts `MultiHeadAttention` from `torch.nn.MultiheadAttention`, and their masks mean the opposite:
arguments that belong to another class are refused with what to write instead.

Letters: B batch, T query_len, S key_len, E d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy, Tracer

from ..arguments import (
    EMBEDDING,
    OF_EVERY_CALL,
    REQUIRED,
    autocasting,
    check_causal,
    check_dropout,
    nested,
    not_a_tensor,
    our_words,
    text_of,
    window_rule,
)
from ..errors import ArgumentError, MaskError, ShapeError
from ..indexing import fits
from ..mask_meaning import as_integers
from ..mask_rules import dtype_name, is_traced
from ..masks import Mask, mask_of_call
from ..scoring import Scoring
from .packed_weights import PLAIN_TYPES, is_untouched

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

TORCHS_CLASS = "headwise.nn.MultiheadAttention has all arguments of torch's class"
ONE_LETTER = (
    "headwise.MultiheadAttention does not exist: two classes with opposite masks have similar names; use "
    "headwise.MultiHeadAttention (True = may attend), or headwise.nn.MultiheadAttention, which has torch's "
    "arguments (True = may not attend)"
)

OF_THE_CONSTRUCTOR = {
    **our_words(
        d_model="embed_dim hidden_size embed_size dim n_embd",
        num_heads="n_heads n_head nhead heads num_attention_heads",
        num_kv_heads="num_key_value_heads n_kv_heads kv_heads",
        head_dim="d_k d_head dim_head",
        value_dim="d_v",
        bias="qkv_bias use_bias",
        dropout="dropout_p dropout_rate attn_drop attention_dropout",
        causal="is_causal",
        window="window_size sliding_window",
        scale="softmax_scale qk_scale",
        rope="rotary_emb rotary_embedding rotary use_rope",
        alibi="use_alibi alibi_bias",
        relative_bias="position_bias relative_position_bias has_relative_attention_bias rel_pos_bias",
        qk_norm="qk_layernorm use_qk_norm normalize_qk query_key_norm",
        gate="gated use_gate attn_output_gate",
        sinks="attention_sinks use_sinks",
    ),
    "rope_theta": "pass rope=headwise.nn.Rope(base=rope_theta)",
    "rotary_dim": "pass rope=headwise.nn.Rope(dims=rotary_dim)",
    "rope_scaling": "pass rope=headwise.nn.Rope(scaling=headwise.nn.Linear(factor))",
    "rope_parameters": "pass rope=headwise.nn.Rope(base=rope_theta, scaling=..)",
    "num_buckets": "pass relative_bias=headwise.nn.Buckets(count=num_buckets)",
    "batch_first": "inputs are always [batch, length, width] here; transpose others first",
    "add_bias_kv": f"no keys are appended here; {TORCHS_CLASS}",
    "add_zero_attn": f"no keys are appended here; {TORCHS_CLASS}",
    "key_dim": "its name is head_dim here; pass d_model, the width of the inputs, too",
}

CAUSAL_CALL = "pass mask=headwise.Mask.causal(), or make the module with causal=True"
WITH_WEIGHTS = "leave it out: weights come with every call, as output, weights = mha(x)"

OF_A_CALL = {
    **OF_EVERY_CALL,
    **our_words(query="x q hidden_states inputs_q", key="k inputs_k", value="v inputs_v"),
    "attn_mask": "its True = may NOT attend, mask's True = may; pass mask=~attn_mask, or bias= if float",
    "is_causal": CAUSAL_CALL,
    "causal": CAUSAL_CALL,
    "use_causal_mask": CAUSAL_CALL,
    "return_attention_scores": WITH_WEIGHTS,
    "output_attentions": WITH_WEIGHTS,
    "return_attention": WITH_WEIGHTS,
    "training": "call mha.train() or mha.eval() before",
    "input_ids": EMBEDDING,
    "position_ids": "its name is positions here; make the module with rope=",
    "position_embeddings": "make the module with rope=headwise.nn.Rope(base), and pass positions=",
    "position_bias": "its name is bias here, or make the module with relative_bias=",
    "alibi": "pass bias=headwise.scoring.alibi(num_heads), or make the module with alibi=True",
}


def check_options(
    dropout: float,
    window: int | tuple[int, int] | None,
    scale: float | None,
    softcap: float | None,
    head_dim: int,
    causal: bool,
) -> None:
    """Raise for options that no call could use, when the module is created and not at the first call."""
    check_causal(causal)
    check_dropout(dropout)
    if window is not None:
        window_rule(window)
    Scoring.of(head_dim, scale=scale, softcap=softcap)


def lone(key: object, value: object) -> ArgumentError:
    """Return the error about a key without a value, most often a mask in its place, or the reverse."""
    if key is None:
        return ArgumentError(
            f"key must be given with value: got only value={text_of(value)}; use mha(query, key, value)"
        )
    return ArgumentError(
        f"value must be given with key: got only key={text_of(key)}; pass a mask as mha(x, mask=m), and a "
        "memory as mha(query, memory, memory)"
    )


def no_use(positions: object) -> ArgumentError:
    """Return the error about positions for a module that has no use for them."""
    return ArgumentError(
        f"positions must only be given to a module with rope=: got {text_of(positions)}; leave them out, or "
        "make the module with rope=headwise.nn.Rope()"
    )


def check(module: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless these are [B, T, d_model], [B, S, kdim], [B, S, vdim] with the weights' dtype and device.

    Raises:
        ShapeError: dimensions, widths, batches or lengths that do not fit, or a length of 0.
        ArgumentError: not a tensor; a dtype or device other than the weights'.
    """
    check_query(module, query)
    if key is query and value is query and module.kdim == module.vdim == module.d_model:
        return
    check_memory(module, key, value)
    if query.shape[0] != key.shape[0]:
        advice = "inputs are batch first, use transpose(0, 1) if yours are not"
        if key.shape[0] == 1:
            advice = f"for one memory in all sequences use key.expand({query.shape[0]}, -1, -1); {advice}"
        raise ShapeError(f"query and key must agree in batch: {query.shape[0]} and {key.shape[0]}; {advice}")


def check_query(module: MultiHeadAttention, query: Tensor) -> None:
    """Check queries alone; see `check`."""
    _check_input(module, query, "query", "[B, T, d_model]", "d_model", module.d_model, module.q_proj)


def check_memory(module: MultiHeadAttention, key: Tensor, value: Tensor) -> None:
    """Check keys and values alone; see `check`."""
    _check_input(module, key, "key", "[B, S, kdim]", "kdim", module.kdim, module.k_proj)
    if value is not key or module.kdim != module.vdim:
        _check_input(module, value, "value", "[B, S, vdim]", "vdim", module.vdim, module.v_proj)
    if key.shape[:2] != value.shape[:2]:
        raise ShapeError(
            f"key and value must agree in batch and length: {list(key.shape[:2])} and "
            f"{list(value.shape[:2])}; give one value per key"
        )


def check_projected(name: str, x: Tensor, heads: int, width: int) -> None:
    """Raise unless the output of a projection is a plain tensor of so many heads of so many channels.

    Raises:
        ArgumentError: x is a DTensor.
        ShapeError: another width.
    """
    shard = "to shard heads over devices use headwise.parallel.shard_heads(module, mesh)"
    if type(x).__name__ == "DTensor":
        raise ArgumentError(
            f"{name} must give a plain tensor: got a DTensor {list(x.shape)}; "
            f"{shard} instead of parallelize_module"
        )
    if x.shape[-1] != heads * width:
        raise ShapeError(
            f"{name} must give {heads} heads of {width}: got {x.shape[-1]} channels, {list(x.shape)}; {shard}"
        )


def _check_input(
    module: MultiHeadAttention,
    x: Tensor,
    name: str,
    shape: str,
    width_name: str,
    width: int,
    layer: nn.Module,
) -> None:
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    if type(x) not in PLAIN_TYPES and x.is_nested:
        raise nested(name, x, shape, name)
    sizes = x.shape  # read once: while a model is watched each read is a call
    if len(sizes) != 3:
        raise ShapeError(
            f"{name} must have 3 dimensions {shape}: got {x.ndim}, {list(x.shape)}; "
            f"{_three_dimensions(module, x, name, width)}"
        )
    if sizes[2] != width:
        raise ShapeError(
            f"{name} must be {width_name} wide, {shape}: got {x.shape[2]} for {width_name}={width}, "
            f"{list(x.shape)}; make the module with the width of its inputs"
        )
    if not sizes[1]:
        raise ShapeError(f"{name} must not be empty: got {list(x.shape)} for {shape}; skip the call")
    if torch.compiler.is_compiling() or not is_untouched(layer) or autocasting(x):
        return  # a changed layer may take other inputs
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if x.dtype != weight.dtype:
        advice = f"use {name}.to({weight.dtype})"
        if not x.is_floating_point():
            advice = "a mask goes in mask=" if x.dtype == torch.bool else f"{advice}; a mask goes in mask="
        raise ArgumentError(
            f"{name} must have the dtype of the weights: {x.dtype} and {weight.dtype}; {advice}"
        )
    if x.device != weight.device:
        raise ArgumentError(
            f"{name} must be on the device of the weights: {x.device} and {weight.device}; "
            f"use {name}.to({str(weight.device)!r})"
        )


def _three_dimensions(module: MultiHeadAttention, x: Tensor, name: str, width: int) -> str:
    """Return advice for an input that does not have three dimensions."""
    if x.dtype == torch.bool:
        return "a mask goes in mask="
    if x.ndim == 2 and not x.is_floating_point():
        return EMBEDDING
    if x.ndim == 2:
        return f"use {name}[None] for a single sequence"
    if x.ndim == 4 and x.shape[1] * x.shape[3] == width:
        joined = f"{name}.transpose(1, 2).flatten(2)"
    elif x.ndim == 4 and x.shape[2] * x.shape[3] == width:
        joined = f"{name}.flatten(2)"
    elif x.ndim == 4 and x.shape[1] == width:
        return f"use {name}.flatten(2).transpose(1, 2) for an image [B, {width}, height, width]"
    else:
        return "a mask goes in mask="
    return f"the module splits heads itself: use {joined}, or headwise.attention for [B, H, T, D]"


def as_lengths(lengths: Tensor | Sequence[int] | None) -> Tensor:
    """Return the argument `lengths` as int64 [B].

    Raises:
        MaskError: other numbers.
    """
    counts = as_integers(lengths)
    if counts.dtype == torch.bool and counts.ndim == 2:
        raise MaskError(
            f"lengths must be integers [B]: got bool{list(counts.shape)}; use mask.sum(-1) if padding comes "
            "last, else mask=Mask.padding(mask)"
        )
    if not counts.numel() and counts.ndim == 1:
        return counts.long()
    if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool or counts.ndim != 1:
        raise MaskError(
            f"lengths must be integers [B]: got {dtype_name(counts)}{list(counts.shape)}; "
            "give the number of real tokens of each sequence"
        )
    return counts.long()


def check_lengths(counts: Sequence[int], batch: int, length: int) -> None:
    """Raise unless these are lengths of a batch [B, T]."""
    if len(counts) != batch:
        raise ShapeError(
            f"lengths must have one number per sequence: {len(counts)} for a batch of {batch}; "
            "inputs are batch first"
        )
    for count in counts:
        if not 0 <= count <= length:
            raise MaskError(
                f"lengths must be from 0 to the sequence's length: got {count} for {length}; "
                "cut or pad the input"
            )


def rules_of(mask: Mask | Tensor, batch: int, query_len: int, key_len: int, itself: bool) -> Mask:
    """Return the mask as rules; in self-attention padding among the keys is also padding among the queries.

    Raises:
        MaskError: values or dimensions that are no mask, or not this one.
    """
    rules = mask_of_call(mask, batch, query_len)
    allowed = rules.allowed
    if allowed is not None and rules.keys is None and not is_traced():  # a graph may be for other lengths
        same = tuple(allowed.shape[1:]) == (1, 1, key_len)  # for all heads and queries
        if same and fits(allowed.shape[0], batch):
            rules = replace(
                rules, allowed=None, keys=allowed[:, 0, 0].expand(batch, key_len)
            )  # it is padding
    if itself and rules.keys is not None and rules.queries is None:
        rules = replace(rules, queries=rules.keys)
    return rules


def fx_node(module: nn.Module, *arguments: object) -> Any | None:
    """Return the node of a module in the graph of `torch.fx.symbolic_trace`; None if no argument is a Proxy.

    torch's tracer records a module of the package `torch.nn` as one node, and of other modules their
    operations. The operations of headwise's modules depend on dtypes and sizes, which a Proxy does not have,
    so they are recorded as one node, too. A module that is itself the root of the trace cannot be.

    Args:
        arguments: those of `forward`, in its order.

    Raises:
        ArgumentError: a hook on the module, which would run in the graph and once more inside the module.
    """
    tracer = next((x.tracer for x in arguments if isinstance(x, Proxy)), None)
    if not isinstance(tracer, Tracer) or tracer.root is module:
        return None
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    if hooks:
        raise ArgumentError(
            f"{type(module).__name__} must have no hooks under torch.fx.symbolic_trace: got {hooks}; remove "
            "them before tracing, or use torch.export"
        )
    parameters = list(signature(type(module).forward).parameters.values())[1 : len(arguments) + 1]
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for parameter, value in zip(parameters, arguments, strict=True):
        if value is parameter.default or value is REQUIRED:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY or len(args) < parameters.index(parameter):
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), tuple(args), kwargs)
