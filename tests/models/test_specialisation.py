"""How heads specialise: what was measured at checkpoints, read from a file, asked, shown."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import ArgumentError
from headwise.models import Specialisation, Transformer, specialisation
from headwise.models import specialised_heads as files
from planted_circuit import INDUCTION, PREVIOUS, Letters, planted, small_config
from studies import checkpoints

C, L, H = 5, 2, 3


def a_life(**changes: Any) -> Specialisation:
    """Head 0.1 looks at the token before from step 40 on, head 1.2 copies from step 80 on."""
    previous, stripe = (torch.full((C, L, H), 0.1) for _ in range(2))
    previous[2:, 0, 1] = torch.tensor([0.6, 0.8, 0.9])
    stripe[3:, 1, 2] = torch.tensor([0.5, 0.7])
    stripe[4, 1, 0] = 0.45
    labels = [[[None] * H for _ in range(L)] for _ in range(C)]
    for number in range(2, C):
        labels[number][0][1] = "previous-token"
    role = torch.rand(C, L, H, generator=torch.Generator().manual_seed(1)) * 0.3
    role[-1, 1, 0] = 0.9
    options: dict[str, Any] = {
        "steps": torch.tensor([0, 20, 40, 80, 160]),
        "tokens": torch.tensor([0, 20, 40, 80, 160]) * 1024,
        "losses": torch.tensor([math.nan, 7.0, 5.0, 4.0, 3.0]),
        "validation": torch.tensor([8.0, 7.1, 5.1, 4.1, 3.1]),
        "statistics": {"previous": previous, "induction_stripe": stripe},
        "labels": tuple(tuple(tuple(layer) for layer in each) for each in labels),
        "roles": {"noun > determiner": role},
        "found": {"noun > determiner": (False,) * 4 + (True,)},
        "curve": torch.tensor([[1.0, 9.0], [30.0, 6.0], [160.0, 3.0]]),
    }
    return Specialisation(**(options | changes))


# Asking


def test_when_gives_the_first_checkpoint_and_the_best_head_there() -> None:
    life = a_life()
    assert life.when("previous", 0.5) == (40, 40960, 0, 1, pytest.approx(0.6))
    assert life.when("induction_stripe", 0.4) == (80, 81920, 1, 2, pytest.approx(0.5))
    assert life.when("noun > determiner", 0.8) == (160, 163840, 1, 0, pytest.approx(0.9))
    assert life.when("previous", 0.95) is None


def test_when_passes_over_what_was_not_measured() -> None:
    scores = torch.full((C, L, H), math.nan)
    scores[1, 0, 2] = 0.3
    life = a_life(statistics={"previous": scores})
    assert life.when("previous", 0.0) == (20, 20480, 0, 2, pytest.approx(0.3))
    with pytest.raises(ArgumentError, match="name must be a measured score: 'previous' is NaN"):
        life.best("previous")


def test_a_heads_life_is_a_row_per_checkpoint() -> None:
    life = a_life()
    rows = life.of(0, 1)
    assert [row["step"] for row in rows] == life.steps.tolist()
    assert [row["label"] for row in rows] == [None, None, *["previous-token"] * 3]
    assert rows[-1]["previous"] == pytest.approx(0.9) and "noun > determiner" in rows[0]
    assert life.best("previous") == (0, 1) and life.best("noun > determiner") == (1, 0)


def bad(**changes: Any) -> Any:
    return lambda life, folder: a_life(**changes)


def write(folder: Path, text: str) -> Path:
    (folder / files.FILE).write_text(text)
    return folder


MISUSES = {
    "an unknown name": (lambda life, folder: life.when("inductoin_stripe", 1), "mean 'induction_stripe'"),
    "no number": (lambda life, folder: life.when("previous", math.nan), "at_least must be a number: got nan"),
    "a bool": (lambda life, folder: life.when("previous", True), "at_least must be a number: got True"),
    "no such layer": (lambda life, folder: life.of(2, 0), "layer must be from 0 to 1: got 2"),
    "no such head": (lambda life, folder: life.of(1, -1), "head must be from 0 to 2: got -1"),
    "a shape": (bad(validation=torch.ones(4)), r"validation must have the shape \[5\]: got \[4\]"),
    "a role's shape": (
        bad(roles={"a > b": torch.ones(C, L, 7)}),
        r"a > b must have the shape .*: got \[5, 2, 7\]",
    ),
    "labels": (bad(labels=(((None,) * H,) * L,) * 4), r"labels must be one per .*: got \[4, 5\]"),
    "a layer less": (bad(labels=(((None,) * H,) * (L - 1),) * C), "labels must be one per checkpoint"),
    "a number for a folder": (lambda life, folder: specialisation(5), "folder must be a path: got 5"),  # type: ignore[arg-type]
    "nothing": (bad(statistics={}), "statistics must not be empty: got 0"),
    "no file": (lambda life, folder: specialisation(folder), "there is no .*specialisation.safetensors"),
    "no folder": (lambda life, folder: life.save(folder / "none"), "folder must exist: there is no .*none"),
    "not ours": (
        lambda life, folder: specialisation(write(folder, "x")),
        "must contain a safetensors file: ",
    ),
}


@pytest.mark.parametrize(("misuse", "message"), MISUSES.values(), ids=MISUSES)
def test_what_is_asked_wrongly_is_refused(misuse: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        misuse(a_life(), tmp_path)


# Files


def test_what_is_saved_comes_back_as_it_was(tmp_path: Path) -> None:
    life = a_life(fingerprint="17ab")
    assert life.save(tmp_path) == tmp_path / files.FILE
    again = specialisation(tmp_path)
    assert str(again) == str(life) == "Specialisation(mini: 5 checkpoints, 2 x 3 heads, 1 roles)"
    assert again.labels == life.labels and again.found == life.found and again.fingerprint == "17ab"
    for name in files.NUMBERS:
        torch.testing.assert_close(getattr(again, name), getattr(life, name), rtol=0, atol=0, equal_nan=True)
    for kind in ("statistics", "roles"):
        mine, theirs = getattr(life, kind), getattr(again, kind)
        assert list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / files.FILE, metadata={"headwise": '{"format": "heads-7"}'})
    with pytest.raises(ArgumentError, match="is 'heads-7', not 'headwise-specialisation-1'"):
        specialisation(tmp_path)
    for message, messages in (
        ("[]", "is 'list', not"),
        (json.dumps({"format": files.FORMAT}), "lacks 'steps'"),
    ):
        save_file({"x": torch.ones(2)}, tmp_path / files.FILE, metadata={"headwise": message})
        with pytest.raises(ArgumentError, match=messages):
            specialisation(tmp_path)


# Showing


def test_the_picture_colours_and_names_the_heads_that_pass(tmp_path: Path) -> None:
    figure = a_life().plot()
    figure.savefig(tmp_path / "life.png")  # without a warning
    losses, previous, induction, roles, labels = figure.axes
    named = {ax: [text.get_text() for text in ax.texts] for ax in figure.axes}
    assert named[previous] == ["0.1  0.90"] and named[induction] == ["1.2  0.70", "1.0  0.45"]
    assert named[roles] == ["1.0  noun > determiner"]
    assert any("induction forms: at step 80, head 1.2" in text for text in named[losses])
    colours = [line.get_color() for line in previous.lines[: L * H]]
    assert len(set(colours)) == 2 and colours.count(colours[-1]) == 1  # the best on top of the grey ones
    assert labels.get_xticklabels()[0].get_text() == "0"


def test_names_in_the_margin_do_not_cover_each_other() -> None:
    stripe = torch.full((C, L, H), 0.1)
    stripe[-1, 0] = torch.tensor([0.70, 0.71, 0.72])
    induction = a_life(statistics={"induction_stripe": stripe}).plot().axes[1]
    heights = [text.xy[1] for text in induction.texts]
    assert len(heights) == 3 and min(a - b for a, b in itertools.pairwise(heights)) > 0.07


def test_a_training_without_an_induction_head_is_drawn_without_one() -> None:
    low = {"induction_stripe": torch.full((C, L, H), 0.1)}
    figure = a_life(statistics=low, roles={}, found={}, curve=torch.empty(0, 2)).plot()
    losses, induction, labels = figure.axes
    assert [text.get_text() for text in induction.texts] == ["best: 0.0  0.10"]
    assert not any("induction forms" in text.get_text() for text in losses.texts)


def test_the_table_has_a_row_per_checkpoint() -> None:
    rows = str(a_life().table()).splitlines()
    last = next(row for row in rows if row.lstrip().startswith("160"))
    assert "0.90 (0.1)" in last and "0.70 (1.2)" in last and "1 previous-token, 5 mixed" in last
    assert last.split()[7:10] == ["0.70", "(1.2)", "1"]  # a role was found


# From checkpoints


OPTIONS = {"periods": (19,), "piece": 19, "sequences": 2}


def a_training(folder: Path, **changes: Any) -> Path:
    """Random weights before the first step, the planted circuit after the sixth."""
    from safetensors.torch import save_file

    torch.manual_seed(3)
    for step, model in ((0, Transformer(small_config())), (6, planted())):
        state = {name: value.half().contiguous() for name, value in model.state_dict().items()}
        save_file(state, folder / f"step_{step:06d}.safetensors")
    message = {"losses": [7, 6, 5, 4, 3, 2], "tokens_per_step": 13, "validation": {"0": 8.0, "6": 2.5}}
    (folder / "history.json").write_text(json.dumps(message | changes))
    return folder


def test_a_circuit_that_appears_in_training_is_seen_to_appear(tmp_path: Path) -> None:
    folder = a_training(tmp_path)
    life = checkpoints.measured(folder, small_config(), Letters(), roles=False, options=OPTIONS)
    assert life.steps.tolist() == [0, 6] and life.tokens.tolist() == [0, 78]
    assert math.isnan(life.losses[0]) and float(life.losses[1]) == 4.5
    assert life.when("induction_stripe", 0.4)[:4] == (6, 78, *INDUCTION)
    assert life.when("previous", 0.7)[:4] == life.when("previous_token", 0.7)[:4] == (6, 78, *PREVIOUS)
    names = [[life.of(*place)[at]["label"] for place in (INDUCTION, PREVIOUS)] for at in (0, 1)]
    assert "induction" not in names[0] and names[1] == ["induction", "previous-token"]
    assert {"entropy", "distance", "first", "local", "confidence", "itself"} <= set(life.statistics)
    assert life.curve[-1].tolist() == [6.0, 2.0] and life.save(tmp_path).stat().st_size < 20_000


def test_the_curve_is_every_loss_at_first_and_means_later() -> None:
    history = checkpoints.History([float(step) for step in range(1, 1001)], {}, 7)
    curve = history.curve(points=50)
    assert len(curve) <= 51 and curve[0].tolist() == [1.0, 1.0] and curve[-1, 0] == 1000
    lengths = curve[:, 0].diff(prepend=torch.zeros(1))
    assert float((curve[:, 1] * lengths).sum()) == pytest.approx(500_500, rel=1e-5)  # none is counted twice
    assert checkpoints.History([], {}, 7).curve().shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation": {"0": 8.0}}, "history must have a loss for every checkpoint: step 6 has none"),
        ({"losses": None}, "history must be of a training: .*history.json.*TypeError"),
    ],
)
def test_a_history_that_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        checkpoints.measured(a_training(tmp_path, **change), small_config(), Letters(), options=OPTIONS)


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"folder must contain checkpoints: no file such as step_000100\.safetensors"
    ):
        checkpoints.measured(tmp_path, small_config(), Letters())


def test_a_file_that_would_be_too_large_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Transformer(small_config(num_layers=1))
    monkeypatch.setattr(hw.models, "load", lambda folder: (model, Letters(), "small"))
    monkeypatch.setattr(checkpoints, "measured", lambda *_, **__: a_life())
    checkpoints.main([str(tmp_path), "--out", str(tmp_path)])
    assert (tmp_path / files.FILE).is_file() and "bytes" in capsys.readouterr().out
    monkeypatch.setattr(checkpoints, "MOST_BYTES", 100)
    with pytest.raises(ArgumentError, match=r"must fit into 100 bytes: .* for 5; keep fewer"):
        checkpoints.main([str(tmp_path), "--out", str(tmp_path)])
    assert not (tmp_path / files.FILE).exists()
