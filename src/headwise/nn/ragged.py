"""Ragged batches: `mha(x, lengths=..)` and `mha(x, documents=..)`, which compute nothing for padding.

Real tokens are packed one after another, once. Projections, norms, rotations and gates see them packed,
[1, N, E]; each sequence attends to itself:

    on a CPU        one call each; short ones side by side, padded to the longest
    on a GPU        all in one call of torch's flash kernel; side by side where that kernel cannot: float32,
                    soft caps, sinks, ALiBi, a relative bias, dropout, no heads over 256 wide
    compiled        padded altogether: how many tokens there are is not known in a graph

A mask that depends on more than positions, or a bias that is a tensor, is given for the padded batch: then
attention is padded, and the rest is not. If no token is padding, or all are, the call is an ordinary one. In
every case the output is that of the padded call, with 0 at padding.

Letters: B batch, T query_len, N tokens in all, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..arguments import scores_from, text_of, under_autocast, window_rule
from ..engines import packed_sequences
from ..engines.kernels import CPU_FLASH, KernelCall, Three
from ..engines.packed_sequences import Places, Runs
from ..engines.scores import Scores
from ..errors import ArgumentError
from ..functional import attention
from ..map import AttentionMap, later
from ..mask_meaning import as_ids
from ..mask_rules import is_traced
from ..masks import CAUSAL, NOTHING_HIDDEN, Mask
from ..scoring import Alibi, Bias, Relative, Scoring
from . import module_call, options, self_attention
from .one_step import CustomKernel
from .options import Inputs
from .packed_weights import is_unobserved

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

BY_DISTANCE = (Alibi, Relative)  # a bias that is the same in every sequence
SHORT = 2**17  # n * n * H * D; on a CPU, fewer of these are not worth a call of their own


class Batch(NamedTuple):
    """The positions of the real tokens in a padded batch [B, T]."""

    runs: Runs
    places: Places
    ids: Tensor | None  # ids of documents, int [B or 1, T]; None: the batch has lengths

    def rules(self) -> Mask:
        """Return the mask of the padded batch."""
        if self.ids is not None:
            return Mask.documents(self.ids)
        return Mask.padding(self.places.counts, self.places.counts)


class PackedCall(NamedTuple):
    """A call whose real tokens are packed one after another."""

    module: MultiHeadAttention
    q: Tensor  # [1, H, N, D]
    k: Tensor  # [1, Hk, N, D]
    v: Tensor  # [1, Hk, N, Dv]
    mask: Mask | Tensor | None
    bias: Bias | None
    batch: Batch

    @property
    def dropout(self) -> float:
        """The share of weights that are dropped; 0 outside training."""
        return self.module.dropout if self.module.training else 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, AttentionMap]:
        """Return (output, map) of an ordinary attention call with the module's options."""
        chosen = options.attention_options(self.module, mask, self.bias, q.device)
        return attention(q, k, v, *chosen, self.dropout)


def forward(
    module: MultiHeadAttention, inputs: Inputs, need_weights: bool
) -> tuple[Tensor, AttentionMap | None]:
    """Return (output [B, T, E], map or None) of a call with lengths or documents.

    Raises:
        ArgumentError: lengths and documents at once; with a key, a value or a cache.
        ShapeError, MaskError: sizes or numbers that do not fit the batch.
    """
    check_alone(inputs)
    query, _, _, mask, bias, positions, _, lengths, documents = inputs
    batch = _batch(module, query, lengths, documents)
    if batch is None:
        padded, real = as_mask(module, inputs)
        heads, weights, _ = module._attend(padded)
        output = without_padding(module._finish(heads, padded.query), real)
        return output, weights if need_weights else None
    if mask is bias is positions is None:
        plain = _plainest(module, query, batch, need_weights)
        if plain is not None:
            return plain
    packed, shown = _attend(module, inputs, batch, need_weights)
    output = module.out_proj(packed.transpose(1, 2).flatten(2))  # [1, N, E]
    return batch.runs.unpack(output, batch.places), shown


def head_outputs(module: MultiHeadAttention, inputs: Inputs) -> Tensor:
    """Return the output of each head, [B, H, T, Dv], 0 at padding; raises as `forward`."""
    check_alone(inputs)
    batch = _batch(module, inputs.query, inputs.lengths, inputs.documents)
    if batch is None:
        padded, real = as_mask(module, inputs)
        heads = options.gated(module, module._attend(padded)[0], padded.query)
        return without_padding(heads, None if real is None else real[:, None])
    packed, _ = _attend(module, inputs, batch, False)
    return batch.runs.unpack_heads(packed, batch.places)


# As a padded batch with a mask


def as_mask(module: MultiHeadAttention, inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """Replace lengths or documents by a mask: (inputs, which tokens are real; None: all).

    For compilers and listeners, which need all of [B, T]. The query has 0 at padding; set the output there to
    0 with `without_padding`.
    """
    query, mask, lengths, documents = inputs.query, inputs.mask, inputs.lengths, inputs.documents
    module_call.check(module, query, query, query)
    (B, T, _), real = query.shape, None
    if documents is not None:
        rules = Mask.documents(as_ids(documents, "ids")[..., 0].to(query.device))
    else:
        counts = module_call.as_lengths(lengths).to(query.device)
        if not (torch.compiler.is_compiling() or is_traced()):
            module_call.check_lengths(counts.tolist(), B, T)
        rules = Mask.padding(counts, counts)
        real = real_tokens(counts, query)
        query = without_padding(query, real)
    if mask is not None:
        rules = module_call.rules_of(mask, B, T, T, itself=True) & rules
    return inputs._replace(query=query, mask=rules, lengths=None, documents=None), real


def real_tokens(lengths: Tensor | Sequence[int], x: Tensor) -> Tensor:
    """Return which tokens of x [B, .., T, C] are real, bool [B, T]."""
    counts = torch.as_tensor(lengths, device=x.device)
    return torch.arange(x.shape[-2], device=x.device) < counts[:, None]


def without_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """Return x [.., T, C] with 0 where `real` [.., T] is False; None: all tokens are real."""
    return x if real is None else x.masked_fill(~real[..., None], 0)


# Checks


def check_alone(inputs: Inputs) -> None:
    """Raise for arguments that cannot be combined with lengths or documents."""
    _, key, value, _, _, _, cache, lengths, documents = inputs
    name = "lengths" if documents is None else "documents"
    if lengths is not None and documents is not None:
        raise ArgumentError(
            f"lengths must not be given with documents: got {text_of(lengths)} and {text_of(documents)}; "
            "give padding a document id of its own, and ignore its output"
        )
    if key is not None or value is not None:
        got = text_of(value if key is None else key)
        raise ArgumentError(
            f"{name} must not be given in cross-attention: got key or value {got}; use "
            "mask=Mask.padding(key_lengths) or mask=Mask.documents(ids, query_ids)"
        )
    if cache is not None and documents is not None:
        raise ArgumentError(
            f"documents must not be given with a cache: got {type(cache).__name__}; make each document a "
            "sequence of its own, and pass lengths="
        )


def _batch(
    module: MultiHeadAttention,
    query: Tensor,
    lengths: Tensor | Sequence[int] | None,
    documents: Tensor | Sequence[int] | None,
) -> Batch | None:
    """Return the positions of the real tokens, or None if an ordinary call is at least as good.

    Lengths or documents on a device are read once, which waits for the device.
    """
    module_call.check(module, query, query, query)
    if torch.compiler.is_compiling() or is_traced():
        return None
    B, T, _ = query.shape
    if documents is None:
        counts: list[int]
        if isinstance(lengths, list) and all(type(count) is int for count in lengths):
            counts = lengths  # needs no tensor
        else:
            counts = module_call.as_lengths(lengths).tolist()
        module_call.check_lengths(counts, B, T)
        runs, ids = Runs.of_lengths(tuple(counts), T), None
        if not runs.total or runs.everything:
            return None
    else:
        ids = as_ids(documents, "ids")[..., 0]
        runs = Runs.of_documents(ids.cpu(), B, T)
        if len(runs.counts) == B:
            return None
        ids = ids.to(query.device) if ids.device != query.device else ids.clone()
    return Batch(runs, runs.places(query, keep=is_unobserved(query)), ids)


# As packed tokens


def _attend(
    module: MultiHeadAttention, inputs: Inputs, batch: Batch, need_weights: bool
) -> tuple[Tensor, AttentionMap | None]:
    """Return (the output of each head for packed tokens, [1, H, N, Dv]; the map of the padded batch)."""
    query, _, _, mask, bias, positions, *_ = inputs
    runs, places = batch.runs, batch.places
    x = runs.pack(query, places)  # [1, N, E]
    q, k, v = module._project(x, x, x)
    if module.rope is not None:
        at = places.positions
        if positions is not None:
            options.check_positions(positions, query[:, None], "positions")
            assert isinstance(positions, Tensor)
            at = runs.pack(positions.expand(runs.batch, runs.length)[..., None], places)[0, :, 0]
        q, k = options.rotated(module.rope, q, k, at, 0, itself=True)
    elif positions is not None:
        raise module_call.no_use(positions)
    q, k, v = under_autocast(q, k, v)
    call = PackedCall(module, q, k, v, mask, bias, batch)
    weights: AttentionMap | None
    if isinstance(mask, Tensor) or not (mask is None or mask.is_positional) or _is_of_pairs(bias):
        heads, weights = _padded(call)
    else:
        result = _all_at_once(call, mask)
        if result is None:
            result = _attend_function(q, runs, q.shape[1] * q.shape[3])(call, mask)
        heads, lse = result
        weights = _map(module, q, k, lse, mask, bias, batch) if need_weights else None
    return options.gated(module, heads, x), weights if need_weights else None


class _OverRuns(CustomKernel):
    """Attention within each packed sequence: one kernel on a GPU, one call for each sequence on a CPU."""

    __slots__ = ("in_rows", "is_alone", "offsets", "runs")

    def __init__(self, runs: Runs, offsets: Tensor, in_rows: bool, is_alone: bool) -> None:
        self.runs, self.offsets, self.in_rows, self.is_alone = runs, offsets, in_rows, is_alone

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        q, k, v, _, band, scale = call
        if self.in_rows:
            q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)  # [N, H, D]
            out, lse = packed_sequences.attend_rows(q, k, v, self.runs, self.offsets, band, scale)
            return out.transpose(0, 1)[None], lse[None]
        if self.is_alone:
            return CPU_FLASH.forward(call)
        outs, lses = [], []
        for q_i, k_i, v_i in self._by_sequence(q, k, v):
            out, lse = CPU_FLASH.forward((q_i, k_i, v_i, None, band, scale))
            outs.append(out.transpose(1, 2))
            lses.append(lse)
        return torch.cat(outs, 1).transpose(1, 2), torch.cat(lses, 2)  # in the memory layout of a single call

    def backward(self, call: KernelCall, out: Tensor, lse: Tensor, grad: Tensor) -> Three:
        q, k, v, _, band, scale = call
        if self.in_rows:
            q, k, v, out, grad = (x[0].transpose(0, 1) for x in (q, k, v, out, grad))
            dq, dk, dv = packed_sequences.attend_rows_backward(
                q, k, v, self.runs, self.offsets, band, scale, out, lse[0], grad
            )
            return dq.transpose(0, 1)[None], dk.transpose(0, 1)[None], dv.transpose(0, 1)[None]
        if self.is_alone:
            return CPU_FLASH.backward(call, out, lse, grad)
        parts = []
        for q_i, k_i, v_i, out_i, lse_i, grad_i in self._by_sequence(q, k, v, out, lse, grad):
            parts.append(CPU_FLASH.backward((q_i, k_i, v_i, None, band, scale), out_i, lse_i, grad_i))
        dq, dk, dv = (torch.cat(grads, 2) for grads in zip(*parts, strict=True))
        return dq, dk, dv

    def rules(self, causal: bool, shape: Sequence[int]) -> Mask:
        counts = self.runs.counts
        numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        rules = Mask.documents(numbers.to(self.offsets.device))
        return (rules & CAUSAL if causal else rules).bind(shape[0], shape[1], shape[2], shape[2])

    def _by_sequence(self, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the slices of tensors [1, .., N, ..] for each sequence that has tokens."""
        apart = [x.split(self.runs.counts, dim=2) for x in packed]
        return (parts for parts in zip(*apart, strict=True) if parts[0].shape[2])


def _plainest(
    module: MultiHeadAttention, query: Tensor, batch: Batch, need_weights: bool
) -> tuple[Tensor, AttentionMap | None] | None:
    """Return (output [B, T, E], map) of a module without options, as one autograd node; else None.

    A call takes 0.82 to 0.84 of its time on an H200, 0.91 on a CPU.
    """
    (runs, places, _), fields = batch, module.__dict__
    D = fields["head_dim"]
    takes = in_rows = packed_sequences.takes_rows(query, D)
    is_alone = max(runs.counts) == runs.total
    if not in_rows and query.is_cpu and not packed_sequences.has_kernel(query):
        separately = is_alone or _attend_function(query, runs, fields["num_heads"] * D) is _separately
        takes = separately and query.dtype in CPU_FLASH.dtypes
    layers = self_attention.packed_layers(module, query) if takes else None
    if layers is None:
        return None
    runner, x = _OverRuns(runs, places.offsets, in_rows, is_alone), runs.pack(query, places)
    result = self_attention.run_packed_layers(module, layers, x, None, fields["causal"], runner)
    if result is None:
        return None
    output, projected, lse, step = result
    weights = None
    if need_weights:
        q, k, _ = step.heads((projected,))
        weights = _map(module, q, k, lse, None, None, batch)
    return runs.unpack(output, places), weights


def _is_of_pairs(bias: object) -> bool:
    """Return True if a bias is given for each pair of tokens of a padded batch, not by distance."""
    parts = bias if isinstance(bias, tuple) else (bias,)
    return bias is not None and not all(isinstance(part, BY_DISTANCE) for part in parts)


HeadsAndLse = tuple[Tensor, Tensor]  # heads [1, H, N, Dv], lse [1, H, N]
AttendFunction = Callable[[PackedCall, Mask | None], HeadsAndLse]


def _attend_function(x: Tensor, runs: Runs, width: int) -> AttendFunction:
    """Choose how packed heads attend if no single kernel takes them all; width: H * D."""
    counts, longest = runs.counts, max(runs.counts)
    if x.is_cuda:  # one long document among many short ones would add too much padding
        few = len(counts) * longest <= 2 * runs.batch * runs.length
    else:
        few = min(counts) == longest or longest * longest * width < SHORT
    return _side_by_side if few else _separately


def _all_at_once(call: PackedCall, mask: Mask | None) -> HeadsAndLse | None:
    """Return heads and lse from one kernel for sequences of any lengths; None if it cannot run."""
    module, q, v = call.module, call.q, call.v
    if not packed_sequences.has_kernel(v):
        return None
    if call.bias is not None or module.alibi or module.relative_bias is not None:
        return None
    rules = NOTHING_HIDDEN if mask is None else mask
    if module.causal:
        rules = CAUSAL if mask is None else rules & CAUSAL
    if module.window is not None:
        rules = rules & window_rule(module.window)
    scoring = Scoring.of(q.shape[-1], scale=module.scale, softcap=module.softcap, sinks=module.sinks)
    scores = Scores(q, call.k, rules, scoring)
    if packed_sequences.why_not(scores, v, call.dropout) is not None:
        return None
    return packed_sequences.attend(scores, v, call.batch.runs, call.batch.places)


def _separately(call: PackedCall, mask: Mask | None) -> HeadsAndLse:
    """Return heads and lse from one attention call for each sequence."""
    heads, lse = [], []
    # one split for all sequences, so that its backward is a single step, too
    apart = (x.split(call.batch.runs.counts, dim=2) for x in (call.q, call.k, call.v))
    for q, k, v in zip(*apart, strict=True):
        if q.shape[2]:
            output, weights = call.attend(q, k, v, mask)
            heads.append(output)
            lse.append(weights.lse)
    return torch.cat(heads, dim=2), torch.cat(lse, dim=2)


def _side_by_side(call: PackedCall, mask: Mask | None) -> HeadsAndLse:
    """Return heads and lse from one call over all sequences, padded to the longest."""
    counts = call.batch.runs.counts
    runs = Runs.of_lengths(counts, max(counts))
    places = runs.places(call.q, keep=is_unobserved(call.q))
    if not runs.everything:
        rules = Mask.padding(places.counts)
        mask = rules if mask is None else rules & mask
    q, k, v = (runs.unpack_heads(x, places) for x in (call.q, call.k, call.v))
    heads, weights = call.attend(q, k, v, mask)
    lse = runs.pack_heads(weights.lse[..., None], places)
    return runs.pack_heads(heads, places), lse[..., 0]


def _padded(call: PackedCall) -> tuple[Tensor, AttentionMap]:
    """Return (heads [1, H, N, Dv], map of the padded batch), computed on the padded batch."""
    runs, places, rules = call.batch.runs, call.batch.places, call.batch.rules()
    if call.mask is not None:
        rules = module_call.rules_of(call.mask, runs.batch, runs.length, runs.length, itself=True) & rules
    q, k, v = (runs.unpack_heads(x, places) for x in (call.q, call.k, call.v))
    heads, weights = call.attend(q, k, v, rules)
    return runs.pack_heads(heads, places), weights


# The map


def _map(
    module: MultiHeadAttention,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: Mask | None,
    bias: Bias | None,
    batch: Batch,
) -> AttentionMap:
    """Return the map of the padded batch, [B, H, T, T], computed on use; queries at padding are zeros."""
    runs, places = batch.runs, batch.places
    chosen = options.attention_options(module, mask, bias, q.device)
    inputs = [q, k, *([] if module.sinks is None else [module.sinks])]
    versions = [None if x.is_inference() else x._version for x in inputs]
    grad = torch.is_grad_enabled()

    def build() -> tuple[Scores, Tensor | None]:
        if versions != [None if x.is_inference() else x._version for x in inputs]:
            raise ArgumentError(
                "q, k, mask and bias must not change while their map is in use: one was written to in place; "
                "pass q.clone() and k.clone(), or read the map before writing"
            )
        with torch.inference_mode(q.is_inference()), torch.set_grad_enabled(grad):
            padded_q, padded_k = (runs.unpack_heads(x, places) for x in (q, k))
            rules = batch.rules() if mask is None else batch.rules() & mask
            scores = scores_from(padded_q, padded_k, padded_k, chosen._replace(mask=rules))
            return scores, runs.unpack_lse(lse, places, scores)

    return later(build)
