"""Creates groups outside of any `torch.distributed` world: between replicas, and inside one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Duplex, Group
from megatron_edit.comm.interfaces import GLOO_INTERFACE
from megatron_edit.comm.staging import StagedProcessGroup
from megatron_edit.constants import AUTO
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.flags import flag

# NCCL occupies up to 32 thread blocks during an exchange, which takes long over a slow link. Two
# move some GB/s, more than such a link; NCCL_MAX_CTAS overrides this value.
MAX_CTAS = 2
# Collectives that gloo carries at the same time: its default; and for the many of a sync, of which
# those of small units share the latency of a link.
FEW_THREADS, MANY_THREADS = 2, 16
# NCCL's name of TCP connections, and the variable by which the environment chooses the network of
# all communicators, whatever is asked for one of them.
SOCKET, NET_VARIABLE = "Socket", "NCCL_NET"


@dataclass(frozen=True)
class Transport:
    """How stand-alone groups communicate.

    Attributes:
        backend: "gloo" or "nccl".
        device: of the tensors. Gloo stages those of a GPU in host memory (`staging.py`).
        members: global ranks, in the job of all replicas, of the group's ranks, for NCCL's logs
            and flight recorder; empty if not known.
        net: NCCL's name of the network; empty where NCCL chooses.
        num_threads: of each process group of gloo: how many collectives it carries at a time.
        is_lazy: whether gloo connects two ranks only when they first communicate. Each then sends
            the store 154 bytes and reads as many of the few ranks that a collective connects it
            to; else each of K ranks reads 154 + 8 K bytes of every one and has K - 1 connections.
            For a group inside a replica, whose ranks have met before (it does not wait for them),
            and which is closed at a regular end alone (see `Group.stop_loops`).
    """

    backend: str
    device: torch.device
    members: tuple[int, ...] = ()
    net: str = ""
    num_threads: int = FEW_THREADS
    is_lazy: bool = False


ON_CPU = Transport("gloo", torch.device("cpu"))


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank.

    Attributes:
        gpu: identifier of the GPU on it; empty for the CPU.
        has_nccl: whether torch was built with NCCL.
        may_share: whether NCCL accepts several ranks on the GPU: from 2.30 on, where
            NCCL_MULTI_RANK_GPU_ENABLE is 1.
        fabrics: what the machine's InfiniBand and RoCE adapters reach (`interfaces.fabrics`); only
            of rank 0 of a replica.
    """

    host: str
    gpu: str
    has_nccl: bool
    may_share: bool = False
    fabrics: Sequence[str] = ()


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
    may_share = all(device.may_share for ranks in devices for device in ranks)
    for replica, ranks in enumerate(devices):
        for rank, device in enumerate(ranks):
            name = f"rank {rank} of replica {replica}"
            if not device.gpu:
                return f"needs CUDA, and {name} trains on the CPU", "train on GPUs"
            if not device.has_nccl:
                return f"torch of {name} was built without NCCL", "install one with it"
            other = taken.setdefault((device.host, device.gpu), name)
            if other != name and not may_share:
                rule = f"needs a GPU for each rank, and {other} and {name} share one"
                return rule, "launch fewer ranks on a machine"
    return None


def check_net(requested: str, environment: Mapping[str, str]) -> None:
    """Refuse a network that the environment of NCCL overrides.

    Args:
        requested: value of `--edit-sync-net`.

    Raises:
        UsageError: it names another network.
    """
    given = environment.get(NET_VARIABLE, "")
    if given and requested != AUTO and given.lower() != requested.lower():
        raise UsageError(
            f"{flag('sync_net')} {requested}, environment {NET_VARIABLE}={given}",
            f"{NET_VARIABLE} overrides the network of all of NCCL's communicators",
            f"unset {NET_VARIABLE}, or drop the flag",
        )


def choose_net(
    requested: str,
    backend: str,
    devices: Sequence[Sequence[RankDevice]],
    *,
    sites: Sequence[str],
    is_single_launch: bool,
    given: str,
) -> tuple[str, str]:
    """Choose NCCL's network between replicas; the same on all ranks.

    NCCL itself takes InfiniBand wherever there is an adapter, also where it leads to the machines
    of the own site only.

    Args:
        requested: "auto", or NCCL's name of a network.
        devices: of all ranks of all replicas.
        sites: of each replica, by the file of `--edit-placement`; empty if it names none.
        is_single_launch: whether one launch holds the ranks of all replicas.
        given: `NCCL_NET` in the environment of this process, for the text; empty if not set.

    Returns:
        NCCL's name of the network, empty where NCCL chooses; and words about it for the console.
    """
    asked = f"{flag('sync_net')} {requested}"
    if backend != "nccl":
        return "", "" if requested == AUTO else f"; {asked} has no effect"
    fabrics = [set(ranks[0].fabrics) for ranks in devices]
    net, why = "", ""
    if requested != AUTO:
        net = requested
    elif any(fabrics) and len(set(sites)) > 1:
        net, why = SOCKET, f": {flag('placement')} names several sites"
    elif any(fabrics) and not is_single_launch and not set.intersection(*fabrics):
        net, why = SOCKET, ": no subnet of InfiniBand or RoCE is known to join the launches"
    chosen = f"network {net}" if net else "NCCL chooses the network"
    if given:
        chosen = f"network {given} ({NET_VARIABLE}, which overrides all flags)"
    return net, f", {chosen} ({asked}{why})"


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
        if transport.net:
            options.config.net_name = transport.net
        options.group_name = prefix
        options.global_ranks_in_group = list(transport.members)
        return dist.ProcessGroupNCCL(prefixed, group.rank, group.size, options)
    options = _gloo_options(transport, group.timeout)
    gloo = dist.ProcessGroupGloo(prefixed, group.rank, group.size, options)
    if transport.is_lazy:  # after it: ranks find each other by the order of connections on a device
        group.lazy_loops = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    return on_device(gloo, group)


def _gloo_options(transport: Transport, timeout: timedelta) -> Any:
    """Options of a process group, on the interfaces that gloo uses without options."""
    gloo, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()
    names = [name for name in os.environ.get(GLOO_INTERFACE, "").split(",") if name]
    is_lazy = transport.is_lazy
    devices = [gloo.create_device(interface=name, lazy_init=is_lazy) for name in names]
    options._devices = devices or [gloo.create_default_device(lazy_init=is_lazy)]
    options._timeout, options._threads = timeout, transport.num_threads
    return options


def on_device(gloo: Any, group: Group) -> Any:
    """A gloo process group for tensors on the device of a group."""
    if group.device.type == "cpu":
        return gloo
    return StagedProcessGroup(gloo, group.streams, pin=group.device.type == "cuda")
