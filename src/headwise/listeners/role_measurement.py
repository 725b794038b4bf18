"""`roles`: which head of a model looks from a word to the word it belongs to.

Sentences of the grammar run through the model, those of one length together, so that nothing is padded; of
every head the heaviest word is noted for each word, and `heads/roles.py` judges what was noted. A word of
several tokens is looked at by all of them in sum, and looks as they do on average (Clark 2019).

What was measured is kept in the user's cache under a hash of weights, tokens and grammar, and for some models
comes with the package. It is believed only after a few sentences gave the same attention again: a config, a
hook, a patch or an ablation is in no hash.

`retrieval_scores`: which heads copy a needle, a sentence hidden in a long text, while the model says it token
by token. A retrieval head's heaviest key is then the very token of the needle that comes next. Wu 2024.

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
from ..heads.layer_names import ByLayer, Layer
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
BEGINNING = "Well, "  # before a text, for a causal model without a token to start with
PROOF = 6  # sentences that are run again before a kept result is believed
SAME = 1e-3  # weights that differ by less, on average over a head's words, are the same but for rounding
SHIPPED = Path(grammar.__file__).parent / "kept_roles"
ENOUGH = 0.5  # of a needle's tokens must come back, or a run tells nothing
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
    """Which head looks from a word to the word it belongs to, measured on sentences of a grammar.

        roles = hw.roles(model, tokenizer)
        print(roles)
        roles["pronoun > antecedent"].share

    Each relation's head is chosen on one half of the sentences and judged on the other, which has other
    words and other shapes, beside rules that need no model: the best fixed offset, the nearest word of that
    class, the first and the last. It is found where it beats every one of them by 0.15 and by more than
    chance. Asked is the word that gets most of a head's weight, special tokens, punctuation and the word
    itself left out. A model that sees only what came before, as its weights tell, is asked about nothing
    else, and reads a start token first, or where there is none the word "Well".

    Args:
        model: any that `headwise.watch` hears, reading one text. It is in eval mode meanwhile.
        tokenizer: with offsets, as all fast ones of transformers.
        sentences: how many, or sentences of your own (`headwise.heads.grammar.Sentence`).
        seed: which sentences are drawn.
        batch: how many run at once.
        progress: a bar, where it takes over two seconds and rich is installed; or a function that is told
            how many batches are done, of how many.
        keep: look for a result that was kept, and keep this one; it is used only if a few sentences, run
            anew, agree with it.

    Raises:
        ArgumentError: too few sentences; a batch below 1; a tokenizer without offsets, one whose tokens
            reach from word to word, or one that is not the model's; a model of two texts, or one that reads
            less than a sentence.
        AttentionBypassed: layers that cannot be heard.

    Clark 2019, "What Does BERT Look At?"; Voita 2019.
    """
    attach(model, Ahead())  # says at once if it is no model
    check_count(batch, "batch", "16 is usual")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed must be a whole number: got {seed!r}; 0 is usual")
    texts = grammar.sentences(sentences, seed) if isinstance(sentences, int) else _given(sentences)
    if not texts:
        raise ArgumentError("sentences must not be empty: got 0; give a number, 700 is usual")
    parts = {part for path in structure_of(model).places for part in path.split(".")}
    if {"encoder", "decoder"} <= parts:
        raise ArgumentError(
            f"model must read one text: {type(model).__name__} is an encoder-decoder; give its encoder"
        )
    reads = getattr(model, "main_input_name", "input_ids")  # of transformers
    if reads != "input_ids":
        raise ArgumentError(f"model must read text: {type(model).__name__} reads {reads}; give one that does")
    with _in_eval_mode(model):
        known = [read for text in texts if (read := _encode(tokenizer, text)) is not None]
        if not known:
            raise ArgumentError(
                f"tokenizer must know the words: none of {len(texts)} sentences is without an unknown one, "
                f"such as {texts[0].text!r}; is it the model's own?"
            )
        _check_fit(model, known)
        causal = _is_causal(model, known[0])
        if causal:
            begun = [_encode(tokenizer, read.sentence, causal=True) for read in known]
            known = [read for read in begun if read is not None]
            _check_fit(model, known)
        if keep:
            name = _key(model, known)
            proof = _Measurement(model, known[:: max(1, len(known) // PROOF)][:PROOF], PROOF)
            for folder in (SHIPPED, _cache()):
                kept = None if folder is None else _read(folder / f"{name}.json")
                if kept is not None and proof.agrees(kept[1]):
                    kept[0].left_out = len(texts) - len(known)  # of today's texts
                    return kept[0]
        measured = _Measurement(model, known, batch, progress)
        answer = judge(
            [read.sentence for read in known], measured.heaviest(), measured.layers(), causal=causal,
            title=measured.title(), left_out=len(texts) - len(known),
        )  # fmt: skip
        if keep:
            _write(f"{name}.json", answer, proof.weights())
        return answer


def _given(sentences: object) -> list[Sentence]:
    """Sentences of the caller's own."""
    given: list[Any] = list(sentences) if isinstance(sentences, Iterable) else [sentences]
    for each in given:
        if not isinstance(each, Sentence):
            raise ArgumentError(
                f"sentences must be a number, or sentences whose relations are known: got {each!r}; see "
                "headwise.heads.grammar.Sentence"
            )
    return given


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off, and each module afterwards as it was."""
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
class _Read:
    """A sentence as tokens."""

    sentence: Sentence
    ids: list[int]
    words: list[list[int]]  # the tokens of each word, by number


def _encode(tokenizer: Any, sentence: Sentence, causal: bool = False) -> _Read | None:
    """The tokens of each word; None: one of them is unknown.

    causal: put something in front that takes the weight that a head has no use for.
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
                f"tokenizer must cut a text between its words: a token of {type(tokenizer).__name__} is "
                f"{text[begin - shift : end - shift]!r}; use a model with smaller tokens"
            )
        for at in touched:
            words[at].append(number)
            if ids[number] == unknown:
                return None
    for word, tokens in zip(sentence.words, words, strict=True):
        if not tokens:
            raise ArgumentError(
                f"tokenizer must give every word a token: {word!r} has none of {type(tokenizer).__name__}; "
                "is it the model's own?"
            )
    return _Read(sentence, ids, words)


def _tokens(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    try:
        told = tokenizer(text, return_offsets_mapping=True)
        return list(told["input_ids"]), [(int(begin), int(end)) for begin, end in told["offset_mapping"]]
    except HeadwiseError:
        raise
    except (NotImplementedError, TypeError, KeyError, ValueError) as error:
        raise ArgumentError(
            f"tokenizer must tell where its tokens are: {type(tokenizer).__name__} has no offsets "
            f"({type(error).__name__}); use a fast tokenizer of transformers"
        ) from error


def _check_fit(model: nn.Module, reads: Sequence[_Read]) -> None:
    """Raise `ArgumentError` where a token or a position is beyond what the model has."""
    config = getattr(model, "config", None)
    size, largest = getattr(config, "vocab_size", None), max(max(read.ids) for read in reads)
    if isinstance(size, int) and largest >= size:
        raise ArgumentError(
            f"tokenizer must fit the model: token {largest} for a vocabulary of {size}; are they a pair?"
        )
    longest = max(len(read.ids) for read in reads)
    is_ours = isinstance(config, TransformerConfig)  # of other configs, max_length is how much to generate
    for name in ("max_length",) if is_ours else ("max_position_embeddings", "n_positions"):
        room = getattr(config, name, None)
        if isinstance(room, int) and room < longest:
            raise ArgumentError(
                f"model must read whole sentences: {longest} tokens for {name} = {room}; use one that reads "
                "more"
            )


# Running the model


def _run(model: nn.Module, ids: list[list[int]]) -> None:
    """Call the model with tokens, for those who listen."""
    place = next(model.parameters(), torch.empty(0)).device
    given = torch.tensor(ids, device=place)
    taken = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"attention_mask": torch.ones_like(given)} if "attention_mask" in taken else {}
    if "use_cache" in taken:
        options["use_cache"] = False
    model(given, **options)


class Ahead(Listener):
    """Whether any head of any layer looks at what comes later."""

    def __init__(self) -> None:
        self.heard: list[bool] = []
        self.thread = get_ident()  # a model may run in others, too

    def hear(self, call: LayerCall) -> None:
        if call.kind == "self" and self.thread == get_ident():
            weights = call.weights.detach().dense()
            if weights.isnan().any():
                raise ArgumentError(
                    f"model must give weights that are numbers: {call.path} has NaN; was it trained in too "
                    "few bits?"
                )
            self.heard.append(bool(weights.triu(1).any()))


def _is_causal(model: nn.Module, read: _Read) -> bool:
    listener = Ahead()
    with attach(model, listener):
        _run(model, [read.ids])
    check_any(model, 1, listener.heard, None)
    return not any(listener.heard)


class _Words(Listener):
    """The heaviest word of every word, and its weight, by layer: of one batch of equally long texts."""

    def __init__(self) -> None:
        self.heard: dict[str, tuple[Tensor, Tensor]] = {}  # int [B, H, W], float [B, H, W]
        self.thread = get_ident()  # a model may run in others, too

    def expect(self, reads: Sequence[_Read]) -> None:
        """Get ready for a batch."""
        B, T, W = len(reads), len(reads[0].ids), max(len(read.words) for read in reads)
        self.member = torch.zeros(B, W, T)
        self.real = torch.zeros(B, W, dtype=torch.bool)  # words, and no punctuation
        for b, read in enumerate(reads):
            for at, (word, tokens) in enumerate(zip(read.sentence.words, read.words, strict=True)):
                self.member[b, at, tokens] = 1
                self.real[b, at] = any(map(str.isalnum, word))
        self.mean = self.member / self.member.sum(-1, keepdim=True).clamp(min=1)
        self.heard = {}

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
        self.heard[call.path] = (
            top.indices[..., 0].masked_fill(~clear, -1).to(torch.int16),
            top.values[..., 0].clamp(min=0),
        )


class _Measurement:
    """What every head looks at in some sentences; the model runs when this is first asked for."""

    def __init__(
        self,
        model: nn.Module,
        known: Sequence[_Read],
        batch: int,
        progress: bool | Callable[[int, int], None] = False,
    ) -> None:
        self.model, self.known, self.batch, self.progress = model, known, batch, progress
        self._names: dict[str, Layer] = {}

    def _batches(self) -> Iterator[list[int]]:
        """The numbers of sentences of one length, at most `batch` of them."""

        def length(at: int) -> int:
            return len(self.known[at].ids)

        for _, same in groupby(sorted(range(len(self.known)), key=length), length):
            alike = list(same)
            yield from (alike[start : start + self.batch] for start in range(0, len(alike), self.batch))

    @cached_property
    def heard(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """By sentence and path: the heaviest word of each word, and its weight, [H, W]."""
        batches = list(self._batches())
        found: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        listener, is_bar = _Words(), bool(self.progress) and not callable(self.progress)
        with attach(self.model, listener) as attachment:
            for done, some in enumerate(tracked(batches, "roles", is_bar)):
                if callable(self.progress):
                    self.progress(done, len(batches))
                reads = [self.known[at] for at in some]
                listener.expect(reads)
                _run(self.model, [read.ids for read in reads])
                check_any(self.model, 1, listener.heard, None)
                for b, (at, read) in enumerate(zip(some, reads, strict=True)):
                    W = len(read.words)
                    found[at] = {
                        path: (top[b, :, :W].clone(), weight[b, :, :W].clone())
                        for path, (top, weight) in listener.heard.items()
                    }
        self._names = attachment.names
        return [found[at] for at in range(len(self.known))]

    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for by_path in self.heard for path in by_path))

    def layers(self) -> list[Layer]:
        """What the layers go by."""
        return [self._names.get(path, path) for path in self.paths()]

    def heaviest(self) -> list[Tensor]:
        """By sentence, int [L, H, W]: -1 where no word is the heaviest, -2 where a layer has no such head."""
        paths = self.paths()
        H = max(top.shape[0] for by_path in self.heard for top, _ in by_path.values())
        whole = []
        for by_path, read in zip(self.heard, self.known, strict=True):
            every = torch.full((len(paths), H, len(read.words)), -2, dtype=torch.int16)
            for at, path in enumerate(paths):
                if path in by_path:
                    every[at, : len(by_path[path][0])] = by_path[path][0]
            whole.append(every)
        return whole

    def weights(self) -> list[list[list[float]]]:
        """By layer, head and sentence: the mean weight of the heaviest words."""
        found = []
        for path in self.paths():
            means = [by_path[path][1].mean(-1) for by_path in self.heard if path in by_path]
            found.append([[round(x, 6) for x in row] for row in torch.stack(means, -1).tolist()])
        return found

    def agrees(self, weights: list[list[list[float]]]) -> bool:
        """Return True if the model looks as it did when these weights were kept."""
        try:
            return all(
                abs(a - b) < SAME
                for one, other in zip(self.weights(), weights, strict=True)
                for row, kept in zip(one, other, strict=True)
                for a, b in zip(row, kept, strict=True)
            )
        except (TypeError, ValueError):  # of another shape
            return False

    def title(self) -> str:
        """The model's class, its layers and their heads."""
        heads = sorted({len(top) for top, _ in self.heard[0].values()})
        count = " or ".join(map(str, heads))
        return f"{type(self.model).__name__}, {len(self.paths())} layers of {count} heads"


# Kept results


def _key(model: nn.Module, known: Sequence[_Read]) -> str:
    """A name for this model's weights and these sentences in its tokens; a config is left to the proof."""
    digest = hashlib.sha256(f"{FORMAT} {type(model).__name__}".encode())
    for name, value in model.named_parameters():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        there = value.detach().cpu().contiguous()
        digest.update((ctypes.c_char * there.nbytes).from_address(there.data_ptr()) if there.nbytes else b"")
    for read in known:
        digest.update(repr((read.sentence, read.ids, read.words)).encode())
    return digest.hexdigest()[:32]


def _cache() -> Path | None:
    """The user's folder of kept results; None: a user without a home has none."""
    said = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(said) if said else Path.home() / ".cache") / "headwise" / "roles"
    except RuntimeError:
        return None


def _read(place: Path) -> tuple[Roles, Any] | None:
    """What was kept there, and its proof; None: nothing, or nothing that can be read."""
    try:
        told = json.loads(place.read_text("utf-8"))
        return Roles.from_json(told["roles"]), told["proof"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(name: str, answer: Roles, proof: list[list[list[float]]]) -> None:
    """Keep a result; where that cannot be, say so and go on."""
    folder = _cache()
    try:
        if folder is None:
            raise ArgumentError("cache must have a folder: the user has no home; set XDG_CACHE_HOME")
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / name, "cache") as half:
            half.write_text(json.dumps({"roles": answer.to_json(), "proof": proof}), "utf-8")
    except (OSError, ArgumentError) as error:
        # 4: past `roles` and the no_grad around it, to who called
        warnings.warn(f"roles were measured but not kept: {error}; or use keep=False", stacklevel=4)


# Retrieval


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What one run showed.

    Attributes:
        scores: by layer, [H]: the share of the needle each head copied.
        generated: int [new_tokens], what the model said.
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
        """(layer, head, score), the best first."""
        return [(layer, head, score) for layer, head, score in ranked(self.scores)]

    def __str__(self) -> str:
        count = len(self.generated)
        said = f"{count} token{' was' if count == 1 else 's were'} said"
        said += f", with {self.recall:.0%} of the needle's among them"
        verdict = "" if self.found else f": not above {ENOUGH:.0%}, so that the scores tell little"
        copied = [ranked for ranked in self.ranking()[:SHOWN] if ranked[2] > 0]
        best = ", ".join(f"layer {layer} head {head} ({score:.2f})" for layer, head, score in copied)
        return f"{said}{verdict}. Copied most by: {best or 'no head'}."


class _TopKeys(Listener):
    """The heaviest key of the last query at each step, by layer, as a position in the text."""

    def __init__(self, tokens: int, steps: int) -> None:
        self.tokens, self.steps, self.step = tokens, steps, 0
        self.found: dict[str, Tensor] = {}  # [steps, H]; -1 where a layer did not run

    def hear(self, call: LayerCall) -> None:
        if call.kind == "self":
            _, H, T, S = call.weights.shape
            last = call.weights.detach().select(batch=0, queries=T - 1).top(1).indices[0, :, 0, 0]  # [H]
            gone = max(0, self.tokens + self.step - S)  # a cache of a sliding window holds the last S alone
            if call.path not in self.found:
                self.found[call.path] = last.new_full((self.steps, H), -1)
            self.found[call.path][self.step] = last + gone


@torch.no_grad()
def retrieval_scores(
    model: nn.Module,
    input_ids: Tensor,
    needle: tuple[int, int],
    *,
    new_tokens: int | None = None,
    fallback: str | None = None,
) -> Retrieval:
    """Let a causal language model answer greedily, and see which heads fetch the needle.

    Args:
        model: a Hugging Face causal language model with a cache: in training mode, gradient checkpointing
            takes that away.
        input_ids: int [1, S]: text, needle and question.
        needle: (start, stop), where the needle lies among them.
        new_tokens: how many to generate; by default as many as the needle has.

    Raises:
        ShapeError: more than one sequence.
        ArgumentError: a needle that is empty or outside the text; fewer than one new token; a model
            that gives no cache.
        AttentionBypassed: layers that cannot be heard, or nothing heard at all.

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
    said: list[Tensor] = []
    given, cache = input_ids, None
    with attach(model, listener, fallback) as attachment:
        for step in range(count):
            listener.step = step
            answer: Any = model(input_ids=given, past_key_values=cache, use_cache=True)
            given, cache = answer.logits[:, -1:].argmax(-1), getattr(answer, "past_key_values", None)
            if cache is None and step + 1 < count:
                raise ArgumentError(
                    f"model must give a cache: {type(model).__name__} gave past_key_values=None in step "
                    f"{step + 1} of {count}; use model.eval(), and a causal language model"
                )
            said.append(given[0, 0])
    check_any(model, count, listener.found, fallback)
    generated, tokens = torch.stack(said).cpu(), input_ids[0].cpu()
    scores = {path: retrieval(top.cpu(), tokens, generated, needle) for path, top in listener.found.items()}
    wanted = set(tokens[start:stop].tolist())
    recall = len(wanted & set(generated.tolist())) / len(wanted)
    return Retrieval(ByLayer(scores, attachment.names), generated, recall)
