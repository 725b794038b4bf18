"""One query per sequence on a GPU, as a backend: a step of generation, by a kernel of our own."""

from __future__ import annotations

from torch import Tensor

from .backend import Backend, Call, Gradients, Ways
from .gpu.cannot import LARGEST_HEAD, cannot
from .gpu.launches import interpreted
from .kernels import HALF
from .scores import Scores
from .tiles import TILES

__all__ = ["Decode"]

WORTH_IT = 2**24  # bytes of keys and values
MOST_ROWS = 64  # query heads that share a key head


class Decode(Backend):
    """Keys and values read once, for any length, with padding, windows, soft cap, ALiBi and sinks."""

    name = "decode"
    devices = ("cuda",)

    def why_not(self, call: Call) -> str | None:
        """As for the others; in tests the kernels run on a CPU, too."""
        return self.cannot(call) if interpreted() else super().why_not(call)

    def cannot(self, call: Call) -> str | None:
        """Rules that are tensors over queries and keys, and what the kernels cannot take."""
        scores, v = call.scores, call.v
        mask, scoring = scores.mask, scores.scoring
        if scores.q.shape[2] != 1:
            return f"it takes one query, not {scores.q.shape[2]}"
        if call.dropout or call.plain_because:
            return call.matrix_because
        if scoring.bias is not None:
            return "it takes no bias"
        if not mask.is_padded_band or min(mask.left or 0, mask.right or 0) < 0:
            return "it takes no mask beyond padding and a band that holds the query"
        if v.shape[-1] > LARGEST_HEAD:
            return f"it takes value_dim up to {LARGEST_HEAD}, not {v.shape[-1]}"
        if scores.group > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} heads that share keys, not {scores.group}"
        return cannot(scores)

    def reluctance(self, call: Call) -> str | None:
        """A plain call this small is over before ours is launched: torch's flash kernel takes it as it is."""
        scores = call.scores
        mask, scoring = scores.mask, scores.scoring
        plain = mask.is_band and mask.left is None and scoring.softcap is None and not scoring.has_tensors
        if not plain or scores.q.dtype not in HALF or interpreted():
            return None
        size = scores.k.nbytes + call.v.nbytes
        if size >= WORTH_IT:
            return None
        return f"{size} bytes of keys and values are few, from {WORTH_IT} on it pays"

    def lasts(self, call: Call) -> bool:
        """It goes by sizes and rules."""
        return True

    def ways(self, call: Call) -> Ways:
        """Its kernels have plans of their own."""
        from .gpu.single_query import attend

        def backward(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
            return TILES.backward(Call(scores, v), out, lse, grad)

        return Ways(lambda scores, v: (*attend(scores, v), None), backward)

    def how(self, call: Call) -> str:
        """In a phrase."""
        return "the keys cut into parts, by triton"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """(output [B, H, 1, Dv], lse [B, H, 1])."""
        from .gpu.single_query import attend

        return attend(call.scores, call.v)

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """In tiles: who generates asks for none."""
        return TILES.backward(call, out, lse, grad)
