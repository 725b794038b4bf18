"""A stand-in until mini is on main."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headwise.models import Transformer, TransformerConfig
from headwise.nn import Rope


def config(num_heads: int = 8) -> TransformerConfig:
    """Equal parameters whatever num_heads."""
    return TransformerConfig(
        vocab_size=3072, d_model=256, num_heads=num_heads, num_layers=4, max_length=512, rope=Rope()
    )


def windows(tokens: Tensor, batch: int, length: int, seed: int) -> Callable[[int], Iterator[Tensor]]:
    """For `models.fit`: int64 [batch, length + 1]."""

    def of_epoch(epoch: int) -> Iterator[Tensor]:
        drawn = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        count = (len(tokens) - 1) // length
        for some in torch.randperm(count, generator=drawn).split(batch):
            if len(some) == batch:
                yield torch.stack([tokens[i * length : (i + 1) * length + 1] for i in some.tolist()]).long()

    return of_epoch


@torch.no_grad()
def validation_loss(model: Transformer, tokens: Tensor, length: int = 512) -> float:
    """Nats per token."""
    device = next(model.parameters()).device
    count, total = (len(tokens) - 1) // length, 0.0
    for some in torch.arange(count).split(32):
        ids = (
            torch.stack([tokens[i * length : (i + 1) * length + 1] for i in some.tolist()]).long().to(device)
        )
        total += cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item() * len(some)
    return total / count
