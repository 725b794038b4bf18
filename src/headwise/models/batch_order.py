"""Batches in their order, epoch by epoch; and the same order again after an interruption.

An epoch is replayed from its beginning: random numbers as they were then, so that a shuffled DataLoader draws
the same order; then the batches that were taken are skipped, and random numbers set to what they were at the
checkpoint. The data's own generators (a DataLoader's) go on from the replay.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .batches import as_batches

__all__ = ["BatchOrder", "Position", "Random", "moved", "random_of", "whole"]

Random = dict[str, Tensor]  # states by device, "cpu" or "cuda:0"


class Position(TypedDict):
    """Where in the data a training is, and what its epoch is replayed from."""

    epoch: int
    batch: int  # how many of its batches were taken
    random: Random  # when the epoch began
    generators: list[Tensor]  # states of the data's own, when the epoch began
    first: str  # a hash of its first batch: the data must come again as it came


class BatchOrder:
    """Batches by epoch, from where a checkpoint was on; and where that is now."""

    def __init__(self, batches: Any, steps: int | None, epochs: int | None) -> None:
        whole(steps=steps, epochs=epochs)
        if steps is not None and epochs is not None:
            raise ArgumentError(
                f"steps must be given without epochs: got {steps} and {epochs}; steps go through the batches "
                "as often as they need"
            )
        self.batches, self.steps = batches, steps
        self.epochs = 1 if steps is None and epochs is None else epochs
        one = isinstance(batches, (Mapping, torch.Tensor))
        length = 1 if one else len(batches) if isinstance(batches, Sized) else None
        self.total = steps if self.epochs is None or length is None else self.epochs * length
        self.generators = generators_of(batches)
        self.devices: list[torch.device] = []
        self._taken = 0  # steps before this run
        self._saved: tuple[Position, Random] | None = None
        self._at: Position | None = None

    def go_on(self, taken: int, position: Position, random: Random) -> None:
        """Begin after so many steps: where they ended, and torch's random numbers there."""
        self._taken, self._saved = taken, (position, random)

    def position(self) -> Position:
        """Of the batch that was last given."""
        assert self._at is not None
        return self._at

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        steps, epoch = self._taken, 0
        before, random = self._saved or (None, None)
        if before is not None:
            epoch = before["epoch"]
        while (self.epochs is None or epoch < self.epochs) and (self.steps is None or steps < self.steps):
            if before is not None:
                random_of(self.devices, before["random"])
                for generator, state in zip(self.generators, before["generators"], strict=True):
                    generator.set_state(state)
            at = Position(
                epoch=epoch,
                batch=0,
                random=random_of(self.devices),
                generators=[each.get_state() for each in self.generators],
                first="",
            )
            self._at = at
            again = self.batches(epoch) if not isinstance(self.batches, Iterable) else self.batches
            for batch in as_batches(again):
                at["batch"] += 1
                at["first"] = at["first"] or hash_of(batch)
                if before is not None:
                    if at["first"] != before["first"]:
                        raise _others(f"the first of epoch {epoch} is another")
                    if at["batch"] == before["batch"]:  # all that were taken
                        random_of(self.devices, random)
                        before = None
                    continue
                yield epoch, batch
                steps += 1
                if steps == self.steps:
                    return
            if before is not None:
                raise _others(f"epoch {epoch} ends after {at['batch']} of {before['batch']} that were taken")
            epoch += 1


def _others(what: str) -> ArgumentError:
    return ArgumentError(
        f"batches must come again as they came before the checkpoint: {what}; let them draw from torch or "
        "from the epoch's number, or give resume=False to begin anew"
    )


def whole(**numbers: int | None) -> None:
    """Whole numbers from 1 on; None is none.

    Raises:
        ArgumentError: another, by its name.
    """
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ArgumentError(f"{name} must be a whole number, at least 1: got {number!r}; try 1000")


# Random numbers


def random_of(devices: Iterable[torch.device], states: Random | None = None) -> Random:
    """The states of torch's own generators: of the CPU's and of those of CUDA devices; set, where given."""
    now: Random = {"cpu": torch.get_rng_state()}
    now |= {str(each): torch.cuda.get_rng_state(each) for each in devices if each.type == "cuda"}
    if states is not None:
        torch.set_rng_state(states["cpu"])
        for name in now.keys() & states.keys() - {"cpu"}:
            torch.cuda.set_rng_state(states[name], name)
    return now


def generators_of(batches: object) -> list[torch.Generator]:
    """Those that a DataLoader, its sampler or a data set of one's own draws from, if they have any."""
    sampler = getattr(batches, "sampler", None)
    owners = [batches, sampler, getattr(batches, "batch_sampler", None), getattr(batches, "dataset", None)]
    generators = [getattr(each, "generator", None) for each in owners]
    different = {id(each): each for each in generators if isinstance(each, torch.Generator)}
    return list(different.values())


# Batches


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device: those in dicts, lists and tuples; others may have a `to`."""
    if isinstance(batch, (Tensor, nn.Module)) or hasattr(batch, "to"):
        return batch.to(device)
    if type(batch) is dict:
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [moved(each, device) for each in batch]
        named = isinstance(batch, tuple) and type(batch) is not tuple
        return type(batch)(*parts) if named else type(batch)(parts)
    return batch


def hash_of(batch: object) -> str:
    """Of all tensors, numbers and words in a batch."""
    found = hashlib.sha256()
    for each in _leaves(batch):
        if isinstance(each, Tensor):
            file = io.BytesIO()
            torch.save(each.detach().cpu().clone(), file)  # a copy: of a view, all that is behind it is saved
            found.update(file.getvalue())
        else:
            found.update(repr(each).encode())
    return found.hexdigest()


def _leaves(batch: object) -> Iterator[object]:
    if isinstance(batch, Mapping):
        batch = list(batch.items())
    if isinstance(batch, (list, tuple)):
        for each in batch:
            yield from _leaves(each)
    elif isinstance(batch, (Tensor, int, float, str, bool)):
        yield batch
