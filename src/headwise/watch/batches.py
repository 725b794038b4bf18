"""Batches, and the loss of a model on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError

__all__ = ["Loss", "as_batches", "checked_loss", "own_loss", "run"]

Loss = Callable[[nn.Module, Any], Tensor]  # loss_fn(model, batch) -> one number

IGNORED = -100  # the label of positions that do not count


def as_batches(batches: Any) -> Iterator[Any]:
    """Batches one by one; a single one, as a mapping or a tensor, counts as one.

    Raises:
        ArgumentError: not iterable; none at all.
    """
    if isinstance(batches, (Mapping, Tensor)):
        batches = [batches]
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches must be an iterable of batches: got {type(batches).__name__}; use a list"
        )
    count = 0
    for count, batch in enumerate(batches, 1):  # noqa: B007, counted to the end
        yield batch
    if not count:
        raise ArgumentError("batches must hold at least one: got 0; an iterator that was used up gives none")


def run(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a mapping of its arguments, a tuple of them, or the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss a Hugging Face model computes itself; a causal language model predicts its own input.

    Raises:
        ArgumentError: no labels to compare with; no loss in the model's output.
    """
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise ArgumentError(
            f"batches must be mappings without a loss_fn: got {type(batch).__name__}; "
            "give loss_fn(model, batch)"
        )
    batch = dict(batch)
    if "labels" not in batch:
        if "input_ids" not in batch or not _is_causal_language_model(model):
            raise ArgumentError(
                f"batches must hold labels: got {', '.join(map(str, batch)) or 'nothing'} for "
                f"{type(model).__name__}; add them, or give loss_fn(model, batch)"
            )
        labels, real = batch["input_ids"], batch.get("attention_mask")
        batch["labels"] = labels if real is None else labels.masked_fill(real == 0, IGNORED)
    found = getattr(model(**batch), "loss", None)
    if found is None:
        raise ArgumentError(
            f"model must return a loss: {type(model).__name__} returned none; give loss_fn(model, batch)"
        )
    return found


def _is_causal_language_model(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def checked_loss(loss_fn: Loss | None, model: nn.Module, batch: Any) -> Tensor:
    """One number, as a tensor without dimensions.

    Raises:
        ArgumentError: it is something else.
    """
    loss = (own_loss if loss_fn is None else loss_fn)(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ArgumentError(f"loss_fn must return one number as a tensor: got {shown}; use its mean")
    return loss.reshape(())
