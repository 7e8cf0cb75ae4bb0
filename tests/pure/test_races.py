"""No stream accesses memory that another stream may still be using, in any mode of a sync.

The real engine runs on streams that only record their calls (`tests/harness/races.py`). The
detector itself is tested with mistakes: each leaves out one wait, record, fence or `keep` (memory
in use) of the real code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from megatron_edit.engine.plan import Decision, RoundPlan, plan_round
from megatron_edit.engine.rounds import fixed
from megatron_edit.engine.sync import manager
from megatron_edit.engine.sync.syncs import DelayedSync
from tests.harness.races import RaceDetector
from tests.harness.sockets import InlineProgressThread, staged_group
from tests.harness.traced_streams import OmittedCall, Rank, plan_of

UNITS = {"embedding": (6, 2), "layer.1": (5, 3), "layer.2": (4, 4), "final": (3,)}
NUM_STEPS = 10
NONFINITE_STEP = 8  # the step after which one group of units lands and another is in flight


def config_of(**changes: Any) -> EditConfig:
    """The config of a run."""
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
    "gradients-int8": ({"warmup_dtype": "int8", "warmup_steps": 4}, True),
}


# The same over gloo, with copies through host memory and the progress thread.
SOCKETS_CORE = ["overlap", "delayed", "offload-delayed", "int8"]
SOCKETS = ["blocking", "offload", "co2", "bf16", "int8-delayed", "int8-offload", "mix",
           "moments", "moments-int8-delayed"]  # fmt: skip


class Training:
    """Training steps like a framework's, with a part of a layer on a side stream."""

    def __init__(self, rank: Rank, nonfinite_after: int | None, saves_after: int) -> None:
        self.rank, self.nonfinite_after, self.saves_after = rank, nonfinite_after, saves_after
        self.side_stream = rank.streams.new()
        self.saved: EngineState | None = None

    def run(self, num_steps: int, resumed: EngineState | None) -> None:
        """Make all steps and end normally; a resumed run makes those after the save."""
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
        """Land, gather and read each unit."""
        rank = self.rank
        for place, shard in enumerate(rank.host.plan.shards):
            targets = [p.target for p in shard.params if p.target is not None]
            if place % 2 == 0:
                self.land_and_read(place, targets)
                continue
            streams = rank.streams
            streams.wait(self.side_stream, streams.record(streams.current()))
            with streams.use(self.side_stream):
                sum(target.sum() for target in targets)  # read on the side stream, then replaced
                self.land_and_read(place, targets)
            streams.wait(streams.current(), streams.record(self.side_stream))

    def land_and_read(self, place: int, targets: list[Tensor]) -> None:
        """Land one unit, gather it, and read it."""
        self.rank.engine.land_up_to(place + 1)
        self.rank.host.gather(place)
        sum(target.sum() for target in targets)

    def step(self, number: int) -> None:
        """Make one step of the inner optimizer."""
        engine, host = self.rank.engine, self.rank.host
        host.gradients = [torch.ones(numel) for numel in (300, 5)]
        engine.before_gradients()
        engine.average_gradients()
        engine.before_step()
        for shard in host.plan.shards:
            for param in shard.params:
                param.read().mul_(1.01)
                if number == self.nonfinite_after:
                    param.read().fill_(torch.nan)
            for moments in host.moments.values():
                moments[shard.name].mul_(0.99)
            shard.publish()
        host.has_deferred_gather = not engine.status.is_warmup
        engine.after_step()

    def save(self) -> None:
        """Copy what a checkpoint reads on the host."""
        self.rank.engine.land_all()
        self.saved = deepcopy(self.rank.engine.state_dict())


def watched(
    mode: str,
    mistake: OmittedCall | None = None,
    *,
    units: Mapping[str, Sequence[int]] = UNITS,
    nonfinite_after: int | None = None,
    saves_after: int = 7,
    num_steps: int = NUM_STEPS,
    is_fast: bool = False,
    ranks: int = 2,
    resumed: EngineState | None = None,
) -> tuple[RaceDetector, Training]:
    """Run a training under the detector; returns both."""
    over_sockets = mode.startswith("sockets ")
    changes, is_overlapped = MODES[mode.removeprefix("nonfinite ").removeprefix("sockets ")]
    if mode.startswith("nonfinite "):  # without anything that makes the host wait for the device
        nonfinite_after, saves_after, changes = (
            NONFINITE_STEP,
            0,
            {**changes, "digest_interval": 100},
        )
    with torch.no_grad(), RaceDetector(is_fast=is_fast) as detector:
        detector.streams.mistake = mistake
        thread = InlineProgressThread(detector.streams)
        with mock.patch.object(manager, "ProgressThread", thread.made):
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
        training = Training(rank, nonfinite_after, saves_after)
        try:
            with (
                seen_on_host(detector, rank.engine) if over_sockets else nullcontext(),
                mock.patch.object(torch.Tensor, "to", sent),
            ):
                training.run(num_steps, resumed)
        finally:
            rank.engine.close()
    assert detector.num_accesses > (1000 if resumed is None else 300)
    assert bool(thread.num_passes) == (over_sockets and mode != "sockets blocking")
    return detector, training


def sent(tensor: Tensor, *args: Any, to: Any = torch.Tensor.to) -> Tensor:
    """Replacement of `Tensor.to` for a host tensor: a move to a device makes a copy."""
    moved: Tensor = tensor.clone() if isinstance(args[0], torch.device) else to(tensor, *args)
    return moved


@contextmanager
def seen_on_host(detector: RaceDetector, engine: EditEngine) -> Iterator[None]:
    """Mark tensors that live on the host: sizes, decisions, and results of `cpu`. With two streams
    the detector must know them."""
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
        mock.patch.object(fixed, "plan_round", planned),
        mock.patch.object(DelayedSync, "restore", restored),
        mock.patch.object(torch, "tensor", listed),
        mock.patch.object(torch.Tensor, "cpu", fetched),
    ):
        yield


def races(mode: str, mistake: OmittedCall | None = None, **rest: Any) -> list[str]:
    """The findings of the detector in a run."""
    return watched(mode, mistake, **rest)[0].findings


@pytest.mark.parametrize("mode", MODES)
def test_no_races_in_any_sync_mode(mode: str) -> None:
    """On a slow device: polls never find a collective completed. Would catch: a missing wait that
    makes no difference on most machines most of the time."""
    assert races(mode) == []


@pytest.mark.parametrize("mode", ["overlap", "offload-delayed", "int8", "int8-delayed"])
def test_no_races_on_a_fast_device(mode: str) -> None:
    """Every poll finds its collective completed, which the host may take for a wait."""
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
    ranks in a replica, only exchanges. Would catch: gloo on memory that is still being copied, and
    work of the thread that the main thread's stream does not wait for."""
    assert races(f"sockets {mode}", ranks=ranks) == []


@pytest.mark.parametrize("mode", ["overlap", "offload-delayed", "int8"])
def test_no_races_over_sockets_on_a_fast_device(mode: str) -> None:
    """Every poll finds its copy completed, so that the thread does more in each pass."""
    assert races(f"sockets {mode}", ranks=1, is_fast=True) == []


# The sync stream does not wait for the current stream; or the current stream not for it.
SYNC_STREAM_DOES_NOT_WAIT = OmittedCall("wait", "SyncStream.use", "wait(self._stream")
CURRENT_STREAM_DOES_NOT_WAIT = OmittedCall("wait", "SyncStream.use", "wait(current")
MISTAKES: dict[str, tuple[str, OmittedCall]] = {
    "copy not awaited": ("offload", OmittedCall("wait", "DeviceCopy.ready")),
    "copy recorded too early": ("offload", OmittedCall("record", "OffloadStreams.upload")),
    "copy to the host not after compute": (
        "offload",
        OmittedCall("wait", "OffloadStreams.download"),
    ),
    "no event before the copy to the host": (
        "offload",
        OmittedCall("record", "OffloadStreams.download"),
    ),
    "memory reused too early": ("offload", OmittedCall("wait", "OffloadStreams._free_oldest")),
    "last use recorded too early": (
        "offload",
        OmittedCall("record", "OffloadStreams.take_back.<locals>.<genexpr>"),
    ),
    "host reads too early": ("offload", OmittedCall("synchronize", "OffloadStreams.wait")),
    "sync not after the side stream": ("overlap", SYNC_STREAM_DOES_NOT_WAIT),
    "side stream not after the sync": ("overlap", CURRENT_STREAM_DOES_NOT_WAIT),
    "exchange not awaited": ("overlap", OmittedCall("work", "UnitSync.await_average")),
    "delayed exchange not awaited": ("delayed", OmittedCall("work", "UnitSync.await_average")),
    "encoding not after compute": ("int8", OmittedCall("wait", "on_exchange_stream")),
    "sum of chunks not awaited": ("int8", OmittedCall("work", "CodedExchange.begin_next")),
    "encoded sums not awaited": ("int8", OmittedCall("work", "CodedExchange.wait")),
    "sums of a batch not awaited": (
        "int8-delayed",
        OmittedCall("work", "CodedExchange.begin_next"),
    ),
    "encoded batch not awaited": ("int8-delayed", OmittedCall("work", "CodedExchange.wait")),
    "norms not awaited": ("overlap", OmittedCall("work", "Group.all_gather")),
    "copies not awaited": ("overlap", OmittedCall("work", "Group.broadcast_nowait")),
    "copied to the host before it is computed": (
        "sockets overlap",
        OmittedCall("wait", "StagedProcessGroup._copy"),
    ),
    "no event after the copy to the host": (
        "sockets overlap",
        OmittedCall("record", "StagedProcessGroup._copy", "record(self._side"),
    ),
    "sent before it is on the host": (
        "sockets overlap",
        OmittedCall("synchronize", "StagedProcessGroup.begin_until"),
    ),
    "read before it is on the device": ("sockets overlap", OmittedCall("wait", "StagedWork.wait")),
    "thread not after the main thread": ("sockets overlap", SYNC_STREAM_DOES_NOT_WAIT),
    "main thread not after the thread": ("sockets overlap", CURRENT_STREAM_DOES_NOT_WAIT),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_detector_finds_missing_synchronization(name: str) -> None:
    """The detector itself, on the real code without one call."""
    mode, mistake = MISTAKES[name]
    made = replace(mistake)
    is_of_host = mistake.operation == "synchronize"  # a save makes the host wait: it hides others
    found = races(mode, made, saves_after=7 if is_of_host else 0)
    assert made.num_made, "the code no longer makes the call that this mistake leaves out"
    assert found


@pytest.mark.parametrize(
    "mode", ["nonfinite delayed", "nonfinite offload-delayed", "nonfinite mix-offload"]
)
def test_no_races_where_a_nonfinite_replica_is_restored(mode: str) -> None:
    """One fragment lands while another is in flight, and all units take their anchor. Would catch:
    an upload of anchors that are still being copied to the host."""
    assert races(mode) == []


@pytest.mark.parametrize(
    "mode", ["delayed", "offload-delayed", "sockets delayed", "sockets int8-delayed"]
)
def test_no_races_after_a_resume(mode: str) -> None:
    """With a sync that had not landed. Would catch: a restored sync that is built on another stream
    than the one that goes on with it, or outside the thread's lock."""
    saved = watched(mode, ranks=1)[1].saved
    assert saved is not None and saved.pending
    assert watched(mode, ranks=1, saves_after=0, resumed=saved)[0].findings == []


@pytest.mark.parametrize(
    "mode", ["offload", "offload-blocking", "offload-delayed", "three-in-flight"]
)
def test_offload_uploads_are_bounded_when_the_host_runs_ahead(mode: str) -> None:
    """The host is always ahead of the device. Would catch: uploads without a limit, so that the
    device holds the complete outer state."""
    units = {"embedding": (6, 2), **{f"layer.{n + 1}": (5, 3) for n in range(6)}, "final": (3,)}
    detector, training = watched(mode, units=units, num_steps=6)
    engine = training.rank.engine
    streams, settings = engine.syncs.outer.offload_streams, engine.settings
    assert streams is not None
    most = 2 * ((settings.used.prefetch_units if settings.overlap else 1) + 1)
    assert 2 <= detector.peak_blocks[streams._up] <= most


@pytest.mark.parametrize("mode", ["offload-delayed", "offload-co2", "offload"])
def test_host_does_not_compute_on_offloaded_state(mode: str) -> None:
    """Not even for its digest, which takes seconds on a CPU. A save reads it, and is left out."""
    detector, _ = watched(mode, saves_after=0)
    assert detector.num_host_accesses == 0
