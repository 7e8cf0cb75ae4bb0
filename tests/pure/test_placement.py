"""Placement of ranks in replicas, computed from the environment of the launch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.comm import worlds
from megatron_edit.comm.placement import Placement, place
from megatron_edit.comm.worlds import ReplicaWorld, join
from megatron_edit.errors import UsageError
from tests.harness.ports import free_ports


def env(rank: int, world: int, **more: int) -> dict[str, str]:
    """Environment variables of one rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world)} | {k: str(v) for k, v in more.items()}


@given(st.integers(1, 8), st.integers(1, 8))
def test_single_launch_gives_replicas_contiguous_ranks(replicas: int, ranks: int) -> None:
    """Catches round-robin ranks: the sample order of stock Megatron needs contiguous replicas."""
    world = replicas * ranks
    places = [place(replicas, None, env(rank, world)) for rank in range(world)]
    assert [p.global_rank for p in places] == list(range(world))
    assert [p.replica for p in places] == [r // ranks for r in range(world)]
    assert [p.rank for p in places if p.is_writer] == [ranks - 1] * replicas  # it has the loss


@pytest.mark.parametrize(("num_nodes", "is_shared"), [(1, False), (2, True)])
def test_ranks_that_torchrun_starts_again_read_nothing_of_the_former(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, is_shared: bool
) -> None:
    """torchrun keeps its store, and with it the addresses of ranks that have ended. On several
    nodes its count differs between them."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "0")  # it would host the store
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(num_nodes))

    def world(start: int, rank: int) -> ReplicaWorld:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        placement = Placement(2, 0, 2, rank, is_single_launch=False)
        return join(placement, rendezvous=None, timeout_seconds=None, is_alone=True)

    first, other, later = world(0, 0), world(0, 1), world(1, 1)
    for name in ("replica_store", "shared_store"):
        getattr(first, name).set("address", "old")
        assert getattr(other, name).check(["address"])
        assert getattr(later, name).check(["address"]) is is_shared


@pytest.mark.parametrize("address", ["::1", "[::1]", "127.0.0.1"])
def test_address_of_a_launch_may_be_of_either_family(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: brackets with which torch waits ten minutes for a host of that name."""
    monkeypatch.setattr(worlds, "JOIN_TIMEOUT", timedelta(seconds=10))
    (port,) = free_ports(1)
    for name, value in env(0, 1, MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", address)
    first = join(Placement(2, 0, 1, 0, True), rendezvous=None, timeout_seconds=None)
    monkeypatch.setenv("RANK", "1")
    second = join(Placement(2, 1, 1, 0, True), rendezvous=None, timeout_seconds=None)
    first.shared_store.set("key", "value")
    assert second.shared_store.get("key") == b"value"
    assert second.store_host == address.strip("[]")


def test_each_rank_has_one_connection_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, with a launch for each replica. Would catch: a further one for each rank, for
    what it looks up while it waits for other launches."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    (port,) = free_ports(1)
    with ThreadPoolExecutor(3) as pool:
        running = [
            pool.submit(
                join,
                Placement(3, replica, 1, 0, False),
                rendezvous=f"[::1]:{port}",
                timeout_seconds=None,
            )
            for replica in range(3)
        ]
        joined = [each.result(60) for each in running]
    for each in joined:
        each.begin_training()
    found = psutil.Process().net_connections("tcp")
    clients = [each for each in found if each.raddr and each.raddr.port == port]
    assert len(clients) == len(joined), clients
    assert joined[1].watched(lambda: 5) == 5


def test_one_launch_per_replica() -> None:
    """Rank and world size are those of the launch; the replica id comes from the flag."""
    assert place(3, 2, env(1, 4)) == Placement(3, 2, 4, 1, is_single_launch=False)


@pytest.mark.parametrize(
    "nodes",
    [
        {"GROUP_WORLD_SIZE": 4},
        {"SLURM_NNODES": 4},
        {"LOCAL_WORLD_SIZE": 2},
        {"GROUP_WORLD_SIZE": 4, "SLURM_NNODES": 2},
    ],
)
def test_default_is_one_replica_per_node(nodes: dict[str, int]) -> None:
    """Nodes are counted by torchrun's agents, else by SLURM, else by the local world size."""
    assert place(None, None, env(5, 8, **nodes)).num_replicas == 4


@pytest.mark.parametrize(
    ("num_replicas", "environment"),
    [
        (None, env(0, 8)),
        (None, env(0, 8, GROUP_WORLD_SIZE=1)),
        (3, env(0, 8)),
        (16, env(0, 8)),
        (2, {"RANK": "first", "WORLD_SIZE": "8"}),
    ],
    ids=["one-node", "one-agent", "not-a-divisor", "more-than-ranks", "no-number"],
)
def test_invalid_launches_are_refused(
    num_replicas: int | None, environment: dict[str, str]
) -> None:
    """The error is one line with a remedy."""
    with pytest.raises(UsageError) as caught:
        place(num_replicas, None, environment)
    assert caught.value.remedy and "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"RANK": "5", "WORLD_SIZE": "8"}], ids=["none", "of-all"])
def test_environment_is_restored_after_detachment(given: dict[str, str]) -> None:
    """Catches variables left after the detachment that the launch had not set."""
    store, now = dist.HashStore(), {**given, "OTHER": "1"}
    world = ReplicaWorld(Placement(2, 1, 4, 1, True), store, store, timedelta(seconds=1))
    world.enter_environment(now)
    world.enter_environment(now)
    assert (now["RANK"], now["WORLD_SIZE"]) == ("1", "4")
    world.leave_environment(now)
    world.leave_environment(now)
    assert now == {**given, "OTHER": "1"}
