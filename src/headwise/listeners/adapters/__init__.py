"""How a model's attention is heard: `attach` lets somebody hear it for a while, by adapters for families.

    attach(model, listener)
      1. uncompile        compiled modules run as they were written
      2. every adapter    q, k, v and mask of each layer go through `announce`: by an overridden forward,
                          another answer to a lookup of functions, or a mode that sees torch's functions
      3. add_hooks        modules tell when they run: which one attends, which tokens and padding it was given
    model(...) ──> announce(module, kind, map, values, outputs) ──> every listener's hear(call)
    at the end `attachment.undo`, an ExitStack, puts everything back, the last change first

Of a Hugging Face layer, q, k and v are those with which it calls the attention function that it has looked
up (huggingface.py). While somebody listens, attention runs on headwise's engines (short plain calls on a GPU
on torch's own function): the second pass needs the log-sum-exp that they give. Nothing else in the model
changes; outside of it only the lookup methods of Transformers' registries do.

An adapter takes an `Attachment` and changes the model so that its attention is announced; how to undo that
goes into `attachment.undo`. A model gets all adapters. To add a family, add its function and an entry here.
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
    torch_functions.hear_functions,  # the last resort: whatever calls torch's fused function
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
    """Keeps the listener: an attachment itself does not, so that one that was dropped can be told of."""

    def __init__(self, model: nn.Module, listener: Listener, fallback: str | None) -> None:
        self.model, self.listener, self.fallback = model, listener, fallback

    def __enter__(self) -> Attachment:
        with changing:
            known = next((attachment for attachment in active if attachment.model is self.model), None)
            attachment = Attachment(self.model) if known is None else known
            self._attachment = attachment
            self._place = attachment.add(self.listener, self.fallback)
            if known is None:
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
                attachment.remove(self._place)


CHANGES = (uncompile, *ADAPTERS, add_hooks)  # a hook finds all that it needs in place
