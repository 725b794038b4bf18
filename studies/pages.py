"""docs/measured.md, from the results of the studies.

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

from . import backup_heads, claims, effects, head_counts_report
from .card import roles_table
from .trained_models import load

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "studies" / "results", ROOT / "docs" / "measured.md"
TITLES = {"minilm": "MiniLM-L6", "smollm2": "SmolLM2-135M", "mini": "mini"}

OPENING = """# What heads do, measured

Courses say that one head relates subject and verb, one handles adjectives, one distant words and one positions; that many heads find more relations than
one head; and that others compensate if one fails. This page tests such claims in three trained models: MiniLM-L6, SmolLM2-135M and mini. All numbers come
from files in `studies/results/`. Each number is compared with a rule that needs no model, or with the same model with random weights.
"""
ROLES = """## Roles

`hw.roles(model, tokenizer)` measures for every head in which share of cases the word with the largest weight is the related word. The sentences come from a
small grammar, so every relation is known (Clark 2019 used a treebank). The head is chosen on one half of the words and sentence shapes, and the share in the
table is measured on the other half. A role is found if this share is larger by 0.15 or more than that of every trivial rule. The rules are of two kinds. A
fixed offset uses positions alone. The others use classes of words, such as the nearest verb after or the first noun: they need no model, but the grammar tells
them which words are verbs and nouns, which a head must find by itself. Most verdicts "not found" rest on a rule of the second kind; "beats the offset" marks
heads whose share is larger by 0.15 or more than that of the best fixed offset. With random weights no role is found. The whole grammar was written while we
looked at these three models, so the shares are probably larger than they would be with an independent grammar.
"""
EFFECTS = """## Effects of roles

For each role, a behaviour of the model was defined before the measurement. The heads with that role are switched off by setting their output to its mean. For
comparison, the same number of other heads of the same layers is switched off (a draw). The columns: "margin" is the log-probability of the right continuation
minus that of the wrong one, with all heads on, and "off" the same with the heads switched off; "change" is the difference of the two; "draws" is the range of
changes in all draws; "as large" counts the draws in which the margin falls at least as much. "Not able" means that the model does not show the behaviour even
with all heads on. "No effect" is the most common verdict: that a head attends to a word does not show that the model uses it.
"""
CLAIMS = """## The claims, one by one

The claims are from five course pages on multi-head attention. Some are tested on the sentence of these pages, "The cat that I saw yesterday ran away" ("in its
own sentence"), the others on many sentences or texts. An arrow is a pair of words that the claim connects. "Shuffled" is the mean number of right arrows with shuffled
weights, and P the probability that the best of all heads is as good by chance.
"""
BACKUP = """## Do heads of later layers compensate?

Heads of later layers read what a head wrote, so they can change when it is switched off. Wang 2022 found such backup heads in GPT-2 small. The text is random tokens,
repeated once, and only the second copy is measured. The direct effect of a head is what it adds to the logit of the right token without passing through a later
layer. The heads with the largest direct effects (not in the last layer) were switched off by setting their output to its mean. The columns: what the direct effect
loses; what the direct effects of all heads of later layers gain or lose together; the range of the same if as many other heads of the layer are switched off
instead; what the feed-forward networks gain or lose; the sum, which is the change of the logit; the rise of the loss on the second copy. Means ± standard
deviations over {seeds} draws of random tokens. Compensation is "in part" if the later heads gain in every draw, and more than with any other heads off; the number is
the part of the direct effect that they replace. `python -m studies.backup_heads`.
"""
HEADS = """## Why many heads?

![The same Transformer with 1 to 32 heads per layer: validation loss, its rise with heads switched off, how much heads differ](head_counts.png)
"""


def page(results: Path = RESULTS) -> str:
    """Return the page, from stored results alone."""
    parts = [OPENING, ROLES]
    for name, title in TITLES.items():
        roles = Roles.from_json((results / f"roles_{name}.json").read_text("utf-8"))
        beaten = sum(role.beats_offset for role in roles.values())
        summary = (
            f"{len(roles.found)} of {len(roles)} relations found in {roles.sentences} sentences. The best fixed "
            f"offset alone is beaten by 0.15 or more in {beaten}."
        )
        parts.append(f"### {title}\n\n{summary}\n\n{roles_table(roles)}\n")
    parts.append(EFFECTS)
    for name in ("smollm2", "mini"):
        stored = RoleEffects.from_json((results / f"effects_{name}.json").read_text("utf-8"))
        parts.append(f"### Effects in {TITLES[name]}\n\n{effects.markdown(stored)}\n")
    parts.append(CLAIMS)
    for name, title in TITLES.items():
        measured = json.loads((results / f"claims_{name}.json").read_text("utf-8"))
        table = claims.markdown(measured).partition("\n")[2].strip()  # without its heading
        parts.append(f"### Claims about {title}\n\n{table}\n")
    stored_backups = {
        title: json.loads((results / f"backup_heads_{name}.json").read_text("utf-8"))
        for name, title in backup_heads.TITLES.items()
    }
    parts.append(BACKUP.format(seeds=backup_heads.SEEDS))
    for title, backups in stored_backups.items():
        parts.append(f"### Backup heads in {title}\n\n{backup_heads.markdown(backups)}\n")
    counted = json.loads((results / "head_counts.json").read_text("utf-8"))
    parts += [HEADS, head_counts_report.markdown(counted)]
    return "\n".join(parts).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.pages", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--roles", nargs="+", choices=list(TITLES), default=[], help="models to measure")
    for name in parser.parse_args(arguments).roles:
        model, tokenizer, _ = load(name)
        roles = hw.roles(model, tokenizer, keep=False)
        with whole_file(RESULTS / f"roles_{name}.json") as half:
            half.write_text(roles.to_json(), "utf-8")
        print(roles)
    made = page()
    with whole_file(PAGE) as half:
        half.write_text(made, "utf-8")


if __name__ == "__main__":
    main()
