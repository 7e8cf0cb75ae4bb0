"""Times of syncs whose exchanges are queued on a device: those of the device, not of the host."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megatron_edit.comm.streams import CudaStreams, Span
from megatron_edit.config import EditConfig
from tests.distributed.toy import Collector
from tests.harness.races import RaceDetector
from tests.harness.traced_streams import Rank, TracedStreams, plan_of

EXCHANGE = 0.5  # seconds that a stream waits for each collective


@dataclass
class DeviceClock(TracedStreams):
    """Streams that stand still for each collective, whose wait takes the host no time.

    Attributes:
        now: seconds that the device has spent.
    """

    now: float = 0.0

    def await_collective(self, event: int) -> None:
        """See `TracedStreams`."""
        super().await_collective(event)
        self.now += EXCHANGE

    def mark(self) -> float:
        """See `Streams`."""
        return self.now


def report_of_syncs(*, is_overlapped: bool) -> Collector:
    """Run two rounds of a rank with three units."""
    with torch.no_grad(), RaceDetector() as detector:
        streams = DeviceClock(detector)
        config = EditConfig(num_replicas=2, warmup_steps=0, sync_interval=2, digest_interval=100)
        plan = plan_of({"layer.1": (4,), "layer.2": (4,), "final": (2,)})
        rank = Rank.build(streams, config, plan, is_overlapped=is_overlapped)
        engine = rank.engine
        engine.start()
        for _ in range(5):
            for place in range(3):
                engine.land_up_to(place + 1)
                rank.host.gather(place)
            engine.before_step()
            rank.host.has_deferred_gather = True
            engine.after_step()
        engine.finish()
        engine.close()
    assert isinstance(engine.reporter, Collector)
    return engine.reporter


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_exposed_time_is_that_of_the_device(is_overlapped: bool) -> None:
    """Catches the time of a host that only queues its waits, which is about zero: then `watch`,
    `report` and the second choice of `--edit-auto` see no exchange at all."""
    reports = report_of_syncs(is_overlapped=is_overlapped).syncs
    assert len(reports) == 2
    for report in reports:
        assert report.seconds["exchange"] == pytest.approx(3 * EXCHANGE)
        assert report.seconds["exposed"] >= 3 * EXCHANGE


def test_records_hold_the_exposed_time() -> None:
    """Catches a record without it, so that settings are never chosen again."""
    with torch.no_grad(), RaceDetector() as detector:
        config = EditConfig(num_replicas=2, warmup_steps=0, sync_interval=1, digest_interval=100)
        plan = plan_of({"layer.1": (4,)})
        rank = Rank.build(DeviceClock(detector), config, plan, is_overlapped=False)
        engine = rank.engine
        engine.start()
        for _ in range(3):
            engine.before_step()
            engine.after_step()
        exposed = engine.state.records[0].exposed
        engine.close()
    assert exposed >= EXCHANGE


def test_marks_of_a_gpu_are_read_when_it_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CudaStreams` on a stand-in of `torch.cuda`. Catches a time that is read too early."""
    calls: list[str] = []

    class Event:
        """Stand-in of `torch.cuda.Event`."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            calls.append(f"record {stream}")

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            calls.append("elapsed")
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    streams = CudaStreams(torch.device("cuda", 0))
    span: Span = (streams.mark(), streams.mark())
    assert streams.seconds(span) == 0.25
    assert calls == ["record compute", "record compute", "synchronize", "elapsed"]
