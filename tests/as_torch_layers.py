"""Calls of torch's Transformer layers, drawn, made of torch's and of adopted ones, and compared.

As in as_torch_cases.py, torch's class called in the same way is the oracle, by its slow path. Letters are
torch's: N batch, L and S lengths, E embed_dim, H num_heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from as_torch_cases import (
    BOTH,
    CAUSAL,
    CPU,
    MASK_SHAPES,
    MODES,
    Choose,
    Results,
    fast_path,
    is_causal,
    mask_of,
    outcome_of,
    refusals_differ,
    results_differ,
    slow_path,
)
from judge import error

Masks = tuple[str, str, str]  # the names of a mask, a padding mask and a hint
TAKES: dict[str, dict[str, Masks]] = {
    "encoder layer": {"src": ("src_mask", "src_key_padding_mask", "is_causal")},
    "encoder": {"src": ("mask", "src_key_padding_mask", "is_causal")},
    "decoder layer": {
        name: (f"{name}_mask", f"{name}_key_padding_mask", f"{name}_is_causal") for name in ("tgt", "memory")
    },
}
TAKES["decoder"] = TAKES["decoder layer"]
TAKES["transformer"] = {
    name: (f"{name}_mask", f"{name}_key_padding_mask", f"{name}_is_causal")
    for name in ("src", "tgt", "memory")
}
ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "gelu": "gelu",
    "tanh": torch.tanh,
    "a gelu's tanh": nn.GELU("tanh"),
}
LAYER_SHAPES = ("one number", "larger", "one head", "a batch", "1-D")


@dataclass(frozen=True)
class MaskCase:
    """The masks of one attention."""

    mask: str
    mask_shape: str
    padding: str
    hint: bool | None


@dataclass(frozen=True)
class LayerCase:
    """A call of a Transformer's layer or of the whole."""

    seed: int
    kind: str
    dtype: torch.dtype
    N: int | None
    L: int
    S: int
    num_heads: int
    activation: str
    batch_first: bool
    norm_first: bool
    bias: bool
    masks: dict[str, MaskCase]
    training: bool
    gradients: str
    fast_path: bool
    autocast: bool


def draw_layer(choose: Choose, seed: int) -> LayerCase:
    kind = choose(tuple(TAKES))
    masks = {}
    for name in TAKES[kind]:
        mask = choose(("none", "none", "bool", "float", "inf", *CAUSAL))
        hints = (False, True) if kind.endswith("layer") or name == "memory" else (None, None, False, True)
        masks[name] = MaskCase(
            mask,
            choose(("right",) * 12 + LAYER_SHAPES),
            choose(("none", "none", "lengths", "lengths", "bool", "float")),
            choose(hints if mask != "none" else (*hints[:-1] * 8, True)),
        )
    return LayerCase(
        seed=seed,
        kind=kind,
        dtype=choose((torch.float64, torch.float64, torch.float32)),
        N=choose((3, 2, 1, None)),
        L=choose((5, 7, 11)),
        S=choose((5, 7, 13)),
        num_heads=choose((2, 2, 4, 3)),
        activation=choose(tuple(ACTIVATIONS)),
        batch_first=choose((True, True, False)),
        norm_first=choose(BOTH),
        bias=choose((True, True, False)),
        masks=masks,
        training=choose((False, False, True)),
        gradients=choose(("all", "none", "inference")),
        fast_path=choose((True, True, False)),
        autocast=choose((False, False, False, True)),
    )


def draw_fast_layer(choose: Choose, seed: int) -> LayerCase:
    """A call for which torch may take its fast path, or leave padding out."""
    case, kind = draw_layer(choose, seed), choose(("encoder", "encoder", "encoder layer"))
    masks = MaskCase(
        choose(("none", "none", "none", "bool", "float", *CAUSAL)),
        choose(("right", "right", "right", *LAYER_SHAPES)),
        choose(("none", "none", "lengths", "lengths", "bool", "inf")),
        choose((False, True) if kind == "encoder layer" else (False, None, None, True)),
    )
    return replace(
        case,
        kind=kind,
        num_heads=choose((2, 4)),
        activation=choose(("relu", "gelu")),
        batch_first=True,
        norm_first=choose((False, False, True)),
        bias=True,
        masks={"src": masks},
        training=False,
        gradients=choose(("none", "inference")),
        fast_path=True,
        autocast=False,
    )


def layer_of(case: LayerCase, dtype: torch.dtype) -> nn.Module:
    """torch's, with parameters that are all different."""
    E = 4 * case.num_heads
    options: dict[str, Any] = {
        "dim_feedforward": 11,
        "dropout": 0.0,
        "activation": ACTIVATIONS[case.activation],
        "batch_first": case.batch_first,
        "norm_first": case.norm_first,
        "bias": case.bias,
        "dtype": dtype,
    }
    model: nn.Module
    if case.kind.startswith("encoder"):
        model = nn.TransformerEncoderLayer(E, case.num_heads, **options)
    elif case.kind.startswith("decoder"):
        model = nn.TransformerDecoderLayer(E, case.num_heads, **options)
    else:
        model = nn.Transformer(E, case.num_heads, 1, 1, **options)
    if case.kind == "encoder":
        model = nn.TransformerEncoder(model, 2, nn.LayerNorm(E, dtype=dtype))
    elif case.kind == "decoder":
        model = nn.TransformerDecoder(model, 2, nn.LayerNorm(E, dtype=dtype))
    random = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) / 3)
    return model.train(case.training)


@dataclass
class LayerNumbers:
    """What a layer is called with."""

    inputs: list[Tensor]
    masks: dict[str, Tensor | None]  # by their names as arguments
    hints: dict[str, bool | None]
    wrong_hints: set[str]  # those that contradict masks: ours follows the mask, as torch does beside padding
    padded: Tensor  # of the output, what is padding: bool like [N, L, 1], or [1, 1, 1] for nothing

    def to(self, device: torch.device) -> LayerNumbers:
        """The same on another device; on a GPU, where wrong hints are trusted, without those."""
        masks = {name: None if x is None else x.to(device) for name, x in self.masks.items()}
        wrong = set() if device == CPU else self.wrong_hints
        hints = {name: hint and name not in wrong for name, hint in self.hints.items()}
        inputs = [x.to(device) for x in self.inputs]
        return LayerNumbers(inputs, masks, hints, self.wrong_hints, self.padded.to(device))

    def cast(self, dtype: torch.dtype) -> LayerNumbers:
        """The same in another dtype; bool stays bool."""
        masks = {
            name: x if x is None or x.dtype == torch.bool else x.to(dtype) for name, x in self.masks.items()
        }
        return replace(self, inputs=[x.to(dtype) for x in self.inputs], masks=masks)


def layer_numbers(case: LayerCase) -> LayerNumbers:
    random = torch.Generator().manual_seed(case.seed + 1)
    N, E, H = 1 if case.N is None else case.N, 4 * case.num_heads, case.num_heads
    lengths = {"src": case.S if case.kind == "transformer" else case.L, "tgt": case.L, "memory": case.S}

    def sequence(name: str) -> Tensor:
        x = torch.randn(N, lengths[name], E, generator=random, dtype=case.dtype)
        return x[0] if case.N is None else x if case.batch_first else x.transpose(0, 1).contiguous()

    names = {"transformer": ("src", "tgt")}.get(
        case.kind, ("src",) if "encoder" in case.kind else ("tgt", "memory")
    )
    numbers = LayerNumbers([sequence(name) for name in names], {}, {}, set(), torch.zeros(1, 1, 1).bool())
    for name, (mask_name, padding_name, hint_name) in TAKES[case.kind].items():
        row, S = case.masks[name], lengths[name]
        L = lengths["tgt"] if name == "memory" else S
        shape = (L, S) if row.mask_shape == "right" else MASK_SHAPES[row.mask_shape](N, H, L, S)
        mask = mask_of(row.mask, shape, random, case.dtype)
        padding = None
        if row.padding == "lengths":
            padding = torch.arange(S) >= torch.randint(1, S + 1, (N, 1), generator=random)
        elif row.padding != "none":
            padding = mask_of(row.padding, (N, S), random, case.dtype)
        if padding is not None and padding.dtype == torch.bool:
            padding[:, 0] = False
        if mask is not None and mask.dtype == torch.bool and mask.numel():
            mask[..., 0] = False
        numbers.masks[mask_name] = mask
        numbers.masks[padding_name] = padding if padding is None or case.N is not None else padding[0]
        numbers.hints[hint_name] = row.hint
        if mask is not None and row.hint and mask.shape == (L, S) and not is_causal(mask):
            numbers.wrong_hints.add(hint_name)
        if name == "src" and case.kind != "transformer" and case.N is not None and padding is not None:
            hidden = (padding if padding.dtype == torch.bool else padding == -torch.inf)[..., None]
            numbers.padded = hidden if case.batch_first else hidden.transpose(0, 1)
    return numbers


def layer_results(model: nn.Module, case: LayerCase, numbers: LayerNumbers, all_hints: bool) -> Results:
    """The output, and the gradients of inputs and parameters."""
    inputs = [x.detach().requires_grad_(case.gradients == "all") for x in numbers.inputs]
    hints = {
        name: hint if all_hints or name not in numbers.wrong_hints else False
        for name, hint in numbers.hints.items()
    }
    with (
        MODES[case.gradients](),
        torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=case.autocast),
    ):
        output = model(*inputs, **numbers.masks, **hints)
    actual = {"output": output}
    if case.gradients == "all":
        leaves = {f"d input {i}": x for i, x in enumerate(inputs)}
        leaves |= {f"d {name}": parameter for name, parameter in model.named_parameters()}
        pull = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output).to(output.device)
        grads = torch.autograd.grad((output * pull).sum(), [*leaves.values()], materialize_grads=True)
        actual |= dict(zip(leaves, grads, strict=True))
    return {name: x.detach() for name, x in actual.items()}


def layer_difference(case: LayerCase, device: torch.device = CPU) -> str | None:
    """How an adopted layer differs from torch's, called in the same way; None: it does not."""
    theirs, ours = (layer_of(case, case.dtype).to(device) for _ in "to")
    numbers = layer_numbers(case).to(device)
    hw.adopt(ours)
    with fast_path(case.fast_path):
        outcome = outcome_of(lambda: layer_results(ours, case, numbers, all_hints=True))
        fast = outcome_of(lambda: layer_results(theirs, case, numbers, all_hints=True))
    with slow_path():
        wanted = outcome_of(lambda: layer_results(theirs, case, numbers, all_hints=False))
    if outcome.warnings != wanted.warnings:
        return f"warnings are {outcome.warnings}, not {wanted.warnings}"
    if outcome.refusal is not None or wanted.refusal is not None:
        return refusals_differ(outcome, wanted)
    truth = wanted.results
    if case.dtype != torch.float64:
        with slow_path():
            exact, plain = layer_of(case, torch.float64).to(device), replace(case, autocast=False)
            truth = layer_results(exact, plain, numbers.cast(torch.float64), all_hints=False)
    precision = torch.bfloat16 if case.autocast and case.dtype != torch.float64 else case.dtype
    answers = outcome.results, wanted.results, truth
    if case.kind == "encoder" and fast.refusal is None:
        # In evaluation torch's encoder leaves padding out if it can, and says 0 there; so may ours.
        mine, torchs = (x.results["output"].masked_fill(~numbers.padded, 0) for x in (outcome, fast))
        if error(mine, torchs) <= 100 * torch.finfo(precision).eps:
            answers = tuple({**x, "output": x["output"].masked_fill(numbers.padded, 0)} for x in answers)
    return results_differ(*answers, precision, pull=1.0)
