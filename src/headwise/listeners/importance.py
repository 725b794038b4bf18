"""How much each head matters to the loss, and whether the others make up for it where heads fail.

    I_h = E_x | Att_h(x)^T  dL(x) / dAtt_h(x) |            Michel 2019, equation 2

Att_h(x) is the output of head h on a sequence x. This is the first-order change of the loss if the head
were multiplied by a gate that goes from 1 to 0: |dL / dgate_h|, which takes one backward pass for all heads.
`robustness` is the loss as a function of the number of removed heads.

Letters: B batch, T query_len, H num_heads, Hk num_kv_heads, Dv value_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from operator import index, itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError, nearest
from ..heads.layer_names import ByLayer, GivenByLayer, Layer, path_in_words
from ..models.batches import Loss, as_batches, checked_loss, tracked
from .ablation import Switches, count_examples, entering
from .active import LayerCall, Listener, in_backward
from .adapters import attach
from .chosen_heads import base_of, by_path, check_count, layer_names, outputs_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("gradient", "leave_one_out")
REDUCTIONS = ("mean", "sum")
CURVES = ("importance", "random")
POINTS = 10  # points of a curve, besides the one with all heads

Group = list[tuple[Layer, int]]  # heads that are removed together


class Ranked(NamedTuple):
    """A head and its score: unpacks to three, and goes into `headwise.ablate` and `prune` as it is."""

    layer: Layer  # its number, where the model has one stack of layers; else its path
    head: int
    score: float


def ranked(scores: ByLayer[Tensor]) -> list[Ranked]:
    """Return all heads, the highest score first, NaN last."""
    every = [
        Ranked(layer, head, score)
        for layer, of_layer in scores.items()
        for head, score in enumerate(of_layer.tolist())
    ]
    return sorted(every, key=lambda head: math.inf if math.isnan(head.score) else -head.score)


class HeadScores(ByLayer[Tensor]):
    """A number for every head, [H] by layer; printed as a table."""

    def __repr__(self) -> str:
        return str(self)

    def _rows(self) -> list[str]:
        """Return a line of numbers for each layer."""
        wide = max((len(str(layer)) for layer in self), default=0)
        return [
            f"  layer {layer!s:<{wide}}  " + "  ".join(f"{score:9.3g}" for score in scores.tolist())
            for layer, scores in self.items()
        ]


# Importance


class Importance(HeadScores):
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
        self.num_kv_heads = dict(num_kv_heads or {})  # by path; a missing layer has one per head

    def ranking(self) -> list[Ranked]:
        """Return all heads, the most important first."""
        return ranked(self)

    def least(self, count: int, *, groups: bool = True) -> list[tuple[Layer, int]]:
        """Return the least important heads, in order, as `headwise.prune` and `ablate` take them.

        Where several query heads share a key/value head, whole groups go, since `prune` takes no others: by
        the mean score of their heads, and the best group of each layer last, since a layer must keep one. A
        `count` that whole groups cannot add up to raises; it is never rounded.

        Args:
            count: how many heads; more than there are: all.
            groups: False: one by one, whatever the heads share. `ablate` takes these, `prune` may not.

        Raises:
            ArgumentError: a count below 0; one that whole groups do not add up to.

        Example:
            >>> from headwise.nn import MultiHeadAttention
            >>> mha, x = MultiHeadAttention(12, 6, num_kv_heads=3), torch.randn(5, 3, 12)
            >>> scores = importance(mha, [x], lambda model, batch: model(batch)[0].square().mean())
            >>> chosen = scores.least(4)
            >>> len(chosen), len({head // 2 for _, head in chosen})          # two groups of two
            (4, 2)
        """
        heads = [(layer, head) for layer, head, _ in reversed(self.ranking())]
        check_count(count, "count", "it counts heads", least=0)
        count = min(count, len(heads))
        all_groups = self._groups()
        sizes = sorted({len(group) for group in all_groups})
        if not groups or sizes == [1]:
            return heads[:count]
        for candidates in (all_groups[: -len(self)], all_groups):  # a layer must keep a group
            chosen = _groups_of(candidates, count)
            if chosen is not None:
                return chosen
        below, above = (
            next(number for number in numbers if _groups_of(all_groups, number) is not None)
            for numbers in (range(count, -1, -1), range(count, len(heads) + 1))
        )
        raise ArgumentError(
            f"count must select whole groups: got {count}, but every group that shares a key/value head has "
            f"{' or '.join(map(str, sizes))} query heads; use {below} or {above}, or groups=False for ablate"
        )

    def _groups(self) -> list[Group]:
        """Return groups of heads that share a key/value head, the least important first.

        The most important group of each layer comes after all others.
        """
        scored: list[tuple[bool, float, Group]] = []
        for path, layer in zip(self.paths, self, strict=True):
            scores = self[path].tolist()
            size = len(scores) // self.num_kv_heads.get(path, len(scores))
            layer_groups: list[tuple[float, Group]] = []
            for first in range(0, len(scores), size):
                heads = sorted(range(first, first + size), key=scores.__getitem__)
                mean = math.fsum(scores[head] for head in heads) / size
                layer_groups.append((mean, [(layer, head) for head in heads]))
            layer_groups.sort(key=itemgetter(0))
            scored += [(group is layer_groups[-1][1], mean, group) for mean, group in layer_groups]
        return [group for _, _, group in sorted(scored, key=itemgetter(0, 1))]

    def most(self, count: int) -> list[tuple[Layer, int]]:
        """Return the most important heads, the most important first.

        Raises:
            ArgumentError: a count below 0.
        """
        check_count(count, "count", "it counts heads", least=0)
        return [(layer, head) for layer, head, _ in self.ranking()[:count]]

    def __str__(self) -> str:
        method = {"gradient": "from gradients", "leave_one_out": "from the loss without each head"}[
            self.method
        ]
        scaled = ", scores normalised per layer" if self.normalised else ""
        heads, many = sum(map(len, self.values())), "" if self.examples == 1 else "s"
        title = f"Importance of {heads} heads, {method}, over {self.examples} sequence{many}{scaled}."
        best = ", ".join(
            f"layer {layer} head {head} ({score:.3g})" for layer, head, score in self.ranking()[:3]
        )
        return "\n".join([title, *self._rows(), f"Most important: {best}"])


def _groups_of(groups: list[Group], count: int) -> Group | None:
    """Return the heads of the first groups that have `count` heads in total, or None if there are none.

    A group is skipped if no choice of later groups would complete the count.
    """
    sums = [1]  # bit n: some of the later groups have n heads in total
    for group in reversed(groups):
        sums.append(sums[-1] | sums[-1] << len(group))
    if not sums[-1] >> count & 1:
        return None
    chosen: Group = []
    for group, later_sums in zip(groups, sums[-2::-1], strict=True):
        missing = count - len(chosen) - len(group)
        if missing >= 0 and later_sums >> missing & 1:
            chosen += group
    return chosen


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
    """Return how much the loss depends on each head: I_h = E_x | Att_h(x)^T dL(x) / dAtt_h(x) |.

    The mode of the model is not changed (in training mode, dropout makes scores noisy); nor are its
    parameters, their `grad` and their `requires_grad`. If a layer runs several times in a forward, each head
    has one score for all runs, since pruning removes it from all. If a model folds windows or frames of an
    example into the batch, they count as one example.

    Args:
        batches: an iterable of batches, read once. A batch is anything that loss_fn takes; one mapping or
            tensor in place of the iterable is a single batch.
        loss_fn: loss_fn(model, batch) returns one number. Without it, batches are mappings and the loss is
            `model(**batch).loss`; if a causal language model gets no labels, its input serves as labels.
        method: "gradient", an estimate with one backward pass per batch; or "leave_one_out", the exact loss
            without the head minus the loss with it, with one forward per head and batch. A score below 0
            means that the model is better without the head.
        normalise: divide the scores of a layer by their Euclidean norm. None: yes for "gradient", as in the
            paper; no for "leave_one_out", whose scores are differences of the loss.
        reduction: how loss_fn reduces the sequences of a batch, "mean" or "sum". It is needed because
            absolute values are taken for each sequence. If loss_fn takes a mean over tokens, longer sequences
            count more.
        progress: True shows a bar if it takes over two seconds and rich is installed.
        fallback: for layers whose attention cannot be intercepted: None raises; "skip" leaves them out.

    Returns:
        Scores [H] by layer, with `ranking()`, `most(n)` and `least(n)`; results of `least` can be passed to
        `headwise.prune`. It can be printed.

    Raises:
        ArgumentError: an unknown method or reduction; no batches, no labels or no loss; no attention was
            found; attention that runs without gradients; a score that is NaN or infinite.
        ShapeError: a layer ran with different batch sizes within one loss; or the layers' batch sizes do not
            show which entries belong to which example.
        AttentionBypassed: a layer whose head outputs cannot be read.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(5, 3, 8)
        >>> scores = importance(mha, [x], lambda model, batch: model(batch)[0].square().mean())
        >>> scores[0].shape, len(scores.least(2))
        (torch.Size([4]), 2)

    Michel 2019, section 4.1.
    """
    if method not in METHODS:
        raise ArgumentError(f"method must be a known name: got {method!r}; {nearest(str(method), METHODS)}")
    if reduction not in REDUCTIONS:
        raise ArgumentError(
            f"reduction must be 'mean' or 'sum': got {reduction!r}; torch's losses take the mean"
        )
    measure = _by_gradient if method == "gradient" else _by_leaving_out
    scores, num_kv_heads, examples, loss = measure(model, batches, loss_fn, reduction, progress, fallback)
    names = layer_names(model)
    for path, layer_scores in scores.items():  # NaN has no rank
        heads = (~layer_scores.isfinite()).nonzero().flatten().tolist()
        if heads:
            raise ArgumentError(
                f"loss_fn must give finite losses and gradients: the losses of all batches sum to {loss:g}, "
                f"and in layer {names.get(path, path)} the scores of heads {', '.join(map(str, heads))} are "
                f"{layer_scores[heads[0]]:g}; look for NaN in the weights, the inputs or the loss"
            )
    scaled = method == "gradient" if normalise is None else normalise
    if scaled:
        smallest = torch.finfo(torch.float32).tiny  # a layer of zeros stays zero
        scores = {
            path: layer_scores / layer_scores.norm().clamp(min=smallest)
            for path, layer_scores in scores.items()
        }
    return Importance(scores, method, scaled, examples, names, num_kv_heads)


class _Outputs(Listener):
    """Stores the outputs of heads, as tensors that the loss depends on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor]] = []
        self.num_kv_heads: dict[str, int] = {}

    def hear(self, call: LayerCall) -> Tensor:
        output = outputs_of(call)
        self.num_kv_heads[base_of(call.path)] = call.num_kv_heads
        if not torch.is_grad_enabled():
            raise ArgumentError(
                f"model must run with gradients: {path_in_words(call.path)} runs without (no_grad, or "
                "reentrant checkpointing); use method='leave_one_out'"
            )
        if not output.requires_grad:  # everything before the layer is frozen
            output = output.detach().requires_grad_()
        if not in_backward():
            self.calls.append((base_of(call.path), output))
        return output


def _by_gradient(
    model: nn.Module,
    batches: object,
    loss_fn: Loss | None,
    reduction: str,
    progress: bool,
    fallback: str | None,
) -> tuple[dict[str, Tensor], dict[str, int], int, float]:
    """Return scores {path: [H]}, {path: Hk}, the number of sequences, and the sum of the losses."""
    totals: dict[str, Tensor] = {}
    losses: list[Tensor] = []  # read at the end, so that no batch waits for the GPU
    examples = 0
    outputs = _Outputs()
    total = len(batches) if isinstance(batches, Sized) else None
    with torch.inference_mode(False), torch.enable_grad(), attach(model, outputs, fallback):
        for batch in tracked(as_batches(batches), "importance", progress, total):
            outputs.calls.clear()
            with entering(model) as inputs:
                loss = checked_loss(loss_fn, model, batch)
            _check_attention(model, outputs.calls)
            if not loss.requires_grad:
                raise ArgumentError(
                    f"loss_fn must keep the gradient: its loss {loss.item():g} depends on no head; "
                    "leave out detach, item and no_grad"
                )
            losses.append(loss.detach())
            calls = outputs.calls
            sizes = {path: len(output) for path, output in reversed(calls)}
            for path, output in calls:
                if len(output) != sizes[path]:
                    raise ShapeError(
                        f"loss_fn must run a layer with one batch size: {path_in_words(path)} got "
                        f"{sizes[path]} and {len(output)} sequences in one loss; use batches of one size"
                    )
            visits = [(path, len(output), output.shape[2], output) for path, output in calls]
            B = count_examples(inputs, visits)
            grads = torch.autograd.grad(loss, [output for _, output in calls], allow_unused=True)
            examples += B
            for path, signed in _per_example(calls, grads, B).items():
                score = signed.abs().sum(0) * (B if reduction == "mean" else 1)  # [H]
                totals[path] = totals[path] + score if path in totals else score
            outputs.calls.clear()
    scores = {path: total / examples for path, total in totals.items()}
    return scores, outputs.num_kv_heads, examples, sum(loss.item() for loss in losses)


def _per_example(
    calls: list[tuple[str, Tensor]], grads: tuple[Tensor | None, ...], B: int
) -> dict[str, Tensor]:
    """Return Att_h^T dL/dAtt_h of each example over its windows and visits of a layer, {path: [B, H]}."""
    products: dict[str, Tensor] = {}
    for (path, output), grad in zip(calls, grads, strict=True):
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
    """Return scores {path: [H]}, {path: Hk}, the number of sequences, and the sum of the full losses."""
    switches, examples, losses, full_loss, weight = Switches(), 0, 0.0, 0.0, 1
    totals: dict[tuple[str, int], float] = {}

    def trials() -> Iterator[tuple[object, list[tuple[str, int]]]]:
        """Yield each batch with all heads, then without each head."""
        for batch in as_batches(batches):
            yield batch, []
            yield from ((batch, [head]) for head in switches.every_head())

    with attach(model, switches, fallback):
        for batch, off in tracked(trials(), "importance of heads", progress):
            loss = switches.loss(model, loss_fn, batch, off)
            if off:
                totals[off[0]] = totals.get(off[0], 0.0) + (loss - full_loss) * weight
                continue
            _check_attention(model, switches.num_heads)
            full_loss, weight = loss, switches.examples if reduction == "mean" else 1
            examples, losses = examples + switches.examples, losses + full_loss
    scores = {
        path: torch.tensor([totals[path, head] / examples for head in range(count)], dtype=torch.float64)
        for path, count in switches.num_heads.items()
    }
    return scores, switches.num_kv_heads, examples, losses


def _check_attention(model: nn.Module, calls: Sized) -> None:
    """Raise `ArgumentError` if no attention was found."""
    if not calls:
        raise ArgumentError(
            f"model must run attention in its loss: none was found in {type(model).__name__}; check that "
            "loss_fn runs this model"
        )


# Robustness


@dataclass(frozen=True, eq=False)
class Robustness:
    """The loss by number of removed heads (outputs set to 0); print it, or `plot()` it."""

    baseline: float  # all heads on
    num_heads: int  # of the whole model
    removed: list[int]  # how many heads are off at each point, from 0
    by_importance: Tensor | None  # [points], the least important first
    at_random: Tensor | None  # [repeats, points]
    single: ByLayer[Tensor] | None  # [H], one head off at a time

    def to_dict(self) -> dict[str, object]:
        """Return the results as plain numbers and lists, for JSON."""
        return {
            "baseline": self.baseline,
            "num_heads": self.num_heads,
            "removed": list(self.removed),
            "by_importance": None if self.by_importance is None else self.by_importance.tolist(),
            "at_random": None if self.at_random is None else self.at_random.tolist(),
            "single": None if self.single is None else {str(k): v.tolist() for k, v in self.single.items()},
        }

    def plot(self) -> Figure:
        """Return the curves, as a matplotlib figure (it needs the extra `viz`)."""
        from ..show.curves import robustness_curve

        return robustness_curve(self)

    def __str__(self) -> str:
        heads = "its one head" if self.num_heads == 1 else f"all {self.num_heads} heads"
        words = [f"With {heads} the loss is {self.baseline:.4g}."]
        if self.single and self.num_heads > 1:  # the only head is all heads
            losses = ranked(self.single)
            unaffected = sum(abs(loss - self.baseline) <= 0.01 * abs(self.baseline) for _, _, loss in losses)
            layer, head, worst = losses[0]
            words.append(
                f"Removing a single head changes the loss by at most 1% for {unaffected} of {len(losses)} "
                "heads; the "
                f"largest change is that of layer {layer} head {head} ({worst - self.baseline:+.3g})."
            )
        last = len(self.removed) - 1
        middle = min(range(1, last + 1), key=lambda i: abs(self.removed[i] - self.num_heads / 2))
        curves = {"least important first": self.by_importance, "at random": self.at_random}
        measured = {name: curve for name, curve in curves.items() if curve is not None}
        if measured:
            text = "; ".join(self._at(point, measured) for point in dict.fromkeys((middle, last)))
            words.append(f"{text[0].upper()}{text[1:]}.")
        return " ".join(words)

    def _at(self, point: int, curves: Mapping[str, Tensor]) -> str:
        """Return the loss at a point of each curve as text; without any head, all orders have one loss."""
        if self.removed[point] == self.num_heads:
            return f"without any head it is {next(iter(curves.values()))[..., point].mean():.4g}"
        losses = []
        for name, curve in curves.items():
            values = curve[..., point]
            spread = f" ± {values.std():.2g}" if values.numel() > 1 else ""
            losses.append(f"{values.mean():.4g}{spread} {name}")
        return f"with {self.removed[point]} removed it is {' and '.join(losses)}"


def robustness(
    model: nn.Module,
    batches: Iterable[object],
    loss_fn: Loss | None = None,
    *,
    method: str | Sequence[str] = CURVES,
    repeats: int = 5,
    points: int | Sequence[int] | None = None,
    single: bool = True,
    scores: Importance | GivenByLayer[Tensor] | None = None,
    seed: int = 0,
    progress: bool = True,
    fallback: str | None = None,
) -> Robustness:
    """Return the loss by number of removed heads (outputs set to 0), and with each single head removed.

    This takes one forward per batch for each point of each curve, and one per head with `single`. Removal is
    cumulative: the heads removed at a point are also removed at the next. The mode of the model is not
    changed.

    Args:
        batches: an iterable of batches; they are kept in memory and used for every measurement.
        loss_fn: as in `headwise.importance`. The loss over several batches is the average weighted by the
            number of sequences in each.
        method: the order of removal: "importance", the least important head first, and "random".
        repeats: the number of random orders.
        points: the number of points after the first, which has all heads; they are evenly spaced up to all
            heads removed. Or a list of numbers of removed heads. None: 10, or the number of heads if that is
            smaller.
        single: whether to remove each head alone, too.
        scores: importance of the heads, if already measured. Default: `headwise.importance` by gradients.
        seed: the seed of the random orders.
        progress, fallback: as in `headwise.importance`.

    Raises:
        ArgumentError: an unknown method; fewer than one repeat or point; points that are no whole numbers or
            exceed the number of heads; scores of other heads; and as `headwise.importance`.
        AttentionBypassed: a layer whose head outputs cannot be read.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(5, 3, 8)
        >>> found = robustness(mha, [x], lambda model, batch: model(batch)[0].square().mean(), repeats=2)
        >>> found.removed, found.at_random.shape
        ([0, 1, 2, 3, 4], torch.Size([2, 5]))

    Michel 2019, section 4.2; Voita 2019, section 6.
    """
    methods = [method] if isinstance(method, str) else list(method)
    for name in methods:
        if name not in CURVES:
            raise ArgumentError(
                f"method must be 'importance', 'random' or both in a list: got {name!r}; both are the default"
            )
    check_count(repeats, "repeats", "5 shows a spread")
    requested = _as_integers(points)
    stored = list(as_batches(batches))
    if "importance" in methods and scores is None:
        scores = importance(model, stored, loss_fn, progress=progress, fallback=fallback)
    switches, examples = Switches(), []
    with attach(model, switches, fallback) as attachment:
        for batch in stored:
            switches.loss(model, loss_fn, batch)
            examples.append(switches.examples)
        _check_attention(model, switches.num_heads)
        heads = switches.every_head()
        removed = _counts(requested, len(heads))
        orders: list[list[tuple[str, int]]] = []
        if scores is not None and "importance" in methods:
            orders.append(_least_first(by_path(model, scores, "scores"), heads))
        if "random" in methods:
            random = torch.Generator().manual_seed(seed)
            shuffled = (torch.randperm(len(heads), generator=random) for _ in range(repeats))
            orders += [[heads[i] for i in order] for order in shuffled]
        singles = [[head] for head in heads] if single else []
        trials = [[], *singles, *(order[:count] for order in orders for count in removed[1:])]
        losses = []
        for off in tracked(trials, "robustness", progress):
            of_batches = [switches.loss(model, loss_fn, batch, off) for batch in stored]
            weighted = (loss * count for loss, count in zip(of_batches, examples, strict=True))
            losses.append(sum(weighted) / sum(examples))
    baseline = losses[0]
    single_losses, rest = torch.tensor(losses[1:], dtype=torch.float64).tensor_split([len(singles)])
    curves = rest.view(len(orders), len(removed) - 1)
    curves = nn.functional.pad(curves, (1, 0), value=baseline)  # [orders, points]
    by_layer = None
    if single:
        by_path_losses = single_losses.split(list(switches.num_heads.values()))
        by_layer = ByLayer(dict(zip(switches.num_heads, by_path_losses, strict=True)), attachment.names)
    first = int("importance" in methods)
    by_importance, at_random = curves[0] if first else None, curves[first:] if "random" in methods else None
    return Robustness(baseline, len(heads), removed, by_importance, at_random, by_layer)


def _as_integers(points: int | Sequence[int] | None) -> int | list[int]:
    """Return the number of points, or the numbers of removed heads, as int."""
    try:
        if isinstance(points, Iterable):
            return [index(number) for number in points]
        count = POINTS if points is None else index(points)
    except TypeError:
        raise ArgumentError(
            f"points must be a whole number, or whole numbers of removed heads: got {points!r}; pass a "
            "share of the heads as [round(share * num_heads)]"
        ) from None
    if isinstance(points, bool) or count < 1:
        raise ArgumentError(f"points must be at least 1: got {points!r}; 10 draws a curve")
    return count


def _counts(points: int | list[int], total: int) -> list[int]:
    """Return how many heads are off at each point, from 0."""
    if isinstance(points, int):
        count = min(points, total)
        return [round(total * point / count) for point in range(count + 1)]
    counts = sorted({0, *points})
    if len(counts) < 2 or counts[0] < 0 or counts[-1] > total:
        raise ArgumentError(
            f"points must be numbers of removed heads, 1 to {total}: got {points}; or give a count"
        )
    return counts


def _least_first(scores: Mapping[str, Tensor], heads: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the heads by score, the least important first."""
    for path, head in heads:
        if path not in scores or head >= len(scores[path]):
            raise ArgumentError(
                f"scores must cover every head: head {head} of {path_in_words(path)} is missing; use "
                "importance of this model"
            )
    return sorted(heads, key=lambda pair: float(scores[pair[0]][pair[1]]))
