"""Pages of one file: what they may do, that nothing put into them ends an element early, and packed weights:
any weight comes back within 1% or 1e-4, here and in a browser."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import Browser
from headwise.errors import ArgumentError
from headwise.show.offline_pages import LEVELS, Blobs, as_bytes, built, framed, levels, policy
from packed_weights import VALUES, unpacked, weights

PAGES = ("heads", "explain")
SOURCE = Path(__file__).parents[2] / "page" / "src" / "heads" / "packed.ts"


@pytest.mark.parametrize("name", PAGES)
def test_a_built_page_has_a_place_for_each_of_its_parts(name: str) -> None:
    page = built(name)
    assert all(f"{{{{{mark}}}}}" in page.template for mark in ("POLICY", "TITLE", "STYLE", "DATA", "SCRIPT"))
    assert "--surface" in page.style and "document" in page.script


@pytest.mark.parametrize("name", PAGES)
def test_nothing_built_ends_its_element_early(name: str) -> None:
    """A browser reads a style up to </style, and a script up to </script; <!-- in it hides the end."""
    page = built(name)
    assert re.search("</style", page.style, re.IGNORECASE) is None
    assert re.search("</script|<!--", page.script, re.IGNORECASE) is None


def test_a_page_may_do_what_it_says_and_nothing_else() -> None:
    still = policy(style="a", images=True)
    assert "img-src data:;" in still and "script" not in still and "blob" not in still
    alive = policy(style="a", script="b", images=True, wasm=True)
    assert alive.startswith("default-src 'none'; style-src 'sha256-") and "img-src data: blob:;" in alive
    assert "' 'wasm-unsafe-eval';" in alive and "'unsafe" not in alive
    assert "wasm" not in policy(style="a", script="b")
    with pytest.raises(ArgumentError, match="wasm must be given with a script: wasm=True, script=None"):
        policy(style="a", wasm=True)


def test_a_frame_in_a_notebook_may_run_scripts_only_where_it_has_some() -> None:
    assert 'sandbox=""' in framed("<p>", "a", height=7)
    assert 'sandbox="allow-scripts allow-downloads"' in framed("<p>", "a", height=7, scripts=True)


# Packed weights


def is_near(back: torch.Tensor, cells: torch.Tensor) -> bool:
    """Within 1% or 1e-4, but for a rounding of float32; hidden exactly where there is nothing."""
    apart = (back - cells).abs().double()
    near = (apart <= 1e-4 * (1 + 2**-20)) | (apart <= 0.01 * cells.double())
    return bool((near | ~(cells > 0)).all()) and torch.equal(back.isnan(), ~(cells > 0))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=37))
def test_any_weight_comes_back_within_one_percent_or_one_ten_thousandth(numbers: list[float]) -> None:
    cells = torch.tensor([numbers])
    assert is_near(weights(levels(cells), 1, len(numbers)), cells)


def test_weights_of_every_size_come_back_and_keep_their_order() -> None:
    cells = torch.cat([torch.logspace(-9, 0, 9973), torch.linspace(0, 1, 9973)]).sort().values[None]
    back = weights(levels(cells), *cells.shape)
    assert is_near(back, cells)
    assert bool((back[0].nan_to_num(0).diff() >= 0).all())
    assert len(VALUES) == LEVELS == 286 and float(VALUES[-1]) == 1.0
    assert torch.equal(weights(levels(VALUES[None]), 1, LEVELS)[0, 2:], VALUES[2:])


def test_nothing_and_no_number_are_hidden_and_a_weight_too_small_to_show_is_not() -> None:
    cells = torch.tensor([[0.0, math.nan, 1e-9, 1.0 + 1e-6]])
    assert torch.equal(weights(levels(cells), 1, 4).isnan(), torch.tensor([[True, True, False, False]]))
    assert weights(levels(cells), 1, 4)[0, 2:].tolist() == [0.0, 1.0]


def test_what_is_no_weight_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"at most 1 in a page: got 1\.5"):
        levels(torch.tensor([[0.2, 1.5]]))


def test_blobs_lie_one_behind_the_other() -> None:
    blobs = Blobs()
    arrays = [b"", b"a", as_bytes(torch.arange(101, dtype=torch.float32)), as_bytes(torch.empty(0))]
    places = [blobs.pack(each) for each in arrays]
    assert [unpacked(blobs.text, place) for place in places] == arrays
    assert [end for _, end in places[:-1]] == [start for start, _ in places[1:]]
    assert len(blobs.text) == places[-1][1]


def test_a_tensors_bytes_are_in_its_order_wherever_it_lies() -> None:
    numbers = torch.arange(6, dtype=torch.uint8).view(2, 3)
    assert as_bytes(numbers.T) == bytes([0, 3, 1, 4, 2, 5])


@pytest.mark.slow
def test_the_page_reads_levels_as_python_does(browser: Browser, tmp_path: Path) -> None:
    source = SOURCE.read_text("utf-8")
    tables = re.search(r"const STEP.*?\n}\);\n", source, re.DOTALL)
    reader = re.search(r"export function weights\(.*?\n}\n", source, re.DOTALL)
    assert tables is not None and reader is not None
    plain = re.sub(r"\): Cells|: (Uint8Array|number)", lambda m: ")" if m[0][0] == ")" else "", reader[0])
    script = (tables[0] + plain).replace("export ", "")
    torch.manual_seed(0)
    cells = (torch.randn(31, 37) * 4).softmax(-1).masked_fill(torch.rand(31, 37) < 0.3, 0)
    data = levels(cells)
    (tmp_path / "empty.html").touch()
    answer = browser.open(tmp_path / "empty.html").evaluate(
        f"(() => {{ {script} const told = (x) => [...x].map((v) => (Number.isNaN(v) ? null : v)); "
        f"const data = new Uint8Array({json.dumps(list(data))}); "
        "return [told(VALUES), told(weights(data, 31, 37).values)]; })()"
    )
    values, read = (
        torch.tensor([math.nan if x is None else x for x in each], dtype=torch.float64) for each in answer
    )
    # a power of 1.02 may be rounded differently there, in the last digit of float64
    torch.testing.assert_close(values, VALUES.double(), rtol=2**-23, atol=0, equal_nan=True)
    torch.testing.assert_close(
        read, weights(data, 31, 37).flatten().double(), rtol=2**-23, atol=0, equal_nan=True
    )
