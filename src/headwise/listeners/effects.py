"""What each head does: the model's answer with the head switched off, beside the one with all heads on.

    next token      sum_w p(w) log(p(w) / p_off(w)), nats; p: what comes after the last real position
    masked token    the same, of what stands at the first [MASK]
    output          ||y_off - y|| / ||y||, mean over the real positions

Which of the three it is, the model decides: see `effects`. A head that is off says 0, as in `ablate`.

Letters: B batch, T length, V vocab_size, E width; H num_heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.collection import Heads
from ..heads.layer_names import ByLayer, Layer, names_of
from ..models.batches import run, tracked
from ..models.pretrained import Tokenizer, token_name
from .ablation import Switches
from .active import Call
from .chosen_heads import base_of, check_head
from .head_outputs import check_any
from .importance import Ranked
from .model_answers import MASKED, NEXT, OUTPUT, Seen, look_at
from .model_door import attach
from .model_structure import structure_of

__all__ = ["Effects", "Words", "effects"]

Words = list[tuple[str, float]]  # words and their probabilities, the likeliest first

UNITS = {NEXT: "nats", MASKED: "nats", OUTPUT: "of its norm"}
SENTENCES = {
    NEXT: "How far the probabilities of the next token move without the head: the KL divergence.",
    MASKED: "How far the probabilities of the masked token move without the head: the KL divergence.",
    OUTPUT: "How far the model's output moves without the head, as a share of its norm.",
}
AGAIN = " A layer that runs again is without it each time."
PAST = ("past_key_values", "cache", "cache_params")  # what every run would add to
SHOWN = 3  # heads, and words, that are named below the numbers


class Effects(ByLayer[Tensor]):
    """What each head does, [H] by layer: its number, where the model has one stack of layers, or path.

    Attributes:
        of: "next token", "masked token" or "output": what was measured.
        unit: of the numbers: "nats", or "of its norm".
        sequences: how many there were; the numbers are the mean over them.
        before: for each sequence the likeliest words with all heads on; None of an output.
        by_sequence: [H, B] by layer.
    """

    def __init__(
        self,
        by_sequence: Mapping[str, Tensor],
        of: str,
        names: Mapping[str, Layer],
        before: list[Words] | None = None,
        after: Mapping[str, list[list[Words]]] | None = None,
    ) -> None:
        super().__init__({path: values.mean(1) for path, values in by_sequence.items()}, names or None)
        self.of, self.unit = of, UNITS[of]
        self.by_sequence: ByLayer[Tensor] = ByLayer(by_sequence, names or None)
        self.sequences = next((values.shape[1] for values in by_sequence.values()), 0)
        self.before = before
        self._after = dict(after or {})  # by path: of each head, for each sequence

    def after(self, layer: Layer, head: int, batch: int = 0) -> Words | None:
        """The likeliest words of one sequence without a head; None of an output.

        Raises:
            ArgumentError: no such layer or head.
            IndexError: no such sequence.
        """
        path = self.path_of(layer)
        check_head(head, len(self[path]), path)
        self._check_sequence(batch)
        return None if self.before is None else self._after[path][head][batch]

    def ranking(self) -> list[Ranked]:
        """All heads, the one that does most first; what is no number comes last."""
        every = [
            Ranked(layer, head, effect)
            for layer, values in self.items()
            for head, effect in enumerate(values.tolist())
        ]
        return sorted(every, key=lambda ranked: math.inf if math.isnan(ranked.score) else -ranked.score)

    def to_page(self, heads: Heads, batch: int | None = None) -> dict[str, Any]:
        """As the page of these heads takes it: `EffectsData` of page/src/heads/page_data.ts.

        Args:
            heads: whose page it is; layers are counted as in it. Heads that were not measured are left out.
            batch: which sequence; None: the mean over all, and the words of the first.

        Raises:
            ArgumentError: no layer of these heads was measured; a layer with another number of heads.
            IndexError: no such sequence.
        """
        if batch is not None:
            self._check_sequence(batch)
        words = 0 if batch is None else batch
        rows: list[dict[str, Any]] = []
        for number, path in enumerate(heads.paths):
            measured = base_of(path)  # of a layer that runs again every visit was off
            if measured not in self._values:
                continue
            values = self._values[measured] if batch is None else self.by_sequence[measured][:, batch]
            if len(values) != len(heads[path]):
                raise ArgumentError(
                    f"effects must be of the model that was watched: {path} has {len(heads[path])} heads "
                    f"there, and {len(values)} were measured; measure this model's"
                )
            for head, value in enumerate(values.tolist()):
                after = self._after[measured][head][words] if self.before is not None else None
                rows.append(
                    {
                        "layer": number,
                        "head": head,
                        "effect": value if math.isfinite(value) else None,
                        "after": None if after is None else [list(word) for word in after],
                    }
                )
        if not rows:
            raise ArgumentError(
                f"effects must be of the model that was watched: of {', '.join(self.paths) or 'no layer'}, "
                f"and heads are of {', '.join(heads.paths) or 'no layer'}; measure this model's"
            )
        return {
            "of": self.of,
            "sentence": self._sentence(batch)
            + AGAIN * (len({*map(base_of, heads.paths)}) < len(heads.paths)),
            "before": None if self.before is None else [list(word) for word in self.before[words]],
            "heads": rows,
            "unit": self.unit,
        }

    def _sentence(self, batch: int | None) -> str:
        if batch is not None or self.sequences == 1:
            return SENTENCES[self.of]
        first = "" if self.before is None else " The words are those of the first."
        return f"{SENTENCES[self.of]} The mean over {self.sequences} texts.{first}"

    def _check_sequence(self, batch: int) -> None:
        if not -self.sequences <= batch < self.sequences:
            raise IndexError(
                f"batch must be one of {self.sequences} sequences: got {batch}; count them from 0"
            )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        from ..show.texts import plain

        def said(words: Words) -> str:
            return ", ".join(f'"{plain(word)}" {chance:.2f}' for word, chance in words[:SHOWN])

        many = f"{self.sequences} sequence{'' if self.sequences == 1 else 's'}"
        measure = "norm of the change, as a share" if self.of == OUTPUT else "KL divergence, nats"
        count = sum(map(len, self.values()))
        lines = [f"What {count} heads do to the {self.of}, each switched off alone, over {many} ({measure})."]
        wide = max((len(str(layer)) for layer in self), default=0)
        for layer, values in self.items():
            lines.append(
                f"  layer {layer!s:<{wide}}  " + "  ".join(f"{value:9.3g}" for value in values.tolist())
            )
        if self.before is not None:
            lines.append(f"All on: {said(self.before[0])}")
        for layer, head, effect in self.ranking()[:SHOWN]:
            without = self.after(layer, head)
            lines.append(
                f"Without layer {layer} head {head} ({effect:.3g})"
                + (f": {said(without)}" if without else "")
            )
        return "\n".join(lines)


@torch.no_grad()
def effects(
    model: nn.Module,
    inputs: object,
    *,
    tokenizer: Tokenizer | None = None,
    top: int = 10,
    progress: bool | Callable[[int, int], None] = True,
    fallback: str | None = None,
) -> Effects:
    """What each head does on these inputs: the model's answer without it, beside the answer with all heads.

        effects = hw.effects(model, tokenizer("The cat sat on the", return_tensors="pt"), tokenizer=tokenizer)
        print(effects)
        effects.ranking()[0], effects.after(2, 3)

    Of a language model it is how far the probabilities of the next token move, at the last real position
    of each sequence: the KL divergence sum p log(p / p_off), in nats. Of one that fills gaps
    (a masked language model), the same of the token at the first [MASK], where every sequence has one and
    the tokenizer tells. Of every other, how far its output moves as a share of its norm,
    ||y_off - y|| / ||y||, in the mean over the real positions. `effects.of` says which it is.

    A head that is off says 0, as in `headwise.ablate`; a layer that runs several times in a forward is
    off each time. The model runs once and once more per head, and is afterwards as it was.

    Args:
        model: any that `headwise.watch` hears, in eval mode.
        inputs: what it takes: a mapping of its arguments, a tuple of them, or one tensor.
        tokenizer: its own, for the words; without it, they are the numbers of tokens.
        top: how many of the likeliest words are kept.
        progress: a bar, where it takes over two seconds and rich is installed; or a function that is told
            how many heads are done, of how many.
        fallback: for layers that bypass every hook: None raises; "skip" leaves them out.

    Raises:
        ArgumentError: a model in training mode; inputs that are a text, hold a cache, or a sequence without
            a real position; a top below 1; an answer that holds no numbers, or whose positions are not
            those of the padding; a tokenizer that names no tokens.
        AttentionBypassed: a layer whose outputs are not in hand; nothing heard at all.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4).eval(), torch.randn(1, 3, 8)
        >>> found = effects(mha, x)
        >>> found.of, found[0].shape, len(found.ranking())
        ('output', torch.Size([4]), 4)

    Michel 2019, section 3; the KL divergence as in Conmy 2023 (ACDC), section 3.
    """
    switches = _Switches()
    attached = attach(model, switches, fallback)  # says at once if it is no model
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ArgumentError(f"top must be a whole number of at least 1: got {top!r}; 10 is usual")
    if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise ArgumentError(
            f"tokenizer must name tokens: {type(tokenizer).__name__} has no convert_ids_to_tokens; give the "
            "model's own, or none"
        )
    _check_mode(model)
    _check_inputs(inputs)
    with attached:
        with switches.without(()):
            answer = run(model, inputs)
        check_any(model, 1, switches.num_heads, fallback)
        look = look_at(model, inputs, answer, switches.seen, tokenizer)
        before = look.read(answer)
        look.check(model, before)
        heads = switches.every_head()
        rows: dict[str, list[Tensor]] = {path: [] for path in switches.num_heads}
        after: dict[str, list[list[Words]]] = {path: [] for path in switches.num_heads}
        said = None if look.of == OUTPUT else _Said(tokenizer, top)
        for done, (path, head) in enumerate(tracked(heads, "effects", progress is True)):
            with switches.without([(path, head)]):
                without = look.read(run(model, inputs))
            rows[path].append(look.effect(before, without))
            if said is not None:
                after[path].append(said.words(without))
            if callable(progress):
                progress(done + 1, len(heads))
    by_sequence = {path: torch.stack(values).cpu() for path, values in rows.items()}  # [H, B]
    names = names_of(structure_of(model).places)
    words = None if said is None else said.words(before)
    return Effects(by_sequence, look.of, names, words, None if said is None else after)


# What is run


class _Switches(Switches):
    """Knows which positions of each call are real, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def hear(self, call: Call) -> Tensor | None:
        if not self.off:
            B, _, T, _ = call.weights.shape
            self.seen.append((call.kind, B, T, call.weights.mask.counted(T)))
        return super().hear(call)


def _check_mode(model: nn.Module) -> None:
    training = [module for module in model.modules() if module.training]
    if not training:
        return
    held = [
        value
        for module in training
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "dropout" in name)
    ]
    dropped = f", with dropout {max(held):g}" if any(held) else ""
    raise ArgumentError(
        f"model must be in eval mode: {type(model).__name__} is in training{dropped}; use model.eval()"
    )


def _check_inputs(inputs: object) -> None:
    if isinstance(inputs, (str, bytes)):
        raise ArgumentError(
            f"inputs must be what the model takes: got {inputs[:20]!r}; use tokenizer(text, "
            "return_tensors='pt')"
        )
    given = inputs if isinstance(inputs, Mapping) else {}
    for name in PAST:
        if given.get(name) is not None:
            raise ArgumentError(
                f"inputs must not hold a cache: got {name}, to which every run would add; give the whole text"
            )


# Words


class _Said:
    """The likeliest words of some logits."""

    def __init__(self, tokenizer: Tokenizer | None, top: int) -> None:
        self.tokenizer, self.top = tokenizer, top
        # models often have a few more, up to a round number
        self._size: float = len(tokenizer) if isinstance(tokenizer, Sized) else math.inf
        self._names: dict[int, str] = {}

    def words(self, logits: Tensor) -> list[Words]:
        """For each sequence, of [B, V]."""
        best = logits.softmax(-1).topk(min(self.top, logits.shape[-1]), -1)
        return [
            [(self._name(token), chance) for token, chance in zip(tokens, chances, strict=True)]
            for tokens, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _name(self, token: int) -> str:
        if token not in self._names:
            tokenizer = self.tokenizer if token < self._size else None
            self._names[token] = str(token) if tokenizer is None else token_name(tokenizer, token)
        return self._names[token]
