"""Two launches with one replica id: who is told, and when."""

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
    monkeypatch.setattr("megatron_edit.comm.worlds.LOOK", timedelta(seconds=0.1))


def world(shared: dist.Store, own: dist.Store, replica: int, rank: int = 0) -> ReplicaWorld:
    """Of one of two ranks of a launch; three replicas."""
    place = Placement(3, replica, 2, rank, is_single_launch=False)
    registry = LaunchRegistry(shared, own, place)
    return ReplicaWorld(place, own, shared, TIME, registry)


def register(launch: ReplicaWorld) -> None:
    """What joining does."""
    assert launch.registry is not None
    launch.registry.register(TIME)


def refusals(*calls: Callable[[], None]) -> list[str]:
    """What each says, all at once in threads; empty where it says nothing."""
    said = [""] * len(calls)

    def call(index: int) -> None:
        try:
            calls[index]()
        except UsageError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME.total_seconds())
        assert not thread.is_alive()
    return said


def test_all_launches_are_told() -> None:
    """Ranks that wait for a missing replica, and all ranks of the second launch, which do nothing
    else before. Catches a launch that waits until that replica is given up."""
    shared, first, second, third = (dist.HashStore() for _ in range(4))
    waiting = [world(shared, first, 0), world(shared, second, 1), world(shared, second, 1, rank=1)]
    for launch in waiting:
        register(launch)
    late = [world(shared, third, 1, rank) for rank in range(2)]
    said = refusals(
        *(lambda launch=launch: launch.wait_for("agreed/2", TIME) for launch in waiting),
        *(lambda launch=launch: register(launch) for launch in late),
    )
    assert len(set(said)) == 1
    assert said[0].startswith("--edit-replica-id 1: two launches have it, on ")
    assert "an earlier attempt of this replica, or another job on this port" in said[0]
    assert said[0].endswith("; give each launch an id of its own, 0 to 2")


def test_one_that_comes_late_ends_alone() -> None:
    """Catches a training that a launch started by mistake ends."""
    shared, own = dist.HashStore(), dist.HashStore()
    trains = world(shared, own, 1)
    register(trains)
    trains.begin_training()
    (said,) = refusals(lambda: register(world(shared, dist.HashStore(), 1)))
    assert said.startswith("--edit-replica-id 1: a launch on ") and "trains already" in said
    shared.set("later", "1")
    trains.wait_for("later", TIME)


def test_one_too_many_ends_alone() -> None:
    """No replica is missing, though training has not begun yet. Catches a job that ends another
    one, which has the same port."""
    shared = dist.HashStore()
    launches = [world(shared, dist.HashStore(), replica) for replica in range(3)]
    assert refusals(*(lambda launch=launch: register(launch) for launch in launches)) == [""] * 3
    (said,) = refusals(lambda: register(world(shared, dist.HashStore(), 0)))
    assert "has it, and no replica is missing (" in said and "another job on this port" in said
    assert refusals(*(launch.begin_training for launch in launches)) == [""] * 3


def test_all_ranks_begin_or_none() -> None:
    """Refused before the first begins: catches a rank that trains while the others have ended."""
    shared, own = dist.HashStore(), dist.HashStore()
    ranks = [world(shared, own, 0, rank) for rank in range(2)]
    register(ranks[0])
    refusals(lambda: register(world(shared, dist.HashStore(), 0)))
    said = refusals(*(launch.begin_training for launch in ranks))
    assert "" not in said


def test_different_ids_begin() -> None:
    """And a wait that has a time-out of its own ends by it, with no look in between."""
    shared = dist.HashStore()
    launches = [world(shared, dist.HashStore(), replica) for replica in range(3)]
    assert refusals(*(lambda launch=launch: register(launch) for launch in launches)) == [""] * 3
    assert refusals(*(launch.begin_training for launch in launches)) == [""] * 3
