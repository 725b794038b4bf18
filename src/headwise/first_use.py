"""Torch comes with the first use of it: `import headwise` alone is only names.

As long as nobody has loaded torch, the package is a list of names and a finder in `sys.meta_path`. What needs
torch comes through one of three doors, and behind each of them the whole package is loaded, with all that it
registers, as `import headwise` does it where torch is there already:

    hw.attention                 a public name: `headwise/__init__.py` runs again, with torch
    from headwise.map import ..  a module of ours: the finder loads everything before it, and hands it out
    import torch                 anybody's import of it: the finder loads everything as soon as it is there

So nobody holds a tensor, a pickle or a compiled graph before maps and operators are registered. The finder
goes when all is loaded, and where torch comes first there never is one.

Threads: one loads, and whoever asks for a public name waits for it. Imports do not wait, for they hold locks
of Python's that the loading thread may need: meanwhile a module of ours is imported as any other. Where two
threads stand in each other's way all the same, Python tells one of them; that one leaves the loading to the
next use.
"""

from __future__ import annotations

import sys
from _thread import allocate_lock, get_ident
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader as _Loader
    from types import ModuleType
else:
    _Loader = object  # that class takes milliseconds to import, and brings nothing that is needed here

__all__ = ["Finder", "is_light", "is_whole", "load", "load_on_first_use", "part"]

PACKAGE = __name__.partition(".")[0]

# What can be loaded without torch: the command line, and what its quick verbs need. A test imports them all.
LIGHT = {
    "byte_sizes", "course", *(
        f"course.{each}"
        for each in ("deck", "exercises", "formulas", "lesson", "lesson_notebooks", "plants", "progress",
                     "running", "study", "terms")
    ), "errors", "examiner", "examiner.desk", "examiner.desk.template", "examiner.sandbox",
    "examiner.sandbox.confine", *(
        f"examiner.sandbox.confine.{each}"
        for each in ("fence", "landlock", "limits", "linux", "namespaces", "sweep")
    ), "first_use", "moved_modules", "nn", "nn.layer_sizes", "nn.presets", "show",
    "show.fitted_tables", "show.presets_table", "show.tables", "show.texts", "whole_files", "__main__",
}  # fmt: skip
LIGHT_PACKAGE = "cli"


_filled: set[str] = set()  # packages that were run once more


def is_whole(package: str) -> bool:
    """Whether a package is to import all its names: torch is there, and nothing is waiting for it."""
    if sys.modules.get("torch") is None:
        return False
    return package in _filled or not any(isinstance(finder, Finder) for finder in sys.meta_path)


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

        is_module = any(each.name == name for each in iter_modules(module.__path__))
        if not is_module and name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not (is_module and is_light(f"{package}.{name}")):
            # Not inside `from .. import budget`, which asks through Python's importer, with locks in hand.
            if not sys._getframe(2).f_code.co_filename.startswith("<frozen importlib"):
                load()
            if not is_module:
                import torch  # noqa: F401

                if name not in vars(module):
                    fill(module)
                return vars(module)[name]
        return import_module(f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def load() -> None:
    """Load everything, or wait until another thread has."""
    import torch  # noqa: F401, behind it the finder does

    for finder in [each for each in sys.meta_path if isinstance(each, Finder)]:
        finder.load(wait=True)


def fill(module: ModuleType) -> None:
    """Run a package's `__init__` once more, now that torch is there."""
    _filled.add(module.__name__)
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)


def load_on_first_use() -> None:
    """See to it that everything is loaded once torch is needed."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class Finder:
    """In `sys.meta_path` until torch is loaded: whatever needs it gets a loader that loads everything."""

    def __init__(self) -> None:
        self.busy = allocate_lock()
        self.thread: int | None = None  # that is loading

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the others find it. Nothing is loaded here: Python holds a lock of all imports meanwhile."""
        is_ours = name.startswith(f"{PACKAGE}.") and not is_light(name)
        if self.busy.locked() or not (is_ours or name == "torch"):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = (Before if is_ours else Behind)(self, spec)
                return spec
        return None

    def load(self, wait: bool = False) -> None:
        """Load everything, unless it is being loaded; with `wait`, then return once it is."""
        if self.thread == get_ident() or not self.busy.acquire(blocking=wait):
            return
        try:
            self.thread = get_ident()
            if self in sys.meta_path:
                import torch  # noqa: F401

                fill(sys.modules[PACKAGE])
                sys.meta_path.remove(self)
        except RuntimeError as error:
            if wait or type(error).__name__ != "_DeadlockError":
                raise
        finally:
            self.thread = None
            self.busy.release()


class Before(_Loader):
    """Loads everything before a module of ours, which then is loaded as well, or is as others load it."""

    def __init__(self, finder: Finder, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        self.finder, self.spec, self.own = finder, spec, spec.loader
        self.already: ModuleType | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module that came with everything, or a new one."""
        self.finder.load()
        self.already = sys.modules.get(spec.name)
        return self.already if self.already is not None else self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Fill it, unless it is filled; with its own loader, by which it is known from now on."""
        self.spec.loader = module.__loader__ = self.own
        if module is not self.already:
            self.own.exec_module(module)


class Behind(Before):
    """Loads torch, and everything behind it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As others do."""
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As others do, and then everything of ours."""
        super().exec_module(module)
        # It is complete: threads that ask for it need not wait for what follows, or they would wait for this
        # one while it waits for what they hold.
        vars(self.spec)["_initializing"] = False
        try:
            self.finder.load()
        except ImportError as error:  # torch is well; whoever uses headwise gets the error itself
            import warnings

            warnings.warn(f"headwise cannot be used: {error}", RuntimeWarning, stacklevel=2)
