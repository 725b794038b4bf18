"""The traffic between devices, counted, beside the formulas of docs/guides/scale.md.

    python -m benchmarks.scale                  heads and sequences over 2 and 4 processes, on this machine
    python -m benchmarks.scale --out DIR        the same, written to DIR/scale.json

Bytes are counted where `torch.distributed` is called, in each process, for a forward and its backward; the
formulas are worked out from sizes alone. Processes meet over gloo: bytes are the same on any network.

Letters: B batch, T query_len, E d_model, H num_heads, Hk num_kv_heads, D head_dim, N layers, n ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import headwise as hw
from headwise.whole_files import whole_file

RANKS = (2, 4)
SIZES = {"B": 2, "T": 48, "E": 32, "H": 8, "N": 2}
BYTES = 4  # of float32
Counts = dict[str, int]


def expected(way: str, n: int) -> Counts:
    """Return the bytes of a rank's collectives and messages, by the formulas."""
    B, T, E, N = (SIZES[letter] for letter in "BTEN")
    activations = B * T * E * BYTES
    if way == "heads":  # attention and feed-forward: one sum on the way out, one on the way back in
        return {"forward": 2 * N * activations, "backward": 2 * N * activations}
    block = 2 * activations // n  # k and v of one rank
    return {"forward": N * (n - 1) * block, "backward": N * 2 * (n - 1) * block}


def counted(way: str, n: int) -> Counts:
    """Return the bytes as counted by the first of n processes."""
    processes = multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        running = [processes.Process(target=_rank, args=(rank, n, meeting, way, sender)) for rank in range(n)]
        for process in running:
            process.start()
        try:
            while not receiver.poll(1):
                if any(process.exitcode for process in running):
                    raise RuntimeError(f"a process of {n} ended before it answered: {way}")
            counts: Counts = receiver.recv()
        finally:
            for process in running:
                process.join(20)
                process.kill()
    return counts


def _rank(rank: int, n: int, meeting: str, way: str, end: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n)
    B, T, E, H, N = (SIZES[letter] for letter in "BTEHN")
    torch.manual_seed(0)
    config = hw.models.TransformerConfig(vocab_size=64, d_model=E, num_heads=H, num_layers=N, max_length=T)
    model, ids = hw.models.Transformer(config), torch.randint(64, (B, T))
    mesh = init_device_mesh("cpu", (n,))
    if way == "heads":
        hw.parallel.shard_heads(model, mesh)
    else:
        hw.parallel.shard_sequence(model, mesh, length=T)
        ids = hw.parallel.split(ids, mesh, dim=1)
    with _counting() as sent:
        loss = model(ids).square().mean()
        forward = sum(sent)
        loss.backward()
    if rank == 0:
        end.send({"forward": forward, "backward": sum(sent) - forward})
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Count the bytes of tensors that are summed over ranks or sent to one."""
    sent: list[int] = []
    all_reduce, batch = dist.all_reduce, dist.batch_isend_irecv

    def summed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    def passed(operations: list[dist.P2POp]) -> Any:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch(operations)

    dist.all_reduce, dist.batch_isend_irecv = summed, passed
    try:
        yield sent
    finally:
        dist.all_reduce, dist.batch_isend_irecv = all_reduce, batch


def main(arguments: list[str] | None = None) -> None:
    """Count and show the traffic, and write it with --out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="Bytes between devices.")
    parser.add_argument("--out", type=Path, help="folder for scale.json")
    out: Path | None = parser.parse_args(arguments).out
    table = Table("over devices", "ranks", "way", "formula", "counted")
    rows = []
    for way in ("heads", "sequence"):
        for n in RANKS:
            formula, counts = expected(way, n), counted(way, n)
            for part in ("forward", "backward"):
                rows.append({"over": way, "ranks": n, "part": part} | _pair(formula[part], counts[part]))
                table.add_row(way, str(n), part, f"{formula[part]:,}", f"{counts[part]:,}")
    Console().print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with whole_file(out / "scale.json") as place:
            place.write_text(json.dumps({"sizes": SIZES, "rows": rows}, indent=1) + "\n")


def _pair(formula: int, count: int) -> Counts:
    return {"formula": formula, "counted": count}


if __name__ == "__main__":
    main()
