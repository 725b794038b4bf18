"""Models: a small Transformer of ours, its files, and a training loop; trained ones, one of them built in."""

from .byte_pairs import BytePairs
from .layers import DecoderLayer, EncoderLayer, FeedForward
from .model_cache import ModelCache
from .pretrained import Pretrained, load
from .training_loop import History, TrainingStep, fit
from .transformer import Transformer
from .transformer_config import TransformerConfig

__all__ = [
    "BytePairs",
    "DecoderLayer",
    "EncoderLayer",
    "FeedForward",
    "History",
    "ModelCache",
    "Pretrained",
    "TrainingStep",
    "Transformer",
    "TransformerConfig",
    "fit",
    "load",
]
