"""The model card of mini, from results: src/headwise/models/mini/card.md, docs/mini.md and docs/mini.png.

    python -m studies.card --training FOLDER     after a training: it is summed up in results/mini.json first
    python -m studies.card                       again, from what is stored

FOLDER is what `studies.mini` left; the text it was trained on lies where `studies.corpus` put it. Nothing in
the card is written by hand but words: each number comes from the model, its file of the training
(`studies.checkpoints`), results/mini.json or results/probes.json (`studies.probes`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.roles import Roles
from headwise.models import Specialisation, Transformer
from headwise.whole_files import whole_file

from . import probes
from .probes import fingerprint
from .sources import SOURCES, Source

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
TRAINING, PROBES = RESULTS / "mini.json", RESULTS / "probes.json"
FOLDER = ROOT / "src" / "headwise" / "models" / "mini"
PAGE, PICTURE = ROOT / "docs" / "mini.md", ROOT / "docs" / "mini.png"
RAW = "https://raw.githubusercontent.com/headwise/headwise/main/docs/mini.png"
COLUMNS = {  # statistic -> what stands above its column
    "previous": "previous token",
    "induction_stripe": "induction stripe",
    "duplicate_token": "duplicate token",
    "first": "first token",
    "itself": "itself",
    "local": "within 8",
    "entropy": "entropy, nats",
}
SETTINGS = {  # of history.json -> in words
    "steps": "steps",
    "batch": "sequences per step",
    "length": "tokens per sequence",
    "lr": "highest learning rate",
    "warmup": "steps of warm-up",
    "seed": "seed",
}

# The words of the card; Markdown joins lines.
MODEL = """\
# mini

A small causal language model inside headwise, so that there are real, trained, specialised heads to look at
without a download. It is made to be looked at, not to be used for what it says.

```python
import headwise as hw

model, tokenizer, title = hw.models.load()
life = hw.models.specialisation()  # its heads while it was trained
```
"""
DATA = """\
## What it read

{letters:.0f} million letters of English prose and Python, {tokens:,} tokens to train on, from archives that
anyone can install by name, pinned by version and hash (`studies/sources.py`). Headings' rules are shortened,
letters beyond ASCII are left out. One document in a hundred, chosen by its name, is for validation. There are
no synthetic repeats in it: whatever copies here learned to from text as people wrote it.
"""
TRAINED = """\
## How it was trained

AdamW (0.9, 0.95) with weight decay 0.1 of matrices, a cosine schedule, gradients clipped at 1: {read:.0f}
million tokens, {epochs:.1f} times through the text, in {minutes:.0f} minutes. **Validation loss {loss:.3f}
nats per token.** `make train-mini` does it again.
"""
HEADS = """\
## Its heads

Named layer.head, both from 0. Labels by `headwise.heads.LABELS`; a dash where no score passes its threshold.
Induction and duplicate tokens on random tokens said twice, the rest on prose and code that it never read. In
training came {when}.
"""
ROLES = """\
## Roles

Which head looks from a word to the word it belongs to (`headwise.roles`): {found} of {asked} relations found.
A head is chosen on half of the sentences and judged on the other, which has other words in other shapes; it
must beat every trivial rule by 0.15.
"""
LIMITS = """\
## Limits

{count:.1f} million parameters know next to nothing: what it writes looks like English or Python and is not
true. It was not made safe in any way, and its text is as old and as one-sided as its sources. It reads
English prose and Python; other languages are bytes to it. Findings about its heads are findings about this
model: larger ones have more of everything, and other things.
"""

Facts = dict[str, Any]


# What was stored


def training_of(folder: Path, documents: Sequence[tuple[str, str, str]]) -> Facts:
    """Return the settings, loss and sizes of a training, as JSON takes them.

    Args:
        folder: with history.json.
        documents: (source, name, text), as `studies.corpus.texts` gives them.

    Raises:
        ArgumentError: no history; one that has not come to its end.
    """
    history = _stored(folder / "history.json", "python -m studies.mini")
    last = str(history["steps"])
    if last not in history["validation"]:
        raise ArgumentError(f"training must have come to its end: step {last} was not judged; let it go on")
    count = Counter(source for source, _, _ in documents)
    letters: Counter[str] = Counter()
    for source, _, text in documents:
        letters[source] += len(text)
    facts = {name: history[name] for name in (*SETTINGS, "tokens_per_step", "tokens_in_corpus", "seconds")}
    sizes = {source: {"documents": count[source], "letters": letters[source]} for source in count}
    return facts | {"validation": history["validation"][last], "sources": sizes}


def _stored(file: Path, made_by: str) -> Facts:
    if not file.is_file():
        raise ArgumentError(f"results must be there: no {file.name}; make it with {made_by}")
    facts: Facts = json.loads(file.read_text("utf-8"))
    return facts


# The card


def card(
    model: Transformer,
    life: Specialisation,
    roles: Roles,
    training: Facts,
    probed: Facts,
    *,
    weights: int,
    sources: Sequence[Source] = SOURCES,
) -> str:
    """Return the whole card as Markdown.

    weights: bytes of the file that is shipped.

    Raises:
        ArgumentError: results of other weights; a source that was not read.
    """
    mine = fingerprint(model)
    for name, theirs in (("checkpoints", life.fingerprint), ("probes", probed["fingerprint"])):
        if theirs != mine:
            raise ArgumentError(
                f"{name} must be of this model: measured with weights {theirs}, these are {mine}; run "
                f"python -m studies.{name} again"
            )
    sections = (
        model_section(model, weights),
        data_section(training, sources),
        training_section(training),
        heads_section(life),
        roles_section(roles),
        f"## Probes\n\n{probes.markdown(probed)}",
        limits_section(model),
    )
    return "\n".join(section.rstrip("\n") + "\n" for section in sections)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> list[str]:
    """Return the lines of a Markdown table whose last columns are numbers."""
    words = len(header) - numbers
    lines = [header, ["---"] * words + ["---:"] * numbers, *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def model_section(model: Transformer, weights: int) -> str:
    """Return the section on the model's architecture and how to load it."""
    config = model.config
    count = sum(weight.numel() for weight in model.parameters())
    facts = [
        ("parameters", f"{count:,}"),
        ("file", f"{weights / 1e6:.1f} MB, float16"),
        ("layers x heads", f"{config.num_layers} x {config.num_heads}"),
        ("width", f"{config.d_model}, {config.d_model // config.num_heads} per head"),
        ("vocabulary", f"{config.vocab_size:,} byte pairs"),
        ("tokens it takes", f"{config.max_length}"),
        ("positions", "rotary, in every head"),
    ]
    return "\n".join([MODEL, *_table(("", ""), facts)])


def data_section(training: Facts, sources: Sequence[Source]) -> str:
    """Return the section on the training data, with licences and sizes."""
    rows = []
    for source in sources:
        size = training["sources"].get(f"{source.name}, {source.content}")
        if size is None:
            raise ArgumentError(
                f"training must be of today's sources: {source.name}, {source.content} is not in it; train "
                "again, or take the sources as they were"
            )
        numbers = (f"{size['documents']:,}", f"{size['letters'] / 1e6:.1f}")
        named = f"{source.name} {source.version}"
        rows.append((named, source.content, source.kind, source.licence, *numbers))
    letters = sum(size["letters"] for size in training["sources"].values())
    header = ("source", "what of it", "kind", "licence", "documents", "million letters")
    text = DATA.format(letters=letters / 1e6, tokens=training["tokens_in_corpus"])
    return "\n".join([text, *_table(header, rows, 2)])


def training_section(training: Facts) -> str:
    """Return the section on training: settings, tokens, steps, loss and the picture."""
    tokens = training["steps"] * training["tokens_per_step"]
    text = TRAINED.format(
        read=tokens / 1e6,
        epochs=tokens / training["tokens_in_corpus"],
        minutes=training["seconds"] / 60,
        loss=training["validation"],
    )
    rows = [(words, f"{training[name]:,}") for name, words in SETTINGS.items()]
    return "\n".join([text, *_table(("", ""), rows, 1), "", f"![the loss, and how heads specialise]({RAW})"])


def heads_section(life: Specialisation) -> str:
    """Return the section that lists every head with its label and scores after training."""
    rows = []
    _, L, H = life.shape
    shown = {name: words for name, words in COLUMNS.items() if name in life.statistics}
    for layer in range(L):
        for head in range(H):
            now = life.of(layer, head)[-1]
            rows.append((f"{layer}.{head}", now["label"] or "–", *(f"{now[name]:.2f}" for name in shown)))
    when = [
        f"the first head that puts {least} of its weight on {words} at step {moment.step:,}"
        for name, least, words in (
            ("previous", 0.5, "the token before"),
            ("induction_stripe", 0.4, "what followed an earlier copy"),
        )
        if (moment := life.when(name, least)) is not None
    ]
    text = HEADS.format(when=" and ".join(when) or "neither kind of head")
    return "\n".join([text, *_table(("head", "label", *shown.values()), rows, len(shown))])


def roles_section(roles: Roles) -> str:
    """Return the section on roles: how many were found, and a table of all relations."""
    return ROLES.format(found=len(roles.found), asked=len(roles)) + "\n" + roles_table(roles)


def roles_table(roles: Roles) -> str:
    """Return a table of every relation with the head chosen for it and the best trivial rule."""
    rows = [
        (
            name,
            f"{role.layer}.{role.head}",
            f"{role.share:.2f} ({role.low:.2f} to {role.high:.2f})",
            f"{role.rules[role.rule]:.2f}, {role.rule}",
            "**found**" if role.found else "not found",
            f"{role.cases:,}",
        )
        for name, role in roles.items()
    ]
    header = ("word > related word", "head", "share (95%)", "best trivial rule", "verdict", "cases")
    return "\n".join(_table(header, rows, 1))


def limits_section(model: Transformer) -> str:
    """Return the section on the model's limits."""
    return LIMITS.format(count=sum(weight.numel() for weight in model.parameters()) / 1e6)


# The command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python -m studies.card`: measure if asked, and write the card."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.card", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--training", type=Path, help="a folder of studies.mini, to be summed up anew")
    parser.add_argument("--model", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    if options.training is not None:
        from . import corpus

        facts = training_of(options.training, corpus.texts())
        with whole_file(TRAINING) as half:
            half.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    model, tokenizer, _ = hw.models.load(options.model)
    assert isinstance(model, Transformer), "a folder of Transformer.save"
    life = hw.models.specialisation(options.model)
    whole = card(
        model,
        life,
        hw.roles(model, tokenizer),
        _stored(TRAINING, "python -m studies.card --training FOLDER"),
        _stored(PROBES, "python -m studies.probes"),
        weights=(options.model / "model.safetensors").stat().st_size,
    )
    with whole_file(options.model / "card.md") as half:
        half.write_text(whole, "utf-8")
    if options.model == FOLDER:
        life.plot().savefig(PICTURE)
        with whole_file(PAGE) as half:
            half.write_text('--8<-- "src/headwise/models/mini/card.md"\n', "utf-8")
    print(whole)


if __name__ == "__main__":
    main()
