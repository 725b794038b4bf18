"""The logit lens: which token the model would predict if it ended after a layer.

The residual stream after each layer goes through what follows the last block, usually a norm and the
unembedding. These modules are found by running the model, and must give the model's own logits for the last
layer.

Letters: B batch, T length, E width, L layers, V vocab_size.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ArgumentError, needed
from ..heads.layer_names import path_in_words
from ..listeners.adapters import attach
from ..listeners.effects import check_eval_mode, check_inputs
from ..listeners.model_outputs import Comparison, comparison_of, tensor_of
from ..models.batches import run
from ..models.pretrained import Tokenizer, token_name
from ..models.transformer import Transformer
from .attribution import HeadOutputsHeard, Target, cap_of, ids_of, rows_of
from .residual_stream import blocks_of, is_states, named_arguments, removed, unembedding_of

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class LogitLens:
    """What would be predicted before the first block and after each block.

    Attributes:
        log_probs: [B, L + 1, V], float32.
        blocks: the paths of the L blocks.
        tokenizer: names tokens; None: ids are shown.
    """

    log_probs: Tensor
    blocks: list[str]
    tokenizer: Tokenizer | None

    def top(self, count: int = 5, batch: int = 0) -> list[list[tuple[str, float]]]:
        """Return the most probable tokens with their probabilities, before the first block and after each.

        Raises:
            ArgumentError: a count outside the vocabulary; IndexError: no such sequence.
        """
        if not 1 <= count <= self.log_probs.shape[2]:
            raise ArgumentError(
                f"count must be from 1 to {self.log_probs.shape[2]}: got {count}; these are all tokens"
            )
        if not -len(self.log_probs) <= batch < len(self.log_probs):
            raise IndexError(
                f"batch must be one of {len(self.log_probs)} sequences: got {batch}; count from 0"
            )
        best = self.log_probs[batch].exp().topk(count, -1)
        return [
            [(self._name(token), share) for token, share in zip(tokens, shares, strict=True)]
            for tokens, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def rank(self, target: Target) -> Tensor:
        """Return how many tokens are more probable than the target, int [B, L + 1]: 0 is the first place.

        Args:
            target: as in `headwise.attribution`.

        Raises:
            ArgumentError: no token of the model.
        """
        ids = ids_of(target, "target", self.log_probs[:, 0], self.tokenizer)
        own = self.log_probs.gather(2, ids[:, None, None].expand(-1, self.log_probs.shape[1], 1))
        return (self.log_probs > own).sum(-1)

    def to_pandas(self, count: int = 5) -> DataFrame:
        """Return a data frame of the most probable tokens: sequence, layer, rank, token, probability.

        The layer before the first block is -1.

        Raises:
            PackageMissing: pandas is not installed.
        """
        with needed("pandas", "a data frame needs pandas"):
            import pandas as pd

        rows = [
            (batch, layer - 1, rank, token, probability)
            for batch in range(len(self.log_probs))
            for layer, tokens in enumerate(self.top(count, batch))
            for rank, (token, probability) in enumerate(tokens)
        ]
        return pd.DataFrame(rows, columns=["sequence", "layer", "rank", "token", "probability"])

    def _name(self, token: int) -> str:
        return str(token) if self.tokenizer is None else token_name(self.tokenizer, token)

    def __str__(self) -> str:
        lines = [f"Logit lens of sequence 0 of {len(self.log_probs)}."]
        for number, tokens in enumerate(self.top(3)):
            name = "embedding" if number == 0 else f"layer {number - 1}"
            lines.append(f"  {name:<10}" + ", ".join(f'"{token}" {share:.2f}' for token, share in tokens))
        return "\n".join(lines)

    __repr__ = __str__


class _Tail:
    """The residual stream of a forward, and the modules that run after the last block."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = list(blocks_of(model).values())[-1]
        self.states: dict[int, Tensor] = {}  # by number of the block: its input; L: the last output
        self.modules: list[nn.Module] = []
        self.unembedding = unembedding_of(model)
        self.unembedding_input: Tensor | None = None
        self.position: int | None = None
        self.comparison: Comparison | None = None
        self._is_behind = False

    def hooks(self) -> ExitStack:
        """Return a block in which a forward is recorded."""
        stack, inside = ExitStack(), tuple(f"{block}." for block in self.blocks)

        def enter(number: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if number in self.states:
                    raise ArgumentError(
                        f"model must run each block once: {path_in_words(self.blocks[number])} ran again; "
                        "use headwise.attribution"
                    )
                self.states[number] = next(x for _, x in named_arguments(args, kwargs) if is_states(x))

            return hook

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.states[len(self.blocks)] = output if isinstance(output, Tensor) else output[0]
            self._is_behind = True

        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._is_behind:
                self.modules.append(module)

        def unembed(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.unembedding_input = args[0]

        for number, block in enumerate(self.blocks):
            hook = enter(number)
            handle = self.model.get_submodule(block).register_forward_pre_hook(hook, with_kwargs=True)
            stack.enter_context(removed(handle))
        last = self.model.get_submodule(self.blocks[-1])
        stack.enter_context(removed(last.register_forward_hook(leave)))
        for path, module in self.model.named_modules():
            if self.unembedding is not None and module is self.unembedding:
                stack.enter_context(removed(module.register_forward_hook(unembed)))
            elif not module._modules and not path.startswith(inside):
                stack.enter_context(removed(module.register_forward_hook(record)))
        return stack

    def logits(self, x: Tensor) -> Tensor:
        """Return what the modules behind the last block make of states, [B, L + 1, V]."""
        for module in self.modules:
            x = module(x)
        if self.unembedding is not None:
            scaled: Tensor = self.unembedding(x * self._factor(x))
            return scaled
        if isinstance(self.model, Transformer) and self.model.config.output == "tied":
            return functional.linear(x, self.model.embedding.tokens.weight)
        return x

    def _factor(self, x: Tensor) -> float:
        """Return what the model multiplies the input of the unembedding by, such as T5's 1 / sqrt(E)."""
        assert self.unembedding_input is not None
        own, made = self.row(self.unembedding_input)[:, 0].double(), x[:, -1].double()
        return float((own * made).sum() / made.square().sum())

    def row(self, x: Tensor) -> Tensor:
        """Return the position that is read, [B, 1, E]."""
        return rows_of(x, self.comparison, self.position).to(x.dtype)[:, None]


@torch.no_grad()
def logit_lens(
    model: nn.Module, inputs: object, *, tokenizer: Tokenizer | None = None, position: int | None = None
) -> LogitLens:
    """Return the tokens that a language model would predict if it ended after each block.

        lens = hw.logit_lens(model, tokenizer("The cat sat on the", return_tensors="pt"), tokenizer=tokenizer)
        print(lens)
        lens.top(3)[-1], lens.rank(" mat")

    The model runs once. What follows its last block is then applied to the residual stream before the first
    block and after each block; for the last block this must give the model's own logits, or an error is
    raised.

    Args:
        model: a language model that works with `headwise.watch`, in eval mode, with numbered blocks.
        inputs: the model's inputs: a mapping of its arguments, a tuple of them, or one tensor.
        tokenizer: the model's tokenizer.
        position: the position that is read; by default that of `headwise.attribution`.

    Raises:
        ArgumentError: a model in training mode, without numbered blocks, without logits for each position,
            whose blocks run several times, or whose last modules cannot be applied alone; no such position.

    Example:
        >>> from headwise.models import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig(vocab_size=11, d_model=8, num_heads=2, num_layers=3)).eval()
        >>> ids = torch.tensor([[1, 5, 3, 9]])
        >>> lens = logit_lens(model, ids)
        >>> lens.log_probs.shape
        torch.Size([1, 4, 11])
        >>> bool((lens.log_probs[:, -1] - model(ids)[:, -1].log_softmax(-1)).abs().max() < 1e-5)
        True

    nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    check_eval_mode(model, also_dropout=True)
    check_inputs(inputs)
    tail, heard = _Tail(model), HeadOutputsHeard(keeps=False)
    with attach(model, heard), tail.hooks():
        output = run(model, inputs)
    logits = tensor_of(output)
    if logits.ndim != 3:
        raise ArgumentError(
            f"model must return logits for each position: got {list(logits.shape)}; use headwise.attribution"
        )
    tail.position = position
    if position is None:
        tail.comparison = comparison_of(model, inputs, output, heard.calls, tokenizer)
    own = tail.row(logits)[:, 0].float()
    states = [tail.row(tail.states[number]) for number in sorted(tail.states)]
    try:
        made = tail.logits(torch.cat(states, 1))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ArgumentError(_NOT_ALONE.format(reason=str(error).partition("\n")[0])) from error
    half = torch.finfo(logits.dtype).bits < 32
    if made.ndim != 3 or made.shape[2] != own.shape[1]:
        raise ArgumentError(_NOT_ALONE.format(reason=f"they return {list(made.shape)}"))
    made = _as_the_model(model, made.float(), own)
    distance = float((made[:, -1] - own).norm() / own.norm())
    if not distance <= (0.05 if half else 1e-3):
        raise ArgumentError(_NOT_ALONE.format(reason=f"their logits are {distance:.2g} from the model's"))
    return LogitLens(made.log_softmax(-1), tail.blocks, tokenizer)


def _as_the_model(model: nn.Module, made: Tensor, own: Tensor) -> Tensor:
    """Return logits as the model returns them: capped, or times a constant."""
    cap = cap_of(model)
    if cap is not None:
        return cap * torch.tanh(made / cap)
    return made * float((own * made[:, -1]).sum() / made[:, -1].square().sum())


_NOT_ALONE = (
    "model must end with modules that can be applied to one position: {reason}; use headwise.attribution"
)
