"""Makes the description of a run in `run.json`: resolved settings, versions, topology."""

from __future__ import annotations

import dataclasses
import platform
import socket
import sys
from typing import Any

import torch

from megatron_edit import __version__
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.host.seams.probes import megatron_version


def describe(
    config: EditConfig, world: ReplicaWorld, device: torch.device, sync_mode: str
) -> dict[str, Any]:
    """Return the content of `run.json`; only the rank that writes it knows the hosts.

    Args:
        config: settings with presets; `sync_mode` and `num_replicas` are written resolved.
        world: placement of this process, and the hosts of all ranks.
        device: device of the parameters.
        sync_mode: resolved `--edit-sync-mode`.
    """
    placement = world.placement
    return {
        "config": {
            **dataclasses.asdict(config),
            "sync_mode": sync_mode,
            "num_replicas": placement.num_replicas,
        },
        "requested_sync_mode": config.sync_mode,
        "versions": versions(),
        "topology": {
            "num_replicas": placement.num_replicas,
            "ranks_per_replica": placement.ranks_per_replica,
            "single_launch": placement.is_single_launch,
            "device": device.type,
            "host": socket.gethostname(),
            "hosts": world.host_counts() if placement.is_writer else None,
        },
        "argv": sys.argv,
    }


def versions() -> dict[str, str]:
    """Return the versions of the software that affects numerical results."""
    return {
        "megatron_edit": __version__,
        "megatron_core": megatron_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
