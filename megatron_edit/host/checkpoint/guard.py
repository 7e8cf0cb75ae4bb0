"""Megatron's load, whose complaints become lines for people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import EditError, UsageError

_REMEDIES = (
    ("OptimizerParamScheduler", "give the schedule that was saved (--train-iters, --lr-decay-iters "
     "and the like), or --override-opt_param-scheduler for the new one"),
)  # fmt: skip


def guarded[R](load: Callable[[], R], path: Path | None, world: ReplicaWorld) -> R:
    """Megatron's load. It asserts, raises or exits with 0 on what it cannot use.

    Args:
        load: Megatron's.
        path: what it loads; None for nothing yet.
        world: the first rank speaks, if it fails, too.

    Raises:
        UsageError: it cannot use what it found.
    """
    try:
        with torch.no_grad():
            return load()
    except EditError:
        raise
    except (Exception, SystemExit, CheckpointException) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        remedies = (remedy for words, remedy in _REMEDIES if words in first)
        raise UsageError(
            f"--load {'' if path is None else path}".rstrip(),
            f"Megatron cannot load it: {type(error).__name__} {first}".rstrip(),
            next(remedies, REMEDY),
            is_local=not world.first_rank_announces("load/failed"),
        ) from error
