"""What a caller may write to between a call of torch's class and backward, a caller of ours may, too.

Training code relies on it: `x += mha(x, x, x)[0]` works with torch's class where the batch comes first,
because torch projects a copy of its inputs. Each case runs with torch's class first; where torch computes
gradients, ours must compute the same ones. Sizes: N 2, L 5, S 7, H 3, D 4.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from as_torch_cases import as_if_large

N, L, S, E, H = 2, 5, 7, 12, 3
Gradients = list[Tensor | None]

INPUTS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "self": lambda x, y, z: (x, x, x),
    "cross": lambda x, y, z: (x, y, y),
    "three": lambda x, y, z: (x, y, z),
    "positions": lambda x, y, z: ((x + 1), (x + 1), x),
    "one sequence": lambda x, y, z: (x[0], x[0], x[0]),
    "transposed": lambda x, y, z: (x.transpose(0, 1).contiguous().transpose(0, 1),) * 3,
}
MASKS = ("none", "float", "padding", "float padding", "causal", "learned and padding")
TARGETS = (
    "query", "key", "value", "output", "weights", "weights of every head", "attn_mask", "key_padding_mask",
    "in_proj_bias", "out_proj.bias", "residual",
)  # fmt: skip


def masks_of(kind: str, query_len: int, key_len: int, batched: bool) -> dict[str, Any]:
    hidden = torch.rand(query_len, key_len) < 0.3
    hidden[:, 0] = False
    masks: dict[str, Any] = {}
    if kind == "causal":
        masks = {"attn_mask": torch.ones_like(hidden).triu(1), "is_causal": True}
    elif kind != "none":
        masks = {"attn_mask": torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -1.5)}
    if "learned" in kind:
        masks["attn_mask"] = masks["attn_mask"].requires_grad_() * 1.0
    if "padding" in kind:
        padding = torch.zeros(N, key_len, dtype=torch.bool)
        padding[0, -2:] = True
        if kind == "float padding":
            padding = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -2.0)
        masks["key_padding_mask"] = padding if batched else padding[0]
    return masks


def trained(
    adopted: bool, options: dict[str, Any], inputs: str, mask: str, weights: bool, target: str
) -> Gradients | None:
    """Gradients of a step in which `target` is written to before backward; None: it cannot be."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    if adopted:
        hw.adopt(module)
    sizes = ((N, L), (N, S), (N, S)) if module.batch_first else ((L, N), (S, N), (S, N))
    leaves = [torch.randn(*size, E, dtype=torch.float64, requires_grad=True) for size in sizes]
    x, y, z = (nn.functional.layer_norm(leaf, (E,)) for leaf in leaves)
    query, key, value = INPUTS[inputs](x, y, z)
    lengths = [t.shape[-2 if module.batch_first or t.dim() == 2 else 0] for t in (query, key)]
    masks = masks_of(mask, *lengths, batched=query.dim() == 3)
    torch.manual_seed(1)  # of dropout
    per_head = target == "weights of every head"
    output, shown = module(
        query, key, value, need_weights=weights, average_attn_weights=not per_head, **masks
    )
    written = {
        "query": query, "key": key, "value": value, "output": output, "weights": shown,
        "weights of every head": shown, "in_proj_bias": module.in_proj_bias,
        "out_proj.bias": module.out_proj.bias, **masks,
    }.get(target)  # fmt: skip
    if target == "residual":
        query.add_(output)
        output = query
    elif written is None:
        return None
    else:
        with torch.set_grad_enabled(not written.is_leaf):
            written.fill_(True) if written.dtype == torch.bool else written.mul_(3)
    loss = (output * torch.linspace(0, 1, output.numel(), dtype=torch.float64).view(output.shape)).sum()
    loss = loss if shown is None else loss + shown.square().sum()
    loss.backward()
    return [p.grad for p in (*leaves, *module.parameters())]


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"bias": False}, {"batch_first": True, "dropout": 0.4}],
    ids=["batch first", "length first, no bias", "dropout"],
)
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "alone"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_what_torch_lets_be_written_to_stays_writable(
    target: str, inputs: str, options: dict[str, Any], weights: bool, large: bool
) -> None:
    compared = 0
    for mask in MASKS:
        case, wanted = (options, inputs, mask, weights, target), None
        with suppress(RuntimeError):  # torch's: "modified by an inplace operation"
            wanted = trained(False, *case)
        if wanted is None:
            continue
        with as_if_large(large):
            found = trained(True, *case)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)
        compared += 1
    copies = bool(options.get("batch_first")) != (inputs == "transposed")
    if copies and inputs != "one sequence" and target in ("query", "value", "residual"):
        assert compared == len(MASKS)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "alone"])
def test_inputs_made_in_inference_mode_can_be_trained_on(weights: bool, large: bool) -> None:
    """Features cached under `inference_mode` raised "Inference tensors cannot be saved for backward"."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    with torch.inference_mode():
        x, y = torch.randn(N, L, E, dtype=torch.float64), torch.randn(N, S, E, dtype=torch.float64)
    for inputs in ((x, x, x), (x, y, y), (x, y, y.clone())):
        grads = []
        for change in (hw.restore, hw.adopt):
            change(module)
            with as_if_large(large):
                loss = module(*inputs, need_weights=weights)[0].square().sum()
            grads.append(torch.autograd.grad(loss, list(module.parameters())))
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("average", [True, False], ids=["mean", "heads"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_weights_require_no_gradient_where_only_out_proj_learns(average: bool, large: bool) -> None:
    """`weights.numpy()` raised, and to write to the weights raised in backward."""
    module = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    module.in_proj_weight.requires_grad_(False)
    module.in_proj_bias.requires_grad_(False)
    x = torch.randn(N, L, E, dtype=torch.float64)
    grads = []
    for change in (hw.restore, hw.adopt):
        change(module)
        with as_if_large(large):
            output, weights = module(x, x, x, average_attn_weights=average)
        assert not weights.requires_grad
        weights.mul_(2)
        grads.append(torch.autograd.grad(output.square().sum(), list(module.out_proj.parameters())))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("average", [True, False], ids=["mean", "heads"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_hook_on_weights_runs_only_where_the_loss_depends_on_them(average: bool, large: bool) -> None:
    """A hook was called with None, and `weights.grad` was filled, for a loss of the output alone."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    x = torch.randn(N, L, E, dtype=torch.float64)
    kept = []
    for change in (hw.restore, hw.adopt):
        change(module)
        for depends in (False, True):
            heard: list[Tensor | None] = []
            with as_if_large(large):
                output, weights = module(x, x, x, average_attn_weights=average)
            weights.retain_grad()
            weights.register_hook(heard.append)
            (output.square().sum() + (weights.square().sum() if depends else 0.0)).backward()
            assert len(heard) == depends
            kept.append(weights.grad)
    assert kept[0] is None and kept[2] is None
    torch.testing.assert_close(kept[1], kept[3], rtol=1e-9, atol=1e-9)
