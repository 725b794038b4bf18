"""A small vision transformer, trained on scikit-learn's digits in half a minute, and its heads.

    python -m studies.digits                             trains it, says how well, writes digits.html
    python -m studies.digits --out FILE --image 7        another file; another picture of the test set

Each picture is 8 × 8 grey dots, cut into 4 × 4 patches of 2 × 2; a token in front of them, [CLS], gathers
what the class is told from (Dosovitskiy 2021). The page shows every head over the picture.

Letters: N pictures, E width, P patches a side.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.models import EncoderLayer, TransformerConfig, fit

PATCHES = 4  # a side
DOTS = 2  # a side of a patch
CLASSES = 10
EPOCHS = 20
BATCH = 64
LR = 3e-3


class Digits(NamedTuple):
    """Pictures, float [N, 8, 8] from 0 to 1, and the digits they show, int [N]."""

    pictures: Tensor
    labels: Tensor


class Vision(nn.Module):
    """A vision transformer: patches as tokens, layers of headwise, a class read from [CLS].

    Args:
        d_model, num_heads, num_layers: of the layers.
    """

    def __init__(self, d_model: int = 32, num_heads: int = 4, num_layers: int = 3) -> None:
        super().__init__()
        config = TransformerConfig(
            vocab_size=1, d_model=d_model, num_heads=num_heads, num_layers=num_layers, kind="encoder",
        )  # fmt: skip
        self.patches = nn.Linear(DOTS * DOTS, d_model)
        self.first = nn.Parameter(torch.randn(d_model) * 0.3)
        self.positions = nn.Parameter(torch.randn(1 + PATCHES * PATCHES, d_model) * 0.3)
        self.layers = nn.ModuleList(EncoderLayer(config, number) for number in range(num_layers))
        self.norm, self.classes = nn.LayerNorm(d_model), nn.Linear(d_model, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits of pictures: [N, 8, 8] -> [N, 10]."""
        cut = pictures.unflatten(1, (PATCHES, DOTS)).unflatten(3, (PATCHES, DOTS))  # [N, P, 2, P, 2]
        x = self.patches(cut.transpose(2, 3).flatten(3).flatten(1, 2))  # [N, P * P, E]
        x = torch.cat([self.first.expand(len(x), 1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classes(self.norm(x[:, 0]))
        return logits


def data() -> tuple[Digits, Digits]:
    """Return 1,437 pictures for training and 360 for testing, with the same share of each digit."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    held = load_digits()
    pictures, labels = torch.from_numpy(held.images).float() / 16, torch.from_numpy(held.target).long()
    learn, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels.numpy())
    return Digits(pictures[learn], labels[learn]), Digits(pictures[test], labels[test])


def trained(learn: Digits, *, steps: int | None = None, seed: int = 0, progress: bool = True) -> Vision:
    """Return a model trained on these pictures, in eval mode.

    Args:
        steps: how many, instead of 20 times through the pictures.
    """
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = Vision()

    def batches(epoch: int) -> list[Digits]:
        order = torch.randperm(len(learn.labels), generator=draw)
        return [Digits(learn.pictures[at], learn.labels[at]) for at in order.split(BATCH)]

    total = EPOCHS * -(-len(learn.labels) // BATCH) if steps is None else steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    fit(
        model, batches, lambda m, batch: cross_entropy(m(batch[0]), batch[1]), steps=total,
        optimizer=optimizer, warmup=min(50, total // 10), schedule="cosine", seed=seed, progress=progress,
    )  # fmt: skip
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, test: Digits) -> float:
    """Return the share of pictures that are classified correctly."""
    return float((model(test.pictures).argmax(-1) == test.labels).double().mean())


@torch.no_grad()
def page(model: nn.Module, picture: Tensor, out: Path) -> Path:
    """Write a page of every head over one picture, [8, 8], and of the answer without each head."""
    with hw.watch(model, keep=True, diversity=True) as heads:
        digit = int(model(picture[None]).argmax())
    names = [
        "[CLS]",
        *(f"r{row}c{column}" for row in range(1, PATCHES + 1) for column in range(1, PATCHES + 1)),
    ]
    heads.title = f"a small vision transformer reads a {digit}"
    effects = hw.effects(model, picture[None], progress=False)
    return heads.to_html(
        out, image=picture, patches=(PATCHES, PATCHES), query_tokens=names, key_tokens=names, effects=effects
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the accuracy and write the page."""
    parser = argparse.ArgumentParser(prog="python -m studies.digits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("digits.html"), help="the page")
    parser.add_argument("--image", metavar="N", type=int, default=0, help="which picture of the test set (0)")
    parser.add_argument("--steps", metavar="N", type=int, help="steps; default: 20 epochs")
    options = parser.parse_args(arguments)
    learn, test = data()
    if not 0 <= options.image < len(test.labels):
        parser.error(f"--image must be one of {len(test.labels)} pictures, from 0: got {options.image}")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1: got {options.steps}")
    started = time.monotonic()
    model = trained(learn, steps=options.steps)
    seconds = time.monotonic() - started
    print(
        f"{accuracy(model, test):.1%} of {len(test.labels)} pictures it has not seen are told, after "
        f"{seconds:.0f} s of training on {len(learn.labels)}."
    )
    written = page(model, test.pictures[options.image], options.out)
    print(f"Wrote {written}: every head over a {int(test.labels[options.image])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
