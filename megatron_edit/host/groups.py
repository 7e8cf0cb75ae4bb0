"""Makes the engine's process groups, between replicas and inside a replica."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_edit.comm.collectives import Group, Places
from megatron_edit.comm.interfaces import fabrics
from megatron_edit.comm.placement import places_of
from megatron_edit.comm.transport import (
    MANY_THREADS,
    NET_VARIABLE,
    ON_CPU,
    RankDevice,
    Transport,
    choose_backend,
    choose_net,
    stand_alone_group,
)
from megatron_edit.comm.wire import NUM_PHASES, num_phases_of
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import GLOO
from megatron_edit.engine import TIED_EMBEDDING, ElasticParts, EngineGroups
from megatron_edit.host.model.optimizer import TIED_EXPERT_TP, TIED_TP
from megatron_edit.observe.console import say

SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # a variable of NCCL


def build_elastic_groups(
    world: ReplicaWorld, device: torch.device, join: Callable[[Group], ElasticParts]
) -> tuple[EngineGroups, ElasticParts]:
    """Make groups from Megatron's groups of this replica, and those with other replicas by the hub.

    Args:
        world: placement of this process, and the stores.
        join: joins the hub, with the group of all ranks of the replica.
    """
    control: Group = _control_group(world)
    parts = join(control)
    transports = parts.membership.transports
    in_replica = _ReplicaGroups(world, Transport(GLOO, device), has_thread=False)
    groups = _engine_groups(control, transports.sync, transports.meeting, in_replica)
    return groups, parts


def build_groups(
    world: ReplicaWorld, device: torch.device, config: EditConfig, *, overlap: bool
) -> EngineGroups:
    """Make groups from Megatron's groups of this replica, and join those with other replicas.

    Args:
        world: placement of this process, and the stores.
        config: gives the data type and the backend of exchanges.
        overlap: whether syncs overlap the forward pass.

    Raises:
        UsageError: the replicas cannot use the requested backend.
    """
    world.wait_for_all_replicas("groups")  # forming a group has a timeout, start-up has none
    place = world.placement

    def across(transport: Transport, name: str, num_phases: int = 0) -> Group:
        """Make a group of the ranks of all replicas that have the same shard as this one."""
        return stand_alone_group(
            world.shared_store,
            place.replica,
            place.num_replicas,
            transport,
            world.timeout,
            f"{name} group {place.rank}",
            num_phases=num_phases,
        )

    control: Group = _control_group(world)
    # Forming the first group of several launches waits in C++ code, also for one that has ended.
    # Once it is formed, a lost connection ends every wait.
    meeting: Group = world.watched(lambda: across(ON_CPU, "meeting"))
    world.begin_training()
    backend, net, about_net, places = _choose_transport(world, device, config)
    if place.global_rank == 0:
        say(f"exchanges over {backend} (--edit-sync-backend {config.sync_backend}){about_net}")
    members = tuple(r * place.ranks_per_replica + place.rank for r in range(place.num_replicas))
    transport = Transport(backend, device, members, net)
    steps_in_thread = overlap and backend == GLOO and device.type == "cpu"
    in_replica = _ReplicaGroups(world, transport, has_thread=steps_in_thread)
    many = replace(transport, num_threads=MANY_THREADS)
    sync = across(many, "sync", num_phases_of(config))
    if places and num_phases_of(config) == NUM_PHASES:
        sync.places = _places(world, replace(many, net=""), places)
        if place.global_rank == 0:
            names = (f"{r} at {p}" for r, p in enumerate(places))
            say(f"encoded sums are formed in each place first (replica {', '.join(names)})")
    return _engine_groups(control, sync, meeting, in_replica)


def _choose_transport(
    world: ReplicaWorld, device: torch.device, config: EditConfig
) -> tuple[str, str, str, list[int]]:
    """Choose backend and network of the exchanges, what to say of the network, and the places of
    the replicas."""
    place = world.placement
    size = place.ranks_per_replica

    def decide(found: list[dict[str, Any]]) -> list[Any]:
        ranks = [RankDevice(**fields) for fields in found]
        replicas = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        backend, sites = choose_backend(config.sync_backend, replicas), world.sites()
        places = places_of(world.host_counts() or [], sites)
        net, about = choose_net(
            config.sync_net,
            backend,
            replicas,
            sites=sites,
            is_single_launch=place.is_single_launch,
            given=os.environ.get(NET_VARIABLE, ""),
        )
        return [(backend, net, about, places)] * len(ranks)

    mine = asdict(_rank_device(device, place.rank))
    backend, net, about, places = world.settle("devices", mine, decide)
    return backend, net, about, places


def _places(world: ReplicaWorld, transport: Transport, of: Sequence[int]) -> Places:
    """Make the groups of the ranks with the same shard in this replica's place.

    Args:
        world: placement of this process, and the stores.
        transport: between the replicas.
        of: place of each replica.
    """
    place = world.placement
    near = [replica for replica, number in enumerate(of) if number == of[place.replica]]
    size = place.ranks_per_replica

    def group(way: str) -> Group:
        return stand_alone_group(
            world.shared_store,
            near.index(place.replica),
            len(near),
            replace(transport, members=tuple(r * size + place.rank for r in near)),
            world.timeout,
            f"place {of[place.replica]} {way} group {place.rank}",
        )

    return Places(tuple(of), group("up"), group("down"))


def _control_group(world: ReplicaWorld) -> Group:
    place = world.placement
    return stand_alone_group(
        world.replica_store,
        place.rank,
        place.ranks_per_replica,
        replace(ON_CPU, is_lazy=True),
        world.timeout,
        f"control group of replica {place.replica}",
    )


def _engine_groups(
    control: Group, sync: Group, meeting: Group, in_replica: _ReplicaGroups
) -> EngineGroups:
    device, timeout = in_replica.transport.device, in_replica.world.timeout
    return EngineGroups(
        control=control,
        sync=sync,
        meeting=meeting,
        replica=Group.of(torch.distributed.group.WORLD, device, timeout, "replica"),
        stage=in_replica.stage(),
        ties=in_replica.ties(),
    )


def _rank_device(device: torch.device, rank: int) -> RankDevice:
    """Describe this rank's device. A GPU has the same name on all ranks that see it."""
    gpu = ""
    if device.type == "cuda":
        number = torch.cuda.current_device()
        gpu = str(getattr(torch.cuda.get_device_properties(number), "uuid", number))
    has_nccl = torch.distributed.is_nccl_available()
    may_share = os.environ.get(SHARED_GPUS) == "1"
    reached = fabrics() if rank == 0 else ()
    return RankDevice(socket.gethostname(), gpu, has_nccl, may_share, reached)


@dataclass(frozen=True)
class _ReplicaGroups:
    """Groups inside a replica on which outer steps communicate.

    Attributes:
        world: placement of this process, and the stores.
        transport: transport between the replicas.
        has_thread: whether a thread makes the outer steps. Then Megatron's groups cannot be used:
            on some ranks the thread's collective would come before one of Megatron's, on others
            after it.
    """

    world: ReplicaWorld
    transport: Transport
    has_thread: bool

    def stage(self) -> Group:
        """Return the group of the ranks of this pipeline stage."""
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return self._group(stage, "pipeline stage")

    def ties(self) -> dict[str, Group]:
        """Return the groups of tied copies by name, if there are several copies."""
        ties = {
            TIED_TP: parallel_state.get_tensor_model_parallel_group(),
            TIED_EXPERT_TP: parallel_state.get_expert_tensor_parallel_group(),
        }
        embedding = parallel_state.get_embedding_group(check_initialized=False)
        if parallel_state.is_rank_in_embedding_group(ignore_virtual=True) and embedding is not None:
            ties[TIED_EMBEDDING] = embedding
        return {name: self._group(tie, name) for name, tie in ties.items() if tie.size() > 1}

    def _group(self, group: torch.distributed.ProcessGroup, name: str) -> Group:
        """Return Megatron's group, or with a thread a new one of the same ranks."""
        if not self.has_thread or group.size() == 1:
            return Group.of(group, self.transport.device, self.world.timeout, name)
        first = torch.distributed.get_process_group_ranks(group)[0]
        return stand_alone_group(
            self.world.replica_store,
            group.rank(),
            group.size(),
            replace(self.transport, members=(), net=""),
            self.world.timeout,
            f"{name} group of rank {first}",
        )
