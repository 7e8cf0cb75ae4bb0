"""Options and calls of our NCCL groups. A CPU build of torch has no NCCL: a fake records them."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.timeouts import AdaptiveTimeout, set_timeout
from megatron_edit.comm.transport import MAX_CTAS, Transport, stand_alone_group
from megatron_edit.comm.wire import Wire
from megatron_edit.config import EditConfig
from megatron_edit.engine import EngineGroups
from tests.harness.memory_network import Network, two_phase_groups
from tests.harness.races import RaceDetector
from tests.harness.traced_streams import InOrderGroup, Rank, plan_of

CPU = torch.device("cpu")


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


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a torch without NCCL")
def test_nccl_options_exist_in_torch() -> None:
    """Catches a name that torch's own options do not have, which the fake cannot."""
    options = dist.ProcessGroupNCCL.Options()
    assert hasattr(options.config, "max_ctas")
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
            self.name = name

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
