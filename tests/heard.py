"""A listener for tests, and what is heard of layers measured together beside each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.heads import joint_measurement
from headwise.listeners.active import LayerCall, Listener


class Heard(Listener):
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def hear(self, call: LayerCall) -> None:
        self.calls.append(call)

    @property
    def paths(self) -> list[str]:
        return [call.path for call in self.calls]


@contextmanager
def one_by_one() -> Iterator[None]:
    """Inside, every call is measured by itself while its layer runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_measurement.DeferredCalls, "note", lambda *_: None)
        yield


def assert_same(actual: hw.Heads, expected: hw.Heads) -> None:
    assert actual.paths == expected.paths
    for mine, theirs in zip(actual.values(), expected.values(), strict=True):
        assert (mine.path, mine.layer, len(mine.calls)) == (theirs.path, theirs.layer, len(theirs.calls))
        for call, other in zip(mine.calls, theirs.calls, strict=True):
            assert (call.shape, call.kind, call.forward) == (other.shape, other.kind, other.forward)
            assert (call.map is None) == (other.map is None)
            assert (call.marks is None) == (other.marks is None)
            for of in ("rows", "counts", "large"):
                numbers, truth = getattr(call, of), getattr(other, of)
                assert list(numbers) == list(truth)
                for name, value in truth.items():
                    torch.testing.assert_close(
                        numbers[name], value, equal_nan=True, msg=f"{mine.path} {name}"
                    )


def both(run: Callable[[], object], model: nn.Module, **options: Any) -> tuple[hw.Heads, hw.Heads]:
    """What is watched of `run` together, and call by call."""
    with hw.watch(model, **options) as heads:
        run()
    with one_by_one(), hw.watch(model, **options) as alone:
        run()
    return heads, alone


class Reused(nn.Module):
    """Layers that put their q and k into one and the same room, and clear it in the end."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlace() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        room = torch.empty(2, 3, 2, 5, 4)
        for layer in self.layers:
            x = layer(x, room)
        room.zero_()
        return x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(8, 24), 2

    def forward(self, x: Tensor, room: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        room.data[0], room.data[1] = q, k  # which no version counts
        heads = torch.nn.functional.scaled_dot_product_attention(room[0], room[1], v)
        return x + heads.transpose(1, 2).flatten(2)
