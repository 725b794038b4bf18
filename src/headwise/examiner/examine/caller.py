"""Call the learner's code with batch-first tensors, and measure which outputs a changed input changes."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .call_plan import CallPlan, MaskConvention, express
from .environment import Unreadable
from .rotations import ADDED, SLOTS, rotation_table
from .subject import Subject, signature_of

QKV = tuple[Tensor, Tensor, Tensor]  # query [B, T, E], key and value [B, S, E]
GRIDS = {"row by row": 1, "window by window": 2}  # layouts -> axes of 1 before the positions


class CallOutput(NamedTuple):
    """Output and weights of one call, batch first."""

    output: Tensor  # [B, T, E]
    weights: Tensor | None  # [B, H, T, S]


def shape_text(tensor: Tensor) -> str:
    """Return the shape of a tensor as text: [3, 7, 24]."""
    return str(list(tensor.shape))


def _tensors_in(raw: object, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor or NumPy array inside a returned value, in order, three levels deep."""
    if isinstance(raw, Tensor):
        yield raw
    elif type(raw).__module__ == "numpy" and hasattr(raw, "__array__"):
        yield torch.as_tensor(raw)
    elif depth < 3:
        if isinstance(raw, Mapping):
            raw = list(raw.values())
        elif dataclasses.is_dataclass(raw) and not isinstance(raw, type):
            raw = [getattr(raw, item.name) for item in dataclasses.fields(raw)]
        elif isinstance(raw, (types.SimpleNamespace, argparse.Namespace)):
            raw = list(vars(raw).values())
        if isinstance(raw, (list, tuple)):
            for item in raw:
                yield from _tensors_in(item, depth + 1)


def read(raw: object, layout: str, B: int, T: int, S: int, H: int, heads_major: bool = False) -> CallOutput:
    """Read output and weights from a returned value, and turn both batch first.

    Args:
        heads_major: weights of [H * B, T, S] have the heads first.

    Raises:
        Unreadable: no tensor in it is [B, T, something] in this layout.
    """
    tensors = list(_tensors_in(raw))
    if not tensors:
        if raw is None:
            raise Unreadable("it returned None; end forward with `return` and the output", no_output=True)
        raise Unreadable(f"it returned {type(raw).__name__} instead of a tensor; return the output")
    for i, tensor in enumerate(tensors):
        output = _output(tensor, layout, B, T, H)
        if output is not None and not _looks_like_weights(tensor, T, S, tensors):
            others = _stack_heads(tensors[:i] + tensors[i + 1 :], T, S, H)
            candidates = (_weights(x, layout, B, T, S, H, heads_major) for x in others)
            return CallOutput(output, next((weights for weights in candidates if weights is not None), None))
    wanted = {
        "sequence first": f"[{T}, {B}, width]",
        "one sequence": f"[{T}, width]",
        "channels first": f"[{B}, width, {T}]",
    }
    shapes = ", ".join(map(shape_text, tensors[:3]))
    raise Unreadable(
        f"it returned a tensor {shapes}; the output must be {wanted.get(layout, f'[{B}, {T}, width]')}",
        no_output=tensors[0].ndim == 4,
    )


def _stack_heads(tensors: list[Tensor], T: int, S: int, H: int) -> list[Tensor]:
    """Stack weights that come as one tensor a head, [B, T, S]; other lists come back as they are."""
    maps = [x for x in tensors if x.ndim in (2, 3) and tuple(x.shape[-2:]) == (T, S)]
    if H > 1 and len(maps) == H and len({x.shape for x in maps}) == 1:
        return [torch.stack(maps, -3)]
    return tensors


def _looks_like_weights(tensor: Tensor, T: int, S: int, tensors: list[Tensor]) -> bool:
    """Return True for a [.., T, S] beside other tensors: the weights, and not the output."""
    return len(tensors) > 1 and tensor.ndim >= 3 and tuple(tensor.shape[-2:]) == (T, S)


def _output(tensor: Tensor, layout: str, B: int, T: int, H: int) -> Tensor | None:
    """Return a tensor batch first, [B, T, E], if its shape is that of an output in this layout, else None."""
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
    if layout in GRIDS:
        ones = (1,) * GRIDS[layout]
        return tensor.flatten(1, -2) if len(shape) > 3 and shape[:-1] == (B, *ones, T) else None
    if layout == "heads first" and len(shape) == 4 and shape[:3] == (B, H, T):
        return tensor.transpose(1, 2).flatten(2)  # [B, T, H * D]
    if layout == "heads inside" and len(shape) == 4 and shape[:3] == (B, T, H):
        return tensor.flatten(2)
    if layout == "heads in the batch" and len(shape) == 3 and shape[:2] == (B * H, T):
        return tensor.unflatten(0, (B, H)).transpose(1, 2).flatten(2)
    return tensor if len(shape) == 3 and shape[:2] == (B, T) else None


def _weights(tensor: Tensor, layout: str, B: int, T: int, S: int, H: int, heads_major: bool) -> Tensor | None:
    """Return a tensor as weights, [B, H, T, S], if its shape is one that weights come in, else None."""
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
    """The learner's code with a plan to call it: batch first in and out, whatever its own layout."""

    subject: Subject
    plan: CallPlan
    conventions: tuple[MaskConvention, ...] = ()
    weights_switch: tuple[tuple[str, object], ...] = ()  # the argument that makes it return its weights
    heads_major: bool = False  # the weights come as [H * B, T, S]

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        conventions: tuple[MaskConvention, ...] | None = None,
        seed: int = 0,
        with_weights: bool = False,
    ) -> CallOutput:
        """Call the code once; inputs and results are batch first.

        Args:
            query: [B, T, E].
            key, value: [B, S, E].
            mask: bool [B, T, S], True = may attend.
            conventions: how the mask is passed; those of this caller where None.
            with_weights: Also pass `weights_switch`.

        Raises:
            Unreadable: the result is no output of attention, or no argument can express the mask.
            Exception: whatever the learner's code raises.
        """
        conventions = self.conventions if conventions is None else conventions
        if self.plan.layout == "one sequence":
            results = []
            for b in range(len(query)):
                sample = slice(b, b + 1)
                shown = None if mask is None else mask[sample]
                parts = query[sample], key[sample], value[sample]
                results.append(self._call_batch(*parts, shown, conventions, seed, with_weights))
            weights = [result.weights for result in results if result.weights is not None]
            stacked = torch.cat(weights) if len(weights) == len(results) else None
            return CallOutput(torch.cat([result.output for result in results]), stacked)
        return self._call_batch(query, key, value, mask, conventions, seed, with_weights)

    def output(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        conventions: tuple[MaskConvention, ...] | None = None,
    ) -> Tensor:
        """Call the code once and return its output, detached and in float64: [B, T, E]."""
        return self.call(query, key, value, mask, conventions=conventions).output.detach().double()

    def _call_batch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        conventions: tuple[MaskConvention, ...],
        seed: int,
        with_weights: bool,
    ) -> CallOutput:
        """Call the code on inputs in its layout: all samples at once, or a single one."""
        B, T, S, H = len(query), query.shape[1], key.shape[1], self.subject.sizes.H
        tensors = {"query": query, "x": query, "key": key, "memory": key, "value": value}
        named: dict[str, object] = {}
        dtype = self.subject.dtype if query.dtype is torch.float64 else query.dtype
        counts = {"batch": B, "query_len": T, "key_len": S, "height": T, "one": 1, "grid": (T, 1)}
        for name, slot in self.plan.slots:
            if slot in SLOTS:
                D, heads = self.subject.sizes.D, (H, max(1, H // 2), 1)
                rotation = rotation_table(slot, self.plan.table, self.plan.still, query, D, heads, dtype)
                if self.plan.table == ADDED and isinstance(rotation, Tensor):
                    rotation = self._in_layout(rotation)
                named[name] = rotation
            else:
                named[name] = counts[slot] if slot not in tensors else self._in_layout(tensors[slot])
        named.update(self.plan.constants)
        named.update(self.subject.weights() if self.subject.is_function else {})
        named.update(self.weights_switch if with_weights else ())
        named.update(dict.fromkeys(self.plan.needs_mask))
        needs = set(self.plan.needs_mask) & {convention.argument for convention in conventions}
        if mask is None and needs:
            mask = torch.ones(B, T, S, dtype=torch.bool)
        if mask is not None:
            arguments = express(conventions, mask, H)
            if arguments is None:
                raise Unreadable("it has no argument for this mask")
            for name, argument in arguments.items():
                if isinstance(argument, Tensor) and argument.is_floating_point():
                    argument = argument.to(dtype)
                named[name] = argument
        if self.plan.as_numpy:
            named = {name: _to_numpy(value) for name, value in named.items()}
        args = list(named.values()) if self.plan.positional else []
        for name in self._positional_only:
            if name in named and not self.plan.positional:
                args.append(named.pop(name))
        raw = self.subject.invoke(args, {} if self.plan.positional else named, seed)
        return read(raw, self.plan.layout, B, T, S, H, self.heads_major)

    @cached_property
    def _positional_only(self) -> list[str]:
        """Parameters that can only be passed by position."""
        parameters = signature_of(self.subject.body).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]

    def _in_layout(self, x: Tensor) -> Tensor:
        """Return batch-first inputs, [B, T, E], in the layout of the code."""
        layout, H = self.plan.layout, self.subject.sizes.H
        if x.dtype is torch.float64:
            x = x.to(self.subject.dtype)
        if layout == "one sequence":
            return x[0]
        if layout in ("channels first", "image", "volume"):
            turned = x.transpose(1, 2).contiguous() if x.is_contiguous() else x.transpose(1, 2)
            return {"image": turned[..., None], "volume": turned[..., None, None]}.get(layout, turned)
        if layout in GRIDS:
            return x.unflatten(0, (-1, *(1,) * GRIDS[layout]))
        if layout == "sequence first":
            return x.transpose(0, 1).contiguous() if x.is_contiguous() else x.transpose(0, 1)
        if layout.startswith("heads"):
            split = x.unflatten(-1, (H, -1))  # [B, T, H, D]
            if layout == "heads inside":
                return split
            split = split.transpose(1, 2).contiguous()  # [B, H, T, D]
            return split.flatten(0, 1) if layout == "heads in the batch" else split
        return x


def _to_numpy(value: object) -> object:
    """Return tensors as NumPy arrays, also inside a dict or a list."""
    if isinstance(value, Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: _to_numpy(item) for key, item in value.items()}
    return [_to_numpy(item) for item in value] if isinstance(value, list) else value


def inputs_for(
    caller: Caller, T: int | None = None, S: int | None = None, seed: int = 1, B: int | None = None
) -> QKV:
    """Draw query [B, T, E], key and value [B, S, E]; one tensor stands for two where the code takes one.

    T and S are the longest length of the examination where they are not passed.
    """
    sizes, plan = caller.subject.sizes, caller.plan
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int | None) -> Tensor:
        shape = (B or sizes.B, length or sizes.long, sizes.E)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(caller.subject.dtype).double()  # numbers that float32 has, where it gets them

    query = normal(T)
    if plan.self_only:
        return query, query, query
    key = normal(S)
    return query, key, key if plan.memory_only else normal(S)


def map_inputs(inputs: QKV, function: Callable[[Tensor], Tensor]) -> QKV:
    """Apply a function to query, key and value; arguments that are one tensor stay one tensor."""
    results: dict[int, Tensor] = {}
    for x in inputs:
        if id(x) not in results:
            results[id(x)] = function(x)
    query, key, value = (results[id(x)] for x in inputs)
    return query, key, value


def shift_second_sample(x: Tensor) -> Tensor:
    """Return a copy with 1 added to every number of sample 1."""
    shifted = x.clone()
    shifted[1] += 1.0
    return shifted


def reaction_columns(
    caller: Caller,
    inputs: QKV,
    mask: Tensor | None = None,
    conventions: tuple[MaskConvention, ...] | None = None,
    of: str = "both",
) -> Iterator[Tensor]:
    """Yield for each key how much the outputs change when that key does, float [B, T], one call for each.

    A change is a share of the largest output, and NaN where the output is. Where one input is queries and
    keys at once, the output of the changed position itself says nothing.

    Args:
        of: What is changed: "key", "value" or "both".
    """
    query, key, value = inputs
    base = caller.output(*inputs, mask, conventions)
    largest = base.nan_to_num(0).abs().max().clamp_min(1e-30)
    generator = torch.Generator().manual_seed(77)
    noise = torch.randn(key.shape, generator=generator, dtype=torch.float64)
    noise = noise.to(caller.subject.dtype).double()
    for s in range(key.shape[1]):
        step = torch.zeros_like(key)
        step[:, s] = noise[:, s]
        if caller.plan.self_only:
            changed = (query + step,) * 3
        elif caller.plan.memory_only:
            changed = (query, key + step, key + step)
        else:
            changed = (query, key + step if of != "value" else key, value + step if of != "key" else value)
        yield (caller.output(*changed, mask, conventions) - base).abs().amax(-1) / largest


def reactions(caller: Caller, inputs: QKV, of: str = "both") -> Tensor:
    """Return how much the output of query t changes when key s does, float [B, T, S]."""
    return torch.stack(list(reaction_columns(caller, inputs, of=of)), -1)
