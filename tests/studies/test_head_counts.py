"""The study of head counts: tiny models through all of it, the arithmetic of its tables, what goes wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from studies.head_counts import crew, one_model, taken_over
from studies.head_counts_measures import TRIAL, next_token_loss, without

from headwise.models import Transformer
from studies import corpus, head_counts, head_counts_models
from studies import head_counts_report as shown
from studies import head_counts_table as tables


def tokens() -> corpus.Corpus:
    ids = torch.randint(0, 61, (1009,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    return corpus.Corpus(ids[:700], ids[700:])


@pytest.fixture(scope="module")
def trained() -> dict[int, dict[str, Any]]:
    torch.set_num_threads(1)
    return {heads: one_model(TRIAL, heads, 0, tokens(), "cpu") for heads in TRIAL.heads}


# Models


def test_head_counts_share_parameters_first_weights_and_tokens(trained) -> None:
    left, two = trained[1], trained[2]
    assert left["parameters"] == two["parameters"]
    assert left["initial_weights"] == two["initial_weights"]
    assert (left["head_dim"], two["head_dim"]) == (16, 8)
    assert (left["rope_pairs"], two["rope_pairs"]) == (8, 4)
    read = tokens().train.to(torch.int32)
    first, again, other = (next(head_counts_models.windows(read, 5, 23, seed)(0)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_everything_is_measured_of_every_model(trained) -> None:
    for heads, message in trained.items():
        assert message["problems"] == {}
        assert message["steps"] == len(message["training_losses"]) == TRIAL.steps
        assert abs(message["validation_loss"] - math.log(61)) < 0.5
        assert sum(message["labels"].values()) == len(message["without"]["one"]) == 2 * heads
        assert 0 < message["previous"]["score"] < 1 and 0 < message["induction"]["score"] < 1
        assert math.isfinite(message["said_twice"]["second"])
        json.dumps(message, allow_nan=False)
    assert trained[1]["after"]["attention"] is None  # nobody to differ from
    assert trained[2]["after"]["attention"] > 0 and trained[2]["before"]["attention"] > 0


def test_a_head_that_says_nothing_costs_nothing() -> None:
    model = Transformer(TRIAL.config(2))
    with torch.no_grad():
        model.decoder.layers[0].attention.out_proj.weight[:, 8:] = 0
        text = torch.randint(0, 61, (3, 24))
        whole = float(next_token_loss(model, text))
        silent, output = without(model, text, [[(0, 1)], [(0, 0)]])
        assert silent == round(whole, 5)
        assert output != silent
        model.embedding.tokens.weight[:] = math.nan
        with pytest.raises(ArithmeticError, match=r"the loss without \[\(1, 0\)\] is nan"):
            without(model, text, [[(1, 0)]])


def test_a_measurement_that_fails_is_reported_and_costs_no_other(monkeypatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no loss of 17 windows\nat some place in a file")

    monkeypatch.setattr(head_counts_models, "validation_loss", broken)
    plan = replace(TRIAL, steps=1, warmup=0)
    message = one_model(plan, 2, 0, tokens(), "cpu")
    assert message["problems"] == {"validation_loss": "RuntimeError: no loss of 17 windows"}
    assert "validation_loss" not in message and message["without"]["one"]
    results = made([message])
    assert "2 heads, seed 0, validation_loss: RuntimeError: no loss of 17 windows" in shown.markdown(results)


# Processes


def crewed(codes: dict[tuple[int, int], str], seconds: float = 20.0, at_once: int = 3) -> dict:
    ended: dict[tuple[int, int], str | None] = {}
    crew(
        list(codes),
        lambda job: subprocess.Popen([sys.executable, "-ISc", codes[job]]),
        at_once=at_once,
        deadline=time.monotonic() + seconds,
        ended=lambda job, trouble: ended.update({job: trouble}),
        pause=0.01,
    )
    return ended


def test_a_process_that_fails_is_reported_and_the_others_go_on() -> None:
    ended = crewed({(1, 0): "", (2, 0): "raise SystemExit(7)", (4, 0): ""})
    assert ended == {(1, 0): None, (2, 0): "its process ended with code 7", (4, 0): None}


def test_what_is_not_done_in_time_is_ended_and_reported() -> None:
    began = time.monotonic()
    ended = crewed({(1, 0): "import time; time.sleep(60)", (2, 0): ""}, seconds=0.2, at_once=1)
    assert ended == {(1, 0): "out of time while it ran", (2, 0): "out of time before it began"}
    assert time.monotonic() - began < 20


def test_a_model_that_fails_is_told_of_in_its_own_file(tmp_path) -> None:
    torch.save([tokens().train, tokens().validation], tmp_path / "tokens.pt")
    (tmp_path / "plan.json").write_text(json.dumps({"heads": [3], "trial": True}))
    assert head_counts.main(["--one", "3", "0", "--inside", str(tmp_path)]) == 1  # 16 / 3
    message = json.loads((tmp_path / "heads3_seed0.json").read_text())
    assert message["failed"].startswith("ShapeError: ") and "3" in message["failed"]


def test_an_earlier_run_is_taken_over_only_with_the_same_settings() -> None:
    earlier = made([model(2, 0), model(4, 0)])
    plan = replace(TRIAL, heads=(2, 8))
    assert list(taken_over(plan, earlier)) == [(2, 0)]
    with pytest.raises(ValueError, match="resume must have the same settings: steps=3, here 5; give"):
        taken_over(replace(plan, steps=5), earlier)


@pytest.mark.slow
def test_the_command_trains_reports_a_failure_and_takes_over_the_rest(tmp_path, capfd) -> None:
    trial = ["--trial", "--seeds", "0", "--out", str(tmp_path)]
    assert head_counts.main([*trial, "--heads", "2,3"]) == 1
    results = json.loads((tmp_path / "head_counts.json").read_text())
    assert [each["heads"] for each in results["models"]] == [2]
    assert [(each["heads"], each["why"][:10]) for each in results["missing"]] == [(3, "ShapeError")]
    earlier = tmp_path / "earlier.json"
    (tmp_path / "head_counts.json").rename(earlier)
    picture = tmp_path / "picture.png"
    again = [*trial, "--heads", "2", "--resume", str(earlier), "--picture", str(picture)]
    assert head_counts.main(again) == 0
    assert json.loads((tmp_path / "head_counts.json").read_text())["models"] == results["models"]
    assert picture.stat().st_size > 10_000
    assert "3 heads, seed 0: ShapeError" in capfd.readouterr().out


# Tables


def model(heads: int, seed: int, loss: float = 3.0, costs: float = 0.25, **others: Any) -> dict[str, Any]:
    return {
        "heads": heads, "seed": seed, "head_dim": 64 // heads, "rope_pairs": 32 // heads,
        "parameters": 1000003, "initial_weights": f"seed {seed}", "problems": {}, "validation_loss": loss,
        "before": {"attention": 0.125, "outputs": 0.0},
        "after": {"attention": 0.25 + seed / 64, "outputs": 0.5},
        "without": {"baseline": 2.0, "one": [2.0, 2.0 + 2 * costs], "1/4": [2.0 + costs], "1/2": [4.0]},
        "labels": {"mixed": 3, "local": 1}, "previous": {"score": 0.75},
        "induction": {"score": 0.125 * heads}, "said_twice": {"first": 9.0, "second": 5.0},
    } | others  # fmt: skip


def made(models: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"machine": {"cpu": "a processor"}, "versions": {"torch": "2.11.0"}}
    return head_counts.assembled(TRIAL, about, {(each["heads"], each["seed"]): each for each in models}, {})


def three_seeds() -> dict[str, Any]:
    """4 heads worse than 8 by 0.5, 0.625 and 0.75; 16 once better and twice worse, by 0.125."""
    losses = {4: (3.5, 3.75, 4.0), 8: (3.0, 3.125, 3.25), 16: (2.875, 3.25, 3.375)}
    return made([model(h, seed, loss) for h, some in losses.items() for seed, loss in enumerate(some)])


def test_differences_are_paired_by_seed_with_students_interval() -> None:
    mean, half = tables.difference({0: 3.5, 1: 3.75, 2: 4.0, 5: 9.0}, {0: 3.0, 1: 3.125, 2: 3.25, 7: 1.0})
    assert mean == 0.625
    assert math.isclose(half, 4.303 * 0.125 / math.sqrt(3))
    assert tables.difference({0: 1.0}, {0: 3.0}) == (-2.0, math.inf)
    assert tables.difference({0: 1.0}, {1: 3.0}) is None
    assert abs(tables.student(11) - 2.201) < 1e-3 and abs(tables.student(30) - 2.042) < 1e-3


def test_the_table_gives_mean_spread_and_difference() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables.table(three_seeds()).split("\n")
    ]
    header, four, eight = rows[0], rows[2], rows[3]
    assert header[:3] == ["heads", "validation loss", "difference from 8 heads"]
    assert four[:3] == ["4", "3.7500 ± 0.2500", "+0.6250 (+0.3145 to +0.9355)"]
    assert eight[:3] == ["8", "3.1250 ± 0.1250", "–"]
    message = dict(zip(header, eight, strict=True))
    assert message["diversity, untrained"] == "0.125 ± 0.000" and message["trained"] == "0.266 ± 0.016"
    assert (
        message["without one head"] == "0.2500 ± 0.0000" and message["without the worst"] == "0.500 ± 0.000"
    )
    assert message["without 1/8"] == "–" and message["without 1/4"] == "0.250 ± 0.000"
    assert message["best induction"] == "1.00 ± 0.00" and message["best previous-token"] == "0.75 ± 0.00"


def test_sentences_follow_the_numbers_either_way() -> None:
    message = "\n".join(shown.sentences(three_seeds()))
    assert "Validation loss: from 3.1250 ± 0.1250 (8 heads) to 3.7500 ± 0.2500 (4 heads)" in message
    assert "Compared with 8 heads it is clearly higher with 4, not clearly different with 16." in message
    assert "the weights of the heads of a layer differ clearly more with 4, 8 and 16." in message
    assert "induction score is 0.4 or more on repeated random tokens: 3 of 3 with 4 heads" in message
    assert "1,000,003 parameters" in message and "one in twenty" in message
    better = made(
        [model(h, s, 2.0 + s / 8 - h / 64 - s * h / 1024, after={}) for h in (8, 16) for s in range(3)]
    )
    message = "\n".join(shown.sentences(better))
    assert "Compared with 8 heads it is clearly lower with 16." in message
    assert "the weights of the heads" not in message
