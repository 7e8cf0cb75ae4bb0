"""Errors about a missing replica name the replica and a remedy, not a store key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_edit.comm import worlds as module
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine.context import with_lost_replicas
from megatron_edit.errors import ReplicaLostError
from megatron_edit.host.checkpoint.committing import Committer

SOON = timedelta(milliseconds=20)


def world(*, is_single_launch: bool) -> ReplicaWorld:
    """Return the world of replica 0 of two; replica 1 never joins."""
    place = Placement(2, 0, 1, 0, is_single_launch=is_single_launch)
    store = dist.HashStore()
    return ReplicaWorld(place, store, store, SOON)


@pytest.mark.parametrize("is_single_launch", [False, True])
def test_wait_names_replica_that_never_joined(
    is_single_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a message that names the store key "agreed/1" instead of the replica."""
    monkeypatch.setattr(module, "JOIN_TIMEOUT", SOON)
    with pytest.raises(ReplicaLostError) as caught:
        world(is_single_launch=is_single_launch).wait_for("agreed/1", SOON)
    message = str(caught.value)
    assert message.startswith("replica 1 has not joined (agreed) within 0.02 s; ")
    assert ("is it started, with --edit-replica-id 1?" in message) is not is_single_launch


def test_setup_wait_names_missing_replica_and_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the event and the time limit in words."""
    monkeypatch.setattr(module, "SETUP_TIMEOUT", SOON)
    pattern = r"^replica 1 has not arrived \(groups\) within 0.02 s"
    with pytest.raises(ReplicaLostError, match=pattern):
        world(is_single_launch=False).wait_for_all_replicas("groups")
    with pytest.raises(ReplicaLostError, match=r"^some rank of some replica .* \(findings/all\)"):
        world(is_single_launch=False).wait_for("findings/all", SOON)


def test_other_ranks_of_a_replica_name_the_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for one key, not for each replica. Catches "some rank of some replica"."""
    monkeypatch.setattr(module, "SETUP_TIMEOUT", SOON)
    store = dist.HashStore()
    ranks = [ReplicaWorld(Placement(3, 1, 2, rank, True), store, store, SOON) for rank in range(2)]
    store.set("groups/0", "1")
    pattern = r"^replica 2 has not arrived \(groups\) within 0.02 s"
    for rank in ranks:
        with pytest.raises(ReplicaLostError, match=pattern):
            rank.wait_for_all_replicas("groups")


def test_lost_store_is_not_reported_as_missing_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a broken store connection reported as a replica that was never started."""
    alone = world(is_single_launch=False)

    def wait(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer\nframe #0: ...")

    monkeypatch.setattr(alone, "shared_store", type("Gone", (), {"wait": wait})())
    with pytest.raises(ReplicaLostError) as caught:
        alone.wait_for("agreed/1", SOON)
    message = str(caught.value)
    assert message == (
        "the store failed while waiting for replica 1 (agreed): Connection reset by peer"
    )


def test_save_names_rank_that_did_not_report() -> None:
    """Catches a message that names the store key "save/500/3/0/1" instead of the rank."""
    alone = world(is_single_launch=False)
    committer = Committer(alone, last_wait=0.0)
    committer.wait()  # training is over: there is no time left
    part: Any = type("RankSave", (), {"name": "500/3", "is_stop_save": False})
    with pytest.raises(ReplicaLostError) as caught:
        committer._wait_for_report(alone.shared_store, part, 1, 0)
    message = str(caught.value)
    assert (
        "rank 0 of replica 1 has not reported that its part is written (the time is up)" in message
    )
    assert "save/" not in message


@pytest.mark.parametrize(
    ("time", "words"),
    [(timedelta(hours=6), "6 h"), (timedelta(minutes=10), "10 min"), (timedelta(seconds=9), "9 s")],
)
def test_timeouts_are_formatted_in_words(time: timedelta, words: str) -> None:
    assert module._in_words(time) == words


@pytest.mark.parametrize("is_waiting", [True, False])
def test_lost_replica_error_names_replica_and_phase(
    is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that never arrived is distinguished from one that was lost in the phase.

    Replicas that the error names already are kept.
    """
    heartbeat = HeartbeatMonitor(0, 3, lambda: ReplicaProgress(1, 0, 0), is_reporting=True)
    heartbeat.is_waiting = is_waiting
    monkeypatch.setattr(heartbeat, "find_lost", lambda: [1])
    place, how = "the warm-up (step 7)", "did not reach" if is_waiting else "was lost in"
    error = with_lost_replicas(ReplicaLostError("peer"), heartbeat, place)
    assert str(error) == f"replica 1 {how} {place}: peer" and error.has_context
    known = ReplicaLostError("peer")
    known.lost = [2]
    assert str(with_lost_replicas(known, heartbeat, place)) == f"replica 2 {how} {place}: peer"
