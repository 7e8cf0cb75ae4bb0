"""Makes groups that belong to no `torch.distributed` world: between replicas, and inside one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Duplex, Group
from megatron_edit.comm.staging import StagedProcessGroup
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.flags import AUTO

# NCCL holds its blocks of the GPU, up to 32, as long as an exchange lasts, and one over a slow link
# lasts long. Few can feed any link between machines; NCCL_MAX_CTAS overrides it.
MAX_CTAS = 8


@dataclass(frozen=True)
class Transport:
    """How stand-alone groups communicate.

    Attributes:
        backend: "gloo" or "nccl".
        device: of the tensors. Gloo takes those of a GPU through host memory (`staging.py`).
        members: ranks in the whole job of the group's ranks, for NCCL's logs and flight recorder;
            empty where nobody knows.
    """

    backend: str
    device: torch.device
    members: tuple[int, ...] = ()


ON_CPU = Transport("gloo", torch.device("cpu"))


@dataclass(frozen=True)
class RankDevice:
    """Where a rank computes.

    Attributes:
        host: name of the machine.
        gpu: of its GPUs; empty is the CPU.
        has_nccl: whether torch was built with it.
    """

    host: str
    gpu: str
    has_nccl: bool


def choose_backend(wanted: str, seats: Sequence[Sequence[RankDevice]]) -> str:
    """What carries exchanges: the same answer on all ranks, which know the same seats.

    Args:
        wanted: "auto", "nccl" or "gloo".
        seats: of all ranks of all replicas.

    Raises:
        UsageError: NCCL is wanted and some rank cannot use it.
    """
    if wanted == "gloo":
        return wanted
    hindrance = _hindrance_to_nccl(seats)
    if hindrance is None:
        return "nccl"
    if wanted == AUTO:
        return "gloo"
    rule, remedy = hindrance
    raise UsageError(f"--edit-sync-backend {wanted}", rule, f"{remedy}, or use auto or gloo")


def _hindrance_to_nccl(seats: Sequence[Sequence[RankDevice]]) -> tuple[str, str] | None:
    """Why NCCL cannot be used, and what to do about it; None where it can."""
    taken: dict[tuple[str, str], str] = {}
    for replica, ranks in enumerate(seats):
        for rank, seat in enumerate(ranks):
            who = f"rank {rank} of replica {replica}"
            if not seat.gpu:
                return f"needs CUDA, and {who} trains on the CPU", "train on GPUs"
            if not seat.has_nccl:
                return f"torch of {who} was built without NCCL", "install one with it"
            other = taken.setdefault((seat.host, seat.gpu), who)
            if other != who:
                rule = f"needs a GPU for each rank, and {other} and {who} share one"
                return rule, "launch fewer ranks on a machine"
    return None


def stand_alone_group(
    store: dist.Store,
    rank: int,
    size: int,
    transport: Transport,
    timeout: timedelta,
    name: str,
    *,
    num_phases: int = 0,
) -> Group:
    """A group that belongs to no `torch.distributed` world: the ranks need only share `store`.

    Collective: the `size` ranks of the group.
    Blocks: the host, until all of them have come.

    Args:
        store: where the ranks find each other.
        rank: this rank's position, from 0.
        size: number of ranks.
        transport: how they communicate.
        timeout: longest wait of one collective.
        name: of the group, unique in the store.
        num_phases: of the exchanges that will run on it (`wire.py`); 0 is whole collectives alone.
            On gloo each phase costs two connections to each other rank.

    Raises:
        ReplicaLostError: they did not all come within `timeout`.
    """
    group = Group(None, rank, size, transport.device, timeout, name, is_own=True)
    if size == 1:
        return group
    try:
        group.process_group = _process_group(store, group, transport, name)
        for phase in range(0 if group.runs_in_order else num_phases):
            prefixes = (f"{name}, phase {phase}, {way}" for way in ("up", "down"))
            up, down = (_process_group(store, group, transport, prefix) for prefix in prefixes)
            group.phases += (Duplex(up, down),)
    except RuntimeError as error:
        raise ReplicaLostError(f"{name}: not all {size} replicas came: {error}") from error
    return group


def _process_group(store: dist.Store, group: Group, transport: Transport, prefix: str) -> Any:
    prefixed = dist.PrefixStore(prefix, store)
    if transport.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = group.timeout
        options.config.max_ctas = MAX_CTAS
        options.group_name = prefix
        options.global_ranks_in_group = list(transport.members)
        return dist.ProcessGroupNCCL(prefixed, group.rank, group.size, options)
    gloo = dist.ProcessGroupGloo(prefixed, group.rank, group.size, group.timeout)
    if transport.device.type == "cpu":
        return gloo
    return StagedProcessGroup(gloo, group.streams, pin=transport.device.type == "cuda")
