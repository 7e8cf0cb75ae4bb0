"""NCCL groups on stand-ins: options, calls, times and memory. A CPU build of torch has no NCCL."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.interfaces import fabrics
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.streams import CudaStreams, Span
from megatron_edit.comm.timeouts import AdaptiveTimeout, set_timeout
from megatron_edit.comm.transport import (
    MAX_CTAS,
    RankDevice,
    Transport,
    check_net,
    choose_net,
    stand_alone_group,
)
from megatron_edit.comm.wire import Wire
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.engine import EngineGroups
from megatron_edit.engine.sync import outer_state
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.loading import reserve_memory
from tests.distributed.toy import Collector
from tests.harness.memory_network import Network, two_phase_groups
from tests.harness.races import RaceDetector
from tests.harness.traced_streams import CPU, InOrderGroup, Rank, TracedStreams, plan_of


class FakeWork:
    """A collective that completes at once."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Whether it has completed: always."""
        return True


class FakeNccl:
    """A `ProcessGroupNCCL` that records its options and calls."""

    class Options:
        """Stand-in of `ProcessGroupNCCL.Options`."""

        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.options, self.calls = options, list[Any]()

    def name(self) -> str:
        """Return the name of the backend."""
        return "nccl"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.calls.append(timeout)

    def shutdown(self) -> None:
        """Free the communicator."""
        self.calls.append("shutdown")

    def __getattr__(self, name: str) -> Any:
        if name not in ("allreduce", "broadcast", "_allgather_base", "alltoall_base"):
            raise AttributeError(name)

        def collective(*_: Any) -> FakeWork:
            self.calls.append(name)
            return FakeWork()

        return collective


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group of two replicas, made the way the host makes it."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    transport = Transport("nccl", CPU, members=(3, 11))
    limit = timedelta(seconds=70)
    return stand_alone_group(dist.HashStore(), 0, 2, transport, limit, "sync group 3", num_phases=2)


def test_nccl_options_of_a_sync_group(group: Group) -> None:
    """Catches an exchange that takes 32 SMs from training, and logs without the group's members."""
    options = group.process_group.options
    assert options.config.max_ctas == MAX_CTAS == 2
    assert options.group_name == "sync group 3" and options.global_ranks_in_group == [3, 11]
    assert options._timeout == timedelta(seconds=70)
    assert group.phases == ()  # its stream orders the phases


@pytest.mark.parametrize("net", ["", "Socket"])
def test_sync_group_has_a_network_of_its_own(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a flag that does not reach NCCL, and an empty name where NCCL is to choose."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    transport = Transport("nccl", CPU, net=net)
    made = stand_alone_group(dist.HashStore(), 0, 2, transport, timedelta(seconds=7), "sync")
    assert getattr(made.process_group.options.config, "net_name", "") == net


WEST, EAST = ("w0", "10.1.0.0/16"), ("e0", "10.2.0.0/16")


def choice(
    *fabrics_of: Sequence[str],
    requested: str = "auto",
    backend: str = "nccl",
    sites: Sequence[str] = (),
    is_single_launch: bool = False,
    given: str = "",
) -> tuple[str, str]:
    """Choose the network for replicas of two ranks, the first of which report these fabrics."""
    devices = [
        [RankDevice(f"h{r}", "0", True, fabrics=list(found)), RankDevice(f"h{r}", "1", True)]
        for r, found in enumerate(fabrics_of)
    ]
    return choose_net(
        requested, backend, devices, sites=sites, is_single_launch=is_single_launch, given=given
    )


def test_network_between_launches_with_infiniband_of_their_own() -> None:
    """Would catch NCCL's own choice, InfiniBand, which does not lead to the other site."""
    net, text = choice(WEST, EAST)
    assert net == "Socket"
    assert text == (
        ", network Socket (--edit-sync-net auto: no subnet of InfiniBand or RoCE is known to join "
        "the launches)"
    )
    assert choice(WEST, ())[0] == "Socket"  # one of the sites has none


@pytest.mark.parametrize(
    ("found", "is_single_launch"),
    [
        (((), ()), False),  # no adapters
        ((WEST, ("w1", "10.1.0.0/16", "10.9.0.0/24")), False),  # the same subnet
        ((("one",), ("one",)), False),  # the same machine, whose subnet is not known
        ((WEST, EAST), True),  # a single launch, as inside a cluster with routed RoCE
    ],
)
def test_network_is_left_to_nccl(found: Any, is_single_launch: bool) -> None:
    """Would catch TCP inside of a cluster with InfiniBand."""
    net, text = choice(*found, is_single_launch=is_single_launch)
    assert (net, text) == ("", ", NCCL chooses the network (--edit-sync-net auto)")


def test_network_between_sites_of_the_placement() -> None:
    """Would catch sites of which only the hosts are used."""
    sites = ("west", "east")
    net, text = choice(WEST, WEST, sites=sites, is_single_launch=True)
    assert net == "Socket" and "--edit-placement names several sites" in text
    assert choice(WEST, EAST, sites=("west", "west"), is_single_launch=True)[0] == ""
    assert choice((), (), sites=sites, is_single_launch=True)[0] == ""


def test_requested_network_is_used() -> None:
    """Over gloo it has no effect, which is said, as `auto` may choose gloo."""
    assert choice(WEST, EAST, requested="IB") == ("IB", ", network IB (--edit-sync-net IB)")
    net, text = choice(WEST, EAST, requested="IB", backend="gloo")
    assert (net, text) == ("", "; --edit-sync-net IB has no effect")
    assert choice(WEST, EAST, backend="gloo") == ("", "")
    _, text = choice(WEST, EAST, given="OFI")
    assert text.startswith(", network OFI (NCCL_NET, which overrides all flags) (--edit-sync-net")


def test_network_that_the_environment_overrides_is_refused() -> None:
    """Would catch a flag that silently has no effect. NCCL compares names without case."""
    for requested, env in (("auto", "IB"), ("Socket", ""), ("socket", "Socket")):
        check_net(requested, {"NCCL_NET": env})
    with pytest.raises(UsageError, match="NCCL_NET=IB: NCCL_NET overrides"):
        check_net("Socket", {"NCCL_NET": "IB"})


def test_fabrics_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch the default prefix, which is the same at all sites, and an Ethernet without an
    adapter that counts as a subnet of one."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h0")

    def address(text: str, mask: str | None, family: int = socket.AF_INET) -> Any:
        return SimpleNamespace(family=family, address=text, netmask=mask)

    there = {
        "ib0": [address("10.1.2.3", "255.255.0.0"), address("fe80::1", None, socket.AF_INET6)],
        "roce": [address("10.3.0.9", "255.255.255.0")],
        "eth0": [address("192.168.0.7", "255.255.255.0")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    assert fabrics(tmp_path) == () == fabrics(tmp_path / "missing")
    for device, prefix in (("a", "fe80:0000:0000:0000"), ("b", "fec0:0000:0000:0002")):
        gids = tmp_path / device / "ports" / "1" / "gids"
        gids.mkdir(parents=True)
        (gids / "0").write_text(f"{prefix}:0002:c903:0000:0001\n")
    (tmp_path / "b" / "device" / "net" / "roce").mkdir(parents=True)
    assert fabrics(tmp_path) == ("h0", "10.1.0.0/16", "10.3.0.0/24", "fec0:0000:0000:0002")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a torch without NCCL")
def test_nccl_options_exist_in_torch() -> None:
    """Catches a name that torch's own options do not have, which the fake cannot."""
    options = dist.ProcessGroupNCCL.Options()
    assert hasattr(options.config, "max_ctas") and hasattr(options.config, "net_name")
    assert hasattr(options, "group_name") and hasattr(options, "global_ranks_in_group")
    assert hasattr(dist.ProcessGroupNCCL, "_set_default_timeout")
    assert hasattr(dist.ProcessGroupNCCL, "shutdown")


def test_nccl_timeout_follows_round_length(group: Group) -> None:
    """NCCL's collectives take no time-out. Catches a watchdog that ends a job after ten minutes of
    a sync although its rounds take hours."""
    timeout = AdaptiveTimeout((group,), is_fixed=False)
    timeout.begin(1000.0)
    assert group.process_group.calls == [timedelta(seconds=4000)]
    assert group.timeout == timedelta(seconds=4000)
    gloo = two_phase_groups(2, Network())[0]
    set_timeout(gloo, timedelta(seconds=5))
    assert gloo.timeout == timedelta(seconds=5)


def test_group_warm_up_runs_each_collective_once(group: Group) -> None:
    """Every kind of collective used later runs once and is not counted. On gloo nothing is sent."""
    group.warm_up(group.all_reduce, group.broadcast, group.all_gather, group.all_to_all)
    called = ["allreduce", "broadcast", "_allgather_base", "alltoall_base"]
    assert group.process_group.calls == called
    assert (group.payload_bytes, group.num_started) == (0, 0)
    network = Network()
    gloo = two_phase_groups(2, network)[0]
    gloo.warm_up(gloo.all_reduce, gloo.all_to_all)
    assert not network.messages


@pytest.mark.parametrize(("name", "is_phased"), [("fp32", False), ("int8", True)])
def test_groups_warm_up_in_the_same_order_on_all_ranks(name: str, is_phased: bool) -> None:
    """Catches ranks that create communicators in different orders, and wait for each other, and
    collectives that training never calls."""
    order: list[str] = []

    class Noting:
        """A group that notes its name and the collectives that it runs."""

        def __init__(self, name: str) -> None:
            self.name, self.places = name, None

        def warm_up(self, *collectives: Any) -> None:
            order.append(" ".join([self.name, *(each.__name__ for each in collectives)]))

    for name_of in ("all_reduce", "broadcast", "all_gather", "all_to_all"):
        setattr(Noting, name_of, getattr(Group, name_of))
    each: Any = Noting
    ties = {tie: each(tie) for tie in ("tied-tp", "tied-embedding")}
    inside = each("replica"), each("stage")
    groups = EngineGroups(each("sync"), each("meeting"), *inside, each("control"), ties)
    groups.warm_up(has_exchanges=Wire.of(name).num_phases > 0)
    assert order == [
        "control all_reduce broadcast all_gather",
        "sync all_reduce broadcast all_gather" + " all_to_all" * is_phased,
        "replica all_gather",
        "stage all_gather",
        "tied-embedding broadcast",
        "tied-tp broadcast",
    ]


@pytest.mark.parametrize(("warmup_steps", "is_resumed"), [(2, False), (0, True)])
def test_engine_warms_up_groups_before_training(warmup_steps: int, is_resumed: bool) -> None:
    """At a start and at a resume from a checkpoint. Catches buffers that NCCL allocates only when
    training has taken the memory."""
    config = EditConfig(num_replicas=2, warmup_steps=warmup_steps)
    with torch.no_grad(), RaceDetector() as detector:
        rank = built(detector, config)
        rank.engine.start()
        saved = rank.engine.state_dict()
        if is_resumed:
            rank.engine.close()
            rank = built(detector, config)
            rank.engine.load_state_dict(saved)
        groups = (rank.groups.sync, rank.groups.stage, *rank.groups.ties.values())
        used = [group.process_group for group in groups]
        rank.engine.close()
    assert all(isinstance(g, InOrderGroup) and g.num_launched >= 1 for g in used), used


def built(detector: RaceDetector, config: EditConfig) -> Rank:
    """A rank with a tied embedding whose groups have not been used yet."""
    plan = plan_of({"embedding": (4,), "final": (2,)})
    return Rank.build(detector.streams, config, plan, is_overlapped=True, tie=(0, 2))


def test_group_shuts_down_only_its_own_communicator(group: Group) -> None:
    """Our group is shut down once at a normal end; Megatron's own group is not."""
    transport = group.process_group
    megatron_group = Group(transport, 0, 2, CPU, group.timeout, "replica")
    megatron_group.close()
    assert transport.calls == [] and megatron_group.process_group is transport
    group.close()
    group.close()
    assert transport.calls == ["shutdown"] and group.process_group is None


# ---- The memory of the rounds is taken before the warm-up, and its lack is an error there


UNITS = {"layer.1": (40,), "layer.2": (41,), "final": (2,)}


@contextmanager
def traced(**settings: Any) -> Iterator[Rank]:
    """A rank that has not started."""
    usual: dict[str, Any] = {"num_replicas": 2, "warmup_steps": 3, "digest_interval": 100}
    with torch.no_grad(), RaceDetector() as detector:
        config = EditConfig(**{**usual, **settings})
        rank = Rank.build(detector.streams, config, plan_of(UNITS), is_overlapped=False)
        yield rank
        rank.engine.close()


def places_of(state: OuterState) -> list[int]:
    """Where the tensors are in memory."""
    tensors: list[Any] = [t for unit in state.units.values() for t in unit.tensors().values()]
    return [tensor.data_ptr() for tensor in tensors]


def reserved_sizes(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each tensor that a second reservation allocates."""
    sizes: list[int] = []
    rank.engine.syncs.reserve()
    empty = torch.empty

    def noting(size: int, **_: Any) -> torch.Tensor:
        sizes.append(size)
        return empty(size)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", noting)
        rank.engine.syncs.reserve()
    return sizes


@pytest.mark.parametrize(
    "settings", [{}, {"sync_dtype": "int8"}, {"offload": True}], ids=["fp32", "int8", "offload"]
)
def test_outer_state_exists_in_the_warm_up(settings: dict[str, Any]) -> None:
    """Catches a lack of memory that shows only when 1000 steps have been made."""
    with traced(**settings) as rank:
        engine = rank.engine
        engine.syncs.reserve()
        reserved = engine.syncs._reserved
        assert reserved is not None
        places = places_of(reserved)
        engine.start()
        for _ in range(3):
            engine.before_step()
            engine.after_step()
        found = places_of(engine.syncs.outer)
        assert found == places and len(places) == len(UNITS) * (
            4 if "sync_dtype" in settings else 2
        )
        anchors = [unit.anchor for unit in engine.syncs.outer.units.values()]
        assert all(bool((anchor == 1.0).all()) for anchor in anchors)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 0),
        ({"delay_steps": 2}, 2),
        ({"delay_steps": 2, "average_moments": "both"}, 4),
        ({"strategy": "co2"}, 1),
    ],
    ids=["immediate", "delayed", "moments", "co2"],
)
def test_buffers_of_delayed_syncs_are_allocated_once(
    settings: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Average, snapshot and moments of all units at once, then freed: torch keeps the memory."""
    with traced(**settings) as rank:
        sizes = reserved_sizes(rank, monkeypatch)
    numels = [shard.numel for shard in rank.host.plan.shards]
    assert sorted(sizes) == sorted(numels * kept)


def test_lack_of_memory_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2, with the bytes. Catches a traceback of the allocator."""

    def allocate(*_: Any, **__: Any) -> OuterState:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
        )

    monkeypatch.setattr(OuterState, "allocate", allocate)
    store = dist.HashStore()
    world = ReplicaWorld(Placement(1, 0, 1, 0, True), store, store, timedelta(seconds=20))
    with traced() as rank, pytest.raises(UsageError) as refusal:
        reserve_memory(rank.engine, world)
    text = str(refusal.value)
    assert text.startswith("about 6.64e-07 GB per rank for anchor, outer momentum and syncs: must")
    assert "(CUDA out of memory); use more ranks per replica, or --edit-offload" in text


def test_no_memory_is_kept_for_the_final_phase() -> None:
    """Catches 8 bytes for each parameter that nothing uses."""
    with traced() as rank:
        rank.engine.syncs.reserve()
        rank.engine.start()
        rank.engine._enter_final_phase()
        assert rank.engine.syncs._reserved is None


@pytest.mark.parametrize("code", [0, 712])
def test_page_locked_state_is_one_buffer(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered, because torch rounds page-locked allocations up to powers of two; allocated one
    by one where CUDA refuses that. Catches up to twice the host memory."""
    registered, allocated = list[int](), list[Any]()
    empty = torch.empty

    def register(place: int, nbytes: int, flags: int) -> int:
        registered.append(nbytes)
        return code

    def allocate(size: int, **rest: Any) -> torch.Tensor:
        allocated.append((size, rest.pop("pin_memory", False)))
        return empty(size, **rest)

    runtime = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty", allocate)
    tensors = outer_state._resident_tensors([3, 0, 5], CPU, is_pinned=True)
    assert registered == [32] and [len(tensor) for tensor in tensors] == [3, 0, 5]
    each = [(3, True), (0, True), (5, True)] if code else []
    assert allocated == [(8, False), *each]
    assert (tensors[2].data_ptr() - tensors[0].data_ptr() == 12) is (code == 0)


def test_only_the_largest_fragment_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the buffers of all fragments, of which one is in flight at a time."""
    with traced(fragments=2, delay_steps=2, sync_interval=8) as rank:
        sizes = reserved_sizes(rank, monkeypatch)
    assert sizes == [40, 40, 2, 2] or sizes == [41, 41]
    assert sum(sizes) == 84


# ---- Times of syncs whose exchanges are queued on a device: those of the device, not of the host


EXCHANGE = 0.5  # seconds that a stream waits for each collective


@dataclass
class DeviceClock(TracedStreams):
    """Streams that stand still for each collective, whose wait takes the host no time.

    Attributes:
        now: seconds that the device has spent.
    """

    now: float = 0.0

    def await_collective(self, event: int) -> None:
        """See `TracedStreams`."""
        super().await_collective(event)
        self.now += EXCHANGE

    def mark(self) -> float:
        """See `Streams`."""
        return self.now


def report_of_syncs(*, is_overlapped: bool) -> Collector:
    """Run two rounds of a rank with three units."""
    with torch.no_grad(), RaceDetector() as detector:
        streams = DeviceClock(detector)
        config = EditConfig(num_replicas=2, warmup_steps=0, sync_interval=2, digest_interval=100)
        plan = plan_of({"layer.1": (4,), "layer.2": (4,), "final": (2,)})
        rank = Rank.build(streams, config, plan, is_overlapped=is_overlapped)
        engine = rank.engine
        engine.start()
        for _ in range(5):
            for place in range(3):
                engine.land_up_to(place + 1)
                rank.host.gather(place)
            engine.before_step()
            rank.host.has_deferred_gather = True
            engine.after_step()
        engine.finish()
        engine.close()
    assert isinstance(engine.reporter, Collector)
    return engine.reporter


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_exposed_time_is_that_of_the_device(is_overlapped: bool) -> None:
    """Catches the time of a host that only queues its waits, which is about zero: then `watch`,
    `report` and the second choice of `--edit-auto` see no exchange at all."""
    reports = report_of_syncs(is_overlapped=is_overlapped).syncs
    assert len(reports) == 2
    for report in reports:
        assert report.seconds["exchange"] == pytest.approx(3 * EXCHANGE)
        assert report.seconds["exposed"] >= 3 * EXCHANGE


def test_records_hold_the_exposed_time() -> None:
    """Catches a record without it, so that settings are never chosen again."""
    with torch.no_grad(), RaceDetector() as detector:
        config = EditConfig(num_replicas=2, warmup_steps=0, sync_interval=1, digest_interval=100)
        plan = plan_of({"layer.1": (4,)})
        rank = Rank.build(DeviceClock(detector), config, plan, is_overlapped=False)
        engine = rank.engine
        engine.start()
        for _ in range(3):
            engine.before_step()
            engine.after_step()
        exposed = engine.state.records[0].exposed
        engine.close()
    assert exposed >= EXCHANGE


def test_marks_of_a_gpu_are_read_when_it_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CudaStreams` on a stand-in of `torch.cuda`. Catches a time that is read too early."""
    calls: list[str] = []

    class Event:
        """Stand-in of `torch.cuda.Event`."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            calls.append(f"record {stream}")

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            calls.append("elapsed")
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    streams = CudaStreams(torch.device("cuda", 0))
    span: Span = (streams.mark(), streams.mark())
    assert streams.seconds(span) == 0.25
    assert calls == ["record compute", "record compute", "synchronize", "elapsed"]
