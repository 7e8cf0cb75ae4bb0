"""A training script's extra: the main thread stands still until no exchange is under way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from tests.host.spy import built_chunks, out_dir, record

LONGEST_SECONDS = 20.0


def hold_main_thread() -> None:
    """`record`, and after each sync begins, hold the main thread in its next gather, or where the
    sync lands late, in its next reduction of gradients, before any of ours runs there.

    Writes `beside-<rank>.json`: for each sync, whether all of it was over while the thread stood.
    """
    import megatron.training.training as training

    from megatron_edit.engine.sync.manager import SyncManager
    from megatron_edit.host.overlap import bucket_groups

    record()
    chunks, rank = built_chunks(), os.environ["RANK"]
    train, begin, start = training.train, SyncManager.begin_landing, SyncManager.start
    begun: list[tuple[str, Any]] = []
    seen: list[bool] = []

    def is_over(sync: Any) -> bool:
        units = sync.inflight_units
        if sync.plan.rules.landing.is_immediate:
            return len(units) == len(sync.units.shards) and all(unit.is_stepped for unit in units)
        return all(unit.on_wire is None for unit in units)

    def holding(start: Callable[..., Any], where: str) -> Callable[..., Any]:
        @wraps(start)
        def held(*args: Any, **kwargs: Any) -> Any:
            if begun and begun[0][0] == where and begun[0][1].is_done:
                begun.clear()  # the last one: the main thread landed it before it gathered anything
            elif begun and begun[0][0] == where:
                _, sync = begun.pop()
                deadline = time.monotonic() + LONGEST_SECONDS
                while not is_over(sync) and time.monotonic() < deadline:
                    time.sleep(0.001)
                seen.append(is_over(sync))
            return start(*args, **kwargs)

        return held

    def spied_begin(self: SyncManager, sync: Any) -> None:
        begin(self, sync)
        if sync.plan.rules.landing.is_immediate:
            begun[:] = [("gather", sync)]

    def spied_start(self: SyncManager, sync: Any) -> None:
        start(self, sync)
        if not sync.plan.rules.landing.is_immediate:
            begun[:] = [("reduction", sync)]

    def spied_train(*args: Any, **kwargs: Any) -> Any:
        groups: list[Any] = list(bucket_groups(chunks))
        for group in groups:  # the plugin's overrides lie below
            group.start_param_sync = holding(group.start_param_sync, "gather")
            group.start_grad_sync = holding(group.start_grad_sync, "reduction")
        try:
            return train(*args, **kwargs)
        finally:
            (out_dir() / f"beside-{rank}.json").write_text(json.dumps(seen))

    training.train = spied_train
    SyncManager.begin_landing = spied_begin  # type: ignore[method-assign]
    SyncManager.start = spied_start  # type: ignore[method-assign]


def read_beside(folder: Path, rank: int) -> list[bool]:
    """What a rank saw, by sync."""
    seen: list[bool] = json.loads((folder / f"beside-{rank}.json").read_text())
    return seen
