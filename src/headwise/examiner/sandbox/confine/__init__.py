"""Fencing a process in. Only Python's own library is imported here.

Namespaces and Landlock take hold of one thread and what it starts later, so they come before torch, which
may start threads: the child process loads this package alone, without headwise around it.
"""

from .fence import Fence, Standing, enter

__all__ = ["Fence", "Standing", "enter"]
