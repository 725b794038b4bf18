"""Heads switched off: what does the model do without them?

    zero      the head says nothing:                             0
    mean      it says what it says on average:                   mean over the real positions
    uniform   it looks at all it may see, and chooses nothing:   mean of the values it may see

`Switches` are for `importance`, `robustness` and `effects`: heads off and on again between runs.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim; n heads chosen.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError, nearest
from ..functional import attention
from ..heads.layer_names import ByLayer, GivenByLayer
from ..indexing import take
from ..masks import Mask
from ..models.batches import Loss, as_batches, checked_loss, run
from ..scoring import HIDDEN, hidden_is_endless
from .active import LayerCall, Listener
from .adapters import attach
from .chosen_heads import Changing, ChosenHeads, Heads, base_of, by_path, check_any, of_visit, outputs_of

METHODS = ("zero", "mean", "uniform")

Visit = tuple[str, int, int, Tensor | None]  # a layer's path, B and T in it, its output to follow or None


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
    given = None if means is None else by_path(model, means, "means", chosen, maker="head_means")

    def change(call: LayerCall, index: Tensor, output: Tensor) -> Tensor:
        if method == "zero":
            return output.index_fill(1, index, 0)
        if method == "uniform":
            new = _uniform(call, index)
        else:
            mean = _mean(*_sum_and_count(call, output)) if given is None else _given(given, call, output)
            new = mean[None, index, None]  # [1, n, 1, Dv]
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
    heard = _Sums()
    ran = 0
    with torch.no_grad(), attach(model, heard, fallback) as attachment:
        for ran, batch in enumerate(as_batches(batches), 1):  # noqa: B007, counted to the end
            run(model, batch)
    check_any(model, ran, heard.sums, fallback)
    return ByLayer({path: _mean(*sums) for path, sums in heard.sums.items()}, attachment.names)


class _Sums(Listener):
    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # by path

    def hear(self, call: LayerCall) -> None:
        new, known = _sum_and_count(call, outputs_of(call)), self.sums.get(call.path)
        self.sums[call.path] = new if known is None else (known[0] + new[0], known[1] + new[1])


def _sum_and_count(call: LayerCall, output: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over real positions, [H, Dv] in at least float32, and how many these are; both detached."""
    counted = call.weights.mask.counted(output.shape[2])
    output = output.detach().to(torch.promote_types(output.dtype, torch.float32))
    if counted is None:
        return output.sum((0, 2)), torch.tensor(output.shape[0] * output.shape[2])
    return output.masked_fill(~counted[:, None, :, None], 0).sum((0, 2)), counted.sum()


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """0 where nothing was real."""
    return total / count.clamp(min=1)


def _given(means: Mapping[str, Tensor], call: LayerCall, output: Tensor) -> Tensor:
    """The means of this visit, or of the layer, [H, Dv]."""
    mean = of_visit(means, call.path, "means", maker="head_means")
    want = (output.shape[1], output.shape[3])
    if tuple(mean.shape) != want:
        raise ShapeError(
            f"means must be [H, Dv] = {list(want)} in {call.path}: got {list(mean.shape)}; make them with "
            "head_means of this model"
        )
    return mean


def _uniform(call: LayerCall, index: Tensor) -> Tensor:
    """What these heads say if they attend evenly to all they may see, [B, n, T, Dv]."""
    assert call.value is not None  # there where outputs are
    group = call.num_heads // call.num_kv_heads
    q, k, mask = even_scores(call, index)
    return attention(q, k, call.value.index_select(1, index // group), mask)[0]


def even_scores(call: LayerCall, index: Tensor) -> tuple[Tensor, Tensor, Mask]:
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


def _hidden_by_bias(call: LayerCall, index: Tensor) -> Tensor | None:
    """Which keys a bias hides, bool broadcastable to [B, n, T, S]: many models' masks are added to scores."""
    bias, relative = call.weights.bias, call.weights.relative
    hidden = None
    if relative is not None:
        by_distance = hidden_is_endless(relative)[index] <= HIDDEN  # [n, R]
        if by_distance.any():  # a few numbers, and hardly ever one of them
            reach = by_distance.shape[1] // 2
            keys = torch.arange(call.weights.shape[3], device=index.device)
            offsets = keys - call.weights.positions[:, None]
            hidden = by_distance[:, offsets.clamp(-reach, reach) + reach][None]
    if bias is None:
        return hidden
    of_bias = hidden_is_endless(take(bias, (None, index))) <= HIDDEN
    if of_bias.device.type == "cpu" and not of_bias.any():  # elsewhere, asking would wait for all launched
        return hidden
    return of_bias if hidden is None else of_bias | hidden


# Heads off and on again between runs


class Switches(Listener):
    """Listens to a model and puts zeros in the place of the heads that are off."""

    def __init__(self) -> None:
        self.num_heads: dict[str, int] = {}  # of every layer heard so far
        self.num_kv_heads: dict[str, int] = {}
        self.examples = 0  # sequences in the last loss
        self.seen: list[tuple[str, int, int, Tensor | None]] = []  # kind, B, T, real positions of each call
        self._visits: list[Visit] = []
        self._off: dict[str, list[int]] = {}  # by path

    def hear(self, call: LayerCall) -> Tensor | None:
        """Take note of the layer; its output without the heads that are off."""
        output, path = outputs_of(call), base_of(call.path)
        B, H, T, _ = output.shape
        self.num_heads[path], self.num_kv_heads[path] = H, call.num_kv_heads
        self.seen.append((call.kind, B, T, call.weights.mask.counted(T)))
        self._visits.append((path, B, T, None))
        heads = self._off.get(path)
        return output.index_fill(1, torch.tensor(heads, device=output.device), 0) if heads else None

    def switch_off(self, heads: Iterable[tuple[str, int]]) -> None:
        """From now on these heads, (path, head), are off and all others on."""
        self._off, self.seen, self._visits = {}, [], []
        for path, head in heads:
            self._off.setdefault(path, []).append(head)

    @torch.no_grad()
    def loss(
        self, model: nn.Module, loss_fn: Loss | None, batch: object, off: Iterable[tuple[str, int]] = ()
    ) -> float:
        """The loss on a batch with these heads, (path, head), off."""
        self.switch_off(off)
        with entering(model) as given:
            loss = checked_loss(loss_fn, model, batch).item()
        self.examples = count_examples(given, self._visits) if self._visits else 0
        return loss

    def every_head(self) -> list[tuple[str, int]]:
        """(path, head) of all layers heard so far."""
        return [(path, head) for path, count in self.num_heads.items() for head in range(count)]


# How many examples a batch holds: asked of the model's input, for layers may see windows or frames of them


@contextlib.contextmanager
def entering(model: nn.Module) -> Iterator[list[Tensor]]:
    """The main input of every run of a model: the first tensor of two dimensions or more.

    With gradients on, one of fractions is handed over such that the outputs of layers can be followed back.
    """
    given: list[Tensor] = []
    try:
        order = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # compiled: as the caller has them
        order = []

    def enter(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        named = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
        for where in [*range(len(args)), *named]:
            x = args[where] if isinstance(where, int) else kwargs[where]
            if isinstance(x, Tensor) and not x.is_nested and x.ndim > 1:
                break
        else:
            return None
        in_fractions = type(x) is Tensor and x.is_floating_point()
        if not in_fractions or x.requires_grad or not torch.is_grad_enabled():
            given.append(x)
            return None
        given.append(x.detach().clone().requires_grad_())
        handed = given[-1].clone()  # no leaf, so that the model may still write to it
        if isinstance(where, int):
            return (*args[:where], handed, *args[where + 1 :]), kwargs
        return args, kwargs | {where: handed}

    hook = model.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield given
    finally:
        hook.remove()


def count_examples(given: Sequence[Tensor], visits: Sequence[Visit]) -> int:
    """The batch of the model's input, of which the batch of every layer is a multiple.

    That the rows of one example lie together, [B * windows, ...] as in Swin, is certain for one example. For
    more it is checked where the input can be followed, and else assumed: no rows of the first example may
    depend on another.

    Raises:
        ShapeError: no number fits; more than one does; rows of an example that lie apart.
    """
    sizes = {path: B for path, B, _, _ in visits}
    smallest = min(B for _, B, _, _ in visits)
    shapes = {tuple(x.shape[:2]) for x in given}
    fits: list[tuple[int, int]] = []  # how many, along which dimension of the input
    if len(shapes) == 1:
        first, second = shapes.pop()
        last = any((B, T) == (second, first) for _, B, T, _ in visits)  # perhaps [T, B, ..]
        ways = [(first, 0), (second, 1)] if last and first != second else [(first, 0)]
        fits = [(N, dim) for N, dim in ways if N and all(B % N == 0 for _, B, _, _ in visits)]
    if len(fits) == 1 and all(B == fits[0][0] for _, B, _, _ in visits):
        return fits[0][0]
    if not fits:
        if any(B % smallest for _, B, _, _ in visits):
            raise ShapeError(
                f"loss_fn must give every layer the same examples: the batches are {_listed(sizes)}, no "
                "multiples of one another; use as many of each kind"
            )
        return smallest
    apart = [N for N, dim in fits if _lie_together(given, visits, N, dim)]
    if len(apart) != 1:
        why = f"they may be {' or '.join(map(str, apart))}; use another batch size"
        if not apart:
            why = f"the rows of one of {fits[0][0]} depend on others; use batches of one"
        raise ShapeError(f"loss_fn must keep examples apart: the batches are {_listed(sizes)}, and {why}")
    return apart[0]


def _listed(sizes: Mapping[str, int]) -> str:
    first = {B: path for path, B in reversed(list(sizes.items()))}  # one layer of each size will do
    return ", ".join(f"{B} in {path}" for B, path in sorted(first.items()))


def _lie_together(given: Sequence[Tensor], visits: Sequence[Visit], N: int, dim: int) -> bool:
    rows = [out[: B // N].sum() for _, B, _, out in visits if out is not None and out.requires_grad]
    followed = [x for x in given if x.requires_grad]
    if N == 1 or not rows or not followed:
        return True
    total = torch.stack([row.cpu().double() for row in rows]).sum()
    grads = torch.autograd.grad(total, followed, retain_graph=True, allow_unused=True)
    others = [grad.narrow(dim, 1, N - 1) for grad in grads if grad is not None]
    return not any(bool(grad.nan_to_num(0.0, 0.0, 0.0).any()) for grad in others)  # NaN is told of later
