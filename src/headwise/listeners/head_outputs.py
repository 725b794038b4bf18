"""Outputs of heads: collected, patched into another run (activation patching), and projected by W_O.

A head adds sum_j p_ij f(x_j) to its layer's output, with f(x_j) = (x_j W_V + b_V) W_O of its own rows of W_O;
the output projection's bias belongs to no head. Where ||f(x_j)|| is small, weight on key j does little.
Kobayashi 2020, "Attention is not only a weight", section 3.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim, E width of the
layer's output; n heads chosen, t positions chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..engines.scores import own_precision, tile_dtype
from ..engines.walk import GivenWeights
from ..errors import ArgumentError, ShapeError
from ..heads.layer_names import ByLayer, GivenByLayer, Layer, path_in_words
from ..indexing import as_index, positions_of
from ..nn import MultiHeadAttention
from ..nn.as_torch.module import MultiheadAttention
from .active import LayerCall, in_backward
from .chosen_heads import (
    Change,
    Changing,
    ChosenHeads,
    ChosenListening,
    Heads,
    base_of,
    by_path,
    layer_names,
    of_visit,
)
from .model_structure import names_in
from .pruning import ALBERT, BART, BERT, DISTILBERT, LLAMA, PHI, is_conv1d

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Positions = int | slice | Sequence[int] | Tensor


class HeadOutputs(ByLayer[Tensor]):
    """Outputs of heads, [B, H, T, Dv] by layer, and what they add to the output of their layer."""

    _model: Callable[[], nn.Module | None] | None = None  # a weak reference; None after unpickling or loading

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_model"}

    def written(self, layer: Layer) -> Tensor:
        """Return what each head of a layer adds to its output, [B, H, T, E], in float32 at least.

        The heads' parts sum to the layer's output without its bias. The projection is the model's of now.

        Raises:
            ArgumentError: no such layer; a projection that is not known, or gated heads; the model is gone.
        """
        return written(self[layer], self._projection(layer))

    def plot(
        self,
        layer: Layer | None = None,
        tokens: Sequence[str] | None = None,
        *,
        batch: int = 0,
        title: str | None = None,
    ) -> Figure:
        """Draw the steps from heads to the output of a layer, by default the last (`headwise[viz]`).

        Each head's output, all of them side by side, what W_O makes of each, and their sum: see
        `headwise.show.outputs_picture`.

        Args:
            tokens: one a position.
            batch: which sequence.

        Raises:
            ArgumentError: as `written`; ShapeError: tokens that do not fit; IndexError: no such sequence.
            PackageMissing: matplotlib is not installed.
        """
        from ..show.outputs_picture import outputs_picture

        chosen = self.paths[-1] if layer is None and self else 0 if layer is None else layer
        name = self.name_of(self.path_of(chosen))
        label = f"layer {name}" if isinstance(name, int) else name
        title = f"From heads to output: {label or 'the model'}" if title is None else title
        return outputs_picture(self[chosen], self._projection(chosen), tokens, batch=batch, title=title)

    def _projection(self, layer: Layer) -> OutputProjection:
        """Return the output projection of a layer, as it is in the model now."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ArgumentError(
                f"outputs must belong to a model that still exists: that of layer {layer} was deleted; "
                "collect them again, or give show.outputs_picture a projection"
            )
        _, H, _, Dv = self[layer].shape
        return output_projection(model, self.path_of(layer), H, Dv)


torch.serialization.add_safe_globals([HeadOutputs])


def collect(
    model: nn.Module, heads: Heads | None = None, *, fallback: str | None = None
) -> AbstractContextManager[HeadOutputs]:
    """Collect the outputs of heads inside a `with` block, [B, H, T, Dv] by layer, detached.

    All heads of a chosen layer are kept; a second run replaces the results of the first.
    `outputs.written(layer)` returns what each head adds to the layer's output, and `outputs.plot(layer,
    tokens)` draws outputs and contributions.

    Args:
        heads: as in `headwise.ablate`; None: all heads of every layer whose attention can be intercepted.
        fallback: as in `headwise.ablate`.

    Raises:
        ArgumentError, AttentionBypassed: as `headwise.ablate`.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(1, 3, 8)
        >>> with collect(mha, [(0, 1)]) as outputs:
        ...     _ = mha(x)
        >>> outputs[0].shape, outputs.written(0).shape
        (torch.Size([1, 4, 3, 2]), torch.Size([1, 4, 3, 8]))
    """
    chosen = ChosenHeads(model, () if heads is None else heads, everything=heads is None)
    return _Collecting(model, chosen, fallback)


class _Collecting(ChosenListening[HeadOutputs]):
    """A block in which the outputs of the chosen heads are stored."""

    def begin(self) -> tuple[Change, HeadOutputs]:
        outputs = HeadOutputs({}, layer_names(self.model))
        outputs._model = ref(self.model)

        def store(call: LayerCall, index: Tensor, output: Tensor) -> None:
            if not in_backward():
                outputs._set(call.path, output.detach().clone())

        return store, outputs


def patch(
    model: nn.Module,
    heads: Heads,
    outputs: GivenByLayer[Tensor],
    positions: Positions | None = None,
    *,
    fallback: str | None = None,
) -> Changing:
    """Replace outputs of heads by those of another run inside a `with` block.

    Args:
        heads: as in `headwise.ablate`.
        outputs: tensors [B, H, T, Dv] by layer, from `collect` or your own.
        positions: the query positions to replace, a slice or numbers; None: all.
        fallback: as in `headwise.ablate`.

    Raises:
        ArgumentError, AttentionBypassed: as `headwise.ablate`; a layer that is not in outputs.
        ShapeError: in the model's forward: outputs of other sizes than this run's.
        IndexError: in the model's forward: a position outside it.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, clean, other = MultiHeadAttention(8, 4), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
        >>> with collect(mha) as outputs:
        ...     expected, _ = mha(clean)
        >>> with patch(mha, [(0, None)], outputs):
        ...     torch.equal(mha(other)[0], expected)
        True

    Vig 2020 (causal mediation); Wang 2022 (IOI), section 3.
    """
    chosen = ChosenHeads(model, heads)
    stored = by_path(model, outputs, "outputs", chosen, maker="collect")

    def change(call: LayerCall, index: Tensor, output: Tensor) -> Tensor:
        new = of_visit(stored, call.path, "outputs", maker="collect")
        if new.shape != output.shape:
            raise ShapeError(
                f"outputs must be [B, H, T, Dv] = {list(output.shape)} in {path_in_words(call.path)}: got "
                f"{list(new.shape)}; collect them from a run of the same sizes"
            )
        T, new = output.shape[2], new.to(output)
        if positions is None:
            return output.index_copy(1, index, new[:, index])
        chosen_positions = positions_of(as_index(positions, T, "positions"), T, output.device)  # [t]
        is_chosen = torch.zeros(output.shape[1:3], dtype=torch.bool, device=output.device)
        is_chosen[index[:, None], chosen_positions] = True  # [H, T]
        return torch.where(is_chosen[..., None], new, output)

    return Changing(model, chosen, change, fallback)


# What heads write: their outputs times the output projection, W_O, which is found by its name in each family.
# A layer that may have something between the two, such as a gate or a norm, is refused by name. What follows
# W_O, such as the norm after the residual sum, is not part of f, as in the paper.


BLOCK = 32 * 2**20  # bytes of products in memory at a time

# Names of W_O inside a layer: those that pruning supports, then GPT-2, T5, ModernBERT, timm and others.
PROJECTIONS = (
    *dict.fromkeys(names.out for names in (LLAMA, BART, PHI, ALBERT, DISTILBERT)),
    *("c_proj", "o", "Wo", "proj", "projection"),
)
LIBRARIES = ("transformers.", "timm.")  # in other code a name may mean something else
# Names of parts that compute queries, keys, values and scores, or have no effect in eval mode.
BEFORE = re.compile(
    r"(q|k|v|qk|kv|qkv|query|key|value|query_key_value|c_attn|in_proj|Wq|Wk|Wv|Wqkv)(_\w+)?$"
    r"|rel(ative)?_(pos|att)\w*|rotary\w*|sinks|indexer|logit_scale|\w*drop(out)?$"
)
AFTER = {*ALBERT.apart, "LayerScale"}
GATES = {
    "sigmoid",
    "silu",
    "gate",
    "gate_proj",
}  # a layer whose code has one of these names may gate its heads


class OutputProjection:
    """The output projection W_O of a layer, head by head, with its current weights, and its path."""

    def __init__(self, path: str, weight: Tensor, bias: Tensor | None, num_heads: int) -> None:
        self.path = path
        self.weight = weight.detach().unflatten(0, (num_heads, -1))  # [H, Dv, E]
        self.bias = None if bias is None else bias.detach()  # [E]


def output_projection(
    model: nn.Module,
    path: str,
    num_heads: int,
    value_dim: int,
    *,
    need: str = "written=True needs",
    advice: str = "call watch(model) without written=True",
) -> OutputProjection:
    """Return the projection that is applied to the concatenated heads of a layer.

    Args:
        path: of the layer, perhaps with the number of its run ("#1").
        need: what needs it, for the error; advice: what to do.

    Raises:
        ArgumentError: it is not known, or something may stand between.
    """
    base = base_of(path)
    module: Any = model.get_submodule(base)
    name, reason = _projection_name(model, base, module)
    if reason is None:
        owner = model.get_submodule(base.rpartition(".")[0]) if name == BERT.out else module
        out: Any = owner.get_submodule(name)
        is_split = getattr(module, "local_heads", None) is not None  # over processes, by headwise
        reason = _why_not_plain(name, out, is_split)
    if reason is None:
        weight, bias = out.weight, out.bias
        if is_split:
            weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
        weight = weight if is_conv1d(out) else weight.T
        if weight.shape[0] == num_heads * value_dim:
            owner_path = base.rpartition(".")[0] if name == BERT.out else base
            return OutputProjection(f"{owner_path}.{name}".lstrip("."), weight, bias, num_heads)
        reason = f"has {num_heads} heads of {value_dim} and {weight.shape[0]} channels into {name}"
    raise ArgumentError(
        f"{need} a known output projection: {path_in_words(base)} ({type(module).__name__}) {reason}; "
        f"{advice}"
    )


def _projection_name(model: nn.Module, path: str, module: nn.Module) -> tuple[str, str | None]:
    """Return the name of a layer's output projection, and why it cannot be used, or None."""
    if isinstance(module, MultiHeadAttention):
        if module.gate_proj is not None:
            return "", f"has gate={module.gate!r}, so that what a head writes depends on the query as well"
        if type(module)._finish is not MultiHeadAttention._finish:
            return "", "combines its heads in its own way"
        return "out_proj", None
    if type(module) in (nn.MultiheadAttention, MultiheadAttention):
        return "out_proj", None
    if not type(module).__module__.startswith(LIBRARIES):
        return "", "is of an unknown family"
    names = [name for name in PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)]
    parent = model.get_submodule(path.rpartition(".")[0]) if path else None
    if not names and isinstance(getattr(getattr(parent, "output", None), "dense", None), nn.Module):
        names = [BERT.out]
    if len(names) != 1:
        return "", f"has {' and '.join(names) or 'no output projection with a known name'}"
    parts = (*module._modules, *module._parameters)
    rest = [name for name in parts if name not in (*names, *AFTER) and not BEFORE.match(name)]
    strange = [name for name in rest if not isinstance(getattr(module, name), nn.Identity | None)]
    strange += sorted(GATES & names_in(type(module)))
    if strange:
        return "", f"has {', '.join(strange)}, which may stand between its heads and {names[0]}"
    return names[0], None


def _why_not_plain(name: str, out: nn.Module, is_split: bool) -> str | None:
    """Return why a projection may compute something else than its weight says, or None."""
    is_family_linear = isinstance(out, nn.Linear) and type(out).__module__.startswith("transformers.models.")
    is_plain = type(out) in (nn.Linear, NonDynamicallyQuantizableLinear) or is_family_linear or is_conv1d(out)
    if not is_plain and not is_split:
        return f"has {name} of {type(out).__name__}, not nn.Linear: merge or unwrap it first"
    if type(out._parameters.get("weight")) is not nn.Parameter and not is_split:
        return f"has {name}.weight of {type(out.weight).__name__}: remove masks and quantisation first"
    if "forward" in vars(out) and "_old_forward" not in vars(out):  # accelerate's forward only moves weights
        return f"has {name} with a forward of its own, which may write something else: remove it first"
    hooks = len(out._forward_pre_hooks) + len(out._forward_hooks)
    if hooks:
        plural = "s" * (hooks > 1)
        return f"has {name} with {hooks} forward hook{plural}, which may change it: remove it first"
    return None


def written(heads: Tensor, projection: OutputProjection) -> Tensor:
    """Return what each head adds to the output of its layer, [B, H, T, E], without the bias."""
    with torch.no_grad(), own_precision(heads.device):
        dtype = tile_dtype(heads.dtype)
        return heads.detach().to(dtype) @ projection.weight.to(heads.device, dtype)


def written_norms(model: nn.Module, call: LayerCall) -> Tensor:
    """Return ||v_j W_O|| of every head and key of a call, [B, H, S], in float32 at least.

    The product itself is made, in blocks of keys: v G v with G = W_O W_O^T would be less work, and may come
    out below 0 by rounding where a norm is small.

    Raises:
        ArgumentError: the values or the projection cannot be read.
    """
    if call.value is None or isinstance(call.weights.parts()[0], GivenWeights):
        raise ArgumentError(
            f"written=True needs the values of every layer: in {path_in_words(call.path)} only the weights "
            f"{list(call.weights.shape)} can be read (fallback='eager'); use watch(model, fallback='eager') "
            "without written=True"
        )
    v = call.value.detach()
    (B, Hk, S, Dv), H = v.shape, call.num_heads
    dtype = tile_dtype(v.dtype)
    with torch.no_grad(), own_precision(v.device):
        weight = output_projection(model, call.path, H, Dv).weight.to(v.device, dtype)
        by_group = weight.unflatten(0, (Hk, -1))  # [Hk, G, Dv, E]
        norms = torch.empty(B, H, S, dtype=dtype, device=v.device)
        step = max(1, BLOCK // (B * H * weight.shape[2] * dtype.itemsize))
        for start in range(0, S, step):
            values = v[:, :, None, start : start + step].to(dtype)  # [B, Hk, 1, s, Dv]
            norms[:, :, start : start + step] = (values @ by_group).norm(dim=-1).flatten(1, 2)
    return norms
