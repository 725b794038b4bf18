"""Needle: how much of a passage a head copies out of a long context.

Letters: H num_heads, S key_len.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import ArgumentError, ShapeError

__all__ = ["retrieval"]


def retrieval(top_keys: Tensor, key_tokens: Tensor, generated: Tensor, needle: tuple[int, int]) -> Tensor:
    """How much of a needle the head copies out of the context while the model says it.

    1 / (stop - start) for each step at which the head's heaviest key lies in the needle and carries the token
    that is generated. Wu 2024, `retrieval_head_detection.py`; there a score is the mean over runs in which
    the model finds the needle (ROUGE-1 recall above 50), and heads of at least 0.1 are retrieval heads.

    Args:
        top_keys: int [steps, H], the heaviest key of the last query at each step (`map.top(1).indices[0, :,
            -1, 0]`), -1 where there is none.
        key_tokens: int [S], the tokens of the context.
        generated: int [steps], the token each step gave.
        needle: (start, stop), where the needle lies in the context.

    Returns:
        [H]

    Raises:
        ShapeError: sizes that disagree.
        ArgumentError: a needle that is empty or outside the context.

    Example:
        >>> top = torch.tensor([[2, 0], [3, 3]])            # two steps, two heads
        >>> retrieval(top, torch.tensor([4, 5, 6, 7]), torch.tensor([6, 7]), needle=(2, 4))
        tensor([1.0000, 0.5000])
    """
    if top_keys.ndim != 2 or generated.shape != top_keys.shape[:1] or key_tokens.ndim != 1:
        raise ShapeError(
            f"top_keys [steps, H], key_tokens [S] and generated [steps] must fit together: got "
            f"{list(top_keys.shape)}, {list(key_tokens.shape)} and {list(generated.shape)}; "
            "give one step a generated token"
        )
    (start, stop), S = needle, len(key_tokens)
    if not 0 <= start < stop <= S:
        raise ArgumentError(
            f"needle must lie in the context: got ({start}, {stop}) of {S} tokens; it is (first, last + 1)"
        )
    inside = (top_keys >= start) & (top_keys < stop)
    copied = key_tokens[top_keys.clamp(0, S - 1)] == generated[:, None]  # [steps, H]
    return (inside & copied).sum(0) / (stop - start)
