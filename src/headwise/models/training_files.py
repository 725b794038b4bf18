"""A training in one file: weights, optimizer, random numbers and the place in the data, such that it goes on
as if it had never been interrupted.

Files are written whole: a new one takes the place of the last when all of it is on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..whole_files import whole_file
from .batch_order import Position, Random

__all__ = ["Checkpoint", "place_of", "read", "write"]

FORMAT = "headwise-fit-1"

Settings = dict[str, Any]  # plain values that the curve of losses depends on


class Checkpoint(TypedDict):
    """What the file holds: tensors, numbers and words, which torch loads without running any code."""

    format: str
    settings: Settings
    model: dict[str, Any]
    optimizer: dict[str, Any]
    history: dict[str, Any]
    position: Position
    random: Random  # now


# Files


def place_of(checkpoint: str | os.PathLike[str]) -> Path:
    """Where a checkpoint goes.

    Raises:
        ArgumentError: no such folder, or a folder itself.
    """
    place = Path(checkpoint).expanduser().resolve()
    if not place.parent.is_dir():
        raise ArgumentError(
            f"checkpoint must go into an existing folder: there is no {str(place.parent)!r}; make it first"
        )
    if place.is_dir():
        raise ArgumentError(
            f"checkpoint must be a file: {str(checkpoint)!r} is a folder; try training.pt in it"
        )
    return place


def write(
    place: Path,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    history: dict[str, Any],
    position: Position,
    random: Random,
) -> None:
    """All of it or, where anything goes wrong, nothing: the one before stays.

    Raises:
        ArgumentError: it cannot be written.
    """
    content: Checkpoint = {
        "format": FORMAT,
        "settings": settings,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": history,
        "position": position,
        "random": random,
    }
    with whole_file(place, "checkpoint") as half, open(half, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # a name for what is not on the disk yet would be worse than no file
    for left in place.parent.glob(f".{place.name}.*.part"):  # of a process that was killed as it wrote
        left.unlink(missing_ok=True)


def read(place: Path, settings: Settings, model: nn.Module, optimizer: Optimizer) -> Checkpoint:
    """What was written, and the same model, optimizer and settings; both have its state afterwards.

    Raises:
        ArgumentError: another file; of another training.
    """
    try:
        saved: Checkpoint = torch.load(place, map_location="cpu", weights_only=True)
        known = isinstance(saved, dict) and saved.get("format") == FORMAT
    except Exception as error:  # of pickle, zip and torch, by what is wrong with the file
        raise ArgumentError(
            f"checkpoint must be a file that fit wrote: {str(place)!r} cannot be read "
            f"({type(error).__name__}); give another name, or resume=False to write over it"
        ) from error
    if not known:
        raise ArgumentError(
            f"checkpoint must be a file that fit wrote: {str(place)!r} holds something else; give another "
            "name, or resume=False to write over it"
        )
    _check_settings(saved["settings"], settings, place)
    _check_model(saved["model"], model, place)
    state = optimizer.state_dict()
    _check_groups(saved["optimizer"]["param_groups"], state["param_groups"], place)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved


def _another(what: str, here: object, there: object, place: Path) -> ArgumentError:
    return ArgumentError(
        f"checkpoint must be of the same training: {what} is {here} here and {there} in {str(place)!r}; give "
        "the same, another name, or resume=False to begin anew and write over it"
    )


def _check_settings(there: Settings, here: Settings, place: Path) -> None:
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise _another(name, here.get(name), there.get(name), place)


def _check_model(there: Mapping[str, Tensor], model: nn.Module, place: Path) -> None:
    here = model.state_dict()
    for name in (*here, *there):
        shapes = [_kind(each[name]) if name in each else "absent" for each in (here, there)]
        if shapes[0] != shapes[1]:
            raise _another(f"the model's {name}", shapes[0], shapes[1], place)


def _kind(value: object) -> str:
    """A tensor's shape and dtype; of a module's extra state, its type."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _check_groups(there: list[dict[str, Any]], here: list[dict[str, Any]], place: Path) -> None:
    """What the optimizer was made with; its lr is among the settings, as what it was before a schedule."""
    if len(there) != len(here):
        raise _another("the number of the optimizer's groups", len(here), len(there), place)
    for old, new in zip(there, here, strict=True):
        for name in sorted({*old, *new} - {"lr", "params"}):
            if old.get(name) != new.get(name):
                raise _another(f"the optimizer's {name}", new.get(name), old.get(name), place)
        if len(old["params"]) != len(new["params"]):
            raise _another(
                "the number of the optimizer's parameters", len(new["params"]), len(old["params"]), place
            )
