"""Calls of layers whose heads lie over several processes: every rank hears its own, listeners hear all.

    rank 0  heads 0 1 ──┐                                   ┌── heads 0 1 ──> out_proj
    rank 1  heads 2 3 ──┴─ gathered ──> listeners, alike ───┴── heads 2 3 ──> out_proj

What listeners do between the two is the same on every rank, so that head numbers are those of the whole
layer and gradients are those of all heads. Nothing is gathered that nobody asks for; who asks does so on
every rank. Long calls are measured where they are, and their numbers gathered (`gathered_record`).

A layer of ours knows which heads it has. One of Hugging Face is known to be sharded by its own `tp_plan`
where it has fewer heads than its config says; one that somebody else has sharded is refused by name.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engines.scores import Scores
from ..errors import ArgumentError
from ..heads.record import IN_ROWS, Record
from ..map import AttentionMap
from ..parallel.local_heads import LocalHeads
from .active import Call

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class SplitCall(Call):
    """A call of some heads of a layer, heard as the call of all of them; `own` is what is here."""

    def __init__(self, own: Call, here: LocalHeads, output: Tensor | None = None) -> None:
        known = {"own": own, "here": here, "path": own.path, "kind": own.kind, "forward": own.forward}
        self.__dict__.update(known, tokens=own.tokens)
        if output is not None:  # as another listener left it
            self.__dict__["output"] = output

    own: Call
    here: LocalHeads

    @cached_property
    def weights(self) -> AttentionMap:
        """[B, H, T, S] of all heads"""
        return self.here.whole_map(self.own.weights)

    @cached_property
    def value(self) -> Tensor | None:
        """[B, Hk, S, Dv] of all heads"""
        return None if self.own.value is None else self.here.whole_kv(self.own.value)

    @cached_property
    def output(self) -> Tensor | None:
        """[B, H, T, Dv] of all heads"""
        return None if self.own.output is None else self.here.whole(self.own.output)


def gathered_record(record: Record, here: LocalHeads, weights: AttentionMap | None) -> Record:
    """What was measured of the heads here, of all heads; weights: the map of all, where it is kept."""
    B, _, T, S = record.shape
    whole = replace(record, shape=(B, here.total, T, S), map=weights)
    whole.rows = {name: here.whole(value) for name, value in record.rows.items()}
    whole.counts = {name: here.whole(value) for name, value in record.counts.items()}
    whole.large = {
        name: value if name == IN_ROWS else here.whole(value) for name, value in record.large.items()
    }
    return whole


# Which heads are here


def local_heads_of(
    module: nn.Module, path: str, weights: AttentionMap, value: Tensor | None
) -> LocalHeads | None:
    """Which heads of a layer this call is of; None: all of them.

    Raises:
        ArgumentError: it is sharded in a way that does not say which; its weights alone are to be had.
    """
    here: LocalHeads | None = getattr(module, "local_heads", None)
    if here is None:
        if "torch.distributed.tensor" not in sys.modules:
            return None
        parameter = _over_ranks(module)
        if parameter is None:
            return None
        here = _of_plan(module, path, parameter[0], parameter[1], weights.shape[1], value)
    if here is not None and here.group.size() == 1:
        return None
    if here is not None and weights.ranks is not None:
        raise ArgumentError(
            f"model must lie over ranks by heads or by sequence to be listened to: {path} does both, "
            f"{here} and a sequence over {weights.ranks} ranks; watch it with one of the two"
        )
    if here is not None and not isinstance(weights.as_made[0], Scores):
        raise ArgumentError(
            f"fallback must not be 'eager' where heads lie over several processes: of {path} only the "
            f"weights of {here} are to be had; leave it out, or fallback='skip'"
        )
    return here


def _over_ranks(module: nn.Module) -> tuple[str, DTensor] | None:
    """A parameter of the layer that lies over several processes, and is cut."""
    from torch.distributed.tensor import DTensor

    for path, owner in module.named_modules():
        gathers = any(base.__name__ == "FSDPModule" for base in type(owner).__mro__)
        for name, parameter in owner.named_parameters(path, recurse=False):
            if not isinstance(parameter, DTensor) or (gathers and parameter.device_mesh.ndim == 1):
                continue  # fully_shard makes a layer whole before it runs
            if any(place.is_shard() for place in parameter.placements):
                return name, parameter
    return None


def _of_plan(
    module: nn.Module, path: str, name: str, parameter: DTensor, heads: int, value: Tensor | None
) -> LocalHeads | None:
    """Of a layer of Hugging Face that its own `tp_plan` has sharded."""
    config: Any = getattr(module, "config", None)
    total = getattr(config, "num_attention_heads", None)
    ranks = parameter.device_mesh.size()
    what = f"{path or 'the model itself'} ({type(module).__name__}) has {heads} heads here, and its {name} "
    over = f"lies over {ranks} processes"
    if not isinstance(total, int) or parameter.device_mesh.ndim != 1:
        raise ArgumentError(
            f"heads must be known to be all there: {what}{over}; shard it with "
            "headwise.parallel.shard_heads, or listen to it before it is sharded"
        )
    if heads == total:
        return None  # gathered by its plan before it attends
    kv_heads = heads if value is None else value.shape[1]
    kv_total = getattr(config, "num_key_value_heads", None) or total
    if heads * ranks != total or kv_heads * ranks != kv_total:
        raise ArgumentError(
            f"heads must lie evenly over processes: {what}{over}, with {kv_heads} of {kv_total} key heads, "
            f"and its config says {total} heads; use a number of processes that divides both"
        )
    group = parameter.device_mesh.get_group()
    return LocalHeads(torch.distributed.get_rank(group) * heads, heads, total, kv_heads, kv_total, group)
