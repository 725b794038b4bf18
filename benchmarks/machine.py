"""The machine, versions and commit of a run, without which its numbers mean nothing."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import headwise

ROOT = Path(__file__).resolve().parents[1]


def describe(device: str, commit: str | None = None) -> dict[str, Any]:
    """Return machine, versions and commit, for the head of a report.

    Args:
        commit: to be believed, where git does not know what this tree is.
    """
    return {
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": _machine(device),
        "versions": _versions(device),
        **_source(commit),
    }


def _machine(device: str) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return machine


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    if not any(
        line.startswith("model name") for line in lines
    ):  # as on ARM, where lscpu knows the number's name
        lines = (_output_of("lscpu") or "").splitlines()
    named = (line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _versions(device: str) -> dict[str, Any]:
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "headwise": headwise.__version__,
    }
    if device == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return versions


def _installed(package: str) -> str | None:
    try:
        return str(version(package))
    except PackageNotFoundError:
        return None


def _source(commit: str | None) -> dict[str, Any]:
    """Return the commit, True if package or benchmarks differ from it, and a digest of the sources."""
    digest = hashlib.sha256()
    package = Path(headwise.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    head = _output_of("git", "rev-parse", "HEAD")
    changes = _output_of("git", "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    return {
        "commit": commit or head,
        "dirty": None if commit or head is None else bool(changes),
        "sources": digest.hexdigest()[:16],
    }


def _output_of(*command: str) -> str | None:
    """Return the output of a command; None if it cannot run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
