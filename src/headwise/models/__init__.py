"""Models: a small Transformer of our own; trained ones, and the one that is looked at by default."""

from .layers import DecoderLayer, EncoderLayer, FeedForward
from .model_cache import ModelCache
from .pretrained import Pretrained, load
from .transformer import Transformer
from .transformer_config import TransformerConfig

__all__ = [
    "DecoderLayer",
    "EncoderLayer",
    "FeedForward",
    "ModelCache",
    "Pretrained",
    "Transformer",
    "TransformerConfig",
    "load",
]
