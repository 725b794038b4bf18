"""How many examples are in a batch: asked of the model's input, for layers may see windows or frames of them,
folded into their own batch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import ShapeError

__all__ = ["Visit", "count_examples", "entering"]


Visit = tuple[str, int, int, Tensor | None]  # a layer's path, B and T in it, its output to follow or None


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
        if (
            type(x) is not Tensor
            or x.requires_grad
            or not (x.is_floating_point() and torch.is_grad_enabled())
        ):
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
        why = (
            f"they may be {' or '.join(map(str, apart))}; use another batch size" if apart else
            f"the rows of one of {fits[0][0]} depend on others; use batches of one"
        )  # fmt: skip
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
