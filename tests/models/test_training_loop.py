"""`hw.models.fit`: what it trains, what it leaves alone, and that a training that was killed goes on."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import headwise as hw
from headwise.errors import ArgumentError
from headwise.models import TrainingStep, Transformer, TransformerConfig, fit
from headwise.models import batches as bars
from headwise.models.batches import token_loss

SOURCE = Path(hw.__file__).resolve().parents[1]


def a_model(seed: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh(), nn.Linear(7, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0] if isinstance(batch, list) else batch
    return (model(x).squeeze(-1) - x.sum(-1)).square().mean()


BATCHES = list(torch.randn(11, 3, 5, generator=torch.Generator().manual_seed(1)))


def a_loader(generator: torch.Generator | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.cat(BATCHES)), batch_size=3, shuffle=True, generator=generator, **options
    )


def drawn(epoch: int) -> Iterator[Tensor]:
    """Batches from torch's own random numbers, as they are needed."""
    for _ in range(7):
        yield torch.randn(3, 5)


def halfway(epoch: int) -> list[Tensor]:
    """An order of its own for each epoch."""
    order = torch.randperm(len(BATCHES), generator=torch.Generator().manual_seed(epoch))
    return [BATCHES[i] for i in order]


class Killed(Exception):
    pass


def kill_at(step: int) -> Any:
    def callback(message: TrainingStep) -> None:
        if message.step == step:
            raise Killed

    return callback


# Training


def test_it_is_the_loop_that_one_would_write() -> None:
    model, by_hand = a_model(), a_model()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    torch.manual_seed(2)
    expected = []
    for _ in range(2):
        for batch in BATCHES:
            optimizer.zero_grad()
            of_batch = loss(by_hand, batch)
            of_batch.backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
            optimizer.step()
            expected.append(of_batch.item())
    torch.manual_seed(2)
    history = fit(model, BATCHES, loss, epochs=2, lr=0.01)
    assert history.losses == expected and history.steps == 22 and not history.stopped
    assert repr(history).startswith(f"History(22 steps, loss {expected[0]:.4g} to {expected[-1]:.4g}, ")
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, *((1 + math.cos(math.pi * done / 4)) / 2 for done in range(4))]),
        (lambda step: 1 / (step + 1), [0.5, 0.5, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
    ],
    ids=["constant", "linear", "cosine", "a function"],
)
def test_the_rate_of_learning_rises_and_falls_by_the_schedule(schedule: Any, shares: list[float]) -> None:
    model, rates = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def note(message: TrainingStep) -> None:
        rates.append(message.optimizer.param_groups[0]["lr"])

    fit(model, BATCHES, loss, steps=6, optimizer=optimizer, warmup=2, schedule=schedule, callbacks=[note])
    assert rates == pytest.approx([0.2 * share for share in shares])
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_nothing_but_the_weights_is_changed() -> None:
    """Modes of every module, gradients, random numbers where there is a seed, how Ctrl-C is taken."""
    model = a_model().eval()
    model[1].train()
    before, handler = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    with torch.no_grad():
        losses = [fit(a_model(), BATCHES, loss, steps=13, seed=seed).losses for seed in (7, 7, 8)]
        fit(model, BATCHES, loss, seed=7)
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), before) and signal.getsignal(signal.SIGINT) is handler
    assert [each.training for each in model] == [False, True, False, False] and not model.training
    assert all(each.grad is None for each in model.parameters())


def test_callbacks_hear_of_every_step_and_one_of_them_ends_it() -> None:
    calls: list[TrainingStep] = []
    history = fit(
        a_model(), BATCHES, loss, epochs=3, callbacks=[lambda message: message.step == 12, calls.append]
    )
    assert [message.step for message in calls] == list(range(13)) and history.stopped and history.steps == 13
    assert [message.epoch for message in calls] == [0] * 11 + [1] * 2
    assert [message.loss for message in calls] == history.losses and all(message.norm for message in calls)
    assert calls[0].history is history


def test_a_monitor_is_a_callback_as_it_is(tmp_path: Path) -> None:
    model = hw.MultiHeadAttention(6, 2)
    batches = list(torch.randn(5, 2, 3, 6))

    def of_attention(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)[0].square().mean()

    monitor = hw.Monitor(model, every=4)
    fit(model, batches, of_attention, epochs=2, callbacks=[monitor], checkpoint=tmp_path / "run.pt")
    assert [step for step, _ in monitor.history] == [0, 4, 8] and monitor.number == 10
    later = hw.Monitor(model, every=4)
    fit(model, batches, of_attention, epochs=3, callbacks=[later], checkpoint=tmp_path / "run.pt")
    assert [step for step, _ in later.history] == [10, 12] and later.number == 15


def test_batches_go_where_the_model_is() -> None:
    calls = []

    def of_mapping(model: nn.Module, batch: Any) -> Tensor:
        calls.append({name: getattr(each, "device", each) for name, each in batch.items()})
        return model(batch["x"]).square().mean()

    model = nn.Linear(5, 1, device="meta")
    with pytest.raises(RuntimeError, match="meta"):  # where a loss has no value
        fit(model, [{"x": torch.ones(3, 5), "name": "a"}], of_mapping)
    assert calls == [{"x": torch.device("meta"), "name": "a"}]


def test_the_loss_of_a_transformer_is_of_the_next_real_token() -> None:
    sizes = {"vocab_size": 17, "d_model": 12, "num_heads": 2, "num_layers": 1, "positions": "sinusoidal"}
    model = Transformer(TransformerConfig(**sizes)).double()
    ids, lengths = torch.randint(17, (3, 7)), [7, 2, 5]
    logs = [model(ids[i : i + 1, :n]).log_softmax(-1)[0] for i, n in enumerate(lengths)]
    each = [-log[at, ids[i, at + 1]] for i, log in enumerate(logs) for at in range(lengths[i] - 1)]
    of_ids = token_loss(model, {"ids": ids, "lengths": lengths})
    torch.testing.assert_close(of_ids, torch.stack(each).mean())
    labels = ids.masked_fill(torch.arange(7) >= torch.tensor(lengths)[:, None], -100)
    torch.testing.assert_close(token_loss(model, {"ids": ids, "labels": labels}), of_ids)
    assert fit(model, [ids, [ids]], epochs=2).steps == 4
    both = Transformer(TransformerConfig(kind="encoder-decoder", **sizes)).double()
    messages = token_loss(both, {"ids": ids, "target_ids": ids, "target_lengths": lengths})
    of_each = [both(ids[i : i + 1], ids[i : i + 1, :n]).log_softmax(-1)[0] for i, n in enumerate(lengths)]
    each = [-log[at, ids[i, at + 1]] for i, log in enumerate(of_each) for at in range(lengths[i] - 1)]
    torch.testing.assert_close(messages, torch.stack(each).mean())
    with pytest.raises(ArgumentError, match="batches must contain ids and target_ids: got ids"):
        fit(both, [ids])
    with pytest.raises(ArgumentError, match="by lengths, not a mask: got ids, mask"):
        fit(model, [{"ids": ids, "mask": torch.ones(3, 1, 1, 7, dtype=torch.bool)}])
    with pytest.raises(ArgumentError, match="without an output: got None for kind='encoder'"):
        fit(Transformer(TransformerConfig(kind="encoder", **sizes)), [ids])


# Going on


SOURCES: dict[str, Any] = {
    "a list": lambda: BATCHES,
    "drawn from torch": lambda: drawn,
    "an order of its own each epoch": lambda: halfway,
    "a shuffled loader": a_loader,
    "a loader with a generator": lambda: a_loader(torch.Generator().manual_seed(5)),
    "a sampler with a generator": lambda: DataLoader(
        TensorDataset(torch.cat(BATCHES)),
        batch_size=3,
        sampler=torch.utils.data.RandomSampler(
            torch.cat(BATCHES), replacement=True, generator=torch.Generator().manual_seed(5)
        ),
    ),
}


@pytest.mark.thinned(
    99, keep=[f"{killed}-{name}" for killed, name in zip([5, 11, 24] * 2, SOURCES, strict=True)]
)
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("killed", [5, 11, 24])
def test_a_training_that_was_killed_goes_on_with_the_same_losses(
    make: Any, killed: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 31, "every": 5, "schedule": "cosine", "lr": 0.01}
    torch.manual_seed(4)
    whole_model = a_model()
    whole = fit(whole_model, make(), loss, **options)
    after = torch.get_rng_state()
    torch.manual_seed(4)
    place = tmp_path / "training.pt"
    with pytest.raises(Killed):
        fit(a_model(), make(), loss, checkpoint=place, callbacks=[kill_at(killed)], **options)
    torch.manual_seed(99)
    model = a_model(seed=8)
    history = fit(model, make(), loss, checkpoint=place, **options)
    assert history.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole_model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), after)


def test_a_training_that_ended_is_not_begun_again_and_can_be_longer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "training.pt", "seed": 3}
    short = fit(a_model(), halfway, loss, epochs=2, **options)
    written = (tmp_path / "training.pt").stat().st_mtime_ns
    again = fit(a_model(), halfway, loss, epochs=2, **options)
    assert again.losses == short.losses and (tmp_path / "training.pt").stat().st_mtime_ns == written
    longer = fit(a_model(), halfway, loss, epochs=3, **options)
    assert longer.losses == fit(a_model(), halfway, loss, epochs=3, seed=3).losses
    assert longer.losses[:22] == short.losses
    anew = fit(a_model(), halfway, loss, epochs=1, resume=False, **options)
    assert anew.losses == short.losses[:11]


def test_a_training_that_a_callback_ended_stays_ended(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "training.pt", "steps": 9}
    stopped = fit(a_model(), BATCHES, loss, callbacks=[lambda message: message.step == 3], **options)
    again = fit(a_model(), BATCHES, loss, **options)
    assert stopped.steps == again.steps == 4 and again.stopped


def test_ctrl_c_ends_the_step_and_saves(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "training.pt", "steps": 9, "seed": 3}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:

        def interrupted(model: nn.Module, batch: Tensor) -> Tensor:
            if batch is BATCHES[4]:
                os.kill(os.getpid(), signal.SIGINT)
            return loss(model, batch)

        with pytest.raises(KeyboardInterrupt):
            fit(a_model(), BATCHES, interrupted, **options)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(torch.load(tmp_path / "training.pt", weights_only=True)["history"]["losses"]) == 5
    assert (
        fit(a_model(), BATCHES, loss, **options).losses
        == fit(a_model(), BATCHES, loss, steps=9, seed=3).losses
    )


def test_a_half_written_file_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing ends in the middle, as on a full disk: the checkpoint before is the one that is read."""
    place, save = tmp_path / "training.pt", torch.save
    left = tmp_path / ".training.pt.4194304999.part"
    left.write_bytes(b"half of one, of a process that was killed")
    fit(a_model(), BATCHES, loss, steps=5, checkpoint=place, seed=3)
    assert [each.name for each in tmp_path.iterdir()] == ["training.pt"]

    def full_disk(content: Any, file: Any) -> None:
        if isinstance(content, dict):
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(content, file)

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(ArgumentError, match=r"checkpoint must be writable: .*No space left"):
        fit(a_model(), BATCHES, loss, steps=9, checkpoint=place, seed=3)
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] == ["training.pt"]
    history = fit(a_model(), BATCHES, loss, steps=9, checkpoint=place, seed=3)
    assert history.losses == fit(a_model(), BATCHES, loss, steps=9, seed=3).losses


SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import headwise as hw

torch.set_num_threads(1)
def loss(model, batch):
    return (model(batch[0]).squeeze(-1) - batch[0].sum(-1)).square().mean()
def tell(told):
    print(told.step, flush=True)
def train(place):
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(53, 5)), batch_size=3, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 301), nn.Dropout(0.3), nn.Linear(301, 1))
    history = hw.models.fit(model, data, loss, steps=131, checkpoint=place, every=1, callbacks=[tell])
    print("losses:", *history.losses)
for place in sys.argv[1:]:
    train(place or None)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_changes_nothing(tmp_path: Path) -> None:
    """Killed some steps on, while it writes a checkpoint at every step."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    place = str(tmp_path / "training.pt")
    process = start(place)
    assert process.stdout is not None
    reached = [int(process.stdout.readline()) for _ in range(72)][-1]
    process.kill()
    process.communicate()
    process = start(place, "")  # the rest of it, then all of it without a file
    message = process.communicate()[0].splitlines()
    resumed, whole = (line for line in message if line.startswith("losses: "))
    assert process.returncode == 0 and resumed == whole and len(whole.split()) == 132
    assert message.index(resumed) <= 132 - reached  # it went on from there; one step may not have been saved


# What is refused


def test_a_checkpoint_of_another_training_is_refused_by_words(tmp_path: Path) -> None:
    place = tmp_path / "training.pt"
    options: dict[str, Any] = {"checkpoint": place, "steps": 7}
    fit(a_model(), BATCHES, loss, **{**options, "steps": 5})
    model, wide, other = a_model(), a_model().double(), nn.Linear(5, 1)
    SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
    decayed = AdamW(model.parameters(), lr=0.001, weight_decay=0.5)
    groups = AdamW([{"params": each.parameters()} for each in (model[0], model[3])], lr=0.001)
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (model, {"lr": 0.5}, r"lr is \[0.5\] here and \[0.001\] in"),
        (model, {"clip": None}, "clip is None here and 1.0 in"),
        (model, {"seed": 3}, "seed is 3 here and None in"),
        (model, {"schedule": "cosine"}, "schedule is cosine here and constant in"),
        (model, {"optimizer": SGD(model.parameters(), lr=0.001)}, "optimizer is SGD here and AdamW in"),
        (model, {"optimizer": decayed}, r"the optimizer's weight_decay is \[0.5\] here and \[0.01\] in"),
        (model, {"optimizer": AdamW(model[0].parameters())}, r"parameters is \[2\] here and \[4\] in"),
        (model, {"optimizer": groups}, r"lr is \[0.001, 0.001\] here"),
        (other, {}, r"the model's weight is \[1, 5\] torch.float32 here and absent in"),
        (wide, {}, r"model's 0.weight is \[7, 5\] torch.float64 here and \[7, 5\] torch.float32"),
    ]
    for model, change, message in cases:
        before = [each.clone() for each in model.parameters()]
        with pytest.raises(ArgumentError, match="checkpoint must have the same settings: .*" + message):
            fit(model, BATCHES, loss, **{**options, **change})
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "training.pt"
    for content, messages in (({"weights": 3}, "holds something else"), (None, r"cannot be read \(")):
        place.write_bytes(b"PK half")
        if content is not None:
            torch.save(content, place)
        with pytest.raises(ArgumentError, match=f"must be a file that fit wrote: '.*training.pt' {messages}"):
            fit(a_model(), BATCHES, loss, checkpoint=place)
    with pytest.raises(ArgumentError, match=r"existing folder: '.*nowhere' does not exist"):
        fit(a_model(), BATCHES, loss, checkpoint=tmp_path / "nowhere" / "training.pt")
    with pytest.raises(ArgumentError, match=r"checkpoint must be a file: '.*' is a folder"):
        fit(a_model(), BATCHES, loss, checkpoint=tmp_path)


def test_batches_that_come_in_another_order_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "training.pt", "steps": 9}
    fit(a_model(), BATCHES, loss, **{**options, "steps": 5})
    with pytest.raises(
        ArgumentError, match="the same as before the checkpoint: the first batch of epoch 0 differs"
    ):
        fit(a_model(), BATCHES[::-1], loss, **options)
    with pytest.raises(ArgumentError, match="epoch 0 now has 3 batches, fewer than the 5 done"):
        fit(a_model(), BATCHES[:3], loss, **options)


def test_a_loss_that_is_no_number_is_told_with_its_step_before_it_does_harm() -> None:
    model = a_model()
    spoilt = [*BATCHES[:3], torch.full((3, 5), torch.nan)]
    with pytest.raises(ArgumentError, match="at step 3 the loss is nan and its gradient's norm nan"):
        fit(model, spoilt, loss)
    with pytest.raises(ArgumentError, match="at step 3 the loss is nan; lower lr"):
        fit(model, spoilt, loss, clip=None)
    assert all(each.isfinite().all() for each in model.parameters())
    with pytest.raises(ArgumentError, match="at step 0 the loss is 0 and its gradient's norm nan"):
        fit(model, BATCHES, lambda model, batch: (model(batch).sum() * 0).sqrt())


def test_what_makes_no_sense_is_refused() -> None:
    model, other = a_model(), a_model()

    def refused(messages: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ArgumentError, match=messages):
            fit(*args, **options)

    refused("batches must not be empty: got 0", model, [], loss)
    refused("batches must not be empty: got 0", model, iter(BATCHES), loss, epochs=2)
    refused("batches must be an iterable of batches: got int", model, lambda epoch: 3, loss)
    refused("steps must not be given with epochs: got 5 and 2", model, BATCHES, loss, steps=5, epochs=2)
    for name, count in (("steps", 0), ("epochs", 1.5), ("every", -1), ("warmup", -3)):
        messages = f"{name} must be a whole number, at least 1: got {count}"
        refused(messages, model, BATCHES, loss, **{name: count})
    refused("clip must be above 0: got 0", model, BATCHES, loss, clip=0)
    refused("torch.bfloat16: got torch.float16", model, BATCHES, loss, autocast=torch.float16)
    refused("known: got 'cosin'; did you mean 'cosine'", model, BATCHES, loss, schedule="cosin")
    refused(
        "steps must be given for batches without a length: got schedule='linear'",
        model,
        drawn,
        loss,
        schedule="linear",
    )
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    refused(
        r"4 of its parameters, the first \[7, 5\], are not in Sequential", model, BATCHES, loss, optimizer=sgd
    )
    refused("lr must not be given with an optimizer: got 0.3", other, BATCHES, loss, optimizer=sgd, lr=0.3)
    refused("Sequential has 0 of 4 that require", a_model().requires_grad_(False), BATCHES, loss)
    refused(r"return one number as a tensor: got shape \[3, 1\]", model, BATCHES, lambda m, x: m(x))


def test_a_long_training_says_a_line_a_minute_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(bars, "monotonic", lambda: float(next(clock)))
    fit(a_model(), BATCHES, lambda model, batch: model(batch).mean() * 0 + 0.5, steps=7)
    assert capsys.readouterr().err == (
        "training: step 3 of 7, loss 0.5, 0.04 steps/s\ntraining: step 6 of 7, loss 0.5, 0.04 steps/s\n"
    )
    fit(a_model(), BATCHES, loss, steps=7, progress=False)
    assert capsys.readouterr().err == ""
