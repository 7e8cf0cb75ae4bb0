"""Redirect Megatron to the folder of a replica's checkpoint while it is saved or loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_edit.checkpoint.folder import TRACKER, final_path
from megatron_edit.host.seams.patching import Patcher


def _is_not_overwrite_warning(record: logging.LogRecord) -> bool:
    """Drop Megatron's warning about a folder that is not empty: other replicas write there."""
    return "Overwriting old incomplete" not in record.getMessage()


class Redirection:
    """Replaces the paths that Megatron uses for the folder of a checkpoint and for the tracker."""

    def __init__(self) -> None:
        self._target: Path | None = None
        self._tracker: Path | None = None

    def attach(self, patcher: Patcher) -> None:
        """Wrap the functions from which Megatron takes these paths."""
        import megatron.training.checkpointing as checkpointing
        from megatron.training import wandb_utils

        patcher.wrap(checkpointing, "get_checkpoint_name", self._around_name)
        patcher.wrap(checkpointing, "get_checkpoint_tracker_filename", self._around_tracker)
        patcher.wrap(wandb_utils, "on_save_checkpoint_success", _around_artifact)

    @contextmanager
    def to(self, target: Path, *, is_save: bool = False) -> Iterator[None]:
        """Inside, Megatron finds the checkpoint of any iteration, and the tracker, in `target`.

        Args:
            target: a folder.
            is_save: whether it is written. Then the tracker goes to the null device: the
                checkpoint is not complete yet, and if its write failed on one rank only, the
                others would wait for that rank.
        """
        self._target = target
        self._tracker = Path(os.devnull) if is_save else target / TRACKER
        log = logging.getLogger("megatron.core.dist_checkpointing.serialization")
        log.addFilter(_is_not_overwrite_warning)
        try:
            yield
        finally:
            self._target = self._tracker = None
            log.removeFilter(_is_not_overwrite_warning)

    def _around_name[**P](self, name: Callable[P, str]) -> Callable[P, str]:
        @wraps(name)
        def redirected(*args: P.args, **kwargs: P.kwargs) -> str:
            return name(*args, **kwargs) if self._target is None else str(self._target)

        return redirected

    def _around_tracker[**P](self, tracker: Callable[P, str]) -> Callable[P, str]:
        @wraps(tracker)
        def redirected(*args: P.args, **kwargs: P.kwargs) -> str:
            return tracker(*args, **kwargs) if self._tracker is None else str(self._tracker)

        return redirected


@contextmanager
def without_retention() -> Iterator[None]:
    """Inside, Megatron removes no earlier checkpoint: the committer does, after the new one."""
    from megatron.training import get_args

    args = get_args()
    interval, args.save_retain_interval = getattr(args, "save_retain_interval", None), None
    try:
        yield
    finally:
        args.save_retain_interval = interval


def _around_artifact(log: Callable[..., None]) -> Callable[..., None]:
    from megatron.training.global_vars import get_wandb_writer

    @wraps(log)
    def logged(checkpoint_path: str, tracker: str, save_dir: str, iteration: int) -> None:
        writer = get_wandb_writer()
        if not writer or writer.run is None:
            return  # Megatron closes it before the last asynchronous save is written
        final = str(final_path(Path(checkpoint_path)))  # its path after the commit
        with TemporaryDirectory() as folder:  # another rank writes the tracker, perhaps later
            own = Path(folder) / TRACKER
            own.write_text(str(iteration), encoding="utf-8")
            log(final, str(own), save_dir, iteration)

    return logged
