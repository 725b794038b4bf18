"""Models: headwise's own Transformer, its files and a training loop; trained models, one built in."""

from ..lazy_names import lazy_attributes

__all__ = [
    "BytePairs",
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .byte_pairs import BytePairs
    from .layers import DecoderLayer, EncoderLayer, FeedForward
    from .pretrained import Pretrained, load
    from .specialised_heads import Specialisation, specialisation
    from .training_loop import History, TrainingStep, fit
    from .transformer import ModelCache, Transformer
    from .transformer_config import TransformerConfig

_HOMES = {
    "BytePairs": ".byte_pairs",
    "DecoderLayer": ".layers",
    "EncoderLayer": ".layers",
    "FeedForward": ".layers",
    "History": ".training_loop",
    "ModelCache": ".transformer",
    "Pretrained": ".pretrained",
    "Specialisation": ".specialised_heads",
    "TrainingStep": ".training_loop",
    "Transformer": ".transformer",
    "TransformerConfig": ".transformer_config",
    "fit": ".training_loop",
    "load": ".pretrained",
    "specialisation": ".specialised_heads",
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
