"""Models over several devices, on `torch.distributed`.

`shard_heads` lays a model's heads over ranks; `clip_grad_norm_` takes the gradients that such a model has.
`shard_sequence` lays a text over ranks; `split` and `join` take tokens there and back, `attention` is one
call of it, `sum_gradients` adds up what ranks learned. Nothing here is loaded before it is asked for.
"""

from ..lazy_names import lazy_attributes

__all__ = [
    "ShardedMap",
    "attention",
    "clip_grad_norm_",
    "join",
    "shard_heads",
    "shard_sequence",
    "split",
    "sum_gradients",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..models.training_loop import clip_grad_norm_
    from .heads_sharding import shard_heads
    from .sequence import join, split
    from .sequence_sharding import shard_sequence, sum_gradients
    from .sharded_map import ShardedMap, attention

_HOMES = {
    "ShardedMap": ".sharded_map",
    "attention": ".sharded_map",
    "clip_grad_norm_": "..models.training_loop",
    "join": ".sequence",
    "shard_heads": ".heads_sharding",
    "shard_sequence": ".sequence_sharding",
    "split": ".sequence",
    "sum_gradients": ".sequence_sharding",
}


__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
