"""`shard_sequence`: a model whose tokens are sharded over a group of ranks.

Each rank runs the full model on its tokens. Only attention uses the tokens of other ranks: it passes keys and
values round the ring. Positions are those in the full sequence.

Letters: B batch, T query_len, S key_len, H num_heads, E d_model; t, s this rank's of T, S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..arguments import rules_and_scoring, text_of, under_autocast
from ..errors import ArgumentError, HeadwiseError
from ..masks import Mask
from ..models.transformer import Transformer
from ..nn import MultiHeadAttention
from ..nn import options as module_options
from ..nn.module_call import as_lengths, check, check_lengths, lone, no_use, rules_of
from ..nn.options import Attended, Inputs
from ..nn.ragged import check_alone, without_padding
from .ring_attention import Shard
from .sequence import Mesh, Ring, check_order, fingerprint, not_split, split_error
from .sharded_map import agree_on_layouts, attend_shard

Model = TypeVar("Model", bound=nn.Module)
TOKENS = {MultiHeadAttention: ("query", "key", "value"), Transformer: ("ids", "target_ids")}  # of a call
REASON = "attention sends messages between ranks, which cannot be compiled; compile without fullgraph=True"


def shard_sequence(
    model: Model,
    mesh: Mesh = None,
    axis: str | None = None,
    order: str = "zigzag",
    length: int | None = None,
) -> Model:
    """Change a model in place so that each rank runs it on its own tokens of a sequence.

    Every `headwise.MultiHeadAttention` in it then attends to the tokens of all ranks. All ranks must run the
    same model with the same weights on the same batch. Pass masks, biases, `lengths` and `documents` for the
    whole sequence, as in one process; pass inputs and `positions` for this rank's tokens (`split`). Maps,
    `watch` and statistics cover the whole sequence and are the same on every rank. The loss is the sum over
    ranks. After backward, a rank has the gradients from its own tokens; `sum_gradients` adds them up.

    A call of `model` raises if `split` was used with another order, or if the tokens are the same on every
    rank, since they were not split then. Other tokens that do not come from `split` are assumed to be in
    `order`.

    Args:
        model: a `headwise.MultiHeadAttention`, a `headwise.models.Transformer`, or anything made of them.
        mesh: a `DeviceMesh`, a process group, or None for all ranks; axis: the dimension of a mesh that has
            several.
        order: "zigzag", which distributes the work of a causal mask evenly, or "in order". Results are the
            same.
        length: the length of the whole sequence, if it is always the same. Without it, ranks exchange it in
            every call: a small message, and on a GPU a synchronization.

    Raises:
        ArgumentError: the model has no headwise attention, or the order or mesh is unknown. Calls raise for
            tokens that were not split, or split in another order, and for dropout on weights, a cache or
            generation, which are not supported over ranks.

    Example:
        model = hw.parallel.shard_sequence(model, mesh)
        logits = model(hw.parallel.split(ids, mesh))                  # under torchrun, on every rank
    """
    check_order(order)
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    if not layers:
        raise ArgumentError(
            f"model must contain headwise.MultiHeadAttention: got {type(model).__name__} without one; "
            "convert torch's layers, also after headwise.adopt, with MultiHeadAttention.from_torch"
        )
    sharding = SequenceSharding(Ring.of(mesh, axis), order, length)
    for module in model.modules():
        if isinstance(module, (MultiHeadAttention, Transformer)):
            module._sharding = sharding
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, TokenCheck):  # of an earlier shard_sequence
                hook.remove()
    TokenCheck(sharding).register(model)
    return model


class TokenCheck:
    """A forward pre-hook of the sharded model that checks how the tokens of each call were split.

    Layers inside cannot check that: their inputs were computed from the tokens and are not marked.
    """

    def __init__(self, sharding: SequenceSharding | None) -> None:
        self.sharding = sharding  # None in a model that was saved and loaded

    def register(self, model: nn.Module) -> None:
        """Check the calls of this model."""
        self._handle = model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        """Stop checking calls."""
        self._handle.remove()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.sharding is None or kwargs.get("last") or kwargs.get("cache") is not None:
            return  # generation is refused inside
        for kind, names in TOKENS.items():
            if isinstance(module, kind):
                named = dict(zip(names, args, strict=False)) | kwargs
                tokens, dim = [[named.get(name)] for name in names], 1
                break
        else:  # any argument may be the tokens; others may be full masks, which are not split
            tokens, dim = [[*args, *kwargs.values()]], None
        tensors = [[value for value in values if isinstance(value, Tensor)] for values in tokens]
        devices = {tensor.device for tensor in (*chain(*tensors), *islice(module.parameters(), 1))}
        device = next((kind for kind in devices if kind.type != "cpu"), torch.device("cpu"))
        self.sharding.check_tokens(tensors, dim, device)


@torch.no_grad()
def sum_gradients(model: nn.Module, mesh: Mesh = None, axis: str | None = None) -> None:
    """Add up the gradients of a model's weights over ranks, in place, after backward and before a step.

    All gradients of one dtype are sent in one message. If weights are DTensors over other ranks, each rank
    adds up its part. Do not use it for weights under FSDP or DDP: these take the mean over ranks, so multiply
    the loss by the number of ranks that share a sequence instead.

    Raises:
        ArgumentError: weights are sharded over ranks that share the sequence, for example by FSDP.
    """
    ring = Ring.of(mesh, axis)
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not learning:
        return
    reached = ring.numbers([float(p.grad is not None) for _, p in learning], learning[0][1].device)
    for (name, parameter), *by_rank in zip(learning, *reached, strict=True):
        if not any(by_rank):
            continue  # unused on all ranks: no gradient, as in one process
        if isinstance(parameter, DTensor):
            shared = sorted({*ring.members} & {*parameter.device_mesh.mesh.flatten().tolist()})
            if len(shared) > 1:
                raise ArgumentError(
                    f"gradients must be summed only once: {name} is sharded over ranks {shared}, which also "
                    "share the sequence; multiply the loss by their number instead of calling sum_gradients"
                )
        if parameter.grad is None:  # used on other ranks only
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for grads in kinds.values():
        flat = ring.add_up(torch.cat([grad.reshape(-1) for grad in grads]))
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view(grad.shape))


@dataclass(frozen=True, eq=False)
class SequenceSharding:
    """How a model's sequence is sharded over ranks; its layers call it (`nn.options.Sharding`)."""

    ring: Ring
    order: str = "zigzag"
    length: int | None = None

    def __deepcopy__(self, memo: object) -> SequenceSharding:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a saved model is loaded in one process

    @torch.compiler.disable(reason=REASON)
    def check_tokens(self, tokens: Sequence[Sequence[Tensor]], dim: int | None, device: torch.device) -> None:
        """Raise if this rank's tokens are not split in the model's order.

        Args:
            tokens: lists of tensors, the same number of lists on every rank. Some tensors of a list may be
                the same on all ranks, but not all of them.
            dim: the dimension of the tokens; None if it is not known.
            device: for the message between ranks.
        """
        errors = (split_error(tensor, self.ring, self.order, dim) for tensor in chain(*tokens))
        error = next(filter(None, errors), None)
        if self.length is not None:  # no message is needed: tokens that are not split have another length
            if error is not None:
                raise error
            return
        prints = self.ring.agree([fingerprint(*tensors) for tensors in tokens], error, device)
        for index, tensors in enumerate(tokens):
            same = (
                not_split([numbers[index] for numbers in prints], tensors[0], self.order) if tensors else None
            )
            if same is not None:
                raise same

    @torch.compiler.disable(reason=REASON)
    def positions(self, ids: Tensor) -> tuple[Tensor, int]:
        """Return the positions of this rank's tokens ids [B, t], int [t], and the length of the sequence."""
        like = ids[:, None, :, None]  # [B, 1, t, 1]
        layout, _ = agree_on_layouts(self.ring, self.order, self.length, like, like, like)
        return layout.positions(self.ring.rank).to(ids.device), layout.length

    @torch.compiler.disable(reason=REASON)
    def attend(self, module: MultiHeadAttention, inputs: Inputs) -> Attended:
        """Compute a call of a module for this rank's tokens."""
        query, key, value, mask, bias, positions, _, lengths, documents = inputs
        error: HeadwiseError | TypeError | None = None
        itself = key is None or key is query
        shapes = (query, query, query)
        try:
            _check_call(module, inputs)
            if key is None and value is None:
                key = value = query
            elif key is None or value is None:
                raise lone(key, value)
            check(module, query, key, value)
            shapes = (query[:, None], key[:, None], value[:, None])  # [B, 1, t, E] and so on
            if positions is not None and module.rope is None:
                raise no_use(positions)
            if positions is not None:
                module_options.check_pair_or_positions(positions, *shapes[:2], itself)
        except (HeadwiseError, TypeError) as refused:
            error = refused
        length = self.length if itself else None
        queries, keys = agree_on_layouts(self.ring, self.order, length, *shapes, error)
        assert key is not None and value is not None
        B, real = query.shape[0], None
        rules = Mask() if mask is None else rules_of(mask, B, queries.length, keys.length, itself)
        if lengths is not None:
            counts = as_lengths(lengths).to(query.device)
            check_lengths(counts.tolist(), B, queries.length)
            rules = rules & Mask.padding(counts, counts)
            real = queries.positions(self.ring.rank).to(query.device) < counts[:, None]
            query = without_padding(query, real)
            key = value = query
        elif documents is not None:
            rules = rules & Mask.documents(documents.to(query.device))
        q, k, v = module._project(query, key, value)
        if module.rope is not None and positions is None:
            # the last query is at the last key; with more queries than keys the first are below 0
            of_keys = keys.positions(self.ring.rank)
            of_queries = queries.positions(self.ring.rank) + (keys.length - queries.length)
            q = module.rope.rotate(q, of_queries.to(q.device))
            k = module.rope.rotate(k, of_keys.to(k.device))
        elif module.rope is not None:
            q, k = module_options.rotated(module.rope, q, k, positions, 0, itself=itself)
        q, k, v = under_autocast(q, k, v)
        shape = (B, q.shape[1], queries.length, keys.length)
        chosen = module_options.attention_options(module, rules, bias, q.device)
        checked = rules_and_scoring(q, shape, chosen)
        heads, weights = attend_shard(Shard(self.ring, q, k, *checked, queries, keys), v)
        return Attended(heads, weights, v, query, real)


def _check_call(module: MultiHeadAttention, inputs: Inputs) -> None:
    """Raise for arguments that are not supported with a sharded sequence."""
    cache, lengths, documents = inputs.cache, inputs.lengths, inputs.documents
    if cache is not None:
        raise ArgumentError(
            f"cache must be None if the sequence is sharded over ranks: got {type(cache).__name__}; "
            "generate with a model in one process"
        )
    if module.training and module.dropout:
        raise ArgumentError(
            f"dropout must be 0 if the sequence is sharded over ranks: got {module.dropout:g}; set it to 0 "
            "or call eval()"
        )
    if lengths is not None or documents is not None:
        check_alone(inputs)
    if documents is not None and not isinstance(documents, Tensor):
        raise ArgumentError(f"documents must be a tensor: got {text_of(documents)}; use torch.as_tensor")
