"""The progress thread of exchanges: by itself, and driven by a `SyncManager`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm import progress
from megatron_edit.comm.collectives import Group, Work
from megatron_edit.comm.progress import ProgressThread
from megatron_edit.comm.wire import Wire
from megatron_edit.engine import ParamShard, UnitPlan, plan_units
from megatron_edit.engine.plan import Decision, SyncPlan, SyncRules
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.syncs import ForwardSync, SyncContext
from megatron_edit.engine.units import batch_numbers, select_units
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.detector import Verdict
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.loss_check import LossVerdict
from megatron_edit.method.outer import Nesterov
from tests.harness.memory_network import CPU, Network, two_phase_groups

anything: Any = SimpleNamespace
UNITS = [f"layer.{number}" for number in range(6)]
SOON = 5.0


def in_time(condition: Callable[[], object]) -> bool:
    """Whether the condition becomes true within `SOON` seconds."""
    deadline = time.monotonic() + SOON
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@contextmanager
def running(drive: Callable[[], Work | None]) -> Iterator[ProgressThread]:
    """A progress thread that is closed at the end."""
    thread = ProgressThread(drive)
    try:
        yield thread
    finally:
        thread.close()


class Message:
    """A message in flight until a test sets `over`."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def is_completed(self) -> bool:
        """Whether `over` is set; called by `Work`."""
        return self.over.is_set()


def test_progress_thread_drives_after_each_completed_message() -> None:
    """Catches a thread that spins, and one that waits for the main thread's next call."""
    messages = [Message() for _ in range(3)]
    waiting, drives = list(messages), []

    def drive() -> Work | None:
        drives.append(len(waiting))
        while waiting and waiting[0].is_completed():
            waiting.pop(0)
        return Work("a group", (waiting[0],)) if waiting else None

    with running(drive) as thread:
        with thread.paused():
            pass
        for message in messages:
            time.sleep(0.02)
            message.over.set()
        assert in_time(lambda: not waiting)
        assert drives == [3, 3, 2, 1]


def test_progress_thread_does_nothing_while_paused() -> None:
    """Catches a thread that changes state while the main thread works on it."""
    inside, seen = [False], []

    with running(lambda: seen.append(inside[0])) as thread:
        for _ in range(50):
            with thread.paused():
                inside[0] = True
                time.sleep(0.0005)
                inside[0] = False
        assert in_time(lambda: seen)
        assert not any(seen)


def test_thread_failure_is_raised_in_the_main_thread() -> None:
    """The next `paused` raises it. Catches an error that is never reported."""

    def drive() -> Work | None:
        raise ReplicaLostError("sync group: a collective failed")

    with running(drive) as thread:
        with thread.paused():
            pass
        assert thread._thread is not None
        thread._thread.join(SOON)
        with pytest.raises(ReplicaLostError, match="a collective failed"), thread.paused():
            pass


def test_close_does_not_wait_for_a_lost_peer() -> None:
    """Catches a wait in the transport that keeps the process alive."""
    message = Message()
    with running(lambda: Work("a group", (message,))) as thread:
        with thread.paused():
            pass
        time.sleep(0.01)
        threading.Timer(2.0, message.over.set).start()
        began = time.monotonic()
    assert time.monotonic() - began < 1.0


class SlowRelease(threading.Condition):
    """A condition whose holder sleeps after it has released the lock."""

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        time.sleep(0.02)


def test_failure_is_raised_in_a_waiting_main_thread() -> None:
    """`paused` raises where it waited for the lock while the thread failed. Catches a main thread
    that goes on with inconsistent state."""
    driving = threading.Event()

    def drive() -> Work | None:
        driving.set()
        time.sleep(0.02)
        raise RuntimeError("half done")

    thread = ProgressThread(drive)
    thread._changed = SlowRelease(threading.RLock())
    with thread.paused():
        pass
    assert driving.wait(SOON)
    with pytest.raises(RuntimeError, match="half done"), thread.paused():
        pass
    thread.close()


def test_thread_stops_after_main_thread_failure() -> None:
    """An error of the main thread inside `paused`. Catches a thread that goes on with inconsistent
    state, so that other replicas get later results of a failed one."""
    drives: list[float] = []

    def drive() -> Work | None:
        drives.append(time.monotonic())
        return None

    thread = ProgressThread(drive)
    with pytest.raises(RuntimeError, match="half done"), thread.paused():
        raise RuntimeError("half done")
    time.sleep(0.05)
    assert not drives and thread._thread is not None and not thread._thread.is_alive()
    with pytest.raises(RuntimeError, match="half done"), thread.paused():
        pass
    thread.close()


def test_close_abandons_a_thread_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits for a rank that hangs. Catches a `close` that waits for it, too."""
    monkeypatch.setattr(progress, "CLOSE_SECONDS", 0.1)
    answer = threading.Event()

    def drive() -> Work | None:
        answer.wait(SOON)
        return None

    thread = ProgressThread(drive)
    with thread.paused():
        pass
    time.sleep(0.02)
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < SOON / 2
    answer.set()


# ---- driven by a manager of syncs


def plan_of(start: float) -> UnitPlan:
    """A plan of six units of two elements each, filled with `start`."""
    return plan_units(
        [ParamShard(name, name, torch.full((2,), start), True, None) for name in UNITS],
        UNITS,
        UNITS,
    )


class Replica:
    """A manager with one sync that lands in the forward pass, `depth` units in flight."""

    def __init__(
        self, rank: int, groups: Any, wire: Wire, *, offload: bool = False, depth: int = 2,
        together: int = 0,
    ) -> None:  # fmt: skip
        plan = plan_of(0.0)
        outer = OuterState.allocate(
            plan, CPU, offload=offload, wire=wire, num_replicas=2, max_staged=2
        ).at_parameters(plan)
        for shard in plan.shards:
            shard.scatter(torch.full((2,), -1.0 - rank))
        shape = (2, len(UNITS))
        verdict = Verdict(torch.zeros(shape, dtype=torch.bool), torch.zeros(shape))
        norms = torch.ones(shape, dtype=torch.float64)
        none = torch.zeros(len(UNITS), dtype=torch.bool)
        loss = LossVerdict.without_check(torch.full(shape[:1], torch.nan))
        decision = Decision(norms, verdict, torch.full(shape, 0.5), none, loss)
        sync_plan = SyncPlan(
            1, 1, 1, select_units(plan, range(len(UNITS))), decision,
            SyncRules(Nesterov(1.0, 0.5), None, DIRECT_COPY), (1, 1), (1, 1),
        )  # fmt: skip
        self.plan, self.outer = plan, outer
        numels = [2] * len(UNITS)
        context = SyncContext(anything(), groups, wire, depth, outer, numels, together)
        self.sync = ForwardSync(sync_plan, context, 0.0, 0.0)
        settings = anything(
            overlaps_compute=True,
            overlap=True,
            digest_interval=10,
            schedule=anything(fragments=1),
            wire=wire,
            depth=depth,
        )
        host = anything(attach_outer_state=lambda anchors, momenta: None)
        self.syncs = SyncManager(host, groups, settings, anything(), anything())
        self.syncs.begin(outer)
        self.syncs.begin_thread()

    def land(self, num_shards: int) -> list[float]:
        """Land the first units; returns the first parameter of every unit."""
        with torch.no_grad():
            self.syncs.land_up_to(num_shards)
        return [float(shard.gather(torch.empty(2))[0]) for shard in self.plan.shards]


@contextmanager
def replicas_of(network: Network, wire: str = "fp32", **settings: Any) -> Iterator[list[Replica]]:
    """Two replicas of one rank each, which are closed at the end."""
    alone = anything(all_gather=lambda mine: mine.unsqueeze(0), size=1, is_own=False)
    replicas = []
    for rank, group in enumerate(two_phase_groups(2, network)):
        groups = anything(sync=group, stage=alone, replica=alone, control=alone, ties={})
        replicas.append(Replica(rank, groups, Wire.of(wire), **settings))
    try:
        yield replicas
    finally:
        for replica in replicas:
            replica.syncs.close()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_exchanges_do_not_wait_for_forward_pass_of_slower_replica(wire: str, offload: bool) -> None:
    """One replica lands all units before the other lands its first. Catches exchanges that begin
    only in the slower replica's forward pass, and buffers that only a landing frees."""
    with replicas_of(Network(patience=SOON), wire, offload=offload) as (fast, slow):
        for replica in (fast, slow):
            replica.syncs.begin_landing(replica.sync)
        # the mean D is 1.5; A <- 0 - (1.5 + 0.5 x 1.5)
        assert fast.land(len(UNITS)) == [-2.25] * len(UNITS)
        assert slow.land(0) == [-2.0] * len(UNITS)
        assert slow.land(4) == [-2.25] * 4 + [-2.0] * 2
        assert slow.land(len(UNITS)) == [-2.25] * len(UNITS)
        for replica in (fast, slow):
            assert [u.momentum[0] for u in replica.outer.units.values()] == [1.5] * len(UNITS)


@pytest.mark.parametrize(("together", "launched"), [(0, 1), (3, 1), (4, 2), (5, 2), (100, 6)])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_small_units_are_exchanged_together(wire: str, together: int, launched: int) -> None:
    """With one batch in flight. Catches a latency of the link for each of many small units, and
    units whose values depend on which others are exchanged with them."""
    with replicas_of(Network(patience=SOON), wire, depth=1, together=together) as (one, other):
        one.sync.advance()
        assert [unit.shard.name for unit in one.sync.inflight_units] == UNITS[:launched]
        assert all(unit.on_wire is not None for unit in one.sync.inflight_units)
        for replica in (one, other):
            replica.syncs.begin_landing(replica.sync)
        for replica in (one, other):
            assert replica.land(len(UNITS)) == [-2.25] * len(UNITS)
    assert one.sync._groups.sync.num_started == (
        len(UNITS) if wire == "fp32" else 2 * -(-len(UNITS) // launched)
    )


def test_batches_hold_consecutive_units_up_to_the_limit() -> None:
    """A larger unit is a batch of its own."""
    assert batch_numbers([2, 2, 9, 1, 1, 1, 0, 5], 3) == [0, 1, 2, 3, 3, 3, 3, 4]
    assert batch_numbers([], 3) == []


def test_number_of_units_in_flight_is_bounded() -> None:
    """Catches a thread that allocates the memory of all units at once."""
    with replicas_of(Network(patience=SOON)) as (fast, slow):
        fast.syncs.begin_landing(fast.sync)
        time.sleep(0.05)
        assert [unit.shard.name for unit in fast.sync.inflight_units] == UNITS[:2]
        slow.syncs.begin_landing(slow.sync)
        assert in_time(lambda: all(unit.is_stepped for unit in fast.sync.inflight_units))
        assert in_time(lambda: len(fast.sync.inflight_units) == len(UNITS))
        assert all(unit.average is None for unit in fast.sync.inflight_units)


class CountedPolls:
    """A transport whose messages complete at the n-th poll."""

    def __init__(self, num_polls: int) -> None:
        self._num_polls = num_polls

    def name(self) -> str:
        """Return the name of the backend."""
        return "gloo"

    def allreduce(self, *_: Any) -> Any:
        """Start a message that leaves the tensor as it is."""
        polls = iter([False] * (self._num_polls - 1))
        return anything(is_completed=lambda: next(polls, True), wait=lambda: None)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_polls", range(1, 9))
def test_arrived_unit_is_stepped_without_the_main_thread(num_polls: int, depth: int) -> None:
    """At whichever poll a unit arrives, the thread takes its outer step. Catches a missed wakeup:
    a thread that waits although no message is in flight."""
    group = Group(CountedPolls(num_polls), 0, 2, CPU, timedelta(seconds=SOON), "sync")
    alone = anything(all_gather=lambda mine: mine.unsqueeze(0), size=1, is_own=False)
    groups = anything(sync=group, stage=alone, replica=alone, control=alone, ties={})
    replica = Replica(0, groups, Wire.of("fp32"), depth=depth)
    replica.syncs.begin_landing(replica.sync)
    try:
        assert in_time(lambda: [u.is_stepped for u in replica.sync.inflight_units] == [True] * 6)
    finally:
        replica.syncs.close()


def test_thread_is_idle_while_the_main_thread_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two threads that change a sync at the same time."""
    driving: set[int] = set()
    seen: list[bool] = []
    drive, land = SyncManager._drive, ForwardSync.land_next

    def slow_drive(self: SyncManager) -> Work | None:
        driving.add(id(self.landing))
        time.sleep(0.01)
        try:
            return drive(self)
        finally:
            driving.remove(id(self.landing))

    def watched(self: ForwardSync) -> Any:
        time.sleep(0.005)
        seen.append(id(self) in driving)
        return land(self)

    monkeypatch.setattr(SyncManager, "_drive", slow_drive)
    monkeypatch.setattr(ForwardSync, "land_next", watched)
    with replicas_of(Network(patience=SOON)) as (fast, slow):
        for replica in (fast, slow):
            replica.syncs.begin_landing(replica.sync)
        for count in range(1, len(UNITS) + 1):
            in_time(lambda: driving)
            fast.land(count)
            slow.land(count)
        assert seen == [False] * 2 * len(UNITS)


def test_lost_peer_is_raised_at_the_landing_with_its_unit() -> None:
    """Catches a thread that fails without an error in the main thread, and a hang."""
    network = Network(patience=SOON)
    with replicas_of(network) as (fast, _):
        fast.syncs.begin_landing(fast.sync)
        network.is_broken = True
        with pytest.raises(ReplicaLostError, match=r"unit layer\.0: .*connection reset"):
            fast.land(1)
