"""The cases, in the order they are run. Importing this fills the list."""

from . import adopting, attention, drop_in, maps, masks, modules, second_pass, training

__all__ = ["adopting", "attention", "drop_in", "maps", "masks", "modules", "second_pass", "training"]
