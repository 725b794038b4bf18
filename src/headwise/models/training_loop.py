"""`fit`: a plain training loop that goes on where it was killed.

The loop is in `fit`, to be read and copied. Below it: the checks, the checkpoint, the order of the batches,
and clipping.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from threading import Event, current_thread, main_thread
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, nearest
from ..whole_files import place_for, whole_file
from .batches import Loss, Report, as_batches, checked_loss

FORMAT = "headwise-fit-2"
SCHEDULES = ("constant", "linear", "cosine")
Schedule = Callable[[int], float]


@dataclass
class History:
    """The loss of every step of a training, including steps before it was resumed."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0  # inside fit, all its runs together
    stopped: bool = False  # True if a callback stopped the training early

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.losses)

    @property
    def steps_per_second(self) -> float:
        """The number of steps per second."""
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
    """Data of one training step; callbacks get it as their argument."""

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

    The model can be any module, on any device; batches are moved to its device. It is in training mode during
    the call. Afterwards it is in its earlier mode, and its gradients are removed.

    With `checkpoint`, the training is saved every `every` steps and at its end. If the same script runs
    again, for example after it was killed, the training continues from the file; on a CPU the losses are then
    exactly those of a run without a stop. For this, batches must come in the same order again. This is true
    of a list and of a DataLoader, shuffled or not; a function of the epoch should draw its random numbers
    from torch, or depend on the epoch's number only. The first batch of the epoch is compared, and a
    different one is refused. Random states of Python and NumPy are not saved. Ctrl-C finishes the step,
    saves, and raises KeyboardInterrupt; a second Ctrl-C stops at once.

    Args:
        model: any module.
        batches: an iterable that is read once per epoch, or a function that returns an iterable for an
            epoch's number; a single tensor or mapping is one batch.
        loss_fn: loss_fn(model, batch) returns a number. Without it, the loss of a `Transformer` is that of
            the next token, see `token_loss`; other models are called with the batch as arguments and must
            return an output with a `loss`.
        steps: the number of steps, over as many epochs as necessary; or
        epochs: the number of epochs. Default, without steps: 1.
        optimizer: an optimizer of the model's parameters. Default AdamW.
        lr: the learning rate of the default optimizer, by default 0.001. If you pass an optimizer, set its
            learning rate in the optimizer itself.
        warmup: steps over which lr rises from 0.
        schedule: "constant", or "linear" or "cosine" (lr falls to 0 at the last step, whose number must be
            known); or a function that returns a factor of lr for a step, counted from 0.
        clip: the largest norm of all gradients together; None: gradients are not clipped.
        autocast: torch.bfloat16 computes the loss under torch.autocast with this dtype.
        callbacks: functions of a `TrainingStep`, called after each step; if one returns True, the training
            ends. If a callback has a method `step()` that returns a context manager, such as
            `headwise.Monitor`, forward and backward run inside it.
        checkpoint: a file.
        every: the number of steps between checkpoints.
        resume: continue from the checkpoint, if the file exists; False starts again and overwrites it.
        seed: the seed of torch's random numbers in this training; the state before is restored afterwards.
            None: the current state is used.
        progress: show a bar in a terminal (needs rich), otherwise print a line per minute; nothing in the
            first two seconds.

    Returns:
        The loss of every step.

    Raises:
        ArgumentError: no batches, or batches in another order than before the checkpoint; no loss; a loss
            that is not finite (the message names the step, and the weights are those before it); an optimizer
            of other parameters; a checkpoint of another model, optimizer or setting.

    Example:
        >>> model, batch = nn.Linear(3, 1), torch.randn(7, 3)
        >>> history = fit(model, batch, lambda model, x: model(x).square().mean(), steps=20)
        >>> history.steps, history.losses[-1] < history.losses[0]
        (20, True)
    """
    _check_options(clip, autocast, steps=steps, epochs=epochs, every=every, warmup=warmup or None)
    epochs = 1 if steps is None and epochs is None else epochs
    total = steps if epochs is None else _count_steps(batches, epochs)
    optimizer = _checked_optimizer(model, optimizer, lr)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    share = _share_of_lr(schedule, warmup, total)
    blocks = [callback for callback in callbacks if hasattr(callback, "step")]
    functions = [callback for callback in callbacks if not hasattr(callback, "step")]
    file = None if checkpoint is None else _checkpoint_file(checkpoint, model)
    settings = {
        "optimizer": type(optimizer).__name__,
        "lr": [float(rate) for rate in rates],
        "clip": clip,
        "warmup": warmup,
        "schedule": getattr(schedule, "__qualname__", str(schedule)),
        "schedule's end": total if schedule in ("linear", "cosine") else None,
        "autocast": str(autocast),
        "seed": seed,
        **({} if file is None else _describe(model, optimizer)),
    }
    history, position, started = History(), Position(), perf_counter()
    device, seeded, in_data = parameters[0].device, _torch_generators(model), _data_generators(batches)
    # CUDA's come last, since a checkpoint may have more or fewer
    generators = [seeded[0], *in_data, *seeded[1:]]

    def save() -> None:
        if file is not None:
            position.now = _states(generators)
            content = {
                "format": FORMAT,
                "settings": settings,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "history": asdict(history) | {"seconds": history.seconds + perf_counter() - started},
                "position": asdict(position),
            }
            _write(file, content)

    with _training_mode(model, optimizer, seeded, seed):
        if file is not None and resume and file.exists():
            saved = _read(file, settings)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            history, position = History(**saved["history"]), Position(**saved["position"])
            for block in blocks:
                if hasattr(block, "number"):
                    block.number = history.steps  # a monitor's next step

        before = history.steps
        left = 0 if history.stopped else None if steps is None else max(0, steps - before)
        remaining = islice(_remaining(batches, epochs, position, generators), left)
        interrupts = nullcontext(Event()) if file is None else _interrupts()
        with Report("training", before, total, progress) as report, interrupts as interrupted:
            for batch in remaining:
                step = history.steps
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * share(step)

                model.zero_grad()  # the optimizer may have only some of the parameters
                with ExitStack() as around:
                    for block in blocks:
                        around.enter_context(block.step())
                    if autocast is not None:
                        around.enter_context(torch.autocast(device.type, autocast))
                    loss = checked_loss(loss_fn, model, _moved(batch, device))
                    loss.backward()
                norm = None if clip is None else clip_grad_norm_(parameters, clip).item()
                _check_finite(loss.item(), norm, step)
                optimizer.step()

                history.losses.append(loss.item())
                finished_step = TrainingStep(
                    step, position.epoch, loss.item(), norm, model, optimizer, history
                )
                for function in functions:
                    history.stopped |= function(finished_step) is True
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


# Checks


def _check_options(clip: float | None, autocast: torch.dtype | None, **counts: int | None) -> None:
    if clip is not None and not clip > 0:
        raise ArgumentError(f"clip must be above 0: got {clip!r}; use None for no clipping")
    if autocast not in (None, torch.bfloat16):
        raise ArgumentError(
            f"autocast must be torch.bfloat16: got {autocast}; for float16 write a loop of your own, "
            "with scaled losses"
        )
    if counts["steps"] is not None and counts["epochs"] is not None:
        raise ArgumentError(
            f"steps must not be given with epochs: got {counts['steps']} and {counts['epochs']}; give only "
            "steps to go through the batches as often as needed"
        )
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ArgumentError(f"{name} must be a whole number, at least 1: got {count!r}; try 1000")


def _count_steps(batches: object, epochs: int) -> int | None:
    """Return the number of steps of so many epochs; None if the batches have no length."""
    if isinstance(batches, (Mapping, Tensor)):  # a single batch
        return epochs
    return epochs * len(batches) if isinstance(batches, Sized) else None


def _checked_optimizer(model: nn.Module, optimizer: Optimizer | None, lr: float | None) -> Optimizer:
    if optimizer is None:
        wanted = [each for each in model.parameters() if each.requires_grad]
        if not wanted:
            raise ArgumentError(
                f"model must have parameters to train: {type(model).__name__} has 0 of "
                f"{len(list(model.parameters()))} that require gradients; call model.requires_grad_()"
            )
        return torch.optim.AdamW(wanted, lr=1e-3 if lr is None else lr)
    if lr is not None:
        raise ArgumentError(f"lr must not be given with an optimizer: got {lr!r}; set lr in the optimizer")
    own = {id(each) for each in model.parameters()}
    others = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
    if others:
        raise ArgumentError(
            f"optimizer must have only parameters of the model: {len(others)} of its parameters, the first "
            f"{list(others[0].shape)}, are not in {type(model).__name__}; create it after changing the model"
        )
    return optimizer


def _share_of_lr(schedule: str | Schedule, warmup: int, total: int | None) -> Schedule:
    """Return a function of the step that gives the share of lr."""
    if not callable(schedule) and schedule not in SCHEDULES:
        raise ArgumentError(f"schedule must be known: got {schedule!r}; {nearest(str(schedule), SCHEDULES)}")
    if not callable(schedule) and schedule != "constant" and total is None:
        raise ArgumentError(
            f"steps must be given for batches without a length: got schedule={schedule!r}; give steps"
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


def _check_finite(loss: float, norm: float | None, step: int) -> None:
    if not math.isfinite(loss) or not math.isfinite(norm or 0.0):
        loss_text = (
            f"loss is {loss:g}" if norm is None else f"loss is {loss:g} and its gradient's norm {norm:g}"
        )
        raise ArgumentError(
            f"loss_fn must return a finite loss with finite gradients: at step {step} the {loss_text}; lower "
            "lr, warm up, or look for NaN in the batch. The weights are those before this step"
        )


@contextmanager
def _training_mode(
    model: nn.Module, optimizer: Optimizer, generators: Sequence[torch.Generator], seed: int | None
) -> Iterator[None]:
    """Set training mode, gradients and the seed inside the context; restore them at the end."""
    modes = [(module, module.training) for module in model.modules()]
    rates, states = [group["lr"] for group in optimizer.param_groups], _states(generators)
    try:
        model.train()
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        model.zero_grad()
        if seed is not None:
            _set_states(generators, states)


@contextmanager
def _interrupts() -> Iterator[Event]:
    """Give an event that Ctrl-C sets instead of raising, so that the step can end.

    A second Ctrl-C raises. Nothing is done in other threads, or where Ctrl-C has a handler already.
    """
    event, default = Event(), signal.default_int_handler
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield event
        return

    def handle(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, default)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, default)


# The checkpoint


def _checkpoint_file(checkpoint: str | os.PathLike[str], model: nn.Module) -> Path:
    file = Path(checkpoint).expanduser()
    file = place_for(file, (file.suffix.lower(),), "any name", "training.pt", "checkpoint")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise ArgumentError(
                f"checkpoint must be None for a sharded model: got {str(file)!r}, but {name} is a DTensor; "
                "save with torch.distributed.checkpoint in a callback"
            )
    return file


def _describe(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the shapes of the model's weights, and what the optimizer was made with."""
    described: dict[str, Any] = {}
    for name, weight in model.state_dict().items():
        kind = f"{list(weight.shape)} {weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
        described[f"the model's {name}"] = kind
    groups = optimizer.state_dict()["param_groups"]
    described["the number of the optimizer's parameters"] = [len(group["params"]) for group in groups]
    for name in sorted({name for group in groups for name in group} - {"lr", "params"}):
        described[f"the optimizer's {name}"] = [group.get(name) for group in groups]
    return described


def _write(file: Path, content: dict[str, Any]) -> None:
    with whole_file(file, "checkpoint") as half, open(half, "wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())  # write the content before the file gets its name
    for left in file.parent.glob(f".{file.name}.*.part"):  # left by a process that was killed while writing
        left.unlink(missing_ok=True)


def _read(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what was written, if it is of a training with these settings."""
    advice = "use another name, or resume=False to overwrite it"
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # from pickle, zip or torch
        raise ArgumentError(
            f"checkpoint must be a file that fit wrote: {str(file)!r} cannot be read "
            f"({type(error).__name__}); {advice}"
        ) from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ArgumentError(
            f"checkpoint must be a file that fit wrote: {str(file)!r} holds something else; {advice}"
        )
    for name in (*settings, *saved["settings"]):
        current, stored = (each.get(name, "absent") for each in (settings, saved["settings"]))
        if current != stored:
            raise ArgumentError(
                f"checkpoint must have the same settings: {name} is {current} here and {stored} in "
                f"{str(file)!r}; use the same settings, another name, or resume=False to overwrite it"
            )
    return saved


# The order of the batches


@dataclass
class Position:
    """How far a training has come in its data, and the states of the random numbers that lead there."""

    epoch: int = 0
    batch: int = 0  # batches of the epoch that were taken
    first: str = ""  # a hash of the epoch's first batch
    start: list[Tensor] = field(default_factory=list)  # states of all generators when the epoch began
    now: list[Tensor] = field(default_factory=list)  # and after the last batch that was taken


def _remaining(
    batches: Any, epochs: int | None, position: Position, generators: Sequence[torch.Generator]
) -> Iterator[Any]:
    """Yield the batches from a position on, epoch by epoch, and keep the position up to date.

    An epoch that was begun is replayed: random numbers are set to those at its start, so that a shuffled
    DataLoader draws the same order, and the batches that were taken are skipped.
    """
    consumed = position.batch
    _set_states(generators, position.now)
    while epochs is None or position.epoch < epochs:
        if consumed:
            _set_states(generators, position.start)
        position.start, position.batch = _states(generators), 0
        of_epoch = batches if isinstance(batches, Iterable) else batches(position.epoch)
        for batch in as_batches(of_epoch):
            position.batch += 1
            if position.batch == 1:
                first = _hash(batch)
                if consumed and first != position.first:
                    raise _another_order(f"the first batch of epoch {position.epoch} differs")
                position.first = first
            if position.batch > consumed:
                yield batch
            elif position.batch == consumed:
                _set_states(generators, position.now)
        if position.batch < consumed:
            raise _another_order(
                f"epoch {position.epoch} now has {position.batch} batches, fewer than the {consumed} done"
            )
        consumed = position.batch = 0
        position.epoch += 1


def _another_order(evidence: str) -> ArgumentError:
    return ArgumentError(
        f"batches must be the same as before the checkpoint: {evidence}; shuffle with torch's "
        "random numbers or by the epoch's number, or use resume=False to start again"
    )


def _torch_generators(model: nn.Module) -> list[torch.Generator]:
    """Return torch's generator of the CPU, and those of the CUDA devices that the model is on."""
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(devices))]


def _data_generators(batches: object) -> list[torch.Generator]:
    """Return the generators that a DataLoader, its sampler or its data set draws from, if they have any."""
    owners = [batches, *(getattr(batches, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in generators if isinstance(each, torch.Generator)}.values())


def _states(generators: Iterable[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]


def _set_states(generators: Iterable[torch.Generator], states: Iterable[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


def _moved(batch: Any, device: torch.device) -> Any:
    """Move a batch to a device: its tensors, and all else in it that has a method `to`."""
    return pytree.tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, batch)


def _hash(batch: object) -> str:
    """Return a hash of all tensors, numbers and words in a batch."""
    file = io.BytesIO()
    for part in pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(part, Tensor):
            torch.save(part.detach().cpu().clone(), file)  # a copy: of a view, all that is behind it is saved
        elif isinstance(part, (int, float, str)):
            file.write(repr(part).encode())
    return hashlib.sha256(file.getvalue()).hexdigest()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their total norm is at most max_norm, as torch's function does.

    Args:
        parameters: parameters with gradients; plain tensors and DTensors of any mesh may be mixed.
        max_norm: the largest total norm.
        norm_type: p of the p-norm; inf: the largest absolute value.
        error_if_nonfinite: raise if the total norm is not finite.

    Returns:
        The total norm before scaling, a plain tensor, the same on every rank.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    alike: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alike.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms: list[Any] = [
        get_total_norm([p.grad for p in some if p.grad is not None], norm_type, error_if_nonfinite)
        for some in alike.values()
    ]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total: Tensor = norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type, error_if_nonfinite)
    for some in alike.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total
