"""`shard_heads`: shard the heads of a model's attention over the devices of a mesh.

    find every attention and feed-forward of headwise, every attention of torch
      -> check all of them -> shard the layers of each in place (sharded_layers.py)
      -> broadcast everything else from the first rank

A sharded module keeps its identity; its class becomes one of those below.

    x, the same on every rank -> q, k, v of this rank's heads -> attention -> out_proj -> sum over ranks

Letters: B batch, T query_len, S key_len, E d_model, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim, n
ranks.
"""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from ..arguments import REQUIRED, text_of, with_displayed_signature
from ..errors import ArgumentError, ShapeError
from ..foreign_masks import from_torch
from ..map import AttentionMap
from ..masks import Mask
from ..models.layers import FeedForward
from ..nn import Memory, MultiHeadAttention, MultiheadAttention
from ..nn.as_torch.torch_arguments import content_of
from ..nn.options import Inputs, Slopes
from ..nn.packed_weights import OUT_PROJ
from ..scoring import Bias
from .local_heads import Group, LocalHeads, copy_to_ranks, gather_from_ranks, reduce_from_ranks
from .sharded_layers import (
    SHARED_NORMS,
    WHOLE_NORMS,
    ColumnLinear,
    RowLinear,
    ShardedRelativeBias,
    SharedLinear,
    local_part,
    shard,
)

Model = TypeVar("Model", bound=nn.Module)

TORCH_CLASSES = (nn.MultiheadAttention, MultiheadAttention)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj")
CHANNELS = ("gate_proj", "up_proj", "down_proj")


def shard_heads(
    model: Model, mesh: DeviceMesh, *, axis: str = "tp", output_layout: Placement | None = None
) -> Model:
    """Shard the heads of a model over the devices of a mesh, in place: each rank gets H / n of each layer.

        mesh = torch.distributed.init_device_mesh("cuda", (4,))
        hw.parallel.shard_heads(model, mesh)

    `headwise.MultiHeadAttention` is sharded by heads, the feed-forward networks of `headwise.models` by
    channels. torch's `MultiheadAttention`, adopted or not, is first split into separate projections and then
    sharded by heads. Everything else is replicated from the first rank. Each rank calls the model with the
    same input and gets the same output; gradients and an optimiser's steps are those of one process.
    `hw.watch`, `hw.ablate` and similar functions work with all heads on every rank, under their numbers in
    the whole model.

    Parameters become DTensors: `torch.distributed.checkpoint` writes and reads them on any number of ranks,
    and `fully_shard` goes on top, on another axis of the mesh. Shard first, then make the optimiser: an
    optimiser that was made before holds the replaced parameters, and its step raises.

    The number of key/value heads must be a multiple of n or divide n; in the second case several ranks hold a
    copy of the same key/value head.

    Args:
        model: a model with attention, or an attention layer; it may be on the meta device.
        mesh: a mesh with one axis; of a mesh with several, `axis` is used.
        axis: the name of the axis over which heads are sharded.
        output_layout: only for a single `MultiHeadAttention` or `FeedForward`: its output is then a DTensor
            with this layout, `Replicate()`, or `Shard(1)` if the sequence is sharded between layers. Inputs
            may be DTensors in any case.

    Returns:
        The model.

    Raises:
        ShapeError: the number of heads is not a multiple of the number of ranks.
        ArgumentError: the model has no attention; attention is sharded already, parametrised, has replaced
            parts or shares parameters with other modules; the mesh has several axes, none of this name; the
            model has dropout and the random states of ranks differ.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module: got {text_of(model)}; pass the model itself")
    mesh = _axis_of(mesh, axis)
    group = mesh.get_group()
    modules = _shardable_modules(model)
    if output_layout is not None and not isinstance(model, MultiHeadAttention | FeedForward):
        raise ArgumentError(
            f"output_layout must be None unless model is a MultiHeadAttention or FeedForward: got "
            f"{type(model).__name__}; shard its layers one by one; modules between them then get DTensors"
        )
    _check_shared(model, modules)
    for path, module in modules.items():
        _check(path, module, mesh.size())
    _check_random_numbers(model, group)
    before = [
        weakref.ref(parameter) for parameter in model.parameters()
    ]  # weak, so that replaced parameters are freed
    for path, module in modules.items():
        if isinstance(module, MultiHeadAttention):
            _shard_attention(module, mesh, output_layout)
        elif isinstance(module, FeedForward):
            _shard_feed_forward(module, mesh, output_layout)
        else:
            assert isinstance(module, nn.MultiheadAttention), path
            _shard_torch_attention(module, mesh)
    for module in model.modules():  # the native path of an encoder needs full weights
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(part, ShardedTorchAttention) for part in module.modules()
        ):
            module.use_nested_tensor = False
    _broadcast_others(model, group)
    _check_optimizers(before, model)
    return model


def _axis_of(mesh: object, axis: str) -> DeviceMesh:
    """Return a mesh of one axis; raise `ArgumentError` if there is no such axis."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh must be a torch.distributed.DeviceMesh: got {text_of(mesh)}; make one with "
            'torch.distributed.init_device_mesh("cuda", (ranks,))'
        )
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ArgumentError(
            f"mesh must have an axis named {axis!r}, or only one axis: got {tuple(mesh.shape)} named "
            f"{names or None}; pass the name of an axis as axis=, or names to the mesh as mesh_dim_names="
        )
    return mesh[axis]


def _shardable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that can be sharded, by path, each once."""
    kinds = (MultiHeadAttention, FeedForward, nn.MultiheadAttention, ShardedTorchAttention)
    modules: dict[str, nn.Module] = {
        path: module for path, module in model.named_modules() if isinstance(module, kinds)
    }
    attends = any(not isinstance(module, FeedForward) for module in modules.values())
    if not attends and not isinstance(model, FeedForward):
        advice = "use headwise.MultiHeadAttention in it"
        if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
            advice = "shard it by its own tp_plan; headwise.watch then measures all of its heads"
        raise ArgumentError(
            "model must contain headwise.MultiHeadAttention or torch.nn.MultiheadAttention: got "
            f"{type(model).__name__} without one; {advice}"
        )
    return modules


# Checks


def _check(path: str, module: nn.Module, ranks: int) -> None:
    """Raise if a module cannot be sharded over this number of ranks."""
    name = path or "the model itself"
    if isinstance(module, ShardedAttention | ShardedFeedForward | ShardedTorchAttention):
        raise ArgumentError(
            f"model must not be sharded already: {name} is a {type(module).__name__}; shard a model once"
        )
    for parameter_name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise ArgumentError(
                f"model must have plain parameters to be sharded: {name}.{parameter_name} is a "
                f"{type(parameter).__name__}; call shard_heads first, then fully_shard and the like"
            )
    if type(module) not in (MultiHeadAttention, FeedForward, *TORCH_CLASSES):
        raise ArgumentError(
            f"model must have layers of headwise's or torch's own classes to be sharded: {name} is a "
            f"{type(module).__module__}.{type(module).__qualname__}; shard first, then wrap or parametrise"
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
        for option in [option for option, is_used in appends.items() if is_used]:
            raise ArgumentError(
                f"model must not append keys if heads are sharded: {name} has {option}=True; leave it out"
            )
        _check_linears(name, module, ("out_proj",))
    if heads % ranks:
        raise ShapeError(
            f"num_heads must be a multiple of the number of ranks: {name} has {heads} for {ranks} ranks; use "
            f"a mesh of size {_divisors(heads)}"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ShapeError(
            f"num_kv_heads must be a multiple or a divisor of the number of ranks: {name} has {kv_heads} for "
            f"{ranks} ranks; use a mesh of size {_divisors(kv_heads)}"
        )


def _divisors(number: int) -> str:
    """Return the divisors of a number as text."""
    return " or ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_linears(name: str, module: nn.Module, layers: tuple[str, ...]) -> None:
    """Raise `ArgumentError` if a projection is not a plain nn.Linear."""
    for layer_name in layers:
        layer = getattr(module, layer_name, None)
        if layer is not None and (type(layer) not in (nn.Linear, OUT_PROJ) or "forward" in layer.__dict__):
            wrapped = " whose forward was replaced" if "forward" in layer.__dict__ else ""
            raise ArgumentError(
                f"projections must be nn.Linear to be sharded: {name}.{layer_name} is a "
                f"{type(layer).__name__}{wrapped}; shard first, then replace or wrap them"
            )


def _check_norms(name: str, module: MultiHeadAttention) -> None:
    """Raise `ArgumentError` if a norm is not of torch's classes."""
    for norm_name in ("q_norm", "k_norm"):
        norm = getattr(module, norm_name)
        if norm is not None and type(norm) not in (nn.RMSNorm, nn.LayerNorm):
            raise ArgumentError(
                f"norms must be nn.RMSNorm or nn.LayerNorm to be sharded: {name}.{norm_name} is a "
                f"{type(norm).__name__}; shard first, then replace the norm"
            )


def _check_shared(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Raise if a parameter to be sharded is also used elsewhere, since sharding makes separate copies."""
    places: dict[Tensor, str] = {}
    sharded = {parameter for module in modules.values() for parameter in module.parameters()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            place = f"{path}.{name}" if path else name
            if parameter in places and parameter in sharded:
                raise ArgumentError(
                    f"model must not share sharded parameters: {place} and {places[parameter]} are the same "
                    "parameter; give each module its own copy first"
                )
            places[parameter] = place


def _check_random_numbers(model: nn.Module, group: Group) -> None:
    """Raise if the model has dropout and the random states of the ranks differ."""
    if group.size() == 1 or not any(map(_has_dropout, model.modules())):
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()
    digests: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        raise ArgumentError(
            f"ranks must have the same random state if a model has dropout: found {len(set(digests))} "
            f"states on {group.size()} ranks; call torch.manual_seed with the same seed on all ranks before, "
            "or set dropout to 0"
        )


def _has_dropout(module: nn.Module) -> bool:
    """Return True if a module has a dropout above 0."""
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, float) and share > 0


# Sharding


def _shard_attention(module: MultiHeadAttention, mesh: DeviceMesh, layout: Placement | None) -> None:
    """Shard the heads of headwise's attention, in place."""
    H, Hk, D, Dv, n = module.num_heads, module.num_kv_heads, module.head_dim, module.value_dim, mesh.size()
    heads = H // n
    assert mesh.get_local_rank() == mesh.get_group().rank(), "parts are gathered in the order of ranks"
    first = mesh.get_local_rank() * heads
    local = LocalHeads(first, heads, H, max(1, Hk // n), Hk, mesh.get_group())
    shared = Hk % n != 0  # several ranks hold the same key head
    shard(module.q_proj, mesh, ColumnLinear, Shard(0))
    for layer, width in ((module.k_proj, D), (module.v_proj, Dv)):
        if shared:
            shard(layer, mesh, SharedLinear, Replicate(), used=(local.kv_first * width, width))
        else:
            shard(layer, mesh, ColumnLinear, Shard(0))
    shard(module.out_proj, mesh, RowLinear, Shard(1), bias=Replicate())
    if module.gate_proj is not None:
        shard(module.gate_proj, mesh, ColumnLinear, Shard(0))
    _shard_norms(module, mesh, local, shared)
    if module.relative_bias is not None and not isinstance(module.relative_bias, ShardedRelativeBias):
        shard(module.relative_bias, mesh, ShardedRelativeBias, Shard(1))  # once, if layers share it
    sinks = module._parameters.get("sinks")
    if sinks is not None:
        placed = distribute_tensor(sinks.detach(), mesh, [Shard(0)])
        module.register_parameter("sinks", nn.Parameter(placed, requires_grad=sinks.requires_grad))
    if module._slopes is not None:
        module._slopes = Slopes(module._slopes.numbers[first : first + heads])
    module.num_heads, module.num_kv_heads, module._packed = heads, local.kv_count, None
    module.__class__ = ShardedAttention
    module.__dict__.update(local_heads=local, mesh=mesh, layout=layout)


def _shard_norms(module: MultiHeadAttention, mesh: DeviceMesh, local: LocalHeads, shared: bool) -> None:
    """Shard the norms of queries and keys; shared: some ranks hold the same key head."""
    if module.qk_norm is None:
        return
    assert module.q_norm is not None and module.k_norm is not None
    if not module.qk_norm.whole:
        for norm in (module.q_norm, module.k_norm):
            shard(norm, mesh, SHARED_NORMS[type(norm)], Replicate())
        return
    q_norm, k_norm, D = module.q_norm, module.k_norm, module.head_dim
    shard(q_norm, mesh, WHOLE_NORMS[type(q_norm)], Shard(0), width=local.total * D, copies=1, used=None)
    shard(
        k_norm,
        mesh,
        WHOLE_NORMS[type(k_norm)],
        Replicate() if shared else Shard(0),
        width=local.kv_total * D,
        copies=mesh.size() // local.kv_total if shared else 1,
        used=(local.kv_first * D, D) if shared else None,
    )


def _shard_feed_forward(module: FeedForward, mesh: DeviceMesh, layout: Placement | None) -> None:
    """Shard the hidden channels of a feed-forward, in place."""
    shard(module.up_proj, mesh, ColumnLinear, Shard(0))
    if module.gate_proj is not None:
        shard(module.gate_proj, mesh, ColumnLinear, Shard(0))
    shard(module.down_proj, mesh, RowLinear, Shard(1), bias=Replicate())
    module._packed = None
    module.__class__ = ShardedFeedForward
    module.__dict__.update(mesh=mesh, layout=layout)


def _shard_torch_attention(module: nn.MultiheadAttention, mesh: DeviceMesh) -> None:
    """Replace torch's packed projections by three sharded ones; the arguments of forward do not change."""
    ours = MultiHeadAttention.from_torch(module)
    _shard_attention(ours, mesh, None)
    for name in list(module._parameters):
        del module._parameters[name]
    del module.out_proj
    module.__dict__.pop("_qkv_same_embed_dim", None)
    module.__class__ = ShardedTorchAttention  # type: ignore[assignment]
    module._modules["attention"] = ours


@torch.no_grad()
def _broadcast_others(model: nn.Module, group: Group) -> None:
    """Broadcast the parameters and buffers that are not sharded from the first rank."""
    for tensor in (*model.parameters(), *model.buffers()):
        if group.size() > 1 and not isinstance(tensor, DTensor) and not tensor.is_meta:
            sent = tensor.detach().contiguous()
            torch.distributed.broadcast(sent, group=group, group_src=0)
            tensor.copy_(sent)


def _check_optimizers(before: list[weakref.ref[nn.Parameter]], model: nn.Module) -> None:
    """Make every optimiser that holds a replaced parameter raise an error in its next step.

    Such a parameter gets no gradient any more, and the optimiser would skip it silently. torch has no list of
    optimisers, so the objects of the garbage collector are searched, if a replaced parameter is still alive.
    """
    current = {id(parameter) for parameter in model.parameters()}
    replaced = [ref for ref in before if (parameter := ref()) is not None and id(parameter) not in current]

    def stale(optimizer: Optimizer) -> tuple[int, int]:
        """Return how many of its parameters were replaced, and how many it has."""
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return sum(id(ref()) in parameters for ref in replaced), len(parameters)

    def check(optimizer: Optimizer, args: object, kwargs: object) -> None:
        count, total = stale(optimizer)
        if count:
            raise ArgumentError(
                f"optimizer must be created after shard_heads: {count} of the {total} parameters of this "
                f"{type(optimizer).__name__} were replaced, and the new ones would not be trained; create it "
                "again with model.parameters()"
            )

    for candidate in gc.get_objects() if replaced else ():
        if issubclass(type(candidate), Optimizer) and stale(candidate)[0]:
            candidate.register_step_pre_hook(check)


# The classes of sharded modules


_thread = threading.local()  # draws: the module whose call draws this rank's random numbers


class ShardedAttention(MultiHeadAttention):
    """`MultiHeadAttention` whose heads are sharded over ranks; `local_heads` says which are on this one.

    `num_heads`, `num_kv_heads`, `sinks`, maps, `head_outputs` and caches are those of this rank's heads;
    masks and biases are given for all heads. Inputs (plain tensors or DTensors) and the output are the same
    on every rank.
    """

    local_heads: LocalHeads
    mesh: DeviceMesh
    layout: Placement | None  # of the output, as a DTensor; None: a plain tensor

    @property
    def sinks(self) -> Tensor | None:  # type: ignore[override]
        """The sinks of this rank's heads; the parameter itself is in `named_parameters`."""
        parameter = self._parameters.get("sinks")
        return None if parameter is None else local_part(parameter)

    @with_displayed_signature
    def forward(
        self,
        query: Tensor = REQUIRED,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Bias | None = None,
        **more: Any,
    ) -> tuple[Tensor, AttentionMap | None]:
        """As `MultiHeadAttention.forward`: (the output of all heads, the map of this rank's heads)."""
        query, key, value, mask, bias, *_ = self._received(Inputs(query, key, value, mask, bias))
        with self._rank_random_state(query):
            output, weights = super().forward(query, key, value, mask, bias=bias, **more)
        return self._handed_on(output), weights

    @with_displayed_signature
    def head_outputs(
        self,
        query: Tensor = REQUIRED,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Bias | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the outputs of this rank's heads, [B, heads on this rank, T, Dv]."""
        query, key, value, mask, bias, *_ = self._received(Inputs(query, key, value, mask, bias))
        with self._rank_random_state(query):
            return super().head_outputs(query, key, value, mask, bias=bias, **more)

    def remember(self, key: Tensor, value: Tensor | None = None, mask: Mask | Tensor | None = None) -> Memory:
        """Return a `Memory` as `MultiHeadAttention.remember` does, for this rank's heads."""
        value = None if value is None or value is key else self._enter(value)
        key = self._enter(key)
        return super().remember(key, value, self.local_heads.mask(mask, len(key), 1))

    def reset_parameters(self) -> None:
        """Raise an error: each rank would draw different numbers.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"reset_parameters must be called before heads are sharded: this rank has {self.local_heads}; "
            "initialize the weights in one process and load them with torch.distributed.checkpoint.state_dict"
        )

    def extra_repr(self) -> str:
        """Return this rank's heads and the shapes."""
        return f"{self.local_heads}; {super().extra_repr()}"

    def _received(self, inputs: Inputs) -> Inputs:
        """Return inputs as plain tensors, with mask and bias of this rank's heads."""
        entered: dict[int, Any] = {}  # by id: self-attention is recognised by identical tensors
        for x in inputs[:3]:
            if isinstance(x, Tensor) and id(x) not in entered:
                entered[id(x)] = self._enter(x)
        query, key, value, mask, bias, *_ = inputs
        query, key, value = (
            entered.get(id(query), query),
            entered.get(id(key), key),
            entered.get(id(value), value),
        )
        if isinstance(query, Tensor) and query.ndim == 3:
            mask = self.local_heads.mask(mask, query.shape[0], query.shape[1])
        bias = self.local_heads.bias(bias)
        return inputs._replace(query=query, key=key, value=value, mask=mask, bias=bias)

    def _enter(self, x: Tensor) -> Tensor:
        """Return an input as a plain tensor whose gradient is summed over ranks."""
        return copy_to_ranks(full_tensor(x), self.local_heads.group)

    def _handed_on(self, output: Tensor) -> Tensor:
        """Return the output in the requested layout."""
        return as_dtensor(output, self.mesh, self.layout)

    def _attend(self, inputs: Inputs) -> tuple[Tensor, AttentionMap, Tensor]:
        with self._rank_random_state(inputs.query):
            return super()._attend(inputs)

    @contextmanager
    def _rank_random_state(self, x: object) -> Iterator[None]:
        """Draw dropout from random numbers of this rank; afterwards the state is the same on all ranks.

        Otherwise ranks would drop the same weights of different heads.
        """
        drops = self.training and self.dropout and isinstance(x, Tensor) and not torch.compiler.is_compiling()
        if not drops or getattr(_thread, "draws", None) is self:  # a call inside forward
            yield
            return
        assert isinstance(x, Tensor)
        seed = int(torch.randint(2**62, ())) + self.local_heads.first  # the same draw on every rank
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.default_generator.manual_seed(seed)
            if x.is_cuda:
                torch.cuda.default_generators[x.device.index].manual_seed(seed)
            before, _thread.draws = getattr(_thread, "draws", None), self
            try:
                yield
            finally:
                _thread.draws = before


class ShardedFeedForward(FeedForward):
    """`FeedForward` whose hidden channels are sharded over ranks."""

    mesh: DeviceMesh
    layout: Placement | None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]"""
        output = super().forward(copy_to_ranks(full_tensor(x), self.mesh.get_group()))
        return as_dtensor(output, self.mesh, self.layout)


def full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, with gradients; return another tensor unchanged."""
    if not isinstance(x, DTensor):
        return x
    plain: Tensor = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
    return plain


def as_dtensor(output: Tensor, mesh: DeviceMesh, layout: Placement | None) -> Tensor:
    """Convert an output, the same on every rank, to a DTensor with this layout; None leaves it unchanged."""
    if layout is None:
        return output
    placed: Tensor = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
    return placed.redistribute(placements=[layout])  # type: ignore[attr-defined]


class ShardedTorchAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with its heads sharded: torch's arguments and masks (True = hidden).

    `attention` computes it. Returned weights are those of all heads, before dropout; the weights of a query
    that may attend to no key are 0.
    """

    attention: ShardedAttention
    batch_first: bool
    # torch's encoder reads these before it takes its native path, which does not work here
    in_proj_weight = in_proj_bias = None
    _qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch: (output, weights or None)."""
        if is_causal and attn_mask is None:
            raise ArgumentError(
                "is_causal must be given with the attn_mask that it describes: got is_causal=True alone; "
                "pass attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(length)"
            )
        is_unbatched, itself = query.ndim == 2, key is query and value is query
        inputs = [query] if itself else [query, key, value]
        if is_unbatched:
            inputs = [x[None] for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = inputs * 3 if itself else inputs
        mask, bias = self._rules(q, k, key_padding_mask, attn_mask)
        output, weights_map = self.attention(q, k, v, mask, bias=bias, need_weights=need_weights)
        weights = None if weights_map is None else self._weights(weights_map, average_attn_weights)
        if is_unbatched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _rules(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Mask, Tensor | None]:
        """Convert torch's masks to a mask and a bias."""
        (B, T, _), S = q.shape, k.shape[1]
        if padding is not None and padding.is_floating_point():  # torch's encoder converts bool masks
            hidden = padding == -torch.inf
            padding = padding if bool(padding.masked_fill(hidden, 0).any()) else hidden
        causal = False
        if attn_mask is not None and attn_mask.ndim == 2 and T == S:
            content = content_of(attn_mask)
            causal = content is not None and content.causal
        heads = self.attention.local_heads.total
        mask_to_read = None if causal else attn_mask
        mask, bias = from_torch(mask_to_read, padding, num_heads=heads, query_len=T, key_len=S, batch=B)
        return (mask & Mask.causal() if causal else mask), bias

    def _weights(self, weights_map: AttentionMap, average: bool) -> Tensor:
        """Return the weights of all heads, or their mean over heads."""
        group = self.attention.local_heads.group
        if average:
            return reduce_from_ranks(weights_map.mean_heads(), group) / group.size()
        return gather_from_ranks(weights_map.dense(), 1, group)
