"""What a model answers, and how far two answers are apart: probabilities of a token, or an output.

Letters: B batch, T length, V vocab_size, E width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..models.pretrained import Tokenizer
from ..models.transformer import Transformer

__all__ = ["MASKED", "NEXT", "OUTPUT", "Look", "Seen", "look_at"]

NEXT, MASKED, OUTPUT = "next token", "masked token", "output"

Seen = tuple[str, int, int, Tensor | None]  # of a call of attention: kind, B, T, which positions are real


class Look:
    """Where to look in a model's answers, and how far one is from another."""

    def __init__(self, of: str, rows: Callable[[Tensor], Tensor], real: Tensor | None) -> None:
        self.of, self._rows, self._real = of, rows, real

    def read(self, answer: object) -> Tensor:
        """Logits [B, V] at one position each; of an output all of it, [B, positions, E]."""
        return self._rows(_tensor_of(answer)).double()

    def check(self, model: nn.Module, before: Tensor) -> None:
        """Raise `ArgumentError` where there are no numbers to compare with; a word may be impossible."""
        values = before if self._real is None else before[self._real]
        wrong = ~values.isfinite() if self.of == OUTPUT else values.isnan() | (values == math.inf)
        if bool(wrong.any()):
            raise ArgumentError(
                f"model must answer with numbers: {int(wrong.sum())} of {values.numel()} that "
                f"{type(model).__name__} gave are not; look for NaN in the weights or the inputs"
            )

    def effect(self, before: Tensor, after: Tensor) -> Tensor:
        """One number per sequence, [B]."""
        if self.of == OUTPUT:
            norms = before.norm(dim=-1)  # [B, positions]
            moved = (after - before).norm(dim=-1) / norms
            counts = norms > 0 if self._real is None else self._real & (norms > 0)
            return moved.masked_fill(~counts, 0).sum(1) / counts.sum(1)  # 0 / 0 is NaN: nothing to compare
        on, off = before.log_softmax(-1), after.log_softmax(-1)
        terms = torch.where(on > -math.inf, on.exp() * (on - off), 0)
        return terms.sum(-1).clamp(min=0)  # which rounding may fall below


def _tensor_of(answer: object) -> Tensor:
    """What counts of an answer: its logits, else its last hidden state, else its first tensor."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(answer, name, None)
        if isinstance(value, Tensor):
            return value
    values = answer.values() if isinstance(answer, Mapping) else answer
    for value in [values] if isinstance(values, Tensor) else values if hasattr(values, "__iter__") else ():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            return value.to_padded_tensor(0.0) if value.is_nested else value
    raise ArgumentError(
        f"model must answer with a tensor of two dimensions or more: got {type(answer).__name__}; wrap it in "
        "a module that returns one"
    )


def look_at(
    model: nn.Module, inputs: object, answer: object, seen: Sequence[Seen], tokenizer: Tokenizer | None
) -> Look:
    """What of this model's answers is compared.

    Args:
        answer: the first of them, with all heads on.
        seen: its attention meanwhile.

    Raises:
        ArgumentError: no tensor in it; padding, and positions that are not those that were read; a sequence
            without a real position.
    """
    given = _tensor_of(answer)
    ids = _ids_of(inputs)
    if given.ndim == 3 and _is_vocabulary(model, answer, given.shape[-1], ids, tokenizer):
        B, T = given.shape[:2]
        if not _fills_gaps(model):
            at = _last(_real(model, B, T, seen), B, T).to(given.device)  # [B]
            return Look(NEXT, lambda x: x[torch.arange(B, device=x.device), at], None)
        mask = getattr(tokenizer, "mask_token_id", None)
        masked = None if mask is None or ids is None or ids.shape != (B, T) else ids == mask
        if masked is not None and bool(masked.any(1).all()):
            first = masked.int().argmax(1).to(given.device)
            return Look(MASKED, lambda x: x[torch.arange(B, device=x.device), first], None)
    return _of_output(model, given, seen)


def _of_output(model: nn.Module, given: Tensor, seen: Sequence[Seen]) -> Look:
    """All of an output, sequences first, channels last."""
    sizes = {(B, T) for _, B, T, _ in seen}
    first, second = given.shape[0], given.shape[1]
    if given.ndim == 2:
        if (1, first) in sizes and first != 1:  # one sequence, without a batch
            return Look(OUTPUT, lambda x: x[None], None)
        return Look(OUTPUT, lambda x: x[:, None], None)  # a vector for each sequence
    swapped = given.ndim == 3 and (second, first) in sizes and not _batch_first(model)
    B, T = (second, first) if swapped else (first, second)
    if given.ndim > 3:  # maps of features: channels wherever they are
        return Look(OUTPUT, lambda x: x.flatten(1)[:, None], None)
    real = _real(model, B, T, seen)
    _last(real, B, T)  # says where there is none
    real = None if real is None else real.to(given.device)
    return Look(OUTPUT, (lambda x: x.transpose(0, 1)) if swapped else (lambda x: x), real)


def _batch_first(model: nn.Module) -> bool:
    """torch's own modules may have time first."""
    said = (getattr(module, "batch_first", None) for module in model.modules())
    return next((known for known in said if isinstance(known, bool)), True)


def _real(model: nn.Module, B: int, T: int, seen: Sequence[Seen]) -> Tensor | None:
    """Which positions of an answer are real, bool [B, T], as the last attention of these sizes knew."""
    fits = [(kind, real) for kind, *sizes, real in seen if sizes == [B, T]]
    for wanted in ("self", "cross"):
        known = [real for kind, real in fits if kind == wanted]
        if known:
            return None if known[-1] is None else known[-1].expand(B, T)
    padded = next(((b, t) for _, b, t, real in seen if real is not None and not bool(real.all())), None)
    if padded is not None:
        raise ArgumentError(
            f"model must answer at the positions that it reads: {type(model).__name__} gave {[B, T]} for "
            f"padded {list(padded)}, and which are real is not known; give one sequence"
        )
    return None


def _last(real: Tensor | None, B: int, T: int) -> Tensor:
    """The last real position of each sequence, [B]."""
    if real is None:
        return torch.full((B,), T - 1)
    none = (~real.any(1)).nonzero().flatten().tolist()
    if none:
        raise ArgumentError(
            f"inputs must hold a real position in every sequence: sequence {none[0]} holds 0 of {T}; leave "
            "it out"
        )
    return T - 1 - real.flip(1).int().argmax(1)


def _ids_of(inputs: object) -> Tensor | None:
    """The tokens that were given, int [B, T]."""
    if isinstance(inputs, Mapping):
        inputs = next((inputs[name] for name in ("input_ids", "ids") if name in inputs), None)
    elif isinstance(inputs, (tuple, list)):
        inputs = inputs[0] if inputs else None
    whole = isinstance(inputs, Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()
    return inputs if whole and isinstance(inputs, Tensor) else None


def _is_vocabulary(
    model: nn.Module, answer: object, V: int, ids: Tensor | None, tokenizer: Tokenizer | None
) -> bool:
    """Whether an answer's channels are the words of a vocabulary."""
    if isinstance(model, Transformer):
        return model.config.output is not None
    if isinstance(getattr(answer, "logits", None), Tensor):
        embedded = getattr(model, "get_output_embeddings", lambda: None)()
        if embedded is not None:
            return True
    elif hasattr(answer, "last_hidden_state") or ids is None:
        return False
    elif tokenizer is not None and isinstance(tokenizer, Sized) and len(tokenizer) == V:
        return True
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    largest = max(tables, key=lambda table: table.num_embeddings, default=None)
    return largest is not None and V == largest.num_embeddings != largest.embedding_dim


def _fills_gaps(model: nn.Module) -> bool:
    """Whether it tells what stands at a position, not what comes after it."""
    return type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining"))
