"""A hook that blocks the main thread of a rank until no exchange is under way."""

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


def block_main_thread() -> None:
    """Call `record`, and after each sync begins, block the main thread in its next parameter gather
    or, if the sync lands late, in its next gradient reduction, before the plugin's code runs there.

    Writes `blocked-<rank>.json`: for each sync, whether it finished while the thread was blocked.
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

    def blocking(start: Callable[..., Any], where: str) -> Callable[..., Any]:
        @wraps(start)
        def blocked(*args: Any, **kwargs: Any) -> Any:
            if begun and begun[0][0] == where and begun[0][1].is_done:
                begun.clear()  # the last sync: the main thread landed it before any gather
            elif begun and begun[0][0] == where:
                _, sync = begun.pop()
                deadline = time.monotonic() + LONGEST_SECONDS
                while not is_over(sync) and time.monotonic() < deadline:
                    time.sleep(0.001)
                seen.append(is_over(sync))
            return start(*args, **kwargs)

        return blocked

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
        for group in groups:  # these wrappers call the plugin's overrides
            group.start_param_sync = blocking(group.start_param_sync, "gather")
            group.start_grad_sync = blocking(group.start_grad_sync, "reduction")
        try:
            return train(*args, **kwargs)
        finally:
            (out_dir() / f"blocked-{rank}.json").write_text(json.dumps(seen))

    training.train = spied_train
    SyncManager.begin_landing = spied_begin  # type: ignore[method-assign]
    SyncManager.start = spied_start  # type: ignore[method-assign]


def read_blocked(folder: Path, rank: int) -> list[bool]:
    """Read what a rank recorded for each sync."""
    seen: list[bool] = json.loads((folder / f"blocked-{rank}.json").read_text())
    return seen
