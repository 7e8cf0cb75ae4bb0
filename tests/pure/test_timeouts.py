"""How long a replica waits for others, and how it uses their heartbeats. Time is simulated."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm import heartbeat as heartbeats
from megatron_edit.comm.collectives import Group
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.stop import StopBoard
from megatron_edit.comm.timeouts import AdaptiveTimeout, StepTimes
from megatron_edit.comm.transport import MANY_THREADS, ON_CPU, _process_group
from megatron_edit.engine import tuning
from megatron_edit.engine.tuning import AutoTuner
from megatron_edit.method.moments import NO_MOMENTS

LIMIT = 600.0


def group() -> Group:
    """A group of one rank with a time-out that is no default."""
    return Group(None, 0, 1, torch.device("cpu"), timedelta(seconds=7), "group")


def test_adaptive_timeout_follows_round_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the last round, at least ten minutes. Catches a time-out that never changes."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    groups = (group(), group())
    adaptive_timeout = AdaptiveTimeout(groups, is_fixed=False)
    adaptive_timeout.begin()
    limits = [groups[0].timeout.total_seconds()]
    for length in (100.0, 500.0, 30.0):
        now[0] += length
        adaptive_timeout.after_round()
        assert adaptive_timeout.length == length
        assert groups[0].timeout == groups[1].timeout
        limits.append(groups[0].timeout.total_seconds())
    assert limits == [600.0, 600.0, 2000.0, 600.0]
    adaptive_timeout.begin(1000.0)  # the length of the last round in a checkpoint
    assert groups[0].timeout.total_seconds() == 4000.0


@pytest.mark.parametrize(
    ("parameters", "rate", "least"),
    [(12e9, 125e6 / 8, 4 * 672.0), (12e9, 12.5e9, 600.0), (1e5, 1.0, 600.0)],
    ids=["12B at 1 Gbit", "12B at 100 Gbit a rank", "tiny"],
)
def test_timeout_allows_for_the_bytes(
    parameters: float, rate: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight replicas of eight ranks. NCCL's watchdog counts from the launch of all of a step's
    exchanges. Catches a first step of the warm-up that ends in SIGABRT after ten minutes."""
    monkeypatch.setattr(tuning, "measure_rate", lambda groups, latency: rate)
    monkeypatch.setattr(tuning, "measure_latency", lambda groups: 0.002)
    limited, anything = group(), SimpleNamespace
    numels = torch.full((8, 1), int(parameters / 8))
    groups: Any = anything(sync=anything(size=8), warm_up=lambda **_: None)
    settings: Any = anything(num_phases=0, moments=anything(rule=NO_MOMENTS))
    settings.given = anything(hub=None)
    timeout = AdaptiveTimeout([limited], is_fixed=False)
    together = AutoTuner(settings, groups, numels, cast(Any, None)).open_groups(timeout)
    assert together == (0 if parameters < 1e6 else round(0.002 * rate))
    settings.given = anything(hub="host:1")
    elastic = AutoTuner(settings, groups, numels, cast(Any, anything(last_step=None)))
    assert elastic.open_groups(timeout) == 0  # some replicas may not be there yet
    timeout.begin()
    timeout.follow_step()
    found = limited.timeout.total_seconds()
    assert found >= least and (found == 600.0) is (least == 600.0)


@pytest.mark.parametrize("latency", [0.0001, 0.15])
def test_rate_of_a_distant_link_is_measured_beyond_its_latency(
    latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the first transfers takes some latencies, whatever its size, as TCP begins slowly.
    Catches a rate that is a hundred times too low: the latency alone was as long as a measurement
    should take, and units of 64 kB were exchanged one by one."""
    link, sent = 125e6, SimpleNamespace(device="cpu", payload_bytes=0)

    def seconds_of(groups: Any, values: torch.Tensor) -> float:
        sent.payload_bytes += 4 * values.numel()
        seconds: float = latency + max(4 * values.numel() / link, 1.5 * latency)
        return seconds

    monkeypatch.setattr(tuning, "_seconds_of", seconds_of)
    monkeypatch.setattr(tuning, "_gather_all", lambda groups, values: torch.tensor(values))
    groups: Any = SimpleNamespace(sync=sent)
    assert tuning.measure_rate(groups, latency) == pytest.approx(link, rel=0.01)


def test_gloo_carries_many_collectives_of_a_group_at_once() -> None:
    """Small units in fp32 are exchanged at the same time. Catches gloo's default of two, with which
    34 units cost 17 latencies."""
    alone = group()
    many = replace(ON_CPU, num_threads=MANY_THREADS)
    for transport, threads in ((many, 16), (ON_CPU, 2), (replace(ON_CPU, is_lazy=True), 2)):
        gloo = _process_group(dist.HashStore(), alone, transport, "a")
        assert gloo.options._threads == threads and gloo.options._timeout == alone.timeout


def waiting(exchanges: int = 0) -> HeartbeatMonitor:
    """The monitor of replica 0 of three, which waits at its fifth meeting."""
    heartbeat = HeartbeatMonitor(0, 3, lambda: ReplicaProgress(5, exchanges, 40), is_reporting=True)
    heartbeat.is_waiting = True
    return heartbeat


def report(meetings: int, work: int, tick: int = 0, exchanges: int = 0, is_over: int = 0) -> str:
    """The heartbeat text of a replica."""
    return f"{meetings} {exchanges} {work} {tick} {is_over} -1"


def test_progress_of_a_replica_extends_the_wait() -> None:
    """Steps of an absent replica count; a mere heartbeat or another replica's progress does not.
    Replicas that have arrived are not waited for."""
    heartbeat = waiting()
    for minute in range(100):  # replica 1 makes a step each minute, replica 2 waits, too
        heartbeat.update({1: report(4, minute), 2: report(5, 7)}, 60.0 * minute)
        assert heartbeat.overdue(0.0, LIMIT, 60.0 * minute) == []
    for minute in range(100, 120):  # it hangs, but its heartbeat thread does not
        heartbeat.update({1: report(4, 99, minute), 2: report(5, 7)}, 60.0 * minute)
    assert heartbeat.overdue(0.0, LIMIT, 60.0 * 99 + LIMIT) == []
    assert heartbeat.overdue(0.0, LIMIT, 60.0 * 99 + LIMIT + 1) == [1]


def test_progress_of_one_replica_does_not_hide_a_hung_one() -> None:
    heartbeat = waiting()
    for minute in range(20):
        heartbeat.update({1: report(4, minute), 2: report(4, 7)}, 60.0 * minute)
    assert heartbeat.overdue(30.0, LIMIT, 20 * 60.0) == [2]


def test_without_heartbeats_the_wait_itself_is_limited() -> None:
    """The store is lost, or the others never sent one."""
    heartbeat = waiting()
    assert heartbeat.overdue(1000.0, LIMIT, 1000.0 + LIMIT) == []
    assert heartbeat.overdue(1000.0, LIMIT, 1001.0 + LIMIT) == [1, 2]


@pytest.mark.parametrize(
    ("others", "lost"),
    [
        ({1: [report(4, 3)] * 2, 2: [report(5, 3, 1), report(5, 3, 9)]}, [1]),  # silent, absent
        (
            {1: [report(4, 3, 1), report(4, 4, 9)], 2: [report(5, 3)] * 2},
            [2],
        ),  # died at the meeting
        (
            {1: [report(4, 3, 1), report(4, 3, 9)], 2: [report(5, 3, 1), report(5, 3, 9)]},
            [1],
        ),  # hangs
        (
            {1: [report(5, 3, 1), report(5, 3, 9)], 2: [report(5, 3, 1), report(5, 3, 9, 9)]},
            [1],
        ),  # behind
        ({1: [report(5, 3)] * 2, 2: [report(5, 3, 1), report(5, 3, 1, 0, 1)]}, [1]),  # 2 gave up
        ({1: [report(5, 3, 1), report(5, 3, 9)], 2: [report(5, 3, 1), report(5, 3, 9)]}, []),
        (
            {1: [report(5, 3, 1), report(5, 3, 9)], 2: [report(5, 3, 9, 0, 1)] * 2},
            [],
        ),  # 2 has ended
    ],
)
def test_lost_replica_is_identified(
    others: dict[int, list[str]], lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silent replica, else the absent one, else the one with fewer exchanges."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    has_exchanges = any(" 9 3 " in text for texts in others.values() for text in texts)
    heartbeat = waiting(9 if has_exchanges else 0)

    heard = iter((0, 1))

    def listen(seconds: float) -> None:
        now[0] += seconds
        which = next(heard)
        heartbeat.update({r: texts[which] for r, texts in others.items()})

    monkeypatch.setattr(time, "sleep", listen)
    assert heartbeat.find_lost() == lost


def test_give_up_is_announced_and_names_the_lost_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches blame for a replica that has given up, or for one that waits, too."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, monitor = dist.HashStore(), waiting()
    other = HeartbeatMonitor(2, 3, lambda: ReplicaProgress(5, 0, 7), is_reporting=True)
    monkeypatch.setattr(time, "sleep", lambda _: monitor.exchange(store))
    monitor.update({1: report(4, 3), 2: report(5, 3)})
    assert monitor.give_up([1]) == [1]
    other.exchange(store)
    assert other.heartbeats[0].has_given_up
    monitor.update({1: report(5, 3, 4)})
    assert monitor.give_up([1, 2]) == []  # all had arrived: it is not known whose link failed
    now[0] += 60.0
    monitor.update({1: report(4, 3)}, now[0] - 30.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert monitor.give_up([1]) == []  # this rank has had no heartbeats for long


def test_unresponsive_store_means_its_host_replica_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one launch per replica, replica 0 hosts the store: if stopped, the store is silent."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    elsewhere = HeartbeatMonitor(
        1, 3, lambda: ReplicaProgress(5, 0, 1), is_reporting=True, store_host=0
    )
    assert elsewhere.find_lost() == [0]
    assert waiting().find_lost() == []  # the launch hosts the store


def test_failed_wait_is_still_reported_as_waiting() -> None:
    """Otherwise the error would state that all replicas had arrived."""
    heartbeat = waiting()
    with heartbeat.waiting():
        pass
    assert not heartbeat.is_waiting and not heartbeat.is_listening
    with pytest.raises(ZeroDivisionError), heartbeat.waiting():
        raise ZeroDivisionError
    assert heartbeat.is_waiting and not heartbeat.is_listening


def test_heartbeats_are_exchanged_through_the_store() -> None:
    """Those of the replicas that have sent one so far."""
    store = dist.HashStore()
    mine, other = (
        waiting(),
        HeartbeatMonitor(2, 3, lambda: ReplicaProgress(4, 1, 9), is_reporting=True),
    )
    other.batches = 3
    other.exchange(store)
    mine.exchange(store)
    assert [each.progress for each in mine.heartbeats] == [
        ReplicaProgress(5, 0, 40),
        heartbeats.NO_PROGRESS,
        ReplicaProgress(4, 1, 12),
    ]


def rank_1(store_host: int | None = None) -> HeartbeatMonitor:
    """The monitor of another rank of replica 0 of three, which waits at its fifth meeting."""
    heartbeat = HeartbeatMonitor(
        0, 3, lambda: ReplicaProgress(5, 0, 40), is_reporting=False, store_host=store_host
    )
    heartbeat.is_waiting = True
    return heartbeat


def test_heartbeats_are_relayed_to_waiting_ranks() -> None:
    """Rank 0 relays what it has read to the other ranks of its replica, which read only while they
    wait. Would catch: ranks that all read from the store of all replicas."""
    shared, own = dist.HashStore(), dist.HashStore()
    first, second = waiting(), rank_1()
    other = HeartbeatMonitor(2, 3, lambda: ReplicaProgress(4, 1, 9), is_reporting=True)
    second.read(own)  # nothing was relayed yet
    other.exchange(shared)
    first.exchange(shared)
    first.relay(own)
    second.read(own)
    assert second.heartbeats[2].text == ""
    with second.waiting():
        second.read(own)
    assert [each.text for each in second.heartbeats] == [each.text for each in first.heartbeats]
    assert second.heartbeats[2].progress == ReplicaProgress(4, 1, 9)
    assert own.num_keys() == 1


FAULTS: dict[str, tuple[set[str], int | None, list[int]]] = {
    # What happens while rank 1 listens, the host of the shared store, and who is lost.
    "nothing": (set(), 0, []),
    "replica 1 ends": ({"replica 1"}, 0, [1]),
    "rank 0 of this replica ends": ({"rank 0"}, 0, [0]),
    "the shared store of this replica does not answer": ({"shared"}, 0, []),
    "the shared store of replica 1 does not answer": ({"shared"}, 1, [1]),
    "the replica's store does not answer": ({"own"}, 1, [0]),
    "the store of the only launch does not answer": ({"own", "shared"}, None, []),
}


@pytest.mark.parametrize("what", FAULTS)
def test_rank_without_connection_of_its_own_names_what_is_lost(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault but the first, after a long time without waits. Would catch: replica 0 blamed for
    a rank 0 that relays no more, an old relay that is taken for new, and the reverse."""
    faults, host, lost = FAULTS[what]
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shared, own = dist.HashStore(), dist.HashStore()
    first, second = waiting(), rank_1(host)
    others = [
        HeartbeatMonitor(r, 3, lambda: ReplicaProgress(5, 0, 7), is_reporting=True) for r in (1, 2)
    ]

    def run(seconds: float, *missing: str) -> None:
        for _ in range(round(2 * seconds)):
            now[0] += 0.5
            for other in others:
                if f"replica {other._replica}" not in missing:
                    other.exchange(shared)
            if "rank 0" not in missing:
                if "shared" not in missing:
                    first.exchange(shared)
                if "own" not in missing:
                    first.relay(own)
            if "own" not in missing:
                second.read(own)

    run(60.0)
    run(30.0, *faults)
    monkeypatch.setattr(time, "sleep", lambda seconds: run(seconds, *faults))
    assert second.find_lost() == lost


def test_lost_replica_is_named_after_rank_0_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 finds that replica 1 is absent, and ends before rank 1 has heard of it twice. Would
    catch: a replica that blames itself."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    own, first, second = dist.HashStore(), waiting(), rank_1()
    first.update({0: report(5, 40), 1: report(4, 3), 2: report(5, 3)})
    with pytest.raises(ZeroDivisionError), second.waiting():
        for _ in range(2):
            first.relay(own)
            second.read(own)
        raise ZeroDivisionError

    def listen(seconds: float) -> None:
        now[0] += seconds
        second.read(own)

    monkeypatch.setattr(time, "sleep", listen)
    assert second.find_lost() == [1]


def limits_of(monkeypatch: pytest.MonkeyPatch, **more: float) -> tuple[list[float], Any, Any]:
    """Return a clock, a time-out, and a function that reads the limit in seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    groups = (group(), group())
    adaptive_timeout = AdaptiveTimeout(groups, is_fixed=False, **more)  # type: ignore[arg-type]
    return now, adaptive_timeout, lambda: groups[0].timeout.total_seconds()


def test_timeout_of_the_warmup_follows_the_longest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step includes start-up and compilation. Would catch: 10 minutes for steps of 20,
    whose replicas wait for each other; a limit that shrinks before a replica is as fast."""
    now, adaptive_timeout, limit = limits_of(monkeypatch)
    seen = []
    for seconds in (1200.0, 20.0, 300.0, 30.0):
        now[0] += seconds
        adaptive_timeout.follow_step()
        seen.append(limit())
    assert seen == [4800.0] * 4
    now[0] += 1500.0  # an evaluation, or a save, between two steps
    adaptive_timeout.follow_step()
    assert limit() == 6000.0


def test_timeout_of_the_first_round_follows_its_expected_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """128 steps of 3 minutes; afterwards that of the last round. Fast steps have the minimum."""
    for seconds, expected in ((180.0, 4 * 128 * 180.0), (0.5, 600.0)):
        now, adaptive_timeout, limit = limits_of(monkeypatch)
        for _ in range(10):
            now[0] += seconds
            adaptive_timeout.follow_step()
        assert limit() == max(600.0, 4 * seconds)
        adaptive_timeout.begin(steps=128)
        assert limit() == pytest.approx(expected)
        now[0] += 128 * seconds + 3.0
        adaptive_timeout.after_round()
        last = max(600.0, 4 * (128 * seconds + 3.0))
        assert limit() == pytest.approx(last)
        now[0] += 100 * seconds  # a slow step does not change the rule of the last round
        adaptive_timeout.follow_step()
        assert limit() == pytest.approx(last)


def test_timeout_without_warmup_grows_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured when the first round begins, as after a resume before its end."""
    now, adaptive_timeout, limit = limits_of(monkeypatch)
    adaptive_timeout.begin(steps=100)
    assert limit() == 600.0
    seen = []
    for _ in range(4):
        now[0] += 60.0
        adaptive_timeout.follow_step()
        seen.append(limit())
    assert seen == [600.0, 24_000.0, 24_000.0, 24_000.0]
    adaptive_timeout.begin(1000.0, steps=100)  # a checkpoint has the last round
    assert limit() == 4000.0


def test_timeout_of_a_timed_round_covers_its_least_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-EDiT: by the clock, or by the least number of steps where these take longer."""
    now, adaptive_timeout, limit = limits_of(monkeypatch, timed_seconds=600.0, timed_steps=50.0)
    for seconds, expected in ((1.0, 2400.0), (60.0, 4 * 50 * 60.0)):
        adaptive_timeout._steps = StepTimes()
        for _ in range(5):
            now[0] += seconds
            adaptive_timeout.follow_step()
        adaptive_timeout.begin()
        assert limit() == pytest.approx(expected)


def test_timeout_of_fragments_follows_the_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meetings of fragments are parts of a round: a delay may be longer than the time between
    them. Would catch: 4 x the time since the last meeting of any fragment."""
    now, adaptive_timeout, limit = limits_of(monkeypatch, meetings=4)
    adaptive_timeout.begin(steps=100)
    seen = []
    for seconds in (200.0, 200.0, 400.0, 400.0, 400.0, 400.0):
        now[0] += seconds
        adaptive_timeout.after_round()
        seen.append(limit())
    assert seen == [3200.0, 3200.0, pytest.approx(4 * 800 / 3 * 4), 4800.0, 5600.0, 6400.0]


def test_given_timeout_follows_neither_steps_nor_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--edit-timeout-seconds N`."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    mine = group()
    adaptive_timeout = AdaptiveTimeout([mine], is_fixed=True)
    now[0] += 5000.0
    adaptive_timeout.follow_step()
    adaptive_timeout.begin(1e6, steps=100)
    adaptive_timeout.after_round()
    assert mine.timeout == timedelta(seconds=7)


def frozen_at(times: dict[float, tuple[int, int]], *, is_waiting: bool = False) -> list[float]:
    """Return the times at which replica 0 finds replica 1 frozen, after 60 s.

    Args:
        times: for each read, heartbeats of replica 1 and steps of replica 0 so far.
        is_waiting: whether replica 0 is at a meeting.
    """
    monitor = HeartbeatMonitor(0, 2, lambda: ReplicaProgress(0, 0, 0), is_reporting=True)
    monitor.is_waiting = is_waiting
    monitor._last_read = monitor._reads_since = min(times)
    found = []
    for now, (ticks, steps) in times.items():
        texts = {0: f"0 0 {steps} {now:.0f} 0 -1", 1: f"0 0 7 {ticks} 0 -1"}
        monitor.update(texts, now)
        found += [now] if monitor.frozen(60.0, now) == [1] else []
    return found


EVERY_4_S = range(0, 104, 4)


def test_frozen_replica_is_found_by_its_heartbeat() -> None:
    """Where this one waits in an exchange. Catches a wait of four rounds for NCCL's watchdog."""
    stuck = {float(t): (min(t, 20), min(t, 24)) for t in EVERY_4_S}
    assert frozen_at(stuck) == [float(t) for t in EVERY_4_S if t > 84]


@pytest.mark.parametrize(
    ("times", "is_waiting"),
    [
        ({float(t): (t, 24) for t in EVERY_4_S}, False),
        ({float(t): (20, t) for t in EVERY_4_S}, False),
        ({float(t): (20, 24) for t in EVERY_4_S}, True),
        ({0.0: (1, 1), 4.0: (2, 2), 500.0: (2, 2), 504.0: (2, 2), 508.0: (3, 3)}, False),
    ],
    ids=["slow", "no exchange", "meeting", "suspended together"],
)
def test_replica_that_is_not_frozen_is_left_alone(
    times: dict[float, tuple[int, int]], is_waiting: bool
) -> None:
    """Slow replicas, replicas that others do not wait for, meetings, which have a time-out of their
    own, and a job that was suspended as a whole."""
    assert frozen_at(times, is_waiting=is_waiting) == []


@pytest.mark.parametrize("is_over", [False, True])
def test_process_that_waits_for_a_frozen_replica_is_ended(
    is_over: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 4 and one line: its main thread waits for the device. Not while it saves after
    the last sync, when the others may have ended."""
    store, codes = dist.HashStore(), list[int]()
    monitor = HeartbeatMonitor(
        0, 2, lambda: ReplicaProgress(0, 1, 5), is_reporting=True, is_over=lambda: is_over
    )
    monkeypatch.setattr(heartbeats, "STALE_SECONDS", 1e9)
    monitor._reads_since = monitor._last_read = time.monotonic() - 1000
    store.set("heartbeat/1", "0 1 5 9 0 -1")
    board = StopBoard(
        store, monitor, is_watching=True, poll_seconds=0.01, frozen_seconds=0.1,
        end_process=codes.append,
    )  # fmt: skip
    time.sleep(0.3)
    board.close()
    line = "megatron_edit: replica 1 was lost in an exchange: it has sent no heartbeat for 0.1 s"
    assert (line in capsys.readouterr().err.splitlines()) is not is_over
    assert set(codes) == (set() if is_over else {4})
