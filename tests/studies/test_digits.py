"""The small vision transformer: patches in their places, training that learns, a page over a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headwise as hw
from studies import digits


def test_patches_come_row_by_row_behind_the_first_token() -> None:
    model = digits.Vision(8, 2, 1).eval()
    with torch.no_grad():
        model.patches.weight.fill_(1)
        model.patches.bias.zero_()
        model.positions.zero_()
        model.first.zero_()
    calls: list[torch.Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda module, arguments: calls.append(arguments[0]))
    picture = torch.zeros(1, 8, 8)
    picture[0, 2:4, 6:8] = 1  # the second row of patches, the last of it
    with torch.no_grad():
        model(picture)
    assert calls[0].shape == (1, 17, 8)
    assert calls[0][0, :, 0].nonzero().flatten().tolist() == [1 + 4 + 3]
    assert float(calls[0][0, 8, 0]) == 4


@pytest.mark.slow
def test_an_image_or_a_number_of_steps_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install scikit-learn")
    for arguments, message in (
        (["--image", "360"], "360 pictures, from 0: got 360"),
        (["--steps", "0"], "got 0"),
    ):
        with pytest.raises(SystemExit):
            digits.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_few_steps_tell_most_digits_and_the_page_shows_every_head_over_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install scikit-learn")
    learn, test = digits.data()
    assert (len(learn.labels), len(test.labels)) == (1437, 360)
    assert 0 <= float(learn.pictures.min()) and float(learn.pictures.max()) == 1
    before = torch.get_rng_state()
    model = digits.trained(learn, steps=60, progress=False)
    assert torch.equal(torch.get_rng_state(), before) and not model.training
    assert digits.accuracy(model, test) > 0.4
    with hw.watch(model) as heads:
        model(test.pictures[:1])
    assert [len(layer) for layer in heads.values()] == [4, 4, 4]
    written = digits.page(model, test.pictures[0], tmp_path / "digits.html")
    text = written.read_text("utf-8")
    assert "data:image/png;base64," in text and "a small vision transformer reads a" in text
