"""Adapters: `attach` lets a listener hear the attention of a model, with an adapter for each family.

    attach(model, listener)
      1. uncompile        compiled modules run uncompiled
      2. every adapter    q, k, v and mask of each layer go through `announce`: by an overridden forward,
                          another result of a lookup of functions, or a mode that sees torch's functions
      3. add_hooks        modules report when they run: which one attends, and its tokens and padding
    model(...) ──> announce(module, kind, map, values, outputs) ──> every listener's hear(call)
    at the end `attachment.undo`, an ExitStack, undoes every change, the last one first

The q, k and v of a Hugging Face layer are those that it passes to the attention function that it looks up
(huggingface.py). While a listener is attached, attention runs on headwise's engines (short plain calls on a
GPU on torch's function), for the second pass needs their log-sum-exp. Nothing else in the model changes;
outside of it only the lookup methods of Transformers' registries do.

An adapter takes an `Attachment` and changes the model so that its attention is announced; it adds how to undo
the change to `attachment.undo`. All adapters are applied to every model. To add a family, add its function
and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from torch import nn

from ...errors import ArgumentError
from ..active import Listener, active
from ..attachment import Attachment
from ..module_overrides import add_hooks, changing, uncompile
from . import huggingface, modules, torch_functions

ADAPTERS: tuple[Callable[[Attachment], None], ...] = (
    huggingface.hear_huggingface,
    modules.hear_torch,
    modules.hear_headwise,
    modules.hear_timm,
    torch_functions.hear_functions,  # last: every other module that calls torch's fused function
)
FALLBACKS = (None, "eager", "skip")


def attach(
    model: nn.Module, listener: Listener, fallback: str | None = None
) -> AbstractContextManager[Attachment]:
    """Let `listener` hear every attention call of `model` inside a `with` block.

    Args:
        fallback: for layers that bypass every hook: None raises, naming them; "eager" reads the weights they
            compute; "skip" leaves them out.

    Raises:
        ArgumentError: not a module; an unknown fallback.
        AttentionBypassed: in the model's forward, or at the end.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model must be a torch.nn.Module: got {type(model).__name__}; pass the model itself"
        )
    if fallback not in FALLBACKS:
        raise ArgumentError(
            f"fallback must be None, 'eager' or 'skip': got {fallback!r}; None names the layers"
        )
    return _Attached(model, listener, fallback)


class _Attached(AbstractContextManager[Attachment]):
    """Keeps the listener alive; an attachment does not, so that it can warn of a dropped listener."""

    def __init__(self, model: nn.Module, listener: Listener, fallback: str | None) -> None:
        self.model, self.listener, self.fallback = model, listener, fallback

    def __enter__(self) -> Attachment:
        with changing:
            existing = next((attachment for attachment in active if attachment.model is self.model), None)
            attachment = Attachment(self.model) if existing is None else existing
            self._attachment = attachment
            self._reference = attachment.add(self.listener, self.fallback)
            if existing is None:
                attachment.begin(CHANGES)
        return attachment

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        attachment = self._attachment
        try:
            if kind is None and attachment.run is None:
                attachment.check()
        finally:
            with changing:
                attachment.remove(self._reference)


CHANGES = (uncompile, *ADAPTERS, add_hooks)  # hooks last, for they need the other changes
