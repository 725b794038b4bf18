"""Calling the learner's code with batch-first tensors, reading what it returned, who reacts to what."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .call_plan import CallPlan, MaskConvention, express
from .rotations import ADDED, SLOTS, table
from .subject import Subject, signature_of
from .surroundings import Unreadable


class CallOutput(NamedTuple):
    """What a call gave, batch first."""

    output: Tensor  # [B, T, E]
    weights: Tensor | None  # [B, H, T, S]


def shape_text(tensor: Tensor) -> str:
    """[3, 7, 24]."""
    return str(list(tensor.shape))


def _tensors(raw: object, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in it, in order."""
    if isinstance(raw, Tensor):
        yield raw
    elif type(raw).__module__ == "numpy" and hasattr(raw, "__array__"):
        yield torch.as_tensor(raw)
    elif depth < 3:
        if isinstance(raw, Mapping):
            raw = list(raw.values())
        elif dataclasses.is_dataclass(raw) and not isinstance(raw, type):
            raw = [getattr(raw, one.name) for one in dataclasses.fields(raw)]
        elif isinstance(raw, (types.SimpleNamespace, argparse.Namespace)):
            raw = list(vars(raw).values())
        if isinstance(raw, (list, tuple)):
            for one in raw:
                yield from _tensors(one, depth + 1)


def read(raw: object, layout: str, B: int, T: int, S: int, H: int, heads_major: bool = False) -> CallOutput:
    """The output and the weights, batch first; `heads_major`: of [H * B, T, S] heads come first.

    Raises:
        Unreadable: no tensor in it is [B, T, something] in this layout.
    """
    found = list(_tensors(raw))
    if not found:
        if raw is None:
            raise Unreadable("it returned None; end forward with `return` and the output", no_output=True)
        raise Unreadable(f"it returned {type(raw).__name__} and no tensor; return the output")
    for i, tensor in enumerate(found):
        output = _output(tensor, layout, B, T, H)
        if output is not None and not _is_weights(tensor, T, S, found):
            others = _joined(found[:i] + found[i + 1 :], T, S, H)
            read_so = (_weights(one, layout, B, T, S, H, heads_major) for one in others)
            return CallOutput(output, next((one for one in read_so if one is not None), None))
    wanted = {
        "sequence first": f"[{T}, {B}, width]",
        "one sequence": f"[{T}, width]",
        "channels first": f"[{B}, width, {T}]",
    }
    shapes = ", ".join(map(shape_text, found[:3]))
    raise Unreadable(
        f"it returned a tensor {shapes}; the output must be {wanted.get(layout, f'[{B}, {T}, width]')}",
        no_output=found[0].ndim == 4,
    )


def _joined(found: list[Tensor], T: int, S: int, H: int) -> list[Tensor]:
    """Weights that come one head a tensor, [B, T, S], as one."""
    maps = [one for one in found if one.ndim in (2, 3) and tuple(one.shape[-2:]) == (T, S)]
    if H > 1 and len(maps) == H and len({one.shape for one in maps}) == 1:
        return [torch.stack(maps, -3)]
    return found


def _is_weights(tensor: Tensor, T: int, S: int, found: list[Tensor]) -> bool:
    """A [B, T, S] before the output in a tuple is the weights."""
    return len(found) > 1 and tensor.ndim >= 3 and tuple(tensor.shape[-2:]) == (T, S)


def _output(tensor: Tensor, layout: str, B: int, T: int, H: int) -> Tensor | None:
    shape = tuple(tensor.shape)
    if layout == "one sequence":
        return tensor[None] if len(shape) == 2 and shape[0] == T else None
    if layout == "sequence first":
        return tensor.transpose(0, 1) if len(shape) == 3 and shape[:2] == (T, B) else None
    if layout == "channels first":
        return tensor.transpose(1, 2) if len(shape) == 3 and (shape[0], shape[2]) == (B, T) else None
    if layout in ("image", "volume"):
        ones = (1,) * (1 if layout == "image" else 2)
        fits = len(shape) == 3 + len(ones) and (shape[0], *shape[2:]) == (B, T, *ones)
        return tensor.flatten(2).transpose(1, 2) if fits else None
    if layout == "row by row":
        return tensor[:, 0] if len(shape) == 4 and shape[:3] == (B, 1, T) else None
    if layout == "heads first" and len(shape) == 4 and shape[:3] == (B, H, T):
        return tensor.transpose(1, 2).flatten(2)  # [B, T, H * D]
    if layout == "heads inside" and len(shape) == 4 and shape[:3] == (B, T, H):
        return tensor.flatten(2)
    if layout == "heads in the batch" and len(shape) == 3 and shape[:2] == (B * H, T):
        return tensor.unflatten(0, (B, H)).transpose(1, 2).flatten(2)
    return tensor if len(shape) == 3 and shape[:2] == (B, T) else None


def _weights(tensor: Tensor, layout: str, B: int, T: int, S: int, H: int, heads_major: bool) -> Tensor | None:
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return None
    if layout == "one sequence":
        tensor, shape = tensor[None], (1, *shape)
        B = 1
    if shape == (B, H, T, S):
        return tensor
    if shape == (H, B, T, S):
        return tensor.transpose(0, 1)
    if shape == (B * H, T, S):
        return tensor.unflatten(0, (H, B)).transpose(0, 1) if heads_major else tensor.unflatten(0, (B, H))
    if shape == (B, T, H, S):
        return tensor.transpose(1, 2)
    if shape == (B, T, S, H):
        return tensor.permute(0, 3, 1, 2)
    if shape == (T, S, B, H):
        return tensor.permute(2, 3, 0, 1)
    if shape == (B, T, S) and H == 1:
        return tensor[:, None]
    return None


@dataclass(eq=False)
class Caller:
    """Calls the code by a plan, batch first in and out."""

    subject: Subject
    plan: CallPlan
    ways: tuple[MaskConvention, ...] = ()
    asks: tuple[tuple[str, object], ...] = ()  # what makes it return its weights
    heads_major: bool = False  # the weights come as [H * B, T, S]

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        ways: tuple[MaskConvention, ...] | None = None,
        seed: int = 0,
        asks: bool = False,
    ) -> CallOutput:
        """One call.

        Args:
            query: [B, T, E].
            key, value: [B, S, E].
            mask: bool [B, T, S], True = may attend.

        Raises:
            Unreadable: what came back is no attention's output, or the mask cannot be said.
            Exception: whatever the learner's code raises.
        """
        ways = self.ways if ways is None else ways
        if self.plan.layout == "one sequence":
            answers = []
            for b in range(len(query)):
                one = slice(b, b + 1)
                shown = None if mask is None else mask[one]
                answers.append(self._once(query[one], key[one], value[one], shown, ways, seed, asks))
            weights = [one.weights for one in answers if one.weights is not None]
            joined = torch.cat(weights) if len(weights) == len(answers) else None
            return CallOutput(torch.cat([one.output for one in answers]), joined)
        return self._once(query, key, value, mask, ways, seed, asks)

    def _once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        ways: tuple[MaskConvention, ...],
        seed: int,
        asks: bool,
    ) -> CallOutput:
        B, T, S, H = len(query), query.shape[1], key.shape[1], self.subject.sizes.H
        given = {"query": query, "x": query, "key": key, "memory": key, "value": value}
        named: dict[str, object] = {}
        counts = {"batch": B, "query_len": T, "key_len": S, "height": T, "one": 1, "grid": (T, 1)}
        for name, slot in self.plan.slots:
            if slot in SLOTS:
                dtype = self.subject.dtype if query.dtype is torch.float64 else query.dtype
                sizes = self.subject.sizes
                heads = (H, max(1, H // 2), 1)
                turning = table(slot, self.plan.table, self.plan.still, query, sizes.D, heads, dtype)
                if self.plan.table == ADDED and isinstance(turning, Tensor):
                    turning = self._laid_out(turning)
                named[name] = turning
                continue
            named[name] = counts[slot] if slot not in given else self._laid_out(given[slot])
        named.update(self.plan.constants)
        named.update(self.subject.weights() if self.subject.is_function else {})
        named.update(self.asks if asks else ())
        named.update(dict.fromkeys(self.plan.needs_mask))
        needs = set(self.plan.needs_mask) & {way.argument for way in ways}
        if mask is None and needs:
            mask = torch.ones(B, T, S, dtype=torch.bool)
        if mask is not None:
            said = express(ways, mask, H)
            if said is None:
                raise Unreadable("it has no argument that could say this mask")
            half = self.subject.dtype if query.dtype is torch.float64 else query.dtype
            named.update(
                {
                    k: v.to(half) if torch.is_tensor(v) and v.is_floating_point() else v
                    for k, v in said.items()
                }
            )
        if self.plan.as_numpy:
            named = {name: _as_arrays(value) for name, value in named.items()}
        args = list(named.values()) if self.plan.positional else []
        for name in self._nameless:
            if name in named and not self.plan.positional:
                args.append(named.pop(name))
        raw = self.subject.invoke(args, {} if self.plan.positional else named, seed)
        return read(raw, self.plan.layout, B, T, S, H, self.heads_major)

    @cached_property
    def _nameless(self) -> list[str]:
        """Parameters that can only be passed by position."""
        every = signature_of(self.subject.body).parameters.values()
        return [one.name for one in every if one.kind is one.POSITIONAL_ONLY]

    def _laid_out(self, x: Tensor) -> Tensor:
        layout, H = self.plan.layout, self.subject.sizes.H
        if x.dtype is torch.float64:
            x = x.to(self.subject.dtype)
        if layout == "one sequence":
            return x[0]
        if layout in ("channels first", "image", "volume"):
            turned = x.transpose(1, 2).contiguous() if x.is_contiguous() else x.transpose(1, 2)
            return {"image": turned[..., None], "volume": turned[..., None, None]}.get(layout, turned)
        if layout == "row by row":
            return x[:, None]
        if layout == "sequence first":
            return x.transpose(0, 1).contiguous() if x.is_contiguous() else x.transpose(0, 1)
        if layout.startswith("heads"):
            split = x.unflatten(-1, (H, -1))  # [B, T, H, D]
            if layout == "heads inside":
                return split
            split = split.transpose(1, 2).contiguous()  # [B, H, T, D]
            return split.flatten(0, 1) if layout == "heads in the batch" else split
        return x


def _as_arrays(value: object) -> object:
    """Tensors as NumPy's arrays, also those of a dict or list of weights."""
    if isinstance(value, Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(one) for key, one in value.items()}
    return [_as_arrays(one) for one in value] if isinstance(value, list) else value


def inputs_for(
    caller: Caller, T: int, S: int, seed: int = 1, B: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, T, E], key and value [B, S, E], as different as the code allows."""
    sizes, plan = caller.subject.sizes, caller.plan
    dice = torch.Generator().manual_seed(seed)
    B = B or sizes.B

    def normal(length: int) -> Tensor:
        drawn = torch.randn(B, length, sizes.E, generator=dice, dtype=torch.float64)
        return drawn.to(caller.subject.dtype).double()  # numbers that float32 has, where it gets them

    query = normal(T)
    if plan.self_only:
        return query, query, query
    key = normal(S)
    return query, key, key if plan.memory_only else normal(S)


def reactions(
    caller: Caller,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None = None,
    ways: tuple[MaskConvention, ...] | None = None,
    of: str = "both",
) -> Tensor:
    """How much the output of query t changes when key s does, float [B, T, S]; NaN where it is NaN.

    of: "key", "value" or "both". Where one input is queries and keys at once, the diagonal says nothing.
    """
    query, key, value = inputs
    B, T, S = len(query), query.shape[1], key.shape[1]
    base = caller.call(*inputs, mask, ways=ways).output.detach().double()
    found = torch.zeros(B, T, S, dtype=torch.float64)
    dice = torch.Generator().manual_seed(77)
    push = torch.randn(key.shape, generator=dice, dtype=torch.float64).to(caller.subject.dtype).double()
    for s in range(S):
        step = torch.zeros_like(key)
        step[:, s] = push[:, s]
        pushed = moved(query, key, value, step, caller, of)
        output = caller.call(*pushed, mask, ways=ways).output.detach().double()
        found[:, :, s] = (output - base).abs().amax(-1)
    return found / base.nan_to_num(0).abs().max().clamp_min(1e-30)


def moved(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, caller: Caller, of: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs, with this step taken by keys, values or both."""
    if caller.plan.self_only:
        x = query + step
        return x, x, x
    if caller.plan.memory_only:
        memory = key + step
        return query, memory, memory
    return query, key + step if of != "value" else key, value + step if of != "key" else value
