"""Claims of course pages about heads: planted heads are told from chance, and every row has its numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.claim_measures import Claim, Subject, drawn_anew, of_roles
from studies.claimed_sentence import CLAIMED, judge, word_weights
from studies.claimed_structure import more_heads
from torch import Tensor

import headwise as hw
from headwise.heads.roles import Role, Roles
from headwise.models import Transformer, TransformerConfig
from headwise.nn import Rope
from small_models import gpt2
from studies import claim_measures, claimed_sentence, claimed_structure, claims, effects

VERDICTS = {"holds", "holds in part", "not found", "wrong", "cannot be asked", "not asked here"}
SIZE = 61


class Letters:
    """A tokenizer of words with their places, of three letters a token; 0 in front of every text."""

    all_special_ids = (0,)
    bos_token_id = 0

    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        ids, spans = [0], [(0, 0)]
        for word in re.finditer(r"'s|\w+|[^\w\s]", text):
            for left in range(word.start(), word.end(), 3):
                spans.append((left, min(left + 3, word.end())))
                ids.append(1 + sum(map(ord, text[slice(*spans[-1])])) % (SIZE - 1))
        return {"input_ids": ids, "offset_mapping": spans}

    def decode(self, tokens: list[int], **options: object) -> str:
        return "x"

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return "x" if isinstance(ids, int) else ["x"] * len(ids)


def tiny(kind: str = "decoder") -> Transformer:
    config = TransformerConfig(SIZE, 12, 2, 3, kind=kind, rope=Rope())
    return Transformer(config).eval()


def weights(*hits: tuple[int, int], heads: int = 5, causal: bool = False) -> Tensor:
    """[2, heads, 8, 8] of heads that look at the first word, but for head 1.3, which hits these arrows."""
    made = torch.full((2, heads, 8, 8), 0.01)
    made[..., 0] = 0.5
    for i, j in hits:
        made[1, 3, i, j] = 1.0
    return made.tril() if causal else made


# One sentence


def test_a_planted_head_is_found_where_chance_cannot_reach_it() -> None:
    arrows = ((2, 3), (3, 2), (3, 4), (4, 3), (6, 1), (1, 6))
    arrows = tuple(dict(arrows).items())  # one per word
    drawn = judge(weights(*arrows), weights(), arrows)
    assert (drawn.layer, drawn.head, drawn.hits, drawn.arrows) == (1, 3, len(arrows), len(arrows))
    assert drawn.chance < 0.01 and drawn.untrained == 0 and drawn.offset < len(arrows)
    assert drawn.verdict == "holds"


def test_what_random_weights_do_as_well_is_not_found() -> None:
    arrows = ((2, 3), (3, 4), (4, 5), (5, 6), (6, 7))
    assert judge(weights(*arrows), weights(*arrows), arrows).verdict == "not found"
    assert judge(weights(*arrows), weights(), arrows).verdict == "holds in part"  # an offset does it, too


def test_what_a_causal_model_cannot_see_is_not_asked() -> None:
    drawn = judge(weights((6, 1), causal=True), weights(causal=True), ((1, 6), (6, 1)))
    assert drawn.arrows == 1
    assert judge(weights(causal=True), weights(causal=True), ((1, 6),)).verdict == "cannot be asked"


def test_parts_of_words_are_joined() -> None:
    """A word of two tokens is looked at by both in sum, and looks as they do on average."""
    model, letters = tiny(), Letters()
    actual = word_weights(model, letters, "abc defghi jk")
    with torch.no_grad(), hw.watch(model) as heads:
        model(torch.tensor([letters("abc defghi jk")["input_ids"]]))
    maps = torch.stack([heads[layer].map.dense()[0] for layer in heads])  # 5 tokens: the first is special
    assert actual.shape == (3, 2, 3, 3)
    torch.testing.assert_close(actual[..., 2, 1], maps[..., 4, 2] + maps[..., 4, 3])
    torch.testing.assert_close(actual[..., 1, 0], (maps[..., 2, 1] + maps[..., 3, 1]) / 2)


# All of them


def a_role(name: str, head: int, is_found: bool, **changes: Any) -> Role:
    values: dict[str, Any] = {
        "name": name, "found": is_found, "layer": 1, "head": head, "share": 0.9, "low": 0.8, "high": 0.95,
        "cases": 50, "by_distance": {6: (0.9, 20)},
        "heads": [(1, head, 0.9)] if is_found else [],
        "rules": {"-1 words": 0.2, "the nearest noun": 0.4 if is_found else 0.9},
    }  # fmt: skip
    return Role(**values | changes)


def some_roles(*roles: Role, causal: bool = True) -> Roles:
    scores = {role.name: torch.zeros(3, 2) for role in roles}
    return Roles({role.name: role for role in roles}, scores, [0, 1, 2], causal=causal)


def by_claim(rows: Any) -> dict[str, Claim]:
    return {row.about: row for row in rows}


def test_roles_decide_what_holds_in_general(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = some_roles(
        a_role("verb > subject", 0, is_found=True),
        a_role("verb > far subject", 1, is_found=False),
        a_role("pronoun > antecedent", 1, is_found=True),
        a_role("noun > earlier related noun", 1, is_found=True, by_distance={6: (0.3, 20)}),
        a_role("relative pronoun > antecedent", 1, is_found=False),
    )
    monkeypatch.setattr(hw, "roles", lambda *arguments, **options: some_roles())
    rows = by_claim(of_roles(Subject(tiny(), Letters(), roles)))
    verdicts = {about: row.verdict for about, row in rows.items()}
    assert verdicts["a head joins subject and verb"] == "holds in part"
    assert verdicts["a head joins adjective and noun"] == "cannot be asked"
    assert verdicts["a head resolves pronouns (coreference)"] == "holds"
    assert verdicts["a head joins a relative clause to its noun"] == "not found"
    assert verdicts["a head joins related meanings (semantic)"] == "holds"
    assert verdicts["one head for grammar, another for meaning"] == "holds in part"  # 1.1 does both
    assert verdicts["a head reaches far (5 words and more)"] == "holds"
    assert verdicts["a single head learns only one kind of relation"] == "wrong"
    assert rows["a single head learns only one kind of relation"].head == "1.1"
    assert rows["a head joins subject and verb"].number == "verb > subject: 0.90 (0.80 to 0.95)"
    assert rows["a head joins subject and verb"].rule == "the nearest noun 0.40; -1 words 0.20"


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_every_claim_gets_a_row_with_a_verdict(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (claim_measures, claimed_structure):
        monkeypatch.setattr(part, "PROSE", claim_measures.PROSE[:79])
    monkeypatch.setattr(hw, "roles", lambda *arguments, **options: some_roles())
    monkeypatch.setattr(claimed_sentence, "DRAWS", 7)
    causal = kind == "decoder"
    roles = some_roles(a_role("verb > subject", 0, is_found=True), causal=causal)
    actual = claims.claims(tiny(kind), Letters(), "tiny", roles=roles)
    assert actual["heads"] == 6 and actual["causal"] is causal
    assert {row["verdict"] for row in actual["claims"]} <= VERDICTS
    about = [row["about"] for row in actual["claims"]]
    assert len(set(about)) == len(about) >= 20
    unasked = sum(row["verdict"] == "cannot be asked" for row in actual["claims"])
    assert unasked >= 2 if causal else unasked < 6
    assert json.loads(json.dumps(actual)) == actual
    table = claims.markdown([actual, actual])
    assert table.count("### tiny, 6 heads") == 2 and table.count("\n| in its own sentence, ") == 2 * len(
        CLAIMED
    )


def test_more_heads_are_judged_by_models_that_were_trained(tmp_path: Path) -> None:
    stored = tmp_path / "head_counts.json"
    assert more_heads(stored).verdict == "not asked here"
    for losses, verdict in (((3, 2, 1), "holds"), ((2, 1, 3), "holds in part"), ((1, 2, 3), "wrong")):
        models = [
            {"heads": heads, "validation_loss": loss + seed / 8}
            for heads, loss in zip((1, 2, 4), losses, strict=True)
            for seed in (0, 1)
        ]
        stored.write_text(json.dumps({"models": models}))
        row = more_heads(stored)
        assert row.verdict == verdict and "differ by 0.125 at most" in row.note


def test_random_weights_are_drawn_without_touching_the_process() -> None:
    model = gpt2()
    before = torch.get_rng_state()
    first, same, other = (drawn_anew(model, seed) for seed in (0, 0, 1))
    torch.testing.assert_close(torch.get_rng_state(), before)
    weight = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(first.state_dict()[weight], same.state_dict()[weight])
    assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])
    assert first.state_dict()[weight].dtype == torch.float64 and not first.training


# Effects, as a study


def test_effects_are_kept_role_by_role_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    real = hw.role_effects

    def counted(model: Any, tokenizer: Any, roles: Any, **options: Any) -> Any:
        ran.extend(roles.found)
        return real(model, tokenizer, roles, **options)

    monkeypatch.setattr(hw, "role_effects", counted)
    monkeypatch.setattr(effects, "load", lambda *name: (tiny(), Letters(), "tiny"))
    first = a_role("verb > auxiliary", 0, is_found=True)
    roles, out = tmp_path / "roles.json", ["--out", str(tmp_path)]
    roles.write_text(some_roles(first, a_role("noun > nothing", 1, is_found=True)).to_json())
    assert effects.main(["--model", "tiny", *out, "--roles", str(roles)]) == 0
    assert ran == ["verb > auxiliary", "noun > nothing"]
    assert "form after an auxiliary" in capsys.readouterr().out
    roles.write_text(some_roles(first, a_role("relative pronoun > antecedent", 1, is_found=True)).to_json())
    assert effects.main(["--model", "tiny", *out, "--roles", str(roles)]) == 0
    assert ran[2:] == ["relative pronoun > antecedent"]
    roles.write_text(some_roles(a_role("verb > auxiliary", 1, is_found=False)).to_json())
    also = ["--also", "verb > auxiliary"]
    assert effects.main(["--model", "tiny", *out, "--roles", str(roles), *also]) == 0
    assert "verb > auxiliary (not found), form after" in capsys.readouterr().out
    assert effects.main(["--table", *out]) == 0
    captured = capsys.readouterr().out
    assert (
        "### tiny" in captured and '| relative pronoun > antecedent | 1.1 | number after "who" |' in captured
    )
    with pytest.raises(SystemExit):
        effects.main([])
