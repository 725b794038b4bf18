r"""Formulas for a terminal: `\sqrt{d_k}` as √d_k."""

from __future__ import annotations

import re

__all__ = ["FORMULA", "plain_formulas"]

_SIGNS = {
    r"\top": "ᵀ", r"\times": "×", r"\cdot": "·", r"\sum": "Σ", r"\infty": "∞", r"\leq": "≤", r"\le": "≤",
    r"\geq": "≥", r"\ge": "≥", r"\ldots": "…", r"\dots": "…", r"\cdots": "…", r"\approx": "≈", r"\in": "∈",
    r"\alpha": "α", r"\sigma": "σ", r"\theta": "θ", r"\lambda": "λ", r"\mu": "μ", r"\pm": "±", r"\to": "→",
    r"\rightarrow": "→", r"\quad": " ", r"\,": " ", r"\;": " ", r"\!": "", r"\left": "", r"\right": "",
    r"\log": "log", r"\exp": "exp", r"\max": "max", r"\min": "min", r"\ne": "≠", r"\neq": "≠", r"\odot": "⊙",
    r"\mathbb{R}": "ℝ", r"\{": "{", r"\}": "}", r"\%": "%",
}  # fmt: skip
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$", re.DOTALL)


def plain_formulas(text: str) -> str:
    """Markdown with its formulas as one reads them aloud; code stays as it is."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    return "".join(
        part if place % 2 else FORMULA.sub(lambda found: _plain(found[1] or found[2]), part)
        for place, part in enumerate(parts)
    )


def _plain(formula: str) -> str:
    held = "{([^{}]*)}"
    before = ""
    while before != formula:  # from the inside out
        before = formula
        formula = re.sub(rf"\\(?:text|mathrm|mathbf|operatorname|bar|hat){held}", r"\1", formula)
        formula = re.sub(rf"\\sqrt{held}", lambda found: f"√{_closed(found[1])}", formula)
        formula = re.sub(
            rf"\\frac{held}{held}", lambda found: f"{_closed(found[1])} / {_closed(found[2])}", formula
        )
        formula = re.sub(rf"\^{held}", lambda found: f"^{_closed(found[1])}", formula)
        formula = re.sub(rf"_{held}", lambda found: f"_{found[1]}", formula)
    for sign in sorted(_SIGNS, key=len, reverse=True):
        formula = formula.replace(sign, _SIGNS[sign])
    formula = re.sub(r"\\([a-zA-Z]+)", r"\1 ", formula)  # what has no sign of its own, by its name
    return " ".join(formula.replace("^ᵀ", "ᵀ").replace("*", r"\*").split())


def _closed(term: str) -> str:
    """In brackets where it is more than one word."""
    term = term.strip()
    return term if re.fullmatch(r"[\w\\^√]+|\(.*\)", term) else f"({term})"
