"""The extra memory of one call, at its peak: what is held beyond the inputs, the result included.

On a GPU torch counts it. On a CPU a fresh process makes the inputs, runs the arm once at a tiny size (so that
libraries and threads are there), gives free memory back to the system, and then makes the one call that
counts, while the kernel keeps the high-water mark: VmHWM, reset through /proc/self/clear_refs. Where that
cannot be reset, a thread looks at the resident size every millisecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from .registry import Arm, around, choose

__all__ = ["in_fresh_process", "main", "on_cuda", "peak_of"]

HERE = Path(__file__).resolve().parent
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def on_cuda(arm: Arm) -> dict[str, Any]:
    """Extra bytes torch allocated on the GPU during one call of an arm that has run before."""
    with around(arm):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        arm()
        torch.cuda.synchronize()
    return {"extra_bytes": torch.cuda.max_memory_allocated() - before, "how": "torch.cuda"}


def in_fresh_process(case: str, arm: str, tiny: bool = False, seconds: float = 900) -> dict[str, Any]:
    """Extra bytes of one call of an arm on the CPU, measured in a process of its own."""
    request = {"case": case, "arm": arm, "tiny": tiny, "threads": torch.get_num_threads()}
    places = [str(HERE.parent), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory"],
        input=json.dumps(request),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(place for place in places if place)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"extra_bytes": None, "how": f"the process ended with {done.returncode}: {last[:200]}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def peak_of(arm: Arm) -> dict[str, Any]:
    """Extra bytes of one call in this process, which should be fresh."""
    _give_back()
    if _reset_mark():
        before = _kilobytes("VmRSS")
        with around(arm):
            kept = arm()
        extra, how = _kilobytes("VmHWM") - before, "VmHWM"
        del kept
    else:
        extra, how = _sampled(arm), "sampled"
    return {"extra_bytes": max(0, extra) * 1024, "how": how}


def _sampled(arm: Arm) -> int:
    before = highest = _kilobytes("VmRSS")
    done = threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, _kilobytes("VmRSS"))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        with around(arm):
            kept = arm()
        highest = max(highest, _kilobytes("VmRSS"))
        del kept
    finally:
        done.set()
        watcher.join()
    return highest - before


def _reset_mark() -> bool:
    """Set the high-water mark to what is resident now; False where that is not allowed."""
    try:
        CLEAR.write_text("5")
        # some kernels take the write and do nothing
        return _kilobytes("VmHWM") <= _kilobytes("VmRSS") * 1.02 + 1024
    except OSError:
        return False


def _kilobytes(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"{STATUS} has no {name}: memory on a CPU is measured on Linux only")


def _give_back() -> None:
    """Hand freed memory back, so that a call cannot hide in what an earlier one left."""
    import gc

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    """Measure the arm named on standard input; the answer goes to standard output."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    case = next(case for case in choose() if case.name == request["case"])
    small = case.prepare("cpu", tiny=True).arms[request["arm"]]
    with around(small):
        small()
    arm = case.prepare("cpu", request["tiny"]).arms[request["arm"]]
    json.dump(peak_of(arm), sys.stdout)


if __name__ == "__main__":
    main()
