"""A training script's extra: how often exchanges may go on in the backward pass."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from tests.host.spy import built_chunks, out_dir, record


def record_backward() -> None:
    """`record`, and for each rank: gradient syncs that bucket groups began, and polls in them
    while something flew."""
    import megatron.training.training as training

    from megatron_edit.engine.sync.queue import SyncQueue
    from megatron_edit.host.overlap import bucket_groups

    record()
    counts, chunks = Counter[str](), built_chunks()
    rank = os.environ["RANK"]  # before the launcher gives the ranks new numbers
    train, poll = training.train, SyncQueue.poll
    depth = [0]

    def counted(start: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(start)
        def inside(*args: Any, **kwargs: Any) -> Any:
            counts["reduces"] += 1
            depth[0] += 1
            try:
                return start(*args, **kwargs)
            finally:
                depth[0] -= 1

        return inside

    def spied_train(*args: Any, **kwargs: Any) -> Any:
        groups: list[Any] = list(bucket_groups(chunks))
        for group in groups:  # the plugin's overrides lie below
            group.start_grad_sync = counted(group.start_grad_sync)
        try:
            return train(*args, **kwargs)
        finally:
            (out_dir() / f"backward-{rank}.json").write_text(json.dumps(counts))

    def spied_poll(self: SyncQueue) -> None:
        counts["polls"] += depth[0]
        poll(self)

    training.train = spied_train
    SyncQueue.poll = spied_poll  # type: ignore[method-assign]


def read_backward(folder: Path, rank: int) -> tuple[int, int]:
    """Gradient syncs that a rank's bucket groups began, and polls in them."""
    counts = json.loads((folder / f"backward-{rank}.json").read_text())
    return counts["reduces"], counts.get("polls", 0)
