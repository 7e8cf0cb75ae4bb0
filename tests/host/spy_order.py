"""A spy that records the order of landings, gathers and layers, and measures staging memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_edit.engine import EditEngine
from megatron_edit.engine.sync.unit_sync import UnitSync
from tests.host.spy import out_dir

Event = list[Any]


def record_order() -> None:
    """Log ["start"|"land"|"forward"|"forward-end", unit, round, step] on every rank."""
    import megatron.training.training as training

    rank = os.environ["RANK"]
    log: list[Event] = []
    engines: list[EditEngine] = []
    launch, land, build = UnitSync.launch, UnitSync.land, EditEngine.__init__
    finish, setup = EditEngine.finish, training.setup_model_and_optimizer

    def note(kind: str, unit: str) -> None:
        status = engines[0].status
        log.append([kind, unit, status.num_syncs, status.step])

    def spied_launch(self: UnitSync, *args: Any, **kwargs: Any) -> Any:
        note("start", self.shard.name)
        return launch(self, *args, **kwargs)

    def spied_land(self: UnitSync, *args: Any, **kwargs: Any) -> Any:
        landing = land(self, *args, **kwargs)
        note("land", self.shard.name)
        return landing

    def spied_build(self: EditEngine, *args: Any, **kwargs: Any) -> None:
        engines.append(self)
        build(self, *args, **kwargs)

    def spied_finish(self: EditEngine) -> None:
        (out_dir() / f"order-{rank}.json").write_text(json.dumps(log))
        finish(self)

    def spied_setup(*args: Any, **kwargs: Any) -> Any:
        built = setup(*args, **kwargs)
        for chunk in built[0]:
            _watch_layers(chunk.module, note)
        return built

    UnitSync.launch = spied_launch  # type: ignore[method-assign]
    UnitSync.land = spied_land  # type: ignore[method-assign]
    EditEngine.__init__ = spied_build  # type: ignore[method-assign]
    EditEngine.finish = spied_finish  # type: ignore[method-assign]
    training.setup_model_and_optimizer = spied_setup


def _watch_layers(wrapped: Any, note: Any) -> None:
    model = getattr(wrapped, "module", wrapped)
    parts = {f"layer.{layer.layer_number}": layer for layer in model.decoder.layers}
    if (embedding := getattr(model, "embedding", None)) is not None:
        parts["embedding"] = embedding
    if model.decoder.final_layernorm is not None:
        parts["final"] = model.decoder.final_layernorm
    for name, part in parts.items():
        # A forward begins with the first module that holds parameters itself: Megatron's hooks are
        # on such modules, and fire before.
        first = next(m for m in part.modules() if any(True for _ in m.parameters(recurse=False)))
        _watch(first, partial(note, "forward", name), _do_nothing)
        _watch(part, _do_nothing, partial(note, "forward-end", name))


def _watch(module: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    forward = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        result = forward(*args, **kwargs)
        after()
        return result

    module.forward = watched


def _do_nothing() -> None: ...


def measure_staging() -> None:
    """Record the peak of the bytes that the engine allocates on this rank in a sync, from the
    meeting's decision to the last landing, on top of its persistent state."""
    from megatron_edit.engine.sync.manager import SyncManager
    from tests.host.allocations import Allocations

    rank = os.environ["RANK"]
    allocations, finish = Allocations(), EditEngine.finish

    def spied_finish(self: EditEngine) -> None:
        finish(self)
        facts = {
            "largest_shard": self.host.plan.largest_numel,
            "peak": allocations.peak,
            "live_after": allocations.live,
        }
        (out_dir() / f"staging-{rank}.json").write_text(json.dumps(facts))

    for name in ("begin_landing", "land_up_to", "_drive"):  # `_drive` runs on the thread
        setattr(SyncManager, name, allocations.wrap_call(getattr(SyncManager, name)))
    EditEngine.finish = spied_finish  # type: ignore[method-assign]


def fail_in_unit() -> None:
    """Make rank `SPY_VICTIM` raise in round 2 at `SPY_MOMENT` of layer.2, "launch" or "land"; all
    ranks record when they end."""
    from megatron_edit import launcher

    rank = os.environ["RANK"]
    moment, main = os.environ["SPY_MOMENT"], launcher.main
    stock, times = getattr(UnitSync, moment), {"n": 0}

    def failing(self: UnitSync, *args: Any, **kwargs: Any) -> Any:
        if self.shard.name == "layer.2":
            times["n"] += 1
            if rank == os.environ["SPY_VICTIM"] and times["n"] == 2:
                (out_dir() / "failed").write_text(str(time.time()))
                raise RuntimeError("this rank fails on purpose")
        return stock(self, *args, **kwargs)

    def timed(argv: Sequence[str]) -> int:
        try:
            return main(argv)
        finally:
            (out_dir() / f"ended-{rank}").write_text(str(time.time()))

    setattr(UnitSync, moment, failing)
    launcher.main = timed
