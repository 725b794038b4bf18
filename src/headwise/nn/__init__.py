"""Modules: attention with its projections, and what belongs to them."""

from importlib import import_module

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
    from .memory import Memory
    from .multihead import MultiHeadAttention
    from .options import Buckets, QKNorm, RelativeBias
    from .rotary import Linear, Llama3, Ntk, Rope, Yarn

_HOMES = {
    "Buckets": ".options",
    "KVCache": ".cache",
    "Linear": ".rotary",
    "Llama3": ".rotary",
    "Memory": ".memory",
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


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for (PEP 562): `headwise presets` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
