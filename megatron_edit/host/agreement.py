"""Compares the settings and devices of all replicas through the store, before training."""

from __future__ import annotations

import dataclasses
import json
import socket
from argparse import Namespace

import torch
import torch.distributed as dist

from megatron_edit.comm.worlds import JOIN_TIMEOUT, ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag, flag_of
from megatron_edit.observe.folder_lock import FolderLock

_PER_REPLICA_SETTINGS = (
    "replica_id",
    "replica_name",
    "rendezvous",
    "hub",
    "hub_token_file",
    "log_dir",
    "log_units_to_tensorboard",
    "device",
    "placement",
    "telemetry",
    "metrics_port",
    "mlflow_experiment",
    "settings",
)
# Megatron's arguments that may differ between hosts, or concern outputs: by words of their names,
# or by the complete name. (`--q-lora-rank` is neither.)
_HOST_WORDS = frozenset(
    ("files", "filename", "cache", "port", "workers", "threads", "prefetch", "log", "logger",
     "logging", "wandb", "tensorboard", "profile", "profiler", "injector", "edit")
)  # fmt: skip
_HOST_ENDINGS = ("dir", "path", "file")  # of words, as in `--logdir`
_HOST_NAMES = frozenset(("rank", "local_rank"))


def agree_on_settings(
    world: ReplicaWorld, config: EditConfig, args: Namespace, device: torch.device
) -> None:
    """Compare this replica's settings with replica 0's, and report differences to all replicas.

    Blocks: until every replica has published its result.

    Args:
        world: placement of this process, and the store that all replicas share.
        args: Megatron's arguments.
        device: device of this rank; the ranks of a replica may have chosen different ones.

    Raises:
        UsageError: a setting or a device differs; raised on every rank of every replica.
    """
    place = world.scope
    if place.num_replicas * place.ranks_per_replica == 1:
        return
    world.shared_store.set(_device_key(place.replica, place.rank), _shown(device))
    if place.rank == 0:
        mine = comparable_settings(config, args) | {"ranks per replica": place.ranks_per_replica}
        first = json.loads(world.shared_text("settings", lambda: json.dumps(mine), JOIN_TIMEOUT))
        # Devices first: Megatron's arguments differ between devices.
        finding = _device_mismatch(world) or _setting_mismatch(first, mine, place.replica)
        world.shared_store.set(f"agreed/{place.replica}", json.dumps(finding))
    found = json.loads(world.text_of_replicas("agreed", JOIN_TIMEOUT, _first_finding))
    world.wait_for_all_readers("findings", JOIN_TIMEOUT)
    if found is not None:
        raise UsageError(*found)


def _first_finding(texts: list[str]) -> str:
    return next((text for text in texts if json.loads(text) is not None), "null")


def lock_log_dir(world: ReplicaWorld, lock: FolderLock | None) -> None:
    """Lock the folder of event files for this run, and report a failure to all ranks.

    Blocks: until the rank that takes the lock has tried.

    Args:
        world: placement of this process, and the store that all replicas share.
        lock: the lock, on the rank that writes `run.json`, if it writes; else None.

    Raises:
        UsageError: another run uses the folder; raised on every rank of every replica.
    """
    found = None if lock is None else lock.acquire()
    complaint = None if found is None else json.dumps([found.value, found.rule, found.remedy])
    if (shared := world.share_error("log folder", complaint)) is not None:
        raise UsageError(*json.loads(shared))


def _device_key(replica: int, rank: int) -> str:
    return f"device of rank {rank} of replica {replica}"


def _shown(device: torch.device) -> str:
    return f"{device.type} on {socket.gethostname()}"


def _device_mismatch(world: ReplicaWorld) -> tuple[str, str, str] | None:
    """Return value, rule and remedy for the first rank whose device differs from replica 0's."""
    place, store = world.scope, world.shared_store
    theirs = _device_of(store, 0, 0)
    for rank in range(place.ranks_per_replica):
        key = _device_key(place.replica, rank)
        world.wait_for(key, JOIN_TIMEOUT, replica=place.replica)
        mine = _device_of(store, place.replica, rank)
        if mine.partition(" ")[0] != theirs.partition(" ")[0]:
            return (
                f"{key}: {mine}",
                f"must be as that of rank 0 of replica 0, which has {theirs}",
                "give every rank a GPU that its torch can use, or train all on the CPU with "
                f"{flag('device')} cpu",
            )
    return None


def _device_of(store: dist.Store, replica: int, rank: int) -> str:
    return str(store.get(_device_key(replica, rank)).decode())


def comparable_settings(config: EditConfig, args: Namespace) -> dict[str, object]:
    """Return all settings that must be equal on all replicas, by flag, as read back from JSON."""
    ours = {
        flag(name): value
        for name, value in dataclasses.asdict(config).items()
        if name not in _PER_REPLICA_SETTINGS
    }
    theirs = {
        flag_of(name): value
        for name, value in vars(args).items()
        if isinstance(value, int | float | str | None) and not _may_differ_between_hosts(name)
    }
    return json.loads(json.dumps(ours | theirs))


def _may_differ_between_hosts(name: str) -> bool:
    words = name.split("_")
    is_place = any(word.endswith(_HOST_ENDINGS) for word in words)
    return name in _HOST_NAMES or is_place or not _HOST_WORDS.isdisjoint(words)


def _setting_mismatch(
    first: dict[str, object], mine: dict[str, object], replica: int
) -> tuple[str, str, str] | None:
    """Return value, rule and remedy for the first setting that differs from replica 0's."""
    for name in sorted(first.keys() | mine.keys()):
        theirs, value = first.get(name), mine.get(name)
        if theirs != value and not (theirs != theirs and value != value):  # two NaNs count as equal
            return (
                f"{name} {value} on replica {replica}",
                f"must be as on replica 0, which has {theirs}",
                "start all replicas with the same flags",
            )
    return None
