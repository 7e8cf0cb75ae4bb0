"""Spies that record at which place in Megatron's step units land, gather and are exchanged."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_edit.engine import EditEngine
from megatron_edit.engine.sync.unit_sync import UnitSync
from tests.host.spy import built_chunks, out_dir, record


class Allocations(TorchDispatchMode):  # type: ignore[misc]
    """Tracks the storages that operations in wrapped calls allocate until they are freed, on any
    thread.

    Attributes:
        peak: the largest number of bytes alive at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[tuple[StorageWeakRef, int]] = []
        self._wrapped = threading.local()  # as torch's dispatch modes are
        self._lock = threading.Lock()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        with self._lock:
            known = given | {ref.cdata for ref, _ in self._alive()}
            for storage in _storages(result):
                if storage._cdata not in known:
                    known.add(storage._cdata)
                    self._made.append((StorageWeakRef(storage), storage.nbytes()))
            self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        """Number of bytes that are alive now."""
        return sum(nbytes for _, nbytes in self._alive())

    def _alive(self) -> list[tuple[StorageWeakRef, int]]:
        self._made = [(ref, nbytes) for ref, nbytes in self._made if not ref.expired()]
        return self._made

    def wrap_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call to track its allocations; a nested wrapped call counts to the outer one."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._outermost():
                return call(*args, **kwargs)

        return wrapped

    @contextmanager
    def _outermost(self) -> Iterator[None]:
        if getattr(self._wrapped, "is_on", False):
            yield
            return
        self._wrapped.is_on = True
        try:
            with self:
                yield
        finally:
            self._wrapped.is_on = False


def _storages(tree: Any) -> Iterable[torch.UntypedStorage]:
    return (t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


# ---- landings


INSIDE = ("schedule", "forward", "gather")


class Landing(NamedTuple):
    """One unit that landed.

    Attributes:
        round: round of its sync.
        where: "forward" in a chunk's forward pass, "schedule" in Megatron's schedule but outside
            a forward pass, both through a bucket group's `start_param_sync`; else "elsewhere".
        gather: number of the `start_param_sync` call in which it landed.
    """

    round: int
    where: str
    gather: int


class _Places:
    """Tracks which of the watched calls are under way, and how many of each have begun."""

    def __init__(self) -> None:
        self.depth = dict.fromkeys(INSIDE, 0)
        self.begun = dict.fromkeys(INSIDE, 0)

    def watched(self, place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call to track it."""

        @wraps(call)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._entered(place):
                return call(*args, **kwargs)

        return inside

    @contextmanager
    def _entered(self, place: str) -> Iterator[None]:
        self.depth[place] += 1
        self.begun[place] += 1
        try:
            yield
        finally:
            self.depth[place] -= 1

    def where(self) -> str:
        """Return the current place; see `Landing`."""
        if not self.depth["gather"] or not self.depth["schedule"]:
            return "elsewhere"
        return "forward" if self.depth["forward"] else "schedule"


def record_landings() -> None:
    """Call `record`, and record for each rank its stage, its number of bucket groups, its landings,
    and the devices on which it keeps its model's pipeline sends asynchronous."""
    import megatron.training.training as training
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from megatron_edit.engine.sync.manager import SyncManager
    from megatron_edit.host import training as ours

    record()
    places, landings, chunks = _Places(), list[Landing](), built_chunks()
    rank = os.environ["RANK"]  # before the launcher renumbers the ranks
    train, land = training.train, SyncManager._publish
    keep, sends = vars(ours)["keep_sends_asynchronous"], list[str]()
    schedule_of = training.get_forward_backward_func

    def spied_train(*args: Any, **kwargs: Any) -> Any:
        groups = _watch(chunks, places)  # these wrappers call the plugin's overrides
        try:
            return train(*args, **kwargs)
        finally:
            for group in groups:
                group.start_param_sync = group.start_param_sync.__wrapped__
            stage = parallel_state.get_pipeline_model_parallel_rank()
            facts = {
                "stage": stage, "groups": len(groups), "landings": landings, "sends": sends,
            }  # fmt: skip
            (out_dir() / f"landings-{rank}.json").write_text(json.dumps(facts))

    def spied_land(self: SyncManager, sync: Any, shard: Any, has_bad_moments: bool) -> None:
        land(self, sync, shard, has_bad_moments)
        landings.append(Landing(sync.plan.round, places.where(), places.begun["gather"]))

    def spied_keep(patcher: Any, config: Any, device: Any) -> None:
        keep(patcher, config, device)
        if config is get_model_config(chunks[0]):
            sends.append(device.type)

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        return places.watched("schedule", schedule_of(*args, **kwargs))

    training.train = spied_train
    training.get_forward_backward_func = watched_schedule
    SyncManager._publish = spied_land  # type: ignore[method-assign]
    vars(ours)["keep_sends_asynchronous"] = spied_keep


def _watch(chunks: list[Any], places: _Places) -> list[Any]:
    from megatron_edit.host.overlap import bucket_groups

    for chunk in chunks:
        chunk.forward = places.watched("forward", chunk.forward)
    groups: list[Any] = list(bucket_groups(chunks))
    for group in groups:
        group.start_param_sync = places.watched("gather", group.start_param_sync)
    return groups


def read_landings(folder: Path, rank: int) -> tuple[int, int, list[Landing], list[str]]:
    """Read of a rank: its stage, its number of bucket groups, its landings in order, and the
    devices on which it keeps sends asynchronous."""
    facts = json.loads((folder / f"landings-{rank}.json").read_text())
    landings = [Landing(*landing) for landing in facts["landings"]]
    return facts["stage"], facts["groups"], landings, facts["sends"]


# ---- order and staging


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
        _call_around(first, partial(note, "forward", name), _do_nothing)
        _call_around(part, _do_nothing, partial(note, "forward-end", name))


def _call_around(module: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
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
    from tests.host.spy_places import Allocations

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


# ---- a blocked main thread


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
