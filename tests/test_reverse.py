"""A small encoder-decoder learns to say a sequence backwards, and its cross-attention shows how."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.models import Transformer, TransformerConfig, fit

V, L, START = 13, 11, 0


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(a sequence, START and the sequence backwards), 64 at a time, without end."""
    generator = torch.Generator().manual_seed(epoch)
    while True:
        ids = torch.randint(1, V, (64, L), generator=generator)
        yield ids, torch.cat([torch.full((64, 1), START), ids.flip(1)], 1)


def a_model() -> Transformer:
    return Transformer(
        TransformerConfig(
            vocab_size=V,
            d_model=32,
            num_heads=2,
            num_layers=1,
            kind="encoder-decoder",
            positions="learned",
            max_length=L + 1,
        )
    )


def backwards(model: Transformer, ids: Tensor) -> Tensor:
    """The mean weight of each cross-attention head on the anti-diagonal: token i of the answer, L - 1 - i."""
    target = torch.cat([torch.full((len(ids), 1), START), ids.flip(1)[:, :-1]], 1)
    with torch.no_grad(), hw.watch(model) as heads:
        model(ids, target)
    weights = heads["decoder.layers.0.cross_attention"].map.dense()  # [B, H, L, L]
    return weights.flip(-1).diagonal(dim1=-2, dim2=-1).mean((0, 2))


@pytest.mark.slow
def test_an_encoder_decoder_learns_to_reverse_and_its_cross_attention_is_the_anti_diagonal() -> None:
    torch.set_num_threads(1)  # a small model; put back by the fixture of every test
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = a_model()
    ids = next(batches(10**6))[0]
    assert backwards(model.eval(), ids).max() < 0.2  # 1 in 11, by chance
    history = fit(model, batches, steps=300, lr=5e-3, warmup=50, schedule="cosine")
    assert history.losses[0] > 2.3 and history.losses[-1] < 0.05
    assert backwards(model, ids).max() > 0.8
    assert torch.equal(model.generate(ids, L, start=START), ids.flip(1))
