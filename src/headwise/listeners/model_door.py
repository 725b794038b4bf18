"""The door to a model: `attach` lets somebody hear its attention, for a while.

    model ── hooks: which module runs now ──┐
          └─ adapters: q, k, v, mask ───────┴─> announce(module, ...) ──> every listener's hear(call)

While somebody listens, attention runs on headwise's engines (short plain calls on a GPU on torch's own
function): the second pass needs the log-sum-exp that they give. Nothing else in the model changes; outside of
it only the lookup methods of Transformers' registries do. All of it is undone at the end.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from types import TracebackType

from torch import nn

from ..errors import ArgumentError
from .active import Listener, active
from .adapters import ADAPTERS
from .attachment import Attachment, Change, Listening
from .module_hooks import add_hook, changing, uncompile, undo_dropped

__all__ = ["FALLBACKS", "Attached", "attach"]

FALLBACKS = (None, "eager", "skip")


def attach(model: nn.Module, listener: Listener, fallback: str | None = None) -> Attached:
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
    return Attached(model, Listening(listener, fallback))


class Attached(AbstractContextManager[Attachment]):
    """A block in which somebody listens to a model; all listeners of one model share its `Attachment`."""

    def __init__(self, model: nn.Module, listening: Listening) -> None:
        self.model, self.listening = model, listening

    def __enter__(self) -> Attachment:
        with changing():
            known = next((attachment for attachment in active if attachment.model is self.model), None)
            self.attachment = Attachment(self.model) if known is None else known
            self.attachment.add(self.listening)
            if known is None:
                self.attachment.begin(CHANGES)
        return self.attachment

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.attachment.run is None:
                self.attachment.check()
        finally:
            with changing():
                self.attachment.remove(self.listening)

    def drop(self, warning: str) -> None:
        """End a block that nobody can end any more, and say so; may be called while garbage is collected."""
        attachment, listening = self.attachment, self.listening

        def end() -> None:
            attachment.remove(listening)
            warnings.warn(warning, RuntimeWarning, stacklevel=2)

        undo_dropped(end)


def _add_hooks(attachment: Attachment) -> None:
    """Every module that may attend, or around one that does, tells when it runs."""
    for module, hook in attachment.hooks.items():
        add_hook(attachment.undo, module, hook)


def _uncompile(attachment: Attachment) -> None:
    uncompile(attachment.undo, attachment.modules)


CHANGES: tuple[Change, ...] = (_uncompile, *ADAPTERS, _add_hooks)  # a hook finds all that it needs in place
