"""Do all replicas train with the same settings? Compared through the store, before training."""

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
from megatron_edit.flags import flag
from megatron_edit.observe.folder_lock import FolderLock

_OURS_APART = ("replica_id", "rendezvous", "log_dir", "log_units_to_tensorboard", "device")
# Megatron's arguments that may differ from host to host, or say where and what is written: by
# words of their names, or by the whole name. (`--q-lora-rank` is neither.)
_HOST_WORDS = frozenset(
    ("files", "filename", "cache", "port", "workers", "threads", "prefetch", "log", "logger",
     "logging", "wandb", "tensorboard", "profile", "profiler", "injector", "edit")
)  # fmt: skip
_HOST_ENDINGS = ("dir", "path", "file")  # of words: `--logdir`, too
_HOST_NAMES = frozenset(("rank", "local_rank"))


def agree_on_settings(
    world: ReplicaWorld, config: EditConfig, args: Namespace, device: torch.device
) -> None:
    """Compare this replica's settings with replica 0's; all replicas learn of a difference.

    Blocks: until every replica has said what it found.

    Args:
        world: this process's place, and the store that all share.
        config: our settings.
        args: Megatron's.
        device: that this rank trains on; the ranks of a replica may have chosen apart.

    Raises:
        UsageError: a setting or a device differs; on every rank of every replica.
    """
    place = world.placement
    if place.num_replicas * place.ranks_per_replica == 1:
        return
    world.shared_store.set(_device_key(place.replica, place.rank), _shown(device))
    mine = comparable(config, args) | {"ranks per replica": place.ranks_per_replica}
    first = json.loads(world.shared_text("settings", lambda: json.dumps(mine), JOIN_TIMEOUT))
    if place.rank == 0:
        # First: on another device Megatron's arguments differ, too.
        finding = _other_device(world) or _other_setting(first, mine, place.replica)
        world.shared_store.set(f"agreed/{place.replica}", json.dumps(finding))
    found = []
    for replica in range(place.num_replicas):
        world.wait_for(f"agreed/{replica}", JOIN_TIMEOUT)
        found.append(json.loads(world.shared_store.get(f"agreed/{replica}")))
    world.let_all_read("findings", JOIN_TIMEOUT)
    for finding in found:
        if finding is not None:
            raise UsageError(*finding)


def lock_log_dir(world: ReplicaWorld, lock: FolderLock | None) -> None:
    """Let this run alone write into its folder of event files; all ranks learn if it may not.

    Blocks: until the rank that locks has tried.

    Args:
        world: this process's place, and the store that all share.
        lock: of the rank that writes `run.json`, where it writes; else None.

    Raises:
        UsageError: another run writes there; on every rank of every replica.
    """
    found = None if lock is None else lock.take()
    complaint = None if found is None else json.dumps([found.value, found.rule, found.remedy])
    if (heard := world.agree("log folder", complaint)) is not None:
        raise UsageError(*json.loads(heard))


def _device_key(replica: int, rank: int) -> str:
    return f"device of rank {rank} of replica {replica}"


def _shown(device: torch.device) -> str:
    return f"{device.type} on {socket.gethostname()}"


def _other_device(world: ReplicaWorld) -> tuple[str, str, str] | None:
    """Value, rule and remedy of the first rank of this replica that trains on another device."""
    place, store = world.placement, world.shared_store
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


def comparable(config: EditConfig, args: Namespace) -> dict[str, object]:
    """All that must be the same on every replica, by flag, as JSON gives it back."""
    ours = {
        flag(name): value
        for name, value in dataclasses.asdict(config).items()
        if name not in _OURS_APART
    }
    theirs = {
        "--" + name.replace("_", "-"): value
        for name, value in vars(args).items()
        if isinstance(value, int | float | str | None) and not _is_of_a_host(name)
    }
    return json.loads(json.dumps(ours | theirs))  # type: ignore[no-any-return]


def _is_of_a_host(name: str) -> bool:
    words = name.split("_")
    is_place = any(word.endswith(_HOST_ENDINGS) for word in words)
    return name in _HOST_NAMES or is_place or not _HOST_WORDS.isdisjoint(words)


def _other_setting(
    first: dict[str, object], mine: dict[str, object], replica: int
) -> tuple[str, str, str] | None:
    """Value, rule and remedy of the first setting that is not as on replica 0."""
    for name in sorted(first.keys() | mine.keys()):
        theirs, value = first.get(name), mine.get(name)
        if theirs != value and not (theirs != theirs and value != value):  # NaN equals itself here
            return (
                f"{name} {value} on replica {replica}",
                f"must be as on replica 0, which has {theirs}",
                "start all replicas with the same flags",
            )
    return None
