"""The model card: every number from a result, and none of results that are another model's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.sources import SOURCES, Source

from headwise.errors import ArgumentError
from headwise.heads.roles import Role, Roles
from headwise.models import Specialisation, Transformer
from planted_circuit import small_config
from studies import card, probes

MODEL = Transformer(small_config())
NAME = probes.fingerprint(MODEL)
LOSS = {"nats per byte": 0.96, "nats per token": 3.68, "bytes": 220_000, "tokens": 57_000, "documents": 33}
TRAINING_ROW = {
    "label": "1_2x24_seed0", "size": "2x24", "seed": 0, "steps": 8000, "planned": 8000, "seconds": 431.0,
    "tokens": 262_144_000, "induction": 0.95, "previous": 0.97,
    "nats per byte": {"plain": 1.02, "rest": 0.97},
    "found": ["noun > determiner"], "roles": {},
}  # fmt: skip
TRAINING = {
    "label": "1_2x24_seed0", "steps": 8000, "batch": 64, "length": 512, "lr": 0.003, "warmup": 200, "seed": 0,
    "tokens_per_step": 32768, "seconds": 431.0, "last loss": 2.14, "shares": {"plain": 0.9, "lists": 0.1},
    "tokens": {"plain": 16_384_000}, "teacher": {"texts": 27_732},
    "validation": {"plain": LOSS, "rest": LOSS},
    "before": {"plain": LOSS | {"nats per byte": 1.035}, "rest": LOSS},
    "sources": {"Book, chapters": {"documents": 135, "letters": 1_200_000}},
    "tried": [TRAINING_ROW, TRAINING_ROW | {"label": "2_2x24_seed1", "seed": 1, "found": []}],
    "generated": [["The king said", " yes."]], "milliseconds": 31.4,
}  # fmt: skip


def a_source(**changes: Any) -> Source:
    book = {"name": "Book", "version": "1.2.3", "content": "chapters", "licence": "public domain"}
    return dataclasses.replace(SOURCES[0], **(book | changes))


def a_life(**changes: Any) -> Specialisation:
    scores = torch.full((2, 2, 3), 0.1)
    scores[1, 1, 2] = 0.87
    numbers = torch.tensor([0, 8000])
    expected = {"previous": scores, "induction_stripe": scores / 5}
    labels = (((None,) * 3,) * 2, ((None,) * 3, (None, None, "previous-token")))
    arguments = (numbers, numbers * 32768, numbers / 8000, numbers / 8000, expected, labels)
    return Specialisation(*arguments, **({"fingerprint": NAME} | changes))


def some_roles() -> Roles:
    numbers: dict[str, Any] = {"share": 0.91, "low": 0.88, "high": 0.94, "cases": 311, "by_distance": {}}
    rules = {"-2 words": 0.44, "the first noun": 0.31}
    actual = Role("noun > determiner", True, 1, 2, rules=rules, **numbers)
    lost = Role("verb > subject", False, 0, 1, rules={"-1 words": 0.9, "the first noun": 0.4}, **numbers)
    return Roles({role.name: role for role in (actual, lost)}, {}, [0, 1])


def probed(**changes: Any) -> dict[str, Any]:
    prose = {"name": "prose", "sequences": [5], "periods": [103]}
    message = {"model": "mini", "fingerprint": NAME, "probes": [prose], "kinds": {}, "ablations": []}
    return message | changes


def made(**changes: Any) -> str:
    options: dict[str, Any] = {
        "model": MODEL, "life": a_life(), "roles": some_roles(), "training": TRAINING, "probed": probed(),
        "weights": 7_900_000, "sources": [a_source()],
    }  # fmt: skip
    return card.card(**(options | changes))


def test_the_card_says_what_was_read_how_it_was_trained_and_what_heads_do() -> None:
    message = " ".join(made().split())  # wherever its lines end
    assert "| Book 1.2.3 | chapters | prose | public domain | 135 | 1.2 |" in message
    assert "| public-domain prose, 33 documents of 0.22 MB | 0.960 | 1.035 |" in message
    assert "| public-domain prose | 90% | 16.4 |" in message
    assert "| random tokens said twice | 10% | drawn anew |" in message
    assert (
        "262 million tokens in 431 seconds on one H200" in message and "wrote 27,732 short stories" in message
    )
    assert "7.9 MB, float16" in message
    assert "ends at 2.14 nats per token" in message and "prose the loss is 3.68." in message
    assert "| in the browser | 16 tokens and the start in 31 ms, median of 12" in message
    assert (
        "| **2 layers, width 24, seed 0** | noun > determiner | 262 | 1.020 | 0.950 | 0.970 |" in message
        and "| 2 layers, width 24, seed 1 | none | 262 |" in message
        and "no model has more than 1." in message
    )
    assert "- **The king said** yes." in message
    assert "| 1.2 | previous-token | 0.87 | 0.17 |" in message and "| 0.0 | – | 0.10 | 0.02 |" in message
    assert "on the token before at step 8,000." in message
    assert "1 of 2 relations found" in message
    rules = "0.44, -2 words | 0.31, the first noun"
    assert f"| noun > determiner | 1.2 | 0.91 (0.88 to 0.94) | {rules} | **found** | 311 |" in message
    rules = "0.90, -1 words | 0.40, the first noun"
    assert f"| verb > subject | 0.1 | 0.91 (0.88 to 0.94) | {rules} | not found | 311 |" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"life": a_life(fingerprint="17ab")},
            "checkpoints must belong to this model: it has weights .*, not 17ab",
        ),
        (
            {"probed": probed(fingerprint="19cd")},
            "probes must belong to this model: it has weights .*, not 19cd",
        ),
        ({"sources": [a_source(content="verses")]}, "present sources: it lacks Book, verses"),
    ],
    ids=["checkpoints", "probes", "sources"],
)
def test_results_of_something_else_make_no_card(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(**changes)


def test_what_the_model_writes_is_its_likeliest_tokens_after_each_prompt() -> None:
    class Letters:
        def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
            assert return_tensors == "pt"
            return {"input_ids": torch.tensor([[0, len(text) % 7]])}

        def decode(self, ids: list[int]) -> str:
            return " " + " ".join(map(str, ids))

    texts = card.written(MODEL, Letters())
    assert [prompt for prompt, _ in texts] == list(card.PROMPTS) and len(card.PROMPTS) == 10
    ids = torch.tensor([[0, len(card.PROMPTS[0]) % 7]])
    for token in map(int, texts[0][1].split()[:3]):
        assert int(MODEL(ids)[0, -1].argmax()) == token
        ids = torch.cat((ids, torch.tensor([[token]])), 1)


def test_results_that_are_not_stored_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"results must exist: got no mini\.json; make it with python"):
        card._stored(tmp_path / "mini.json", "python -m studies.words_ship")


def test_a_fingerprint_is_of_the_weights_as_they_are_stored() -> None:
    stored = Transformer(small_config())
    stored.load_state_dict({name: value.half().float() for name, value in MODEL.state_dict().items()})
    assert probes.fingerprint(stored) == NAME
    with torch.no_grad():
        stored.output.weight[0, 0] += 1
    assert probes.fingerprint(stored) != NAME
