"""Batches of examples: how a model is run on one, its loss, and a bar for what takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..errors import ArgumentError
from .transformer import Transformer

if TYPE_CHECKING:
    from rich.progress import Progress


Loss = Callable[[nn.Module, Any], Tensor]  # loss_fn(model, batch) -> one number

IGNORED = -100  # the label of positions that do not count


def as_batches(batches: object) -> Iterator[object]:
    """Yield batches one by one; a mapping or a tensor is a single batch."""
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
        raise ArgumentError("batches must not be empty: got 0; use a list, not an exhausted iterator")


def run(model: nn.Module, batch: object) -> object:
    """Call the model with a batch: a mapping of its arguments, a tuple of them, or the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def own_loss(model: nn.Module, batch: object) -> Tensor:
    """Return `token_loss` of a `Transformer`, or the loss that a Hugging Face model computes itself.

    Without labels a causal language model of Hugging Face predicts its own input.
    """
    if isinstance(model, Transformer):
        return token_loss(model, batch)
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise ArgumentError(
            f"batches must be mappings if loss_fn is None: got {type(batch).__name__}; "
            "give loss_fn(model, batch)"
        )
    batch = dict(batch)
    if "labels" not in batch:
        is_causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if "input_ids" not in batch or not is_causal:
            raise ArgumentError(
                f"batches must contain labels for {type(model).__name__}: got "
                f"{', '.join(map(str, batch)) or 'nothing'}; add labels, or give loss_fn(model, batch)"
            )
        labels, real = batch["input_ids"], batch.get("attention_mask")
        batch["labels"] = labels if real is None else labels.masked_fill(real == 0, IGNORED)
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise ArgumentError(
            f"model must return a loss: {type(model).__name__} returned none; give loss_fn(model, batch)"
        )
    return loss


def token_loss(model: Transformer, batch: Any) -> Tensor:
    """Return the mean cross-entropy of next tokens, without padding.

    A decoder predicts ids[:, 1:]. An encoder-decoder, given ids, predicts target_ids[:, 1:], the first of
    which is where it starts.

    Args:
        batch: ids int [B, T], or of an encoder-decoder (ids, target_ids); or a mapping of the model's
            arguments, where `lengths` and `target_lengths` say what is padding. In a mapping there may be
            `labels`, too, of the shape of the predicted tokens: -100 where it does not count.

    Raises:
        ArgumentError: an encoder, which predicts nothing; a batch without ids; a mask without labels,
            since it may hide more than padding.

    Example:
        >>> from headwise.models import TransformerConfig
        >>> model = Transformer(TransformerConfig(vocab_size=61, d_model=32, num_heads=4, num_layers=1))
        >>> ids = torch.randint(61, (3, 7))
        >>> 3.5 < token_loss(model, {"ids": ids, "lengths": [7, 5, 2]}).item() < 4.7  # log(61) = 4.1: guesses
        True
    """
    if model.config.output is None:
        raise ArgumentError(
            f"loss_fn must be given for a model without an output: got None for kind={model.config.kind!r}; "
            "give loss_fn(model, batch)"
        )
    is_decoder = model.config.kind == "decoder"
    names = ("ids",) if is_decoder else ("ids", "target_ids")
    if not isinstance(batch, Mapping):
        batch = dict(zip(names, batch if isinstance(batch, (tuple, list)) else (batch,), strict=False))
    missing = [name for name in names if name not in batch]
    if missing or ("mask" in batch and "labels" not in batch and is_decoder):
        rule = (
            f"must contain {' and '.join(names)}" if missing else "must mark padding by lengths, not a mask"
        )
        raise ArgumentError(
            f"batches {rule}: got {', '.join(map(str, batch)) or 'nothing'}; use a mapping of the model's "
            "arguments"
        )
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch.get("labels")
    if labels is None:
        labels, lengths = batch[names[-1]], batch.get("lengths" if is_decoder else "target_lengths")
        if lengths is not None:
            lengths = torch.as_tensor(lengths, device=labels.device)
            at = torch.arange(labels.shape[1], device=labels.device)
            labels = labels.masked_fill(at >= lengths[:, None], IGNORED)
    logits = model(**arguments)[:, :-1].flatten(0, 1)  # [B * (T - 1), V]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(wide), labels[:, 1:].flatten(), ignore_index=IGNORED)


def checked_loss(loss_fn: Loss | None, model: nn.Module, batch: object) -> Tensor:
    """Return the loss of a batch as a tensor without dimensions."""
    loss = own_loss(model, batch) if loss_fn is None else _call(loss_fn, model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ArgumentError(f"loss_fn must return one number as a tensor: got {shown}; use its mean")
    return loss.reshape(())


def _call(loss_fn: Loss, model: nn.Module, batch: object) -> Tensor:
    function = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    if getattr(function, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(function, "__name__", type(function).__name__)
        raise ArgumentError(
            f"loss_fn must take the model and a batch: got torch's {name}, which takes an output and a "
            "target; use lambda model, batch: loss(model(batch[0]), batch[1])"
        )
    try:
        return loss_fn(model, batch)
    except (AttributeError, TypeError) as error:
        kinds = f"{type(model).__name__} and {type(batch).__name__}"
        error.add_note(f"loss_fn is called with the model and a batch, loss_fn(model, batch): here {kinds}")
        raise


AFTER = 2.0  # seconds: shorter loops show no bar
LINES = 60.0  # seconds from one line to the next, where there can be no bar

Item = TypeVar("Item")


def tracked(
    items: Iterable[Item], words: str, wanted: bool = True, total: int | None = None
) -> Iterator[Item]:
    """Yield the items, with a bar on stderr once it is clear that all of them will take over two seconds.

    Only where somebody watches: nothing is written to a file or a pipe, or without rich.

    Args:
        words: what is being done.
        wanted: False: no bar.
        total: how many there are, if len() is unknown.

    Example:
        >>> list(tracked([1, 2], "counting"))
        [1, 2]
    """
    total = len(items) if total is None and isinstance(items, Sized) else total
    with Report(words, 0, total, wanted) as report:
        for done, item in enumerate(items):
            if done:
                report.tell(done)
            yield item


class Report:
    """Shows how far a task is: a bar on a terminal, with rich; else, of a loss, a line a minute on stderr."""

    def __init__(self, words: str, before: int, total: int | None, wanted: bool = True) -> None:
        self.words, self.before, self.total, self.wanted = words, before, total, wanted
        self.bar: Progress | None = None
        self.is_slow = False
        self.started = self.reported = monotonic()

    def tell(self, done: int, loss: float | None = None) -> None:
        """Report that so many steps are done."""
        if not self.wanted:
            return
        now = monotonic()
        if not self.is_slow:
            seconds, steps = now - self.started, done - self.before
            expected = 0.0 if self.total is None else seconds / steps * (self.total - self.before)
            self.is_slow = max(seconds, expected) > AFTER
            if not self.is_slow:
                return
            self.bar = _start_bar(self.words, self.total)
        if self.bar is not None:
            words = self.words if loss is None else f"{self.words}, loss {loss:.4g}"
            self.bar.update(self.bar.task_ids[0], completed=done, description=words)
        elif loss is not None and now - self.reported > LINES:
            self.reported, rate = now, (done - self.before) / (now - self.started)
            of = "" if self.total is None else f" of {self.total}"
            sys.stderr.write(f"{self.words}: step {done}{of}, loss {loss:.4g}, {rate:.3g} steps/s\n")

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _start_bar(words: str, total: int | None) -> Progress | None:
    """Return a bar that has begun; None without a terminal or without rich."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        return None
    bar = Progress(console=Console(stderr=True), transient=True)
    bar.add_task(words, total=total)
    bar.start()
    return bar
