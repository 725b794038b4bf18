"""Models over several devices, on `torch.distributed`.

`shard_heads` lays a model's heads over ranks; `clip_grad_norm_` takes the gradients that such a model has.
Nothing here is loaded before it is asked for.
"""

from importlib import import_module

__all__ = ["clip_grad_norm_", "shard_heads"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..models.gradient_norms import clip_grad_norm_
    from .heads_sharding import shard_heads

_HOMES = {"clip_grad_norm_": "..models.gradient_norms", "shard_heads": ".heads_sharding"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
