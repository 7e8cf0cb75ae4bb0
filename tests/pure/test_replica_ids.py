"""Two launches with the same replica id: which launches end, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_edit.comm import replica_ids
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.replica_ids import LaunchRegistry
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError

TIME = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_ids, "_STAY_SECONDS", 0.0)
    monkeypatch.setattr("megatron_edit.comm.worlds.POLL_INTERVAL", timedelta(seconds=0.1))


def world(shared: dist.Store, own: dist.Store, replica: int, rank: int = 0) -> ReplicaWorld:
    """The world of one of two ranks of a launch, among three replicas."""
    place = Placement(3, replica, 2, rank, is_single_launch=False)
    registry = LaunchRegistry(shared, own, place)
    return ReplicaWorld(place, own, shared, TIME, registry)


def register(launch: ReplicaWorld) -> None:
    """Register a launch, as joining the world does."""
    assert launch.registry is not None
    launch.registry.register(TIME)


def refusals(*calls: Callable[[], None]) -> list[str]:
    """Run all calls in threads at once; returns their error messages, empty without an error."""
    messages = [""] * len(calls)

    def call(index: int) -> None:
        try:
            calls[index]()
        except UsageError as error:
            messages[index] = str(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME.total_seconds())
        assert not thread.is_alive()
    return messages


def test_duplicate_id_ends_all_launches_before_training() -> None:
    """Both ranks that wait for a missing replica and all ranks of the second launch get the error.
    Catches a launch that waits until the time-out of the missing replica."""
    shared, first, second, third = (dist.HashStore() for _ in range(4))
    waiting = [world(shared, first, 0), world(shared, second, 1), world(shared, second, 1, rank=1)]
    for launch in waiting:
        register(launch)
    late = [world(shared, third, 1, rank) for rank in range(2)]
    messages = refusals(
        *(lambda launch=launch: launch.wait_for("agreed/2", TIME) for launch in waiting),
        *(lambda launch=launch: register(launch) for launch in late),
    )
    assert len(set(messages)) == 1
    assert messages[0].startswith("--edit-replica-id 1: two launches have it, on ")
    assert "an earlier attempt of this replica, or another job on this port" in messages[0]
    assert messages[0].endswith("; give each launch an id of its own, 0 to 2")


def test_duplicate_launch_after_training_began_ends_alone() -> None:
    """Catches a training that is ended by a launch started by mistake."""
    shared, own = dist.HashStore(), dist.HashStore()
    trains = world(shared, own, 1)
    register(trains)
    trains.begin_training()
    (message,) = refusals(lambda: register(world(shared, dist.HashStore(), 1)))
    assert message.startswith("--edit-replica-id 1: a launch on ") and "trains already" in message
    shared.set("later", "1")
    trains.wait_for("later", TIME)


def test_duplicate_launch_of_complete_job_ends_alone() -> None:
    """No replica is missing, although training has not begun. Catches a job that ends another job
    on the same port."""
    shared = dist.HashStore()
    launches = [world(shared, dist.HashStore(), replica) for replica in range(3)]
    assert refusals(*(lambda launch=launch: register(launch) for launch in launches)) == [""] * 3
    (message,) = refusals(lambda: register(world(shared, dist.HashStore(), 0)))
    assert (
        "has it, and no replica is missing (" in message and "another job on this port" in message
    )
    assert refusals(*(launch.begin_training for launch in launches)) == [""] * 3


def test_duplicate_id_keeps_all_ranks_from_training() -> None:
    """Catches a rank that trains while the others of its replica have ended."""
    shared, own = dist.HashStore(), dist.HashStore()
    ranks = [world(shared, own, 0, rank) for rank in range(2)]
    register(ranks[0])
    refusals(lambda: register(world(shared, dist.HashStore(), 0)))
    messages = refusals(*(launch.begin_training for launch in ranks))
    assert "" not in messages


def test_launches_with_different_ids_begin_training() -> None:
    """Three launches with ids of their own register and begin without an error."""
    shared = dist.HashStore()
    launches = [world(shared, dist.HashStore(), replica) for replica in range(3)]
    assert refusals(*(lambda launch=launch: register(launch) for launch in launches)) == [""] * 3
    assert refusals(*(launch.begin_training for launch in launches)) == [""] * 3
