"""`MultiheadAttention`: torch's class to the letter, on faster ways.

Letters are torch's: N batch, L query_len, S key_len, E embed_dim, H num_heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ...arguments import answering
from ...errors import ArgumentError
from ...mask_rules import is_traced
from ..module_call import fx_node
from ..packed_weights import OUT_PROJ, PLAIN_TYPES, is_untouched
from .answers import answer, native
from .contract import changing_nothing, scriptable
from .torch_projections import TorchCall, in_one_step

__all__ = ["MultiheadAttention"]

TORCHS = nn.MultiheadAttention  # whatever that name may mean later


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`: its arguments, its masks (True = may *not* attend), its results; faster.

    A subclass of it with the same parameters, state dict and initial weights. Unlike torch's class it says
    the same in training and evaluation, calls `out_proj` as a module (hooks fire, another module may take its
    place), recognises a causal mask by its content and, where there are many weights, never builds those of
    every head to average them. Its output is always contiguous; torch's is a transposed view where the batch
    comes first, except in its fast path.

    Args:
        empty_rows: what comes of a query that may see nothing. "nan": as in torch, NaN where weights are
            asked for. "zero": attends to nothing, weights 0, gradients finite.

    Raises:
        ValueError, AssertionError, RuntimeError: as torch's class does.

    Example:
        >>> ours = MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> causal = nn.Transformer.generate_square_subsequent_mask(10)
        >>> output, weights = ours(x, x, x, attn_mask=causal)
        >>> output.shape, weights.shape                       # averaged over heads, as in torch
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
        >>> isinstance(ours, nn.MultiheadAttention)
        True
    """

    empty_rows = "nan"

    @answering({})  # with torch's exceptions: a TypeError
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        empty_rows: str = "nan",
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device,
            dtype,
        )  # fmt: skip
        if empty_rows not in ("nan", "zero"):
            raise ArgumentError(f"empty_rows must be 'nan' or 'zero': got {empty_rows!r}; torch's is 'nan'")
        if empty_rows != "nan":
            self.empty_rows = empty_rows

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch: (output, weights or None).

        Args:
            query: [N, L, E] with batch_first, else [L, N, E]; or [L, E].
            key, value: likewise, of width kdim and vdim.
            key_padding_mask: [N, S] or [S]; True = may not be attended to, or a number added.
            need_weights: False gives None in their place.
            attn_mask: [L, S] or [N * H, L, S]; True = may not attend, or a number added.
            average_attn_weights: weights [N, L, S] instead of [N, H, L, S].
            is_causal: the hint that attn_mask is causal. On a CPU a mask of the right shape decides. Else,
                where no weights are wanted and nothing is padded, the hint does, as in torch.
        """
        given = (
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
        )  # fmt: skip
        if not _is_ours(self, query, key, value, key_padding_mask, attn_mask):
            node: tuple[Tensor, Tensor | None] | None = fx_node(self, *given)
            if node is not None:
                return node
            if is_untouched(self.out_proj, OUT_PROJ):
                return super().forward(*given)
            joint, weights = TORCHS.forward(changing_nothing(self), *given)
            return self.out_proj(joint), weights  # torch would take its weight and not call it
        if query is key and key is value and (attn_mask is not None or not is_causal):
            masks = key_padding_mask, attn_mask
            answered = native(self, query, *masks, need_weights, average_attn_weights, is_causal)
            if answered is not None:
                return answered
        call, zero = TorchCall(self, *given), self.empty_rows == "zero"
        answered = in_one_step(call, zero)
        if answered is not None:
            return answered
        q, k, v = call.heads()
        rules = call.rules(q.shape[2], k.shape[2])
        return call.finish(*answer(q, k, v, rules, call.dropout, need_weights, average_attn_weights, zero))

    def __prepare_scriptable__(self) -> nn.MultiheadAttention:
        """What `torch.jit.script` compiles: torch's own class, on the same parameters."""
        if not is_untouched(self.out_proj, OUT_PROJ):
            raise ArgumentError(
                "out_proj must be torch's own, and not hooked, to be scripted: got "
                f"{type(self.out_proj).__name__}; torch's class takes its weight and does not call it, merge "
                "it into that first"
            )
        return scriptable(self, TORCHS)


def _is_ours(module: nn.MultiheadAttention, *given: Tensor | None) -> bool:
    """Whether these are ordinary tensors; nested ones, subclasses and traced ones are torch's to answer."""
    seen: Tensor | None = None
    for x in given:  # before the parameters, which torch.fx would record
        if x is not None and x is not seen and (type(x) not in PLAIN_TYPES or x.is_nested):
            return False
        seen = x
    weight = module.in_proj_weight if module._qkv_same_embed_dim else module.q_proj_weight
    for x in (weight, module.in_proj_bias):
        if x is not None and (type(x) not in PLAIN_TYPES or x.is_nested):
            return False
    # a transform that is traced (torch.func.linearize) is ours: torch's kernels have no forward derivative
    return not is_traced() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
