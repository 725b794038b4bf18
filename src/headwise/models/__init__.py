"""Models: the trained one that headwise looks at by default, and those of others."""

from .pretrained import Pretrained, load

__all__ = ["Pretrained", "load"]
