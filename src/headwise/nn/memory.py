"""`Memory`: the keys and values of another text, projected once for many calls of cross-attention.

Letters: B batch, T query_len, S key_len, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import MaskError, ShapeError
from ..masks import Mask
from . import module_call, options
from .cache import Owned, order_of

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["Memory", "remember"]


class Memory(Owned):
    """What cross-attention looks at, projected once by `mha.remember(key)`, for `mha(query, cache=memory)`.

    A call gives what `mha(query, key, value, mask)` would: nothing is added to a memory. It is for the module
    that made it; another one, even of equal sizes, is refused.
    """

    def __init__(self, k: Tensor, v: Tensor, mask: Mask | None = None) -> None:
        self._k, self._v, self._mask = k, v, mask

    @property
    def length(self) -> int:
        """S"""
        return self._k.shape[2]

    @property
    def batch(self) -> int:
        """B"""
        return self._k.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v))

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence i becomes what sequence index[i] was; as many as are named, as beams need it.

        Raises:
            ArgumentError: not whole numbers [B'], or a sequence that is not there.
        """
        chosen = order_of(index, self._k)
        self._k, self._v = self._k.index_select(0, chosen), self._v.index_select(0, chosen)
        if self._mask is not None:
            self._mask = self._mask.select(chosen, slice(None), slice(None))

    def given_to(self, q: Tensor, module: nn.Module) -> tuple[Tensor, Tensor, Mask | None]:
        """Return keys, values and their mask for queries [B, H, T, D] of the module.

        Raises:
            ShapeError: another batch, or another layer's heads.
            ArgumentError: another module.
        """
        (B, H, _, D), k = q.shape, self._k
        if k.shape[0] != B:
            raise ShapeError(
                f"cache must hold as many sequences as come in: {k.shape[0]} for {B}; reorder(index) "
                "repeats or drops some"
            )
        if k.shape[3] != D or H % k.shape[1]:
            raise ShapeError(
                f"cache must hold the module's heads: {k.shape[1]} of {k.shape[3]} channels for {H} of {D}; "
                "each layer remembers for itself"
            )
        self.belong_to(module)
        return k, self._v, self._mask

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        new = memo[id(self)] = Memory.__new__(Memory)
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo), _owner=self._owner_of_copy(memo))
        return new

    def __repr__(self) -> str:
        (B, Hk, S, _), kind = self._k.shape, str(self._k.dtype).removeprefix("torch.")
        return f"Memory({S} columns, batch {B}, {Hk} heads, {kind})"


def remember(
    module: MultiHeadAttention, key: Tensor, value: Tensor | None, mask: Mask | Tensor | None
) -> Memory:
    """See `MultiHeadAttention.remember`."""
    value = key if value is None else value
    module_call.check_memory(module, key, value)
    k, v = module.k_proj(key), module.v_proj(value)
    B, S, _ = key.shape
    module_call.check_projected(k_proj=(k, module.num_kv_heads, module.head_dim))
    if module.qk_norm is not None:
        k = options.normalised_by(module, module.k_norm, k)
    k = k.reshape(B, S, module.num_kv_heads, module.head_dim).transpose(1, 2)
    v = v.reshape(B, S, module.num_kv_heads, module.value_dim).transpose(1, 2)
    if module.rope is not None:
        k = module.rope.rotate(k, 0)
    memory = Memory(k, v, None if mask is None else _of_keys(mask, B, module.num_heads, S))
    memory.belong_to(module)
    return memory


def _of_keys(mask: Mask | Tensor, batch: int, num_heads: int, key_len: int) -> Mask:
    """Check that a mask depends on keys alone, and bind it for any queries."""
    rules = module_call.rules_of(mask, batch, 1, key_len, itself=False)
    other = [name for name in rules.held if name not in ("keys", "allowed")]
    if other:
        raise MaskError(
            f"mask must tell which keys are real, for all queries alike: got {rules!r}; "
            "give Mask.padding(lengths), and the rest in the call, mha(query, mask=mask, cache=memory)"
        )
    bound = rules.bind(batch, num_heads, 1, key_len)
    if bound.allowed is not None:
        bound = replace(bound, allowed=bound.allowed.clone())
    return bound
