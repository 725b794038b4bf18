"""docs/measured.md and mini's card say what the studies' results say."""

from __future__ import annotations

from pathlib import Path

import headwise as hw
from studies import pages

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_results_say() -> None:
    """Red after new results: `python -m studies.pages` writes docs/measured.md."""
    assert (ROOT / "docs" / "measured.md").read_text("utf-8") == pages.page()


def test_results_are_of_the_model_that_is_shipped() -> None:
    """Red after a training: the roles of mini that are stored are those its weights have now."""
    from headwise.heads.roles import Roles

    model, tokenizer, _ = hw.models.load()
    stored = Roles.from_json((pages.RESULTS / "roles_mini.json").read_text("utf-8"))
    now = hw.roles(model, tokenizer)
    assert {name: (role.layer, role.head, role.found) for name, role in now.items()} == {
        name: (role.layer, role.head, role.found) for name, role in stored.items()
    }
