"""BERT and its relatives: query, key and value in one module, the output projection beside it or in it.

BERT, RoBERTa, ELECTRA, CamemBERT, XLM-RoBERTa, ViT of that form, ... ; ALBERT; DistilBERT.
"""

from __future__ import annotations

from torch import nn

from .four_linears import Names, prunable
from .prunable import Prunable

__all__ = ["of"]

BERT = Names("query", "key", "value", "output.dense", "attention_head_size")
ALBERT = Names("query", "key", "value", "dense", "attention_head_size", apart=("LayerNorm",))
DISTILBERT = Names("q_lin", "k_lin", "v_lin", "out_lin", "attention_head_size")


def of(model: nn.Module, path: str) -> Prunable | None:
    """The layer at `path`, if it is of this family."""
    module = model.get_submodule(path)
    if not type(module).__module__.startswith("transformers."):
        return None  # strangers may call theirs the same
    for names in (ALBERT, DISTILBERT):
        if all(hasattr(module, name) for name in (names.q, names.k, names.v, names.out, names.head_dim)):
            return prunable(model, path, module, names)
    if not path or not all(hasattr(module, name) for name in (BERT.q, BERT.k, BERT.v, BERT.head_dim)):
        return None
    around = model.get_submodule(path.rpartition(".")[0])
    out = getattr(getattr(around, "output", None), "dense", None)
    return None if out is None else prunable(model, path, module, BERT, out)
