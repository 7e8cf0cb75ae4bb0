"""Folders of checkpoints: one for each replica. Imports no Megatron."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_edit.comm.placement import Placement
from megatron_edit.errors import UsageError

REPLICA = re.compile(r"^replica-(\d+)$")


def folder_of_replica(folder: str, replica: int) -> str:
    """Return the folder of a replica's checkpoints."""
    return str(Path(folder) / f"replica-{replica}")


def folder_to_load(folder: str, place: Placement) -> str:
    """Return the folder that this replica loads: its own, or that of stock Megatron-Bridge.

    Args:
        folder: value of `checkpoint.load`.

    Raises:
        UsageError: it has the checkpoints of another number of replicas.
    """
    path = Path(folder)
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    replicas = sorted(int(found[1]) for name in names if (found := REPLICA.match(name)))
    if not replicas:
        return folder
    if replicas != list(range(place.num_replicas)):
        raise UsageError(
            f"checkpoint.load {folder}",
            f"has the checkpoints of {len(replicas)} replicas, this run has {place.num_replicas}",
            "resume with the same number of replicas",
        )
    return folder_of_replica(folder, place.replica)
