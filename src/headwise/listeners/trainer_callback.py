"""`Monitor` in the training loop of Hugging Face Transformers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, TypedDict, Unpack

from torch import nn

from ..errors import ArgumentError, needed
from .measured_step import Alarms, OnAlarm
from .monitor import Monitor

__all__ = ["trainer_callback"]

PREFIX = "heads/"  # of our numbers among those of others


class MonitorOptions(TypedDict, total=False):
    """Further arguments of `headwise.Monitor`."""

    statistics: Iterable[str] | str
    dead: float | None
    alarms: Alarms | None
    on_alarm: OnAlarm | None
    fallback: str | None


class _State(Protocol):
    """What Trainer says of a training."""

    global_step: int
    log_history: list[dict[str, float]]


class _Handler(Protocol):
    callbacks: list[object]


class _Trainer(Protocol):
    callback_handler: _Handler


def trainer_callback(every: int | Monitor = 100, **options: Unpack[MonitorOptions]) -> Any:
    """A `transformers.TrainerCallback` that measures a step in `every` and adds its numbers to the logs.

        callback = hw.trainer_callback(every=100)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        callback.join(trainer)
        trainer.train()
        callback.monitor.to_pandas()

    A step is all that lies between two updates of the weights: every forward of gradient accumulation, and
    backward, so that checkpointing works. Logs get the numbers over all heads ("heads/entropy/min",
    "heads/dead", ...), once for each measured step; those of every head are in `callback.monitor`. Trainer
    calls what it is given as `callbacks` after what reports to TensorBoard and its like: there the numbers
    reach `state.log_history` and the terminal only. `callback.join(trainer)` puts it before them. What
    `on_alarm` raises ends `train()`.

    Trainer tells nobody of an exception. After one that ended `train()` in a measured step, the model stays
    attached until `callback.close()` or the next `train()`.

    Args:
        every: how many steps from one that is measured to the next; or a `Monitor` of the trainer's model.
        options: further arguments of `headwise.Monitor`.

    Returns:
        The callback. Its `monitor` is there from the beginning of training.

    Raises:
        ArgumentError: options beside a monitor; and as `headwise.Monitor`.
        PackageMissing: transformers is not installed.

    Example:
        >>> trainer_callback(every=50, statistics="entropy")
        MonitorCallback(every=50)
    """
    if isinstance(every, Monitor) and options:
        raise ArgumentError(
            f"options must be those of the monitor itself: got {', '.join(options)} beside a monitor; give "
            "them to Monitor(model, ...)"
        )
    if not isinstance(every, Monitor):
        Monitor(nn.Identity(), every, **options)  # says at once what is wrong with these
    return _callback_class()(every, options)


@cache
def _callback_class() -> type[Any]:
    with needed("transformers", "trainer_callback needs transformers", "pip install transformers accelerate"):
        from transformers import TrainerCallback

    class MonitorCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Made by `headwise.trainer_callback`, which describes it."""

        def __init__(self, every: int | Monitor, options: MonitorOptions) -> None:
            self.monitor = every if isinstance(every, Monitor) else None
            self.every: int = self.monitor.every if self.monitor else every  # type: ignore[assignment]
            self.options = options
            self._step: AbstractContextManager[Monitor] | None = None
            self._fresh = False  # whether there are numbers that no log has had

        def join(self, trainer: _Trainer) -> MonitorCallback:
            """Take the first place among a trainer's callbacks; it may be among them already."""
            callbacks = trainer.callback_handler.callbacks
            if self in callbacks:
                callbacks.remove(self)
            callbacks.insert(0, self)
            return self

        def close(self) -> None:
            """End a step that an exception left open: the model is as it was."""
            step, self._step = self._step, None
            if step is not None:
                step.__exit__(RuntimeError, RuntimeError("the step was left"), None)

        def on_train_begin(
            self, args: object, state: object, control: object, model: nn.Module | None = None, **_: object
        ) -> None:
            self.close()
            if self.monitor is None:
                assert model is not None, "Trainer says which"
                self.monitor = Monitor(model, self.every, **self.options)

        def on_step_begin(self, args: object, state: _State, control: object, **_: object) -> None:
            self.close()
            assert self.monitor is not None
            self.monitor.number = state.global_step
            self._step = self.monitor.step()
            self._step.__enter__()

        def on_step_end(self, args: object, state: _State, control: object, **_: object) -> None:
            step, self._step = self._step, None
            if step is not None and self.monitor is not None:
                step.__exit__(None, None, None)
                self._fresh |= self.monitor.measured

        def on_log(
            self,
            args: object,
            state: _State,
            control: object,
            logs: dict[str, float] | None = None,
            **_: object,
        ) -> None:
            if not self._fresh or logs is None or self.monitor is None:
                return
            self._fresh = False
            numbers = {f"{PREFIX}{name}": value for name, value in self.monitor.summary.items()}
            logs.update(numbers)
            if state.log_history:  # which got its copy of the logs before anybody was told
                state.log_history[-1].update(numbers)

        def __repr__(self) -> str:
            return f"MonitorCallback(every={self.every})"

    return MonitorCallback
