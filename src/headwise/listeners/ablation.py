"""Heads switched off: what does the model do without them?

    zero      the head says nothing:                             0
    mean      it says what it says on average:                   mean over the real positions
    uniform   it looks at all it may see, and chooses nothing:   mean of the values it may see

`Switches` are for `importance`, `robustness` and `effects`: heads off and on again between runs.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim; n heads chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError, nearest
from ..functional import attention
from ..heads.layer_names import ByLayer, GivenByLayer, names_of
from ..indexing import take
from ..masks import Mask
from ..models.batches import Loss, as_batches, checked_loss, run
from ..scoring import HIDDEN, hidden_is_endless
from .active import Call
from .chosen_heads import ChosenHeads, Heads, base_of, by_path, of_visit
from .example_counts import Visit, count_examples, entering
from .head_outputs import Changing, check_any, outputs_of
from .model_door import attach
from .model_structure import structure_of

__all__ = ["METHODS", "Switches", "ablate", "check_heard", "even_scores", "head_means"]


METHODS = ("zero", "mean", "uniform")


def ablate(
    model: nn.Module,
    heads: Heads,
    method: str = "zero",
    *,
    means: GivenByLayer[Tensor] | None = None,
    fallback: str | None = None,
) -> Changing:
    """The model without some heads, inside a `with` block; afterwards it is as it was.

    Blocks may be nested, and one may be entered again. Gradients flow as if the heads were so. Where layers
    are checkpointed, the backward pass runs them again: keep it inside the block.

    Args:
        heads: (layer, head) pairs. A layer is a number, where the model has one stack of layers, or a module
            path; a head of None means all of the layer. A layer that runs several times in a forward is meant
            each time, "path#1" only the second time. Heads as `Heads.find` and `Importance.ranking` give
            them are taken as they are.
        method: what takes the place of a head's output before concatenation and W_O: "zero"; "mean", its mean
            over the real positions of the batch at hand; "uniform", what it would say if it attended evenly
            to every key it may see.
        means: with method="mean", [H, Dv] by layer from `head_means`, or made by hand, instead of the batch's
            own. While text is generated a batch has one position, whose mean is itself: give them there.
        fallback: for other layers, that bypass every hook: None raises; "eager" or "skip" lets them be.

    Raises:
        ArgumentError: an unknown layer, method or fallback; means that are missing, or given without need. In
            the model's forward: a head that the layer does not have. At the end of a block in which the
            model ran: a layer that did not.
        ShapeError: in the model's forward: means that do not fit the layer.
        AttentionBypassed: a layer whose outputs are not in hand.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(1, 3, 8)
        >>> with ablate(mha, [(0, 1), (0, 2)]):
        ...     output, _ = mha(x)
        >>> torch.equal(output, mha(x)[0])
        False

    Michel 2019, section 3; means: Wang 2022 (IOI), section 2.
    """
    if method not in METHODS:
        raise ArgumentError(
            f"method must be a way to switch a head off: got {method!r}; {nearest(str(method), METHODS)}"
        )
    chosen = ChosenHeads(model, heads)
    if means is not None and method != "mean":
        raise ArgumentError(f"means must go with method='mean': got method={method!r}; leave them out")
    given = None if means is None else by_path(model, means, "means")
    for path in chosen.paths if given is not None else ():
        if not any(base_of(known) == path for known in given or ()):
            raise ArgumentError(f"means must hold every layer: {path} is missing; make them with head_means")

    def change(call: Call, index: Tensor, output: Tensor) -> Tensor:
        if method == "zero":
            return output.index_fill(1, index, 0)
        if method == "uniform":
            new = _uniform(call, index)
        elif given is None:
            new = _mean(_sum(call, output), _count(call))[None, index, None]  # [1, n, 1, Dv]
        else:
            new = _given(given, call, output)[None, index, None]
        B, _, T, Dv = output.shape
        return output.index_copy(1, index, new.to(output).expand(B, len(index), T, Dv))

    return Changing(model, chosen, change, fallback)


def head_means(
    model: nn.Module, batches: Iterable[object], *, fallback: str | None = None
) -> ByLayer[Tensor]:
    """What each head says on average over all real positions of some batches, [H, Dv] by layer.

    Args:
        batches: what the model takes: a mapping of its arguments, a tuple of them, or one tensor.
        fallback: for layers that bypass every hook: None raises; "skip" leaves them out.

    Raises:
        ArgumentError: no batches.
        AttentionBypassed: a layer whose outputs are not in hand; nothing heard at all.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(2, 3, 8)
        >>> means = head_means(mha, [x])
        >>> torch.allclose(means[0], mha.head_outputs(x).mean((0, 2)), atol=1e-6)
        True
    """
    totals = _Totals()
    count = 0
    with torch.no_grad(), attach(model, totals, fallback):
        for count, batch in enumerate(as_batches(batches), 1):  # noqa: B007, counted to the end
            run(model, batch)
    check_any(model, count, totals.sums, fallback)
    means = {path: _mean(total, totals.counts[path]) for path, total in totals.sums.items()}
    return ByLayer(means, names_of(structure_of(model).places))


class _Totals:
    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor | int] = {}

    def hear(self, call: Call) -> None:
        total = _sum(call, outputs_of(call))
        self.sums[call.path] = total if call.path not in self.sums else self.sums[call.path] + total
        self.counts[call.path] = self.counts.get(call.path, 0) + _count(call)


def _sum(call: Call, output: Tensor) -> Tensor:
    """Over real positions, [H, Dv], in at least float32; a constant to the gradient."""
    counted = call.weights.mask.counted(output.shape[2])
    output = output.detach().to(torch.promote_types(output.dtype, torch.float32))
    if counted is not None:
        output = output.masked_fill(~counted[:, None, :, None], 0)
    return output.sum((0, 2))


def _count(call: Call) -> Tensor | int:
    """How many positions are real."""
    B, _, T, _ = call.weights.shape
    counted = call.weights.mask.counted(T)
    return B * T if counted is None else counted.sum()


def _mean(total: Tensor, count: Tensor | int) -> Tensor:
    """0 where nothing was real."""
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(1, count))


def _given(means: Mapping[str, Tensor], call: Call, output: Tensor) -> Tensor:
    """The means of this visit, or of the layer, [H, Dv]."""
    mean = of_visit(means, call.path)
    if mean is None:
        raise ArgumentError(f"means must hold every visit: {call.path} is missing; make them with head_means")
    want = (output.shape[1], output.shape[3])
    if tuple(mean.shape) != want:
        raise ShapeError(
            f"means must be [H, Dv] = {list(want)} in {call.path}: got {list(mean.shape)}; make them with "
            "head_means of this model"
        )
    return mean


def _uniform(call: Call, index: Tensor) -> Tensor:
    """What these heads say if they attend evenly to all they may see, [B, n, T, Dv]."""
    assert call.value is not None  # there where outputs are
    group = call.num_heads // call.num_kv_heads
    q, k, mask = even_scores(call, index)
    return attention(q, k, call.value.index_select(1, index // group), mask)[0]


def even_scores(call: Call, index: Tensor) -> tuple[Tensor, Tensor, Mask]:
    """Queries and keys by which these heads attend evenly to all they may see, and who may see whom.

    Queries and keys of zeros make every score 0; only who may see whom is left of the rules.
    """
    assert call.value is not None
    B, _, T, S = call.weights.shape
    everything = slice(None)
    mask = call.weights.mask.select(everything, index, everything)
    hidden = _hidden_by_bias(call, index)
    if hidden is not None:
        mask = mask & Mask.dense(~hidden)
    q, k = (call.value.new_zeros(B, len(index), length, 8) for length in (T, S))
    return q, k, mask


def _hidden_by_bias(call: Call, index: Tensor) -> Tensor | None:
    """Which keys a bias hides, bool broadcastable to [B, n, T, S]: many models' masks are added to scores."""
    bias, relative = call.weights.bias, call.weights.relative
    by_distance = None if relative is None else hidden_is_endless(relative)[index] <= HIDDEN  # [n, R]
    hidden = None
    if by_distance is not None and by_distance.any():  # a few numbers, and hardly ever one of them
        reach = by_distance.shape[1] // 2
        offsets = torch.arange(call.weights.shape[3], device=index.device) - call.weights.positions[:, None]
        hidden = by_distance[:, offsets.clamp(-reach, reach) + reach][None]
    if bias is None:
        return hidden
    of_bias = hidden_is_endless(take(bias, (None, index))) <= HIDDEN
    free = of_bias.device.type == "cpu"  # elsewhere, asking would wait for all that was launched
    if free and not of_bias.any():
        return hidden
    return of_bias if hidden is None else of_bias | hidden


# Heads off and on again between runs


class Switches:
    """Listens to a model and puts zeros in the place of the heads that are off."""

    def __init__(self) -> None:
        self.off: dict[str, list[int]] = {}  # by path
        self.num_heads: dict[str, int] = {}  # of every layer heard so far
        self.num_kv_heads: dict[str, int] = {}
        self.examples = 0  # sequences in the last run
        self._visits: list[Visit] = []

    def hear(self, call: Call) -> Tensor | None:
        """Take note of the layer; its output without the heads that are off."""
        output, path = outputs_of(call), base_of(call.path)
        self.num_heads[path], self.num_kv_heads[path] = call.num_heads, call.num_kv_heads
        self._visits.append((path, output.shape[0], output.shape[2], None))
        heads = self.off.get(path)
        return output.index_fill(1, torch.tensor(heads, device=output.device), 0) if heads else None

    @contextmanager
    def without(self, off: Iterable[tuple[str, int]]) -> Iterator[None]:
        """These heads, (path, head), are off while a block lasts."""
        self.off = {}
        for path, head in off:
            self.off.setdefault(path, []).append(head)
        self._visits.clear()
        try:
            yield
        finally:
            self.off = {}

    @torch.no_grad()
    def loss(
        self, model: nn.Module, loss_fn: Loss | None, batch: object, off: Iterable[tuple[str, int]]
    ) -> float:
        """The loss on a batch with these heads, (path, head), off."""
        with self.without(off):
            with entering(model) as given:
                loss = checked_loss(loss_fn, model, batch).item()
            self.examples = count_examples(given, self._visits) if self._visits else 0
            return loss

    def every_head(self) -> list[tuple[str, int]]:
        """(path, head) of all layers heard so far."""
        return [(path, head) for path, count in self.num_heads.items() for head in range(count)]


def check_heard(model: nn.Module, heard: Mapping[str, object]) -> None:
    """Raise `ArgumentError` if no layer was heard."""
    if not heard:
        raise ArgumentError(
            f"model must run attention in its loss: none was heard in {type(model).__name__}; is it the "
            "model that loss_fn runs?"
        )
