"""Creates groups outside of any `torch.distributed` world: between replicas, and inside one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Duplex, Group
from megatron_edit.comm.interfaces import GLOO_INTERFACE
from megatron_edit.comm.staging import StagedProcessGroup
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.flags import AUTO

# NCCL occupies up to 32 thread blocks during an exchange, which takes long over a slow link. A few
# blocks saturate any link between machines; NCCL_MAX_CTAS overrides this value.
MAX_CTAS = 8


@dataclass(frozen=True)
class Transport:
    """How stand-alone groups communicate.

    Attributes:
        backend: "gloo" or "nccl".
        device: of the tensors. Gloo stages those of a GPU in host memory (`staging.py`).
        members: global ranks, in the job of all replicas, of the group's ranks, for NCCL's logs
            and flight recorder; empty if not known.
        is_lazy: whether gloo connects two ranks only when they first communicate. Each then sends
            the store 154 bytes and reads as many of the few ranks that a collective connects it
            to; else each of K ranks reads 154 + 8 K bytes of every one and has K - 1 connections.
            For groups inside a replica, whose ranks have met before: it does not wait for them.
    """

    backend: str
    device: torch.device
    members: tuple[int, ...] = ()
    is_lazy: bool = False


ON_CPU = Transport("gloo", torch.device("cpu"))


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank.

    Attributes:
        host: name of the machine.
        gpu: identifier of the GPU on it; empty for the CPU.
        has_nccl: whether torch was built with NCCL.
    """

    host: str
    gpu: str
    has_nccl: bool


def choose_backend(requested: str, devices: Sequence[Sequence[RankDevice]]) -> str:
    """Choose the backend of exchanges, for all ranks.

    Args:
        requested: "auto", "nccl" or "gloo".
        devices: of all ranks of all replicas.

    Raises:
        UsageError: NCCL is requested and some rank cannot use it.
    """
    if requested == "gloo":
        return requested
    reason = _reason_against_nccl(devices)
    if reason is None:
        return "nccl"
    if requested == AUTO:
        return "gloo"
    rule, remedy = reason
    raise UsageError(f"--edit-sync-backend {requested}", rule, f"{remedy}, or use auto or gloo")


def _reason_against_nccl(devices: Sequence[Sequence[RankDevice]]) -> tuple[str, str] | None:
    """Rule and remedy for an error where NCCL cannot be used; None where it can."""
    taken: dict[tuple[str, str], str] = {}
    for replica, ranks in enumerate(devices):
        for rank, device in enumerate(ranks):
            name = f"rank {rank} of replica {replica}"
            if not device.gpu:
                return f"needs CUDA, and {name} trains on the CPU", "train on GPUs"
            if not device.has_nccl:
                return f"torch of {name} was built without NCCL", "install one with it"
            other = taken.setdefault((device.host, device.gpu), name)
            if other != name:
                rule = f"needs a GPU for each rank, and {other} and {name} share one"
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
    """Create a group outside of any `torch.distributed` world, for ranks that share a store.

    Collective: the `size` ranks of the group.
    Blocks: the host, until all of them have joined, unless the transport `is_lazy`.

    Args:
        store: for the rendezvous of the ranks.
        rank: this rank's position, from 0.
        size: number of ranks.
        transport: how they communicate.
        timeout: longest wait of one collective.
        name: of the group, unique in the store.
        num_phases: of the exchanges that will run on it (`wire.py`); 0 if none has phases. On gloo
            each phase costs two connections to each other rank.

    Raises:
        ReplicaLostError: some rank did not join within `timeout`.
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
        reason = str(error).partition("\n")[0]
        remedy = "megatron-edit doctor examines the interfaces and ports between the machines"
        raise ReplicaLostError(
            f"{name}: not all {size} ranks joined: {reason}; {remedy}"
        ) from error
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
    how = _lazy_options(group.timeout) if transport.is_lazy else group.timeout
    return on_device(dist.ProcessGroupGloo(prefixed, group.rank, group.size, how), group)


def _lazy_options(timeout: timedelta) -> Any:
    """Options with which ranks connect late, on the interfaces that gloo uses without options."""
    gloo, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()
    names = [name for name in os.environ.get(GLOO_INTERFACE, "").split(",") if name]
    devices = [gloo.create_device(interface=name, lazy_init=True) for name in names]
    options._devices = devices or [gloo.create_default_device(lazy_init=True)]
    options._timeout, options._threads = timeout, 2 * len(options._devices)
    return options


def on_device(gloo: Any, group: Group) -> Any:
    """A gloo process group for tensors on the device of a group."""
    if group.device.type == "cpu":
        return gloo
    return StagedProcessGroup(gloo, group.streams, pin=group.device.type == "cuda")
