"""The masks of one call of torch's class, as rules of ours.

torch's masks say the opposite of ours (True = may not attend) and a float mask is added. Keys that a module
appends are seen by every query.

Letters: N batch, L query_len, S key_len, H num_heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...mask_rules import can_read
from ...masks import Mask
from .reading import LOWEST, content_of

__all__ = ["Rules", "rules_of"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may attend to whom: every part may be missing."""

    causal: bool = False  # j <= i
    hidden: Tensor | None = None  # bool [1 or N, 1 or H, L, S'], True = hidden
    padding: Tensor | None = None  # bool [N, S'], True = hidden
    bias: Tensor | None = None  # [1 or N, 1 or H, L or 1, S']

    @property
    def hides(self) -> bool:
        """Whether a query might see nothing."""
        return self.hidden is not None or self.padding is not None or self.bias is not None

    def mask(self, query_len: int, key_len: int) -> Mask | None:
        """Without the bias."""
        if not (self.causal or self.hidden is not None or self.padding is not None):
            return None
        return Mask(
            right=query_len - key_len if self.causal else None,
            keys=None if self.padding is None else ~self.padding,
            allowed=None if self.hidden is None else ~self.hidden,
        )

    def added(self, query_len: int, key_len: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """All of it as a number added to each score; -inf hides."""
        hidden = self.hidden
        if self.causal:
            hidden = torch.ones(query_len, key_len, dtype=torch.bool, device=device).triu_(1)[None, None]
        if self.padding is not None:
            padding = self.padding[:, None, None]  # [N, 1, 1, S']
            hidden = padding if hidden is None else hidden | padding
        bias = None if self.bias is None else self.bias.to(dtype)
        if hidden is None:
            return bias
        if bias is None:
            return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return bias.masked_fill(hidden, -torch.inf)


NO_RULES = Rules()


def rules_of(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, num_heads: int, appended: int
) -> Rules:
    """Masks whose shapes are right, [N, S] and [L, S] or [N * H, L, S], as rules.

    `is_causal` is torch's hint: it counts where the mask itself must not be read.
    """
    if key_padding_mask is None and attn_mask is None:
        return NO_RULES
    causal, hidden, padding, bias = False, None, None, None
    if attn_mask is not None:
        content = content_of(attn_mask)
        nothing = content is not None and content.nothing
        causal = not appended and (is_causal if content is None else content.causal)
        if not nothing and not causal:
            flat = attn_mask.dim() == 2
            spread = attn_mask[None, None] if flat else attn_mask.unflatten(0, (-1, num_heads))
            if attn_mask.dtype == torch.bool:
                hidden = spread
            else:
                bias = spread if content is not None and not content.low else _tame(spread)
    if key_padding_mask is not None and not (
        can_read(key_padding_mask) and key_padding_mask.numel() and not bool(key_padding_mask.any())
    ):
        if key_padding_mask.dtype == torch.bool:
            padding = key_padding_mask
        else:
            added = _tame(key_padding_mask)[:, None, None]  # [N, 1, 1, S]
            bias = added if bias is None else bias + added
    if appended:
        hidden, padding, bias = (
            None if x is None else pad(x, (0, appended)) for x in (hidden, padding, bias)
        )
    return Rules(causal, hidden, padding, bias)


def _tame(bias: Tensor) -> Tensor:
    """Finite numbers of any size stay finite where a kernel would take them for -inf."""
    if bias.dtype == torch.float16:
        bias = bias.float()
    return bias.clamp(min=LOWEST).masked_fill(bias == -torch.inf, -torch.inf)
