"""Colours mean the same in pictures and on pages: one ramp of weights, one diverging map of differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwise.show import colour_maps
from headwise.show.colour_maps import DIFFERENCES, WEIGHTS
from headwise.show.offline_pages import built

COLOURS = Path(__file__).resolve().parents[2] / "page/src/shared/colours.ts"


def stops(name: str) -> tuple[str, ...]:
    """Return the stops of a colour map of the page's source."""
    match = re.search(rf"const {name} = \[(.*?)\]", COLOURS.read_text("utf-8"), re.DOTALL)
    assert match is not None
    return tuple(re.findall(r'"(#[0-9a-f]{6})"', match[1]))


@pytest.mark.parametrize(("name", "expected"), [("WEIGHTS", WEIGHTS), ("DIFFERENCES", DIFFERENCES)])
def test_the_page_has_the_colours_of_the_pictures(name: str, expected: tuple[str, ...]) -> None:
    """In the picture of a difference orange was more, and on the page blue was."""
    assert stops(f"{name}_LIGHT") == expected
    assert ",".join(f'"{stop}"' for stop in expected) in built("heads")[2]


@pytest.mark.parametrize("ends", [DIFFERENCES, stops("DIFFERENCES_DARK")], ids=["light", "dark"])
def test_less_is_blue_and_more_is_orange(ends: tuple[str, ...]) -> None:
    for less, more in zip(ends[:3], ends[:-4:-1], strict=True):
        (red, _, blue), (warm, _, cold) = (bytes.fromhex(stop[1:]) for stop in (less, more))
        assert blue > red and warm > cold


def test_the_colour_map_of_pictures_goes_from_the_first_stop_to_the_last() -> None:
    matplotlib = pytest.importorskip("matplotlib.colors")
    colours = colour_maps.difference_colours()
    assert [matplotlib.to_hex(colours(at)) for at in (0.0, 1.0)] == [DIFFERENCES[0], DIFFERENCES[-1]]
