"""`fit`: a training loop, as plain as one writes it oneself, which goes on where it was killed.

The loop stands at the end of `fit`, to be read and copied. Around it: batches in their order
(`batch_order.py`); the file (`training_files.py`); what training changes for a while, and puts back.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ArgumentError, nearest
from .batch_order import BatchOrder, moved, random_of, whole
from .batches import Loss, Report, checked_loss
from .gradient_norms import clip_grad_norm_
from .training_files import place_of, read, write

__all__ = ["History", "TrainingStep", "fit"]

LR = 1e-3
SCHEDULES = ("constant", "linear", "cosine")
Schedule = Callable[[int], float]


@dataclass
class History:
    """What a training was: the loss of every step, those before it was resumed among them."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0  # inside fit, all its runs together
    stopped: bool = False  # by a callback, before all steps were taken

    @property
    def steps(self) -> int:
        """How many were taken."""
        return len(self.losses)

    @property
    def steps_per_second(self) -> float:
        """How fast it was."""
        return self.steps / self.seconds if self.seconds else math.nan

    def __repr__(self) -> str:
        if not self.losses:
            return "History(0 steps)"
        stopped = ", stopped" if self.stopped else ""
        return (
            f"History({self.steps} steps, loss {self.losses[0]:.4g} to {self.losses[-1]:.4g}, "
            f"{self.steps_per_second:.3g} steps/s{stopped})"
        )


class TrainingStep(NamedTuple):
    """A step that was just taken, as callbacks hear of it."""

    step: int  # from 0
    epoch: int
    loss: float
    norm: float | None  # of all gradients before they were clipped; None: not clipped
    model: nn.Module
    optimizer: Optimizer
    history: History


def fit(
    model: nn.Module,
    batches: Iterable[Any] | Callable[[int], Iterable[Any]],
    loss_fn: Loss | None = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    optimizer: Optimizer | None = None,
    lr: float | None = None,
    warmup: int = 0,
    schedule: str | Schedule = "constant",
    clip: float | None = 1.0,
    autocast: torch.dtype | None = None,
    callbacks: Sequence[Any] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 1000,
    resume: bool = True,
    seed: int | None = None,
    progress: bool = True,
) -> History:
    """Train a model on batches.

        fit(model, batches, steps=10_000, callbacks=[hw.Monitor(model)], checkpoint="training.pt")

    Any module will do, where it is: batches are moved to its device. It is in training mode meanwhile, and
    afterwards as it was, without gradients.

    With `checkpoint`, the training is saved every `every` steps and at its end; called again, as in a script
    that was killed and is run again, it goes on from there: on a CPU with the very losses it would have had.
    For that batches must come again as they came. A list does; a DataLoader does, shuffled or not; a function
    of the epoch should draw from torch, or from the epoch's number. Where they do not, it is refused: the
    first batch of the epoch is compared. Python's own random numbers and NumPy's are not saved. Ctrl-C ends
    the step, saves, and raises KeyboardInterrupt; a second one does not wait.

    Args:
        model: any module.
        batches: an iterable, gone through again each epoch, or a function of the epoch's number that gives
            one; a single tensor or mapping counts as one batch.
        loss_fn: loss_fn(model, batch) -> a number. Without it a `Transformer` predicts the next token, see
            `token_loss`; other models are called with the batch as arguments, and their output has a `loss`.
        steps: how many, over as many epochs as that takes; or
        epochs: how many times through the batches. Without either, once.
        optimizer: of the model's parameters. Default AdamW.
        lr: of that default, 0.001 unless told; an optimizer has its own.
        warmup: steps over which lr rises from 0.
        schedule: "constant", "linear" or "cosine" (to 0 at the end, which must be known), or a function of
            the step, from 0, to a share of lr.
        clip: the largest norm that all gradients together may have; None: as they are.
        autocast: run the loss in torch.bfloat16 where torch can.
        callbacks: functions of a `TrainingStep`, called after each step; one that returns True ends the
            training. An object with a `step()` that is a block, as `headwise.Monitor`, has forward and
            backward run inside it.
        checkpoint: a file.
        every: how many steps from one checkpoint to the next.
        resume: go on from the checkpoint, if there is one; False begins anew and writes over it.
        seed: of torch's random numbers in this training; afterwards they are as they were before. None: those
            of the process.
        progress: where it takes over two seconds, a bar on a terminal, with rich; else a line a minute.

    Returns:
        The loss of every step.

    Raises:
        ArgumentError: no batches, or not in the order of the checkpoint; no loss, or not a finite one, with
            its step: the weights are those before it; an optimizer of other parameters; a checkpoint of
            another model, optimizer or setting.

    Example:
        >>> model, batch = nn.Linear(3, 1), torch.randn(7, 3)
        >>> history = fit(model, batch, lambda model, x: model(x).square().mean(), steps=20)
        >>> history.steps, history.losses[-1] < history.losses[0]
        (20, True)
    """
    if clip is not None and not clip > 0:
        raise ArgumentError(f"clip must be above 0: got {clip!r}; None clips nothing")
    if autocast not in (None, torch.bfloat16):
        raise ArgumentError(
            f"autocast must be torch.bfloat16: got {autocast}; float16 needs its losses scaled, in a loop of "
            "your own"
        )
    data = BatchOrder(batches, steps, epochs)
    optimizer = _optimizer(model, optimizer, lr)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    device = parameters[0].device
    lrs = [group["lr"] for group in optimizer.param_groups]
    share = _share(schedule, warmup, data.total)
    blocks, functions = _sorted(callbacks)
    place = None if checkpoint is None else place_of(checkpoint)
    _check_one_process(model, place)
    settings = {
        "optimizer": type(optimizer).__name__,
        "lr": [float(each) for each in lrs],
        "clip": clip,
        "warmup": warmup,
        "schedule": schedule
        if isinstance(schedule, str)
        else getattr(schedule, "__qualname__", "a function"),
        "schedule's end": data.total if schedule in ("linear", "cosine") else None,
        "autocast": str(autocast),
        "seed": seed,
    }
    whole(every=every)
    history, started = History(), perf_counter()

    def save() -> None:
        if place is not None:
            seconds = history.seconds + perf_counter() - started
            told = {"losses": history.losses, "seconds": seconds, "stopped": history.stopped}
            write(place, settings, model, optimizer, told, data.position(), random_of(data.devices))

    with _surroundings(model, optimizer, seed) as data.devices:
        if place is not None and resume and place.exists():
            saved = read(place, settings, model, optimizer)
            history = History(**saved["history"])
            data.go_on(history.steps, saved["position"], saved["random"])
            for block in blocks:
                if hasattr(block, "number"):
                    block.number = history.steps  # a monitor's next step

        before = history.steps
        with Report("training", before, data.total, progress) as report, _interrupts(place) as interrupted:
            for epoch, batch in () if history.stopped else data:
                step = history.steps
                for group, base in zip(optimizer.param_groups, lrs, strict=True):
                    group["lr"] = base * share(step)

                model.zero_grad()  # the optimizer may not have all of its parameters
                with ExitStack() as around:
                    for block in blocks:
                        around.enter_context(block.step())
                    if autocast is not None:
                        around.enter_context(torch.autocast(device.type, autocast))
                    loss = checked_loss(loss_fn, model, moved(batch, device))
                    _check_gradient(loss, step)
                    loss.backward()
                norm = None if clip is None else clip_grad_norm_(parameters, clip).item()
                _check_finite(loss.item(), norm, step)
                optimizer.step()

                history.losses.append(loss.item())
                told = TrainingStep(step, epoch, loss.item(), norm, model, optimizer, history)
                answers = [_answer(function, told) for function in functions]
                history.stopped = any(answers)
                report.tell(history.steps, loss.item())
                if history.stopped or interrupted.is_set():
                    break
                if history.steps % every == 0:
                    save()
        if history.steps > before:
            save()
        history.seconds += perf_counter() - started
        if interrupted.is_set():
            raise KeyboardInterrupt
    return history


# What is asked for


def _optimizer(model: nn.Module, optimizer: Optimizer | None, lr: float | None) -> Optimizer:
    if optimizer is None:
        wanted = [each for each in model.parameters() if each.requires_grad]
        if not wanted:
            raise ArgumentError(
                f"model must have parameters to train: {type(model).__name__} has 0 of "
                f"{len(list(model.parameters()))} that require a gradient; model.requires_grad_() sets all"
            )
        return torch.optim.AdamW(wanted, lr=LR if lr is None else lr)
    if lr is not None:
        raise ArgumentError(
            f"lr must be the optimizer's own: got {lr!r} beside one; give it to the optimizer"
        )
    own = {id(each) for each in model.parameters()}
    others = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
    if others:
        raise ArgumentError(
            f"optimizer must be of the model's parameters: {len(others)} of its own, the first "
            f"{list(others[0].shape)}, are not in {type(model).__name__}; make it after changing the model"
        )
    return optimizer


def _share(schedule: str | Schedule, warmup: int, total: int | None) -> Schedule:
    """The share of lr at a step."""
    if warmup:
        whole(warmup=warmup)
    if not callable(schedule) and schedule not in SCHEDULES:
        raise ArgumentError(f"schedule must be known: got {schedule!r}; {nearest(str(schedule), SCHEDULES)}")
    if not callable(schedule) and schedule != "constant" and total is None:
        raise ArgumentError(
            f"schedule must know its end: got {schedule!r} and batches without a length; give steps"
        )

    def share(step: int) -> float:
        rising = min(1.0, (step + 1) / warmup) if warmup else 1.0
        if callable(schedule):
            return rising * schedule(step)
        if schedule == "constant" or total is None or step < warmup:
            return rising
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2

    return share


def _sorted(callbacks: Sequence[Any]) -> tuple[list[Any], list[Callable[[TrainingStep], object]]]:
    """Those whose blocks a step runs in, and those that are called after it."""
    for each in callbacks:
        if isinstance(each, (Optimizer, torch.optim.lr_scheduler.LRScheduler)) or not (
            callable(each) or hasattr(each, "step")
        ):
            raise ArgumentError(
                f"callbacks must be functions of a step, or have a block step(): got {type(each).__name__}; "
                "rates of learning go to schedule="
            )
    return [each for each in callbacks if hasattr(each, "step")], [
        each for each in callbacks if callable(each)
    ]


def _answer(function: Callable[[TrainingStep], object], told: TrainingStep) -> bool:
    answer = function(told)
    if answer is not None and not isinstance(answer, bool):
        raise ArgumentError(
            f"callbacks must return True to stop, False or None to go on: got {answer!r} at step {told.step}"
            "; return nothing"
        )
    return bool(answer)


def _check_one_process(model: nn.Module, place: object) -> None:
    over = next((name for name, x in model.named_parameters() if type(x).__name__ == "DTensor"), None)
    if place is not None and over is not None:
        raise ArgumentError(
            f"checkpoint must be of a model in one process: got {str(place)!r}, and {over} lies over "
            "several; save with torch.distributed.checkpoint in a callback"
        )


def _check_gradient(loss: torch.Tensor, step: int) -> None:
    if not loss.requires_grad:
        raise ArgumentError(
            f"loss_fn must keep the gradient: its loss {loss.item():g} at step {step} depends on no "
            "parameter; leave out detach, item and no_grad"
        )


def _check_finite(loss: float, norm: float | None, step: int) -> None:
    """Before the weights are changed."""
    if not math.isfinite(loss) or not math.isfinite(norm or 0.0):
        what = f"loss is {loss:g}" if norm is None else f"loss is {loss:g} and its gradient's norm {norm:g}"
        raise ArgumentError(
            f"loss_fn must give finite losses and gradients: at step {step} the {what}; lower lr, warm up, "
            "or look for NaN in the batch. The weights are those before this step"
        )


# What training changes for a while


@contextmanager
def _surroundings(model: nn.Module, optimizer: Optimizer, seed: int | None) -> Iterator[list[torch.device]]:
    """Training mode, gradients and a seed's random numbers; the devices that those are on."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({each.device for each in model.parameters() if each.device.type == "cuda"}, key=str)
    lrs = [group["lr"] for group in optimizer.param_groups]
    before = None if seed is None else random_of(devices)
    try:
        model.train()
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        with torch.inference_mode(False), torch.enable_grad():
            yield devices
    finally:
        for module, mode in modes:
            module.training = mode
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        model.zero_grad()
        if before is not None:
            random_of(devices, before)


@contextmanager
def _interrupts(wanted: object) -> Iterator[threading.Event]:
    """Set by Ctrl-C, so that the step it falls into can end; where Python's own handler of it is in place."""
    event, own = threading.Event(), signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if wanted is None or not is_main or signal.getsignal(signal.SIGINT) is not own:
        yield event
        return

    def hear(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, own)  # a second one does not wait

    signal.signal(signal.SIGINT, hear)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, own)
