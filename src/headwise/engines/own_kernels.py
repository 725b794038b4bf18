"""The first pass in kernels of our own, on a GPU: every rule at the speed of a fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import Backend, Call, Gradients, Ways
from .fused import adds, in_one_call
from .gpu.cannot import LARGEST_HEAD, cannot
from .gpu.launches import FEW_QUERIES, interpreted
from .gradients import ScoreGradients
from .kernels import HALF
from .scores import Scores
from .tiles import sinks_gradient
from .wanted import ON_THE_WAY

__all__ = ["OwnKernels"]

LARGEST_WHOLE = 128  # channels of float32: beyond, registers do not suffice


class OwnKernels(Backend):
    """Any mask, bias, soft cap and sinks; hidden tiles are never loaded, and nothing T x S is made."""

    name = "triton"
    devices = ("cuda",)
    gives_bias_gradient = True
    collects = ON_THE_WAY

    def why_not(self, call: Call) -> str | None:
        """As for the others; in tests the kernels run on a CPU, too."""
        return self.cannot(call) if interpreted() else super().why_not(call)

    def cannot(self, call: Call) -> str | None:
        """What the kernels cannot take."""
        scores, scoring, v = call.scores, call.scores.scoring, call.v
        if call.dropout or call.plain_because:
            return call.matrix_because
        if not scoring.scale > 0:  # the largest product would not be the largest score
            return f"it takes a scale above 0, not {scoring.scale:g}"
        if v.shape[-1] > LARGEST_HEAD:
            return f"it takes value_dim up to {LARGEST_HEAD}, not {v.shape[-1]}"
        widest = max(scores.q.shape[-1], v.shape[-1])
        if scores.q.dtype == torch.float32 and widest > LARGEST_WHOLE:
            return f"it takes float32 with head_dim and value_dim up to {LARGEST_WHOLE}, not {widest}"
        if call.bias_gradient:
            if scoring.relative is not None:
                return "with gradients of what is added it takes no relative bias"
            if scoring.bias is not None and scoring.bias.shape[2:] != scores.shape[2:]:
                shape = list(scoring.bias.shape)
                return f"with gradients of what is added it takes no bias {shape} that queries or keys share"
        # in a graph nothing is known of the device: it is asked when the graph runs
        return None if torch.compiler.is_compiling() else cannot(scores)

    def reluctance(self, call: Call) -> str | None:
        """What torch's own kernels do best: full, or causal on a square, and nothing else; float32."""
        scores, scoring = call.scores, call.scores.scoring
        if interpreted() or (call.collect and self.can_collect(call)) or scoring.softcap is not None:
            return None
        if scores.q.dtype not in HALF:
            if call.bias_gradient or not in_one_call(scores):
                return None
            return "torch's efficient kernel takes float32 as it is, and ours has to be compiled for long"
        if not in_one_call(scores) or adds(scores) or scoring.sinks is not None:
            return None
        return "torch's kernels are faster where no rule is more than causal"

    def lasts(self, call: Call) -> bool:
        """It goes by sizes and rules."""
        return True

    def ways(self, call: Call) -> Ways:
        """The launches of such calls, with all they take but tensors."""
        from .gpu import attend, attend_backward

        names, back_by = self.collected(call), attend_backward.planned(call.bias_gradient)

        def backward(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
            found = back_by(scores, v, out, lse, grad)
            back = ScoreGradients(found.q, found.k, found.bias, found.slopes)
            return back, found.v, sinks_gradient(scores, out, lse, grad)

        return Ways(attend.planned(call.scores, call.v, names), backward, names)

    def how(self, call: Call) -> str:
        """In a phrase."""
        return "tile by tile in one kernel"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """(output [B, H, T, Dv], lse [B, H, T])."""
        from .gpu.attend import attend
        from .gpu.request import Prepared

        out, lse, _ = attend(Prepared(call.scores), call.v)
        return out, lse

    def can_collect(self, call: Call) -> bool:
        """Something of what is asked for; a few queries over keys in parts are quickly walked again."""
        return call.scores.shape[2] > FEW_QUERIES and any(name in self.collects for name in call.collect)

    def forward_and_collect(self, call: Call, names: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and [len(names), B, H, T] values per query."""
        from .gpu.attend import attend
        from .gpu.request import Prepared

        out, lse, rows = attend(Prepared(call.scores), call.v, names)
        assert rows is not None, "asked for by name"
        return out, lse, rows

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """No atomics: the same bits every time."""
        from .gpu.attend_backward import backward
        from .gpu.request import Prepared

        found = backward(Prepared(call.scores, lse), call.v, out, grad, call.bias_gradient)
        back = ScoreGradients(found.q, found.k, found.bias, found.slopes)
        return back, found.v, sinks_gradient(call.scores, out, lse, grad)
