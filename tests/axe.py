"""axe-core on an open page: what keeps people from using it with a keyboard, a screen reader, or poor eyes.

assert axe.findings(page) == []
"""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import Page

SOURCE = Path(__file__).resolve().parents[1] / "page" / "node_modules" / "axe-core" / "axe.min.js"
GRAVE = ("serious", "critical")
RUN = """
(async (within) => {
  const { violations } = await axe.run(within, { resultTypes: ["violations"] });
  return violations.map(({ id, impact, nodes }) => [
    impact, id, nodes.map(({ target, any, all, none }) => [
      target.flat(2).join(" "), [...any, ...all, ...none].map(({ message }) => message)[0] ?? "",
    ]),
  ]);
})
"""


def findings(page: Page, within: str = "html") -> list[str]:
    """Serious and critical violations of axe-core's rules, one per element: "rule: selector (what is wrong)".

    `within`: a selector of the part that is asked about.

    Skips the test where axe-core is not installed, which is a failure in CI.
    """
    if not SOURCE.is_file():
        pytest.skip("no axe-core here: `make page` installs it")
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(SOURCE.read_text("utf-8") + "; 1")
    return [
        f"{rule}: {selector} ({message})"
        for impact, rule, elements in page.evaluate(f"({RUN.strip()})({within!r})")
        if impact in GRAVE
        for selector, message in elements
    ]
