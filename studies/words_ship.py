"""The package's own model from what `studies.words_training` left in a folder.

    python -m studies.words_ship OUT DATA --label 1_8x224_seed0

OUT is that folder, DATA what `studies.words_files` packed. Weights, vocabulary and measured checkpoints go to
src/headwise/models/mini; the settings of the training, its sources and a row per trained model go to
studies/results/mini.json, from which `studies.card` writes the card.

The checkpoints must be those of the model that is shipped: heads of another seed are other heads.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.roles import Roles
from headwise.models import Specialisation, Transformer
from headwise.whole_files import whole_file

from . import words_training
from .checkpoints import History, names_of
from .probes import fingerprint

RESULTS = Path(__file__).parent / "results"
TRAINING = RESULTS / "mini.json"
SHIPPED = Path(__file__).parents[1] / "src" / "headwise" / "models" / "mini"
CODE_OR_REFERENCE = f"{words_training.REFERENCE}|{words_training.CODE}"

LAST = 200  # steps, of whose losses the mean is given

Facts = dict[str, Any]
Documents = list[tuple[str, str, str]]  # source, name, text


def results_of(out: Path) -> Facts:
    """Return what a training stored.

    Raises:
        ArgumentError: there is nothing.
    """
    place = out / "results.json.xz"
    if not place.is_file():
        raise ArgumentError(
            f"folder must be from studies.words_training: no {place.name} in {str(out)!r}; train first"
        )
    facts: Facts = json.loads(lzma.decompress(place.read_bytes()))
    return facts


def natural_texts(data: Path) -> dict[str, Documents]:
    """Return the documents that were read ("train") and those that were held out ("val")."""
    with lzma.open(data / "natural.xz", "rt", encoding="utf-8") as file:
        texts: dict[str, Documents] = json.load(file)
    return texts


def trained(out: Path, label: str) -> Transformer:
    """Return a trained model by its label, such as 1_8x224_seed0."""
    from safetensors.torch import load_file

    model = Transformer(words_training.config_of(label.split("_")[1]))
    state = load_file(out / f"{label}.safetensors")
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model.eval()


@torch.no_grad()
def nats(model: Transformer, tokenizer: Any, documents: Documents) -> Facts:
    """Return the loss in nats per byte and per token, over windows of each document after its start.

    Nats per byte compare models whatever their vocabularies are.
    """
    length, start = model.config.max_length, tokenizer.bos_token_id
    total, tokens = 0.0, 0
    for _, _, text in documents:
        ids = torch.tensor(tokenizer(text)["input_ids"])[1:]  # without its start
        for window in ids.split(length - 1):
            x = torch.cat((torch.tensor([start]), window))[None]
            logits = model(x)[0, :-1]
            total += cross_entropy(logits.float(), window, reduction="sum").item()
            tokens += len(window)
    size = sum(len(text.encode()) for _, _, text in documents)
    return {
        "nats per byte": round(total / size, 4),
        "nats per token": round(total / tokens, 4),
        "bytes": size,
        "tokens": tokens,
        "documents": len(documents),
    }


def held_out(data: Path) -> dict[str, Documents]:
    """Return the documents held out for validation: plain prose, and documentation, WordNet and code."""
    documents = natural_texts(data)["val"]
    kinds = {"plain": False, "rest": True}
    return {
        name: [each for each in documents if bool(re.search(CODE_OR_REFERENCE, each[0])) == is_rest]
        for name, is_rest in kinds.items()
    }


def life_of(
    results: Facts, label: str, model: Transformer, validation: float, tokens_per_step: int
) -> Specialisation:
    """Return the measured checkpoints of a training.

    Validation is known of the last one alone.

    Raises:
        ArgumentError: the checkpoints are those of another training.
    """
    training, stored = results["trainings"][label], results["life"]
    steps = [int(name.removeprefix("step_")) for name in stored]
    if steps[-1] != training["steps"]:
        raise ArgumentError(
            f"checkpoints must belong to {label}: they end at step {steps[-1]} instead of "
            f"{training['steps']}; ship the model whose checkpoints were measured"
        )
    history = History(training["losses"], {}, tokens_per_step)
    numbers = [{name: torch.tensor(value) for name, value in each.items()} for each, _ in stored.values()]
    roles = [Roles.from_json(text) for _, text in stored.values()]
    names = list(roles[-1])
    return Specialisation(
        steps=torch.tensor(steps),
        tokens=torch.tensor(steps) * tokens_per_step,
        losses=torch.tensor([history.loss_since(a, b) for a, b in zip([0, *steps], steps, strict=False)]),
        validation=torch.tensor([math.nan] * (len(steps) - 1) + [validation]),
        statistics={name: torch.stack([each[name] for each in numbers]) for name in numbers[0]},
        labels=tuple(names_of(each) for each in numbers),
        roles={name: torch.stack([each.scores[name] for each in roles]) for name in names},
        found={name: tuple(each[name].found for each in roles) for name in names},
        curve=history.curve(),
        title="mini",
        fingerprint=fingerprint(model),
    )


def sources_of(results: Facts, data: Path) -> dict[str, Facts]:
    """Return documents and letters of each source of the natural text that was trained on."""
    sizes: dict[str, Facts] = {}
    for source, _, text in natural_texts(data)["train"]:
        size = sizes.setdefault(source, {"documents": 0, "letters": 0})
        size["documents"] += 1
        size["letters"] += len(text)
    return sizes


def summary(training: Facts) -> Facts:
    """Return what the card shows of one trained model."""
    names = ("label", "size", "seed", "steps", "planned", "seconds", "tokens", "induction", "previous")
    facts = {name: training[name] for name in names}
    losses = {name: training[f"nats a byte, {name}"] for name in ("plain", "rest")}
    return facts | {"nats per byte": losses, "found": training["found"], "roles": training["roles"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python -m studies.words_ship`: write the package's own model and the facts of its training."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.words_ship", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", type=Path, help="a folder of studies.words_training")
    parser.add_argument("data", type=Path, help="a folder of studies.words_files")
    parser.add_argument("--label", help="model to ship; default: that with checkpoints")
    parser.add_argument("--folder", type=Path, default=SHIPPED)
    options = parser.parse_args(arguments)
    results = results_of(options.out)
    label = options.label or next(
        name
        for name, training in results["trainings"].items()
        if f"step_{training['steps']:06d}" in results["life"]
    )
    model, per_step = trained(options.out, label), words_training.BATCH * words_training.LENGTH
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    model.save(options.folder, words, title="mini", dtype=torch.float16)
    shipped, tokenizer, _ = hw.models.load(options.folder)
    assert isinstance(shipped, Transformer), "just written by Transformer.save"
    losses = {name: nats(shipped, tokenizer, texts) for name, texts in held_out(options.data).items()}
    validation = losses["plain"]["nats per token"]
    life_of(results, label, shipped, validation, per_step).save(options.folder)
    training = results["trainings"][label]
    facts = {
        "label": label,
        "steps": training["steps"],
        "batch": words_training.BATCH,
        "length": words_training.LENGTH,
        "lr": words_training.LR,
        "warmup": words_training.WARMUP,
        "seed": training["seed"],
        "tokens_per_step": per_step,
        "seconds": training["seconds"],
        "last loss": round(sum(training["losses"][-LAST:]) / len(training["losses"][-LAST:]), 4),
        "shares": training["shares"],
        "tokens": results["tokens"],
        "teacher": results["teacher"],
        "validation": losses,
        "sources": sources_of(results, options.data),
        "tried": [summary(each) for each in results["trainings"].values()],
    }
    stored = json.loads(TRAINING.read_text("utf-8")) if TRAINING.is_file() else {}
    kept_facts = {name: stored[name] for name in ("before", "generated", "milliseconds") if name in stored}
    with whole_file(TRAINING) as half:
        half.write_text(json.dumps(facts | kept_facts, indent=1) + "\n", "utf-8")
    print(f"{label}: {losses['plain']['nats per byte']:.4f} nats per byte of plain text")


if __name__ == "__main__":
    main()
