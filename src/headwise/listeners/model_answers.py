"""What a model answers: how far two answers are apart, and how likely it thinks the answers to prompts.

Prompts of one length go together, so that nothing is padded. An answer of several tokens is judged whole: the
sum of their log-probabilities.

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
from .role_measurement import Ahead

NEXT, MASKED, OUTPUT = "next token", "masked token", "output"
METHOD = "mean"  # of `headwise.ablate`
ROWS = 32  # prompts in one run of the model

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
    """What of this model's answers is compared, told from the first one, with all heads on.

    seen: its attention meanwhile.
    """
    given = _tensor_of(answer)
    ids = _ids_of(inputs)
    if given.ndim == 3 and _is_vocabulary(model, answer, given.shape[-1], ids, tokenizer):
        B, T = given.shape[:2]
        # one that fills gaps tells what stands at a position, not what comes after it
        if not type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining")):
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
    """Return True if an answer's channels are the words of a vocabulary."""
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


# Prompts as tokens


@dataclass(frozen=True)
class _Row:
    """One run of tokens, and what is asked of its last ones: one answer, or both where each is a token."""

    ids: tuple[int, ...]
    wanted: tuple[tuple[int, ...], ...]  # for each of the last positions, which tokens
    where: tuple[tuple[int, int, int], ...]  # for each column of wanted: pair, prompt, answer


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """No special tokens at its end, and one in front, where there is one, as in `headwise.roles`."""
    ids = list(map(int, tokenizer(text)["input_ids"]))
    special = set(tokenizer.all_special_ids)
    start = getattr(tokenizer, "bos_token_id", None)
    if ids and ids[0] not in special and start is not None:
        ids.insert(0, start)
    while len(ids) > 1 and ids[-1] in special:
        ids.pop()
    return ids


def _answers(tokenizer: Tokenizer, pair: Pair) -> list[tuple[list[int], list[list[int]]]] | None:
    """For each prompt its tokens and those of both answers; None where they do not compare."""
    found = []
    for prompt in pair.prompts:
        start = _tokens(tokenizer, prompt)
        whole = [_tokens(tokenizer, prompt + answer) for answer in pair.answers]
        ends = [ids[len(start) :] for ids in whole]
        if any(ids[: len(start)] != start for ids in whole) or len(ends[0]) != len(ends[1]) or not ends[0]:
            return None
        found.append((start, ends))
    return found


class Asked:
    """A behaviour's prompts as tokens of one model, and the answers to them."""

    def __init__(self, speaker: Speaker, tokenizer: Tokenizer, behaviour: Behaviour) -> None:
        self.speaker, self.behaviour = speaker, behaviour
        pairs = behaviour.pairs()
        kept = [answers for pair in pairs if (answers := _answers(tokenizer, pair)) is not None]
        self.pairs, self.dropped = len(kept), len(pairs) - len(kept)
        rows: list[_Row] = []
        for at, prompts in enumerate(kept):
            for which, (start, ends) in enumerate(prompts):
                if len(ends[0]) == 1:  # one run says both
                    both = ((ends[0][0], ends[1][0]),)
                    rows.append(_Row(tuple(start), both, ((at, which, 0), (at, which, 1))))
                    continue
                for answer, end in enumerate(ends):
                    each = tuple((token,) for token in end)
                    rows.append(_Row((*start, *end[:-1]), each, ((at, which, answer),)))
        self.batches = list(_batches(rows))
        self._whole: Tensor | None = None
        if rows:
            most = max(token for row in rows for token in (*row.ids, *itertools.chain(*row.wanted)))
            speaker.check(self.batches[-1][0].ids, most)

    @property
    def num_heads(self) -> dict[Layer, int]:
        """By layer; of no layer where there are no prompts."""
        return {layer: len(mean) for layer, mean in self.means.items()} if self.batches else {}

    @cached_property
    def means(self) -> ByLayer[Tensor]:
        """What each head says on average over all these prompts."""
        batches = [self.speaker.batch(_ids(batch)) for batch in self.batches]
        return head_means(self.speaker.model, batches)

    def margins(self, off: Sequence[Place] = ()) -> Tensor:
        """log P(right) - log P(wrong), [pairs, 2], without these heads."""
        if not off and self._whole is not None:
            return self._whole
        said = torch.zeros(self.pairs, 2, 2, dtype=torch.float64)  # pair, prompt, answer
        if self.batches:
            without = ablate(self.speaker.model, off, METHOD, means=self.means) if off else nullcontext()
            with without:
                for batch in self.batches:
                    self._ask(batch, said)
        margins = said[:, :, 0] - said[:, :, 1]
        margins[:, 1] *= -1  # after the second prompt the second answer is right
        if not off:
            self._whole = margins
        return margins

    def _ask(self, batch: Sequence[_Row], said: Tensor) -> None:
        """Add up the log-probabilities of a batch's answers."""
        last = len(batch[0].wanted)
        logits = self.speaker.logits(_ids(batch), last)  # [B, last, V]
        chances = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        wanted = torch.tensor([row.wanted for row in batch], device=chances.device)  # [B, last, columns]
        sums = chances.gather(-1, wanted).double().sum(1).cpu()  # [B, columns]
        for row, values in zip(batch, sums, strict=True):
            for (pair, prompt, answer), value in zip(row.where, values, strict=True):
                said[pair, prompt, answer] = value


def _ids(batch: Sequence[_Row]) -> Tensor:
    return torch.tensor([row.ids for row in batch])


def _batches(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows of one length each, so that nothing is padded."""

    def size(row: _Row) -> tuple[int, int]:
        return len(row.ids), len(row.wanted)

    for _, alike in itertools.groupby(sorted(rows, key=size), key=size):
        same = list(alike)
        yield from (same[start : start + ROWS] for start in range(0, len(same), ROWS))


# Models that say what comes next


class Speaker:
    """A causal language model, whichever way it is called."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.taken = inspect.signature(model.forward).parameters
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._checked = False

    def batch(self, ids: Tensor) -> Any:
        """As `headwise.head_means` runs it."""
        ids = ids.to(self.device)
        if isinstance(self.model, Transformer) or "input_ids" not in self.taken:
            return ids
        return {"input_ids": ids, **({"use_cache": False} if "use_cache" in self.taken else {})}

    def logits(self, ids: Tensor, last: int) -> Tensor:
        """Of the next token after each of the last positions, [B, last, V]."""
        batch = self.batch(ids)
        if isinstance(batch, Mapping):
            few = {"logits_to_keep": last} if "logits_to_keep" in self.taken else {}
            answer: Any = self.model(**batch, **few)
        elif isinstance(self.model, Transformer) and last == 1:
            answer = self.model(batch, last=True)
        else:
            answer = self.model(batch)
        logits = getattr(answer, "logits", answer)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            what = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ArgumentError(
                f"model must say what comes next, as logits [B, T, V]: got {what} of "
                f"{type(self.model).__name__}; use a causal language model"
            )
        return logits[:, -last:]

    def check(self, ids: Sequence[int], most: int) -> None:
        """Raise `ArgumentError` unless what is said after a token is the same whatever follows it.

        most: the largest token of all prompts.
        """
        embedded = getattr(self.model, "get_input_embeddings", lambda: None)()
        size = getattr(embedded, "num_embeddings", None)
        if isinstance(self.model, Transformer):
            size = self.model.config.vocab_size
        if size is not None and most >= size:
            raise ArgumentError(
                f"tokenizer must fit the model: token {most} for a vocabulary of {size}; are they a pair?"
            )
        if self._checked:
            return
        config = self.model.config if isinstance(self.model, Transformer) else None
        if config is not None and (config.kind != "decoder" or config.output is None):
            raise ArgumentError(
                f"model must say what comes next: kind={config.kind!r}, output={config.output!r}; use "
                "a decoder"
            )
        text = torch.tensor([list(ids)])
        length = text.shape[1]
        other = text.clone()
        other[0, -1] = text[0, 0]
        one, two = (self.logits(given, length)[0, :-1].double() for given in (text, other))
        rounding = torch.finfo(next(self.model.parameters()).dtype).eps ** 0.5 * float(one.abs().max())
        ahead = Ahead()  # in few bits, what rounds away may be more than what a token changes
        with attach(self.model, ahead):
            self.logits(text, 1)
        if any(ahead.heard) or float((one - two).abs().max()) > rounding:
            raise ArgumentError(
                f"model must be causal: what {type(self.model).__name__} says after {length - 1} tokens "
                "changes with the token after them; use a causal language model"
            )
        self._checked = True
