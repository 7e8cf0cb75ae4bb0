"""Joins the hub of an elastic run, and makes the groups that it forms."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from argparse import Namespace
from datetime import timedelta

import torch

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.hub_store import EpochGroup, HubStore, check_torch
from megatron_edit.comm.interfaces import GLOO_INTERFACE, route_address
from megatron_edit.comm.wire import num_phases_of
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import MIN_TIMEOUT_SECONDS, RESET
from megatron_edit.elastic.agent import Agent, query
from megatron_edit.elastic.channel import (
    CONNECT_SECONDS,
    ChannelError,
    HubAddress,
    read_token,
    tls_context,
)
from megatron_edit.elastic.copies import CopyServer
from megatron_edit.elastic.messages import Hello
from megatron_edit.elastic.store import StoreClient
from megatron_edit.engine import ElasticParts, Membership, SharedState, Transports
from megatron_edit.errors import UsageError
from megatron_edit.flags import endpoint_text, flag, parse_endpoint
from megatron_edit.host.agreement import comparable_settings
from megatron_edit.host.checkpoint.loading import StartingPoint
from megatron_edit.observe.console import say

FORM_TIMEOUT = timedelta(seconds=15)
REACH_SECONDS = 30.0  # in which the hub must answer at the start: it may be starting itself
RETRY_SECONDS = 0.5
# Numbers of ranks, drawn at random: torch needs 16 bytes for each smaller one. Two equal ones among
# the ranks of a group make its forming fail.
NUMBERS = 1 << 20


def hub_of(config: EditConfig) -> HubAddress:
    """Return the hub's address, with the token.

    Raises:
        UsageError: the token cannot be read, or this machine cannot use TLS with it.
    """
    host, port = parse_endpoint(config.hub or "")
    token = read_token(flag("hub_token_file"), config.hub_token_file)
    tls_context(token, is_server=False)
    return HubAddress(host, port, token)


def check_hub(world: ReplicaWorld, config: EditConfig) -> None:
    """Check before training that this torch can run elastic replicas, and that the hub answers.

    Raises:
        UsageError: not so; on all ranks of the replica.
    """
    complaint = None
    if world.placement.rank == 0:
        try:
            check_torch()
            _reach(config)
        except UsageError as error:
            complaint = json.dumps([error.value, error.rule, error.remedy])
    if (shared := world.share_error("hub", complaint)) is not None:
        raise UsageError(*json.loads(shared))


def _reach(config: EditConfig) -> None:
    address, end = hub_of(config), time.monotonic() + REACH_SECONDS
    while True:
        try:
            query(address, b"status")
            return
        except (OSError, ChannelError) as error:
            if time.monotonic() + CONNECT_SECONDS > end or isinstance(error, ChannelError):
                raise UsageError(
                    f"{flag('hub')} {config.hub}",
                    f"no hub answers there ({error})",
                    "start one with megatron-edit hub, or check the address and the token",
                ) from error
        time.sleep(RETRY_SECONDS)


# Flags that a replica may be given otherwise when it is started again.
_MAY_CHANGE = ("--load", "--save", "--ckpt-step", "--save-interval", "--save-retain-interval",
               "--exit-interval", "--exit-duration-in-mins", "--log-interval")  # fmt: skip


def layout_digest(world: ReplicaWorld, config: EditConfig, args: Namespace) -> str:
    """Return a hash of all that must be equal on the replicas of a run."""
    settings = comparable_settings(config, args)
    for name in _MAY_CHANGE:
        settings.pop(name, None)
    settings["ranks per replica"] = world.placement.ranks_per_replica
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def join_hub(
    world: ReplicaWorld,
    device: torch.device,
    config: EditConfig,
    control: Group,
    layout: str,
    start: StartingPoint,
) -> ElasticParts:
    """Take part in the run; return once the hub has let this replica begin, or told it to join.

    Collective: the ranks of the replica; of the replicas that begin the run, all ranks of all.

    Args:
        control: all ranks of the replica, on the CPU.
        layout: `layout_digest`.
        start: where this replica begins.

    Raises:
        EditError: the hub does not let it take part.
    """
    address = hub_of(config)
    own_host = _own_address(address)
    transports = _transports(world, device, config, address, own_host)
    shared = SharedState()
    server = CopyServer(shared, address.token, own_host)
    membership = Membership(
        config.replica_name or "", None, control, transports, f"{own_host}:{server.port}"
    )
    membership.on_message = say
    handles = membership.handles()
    if control.rank == 0:
        hello = Hello(
            name=membership.name,
            incarnation=secrets.token_hex(8),
            layout=layout,
            nominal=config.nominal_replicas or 0,
            minimum=config.min_replicas,
            handles=handles,
            is_fresh=True,
            applied=start.round,
            digest=start.digest,
        )
        timeout = config.timeout_seconds or MIN_TIMEOUT_SECONDS
        membership.agent = Agent(address, hello, timeout)
        membership.agent.start()
    is_joining = membership.join()
    copies_moments = config.inner_state != RESET
    return ElasticParts(membership, address.token, shared, is_joining, copies_moments)


def _transports(
    world: ReplicaWorld,
    device: torch.device,
    config: EditConfig,
    address: HubAddress,
    own_host: str,
) -> Transports:
    client = StoreClient(address)
    # What `arrange` has chosen leads to the other ranks of this replica, not to other replicas.
    interface = "" if world.interface else os.environ.get(GLOO_INTERFACE, "").split(",")[0]

    def part() -> EpochGroup:
        store = HubStore(client, FORM_TIMEOUT)
        return EpochGroup(store, secrets.randbelow(NUMBERS), own_host, FORM_TIMEOUT, interface)

    def group(name: str, where: torch.device) -> Group:
        name = f"{name} group {world.placement.rank}"
        return Group(None, 0, 1, where, world.timeout, name, is_own=True)

    on_cpu = torch.device("cpu")
    num_parts = 1 + 2 * num_phases_of(config)
    return Transports(group("sync", device), group("meeting", on_cpu), part, num_parts)


def _own_address(hub: HubAddress) -> str:
    """Return this machine's address on the way to the hub. Sends nothing."""
    try:
        return route_address(hub.host, hub.port)
    except OSError as error:
        raise UsageError(
            f"{flag('hub')} {endpoint_text(hub.host, hub.port)}",
            f"this machine has no way there ({error})",
            "check the address",
            is_local=True,
        ) from error
