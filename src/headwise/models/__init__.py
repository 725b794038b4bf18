"""Models: the trained one that headwise looks at by default, and those of others; a training loop."""

from .pretrained import Pretrained, load
from .training_loop import History, TrainingStep, fit

__all__ = ["History", "Pretrained", "TrainingStep", "fit", "load"]
