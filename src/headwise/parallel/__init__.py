"""Models over several devices, on `torch.distributed`.

`shard_heads` distributes the heads of a model over ranks; `clip_grad_norm_` clips gradients of such a model.
`shard_sequence` distributes the tokens of a sequence over ranks: `split` returns a rank's tokens, `join`
gathers them, `attention` is a single call, and `sum_gradients` adds up the gradients of all ranks. Each name
is imported when it is first used.
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
