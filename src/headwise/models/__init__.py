"""Models: a small Transformer of our own, and a training loop; trained ones, and the default one."""

from .layers import DecoderLayer, EncoderLayer, FeedForward
from .model_cache import ModelCache
from .pretrained import Pretrained, load
from .specialised_heads import Specialisation, specialisation
from .training_loop import History, TrainingStep, fit
from .transformer import Transformer
from .transformer_config import TransformerConfig

__all__ = [
    "DecoderLayer",
    "EncoderLayer",
    "FeedForward",
    "History",
    "ModelCache",
    "Pretrained",
    "Specialisation",
    "TrainingStep",
    "Transformer",
    "TransformerConfig",
    "fit",
    "load",
    "specialisation",
]
