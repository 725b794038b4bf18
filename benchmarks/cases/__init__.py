"""The cases, in the order they are run. Importing this fills the list."""

from . import adopting, attention, drop_in, maps, masks, modules, monitoring, second_pass, training, watching

__all__ = [
    "adopting",
    "attention",
    "drop_in",
    "maps",
    "masks",
    "modules",
    "monitoring",
    "second_pass",
    "training",
    "watching",
]
