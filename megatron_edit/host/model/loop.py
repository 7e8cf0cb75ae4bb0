"""Controls Megatron's training loop if replicas make different numbers of steps (A-EDiT).

The loop counts this replica's own iterations. The user's settings in global batches (when to end,
evaluate, save or exit) are applied to the samples of all replicas together, at the sync at which
these cross a multiple of the interval; between syncs the intervals are hidden from the loop. Logs
count the samples of all replicas, too (`host/model/progress.py`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.host.seams.megatron import ParamScheduler

_INTERVALS = ("eval_interval", "save_interval", "non_persistent_save_interval", "exit_interval")
_FIRST_EVALUATION = "start_eval_at_iter"
_OVERRIDDEN = (*_INTERVALS, _FIRST_EVALUATION, "train_iters")


@dataclass
class LoopControl:
    """Overrides Megatron's arguments while replicas run at their own speeds.

    Attributes:
        args: Megatron's arguments, which its loop reads at every iteration.
        scheduler: Megatron's `OptimizerParamScheduler`.
    """

    args: Namespace
    scheduler: ParamScheduler
    _given: dict[str, Any] = field(default_factory=dict)
    _samples: int = 0
    _has_begun: bool = False  # whether the loop has begun its first step

    def override_intervals(self, samples: int, *, is_over: bool) -> None:
        """Override the intervals from the switch on; what is due at the step of the switch happens.

        Args:
            samples: samples consumed by all replicas so far.
            is_over: whether training ends here.
        """
        self._given = {name: getattr(self.args, name, None) for name in _OVERRIDDEN}
        self._samples = samples
        if is_over:
            self._end()

    def begin_step(self) -> None:
        """Hide the intervals again at the beginning of an optimizer step, and continue training."""
        self._has_begun = True
        if self._given:
            self._hide_intervals()
            self.args.train_iters = max(self._given["train_iters"], self._iteration + 1)

    def end_round(
        self, samples: int, pending: int, *, is_over: bool, next_meeting_without_step: bool
    ) -> None:
        """Update Megatron's counters after a meeting, which takes place inside an optimizer step.

        Args:
            samples: samples consumed by all replicas so far.
            pending: samples by which Megatron will advance the schedule after the step.
            is_over: whether training ends here.
            next_meeting_without_step: whether a replica joins the next meeting without a step.
                What is due now is then postponed to that meeting, because no joint action of all
                replicas can take place in between.
        """
        # Before the loop begins, outside of a step, Megatron will add nothing.
        batch = self.args.global_batch_size if self._has_begun else 0
        if not next_meeting_without_step:
            self._reveal_intervals(samples, self.args.global_batch_size)
        self.scheduler.num_steps = samples - pending
        self.scheduler.step(increment=0)
        self.args.consumed_train_samples = samples - batch  # Megatron will add one batch
        if is_over:
            self._end()

    @contextmanager
    def with_global_iterations(self, iteration: int) -> Iterator[None]:
        """Let Megatron's arguments count global iterations inside the context.

        `train_iters` is the user's; intervals due at the loop's current iteration are due at
        `iteration`.

        Args:
            iteration: complete global batches consumed by all replicas.
        """
        # Not all are in Megatron 0.16.
        kept: dict[str, Any] = {name: getattr(self.args, name, None) for name in self._given}
        for name in kept.keys() & set(_INTERVALS):
            if kept[name] and self._iteration % kept[name] == 0:
                setattr(self.args, name, iteration)
        self.args.train_iters = self.train_iters
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self.args, name, value)

    @property
    def train_iters(self) -> int:
        """The user's number of iterations: global batches of the whole training."""
        return int(self._given.get("train_iters", self.args.train_iters))

    def release(self) -> None:
        """Restore the user's arguments. Idempotent."""
        for name, value in self._given.items():
            setattr(self.args, name, value)
        self._given = {}

    @property
    def _iteration(self) -> int:
        """Number of the current iteration, from 1."""
        return int(self.args.curr_iteration) + 1

    def _reveal_intervals(self, samples: int, batch: int) -> None:
        """Make the current iteration a multiple of the intervals that the samples crossed."""
        before, self._samples = self._samples, samples
        for name in _INTERVALS:
            interval = self._given[name]
            if interval and before // (interval * batch) < samples // (interval * batch):
                setattr(self.args, name, self._iteration)
        first = self._given[_FIRST_EVALUATION]
        if first is not None and samples < first * batch:
            self.args.eval_interval = None

    def _hide_intervals(self) -> None:
        for name in (*_INTERVALS, _FIRST_EVALUATION):
            setattr(self.args, name, None)

    def _end(self) -> None:
        # At a switch before the first step there is no iteration yet; the loop then does not run.
        self.args.train_iters = self._iteration if self._has_begun else self.args.iteration
