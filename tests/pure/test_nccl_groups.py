"""What NCCL is told about our groups. A torch for the CPU has none: a stand-in notes it."""

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
from tests.harness.in_order import InOrderGroup, Rank, plan_of
from tests.harness.memory_network import Network, groups_of
from tests.harness.races import RaceDetector

CPU = torch.device("cpu")


class FakeWork:
    """Over at once."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        """Always."""
        return True


class FakeNccl:
    """Notes its options and calls."""

    class Options:
        """As `ProcessGroupNCCL.Options`."""

        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.options, self.calls = options, list[Any]()

    def name(self) -> str:
        """Of the backend."""
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
    """Of two replicas, as the host makes it."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    transport = Transport("nccl", CPU, members=(3, 11))
    limit = timedelta(seconds=70)
    return stand_alone_group(dist.HashStore(), 0, 2, transport, limit, "sync group 3", num_phases=2)


def test_options_of_a_group(group: Group) -> None:
    """Catches an exchange that takes 32 SMs from training, and logs that do not say whose it is."""
    options = group.process_group.options
    assert options.config.max_ctas == MAX_CTAS and 4 <= MAX_CTAS <= 8
    assert options.group_name == "sync group 3" and options.global_ranks_in_group == [3, 11]
    assert options._timeout == timedelta(seconds=70)
    assert group.phases == ()  # its stream has an order


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a torch without NCCL")
def test_torch_takes_these_options() -> None:
    """The real ones: catches a name that torch does not have, which a stand-in cannot."""
    options = dist.ProcessGroupNCCL.Options()
    assert hasattr(options.config, "max_ctas")
    assert hasattr(options, "group_name") and hasattr(options, "global_ranks_in_group")
    assert hasattr(dist.ProcessGroupNCCL, "_set_default_timeout")
    assert {"shutdown", "_shutdown"} & set(dir(dist.ProcessGroupNCCL))


def test_the_timeout_that_follows_the_rounds(group: Group) -> None:
    """NCCL takes none with a call. Catches a watchdog that ends a job after the first ten minutes
    of a sync whose rounds take hours."""
    timeout = AdaptiveTimeout((group,), is_fixed=False)
    timeout.begin(1000.0)
    assert group.process_group.calls == [timedelta(seconds=4000)]
    assert group.timeout == timedelta(seconds=4000)
    gloo = groups_of(2, Network())[0]
    set_timeout(gloo, timedelta(seconds=5))
    assert gloo.timeout == timedelta(seconds=5)


def test_a_group_is_used_once_before_training(group: Group) -> None:
    """With every kind of collective that comes later; nobody counts it. On gloo nothing is sent."""
    group.warm_up()
    assert group.process_group.calls == ["allreduce", "broadcast", "_allgather_base"]
    group.process_group.calls.clear()
    group.warm_up(has_exchanges=True)
    assert group.process_group.calls[-1] == "alltoall_base"
    assert (group.payload_bytes, group.num_started) == (0, 0)
    network = Network()
    groups_of(2, network)[0].warm_up(has_exchanges=True)
    assert not network.messages


@pytest.mark.parametrize(("name", "is_phased"), [("fp32", False), ("int8", True)])
def test_all_groups_are_used_in_one_order(group: Group, name: str, is_phased: bool) -> None:
    """Of the device; catches communicators that ranks make in orders of their own, and wait."""
    order: list[str] = []

    def noting(name: str) -> Any:
        def warm_up(has_exchanges: bool = False) -> None:
            order.append(name + "!" * has_exchanges)

        return SimpleNamespace(warm_up=warm_up)

    ties = {tie: noting(tie) for tie in ("tied-tp", "tied-embedding")}
    inside = noting("replica"), noting("stage")
    groups = EngineGroups(noting("sync"), noting("meeting"), *inside, noting("control"), ties)
    groups.warm_up(has_exchanges=Wire.of(name).num_phases > 0)
    sync = "sync!" if is_phased else "sync"
    assert order == [sync, "replica", "stage", "tied-embedding", "tied-tp"]


@pytest.mark.parametrize(("warmup_steps", "is_resumed"), [(2, False), (0, True)])
def test_training_begins_with_groups_that_were_used(warmup_steps: int, is_resumed: bool) -> None:
    """By the engine itself, at a start and where it goes on from a checkpoint. Catches buffers that
    NCCL takes when training has the memory."""
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
    assert all(isinstance(g, InOrderGroup) and g.num_launched >= 3 for g in used), used


def built(detector: RaceDetector, config: EditConfig) -> Rank:
    """A rank with copies of the embedding, the groups of which nobody has used."""
    plan = plan_of({"embedding": (4,), "final": (2,)})
    return Rank.build(detector.streams, config, plan, is_overlapped=True, tie=(0, 2))


def test_a_communicator_is_freed_by_its_owner(group: Group) -> None:
    """At a good end, once; Megatron's own is Megatron's."""
    transport = group.process_group
    theirs = Group(transport, 0, 2, CPU, group.timeout, "replica")
    theirs.close()
    assert transport.calls == [] and theirs.process_group is transport
    group.close()
    group.close()
    assert transport.calls == ["shutdown"] and group.process_group is None
