"""What ranks agree on when a launch starts, and errors about those that are missing."""

from __future__ import annotations

import json
import socket
import struct
import threading
from argparse import Namespace
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.comm import interfaces, worlds
from megatron_edit.comm import worlds as module
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.interfaces import choose_interfaces, host_facts, route_address
from megatron_edit.comm.placement import Placement, place
from megatron_edit.comm.worlds import ReplicaWorld, join
from megatron_edit.config import EditConfig
from megatron_edit.engine.context import with_lost_replicas
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.host.agreement import agree_on_settings, comparable_settings
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks
from megatron_edit.host.checkpoint.committing import Committer
from tests.harness.ports import free_ports

CONFIG = EditConfig(use_edit=True, num_replicas=2)
CPU = torch.device("cpu")
# Each contains a word of a host-specific setting (rank, log, offset, ...).
TRAINING_SETTINGS = ("q_lora_rank", "kv_lora_rank", "logits_load_kd_loss_alpha",
                   "num_virtual_stages_per_pipeline_rank", "offset_sampling_seed_by_dp_rank",
                   "seq_length")  # fmt: skip
HOST_SETTINGS = ("rank", "local_rank", "data_cache_path", "tensorboard_dir", "log_interval",
               "wandb_exp_name", "num_workers", "edit_replica_id", "merge_file", "logdir",
               "logits_load_decode_threads")  # fmt: skip


@pytest.mark.parametrize("name", TRAINING_SETTINGS)
def test_training_settings_are_compared(name: str) -> None:
    """Catches a model size that is taken for a host-specific setting because of its name."""
    flag = "--" + name.replace("_", "-")
    assert comparable_settings(CONFIG, Namespace(**{name: 7}))[flag] == 7


@pytest.mark.parametrize("name", HOST_SETTINGS)
def test_host_specific_settings_are_not_compared(name: str) -> None:
    """Catches replicas that refuse each other because of a folder."""
    flag = "--" + name.replace("_", "-")
    assert comparable_settings(CONFIG, Namespace(**{name: 7})).get(flag) != 7


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({}, None),
        ({"lr": 0.2}, "--lr 0.2 on replica 1: must be as on replica 0, which has 0.1"),
        ({"more": 5}, "--more 5 on replica 1: must be as on replica 0, which has None"),
        ({"lr": None}, "--lr None on replica 1: must be as on replica 0, which has 0.1"),
    ],
    ids=["same", "other", "more", "less"],
)
def test_differing_setting_is_refused(mine: dict[str, float | None], message: str | None) -> None:
    """Also a setting that only one replica has; equal NaN values agree.

    Replica 0 has stored its settings already.
    """
    args, store = {"lr": 0.1, "nan": float("nan")}, dist.HashStore()
    worlds = [
        ReplicaWorld(Placement(2, r, 1, 0, True), store, store, timedelta(seconds=1))
        for r in range(2)
    ]
    first = comparable_settings(CONFIG, Namespace(**args)) | {"ranks per replica": 1}
    store.set("settings", json.dumps(first))
    store.set("agreed/0", "null")
    store.set("device of rank 0 of replica 0", "cpu on host0")
    if message is None:
        agree_on_settings(worlds[1], CONFIG, Namespace(**args | mine), CPU)
        return
    with pytest.raises(UsageError) as caught:
        agree_on_settings(worlds[1], CONFIG, Namespace(**args | mine), CPU)
    assert str(caught.value).startswith(message)


def test_rank_on_different_device_is_refused_everywhere() -> None:
    """The device is compared before the settings that depend on it; all ranks raise one line.

    Catches CPU ranks that wait over gloo for GPU ranks, which wait over NCCL.
    """
    store, errors = dist.HashStore(), {}

    def join(rank: int) -> None:
        replica, inner = divmod(rank, 2)
        place = Placement(2, replica, 2, inner, True)
        world = ReplicaWorld(place, store, store, timedelta(seconds=1))
        device = torch.device("cpu" if rank == 3 else "cuda")
        backend = {"distributed_backend": "gloo" if rank == 2 else "nccl"}
        try:
            agree_on_settings(world, CONFIG, Namespace(**backend), device)
        except UsageError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(errors) == [0, 1, 2, 3] and len(set(errors.values())) == 1
    assert errors[0].startswith("device of rank 1 of replica 1: cpu on ")
    assert "rank 0 of replica 0, which has cuda on " in errors[0]
    assert "--edit-device cpu" in errors[0]


def test_single_rank_agrees_without_using_the_store() -> None:
    """One replica of one rank has nothing to compare."""
    store = dist.HashStore()
    world = ReplicaWorld(Placement(1, 0, 1, 0, True), store, store, timedelta(seconds=1))
    agree_on_settings(world, CONFIG, Namespace(), CPU)
    assert store.num_keys() == 0


# ---- Errors about a missing replica name the replica and a remedy, not a store key


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


# ---- An error that one rank finds in a common check is raised on all ranks


def read_truncated() -> None:
    """Fail as for a file that ends within its header."""
    struct.unpack("<Q", b"123")


def read_from_failed_disk() -> None:
    """Fail as for a disk with I/O errors."""
    raise OSError(5, "Input/output error", "corpus.bin")


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (read_truncated, "the corpus", "cannot be checked (error: unpack requires a buffer"),
        (lambda: json.loads("{"), "the corpus", "cannot be checked (JSONDecodeError: "),
        (read_from_failed_disk, "the corpus corpus.bin", "cannot be used (Input/output error)"),
    ],
)
def test_check_failure_is_raised_on_all_replicas(
    check: Callable[[], None], value: str, rule: str
) -> None:
    """Catches a rank that exits alone, so that the others wait for hours."""
    store = dist.HashStore()
    errors: list[UsageError] = []

    def rank(replica: int) -> None:
        place = Placement(2, replica, 1, 0, True)
        world = ReplicaWorld(place, store, store, timedelta(seconds=20))
        try:
            check_on_all_ranks(world, "x", check if replica else lambda: None, what="the corpus")
        except UsageError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [error.value for error in errors] == [value] * 2
    assert all(error.rule.startswith(rule) for error in errors)


# ---- The interface that gloo listens on between several machines


LOOPS = ("gloo listens on 127.0.1.1 (where the machine's name leads)", "export X=eth0 there")
Address = namedtuple("Address", "family address netmask")


def routed(host: str, name: str = "eth0", address: str = "10.0.0.2", **more: Any) -> dict[str, Any]:
    """A machine with a route to the store over an interface."""
    return {"host": host, "reason": LOOPS, "interface": name, "address": address, **more}


def hosts_the_store(*networks: tuple[str, str], reason: Any = LOOPS) -> dict[str, Any]:
    """The machine of the store, whose own name leads to the loopback."""
    return {"host": "a", "reason": reason, "networks": networks}


def test_interface_on_the_route_is_chosen() -> None:
    """Also where the machine's name leads to the loopback, and other names on other machines.
    Would catch: gloo on 127.0.1.1, which no other machine reaches."""
    assert choose_interfaces([routed("a"), routed("b", "wg0", "10.0.0.3")]) == ["eth0", "wg0"]
    user = {"host": "b", "reason": None}
    assert choose_interfaces([routed("a"), user]) == ["eth0", ""]


def test_single_machine_keeps_the_default() -> None:
    assert choose_interfaces([routed("a"), routed("a"), hosts_the_store()]) == ["", "", ""]


def test_host_of_the_store_takes_the_network_of_the_others() -> None:
    """Its own route to the store is the loopback. Would catch: the first interface taken."""
    networks = ("ib0", "10.9.0.1/255.255.0.0"), ("eth0", "10.0.0.1/255.255.255.0")
    found = [hosts_the_store(*networks), routed("b"), routed("c", "eth1", "10.0.0.3")]
    assert choose_interfaces(found) == ["eth0", "eth0", "eth1"]


@pytest.mark.parametrize(
    "others",
    [
        [routed("b", address="192.168.1.2")],
        [routed("b"), routed("c", address="192.168.1.2")],
        [{"host": "b", "reason": None}],
        [routed("b", "", "fd00::2")],
    ],
    ids=["other network", "two networks", "chosen by the user", "no interface"],
)
def test_unreachable_machine_is_refused_with_a_remedy(others: list[dict[str, Any]]) -> None:
    """Would catch: a launch that waits ten minutes and ends with code 4."""
    with pytest.raises(UsageError) as caught:
        choose_interfaces([hosts_the_store(("eth0", "10.0.0.1/255.255.255.0")), *others])
    assert str(caught.value) == f"a: {LOOPS[0]}: other machines cannot reach it; {LOOPS[1]}"
    reachable = hosts_the_store(reason=None)  # its name leads to an address that others reach
    assert choose_interfaces([reachable, routed("b")]) == ["", "eth0"]


def test_facts_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an interface of the user that is replaced, one that is down, a virtual one."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    addresses = {
        "lo": [Address(v4, "127.0.0.1", "255.0.0.0")],
        "docker0": [Address(v4, "172.17.0.1", "255.255.0.0")],
        "eth0": [Address(v4, "10.0.0.1", "255.255.255.0"), Address(v6, "fe80::1%eth0", None)],
        "eth1": [Address(v6, "fd00::1", None)],
        "down0": [Address(v4, "10.0.1.1", "255.255.255.0")],
    }
    stats = {name: SimpleNamespace(isup=name != "down0") for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(interfaces, "own_address", lambda: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    routes = {"v4": "10.0.0.1", "v6": "fd00::1", "self": "127.0.0.1"}
    monkeypatch.setattr(interfaces, "route_address", lambda host, port: routes[host])
    for host, name in (("v4", "eth0"), ("v6", "eth1")):
        facts = host_facts(host)
        assert (facts["interface"], facts["address"]) == (name, routes[host])
    for host in ("self", ""):
        facts = host_facts(host)
        assert facts["networks"] == [("eth0", "10.0.0.1/255.255.255.0")]
        assert facts["reason"][1] == "export GLOO_SOCKET_IFNAME=eth0 there"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert host_facts("v4").keys() == {"host", "reason"}


def test_route_address_is_that_of_this_machine() -> None:
    """In both families. Would catch: an address of the other machine."""
    assert [route_address(host, 1) for host in ("127.0.0.1", "::1")] == ["127.0.0.1", "::1"]
    with pytest.raises(OSError, match=r".+"):
        route_address("no.such.host.invalid", 1)


def test_chosen_interface_is_in_the_environment_until_detachment() -> None:
    """For Megatron's own groups, too. Would catch: one that stays for the next run of the process,
    and one of the user that is lost."""
    store = dist.HashStore()
    for environment in ({}, {"GLOO_SOCKET_IFNAME": ""}):
        world = ReplicaWorld(Placement(2, 0, 1, 0, True), store, store, timedelta(seconds=1))
        now: dict[str, str] = dict(environment)
        world.enter_environment(now)
        assert now.get("GLOO_SOCKET_IFNAME") == environment.get("GLOO_SOCKET_IFNAME")
        world.interface = "eth0"
        world.enter_environment(now)
        assert now["GLOO_SOCKET_IFNAME"] == "eth0"
        world.leave_environment(now)
        assert now == environment


# ---- Placement of ranks in replicas, computed from the environment of the launch


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
