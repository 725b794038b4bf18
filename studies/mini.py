"""mini: the small causal language model that headwise ships, and how it is trained.

    make train-mini                          # fetch the text, train, write src/headwise/models/mini/
    python -m studies.mini --device cuda --out DIR

Minutes on one data-centre GPU, hours on a CPU. Killed and run again it goes on where it was. On the way it
leaves checkpoints, from which `studies.checkpoints` makes what is shipped of the training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headwise.models import Transformer, TransformerConfig, fit
from headwise.models.training_loop import TrainingStep
from headwise.nn import Rope
from headwise.whole_files import whole_file

from . import corpus

LENGTH, BATCH, STEPS, WARMUP, LR, SEED = 512, 64, 8000, 200, 3e-3, 0
D_MODEL = 256
CHECKPOINTS = 20
SHIPPED = Path(__file__).parents[1] / "src" / "headwise" / "models" / "mini"


def config(num_heads: int = 8, **changed: object) -> TransformerConfig:
    """mini's sizes; as many parameters with any number of heads, since heads share d_model.

    A quarter of each head's channels is turned by position. Where all are, a head that looks for an earlier
    copy of a token must find it turned: the weight of the best on what followed was 0.35 instead of 0.54.
    """
    return TransformerConfig(
        vocab_size=corpus.VOCABULARY,
        d_model=D_MODEL,
        num_heads=num_heads,
        num_layers=4,
        rope=Rope(dims=max(2, D_MODEL // num_heads // 4)),
        norm="rms",
        bias=False,
        max_length=LENGTH,
        **changed,  # type: ignore[arg-type]
    )


def windows(tokens: Tensor, batch: int, length: int, seed: int) -> Callable[[int], Iterator[Tensor]]:
    """For `fit`: of an epoch, all windows of length + 1 tokens in an order of its own, int64 [B, length + 1].

    They overlap by one token, so that each is predicted once. Every epoch begins at another token.
    """

    def epoch_of(epoch: int) -> Iterator[Tensor]:
        order = torch.Generator().manual_seed(seed * 1009 + epoch)
        first = int(torch.randint(length, (1,), generator=order))
        count = (len(tokens) - first - 1) // length
        starts = first + length * torch.randperm(count, generator=order)
        ahead = torch.arange(length + 1, device=tokens.device)
        for some in starts.split(batch):
            if len(some) == batch:
                yield tokens[some.to(tokens.device)[:, None] + ahead].long()

    return epoch_of


def optimizer(model: Transformer, lr: float = LR) -> torch.optim.Optimizer:
    """AdamW, with decay of matrices alone."""
    wide = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


@torch.no_grad()
def validation_loss(model: Transformer, tokens: Tensor, length: int = LENGTH, batch: int = 32) -> float:
    """Nats per token, over windows one after another."""
    device = next(model.parameters()).device
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    total = 0.0
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        logits = model(x.to(device).long())  # [B, T, V]
        total += cross_entropy(
            logits.flatten(0, 1).float(), y.to(device).long().flatten(), reduction="sum"
        ).item()
    return total / (count * length)


def checkpoint_steps(steps: int, count: int = CHECKPOINTS) -> list[int]:
    """When to keep the weights: before the first step, then closer together where more happens."""
    ratio = steps / 16
    return sorted({0, steps, *(round(16 * ratio ** (each / (count - 2))) for each in range(count - 2))})


def train(
    out: Path,
    *,
    device: str = "cpu",
    steps: int = STEPS,
    batch: int = BATCH,
    seed: int = SEED,
    every: int = 500,
) -> Transformer:
    """Train mini, or go on; weights at `checkpoint_steps` and history.json lie in `out` afterwards."""
    from safetensors.torch import save_file

    built = corpus.load()
    tokens = built.train.to(torch.int32).to(device)
    validation = built.validation.to(torch.int32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config()).to(device)
    out.mkdir(parents=True, exist_ok=True)
    wanted, judged_at = set(checkpoint_steps(steps)), out / "validation.json"
    judged = json.loads(judged_at.read_text()) if judged_at.exists() else {}

    def keep(done: int) -> None:
        place = out / f"step_{done:06d}.safetensors"
        if done in wanted and not place.exists():
            state = {name: value.half().cpu().contiguous() for name, value in model.state_dict().items()}
            with whole_file(place) as temporary:
                save_file(state, temporary)
            judged[str(done)] = validation_loss(model, validation)
            with whole_file(judged_at) as temporary:
                temporary.write_text(json.dumps(judged))

    def after(step: TrainingStep) -> None:
        keep(step.step + 1)

    keep(0)
    history = fit(
        model,
        windows(tokens, batch, LENGTH, seed),
        steps=steps,
        optimizer=optimizer(model),
        warmup=WARMUP,
        schedule="cosine",
        autocast=torch.bfloat16 if device == "cuda" else None,
        callbacks=[after],
        checkpoint=out / "training.pt",
        every=every,
        seed=seed,
    )
    facts = {
        "steps": history.steps,
        "batch": batch,
        "length": LENGTH,
        "tokens_per_step": batch * LENGTH,
        "tokens_in_corpus": len(built.train),
        "seconds": history.seconds,
        "lr": LR,
        "warmup": WARMUP,
        "seed": seed,
        "losses": [round(loss, 4) for loss in history.losses],
        "validation": judged,
    }
    with whole_file(out / "history.json") as temporary:
        temporary.write_text(json.dumps(facts))
    return model.eval()


def model_at(checkpoint: Path) -> Transformer:
    """mini as it was at a checkpoint."""
    from safetensors.torch import load_file

    model = Transformer(config())
    model.load_state_dict({name: value.float() for name, value in load_file(checkpoint).items()})
    return model.eval()


def ship(out: Path, folder: Path = SHIPPED) -> None:
    """Write the last checkpoint to where `headwise.models.load("mini")` reads it."""
    from tokenizers import Tokenizer

    model = model_at(max(out.glob("step_*.safetensors")))
    tokenizer = Tokenizer.from_file(str(corpus.DATA / "tokenizer.json"))
    model.save(folder, tokenizer, title="mini", dtype=torch.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=corpus.DATA / "training")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--ship", action="store_true", help="write the package's own model from what was trained"
    )
    options = parser.parse_args()
    model = train(
        options.out, device=options.device, steps=options.steps, batch=options.batch, seed=options.seed
    )
    if options.ship:
        ship(options.out)
    print(f"validation loss {validation_loss(model, corpus.load().validation):.4f} nats per token")


if __name__ == "__main__":
    main()
