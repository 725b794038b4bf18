"""Modules: attention with its projections, and their options.

multihead.py           `MultiHeadAttention`: its submodules and forward
self_attention.py      mha(x) without options
one_step.py            attention and its projections as one step of autograd
packed_weights.py      the projections' weights as one tensor, and whether they were changed
module_call.py         validation of the arguments of forward
options.py rotary.py   optional parts: norms, gates, biases by distance; rotary positions
cache.py cached_call.py   `KVCache`; attention of new tokens to a cache, `Memory`
ragged.py              sequences of several lengths
as_torch/              a replacement for torch's class: the class, its call, `adopt` and `restore`
presets.py torch_conversion.py   configurations of known models; weights from torch's class and back
"""

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
