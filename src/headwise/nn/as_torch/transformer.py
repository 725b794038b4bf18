"""torch's Transformer encoder and its layer, with masks left as they came.

torch's layer turns every mask into a fresh float tensor, so that nobody down the line can know it again, and
in evaluation it skips `self_attn` for a native operator that builds all weights as soon as there is a mask.
These two classes change nothing else: they stand in for torch's while a model is adopted.

Letters: N batch, L length, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..packing import ordinary
from .answering import FEW
from .contract import check_kinds
from .native import leaves_some
from .ragged import Ragged
from .reading import content_of
from .scripting import scriptable

__all__ = ["TransformerEncoder", "TransformerEncoderLayer"]

TORCHS_LAYER, TORCHS_ENCODER = nn.TransformerEncoderLayer, nn.TransformerEncoder


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` that asks its `self_attn` whenever there is a mask."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As in torch."""
        if _best_left_to_torch(self, src, src_mask, src_key_padding_mask):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        check_kinds({"src_key_padding_mask": src_key_padding_mask, "src_mask": src_mask})
        return self._through(
            src, lambda x: self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)
        )

    def ragged(self, x: Tensor, sequences: Ragged) -> Tensor:
        """The same for real tokens alone, [tokens, E], of sequences of any length."""
        attend: Any = self.self_attn
        return self._through(x, lambda y: self.dropout1(attend.ragged(y, sequences)))

    def _through(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Both blocks with their norms, whatever attention is."""
        if self.norm_first:
            x = x + attend(self.norm1(x))
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + attend(x))
        found: Tensor = self.norm2(x + self._ff_block(x))
        return found

    def __prepare_scriptable__(self) -> nn.TransformerEncoderLayer:
        return scriptable(self, TORCHS_LAYER)


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` that hands masks on as they came, and packs what is ragged."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As in torch."""
        if type(src) is not Tensor or src.is_nested or not self._has_our_layers():
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        check_kinds({"src_key_padding_mask": src_key_padding_mask, "mask": mask})
        x = src
        if src_key_padding_mask is not None and mask is None and self._would_pack(src, src_key_padding_mask):
            sequences = Ragged.of(~src_key_padding_mask)
            x = sequences.real(src)
            for layer in self.layers:
                x = layer.ragged(x, sequences)
            x = sequences.padded(x)
        else:
            if is_causal is None:
                content = None if mask is None else content_of(mask)
                is_causal = content is not None and content.causal
            for layer in self.layers:
                x = layer(x, src_mask=mask, is_causal=is_causal, src_key_padding_mask=src_key_padding_mask)
        return x if self.norm is None else self.norm(x)

    def _has_our_layers(self) -> bool:
        return all(type(layer) is TransformerEncoderLayer for layer in self.layers)

    def _would_pack(self, src: Tensor, padding: Tensor) -> bool:
        """Whether torch would go on with a nested tensor here; like it, only in evaluation."""
        first: Any = self.layers[0]
        if not getattr(self, "use_nested_tensor", False) or not torch.backends.mha.get_fastpath_enabled():
            return False
        if first.training or src.dim() != 3 or padding.dtype != torch.bool or not ordinary(src):
            return False
        N, L, E = src.shape
        if tuple(padding.shape) != (N, L) or not src.numel() or E != first.self_attn.embed_dim:
            return False
        if any(_is_hooked(module) for module in self.layers.modules()):
            return False
        if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in self.parameters())):
            return False
        return not getattr(self, "mask_check", True) or bool(
            torch._nested_tensor_from_mask_left_aligned(src, ~padding)
        )

    def __prepare_scriptable__(self) -> nn.TransformerEncoder:
        return scriptable(self, TORCHS_ENCODER)


def _best_left_to_torch(
    layer: TransformerEncoderLayer, src: Tensor, mask: Tensor | None, padding: Tensor | None
) -> bool:
    """Without a mask, and for a few tokens on a CPU, torch's native layer is the best there is."""
    if (mask is None and padding is None) or type(src) is not Tensor or src.is_nested:
        return True
    if mask is not None or layer.training or not src.is_cpu or src.dim() != 3 or not src.numel():
        return False
    assert padding is not None
    N, L, _ = src.shape
    return N * L * L * layer.self_attn.num_heads <= FEW and ordinary(src) and leaves_some(padding, N, L)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
