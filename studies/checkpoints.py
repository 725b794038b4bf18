"""Checkpoints of a training measured, head by head: the file that `headwise.models.specialisation` reads.

    python -m studies.checkpoints FOLDER --out src/headwise/models/mini --device cuda

FOLDER has the checkpoints of a training, step_000100.safetensors and the like, and history.json. In OUT
lies the model itself with its tokenizer (config.json, tokenizer.json); the file is written beside them. Every
checkpoint reads the same texts: prose and code of `probe_texts.py` for the usual statistics, random tokens
said twice for induction and copies, the sentences of the grammar for roles.

Letters: C checkpoints, L layers, H heads.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.layer import MIXED
from headwise.models import Specialisation, Transformer, TransformerConfig

from .probe_texts import CODE, PROSE
from .probes import Probe, fingerprint, labels_of, probes_of, scores_on

MOST_BYTES = 1_000_000
POINTS = 200  # of the curve of the loss, at most
NAME = re.compile(r"step_(\d+)\.safetensors")
LEFT_OUT = ("induction", "duplicate_token", "special", "streaming")  # better told, or of longer texts


@dataclass(frozen=True)
class History:
    """The losses of a training: of every step, and of validation by number of steps taken."""

    losses: list[float]
    validation: dict[int, float]
    tokens_per_step: int

    @classmethod
    def read(cls, file: Path) -> History:
        """Read history.json: "losses", "validation" by step, "tokens_per_step".

        Raises:
            ArgumentError: the file does not exist or is not a history.
        """
        try:
            stored = json.loads(file.read_text("utf-8"))
            validation = {int(step): float(loss) for step, loss in stored["validation"].items()}
            return cls([float(loss) for loss in stored["losses"]], validation, int(stored["tokens_per_step"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"history must be of a training: {str(file)!r}: {type(error).__name__}: {error}; "
                "it needs losses, validation and tokens_per_step"
            ) from error

    def loss_since(self, before: int, step: int) -> float:
        """Return the mean loss of the steps between two checkpoints; NaN where there are none."""
        some = self.losses[before:step]
        return sum(some) / len(some) if some else math.nan

    def curve(self, points: int = POINTS) -> Tensor:
        """Return steps and mean losses, [N, 2], over intervals that grow with the step, as on a log axis."""
        count = len(self.losses)
        ends = sorted({round(count ** (number / points)) for number in range(points + 1)}) if count else []
        starts = [0, *ends]
        rows = [(end, self.loss_since(start, end)) for start, end in zip(starts, ends, strict=False)]
        return torch.tensor(rows).reshape(-1, 2)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by step, in order.

    Raises:
        ArgumentError: there are none.
    """
    matches = [(NAME.fullmatch(file.name), file) for file in folder.glob("*.safetensors")]
    checkpoints = {int(match[1]): file for match, file in matches if match is not None}
    if not checkpoints:
        raise ArgumentError(
            f"folder must contain checkpoints: no file such as step_000100.safetensors in {str(folder)!r}; "
            "save checkpoints in training"
        )
    return dict(sorted(checkpoints.items()))


# One checkpoint


def statistics_on(model: Transformer, tokenizer: Any) -> dict[str, Tensor]:
    """Return the usual statistics and patterns on prose and code, [L, H] each."""
    device = next(model.parameters()).device
    with torch.no_grad(), hw.watch(model, tokenizer=tokenizer, pooled=None, patterns=True) as heads:
        for text in (PROSE, CODE):
            ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : model.config.max_length]
            model(ids.to(device))
    measured_each = [layer.statistics for layer in heads.values()]
    names = [name for name in measured_each[0] if name not in LEFT_OUT]
    return {name: torch.stack([each[name] for each in measured_each]).float().cpu() for name in names}


def scores_of(model: Transformer, tokenizer: Any, probe: Probe) -> dict[str, Tensor]:
    """Return all statistics and scores of every head, [L, H] each.

    probe: random tokens said twice, on the model's device.
    """
    numbers = statistics_on(model, tokenizer)
    copied = scores_on(model, probe)
    numbers["induction_stripe"] = copied["induction_stripe"].float()
    numbers["duplicate_token"] = copied["duplicate_token"].float()
    numbers["previous_token"] = copied["previous"].float()
    return numbers


def names_of(numbers: dict[str, Tensor]) -> tuple[tuple[str | None, ...], ...]:
    """Return a label per head. Induction and copies are measured on random tokens only."""
    return tuple(
        tuple(None if label.name == MIXED else label.name for label in row) for row in labels_of(numbers)
    )


# All of them


def measured(
    folder: Path,
    config: TransformerConfig,
    tokenizer: Any,
    *,
    title: str = "mini",
    device: str = "cpu",
    roles: bool = True,
    options: dict[str, Any] | None = None,
) -> Specialisation:
    """Return the measurements of every head at every checkpoint of a folder.

    Args:
        roles: also what `headwise.roles` finds.
        options: of `probes_of`, where the model takes fewer tokens than the usual ones.

    Raises:
        ArgumentError: no checkpoints; a history that does not know them.
    """
    from safetensors.torch import load_file

    files, history = checkpoints_in(folder), History.read(folder / "history.json")
    steps = list(files)
    for step in steps:
        if step not in history.validation:
            raise ArgumentError(
                f"history must have a loss for every checkpoint: step {step} has none; finish the training"
            )
    model = Transformer(config).to(device).eval()
    random, *_ = probes_of(model, tokenizer, **(options or {}))
    probe = Probe(random.name, tuple(ids.to(device) for ids in random.batches), random.start)
    numbers: list[dict[str, Tensor]] = []
    judged: list[Any] = []
    for step, file in files.items():
        model.load_state_dict({name: value.float() for name, value in load_file(file).items()})
        numbers.append(scores_of(model, tokenizer, probe))
        judged.append(hw.roles(model, tokenizer, keep=False, progress=False) if roles else {})
        print(f"step {step}: stripe {float(numbers[-1]['induction_stripe'].max()):.2f}", flush=True)
    names = list(judged[-1])
    return Specialisation(
        steps=torch.tensor(steps),
        tokens=torch.tensor(steps) * history.tokens_per_step,
        losses=torch.tensor([history.loss_since(a, b) for a, b in zip([0, *steps], steps, strict=False)]),
        validation=torch.tensor([history.validation[step] for step in steps]),
        statistics={name: torch.stack([each[name] for each in numbers]) for name in numbers[0]},
        labels=tuple(names_of(each) for each in numbers),
        roles={name: torch.stack([each.scores[name] for each in judged]) for name in names},
        found={name: tuple(each[name].found for each in judged) for name in names},
        curve=history.curve(),
        title=title,
        fingerprint=fingerprint(model),  # of the last checkpoint
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python -m studies.checkpoints`: measure the checkpoints of a folder and store the result."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.checkpoints", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without-roles", action="store_true")
    options = parser.parse_args(arguments)
    model, tokenizer, title = hw.models.load(options.out)
    assert isinstance(model, Transformer), "a folder of Transformer.save"
    life = measured(
        options.folder,
        model.config,
        tokenizer,
        title=title,
        device=options.device,
        roles=not options.without_roles,
    )
    place = life.save(options.out)
    size = place.stat().st_size
    if size > MOST_BYTES:
        place.unlink()
        raise ArgumentError(
            f"checkpoints must fit into {MOST_BYTES:,} bytes: {size:,} for {len(life.steps)}; keep fewer"
        )
    print(life.table())
    print(f"{place.name}: {size:,} bytes")


if __name__ == "__main__":
    main()
