"""Modules: attention with its projections, and what belongs to them."""

from .. import first_use as _first_use

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

TYPE_CHECKING = False
if TYPE_CHECKING or _first_use.is_whole(__name__):
    from .as_torch import MultiheadAttention, adopt, restore
    from .cache import KVCache
    from .memory import Memory
    from .multihead import MultiHeadAttention
    from .options import Buckets, QKNorm, RelativeBias
    from .rotary import Linear, Llama3, Ntk, Rope, Yarn


def __getattr__(name: str) -> object:
    return _first_use.part(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
