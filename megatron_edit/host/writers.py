"""Keeps errors of Megatron's TensorBoard and W&B writers from ending a training.

Megatron calls the writers in `training_log` and in evaluations, and stores them in two global
variables. These are replaced by objects that forward every call and catch its errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps

from megatron_edit.host.seams.megatron import TensorBoard
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.observe.console import warn

RETRY_SECONDS = 60.0  # between two attempts to reopen a writer


class SafeWriter:
    """Proxy of a writer that warns once about failing calls, and counts them.

    Args:
        writer: a `SummaryWriter`, or the module `wandb`.
        name: name of the writer in messages.
        reopen: makes a replacement for a writer that does not recover by itself; it may fail, too.
    """

    def __init__(
        self, writer: object, name: str, reopen: Callable[[], object] | None = None
    ) -> None:
        self._writer = writer
        self._name = name
        self._reopen = reopen
        self._num_lost = 0
        self._reopens_at: float | None = None  # monotonic time; None: the writer is open

    def __getattr__(self, name: str) -> object:
        found = getattr(self._writer, name)
        if name == "config":  # of W&B: an object with methods
            return SafeWriter(found, self._name)
        if isinstance(found, type) or not callable(found):
            return found

        @wraps(found)
        def safe(*args: object, **kwargs: object) -> object:
            return self._call(name, args, kwargs)

        return safe

    def report_lost_writes(self) -> None:
        """Warn at the end of training about the number of failed calls, if any."""
        if self._num_lost:
            warn(f"{self._name}: {self._num_lost} calls failed, and what they wrote is lost")
            self._num_lost = 0

    def _call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        try:
            if self._is_open():
                return getattr(self._writer, name)(*args, **kwargs)
        except Exception as error:  # logging must not stop training, whatever the error
            if not self._num_lost:
                warn(f"{self._name} cannot be written ({_in_words(error)}); training goes on")
            if self._reopen is not None:
                self._reopens_at = time.monotonic() + RETRY_SECONDS
        self._num_lost += 1
        return None

    def _is_open(self) -> bool:
        """Whether the writer can be called; reopen a failed one every `RETRY_SECONDS`."""
        if self._reopens_at is None or self._reopen is None:
            return True
        if time.monotonic() < self._reopens_at:
            return False
        self._writer = self._reopen()
        self._reopens_at = None
        return True


def guard_writers(patcher: Patcher) -> list[SafeWriter]:
    """Replace each writer of this rank by a `SafeWriter`, and return these.

    Args:
        patcher: restores the writers.
    """
    from megatron.training import global_vars, wandb_utils

    guarded = []
    board, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if board is not None:
        guarded.append(SafeWriter(board, "TensorBoard", lambda: reopen_writer(board)))
        patcher.replace(global_vars, "_GLOBAL_TENSORBOARD_WRITER", guarded[-1])
    if wandb is not None:
        guarded.append(SafeWriter(wandb, "W&B"))
        patcher.replace(global_vars, "_GLOBAL_WANDB_WRITER", guarded[-1])
        patcher.wrap(wandb_utils, "on_save_checkpoint_success", _without_errors)
    return guarded


def reopen_writer(board: TensorBoard) -> TensorBoard:
    """Open a new writer to the same folder; the old one's thread ended with its first error."""
    from torch.utils.tensorboard import SummaryWriter

    writer: TensorBoard = SummaryWriter(log_dir=board.log_dir, max_queue=board.max_queue)
    return writer


def _without_errors[**P](record: Callable[P, None]) -> Callable[P, None]:
    """Wrap the report of a checkpoint to W&B, whose failure does not affect the checkpoint."""

    @wraps(record)
    def reported(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception as error:
            warn(
                f"a checkpoint could not be reported to W&B ({_in_words(error)}); training goes on"
            )

    return reported


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
