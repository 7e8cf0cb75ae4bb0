"""Megatron's TensorBoard and W&B writers, of which a failing one never ends a training.

Megatron calls them in the middle of `training_log` and of an evaluation, and holds them in two
global variables. There we put objects that hand every call on and keep its error to themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps

from megatron_edit.host.seams.megatron import TensorBoard
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.observe.console import warn

RETRY_SECONDS = 60.0  # between two attempts to open a writer anew


class SafeWriter:
    """Stands for a writer, whose failing calls are told once, and counted.

    Args:
        writer: a `SummaryWriter`, or the module `wandb`.
        name: for people.
        reopen: a new writer of the same kind, for one that does not recover by itself; it may fail,
            too.
    """

    def __init__(
        self, writer: object, name: str, reopen: Callable[[], object] | None = None
    ) -> None:
        self._writer = writer
        self._name = name
        self._reopen = reopen
        self._num_lost = 0
        self._reopens_at: float | None = None  # on a monotonic clock; None: it is open

    def __getattr__(self, name: str) -> object:
        found = getattr(self._writer, name)
        if name == "config":  # of W&B: an object with methods of its own
            return SafeWriter(found, self._name)
        if isinstance(found, type) or not callable(found):
            return found

        @wraps(found)
        def safe(*args: object, **kwargs: object) -> object:
            return self._call(name, args, kwargs)

        return safe

    def tell_of_losses(self) -> None:
        """At the end of training: say how many calls failed, if any did."""
        if self._num_lost:
            warn(f"{self._name}: {self._num_lost} calls failed, and what they wrote is lost")
            self._num_lost = 0

    def _call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        try:
            if self._is_open():
                return getattr(self._writer, name)(*args, **kwargs)
        except Exception as error:  # whatever it is, it is about a log
            if not self._num_lost:
                warn(f"{self._name} cannot be written ({_in_words(error)}); training goes on")
            if self._reopen is not None:
                self._reopens_at = time.monotonic() + RETRY_SECONDS
        self._num_lost += 1
        return None

    def _is_open(self) -> bool:
        """Whether there is a writer to call; one that has failed is opened anew now and then."""
        if self._reopens_at is None or self._reopen is None:
            return True
        if time.monotonic() < self._reopens_at:
            return False
        self._writer = self._reopen()
        self._reopens_at = None
        return True


def guard_writers(patcher: Patcher) -> list[SafeWriter]:
    """Put a `SafeWriter` in the place of each writer that this rank has; returns them.

    Args:
        patcher: undoes it.
    """
    from megatron.training import global_vars, wandb_utils

    guarded = []
    board, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if board is not None:
        guarded.append(SafeWriter(board, "TensorBoard", lambda: opened_anew(board)))
        patcher.replace(global_vars, "_GLOBAL_TENSORBOARD_WRITER", guarded[-1])
    if wandb is not None:
        guarded.append(SafeWriter(wandb, "W&B"))
        patcher.replace(global_vars, "_GLOBAL_WANDB_WRITER", guarded[-1])
        patcher.wrap(wandb_utils, "on_save_checkpoint_success", _without_errors)
    return guarded


def opened_anew(board: TensorBoard) -> TensorBoard:
    """A writer into the same folder; the thread of this one has ended with its first error."""
    from torch.utils.tensorboard import SummaryWriter

    writer: TensorBoard = SummaryWriter(log_dir=board.log_dir, max_queue=board.max_queue)
    return writer


def _without_errors[**P](record: Callable[P, None]) -> Callable[P, None]:
    """Telling W&B of a checkpoint, which is complete whatever W&B does."""

    @wraps(record)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception as error:
            warn(f"W&B could not be told of a checkpoint ({_in_words(error)}); training goes on")

    return told


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
