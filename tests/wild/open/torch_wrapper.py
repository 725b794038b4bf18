from typing import Optional, Tuple

from torch import Tensor, nn


class CrossAttention(nn.Module):
    """Thin wrapper over torch's attention: batch first, keyword masks, True always means "keep".

    torch uses the opposite convention (True = ignore), hence the inversions below.
    """

    def __init__(self, width: int, heads: int, memory_width: Optional[int] = None, p: float = 0.0):
        super().__init__()
        memory_width = memory_width or width
        self.inner = nn.MultiheadAttention(
            embed_dim=width,
            num_heads=heads,
            dropout=p,
            kdim=memory_width,
            vdim=memory_width,
            batch_first=True,
        )

    @property
    def heads(self) -> int:
        return self.inner.num_heads

    def forward(
        self,
        x: Tensor,
        memory: Optional[Tensor] = None,
        keep: Optional[Tensor] = None,
        memory_keep: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        """
        x: (B, T, width); memory: (B, S, memory_width), x itself when left out
        keep: bool (T, S), which memory slots each position may read
        memory_keep: bool (B, S), which memory slots are not padding
        Returns the mixed vectors (B, T, width) and the weights of every head (B, heads, T, S).
        """
        memory = x if memory is None else memory
        out, weights = self.inner(
            query=x,
            key=memory,
            value=memory,
            attn_mask=None if keep is None else ~keep,
            key_padding_mask=None if memory_keep is None else ~memory_keep,
            need_weights=True,
            average_attn_weights=False,
        )
        return out, weights
