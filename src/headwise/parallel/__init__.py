"""Attention over several devices, on torch.distributed: a sequence over ranks."""

from .sequence import join, split
from .sequence_sharding import shard_sequence, sum_gradients
from .sharded_call import attention
from .sharded_map import ShardedMap

__all__ = ["ShardedMap", "attention", "join", "shard_sequence", "split", "sum_gradients"]
