"""Effects of heads and roles: how a model's output changes when heads are switched off.

    next token      sum_w p(w) log(p(w) / p_off(w)), nats; p: what comes after the last real position
    masked token    the same, of what stands at the first [MASK]
    output          ||y_off - y|| / ||y||, mean over the real positions

Which of the three is measured depends on the model: see `effects`. The output of a head that is off is 0, as
in `ablate`.

For each role that was found, the model reads prompts of `headwise.heads.behaviours` with all heads, without
the role's heads, and some twenty times without as many other heads of the same layers. The output of a head
that is off is then its mean over the prompts (mean ablation), since later layers see no zeros in training.

Letters: B batch, T length, V vocab_size, E width; H num_heads.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.behaviours import Place, RoleEffect, RoleEffects, behaviours_of
from ..heads.collection import Heads
from ..heads.layer_names import ByLayer, Layer
from ..heads.roles import Role, Roles
from ..models.batches import run, tracked
from ..models.pretrained import Tokenizer, token_name
from .ablation import Switches
from .adapters import attach
from .chosen_heads import base_of, check_any, check_count, check_head
from .importance import HeadScores, Ranked, ranked
from .model_outputs import MASKED, METHOD, NEXT, OUTPUT, BehaviourPrompts, LanguageModel, comparison_of

Words = list[tuple[str, float]]  # words and their probabilities, the likeliest first

UNITS = {NEXT: "nats", MASKED: "nats", OUTPUT: "of its norm"}
SENTENCES = {
    NEXT: "KL divergence between the distributions of the next token with all heads and without this head, "
    "KL(all heads ‖ without the head), in nats. 0 = no effect.",
    MASKED: "KL divergence between the distributions of the masked token with all heads and without this "
    "head, KL(all heads ‖ without the head), in nats. 0 = no effect.",
    OUTPUT: "Norm of the change in the model's output when the head is switched off, divided by the norm of "
    "the output. 0 = no effect.",
}
PAST = ("past_key_values", "cache", "cache_params")  # caches, to which every run would add
SHOWN = 3  # how many heads and words are named below the numbers
SURE = 1.96  # standard errors on each side: 95%


class Effects(HeadScores):
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
        """Return the likeliest words of one sequence without a head; None of an output.

        Raises:
            ArgumentError: no such layer or head.
            IndexError: no such sequence.
        """
        path = self.path_of(layer)
        check_head(head, len(self[path]), path)
        self._check_sequence(batch)
        return None if self.before is None else self._after[path][head][batch]

    def ranking(self) -> list[Ranked]:
        """Return all heads, the largest effect first, NaN last."""
        return ranked(self)

    def to_page(self, heads: Heads, batch: int | None = None) -> dict[str, Any]:
        """Return the effects for the page of these heads: `EffectsData` of page/src/heads/page_data.ts.

        Args:
            heads: whose page it is; layers are counted as in it. Heads that were not measured are left out.
            batch: which sequence; None: the mean over all, shown with the words of the first sequence.

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
                    f"effects must belong to the watched model: {path or 'the model'} has {len(heads[path])} "
                    f"heads there and {len(values)} in effects; compute effects of this model"
                )
            for head, value in enumerate(values.tolist()):
                effect = value if math.isfinite(value) else None
                after = None if self.before is None else list(map(list, self._after[measured][head][words]))
                rows.append({"layer": number, "head": head, "effect": effect, "after": after})
        if not rows:
            layers, of_heads = (", ".join(path or "the model" for path in x.paths) for x in (self, heads))
            raise ArgumentError(
                f"effects must belong to the watched model: effects has layers {layers or 'none'}, heads has "
                f"layers {of_heads or 'none'}; compute effects of this model"
            )
        sentence = SENTENCES[self.of]
        if batch is None and self.sequences != 1:
            first = "" if self.before is None else " The tokens are those of the first text."
            sentence += f" Averaged over {self.sequences} texts.{first}"
        if len({*map(base_of, heads.paths)}) < len(heads.paths):
            sentence += " In a layer that runs several times, the head is off every time."
        before = None if self.before is None else list(map(list, self.before[words]))
        return {"of": self.of, "sentence": sentence, "before": before, "heads": rows, "unit": self.unit}

    def _check_sequence(self, batch: int) -> None:
        if not -self.sequences <= batch < self.sequences:
            raise IndexError(
                f"batch must be one of {self.sequences} sequences: got {batch}; count them from 0"
            )

    def __str__(self) -> str:
        from ..show.texts import plain

        def text(words: Words) -> str:
            return ", ".join(f'"{plain(word)}" {chance:.2f}' for word, chance in words[:SHOWN])

        sequences = f"{self.sequences} sequence{'' if self.sequences == 1 else 's'}"
        measure = "norm of the change / norm of the output" if self.of == OUTPUT else "KL divergence, nats"
        count = sum(map(len, self.values()))
        lines = [
            f"Effect of {count} heads on the {self.of}, each switched off alone, over {sequences} "
            f"({measure})."
        ]
        lines += self._rows()
        if self.before is not None:
            lines.append(f"All heads on: {text(self.before[0])}")
        for layer, head, effect in self.ranking()[:SHOWN]:
            without = self.after(layer, head)
            words = f": {text(without)}" if without else ""
            lines.append(f"Without layer {layer} head {head} ({effect:.3g}){words}")
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
    """Return the effect of each head on these inputs: how the output changes if the head is switched off.

        effects = hw.effects(model, tokenizer("The cat sat on the", return_tensors="pt"), tokenizer=tokenizer)
        print(effects)
        effects.ranking()[0], effects.after(2, 3)

    For a causal language model the effect is the change of the next token's probabilities at the last real
    position of each sequence: the KL divergence sum p log(p / p_off), in nats. For a masked language model it
    is the same for the token at the first [MASK], if every sequence has one and a tokenizer is given. For any
    other model it is the change of the output relative to its norm, ||y_off - y|| / ||y||, averaged over real
    positions. `effects.of` says which was measured.

    A head that is off has output 0, as in `headwise.ablate`; a layer that runs several times in a forward is
    off each time. The model runs once, and once more per head.

    Args:
        model: any that works with `headwise.watch`, in eval mode.
        inputs: the model's inputs: a mapping of its arguments, a tuple of them, or one tensor.
        tokenizer: the model's tokenizer, to show tokens as words; without it, token ids are shown.
        top: how many of the most probable tokens are kept.
        progress: True shows a bar if it takes over two seconds and rich is installed; or a function that is
            called with the number of heads done and the number of all heads.
        fallback: for layers whose attention cannot be intercepted: None raises; "skip" leaves them out.

    Raises:
        ArgumentError: a model in training mode; inputs that are a text, hold a cache, or have a sequence of
            padding alone; a top below 1; an output of the model without a tensor of numbers, or with another
            number of positions than the padding mask; a tokenizer that cannot convert ids to tokens.
        AttentionBypassed: a layer whose head outputs cannot be read; no attention was found.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4).eval(), torch.randn(1, 3, 8)
        >>> found = effects(mha, x)
        >>> found.of, found[0].shape, len(found.ranking())
        ('output', torch.Size([4]), 4)

    Michel 2019, section 3; the KL divergence as in Conmy 2023 (ACDC), section 3.
    """
    switches = Switches()
    attaching = attach(model, switches, fallback)  # raises if it is not a module
    check_count(top, "top", "10 is usual")
    if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise ArgumentError(
            f"tokenizer must name tokens: {type(tokenizer).__name__} has no convert_ids_to_tokens; pass "
            "the model's own tokenizer, or none"
        )
    check_eval_mode(model, also_dropout=True)
    check_inputs(inputs)
    with attaching as attachment:
        output = run(model, inputs)
        check_any(model, 1, switches.num_heads, fallback)
        comparison = comparison_of(model, inputs, output, switches.calls, tokenizer)
        before = comparison.read(output)
        comparison.check(model, before)
        heads = switches.every_head()
        values_of: dict[str, list[Tensor]] = {path: [] for path in switches.num_heads}
        after: dict[str, list[list[Words]]] = {path: [] for path in switches.num_heads}
        # models are often padded to a few tokens more than their tokenizer has
        vocab_size = len(tokenizer) if isinstance(tokenizer, Sized) else math.inf

        @cache
        def name(token: int) -> str:
            return (
                token_name(tokenizer, token) if tokenizer is not None and token < vocab_size else str(token)
            )

        for done, (path, head) in enumerate(tracked(heads, "effects", progress is True)):
            switches.switch_off([(path, head)])
            without = comparison.read(run(model, inputs))
            values_of[path].append(comparison.effect(before, without))
            if comparison.of != OUTPUT:
                after[path].append(_likeliest(without, top, name))
            if callable(progress):
                progress(done + 1, len(heads))
    by_sequence = {path: torch.stack(values).cpu() for path, values in values_of.items()}  # [H, B]
    words = None if comparison.of == OUTPUT else _likeliest(before, top, name)
    return Effects(by_sequence, comparison.of, attachment.names, words, after)


def check_eval_mode(model: nn.Module, also_dropout: bool = False) -> None:
    """Raise `ArgumentError` for a model in training mode; `also_dropout`: name its largest dropout."""
    training = [module for module in model.modules() if module.training]
    if not training:
        return
    attributes = [(name, value) for module in training for name, value in vars(module).items()]
    rates = [x for name, x in attributes if isinstance(x, float) and (name == "p" or "dropout" in name)]
    dropped = f", with dropout {max(rates):g}" if also_dropout and any(rates) else ""
    raise ArgumentError(
        f"model must be in eval mode: {type(model).__name__} is in training{dropped}; use model.eval()"
    )


def check_inputs(inputs: object) -> None:
    """Raise `ArgumentError` for inputs that are a text or contain a cache."""
    if isinstance(inputs, (str, bytes)):
        raise ArgumentError(
            f"inputs must be tensors that the model takes: got {inputs[:20]!r}; use tokenizer(text, "
            "return_tensors='pt')"
        )
    for name in PAST:
        if isinstance(inputs, Mapping) and inputs.get(name) is not None:
            raise ArgumentError(
                f"inputs must not hold a cache: got {name}, which every run would extend; pass the whole text"
            )


def _likeliest(logits: Tensor, top: int, name: Callable[[int], str]) -> list[Words]:
    """Return the likeliest words of each sequence, from logits [B, V]."""
    best = logits.softmax(-1).topk(min(top, logits.shape[-1]), -1)
    return [
        [(name(token), chance) for token, chance in zip(tokens, chances, strict=True)]
        for tokens, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


# Roles


@torch.no_grad()
def role_effects(
    model: nn.Module,
    tokenizer: Tokenizer,
    roles: Roles,
    *,
    draws: int = 20,
    seed: int = 0,
    progress: bool = True,
) -> RoleEffects:
    """Return how switching off the heads of each role changes predefined behaviours of the model.

    Since switching off any head may lower the result, the same number of other heads of the same layers is
    switched off for comparison, in several random draws. The model runs up to `draws + 2` times per prompt.

    Args:
        model: a causal language model in eval mode: of transformers, or a `headwise.models.Transformer` of
            kind "decoder".
        tokenizer: the model's tokenizer.
        roles: the result of `headwise.roles(model, tokenizer)`.
        draws: the number of random draws; if there are fewer choices of other heads, all choices.
        seed: the seed of the draws.
        progress: whether to show a bar if it takes long.

    Raises:
        ArgumentError: a model that is not causal, does not predict the next token, or is in training mode;
            fewer than one draw.
        AttentionBypassed: a layer whose head outputs cannot be read.

    Wang 2022 (IOI), section 2, on means; Clark 2019 on roles.
    """
    check_count(draws, "draws", "20 show a spread")
    attach(model, Switches())  # raises if it is not a module
    if not isinstance(getattr(roles, "found", None), Mapping):
        raise ArgumentError(
            f"roles must be the result of headwise.roles: got {type(roles).__name__}; pass the whole `Roles`"
        )
    check_eval_mode(model)
    measurable = [(name, behaviour) for name in roles.found for behaviour in behaviours_of(name)]
    without_behaviour = [name for name in roles.found if not behaviours_of(name)]
    language_model = LanguageModel(model)
    prompts_of: dict[str, BehaviourPrompts] = {}
    rows = []
    for relation, behaviour in tracked(measurable, "role effects", progress):
        if behaviour.name not in prompts_of:
            prompts_of[behaviour.name] = BehaviourPrompts(language_model, tokenizer, behaviour)
        rows.append(_effect(prompts_of[behaviour.name], relation, roles.found[relation], draws, seed))
    return RoleEffects(rows, without_behaviour, METHOD)


def _effect(prompts: BehaviourPrompts, relation: str, role: Role, draws: int, seed: int) -> RoleEffect:
    """Measure the effect of one role on the prompts of one behaviour."""
    counts = prompts.num_heads
    heads: list[Place] = [(layer, int(head)) for layer, head, *_ in role.heads]
    left_on: list[Place] = []
    controls: list[list[Place]] = []
    is_every_draw = True
    if prompts.pairs:
        heads, left_on = _switched_off(heads, counts)
        controls, is_every_draw = _draws(heads, counts, draws, random.Random(f"{seed} {relation}"))
    all_on, off = prompts.margins(), prompts.margins(heads)
    drawn = all_on.new_zeros(len(controls), *all_on.shape)  # [draws, pairs, 2]
    for row, control in zip(drawn, controls, strict=True):
        row.copy_(prompts.margins(control))
    change = (off - all_on).mean(1)  # [pairs]
    control_change = (drawn - all_on).mean(2)  # [draws, pairs]
    margin_low, margin_high = _interval(all_on.mean(1))
    low, high = _interval(change)
    more_low, more_high = _interval(change - control_change.mean(0)) if controls else (math.nan, math.nan)
    return RoleEffect(
        relation=relation,
        behaviour=prompts.behaviour.name,
        heads=tuple(heads),
        left_on=tuple(left_on),
        pairs=len(all_on),
        dropped=prompts.dropped,
        margin=_mean(all_on),
        margin_low=margin_low,
        margin_high=margin_high,
        accuracy=_accuracy(all_on),
        off=_mean(off),
        off_accuracy=_accuracy(off),
        change=_mean(change),
        low=low,
        high=high,
        draws=tuple(control_change.mean(1).tolist()),
        more_low=more_low,
        more_high=more_high,
        every_draw=is_every_draw,
    )


def _mean(values: Tensor) -> float:
    """Return the mean; NaN of no values."""
    return float(values.mean()) if values.numel() else math.nan


def _accuracy(margins: Tensor) -> float:
    """Return the share of margins above 0, where a tie counts half."""
    return _mean((margins > 0).double() + 0.5 * (margins == 0).double())


def _interval(values: Tensor) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean of one number per pair.

    Prompts of a pair are not independent, so that a pair counts as one case.
    """
    if len(values) < 2:
        return math.nan, math.nan
    middle, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    return middle - SURE * error, middle + SURE * error


def _switched_off(heads: Sequence[Place], counts: Mapping[Layer, int]) -> tuple[list[Place], list[Place]]:
    """Split the heads of a role, best first, into those to switch off and the rest.

    At most half of the heads of a layer are switched off, so that as many others remain to compare with.
    """
    off: list[Place] = []
    left_on: list[Place] = []
    off_by_layer = Counter[Layer]()
    for layer, head in dict.fromkeys(heads):
        if layer not in counts or head >= counts[layer]:
            size = f"{counts[layer]} heads in layer {layer}" if layer in counts else f"{len(counts)} layers"
            raise ArgumentError(
                f"roles must be of this model: they name head {layer}.{head}, and the model has {size}; "
                "measure them with headwise.roles(model, tokenizer)"
            )
        fits = 2 * (off_by_layer[layer] + 1) <= counts[layer]
        off_by_layer[layer] += fits
        (off if fits else left_on).append((layer, head))
    return off or left_on[:1], left_on if off else left_on[1:]


def _draws(
    heads: Sequence[Place], counts: Mapping[Layer, int], draws: int, draw: random.Random
) -> tuple[list[list[Place]], bool]:
    """Return up to `draws` choices of as many other heads of the same layers; True: these are all."""
    wanted = Counter(layer for layer, _ in heads)
    remaining = {layer: [h for h in range(counts[layer]) if (layer, h) not in heads] for layer in wanted}
    if any(len(remaining[layer]) < count for layer, count in wanted.items()):
        return [], True
    total = math.prod(math.comb(len(remaining[layer]), count) for layer, count in wanted.items())
    if total <= draws:
        choices = [itertools.combinations(remaining[layer], count) for layer, count in wanted.items()]
        return [_joined(wanted, choice) for choice in itertools.product(*choices)], True
    drawn: dict[tuple[tuple[int, ...], ...], None] = {}
    while len(drawn) < draws:
        choice = tuple(tuple(sorted(draw.sample(remaining[layer], count))) for layer, count in wanted.items())
        drawn[choice] = None
    return [_joined(wanted, choice) for choice in drawn], False


def _joined(layers: Mapping[Layer, int], choice: Sequence[Sequence[int]]) -> list[Place]:
    """Return (layer, head) of the heads chosen in each layer."""
    return [(layer, head) for layer, chosen in zip(layers, choice, strict=True) for head in chosen]
