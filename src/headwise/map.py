"""`AttentionMap`: attention weights that are computed only where they are read.

The weights follow from q, k, the mask and one number per row, the log-sum-exp. So they are not stored: a map
holds these and computes what is requested: one head, a few rows, the mean, a pooled map, a statistic. The
whole matrix is computed only on request, and only within the memory budget.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import budget
from .arguments import OF_ATTENTION, AttentionOptions, answering, scores_from
from .engines import first_pass, one_query, packed_sequences, second_pass, statistics, weights
from .engines import operators as _operators  # noqa: F401, registers what torch.compile sees of a map
from .engines.backend import Collected
from .engines.scores import DIFFERENTIABLE, MASK_NUMBERS, MASK_TENSORS, Scores, tile_dtype
from .engines.second_pass import Top
from .engines.statistics import Statistics
from .engines.walk import GivenWeights
from .errors import ArgumentError, ShapeError
from .indexing import Choice, Index, as_index, compose, in_order, resolve, take
from .mask_rules import real_positions
from .masks import Mask, as_mask
from .scoring import Bias
from .tensor_stand_in import StandIn, in_reentrant_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERYTHING = slice(None)
LATER = ("_scores", "_lse", "_versions")  # attributes that a map of `later` sets on first use


class AttentionMap(StandIn):
    """The weights of attention, [B, H, T, S], computed only where they are read.

    Maps can be pickled, passed through `torch.compile` and `torch.export`, and read by `torch.load` with
    `weights_only=True`. Importing `headwise.map` registers them with torch. Usually this happens by itself;
    a program must do it only if it imports headwise before torch and loads a map before computing one.

    Args:
        q: [B, H, T, D]
        k: [B, Hk, S, D]; H must be a multiple of Hk.
        mask, causal, window, scale, softcap, bias, sinks: as in `headwise.attention`.

    Raises:
        ShapeError, ArgumentError, MaskError: as `headwise.attention`.

    Example:
        >>> q, k = torch.randn(2, 1, 8, 100, 64)
        >>> w = AttentionMap(q, k, causal=True)
        >>> w
        AttentionMap([1, 8, 100, 100], Mask(right=0), float32)
        >>> w[0, 3, 42].shape          # computes only this row
        torch.Size([100])
        >>> w.statistics("entropy").entropy.shape
        torch.Size([1, 8])
        >>> w.select(heads=[3], queries=slice(0, 9)).shape
        torch.Size([1, 1, 9, 100])
    """

    _scores: Scores | GivenWeights
    _lse: Tensor | None
    _columns: Index | None  # None: all keys
    _collected: Collected | None = None  # row statistics computed with the output
    ranks: int | None = None  # over which its sequence is sharded (`headwise.parallel`); None: not sharded
    _versions: tuple[int, ...] | None  # of q, k, mask and scoring, when the map was created
    _build: Callable[[], tuple[Scores, Tensor | None]]  # creates the parts of a map on first use

    @answering({theirs: advice for theirs, advice in OF_ATTENTION.items() if "dropout" not in theirs})
    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Bias | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        options = AttentionOptions(mask, causal, window, scale, softcap, bias, sinks)
        self._scores = scores_from(q, k, k, options)
        self._lse = None
        self._columns = None
        self._versions = self._scores.versions()
        if self._versions is None and not torch.compiler.is_compiling():
            self._lse = first_pass.lse_of(self._scores)  # compared later where torch counts no versions

    @classmethod
    def from_weights(cls, tensor: Tensor, mask: Mask | Tensor | None = None) -> AttentionMap:
        """Return a map of given weights, [B, H, T, S]; `mask` only marks queries that are padding.

        Raises:
            ShapeError: not four dimensions.
            ArgumentError: not floating point; a negative weight (checked in eager mode on a CPU only).
        """
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"weights must be a tensor: got {type(tensor).__name__}; use torch.as_tensor")
        if tensor.ndim != 4:
            raise ShapeError(
                f"weights must have 4 dimensions [B, H, T, S]: got {tensor.ndim}, {list(tensor.shape)}; "
                "pass a mean over heads as weights[:, None], one sequence as weights[None]"
            )
        if not tensor.is_floating_point():
            raise ArgumentError(f"weights must be floating point: got {tensor.dtype}; use .float()")
        if tensor.device.type == "cpu" and tensor.numel() and bool((tensor < 0).any()):
            raise ArgumentError(
                f"weights must not be negative: found {tensor.min().item():g}; "
                "for scores use AttentionMap(q, k)"
            )
        rules = as_mask(mask).bind(*tensor.shape)
        empty = tensor.detach().sum(-1) == 0
        lse = torch.zeros(tensor.shape[:3], dtype=tile_dtype(tensor.dtype), device=tensor.device)
        return make(GivenWeights(tensor, rules), lse.masked_fill(empty, -torch.inf))

    # What it is

    @property
    def shape(self) -> torch.Size:
        """[B, H, T, S]"""
        B, H, T, S = self._scores.shape
        if self._columns is not None:
            S = len(in_order(self._columns, S))
        return torch.Size((B, H, T, S))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of dense weights: that of q and k."""
        return self._scores.input_dtype

    @property
    def device(self) -> torch.device:
        return self._scores.device

    @property
    def requires_grad(self) -> bool:
        """True if gradients flow through its dense weights."""
        scores = self._scores
        if isinstance(scores, GivenWeights):
            return scores.weights.requires_grad
        tensors = (scores.q, scores.k, *scores.scoring.tensors.values())
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row's scores, [B, H, T], natural logarithm; no gradient."""
        if self._lse is None:
            self.check_unchanged()
        return self._lse_of_checked()

    def _lse_of_checked(self) -> Tensor:
        """Return `lse` of a map that was checked to be unchanged."""
        if self._lse is None:
            assert isinstance(self._scores, Scores)
            self._lse = first_pass.lse_of(self._scores)
        return self._lse

    def parts(self) -> tuple[Scores | GivenWeights, Tensor | None, Index | None]:
        """Return the scores, lse if it was computed, and the selected keys; `make` creates a map from them.

        Raises:
            ArgumentError: q, k or a rule was written to since the map was made.
        """
        self.check_unchanged()
        return self._scores, self._lse, self._columns

    @property
    def as_made(self) -> tuple[Scores | GivenWeights, Tensor | None, Index | None]:
        """The same as `parts`, without its check; for a map that was just created."""
        return self._scores, self._lse, self._columns

    @property
    def positions(self) -> Tensor:
        """The positions of the queries, int [T]; the last query has the position of the last key."""
        return self._scores.at(slice(0, self._scores.shape[2]))

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest and largest position of a query, as Python integers; no device synchronization."""
        return self._scores.ends(slice(0, self._scores.shape[2]))

    @property
    def sinks(self) -> Tensor | None:
        """Learned sinks, [H]: the score of one more softmax column, which has no key; None without sinks."""
        return self._scores.sinks

    @property
    def bias(self) -> Tensor | None:
        """The tensor added to the scores, broadcastable to [B, H, T, S]; None without such a tensor."""
        return self._scores.scoring.bias if isinstance(self._scores, Scores) else None

    @property
    def relative(self) -> Tensor | None:
        """The learned bias by distance, [H, R], see `headwise.scoring.Relative`; None without one."""
        return self._scores.scoring.relative if isinstance(self._scores, Scores) else None

    @property
    def real_keys(self) -> Tensor:
        """The keys that are not padding, bool [B, S]."""
        B, _, _, S = self._scores.shape
        keys = self._scores.mask.keys
        if keys is None:
            real = torch.ones(B, S, dtype=torch.bool, device=self.device)
        else:
            real = real_positions(keys.clone(), S)
        return real if self._columns is None else real[:, self._columns]

    def counted_queries(self, statistic: str = "local") -> Tensor:
        """Return which queries count in a head's mean, bool [B, H, T]: real ones that may attend to a key.

        statistic: the name of a statistic. `previous`, `itself` and `next` count only queries for which the
            previous, own or next key exists and is not padding.
        """
        statistics.check_names((statistic,))
        return statistics.counted(statistic, self._scores, self.lse)

    def to_keep(self) -> AttentionMap:
        """Return a map that a single rank can read later: this map, unless its sequence is sharded."""
        return self

    @property
    def own_keys(self) -> int:
        """The number of the S keys that this process holds; fewer than S if the sequence is sharded."""
        return self.shape[3]

    def whole_text(self, ids: Tensor) -> Tensor:
        """Return the token ids of all keys, int [B, S], from the ids of the keys that this process holds."""
        return ids

    @property
    def counts_every_query(self) -> bool:
        """True if every query is known to count: none is padding, and each may attend to its own key."""
        scores = self._scores
        return isinstance(scores, Scores) and scores.mask.queries is None and not scores.may_see_nothing

    def visible(self, mask: Mask | Tensor | None = None) -> Tensor:
        """Return how many keys a mask, by default the map's, lets each query see: int [B, 1 or H, T].

        Scores are not computed, so a key hidden by a bias of -inf counts as visible.

        Raises:
            ArgumentError: a map of chosen keys.
            MaskError: the mask does not fit the map.
        """
        self.check_whole_rows("visible")
        return second_pass.visible(self._scores, None if mask is None else as_mask(mask))

    @property
    def mask(self) -> Mask:
        """Which query may attend to which key: a copy, except for the tensor of a dense mask."""
        return self._scores.mask.unbound()

    def __getattr__(self, name: str) -> Any:
        build = self.__dict__.get("_build") if name in LATER else None
        if build is None:
            return super().__getattr__(name)
        scores, lse = build()
        self._scores, self._lse, self._versions = scores, lse, scores.versions()
        self.__dict__.pop("_build", None)
        return self.__dict__[name]

    def __len__(self) -> int:
        return self._scores.shape[0]

    def __repr__(self) -> str:
        inside = [str(list(self.shape))]
        if not self.mask.hides_nothing:
            inside.append(repr(self.mask))
        inside.append(str(self.dtype).removeprefix("torch."))
        if self.device.type != "cpu":
            inside.append(str(self.device))
        return f"AttentionMap({', '.join(inside)})"

    # Looking at parts of it

    def select(
        self,
        *,
        batch: Choice = None,
        heads: Choice = None,
        queries: Choice = None,
        keys: Choice = None,
    ) -> AttentionMap:
        """Return a part of the map, still not computed. A number as an index keeps its dimension, size 1.

        Raises:
            IndexError: an index outside the map.
        """
        self.check_unchanged()
        B, H, T, S = self.shape
        rows = tuple(
            EVERYTHING if chosen is None else as_index(chosen, size, name)
            for chosen, size, name in ((batch, B, "batch"), (heads, H, "heads"), (queries, T, "queries"))
        )
        columns = self._columns
        if keys is not None:
            chosen = as_index(keys, S, "keys")
            # while compiling, all keys stay all keys whatever their number
            if not (_is_everything(chosen) and torch.compiler.is_compiling()):
                columns = compose(columns, chosen, self._scores.shape[3])
        if all(_is_everything(index) for index in rows):
            return make(self._scores, self._lse, columns, self._collected)

        def chosen_rows(values: Tensor) -> Tensor:  # [.., B, H, T]
            return take(values, (None,) * (values.ndim - 3) + rows, ones_stay=False)

        lse = None if self._lse is None else chosen_rows(self._lse)
        collected = None if self._collected is None else self._collected.map(chosen_rows)
        part = make(self._scores.select(*rows), lse, columns, collected)
        part._has_lost_gradient = self._has_lost_gradient
        return part

    def by_document(self) -> AttentionMap:
        """Return a map with a batch of documents, [documents, H, longest, longest], padded at the end.

        Statistics of the new map are computed for each document separately. Rows of padded queries are zeros
        and do not count in statistics.

        Raises:
            ArgumentError: a map of selected keys, or one made from weights.
            MaskError: a map without documents, or with another rule that does not depend on positions only.

        Example:
            >>> q, k = torch.randn(2, 1, 8, 100, 64)
            >>> w = AttentionMap(q, k, causal=True, mask=Mask.documents(torch.arange(100) // 30))
            >>> w.by_document().statistics("entropy").entropy.shape
            torch.Size([4, 8])
        """
        self.check_whole_rows("by_document")
        if not isinstance(self._scores, Scores):
            raise ArgumentError(
                "by_document must be called on a map of q and k: this map was made from weights; use "
                "AttentionMap(q, k)"
            )
        return make(*packed_sequences.by_document(self._scores, self._lse))

    def __getitem__(self, index: Any) -> Tensor:
        """Return weights as a tensor, computing only the selected rows, heads and keys."""
        if type(index) is tuple and len(index) == 3:
            row = self._single_query(*index)
            if row is not None:
                return row
        plan = resolve(index, self.shape)
        if plan is None:  # several index tensors or new axes: torch resolves them
            part: Tensor = self.dense()[index]
            return part
        batch, heads, queries, keys = plan.indices
        return self.select(batch=batch, heads=heads, queries=queries, keys=keys).dense()[plan.squeeze]

    def _single_query(self, batch: object, head: object, query: object) -> Tensor | None:
        """Return w[b, h, i] or w[b, :, i] by a shortcut; None if only the general path can."""
        scores = self._scores
        if type(batch) is not int or type(query) is not int or self._columns is not None:
            return None
        if torch.compiler.is_compiling() or type(scores) is not Scores:
            return None
        if type(head) is not int and not (type(head) is slice and head == EVERYTHING):
            return None
        self.check_unchanged()
        return one_query.row(scores, self._lse, batch, head if isinstance(head, int) else None, query)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[b] for b in range(len(self)))

    def dense(self, *, limit: int | str | None = None) -> Tensor:
        """Return all weights as a tensor, [B, H, T, S]; gradients flow to q and k.

        Args:
            limit: a memory budget for this call, e.g. "2 GiB"; see `headwise.budget`.

        Raises:
            BudgetExceeded: it would not fit.
        """
        self.check_unchanged()
        self._warn_of_lost_gradient()
        if isinstance(self._scores, GivenWeights):
            return self._scores.weights if self._columns is None else self._scores.weights[..., self._columns]
        shape = self.shape
        self._check_budget(shape, "weights", limit)
        if 0 in shape:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        return weights.weights(self._scores, self._lse, self._columns)

    def mean_heads(self, *, limit: int | str | None = None) -> Tensor:
        """Return the mean over heads, [B, T, S], without the weights of each head; gradients flow to q and k.

        Raises:
            BudgetExceeded: it would not fit.
        """
        B, _, T, S = self.shape
        if isinstance(self._scores, GivenWeights):
            return self.dense().mean(1)
        self._check_budget((B, T, S), "mean weights", limit, self._scores.dtype)
        self.check_unchanged()
        self._warn_of_lost_gradient()
        if 0 in self.shape:
            return torch.zeros(B, T, S, dtype=self.dtype, device=self.device)
        return weights.weights(self._scores, self._lse, self._columns, mean=True)

    def pooled(self, cells: int | tuple[int, int] = 128) -> Tensor:
        """Return a pooled map of at most cells x cells (rows x columns if a pair), [B, H, rows, columns].

        A cell holds the sum of the weights of its queries on its keys. All cells of a head add up to the
        number of counted queries; padded queries are left out.

        Raises:
            ArgumentError: fewer than one cell; a map of selected keys.
        """
        self.check_whole_rows("pooled")
        rows, columns = self._cells(cells)
        return second_pass.pooled(self._scores, self.lse, rows, columns)

    def _cells(self, cells: int | tuple[int, int]) -> tuple[int, int]:
        """Return the cells of a pooled map, no more than there are queries and keys."""
        pair = cells if isinstance(cells, (tuple, list)) else (cells, cells)
        if len(pair) != 2 or not all(_is_count(number) for number in pair):
            raise ArgumentError(
                f"cells must be a number or a pair, each at least 1: got {cells!r}; 128 makes a good picture"
            )
        B, H, T, S = self.shape
        rows, columns = min(pair[0], T), min(pair[1], S)
        self._check_budget((B, H, rows, columns), "pooled picture", None, self._scores.dtype)
        return rows, columns

    def top(self, count: int = 8) -> Top:
        """Return the heaviest keys of every query: (values, indices), each [B, H, T, count].

        Where a query may attend to fewer than `count` keys, its remaining values are 0 and its remaining
        indices -1. In an index, -1 would mean the last key, so filter with `indices >= 0`. No gradient flows
        through the values; gradients flow through `dense()` and indexing.

        Raises:
            ArgumentError: count below 1 or above S; a map of selected keys.
        """
        self.check_whole_rows("top")
        self._check_count(count)
        return second_pass.top(self._scores, self.lse, count)

    def _check_count(self, count: int) -> None:
        """Raise unless a list of so many keys per query can be computed."""
        B, H, T, S = self.shape
        if not _is_count(count) or count > S:
            raise ArgumentError(f"count must be between 1 and key_len: got {count!r} of {S}; use {min(8, S)}")
        self._check_budget((B, H, T, 3 * count), "values and indices", None, self._scores.dtype)

    def statistics(
        self,
        *names: str,
        per: str = "head",
        reach: int = 8,
        pooled: int | tuple[int, int] | None = None,
    ) -> Statistics:
        """Return statistics of each head: [B, H] each, and `received` [B, H, S].

        Gradients flow through `entropy` and `effective_keys`: a training loss may use them.

        Args:
            names: the statistics to compute; without names, all. `Statistics.formula(name)` returns a
                definition.
            per: "head", the mean over counted queries (see `counted_queries`); or "query", [B, H, T].
            reach: the largest distance that counts as `local`.
            pooled: also compute a pooled map of this many cells, as `AttentionMap.pooled` does, in the same
                pass.

        Raises:
            ArgumentError: an unknown name, per or reach; a map of selected keys; fewer than one cell.
        """
        if per not in ("head", "query"):
            raise ArgumentError(f'per must be "head" or "query": got {per!r}; received is always per key')
        self.check_whole_rows("statistics")
        self._warn_of_lost_gradient()
        cells = None if pooled is None else self._cells(pooled)
        collected = self._collected if self._columns is None else None
        plain = cells is None and per == "head" and isinstance(self._scores, Scores)
        if self._lse is None and plain and names:
            assert isinstance(self._scores, Scores)
            directly = one_query.statistics(self._scores, names, reach)
            if directly is not None:
                return Statistics(directly)
        lse = self._lse_of_checked()
        return second_pass.measure(self._scores, lse, names, per == "query", reach, cells, collected)

    def mass(self, on: Mask | Tensor, *, per: str = "head") -> Tensor:
        """Return the weight each query puts on the keys that `on` allows; no gradient.

        It takes one pass over q and k and stores no weights. If `on` is a band, only keys in the band are
        computed.

        Args:
            on: a mask that says which keys to add up for each query. Queries that are padding by its
                `query_lengths` are left out of the mean, as padded queries of the map are.
            per: "head", the mean over counted queries, [B, H]; or "query", [B, H, T].

        Raises:
            ArgumentError: an unknown per; a map of selected keys.
            MaskError: `on` does not fit the map.

        Example:
            >>> q, k = torch.randn(2, 1, 8, 100, 64)
            >>> w = AttentionMap(q, k, causal=True)
            >>> w.mass(Mask.window(8)).shape          # the query itself and the seven keys before it
            torch.Size([1, 8])
            >>> w.mass(Mask.documents(torch.arange(100) // 10), per="query").shape
            torch.Size([1, 8, 100])
        """
        if per not in ("head", "query"):
            raise ArgumentError(
                f'per must be "head" or "query": got {per!r}; "head" is the mean over its queries'
            )
        self.check_whole_rows("mass")
        return second_pass.mass(self._scores, self.lse, as_mask(on), per == "query")

    def plot(
        self,
        tokens: Sequence[str] | None = None,
        *,
        query_tokens: Sequence[str] | None = None,
        key_tokens: Sequence[str] | None = None,
        batch: int = 0,
    ) -> Figure:
        """Return a heat map of every head, as a matplotlib figure (it needs the extra `viz`).

        Args:
            tokens: one name per position, if queries and keys come from the same text.
            query_tokens: one name per query, and key_tokens: one name per key, for example in
                cross-attention.
            batch: which sequence.

        Raises:
            PackageMissing: matplotlib is not installed.
            ShapeError: tokens that do not fit.
            IndexError: no such sequence.
        """
        from .show.heatmaps import heatmaps

        return heatmaps(self, tokens, query_tokens=query_tokens, key_tokens=key_tokens, batch=batch)

    def _versions_now(self) -> tuple[int, ...] | None:
        return self._scores.versions()

    def check_unchanged(self) -> None:
        """Raise `ArgumentError` if q, k, the mask or the bias was written to since the map was made."""
        if self._versions is not None and self._versions != self._versions_now():
            raise ArgumentError(
                "q, k, mask and bias must not change while their map is in use: one was written to in place; "
                "pass q.clone() and k.clone(), or read the map before writing"
            )

    def check_whole_rows(self, result: str) -> None:
        """Raise if `result` cannot be computed: an empty map, selected keys, or a changed input."""
        self.check_unchanged()
        if 0 in self.shape:
            raise ShapeError(
                f"{result} must be called on a map that is not empty: got {list(self.shape)}; select more"
            )
        if self._columns is not None and not self._has_all_keys():
            raise ArgumentError(
                f"{result} must be called on a map of all keys: this map has {self.shape[3]} of "
                f"{self._scores.shape[3]} keys; call it before select(keys=...)"
            )

    def _has_all_keys(self) -> bool:
        """Return True if the chosen keys are all of them, in order."""
        S = self._scores.shape[3]
        return isinstance(self._columns, slice) and range(S)[self._columns] == range(S)

    def _check_budget(
        self, shape: Sequence[int], result: str, limit: int | str | None, dtype: torch.dtype | None = None
    ) -> None:
        if torch.compiler.is_compiling():
            return  # sizes are symbols then; the operator checks when it runs
        size = torch.Size(shape).numel() * (dtype or self.dtype).itemsize
        if limit is None and budget.surely_fits(size):
            return
        budget.check(
            size,
            self.device,
            f"dense {result} {list(shape)}",
            "read a part (w[b, h], select, pooled, statistics, top)",
            None if limit is None else budget.parse(limit),
        )

    # Moving it about

    def detach(self) -> AttentionMap:
        """Return the same map, detached from the autograd graph."""
        self.check_unchanged()
        return make(self._scores.detach(), self._lse, self._columns, self._collected)

    def to(self, device: torch.device | str) -> AttentionMap:
        """Return the same map on another device.

        Raises:
            ArgumentError: not a device.
        """
        if not isinstance(device, (str, torch.device, int)):
            raise ArgumentError(
                f"device must be a device or its name: got {device!r}; for a dtype use w.dense().to(dtype)"
            )
        self.check_unchanged()
        where = torch.device(device)
        lse = None if self._lse is None else self._lse.to(where)
        collected = None if self._collected is None else self._collected.map(lambda rows: rows.to(where))
        return make(self._scores.to(where), lse, self._columns, collected)

    def cpu(self) -> AttentionMap:
        """Return the same map in CPU memory."""
        return self.to("cpu")

    def cuda(self) -> AttentionMap:
        """Return the same map on the current GPU."""
        return self.to("cuda")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        scores, lse, columns = self.parts()
        if isinstance(columns, slice):
            return make, (scores, lse, (columns.start, columns.stop, columns.step))
        return make, (scores, lse, columns)


def make(
    scores: Scores | GivenWeights, lse: Tensor | None, columns: Any = None, collected: Collected | None = None
) -> AttentionMap:
    """Return a map of checked parts; collected: row statistics computed with the output."""
    new = AttentionMap.__new__(AttentionMap)
    if collected is not None:
        new._collected = collected
    new._scores, new._lse = scores, lse
    new._columns = slice(*columns) if isinstance(columns, tuple) else columns
    new._versions = scores.versions()
    if in_reentrant_checkpoint():
        new._has_lost_gradient = True
    return new


def later(build: Callable[[], tuple[Scores, Tensor | None]]) -> AttentionMap:
    """Return a map whose (scores, lse) are computed on first use."""
    new = AttentionMap.__new__(AttentionMap)
    new._build, new._columns = build, None
    if in_reentrant_checkpoint():
        new._has_lost_gradient = True
    return new


def _is_everything(index: slice | Tensor) -> bool:
    return isinstance(index, slice) and index == EVERYTHING


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


# As a pytree: a list of tensors, and a context of plain values that can be compared and stored

# The tensors a map may hold, in order; the context records which of them are present.
TENSORS = ("lse", "positions", *MASK_TENSORS, "weights", *DIFFERENTIABLE)

Chosen = tuple[str, Sequence[int | None]] | None  # keys as plain numbers, which can be compared and stored
Context = tuple[Sequence[str], Sequence[float | None] | None, Sequence[int | None], Chosen]


def _flatten(weights: AttentionMap) -> tuple[list[Tensor], Context]:
    """Split a map into its tensors and the context that `_unflatten` needs."""
    scores, lse, columns = weights.parts()
    parts = {"lse": lse, **scores.parts()}
    present = {name: parts[name] for name in TENSORS if parts.get(name) is not None}
    numbers = None if "weights" in parts else (parts["scale"], parts["softcap"])
    rules = tuple([parts[name] for name in MASK_NUMBERS])
    chosen: Chosen = None
    if isinstance(columns, slice):
        chosen = "slice", (columns.start, columns.stop, columns.step)
    elif columns is not None:
        chosen = "keys", tuple(columns.tolist())
    return list(present.values()), (tuple(present), numbers, rules, chosen)  # type: ignore[arg-type, return-value]


def _unflatten(values: Iterable[Tensor], context: Context) -> AttentionMap:
    """Return the map that `_flatten` split, with these tensors instead of its own."""
    names, numbers, rules, chosen = context
    parts: dict[str, Any] = dict(zip(names, values, strict=True))  # anything: trees of sizes, or none
    parts |= zip(MASK_NUMBERS, rules, strict=True)
    columns: Index | None = None
    if chosen is not None:
        kind, plain = chosen
        columns = slice(*plain) if kind == "slice" else torch.tensor(plain, dtype=torch.int64, device="cpu")
    if numbers is None:
        return make(GivenWeights.from_parts(parts), parts.get("lse"), columns)
    parts |= zip(("scale", "softcap"), numbers, strict=True)
    return make(Scores.from_parts(parts), parts.get("lse"), columns)


torch.serialization.add_safe_globals([AttentionMap, make])
pytree.register_pytree_node(AttentionMap, _flatten, _unflatten, serialized_type_name="headwise.AttentionMap")
