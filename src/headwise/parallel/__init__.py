"""Models over several devices, on `torch.distributed`.

`shard_sequence` lays a text over ranks; `split` and `join` take tokens there and back, `attention` is one
call of it, `sum_gradients` adds up what ranks learned. Nothing here is loaded before it is asked for.
"""

from importlib import import_module

__all__ = ["ShardedMap", "attention", "join", "shard_sequence", "split", "sum_gradients"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .sequence import join, split
    from .sequence_sharding import shard_sequence, sum_gradients
    from .sharded_call import attention
    from .sharded_map import ShardedMap

_HOMES = {
    "ShardedMap": ".sharded_map",
    "attention": ".sharded_call",
    "join": ".sequence",
    "shard_sequence": ".sequence_sharding",
    "split": ".sequence",
    "sum_gradients": ".sequence_sharding",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
