"""Heads over devices: `hw.parallel.shard_heads` on groups of processes, against one process.

Each group runs many checks, since a group takes longer to start than most of them to run. What a rank finds
wrong is raised with its traceback.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headwise as hw
from headwise.errors import ArgumentError, ShapeError
from headwise.listeners.active import local_heads_of
from headwise.models import Transformer, TransformerConfig
from headwise.nn import Buckets, QKNorm, Rope
from judge import assert_judged
from process_groups import run_ranks

B, T, S, E = 2, 7, 11, 24
HALF = torch.tensor([0, 0, 0, 1, 1, 1, 1])

# Options of a module, and what a call of it is given.
CASES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "plain": ({}, dict),
    "causal without biases": ({"causal": True, "bias": False}, dict),
    "a bias of the output alone": ({"bias": False, "out_bias": True}, dict),
    "grouped": ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 5}, dict),
    "multi-query": ({"num_kv_heads": 1, "head_dim": 5, "value_dim": 3}, dict),
    "rope": ({"rope": Rope(base=100.0), "causal": True}, lambda: {"positions": torch.arange(3, 3 + T)}),
    "alibi": ({"alibi": True, "num_heads": 12}, dict),
    "relative bias": ({"relative_bias": Buckets(8, 16)}, dict),
    "norms of a head": ({"qk_norm": "rms"}, dict),
    "norms of shared heads": ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 5, "qk_norm": "layer"}, dict),
    "norms of all heads": ({"qk_norm": QKNorm("rms", whole=True)}, dict),
    "norms of all shared heads": (
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 5, "qk_norm": QKNorm("layer", whole=True)},
        dict,
    ),
    "a gate per head": ({"gate": "head"}, dict),
    "a gate per channel": ({"gate": "channel", "value_dim": 5}, dict),
    "sinks and a soft cap": ({"sinks": True, "softcap": 3.0, "window": 3}, dict),
    "lengths": (
        {"qk_norm": "rms", "alibi": True, "sinks": True, "gate": "head"},
        lambda: {"lengths": [3, 7]},
    ),
    "documents": ({"causal": True, "relative_bias": Buckets(8, 16)}, lambda: {"documents": HALF}),
    "a mask of each head": ({}, lambda: {"mask": _bits(B, 4, T, T)}),
    "a rule of keys for each head": ({}, lambda: {"mask": _bits(B, 4, 1, T)}),
    "a mask of all heads": ({}, lambda: {"mask": _bits(B, 1, T, T)}),
    "rules": ({"causal": True}, lambda: {"mask": hw.Mask.padding(torch.tensor([3, 7]))}),
    "a bias of each head": ({"alibi": True}, lambda: {"bias": _numbers(4, T, T)}),
    "a bias of all heads": ({}, lambda: {"bias": _numbers(B, 1, T, T)}),
    "several biases": (
        {},
        lambda: {
            "bias": (
                hw.scoring.alibi(4),
                hw.scoring.Relative(_numbers(4, 5)),
                _numbers(1, 4, 1, T),
            )
        },
    ),
    "cross-attention": (
        {"kdim": 13, "vdim": 17},
        lambda: {"key": _numbers(B, S, 13), "value": _numbers(B, S, 17)},
    ),
    "one memory": ({"kdim": 13, "vdim": 13, "num_kv_heads": 2}, lambda: _twice(_numbers(B, S, 13))),
}  # fmt: skip
QUICK = ("plain", "grouped", "norms of shared heads", "a rule of keys for each head", "several biases")


def _numbers(*shape: int) -> Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=made, dtype=torch.float64).requires_grad_()


def _bits(*shape: int) -> Tensor:
    bits = _numbers(*shape).detach() > -0.3
    bits[..., 0] = True
    return bits


def _twice(x: Tensor) -> dict[str, Tensor]:
    return {"key": x, "value": x}


def made(dtype: torch.dtype = torch.float64, **options: Any) -> hw.MultiHeadAttention:
    """A module of known numbers, none of them 0."""
    module = hw.MultiHeadAttention(**{"d_model": E, "num_heads": 4, **options}, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            drawn = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) * 0.4)
    return module.to(dtype)


def cast(args: Any, dtype: torch.dtype) -> Any:
    """What a call is given, in another dtype, as new leaves where it was one."""
    if isinstance(args, dict):
        expected: dict[int, Any] = {}
        return {name: expected.setdefault(id(x), cast(x, dtype)) for name, x in args.items()}
    if isinstance(args, tuple):
        return tuple(cast(x, dtype) for x in args)
    if isinstance(args, hw.scoring.Relative):
        return hw.scoring.Relative(cast(args.values, dtype))
    if isinstance(args, Tensor) and args.is_floating_point():
        return args.detach().to(dtype).requires_grad_(args.requires_grad)
    return args


def leaves(args: Any) -> Iterator[Tensor]:
    """Those that want gradients."""
    parts = args.values() if isinstance(args, dict) else args if isinstance(args, tuple) else ()
    for part in parts:
        yield from leaves(part)
    tensor = args.values if isinstance(args, hw.scoring.Relative) else args
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        yield tensor


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def line(ranks: int | None = None) -> Any:
    return dist.init_device_mesh("cpu", (ranks or dist.get_world_size(),))


def one_call(module: nn.Module, call: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output, the map and every gradient of a call."""
    arguments = cast(call, dtype)
    x = _numbers(B, T, E).detach().to(dtype).requires_grad_()
    output, weights = module(x, **arguments)
    (output * torch.linspace(0.5, 1.5, output.numel(), dtype=dtype).view_as(output)).sum().backward()
    local = module.local_heads
    visible = weights.dense() if local is None else local.gather_map(weights).dense()
    actual = {"output": output, "weights": visible, "x": x.grad}
    for number, leaf in enumerate(dict.fromkeys(leaves(arguments))):
        actual[f"given {number}"] = leaf.grad
    return actual | {name: whole(p.grad) for name, p in module.named_parameters()}


def modules_are_equal(names: tuple[str, ...], dtype: torch.dtype) -> None:
    mesh = line()
    for name in names:
        options, call = CASES[name]
        arguments = call()
        truth = one_call(made(**options), arguments, torch.float64)
        plain = one_call(made(dtype, **options), arguments, dtype)
        module = hw.parallel.shard_heads(made(dtype, **options), mesh)
        actual = one_call(module, arguments, dtype)
        assert actual.keys() == truth.keys()
        for part, ours in actual.items():
            times = 2.0 if part in ("output", "weights") else 3.0
            label = f"{name}: {part}"
            # that of a key's bias is 0, and the terms of that sum are as large as those of its weight
            terms = truth.get(part.replace("bias", "weight"), truth[part])
            size = max(1.0, truth[part].abs().max().item(), terms.abs().max().item())
            assert_judged(ours, plain[part], truth[part], dtype=dtype, times=times, name=label, size=size)


# Models


def config(**changes: Any) -> TransformerConfig:
    sizes = {"vocab_size": 61, "d_model": E, "num_heads": 4, "num_layers": 3, "d_ff": 37, "rope": Rope()}
    return TransformerConfig(**{**sizes, **changes})


def model_of(seed: int = 3, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config(**changes), dtype=torch.float64)


IDS = torch.arange(44).view(4, 11) * 7 % 61


def close(ours: Any, theirs: Any, name: str = "") -> None:
    torch.testing.assert_close(whole(ours), theirs, rtol=1e-9, atol=1e-11, msg=lambda m: f"{name}: {m}")


def same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close(parameter.detach(), expected[name].detach(), name)


def trained(model: Transformer, ids: Tensor = IDS, clip: float | None = None) -> Any:
    """The optimiser after a step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(ids).square().mean().backward()
    if clip is not None:
        hw.parallel.clip_grad_norm_(model.parameters(), clip)
    optimiser.step()
    return optimiser


def models_are_equal() -> None:
    mesh = line()
    for changes in (
        {"num_kv_heads": 2},
        {"rope": None, "relative_bias": Buckets(8, 16), "norm_first": False},
        {"rope": None, "positions": "learned", "max_length": 16, "gated": True, "kind": "encoder"},
    ):
        whole, model = model_of(**changes), hw.parallel.shard_heads(model_of(**changes), mesh)
        close(model(IDS), whole(IDS))
        trained(whole, clip=0.01)
        trained(model, clip=0.01)
        same_parameters(model, whole)
    source, target = IDS, IDS[:, :5]
    changes = {"kind": "encoder-decoder", "rope": None, "positions": "sinusoidal"}
    whole, model = model_of(**changes), hw.parallel.shard_heads(model_of(**changes), mesh)
    lengths = [11, 3, 7, 5]
    close(model(source, target, lengths=lengths), whole(source, target, lengths=lengths))
    assert torch.equal(model.generate(source, 4, start=1), whole.generate(source, 4, start=1))


def watching_is_equal() -> None:
    mesh = line()
    whole, model = model_of(num_kv_heads=2), hw.parallel.shard_heads(model_of(num_kv_heads=2), mesh)
    options: tuple[dict[str, Any], ...] = (
        {"patterns": True}, {"diversity": True}, {"written": True}, {"keep": False, "pooled": 5},
    )  # fmt: skip
    for chosen in options:
        with hw.watch(whole, **chosen) as theirs:
            whole(IDS, lengths=[11, 3, 7, 5])
        with hw.watch(model, **chosen) as ours:
            model(IDS, lengths=[11, 3, 7, 5])
        same_heads(ours, theirs)
    chosen_heads = [(0, 1), (1, 3), (2, 0)]
    for method in ("zero", "mean", "uniform"):
        with hw.ablate(whole, chosen_heads, method):
            expected = whole(IDS)
        with hw.ablate(model, chosen_heads, method), hw.watch(model) as heads:
            close(model(IDS), expected, method)
        assert len(heads.all()) == 12
    scores = [hw.importance(each, [IDS], _loss, progress=False) for each in (whole, model)]
    for layer in range(3):
        close(scores[1][layer], scores[0][layer], "importance")
    with hw.collect(whole, chosen_heads) as theirs_said, hw.collect(model, chosen_heads) as ours_said:
        whole(IDS), model(IDS)
    for layer in range(3):
        close(ours_said[layer], theirs_said[layer], "collect")
    with pytest.raises(ArgumentError, match=r"have all heads in one process to be pruned: .* of 4"):
        hw.prune(model, [(0, 1)])


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    actual: Tensor = model(batch).square().mean()
    return actual


def same_heads(ours: hw.Heads, theirs: hw.Heads) -> None:
    assert [head.head for head in ours.all()] == [head.head for head in theirs.all()]
    for a, b in zip(ours.all(), theirs.all(), strict=True):
        close(
            torch.tensor(list(a.values.values())).nan_to_num(),
            torch.tensor(list(b.values.values())).nan_to_num(),
        )
        assert (a.values.keys(), a.label.name) == (b.values.keys(), b.label.name)
    for layer in range(len(theirs)):
        for a, b in zip(ours[layer].calls, theirs[layer].calls, strict=True):
            assert a.shape == b.shape
            for name in b.pairs.keys() | b.large.keys():
                close((a.pairs | a.large)[name], (b.pairs | b.large)[name], name)
            if b.map is not None:
                assert a.map is not None
                close(a.map.dense(), b.map.dense())


def long_calls_are_measured_where_they_are() -> None:
    """A rank measures its own heads, and numbers are gathered: as many, the same, with a map where kept."""
    from headwise.listeners import capture

    mesh = line()
    whole, model = model_of(num_kv_heads=2), hw.parallel.shard_heads(model_of(num_kv_heads=2), mesh)
    chosen: dict[str, Any]
    for chosen in ({}, {"pooled": None, "keep": False}, {"patterns": True, "pooled": 5}):
        with hw.watch(whole, **chosen) as theirs:
            whole(IDS, lengths=[11, 3, 7, 5])
        short, capture.is_short = capture.is_short, lambda *_: False
        try:
            with hw.watch(model, **chosen) as ours:
                model(IDS, lengths=[11, 3, 7, 5])
        finally:
            capture.is_short = short
        same_heads(ours, theirs)


def generation_is_equal() -> None:
    mesh = line()
    whole, model = model_of(num_kv_heads=2), hw.parallel.shard_heads(model_of(num_kv_heads=2), mesh)
    assert torch.equal(
        model.generate(IDS, 6, lengths=[11, 3, 7, 5]), whole.generate(IDS, 6, lengths=[11, 3, 7, 5])
    )
    torch.manual_seed(dist.get_rank())  # ranks that draw other numbers go on with the same tokens
    drawn = model.generate(IDS, 6, temperature=1.0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, drawn)
    assert all(torch.equal(each, drawn) for each in everyone)
    with pytest.raises(ArgumentError, match=r"compile must be False .* got True for head"):
        model.generate(IDS, 2, compile=True)
    local = model.decoder.layers[0].attention.local_heads
    assert model.cache(4, 16).layers[0]._k.shape == (4, local.kv_count, 16, 6)
    with pytest.raises(ArgumentError, match=r"saved: 'decoder\.layers.* is a DTensor"):
        model.save("nowhere")


def dropout_is_drawn_apart() -> None:
    mesh = line()
    torch.manual_seed(1)
    module = hw.parallel.shard_heads(made(dropout=0.5), mesh)
    x, local = _numbers(B, T, E).detach(), module.local_heads
    heads = module.head_outputs(x)
    after = torch.rand(3)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, (heads, after))
    assert all(torch.equal(each[1], after) for each in states), "ranks draw on alike"
    alike = hw.parallel.shard_heads(made(dropout=0.5), mesh)
    with torch.no_grad():  # every head the same, so that what is dropped is all that differs
        for name in ("q_proj", "k_proj", "v_proj"):
            for parameter in getattr(alike, name).parameters():
                part = parameter.to_local()
                part.copy_(part[: part.shape[0] // local.count].repeat(local.count, *[1] * (part.ndim - 1)))
                dist.broadcast(part, 0)
    dist.all_gather_object(states, alike.head_outputs(x)[:, 0])
    assert all(not torch.equal(states[0], each) for each in states[1:])
    torch.manual_seed(dist.get_rank())
    with pytest.raises(
        ArgumentError, match=f"have the same random state .* found {dist.get_world_size()} states"
    ):
        hw.parallel.shard_heads(made(dropout=0.5), mesh)


def dtensors_come_and_go() -> None:
    mesh = line()
    x = _numbers(B, 8, E).detach()
    whole = made()
    expected = whole(x)[0]
    for coming in (Replicate(), Shard(1)):
        for going in (Replicate(), Shard(1), None):
            module = hw.parallel.shard_heads(made(), mesh, output_layout=going)
            arguments = distribute_tensor(x, mesh, [coming]).requires_grad_()
            output, _ = module(arguments)
            assert isinstance(output, DTensor) is (going is not None)
            assert going is None or output.placements == (going,)
            close(output, expected)
            output.square().sum().backward()
            leaf = x.clone().requires_grad_()
            whole(leaf)[0].square().sum().backward()
            close(arguments.grad, leaf.grad)
    watched = hw.parallel.shard_heads(made(), mesh, output_layout=Shard(1))
    with hw.watch(watched) as heads:
        output, _ = watched(distribute_tensor(x, mesh, [Shard(1)]))
    assert isinstance(output, DTensor) and output.placements == (Shard(1),)
    close(output, expected)
    assert len(heads.all()) == 4


def torchs_class_is_equal() -> None:
    mesh, x = line(), _numbers(B, T, E).detach()
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 5:] = True
    per_head = ~_bits(B * 4, T, T)
    calls: tuple[dict[str, Any], ...] = (
        {}, {"need_weights": False}, {"attn_mask": causal, "is_causal": True}, {"key_padding_mask": padding},
        {"attn_mask": per_head, "average_attn_weights": False},
        {"key_padding_mask": torch.zeros(B, T, dtype=torch.float64).masked_fill(padding, -torch.inf)},
    )  # fmt: skip
    for kind in (nn.MultiheadAttention, hw.nn.MultiheadAttention):
        for batch_first in (True, False):
            torch.manual_seed(4)
            whole = nn.MultiheadAttention(E, 4, batch_first=batch_first, dtype=torch.float64)
            other = kind(E, 4, batch_first=batch_first, dtype=torch.float64)
            other.load_state_dict(whole.state_dict())
            hw.parallel.shard_heads(other, mesh)
            arguments = x if batch_first else x.transpose(0, 1)
            for call in calls:
                output, weights = other(arguments, arguments, arguments, **call)
                theirs, expected = whole(arguments, arguments, arguments, **call)
                close(output, theirs, str(call))
                assert (weights is None) == (expected is None)
                if expected is not None:
                    close(weights, expected, str(call))
    close(other(x[0], x[0], x[0])[0], whole(x[0], x[0], x[0])[0])
    with pytest.raises(
        ArgumentError, match=r"is_causal must be given with the attn_mask .*got is_causal=True alone"
    ):
        other(arguments, arguments, arguments, is_causal=True)
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(E, 4, 31, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for adopts in (False, True):
        model = copy.deepcopy(encoder)
        if adopts:
            hw.adopt(model)
        hw.parallel.shard_heads(model, mesh)
        for mode in (True, False):
            encoder.train(mode), model.train(mode)
            expected = encoder(x, src_key_padding_mask=padding)
            close(model(x, src_key_padding_mask=padding)[~padding], expected[~padding], "encoder")
        with hw.watch(encoder) as theirs_heads:
            encoder(x, src_key_padding_mask=padding)
        with hw.watch(model) as ours_heads:
            model(x, src_key_padding_mask=padding)
        same_heads(ours_heads, theirs_heads)
        encoder.zero_grad(), encoder(x).square().sum().backward()
        model(x).square().sum().backward()
        close(model.layers[0].linear1.weight.grad, encoder.layers[0].linear1.weight.grad)
        close(
            model.layers[0].self_attn.attention.q_proj.weight.grad,
            encoder.layers[0].self_attn.in_proj_weight.grad[:E],
        )


def caches_and_memories_are_equal() -> None:
    mesh, x, text = line(), _numbers(B, T, E).detach(), _numbers(B, S, E)
    options = {"causal": True, "num_kv_heads": 2, "rope": Rope()}
    whole, module = made(**options), hw.parallel.shard_heads(made(**options), mesh)
    theirs, ours = whole.cache(), module.cache()
    for at in range(T):
        mask = _bits(B, 4, 1, at + 1)
        output, weights = module(x[:, at : at + 1], mask=mask, cache=ours)
        expected, is_expected = whole(x[:, at : at + 1], mask=mask, cache=theirs)
        close(output, expected)
        close(module.local_heads.gather_map(weights).dense(), is_expected.dense())
    whole, module = made(num_kv_heads=1), hw.parallel.shard_heads(made(num_kv_heads=1), mesh)
    grads = []
    for each in (whole, module):
        text.grad = None
        memory = each.remember(text, mask=_bits(B, 4, 1, S))
        grads += [each(x, cache=memory)[0]]
        grads[-1].square().sum().backward()
        grads += [text.grad]
    close(grads[2], grads[0])
    close(grads[3], grads[1])


def other_tools_meet_it() -> None:
    """Compiled, checkpointed, copied, made without memory, cast, listened to, clipped in `fit`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.utils.checkpoint import checkpoint

    mesh, ids, x = line(), IDS, _numbers(B, T, E)
    one_module, module = made(num_kv_heads=2), hw.parallel.shard_heads(made(num_kv_heads=2), mesh)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for each in (one_module, compiled):
        each(x, need_weights=False)[0].square().mean().backward()
    for ours, theirs in zip(module.parameters(), one_module.parameters(), strict=True):
        close(ours.grad, theirs.grad, "compiled")
    unsharded = model_of(num_kv_heads=2)
    with torch.device("meta"):
        empty = Transformer(config(num_kv_heads=2), dtype=torch.float64)
    hw.parallel.shard_heads(empty, mesh).to_empty(device="cpu")
    set_model_state_dict(empty, unsharded.state_dict(), options=StateDictOptions(full_state_dict=True))
    close(copy.deepcopy(empty)(ids), unsharded(ids))
    options: dict[str, Any] = {"qk_norm": "rms", "num_kv_heads": 1, "dropout": 0.5}
    grads = []
    torch.manual_seed(2)
    module = hw.parallel.shard_heads(made(**options), mesh)
    for again in (False, True):
        torch.manual_seed(7)
        module.zero_grad()
        output = checkpoint(module, x, use_reentrant=False)[0] if again else module(x)[0]
        output.square().sum().backward()
        grads.append([whole(p.grad) for p in module.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs, "checkpointed")
    module, one_module = made(torch.float32, gate="head"), made(torch.float32, gate="head")
    hw.parallel.shard_heads(module, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.float())[0].dtype == one_module(x.float())[0].dtype == torch.bfloat16
    unsharded, model = model_of(), hw.parallel.shard_heads(model_of(), mesh)
    lost = [
        hw.models.fit(each, [ids], _loss, steps=3, clip=0.01, progress=False) for each in (unsharded, model)
    ]
    assert lost[0].losses == pytest.approx(lost[1].losses, rel=1e-9)


def dropout_is_the_same_when_watched() -> None:
    torch.manual_seed(4)
    module, x = hw.parallel.shard_heads(made(torch.float32, dropout=0.5), line()), _numbers(B, T, E).float()
    torch.manual_seed(9)
    output = module(x)[0]
    torch.manual_seed(9)
    with hw.watch(module):
        assert torch.equal(module(x)[0], output)


def a_padded_encoder_is_equal() -> None:
    """torch's encoder once took its native path with weights that lay over ranks."""
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(E, 4, 64, batch_first=True, dropout=0.0, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    hidden, x = torch.arange(T) >= torch.tensor([T, 4])[:, None], _numbers(B, T, E).detach()
    sharded = hw.parallel.shard_heads(copy.deepcopy(encoder), line())
    ours, theirs = (each(x, src_key_padding_mask=hidden) for each in (sharded, encoder))
    close(ours[~hidden], theirs[~hidden])


def heads_and_sequence_at_once_are_not_watched() -> None:
    mesh, model = line(), made()
    hw.parallel.shard_sequence(hw.parallel.shard_heads(model, mesh), mesh)
    x = hw.parallel.split(_numbers(B, T, E).detach())
    message = r"by heads or by sequence to be watched: .* over 2 ranks"
    with pytest.raises(ArgumentError, match=message), hw.watch(model):
        model(x)


def optimizers_made_before_are_refused() -> None:
    """Their parameters were replaced, and would not be trained; those of others are left alone."""
    model = nn.ModuleDict({"attention": made(torch.float32), "last": nn.Linear(E, 3)})
    before = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    hw.parallel.shard_heads(model, line())
    model["last"](model["attention"](torch.ones(B, T, E))[0]).sum().backward()
    other.step()
    weight = model["attention"].q_proj.weight
    was = weight.to_local().detach().clone()
    with pytest.raises(ArgumentError, match="after shard_heads: 8 of the 10 parameters of this AdamW"):
        before.step()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert not torch.equal(was, weight.to_local())
    before.param_groups[0]["params"] = [*model.parameters()]
    before.step()  # mended by hand


# Data-parallel beside it, and checkpoints


def two_axes_are_equal() -> None:
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    whole = model_of(num_kv_heads=2)
    trained(whole, clip=0.01)
    grid = dist.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    alone = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for mesh in (grid, alone):
        model = model_of(num_kv_heads=2)
        if mesh is grid:
            hw.parallel.shard_heads(model, mesh)
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        own = IDS.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        trained(model, own, clip=0.01)
        same_parameters(model, whole)
        with hw.watch(whole) as theirs:
            whole(own)
        with hw.watch(model) as ours:
            model(own)
        same_heads(ours, theirs)
    module, x = made(), _numbers(B, T, E).detach()
    for layer in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        fully_shard(layer, mesh=alone)  # each alone: none is whole while the heads attend
    with hw.watch(module) as heads:
        close(module(x)[0], made()(x)[0])
    assert len(heads.all()) == 4


def saved(folder: str) -> None:
    """Four ranks write a model and its optimiser after a step."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = hw.parallel.shard_heads(model_of(num_kv_heads=2), line())
    state, optimiser = get_state_dict(model, trained(model))
    checkpoint.save({"model": state, "optimiser": optimiser}, checkpoint_id=folder)


def loaded(folder: str, shards: bool) -> None:
    """Another number of ranks reads them, and takes the next step as one process would."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    whole, model = model_of(num_kv_heads=2), model_of(seed=5, num_kv_heads=2)
    theirs = trained(whole)
    if shards:
        hw.parallel.shard_heads(model, line())
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    of_model, of_optimiser = get_state_dict(model, optimiser)
    state = {"model": of_model, "optimiser": of_optimiser}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    same_parameters(model, whole)
    for each, steps in ((whole, theirs), (model, optimiser)):
        each.zero_grad()
        each(IDS).square().mean().backward()
        steps.step()
    same_parameters(model, whole)


# Hugging Face's own plan


def huggingface_is_heard(folder: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    whole = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double().eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(8)  # else all heads attend evenly, and any order would do
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float64).eval()
    with pytest.raises(ArgumentError, match="got LlamaForCausalLM without one; shard it by its own tp_plan"):
        hw.parallel.shard_heads(model, line())
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    with torch.no_grad():
        with hw.watch(whole, patterns=True) as theirs:
            expected = whole(IDS, attention_mask=mask).logits
        with hw.watch(model, patterns=True) as ours:
            close(model(IDS, attention_mask=mask).logits, expected)
        same_heads(ours, theirs)
        chosen = [(0, 1), (1, 6)]
        with hw.ablate(whole, chosen):
            expected = whole(IDS).logits
        with hw.ablate(model, chosen):
            close(model(IDS).logits, expected)


# What is refused


def refusals() -> None:
    mesh, ranks = line(), dist.get_world_size()
    sharded = hw.parallel.shard_heads(made(), mesh)
    for model, error, message in (
        (nn.Linear(2, 2), ArgumentError, "got Linear without one; use"),
        (3, ArgumentError, "model must be a torch.nn.Module: got .*3"),
        (made(num_heads=3, head_dim=5), ShapeError, f"the model itself has 3 for {ranks} ranks; .*1 or 3"),
        (made(num_heads=12, num_kv_heads=3), ShapeError, f"3 for {ranks} ranks; use a mesh of size 1 or 3"),
        (nn.MultiheadAttention(E, 4, add_zero_attn=True), ArgumentError, "add_zero_attn=True"),
        (nn.MultiheadAttention(E, 4, add_bias_kv=True), ArgumentError, "add_bias_kv=True"),
        (_with(q_proj=nn.Sequential(nn.Linear(E, E))), ArgumentError, "q_proj is a Sequential"),
        (_with(q_norm=nn.Identity(), qk_norm="rms"), ArgumentError, "q_norm is a Identity"),
        (_parametrised(), ArgumentError, "ParametrizedMultiHeadAttention"),
        (_shared(), ArgumentError, "b.weight and a.q_proj.weight are the same parameter; give each"),
        (sharded, ArgumentError, "the model itself is a ShardedAttention"),
        (parallelize_module(made(), mesh, {"q_proj": ColwiseParallel()}), ArgumentError,
         "the model itself.q_proj.weight is a DTensor"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            hw.parallel.shard_heads(model, mesh)
    with pytest.raises(ArgumentError, match=r"mesh must be a torch.distributed.DeviceMesh: got .*4"):
        hw.parallel.shard_heads(made(), 4)
    nameless = dist.init_device_mesh("cpu", (1, ranks))
    with pytest.raises(ArgumentError, match=rf"an axis named 'tp', .* got \(1, {ranks}\) named None"):
        hw.parallel.shard_heads(made(), nameless)
    with pytest.raises(ArgumentError, match=r"output_layout must be None unless .*: got Transformer;"):
        hw.parallel.shard_heads(model_of(), mesh, output_layout=Shard(1))
    module, x = hw.parallel.shard_heads(made(), mesh), _numbers(B, T, E).detach()
    with pytest.raises(ShapeError, match=r"mask must broadcast .* all 4 heads: got \[2, 3, 7, 7\]"):
        module(x, mask=_bits(B, 3, T, T))
    with pytest.raises(ShapeError, match=r"slopes must have values for all 4 heads: got \[3\]; each rank"):
        module(x, bias=hw.scoring.alibi(3))
    with pytest.raises(ArgumentError, match=r"checkpoint must be None for a sharded model: got .*nowhere"):
        hw.models.fit(module, [x], _loss_of_first, steps=1, checkpoint="nowhere.pt")
    with pytest.raises(
        ArgumentError, match=r"reset_parameters must be called before .*: this rank has heads? .* of 4;"
    ):
        module.reset_parameters()
    assert f"of 4; {4 // ranks} head" in repr(module)
    by_hand_is_refused(mesh)


def by_hand_is_refused(mesh: Any) -> None:
    """A reshape error once, and with use_local_output=False a process that hung."""
    x = _numbers(B, T, E).detach()
    for local, error, message in (
        (True, ShapeError, "q_proj must give 4 heads of 6: got .* use headwise.parallel.shard_heads"),
        (
            False,
            ArgumentError,
            "q_proj must give a plain tensor: got a DTensor .* use headwise.parallel.shard_heads",
        ),
    ):
        column = [ColwiseParallel(use_local_output=local) for _ in range(3)]
        plan = dict(zip(("q_proj", "k_proj", "v_proj"), column, strict=True))
        module = parallelize_module(made(), mesh, {**plan, "out_proj": RowwiseParallel()})
        with pytest.raises(error, match=message):
            module(x)
        with pytest.raises(error, match="k_proj must give"):
            module.remember(x)
        with pytest.raises(error, match=message):
            module(x, cache=made().remember(x))
    halved = parallelize_module(
        made(), mesh, {name: ColwiseParallel() for name in plan} | {"out_proj": RowwiseParallel()}
    )
    halved.num_heads = halved.num_kv_heads = 4 // mesh.size()
    close(halved(x)[0], made()(x)[0])
    with (
        pytest.raises(ArgumentError, match=r"sharded in a known way to be watched: .* has .* heads here"),
        hw.watch(halved),
    ):
        halved(x)
    halved.config = SimpleNamespace(num_attention_heads=5)
    with (
        pytest.raises(ArgumentError, match=r"distributed evenly .* its config says 5 heads"),
        hw.watch(halved),
    ):
        halved(x)
    sharded = hw.parallel.shard_heads(made(), mesh)
    read = hw.AttentionMap.from_weights(torch.ones(1, 1, 1, 1))
    with pytest.raises(ArgumentError, match=r"in here only the weights of head.* of 4 are available"):
        local_heads_of(sharded, "here", read, None)


def _loss_of_first(model: nn.Module, batch: Tensor) -> Tensor:
    actual: Tensor = model(batch)[0].square().mean()
    return actual


def _with(qk_norm: str | None = None, **parts: nn.Module) -> nn.Module:
    module = made(qk_norm=qk_norm)
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def _parametrised() -> nn.Module:
    module = made(sinks=True)
    nn.utils.parametrize.register_parametrization(module, "sinks", nn.Identity())
    return module


def _shared() -> nn.Module:
    model = nn.ModuleDict({"a": made(), "b": nn.Linear(E, E)})
    model["b"].weight = model["a"].q_proj.weight
    return model


# Groups


def quick_checks() -> None:
    modules_are_equal(QUICK, torch.float64)
    modules_are_equal(QUICK[:2], torch.float32)
    refusals()
    dropout_is_drawn_apart()
    generation_is_equal()


def checks_of_four() -> None:
    modules_are_equal(tuple(CASES), torch.float64)
    modules_are_equal(tuple(CASES)[::3], torch.float32)
    models_are_equal()
    watching_is_equal()
    long_calls_are_measured_where_they_are()


def checks_of_two() -> None:
    modules_are_equal(tuple(CASES)[1::3], torch.float32)
    watching_is_equal()
    dtensors_come_and_go()
    torchs_class_is_equal()
    caches_and_memories_are_equal()
    other_tools_meet_it()
    dropout_is_the_same_when_watched()
    a_padded_encoder_is_equal()
    heads_and_sequence_at_once_are_not_watched()
    optimizers_made_before_are_refused()


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does() -> None:
    run_ranks(2, quick_checks)


@pytest.mark.slow
def test_every_option_on_four_ranks() -> None:
    run_ranks(4, checks_of_four)


@pytest.mark.slow
def test_every_tool_on_two_ranks() -> None:
    run_ranks(2, checks_of_two)


@pytest.mark.slow
def test_two_axes_and_checkpoints_of_four_ranks(tmp_path: Path) -> None:
    run_ranks(4, two_axes_are_equal)
    run_ranks(4, saved, str(tmp_path))
    run_ranks(1, loaded, str(tmp_path), False)
    run_ranks(2, loaded, str(tmp_path), True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Passing `tp_plan` directly:FutureWarning")
def test_huggingface_models_sharded_by_their_own_plan_are_heard(tmp_path: Path) -> None:
    run_ranks(2, huggingface_is_heard, str(tmp_path))


@pytest.mark.slow
def test_the_script_of_the_guide_runs() -> None:
    script = Path(__file__).resolve().parents[2] / "docs" / "examples" / "parallel_heads.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    paths = os.pathsep.join([str(Path(hw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Heads(2 layers, 8 heads)" in done.stdout and "rank 1: heads 2 to 3 of 4" in done.stdout
