"""The model card: every number from a result, and none of results that are another model's."""

from __future__ import annotations

import dataclasses
import json
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
TRAINING = {
    "steps": 8000, "batch": 64, "length": 512, "lr": 0.003, "warmup": 200, "seed": 0,
    "tokens_per_step": 32768, "tokens_in_corpus": 16_384_000, "seconds": 431.0, "validation": 2.345,
    "sources": {"Book, chapters": {"documents": 135, "letters": 1_200_000}},
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
    lost = Role("verb > subject", False, 0, 1, rules={"-1 words": 0.9}, **numbers)
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
    assert "Validation loss 2.345 nats" in message and "16.0 times through the text" in message
    assert "no synthetic repeats" in message and "7.9 MB, float16" in message
    assert "| 1.2 | previous-token | 0.87 | 0.17 |" in message and "| 0.0 | – | 0.10 | 0.02 |" in message
    assert "on the token before at step 8,000." in message
    assert "1 of 2 relations found" in message
    assert "| noun > determiner | 1.2 | 0.91 (0.88 to 0.94) | 0.44, -2 words | **found** | 311 |" in message
    assert "| verb > subject | 0.1 | 0.91 (0.88 to 0.94) | 0.90, -1 words | not found | 311 |" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"life": a_life(fingerprint="17ab")}, "checkpoints must be of this model: .* weights 17ab, these"),
        ({"probed": probed(fingerprint="19cd")}, "probes must be of this model: measured with weights 19cd"),
        ({"sources": [a_source(content="verses")]}, "today's sources: Book, verses is not in it"),
    ],
    ids=["checkpoints", "probes", "sources"],
)
def test_results_of_something_else_make_no_card(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(**changes)


def test_a_training_is_summed_up_with_the_sizes_of_what_it_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"results must be there: no history\.json; make it with"):
        card.training_of(tmp_path, [])
    book, code = "Book, chapters", "Code, source"
    documents = [(book, "one", "abc"), (book, "two", "de"), (code, "x", "f")]
    history = TRAINING | {"losses": [1.0], "validation": {"0": 8.0, "8000": 2.345}}
    (tmp_path / "history.json").write_text(json.dumps(history))
    message = card.training_of(tmp_path, documents)
    sizes = {book: {"documents": 2, "letters": 5}, code: {"documents": 1, "letters": 1}}
    assert message == TRAINING | {"sources": sizes}
    (tmp_path / "history.json").write_text(json.dumps(history | {"validation": {"0": 8.0}}))
    with pytest.raises(ArgumentError, match="must have come to its end: step 8000 was not judged"):
        card.training_of(tmp_path, documents)


def test_a_fingerprint_is_of_the_weights_as_they_are_stored() -> None:
    stored = Transformer(small_config())
    stored.load_state_dict({name: value.half().float() for name, value in MODEL.state_dict().items()})
    assert probes.fingerprint(stored) == NAME
    with torch.no_grad():
        stored.output.weight[0, 0] += 1
    assert probes.fingerprint(stored) != NAME
