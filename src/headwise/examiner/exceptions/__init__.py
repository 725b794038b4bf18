"""Exceptions in plain words."""

from .explaining import explain

__all__ = ["explain"]
