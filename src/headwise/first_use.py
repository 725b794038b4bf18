"""Torch comes with the first use of it: `import headwise` alone is only names.

As long as nobody has loaded torch, the package is a list of names and a finder in `sys.meta_path`. What needs
torch comes through one of three doors, and behind each of them the whole package is loaded, with all that it
registers, as `import headwise` does it where torch is there already:

    hw.attention                 a public name: `headwise/__init__.py` runs again, with torch
    from headwise.map import ..  a module of ours: the finder loads everything before it, and hands it out
    import torch                 anybody's import of it: the finder loads everything as soon as it is there

So nobody holds a tensor, a pickle or a compiled graph before maps and operators are registered. The finder
goes when all is loaded, and where torch comes first there never is one.

Threads: nothing here waits. While one thread loads, another one's imports are plain imports, which Python's
own locks keep in order; waiting with such a lock in hand is how imports end in a deadlock.
"""

from __future__ import annotations

import sys
from _thread import allocate_lock
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader as _Loader
    from types import ModuleType
else:
    _Loader = object  # that class takes milliseconds to import, and brings nothing that is needed here

__all__ = ["Finder", "has_torch", "is_light", "load_on_first_use", "part"]

PACKAGE = __name__.partition(".")[0]

# What can be loaded without torch: the command line, and what its quick verbs need. A test imports them all.
LIGHT = {
    "byte_sizes", "errors", "first_use", "moved_modules", "nn", "nn.layer_sizes", "nn.presets", "show",
    "show.presets_table", "show.tables", "show.texts", "whole_files", "__main__",
}  # fmt: skip
LIGHT_PACKAGE = "cli"


def has_torch() -> bool:
    """Whether torch is loaded, or is just being loaded by somebody."""
    return sys.modules.get("torch") is not None


def is_light(name: str) -> bool:
    """Whether a module of the package, by its full name, needs no torch."""
    own = name.partition(".")[2]
    return own in LIGHT or own.partition(".")[0] == LIGHT_PACKAGE


def part(package: str, name: str, public: Sequence[str]) -> object:
    """What a package that has not loaded everything is asked for, as its `__getattr__` answers.

    Raises:
        AttributeError: there is no such thing.
    """
    module = sys.modules[package]
    if not name.startswith("_"):
        from importlib import import_module
        from pkgutil import iter_modules

        if any(each.name == name for each in iter_modules(module.__path__)):
            return import_module(f"{package}.{name}")
        if name in public:
            import torch  # noqa: F401, behind it the finder loads everything

            if name not in vars(module):  # it could not, or another thread is about it
                fill(module)
            return vars(module)[name]
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def fill(module: ModuleType) -> None:
    """Run a package's `__init__` once more, now that torch is there."""
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)


def load_on_first_use() -> None:
    """See to it that everything is loaded once torch is needed."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class Finder:
    """In `sys.meta_path` until torch is loaded: loads the whole package right behind it."""

    def __init__(self) -> None:
        self.busy = allocate_lock()  # tried, never waited for

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Torch, with everything of ours behind it; or a part of ours, with everything before it."""
        if name == "torch" and not self.busy.locked():
            return self._with_all_behind(name, path, target)
        if name.startswith(f"{PACKAGE}.") and not is_light(name) and self._load():
            already = sys.modules.get(name)
            if already is not None:
                return ModuleSpec(name, Handed(already))
        return None

    def _load(self) -> bool:
        """Load everything, unless this or another thread is about it."""
        if not self.busy.acquire(blocking=False):
            return False
        try:
            import torch  # noqa: F401

            fill(sys.modules[PACKAGE])
            if self in sys.meta_path:
                sys.meta_path.remove(self)
        finally:
            self.busy.release()
        return True

    def _with_all_behind(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        itself = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is torch's own again
            itself(module)
            # It is complete: threads that ask for it need not wait for what follows, or they would wait for
            # this one while it waits for what they hold.
            spec._initializing = False  # type: ignore[attr-defined]
            try:
                self._load()
            except ImportError as error:
                # Torch is well all the same. Whoever uses headwise gets the error itself.
                import warnings

                warnings.warn(f"headwise cannot be used: {error}", RuntimeWarning, stacklevel=2)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Handed(_Loader):
    """A loader of a module that is loaded."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module as it is."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run; the importer has given it a new spec."""
        module.__spec__ = self.spec
