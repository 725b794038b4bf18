"""How heads became what they are: the built-in model's heads at checkpoints of its training.

What was measured lies in one file beside the model's weights: `specialisation()` reads it, and runs nothing.
`studies/checkpoints.py` of the repository makes it.

Letters: C checkpoints, L layers, H heads.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, nearest, needed
from ..whole_files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..heads.collection import ShownTable

FILE = "specialisation.safetensors"
FORMAT = "headwise-specialisation-1"
MINI = Path(__file__).parent / "mini"
NUMBERS = ("steps", "tokens", "losses", "validation", "curve")  # tensors without a head dimension

Labels = tuple[tuple[tuple[str | None, ...], ...], ...]


class Moment(NamedTuple):
    """When a score was first reached, and by which head."""

    step: int
    tokens: int
    layer: int
    head: int
    score: float


@dataclass(frozen=True, eq=False)
class Specialisation:
    """Every head at every checkpoint of a training; print it, or `plot()` it.

    Attributes:
        steps: [C], how many steps had been taken; 0 is before the first.
        tokens: [C], how many tokens had been read.
        losses: [C], mean training loss since the checkpoint before; NaN at step 0.
        validation: [C], validation loss, on text that is not trained on, in nats per token; NaN where it was
            not measured: of the built-in model it is known at the last checkpoint only.
        statistics: by name, [C, L, H]: those of `headwise.AttentionMap.statistics` and `headwise.heads`, on
            prose and code; `induction_stripe`, `duplicate_token` and `previous_token` on random tokens,
            repeated once.
        labels: a label per checkpoint, layer and head, one of `headwise.heads.LABELS`; None without a label.
        roles: by relation, [C, L, H]: the share of cases in which a head attends to the related word; see
            `headwise.roles`.
        found: by relation, whether the role was found at each checkpoint: a head is better than every trivial
            rule.
        curve: [N, 2], step and loss of training in finer steps, for pictures; may be empty.
        title: the name of the model.
        fingerprint: an identifier of the weights of the last checkpoint; None if unknown.
    """

    steps: Tensor
    tokens: Tensor
    losses: Tensor
    validation: Tensor
    statistics: dict[str, Tensor]
    labels: Labels
    roles: dict[str, Tensor] = field(default_factory=dict)
    found: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    curve: Tensor = field(default_factory=lambda: torch.empty(0, 2))
    title: str = "mini"
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        C, L, H = self.shape
        for name in ("steps", "tokens", "losses", "validation"):
            _check_shape(name, getattr(self, name), (C,))
        for name, value in (self.statistics | self.roles).items():
            _check_shape(name, value, (C, L, H))
        counts = {len(self.labels), *map(len, self.found.values())}
        sizes = {(len(each), len(layer)) for each in self.labels for layer in each}
        if counts != {C} or sizes != {(L, H)}:
            raise ArgumentError(
                f"labels must be one per checkpoint and head: got {sorted(counts)} checkpoints for {C}; "
                "measure them together"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """[C, L, H]"""
        if not self.statistics:
            raise ArgumentError("statistics must not be empty: got 0; measure at least one")
        C, L, H = next(iter(self.statistics.values())).shape
        return C, L, H

    def __repr__(self) -> str:
        C, L, H = self.shape
        return f"Specialisation({self.title}: {C} checkpoints, {L} x {H} heads, {len(self.roles)} roles)"

    __str__ = __repr__

    def scores(self, name: str) -> Tensor:
        """Return a statistic or a role by its name, [C, L, H].

        Raises:
            ArgumentError: neither a statistic nor a role.
        """
        measured = self.statistics | self.roles
        if name not in measured:
            raise ArgumentError(
                f"name must be a statistic or a role: got {name!r}; {nearest(name, list(measured))}"
            )
        return measured[name]

    def when(self, name: str, at_least: float) -> Moment | None:
        """Return the first checkpoint at which some head has at least this score, and the best head there.

        Args:
            name: a statistic, such as "induction_stripe", or a role, such as "pronoun > antecedent".

        Returns:
            Step, tokens, layer, head and score; None if no head reaches the score.

        Raises:
            ArgumentError: neither a statistic nor a role; a score that is no number.

        Example:
            >>> one = torch.tensor([[[0.1, 0.0]], [[0.2, 0.6]]])
            >>> numbers = torch.tensor([100, 200])
            >>> life = Specialisation(
            ...     numbers, numbers * 32, numbers / 7, numbers / 5, {"previous": one}, (((None, None),),) * 2
            ... )
            >>> life.when("previous", 0.5)[:4]
            (200, 6400, 0, 1)
        """
        if isinstance(at_least, bool) or not isinstance(at_least, int | float) or math.isnan(at_least):
            raise ArgumentError(f"at_least must be a number: got {at_least!r}; for example 0.4")
        scores = self.scores(name)
        for step, tokens, each in zip(self.steps, self.tokens, scores.nan_to_num(-math.inf), strict=True):
            if float(each.max()) >= at_least:
                layer, head = divmod(int(each.argmax()), each.shape[1])
                return Moment(int(step), int(tokens), layer, head, float(each[layer, head]))
        return None

    def best(self, name: str) -> tuple[int, int]:
        """Return (layer, head) with the largest score at the last checkpoint.

        Raises:
            ArgumentError: neither a statistic nor a role; one that was measured for no head.
        """
        last = self.scores(name)[-1].nan_to_num(-math.inf)
        if torch.isneginf(last).all():
            raise ArgumentError(f"name must be a measured score: {name!r} is NaN for all heads; use another")
        layer, head = divmod(int(last.argmax()), last.shape[1])
        return layer, head

    def of(self, layer: int, head: int) -> list[dict[str, Any]]:
        """Return one head over training: a row per checkpoint with step, tokens, label, statistics, roles.

        Raises:
            ArgumentError: no such layer or head.
        """
        _, L, H = self.shape
        for name, value, size in (("layer", layer, L), ("head", head, H)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
                raise ArgumentError(
                    f"{name} must be from 0 to {size - 1}: got {value!r}; there are {L} layers of {H} heads"
                )
        measured = self.statistics | self.roles
        return [
            {
                "step": int(self.steps[number]),
                "tokens": int(self.tokens[number]),
                "label": self.labels[number][layer][head],
                **{name: float(value[number, layer, head]) for name, value in measured.items()},
            }
            for number in range(len(self.steps))
        ]

    def table(self) -> ShownTable:
        """Return a row per checkpoint: losses, the best head of each kind, how many heads have which label.

        Raises:
            PackageMissing: rich is not installed.
        """
        from ..show.curves import specialisation_table

        return specialisation_table(self)

    def plot(self) -> Figure:
        """Draw the loss and the scores of all heads over training, as a matplotlib figure.

        Raises:
            PackageMissing: matplotlib is not installed.
        """
        from ..show.curves import specialisation_picture

        return specialisation_picture(self)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write all of it into a folder, for `specialisation(folder)` to read.

        Raises:
            ArgumentError: no such folder, or one that cannot be written to.
            PackageMissing: safetensors is not installed.
        """
        with needed("safetensors", "saving what was measured needs safetensors"):
            import numpy  # noqa: F401 - safetensors saves by it, and does not bring it
            from safetensors.torch import save
        place = Path(folder) / FILE
        if not place.parent.is_dir():
            raise ArgumentError(f"folder must exist: there is no {str(place.parent)!r}; create it")
        tensors = {name: getattr(self, name) for name in NUMBERS}
        for kind, values in (("statistics", self.statistics), ("roles", self.roles)):
            tensors |= {f"{kind}/{name}": value.float() for name, value in values.items()}
        header = {
            "format": FORMAT,
            "title": self.title,
            "fingerprint": self.fingerprint,
            "labels": self.labels,
            "found": self.found,
            "statistics": list(self.statistics),  # in their order
            "roles": list(self.roles),
        }
        with whole_file(place, "folder") as half:
            contiguous = {name: value.cpu().contiguous() for name, value in tensors.items()}
            half.write_bytes(save(contiguous, metadata={"headwise": json.dumps(header)}))
        return place


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ArgumentError(
            f"{name} must have the shape {list(shape)}: got {list(value.shape)}; "
            "measure all checkpoints together"
        )


def specialisation(folder: str | os.PathLike[str] | None = None) -> Specialisation:
    """Return measurements of the built-in model's heads at sixteen checkpoints of its training.

        life = hw.models.specialisation()
        life.when("induction_stripe", 0.4)         # the first checkpoint with an induction head, and which
        life.of(2, 5)                              # one head over training, a row per checkpoint
        life.plot()

    The model is not run: the measurements are read from a file in the package.

    Args:
        folder: the folder of another model with such a file; by default that of the built-in model.

    Raises:
        ArgumentError: no such file in the folder, or one in another format.
        PackageMissing: safetensors is not installed.
    """
    with needed("safetensors", "reading what was measured needs safetensors"):
        from safetensors import safe_open
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise ArgumentError(f"folder must be a path: got {folder!r}; leave it out for the built-in model's")
    place = Path(MINI if folder is None else folder) / FILE
    if not place.is_file():
        raise ArgumentError(
            f"folder must contain measurements of a training: there is no {str(place)!r}; "
            "create it with python -m studies.checkpoints"
        )
    try:
        with safe_open(place, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("headwise", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:
        raise ArgumentError(
            f"folder must contain a safetensors file: {str(place)!r} is not one ({error}); create it again"
        ) from error
    file_format = header.get("format") if isinstance(header, dict) else type(header).__name__
    if file_format != FORMAT:
        raise ArgumentError(
            f"folder must contain measurements of a training: {str(place)!r} is {file_format!r}, not "
            f"{FORMAT!r}; create it again with this version"
        )
    try:
        return Specialisation(
            **{name: tensors[name] for name in NUMBERS},
            statistics={name: tensors[f"statistics/{name}"] for name in header["statistics"]},
            roles={name: tensors[f"roles/{name}"] for name in header["roles"]},
            labels=tuple(tuple(tuple(layer) for layer in each) for each in header["labels"]),
            found={name: tuple(each) for name, each in header["found"].items()},
            title=header["title"],
            fingerprint=header["fingerprint"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"folder must contain all measurements: {str(place)!r} lacks {error}; create it again"
        ) from error
