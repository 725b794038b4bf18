"""docs/measured.md: what heads do, from the results of the studies.

python -m studies.pages                          # from what is stored
python -m studies.pages --roles minilm mini      # measure these models' roles anew first; smollm2, too
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import headwise as hw
from headwise.heads.behaviours import RoleEffects
from headwise.heads.roles import Roles
from headwise.whole_files import whole_file

from . import claims, effects, head_counts_report
from .card import roles_table
from .trained_models import load

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "studies" / "results", ROOT / "docs" / "measured.md"
TITLES = {"minilm": "MiniLM-L6", "smollm2": "SmolLM2-135M", "mini": "mini"}

OPENING = """# What heads do, measured

Course pages say: one head for subject and verb, one for adjectives, one for far words, one for positions; many heads see more than one; where one fails,
others step in. Here is what becomes of that in trained models. Every number comes out of a file in `studies/results/`, and each stands beside the number
that no understanding is needed for.
"""
ROLES = """## Roles

`hw.roles(model, tokenizer)` asks, for every head: does its heaviest word belong to the word it looks from? Sentences come from a small grammar, so every
relation is known (Clark 2019 used a treebank). The head is chosen on one half of the words and sentence shapes and judged on the other. Found is what beats
every trivial rule, a fixed offset, the nearest word of that class, the first noun, by 0.15 and more. With random weights nothing is found. The grammar was
written while looking at these models, judged half included, so that shares are somewhat favourable.
"""
EFFECTS = """## What roles are for

For each role a behaviour was stated beforehand. The role's heads are put to their mean, and beside them, in turn, as many others of the same layers: does the
model prefer the right continuation less? No effect is a result, and the usual one: what a head looks at is not yet what the model needs it for.
"""
CLAIMS = """## The claims, one by one

Of five course pages on multi-head attention; in their own sentence, "The cat that I saw yesterday ran away", and in general.
"""
HEADS = """## Why many heads?

![The same Transformer with 1 to 32 heads a layer: validation loss, what heads cost when switched off, how much they differ](head_counts.png)
"""


def page(results: Path = RESULTS) -> str:
    """The page, from stored results alone."""
    parts = [OPENING, ROLES]
    for name, title in TITLES.items():
        roles = Roles.from_json((results / f"roles_{name}.json").read_text("utf-8"))
        told = f"{len(roles.found)} of {len(roles)} relations found in {roles.sentences} sentences."
        parts.append(f"### {title}\n\n{told}\n\n{roles_table(roles)}\n")
    parts.append(EFFECTS)
    for name in ("smollm2", "mini"):
        told = RoleEffects.from_json((results / f"effects_{name}.json").read_text("utf-8"))
        parts.append(f"### Effects in {TITLES[name]}\n\n{effects.markdown(told)}\n")
    parts.append(CLAIMS)
    for name, title in TITLES.items():
        stored = json.loads((results / f"claims_{name}.json").read_text("utf-8"))
        table = claims.markdown(stored).partition("\n")[2].strip()  # without its heading
        parts.append(f"### Claims about {title}\n\n{table}\n")
    counted = json.loads((results / "head_counts.json").read_text("utf-8"))
    parts += [HEADS, head_counts_report.markdown(counted)]
    return "\n".join(parts).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.pages", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--roles", nargs="+", choices=list(TITLES), default=[], help="models to measure anew")
    for name in parser.parse_args(arguments).roles:
        model, tokenizer, _ = load(name)
        found = hw.roles(model, tokenizer, keep=False)
        with whole_file(RESULTS / f"roles_{name}.json") as half:
            half.write_text(found.to_json(), "utf-8")
        print(found)
    made = page()
    with whole_file(PAGE) as half:
        half.write_text(made, "utf-8")


if __name__ == "__main__":
    main()
