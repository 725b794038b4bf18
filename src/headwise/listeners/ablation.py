"""Heads switched off: what does the model do without them?

    zero      the output of the head is 0:                       0
    mean      its output is replaced by its mean:                mean over the real positions
    uniform   it attends evenly to all visible keys:             mean of the visible values

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
from ..heads.layer_names import ByLayer, GivenByLayer, path_in_words
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
    """Switch off heads of a model inside a `with` block; afterwards the model is as before.

    Blocks may be nested, and a block may be entered again. Gradients are those of the changed model. With
    activation checkpointing, keep the backward pass inside the block, since it runs the layers again.

    Args:
        heads: (layer, head) pairs. A layer is a number, where the model has one stack of layers, or a module
            path; a head of None means all of the layer. If a layer runs several times in a forward, the head
            is switched off each time; "path#1" switches it off only the second time. Results of `Heads.find`
            and `Importance.ranking` can be passed directly.
        method: what replaces a head's output before concatenation and W_O: "zero"; "mean", its mean over the
            real positions of the current batch; "uniform", its output with equal weights on all visible keys.
        means: with method="mean": means [H, Dv] by layer, from `head_means` or your own, in place of the
            current batch's means. Pass them during generation: a step has one position, so its mean would be
            its own output.
        fallback: for layers, not among `heads`, whose attention cannot be intercepted: None raises; "eager"
            or "skip" ignores them.

    Raises:
        ArgumentError: an unknown layer, method or fallback; means that are missing, or passed with another
            method. In the model's forward: a head that the layer does not have. At the end of the block: a
            chosen layer did not run, although the model did.
        ShapeError: in the model's forward: means that do not fit the layer.
        AttentionBypassed: a layer whose head outputs cannot be read.

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
        raise ArgumentError(
            f"means must be given only with method='mean': got method={method!r}; leave them out"
        )
    means_by_path = None if means is None else by_path(model, means, "means", chosen, maker="head_means")

    def change(call: LayerCall, index: Tensor, output: Tensor) -> Tensor:
        if method == "zero":
            return output.index_fill(1, index, 0)
        if method == "uniform":
            new = _uniform(call, index)
        else:
            mean = (
                _mean(*_sum_and_count(call, output))
                if means_by_path is None
                else _means_of_call(means_by_path, call, output)
            )
            new = mean[None, index, None]  # [1, n, 1, Dv]
        B, _, T, Dv = output.shape
        return output.index_copy(1, index, new.to(output).expand(B, len(index), T, Dv))

    return Changing(model, chosen, change, fallback)


def scaled_heads(model: nn.Module, factors: Mapping[tuple[str, int], float]) -> Changing:
    """Multiply outputs of heads, before concatenation and W_O, inside a `with` block.

    Args:
        factors: by path of the layer and head; "path#1" is the second run of a layer that runs
            again. 0 is the same as `ablate` with method="zero".

    Raises:
        ArgumentError: an unknown layer. In the model's forward: a head that the layer does not have.
        AttentionBypassed: a layer whose head outputs cannot be read.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(1, 3, 8)
        >>> with scaled_heads(mha, {("", 1): 0.0}), torch.no_grad():
        ...     output, _ = mha(x)
        >>> with ablate(mha, [(0, 1)]), torch.no_grad():
        ...     torch.equal(output, mha(x)[0])
        True
    """

    def change(call: LayerCall, index: Tensor, output: Tensor) -> Tensor:
        first = call.path if "#" in call.path else f"{call.path}#0"  # the run, then the layer in all its runs
        names = (first, base_of(call.path))
        chosen = [
            next((factors[name, head] for name in names if (name, head) in factors), 1.0)
            for head in index.tolist()
        ]
        scaled = output.index_select(1, index) * output.new_tensor(chosen)[:, None, None]
        off = index[torch.tensor([factor == 0 for factor in chosen], device=index.device)]
        # 0 times an infinite number would be NaN
        return output.index_copy(1, index, scaled).index_fill(1, off, 0)

    return Changing(model, ChosenHeads(model, list(factors)), change, "eager")


def head_means(
    model: nn.Module, batches: Iterable[object], *, fallback: str | None = None
) -> ByLayer[Tensor]:
    """Return the mean output of each head over all real positions of some batches, [H, Dv] by layer.

    Args:
        batches: what the model takes: a mapping of its arguments, a tuple of them, or one tensor.
        fallback: for layers whose attention cannot be intercepted: None raises; "skip" leaves them out.

    Raises:
        ArgumentError: no batches.
        AttentionBypassed: a layer whose head outputs cannot be read; no attention was found.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(2, 3, 8)
        >>> means = head_means(mha, [x])
        >>> torch.allclose(means[0], mha.head_outputs(x).mean((0, 2)), atol=1e-6)
        True
    """
    listener = _Sums()
    ran = 0
    with torch.no_grad(), attach(model, listener, fallback) as attachment:
        for ran, batch in enumerate(as_batches(batches), 1):  # noqa: B007, counted to the end
            run(model, batch)
    check_any(model, ran, listener.sums, fallback)
    return ByLayer({path: _mean(*sums) for path, sums in listener.sums.items()}, attachment.names)


class _Sums(Listener):
    """Adds up the heads' outputs of every layer over real positions."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # by path

    def hear(self, call: LayerCall) -> None:
        new, previous = _sum_and_count(call, outputs_of(call)), self.sums.get(call.path)
        self.sums[call.path] = new if previous is None else (previous[0] + new[0], previous[1] + new[1])


def _sum_and_count(call: LayerCall, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over real positions, [H, Dv] in at least float32, and their number; both detached."""
    counted = call.weights.mask.counted(output.shape[2])
    output = output.detach().to(torch.promote_types(output.dtype, torch.float32))
    if counted is None:
        return output.sum((0, 2)), torch.tensor(output.shape[0] * output.shape[2])
    return output.masked_fill(~counted[:, None, :, None], 0).sum((0, 2)), counted.sum()


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Return the mean, [H, Dv]; 0 where no position was real."""
    return total / count.clamp(min=1)


def _means_of_call(means: Mapping[str, Tensor], call: LayerCall, output: Tensor) -> Tensor:
    """Return the means of this run of the layer or, if there are none, of the layer, [H, Dv]."""
    mean = of_visit(means, call.path, "means", maker="head_means")
    want = (output.shape[1], output.shape[3])
    if tuple(mean.shape) != want:
        raise ShapeError(
            f"means must be [H, Dv] = {list(want)} in {path_in_words(call.path)}: got {list(mean.shape)}; "
            "compute them with head_means for this model"
        )
    return mean


def _uniform(call: LayerCall, index: Tensor) -> Tensor:
    """Return the output of heads that attend evenly to every visible key, [B, n, T, Dv]."""
    assert call.value is not None  # a call with outputs has values
    group = call.num_heads // call.num_kv_heads
    q, k, mask = even_scores(call, index)
    return attention(q, k, call.value.index_select(1, index // group), mask)[0]


def even_scores(call: LayerCall, index: Tensor) -> tuple[Tensor, Tensor, Mask]:
    """Return queries, keys and a mask with which these heads attend evenly to every visible key.

    Queries and keys are zeros, so that every score is 0; of the rules only the mask is left.
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
    """Return which keys a bias hides, bool broadcastable to [B, n, T, S].

    Many models add their masks to the scores.
    """
    bias, relative = call.weights.bias, call.weights.relative
    hidden = None
    if relative is not None:
        by_distance = hidden_is_endless(relative)[index] <= HIDDEN  # [n, R]
        if by_distance.any():  # cheap to read, and seldom true
            reach = by_distance.shape[1] // 2
            keys = torch.arange(call.weights.shape[3], device=index.device)
            offsets = keys - call.weights.positions[:, None]
            hidden = by_distance[:, offsets.clamp(-reach, reach) + reach][None]
    if bias is None:
        return hidden
    of_bias = hidden_is_endless(take(bias, (None, index))) <= HIDDEN
    if of_bias.device.type == "cpu" and not of_bias.any():  # on a GPU this would wait for every kernel
        return hidden
    return of_bias if hidden is None else of_bias | hidden


# Heads switched off and on between runs


class Switches(Listener):
    """Listens to a model and puts zeros in the place of the heads that are off."""

    def __init__(self) -> None:
        self.num_heads: dict[str, int] = {}  # by path, of every layer that has run
        self.num_kv_heads: dict[str, int] = {}
        self.examples = 0  # sequences in the last loss
        self.calls: list[tuple[str, int, int, Tensor | None]] = []  # kind, B, T, real positions of each call
        self._visits: list[Visit] = []
        self._off: dict[str, list[int]] = {}  # by path

    def hear(self, call: LayerCall) -> Tensor | None:
        """Record the call; return its output without the heads that are off, or None if all are on."""
        output, path = outputs_of(call), base_of(call.path)
        B, H, T, _ = output.shape
        self.num_heads[path], self.num_kv_heads[path] = H, call.num_kv_heads
        self.calls.append((call.kind, B, T, call.weights.mask.counted(T)))
        self._visits.append((path, B, T, None))
        heads = self._off.get(path)
        return output.index_fill(1, torch.tensor(heads, device=output.device), 0) if heads else None

    def switch_off(self, heads: Iterable[tuple[str, int]]) -> None:
        """Switch these heads, (path, head), off and all others on."""
        self._off, self.calls, self._visits = {}, [], []
        for path, head in heads:
            self._off.setdefault(path, []).append(head)

    @torch.no_grad()
    def loss(
        self, model: nn.Module, loss_fn: Loss | None, batch: object, off: Iterable[tuple[str, int]] = ()
    ) -> float:
        """Return the loss on a batch with these heads, (path, head), off."""
        self.switch_off(off)
        with entering(model) as inputs:
            loss = checked_loss(loss_fn, model, batch).item()
        self.examples = count_examples(inputs, self._visits) if self._visits else 0
        return loss

    def every_head(self) -> list[tuple[str, int]]:
        """Return (path, head) of every head of the layers that have run."""
        return [(path, head) for path, count in self.num_heads.items() for head in range(count)]


# The number of examples of a batch, from the model's input: the batch of a layer may be windows or frames


@contextlib.contextmanager
def entering(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the main input of every run of a model: its first tensor of two dimensions or more.

    With gradients on, a floating-point input is replaced by a copy that requires gradients, so that the
    outputs of layers can be traced back to it.
    """
    inputs: list[Tensor] = []
    try:
        order = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # compiled: keyword arguments stay in the caller's order
        order = []

    def enter(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        named = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
        for position in [*range(len(args)), *named]:
            x = args[position] if isinstance(position, int) else kwargs[position]
            if isinstance(x, Tensor) and not x.is_nested and x.ndim > 1:
                break
        else:
            return None
        is_floating = type(x) is Tensor and x.is_floating_point()
        if not is_floating or x.requires_grad or not torch.is_grad_enabled():
            inputs.append(x)
            return None
        inputs.append(x.detach().clone().requires_grad_())
        copy = inputs[-1].clone()  # not a leaf, so that the model may write to it in place
        if isinstance(position, int):
            return (*args[:position], copy, *args[position + 1 :]), kwargs
        return args, kwargs | {position: copy}

    hook = model.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield inputs
    finally:
        hook.remove()


def count_examples(inputs: Sequence[Tensor], visits: Sequence[Visit]) -> int:
    """Return the batch size of the model's input, of which the batch of every layer is a multiple.

    The rows of an example must be consecutive, [B * windows, ...] as in Swin. For one example they are. For
    more this is checked where the input can be traced, and assumed otherwise: no row of the first example may
    depend on another example.

    Raises:
        ShapeError: no number fits; more than one does; the rows of an example are not consecutive.
    """
    sizes = {path: B for path, B, _, _ in visits}
    smallest = min(B for _, B, _, _ in visits)
    shapes = {tuple(x.shape[:2]) for x in inputs}
    fits: list[tuple[int, int]] = []  # how many, along which dimension of the input
    if len(shapes) == 1:
        first, second = shapes.pop()
        last = any((B, T) == (second, first) for _, B, T, _ in visits)  # perhaps [T, B, ..]
        candidates = [(first, 0), (second, 1)] if last and first != second else [(first, 0)]
        fits = [(N, dim) for N, dim in candidates if N and all(B % N == 0 for _, B, _, _ in visits)]
    if len(fits) == 1 and all(B == fits[0][0] for _, B, _, _ in visits):
        return fits[0][0]
    if not fits:
        if any(B % smallest for _, B, _, _ in visits):
            raise ShapeError(
                f"loss_fn must run every layer on the same examples: the batch sizes are {_listed(sizes)}, "
                "which are not multiples of one another; use the same number for all"
            )
        return smallest
    separate = [N for N, dim in fits if _are_consecutive(inputs, visits, N, dim)]
    if len(separate) != 1:
        fault = f"the number of examples may be {' or '.join(map(str, separate))}; use another batch size"
        if not separate:
            fault = f"in a batch of {fits[0][0]} rows depend on other rows; use batches of one example"
        raise ShapeError(f"loss_fn must not mix examples: the batch sizes are {_listed(sizes)}, and {fault}")
    return separate[0]


def _listed(sizes: Mapping[str, int]) -> str:
    """Return each batch size with one layer that has it, as text."""
    first = {B: path for path, B in reversed(list(sizes.items()))}
    return ", ".join(f"{B} in {path_in_words(path)}" for B, path in sorted(first.items()))


def _are_consecutive(inputs: Sequence[Tensor], visits: Sequence[Visit], N: int, dim: int) -> bool:
    """Return True if the first B // N rows of every layer depend on the first of N examples only."""
    rows = [out[: B // N].sum() for _, B, _, out in visits if out is not None and out.requires_grad]
    traced = [x for x in inputs if x.requires_grad]
    if N == 1 or not rows or not traced:
        return True
    total = torch.stack([row.cpu().double() for row in rows]).sum()
    grads = torch.autograd.grad(total, traced, retain_graph=True, allow_unused=True)
    rest = [grad.narrow(dim, 1, N - 1) for grad in grads if grad is not None]
    return not any(bool(grad.nan_to_num(0.0, 0.0, 0.0).any()) for grad in rest)  # NaN is reported later
