"""The cases, in the order they are run. Importing this fills the list."""

from . import attention, maps, masks, modules, second_pass, training

__all__ = ["attention", "maps", "masks", "modules", "second_pass", "training"]
