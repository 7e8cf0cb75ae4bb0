"""Megatron's load, with its errors turned into one-line messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import EditError, UsageError

# What Megatron's loads raise; torch's is not an `Exception`.
LOAD_ERRORS = (Exception, SystemExit, CheckpointException)


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
    except LOAD_ERRORS as error:
        is_local = not world.is_announced_by_first_rank("load/failed")
        raise load_failure(path, error, is_local=is_local) from error


def load_failure(path: Path | None, error: BaseException, *, is_local: bool = False) -> UsageError:
    """Return one line for what Megatron raised.

    Args:
        path: of the checkpoint; None if there is none.
        error: one of `LOAD_ERRORS`.
        is_local: whether only this process reports it.
    """
    first = (str(error).strip().splitlines() or [""])[0]
    return UsageError(
        f"--load {'' if path is None else path}".rstrip(),
        f"Megatron cannot load it: {type(error).__name__} {first}".rstrip(),
        REMEDY,
        is_local=is_local,
    )
