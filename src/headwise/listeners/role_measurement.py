"""`roles`: which heads of a model attend from a word to the related word.

The model reads sentences of the grammar, in batches of one length, so that nothing is padded. For each head
and word, the word with the largest weight is recorded, and `heads/roles.py` judges these records. If a word
has several tokens, weights are summed over its keys and averaged over its queries (Clark 2019).

Results are cached in the user's cache folder under a hash of weights, tokens and grammar; those of some
models come with the package. A cached result is used only if a few sentences give the same attention again,
since the hash does not cover configs, hooks, patches or ablations.

`retrieval_scores`: which heads copy a needle, a sentence hidden in a long text, while the model generates it
token by token. The key with the largest weight of a retrieval head is then the token of the needle that is
generated next. Wu 2024.

Letters: B batch, H num_heads, L layers, S text, T tokens, W words.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HeadwiseError, ShapeError
from ..heads import grammar
from ..heads.grammar import Sentence
from ..heads.layer_names import ByLayer, Layer, path_in_words
from ..heads.measures import retrieval
from ..heads.roles import FORMAT, Roles, judge
from ..models.batches import tracked
from ..models.transformer_config import TransformerConfig
from ..whole_files import whole_file
from .active import LayerCall, Listener, in_backward
from .adapters import attach
from .chosen_heads import check_any, check_count
from .importance import ranked
from .model_structure import structure_of

USUAL = 700  # sentences
BEGINNING = "Well, "  # in front of a text, for a causal model without a start token
PROOF = 6  # sentences that are run again before a cached result is used
SAME = 1e-3  # mean weights of a head that differ by less are equal up to rounding
SHIPPED = Path(grammar.__file__).parent / "stored_roles"
ENOUGH = 0.5  # the share of a needle's tokens that a meaningful run generates
SHOWN = 5  # heads in a summary of retrieval


@torch.no_grad()
def roles(
    model: nn.Module,
    tokenizer: Any,
    *,
    sentences: int | Sequence[Sentence] = USUAL,
    seed: int = 0,
    batch: int = 16,
    progress: bool | Callable[[int, int], None] = True,
    keep: bool = True,
) -> Roles:
    """Measure which heads attend from a word to the related word, on sentences of a grammar.

        roles = hw.roles(model, tokenizer)
        print(roles)
        roles["pronoun > antecedent"].share

    For each relation, the head is chosen on one half of the sentences and tested on the other half, which has
    other words and sentence shapes. It is compared with rules that need no model: the best fixed offset, and
    the nearest, the first and the last word of the related word's class (such as nouns). The grammar tells
    these rules the classes of words, which a head must find by itself; the results show both kinds. A role is
    found if the head beats every rule by at least 0.15 and the difference is statistically significant. A
    head attends to the word with its largest weight; special tokens, punctuation and the word itself are left
    out. A model that puts no weight on later tokens is treated as causal: it is tested only on relations to
    earlier words, and each sentence is preceded by a start token, or by "Well" if the tokenizer has none.

    Args:
        model: any model that reads a single text (not an encoder-decoder) and works with `headwise.watch`. It
            is in eval mode during the call.
        tokenizer: a tokenizer that returns offsets, such as all fast tokenizers of transformers.
        sentences: the number of sentences, or a list of your own (`headwise.heads.grammar.Sentence`).
        seed: the seed of the drawn sentences.
        batch: the number of sentences per forward.
        progress: True shows a bar if it takes over two seconds and rich is installed; or a function that is
            called with the number of batches done and the number of all batches.
        keep: use a stored result if there is one, and store a new one. Before a stored result is used, a few
            sentences are run again and must agree with it.

    Raises:
        ArgumentError: too few sentences; a batch below 1; a tokenizer without offsets, with tokens that span
            several words, or of another model; a model that is an encoder-decoder or does not read text, or
            with fewer positions than a sentence has tokens.
        AttentionBypassed: layers whose attention cannot be intercepted.

    Clark 2019, "What Does BERT Look At?"; Voita 2019.
    """
    attach(model, AheadListener())  # raises if it is not a module
    check_count(batch, "batch", "16 is usual")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed must be a whole number: got {seed!r}; 0 is usual")
    texts = (
        grammar.sentences(sentences, seed) if isinstance(sentences, int) else _checked_sentences(sentences)
    )
    if not texts:
        raise ArgumentError("sentences must not be empty: got 0; give a number, 700 is usual")
    parts = {part for path in structure_of(model).places for part in path.split(".")}
    if {"encoder", "decoder"} <= parts:
        raise ArgumentError(
            f"model must read one text: {type(model).__name__} is an encoder-decoder; give its encoder"
        )
    main_input = getattr(model, "main_input_name", "input_ids")  # of transformers
    if main_input != "input_ids":
        raise ArgumentError(
            f"model must read text: {type(model).__name__} reads {main_input}; give one that does"
        )
    with _in_eval_mode(model):
        readings = [reading for text in texts if (reading := _encode(tokenizer, text)) is not None]
        if not readings:
            raise ArgumentError(
                f"tokenizer must know the words: all {len(texts)} sentences have an unknown word, such as "
                f"{texts[0].text!r}; use the model's own tokenizer"
            )
        _check_fit(model, readings)
        causal = _is_causal(model, readings[0])
        if causal:
            with_start = [_encode(tokenizer, reading.sentence, causal=True) for reading in readings]
            readings = [reading for reading in with_start if reading is not None]
            _check_fit(model, readings)
        if keep:
            name = _key(model, readings)
            check = _Measurement(model, readings[:: max(1, len(readings) // PROOF)][:PROOF], PROOF)
            for folder in (SHIPPED, _cache_folder()):
                cached = None if folder is None else _read_cached(folder / f"{name}.json")
                if cached is not None and check.agrees(cached[1]):
                    cached[0].left_out = len(texts) - len(readings)  # of the texts of this call
                    return cached[0]
        measured = _Measurement(model, readings, batch, progress)
        result = judge(
            [reading.sentence for reading in readings], measured.heaviest(), measured.layers(), causal=causal,
            title=measured.title(), left_out=len(texts) - len(readings),
        )  # fmt: skip
        if keep:
            _write_cached(f"{name}.json", result, check.weights())
        return result


def _checked_sentences(sentences: object) -> list[Sentence]:
    """Return the caller's sentences as a list; raise `ArgumentError` if they are not `Sentence`s."""
    texts: list[Any] = list(sentences) if isinstance(sentences, Iterable) else [sentences]
    for text in texts:
        if not isinstance(text, Sentence):
            raise ArgumentError(
                f"sentences must be a number, or a list of headwise.heads.grammar.Sentence: got {text!r}; "
                "see that class"
            )
    return texts


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and back to the mode of each module at the end."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


# Words and tokens


@dataclass(frozen=True, eq=False)
class _TokenizedSentence:
    """A sentence as tokens."""

    sentence: Sentence
    ids: list[int]
    words: list[list[int]]  # the tokens of each word, by number


def _encode(tokenizer: Any, sentence: Sentence, causal: bool = False) -> _TokenizedSentence | None:
    """Return a sentence as tokens; None if a token is unknown.

    causal: put a token in front, on which a head can put the weight that it has no use for.
    """
    text, shift = sentence.text, 0
    ids, offsets = _tokens(tokenizer, text)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    start = getattr(tokenizer, "bos_token_id", None)
    if causal and ids[0] not in special:
        if start is not None:
            ids, offsets = [start, *ids], [(0, 0), *offsets]
        else:
            shift = len(BEGINNING)
            ids, offsets = _tokens(tokenizer, BEGINNING + text)
    unknown = getattr(tokenizer, "unk_token_id", None)
    words: list[list[int]] = [[] for _ in sentence.words]
    spans = [(begin + shift, end + shift) for begin, end in sentence.spans]
    for number, (begin, end) in enumerate(offsets):
        touched = [at for at, (left, right) in enumerate(spans) if begin < right and end > left]
        if len(touched) > 1:
            raise ArgumentError(
                f"tokenizer must not join words: a token of {type(tokenizer).__name__} is "
                f"{text[begin - shift : end - shift]!r}; use a model with smaller tokens"
            )
        for at in touched:
            words[at].append(number)
            if ids[number] == unknown:
                return None
    for word, tokens in zip(sentence.words, words, strict=True):
        if not tokens:
            raise ArgumentError(
                f"tokenizer must give every word a token: {word!r} has none in {type(tokenizer).__name__}; "
                "use the model's own tokenizer"
            )
    return _TokenizedSentence(sentence, ids, words)


def _tokens(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text, and the first and last position of each in it."""
    try:
        encoding = tokenizer(text, return_offsets_mapping=True)
        return list(encoding["input_ids"]), [
            (int(begin), int(end)) for begin, end in encoding["offset_mapping"]
        ]
    except HeadwiseError:
        raise
    except (NotImplementedError, TypeError, KeyError, ValueError) as error:
        raise ArgumentError(
            f"tokenizer must return the offsets of tokens: {type(tokenizer).__name__} returns none "
            f"({type(error).__name__}); use a fast tokenizer of transformers"
        ) from error


def _check_fit(model: nn.Module, readings: Sequence[_TokenizedSentence]) -> None:
    """Raise `ArgumentError` if a token or a position is outside the model's range."""
    config = getattr(model, "config", None)
    size, largest = getattr(config, "vocab_size", None), max(max(reading.ids) for reading in readings)
    if isinstance(size, int) and largest >= size:
        raise ArgumentError(
            f"tokenizer must fit the model: token {largest} for a vocabulary of {size}; use the model's "
            "own tokenizer"
        )
    longest = max(len(reading.ids) for reading in readings)
    is_ours = isinstance(
        config, TransformerConfig
    )  # in other configs, max_length is the length of generated text
    for name in ("max_length",) if is_ours else ("max_position_embeddings", "n_positions"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit < longest:
            raise ArgumentError(
                f"model must read whole sentences: {longest} tokens for {name} = {limit}; use one that reads "
                "more"
            )


# Running the model


def _run(model: nn.Module, ids: list[list[int]]) -> None:
    """Run the model on tokens."""
    device = next(model.parameters(), torch.empty(0)).device
    tokens = torch.tensor(ids, device=device)
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = (
        {"attention_mask": torch.ones_like(tokens)} if "attention_mask" in parameters else {}
    )
    if "use_cache" in parameters:
        options["use_cache"] = False
    model(tokens, **options)


class AheadListener(Listener):
    """Records for each call whether a head attends to a later key."""

    def __init__(self) -> None:
        self.looks_ahead: list[bool] = []
        self.thread = get_ident()  # the model may also run in other threads

    def hear(self, call: LayerCall) -> None:
        if call.kind == "self" and self.thread == get_ident():
            weights = call.weights.detach().dense()
            if weights.isnan().any():
                raise ArgumentError(
                    f"model must compute finite weights: those of {path_in_words(call.path)} are NaN; try a "
                    "dtype of more bits"
                )
            self.looks_ahead.append(bool(weights.triu(1).any()))


def _is_causal(model: nn.Module, reading: _TokenizedSentence) -> bool:
    """Return True if no head attends to a later key."""
    listener = AheadListener()
    with attach(model, listener):
        _run(model, [reading.ids])
    check_any(model, 1, listener.looks_ahead, None)
    return not any(listener.looks_ahead)


class _Words(Listener):
    """Records for every word the word with the largest weight, by layer, in texts of one length."""

    def __init__(self) -> None:
        self.top_words: dict[str, tuple[Tensor, Tensor]] = {}  # int [B, H, W], float [B, H, W]
        self.thread = get_ident()  # the model may also run in other threads

    def expect(self, readings: Sequence[_TokenizedSentence]) -> None:
        """Prepare for a batch of sentences."""
        B, T, W = len(readings), len(readings[0].ids), max(len(reading.words) for reading in readings)
        self.member = torch.zeros(B, W, T)
        self.real = torch.zeros(B, W, dtype=torch.bool)  # words that are not punctuation
        for b, reading in enumerate(readings):
            for at, (word, tokens) in enumerate(zip(reading.sentence.words, reading.words, strict=True)):
                self.member[b, at, tokens] = 1
                self.real[b, at] = any(map(str.isalnum, word))
        self.mean = self.member / self.member.sum(-1, keepdim=True).clamp(min=1)
        self.top_words = {}

    def hear(self, call: LayerCall) -> None:
        if self.thread != get_ident() or call.kind != "self" or in_backward():
            return
        B, W, T = self.member.shape
        if tuple(call.weights.shape[2:]) != (T, T):
            return
        weights = call.weights.detach().dense().to("cpu", torch.float32)  # [B, H, T, T]
        words = self.mean[:, None] @ weights @ self.member[:, None].mT  # [B, H, W, W]
        hidden = ~self.real[:, None, None] | torch.eye(W, dtype=torch.bool)
        words = words.masked_fill(hidden, -1)
        top = words.topk(min(2, W), -1)
        clear = (top.values[..., 0] > top.values[..., -1]) & (top.values[..., 0] > 0)
        self.top_words[call.path] = (
            top.indices[..., 0].masked_fill(~clear, -1).to(torch.int16),
            top.values[..., 0].clamp(min=0),
        )


class _Measurement:
    """The word with the largest weight for every head and word of some sentences.

    The model runs when a result is first read.
    """

    def __init__(
        self,
        model: nn.Module,
        readings: Sequence[_TokenizedSentence],
        batch: int,
        progress: bool | Callable[[int, int], None] = False,
    ) -> None:
        self.model, self.readings, self.batch, self.progress = model, readings, batch, progress
        self._names: dict[str, Layer] = {}

    def _batches(self) -> Iterator[list[int]]:
        """Yield the numbers of sentences of one length, at most `batch` of them at a time."""

        def length(at: int) -> int:
            return len(self.readings[at].ids)

        for _, same in groupby(sorted(range(len(self.readings)), key=length), length):
            alike = list(same)
            yield from (alike[start : start + self.batch] for start in range(0, len(alike), self.batch))

    @cached_property
    def top_words(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """By sentence and path: the word with the largest weight for each word, and that weight, [H, W]."""
        batches = list(self._batches())
        results: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        listener, is_bar = _Words(), bool(self.progress) and not callable(self.progress)
        with attach(self.model, listener) as attachment:
            for done, numbers in enumerate(tracked(batches, "roles", is_bar)):
                if callable(self.progress):
                    self.progress(done, len(batches))
                readings = [self.readings[number] for number in numbers]
                listener.expect(readings)
                _run(self.model, [reading.ids for reading in readings])
                check_any(self.model, 1, listener.top_words, None)
                for b, (number, reading) in enumerate(zip(numbers, readings, strict=True)):
                    W = len(reading.words)
                    results[number] = {
                        path: (top[b, :, :W].clone(), weight[b, :, :W].clone())
                        for path, (top, weight) in listener.top_words.items()
                    }
        self._names = attachment.names
        return [results[number] for number in range(len(self.readings))]

    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for by_path in self.top_words for path in by_path))

    def layers(self) -> list[Layer]:
        """Return the names of the layers."""
        return [self._names.get(path, path) for path in self.paths()]

    def heaviest(self) -> list[Tensor]:
        """Return the word with the largest weight, by sentence, int [L, H, W].

        -1: no single word has it; -2: the layer has no such head.
        """
        paths = self.paths()
        H = max(top.shape[0] for by_path in self.top_words for top, _ in by_path.values())
        by_sentence = []
        for by_path, reading in zip(self.top_words, self.readings, strict=True):
            heaviest = torch.full((len(paths), H, len(reading.words)), -2, dtype=torch.int16)
            for at, path in enumerate(paths):
                if path in by_path:
                    heaviest[at, : len(by_path[path][0])] = by_path[path][0]
            by_sentence.append(heaviest)
        return by_sentence

    def weights(self) -> list[list[list[float]]]:
        """Return the mean of the largest weights by layer, head and sentence."""
        by_layer = []
        for path in self.paths():
            means = [by_path[path][1].mean(-1) for by_path in self.top_words if path in by_path]
            by_layer.append([[round(x, 6) for x in row] for row in torch.stack(means, -1).tolist()])
        return by_layer

    def agrees(self, weights: list[list[list[float]]]) -> bool:
        """Return True if the weights are equal, up to rounding, to those of a cached result."""
        try:
            return all(
                abs(a - b) < SAME
                for layer, cached_layer in zip(self.weights(), weights, strict=True)
                for row, cached_row in zip(layer, cached_layer, strict=True)
                for a, b in zip(row, cached_row, strict=True)
            )
        except (TypeError, ValueError):  # of another shape
            return False

    def title(self) -> str:
        """Return the model's class and its numbers of layers and heads as text."""
        heads = sorted({len(top) for top, _ in self.top_words[0].values()})
        count = " or ".join(map(str, heads))
        return f"{type(self.model).__name__}, {len(self.paths())} layers of {count} heads"


# Cached results


def _key(model: nn.Module, readings: Sequence[_TokenizedSentence]) -> str:
    """Return a hash of the model's weights and the tokens of these sentences, without its config."""
    digest = hashlib.sha256(f"{FORMAT} {type(model).__name__}".encode())
    for name, value in model.named_parameters():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        data = value.detach().cpu().contiguous()
        digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b"")
    for reading in readings:
        digest.update(repr((reading.sentence, reading.ids, reading.words)).encode())
    return digest.hexdigest()[:32]


def _cache_folder() -> Path | None:
    """Return the user's folder of cached results; None if the user has no home folder."""
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "headwise" / "roles"
    except RuntimeError:
        return None


def _read_cached(path: Path) -> tuple[Roles, Any] | None:
    """Return a cached result and the weights to check it by; None if there is none that can be read."""
    try:
        data = json.loads(path.read_text("utf-8"))
        return Roles.from_json(data["roles"]), data["proof"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write_cached(name: str, result: Roles, weights: list[list[list[float]]]) -> None:
    """Write a result into the cache, or warn if that is not possible."""
    folder = _cache_folder()
    try:
        if folder is None:
            raise ArgumentError("cache must have a folder: the user has no home folder; set XDG_CACHE_HOME")
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / name, "cache") as file:
            file.write_text(json.dumps({"roles": result.to_json(), "proof": weights}), "utf-8")
    except (OSError, ArgumentError) as error:
        # 4: past `roles` and its no_grad, to the caller
        warnings.warn(
            f"roles were measured but could not be saved: {error}; or pass keep=False", stacklevel=4
        )


# Retrieval


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What one run showed.

    Attributes:
        scores: by layer, [H]: the share of the needle each head copied.
        generated: int [new_tokens], the tokens that the model generated.
        recall: the share of the needle's different tokens among them (ROUGE-1 recall, by tokens). Wu 2024
            counts runs above 0.5 only.
    """

    scores: ByLayer[Tensor]
    generated: Tensor
    recall: float

    @property
    def found(self) -> bool:
        """Whether the model found the needle, so that the scores mean something."""
        return self.recall > ENOUGH

    def ranking(self) -> list[tuple[Layer, int, float]]:
        """Return (layer, head, score), the best first."""
        return [(layer, head, score) for layer, head, score in ranked(self.scores)]

    def __str__(self) -> str:
        count = len(self.generated)
        summary = f"{count} token{' was' if count == 1 else 's were'} generated"
        summary += f", with {self.recall:.0%} of the needle's tokens among them"
        verdict = "" if self.found else f": at most {ENOUGH:.0%}, so the scores mean little"
        copied = [ranked for ranked in self.ranking()[:SHOWN] if ranked[2] > 0]
        best = ", ".join(f"layer {layer} head {head} ({score:.2f})" for layer, head, score in copied)
        return f"{summary}{verdict}. Copied most by: {best or 'no head'}."


class _TopKeys(Listener):
    """Records the key with the largest weight for the last query of each step, by layer, as a position."""

    def __init__(self, tokens: int, steps: int) -> None:
        self.tokens, self.steps, self.step = tokens, steps, 0
        self.top_keys: dict[str, Tensor] = {}  # [steps, H]; -1 where a layer did not run

    def hear(self, call: LayerCall) -> None:
        if call.kind == "self":
            _, H, T, S = call.weights.shape
            last = call.weights.detach().select(batch=0, queries=T - 1).top(1).indices[0, :, 0, 0]  # [H]
            dropped = max(0, self.tokens + self.step - S)  # a sliding-window cache has only the last S keys
            if call.path not in self.top_keys:
                self.top_keys[call.path] = last.new_full((self.steps, H), -1)
            self.top_keys[call.path][self.step] = last + dropped


@torch.no_grad()
def retrieval_scores(
    model: nn.Module,
    input_ids: Tensor,
    needle: tuple[int, int],
    *,
    new_tokens: int | None = None,
    fallback: str | None = None,
) -> Retrieval:
    """Return which heads copy a needle out of a long text while a causal language model answers greedily.

    Args:
        model: a Hugging Face causal language model that returns a cache (with gradient checkpointing in
            training mode it returns none).
        input_ids: int [1, S]: text, needle and question.
        needle: (start, stop) of the needle in input_ids.
        new_tokens: how many to generate; by default as many as the needle has.

    Raises:
        ShapeError: more than one sequence.
        ArgumentError: a needle that is empty or outside the text; fewer than one new token; a model
            that gives no cache.
        AttentionBypassed: layers whose attention cannot be intercepted; no attention was found.

    Wu 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality".
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ShapeError(
            f"input_ids must be one sequence, [1, S]: got {list(input_ids.shape)}; run them one by one"
        )
    start, stop = needle
    S = input_ids.shape[1]
    if not 0 <= start < stop <= S:
        raise ArgumentError(
            f"needle must lie in the text: got ({start}, {stop}) of {S} tokens; it is (first, last + 1)"
        )
    count = stop - start if new_tokens is None else new_tokens
    if count < 1:
        raise ArgumentError(
            f"new_tokens must be at least 1: got {count}; the needle has {stop - start} tokens"
        )
    listener = _TopKeys(S, count)
    new: list[Tensor] = []
    ids, cache = input_ids, None
    with attach(model, listener, fallback) as attachment:
        for step in range(count):
            listener.step = step
            output: Any = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = output.logits[:, -1:].argmax(-1), getattr(output, "past_key_values", None)
            if cache is None and step + 1 < count:
                raise ArgumentError(
                    f"model must return a cache: {type(model).__name__} returned past_key_values=None in "
                    f"step {step + 1} of {count}; use model.eval(), and a causal language model"
                )
            new.append(ids[0, 0])
    check_any(model, count, listener.top_keys, fallback)
    generated, tokens = torch.stack(new).cpu(), input_ids[0].cpu()
    scores = {
        path: retrieval(top.cpu(), tokens, generated, needle) for path, top in listener.top_keys.items()
    }
    wanted = set(tokens[start:stop].tolist())
    recall = len(wanted & set(generated.tolist())) / len(wanted)
    return Retrieval(ByLayer(scores, attachment.names), generated, recall)
