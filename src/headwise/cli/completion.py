"""What shells complete behind Tab: names of presets, models and columns, and the files that a verb takes.

Each function gets what was typed so far and gives all that begin with it. None of them needs torch: a shell
asks at every Tab.
"""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = [
    "corpora", "devices", "folders", "model_names", "pages", "pictures", "preset_names", "python_files",
    "sorts", "texts",
]  # fmt: skip

MODELS = ("mini", "minilm")
CORPORA = (".txt", ".text", ".md", ".jsonl", ".ndjson", ".parquet")  # as `headwise.corpus.documents.ENDINGS`
# As `headwise.show.heads_tables.check_sort` knows them, which needs torch; a test compares the two.
SORTS = (
    "label", "layer", "head", "entropy", "effective_keys", "confidence", "distance", "first", "previous",
    "itself", "next", "local", "max_logit", "induction", "duplicate_token", "special", "punctuation",
    "spread", "locality", "streaming",
)  # fmt: skip


def preset_names(incomplete: str) -> list[str]:
    """Presets, by name."""
    from ..nn.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def sorts(incomplete: str) -> list[str]:
    """What heads can be sorted by."""
    return [name for name in SORTS if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Models of ours, and folders: those with a model in them without a slash at their end."""
    own = [name for name in MODELS if name.startswith(incomplete)]
    return own + [_closed(path) for path in folders(incomplete)]


def _closed(folder: str) -> str:
    there = os.path.isfile(os.path.join(os.path.expanduser(folder), "config.json"))
    return folder.rstrip("/") if there else folder


def folders(incomplete: str) -> list[str]:
    """Folders, each with a slash."""
    return _paths(incomplete, lambda name: False)


def python_files(incomplete: str) -> list[str]:
    """Python source, notebooks, and folders on the way to them."""
    return _paths(incomplete, lambda name: name.endswith((".py", ".ipynb")))


def pictures(incomplete: str) -> list[str]:
    """Pictures that are there, to be written anew, and folders."""
    return _paths(incomplete, lambda name: name.lower().endswith((".png", ".svg", ".pdf")))


def pages(incomplete: str) -> list[str]:
    """Pages and data that are there, to be written anew, and folders."""
    return _paths(incomplete, lambda name: name.lower().endswith((".html", ".htm", ".json")))


def texts(incomplete: str) -> list[str]:
    """Any file, and folders."""
    return _paths(incomplete, lambda name: True)


def corpora(incomplete: str) -> list[str]:
    """Files that a survey reads, and folders."""
    return _paths(incomplete, lambda name: name.lower().endswith(CORPORA))


def devices(incomplete: str) -> list[str]:
    """Where a model may run."""
    return [name for name in ("cpu", "cuda") if name.startswith(incomplete)]


def _paths(incomplete: str, fits: Callable[[str], bool]) -> list[str]:
    """Files and folders that begin so, as they were begun: ~ and ./ stay; hidden ones only if asked for."""
    folder, begun = os.path.split(incomplete)
    typed = incomplete[: len(incomplete) - len(begun)]
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as there:
            entries = sorted((entry.name, entry.is_dir()) for entry in there if entry.name.startswith(begun))
    except OSError:
        return []
    return [
        f"{typed}{name}{'/' if is_folder else ''}"
        for name, is_folder in entries
        if (is_folder or fits(name)) and (begun or not name.startswith("."))
    ]
