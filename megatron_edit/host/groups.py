"""Megatron's groups of a replica, and ours beside them."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.transport import Transport, stand_alone_group
from megatron_edit.comm.wire import Wire
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine import TIED_EMBEDDING, EngineGroups
from megatron_edit.host.model.optimizer import TIED_EXPERT_TP, TIED_TP


def build_groups(world: ReplicaWorld, device: torch.device, wire: Wire) -> EngineGroups:
    """Wrap Megatron's groups of this replica, and join those with the other replicas.

    Args:
        world: this process's place, and the stores.
        device: of the parameters.
        wire: type on the wire.
    """

    def wrap(group: torch.distributed.ProcessGroup, name: str) -> Group:
        return Group.of(group, device, world.timeout, name)

    ties = {
        TIED_TP: wrap(parallel_state.get_tensor_model_parallel_group(), TIED_TP),
        TIED_EXPERT_TP: wrap(parallel_state.get_expert_tensor_parallel_group(), TIED_EXPERT_TP),
    }
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    if parallel_state.is_rank_in_embedding_group(ignore_virtual=True) and embedding is not None:
        ties[TIED_EMBEDDING] = wrap(embedding, TIED_EMBEDDING)
    ties = {name: tie for name, tie in ties.items() if tie.size > 1}  # one copy is tied to none
    place, on_cpu = world.placement, Transport("gloo", torch.device("cpu"))
    world.after_all_replicas("groups")  # forming a group has a time-out, start-up has none
    members = tuple(r * place.ranks_per_replica + place.rank for r in range(place.num_replicas))
    on_device = Transport(torch.distributed.get_backend(), device, members)
    sync, meeting = (
        stand_alone_group(
            world.shared_store,
            place.replica,
            place.num_replicas,
            transport,
            world.timeout,
            f"{name} group {place.rank}",
            num_phases=num_phases,
        )
        for name, transport, num_phases in (
            ("sync", on_device, wire.num_phases),
            ("meeting", on_cpu, 0),
        )
    )
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    control = stand_alone_group(
        world.shared_store,
        place.rank,
        place.ranks_per_replica,
        on_cpu,
        world.timeout,
        f"control group of replica {place.replica}",
    )
    return EngineGroups(
        control=control,
        sync=sync,
        meeting=meeting,
        replica=wrap(torch.distributed.group.WORLD, "replica"),
        stage=wrap(stage, "pipeline stage"),
        ties=ties,
    )
