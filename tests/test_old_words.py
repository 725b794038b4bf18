"""Keywords by their old names: they work for one version, and say what to write instead."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.cli import main
from headwise.errors import ArgumentError, renamed
from headwise.moved_modules import MOVED
from headwise.testing import assert_attention

X, TOKENS = torch.randn(2, 5, 8), torch.tensor([3, 1, 3, 1, 3])


def module() -> hw.MultiHeadAttention:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(8, 2, causal=True)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)[0].square().mean()


def weights() -> hw.AttentionMap:
    return module()(X)[1]


def robustness(**options: Any) -> list[int]:
    return hw.robustness(module(), [X], squares, single=False, repeats=1, **options).removed


def ablated(**options: Any) -> Tensor:
    mha = module()
    with hw.ablate(mha, [(0, 1)], **options):
        output: Tensor = mha(X)[0]
    return output


# old keyword, new keyword, a value that is not the default, and a call that takes either
OLD: dict[str, tuple[str, str, object, Callable[..., object]]] = {
    "ablate": ("how", "method", "mean", ablated),
    "previous_token": ("measure", "method", "mul", lambda **o: hw.heads.previous_token(weights(), **o)),
    "duplicate_token": (
        "measure", "method", "abs", lambda **o: hw.heads.duplicate_token(weights(), TOKENS, **o)
    ),
    "induction": ("measure", "method", "mul", lambda **o: hw.heads.induction(weights(), TOKENS, **o)),
    "robustness": ("order", "method", "random", robustness),
    "points of robustness": ("steps", "points", [2], lambda **o: robustness(method="random", **o)),
    "explain": ("sample", "batch", 1, lambda **o: hw.explain(module(), X, **o).text()),
    "Explanation.text": ("sample", "batch", 1, lambda **o: hw.explain(module(), X).text(**o)),
    "check": ("embed_dim", "d_model", 12, lambda **o: hw.check(nn.MultiheadAttention, **o).ok),
    "assert_attention": (
        "embed_dim", "d_model", 12, lambda **o: assert_attention(nn.MultiheadAttention, **o)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "value", "call"), OLD.values(), ids=OLD)
def test_an_old_keyword_means_the_new_one_and_warns_once_at_the_users_line(
    old: str, new: str, value: object, call: Callable[..., object]
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DeprecationWarning)
        before = call(**{old: value})
    (warning,) = [each for each in said if issubclass(each.category, DeprecationWarning)]
    assert f"{old}= is called {new}= now: write " in str(warning.message)
    assert f"{new}={value!r}" in str(warning.message)
    assert Path(warning.filename) == Path(__file__)
    after = call(**{new: value})
    assert before == after if not isinstance(before, Tensor) else torch.equal(before, after)  # type: ignore[arg-type]


@pytest.mark.parametrize(("old", "new", "value", "call"), OLD.values(), ids=OLD)
def test_an_old_keyword_beside_its_new_one_is_refused_with_both(
    old: str, new: str, value: object, call: Callable[..., object]
) -> None:
    with pytest.raises(ArgumentError, match=rf"{new} must be given once: got {new}=.* and {old}="):
        call(**{old: value, new: value})


def test_an_old_keyword_beside_its_new_one_by_position_is_refused_with_both() -> None:
    with pytest.raises(ArgumentError, match="got method='mul' and measure='abs'; measure is its old name"):
        hw.heads.previous_token(weights(), "mul", measure="abs")  # type: ignore[call-arg]


def test_old_keywords_of_what_needs_a_file_or_a_language_model_are_known_as_well(tmp_path: Path) -> None:
    for function, options in (
        (hw.check_file, {"embed_dim": 12, "d_model": 12}),
        (hw.retrieval_scores, {"steps": 3, "new_tokens": 3}),
    ):
        with pytest.raises(ArgumentError, match="must be given once"):
            function(tmp_path, **options)  # type: ignore[operator]


def test_help_and_type_checkers_know_the_new_words_alone() -> None:
    for function in (hw.ablate, hw.robustness, hw.explain, hw.check, hw.check_file, hw.retrieval_scores):
        names = set(inspect.signature(function).parameters)
        assert names.isdisjoint({"how", "order", "steps", "sample", "embed_dim"}), function
        assert function.__doc__ and function.__module__.startswith("headwise.")
    assert hw.ablate.__globals__["__name__"] == hw.ablate.__module__  # by which doctest finds its examples


def test_a_word_that_a_function_does_not_have_cannot_be_the_new_one() -> None:
    with pytest.raises(ValueError, match="'neu' is not in list"):
        renamed(alt="neu")(lambda new: new)


def test_the_command_line_takes_width_with_a_word_and_hides_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mha.py"
    file.write_text("class A: pass\n")
    asked: list[dict[str, object]] = []

    def check_file(*_: object, **options: object) -> None:
        asked.append(options)
        raise ArgumentError("nothing must be checked here: 1 file; go on")

    monkeypatch.setattr("headwise.examiner.check_file", check_file)
    assert main(["check", str(file), "--width", "12"]) == 2
    assert "headwise: --width is called --d-model now: write --d-model 12" in capsys.readouterr().err
    assert asked[0]["d_model"] == 12
    assert main(["check", str(file), "--width", "12", "--d-model", "13"]) == 2
    assert "got --d-model 13 and --width 12" in capsys.readouterr().err
    assert main(["check", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--d-model" in told and "--width" not in told


@pytest.mark.parametrize("path", MOVED)
def test_a_module_is_found_under_its_old_path(path: str) -> None:
    """`torch.save(model)` names classes by their modules: those of 0.1 must still be found, and say so."""
    module, new = import_module(path), import_module(MOVED[path])
    name = next(name for name in vars(new) if not name.startswith("_"))
    with pytest.warns(DeprecationWarning, match=f"{path} is now {MOVED[path]}"):
        assert getattr(module, name) is getattr(new, name)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = module.nothing_of_this_name
    assert callable(hw.check) and callable(hw.watch), "no package takes a function's place"


def test_an_explanations_sample_is_its_batch() -> None:
    explained = hw.explain(module(), X)
    with pytest.warns(DeprecationWarning, match="Explanation.sample is now Explanation.batch"):
        assert explained.sample == explained.batch == 0
