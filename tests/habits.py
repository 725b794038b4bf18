"""Calls as people make them, for tests of what they are told and of what is taken as it is meant.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim, E d_model.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

B, H, T, S, D = 2, 3, 5, 7, 11
E = H * D


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (B, T, E))


def attend(*tensors: Any, **named: Any) -> Any:
    return hw.attention(*(tensors or (x(B, H, T, D),) * 3), **named)


def mha(**options: Any) -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(E, H, **options)


def make(*sizes: Any, **named: Any) -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(*sizes, **named)


def call(*inputs: Any, **named: Any) -> Any:
    return mha()(*(inputs or (x(),)), **named)


def nest(*tensors: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor(list(tensors), layout=layout)


def jagged() -> Tensor:
    return nest(x(3, E), x(T, E), layout=torch.jagged)


class Stack(nn.Module):
    """Two layers of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mha(), mha()])

    def forward(self, y: Tensor) -> Tensor:
        for layer in self.layers:
            y = y + layer(y)[0]
        return y


def early() -> object:
    with hw.watch(Stack()) as heads:
        return heads[0]


def watched(model: nn.Module | None = None) -> hw.Heads:
    model = Stack() if model is None else model
    with hw.watch(model) as heads:
        model(x())
    return heads


def ablated(heads: Any, *method: str) -> None:
    model = Stack()
    with hw.ablate(model, heads, *method):
        model(x())
