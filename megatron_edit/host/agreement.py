"""Do all replicas train with the same settings? Compared through the store, before training."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace

from megatron_edit.comm.worlds import JOIN_TIMEOUT, ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag

_OURS_APART = ("replica_id", "rendezvous", "log_dir", "log_units_to_tensorboard", "device")
# Megatron's arguments that may differ from host to host, or say where and what is written: by
# words of their names, or by the whole name. (`--q-lora-rank` is neither.)
_HOST_WORDS = frozenset(
    ("files", "filename", "cache", "port", "workers", "threads", "prefetch", "log", "logger",
     "logging", "wandb", "tensorboard", "profile", "profiler", "injector", "edit")
)  # fmt: skip
_HOST_ENDINGS = ("dir", "path", "file")  # of words: `--logdir`, too
_HOST_NAMES = frozenset(("rank", "local_rank"))


def agree_on_settings(world: ReplicaWorld, config: EditConfig, args: Namespace) -> None:
    """Compare this replica's settings with replica 0's; all replicas learn of a difference.

    Blocks: until every replica has said what it found.

    Raises:
        UsageError: a setting differs; on every rank of every replica.
    """
    place = world.placement
    if place.num_replicas == 1:
        return
    mine = comparable(config, args) | {"ranks per replica": place.ranks_per_replica}
    first = json.loads(world.shared_text("settings", lambda: json.dumps(mine), JOIN_TIMEOUT))
    if place.rank == 0:
        world.shared_store.set(f"agreed/{place.replica}", json.dumps(_difference(first, mine)))
    found = []
    for replica in range(place.num_replicas):
        world.wait_for(f"agreed/{replica}", JOIN_TIMEOUT)
        found.append(json.loads(world.shared_store.get(f"agreed/{replica}")))
    world.let_all_read("findings", JOIN_TIMEOUT)
    for replica, difference in enumerate(found):
        if difference is not None:
            name, theirs, other = difference
            raise UsageError(
                f"{name} {other} on replica {replica}",
                f"must be as on replica 0, which has {theirs}",
                "start all replicas with the same flags",
            )


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


def _difference(
    first: dict[str, object], mine: dict[str, object]
) -> tuple[str, object, object] | None:
    for name in sorted(first.keys() | mine.keys()):
        theirs, value = first.get(name), mine.get(name)
        if theirs != value and not (theirs != theirs and value != value):  # NaN equals itself here
            return name, theirs, value
    return None
