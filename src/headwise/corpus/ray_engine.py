"""The same survey as a job of Ray Data: every block is a row, every worker an actor that measures and writes.

Ray hands a block that was lost to another actor. That is safe: a block is one pair of files, the same whoever
writes it, and one that is there is not measured again. All machines must see the corpus and the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import needed
from ..models.pretrained import Pretrained, load
from .document_rows import Measure, Rows
from .documents import Plan, Texts
from .shards import Shards

if TYPE_CHECKING:
    from .survey import Options

__all__ = ["measured_by_ray"]

Given = str | os.PathLike[str] | nn.Module | Pretrained | None


class Worker:
    """Loads the model once, and measures one block after another."""

    def __init__(self, model: Given, plan: Plan, shards: Shards, options: Options) -> None:
        torch.set_num_threads(options.threads)
        assert not isinstance(model, nn.Module), "it comes with its tokenizer"
        trained = model if isinstance(model, Pretrained) else load(model)
        trained.model.eval()
        self.measure = Measure(trained, max_tokens=options.max_tokens)
        self.texts, self.shards = Texts(plan, options.field), shards

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Of each block, how many documents it has."""
        counts = []
        for number in map(int, batch["block"]):
            if not self.shards.has(number):
                rows = Rows()
                for document in self.texts.block(number):
                    self.measure.add(document, rows)
                self.shards.write(number, rows)
            counts.append(self.texts.plan.in_block(number))
        return {"documents": counts}


def measured_by_ray(
    plan: Plan,
    shards: Shards,
    model: Given,
    options: Options,
    workers: int | None,
    tell: Callable[[int, int], None],
) -> None:
    """Measure all blocks that are not finished.

    Args:
        model: by name, and then each worker loads it; or itself, and then it is sent to them.
        workers: how many; None: as many as the cluster has processors.

    Raises:
        PackageMissing: ray is not installed.
    """
    with needed("ray", "engine='ray' needs ray"):
        import ray
        import ray.data
    began_here = not ray.is_initialized()
    if began_here:
        ray.init(log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False  # there is one already
    try:
        there = Shards(shards.folder.resolve(), by_number=shards.by_number)
        left = [number for number in range(len(plan)) if not there.has(number)]
        done = plan.documents - sum(map(plan.in_block, left))
        tell(done, plan.documents)
        if not left:
            return
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        answers = ray.data.from_items([{"block": number} for number in left]).map_batches(
            Worker,
            fn_constructor_args=(model, plan, there, options),
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=min(count, len(left))),
        )
        for row in answers.iter_rows():
            done += int(row["documents"])
            tell(done, plan.documents)
    finally:
        if began_here:
            ray.shutdown()
