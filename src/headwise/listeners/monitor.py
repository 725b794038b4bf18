"""`Monitor`: statistics of the heads of a model in training, measured every so many steps.

    step    0  measured: attach, sum over all calls on the model's device, read once, detach
    step    1  nothing is attached
    ...
    step  100  measured

What is measured, and who first reported the fault:

    entropy     falls to 0 as attention collapses onto one key  Zhai 2023
    max_logit   grows without bound before a loss diverges      Dehghani 2023; Wortsman 2023
    first       rises as a head becomes an attention sink       Xiao 2024
    output      falls to 0 as a head dies: hardly any output    Sandoval-Segura 2025

`measured_step.py` measures a step and raises alarms. `trainer_callback` is a monitor in the training loop of
Hugging Face Transformers.
"""

from __future__ import annotations

import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import nn

from ..engines.statistics import ROW_STATISTICS
from ..errors import ArgumentError, nearest, needed
from ..heads.layer_names import Layer
from .adapters import attach
from .chosen_heads import check_any
from .measured_step import (
    ENTROPY_SHARE,
    Alarm,
    Alarms,
    AlarmState,
    Measuring,
    OnAlarm,
    Reading,
    Row,
    Step,
    Values,
    divide_by_layer_mean,
    largest_norms,
    layer_medians,
    logged_numbers,
    warn_of,
)

if TYPE_CHECKING:
    import pandas

HISTORY = 1000  # measured steps that are stored
PATIENCE = 3  # consecutive due steps in which the model may not run, before a warning


class Monitor:
    """Entropy, largest logit, first-key mass and dead heads of a model in training, every `every` steps.

        monitor = hw.Monitor(model, every=100)
        for batch in data:
            with monitor.step():
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            if monitor.measured:
                log(monitor.latest)

    Step 0 is measured, and then one step in `every`. In all other steps nothing is attached to the model, and
    they take no longer than without a monitor. In a measured step attention runs on headwise's engines: loss
    and gradients are the same up to rounding, dropout may draw other numbers, and statistics (except
    `output`) are those before dropout. A compiled model runs a measured step uncompiled. Several forwards in
    a step, as in gradient accumulation, count together: means are over all their queries, padding left out.
    With activation checkpointing, backward runs the forward again. This second run is not counted. Keep
    backward inside the block; otherwise torch may raise because the second run differs from the first.
    Numbers stay on the model's device until the block ends, and are then read in one transfer. In distributed
    training every rank has a monitor, which measures that rank's part of the batch; `nn.DataParallel` is not
    supported.

    A head is dead when the mean norm of its output, before W_O, is at most `dead` times the mean of this norm
    over the heads of its layer. Sandoval-Segura 2025 calls this the layer-normalised average head output
    norm; it finds removable heads that attention weights do not show. The default threshold, a hundredth, is
    stricter than the paper's. A head that attends to a first key whose value is almost 0 is dead. A head that
    attends to a first key with a large value is not dead, and has a large `first`. If the outputs of all
    heads of a layer are 0, all are dead; if all shrink by the same factor, none is.

    With `alarms`, numbers past a threshold raise an alarm: see `headwise.Alarms`. For each alarm there is a
    warning (`headwise.errors.HeadsAlarm`; `warnings.simplefilter("error", HeadsAlarm)` makes it stop the
    training) and a call of `on_alarm`, and it is added to `raised`. This happens at the end of the block of a
    measured step; an exception from `on_alarm` is raised there, too.

    Args:
        model: the model to monitor, with all its submodules.
        every: the number of steps from one measured step to the next.
        statistics: names of row statistics of `headwise.AttentionMap.statistics`.
        dead: the share of its layer's mean output norm up to which a head is dead; None: not measured.
        alarms: thresholds of alarms; the statistics that they need are measured, too. None: no alarms, unless
            `on_alarm` is given; then the default thresholds apply to everything that is measured.
        on_alarm: a function that is called with each alarm. An alarm has `step`, `layer`, `head` (None if the
            alarm is about more than half of a layer's heads), `kind`, `value` and `threshold`; `str(alarm)`
            is a sentence.
        fallback: for layers that compute their own weights: None raises, "eager" reads these weights (without
            `max_logit`, `output` and dead heads), "skip" leaves these layers out.

    Attributes:
        number: the number of the next step, from 0. Set it when you resume a training.
        measured: whether the last step was measured.
        latest: the numbers of the last measured step, by name: "heads/<layer>/<head>/<statistic>" for every
            head; "layers/<layer>/dead", how many heads of the layer are dead; and over all heads
            "entropy/min", "entropy/mean", "max_logit/max", "output/min", "<statistic>/mean" for other
            statistics, and "dead". A head's `output` is its mean output norm divided by the mean of its
            layer. <layer> is the number of a layer in the model, or its path if there are several stacks. A
            layer that runs several times in a forward also has numbers for each run, under "<path>#1",
            "<path>#2"; "dead" counts a head that is dead in all runs. If entropy alarms are on, there is
            also "entropy_share", the entropy as a share of the largest possible: for every head; for every
            layer, the median over its heads (of an even number of heads, the upper of the two middle ones);
            and "entropy_share/mean". If any
            alarm is on, "alarms" is the number of numbers that are past their threshold.

    Raises:
        ArgumentError: not a module; `every` below 1; an unknown statistic or fallback; `dead` not in [0, 1);
            `alarms` or `on_alarm` of another kind; alarms of dead heads where none are measured.

    Example:
        >>> import torch
        >>> from headwise.nn import MultiHeadAttention
        >>> model = MultiHeadAttention(8, 2)
        >>> monitor = Monitor(model, every=100)
        >>> for _ in range(3):
        ...     with monitor.step():
        ...         loss = model(torch.randn(1, 5, 8))[0].square().mean()
        ...         loss.backward()
        >>> sorted(monitor.summary), [step for step, _ in monitor.history]
        (['dead', 'entropy/mean', 'entropy/min', 'first/mean', 'max_logit/max', 'output/min'], [0])

    Sandoval-Segura 2025 (arXiv 2504.03889); Zhai 2023; Dehghani 2023; Wortsman 2023, section 3.1; Xiao 2024.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        statistics: Iterable[str] | str = ("entropy", "max_logit", "first"),
        dead: float | None = 0.01,
        alarms: Alarms | None = None,
        on_alarm: OnAlarm | None = None,
        fallback: str | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError(
                f"every must be a whole number of steps, at least 1: got {every!r}; 100 costs next to nothing"
            )
        self.statistics = (statistics,) if isinstance(statistics, str) else tuple(dict.fromkeys(statistics))
        for name in self.statistics:
            if name not in ROW_STATISTICS:
                raise ArgumentError(
                    f"statistics must be row statistics: got {name!r}; {nearest(str(name), ROW_STATISTICS)}"
                )
        if dead is not None and (isinstance(dead, bool) or not 0 <= dead < 1):
            raise ArgumentError(
                f"dead must be a share of the layer's mean output norm, from 0 to below 1: got {dead!r}; "
                "0.01 finds heads with almost no output, None turns this off"
            )
        if alarms is not None and not isinstance(alarms, Alarms):
            raise ArgumentError(f"alarms must be headwise.Alarms: got {alarms!r}; for example Alarms()")
        if on_alarm is not None and not callable(on_alarm):
            raise ArgumentError(
                f"on_alarm must be a function of an alarm: got {on_alarm!r}; for example print"
            )
        self.model, self.every, self.dead, self.fallback = model, every, dead, fallback
        if alarms is None and on_alarm is not None:
            alarms = Alarms(dead=dead is not None)
        self.alarms, self.on_alarm = alarms, on_alarm
        self._alarm_state = None if alarms is None else AlarmState(alarms, dead)
        if alarms is not None:
            self.statistics = tuple(dict.fromkeys((*self.statistics, *alarms.statistics)))
        self.number = 0
        self.measured = False
        self.latest: dict[str, float] = {}
        self._last: int | None = None  # the last step that was measured
        self._missed = 0  # consecutive due steps in which the model did not run
        self._warned = False
        self._dead_heads: list[tuple[Layer, int]] = []
        self._history: deque[Row] = deque(maxlen=HISTORY)
        attach(model, Measuring((), False), fallback)  # raises if the arguments are wrong

    def step(self) -> AbstractContextManager[Monitor]:
        """Return a context manager for the forward of one step, and for its backward with checkpointing.

        A step that raises, or in which the model does not run, is not measured; the next one is measured
        instead. If the model does not run in three steps in a row, there is one warning. There is also a
        warning for each step that is never entered by `with`.

        Raises:
            AttentionBypassed: in a measured step: a layer that cannot be intercepted; no attention was found.
            ArgumentError: in the first measured step: the model did not run in it.
            Exception: any exception that `on_alarm` raises.

        Example:
            >>> import torch
            >>> from headwise.nn import MultiHeadAttention
            >>> model = MultiHeadAttention(8, 2)
            >>> monitor = Monitor(model, every=2)
            >>> for _ in range(3):
            ...     with monitor.step():
            ...         output, _ = model(torch.randn(1, 5, 8))
            ...     print(monitor.measured)
            True
            False
            True
        """
        return Step(self, self._step)

    @contextmanager
    def _step(self) -> Iterator[Monitor]:
        """Measure the step if it is due."""
        self.measured = False
        number = self.number
        self.number += 1
        last = self._last
        # the first step since a multiple of `every`, or since training began again
        is_due = last is None or number <= last or number // self.every > last // self.every
        if not is_due:
            yield self
            return
        shares = self.alarms is not None and self.alarms.entropy is not None
        measuring = Measuring(self.statistics, self.dead is not None, shares)
        with attach(self.model, measuring, self.fallback) as attachment:
            before = attachment.forward.number
            yield self
            ran = attachment.forward.number - before
        if not ran:
            self._model_did_not_run()
            return
        self._missed = 0
        check_any(self.model, ran, measuring.layers, self.fallback, attachment.elsewhere)
        raised = self._record(number, measuring.read(), attachment.name_of)
        warn_of(raised, stacklevel=4)  # past Step and contextlib, where the block ends
        if self.on_alarm is not None:
            for alarm in raised:
                self.on_alarm(alarm)

    def _model_did_not_run(self) -> None:
        """Raise or warn because the model did not run in a due step."""
        if self._last is None:
            raise ArgumentError(
                f"step must run the model: {type(self.model).__name__} ran 0 times; put its forward inside "
                "`with monitor.step()`"
            )
        self._missed += 1
        if self._missed >= PATIENCE and not self._warned:
            self._warned = True
            warnings.warn(
                f"monitor must see its model run in its steps: {type(self.model).__name__} ran 0 times in "
                f"{PATIENCE} steps to be measured since step {self._last}; put its forward inside `with "
                "monitor.step()`, or create a new monitor if the model was replaced",
                stacklevel=5,  # past Step and contextlib, where the block ends
            )

    def _record(
        self, number: int, measured: dict[str, list[Values]], name_of: Callable[[str], Layer]
    ) -> list[Alarm]:
        """Store the numbers of a step; return the alarms that they raise."""
        for heads in measured.values():
            divide_by_layer_mean(heads)
        shares = {} if self.dead is None else largest_norms(measured, name_of)
        self._dead_heads = [
            head for head, share in shares.items() if self.dead is not None and share <= self.dead
        ]
        layers = {name_of(path): heads for path, heads in measured.items()}
        raised = self._update_alarms(number, layers, shares)
        active = None if self._alarm_state is None else len(self._alarm_state.active)
        numbers = logged_numbers(layers, self.statistics, self.dead, len(self._dead_heads), active)
        last_keys = self._history[-1].keys if self._history else ()
        keys = tuple(numbers)
        row = Row(number, last_keys if last_keys == keys else keys, array("d", numbers.values()))
        self._history.append(row)
        self.latest = row.written()
        self._last, self.measured = number, True
        return raised

    def _update_alarms(
        self, number: int, layers: dict[Layer, list[Values]], shares: dict[tuple[Layer, int], float]
    ) -> list[Alarm]:
        """Return the alarms that the numbers of a step raise."""
        if self._alarm_state is None:
            return []
        if self._last is not None and number <= self._last:
            self._alarm_state.active.clear()  # another training run
        medians = layer_medians(layers, ENTROPY_SHARE)
        logits = [
            (layer, head, values["max_logit"])
            for layer, heads in layers.items()
            for head, values in enumerate(heads)
            if "max_logit" in values
        ]
        readings: dict[str, list[Reading]] = {
            "entropy": [(layer, None, value) for layer, value in medians.items()],
            "max_logit": list(logits),
            "dead": [(layer, head, value) for (layer, head), value in shares.items()],
        }
        return self._alarm_state.hear(number, readings)

    @property
    def summary(self) -> dict[str, float]:
        """The numbers over all heads, of the last measured step."""
        prefixes = ("heads/", "layers/")
        return {name: value for name, value in self.latest.items() if not name.startswith(prefixes)}

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(step, numbers) for each of the last 1,000 measured steps."""
        return [(row.step, row.written()) for row in self._history]

    @property
    def dead_heads(self) -> list[tuple[Layer, int]]:
        """The heads that were dead in the last measured step, in the form that `headwise.prune` accepts.

        In a layer that runs several times in a forward, a head counts if it was dead each time.

        Example:
            >>> import torch
            >>> from headwise.nn import MultiHeadAttention
            >>> model = MultiHeadAttention(8, 4)
            >>> model.v_proj.weight.data[2:4] = 0                      # the second head's values
            >>> monitor = Monitor(model)
            >>> with monitor.step():
            ...     output, _ = model(torch.randn(1, 5, 8))
            >>> monitor.dead_heads
            [(0, 1)]
        """
        return list(self._dead_heads)

    @property
    def raised(self) -> list[Alarm]:
        """The last 1,000 alarms, the oldest first; `pandas.DataFrame(monitor.raised)` is a table of them.

        Example:
            >>> import torch
            >>> from headwise.nn import MultiHeadAttention
            >>> model = MultiHeadAttention(8, 4)
            >>> model.v_proj.weight.data[2:4] = 0                      # the second head's values
            >>> monitor = Monitor(model, on_alarm=lambda alarm: print(alarm.kind, alarm.layer, alarm.head))
            >>> with warnings.catch_warnings(action="ignore"), monitor.step():
            ...     output, _ = model(torch.randn(1, 5, 8))
            dead 0 1
            >>> str(monitor.raised[0]).split(": ")[0]
            'head 1 of layer 0 has almost no output'
        """
        return [] if self._alarm_state is None else list(self._alarm_state.raised)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with a row per head and measured step: step, layer, head and numbers.

        Raises:
            ArgumentError: nothing was measured yet.
            PackageMissing: pandas is not installed.
        """
        if not self._history:
            raise ArgumentError(
                "monitor must have measured a step: 0 were; run the model inside `with monitor.step()`"
            )
        with needed("pandas", "to_pandas needs pandas"):
            import pandas
        rows: dict[tuple[int, Layer, int], dict[str, float]] = {}
        for row in self._history:
            for (layer, head, name), value in zip(row.keys, row.values, strict=True):
                if layer is not None and head is not None:
                    rows.setdefault((row.step, layer, head), {})[name] = value
        return pandas.DataFrame(
            [{"step": step, "layer": layer, "head": head, **row} for (step, layer, head), row in rows.items()]
        )

    def __repr__(self) -> str:
        text = f"every={self.every}, {len(self._history)} steps measured"
        return f"Monitor({type(self.model).__name__}, {text})"


# In the loop of Hugging Face Transformers


class MonitorOptions(TypedDict, total=False):
    """Further arguments of `headwise.Monitor`."""

    statistics: Iterable[str] | str
    dead: float | None
    alarms: Alarms | None
    on_alarm: OnAlarm | None
    fallback: str | None


def trainer_callback(every: int | Monitor = 100, **options: Unpack[MonitorOptions]) -> Any:
    """Return a `transformers.TrainerCallback` that measures every n-th step and adds numbers to the logs.

        callback = hw.trainer_callback(every=100)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        callback.join(trainer)
        trainer.train()
        callback.monitor.to_pandas()

    A step is everything between two updates of the weights: all forwards of gradient accumulation and their
    backward passes, so activation checkpointing works, too. The numbers over all heads ("heads/entropy/min",
    "heads/dead", ...) are added to the logs once for each measured step; those of every head are in
    `callback.monitor`. Trainer calls `callbacks` after its built-in reporters, such as TensorBoard. By
    default the numbers therefore reach only `state.log_history` and the terminal. `callback.join(trainer)`
    moves this callback before the reporters. An exception in `on_alarm` ends `train()`.

    Trainer does not report exceptions to its callbacks. If an exception ends `train()` in a measured step,
    the model stays watched until `callback.close()` or the next `train()`.

    Args:
        every: the number of steps from one measured step to the next; or a `Monitor` of the trainer's model.
        options: further arguments of `headwise.Monitor`.

    Returns:
        The callback. It has the attribute `monitor` once training has begun.

    Raises:
        ArgumentError: options together with a monitor; and as `headwise.Monitor`.
        PackageMissing: transformers is not installed.

    Example:
        >>> trainer_callback(every=50, statistics="entropy")
        MonitorCallback(every=50)
    """
    if isinstance(every, Monitor) and options:
        raise ArgumentError(
            f"options must not be given with a monitor: got {', '.join(options)} and a monitor; pass them "
            "to Monitor(model, ...)"
        )
    if not isinstance(every, Monitor):
        Monitor(nn.Identity(), every, **options)  # raises if the arguments are wrong
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
            self._fresh = False  # True if there are numbers that were not logged

        def join(self, trainer: Any) -> MonitorCallback:
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
                assert model is not None, "Trainer passes the model"
                self.monitor = Monitor(model, self.every, **self.options)

        def on_step_begin(self, args: object, state: Any, control: object, **_: object) -> None:
            self.close()
            assert self.monitor is not None
            self.monitor.number = state.global_step
            self._step = self.monitor.step()
            self._step.__enter__()

        def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
            step, self._step = self._step, None
            if step is not None and self.monitor is not None:
                step.__exit__(None, None, None)
                self._fresh |= self.monitor.measured

        def on_log(
            self, args: object, state: Any, control: object, logs: dict[str, float] | None = None, **_: object
        ) -> None:
            if not self._fresh or logs is None or self.monitor is None:
                return
            self._fresh = False
            numbers = {f"heads/{name}": value for name, value in self.monitor.summary.items()}
            logs.update(numbers)
            if state.log_history:  # the trainer copied the logs before it called callbacks
                state.log_history[-1].update(numbers)

        def __repr__(self) -> str:
            return f"MonitorCallback(every={self.every})"

    return MonitorCallback
