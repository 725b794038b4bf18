"""Self-attention with projections as a benchmark of any module: inputs, masks, truth.

Letters: B batch, H num_heads, L length, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .. import problem as problems
from ..problem import Problem
from ..registry import Arm, Pinned, Sizes, Values

GRADIENTS = ("dx", "d_in_weight", "d_in_bias", "d_out_weight", "d_out_bias")


def split(x: Tensor, weight: Tensor, bias: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, H, L, D] from x [B, L, E], by one product."""
    B, L, E = x.shape
    packed = linear(x, weight, bias).view(B, L, 3, num_heads, E // num_heads)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def merge(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return [B, L, E] from [B, H, L, D]."""
    B, H, L, D = heads.shape
    return linear(heads.transpose(1, 2).reshape(B, L, H * D), weight, bias)


class SelfAttention:
    """A problem of self-attention, x [B, L, E]; torch's class holds the weights.

    Args:
        padded: sequences of different lengths, half of the places on average; of one alone, an eighth.
        shortest: of the lengths, where they do not begin with 1.
        scattered: a mask without any order, three keys in ten hidden, never the first.
        square: the causal mask is torch's own of floats (`nn.Transformer.generate_square_subsequent_mask`),
            the usual one, and padding is of floats, too; else both are bool.
        hint: whether the class is told is_causal, too.
        weights: "mean" over heads or those of all "heads", looked at after the call; None: not at all.
    """

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        causal: bool = False,
        padded: bool = False,
        weights: str | None = None,
        training: bool = False,
        scattered: bool = False,
        shortest: int | None = None,
        square: bool = False,
        hint: bool = True,
    ) -> None:
        self.B, self.L, E, self.H = (sizes[letter] for letter in "BLEH")
        B, L = self.B, self.L
        self.causal, self.padded, self.weights, self.training = causal, padded, weights, training
        self.hint = hint
        self.theirs = nn.MultiheadAttention(E, self.H, batch_first=True, device=device, dtype=dtype)
        nn.init.normal_(self.theirs.in_proj_bias)
        self.x = torch.randn(B, L, E).to(device, dtype).requires_grad_(training)
        self.grad = torch.randn(B, L, E).to(device, dtype)
        shortest = shortest or (1 if B > 1 else L - L // 8)
        self.lengths = torch.linspace(shortest, L, B).round().long().to(device)
        self.real = torch.arange(L, device=device) < self.lengths[:, None]  # [B, L]
        self.hidden: Tensor | None = None
        if causal:
            self.hidden = torch.ones(L, L, dtype=torch.bool, device=device).triu(1)
        elif scattered:
            self.hidden = (torch.rand(L, L) < 0.3).to(device)
            self.hidden[:, 0] = False
        self.mask_argument, self.padding_argument = (
            self.hidden,
            ~self.real if padded else None,
        )  # as the class takes them
        if square:
            self.mask_argument = nn.Transformer.generate_square_subsequent_mask(L, device=device, dtype=dtype)
            if padded:
                self.padding_argument = torch.zeros(B, L, device=device, dtype=dtype)
                self.padding_argument.masked_fill_(~self.real, -torch.inf)
        if padded:
            self.grad = self.grad * self.real[..., None]  # what padded queries say goes nowhere
        self.rows = torch.arange(L, device=device)
        if L > 64:
            self.rows = torch.linspace(0, L - 1, 64, dtype=torch.float64, device=device).round().long()

    @property
    def packed(self) -> list[Tensor]:
        """Return the weights as torch's class stores them."""
        theirs = self.theirs
        return [theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight, theirs.out_proj.bias]

    def prepare(self, *modules: nn.Module) -> None:
        """Set the mode of a module: training or not, with or without gradients."""
        for module in modules:
            module.train(self.training).requires_grad_(self.training)

    def torch_call(self, module: nn.Module, hinted: bool = False) -> Callable[[], Any]:
        """Return a call of torch's class, or of one with the same interface.

        hinted: with the hint that the mask is causal beside padding, too.
        """
        mean = self.weights == "mean"

        def run() -> Any:
            return module(
                self.x, self.x, self.x, key_padding_mask=self.padding_argument,
                need_weights=self.weights is not None, attn_mask=self.mask_argument,
                is_causal=self.hint and self.causal and (hinted or not self.padded),
                average_attn_weights=mean,
            )  # fmt: skip

        return run

    def arm(self, run: Callable[[], Any], parameters: list[Tensor]) -> Arm:
        """Return an arm: inference in inference mode, or forward and backward in training."""
        if not self.training:
            return Pinned(run, torch.inference_mode)

        def both_ways() -> tuple[Any, ...]:
            output, looked = run()
            return output.detach(), looked, *torch.autograd.grad(output, (self.x, *parameters), self.grad)

        return both_ways

    def part(self, result: tuple[Any, ...]) -> Values:
        """Return the compared part of an arm's result."""
        output, looked, *grads = result
        return self._named(output, looked, grads)

    def gradients_without_weights(self) -> Values:
        """Return the gradients of torch's class without weights, which uses fused kernels."""
        if not self.training or self.weights is None:
            return {}
        wanted, self.weights = self.weights, None
        try:
            results = self.part(self.arm(self.torch_call(self.theirs, hinted=True), self.packed)())
        finally:
            self.weights = wanted
        return {name: values for name, values in results.items() if name in GRADIENTS}

    def _real_rows(self, some: Tensor) -> Tensor:
        """Return the chosen rows of [B, .., rows, *], 0 for padding."""
        if not self.padded:
            return some
        real = self.real[:, self.rows]
        return some * real.view(self.B, *[1] * (some.ndim - 3), len(self.rows), 1)

    def _named(self, output: Tensor, looked: Tensor | None, grads: list[Tensor]) -> Values:
        values = {"output": self._real_rows(output[..., self.rows, :])}
        if looked is not None:
            values["weights"] = self._real_rows(looked[..., self.rows, :])
        if len(grads) == 9:  # each projection by itself
            grads = [grads[0], torch.cat(grads[1:4]), torch.cat(grads[4:7]), *grads[7:]]
        return values | dict(zip(GRADIENTS, grads, strict=False))

    def truth(self) -> Values:
        """Return the truth in float64: some rows of output and weights, and all gradients."""
        exact = [p.detach().double() for p in self.packed]
        x = self.x.detach().double()
        problem = self._problem(*split(x, exact[0], exact[1], self.H))
        values = {"output": self._real_rows(merge(problem.output(self.rows), exact[2], exact[3]))}
        if self.weights is not None:
            p = problem.weights(self.rows)[1]
            values["weights"] = self._real_rows(p.mean(1) if self.weights == "mean" else p)
        if self.training:
            values |= dict(zip(GRADIENTS, self._gradients(x, *exact), strict=True))
        return values

    def _problem(self, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        hidden = self.hidden
        rules = [problems.padding(self.lengths)] * self.padded
        if hidden is not None:
            rules.append(lambda at, keys: ~hidden[at, keys])
        return Problem(q, k, v, visible=problems.all_of(*rules) if rules else None)

    def _gradients(self, x: Tensor, *exact: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of x and the four parameters, head by head to save memory."""
        grad, rows = self.grad.double(), torch.arange(self.L, device=x.device)
        x.requires_grad_()
        in_weight, in_bias, out_weight, _ = (p.requires_grad_() for p in exact)
        heads = split(x, in_weight, in_bias, self.H)
        back = (grad @ out_weight.detach()).view(self.B, self.L, self.H, -1).transpose(1, 2)
        outputs, slopes = [], [torch.empty_like(tensor) for tensor in heads]
        for h in range(self.H):
            mine = [tensor[:, h : h + 1].detach().requires_grad_() for tensor in heads]
            output = self._problem(*mine).output(rows)
            head_slopes = torch.autograd.grad(output, mine, back[:, h : h + 1])
            outputs.append(output.detach())
            for slope, head_slope in zip(slopes, head_slopes, strict=True):
                slope[:, h : h + 1] = head_slope
        joined = torch.cat(outputs, 1).transpose(1, 2).flatten(2)  # [B, L, E]
        dx, d_in_weight, d_in_bias = torch.autograd.grad(heads, (x, in_weight, in_bias), slopes)
        d_out_weight = grad.flatten(0, 1).T @ joined.flatten(0, 1)
        return dx, d_in_weight, d_in_bias, d_out_weight, grad.sum((0, 1))
