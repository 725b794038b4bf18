"""Activation patching: what a head said in one run, put in its place in another.

Letters: B batch, T query_len, H num_heads, Dv value_dim; n heads chosen, t positions chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError
from ..indexing import as_index, positions_of
from .calls import Call, in_backward
from .chosen_heads import ChosenHeads, Heads, base_of
from .listening import Change, ChosenListening

__all__ = ["collect", "patch"]

Positions = int | slice | Sequence[int] | Tensor


def collect(model: nn.Module, heads: Heads | None = None, *, fallback: str | None = None) -> ChosenListening:
    """What the heads of some layers say while a `with` block lasts, {path: [B, H, T, Dv]}, detached.

    A layer is kept whole, whichever of its heads were chosen; a second run takes the place of the first.

    Args:
        heads: as in `headwise.ablate`; None: all of every layer that is heard.
        fallback: as in `headwise.ablate`.

    Raises:
        ArgumentError, AttentionBypassed: as `headwise.ablate`.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(1, 3, 8)
        >>> with collect(mha, [(0, 1)]) as outputs:
        ...     _ = mha(x)
        >>> outputs[""].shape
        torch.Size([1, 4, 3, 2])
    """
    chosen = ChosenHeads(model, () if heads is None else heads, everything=heads is None)
    return _Collecting(model, chosen, lambda *_: None, fallback)


class _Collecting(ChosenListening):
    def begin(self) -> tuple[Change, dict[str, Tensor]]:
        kept: dict[str, Tensor] = {}

        def keep(call: Call, index: Tensor, output: Tensor) -> None:
            if not in_backward():
                kept[call.path] = output.detach().clone()

        return keep, kept


def patch(
    model: nn.Module,
    heads: Heads,
    outputs: Mapping[str, Tensor],
    positions: Positions | None = None,
    *,
    fallback: str | None = None,
) -> ChosenListening:
    """Some heads say what they said in another run, inside a `with` block; afterwards all is as it was.

    Args:
        heads: as in `headwise.ablate`.
        outputs: {path: [B, H, T, Dv]} from `collect`, or made by hand.
        positions: at which query positions, a slice or numbers; None: at all.
        fallback: as in `headwise.ablate`.

    Raises:
        ArgumentError, AttentionBypassed: as `headwise.ablate`; a layer that is not in outputs.
        ShapeError: in the model's forward: outputs of other sizes than this run's.
        IndexError: in the model's forward: a position outside it.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, clean, other = MultiHeadAttention(8, 4), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
        >>> with collect(mha) as outputs:
        ...     expected, _ = mha(clean)
        >>> with patch(mha, [(0, None)], outputs):
        ...     torch.equal(mha(other)[0], expected)
        True

    Vig 2020 (causal mediation); Wang 2022 (IOI), section 3.
    """
    chosen = ChosenHeads(model, heads)
    for path in chosen.paths:
        if not any(base_of(known) == path for known in outputs):
            raise ArgumentError(f"outputs must hold every layer: {path} is missing; make them with collect")

    def change(call: Call, index: Tensor, output: Tensor) -> Tensor:
        new = outputs.get(call.path, outputs.get(base_of(call.path)))
        if new is None:
            raise ArgumentError(
                f"outputs must hold every visit: {call.path} is missing; make them with collect"
            )
        if new.shape != output.shape:
            raise ShapeError(
                f"outputs must be [B, H, T, Dv] = {list(output.shape)} in {call.path}: got "
                f"{list(new.shape)}; collect them from a run of the same sizes"
            )
        T, new = output.shape[2], new.to(output)
        if positions is None:
            return output.index_copy(1, index, new[:, index])
        spots = positions_of(as_index(positions, T, "positions"), T, output.device)  # [t]
        chosen_here = torch.zeros(output.shape[1:3], dtype=torch.bool, device=output.device)
        chosen_here[index[:, None], spots] = True  # [H, T]
        return torch.where(chosen_here[..., None], new, output)

    return ChosenListening(model, chosen, change, fallback)
