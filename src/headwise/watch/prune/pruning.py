"""`prune`: heads taken out for good, and with them their weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...errors import ArgumentError
from ..chosen_heads import ChosenHeads, Heads
from . import bert_like, gpt2, headwise_modules, llama_like
from .prunable import Family, Prunable, kept_kv_heads
from .saving import remember

__all__ = ["FAMILIES", "Pruned", "prune"]

# To add a family, add a file and an entry here.
FAMILIES: dict[str, Family] = {
    "headwise.MultiHeadAttention": headwise_modules.of,
    "GPT-2": gpt2.of,
    "BERT and its relatives": bert_like.of,
    "Llama, BART and theirs": llama_like.of,
}


@dataclass(frozen=True)
class Pruned:
    """What `prune` did; print it."""

    heads: dict[str, list[int]]  # by module path, as they were numbered before
    num_heads: dict[str, tuple[int, int]]  # before, after
    parameters: tuple[int, int]  # of the whole model: before, after

    def __str__(self) -> str:
        gone = sum(map(len, self.heads.values()))
        before, after = self.parameters
        saved = f"{before:,} -> {after:,} parameters ({(after - before) / max(1, before):+.1%})"
        lines = [f"{_counted(gone, 'head')} pruned in {_counted(len(self.heads), 'layer')}: {saved}."]
        for path, heads in self.heads.items():
            was, left = self.num_heads[path]
            named = ", ".join(map(str, heads))
            lines.append(f"  {path or '(the model)'}: {was} -> {_counted(left, 'head')}, without {named}")
        return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def prune(model: nn.Module, heads: Heads) -> Pruned:
    """Take heads out of a model for good, in place: what is left computes what the model with those heads at
    zero computes, with smaller projections.

    Heads that stay are numbered anew from 0, so pruning again counts them as they are then. Make optimisers
    afterwards: one made before holds the old weights and would train those. The weights that change are new
    parameters, with the old ones' dtype, device and requires_grad, and no gradient. Biases of output
    projections stay.

    Where several query heads share a key/value head, either all of a group go, and the key/value head with
    them, or the same number in each group that stays.

    What was pruned is written down in a Hugging Face model's config, as `headwise_pruned_heads`: after
    `model.save_pretrained(folder)`, `load_pruned(cls, folder)` brings the smaller model back. Any other
    module is built and pruned again, then takes its `state_dict`.

    Args:
        heads: (layer, head) pairs, as in `headwise.ablate`; or a mapping from layers to heads.

    Returns:
        What was done. Nothing is changed unless all of it can be.

    Raises:
        ArgumentError: an unknown layer or head; a single visit of a shared layer; all heads of a layer; part
            of a group; attention of another family; weights that are tied, wrapped or quantised.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha = MultiHeadAttention(d_model=8, num_heads=4)
        >>> print(prune(mha, [(0, 1), (0, 2)]))
        2 heads pruned in 1 layer: 288 -> 148 parameters (-48.6%).
          (the model): 4 -> 2 heads, without 1, 2
        >>> mha(torch.randn(1, 3, 8))[0].shape
        torch.Size([1, 3, 8])

    Michel 2019, section 4; Voita 2019.
    """
    chosen = ChosenHeads(model, heads)
    if chosen.visited:
        raise ArgumentError(
            f"heads must be pruned in every visit of a layer: got {chosen.visited[0]!r}; its weights are "
            "shared, name it without the visit"
        )
    plan: list[tuple[Prunable, list[int], list[int], list[int]]] = []
    for path in chosen.paths:
        layer = _prunable(model, path)
        gone = chosen.at(path, layer.num_heads)
        kept = [head for head in range(layer.num_heads) if head not in gone]
        if gone:
            plan.append((layer, gone, kept, kept_kv_heads(layer, kept)))
    before = _num_parameters(model)
    for layer, gone, kept, kept_kv in plan:
        layer.keep(kept, kept_kv)
        remember(model, layer.path, gone, layer.num_heads)
    return Pruned(
        {layer.path: gone for layer, gone, _, _ in plan},
        {layer.path: (layer.num_heads, len(kept)) for layer, _, kept, _ in plan},
        (before, _num_parameters(model)),
    )


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _prunable(model: nn.Module, path: str) -> Prunable:
    for family in FAMILIES.values():
        found = family(model, path)
        if found is not None:
            return found
    module = model.get_submodule(path)
    if isinstance(module, nn.MultiheadAttention):
        raise ArgumentError(
            f"model must have attention that can be smaller: {path} is torch's {type(module).__name__}, "
            f"whose {module.num_heads} heads always fill embed_dim = {module.embed_dim}; put "
            "headwise.MultiHeadAttention.from_torch(module) in its place, or use headwise.ablate"
        )
    raise ArgumentError(
        f"model must have attention of a known family to be pruned: {path} is {type(module).__name__}; "
        f"known are {', '.join(FAMILIES)}; headwise.ablate switches heads off in any"
    )
