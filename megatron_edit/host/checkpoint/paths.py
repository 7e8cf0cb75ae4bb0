"""Where Megatron writes and reads a checkpoint, while one of a replica is being saved or loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint.folder import TRACKER
from megatron_edit.host.patching import Patcher


def _not_of_an_old_checkpoint(record: logging.LogRecord) -> bool:
    """Megatron warns of a folder that is not empty: other replicas have begun to write theirs."""
    return "Overwriting old incomplete" not in record.getMessage()


class Redirection:
    """Gives Megatron other names for the folder of a checkpoint and for the tracker.

    Args:
        patcher: undoes it.
    """

    def __init__(self, patcher: Patcher) -> None:
        import megatron.training.checkpointing as checkpointing

        self._target: Path | None = None
        patcher.wrap(checkpointing, "get_checkpoint_name", self._around_name)
        patcher.wrap(checkpointing, "get_checkpoint_tracker_filename", self._around_tracker)

    @contextmanager
    def to(self, target: Path) -> Iterator[None]:
        """Inside, Megatron's checkpoint of any iteration lies in `target`, its tracker, too."""
        self._target = target
        log = logging.getLogger("megatron.core.dist_checkpointing.serialization")
        log.addFilter(_not_of_an_old_checkpoint)
        try:
            yield
        finally:
            self._target = None
            log.removeFilter(_not_of_an_old_checkpoint)

    def _around_name(self, name: Callable[..., str]) -> Callable[..., str]:
        @wraps(name)
        def redirected(*args: Any, **kwargs: Any) -> str:
            return name(*args, **kwargs) if self._target is None else str(self._target)

        return redirected

    def _around_tracker(self, tracker: Callable[..., str]) -> Callable[..., str]:
        @wraps(tracker)
        def redirected(*args: Any, **kwargs: Any) -> str:
            if self._target is None:
                return tracker(*args, **kwargs)
            return str(self._target / TRACKER)

        return redirected
