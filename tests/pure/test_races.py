"""No stream reads or writes what another may still be at work on, in any mode of a sync.

The real engine runs on streams that only write down what they are told (`tests/harness/races.py`).
That the detector would see a mistake is shown with mistakes: each leaves out one wait, record,
fence, or one note that memory is in use, of the real code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_edit.config import EditConfig
from megatron_edit.engine import EditEngine, EngineState
from megatron_edit.engine import engine as engine_module
from megatron_edit.engine.plan import Decision, RoundPlan, plan_round
from megatron_edit.engine.sync import manager
from megatron_edit.engine.sync.offload import OffloadStreams
from megatron_edit.engine.sync.syncs import DelayedSync
from tests.harness.in_order import CPU, Mistake, Rank, plan_of
from tests.harness.races import RaceDetector
from tests.harness.sockets import ThreadInTurns, staged_group

UNITS = {"embedding": (6, 2), "layer.1": (5, 3), "layer.2": (4, 4), "final": (3,)}
NUM_STEPS = 10
BREAKS = 8  # a step after which one group of units lands and another is in flight


def config_of(**changes: Any) -> EditConfig:
    """Of a run."""
    usual = {"num_replicas": 2, "warmup_steps": 1, "sync_interval": 4, "digest_interval": 1}
    return EditConfig(**usual | changes)


DELAYED: dict[str, Any] = {"fragments": 2, "delay_steps": 3}
CO2: dict[str, Any] = {"strategy": "co2"}
MOMENTS: dict[str, Any] = {"average_moments": "both"}
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "overlap": ({}, True),
    "blocking": ({}, False),
    "offload": ({"offload": True}, True),
    "offload-blocking": ({"offload": True}, False),
    "delayed": (DELAYED, True),
    "offload-delayed": ({**DELAYED, "offload": True}, True),
    "co2": (CO2, True),
    "offload-co2": ({**CO2, "offload": True}, True),
    "bf16": ({"sync_dtype": "bf16"}, True),
    "int8": ({"sync_dtype": "int8"}, True),
    "int8-delayed": ({**DELAYED, "sync_dtype": "int8"}, True),
    "int8-offload": ({"sync_dtype": "int8", "offload": True}, True),
    "mix": ({**DELAYED, "mix": 0.5}, True),
    "mix-offload": ({**DELAYED, "mix": 0.5, "offload": True}, True),
    "three-in-flight": ({"prefetch_units": 3, "offload": True}, True),
    "moments": (MOMENTS, True),
    "moments-int8-delayed": ({**DELAYED, **MOMENTS, "sync_dtype": "int8"}, True),
    "moments-offload": ({**MOMENTS, "offload": True}, True),
}


# Over gloo the same, with copies through host memory and the turns of the progress thread.
SOCKETS_CORE = ["overlap", "delayed", "offload-delayed", "int8"]
SOCKETS = ["blocking", "offload", "co2", "bf16", "int8-delayed", "int8-offload", "mix",
           "moments", "moments-int8-delayed"]  # fmt: skip


class Training:
    """Steps as a framework makes them, with part of a layer on a stream beside compute."""

    def __init__(self, rank: Rank, breaks_after: int | None, saves_after: int) -> None:
        self.rank, self.breaks_after, self.saves_after = rank, breaks_after, saves_after
        self.beside = rank.streams.new()
        self.saved: EngineState | None = None

    def run(self, num_steps: int, resumed: EngineState | None) -> None:
        """All steps, to a good end; those after the save where a run is resumed."""
        engine = self.rank.engine
        if resumed is None:
            engine.start()
        else:
            engine.load_state_dict(resumed)
        for step in range(engine.status.step + 1, num_steps + 1):
            self.forward()
            self.step(step)
            if step == self.saves_after:
                self.save()
        engine.finish()
        engine.close()

    def forward(self) -> None:
        """Each unit lands, is gathered and read."""
        rank = self.rank
        for place, shard in enumerate(rank.host.plan.shards):
            targets = [p.target for p in shard.params if p.target is not None]
            if place % 2 == 0:
                self.land_and_read(place, targets)
                continue
            streams = rank.streams
            streams.wait(self.beside, streams.record(streams.current()))
            with streams.use(self.beside):
                sum(target.sum() for target in targets)  # read beside compute, then replaced
                self.land_and_read(place, targets)
            streams.wait(streams.current(), streams.record(self.beside))

    def land_and_read(self, place: int, targets: list[Tensor]) -> None:
        """Of one unit."""
        self.rank.engine.land_up_to(place + 1)
        self.rank.host.gather(place)
        sum(target.sum() for target in targets)

    def step(self, number: int) -> None:
        """Of the inner optimizer."""
        engine, host = self.rank.engine, self.rank.host
        engine.before_gradients()
        engine.average_gradients()
        engine.before_step()
        for shard in host.plan.shards:
            for param in shard.params:
                param.read().mul_(1.01)
                if number == self.breaks_after:
                    param.read().fill_(torch.nan)
            for moments in host.moments.values():
                moments[shard.name].mul_(0.99)
            shard.publish()
        host.has_deferred_gather = not engine.status.is_warmup
        engine.after_step()

    def save(self) -> None:
        """What a checkpoint reads on the host."""
        self.rank.engine.land_all()
        self.saved = deepcopy(self.rank.engine.state_dict())


def watched(
    mode: str,
    mistake: Mistake | None = None,
    *,
    units: Mapping[str, Sequence[int]] = UNITS,
    breaks_after: int | None = None,
    saves_after: int = 7,
    num_steps: int = NUM_STEPS,
    is_fast: bool = False,
    ranks: int = 2,
    resumed: EngineState | None = None,
) -> tuple[RaceDetector, Training]:
    """A run that the detector has watched."""
    over_sockets = mode.startswith("sockets ")
    changes, is_overlapped = MODES[mode.removeprefix("broken ").removeprefix("sockets ")]
    if mode.startswith("broken "):  # and nothing lets the host wait for the device before
        breaks_after, saves_after, changes = BREAKS, 0, {**changes, "digest_interval": 100}
    with torch.no_grad(), RaceDetector(is_fast=is_fast) as detector:
        detector.streams.mistake = mistake
        in_turns = ThreadInTurns(detector.streams)
        with mock.patch.object(manager, "ProgressThread", in_turns.made):
            rank = Rank.build(
                detector.streams,
                config_of(**changes),
                plan_of(units),
                is_overlapped=is_overlapped,
                ranks=ranks,
                tie=None if over_sockets else (1, 2),
                on_outer_state=detector.pin if changes.get("offload") else lambda tensors: None,
                sync=staged_group(2, detector.streams, detector.pin) if over_sockets else None,
            )
        if over_sockets and ranks > 1:  # on GPUs the main thread takes the steps then
            rank.engine.syncs._thread_steps = False
        training = Training(rank, breaks_after, saves_after)
        try:
            with (
                seen_on_host(detector, rank.engine) if over_sockets else nullcontext(),
                mock.patch.object(torch.Tensor, "to", sent),
            ):
                training.run(num_steps, resumed)
        finally:
            rank.engine.close()
    assert detector.num_accesses > (1000 if resumed is None else 300)
    assert bool(in_turns.num_turns) == (over_sockets and mode != "sockets blocking")
    return detector, training


def sent(tensor: Tensor, *args: Any, to: Any = torch.Tensor.to) -> Tensor:
    """`Tensor.to` as it is for a tensor of the host: a device gets a copy."""
    moved: Tensor = tensor.clone() if isinstance(args[0], torch.device) else to(tensor, *args)
    return moved


@contextmanager
def seen_on_host(detector: RaceDetector, engine: EditEngine) -> Iterator[None]:
    """Where two streams are at work it counts which tensors are the host's: sizes, those of
    decisions, and those that `cpu` waits for."""
    detector.pin([engine.syncs.footprint.unit_numels])
    from_list, restore = torch.tensor, DelayedSync.restore

    def pin(decided: Decision) -> None:
        verdict = decided.verdict
        tables = (decided.norms, decided.weights, decided.rollback, verdict.anomalous)
        detector.pin((*tables, verdict.scores))

    def planned(*args: Any, **kwargs: Any) -> RoundPlan:
        plan = plan_round(*args, **kwargs)
        if plan.decision is not None:
            pin(plan.decision)
        return plan

    def restored(*args: Any) -> DelayedSync:
        sync = restore(*args)
        pin(sync.plan.decision)
        return sync

    def listed(*args: Any, **kwargs: Any) -> Tensor:
        made = from_list(*args, **kwargs)
        if "device" not in kwargs:
            detector.pin([made])
        return made

    def fetched(tensor: Tensor) -> Tensor:
        return detector.fetch(tensor)

    with (
        mock.patch.object(engine_module, "plan_round", planned),
        mock.patch.object(DelayedSync, "restore", restored),
        mock.patch.object(torch, "tensor", listed),
        mock.patch.object(torch.Tensor, "cpu", fetched),
    ):
        yield


def races(mode: str, mistake: Mistake | None = None, **rest: Any) -> list[str]:
    """What the detector finds in a run."""
    return watched(mode, mistake, **rest)[0].findings


@pytest.mark.parametrize("mode", MODES)
def test_no_races(mode: str) -> None:
    """The host never finds a collective done when it asks. Would catch a wait that is missing
    where, on most machines, it makes no difference most of the time."""
    assert races(mode) == []


@pytest.mark.parametrize("mode", ["overlap", "offload-delayed", "int8", "int8-delayed"])
def test_no_races_where_the_device_is_fast(mode: str) -> None:
    """The host finds every collective done when it asks, and takes that for a wait."""
    assert races(mode, is_fast=True) == []


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        *((mode, 1) for mode in SOCKETS_CORE),
        ("overlap", 2),
        *(pytest.param(mode, 1, marks=pytest.mark.system) for mode in SOCKETS),
        *(pytest.param(mode, 2, marks=pytest.mark.system) for mode in ("offload-delayed", "int8")),
    ],
)
def test_no_races_over_sockets(mode: str, ranks: int) -> None:
    """Copies go through host memory, and the progress thread takes outer steps, or, with several
    ranks in a replica, exchanges alone. Would catch gloo on memory that a copy is still at work on,
    and work of the thread that the main thread's stream does not wait for."""
    assert races(f"sockets {mode}", ranks=ranks) == []


@pytest.mark.parametrize("mode", ["overlap", "offload-delayed", "int8"])
def test_no_races_over_sockets_where_the_device_is_fast(mode: str) -> None:
    """The host finds every copy done when it asks, so that more is done in the thread's turns."""
    assert races(f"sockets {mode}", ranks=1, is_fast=True) == []


# The stream of a sync does not wait for the current one; the current one not for that of a sync.
HOME_DOES_NOT_WAIT = Mistake("wait", "SyncStream.use", "wait(self._stream")
NOBODY_WAITS_FOR_HOME = Mistake("wait", "SyncStream.use", "wait(current")
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "copy not awaited": ("offload", Mistake("wait", "DeviceCopy.ready")),
    "copy recorded too early": ("offload", Mistake("record", "OffloadStreams.upload")),
    "copy home not after compute": ("offload", Mistake("wait", "OffloadStreams.download")),
    "no event before the way home": ("offload", Mistake("record", "OffloadStreams.download")),
    "memory given out too early": ("offload", Mistake("wait", "OffloadStreams._free_oldest")),
    "last use recorded too early": (
        "offload",
        Mistake("record", "OffloadStreams.take_back.<locals>.<genexpr>"),
    ),
    "host reads too early": ("offload", Mistake("synchronize", "OffloadStreams.wait")),
    "sync not after the stream beside": ("overlap", HOME_DOES_NOT_WAIT),
    "stream beside not after the sync": ("overlap", NOBODY_WAITS_FOR_HOME),
    "exchange not awaited": ("overlap", Mistake("work", "UnitSync.await_average")),
    "delayed exchange not awaited": ("delayed", Mistake("work", "UnitSync.await_average")),
    "encoding not after compute": ("int8", Mistake("wait", "on_exchange_stream")),
    "sum of chunks not awaited": ("int8", Mistake("work", "CodedExchange.start_second_phase")),
    "encoded sums not awaited": ("int8", Mistake("work", "CodedExchange.wait")),
    "sums of a batch not awaited": (
        "int8-delayed",
        Mistake("work", "CodedExchange.start_second_phase"),
    ),
    "encoded batch not awaited": ("int8-delayed", Mistake("work", "CodedExchange.wait")),
    "norms not awaited": ("overlap", Mistake("work", "Group.all_gather")),
    "copies not awaited": ("overlap", Mistake("work", "Group.broadcast_nowait")),
    "down before it is computed": ("sockets overlap", Mistake("wait", "StagedProcessGroup._copy")),
    "no event behind the way down": (
        "sockets overlap",
        Mistake("record", "StagedProcessGroup._copy", "record(self._side"),
    ),
    "sent before it is down": (
        "sockets overlap",
        Mistake("synchronize", "StagedProcessGroup.begin_until"),
    ),
    "read before it is up": ("sockets overlap", Mistake("wait", "StagedWork.wait")),
    "thread not after the main thread": ("sockets overlap", HOME_DOES_NOT_WAIT),
    "main thread not after the thread": ("sockets overlap", NOBODY_WAITS_FOR_HOME),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    """The detector itself, on the real code less one call."""
    mode, mistake = MISTAKES[name]
    made = replace(mistake)
    is_of_host = mistake.operation == "synchronize"  # a save, in which the host waits, hides others
    found = races(mode, made, saves_after=7 if is_of_host else 0)
    assert made.num_made, "the code has left this mistake behind"
    assert found


def free_what_is_sent(detector: RaceDetector) -> list[Tensor]:
    """A tensor goes back to its stream's pool before the copy of it has come down."""
    group: Any = staged_group(2, detector.streams, detector.pin).process_group
    parts = [torch.zeros(4), torch.zeros(4)]
    group.allgather([parts], [torch.ones(4)], None)
    return parts


def upload_what_comes_home(detector: RaceDetector) -> list[Tensor]:
    """State of one sync is on its way home when the next one begins."""
    copies = OffloadStreams(CPU, detector.streams, max_copies=4)
    device, host = torch.ones(4), torch.zeros(4)
    detector.pin([host])
    copies.download(device, host)
    copies.fence()
    return [device, host, copies.upload(host).ready()]


ALONE: dict[str, tuple[Callable[[RaceDetector], list[Tensor]], Mistake]] = {
    "keep": (free_what_is_sent, Mistake("keep", "StagedProcessGroup._copy")),
    "fence": (upload_what_comes_home, Mistake("wait", "OffloadStreams.fence")),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_mistake_is_found_where_nothing_else_hides_it(name: str) -> None:
    """Calls whose lack a whole run hides: there its tensors live on, and other waits come between.

    Catches them missing, and a detector that does not see it.
    """
    use, mistake = ALONE[name]
    made = replace(mistake)
    findings = []
    for planted in (None, made):
        with torch.no_grad(), RaceDetector() as detector:
            detector.streams.mistake = planted
            in_use = use(detector)
            torch.zeros(1)  # the detector looks for freed memory with each operation
        findings.append(detector.findings)
        del in_use
    assert made.num_made, "the code has left this mistake behind"
    assert findings[0] == [] and findings[1]


@pytest.mark.parametrize("mode", ["broken delayed", "broken offload-delayed", "broken mix-offload"])
def test_a_broken_replica_comes_back_without_a_race(mode: str) -> None:
    """Units of one group land while those of another are in flight, and all come back with their
    anchor. Would catch an upload of anchors that are still on their way home."""
    assert races(mode) == []


@pytest.mark.parametrize(
    "mode", ["delayed", "offload-delayed", "sockets delayed", "sockets int8-delayed"]
)
def test_no_races_after_a_resume(mode: str) -> None:
    """With a sync that had not landed. Would catch what is made of it beside the stream, or the
    thread's turns, that then work on it."""
    saved = watched(mode, ranks=1)[1].saved
    assert saved is not None and saved.pending
    assert watched(mode, ranks=1, saves_after=0, resumed=saved)[0].findings == []


@pytest.mark.parametrize(
    "mode", ["offload", "offload-blocking", "offload-delayed", "three-in-flight"]
)
def test_uploads_wait_for_room(mode: str) -> None:
    """The host is ahead of the device all the time. Would catch uploads of one unit after the other
    that wait for nothing, until the device holds the whole outer state."""
    units = {"embedding": (6, 2), **{f"layer.{n + 1}": (5, 3) for n in range(6)}, "final": (3,)}
    detector, training = watched(mode, units=units, num_steps=6)
    engine = training.rank.engine
    streams, settings = engine.syncs.outer.offload_streams, engine.settings
    assert streams is not None
    most = 2 * ((settings.prefetch_units if settings.overlap else 1) + 1)
    assert 2 <= detector.peak_blocks[streams._up] <= most


@pytest.mark.parametrize("mode", ["offload-delayed", "offload-co2", "offload"])
def test_the_host_computes_nothing_of_offloaded_state(mode: str) -> None:
    """Not even its digest: on the CPU that takes seconds. A save would read it, and is left out."""
    detector, _ = watched(mode, saves_after=0)
    assert detector.num_host_accesses == 0
