"""One token after another: `model.generate` and `model.stream`.

    logits [B, V] -- temperature --> -- top_k --> -- top_p --> probabilities --> tokens [B]

The prompt is read once, with a cache; then each step reads one token per sequence. Prompts of different
lengths continue from their own ends.

Letters: B batch, T the prompt's length, V vocab_size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import index
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError
from ..nn.options import HeadsOfRank

if TYPE_CHECKING:
    from .transformer import ModelCache, Transformer

ROUND = 128  # a compiled step's room is a multiple of this, so that it serves many lengths
GLANCE = 16  # steps on a GPU between two looks at whether all have ended: a look waits for it


class Options(TypedDict, total=False):
    """Further arguments of `generate` and `stream`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop: int | Sequence[int] | None
    lengths: Tensor | Sequence[int] | None
    start: int | None
    generator: torch.Generator | None
    compile: bool


class Sampling(NamedTuple):
    """The same with their defaults, checked."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: Any = None  # int [stops], once checked
    lengths: Tensor | Sequence[int] | None = None
    start: int | None = None
    generator: torch.Generator | None = None
    compile: bool = False


def generate(self: Transformer, ids: Tensor, max_new_tokens: int, **options: Unpack[Options]) -> Tensor:
    """Generate tokens after ids and return only the new ones, int [B, N].

    `torch.cat([ids, new], 1)` is the whole text. The model runs in eval mode without gradients; afterwards it
    is in the same mode as before.

    Args:
        ids: the prompt, int [B, T]; for an encoder-decoder the source.
        max_new_tokens: the largest number of new tokens.
        temperature: logits are divided by it before a token is drawn; 0: always the most probable token.
        top_k: draw only from this number of most probable tokens.
        top_p: draw only from the smallest set of most probable tokens whose probabilities sum to at least
            top_p, after temperature and top_k. Holtzman 2020.
        stop: a token, or several, that end a sequence. If other sequences of the batch are longer, the last
            token of a finished one is repeated. Generation ends when all sequences have ended.
        lengths: int [B]; the first lengths[b] tokens of prompt b are real, the others are padding.
        start: the first token of the decoder in an encoder-decoder; it is not returned.
        generator: the random number generator; with the same state it gives the same tokens.
        compile: compile the step of one token with torch.compile, on a GPU with mode="reduce-overhead", over
            a cache of fixed size. The first call with a batch size and length takes seconds longer.

    Raises:
        ArgumentError: a temperature below 0; top_k or top_p out of range, or with temperature 0; an encoder;
            an encoder-decoder without start.
        ShapeError: more tokens than the model has positions.

    Example:
        >>> from headwise.models import Transformer, TransformerConfig
        >>> from headwise.nn import Rope
        >>> config = TransformerConfig(vocab_size=61, d_model=32, num_heads=4, num_layers=2, rope=Rope())
        >>> model, ids = Transformer(config), torch.randint(61, (3, 7))
        >>> new = model.generate(ids, 5)
        >>> new.shape, bool((new[:, 0] == model(ids)[:, -1].argmax(-1)).all())
        (torch.Size([3, 5]), True)
    """
    settings = _checked(self, ids, max_new_tokens, options)
    new = torch.stack(list(_tokens(self, ids, max_new_tokens, settings, 1 if ids.is_cpu else GLANCE)), 1)
    if settings.stop is None:
        return new
    is_stop = torch.isin(new, settings.stop)  # [B, N]
    ends = is_stop.int().argmax(1)  # of each sequence that ended, where
    return new[:, : int(ends.max()) + 1] if bool(is_stop.any(1).all()) else new


def stream(
    self: Transformer, ids: Tensor, max_new_tokens: int, **options: Unpack[Options]
) -> Iterator[Tensor]:
    """Yield generated tokens step by step, int [B] each.

        for token in model.stream(ids, 100, stop=tokenizer.eos_token_id):
            print(tokenizer.decode(token), end="")

    The model is in eval mode until the loop ends.

    Args:
        ids, max_new_tokens, options: as in `generate`.
    """
    return _tokens(self, ids, max_new_tokens, _checked(self, ids, max_new_tokens, options), 1)


def _tokens(model: Transformer, ids: Tensor, count: int, settings: Sampling, glance: int) -> Iterator[Tensor]:
    temperature, top_k, top_p, stop, *_ = settings
    ended: Tensor | None = None  # bool [B]
    last: Tensor | None = None
    shard = _local_heads(model)
    with ExitStack() as contexts:
        contexts.enter_context(_without_dropout(model))
        step, logits = _begin(model, ids, count, settings, contexts)
        for number in range(1, count + 1):
            with torch.inference_mode():
                token = chosen(logits, temperature, top_k, top_p, settings.generator)
                if shard is not None:  # ranks that share heads must continue with the same token
                    token = shard.agree(token)
                if stop is not None:
                    if ended is not None and last is not None:
                        token = torch.where(ended, last, token)
                    last, ended = token, torch.isin(token, stop)
            yield token.clone()  # not an inference tensor: callers may need gradients
            if number == count or (number % glance == 0 and ended is not None and bool(ended.all())):
                return
            with torch.inference_mode():
                logits = step(token[:, None])[:, 0]


def _local_heads(model: Transformer) -> HeadsOfRank | None:
    """Return which heads are here, if several processes share them."""
    layers: Any = () if model.decoder is None else model.decoder.layers
    return layers[0].attention.local_heads if layers else None


_streams: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # number; modules in training mode
_lock = threading.Lock()


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Keep the model in eval mode until its last stream has ended, then restore its mode."""
    with _lock:
        entry = _streams.setdefault(model, [0, [module for module in model.modules() if module.training]])
        entry[0] += 1
        model.eval()
    try:
        yield
    finally:
        with _lock:
            entry[0] -= 1
            if not entry[0]:
                del _streams[model]
                for module in entry[1]:
                    module.training = True


def _begin(
    model: Transformer, ids: Tensor, count: int, settings: Sampling, contexts: ExitStack
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Read the prompt. Return a function that reads a token, [B, 1] -> [B, 1, V], and logits, [B, V]."""
    has_source = model.config.kind == "encoder-decoder"
    room = count if has_source else ids.shape[1] + count - 1
    cache, read = model.cache(), _read
    if settings.compile:
        cache, read = contexts.enter_context(_compiled(model, len(ids), -(-room // ROUND) * ROUND))
    with torch.inference_mode():
        if has_source:
            assert settings.start is not None
            first = torch.full((len(ids), 1), settings.start, device=ids.device)
            logits = model(ids, first, lengths=settings.lengths, cache=cache)
        else:
            logits = model(ids, lengths=settings.lengths, cache=cache, last=True)
    return partial(read, model, cache), logits[:, 0]


def _read(model: Transformer, cache: ModelCache, token: Tensor) -> Tensor:
    has_source = model.config.kind == "encoder-decoder"
    return model(None, token, cache=cache) if has_source else model(token, cache=cache)


Step = tuple["ModelCache", Callable[..., Tensor]]
_steps: WeakKeyDictionary[nn.Module, dict[object, Step]] = WeakKeyDictionary()


@contextmanager
def _compiled(model: Transformer, batch: int, room: int) -> Iterator[Step]:
    """Lend a cache and a compiled step over it to one caller at a time, and keep them for the next.

    A graph of kernels reads and writes where it was recorded: another cache would be another graph.
    """
    weight = model.embedding.tokens.weight
    sizes = (batch, room, weight.device, weight.dtype)
    steps = _steps.setdefault(model, {})
    step = steps.pop(sizes, None)
    if step is None:
        cache = model.cache(batch, room)
        # code of its own: torch counts how often one code was compiled, for all models together
        own = FunctionType(_read.__code__.replace(), _read.__globals__)
        if weight.is_cuda:
            _keep_in_place(cache)
        mode = "reduce-overhead" if weight.is_cuda else None
        step = cache, torch.compile(own, mode=mode, fullgraph=True)
    try:
        yield step
    finally:
        step[0].reset()
        steps[sizes] = step


def _keep_in_place(cache: ModelCache) -> None:
    """Tell torch that these tensors keep their addresses, so that a graph may write to them."""
    try:
        from torch._dynamo import mark_static_address
    except ImportError:  # then steps are compiled, but no graph of kernels is made of them
        return
    for layer in cache.layers:
        for held in (layer._k, layer._v, layer._at):
            mark_static_address(held)


def chosen(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose the likeliest token, or draw one: logits [B, V] -> int [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    likely = filtered(logits, temperature, top_k, top_p).softmax(-1)
    return torch.multinomial(likely, 1, generator=generator)[:, 0]


def filtered(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return logits [B, V], float32 at least, with -inf for tokens that may not be drawn.

    Example:
        >>> filtered(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), top_k=3, top_p=0.8)
        tensor([[4., 3., -inf, -inf]])
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k is not None:
        best = scores.topk(min(top_k, scores.shape[-1])).indices
        others = torch.ones_like(scores, dtype=torch.bool).scatter(1, best, False)
        scores = scores.masked_fill(others, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = scores.sort(descending=True)
        likely = ordered.double().softmax(-1)  # in float32 a sum of 100,000 passes 1 before it is over
        beyond = likely.cumsum(-1) - likely >= top_p  # the likelier ones are enough
        beyond[:, 0] = False
        scores = scores.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
    return scores


def _checked(model: Transformer, ids: Tensor, count: int, options: Options) -> Sampling:
    for name in options:
        if name not in Sampling._fields:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
    config, settings = model.config, Sampling(**options)
    if config.output is None:
        raise ArgumentError(
            f"model must have an output layer to generate: got kind={config.kind!r} with output=None; use a "
            "decoder with an output layer"
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"max_new_tokens must be a whole number, at least 1: got {count!r}; try 20")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        shape = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ShapeError(f"ids must be a tensor [B, T]: got {shape}; use ids[None] for one text")
    if ids.is_cpu and ids.numel() and not ids.is_floating_point() and int(ids.max()) >= config.vocab_size:
        raise ArgumentError(
            f"ids must be in the vocabulary: got {int(ids.max())} for a vocabulary of {config.vocab_size}; "
            "use the model's own tokenizer"
        )
    shard = _local_heads(model)
    if shard is not None and settings.compile:
        raise ArgumentError(
            f"compile must be False if heads are sharded over processes: got True for {shard}; leave it out"
        )
    _check_drawing(settings.temperature, settings.top_k, settings.top_p)
    _check_positions(model, ids, count)
    if (settings.start is None) == (config.kind == "encoder-decoder"):
        raise ArgumentError(
            f"start must be given for an encoder-decoder and no other model: got {settings.start!r} for "
            f"{config.kind}; start is the first token of the output"
        )
    stops = _list_stops(settings.stop)
    for token in (settings.start, *stops):
        if token is not None and not 0 <= token < config.vocab_size:
            raise ArgumentError(
                f"stop and start must be in the vocabulary: got {token} of {config.vocab_size}; use "
                "the tokenizer's eos_token_id"
            )
    return settings._replace(stop=torch.tensor(stops, device=ids.device) if stops else None)


def _list_stops(stop: int | Sequence[int] | None) -> list[int]:
    if stop is None:
        return []
    several: Any = stop if isinstance(stop, (list, tuple)) or bool(getattr(stop, "ndim", 0)) else [stop]
    try:
        return [index(token) for token in several]
    except TypeError:
        raise ArgumentError(
            f"stop must be a token id or several: got {stop!r}; use the tokenizer's eos_token_id"
        ) from None


def _check_drawing(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0:
        raise ArgumentError(f"temperature must be 0 or more: got {temperature!r}; use 0 for greedy")
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and temperature == 0:
            raise ArgumentError(
                f"{name} must be given with a temperature above 0: got {name}={value!r} and temperature=0; "
                "try temperature=1.0"
            )
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ArgumentError(f"top_k must be a whole number, at least 1: got {top_k!r}; try 50")
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError(f"top_p must be above 0 and at most 1: got {top_p!r}; try 0.9")


def _check_positions(model: Transformer, ids: Tensor, count: int) -> None:
    config, T = model.config, 1 if model.config.kind == "encoder-decoder" else ids.shape[1]
    if config.positions == "learned" and config.max_length and T + count - 1 > config.max_length:
        room = config.max_length - T + 1
        raise ShapeError(
            f"max_new_tokens must fit the model's max_length: {T} + {count} - 1 > {config.max_length}; "
            + (f"use at most {room}" if room > 0 else "shorten the prompt")
        )
