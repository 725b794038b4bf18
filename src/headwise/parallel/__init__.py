"""Models over several devices, on `torch.distributed`: `shard_heads`, a layer's heads over ranks.

Nothing here is loaded before it is asked for.
"""

from importlib import import_module

__all__ = ["shard_heads"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .heads_sharding import shard_heads

_HOMES = {"shard_heads": "heads_sharding"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
