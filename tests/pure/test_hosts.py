"""Which ranks of a launch make which replica, by the hosts that they run on."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.comm.placement import (
    Arrangement,
    Placement,
    arrange,
    host_lines,
    natural_key,
    straddling_warnings,
)
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.words import parse_hosts

# torchrun numbers nodes by their names as texts.
TORCHRUN_ORDER = ["node1", "node10", "node11", "node2"]


def counts(hosts: list[str], num_replicas: int, by: str = "hosts", text: str = "") -> list[object]:
    """Return ranks by host, for each replica."""
    return list(arrange(hosts, num_replicas, by, text).counts())


@pytest.mark.parametrize("ranks", [1, 2])
def test_hosts_are_taken_in_natural_order(ranks: int) -> None:
    """Would catch: node1 and node10 make a replica, as torchrun numbers them."""
    hosts = [name for name in TORCHRUN_ORDER for _ in range(ranks)]
    assert counts(hosts, 2) == [
        {"node1": ranks, "node2": ranks},
        {"node10": ranks, "node11": ranks},
    ]
    assert counts(hosts, 2, "ranks")[0] == {"node1": ranks, "node10": ranks}


def test_interleaved_ranks_of_a_batch_system_are_put_together() -> None:
    """Would catch: `srun --distribution=cyclic` gives each replica ranks on every host."""
    found = arrange(["a", "b"] * 4, 2, "hosts")
    assert found.replicas == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert list(straddling_warnings(arrange(["a", "b"] * 4, 2, "ranks").counts()))


@pytest.mark.parametrize(
    ("hosts", "num_replicas", "expected"),
    [
        ({"a": 4, "b": 8, "c": 4}, 2, [{"a": 4, "c": 4}, {"b": 8}]),
        ({"a": 3, "b": 2, "c": 1, "d": 2}, 2, [{"a": 3, "c": 1}, {"b": 2, "d": 2}]),
        ({"a": 8}, 4, [{"a": 2}] * 4),
        ({"a": 6, "b": 2}, 2, [{"a": 4}, {"a": 2, "b": 2}]),
    ],
)
def test_replica_spans_hosts_only_where_it_must(
    hosts: dict[str, int], num_replicas: int, expected: list[dict[str, int]]
) -> None:
    """Hosts with unequal numbers of ranks."""
    found = counts([name for name, num in hosts.items() for _ in range(num)], num_replicas)
    assert found == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 6), st.randoms())
def test_every_rank_is_in_one_replica(nums: list[int], size: int, draw: object) -> None:
    """For any hosts, in any order of ranks; equal hosts never give a needless warning."""
    hosts = [f"h{n}" for n, num in enumerate(nums) for _ in range(num)]
    hosts += [f"h{len(nums)}"] * (-len(hosts) % size)
    draw.shuffle(hosts)  # type: ignore[attr-defined]
    found = arrange(hosts, len(hosts) // size, "hosts")
    assert {len(ranks) for ranks in found.replicas} == {size}
    flat = [rank for ranks in found.replicas for rank in ranks]
    assert sorted(flat) == list(range(len(hosts)))
    for rank, (replica, inner) in enumerate(found.places()):
        assert found.replicas[replica][inner] == rank
    per_host = set(Counter(hosts).values())
    if len(per_host) == 1 and (size % min(per_host) == 0 or min(per_host) % size == 0):
        assert not list(straddling_warnings(found.counts()))


def test_natural_order_of_names() -> None:
    names = ["b1", "a10-x", "a9-y", "a9-x", "10", "9", "a"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "a9-x", "a9-y", "a10-x", "b1"]


HOSTS = ["a", "a", "b", "b", "c", "c", "d", "d"]


def test_file_gives_the_hosts_of_each_replica() -> None:
    """Also with comments, commas, and a host that two replicas share."""
    assert counts(HOSTS, 2, "file", "# west\nd, a\n\nc b  # east\n") == [
        {"d": 2, "a": 2},
        {"c": 2, "b": 2},
    ]
    assert counts(["a"] * 4, 2, "file", "a\na\n") == [{"a": 2}, {"a": 2}]


def test_file_gives_the_site_of_each_replica() -> None:
    """Would catch the name of a site that counts as a host, or that ends with its first replica."""
    found = arrange(HOSTS, 4, "file", "# two\n[west]\na\nb\n[ far east ] # slow\n\nc\nd\n")
    assert found.sites == ("west", "west", "far east", "far east")
    assert found.replicas == arrange(HOSTS, 4, "file", "a\nb\nc\nd\n").replicas
    assert arrange(HOSTS, 4, "file", "a\nb\nc\nd\n").sites == ()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[x] a b\nc d\n", "has a site that is not on a line of its own ([x] a b)"),
        ("a b\n[x]\nc d\n", "names hosts before the first site"),
        ("a b\n[]\nc d\n", "has a site that is not on a line of its own ([])"),
        ("a b\n", "has 1 lines with hosts for 2 replicas"),
        ("a b\nc e\n", "names e, which is not one of the hosts a, b, c, d"),
        ("a b\nc\n", "does not name d"),
        ("a b c\nd\n", "gives replica 0 6 ranks, where each must have 4"),
        ("a b a\nc d a\n", "names a 3 times, which does not divide its 2 ranks"),
    ],
)
def test_wrong_files_are_refused(text: str, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        counts(HOSTS, 2, "hosts.txt", text)
    assert str(caught.value).startswith("--edit-placement hosts.txt") and rule in str(caught.value)


def test_lines_say_where_each_replica_is() -> None:
    assert host_lines([{"a": 1}, {"a": 1}]) == ["all 2 replicas are on a"]
    assert host_lines([{"a": 2, "b": 1}, {"c": 3}]) == [
        "replica 0 is on a (2 ranks), b (1 rank)",
        "replica 1 is on c (3 ranks)",
    ]
    assert host_lines([{"a": 1}], "east") == ["replica east is on a (1 rank)"]


def test_hosts_of_a_check() -> None:
    assert parse_hosts("a,b", 4) == ["a", "a", "b", "b"]
    assert parse_hosts("a:1,b:3", None) == ["a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("text", "world_size"),
    [
        ("a,b", None),
        ("a,b", 3),
        ("a,a", 2),
        ("a:1,b", 2),
        ("a:0,b:1", 1),
        ("a:1", 2),
        ("", 1),
        ("a:99999999999,b:1", None),
        ("a:999999999,b:1", None),
        ("a:²,b:1", None),
    ],
)
def test_wrong_hosts_of_a_check_are_refused(text: str, world_size: int | None) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        parse_hosts(text, world_size)


def arrange_worlds(
    names: list[str], by: str, monkeypatch: pytest.MonkeyPatch, *, is_single_launch: bool = True
) -> list[ReplicaWorld | UsageError]:
    """Arrange the ranks of two replicas, a thread each."""
    own_name = threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: own_name.value)
    monkeypatch.setattr("megatron_edit.comm.interfaces.why_unreachable", lambda: None)
    shared, launch = dist.HashStore(), dist.HashStore()
    found: list[ReplicaWorld | UsageError] = [UsageError("", "", "")] * len(names)

    def run(rank: int) -> None:
        own_name.value = names[rank]
        replica, inner = divmod(rank, len(names) // 2)
        place = Placement(2, replica, len(names) // 2, inner, is_single_launch)
        store = dist.PrefixStore(f"edit/replica{replica}", launch)
        world = ReplicaWorld(place, store, shared, timedelta(seconds=20))
        try:
            world.arrange(by)
            found[rank] = world
        except UsageError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_ranks_of_a_launch_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: the replica's store is still that of the other replica."""
    names = ["node10", "node2", "node11", "node1"]
    worlds = arrange_worlds(names, "hosts", monkeypatch)
    assert all(isinstance(world, ReplicaWorld) for world in worlds)
    placed = [world for world in worlds if isinstance(world, ReplicaWorld)]
    assert [(w.placement.replica, w.placement.rank) for w in placed] == [
        (1, 0), (0, 1), (1, 1), (0, 0),
    ]  # fmt: skip
    assert [world.is_first for world in placed] == [True, False, False, False]
    for world in placed:
        world.replica_store.set("own", str(world.placement.replica))
    assert [world.replica_store.get("own") for world in placed] == [b"1", b"0", b"1", b"0"]
    assert placed[0].arrangement == Arrangement(tuple(names), ((3, 1), (0, 2)))


def test_ranks_of_two_launches_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: hosts that belong to the other replica, and another process that is first."""
    found = arrange_worlds(
        ["node2", "node2", "node1", "node1"], "hosts", monkeypatch, is_single_launch=False
    )
    worlds = [world for world in found if isinstance(world, ReplicaWorld)]
    assert [world.placement.global_rank for world in worlds] == [0, 1, 2, 3]
    assert [world.is_first for world in worlds] == [True, False, False, False]
    assert worlds[0].arrangement is not None
    assert worlds[0].arrangement.counts() == [{"node2": 2}, {"node1": 2}]


def test_text_is_shared_by_global_rank_0_of_arranged_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Would catch: the first process of the launch reports a save, of which it knows nothing."""
    found = arrange_worlds(["node10", "node9"], "hosts", monkeypatch)
    worlds = [world for world in found if isinstance(world, ReplicaWorld)]
    with ThreadPoolExecutor(2) as pool:
        texts = [
            pool.submit(world.shared_text, "outcome", partial(str, world.placement.global_rank))
            for world in worlds
        ]
        assert [text.result(20) for text in texts] == ["0", "0"]


def test_file_that_cannot_be_read_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = arrange_worlds(["a", "b"], str(tmp_path / "missing"), monkeypatch)
    assert all(isinstance(each, UsageError) and "No such file" in each.rule for each in found)
