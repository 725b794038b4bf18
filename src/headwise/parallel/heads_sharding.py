"""`shard_heads`: the heads of a model's attention over the devices of a mesh.

    model ──> every attention and feed-forward of ours, every attention of torch's ──> checked, all of them
          ──> each through `parallelize_module`, in place                               sharded_layers.py
          ──> what is not sharded, made the same on every rank

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim, n ranks.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from ..arguments import told
from ..errors import ArgumentError, ShapeError
from ..models.layers import FeedForward
from ..nn import MultiHeadAttention, MultiheadAttention
from ..nn.local_heads import LocalHeads
from ..nn.options import Slopes
from ..nn.packed_weights import OUT_PROJ
from ..nn.rank_exchange import Group
from .sharded_attention import ShardedAttention, ShardedFeedForward, ShardedTorchAttention
from .sharded_layers import ByHead, Columns, Rows, ShardedRelativeBias, SharedNorm, SharedRows, WholeNorm

__all__ = ["shard_heads"]

Model = TypeVar("Model", bound=nn.Module)

TORCHS = (nn.MultiheadAttention, MultiheadAttention)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj")
CHANNELS = ("gate_proj", "up_proj", "down_proj")


def shard_heads(
    model: Model, mesh: DeviceMesh, *, axis: str = "tp", output_layout: Placement | None = None
) -> Model:
    """Lay the heads of a model over the devices of a mesh, in place: rank r of n gets H / n of each layer.

        mesh = torch.distributed.init_device_mesh("cuda", (4,))
        hw.parallel.shard_heads(model, mesh)

    Sharded are `headwise.MultiHeadAttention` by heads, the feed-forwards of `headwise.models` by channels,
    and torch's `MultiheadAttention`, adopted or not, which is taken apart into projections that can be.
    Everything else stays whole, and gets the numbers of the first rank. Each rank gives the model the same
    input and gets the same output; gradients and an optimiser's steps are those of one process. `hw.watch`,
    `hw.ablate` and the like hear all heads on every rank, under their numbers in the whole model.

    Parameters become DTensors: `torch.distributed.checkpoint` writes and reads them on any number of ranks,
    and `fully_shard` goes on top, on another axis of the mesh. Shard first, then make the optimiser: one of
    before holds the parameters that were replaced, and its step is refused.

    Key and value heads: n divides them, or they divide n, and ranks that need the same one hold it each.

    Args:
        model: with attention in it, or attention itself. On the meta device nothing is computed.
        mesh: of one axis; of several, `axis` is taken.
        axis: the name of the axis that heads lie over.
        output_layout: of a single `MultiHeadAttention` or `FeedForward`, whose output is a DTensor then:
            `Replicate()`, or `Shard(1)` where the sequence is sharded between layers. DTensors are taken as
            inputs either way.

    Returns:
        The model.

    Raises:
        ShapeError: heads that do not divide by ranks.
        ArgumentError: no attention to shard; one that is sharded already, parametrised, or has replaced
            parts; parameters shared with others; a mesh of several axes without that name; dropout on ranks
            that draw different random numbers.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module: got {told(model)}; pass the model itself")
    mesh = _one_axis(mesh, axis)
    group = mesh.get_group()
    found = _found(model)
    if output_layout is not None and not isinstance(model, MultiHeadAttention | FeedForward):
        raise ArgumentError(
            f"output_layout must be asked of one attention or feed-forward: got {type(model).__name__}; "
            "shard its layers one by one, and let what is between them take DTensors"
        )
    _check_shared(model, found)
    for path, module in found.items():
        _check(path, module, mesh.size())
    _check_random_numbers(model, group)
    before = [weakref.ref(parameter) for parameter in model.parameters()]  # not held: a GPU may be full
    for path, module in found.items():
        if isinstance(module, MultiHeadAttention):
            _shard_attention(module, mesh, output_layout)
        elif isinstance(module, FeedForward):
            _shard_feed_forward(module, mesh, output_layout)
        else:
            assert isinstance(module, nn.MultiheadAttention), path
            _shard_torchs(module, mesh)
    for module in model.modules():  # its native path asks attention for weights that lie over ranks now
        if isinstance(module, nn.TransformerEncoder) and _has_sharded(module):
            module.use_nested_tensor = False
    _send_the_rest(model, group)
    _watch_optimizers(before, model)
    return model


def _has_sharded(encoder: nn.Module) -> bool:
    return any(isinstance(part, ShardedTorchAttention) for part in encoder.modules())


def _one_axis(mesh: object, axis: str) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh must be a torch.distributed.DeviceMesh: got {told(mesh)}; make one with "
            'torch.distributed.init_device_mesh("cuda", (ranks,))'
        )
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ArgumentError(
            f"mesh must have an axis named {axis!r}, or be of one axis: got {tuple(mesh.shape)} named "
            f"{names or None}; name it with mesh_dim_names=, or say which one with axis="
        )
    return mesh[axis]


def _found(model: nn.Module) -> dict[str, nn.Module]:
    """What can be sharded, by path, each once."""
    kinds = (MultiHeadAttention, FeedForward, nn.MultiheadAttention, ShardedTorchAttention)
    found: dict[str, nn.Module] = {
        path: module for path, module in model.named_modules() if isinstance(module, kinds)
    }
    attends = any(not isinstance(module, FeedForward) for module in found.values())
    if not attends and not isinstance(model, FeedForward):
        what = "use headwise.MultiHeadAttention in it"
        if _is_huggingface(model):
            what = "its own tp_plan shards it, and headwise hears all of its heads then"
        raise ArgumentError(
            "model must have attention of headwise or torch.nn.MultiheadAttention to shard: got "
            f"{type(model).__name__} with none; {what}"
        )
    return found


def _is_huggingface(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


# What cannot be sharded


def _check(path: str, module: nn.Module, ranks: int) -> None:
    """Raise for a module that cannot be sharded over so many ranks, before any is."""
    name = path or "the model itself"
    if isinstance(module, ShardedAttention | ShardedFeedForward | ShardedTorchAttention):
        raise ArgumentError(
            f"model must not be sharded already: {name} is a {type(module).__name__}; shard a model once"
        )
    for each, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise ArgumentError(
                f"model must have plain parameters to be sharded: {name}.{each} is a "
                f"{type(parameter).__name__}; shard heads first, and the rest (fully_shard) then"
            )
    if type(module) not in (MultiHeadAttention, FeedForward, *TORCHS):
        raise ArgumentError(
            f"model must have attention as headwise or torch made it to be sharded: {name} is a "
            f"{type(module).__module__}.{type(module).__qualname__}; shard first, wrap or parametrise then"
        )
    if isinstance(module, FeedForward):
        _check_linears(name, module, CHANNELS)
        return
    if isinstance(module, MultiHeadAttention):
        heads, kv_heads = module.num_heads, module.num_kv_heads
        _check_linears(name, module, PROJECTIONS)
        _check_norms(name, module)
    else:
        assert isinstance(module, nn.MultiheadAttention)
        heads = kv_heads = module.num_heads
        appends = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
        for option in [option for option, there in appends.items() if there]:
            raise ArgumentError(
                f"model must not append keys where heads are sharded: {name} has {option}=True; leave it out"
            )
        _check_linears(name, module, ("out_proj",))
    if heads % ranks:
        raise ShapeError(
            f"num_heads must divide by ranks: {name} has {heads} for {ranks} ranks; use a mesh of "
            f"{_divisors(heads)}"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ShapeError(
            f"num_kv_heads must divide by ranks, or ranks by them: {name} has {kv_heads} for {ranks} ranks; "
            f"use a mesh of {_divisors(kv_heads)}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_linears(name: str, module: nn.Module, layers: tuple[str, ...]) -> None:
    for each in layers:
        layer = getattr(module, each, None)
        if layer is not None and (type(layer) not in (nn.Linear, OUT_PROJ) or "forward" in layer.__dict__):
            own = " with a forward of its own" if "forward" in layer.__dict__ else ""
            raise ArgumentError(
                f"projections must be nn.Linear to be sharded: {name}.{each} is a "
                f"{type(layer).__name__}{own}; shard first, replace or wrap them then"
            )


def _check_norms(name: str, module: MultiHeadAttention) -> None:
    for each in ("q_norm", "k_norm"):
        norm = getattr(module, each)
        if norm is not None and type(norm) not in (nn.RMSNorm, nn.LayerNorm):
            raise ArgumentError(
                f"norms must be nn.RMSNorm or nn.LayerNorm to be sharded: {name}.{each} is a "
                f"{type(norm).__name__}; put it in its place after sharding"
            )


def _check_shared(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Raise for a parameter that is sharded in one place and used in another, where it would come apart."""
    places: dict[Tensor, str] = {}
    sharded = {parameter for module in found.values() for parameter in module.parameters()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            place = f"{path}.{name}" if path else name
            if parameter in places and parameter in sharded:
                raise ArgumentError(
                    f"model must not share parameters that are sharded: {place} is one with "
                    f"{places[parameter]}; give each a copy first"
                )
            places[parameter] = place


def _check_random_numbers(model: nn.Module, group: Group) -> None:
    """Raise if the model drops anything, and ranks would not drop the same where it is whole."""
    if group.size() == 1 or not any(map(_drops, model.modules())):
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    said = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, said, group=group)
    if len(set(everyone)) > 1:
        raise ArgumentError(
            f"ranks must draw the same random numbers where a model has dropout: {len(set(everyone))} "
            f"different states on {group.size()} ranks; call torch.manual_seed with one seed on all of them "
            "before, or set dropout to 0"
        )


def _drops(module: nn.Module) -> bool:
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, float) and share > 0


# Sharding


def _shard_attention(module: MultiHeadAttention, mesh: DeviceMesh, layout: Placement | None) -> None:
    H, Hk, D, Dv, n = module.num_heads, module.num_kv_heads, module.head_dim, module.value_dim, mesh.size()
    heads = H // n
    assert mesh.get_local_rank() == mesh.get_group().rank(), "parts are gathered in the order they lie in"
    first = mesh.get_local_rank() * heads
    local = LocalHeads(first, heads, H, max(1, Hk // n), Hk, mesh.get_group())
    plan: dict[str, Any] = {"q_proj": Columns(), "out_proj": Rows()}
    shared = Hk % n != 0
    for name, width in (("k_proj", D), ("v_proj", Dv)):
        plan[name] = SharedRows(local.kv_first * width, width) if shared else Columns()
    if module.gate_proj is not None:
        plan["gate_proj"] = Columns()
    if module.qk_norm is not None:
        plan["q_norm"] = plan["k_norm"] = SharedNorm()
        if module.qk_norm.whole:
            plan["q_norm"] = WholeNorm(H * D, None, 1)
            used = (local.kv_first * D, D) if shared else None
            plan["k_norm"] = WholeNorm(Hk * D, used, n // Hk if shared else 1)
    if module.relative_bias is not None and not isinstance(module.relative_bias, ShardedRelativeBias):
        plan["relative_bias"] = ByHead()  # once, where layers share one
    parallelize_module(module, mesh, plan)
    held = module._parameters.get("sinks")
    if held is not None:
        placed = distribute_tensor(held.detach(), mesh, [Shard(0)])
        module.register_parameter("sinks", nn.Parameter(placed, requires_grad=held.requires_grad))
    if module._slopes is not None:
        module._slopes = Slopes(module._slopes.numbers[first : first + heads])
    module.num_heads, module.num_kv_heads, module._packed = heads, local.kv_count, None
    module.__class__ = ShardedAttention
    module.__dict__.update(local_heads=local, mesh=mesh, layout=layout)


def _shard_feed_forward(module: FeedForward, mesh: DeviceMesh, layout: Placement | None) -> None:
    plan: dict[str, Any] = {"up_proj": Columns(), "down_proj": Rows()}
    if module.gate_proj is not None:
        plan["gate_proj"] = Columns()
    parallelize_module(module, mesh, plan)
    module._packed = None
    module.__class__ = ShardedFeedForward
    module.__dict__.update(mesh=mesh, layout=layout)


def _shard_torchs(module: nn.MultiheadAttention, mesh: DeviceMesh) -> None:
    """Its packed projection taken apart, behind the same arguments."""
    ours = MultiHeadAttention.from_torch(module)
    _shard_attention(ours, mesh, None)
    for name in list(module._parameters):
        del module._parameters[name]
    del module.out_proj
    module.__dict__.pop("_qkv_same_embed_dim", None)
    module.__class__ = ShardedTorchAttention  # type: ignore[assignment]
    module._modules["attention"] = ours


@torch.no_grad()
def _send_the_rest(model: nn.Module, group: Group) -> None:
    """What is whole on every rank is the first rank's."""
    for held in _whole(model):
        if group.size() > 1 and not held.is_meta:
            sent = held.contiguous()
            torch.distributed.broadcast(sent, group=group, group_src=0)
            if sent is not held:
                held.copy_(sent)


def _whole(model: nn.Module) -> Iterator[Tensor]:
    for held in (*model.parameters(), *model.buffers()):
        if not isinstance(held, DTensor):
            yield held.detach()


# Optimisers that were made before


def _watch_optimizers(before: list[weakref.ref[nn.Parameter]], model: nn.Module) -> None:
    """Let every optimiser that holds a parameter which sharding replaced raise when it steps.

    Such a parameter gets no gradient any more, and an optimiser skips it without a word. torch keeps no list
    of optimisers; the garbage collector knows them all, and is asked only if an old parameter is still held.
    """
    kept = {id(parameter) for parameter in model.parameters()}
    replaced = [ref for ref in before if (parameter := ref()) is not None and id(parameter) not in kept]

    def stale(optimizer: Optimizer) -> tuple[int, int]:
        """How many of its parameters were replaced, and how many it has."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return sum(id(ref()) in held for ref in replaced), len(held)

    def check(optimizer: Optimizer, args: object, kwargs: object) -> None:
        count, total = stale(optimizer)
        if count:
            raise ArgumentError(
                f"optimizer must be made after shard_heads: {count} of the {total} parameters of this "
                f"{type(optimizer).__name__} were replaced, and what took their place would not be trained; "
                "make it anew with model.parameters()"
            )

    for found in gc.get_objects() if replaced else ():
        if issubclass(type(found), Optimizer) and any(stale(found)[:1]):
            found.register_step_pre_hook(check)
