"""A replica that does not come is named, with what to look at; not the key of a store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_edit.comm import worlds as module
from megatron_edit.comm.error_context import located
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import ReplicaLostError
from megatron_edit.host.checkpoint.committing import Committer

SOON = timedelta(milliseconds=20)


def world(*, is_single_launch: bool) -> ReplicaWorld:
    """Of replica 0 of two, which is alone."""
    place = Placement(2, 0, 1, 0, is_single_launch=is_single_launch)
    store = dist.HashStore()
    return ReplicaWorld(place, store, store, SOON)


@pytest.mark.parametrize("is_single_launch", [False, True])
def test_who_never_joined(is_single_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: "nobody announced agreed/1"."""
    monkeypatch.setattr(module, "JOIN_TIMEOUT", SOON)
    with pytest.raises(ReplicaLostError) as caught:
        world(is_single_launch=is_single_launch).wait_for("agreed/1", SOON)
    said = str(caught.value)
    assert said.startswith("replica 1 has not joined (agreed) within 0.02 s; ")
    assert ("is it started, with --edit-replica-id 1?" in said) is not is_single_launch


def test_who_did_not_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is told; in words, how long it took."""
    monkeypatch.setattr(module, "SETUP_TIMEOUT", SOON)
    with pytest.raises(ReplicaLostError, match=r"^replica 1 has not come \(groups\) within 0.02 s"):
        world(is_single_launch=False).after_all_replicas("groups")
    with pytest.raises(ReplicaLostError, match=r"^some rank of some replica .* \(findings/all\)"):
        world(is_single_launch=False).wait_for("findings/all", SOON)


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a broken connection that is told as a replica which was never started."""
    alone = world(is_single_launch=False)

    def wait(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer\nframe #0: ...")

    monkeypatch.setattr(alone, "shared_store", type("Gone", (), {"wait": wait})())
    with pytest.raises(ReplicaLostError) as caught:
        alone.wait_for("agreed/1", SOON)
    said = str(caught.value)
    assert said == (
        "the store broke while replica 1 was waited for (agreed): Connection reset by peer"
    )


def test_who_did_not_write_its_part() -> None:
    """Would catch: "nobody told save/500/3/0/1"."""
    alone = world(is_single_launch=False)
    committer = Committer(alone, last_wait=0.0)
    committer.wait()  # training is over: there is no time left
    part: Any = type("RankSave", (), {"name": "500/3", "is_of_a_stop": False})
    with pytest.raises(ReplicaLostError) as caught:
        committer._take(alone.shared_store, part, 1, 0)
    said = str(caught.value)
    assert "rank 0 of replica 1 has not said that its part is written (the time is up)" in said
    assert "save/" not in said


@pytest.mark.parametrize(
    ("time", "words"),
    [(timedelta(hours=6), "6 h"), (timedelta(minutes=10), "10 min"), (timedelta(seconds=9), "9 s")],
)
def test_times_in_words(time: timedelta, words: str) -> None:
    assert module._in_words(time) == words


@pytest.mark.parametrize("is_waiting", [True, False])
def test_who_was_lost_and_in_what(is_waiting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not come is told from who came and was lost; who is known already is not sought."""
    heartbeat = HeartbeatMonitor(0, 3, lambda: ReplicaProgress(1, 0, 0), is_telling=True)
    heartbeat.is_waiting = is_waiting
    monkeypatch.setattr(heartbeat, "lost", lambda: [1])
    place, how = "the warm-up (step 7)", "did not come to" if is_waiting else "was lost in"
    error = located(ReplicaLostError("peer"), heartbeat, place)
    assert str(error) == f"replica 1 {how} {place}: peer" and error.has_context
    known = ReplicaLostError("peer")
    known.lost = [2]
    assert str(located(known, heartbeat, place)) == f"replica 2 {how} {place}: peer"
