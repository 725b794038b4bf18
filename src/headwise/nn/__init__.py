"""Modules: attention with its projections, and what belongs to them."""

from .as_torch import MultiheadAttention, adopt, restore
from .cache import KVCache
from .memory import Memory
from .multihead import MultiHeadAttention
from .options import Buckets, QKNorm, RelativeBias
from .rotary import Linear, Llama3, Ntk, Rope, Yarn

__all__ = [
    "Buckets",
    "KVCache",
    "Linear",
    "Llama3",
    "Memory",
    "MultiHeadAttention",
    "MultiheadAttention",
    "Ntk",
    "QKNorm",
    "RelativeBias",
    "Rope",
    "Yarn",
    "adopt",
    "restore",
]
