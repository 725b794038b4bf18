"""The arguments of torch's class: refused as torch refuses them, and its masks as rules of ours.

What torch refuses is refused with its own exceptions, in its own order and words. The checks come in two
parts, because between them torch projects, and a product of wrong sizes raises there.

torch's masks say the opposite of ours (True = may not attend) and a float mask is added. Keys that a module
appends are seen by every query. What a mask holds is read on a CPU, by proof in every call (`fact`). On a
GPU, while compiling or exporting, and in tensors that learn, nothing is read: the mask is taken as it is, on
a GPU also as `is_causal` says.

Letters: N batch, L query_len, S key_len, E embed_dim, H num_heads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...mask_meaning import fact
from ...mask_rules import can_read
from ...masks import Mask

if TYPE_CHECKING:
    from .torch_call import TorchCall

LOWEST = -1e29  # finite numbers below this hide a key as well as this one, and no kernel takes it for -inf
LOW = -32.0  # a row that has nothing above this has a log-sum-exp that is too rough to get weights from


def check_inputs(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Raise for every input that torch refuses before anything is computed."""
    if key_padding_mask is not None or attn_mask is not None:
        check_kinds({"key_padding_mask": key_padding_mask, "attn_mask": attn_mask})
    _check_dimensions(query, key, value, key_padding_mask, attn_mask, module.num_heads)
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "Need attn_mask if specifying the is_causal hint. You may use the Transformer module method "
            "`generate_square_subsequent_mask` to create this mask."
        )
    if query.shape[-1] != module.embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {module.embed_dim}, but got {query.shape[-1]}"
        )
    if module.embed_dim % module.num_heads:
        raise AssertionError(f"embed_dim {module.embed_dim} not divisible by num_heads {module.num_heads}")
    if key is not value:
        _check_sizes(module, key, value)


def check_kinds(masks: dict[str, Tensor | None]) -> None:
    """Raise unless masks are bool or floating, and warn if they differ; the padding mask comes first."""
    (_, padding), (other_name, other) = masks.items()
    for name, mask in masks.items():
        if mask is None:
            continue
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise AssertionError(f"only bool and floating types of {name} are supported")
        if mask is padding and other is not None and mask.dtype != other.dtype:
            warnings.warn(
                f"Support for mismatched {name} and {other_name} is deprecated. "
                "Use same type for both instead.",
                stacklevel=5,
            )


def _check_dimensions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
) -> None:
    dims = query.dim()
    if dims not in (2, 3):
        raise AssertionError(
            f"query should be unbatched 2D or batched 3D tensor but received {dims}-D query tensor"
        )
    which = "For batched (3-D) `query`" if dims == 3 else "For unbatched (2-D) `query`"
    if key.dim() != dims or value.dim() != dims:
        raise AssertionError(
            f"{which}, expected `key` and `value` to be {dims}-D"
            f" but found {key.dim()}-D and {value.dim()}-D tensors respectively"
        )
    if key_padding_mask is not None and key_padding_mask.dim() != dims - 1:
        raise AssertionError(
            f"{which}, expected `key_padding_mask` to be `None` or {dims - 1}-D"
            f" but found {key_padding_mask.dim()}-D tensor instead"
        )
    if attn_mask is None:
        return
    if attn_mask.dim() not in (2, 3):
        raise AssertionError(
            f"{which}, expected `attn_mask` to be `None`, 2-D or 3-D"
            f" but found {attn_mask.dim()}-D tensor instead"
        )
    expected = (num_heads, query.shape[0], key.shape[0])
    if dims == 2 and attn_mask.dim() == 3 and tuple(attn_mask.shape) != expected:
        raise AssertionError(f"Expected `attn_mask` shape to be {expected} but got {attn_mask.shape}")


def _check_sizes(module: nn.MultiheadAttention, key: Tensor, value: Tensor) -> None:
    """Raise unless keys and values have the same sizes, which the message gives with the length first."""
    if module._qkv_same_embed_dim:
        if key.shape != value.shape:
            key_shape, value_shape = (_length_first(module, x) for x in (key, value))
            raise AssertionError(f"key shape {key_shape} does not match value shape {value_shape}")
    elif key.shape[:-1] != value.shape[:-1]:
        key_dims, value_dims = (_length_first(module, x)[:2] for x in (key, value))
        raise AssertionError(f"key's sequence and batch dims {key_dims} do not match value's {value_dims}")


def _length_first(module: nn.MultiheadAttention, x: Tensor) -> torch.Size:
    if x.dim() == 2:
        x = x.unsqueeze(1)
    elif module.batch_first:
        x = x.transpose(0, 1)
    return x.shape


def check_widths(inputs: Sequence[Tensor], weights: Sequence[Tensor | None], bias: Tensor | None) -> None:
    """Raise unless the weights fit inputs of different widths."""
    for letter, weight in zip("qkv", weights, strict=True):
        if weight is None:
            raise AssertionError(f"use_separate_proj_weight is True but {letter}_proj_weight is None")
    E, names = inputs[0].shape[-1], ("query", "key", "value")
    for name, x, weight in zip(names, inputs, weights, strict=True):
        assert weight is not None
        if tuple(weight.shape) != (E, x.shape[-1]):
            raise AssertionError(
                f"expecting {name} weights shape of {(E, x.shape[-1])}, but got {weight.shape}"
            )
    for name, part in zip(names, () if bias is None else bias.chunk(3), strict=False):
        if tuple(part.shape) != (E,):
            raise AssertionError(f"expecting {name} bias shape of {(E,)}, but got {part.shape}")


def check_masks(call: TorchCall, q: Sequence[int], k: Sequence[int]) -> int:
    """Raise for what torch refuses after projecting q and k; return how many keys the module appends.

    Args:
        q, k: their shapes.
    """
    module, padding, attn_mask = call.module, call.key_padding_mask, call.attn_mask
    (N, H, _, D), S = q, k[2]
    if attn_mask is not None and not call.mask_fits():
        raise RuntimeError(
            f"The shape of the {attn_mask.dim()}D attn_mask is {attn_mask.shape}, "
            f"but should be {call.mask_shape()}."
        )
    for present, other in (("bias_k", "bias_v"), ("bias_v", "bias_k")):
        if getattr(module, present) is not None and getattr(module, other) is None:
            raise AssertionError(f"{present} is set but {other} is None")
    if k[0] != N:  # torch's view raises this
        raise RuntimeError(f"shape '[{S}, {N * H}, {D}]' is invalid for input of size {math.prod(k)}")
    appended = (module.bias_k is not None) + bool(module.add_zero_attn)
    if padding is not None:
        rows, columns = padding.shape
        if rows != N:
            raise AssertionError(f"Expected key_padded_mask.shape[0] to be {N}, but got {rows}")
        if columns != S:
            raise AssertionError(
                f"Expected key_padded_mask.shape[1] to be {S + appended}, but got {columns + appended}"
            )
    return appended


# Masks as rules


class Content(NamedTuple):
    """What a 2-D or 3-D mask holds."""

    nothing: bool  # it hides nothing and adds nothing
    causal: bool  # key j is hidden from query i where j > i, and nothing else
    low: bool  # finite numbers below LOW
    low_rows: bool  # a query that has only such keys


def content_of(mask: Tensor) -> Content | None:
    """Return what a mask holds; None where it must not be read."""
    return fact(mask, "content", read) if _may_read(mask) else None


def _may_read(mask: Tensor) -> bool:
    return (
        type(mask) in (Tensor, nn.Parameter)
        and not mask.requires_grad
        and can_read(mask)
        and torch._C._get_tracing_state() is None
    )


@torch.no_grad()
def read(mask: Tensor) -> Content:
    """Return what the values of a mask mean."""
    if mask.dtype == torch.bool:
        hidden = mask
    else:
        hidden = mask == -torch.inf
        rest = mask.masked_fill(hidden, 0)
        if bool(rest.any()):
            low = bool((rest < LOW).any())
            return Content(nothing=False, causal=False, low=low, low_rows=low and _has_low_rows(mask))
    if not bool(hidden.any()):
        return Content(nothing=True, causal=False, low=False, low_rows=False)
    causal = mask.dim() == 2 and torch.equal(hidden, torch.ones_like(hidden).triu_(1))
    return Content(nothing=False, causal=causal, low=False, low_rows=False)


def _has_low_rows(added: Tensor) -> bool:
    """Return True if a query has nothing but finite numbers below LOW and -inf."""
    if not added.numel():
        return False
    highest = added.detach().amax(-1)
    return bool(((highest < LOW) & (highest > -torch.inf)).any())


@dataclass(frozen=True, slots=True)
class Rules:
    """Masks as rules: each part may be missing."""

    causal: bool = False  # j <= i
    hidden: Tensor | None = None  # bool [1 or N, 1 or H, L, S'], True = hidden
    padding: Tensor | None = None  # bool [N, S'], True = hidden
    bias: Tensor | None = None  # [1 or N, 1 or H, L or 1, S']
    wild: bool = False  # the bias may hold finite numbers that a kernel takes for -inf
    low: bool = False  # there may be a query that has no better key than one hidden by a finite number

    @property
    def hides(self) -> bool:
        """True if a query might see nothing."""
        return self.hidden is not None or self.padding is not None or self.bias is not None

    def mask(self, query_len: int, key_len: int) -> Mask | None:
        """Return the rules without the bias as a mask."""
        if not (self.causal or self.hidden is not None or self.padding is not None):
            return None
        return Mask(
            right=query_len - key_len if self.causal else None,
            keys=None if self.padding is None else ~self.padding,
            allowed=None if self.hidden is None else ~self.hidden,
        )

    def tame_bias(self) -> Tensor | None:
        """Return the bias with its finite numbers clamped to those that no kernel takes for -inf."""
        bias = self.bias
        if bias is None or not self.wild:
            return bias
        if bias.dtype == torch.float16:
            bias = bias.float()
        return bias.clamp(min=LOWEST).masked_fill(bias == -torch.inf, -torch.inf)

    def added(self, query_len: int, key_len: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return all rules as a number added to each score; -inf hides."""
        hidden = self.hidden
        if self.causal:
            hidden = torch.ones(query_len, key_len, dtype=torch.bool, device=device).triu_(1)[None, None]
        if self.padding is not None:
            padding = self.padding[:, None, None]  # [N, 1, 1, S']
            hidden = padding if hidden is None else hidden | padding
        bias = None if self.bias is None else self.bias.to(dtype)
        if hidden is None:
            return bias
        numbers = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        if bias is None:
            return numbers
        return bias + numbers  # keeps no mask for backward, as torch: its owner may write to it


def rules_of(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    num_heads: int,
    appended: int,
    query_len: int,
    key_len: int,
) -> Rules:
    """Return masks of the right shapes, [N, S] and [L, S] or [N * H, L, S], as rules.

    `is_causal` is torch's hint. It counts where there is no mask, and on a GPU, where masks are never read.
    `appended` keys are among the `key_len`.
    """
    if key_padding_mask is None and attn_mask is None:
        return Rules(causal=is_causal)
    causal, hidden, padding, bias, wild, low, low_rows = False, None, None, None, False, False, False
    if attn_mask is not None:
        content, learned = _content(attn_mask)
        # on a CPU the mask decides, read or not, compiled or not; elsewhere it is never read
        hinted = is_causal and not learned and not attn_mask.is_cpu
        causal = not appended and (hinted if content is None else content.causal)
        if not causal and not (content is not None and content.nothing):
            flat = attn_mask.dim() == 2
            spread = attn_mask[None, None] if flat else attn_mask.unflatten(0, (-1, num_heads))
            if attn_mask.dtype == torch.bool:
                hidden = spread
            else:
                bias, wild = spread, content is None or content.low
                low, low_rows = (False, False) if content is None else (content.low, content.low_rows)
    if key_padding_mask is not None and not _is_empty(key_padding_mask):
        padding = as_hidden(key_padding_mask)
        if padding is None:
            added = key_padding_mask[:, None, None]  # [N, 1, 1, S]
            bias = added if bias is None else bias + added
            padding_low = can_read(added) and bool(((added < LOW) & (added > -torch.inf)).any())
            low, wild = low or padding_low, wild or padding_low or not can_read(added)
        low_rows = low_rows or low  # both together may leave a row with little
    if appended:
        hidden, padding, bias = (
            None if x is None else pad(x, (0, appended)) for x in (hidden, padding, bias)
        )
        low = low_rows = False
    rules = Rules(causal, hidden, padding, bias, wild, low_rows)
    if low and bias is not None and can_read(bias):
        total = rules.added(query_len, key_len, bias.dtype, bias.device)
        assert total is not None
        return replace(rules, low=_has_low_rows(total))
    return rules


def _content(mask: Tensor) -> tuple[Content | None, bool]:
    """Return (what a mask holds if it may be read, whether it learns; a mask that learns is never causal)."""
    if not mask.requires_grad:
        return content_of(mask), False
    if not can_read(mask):
        return None, True
    return read(mask.detach())._replace(causal=False, nothing=False), True


def as_hidden(mask: Tensor) -> Tensor | None:
    """Return a mask as bool, True = hidden; None if it adds numbers, or may do so and must not be read."""
    if mask.dtype == torch.bool:
        return mask
    if mask.requires_grad or not mask.is_floating_point() or not can_read(mask):
        return None  # integers are refused later
    hidden = mask == -torch.inf
    return None if bool(mask.masked_fill(hidden, 0).any()) else hidden


def _is_empty(padding: Tensor) -> bool:
    """Return True if the mask may be read and pads nothing."""
    if padding.requires_grad or not padding.numel() or not can_read(padding):
        return False
    return not bool(padding.any())
