"""Two launches with the same replica id: which launches end, and when."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_edit.comm import replica_ids
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.replica_ids import LaunchRegistry
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import EditError, ReplicaLostError, UsageError

TIME = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_ids, "_STAY_SECONDS", 0.0)
    monkeypatch.setattr("megatron_edit.comm.first_contact.LONGEST_POLL_SECONDS", 0.1)


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


def of_two(shared: dist.Store, replica: int) -> ReplicaWorld:
    """The world of a launch among two replicas."""
    own, place = dist.HashStore(), Placement(2, replica, 1, 0, is_single_launch=False)
    return ReplicaWorld(place, own, shared, TIME, LaunchRegistry(shared, own, place))


def test_other_number_of_replicas_is_refused_at_once() -> None:
    """Also on a launch that waits already. Would catch one that waits for replicas of another job,
    and a complete job that a launch of another one ends."""
    shared = dist.HashStore()
    first = of_two(shared, 0)
    register(first)
    late = world(shared, dist.HashStore(), 2)
    messages = refusals(lambda: first.wait_for("agreed/1", TIME), lambda: register(late))
    assert messages[0] == messages[1] != ""
    assert messages[0].startswith("--edit-num-replicas 3 on replica 2 on ")
    assert ": must be as on replica 0 on " in messages[0] and ", which has 2; " in messages[0]
    shared = dist.HashStore()
    launches = [of_two(shared, replica) for replica in range(2)]
    assert refusals(*(lambda each=each: register(each) for each in launches)) == ["", ""]
    (message,) = refusals(lambda: register(world(shared, dist.HashStore(), 2)))
    assert message.startswith("--edit-num-replicas 3 on replica 2 on ")
    assert refusals(*(launch.begin_training for launch in launches)) == ["", ""]


def launches_of_two() -> list[ReplicaWorld]:
    """Two launches that have registered; replica 0 watches replica 1."""
    shared = dist.HashStore()
    launches = [of_two(shared, replica) for replica in range(2)]
    for launch in launches:
        register(launch)
        assert launch.registry is not None
        if launch.placement.replica:
            launch.registry.be_watched("127.0.0.1")
        else:
            launch.registry.watch_launches()
    return launches


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UsageError("gcc", "is missing", "install it"), UsageError, "gcc: is missing; install it"),
        (RuntimeError("torn"), ReplicaLostError, "has ended: RuntimeError: torn; look at its last"),
        (SystemExit(1), ReplicaLostError, "has ended: the script exited with 1; look at its last"),
    ],
)
def test_launch_that_fails_is_named_by_those_that_wait(
    error: BaseException, kind: type[EditError], message: str
) -> None:
    """Whatever they wait for, before training and after it has begun."""
    first, second = launches_of_two()
    second.leave(error)
    for wait in (
        lambda: first.wait_for("agreed/1", TIME),
        lambda: first.watched(threading.Event().wait),
    ):
        with pytest.raises(kind, match=f"^replica 1 on {socket.gethostname()}.*{message}"):
            wait()
    first.shared_store.set("agreed/1", "")
    first.wait_for("agreed/1", TIME)  # what was set before is there
    with pytest.raises(kind):
        first.begin_training()
        first.wait_for("later", TIME)


@pytest.mark.parametrize("error", [None, ReplicaLostError("lost")])
def test_end_does_not_wait_for_a_store_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch, error: ReplicaLostError | None
) -> None:
    """Would catch a process that has failed and never exits."""
    _, second = launches_of_two()
    assert second.registry is not None
    monkeypatch.setattr(
        second.registry, "_shared", SimpleNamespace(compare_set=lambda *_: time.sleep(30))
    )
    start = time.monotonic()
    second.leave(error)
    assert time.monotonic() - start < 10


def test_lost_store_is_replica_0_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a traceback on the others where replica 0 is killed."""

    def fail(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer\nframe 0")

    _, second = launches_of_two()
    monkeypatch.setattr(second.registry, "_shared", SimpleNamespace(check=fail))
    with pytest.raises(ReplicaLostError, match=r"replica 0 is gone \(Connection reset by peer\);"):
        second.watched(threading.Event().wait)


@pytest.mark.parametrize("is_orderly", [False, True])
def test_closed_connection_is_the_end_of_a_launch(is_orderly: bool) -> None:
    """As where a process is killed; not where it said that it ends. Strangers change nothing."""
    first, second = launches_of_two()
    assert second.registry is not None and second.registry._connection is not None
    port = second.registry._connection.getpeername()[1]
    for text in (b"", b"GET / HTTP/1.0\r\n", b"wrong 1\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(text)
    if is_orderly:
        second.leave(None)
    second.registry._connection.close()
    limit = timedelta(seconds=1) if is_orderly else TIME
    with pytest.raises(ReplicaLostError) as lost:
        first.wait_for("agreed/1", limit)
    assert ("it was killed, or its machine is lost" in str(lost.value)) is not is_orderly


def test_launches_with_different_ids_begin_training() -> None:
    """Three launches with ids of their own register and begin without an error."""
    shared = dist.HashStore()
    launches = [world(shared, dist.HashStore(), replica) for replica in range(3)]
    assert refusals(*(lambda launch=launch: register(launch) for launch in launches)) == [""] * 3
    assert refusals(*(launch.begin_training for launch in launches)) == [""] * 3
