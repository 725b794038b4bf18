"""Every route that can answer a public call, one list a call; test_routes.py judges each by reference.py.

A route is what is switched off, or on, before the call. Deleting a shortcut from the source deletes its line
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headwise.engines import first_pass, one_query
from headwise.engines.plans import PLANS
from headwise.listeners.adapters import attended, huggingface
from headwise.models import layers
from headwise.nn import cached_call, multihead, ragged, self_attention
from headwise.nn.as_torch import module as torchs_class
from headwise.nn.as_torch import torch_call

Patch = tuple[object, str, Any]


def nothing(*_: object, **__: object) -> None:
    """In place of a shortcut that answers None where a call is not for it."""


@dataclass(frozen=True)
class Route:
    """A way to an answer: what stands in place of what, and how the call is made."""

    name: str
    patches: tuple[Patch, ...] = ()
    warm_up: int = 0  # calls of the same kind before the one that is judged
    backend: str = "auto"
    compiled: bool = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """While it lasts, calls go this way; no plan of earlier calls is left."""
        PLANS.clear()
        with pytest.MonkeyPatch.context() as patch:
            for where, name, value in self.patches:
                patch.setattr(where, name, value)
            yield
        PLANS.clear()

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as this route calls it."""
        return torch.compile(function, backend="aot_eager", dynamic=False) if self.compiled else function


GENERAL = Route("as it comes")
COMPILED = Route("compiled", compiled=True)
NO_PLANS = Route("without plans", ((first_pass, "plan_for", nothing),))
BY_PLAN = Route("by plan", warm_up=2)

ATTENTION = [
    GENERAL, NO_PLANS, BY_PLAN, COMPILED, Route("flash", backend="flash"), Route("tiles", backend="tiles"),
    Route("plain", backend="plain"),
]  # fmt: skip

ROW = [GENERAL, Route("the general way", ((one_query, "row", nothing),))]

MODULE = [
    GENERAL, BY_PLAN, COMPILED,
    Route("step by step", ((multihead, "plain_self_attention", nothing),)),
    Route("as on a GPU", ((self_attention, "SERVES", ("cpu",)),)),
]  # fmt: skip

LENGTHS = [GENERAL, Route("without its short way", ((ragged, "_plainest", nothing),))]

STEPS = [
    GENERAL, NO_PLANS,
    Route("without the short step", ((cached_call, "plain_column", nothing),)),
]  # fmt: skip

GENERATION = [GENERAL, Route("layer by layer", ((layers, "plain_layers", nothing),))]

CLASS = [
    GENERAL, COMPILED,
    Route("without torch's operator", ((torchs_class, "native", nothing),)),
    Route("without the one step", ((torchs_class, "in_one_step", nothing),)),
    Route("our own alone", ((torchs_class, "native", nothing), (torchs_class, "in_one_step", nothing))),
    Route(
        "in tiles",
        ((torchs_class, "native", nothing), (torchs_class, "in_one_step", nothing), (torch_call, "FEW", 0)),
    ),
    Route(
        "as on a GPU",
        ((torchs_class, "native", nothing), (torchs_class, "SERVES", ("cpu",))),
    ),
]  # fmt: skip

WATCHED = [
    GENERAL,
    Route("each layer for itself", ((huggingface, "repeat_call", nothing),)),
    Route("lse later, as on a GPU", ((attended, "LSE_LATER", ("cpu",)),)),
]
