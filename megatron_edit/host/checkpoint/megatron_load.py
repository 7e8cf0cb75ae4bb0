"""Megatron's load, with its errors turned into one-line messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import EditError, UsageError


def call_megatron_load[R](load: Callable[[], R], path: Path | None, world: ReplicaWorld) -> R:
    """Call Megatron's load, which asserts, raises or exits with 0 on invalid checkpoints.

    Args:
        load: Megatron's.
        path: of the checkpoint; None if there is none.
        world: if global rank 0 fails, too, only it prints the message.

    Raises:
        UsageError: Megatron cannot load it.
    """
    try:
        with torch.no_grad():
            return load()
    except EditError:
        raise
    except (Exception, SystemExit, CheckpointException) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"--load {'' if path is None else path}".rstrip(),
            f"Megatron cannot load it: {type(error).__name__} {first}".rstrip(),
            REMEDY,
            is_local=not world.is_announced_by_first_rank("load/failed"),
        ) from error
