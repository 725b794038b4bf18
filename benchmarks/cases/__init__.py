"""The cases, in the order they are run. Importing this fills the list."""

from . import attention, drop_in, maps, masks, modules, second_pass, training

__all__ = ["attention", "drop_in", "maps", "masks", "modules", "second_pass", "training"]
