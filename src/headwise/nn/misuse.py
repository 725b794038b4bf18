"""What goes wrong between the lessons' class and torch's, caught at the door and answered with what to write.

One letter parts `MultiHeadAttention` from `torch.nn.MultiheadAttention`, and their masks mean the opposite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..arguments import check_dropout, window_rule
from ..errors import ArgumentError, nearest
from ..scoring import Scoring

__all__ = ["check_call", "check_constructor", "check_options", "lone"]

TORCHS_CLASS = "torch's class to the letter is headwise.nn.MultiheadAttention"
ONE_LETTER = (
    "headwise.MultiheadAttention does not exist: one letter parts two classes whose masks mean the opposite; "
    "use headwise.MultiHeadAttention (True = may attend), or torch's class to the letter (True = may not), "
    "headwise.nn.MultiheadAttention"
)

OF_THE_CONSTRUCTOR = {
    "batch_first": "everything is [batch, length, width] here; transpose what is not",
    "add_bias_kv": f"there is no such key here; {TORCHS_CLASS}",
    "add_zero_attn": f"there is no such key here; {TORCHS_CLASS}",
    "embed_dim": "its name is d_model here",
    "is_causal": "its name is causal here",
    "qkv_bias": "its name is bias here",
    "d_k": "its name is head_dim here",
    "d_v": "its name is value_dim here",
}

OF_A_CALL = {
    "attn_mask": "its True = may NOT attend, mask's True = may; pass mask=~attn_mask, a float one as bias=",
    "key_padding_mask": "its True = padding; pass mask=headwise.Mask.padding(~key_padding_mask)",
    "is_causal": "pass mask=headwise.Mask.causal(), or make the module with causal=True",
    "causal": "pass mask=headwise.Mask.causal(), or make the module with causal=True",
    "average_attn_weights": "weights come head by head here; their mean is weights.mean_heads()",
    "attention_mask": "pass mask=, True or 1 = may attend, broadcastable to [B, H, T, S]",
}


def check_constructor(named: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise for arguments that only torch's class, or another one, is made with."""
    _refuse(named, OF_THE_CONSTRUCTOR, known)


def check_call(named: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise for keywords that `MultiHeadAttention` is not called with."""
    _refuse(named, OF_A_CALL, known)


def _refuse(named: Mapping[str, Any], answers: Mapping[str, str], known: Iterable[str]) -> None:
    for name, value in named.items():
        if name in answers:
            raise ArgumentError(
                f"{name} must not be given to MultiHeadAttention: got {_told(value)}; {answers[name]}"
            )
        ours = [each for each in known if each not in ("self", "wrong")]
        raise TypeError(f"MultiHeadAttention has no argument {name!r}: {nearest(name, ours)}")


def check_options(dropout: Any, window: Any, scale: Any, softcap: Any, head_dim: int) -> None:
    """Raise for options that no call could use, when the module is made and not at the first call."""
    check_dropout(dropout)
    if window is not None:
        window_rule(window)
    Scoring.of(head_dim, scale=scale, softcap=softcap)


def lone(key: Any, value: Any) -> ArgumentError:
    """The error about a key without a value, most often a mask in key's place; or a value without a key."""
    if key is None:
        return ArgumentError(f"value must come with key: got {_told(value)} alone; as mha(query, key, value)")
    return ArgumentError(
        f"key must come with value: got {_told(key)} alone; a mask goes in mask=, as mha(x, mask=m), "
        "and what is attended to goes in twice, as mha(query, memory, memory)"
    )


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)
