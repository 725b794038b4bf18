"""The memory budget: sizes in words, limits that nest, and refusals that say by how much."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise import budget
from headwise.budget import bytes_allowed, check, limit, parse, readable
from headwise.errors import ArgumentError, BudgetExceeded

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30
NO_LIMIT = 2**63 - 1


# Sizes in words


@pytest.mark.parametrize(
    ("size", "intended"),
    [
        (1, 1),
        (12_345, 12_345),
        ("7 B", 7),
        ("2 KiB", 2048),
        ("2 kB", 2000),
        ("512 MiB", 512 * MIB),
        ("5 MB", 5_000_000),
        ("2 GiB", 2 * GIB),
        ("3 GB", 3_000_000_000),
        ("1.5 GiB", 3 * GIB // 2),
        ("2gib", 2 * GIB),
        ("  11 MIB ", 11 * MIB),
    ],
)
def test_a_size_is_read_from_a_number_or_words(size: int | str, intended: int) -> None:
    assert parse(size) == intended


@pytest.mark.parametrize("size", [0, -5, "0 GiB", "GiB", "2", "2 apples", "-3 GiB", "", True, 1.5, None])
def test_a_size_that_is_none_is_refused_by_name(size: object) -> None:
    messages = f'budget must be a positive number of bytes: got {size!r}; use e.g. "2 GiB"'
    with pytest.raises(ArgumentError, match=re.escape(messages)):
        parse(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1025, "1.1 KiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (2 * GIB, "2 GiB"),
        (2 * GIB + 1, "2.1 GiB"),
        (69 * GIB, "69 GiB"),
        (5000 * GIB, "4.9 TiB"),
    ],
)
def test_a_size_in_words_is_rounded_up(size: int, words: str) -> None:
    assert readable(size) == words


@given(st.integers(1, 2**45))
def test_a_limit_set_to_the_words_for_a_size_lets_that_size_through(size: int) -> None:
    assert size <= parse(readable(size)) <= size + size / 10 + 1


# Limits


def test_limits_nest_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda device: 1000)
    assert bytes_allowed(CPU) == 500
    with limit("2 GiB"):
        assert bytes_allowed(CPU) == 2 * GIB
        with limit(7):
            assert bytes_allowed(CPU) == 7
        assert bytes_allowed(CPU) == 2 * GIB
    assert bytes_allowed(CPU) == 500


def test_a_limit_stays_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda device: 1000)
    calls: list[int] = []
    with limit(7):
        thread = threading.Thread(target=lambda: calls.append(bytes_allowed(CPU)))
        thread.start()
        thread.join()
    assert calls == [500]


# Refusals


def test_a_refusal_tells_both_sizes_and_the_way_out() -> None:
    with limit("2 MiB"), pytest.raises(BudgetExceeded) as caught:
        check(3 * MIB, CPU, "dense weights [2, 3, 5, 7]", "take one head with weights[0, 3]")
    assert str(caught.value) == (
        "dense weights [2, 3, 5, 7] must fit the memory budget: 3 MiB > 2 MiB; "
        'take one head with weights[0, 3], or raise the budget: with headwise.budget.limit("3 MiB")'
    )


def test_exactly_the_budget_fits_and_one_byte_more_does_not() -> None:
    with limit(1000):
        check(1000, CPU, "a row", "take half")
        with pytest.raises(BudgetExceeded, match="a row must fit the memory budget: 1001 B > 1000 B;"):
            check(1001, CPU, "a row", "take half")


def test_a_budget_for_one_call_comes_before_the_limit() -> None:
    with limit(10):
        check(100, CPU, "a row", "take half", allowed=100)
        with pytest.raises(BudgetExceeded, match="9 B > 8 B"):
            check(9, CPU, "a row", "take half", allowed=8)


def test_small_results_are_fine_without_asking_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def free_bytes(device: torch.device) -> int:
        raise AssertionError("the system was asked")

    monkeypatch.setattr(budget, "free_bytes", free_bytes)
    check(budget.ALWAYS_FINE, CPU, "a row", "take half")
    with pytest.raises(AssertionError, match="the system was asked"):
        check(budget.ALWAYS_FINE + 1, CPU, "a row", "take half")


def test_without_a_limit_half_of_what_is_free_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda device: 4 * GIB)
    check(2 * GIB, CPU, "a matrix", "take a row")
    with pytest.raises(BudgetExceeded, match=r"a matrix must fit the memory budget: 2\.1 GiB > 2 GiB;"):
        check(2 * GIB + 1, CPU, "a matrix", "take a row")


# What is free


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Writes files of a made-up system, the only ones the budget then sees."""
    monkeypatch.setattr(budget, "Path", lambda path: tmp_path / str(path).lstrip("/"))

    def write(path: str, text: str) -> None:
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


def test_free_memory_is_what_the_system_says_is_available(system: Callable[[str, str], None]) -> None:
    system("/proc/meminfo", "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:     700 kB\n")
    assert budget.free_bytes(CPU) == 700 * 1024


def test_a_container_may_leave_less_than_the_system(system: Callable[[str, str], None]) -> None:
    system("/proc/meminfo", "MemAvailable:     700 kB\n")
    system("/sys/fs/cgroup/memory.max", "300000\n")
    system("/sys/fs/cgroup/memory.current", "150000\n")
    system("/sys/fs/cgroup/memory.stat", "anon 90000\ninactive_file 50000\n")  # given up when asked
    assert budget.free_bytes(CPU) == 200_000
    with pytest.raises(BudgetExceeded, match=re.escape("64.1 MiB > 97.7 KiB")):
        check(budget.ALWAYS_FINE + 1, CPU, "a matrix", "take a row")


def test_a_container_without_a_limit_takes_nothing_away(system: Callable[[str, str], None]) -> None:
    system("/sys/fs/cgroup/memory.max", "max\n")
    system("/sys/fs/cgroup/memory.current", "100000\n")
    assert budget._container_free() == NO_LIMIT


def test_a_container_that_is_over_its_limit_leaves_nothing(system: Callable[[str, str], None]) -> None:
    system("/sys/fs/cgroup/memory.max", "100\n")
    system("/sys/fs/cgroup/memory.current", "300\n")
    system("/sys/fs/cgroup/memory.stat", "inactive_file 7\n")
    assert budget._container_free() == 0


@pytest.mark.usefixtures("system")
def test_without_such_files_all_of_the_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 11}.__getitem__)
    assert budget.free_bytes(CPU) == 11 * 4096


def test_on_cuda_what_torch_holds_but_does_not_use_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index * 1000, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: device.index * 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: device.index * 10)
    assert budget.free_bytes(torch.device("cuda", 3)) == 3270
