"""The picture of the page in README, by the browser of the tests: python tests/page_picture.py docs/page.png

mini reads of the same thing twice; without its previous-token head 3.4 it hardly expects "letter".
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from browser import Browser
from headwise.cli import main

TEXT = "The captain read the letter. Then the captain read the"
VIEW = "#layer=5&head=2&token=11&off=3.4"
READ = "document.querySelector('#alive-words .alive-down') !== null"  # words beside what they were


def picture(place: Path) -> None:
    """1440 x 900 dots of a window of 1800 x 1125."""
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "heads.html"
        main(["look", TEXT, "--html", str(page)])
        shown = browser.open(page, fragment=VIEW)
        shown.resize(1800, 1125, 0.8)
        shown.wait(READ)
        time.sleep(1)
        shown.screenshot(place)


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
