"""q_proj, k_proj, v_proj and o_proj, out_proj or dense, keys and values perhaps shared by groups of heads.

Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, SmolLM, gpt-oss, ... ; BART, OPT, Whisper, CLIP, ... ; Phi
"""

from __future__ import annotations

from torch import nn

from .four_linears import Names, prunable
from .prunable import Prunable

__all__ = ["of"]

LLAMA = Names("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
BART = Names("q_proj", "k_proj", "v_proj", "out_proj", "head_dim")
PHI = Names("q_proj", "k_proj", "v_proj", "dense", "head_dim")


def of(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is of this family."""
    module = model.get_submodule(path)
    if not type(module).__module__.startswith("transformers."):
        return None  # strangers may call theirs the same
    for names in (LLAMA, BART, PHI):
        if all(hasattr(module, name) for name in (names.q, names.k, names.v, names.out, names.head_dim)):
            return prunable(model, path, module, names)
    return None
