"""Conversions of masks of other libraries to `Mask` and back: all of them are in this file.

                   bool True     float                      a query that sees nothing
    headwise       may attend    0 and 1 only               weights 0
    torch.nn       may not       added to the scores        weights NaN
    Hugging Face   may attend    added: 0 or finfo.min      weights 1 / S, its padding among them

What a float mask adds besides hiding keys is returned as a bias, for `attention(..., bias=)`.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from .errors import ArgumentError, MaskError, ShapeError
from .indexing import fits
from .mask_rules import can_read
from .masks import Mask

AS_GOOD_AS_HIDDEN = -9000.0  # models that add -10000 mean "hidden": its weight is 0


class TorchMasks(TypedDict):
    """The mask arguments of `torch.nn.MultiheadAttention`."""

    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    is_causal: bool


def from_torch(
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    num_heads: int,
    query_len: int,
    key_len: int,
    batch: int,
) -> tuple[Mask, Tensor | None]:
    """Return the masks of `torch.nn.MultiheadAttention` as a `Mask` and a bias.

    Bool masks (True = may not attend) go into the `Mask`; float masks are added to the scores, so they are
    the bias, and a float -inf in it hides as well.

    Args:
        attn_mask: [T, S], or [B*H, T, S] with the heads of one sequence side by side.
        key_padding_mask: [B, S].
        is_causal: torch's hint that attn_mask is causal; with attn_mask it is ignored. Alone it means
            j <= i, aligned to the first key, unlike `Mask.causal()` where T != S.

    Returns:
        The mask, and what is to be added to the scores: 4-D, broadcastable to [B, H, T, S], or None.

    Raises:
        MaskError: a mask neither bool nor floating.
        ShapeError: a mask of another shape.

    Example:
        >>> padded = torch.tensor([[False, False, True], [False, True, True]])
        >>> mask, bias = from_torch(key_padding_mask=padded, num_heads=2, query_len=3, key_len=3, batch=2)
        >>> mask, bias
        (Mask(keys=bool[2, 3]), None)
        >>> from_torch(is_causal=True, num_heads=2, query_len=2, key_len=5, batch=1)[0].full(2, 5).int()
        tensor([[[[1, 0, 0, 0, 0],
                  [1, 1, 0, 0, 0]]]], dtype=torch.int32)
    """
    mask, bias = Mask(), None
    if attn_mask is not None:
        spread = _spread(attn_mask, batch, num_heads, query_len, key_len)
        if spread.dtype == torch.bool:
            mask = Mask.dense(~spread)
        else:
            bias = spread
    elif is_causal:
        mask = Mask(right=query_len - key_len)
    if key_padding_mask is not None:
        _check_torch_kind(key_padding_mask, "key_padding_mask")
        if list(key_padding_mask.shape) != [batch, key_len]:
            raise ShapeError(
                f"key_padding_mask must be [B, S] = {[batch, key_len]}: got {list(key_padding_mask.shape)}; "
                "give one value per key, for each sequence"
            )
        if key_padding_mask.dtype == torch.bool:
            mask = mask & Mask.padding(~key_padding_mask)
        else:
            added = key_padding_mask[:, None, None]  # [B, 1, 1, S]
            bias = added if bias is None else bias + added
    return mask, bias


def to_torch(mask: Mask, *, batch: int, num_heads: int, query_len: int, key_len: int) -> TorchMasks:
    """Return the arguments that make `torch.nn.MultiheadAttention` attend as `mask` says.

    What is only about keys becomes a key_padding_mask [B, S]; everything else an attn_mask, [T, S] if all
    sequences and heads share it and [B*H, T, S] if not. Both are bool, True = may not attend. They cannot
    express which queries count in means.

    A query that sees nothing is NaN in torch, where weights are asked for. Modules with add_bias_kv or
    add_zero_attn want is_causal=False: the hint would hide the keys they append.

    Raises:
        MaskError: a rule whose sizes do not fit.

    Example:
        >>> wanted = Mask.causal() & Mask.padding([3, 2])
        >>> masks = to_torch(wanted, batch=2, num_heads=4, query_len=3, key_len=3)
        >>> masks["attn_mask"].int(), masks["is_causal"]
        (tensor([[0, 1, 1],
                [0, 0, 1],
                [0, 0, 0]], dtype=torch.int32), True)
        >>> masks["key_padding_mask"].int()
        tensor([[0, 0, 0],
                [0, 0, 1]], dtype=torch.int32)
        >>> attend = torch.nn.MultiheadAttention(8, 4, batch_first=True)
        >>> x = torch.randn(2, 3, 8)
        >>> output, weights = attend(x, x, x, **masks)
    """
    bound = mask.bind(batch, num_heads, query_len, key_len)
    dense, of_keys = bound.allowed, None
    if dense is not None and tuple(dense.shape[1:3]) == (1, 1):  # the same for every head and query
        dense, of_keys = None, dense
    padding = Mask(keys=bound.keys, allowed=of_keys)
    rest = replace(bound, keys=None, queries=None, allowed=dense)

    padded = hidden = None
    if not padding.hides_nothing:
        real = padding.full(query_len, key_len, batch, num_heads)  # [B or 1, 1, 1, S or 1]
        padded = ~real[:, 0, 0].expand(batch, key_len)
    if not rest.hides_nothing:
        visible = rest.full(query_len, key_len, batch, num_heads)
        if visible.shape[0] == visible.shape[1] == 1:
            hidden = ~visible[0, 0].expand(query_len, key_len)
        else:
            hidden = ~visible.expand(batch, num_heads, query_len, key_len).flatten(0, 1)
    return {
        "attn_mask": hidden,
        "key_padding_mask": padded,
        "is_causal": query_len == key_len and _is_causal(rest, key_len),
    }


def from_huggingface(
    attention_mask: Tensor | None, *, query_len: int | None = None
) -> tuple[Mask, Tensor | None]:
    """Return an attention_mask of Hugging Face Transformers as a `Mask` and a bias.

    Args:
        attention_mask: one of
            None, which hides nothing;
            [B, S] of 0 and 1, 1 = real, padded on either side: what a tokenizer gives. It says nothing of
            causality: join `& Mask.causal()` where the model is a decoder;
            [B, 1 or H, T or 1, S] bool or integers, True = may attend;
            [B, 1 or H, T or 1, S] float, added to the scores. Half of finfo.min or less is "hidden".
        query_len: T, in self-attention: the queries are the last T of the S positions, and means leave
            out the padded ones. Without it, as in cross-attention, every query counts.

    Returns:
        The mask, and what a float mask adds besides hiding (position biases, ALiBi), or None. Whether it
        adds anything is looked up only where that is free; elsewhere the bias may be all zeros.

    In 4-D masks the padded queries of left-padded text often see nothing: Hugging Face spreads their
    weight evenly over all keys, padding too. Here their weights are 0, and means leave them out.

    Raises:
        MaskError: numbers other than 0 and 1 in a mask that is not additive; a 4-D float mask of 0 and 1,
            which added to the scores would hide nothing.
        ShapeError: neither 2-D nor 4-D; query_len that does not fit.

    Example:
        >>> left_padded = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        >>> mask, bias = from_huggingface(left_padded, query_len=5)
        >>> (mask & Mask.causal()).full(5, 5, batch=2)[0, 0].int()
        tensor([[0, 0, 0, 0, 0],
                [0, 0, 0, 0, 0],
                [0, 0, 1, 0, 0],
                [0, 0, 1, 1, 0],
                [0, 0, 1, 1, 1]], dtype=torch.int32)
        >>> mask.counted(5)[0].int()
        tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    """
    if attention_mask is None:
        return Mask(), None
    if attention_mask.ndim == 2:
        return _from_tokenizer(attention_mask, query_len), None
    if attention_mask.ndim != 4:
        raise ShapeError(
            f"attention_mask must be [B, S] or [B, 1 or H, T, S]: got {attention_mask.ndim} dimensions "
            f"{list(attention_mask.shape)}; pass [B, T, S] as attention_mask[:, None]"
        )
    if query_len is not None and not fits(attention_mask.shape[2], query_len):
        raise ShapeError(
            f"attention_mask must have one row per query: got {attention_mask.shape[2]} for {query_len} "
            "queries; pass only the rows of these queries"
        )
    if attention_mask.is_floating_point():
        return _from_additive(attention_mask)
    return Mask.dense(attention_mask), None


def to_huggingface(
    mask: Mask,
    *,
    batch: int,
    num_heads: int,
    query_len: int,
    key_len: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the 4-D attention_mask that makes a Hugging Face model attend as `mask` says.

    Args:
        dtype: None gives bool, True = may attend ("sdpa"); a floating dtype gives what is added to scores
            of that dtype, 0 or finfo(dtype).min ("eager").

    Returns:
        [B, H, T, S], or [B, 1, T, S] if the heads do not differ. A query that sees nothing spreads its
        weight evenly there; the mask cannot express which queries count in means.

    Raises:
        MaskError: a rule whose sizes do not fit.
        ArgumentError: a dtype that is not floating.

    Example:
        >>> sizes = dict(batch=1, num_heads=4, query_len=2, key_len=3)
        >>> to_huggingface(Mask.causal(), **sizes).int()
        tensor([[[[1, 1, 0],
                  [1, 1, 1]]]], dtype=torch.int32)
        >>> to_huggingface(Mask.causal(), dtype=torch.float16, **sizes)[0, 0]
        tensor([[     0.,      0., -65504.],
                [     0.,      0.,      0.]], dtype=torch.float16)
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype must be floating: got {dtype}; use None for a bool mask")
    visible = mask.full(query_len, key_len, batch, num_heads)
    visible = visible.expand(batch, visible.shape[1], query_len, key_len)
    if dtype is None:
        return visible.clone(memory_format=torch.contiguous_format)  # not the mask's own
    added = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return added.masked_fill_(~visible, torch.finfo(dtype).min)


def _check_torch_kind(value: Tensor, name: str) -> None:
    if value.dtype != torch.bool and not value.is_floating_point():
        raise MaskError(
            f"{name} must be bool or floating: got {value.dtype}; "
            "use .bool(); in torch's masks True = may not attend"
        )


def _spread(attn_mask: Tensor, batch: int, num_heads: int, query_len: int, key_len: int) -> Tensor:
    """Return torch's attn_mask as [1, 1, T, S] or [B, H, T, S]."""
    _check_torch_kind(attn_mask, "attn_mask")
    shared, per_head = [query_len, key_len], [batch * num_heads, query_len, key_len]
    if list(attn_mask.shape) == shared:
        return attn_mask[None, None]
    if list(attn_mask.shape) != per_head:
        raise ShapeError(
            f"attn_mask must be [T, S] = {shared} or [B*H, T, S] = {per_head}: got {list(attn_mask.shape)}; "
            "repeat one mask per sequence with attn_mask.repeat_interleave(num_heads, dim=0)"
        )
    return attn_mask.view(batch, num_heads, query_len, key_len)


def _is_causal(mask: Mask, key_len: int) -> bool:
    """Return True if the rules of a square mask are causal, and no more than that."""
    reaches_back = mask.left is None or mask.left >= key_len - 1
    return mask.right == 0 and reaches_back and mask.is_padded_band


def _from_tokenizer(attention_mask: Tensor, query_len: int | None) -> Mask:
    key_len = attention_mask.shape[1]
    if attention_mask.dtype != torch.bool and can_read(attention_mask):
        strange = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if strange.numel():
            raise MaskError(
                f"attention_mask [B, S] must hold 0 and 1 only: found {strange[0].item():g}; "
                "for several documents in one sequence use Mask.documents(ids), for numbers to add bias="
            )
    if query_len is not None and query_len > key_len:
        raise ShapeError(
            f"query_len must not be more than the positions in attention_mask: {query_len} > {key_len}; "
            "leave it out in cross-attention"
        )
    real = attention_mask.bool()
    return Mask.padding(real, None if query_len is None else real[:, key_len - query_len :])


def _from_additive(attention_mask: Tensor) -> tuple[Mask, Tensor | None]:
    if can_read(attention_mask):
        ones = attention_mask == 1
        if ones.any() and bool((ones | (attention_mask == 0)).all()):
            raise MaskError(
                f"4-D attention_mask of 0 and 1 must not be {attention_mask.dtype}: got {int(ones.sum())} "
                f"ones in {list(attention_mask.shape)}, which would be added to the scores; use .bool() if "
                "1 = may attend"
            )
    hidden = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
    bias = attention_mask.masked_fill(hidden, 0.0)
    nothing_added = can_read(bias) and not bias.requires_grad and not bias.any()
    return Mask.dense(~hidden), None if nothing_added else bias
