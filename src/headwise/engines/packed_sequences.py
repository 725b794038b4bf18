"""Sequences of different lengths, packed one after another: their positions, and attention of all at once.

    [B, T]    a b c .        packed [N]   a b c d e f g h i        counts 3, 2, 4
              d e . .
              f g h i

Nothing is computed for a position without a token. On a GPU torch's flash kernel takes all sequences in one
call, each attending to itself, and has its own backward. Elsewhere each sequence is an ordinary call.

Letters: B batch, T length of a padded sequence, N tokens in all, H num_heads, Hk num_kv_heads, D head_dim,
Dv value_dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MaskError, ShapeError
from ..masks import Mask
from ..scoring import Scoring
from . import backends, plain
from .first_pass import call_of
from .gradients import Context
from .kernels import CAUSAL, CUDA_FLASH, Band, Three, window_of
from .scores import Scores, own_precision

aten = torch.ops.aten


class Places(NamedTuple):
    """Index tensors of runs, on their device."""

    tokens: Tensor  # int64 [N], the index of each token among B * T
    positions: Tensor  # int64 [N], the position of each token in its run
    offsets: Tensor  # int32 [runs + 1], where runs begin among the N
    counts: Tensor  # int64 [runs]


@dataclass(frozen=True)
class Runs:
    """Runs of tokens in [B, T], packed one after another."""

    batch: int
    length: int
    starts: tuple[int, ...]  # among B * T
    counts: tuple[int, ...]

    @classmethod
    def of_lengths(cls, counts: tuple[int, ...], length: int) -> Runs:
        """Return the runs of the first tokens of every sequence."""
        return cls(len(counts), length, tuple(range(0, len(counts) * length, length)), counts)

    @classmethod
    def of_documents(cls, ids: Tensor, batch: int, length: int) -> Runs:
        """Return the runs of equal ids; ids int [B or 1, T], on the CPU.

        Raises:
            ShapeError: not one id per token.
            MaskError: a document that is not contiguous.
        """
        if ids.shape[1] != length or ids.shape[0] not in (1, batch):
            raise ShapeError(
                f"documents must have one id per token, [T] or [B, T]: got {list(ids.shape)} for "
                f"{[batch, length]}; give padding an id, too"
            )
        new = torch.ones_like(ids, dtype=torch.bool)
        new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        ordered = ids.sort(dim=1).values
        if bool((new.sum(1) != 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)).any()):
            raise _scattered(ids, new)
        starts = new.expand(batch, length).flatten().nonzero()[:, 0]
        ends = torch.cat([starts[1:], starts.new_tensor([batch * length])])
        return cls(batch, length, tuple(starts.tolist()), tuple((ends - starts).tolist()))

    @functools.cached_property
    def total(self) -> int:
        """N, the number of tokens."""
        return sum(self.counts)

    @property
    def everything(self) -> bool:
        """True if every position of [B, T] holds a token."""
        return self.total == self.batch * self.length

    def places(self, like: Tensor, keep: bool) -> Places:
        """Return the index tensors on the device of `like`; keep: cached for the next layer.

        Cached tensors belong to one stream: on another the copy may not have finished.
        """
        stream = 0
        if like.is_cuda:
            stream = torch.cuda.current_stream(like.device).cuda_stream
            keep = keep and not torch.cuda.is_current_stream_capturing()
        make = _cached_places if keep else _places
        return make(self.starts, self.counts, like.device, stream)

    def pack(self, x: Tensor, places: Places) -> Tensor:
        """Return [1, N, C] from [B, T, C]."""
        flat = x.reshape(1, -1, x.shape[-1])
        return flat if self.everything else flat.index_select(1, places.tokens)

    def unpack(self, packed: Tensor, places: Places) -> Tensor:
        """Return [B, T, C] from [1, N, C], 0 where there is no token."""
        C = packed.shape[-1]
        if self.everything:
            return packed.reshape(self.batch, self.length, C)
        room = packed.new_zeros(1, self.batch * self.length, C)
        if plain.transforms_are_active():
            room = room.index_copy(1, places.tokens, packed)
        else:
            room.index_copy_(1, places.tokens, packed)
        return room.view(self.batch, self.length, C)

    def unpack_heads(self, packed: Tensor, places: Places) -> Tensor:
        """Return [B, H, T, C] from [1, H, N, C]."""
        H = packed.shape[1]
        return self.unpack(packed.transpose(1, 2).flatten(2), places).unflatten(-1, (H, -1)).transpose(1, 2)

    def unpack_lse(self, lse: Tensor, places: Places, scores: Scores) -> Tensor | None:
        """Return [B, H, T] of [1, H, N], with the lse of zero queries at padding; None if there are biases.

        scores: of the padded batch.
        """
        B, T, H = self.batch, self.length, lse.shape[1]
        if self.everything:
            return lse.reshape(H, B, T).transpose(0, 1).contiguous()
        scoring = scores.scoring
        if not (scoring.bias is None and scoring.slopes is None and scoring.relative is None):
            return None
        room = lse_of_zeros(scores, places.counts).transpose(1, 2).expand(B, T, H).reshape(1, B * T, H)
        filled = room.index_copy(1, places.tokens, lse.transpose(1, 2).to(room.dtype))
        return filled.view(B, T, H).transpose(1, 2).contiguous()

    def pack_heads(self, heads: Tensor, places: Places) -> Tensor:
        """Return [1, H, N, C] from [B, H, T, C]."""
        H = heads.shape[1]
        return self.pack(heads.transpose(1, 2).flatten(2), places).unflatten(-1, (H, -1)).transpose(1, 2)


def _scattered(ids: Tensor, new: Tensor) -> MaskError:
    """Return the error about an id that occurs in two runs."""
    for b in range(len(ids)):
        ids_before: set[int] = set()
        for at in new[b].nonzero()[:, 0].tolist():
            name = int(ids[b, at])
            if name in ids_before:
                return MaskError(
                    f"documents must be contiguous: id {name} occurs again at token {at} of sequence {b}; "
                    "give each part its own id, or let parts attend to each other by mask=Mask.documents(ids)"
                )
            ids_before.add(name)
    raise AssertionError("every document is contiguous")


def _places(starts: tuple[int, ...], counts: tuple[int, ...], device: torch.device, stream: int) -> Places:
    with torch.inference_mode(False):  # cached tensors may be saved for a backward
        N, runs = sum(counts), len(counts)
        begins, n = [], 0
        for count in counts:
            begins.append(n)
            n += count
        shifts = [start - begin for start, begin in zip(starts, begins, strict=True)]
        small = torch.tensor([shifts, begins, counts], dtype=torch.int64, device="cpu").view(3, runs)
        small = small.to(device, non_blocking=True)
        moved = small[:2].repeat_interleave(small[2], dim=1, output_size=N)  # no wait for the device
        numbers = torch.arange(N, device=device)
        offsets = torch.nn.functional.pad(small[2].cumsum(0), (1, 0)).to(torch.int32)
        return Places(numbers + moved[0], numbers - moved[1], offsets, small[2])


_cached_places = functools.lru_cache(maxsize=8)(_places)


# All sequences in one call


def has_kernel(x: Tensor) -> bool:
    """Return True if there is a kernel for sequences of any lengths on the device of x."""
    return x.is_cuda


def why_not(scores: Scores, v: Tensor, dropout: float) -> str | None:
    """Return why it cannot take packed q [1, H, N, D] and k, each run separately; None if it can."""
    if scores.scoring.sinks is not None:
        return "it takes no sinks"
    return backends.backend_named("flash").why_not(call_of(scores, v, dropout))


def takes_rows(x: Tensor, head_dim: int) -> bool:
    """Return True if the kernel takes heads of this size, made of x, unpadded."""
    kernel = CUDA_FLASH
    if not has_kernel(x) or x.dtype not in kernel.dtypes or head_dim % kernel.channels:
        return False
    assert kernel.max_head_dim is not None
    return head_dim <= kernel.max_head_dim and kernel.is_welcome() and _is_recent(x.device)


@functools.cache
def _is_recent(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (
        CUDA_FLASH.capability or (0, 0)
    )


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, offsets: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (output [N, H, D], lse [H, N]) of heads [N, H, D] that `takes_rows` accepts; no gradients."""
    longest = _longest(runs)
    out, lse, *_ = aten._flash_attention_forward.default(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        band == CAUSAL,
        False,
        scale=scale,
        **window_of(band),
    )
    return out, lse


def attend_rows_backward(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, offsets: Tensor, band: Band, scale: float,
    out: Tensor, lse: Tensor, grad: Tensor,
) -> Three:  # fmt: skip
    """Return the gradients of q, k and v from the results of `attend_rows` and the gradient of its output."""
    longest = _longest(runs)
    state = offsets.new_zeros(2, dtype=torch.int64)  # of dropout, which is off
    dq, dk, dv = aten._flash_attention_backward.default(
        grad.contiguous(), q, k, v, out, lse, offsets, offsets, longest, longest, 0.0, band == CAUSAL,
        state, state, scale=scale, **window_of(band),
    )  # fmt: skip
    return dq, dk, dv


def attend(scores: Scores, v: Tensor, runs: Runs, places: Places) -> tuple[Tensor, Tensor]:
    """Return (output [1, H, N, Dv], lse [1, H, N], detached): each run attends to itself, in its band."""
    band = (scores.mask.left, scores.mask.right)
    call = (scores.q, scores.k, v, runs, places.offsets, band, scores.scoring.scale)
    with own_precision(v.device):
        if torch.is_grad_enabled() and (scores.q.requires_grad or scores.k.requires_grad or v.requires_grad):
            out, lse = _Packed.apply(*call)
            return out, lse.detach()
        q, k, rows = _rows(scores.q, scores.k, v)
        out, lse = attend_rows(q, k, rows, *call[3:])
    return _heads(out, v.shape[-1]), lse[None]


class _Packed(torch.autograd.Function):
    """The flash kernel for sequences of any lengths, forward and backward."""

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, runs: Runs, offsets: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_rows, k_rows, v_rows = _rows(q, k, v)
        out, lse = attend_rows(q_rows, k_rows, v_rows, runs, offsets, band, scale)
        ctx.save_for_backward(q, k, v, offsets, out, lse)
        ctx.call = runs, band, scale
        ctx.set_materialize_grads(False)
        lse = lse[None]
        ctx.mark_non_differentiable(lse)
        return _heads(out, v.shape[-1]), lse

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, rest = grads[0], (None,) * 4
        if grad is None:
            return (None,) * 3 + rest
        q, k, v, offsets, out, lse = ctx.saved_tensors
        runs, band, scale = ctx.call
        if plain.needs_differentiable_backward(grad):

            def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return _separately(q, k, v, runs, band, scale)

            return *plain.gradients(forward, (q, k, v), ctx.needs_input_grad[:3], grad), *rest
        (out_grad,), (q_rows, k_rows, v_rows) = _rows(grad, channels=out.shape[-1]), _rows(q, k, v)
        three = attend_rows_backward(q_rows, k_rows, v_rows, runs, offsets, band, scale, out, lse, out_grad)
        return *(_heads(d, x.shape[-1]) for d, x in zip(three, (q, k, v), strict=True)), *rest


def _rows(*heads: Tensor, channels: int | None = None) -> list[Tensor]:
    """Return [1, H, N, C] as the kernel takes them: [N, H, channels], all padded to the same multiple."""
    unit = CUDA_FLASH.channels
    wide = channels or -(-max(x.shape[-1] for x in heads) // unit) * unit
    padded = [torch.nn.functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in heads]
    return [x[0].transpose(0, 1) for x in padded]


def _heads(rows: Tensor, channels: int) -> Tensor:
    """Return [1, H, N, channels] from [N, H, ..]."""
    return rows[..., :channels].transpose(0, 1)[None]


def _longest(runs: Runs) -> int:
    # for one query each the kernel swaps heads and queries, and expects a query in every sequence
    return max(2, *runs.counts)


def _separately(q: Tensor, k: Tensor, v: Tensor, runs: Runs, band: Band, scale: float) -> Tensor:
    """Compute attention of each run in operations that can be differentiated again."""
    parts = zip(*(x.split(runs.counts, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            plain.forward(Scores(q_part, k_part, Mask(*band), Scoring(scale)), v_part)[0]
            for q_part, k_part, v_part in parts
            if q_part.shape[2]
        ],
        dim=2,
    )


# Queries at padding


def lse_of_zeros(scores: Scores, counts: Tensor) -> Tensor:
    """Return the lse of a query of zeros at all positions of [B, T], [B, H or 1, T]: equal scores.

    For scores without biases; counts: how many keys each sequence has, [B].
    """
    at = torch.arange(scores.shape[2], device=scores.device)
    left, right = scores.mask.left, scores.mask.right
    first = torch.zeros_like(at) if left is None else (at - left).clamp(min=0)
    beyond = counts[:, None] if right is None else torch.minimum(counts[:, None], at + right + 1)
    lse = (beyond - first).clamp(min=0).to(scores.dtype).log()[:, None]  # [B, 1, T]
    if scores.sinks is None:
        return lse
    sunk = torch.logaddexp(lse, scores.sinks.detach().to(lse.dtype)[:, None])
    return sunk.masked_fill(torch.isneginf(lse), -torch.inf)


# A map of documents


def by_document(scores: Scores, lse: Tensor | None) -> tuple[Scores, Tensor | None]:
    """Return scores and lse with a sequence for each document, padded to the longest.

    Raises:
        MaskError: no documents; rules other than documents, causal and window; a document that is not
            contiguous.
    """
    (B, _, T, S), mask = scores.shape, scores.mask
    ids, query_ids = (None if x is None else x.cpu() for x in (mask.key_ids, mask.query_ids))
    itself = ids is not None and T == S and scores.positions is None and ids.shape[-1] == 1
    if ids is None or not itself or (query_ids is not None and not torch.equal(ids, query_ids)):
        raise MaskError(
            f"by_document must be called on a full self-attention map with documents: got {mask!r}; "
            "make it with mha(x, documents=ids)"
        )
    band = Mask(left=mask.left, right=mask.right)
    others = [name for name in mask.held if name not in ("left", "right", "key_ids", "query_ids")]
    others += [] if scores.scoring.bias is None else ["bias"]
    if others:
        raise MaskError(
            "by_document must be called on a map whose mask has only documents, causal and window: got also "
            f"{', '.join(others)}; read the map of the sequence instead"
        )
    packed = Runs.of_documents(ids[..., 0], B, T)
    runs = Runs.of_lengths(packed.counts, max(packed.counts))
    before, places = packed.places(scores.q, keep=False), runs.places(scores.q, keep=False)
    q, k = (runs.unpack_heads(packed.pack_heads(x, before), places) for x in (scores.q, scores.k))
    padding = Mask.padding(places.counts, places.counts)
    new = Scores(
        q, k, (band & padding).bind(len(runs.counts), q.shape[1], runs.length, runs.length), scores.scoring
    )
    if lse is None:
        return new, None
    return new, runs.unpack_lse(packed.pack_heads(lse[..., None], before)[..., 0], places, new)
