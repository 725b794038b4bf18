"""What the whole thing is for: long inputs on a small machine. Slow, so `make test-slow` runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from benchmarks.cases.maps import DENSE
from benchmarks.memory import in_fresh_process
from torch import Tensor

import headwise as hw
from headwise.engines.scores import Scores
from judge import error


def rows_in_float64(q: Tensor, k: Tensor, rows: list[int]) -> Tensor:
    """Causal weights of some queries by definition, [H, rows, S]."""
    S = k.shape[2]
    s = q[0, :, rows].double() @ k[0].double().transpose(-2, -1) / q.shape[-1] ** 0.5
    hidden = torch.arange(S) > torch.tensor(rows)[:, None]
    return s.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.slow
def test_statistics_take_a_twentieth_of_the_dense_routes_memory() -> None:
    ours = in_fresh_process("statistics_L4096", "headwise")["extra_bytes"]
    dense = in_fresh_process("statistics_L4096", DENSE)["extra_bytes"]
    assert dense > 8 * 4096 * 4096 * 4, f"the dense route must hold its matrix: {dense} bytes"
    assert ours <= dense / 20, f"{ours} of {dense} bytes"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_statistics_of_32768_tokens_stay_within_a_hundredth_of_the_weights() -> None:
    actual = in_fresh_process("statistics_L32768", "headwise", H=1)
    assert actual["extra_bytes"] is not None, actual["how"]
    assert actual["extra_bytes"] <= 32768**2 * 4 / 100, actual


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_statistics_of_32768_tokens_are_exact() -> None:
    q, k = torch.randn(2, 1, 1, 32768, 64, generator=torch.Generator().manual_seed(5))
    stats = hw.AttentionMap(q, k, causal=True).statistics(per="query")
    rows = [0, 1, 127, 128, 20011, 32767]
    p = rows_in_float64(q, k, rows)
    at, keys = torch.tensor(rows)[:, None], torch.arange(32768)
    truth = {
        "entropy": -torch.xlogy(p, p).sum(-1),
        "confidence": p.amax(-1),
        "distance": (p * (at - keys).abs()).sum(-1),
        "first": p[..., 0],
        "itself": p.gather(-1, at[None]).squeeze(-1),
    }
    for name, expected in truth.items():
        largest = expected.abs().max().item()
        assert error(stats[name][0][:, rows], expected) <= 32 * torch.finfo(torch.float32).eps * largest, name
    assert abs(stats.received.double().sum().item() / 32768 - 1) < 1e-6


@pytest.mark.slow
def test_the_first_call_in_a_process_is_as_exact_as_the_second() -> None:
    """torch's exp, first called by two threads at once, gave one of them five digits: 3 of 20 processes.

    The processes are copies of one that has imported torch and called nothing of it.
    """
    script = """
import os, traceback
import torch, headwise as hw
hw.AttentionMap

def compare():
    torch.set_num_threads(2); torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, 4096, 64)
    torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    part = q[:, :, -128:]
    first, second = (hw.AttentionMap(part, k).lse for _ in range(2))
    assert torch.equal(first, second), (first - second).abs().max()

for _ in range(8):
    if not (process := os.fork()):
        try:
            compare()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_one_row_of_131072_tokens_costs_one_row_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    one_head = torch.randn(2, 1, 1, 131072, 64, generator=torch.Generator().manual_seed(6))
    q, k = one_head.expand(2, 1, 32, -1, -1)
    touched = []
    tile, whole = Scores.tile, Scores.full

    def counted(self: Scores, rows: slice, columns: slice) -> Tensor:
        actual = tile(self, rows, columns)
        touched.append(actual.numel())
        return actual

    def all_counted(self: Scores) -> Tensor:
        before = len(touched)
        actual = whole(self)
        touched[before:] = [actual.numel()]
        return actual

    monkeypatch.setattr(Scores, "tile", counted)
    monkeypatch.setattr(Scores, "full", all_counted)
    row = hw.AttentionMap(q, k)[0, 3, 100000:100001, :][0]
    assert sum(touched) == 131072
    short = hw.AttentionMap(q, k)[0, 3, 100000]  # without tiles
    assert sum(touched) == 131072 and error(short, row) <= 1e-6 * row.max().item()
    truth = (k[0, 3].double() @ q[0, 3, 100000].double() / 8).softmax(-1)
    assert error(row, truth) <= 1e-6 * truth.max().item()


@pytest.mark.slow
def test_a_picture_of_131072_tokens_fits_in_memory_and_sums_to_them() -> None:
    q, k = torch.randn(2, 1, 1, 131072, 8, generator=torch.Generator().manual_seed(7))
    picture = hw.AttentionMap(q, k, window=512).pooled(128)
    assert picture.shape == (1, 1, 128, 128)
    assert abs(picture.sum().item() / 131072 - 1) < 1e-5
    assert picture[0, 0].tril(-2).abs().max() == 0 and picture[0, 0].triu(1).abs().max() == 0
