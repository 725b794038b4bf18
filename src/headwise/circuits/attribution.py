"""Direct logit attribution: what the embedding, each head and each MLP adds to a logit.

    logit = embedding + sum of heads + sum of MLPs + biases

Each part is its output times the factor that the rest of the forward gives it, with the scale of every norm
as it was (`residual_stream`). What a head does through later layers is not in its number: see
`headwise.effects`.

Letters: B batch, T length, H num_heads, Dv value_dim, E width, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, needed
from ..heads.layer_names import ByLayer, Layer, path_in_words
from ..listeners.active import LayerCall, Listener
from ..listeners.adapters import attach
from ..listeners.effects import check_eval_mode, check_inputs
from ..listeners.head_outputs import output_projection
from ..listeners.model_outputs import OUTPUT, CallShape, Comparison, comparison_of, tensor_of
from ..models.batches import run
from ..models.pretrained import Tokenizer, token_name
from .residual_stream import ResidualStream, residual_stream, stack_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Target = int | str | Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class Attribution:
    """The parts of a logit, or of the difference of two; their sum is `total`.

    Attributes:
        total: the logit, [B], in float64; before a cap on logits, where the model has one.
        embedding: what entered the first block: tokens, and positions if they are added, [B].
        heads: [B, H] by layer. Layers from which no path leads to the logit are left out.
        mlps: [B] by the path of the linear map that writes, with its bias.
        biases: of output projections, norms and the unembedding, together, [B].
        by_position: whether `embedding`, `heads` and `mlps` have one more dimension, T: the position at which
            a part was written.
    """

    total: Tensor
    embedding: Tensor
    heads: ByLayer[Tensor]
    mlps: dict[str, Tensor]
    biases: Tensor
    by_position: bool

    def ranking(self) -> list[tuple[Layer, int, float]]:
        """Return all heads as (layer, head, mean over the batch), the largest absolute value first."""
        rows = [
            (layer, head, value)
            for layer, values in self.heads.items()
            for head, value in enumerate(self._summed(values).mean(0).tolist())
        ]
        return sorted(rows, key=lambda row: -abs(row[2]))

    def to_pandas(self) -> DataFrame:
        """Return a data frame with a row for each part of each sequence: sequence, part, layer, head, value.

        Parts are "embedding", "head", "mlp" and "biases". With `by_position` there is a column `position`, -1
        for biases.

        Raises:
            PackageMissing: pandas is not installed.
        """
        with needed("pandas", "a data frame needs pandas"):
            import pandas as pd

        rows: list[tuple[Any, ...]] = []

        def add(part: str, layer: Layer | None, head: int, values: Tensor) -> None:
            for sequence, row in enumerate(values.tolist()):
                numbers = enumerate(row) if isinstance(row, list) else [(-1, row)]
                rows.extend((sequence, part, layer, head, position, value) for position, value in numbers)

        add("embedding", None, -1, self.embedding)
        for layer, values in self.heads.items():
            for head in range(values.shape[1]):
                add("head", layer, head, values[:, head])
        for path, values in self.mlps.items():
            add("mlp", path, -1, values)
        add("biases", None, -1, self.biases)
        columns = ["sequence", "part", "layer", "head", "position", "value"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame if self.by_position else frame.drop(columns="position")

    def plot(self, title: str = "Direct logit attribution") -> Figure:
        """Draw every head's part, the mean over the batch: a row per layer (`headwise[viz]`).

        Raises:
            PackageMissing: matplotlib is not installed.
        """
        from ..show.heads_grid import heads_grid

        means = {layer: self._summed(values).mean(0) for layer, values in self.heads.items()}
        return heads_grid(means, title, "added to the logit")

    def _summed(self, values: Tensor) -> Tensor:
        return values.sum(-1) if self.by_position else values

    def __str__(self) -> str:
        mlps = sum((self._summed(values) for values in self.mlps.values()), torch.zeros_like(self.total))
        heads = sum((self._summed(v).sum(1) for v in self.heads.values()), torch.zeros_like(self.total))
        parts = {
            "embedding": self._summed(self.embedding),
            f"{sum(values.shape[1] for values in self.heads.values())} heads": heads,
            f"{len(self.mlps)} MLPs": mlps,
            "biases": self.biases,
            "total": self.total,
        }
        batch = len(self.total)
        lines = [f"Direct logit attribution, mean over {batch} sequence{'' if batch == 1 else 's'}."]
        lines += [f"  {name:<12} {values.mean().item():9.3f}" for name, values in parts.items()]
        lines += [f"  layer {layer} head {head}: {value:+.3f}" for layer, head, value in self.ranking()[:5]]
        return "\n".join(lines)

    __repr__ = __str__


class HeadOutputsHeard(Listener):
    """Outputs of heads, if `keeps`, and shapes of calls."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.heads: dict[str, Tensor] = {}
        self.calls: list[CallShape] = []

    def hear(self, call: LayerCall) -> None:
        B, _, T, _ = call.weights.shape
        self.calls.append((call.kind, B, T, call.weights.mask.counted(T)))
        if not self.keeps:
            return
        if call.output is None:
            raise ArgumentError(
                f"model must compute outputs of heads: those of {path_in_words(call.path)} cannot be read"
            )
        self.heads[call.path] = call.output.detach().clone()


def attribution(
    model: nn.Module,
    inputs: object,
    target: Target,
    against: Target | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    position: int | None = None,
    by_position: bool = False,
) -> Attribution:
    """Return what each part of a model adds to a logit, or to the difference of two logits.

        parts = hw.attribution(model, tokenizer("The cat sat on the", return_tensors="pt"), " mat",
                               tokenizer=tokenizer)
        print(parts)
        parts.ranking()[0], parts.heads[5][0, 2]

    The model runs once, with one backward through its norms. Nothing of it is changed afterwards, and frozen
    parameters are fine. Numbers are as exact as the model's dtype: use float32 for sums of four digits.

    The scale of each norm is that of this forward, also of those that the parts pass on the way. If the model
    has an activation between its last block and the logits, its factor output / input is that of this
    forward.

    Args:
        model: any that works with `headwise.watch`, in eval mode, with numbered blocks.
        inputs: the model's inputs: a mapping of its arguments, a tuple of them, or one tensor.
        target: a token or class: its id; its text (one token, with `tokenizer`); or ids, one per sequence.
        against: the logit to subtract, likewise; None: none.
        tokenizer: the model's tokenizer.
        position: whose logits are meant; by default those that `headwise.effects` reads: of the last real
            token, or of a masked language model the first [MASK].
        by_position: also return at which position each part was written.

    Raises:
        ArgumentError: a model in training mode, without numbered blocks, or whose logits are no such sum; a
            layer with an unknown output projection; a target that is no token of the model.
        AttentionBypassed: a layer whose head outputs cannot be read.

    Example:
        >>> from headwise.models import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig(vocab_size=11, d_model=8, num_heads=2, num_layers=3)).eval()
        >>> ids = torch.tensor([[1, 5, 3, 9]])
        >>> parts = attribution(model, ids, target=7)
        >>> heads = sum(values.sum() for values in parts.heads.values())
        >>> mlps = sum(values.sum() for values in parts.mlps.values())
        >>> bool((parts.embedding + heads + mlps + parts.biases - parts.total).abs() < 1e-4)
        True
        >>> bool((parts.total - model(ids)[:, -1, 7]).abs() < 1e-5)
        True

    Elhage 2021, "A mathematical framework"; Wang 2022 (IOI), section 3.
    """
    check_eval_mode(model, also_dropout=True)
    check_inputs(inputs)
    heard = HeadOutputsHeard()
    with residual_stream(model) as stream, attach(model, heard) as attachment:
        output = run(model, inputs)
        comparison = comparison_of(model, inputs, output, heard.calls, tokenizer)
        logits = before_cap(model, tensor_of(output), stream.unembedded)
        rows = rows_of(logits, comparison, position)  # [B, V]
        ids = ids_of(target, "target", rows, tokenizer)
        total = rows.gather(1, ids[:, None])[:, 0]  # [B]
        if against is not None:
            total = total - rows.gather(1, ids_of(against, "against", rows, tokenizer)[:, None])[:, 0]
        if not total.requires_grad:
            raise ArgumentError(
                f"model must compute its logits from its blocks with gradients: {type(model).__name__} gives "
                "none; remove no_grad and detach from its forward"
            )
        leaves = [*stream.embeddings, *stream.written.values(), *stream.biases]
        gradients = torch.autograd.grad(total.sum(), leaves, allow_unused=True)
    factors = dict(zip(map(id, leaves), gradients, strict=True))
    parts = _Parts(model, stream, heard, factors, len(total), by_position)
    result = parts.attribution(total.detach().double(), attachment.names)
    _check_sum(result, stream, logits.dtype)
    return result


def before_cap(model: nn.Module, logits: Tensor, unembedded: Tensor | None) -> Tensor:
    """Return the model's logits, or where it caps them (cap * tanh(x / cap)), those before the cap."""
    cap = cap_of(model)
    if unembedded is None or cap is None or unembedded.shape != logits.shape:
        return logits
    capped = cap * torch.tanh(unembedded.detach() / cap)
    return unembedded if torch.allclose(capped, logits.detach().to(capped), atol=1e-2 * cap) else logits


def cap_of(model: nn.Module) -> float | None:
    """Return the soft cap of a model's logits, None if it has none."""
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    return cap if isinstance(cap, float) else None


def rows_of(logits: Tensor, comparison: Comparison | None, position: int | None) -> Tensor:
    """Return the logits that are meant, [B, V], in float64; the comparison is needed without a position."""
    if position is None:
        assert comparison is not None
        rows = comparison.read(logits)
        if comparison.of != OUTPUT:
            return rows
        if rows.shape[1] == 1:
            return rows[:, 0]
        raise ArgumentError(
            f"position must be given: the model returns {rows.shape[1]} rows of {rows.shape[2]} numbers, and "
            "which of them is meant is not known"
        )
    if logits.ndim != 3 or not -logits.shape[1] <= position < logits.shape[1]:
        places = f"{logits.shape[1]} positions" if logits.ndim == 3 else "no positions"
        raise ArgumentError(f"position must be one of the logits: got {position}, and they have {places}")
    return logits[:, position].double()


def ids_of(target: Target, name: str, rows: Tensor, tokenizer: Tokenizer | None) -> Tensor:
    """Return the id of a target for each sequence, [B]."""
    B, V = rows.shape
    if isinstance(target, str):
        if tokenizer is None:
            raise ArgumentError(f"tokenizer must be given for a {name} in words: got {target!r} without one")
        special = set(tokenizer.all_special_ids)
        ids = [token for token in map(int, tokenizer(target)["input_ids"]) if token not in special]
        if len(ids) != 1:
            tokens = [token_name(tokenizer, token) for token in ids]
            raise ArgumentError(
                f"{name} must be one token: {target!r} is {len(ids)}, {tokens}; choose another"
            )
        target = ids[0]
    chosen = torch.as_tensor(target, device=rows.device)
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.ndim > 1:
        raise ArgumentError(
            f"{name} must be ids: got {chosen.dtype} {list(chosen.shape)}; use int or int [B]"
        )
    if chosen.ndim == 1 and len(chosen) != B:
        raise ArgumentError(
            f"{name} must have an id for each sequence: got {len(chosen)} for {B}; use one id"
        )
    if not bool(((chosen >= 0) & (chosen < V)).all()):
        raise ArgumentError(f"{name} must be from 0 to {V - 1}: got {target}; these are the model's logits")
    return chosen.long().expand(B)


def _check_sum(result: Attribution, stream: ResidualStream, dtype: torch.dtype) -> None:
    """Raise `ArgumentError` unless the parts sum to the total, up to rounding."""
    values = [result.embedding, *result.heads.values(), *result.mlps.values(), result.biases[:, None]]
    parts = torch.cat([value.flatten(1) if value.ndim > 1 else value[:, None] for value in values], 1)
    error = (parts.sum(1) - result.total).abs()
    eps = torch.finfo(dtype).eps
    allowed = (2e-5 if torch.finfo(dtype).bits >= 32 else 4 * eps) * parts.abs().sum(1)
    if bool((error > allowed).any()):
        at = int(error.argmax())
        names = f"; not known: {', '.join(stream.unknown[:3])}" if stream.unknown else ""
        raise ArgumentError(
            "model must add what its layers write, through layer norms or RMS norms, to its logits: the "
            f"parts sum to {parts[at].sum().item():.4g}, and the logit is {result.total[at].item():.4g}"
            f"{names}; use headwise.effects"
        )


class _Parts:
    """Products of outputs and their factors."""

    def __init__(
        self,
        model: nn.Module,
        stream: ResidualStream,
        heard: HeadOutputsHeard,
        factors: Mapping[int, Tensor | None],
        batch: int,
        by_position: bool,
    ) -> None:
        self.model, self.stream, self.heard, self.factors = model, stream, heard, factors
        self.batch, self.by_position = batch, by_position
        self.lengths = {x.shape[1] for x in stream.embeddings}
        self.rows = {x.shape[0] * x.shape[1] for x in stream.embeddings}
        self.projections = {
            path: output_projection(
                model, path, output.shape[1], output.shape[3],
                need="attribution needs", advice="use headwise.effects",
            )
            for path, output in heard.heads.items()
        }  # fmt: skip

    def attribution(self, total: Tensor, names: Mapping[str, Layer]) -> Attribution:
        """Return all parts."""
        layers = {self._writer(path): path for path in self.heard.heads}
        heads: dict[str, Tensor] = {}
        mlps: dict[str, Tensor] = {}
        biases = torch.zeros_like(total)
        for (path, number), values in self.stream.written.items():
            factor, layer = self.factors[id(values)], layers.get((path, number))
            if factor is None:
                if layer is not None and not self._is_read_across(layer):
                    raise ArgumentError(
                        "model must add the output of every layer to one residual stream: no path leads from "
                        f"{path_in_words(layer)} to the logits; use headwise.effects"
                    )
            elif layer is None:
                name = path if number == 0 else f"{path}#{number}"
                mlps[name] = self._product(values, factor, name)
            else:
                heads[layer], bias = self._heads(layer, factor)
                biases = biases + bias
        embedding = torch.zeros_like(total)[:, None] if self.by_position else torch.zeros_like(total)
        for values in self.stream.embeddings:
            factor = self.factors[id(values)]
            if factor is not None:
                embedding = embedding + self._product(values, factor, "the embedding")
        for values in self.stream.biases:
            factor = self.factors[id(values)]
            if factor is not None:
                biases = biases + self._summed(values.detach().double() * factor.double())
        return Attribution(total, embedding, ByLayer(heads, dict(names)), mlps, biases, self.by_position)

    def _product(self, values: Tensor, factor: Tensor, name: str) -> Tensor:
        """Return sums over channels, [B, T] or [B]; some families write [B * T, E]."""
        is_in_order = values.ndim == 3 and values.shape[0] % self.batch == 0
        if not is_in_order and values.shape[0] not in self.rows and (self.batch > 1 or self.by_position):
            raise ArgumentError(
                f"model must write states in the order of its tokens: {name} writes {list(values.shape)} for "
                f"{self.batch} sequences; pass one sequence, without by_position, or use headwise.effects"
            )
        summed = (values.detach().double() * factor.double()).sum(-1).reshape(self.batch, -1)
        if self.by_position and summed.shape[1] not in self.lengths:
            raise ArgumentError(
                f"by_position must be False for this model: {name} writes {summed.shape[1]} of "
                f"{' or '.join(map(str, sorted(self.lengths)))} positions at a time"
            )
        return summed if self.by_position else summed.sum(-1)

    def _heads(self, path: str, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a layer's heads, [B, H] or [B, H, T], and that of its bias, [B]."""
        projection, output = self.projections[path], self.heard.heads[path].double()
        weight = projection.weight.to(factor).double()  # [H, Dv, E]
        rows, H, T, _ = output.shape  # rows: sequences, or several windows of each
        if rows % self.batch or (self.by_position and rows != self.batch):
            raise ArgumentError(
                f"model must attend over its sequences: {path_in_words(path)} attends over {rows} for "
                f"{self.batch}; use headwise.effects"
            )
        own = torch.einsum("bte,hde->bhtd", factor.double().reshape(rows, T, weight.shape[2]), weight)
        parts = (output * own).sum(-1)  # [rows, H, T]
        if not self.by_position:
            parts = parts.sum(-1).unflatten(0, (self.batch, -1)).sum(1)
        bias = projection.bias
        if bias is None:
            return parts, torch.zeros(self.batch, dtype=torch.float64, device=parts.device)
        return parts, self._summed(bias.to(factor).double() * factor.double())

    def _summed(self, values: Tensor) -> Tensor:
        return values.reshape(self.batch, -1).sum(1)

    def _writer(self, path: str) -> tuple[str, int]:
        """Return the module that writes a layer's output, and which of its runs is meant."""
        base, _, number = path.partition("#")
        module, writer = self.model.get_submodule(base), self.projections[path].path
        if isinstance(module, nn.MultiheadAttention):
            writer = base
            if not module.batch_first:
                raise ArgumentError(
                    f"batch_first must be True: got False in {path_in_words(base)}; build it with True"
                )
        place = writer, int(number or 0)
        if place not in self.stream.written:
            raise ArgumentError(
                f"model must run its output projections as modules: {writer} of {path_in_words(path)} did "
                "not run; use headwise.effects"
            )
        return place

    def _is_read_across(self, path: str) -> bool:
        """Return True for a layer of an encoder, which a decoder reads by cross-attention only."""
        kinds = {kind for kind, *_ in self.heard.calls}
        last = list(self.heard.heads)[-1]
        return "cross" in kinds and stack_of(path) != stack_of(last)
