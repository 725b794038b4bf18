"""`headwise.parallel.attention`, a call whose sequence is sharded over ranks, and its map.

A map has this rank's queries, keys and lse; the weights are never stored. Call its methods on every rank, in
the same order: keys are passed round, each rank reduces its rows, and all ranks get the same result as one
process would. Statistics, pooled maps, mass and the heaviest keys need memory for this rank's rows only; rows
and full matrices are computed from an ordinary map, which `whole` gathers.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim; t, s this
rank's of T, S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .. import budget
from ..arguments import (
    OF_ATTENTION,
    AttentionOptions,
    check_tensors,
    refuse,
    rules_and_scoring,
    under_autocast,
    with_displayed_signature,
)
from ..engines.first_pass import call_of
from ..engines.scores import Scores
from ..engines.second_pass import Top, bound_to
from ..engines.statistics import PICTURE, STATISTICS, WITH_GRADIENT, Statistics, check_names
from ..errors import ArgumentError, HeadwiseError, ShapeError
from ..indexing import Choice
from ..map import AttentionMap, make
from ..masks import NOTHING_HIDDEN, Mask, as_mask
from ..scoring import Bias, Scoring
from . import ring_statistics
from .ring_attention import Shard, attend
from .ring_statistics import Measuring
from .sequence import Layout, Mesh, Ring, check_order, fingerprint, joined, not_split, split_error

COMMON_SIZES = (
    "batch",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "value_dim",
    "bytes per number",
)  # the same on all ranks
Checked = TypeVar("Checked")
SHORT = 2048  # keys up to which a stored map is gathered, as `watch` stores maps of one process


class ShardedMap(AttentionMap):
    """The weights of attention, [B, H, T, S], of a sequence sharded over a group of ranks.

    Call every method that computes something on all ranks. No gradient flows through it: methods that are
    differentiable in one process raise if a gradient is required.
    """

    _shard: Shard
    _local_lse: Tensor  # lse of this rank's queries, [B, H, t]

    def __init__(self, shard: Shard, lse: Tensor) -> None:
        self._shard, self._local_lse = shard, lse
        self._scores = shard.full_rows  # type: ignore[assignment]  # sizes and rules only
        self._lse = self._columns = None
        self._versions = self._versions_now()

    def __repr__(self) -> str:
        return f"Sharded{super().__repr__()[:-1]}, rank {self._shard.ring.rank} of {self._shard.ring.size})"

    # Parts

    @property
    def shard(self) -> Shard:
        """This rank's part of the call."""
        return self._shard

    @property
    def own_lse(self) -> Tensor:
        """The log-sum-exp of this rank's rows, [B, H, t]; no communication."""
        return self._local_lse

    @property
    def own_positions(self) -> Tensor:
        """The positions of this rank's queries among all T, int [t], on the CPU."""
        return self._shard.queries.positions(self._shard.ring.rank)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row's scores, [B, H, T], natural logarithm; no gradient."""
        if self._lse is None:
            self._lse = joined(self._local_lse, self._shard.ring, self._shard.queries, 2)
        return self._lse

    @property
    def requires_grad(self) -> bool:
        """True if a map of the same call in one process would require a gradient."""
        tensors = (self._shard.q, self._shard.k, *self._shard.scoring.tensors.values())
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def bias(self) -> Tensor | None:
        return self._shard.scoring.bias

    @property
    def relative(self) -> Tensor | None:
        return self._shard.scoring.relative

    @property
    def ranks(self) -> int:  # type: ignore[override]
        return self._shard.ring.size

    def to_keep(self) -> AttentionMap:
        """Return an ordinary map if the text is short, otherwise this map, whose methods need all ranks."""
        return self.whole() if self.shape[3] <= SHORT else self

    @property
    def own_keys(self) -> int:
        return self._shard.k.shape[2]

    def whole_text(self, ids: Tensor) -> Tensor:
        """Gather the token ids of all keys from those of each rank."""
        return joined(ids, self._shard.ring, self._shard.keys, 1)

    @property
    def counts_every_query(self) -> bool:
        return False  # the shortcut would save nothing, since ranks communicate anyway

    def _versions_now(self) -> tuple[int, ...] | None:
        shard = self._shard
        return Scores(shard.q, shard.k, shard.mask, shard.scoring).versions()

    def joined(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Gather a tensor of this rank's queries into one of all queries, in order."""
        return joined(tensor, self._shard.ring, self._shard.queries, dim)

    # Statistics

    def statistics(
        self,
        *names: str,
        per: str = "head",
        reach: int = 8,
        pooled: int | tuple[int, int] | None = None,
    ) -> Statistics:
        """Return statistics of the whole sequence, as `AttentionMap.statistics`, the same on every rank.

        Raises:
            ArgumentError: a name or `per` is unknown; `reach` is negative; there is less than one cell;
                entropy would need a gradient.
            HeadwiseError: another rank raised one of these.
        """
        names = tuple(dict.fromkeys(names)) or STATISTICS

        def check() -> tuple[int, int] | None:
            if per not in ("head", "query"):
                raise ArgumentError(f'per must be "head" or "query": got {per!r}; received is always per key')
            check_names(names)
            if reach < 0:
                raise ArgumentError(f"reach must not be negative: got {reach}; 0 is the query's own position")
            wanted = [name for name in names if name in WITH_GRADIENT]
            if wanted:
                self._check_no_gradient(" and ".join(wanted))
            return None if pooled is None else self._cells(pooled)

        measuring, cells = self._agreed("statistics", check)
        return Statistics(ring_statistics.measure(measuring, names, per == "query", reach, cells))

    def pooled(self, cells: int | tuple[int, int] = 128) -> Tensor:
        """Return the pooled map of the whole sequence, [B, H, rows, columns], as `AttentionMap.pooled`."""
        measuring, pair = self._agreed("pooled", lambda: self._cells(cells))
        return ring_statistics.measure(measuring, (), False, 0, pair)[PICTURE]

    def top(self, count: int = 8) -> Top:
        """Return the heaviest keys of every query, [B, H, T, count], as `AttentionMap.top`."""
        measuring, _ = self._agreed("top", lambda: self._check_count(count))
        return ring_statistics.top(measuring, count)

    def mass(self, on: Mask | Tensor, *, per: str = "head") -> Tensor:
        """Return the weight each query puts on the keys that `on` allows, as `AttentionMap.mass`."""

        def check() -> Mask:
            if per not in ("head", "query"):
                raise ArgumentError(
                    f'per must be "head" or "query": got {per!r}; "head" is the mean over its queries'
                )
            return bound_to(as_mask(on), self._scores)

        measuring, bound = self._agreed("mass", check)
        return ring_statistics.mass(measuring, bound, per == "query")

    def _agreed(self, operation: str, check: Callable[[], Checked]) -> tuple[Measuring, Checked]:
        """Return (this rank's rows, the result of `check`); raise on all ranks if `check` raises on one."""
        checked: Any = None
        error: HeadwiseError | None = None
        try:
            self.check_whole_rows(operation)
            checked = check()
        except HeadwiseError as refused:
            error = refused
        with torch.no_grad():
            return Measuring.of(self._shard.detach(), self._local_lse, error), checked

    # Through an ordinary map

    def whole(self, *, limit: int | str | None = None) -> AttentionMap:
        """Return an `AttentionMap` of the whole sequence on every rank.

        Args:
            limit: a memory budget for q and k of the whole sequence, e.g. "2 GiB"; see `headwise.budget`.

        Raises:
            ArgumentError: a gradient is required, which a sharded map does not have.
            BudgetExceeded: q and k would not fit.
            HeadwiseError: another rank raised one of these.
        """
        return self._gathered(limit, None, "whole")

    def _gathered(
        self, limit: int | str | None, dense: tuple[Sequence[int], torch.dtype] | None, operation: str
    ) -> AttentionMap:
        """Return `whole()`; dense: shape and dtype of the tensor to be computed from it, for the budget."""
        shard = self._shard
        B, H, T, S = shard.shape
        error: HeadwiseError | None = None
        try:
            self._check_no_gradient(operation)
            self.check_unchanged()
            if dense is not None:
                self._check_budget(dense[0], "weights", limit, dense[1])
            numbers = B * T * H * shard.q.shape[3] + B * S * shard.k.shape[1] * shard.k.shape[3]
            budget.check(
                numbers * shard.q.dtype.itemsize, self.device, f"q and k of all {shard.ring.size} ranks",
                "use statistics, pooled, top or mass, which need only the q and k of each rank",
                None if limit is None else budget.parse(limit),
            )  # fmt: skip
        except HeadwiseError as refused:
            error = refused
        shard.ring.agree([], error, self.device)
        detached = shard.detach()
        q, k = joined(detached.q, shard.ring, shard.queries, 2), joined(detached.k, shard.ring, shard.keys, 2)
        return make(Scores(q, k, detached.mask, detached.scoring), self.lse)

    def select(
        self, *, batch: Choice = None, heads: Choice = None, queries: Choice = None, keys: Choice = None
    ) -> AttentionMap:
        """Return part of the map as an `AttentionMap`; see `whole`."""
        return self.whole().select(batch=batch, heads=heads, queries=queries, keys=keys)

    def by_document(self) -> AttentionMap:
        """Return the map of each document; see `AttentionMap.by_document` and `whole`."""
        return self.whole().by_document()

    def __getitem__(self, index: Any) -> Tensor:
        return self.whole()[index]

    def dense(self, *, limit: int | str | None = None) -> Tensor:
        """Return the weights as a tensor, [B, H, T, S], on every rank; no gradient.

        Raises:
            BudgetExceeded: it would not fit.
        """
        return self._gathered(limit, (self.shape, self.dtype), "dense").dense(limit=limit)

    def mean_heads(self, *, limit: int | str | None = None) -> Tensor:
        """Return the mean over heads, [B, T, S], on every rank; no gradient.

        Raises:
            BudgetExceeded: it would not fit.
        """
        B, _, T, S = self.shape
        return self._gathered(limit, ((B, T, S), self._scores.dtype), "mean_heads").mean_heads(limit=limit)

    def plot(self, *args: Any, **named: Any) -> Any:
        """Draw a heat map of every head, as `AttentionMap.plot`; see `whole`."""
        return self.whole().plot(*args, **named)

    # Copies

    def detach(self) -> ShardedMap:
        """Return the map without gradients."""
        self.check_unchanged()
        new = ShardedMap(self._shard.detach(), self._local_lse)
        new._lse = self._lse
        return new

    def to(self, device: torch.device | str) -> NoReturn:
        """Raise `ArgumentError`: the map stays on the devices of its ranks."""
        raise ArgumentError(
            f"device must not change for a map over {self._shard.ring.size} ranks: it is on {self.device}, "
            f"got {device!r}; use map.whole().to(device)"
        )

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            f"map must not be sharded to be saved: it is over {self.ranks} ranks; save map.whole()"
        )

    def _check_no_gradient(self, operation: str) -> None:
        if self.requires_grad:
            raise ArgumentError(
                f"{operation} must be computed without gradients over {self._shard.ring.size} ranks: an "
                "input requires a gradient; use map.detach() or torch.no_grad()"
            )


# One call


@with_displayed_signature
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
    *,
    mesh: Mesh = None,
    axis: str | None = None,
    order: str = "zigzag",
    length: int | tuple[int, int] | None = None,
    **wrong: object,
) -> tuple[Tensor, ShardedMap]:
    """Compute `headwise.attention` of a sequence sharded over ranks, from q, k and v of this rank's tokens.

    Pass masks and biases for the whole sequence, the same on every rank. The gradients of a learned bias,
    slopes and sinks are those from this rank's queries; add them up over ranks with `sum_gradients`, like the
    gradients of other parameters.

    Args:
        q: [B, H, t, D], this rank's queries, as returned by `split`.
        k: [B, Hk, s, D], this rank's keys; v: [B, Hk, s, Dv], their values.
        mask, causal, window, scale, softcap, bias, sinks: as in `headwise.attention`.
        mesh: a `DeviceMesh`, a process group, or None for all ranks; axis: the dimension of a mesh that has
            several.
        order: how tokens are distributed over ranks, "zigzag" or "in order", as in `split`.
        length: the length T = S, or (T, S), if you know it. Without it, ranks exchange their
            numbers of tokens and whether their arguments are valid: a small message, and on a GPU a
            synchronization.

    Returns:
        output [B, H, t, Dv] of this rank's queries, and the map of the whole sequence, [B, H, T, S].

    Raises:
        ShapeError, ArgumentError, MaskError: as in `headwise.attention`; tokens are not those of the rank,
            not split, or split in another order; a function transform or a forward-mode derivative is active.
        HeadwiseError: another rank raised one of these.
    """
    if wrong:
        refuse("attention", wrong, OF_ATTENTION, attention)
    ring = Ring.of(mesh, axis)
    error: HeadwiseError | TypeError | None = None
    inputs = (q, k, v)  # before autocast, which returns tensors without the mark of `split`
    try:
        check_order(order)
        q, k, v = under_autocast(q, k, v)
        check_tensors(q, k, v)
        for tokens in inputs:
            wrong_order = split_error(tokens, ring, order, dim=2)
            if wrong_order is not None:
                raise wrong_order
    except (HeadwiseError, TypeError) as refused:
        error = refused
    queries, keys = agree_on_layouts(ring, order, length, q, k, v, error, inputs)
    shape = (q.shape[0], q.shape[1], queries.length, keys.length)
    options = AttentionOptions(mask, causal, window, scale, softcap, bias, sinks)
    rules = rules_and_scoring(q, shape, options)
    return attend_shard(Shard(ring, q, k, *rules, queries, keys), v)


def attend_shard(shard: Shard, v: Tensor) -> tuple[Tensor, ShardedMap]:
    """Return (output, map) of a shard whose arguments have been checked."""
    local_scores = Scores(shard.q, shard.k, NOTHING_HIDDEN, Scoring(shard.scoring.scale))
    reason = call_of(local_scores, v).plain_because
    if reason is not None:
        raise ArgumentError(
            f"attention over {shard.ring.size} ranks must not be traced or transformed: {reason}; "
            "use one process"
        )
    output, lse = attend(shard, v)
    return output, ShardedMap(shard, lse)


def agree_on_layouts(
    ring: Ring,
    order: str,
    length: int | tuple[int, int] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    error: BaseException | None = None,
    tokens: Sequence[Tensor] = (),
) -> tuple[Layout, Layout]:
    """Return the layouts of queries and keys, from this rank's q [B, H, t, D], k and v; or raise on all.

    Args:
        length: the length of the whole sequence, if known; ranks then do not communicate.
        error: the error that this rank raises, if any.
        tokens: tensors to compare over ranks: one that is the same on all ranks was not split.
    """
    if length is None:
        if error is not None:
            q = k = v = torch.empty(0, 0, 0, 0, device=getattr(q, "device", None))
        device = q.device
        mine = [q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype.itemsize]
        prints = [0.0 if error is not None else fingerprint(tensor) for tensor in tokens]
        by_rank = ring.agree([*prints, q.shape[2], k.shape[2], *mine], error, device)
        sizes = [[int(n) for n in numbers[len(tokens) :]] for numbers in by_rank]
        if not mine[0]:
            raise ShapeError(
                f"batch must not be empty over {ring.size} ranks: got 0 sequences; skip the call"
            )
        for rank, (_, _, *theirs) in enumerate(sizes):
            for name, a, b in zip(COMMON_SIZES, mine, theirs, strict=True):
                if a != b:
                    raise ShapeError(
                        f"ranks must pass the same {name}: {a} on rank {ring.rank}, {b} on rank {rank}; "
                        "split only the dimension of tokens"
                    )
        for index, tensor in enumerate(tokens):
            same = not_split([numbers[index] for numbers in by_rank], tensor, order)
            if same is not None:
                raise same
        rows, columns = ({rank: numbers[i] for rank, numbers in enumerate(sizes)} for i in (0, 1))
        T, S = sum(rows.values()), sum(columns.values())
    else:
        if error is not None:
            raise error
        T, S = length if isinstance(length, tuple) else (length, length)
        rows, columns = ({ring.rank: x.shape[2]} for x in (q, k))
    queries, keys = Layout(T, ring.size, order), Layout(S, ring.size, order)
    queries.check(rows, "queries")
    keys.check(columns, "keys")
    return queries, keys
