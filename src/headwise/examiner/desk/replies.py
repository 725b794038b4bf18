"""In the process of the learner's code: other numbers into its parameters, and what it answers then."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..evidence import packed, unpacked
from ..examine.call import Caller
from ..examine.plan import express
from ..examine.surroundings import CAUGHT, problem_of, surroundings
from ..steps.questions import Callee


def answers(caller: Caller | Callee, asked: Any, numbers: bytearray) -> tuple[object, bytes]:
    """One answer a question: the raw output, or what the code raised; as JSON can hold them, and numbers."""
    said, out = [], bytearray()
    with surroundings():
        for one in asked:
            question = unpacked(one, numbers)
            try:
                if isinstance(caller, Callee):
                    said.append(_of_step(caller, question, out))
                    continue
                if "values" in question:
                    _put(caller, question["places"], question["values"])
                query, key, value = (question[name] for name in question["inputs"])
                chosen = _sayable(caller, question["masks"])
                mask = None if chosen is None else question["masks"][chosen]
                with torch.no_grad():
                    output = caller.call(query, key, value, mask).output
                said.append(packed({"output": output.detach().double(), "mask": chosen}, out))
            except CAUGHT as error:
                said.append({"problem": asdict(problem_of(error, "call", _files(caller)))})
    return said, bytes(out)


def _of_step(callee: Callee, question: dict[str, Any], out: bytearray) -> object:
    """A single step's answer, as it is."""
    asked, _ = callee.answer(question["probe"], question["given"])
    if asked.problem is not None:
        return {"problem": asdict(asked.problem)}
    return packed({"output": asked.output, "mask": None}, out)


def _sayable(caller: Caller, masks: list[Tensor]) -> int | None:
    """Which of the masks its arguments can say, the first of them."""
    for i, mask in enumerate(masks):
        samples = mask.split(1) if caller.plan.layout == "one sequence" else (mask,)
        if all(express(caller.ways, one, caller.subject.sizes.H) is not None for one in samples):
            return i
    return None


def _files(caller: Caller | Callee) -> frozenset[str]:
    return caller.files if isinstance(caller, Callee) else caller.subject.files


@torch.no_grad()
def _put(caller: Caller, places: Tensor, values: Tensor) -> None:
    """These numbers at these places of all parameters in order, flat; all others stay what they are."""
    parameters = list(caller.subject.parameters.values())
    flat = torch.cat([one.detach().double().flatten() for one in parameters])
    flat[places] = values
    for one, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        one.copy_(part.view(one.shape))
