"""What heads say in one run, put in their place in another (activation patching).

With it the block that `ablate` stands on, too: chosen heads are heard, and perhaps changed, while it lasts.

Letters: B batch, T query_len, H num_heads, Dv value_dim; n heads chosen, t positions chosen.
"""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, AttentionBypassed, ShapeError
from ..heads.layer_names import ByLayer, GivenByLayer, Layer, names_of
from ..indexing import as_index, positions_of
from .active import Call, in_backward
from .attachment import Attachment
from .chosen_heads import ChosenHeads, Heads, base_of, by_path, of_visit
from .model_door import attach
from .model_structure import structure_of
from .written_norms import OutputProjection, output_projection, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Change",
    "Changing",
    "ChosenListening",
    "HeadOutputs",
    "check_any",
    "collect",
    "outputs_of",
    "patch",
]


Inside = TypeVar("Inside", covariant=True)  # what a block is given

# What is done at a call, given the heads chosen there, int [n], and their output [B, H, T, Dv]
Change = Callable[[Call, Tensor, Tensor], Tensor | None]


# The block


def outputs_of(call: Call) -> Tensor:
    """The heads' output of a call, [B, H, T, Dv].

    Raises:
        AttentionBypassed: only its weights are to be had.
    """
    if call.output is None:
        raise AttentionBypassed(
            f"heads must have outputs in hand to be used: of {call.path} only the weights "
            f"{list(call.weights.shape)} are heard (fallback='eager'); leave this layer out"
        )
    return call.output


def check_any(
    model: nn.Module, ran: int, heard: Collection[object], fallback: str | None, elsewhere: bool = False
) -> None:
    """Raise where a model ran and nothing was heard, unless that was allowed.

    Args:
        ran: how many times.
        heard: the layers.
        elsewhere: whether it called another model, to which somebody listens as well; or a layer ran on
            nothing.

    Raises:
        AttentionBypassed: nothing was.
    """
    if ran and not heard and not elsewhere and fallback != "skip":
        raise AttentionBypassed(
            f"model must have attention that can be heard: {type(model).__name__} ran {ran} times "
            "and none was; is there softmax attention in it?"
        )


class ChosenListening(AbstractContextManager[Inside]):
    """Hears the chosen heads, and perhaps changes them, for as long as a block lasts.

    It may be entered again, also inside itself, and beside others: each hears what those before it left.
    """

    def __init__(self, model: nn.Module, chosen: ChosenHeads, fallback: str | None) -> None:
        self.model, self.chosen, self.fallback = model, chosen, fallback
        attach(model, _Listener(chosen, _nothing), fallback)  # says at once what is wrong with the arguments
        self._entered: list[_Block] = []
        self._unused = True

    def __del__(self) -> None:
        if getattr(self, "_unused", False) and not sys.is_finalizing():
            warnings.warn(
                f"nothing was done to heads of {', '.join(self.chosen.paths) or 'the model'}: ablate, patch "
                "and collect act inside a block; write with headwise.ablate(model, heads): model(x)",
                RuntimeWarning,
                stacklevel=2,
            )

    @abstractmethod
    def begin(self) -> tuple[Change, Inside]:
        """What is done in a block, and what the block is given."""

    def __enter__(self) -> Inside:
        self._unused = False
        change, given = self.begin()
        listener = _Listener(self.chosen, change)
        attached = attach(self.model, listener, self.fallback)
        attachment = attached.__enter__()
        self._entered.append(_Block(attached, attachment, listener, attachment.forward.number))
        return given

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block = self._entered.pop()
        missed = [path for path in self.chosen.paths if path in block.attachment.bypassed]
        ran = block.attachment.forward.number - block.before
        block.attached.__exit__(kind, error, trace)
        if kind is not None:
            return
        if missed:
            raise AttentionBypassed(
                f"heads must be in layers that can be heard: {', '.join(missed)} compute their own weights "
                f"and were left out (fallback={self.fallback!r}); nothing was done to them"
            )
        if self.chosen.everything:
            check_any(self.model, ran, block.listener.heard, self.fallback, block.attachment.elsewhere)
        silent = self.chosen.absent(block.listener.heard) if ran else []
        absent = [path or "the model itself" for path in silent]
        if absent:
            raise ArgumentError(
                f"heads must be in layers that run: the model ran {ran} times and {', '.join(absent)} never "
                "attended; nothing was done to them, leave them out"
            )


class Changing(ChosenListening["Changing"]):
    """Lets `change` act on the chosen heads."""

    def __init__(self, model: nn.Module, chosen: ChosenHeads, change: Change, fallback: str | None) -> None:
        super().__init__(model, chosen, fallback)
        self.change = change

    def begin(self) -> tuple[Change, Changing]:
        return self.change, self


def _nothing(call: Call, index: Tensor, output: Tensor) -> None:
    """What is done to heads that are only heard."""


class _Block(NamedTuple):
    """One time that a block was entered."""

    attached: AbstractContextManager[Attachment]
    attachment: Attachment
    listener: _Listener
    before: int  # how many times the model had run


class _Listener:
    def __init__(self, chosen: ChosenHeads, change: Change) -> None:
        self.chosen, self.change = chosen, change
        self.heard: set[str] = set()  # paths, with visits

    def hear(self, call: Call) -> Tensor | None:
        self.heard.add(call.path)
        heads = self.chosen.at(call.path, call.num_heads)
        if not heads:
            return None
        output = outputs_of(call)
        return self.change(call, torch.tensor(heads, device=output.device), output)


# What heads say, and putting it elsewhere


Positions = int | slice | Sequence[int] | Tensor


class HeadOutputs(ByLayer[Tensor]):
    """What the heads of every layer said, [B, H, T, Dv] by layer; and what they write, by the model's W_O."""

    _model: Callable[[], nn.Module | None] | None = None  # weakly; what is pickled or loaded has none

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_model"}

    def written(self, layer: Layer) -> Tensor:
        """What each head of a layer adds to its output, [B, H, T, E], in float32 at least.

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
        """From heads to the output of a layer, by default the last, as a figure (`headwise[viz]`).

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
        told = f"layer {name}" if isinstance(name, int) else name
        title = f"From heads to output: {told or 'the model'}" if title is None else title
        return outputs_picture(self[chosen], self._projection(chosen), tokens, batch=batch, title=title)

    def _projection(self, layer: Layer) -> OutputProjection:
        model = None if self._model is None else self._model()
        if model is None:
            raise ArgumentError(
                f"outputs must come from a model that is still there: that of layer {layer} is gone; collect "
                "them again, or give show.outputs_picture a projection"
            )
        _, H, _, Dv = self[layer].shape
        return output_projection(model, self.path_of(layer), H, Dv)


torch.serialization.add_safe_globals([HeadOutputs])


def collect(
    model: nn.Module, heads: Heads | None = None, *, fallback: str | None = None
) -> AbstractContextManager[HeadOutputs]:
    """What the heads of some layers say while a `with` block lasts, [B, H, T, Dv] by layer, detached.

    A layer is kept whole, whichever of its heads were chosen; a second run takes the place of the first.
    `outputs.written(layer)` is what each head adds to the layer's output, `outputs.plot(layer, tokens)` a
    picture of both.

    Args:
        heads: as in `headwise.ablate`; None: all of every layer that is heard.
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
    def begin(self) -> tuple[Change, HeadOutputs]:
        kept = HeadOutputs({}, names_of(structure_of(self.model).places))
        kept._model = ref(self.model)

        def keep(call: Call, index: Tensor, output: Tensor) -> None:
            if not in_backward():
                kept._put(call.path, output.detach().clone())

        return keep, kept


def patch(
    model: nn.Module,
    heads: Heads,
    outputs: GivenByLayer[Tensor],
    positions: Positions | None = None,
    *,
    fallback: str | None = None,
) -> Changing:
    """Some heads say what they said in another run, inside a `with` block; afterwards all is as it was.

    Args:
        heads: as in `headwise.ablate`.
        outputs: [B, H, T, Dv] by layer from `collect`, or made by hand.
        positions: at which query positions, a slice or numbers; None: at all.
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
    given = by_path(model, outputs, "outputs")
    for path in chosen.paths:
        if not any(base_of(known) == path for known in given):
            raise ArgumentError(f"outputs must hold every layer: {path} is missing; make them with collect")

    def change(call: Call, index: Tensor, output: Tensor) -> Tensor:
        new = of_visit(given, call.path)
        if new is None:
            raise ArgumentError(
                f"outputs must hold every visit: {call.path} is missing; make them with collect"
            )
        if new.shape != output.shape:
            raise ShapeError(
                f"outputs must be [B, H, T, Dv] = {list(output.shape)} in {call.path}: got "
                f"{list(new.shape)}; collect them from a run of the same sizes"
            )
        T, new = output.shape[2], new.to(output)
        if positions is None:
            return output.index_copy(1, index, new[:, index])
        spots = positions_of(as_index(positions, T, "positions"), T, output.device)  # [t]
        chosen_here = torch.zeros(output.shape[1:3], dtype=torch.bool, device=output.device)
        chosen_here[index[:, None], spots] = True  # [H, T]
        return torch.where(chosen_here[..., None], new, output)

    return Changing(model, chosen, change, fallback)
