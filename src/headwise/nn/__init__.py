"""Modules: attention with its projections, and what belongs to them."""

from ..lazy_names import lazy_attributes

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
if TYPE_CHECKING:
    from .as_torch import MultiheadAttention, adopt, restore
    from .cache import KVCache
    from .cached_call import Memory
    from .multihead import MultiHeadAttention
    from .options import Buckets, QKNorm, RelativeBias
    from .rotary import Linear, Llama3, Ntk, Rope, Yarn

_HOMES = {
    "Buckets": ".options",
    "KVCache": ".cache",
    "Linear": ".rotary",
    "Llama3": ".rotary",
    "Memory": ".cached_call",
    "MultiHeadAttention": ".multihead",
    "MultiheadAttention": ".as_torch",
    "Ntk": ".rotary",
    "QKNorm": ".options",
    "RelativeBias": ".options",
    "Rope": ".rotary",
    "Yarn": ".rotary",
    "adopt": ".as_torch",
    "restore": ".as_torch",
}


__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
