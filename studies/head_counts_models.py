"""The models of the study of head counts: a causal language model, its text in windows, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headwise.models import Transformer, TransformerConfig
from headwise.nn import Rope

from . import corpus

LENGTH, BATCH, WARMUP, LR = 512, 64, 200, 3e-3
D_MODEL = 256


def config(num_heads: int = 8, **changed: object) -> TransformerConfig:
    """Return the config of the study; heads share d_model, so their number does not change the parameters.

    A quarter of each head's channels is turned by position. Where all are, a head that looks for an earlier
    copy of a token must find it turned: the weight of the best on what followed was 0.35 instead of 0.54.
    """
    return TransformerConfig(
        vocab_size=corpus.VOCABULARY,
        d_model=D_MODEL,
        num_heads=num_heads,
        num_layers=4,
        rope=Rope(dims=max(2, D_MODEL // num_heads // 4)),
        norm="rms",
        bias=False,
        max_length=LENGTH,
        **changed,  # type: ignore[arg-type]
    )


def windows(tokens: Tensor, batch: int, length: int, seed: int) -> Callable[[int], Iterator[Tensor]]:
    """Yield for `fit` all windows of an epoch in random order, int64 [B, length + 1].

    They overlap by one token, so that each is predicted once. Every epoch begins at another token.
    """

    def epoch_of(epoch: int) -> Iterator[Tensor]:
        order = torch.Generator().manual_seed(seed * 1009 + epoch)
        first = int(torch.randint(length, (1,), generator=order))
        count = (len(tokens) - first - 1) // length
        starts = first + length * torch.randperm(count, generator=order)
        ahead = torch.arange(length + 1, device=tokens.device)
        for some in starts.split(batch):
            if len(some) == batch:
                yield tokens[some.to(tokens.device)[:, None] + ahead].long()

    return epoch_of


def optimizer(model: Transformer, lr: float = LR) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    wide = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


@torch.no_grad()
def validation_loss(model: Transformer, tokens: Tensor, length: int = LENGTH, batch: int = 32) -> float:
    """Return the loss in nats per token, over consecutive windows."""
    device = next(model.parameters()).device
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    total = 0.0
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        logits = model(x.to(device).long())  # [B, T, V]
        total += cross_entropy(
            logits.flatten(0, 1).float(), y.to(device).long().flatten(), reduction="sum"
        ).item()
    return total / (count * length)
