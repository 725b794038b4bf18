"""Training of mini on one GPU and by the clock: the teacher writes, then models are trained.

    python -m studies.words_training DATA --out OUT --seconds 420

DATA holds what `studies.words_files` packs. All results lie in OUT as they come, so that a run that is cut
leaves the best so far: log.txt, results.json, models as *.safetensors, teacher's tokens as *.xz.

Letters: B windows, T tokens of a window, L layers, H heads, D width of a head, E width.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import math
import multiprocessing
import os
import re
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

import headwise as hw
from headwise.heads import grammar
from headwise.heads.roles import judge
from headwise.listeners import role_measurement
from headwise.models import Transformer, TransformerConfig
from headwise.models.byte_pairs import BytePairs
from headwise.nn import Rope

from . import stories
from .teacher import Teacher

BEGUN = time.time()
LENGTH, BATCH, LR, WARMUP, VOCABULARY, START = 512, 64, 3e-3, 200, 8192, 0
ROPE_DIMS, BASE = 8, 10_000.0
CHECKPOINTS = 20
WAVE, WRITTEN = 4096, 256  # texts at once, tokens of each
SHARES = {"teacher": 0.50, "plain": 0.14, "reference": 0.09, "code": 0.07, "stories": 0.18, "lists": 0.02}
REFERENCE, CODE = r"documentation|WordNet", r"source"
SIZES = {"6x256": (6, 256), "8x224": (8, 224)}
HEAD = 32


@dataclass
class Clock:
    """The elapsed time of this run, and its limit."""

    seconds: float

    @property
    def now(self) -> float:
        return time.time() - BEGUN

    @property
    def left(self) -> float:
        return self.seconds - self.now


OUT, CLOCK, RESULTS = Path("."), Clock(0), dict[str, Any]()


def log(text: str) -> None:
    line = f"[{CLOCK.now:6.1f}] {text}"
    print(line, flush=True)
    with (OUT / "log.txt").open("a") as file:
        file.write(line + "\n")


def keep_results() -> None:
    (OUT / "results.json").write_text(json.dumps(RESULTS))


def config_of(name: str) -> TransformerConfig:
    layers, width = SIZES[name]
    return TransformerConfig(
        vocab_size=VOCABULARY, d_model=width, num_heads=width // HEAD, num_layers=layers,
        rope=Rope(dims=ROPE_DIMS), norm="rms", bias=False, max_length=LENGTH,
    )  # fmt: skip


# In other processes: text to tokens


def without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


@functools.cache
def tokenizer(folder: str) -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")


@functools.cache
def token_bytes(folder: str) -> tuple[list[bytes], frozenset[int]]:
    table = json.loads(Path(folder, "teacher.json").read_text())
    return [bytes.fromhex(each) for each in table["bytes"]], frozenset(table["ends"])


def encoded(folder: str, texts: list[str]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the concatenated tokens of texts, uint16, and the start of each text."""
    rows = [each.ids for each in tokenizer(folder).encode_batch(texts)]
    starts = numpy.cumsum([0, *map(len, rows)])[:-1]
    return numpy.array([i for row in rows for i in row], numpy.uint16), starts.astype(numpy.int64)


def cleaned(text: str, is_whole: bool) -> str | None:
    """Return a text of the teacher in whole sentences, without Markdown; None if it is of no use."""
    text = text.translate(
        {ord(a): b for a, b in zip("“”‘’–—…", ('"', '"', "'", "'", "-", " - ", "..."), strict=True)}
    )
    text = re.sub(r"\*\*|^#+ *", "", text, flags=re.M)
    text = re.sub(r"[^\x20-\x7e\n]", "", text)
    text = re.sub(r" +\n", "\n", re.sub(r"  +", " ", text)).strip()
    if not is_whole:
        ends = [text.rfind(mark) for mark in (".", "!", "?", '."', '!"', '?"')]
        text = text[: max(ends) + 1] + ('"' if text[max(ends) + 1 : max(ends) + 2] == '"' else "")
    if len(text) < 80:
        return None
    data = text.encode()
    return None if len(zlib.compress(data)) < 0.36 * len(data) else text + "\n"  # it repeats itself


def read_wave(folder: str, rows: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, bytes, int]:
    """Return texts of the teacher as our tokens, their starts, the packed tokens, and the bytes."""
    table, ends = token_bytes(folder)
    texts = []
    for row in rows.tolist():
        stop = next((at for at, token in enumerate(row) if token in ends), None)
        text = cleaned(
            b"".join(table[token] for token in row[:stop]).decode("utf-8", "ignore"), stop is not None
        )
        if text is not None:
            texts.append(text)
    ids, starts = encoded(folder, texts)
    return ids, starts, lzma.compress(ids.tobytes(), preset=4), sum(map(len, texts))


def write_stories(folder: str, seed: int, letters: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    return encoded(folder, stories.documents(seed, letters))


def read_natural(folder: str) -> dict[str, Any]:
    """Return the natural texts by kind, and those for validation with their number of bytes."""
    with lzma.open(f"{folder}/natural.xz", "rt", encoding="utf-8") as file:
        texts = json.load(file)
    result: dict[str, Any] = {}
    kinds: dict[str, list[str]] = {"plain": [], "reference": [], "code": []}
    for source, _, text in texts["train"]:
        kinds[
            "reference" if re.search(REFERENCE, source) else "code" if re.search(CODE, source) else "plain"
        ].append(text)
    for kind, some in kinds.items():
        result[kind] = encoded(folder, some)
    for kind, is_kind in (("plain", False), ("rest", True)):
        some = [t for s, _, t in texts["val"] if bool(re.search(f"{REFERENCE}|{CODE}", s)) == is_kind]
        result[f"val {kind}"] = (encoded(folder, some)[0], sum(map(len, some)))
    return result


def measure_checkpoint(folder: str, name: str, place: str) -> tuple[dict[str, Any], str]:
    """Return all numbers of all heads of a checkpoint, and its roles."""
    from safetensors.torch import load_file

    from .checkpoints import scores_of
    from .probes import probes_of

    torch.set_num_threads(1)
    model = Transformer(config_of(name)).eval()
    model.load_state_dict({key: value.float() for key, value in load_file(place).items()})
    words = BytePairs.from_file(Path(folder, "tokenizer.json"), model_max_length=LENGTH)
    probe, *_ = probes_of(model, words)
    numbers = {key: value.tolist() for key, value in scores_of(model, words, probe).items()}
    return numbers, hw.roles(model, words, keep=False, progress=False).to_json()


# The model, for speed


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, H, T, D] with its first channels rotated, in halves."""
    a, b, rest = x[..., : ROPE_DIMS // 2], x[..., ROPE_DIMS // 2 : ROPE_DIMS], x[..., ROPE_DIMS:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def qkv_of(x: Tensor, w: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Return q, k, v [B, H, T, D] of the residual stream x [B, T, E]."""
    y = functional.rms_norm(x, (x.shape[-1],), w[4], 1e-5)
    q, k, v = (functional.linear(y, each).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in w[:3])
    return [turn(q, cos, sin).to(v.dtype), turn(k, cos, sin).to(v.dtype), v]


def after(x: Tensor, heads: Tensor, w: Sequence[Tensor]) -> Tensor:
    """Return the residual stream after a layer with these outputs of heads [B, H, T, D]."""
    x = x + functional.linear(heads.transpose(1, 2).flatten(2), w[3])
    y = functional.rms_norm(x, (x.shape[-1],), w[7], 1e-5)
    return x + functional.linear(functional.gelu(functional.linear(y, w[5])), w[6])


def block(x: Tensor, cos: Tensor, sin: Tensor, *w: Tensor) -> Tensor:
    q, k, v = qkv_of(x, w, cos, sin)
    return after(x, functional.scaled_dot_product_attention(q, k, v, is_causal=True), w)


def loss_of(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    y = functional.rms_norm(x, (x.shape[-1],), norm, 1e-5)
    logits = functional.linear(y, embedding).flatten(0, 1)
    return functional.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100)


LAYER = (
    "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj", "attention_norm",
    "feed_forward.up_proj", "feed_forward.down_proj", "feed_forward_norm",
)  # fmt: skip


class Net:
    """The weights of a `Transformer`, with a faster forward."""

    def __init__(self, name: str, seed: int, device: str, is_compiled: bool) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = Transformer(config_of(name)).state_dict()
        self.name, self.seed, self.device = name, seed, device
        self.weights = {key: value.to(device).clone().requires_grad_() for key, value in state.items()}
        angles = torch.arange(LENGTH + 1)[:, None].double() * BASE ** (
            -torch.arange(0, ROPE_DIMS, 2).double() / ROPE_DIMS
        )
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)
        self.block = torch.compile(block, dynamic=False) if is_compiled else block
        self.loss_of = torch.compile(loss_of, dynamic=False) if is_compiled else loss_of

    def layer(self, number: int) -> list[Tensor]:
        return [self.weights[f"decoder.layers.{number}.{part}.weight"] for part in LAYER]

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        embedding, T = self.weights["embedding.tokens.weight"], ids.shape[1]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            x = functional.embedding(ids, embedding)
            for number in range(SIZES[self.name][0]):
                x = self.block(x, self.cos[:T], self.sin[:T], *self.layer(number))
            return self.loss_of(x, self.weights["decoder.norm.weight"], embedding, targets)

    @torch.no_grad()
    def maps(self, ids: Tensor) -> Tensor:
        """Return the attention weights of all heads, float32 [L, B, H, T, T]."""
        T, result = ids.shape[1], []
        hidden = torch.ones(T, T, dtype=torch.bool, device=ids.device).triu(1)
        x = functional.embedding(ids, self.weights["embedding.tokens.weight"])
        for number in range(SIZES[self.name][0]):
            w = self.layer(number)
            q, k, v = qkv_of(x, w, self.cos[:T], self.sin[:T])
            p = (q @ k.transpose(-1, -2) / math.sqrt(HEAD)).masked_fill(hidden, -math.inf).softmax(-1)
            result.append(p)
            x = after(x, p @ v, w)
        return torch.stack(result)

    def save(self, place: Path) -> None:
        from safetensors.torch import save_file

        save_file(
            {key: value.detach().half().cpu().contiguous() for key, value in self.weights.items()}, place
        )


# What is measured of it on the way


@functools.cache
def readings(folder: str) -> list[Any]:
    words = BytePairs.from_file(Path(folder, "tokenizer.json"), model_max_length=LENGTH)
    return [role_measurement._encode(words, sentence, causal=True) for sentence in grammar.sentences(700, 0)]


@torch.no_grad()
def quick_roles(net: Net, folder: str) -> dict[str, Any]:
    """Return roles as `headwise.roles` does, with sentences of one length in one batch."""
    some = readings(folder)
    heaviest: list[Tensor | None] = [None] * len(some)
    by_length: dict[int, list[int]] = {}
    for number, reading in enumerate(some):
        by_length.setdefault(len(reading.ids), []).append(number)
    for T, numbers in by_length.items():
        maps = net.maps(torch.tensor([some[n].ids for n in numbers], device=net.device))  # [L, B, H, T, T]
        for b, n in enumerate(numbers):
            words = some[n].words
            member = torch.zeros(len(words), T, device=net.device)
            for at, tokens in enumerate(words):
                member[at, tokens] = 1
            share = (member / member.sum(-1, keepdim=True)) @ maps[:, b] @ member.T  # [L, H, W, W]
            real = torch.tensor(
                [any(map(str.isalnum, word)) for word in some[n].sentence.words], device=net.device
            )
            share = share.masked_fill(~real, -1).masked_fill(
                torch.eye(len(words), dtype=torch.bool, device=net.device), -1
            )
            best = share.max(-1)
            heaviest[n] = best.indices.masked_fill(best.values <= 0, -1).cpu()
    layers = list(range(SIZES[net.name][0]))
    roles = judge([reading.sentence for reading in some], heaviest, layers, causal=True)  # type: ignore[arg-type]
    return {
        "found": list(roles.found),
        "margin": sum(max(-0.2, min(0.15, role.margin)) for role in roles.values()),
        "roles": {
            name: [
                f"{role.layer}.{role.head}",
                round(role.share, 3),
                round(role.margin, 3),
                role.moves,
                role.found,
            ]
            for name, role in roles.items()
        },
    }


@torch.no_grad()
def quick_patterns(net: Net) -> dict[str, float]:
    """Return the best induction stripe on repeated random tokens, and the best previous-token weight."""
    generator = torch.Generator().manual_seed(7)
    period = 100
    once = torch.randint(1, VOCABULARY, (8, period), generator=generator)
    ids = torch.cat((torch.full((8, 1), START), once, once), 1).to(net.device)
    p = net.maps(ids)  # [L, 8, H, T, T]
    at = torch.arange(period + 1, 2 * period + 1, device=net.device)
    stripe = p[..., at, at - period + 1].mean((1, -1))
    before = p[..., at, at - 1].mean((1, -1))
    return {"induction": stripe.max().item(), "previous": before.max().item()}


@torch.no_grad()
def nats_a_byte(net: Net, ids: Tensor, count: int) -> float:
    """Return the loss in nats per byte of a text of `count` bytes, over windows that begin with START."""
    compiled, net.block, net.loss_of = (net.block, net.loss_of), block, loss_of
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH).clone()
    inputs = torch.cat((torch.full_like(windows[:, :1], START), windows[:, :-1]), 1)
    total = 0.0
    for x, y in zip(inputs.split(BATCH), windows.split(BATCH), strict=True):
        if len(x) == BATCH:
            total += net.loss(x, y).item() * y.numel()
    net.block, net.loss_of = compiled
    judged = len(windows) // BATCH * BATCH * LENGTH
    return total / (count * judged / len(ids)) if judged else math.nan


# Training


class Windows:
    """Draws windows from the sources according to their shares."""

    def __init__(self, sources: dict[str, tuple[Tensor, Tensor]], device: str) -> None:
        shares = {name: share for name, share in SHARES.items() if name == "lists" or name in sources}
        self.names, self.device = list(shares), device
        self.shares = torch.tensor([shares[name] for name in self.names])
        parts, self.starts, at = [], [], 0
        for name in self.names:
            if name == "lists":
                self.starts.append(torch.zeros(1, dtype=torch.int64))
                continue
            ids, starts = sources[name]
            if name in ("plain", "reference", "code"):  # long documents: from anywhere
                starts = torch.arange(0, len(ids) - LENGTH)
            parts.append(ids)
            self.starts.append(starts[starts < max(1, len(ids) - LENGTH)] + at)
            at += len(ids)
        pad = torch.zeros(LENGTH + 1, dtype=torch.int32)
        self.all = torch.cat([*[p.to(torch.int32) for p in parts], pad]).to(device)
        self.ahead = torch.arange(LENGTH + 1, device=device)

    def batches(self, seed: int, stretch: int = 200) -> Any:
        """Yield inputs and targets [B, T] endlessly."""
        draw = torch.Generator().manual_seed(seed)
        while True:
            kinds = torch.multinomial(self.shares, BATCH * stretch, replacement=True, generator=draw)
            spots = torch.zeros(BATCH * stretch, dtype=torch.int64)
            for number, starts in enumerate(self.starts):
                chosen = kinds == number
                spots[chosen] = starts[torch.randint(len(starts), (int(chosen.sum()),), generator=draw)]
            is_list = kinds == self.names.index("lists")
            periods = torch.randint(16, 200, (BATCH * stretch,), generator=draw)
            words = torch.randint(1, VOCABULARY, (int(is_list.sum()), 200), generator=draw, dtype=torch.int32)
            rank, lengths = (torch.cumsum(is_list, 0) - 1).tolist(), periods.tolist()
            spots = spots.to(self.device)
            words, lists = words.to(self.device), is_list.view(stretch, BATCH)
            for step in range(stretch):
                some = slice(step * BATCH, (step + 1) * BATCH)
                ids = self.all[spots[some, None] + self.ahead].long()  # [B, T + 1]
                ids[:, 0] = START
                targets = ids[:, 1:].clone()
                rows = lists[step].nonzero().flatten().tolist()
                for row in rows:
                    number = step * BATCH + row
                    period = lengths[number]
                    ids[row, 1:] = words[rank[number]].long()[(self.ahead[1:] - 1) % period]
                    targets[row] = ids[row, 1:].masked_fill(self.ahead[1:] <= period, -100)
                yield ids[:, :-1], targets


def train(
    label: str, name: str, seed: int, windows: Windows, folder: str, seconds: float, is_compiled: bool,
    validation: dict[str, tuple[Tensor, int]], checkpoints: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Train for so many seconds; the first steps determine the number of steps."""
    device = windows.device
    net = Net(name, seed, device, is_compiled)
    wide = [w for w in net.weights.values() if w.ndim > 1]
    rest = [w for w in net.weights.values() if w.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=device == "cuda")
    batches, begun = windows.batches(seed), time.time()
    steps, losses, held, warm, timed = 10**9, [], [], 25, 75
    checkpoint_steps: set[int] = set()
    report: dict[str, Any] = {
        "label": label,
        "size": name,
        "seed": seed,
        "shares": dict(zip(windows.names, windows.shares.tolist(), strict=True)),
    }

    def schedule(done: int) -> None:
        lr = LR * min(1, (done + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * min(1, done / steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr

    done, mark = 0, begun
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        net.save(checkpoints / "step_000000.safetensors")
    while done < steps:
        schedule(done)
        ids, targets = next(batches)
        loss = net.loss(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(net.weights.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        held.append(loss.detach())
        done += 1
        if done in (warm, timed):
            losses += torch.stack(held).tolist()  # waits for the device
            held = []
            if done == timed:
                each = (time.time() - mark) / (timed - warm)
                steps = max(timed + 1, timed + int(0.97 * (seconds - (time.time() - begun)) / each))
                ratio = steps / 16
                checkpoint_steps = {
                    round(16 * ratio ** (n / (CHECKPOINTS - 2))) for n in range(CHECKPOINTS - 1)
                }
                log(
                    f"{label}: {each * 1e3:.1f} ms a step, {BATCH * LENGTH / each / 1e6:.2f} M tokens/s, "
                    f"{steps} steps"
                )
            mark = time.time()
        if checkpoints is not None and (done in checkpoint_steps or done in (16, 33)) and done < steps:
            net.save(checkpoints / f"step_{done:06d}.safetensors")
        if len(held) == 250:
            losses += torch.stack(held).tolist()
            held = []
            if done % 1000 < 250 and done > timed:
                log(f"{label}: step {done}, loss {sum(losses[-200:]) / 200:.3f}")
            if CLOCK.left < 12:
                log(f"{label}: cut at step {done} of {steps}")
                break
    if held:
        losses += torch.stack(held).tolist()
    report |= {
        "steps": done,
        "planned": steps,
        "seconds": time.time() - begun,
        "tokens": done * BATCH * LENGTH,
    }
    report["losses"] = [round(x, 4) for x in losses]
    net.save(OUT / f"{label}.safetensors")
    if checkpoints is not None:
        net.save(checkpoints / f"step_{done:06d}.safetensors")
    report |= quick_patterns(net) | {f"nats a byte, {k}": nats_a_byte(net, *v) for k, v in validation.items()}
    report |= quick_roles(net, folder)
    summary = {k: v for k, v in report.items() if k not in ("losses", "roles", "shares")}
    log(f"{label}: {json.dumps(summary)}")
    for relation, role in report["roles"].items():
        log(f"  {relation:36s} {role}")
    RESULTS.setdefault("trainings", {})[label] = report
    keep_results()
    return report


def teach(folder: str, pool: Any, device: str, seconds: float, wave: int, tokens: int) -> dict[str, Any]:
    """Let the teacher write for so many seconds, and return its texts."""
    teacher = Teacher(Path(folder), device, torch.bfloat16 if device == "cuda" else torch.float32)
    table = numpy.load(Path(folder, "prompts.npz"))
    buckets = sorted((table[key].astype(numpy.int64) for key in table.files), key=len, reverse=True)
    log(f"teacher: {'whole' if teacher.whole else 'a piece is missing'}, {sum(map(len, buckets))} prompts")
    begun, waits, number, slowest = time.time(), [], 0, 0.0
    while time.time() - begun + slowest < seconds:
        mark, prompts = time.time(), buckets[number % len(buckets)]
        order = numpy.random.default_rng(number).permutation(len(prompts))
        rows = torch.from_numpy(prompts[numpy.resize(order, wave)]).to(device)
        written = teacher.write(rows, tokens, seed=number).cpu().numpy().astype(numpy.uint16)
        waits += [
            pool.apply_async(read_wave, (folder, part))
            for part in numpy.array_split(written, max(1, wave // 512))
        ]
        number += 1
        slowest = max(slowest if number > 2 else 0, time.time() - mark)
        log(f"teacher: wave {number}, {wave * tokens / (time.time() - mark) / 1e3:.0f} k tokens/s")
    del teacher
    parts = [wait.get() for wait in waits]
    if device == "cuda":
        torch.cuda.empty_cache()
    ids, starts, at = [], [], 0
    for some, begins, _, _ in parts:
        starts.append(torch.from_numpy(begins) + at)
        ids.append(torch.from_numpy(some.astype(numpy.int32)))
        at += len(some)
    room, files = 15 * 2**20, 1
    for _, _, packed, _ in parts:  # streams of xz one after another are a file of xz
        place = OUT / f"teacher_{files}.xz"
        if place.exists() and place.stat().st_size + len(packed) > room:
            files += 1
        if files > 1:
            break
        with (OUT / f"teacher_{files}.xz").open("ab") as file:
            file.write(packed)
    texts, letters = sum(map(len, starts)), sum(part[3] for part in parts)
    RESULTS["teacher"] = {
        "waves": number,
        "sequences": number * wave,
        "texts": texts,
        "tokens": at,
        "letters": letters,
        "seconds": time.time() - begun,
    }
    log(f"teacher: {json.dumps(RESULTS['teacher'])}")
    log("an example: " + repr(tokenizer(folder).decode(ids[0][:300].tolist())))
    keep_results()
    return {"teacher": (torch.cat(ids), torch.cat(starts))} if at > 4 * LENGTH else {}


def main() -> None:
    global OUT, CLOCK
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--teach", type=float, default=60, help="seconds for the teacher; 0: no teacher")
    parser.add_argument("--wave", type=int, default=WAVE)
    parser.add_argument("--written", type=int, default=WRITTEN)
    parser.add_argument("--letters", type=int, default=32_000_000, help="letters of stories")
    parser.add_argument("--plan", default="6x256:0,8x224:0,best:1,best:2")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    OUT, CLOCK = options.out, Clock(options.seconds)
    OUT.mkdir(parents=True, exist_ok=True)
    folder = str(options.data)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "headwise_inductor")))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    pool = multiprocessing.get_context("fork").Pool(options.processes, without_gpu)  # before the GPU is used
    device = "cuda" if torch.cuda.is_available() else "cpu"
    log(
        f"{torch.__version__}, {device}, {os.cpu_count()} cores, "
        f"{sorted(place.name for place in options.data.iterdir())}"
    )
    waits = [pool.apply_async(write_stories, (folder, 1000 + n, options.letters // 32)) for n in range(32)]
    natural = pool.apply_async(read_natural, (folder,)) if (options.data / "natural.xz").exists() else None
    sources: dict[str, Any] = {}
    if options.teach:
        try:
            sources |= teach(folder, pool, device, options.teach, options.wave, options.written)
        except Exception as error:  # the rest of the run is worth more than the teacher
            log(f"teacher failed: {type(error).__name__}: {error}")
    parts, at = [wait.get() for wait in waits], 0
    begins = []
    for ids, starts in parts:
        begins.append(torch.from_numpy(starts) + at)
        at += len(ids)
    sources["stories"] = (
        torch.cat([torch.from_numpy(ids.astype(numpy.int32)) for ids, _ in parts]),
        torch.cat(begins),
    )
    validation = {}
    if natural is not None:
        for name, (ids, other) in natural.get().items():
            tokens = torch.from_numpy(ids.astype(numpy.int32))
            if name.startswith("val "):
                validation[name[4:]] = (tokens.long().to(device), other)
            else:
                sources[name] = (tokens, torch.from_numpy(other))
    RESULTS["tokens"] = {name: len(ids) for name, (ids, _) in sources.items()}
    log(f"tokens: {RESULTS['tokens']}")
    windows = Windows(sources, device)
    plan, report, life = options.plan.split(","), {}, None
    for number, entry in enumerate(plan):
        size, _, seed = entry.partition(":")
        if size == "best":
            best = max(report.values(), key=lambda t: (len(t["found"]), t["margin"]))
            size = best["size"]
            if life is None and best["checkpoints"]:
                for other in report.values():  # so that all that comes back is below what may come back
                    if other["size"] != size:
                        (OUT / f"{other['label']}.safetensors").unlink(missing_ok=True)
                log(f"best so far: {best['label']}; its checkpoints are measured")
                files = sorted(best["checkpoints"].glob("*.safetensors"))
                life = [(f.stem, pool.apply_async(measure_checkpoint, (folder, size, str(f)))) for f in files]
        label = f"{number}_{size}_seed{seed}"
        if CLOCK.left < 25:
            log("no time is left for " + entry)
            break
        checkpoints = (
            None if entry.startswith("best") else Path(tempfile.gettempdir(), "headwise_checkpoints", label)
        )
        for is_compiled in (True, False) if not options.eager and device == "cuda" else (False,):
            seconds = (CLOCK.left - 14 - 3 * (len(plan) - number)) / (len(plan) - number)
            try:
                report[label] = train(
                    label, size, int(seed), windows, folder, seconds, is_compiled, validation, checkpoints
                )
                report[label]["checkpoints"] = checkpoints
                report[label] = dict(report[label])
                RESULTS["trainings"][label].pop("checkpoints", None)
                keep_results()
                break
            except Exception as error:
                log(f"{label} failed, compiled {is_compiled}: {type(error).__name__}: {str(error)[:1500]}")
    if life is not None:
        RESULTS["life"] = {}
        for stem, wait in life:
            try:
                RESULTS["life"][stem] = wait.get(timeout=max(0.1, CLOCK.left - 4))
            except multiprocessing.TimeoutError:
                log(f"no time for {stem}")
            except Exception as error:
                log(f"{stem}: {type(error).__name__}: {error}")
        log(f"life: {list(RESULTS['life'])}")
        keep_results()
    results = OUT / "results.json"
    with lzma.open(OUT / "results.json.xz", "wb", preset=2) as file:
        file.write(results.read_bytes())
    results.unlink()
    pool.terminate()
    log("done")


if __name__ == "__main__":
    main()
