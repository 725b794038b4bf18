"""How much each head matters to the loss.

    I_h = E_x | Att_h(x)^T  dL(x) / dAtt_h(x) |            Michel 2019, equation 2

Att_h(x) is all that head h says about a sequence x. This is the first-order change of the loss if the head
were multiplied by a gate that goes from 1 to 0: |dL / dgate_h|, which takes one backward pass for all heads.

Letters: B batch, T query_len, H num_heads, Hk num_kv_heads, Dv value_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError, nearest
from ..heads.layer_names import ByLayer, Layer, names_of
from ..models.batches import Loss, as_batches, checked_loss, tracked
from .ablation import Switches, check_heard
from .active import Call, in_backward
from .chosen_heads import base_of
from .example_counts import count_examples, entering
from .head_outputs import outputs_of
from .model_door import attach
from .model_structure import structure_of

__all__ = ["METHODS", "Importance", "Ranked", "importance"]

METHODS = ("gradient", "leave_one_out")
REDUCTIONS = ("mean", "sum")

Group = list[tuple[Layer, int]]  # heads that go together


class Ranked(NamedTuple):
    """A head and its score: unpacks to three, and goes into `headwise.ablate` and `prune` as it is."""

    layer: Layer  # its number, where the model has one stack of layers; else its path
    head: int
    score: float


class Importance(ByLayer[Tensor]):
    """The score of every head, [H] by layer: its number, where the model has one stack of layers, or path."""

    def __init__(
        self,
        scores: Mapping[str, Tensor],
        method: str,
        normalised: bool,
        examples: int,
        names: Mapping[str, Layer],
        num_kv_heads: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(scores, names or None)
        self.method, self.normalised, self.examples = method, normalised, examples
        self.num_kv_heads = dict(num_kv_heads or {})  # by path; a layer that is not there has one per head

    def ranking(self) -> list[Ranked]:
        """All heads, the most important first."""
        every = [
            Ranked(layer, head, score)
            for layer, scores in self.items()
            for head, score in enumerate(scores.tolist())
        ]
        return sorted(every, key=lambda ranked: -ranked.score)

    def least(self, count: int, *, groups: bool = True) -> list[tuple[Layer, int]]:
        """The least important heads, the very least first, as `headwise.prune` and `ablate` take them.

        Where several query heads share a key/value head, whole groups go, since `prune` takes no others: by
        the mean score of their heads, and the best group of every layer after all that are not, since a layer
        must keep one. A `count` that whole groups cannot come to is refused, never rounded.

        Args:
            count: how many heads; more than there are: all.
            groups: False: one by one, whatever the heads share. `ablate` takes these, `prune` may not.

        Raises:
            ArgumentError: a count below 0; one that whole groups do not come to.

        Example:
            >>> from headwise.nn import MultiHeadAttention
            >>> mha, x = MultiHeadAttention(12, 6, num_kv_heads=3), torch.randn(5, 3, 12)
            >>> scores = importance(mha, [x], lambda model, batch: model(batch)[0].square().mean())
            >>> chosen = scores.least(4)
            >>> len(chosen), len({head // 2 for _, head in chosen})          # two groups of two
            (4, 2)
        """
        heads = [(layer, head) for layer, head, _ in reversed(self.ranking())]
        count = min(_checked(count), len(heads))
        shared = [self._kv_heads(path) < len(self[path]) for path in self.paths]
        if not groups or not any(shared):
            return heads[:count]
        others, best = self._groups()
        for offered in (others, others + best):
            chosen = _whole(offered, count)
            if chosen is not None:
                return chosen
        sizes = sorted({len(group) for group in others + best})
        below, above = (
            next(number for number in numbers if _whole(others + best, number) is not None)
            for numbers in (range(count, -1, -1), range(count, len(heads) + 1))
        )
        raise ArgumentError(
            f"count must come from whole groups: got {count}, and groups that share a key/value head have "
            f"{' or '.join(map(str, sizes))} query heads; use {below} or {above}, or groups=False for ablate"
        )

    def _kv_heads(self, path: str) -> int:
        return self.num_kv_heads.get(path, len(self[path]))

    def _groups(self) -> tuple[list[Group], list[Group]]:
        """Those that share a key/value head, the least first; the best of each layer apart."""
        others: list[tuple[float, Group]] = []
        best: list[tuple[float, Group]] = []
        for path in self.paths:
            layer, scores = self.name_of(path), self[path].tolist()
            size = len(scores) // self._kv_heads(path)
            of_layer = []
            for first in range(0, len(scores), size):
                heads = sorted(range(first, first + size), key=scores.__getitem__)
                mean = math.fsum(scores[head] for head in heads) / size
                of_layer.append((mean, [(layer, head) for head in heads]))
            of_layer.sort(key=_mean)
            others += of_layer[:-1]
            best += of_layer[-1:]
        return [group for _, group in sorted(others, key=_mean)], [
            group for _, group in sorted(best, key=_mean)
        ]

    def most(self, count: int) -> list[tuple[Layer, int]]:
        """The most important heads, the first first.

        Raises:
            ArgumentError: a count below 0.
        """
        return [(layer, head) for layer, head, _ in self.ranking()[: _checked(count)]]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        how = {"gradient": "by gradients", "leave_one_out": "by the loss without each"}[self.method]
        scaled = ", each layer's scores of length 1" if self.normalised else ""
        lines = [f"Importance of {sum(map(len, self.values()))} heads, {how}, "
                 f"over {self.examples} sequence{'' if self.examples == 1 else 's'}{scaled}."]  # fmt: skip
        wide = max((len(str(layer)) for layer in self), default=0)
        for layer, scores in self.items():
            numbers = "  ".join(f"{score:9.3g}" for score in scores.tolist())
            lines.append(f"  layer {layer!s:<{wide}}  {numbers}")
        best = self.ranking()[:3]
        lines.append(
            "Most important: " + ", ".join(f"layer {r.layer} head {r.head} ({r.score:.3g})" for r in best)
        )
        return "\n".join(lines)


def _mean(scored: tuple[float, Group]) -> float:
    return scored[0]


def _whole(groups: list[Group], count: int) -> Group | None:
    """The first groups whose heads are `count` in all, each taken unless the rest would not come out even."""
    reach = [1]  # bit n: whether the groups from here on can come to n heads
    for group in reversed(groups):
        reach.append(reach[-1] | reach[-1] << len(group))
    if not reach[-1] >> count & 1:
        return None
    chosen: Group = []
    for group, rest in zip(groups, reach[-2::-1], strict=True):
        left = count - len(chosen) - len(group)
        if left >= 0 and rest >> left & 1:
            chosen += group
    return chosen


def _checked(count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ArgumentError(f"count must be a whole number of at least 0: got {count!r}; it counts heads")
    return count


def importance(
    model: nn.Module,
    batches: Iterable[object],
    loss_fn: Loss | None = None,
    *,
    method: str = "gradient",
    normalise: bool | None = None,
    reduction: str = "mean",
    progress: bool = True,
    fallback: str | None = None,
) -> Importance:
    """How much the loss depends on each head: I_h = E_x | Att_h(x)^T dL(x) / dAtt_h(x) |.

    The model stays in the mode it is in (dropout of training makes scores noisy), and neither its parameters
    nor their `grad` and `requires_grad` change. A layer that runs several times in a forward has one score a
    head for all of them, as pruning it would remove all; windows and frames of one example count as one.

    Args:
        batches: an iterable of batches, gone through once; a single batch may be a mapping or a tensor.
        loss_fn: loss_fn(model, batch) gives one number. Without it, batches are mappings and the loss is the
            model's own (`model(**batch).loss`); a causal language model without labels predicts its input.
        method: "gradient", one backward pass a batch; or "leave_one_out", the loss with the head at zero
            minus the loss, exact, one forward per head and batch: below 0, the model is better without it.
        normalise: divide the scores of a layer by their Euclidean length. None: as the paper does, for
            gradients; not for leave_one_out, whose scores are differences of the loss.
        reduction: how loss_fn joins the sequences of a batch, "mean" or "sum": scores are absolute for each
            sequence. A mean over tokens counts longer sequences more.
        progress: a bar, where it takes over two seconds and rich is installed.
        fallback: for layers that bypass every hook: None raises; "skip" leaves them out.

    Returns:
        [H] by layer, with `ranking()`, `most(n)` and `least(n)`, which can be pruned; print it.

    Raises:
        ArgumentError: an unknown method or reduction; no batches, no labels, no loss; no attention heard;
            attention that runs without gradients; a score that is no number.
        ShapeError: a layer that sees batches of different sizes in one loss; layers whose batches are not
            made of the same examples.
        AttentionBypassed: a layer whose outputs are not in hand.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(5, 3, 8)
        >>> scores = importance(mha, [x], lambda model, batch: model(batch)[0].square().mean())
        >>> scores[0].shape, len(scores.least(2))
        (torch.Size([4]), 2)

    Michel 2019, section 4.1.
    """
    if method not in METHODS:
        raise ArgumentError(f"method must be known: got {method!r}; {nearest(str(method), METHODS)}")
    if reduction not in REDUCTIONS:
        raise ArgumentError(
            f"reduction must be 'mean' or 'sum': got {reduction!r}; torch's losses take the mean"
        )
    measure = _by_gradient if method == "gradient" else _by_leaving_out
    scores, num_kv_heads, examples, loss = measure(model, batches, loss_fn, reduction, progress, fallback)
    names = names_of(structure_of(model).places)
    _check_numbers(scores, loss, names)
    scaled = method == "gradient" if normalise is None else normalise
    if scaled:
        tiny = torch.finfo(torch.float32).tiny  # a layer of zeros stays one
        scores = {path: of_layer / of_layer.norm().clamp(min=tiny) for path, of_layer in scores.items()}
    return Importance(scores, method, scaled, examples, names, num_kv_heads)


def _check_numbers(scores: Mapping[str, Tensor], loss: float, names: Mapping[str, Layer]) -> None:
    """Scores that are no numbers would be ranked anywhere."""
    for path, of_layer in scores.items():
        heads = (~of_layer.isfinite()).nonzero().flatten().tolist()
        if heads:
            raise ArgumentError(
                f"loss_fn must give finite losses and gradients: the losses of all batches sum to {loss:g}, "
                f"and in layer {names.get(path, path)} the scores of heads {', '.join(map(str, heads))} are "
                f"{of_layer[heads[0]]:g}; look for NaN in the weights, the inputs or the loss"
            )


class _Outputs:
    """Keeps what the heads say, as tensors that the loss depends on."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Tensor]] = []
        self.num_kv_heads: dict[str, int] = {}

    def hear(self, call: Call) -> Tensor:
        output = outputs_of(call)
        self.num_kv_heads[base_of(call.path)] = call.num_kv_heads
        if not torch.is_grad_enabled():
            raise ArgumentError(
                f"model must run with gradients: {call.path} runs without (no_grad, or reentrant "
                "checkpointing); use method='leave_one_out'"
            )
        if not output.requires_grad:  # everything before it is frozen
            output = output.detach().requires_grad_()
        if not in_backward():
            self.heard.append((base_of(call.path), output))
        return output


def _by_gradient(
    model: nn.Module,
    batches: object,
    loss_fn: Loss | None,
    reduction: str,
    progress: bool,
    fallback: str | None,
) -> tuple[dict[str, Tensor], dict[str, int], int, float]:
    """({path: [H]}, {path: Hk}, how many sequences, the sum of the losses)"""
    totals: dict[str, Tensor] = {}
    losses: list[Tensor] = []  # read at the end: a GPU need not be waited for at every batch
    examples = 0
    outputs = _Outputs()
    with torch.inference_mode(False), torch.enable_grad(), attach(model, outputs, fallback):
        for batch in tracked(as_batches(batches), "importance", progress, _length(batches)):
            outputs.heard.clear()
            with entering(model) as given:
                loss = checked_loss(loss_fn, model, batch)
            check_heard(model, dict(outputs.heard))
            if not loss.requires_grad:
                raise ArgumentError(
                    f"loss_fn must keep the gradient: its loss {loss.item():g} depends on no head; "
                    "leave out detach, item and no_grad"
                )
            losses.append(loss.detach())
            heard = outputs.heard
            _check_visits(heard)
            visits = [(path, output.shape[0], output.shape[2], output) for path, output in heard]
            B = count_examples(given, visits)
            grads = torch.autograd.grad(loss, [output for _, output in heard], allow_unused=True)
            examples += B
            for path, signed in _per_example(heard, grads, B).items():
                score = signed.abs().sum(0) * (B if reduction == "mean" else 1)  # [H]
                totals[path] = totals[path] + score if path in totals else score
            outputs.heard.clear()
    scores = {path: total / examples for path, total in totals.items()}
    return scores, outputs.num_kv_heads, examples, sum(loss.item() for loss in losses)


def _check_visits(heard: list[tuple[str, Tensor]]) -> None:
    first: dict[str, Tensor] = {}
    for path, output in heard:
        before = len(first.setdefault(path, output))
        if before != len(output):
            raise ShapeError(
                f"loss_fn must give a layer one batch size: {path} saw {before} and {len(output)} "
                "sequences in one loss; use batches of one size"
            )


def _per_example(
    heard: list[tuple[str, Tensor]], grads: tuple[Tensor | None, ...], B: int
) -> dict[str, Tensor]:
    """Att_h^T dL/dAtt_h for each example, {path: [B, H]}: all windows of it and all visits of a layer."""
    products: dict[str, Tensor] = {}
    for (path, output), grad in zip(heard, grads, strict=True):
        wide = torch.promote_types(output.dtype, torch.float32)
        if grad is None:  # the loss does not depend on this layer
            product = torch.zeros((B, output.shape[1]), dtype=wide, device=output.device)
        else:
            of_windows = (output.detach().to(wide) * grad.to(wide)).sum((2, 3))  # [B * windows, H]
            product = of_windows.unflatten(0, (B, -1)).sum(1)  # [B, H]
        products[path] = products[path] + product if path in products else product
    return products


def _by_leaving_out(
    model: nn.Module,
    batches: object,
    loss_fn: Loss | None,
    reduction: str,
    progress: bool,
    fallback: str | None,
) -> tuple[dict[str, Tensor], dict[str, int], int, float]:
    """({path: [H]}, {path: Hk}, how many sequences, the sum of the losses with all heads)"""
    switches, examples, losses = Switches(), 0, 0.0
    total: dict[tuple[str, int], float] = {}
    with attach(model, switches, fallback):
        trials = _trials(model, batches, loss_fn, switches)
        for path, head, change, count in tracked(trials, "importance, head by head", progress):
            if path is None:
                examples, losses = examples + count, losses + change
            else:
                share = change * (count if reduction == "mean" else 1)
                total[path, head] = total.get((path, head), 0.0) + share
    scores = {
        path: torch.tensor([total[path, head] / examples for head in range(count)], dtype=torch.float64)
        for path, count in switches.num_heads.items()
    }
    return scores, switches.num_kv_heads, examples, losses


def _trials(
    model: nn.Module, batches: object, loss_fn: Loss | None, switches: Switches
) -> Iterator[tuple[str | None, int, float, int]]:
    """(path, head, loss without it minus loss, sequences); a batch begins with path None and its loss."""
    for batch in as_batches(batches):
        whole = switches.loss(model, loss_fn, batch, ())
        check_heard(model, switches.num_heads)
        count = switches.examples
        yield None, 0, whole, count
        for path, head in switches.every_head():
            yield path, head, switches.loss(model, loss_fn, batch, [(path, head)]) - whole, count


def _length(batches: object) -> int | None:
    return (
        len(batches) if hasattr(batches, "__len__") and not isinstance(batches, (Mapping, Tensor)) else None
    )
