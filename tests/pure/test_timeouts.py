"""How long a replica waits for others, and what it makes of their signs of life. No clock runs."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm import heartbeat as heartbeats
from megatron_edit.comm.collectives import Group
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.timeouts import AdaptiveTimeout

LIMIT = 600.0


def group() -> Group:
    """Of one rank, with a time-out that nobody would choose."""
    return Group(None, 0, 1, torch.device("cpu"), timedelta(seconds=7), "group")


def test_the_limit_follows_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the last round, ten minutes at least. Catches a limit that never moves."""
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
    adaptive_timeout.begin(1000.0)  # as a checkpoint says
    assert groups[0].timeout.total_seconds() == 4000.0


def test_a_limit_that_the_user_gave_stays() -> None:
    """Whatever the rounds are like."""
    mine = group()
    adaptive_timeout = AdaptiveTimeout([mine], is_fixed=True)
    adaptive_timeout.begin(1e6)
    adaptive_timeout.after_round()
    assert mine.timeout == timedelta(seconds=7)


def waiting(exchanges: int = 0) -> HeartbeatMonitor:
    """Replica 0 of three at its fifth meeting."""
    heartbeat = HeartbeatMonitor(0, 3, lambda: ReplicaProgress(5, exchanges, 40), is_telling=True)
    heartbeat.is_waiting = True
    return heartbeat


def said(meetings: int, work: int, tick: int = 0, exchanges: int = 0, is_over: int = 0) -> str:
    """What a replica tells."""
    return f"{meetings} {exchanges} {work} {tick} {is_over}"


def test_progress_renews_the_limit() -> None:
    """Steps of a replica that has not come count; that its process lives does not, nor does
    another's progress. Who has come is not waited for."""
    heartbeat = waiting()
    for minute in range(100):  # replica 1 makes a step each minute, replica 2 waits, too
        heartbeat.hear({1: said(4, minute), 2: said(5, 7)}, 60.0 * minute)
        assert heartbeat.overdue(0.0, LIMIT, 60.0 * minute) == []
    for minute in range(100, 120):  # it hangs: its look-out thread does not
        heartbeat.hear({1: said(4, 99, minute), 2: said(5, 7)}, 60.0 * minute)
    assert heartbeat.overdue(0.0, LIMIT, 60.0 * 99 + LIMIT) == []
    assert heartbeat.overdue(0.0, LIMIT, 60.0 * 99 + LIMIT + 1) == [1]


def test_one_that_goes_on_does_not_hide_one_that_hangs() -> None:
    heartbeat = waiting()
    for minute in range(20):
        heartbeat.hear({1: said(4, minute), 2: said(4, 7)}, 60.0 * minute)
    assert heartbeat.overdue(30.0, LIMIT, 20 * 60.0) == [2]


def test_without_signs_the_limit_is_the_wait() -> None:
    """The store is gone, or the others never told."""
    heartbeat = waiting()
    assert heartbeat.overdue(1000.0, LIMIT, 1000.0 + LIMIT) == []
    assert heartbeat.overdue(1000.0, LIMIT, 1001.0 + LIMIT) == [1, 2]


@pytest.mark.parametrize(
    ("others", "lost"),
    [
        ({1: [said(4, 3)] * 2, 2: [said(5, 3, 1), said(5, 3, 9)]}, [1]),  # silent, not come
        ({1: [said(4, 3, 1), said(4, 4, 9)], 2: [said(5, 3)] * 2}, [2]),  # came, and died there
        ({1: [said(4, 3, 1), said(4, 3, 9)], 2: [said(5, 3, 1), said(5, 3, 9)]}, [1]),  # hangs
        ({1: [said(5, 3, 1), said(5, 3, 9)], 2: [said(5, 3, 1), said(5, 3, 9, 9)]}, [1]),  # behind
        ({1: [said(5, 3)] * 2, 2: [said(5, 3, 1), said(5, 3, 1, 0, 1)]}, [1]),  # 2 gave up, too
        ({1: [said(5, 3, 1), said(5, 3, 9)], 2: [said(5, 3, 1), said(5, 3, 9)]}, []),
        ({1: [said(5, 3, 1), said(5, 3, 9)], 2: [said(5, 3, 9, 0, 1)] * 2}, []),  # 2 has gone
    ],
)
def test_who_is_lost(
    others: dict[int, list[str]], lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure: who fell silent, else who did not come, else who began fewer exchanges."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    has_exchanges = any(" 9 3 " in text for texts in others.values() for text in texts)
    heartbeat = waiting(9 if has_exchanges else 0)

    heard = iter((0, 1))

    def listen(seconds: float) -> None:
        now[0] += seconds
        which = next(heard)
        heartbeat.hear({r: texts[which] for r, texts in others.items()})

    monkeypatch.setattr(time, "sleep", listen)
    assert heartbeat.lost() == lost


def test_who_gives_up_says_so_and_knows_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a survivor that the others take for the lost one; and blame for who waits, too."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, told = dist.HashStore(), waiting()
    other = HeartbeatMonitor(2, 3, lambda: ReplicaProgress(5, 0, 7), is_telling=True)
    monkeypatch.setattr(time, "sleep", lambda _: told.exchange(store))
    told.hear({1: said(4, 3), 2: said(5, 3)})
    assert told.give_up([1]) == [1]
    with other.waiting():
        other.exchange(store)
    assert other.heartbeats[0].is_over
    told.hear({1: said(5, 3, 4)})
    assert told.give_up([1, 2]) == []  # all had come: it is not known whose link is gone
    now[0] += 60.0
    told.hear({1: said(4, 3)}, now[0] - 30.0)
    assert told.give_up([1]) == []  # this rank has not heard of anybody for long


def test_a_store_that_does_not_answer_is_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launch per replica the store lives in replica 0: stopped, it answers nobody."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    elsewhere = HeartbeatMonitor(
        1, 3, lambda: ReplicaProgress(5, 0, 1), is_telling=True, store_host=0
    )
    assert elsewhere.lost() == [0]
    assert waiting().lost() == []  # it is in the hands of the launch


def test_a_wait_that_failed_is_still_one() -> None:
    """Else the error would say that all had come."""
    heartbeat = waiting()
    with heartbeat.waiting():
        pass
    assert not heartbeat.is_waiting and not heartbeat.is_listening
    with pytest.raises(ZeroDivisionError), heartbeat.waiting():
        raise ZeroDivisionError
    assert heartbeat.is_waiting and not heartbeat.is_listening


def test_what_is_told_is_heard() -> None:
    """Over a store; in part, as long as not all have told."""
    store = dist.HashStore()
    mine, other = (
        waiting(),
        HeartbeatMonitor(2, 3, lambda: ReplicaProgress(4, 1, 9), is_telling=True),
    )
    other.batches = 3
    other.exchange(store)
    mine.exchange(store)
    assert mine.heartbeats[2].text == ""  # nobody waits
    with mine.waiting():
        mine.exchange(store)
    assert [sign.place for sign in mine.heartbeats] == [
        ReplicaProgress(5, 0, 40),
        heartbeats.NOWHERE,
        ReplicaProgress(4, 1, 12),
    ]
