"""`explain` for a class of the user's own: how it works is found out first, then shown in its own numbers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ...errors import ArgumentError
from .. import recipe
from ..designs import steps_of
from ..diagnose import diagnose
from ..evidence import Evidence
from ..examine.call import Caller
from ..examine.projections import as_it_is, own_weights
from ..examine.surroundings import CAUGHT, surroundings, undisturbed
from ..inquiry import judge, understand
from ..recipe import Given, Weights
from .explanation import Explanation
from .told_steps import fields_of


class Understood:
    """A module that is neither headwise's nor torch's, and what it computes."""

    def __init__(self, module: nn.Module, evidence: Evidence, caller: Caller) -> None:
        assert evidence.weights is not None
        self.evidence, self.module, self._caller = evidence, module, caller
        self.weights: Weights = own_weights(evidence.weights, caller, module)
        self.num_heads = evidence.num_heads

    @undisturbed()
    def explanation(
        self, given: Given, labels: tuple[list[str] | None, list[str] | None], batch: int
    ) -> Explanation:
        """Every step on these inputs, the module's own numbers beside the expected ones."""
        expected = recipe.run(given, self.weights, self.num_heads)
        diagnosis = diagnose(self.evidence)
        faults = diagnosis.faults  # before the judgement, for which some are a design
        report = judge(self.evidence, diagnosis)
        yours = {}
        if faults:
            wrong = {name: step for made in faults for name, step in made.steps.items()}
            yours = fields_of(recipe.run(given, self.weights, self.num_heads, wrong))
        name = type(self.module).__name__
        notes = [f"The steps are computed in float64 with the weights of your {name}."]
        if faults is None:
            notes.append(
                "No fault of the library explains your output, so your numbers on the way are not known."
            )
        caller = as_it_is(self._caller, self.module)
        mask = None if self.evidence.conventions.always_causal else given.mask
        with surroundings(), torch.no_grad():
            try:
                yours["output"] = caller.call(given.query, given.key, given.value, mask).output
            except CAUGHT as error:
                notes.append(f"Your module could not be called with these inputs: {error}")
        return Explanation(
            name, expected, yours, query_labels=labels[0], key_labels=labels[1], faults=report.faults,
            notes=notes, batch=batch, checked=None if report.ok else report.summary,
        )  # fmt: skip


def understood(module: nn.Module) -> Understood:
    """How it works.

    Raises:
        ArgumentError: that could not be found out.
    """
    if any(isinstance(one, UninitializedParameter) for one in module.parameters()):
        raise ArgumentError(
            f"module must have its weights: {type(module).__name__}'s wait for a first call; call it once"
        )
    evidence, caller = understand(module)
    if caller is None or evidence.weights is None:
        why = next((one.message for one in evidence.problems), "it gave no numbers")
        raise ArgumentError(
            f"module must be one that headwise.check understands: {type(module).__name__} is not: {why}; "
            "see what headwise.check says of it"
        )
    if steps_of(evidence.designs):
        what = "; ".join(one.words for one in evidence.designs)
        raise ArgumentError(
            f"module must be plain attention to be explained: {type(module).__name__} has {what}; "
            "headwise.check judges it within that"
        )
    return Understood(module, evidence, caller)
