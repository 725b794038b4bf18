"""Peak memory of one call beyond its inputs, including the result.

On a GPU torch counts it. On a CPU a fresh process makes the inputs, runs the arm once at a tiny size (so that
libraries and threads are there), gives free memory back to the system, and then makes the one call that
counts, while the kernel keeps the high-water mark: VmHWM, reset through /proc/self/clear_refs. Where that
cannot be reset, ballast is taken on until what is resident is at the mark. Nothing here looks at a clock or
needs a thread to be scheduled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .cases import choose
from .registry import Arm, around

FOLDER = Path(__file__).resolve().parent
GIVES_BACK = {"MIMALLOC_PURGE_DELAY": "0"}  # torch's allocator on ARM keeps what is freed
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def on_cuda(arm: Arm) -> dict[str, Any]:
    """Return the extra bytes that torch allocates on the GPU in a call of an arm that has run before."""
    with around(arm):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        arm()
        torch.cuda.synchronize()
    return {"extra_bytes": torch.cuda.max_memory_allocated() - before, "how": "torch.cuda"}


def in_fresh_process(
    case: str, arm: str, tiny: bool = False, seconds: float = 900, **sizes: int
) -> dict[str, Any]:
    """Return the extra bytes of a call on the CPU, in a new process; `sizes` replace those of the case."""
    request = {"case": case, "arm": arm, "tiny": tiny, "threads": torch.get_num_threads(), "sizes": sizes}
    places = [str(FOLDER.parent), str(FOLDER.parent / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory"],
        input=json.dumps(request),
        env={**os.environ, **GIVES_BACK, "PYTHONPATH": os.pathsep.join(place for place in places if place)},
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"extra_bytes": None, "how": f"the process ended with {done.returncode}: {last[:200]}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def peak_of(arm: Arm) -> dict[str, Any]:
    """Return the extra bytes of a call in this process, which should be new and have `GIVES_BACK` set."""
    _give_back()
    if not _gives_back():
        method = "this process keeps what it frees, and a call would hide in that; start it with "
        return {
            "extra_bytes": None,
            "how": method + " ".join(f"{name}={x}" for name, x in GIVES_BACK.items()),
        }
    method, ballast = "VmHWM", None
    if not _reset_mark():
        method, ballast = "VmHWM over ballast", _ballast()
        if _mark() > _kilobytes("VmRSS") * 1.02 + 1024:
            return {
                "extra_bytes": None,
                "how": "the high-water mark does not follow what is resident",
            }
    before = _kilobytes("VmRSS")
    with around(arm):
        result = arm()
    extra = _mark() - before
    del result, ballast
    return {"extra_bytes": max(0, extra) * 1024, "how": method}


def _mark() -> int:
    """Return the peak resident memory in kilobytes: of this program, or else of the process."""
    try:
        return _kilobytes("VmHWM")
    except RuntimeError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _ballast() -> mmap.mmap:
    """Return an allocation that brings resident memory up to its peak, so that every new one raises it."""
    size = max(0, _mark() - _kilobytes("VmRSS")) * 1024 + 2**20
    ballast = mmap.mmap(-1, size)
    ballast[:: mmap.PAGESIZE] = bytes([1]) * -(-size // mmap.PAGESIZE)
    return ballast


def _gives_back() -> bool:
    """Return True if memory that torch frees goes back to the system: tested with 32 MiB."""
    block = torch.ones(32 * 2**20, dtype=torch.uint8)
    held = _kilobytes("VmRSS")
    del block
    _give_back()
    return held - _kilobytes("VmRSS") > 16 * 2**10


def _reset_mark() -> bool:
    """Reset the peak of resident memory; return False if that is not allowed."""
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
    """Give freed memory back to the system, so that a call cannot reuse it unseen."""
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
    case = replace(case, sizes={**case.sizes, **request["sizes"]})
    arm = case.prepare("cpu", request["tiny"]).arms[request["arm"]]
    json.dump(peak_of(arm), sys.stdout)


if __name__ == "__main__":
    main()
