"""Outputs of a model: how far two of them are apart, and the log-probabilities of answers to prompts.

Prompts of one length form a batch, so that nothing is padded. The log-probability of an answer of several
tokens is the sum of theirs.

Letters: B batch, T length, V vocab_size, E width.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.behaviours import Behaviour, Pair, Place
from ..heads.layer_names import ByLayer, Layer
from ..models.pretrained import Tokenizer
from ..models.transformer import Transformer
from .ablation import ablate, head_means
from .adapters import attach
from .role_measurement import AheadListener

NEXT, MASKED, OUTPUT = "next token", "masked token", "output"
METHOD = "mean"  # of `headwise.ablate`
ROWS = 32  # prompts in one run of the model

CallShape = tuple[str, int, int, Tensor | None]  # of an attention call: kind, B, T, which positions are real


class Comparison:
    """How two outputs of a model are compared: at which positions, and by which distance."""

    def __init__(self, of: str, rows: Callable[[Tensor], Tensor], real: Tensor | None) -> None:
        self.of, self._rows, self._real = of, rows, real

    def read(self, output: object) -> Tensor:
        """Return logits at one position of each sequence, [B, V], or the full output, [B, positions, E]."""
        return self._rows(tensor_of(output)).double()

    def check(self, model: nn.Module, before: Tensor) -> None:
        """Raise `ArgumentError` if the output has NaN or infinite values; a logit may be minus infinity."""
        values = before if self._real is None else before[self._real]
        wrong = ~values.isfinite() if self.of == OUTPUT else values.isnan() | (values == math.inf)
        if bool(wrong.any()):
            raise ArgumentError(
                f"model must return finite numbers: {int(wrong.sum())} of {values.numel()} outputs of "
                f"{type(model).__name__} are NaN or infinite; look for NaN in the weights or the inputs"
            )

    def effect(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the distance between two outputs of each sequence, [B]."""
        if self.of == OUTPUT:
            norms = before.norm(dim=-1)  # [B, positions]
            moved = (after - before).norm(dim=-1) / norms
            counts = norms > 0 if self._real is None else self._real & (norms > 0)
            return moved.masked_fill(~counts, 0).sum(1) / counts.sum(1)  # 0 / 0 is NaN: no position counts
        on, off = before.log_softmax(-1), after.log_softmax(-1)
        terms = torch.where(on > -math.inf, on.exp() * (on - off), 0)
        return terms.sum(-1).clamp(min=0)  # rounding may make it negative


def tensor_of(output: object) -> Tensor:
    """Return the logits of an output, else its last hidden state, else its first tensor."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    values = output.values() if isinstance(output, Mapping) else output
    for value in [values] if isinstance(values, Tensor) else values if hasattr(values, "__iter__") else ():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            return value.to_padded_tensor(0.0) if value.is_nested else value
    raise ArgumentError(
        f"model must return a tensor of at least two dimensions: got {type(output).__name__}; wrap it in "
        "a module that returns one"
    )


def comparison_of(
    model: nn.Module, inputs: object, output: object, calls: Sequence[CallShape], tokenizer: Tokenizer | None
) -> Comparison:
    """Return how outputs of a model are compared, from its output with all heads.

    calls: the attention calls of that run.
    """
    tensor = tensor_of(output)
    ids = _ids_of(inputs)
    if tensor.ndim == 3 and _is_vocabulary(model, output, tensor.shape[-1], ids, tokenizer):
        B, T = tensor.shape[:2]
        # a masked language model predicts the token at a position, not the next one
        if not type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining")):
            last = _last(_real(model, B, T, calls), B, T).to(tensor.device)  # [B]
            return Comparison(NEXT, lambda x: x[torch.arange(B, device=x.device), last], None)
        mask = getattr(tokenizer, "mask_token_id", None)
        masked = None if mask is None or ids is None or ids.shape != (B, T) else ids == mask
        if masked is not None and bool(masked.any(1).all()):
            first = masked.int().argmax(1).to(tensor.device)
            return Comparison(MASKED, lambda x: x[torch.arange(B, device=x.device), first], None)
    return _of_output(model, tensor, calls)


def _of_output(model: nn.Module, output: Tensor, calls: Sequence[CallShape]) -> Comparison:
    """Return a comparison of full outputs, with sequences first and channels last."""
    sizes = {(B, T) for _, B, T, _ in calls}
    first, second = output.shape[0], output.shape[1]
    if output.ndim == 2:
        if (1, first) in sizes and first != 1:  # one sequence, without a batch
            return Comparison(OUTPUT, lambda x: x[None], None)
        return Comparison(OUTPUT, lambda x: x[:, None], None)  # a vector for each sequence
    swapped = output.ndim == 3 and (second, first) in sizes and not _batch_first(model)
    B, T = (second, first) if swapped else (first, second)
    if output.ndim > 3:  # feature maps, whose channels may be any dimension
        return Comparison(OUTPUT, lambda x: x.flatten(1)[:, None], None)
    real = _real(model, B, T, calls)
    _last(real, B, T)  # raises if a sequence has no real position
    real = None if real is None else real.to(output.device)
    return Comparison(OUTPUT, (lambda x: x.transpose(0, 1)) if swapped else (lambda x: x), real)


def _batch_first(model: nn.Module) -> bool:
    """Return False if the first torch module with `batch_first` has the sequence dimension first."""
    flags = (getattr(module, "batch_first", None) for module in model.modules())
    return next((flag for flag in flags if isinstance(flag, bool)), True)


def _real(model: nn.Module, B: int, T: int, calls: Sequence[CallShape]) -> Tensor | None:
    """Return which positions of an output are real, bool [B, T], from the last call of these sizes."""
    fits = [(kind, real) for kind, *sizes, real in calls if sizes == [B, T]]
    for wanted in ("self", "cross"):
        masks = [real for kind, real in fits if kind == wanted]
        if masks:
            return None if masks[-1] is None else masks[-1].expand(B, T)
    padded = next(((b, t) for _, b, t, real in calls if real is not None and not bool(real.all())), None)
    if padded is not None:
        raise ArgumentError(
            f"model must return an output for every position: {type(model).__name__} gave {[B, T]} for "
            f"padded {list(padded)}, and it is unknown which are real; pass one sequence"
        )
    return None


def _last(real: Tensor | None, B: int, T: int) -> Tensor:
    """Return the last real position of each sequence, [B]."""
    if real is None:
        return torch.full((B,), T - 1)
    empty = (~real.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ArgumentError(
            f"inputs must hold a real position in every sequence: sequence {empty[0]} holds 0 of {T}; leave "
            "it out"
        )
    return T - 1 - real.flip(1).int().argmax(1)


def _ids_of(inputs: object) -> Tensor | None:
    """Return the token ids among a model's inputs, int [B, T], or None."""
    if isinstance(inputs, Mapping):
        inputs = next((inputs[name] for name in ("input_ids", "ids") if name in inputs), None)
    elif isinstance(inputs, (tuple, list)):
        inputs = inputs[0] if inputs else None
    are_ids = isinstance(inputs, Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()
    return inputs if are_ids and isinstance(inputs, Tensor) else None


def _is_vocabulary(
    model: nn.Module, output: object, V: int, ids: Tensor | None, tokenizer: Tokenizer | None
) -> bool:
    """Return True if the channels of an output are the words of a vocabulary."""
    if isinstance(model, Transformer):
        return model.config.output is not None
    if isinstance(getattr(output, "logits", None), Tensor):
        embedded = getattr(model, "get_output_embeddings", lambda: None)()
        if embedded is not None:
            return True
    elif hasattr(output, "last_hidden_state") or ids is None:
        return False
    elif tokenizer is not None and isinstance(tokenizer, Sized) and len(tokenizer) == V:
        return True
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    largest = max(tables, key=lambda table: table.num_embeddings, default=None)
    return largest is not None and V == largest.num_embeddings != largest.embedding_dim


# Prompts as tokens


@dataclass(frozen=True)
class _Row:
    """A sequence of tokens and the tokens predicted at its last positions: those of one answer or of both.

    Both answers share a row if each is a single token.
    """

    ids: tuple[int, ...]
    wanted: tuple[tuple[int, ...], ...]  # for each of the last positions, the tokens
    where: tuple[tuple[int, int, int], ...]  # for each column of `wanted`: pair, prompt and answer


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text without special tokens at its end, as in `headwise.roles`.

    A start token comes first if the tokenizer has one.
    """
    ids = list(map(int, tokenizer(text)["input_ids"]))
    special = set(tokenizer.all_special_ids)
    start = getattr(tokenizer, "bos_token_id", None)
    if ids and ids[0] not in special and start is not None:
        ids.insert(0, start)
    while len(ids) > 1 and ids[-1] in special:
        ids.pop()
    return ids


def _tokenized(tokenizer: Tokenizer, pair: Pair) -> list[tuple[list[int], list[list[int]]]] | None:
    """Return for each prompt of a pair its tokens and those of both answers.

    None if the answers have different numbers of tokens, or the prompt has other tokens before an answer.
    """
    prompts = []
    for prompt in pair.prompts:
        start = _tokens(tokenizer, prompt)
        full = [_tokens(tokenizer, prompt + ending) for ending in pair.answers]
        ends = [ids[len(start) :] for ids in full]
        if any(ids[: len(start)] != start for ids in full) or len(ends[0]) != len(ends[1]) or not ends[0]:
            return None
        prompts.append((start, ends))
    return prompts


class BehaviourPrompts:
    """The prompts of a behaviour as tokens of one model, and the log-probabilities of their answers."""

    def __init__(self, language_model: LanguageModel, tokenizer: Tokenizer, behaviour: Behaviour) -> None:
        self.language_model, self.behaviour = language_model, behaviour
        pairs = behaviour.pairs()
        tokenized = [
            prompt_pair for pair in pairs if (prompt_pair := _tokenized(tokenizer, pair)) is not None
        ]
        self.pairs, self.dropped = len(tokenized), len(pairs) - len(tokenized)
        rows: list[_Row] = []
        for pair_number, prompts in enumerate(tokenized):
            for prompt, (start, ends) in enumerate(prompts):
                if len(ends[0]) == 1:  # one run predicts both
                    both = ((ends[0][0], ends[1][0]),)
                    rows.append(
                        _Row(tuple(start), both, ((pair_number, prompt, 0), (pair_number, prompt, 1)))
                    )
                    continue
                for number, end in enumerate(ends):
                    wanted = tuple((token,) for token in end)
                    rows.append(_Row((*start, *end[:-1]), wanted, ((pair_number, prompt, number),)))
        self.batches = list(_batches(rows))
        self._all_on: Tensor | None = None
        if rows:
            most = max(token for row in rows for token in (*row.ids, *itertools.chain(*row.wanted)))
            language_model.check(self.batches[-1][0].ids, most)

    @property
    def num_heads(self) -> dict[Layer, int]:
        """Number of heads by layer; empty if there are no prompts."""
        return {layer: len(mean) for layer, mean in self.means.items()} if self.batches else {}

    @cached_property
    def means(self) -> ByLayer[Tensor]:
        """Mean output of each head over all prompts, by layer."""
        batches = [self.language_model.batch(_ids(batch)) for batch in self.batches]
        return head_means(self.language_model.model, batches)

    def margins(self, off: Sequence[Place] = ()) -> Tensor:
        """Return log P(right) - log P(wrong) without the heads in `off`, [pairs, 2]."""
        if not off and self._all_on is not None:
            return self._all_on
        log_probs = torch.zeros(self.pairs, 2, 2, dtype=torch.float64)  # pair, prompt, answer
        if self.batches:
            without = (
                ablate(self.language_model.model, off, METHOD, means=self.means) if off else nullcontext()
            )
            with without:
                for batch in self.batches:
                    self._add_log_probs(batch, log_probs)
        margins = log_probs[:, :, 0] - log_probs[:, :, 1]
        margins[:, 1] *= -1  # after the second prompt the second answer is right
        if not off:
            self._all_on = margins
        return margins

    def _add_log_probs(self, batch: Sequence[_Row], log_probs: Tensor) -> None:
        """Write the log-probabilities of a batch's answers into `log_probs`, [pair, prompt, answer]."""
        last = len(batch[0].wanted)
        logits = self.language_model.logits(_ids(batch), last)  # [B, last, V]
        log_softmax = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        wanted = torch.tensor([row.wanted for row in batch], device=log_softmax.device)  # [B, last, columns]
        sums = log_softmax.gather(-1, wanted).double().sum(1).cpu()  # [B, columns]
        for row, values in zip(batch, sums, strict=True):
            for (pair, prompt, number), value in zip(row.where, values, strict=True):
                log_probs[pair, prompt, number] = value


def _ids(batch: Sequence[_Row]) -> Tensor:
    return torch.tensor([row.ids for row in batch])


def _batches(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Yield batches of rows of one length, so that nothing is padded."""

    def size(row: _Row) -> tuple[int, int]:
        return len(row.ids), len(row.wanted)

    for _, alike in itertools.groupby(sorted(rows, key=size), key=size):
        same = list(alike)
        yield from (same[start : start + ROWS] for start in range(0, len(same), ROWS))


# Causal language models


class LanguageModel:
    """A causal language model, with one interface for every kind of forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = inspect.signature(model.forward).parameters
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._checked = False

    def batch(self, ids: Tensor) -> Any:
        """Return token ids as the arguments of the model's forward."""
        ids = ids.to(self.device)
        if isinstance(self.model, Transformer) or "input_ids" not in self.parameters:
            return ids
        return {"input_ids": ids, **({"use_cache": False} if "use_cache" in self.parameters else {})}

    def logits(self, ids: Tensor, last: int) -> Tensor:
        """Return the logits of the next token after each of the last positions, [B, last, V]."""
        batch = self.batch(ids)
        if isinstance(batch, Mapping):
            options = {"logits_to_keep": last} if "logits_to_keep" in self.parameters else {}
            output: Any = self.model(**batch, **options)
        elif isinstance(self.model, Transformer) and last == 1:
            output = self.model(batch, last=True)
        else:
            output = self.model(batch)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            shape = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ArgumentError(
                f"model must return logits [B, T, V] of the next token: got {shape} of "
                f"{type(self.model).__name__}; use a causal language model"
            )
        return logits[:, -last:]

    def check(self, ids: Sequence[int], most: int) -> None:
        """Raise `ArgumentError` unless the prediction after a token is independent of later tokens.

        most: the largest token of all prompts.
        """
        embedded = getattr(self.model, "get_input_embeddings", lambda: None)()
        size = getattr(embedded, "num_embeddings", None)
        if isinstance(self.model, Transformer):
            size = self.model.config.vocab_size
        if size is not None and most >= size:
            raise ArgumentError(
                f"tokenizer must fit the model: token {most} for a vocabulary of {size}; use the model's "
                "own tokenizer"
            )
        if self._checked:
            return
        config = self.model.config if isinstance(self.model, Transformer) else None
        if config is not None and (config.kind != "decoder" or config.output is None):
            raise ArgumentError(
                f"model must predict the next token: kind={config.kind!r}, output={config.output!r}; use "
                "a decoder"
            )
        text = torch.tensor([list(ids)])
        length = text.shape[1]
        other = text.clone()
        other[0, -1] = text[0, 0]
        logits, changed = (self.logits(tokens, length)[0, :-1].double() for tokens in (text, other))
        rounding = torch.finfo(next(self.model.parameters()).dtype).eps ** 0.5 * float(logits.abs().max())
        listener = AheadListener()  # in low precision, rounding may hide the effect of a token
        with attach(self.model, listener):
            self.logits(text, 1)
        if any(listener.looks_ahead) or float((logits - changed).abs().max()) > rounding:
            raise ArgumentError(
                f"model must be causal: the output of {type(self.model).__name__} after {length - 1} tokens "
                "changes with the token after them; use a causal language model"
            )
        self._checked = True
